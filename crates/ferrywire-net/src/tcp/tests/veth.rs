//! Tests between two network namespaces, which TCP sees as two hosts.

use std::fs::{self, File};
use std::net::SocketAddrV6;
use std::os::fd::AsFd;
use std::process::{self, Command, Stdio};
use std::sync::atomic::AtomicU32;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::*;
use ferrywire_proto::limits::PATH_CHECK_INTERVAL;

const NEAR: Ipv4Addr = Ipv4Addr::new(10, 213, 0, 1);
const FAR: Ipv4Addr = Ipv4Addr::new(10, 213, 0, 2);
/// An address of the subnet that no host has.
const NOBODY: Ipv4Addr = Ipv4Addr::new(10, 213, 0, 3);

/// Two network namespaces joined by a veth pair, removed when dropped.
struct Namespaces {
    near: String,
    far: String,
}

impl Namespaces {
    fn new() -> Option<Namespaces> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let id = format!("{}-{}", process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let pair = Namespaces { near: format!("fw-near-{id}"), far: format!("fw-far-{id}") };
        let made = pair.make();
        if made.is_none() {
            println!("SKIPPED: needs root and iproute2");
        }
        made.map(|()| pair)
    }

    fn make(&self) -> Option<()> {
        let (near, far) = (&self.near, &self.far);
        ip(&format!("netns add {near}"))?;
        ip(&format!("netns add {far}"))?;
        ip(&format!("-n {near} link add fw0 type veth peer name fw0 netns {far}"))?;
        for (name, address) in [(near, NEAR), (far, FAR)] {
            ip(&format!("-n {name} addr add {address}/24 dev fw0"))?;
            ip(&format!("-n {name} link set lo up"))?;
            ip(&format!("-n {name} link set fw0 up"))?;
        }
        Some(())
    }

    fn listen(&self) -> Box<dyn Listener> {
        within(&self.far, || TcpTransport::default().listen(SocketAddr::new(FAR.into(), 0))).unwrap()
    }

    fn dial(&self, to: SocketAddr) -> Box<dyn Conn> {
        let dial = || {
            let transport = TcpTransport::default();
            let nics = transport.nics()?;
            let nic = nics.iter().find(|nic| nic.address == NEAR).expect("it was added");
            transport.dial(Some(nic), to, &bulk())
        };
        within(&self.near, dial).unwrap()
    }

    fn pair(&self) -> (Box<dyn Conn>, Box<dyn Conn>) {
        let mut listener = self.listen();
        let near = self.dial(listener.local());
        (near, within(&self.far, || accept(listener.as_mut())))
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        ip(&format!("netns del {}", self.near));
        ip(&format!("netns del {}", self.far));
    }
}

fn ip(arguments: &str) -> Option<()> {
    let mut command = Command::new("ip");
    command.args(arguments.split(' ')).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success()).then_some(())
}

/// Runs `action` on a thread inside a namespace; sockets opened there stay in the namespace.
fn within<T: Send>(name: &str, action: impl FnOnce() -> T + Send) -> T {
    let inside = || {
        let namespace = File::open(format!("/run/netns/{name}")).expect("`ip netns add` has made it");
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).expect("we are root");
        action()
    };
    thread::scope(|scope| scope.spawn(inside).join().unwrap())
}

fn unsent_limit(conn: &dyn Conn) -> i32 {
    socket::get_int(conn.fd().unwrap(), libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT).unwrap()
}

#[test]
fn between_hosts_bulk_is_tuned_for_a_short_path() {
    let Some(namespaces) = Namespaces::new() else {
        return;
    };
    let (near, mut far) = namespaces.pair();
    within(&namespaces.far, || TcpTransport::default().tune(far.as_mut(), &bulk()));
    for conn in [near.as_ref(), far.as_ref()] {
        assert_eq!(conn.congestion_control(), "cubic");
        assert_eq!(unsent_limit(conn), 256 << 10);
    }
    assert_eq!((near.local().ip(), near.remote().ip()), (NEAR.into(), FAR.into()));
}

