//! The gathers of one connection: which are waiting, which were launched on the GPU, which are done.
//!
//! ```text
//! slot:  free -> waiting -> [down: host mode] -> launched -> free      (poll returns its outcome)
//! ```
//!
//! [`Gather::poll`] makes the launches, at most `GATHER_LAUNCHES_MAX` at once. Receives that arrive meanwhile
//! wait and share the next launch, so a busy connection needs few kernels, and an idle one has no delay. No
//! call waits for the GPU, and none allocates.
//!
//! Invariant: a slot's fragments in the private table are unchanged from its start until its outcome was
//! returned, and the outcome is returned only after the GPU has done all of the slot's work.
//! Read next: `host.rs`.

use super::device::{FragmentTable, GatherDevice, GatherRun, check_allocated};
use super::host::HostTwin;
use super::table::{Bounds, Checked, Fragment, SLOTS};
use super::{DeviceUnpack, UnpackMode};
use crate::GpuCopy;
use crate::cuda::CudaError;
use crate::error::{Error, Result};
use ferrywire_proto::limits::{CHUNK_BYTES_MAX, GATHER_COPIES_PER_LAUNCH_MAX, GATHER_LAUNCHES_MAX};
use std::collections::VecDeque;
use std::fmt;
use std::task::Poll;

/// The gathers of one connection, in one queue of its GPU, for use by one thread.
///
/// After it is dropped, none of its work accesses the pool or a destination. So drop it before the connection is
/// closed, or before memory is freed.
pub struct Gather {
    // Dropped first: the GPU's work in flight may access the fields below.
    unpack: DeviceUnpack,
    mode: UnpackMode,
    checked: Checked,
    table: FragmentTable,
    host: Option<HostTwin>,
    /// Copies of the launch that is in preparation.
    batch: Vec<GpuCopy>,
    jobs: [Job; SLOTS],
    /// Slots with work that was not launched on the GPU yet, in order.
    waiting: VecDeque<usize>,
    /// Slots whose fragments are being copied to the host, in order.
    down: VecDeque<usize>,
    launched: u64,
    reached: u64,
    failed: Option<Error>,
}

/// The receive that a slot gathers.
#[derive(Clone, Copy, Debug, Default)]
struct Job {
    step: Step,
    /// Device address of the message's destination.
    target: u64,
    bytes: u64,
    /// Number of fragments of the receive in the private table.
    fragments: usize,
    /// Number of fragments whose copies are enqueued, in the modes with single copies; the next field has
    /// their bytes.
    enqueued: usize,
    enqueued_bytes: u64,
    /// The stage in host memory that the receive uses, in host mode.
    stage: Option<usize>,
    /// Whether the destination was freed before all work was enqueued; the rest of the work is not done.
    freed: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Step {
    #[default]
    Free,
    /// Some of the slot's work was not launched on the GPU yet.
    Waiting,
    /// All fragments of the slot are in the stage when this launch is done.
    Down { stage: usize, launch: u64 },
    /// The slot's work is done when this launch is done.
    Launched { launch: u64 },
}

impl Gather {
    /// The gathers of the connection that `unpack` describes.
    ///
    /// # Errors
    /// The GPU's error when it has no memory to map, or no kernel in [`UnpackMode::Kernel`].
    pub fn new(mode: UnpackMode, unpack: DeviceUnpack) -> Result<Gather> {
        if mode == UnpackMode::Kernel {
            unpack.device.check_kernel()?;
        }
        let table = FragmentTable::new(&*unpack.device)?;
        let host = match mode {
            UnpackMode::Host => Some(HostTwin::new(&*unpack.device)?),
            _ => None,
        };
        Ok(Gather {
            unpack,
            mode,
            checked: Checked::new(),
            table,
            host,
            batch: Vec::with_capacity(GATHER_COPIES_PER_LAUNCH_MAX),
            jobs: [Job::default(); SLOTS],
            waiting: VecDeque::with_capacity(SLOTS),
            down: VecDeque::with_capacity(SLOTS),
            launched: 0,
            reached: 0,
            failed: None,
        })
    }

    /// The mode in which this connection gathers.
    pub fn mode(&self) -> UnpackMode {
        self.mode
    }

    /// Number of launches so far: kernels, or batches of copies.
    pub fn launches(&self) -> u64 {
        self.launched
    }

