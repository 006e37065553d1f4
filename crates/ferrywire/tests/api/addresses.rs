//! Which addresses are asked for, named to peers and dialled, between hosts that have several.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use ferrywire::{Builder, ConnectError, Endpoint, Error, RefusalReason};
use ferrywire_net::Transport;
use ferrywire_net::tcp::TcpTransport;
use ferrywire_proto::stall_timer::StallTimer;

use super::LIMIT;
use super::netns::Hosts;

fn builder() -> Builder {
    Endpoint::builder().secret("correct horse").threads(1).channels(2)
}

fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let (start, mut stalled) = (Instant::now(), StallTimer::new(LIMIT));
    while !condition() {
        assert!(!stalled.is_over(start.elapsed()), "not within {LIMIT:?}: {what}");
        thread::sleep(std::time::Duration::from_millis(1));
    }
}

/// Gives a namespace a NIC that leads to no other host, as a bridge for containers does.
fn add_bridge(hosts: &Hosts, host: usize, address: Ipv4Addr) {
    hosts.set(host, "link add docker0 type veth peer name docker1");
    hosts.set(host, &format!("addr add {address}/16 dev docker0"));
    hosts.set(host, "link set docker0 up");
    hosts.set(host, "link set docker1 up");
    until("its links are up", || {
        let nics = hosts.on(host, || TcpTransport::default().nics()).unwrap();
        nics.iter().filter(|nic| nic.up && !nic.loopback).count() == 2
    });
}

/// Whether the other end has closed it.
fn is_over(stream: &mut TcpStream) -> bool {
    match stream.read(&mut [0; 4096]) {
        Ok(count) => count == 0,
        Err(error) => error.kind() != io::ErrorKind::WouldBlock,
    }
}

/// For each connection that arrived the kernel listed every interface, before the dialler had said a word.
#[test]
fn strangers_do_not_have_the_kernel_asked_for_all_interfaces() {
    const STRANGERS: usize = 300;
    let Some(hosts) = &Hosts::new() else { return };
    let transport = Arc::new(TcpTransport::default());
    let driven = || builder().threads(0).listen(Hosts::listen()).transport(transport.clone()).build();
    let there = hosts.on(1, driven).unwrap();
    let address = there.listen_addresses()[0];
    let before = transport.addresses_asked();
    let stranger = |_| {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        stream.set_nonblocking(true).unwrap();
        stream
    };
    let mut strangers: Vec<TcpStream> = hosts.on(0, || (0..STRANGERS).map(stranger).collect());
    until("all are sent away", || {
        hosts.on(1, || while there.progress() {});
        strangers.retain_mut(|stream| !is_over(stream));
        strangers.is_empty()
    });
    assert_eq!(transport.addresses_asked(), before);
    // A peer is worth the question.
    let here = hosts.on(0, || builder().build()).unwrap();
    let connecting = hosts.on(0, || here.start_connect(address)).unwrap();
    until("a peer is connected", || {
        hosts.on(1, || while there.progress() {});
        connecting.poll().is_some_and(|peer| peer.is_ok())
    });
    assert!(transport.addresses_asked() > before);
}

/// As of a bridge for containers: each host's is its own, and both name it to their peers.
#[test]
fn an_address_that_both_hosts_have_carries_no_channel() {
    const BRIDGE: Ipv4Addr = Ipv4Addr::new(172, 17, 0, 1);
    let Some(hosts) = &Hosts::new() else { return };
    [0, 1].into_iter().for_each(|host| add_bridge(hosts, host, BRIDGE));
    let listen = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 7420);
    let build = || builder().listen(listen).channels(4).build();
    let [here, there] = [0, 1].map(|host| hosts.on(host, build).unwrap());
    let address = SocketAddr::new(Hosts::ADDRESSES[1].into(), listen.port());
    let peer = hosts.on(0, || here.connect(address, LIMIT)).unwrap();
    let _accepted = there.accept(LIMIT).unwrap();
    // On a busy host the peer may be up before all of them are.
    until("all channels are up", || peer.stats().channels.iter().all(|channel| channel.alive));
    let stats = peer.stats();
    let nics: Vec<&str> = stats.channels.iter().map(|channel| channel.nic.as_str()).collect();
    assert_eq!(nics, ["fw0"; 4]);
}

