//! The kernels of `kernel.cu`, loaded once per GPU, and the layout of a gather over the multiprocessors.
//!
//! A block copies several fragments, few enough that every multiprocessor has work. Where long fragments are
//! too few for that, several blocks share each fragment, piece by piece. A sample of the lengths decides; a
//! wrong guess costs time, never correctness.
//! Invariant: the structures here equal those of `kernel.cu`, and `kernel.ptx` was compiled from it; tests
//! compare them.
//! Read next: `cuda.rs`, which launches.

use super::device::GatherRun;
use super::lists::CopyAddresses;
use super::sm_backoff::SmBackoff;
use super::table::Fragment;
use crate::GpuCopy;
use crate::cuda::{CudaBuffer, CudaFunction, CudaGpu, CudaModule, CudaStream, Result};
use ferrywire_proto::limits::CUDA_GPUS_MAX;
use std::ffi::{CStr, c_void};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

const PTX: &CStr = match CStr::from_bytes_with_nul(concat!(include_str!("kernel.ptx"), "\0").as_bytes()) {
    Ok(text) => text,
    Err(_) => panic!("the kernels' text contains a zero byte"),
};

/// Threads per block of each kernel.
const BLOCK: u32 = 256;
/// Most runs of one gather launch.
pub(super) const RUNS_PER_LAUNCH_MAX: usize = 32;
/// Most fragments that one block copies.
const BATCH_MAX: u64 = 32;
/// Blocks per multiprocessor among which fragments are distributed.
const BLOCKS_PER_MULTIPROCESSOR: u64 = 8;
const SLICED_BLOCKS_PER_MULTIPROCESSOR: u64 = 4;
/// Bytes that a block copies in one step; pieces of fragments are multiples of it.
pub(super) const PIECE_BYTES: u64 = 4096;
/// Number of a run's fragments whose lengths are sampled.
const SAMPLES: u64 = 32;
/// Bytes of the words of one [`Counter`], each word in cache lines of its own.
const COUNTER_BYTES: usize = 384;
/// Number of counters for copy kernels on each GPU.
pub const COUNTERS: usize = 8192;

/// Parameters of the kernel `ferrywire_gather`.
#[derive(Debug)]
#[repr(C)]
struct GatherParameters {
    runs: [GatherRun; RUNS_PER_LAUNCH_MAX],
    fragments: u64,
    batch: u32,
    slices: u32,
    piece_bytes: u64,
}

/// Parameters of the kernel `ferrywire_copy`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct CopyParameters {
    mailbox: u64,
    runs: u64,
    stride: u64,
    completion: u64,
    blocks: u64,
    first: u64,
    idle_ns: u64,
    stay_ns: u64,
}

/// Parameters of the kernels `ferrywire_fill` and `ferrywire_check`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct PatternParameters {
    /// Value of word 0 of the pattern.
    pub key: u64,
    /// Difference between neighbouring words of the pattern.
    pub step: u64,
    /// Bits that are inverted in every word.
    pub flip: u64,
    /// Offset of the range's first byte in the pattern.
    pub offset: u64,
    /// Address of the range's first byte in memory.
    pub address: u64,
    /// Length of the range in bytes.
    pub bytes: u64,
}

const _: () = assert!(size_of::<GpuCopy>() == 24);

/// The kernels loaded on one GPU.
#[derive(Debug)]
pub struct Kernels {
    gather: CudaFunction,
    copy: CudaFunction,
    fill: CudaFunction,
    check: CudaFunction,
    fill_list: CudaFunction,
    check_list: CudaFunction,
    delay: CudaFunction,
    multiprocessors: u32,
    /// Whether the GPU's multiprocessors have time for copies.
    pub sm_backoff: SmBackoff,
    /// Zeroed device memory for counters; `free` lists the unused ones, each with the number of its next
    /// list.
    _counters: CudaBuffer,
    free: Mutex<Vec<(u64, u64)>>,
}

