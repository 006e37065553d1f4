//! Attempts of NCCL to connect to a listener.
//!
//! NCCL calls `connect` with the same handle until it gets a comm; the handle stores the attempt's number. NCCL may
//! abandon an attempt at any time, and never call again. A thread and each call for a comm or listener drop abandoned
//! attempts, so their sockets are closed within [`LEFT_AFTER`], [`DOUBTED_FOR`] and two [`sweeper::INTERVAL`]. An attempt's
//! life: polled -> (not polled for long, or its communicator has ended ->) doubted -> dropped | polled again.
//!
//! With several pairs of NICs, a pair over which the peer is unreachable is left out, and the others are dialled again
//! as a new comm, because each socket proves how many sockets its comm has. Pairs that were unreachable for other comms
//! are spares: they are dialled only after the others have failed too. Invariants: no call waits; the last pair is
//! never left out, and its error is the attempt's error.

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use ferrywire_net::{Conn, ConnOptions, Transport};
use ferrywire_sys::{nics, socket};

use crate::comm::{Comm, locked};
use crate::device::{Device, network};
use crate::encryption::shared_key;
use crate::failure::{Fault, Outcome, is_short};
use crate::handle::{self, Handle, Secret};
use crate::log;
use crate::pairs::{Pair, pairs};
use crate::proof::{self, Claim, Dialling};
use crate::sending::SendComm;
use crate::settings::settings;
use crate::sweeper;
use crate::unreachable_paths;

/// Time without a poll after which an attempt may be abandoned.
const LEFT_AFTER: Duration = Duration::from_secs(30);
/// Time for which an attempt or a listener is kept after it was found unpolled: the whole process may have been stopped.
pub const DOUBTED_FOR: Duration = Duration::from_secs(5);
/// Time within which the peer's kernel must answer a pair of NICs if it has answered another pair; else the pair is
/// left out.
const ANSWERED_WITHIN: Duration = Duration::from_secs(10);

/// Options of data connections.
pub fn data_options() -> ConnOptions {
    ConnOptions { bulk: true, ..ConnOptions::default() }
}

/// Makes the kernel give up a connection to a lost host only after a minute. NCCL cannot continue after an error,
/// so the transport's own few seconds are too short.
pub fn be_patient(conn: &dyn Conn) {
    const SECONDS: [(i32, i32); 3] =
        [(libc::TCP_KEEPIDLE, 20), (libc::TCP_KEEPINTVL, 10), (libc::TCP_KEEPCNT, 4)];
    if let Some(fd) = conn.fd() {
        // If the option cannot be set, the kernel gives up the connection sooner.
        SECONDS.iter().for_each(|&(name, value)| drop(socket::set_int(fd, libc::IPPROTO_TCP, name, value)));
    }
}

struct Attempt {
    secret: Secret,
    pairs: Vec<Pair>,
    /// Pairs of NICs that are dialled only after all others have failed.
    spare: Vec<Pair>,
    dialled: Vec<Dialled>,
    since: Instant,
    asked: Instant,
    doubted: Option<Instant>,
    /// NCCL's id of the communicator; 0 if NCCL gives none.
    communicator: u64,
    /// Whether the communicator's last rank in this process has ended. Communicators that share its connections may
    /// still poll.
    ended: bool,
}

/// A connection of an attempt.
struct Dialled {
    /// Index of the pair of NICs that the connection uses.
    pair: usize,
    dialling: Dialling,
    conn: Option<Box<dyn Conn>>,
}

/// A pair of NICs without a connection, and the reason.
struct Broken {
    pair: usize,
    fault: Fault,
    /// Whether the peer could not be reached, which took a while.
    unreached: bool,
    /// Whether this process or its host lacks a resource that a connection needs.
    is_short: bool,
}

struct Attempts {
    made: u64,
    under_way: Option<HashMap<u64, Attempt>>,
}

static ATTEMPTS: Mutex<Attempts> = Mutex::new(Attempts { made: 0, under_way: None });

/// Notes that the last rank of a communicator in this process has ended: its attempts are dropped as soon as they
/// are no longer polled.
pub fn communicator_ended(communicator: u64) {
    let mut attempts = locked(&ATTEMPTS);
    let all = attempts.under_way.iter_mut().flat_map(HashMap::values_mut);
    all.filter(|attempt| attempt.communicator == communicator).for_each(|attempt| attempt.ended = true);
}

