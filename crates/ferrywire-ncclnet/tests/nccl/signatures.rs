//! Calls every function of every version through the common interface; `plugin.c` checks the arguments.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::Path;
use std::ptr::without_provenance_mut;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

use ferrywire_ncclnet::abi::{
    NetAttr, NetDirectionAttr, PTR_CUDA, PTR_HOST, PointerType, ResultCode, Version,
};
use ferrywire_ncclnet::{
    Call, CallError, Cause, Comm, CommKind, Library, MemoryHandle, Plugin, Posted, RecvBuffer, RecvComm,
    Request, SendComm,
};

use crate::compile::{alone, compile};

/// Far more than anything here takes.
const LIMIT: Duration = Duration::from_secs(60);
const DEVICE: i32 = 3;
const TAG: c_int = 0x12345670;
const FLUSH_BYTES: usize = 0x7fff_fff1;
const INT_MAX: usize = c_int::MAX as usize;

fn at(address: usize) -> *mut c_void {
    without_provenance_mut(address)
}

fn data(n: usize) -> *mut c_void {
    at(0x70_0000_0000 + 0x1000 * n)
}

fn memory(n: usize) -> MemoryHandle {
    MemoryHandle(at(0x3e30_0000 + n))
}

fn request(n: usize) -> *mut c_void {
    at(0x4e90_0000 + n)
}

/// The calls of one version.
struct Round {
    version: Version,
    plugin: Plugin,
    object: libloading::Library,
}

fn round(version: Version) {
    let path = compile("plugin.c", &[&format!("VERSION={}", version.number())]);
    let round = Round::start(version, &path);
    round.properties();
    let (send, recv) = round.connect();
    round.registration(&send, &recv);
    round.sending(&send);
    round.receiving(&recv);
    round.optional(&recv);
    round.ending(send, recv);
}

/// The number of checks that the plugin made, and the number of those that failed.
fn checks(library: &libloading::Library) -> (c_int, String) {
    // SAFETY: plugin.c defines them with these types.
    unsafe {
        let calls = **library.get::<*const c_int>(b"calls\0").expect("plugin.c has it");
        let failures = *library.get::<*const c_char>(b"failures\0").expect("plugin.c has it");
        (calls, CStr::from_ptr(failures).to_string_lossy().into_owned())
    }
}

impl Round {
    fn start(version: Version, path: &Path) -> Round {
        // SAFETY: plugin.c is part of these tests.
        let library = unsafe { libloading::Library::new(path) }.expect("it loads");
        // SAFETY: as above.
        let opened = unsafe { Library::open(path) }.expect("it opens");
        assert_eq!((opened.versions(), opened.older_versions()), (vec![version], vec![]));
        assert_eq!(opened.nccl_choice(), Some(version).filter(|&version| version >= Version::V6));
        // SAFETY: as above.
        let plugin = unsafe { opened.load(None) }.expect("it starts");
        assert_eq!((plugin.name(), plugin.name_before_init()), ("Test plugin, started", "Test plugin"));
        assert_eq!((plugin.version(), plugin.devices()), (version, 5));
        assert_eq!(plugin.path(), path.to_str().expect("text"));
        Round { version, plugin, object: library }
    }

    fn since(&self, version: Version) -> bool {
        self.version >= version
    }

    /// The plugin saw nothing wrong, and saw something at all since the last time.
    fn checked(&self, before: c_int) -> c_int {
        let (calls, failures) = checks(&self.object);
        assert_eq!(failures, "", "{}", self.version);
        assert!(calls > before, "{}: nothing was checked", self.version);
        calls
    }

