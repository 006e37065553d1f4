//! Loading, `init`, devices, listening, connecting, accepting.

use std::ffi::CStr;
use std::ptr;
use std::time::{Duration, Instant};

use ferrywire_ncclnet::abi::DeviceHandle;

use crate::case::case;
use crate::driver::{Comm, DONE, Handle, OK, Plugin, Ptr, logged};

#[test]
fn the_table_is_v7_with_its_name_before_init() {
    case!("").passes(|| {
        let plugin = Plugin::load();
        // SAFETY: the name is a string.
        let name = unsafe { CStr::from_ptr(plugin.table().name) };
        assert_eq!(name, c"GPUDirectTCPX_v7");
        assert!(plugin.table().reg_mr_dma_buf.is_none());
    });
}

#[test]
fn a_second_init_gives_3() {
    let init_twice = |second| {
        let plugin = Plugin::load();
        assert_eq!((plugin.init(), plugin.init()), (OK, second));
    };
    case!("").passes(|| init_twice(3));
    case!("second_init=ok").passes(|| init_twice(OK));
}

#[test]
fn init_fails_for_what_cannot_work() {
    let fails = || assert_eq!(Plugin::load().init(), 3);
    case!("").with("NCCL_GPUDIRECTTCPX_SOCKET_ENABLE", "0").passes(fails);
    case!("").with("NCCL_GPUDIRECTTCPX_FLOW_STEERING_STRATEGY", "1").passes(fails);
    case!("").with("NCCL_GPUDIRECTTCPX_SOCKET_IFNAME", "nosuchnic").passes(fails);
    case!("").with("NCCL_GPUDIRECTTCPX_SOCKET_FAMILY", "AF_INET6").passes(fails);
    case!("need_gpu=on").passes(fails);
    case!("hed_only=off").passes(|| {
        fails();
        assert_eq!(logged("no switch \"hed_only\""), 1);
    });
}

#[test]
fn properties_are_those_of_an_unpack_device() {
    let properties = || {
        let plugin = Plugin::start();
        assert_eq!(plugin.devices(), 1);
        let properties = plugin.properties(0).unwrap();
        // SAFETY: the name is a string.
        assert_eq!(unsafe { CStr::from_ptr(properties.name) }, c"lo");
        let numbers = (properties.ptr_support, properties.max_recvs, properties.max_comms);
        assert_eq!(numbers, (3, 1, 65536));
        assert_eq!((properties.net_device_type, properties.net_device_version), (1, 7));
        assert_eq!(plugin.properties(1).err(), Some(3));
        properties.pci_path
    };
    case!("").passes(|| {
        // SAFETY: the path is a string.
        let path = unsafe { CStr::from_ptr(properties()) }.to_str().unwrap();
        assert!(path.ends_with("0000:80:00.0"), "{path}");
    });
    case!("pci_path=off").passes(|| assert!(properties().is_null()));
}

#[test]
fn the_first_connect_and_accept_give_null() {
    let first_calls = |null| {
        let plugin = Plugin::start();
        let mut handle = Handle([0; 128]);
        let listen = plugin.listen(0, &mut handle).unwrap();
        if null {
            assert!(plugin.accept(listen, None).unwrap().is_null());
            assert!(plugin.connect(0, &mut handle).unwrap().is_null());
            return;
        }
        let (listen, mut handle) = (listen as usize, handle);
        let other = std::thread::spawn(move || plugin.connect(0, &mut handle).unwrap() as usize);
        assert!(!plugin.accept(listen as _, None).unwrap().is_null());
        assert_ne!(other.join().unwrap(), 0);
    };
    case!("setup_ms=100").passes(|| first_calls(true));
    case!("null_first=off").passes(|| first_calls(false));
}

