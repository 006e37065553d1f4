//! Claims on a NIC of the VM: their changes exist, work, and are undone afterwards.
//!
//! Everything is compared with the kernel's reports, not with the claim's own state.
//! Read next: `nic/kills.rs`.

mod kills;

use crate::vm::{self, KIB, Knob, MIB, NEAR, Pool};
use ferrywire_devmem::nic::{Claim, CleanUp, NicError, Wish, clean_up_in, possible};
use ferrywire_devmem::sys::devmem::{self, Control};
use ferrywire_devmem::sys::ethtool::{Ethtool, NTUPLE, Rings, Split};
use ferrywire_devmem::sys::flow::{Flow, Flows};
use ferrywire_devmem::sys::netdev::Netdev;
use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;

const ALLOWED: Wish = Wish { queues: 2, allow_nic_setup: true };
const LIMIT: Duration = Duration::from_secs(100);

/// The NIC's settings that a claim may change.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Seen {
    rings: Rings,
    /// Whether header split was requested, which the kernel reports in no other way.
    asked: bool,
    ntuple: bool,
    spread: Vec<u32>,
    rules: Vec<(u32, Option<Flow>)>,
    bound: Vec<u32>,
}

fn seen() -> Seen {
    let mut ethtool = Ethtool::open().expect("the family");
    let flows = Flows::open(NEAR).expect("a socket");
    let rules = flows.rules().expect("a list");
    let queues = Netdev::open().and_then(|mut netdev| netdev.queues(vm::index(NEAR))).expect("a list");
    let bound: Vec<u32> =
        queues.iter().filter(|(_, state)| !state.is_free()).map(|(queue, _)| *queue).collect();
    Seen {
        rings: ethtool.rings(NEAR).expect("they are told"),
        // With memory bound it must have been requested.
        asked: !bound.is_empty() || is_asked_for(),
        ntuple: ethtool.feature(NEAR, NTUPLE).expect("it is told").on,
        spread: flows.spread().expect("it is told"),
        rules: rules.into_iter().map(|place| (place, flows.rule(place).expect("it is there"))).collect(),
        bound,
    }
}

/// Whether the kernel lets memory be bound.
fn is_asked_for() -> bool {
    let pool = Pool::new(MIB);
    let mut netdev = Netdev::open().expect("the family");
    netdev.bind_rx(vm::index(NEAR), &[1], pool.dmabuf.as_fd()).is_ok()
}

/// The NIC in the default state of most hosts until this is dropped, then in the state that the VM's other tests
/// expect.
struct Found {
    journal: TempDir,
}

impl Found {
    fn new(split: Split, threshold_bytes: u32, ntuple: bool) -> Found {
        set(split, threshold_bytes, ntuple, &(0..64).map(|entry| entry % 4).collect::<Vec<u32>>());
        Found { journal: tempfile::tempdir_in(".").expect("a directory") }
    }

    fn claim(&self, wish: Wish) -> Result<Claim, NicError> {
        Claim::in_directory(self.journal.path(), NEAR, &wish)
    }
}

impl Drop for Found {
    fn drop(&mut self) {
        let flows = Flows::open(NEAR).expect("a socket");
        flows
            .rules()
            .expect("a list")
            .into_iter()
            .for_each(|place| flows.delete(place).expect("it is there"));
        set(Split::Auto, 0, true, &[0; 64]);
    }
}

fn set(split: Split, threshold_bytes: u32, ntuple: bool, spread: &[u32]) {
    let mut ethtool = Ethtool::open().expect("the family");
    let rings = Rings { split: Some(split), threshold_bytes: Some(threshold_bytes) };
    ethtool.set_rings(NEAR, rings).expect("nothing is bound");
    ethtool.set_feature(NEAR, NTUPLE, ntuple).expect("it can");
    Flows::open(NEAR).and_then(|flows| flows.set_spread(spread)).expect("it can");
}

fn end(text: &str) -> SocketAddr {
    text.parse().expect("an address")
}

