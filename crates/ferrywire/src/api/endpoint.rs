//! What users hold first: an endpoint, built, listening, connected.
//!
//! Read next: `peer/`, for what can be done with a connected peer.

mod builder;
mod connecting;
mod listening;

pub use builder::Builder;
pub use connecting::Connecting;

use crate::api::peer::Peer;
use crate::api::region::{Region, RegionHome};
use crate::api::running::Running;
use crate::api::wakeup::Wakeup;
use crate::config::Config;
use crate::control::{self, AcceptQueue, ConnectTarget, Control, advertised};
use crate::core::context::Context;
use crate::core::peer::PeerHandle;
use crate::core::worker::{LostChannels, PolledBy, Worker, Workers};
use crate::error::{Error, Result};
use crate::payload::payload_backend::SharedBackend;
use crate::payload::plugin::Variable;
use ferrywire_memory::cuda::{CudaGpu, deferred_free};
use ferrywire_memory::host::HostBuffer;
use ferrywire_memory::sim::SimGpu;
use ferrywire_memory::{MemoryLocation, Owned, Owner};
use ferrywire_net::SharedTransport;
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

/// One end of transfers: memory, NICs, threads and peers. Clones share it; the last one dropped
/// closes its peers in an orderly way, and waits for what was posted to them as long as that gets on.
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
    /// How closing ended, once it has.
    closed: Mutex<Option<Result<()>>>,
    closes: Condvar,
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Endpoint({}, listening on {:?})", self.identity(), self.inner.listen_addresses)
    }
}

impl Endpoint {
    /// Starts to describe an endpoint.
    pub fn builder() -> Builder {
        Builder::new()
    }

    /// Tells tests when its last user is gone.
    #[cfg(test)]
    pub(crate) fn downgrade(&self) -> std::sync::Weak<Context> {
        Arc::downgrade(&self.inner.running.workers.context)
    }