#[test]
fn veth_copies_so_zero_copy_turns_itself_off() {
    let mut bytes = pattern(128 << 10);
    let Some(namespaces) = Namespaces::new() else {
        return;
    };
    let (mut near, mut far) = namespaces.pair();
    assert!(near.zero_copy() && far.zero_copy());
    let pieces = pieces_over(&mut bytes, 4096);
    let (mut sent, mut received) = (0, vec![0; 1 << 20]);
    while near.zero_copy() {
        // SAFETY: `bytes` outlives the connection.
        sent += eventually(|| unsafe { near.send_stable(&pieces) }).unwrap();
        recv_into(far.as_mut(), &mut received).ok();
        near.released();
        assert!(sent < 64 << 20, "zero copy stayed on");
    }
    until("everything is released", || {
        recv_into(far.as_mut(), &mut received).ok();
        near.released() == sent as u64
    });
}

/// A list of addresses from before must not decide whether a new address is local.
#[test]
fn an_address_that_is_new_is_known_as_this_hosts_when_a_connection_comes_from_it() {
    const NEW: Ipv4Addr = Ipv4Addr::new(10, 213, 0, 9);
    let Some(namespaces) = Namespaces::new() else {
        return;
    };
    let far = &namespaces.far;
    let mut listener = namespaces.listen();
    let _near = namespaces.dial(listener.local());
    let other = within(far, || {
        let accepted = accept(listener.as_mut());
        (accepted.within_host(), accepted.zero_copy())
    });
    assert_eq!(other, (false, true), "from another host");
    ip(&format!("-n {far} addr add {NEW}/24 dev fw0")).expect("the namespace is ours");
    let own = within(far, || {
        let transport = TcpTransport::default();
        let nics = transport.nics().unwrap();
        let nic = nics.iter().find(|nic| nic.address == NEW).expect("it was added");
        let _dialled = transport.dial(Some(nic), listener.local(), &bulk()).unwrap();
        let accepted = accept(listener.as_mut());
        assert_eq!(accepted.remote().ip(), NEW);
        (accepted.within_host(), accepted.zero_copy())
    });
    assert_eq!(own, (true, false), "from this host");
}

