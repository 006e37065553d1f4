//! A simulated connection: two ends, two pipes, and the kernel's reaction when an end goes away.
//!
//! States: `Connecting -> Up -> (ended by its ends)`, or `Connecting -> Failing`. The code is pure: time and
//! the state of the path are arguments, so events due up to a moment can be processed late with an unchanged
//! result ([`Link::settle`]).
//! Invariant: the path does not change between two calls of `settle`; code that changes a path settles its
//! links first.
//! Read next: `state.rs`, which owns all links.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::time::Duration;

use super::pipe::{Payload, Pipe, retransmit_timeout};
use super::trace::Trace;

/// State of the path under a link; its arrays have one entry per sending end.
#[derive(Clone, Copy, Debug)]
pub(super) struct Path {
    pub(super) open: [bool; 2],
    /// One-way latency of the path.
    pub(super) latency: Duration,
}

impl Path {
    pub(super) fn rtt(self) -> Duration {
        self.latency * 2
    }

    pub(super) fn rto(self) -> Duration {
        retransmit_timeout(self.rtt())
    }

    pub(super) fn is_open(self) -> bool {
        self.open[0] && self.open[1]
    }
}

/// State of a simulated connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// The dialling end has sent its request; `tries` requests were unanswered.
    Connecting { tries: u32 },
    /// The dialling end learns of a failure at this moment.
    Failing { at: Duration, kind: ErrorKind },
    /// The dialling end may send from this moment on.
    Up { at: Duration },
}

/// One end of a simulated connection.
#[derive(Debug)]
pub(super) struct End {
    pub(super) host: usize,
    pub(super) nic: usize,
    pub(super) address: SocketAddr,
    /// Whether the owner has shut down this end.
    pub(super) shut: bool,
    /// Whether a reset has arrived at this end.
    pub(super) reset: bool,
    /// Whether the other end's last byte has arrived.
    pub(super) fin: bool,
    /// Whether the owner has dropped this end.
    pub(super) dropped: bool,
    /// The mark (`Fin` or `Rst`) that this end sends to the other once its host is not frozen.
    pub(super) farewell: Option<Payload>,
    /// Whether this end has answered unwanted bytes with a reset.
    rejected: bool,
}

impl End {
    pub(super) fn new(host: usize, nic: usize, address: SocketAddr) -> End {
        End {
            host,
            nic,
            address,
            shut: false,
            reset: false,
            fin: false,
            dropped: false,
            farewell: None,
            rejected: false,
        }
    }

    /// Whether this end's kernel discards further bytes.
    fn is_gone(&self) -> bool {
        self.reset || (self.shut && self.farewell.is_none())
    }
}

/// The next event of a simulated connection.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// The first segment in flight from this end arrives.
    Arrive(usize),
    /// The first acknowledgement for this end arrives.
    Acknowledge(usize),
}

/// A simulated connection.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) id: u64,
    pub(super) ends: [End; 2],
    /// The two directions of the connection, indexed by sending end.
    pub(super) pipes: [Pipe; 2],
    pub(super) phase: Phase,
    pub(super) dialled_at: Duration,
    pub(super) stalled_until: Duration,
    /// Whether the connection carries bulk data.
    pub(super) bulk: bool,
}

impl Link {
    /// A connection whose request is not answered; its accepting end counts as dropped until it is accepted.
    pub(super) fn new(id: u64, ends: [End; 2], capacity: usize, now: Duration) -> Link {
        let mut link = Link {
            id,
            ends,
            pipes: [Pipe::new(capacity, now), Pipe::new(capacity, now)],
            phase: Phase::Connecting { tries: 0 },
            dialled_at: now,
            stalled_until: Duration::ZERO,
            bulk: false,
        };
        link.ends[1].dropped = true;
        link
    }

    pub(super) fn is_up(&self) -> bool {
        matches!(self.phase, Phase::Up { .. })
    }

    /// Whether an end can move bytes. Returns `WouldBlock` while connecting, afterwards the final error.
    pub(super) fn check_connected(&self, end: usize, now: Duration) -> Result<(), ErrorKind> {
        match self.phase {
            Phase::Failing { at, kind } if now >= at => Err(kind),
            Phase::Up { at } if end == 1 || now >= at => Ok(()),
            _ => Err(ErrorKind::WouldBlock),
        }
    }