/// Words of device memory through which the blocks of one stream's copy kernel synchronize. All counters are
/// zeroed together when the kernels are loaded. A later write of so few bytes would use multiprocessors,
/// whose queues may be blocked by streams that wait for the transfer that needs the counter.
#[derive(Debug)]
pub struct Counter {
    kernels: Arc<Kernels>,
    address: u64,
    /// Number of the next list. Within one counter numbers never repeat and none is skipped. So a value left
    /// in a list's place is from the list four before it, and not from an old one with equal lower bits.
    next: u64,
    is_known: bool,
}

impl Counter {
    /// Device address of the counter.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Number of the next list of copies.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// Marks all list numbers below `next` as used.
    pub fn go_on(&mut self, next: u64) {
        self.next = next;
    }

    /// Notes that it is unknown which list numbers are used; the counter is then never reused.
    pub fn lose_count(&mut self) {
        self.is_known = false;
    }
}

impl Drop for Counter {
    fn drop(&mut self) {
        if self.is_known {
            self.kernels.free.lock().unwrap_or_else(PoisonError::into_inner).push((self.address, self.next));
        }
    }
}

/// The kernels of one GPU while they are in use.
struct Slot {
    /// Held while the kernels are loaded, which may have to wait for a stream of that GPU. Threads that move
    /// data never take this lock, and other GPUs have locks of their own.
    loading: Mutex<()>,
    loaded: Mutex<Weak<Kernels>>,
}

static SLOTS: [Slot; CUDA_GPUS_MAX] =
    [const { Slot { loading: Mutex::new(()), loaded: Mutex::new(Weak::new()) } }; CUDA_GPUS_MAX];

