//! `--as-seed`: the options under which a run behaves as the original system did, and those that contradict it.
//!
//! The engine does the moving (`PluginConfig::as_seed`), [`crate::bench::turns`] serves one GPU after another. What is
//! measured and verified, and how, is the same as ever.

use crate::args::{ConnectFlags, Op, Pattern, Transport, Unpack};
use crate::exit::{Failure, Outcome};
use crate::units::Bytes;

/// The original's chunk.
const CHUNK_BYTES: u64 = 512 << 10;
/// Receives in flight per channel; a window given to the plugin has to be this one. Of sends there are 12.
const WINDOW: usize = 16;
/// Channels of each of its GPUs.
const CHANNELS: usize = 8;

/// The flags with what `--as-seed` means, if it was given.
pub fn settle(mut flags: ConnectFlags) -> Outcome<ConnectFlags> {
    if flags.as_seed != Some(true) {
        return Ok(flags);
    }
    if let Some(contradiction) = contradiction(&flags) {
        return Err(Failure::Usage(format!("--as-seed: {contradiction}")));
    }
    flags.depth = Some(1);
    flags.chunk = Some(Bytes(CHUNK_BYTES));
    flags.channels.get_or_insert(CHANNELS);
    Ok(flags)
}

/// What else was asked for that the original did not do.
fn contradiction(flags: &ConnectFlags) -> Option<String> {
    if flags.plugin.is_none() || flags.transport == Some(Transport::Tcp) {
        return Some(
            "the original moved data over a plugin: add --plugin PATH, here and on the other end".into(),
        );
    }
    let chunk = flags.chunk.map(|chunk| chunk.0);
    let refused = [
        (flags.op.is_some_and(|op| op != Op::Write), "--op: it pushed; leave it out"),
        (
            flags.pattern.is_some_and(|pattern| pattern != Pattern::Pair),
            "--pattern: GPU i sent to GPU i, one way; leave it out",
        ),
        (chunk.is_some_and(|bytes| bytes != CHUNK_BYTES), "--chunk: its chunks were 512K; leave it out"),
        (
            flags.window.is_some_and(|window| window != WINDOW),
            "--window: it had 12 sends and 16 receives; leave it out",
        ),
        (
            flags.depth.is_some_and(|depth| depth != 1),
            "--depth: it moved one message at a time; leave it out",
        ),
        (flags.threads.is_some_and(|threads| threads != 1), "--threads: it had one; leave it out"),
        (flags.blocks.is_some(), "--blocks: its messages were one piece; leave it out"),
        (
            flags.unpack.is_some_and(|unpack| unpack != Unpack::Kernel),
            "--unpack: it launched a kernel per chunk; leave it out",
        ),
        (flags.crc == Some(true), "--crc: it had no checksums; leave it out"),
    ];
    refused.into_iter().find(|(given, _)| *given).map(|(_, why)| why.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(change: impl FnOnce(&mut ConnectFlags)) -> Outcome<ConnectFlags> {
        let mut flags =
            ConnectFlags { as_seed: Some(true), plugin: Some("x.so".into()), ..Default::default() };
        change(&mut flags);
        settle(flags)
    }

    #[test]
    fn it_fixes_what_the_original_fixed() {
        let flags = asked(|_| {}).expect("good");
        assert_eq!(
            (flags.depth, flags.chunk.map(|chunk| chunk.0), flags.channels),
            (Some(1), Some(524_288), Some(8))
        );
        assert_eq!(asked(|flags| flags.channels = Some(4)).expect("good").channels, Some(4));
        // Its own values may be named.
        let own = asked(|flags| (flags.window, flags.chunk) = (Some(16), Some(Bytes(524_288))));
        assert!(own.is_ok());
    }

    #[test]
    fn what_contradicts_it_is_named() {
        type Change = fn(&mut ConnectFlags);
        let changes: [(&str, Change); 11] = [
            ("--plugin", |flags| flags.plugin = None),
            ("--plugin", |flags| flags.transport = Some(Transport::Tcp)),
            ("--op", |flags| flags.op = Some(Op::Read)),
            ("--pattern", |flags| flags.pattern = Some(Pattern::Mesh)),
            ("--chunk", |flags| flags.chunk = Some(Bytes(4096))),
            ("--window", |flags| flags.window = Some(8)),
            ("--depth", |flags| flags.depth = Some(4)),
            ("--threads", |flags| flags.threads = Some(2)),
            ("--blocks", |flags| flags.blocks = Some(2)),
            ("--unpack", |flags| flags.unpack = Some(Unpack::Copy)),
            ("--crc", |flags| flags.crc = Some(true)),
        ];
        for (flag, change) in changes {
            let said = asked(change).expect_err(flag).message();
            assert!(said.contains("--as-seed") && said.contains(flag), "{flag}: {said}");
        }
    }
}
