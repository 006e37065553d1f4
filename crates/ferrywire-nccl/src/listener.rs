//! Listeners: each collects the connections of a peer and makes a comm of them.
//!
//! Invariants: no call waits; a comm outlives its listener; connections that have not proved themselves are bounded in
//! number and delay nothing; a failure of one of several NICs does not affect the others.
//! Read next: `acceptor.rs`, the thread that accepts where NCCL calls `accept` too late.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use ferrywire_net::{Conn, Listener, Nic, Transport};

use crate::acceptor;
use crate::attempt::{DOUBTED_FOR, be_patient, data_options};
use crate::comm::{Comm, locked};
use crate::device::{Device, network};
use crate::encryption::shared_key;
use crate::failure::{Fault, Outcome, is_short};
use crate::handle::{Handle, Secret};
use crate::log;
use crate::proof::{self, Claim, Serving};
use crate::receiving::RecvComm;
use crate::sweeper;

/// Most connections under proof; further ones wait in the kernel.
const PROVING_MAX: usize = 256;
/// Time for which a connection may be under proof before it is dropped for another one.
const PROVING_MIN: Duration = Duration::from_secs(5);

/// A listener of the plugin, to which NCCL holds a pointer.
pub struct ListenComm(Arc<Mutex<Listening>>);

/// A listener, as its owner and the plugin's threads share it.
pub struct Listening {
    /// `None` once its communicator has ended.
    reception: Option<Reception>,
    /// NCCL's id of the communicator; 0 if NCCL gives none.
    communicator: u64,
    /// Whether the communicator's last rank in this process has ended. Communicators that share its connections may
    /// still accept.
    ended: bool,
    doubted: Option<Instant>,
}

/// The sockets of a listener.
struct Reception {
    /// One kernel listener for each NIC of the device.
    listeners: Vec<Box<dyn Listener>>,
    secret: Secret,
    proving: Vec<(Instant, Serving)>,
    proving_max: usize,
    gathering: Vec<Gathering>,
}

/// The listeners of communicators with an id, which NCCL does not close if it aborts their set-up.
static LISTENERS: Mutex<Vec<Weak<Mutex<Listening>>>> = Mutex::new(Vec::new());

/// Connections of a comm, of which some are missing.
struct Gathering {
    comm: [u8; 16],
    conns: Vec<Option<Box<dyn Conn>>>,
}

/// Notes that the last rank of a communicator in this process has ended: its listeners are closed unless they still accept.
pub fn communicator_ended(communicator: u64) {
    let mut any = false;
    for listening in locked(&LISTENERS).iter().filter_map(Weak::upgrade) {
        let mut listening = locked(&listening);
        if listening.communicator == communicator {
            (listening.ended, any) = (true, true);
        }
    }
    if any {
        sweeper::watch(drop_abandoned);
    }
}

/// Closes the sockets of listeners that are abandoned. Returns whether listeners of ended communicators are left.
fn drop_abandoned(now: Instant) -> bool {
    let mut is_left = false;
    let mut abandoned = Vec::new();
    locked(&LISTENERS).retain(|listening| {
        let Some(listening) = listening.upgrade() else { return false };
        let mut listening = locked(&listening);
        let is_abandoned = listening.is_abandoned(now);
        if is_abandoned {
            abandoned.extend(listening.reception.take());
        }
        is_left |= listening.ended && !is_abandoned;
        !is_abandoned
    });
    // Closing sockets takes time.
    drop(abandoned);
    is_left
}

impl ListenComm {
    /// Listens on all NICs of a device that permit it, at least one. `communicator` is NCCL's id of the communicator, 0 if
    /// NCCL gives none. With `waits_for_connect`, NCCL calls `accept` only after `connect` has finished at the peer.
    pub fn open(
        device: &Device,
        communicator: u64,
        waits_for_connect: bool,
    ) -> Outcome<(ListenComm, Handle)> {
        let (reception, handle) = Reception::open(device)?;
        let (reception, ended, doubted) = (Some(reception), false, None);
        let listening = Arc::new(Mutex::new(Listening { reception, communicator, ended, doubted }));
        if communicator != 0 {
            let mut listeners = locked(&LISTENERS);
            // NCCL has closed most of them.
            listeners.retain(|listening| listening.strong_count() > 0);
            listeners.push(Arc::downgrade(&listening));
        }
        if waits_for_connect {
            acceptor::serve(Arc::downgrade(&listening))?;
        }
        Ok((ListenComm(listening), handle))
    }

    /// Makes one call of `accept`: returns a comm, or `None` while it is not complete.
    pub fn accept(&self) -> Outcome<Option<Box<Comm>>> {
        sweeper::sweep();
        let mut listening = locked(&self.0);
        listening.doubted = None;
        let reception = listening.reception.as_mut();
        reception.ok_or_else(|| Fault::usage("the communicator of the listener has ended"))?.accept()
    }
}

