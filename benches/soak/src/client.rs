//! The process that moves bytes: operations of all kinds and sizes in random order, each verified, with one server.
//!
//! Invariant: an operation ends within `OPERATION_LIMIT`, or the soak fails. If the server is lost, which the error has to
//! say, the client connects again and goes on.
//! Read next: `server.rs`, which answers.

use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};
use std::{fs, thread};

use ferrywire::{Block, BlockList, Endpoint, Peer, Region, RemoteRegion, Transfer, TransferError};

use crate::driver::{Order, orders, say};
use crate::pool::{Dice, Pool, Span, hex, poison, unhex};
use crate::server::verb_of;
use crate::trouble::Trouble;
use crate::{CLOSE_LIMIT, OPERATION_LIMIT, Options};

/// Size of the region that a client asks for, and of its own buffer: the most that one step moves.
const REGION_BYTES: u64 = 64 << 20;
/// Shortest operation.
const BYTES_MIN: u64 = 8;
/// Most bytes of all blocks of a list, and most blocks.
const LIST_BYTES: u64 = 16 << 20;
const BLOCKS_MAX: u64 = 64;
/// Most transfers in flight.
const DEPTH_MAX: u64 = 8;
/// Longest payload of a notification.
const PING_BYTES_MAX: u64 = 8000;
/// Most messages of an echo.
const ECHO_MAX: u64 = 4;
/// Longest pause before a cancel.
const CANCEL_AFTER_MAX_US: u64 = 3000;
/// One attempt to connect, and all of them.
const ATTEMPT_LIMIT: Duration = Duration::from_secs(20);
const CONNECT_LIMIT: Duration = Duration::from_secs(60);
const RETRY_PAUSE: Duration = Duration::from_millis(100);
/// Interval between reports.
const REPORT: Duration = Duration::from_millis(500);
/// A connection is made anew, in an orderly way, after about this many steps.
const STEPS_OF_A_SESSION: u64 = 400;

/// Moves bytes until the driver orders the end.
pub fn run(options: &Options) -> Result<(), Trouble> {
    let orders = orders();
    let Ok(Order::Secret { current, also }) = orders.recv() else { return Ok(()) };
    let endpoint = options.builder(&current).build()?;
    endpoint.set_secret(current, also.map(String::into_bytes))?;
    let pool = Pool::load(&options.pool)?;
    let source = endpoint.register(pool.bytes().to_vec())?;
    let dice = Dice::new(options.seed);
    let tally = Tally { reported: Instant::now(), operations: 0, bytes: 0, cancelled: 0 };
    let mut client = Client { options, orders, endpoint, pool, source, dice, tally, is_away: false };
    loop {
        match client.session() {
            Ok(()) => say("closed", "for a new connection"),
            Err(Trouble::End) => break,
            Err(trouble @ (Trouble::Lost(_) | Trouble::Closed(_) | Trouble::Wrong(_))) => trouble.report(),
            Err(fatal) => return Err(fatal),
        }
    }
    client.tally.report();
    client.endpoint.close(CLOSE_LIMIT)?;
    Ok(())
}

/// What has been moved since the last report.
struct Tally {
    reported: Instant,
    operations: u64,
    bytes: u64,
    cancelled: u64,
}

impl Tally {
    fn add(&mut self, bytes: u64) {
        self.operations += 1;
        self.bytes += bytes;
    }

    fn report(&mut self) {
        say("moved", &format!("{} {} {}", self.operations, self.bytes, self.cancelled));
        *self = Tally { reported: Instant::now(), operations: 0, bytes: 0, cancelled: 0 };
    }
}

struct Client<'a> {
    options: &'a Options,
    orders: Receiver<Order>,
    endpoint: Endpoint,
    pool: Pool,
    /// The pool as registered memory.
    source: Region,
    dice: Dice,
    tally: Tally,
    /// The driver wants no connection for now: the server is about to end, which is orderly only if no one waits for an answer.
    is_away: bool,
}