    fn properties(&self) {
        let before = checks(&self.object).0;
        for device in [0, DEVICE] {
            let read = self.plugin.properties(device).expect("properties");
            assert_eq!(read.name, format!("nic{device}"));
            assert_eq!(read.pci_path, Some(format!("/sys/devices/pci0000:00/0000:00:{device:02x}.0")));
            assert_eq!(read.guid, 0x1122_3344_5566_7700 + device as u64);
            assert_eq!((read.ptr_support, read.speed_mbps, read.port), (PTR_HOST | PTR_CUDA, 200_001, 17));
            assert!(read.takes(PointerType::Host) && read.takes(PointerType::Cuda));
            assert_eq!(read.max_comms, 65_537);
            let (latency_us, max_recvs) = if self.since(Version::V5) { (2.5, 8) } else { (0.0, 1) };
            assert_eq!((read.latency_us, read.max_recvs), (latency_us, max_recvs));
            let unpack = if self.since(Version::V7) { (1, 7) } else { (0, 0) };
            assert_eq!((read.device_type, read.device_version), unpack);
            assert_eq!((read.unpacks(), read.refused_by_nccl()), (self.since(Version::V7), None));
            assert_eq!(read.reg_is_global, self.since(Version::V8));
            assert_eq!(read.force_flush, self.since(Version::V9));
            let v9 = self.since(Version::V9);
            assert_eq!(read.devices, if v9 { vec![device, 1] } else { vec![device] });
            let bytes = if v9 { (1 << 38, 1 << 39) } else { (1 << 30, 1 << 30) };
            assert_eq!((read.max_p2p_bytes, read.max_coll_bytes), bytes);
            assert_eq!(read.max_multi_request, if self.since(Version::V11) { 21 } else { 1 });
            assert_eq!((read.rail, read.plane), (self.since(Version::V12).then_some(301), None));
        }
        assert_eq!(self.plugin.properties(4).expect("properties").pci_path, None);
        self.checked(before);
    }

    fn connect(&self) -> (SendComm, RecvComm) {
        let before = checks(&self.object).0;
        let (mut listen, handle) = self.plugin.listen(DEVICE).expect("listens");
        assert!(handle.bytes().iter().enumerate().all(|(i, &byte)| byte == (i * 7 + 1) as u8));
        let mut connecting = self.plugin.connect(DEVICE, &handle);
        let (mut send, mut recv) = (None, None);
        for _ in 0..3 {
            assert!(send.is_none() && recv.is_none());
            // Memory that the plugin points to must not move when its owner does.
            let mut elsewhere = Box::new(connecting);
            send = elsewhere.poll().expect("connects");
            connecting = *elsewhere;
            recv = listen.accept().expect("accepts");
            assert_eq!(listen.is_accepting(), recv.is_none());
        }
        let over = connecting.poll().expect_err("one answer per attempt");
        assert!(matches!(over.cause, Cause::Misuse(_)) && over.call == Call::Connect, "{over}");
        let over = listen.accept().expect_err("one answer per listener");
        assert!(matches!(over.cause, Cause::Misuse(_)) && over.call == Call::Accept, "{over}");
        assert_eq!(self.plugin.open_comms(), 3);
        // The plugin has written into the copy of this attempt alone: the handle is good for another one.
        assert!(handle.bytes().iter().enumerate().all(|(i, &byte)| byte == (i * 7 + 1) as u8));
        listen.close().expect("closes");
        let (send, recv) = (send.expect("connected"), recv.expect("accepted"));
        self.device_handles(&send, &recv);
        self.checked(before);
        (send, recv)
    }

    fn device_handles(&self, send: &SendComm, recv: &RecvComm) {
        assert!(send.device_handle().is_none());
        let given = recv.device_handle().map(|given| {
            (
                given.net_device_type,
                given.net_device_version,
                given.handle,
                given.size,
                given.needs_proxy_progress,
            )
        });
        assert_eq!(given, self.since(Version::V7).then(|| (1, 7, at(0xde_c1ce), 24, 1)));
        assert_eq!((send.id().kind, recv.id().kind), (CommKind::Send, CommKind::Recv));
        assert_eq!((send.device(), recv.device()), (DEVICE, DEVICE));
    }

