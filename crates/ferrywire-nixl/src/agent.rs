//! One NIXL agent: an endpoint that listens, the remote agents that were loaded, and a thread that accepts and
//! connects.
//!
//! Invariant: a forked child touches neither the thread nor the connections of its parent.
//! Read next: `remote.rs`, `transfer.rs`.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ferrywire::{Endpoint, Wakeup};
use ferrywire_memory::cuda::CudaGpu;
use ferrywire_net::Transport;
use ferrywire_net::tcp::TcpTransport;

use crate::connection_info::ConnectionInfo;
use crate::dialing::Dialing;
use crate::inbox::Inbox;
use crate::log;
use crate::memory::{Memory, is_of_kind};
use crate::notification::{self, Delivered};
use crate::remote::Remote;
use crate::settings::Settings;
use crate::status::Status;
use crate::transfer::{Context, Descriptor, Operation, Transfer, Transfers};

/// Size in bytes of a secret that an agent generates.
const SECRET_BYTES: usize = 32;
/// Longest time for which an agent that is destroyed waits until it is connected to those that it has notifications for,
/// and then until its sent messages have arrived.
const CLOSING_TIMEOUT: Duration = Duration::from_secs(1);
/// Pause between two looks at whether notifications wait for a connection.
const CLOSING_PAUSE: Duration = Duration::from_millis(1);
/// Longest sleep of the service thread without an event.
const IDLE: Duration = Duration::from_secs(600);

/// Address of the transfer that this process asked for last; 0 after a post and after a request for notifications.
static ASKED: AtomicUsize = AtomicUsize::new(0);

pub struct Agent {
    shared: Arc<Shared>,
    /// The agent's [`ConnectionInfo`], serialized.
    info: Vec<u8>,
    has_gpus: bool,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    name: String,
    /// The agent's name as notifications carry it.
    sender: Arc<[u8]>,
    endpoint: Endpoint,
    remotes: RwLock<HashMap<String, Arc<Remote>>>,
    inbox: Mutex<Inbox>,
    transfers: Transfers,
    connect_timeout: Duration,
    /// Whether all agents share the secret from the environment.
    secret_is_shared: bool,
    wakeup: Wakeup,
    ending: AtomicBool,
    /// The process that created the agent: a forked child has none of its threads.
    process: u32,
}

impl Agent {
    /// Opens the agent's endpoint with NIXL's parameters of the backend.
    ///
    /// # Errors
    /// One line of text that says what failed.
    pub fn new(name: &str, backend: &str, parameters: &[(String, String)]) -> Result<Agent, String> {
        if name.len() > notification::NAME_BYTES_MAX {
            return Err(format!(
                "the agent's name has {} bytes, at most {} are allowed",
                name.len(),
                notification::NAME_BYTES_MAX
            ));
        }
        let (settings, unknown) = Settings::new(parameters, |name| std::env::var_os(name))?;
        if !unknown.is_empty() {
            log::announce_once(format_args!(
                "parameters of another backend are ignored: {}",
                unknown.join(", ")
            ));
        }
        let secret = match &settings.secret {
            Some(secret) => secret.clone(),
            None => random_secret()
                .map_err(|error| format!("the operating system gave no random bytes: {error}"))?,
        };
        let endpoint = listen(name, &settings, &secret)?;
        let mut addresses = endpoint.reachable_addresses();
        // Loopback addresses come last, because on another host they lead to another process.
        addresses.sort_by_key(|address| address.ip().is_loopback());
        if addresses.is_empty() {
            return Err("this host has no address that remote agents could reach".into());
        }
        let own = if settings.secret.is_some() { Vec::new() } else { secret };
        let info = ConnectionInfo { identity: endpoint.identity(), secret: own, addresses };
        let has_gpus = CudaGpu::count().is_ok_and(|count| count > 0);
        announce(name, backend, &info, has_gpus);
        let wakeup = Wakeup::new().map_err(|error| error.to_string())?;
        let shared = Arc::new(Shared {
            name: name.to_owned(),
            sender: name.as_bytes().into(),
            endpoint,
            remotes: RwLock::default(),
            inbox: Mutex::default(),
            transfers: Transfers::default(),
            connect_timeout: settings.connect_timeout,
            secret_is_shared: settings.secret.is_some(),
            wakeup,
            ending: AtomicBool::new(false),
            process: std::process::id(),
        });
        let of_thread = shared.clone();
        let thread = std::thread::Builder::new().name("ferrywire-nixl".into()).spawn(move || {
            let _end = EndOfService(&of_thread);
            of_thread.run();
        });
        let thread = thread.map_err(|error| format!("cannot start the agent's service thread: {error}"))?;
        Ok(Agent { shared, info: info.to_bytes(), has_gpus, thread: Mutex::new(Some(thread)) })
    }

