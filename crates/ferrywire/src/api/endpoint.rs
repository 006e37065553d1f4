//! An endpoint: built by [`Builder`], it listens, connects and registers memory.
//!
//! Invariant: the last clone dropped, or `close`, ends the endpoint's threads, except one in a call that never
//! returns.
//! Read next: `peer/`, the transfers with a connected peer.

mod builder;
mod connecting;
mod listening;

pub use builder::Builder;
pub use connecting::Connecting;

use crate::api::peer::Peer;
use crate::api::region::{Region, RegionHome};
use crate::api::running::Running;
use crate::api::wakeup::Wakeup;
use crate::config::{Config, Secret, Secrets};
use crate::control::{self, AcceptQueue, ConnectTarget, Control, Unfinished, advertised};
use crate::core::context::Context;
use crate::core::peer::PeerHandle;
use crate::core::trace::{self, Tracing};
use crate::core::worker::{LostChannels, Pass, Pauses, PolledBy, Worker, Workers};
use crate::error::{ConnectError, Error, RegisterError, Result};
use crate::payload::payload_backend::SharedBackend;
use crate::payload::plugin::Variable;
use ferrywire_memory::cuda::{CudaGpu, deferred_free};
use ferrywire_memory::host::HostBuffer;
use ferrywire_memory::sim::SimGpu;
use ferrywire_memory::{MemoryLocation, Owned, Owner};
use ferrywire_net::{SharedTransport, beyond_this_host};
use ferrywire_proto::Identity;
use ferrywire_proto::limits;
use ferrywire_proto::schedule;
use ferrywire_proto::stall_timer::StallTimer;
use ferrywire_sys::affinity;
use ferrywire_sys::poll::Poller;
use ferrywire_sys::random::random_bytes;
use std::any::Any;
use std::fmt;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// A GPU or host memory with its NICs, progress threads and peers. Clones share one endpoint. When the last
/// clone is dropped, the endpoint closes its peers in an orderly way, and waits for posted transfers while
/// they make progress.
#[derive(Clone)]
pub struct Endpoint {
    inner: Arc<Inner>,
}

struct Inner {
    running: Arc<Running>,
    control: Arc<Mutex<Control>>,
    home: Arc<dyn RegionHome>,
    listen_addresses: Vec<SocketAddr>,
    accept_queue: Arc<AcceptQueue>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// The outcome of the close, once it has finished.
    closed: Mutex<Option<Result<()>>>,
    closes: Condvar,
    /// The endpoint's share in the trace, until it is closed.
    tracing: Mutex<Option<Tracing>>,
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Endpoint({}, listening on {:?})", self.identity(), self.inner.listen_addresses)
    }
}

impl Endpoint {
    /// Returns a builder with default settings.
    pub fn builder() -> Builder {
        Builder::new()
    }

    /// For tests: detects when the endpoint is dropped completely.
    #[cfg(test)]
    pub(crate) fn downgrade(&self) -> std::sync::Weak<Context> {
        Arc::downgrade(&self.inner.running.workers.context)
    }

    /// For tests: the workers and the control side.
    #[cfg(test)]
    pub(crate) fn running(&self) -> &Arc<Running> {
        &self.inner.running
    }

