//! How a worker releases memory that a request names.
//!
//! Invariant: a request is answered only when no channel of the worker writes to the memory, and no NIC sends from
//! it over a closed lane or connection.
//! Read next: `quiesce.rs`, the requests.

use super::Worker;
use super::engine::{ProgressEngine, Slot};
use super::quiesce::{Abandoning, Closed};
use crate::core::context::Context;
use crate::core::inbound::taken_back;
use crate::core::operation::Op;
use crate::core::queue::DROPPED;
use crate::error::Error;
use ferrywire_proto::limits;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

/// Pause before the kernel is asked again whether it has released memory.
const RELEASE_PAUSE: Duration = Duration::from_micros(100);
/// Reason for losing a channel that sends from memory which its user has dropped.
const SENDS_DROPPED: &str = "the user freed memory from which a message was being sent";

impl ProgressEngine {
    /// Ends as lost the channels whose connections still send from memory that its user has dropped, once the
    /// kernel has released the memory or `KERNEL_RELEASE_TIMEOUT` has passed. One timeout covers all these
    /// channels.
    fn lose_senders_of_dropped_memory(&mut self, worker: &Worker, context: &Context) {
        let sends = |slot: &mut Option<Slot>| {
            slot.as_mut().is_some_and(|slot| slot.channel.abort_sending_of_dropped_memory())
        };
        let places: Vec<usize> =
            (0..self.slots.len()).filter(|place| sends(&mut self.slots[*place])).collect();
        let since = Instant::now();
        for place in places {
            let Some(slot) = &mut self.slots[place] else { continue };
            // A NIC's queue may still hold packets.
            while !slot.channel.has_released_dropped_memory() {
                if since.elapsed() >= limits::KERNEL_RELEASE_TIMEOUT {
                    slot.channel.fail_unreleased();
                    break;
                }
                thread::sleep(RELEASE_PAUSE);
            }
            self.lose(worker, context, place, SENDS_DROPPED);
        }
    }

    /// Answers a request to release memory once no channel writes there and no NIC sends from it over a
    /// closed lane or connection. If a lane does not release the memory in time, its channel is lost. If a
    /// GPU does not, its channel is lost only where the request has `force`.
    pub(super) fn release_memory(&mut self, worker: &Worker, context: &Context) {
        self.lose_senders_of_dropped_memory(worker, context);
        let now = context.transport.now();
        for Abandoning { request, since, .. } in std::mem::take(&mut self.abandoning) {
            let waited = now.saturating_sub(since);
            let late = waited > limits::LANE_ABANDON_TIMEOUT;
            let cut = request.force && waited > limits::GPU_ABANDON_TIMEOUT;
            let (mut lane, mut gpu) = (false, None);
            for place in 0..self.slots.len() {
                let Some(slot) = &mut self.slots[place] else { continue };
                let mut touched = slot.channel.abandon(&request.gone);
                worker.step();
                if touched.gpu.is_some() && cut {
                    // If only copies of short messages touch the memory, the channel stays.
                    slot.channel.peer.messages.cut(&*request.gone, &taken_back());
                    touched = slot.channel.abandon(&request.gone);
                }
                if slot.channel.lane_sends_what_is_gone() {
                    self.lose(worker, context, place, SENDS_DROPPED);
                } else if (touched.lane && late) || (touched.gpu.is_some() && cut) {
                    slot.channel.peer.messages.cut(&*request.gone, &taken_back());
                    let why = "the user freed memory into which a message was being received";
                    self.lose(worker, context, place, why);
                } else if touched.lane || touched.gpu.is_some() {
                    lane |= touched.lane;
                    gpu = gpu.or(touched.gpu);
                } else {
                    slot.channel.forget_revoked();
                }
            }
            lane |= request.sources && !self.has_released(now);
            let gpu = gpu.filter(|_| !lane);
            request.note_gpu(worker.index, gpu);
            if lane || gpu.is_some() {
                self.abandoning.push(Abandoning { request, since, by_gpu: gpu.is_some() })
            } else {
                request.answered[worker.index].store(true, Ordering::Release)
            }
        }
    }

    /// Whether no closed lane or connection reads memory any more. One that does so for longer than
    /// `CLOSED_RELEASE_TIMEOUT` counts as released, and its operations fail.
    pub(super) fn has_released(&mut self, now: Duration) -> bool {
        self.unreleased.retain_mut(|closed| {
            let late = now.saturating_sub(closed.since) > limits::CLOSED_RELEASE_TIMEOUT;
            if closed.unreleased.has_released() {
                return false;
            }
            if late {
                closed.give_up();
            }
            !late
        });
        self.unreleased.is_empty()
    }
}

impl Closed {
    /// Fails operations on dropped memory that the kernel or a NIC has not released in time, even where the
    /// peer has placed their bytes.
    fn give_up(&self) {
        tracing::error!("a NIC may still send from memory of a closed connection or lane");
        let dropped = |op: &&Arc<Op>| op.memory.as_ref().is_some_and(|memory| memory.is_gone());
        self.ops.iter().filter(dropped).for_each(|op| op.fail(Error::invalid("region", DROPPED)));
    }
}
