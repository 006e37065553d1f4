//! The process that serves: a region for each client, and answers to what clients ask for by notification.
//!
//! | notification | what the server does | answer |
//! |---|---|---|
//! | `hello MEMORY BYTES POOL` | allocates a region; POOL describes the client's pool | `region DESCRIPTOR` |
//! | `check SPAN ...` | compares spans of the region with the pool | `good` |
//! | `echo TAG BYTES` | receives a message and sends it back | the message |
//! | `pull SPAN` | reads a span of the client's pool and compares | `good` |
//! | `push SPAN DESCRIPTOR` | writes a span into the client's region | `good`, with the last byte |
//! | `again` | deregisters the region and allocates another | `region DESCRIPTOR` |
//! | `ping BYTES` | | `pong BYTES` |
//!
//! Read next: `client.rs`, which asks.

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use ferrywire::memory::cuda::pinned_bytes;
use ferrywire::{ConnectError, Endpoint, Peer, Region, RemoteRegion, TransferError};

use crate::driver::{Order, orders, say};
use crate::pool::{Pool, Span, hex, poison, unhex};
use crate::trouble::Trouble;
use crate::{CLOSE_LIMIT, OPERATION_LIMIT, Options};

/// Interval at which waits look whether the server is to end.
const LOOK: Duration = Duration::from_secs(1);

struct Server {
    endpoint: Endpoint,
    pool: Pool,
    /// The pool as registered memory.
    source: Region,
    peers: Mutex<HashMap<u64, Peer>>,
    /// Bytes of the regions and buffers of all clients.
    client_bytes: AtomicU64,
    ending: AtomicBool,
}

/// Serves until the driver orders the end.
pub fn run(options: &Options) -> Result<(), Trouble> {
    let orders = orders();
    let Ok(Order::Secret { current, also }) = orders.recv() else { return Ok(()) };
    let listen =
        options.listen.parse().map_err(|_| Trouble::Failed(format!("--listen {}", options.listen)))?;
    let endpoint = options.builder(&current).listen(listen).build()?;
    endpoint.set_secret(current, also.map(String::into_bytes))?;
    let pool = Pool::load(&options.pool)?;
    let source = endpoint.register(pool.bytes().to_vec())?;
    publish(&options.metadata, &endpoint.metadata())?;
    let (peers, client_bytes, ending) = Default::default();
    let server = Arc::new(Server { endpoint, pool, source, peers, client_bytes, ending });
    let accepting = thread::spawn({
        let server = server.clone();
        move || server.accept()
    });
    say("up", "");
    while let Ok(order) = orders.recv() {
        match order {
            Order::Secret { current, also } => {
                server.endpoint.set_secret(current, also.map(String::into_bytes))?;
                say("ok", "secret");
            }
            Order::Sample => say("sample", &server.sample()),
            Order::End => break,
            Order::Leave | Order::Come => {}
        }
    }
    server.ending.store(true, Ordering::SeqCst);
    server.endpoint.close(CLOSE_LIMIT)?;
    let _ = accepting.join();
    Ok(())
}

/// Writes a file that readers see whole or not at all.
fn publish(file: &Path, bytes: &[u8]) -> Result<(), Trouble> {
    let unfinished = file.with_extension("new");
    let written = fs::write(&unfinished, bytes).and_then(|()| fs::rename(&unfinished, file));
    written.map_err(|error| Trouble::Failed(format!("{}: {error}", file.display())))
}

impl Server {
    fn accept(self: Arc<Server>) {
        let mut clients = Vec::new();
        for number in 0.. {
            let peer = loop {
                match self.endpoint.accept(LOOK) {
                    Ok(peer) => break Some(peer),
                    Err(ConnectError::Stalled { .. }) => {}
                    Err(ConnectError::Closed) => break None,
                    Err(error) => say("retried", &format!("accept: {error}")),
                }
            };
            let Some(peer) = peer else { break };
            self.peers().insert(number, peer.clone());
            let server = self.clone();
            clients.push(thread::spawn(move || {
                if let Err(trouble) = Client::serve(&server, peer)
                    && !server.ending.load(Ordering::SeqCst)
                {
                    trouble.report();
                }
                server.peers().remove(&number);
            }));
            clients.retain(|client| !client.is_finished());
        }
        clients.into_iter().for_each(|client| drop(client.join()));
    }

