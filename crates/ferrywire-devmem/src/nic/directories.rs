//! The directories in which runs on this host keep journals.
//!
//! ```text
//!   /run/ferrywire/devmem                root
//!   $XDG_RUNTIME_DIR/ferrywire/devmem    a user with CAP_NET_ADMIN
//!   /run/user/1000/ferrywire/devmem      the usual value of that variable, which `sudo` and services do not set
//!   /tmp/ferrywire-1000/devmem           a user, once the runtime directory of a run was deleted, as at logout
//! ```
//!
//! Invariant: root writes only to root's directory, and in the others only reads: a user can exchange a part of such a path
//! for a link at any moment, so that no check of its owner would hold.
//! Read next: `journal.rs`, the contents; `cleanup.rs`, which searches all of them.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

const SYSTEM: &str = "/run/ferrywire/devmem";
const USERS: &str = "/run/user";
const SHARED: &str = "/tmp";
const PRIVATE_PREFIX: &str = "ferrywire-";
const IN_RUNTIME_DIR: &str = "ferrywire/devmem";
const IN_PRIVATE: &str = "devmem";
const ROOT: u32 = 0;

/// A directory that may have journals.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Directory {
    pub path: PathBuf,
    /// Whether this process may undo what is recorded there; else it only reports that.
    pub is_ours: bool,
}

/// The directory for a new journal. All runs of a user have to use one: once one of them had to leave the runtime
/// directory, the others follow it.
pub(super) fn writable() -> PathBuf {
    let system = PathBuf::from(SYSTEM);
    let left_to = replacement();
    match of_environment() {
        _ if user() != ROOT && left_to.is_dir() && make_private(&left_to).is_ok() => left_to,
        Some(own) if make(&system).is_err() => own,
        _ => system,
    }
}

/// The directories that may have journals of earlier runs: for root those of all users, for a user the user's own and
/// root's.
pub(super) fn all() -> Vec<Directory> {
    candidates(of_environment(), Path::new(USERS), Path::new(SHARED), user())
}

/// The directory for the journal of a run whose own directory was deleted and cannot be made again.
pub(super) fn replacement() -> PathBuf {
    Path::new(SHARED).join(format!("{PRIVATE_PREFIX}{}", user())).join(IN_PRIVATE)
}

fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

pub(super) fn candidates(
    of_environment: Option<PathBuf>,
    users: &Path,
    shared: &Path,
    user: u32,
) -> Vec<Directory> {
    let mut all = vec![Directory { path: PathBuf::from(SYSTEM), is_ours: true }];
    let mut add = |path: PathBuf, is_ours| {
        if !all.iter().any(|known| known.path == path) {
            all.push(Directory { path, is_ours });
        }
    };
    let of_user = |name: &str| users.join(name).join(IN_RUNTIME_DIR);
    if user == ROOT {
        of_environment.into_iter().for_each(|path| add(path, false));
        numbered(users, "").iter().for_each(|name| add(of_user(name), false));
        let private = numbered(shared, PRIVATE_PREFIX);
        private.iter().for_each(|name| add(shared.join(name).join(IN_PRIVATE), false));
    } else {
        of_environment.into_iter().for_each(|path| add(path, true));
        add(of_user(&user.to_string()), true);
        let private = shared.join(format!("{PRIVATE_PREFIX}{user}"));
        // Every user can make a folder of that name.
        if is_private(&private, user).unwrap_or(false) {
            add(private.join(IN_PRIVATE), true);
        }
    }
    all
}

/// The names in a folder that are a user's number behind `prefix`, in order.
fn numbered(folder: &Path, prefix: &str) -> Vec<String> {
    let found = fs::read_dir(folder).into_iter().flatten().flatten();
    let names = found.filter_map(|entry| entry.file_name().into_string().ok());
    let is_user = |name: &String| name.strip_prefix(prefix).is_some_and(|user| user.parse::<u32>().is_ok());
    let mut names: Vec<String> = names.filter(is_user).collect();
    names.sort_unstable();
    names
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

/// Makes a folder within one that only this user can enter, which lies in a folder of all users.
///
/// # Errors
/// The folder cannot be made, or others can change it.
pub(super) fn make_private(folder: &Path) -> io::Result<()> {
    let private = folder.parent().ok_or(io::ErrorKind::InvalidInput)?;
    match DirBuilder::new().mode(0o700).create(private) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    if !is_private(private, user())? {
        let why = format!("{} is not a folder that only this user can enter", private.display());
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    }
    make(folder)
}

/// Whether only this user can enter and change a folder. A link is no folder.
fn is_private(folder: &Path, user: u32) -> io::Result<bool> {
    let found = fs::symlink_metadata(folder)?;
    Ok(found.is_dir() && found.uid() == user && found.mode() & 0o077 == 0)
}

/// The user to whom a folder belongs, if that is not the user of this process.
pub(super) fn other_owner(folder: &Path) -> io::Result<Option<u32>> {
    let owner = fs::metadata(folder)?.uid();
    Ok((owner != user()).then_some(owner))
}