/// A container behind another host's address names one that is in the subnet of the bridge here: connecting failed, since no data
/// connection was made.
#[test]
fn a_peer_whose_address_leads_elsewhere_here_is_reached_where_it_was_dialled() {
    const PUBLISHED: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 1);
    let Some(hosts) = &Hosts::new() else { return };
    add_bridge(hosts, 0, Ipv4Addr::new(172, 17, 0, 1));
    add_bridge(hosts, 1, Ipv4Addr::new(172, 17, 0, 2));
    hosts.set(1, &format!("addr add {PUBLISHED}/32 dev lo"));
    hosts.set(0, &format!("route add {PUBLISHED}/32 via {}", Hosts::ADDRESSES[1]));
    let here = hosts.on(0, || builder().build()).unwrap();
    let listen = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 7420);
    let there = hosts.on(1, || builder().listen(listen).nics(["docker0"]).build()).unwrap();
    let address = SocketAddr::new(PUBLISHED.into(), listen.port());
    let peer = hosts.on(0, || here.connect(address, LIMIT)).unwrap();
    let _accepted = there.accept(LIMIT).unwrap();
    until("all channels are up", || peer.stats().channels.iter().all(|channel| channel.alive));
}

/// Regression: the loopback address of the other host was tried last, and leads to this host, whose error was returned.
#[test]
fn a_connect_by_metadata_reports_why_the_other_host_refuses_and_not_what_this_host_answers() {
    let Some(hosts) = &Hosts::new() else { return };
    let listen = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 7420);
    let listening = || builder().listen(listen).build();
    let there = hosts.on(1, listening).unwrap();
    // The endpoint lists the NICs of the namespace that asks for them.
    let metadata = hosts.on(1, || there.metadata());
    let far = SocketAddr::new(Hosts::ADDRESSES[1].into(), listen.port());
    let advertised = hosts.on(1, || there.reachable_addresses());
    assert!(advertised.iter().any(|address| address.ip().is_loopback()), "{advertised:?}");
    let error = |here: &Endpoint| hosts.on(0, || here.connect_metadata(&metadata, LIMIT).unwrap_err());
    let without = || Endpoint::builder().threads(1).channels(2);
    for also_listens in [false, true] {
        let listening_or_not = |builder: Builder| if also_listens { builder.listen(listen) } else { builder };
        let here = || listening_or_not(builder().secret("wrong horse")).build();
        let wrong = error(&hosts.on(0, here).unwrap());
        let ConnectError::Refused { address, reason, .. } = &wrong else { panic!("{wrong}") };
        assert_eq!((address, *reason), (&far.to_string(), RefusalReason::Secret));
    }
    let secretless = error(&hosts.on(0, || without().build()).unwrap());
    assert!(matches!(&secretless, ConnectError::Invalid { what, .. } if what == "secret"), "{secretless}");
    there.close(LIMIT).unwrap();
    drop(there);
    // As behind a firewall: the far address does not answer, and this host listens on the same port.
    let here = hosts.on(0, listening).unwrap();
    let unreachable = error(&here);
    let ConnectError::Unreachable { address, .. } = &unreachable else { panic!("{unreachable}") };
    assert_eq!(address, &far.to_string());
    let _restarted = hosts.on(1, listening).unwrap();
    let restarted = error(&here);
    let ConnectError::Refused { address, why, .. } = &restarted else { panic!("{restarted}") };
    assert_eq!(address, &far.to_string());
    assert!(why.contains("restarted"), "{why}");
}

#[test]
fn a_congestion_control_that_is_not_to_be_had_is_refused_when_the_endpoint_is_built() {
    let build = |name: &str| Endpoint::builder().threads(1).congestion_control(name).build();
    build("reno").expect("every kernel has it");
    let Error::Invalid { what, why } = build("no_such").unwrap_err() else { panic!("another error") };
    assert_eq!(what, "congestion control");
    let there = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_available_congestion_control").unwrap();
    let list = there.split_whitespace().collect::<Vec<_>>().join(", ");
    assert!(why.contains("\"no_such\"") && why.ends_with(&list), "{why}");
}