impl Client<'_> {
    /// Carries out what the driver has ordered meanwhile.
    fn obey(&mut self) -> Result<(), Trouble> {
        loop {
            match self.orders.try_recv() {
                Ok(Order::Secret { current, also }) => {
                    self.endpoint.set_secret(current, also.map(String::into_bytes))?;
                    say("ok", "secret");
                }
                Ok(Order::Leave) => self.is_away = true,
                Ok(Order::Come) => self.is_away = false,
                Ok(Order::Sample) => {}
                Ok(Order::End) | Err(TryRecvError::Disconnected) => return Err(Trouble::End),
                Err(TryRecvError::Empty) => return Ok(()),
            }
        }
    }

    fn connect(&mut self) -> Result<Peer, Trouble> {
        if self.is_away {
            say("ok", "leave");
        }
        while self.is_away {
            thread::sleep(RETRY_PAUSE);
            self.obey()?;
        }
        let until = Instant::now() + CONNECT_LIMIT;
        loop {
            self.obey()?;
            let metadata = fs::read(&self.options.metadata).unwrap_or_default();
            match self.endpoint.connect_metadata(&metadata, ATTEMPT_LIMIT) {
                Ok(peer) => return Ok(peer),
                Err(error) if Instant::now() > until => {
                    return Err(Trouble::Unended(format!("connect: {error}")));
                }
                Err(error) => say("retried", &error.to_string()),
            }
            thread::sleep(RETRY_PAUSE);
        }
    }

    /// One connection, from its beginning to its end.
    fn session(&mut self) -> Result<(), Trouble> {
        let peer = self.connect()?;
        let landing = landing(&self.endpoint)?;
        let theirs = hex(&self.source.descriptor().to_bytes());
        let memory = &self.options.memory;
        done(peer.notify(format!("hello {memory} {REGION_BYTES} {theirs}").as_bytes())?)?;
        let target = region(&peer)?;
        say("up", "");
        let steps = STEPS_OF_A_SESSION / 2 + self.dice.below(STEPS_OF_A_SESSION);
        let mut session = Session { client: self, peer, landing, target };
        for _ in 0..steps {
            session.client.obey()?;
            if session.client.is_away {
                break;
            }
            session.step()?;
            if session.client.tally.reported.elapsed() > REPORT {
                session.client.tally.report();
            }
        }
        session.peer.close(CLOSE_LIMIT)?;
        Ok(())
    }
}

struct Session<'a, 'b> {
    client: &'a mut Client<'b>,
    peer: Peer,
    /// Where bytes arrive.
    landing: Region,
    /// The server's region.
    target: RemoteRegion,
}

impl Session<'_, '_> {
    fn step(&mut self) -> Result<(), Trouble> {
        match self.client.dice.below(100) {
            0..45 => self.write_and_read_back(),
            45..60 => self.write_and_let_check(),
            60..70 => self.move_blocks(),
            70..80 => self.echo(),
            80..85 => self.ping(),
            85..91 => self.pull_or_push(),
            91..98 => self.cancel(),
            98 => self.register_landing_anew(),
            _ => self.have_region_registered_anew(),
        }
    }

    /// Spans that do not overlap in the region, of at most `total` bytes altogether.
    fn spans(&mut self, count: u64, total: u64) -> Vec<Span> {
        let (room, pool_bytes) = (total / count, self.client.pool.len());
        let dice = &mut self.client.dice;
        (0..count)
            .map(|i| {
                let bytes = dice.size(BYTES_MIN, room);
                let at = i * room + dice.below(room - bytes + 1);
                Span { from: dice.below(pool_bytes - bytes + 1), at, bytes }
            })
            .collect()
    }

    fn span(&mut self) -> Span {
        self.spans(1, REGION_BYTES)[0]
    }

    fn verify(&self, span: Span, what: &str) -> Result<(), Trouble> {
        self.client.pool.verify(&self.landing, span, &format!("{what} by {}", self.client.options.label))
    }

    fn write_and_read_back(&mut self) -> Result<(), Trouble> {
        let count = 1 + self.client.dice.below(DEPTH_MAX);
        let spans = self.spans(count, REGION_BYTES);
        let write =
            |span: &Span| self.peer.write(&self.client.source, span.from, &self.target, span.at, span.bytes);
        let writes: Vec<Transfer> = spans.iter().map(write).collect::<Result<_, _>>()?;
        for (write, span) in writes.into_iter().zip(&spans) {
            done(write)?;
            self.client.tally.add(span.bytes);
        }
        for span in &spans {
            poison(&self.landing, span.at, span.bytes)?;
        }
        let read = |span: &Span| self.peer.read(&self.landing, span.at, &self.target, span.at, span.bytes);
        let reads: Vec<Transfer> = spans.iter().map(read).collect::<Result<_, _>>()?;
        for (read, span) in reads.into_iter().zip(&spans) {
            done(read)?;
            self.verify(*span, "written and read back")?;
            self.client.tally.add(span.bytes);
        }
        Ok(())
    }

