//! The timed loop of one flow: keeps `depth` transfers in flight and records each completion.
//!
//! The driver posts; the other end of a two-sided flow follows with receives. Both use the slots in the same order.
//! After its last message a driver sends its follower the number of messages.
//! Read next: `session.rs`, the caller.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use ferrywire::{Block, BlockList, MemoryLocation, Region, RemoteRegion, Transfer, TransferError};

use super::layout::{Flow, Layout};
use super::link::{Link, Stall};
use super::measure::{Limit, Meter};
use super::protocol::{FlowReport, Message, Run, Side};
use crate::args::Op;
use crate::exit::{Failure, Outcome};

/// How often a follower checks whether its driver has stopped, while nothing arrives.
const FOLLOW_SLICE: Duration = Duration::from_millis(20);

/// Posts the transfers of one flow and size at one end; block lists are prepared once.
pub struct Poster<'a> {
    link: &'a Link,
    op: Op,
    local: &'a Region,
    remote: &'a RemoteRegion,
    tag: u64,
    layout: Layout,
    remote_layout: Layout,
    prepared: Vec<Prepared>,
}

/// The prepared lists per slot, if messages are cut into blocks.
enum Prepared {
    OneSided(BlockList),
    TwoSided(Vec<(u64, u64)>),
}

impl<'a> Poster<'a> {
    /// Prepares one end of a flow for the size with this index.
    pub fn new(
        link: &'a Link,
        run: &Run,
        flow: Flow,
        side: Side,
        step: usize,
        memory: (&'a Region, &'a RemoteRegion),
    ) -> Outcome<Poster<'a>> {
        let (local, remote) = memory;
        let layout = Layout::new(run, flow, side, step);
        let remote_layout = Layout::new(run, flow, side.other(), step);
        let tag = ((step as u64) << 8) | flow.area();
        let mut poster =
            Poster { link, op: run.op, local, remote, tag, layout, remote_layout, prepared: Vec::new() };
        if run.blocks.is_some() {
            poster.prepared =
                (0..poster.layout.slots).map(|slot| poster.prepare(slot)).collect::<Outcome<_>>()?;
        }
        Ok(poster)
    }

    fn prepare(&self, slot: u64) -> Outcome<Prepared> {
        if self.op == Op::Send {
            return Ok(Prepared::TwoSided(self.layout.pieces(slot).map(|p| (p.offset, p.bytes)).collect()));
        }
        let pairs = self.layout.pieces(slot).zip(self.remote_layout.pieces(slot));
        let block = |(l, r): (super::layout::Piece, super::layout::Piece)| Block {
            local_offset: l.offset,
            remote_offset: r.offset,
            bytes: l.bytes,
        };
        let blocks: Vec<Block> = pairs.map(block).collect();
        Ok(Prepared::OneSided(BlockList::new(self.local, self.remote, &blocks)?))
    }

    /// The conversation with the other end.
    pub fn link(&self) -> &Link {
        self.link
    }

    /// The layout of the messages at this end.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Starts the driver's transfer of the message in a slot.
    pub fn post(&self, slot: u64) -> Outcome<Transfer> {
        let (local, remote) = (self.layout.whole(slot), self.remote_layout.whole(slot));
        let peer = &self.link.peer;
        let posted = match (self.op, self.prepared.get(slot as usize)) {
            (Op::Write, None) => {
                peer.write(self.local, local.offset, self.remote, remote.offset, local.bytes)
            }
            (Op::Read, None) => peer.read(self.local, local.offset, self.remote, remote.offset, local.bytes),
            (Op::Write, Some(Prepared::OneSided(list))) => peer.write_blocks(list, None, None),
            (Op::Read, Some(Prepared::OneSided(list))) => peer.read_blocks(list, None),
            (_, Some(Prepared::TwoSided(pieces))) => peer.send_blocks(self.tag, self.local, pieces),
            (Op::Send, _) => peer.send(self.tag, self.local, local.offset, local.bytes),
        };
        posted.map_err(|error| self.link.lost(error))
    }

    /// Starts a write with a notification behind it.
    pub fn post_marked(&self, slot: u64, iteration: u64) -> Outcome<Transfer> {
        let (local, remote) = (self.layout.whole(slot), self.remote_layout.whole(slot));
        let (peer, mark) = (&self.link.peer, Link::mark(iteration));
        let posted = match self.prepared.get(slot as usize) {
            Some(Prepared::OneSided(list)) => peer.write_blocks(list, None, Some(&mark)),
            _ => peer.write_notify(self.local, local.offset, self.remote, remote.offset, local.bytes, &mark),
        };
        posted.map_err(|error| self.link.lost(error))
    }

    /// Starts the follower's receive into a slot.
    pub fn receive(&self, slot: u64) -> Outcome<Transfer> {
        let local = self.layout.whole(slot);
        let posted = match self.prepared.get(slot as usize) {
            Some(Prepared::TwoSided(pieces)) => self.link.peer.recv_blocks(self.tag, self.local, pieces),
            _ => self.link.peer.recv(self.tag, self.local, local.offset, local.bytes),
        };
        posted.map_err(|error| self.link.lost(error))
    }

    /// Whether the other end's memory is on a GPU.
    pub fn writes_to_gpu(&self) -> bool {
        self.remote.location() != MemoryLocation::Host
    }

    /// Waits until a message is complete, and checks its length.
    pub fn finish(&self, transfer: &Transfer) -> Outcome {
        self.right_length(self.link.finish(transfer)?)
    }

    fn right_length(&self, bytes: u64) -> Outcome {
        let size = self.layout.size();
        if bytes == size {
            return Ok(());
        }
        Err(Failure::failed(format!("a message of {size} bytes was reported complete with {bytes} bytes")))
    }
}

