#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Ok(region) = ferrywire::RemoteRegion::from_bytes(data) {
        assert_eq!(region.to_bytes(), data, "an accepted descriptor is encoded to the same bytes");
    }
    ferrywire_proto::fuzzing::wire(data);
});