    fn registration(&self, send: &SendComm, recv: &RecvComm) {
        let before = checks(&self.object).0;
        let v8 = self.since(Version::V8);
        let bytes = if v8 { 0x1_2345_6789 } else { 0x7fff_f000 };
        // SAFETY: plugin.c reads the numbers only, as in all calls below.
        unsafe {
            assert_eq!(send.reg_mr(data(0), bytes, PointerType::Host), Ok(memory(0)));
            assert_eq!(recv.reg_mr(data(0), bytes, PointerType::Cuda), Ok(MemoryHandle(at(0))));
            let dma_buf = recv.reg_mr_dma_buf(data(0), 0x2_2345_6789, PointerType::Cuda, 0x33_4455_6677, 77);
            assert_eq!(self.plugin.has_reg_mr_dma_buf(), self.since(Version::V6));
            if self.since(Version::V6) {
                assert_eq!(dma_buf, Ok(memory(1)));
            } else {
                missing(dma_buf.expect_err("not in this version"), Call::RegMrDmaBuf, recv);
            }
            assert_eq!(send.dereg_mr(memory(0)), Ok(()));
            assert_eq!(recv.dereg_mr(memory(1)), Ok(()));
            if !v8 {
                let error = send.reg_mr(data(0), INT_MAX + 1, PointerType::Host).expect_err("too large");
                assert_eq!(error.cause, Cause::TooLarge { bytes: INT_MAX + 1, limit: INT_MAX });
            }
        }
        assert_eq!(self.plugin.registration_bytes_max(), if v8 { usize::MAX } else { INT_MAX });
        self.checked(before);
    }

    fn message_bytes(&self) -> usize {
        if self.since(Version::V9) { 0x1_9876_5432 } else { 0x7fff_fff0 }
    }

    fn sending(&self, send: &SendComm) {
        let before = checks(&self.object).0;
        // SAFETY: as above.
        let isend = |bytes| unsafe { send.isend(data(1), bytes, TAG, memory(0)) };
        let posted = request_of(isend(self.message_bytes()));
        assert_eq!(posted.as_ptr(), request(0));
        assert_eq!(isend(0), Posted::Request(posted));
        assert_eq!(isend(1), Posted::Null);
        let Posted::Refused(full) = isend(2) else { panic!("refused") };
        assert_eq!((full.code(), full.call), (Some(ResultCode::INTERNAL_ERROR), Call::Isend));
        assert_eq!((full.device, full.comm, full.version), (Some(DEVICE), Some(send.id()), self.version));
        assert!(full.to_string().contains("isend on device 3 (nic3), send comm"), "{full}");
        if !self.since(Version::V9) {
            too_large(isend(INT_MAX + 1));
        }
        // SAFETY: as above.
        let tested = unsafe { send.test(posted) };
        assert_eq!((tested.code, tested.done), (ResultCode::SYSTEM_ERROR, true));
        assert_eq!(tested.size(0), None);
        self.checked(before);
    }

    fn buffers(&self, n: usize, bytes: impl Fn(usize) -> usize) -> Vec<RecvBuffer> {
        let buffer =
            |i| RecvBuffer { data: data(i), bytes: bytes(i), tag: TAG + i as i32, memory: memory(i) };
        (0..n).map(buffer).collect()
    }

    fn receiving(&self, recv: &RecvComm) {
        let before = checks(&self.object).0;
        // SAFETY: as above.
        let irecv = |n, first| unsafe { recv.irecv(&self.buffers(n, |i| first - i)) };
        // SAFETY: as above; each request is tested as often as the plugin expects.
        let test = |posted| unsafe { recv.test(request_of(posted)) };
        let one = test(irecv(1, self.message_bytes()));
        assert_eq!((one.code, one.done, one.size(0)), (ResultCode::REMOTE_ERROR, false, None));
        misused(irecv(0, self.message_bytes()));
        misused(irecv(9, self.message_bytes()));
        let group = irecv(8, self.message_bytes());
        if self.since(Version::V5) {
            let tested = test(group);
            assert_eq!((tested.code, tested.done), (ResultCode::SUCCESS, true));
            let sizes: Vec<_> = (0..9).map(|i| tested.size(i)).collect();
            let written = |i: i32| (i != 6 && i < 8).then_some(i * 1000);
            assert_eq!(sizes, (0..9).map(written).collect::<Vec<_>>());
        } else {
            misused(group);
        }
        if !self.since(Version::V9) {
            too_large(irecv(1, INT_MAX + 1));
        }
        self.flushing(recv);
        self.checked(before);
    }