/// A transfer that was posted.
struct Posted {
    transfer: Transfer,
    slot: u64,
    since: Instant,
}

/// Drives a flow until the limit, with `depth` transfers in flight.
pub fn drive(poster: &Poster, depth: usize, limit: Limit) -> Outcome<FlowReport> {
    let mut in_flight = VecDeque::with_capacity(depth);
    let driven = drive_with(&mut in_flight, poster, depth, limit);
    if driven.is_err() {
        // The failure is reported without waiting for these transfers.
        in_flight.iter().for_each(|posted| posted.transfer.cancel());
    }
    driven
}

fn drive_with(
    in_flight: &mut VecDeque<Posted>,
    poster: &Poster,
    depth: usize,
    limit: Limit,
) -> Outcome<FlowReport> {
    let (slots, size) = (poster.layout.slots, poster.layout.size());
    let mut meter = Meter::start(poster.layout.peers);
    let (mut posted, mut now, mut elapsed) = (0, Instant::now(), Duration::ZERO);
    // Transfers may complete out of order; if memory is short they share slots.
    let mut free: VecDeque<u64> = (0..slots).collect();
    loop {
        while in_flight.len() < depth && limit.allows(posted, elapsed) {
            // A receiver uses its slots in order; a source may be sent twice at the same time.
            let unused = if poster.op == Op::Send { None } else { free.pop_front() };
            let slot = unused.unwrap_or(posted % slots);
            in_flight.push_back(Posted { transfer: poster.post(slot)?, slot, since: now });
            posted += 1;
            if in_flight.len() < depth {
                now = Instant::now();
                elapsed = meter.elapsed(now);
            }
        }
        if in_flight.is_empty() {
            break;
        }
        let first = poster.link.first_of(in_flight.iter().map(|posted| &posted.transfer))?;
        let Some(done) = in_flight.remove(first) else { continue };
        poster.finish(&done.transfer)?;
        now = Instant::now();
        elapsed = meter.completed(now, size, now.duration_since(done.since));
        if poster.op != Op::Send {
            free.push_back(done.slot);
        }
    }
    if poster.op == Op::Send {
        poster.link.tell(&Message::Stop { count: posted })?;
    }
    let (intervals, latency) = meter.finish();
    Ok(FlowReport { iterations: posted, intervals, latency, ..FlowReport::default() })
}

/// Receives the messages of the other end until it has stopped.
pub fn follow(poster: &Poster, depth: usize) -> Outcome {
    let mut waiting: VecDeque<Transfer> = VecDeque::with_capacity(depth);
    let (mut posted, mut received, mut stop) = (0, 0, None);
    let mut stall = Stall::new(poster.link);
    loop {
        // The other end may report its number of messages before the last of them have arrived.
        while stop.is_none_or(|count| posted < count) && waiting.len() < depth {
            waiting.push_back(poster.receive(posted % poster.layout.slots)?);
            posted += 1;
        }
        if stop == Some(received) {
            break;
        }
        let Some(oldest) = waiting.front() else {
            let announced = stop.unwrap_or_default();
            let what = format!("{announced} messages were announced, but {received} have arrived");
            return Err(poster.link.strange(&what));
        };
        match oldest.wait(FOLLOW_SLICE) {
            Ok(bytes) => {
                poster.right_length(bytes)?;
                waiting.pop_front();
                received += 1;
                poster.link.goes_on()?;
            }
            // To ask for the end takes as long as to receive a short message.
            Err(TransferError::Stalled { .. }) if stop.is_none() => {
                stop = stopped(poster.link)?;
                stall.check("messages")?;
            }
            Err(TransferError::Stalled { .. }) => stall.check("messages")?,
            Err(error) => return Err(poster.link.lost(error)),
        }
    }
    waiting.iter().try_for_each(|transfer| withdraw(poster, transfer))
}

