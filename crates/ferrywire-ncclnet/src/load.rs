//! Opening a plugin's library, by path or by NCCL's naming rule.
//!
//! Files that cannot be plugins are rejected before the loader sees them.
//! Invariants: `SIGPIPE` is ignored before a plugin's code runs, since plugins write to sockets of dead
//! peers; a table is read with the struct of exactly its version; a library whose `init` was called is never
//! unloaded, since its threads may still run its code.
//! Read next: `net.rs`.

use std::ffi::{CStr, c_char, c_void};
use std::fs::File;
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library as Handle, RTLD_LOCAL, RTLD_NOW};

use super::abi::*;
use super::error::LoadError;
use super::find::{Candidate, candidates};
use super::functions::{Callable, Functions};
use super::net::Plugin;
use super::{elf, sanitize};
use ferrywire_proto::limits::PLUGIN_NAME_BYTES_MAX;
use ferrywire_sys::signal;

/// The oldest version that NCCL 2.30 supports.
const NCCL_OLDEST: Version = Version::V6;
/// Versions that this crate does not support; error messages name them.
const TOO_OLD: [(u32, &CStr); 3] =
    [(1, c"ncclNetPlugin_v1"), (2, c"ncclNetPlugin_v2"), (3, c"ncclNetPlugin_v3")];

/// A plugin's library, opened but not started.
#[derive(Debug)]
pub struct Library {
    handle: Handle,
    path: String,
}

impl Library {
    /// Opens the library at `path`.
    ///
    /// From then on this process ignores `SIGPIPE`.
    ///
    /// # Safety
    /// The file's code runs in this process with all its rights: the caller trusts it. No thread changes the
    /// environment during the call.
    pub unsafe fn open(path: impl AsRef<Path>) -> Result<Library, LoadError> {
        let path = path.as_ref();
        check(path)?;
        // A name without a slash gets the prefix `./`: the loader would search its own directories for it.
        let name = if path.components().count() > 1 { path.to_owned() } else { Path::new(".").join(path) };
        // SAFETY: the caller trusts the file's code.
        unsafe { open(Some(name), path.display().to_string()) }
    }

    /// Opens the plugin that NCCL would select for this value of `NCCL_NET_PLUGIN`; `None` means that it is
    /// not set.
    ///
    /// # Safety
    /// The promise of [`Library::open`].
    pub unsafe fn find(name: Option<&str>) -> Result<Library, LoadError> {
        let candidates = candidates(name).map_err(LoadError::BadName)?;
        let mut failed = Vec::new();
        for candidate in &candidates {
            // SAFETY: the caller trusts the code of the file that is found.
            match unsafe { open_candidate(candidate) } {
                Ok(library) if library.versions().is_empty() => failed.push(library.no_table()),
                Ok(library) => return Ok(library.found()),
                Err(error) => failed.push(error),
            }
        }
        Err(none_of(name.unwrap_or("(not named)"), failed))
    }

    /// Path of the plugin's library.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The versions that the library exports, newest first.
    pub fn versions(&self) -> Vec<Version> {
        Version::NEWEST_FIRST.into_iter().filter(|version| self.address(version.symbol()).is_some()).collect()
    }

    /// Exported versions that are too old for this crate.
    pub fn older_versions(&self) -> Vec<u32> {
        TOO_OLD
            .iter()
            .filter(|(_, symbol)| self.address(symbol).is_some())
            .map(|(number, _)| *number)
            .collect()
    }

    /// The version that NCCL 2.30 would select; `None` when it would reject the library.
    pub fn nccl_choice(&self) -> Option<Version> {
        self.versions().first().copied().filter(|newest| *newest >= NCCL_OLDEST)
    }

    /// Starts the plugin with the version `wanted`, or else with its newest one.
    ///
    /// A table is started once per process: a second load returns the first load's plugin or error.
    ///
    /// # Safety
    /// The promise of [`Library::open`]: this call runs the plugin's `init` and `devices`.
    pub unsafe fn load(self, wanted: Option<Version>) -> Result<Plugin, LoadError> {
        let version = self.choose(wanted)?;
        let address = self.address(version.symbol()).ok_or_else(|| self.no_table())?;
        // SAFETY: the symbol of this version is a table of this version, by the caller's trust in the file.
        let found = unsafe { FoundTable::read(version, address, &self.path) }?;
        // SAFETY: the caller trusts the file; the library stays open, since `Plugin::start` never closes it.
        unsafe { Plugin::start(self.handle, found) }
    }

