//! `GET /metrics` over HTTP, one answer per connection.
//!
//! A library parses the requests. The loop around it is ferrywire's own because it must be bounded in every way: a
//! flood of connections, a client that does not read and a request that never ends cost at most [`CONNECTIONS_MAX`]
//! threads for [`CONNECTION_TIMEOUT`] each, and no thread that moves payload.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ferrywire_sys::fork::Withheld;

use crate::fork::PerProcess;
use crate::registry;
use crate::text;

/// Most connections that are answered at once; others are closed.
const CONNECTIONS_MAX: usize = 8;
/// Longest life of a connection.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest HTTP request that is read, in bytes.
const REQUEST_BYTES_MAX: usize = 8 << 10;
/// Most header fields of a request.
const FIELDS_MAX: usize = 64;
/// Pause after an error of `accept`, which may be a lack of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Number of ports that `ADDR:PORT+` tries.
const PORTS_TRIED: u16 = 64;

/// The environment variable with the address at which a process serves metrics, whatever its face.
pub const VARIABLE: &str = "FERRYWIRE_METRICS";

/// Why metrics are not served.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MetricsError {
    /// The text is not an address to serve at.
    NotAnAddress {
        /// The invalid text.
        text: String,
    },
    /// The address cannot be listened on.
    Listen {
        /// The address that cannot be listened on.
        address: SocketAddr,
        /// The system's reason why the address cannot be listened on.
        why: String,
        /// Whether another socket listens at the address.
        in_use: bool,
    },
}

impl fmt::Display for MetricsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MetricsError::NotAnAddress { text } => {
                write!(
                    f,
                    "\"{text}\" is not an address for metrics: expected ADDR:PORT with an IP address, PORT, or ADDR:PORT+ for the next free port"
                )
            }
            MetricsError::Listen { address, why, in_use } => {
                write!(f, "cannot serve metrics at {address}: {why}")?;
                if *in_use { write!(f, "; {address}+ takes the next free port") } else { Ok(()) }
            }
        }
    }
}

impl std::error::Error for MetricsError {}

/// Parses an address for metrics; also returns whether later ports may be taken instead.
fn parse(text: &str) -> Result<(SocketAddr, bool), MetricsError> {
    let (address, next) = text.strip_suffix('+').map_or((text, false), |address| (address, true));
    let port_alone = address.strip_prefix(':').unwrap_or(address).parse::<u16>();
    let loopback = |port| SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port);
    let parsed = address.parse().or_else(|_| port_alone.map(loopback));
    parsed.map(|address| (address, next)).map_err(|_| MetricsError::NotAnAddress { text: text.into() })
}

/// Whether this process serves metrics. A forked child has no threads of its parent, so it may serve too.
static IS_SERVED: PerProcess<Mutex<bool>> = PerProcess::new(Mutex::default);

fn is_served() -> MutexGuard<'static, bool> {
    IS_SERVED.get().lock().unwrap_or_else(PoisonError::into_inner)
}

/// Serves the metrics of this process at `ADDR:PORT`, or at a port of loopback for `PORT`. With `+` behind the port, the
/// next free port is taken. Returns the address that is served, or `None` if this process serves metrics already.
///
/// # Errors
/// [`MetricsError`] if the text is not an address, or cannot be listened on.
pub fn serve(text: &str) -> Result<Option<SocketAddr>, MetricsError> {
    let (address, next) = parse(text)?;
    let mut is_served = is_served();
    if *is_served {
        return Ok(None);
    }
    let listener = listen(address, next)?;
    let served = listener.local_addr().unwrap_or(address);
    let failed = |error: io::Error| MetricsError::Listen { address, why: error.to_string(), in_use: false };
    // A forked child that lives on would keep the port, and answer no request.
    let ends = (Withheld::new(listener.as_fd()), listener);
    let body = move || {
        let (_withheld, listener) = &ends;
        accept(listener);
    };
    thread::Builder::new().name("ferrywire-metrics".into()).spawn(body).map_err(failed)?;
    registry::time_from_now_on();
    *is_served = true;
    Ok(Some(served))
}

fn listen(address: SocketAddr, next: bool) -> Result<TcpListener, MetricsError> {
    let ports = address.port()..=address.port().saturating_add(if next { PORTS_TRIED } else { 0 });
    let mut last = None;
    for port in ports {
        let address = SocketAddr::new(address.ip(), port);
        match TcpListener::bind(address) {
            Ok(listener) => return Ok(listener),
            Err(error) => {
                let in_use = error.kind() == io::ErrorKind::AddrInUse;
                let why = match error.kind() {
                    io::ErrorKind::AddrNotAvailable => {
                        format!("{error}; no NIC of this host has the address")
                    }
                    _ => error.to_string(),
                };
                last = Some(MetricsError::Listen { address, why, in_use });
                if !in_use {
                    break;
                }
            }
        }
    }
    Err(last.unwrap_or(MetricsError::NotAnAddress { text: address.to_string() }))
}

