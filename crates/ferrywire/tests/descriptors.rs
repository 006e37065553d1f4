//! An endpoint in a process that runs out of descriptors.
//!
//! The limit belongs to a whole process, so the test runs itself again as a child that lowers its own.

use ferrywire::transport::tcp::TcpTransport;
use ferrywire::transport::{Conn, ConnOptions, Listener, Nic, Transport};
use ferrywire::{Endpoint, limits};
use rustix::process::{Resource, getrlimit, setrlimit};
use std::fs::File;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::RawFd;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};
use tracing_subscriber::fmt::MakeWriter;

const LIMIT: Duration = Duration::from_secs(60);
const CHILD: &str = "FERRYWIRE_TEST_DESCRIPTORS";
/// Attempts to accept that fail before the process gets its descriptors back.
const FAILURES: u64 = 5;

/// TCP, with a count of the attempts to accept that failed.
#[derive(Debug, Default)]
struct Counting {
    tcp: TcpTransport,
    failures: Arc<AtomicU64>,
}

struct CountingListener(Box<dyn Listener>, Arc<AtomicU64>);

impl Listener for CountingListener {
    fn accept(&mut self) -> io::Result<Option<Box<dyn Conn>>> {
        let result = self.0.accept();
        self.1.fetch_add(u64::from(result.is_err()), Ordering::SeqCst);
        result
    }

    fn local(&self) -> SocketAddr {
        self.0.local()
    }

    fn fd(&self) -> Option<RawFd> {
        self.0.fd()
    }
}

impl Transport for Counting {
    fn name(&self) -> &'static str {
        self.tcp.name()
    }

    fn listen(&self, address: SocketAddr) -> io::Result<Box<dyn Listener>> {
        Ok(Box::new(CountingListener(self.tcp.listen(address)?, self.failures.clone())))
    }

    fn dial(&self, nic: Option<&Nic>, to: SocketAddr, options: &ConnOptions) -> io::Result<Box<dyn Conn>> {
        self.tcp.dial(nic, to, options)
    }

    fn tune(&self, conn: &mut dyn Conn, options: &ConnOptions) {
        self.tcp.tune(conn, options);
    }

    fn nics(&self) -> io::Result<Vec<Nic>> {
        self.tcp.nics()
    }

    fn route(&self, to: IpAddr) -> io::Result<IpAddr> {
        self.tcp.route(to)
    }

    fn now(&self) -> Duration {
        self.tcp.now()
    }
}

/// What was logged.
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

fn eventually(what: &str, mut so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !so() {
        assert!(start.elapsed() < LIMIT, "never came about: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_listener_without_descriptors_waits_and_then_goes_on() {
    if std::env::var_os(CHILD).is_some() {
        return child();
    }
    let name = "a_listener_without_descriptors_waits_and_then_goes_on";
    let mut command = Command::new(std::env::current_exe().unwrap());
    let output = command.args([name, "--exact", "--nocapture"]).env(CHILD, "1").output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    print!("{}", String::from_utf8_lossy(&output.stdout));
}

fn child() {
    let lines = Lines::default();
    tracing_subscriber::fmt().with_writer(lines.clone()).with_ansi(false).init();
    let transport = Arc::new(Counting::default());
    let failures = transport.failures.clone();
    let listening = Endpoint::builder().listen("127.0.0.1:0".parse().unwrap()).threads(1);
    let endpoint = listening.transport(transport).build().unwrap();
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
    eventually("nobody can be accepted", || failures.load(Ordering::SeqCst) >= FAILURES);
    let most = start.elapsed().as_millis() / limits::ACCEPT_RETRY_INTERVAL.as_millis() + 1;
    let tried = u128::from(failures.load(Ordering::SeqCst));
    println!("{tried} attempts in {:?}", start.elapsed());
    assert!(tried <= most, "{tried} attempts in {:?}", start.elapsed());
    assert_eq!(lines.count("nobody can be accepted"), 1);

    drop(taken);
    drop(waiting);
    let peer = good.connect(endpoint.listen_addresses()[0], LIMIT).unwrap();
    let here = endpoint.accept(LIMIT).unwrap();
    peer.notify(b"still there").unwrap().wait(LIMIT).unwrap();
    assert_eq!(here.wait_notification(LIMIT).unwrap(), b"still there");
}
