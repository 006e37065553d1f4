//! What moves the payload of an endpoint's channels over lanes beside their connections: a plugin, or a crate above.
//!
//! The rest of the engine knows a backend by the trait [`PayloadBackend`]: what both ends of a session have to agree on, and
//! how a channel gets its lane. `plugin/` implements it here, `ferrywire-devmem` does outside of the engine.
//! Invariant: a session has one backend or none, decided when it is opened and the same at both ends.
//! Read next: `lane.rs`, then `plugin/host.rs`.

use super::lane::Setup;
use super::plugin::Variable;
use super::terms::{DEVMEM, Terms, reason_without, without};
use crate::config::Config;
use crate::error::Result;
use ferrywire_memory::MemoryLocation;
use ferrywire_ncclnet::InflightCall;
use ferrywire_net::{Conn, Nic, Transport};
use ferrywire_proto::handshake::{Config as SessionConfig, RefusalCode};
use ferrywire_sys::poll::Waker;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// A backend as all parts of an endpoint share it.
pub type SharedBackend = Arc<dyn PayloadBackend>;

/// What a user says about a backend: [`Builder::payload_backend`](crate::Builder::payload_backend) takes it.
pub trait BackendConfig: fmt::Debug + Send + Sync {
    /// What the backend is called, in errors.
    fn name(&self) -> &str;

    /// Whether an endpoint that cannot have the backend is built without.
    fn is_optional(&self) -> bool;

    /// Makes the backend of an endpoint with this configuration, on a host with these NICs.
    ///
    /// # Errors
    /// Why the endpoint cannot have it.
    fn open(&self, endpoint: &Config, nics: &[Nic]) -> Result<SharedBackend>;
}

/// What moves the payload of an endpoint's channels beside their connections.
///
/// Defaults describe a backend whose lanes are connections of the kernel's.
pub trait PayloadBackend: fmt::Debug + Send + Sync {
    /// What the backend is called, in errors and between the ends.
    fn name(&self) -> &str;

    /// How payload moves, as reports name it.
    fn transport(&self) -> &'static str;

    /// The GPU whose memory it moves, beside the host's.
    fn gpu(&self) -> Option<MemoryLocation>;

    /// Largest message, and so the largest chunk, in bytes.
    fn message_bytes_max(&self) -> usize;

    /// NICs that channels have to keep to, by name; `None`: to those that the endpoint has chosen.
    fn nics(&self) -> Option<Vec<String>> {
        None
    }

    /// Variables of the environment that it was loaded with, and who set them.
    fn environment(&self) -> &[Variable] {
        &[]
    }

    /// Whether sessions may do without it.
    fn is_optional(&self) -> bool {
        false
    }

    /// Whether the ends of a session find out if both can, so that reports say why payload goes over the backend, or over
    /// TCP in its place.
    fn is_negotiated(&self) -> bool {
        false
    }

    /// What the other end has to have alike.
    fn terms(&self) -> Terms;

    /// What the end that connects to an address offers, as bytes; where the backend cannot be used, why not.
    ///
    /// # Errors
    /// Why the backend cannot be used, where the endpoint has no use for a session without it.
    fn offer(&self, _address: SocketAddr, _transport: &dyn Transport) -> Result<Vec<u8>> {
        Ok(self.terms().encode())
    }

    /// Compares with the other end's terms.
    ///
    /// # Errors
    /// Why the ends cannot have a session over the backend.
    fn agree(&self, theirs: &Terms, same_host: bool, session: &SessionConfig) -> Result<(), Incompatible>;

    /// Begins to set up the lane of a channel whose connection stands. `dials`: this end opened the session. `waker` is used
    /// whenever polling the set-up would tell something new.
    ///
    /// # Errors
    /// Why there can be no lane.
    fn begin(
        self: Arc<Self>,
        transport: &dyn Transport,
        conn: &dyn Conn,
        dials: bool,
        now: Duration,
        waker: Waker,
    ) -> Result<Box<dyn Setup>, String>;

    /// Longest that a lane may take to come about.
    fn setup_limit(&self) -> Duration;

    /// Longest that the oldest message of a lane may stand still.
    fn stall_limit(&self) -> Duration;

    /// Whether lanes make calls that may block, or never return. With such a backend a worker is turned by its own thread
    /// alone; with another that holds while the worker has lanes, since nothing wakes a caller for what lanes bring.
    fn calls_may_block(&self) -> bool {
        false
    }

