//! [`Endpoint`]: the Python class of an endpoint, and its constructor's options.
//!
//! Read next: `region.rs`, `peer.rs`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ferrywire::{Encryption, Error};
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString, PyTuple};

use crate::errors::{OrRaise, raised, usage};
use crate::options::{Address, bytes, count, is_no, perhaps, unsigned, whole};
use crate::peer::Peer;
use crate::region::Region;
use crate::shutdown::{self, Shared};
use crate::tensor::{Framework, View};
use crate::waiting::{NotStarted, PendingCall, after, aside, begin_aside, limit, overdue, sliced};
use crate::wakeup::{Wakeup, coroutine, itself, leave, left, pending_call};

/// Default of `timeout` in seconds when an endpoint or peer closes. The signatures of `close` repeat the number,
/// because a constant's name there would hide the value from `help()`.
pub const CLOSE_SECONDS: f64 = 5.0;

/// One GPU or the host's memory, with its NICs, progress threads, regions and peers.
///
/// Peers, regions and transfers keep the endpoint alive. `close()`, or the end of a `with` block, ends it.
#[pyclass(frozen, weakref, module = "ferrywire")]
pub struct Endpoint {
    shared: Arc<Shared>,
    closed: AtomicBool,
}

/// The target of `connect`: another endpoint's metadata, or an address.
enum ConnectTarget {
    Metadata(Vec<u8>),
    At(Address),
}

impl ConnectTarget {
    fn of(object: &Bound<'_, PyAny>) -> PyResult<ConnectTarget> {
        if let Some(address) = Address::of("to", object)? {
            return Ok(ConnectTarget::At(address));
        }
        let metadata = bytes(object)?.map(ConnectTarget::Metadata);
        metadata.ok_or_else(|| {
            is_no("to", object, "metadata (bytes), nor an address: 'host:port', ('host', port)")
        })
    }
}

impl Endpoint {
    fn open(&self, py: Python<'_>) -> PyResult<&ferrywire::Endpoint> {
        if self.closed.load(Ordering::SeqCst) {
            Err(raised(py, &Error::Closed))
        } else {
            Ok(self.shared.get())
        }
    }

    /// Parses the arguments of `connect` and returns the call that connects.
    fn connecting(
        &self,
        to: &Bound<'_, PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<impl FnOnce() -> ferrywire::Result<ferrywire::Peer> + Send + use<>> {
        let py = to.py();
        let (endpoint, to) = (self.open(py)?.clone(), ConnectTarget::of(to)?);
        let limit = limit(py, "timeout", timeout)?;
        crate::logs::refresh_level(py)?;
        Ok(move || match to {
            ConnectTarget::Metadata(metadata) => Ok(endpoint.connect_metadata(&metadata, limit)?),
            ConnectTarget::At(address) => connect_to_any(&endpoint, address, limit),
        })
    }

    /// Marks the endpoint closed and returns the call that closes it, and whether it was open. The call does nothing if
    /// the endpoint was closed already.
    fn closing(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
    ) -> PyResult<(bool, impl FnOnce() -> ferrywire::Result<()> + Send + 'static)> {
        let limit = limit(py, "timeout", timeout)?;
        let open = !self.closed.swap(true, Ordering::SeqCst);
        // A caller that abandons the call may be about to end the program, which waits for this guard.
        let endpoint = open.then(|| (self.shared.get().clone(), shutdown::closing()));
        Ok((open, move || endpoint.map_or(Ok(()), |(endpoint, _closing)| endpoint.close(limit))))
    }

    /// Returns the started call. If it could not be started, marks the endpoint open again.
    fn unless_not_started<T>(&self, ours: bool, started: Result<T, NotStarted>) -> PyResult<T> {
        if started.is_err() && ours {
            self.closed.store(false, Ordering::SeqCst);
        }
        Ok(started?)
    }
}