impl Slot {
    fn of(gpu: &CudaGpu) -> &'static Slot {
        &SLOTS[gpu.index() as usize]
    }

    fn kernels(&self) -> MutexGuard<'_, Weak<Kernels>> {
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kernels {
    /// The kernels of a GPU, shared while they are in use. Loads them at first need; the driver may then wait
    /// for the GPU's work.
    pub fn of(gpu: &Arc<CudaGpu>) -> Result<Arc<Kernels>> {
        let slot = Slot::of(gpu);
        if let Some(kernels) = slot.kernels().upgrade() {
            return Ok(kernels);
        }
        let _loading = slot.loading.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernels) = slot.kernels().upgrade() {
            return Ok(kernels);
        }
        let kernels = Arc::new(Kernels::load(gpu)?);
        *slot.kernels() = Arc::downgrade(&kernels);
        Ok(kernels)
    }

    /// The kernels of a GPU if they are loaded. Never waits.
    pub fn loaded(gpu: &CudaGpu) -> Option<Arc<Kernels>> {
        Slot::of(gpu).kernels().upgrade()
    }

    fn load(gpu: &Arc<CudaGpu>) -> Result<Kernels> {
        let module = CudaModule::load(gpu, PTX)?;
        let counters = gpu.alloc_own(COUNTERS * COUNTER_BYTES, 64)?;
        let free = (0..COUNTERS).map(|at| (counters.address() + (at * COUNTER_BYTES) as u64, 1));
        Ok(Kernels {
            gather: module.function(c"ferrywire_gather")?,
            copy: module.function(c"ferrywire_copy")?,
            fill: module.function(c"ferrywire_fill")?,
            check: module.function(c"ferrywire_check")?,
            fill_list: module.function(c"ferrywire_fill_list")?,
            check_list: module.function(c"ferrywire_check_list")?,
            delay: module.function(c"ferrywire_delay")?,
            multiprocessors: gpu.multiprocessors().max(1),
            sm_backoff: SmBackoff::default(),
            free: Mutex::new(free.rev().collect()),
            _counters: counters,
        })
    }

    /// A counter for one stream's [`CopyAddresses::blocks`], to be dropped when the stream's work is done;
    /// `None` when all are in use.
    pub fn counter(self: &Arc<Kernels>) -> Option<Counter> {
        let (address, next) = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop()?;
        Some(Counter { kernels: self.clone(), address, next, is_known: true })
    }

    /// Enqueues the copies of all fragments of `runs`, at most `RUNS_PER_LAUNCH_MAX` runs, in one launch.
    ///
    /// # Safety
    /// CPU and GPU read the fragments at one address, and the fragments are unchanged until the work is done.
    /// Sources and targets are memory that the GPU can access, and no target overlaps with another range of
    /// the call.
    pub unsafe fn gather(&self, stream: &CudaStream, runs: &[GatherRun]) -> Result<()> {
        let fragments: u64 = runs.iter().map(|run| run.count).sum();
        if fragments == 0 {
            return Ok(());
        }
        // SAFETY: the caller promises that the fragments are readable.
        let longest = runs.iter().map(|run| unsafe { longest_of(run) }).max().unwrap_or(0);
        let Layout { blocks, batch, slices, piece_bytes } =
            Layout::of(fragments, longest.into(), self.multiprocessors);
        let mut parameters = GatherParameters {
            runs: [GatherRun::default(); RUNS_PER_LAUNCH_MAX],
            fragments,
            batch,
            slices,
            piece_bytes,
        };
        parameters.runs[..runs.len()].copy_from_slice(runs);
        // SAFETY: the call passes one parameter, of the kernel's type; the caller promises that the memory
        // can be accessed.
        unsafe { stream.launch(&self.gather, blocks, BLOCK, &mut [(&raw mut parameters).cast()]) }
    }

    /// Enqueues a kernel that makes the copies of posted lists, between any memory that the GPU can access:
    /// list `first` once it is posted, then those posted after it. The kernel ends when no list was posted
    /// for `idle`, or after `stay`; it waits half a second for the first list.
    ///
    /// # Safety
    /// CPU and GPU access all of `addresses` at one address. A list and its runs are unchanged until the GPU has
    /// reported the list as done or as not taken. When the list is posted, all memory that it names is
    /// allocated, and stays so until then; no target overlaps with another range of the list.
    pub unsafe fn copy(
        &self,
        stream: &CudaStream,
        addresses: CopyAddresses,
        first: u64,
        blocks: u64,
        [idle, stay]: [Duration; 2],
    ) -> Result<()> {
        let CopyAddresses { mailbox, runs, stride, completion, blocks: words } = addresses;
        let [idle_ns, stay_ns] = [idle, stay].map(|time| time.as_nanos() as u64);
        let mut parameters =
            CopyParameters { mailbox, runs, stride, completion, blocks: words, first, idle_ns, stay_ns };
        // SAFETY: the call passes one parameter, of the kernel's type; the caller promises that the memory
        // can be accessed.
        unsafe { stream.launch(&self.copy, blocks as u32, BLOCK, &mut [(&raw mut parameters).cast()]) }
    }

    /// Enqueues the writing of a pattern to a range.
    ///
    /// # Safety
    /// The range is memory that the GPU can access, and no other code uses it until the work is done.
    pub unsafe fn fill(&self, stream: &CudaStream, mut pattern: PatternParameters) -> Result<()> {
        let blocks = self.blocks_for(pattern.bytes);
        // SAFETY: the call passes one parameter, of the kernel's type; the caller promises that the memory
        // can be accessed.
        unsafe { stream.launch(&self.fill, blocks, BLOCK, &mut [(&raw mut pattern).cast()]) }
    }

    /// Enqueues a comparison of a range with a pattern. The word at `first` becomes the index of the first
    /// wrong byte, if that is smaller.
    ///
    /// # Safety
    /// The promise of [`Kernels::fill`]; `first` is a device address of 8 aligned bytes.
    pub unsafe fn check(
        &self,
        stream: &CudaStream,
        mut pattern: PatternParameters,
        mut first: u64,
    ) -> Result<()> {
        let blocks = self.blocks_for(pattern.bytes);
        let mut parameters: [*mut c_void; 2] = [(&raw mut pattern).cast(), (&raw mut first).cast()];
        // SAFETY: the call passes two parameters of the kernel's types; the caller promises that the memory
        // can be accessed.
        unsafe { stream.launch(&self.check, blocks, BLOCK, &mut parameters) }
    }

    /// Enqueues the writing of `count` patterns to their ranges, one block each.
    ///
    /// # Safety
    /// `list` is a device address of `count` [`PatternParameters`], which stay there until the work is done.
    /// The promise of [`Kernels::fill`] holds for each of them, and they do not overlap.
    pub unsafe fn fill_list(&self, stream: &CudaStream, mut list: u64, mut count: u64) -> Result<()> {
        let mut parameters: [*mut c_void; 2] = [(&raw mut list).cast(), (&raw mut count).cast()];
        // SAFETY: the call passes two parameters of the kernel's types; the caller promises that the memory
        // can be accessed.
        unsafe { stream.launch(&self.fill_list, self.blocks_of(count), BLOCK, &mut parameters) }
    }

    /// Enqueues the comparison of `count` ranges with their patterns. The word at `first` becomes the number
    /// of the first range that differs, if that is smaller.
    ///
    /// # Safety
    /// The promises of [`Kernels::fill_list`] and [`Kernels::check`].
    pub unsafe fn check_list(
        &self,
        stream: &CudaStream,
        mut list: u64,
        mut count: u64,
        mut first: u64,
    ) -> Result<()> {
        let mut parameters: [*mut c_void; 3] =
            [(&raw mut list).cast(), (&raw mut count).cast(), (&raw mut first).cast()];
        // SAFETY: the call passes three parameters of the kernel's types; the caller promises that the memory
        // can be accessed.
        unsafe { stream.launch(&self.check_list, self.blocks_of(count), BLOCK, &mut parameters) }
    }

    /// Keeps a stream busy for `time`. This value must live until that work is done.
    pub fn delay(&self, stream: &CudaStream, time: Duration) -> Result<()> {
        let mut nanoseconds = time.as_nanos() as u64;
        // SAFETY: the call passes one parameter, of the kernel's type; the kernel touches no memory.
        unsafe { stream.launch(&self.delay, 1, 1, &mut [(&raw mut nanoseconds).cast()]) }
    }

    fn blocks_of(&self, stretches: u64) -> u32 {
        let most = u64::from(self.multiprocessors) * BLOCKS_PER_MULTIPROCESSOR;
        stretches.clamp(1, most) as u32
    }

    fn blocks_for(&self, bytes: u64) -> u32 {
        let most = u64::from(self.multiprocessors) * BLOCKS_PER_MULTIPROCESSOR;
        bytes.div_ceil(PIECE_BYTES).clamp(1, most) as u32
    }
}

