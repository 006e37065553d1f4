//! Operations that begin after an event of a GPU stream.
//!
//! Invariant: such an operation is posted and counted at once, and starts on the thread that polls the peer's home
//! worker.
//! Read next: `stream_queue.rs`, where they wait.

use std::sync::Arc;

use super::state::PeerState;
use super::stream_queue::Waiting;
use crate::core::operation::{Hold, Verb};
use crate::core::ordering::StreamEvent;
use crate::error::Result;

impl PeerState {
    /// Starts an operation once `ready` has happened. The operation already counts as posted.
    ///
    /// # Errors
    /// The peer's error if the peer is gone; the operation then has failed with it.
    pub fn start_after(
        self: &Arc<Self>,
        ready: StreamEvent,
        op: Hold,
        start: impl FnOnce(&Arc<PeerState>, Hold) + Send + 'static,
    ) -> Result<()> {
        if let Err(Waiting { op, .. }) = self.stream_queue.add(Waiting { ready, op, start: Box::new(start) })
        {
            op.fail(self.gone());
            return Err(self.gone());
        }
        self.home().rouse();
        Ok(())
    }

    /// Queues an operation once `ready` has happened. Later notifications wait for it from now on. Errors as
    /// for [`PeerState::start_after`].
    pub fn post_after(self: &Arc<Self>, ready: StreamEvent, op: Hold) -> Result<()> {
        if op.verb() != Verb::Notify {
            self.queue.join(&op);
        }
        self.start_after(ready, op, |state, op| state.start(op))
    }

    /// Queues an operation that has waited for a stream.
    pub fn start(self: &Arc<Self>, op: Hold) {
        let bytes = op.total;
        match self.queue.post_joined(op) {
            Ok(()) => self.rouse_for(bytes),
            Err(op) => op.fail(self.gone()),
        }
    }

    /// Starts operations that need not wait any longer. Returns whether there were any.
    pub fn start_ready(self: &Arc<Self>) -> bool {
        if !self.stream_queue.any() {
            return false;
        }
        // Another thread is starting operations, and will poll again soon.
        let Ok(_alone) = self.stream_queue.releasing.try_lock() else { return false };
        let taken = self.stream_queue.take();
        let worked = !taken.is_empty();
        for (Waiting { op, start, .. }, error) in taken {
            if let Some(error) = error {
                op.fail(error);
            }
            match op.verb() {
                // The send has a number that the peer expects: it is withdrawn through the queue.
                Verb::Send => start(self, op),
                _ if op.failing() => op.cut_short(),
                _ => start(self, op),
            }
        }
        worked
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Endpoint, TransferError};
    use ferrywire_memory::sim::SimGpu;
    use ferrywire_proto::limits;
    use std::thread;
    use std::time::{Duration, Instant};

    const LONG: Duration = Duration::from_secs(60);

    /// Regression: such a read never ended. The cancel found neither an operation that waits for its stream nor a sink, and
    /// the start then opened the sink of a read whose request had been dropped.
    #[test]
    fn a_read_that_is_cancelled_at_the_moment_it_starts_ends() {
        let builder = || Endpoint::builder().threads(0).channels(1);
        let far = builder().listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
        let (near, address) = (builder().build().unwrap(), far.listen_addresses()[0]);
        let (peer, _accepted) = thread::scope(|scope| {
            let accepted = scope.spawn(|| far.accept(LONG).unwrap());
            (near.connect(address, LONG).unwrap(), accepted.join().unwrap())
        });
        let (ours, theirs) = (near.alloc_host(8).unwrap(), far.alloc_host(8).unwrap());
        // The far end is not polled from here on, so none of these ends, and further requests are kept back.
        let read = |peer: &crate::Peer| peer.read(&ours, 0, &theirs.descriptor(), 0, 8).unwrap();
        let _outstanding: Vec<_> = (0..limits::OUTSTANDING_READS_MAX).map(|_| read(&peer)).collect();
        let stream = SimGpu::open(6).unwrap().stream();
        let cancelled = read(&peer.on_stream(StreamEvent::after_sim(&stream).unwrap()));
        let since = Instant::now();
        let (started, _) = loop {
            if let Some(taken) = peer.state().stream_queue.take().pop() {
                break taken;
            }
            assert!(since.elapsed() < LONG, "the event never happens");
        };
        cancelled.cancel();
        let Waiting { op, start, .. } = started;
        start(peer.state(), op);
        assert_eq!(cancelled.poll(), Some(Err(TransferError::Cancelled)));
        [near, far].iter().for_each(|end| drop(end.close(Duration::ZERO)));
    }
}
