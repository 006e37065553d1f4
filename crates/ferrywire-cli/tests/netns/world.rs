//! Two hosts made of network namespaces, with four links between them.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

/// Links between the two hosts.
pub const LINKS: usize = 4;
/// Namespaces of these tests begin with this; the process that made them follows.
const PREFIX: &str = "ferrywire-test-";
/// Longest wait for a link to come up.
const CARRIER_TIMEOUT: Duration = Duration::from_secs(60);

/// One of the two hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Host {
    /// Where `connect` runs: NICs va1 to va4, addresses 10.77.i.1.
    A,
    /// Where `serve` runs: NICs vb1 to vb4, addresses 10.77.i.2.
    B,
}

impl Host {
    /// Name of the NIC on a link, counted from 1.
    pub fn nic(self, link: usize) -> String {
        format!("v{}{link}", self.letter())
    }

    fn letter(self) -> char {
        if self == Host::A { 'a' } else { 'b' }
    }
}

/// Why these tests cannot run here, if they cannot.
pub fn missing() -> Option<String> {
    if fs::metadata("/proc/self").map_or(true, |me| me.uid() != 0) {
        return Some("root, to make network namespaces".to_owned());
    }
    for tool in ["ip", "tc", "ss"] {
        if Command::new(tool).arg("-V").output().is_err() {
            return Some(format!("the command {tool} (iproute2)"));
        }
    }
    sweep();
    let probe = format!("{PREFIX}{}-probe", std::process::id());
    let made = ip(&["netns", "add", &probe]);
    let _ = ip(&["netns", "del", &probe]);
    if !made.status.success() {
        return Some(format!("network namespaces: {}", said(&made)));
    }
    None
}

/// Removes what a killed run of these tests has left.
fn sweep() {
    let listed = ip(&["netns", "list"]);
    for line in String::from_utf8_lossy(&listed.stdout).lines() {
        let name = line.split_whitespace().next().unwrap_or_default();
        let maker = name.strip_prefix(PREFIX).and_then(|rest| rest.split('-').next());
        if maker.is_some_and(|pid| fs::metadata(format!("/proc/{pid}")).is_err()) {
            remove(name);
        }
    }
}

fn remove(namespace: &str) {
    let pids = ip(&["netns", "pids", namespace]);
    for pid in String::from_utf8_lossy(&pids.stdout).split_whitespace() {
        let _ = Command::new("kill").args(["-KILL", pid]).status();
    }
    let _ = ip(&["netns", "del", namespace]);
}

fn ip(args: &[&str]) -> Output {
    Command::new("ip").args(args).output().expect("ip runs")
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).trim().to_owned()
}

/// The two hosts; both are gone when this is dropped.
pub struct World {
    name: String,
}

impl World {
    /// Makes them, each link this fast, and waits until every link is up.
    pub fn new(rate: &str) -> World {
        static MADE: AtomicUsize = AtomicUsize::new(0);
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let world = World { name: format!("{PREFIX}{}-{number}", std::process::id()) };
        world.add(Host::A);
        world.add(Host::B);
        world.connect_hosts(rate);
        world
    }

    fn add(&self, host: Host) {
        self.must("ip", &["netns", "add", &self.namespace(host)]);
        self.must("ip", &["-n", &self.namespace(host), "link", "set", "lo", "up"]);
    }

    fn connect_hosts(&self, rate: &str) {
        let (a, b) = (self.namespace(Host::A), self.namespace(Host::B));
        for link in 1..=LINKS {
            let (near, far) = (Host::A.nic(link), Host::B.nic(link));
            self.must(
                "ip",
                &["link", "add", &near, "netns", &a, "type", "veth", "peer", "name", &far, "netns", &b],
            );
            for (host, last) in [(Host::A, 1), (Host::B, 2)] {
                let (namespace, nic) = (self.namespace(host), host.nic(link));
                self.must(
                    "ip",
                    &["-n", &namespace, "addr", "add", &format!("10.77.{link}.{last}/24"), "dev", &nic],
                );
                self.set_link(host, link, "up");
            }
            self.shape(link, rate);
        }
        for host in [Host::A, Host::B] {
            (1..=LINKS).for_each(|link| self.await_carrier(host, link));
        }
    }

    /// Name of a host's namespace.
    pub fn namespace(&self, host: Host) -> String {
        format!("{}{}", self.name, host.letter())
    }

    /// Makes a link this fast, both ways.
    pub fn shape(&self, link: usize, rate: &str) {
        for host in [Host::A, Host::B] {
            let nic = host.nic(link);
            let shaper = ["tbf", "rate", rate, "burst", "512k", "latency", "20ms"];
            let args = [&["qdisc", "replace", "dev", &nic, "root"], &shaper[..]].concat();
            self.inside(host, "tc", &args);
        }
    }

    /// Makes packets take so long over a link, each way. Says why it cannot be had.
    pub fn delay(&self, link: usize, delay_us: u32) -> Result<(), String> {
        for host in [Host::A, Host::B] {
            let (namespace, nic, delay) = (self.namespace(host), host.nic(link), format!("{delay_us}us"));
            let within = ["netns", "exec", &namespace, "tc", "qdisc", "replace", "dev", &nic, "root"];
            let output = ip(&[&within[..], &["netem", "delay", &delay]].concat());
            if !output.status.success() {
                return Err(said(&output));
            }
        }
        Ok(())
    }