    /// What runs it, for tests.
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
        let inner = Inner { running, control, home, listen_addresses, accept_queue, threads, closed, closes };
        if threaded {
            // Where one does not start the rest goes with the endpoint: threads, and who listens.
            inner.spawn()?;
        }
        Ok(Endpoint { inner: Arc::new(inner) })
    }

    fn context(&self) -> &Context {
        self.inner.context()
    }

    /// The endpoint's random name, new at each start.
    pub fn identity(&self) -> Identity {
        self.context().identity
    }

    /// How payload moves: `tcp`, `plugin`, `sim`.
    pub fn transport(&self) -> &'static str {
        self.context().payload_name()
    }

    /// The variables that the plugin was loaded with and who set them; empty without a plugin.
    pub fn effective_environment(&self) -> Vec<Variable> {
        let backend = self.context().backend.as_ref();
        backend.map(|backend| backend.environment().to_vec()).unwrap_or_default()
    }

    /// The configuration in force.
    pub fn config(&self) -> &Config {
        &self.context().config
    }

    /// The addresses listened on, with their real port.
    pub fn listen_addresses(&self) -> Vec<SocketAddr> {
        self.inner.listen_addresses.clone()
    }

    /// The transport's clock.
    pub fn now(&self) -> Duration {
        self.context().transport.now()
    }

    /// Connects to an endpoint that listens on `address`.
    pub fn connect(&self, address: SocketAddr, timeout: Duration) -> Result<Peer> {
        self.connect_in(ConnectTarget::new(address), timeout, timeout)
    }

    /// Connects if the address has answered within the first time, and the peer is up within the second.
    fn connect_in(&self, target: ConnectTarget, to_answer: Duration, timeout: Duration) -> Result<Peer> {
        let connecting = self.start_connect_to(target)?;
        let mut result = connecting.wait(to_answer);
        let timed_out = |result: &Result<Peer>| matches!(result, Err(Error::Stalled { .. }));
        if timed_out(&result) && to_answer < timeout && connecting.has_answered() {
            result = connecting.wait(timeout - to_answer);
        }
        if timed_out(&result) {
            return connecting.withdraw().unwrap_or(result);
        }
        result
    }

    /// Starts to connect, without waiting.
    pub fn start_connect(&self, address: SocketAddr) -> Result<Connecting> {
        self.start_connect_to(ConnectTarget::new(address))
    }

    /// Starts to connect, without waiting, to what proves to be this target.
    pub fn start_connect_to(&self, target: ConnectTarget) -> Result<Connecting> {
        self.check_origin()?;
        let accept_queue = Arc::new(AcceptQueue::default());
        let context = self.context();
        if context.closing.load(Ordering::SeqCst) {
            return Err(Error::Closed);
        }
        if let Some(secret) = &target.secret {
            secret.check()?;
        }
        let address = target.address;
        self.inner.running.with_control(|control| control.connect(target, accept_queue.clone()));
        Ok(Connecting { running: self.inner.running.clone(), accept_queue, address })
    }

    /// Connects to the endpoint that made this metadata, at the first of its addresses that answers. Each has its share
    /// of the time that is left.
    pub fn connect_metadata(&self, metadata: &[u8], timeout: Duration) -> Result<Peer> {
        let (identity, addresses) = parse_metadata(metadata)?;
        let tell = |mut errors: Vec<Error>| match errors.pop() {
            Some(Error::Stalled { .. }) => {
                let what = format!("connecting to {identity} at {addresses:?}");
                Error::Stalled { what, peer: Some(identity.to_string()), waited: timeout }
            }
            Some(error) => error,
            None => Error::invalid("metadata", "it names no address: that endpoint does not listen"),
        };
        self.connect_first(&addresses, Some(identity), timeout, limits::ANSWER_SHARE_MIN).map_err(tell)
    }

    /// Connects to the first of these addresses, all of one endpoint, at which it works. Each has its share of the time that is
    /// left, but 0.4 s at least, if there is so much.
    ///
    /// # Errors
    /// Of those of the addresses the one that tells most.
    pub fn connect_any(&self, addresses: &[SocketAddr], timeout: Duration) -> Result<Peer> {
        self.connect_first(addresses, None, timeout, limits::NAME_SHARE_MIN).map_err(|errors| {
            // Where one listens, or may, is more than where nobody does, or where no NIC leads.
            let tells = |error: &Error| match error {
                Error::NoUsableNic { .. } => 0,
                Error::Unreachable { .. } => 1,
                Error::Invalid { .. } => 2,
                Error::Stalled { .. } => 3,
                _ => 4,
            };
            match errors.into_iter().rev().max_by_key(tells) {
                Some(Error::Stalled { .. }) if addresses.len() > 1 => {
                    let what = format!("connecting to any of {addresses:?}");
                    Error::Stalled { what, peer: None, waited: timeout }
                }
                Some(error) => error,
                None => Error::invalid("addresses", "none is given"),
            }
        })
    }

    /// The first that works, or why each did not; of one endpoint alone where it is named.
    fn connect_first(
        &self,
        addresses: &[SocketAddr],
        identity: Option<Identity>,
        timeout: Duration,
        share_min: Duration,
    ) -> std::result::Result<Peer, Vec<Error>> {
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
                Err(error @ (Error::Closed | Error::Forked { .. } | Error::Internal(_))) => {
                    return Err(vec![error]);
                }
                Err(error) => errors.push(error),
            }
        }
        Err(errors)
    }

    /// Identity and addresses as opaque bytes, for [`Endpoint::connect_metadata`] of somebody else.
    pub fn metadata(&self) -> Vec<u8> {
        let mut out = vec![METADATA_VERSION];
        out.extend_from_slice(&self.identity().0);
        let mut addresses = self.reachable_addresses();
        // Every host has those of its loopback: another one would meet somebody else there.
        addresses.sort_by_key(|address| address.ip().is_loopback());
        for address in addresses {
            let text = address.to_string();
            out.push(text.len() as u8);
            out.extend_from_slice(text.as_bytes());
        }
        out
    }

    /// The addresses under which peers can reach this endpoint: one for each NIC it listens on.
    pub fn reachable_addresses(&self) -> Vec<SocketAddr> {
        let context = self.context();
        advertised(&context.config, &*context.transport, &self.inner.listen_addresses)
            .map(|list| list.into_iter().map(|each| each.address).collect())
            .unwrap_or_default()
    }

    /// Waits for the next peer that connects.
    ///
    /// # Errors
    /// [`Error::Closed`] as soon as the endpoint is closed; [`Error::Stalled`].
    pub fn accept(&self, timeout: Duration) -> Result<Peer> {
        self.check_origin()?;
        let context = self.context();
        if self.inner.listen_addresses.is_empty() {
            return Err(Error::invalid("accept", "this endpoint does not listen: build it with an address"));
        }
        if context.closing.load(Ordering::SeqCst) {
            return Err(Error::Closed);
        }
        self.inner.next_peer(timeout).unwrap_or_else(|| {
            let what = format!("a peer to connect to {:?}", self.inner.listen_addresses);
            Err(Error::Stalled { what, peer: None, waited: timeout })
        })
    }

    /// The next peer that has connected, if there is one. In an endpoint without threads everything is turned once.
    pub fn try_accept(&self) -> Option<Result<Peer>> {
        match self.check_origin() {
            Ok(()) => self.inner.take_peer().or_else(|| {
                if self.context().is_caller_driven() {
                    self.inner.running.poll_once();
                    if let Some(peer) = self.inner.take_peer() {
                        return Some(peer);
                    }
                }
                let closed = self.context().closing.load(Ordering::SeqCst);
                closed.then_some(Err(Error::Closed))
            }),
            Err(error) => Some(Err(error)),
        }
    }

    /// In a forked child nothing here works: neither threads nor connections are there.
    fn check_origin(&self) -> Result<()> {
        Ok(self.context().origin.check()?)
    }

    /// Makes `wakeup` readable once there is a peer to [`accept`](Endpoint::try_accept), or the endpoint is closed.
    /// Also when it already is so.
    pub fn arm(&self, wakeup: &Wakeup) {
        if self.check_origin().is_err() {
            return wakeup.wake();
        }
        self.inner.accept_queue.wake_at_arrival(wakeup.handle());
        if self.inner.context().closing.load(Ordering::SeqCst) {
            wakeup.wake();
        }
    }

    /// Registers a buffer, which the region then owns.
    pub fn register(&self, memory: impl Into<Vec<u8>>) -> Result<Region> {
        self.check_origin()?;
        Ok(Region::owned(&self.inner.home, Owned::Vector(memory.into())))
    }

    /// Allocates and registers `bytes` zeroed, page-aligned bytes.
    pub fn alloc_host(&self, bytes: usize) -> Result<Region> {
        self.check_origin()?;
        Ok(Region::owned(&self.inner.home, Owned::Host(HostBuffer::zeroed(bytes)?)))
    }

    /// Allocates and registers `bytes` zeroed bytes on a simulated GPU, which is opened if it is not.
    ///
    /// # Errors
    /// [`Error::SimGpu`].
    pub fn alloc_sim(&self, index: u32, bytes: usize) -> Result<Region> {
        self.check_origin()?;
        let buffer = SimGpu::open(index)?.alloc(bytes, GPU_ALIGN_BYTES)?;
        Ok(Region::owned(&self.inner.home, Owned::Sim(buffer)))
    }

    /// Allocates and registers `bytes` zeroed bytes on a CUDA GPU, which is opened if it is not.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn alloc_cuda(&self, index: u32, bytes: usize) -> Result<Region> {
        self.check_origin()?;
        let buffer = CudaGpu::open(index)?.alloc(bytes, GPU_ALIGN_BYTES)?;
        self.context().prepared.prepare(MemoryLocation::Cuda(index));
        Ok(Region::owned(&self.inner.home, Owned::Cuda(buffer)))
    }

    /// Registers memory that the caller keeps: of the host, or of a GPU (CUDA or simulated), whose addresses
    /// are recognised. Memory of CUDA GPUs may come from any library, and be a part of a larger allocation.
    ///
    /// # Errors
    /// [`Error::Cuda`] or [`Error::SimGpu`] when the range begins in memory of a GPU and leaves it.
    ///
    /// # Safety
    /// `bytes` bytes at `base` must stay allocated, and on the host readable and writable, until the
    /// region is deregistered or its last clone dropped, and nothing may rely on their values while peers
    /// can write to them.
    pub unsafe fn register_raw(&self, base: *mut u8, bytes: usize) -> Result<Region> {
        // SAFETY: the caller's promise.
        unsafe { self.register_user(base, bytes, None) }
    }

    /// Likewise, with whoever keeps the memory alive: `owner` is dropped when no thread, NIC, GPU or peer can touch the
    /// memory any more. That is after the last clone of the region is gone (block lists hold one) and all operations
    /// on it have ended; to drop the region never waits for them.
    ///
    /// It is dropped by a thread of the endpoint's own that does nothing else (`ferrywire-own`), holding no lock, so
    /// that it may block: Python's GIL can be taken there. [`Region::deregister`] drops it on the thread that calls;
    /// so does the end of the region after that of the endpoint, and an error here. In an endpoint without threads
    /// somebody has to call [`Endpoint::progress`] for the memory to be let go.
    ///
    /// # Errors
    /// As [`Endpoint::register_raw`], and [`Error::Io`] when the thread cannot be started.
    ///
    /// # Safety
    /// `bytes` bytes at `base` must stay allocated, and on the host readable and writable, until `owner` is dropped,
    /// and nothing may rely on their values while peers can write to them.
    pub unsafe fn register_with(
        &self,
        base: *mut u8,
        bytes: usize,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<Region> {
        self.check_origin()?;
        self.inner.running.start_releaser()?;
        // SAFETY: the caller's promise.
        unsafe { self.register_user(base, bytes, Some(owner)) }
    }

    /// # Safety
    /// As of [`Endpoint::register_raw`] and [`Endpoint::register_with`].
    unsafe fn register_user(&self, base: *mut u8, bytes: usize, owner: Option<Owner>) -> Result<Region> {
        self.check_origin()?;
        if base.is_null() && bytes > 0 {
            return Err(Error::invalid("memory", "a null pointer with a size"));
        }
        let location = MemoryLocation::of(base, bytes as u64)?;
        // SAFETY: the caller's promise; the place is what the address says.
        let region = unsafe { Region::user(&self.inner.home, base, bytes as u64, location, owner) }?;
        self.context().prepared.prepare(location);
        Ok(region)
    }

    /// Turns everything once that no thread turns; true if anything happened. Only needed in an
    /// endpoint without threads.
    pub fn progress(&self) -> bool {
        self.check_origin().is_ok() && self.inner.running.poll_once()
    }

    /// Number of peers, those that are being set up or closed included.
    pub fn peer_count(&self) -> usize {
        if self.check_origin().is_err() {
            return 0;
        }
        self.inner.running.with_control(|control| control.peer_count())
    }

    /// How many connections were refused because whoever made them held another secret, or none.
    pub fn auth_failures(&self) -> u64 {
        if self.check_origin().is_err() {
            return 0;
        }
        self.inner.running.with_control(|control| control.auth_failures())
    }

    /// Stops listening, finishes with all peers, and ends the threads. A second call waits for the first, as long as its
    /// own timeout, and says the same. With devmem TCP it gives the queues of NICs back: where another run holds a NIC
    /// until the timeout (or for [`limits::NIC_END_MIN`]), that is left to the next start, as after a kill.
    ///
    /// # Errors
    /// [`Error::Stalled`] when a peer did not finish in time, [`Error::PeerLost`] when one was lost, or closed, before
    /// what was posted to it had finished; all is closed nevertheless.
    pub fn close(&self, timeout: Duration) -> Result<()> {
        self.check_origin()?;
        self.inner.close(timeout)
    }
}