/// Serves at the address in `FERRYWIRE_METRICS`, if the variable is set and this process serves no metrics yet; returns
/// the address if this call began to serve.
///
/// # Errors
/// Those of [`serve`].
pub(crate) fn serve_by_environment() -> Result<Option<SocketAddr>, MetricsError> {
    // The variable does not count, so it need not be valid either.
    if *is_served() {
        return Ok(None);
    }
    let text = std::env::var(VARIABLE).ok().filter(|text| !text.is_empty());
    text.map_or(Ok(None), |text| serve(&text))
}

/// Whether [`serve`] could serve at this address now.
///
/// # Errors
/// Those of [`serve`].
pub fn check(text: &str) -> Result<(), MetricsError> {
    let (address, next) = parse(text)?;
    listen(address, next).map(drop)
}

/// The first free port after the one in `text`: for a child of the process that serves there.
///
/// # Errors
/// [`MetricsError::NotAnAddress`] if the text holds no address.
pub fn next_to(text: &str) -> Result<String, MetricsError> {
    let (mut address, _) = parse(text)?;
    // Port 0 means any free port.
    address.set_port(if address.port() == 0 { 0 } else { address.port().wrapping_add(1) });
    Ok(format!("{address}+"))
}

fn accept(listener: &TcpListener) {
    let open = Arc::new(AtomicUsize::new(0));
    loop {
        let Ok((stream, _)) = listener.accept() else {
            thread::sleep(ACCEPT_PAUSE);
            continue;
        };
        let counted = Counted::new(&open);
        if counted.number > CONNECTIONS_MAX {
            continue;
        }
        let ends = (Withheld::new(stream.as_fd()), stream);
        let body = move || {
            let _counted = counted;
            let (_withheld, stream) = &ends;
            if let Err(error) = answer(stream) {
                tracing::debug!(%error, "cannot answer a request for metrics");
            }
        };
        if thread::Builder::new().name("ferrywire-scrape".into()).spawn(body).is_err() {
            thread::sleep(ACCEPT_PAUSE);
        }
    }
}

/// One of the open connections, which are counted.
struct Counted {
    open: Arc<AtomicUsize>,
    number: usize,
}

impl Counted {
    fn new(open: &Arc<AtomicUsize>) -> Counted {
        Counted { number: open.fetch_add(1, Ordering::Relaxed) + 1, open: open.clone() }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.open.fetch_sub(1, Ordering::Relaxed);
    }
}

fn answer(stream: &TcpStream) -> io::Result<()> {
    let end = Instant::now() + CONNECTION_TIMEOUT;
    let (status, kind, body) = match request(stream, end)? {
        Request::Metrics => {
            ("200 OK", "text/plain; version=0.0.4; charset=utf-8", text::render(&registry::process()))
        }
        Request::Root => {
            ("200 OK", "text/plain; charset=utf-8", "ferrywire: metrics are at /metrics\n".into())
        }
        Request::Other(status) => (status, "text/plain; charset=utf-8", format!("{status}\n")),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    let answer = [head.as_bytes(), body.as_bytes()].concat();
    let mut rest = &answer[..];
    while !rest.is_empty() {
        stream.set_write_timeout(Some(left(end)?))?;
        let sent = (&*stream).write(rest)?;
        rest = &rest[sent..];
    }
    Ok(())
}

fn left(end: Instant) -> io::Result<Duration> {
    let left = end.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// A client's HTTP request, as far as it matters.
enum Request {
    Metrics,
    Root,
    /// A request that cannot be answered; the status says why.
    Other(&'static str),
}

/// Reads a request; what follows its header is ignored.
fn request(stream: &TcpStream, end: Instant) -> io::Result<Request> {
    let (mut bytes, mut length) = ([0; REQUEST_BYTES_MAX], 0);
    loop {
        stream.set_read_timeout(Some(left(end)?))?;
        let got = (&*stream).read(&mut bytes[length..])?;
        if got == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        length += got;
        let mut fields = [httparse::EMPTY_HEADER; FIELDS_MAX];
        let mut parsed = httparse::Request::new(&mut fields);
        match parsed.parse(&bytes[..length]) {
            Err(_) => return Ok(Request::Other("400 Bad Request")),
            Ok(httparse::Status::Partial) if length == bytes.len() => {
                return Ok(Request::Other("431 Request Header Fields Too Large"));
            }
            Ok(httparse::Status::Partial) => {}
            Ok(httparse::Status::Complete(_)) => {
                let path = parsed.path.unwrap_or_default();
                return Ok(match (parsed.method, path.split('?').next().unwrap_or_default()) {
                    (Some("GET"), "/metrics") => Request::Metrics,
                    (Some("GET"), "/") => Request::Root,
                    (Some("GET"), _) => Request::Other("404 Not Found"),
                    _ => Request::Other("405 Method Not Allowed"),
                });
            }
        }
    }
}
