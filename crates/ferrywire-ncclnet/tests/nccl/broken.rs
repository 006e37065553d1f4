//! Defective plugins and files: each defect is reported as its own one-line error.

use std::path::Path;
use std::time::Duration;

use ferrywire_ncclnet::abi::{ResultCode, Version};
use ferrywire_ncclnet::{Call, Cause, Library, LoadError, Plugin, inflight_calls};

use crate::compile::{alone, broken, compile};

fn load(path: &Path, version: Option<Version>) -> Result<Plugin, LoadError> {
    // SAFETY: broken.c is part of this test; every other file is refused before it is loaded.
    unsafe { Library::open(path)?.load(version) }
}

/// Loads a plugin that must not load; returns the error, which is one line.
fn refused(path: &Path) -> (LoadError, String) {
    let error = load(path, None).expect_err("there is something wrong");
    let said = error.to_string();
    assert!(!said.contains('\n') && said.starts_with(path.to_str().expect("text")), "{said:?}");
    (error, said)
}

#[test]
fn a_plugin_with_nothing_wrong_loads() {
    let plugin = load(&broken("NOTHING"), None).expect("loads");
    assert_eq!((plugin.name(), plugin.version(), plugin.devices()), ("Broken plugin", Version::V7, 1));
    let properties = plugin.properties(0).expect("properties");
    assert_eq!((properties.name.as_str(), properties.pci_path), ("nic 0", None));
}

#[test]
fn a_missing_file_is_said() {
    assert!(matches!(refused(Path::new("/nonexistent/x.so")), (LoadError::Missing { .. }, _)));
}

#[test]
fn a_directory_and_a_device_are_no_plugins() {
    for path in ["/", "/dev/zero"] {
        assert!(matches!(refused(Path::new(path)), (LoadError::Unreadable { .. }, _)));
    }
}

#[test]
fn a_text_file_is_no_plugin() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
    assert!(matches!(refused(&path), (LoadError::NotElf { .. }, _)));
}

#[test]
fn this_very_program_is_no_plugin() {
    let (error, said) = refused(&std::env::current_exe().expect("a path"));
    assert!(matches!(error, LoadError::Refused { .. } | LoadError::WrongElf { .. }), "{said}");
}

#[test]
fn a_truncated_library_is_reported_at_every_length() {
    let whole = std::fs::read(broken("NOTHING")).expect("compiled");
    let directory = tempfile::tempdir().expect("a directory");
    for eighths in 1..8 {
        let path = directory.path().join(format!("libcut{eighths}.so"));
        std::fs::write(&path, &whole[..whole.len() * eighths / 8]).expect("written");
        // Bytes behind the last segment may be missing: the loader does not need them.
        match load(&path, None) {
            Err(LoadError::Truncated { file_bytes, needed_bytes, .. }) => assert!(file_bytes < needed_bytes),
            Err(other) => panic!("{eighths}/8: {other}"),
            Ok(_) => assert!(eighths > 6, "{eighths}/8 loads"),
        }
    }
    let path = directory.path().join("libcut.so");
    std::fs::write(&path, &whole[..300]).expect("written");
    assert!(matches!(refused(&path), (LoadError::Truncated { file_bytes: 300, .. }, _)));
}

#[test]
fn a_library_without_tables_is_not_a_plugin() {
    let (error, said) = refused(&broken("NO_TABLE"));
    assert!(matches!(error, LoadError::NoTable { .. }) && said.contains("not an NCCL net plugin"), "{said}");
}

#[test]
fn a_plugin_that_is_too_old_is_reported_with_its_version() {
    let (_, said) = refused(&broken("TOO_OLD"));
    assert!(said.contains("only ncclNetPlugin_v3, which is too old"), "{said}");
}

#[test]
fn an_unresolved_symbol_is_named() {
    let (error, said) = refused(&broken("UNRESOLVED"));
    assert!(matches!(error, LoadError::Refused { .. }));
    assert!(said.contains("undefined symbol: this_symbol_is_nowhere"), "{said}");
    assert_eq!(said.matches("libbroken").count(), 1, "the path once: {said}");
}

#[test]
fn a_null_name_is_said() {
    assert!(matches!(refused(&broken("NULL_NAME")), (LoadError::NullName { version: Version::V7, .. }, _)));
}