impl Inner {
    /// Starts its threads. They stop when it is closed.
    fn spawn(&self) -> Result<()> {
        for worker in self.running.workers.iter() {
            // While a thread runs it may touch memory: what asks whether anything does finds all of it there.
            let (worker, running) = (worker.clone(), self.running.clone());
            self.start_thread(format!("ferrywire-{}", worker.index), move || worker.run(running.context()))?;
        }
        let (running, control) = (self.running.clone(), self.control.clone());
        self.start_thread("ferrywire-ctl".into(), move || control::run(&running.workers, &control))
    }

    fn context(&self) -> &Context {
        self.running.context()
    }

    fn peer(&self, result: Result<PeerHandle>) -> Result<Peer> {
        result.map(|handle| Peer::new(self.running.clone(), handle))
    }

    /// The next peer that has connected, if one has.
    fn take_peer(&self) -> Option<Result<Peer>> {
        self.accept_queue.take().map(|result| self.peer(result))
    }

    fn next_peer(&self, limit: Duration) -> Option<Result<Peer>> {
        self.running.next_of(&self.accept_queue, limit).map(|result| self.peer(result))
    }

    fn start_thread(&self, name: String, body: impl FnOnce() + Send + 'static) -> Result<()> {
        let thread = thread::Builder::new().name(name).spawn(body);
        let thread = thread.map_err(|error| Error::io("start a thread", &error))?;
        self.threads.lock().unwrap_or_else(PoisonError::into_inner).push(thread);
        Ok(())
    }

