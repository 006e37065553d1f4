//! The conversation with one peer: messages in notifications, and every wait of a bench.
//!
//! A wait ends when it is over, when the peer is lost, on Ctrl-C, or when no byte has moved for the
//! timeout. Notifications are one of: a whole or partial JSON message, or the mark of a ping-pong.

use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use ferrywire::{Peer, Transfer, TransferError};
use ferrywire_ncclnet::{InflightCall, inflight_calls};

use super::barrier::heard_of;
use super::protocol::{Message, VERSION, other_version};
use crate::exit::{Failure, Outcome};
use crate::{sanitize, sys};

/// Longest time of a wait between two checks for Ctrl-C.
pub const SLICE: Duration = Duration::from_millis(100);
/// Longest time for a last message to be delivered.
pub const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// Longest time in which [`Link::tell_failure`] waits for delivery: the message follows the payload posted before it.
pub const FAILURE_TOLD_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest time for the peers of a run to receive the reason of its end. It exceeds the time of [`Link::tell_failure`]:
/// an endpoint that closes earlier reports its close to peers without the reason.
pub const RUN_END_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest time in timeouts for which a peer may report that it waits for other peers of the run: their measured and
/// verified parts may take longer than this end's.
const WAITING_TIMEOUTS_MAX: u32 = 120;
/// Slowest rate at which a busy host allocates and fills memory, with one core and pages that the kernel has to clear.
const PREPARED_BYTES_PER_S: u64 = 64 << 20;
/// JSON bytes per notification, below the engine's limit for one.
const PART_BYTES: usize = 4096;
/// Longest message that is accepted, in bytes: the reports on all peers of a run.
pub const MESSAGE_BYTES_MAX: usize = 64 << 20;
/// Longest message, in bytes, of a peer that has not been admitted.
const STRANGER_BYTES_MAX: usize = 64 << 10;
/// Longest message, in bytes, of an admitted peer: its report, whose intervals and latencies are bounded.
const GUEST_BYTES_MAX: usize = 2 << 20;
/// Longest message, in bytes, of an admitted rank to rank 0: the reports of both ends of a pair.
const MEMBER_BYTES_MAX: usize = 2 * GUEST_BYTES_MAX;
const _: () = assert!(STRANGER_BYTES_MAX < GUEST_BYTES_MAX && MEMBER_BYTES_MAX < MESSAGE_BYTES_MAX);

const MARK: u8 = b'*';
const PART: u8 = b'+';
const LAST_PART: u8 = b'.';
/// The violation of a peer that sends a mark where only messages are expected.
const STRAY_MARK: &str = "a ping-pong mark arrived outside a ping-pong";

/// A notification from the peer.
#[derive(Debug)]
pub enum Heard {
    /// A message of the bench's protocol.
    Message(Message),
    /// The mark that follows the data of one ping-pong iteration.
    Mark(u64),
}

/// The conversation with one peer.
pub struct Link {
    /// The peer at the other end of the conversation.
    pub peer: Peer,
    timeout: Duration,
    message_bytes_max: usize,
    partial: Mutex<Vec<u8>>,
    /// Keeps the parts of a message together when several threads send.
    speaking: Mutex<()>,
    /// The failure that the other end has reported, as it says it, and as this end does.
    their_failure: Mutex<Option<(String, Failure)>>,
    stop: Stop,
    /// Whether one thread takes all messages, so that others must leave them to it.
    has_listener: bool,
    /// How often it was asked for a message without a wait.
    #[cfg(test)]
    pub asked: std::sync::atomic::AtomicUsize,
}

/// Ends the waits of all conversations of a run once one of them has failed. Only the driving end uses it: if the other
/// end left a conversation while data move, the driving end would report the loss of its peer.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<OnceLock<String>>);

impl Stop {
    /// Records that a conversation has failed, with the reason.
    pub fn because(&self, why: &str) {
        let _ = self.0.set(why.to_owned());
    }
}

impl Link {
    /// A conversation whose waits end after `timeout` without progress.
    pub fn new(peer: Peer, timeout: Duration) -> Link {
        let (partial, speaking, their_failure) = (Mutex::default(), Mutex::default(), Mutex::default());
        let message_bytes_max = MESSAGE_BYTES_MAX;
        let (stop, has_listener) = (Stop::default(), false);
        Link {
            peer,
            timeout,
            message_bytes_max,
            partial,
            speaking,
            their_failure,
            stop,
            has_listener,
            #[cfg(test)]
            asked: Default::default(),
        }
    }