    fn write_and_let_check(&mut self) -> Result<(), Trouble> {
        let span = self.span();
        let (source, message) = (&self.client.source, format!("check {span}"));
        let write = self.peer.write_notify(
            source,
            span.from,
            &self.target,
            span.at,
            span.bytes,
            message.as_bytes(),
        )?;
        done(write)?;
        good(&self.peer)?;
        self.client.tally.add(span.bytes);
        Ok(())
    }

    fn move_blocks(&mut self) -> Result<(), Trouble> {
        let count = 2 + self.client.dice.below(BLOCKS_MAX - 1);
        let mut spans = self.spans(count, LIST_BYTES);
        for i in (1..spans.len()).rev() {
            spans.swap(i, self.client.dice.below(i as u64 + 1) as usize);
        }
        let block = |local: fn(&Span) -> u64| {
            let of =
                |span: &Span| Block { local_offset: local(span), remote_offset: span.at, bytes: span.bytes };
            spans.iter().map(of).collect::<Vec<Block>>()
        };
        let list = BlockList::new(&self.client.source, &self.target, &block(|span| span.from))?;
        let names: Vec<String> = spans.iter().map(Span::to_string).collect();
        let message = format!("check {}", names.join(" "));
        let bytes = done(self.peer.write_blocks(&list, None, Some(message.as_bytes()))?)?;
        self.client.tally.add(bytes);
        good(&self.peer)?;
        for span in &spans {
            poison(&self.landing, span.at, span.bytes)?;
        }
        let list = BlockList::new(&self.landing, &self.target, &block(|span| span.at))?;
        let bytes = done(self.peer.read_blocks(&list, None)?)?;
        spans.iter().try_for_each(|span| self.verify(*span, "blocks read back"))?;
        self.client.tally.add(bytes);
        Ok(())
    }

    fn echo(&mut self) -> Result<(), Trouble> {
        let count = 1 + self.client.dice.below(ECHO_MAX);
        let spans = self.spans(count, REGION_BYTES);
        let mut transfers = Vec::new();
        for (tag, span) in (0..).zip(&spans) {
            let Span { from, at, bytes } = *span;
            poison(&self.landing, at, bytes)?;
            let back = self.peer.recv(tag, &self.landing, at, bytes)?;
            let asked = self.peer.notify(format!("echo {tag} {bytes}").as_bytes())?;
            transfers.push((asked, self.peer.send(tag, &self.client.source, from, bytes)?, back));
        }
        for ((asked, sent, back), span) in transfers.into_iter().zip(&spans) {
            done(asked)?;
            done(sent)?;
            let arrived = done(back)?;
            if arrived != span.bytes {
                return Err(Trouble::Wrong(format!("echo of {} bytes came back as {arrived}", span.bytes)));
            }
            self.verify(*span, "sent and sent back")?;
            self.client.tally.add(2 * span.bytes);
        }
        Ok(())
    }

    fn ping(&mut self) -> Result<(), Trouble> {
        let bytes = self.client.dice.size(1, PING_BYTES_MAX);
        let from = self.client.dice.below(self.client.pool.len() - bytes);
        let payload = &self.client.pool.bytes()[from as usize..][..bytes as usize];
        let sent = self.peer.notify(&[b"ping ", payload].concat())?;
        done(sent)?;
        let answer = self.peer.wait_notification(OPERATION_LIMIT)?;
        if verb_of(&answer) != (b"pong", payload) {
            return Err(Trouble::Wrong(format!(
                "a notification of {bytes} bytes came back as {}",
                answer.len()
            )));
        }
        self.client.tally.add(2 * bytes);
        Ok(())
    }

