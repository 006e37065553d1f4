//! The progress of a comm in one `test`.
//!
//! Collects chunks that workers have finished; admits at most one posted request; schedules chunks of the oldest active
//! request only. So N messages need at least N calls at each end.
//! Invariant: chunks reach a data socket in the order of their control records.
//! Read next: `worker.rs`, which moves the chunks.

use std::io;
use std::os::fd::RawFd;

use ferrywire_ncclnet::abi::ResultCode;

use crate::comm::{Comm, Outcome};
use crate::control::{ControlError, Kind, RECORD_BYTES, RECORDS_PER_WRITE, Record};
use crate::faults::Direction;
use crate::lane::{CHUNKS_PER_LANE_MAX, Chunk, Work};
use crate::log::{exit_1, warning};
use crate::ring::Number;
use crate::sync::locked;

impl Comm {
    /// Makes one pass; with `one_step` off, as many passes as change something.
    pub(crate) fn progress(&mut self) -> Outcome<()> {
        loop {
            self.collect();
            let admitted = self.admit()?;
            let scheduled = self.schedule()?;
            if self.rules.switches.one_step || !(admitted || scheduled) {
                return Ok(());
            }
        }
    }

    /// Collects finished chunks from the workers.
    fn collect(&mut self) {
        for k in 0..self.lanes.len() {
            while let Some(chunk) = self.lanes[k].collect() {
                let number = self.ring.number_at(chunk.slot as u64);
                self.slots[chunk.slot].moved += chunk.len;
                if let (Some(unpack), Some(number), Work::Pages { .. }) =
                    (&mut self.unpack, number, &chunk.work)
                {
                    unpack.append(number, chunk.offset, &chunk.fragments);
                }
            }
        }
    }

    /// Moves the oldest POSTED request to ACTIVE; returns whether there was one.
    fn admit(&mut self) -> Outcome<bool> {
        let Some(number) = self.ring.oldest_posted() else { return Ok(false) };
        if self.rules.recv_sync && !self.rendezvous(number)? {
            return Ok(false);
        }
        self.ring.admit();
        Ok(true)
    }

    /// Exchanges the request's index: the receiver writes it, the sender waits for it.
    fn rendezvous(&mut self, number: Number) -> Outcome<bool> {
        if self.direction() == Direction::Recv {
            self.write_control(&(number as u32).to_ne_bytes())?;
            return Ok(true);
        }
        let mut word = [0; 4];
        let missing = word.len() - self.announced.len();
        match recv_now(self.control_fd(), &mut word[..missing]) {
            Ok(0) => return Err(ResultCode::SYSTEM_ERROR),
            Ok(count) => self.announced.extend_from_slice(&word[..count]),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => return Err(ResultCode::SYSTEM_ERROR),
        }
        let complete = self.announced.len() == word.len();
        if complete {
            self.announced.clear();
        }
        Ok(complete)
    }

    /// Moves the oldest ACTIVE request to TRANSMITTING, once all of it is on data sockets.
    fn schedule(&mut self) -> Outcome<bool> {
        let Some(number) = self.ring.oldest_active() else { return Ok(false) };
        let slot = self.ring.slot_of(number);
        let all = match self.direction() {
            Direction::Send => self.schedule_send(number, slot),
            Direction::Recv => self.schedule_recv(number, slot),
        };
        if let Ok(true) | Err(Scheduled::AllAndFailed) = all {
            self.ring.transmit();
        }
        all.map_err(|_| ResultCode::SYSTEM_ERROR)
    }

    fn schedule_send(&mut self, number: Number, slot: usize) -> Result<bool, Scheduled> {
        let total = self.slots[slot].posted_bytes;
        if self.mute {
            return Ok(false);
        }
        if self.shared.faults.half_control_after.is_some_and(|n| number >= n) {
            return Ok(self.go_mute(total));
        }
        if total <= self.rules.inline_bytes {
            return self.send_inline(slot, total);
        }
        let mut records = Vec::new();
        while self.slots[slot].queued < total
            && records.len() < self.chunks_per_turn()
            && let Some(lane) = self.lane_with_room()
        {
            records.push(self.queue_send(slot, lane, total)?);
        }
        let all = self.slots[slot].queued == total;
        let written = records.chunks(RECORDS_PER_WRITE).try_for_each(|batch| {
            let bytes: Vec<u8> = batch.iter().flat_map(Record::encode).collect();
            self.write_control(&bytes)
        });
        written.map(|()| all).map_err(|_| if all { Scheduled::AllAndFailed } else { Scheduled::Failed })
    }