/// Length in bytes of the longest fragment in a sample of a run's fragments.
///
/// # Safety
/// The fragments are readable.
unsafe fn longest_of(run: &GatherRun) -> u32 {
    let first = run.fragments as *const Fragment;
    let step = run.count.div_ceil(SAMPLES).max(1) as usize;
    // SAFETY: the addresses are those of the run's entries, which the caller promises to be readable.
    (0..run.count as usize).step_by(step).map(|at| unsafe { (*first.add(at)).bytes }).max().unwrap_or(0)
}

/// Division of a gather over blocks, as in `ferrywire_gather`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Layout {
    blocks: u32,
    batch: u32,
    slices: u32,
    piece_bytes: u64,
}

impl Layout {
    fn of(fragments: u64, longest: u64, multiprocessors: u32) -> Layout {
        let multiprocessors = u64::from(multiprocessors);
        let batch = fragments.div_ceil(multiprocessors * BLOCKS_PER_MULTIPROCESSOR);
        Layout::with(fragments, longest, batch, multiprocessors * SLICED_BLOCKS_PER_MULTIPROCESSOR)
    }

    /// A division of a gather with `batch` fragments per block, within the limits, and `wanted` blocks where
    /// there is enough work.
    fn with(fragments: u64, longest: u64, batch: u64, wanted: u64) -> Layout {
        let batch = batch.clamp(1, BATCH_MAX);
        let batches = fragments.div_ceil(batch);
        let slices = longest.div_ceil(PIECE_BYTES).clamp(1, (wanted / batches).max(1));
        let piece_bytes = longest.div_ceil(slices).next_multiple_of(PIECE_BYTES).max(PIECE_BYTES);
        Layout { blocks: (batches * slices) as u32, batch: batch as u32, slices: slices as u32, piece_bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::super::lists::{CopyList, CopyMailbox, LIST_BATCH, LIST_WORDS, NUMBER_AT};
    use super::*;
    use std::mem::offset_of;

    const SOURCE: &str = include_str!("kernel.cu");

    fn ptx() -> &'static str {
        PTX.to_str().unwrap()
    }

    /// The parameters of an entry, as the PTX declares them.
    fn parameters(entry: &str) -> Vec<&'static str> {
        let from = ptx().find(&format!(".visible .entry {entry}(")).unwrap_or_else(|| panic!("no {entry}"));
        let list = &ptx()[from..][..ptx()[from..].find(')').unwrap()];
        list.lines().skip(1).map(|line| line.trim().trim_end_matches(',')).filter(|l| !l.is_empty()).collect()
    }