    fn start(
        config: Config,
        transport: SharedTransport,
        backend: Option<SharedBackend>,
        no_backend: Option<String>,
    ) -> Result<Endpoint> {
        ferrywire_metrics::start().map_err(|error| Error::invalid("FERRYWIRE_METRICS", error.to_string()))?;
        let tracing = Mutex::new(trace::start()?);
        let identity = Identity(random_bytes().map_err(|error| Error::io("random bytes", &error))?);
        let listeners = listening::listen(&config, &*transport)?;
        let listen_addresses: Vec<SocketAddr> = listeners.iter().map(|listener| listener.local()).collect();
        let addresses = advertised(&config, &*transport, &listen_addresses)?;
        let threaded = config.threads > 0;
        let polled_by = match &backend {
            None => PolledBy::All,
            Some(backend) if backend.calls_may_block() => PolledBy::Thread,
            Some(_) => PolledBy::ThreadWithLanes,
        };
        let cores = affinity::cores_with_time();
        let spin = schedule::spin(cores, config.threads);
        let no_poller = |error: std::io::Error| Error::io("make a poller", &error);
        let poller = Arc::new(Poller::new().map_err(no_poller)?);
        let lost = Arc::new(LostChannels::new(poller.waker()));
        let workers: std::io::Result<Box<[_]>> = (0..config.threads.max(1))
            .map(|index| Worker::new(index, threaded, polled_by, spin, lost.clone()).map(Arc::new))
            .collect();
        let workers = workers.map_err(no_poller)?;
        let sleepers = workers.iter().map(|worker| worker.sleeper().clone()).collect();
        let context =
            Context::new(identity, config, transport, sleepers, poller.waker(), backend, no_backend);
        let workers = Arc::new(Workers::new(Arc::new(context), workers, lost));
        let accept_queue = Arc::new(AcceptQueue::default());
        let boot_id = affinity::boot_id().unwrap_or_default();
        let control =
            Control::new(workers.clone(), poller, listeners, addresses, boot_id, accept_queue.clone());
        let control = Arc::new(Mutex::new(control.map_err(no_poller)?));
        let running = Running::new(workers, control.clone());
        let home: Arc<dyn RegionHome> = running.clone();
        let (threads, closed, closes) = (Mutex::default(), Mutex::default(), Condvar::new());
        let inner = Inner {
            running,
            control,
            home,
            listen_addresses,
            accept_queue,
            threads,
            closed,
            closes,
            tracing,
        };
        if threaded {
            // If a thread does not start, dropping `inner` ends the others and the listeners.
            inner.spawn()?;
        }
        Ok(Endpoint { inner: Arc::new(inner) })
    }

    fn context(&self) -> &Context {
        self.inner.context()
    }

    /// The endpoint's random identity, new at each start.
    pub fn identity(&self) -> Identity {
        self.context().identity
    }