    fn peers(&self) -> MutexGuard<'_, HashMap<u64, Peer>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sample(&self) -> String {
        // What the allocator keeps of clients that have gone is no growth, and differs from one rest to the next.
        #[cfg(target_env = "gnu")]
        // SAFETY: only free memory is touched.
        unsafe {
            libc::malloc_trim(0)
        };
        let peers = self.peers();
        let channels = peers.values().flat_map(|peer| peer.stats().channels).filter(|channel| channel.alive);
        let (channels, staging_bytes) = channels.fold((0, 0), |(count, bytes), channel| {
            (count + 1, bytes + channel.staging.map_or(0, |staging| staging.pinned_bytes))
        });
        format!(
            "peers={} known={} channels={channels} client_bytes={} pinned={} auth_failures={}",
            peers.len(),
            self.endpoint.peer_count(),
            self.client_bytes.load(Ordering::Relaxed),
            staging_bytes + pinned_bytes(),
            self.endpoint.auth_failures()
        )
    }
}

/// A client, as the server has it.
struct Client<'a> {
    server: &'a Server,
    peer: Peer,
    memory: String,
    region: Region,
    /// Where messages and what is read from the client arrive.
    buffer: Region,
    /// The client's pool.
    theirs: RemoteRegion,
    counted: u64,
}

impl Drop for Client<'_> {
    fn drop(&mut self) {
        self.server.client_bytes.fetch_sub(self.counted, Ordering::Relaxed);
    }
}

impl<'a> Client<'a> {
    /// Answers a peer until it is gone.
    fn serve(server: &'a Server, peer: Peer) -> Result<(), Trouble> {
        let hello = next(server, &peer)?;
        let text = String::from_utf8_lossy(&hello).into_owned();
        let words: Vec<&str> = text.split(' ').collect();
        let ["hello", memory, bytes, theirs] = words[..] else {
            return Err(Trouble::Wrong(format!("no hello, but {text:?}")));
        };
        let bytes = bytes.parse().map_err(|_| Trouble::Wrong(format!("hello: {bytes}")))?;
        let theirs = remote(theirs)?;
        let region = allocate(&server.endpoint, memory, bytes)?;
        let buffer = allocate(&server.endpoint, "host", bytes)?;
        let counted = 2 * bytes;
        server.client_bytes.fetch_add(counted, Ordering::Relaxed);
        let memory = memory.to_owned();
        let mut client = Client { server, peer, memory, region, buffer, theirs, counted };
        client.describe()?;
        loop {
            let message = next(server, &client.peer)?;
            client.answer(&message)?;
        }
    }

    fn describe(&self) -> Result<(), Trouble> {
        self.say(format!("region {}", hex(&self.region.descriptor().to_bytes())).as_bytes())
    }

    fn say(&self, message: &[u8]) -> Result<(), Trouble> {
        self.peer.notify(message)?.wait_for(OPERATION_LIMIT, OPERATION_LIMIT)?;
        Ok(())
    }