    /// Turns, or lets turn, until no peer is left or so long has passed; where `drains`, without anything getting on.
    fn wait_idle(&self, limit: Duration, drains: bool) -> bool {
        let (running, context) = (&self.running, self.context());
        let (mut patience, mut before) = (StallTimer::new(limit), None);
        loop {
            let (idle, drained) = running.with_control(|control| (control.idle(), control.drained()));
            if idle {
                return true;
            }
            if drains && before.replace(drained) != Some(drained) {
                patience = StallTimer::new(limit);
            }
            if patience.is_over(context.transport.now()) {
                return false;
            }
            if context.is_caller_driven() {
                _ = running.poll_once()
            } else {
                thread::sleep(Duration::from_micros(500))
            }
        }
    }

    fn close(&self, timeout: Duration) -> Result<()> {
        if self.context().closing.swap(true, Ordering::SeqCst) {
            return self.closed_elsewhere(timeout);
        }
        let outcome = self.finish(Some(timeout));
        *self.closed.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome.clone());
        self.closes.notify_all();
        outcome
    }

    /// Waits until another call has closed it.
    fn closed_elsewhere(&self, timeout: Duration) -> Result<()> {
        let mut patience = StallTimer::new(timeout);
        let mut closed = self.closed.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(outcome) = &*closed {
                return outcome.clone();
            }
            if patience.is_over(self.context().transport.now()) {
                return Err(not_closed(Error::Closed, timeout));
            }
            // The transport's clock need not be the host's.
            let waited = self.closes.wait_timeout(closed, Duration::from_millis(10));
            closed = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Without a timeout what was posted is finished as long as it gets on.
    fn finish(&self, timeout: Option<Duration>) -> Result<()> {
        let running = &self.running;
        // The host's clock: so long it takes others to be done with a NIC.
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
            // Nothing may wait for this endpoint for ever, however its peers are.
            running.with_control(|control| control.abort_all());
            is_idle = self.wait_idle(limits::HEARTBEAT_INTERVAL, false);
        }
        let unfinished = running.with_control(|control| control.unfinished());
        // No caller accepts them any more.
        self.accept_queue.clear();
        running.workers.iter().for_each(|worker| worker.stop());
        running.context().wake_control();
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for (index, thread) in threads.into_iter().enumerate() {
            // A thread that is in a call that does not return is left behind.
            let stuck = running.workers.get(index).is_some_and(|worker| worker.stuck());
            if is_idle && !stuck && thread.thread().id() != thread::current().id() {
                let _ = thread.join();
            }
        }
        // What the threads left to somebody who may wait.
        deferred_free::clear();
        if let Some(backend) = &running.context().backend {
            backend.end(left());
        }
        match unfinished {
            None if is_idle => Ok(()),
            how => Err(not_closed(how.unwrap_or(Error::Closed), limit)),
        }
    }
}

