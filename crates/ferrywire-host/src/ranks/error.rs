//! Why nobody can say which process this is. Each names the variables or flags, as they are set.

/// Numbers that do not fit together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RanksError {
    /// A variable is no number.
    #[error("{variable} is not a number that can be")]
    NotANumber {
        /// The variable with its value.
        variable: String,
    },
    /// Some of a launcher's variables are set, others are not.
    #[error("{set} is set and {missing} is not: set both, or neither{}", with_flag(missing, flag))]
    HalfSet {
        /// One that is set, with its value.
        set: String,
        /// The one that is not.
        missing: &'static str,
        /// The flag that would do instead.
        flag: &'static str,
    },
    /// Two launchers say different things.
    #[error(
        "{one}, but {other}: two launchers disagree; unset the variables of one, or give --rank, --world-size and --local-rank"
    )]
    Disagree {
        /// The inner one's variable with its value.
        one: String,
        /// The outer one's.
        other: String,
    },
    /// A rank is not below the number of processes.
    #[error("{rank} is not below {world_size}: ranks are numbered from 0")]
    Outside {
        /// The rank's variable with its value.
        rank: String,
        /// The number's.
        world_size: String,
    },
    /// More processes than a run can have.
    #[error("{world_size} is more than a run can have ({})", ferrywire_proto::limits::RANKS_MAX)]
    TooMany {
        /// The variable with its value.
        world_size: String,
    },
    /// A list of nodes that cannot be read.
    #[error("{variable}: {why}")]
    BadNodes {
        /// The variable with its value.
        variable: String,
        /// What is wrong with it.
        why: String,
    },
    /// A meeting point without anybody who goes there.
    #[error(
        "--rendezvous {text} says where ranks meet, and nobody says which rank this is: give --rank and --world-size too, or \
         start it by a launcher"
    )]
    NoRank {
        /// What was typed.
        text: String,
    },
    /// A meeting point that cannot be read.
    #[error("--rendezvous {text}: write it as HOST:PORT")]
    BadRendezvous {
        /// What was typed.
        text: String,
    },
}

fn with_flag(missing: &str, flag: &str) -> String {
    if missing == flag { String::new() } else { format!(", or give {flag}") }
}
