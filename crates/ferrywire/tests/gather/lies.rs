use crate::plugin::*;
use ferrywire::ErrorKind;
use ferrywire_memory::Error;
use ferrywire_memory::MemoryLocation;
use ferrywire_memory::sim::MappedBuffer;
use ferrywire_memory::unpack::{Fragment, METADATA_BYTES, UnpackError};
use ferrywire_ncclnet::abi::DeviceHandle;

const MESSAGE_BYTES: u64 = 3000;

/// Three fragments of 1000 bytes, of which the second one is changed.
fn three_fragments(change: impl Fn(&mut Fragment)) -> [Fragment; 3] {
    let mut all = [0, 1, 2].map(|k| Fragment { source: 5000 * k, bytes: 1000, target: u64::from(1000 * k) });
    change(&mut all[1]);
    all
}

/// Every mode refuses it, writes nothing, and goes on with honest receives.
#[track_caller]
fn refused(all: &[Fragment], count: u64, expected: UnpackError) {
    let plugin = Plugin::new(0);
    for mode in GATHERING {
        let mut gather = plugin.gather(mode);
        let target = Destination::new(&plugin.gpu, MESSAGE_BYTES as usize + 500, 1);
        plugin.tell(5, all, count);
        let error = gather.start(5, target.address(), target.len(), MESSAGE_BYTES).unwrap_err();
        assert_eq!(error, Error::from(expected.clone()), "{mode}");
        assert_eq!(ferrywire::Error::from(error.clone()).kind(), ErrorKind::Plugin);
        let text = error.to_string();
        assert!(text.starts_with("slot 5"), "{text}");

        let (sent, honest) = (message(&mut rng(3), MESSAGE_BYTES as usize), three_fragments(|_| ()));
        let other = Destination::new(&plugin.gpu, MESSAGE_BYTES as usize, 0);
        plugin.deliver(6, &sent, &honest);
        gather.start(6, other.address(), other.len(), MESSAGE_BYTES).unwrap();
        assert_eq!(finish(&mut gather, 6), Ok(MESSAGE_BYTES));
        assert!(other.contents() == sent, "{mode}");
        target.assert_untouched();
    }
}

#[test]
fn a_source_outside_the_pool() {
    let pool_bytes = POOL_BYTES as u64;
    for (source_offset, bytes) in [(POOL_BYTES as u32 - 999, 1000), (u32::MAX, 1000), (0, u32::MAX)] {
        let all = three_fragments(|one| (one.source, one.bytes) = (source_offset, bytes));
        refused(&all, 3, UnpackError::OutsidePool { slot: 5, fragment: 1, source_offset, bytes, pool_bytes });
    }
}

#[test]
fn a_target_outside_the_message() {
    // Also where the destination would have had room.
    for target_offset in [2001, 2500, 1 << 40, u64::MAX, u64::MAX - 999] {
        let all = three_fragments(|one| one.target = target_offset);
        let (message_bytes, bytes) = (MESSAGE_BYTES, 1000);
        refused(
            &all,
            3,
            UnpackError::OutsideMessage { slot: 5, fragment: 1, target_offset, bytes, message_bytes },
        );
    }
}

#[test]
fn a_wrong_length() {
    let [fragments, message_bytes] = [3, MESSAGE_BYTES];
    for (bytes, sum_bytes) in [(999, 2999), (0, 2000)] {
        let fragments = fragments as usize;
        let expected = UnpackError::WrongSum { slot: 5, fragments, sum_bytes, message_bytes };
        refused(&three_fragments(|one| one.bytes = bytes), 3, expected);
    }
    let expected = UnpackError::Overlap {
        slot: 5,
        fragment: 2,
        target_offset: 2000,
        bytes: 1000,
        other: 1,
        other_end: 2001,
    };
    refused(&three_fragments(|one| one.bytes = 1001), 3, expected);
}

#[test]
fn two_fragments_for_one_place() {
    let expected = UnpackError::Overlap {
        slot: 5,
        fragment: 1,
        target_offset: 999,
        bytes: 1000,
        other: 0,
        other_end: 1000,
    };
    refused(&three_fragments(|one| one.target = 999), 3, expected);
}

#[test]
fn a_wrong_number_of_fragments() {
    let all = three_fragments(|_| ());
    for count in [2049, 1 << 32, u64::MAX] {
        refused(&all, count, UnpackError::TooManyFragments { slot: 5, count });
    }
    let wrong_sum = |fragments, sum_bytes| UnpackError::WrongSum {
        slot: 5,
        fragments,
        sum_bytes,
        message_bytes: MESSAGE_BYTES,
    };
    refused(&all, 0, wrong_sum(0, 0));
    refused(&all, 2, wrong_sum(2, 2000));
    // Behind its entries a slot has what was there before: here empty fragments.
    refused(&three_fragments(|one| one.bytes = 500), 2048, wrong_sum(2048, 2500));
}