    #[test]
    fn the_kernels_take_what_they_are_given() {
        let gather =
            format!(".param .align 8 .b8 ferrywire_gather_param_0[{}]", size_of::<GatherParameters>());
        assert_eq!(parameters("ferrywire_gather"), [gather]);
        let copy = format!(".param .align 8 .b8 ferrywire_copy_param_0[{}]", size_of::<CopyParameters>());
        assert_eq!(parameters("ferrywire_copy"), [copy]);
        let pattern =
            |entry| format!(".param .align 8 .b8 {entry}_param_0[{}]", size_of::<PatternParameters>());
        assert_eq!(parameters("ferrywire_fill"), [pattern("ferrywire_fill")]);
        let first = ".param .u64 ferrywire_check_param_1".to_string();
        assert_eq!(parameters("ferrywire_check"), [pattern("ferrywire_check"), first]);
        for (entry, count) in [("ferrywire_fill_list", 2), ("ferrywire_check_list", 3)] {
            let words = (0..count).map(|k| format!(".param .u64 {entry}_param_{k}"));
            assert!(words.eq(parameters(entry)), "{entry}");
        }
        assert_eq!(parameters("ferrywire_delay"), [".param .u64 ferrywire_delay_param_0"]);
        // The PTX reads 8-byte words one by one, and neighbouring 4-byte words together.
        for (entry, offset, kind) in [
            ("gather", offset_of!(GatherParameters, fragments), "u64"),
            ("gather", offset_of!(GatherParameters, batch), "v2.u32"),
            ("copy", offset_of!(CopyParameters, runs), "u64"),
            ("copy", offset_of!(CopyParameters, stride), "u64"),
            ("copy", offset_of!(CopyParameters, completion), "u64"),
            ("copy", offset_of!(CopyParameters, blocks), "u64"),
            ("copy", offset_of!(CopyParameters, first), "u64"),
            ("copy", offset_of!(CopyParameters, idle_ns), "u64"),
            ("copy", offset_of!(CopyParameters, stay_ns), "u64"),
            ("fill", offset_of!(PatternParameters, step), "u64"),
            ("fill", offset_of!(PatternParameters, flip), "u64"),
            ("fill", offset_of!(PatternParameters, offset), "u64"),
            ("fill", offset_of!(PatternParameters, address), "u64"),
            ("fill", offset_of!(PatternParameters, bytes), "u64"),
        ] {
            let at = format!("[ferrywire_{entry}_param_0+{offset}]");
            let read =
                ptx().lines().any(|line| line.contains(&format!("ld.param.{kind}")) && line.contains(&at));
            assert!(read, "nobody reads {kind} at {at}");
        }
        assert_eq!(offset_of!(GatherParameters, slices), offset_of!(GatherParameters, batch) + 4);
        assert_eq!(offset_of!(GatherParameters, piece_bytes), 1040);
    }