    /// A conversation with a peer that has connected and was not admitted yet.
    pub fn with_stranger(peer: Peer, timeout: Duration) -> Link {
        Link { message_bytes_max: STRANGER_BYTES_MAX, ..Link::new(peer, timeout) }
    }

    /// This conversation after the peer was admitted, with another timeout.
    pub fn with_guest(self, timeout: Duration) -> Link {
        Link { message_bytes_max: GUEST_BYTES_MAX, timeout, ..self }
    }

    /// This conversation at rank 0 after the peer was admitted as a rank.
    pub fn with_member(self) -> Link {
        Link { message_bytes_max: MEMBER_BYTES_MAX, ..self }
    }

    /// This conversation with one thread that takes all messages. Other threads send.
    pub fn with_listener(self) -> Link {
        Link { has_listener: true, ..self }
    }

    /// Changes the longest time of waits without progress.
    pub fn wait_up_to(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// Longest time of waits without progress.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// This conversation as one of a run, whose failure ends its waits.
    pub fn of_run(self, stop: &Stop) -> Link {
        Link { stop: stop.clone(), ..self }
    }

    /// Fails if the user pressed Ctrl-C, or if another conversation of the run has failed.
    pub fn goes_on(&self) -> Outcome {
        if sys::interrupted() {
            return Err(Failure::Interrupted);
        }
        match self.stop.0.get() {
            Some(why) => Err(heard_of(why)),
            None => Ok(()),
        }
    }

    /// Sends a message and waits until it is delivered.
    pub fn tell(&self, message: &Message) -> Outcome {
        self.post(message)?.iter().try_for_each(|part| self.finish(part).map(|_| ()))
    }

    /// Sends a message without waiting; closing the connection delivers it, if the peer is still there.
    pub fn tell_last(&self, message: &Message) {
        if self.peer.error().is_none() {
            let _ = self.post(message);
        }
        let _ = self.peer.close(CLOSE_TIMEOUT);
    }

    /// Sends a failure to the other end while this end's memory is still registered. Otherwise the other end would see
    /// the missing memory as a failure of its own.
    pub fn tell_failure(&self, failure: &Failure) {
        if self.peer.error().is_some() || self.their_failure().is_some() {
            return;
        }
        let until = Instant::now() + FAILURE_TOLD_TIMEOUT;
        for part in self.post(&Message::failed(failure)).unwrap_or_default() {
            let _ = part.wait(until.saturating_duration_since(Instant::now()));
        }
    }

    /// Sends a message without waiting for its delivery.
    pub fn say(&self, message: &Message) -> Outcome {
        self.post(message).map(drop)
    }

    /// The failure that the other end has reported, if any.
    pub fn their_failure(&self) -> Option<String> {
        self.heard_failure().map(|(said, _)| said)
    }

    fn heard_failure(&self) -> Option<(String, Failure)> {
        self.their_failure.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone()
    }

    fn post(&self, message: &Message) -> Outcome<Vec<Transfer>> {
        let text = serde_json::to_vec(message).map_err(|error| Failure::failed(error.to_string()))?;
        let parts: Vec<&[u8]> = text.chunks(PART_BYTES).collect();
        let _speaking = self.speaking.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let post = |(i, part): (usize, &&[u8])| {
            let first = if i + 1 == parts.len() { LAST_PART } else { PART };
            self.peer.notify(&[&[first], *part].concat()).map_err(|error| self.lost(error))
        };
        parts.iter().enumerate().map(post).collect()
    }

    /// Waits for the next message. A mark instead of a message is an error.
    pub fn hear(&self) -> Outcome<Message> {
        self.hear_from_a_preparing_peer(0)
    }

    /// Waits for the next message of a peer that first allocates and fills `bytes` of memory.
    pub fn hear_from_a_preparing_peer(&self, bytes: u64) -> Outcome<Message> {
        let more = Duration::from_secs(bytes / PREPARED_BYTES_PER_S);
        match self.hear_within(self.timeout.saturating_add(more), self.waiting_max())? {
            Heard::Message(message) => Ok(message),
            Heard::Mark(_) => Err(self.strange(STRAY_MARK)),
        }
    }

    /// Waits for the next message or mark.
    pub fn hear_any(&self) -> Outcome<Heard> {
        self.hear_within(self.timeout, self.waiting_max())
    }

    /// Longest time for which the peer may report that it waits for other peers.
    fn waiting_max(&self) -> Duration {
        self.timeout.saturating_mul(WAITING_TIMEOUTS_MAX)
    }

    fn hear_within(&self, limit: Duration, waiting_max: Duration) -> Outcome<Heard> {
        let mut stall = Stall { limit, ..Stall::new(self) };
        let since = Instant::now();
        loop {
            self.goes_on()?;
            match self.peer.wait_notification(SLICE) {
                Ok(bytes) => match self.take_in(&bytes)? {
                    None => {}
                    Some(Heard::Message(Message::Waiting)) if since.elapsed() > waiting_max => {
                        return Err(self.waits_for_ever(since.elapsed()));
                    }
                    Some(Heard::Message(Message::Waiting)) => {
                        stall = Stall { limit, ..Stall::new(self) };
                    }
                    Some(heard) => return Ok(heard),
                },
                Err(TransferError::Stalled { .. }) => stall.check("an answer")?,
                Err(error) => return Err(self.lost(error)),
            }
        }
    }

    /// The next message, if one arrives within [`SLICE`]; a silent peer is not an error.
    pub fn hear_soon(&self) -> Outcome<Option<Message>> {
        match self.peer.wait_notification(SLICE) {
            Ok(bytes) => match self.take_in(&bytes)? {
                Some(Heard::Mark(_)) => Err(self.strange(STRAY_MARK)),
                Some(Heard::Message(message)) => Ok(Some(message)),
                None => Ok(None),
            },
            Err(TransferError::Stalled { .. }) => Ok(None),
            Err(error) => Err(self.lost(error)),
        }
    }

    /// The next message, if one has arrived.
    pub fn try_hear(&self) -> Outcome<Option<Message>> {
        #[cfg(test)]
        self.asked.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        while let Some(bytes) = self.peer.poll_notification().map_err(|error| self.lost(error))? {
            match self.take_in(&bytes)? {
                None | Some(Heard::Message(Message::Waiting)) => {}
                Some(Heard::Message(message)) => return Ok(Some(message)),
                Some(Heard::Mark(_)) => return Err(self.strange(STRAY_MARK)),
            }
        }
        Ok(None)
    }

    fn take_in(&self, bytes: &[u8]) -> Outcome<Option<Heard>> {
        let mut partial = self.partial.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        match (bytes.split_first(), partial.len()) {
            (Some((&MARK, rest)), 0) => {
                let mark =
                    rest.try_into().map_err(|_| self.strange("a ping-pong mark has a wrong length"))?;
                return Ok(Some(Heard::Mark(u64::from_le_bytes(mark))));
            }
            (Some((&(PART | LAST_PART), [])), _) => {
                return Err(self.strange("an empty part of a message arrived"));
            }
            (Some((&(PART | LAST_PART), rest)), held) if held + rest.len() <= self.message_bytes_max => {
                partial.extend_from_slice(rest);
            }
            (Some((&(PART | LAST_PART), _)), _) => {
                // Parts of a refused message are dropped.
                *partial = Vec::new();
                let limit = self.message_bytes_max >> 10;
                return Err(self.strange(&format!("a message of more than {limit} KiB arrived")));
            }
            _ => return Err(self.strange("a notification of unknown kind arrived")),
        }
        if bytes[0] == PART {
            return Ok(None);
        }
        let text = std::mem::take(&mut *partial);
        let message = serde_json::from_slice(&text).map_err(|error| self.unreadable(&text, &error))?;
        match message {
            Message::Failed { why, hearsay } => {
                let said = format!("{}: {why}", self.peer.name());
                Err(self
                    .they_failed(&why, if hearsay { Failure::Hearsay(said) } else { Failure::Failed(said) }))
            }
            Message::Refused { why } => {
                Err(self.they_failed(&why, Failure::failed(format!("{} refused: {why}", self.peer.name()))))
            }
            message => Ok(Some(Heard::Message(message))),
        }
    }

    fn they_failed(&self, why: &str, failure: Failure) -> Failure {
        let mut their_failure = self.their_failure.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        their_failure.get_or_insert_with(|| (why.to_owned(), failure.clone()));
        failure
    }

    /// The failure for an unreadable message; the greeting of another version may have another form.
    fn unreadable(&self, text: &[u8], error: &serde_json::Error) -> Failure {
        let version = serde_json::from_slice::<serde_json::Value>(text).ok();
        match version.and_then(|message| message["version"].as_u64()) {
            Some(theirs) if theirs != u64::from(VERSION) => Failure::Failed(other_version(theirs)),
            _ => self.strange(&error.to_string()),
        }
    }

    /// The notification that marks the data of one ping-pong iteration.
    pub fn mark(iteration: u64) -> [u8; 9] {
        let mut bytes = [MARK; 9];
        bytes[1..].copy_from_slice(&iteration.to_le_bytes());
        bytes
    }

    /// Waits for a transfer; returns the bytes moved.
    pub fn finish(&self, transfer: &Transfer) -> Outcome<u64> {
        self.goes_on()?;
        match transfer.wait(SLICE) {
            Ok(bytes) => Ok(bytes),
            Err(TransferError::Stalled { .. }) => self.finish_slowly(transfer),
            Err(error) => Err(self.lost(error)),
        }
    }

    fn finish_slowly(&self, transfer: &Transfer) -> Outcome<u64> {
        let mut stall = Stall::new(self);
        loop {
            stall.check("a transfer")?;
            match transfer.wait(SLICE) {
                Ok(bytes) => return Ok(bytes),
                Err(TransferError::Stalled { .. }) => {}
                Err(error) => return Err(self.lost(error)),
            }
        }
    }

    /// Waits until one of the transfers has ended, and returns its index.
    pub fn first_of<'a>(&self, transfers: impl Iterator<Item = &'a Transfer> + Clone) -> Outcome<usize> {
        self.goes_on()?;
        let mut stall = None;
        loop {
            match Transfer::wait_any_for(transfers.clone(), SLICE, SLICE) {
                Ok(at) => return Ok(at),
                Err(TransferError::Stalled { .. } | TransferError::TimedOut { .. }) => {
                    stall.get_or_insert_with(|| Stall::new(self)).check("a transfer")?
                }
                Err(error) => return Err(self.lost(error)),
            }
        }
    }