    fn answer(&mut self, message: &[u8]) -> Result<(), Trouble> {
        if let (b"ping", payload) = verb_of(message) {
            return self.say(&[b"pong ", payload].concat());
        }
        let text = String::from_utf8_lossy(message).into_owned();
        let wrong = || Trouble::Wrong(format!("a notification that no client sends: {text:?}"));
        let words: Vec<&str> = text.split(' ').collect();
        let verified = match words[..] {
            ["check", ref spans @ ..] => {
                spans.iter().try_for_each(|span| self.check(Span::parse(span).ok_or_else(wrong)?))
            }
            ["echo", tag, bytes] => {
                let (tag, bytes) = tag.parse().ok().zip(bytes.parse().ok()).ok_or_else(wrong)?;
                return self.echo(tag, bytes);
            }
            ["pull", span] => self.pull(Span::parse(span).ok_or_else(wrong)?),
            ["push", span, target] => {
                return self.push(Span::parse(span).ok_or_else(wrong)?, remote(target)?);
            }
            ["again"] => {
                let fresh = allocate(&self.server.endpoint, &self.memory, self.region.len())?;
                std::mem::replace(&mut self.region, fresh).deregister()?;
                return self.describe();
            }
            _ => Err(wrong()),
        };
        match verified {
            Ok(()) => self.say(b"good"),
            Err(Trouble::Wrong(text)) => {
                say("wrong", &text);
                self.say(b"wrong")
            }
            Err(other) => Err(other),
        }
    }

    fn check(&self, span: Span) -> Result<(), Trouble> {
        self.server.pool.verify(&self.region, span, &format!("written by {}", self.peer.label()))
    }

    fn echo(&self, tag: u64, bytes: u64) -> Result<(), Trouble> {
        let received =
            self.peer.recv(tag, &self.buffer, 0, bytes)?.wait_for(OPERATION_LIMIT, OPERATION_LIMIT)?;
        self.peer.send(tag, &self.buffer, 0, received)?.wait_for(OPERATION_LIMIT, OPERATION_LIMIT)?;
        Ok(())
    }

    fn pull(&self, span: Span) -> Result<(), Trouble> {
        poison(&self.buffer, span.at, span.bytes)?;
        let read = self.peer.read(&self.buffer, span.at, &self.theirs, span.from, span.bytes)?;
        read.wait_for(OPERATION_LIMIT, OPERATION_LIMIT)?;
        self.server.pool.verify(&self.buffer, span, &format!("read from {}", self.peer.label()))
    }

    fn push(&self, span: Span, target: RemoteRegion) -> Result<(), Trouble> {
        let Span { from, at, bytes } = span;
        let write = self.peer.write_notify(&self.server.source, from, &target, at, bytes, b"good")?;
        write.wait_for(OPERATION_LIMIT, OPERATION_LIMIT)?;
        Ok(())
    }
}

/// The first word of a notification, and what follows it.
pub fn verb_of(notification: &[u8]) -> (&[u8], &[u8]) {
    let end = notification.iter().position(|byte| *byte == b' ').unwrap_or(notification.len());
    (&notification[..end], notification.get(end + 1..).unwrap_or_default())
}

/// The next notification, unless the server is to end.
fn next(server: &Server, peer: &Peer) -> Result<Vec<u8>, Trouble> {
    loop {
        match peer.wait_notification(LOOK) {
            Err(TransferError::Stalled { .. }) if server.ending.load(Ordering::SeqCst) => {
                return Err(Trouble::End);
            }
            Err(TransferError::Stalled { .. }) => {}
            outcome => return Ok(outcome?),
        }
    }
}

fn remote(text: &str) -> Result<RemoteRegion, Trouble> {
    let bytes = unhex(text).ok_or_else(|| Trouble::Wrong(format!("descriptor {text}")))?;
    Ok(RemoteRegion::from_bytes(&bytes)?)
}

/// Memory of a client, all of whose pages exist: the process then grows by its size, and by nothing later.
fn allocate(endpoint: &Endpoint, memory: &str, bytes: u64) -> Result<Region, Trouble> {
    let size = bytes as usize;
    let index = |text: &str| text.parse().map_err(|_| Trouble::Failed(format!("memory {memory}")));
    let region = match memory.split_once(':') {
        None if memory == "host" => endpoint.alloc_host(size)?,
        Some(("sim", number)) => endpoint.alloc_sim(index(number)?, size)?,
        Some(("cuda", number)) => endpoint.alloc_cuda(index(number)?, size)?,
        _ => return Err(Trouble::Failed(format!("memory {memory}: not host, sim:N or cuda:N"))),
    };
    poison(&region, 0, bytes)?;
    Ok(region)
}
