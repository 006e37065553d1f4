//! Work items of a simulated GPU.
//!
//! Invariant: an item checks every address before it moves the first byte, and runs only while its queue is `running`.
//! Read next: `engine.rs`, which decides when an item runs.

use super::allocation::{Span, resolve};
use super::event::Mark;
use super::pattern::{self, Found};
use super::{Result, SimGpuError};
use crate::GpuCopy;
use crate::unpack::{Fragment, GatherRun, PatternParameters};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// A pointer to host memory that outlives the item, as the enqueuing code has promised.
pub(super) struct HostPointer(pub *mut u8);

// SAFETY: the memory outlives the item, whatever thread runs it.
unsafe impl Send for HostPointer {}

/// An item of work in a stream of a simulated GPU.
pub(super) enum Work {
    ToHost {
        source: u64,
        target: HostPointer,
        bytes: usize,
    },
    FromHost {
        source: HostPointer,
        target: u64,
        bytes: usize,
    },
    Fill {
        target: u64,
        byte: u8,
        bytes: usize,
    },
    /// A kernel that gathers; a device-to-device copy has a single piece.
    Gather(Vec<GpuCopy>),
    /// A kernel that gathers, with its list of fragments in device or mapped memory.
    GatherRuns(Vec<GatherRun>),
    Checksum {
        source: u64,
        bytes: usize,
        into: Arc<Mutex<u32>>,
    },
    /// A kernel that writes patterns.
    Pattern {
        parts: Vec<PatternParameters>,
    },
    /// A kernel that compares memory with patterns.
    Compare {
        parts: Vec<PatternParameters>,
        found: Found,
    },
    Flag(Arc<AtomicU64>, u64),
    Record(Arc<Mark>),
    WaitFor(Arc<Mark>),
}

impl Work {
    /// Whether injected faults apply: the item moves or reads bytes.
    pub fn is_operation(&self) -> bool {
        !matches!(self, Work::Flag(..) | Work::Record(_) | Work::WaitFor(_))
    }

    /// Runs the item on this thread.
    pub fn run(&self) -> Result<()> {
        match self {
            Work::ToHost { source, target, bytes } => {
                let from = resolve(*source, *bytes)?;
                // SAFETY: the span keeps the memory mapped; the enqueuing code keeps `bytes` bytes at
                // `target` writable. `copy` allows overlap (mapped memory).
                unsafe { std::ptr::copy(from.pointer, target.0, *bytes) };
            }
            Work::FromHost { source, target, bytes } => {
                let to = resolve(*target, *bytes)?;
                // SAFETY: the span keeps the memory mapped; the enqueuing code keeps `bytes` bytes at
                // `source` readable. `copy` allows overlap (mapped memory).
                unsafe { std::ptr::copy(source.0, to.pointer, *bytes) };
            }
            Work::Fill { target, byte, bytes } => {
                let to = resolve(*target, *bytes)?;
                // SAFETY: the span keeps the memory mapped.
                unsafe { to.pointer.write_bytes(*byte, *bytes) };
            }
            Work::Gather(pieces) => gather(pieces)?,
            Work::GatherRuns(runs) => gather(&read_runs(runs)?)?,
            Work::Checksum { source, bytes, into } => {
                let from = resolve(*source, *bytes)?;
                *into.lock().unwrap_or_else(PoisonError::into_inner) = checksum(&from, *bytes);
            }
            Work::Pattern { parts } => pattern::fill(parts)?,
            Work::Compare { parts, found } => {
                *found.lock().unwrap_or_else(PoisonError::into_inner) = pattern::first_difference(parts)?;
            }
            Work::Flag(flag, value) => flag.store(*value, Ordering::Release),
            Work::Record(mark) => mark.complete(Ok(())),
            Work::WaitFor(mark) => return mark.outcome().unwrap_or(Ok(())),
        }
        Ok(())
    }

    /// Abandons the item: an event that it records completes with the error `why`.
    pub fn give_up(&self, why: &SimGpuError) {
        if let Work::Record(mark) = self {
            mark.complete(Err(why.clone()));
        }
    }
}

fn gather(pieces: &[GpuCopy]) -> Result<()> {
    let spans: Result<Vec<(Span, Span, usize)>> = pieces
        .iter()
        .map(|piece| {
            Ok((resolve(piece.source, piece.bytes)?, resolve(piece.target, piece.bytes)?, piece.bytes))
        })
        .collect();
    for (from, to, bytes) in spans? {
        // SAFETY: both spans keep their memory mapped; `copy` allows overlap.
        unsafe { std::ptr::copy(from.pointer, to.pointer, bytes) };
    }
    Ok(())
}

/// Reads the fragments of all runs, as they are at this moment.
fn read_runs(runs: &[GatherRun]) -> Result<Vec<GpuCopy>> {
    let mut pieces = Vec::new();
    for run in runs {
        let bytes = (run.count as usize).saturating_mul(size_of::<Fragment>());
        let table = resolve(run.fragments, bytes)?;
        pieces.extend((0..run.count as usize).map(|index| {
            // SAFETY: the entry is inside the span, which keeps the memory mapped; any bytes are a fragment.
            let fragment = unsafe { table.pointer.cast::<Fragment>().add(index).read_unaligned() };
            GpuCopy {
                source: run.source.saturating_add(fragment.source.into()),
                target: run.target.saturating_add(fragment.target),
                bytes: fragment.bytes as usize,
            }
        }));
    }
    Ok(pieces)
}

/// CRC-32 through a private buffer: NICs may write to the memory meanwhile, so no reference to it may exist.
fn checksum(from: &Span, bytes: usize) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    let mut part = vec![0u8; bytes.min(64 << 10)];
    let mut at = 0;
    while at < bytes {
        let now = part.len().min(bytes - at);
        // SAFETY: `at + now <= bytes`, which the span covers; `part` belongs to this function.
        unsafe { std::ptr::copy_nonoverlapping(from.pointer.add(at), part.as_mut_ptr(), now) };
        hasher.update(&part[..now]);
        at += now;
    }
    hasher.finalize()
}
