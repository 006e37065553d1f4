//! Why queues of a NIC cannot be claimed or used.
//!
//! Read next: `../errors.rs`, for the kernel's refusals.

use std::fmt;
use std::path::PathBuf;

use crate::DevmemError;
use crate::sys::netlink::NetlinkError;

/// Why a claim on queues failed. The text says who has to act: mostly the administrator of this host.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NicError {
    /// The kernel refuses to bind or to change a setting.
    #[error(transparent)]
    Refused(#[from] DevmemError),
    /// There is no NIC of this name.
    #[error("there is no NIC {nic} in this network namespace")]
    NoNic {
        /// Name of the missing NIC.
        nic: String,
    },
    /// There are too few free queues.
    #[error("NIC {nic}: {why}")]
    NoQueues {
        /// Name of the NIC that has too few free queues.
        nic: String,
        /// How many queues there are, which programs use them, and what would help.
        why: String,
    },
    /// Flow rules are off, and neither ferrywire nor an administrator can turn them on.
    #[error(
        "NIC {nic}: flow rules (ntuple) are off, and its driver cannot turn them on, so no connection can be steered to \
         a claimed queue: use --transport tcp"
    )]
    NoFlowRules {
        /// Name of the NIC without flow rules.
        nic: String,
    },
    /// Settings must be changed for devmem TCP, and changes are not allowed.
    #[error(
        "NIC {nic} is not set up for devmem TCP: {}. --allow-nic-setup changes this and restores it at the end; by \
         hand: {}",
        listed(missing, "; "),
        commands(nic, missing)
    )]
    NotSetUp {
        /// Name of the NIC that is not set up.
        nic: String,
        /// The settings that must be changed.
        missing: Vec<Missing>,
    },
    /// A change could not be recorded in the journal first, so nothing was changed.
    #[error("cannot keep the journal of NIC {nic} at {}: {why}", path.display())]
    Journal {
        /// Name of the NIC of the journal.
        nic: String,
        /// Path of the journal's file.
        path: PathBuf,
        /// The failed call on the file, and what may help.
        why: String,
    },
}

impl NicError {
    /// The error of reading or changing a setting of a NIC.
    pub(super) fn setting(nic: &str, what: &str, hint: String, error: &NetlinkError) -> NicError {
        let what = what.to_owned();
        DevmemError::Setting { nic: nic.to_owned(), what, said: error.to_string(), hint }.into()
    }
}

/// A setting of a NIC that devmem TCP needs and that is missing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Missing {
    /// Header split for packets of every size.
    Split {
        /// The present state of header split.
        is: &'static str,
    },
    /// Flow rules for single connections (ntuple).
    Ntuple,
    /// A spread of other flows that leaves out the claimed queues.
    Spread {
        /// Numbers of the claimed queues.
        queues: Vec<u32>,
        /// The number of queues left for other flows: the first queues of the NIC.
        others: u32,
    },
}

impl Missing {
    fn command(&self, nic: &str) -> String {
        match self {
            Missing::Split { .. } => split_command(nic),
            Missing::Ntuple => ntuple_command(nic),
            Missing::Spread { others, .. } => format!("ethtool -X {nic} equal {others}"),
        }
    }
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Missing::Split { is } => {
                write!(f, "header split must be on with threshold 0 ({is})")
            }
            Missing::Ntuple => f.write_str("flow rules (ntuple) must be on"),
            Missing::Spread { queues, .. } => {
                write!(f, "other flows (RSS) must not use {}", queues_in_words(queues))
            }
        }
    }
}

/// The command that turns header split on.
pub(super) fn split_command(nic: &str) -> String {
    format!("ethtool -G {nic} tcp-data-split on hds-thresh 0")
}

/// The command that turns flow rules on.
pub(super) fn ntuple_command(nic: &str) -> String {
    format!("ethtool -K {nic} ntuple on")
}

/// Formats numbers of queues: `queue 3`, `queues 2, 3`.
pub(super) fn queues_in_words(queues: &[u32]) -> String {
    let numbers = listed(queues, ", ");
    if queues.len() == 1 { format!("queue {numbers}") } else { format!("queues {numbers}") }
}

fn listed<T: ToString>(items: &[T], between: &str) -> String {
    items.iter().map(ToString::to_string).collect::<Vec<_>>().join(between)
}

fn commands(nic: &str, missing: &[Missing]) -> String {
    listed(&missing.iter().map(|one| one.command(nic)).collect::<Vec<_>>(), " && ")
}
