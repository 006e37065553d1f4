//! Verification patterns, written and compared by the GPU. Benchmarks and tests would otherwise measure
//! copies to the host.

use super::{CudaBuffer, CudaGpu, CudaStream, Result, WordPattern};
use crate::unpack::{Kernels, PatternParameters};
use std::slice;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Writes and compares patterns on one GPU; each call waits for its work.
#[derive(Debug)]
pub struct CudaPattern {
    stream: CudaStream,
    kernels: Arc<Kernels>,
    /// The kernels' parameters and results; locked from when they are written until the work is done.
    room: Mutex<Room>,
}

/// Device memory for a kernel's parameters and result.
#[derive(Debug)]
struct Room {
    /// Result of a comparison: index of the first wrong byte, or number of the first range that differs.
    first: CudaBuffer,
    /// List of ranges for a kernel, allocated at first need.
    list: Option<CudaBuffer>,
}

/// Longest range in bytes that one block processes; a longer range gets a launch of its own.
const SHORT_BYTES_MAX: u64 = 256 << 10;

/// Timeout of one call; a kernel over all memory of a GPU takes less than a second.
const DEADLINE: Duration = Duration::from_secs(120);

impl CudaPattern {
    /// Loads the kernels, and allocates memory for parameters and results, on this GPU.
    pub fn new(gpu: &Arc<CudaGpu>) -> Result<CudaPattern> {
        Ok(CudaPattern {
            stream: gpu.stream()?,
            kernels: Kernels::of(gpu)?,
            room: Mutex::new(Room { first: gpu.alloc(8, 8)?, list: None }),
        })
    }

    /// Writes `bytes` bytes of the pattern, starting with its byte `offset`.
    ///
    /// # Safety
    /// `bytes` bytes at `address` are accessible to the GPU, and no other code uses them during the call.
    pub unsafe fn fill(&self, pattern: WordPattern, offset: u64, address: u64, bytes: u64) -> Result<()> {
        self.to_its_end(|| {
            // SAFETY: the caller promises that the GPU can access the range, and that no other code uses it.
            unsafe { self.kernels.fill(&self.stream, parameters(pattern, offset, address, bytes)) }?;
            self.stream.wait(DEADLINE)
        })
    }

    /// The index of the first of `bytes` bytes that differs from the pattern, starting with its byte
    /// `offset`.
    ///
    /// # Safety
    /// `bytes` bytes at `address` are accessible to the GPU, and no other code uses them during the call.
    pub unsafe fn first_difference(
        &self,
        pattern: WordPattern,
        offset: u64,
        address: u64,
        bytes: u64,
    ) -> Result<Option<u64>> {
        let parts = [parameters(pattern, offset, address, bytes)];
        // SAFETY: the caller promises that the GPU can access the range, and that no other code uses it.
        self.to_its_end(|| unsafe { self.least_difference(&mut self.room(), &parts) })
    }

