//! The interface of backends that move payload over lanes beside the channels' connections.
//!
//! The engine uses a backend only by the trait [`PayloadBackend`]: what both ends of a session must agree on,
//! and how a channel gets its lane. `plugin/` implements it here, `ferrywire-devmem` in a crate above.
//! Invariant: a session has one backend or none. This is decided when the session is opened, and is equal at
//! both ends.
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

/// A backend, shared by all parts of an endpoint.
pub type SharedBackend = Arc<dyn PayloadBackend>;

/// Configuration of a backend, for [`Builder::payload_backend`](crate::Builder::payload_backend).
pub trait BackendConfig: fmt::Debug + Send + Sync {
    /// Name of the backend, for error messages.
    fn name(&self) -> &str;

    /// Whether an endpoint is built without the backend if it is not available.
    fn is_optional(&self) -> bool;

    /// Creates the backend for an endpoint with this configuration, on a host with these NICs.
    ///
    /// # Errors
    /// Why the backend is not available.
    fn open(&self, endpoint: &Config, nics: &[Nic]) -> Result<SharedBackend>;
}

/// A backend that moves payload beside the channels' connections.
///
/// The default methods suit a backend whose lanes are connections of the kernel.
pub trait PayloadBackend: fmt::Debug + Send + Sync {
    /// Name of the backend, for error messages and for comparison between the ends.
    fn name(&self) -> &str;

    /// Name of the transport, for reports.
    fn transport(&self) -> &'static str;

    /// The GPU whose memory the backend moves besides host memory.
    fn gpu(&self) -> Option<MemoryLocation>;

    /// Largest message, and so the largest chunk, in bytes.
    fn message_bytes_max(&self) -> usize;

    /// Names of the NICs that channels must use; `None` for those that the endpoint has chosen.
    fn nics(&self) -> Option<Vec<String>> {
        None
    }

    /// The environment variables that the backend was loaded with, and who set them.
    fn environment(&self) -> &[Variable] {
        &[]
    }

    /// Whether a session is possible without the backend.
    fn is_optional(&self) -> bool {
        false
    }

    /// Whether the ends negotiate if both can use the backend. If so, reports state why payload goes over the
    /// backend or over TCP.
    fn is_negotiated(&self) -> bool {
        false
    }

    /// The terms that the other end has to match.
    fn terms(&self) -> Terms;

    /// The connecting end's offer for a session with this address, as bytes. If the backend is optional
    /// and not available, the offer is the reason.
    ///
    /// # Errors
    /// Why the backend is not available, if the endpoint needs it.
    fn offer(&self, _address: SocketAddr, _transport: &dyn Transport) -> Result<Vec<u8>> {
        Ok(self.terms().encode())
    }

    /// Compares the other end's terms.
    ///
    /// # Errors
    /// Why the ends cannot have a session over the backend.
    fn agree(&self, theirs: &Terms, same_host: bool, session: &SessionConfig) -> Result<(), Incompatible>;

    /// Starts to set up the lane of a channel whose connection is established. `dials` is true at the end
    /// that opened the session. The set-up wakes `waker` whenever polling it would return something new.
    ///
    /// # Errors
    /// Why the lane cannot be set up.
    fn begin(
        self: Arc<Self>,
        transport: &dyn Transport,
        conn: &dyn Conn,
        dials: bool,
        now: Duration,
        waker: Waker,
    ) -> Result<Box<dyn Setup>, String>;

    /// Longest time for the set-up of a lane.
    fn setup_timeout(&self) -> Duration;

    /// Longest time without progress of a lane's oldest message.
    fn stall_timeout(&self) -> Duration;

    /// Whether lanes make calls that may block or never return. If so, only a worker's own thread polls its
    /// lanes. With other backends this holds only while the worker has lanes, because lanes raise no event
    /// that would wake a caller.
    fn calls_may_block(&self) -> bool {
        false
    }

    /// Calls that have not returned yet, if calls may block.
    fn inflight_calls(&self) -> Vec<InflightCall> {
        Vec::new()
    }