    #[test]
    fn the_source_has_the_same_structures_and_limits() {
        let blocks = [("BLOCK", u64::from(BLOCK)), ("BATCH", BATCH_MAX), ("LIST_BATCH", LIST_BATCH)];
        let lists = [("WORDS", LIST_WORDS as u64), ("NUMBER_AT", u64::from(NUMBER_AT)), ("RUNS", 32)];
        for (name, value) in blocks.into_iter().chain(lists) {
            assert!(SOURCE.contains(&format!("#define {name} {value}\n")), "{name} {value}");
        }
        assert_eq!(RUNS_PER_LAUNCH_MAX, 32);
        let fields = |name: &str| -> Vec<&str> {
            let from = SOURCE.find(&format!("struct {name} {{\n")).unwrap();
            let body = &SOURCE[from..][..SOURCE[from..].find('}').unwrap()];
            body.lines()
                .skip(1)
                .map(|line| line.trim().trim_end_matches(';'))
                .filter(|l| !l.is_empty())
                .collect()
        };
        assert_eq!(fields("Fragment"), ["u32 source", "u32 bytes", "u64 target"]);
        assert_eq!(
            [offset_of!(Fragment, source), offset_of!(Fragment, bytes), offset_of!(Fragment, target)],
            [0, 4, 8]
        );
        assert_eq!(fields("Run"), ["u64 fragments", "u64 count", "u64 source", "u64 target"]);
        let run = [
            offset_of!(GatherRun, fragments),
            offset_of!(GatherRun, count),
            offset_of!(GatherRun, source),
            offset_of!(GatherRun, target),
        ];
        assert_eq!(run, [0, 8, 16, 24]);
        assert_eq!(fields("Copy"), ["const u8 *source", "u8 *target", "u64 bytes"]);
        let copy = [offset_of!(GpuCopy, source), offset_of!(GpuCopy, target), offset_of!(GpuCopy, bytes)];
        assert_eq!(copy, [0, 8, 16]);
        assert_eq!(
            fields("Copies"),
            [
                "u64 mailbox",
                "u64 runs",
                "u64 stride",
                "u64 completion",
                "u64 blocks",
                "u64 first",
                "u64 idle_ns",
                "u64 stay_ns"
            ]
        );
        let list = [
            "u64 count",
            "// Written to Copies::completion once all runs are copied.",
            "u64 value",
            "// Runs that a block takes at once; in the bits above 32, the number of slices.",
            "u64 batch",
            "u64 piece_bytes",
            "// The run of a list with one run, which saves a read of mapped memory.",
            "u64 source",
            "u64 target",
            "u64 bytes",
            "u64 unused",
        ];
        assert_eq!(fields("List"), list);
        let only = GpuCopy { source: 6, target: 7, bytes: 8 };
        let words = CopyList { count: 1, value: 2, batch: 3, slices: 4, piece_bytes: 5, only }.words();
        assert_eq!(words, [1, 2, 3 | 4 << 32, 5, 6, 7, 8, 0]);
        let mailbox = ["List lists[2]", "u64 begun", "u64 closed", "u64 ended", "u64 unused[5]"];
        assert_eq!(
            fields("Mailbox").into_iter().filter(|l| !l.starts_with("//")).collect::<Vec<_>>(),
            mailbox
        );
        let of_gpu =
            [offset_of!(CopyMailbox, begun), offset_of!(CopyMailbox, closed), offset_of!(CopyMailbox, ended)];
        assert_eq!((of_gpu, size_of::<CopyMailbox>()), ([128, 136, 144], 192));
        assert_eq!(fields("Blocks"), ["List forwarded[4]", "u32 done[2]"]);
        const { assert!(4 * 8 * LIST_WORDS + 2 * 4 <= COUNTER_BYTES) };
        assert_eq!(
            fields("Pattern"),
            ["u64 key", "u64 step", "u64 flip", "u64 offset", "u64 address", "u64 bytes"]
        );
    }

