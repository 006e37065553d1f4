//! What Prometheus and `ferrywire watch` see of a process that uses the plugin: the driver in C, which does what the
//! tests report it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;

use ferrywire_metrics::{ProcessSample, processes};

use crate::driver::command;
use crate::pair::{DEADLINE, until};

/// A driver that waits for letters.
struct Told {
    child: Child,
    letters: Option<ChildStdin>,
    lines: Receiver<String>,
    /// The address of its metrics; empty if it serves none.
    metrics: String,
}

impl Told {
    /// Starts a driver, with `FERRYWIRE_METRICS` if there is a value for it.
    fn start(metrics: Option<&str>) -> Told {
        let mut command = command("driver", 12, "told");
        command.envs(metrics.map(|value| ("FERRYWIRE_METRICS", value)));
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = lines(child.stdout.take().unwrap());
        let letters = child.stdin.take();
        let mut reported = Told { child, letters, lines, metrics: String::new() };
        reported.metrics = reported.line("metrics ");
        reported
    }

    /// The next line that begins so, without its beginning.
    fn line(&self, begin: &str) -> String {
        loop {
            let line = self.lines.recv_timeout(DEADLINE).expect("the driver lives and does not hang");
            if let Some(rest) = line.strip_prefix(begin) {
                return rest.trim().to_owned();
            }
        }
    }

    /// Tells it to do something and waits until it is done.
    fn does(&mut self, letter: u8) {
        self.letters.as_mut().unwrap().write_all(&[letter]).unwrap();
        self.line("done");
    }

    /// Its metrics as text.
    fn scrape(&self) -> String {
        let mut stream = TcpStream::connect(&self.metrics).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer.split_once("\r\n\r\n").unwrap().1.to_owned()
    }

    /// What `ferrywire watch` reads.
    fn sample(&self) -> ProcessSample {
        let own = |sample: &ProcessSample| sample.pid == self.child.id();
        until("the process's own socket", || processes().0.into_iter().find(own))
    }

    /// Ends it well.
    fn end(mut self) {
        self.letters = None;
        self.line("passed");
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Told {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn lines(output: ChildStdout) -> Receiver<String> {
    let (said, lines) = mpsc::channel();
    thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            let _ = said.send(line);
        }
    });
    lines
}

/// The value of a series, by its name and labels.
fn value(metrics: &str, series: &str) -> f64 {
    let found = metrics.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
    found.unwrap_or_else(|| panic!("no {series}:\n{metrics}")).parse().unwrap()
}

/// Started, completed and failed requests of a kind.
fn requests(metrics: &str, kind: &str) -> [f64; 3] {
    ["started", "completed", "failed"].map(|what| {
        value(metrics, &format!("ferrywire_operations_{what}_total{{kind=\"{kind}\",peer=\"127.0.0.1\"}}"))
    })
}

const OF_LOOPBACK: &str = "{nic=\"lo\",peer=\"127.0.0.1\"}";

fn of_path(metrics: &str, name: &str) -> f64 {
    value(metrics, &format!("ferrywire_{name}{OF_LOOPBACK}"))
}

#[test]
fn counts_are_those_of_the_messages() {
    const PAYLOAD: f64 = 10.0 * (1048576.0 + 1000.0);
    let mut reported = Told::start(Some("127.0.0.1:0"));
    let idle = reported.scrape();
    assert_eq!(of_path(&idle, "tx_bytes_total"), 0.0, "{idle}");
    reported.does(b'm');
    let after = reported.scrape();
    // A header of 64 bytes goes before each piece, and pieces have at least 32 KiB.
    let (sent, received) = (of_path(&after, "tx_bytes_total"), of_path(&after, "rx_bytes_total"));
    assert!(sent > PAYLOAD && sent <= PAYLOAD + 64.0 * 10.0 * 33.0 && received == sent, "{after}");
    assert_eq!([requests(&after, "isend"), requests(&after, "irecv")], [[20.0, 20.0, 0.0]; 2], "{after}");
    let channels = of_path(&after, "channels");
    assert!(channels >= 4.0 && channels == of_path(&idle, "channels"), "{after}");
    assert!(of_path(&after, "tcp_rtt_seconds") > 0.0, "{after}");
    assert!(of_path(&after, "tcp_congestion_window_bytes") > 0.0, "{after}");
    until("acknowledgements", || (of_path(&reported.scrape(), "in_flight_bytes") == 0.0).then_some(()));
    value(&after, "ferrywire_path_info{nic=\"lo\",peer=\"127.0.0.1\",reason=\"\",transport=\"tcp\"}");
    let version = env!("CARGO_PKG_VERSION");
    value(&after, &format!("ferrywire_info{{face=\"nccl\",version=\"{version}\"}}"));
    until("time of the workers", || {
        reported.does(b'm');
        (value(&reported.scrape(), "ferrywire_cpu_seconds_total") > 0.0).then_some(())
    });
    reported.end();
}

