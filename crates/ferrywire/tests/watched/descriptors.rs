//! An endpoint in a process that runs out of descriptors.
//!
//! The limit belongs to a whole process, so the test runs itself again as a child that lowers its own.

use crate::{LIMIT, Watched, Watcher, eventually};
use ferrywire::{Endpoint, limits};
use rustix::process::{Resource, getrlimit, setrlimit};
use std::fs::File;
use std::io;
use std::net::TcpStream;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;
use tracing_subscriber::fmt::MakeWriter;

const CHILD: &str = "FERRYWIRE_TEST_DESCRIPTORS";
/// Attempts to accept that fail before the process gets its descriptors back.
const FAILURES: u64 = 5;

/// Counts the attempts to accept that failed.
#[derive(Debug, Default)]
struct Failures(AtomicU64);

impl Failures {
    fn count(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }
}

impl Watcher for Failures {
    fn accept_failed(&self, _error: &io::Error) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// The captured log.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Lines {
    fn count(&self, text: &str) -> usize {
        let bytes = self.0.lock().unwrap();
        String::from_utf8_lossy(&bytes).lines().filter(|line| line.contains(text)).count()
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

#[test]
fn a_listener_without_descriptors_waits_and_then_goes_on() {
    if std::env::var_os(CHILD).is_some() {
        return child();
    }
    let name = "descriptors::a_listener_without_descriptors_waits_and_then_goes_on";
    let mut command = Command::new(std::env::current_exe().unwrap());
    let output = command.args([name, "--exact", "--nocapture"]).env(CHILD, "1").output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    print!("{}", String::from_utf8_lossy(&output.stdout));
}

fn child() {
    let lines = Lines::default();
    tracing_subscriber::fmt().with_writer(lines.clone()).with_ansi(false).init();
    let failures = Arc::<Failures>::default();
    let listening = Endpoint::builder().listen("127.0.0.1:0".parse().unwrap()).threads(1);
    let endpoint = listening.transport(Watched::new(&failures)).build().unwrap();
    let good = Endpoint::builder().threads(1).channels(1).build().unwrap();

    let mut limit = getrlimit(Resource::Nofile);
    limit.current = Some(std::fs::read_dir("/proc/self/fd").unwrap().count() as u64 + 10);
    setrlimit(Resource::Nofile, limit).unwrap();
    let mut taken: Vec<File> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
    assert!(!taken.is_empty(), "the limit leaves no descriptor");
    // The last descriptor is the caller's; for the other end there is none.
    taken.pop();
    let start = Instant::now();
    let waiting = TcpStream::connect(endpoint.listen_addresses()[0]).unwrap();
    eventually("cannot accept connections", || failures.count() >= FAILURES);
    let tried = u128::from(failures.count());
    let most = start.elapsed().as_millis() / limits::ACCEPT_RETRY_INTERVAL.as_millis() + 1;
    println!("{tried} attempts in {:?}", start.elapsed());
    assert!(tried <= most, "{tried} attempts in {:?}", start.elapsed());
    assert_eq!(lines.count("cannot accept connections"), 1);

    drop(taken);
    drop(waiting);
    let peer = good.connect(endpoint.listen_addresses()[0], LIMIT).unwrap();
    let here = endpoint.accept(LIMIT).unwrap();
    peer.notify(b"still there").unwrap().wait(LIMIT).unwrap();
    assert_eq!(here.wait_notification(LIMIT).unwrap(), b"still there");
}