    fn flushing(&self, recv: &RecvComm) {
        // SAFETY: as above.
        let iflush = |n, first| unsafe { recv.iflush(&self.buffers(n, |i| first + i)) };
        let flush = request_of(iflush(1, FLUSH_BYTES));
        // SAFETY: as above.
        let (first, second) = unsafe { (recv.test_without_sizes(flush), recv.test(flush)) };
        assert_eq!((first.done, second.done), (false, true));
        assert_eq!((first.size(0), second.size(0)), (None, None));
        too_large(iflush(1, INT_MAX + 1));
        if self.since(Version::V5) {
            assert_eq!(iflush(8, FLUSH_BYTES), Posted::Null);
        }
    }

    fn optional(&self, recv: &RecvComm) {
        let Round { version, plugin, .. } = self;
        // SAFETY: as above. The receive of eight buffers is done.
        unsafe {
            let device_mr = recv.get_device_mr(memory(1));
            let group = recv.irecv(
                &self.buffers(if self.since(Version::V5) { 8 } else { 1 }, |i| self.message_bytes() - i),
            );
            let consumed = recv.irecv_consumed(8, request_of(group));
            assert_eq!(plugin.has_irecv_consumed(), self.since(Version::V7));
            if self.since(Version::V7) {
                assert_eq!(device_mr.map(|given| given.map(|p| p.as_ptr())), Ok(Some(at(0xde_ad00))));
                assert_eq!(recv.get_device_mr(memory(2)), Ok(None));
                assert_eq!(consumed, Ok(()));
            } else {
                missing(device_mr.expect_err("not in this version"), Call::GetDeviceMr, recv);
                missing(consumed.expect_err("not in this version"), Call::IrecvConsumed, recv);
            }
        }
        let merge: Vec<i32> = (0..if self.since(Version::V12) { 8 } else { 4 }).map(|i| i * 11).collect();
        let made = plugin.make_v_device(&merge);
        if self.since(Version::V9) {
            assert_eq!(made, Ok(42));
            let many = plugin.make_v_device(&[0; 9]).expect_err("too many");
            assert!(matches!(many.cause, Cause::Misuse(_)), "{version}: {many}");
        } else {
            assert_eq!(made.expect_err("not in this version").cause, Cause::Missing);
        }
        self.attributes();
    }

    fn attributes(&self) {
        let direction = |first| NetDirectionAttr {
            max_concurrent_peers: first,
            min_concurrent_peers: first + 1,
            max_flows_per_peer: first + 2,
            min_flows_per_peer: first + 3,
        };
        let attributes = NetAttr { send: direction(1), recv: direction(5), op: 9, algo: 10, proto: 11 };
        let set = self.plugin.set_net_attr(&attributes);
        if self.since(Version::V11) {
            assert_eq!(set, Ok(()));
        } else {
            assert_eq!(set.expect_err("not in this version").cause, Cause::Missing);
        }
    }

    fn ending(self, send: SendComm, recv: RecvComm) {
        let before = checks(&self.object).0;
        if self.since(Version::V11) {
            let busy = self.plugin.clone().finalize().expect_err("connections are open");
            assert!(matches!(busy.cause, Cause::Misuse(_)), "{busy}");
        }
        let id = recv.id();
        assert_eq!(send.close(), Ok(()));
        let error = recv.close().expect_err("plugin.c says so");
        assert_eq!((error.code(), error.comm), (Some(ResultCode::SYSTEM_ERROR), Some(id)));
        assert_eq!(self.plugin.open_comms(), 0);
        let ended = self.plugin.clone().finalize();
        if self.since(Version::V11) {
            assert_eq!(ended, Ok(()));
            let after = self.plugin.listen(DEVICE).expect_err("it was finalized");
            assert!(matches!(after.cause, Cause::Misuse(_)), "{after}");
            let again = self.plugin.clone().finalize().expect_err("only once");
            assert!(matches!(again.cause, Cause::Misuse(_)), "{again}");
        } else {
            assert_eq!(ended.expect_err("not in this version").cause, Cause::Missing);
        }
        self.checked(before);
    }
}

