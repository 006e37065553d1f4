//! The control connection that carries a session now.

use ferrywire_net::Conn;
use ferrywire_proto::limits;
use ferrywire_sys::poll::Interest;
use std::os::fd::RawFd;
use std::time::Duration;

/// A control connection's life: `open -> lost -> open`, until the session ends.
pub(super) enum ControlConnection {
    Open(OpenConnection),
    /// No path has carried a resumption yet; `closed_at`: when the peer's kernel closed the connection, if it did.
    Lost {
        closed_at: Option<Duration>,
    },
}

pub(super) struct OpenConnection {
    pub conn: Box<dyn Conn>,
    /// Sealed bytes that the socket has not taken.
    pub output: Vec<u8>,
    /// Since when this end does not read, because the peer leaves too much unread.
    pub unread_since: Option<Duration>,
    /// Whether the poller waits for bytes to read, as it does on every new connection.
    polls_for_reading: bool,
    /// Whether the kernel had given the path up when it was last asked.
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

    /// When the peer's kernel closed the connection, if no other has taken its place.
    pub fn closed_at(&self) -> Option<Duration> {
        match self {
            ControlConnection::Open(_) => None,
            ControlConnection::Lost { closed_at } => *closed_at,
        }
    }

    /// Drops the connection; `closed_at`: now, if the peer's kernel closed it.
    pub fn lose(&mut self, closed_at: Option<Duration>) {
        let closed_at = self.closed_at().or(closed_at);
        *self = ControlConnection::Lost { closed_at };
    }
}

impl OpenConnection {
    /// Stops to read from a peer that makes this end answer and leaves the answers unread. True when reading begins again.
    ///
    /// What the session keeps until the peer has acknowledged it does not count, however much that is: an honest peer acknowledges
    /// no more than it has read, and two ends that stopped reading for what they have to say themselves would wait for ever.
    pub fn limit_unread(&mut self, unacknowledged_bytes: usize, now: Duration) -> bool {
        let unread = self.output.len().saturating_sub(unacknowledged_bytes);
        if unread > limits::CONTROL_UNREAD_BYTES_MAX {
            self.unread_since.get_or_insert(now);
            return false;
        }
        unread <= limits::CONTROL_UNREAD_BYTES_MAX / 2 && self.unread_since.take().is_some()
    }

    /// Asks the kernel now and then whether it has given the path up. A path can die in one direction only: then this end hears the
    /// peer, and the peer does not hear this end.
    pub fn check_path(&mut self, checked: &mut Duration, now: Duration) -> bool {
        if now.saturating_sub(*checked) >= limits::PATH_CHECK_INTERVAL {
            *checked = now;
            self.path_dead = self.conn.health().is_dead();
        }
        self.path_dead
    }

    /// The poller's new interest, if it has changed: a connection that is not read from would wake this end without end.
    pub fn changed_interest(&mut self) -> Option<(RawFd, Interest)> {
        let read = self.unread_since.is_none();
        let fd = self.conn.fd()?;
        let changed = std::mem::replace(&mut self.polls_for_reading, read) != read;
        changed.then_some((fd, Interest { read, write: !read }))
    }
}