/// Adds a rule of another program.
fn foreign() -> u32 {
    let flow = Flow::new(end("10.9.0.1:22"), end("10.9.0.2:5555"), 1).expect("one kind");
    Flows::open(NEAR).and_then(|flows| flows.insert(&flow)).expect("room")
}

#[test]
fn settings_come_and_go_with_a_claim() {
    if !vm::is_here() {
        return;
    }
    for (split, threshold_bytes, ntuple) in
        [(Split::Off, 256, false), (Split::Auto, 0, true), (Split::On, 7, false)]
    {
        let found = Found::new(split, threshold_bytes, ntuple);
        let before = seen();
        let pool = Pool::new(4 * MIB);
        let mut claim = found.claim(ALLOWED).expect("allowed");
        claim.bind(pool.dmabuf.as_fd()).expect("it is set up");
        let rule = claim.steer(end("10.9.0.1:7420"), end("10.9.0.2:40000")).expect("room");
        claim.steer(end("[fd00::1]:7420"), end("[fd00::2]:40000")).expect("room");
        let during = seen();
        assert_eq!(
            (during.rings, during.ntuple),
            (Rings { split: Some(Split::On), threshold_bytes: Some(0) }, true)
        );
        assert_eq!((&during.bound[..], claim.queues(), during.rules.len()), (&[2, 3][..], &[2, 3][..], 2));
        assert!(during.spread.iter().all(|queue| *queue < 2), "{:?}", during.spread);
        claim.unsteer(rule);
        assert_eq!(seen().rules.len(), 1);
        drop(claim);
        // Before binding, a split that was requested with a threshold looks like one that the driver does by itself.
        assert_eq!(seen(), before, "{split:?}");
    }
}

#[test]
fn without_permission_nothing_changes_and_the_commands_are_printed() {
    if !vm::is_here() {
        return;
    }
    let found = Found::new(Split::Off, 256, false);
    let before = seen();
    let error = found.claim(Wish { allow_nic_setup: false, ..ALLOWED }).expect_err("not allowed");
    println!("{error}");
    for command in [
        "ethtool -G dm0 tcp-data-split on hds-thresh 0",
        "ethtool -K dm0 ntuple on",
        "ethtool -X dm0 equal 2",
    ] {
        assert!(error.to_string().contains(command), "{error}");
    }
    let can = possible(NEAR);
    assert_eq!(
        (can.receives, can.sends, can.free_queues, can.missing.len()),
        (Some(true), Some(true), 3, 3),
        "{can:?}"
    );
    assert!(can.is_possible() && !possible("lo").is_possible());
    assert_eq!(seen(), before);
    // By hand, as the message says.
    set(Split::On, 0, true, &[0, 1].repeat(32));
    let pool = Pool::new(4 * MIB);
    let mut claim = found.claim(Wish { allow_nic_setup: false, ..ALLOWED }).expect("nothing is missing");
    claim.bind(pool.dmabuf.as_fd()).expect("it is set up");
}

#[test]
fn a_steered_connection_brings_device_memory_and_others_do_not() {
    if !vm::is_here() {
        return;
    }
    let found = Found::new(Split::Off, 256, false);
    add_ipv6();
    for fixed_places in [0, 1] {
        let _knob = Knob::set("fixed_places", fixed_places);
        let pool = Pool::new(8 * MIB);
        let mut claim = found.claim(ALLOWED).expect("allowed");
        let binding = claim.bind(pool.dmabuf.as_fd()).expect("it is set up");
        for address in ["10.9.0.1:0", "[fd09::1]:0", "[::]:0"] {
            let (near, far) = connection(end(address));
            let (local, remote) = (near.local_addr().expect("near"), near.peer_addr().expect("far"));
            assert_eq!(pool_bytes(&near, &far, binding), 0, "not steered yet");
            let rule = claim.steer(local, remote).expect("room");
            assert_eq!(pool_bytes(&near, &far, binding), 64 * KIB, "{local} from {remote} by {rule:?}");
            // Another connection to this port must not be affected.
            let (other_near, other_far) = connection(local);
            assert_eq!(pool_bytes(&other_near, &other_far, binding), 0, "another connection");
            claim.unsteer(rule);
            assert_eq!(pool_bytes(&near, &far, binding), 0, "not any more");
        }
        assert_eq!(seen().rules, []);
    }
}

