#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ferrywire_proto::fuzzing::wire(data));
