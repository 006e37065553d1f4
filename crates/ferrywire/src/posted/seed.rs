//! The original system's way with a lane, for comparison beside ours.
//!
//! What a session that is opened so does: chunks of full size, chunk i of a message over channel i mod N
//! ([`ferrywire_proto::schedule::Plan`]); 12 sends and 16 receives in flight per channel; one thread for all of a peer's
//! channels, which sleeps 10 us between two rounds that brought nothing; and for each received chunk a gather of its
//! own that the thread waits for. What it did worse by mistake is not copied: log lines in the loop, tables uploaded per
//! chunk, errors taken for "not yet".
//!
//! Invariant: nobody pays for this who has not asked for it; a lane is wrapped when it is made, or not.
//! Read next: `mod.rs`, which drives it as any other lane.

use crate::error::Error;
use crate::memory::Memory;
use crate::payload::lane::{InFlight, Lane, Post, Run, Step, Ticket, Ungathered, Way};
use ferrywire_proto::text::rounded;
use std::sync::Arc;
use std::task::Poll;
use std::thread;
use std::time::{Duration, Instant};

/// Requests in flight per channel.
const SENDS_MAX: usize = 12;
const RECEIVES_MAX: usize = 16;
/// Between two rounds that brought nothing.
const PAUSE: Duration = Duration::from_micros(10);

/// How the payload of a session is moved over its lanes. The end that connects chooses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Manner {
    /// As fast as we can.
    #[default]
    Ours,
    /// As the original system did.
    Seed,
}

impl Manner {
    /// A lane that is used in this way; nothing takes longer than `limit`.
    pub fn of(self, lane: Box<dyn Lane>, limit: Duration) -> Box<dyn Lane> {
        match self {
            Manner::Ours => lane,
            Manner::Seed => Box::new(AsSeed { lane, limit }),
        }
    }
}

/// A lane with the original's windows and pauses, which gathers one receive at a time and waits for it.
struct AsSeed {
    lane: Box<dyn Lane>,
    limit: Duration,
}

impl Lane for AsSeed {
    fn window(&self) -> usize {
        self.lane.window().min(RECEIVES_MAX)
    }

    fn send_window(&self) -> usize {
        self.lane.window().min(SENDS_MAX)
    }

    fn may_stand_alone(&self) -> bool {
        self.lane.may_stand_alone()
    }

    fn pause(&self) -> Option<Duration> {
        Some(PAUSE)
    }

    fn path_trouble(&self) -> Option<String> {
        self.lane.path_trouble()
    }

    fn gather(&mut self, number: u64, run: &Run) -> Result<(), Ungathered> {
        self.lane.gather(number, run)?;
        let since = Instant::now();
        loop {
            match self.lane.gathered(number) {
                Poll::Ready(outcome) => {
                    return outcome.map_err(|error| Ungathered::Failed(error.to_string()));
                }
                Poll::Pending if since.elapsed() > self.limit => {
                    let why =
                        format!("the GPU has not gathered message {number} within {:?}", rounded(self.limit));
                    return Err(Ungathered::Failed(why));
                }
                Poll::Pending => thread::yield_now(),
            }
        }
    }

    fn gathered(&mut self, _number: u64) -> Poll<Result<(), Error>> {
        Poll::Ready(Ok(()))
    }

    fn message_bytes_max(&self) -> usize {
        self.lane.message_bytes_max()
    }

    fn takes(&mut self, way: Way, run: &Run) -> bool {
        self.lane.takes(way, run)
    }

    fn isend(&mut self, run: &Run) -> Post {
        self.lane.isend(run)
    }

    fn irecv(&mut self, run: &Run) -> Post {
        self.lane.irecv(run)
    }

    fn test_send(&mut self, ticket: Ticket) -> Step {
        self.lane.test_send(ticket)
    }

    fn test_recv(&mut self, ticket: Ticket) -> Step {
        self.lane.test_recv(ticket)
    }

    fn scatters(&self, memory: &Memory) -> bool {
        self.lane.scatters(memory)
    }

    fn consumed(&mut self, ticket: Ticket) -> Result<(), String> {
        self.lane.consumed(ticket)
    }

    fn copy(&mut self, way: Way, slot: &Run, ranges: &[Run]) -> Poll<Result<(), Error>> {
        self.lane.copy(way, slot, ranges)
    }

    fn slot_memory(&self, like: Option<&Memory>, bytes: usize) -> Result<Arc<Memory>, String> {
        self.lane.slot_memory(like, bytes)
    }

    fn host_slot_memory(&self, bytes: usize) -> Result<Arc<Memory>, String> {
        self.lane.host_slot_memory(bytes)
    }

    fn forget_revoked(&mut self, busy: &dyn Fn(&Arc<Memory>) -> bool) {
        self.lane.forget_revoked(busy);
    }

    fn close(&mut self, in_flight: InFlight) {
        self.lane.close(in_flight);
    }

    fn describe(&self) -> String {
        format!("{}, used as the original did", self.lane.describe())
    }
}