#[test]
fn fragments_of_a_receive_into_host_memory() {
    let (plugin, host) = (Plugin::new(0), vec![7u8; 3000]);
    for mode in GATHERING {
        let mut gather = plugin.gather(mode);
        plugin.tell(2, &three_fragments(|_| ()), 3);
        let error = gather.start(2, host.as_ptr() as u64, 3000, MESSAGE_BYTES).unwrap_err();
        assert_eq!(error, UnpackError::FragmentsForHost { slot: 2, count: 3 }.into());
        assert_eq!(host, [7; 3000]);
    }
}

/// A table that changes after it was checked changes nothing.
#[test]
fn a_second_thought() {
    let plugin = Plugin::new(2);
    for mode in GATHERING {
        let mut gather = plugin.gather(mode);
        let target = Destination::new(&plugin.gpu, MESSAGE_BYTES as usize, 9);
        let (sent, honest) = (message(&mut rng(4), MESSAGE_BYTES as usize), three_fragments(|_| ()));
        plugin.deliver(5, &sent, &honest);
        plugin.gpu.set_stall(true);
        gather.start(5, target.address(), target.len(), MESSAGE_BYTES).unwrap();
        assert!(gather.poll(5).is_pending());
        let lie = Fragment { source: u32::MAX, bytes: u32::MAX, target: 1 << 40 };
        plugin.tell(5, &[lie; 2048], u64::MAX);
        plugin.gpu.set_stall(false);
        assert_eq!(finish(&mut gather, 5), Ok(MESSAGE_BYTES));
        assert!(target.contents() == sent, "{mode}");
    }
}

// ---- the device handle ----

#[track_caller]
fn handle_refused(plugin: &Plugin, handle: &DeviceHandle, expected: UnpackError) {
    assert_eq!(plugin.unpack(handle).unwrap_err(), Error::from(expected));
}

#[test]
fn a_handle_of_another_form() {
    let plugin = Plugin::new(0);
    let good = plugin.handle();
    let pool = plugin.unpack(&good).unwrap().pool();
    assert_eq!((pool.base, pool.bytes), (plugin.pool.address(), POOL_BYTES as u64));
    for (kind, version, size_bytes) in [(0, 7, 24), (2, 7, 24), (1, 8, 24), (1, 0, 24), (1, 7, 0), (1, 7, 32)]
    {
        let handle =
            DeviceHandle { net_device_type: kind, net_device_version: version, size: size_bytes, ..good };
        handle_refused(&plugin, &handle, UnpackError::Form { kind, version, size_bytes });
    }
}

#[test]
fn a_handle_that_the_gpu_cannot_read() {
    let (plugin, host) = (Plugin::new(0), [0u64; 3]);
    for address in [host.as_ptr() as u64, 0, plugin.words.address() + 8] {
        let error =
            plugin.unpack(&DeviceHandle { handle: address as *mut _, ..plugin.handle() }).unwrap_err();
        let Error::Unpack(cause) = &error else { panic!("{error}") };
        assert!(matches!(**cause, UnpackError::Words { address: at, .. } if at == address), "{error}");
    }
}

#[test]
fn a_table_that_the_cpu_cannot_read() {
    let plugin = Plugin::new(0);
    let (heap, short) = (vec![0u64; METADATA_BYTES / 8], MappedBuffer::new(METADATA_BYTES, 1).unwrap());
    let at = |address| {
        plugin.write_words(address, plugin.pool.address());
        plugin.handle()
    };
    for address in [0, heap.as_ptr() as u64, plugin.pool.address(), u64::MAX] {
        handle_refused(&plugin, &at(address), UnpackError::Table { address, readable_bytes: 0 });
    }
    let address = short.address() + 16;
    let readable_bytes = METADATA_BYTES as u64 - 16;
    handle_refused(&plugin, &at(address), UnpackError::Table { address, readable_bytes });
    let roomy = MappedBuffer::new(METADATA_BYTES + 4096, 1).unwrap();
    let address = roomy.address() + 4;
    let readable_bytes = METADATA_BYTES as u64 + 4092;
    handle_refused(&plugin, &at(address), UnpackError::Table { address, readable_bytes });
    assert!(plugin.unpack(&at(roomy.address() + 4096)).is_ok());
}

#[test]
fn a_pool_that_is_not_memory_of_the_gpu() {
    let (plugin, other, gpu) = (Plugin::new(0), Plugin::new(1), MemoryLocation::SimGpu(0));
    let at = |base| {
        plugin.write_words(plugin.table.address(), base);
        plugin.handle()
    };
    for base in [0, plugin.table.address()] {
        handle_refused(&plugin, &at(base), UnpackError::Pool { base, found: None, gpu });
    }
    let base = other.pool.address();
    handle_refused(
        &plugin,
        &at(base),
        UnpackError::Pool { base, found: Some(MemoryLocation::SimGpu(1)), gpu },
    );
}

#[test]
fn a_pool_ends_with_its_allocation() {
    let plugin = Plugin::new(0);
    plugin.write_words(plugin.table.address(), plugin.pool.address() + POOL_BYTES as u64 - 1000);
    let unpack = plugin.unpack(&plugin.handle()).unwrap();
    assert_eq!(unpack.pool().bytes, 1000);
}
