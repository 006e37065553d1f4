//! NIXL's statuses, and the status for each error of the engine.

use ferrywire::Error;

/// A status of NIXL, as it crosses the boundary to C++.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Status(pub i32);

impl Status {
    pub const IN_PROGRESS: Status = Status(1);
    pub const SUCCESS: Status = Status(0);
    pub const INVALID_PARAMETER: Status = Status(-2);
    pub const BACKEND: Status = Status(-3);
    pub const NOT_FOUND: Status = Status(-4);
    pub const MISMATCH: Status = Status(-5);
    pub const NOT_ALLOWED: Status = Status(-6);
    pub const NOT_POSTED: Status = Status(-1);
    pub const REPOST_ACTIVE: Status = Status(-7);
    pub const NOT_SUPPORTED: Status = Status(-9);
    pub const REMOTE_DISCONNECT: Status = Status(-10);
    pub const CANCELLED: Status = Status(-11);

    /// The status for an error of the engine. The log has the message.
    pub fn of(error: impl Into<Error>) -> Status {
        match error.into() {
            Error::Invalid { .. } | Error::NoUsableNic { .. } | Error::OutOfRegion { .. } => {
                Status::INVALID_PARAMETER
            }
            Error::AccessRefused { .. } | Error::Refused { .. } => Status::NOT_ALLOWED,
            Error::PeerLost { .. } | Error::PeerClosed { .. } | Error::Unreachable { .. } => {
                Status::REMOTE_DISCONNECT
            }
            Error::Closed => Status::REMOTE_DISCONNECT,
            Error::UnsupportedMemory { .. } => Status::NOT_SUPPORTED,
            Error::Cancelled => Status::CANCELLED,
            _ => Status::BACKEND,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nics_without_an_address_for_the_target_are_a_wrong_parameter() {
        let error = Error::NoUsableNic { nics: "eth1".into(), address: "[::1]:1".into() };
        assert_eq!(Status::of(error), Status::INVALID_PARAMETER);
    }
}
