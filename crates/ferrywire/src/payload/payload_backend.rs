//! What carries payload beside a channel's connection, where anything does: a plugin, or the kernel's devmem TCP.
//!
//! The rest of the engine knows lanes ([`lane`](super::lane)), their set-up, and what both ends have to agree on; this
//! is where the kinds part.
//! Invariant: a session has one carrier or none, decided when it is opened and the same at both ends.
//! Read next: `plugin/mod.rs`, `devmem/mod.rs`.

use super::lane::Setup;
use super::terms::{Terms, reason_without, without};
use super::{devmem, plugin};
use crate::error::{Error, Result};
use ferrywire_memory::Place;
use ferrywire_net::{Conn, Transport};
use ferrywire_proto::handshake::Config as SessionConfig;
use ferrywire_sys::poll::Waker;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// An endpoint's own.
#[derive(Clone, Debug)]
pub(crate) enum PayloadBackend {
    Plugin(Arc<plugin::Host>),
    Devmem(Arc<devmem::Host>),
}

impl PayloadBackend {
    /// What the end that connects offers, as bytes; where none will do, why there is none.
    ///
    /// # Errors
    /// Why there can be none, and there has to be one.
    pub fn offer(&self, address: SocketAddr, transport: &dyn Transport) -> Result<Vec<u8>> {
        let PayloadBackend::Devmem(host) = self else { return Ok(self.terms().encode()) };
        match host.crosses_nic(address, transport) {
            Ok(()) => Ok(self.terms().encode()),
            Err(why) if host.required() => Err(Error::Unreachable { address: address.to_string(), why }),
            Err(why) => Ok(without(&format!("at the end that connects: {why}"))),
        }
    }

    /// The GPU whose memory it moves, beside the host's.
    pub fn gpu(&self) -> Option<Place> {
        match self {
            PayloadBackend::Plugin(host) => host.gpu(),
            PayloadBackend::Devmem(host) => host.config.gpu,
        }
    }

    /// What the other end has to have alike.
    pub fn terms(&self) -> Terms {
        match self {
            PayloadBackend::Plugin(host) => host.terms(),
            PayloadBackend::Devmem(host) => host.terms(),
        }
    }

    /// Refuses a session with these terms of the other end, with the reason.
    pub fn agree(&self, theirs: &Terms, same_host: bool, session: &SessionConfig) -> Result<(), String> {
        match self {
            PayloadBackend::Plugin(host) => host.agree(theirs, same_host, session),
            PayloadBackend::Devmem(host) => host.agree(theirs, session),
        }
    }

    /// Whether sessions may do without it.
    pub fn optional(&self) -> bool {
        matches!(self, PayloadBackend::Devmem(host) if !host.required())
    }

    /// Longest that the oldest message of a lane may stand still.
    pub fn stall_limit(&self) -> Duration {
        match self {
            PayloadBackend::Plugin(host) => host.config.stall_limit,
            PayloadBackend::Devmem(host) => host.stall_limit(),
        }
    }

    /// Longest that a lane may take to come about.
    pub fn setup_limit(&self) -> Duration {
        match self {
            PayloadBackend::Plugin(host) => host.config.setup_limit,
            PayloadBackend::Devmem(host) => host.setup_limit(),
        }
    }

    /// The endpoint is closed: what was set at NICs for it is undone, though somebody may hold the endpoint for ever.
    /// Waits about so long at most for others who change those NICs.
    pub fn end(&self, limit: Duration) {
        match self {
            PayloadBackend::Plugin(_) => {}
            PayloadBackend::Devmem(host) => host.end(limit),
        }
    }

    /// The plugin, if it is one.
    pub fn plugin(&self) -> Option<&Arc<plugin::Host>> {
        match self {
            PayloadBackend::Plugin(host) => Some(host),
            PayloadBackend::Devmem(_) => None,
        }
    }

    /// What it is called.
    pub fn name(&self) -> &str {
        match self {
            PayloadBackend::Plugin(host) => host.plugin.name(),
            PayloadBackend::Devmem(_) => devmem::NAME,
        }
    }

