//! The parameters of a run of `bench`: sizes, depth, blocks, pattern and length.
//!
//! Invariant: a run made here can be sent to the other end as it is; its numbers are within the protocol's limits.
//! Read next: `connect.rs`, the caller.

use super::{at_least_one, seconds, usage};
use crate::args::{ConnectFlags, Op, Pattern, Transport, Unpack, Verify};
use crate::auto::Given;
use crate::bench;
use crate::bench::protocol::{BLOCKS_MAX, DEPTH_MAX, PEERS_MAX, Run};
use crate::exit::Outcome;
use crate::memory::Memory;
use crate::units::Sizes;

/// Length of the timed part in seconds if neither --iters nor --seconds is given.
pub(super) const SECONDS_DEFAULT: f64 = 2.0;

pub(super) fn plan_run(flags: &ConnectFlags, memory: Memory, timeout_s: f64) -> Outcome<Run> {
    let pattern = flags.pattern.unwrap_or(Pattern::Unidir);
    let latency = pattern == Pattern::Latency;
    let sizes = flags.sizes.clone().unwrap_or_else(|| default_sizes(latency, flags.blocks));
    let depth = at_least_one("--depth", flags.depth.given_ref().copied())?;
    if latency && depth.is_some_and(|depth| depth > 1) {
        return usage(format!(
            "--depth must be 1 with --pattern latency (got {})",
            depth.unwrap_or_default()
        ));
    }
    if depth.is_some_and(|depth| depth > DEPTH_MAX) {
        return usage(format!("--depth must be at most {DEPTH_MAX} (got {})", depth.unwrap_or_default()));
    }
    let run_seconds = seconds("--seconds", flags.seconds)?;
    let iters = at_least_one("--iters", flags.iters.map(|n| n as usize))?.map(|n| n as u64);
    let typed = Memory::typed("--peer-memory", flags.peer_memory.given_ref().map(String::as_str))?;
    let peer_memory = typed.or(flags.plugin.as_ref().map(|_| Memory::Host));
    let on_gpus = memory != Memory::Host || peer_memory != Some(Memory::Host);
    let scattered = (flags.plugin.is_some() || flags.transport == Some(Transport::Devmem)) && on_gpus;
    Ok(Run {
        op: flags.op.unwrap_or(Op::Write),
        pattern,
        memory,
        peer_memory,
        unpack: scattered.then(|| flags.unpack.unwrap_or(Unpack::Kernel)),
        blocks: blocks(flags.blocks, &sizes)?,
        sizes: sizes.0,
        depth,
        peers: peers(flags, pattern)?,
        multi_gpu: flags.gpus.is_some(),
        iters,
        seconds: run_seconds.or(if iters.is_none() { Some(SECONDS_DEFAULT) } else { None }),
        warmup: flags.warmup.given_ref().copied(),
        verify: flags.verify.unwrap_or(Verify::All),
        timeout_s,
        seed: bench::host::random_u64()?,
    })
}

fn default_sizes(latency: bool, blocks: Option<usize>) -> Sizes {
    let text = match (latency, blocks) {
        (true, None) => "8,4K,64K",
        (true, Some(n)) => return Sizes(vec![4096 * n as u64]),
        (false, None) => "4K,64K,1M,16M,64M",
        (false, Some(n)) => return Sizes(vec![4096 * n as u64, 65536 * n as u64]),
    };
    text.parse().expect("the default sizes parse")
}

fn blocks(blocks: Option<usize>, sizes: &Sizes) -> Outcome<Option<u64>> {
    let Some(count) = at_least_one("--blocks", blocks)?.map(|n| n as u64) else {
        return Ok(None);
    };
    if count > BLOCKS_MAX {
        return usage(format!("--blocks must be at most {BLOCKS_MAX} (got {count})"));
    }
    match sizes.0.iter().find(|size| **size < count) {
        Some(size) => {
            usage(format!("--blocks must be at most the message size (got {count} blocks for {size} bytes)"))
        }
        None => Ok(Some(count)),
    }
}

fn peers(flags: &ConnectFlags, pattern: Pattern) -> Outcome<usize> {
    match (pattern, flags.peers) {
        (Pattern::Incast, None) if flags.gpus.is_none() => Ok(2),
        (Pattern::Incast, Some(n)) if (1..=PEERS_MAX).contains(&n) => Ok(n),
        (Pattern::Incast, Some(n)) => usage(format!("--peers must be between 1 and {PEERS_MAX} (got {n})")),
        (_, Some(_)) => usage("--peers needs --pattern incast: add it, or leave out --peers"),
        (_, None) => Ok(1),
    }
}
