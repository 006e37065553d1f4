//! One direction of a simulated connection: the bytes and acknowledgements that two kernels would hold.
//!
//! Bytes go `in flight -> arrived -> read`, and acknowledgements come back. A cut path loses the bytes in
//! flight; they stay in this pipe and are sent again when the path heals, as TCP would.
//! Invariants: bytes arrive in order and once; `acked <= delivered <= sent`, `consumed <= delivered`; at most
//! `capacity` bytes are unacknowledged or unread.
//! Read next: `link.rs`, which joins two of these.

use std::collections::VecDeque;
use std::time::Duration;

/// First retransmission timeout; each further one is twice as long.
const RETRANSMIT_FIRST: Duration = Duration::from_millis(200);
/// Longest wait between two retransmissions.
const RETRANSMIT_GAP_MAX: Duration = Duration::from_secs(120);

/// Content of a segment.
#[derive(Debug)]
pub(super) enum Payload {
    Bytes(Vec<u8>),
    /// The end of the stream in one direction, as TCP's FIN.
    Fin,
    /// The end of the whole connection, as TCP's RST.
    Rst,
}

impl Payload {
    pub(super) fn len(&self) -> usize {
        if let Payload::Bytes(bytes) = self { bytes.len() } else { 0 }
    }
}

/// A segment in flight in one direction.
#[derive(Debug)]
pub(super) struct Segment {
    pub(super) payload: Payload,
    /// Virtual time at which the segment has left the sending host.
    pub(super) leaves: Duration,
    /// Virtual time at which the segment arrives.
    pub(super) due: Duration,
    /// Whether the segment was lost on a cut path, and waits for its retransmission.
    pub(super) lost: bool,
}

#[derive(Debug)]
pub(super) struct Pipe {
    capacity: usize,
    pub(super) in_flight: VecDeque<Segment>,
    pub(super) arrived: VecDeque<u8>,
    /// Acknowledgements in flight: when each arrives, and up to which byte it acknowledges.
    pub(super) acks: VecDeque<(Duration, u64)>,
    pub(super) sent: u64,
    pub(super) delivered: u64,
    consumed: u64,
    acked: u64,
    /// When the retransmission timer was started; `None` when no byte waits.
    waiting_since: Option<Duration>,
    pub(super) last_ack: Duration,
    /// When the sender first found no room; `None` while there is room.
    pub(super) full_since: Option<Duration>,
    corrupt_at: Option<u64>,
}

impl Pipe {
    pub(super) fn new(capacity: usize, now: Duration) -> Pipe {
        Pipe {
            capacity,
            in_flight: VecDeque::new(),
            arrived: VecDeque::new(),
            acks: VecDeque::new(),
            sent: 0,
            delivered: 0,
            consumed: 0,
            acked: 0,
            waiting_since: None,
            last_ack: now,
            full_since: None,
            corrupt_at: None,
        }
    }

    /// Number of bytes that the sender can write now.
    pub(super) fn room(&self) -> usize {
        let held = (self.sent - self.acked.min(self.consumed)) as usize;
        self.capacity.saturating_sub(held)
    }

    pub(super) fn is_waiting(&self) -> bool {
        self.acked < self.sent
    }

    /// Puts bytes in flight. Flips one bit where a corruption was requested, and returns whether it did.
    pub(super) fn push(
        &mut self,
        mut bytes: Vec<u8>,
        times: (Duration, Duration),
        lost: bool,
        now: Duration,
    ) -> bool {
        let corrupted = self.corrupt(&mut bytes);
        self.sent += bytes.len() as u64;
        self.waiting_since.get_or_insert(now);
        self.full_since = None;
        self.enqueue(Payload::Bytes(bytes), times, lost);
        corrupted
    }

    /// Puts a segment in flight, behind all others of this direction.
    pub(super) fn enqueue(&mut self, payload: Payload, (leaves, due): (Duration, Duration), lost: bool) {
        let behind = self.in_flight.back().map_or(Duration::ZERO, |segment| segment.due);
        self.in_flight.push_back(Segment { payload, leaves, due: due.max(behind), lost });
    }

    /// Flips one bit of the first byte that is sent at or after `offset` of the stream.
    pub(super) fn corrupt_from(&mut self, offset: u64) {
        self.corrupt_at = Some(offset);
    }

