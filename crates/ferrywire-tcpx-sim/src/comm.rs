//! A comm: one end of a connection, with its request ring, its sockets and its workers.
//!
//! The calls of the table end here: posting, testing, consuming, closing. Progress is made only inside `test`, once per
//! call (`progress.rs`).
//! Invariant: a request's slot is reused only after it was released.
//! Read next: `progress.rs`, then `cell.rs`, which guards the comm.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ferrywire_ncclnet::abi::ResultCode;

use crate::control::{Inbox, Oddities, Record};
use crate::faults::Direction;
use crate::lane::{Lane, PageRecord};
use crate::log::{exit_1, info, segfault, warning};
use crate::registration;
use crate::ring::{Number, Ring};
use crate::switches::{CloseError, Full, Switches};
use crate::sync::locked;
use crate::unpack::Unpack;
use crate::worker::{Crew, Shared};

/// The outcome of a call; the code is never success.
pub type Outcome<T> = Result<T, ResultCode>;

/// The parts from which a comm is made.
pub struct Parts {
    /// The comm's control socket.
    pub control: OwnedFd,
    /// The comm's data sockets.
    pub data: Vec<OwnedFd>,
    /// Number of worker threads, which the listener decides.
    pub threads: usize,
    /// Index of the comm's NIC.
    pub device: usize,
    /// Settings that change the behaviour of calls.
    pub rules: Rules,
    /// State that the comm shares with its workers.
    pub shared: Shared,
}

/// Settings that change the behaviour of calls.
#[derive(Clone, Debug)]
pub struct Rules {
    /// The switches of this process.
    pub switches: Arc<Switches>,
    /// Size of a chunk in bytes.
    pub chunk_bytes: usize,
    /// Messages up to this size in bytes are sent on the control socket.
    pub inline_bytes: usize,
    /// Whether the receiver announces each request.
    pub recv_sync: bool,
    /// Most chunks of one request that one call schedules.
    pub chunks_per_call_max: usize,
}

/// One end of a connection.
#[derive(Debug)]
pub struct Comm {
    pub(crate) rules: Rules,
    pub(crate) ring: Ring,
    pub(crate) slots: Vec<Slot>,
    pub(crate) control: OwnedFd,
    pub(crate) inbox: Inbox,
    /// A record that has arrived while its data socket is full.
    pub(crate) waiting_record: Option<Record>,
    /// The bytes that have arrived of the receiver's announcement.
    pub(crate) announced: Vec<u8>,
    pub(crate) lanes: Vec<Arc<Lane>>,
    pub(crate) next_lane: usize,
    pub(crate) crew: Option<Crew>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) unpack: Option<Unpack>,
    /// The GPU that was current when a send comm's first connect was called.
    pub(crate) gpu: Option<i32>,
    /// Whether only half a control message was written, after which nothing more is sent.
    pub(crate) mute: bool,
    threads: usize,
    device: usize,
    close_error_given: bool,
    test_error_given: bool,
    pages_returned: u64,
}

/// The data of a slot about its present request.
#[derive(Debug)]
pub(crate) struct Slot {
    pub(crate) data: *mut u8,
    /// The memory handle of the request.
    mhandle: usize,
    pub(crate) gpu: bool,
    /// Number of the real device with the bytes to send, if there is one.
    pub(crate) cuda: Option<i32>,
    /// Size in bytes with which the request was posted.
    pub(crate) posted_bytes: usize,
    /// The size of the message in bytes: the sender knows it from the start, the receiver from the first record.
    pub(crate) total: Option<usize>,
    /// Number of the message's bytes that were given to data sockets.
    pub(crate) queued: usize,
    /// Number of the message's bytes that have arrived or were sent.
    pub(crate) moved: usize,
    /// Whether `test` has already reported the request as done, out of order.
    reported: bool,
    /// The number of chunks on each data socket.
    pub(crate) chunks: Vec<usize>,
    /// The pages that the chunks took, by data socket.
    pub(crate) pages: Vec<PageRecord>,
}

