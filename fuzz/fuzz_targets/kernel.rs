#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ferrywire::fuzzing::kernel(data));
