//! What can go wrong with a plugin: loading it, and calling it.
//!
//! Each error is one line that names the file or the plugin, the call, the device and the connection it was
//! about, and what to try. Errors are values, so that tests compare them and a transport can act on them.
//! Read next: `load.rs`.

use std::fmt;
use std::sync::Arc;

use super::abi::{ResultCode, Version};
use super::clock::Call;
use super::comm::CommId;
use super::log::LastLines;

/// Why a plugin could not be loaded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// There is no file of that name.
    #[error("{path}: there is no such file")]
    Missing {
        /// As given.
        path: String,
    },
    /// It cannot be read.
    #[error("{path}: {why}")]
    Unreadable {
        /// As given.
        path: String,
        /// The system's words.
        why: String,
    },
    /// A text file, an archive, a picture.
    #[error("{path}: not a shared library (it does not begin with an ELF header)")]
    NotElf {
        /// As given.
        path: String,
    },
    /// ELF, but nothing that can be loaded here.
    #[error("{path}: cannot be loaded: {why}")]
    WrongElf {
        /// As given.
        path: String,
        /// What it is.
        why: &'static str,
    },
    /// The file ends before what its headers promise.
    #[error(
        "{path}: truncated: it has {file_bytes} bytes, and its headers speak of {needed_bytes}; copy it again"
    )]
    Truncated {
        /// As given.
        path: String,
        /// What is there.
        file_bytes: u64,
        /// What there should be at least.
        needed_bytes: u64,
    },
    /// The loader refused it: an undefined symbol, a missing library.
    #[error("{path}: cannot be loaded: {why}")]
    Refused {
        /// As given.
        path: String,
        /// Whether no file of that name is where the loader looks.
        is_absent: bool,
        /// The loader's words.
        why: String,
    },
    /// None of the names that the rule gives could be opened.
    #[error("no plugin {name:?}: {tried}")]
    NotFound {
        /// As given.
        name: String,
        /// Each file that was tried, and why it was not that.
        tried: String,
    },
    /// The name cannot be used.
    #[error("{0}")]
    BadName(String),
    /// The name says that no plugin is wanted.
    #[error("the name \"none\" asks for no plugin")]
    NoneWanted,
    /// A library without any table that can be used.
    #[error("{path}: exports no ncclNetPlugin_v4 to v12{}", other_tables(.older))]
    NoTable {
        /// The file.
        path: String,
        /// Versions below 4 that it does export.
        older: Vec<u32>,
    },
    /// The version asked for is not among those it exports.
    #[error("{path}: exports no ncclNetPlugin_{wanted}; it has {}", listed(.exported))]
    NoSuchVersion {
        /// The file.
        path: String,
        /// What was asked for.
        wanted: Version,
        /// What there is.
        exported: Vec<Version>,
    },
    /// The table's name is a null pointer.
    #[error("{path}: its {version} table has no name (a null pointer)")]
    NullName {
        /// The file.
        path: String,
        /// The table.
        version: Version,
    },
    /// A function that every plugin must have is missing.
    #[error("{path}: its {version} table has no {slot} function (a null pointer)")]
    MissingSlot {
        /// The file.
        path: String,
        /// The table.
        version: Version,
        /// The function.
        slot: &'static str,
    },
    /// `init` or `devices` failed.
    #[error("{path}: {error}{}", last_words(.said))]
    Failed {
        /// The file.
        path: String,
        /// The call.
        error: Box<CallError>,
        /// What the plugin has logged meanwhile.
        said: Box<LastLines>,
    },
    /// It works, but has nothing to offer.
    #[error("{path}: plugin {plugin} ({version}) has no devices (it says {count}){}", last_words(.said))]
    NoDevices {
        /// The file.
        path: String,
        /// Its name.
        plugin: String,
        /// The table.
        version: Version,
        /// What it gave as their number.
        count: i32,
        /// What the plugin has logged meanwhile.
        said: Box<LastLines>,
    },
    /// A limit of this process.
    #[error("{path}: {why}")]
    Limit {
        /// The file.
        path: String,
        /// Which limit.
        why: String,
    },
}

fn other_tables(older: &[u32]) -> String {
    let names: Vec<String> = older.iter().map(|version| format!("ncclNetPlugin_v{version}")).collect();
    match names.is_empty() {
        true => ": not an NCCL net plugin".to_owned(),
        false => format!(": only {}, which is too old", names.join(" and ")),
    }
}

fn listed(versions: &[Version]) -> String {
    let names: Vec<String> = versions.iter().map(Version::to_string).collect();
    names.join(", ")
}

