//! Batches of copies within a GPU's memory, to pack a message and to take it apart.
//!
//! A driver needs more time for each copy of a batch than the GPU needs for a small one. So from a few copies
//! on the gather kernel makes them, from a list in mapped memory.
//!
//! Invariant: the list is unchanged until the copies are done; there is one list, so only one batch is in
//! flight.
//! Read next: `device.rs`; the engine's `payload/plugin/lane.rs`, which packs.

use super::device::{self, GatherDevice, GatherRun, Mapped};
use super::table::Fragment;
use crate::GpuCopy;
use crate::error::{Error, Result};
use std::fmt;

/// Smallest number of copies in a batch for which the kernel is used.
const KERNEL_COPIES_MIN: usize = 3;

/// A GPU queue for one batch of copies at a time. Dropping it ends all access to memory.
pub struct CopyQueue {
    // Dropped first: the queue's work in flight may access the fields below.
    queue: Box<dyn GatherDevice>,
    list: Option<Mapped>,
    /// Number of fragments that the list can hold.
    room: usize,
    begun: u64,
    copying: bool,
}

impl CopyQueue {
    /// A queue for batches of copies on `queue`, which no other code uses.
    pub fn new(queue: Box<dyn GatherDevice>) -> CopyQueue {
        CopyQueue { queue, list: None, room: 0, begun: 0, copying: false }
    }

    /// Whether a batch was started and [`CopyQueue::is_done`] has not seen its end.
    pub fn copying(&self) -> bool {
        self.copying
    }

    /// Starts a batch whose copies may run in any order; no target overlaps with another range of the batch.
    /// Returns an error when memory of a copy is freed, and [`Error::Internal`] while another batch is in
    /// flight.
    pub fn begin(&mut self, copies: &[GpuCopy]) -> Result<()> {
        if self.copying {
            return Err(Error::Internal("a batch of copies was started while another is in flight".into()));
        }
        // A kernel could queue behind a stream that waits for the very transfer that makes these copies.
        let launching = self.queue.launching();
        let by_kernel =
            launching.is_some() && copies.len() >= KERNEL_COPIES_MIN && self.has_room(copies.len());
        // The driver would access freed GPU memory as if it were host memory.
        self.check_allocated(copies)?;
        match fragments(copies).filter(|_| by_kernel) {
            Some((fragments, parts)) => self.launch(&fragments, &parts)?,
            None => self.queue.copy(copies)?,
        }
        self.queue.mark()?;
        (self.begun, self.copying) = (self.begun + 1, true);
        Ok(())
    }

    /// Whether the started batch is done. Does not wait.
    pub fn is_done(&mut self) -> Result<bool> {
        self.copying = self.queue.reached()? < self.begun;
        Ok(!self.copying)
    }

    fn check_allocated(&self, copies: &[GpuCopy]) -> Result<()> {
        for side in [|copy: &GpuCopy| copy.source, |copy: &GpuCopy| copy.target] {
            device::check_allocated(&*self.queue, copies.iter().map(|copy| (side(copy), copy.bytes as u64)))?;
        }
        Ok(())
    }

    /// Enlarges the list if necessary; returns whether it holds `count` fragments.
    fn has_room(&mut self, count: usize) -> bool {
        if count > self.room {
            let room = count.next_power_of_two();
            match self.queue.map(room * size_of::<Fragment>()) {
                Ok(list) => (self.list, self.room) = (Some(list), room),
                Err(error) => {
                    tracing::debug!(%error, "cannot use the gather kernel: scattered memory is copied piece by piece")
                }
            }
        }
        count <= self.room
    }

    fn launch(&mut self, fragments: &[Fragment], parts: &[Part]) -> Result<()> {
        let Some(list) = &self.list else { return Ok(()) };
        let to = list.at(0, size_of_val(fragments));
        // SAFETY: the list belongs to this value, has that length and is aligned to a page, and no work reads
        // it now.
        unsafe { std::ptr::copy_nonoverlapping(fragments.as_ptr(), to.cast(), fragments.len()) };
        let mut first = to as u64;
        let run = |part: &Part| {
            let run = GatherRun { fragments: first, count: part.count, source: part.source, target: 0 };
            first += part.count * size_of::<Fragment>() as u64;
            run
        };
        let runs: Vec<GatherRun> = parts.iter().map(run).collect();
        self.queue.gather(&runs)
    }
}

/// Consecutive fragments of the list whose source offsets share a base address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    source: u64,
    count: u64,
}

/// Largest offset of a fragment's source from the base address of its part, in bytes.
const REACH_BYTES: u64 = u32::MAX as u64;

/// Converts copies to the kernel's fragments, with targets as absolute addresses; `None` when a copy is too
/// long.
fn fragments(copies: &[GpuCopy]) -> Option<(Vec<Fragment>, Vec<Part>)> {
    let (mut out, mut parts) = (Vec::with_capacity(copies.len()), Vec::<Part>::new());
    for GpuCopy { source, target, bytes } in copies.iter().copied() {
        let offset = |part: &Part| source.checked_sub(part.source).filter(|offset| *offset <= REACH_BYTES);
        if parts.last().and_then(offset).is_none() {
            // The base is below the address, since the next sources may be on either side.
            parts.push(Part { source: source.saturating_sub(REACH_BYTES / 2), count: 0 });
        }
        let part = parts.last_mut()?;
        part.count += 1;
        let source = u32::try_from(source - part.source).ok()?;
        out.push(Fragment { source, bytes: u32::try_from(bytes).ok()?, target });
    }
    Some((out, parts))
}