#[test]
fn a_comm_that_failed_or_is_closed_keeps_its_counts() {
    let mut reported = Told::start(Some("127.0.0.1:0"));
    reported.does(b'f');
    let failed = reported.scrape();
    assert_eq!([requests(&failed, "isend"), requests(&failed, "irecv")], [[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]]);
    let (sent, channels) = (of_path(&failed, "tx_bytes_total"), of_path(&failed, "channels"));
    for _ in 0..5 {
        reported.does(b'n');
        reported.does(b'r');
    }
    let closed = reported.scrape();
    assert_eq!(of_path(&closed, "tx_bytes_total"), sent, "{closed}");
    assert_eq!(of_path(&closed, "channels"), channels, "{closed}");
    // Four of the receives without a message were closed, and so have failed.
    assert_eq!(requests(&closed, "irecv"), [6.0, 0.0, 5.0], "{closed}");
    assert_eq!(value(&closed, "ferrywire_lost_channels_total{peer=\"127.0.0.1\"}"), 0.0, "{closed}");
    let sample = reported.sample();
    assert_eq!(sample.peers.len(), 1, "{sample:?}");
    assert_eq!(sample.peers[0].channels.len() as f64, 2.0 * channels, "no more than two pairs had at once");
    reported.end();
}

#[test]
fn a_process_is_seen_without_being_asked_to_serve() {
    let mut reported = Told::start(None);
    assert_eq!(reported.metrics, "");
    reported.does(b'm');
    let sample = reported.sample();
    assert_eq!((sample.face.as_str(), sample.program.as_str()), ("nccl", "driver"));
    let peer = &sample.peers[0];
    assert_eq!((peer.peer.as_str(), peer.transport.as_str()), ("127.0.0.1", "tcp"));
    assert!(peer.channels.iter().all(|channel| channel.alive && channel.nic == "lo"), "{peer:?}");
    assert!(peer.operations.iter().all(|kind| kind.completed == 20), "{peer:?}");
    reported.end();
}

#[test]
fn an_address_that_cannot_be_used_is_a_warning() {
    let serving = Told::start(Some("127.0.0.1:0"));
    for address in ["nowhere", &serving.metrics] {
        let mut command = command("driver", 12, "init_again");
        let output = command.env("FERRYWIRE_METRICS", address).stdin(Stdio::null()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{said}");
        let warnings: Vec<_> = said.lines().filter(|line| line.starts_with("WARN ")).collect();
        let [warning] = warnings[..] else { panic!("{said}") };
        assert!(warning.contains("FERRYWIRE_METRICS: ") && warning.contains(address), "{said}");
    }
    serving.end();
}

/// With its last comm a peer is gone.
#[test]
fn counts_of_a_peer_that_is_gone_are_kept_once() {
    let mut reported = Told::start(Some("127.0.0.1:0"));
    reported.does(b'm');
    let before = reported.scrape();
    reported.does(b'c');
    let after = reported.scrape();
    let closed = |name: &str| value(&after, &format!("ferrywire_{name}{{nic=\"lo\",peer=\"closed\"}}"));
    assert_eq!(closed("tx_bytes_total"), of_path(&before, "tx_bytes_total"), "{after}");
    assert_eq!(closed("rx_bytes_total"), of_path(&before, "rx_bytes_total"), "{after}");
    assert_eq!(closed("channels"), 0.0, "{after}");
    assert!(!after.contains("peer=\"127.0.0.1\""), "{after}");
    reported.end();
}
