//! Two hosts of this machine: network namespaces joined by a veth pair, where sockets behave as between machines.

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsFd;
use std::process::{self, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

/// Two network namespaces, removed when dropped.
pub struct Hosts {
    names: [String; 2],
}

impl Hosts {
    /// Address of each host.
    pub const ADDRESSES: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 214, 0, 1), Ipv4Addr::new(10, 214, 0, 2)];

    /// `None` where namespaces cannot be made; that is printed.
    pub fn new() -> Option<Hosts> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let id = format!("{}-{}", process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let hosts = Hosts { names: [format!("fw-api-a-{id}"), format!("fw-api-b-{id}")] };
        let made = hosts.make();
        if made.is_none() {
            println!("SKIPPED: needs root and iproute2");
        }
        made.map(|()| hosts)
    }

    fn make(&self) -> Option<()> {
        let [first, second] = &self.names;
        self.names.iter().try_for_each(|name| ip(&format!("netns add {name}")))?;
        ip(&format!("-n {first} link add fw0 type veth peer name fw0 netns {second}"))?;
        for (name, address) in self.names.iter().zip(Hosts::ADDRESSES) {
            ip(&format!("-n {name} addr add {address}/24 dev fw0"))?;
            ip(&format!("-n {name} link set lo up"))?;
            ip(&format!("-n {name} link set fw0 up"))?;
        }
        Some(())
    }

    /// Changes something about one of them, by the words of `ip`.
    pub fn set(&self, host: usize, arguments: &str) {
        ip(&format!("-n {} {arguments}", self.names[host]))
            .expect("making the namespaces took the same rights");
    }

    /// Where the second host listens.
    pub fn listen() -> SocketAddr {
        SocketAddr::new(Hosts::ADDRESSES[1].into(), 7420)
    }

    /// Runs `action` on a thread of a host; sockets and threads that it makes stay there.
    pub fn on<T: Send>(&self, host: usize, action: impl FnOnce() -> T + Send) -> T {
        let inside = || {
            let namespace =
                File::open(format!("/run/netns/{}", self.names[host])).expect("`ip netns add` made it");
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
                .expect("making it took root");
            action()
        };
        thread::scope(|scope| {
            scope.spawn(inside).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for name in &self.names {
            ip(&format!("netns del {name}"));
        }
    }
}

fn ip(arguments: &str) -> Option<()> {
    let mut command = Command::new("ip");
    command.args(arguments.split(' ')).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success()).then_some(())
}