    #[test]
    fn the_text_was_made_of_the_source_for_old_gpus() {
        let sum = format!("// Made from kernel.cu with CRC-32 {:08x}", crc32fast::hash(SOURCE.as_bytes()));
        assert!(ptx().contains(&sum), "kernel.ptx is not of this kernel.cu: make it again; {sum}");
        assert!(ptx().contains("\n.version 6.0\n.target sm_60\n"));
    }

    /// The pieces of fragments that each block copies, computed as in the kernel.
    fn pieces(layout: Layout, lengths: &[u64]) -> Vec<(usize, u64, u64)> {
        let Layout { blocks, batch, slices, piece_bytes } = layout;
        let mut out = Vec::new();
        for block in 0..blocks {
            let first = (block / slices) as usize * batch as usize;
            for (fragment, length) in lengths.iter().enumerate().skip(first).take(batch as usize) {
                let mut at = u64::from(block % slices) * piece_bytes;
                while at < *length {
                    out.push((fragment, at, piece_bytes.min(length - at)));
                    at += u64::from(slices) * piece_bytes;
                }
            }
        }
        out
    }

    #[test]
    fn a_layout_covers_each_byte_once_even_when_the_sample_was_wrong() {
        let mut rng = ferrywire_sys::rng::Rng::new(5);
        for round in 0..2000 {
            let count = 1 + rng.below(if round % 10 == 0 { 5000 } else { 50 }) as usize;
            let most = [2, 100, 5000, 4 << 20][rng.below(4) as usize];
            let lengths: Vec<u64> = (0..count).map(|_| rng.below(most)).collect();
            let guessed =
                [1, 4096, lengths[0], lengths.iter().copied().max().unwrap()][rng.below(4) as usize];
            let layout = Layout::of(count as u64, guessed, 1 + rng.below(200) as u32);
            let mut pieces = pieces(layout, &lengths);
            pieces.sort_unstable();
            let mut covered = vec![0; count];
            for (fragment, at, bytes) in pieces {
                assert_eq!(at, covered[fragment], "{layout:?}");
                covered[fragment] += bytes;
            }
            assert_eq!(covered, lengths, "{layout:?}");
        }
    }

    #[test]
    fn short_and_long_lists_use_the_whole_gpu() {
        let busy = |fragments, longest| Layout::of(fragments, longest, 132);
        // 512 KiB in 128 fragments take a block each; merged into one fragment they take a block per piece.
        assert_eq!(busy(128, 4096), Layout { blocks: 128, batch: 1, slices: 1, piece_bytes: 4096 });
        assert_eq!(busy(1, 512 << 10), Layout { blocks: 128, batch: 1, slices: 128, piece_bytes: 4096 });
        // 64 MiB in fragments of 4 KiB, and 1 GiB.
        assert_eq!(busy(16_384, 4096), Layout { blocks: 1024, batch: 16, slices: 1, piece_bytes: 4096 });
        assert_eq!(busy(262_144, 4096).blocks, 8192);
        assert_eq!(busy(1, 1), Layout { blocks: 1, batch: 1, slices: 1, piece_bytes: 4096 });
    }

    #[test]
    fn the_longest_of_a_short_run_is_known() {
        let fragments: Vec<Fragment> = (0..32)
            .map(|k| Fragment { bytes: if k == 17 { 9000 } else { 7 }, ..Default::default() })
            .collect();
        let run = GatherRun { fragments: fragments.as_ptr() as u64, count: 32, ..Default::default() };
        // SAFETY: the run has this many fragments.
        assert_eq!(unsafe { longest_of(&run) }, 9000);
        // SAFETY: no fragment is read.
        assert_eq!(unsafe { longest_of(&GatherRun::default()) }, 0);
    }
}
