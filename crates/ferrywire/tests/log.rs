//! Log lines and their levels.
//!
//! Two simulated hosts on one thread, so that what each test hears is its own.

use ferrywire::{Endpoint, Peer};
use ferrywire_net::sim::{ResetSeen, Side, SimNet};
use ferrywire_net::{ConnOptions, Transport};
use std::io;
use std::mem::ManuallyDrop;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tracing_subscriber::fmt::MakeWriter;

const PORT: u16 = 7420;

/// The captured log.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Lines {
    /// Lines of a level that say something.
    fn count(&self, level: &str, text: &str) -> usize {
        let bytes = self.0.lock().unwrap();
        let said = |line: &&str| line.contains(level) && line.contains(text);
        String::from_utf8_lossy(&bytes).lines().filter(said).count()
    }
}

impl io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for Lines {
    type Writer = Lines;

    fn make_writer(&self) -> Lines {
        self.clone()
    }
}

/// Two endpoints with two NICs each, connected. They have no farewell, which would wait for a clock that
/// does not advance.
struct Scene {
    net: Arc<SimNet>,
    ends: ManuallyDrop<Vec<Endpoint>>,
    peers: ManuallyDrop<Vec<Peer>>,
}

fn nic(host: u8, nic: u8) -> IpAddr {
    IpAddr::from([10, 0, nic, host])
}

impl Scene {
    fn new() -> Scene {
        let net = SimNet::new(1);
        let end = |host: u8| {
            let host = net.host(&format!("host{host}"), &[("eth0", nic(host, 0)), ("eth1", nic(host, 1))]);
            let builder = Endpoint::builder().listen(SocketAddr::new([0, 0, 0, 0].into(), PORT));
            builder.secret("a shared secret").channels(2).threads(0).transport(host).build().unwrap()
        };
        let ends = ManuallyDrop::new(vec![end(1), end(2)]);
        let mut scene = Scene { ends, net, peers: ManuallyDrop::default() };
        let connecting = scene.ends[0].start_connect(SocketAddr::new(nic(2, 0), PORT)).unwrap();
        while scene.peers.len() < 2 {
            scene.pass(Duration::from_millis(10));
            scene.peers.extend(connecting.poll().map(Result::unwrap));
            scene.peers.extend(scene.ends[1].try_accept().map(Result::unwrap));
            assert!(scene.net.now() < Duration::from_secs(10), "they do not connect");
        }
        scene
    }

    fn pass(&self, time: Duration) {
        let until = self.net.now() + time;
        while self.net.now() < until {
            let worked = self.ends.iter().fold(false, |worked, end| worked | end.progress());
            self.net.advance(Duration::from_micros(if worked { 1 } else { 50 }));
        }
    }

    fn reset_control(&self) {
        for conn in self.net.connections().iter().filter(|conn| !conn.bulk) {
            self.net.reset(conn.id, Side::Dialler, ResetSeen::AtOnce);
        }
    }
}

#[test]
fn the_slower_paths_of_a_resumption_are_no_strangers() {
    let lines = Lines::default();
    let subscriber = tracing_subscriber::fmt().with_writer(lines.clone()).with_ansi(false);
    let subscriber = subscriber.with_max_level(tracing::Level::DEBUG).finish();
    tracing::subscriber::with_default(subscriber, || {
        let scene = Scene::new();
        // One path is in the middle of its handshake when the other has won.
        scene.net.set_nic_latency(nic(2, 1), Duration::from_micros(40));
        scene.reset_control();
        scene.pass(Duration::from_secs(2));
        assert!(scene.peers.iter().all(|peer| peer.error().is_none()));
        assert!(
            lines.count("DEBUG", "slower path of a session resumption from 10.0.1.1") >= 1,
            "no path was slower"
        );
        assert_eq!(lines.count("WARN", "refused a connection"), 0);

        let stranger = scene.net.host("stranger", &[("eth0", nic(3, 0))]);
        let address = SocketAddr::new(nic(2, 0), PORT);
        let conn = stranger.dial(None, address, &ConnOptions::default()).unwrap();
        scene.pass(Duration::from_secs(1));
        drop(conn);
        scene.pass(Duration::from_secs(1));
        assert_eq!(lines.count("WARN", "refused a connection from 10.0.0.3"), 1);
    });
}
