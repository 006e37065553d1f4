//! The directories in which runs on this host keep journals.
//!
//! ```text
//!   /run/ferrywire/devmem                root
//!   $XDG_RUNTIME_DIR/ferrywire/devmem    a user with CAP_NET_ADMIN
//!   /run/user/1000/ferrywire/devmem      the usual value of that variable, which `sudo` and services do not set
//!   /tmp/ferrywire-1000/devmem           a run whose runtime directory was deleted, as at its user's logout
//! ```
//!
//! Invariant: only a directory of this process's user is written to, because links in a directory of another user could
//! make root write elsewhere.
//! Read next: `journal.rs`, the contents; `cleanup.rs`, which searches all of them.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

const SYSTEM: &str = "/run/ferrywire/devmem";
const USERS: &str = "/run/user";
const IN_RUNTIME_DIR: &str = "ferrywire/devmem";
const ROOT: u32 = 0;

/// The directory for a new journal: the first candidate that is writable.
pub(super) fn writable() -> PathBuf {
    let system = PathBuf::from(SYSTEM);
    match of_environment() {
        Some(own) if make(&system).is_err() => own,
        _ => system,
    }
}

/// The directories that may have journals of earlier runs: for root those of all users, for a user the user's own and
/// root's.
pub(super) fn all() -> Vec<PathBuf> {
    let mut all = candidates(of_environment(), Path::new(USERS), user());
    // Every user can write to the parent of the replacement.
    all.extend(Some(replacement()).filter(|own| matches!(other_owner(own), Ok(None))));
    all
}

/// The directory for the journal of a run whose own directory was deleted and cannot be made again.
pub(super) fn replacement() -> PathBuf {
    std::env::temp_dir().join(format!("ferrywire-{}/devmem", user()))
}

fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

pub(super) fn candidates(of_environment: Option<PathBuf>, users: &Path, user: u32) -> Vec<PathBuf> {
    let runtime_dirs = if user == ROOT {
        let found = fs::read_dir(users).into_iter().flatten().flatten();
        let mut found: Vec<PathBuf> = found.map(|of_user| of_user.path()).collect();
        found.sort_unstable();
        found
    } else {
        vec![users.join(user.to_string())]
    };
    let mut all = vec![PathBuf::from(SYSTEM)];
    let below = runtime_dirs.into_iter().map(|runtime_dir| runtime_dir.join(IN_RUNTIME_DIR));
    for directory in of_environment.into_iter().chain(below) {
        if !all.contains(&directory) {
            all.push(directory);
        }
    }
    all
}

fn of_environment() -> Option<PathBuf> {
    std::env::var_os("XDG_RUNTIME_DIR").map(|run| Path::new(&run).join(IN_RUNTIME_DIR))
}

/// Makes a folder, if there is none.
///
/// # Errors
/// The folder cannot be made or belongs to another user: such a folder is not trusted, writable or not.
pub(super) fn make(folder: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    match other_owner(folder)? {
        None => Ok(()),
        Some(_) => Err(io::Error::new(io::ErrorKind::PermissionDenied, "the folder belongs to another user")),
    }
}

/// The user to whom a folder belongs, if that is not the user of this process.
pub(super) fn other_owner(folder: &Path) -> io::Result<Option<u32>> {
    let owner = fs::metadata(folder)?.uid();
    Ok((owner != user()).then_some(owner))
}