    /// Calls that have not returned yet, where calls may block.
    fn inflight_calls(&self) -> Vec<InflightCall> {
        Vec::new()
    }

    /// A call of [`inflight_calls`](PayloadBackend::inflight_calls) in words.
    fn describe_call(&self, call: &InflightCall) -> String {
        format!("{}: {}", self.name(), call.call)
    }

    /// Whether the lane after a failed one would fail too. If not, the channel is dialled again, as one over TCP is.
    fn fails_for_good(&self) -> bool {
        false
    }

    /// Whether it ends its process where it cannot go on, and tells nobody at this end.
    fn ends_process(&self) -> bool {
        false
    }

    /// The endpoint is closed: what was set at NICs for it is undone, though somebody may hold the endpoint for ever.
    /// Waits about so long at most for others who change those NICs.
    fn end(&self, _limit: Duration) {}
}

/// Why two ends cannot have a session over a backend, in words for the user.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Incompatible {
    /// The ends have different backends, or the same one with different settings.
    #[error("{0}")]
    Mismatch(String),
    /// Both ends are on one host, within which the backend cannot move GPU memory.
    #[error("{0}")]
    SameHost(String),
    /// The session's options do not go with the backend.
    #[error("{0}")]
    Options(String),
}

impl Incompatible {
    /// What the other end is told for a reason.
    pub(crate) fn code(&self) -> RefusalCode {
        match self {
            Incompatible::Mismatch(_) => RefusalCode::PayloadMismatch,
            Incompatible::SameHost(_) => RefusalCode::SameHost,
            Incompatible::Options(_) => RefusalCode::Config,
        }
    }
}

/// What becomes of an offer at the end that accepts: the session's backend goes by what is left of it. `none`: why this
/// end has no backend, where it would have taken one.
///
/// # Errors
/// Why the two ends cannot have a session.
pub(crate) fn answer(
    ours: Option<&dyn PayloadBackend>,
    none: Option<&str>,
    offered: &[u8],
    same_host: bool,
    session: &SessionConfig,
) -> Result<Vec<u8>, Incompatible> {
    let declined = reason_without(offered);
    let theirs = (!offered.is_empty() && declined.is_none()).then(|| Terms::decode(offered));
    let declines = |why: &str| Ok(without(&format!("at the end that accepts: {why}")));
    match (ours, theirs) {
        (None, None) => Ok(offered.to_vec()),
        (Some(ours), None) if ours.is_optional() => Ok(offered.to_vec()),
        (Some(ours), Some(theirs)) if ours.name() == theirs.plugin() => {
            match ours.agree(&theirs, same_host, session) {
                Err(why) if ours.is_optional() && theirs.is_optional() => declines(&why.to_string()),
                agreed => agreed.map(|()| offered.to_vec()),
            }
        }
        (ours, Some(theirs)) if theirs.is_optional() && ours.is_none_or(|ours| ours.is_optional()) => {
            declines(none.unwrap_or("payload goes over tcp"))
        }
        (Some(ours), Some(theirs)) => ours.agree(&theirs, same_host, session).map(|()| offered.to_vec()),
        (Some(ours), None) => {
            let why = declined.map(|why| format!(" ({why})")).unwrap_or_default();
            Err(Incompatible::Mismatch(different(ours.name(), beside(ours.name())) + &why))
        }
        (None, Some(theirs)) => {
            Err(Incompatible::Mismatch(different(beside(theirs.plugin()), theirs.plugin())))
        }
    }
}

/// Why ends whose payload goes over different things have no session.
pub fn different(here: &str, there: &str) -> String {
    format!(
        "payload goes over {here} at the end that accepts and over {there} at the end that connects; both need the same"
    )
}