    /// Processes all events of the connection that are due up to `now`.
    pub(super) fn settle(&mut self, path: Path, now: Duration, trace: &mut Trace) {
        while let Some((at, step)) = self.next_step().filter(|(at, _)| *at <= now) {
            match step {
                Step::Arrive(from) => self.arrive(from, at, path, trace),
                Step::Acknowledge(from) => self.take_ack(from, at),
            }
        }
    }

    /// When the connection's next event after `now` is due.
    pub(super) fn next_at(&self, now: Duration) -> Option<Duration> {
        let phase = match self.phase {
            Phase::Failing { at, .. } | Phase::Up { at } => Some(at),
            Phase::Connecting { .. } => None,
        };
        self.next_step().map(|(at, _)| at).into_iter().chain(phase).filter(|at| *at > now).min()
    }

    fn next_step(&self) -> Option<(Duration, Step)> {
        let steps = [0, 1].into_iter().flat_map(|from| {
            let pipe = &self.pipes[from];
            let segment = pipe.in_flight.front().filter(|segment| !segment.lost);
            let arrival = segment.map(|segment| (segment.due, Step::Arrive(from)));
            let ack = pipe.acks.front().map(|(at, _)| (*at, Step::Acknowledge(from)));
            [arrival, ack].into_iter().flatten()
        });
        let next = steps.min_by_key(|(at, _)| *at)?;
        Some((next.0.max(self.stalled_until), next.1))
    }

    fn arrive(&mut self, from: usize, at: Duration, path: Path, trace: &mut Trace) {
        let pipe = &mut self.pipes[from];
        if !path.open[from] {
            return pipe.lose_in_flight();
        }
        let Some(segment) = pipe.in_flight.pop_front() else {
            return;
        };
        match segment.payload {
            Payload::Bytes(bytes) => self.arrive_bytes(from, &bytes, at, path, trace),
            Payload::Fin => {
                trace.note(at, format_args!("c{} end {} sees the end", self.id, 1 - from));
                self.ends[1 - from].fin = true;
            }
            Payload::Rst => {
                trace.note(at, format_args!("c{} end {} sees a reset", self.id, 1 - from));
                self.reset_end(1 - from);
            }
        }
    }

    fn arrive_bytes(&mut self, from: usize, bytes: &[u8], at: Duration, path: Path, trace: &mut Trace) {
        let gone = self.ends[1 - from].is_gone();
        let pipe = &mut self.pipes[from];
        pipe.deliver(bytes, !gone);
        if gone {
            trace.note(at, format_args!("c{} end {} rejects {} bytes", self.id, 1 - from, bytes.len()));
            self.reject(1 - from, at, path);
        } else if path.open[1 - from] {
            pipe.send_ack(at + path.latency);
        }
    }

    /// Answers bytes that no process will read with a reset, once, as a kernel does.
    fn reject(&mut self, end: usize, at: Duration, path: Path) {
        if !std::mem::replace(&mut self.ends[end].rejected, true) {
            self.tell(end, Payload::Rst, at, path);
        }
    }

    /// Sends a mark (`Fin` or `Rst`) from `end`, behind its bytes in flight.
    pub(super) fn tell(&mut self, end: usize, mark: Payload, at: Duration, path: Path) {
        self.pipes[end].enqueue(mark, (at, at + path.latency), !path.open[end]);
    }

    fn take_ack(&mut self, from: usize, at: Duration) {
        let pipe = &mut self.pipes[from];
        if let Some((_, upto)) = pipe.acks.pop_front() {
            pipe.acknowledge(upto, at);
        }
    }

    /// Resets an end: its bytes in flight are lost, bytes that have arrived can still be read.
    pub(super) fn reset_end(&mut self, end: usize) {
        self.ends[end].reset = true;
        self.pipes[end].clear_flight();
    }

    /// Loses the bytes in flight in each direction that the path no longer carries.
    pub(super) fn lose(&mut self, path: Path) {
        for from in [0, 1] {
            if !path.open[from] {
                self.pipes[from].lose_in_flight();
                self.pipes[1 - from].acks.clear();
            }
        }
    }

    /// Resends lost bytes, and repeats lost acknowledgements, in each direction that the path carries again.
    pub(super) fn recover(&mut self, path: Path, now: Duration) {
        for from in [0, 1] {
            if path.open[from] {
                self.pipes[from].resend(now, path.latency, path.rto());
            }
            if path.is_open() {
                self.pipes[from].acknowledge_again(now, path.rtt(), path.rto());
            }
        }
    }
}