    /// Name of the payload's transport: `tcp`, `plugin`, `sim`, or the backend's.
    pub fn transport(&self) -> &'static str {
        self.context().payload_name()
    }

    /// The environment variables that the plugin was loaded with, and who set them. Empty without a plugin.
    pub fn effective_environment(&self) -> Vec<Variable> {
        let backend = self.context().backend.as_ref();
        backend.map(|backend| backend.environment().to_vec()).unwrap_or_default()
    }

    /// The configuration, with defaults applied.
    pub fn config(&self) -> &Config {
        &self.context().config
    }

    /// Replaces the shared secret for connections from now on; those that are open stay. `secret` is used to connect, and
    /// peers with `secret` or `also_accepted` are accepted.
    ///
    /// To exchange a secret without a gap, call this on every endpoint three times, each time on all before the next:
    /// `(old, Some(new))`, `(new, Some(old))`, `(new, None)`. An endpoint that starts meanwhile is built with both:
    /// [`Builder::also_accepted_secret`].
    ///
    /// A lost control connection is replaced by a new one. A peer that connected with [`ConnectTarget::secret`] proves that
    /// secret again: accept the old one for as long as such peers are open.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a secret that is too short.
    pub fn set_secret(&self, secret: impl Into<Vec<u8>>, also_accepted: Option<Vec<u8>>) -> Result<()> {
        let secrets =
            Secrets { current: Some(Secret::new(secret)), also_accepted: also_accepted.map(Secret::new) };
        secrets.check()?;
        self.context().set_secrets(secrets);
        Ok(())
    }

    /// Addresses on which the endpoint listens, with their actual ports.
    pub fn listen_addresses(&self) -> Vec<SocketAddr> {
        self.inner.listen_addresses.clone()
    }

    /// Time of the transport's clock.
    pub fn now(&self) -> Duration {
        self.context().transport.now()
    }

    /// Connects to an endpoint that listens on `address`. Blocks until the peer is connected.
    ///
    /// # Errors
    /// [`ConnectError::Stalled`] after `timeout`. [`ConnectError::Unreachable`] if no connection can be established,
    /// [`ConnectError::Refused`] if one end refused the other, [`ConnectError::Invalid`] without a secret beyond loopback,
    /// [`ConnectError::Closed`] if this endpoint is closed.
    pub fn connect(&self, address: SocketAddr, timeout: Duration) -> Result<Peer, ConnectError> {
        self.connect_in(ConnectTarget::new(address), timeout, timeout)
    }

    /// Connects if the address answers within `to_answer` and the peer is connected within `timeout`.
    fn connect_in(
        &self,
        target: ConnectTarget,
        to_answer: Duration,
        timeout: Duration,
    ) -> Result<Peer, ConnectError> {
        let connecting = self.start_connect_to(target)?;
        let mut result = connecting.wait(to_answer);
        let timed_out = |result: &Result<_, _>| matches!(result, Err(ConnectError::Stalled { .. }));
        if timed_out(&result) && to_answer < timeout && connecting.has_answered() {
            result = connecting.wait(timeout - to_answer);
        }
        if timed_out(&result) {
            return connecting.withdraw().unwrap_or(result);
        }
        result
    }

    /// Starts to connect to `address` without blocking. The attempt lasts as long as the result is kept.
    ///
    /// # Errors
    /// [`ConnectError::Closed`] if this endpoint is closed, [`ConnectError::Forked`] in a forked child. Other errors come
    /// with the result.
    pub fn start_connect(&self, address: SocketAddr) -> Result<Connecting, ConnectError> {
        self.start_connect_to(ConnectTarget::new(address))
    }

    /// Starts to connect to `target` without blocking; the other end has to prove that it is this target.
    ///
    /// # Errors
    /// [`ConnectError::Closed`] if this endpoint is closed, [`ConnectError::Forked`] in a forked child, [`ConnectError::Invalid`]
    /// for a short secret. Other errors come with the result.
    pub fn start_connect_to(&self, target: ConnectTarget) -> Result<Connecting, ConnectError> {
        self.check_process()?;
        let accept_queue = Arc::new(AcceptQueue::default());
        let context = self.context();
        if context.closing.load(Ordering::SeqCst) {
            return Err(ConnectError::Closed);
        }
        if let Some(secret) = &target.secret {
            secret.check()?;
        }
        let address = target.address;
        self.inner.running.with_control(|control| control.connect(target, accept_queue.clone()));
        Ok(Connecting::new(self.inner.running.clone(), accept_queue, address))
    }

    /// Connects to the endpoint that returned these [`metadata`](Endpoint::metadata), at the first of its
    /// addresses that answers. Each address gets an equal share of the remaining time, but at least
    /// [`limits::ANSWER_SHARE_MIN`] if so much remains.
    ///
    /// # Errors
    /// As for [`Endpoint::connect`]: the most informative error of the addresses at which another host can be reached, or,
    /// if all are addresses of this host, of all; [`ConnectError::Invalid`] for unusable metadata.
    pub fn connect_metadata(&self, metadata: &[u8], timeout: Duration) -> Result<Peer, ConnectError> {
        let (identity, addresses) = parse_metadata(metadata)?;
        let failed = |mut errors: Vec<(SocketAddr, ConnectError)>| {
            // If the endpoint is on another host, its loopback addresses have led to this one.
            let nics = self.context().transport.nics().unwrap_or_default();
            let tried: Vec<SocketAddr> = errors.iter().map(|(address, _)| *address).collect();
            let beyond = beyond_this_host(&nics, &tried);
            errors.retain(|(address, _)| beyond.contains(address));
            match ConnectError::most_informative(errors.into_iter().map(|(_, error)| error)) {
                Some(ConnectError::Stalled { .. }) => {
                    let what = format!("connecting to {identity} at {addresses:?}");
                    ConnectError::Stalled { what, peer: Some(identity.to_string()), waited: timeout }
                }
                Some(error) => error,
                None => {
                    let why = "the metadata contains no address: build the endpoint that made it with an address to \
                               listen on";
                    Error::invalid("metadata", why).into()
                }
            }
        };
        self.connect_first(&addresses, Some(identity), timeout, limits::ANSWER_SHARE_MIN).map_err(failed)
    }

    /// Connects to the first of these addresses of one endpoint that answers. Each address gets an equal
    /// share of the remaining time, but at least [`limits::NAME_SHARE_MIN`] if so much remains.
    ///
    /// # Errors
    /// As for [`Endpoint::connect`]: the most informative error of all addresses.
    pub fn connect_any(&self, addresses: &[SocketAddr], timeout: Duration) -> Result<Peer, ConnectError> {
        self.connect_first(addresses, None, timeout, limits::NAME_SHARE_MIN).map_err(|errors| {
            match ConnectError::most_informative(errors.into_iter().map(|(_, error)| error)) {
                Some(ConnectError::Stalled { .. }) if addresses.len() > 1 => {
                    let what = format!("connecting to any of {addresses:?}");
                    ConnectError::Stalled { what, peer: None, waited: timeout }
                }
                Some(error) => error,
                None => Error::invalid("addresses", "the list is empty: give at least one").into(),
            }
        })
    }

    /// Connects to the first address that works, or returns the error of each. With `identity`, only that
    /// endpoint is accepted.
    fn connect_first(
        &self,
        addresses: &[SocketAddr],
        identity: Option<Identity>,
        timeout: Duration,
        share_min: Duration,
    ) -> Result<Peer, Vec<(SocketAddr, ConnectError)>> {
        let (until, mut errors) = (self.now().saturating_add(timeout), Vec::new());
        for (tried, address) in addresses.iter().enumerate() {
            let left = until.saturating_sub(self.now());
            if left.is_zero() && tried > 0 {
                break;
            }
            let share = left / (addresses.len() - tried) as u32;
            let target = ConnectTarget { address: *address, identity, secret: None };
            match self.connect_in(target, share.max(share_min).min(left), left) {
                Ok(peer) => return Ok(peer),
                Err(
                    error @ (ConnectError::Closed | ConnectError::Forked { .. } | ConnectError::Internal(_)),
                ) => {
                    return Err(vec![(*address, error)]);
                }
                Err(error) => errors.push((*address, error)),
            }
        }
        Err(errors)
    }

    /// Identity and addresses of this endpoint as opaque bytes, for [`Endpoint::connect_metadata`] on another
    /// endpoint.
    pub fn metadata(&self) -> Vec<u8> {
        let mut out = vec![METADATA_VERSION];
        out.extend_from_slice(&self.identity().0);
        let mut addresses = self.reachable_addresses();
        // Every host has the loopback addresses, and on another host they would reach another endpoint: they
        // come last.
        addresses.sort_by_key(|address| address.ip().is_loopback());
        for address in addresses {
            let text = address.to_string();
            out.push(text.len() as u8);
            out.extend_from_slice(text.as_bytes());
        }
        out
    }

    /// Addresses at which peers can reach this endpoint: one for each NIC it listens on.
    pub fn reachable_addresses(&self) -> Vec<SocketAddr> {
        let context = self.context();
        advertised(&context.config, &*context.transport, &self.inner.listen_addresses)
            .map(|list| list.into_iter().map(|each| each.address).collect())
            .unwrap_or_default()
    }

    /// Waits for the next peer that connects.
    ///
    /// # Errors
    /// [`ConnectError::Stalled`] after `timeout`, [`ConnectError::Closed`] as soon as the endpoint is closed,
    /// [`ConnectError::Invalid`] if the endpoint does not listen.
    pub fn accept(&self, timeout: Duration) -> Result<Peer, ConnectError> {
        self.check_process()?;
        let context = self.context();
        if self.inner.listen_addresses.is_empty() {
            let why = "this endpoint does not listen: build it with an address";
            return Err(Error::invalid("accept", why).into());
        }
        if context.closing.load(Ordering::SeqCst) {
            return Err(ConnectError::Closed);
        }
        self.inner.next_peer(timeout).unwrap_or_else(|| {
            let what = format!("a peer to connect to {:?}", self.inner.listen_addresses);
            Err(ConnectError::Stalled { what, peer: None, waited: timeout })
        })
    }

    /// Returns the next connected peer, if there is one. An endpoint without threads is polled once.
    pub fn try_accept(&self) -> Option<Result<Peer, ConnectError>> {
        match self.check_process() {
            Ok(()) => self.inner.take_peer().or_else(|| {
                if self.context().is_caller_driven() {
                    self.inner.running.poll_once();
                    if let Some(peer) = self.inner.take_peer() {
                        return Some(peer);
                    }
                }
                let closed = self.context().closing.load(Ordering::SeqCst);
                closed.then_some(Err(ConnectError::Closed))
            }),
            Err(error) => Some(Err(error.into())),
        }
    }

    /// Whether this process built the endpoint. A forked child has neither its threads nor its connections: calls that can
    /// fail return the same error there, and others do nothing.
    ///
    /// # Errors
    /// [`Error::Forked`] in a forked child.
    pub fn check_process(&self) -> Result<()> {
        Ok(self.context().origin.check()?)
    }

    /// Makes `wakeup` readable once a peer has connected (see [`Endpoint::try_accept`]) or the endpoint is
    /// closed. If that is the case already, `wakeup` becomes readable at once.
    pub fn arm(&self, wakeup: &Wakeup) {
        if self.check_process().is_err() {
            return wakeup.wake();
        }
        self.inner.accept_queue.wake_at_arrival(wakeup.handle());
        if self.inner.context().closing.load(Ordering::SeqCst) {
            wakeup.wake();
        }
    }

    /// Registers a buffer. The region owns it.
    ///
    /// # Errors
    /// [`RegisterError::Forked`] in a forked child.
    pub fn register(&self, memory: impl Into<Vec<u8>>) -> Result<Region, RegisterError> {
        self.check_process()?;
        Ok(Region::owned(&self.inner.home, Owned::Vector(memory.into())))
    }

    /// Allocates and registers `bytes` zeroed, page-aligned bytes of host memory.
    ///
    /// # Errors
    /// [`RegisterError::Io`] if the system has too little memory.
    pub fn alloc_host(&self, bytes: usize) -> Result<Region, RegisterError> {
        self.check_process()?;
        Ok(Region::owned(&self.inner.home, Owned::Host(HostBuffer::zeroed(bytes)?)))
    }

    /// Allocates and registers `bytes` zeroed bytes on simulated GPU `index`, and opens the GPU if necessary.
    ///
    /// # Errors
    /// [`RegisterError::SimGpu`] if there is no such GPU, or it has too little memory.
    pub fn alloc_sim(&self, index: u32, bytes: usize) -> Result<Region, RegisterError> {
        self.check_process()?;
        let buffer = SimGpu::open(index)?.alloc(bytes, GPU_ALIGN_BYTES)?;
        Ok(Region::owned(&self.inner.home, Owned::Sim(buffer)))
    }

    /// Allocates and registers `bytes` zeroed bytes on CUDA GPU `index`, and opens the GPU if necessary.
    ///
    /// # Errors
    /// [`RegisterError::Cuda`] if the driver fails, or the GPU has too little memory.
    pub fn alloc_cuda(&self, index: u32, bytes: usize) -> Result<Region, RegisterError> {
        self.check_process()?;
        let buffer = CudaGpu::open(index)?.alloc(bytes, GPU_ALIGN_BYTES)?;
        self.context().prepared.prepare(MemoryLocation::Cuda(index));
        Ok(Region::owned(&self.inner.home, Owned::Cuda(buffer)))
    }

    /// Registers memory that the caller owns: host memory, or memory of a GPU (CUDA or simulated). The kind
    /// is detected from the address. Memory of CUDA GPUs may come from any library and be a part of a larger
    /// allocation.
    ///
    /// # Errors
    /// [`RegisterError::Cuda`] or [`RegisterError::SimGpu`] if the range begins in GPU memory and extends beyond its
    /// allocation, or if the driver fails or cannot be used. [`RegisterError::Invalid`] for a null pointer with a size.
    ///
    /// # Safety
    /// `bytes` bytes at `base` must stay allocated, and on the host readable and writable, until the
    /// region is deregistered or its last clone dropped, and nothing may rely on their values while peers
    /// can write to them.
    pub unsafe fn register_raw(&self, base: *mut u8, bytes: usize) -> Result<Region, RegisterError> {
        // SAFETY: promised by the caller of this function.
        unsafe { self.register_user(base, bytes, None) }
    }

    /// Registers memory as [`Endpoint::register_raw`] does, with an `owner` that keeps the memory alive.
    /// `owner` is dropped when no thread, NIC, GPU or peer can touch the memory any more: after the last
    /// clone of the region is dropped (block lists hold one) and all operations on it have ended. Dropping
    /// the region never waits for them.
    ///
    /// A dedicated thread of the endpoint (`ferrywire-own`) drops `owner`. That thread holds no lock, so the
    /// drop may block, and may take Python's GIL. In three cases the current thread drops `owner`: in
    /// [`Region::deregister`], when the region outlives the endpoint, and when this call fails. An endpoint
    /// without threads releases the memory only while the application calls [`Endpoint::progress`].
    ///
    /// # Errors
    /// As for [`Endpoint::register_raw`], and [`RegisterError::Io`] if the thread cannot be started.
    ///
    /// # Safety
    /// `bytes` bytes at `base` must stay allocated, and on the host readable and writable, until `owner` is dropped,
    /// and nothing may rely on their values while peers can write to them.
    pub unsafe fn register_with(
        &self,
        base: *mut u8,
        bytes: usize,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<Region, RegisterError> {
        self.check_process()?;
        self.inner.running.start_releaser()?;
        // SAFETY: promised by the caller of this function.
        unsafe { self.register_user(base, bytes, Some(owner)) }
    }

    /// # Safety
    /// The conditions of [`Endpoint::register_raw`] hold, or with an `owner` those of
    /// [`Endpoint::register_with`].
    unsafe fn register_user(
        &self,
        base: *mut u8,
        bytes: usize,
        owner: Option<Owner>,
    ) -> Result<Region, RegisterError> {
        self.check_process()?;
        if base.is_null() && bytes > 0 {
            return Err(Error::invalid("memory", "the pointer is null, and the size is not 0").into());
        }
        if isize::try_from(bytes).is_err() || base.addr().checked_add(bytes).is_none() {
            let why = format!("{bytes} bytes from {base:p} on are more than a process can have");
            return Err(Error::invalid("memory", why).into());
        }
        let location = MemoryLocation::of(base, bytes as u64)?;
        // SAFETY: promised by the caller; the memory location is that of the address.
        let region = unsafe { Region::user(&self.inner.home, base, bytes as u64, location, owner) }?;
        self.context().prepared.prepare(location);
        Ok(region)
    }

    /// Polls everything that no thread polls, once. Returns whether there was progress; while a GPU copies there may be
    /// none, although the next call may find the end of a copy. Only an endpoint without threads needs this.
    pub fn progress(&self) -> bool {
        self.check_process().is_ok() && self.inner.running.poll_once() == Pass::Worked
    }

    /// Number of peers, including those that are being connected or closed.
    pub fn peer_count(&self) -> usize {
        if self.check_process().is_err() {
            return 0;
        }
        self.inner.running.with_control(|control| control.peer_count())
    }

    /// Number of connections that were refused because the other end had a wrong secret, or none.
    pub fn auth_failures(&self) -> u64 {
        if self.check_process().is_err() {
            return 0;
        }
        self.inner.running.with_control(|control| control.auth_failures())
    }

    /// Accepts no new peer, finishes the transfers with all peers, stops listening, and ends the threads: the port is free
    /// then. A second call waits for the first one, up to its own timeout, and returns the first one's outcome. With devmem
    /// TCP the queues of NICs are given back. If another process holds a NIC's lock until the timeout (or for
    /// [`limits::NIC_END_MIN`] if that is longer), the next start gives them back, as after a kill. Buffers of transfers
    /// with a GPU are freed when all work of the GPU is done: if that takes longer than the timeout, after the close.
    ///
    /// # Errors
    /// [`Error::Stalled`] if a peer did not finish in time; [`Error::PeerLost`] if one was lost, or closed,
    /// before posted transfers had finished. Everything is closed in any case.
    pub fn close(&self, timeout: Duration) -> Result<()> {
        self.check_process()?;
        self.inner.close(Some(timeout))
    }

    /// Closes the endpoint as dropping it does, although other references are left, or waits for the close under way.
    ///
    /// # Errors
    /// As [`Endpoint::close`]; `Error::Usage` in a forked child of the endpoint's process.
    #[doc(hidden)]
    pub fn close_as_dropped(&self) -> Result<()> {
        self.check_process()?;
        self.inner.close(None)
    }
}