    /// The failure for an engine error. Ctrl-C takes precedence, then a failure that the other end has reported, which
    /// names the cause.
    pub fn lost(&self, error: TransferError) -> Failure {
        if sys::interrupted() {
            return Failure::Interrupted;
        }
        while !self.has_listener
            && let Ok(Some(bytes)) = self.peer.poll_notification()
        {
            let _ = self.take_in(&bytes);
        }
        // Another thread may have read the cause.
        self.heard_failure().map_or_else(|| error.into(), |(_, failure)| failure)
    }

    /// The failure for a peer that violates the bench's protocol.
    pub fn strange(&self, what: &str) -> Failure {
        Failure::failed(format!(
            "{} violates the protocol of bench: {}",
            self.peer.name(),
            sanitize::line(what)
        ))
    }

    fn waits_for_ever(&self, waited: Duration) -> Failure {
        Failure::failed(format!(
            "{} has only waited for other peers of the run for {:.0} s (at most {WAITING_TIMEOUTS_MAX} times --timeout)",
            self.peer.name(),
            waited.as_secs_f64()
        ))
    }

    /// The failure for a message that is not the `expected` one.
    pub fn unexpected(&self, message: &Message, expected: &str) -> Failure {
        self.strange(&format!("a message '{}' arrived where {expected} was expected", message.kind()))
    }