    /// The server reads from this process, or writes to it.
    fn pull_or_push(&mut self) -> Result<(), Trouble> {
        let span = self.span();
        if self.client.dice.below(2) == 0 {
            done(self.peer.notify(format!("pull {span}").as_bytes())?)?;
            good(&self.peer)?;
        } else {
            poison(&self.landing, span.at, span.bytes)?;
            let landing = hex(&self.landing.descriptor().to_bytes());
            done(self.peer.notify(format!("push {span} {landing}").as_bytes())?)?;
            good(&self.peer)?;
            self.verify(span, "written by the server and read")?;
        }
        self.client.tally.add(span.bytes);
        Ok(())
    }

    /// A write or read that is cancelled: it ends, and a later operation on the same bytes is not disturbed.
    fn cancel(&mut self) -> Result<(), Trouble> {
        let span = self.span();
        let transfer = match self.client.dice.below(2) {
            0 => self.peer.write(&self.client.source, span.from, &self.target, span.at, span.bytes)?,
            _ => self.peer.read(&self.landing, span.at, &self.target, span.at, span.bytes)?,
        };
        thread::sleep(Duration::from_micros(self.client.dice.below(CANCEL_AFTER_MAX_US)));
        transfer.cancel();
        match transfer.wait_for(OPERATION_LIMIT, OPERATION_LIMIT) {
            Err(TransferError::Cancelled) => self.client.tally.cancelled += 1,
            outcome => self.client.tally.add(outcome?),
        }
        let again = Span { from: self.client.dice.below(self.client.pool.len() - span.bytes + 1), ..span };
        done(self.peer.write(&self.client.source, again.from, &self.target, again.at, again.bytes)?)?;
        poison(&self.landing, again.at, again.bytes)?;
        done(self.peer.read(&self.landing, again.at, &self.target, again.at, again.bytes)?)?;
        self.verify(again, "written after a cancel and read back")?;
        self.client.tally.add(2 * again.bytes);
        Ok(())
    }

    fn register_landing_anew(&mut self) -> Result<(), Trouble> {
        let fresh = landing(&self.client.endpoint)?;
        std::mem::replace(&mut self.landing, fresh).deregister()?;
        self.write_and_read_back()
    }

    /// The server deregisters its region: from then on the old descriptor is refused.
    fn have_region_registered_anew(&mut self) -> Result<(), Trouble> {
        done(self.peer.notify(b"again")?)?;
        let fresh = region(&self.peer)?;
        let gone = std::mem::replace(&mut self.target, fresh);
        let span = self.span();
        let write = self.peer.write(&self.client.source, span.from, &gone, span.at, span.bytes)?;
        match write.wait_for(OPERATION_LIMIT, OPERATION_LIMIT) {
            Ok(_) => return Err(Trouble::Wrong("a write to a deregistered region succeeded".into())),
            Err(TransferError::AccessRefused { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        self.write_and_read_back()
    }
}

/// Memory for what arrives, all of whose pages exist.
fn landing(endpoint: &Endpoint) -> Result<Region, Trouble> {
    let region = endpoint.alloc_host(REGION_BYTES as usize)?;
    poison(&region, 0, REGION_BYTES)?;
    Ok(region)
}

/// Waits for a transfer; the bytes that it has moved.
fn done(transfer: Transfer) -> Result<u64, Trouble> {
    Ok(transfer.wait_for(OPERATION_LIMIT, OPERATION_LIMIT)?)
}

/// Waits until the server has verified.
fn good(peer: &Peer) -> Result<(), Trouble> {
    match peer.wait_notification(OPERATION_LIMIT)?.as_slice() {
        b"good" => Ok(()),
        other => Err(Trouble::Wrong(format!("the server answers {:?}", String::from_utf8_lossy(other)))),
    }
}

/// Waits for the descriptor of the server's region.
fn region(peer: &Peer) -> Result<RemoteRegion, Trouble> {
    let answer = peer.wait_notification(OPERATION_LIMIT)?;
    let descriptor = match verb_of(&answer) {
        (b"region", digits) => unhex(&String::from_utf8_lossy(digits)),
        _ => None,
    };
    let wrong = || Trouble::Wrong(format!("no descriptor, but {:?}", String::from_utf8_lossy(&answer)));
    Ok(RemoteRegion::from_bytes(&descriptor.ok_or_else(wrong)?)?)
}