/// The warning that tells most, with what to do about it; without one the last line.
fn last_words(said: &LastLines) -> String {
    let line = said.warning().or_else(|| said.iter().next_back());
    let said_last = line.map_or_else(String::new, |line| format!("; it said last: {}", line.text));
    let fix = said.cause().map_or_else(String::new, |(cause, _)| format!("; fix: {}", cause.fix()));
    said_last + &fix
}

/// A call of a plugin that did not do what it is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallError {
    /// The plugin's name.
    pub plugin: Arc<str>,
    /// The table in use.
    pub version: Version,
    /// The function.
    pub call: Call,
    /// The device, where it was about one.
    pub device: Option<i32>,
    /// The device's own name, where it is known.
    pub nic: Option<Arc<str>>,
    /// The connection, where it was about one.
    pub comm: Option<CommId>,
    /// What happened.
    pub cause: Cause,
}

/// What made a call fail.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Cause {
    /// The plugin returned this.
    Result(ResultCode),
    /// The plugin's table has no such function; it is optional.
    Missing,
    /// Not called: a size does not fit into what this version of the interface can say.
    TooLarge {
        /// The size asked for.
        bytes: usize,
        /// What is possible.
        limit: usize,
    },
    /// Not called: at this point the call would be undefined behaviour in some plugins.
    Misuse(&'static str),
    /// The plugin said success and did not do what success means.
    BadAnswer(&'static str),
}

impl CallError {
    /// What the plugin returned, if it was called and failed.
    pub fn code(&self) -> Option<ResultCode> {
        match self.cause {
            Cause::Result(code) => Some(code),
            _ => None,
        }
    }

    fn hint(&self) -> &'static str {
        let Cause::Result(code) = self.cause else { return "" };
        match (self.call, code) {
            (Call::RegMr, _) => "; check alignment and kind of the memory",
            (Call::Isend | Call::Irecv, ResultCode::INTERNAL_ERROR) => {
                "; some plugins answer so when too many requests are posted"
            }
            (Call::Test, ResultCode::SYSTEM_ERROR | ResultCode::REMOTE_ERROR) => "; the peer may be gone",
            _ => "",
        }
    }
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "plugin {} ({}): {}", self.plugin, self.version, self.call)?;
        match (self.device, &self.nic) {
            (Some(device), Some(nic)) => write!(f, " on device {device} ({nic})")?,
            (Some(device), None) => write!(f, " on device {device}")?,
            _ => {}
        }
        if let Some(comm) = self.comm {
            write!(f, ", {comm}")?;
        }
        match &self.cause {
            Cause::Result(code) => write!(f, ": {code}{}", self.hint()),
            Cause::Missing => f.write_str(": the plugin has no such function"),
            Cause::TooLarge { bytes, limit } => {
                write!(f, ": not called: {bytes} bytes; this version of the interface takes at most {limit}")
            }
            Cause::Misuse(why) => write!(f, ": not called: {why}"),
            Cause::BadAnswer(what) => write!(f, ": it said success, but {what}"),
        }
    }
}

impl std::error::Error for CallError {}

#[cfg(test)]
mod tests {
    use super::super::comm::CommKind;
    use super::*;

    fn error(cause: Cause) -> CallError {
        CallError {
            plugin: "Example".into(),
            version: Version::V7,
            call: Call::Accept,
            device: Some(2),
            nic: Some("eth3".into()),
            comm: Some(CommId { kind: CommKind::Listen, number: 5 }),
            cause,
        }
    }

    #[test]
    fn a_call_that_failed_is_told_in_one_line() {
        let said = error(Cause::Result(ResultCode::INTERNAL_ERROR)).to_string();
        assert!(said.starts_with(
            "plugin Example (v7): accept on device 2 (eth3), listen comm 5: result 3 (internal error)"
        ));
        let refused = CallError { device: None, nic: None, comm: None, ..error(Cause::Missing) };
        assert_eq!(refused.to_string(), "plugin Example (v7): accept: the plugin has no such function");
        let large = error(Cause::TooLarge { bytes: 1 << 31, limit: i32::MAX as usize }).to_string();
        assert!(large.ends_with(
            "not called: 2147483648 bytes; this version of the interface takes at most 2147483647"
        ));
    }

    #[test]
    fn a_library_without_tables_says_what_it_has() {
        let none = LoadError::NoTable { path: "x.so".into(), older: vec![] };
        assert_eq!(none.to_string(), "x.so: exports no ncclNetPlugin_v4 to v12: not an NCCL net plugin");
        let old = LoadError::NoTable { path: "x.so".into(), older: vec![2, 3] };
        assert_eq!(
            old.to_string(),
            "x.so: exports no ncclNetPlugin_v4 to v12: only ncclNetPlugin_v2 and ncclNetPlugin_v3, which is too old"
        );
    }
}