/// Closes the connections of attempts that are abandoned. Returns whether attempts are left.
fn drop_abandoned(now: Instant) -> bool {
    let mut attempts = locked(&ATTEMPTS);
    let Some(under_way) = &mut attempts.under_way else { return false };
    let abandoned = swept(under_way, now);
    let is_left = !under_way.is_empty();
    drop(attempts);
    drop(abandoned);
    is_left
}

/// Takes the abandoned attempts out of the table.
fn swept(under_way: &mut HashMap<u64, Attempt>, now: Instant) -> Vec<Attempt> {
    let left = under_way.extract_if(|_, attempt| attempt.is_left(now));
    left.map(|(_, attempt)| attempt).collect()
}

/// Makes one call of `connect`: returns a comm, or `None` while it is being set up. The handle's memory stores the
/// attempt's number. `communicator` is NCCL's id of the communicator, 0 if NCCL gives none.
pub fn connect(device: &Device, bytes: &mut [u8], communicator: u64) -> Outcome<Option<Box<Comm>>> {
    let handle = Handle::read(bytes).map_err(Fault::usage)?;
    let mut attempt = match handle.attempt {
        0 => {
            sweeper::sweep();
            Attempt::begin(device, &handle, communicator)?
        }
        number => take(number)
            .ok_or_else(|| Fault::usage("the handle belongs to an attempt to connect that has ended"))?,
    };
    handle::set_attempt(bytes, 0);
    if attempt.poll()? {
        let conns = attempt.dialled.into_iter().filter_map(|dialled| dialled.conn);
        return SendComm::open(conns.collect()).map(Some);
    }
    handle::set_attempt(bytes, put_back(handle.attempt, attempt));
    Ok(None)
}

fn take(number: u64) -> Option<Attempt> {
    locked(&ATTEMPTS).under_way.as_mut()?.remove(&number)
}

/// Stores an attempt under its number; a new attempt gets a number.
fn put_back(number: u64, mut attempt: Attempt) -> u64 {
    attempt.asked = Instant::now();
    attempt.doubted = None;
    let number = {
        let attempts = &mut *locked(&ATTEMPTS);
        let number = if number == 0 { attempts.made + 1 } else { number };
        attempts.made = attempts.made.max(number);
        attempts.under_way.get_or_insert_default().insert(number, attempt);
        number
    };
    sweeper::watch(drop_abandoned);
    number
}

impl Attempt {
    fn begin(device: &Device, handle: &Handle, communicator: u64) -> Outcome<Attempt> {
        shared_key()?;
        let (pairs, spare) = unreachable_paths::part(pairs(&device.nics_up(), &handle.addresses));
        let now = Instant::now();
        let mut attempt = Attempt {
            secret: handle.secret,
            pairs,
            spare,
            dialled: Vec::new(),
            since: now,
            asked: now,
            doubted: None,
            communicator,
            ended: false,
        };
        attempt.dial()?;
        Ok(attempt)
    }

    /// Dials over all pairs of NICs except those that fail immediately.
    fn dial(&mut self) -> Outcome<()> {
        loop {
            let comm = proof::random()
                .map_err(|e| Fault::system("cannot get random bytes from the operating system", &e))?;
            match dial_all(comm, &self.pairs) {
                Ok(dialled) => {
                    self.dialled = dialled;
                    self.since = Instant::now();
                    return Ok(());
                }
                // A lack of resources on this host is an error: a comm over fewer NICs would be slow for no visible
                // reason.
                Err(Broken { is_short: true, fault, .. }) => return Err(fault),
                Err(broken) => self.leave_out(broken)?,
            }
        }
    }

    fn leave_out(&mut self, Broken { pair, fault, unreached, .. }: Broken) -> Outcome<()> {
        if self.pairs.len() == 1 {
            self.bring_in_spare();
        }
        if self.pairs.len() == 1 {
            return Err(fault);
        }
        let pair = self.pairs.remove(pair);
        let path = format!("{} to {}", pair.nic.name, pair.to.ip());
        // The key of the warning leaves out the reason, which may contain a port that differs for each comm.
        log::warn_once_of(&path, format_args!("the path {path} is left out: {}", fault.why));
        if unreached {
            unreachable_paths::note(&pair);
        }
        Ok(())
    }

    fn bring_in_spare(&mut self) {
        unreachable_paths::forget(&self.spare);
        self.pairs.append(&mut self.spare);
    }

    /// Whether the attempt is abandoned. The first check after a long pause only marks it as doubted.
    fn is_left(&mut self, now: Instant) -> bool {
        if !self.ended && now.duration_since(self.asked) < LEFT_AFTER {
            return false;
        }
        now.duration_since(*self.doubted.get_or_insert(now)) >= DOUBTED_FOR
    }

