//! What a simulated GPU can be asked to do, one item at a time.
//!
//! Invariant: an item checks every address it names before it moves the first byte, and it runs on the
//! device's thread alone.
//! Read next: `engine.rs`, which decides when.

use super::allocation::{Span, resolve};
use super::event::Mark;
use super::pattern::{self, Found};
use super::{Result, SimGpuError};
use crate::GpuCopy;
use crate::unpack::{Fragment, GatherRun, PatternParameters};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// A pointer into host memory that outlives the item, as its enqueuer has promised.
pub(super) struct HostPointer(pub *mut u8);

// SAFETY: the enqueuer's promise holds on every thread.
unsafe impl Send for HostPointer {}

/// An item of a stream.
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
    /// A kernel that gathers; a copy from device to device is one with a single piece.
    Gather(Vec<GpuCopy>),
    /// The same, with its pieces in device or mapped memory.
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
    /// Whether faults strike it: it moves or reads bytes.
    pub fn is_operation(&self) -> bool {
        !matches!(self, Work::Flag(..) | Work::Record(_) | Work::WaitFor(_))
    }

    /// Does it.
    pub fn run(&self) -> Result<()> {
        match self {
            Work::ToHost { source, target, bytes } => {
                let from = resolve(*source, *bytes)?;
                // SAFETY: the span is mapped while it is held; the enqueuer keeps `bytes` bytes at
                // `target` writable. `copy` allows that they overlap (mapped memory).
                unsafe { std::ptr::copy(from.pointer, target.0, *bytes) };
            }
            Work::FromHost { source, target, bytes } => {
                let to = resolve(*target, *bytes)?;
                // SAFETY: as above, with the enqueuer's bytes at `source` readable.
                unsafe { std::ptr::copy(source.0, to.pointer, *bytes) };
            }
            Work::Fill { target, byte, bytes } => {
                let to = resolve(*target, *bytes)?;
                // SAFETY: the span is mapped while it is held.
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

    /// It will not be done.
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
        // SAFETY: both spans are mapped while they are held; `copy` allows that they overlap.
        unsafe { std::ptr::copy(from.pointer, to.pointer, bytes) };
    }
    Ok(())
}

/// The pieces that runs name, as they are now.
fn read_runs(runs: &[GatherRun]) -> Result<Vec<GpuCopy>> {
    let mut pieces = Vec::new();
    for run in runs {
        let bytes = (run.count as usize).saturating_mul(size_of::<Fragment>());
        let table = resolve(run.fragments, bytes)?;
        pieces.extend((0..run.count as usize).map(|index| {
            // SAFETY: inside the span, which is mapped while it is held; any bytes are a fragment.
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

/// CRC-32 through a buffer of our own: NICs may write to the memory meanwhile, so no reference to it
/// may exist.
fn checksum(from: &Span, bytes: usize) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    let mut part = vec![0u8; bytes.min(64 << 10)];
    let mut at = 0;
    while at < bytes {
        let now = part.len().min(bytes - at);
        // SAFETY: `at + now <= bytes`, which the span covers; `part` is ours.
        unsafe { std::ptr::copy_nonoverlapping(from.pointer.add(at), part.as_mut_ptr(), now) };
        hasher.update(&part[..now]);
        at += now;
    }
    hasher.finalize()
}