impl Drop for ListenComm {
    fn drop(&mut self) {
        // A thread may have the listener in hand, and would close its sockets later.
        let reception = locked(&self.0).reception.take();
        drop(reception);
    }
}

impl Listening {
    /// Accepts what has arrived. Returns whether anything had.
    pub fn progress(&mut self) -> bool {
        let Some(reception) = &mut self.reception else { return false };
        // Its error is that of the next call of `accept` too.
        reception.progress().unwrap_or(false)
    }

    /// Whether the listener is abandoned. The first check after the communicator's end only marks it as doubted.
    fn is_abandoned(&mut self, now: Instant) -> bool {
        self.ended && now.duration_since(*self.doubted.get_or_insert(now)) >= DOUBTED_FOR
    }
}

impl Reception {
    fn open(device: &Device) -> Outcome<(Reception, Handle)> {
        shared_key()?;
        let listen = |nic: &&Nic| {
            let listener = network().listen(SocketAddr::new(nic.address, 0));
            listener.map_err(|e| {
                Fault::system(format_args!("cannot listen on {} of {}", nic.address, nic.name), &e)
            })
        };
        let nics = device.nics_up();
        let (mut listeners, mut faults) = (Vec::new(), Vec::new());
        for made in nics.iter().map(listen) {
            match made {
                Ok(listener) => listeners.push(listener),
                Err(fault) => faults.push(fault),
            }
        }
        match faults.into_iter().next() {
            Some(fault) if listeners.is_empty() => return Err(fault),
            Some(fault) => log::warn_once(format_args!("{}; the NIC is left out", fault.why)),
            None => {}
        }
        let secret = proof::random()
            .map_err(|e| Fault::system("cannot get random bytes from the operating system", &e))?;
        let addresses = listeners.iter().map(|listener| listener.local()).collect();
        let handle = Handle { addresses, secret, attempt: 0 };
        let (proving, gathering) = (Vec::new(), Vec::new());
        Ok((Reception { listeners, secret, proving, proving_max: PROVING_MAX, gathering }, handle))
    }

    /// Returns a comm, or `None` while none is complete.
    fn accept(&mut self) -> Outcome<Option<Box<Comm>>> {
        self.progress()?;
        let Some(place) = self.complete() else { return Ok(None) };
        let conns = self.gathering.swap_remove(place).conns;
        RecvComm::open(conns.into_iter().flatten().collect()).map(Some)
    }

    /// The place of a comm that has all its connections.
    fn complete(&self) -> Option<usize> {
        self.gathering.iter().position(|gathering| gathering.conns.iter().all(Option::is_some))
    }

    /// Accepts and proves connections until a comm is complete. Returns whether there was anything to do.
    fn progress(&mut self) -> Outcome<bool> {
        let before = self.proving.len();
        // Connections that are already accepted come first: most need one check, and then no room has to be made.
        let mut worked = self.prove();
        // A complete comm needs no more of them, and a process without descriptors could not accept them.
        if self.complete().is_none() {
            self.take_in()?;
            worked |= self.proving.len() != before;
            worked |= self.prove();
        }
        Ok(worked)
    }

    /// Makes progress with the proofs. Returns whether any has ended.
    fn prove(&mut self) -> bool {
        let (secret, before) = (self.secret, self.proving.len());
        let mut proven = Vec::new();
        self.proving.retain_mut(|(_, serving)| match serving.poll(&secret) {
            Ok(None) => true,
            Ok(Some(done)) => {
                proven.push(done);
                false
            }
            // The connection does not know the secret, or its peer gave it up; neither is an error of this comm.
            Err(_) => false,
        });
        proven.into_iter().for_each(|(claim, conn)| self.gather(claim, conn));
        self.proving.len() < before
    }

    /// Accepts the connections that have arrived over all NICs. A NIC whose listener fails is closed: its dialers are
    /// refused and use the other NICs.
    fn take_in(&mut self) -> Outcome<()> {
        let mut place = 0;
        while let Some(listener) = self.listeners.get(place) {
            let at = listener.local();
            match self.take_in_at(place)? {
                Ok(()) => place += 1,
                // The new connection waits in the kernel until resources are free. Connections without the secret may
                // have used them up, so old ones are dropped; the others end their proof or become old.
                Err(e) if is_short(&e) && !self.proving.is_empty() => {
                    if self.drop_old() {
                        let at = format!("connections to {} that did not prove themselves in time", at.ip());
                        log::warn_once_of(&at, format_args!("{at} are dropped for new ones: {e}"));
                    }
                    return Ok(());
                }
                Err(e) if is_short(&e) || self.listeners.len() == 1 => {
                    return Err(Fault::system(format_args!("cannot accept connections on {at}"), &e));
                }
                Err(e) => {
                    let at = format!("cannot accept connections on {}", at.ip());
                    log::warn_once_of(&at, format_args!("{at}: {e}; this address is left out"));
                    self.listeners.remove(place);
                }
            }
        }
        Ok(())
    }