    fn corrupt(&mut self, bytes: &mut [u8]) -> bool {
        let end = self.sent + bytes.len() as u64;
        let Some(at) = self.corrupt_at.map(|at| at.max(self.sent)).filter(|at| *at < end) else {
            return false;
        };
        bytes[(at - self.sent) as usize] ^= 0x10;
        self.corrupt_at = None;
        true
    }

    /// Delivers bytes to the receiving kernel. `keep` is false when no process will read them.
    pub(super) fn deliver(&mut self, bytes: &[u8], keep: bool) {
        self.delivered += bytes.len() as u64;
        if keep {
            self.arrived.extend(bytes);
        }
    }

    /// Removes bytes that the reader has copied.
    pub(super) fn consume(&mut self, count: usize) {
        self.arrived.drain(..count);
        self.consumed += count as u64;
    }

    /// Sends an acknowledgement of all delivered bytes. It replaces those that would arrive later, since
    /// acknowledgements are cumulative.
    pub(super) fn send_ack(&mut self, due: Duration) {
        while self.acks.back().is_some_and(|(at, _)| *at >= due) {
            self.acks.pop_back();
        }
        self.acks.push_back((due, self.delivered));
    }

    /// Bytes of the stream that the other end has acknowledged.
    pub(super) fn acked(&self) -> u64 {
        self.acked
    }

    pub(super) fn acknowledge(&mut self, upto: u64, at: Duration) {
        self.acked = self.acked.max(upto);
        self.last_ack = at;
        self.waiting_since = self.is_waiting().then_some(at);
    }

    /// Marks all segments in flight as lost, because the path was cut.
    pub(super) fn lose_in_flight(&mut self) {
        self.in_flight.iter_mut().for_each(|segment| segment.lost = true);
    }

    /// Discards all segments and acknowledgements in flight, because the connection is over.
    pub(super) fn clear_flight(&mut self) {
        self.in_flight.clear();
        self.acks.clear();
    }

    /// Schedules lost segments for when the retransmission timer next fires, because the path has healed.
    pub(super) fn resend(&mut self, now: Duration, latency: Duration, rto: Duration) {
        let due = self.next_retry(now, rto) + latency;
        if self.in_flight.iter().all(|segment| !segment.lost) {
            return;
        }
        for segment in &mut self.in_flight {
            segment.lost = false;
            segment.due = segment.due.max(due);
        }
    }

    /// Repeats lost acknowledgements, because the path has healed in both directions.
    pub(super) fn acknowledge_again(&mut self, now: Duration, rtt: Duration, rto: Duration) {
        if self.acked < self.delivered && self.acks.is_empty() {
            self.acks.push_back((self.next_retry(now, rto) + rtt, self.delivered));
        }
    }

    /// Number of retransmissions in a row that were not answered.
    pub(super) fn unanswered(&self, now: Duration, rto: Duration) -> u32 {
        let Some(since) = self.waiting_since else { return 0 };
        // The wait for a segment begins when the segment has left the sending host.
        let first = self.in_flight.front().filter(|segment| !segment.lost);
        let since = first.map_or(since, |segment| since.max(segment.leaves));
        retries(now.saturating_sub(since), rto)
    }

    fn next_retry(&self, now: Duration, rto: Duration) -> Duration {
        let Some(since) = self.waiting_since else {
            return now;
        };
        let (mut at, mut gap) = (since + rto, rto * 2);
        while at <= now {
            at += gap;
            gap = (gap * 2).min(RETRANSMIT_GAP_MAX);
        }
        at
    }
}

/// Retransmission timeout of a path with this round trip.
pub(super) fn retransmit_timeout(rtt: Duration) -> Duration {
    RETRANSMIT_FIRST.max(rtt * 2)
}

/// Number of retransmissions within `silence`: one after 1, 3, 7, 15... timeouts.
pub(super) fn retries(silence: Duration, rto: Duration) -> u32 {
    let (mut count, mut at, mut gap) = (0, rto, rto * 2);
    while at <= silence {
        count += 1;
        at += gap;
        gap = (gap * 2).min(RETRANSMIT_GAP_MAX);
    }
    count
}