    /// Gives a NIC of host A to host B, under another name.
    pub fn take_over(&self, nic: &str, name: &str) {
        let (a, b) = (self.namespace(Host::A), self.namespace(Host::B));
        self.must("ip", &["-n", &a, "link", "set", nic, "netns", &b, "name", name]);
    }

    /// Gives a NIC an address, and sets it up.
    pub fn address(&self, host: Host, nic: &str, address: &str) {
        let namespace = self.namespace(host);
        self.must("ip", &["-n", &namespace, "addr", "add", address, "dev", nic]);
        self.must("ip", &["-n", &namespace, "link", "set", nic, "up"]);
    }

    /// Sets the largest packet of one end of a link.
    pub fn set_mtu(&self, host: Host, link: usize, bytes: u32) {
        let (namespace, bytes) = (self.namespace(host), bytes.to_string());
        self.must("ip", &["-n", &namespace, "link", "set", &host.nic(link), "mtu", &bytes]);
    }

    /// Sets one end of a link up or down; the other end loses its carrier with it.
    pub fn set_link(&self, host: Host, link: usize, state: &str) {
        self.must("ip", &["-n", &self.namespace(host), "link", "set", &host.nic(link), state]);
    }

    /// Removes a host and all links. Without a name and a link, it lives on while a process is in it.
    pub fn delete(&self, host: Host) {
        for link in 1..=LINKS {
            self.must("ip", &["-n", &self.namespace(host), "link", "del", &host.nic(link)]);
        }
        self.must("ip", &["netns", "del", &self.namespace(host)]);
    }

    /// Whether a host is there and was not deleted.
    pub fn exists(&self, host: Host) -> bool {
        fs::exists(format!("/run/netns/{}", self.namespace(host))).expect("somebody made that directory")
    }

    /// Makes a host that was deleted anew, with all links.
    pub fn restore(&self, host: Host, rate: &str) {
        self.add(host);
        self.connect_hosts(rate);
    }

    /// From now on a host sees no packet that is sent to it. Says why it cannot be had.
    pub fn deafen(&self, host: Host) -> Result<(), String> {
        let rules = "add table inet deaf; \
            add chain inet deaf input { type filter hook input priority 0; policy drop; }";
        let namespace = self.namespace(host);
        let output = Command::new("ip").args(["netns", "exec", &namespace, "nft", rules]).output();
        match output {
            Ok(output) if output.status.success() => Ok(()),
            Ok(output) => Err(said(&output)),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Lets the host receive all packets again.
    pub fn undeafen(&self, host: Host) {
        self.inside(host, "nft", &["delete table inet deaf"]);
    }

    /// Bytes and packets that a NIC has sent, as the kernel counts them.
    pub fn sent(&self, host: Host, link: usize) -> (u64, u64) {
        let shown = self.show(host, link);
        let counter = |name: &str| {
            shown["stats64"]["tx"][name].as_u64().unwrap_or_else(|| panic!("no counter in {shown}"))
        };
        (counter("bytes"), counter("packets"))
    }

    /// Bytes that a NIC has sent.
    pub fn sent_bytes(&self, host: Host, link: usize) -> u64 {
        self.sent(host, link).0
    }

    /// Bytes that a host has sent over all links.
    pub fn sent_bytes_of(&self, host: Host) -> u64 {
        (1..=LINKS).map(|link| self.sent_bytes(host, link)).sum()
    }

    /// Sockets that listen on a host, one per line.
    pub fn listeners(&self, host: Host) -> String {
        self.inside(host, "ss", &["-Hltn"])
    }

    /// Processes on a host, one per line.
    pub fn processes(&self, host: Host) -> String {
        self.must("ip", &["netns", "pids", &self.namespace(host)])
    }

    /// Whether a NIC is up, and the other end of its link too.
    pub fn has_carrier(&self, host: Host, link: usize) -> bool {
        self.show(host, link)["operstate"] == "UP"
    }

    fn await_carrier(&self, host: Host, link: usize) {
        let start = Instant::now();
        while !self.has_carrier(host, link) {
            assert!(start.elapsed() < CARRIER_TIMEOUT, "{} does not come up", host.nic(link));
            thread::sleep(Duration::from_millis(10));
        }
    }

    fn show(&self, host: Host, link: usize) -> Value {
        let args = ["-n", &self.namespace(host), "-j", "-s", "link", "show", "dev", &host.nic(link)];
        let shown = self.must("ip", &args);
        let mut list: Value = serde_json::from_str(&shown).expect("JSON");
        list[0].take()
    }

    /// Runs a tool on a host, which must succeed, and returns its output.
    pub fn inside(&self, host: Host, tool: &str, args: &[&str]) -> String {
        let namespace = self.namespace(host);
        self.must("ip", &[&["netns", "exec", &namespace, tool], args].concat())
    }

    fn must(&self, tool: &str, args: &[&str]) -> String {
        let output = Command::new(tool).args(args).output().expect("it runs");
        assert!(output.status.success(), "{tool} {}: {}", args.join(" "), said(&output));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        [Host::A, Host::B].iter().for_each(|host| remove(&self.namespace(*host)));
    }
}