    fn moved_bytes(&self) -> u64 {
        self.peer.stats().channels.iter().map(|c| c.sent_bytes + c.received_bytes).sum()
    }
}

/// Watches over a wait: fails on Ctrl-C and when no byte has moved for the timeout.
pub struct Stall<'a> {
    link: &'a Link,
    limit: Duration,
    moved_bytes: u64,
    since: Instant,
}

impl<'a> Stall<'a> {
    /// Starts to watch over a wait.
    pub fn new(link: &'a Link) -> Stall<'a> {
        Stall { link, limit: link.timeout, moved_bytes: u64::MAX, since: Instant::now() }
    }

    /// Checks a wait for `what`; the caller calls it at least once per [`SLICE`].
    pub fn check(&mut self, what: &str) -> Outcome {
        self.link.goes_on()?;
        let moved_bytes = self.link.moved_bytes();
        if moved_bytes != self.moved_bytes {
            (self.moved_bytes, self.since) = (moved_bytes, Instant::now());
        }
        let waited = self.since.elapsed();
        if waited < self.limit {
            return Ok(());
        }
        let name = self.link.peer.name();
        let waited_s = waited.as_secs_f64();
        Err(Failure::failed(format!(
            "no progress for {waited_s:.0} s while waiting for {what} of {name} (--timeout){}",
            plugin_call(waited)
        )))
    }
}

/// The plugin call that has not returned, as text; empty without one.
fn plugin_call(waited: Duration) -> String {
    let calls = inflight_calls();
    let Some(call) = calls.first().filter(|call| call.since > waited / 2) else {
        return String::new();
    };
    let device = call.device.map_or_else(String::new, |device| format!(" on device {device}"));
    let InflightCall { plugin, call, since, .. } = call;
    format!(": {call}{device} of plugin {plugin} has not returned for {:.1} s", since.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrywire::Endpoint;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    const LIMIT: Duration = Duration::from_secs(60);
    const SPEAKERS: usize = 4;
    const TIMES: usize = 40;

    fn pair(timeout: Duration) -> (Link, Link, [Endpoint; 2]) {
        let loopback = ([127, 0, 0, 1], 0).into();
        let there = Endpoint::builder().listen(loopback).build().expect("an endpoint");
        let here = Endpoint::builder().build().expect("an endpoint");
        let near = here.connect(there.listen_addresses()[0], LIMIT).expect("it connects");
        let far = there.accept(LIMIT).expect("it comes");
        (Link::new(near, timeout), Link::new(far, timeout), [here, there])
    }

    #[test]
    fn a_peer_that_waits_for_others_is_waited_for_and_not_for_ever() {
        let (near, far, _ends) = pair(LIMIT);
        let (over, begun) = (AtomicBool::new(false), Instant::now());
        let waits = |until: &dyn Fn() -> bool| {
            while !until() && begun.elapsed() < LIMIT {
                far.say(&Message::Waiting).expect("it is there");
                thread::sleep(SLICE / 10);
            }
        };
        thread::scope(|scope| {
            scope.spawn(|| {
                waits(&|| begun.elapsed() > 3 * SLICE);
                far.say(&Message::PartDone).expect("it is there");
                waits(&|| over.load(Ordering::SeqCst));
            });
            let heard = near.hear();
            let failure = near.hear_within(LIMIT, 3 * SLICE).map(drop);
            over.store(true, Ordering::SeqCst);
            assert!(matches!(heard, Ok(Message::PartDone)), "{heard:?}");
            let said = failure.expect_err("the peer does nothing but wait").message();
            assert!(said.contains("has only waited for other peers of the run for"), "{said}");
        });
    }

    /// Regression: a thread of a rank that could not send any more took the message with the cause from the thread that
    /// listens.
    #[test]
    fn a_thread_that_finds_its_peer_gone_leaves_messages_to_the_listener() {
        let (near, far, _ends) = pair(LIMIT);
        let near = near.with_listener();
        far.tell(&Message::PartDone).expect("it is delivered");
        let _ = far.peer.close(LIMIT);
        let since = Instant::now();
        while near.say(&Message::PartDone).is_ok() {
            assert!(since.elapsed() < LIMIT, "the peer is not lost");
            thread::sleep(SLICE / 10);
        }
        let heard = near.hear_soon();
        assert!(matches!(heard, Ok(Some(Message::PartDone))), "{heard:?}");
    }

    /// Regression: in both directions of messages, one thread read why the other end stopped, and the other reported the lost
    /// connection.
    #[test]
    fn a_cause_that_one_thread_has_read_is_that_of_the_others_too() {
        let (near, far, _ends) = pair(LIMIT);
        far.tell(&Message::failed(&Failure::Interrupted)).expect("it is delivered");
        let read = near.try_hear().expect_err("the other end has failed").message();
        let _ = far.peer.close(LIMIT);
        let lost = near.lost(TransferError::Closed).message();
        assert_eq!((lost.as_str(), lost.ends_with(": interrupted")), (read.as_str(), true));
    }

    /// Several pairs of a rank send their reports over one link at once.
    #[test]
    fn long_messages_of_several_threads_stay_whole() {
        let (near, far, _ends) = pair(LIMIT);
        thread::scope(|scope| {
            for speaker in 0..SPEAKERS {
                let near = &near;
                scope.spawn(move || {
                    let region = speaker.to_string().repeat(3 * PART_BYTES);
                    let said =
                        (0..TIMES).try_for_each(|_| near.say(&Message::Region { region: region.clone() }));
                    said.expect("it is there");
                });
            }
            for _ in 0..SPEAKERS * TIMES {
                let Message::Region { region } = far.hear().expect("a whole message") else {
                    panic!("another message")
                };
                let first = region.as_bytes()[0];
                assert!(region.len() == 3 * PART_BYTES && region.bytes().all(|byte| byte == first));
            }
        });
    }
}