    /// Runs `work`, and waits for its end also when it failed or timed out: its memory belongs to the caller
    /// again afterwards, except after an error that does not [end the work](super::CudaError::ends_work).
    fn to_its_end<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        work().or_else(|error| self.stream.finish().and(Err(error)))
    }

    fn room(&self) -> MutexGuard<'_, Room> {
        self.room.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes ranges that do not overlap: all short ones with one launch, and one wait for all.
    ///
    /// # Safety
    /// Each range is accessible to the GPU, and no other code uses it during the call.
    pub unsafe fn fill_parts(&self, parts: &[PatternParameters]) -> Result<()> {
        let mut room = self.room();
        let short: Vec<PatternParameters> = parts.iter().copied().filter(is_short).collect();
        self.to_its_end(|| {
            for part in parts.iter().filter(|part| part.bytes > SHORT_BYTES_MAX) {
                // SAFETY: the caller promises that the GPU can access each range, and that no other code uses
                // it.
                unsafe { self.kernels.fill(&self.stream, *part) }?;
            }
            if let Some(list) = room.put(&short)? {
                // SAFETY: the caller promises that the GPU can access each range, and that no other code uses
                // it; the list stays until the wait is over.
                unsafe { self.kernels.fill_list(&self.stream, list, short.len() as u64) }?;
            }
            self.stream.wait(DEADLINE)
        })
    }

    /// The number of the first range that differs, and the index of its first wrong byte.
    ///
    /// # Safety
    /// Each range is accessible to the GPU, and no other code uses it during the call.
    pub unsafe fn first_difference_of_parts(
        &self,
        parts: &[PatternParameters],
    ) -> Result<Option<(usize, u64)>> {
        let mut room = self.room();
        self.to_its_end(|| {
            // SAFETY: the caller promises that the GPU can access each range, and that no other code uses it.
            let (short, long) =
                unsafe { (self.first_short(&mut room, parts)?, self.first_long(&mut room, parts)?) };
            let Some(number) = short.into_iter().chain(long).min() else { return Ok(None) };
            // SAFETY: the caller promises that the GPU can access each range, and that no other code uses it.
            let index = unsafe { self.least_difference(&mut room, &parts[number..=number]) }?;
            // The difference existed during the first comparison, even if the bytes are equal by now.
            Ok(Some((number, index.unwrap_or(0))))
        })
    }

    /// The number of the first range of at most [`SHORT_BYTES_MAX`] bytes that differs.
    ///
    /// # Safety
    /// Each range is accessible to the GPU, and no other code uses it during the call.
    unsafe fn first_short(&self, room: &mut Room, parts: &[PatternParameters]) -> Result<Option<usize>> {
        let numbers: Vec<usize> = (0..parts.len()).filter(|number| is_short(&parts[*number])).collect();
        let short: Vec<PatternParameters> = numbers.iter().map(|number| parts[*number]).collect();
        let Some(list) = room.put(&short)? else { return Ok(None) };
        let first = room.reset(&self.stream)?;
        // SAFETY: list and result belong to this value, and stay until the wait is over; the caller promises
        // that the GPU can access each range.
        unsafe { self.kernels.check_list(&self.stream, list, short.len() as u64, first) }?;
        self.stream.wait(DEADLINE)?;
        Ok(room.first()?.and_then(|at| numbers.get(at as usize).copied()))
    }

    /// The number of the first range longer than [`SHORT_BYTES_MAX`] bytes that differs.
    ///
    /// # Safety
    /// Each range is accessible to the GPU, and no other code uses it during the call.
    unsafe fn first_long(&self, room: &mut Room, parts: &[PatternParameters]) -> Result<Option<usize>> {
        let numbers: Vec<usize> =
            (0..parts.len()).filter(|number| parts[*number].bytes > SHORT_BYTES_MAX).collect();
        let long: Vec<PatternParameters> = numbers.iter().map(|number| parts[*number]).collect();
        // SAFETY: the caller promises that the GPU can access each range, and that no other code uses it.
        if long.is_empty() || unsafe { self.least_difference(room, &long) }?.is_none() {
            return Ok(None);
        }
        for (part, number) in long.chunks(1).zip(&numbers) {
            // SAFETY: the caller promises that the GPU can access each range, and that no other code uses it.
            if unsafe { self.least_difference(room, part) }?.is_some() {
                return Ok(Some(*number));
            }
        }
        // The difference existed during the first comparison, even if the bytes are equal by now.
        Ok(numbers.first().copied())
    }

    /// The smallest index of a wrong byte in any of the ranges, each counted from its own start.
    ///
    /// # Safety
    /// Each range is accessible to the GPU, and no other code uses it during the call.
    unsafe fn least_difference(&self, room: &mut Room, parts: &[PatternParameters]) -> Result<Option<u64>> {
        let first = room.reset(&self.stream)?;
        for part in parts.iter().filter(|part| part.bytes > 0) {
            // SAFETY: the result's 8 bytes belong to this value; the caller promises that the GPU can access
            // the range.
            unsafe { self.kernels.check(&self.stream, *part, first) }?;
        }
        self.stream.wait(DEADLINE)?;
        room.first()
    }

    /// Test hook: keeps a stream of this GPU busy for `time`, to show that later work waits. This value must
    /// live until that work is done.
    #[doc(hidden)]
    pub fn hold_up(&self, stream: &CudaStream, time: Duration) -> Result<()> {
        self.kernels.delay(stream, time)
    }
}

fn is_short(part: &PatternParameters) -> bool {
    (1..=SHORT_BYTES_MAX).contains(&part.bytes)
}

impl Room {
    /// Copies a list of ranges to device memory for the kernels; returns its address, `None` for an empty
    /// list.
    fn put(&mut self, parts: &[PatternParameters]) -> Result<Option<u64>> {
        if parts.is_empty() {
            return Ok(None);
        }
        let gpu = self.first.gpu().clone();
        // SAFETY: the list consists of plain words, without padding between them.
        let bytes = unsafe { slice::from_raw_parts(parts.as_ptr().cast::<u8>(), size_of_val(parts)) };
        let list = match self.list.take().filter(|list| list.len() >= bytes.len()) {
            Some(list) => list,
            None => gpu.alloc(bytes.len().next_power_of_two(), 8)?,
        };
        gpu.write_from_slice(list.address(), bytes)?;
        Ok(Some(self.list.insert(list).address()))
    }

    /// Resets the result of a comparison; returns its address.
    fn reset(&mut self, stream: &CudaStream) -> Result<u64> {
        let first = self.first.address();
        // SAFETY: the 8 bytes belong to this value.
        unsafe { stream.fill(first, 0xFF, 8) }?;
        Ok(first)
    }

    fn first(&self) -> Result<Option<u64>> {
        let mut found = [0; 8];
        self.first.gpu().read_into_slice(self.first.address(), &mut found)?;
        Ok(Some(u64::from_ne_bytes(found)).filter(|first| *first != u64::MAX))
    }
}

fn parameters(pattern: WordPattern, offset: u64, address: u64, bytes: u64) -> PatternParameters {
    let WordPattern { key, step, flip } = pattern;
    PatternParameters { key, step, flip, offset, address, bytes }
}
