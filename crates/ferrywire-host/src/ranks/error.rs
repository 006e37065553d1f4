//! Errors of [`Ranks`](super::Ranks). Each names the variables or flags with their values.
//!
//! Read next: `mod.rs`, which returns them.

/// Why no rank can be derived from the variables and flags.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RanksError {
    /// A variable's value is not a number.
    #[error("{variable} is not a valid number")]
    NotANumber {
        /// The variable with its invalid value, as in `RANK=x`.
        variable: String,
    },
    /// Some of a launcher's variables are set, others are not.
    #[error("{set} is set and {missing} is not: set both, or neither{}", with_flag(missing, flag))]
    HalfSet {
        /// A variable that is set, with its value.
        set: String,
        /// The variable that is not set.
        missing: &'static str,
        /// The flag that can replace the missing variable.
        flag: &'static str,
    },
    /// Two launchers contradict each other.
    #[error(
        "{one}, but {other}: two launchers disagree; unset the variables of one, or give --rank, --world-size and --local-rank"
    )]
    Disagree {
        /// A variable of the inner launcher, with its value.
        one: String,
        /// The contradicting variable of the outer launcher, with its value.
        other: String,
    },
    /// A rank is not below the world size.
    #[error("{rank} must be below {world_size}: ranks are numbered from 0")]
    Outside {
        /// The rank's variable with its value.
        rank: String,
        /// The world size's variable with its value.
        world_size: String,
    },
    /// The world size is above [`RANKS_MAX`](ferrywire_proto::limits::RANKS_MAX).
    #[error("{world_size} is too large: a run has at most {} ranks", ferrywire_proto::limits::RANKS_MAX)]
    TooMany {
        /// The world size's variable with its value.
        world_size: String,
    },
    /// A launcher's list of nodes cannot be parsed.
    #[error("{variable}: {why}")]
    BadNodes {
        /// The variable that has the list, with its value.
        variable: String,
        /// Why the list cannot be parsed.
        why: String,
    },
    /// A rendezvous was given without ranks.
    #[error(
        "--rendezvous {text} needs the rank of this process: give --rank and --world-size too, or \
         start the process with a launcher"
    )]
    NoRank {
        /// The value of `--rendezvous` as it was given.
        text: String,
    },
    /// The value of `--rendezvous` cannot be parsed.
    #[error("--rendezvous {text}: write it as HOST:PORT")]
    BadRendezvous {
        /// The value of `--rendezvous` as it was given.
        text: String,
    },
}

fn with_flag(missing: &str, flag: &str) -> String {
    if missing == flag { String::new() } else { format!(", or give {flag}") }
}
