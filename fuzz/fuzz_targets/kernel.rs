#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ferrywire_devmem::sys::fuzzing::kernel(data));
