//! The real world: sockets over loopback, threads as by default, and calls that wait; payload over TCP, over the
//! simulated plugin, or in the VM of `tests/devmem-vm` over devmem TCP.

use crate::netns::Hosts;
use crate::vm;
use crate::world::{Gpus, World};
use ferrywire::{Builder, Encryption, Endpoint, Peer, PluginConfig, Result, Transfer, TransferError};
use ferrywire_net::tcp::{TcpTransport, ZeroCopyPolicy};
use rand::SeedableRng;
use rand::rngs::StdRng;
use std::collections::VecDeque;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

/// Longest any single wait may be without progress, however busy the machine is.
const LIMIT: Duration = Duration::from_secs(60);

pub struct TcpWorld {
    rng: StdRng,
    endpoints: Vec<Endpoint>,
    carrier: Carrier,
    gpus: Gpus,
}

/// The transport of payload.
#[derive(Clone)]
enum Carrier {
    Tcp(Encryption),
    Plugin(PluginConfig),
    Devmem(vm::Hosts),
    /// TCP between two network namespaces, by sockets that never copy large payload.
    Hosts(Arc<Hosts>),
}

impl Carrier {
    /// Runs something where an endpoint is: the first is alone on its host.
    fn on<T: Send>(&self, index: usize, body: impl FnOnce() -> T + Send) -> T {
        match self {
            Carrier::Devmem(hosts) => hosts.on(index, body),
            Carrier::Hosts(hosts) => hosts.on(index.min(1), body),
            Carrier::Tcp(_) | Carrier::Plugin(_) => body(),
        }
    }
}

/// Runs a scenario in clear and encrypted.
pub fn run(scenario: impl Fn(&mut TcpWorld)) {
    for encryption in [Encryption::Off, Encryption::Required] {
        run_with(Carrier::Tcp(encryption), Gpus::default(), &scenario);
    }
}

/// Runs a scenario with memory on GPUs at one end, at the other, and at both; the last encrypted.
pub fn run_on_gpus(scenario: impl Fn(&mut TcpWorld)) {
    let clear = Gpus::MIXES.map(|gpus| (gpus, Encryption::Off));
    let encrypted = (Gpus { even: true, odd: true }, Encryption::Required);
    for (gpus, encryption) in clear.into_iter().chain([encrypted]) {
        let _open = gpus.open();
        run_with(Carrier::Tcp(encryption), gpus, &scenario);
    }
}

/// Runs a scenario between two hosts without copies, with memory of hosts, and of GPUs at both ends.
pub fn run_between_hosts(scenario: impl Fn(&mut TcpWorld)) {
    for gpus in [Gpus::default(), Gpus { even: true, odd: true }] {
        let _open = gpus.open();
        let Some(hosts) = Hosts::new() else { return };
        run_with(Carrier::Hosts(Arc::new(hosts)), gpus, &scenario);
    }
}

/// Runs a scenario once, with payload over the plugin that was built with these tests. In a process of its
/// own: a plugin may end it, and reads its environment once.
pub fn run_over_plugin(scenario: impl Fn(&mut TcpWorld)) {
    let library = std::env::current_exe().unwrap().with_file_name("libferrywire_tcpx_sim.so");
    // SAFETY: the file was built with these tests, and no other thread reads the environment.
    run_with(Carrier::Plugin(unsafe { PluginConfig::at(library) }), Gpus::default(), scenario);
}

/// Runs a scenario with payload over devmem TCP, between two hosts with a NIC each that can do it.
pub fn run_over_devmem(scenario: impl Fn(&mut TcpWorld)) {
    if let Some(hosts) = vm::Hosts::here() {
        run_with(Carrier::Devmem(hosts), Gpus::default(), scenario);
    }
}

/// Runs a scenario over devmem with memory on GPUs.
pub fn run_over_devmem_on_gpus(scenario: impl Fn(&mut TcpWorld)) {
    let Some(hosts) = vm::Hosts::here() else { return };
    for gpus in Gpus::MIXES {
        let _open = gpus.open();
        run_with(Carrier::Devmem(hosts.clone()), gpus, &scenario);
    }
}

fn run_with(carrier: Carrier, gpus: Gpus, scenario: impl Fn(&mut TcpWorld)) {
    let mut world = TcpWorld { rng: StdRng::seed_from_u64(0), endpoints: Vec::new(), carrier, gpus };
    scenario(&mut world);
}