/// The number of messages that the other end has sent, once it has stopped.
pub fn stopped(link: &Link) -> Outcome<Option<u64>> {
    match link.try_hear()? {
        None => Ok(None),
        Some(Message::Stop { count }) => Ok(Some(count)),
        Some(other) => Err(link.unexpected(&other, "the end of a flow")),
    }
}

/// Cancels a receive that no message will match.
pub fn withdraw(poster: &Poster, transfer: &Transfer) -> Outcome {
    transfer.cancel();
    loop {
        match transfer.wait(FOLLOW_SLICE) {
            Err(TransferError::Cancelled) => return Ok(()),
            Ok(_) => return Err(poster.link.strange("a message arrived after the last announced one")),
            Err(TransferError::Stalled { .. }) => Stall::new(poster.link).check("a cancelled receive")?,
            Err(error) => return Err(poster.link.lost(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Pattern, Verify};
    use crate::bench::layout::{flows, region_bytes};
    use crate::memory::Memory;
    use ferrywire::Endpoint;
    use std::sync::atomic::Ordering;
    use std::thread;

    const LIMIT: Duration = Duration::from_secs(60);
    const COUNT: u64 = 100;

    fn run() -> Run {
        Run {
            op: Op::Send,
            pattern: Pattern::Unidir,
            memory: Memory::Host,
            peer_memory: Some(Memory::Host),
            unpack: None,
            sizes: vec![8],
            depth: Some(2),
            blocks: None,
            peers: 1,
            multi_gpu: false,
            iters: Some(COUNT),
            seconds: None,
            warmup: None,
            verify: Verify::Off,
            timeout_s: LIMIT.as_secs_f64(),
            seed: 1,
        }
    }

    /// Regression: it asked for the end of the flow after each message, which took longer than to receive one of 4 KiB.
    #[test]
    fn a_follower_takes_all_messages_that_came_before_its_receives_and_then_asks_for_the_end() {
        let accepting = Endpoint::builder().listen(([127, 0, 0, 1], 0).into()).build().expect("an endpoint");
        let connecting = Endpoint::builder().build().expect("an endpoint");
        let near = connecting.connect(accepting.listen_addresses()[0], LIMIT).expect("a peer");
        let far = accepting.accept(LIMIT).expect("a peer");
        let (near, far) = (Link::new(near, LIMIT), Link::new(far, LIMIT));
        let run = run();
        let region = |endpoint: &Endpoint| endpoint.alloc_host(region_bytes(&run) as usize);
        let (here, there) = (region(&connecting).expect("memory"), region(&accepting).expect("memory"));
        let (to_here, to_there) = (here.descriptor(), there.descriptor());
        let flow = flows(&run)[0];
        let sends = Poster::new(&near, &run, flow, Side::Connect, 0, (&here, &to_there)).expect("a poster");
        let receives = Poster::new(&far, &run, flow, Side::Serve, 0, (&there, &to_here)).expect("a poster");
        let sent: Vec<_> = (0..COUNT).map(|_| sends.post(0).expect("a message")).collect();
        sent.iter().for_each(|message| assert_eq!(sends.finish(message), Ok(())));
        thread::scope(|scope| {
            let following = scope.spawn(|| follow(&receives, COUNT as usize));
            while far.asked.load(Ordering::Relaxed) == 0 && !following.is_finished() {
                thread::sleep(Duration::from_millis(1));
            }
            // Enough time to ask once per message.
            thread::sleep(5 * FOLLOW_SLICE);
            near.tell(&Message::Stop { count: COUNT }).expect("the end of the flow");
            assert_eq!(following.join().expect("no panic"), Ok(()));
        });
        let asked = far.asked.load(Ordering::Relaxed) as u64;
        assert!(asked < COUNT, "the follower asked {asked} times for the end");
    }
}
