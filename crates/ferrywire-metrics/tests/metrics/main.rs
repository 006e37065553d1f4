//! The samples of a process, and what a scrape shows of them.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;
use std::time::Duration;

use ferrywire_metrics::{
    ChannelSample, KindSample, PeerSample, ProcessSample, Source, process, register, render, retire, serve,
    thread_ends,
};

/// For tests that count the sources of this process: while another one takes a sample, it keeps them.
static ALONE: Mutex<()> = Mutex::new(());

/// A connected peer with counts that do not change.
struct Connected(PeerSample);

impl Connected {
    fn new(label: &str, peer: &str, count: u64) -> Arc<Connected> {
        let write = KindSample { kind: "write".into(), started: count, ..KindSample::default() };
        let channel =
            ChannelSample { nic: format!("nic-{label}"), tx_bytes: count, ..ChannelSample::default() };
        let made = Arc::new(Connected(PeerSample {
            peer: peer.into(),
            label: label.into(),
            lost_channels: count,
            operations: vec![write],
            channels: vec![channel],
            ..PeerSample::default()
        }));
        let source: Weak<dyn Source> = Arc::<Connected>::downgrade(&made);
        register(label.into(), source);
        made
    }
}

impl Source for Connected {
    fn sample(&self) -> PeerSample {
        self.0.clone()
    }
}

impl Drop for Connected {
    fn drop(&mut self) {
        retire(&self.0);
    }
}

/// Values of the series whose name and labels contain all of `words`.
fn values(metrics: &str, words: &[&str]) -> Vec<f64> {
    let lines =
        metrics.lines().filter(|line| !line.starts_with('#') && words.iter().all(|word| line.contains(word)));
    lines.map(|line| line.rsplit(' ').next().unwrap().parse().unwrap()).collect()
}

#[test]
fn no_counter_of_a_label_falls_while_a_peer_has_the_label() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let counters =
        ["ferrywire_tx_bytes_total", "ferrywire_lost_channels_total", "ferrywire_operations_started_total"];
    let shown = |label: &str| {
        let metrics = render(&process());
        counters.map(|name| values(&metrics, &[name, &format!("peer=\"{label}\"")]))
    };
    let moved = || values(&render(&process()), &["ferrywire_tx_bytes_total", "nic-x", "closed"]);
    let (first, second) = (Connected::new("x", "x:1", 5), Connected::new("x", "x:2", 7));
    assert_eq!(shown("x"), [[12.0]; 3]);
    drop(first);
    assert_eq!(shown("x"), [[12.0]; 3], "the second one has the label");
    let third = Connected::new("x", "x:3", 1);
    drop(second);
    assert_eq!((shown("x"), moved()), ([[13.0]; 3].map(Vec::from), vec![]), "the third one has the label");
    drop(third);
    assert_eq!((shown("x"), moved()), ([const { vec![] }; 3], vec![13.0]), "no peer has the label");
    let fourth = Connected::new("x", "x:4", 2);
    assert_eq!((shown("x"), moved()), ([[2.0]; 3].map(Vec::from), vec![13.0]), "the label is a new one");
    drop(fourth);
    assert_eq!(
        process().peers.iter().filter(|peer| peer.label == "x").count(),
        0,
        "labels of closed peers add up"
    );
}

/// Regression: the alert on failures did not see the first one, because the growth of a series counts from its first value.
#[test]
fn every_kind_of_operation_has_a_count_before_its_first_one() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let failed = |sample: &ProcessSample| {
        let metrics = render(sample);
        let of = |kind: &str| {
            values(&metrics, &["ferrywire_operations_failed_total", &format!("kind=\"{kind}\"")])
        };
        ["write", "read", "send", "recv", "notify", "serve", "isend", "irecv"].map(of)
    };
    let zeros = |count| vec![0.0; count];
    assert_eq!(failed(&ProcessSample::default()), [1, 1, 1, 1, 1, 1, 0, 0].map(zeros));
    let plugin = ProcessSample { face: "nccl".into(), ..ProcessSample::default() };
    assert_eq!(failed(&plugin), [0, 0, 0, 0, 0, 0, 1, 1].map(zeros));
    let write = KindSample { kind: "write".into(), started: 2, failed: 2, ..KindSample::default() };
    let closed = PeerSample {
        peer: "closed".into(),
        label: "closed".into(),
        operations: vec![write],
        ..PeerSample::default()
    };
    let sample = ProcessSample { peers: vec![closed], ..ProcessSample::default() };
    assert_eq!(failed(&sample)[..2], [vec![2.0], vec![0.0]]);
}

#[test]
fn nics_and_peers_whose_joined_names_are_equal_have_series_of_their_own() {
    let peer = |nic: &str, label: &str, bytes: u64| {
        let channel = ChannelSample {
            nic: nic.into(),
            tx_bytes: bytes,
            in_flight_bytes: bytes,
            ..ChannelSample::default()
        };
        PeerSample { label: label.into(), channels: vec![channel], ..PeerSample::default() }
    };
    let peers = vec![peer("eth1", "110.0.0.2", 3), peer("eth11", "10.0.0.2", 4)];
    let metrics = render(&ProcessSample { peers, ..ProcessSample::default() });
    for name in ["ferrywire_tx_bytes_total", "ferrywire_in_flight_bytes"] {
        for (labels, bytes) in
            [("nic=\"eth1\",peer=\"110.0.0.2\"", 3.0), ("nic=\"eth11\",peer=\"10.0.0.2\"", 4.0)]
        {
            assert_eq!(values(&metrics, &[&format!("{name}{{{labels}}}")]), [bytes], "{metrics}");
        }
    }
}

/// The CPU time of ferrywire's threads that a scrape shows.
fn cpu_seconds(address: SocketAddr) -> f64 {
    let mut stream = TcpStream::connect(address).expect("metrics are served");
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    let [seconds] = values(&answer, &["ferrywire_cpu_seconds_total"])[..] else { panic!("{answer}") };
    seconds
}

#[test]
fn cpu_seconds_never_shrink_when_threads_end() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let address = serve("127.0.0.1:0").expect("a free port").expect("the first server");
    let mut before = 0.0;
    let mut grown = || {
        let now = cpu_seconds(address);
        assert!(now >= before, "{before} s, then {now} s");
        let more = now - before;
        before = now;
        more
    };
    for _ in 0..200 {
        grown();
    }
    // A thread that works, one time with a note of its end, is counted once.
    for notes in [false, true] {
        let (worked, has_worked) = channel();
        let (end, may_end) = channel::<()>();
        let body = move || {
            let sum = (0..50_000_000u64).fold(0, |sum, next| std::hint::black_box(sum ^ next));
            worked.send(sum).unwrap();
            let _ = may_end.recv();
            if notes {
                thread_ends();
            }
        };
        let thread = thread::Builder::new().name("ferrywire-test".into()).spawn(body).unwrap();
        has_worked.recv_timeout(Duration::from_secs(60)).expect("it works");
        let its = grown();
        drop(end);
        thread.join().unwrap();
        let twice = grown() + grown();
        assert!(twice < its, "{its} s of a thread are counted again: {twice} s more");
    }
}