    /// Begins to set up the lane of a channel whose connection stands. `dials`: this end opened the session. `waker` is used
    /// whenever polling the set-up would tell something new.
    ///
    /// # Errors
    /// Why there can be no lane.
    pub fn begin(
        &self,
        transport: &dyn Transport,
        conn: &dyn Conn,
        dials: bool,
        now: Duration,
        waker: Waker,
    ) -> Result<Box<dyn Setup>, String> {
        match self {
            PayloadBackend::Plugin(host) => {
                let nics = transport.nics().map_err(|error| format!("listing NICs: {error}"))?;
                let device = host.device_at(conn.local().ip(), &nics)?;
                Ok(Box::new(plugin::PluginSetup::start(host, device, now, waker)?))
            }
            PayloadBackend::Devmem(host) => {
                let nic = transport.nic_name(conn.local().ip()).ok_or_else(|| {
                    format!("no NIC of this host has the address {} any more", conn.local().ip())
                })?;
                Ok(Box::new(devmem::DevmemSetup::start(host, &nic, dials, now, waker)?))
            }
        }
    }
}

/// What becomes of an offer at the end that accepts: the session's carrier goes by what is left of it. `none`: why this
/// end has no carrier, where it would have taken one.
///
/// # Errors
/// Why the two ends cannot have a session.
pub(crate) fn answer(
    ours: Option<&PayloadBackend>,
    none: Option<&str>,
    offered: &[u8],
    same_host: bool,
    session: &SessionConfig,
) -> Result<Vec<u8>, String> {
    let declined = reason_without(offered);
    let theirs = (!offered.is_empty() && declined.is_none()).then(|| Terms::decode(offered));
    let declines = |why: &str| Ok(without(&format!("at the end that accepts: {why}")));
    match (ours, theirs) {
        (None, None) => Ok(offered.to_vec()),
        (Some(carrier), None) if carrier.optional() => Ok(offered.to_vec()),
        (Some(carrier), Some(theirs)) if carrier.name() == theirs.plugin() => {
            match carrier.agree(&theirs, same_host, session) {
                Err(why) if carrier.optional() && theirs.optional() => declines(&why),
                agreed => agreed.map(|()| offered.to_vec()),
            }
        }
        (ours, Some(theirs)) if theirs.optional() && ours.is_none_or(PayloadBackend::optional) => {
            declines(none.unwrap_or("payload goes over tcp"))
        }
        (Some(carrier), Some(theirs)) if carrier.plugin().is_some() => {
            carrier.agree(&theirs, same_host, session).map(|()| offered.to_vec())
        }
        (here, there) => {
            let devmem = matches!(here, Some(PayloadBackend::Devmem(_)))
                || there.as_ref().is_some_and(|terms| terms.plugin() == devmem::NAME);
            let none = if devmem { "tcp" } else { "no plugin" };
            let here = here.map_or(none, PayloadBackend::name);
            let there = there.as_ref().map_or(none, Terms::plugin);
            let why = declined.map(|why| format!(" ({why})")).unwrap_or_default();
            Err(format!(
                "payload goes over {here} at the end that accepts and over {there} at the end that connects; both need \
                 the same{why}"
            ))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answered(none: Option<&str>, offered: &[u8]) -> Result<Option<String>, String> {
        let session = SessionConfig { channels: 1, chunk_bytes: 1, window: 1, crc: false, extra: Vec::new() };
        answer(None, none, offered, false, &session).map(|extra| reason_without(&extra))
    }

    #[test]
    fn an_end_without_a_carrier_declines_with_the_reason_and_takes_one() {
        let terms = Terms::new(devmem::NAME, &[], false);
        let optional = terms.clone().if_possible().encode();
        let declined = answered(Some("NIC eth1 has no queue to spare"), &optional);
        assert_eq!(declined, Ok(Some("at the end that accepts: NIC eth1 has no queue to spare".into())));
        let never_tried = answered(None, &optional);
        assert_eq!(never_tried, Ok(Some("at the end that accepts: payload goes over tcp".into())));
        // What the other end cannot is kept for both.
        assert_eq!(answered(None, &without("at the end that connects: no NIC")), {
            Ok(Some("at the end that connects: no NIC".into()))
        });
        assert_eq!(answered(None, b""), Ok(None));
        let refused = answered(None, &terms.encode()).unwrap_err();
        assert!(refused.contains("over tcp at the end that accepts and over devmem at the end"), "{refused}");
    }
}
