//! Attempts to connect.
//!
//! NCCL calls `connect` with the same handle until it gets a comm; the attempt's number is kept in the handle. An
//! attempt may be left for good at any moment: those that nobody asks about for long are dropped by later ones.
//! Invariant: no call waits.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use ferrywire::sys::socket;
use ferrywire::transport::tcp::TcpTransport;
use ferrywire::transport::{Conn, ConnOptions, Nic, Transport};

use crate::comm::{Comm, SendComm};
use crate::device::Device;
use crate::failure::{Fault, Outcome};
use crate::handle::{HANDLE_BYTES_USED, Handle, Secret};
use crate::proof::{self, Claim, Dialling};
use crate::settings::settings;

/// An attempt that nobody asks about for so long was left.
const LEFT_AFTER: Duration = Duration::from_secs(600);

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
}

struct Attempts {
    made: u64,
    under_way: Option<HashMap<u64, Attempt>>,
}

static ATTEMPTS: Mutex<Attempts> = Mutex::new(Attempts { made: 0, under_way: None });

/// One call of `connect`: a comm, or nothing yet. The handle's memory remembers the attempt.
pub fn connect(device: &Device, bytes: &mut [u8; HANDLE_BYTES_USED]) -> Outcome<Option<Box<Comm>>> {
    let handle = Handle::from_bytes(bytes);
    let mut handle = handle.ok_or_else(|| Fault::usage("the handle is not one of this plugin"))?;
    let mut attempt = match handle.attempt {
        0 => Attempt::begin(device, &handle)?,
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
    let mut attempts = ATTEMPTS.lock().unwrap_or_else(PoisonError::into_inner);
    attempts.under_way.as_mut()?.remove(&number)
}

/// Keeps an attempt under its number; a new one is given one.
fn put_back(number: u64, mut attempt: Attempt) -> u64 {
    attempt.asked = Instant::now();
    let mut attempts = ATTEMPTS.lock().unwrap_or_else(PoisonError::into_inner);
    let attempts = &mut *attempts;
    let under_way = attempts.under_way.get_or_insert_default();
    if number != 0 {
        under_way.insert(number, attempt);
        return number;
    }
    under_way.retain(|_, other| other.asked.elapsed() < LEFT_AFTER);
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
        Ok(Attempt { secret: handle.secret, dialling, conns, asked: Instant::now() })
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