#[test]
fn a_missing_function_is_named() {
    let (error, _) = refused(&broken("NO_IRECV"));
    assert!(matches!(error, LoadError::MissingSlot { slot: "irecv", version: Version::V7, .. }));
}

#[test]
fn no_devices_are_said() {
    let (error, _) = refused(&broken("NO_DEVICES"));
    assert!(matches!(error, LoadError::NoDevices { count: 0, .. }));
    let (error, _) = refused(&broken("NEGATIVE_DEVICES"));
    assert!(matches!(error, LoadError::NoDevices { count: -1, .. }));
    let (error, said) = refused(&broken("MANY_DEVICES"));
    assert!(matches!(error, LoadError::Limit { .. }) && said.contains("PLUGIN_DEVICES_MAX"), "{said}");
    let (error, _) = refused(&broken("DEVICES_FAIL"));
    let LoadError::Failed { error, .. } = error else { panic!("{error}") };
    assert_eq!((error.call, error.code()), (Call::Devices, Some(ResultCode::SYSTEM_ERROR)));
}

#[test]
fn a_failed_init_is_not_repeated() {
    let path = broken("INIT_FAILS");
    let (error, said) = refused(&path);
    assert!(said.contains("init: result 3 (internal error)"), "{said}");
    assert!(said.ends_with("last output: no NIC here: 0%"), "{said}");
    assert_eq!(refused(&path).0, error);
    assert_eq!(inits(&path), 1, "init runs once per process");
}

/// The last line that TCPX logs is a trace of the error through its source.
#[test]
fn a_failing_init_is_reported_with_its_last_warning() {
    let (_, said) = refused(&broken("INIT_WARNS_AND_FAILS"));
    assert!(
        said.contains("init: result 3 (internal error); last output: NET/X : no interface found; fix: "),
        "{said}"
    );
    assert!(said.contains("NCCL_GPUDIRECTTCPX_SOCKET_IFNAME"), "{said}");
}

#[test]
fn a_second_load_gives_the_same_plugin() {
    let path = broken("SECOND_LOAD");
    let first = load(&path, None).expect("loads");
    let link = path.with_extension("link.so");
    let _ = std::fs::remove_file(&link);
    std::os::unix::fs::symlink(&path, &link).expect("a link");
    let second = load(&link, Some(Version::V7)).expect("loads");
    assert_eq!((first.path(), inits(&path)), (second.path(), 1));
}

fn inits(path: &Path) -> i32 {
    // SAFETY: broken.c is part of these tests, and has this integer.
    unsafe {
        let library = libloading::Library::new(path).expect("loaded already");
        **library.get::<*const i32>(b"inits\0").expect("broken.c has it")
    }
}

#[test]
fn the_newest_version_is_taken_unless_another_is_asked_for() {
    let path = compile("broken.c", &["CASE_TWO_VERSIONS"]);
    // SAFETY: broken.c is part of these tests.
    let library = unsafe { Library::open(&path) }.expect("opens");
    assert_eq!(library.versions(), [Version::V7, Version::V5]);
    assert_eq!(load(&path, None).expect("loads").version(), Version::V7);
    let older = load(&path, Some(Version::V5)).expect("loads");
    assert_eq!((older.version(), older.name()), (Version::V5, "Broken plugin of v5"));
    let error = load(&path, Some(Version::V9)).expect_err("not exported");
    assert!(error.to_string().ends_with("exports no ncclNetPlugin_v9; it has v7, v5"), "{error}");
}

#[test]
fn properties_of_v6_are_read_through_v4() {
    let plugin = load(&broken("V6_THROUGH_V4"), None).expect("loads");
    let properties = plugin.properties(0).expect("properties");
    assert_eq!(plugin.version(), Version::V4);
    assert_eq!((properties.max_comms, properties.max_recvs, properties.speed_mbps), (65536, 1, 10_000));
}

#[test]
fn a_device_without_a_name_is_an_error_of_that_device() {
    let plugin = load(&broken("NULL_NIC"), None).expect("loads");
    let error = plugin.properties(0).expect_err("no name");
    assert_eq!(error.cause, Cause::BadAnswer("the device has no name"));
}