    fn choose(&self, wanted: Option<Version>) -> Result<Version, LoadError> {
        let exported = self.versions();
        match (exported.first(), wanted) {
            (None, _) => Err(self.no_table()),
            (Some(newest), None) => Ok(*newest),
            (Some(_), Some(wanted)) if exported.contains(&wanted) => Ok(wanted),
            (Some(_), Some(wanted)) => {
                Err(LoadError::NoSuchVersion { path: self.path.clone(), wanted, exported })
            }
        }
    }

    fn address(&self, symbol: &CStr) -> Option<*const c_void> {
        // SAFETY: only the address is taken; nothing is read or called through it here.
        let found = unsafe { self.handle.get::<*const c_void>(symbol.to_bytes_with_nul()) };
        found.ok().map(|symbol| symbol.as_raw_ptr().cast_const()).filter(|address| !address.is_null())
    }

    fn no_table(&self) -> LoadError {
        LoadError::NoTable { path: self.path.clone(), older: self.older_versions() }
    }

    /// Replaces the library's path by that of the file which the loader found.
    fn found(mut self) -> Library {
        let table = Version::NEWEST_FIRST.into_iter().find_map(|version| self.address(version.symbol()));
        if let Some(file) = table.and_then(file_of) {
            self.path = file;
        }
        self
    }
}

/// Path of the file from which the memory at an address was mapped.
fn file_of(address: *const c_void) -> Option<String> {
    let mut info = libc::Dl_info {
        dli_fname: std::ptr::null(),
        dli_fbase: std::ptr::null_mut(),
        dli_sname: std::ptr::null(),
        dli_saddr: std::ptr::null_mut(),
    };
    // SAFETY: dladdr accepts any address; the pointer is to a whole Dl_info.
    let found = unsafe { libc::dladdr(address, &mut info) } != 0 && !info.dli_fname.is_null();
    // SAFETY: dladdr gave a string that lives as long as the library, which is open.
    found.then(|| unsafe { CStr::from_ptr(info.dli_fname) }.to_string_lossy().into_owned())
}

/// A table that was found in a library, before `init`.
pub(super) struct FoundTable {
    pub version: Version,
    pub path: String,
    pub name: String,
    pub functions: Functions,
    /// Address of the table, which also identifies it among the loaded ones.
    pub address: *const c_void,
}

impl FoundTable {
    /// # Safety
    /// A table of version `version` is at `address`.
    pub unsafe fn read(
        version: Version,
        address: *const c_void,
        path: &str,
    ) -> Result<FoundTable, LoadError> {
        // SAFETY: the caller promises a table of this version at the address.
        let functions = unsafe { functions_at(version, address) }.map_err(|slot| LoadError::MissingSlot {
            path: path.to_owned(),
            version,
            slot,
        });
        // SAFETY: a table is at the address, and slot 0 of every version has the name.
        let name = unsafe { name_at(address) };
        let name = name.ok_or_else(|| LoadError::NullName { path: path.to_owned(), version })?;
        Ok(FoundTable { version, path: path.to_owned(), name, functions: functions?, address })
    }
}

/// # Safety
/// A table of any version is at `address`.
pub(super) unsafe fn name_at(address: *const c_void) -> Option<String> {
    // SAFETY: the caller promises a table, whose name is null or ends with 0.
    unsafe { sanitize::read(*address.cast::<*const c_char>(), PLUGIN_NAME_BYTES_MAX) }
}

/// # Safety
/// A table of version `version` is at `address`.
pub(super) unsafe fn functions_at(
    version: Version,
    address: *const c_void,
) -> Result<Functions, &'static str> {
    // SAFETY: the caller promises a table of this version at the address.
    unsafe {
        match version {
            Version::V4 => address.cast::<NetV4>().read().functions(),
            Version::V5 => address.cast::<NetV5>().read().functions(),
            Version::V6 => address.cast::<NetV6>().read().functions(),
            Version::V7 => address.cast::<NetV7>().read().functions(),
            Version::V8 => address.cast::<NetV8>().read().functions(),
            Version::V9 => address.cast::<NetV9>().read().functions(),
            Version::V10 => address.cast::<NetV10>().read().functions(),
            Version::V11 => address.cast::<NetV11>().read().functions(),
            Version::V12 => address.cast::<NetV12>().read().functions(),
        }
    }
}