/// Adds an IPv6 address to each NIC.
fn add_ipv6() {
    let run =
        |line: &str| Command::new("sh").args(["-c", line]).status().is_ok_and(|status| status.success());
    // The address may be left from an earlier run of the test.
    run("ip -6 addr add fd09::1/64 dev dm0");
    run("nsenter -t $PEER_PID -n ip -6 addr add fd09::2/64 dev dm1");
    // Until duplicate detection has finished, connections would use another source address and fail.
    wait_for_address("[fd09::1]:0", TcpListener::bind);
    wait_for_address("[fd09::2]:0", |address| vm::at_peer(|| TcpListener::bind(address)));
}

/// Waits until an address can be used.
fn wait_for_address(address: &str, bind: impl Fn(SocketAddr) -> std::io::Result<TcpListener>) {
    let until = Instant::now() + LIMIT;
    while let Err(error) = bind(end(address)) {
        assert!(Instant::now() < until, "{address}: {error}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// A connection from the far NIC to an address of the near one.
fn connection(to: SocketAddr) -> (TcpStream, TcpStream) {
    let until = Instant::now() + LIMIT;
    let again = |what: &str, error: std::io::Error| {
        assert!(Instant::now() < until, "{what}: {error}");
        thread::sleep(Duration::from_millis(50));
    };
    loop {
        let listener = match listen(to) {
            Ok(listener) => listener,
            Err(error) => {
                again("listen", error);
                continue;
            }
        };
        let mut address = listener.local_addr().expect("an address");
        if address.ip().is_unspecified() {
            address.set_ip([10, 9, 0, 1].into());
        }
        match vm::at_peer(|| TcpStream::connect_timeout(&address, LIMIT / 10)) {
            Ok(far) => return (listener.accept().expect("the near end").0, far),
            Err(error) => again("connect", error),
        }
    }
}

/// Listens on an address, also on a port that was used before.
fn listen(to: SocketAddr) -> std::io::Result<TcpListener> {
    TcpListener::bind(SocketAddr::new(to.ip().to_canonical(), to.port()))
}

/// Sends and receives 64 KiB; returns how many of them arrived as device memory.
fn pool_bytes(near: &TcpStream, far: &TcpStream, binding: u32) -> usize {
    let bytes = 64 * KIB;
    thread::scope(|scope| {
        scope.spawn(|| (&mut &*far).write_all(&vec![7; bytes]).expect("sent"));
        let mut control = Control::new(256);
        let mut tokens = devmem::Tokens::new();
        let (mut buffer, mut all, mut pool) = (vec![0; bytes], 0, 0);
        while all < bytes {
            let fd = near.as_raw_fd();
            // SAFETY: the buffer has as many bytes.
            let call = || unsafe { devmem::receive(fd, buffer.as_mut_ptr(), bytes - all, &mut control) };
            all += vm::eventually(fd, libc::POLLIN, call).expect("it is received").bytes;
            for fragment in control.fragments() {
                if let devmem::Fragment::Pool { dmabuf, bytes, token, .. } = fragment {
                    assert_eq!(dmabuf, binding);
                    pool += bytes as usize;
                    tokens.push(token);
                }
            }
        }
        tokens.release(near.as_raw_fd()).expect("they go back");
        pool
    })
}

#[test]
fn a_nic_without_support_reports_the_reason() {
    if !vm::is_here() {
        return;
    }
    let journal = tempfile::tempdir_in(".").expect("a directory");
    let error = Claim::in_directory(journal.path(), "lo", &ALLOWED).expect_err("loopback cannot");
    assert!(error.to_string().contains("cannot receive into device memory"), "{error}");
    let can = possible("lo");
    assert_eq!(
        (can.receives, can.sends, can.unsupported_reason),
        (Some(false), Some(false), vec![error.to_string()])
    );
    assert_eq!(clean_up_in(Path::new("no/such/directory")), CleanUp::default());
}
