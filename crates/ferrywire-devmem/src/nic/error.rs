//! Why queues of a NIC cannot be had, or used.
//!
//! Read next: `../errors.rs`, what the kernel's refusals mean.

use std::fmt;
use std::path::PathBuf;

use crate::DevmemError;
use crate::sys::netlink::NetlinkError;

/// Why a claim failed. Whose turn it is follows from the text: mostly that of whoever administers this host.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NicError {
    /// The kernel refuses to bind, or to change a setting.
    #[error(transparent)]
    Refused(#[from] DevmemError),
    /// There is no such NIC here.
    #[error("there is no NIC {nic} in this network namespace")]
    NoNic {
        /// Its name.
        nic: String,
    },
    /// Not enough queues are left.
    #[error("NIC {nic}: {why}")]
    NoQueues {
        /// The NIC.
        nic: String,
        /// How many there are, who has them, what would do.
        why: String,
    },
    /// Settings are not as devmem TCP needs them, and must not be changed.
    #[error(
        "NIC {nic} is not set up for devmem TCP: {}. With --allow-nic-setup that is done, and undone at the end; by \
         hand: {}",
        listed(missing, "; "),
        commands(nic, missing)
    )]
    NotSetUp {
        /// The NIC.
        nic: String,
        /// What is missing.
        missing: Vec<Missing>,
    },
    /// What is changed could not be written down first, so nothing was changed.
    #[error("cannot keep the journal of NIC {nic} at {}: {why}", path.display())]
    Journal {
        /// The NIC.
        nic: String,
        /// Where it is kept.
        path: PathBuf,
        /// What failed, and what may help.
        why: String,
    },
}

impl NicError {
    /// A setting could not be read or changed.
    pub(super) fn setting(nic: &str, what: &str, hint: String, error: &NetlinkError) -> NicError {
        let what = what.to_owned();
        DevmemError::Setting { nic: nic.to_owned(), what, said: error.to_string(), hint }.into()
    }
}

/// A setting that devmem TCP needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Missing {
    /// Headers of TCP packets apart from payload, whatever the size of the packet.
    Split {
        /// How it is.
        is: &'static str,
    },
    /// Rules for single connections.
    Ntuple,
    /// Other flows kept off the claimed queues.
    Spread {
        /// The queues.
        queues: Vec<u32>,
        /// Queues that are left for the others: the first ones of the NIC.
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
                write!(f, "header split has to be on, with threshold 0 ({is})")
            }
            Missing::Ntuple => f.write_str("rules for flows (ntuple) have to be on"),
            Missing::Spread { queues, .. } => {
                write!(f, "other flows (RSS) have to keep off {}", queues_in_words(queues))
            }
        }
    }
}

/// What sets header split by hand.
pub(super) fn split_command(nic: &str) -> String {
    format!("ethtool -G {nic} tcp-data-split on hds-thresh 0")
}

/// What switches rules for flows on by hand.
pub(super) fn ntuple_command(nic: &str) -> String {
    format!("ethtool -K {nic} ntuple on")
}

/// `queue 3`, `queues 2, 3`.
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