    /// Starts to gather a receive for which `test` has reported done: a message of `expected_bytes` bytes, to
    /// the start of `dst_len` bytes at `dst_base`.
    ///
    /// `slot` is the number of the receive on its connection (or that number mod 16). Empty receives and
    /// receives into host memory are numbered too; these two kinds need no gather, and are done at once.
    ///
    /// # Errors
    /// [`UnpackError`](super::UnpackError) when the plugin's fragments are not exactly the message; no byte
    /// is copied then. The GPU's error when it has failed before.
    pub fn start(&mut self, slot: u64, dst_base: u64, dst_len: u64, expected_bytes: u64) -> Result<()> {
        self.check_slot(slot)?;
        check_length(dst_len, expected_bytes)?;
        let host = self.goes_to_host(dst_base, expected_bytes)?;
        self.start_checked(slot, dst_base, expected_bytes, host)
    }

    /// Starts to gather a message of `bytes` bytes to memory of this GPU that [`Gather::check`] has accepted.
    pub fn start_on_gpu(&mut self, slot: u64, base: u64, bytes: u64) -> Result<()> {
        self.check_slot(slot)?;
        check_length(bytes, bytes)?;
        self.start_checked(slot, base, bytes, false)
    }

    /// Checks that a destination is, and still is, memory of this GPU.
    ///
    /// # Errors
    /// [`CudaError::Freed`] for other memory; [`Error::Invalid`] for memory of another GPU, or a range that
    /// exceeds its allocation.
    pub fn check(&self, address: u64, bytes: u64) -> Result<()> {
        if self.goes_to_host(address, bytes)? {
            return Err(CudaError::Freed { address, bytes }.into());
        }
        Ok(())
    }

    /// Returns an error unless the slot is free and the GPU has not failed.
    fn check_slot(&self, slot: u64) -> Result<()> {
        let slot = (slot % SLOTS as u64) as usize;
        match &self.failed {
            Some(failed) => Err(failed.clone()),
            None if self.jobs[slot].step != Step::Free => Err(Error::Internal(format!(
                "a gather was started in slot {slot}, where another one is in progress"
            ))),
            None => Ok(()),
        }
    }

    fn start_checked(&mut self, slot: u64, dst_base: u64, expected_bytes: u64, host: bool) -> Result<()> {
        let slot = (slot % SLOTS as u64) as usize;
        let fragments = match self.mode {
            UnpackMode::None => 0,
            _ => self.read_fragments(slot, expected_bytes, host)?,
        };
        let step = match fragments {
            0 => Step::Launched { launch: 0 },
            _ => Step::Waiting,
        };
        self.jobs[slot] = Job { step, target: dst_base, bytes: expected_bytes, fragments, ..Job::default() };
        if fragments > 0 {
            self.waiting.push_back(slot);
        }
        Ok(())
    }

    /// The outcome of a slot's gather, once it is done: the bytes of its message. The slot is then free, and
    /// its receive may be returned to the plugin. Does not wait, and makes progress on all slots of the
    /// connection.
    ///
    /// After a failure of the GPU the pool may still be read until this [`Gather`] is dropped.
    pub fn poll(&mut self, slot: u64) -> Poll<Result<u64>> {
        let slot = (slot % SLOTS as u64) as usize;
        self.turn();
        let Job { step, target, bytes, freed, .. } = self.jobs[slot];
        let outcome = match (step, &self.failed) {
            (Step::Free, _) => {
                Err(Error::Internal(format!("a gather was polled in slot {slot}, where none is in progress")))
            }
            (Step::Launched { launch }, _) if launch <= self.reached && freed => {
                Err(CudaError::Freed { address: target, bytes }.into())
            }
            (Step::Launched { launch }, _) if launch <= self.reached => Ok(bytes),
            (_, Some(failed)) => Err(failed.clone()),
            (_, None) => return Poll::Pending,
        };
        self.jobs[slot].step = Step::Free;
        Poll::Ready(outcome)
    }

    /// Whether a message's destination is host memory. Device memory must hold the whole message.
    fn goes_to_host(&self, address: u64, bytes: u64) -> Result<bool> {
        let gpu = self.unpack.device.location();
        let wrong = |why: String| Err(Error::invalid("destination of a gather", why));
        match self.unpack.device.device_memory(address, bytes) {
            _ if bytes == 0 => Ok(false),
            None => Ok(true),
            Some((place, _)) if place != gpu => {
                wrong(format!("the destination is {place}, but the gather writes to {gpu}"))
            }
            Some((_, found)) if found.holds(address, bytes) => Ok(false),
            Some((_, found)) => wrong(format!(
                "{bytes} bytes at {address:#x} leave their allocation ({} bytes at {:#x})",
                found.bytes, found.base
            )),
        }
    }