/// What whoever closes an endpoint is told when a peer of it ended like this before all was finished.
fn not_closed(how: Error, timeout: Duration) -> Error {
    control::ended_early(how, "closing all peers".into(), None, timeout)
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.context().origin.is_elsewhere() {
            // All of it is the parent's. Even to close a copy of a descriptor would tell its pollers.
            std::mem::forget((self.running.clone(), self.control.clone(), self.accept_queue.clone()));
            return std::mem::forget(std::mem::take(
                self.threads.get_mut().unwrap_or_else(PoisonError::into_inner),
            ));
        }
        // A caller that has closed the endpoint was told how that ended.
        if !self.context().closing.swap(true, Ordering::SeqCst)
            && let Err(error) = self.finish(None)
        {
            tracing::warn!(%error, "an endpoint was dropped before its peers had finished");
        }
    }
}

/// Alignment of memory that we allocate on a GPU: the page in which drivers hand it to NICs.
const GPU_ALIGN_BYTES: usize = 64 << 10;

const METADATA_VERSION: u8 = 1;

fn parse_metadata(bytes: &[u8]) -> Result<(Identity, Vec<SocketAddr>)> {
    let wrong = |why: &str| Error::invalid("metadata", why);
    let (Some(&version), Some(identity)) = (bytes.first(), bytes.get(1..17)) else {
        return Err(wrong("too short"));
    };
    if version != METADATA_VERSION {
        return Err(wrong("made by another version of ferrywire"));
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