    /// Most chunks of one pass; one where chunks have no bytes, which would never end.
    fn chunks_per_turn(&self) -> usize {
        let endless = if self.rules.chunk_bytes == 0 { CHUNKS_PER_LANE_MAX } else { usize::MAX };
        self.rules.chunks_per_call_max.min(endless)
    }

    /// Index of the next data socket with room, in round-robin order.
    fn lane_with_room(&mut self) -> Option<usize> {
        let count = self.lanes.len();
        let found = (0..count).map(|k| (self.next_lane + k) % count).find(|k| self.lanes[*k].has_room())?;
        self.next_lane = (found + 1) % count;
        Some(found)
    }

    /// Queues the next chunk of a send; returns the record for the receiver.
    fn queue_send(&mut self, slot: usize, lane: usize, total: usize) -> Result<Record, Scheduled> {
        let state = &mut self.slots[slot];
        let (offset, len) = (state.queued, self.rules.chunk_bytes.min(total - state.queued));
        let work = Work::Send { source: state.data.wrapping_add(offset), cuda: state.cuda };
        state.queued += len;
        self.queue(lane, Chunk { slot, offset, len, moved: 0, work, fragments: Vec::new() })?;
        let kind = Kind::Chunk;
        Ok(Record { kind, index: lane as u16, size: len as u32, offset: offset as u32, total: total as u32 })
    }

    fn queue(&mut self, lane: usize, chunk: Chunk) -> Result<(), Scheduled> {
        self.lanes[lane].push(chunk);
        self.crew().map_err(|_| Scheduled::Failed)?.wake(lane);
        Ok(())
    }

