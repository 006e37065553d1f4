//! The queue of connected peers for the user: the result of a connect, or the peers that an endpoint has yet
//! to accept.
//!
//! A peer that has proven the secret takes a [`Permit`] before its session is opened, and keeps the permit
//! until the peer is in the queue.
//!
//! Invariant: permits and queued peers together number at most `limits::PEERS_UNACCEPTED_MAX`, so that an
//! endpoint that never accepts a peer holds no more than that.
//! Read next: `admission.rs`, which asks for permits.

use crate::core::peer::PeerHandle;
use crate::core::waiting::{WaitList, WakeHandle};
use crate::error::{Error, Result};
use ferrywire_proto::limits;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The results of one connect, or the accepted peers of one endpoint.
#[derive(Default)]
pub(crate) struct AcceptQueue {
    arrived: Mutex<VecDeque<Result<PeerHandle>>>,
    permits: AtomicUsize,
    /// True once no further peer can arrive.
    closed: AtomicBool,
    waiters: WaitList,
}

/// Permission to put one peer into the queue. States: `taken -> sent | dropped`; either frees the permit.
pub(super) struct Permit(Arc<AcceptQueue>);

impl Permit {
    /// Puts the connected peer into the queue.
    pub fn send(self, peer: PeerHandle) {
        self.0.put(Ok(peer));
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.permits.fetch_sub(1, Ordering::SeqCst);
    }
}

impl AcceptQueue {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Result<PeerHandle>>> {
        self.arrived.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn put(&self, result: Result<PeerHandle>) {
        let mut arrived = self.lock();
        arrived.retain(|waiting| !ended(waiting) || left_something(waiting));
        arrived.push_back(result);
        drop(arrived);
        self.waiters.wake();
    }

    pub fn take(&self) -> Option<Result<PeerHandle>> {
        self.lock().pop_front()
    }

    /// Marks the queue as closed and wakes its waiters. Peers in the queue may still be taken.
    pub fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        self.waiters.wake();
    }

    /// Takes the next result; [`Error::Closed`] if the queue is empty and closed.
    pub fn take_or_closed(&self) -> Option<Result<PeerHandle>> {
        self.take().or_else(|| self.closed.load(Ordering::SeqCst).then_some(Err(Error::Closed)))
    }

    /// Drops every peer in the queue, because the endpoint is closed.
    pub fn clear(&self) {
        self.lock().clear();
        self.waiters.wake();
    }

    /// Wakes `handle` once the queue has a result.
    pub fn wake_at_arrival(&self, handle: WakeHandle) {
        self.waiters.add(handle, || !self.lock().is_empty());
    }

    /// Removes a waiter that no longer waits.
    pub fn forget_waiter(&self, handle: &WakeHandle) {
        self.waiters.remove(handle);
    }

    /// Takes a permit for one more peer; `None` when all are taken. If the queue is full, the oldest queued
    /// peer that has ended is dropped for the new one: one that left nothing to receive, else any.
    pub(super) fn try_permit(self: &Arc<AcceptQueue>) -> Option<Permit> {
        let mut arrived = self.lock();
        let full = |arrived: &VecDeque<_>| {
            arrived.len() + self.permits.load(Ordering::SeqCst) >= limits::PEERS_UNACCEPTED_MAX
        };
        let oldest = || {
            let useless = arrived.iter().position(|waiting| ended(waiting) && !left_something(waiting));
            useless.or_else(|| arrived.iter().position(ended))
        };
        let oldest = if full(&arrived) { oldest() } else { None };
        let dropped = oldest.and_then(|oldest| arrived.remove(oldest));
        let room = !full(&arrived);
        let permit = room.then(|| self.permit());
        drop(arrived);
        if let Some(Ok(peer)) = dropped.filter(left_something) {
            tracing::warn!(
                peer = peer.0.name(),
                "dropped with messages that were not received, for a new peer: it has ended, and PEERS_UNACCEPTED_MAX = {} \
                 peers wait to be accepted",
                limits::PEERS_UNACCEPTED_MAX
            );
        }
        permit
    }

    /// Takes a further permit for a peer whose handshake holds one until the handshake ends.
    pub(super) fn permit(self: &Arc<AcceptQueue>) -> Permit {
        self.permits.fetch_add(1, Ordering::SeqCst);
        Permit(self.clone())
    }
}

fn ended(waiting: &Result<PeerHandle>) -> bool {
    waiting.as_ref().is_ok_and(|peer| peer.0.failure().is_some())
}

