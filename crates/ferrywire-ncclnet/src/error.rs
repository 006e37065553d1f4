//! Errors of loading and calling a plugin.
//!
//! Each error prints as one line: the file or plugin, the call, device and connection, the cause, and what to
//! try. Errors are values, so tests compare them and transports act on their fields.
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
    /// The file does not exist.
    #[error("{path}: there is no such file")]
    Missing {
        /// Path, as the caller gave it.
        path: String,
    },
    /// The file cannot be read.
    #[error("{path}: {why}")]
    Unreadable {
        /// Path, as the caller gave it.
        path: String,
        /// The operating system's message about the file.
        why: String,
    },
    /// The file is no ELF file (text, archive, image).
    #[error("{path}: not a shared library (it does not begin with an ELF header)")]
    NotElf {
        /// Path, as the caller gave it.
        path: String,
    },
    /// The file is an ELF file that cannot be loaded on this machine.
    #[error("{path}: cannot be loaded: {why}")]
    WrongElf {
        /// Path, as the caller gave it.
        path: String,
        /// Why the ELF file cannot be loaded.
        why: &'static str,
    },
    /// The file ends before the end that its headers state.
    #[error(
        "{path}: truncated: it has {file_bytes} bytes, and its headers need {needed_bytes}; copy it again"
    )]
    Truncated {
        /// Path, as the caller gave it.
        path: String,
        /// Size of the file in bytes.
        file_bytes: u64,
        /// Smallest size that the headers require, in bytes.
        needed_bytes: u64,
    },
    /// The loader rejected the file, for example for an undefined symbol or a missing library.
    #[error("{path}: cannot be loaded: {why}")]
    Refused {
        /// Path, as the caller gave it.
        path: String,
        /// Whether the loader found no file of that name.
        is_absent: bool,
        /// The loader's message about the library.
        why: String,
    },
    /// None of the files that NCCL's naming rule yields could be opened.
    #[error("cannot find the plugin {name:?}: {tried}")]
    NotFound {
        /// Name of the plugin, as the caller gave it.
        name: String,
        /// Each file that was tried, with its error.
        tried: String,
    },
    /// The name is not valid; the text says why.
    #[error("{0}")]
    BadName(String),
    /// The name is `none` or empty: no plugin is wanted.
    #[error("the name \"none\", or an empty one, asks for no plugin")]
    NoneWanted,
    /// The library exports no table of a supported version.
    #[error("{path}: exports no ncclNetPlugin_v4 to v12{}", other_tables(.older))]
    NoTable {
        /// Path of the library without a table.
        path: String,
        /// Versions below 4 of which the library exports tables.
        older: Vec<u32>,
    },
    /// The library does not export the requested version.
    #[error("{path}: exports no ncclNetPlugin_{wanted}; it has {}", listed(.exported))]
    NoSuchVersion {
        /// Path of the library.
        path: String,
        /// The version that was requested.
        wanted: Version,
        /// The versions that the library exports.
        exported: Vec<Version>,
    },
    /// The plugin's name in the table is a null pointer.
    #[error("{path}: the plugin's {version} table has no name (a null pointer)")]
    NullName {
        /// Path of the library.
        path: String,
        /// Version of the table.
        version: Version,
    },
    /// A mandatory function is missing in the table.
    #[error("{path}: the plugin's {version} table has no {slot} function (a null pointer)")]
    MissingSlot {
        /// Path of the library.
        path: String,
        /// Version of the table.
        version: Version,
        /// Name of the missing function.
        slot: &'static str,
    },
    /// The plugin's `init` or `devices` failed.
    #[error("{path}: {error}{}", last_words(.said))]
    Failed {
        /// Path of the library.
        path: String,
        /// The call of the plugin that failed.
        error: Box<CallError>,
        /// Lines that the plugin has logged since `init` began.
        said: Box<LastLines>,
    },
    /// The plugin started, but offers no device.
    #[error("{path}: plugin {plugin} ({version}) has no devices (it reports {count}){}", last_words(.said))]
    NoDevices {
        /// Path of the library.
        path: String,
        /// Name of the plugin.
        plugin: String,
        /// Version of the table.
        version: Version,
        /// The number of devices that the plugin reported.
        count: i32,
        /// Lines that the plugin has logged since `init` began.
        said: Box<LastLines>,
    },
    /// A limit of this process was reached.
    #[error("{path}: {why}")]
    Limit {
        /// Path of the library.
        path: String,
        /// Name and value of the limit.
        why: String,
    },
}

fn other_tables(older: &[u32]) -> String {
    let names: Vec<String> = older.iter().map(|version| format!("ncclNetPlugin_v{version}")).collect();
    if names.is_empty() {
        return ": not an NCCL net plugin".to_owned();
    }
    format!(": only {}, which is too old", names.join(" and "))
}

fn listed(versions: &[Version]) -> String {
    let names: Vec<String> = versions.iter().map(Version::to_string).collect();
    names.join(", ")
}

/// The most informative warning, with its fix when the cause is known; without a warning, the last line of
/// the log.
fn last_words(said: &LastLines) -> String {
    let line = said.warning().or_else(|| said.iter().next_back());
    let output = line.map_or_else(String::new, |line| format!("; last output: {}", line.text));
    let fix = said.cause().map_or_else(String::new, |(cause, _)| format!("; fix: {}", cause.fix()));
    output + &fix
}

/// A plugin call that failed or was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallError {
    /// Name of the plugin that was called.
    pub plugin: Arc<str>,
    /// Version of the table in use.
    pub version: Version,
    /// The function that was called.
    pub call: Call,
    /// The device that the call concerns; `None` for calls about the whole plugin.
    pub device: Option<i32>,
    /// The name of the device's NIC, where it is known.
    pub nic: Option<Arc<str>>,
    /// The connection that the call concerns, if any.
    pub comm: Option<CommId>,
    /// Why the call failed.
    pub cause: Cause,
}

/// Why a plugin call failed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Cause {
    /// The plugin returned this code.
    Result(ResultCode),
    /// The plugin's table lacks this optional function.
    Missing,
    /// The call was refused before the plugin was called: the size exceeds the range of this version's
    /// argument.
    TooLarge {
        /// The requested size in bytes.
        bytes: usize,
        /// The largest size in bytes that the signature can express.
        limit: usize,
    },
    /// The call was refused before the plugin was called: it would be undefined behaviour in some plugins.
    Misuse(&'static str),
    /// The plugin returned success, but its results contradict it.
    BadAnswer(&'static str),
}

impl CallError {
    /// The code that the plugin returned; `None` when the call failed for another cause.
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
                "; some plugins return this when too many requests are in flight"
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
            Cause::BadAnswer(what) => write!(f, ": the plugin returned success, but {what}"),
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
    fn a_failed_call_is_reported_in_one_line() {
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