    pub fn has_gpus(&self) -> bool {
        self.has_gpus
    }

    pub fn connection_info(&self) -> &[u8] {
        &self.info
    }

    /// Registers `bytes` bytes at `address` as NIXL's memory kind `kind`.
    ///
    /// # Safety
    /// The memory stays allocated until it is deregistered.
    pub unsafe fn register(&self, address: u64, bytes: u64, kind: u32) -> Result<Memory, Status> {
        self.check_process()?;
        // SAFETY: the caller promises that the memory stays allocated.
        let region = unsafe { self.shared.endpoint.register_raw(address as *mut u8, bytes as usize) };
        let region = region.map_err(|error| {
            tracing::warn!(%error, "cannot register {bytes} bytes at {address:#x}");
            Status::of(error)
        })?;
        if bytes > 0 && !is_of_kind(region.location(), kind) {
            tracing::warn!(
                "cannot register {bytes} bytes at {address:#x}: it is {}, not the kind that NIXL names",
                region.location()
            );
            return Err(Status::INVALID_PARAMETER);
        }
        Ok(Memory::Local { region, base: address })
    }

    pub fn deregister(&self, memory: &Memory) -> Status {
        if let Err(forked) = self.check_process() {
            return forked;
        }
        let Memory::Local { region, .. } = memory else { return Status::INVALID_PARAMETER };
        // Cancelled transfers end immediately, whatever state their peers are in.
        self.shared.transfers.cancel_those_of(memory);
        match region.clone().deregister() {
            Ok(()) => Status::SUCCESS,
            Err(error) => {
                tracing::error!(%error, "cannot deregister memory: it may still be in use");
                Status::BACKEND
            }
        }
    }

    /// Reads another agent's registration.
    ///
    /// # Errors
    /// Bytes that another version of ferrywire made, or that belong to another agent.
    pub fn load_remote(&self, peer: &str, blob: &[u8]) -> Result<Memory, Status> {
        self.check_process()?;
        let memory = Memory::from_public_data(blob).map_err(|why| {
            tracing::warn!(agent = peer, "cannot use a registration of the remote agent: {why}");
            Status::MISMATCH
        })?;
        match (&memory, self.shared.remote(peer)) {
            (Memory::Remote { region, .. }, Some(remote)) if region.owner() != remote.identity() => {
                tracing::warn!(
                    agent = peer,
                    "the registration and the connection information of the remote agent come from different processes"
                );
                Err(Status::MISMATCH)
            }
            _ => Ok(memory),
        }
    }

    pub fn load_connection_info(&self, peer: &str, info: &[u8]) -> Status {
        if let Err(forked) = self.check_process() {
            return forked;
        }
        let info = match ConnectionInfo::from_bytes(info) {
            Ok(info) if info.secret.is_empty() && !self.shared.secret_is_shared => {
                Err("the remote agent has its secret from FERRYWIRE_SECRET: set the same secret here".into())
            }
            other => other,
        };
        match info {
            Err(why) => {
                log::announce_once(format_args!(
                    "connection information of agent {peer} cannot be used: {why}"
                ));
                Status::MISMATCH
            }
            Ok(_) if self.shared.ending.load(Ordering::SeqCst) => Status::BACKEND,
            Ok(info) => {
                let remote = Arc::new(Remote::new(peer.to_owned(), info));
                let mut remotes = self.shared.remotes.write().unwrap_or_else(PoisonError::into_inner);
                let before = remotes.insert(peer.to_owned(), remote);
                drop(remotes);
                before.into_iter().for_each(|remote| remote.remove());
                Status::SUCCESS
            }
        }
    }

    pub fn connect(&self, peer: &str) -> Status {
        if let Err(forked) = self.check_process() {
            return forked;
        }
        if peer == self.shared.name {
            return Status::SUCCESS;
        }
        match self.shared.remote(peer) {
            None => Status::NOT_FOUND,
            Some(remote) => {
                remote.connect(self.shared.connect_timeout, &self.shared.wakeup);
                Status::SUCCESS
            }
        }
    }

    pub fn disconnect(&self, peer: &str) -> Status {
        if let Err(forked) = self.check_process() {
            return forked;
        }
        let mut remotes = self.shared.remotes.write().unwrap_or_else(PoisonError::into_inner);
        let removed = remotes.remove(peer);
        drop(remotes);
        match removed {
            Some(remote) => {
                remote.remove();
                Status::SUCCESS
            }
            None if peer == self.shared.name => Status::SUCCESS,
            None => Status::NOT_FOUND,
        }
    }