    /// Copies the slot's fragments to the private table; returns their number.
    fn read_fragments(&mut self, slot: usize, message_bytes: u64, host: bool) -> Result<usize> {
        let bounds = Bounds { slot, pool_bytes: self.unpack.pool.bytes, message_bytes, host };
        self.checked.read(&self.unpack.metadata, bounds)?;
        Ok(self.table.fill(slot, self.checked.merged()))
    }

    // ---- launches ----

    /// Updates which launches are done, and starts as many new ones as the limit allows.
    fn turn(&mut self) {
        // Launches that were done before a failure still count.
        match self.unpack.device.reached() {
            Ok(reached) => self.reached = reached,
            Err(cause) => self.fail(cause),
        }
        while self.failed.is_none() && self.launched - self.reached < GATHER_LAUNCHES_MAX as u64 {
            match self.launch() {
                Ok(true) => self.launched += 1,
                Ok(false) => break,
                Err(cause) => self.fail(cause),
            }
        }
    }

    fn fail(&mut self, cause: Error) {
        self.failed.get_or_insert(cause);
    }

    /// Enqueues the next launch and its mark; returns false when there is nothing to enqueue.
    fn launch(&mut self) -> Result<bool> {
        let enqueued = match self.mode {
            UnpackMode::Kernel => self.launch_kernel()?,
            UnpackMode::Copy => self.launch_copies()?,
            UnpackMode::Host => self.launch_up()? || self.launch_down()?,
            UnpackMode::None => false,
        };
        if enqueued {
            self.unpack.device.mark()?;
        }
        Ok(enqueued)
    }

    /// Number of the launch in preparation.
    fn next_launch(&self) -> u64 {
        self.launched + 1
    }

    /// Launches one kernel for all waiting slots. Copies replace the kernel while the kernel could queue
    /// behind a stream that waits for the very transfer that is gathered.
    fn launch_kernel(&mut self) -> Result<bool> {
        let launching = self.unpack.device.launching();
        let begun = self.waiting.front().is_some_and(|slot| self.jobs[*slot].enqueued > 0);
        if launching.is_none() || begun {
            return self.launch_copies();
        }
        let (mut runs, mut count, launch) = ([GatherRun::default(); SLOTS], 0, self.next_launch());
        while let Some(slot) = self.waiting.pop_front() {
            let job = &mut self.jobs[slot];
            if !job.is_there(&*self.unpack.device) {
                job.give_up(0);
                continue;
            }
            job.step = Step::Launched { launch };
            runs[count] = GatherRun {
                fragments: self.table.address(slot),
                count: job.fragments as u64,
                source: self.unpack.pool.base,
                target: job.target,
            };
            count += 1;
        }
        if count > 0 {
            self.unpack.device.gather(&runs[..count])?;
        }
        Ok(count > 0)
    }

    /// Launches copies from the pool to the destinations, for as many receives as one batch can hold.
    fn launch_copies(&mut self) -> Result<bool> {
        let (launch, pool) = (self.next_launch(), self.unpack.pool.base);
        self.batch.clear();
        while let Some(&slot) =
            self.waiting.front().filter(|_| self.batch.len() < GATHER_COPIES_PER_LAUNCH_MAX)
        {
            let job = &mut self.jobs[slot];
            if !job.is_there(&*self.unpack.device) {
                // The slot's earlier copies were in the previous launch.
                job.give_up(if job.enqueued > 0 { launch - 1 } else { 0 });
                self.waiting.pop_front();
                continue;
            }
            let base = job.target;
            job.copy_next(&mut self.batch, pool, &self.table, slot, |to, _| base + to.target);
            if job.all_enqueued() {
                job.step = Step::Launched { launch };
                self.waiting.pop_front();
            }
        }
        self.unpack.device.copy(&self.batch)?;
        Ok(!self.batch.is_empty())
    }