// SAFETY: the pointers are the host's and are used only while the host keeps the memory.
unsafe impl Send for Slot {}

impl Slot {
    fn new(lanes: usize) -> Slot {
        Slot {
            data: std::ptr::null_mut(),
            mhandle: 0,
            gpu: false,
            cuda: None,
            posted_bytes: 0,
            total: None,
            queued: 0,
            moved: 0,
            reported: false,
            chunks: vec![0; lanes],
            pages: (0..lanes).map(|_| PageRecord::default()).collect(),
        }
    }

    fn is_complete(&self) -> bool {
        self.total == Some(self.moved)
    }

    fn renew(&mut self, buffer: Buffer, total: Option<usize>) {
        (self.data, self.gpu, self.cuda) = (buffer.data, buffer.gpu, buffer.cuda);
        self.mhandle = buffer.mhandle;
        (self.posted_bytes, self.total) = (buffer.bytes, total);
        (self.queued, self.moved, self.reported) = (0, 0, false);
        self.chunks.fill(0);
        // Pages that are still recorded were never given back, and cannot be given back any more.
        self.pages.iter().for_each(|record| locked(record).clear());
    }
}

/// The memory of a request.
#[derive(Clone, Copy, Debug)]
pub struct Buffer {
    /// The memory handle of the buffer.
    pub mhandle: usize,
    /// The buffer's first byte: for a send a readable address, for a receive the host's pointer.
    pub data: *mut u8,
    /// Length of the buffer in bytes.
    pub bytes: usize,
    /// Whether the memory is on a GPU.
    pub gpu: bool,
    /// Number of the real device with the bytes to send, if there is one.
    pub cuda: Option<i32>,
}

impl Comm {
    /// Makes a comm over connected sockets.
    pub fn new(parts: Parts) -> Comm {
        let switches = &parts.rules.switches;
        let oddities = Oddities {
            close_error: switches.close_error == CloseError::Natural,
            spin: switches.half_control_spin,
        };
        let (slots, lanes) = (switches.slots, parts.data.len());
        Comm {
            ring: Ring::new(slots),
            slots: (0..slots).map(|_| Slot::new(lanes)).collect(),
            control: parts.control,
            inbox: Inbox::new(oddities),
            waiting_record: None,
            announced: Vec::new(),
            lanes: parts.data.into_iter().map(|socket| Arc::new(Lane::new(socket))).collect(),
            next_lane: 0,
            crew: None,
            shared: Arc::new(parts.shared),
            unpack: None,
            gpu: None,
            mute: false,
            threads: parts.threads,
            device: parts.device,
            close_error_given: false,
            test_error_given: false,
            pages_returned: 0,
            rules: parts.rules,
        }
    }

    /// The direction of the comm.
    pub fn direction(&self) -> Direction {
        self.shared.direction
    }

    /// Index of the comm's NIC.
    pub fn device(&self) -> usize {
        self.device
    }

    /// The comm's number in this process, in its direction.
    pub fn id(&self) -> u64 {
        self.shared.id
    }

    /// Sets the metadata for scattered receives.
    pub fn set_unpack(&mut self, unpack: Unpack) {
        self.unpack = Some(unpack);
    }

    /// Sets the pool into which GPU payload goes.
    pub fn set_landing(&mut self, landing: Arc<crate::gpu::GpuPool>) {
        match Arc::get_mut(&mut self.shared) {
            Some(shared) => shared.landing = Some(landing),
            None => warning!("comm {} has workers already", self.id()),
        }
    }