    /// Prepares a transfer from NIXL's descriptor lists.
    ///
    /// # Safety
    /// The metadata of each descriptor is null or a live object of the shim.
    pub unsafe fn prepare(
        &self,
        operation: Operation,
        local: &[Descriptor],
        remote: &[Descriptor],
        peer: &str,
    ) -> Result<Arc<Transfer>, Status> {
        self.check_process()?;
        let sender = self.shared.sender.clone();
        if peer == self.shared.name {
            // SAFETY: the caller promises that the metadata is null or live.
            return unsafe { Transfer::within(operation, local, remote, sender) }.map(Arc::new);
        }
        let known = self.shared.remote(peer).ok_or(Status::NOT_FOUND)?;
        // SAFETY: the caller promises that the metadata is null or live.
        let transfer = Arc::new(unsafe { Transfer::with_remote(operation, local, remote, known, sender) }?);
        self.shared.transfers.add(&transfer);
        Ok(transfer)
    }

    pub fn post(&self, transfer: &Arc<Transfer>, notification: Option<Vec<u8>>) -> Status {
        if let Err(forked) = self.check_process() {
            return forked;
        }
        ASKED.store(0, Ordering::Relaxed);
        // A longer one could not be sent once all bytes have been moved.
        if notification.as_ref().is_some_and(|message| message.len() > notification::MESSAGE_BYTES_MAX) {
            return Status::INVALID_PARAMETER;
        }
        let own = notification.clone().filter(|_| transfer.is_within());
        let status = transfer.post(notification, &self.context());
        if status == Status::SUCCESS
            && let Some(message) = own
        {
            self.shared.inbox().put((self.shared.sender.to_vec(), message));
        }
        status
    }

    pub fn check(&self, transfer: &Arc<Transfer>) -> Status {
        if let Err(forked) = self.check_process() {
            return forked;
        }
        let one = Arc::as_ptr(transfer).addr();
        let alone = ASKED.swap(one, Ordering::Relaxed) == one;
        transfer.check(&self.context(), alone)
    }

    /// Delivers all notifications that have arrived. A notification that `deliver` refuses is put back.
    pub fn notifications(&self, mut deliver: impl FnMut(&Delivered) -> bool) -> Status {
        if let Err(forked) = self.check_process() {
            return forked;
        }
        ASKED.store(0, Ordering::Relaxed);
        let mut inbox = self.shared.inbox();
        inbox.collect();
        while let Some(notification) = inbox.take() {
            if !deliver(&notification) {
                inbox.put_back(notification);
                return Status::BACKEND;
            }
        }
        Status::SUCCESS
    }

    pub fn notify(&self, peer: &str, message: &[u8]) -> Status {
        if let Err(forked) = self.check_process() {
            return forked;
        }
        if peer == self.shared.name {
            self.shared.inbox().put((self.shared.sender.to_vec(), message.to_vec()));
            return Status::SUCCESS;
        }
        let shared = &self.shared;
        match shared.remote(peer) {
            None => Status::NOT_FOUND,
            Some(remote) => {
                remote.notify(&shared.sender, message, None, shared.connect_timeout, &shared.wakeup)
            }
        }
    }

    /// Fails calls in a forked child: it has no service thread, and another thread of the parent may have held a lock.
    fn check_process(&self) -> Result<(), Status> {
        self.shared.endpoint.check_process().map_err(|error| {
            log::announce_in_child(format_args!("agent {}: {error}", self.shared.name));
            Status::of(error)
        })
    }

    fn context(&self) -> Context<'_> {
        Context { connect_timeout: self.shared.connect_timeout, wakeup: &self.shared.wakeup }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let shared = &self.shared;
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if shared.process != std::process::id() {
            // The forked child does not touch the parent's thread and connections.
            return std::mem::forget((thread, self.shared.clone()));
        }
        // The service thread connects, and sends what waits for the connection.
        let until = Instant::now() + CLOSING_TIMEOUT;
        while shared.has_waiting_notifications() && Instant::now() < until {
            thread::sleep(CLOSING_PAUSE);
        }
        shared.ending.store(true, Ordering::SeqCst);
        shared.wakeup.wake();
        // The thread has been told to end; a panic has been logged already.
        thread.into_iter().for_each(|thread| drop(thread.join()));
        if let Err(error) = shared.endpoint.close(CLOSING_TIMEOUT) {
            tracing::info!(%error, "remote agent ended before all its data arrived");
        }
        let remotes = std::mem::take(&mut *shared.remotes.write().unwrap_or_else(PoisonError::into_inner));
        remotes.values().for_each(|remote| remote.remove());
        shared.inbox().clear();
    }
}

/// Fails all operations that wait for a connection if the service thread ends before its agent does.
struct EndOfService<'a>(&'a Shared);