/// What an end without a backend is said to have, beside one that has this backend.
fn beside(backend: &str) -> &'static str {
    if backend == DEVMEM { "tcp" } else { "no plugin" }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SESSION: SessionConfig =
        SessionConfig { channels: 1, chunk_bytes: 1, window: 1, crc: false, extra: Vec::new() };

    /// A backend that has terms, and no lanes.
    #[derive(Debug)]
    struct Named(&'static str, bool);

    impl PayloadBackend for Named {
        fn name(&self) -> &str {
            self.0
        }

        fn transport(&self) -> &'static str {
            self.0
        }

        fn gpu(&self) -> Option<MemoryLocation> {
            None
        }

        fn message_bytes_max(&self) -> usize {
            1
        }

        fn is_optional(&self) -> bool {
            self.1
        }

        fn terms(&self) -> Terms {
            let terms = Terms::new(self.0, &[], false);
            if self.1 { terms.optional() } else { terms }
        }

        fn agree(&self, theirs: &Terms, _: bool, _: &SessionConfig) -> Result<(), Incompatible> {
            self.terms().agree(theirs)
        }

        fn begin(
            self: Arc<Self>,
            _transport: &dyn Transport,
            _conn: &dyn Conn,
            _dials: bool,
            _now: Duration,
            _waker: Waker,
        ) -> Result<Box<dyn Setup>, String> {
            Err("it has no lanes".into())
        }

        fn setup_limit(&self) -> Duration {
            Duration::ZERO
        }

        fn stall_limit(&self) -> Duration {
            Duration::ZERO
        }
    }

    fn answered(none: Option<&str>, offered: &[u8]) -> Result<Option<String>, Incompatible> {
        answer(None, none, offered, false, &SESSION).map(|extra| reason_without(&extra))
    }

    /// What becomes of the offer of `theirs`, at an end that has `ours`.
    fn between(ours: Option<&Named>, theirs: Option<&Named>) -> Result<Vec<u8>, Incompatible> {
        let ours = ours.map(|ours| ours as &dyn PayloadBackend);
        let offered = theirs.map_or_else(Vec::new, |theirs| theirs.terms().encode());
        answer(ours, None, &offered, false, &SESSION)
    }

    #[test]
    fn ends_that_both_need_what_the_other_lacks_are_told_what_each_has() {
        let over = |here: &str, there: &str| {
            Err(Incompatible::Mismatch(format!(
                "payload goes over {here} at the end that accepts and over {there} at the end that connects; both need \
                 the same"
            )))
        };
        let (devmem, plugin) = (Named(DEVMEM, false), Named("Sockets", false));
        assert_eq!(between(Some(&devmem), None), over("devmem", "tcp"));
        assert_eq!(between(None, Some(&devmem)), over("tcp", "devmem"));
        assert_eq!(between(Some(&plugin), None), over("Sockets", "no plugin"));
        assert_eq!(between(None, Some(&plugin)), over("no plugin", "Sockets"));
        // The backend itself says where two that are there differ.
        let differ = "plugin is Sockets at the end that accepts and devmem at the end that connects";
        assert!(between(Some(&plugin), Some(&devmem)).is_err_and(|why| why.to_string().starts_with(differ)));
        let declined =
            answer(Some(&devmem), None, &without("no NIC"), false, &SESSION).unwrap_err().to_string();
        assert!(
            declined.ends_with("over tcp at the end that connects; both need the same (no NIC)"),
            "{declined}"
        );
    }

    #[test]
    fn a_session_goes_without_only_where_both_ends_can() {
        let (needed, optional) = (Named(DEVMEM, false), Named(DEVMEM, true));
        assert_eq!(between(Some(&optional), None), Ok(Vec::new()));
        assert_eq!(between(Some(&needed), Some(&optional)), Ok(optional.terms().encode()));
        let other = Named("Sockets", true);
        let declined = between(Some(&optional), Some(&other)).map(|extra| reason_without(&extra));
        assert_eq!(declined, Ok(Some("at the end that accepts: payload goes over tcp".into())));
        assert!(between(Some(&needed), Some(&other)).is_err(), "this end needs devmem");
        assert!(between(Some(&other), Some(&needed)).is_err(), "the other end needs devmem");
    }

    #[test]
    fn an_end_without_a_carrier_declines_with_the_reason_and_takes_one() {
        let terms = Terms::new(DEVMEM, &[], false);
        let optional = terms.clone().optional().encode();
        let declined = answered(Some("NIC eth1 has no queue to spare"), &optional);
        assert_eq!(declined, Ok(Some("at the end that accepts: NIC eth1 has no queue to spare".into())));
        let never_tried = answered(None, &optional);
        assert_eq!(never_tried, Ok(Some("at the end that accepts: payload goes over tcp".into())));
        // What the other end cannot is kept for both.
        assert_eq!(answered(None, &without("at the end that connects: no NIC")), {
            Ok(Some("at the end that connects: no NIC".into()))
        });
        assert_eq!(answered(None, b""), Ok(None));
        let refused = answered(None, &terms.encode()).unwrap_err().to_string();
        assert!(refused.contains("over tcp at the end that accepts and over devmem at the end"), "{refused}");
    }
}
