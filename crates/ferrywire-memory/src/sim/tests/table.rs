use super::*;

fn table() -> &'static SimGpuTable {
    SimGpuTable::find().expect("published when the first GPU is opened")
}

#[test]
fn the_table_is_found_through_the_environment_and_reaches_the_same_gpus() {
    let gpu = SimGpu::open(0).unwrap();
    let table = table();
    let buffer = gpu.alloc(10_000, 4096).unwrap();
    let (mut base, mut len) = (0, 0);
    // SAFETY: both pointers are to numbers of this test.
    assert_eq!(unsafe { (table.device_of)(buffer.address() + 5, &mut base, &mut len) }, 0);
    assert_eq!((base, len), (buffer.address(), 10_000));
    // SAFETY: null is allowed.
    assert_eq!(unsafe { (table.device_of)(1, std::ptr::null_mut(), std::ptr::null_mut()) }, -1);
    let view = (table.dma_view)(buffer.address() + 9_999, 1);
    // SAFETY: one byte of a live buffer that no stream uses.
    unsafe { view.write(42) };
    assert_eq!(gpu.read_to_vec(buffer.address() + 9_998, 2).unwrap(), [0, 42]);
    assert!((table.dma_view)(buffer.address() + 9_999, 2).is_null());
    assert_eq!((table.free)(buffer.address()), -1, "it belongs to the program");
}

#[test]
fn the_table_copies_through_the_engine() {
    let _gpu = SimGpu::open(1).unwrap();
    let (table, source, mut target) = (table(), pattern(5000, 3), vec![0; 5000]);
    let address = (table.alloc)(1, 5000, 8192);
    assert_eq!(SimGpu::of(address), Some((1, address, 5000)));
    assert_eq!(address % 8192, 0);
    // SAFETY: both are buffers of 5000 bytes that outlive the calls; longer copies are rejected.
    unsafe {
        assert_eq!((table.copy_from_host)(address, source.as_ptr(), 5000), 0);
        assert_eq!((table.copy_to_host)(target.as_mut_ptr(), address, 5000), 0);
        assert_eq!((table.copy_to_host)(target.as_mut_ptr(), address, 5001), -1);
    }
    assert_eq!(target, source);
    assert_eq!((table.mapped_free)(address as *mut u8), -1);
    assert_eq!((table.free)(address + 1), -1);
    assert_eq!((table.free)(address), 0);
    assert_eq!((table.free)(address), -1);
    // SAFETY: rejected, since no memory is at the address.
    assert_eq!(unsafe { (table.copy_from_host)(address, source.as_ptr(), 1) }, -1);
    assert_eq!((table.alloc)(15, 10, 4096), 0, "GPU 15 is not open");
    assert_eq!((table.alloc)(-1, 10, 4096), 0);
}

#[test]
fn the_table_maps_host_memory() {
    let gpu = SimGpu::open(0).unwrap();
    let table = table();
    let pointer = (table.mapped_alloc)(4096, 4096);
    // SAFETY: 4096 bytes, ours until they are freed.
    unsafe { pointer.write_bytes(6, 4096) };
    assert_eq!(gpu.read_to_vec(pointer as u64, 4096).unwrap(), [6; 4096]);
    assert_eq!((table.dma_view)(pointer as u64 + 1, 4095), pointer.wrapping_add(1));
    assert_eq!((table.free)(pointer as u64), -1);
    assert_eq!((table.mapped_free)(pointer), 0);
    assert_eq!((table.mapped_free)(pointer), -1);
}

#[test]
fn the_table_knows_the_current_gpu_of_the_calling_thread() {
    let _gpu = SimGpu::open(1).unwrap();
    std::thread::spawn(|| {
        let table = table();
        assert_eq!((table.current_device)(), -1);
        assert_eq!((table.set_current_device)(1), 0);
        assert_eq!((table.current_device)(), 1);
        assert_eq!(current(), Some(1));
        assert_eq!((table.set_current_device)(15), -1);
        assert_eq!((table.set_current_device)(-1), -1);
        assert_eq!((table.current_device)(), 1);
    })
    .join()
    .unwrap();
}

#[test]
fn a_table_of_another_process_is_not_followed() {
    if child_task().is_some() {
        assert!(SimGpuTable::find().is_none());
        let _gpu = SimGpu::open(0).unwrap();
        assert_eq!((SimGpuTable::find().unwrap().current_device)(), -1);
        return;
    }
    let _gpu = SimGpu::open(0).unwrap();
    let inherited = std::env::var(TABLE_VARIABLE).unwrap();
    let test = "table::a_table_of_another_process_is_not_followed";
    for text in [inherited.as_str(), "", "nonsense", "1:2", "1:0x10:1:7"] {
        let output = run_child(test, "find", &[(TABLE_VARIABLE, text)]);
        assert_passed(&output);
    }
}

#[test]
fn the_variable_names_process_address_and_version() {
    let read = |text: &str| crate::sim::table::parse(text, 12);
    assert_eq!((read("12:0x10:1"), read("12:ff0:1")), (Some(0x10), Some(0xff0)));
    for wrong in ["13:0x10:1", "12:0x10:2", "12:0x10:1:", "12:0xg:1", "12:0x10", "::", ""] {
        assert_eq!(read(wrong), None, "{wrong}");
    }
}

#[test]
fn an_address_from_before_exec_is_not_followed() {
    if let Some(task) = child_task() {
        let pid = std::process::id();
        match task.as_str() {
            // Another program runs under this process id, where the variable's address is not valid.
            "exec" => {
                use std::os::unix::process::CommandExt;
                let text = format!("{pid}:0x1000:{TABLE_VERSION}");
                let arguments: Vec<String> = std::env::args().skip(1).collect();
                let error = Command::new(std::env::current_exe().unwrap())
                    .args(arguments)
                    .env(CHILD, "find")
                    .env(TABLE_VARIABLE, text)
                    .exec();
                panic!("{error}");
            }
            _ => {
                assert!(std::env::var(TABLE_VARIABLE).unwrap().starts_with(&format!("{pid}:0x1000:")));
                assert!(SimGpuTable::find().is_none());
                let not_a_table = [0x5349_4d47u64; 32];
                let text = format!("{pid}:{:#x}:{TABLE_VERSION}", &raw const not_a_table as usize);
                // SAFETY: the only test of this process, and no other thread reads the environment.
                unsafe { std::env::set_var(TABLE_VARIABLE, text) };
                assert!(SimGpuTable::find().is_none());
                let _gpu = SimGpu::open(0).unwrap();
                assert!(SimGpuTable::find().is_some());
            }
        }
        return;
    }
    let output = run_child("table::an_address_from_before_exec_is_not_followed", "exec", &[]);
    assert_passed(&output);
}
