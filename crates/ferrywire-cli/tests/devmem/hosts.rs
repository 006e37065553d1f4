//! The two hosts of the VM, with their NICs as they are found on most hosts, and the command on them.

use ferrywire_devmem::sys::ethtool::{Ethtool, NTUPLE, Rings, Split};
use ferrywire_devmem::sys::flow::{Flow, Flows};
use ferrywire_devmem::sys::netdev::Netdev;
use ferrywire_sys::nics;
use std::env;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::AsRawFd;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Where the first host, which connects, and the second one, which serves, are reached.
pub const ADDRESSES: [&str; 2] = ["10.9.0.1", "10.9.0.2"];
const PORT: u16 = 7420;
const LIMIT: Duration = Duration::from_secs(100);

/// Whether this is the VM.
pub fn are_here() -> bool {
    let here = env::var_os("PEER_PID").is_some();
    if !here {
        println!("SKIPPED: runs in the VM of tests/devmem-vm, with its option -n");
    }
    here
}

/// Does something on one of the hosts.
pub fn on<T: Send>(host: usize, body: impl FnOnce() -> T + Send) -> T {
    if host == 0 {
        return body();
    }
    let peer = env::var("PEER_PID").expect("in the VM");
    let namespace = File::open(format!("/proc/{peer}/ns/net")).expect("it lives");
    let there = move || {
        // SAFETY: no memory is passed.
        let moved = unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET) };
        assert_eq!(moved, 0, "{}", std::io::Error::last_os_error());
        body()
    };
    thread::scope(|scope| scope.spawn(there).join().expect("it did not panic"))
}

/// A host's NIC.
pub fn nic(host: usize) -> String {
    format!("dm{host}")
}

/// All of a NIC that a run may change, as the kernel reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    pub rings: Rings,
    pub ntuple: bool,
    pub spread: Vec<u32>,
    pub rules: Vec<Option<Flow>>,
    pub bound: Vec<u32>,
}

pub fn seen(host: usize) -> Seen {
    let nic = nic(host);
    on(host, || {
        let (mut ethtool, flows) =
            (Ethtool::open().expect("the family"), Flows::open(&nic).expect("a socket"));
        let index = nics::index(&nic).expect("it is there");
        let queues = Netdev::open().and_then(|mut netdev| netdev.queues(index)).expect("a list");
        let places = flows.rules().expect("a list");
        Seen {
            rings: ethtool.rings(&nic).expect("they are told"),
            ntuple: ethtool.feature(&nic, NTUPLE).expect("it is told").on,
            spread: flows.spread().expect("it is told"),
            rules: places.into_iter().filter_map(|place| flows.rule(place).ok()).collect(),
            bound: queues.iter().filter(|(_, state)| !state.is_free()).map(|(queue, _)| *queue).collect(),
        }
    })
}

/// Waits until a NIC is so.
pub fn until(host: usize, what: &str, so: impl Fn(&Seen) -> bool) {
    let began = Instant::now();
    loop {
        let now = seen(host);
        if so(&now) {
            return;
        }
        assert!(began.elapsed() < LIMIT, "{what}: {now:?}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// Sets a NIC as it is found on most hosts, but for rules, of which there may be some.
pub fn find(host: usize, ntuple: bool) -> Seen {
    let nic = nic(host);
    on(host, || {
        let mut ethtool = Ethtool::open().expect("the family");
        let rings = Rings { split: Some(Split::Off), threshold_bytes: Some(256) };
        ethtool.set_rings(&nic, rings).expect("nothing is bound");
        ethtool.set_feature(&nic, NTUPLE, ntuple).expect("it can");
        let spread: Vec<u32> = (0..64).map(|entry| entry % 4).collect();
        Flows::open(&nic).and_then(|flows| flows.set_spread(&spread)).expect("it can");
    });
    seen(host)
}

/// The command on a host.
pub fn ferrywire(host: usize, args: &str) -> Command {
    let mut command = match host {
        0 => Command::new("/ferrywire"),
        _ => {
            let mut command = Command::new("nsenter");
            command.args(["-t", &env::var("PEER_PID").expect("in the VM"), "-n", "/ferrywire"]);
            command
        }
    };
    command.args(args.split_whitespace()).env("FERRYWIRE_SECRET", "of one virtual machine");
    command
}

/// A run under way.
pub struct Running {
    pub child: Child,
}

impl Running {
    /// The second host serves, until it is stopped.
    pub fn serve(more: &str) -> Running {
        let listen = format!("{}:{PORT}", ADDRESSES[1]);
        let args = format!(
            "bench serve --listen {listen} --transport devmem --memory host --allow-nic-setup {more}"
        );
        let mut child = ferrywire(1, &args).stdout(Stdio::piped()).spawn().expect("it starts");
        let mut said = BufReader::new(child.stdout.take().expect("piped"));
        let listens = said.by_ref().lines().any(|line| line.is_ok_and(|line| line.contains(&listen)));
        assert!(listens, "it does not listen: {:?}", child.wait());
        // Later output is discarded, so that the process does not block on a full pipe.
        thread::spawn(move || std::io::copy(&mut said, &mut std::io::sink()));
        Running { child }
    }

    /// The first host connects.
    pub fn connect(more: &str) -> Running {
        let child = connecting(more).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts");
        Running { child }
    }

    pub fn signal(&self, signal: i32) {
        // SAFETY: it takes two numbers; the child was not waited for yet.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }

    /// Waits for the end of the process; returns its exit status.
    pub fn ended(mut self) -> Option<i32> {
        let began = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("a child") {
                return status.code();
            }
            assert!(began.elapsed() < LIMIT, "it goes on");
            thread::sleep(Duration::from_millis(20));
        }
    }
}

fn connecting(more: &str) -> Command {
    let args = format!(
        "bench connect {}:{PORT} --transport devmem --memory host --peer-memory host --allow-nic-setup {more}",
        ADDRESSES[1]
    );
    ferrywire(0, &args)
}

/// A whole run from the first host.
pub fn connect(more: &str) -> Output {
    connecting(more).output().expect("it starts")
}