impl Drop for EndOfService<'_> {
    fn drop(&mut self) {
        if !self.0.ending.swap(true, Ordering::SeqCst) {
            log::announce(format_args!(
                "agent {} can neither accept nor connect any more: create it again",
                self.0.name
            ));
            let remotes = self.0.remotes.read().unwrap_or_else(PoisonError::into_inner);
            remotes.values().for_each(|remote| remote.remove());
        }
    }
}

impl Shared {
    fn remote(&self, name: &str) -> Option<Arc<Remote>> {
        self.remotes.read().unwrap_or_else(PoisonError::into_inner).get(name).cloned()
    }

    fn inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the service thread is about to connect and send notifications.
    fn has_waiting_notifications(&self) -> bool {
        let remotes = self.remotes.read().unwrap_or_else(PoisonError::into_inner);
        !self.ending.load(Ordering::SeqCst)
            && remotes.values().any(|remote| remote.has_waiting_notifications())
    }

    /// Accepts peers and makes connections until the agent ends.
    fn run(&self) {
        while !self.ending.load(Ordering::SeqCst) {
            self.wakeup.clear();
            while let Some(Ok(peer)) = self.endpoint.try_accept() {
                let mut inbox = self.inbox();
                inbox.add(peer);
                // Collecting also drops dead connections of an agent that never asks for notifications.
                inbox.collect();
            }
            let remotes: Vec<Arc<Remote>> =
                self.remotes.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect();
            let advance = |remote: &Arc<Remote>| remote.advance(&self.endpoint, &self.wakeup);
            let dialing = remotes.iter().filter(|remote| advance(remote)).count() > 0;
            remotes.iter().for_each(|remote| remote.settle());
            self.endpoint.arm(&self.wakeup);
            if let Err(error) = self.wakeup.wait(if dialing { Dialing::PAUSE } else { IDLE }) {
                tracing::error!(%error, "cannot poll for connections of remote agents");
                return;
            }
        }
    }
}

fn listen(name: &str, settings: &Settings, secret: &[u8]) -> Result<Endpoint, String> {
    ferrywire::metrics::set_face("nixl");
    let mut last = String::new();
    for address in settings.listen_addresses() {
        let builder = Endpoint::builder().listen(address).secret(secret).label(label(name));
        let mut builder = builder.encryption(settings.encryption);
        if !settings.nics.is_empty() {
            builder = builder.nics(settings.nics.iter().cloned());
            // Remote agents are given the addresses once, so a NIC that appears later is of no use.
            builder.check_nics().map_err(|error| error.to_string())?;
        }
        if let Some(threads) = settings.threads {
            builder = builder.threads(threads);
        }
        match builder.build() {
            Ok(endpoint) => return Ok(endpoint),
            Err(error) => last = error.to_string(),
        }
    }
    Err(last)
}

/// The endpoint's label in logs: short and printable, which an agent's name need not be.
fn label(name: &str) -> String {
    let plain = |c: char| if c.is_ascii_graphic() || c == ' ' { c } else { '?' };
    name.chars().take(48).map(plain).collect()
}

fn random_secret() -> std::io::Result<Vec<u8>> {
    let mut secret = vec![0; SECRET_BYTES];
    // SAFETY: the buffer has this size. The kernel returns so few bytes completely.
    match unsafe { libc::getrandom(secret.as_mut_ptr().cast(), secret.len(), 0) } {
        count if usize::try_from(count) == Ok(SECRET_BYTES) => Ok(secret),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// Logs which transport, NICs and addresses will carry the bytes.
fn announce(name: &str, backend: &str, info: &ConnectionInfo, has_gpus: bool) {
    let nics = TcpTransport::default().nics().unwrap_or_default();
    let nic_of = |address: &std::net::SocketAddr| {
        let nic = nics.iter().find(|nic| nic.address == address.ip());
        format!("{} {}", nic.map_or("?", |nic| nic.name.as_str()), address.ip())
    };
    let useful: Vec<String> =
        info.addresses.iter().filter(|address| !address.ip().is_loopback()).map(nic_of).collect();
    let memory = if has_gpus { "host and GPU memory" } else { "host memory" };
    let port = info.addresses[0].port();
    if useful.is_empty() {
        log::announce(format_args!(
            "warning: agent {name} can be reached from this host alone: no NIC but the loopback has an address (port {port})"
        ))
    } else {
        log::announce(format_args!(
            "agent {name} moves {memory} over TCP: {}; port {port}",
            useful.join(", ")
        ))
    }
    if backend != "FERRYWIRE" {
        log::announce(format_args!(
            "warning: agent {name} asked for backend {backend} and gets ferrywire, which stands in for it here \
             (`ferrywire nixl remove` undoes that); both ends need it"
        ));
    }
}