impl Inner {
    /// Starts the endpoint's threads. They stop when it is closed.
    fn spawn(&self) -> Result<()> {
        for worker in self.running.workers.iter() {
            // A running thread may touch memory. It keeps `running` alive, so that a request to release
            // memory finds all channels.
            let (worker, running) = (worker.clone(), self.running.clone());
            self.start_thread(format!("ferrywire-{}", worker.index), move || worker.run(running.context()))?;
        }
        let (running, control) = (self.running.clone(), self.control.clone());
        self.start_thread("ferrywire-ctl".into(), move || control::run(&running.workers, &control))
    }

    fn context(&self) -> &Context {
        self.running.context()
    }

    fn peer(&self, result: Result<PeerHandle>) -> Result<Peer, ConnectError> {
        Ok(Peer::new(self.running.clone(), result?))
    }

    /// Takes the next connected peer, if there is one.
    fn take_peer(&self) -> Option<Result<Peer, ConnectError>> {
        self.accept_queue.take().map(|result| self.peer(result))
    }

    fn next_peer(&self, limit: Duration) -> Option<Result<Peer, ConnectError>> {
        self.running.next_of(&self.accept_queue, limit).map(|result| self.peer(result))
    }

    fn start_thread(&self, name: String, body: impl FnOnce() + Send + 'static) -> Result<()> {
        let body = move || {
            body();
            ferrywire_metrics::thread_ends();
        };
        let thread = thread::Builder::new().name(name).spawn(body);
        let thread = thread.map_err(|error| Error::io("start a thread", &error))?;
        self.threads.lock().unwrap_or_else(PoisonError::into_inner).push(thread);
        Ok(())
    }