    /// Accepts the connections that have arrived at one listener, up to its failure.
    fn take_in_at(&mut self, place: usize) -> Outcome<io::Result<()>> {
        while self.has_room() {
            match self.listeners[place].accept() {
                Ok(None) => break,
                Ok(Some(conn)) => {
                    be_patient(conn.as_ref());
                    let serving = Serving::new(conn).map_err(|e| {
                        Fault::system("cannot get random bytes from the operating system", &e)
                    })?;
                    self.proving.push((Instant::now(), serving));
                }
                Err(e) => return Ok(Err(e)),
            }
        }
        Ok(Ok(()))
    }

    /// Whether one more connection may be under proof.
    fn has_room(&mut self) -> bool {
        if self.proving.len() >= self.proving_max {
            self.drop_old();
        }
        self.proving.len() < self.proving_max
    }

    /// Drops the connections that have been under proof for at least [`PROVING_MIN`]; returns whether there were any.
    fn drop_old(&mut self) -> bool {
        let before = self.proving.len();
        self.proving.retain(|(since, _)| since.elapsed() < PROVING_MIN);
        self.proving.len() < before
    }

    fn gather(&mut self, claim: Claim, mut conn: Box<dyn Conn>) {
        conn.tune(&data_options());
        let sockets = usize::from(claim.sockets);
        let place = self.gathering.iter().position(|gathering| gathering.comm == claim.comm);
        let place = place.unwrap_or_else(|| {
            let conns = (0..sockets).map(|_| None).collect();
            self.gathering.push(Gathering { comm: claim.comm, conns });
            self.gathering.len() - 1
        });
        // A connection that contradicts earlier ones is dropped; its comm never completes.
        if let Some(slot) = self.gathering[place].conns.get_mut(usize::from(claim.index)) {
            *slot = Some(conn);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pairs::Pair;
    use crate::proof::Dialling;
    use crate::testing::until;
    use ferrywire_net::ConnOptions;
    use ferrywire_net::tcp::TcpTransport;
    use ferrywire_sys::{nics, socket};
    use std::os::fd::RawFd;

    /// A listener on loopback.
    fn listening() -> (Reception, Handle) {
        let nic =
            nics::list().unwrap().into_iter().find(|nic| nic.loopback && nic.address.is_ipv4()).unwrap();
        Reception::open(&Device::of(0, nic)).unwrap()
    }

    /// Simulates a listener whose address and sockets are taken away: `accept` fails for good.
    fn end(listener: &dyn Listener) {
        // SAFETY: a system call on a descriptor that the listener keeps open.
        assert_eq!(unsafe { libc::shutdown(listener.fd().unwrap(), libc::SHUT_RDWR) }, 0);
    }

    #[test]
    fn a_listener_that_fails_ends_nothing_at_other_nics() {
        let (mut listener, handle) = listening();
        for _ in 0..2 {
            let failing = TcpTransport::default().listen("127.0.0.2:0".parse().unwrap()).unwrap();
            end(failing.as_ref());
            listener.listeners.insert(0, failing);
        }
        let options = ConnOptions::default();
        let claim = |index| Claim { comm: [2; 16], index, sockets: 2 };
        let connect = || TcpTransport::default().dial(None, handle.addresses[0], &options).unwrap();
        let mut dialling = [0, 1].map(|index| Dialling::new(connect(), claim(index)));
        until("a comm", || {
            dialling.iter_mut().for_each(|dialling| drop(dialling.poll(&handle.secret).unwrap()));
            listener.accept().unwrap()
        });
        assert_eq!(listener.listeners.len(), 1);
        end(listener.listeners[0].as_ref());
        // The result is the same at every call.
        for _ in 0..2 {
            assert!(listener.accept().err().unwrap().why.contains("cannot accept connections on 127.0.0.1"));
        }
    }

    /// A listener in a process that has run out of descriptors.
    struct Short(SocketAddr);

    impl Listener for Short {
        fn accept(&mut self) -> io::Result<Option<Box<dyn Conn>>> {
            Err(io::Error::from_raw_os_error(libc::EMFILE))
        }

        fn local(&self) -> SocketAddr {
            self.0
        }

        fn fd(&self) -> Option<RawFd> {
            None
        }
    }

    #[test]
    fn a_lack_of_process_resources_does_not_disable_a_nic() {
        let (mut listener, handle) = listening();
        listener.listeners.insert(0, Box::new(Short(handle.addresses[0])));
        assert!(listener.accept().err().unwrap().why.contains("Too many open files"));
        assert_eq!(listener.listeners.len(), 2);
    }

    /// Regression: each call of `accept` dropped a connection under proof, however new, and logged nothing.
    #[test]
    fn a_lack_of_process_resources_ends_no_proof() {
        let (mut listener, handle) = listening();
        let connect =
            || TcpTransport::default().dial(None, handle.addresses[0], &ConnOptions::default()).unwrap();
        let mut dialling = Dialling::new(connect(), Claim { comm: [4; 16], index: 0, sockets: 2 });
        let _stranger = connect();
        until("both are here", || {
            assert!(listener.accept().unwrap().is_none());
            (listener.proving.len() == 2).then_some(())
        });
        listener.listeners.insert(0, Box::new(Short(handle.addresses[0])));
        assert!(listener.accept().unwrap().is_none() && listener.proving.len() == 2);
        until("a proof", || {
            dialling.poll(&handle.secret).unwrap();
            assert!(listener.accept().unwrap().is_none());
            (!listener.gathering.is_empty()).then_some(())
        });
        // The other one is dropped once it is old; then the lack is an error.
        assert_eq!(listener.proving.len(), 1);
        listener.proving[0].0 = listener.proving[0].0.checked_sub(PROVING_MIN).unwrap();
        assert!(listener.accept().unwrap().is_none() && listener.proving.is_empty());
        assert!(listener.accept().err().unwrap().why.contains("Too many open files"));
    }

    /// Regression: the last connection of a comm took the last descriptor, and the call that completed the comm failed: it
    /// looked for further connections first.
    #[test]
    fn a_complete_comm_needs_no_more_descriptors() {
        let (mut listener, handle) = listening();
        let connect =
            || TcpTransport::default().dial(None, handle.addresses[0], &ConnOptions::default()).unwrap();
        let claim = |index| Claim { comm: [5; 16], index, sockets: 2 };
        let mut dialling = [0, 1].map(|index| Dialling::new(connect(), claim(index)));
        until("both are here", || {
            assert!(listener.accept().unwrap().is_none());
            (listener.proving.len() == 2).then_some(())
        });
        for (dialling, (_, serving)) in dialling.iter_mut().zip(&listener.proving) {
            until("a claim", || {
                assert!(dialling.poll(&handle.secret).unwrap().is_none());
                serving.has_claim().then_some(())
            });
        }
        listener.listeners.insert(0, Box::new(Short(handle.addresses[0])));
        assert!(listener.accept().unwrap().is_some());
    }

    /// Regression: a network failure of some seconds during setup ended the communicator.
    #[test]
    fn connections_outlast_short_outages_from_the_first() {
        let (mut listener, handle) = listening();
        let nic =
            nics::list().unwrap().into_iter().find(|nic| nic.loopback && nic.address.is_ipv4()).unwrap();
        let near = crate::attempt::dial(&Pair { nic, to: handle.addresses[0] }).unwrap();
        let keeps = |fd| socket::get_int(fd, libc::IPPROTO_TCP, libc::TCP_KEEPIDLE).unwrap();
        assert!(keeps(near.fd().unwrap()) >= 20);
        let mut dialling = Dialling::new(near, Claim { comm: [3; 16], index: 0, sockets: 2 });
        until("a proof", || {
            dialling.poll(&handle.secret).unwrap();
            assert!(listener.accept().unwrap().is_none());
            (!listener.gathering.is_empty()).then_some(())
        });
        assert!(keeps(listener.gathering[0].conns[0].as_ref().unwrap().fd().unwrap()) >= 20);
    }

    /// Regression: connections were dropped to make room, after a time in which no thread checked them.
    #[test]
    fn connections_that_have_proved_themselves_make_room_for_no_stranger() {
        let (mut listener, handle) = listening();
        listener.proving_max = 3;
        let connect =
            || TcpTransport::default().dial(None, handle.addresses[0], &ConnOptions::default()).unwrap();
        let claim = |index| Claim { comm: [1; 16], index, sockets: 3 };
        let mut dialling: Vec<_> = (0..3).map(|index| Dialling::new(connect(), claim(index))).collect();
        until("all are here", || {
            assert!(listener.accept().unwrap().is_none());
            (listener.proving.len() == 3).then_some(())
        });
        for (dialling, (since, serving)) in dialling.iter_mut().zip(&mut listener.proving) {
            // Connections are accepted in the order in which they were dialled.
            until("a claim", || {
                assert!(dialling.poll(&handle.secret).unwrap().is_none());
                serving.has_claim().then_some(())
            });
            *since = since.checked_sub(PROVING_MIN).unwrap();
        }
        let _stranger = connect();
        until("a comm", || listener.accept().unwrap());
    }
}
