//! Attempts to connect.
//!
//! NCCL calls `connect` with the same handle until it gets a comm; the attempt's number is kept in the handle. An
//! attempt may be left for good at any moment: those that nobody asks about for long are dropped by what is called next
//! for any comm or listener.
//! Its life: asked about -> (long not asked about ->) doubted -> dropped | asked about again.
//! Invariant: no call waits.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use ferrywire::sys::socket;
use ferrywire::transport::tcp::TcpTransport;
use ferrywire::transport::{Conn, ConnOptions, Nic, Transport};

use crate::comm::{Comm, locked};
use crate::device::Device;
use crate::failure::{Fault, Outcome};
use crate::handle::{HANDLE_BYTES_USED, Handle, Secret};
use crate::proof::{self, Claim, Dialling};
use crate::sending::SendComm;
use crate::settings::settings;

/// An attempt that nobody asks about for so long may have been left,
const LEFT_AFTER: Duration = Duration::from_secs(30);
/// unless it is asked about within this time: the whole process may have been stopped.
const DOUBTED_FOR: Duration = Duration::from_secs(5);

/// How data connections are tuned.
pub fn data_options() -> ConnOptions {
    ConnOptions { bulk: true, ..ConnOptions::default() }
}

/// Lets the kernel give up a connection that waits for a host that is gone, after a minute and not before: for
/// NCCL, which cannot go on after an error, the transport's own few seconds are too short.
pub fn be_patient(conn: &dyn Conn) {
    const SECONDS: [(i32, i32); 3] =
        [(libc::TCP_KEEPIDLE, 20), (libc::TCP_KEEPINTVL, 10), (libc::TCP_KEEPCNT, 4)];
    if let Some(fd) = conn.fd() {
        // Without it the connection is given up sooner.
        SECONDS.iter().for_each(|&(name, value)| drop(socket::set_int(fd, libc::IPPROTO_TCP, name, value)));
    }
}

struct Attempt {
    secret: Secret,
    dialling: Vec<Dialling>,
    conns: Vec<Option<Box<dyn Conn>>>,
    asked: Instant,
    doubted: Option<Instant>,
}

struct Attempts {
    made: u64,
    under_way: Option<HashMap<u64, Attempt>>,
}

static ATTEMPTS: Mutex<Attempts> = Mutex::new(Attempts { made: 0, under_way: None });

/// Closes the connections of attempts that were left.
pub fn sweep() {
    let mut attempts = locked(&ATTEMPTS);
    let left = attempts.under_way.as_mut().map(|under_way| swept(under_way, Instant::now()));
    drop(attempts);
    drop(left);
}

/// Takes out what was left by now.
fn swept(under_way: &mut HashMap<u64, Attempt>, now: Instant) -> Vec<Attempt> {
    let left = under_way.extract_if(|_, attempt| attempt.is_left(now));
    left.map(|(_, attempt)| attempt).collect()
}

/// One call of `connect`: a comm, or nothing yet. The handle's memory remembers the attempt.
pub fn connect(device: &Device, bytes: &mut [u8; HANDLE_BYTES_USED]) -> Outcome<Option<Box<Comm>>> {
    let handle = Handle::from_bytes(bytes);
    let mut handle = handle.ok_or_else(|| Fault::usage("the handle is not one of this plugin"))?;
    let mut attempt = match handle.attempt {
        0 => {
            sweep();
            Attempt::begin(device, &handle)?
        }
        number => take(number).ok_or_else(|| Fault::usage("the handle is of an attempt that has ended"))?,
    };
    let polled = attempt.poll();
    handle.attempt = match polled {
        Ok(false) => put_back(handle.attempt, attempt),
        Ok(true) => {
            *bytes = Handle { attempt: 0, ..handle }.to_bytes();
            return Ok(Some(SendComm::open(attempt.conns.into_iter().flatten().collect())?));
        }
        Err(_) => 0,
    };
    *bytes = handle.to_bytes();
    polled.map(|_| None)
}

fn take(number: u64) -> Option<Attempt> {
    locked(&ATTEMPTS).under_way.as_mut()?.remove(&number)
}

/// Keeps an attempt under its number; a new one is given one.
fn put_back(number: u64, mut attempt: Attempt) -> u64 {
    attempt.asked = Instant::now();
    attempt.doubted = None;
    let mut attempts = locked(&ATTEMPTS);
    let attempts = &mut *attempts;
    let under_way = attempts.under_way.get_or_insert_default();
    if number != 0 {
        under_way.insert(number, attempt);
        return number;
    }
    attempts.made += 1;
    under_way.insert(attempts.made, attempt);
    attempts.made
}

impl Attempt {
    fn begin(device: &Device, handle: &Handle) -> Outcome<Attempt> {
        let sockets = settings().sockets as u16 + 1;
        let comm = proof::random().map_err(|e| Fault::system("random bytes", &e))?;
        let dial = |index| {
            let conn = dial(&device.nic, handle)?;
            Ok(Dialling::new(conn, Claim { comm, index, sockets }))
        };
        let dialling = (0..sockets).map(dial).collect::<Outcome<Vec<_>>>()?;
        let conns = dialling.iter().map(|_| None).collect();
        Ok(Attempt { secret: handle.secret, dialling, conns, asked: Instant::now(), doubted: None })
    }

    /// Whether it was left; the first to find that so long nobody asked only doubts it.
    fn is_left(&mut self, now: Instant) -> bool {
        if now.duration_since(self.asked) < LEFT_AFTER {
            return false;
        }
        now.duration_since(*self.doubted.get_or_insert(now)) >= DOUBTED_FOR
    }

    /// Whether all connections stand.
    fn poll(&mut self) -> Outcome<bool> {
        for (dialling, conn) in self.dialling.iter_mut().zip(&mut self.conns) {
            if conn.is_none() {
                *conn = dialling.poll(&self.secret)?;
            }
        }
        Ok(self.conns.iter().all(Option::is_some))
    }
}

/// Over the device's NIC where it has the peer in its subnet; else the routing table knows better.
fn dial(nic: &Nic, handle: &Handle) -> Outcome<Box<dyn Conn>> {
    let nic = Some(nic).filter(|nic| nic.reaches(handle.address.ip()));
    TcpTransport::default()
        .dial(nic, handle.address, &data_options())
        .map_err(|e| Fault::connection(handle.address, &e))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked_about(asked: Instant) -> Attempt {
        Attempt { secret: [0; 32], dialling: Vec::new(), conns: Vec::new(), asked, doubted: None }
    }

    #[test]
    fn an_attempt_that_was_left_is_dropped_and_one_of_a_stopped_process_is_not() {
        let start = Instant::now();
        let mut under_way = HashMap::from([(1, asked_about(start)), (2, asked_about(start))]);
        assert!(swept(&mut under_way, start + LEFT_AFTER / 2).is_empty());
        // The process was stopped; it goes on, and one of both is asked about.
        let later = start + LEFT_AFTER * 3;
        assert!(swept(&mut under_way, later).is_empty());
        under_way.insert(2, asked_about(later));
        assert!(swept(&mut under_way, later + DOUBTED_FOR / 2).is_empty());
        assert_eq!(swept(&mut under_way, later + DOUBTED_FOR).len(), 1);
        assert_eq!(under_way.into_keys().collect::<Vec<_>>(), [2]);
    }
}