    /// Polls, or lets the threads poll, until no peer is left or `limit` is over. With `drains`, progress
    /// restarts the time.
    fn wait_idle(&self, limit: Duration, drains: bool) -> bool {
        let (running, context) = (&self.running, self.context());
        let (mut stall_timer, mut before, mut pauses) = (StallTimer::new(limit), None, Pauses::default());
        loop {
            let (idle, drained) = running.with_control(|control| (control.idle(), control.drained()));
            if idle {
                return true;
            }
            if drains && before.replace(drained) != Some(drained) {
                stall_timer = StallTimer::new(limit);
            }
            if stall_timer.is_over(context.transport.now()) {
                return false;
            }
            if context.is_caller_driven() {
                pauses.after(running.poll_once() == Pass::Worked)
            } else {
                thread::sleep(Duration::from_micros(500))
            }
        }
    }

    fn close(&self, timeout: Option<Duration>) -> Result<()> {
        if self.context().closing.swap(true, Ordering::SeqCst) {
            return self.closed_elsewhere(timeout.unwrap_or(limits::DRAIN_TIMEOUT));
        }
        let outcome = self.finish(timeout);
        *self.closed.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome.clone());
        self.closes.notify_all();
        outcome
    }

    /// Waits until another call has closed the endpoint.
    fn closed_elsewhere(&self, timeout: Duration) -> Result<()> {
        let mut stall_timer = StallTimer::new(timeout);
        let mut closed = self.closed.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(outcome) = &*closed {
                return outcome.clone();
            }
            if stall_timer.is_over(self.context().transport.now()) {
                return Err(not_closed(None, timeout));
            }
            // The transport's clock may differ from the host's, so wait in short steps.
            let waited = self.closes.wait_timeout(closed, Duration::from_millis(10));
            closed = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Closes everything. Without a timeout, posted transfers may take as long as they make progress.
    fn finish(&self, timeout: Option<Duration>) -> Result<()> {
        let running = &self.running;
        // Backends wait for other processes, so this uses the host's clock.
        let began = Instant::now();
        let left = || timeout.map_or(Duration::MAX, |timeout| timeout.saturating_sub(began.elapsed()));
        self.accept_queue.close();
        running.with_control(|control| match timeout {
            Some(timeout) => control.close_all(timeout),
            None => control.drain_all(),
        });
        let (drains, limit) = (timeout.is_none(), timeout.unwrap_or(limits::DRAIN_TIMEOUT));
        let mut is_idle = self.wait_idle(limit.saturating_add(limits::HEARTBEAT_INTERVAL), drains);
        if !is_idle {
            // A close always ends, whatever state the peers are in.
            running.with_control(|control| control.abort_all());
            is_idle = self.wait_idle(limits::HEARTBEAT_INTERVAL, false);
        }
        let unfinished = running.with_control(|control| control.unfinished());
        // The application no longer accepts these peers.
        self.accept_queue.clear();
        running.workers.iter().for_each(|worker| worker.stop());
        running.context().wake_control();
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for (index, thread) in threads.into_iter().enumerate() {
            // A thread in a call that does not return is left behind.
            let stuck = running.workers.get(index).is_some_and(|worker| worker.stuck());
            if is_idle && !stuck && thread.thread().id() != thread::current().id() {
                let _ = thread.join();
            }
        }
        // Frees what the progress threads deferred. Freeing waits for all work of a GPU.
        match timeout {
            Some(_) => deferred_free::clear_all_within(left()),
            None => deferred_free::clear_all(),
        }
        if let Some(backend) = &running.context().backend {
            backend.end(left());
        }
        drop(self.tracing.lock().unwrap_or_else(PoisonError::into_inner).take());
        match unfinished {
            None if is_idle => Ok(()),
            first => Err(not_closed(first, limit)),
        }
    }
}