#[test]
fn connecting_would_block_until_there_is_an_answer() {
    let Some(namespaces) = Namespaces::new() else {
        return;
    };
    let mut conn = namespaces.dial(SocketAddr::new(NOBODY.into(), 9));
    for _ in 0..3 {
        let sent = send_from(conn.as_mut(), &mut [0; 8]);
        assert_eq!(sent.unwrap_err().kind(), io::ErrorKind::WouldBlock);
        let received = recv_into(conn.as_mut(), &mut [0; 8]);
        assert_eq!(received.unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }
    assert!(conn.health().waiting);
    let failed = eventually(|| send_from(conn.as_mut(), &mut [0; 8])).unwrap_err();
    assert_eq!(failed.kind(), io::ErrorKind::HostUnreachable);
    assert_eq!(recv_into(conn.as_mut(), &mut [0; 8]).unwrap_err().kind(), failed.kind());
}

/// Checks that a broken path is found dead by health samples. A try does not count when the test process was
/// stopped so long that the kernel ended the connection first.
fn is_found_dead(break_path: impl Fn(&Namespaces)) {
    const TRIES: usize = 10;
    let found = (0..TRIES).any(|_| match Namespaces::new() {
        Some(namespaces) => samples_find_dead(&namespaces, &break_path),
        None => true,
    });
    assert!(found, "never found dead by looks at it");
}

/// Whether the path was found dead before the kernel ended the connection.
fn samples_find_dead(namespaces: &Namespaces, break_path: impl Fn(&Namespaces)) -> bool {
    let (mut near, mut far) = namespaces.pair();
    send_all(near.as_mut(), &mut pattern(1000));
    recv_all(far.as_mut(), &mut [0; 1000]);
    break_path(namespaces);
    send_all(near.as_mut(), &mut pattern(1000));
    let (mut dead, mut over) = (false, false);
    until("the path is dead", || {
        thread::sleep(PATH_CHECK_INTERVAL);
        dead = near.health().is_dead();
        over = recv_into(near.as_mut(), &mut [0]).is_err_and(|e| e.kind() != io::ErrorKind::WouldBlock);
        dead || over
    });
    dead
}

#[test]
fn a_path_without_a_carrier_is_found_dead() {
    is_found_dead(|namespaces| ip(&format!("-n {} link set fw0 down", namespaces.far)).unwrap());
}

#[test]
fn a_path_that_drops_everything_is_found_dead() {
    let wrong = format!("neigh replace {FAR} lladdr 02:00:00:00:00:99 nud permanent dev fw0");
    is_found_dead(|namespaces| ip(&format!("-n {} {wrong}", namespaces.near)).unwrap());
}

#[test]
fn a_link_local_address_is_bound_to_with_its_link() {
    const NEAR_V6: &str = "fe80::213:1";
    const FAR_V6: &str = "fe80::213:2";
    let Some(namespaces) = Namespaces::new() else {
        return;
    };
    let Namespaces { near, far } = &namespaces;
    for (name, address) in [(near, NEAR_V6), (far, FAR_V6)] {
        if ip(&format!("-n {name} addr add {address}/64 dev fw0 nodad")).is_none() {
            return println!("SKIPPED: needs IPv6");
        }
    }
    let link = within(near, || fs::read_to_string("/proc/thread-self/net/if_inet6")).unwrap();
    let link = link.lines().find(|line| line.ends_with("fw0")).unwrap();
    let link = u32::from_str_radix(link.split_whitespace().nth(1).unwrap(), 16).unwrap();
    let any = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 0);
    let mut listener = within(far, || TcpTransport::default().listen(any)).unwrap();
    let to = SocketAddrV6::new(FAR_V6.parse().unwrap(), listener.local().port(), 0, link);
    let mut dialled =
        within(near, || TcpTransport::default().bind(None, to.into(), &bulk())?.connect()).unwrap();
    let mut accepted = within(far, || accept(listener.as_mut()));
    send_all(dialled.as_mut(), &mut pattern(1000));
    recv_all(accepted.as_mut(), &mut [0; 1000]);
    assert!(dialled.local().ip().to_string().starts_with("fe80::"), "{}", dialled.local());
}

/// Regression: where the host confines IPv6 sockets to IPv6, nothing listened on the IPv4 addresses that an endpoint on
/// `[::]` advertises.
#[test]
fn a_listener_on_every_address_takes_ipv4_too_where_the_host_confines_ipv6_sockets() {
    let Some(namespaces) = Namespaces::new() else {
        return;
    };
    let confined = || fs::write("/proc/sys/net/ipv6/bindv6only", "1");
    if within(&namespaces.near, confined).is_err() {
        return println!("SKIPPED: needs IPv6");
    }
    let any = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 0);
    within(&namespaces.near, || {
        let transport = TcpTransport::default();
        let mut listener = transport.listen(any).unwrap();
        let mut dialled = transport.connect(None, localhost(listener.local().port()), &bulk()).unwrap();
        // Fails on a connection that is refused.
        send_all(&mut dialled, &mut pattern(1));
        let accepted = accept(listener.as_mut());
        assert_eq!(accepted.remote(), dialled.local());
    });
}

#[test]
fn exhausted_ports_are_reported_with_their_address() {
    let Some(namespaces) = Namespaces::new() else {
        return;
    };
    let range = "/proc/sys/net/ipv4/ip_local_port_range";
    let few = within(&namespaces.near, || fs::write(range, "40000 40003"));
    few.expect("the namespace is ours");
    let bind = || TcpTransport::default().bind(None, SocketAddr::new(FAR.into(), 1), &bulk());
    let error = within(&namespaces.near, || {
        let mut bound = Vec::new();
        loop {
            match bind() {
                Ok(each) => bound.push(each),
                Err(error) => return error,
            }
            assert!(bound.len() <= 4, "more ports than there are");
        }
    });
    assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
    let text = error.to_string();
    assert!(text.contains(&NEAR.to_string()) && text.contains("ip_local_port_range"), "{text}");
}
