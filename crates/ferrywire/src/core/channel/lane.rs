//! The channel's part in what goes over its lane, where it has one.
//!
//! Read next: `posted/`, which decides what is posted when.

use std::io;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::receiving::check_posted;
use super::{Channel, broken};
use crate::core::posted::{Arrival, Turned};
use ferrywire_proto::wire::Header;

impl Channel {
    /// Whether its payload goes over one.
    pub fn has_lane(&self) -> bool {
        self.posted.is_some()
    }

    /// Bytes in the lane's hands.
    pub fn lane_bytes_in_flight(&self) -> usize {
        self.posted.as_ref().map_or(0, |posted| posted.bytes_in_flight())
    }

    /// Whether the lane has to be asked again and again: nobody is told when it moves.
    pub fn lane_active(&self) -> bool {
        self.posted.as_ref().is_some_and(|posted| posted.active())
    }

    /// How long to rest when the lane had nothing new, where it says so.
    pub fn lane_pause(&self) -> Option<Duration> {
        self.posted.as_ref().filter(|posted| posted.active()).and_then(|posted| posted.pause())
    }

    /// Moves what goes over the lane on, if there is one. True if anything happened.
    pub fn turn_lane(&mut self) -> io::Result<bool> {
        let Some(posted) = self.posted.as_mut().filter(|posted| posted.active()) else {
            return self.ended.take().map_or(Ok(false), Err);
        };
        let mut turned = Turned::default();
        let result = posted.turn(self.peer.now(), &mut turned);
        self.counters.sent_bytes.fetch_add(turned.sent_bytes, Ordering::Relaxed);
        self.counters.received_bytes.fetch_add(turned.received_bytes, Ordering::Relaxed);
        for entry in turned.delivered {
            self.peer.delivered(entry, None);
        }
        let is_of_memory = turned.unreadable.is_some();
        if let Some((frame, why)) = turned.unreadable
            && let Some(entry) = self.window.get_mut(frame)
        {
            tracing::warn!(%why, peer = self.peer.name(), "memory that is registered cannot be read");
            entry.fail_unread(why);
        }
        for (frame, error) in turned.given_up {
            let Some(entry) = self.window.get_mut(frame) else { continue };
            let credit = entry.give_up(&error);
            if self.peer.queue.crc {
                entry.add_crc();
            }
            self.peer.queue.credit(credit);
        }
        for arrival in turned.arrived {
            let Arrival { header, placements, landing, message, refusal, target } = arrival;
            if refusal.is_none() {
                check_posted(&header, &target, &message)?;
            }
            self.placed(&header, &placements, landing.as_ref(), message, refusal)?;
        }
        match result {
            Ok(()) => Ok(turned.worked),
            Err(why) => {
                self.lane_failed = !is_of_memory;
                Err(io::Error::other(why))
            }
        }
    }

    /// Whether the lane sends of memory that its user has dropped, and may have freed.
    pub fn lane_sends_what_is_gone(&self) -> bool {
        self.posted.as_ref().is_some_and(|posted| posted.sends_what_is_gone())
    }

    /// Registrations of regions that are gone go too.
    pub fn forget_revoked(&mut self) {
        if let Some(posted) = &mut self.posted {
            posted.forget_revoked();
        }
    }

    /// What the peer says of its receives; and whether the frame can be of this channel.
    pub(super) fn hear_posted(&mut self, header: &Header) -> io::Result<()> {
        match &mut self.posted {
            Some(posted) => {
                let is_first = !posted.is_heard();
                posted.fits(header).and_then(|()| posted.confirm(header.posted)).map_err(broken)?;
                if is_first {
                    self.tell_backlog();
                }
                Ok(())
            }
            None if header.is_posted() || header.posted != 0 => {
                Err(broken("it sends over a lane, and this channel has none"))
            }
            None => Ok(()),
        }
    }

    /// The connection is at its end. What its heads have announced may still come over the lane.
    pub(super) fn stream_ended(&mut self, error: io::Error) -> io::Result<()> {
        match &mut self.posted {
            Some(posted) if posted.waiting() > 0 && self.ended.is_none() => {
                posted.companion_closed(self.peer.now(), &error.to_string());
                self.ended = Some(error);
                Ok(())
            }
            _ => Err(error),
        }
    }
}
