//! What can end an operation of the soak other than success, sorted by what it means for the soak.

use ferrywire::{ConnectError, Error, RegisterError, TransferError};

use crate::driver::say;

/// Why an operation, or a session, ended early.
#[derive(Clone, Debug)]
pub enum Trouble {
    /// A byte differs, or the library said something that is not true.
    Wrong(String),
    /// An operation has not ended in time.
    Unended(String),
    /// The peer was lost, and the error names it: right if the peer was killed or no path was left.
    Lost(String),
    /// One end closed the connection in an orderly way.
    Closed(String),
    /// Any other error.
    Failed(String),
    /// The driver has ordered the end.
    End,
}

impl Trouble {
    /// Tells the driver.
    pub fn report(&self) {
        match self {
            Trouble::Wrong(text) => say("wrong", text),
            Trouble::Unended(text) => say("unended", text),
            Trouble::Lost(text) => say("lost", text),
            Trouble::Closed(text) => say("closed", text),
            Trouble::Failed(text) => say("failed", text),
            Trouble::End => {}
        }
    }
}

impl From<Error> for Trouble {
    fn from(error: Error) -> Trouble {
        let text = error.to_string();
        match error {
            Error::Stalled { .. } | Error::TimedOut { .. } => Trouble::Unended(text),
            Error::PeerLost { .. } => Trouble::Lost(text),
            Error::PeerClosed { .. } | Error::Closed => Trouble::Closed(text),
            _ => Trouble::Failed(text),
        }
    }
}

impl From<TransferError> for Trouble {
    fn from(error: TransferError) -> Trouble {
        Error::from(error).into()
    }
}

impl From<RegisterError> for Trouble {
    fn from(error: RegisterError) -> Trouble {
        Error::from(error).into()
    }
}

impl From<ConnectError> for Trouble {
    fn from(error: ConnectError) -> Trouble {
        Error::from(error).into()
    }
}