    /// Whether all connections of the attempt are up.
    fn poll(&mut self) -> Outcome<bool> {
        if let Some(broken) = self.progress()? {
            self.leave_out(broken)?;
            self.dial()?;
        } else if !self.spare.is_empty() && self.is_late() && self.dialled.iter().all(Dialled::is_silent) {
            self.bring_in_spare();
            self.dial()?;
        }
        Ok(self.dialled.iter().all(|dialled| dialled.conn.is_some()))
    }

    /// Makes progress on all connections, up to the first that cannot be made. An answer of a reached peer is
    /// final: its error is returned.
    fn progress(&mut self) -> Outcome<Option<Broken>> {
        // One of several paths between two NICs may be dead for as long as the kernel tries. A pair is left out only if
        // none of its connections is answered while another pair's are.
        let (several, is_late) = (self.pairs.len() > 1, self.is_late());
        let is_given_up = |pair| several && (is_late || unreachable_paths::has(pair));
        let given_up: Vec<bool> = self.pairs.iter().map(is_given_up).collect();
        let has_given_up = given_up.contains(&true);
        let answers = |pair| self.dialled.iter().any(|dialled| dialled.pair == pair && !dialled.is_silent());
        let answered: Vec<bool> = (0..self.pairs.len()).map(|pair| has_given_up && answers(pair)).collect();
        for dialled in self.dialled.iter_mut().filter(|dialled| dialled.conn.is_none()) {
            let pair = dialled.pair;
            match dialled.dialling.poll(&self.secret) {
                Ok(conn) => dialled.conn = conn,
                Err(fault) if dialled.dialling.has_heard() => return Err(fault),
                Err(fault) => {
                    let unreached = dialled.dialling.is_unreached();
                    return Ok(Some(Broken { pair, fault, unreached, is_short: false }));
                }
            }
            if given_up[pair] && !answered[pair] && answered.contains(&true) && dialled.is_silent() {
                // Another comm has found this pair unreachable, so the error is not noted again.
                let fault = Fault::remote("no answer from the listener");
                return Ok(Some(Broken { pair, fault, unreached: is_late, is_short: false }));
            }
        }
        Ok(None)
    }

    /// Whether the time within which pairs must be answered is over.
    fn is_late(&self) -> bool {
        self.since.elapsed() >= ANSWERED_WITHIN
    }
}

impl Dialled {
    /// Whether no connection of the attempt has been answered yet.
    fn is_silent(&self) -> bool {
        self.conn.is_none() && self.dialling.is_unanswered()
    }
}

/// Dials the sockets of a comm: one for small messages over the first pair, and sockets for bulk over all pairs in
/// turn.
fn dial_all(comm: [u8; 16], pairs: &[Pair]) -> Result<Vec<Dialled>, Broken> {
    let counts = pairs.iter().map(|pair| settings().sockets_over(pair.nic.speed_mbps, pairs.len()));
    let over: Vec<usize> = [0].into_iter().chain(dealt(&counts.collect::<Vec<_>>())).collect();
    let sockets = over.len() as u16;
    let one = |(&pair, index): (&usize, u16)| {
        let conn = dial(&pairs[pair]).map_err(|e| Broken {
            pair,
            fault: not_dialled(&pairs[pair], &e),
            unreached: false,
            is_short: is_short(&e),
        })?;
        Ok(Dialled { pair, dialling: Dialling::new(conn, Claim { comm, index, sockets }), conn: None })
    };
    over.iter().zip(0..).map(one).collect()
}

/// Indices in round-robin order, each as often as its count.
fn dealt(counts: &[usize]) -> impl Iterator<Item = usize> {
    let rounds = counts.iter().copied().max().unwrap_or(0);
    (0..rounds).flat_map(move |round| (0..counts.len()).filter(move |&place| round < counts[place]))
}

/// Dials over the pair's NIC if the peer is in its subnet; otherwise the routing table chooses.
pub fn dial(pair: &Pair) -> io::Result<Box<dyn Conn>> {
    let nic = Some(&pair.nic).filter(|nic| nic.reaches(pair.to.ip()));
    let conn = network().dial(nic, pair.to, &data_options())?;
    be_patient(conn.as_ref());
    Ok(conn)
}

/// Whether this host has the address; true if that cannot be determined.
fn is_here(address: IpAddr) -> bool {
    nics::list().map_or(true, |nics| nics.iter().any(|nic| nic.address == address))
}