    /// Launches copies from the pool to a stage, for one receive.
    fn launch_down(&mut self) -> Result<bool> {
        let (Some(&slot), Some(host)) = (self.waiting.front(), &mut self.host) else { return Ok(false) };
        let (job, launch, pool) = (&mut self.jobs[slot], self.launched + 1, self.unpack.pool.base);
        let Some(stage) = job.stage.or_else(|| host.take()) else { return Ok(false) };
        job.stage = Some(stage);
        self.batch.clear();
        job.copy_next(&mut self.batch, pool, &self.table, slot, |fragment, before| {
            host.down(stage, before, fragment.bytes)
        });
        self.unpack.device.copy(&self.batch)?;
        if job.all_enqueued() {
            job.step = Step::Down { stage, launch };
            self.waiting.pop_front();
            self.down.push_back(slot);
        }
        Ok(true)
    }

    /// Launches the copy from stage to destination, for the oldest receive that has arrived in a stage.
    fn launch_up(&mut self) -> Result<bool> {
        let (Some(&slot), Some(host)) = (self.down.front(), &mut self.host) else { return Ok(false) };
        let (job, up) = (&mut self.jobs[slot], self.launched + 1);
        let Step::Down { stage, launch } = job.step else { return Ok(false) };
        if launch > self.reached {
            return Ok(false);
        }
        if !job.is_there(&*self.unpack.device) {
            host.give_back(stage);
            job.give_up(launch);
            self.down.pop_front();
            return self.launch_up();
        }
        let message = host.put_in_order(stage, &self.table, slot, job.fragments);
        let copy = GpuCopy { source: message, target: job.target, bytes: job.bytes as usize };
        self.unpack.device.copy(&[copy])?;
        host.give_back(stage);
        job.step = Step::Launched { launch: up };
        self.down.pop_front();
        Ok(true)
    }
}

impl Job {
    /// Adds copies of the slot's next fragments to a batch, as many as the batch can hold. `target` returns
    /// the target address of a fragment, given the number of bytes of the receive before it in the table.
    fn copy_next(
        &mut self,
        batch: &mut Vec<GpuCopy>,
        pool: u64,
        table: &FragmentTable,
        slot: usize,
        target: impl Fn(&Fragment, u64) -> u64,
    ) {
        let next = self.fragments.min(self.enqueued + GATHER_COPIES_PER_LAUNCH_MAX - batch.len());
        for fragment in (self.enqueued..next).map(|index| table.get(slot, index)) {
            let (source, target) =
                (pool + u64::from(fragment.source), target(&fragment, self.enqueued_bytes));
            batch.push(GpuCopy { source, target, bytes: fragment.bytes as usize });
            self.enqueued_bytes += u64::from(fragment.bytes);
        }
        self.enqueued = next;
    }

    /// Whether the receive's destination is still allocated, which may have been freed since the receive was
    /// started. Checked before each launch: kernels and copies would access a freed address.
    fn is_there(&self, device: &dyn GatherDevice) -> bool {
        check_allocated(device, [(self.target, self.bytes)]).is_ok()
    }

    /// Ends the receive because its destination is freed; `launch` is the last launch with work for it.
    fn give_up(&mut self, launch: u64) {
        (self.step, self.freed) = (Step::Launched { launch }, true);
    }

    fn all_enqueued(&self) -> bool {
        self.enqueued == self.fragments
    }
}

impl fmt::Debug for Gather {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Gather { mode, unpack, launched, reached, failed, .. } = self;
        write!(f, "Gather({mode}, {unpack:?}, {reached} of {launched} launches done, failed: {failed:?})")
    }
}