impl World for TcpWorld {
    fn add(&mut self, _nics: usize, adapt: impl FnOnce(Builder) -> Builder) -> usize {
        let builder = Endpoint::builder().listen(SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 0)).channels(3);
        let index = self.endpoints.len();
        let gpu = self.gpus.of(index);
        let endpoint = match self.carrier.clone() {
            Carrier::Tcp(encryption) => adapt(builder.encryption(encryption)).build(),
            Carrier::Plugin(plugin) => adapt(builder.plugin(plugin)).build(),
            Carrier::Devmem(hosts) => {
                let builder = adapt(hosts.builder(index, gpu));
                hosts.on(index, || builder.build())
            }
            Carrier::Hosts(_) => {
                let tcp = TcpTransport::default().zero_copy(ZeroCopyPolicy::Always);
                let address = SocketAddr::new(Hosts::ADDRESSES[index.min(1)].into(), 0);
                let builder = builder.transport(Arc::new(tcp)).secret("correct horse").listen(address);
                let builder = adapt(builder);
                self.carrier.on(index, || builder.build())
            }
        };
        self.endpoints.push(endpoint.unwrap());
        index
    }

    fn end(&self, index: usize) -> Endpoint {
        self.endpoints[index].clone()
    }

    fn connect_at(&mut self, from: usize, to: usize, address: SocketAddr) -> (Peer, Peer) {
        let near = self.carrier.on(from, || self.endpoints[from].connect(address, LIMIT)).unwrap();
        let far = self.endpoints[to].accept(LIMIT).unwrap();
        (near, far)
    }

    fn address(&self, index: usize) -> SocketAddr {
        self.endpoints[index].listen_addresses()[0]
    }

    fn until<T>(&mut self, what: &str, mut poll: impl FnMut() -> Option<T>) -> T {
        let start = Instant::now();
        loop {
            if let Some(value) = poll() {
                return value;
            }
            assert!(start.elapsed() < LIMIT, "waited {LIMIT:?} for {what}");
            thread::sleep(Duration::from_micros(200));
        }
    }

    fn outcome(&mut self, transfer: &Transfer) -> Result<u64, TransferError> {
        patiently(|limit| transfer.wait(limit))
    }

    fn notification(&mut self, peer: &Peer) -> Result<Vec<u8>, TransferError> {
        patiently(|limit| peer.wait_notification(limit))
    }

    fn blocking<T: Send>(&mut self, call: impl FnOnce() -> T + Send) -> T {
        call()
    }

    fn linger(&mut self) {
        thread::sleep(Duration::from_millis(20));
    }

    fn rng(&mut self) -> &mut StdRng {
        &mut self.rng
    }

    fn sends_eagerly(&self, index: usize) -> bool {
        matches!(self.carrier, Carrier::Tcp(_) | Carrier::Hosts(_)) || self.gpus.of(index).is_none()
    }

    fn peers_max(&self) -> usize {
        match self.carrier {
            // Each has a queue of the NIC to itself, which has four.
            Carrier::Devmem(_) => 3,
            _ => 5,
        }
    }

    fn gpus(&self) -> Gpus {
        self.gpus
    }

    fn bytes_max(&self) -> usize {
        16 << 20
    }

    fn chunk_bytes(&self) -> usize {
        1 << 20
    }
}

/// Waits up to [`LIMIT`] in many short waits, so that a stop of this process counts as one of them.
fn patiently<T>(mut wait: impl FnMut(Duration) -> Result<T, TransferError>) -> Result<T, TransferError> {
    const WAITS: u32 = 60;
    for _ in 1..WAITS {
        match wait(LIMIT / WAITS) {
            Err(TransferError::Stalled { .. }) => {}
            result => return result,
        }
    }
    wait(LIMIT / WAITS)
}

/// Each thread is asked to stop at another moment of its idling, and has to see it in every one.
#[test]
fn endpoints_close_at_whatever_moment() {
    for round in 0..1000 {
        let accepting = Endpoint::builder().listen(SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 0));
        let accepting = accepting.channels(1).build().unwrap();
        let connecting = Endpoint::builder().channels(1).build().unwrap();
        let near = connecting.connect(accepting.listen_addresses()[0], LIMIT).unwrap();
        let far = accepting.accept(LIMIT).unwrap();
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_micros(round % 200) {
            std::hint::spin_loop();
        }
        near.close(LIMIT).unwrap();
        connecting.close(LIMIT).unwrap();
        accepting.close(LIMIT).unwrap();
        drop(far);
    }
}

#[test]
fn callers_that_go_on_posting_do_not_keep_a_peer_from_closing() {
    let accepting = Endpoint::builder().listen(SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 0));
    let accepting = accepting.build().unwrap();
    let connecting = Endpoint::builder().build().unwrap();
    let near = connecting.connect(accepting.listen_addresses()[0], LIMIT).unwrap();
    let _far = accepting.accept(LIMIT).unwrap();
    let (source, target) = (connecting.alloc_host(4096).unwrap(), accepting.alloc_host(4096).unwrap());
    let posting = Barrier::new(5);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                posting.wait();
                // Never without something under way, so that the peer is never quiet.
                let mut under_way = VecDeque::new();
                let refusal = loop {
                    match near.write(&source, 0, &target.descriptor(), 0, 4096) {
                        Ok(transfer) => under_way.push_back(transfer),
                        Err(error) => break error,
                    }
                    if under_way.len() == 8 {
                        under_way.pop_front().unwrap().wait(LIMIT).unwrap();
                    }
                };
                assert_eq!(refusal, TransferError::Closed);
                // Transfers posted before the close finish.
                under_way.into_iter().for_each(|transfer| assert_eq!(transfer.wait(LIMIT), Ok(4096)));
            });
        }
        posting.wait();
        near.close(LIMIT).unwrap();
        assert_eq!(near.notify(b"late").err(), Some(TransferError::Closed));
    });
}