/// Whether the peer has left messages or notifications that can still be received.
fn left_something(waiting: &Result<PeerHandle>) -> bool {
    waiting.as_ref().is_ok_and(|peer| peer.0.inbound.holds_anything())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ConnectError, Endpoint, Peer};
    use ferrywire_proto::stall_timer::StallTimer;
    use std::io;
    use std::time::Instant;

    use std::thread;
    use std::time::Duration;

    const LIMIT: Duration = Duration::from_secs(60);

    fn ends() -> (Endpoint, Endpoint) {
        let builder = || Endpoint::builder().threads(1).channels(1);
        let acceptor = builder().listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
        (acceptor, builder().build().unwrap())
    }

    fn connect(dialler: &Endpoint, acceptor: &Endpoint) -> Result<Peer, ConnectError> {
        dialler.connect(acceptor.listen_addresses()[0], LIMIT)
    }

    fn eventually(what: &str, mut so: impl FnMut() -> bool) {
        let (start, mut stall_timer) = (Instant::now(), StallTimer::new(LIMIT));
        while !so() {
            assert!(!stall_timer.is_over(start.elapsed()), "never came about: {what}");
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn refused(result: Result<Peer, ConnectError>) {
        let error = result.unwrap_err();
        assert!(
            matches!(&error, ConnectError::Refused { why, .. } if why.contains("PEERS_UNACCEPTED_MAX")),
            "{error}"
        );
    }

    #[test]
    fn past_the_limit_the_newest_is_refused_until_one_has_ended_or_is_accepted() {
        let (acceptor, dialler) = ends();
        let mut peers: Vec<Peer> =
            (0..limits::PEERS_UNACCEPTED_MAX).map(|_| connect(&dialler, &acceptor).unwrap()).collect();
        refused(connect(&dialler, &acceptor));
        let ending = peers.swap_remove(7);
        ending.notify(b"farewell").unwrap().wait(LIMIT).unwrap();
        ending.close(LIMIT).unwrap();
        eventually("the peer has ended at the far end too", || acceptor.peer_count() == peers.len());
        peers.push(connect(&dialler, &acceptor).unwrap());
        refused(connect(&dialler, &acceptor));
        let accepted = acceptor.accept(LIMIT).unwrap();
        peers.push(connect(&dialler, &acceptor).unwrap());
        refused(connect(&dialler, &acceptor));
        assert_eq!(accepted.error(), None);
    }

    /// Regression: the oldest was dropped without a word, also beside a later one that had left nothing.
    #[test]
    fn past_the_limit_an_ended_peer_gives_way_and_is_named_if_it_left_messages() {
        let (acceptor, dialler) = ends();
        let mut peers: Vec<Peer> =
            (0..limits::PEERS_UNACCEPTED_MAX).map(|_| connect(&dialler, &acceptor).unwrap()).collect();
        for left in [true, false] {
            let ending = peers.remove(0);
            if left {
                ending.notify(b"farewell").unwrap().wait(LIMIT).unwrap();
            }
            ending.close(LIMIT).unwrap();
            eventually("the peer has ended at the far end too", || acceptor.peer_count() == peers.len());
        }
        let queue = acceptor.running().with_control(|control| control.accept_queue.clone());
        let queued = || -> Vec<String> {
            queue.lock().iter().map(|waiting| waiting.as_ref().unwrap().0.name().to_owned()).collect()
        };
        let names = queued();
        let log = Log::default();
        let lines = log.clone();
        let subscriber =
            tracing_subscriber::fmt().with_ansi(false).with_writer(move || lines.clone()).finish();
        tracing::subscriber::with_default(subscriber, || {
            let first = queue.try_permit().expect("the one that left nothing gives way");
            assert_eq!(queued()[..2], [names[0].clone(), names[2].clone()]);
            assert_eq!(log.text(), "");
            let second = queue.try_permit().expect("the other one gives way too");
            assert_eq!(queued()[..2], names[2..4]);
            assert!(log.text().contains(&names[0]), "{}", log.text());
            assert!(queue.try_permit().is_none(), "all others are alive");
            drop((first, second));
        });
    }

    /// Takes log lines.
    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<u8>>>);

    impl Log {
        fn text(&self) -> String {
            String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
        }
    }

    impl io::Write for Log {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn ended_peers_are_kept_only_if_they_left_something() {
        let (acceptor, dialler) = ends();
        for round in 0..20u8 {
            let peer = connect(&dialler, &acceptor).unwrap();
            if round == 5 {
                peer.notify(b"read me").unwrap().wait(LIMIT).unwrap();
            }
            peer.close(LIMIT).unwrap();
            eventually("the peer has ended at the far end too", || acceptor.peer_count() == 0);
        }
        let last = connect(&dialler, &acceptor).unwrap();
        last.notify(b"here").unwrap().wait(LIMIT).unwrap();
        assert_eq!(acceptor.accept(LIMIT).unwrap().wait_notification(LIMIT).unwrap(), b"read me");
        let second = acceptor.accept(LIMIT).unwrap();
        assert_eq!(
            second.error(),
            None,
            "{:?} at {}, third {:?}",
            second.label(),
            second.address(),
            acceptor.try_accept().map(|p| p.map(|p| (p.error(), p.address())))
        );
        assert!(acceptor.try_accept().is_none());
    }

    #[test]
    fn a_waiter_that_gave_up_is_forgotten() {
        let (acceptor, _dialler) = ends();
        let queue = AcceptQueue::default();
        let running = acceptor.running().clone();
        thread::scope(|scope| {
            for _ in 0..20 {
                let waiting = scope.spawn(|| running.next_of(&queue, Duration::from_millis(1)).is_none());
                assert!(waiting.join().unwrap());
            }
        });
        assert_eq!(queue.waiters.len(), 0);
    }

    #[test]
    fn a_closed_endpoint_is_not_kept_alive_by_unaccepted_peers() {
        let (acceptor, dialler) = ends();
        let peer = connect(&dialler, &acceptor).unwrap();
        let context = acceptor.downgrade();
        acceptor.close(LIMIT).unwrap();
        drop((acceptor, peer, dialler));
        eventually("nothing of the peer is left", || context.strong_count() == 0);
    }
}