    /// A description of a call from [`inflight_calls`](PayloadBackend::inflight_calls).
    fn describe_call(&self, call: &InflightCall) -> String {
        format!("{}: {}", self.name(), call.call)
    }

    /// Whether the next lane would fail too after one has failed. If not, the channel is dialled again, as
    /// over TCP.
    fn fails_for_good(&self) -> bool {
        false
    }

    /// Whether the backend may end its process on a failure, without notice to this end.
    fn ends_process(&self) -> bool {
        false
    }

    /// Undoes the backend's settings at NICs, because the endpoint is closed; handles to the endpoint may
    /// live on. Waits at most about `limit` for other processes that change these NICs.
    fn end(&self, _limit: Duration) {}
}

/// Why two ends cannot have a session over a backend; each variant holds the message for the user.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Incompatible {
    /// The ends have different backends, or one backend with different settings.
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
    /// The code that reports the reason to the other end.
    pub(crate) fn code(&self) -> RefusalCode {
        match self {
            Incompatible::Mismatch(_) => RefusalCode::PayloadMismatch,
            Incompatible::SameHost(_) => RefusalCode::SameHost,
            Incompatible::Options(_) => RefusalCode::Config,
        }
    }
}

/// Decides on an offer at the accepting end, and returns what the session's backend will be derived from.
/// `none` is why this end has no backend, if one was requested.
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
            declines(none.unwrap_or("payload uses tcp"))
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

/// The error for two ends whose payload goes over different backends.
pub fn different(here: &str, there: &str) -> String {
    format!(
        "payload goes over {here} at the end that accepts and over {there} at the end that connects; both need the same"
    )
}

/// What an end without a backend is said to use, where the other end uses `backend`.
fn beside(backend: &str) -> &'static str {
    if backend == DEVMEM { "tcp" } else { "no plugin" }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SESSION: SessionConfig = SessionConfig {
        channels: 1,
        chunk_bytes: 1,
        window: 1,
        crc: false,
        wish: ferrywire_proto::protection::ProtectionWish::NONE,
        extra: Vec::new(),
    };

    /// A backend with terms and without lanes.
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

        fn setup_timeout(&self) -> Duration {
            Duration::ZERO
        }

        fn stall_timeout(&self) -> Duration {
            Duration::ZERO
        }
    }

    fn answered(none: Option<&str>, offered: &[u8]) -> Result<Option<String>, Incompatible> {
        answer(None, none, offered, false, &SESSION).map(|extra| reason_without(&extra))
    }

    /// The answer to the offer of `theirs` at an end with `ours`.
    fn between(ours: Option<&Named>, theirs: Option<&Named>) -> Result<Vec<u8>, Incompatible> {
        let ours = ours.map(|ours| ours as &dyn PayloadBackend);
        let offered = theirs.map_or_else(Vec::new, |theirs| theirs.terms().encode());
        answer(ours, None, &offered, false, &SESSION)
    }

    #[test]
    fn ends_that_both_need_what_the_other_lacks_report_what_each_has() {
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
        // If both ends have a backend, the backend itself describes the difference.
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
    fn a_session_without_backend_needs_both_ends_to_permit_it() {
        let (needed, optional) = (Named(DEVMEM, false), Named(DEVMEM, true));
        assert_eq!(between(Some(&optional), None), Ok(Vec::new()));
        assert_eq!(between(Some(&needed), Some(&optional)), Ok(optional.terms().encode()));
        let other = Named("Sockets", true);
        let declined = between(Some(&optional), Some(&other)).map(|extra| reason_without(&extra));
        assert_eq!(declined, Ok(Some("at the end that accepts: payload uses tcp".into())));
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
        assert_eq!(never_tried, Ok(Some("at the end that accepts: payload uses tcp".into())));
        // Both ends keep the reason that the connecting end gave.
        assert_eq!(answered(None, &without("at the end that connects: no NIC")), {
            Ok(Some("at the end that connects: no NIC".into()))
        });
        assert_eq!(answered(None, b""), Ok(None));
        let refused = answered(None, &terms.encode()).unwrap_err().to_string();
        assert!(refused.contains("over tcp at the end that accepts and over devmem at the end"), "{refused}");
    }
}