fn check_length(dst_len: u64, expected_bytes: u64) -> Result<()> {
    if expected_bytes > CHUNK_BYTES_MAX as u64 {
        return Err(Error::Limit {
            name: "CHUNK_BYTES_MAX",
            limit: CHUNK_BYTES_MAX as u64,
            why: format!("the message to gather has {expected_bytes} bytes; use smaller chunks"),
        });
    }
    if expected_bytes > dst_len {
        let why = format!("the destination has {dst_len} bytes, and the message has {expected_bytes}");
        return Err(Error::invalid("destination of a gather", why));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::recorder::{Recorder, Seen, Waiting, one_at_a_time};
    use super::super::table::{METADATA_BYTES, Metadata};
    use super::super::{Extent, FRAGMENTS_PER_SLOT_MAX};
    use super::*;
    use std::sync::{Arc, Mutex};

    const MANY: usize = GATHER_COPIES_PER_LAUNCH_MAX + 1;

    /// A GPU with memory from 5000 to 6000, and a table with one fragment of 4 bytes in each slot; the last
    /// slot has many fragments of one byte. The table must be dropped last.
    fn scene(mode: UnpackMode) -> (Gather, Arc<Mutex<Seen>>, Vec<u128>) {
        let seen = Arc::new(Mutex::new(Seen { memory: Some(5000..6000), ..Seen::default() }));
        let mut table = vec![0u128; METADATA_BYTES.div_ceil(16)];
        let counts = SLOTS * FRAGMENTS_PER_SLOT_MAX;
        for slot in 0..SLOTS {
            let (count, bytes) = if slot == SLOTS - 1 { (MANY, 1) } else { (1, 4) };
            for at in 0..count {
                // In reverse order, so that no fragments are merged.
                let (source, target) = (count - 1 - at, at);
                table[slot * FRAGMENTS_PER_SLOT_MAX + at] =
                    (source | bytes << 32) as u128 | (target as u128) << 64;
            }
            table[counts + slot / 2] |= (count as u128) << (64 * (slot % 2));
        }
        // SAFETY: as long as a table, aligned, and kept by the test that uses the gather.
        let metadata = unsafe { Metadata::new(table.as_mut_ptr().cast()) };
        let pool = Extent { base: 5000, bytes: 1000 };
        let unpack = DeviceUnpack { device: Box::new(Recorder(seen.clone())), metadata, pool };
        (Gather::new(mode, unpack).unwrap(), seen, table)
    }

    fn freed(bytes: u64) -> Poll<Result<u64>> {
        Poll::Ready(Err(Error::Cuda(CudaError::Freed { address: 7000, bytes })))
    }

    fn into_the_gone_one(mode: UnpackMode) {
        let (mut gather, seen, _table) = scene(mode);
        for (slot, target) in [(0, 5500), (1, 7000), (2, 5600)] {
            gather.start_on_gpu(slot, target, 4).unwrap();
        }
        let outcomes: Vec<_> = (1..20)
            .map(|reached| {
                let outcomes = [0, 1, 2].map(|slot| match gather.jobs[slot as usize].step {
                    Step::Free => Poll::Pending,
                    _ => gather.poll(slot),
                });
                seen.lock().unwrap().reached = reached.min(gather.launched);
                outcomes
            })
            .collect();
        let of = |slot: usize| outcomes.iter().map(|each| &each[slot]).find(|each| each.is_ready());
        assert_eq!(of(1), Some(&freed(4)), "{mode}");
        assert_eq!([of(0), of(2)], [Some(&Poll::Ready(Ok(4))); 2], "{mode}: the others go on");
        let copies = &seen.lock().unwrap().copies;
        assert!(copies.iter().all(|copy| copy.target != 7000), "{mode}: {copies:?}");
    }

    #[test]
    fn a_message_whose_memory_is_gone_fails_alone_in_every_mode() {
        let _alone = one_at_a_time();
        for mode in [UnpackMode::Kernel, UnpackMode::Copy, UnpackMode::Host] {
            into_the_gone_one(mode);
        }
        let _waiting = Waiting::new();
        into_the_gone_one(UnpackMode::Kernel);
    }

    /// Until then the first launch reads the plugin's pages.
    #[test]
    fn memory_that_is_freed_between_two_launches_is_reported_when_the_first_is_done() {
        let _alone = one_at_a_time();
        let (mut gather, seen, _table) = scene(UnpackMode::Copy);
        seen.lock().unwrap().memory = Some(5000..8000);
        for slot in [0, 1] {
            gather.start_on_gpu(slot, 5500, 4).unwrap();
            assert!(gather.poll(slot).is_pending(), "launched, and not done");
        }
        let last = SLOTS as u64 - 1;
        gather.start_on_gpu(last, 7000, MANY as u64).unwrap();
        seen.lock().unwrap().reached = 1;
        assert!(gather.poll(last).is_pending(), "the first part is launched");
        {
            let mut seen = seen.lock().unwrap();
            assert_eq!(seen.copies.len(), 2 + GATHER_COPIES_PER_LAUNCH_MAX);
            (seen.memory, seen.reached) = (Some(5000..6000), 2);
        }
        assert!(gather.poll(last).is_pending(), "the first part is not done");
        seen.lock().unwrap().reached = 3;
        assert_eq!(gather.poll(last), freed(MANY as u64));
        assert_eq!(seen.lock().unwrap().copies.len(), 2 + GATHER_COPIES_PER_LAUNCH_MAX);
    }
}
