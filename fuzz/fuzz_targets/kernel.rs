#![no_main]

/// The module alone: the crate around it depends on the engine, which no target needs.
#[path = "../../crates/ferrywire-devmem/src/sys/mod.rs"]
#[allow(dead_code, unused_imports)]
mod sys;

libfuzzer_sys::fuzz_target!(|data: &[u8]| sys::fuzzing::kernel(data));