/// The error of a failed dial. Only an error that the network reports counts as the peer's.
fn not_dialled(pair: &Pair, error: &io::Error) -> Fault {
    let Pair { nic, to } = pair;
    match error.raw_os_error() {
        // If the NIC still has its address, the error means that the kernel has run out of ports.
        Some(libc::EADDRNOTAVAIL) if nic.reaches(to.ip()) && !is_here(nic.address) => {
            let address = nic.address;
            Fault::system(
                format_args!("cannot connect to {to} from {address}, which {} may have lost", nic.name),
                error,
            )
        }
        Some(libc::EADDRNOTAVAIL) => {
            let why = "no port is left (net.ipv4.ip_local_port_range)";
            Fault::system(format_args!("cannot connect to {to}: {why}"), error)
        }
        _ if is_short(error) => Fault::system(format_args!("cannot open a socket to {to}"), error),
        _ => Fault::connection(to, error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrywire_ncclnet::abi::ResultCode;
    use ferrywire_net::Nic;

    fn asked_about(asked: Instant) -> Attempt {
        let (pairs, spare, dialled) = (Vec::new(), Vec::new(), Vec::new());
        let (communicator, ended) = (7, false);
        Attempt {
            secret: [0; 32],
            pairs,
            spare,
            dialled,
            since: asked,
            asked,
            doubted: None,
            communicator,
            ended,
        }
    }

    #[test]
    fn an_attempt_that_was_left_is_dropped_and_one_of_a_stopped_process_is_not() {
        let start = Instant::now();
        let mut under_way = HashMap::from([(1, asked_about(start)), (2, asked_about(start))]);
        assert!(swept(&mut under_way, start + LEFT_AFTER / 2).is_empty());
        // The process was stopped and continues; one of the two attempts is polled.
        let later = start + LEFT_AFTER * 3;
        assert!(swept(&mut under_way, later).is_empty());
        under_way.insert(2, asked_about(later));
        assert!(swept(&mut under_way, later + DOUBTED_FOR / 2).is_empty());
        assert_eq!(swept(&mut under_way, later + DOUBTED_FOR).len(), 1);
        assert_eq!(under_way.into_keys().collect::<Vec<_>>(), [2]);
    }

    #[test]
    fn an_attempt_of_a_communicator_that_has_ended_is_dropped_soon_unless_it_is_polled() {
        let start = Instant::now();
        let ended = || Attempt { ended: true, ..asked_about(start) };
        let mut under_way = HashMap::from([(1, ended()), (2, ended()), (3, asked_about(start))]);
        assert!(swept(&mut under_way, start).is_empty());
        // What `put_back` does.
        under_way.get_mut(&2).unwrap().doubted = None;
        assert_eq!(swept(&mut under_way, start + DOUBTED_FOR).len(), 1);
        let mut left: Vec<_> = under_way.into_keys().collect();
        left.sort_unstable();
        assert_eq!(left, [2, 3]);
    }

    /// Regression: the attempt failed with `ncclRemoteError`, and of several NICs a healthy one was left out.
    #[test]
    fn a_failed_dial_for_lack_of_local_resources_is_a_system_error() {
        let nics = nics::list().unwrap();
        let nic = nics.into_iter().find(|nic| nic.loopback && nic.address.is_ipv4()).unwrap();
        let lost =
            Pair { nic: Nic { address: [198, 51, 100, 1].into(), ..nic }, to: ([198, 51, 100, 2], 9).into() };
        let Err(broken) = dial_all([0; 16], std::slice::from_ref(&lost)) else {
            panic!("an address that is not there")
        };
        assert_eq!((broken.fault.code, broken.is_short), (ResultCode::SYSTEM_ERROR, false));
        assert!(broken.fault.why.contains("198.51.100.1") && broken.fault.why.contains(&lost.nic.name));
        for lacks in [libc::EMFILE, libc::ENFILE, libc::ENOBUFS, libc::ENOMEM] {
            let error = io::Error::from_raw_os_error(lacks);
            assert!(is_short(&error) && not_dialled(&lost, &error).code == ResultCode::SYSTEM_ERROR);
        }
        let refused = io::Error::from_raw_os_error(libc::ECONNREFUSED);
        assert_eq!(not_dialled(&lost, &refused).code, ResultCode::REMOTE_ERROR);
    }

    #[test]
    fn sockets_go_over_one_pair_after_another() {
        assert_eq!(dealt(&[2, 2]).collect::<Vec<_>>(), [0, 1, 0, 1]);
        assert_eq!(dealt(&[1, 3]).collect::<Vec<_>>(), [0, 1, 1, 1]);
        assert_eq!(dealt(&[4]).collect::<Vec<_>>(), [0; 4]);
    }
}