#[test]
fn a_plugin_is_not_ended_while_it_connects() {
    // A library of its own: the other one counts its calls.
    let path = compile("plugin.c", &["VERSION=11", "CONNECTS=1"]);
    let plugin = Round::start(Version::V11, &path).plugin;
    let (listen, handle) = plugin.listen(DEVICE).expect("listens");
    listen.close().expect("closes");
    let mut connecting = plugin.connect(DEVICE, &handle);
    assert_eq!(plugin.open_comms(), 0, "nothing has happened yet");
    assert!(connecting.poll().expect("asked").is_none());
    let busy = plugin.clone().finalize().expect_err("an attempt is under way");
    assert!(matches!(busy.cause, Cause::Misuse(_)), "{busy}");
    let send = (0..2).find_map(|_| connecting.poll().expect("connects")).expect("connected");
    assert_eq!(plugin.open_comms(), 1);
    send.close().expect("closes");
    assert_eq!(plugin.finalize(), Ok(()));
    let after = connecting.poll().expect_err("one answer per attempt");
    assert!(matches!(after.cause, Cause::Misuse(_)), "{after}");
}

/// Regression: the call then went on in a context that had ended.
#[test]
fn a_plugin_is_not_ended_while_a_call_is_under_way() {
    let path = compile("plugin.c", &["VERSION=11", "BLOCKS=1"]);
    // SAFETY: plugin.c is part of these tests.
    let (loaded, object) = unsafe {
        let loaded = Library::open(&path).and_then(|library| library.load(None));
        (loaded, libloading::Library::new(&path).expect("loaded already"))
    };
    // SAFETY: plugin.c has this integer, which is volatile there.
    let may_return = unsafe { AtomicI32::from_ptr(*object.get(b"may_return\0").expect("plugin.c has it")) };
    let plugin = loaded.expect("loads");
    let asks = plugin.clone();
    let asking = std::thread::spawn(move || asks.properties(DEVICE).map(|properties| properties.name));
    let start = Instant::now();
    while plugin.inflight_calls().first().is_none_or(|call| call.call != Call::GetProperties) {
        assert!(start.elapsed() < LIMIT, "the call does not begin");
        std::thread::yield_now();
    }
    let busy = plugin.clone().finalize();
    may_return.store(1, Ordering::SeqCst);
    assert_eq!(asking.join().expect("it returns"), Ok("nic3".to_owned()));
    assert!(matches!(busy, Err(ref error) if matches!(error.cause, Cause::Misuse(_))), "{busy:?}");
    assert_eq!(plugin.finalize(), Ok(()));
}

/// Regression: each start took another of the few ids of a process.
#[test]
fn a_plugin_is_started_and_ended_as_often_as_wanted() {
    alone("signatures::a_plugin_is_started_and_ended_as_often_as_wanted", || {
        let path = compile("plugin.c", &["VERSION=11"]);
        for _ in 0..300 {
            // SAFETY: plugin.c is part of these tests.
            let loaded = unsafe { Library::open(&path).and_then(|library| library.load(None)) };
            assert_eq!(loaded.expect("loads").finalize(), Ok(()));
        }
    });
}

fn request_of(posted: Posted) -> Request {
    match posted {
        Posted::Request(request) => request,
        other => panic!("not posted: {other:?}"),
    }
}

fn missing(error: CallError, call: Call, comm: &Comm) {
    assert_eq!((error.cause, error.call, error.comm), (Cause::Missing, call, Some(comm.id())));
}

fn misused(posted: Posted) {
    let Posted::Refused(error) = posted else { panic!("{posted:?}") };
    assert!(matches!(error.cause, Cause::Misuse(_)), "{error}");
}

fn too_large(posted: Posted) {
    let Posted::Refused(error) = posted else { panic!("{posted:?}") };
    assert_eq!(error.cause, Cause::TooLarge { bytes: INT_MAX + 1, limit: INT_MAX });
}

macro_rules! every_version {
    ($($name:ident $version:ident),+ $(,)?) => {$(
        #[test]
        fn $name() {
            round(Version::$version);
        }
    )+};
}

every_version! {
    every_signature_of_v4 V4,
    every_signature_of_v5 V5,
    every_signature_of_v6 V6,
    every_signature_of_v7 V7,
    every_signature_of_v8 V8,
    every_signature_of_v9 V9,
    every_signature_of_v10 V10,
    every_signature_of_v11 V11,
    every_signature_of_v12 V12,
}
