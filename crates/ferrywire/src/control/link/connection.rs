//! The control connection that carries a session at present.
//!
//! Invariant: unread output of a peer is bounded: past the bound this end stops reading.
//! Read next: `session.rs`.

use ferrywire_net::Conn;
use ferrywire_proto::limits;
use ferrywire_sys::poll::Interest;
use std::os::fd::RawFd;
use std::time::Duration;

/// The states of a control connection: `open -> lost -> open`, until the session ends.
pub(super) enum ControlConnection {
    Open(OpenConnection),
    /// No path has carried a resumption yet. `closed_at` is when the peer's kernel closed the connection, if
    /// it did.
    Lost {
        closed_at: Option<Duration>,
    },
}

pub(super) struct OpenConnection {
    pub conn: Box<dyn Conn>,
    /// Sealed bytes that the socket has not taken.
    pub output: Vec<u8>,
    /// Since when this end does not read, because the peer leaves too much output unread.
    pub unread_since: Option<Duration>,
    /// Whether the poller waits for readability, as it does for each new connection.
    polls_for_reading: bool,
    /// Whether the kernel had declared the path dead at the last check.
    path_dead: bool,
}

impl ControlConnection {
    pub fn open(conn: Box<dyn Conn>) -> ControlConnection {
        let (output, unread_since) = (Vec::new(), None);
        let polls_for_reading = true;
        ControlConnection::Open(OpenConnection {
            conn,
            output,
            unread_since,
            polls_for_reading,
            path_dead: false,
        })
    }

    pub fn as_open(&self) -> Option<&OpenConnection> {
        match self {
            ControlConnection::Open(open) => Some(open),
            ControlConnection::Lost { .. } => None,
        }
    }

    pub fn as_open_mut(&mut self) -> Option<&mut OpenConnection> {
        match self {
            ControlConnection::Open(open) => Some(open),
            ControlConnection::Lost { .. } => None,
        }
    }

    pub fn conn(&self) -> Option<&dyn Conn> {
        self.as_open().map(|open| &*open.conn)
    }

    pub fn is_lost(&self) -> bool {
        matches!(self, ControlConnection::Lost { .. })
    }

    /// When the peer's kernel closed the connection, if the session has no other by now.
    pub fn closed_at(&self) -> Option<Duration> {
        match self {
            ControlConnection::Open(_) => None,
            ControlConnection::Lost { closed_at } => *closed_at,
        }
    }

    /// Drops the connection. `closed_at` is now, if the peer's kernel closed it.
    pub fn lose(&mut self, closed_at: Option<Duration>) {
        let closed_at = self.closed_at().or(closed_at);
        *self = ControlConnection::Lost { closed_at };
    }
}

impl OpenConnection {
    /// Stops reading from a peer that causes output and does not read it. Returns true when reading resumes.
    ///
    /// Messages that the session keeps until they are acknowledged do not count, however many: an honest peer
    /// acknowledges only what it has read, and two ends that both stopped reading because of their own
    /// messages would wait for ever.
    pub fn limit_unread(&mut self, unacknowledged_bytes: usize, now: Duration) -> bool {
        let unread = self.output.len().saturating_sub(unacknowledged_bytes);
        if unread > limits::CONTROL_UNREAD_BYTES_MAX {
            self.unread_since.get_or_insert(now);
            return false;
        }
        unread <= limits::CONTROL_UNREAD_BYTES_MAX / 2 && self.unread_since.take().is_some()
    }

    /// Checks at intervals whether the kernel has declared the path dead. A path may die in one direction:
    /// then this end still receives, but the peer does not.
    pub fn check_path(&mut self, checked: &mut Duration, now: Duration) -> bool {
        if now.saturating_sub(*checked) >= limits::PATH_CHECK_INTERVAL {
            *checked = now;
            self.path_dead = self.conn.health().is_dead();
        }
        self.path_dead
    }

    /// The poller's new interest, if it has changed. Without a change, unread input would wake this end again
    /// and again.
    pub fn changed_interest(&mut self) -> Option<(RawFd, Interest)> {
        let read = self.unread_since.is_none();
        let fd = self.conn.fd()?;
        let changed = std::mem::replace(&mut self.polls_for_reading, read) != read;
        changed.then_some((fd, Interest { read, write: !read }))
    }
}