/// Hosts rely on that: only a later call imports the receive pool, and those they make one at a time.
#[test]
fn the_first_connect_and_accept_give_null_though_the_attempt_has_ended_by_then() {
    case!("setup_ms=0").passes(|| {
        let plugin = Plugin::start();
        // Enough signals that a call is often interrupted between the start of its attempt and its return.
        let set_up = || {
            for _ in 0..20 {
                let mut handle = Handle([0; 128]);
                let listen = plugin.listen(0, &mut handle).unwrap();
                assert!(plugin.connect(0, &mut handle).unwrap().is_null(), "connect");
                assert!(plugin.accept(listen, None).unwrap().is_null(), "accept");
                while plugin.connect(0, &mut handle).unwrap().is_null() {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        };
        std::thread::scope(|scope| (0..64).for_each(|_| drop(scope.spawn(set_up))));
    });
}

#[test]
fn a_handle_uses_88_bytes_and_leaves_the_rest() {
    case!("").with("NCCL_SOCKET_NTHREADS", "2").with("NCCL_NSOCKS_PERTHREAD", "3").passes(|| {
        let plugin = Plugin::start();
        let mut handle = Handle([0xAA; 128]);
        plugin.listen(0, &mut handle).unwrap();
        assert!(handle.0[88..].iter().all(|byte| *byte == 0xAA));
        assert_eq!(handle.0[80..88], [0; 8], "no attempt runs");
        assert_eq!(handle.0[36..44], [6, 0, 0, 0, 2, 0, 0, 0]);
        plugin.connect(0, &mut handle).unwrap();
        assert_ne!(handle.0[80..88], [0; 8], "the attempt's pointer");
    });
}

fn connect_again_after_success() {
    let plugin = Plugin::start();
    let mut handle = Handle([0; 128]);
    let listen = plugin.listen(0, &mut handle).unwrap();
    plugin.accept(listen, None).unwrap();
    while plugin.connect(0, &mut handle).unwrap().is_null() {}
    assert_eq!(plugin.connect(0, &mut handle), Err(3));
}

#[test]
fn one_more_connect_on_a_handle_that_is_done_ends_as_misuse() {
    case!("").ends_as_misuse("connect was called again after its end", connect_again_after_success);
    case!("attempt_once=off").passes(connect_again_after_success);
}

#[test]
fn a_second_accept_on_a_listener_ends_as_misuse() {
    let accept_twice = || {
        let pair = Plugin::start().pair();
        assert_eq!(Plugin::load().accept(pair.listen, None), Err(3));
    };
    case!("").ends_as_misuse("accept was called again after its end", accept_twice);
    case!("attempt_once=off").passes(accept_twice);
}

#[test]
fn closing_a_listener_under_its_accept_thread_ends_as_misuse() {
    case!("").ends_as_misuse("closeListen while its accept thread runs", || {
        let plugin = Plugin::start();
        let listen = plugin.listen(0, &mut Handle([0; 128])).unwrap();
        assert!(plugin.accept(listen, None).unwrap().is_null());
        plugin.close_listen(listen);
    });
    case!("").passes(|| {
        let plugin = Plugin::start();
        let never_accepted = plugin.listen(0, &mut Handle([0; 128])).unwrap();
        plugin.close_listen(never_accepted);
        plugin.close_listen(plugin.pair().listen);
    });
}

#[test]
fn without_a_dp_manager_accept_and_connect_give_3() {
    case!("dp_manager=off").passes(|| {
        let plugin = Plugin::start();
        let mut handle = Handle([0; 128]);
        let listen = plugin.listen(0, &mut handle).unwrap();
        let mut codes = (None, None);
        while codes.0.is_none() || codes.1.is_none() {
            if codes.0.is_none() {
                codes.0 = plugin.accept(listen, None).err();
            }
            if codes.1.is_none() {
                codes.1 = plugin.connect(0, &mut handle).err();
            }
        }
        assert_eq!(codes, (Some(3), Some(3)));
        assert_eq!(
            logged("failed against receive-datapath-manager: unix client connect() error: 2"),
            3,
            "three tries"
        );
    });
}

#[test]
fn the_listener_decides_how_many_data_sockets_there_are() {
    // The listener's handle decides; the connecting end's own settings differ and are overridden.
    case!("").with("NCCL_NSOCKS_PERTHREAD", "1").passes(|| {
        let plugin = Plugin::start();
        let mut handle = Handle([0; 128]);
        plugin.listen(0, &mut handle).unwrap();
        handle.0[36] = 2;
        let peer = crate::wire_peer::Acceptor::listen(&mut handle);
        plugin.connect(0, &mut handle).unwrap();
        let ends = peer.accept(2);
        assert_eq!(ends.data.len(), 2);
        while plugin.connect(0, &mut handle).unwrap().is_null() {}
    });
}

#[test]
fn the_device_handle_is_filled_by_accept() {
    case!("").passes(|| {
        let DeviceHandle { net_device_type, net_device_version, handle, size, needs_proxy_progress, .. } =
            Plugin::start().pair().device_handle;
        assert_eq!((net_device_type, net_device_version, size, needs_proxy_progress), (1, 7, 24, 1));
        // SAFETY: without a GPU the words are in host memory.
        let [metadata, pool, head] = unsafe { handle.cast::<[u64; 3]>().read() };
        assert_eq!((metadata % 4096, pool, head), (0, 0, !0));
    });
}

#[test]
fn without_a_device_handle_the_first_receive_is_a_memory_fault() {
    let receive = || {
        let pair = Plugin::start().pair_with(false);
        let (source, target) = (pair.send.host(*b"hello"), pair.recv.host([0; 5]));
        pair.transfer(&source, &target, 5);
        assert_eq!(target.bytes(), b"hello");
    };
    case!("").dies_by(libc::SIGSEGV, "without a device handle", receive);
    case!("need_device_handle=off").passes(receive);
}

/// Seconds until connect and accept have a comm; time can only prove a lower bound.
fn seconds_to_connect_and_accept() -> (f64, f64) {
    let plugin = Plugin::start();
    let mut handle = Handle([0; 128]);
    let (listen, start) = (plugin.listen(0, &mut handle).unwrap(), Instant::now());
    let (mut connected, mut accepted) = (None, None);
    while connected.is_none() || accepted.is_none() {
        if connected.is_none() && !plugin.connect(0, &mut handle).unwrap().is_null() {
            connected = Some(start.elapsed().as_secs_f64());
        }
        if accepted.is_none() && !plugin.accept(listen, None).unwrap().is_null() {
            accepted = Some(start.elapsed().as_secs_f64());
        }
    }
    (connected.unwrap(), accepted.unwrap())
}

#[test]
fn each_socket_takes_its_time_on_both_ends() {
    case!("setup_ms=100").with("NCCL_NSOCKS_PERTHREAD", "3").passes(|| {
        let (connected, accepted) = seconds_to_connect_and_accept();
        assert!(connected >= 0.4 && accepted >= 0.4, "{connected} {accepted}");
    });
}

#[test]
fn an_accept_sleeps_after_its_rules() {
    let wait = "NCCL_GPUDIRECTTCPX_PROGRAM_FLOW_STEERING_WAIT_MICROS";
    case!("").with(wait, "700000").passes(|| assert!(seconds_to_connect_and_accept().1 >= 0.7));
    case!("").without(wait).passes(|| assert!(seconds_to_connect_and_accept().1 >= 5.0));
}

#[test]
fn the_connecting_end_is_ready_first_and_may_send() {
    case!("").with("NCCL_GPUDIRECTTCPX_PROGRAM_FLOW_STEERING_WAIT_MICROS", "1000000000").passes(|| {
        let plugin = Plugin::start();
        let mut handle = Handle([0; 128]);
        let listen = plugin.listen(0, &mut handle).unwrap();
        let comm = loop {
            assert!(plugin.accept(listen, None).unwrap().is_null(), "it sleeps");
            let comm = plugin.connect(0, &mut handle).unwrap();
            if !comm.is_null() {
                break Comm::new(plugin, comm, true);
            }
        };
        let source = comm.host([1; 8]);
        assert_eq!(comm.finish(comm.isend(&source, 8).unwrap()), DONE);
        assert!(plugin.accept(listen, None).unwrap().is_null());
    });
}

#[test]
fn a_refused_connection_is_tried_again() {
    case!("").passes(|| {
        let plugin = Plugin::start();
        let mut handle = Handle([0; 128]);
        plugin.listen(0, &mut handle).unwrap();
        let closed = crate::wire_peer::Acceptor::listen(&mut handle);
        let addresses = closed.addresses();
        drop(closed);
        assert!(plugin.connect(0, &mut handle).unwrap().is_null());
        // Long enough for a first try; if that comes later, the test proves less and passes.
        std::thread::sleep(Duration::from_millis(100));
        let open = crate::wire_peer::Acceptor::listen_at(addresses);
        open.accept(1);
        while plugin.connect(0, &mut handle).unwrap().is_null() {}
    });
}

#[test]
fn a_foreign_pointer_in_a_handle_ends_as_misuse() {
    case!("").ends_as_misuse("connect with a handle that holds a foreign pointer", || {
        let plugin = Plugin::start();
        let mut handle = Handle([0; 128]);
        plugin.listen(0, &mut handle).unwrap();
        handle.0[80..88].copy_from_slice(&0x1000_u64.to_ne_bytes());
        let _ = plugin.connect(0, &mut handle);
    });
}

#[test]
fn a_handle_of_noise_is_refused() {
    case!("").passes(|| {
        let plugin = Plugin::start();
        let mut handle = Handle([0; 128]);
        assert_eq!(plugin.connect(0, &mut handle), Err(3));
        assert_eq!(plugin.listen(9, &mut handle), Err(3));
    });
}

#[test]
fn a_handle_that_lies_holds_a_pointer() {
    case!("lie_handle=on").ends_as_misuse("connect with a handle that holds a foreign pointer", || {
        Plugin::start().pair();
    });
}

#[test]
fn payload_before_the_steering_wait_is_over_is_fatal_where_that_is_wanted() {
    let wait = "NCCL_GPUDIRECTTCPX_PROGRAM_FLOW_STEERING_WAIT_MICROS";
    let early = || {
        let (plugin, mut handle) = (Plugin::start(), Handle([0; 128]));
        let listen = plugin.listen(0, &mut handle).unwrap();
        let (mut send, mut recv): (Ptr, Ptr) = (ptr::null_mut(), ptr::null_mut());
        let mut device_handle = DeviceHandle::zeroed();
        while send.is_null() {
            recv = plugin.accept(listen, Some(&mut device_handle)).unwrap();
            send = plugin.connect(0, &mut handle).unwrap();
        }
        assert!(recv.is_null(), "the connect ends first");
        let send = Comm::new(plugin, send, true);
        let memory = send.host([1; 8]);
        let request = send.isend(&memory, 8).unwrap();
        while !send.test(request).is_done() {
            std::thread::yield_now();
        }
        while recv.is_null() {
            recv = plugin.accept(listen, Some(&mut device_handle)).unwrap();
            std::thread::yield_now();
        }
    };
    let why = "payload before flow rules were in force";
    case!("early_payload=die").with(wait, "2000000").exits(1, why, early);
    case!("").with(wait, "2000000").passes(early);
}