#[pymethods]
impl Endpoint {
    /// Opens an endpoint: checks the options, listens, starts the threads. Every option has a default that fits the
    /// host.
    ///
    /// `listen` is an address ("host:port" or a pair; port 0 chooses a free port); without it the endpoint does not
    /// listen. `secret` (text or bytes, at least `SECRET_BYTES_MIN`) must be equal on both ends and is required beyond
    /// loopback. `nics` are names; by default all NICs that share a subnet with the peer, else the NIC of the route.
    /// `channels` counts the connections per peer, `threads` the progress threads; both follow the cores by default,
    /// and over a long path there are at least 8 channels.
    /// `chunk_bytes` and `socket_buffer_bytes` are in bytes, `window` in frames per channel. With `crc` at either end
    /// each chunk carries a checksum. If both ends set `channels`, `chunk_bytes` or `window`, the smaller counts. `encryption` is "off", "preferred" or "required": a session is encrypted if one end requires it
    /// or both prefer it, and refused if one end requires it and the other has it off. `keyed_checksum` authenticates
    /// data connections that are not encrypted, if either end asks for it. `peer_timeout` is the time in seconds within
    /// which the loss of a silent peer is reported; 10 by default.
    ///
    /// Raises `UsageError` for an option that is not valid, and `LocalError` if this host refuses, for example because
    /// the address is in use (see its `errno`).
    #[new]
    #[pyo3(signature = (listen=None, *, secret=None, label=None, nics=None, channels=None, threads=None,
        chunk_bytes=None, window=None, crc=false, encryption="off", keyed_checksum=false,
        congestion_control=None, socket_buffer_bytes=None, peer_timeout=None))]
    #[expect(clippy::too_many_arguments, reason = "Python passes each as a keyword")]
    fn new(
        py: Python<'_>,
        listen: Option<&Bound<'_, PyAny>>,
        secret: Option<&Bound<'_, PyAny>>,
        label: Option<String>,
        nics: Option<Vec<String>>,
        #[pyo3(from_py_with = perhaps)] channels: Option<i128>,
        #[pyo3(from_py_with = perhaps)] threads: Option<i128>,
        #[pyo3(from_py_with = perhaps)] chunk_bytes: Option<i128>,
        #[pyo3(from_py_with = perhaps)] window: Option<i128>,
        crc: bool,
        encryption: &str,
        keyed_checksum: bool,
        congestion_control: Option<String>,
        #[pyo3(from_py_with = perhaps)] socket_buffer_bytes: Option<i128>,
        peer_timeout: Option<f64>,
    ) -> PyResult<Endpoint> {
        let peer_timeout =
            peer_timeout.map(|seconds| limit(py, "peer_timeout", Some(seconds))).transpose()?;
        let listen = listen.map(listening).transpose()?;
        let secret = secret.map(self::secret).transpose()?;
        let [channels, threads, chunk_bytes, window, socket_buffer_bytes] = [
            ("channels", channels),
            ("threads", threads),
            ("chunk_bytes", chunk_bytes),
            ("window", window),
            ("socket_buffer_bytes", socket_buffer_bytes),
        ]
        .map(|(what, value)| count(py, what, value));
        let (channels, threads, chunk_bytes) = (channels?, threads?, chunk_bytes?);
        let (window, socket_buffer_bytes) = (window?, socket_buffer_bytes?);
        if threads == Some(0) {
            let why = "0 starts no progress thread: Python needs at least one";
            return Err(usage(py, "threads", why));
        }
        let Some(encryption) = Encryption::from_name(encryption) else {
            let why = format!("{encryption:?} is not off, preferred or required");
            return Err(usage(py, "encryption", &why));
        };
        // The answer of a name server may take long.
        let listen = listen.map(|address| aside(py, move || address.resolve_here())).transpose()?;
        let built = py.detach(move || {
            let mut builder = ferrywire::Endpoint::builder().crc(crc);
            builder = builder.encryption(encryption).keyed_checksum(keyed_checksum);
            if let Some(address) = listen {
                builder = builder.listen(address);
            }
            if let Some(secret) = secret {
                builder = builder.secret(secret);
            }
            builder = builder.label(label.unwrap_or_default()).nics(nics.unwrap_or_default());
            let set = [
                channels.map(|value| -> Setter { Box::new(move |to| to.channels(value)) }),
                threads.map(|value| -> Setter { Box::new(move |to| to.threads(value)) }),
                chunk_bytes.map(|value| -> Setter { Box::new(move |to| to.chunk_bytes(value)) }),
                window.map(|value| -> Setter { Box::new(move |to| to.window(value)) }),
                congestion_control
                    .map(|value| -> Setter { Box::new(move |to| to.congestion_control(value)) }),
                socket_buffer_bytes
                    .map(|value| -> Setter { Box::new(move |to| to.socket_buffer_bytes(value)) }),
                peer_timeout.map(|value| -> Setter { Box::new(move |to| to.peer_timeout(value)) }),
            ];
            builder.check_nics()?;
            set.into_iter().flatten().fold(builder, |builder, set| set(builder)).build()
        });
        crate::logs::refresh_level(py)?;
        Ok(Endpoint { shared: Shared::new(built.or_raise(py)?), closed: AtomicBool::new(false) })
    }

    /// The endpoint's random identity, as hexadecimal digits; each start makes a new one.
    #[getter]
    fn identity(&self) -> String {
        self.shared.get().identity().to_string()
    }

    /// The addresses on which the endpoint listens, with their real port.
    #[getter]
    fn listen_addresses(&self) -> Vec<String> {
        self.shared.get().listen_addresses().iter().map(ToString::to_string).collect()
    }

    /// The port on which the endpoint listens, or None.
    #[getter]
    fn port(&self) -> Option<u16> {
        self.shared.get().listen_addresses().first().map(|address| address.port())
    }

    /// The number of peers that are connected, being set up, or being closed.
    #[getter]
    fn peer_count(&self) -> usize {
        self.shared.get().peer_count()
    }

    /// Whether `close` was called.
    #[getter]
    fn closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// Replaces the shared secret for connections from now on; those that are open stay. `secret` is used to connect, and
    /// peers with `secret` or `also_accepted` are accepted.
    ///
    /// To exchange a secret without a gap, call this on every endpoint three times, each time on all before the next:
    /// `set_secret(old, also_accepted=new)`, `set_secret(new, also_accepted=old)`, `set_secret(new)`.
    ///
    /// Raises `UsageError` for a secret that is too short, and `Closed`.
    #[pyo3(signature = (secret, *, also_accepted=None))]
    fn set_secret(
        &self,
        py: Python<'_>,
        secret: &Bound<'_, PyAny>,
        also_accepted: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let also_accepted = also_accepted.map(self::secret).transpose()?;
        self.open(py)?.set_secret(self::secret(secret)?, also_accepted).or_raise(py)
    }

    /// The endpoint's identity and addresses as bytes, for `connect` in another process. The application carries them
    /// there.
    ///
    /// Raises `Closed`.
    fn metadata<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(py, &self.open(py)?.metadata()))
    }

    /// Connects to an endpoint and returns its `Peer`. `to` is the other endpoint's metadata (bytes) or the address on
    /// which it listens ("host:port" or a pair). All addresses of a host name or metadata are tried, in `timeout`
    /// seconds altogether. With metadata, an endpoint that has restarted since is refused.
    ///
    /// Raises `Unreachable` if no endpoint answers or the host name is unknown, `Refused` for another endpoint, version
    /// or secret, `ProtocolViolation` if the peer breaks the protocol, `TimedOut`, `Closed`, and `UsageError` if `to`
    /// is neither metadata nor an address.
    #[pyo3(signature = (to, timeout=30.0))]
    fn connect(&self, to: &Bound<'_, PyAny>, timeout: Option<f64>) -> PyResult<Peer> {
        let peer = aside(to.py(), self.connecting(to, timeout)?)?;
        Ok(Peer::new(peer, self.shared.clone()))
    }

    /// Waits at most `timeout` seconds for the next peer that connects; None waits without limit.
    ///
    /// Raises `TimedOut`, `Closed`, and `UsageError` if the endpoint does not listen.
    #[pyo3(signature = (timeout=None))]
    fn accept(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Peer> {
        let endpoint = self.open(py)?;
        let limit = limit(py, "timeout", timeout)?;
        crate::logs::refresh_level(py)?;
        let peer = sliced(py, limit, |slice| endpoint.accept(slice))?;
        Ok(Peer::new(peer, self.shared.clone()))
    }

    /// Like `connect`, for `await`. Raises the exceptions of `connect`, and `TimedOut` after its own `timeout`.
    #[pyo3(signature = (to, timeout=30.0))]
    fn connect_async<'py>(
        slf: &Bound<'py, Self>,
        to: Bound<'py, PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        pending_call(slf, "_begin_connect", &[to, timeout.into_bound_py_any(slf.py())?])
    }

    fn _begin_connect(&self, to: &Bound<'_, PyAny>, timeout: Option<f64>) -> PyResult<PendingCall> {
        let shared = self.shared.clone();
        let begun = PendingCall::begin(to.py(), self.connecting(to, timeout)?, move |py, peer| {
            Peer::new(peer, shared).into_py_any(py)
        });
        Ok(begun?)
    }

    /// Like `accept`, for `await`. Raises `TimedOut`, `Closed` and `UsageError` as `accept` does.
    #[pyo3(signature = (timeout=None))]
    fn accept_async<'py>(slf: &Bound<'py, Self>, timeout: Option<f64>) -> PyResult<Bound<'py, PyAny>> {
        coroutine(slf, "accept", timeout)
    }

    fn _arm(&self, wakeup: &Wakeup) {
        self.shared.get().arm(&wakeup.wakeup);
    }

    fn _overdue(&self, py: Python<'_>, waited: f64) -> PyResult<Peer> {
        let endpoint = self.open(py)?;
        let peer = overdue(py, waited, |slice| endpoint.accept(slice))?;
        Ok(Peer::new(peer, self.shared.clone()))
    }

    /// Returns the next peer that has connected, or None, without waiting.
    ///
    /// Raises `Closed`, and `UsageError` if the endpoint does not listen.
    fn try_accept(&self, py: Python<'_>) -> PyResult<Option<Peer>> {
        let endpoint = self.open(py)?;
        if endpoint.listen_addresses().is_empty() {
            // `accept` returns the error that says that the endpoint does not listen.
            return endpoint.accept(Duration::ZERO).or_raise(py).map(|_| None);
        }
        let peer = py.detach(|| endpoint.try_accept()).transpose().or_raise(py)?;
        Ok(peer.map(|peer| Peer::new(peer, self.shared.clone())))
    }

    /// Registers the memory of a tensor, array or buffer on the host or a CUDA GPU, without a copy, and returns its
    /// `Region`. The region keeps the object alive until nothing can touch its memory any more.
    ///
    /// A PyTorch tensor must not be moved or resized while it is registered: `share_memory_()`, a torch.multiprocessing
    /// queue and `resize_` free the memory in use. Call `share_memory_()` first. The region detects a moved tensor at
    /// its next use, which is too late for transfers in flight. Nor may `ctypes.resize` be called for a registered object.
    ///
    /// Read-only memory can only be the source of sends and writes; `writable=True` refuses it here.
    ///
    /// Raises `UsageError` for an object without memory or without one contiguous run of it, `GpuError` if memory of a
    /// GPU cannot be used, and `Closed`.
    #[pyo3(signature = (memory, *, writable=None))]
    fn register(&self, memory: &Bound<'_, PyAny>, writable: Option<bool>) -> PyResult<Region> {
        let py = memory.py();
        let endpoint = self.open(py)?;
        let mut view = View::of("memory", memory)?;
        if writable == Some(true) && !view.writable {
            let why = "the object is read-only: register a writable copy, such as a bytearray";
            return Err(usage(py, "memory", why));
        }
        let (writable, framework) = (writable.unwrap_or(view.writable), view.framework);
        let watch = view.watch.take();
        let region = view.register(py, endpoint).or_raise(py)?;
        Ok(Region::new(self.shared.clone(), region, writable, false, framework, watch))
    }

    /// Allocates and registers `nbytes` zeroed bytes. `device` is "host", "cuda:N", or "sim:N" for a simulated GPU.
    ///
    /// Raises `UsageError` for another device, `LocalError` or `GpuError` if there is too little memory or no such GPU,
    /// and `Closed`.
    #[pyo3(signature = (nbytes, device="host"))]
    fn allocate(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = whole)] nbytes: i128,
        device: &str,
    ) -> PyResult<Region> {
        let endpoint = self.open(py)?;
        let nbytes = unsigned(py, "nbytes", nbytes)? as usize;
        let (kind, number) = device.split_once(':').unwrap_or((device, "0"));
        let index = number.parse::<u32>().map_err(|_| {
            usage(py, "device", format!("{device:?} has no GPU number: write it as in cuda:0"))
        })?;
        let region = py.detach(|| match kind {
            "host" => endpoint.alloc_host(nbytes),
            "cuda" => endpoint.alloc_cuda(index, nbytes),
            "sim" => endpoint.alloc_sim(index, nbytes),
            _ => Err(Error::invalid("device", format!("{device:?}; expected host, cuda:N or sim:N")).into()),
        });
        Ok(Region::new(self.shared.clone(), region.or_raise(py)?, true, true, Framework::Other, None))
    }

    /// Accepts no new peer, finishes what was posted to all peers, stops listening, and ends the threads: the port is free
    /// then. A second call does nothing. The endpoint is closed also when this raises.
    ///
    /// Raises `TimedOut` if a peer has not finished in `timeout` seconds, and `PeerLost` if a peer was lost or closed
    /// before it had finished.
    #[pyo3(signature = (timeout=5.0))]
    fn close(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let (ours, work) = self.closing(py, timeout)?;
        self.unless_not_started(ours, begin_aside(py, work))?.wait(py)
    }

    /// Like `close`, for `await`. Raises `TimedOut` and `PeerLost` as `close` does.
    #[pyo3(signature = (timeout=5.0))]
    fn close_async<'py>(slf: &Bound<'py, Self>, timeout: Option<f64>) -> PyResult<Bound<'py, PyAny>> {
        pending_call(slf, "_begin_close", &[timeout.into_bound_py_any(slf.py())?])
    }

    fn _begin_close(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<PendingCall> {
        let (ours, work) = self.closing(py, timeout)?;
        self.unless_not_started(ours, PendingCall::begin(py, work, |py, ()| Ok(py.None())))
    }

    fn __aenter__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        itself(slf)
    }

    #[pyo3(signature = (*exception))]
    fn __aexit__<'py>(
        slf: &Bound<'py, Self>,
        exception: &Bound<'py, PyTuple>,
    ) -> PyResult<Bound<'py, PyAny>> {
        leave(slf, exception)
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*exception))]
    fn __exit__(&self, py: Python<'_>, exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        left(py, exception, self.close(py, Some(CLOSE_SECONDS)))
    }

    fn __repr__(&self) -> String {
        let endpoint = self.shared.get();
        let state = match (self.closed(), self.listen_addresses()) {
            (true, _) => "closed".into(),
            (false, addresses) if addresses.is_empty() => "not listening".into(),
            (false, addresses) => format!("listening on {}", addresses.join(", ")),
        };
        format!("<ferrywire.Endpoint {} {state}>", endpoint.identity())
    }
}

/// Connects to the first address that works, in the part of `limit` that resolving the name leaves.
fn connect_to_any(
    endpoint: &ferrywire::Endpoint,
    address: Address,
    limit: Duration,
) -> ferrywire::Result<ferrywire::Peer> {
    let since = Instant::now();
    let addresses = address.resolve(limit)?;
    let left = limit.saturating_sub(since.elapsed());
    endpoint.connect_any(&addresses, left).map_err(|error| after(error.into(), limit))
}

type Setter = Box<dyn FnOnce(ferrywire::Builder) -> ferrywire::Builder>;

fn listening(object: &Bound<'_, PyAny>) -> PyResult<Address> {
    let address = Address::of("listen", object)?;
    address.ok_or_else(|| is_no("listen", object, "an address: 'host:port', ('host', port)"))
}

/// The shared secret of the argument `secret`, as text or bytes.
fn secret(object: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
    if let Ok(text) = object.cast::<PyString>() {
        return Ok(text.extract::<String>()?.into_bytes());
    }
    bytes(object)?.ok_or_else(|| is_no("secret", object, "text or bytes"))
}