    /// Posts a request; returns its slot, or `None` if a full comm answers with a NULL request.
    pub fn post(&mut self, buffer: Buffer) -> Outcome<Option<usize>> {
        self.faults_before_posting();
        if self.direction() == Direction::Recv
            && self.unpack.is_none()
            && (self.rules.switches.need_device_handle || buffer.gpu)
        {
            segfault(format_args!("a receive on a comm that was accepted without a device handle"));
        }
        if self.direction() == Direction::Recv && buffer.gpu && self.shared.landing.is_none() {
            warning!("comm {}: a receive into GPU memory, but accept saw no GPU", self.id());
            return Err(ResultCode::INTERNAL_ERROR);
        }
        let Some(number) = self.ring.post() else { return self.full() };
        let slot = self.ring.slot_of(number);
        let total = (self.direction() == Direction::Send).then_some(buffer.bytes);
        registration::hold(buffer.mhandle);
        self.slots[slot].renew(buffer, total);
        if let Some(unpack) = &mut self.unpack {
            unpack.begin(number);
        }
        Ok(Some(slot))
    }

    fn full(&self) -> Outcome<Option<usize>> {
        if self.rules.switches.full == Full::Null {
            return Ok(None);
        }
        warning!("comm {}: all {} requests are in use", self.id(), self.slots.len());
        Err(ResultCode::INTERNAL_ERROR)
    }

    fn faults_before_posting(&mut self) {
        let (faults, posted) = (&self.shared.faults, Some(self.ring.posted_count()));
        if faults.die_after == posted {
            exit_1(format_args!("injected by die_after"));
        }
        if faults.crash_after == posted {
            segfault(format_args!("injected by crash_after"));
        }
        if faults.drop_data_socket_after == posted {
            warning!("comm {}: data socket 0 dropped, injected by drop_data_socket_after", self.id());
            self.lanes.iter().take(1).for_each(|lane| lane.shut_down());
        }
    }

    /// Makes progress once; returns the request's size in bytes if the request in a slot is done.
    pub fn test(&mut self, slot: usize) -> Outcome<Option<usize>> {
        self.faults_before_testing()?;
        self.progress()?;
        if !self.rules.switches.silent_death && self.shared.dead.load(Ordering::SeqCst) {
            return Err(ResultCode::SYSTEM_ERROR);
        }
        let this = self.ring.number_at(slot as u64);
        match self.ring.head() {
            None => Ok(None),
            head if head == this => Ok(self.test_head(slot)),
            Some(head) if self.rules.switches.head_only => {
                warning!("comm {}: request {this:?} tested, but {head} is the oldest", self.id());
                Err(ResultCode::INTERNAL_ERROR)
            }
            Some(_) => Ok(self.test_out_of_turn(slot, this)),
        }
    }

    fn test_head(&mut self, slot: usize) -> Option<usize> {
        let stalled = self.shared.faults.stall_head_after.is_some_and(|n| self.ring.finished_count() >= n);
        if stalled || self.mute || !self.slots[slot].is_complete() {
            return None;
        }
        self.finish();
        // Requests that were reported out of order end together with the oldest one.
        while let Some(head) = self.ring.head()
            && self.slots[self.ring.slot_of(head)].reported
        {
            self.finish();
        }
        self.slots[slot].total
    }

    fn test_out_of_turn(&mut self, slot: usize, this: Option<Number>) -> Option<usize> {
        let transmitting = this.is_some_and(|number| self.ring.is_transmitting(number));
        let slot = &mut self.slots[slot];
        if !transmitting || !slot.is_complete() {
            return None;
        }
        slot.reported = true;
        slot.total
    }

    /// Moves the oldest request from TRANSMITTING to INACTIVE; a send to FREE at once.
    fn finish(&mut self) {
        self.ring.finish();
        if self.direction() == Direction::Send {
            self.release();
        }
    }

    fn faults_before_testing(&mut self) -> Outcome<()> {
        let done = self.ring.finished_count();
        if self.shared.faults.test_hang_after.is_some_and(|n| done >= n) {
            warning!("comm {}: test does not return, injected by test_hang_after", self.id());
            loop {
                std::thread::sleep(std::time::Duration::from_secs(3600));
            }
        }
        if self.shared.faults.test_error_after.is_some_and(|n| done >= n) && !self.test_error_given {
            self.test_error_given = true;
            warning!("comm {}: test fails, injected by test_error_after", self.id());
            return Err(ResultCode::SYSTEM_ERROR);
        }
        let always = self.rules.switches.close_error == CloseError::Always;
        if always && self.direction() == Direction::Recv && !self.close_error_given && self.peer_closed() {
            self.close_error_given = true;
            warning!("Connection closed by remote peer");
            return Err(ResultCode::SYSTEM_ERROR);
        }
        Ok(())
    }