impl fmt::Debug for CopyQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CopyQueue({}, {} begun, copying: {})", self.queue.location(), self.begun, self.copying)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::CudaError;
    use crate::sim::SimGpu;
    use crate::unpack::SimQueue;
    use crate::unpack::recorder::{Recorder, Seen, Waiting, one_at_a_time};
    use ferrywire_sys::rng::Rng;
    use std::sync::{Arc, Mutex};

    #[test]
    fn copies_are_the_same_as_fragments_however_far_apart() {
        let _alone = one_at_a_time();
        let mut rng = Rng::new(3);
        for _ in 0..2000 {
            let within = [100, 1 << 31, 1 << 32, 1 << 34, 1 << 46][rng.below(5) as usize];
            let copies: Vec<GpuCopy> = (0..rng.below(40))
                .map(|_| GpuCopy {
                    source: rng.below(within),
                    target: rng.below(1 << 46),
                    bytes: rng.below(1 << 22) as usize,
                })
                .collect();
            let (fragments, parts) = fragments(&copies).unwrap();
            let mut rest = fragments.into_iter();
            let mut seen = Vec::new();
            for part in &parts {
                assert!(part.count > 0);
                seen.extend(rest.by_ref().take(part.count as usize).map(|fragment| GpuCopy {
                    source: part.source + u64::from(fragment.source),
                    target: fragment.target,
                    bytes: fragment.bytes as usize,
                }));
            }
            assert_eq!(seen, copies);
            assert!(within > 1 << 31 || parts.len() <= 1, "{parts:?}");
        }
        assert!(fragments(&[GpuCopy { source: 0, target: 0, bytes: 1 << 32 }]).is_none());
    }

    #[test]
    fn while_a_stream_waits_copies_are_no_kernel() {
        let _alone = one_at_a_time();
        let seen = Arc::new(Mutex::new(Seen::default()));
        let mut queue = CopyQueue::new(Box::new(Recorder(seen.clone())));
        let copies = [0, 1, 2, 3].map(|k| GpuCopy { source: k * 10, target: 1000 + k * 10, bytes: 9 });
        let waiting = Waiting::new();
        queue.begin(&copies).unwrap();
        {
            let mut seen = seen.lock().unwrap();
            assert_eq!((seen.kernels, &seen.copies[..]), (0, &copies[..]));
            seen.reached = 1;
        }
        assert!(queue.is_done().unwrap());
        drop(waiting);
    }

    #[test]
    fn memory_that_is_gone_is_not_copied_with_or_without_a_kernel() {
        let _alone = one_at_a_time();
        let seen = Arc::new(Mutex::new(Seen { memory: Some(5000..6000), ..Seen::default() }));
        let mut queue = CopyQueue::new(Box::new(Recorder(seen.clone())));
        let there = GpuCopy { source: 5000, target: 5500, bytes: 4 };
        for gone in [GpuCopy { source: 7000, ..there }, GpuCopy { target: 7000, ..there }] {
            for copies in [vec![gone], vec![there, gone], vec![there, gone, there]] {
                let freed = CudaError::Freed { address: 7000, bytes: 4 };
                assert_eq!(queue.begin(&copies), Err(Error::Cuda(freed)));
                assert!(!queue.copying());
            }
        }
        {
            let seen = seen.lock().unwrap();
            assert_eq!((seen.kernels, &seen.copies[..]), (0, &[][..]));
        }
        queue.begin(&[there]).unwrap();
        assert_eq!(seen.lock().unwrap().copies, [there]);
    }

    #[test]
    fn batches_of_every_length_are_copied_one_after_the_other() {
        let _alone = one_at_a_time();
        let gpu = SimGpu::open(9).unwrap();
        let (from, to) = (gpu.alloc(9000, 4096).unwrap(), gpu.alloc(9000, 4096).unwrap());
        let bytes: Vec<u8> = (0..9000).map(|k| (k * 7 / 3) as u8).collect();
        gpu.write_from_slice(from.address(), &bytes).unwrap();
        let mut queue = CopyQueue::new(Box::new(SimQueue::new(&gpu)));
        for count in [0, 1, 2, 3, 700, 5, 1000] {
            gpu.fill(to.address(), 0, 9000).unwrap();
            // In reverse order, with a byte between neighbours.
            let copies: Vec<GpuCopy> = (0..count)
                .map(|k| GpuCopy {
                    source: from.address() + k * 9,
                    target: to.address() + (999 - k) * 9,
                    bytes: 8,
                })
                .collect();
            gpu.set_stall(true);
            queue.begin(&copies).unwrap();
            assert!(count == 0 || !queue.is_done().unwrap(), "{queue:?}");
            assert!(count == 0 || matches!(queue.begin(&copies), Err(Error::Internal(_))));
            gpu.set_stall(false);
            while !queue.is_done().unwrap() {
                std::thread::yield_now();
            }
            let seen = gpu.read_to_vec(to.address(), 9000).unwrap();
            for k in 0..1000 {
                let (there, here) = (&seen[(999 - k) * 9..][..9], &bytes[k * 9..][..8]);
                let expected = if (k as u64) < count { here } else { &[0; 8] };
                assert!(there[..8] == *expected && there[8] == 0, "{k} of {count}");
            }
        }
    }
}