/// The error of a close before all transfers had finished: that of the `first` such peer, if it has ended.
fn not_closed(first: Option<Unfinished>, timeout: Duration) -> Error {
    let all = "closing all peers";
    match first {
        Some(Unfinished { how, peer, timeout: of_peer }) => {
            // Another close may have ended the peer, and waited for another time.
            let timeout = of_peer.unwrap_or(timeout);
            control::ended_early(how, format!("{all}: {peer} has not finished"), Some(peer), timeout)
        }
        None => control::ended_early(Error::Closed, all.into(), None, timeout),
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.context().origin.is_elsewhere() {
            // In a forked child everything belongs to the parent. Even closing the copy of a descriptor would
            // change its pollers.
            std::mem::forget((self.running.clone(), self.control.clone(), self.accept_queue.clone()));
            return std::mem::forget(std::mem::take(
                self.threads.get_mut().unwrap_or_else(PoisonError::into_inner),
            ));
        }
        // The caller of `close` has the outcome already.
        if !self.context().closing.swap(true, Ordering::SeqCst)
            && let Err(error) = self.finish(None)
        {
            tracing::warn!(%error, "endpoint dropped before its peers had finished");
        }
    }
}

/// Alignment of GPU allocations: the page size with which drivers expose GPU memory to NICs.
const GPU_ALIGN_BYTES: usize = 64 << 10;

const METADATA_VERSION: u8 = 1;

fn parse_metadata(bytes: &[u8]) -> Result<(Identity, Vec<SocketAddr>)> {
    let wrong = |why: &str| Error::invalid("metadata", why);
    let (Some(&version), Some(identity)) = (bytes.first(), bytes.get(1..17)) else {
        return Err(wrong("too short: pass the bytes that another endpoint's metadata() returned"));
    };
    if version != METADATA_VERSION {
        return Err(wrong("made by another version of ferrywire: install one version on both ends"));
    }
    let mut name = [0; 16];
    name.copy_from_slice(identity);
    let mut rest = &bytes[17..];
    let mut addresses = Vec::new();
    while let Some((&len, more)) = rest.split_first() {
        let text = more.get(..usize::from(len)).ok_or_else(|| wrong("cut off"))?;
        let text = std::str::from_utf8(text).map_err(|_| wrong("not made by ferrywire"))?;
        addresses.push(text.parse().map_err(|_| wrong("not made by ferrywire"))?);
        rest = &more[usize::from(len)..];
    }
    Ok((Identity(name), addresses))
}