#[test]
fn a_device_that_nccl_would_refuse_is_reported() {
    let plugin = load(&broken("STRANGE_DEVICE"), None).expect("loads");
    let refused = plugin.properties(0).expect("properties").refused_by_nccl();
    assert_eq!(refused.as_deref(), Some("device nic 0 is of type 3; only 0 and 1 are known"));
}

#[test]
fn a_bad_listener_and_a_failed_connect_are_errors() {
    let plugin = load(&broken("LISTEN_GIVES_NOTHING"), None).expect("loads");
    let error = plugin.listen(0).expect_err("no listener");
    assert_eq!((error.call, error.cause), (Call::Listen, Cause::BadAnswer("gave no listener")));
    let handle = ferrywire_ncclnet::Handle::from_bytes([0; 128]);
    let mut connecting = plugin.connect(0, &handle);
    let failed = connecting.poll().expect_err("it fails");
    assert_eq!((failed.code(), failed.call), (Some(ResultCode::INTERNAL_ERROR), Call::Connect));
    assert!(matches!(connecting.poll().expect_err("it is over").cause, Cause::Misuse(_)));
}

#[test]
fn a_call_that_does_not_return_is_seen_from_outside_and_its_listener_stays_open() {
    let path = broken("ACCEPT_BLOCKS");
    let plugin = load(&path, None).expect("loads");
    let (mut listen, _) = plugin.listen(0).expect("listens");
    let accepting = std::thread::spawn(move || (listen.accept().expect("success"), listen));
    let blocked = loop {
        match plugin.inflight_calls().pop() {
            Some(call) if call.since > Duration::ZERO => break call,
            _ => std::thread::yield_now(),
        }
    };
    assert_eq!(
        (blocked.call, blocked.device, blocked.plugin.as_str()),
        (Call::Accept, Some(0), "Broken plugin")
    );
    assert!(inflight_calls().iter().any(|call| call.thread == blocked.thread));
    // SAFETY: broken.c is part of these tests and has this integer, which is volatile there.
    unsafe {
        let library = libloading::Library::new(&path).expect("loaded already");
        (*library.get::<*mut i32>(b"may_return\0").expect("broken.c has it")).write_volatile(1);
    }
    let (answer, listen) = accepting.join().expect("it returned");
    assert!(answer.is_none() && listen.is_accepting());
    assert_eq!(plugin.inflight_calls(), []);
    let refused = listen.close().expect_err("its accept is unfinished");
    assert!(matches!(refused.cause, Cause::Misuse(_)) && refused.call == Call::CloseListen, "{refused}");
    assert_eq!(plugin.open_comms(), 1);
}

#[test]
fn names_are_resolved_as_nccl_does() {
    alone("broken::names_are_resolved_as_nccl_does", || {
        // SAFETY: the C library, and files of these tests.
        let find = |name: &str| unsafe { Library::find(Some(name)) };
        for none in ["none", "NONE", "", ","] {
            assert_eq!(find(none).expect_err("none is wanted"), LoadError::NoneWanted, "{none}");
        }
        let absent = find("nobody-has-this").expect_err("there is none");
        assert!(matches!(absent, LoadError::NotFound { .. }), "{absent}");
        assert!(absent.to_string().contains("libnccl-net-nobody-has-this.so"), "{absent}");
        let path = broken("NOTHING");
        let found = find(&format!("nobody-has-this,{}", path.display())).expect("the second of the list");
        assert_eq!(found.path(), path.to_str().expect("text"));
        // The loader's search finds this file, which is no plugin; of several errors this one is the most
        // informative.
        let foreign = find("libc.so.6").expect_err("not a plugin");
        assert!(matches!(foreign, LoadError::NoTable { .. }), "{foreign}");
        let text = find(&format!("{}/Cargo.toml", env!("CARGO_MANIFEST_DIR"))).expect_err("text");
        assert!(matches!(text, LoadError::NotElf { .. }), "{text}");
    });
}

#[test]
fn sigpipe_is_ignored_before_a_plugin_runs() {
    alone("broken::sigpipe_is_ignored_before_a_plugin_runs", || {
        // SAFETY: the default disposition is a valid one.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
        load(&broken("NOTHING"), None).expect("loads");
        // SAFETY: as above.
        let before = unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
        assert_eq!(before, libc::SIG_IGN);
    });
}