    /// Whether the peer has closed, whatever data come before the end of the stream.
    fn peer_closed(&self) -> bool {
        let mut fd = libc::pollfd { fd: self.control_fd(), events: libc::POLLRDHUP, revents: 0 };
        // SAFETY: one descriptor is given, and there is room for its events.
        let ready = unsafe { libc::poll(&mut fd, 1, 0) };
        ready > 0 && fd.revents & libc::POLLRDHUP != 0
    }

    /// Moves the oldest request from INACTIVE to FREE.
    fn release(&mut self) {
        if let Some(oldest) = self.ring.oldest_finished() {
            registration::release(self.slots[self.ring.slot_of(oldest)].mhandle);
        }
        self.ring.release();
    }

    /// The size in bytes of a finished receive.
    pub fn received_bytes(&self, slot: usize) -> usize {
        self.slots[slot].total.unwrap_or(0)
    }

    /// Gives back a finished receive, with its pages. Returns an error if it is not the oldest one.
    pub fn consume(&mut self, slot: usize) -> Outcome<()> {
        let Some(oldest) = self.ring.oldest_finished() else {
            warning!("comm {}: irecvConsumed, but no receive is finished", self.id());
            return Err(ResultCode::INTERNAL_ERROR);
        };
        // An empty receive is accepted in any order, and frees the oldest one.
        let empty = self.slots[slot].total == Some(0);
        let in_order = self.ring.number_at(slot as u64) == Some(oldest);
        if !in_order && !empty && self.rules.switches.consume_order {
            warning!("comm {}: irecvConsumed of a receive that is not the oldest", self.id());
            return Err(ResultCode::INTERNAL_ERROR);
        }
        self.return_pages(slot);
        self.release();
        Ok(())
    }

    fn return_pages(&mut self, slot: usize) {
        let Some(landing) = &self.shared.landing else { return };
        for record in &self.slots[slot].pages {
            let pages = std::mem::take(&mut *locked(record));
            self.pages_returned += landing.give_back(self.shared.id, &pages) as u64;
        }
    }

    /// Starts the comm's workers at the first chunk.
    pub(crate) fn crew(&mut self) -> Outcome<&Crew> {
        if self.crew.is_none() {
            let started = Crew::start(&self.shared, &self.lanes, self.threads.min(self.lanes.len()));
            let failed = |e: io::Error| {
                warning!("comm {}: cannot start worker threads: {e}", self.shared.id);
                ResultCode::SYSTEM_ERROR
            };
            self.crew = Some(started.map_err(failed)?);
        }
        self.crew.as_ref().ok_or(ResultCode::INTERNAL_ERROR)
    }

    pub(crate) fn control_fd(&self) -> RawFd {
        self.control.as_raw_fd()
    }

    /// Stops the workers and closes the sockets immediately, whatever is in flight.
    pub fn close(mut self) {
        if let Some(crew) = self.crew.take() {
            crew.stop();
        }
        let freed = match &self.shared.landing {
            Some(landing) => landing.give_back_all(self.shared.id),
            None => 0,
        };
        if self.rules.switches.stats {
            info!(
                "stats: comm={} side={:?} device={} posted={} finished={} bytes={} pages_taken={} \
                 pages_returned={} pages_freed_at_close={freed} handles_live={}",
                self.id(),
                self.direction(),
                self.device,
                self.ring.posted_count(),
                self.ring.finished_count(),
                self.shared.bytes.load(Ordering::Relaxed),
                self.shared.pages_taken.load(Ordering::Relaxed),
                self.pages_returned,
                registration::live(),
            );
        }
    }
}