/// Returns an error for a file that cannot be a shared library; the loader might crash on it.
fn check(path: &Path) -> Result<(), LoadError> {
    let shown = path.display().to_string();
    let unreadable = |why: String| LoadError::Unreadable { path: shown.clone(), why };
    let metadata = std::fs::metadata(path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => LoadError::Missing { path: shown.clone() },
        _ => unreadable(error.to_string()),
    })?;
    if !metadata.is_file() {
        return Err(unreadable("not a file".to_owned()));
    }
    let checked = File::open(path).and_then(|file| elf::check(&file));
    match checked.map_err(|error| unreadable(error.to_string()))? {
        Ok(()) => Ok(()),
        Err(elf::Defect::NotElf) => Err(LoadError::NotElf { path: shown }),
        Err(elf::Defect::Other(why)) => Err(LoadError::WrongElf { path: shown, why }),
        Err(elf::Defect::Truncated { file_bytes, needed_bytes }) => {
            Err(LoadError::Truncated { path: shown, file_bytes, needed_bytes })
        }
    }
}

/// # Safety
/// The promise of [`Library::open`].
unsafe fn open_candidate(candidate: &Candidate) -> Result<Library, LoadError> {
    // SAFETY: the caller trusts the code of the file, in every arm.
    unsafe {
        match candidate {
            Candidate::File(name) if name.contains('/') => Library::open(name),
            Candidate::File(name) => open(Some(PathBuf::from(name)), name.clone()),
            Candidate::Program => open(None, "(this program)".to_owned()),
        }
    }
}

/// # Safety
/// The promise of [`Library::open`].
unsafe fn open(name: Option<PathBuf>, shown: String) -> Result<Library, LoadError> {
    let refused = |why: String| LoadError::Refused { path: shown.clone(), is_absent: false, why };
    signal::ignore_sigpipe().map_err(|error| refused(format!("SIGPIPE cannot be ignored: {error}")))?;
    // SAFETY: the caller trusts the code of the file.
    let opened = unsafe { Handle::open(name.as_deref(), RTLD_NOW | RTLD_LOCAL) };
    let handle = opened.map_err(|error| {
        let said = error.to_string();
        let why = loaders_words(&said, name.as_deref());
        LoadError::Refused { path: shown.clone(), is_absent: is_absent(&said, name.as_deref()), why }
    })?;
    Ok(Library { handle, path: shown })
}

/// Whether the loader found no file of this name. False where it found the file, and not a library that the
/// file needs.
///
/// The loader's message is the only source: `dlerror` returns nothing but text, and the directories of the
/// loader's cache are unknown. The answer selects which of several errors is shown, and decides nothing else.
fn is_absent(said: &str, name: Option<&Path>) -> bool {
    let own = name.and_then(|name| said.strip_prefix(&format!("{}: ", name.display())));
    own.is_some_and(|words| words.contains("No such file"))
}

/// The loader's message as one line, without the path at its start.
fn loaders_words(said: &str, name: Option<&Path>) -> String {
    let prefix = name.map(|name| format!("{}: ", name.display())).unwrap_or_default();
    sanitize::plain(said.strip_prefix(&prefix).unwrap_or(said).as_bytes())
}

/// Combines the errors of several candidates: the error of the only file that exists, or else all of them.
fn none_of(name: &str, mut failed: Vec<LoadError>) -> LoadError {
    let absent = |error: &LoadError| {
        matches!(error, LoadError::Missing { .. } | LoadError::Refused { is_absent: true, .. })
    };
    let present: Vec<usize> = (0..failed.len()).filter(|&at| !absent(&failed[at])).collect();
    match (failed.len(), &present[..]) {
        (0, _) => LoadError::NoneWanted,
        (1, _) => failed.remove(0),
        (_, [only]) => failed.remove(*only),
        _ => {
            let tried: Vec<String> = failed.iter().map(LoadError::to_string).collect();
            LoadError::NotFound { name: name.to_owned(), tried: tried.join("; ") }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_lacks_a_library_is_not_absent_itself() {
        let name = Some(Path::new("libnccl-net.so"));
        let missing =
            |library: &str| format!("{library}: cannot open shared object file: No such file or directory");
        assert!(is_absent(&missing("libnccl-net.so"), name));
        assert!(!is_absent(&missing("libcuda.so.1"), name));
        assert!(!is_absent("libnccl-net.so: undefined symbol: x", name));
    }

    #[test]
    fn which_error_is_shown_does_not_depend_on_its_words() {
        let error = |path: &str, is_absent| LoadError::Refused {
            path: path.to_owned(),
            is_absent,
            why: "No such file or directory".to_owned(),
        };
        let shown = none_of("net", vec![error("a", true), error("b", false)]);
        assert_eq!(shown, error("b", false));
        let shown = none_of("net", vec![error("a", true), error("b", true)]);
        assert!(matches!(shown, LoadError::NotFound { .. }), "{shown:?}");
    }
}