    fn send_inline(&mut self, slot: usize, total: usize) -> Result<bool, Scheduled> {
        let record = Record { kind: Kind::Inline, index: 0, size: 0, offset: 0, total: total as u32 };
        let mut bytes = record.encode().to_vec();
        if total > 0 {
            // SAFETY: `isend` promised `total` readable bytes until the request is done.
            bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(self.slots[slot].data, total) });
        }
        self.slots[slot].moved = total;
        self.write_control(&bytes).map(|()| true).map_err(|_| Scheduled::AllAndFailed)
    }

    /// Writes half a record, after which the comm writes nothing more.
    fn go_mute(&mut self, total: usize) -> bool {
        warning!("comm {}: half a control message, injected by half_control_after", self.id());
        let record = Record { kind: Kind::Chunk, index: 0, size: 1, offset: 0, total: total as u32 };
        self.mute = true;
        let _ = self.write_control(&record.encode()[..RECORD_BYTES / 2]);
        true
    }

    fn schedule_recv(&mut self, number: Number, slot: usize) -> Result<bool, Scheduled> {
        for _ in 0..self.chunks_per_turn() {
            let Some(record) = self.next_record()? else { return Ok(false) };
            self.check_total(slot, &record)?;
            if record.kind == Kind::Inline {
                return self.receive_inline(slot, record.total as usize);
            }
            let lane = usize::from(record.index);
            if lane >= self.lanes.len() {
                warning!(
                    "comm {}: the peer sends a chunk on data socket {lane}, but the comm has {}",
                    self.id(),
                    self.lanes.len()
                );
                return Err(Scheduled::Failed);
            }
            if !self.lanes[lane].has_room() {
                warning!("comm {}: data socket {lane} has {CHUNKS_PER_LANE_MAX} chunks in flight", self.id());
                self.waiting_record = Some(record);
                return Ok(false);
            }
            self.queue_recv(number, slot, lane, &record)?;
            if self.slots[slot].queued >= record.total as usize {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn next_record(&mut self) -> Result<Option<Record>, Scheduled> {
        if let Some(record) = self.waiting_record.take() {
            return Ok(Some(record));
        }
        let fd = self.control_fd();
        self.inbox.next(&mut |target| recv_now(fd, target)).map_err(|error| {
            match error {
                ControlError::Closed => warning!("Connection closed by remote peer"),
                ControlError::Garbage => warning!("comm {}: a control message of no known type", self.id()),
            }
            Scheduled::Failed
        })
    }

    /// Takes the message's size from its first record. The posted size is a limit only if the switch
    /// `overrun` is off.
    fn check_total(&mut self, slot: usize, record: &Record) -> Result<(), Scheduled> {
        let state = &mut self.slots[slot];
        let total = *state.total.get_or_insert(record.total as usize);
        if total != record.total as usize || state.queued + record.size as usize > total {
            exit_1(format_args!("totals that differ: {record:?} in a message of {total} bytes"));
        }
        if record.total as usize > state.posted_bytes && !self.rules.switches.overrun {
            warning!(
                "a message of {} bytes arrived for a receive of {} bytes",
                record.total,
                state.posted_bytes
            );
            return Err(Scheduled::Failed);
        }
        Ok(())
    }

    fn queue_recv(
        &mut self,
        number: Number,
        slot: usize,
        lane: usize,
        record: &Record,
    ) -> Result<(), Scheduled> {
        let leak = self.rules.switches.leak;
        let state = &mut self.slots[slot];
        let (offset, len) = (record.offset as usize, record.size as usize);
        let work = if state.gpu {
            if self.shared.faults.no_cmsg_after.is_some_and(|n| number >= n) {
                exit_1(format_args!("fatal, comm {} no cmsg, injected by no_cmsg_after", self.shared.id));
            }
            let pages = state.pages[lane].clone();
            if leak && state.chunks[lane] > 0 {
                // Queueing a second chunk forgets the pages of the first, as in the real plugin.
                locked(&pages).clear();
            }
            Work::Pages { record: pages }
        } else {
            Work::Host { target: state.data.wrapping_add(offset) }
        };
        state.chunks[lane] += 1;
        state.queued += len;
        self.queue(lane, Chunk { slot, offset, len, moved: 0, work, fragments: Vec::new() })
    }

    /// Reads a small message from the control socket, however long that takes.
    fn receive_inline(&mut self, slot: usize, total: usize) -> Result<bool, Scheduled> {
        let data = self.slots[slot].data;
        let mut bytes = vec![0; total];
        let mut have = self.inbox.take_payload(&mut bytes);
        while have < total {
            match recv_now(self.control_fd(), &mut bytes[have..]) {
                Ok(0) => return Err(Scheduled::AllAndFailed),
                Ok(count) => have += count,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => std::thread::yield_now(),
                Err(_) => return Err(Scheduled::AllAndFailed),
            }
        }
        if total > 0 {
            // SAFETY: `irecv` was given this memory; the host promises that it is large enough, which the
            // real plugin does not check either. A write to GPU memory faults, as with the real plugin.
            unsafe { data.copy_from_nonoverlapping(bytes.as_ptr(), total) };
        }
        self.slots[slot].moved = total;
        Ok(true)
    }

    /// Writes to the control socket, spinning until the kernel has taken all bytes.
    fn write_control(&self, mut bytes: &[u8]) -> Outcome<()> {
        let quiet = if self.rules.switches.sigpipe { 0 } else { libc::MSG_NOSIGNAL };
        while !bytes.is_empty() {
            let flags = libc::MSG_DONTWAIT | quiet;
            // SAFETY: the kernel reads within `bytes`, which is borrowed.
            let sent = unsafe { libc::send(self.control_fd(), bytes.as_ptr().cast(), bytes.len(), flags) };
            match usize::try_from(sent) {
                Ok(sent) => bytes = &bytes[sent..],
                Err(_) if is_transient(&io::Error::last_os_error()) => std::thread::yield_now(),
                Err(_) => {
                    warning!(
                        "comm {}: cannot write to the control socket: {}",
                        self.id(),
                        io::Error::last_os_error()
                    );
                    return Err(ResultCode::SYSTEM_ERROR);
                }
            }
        }
        Ok(())
    }
}

/// How the scheduling of a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scheduled {
    /// The request stays in its state.
    Failed,
    /// All chunks were queued before the failure, so the request continues as if there were none.
    AllAndFailed,
}

fn is_transient(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// Receives the bytes that have arrived; `WouldBlock` if there are none.
fn recv_now(fd: RawFd, target: &mut [u8]) -> io::Result<usize> {
    // SAFETY: the kernel writes within `target`, which is borrowed.
    let count = unsafe { libc::recv(fd, target.as_mut_ptr().cast(), target.len(), libc::MSG_DONTWAIT) };
    match usize::try_from(count) {
        Ok(count) => Ok(count),
        Err(_) => match io::Error::last_os_error() {
            e if is_transient(&e) => Err(io::ErrorKind::WouldBlock.into()),
            e => Err(e),
        },
    }
}
