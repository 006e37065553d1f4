//! The directories in which runs on this host keep journals.
//!
//! ```text
//!   /run/ferrywire/devmem                root
//!   $XDG_RUNTIME_DIR/ferrywire/devmem    a user with CAP_NET_ADMIN
//!   /run/user/1000/ferrywire/devmem      the usual value of that variable, which `sudo` and services do not set
//!   /tmp/ferrywire-1000/devmem           a user, once the runtime directory of a run was deleted, as at logout
//! ```
//!
//! Invariant: root writes only to directories in which no other user can change anything, and in the others only reads: a user
//! can exchange a part of such a path for a link at any moment, so that no check of its owner would hold.
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
    if make(&system).is_ok() {
        return system;
    }
    let left_to = replacement();
    if has_moved(&left_to) {
        return left_to;
    }
    let environment = of_environment().filter(|(run, _)| user() != ROOT || is_private_to(run, ROOT));
    environment.map_or(system, |(_, own)| own)
}

/// Whether a run of this user had to move its journal to `replacement`, which no other user can change.
pub(super) fn has_moved(replacement: &Path) -> bool {
    replacement.is_dir() && make_private(replacement).is_ok()
}

/// The directories that may have journals of earlier runs: for root those of all users, for a user the user's own and
/// root's.
pub(super) fn all() -> Vec<Directory> {
    candidates(of_environment().map(|(run, _)| run), Path::new(USERS), Path::new(SHARED), user())
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
    let private = |name: &str| shared.join(name);
    if user == ROOT {
        let runtime_dirs = numbered(users, "").into_iter().map(|name| users.join(name));
        for run in of_environment.into_iter().chain(runtime_dirs) {
            add(run.join(IN_RUNTIME_DIR), is_private_to(&run, ROOT));
        }
        for private in numbered(shared, PRIVATE_PREFIX).iter().map(|name| private(name)) {
            add(private.join(IN_PRIVATE), is_private_to(&private, ROOT));
        }
    } else {
        let own = users.join(user.to_string());
        of_environment.into_iter().chain([own]).for_each(|run| add(run.join(IN_RUNTIME_DIR), true));
        // Every user can make a folder of that name.
        let private = private(&format!("{PRIVATE_PREFIX}{user}"));
        if is_private_to(&private, user) {
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

/// The user's runtime directory, and the directory in it.
fn of_environment() -> Option<(PathBuf, PathBuf)> {
    let run = PathBuf::from(std::env::var_os("XDG_RUNTIME_DIR")?);
    let own = run.join(IN_RUNTIME_DIR);
    Some((run, own))
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
    if !is_private_to(private, user()) {
        let why = format!("{} is not a folder that only this user can enter", private.display());
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    }
    make(folder)
}

/// Whether only this user can enter and change a folder. A link is no folder.
fn is_private_to(folder: &Path, user: u32) -> bool {
    let is_private = |found: fs::Metadata| found.is_dir() && found.uid() == user && found.mode() & 0o077 == 0;
    fs::symlink_metadata(folder).is_ok_and(is_private)
}

/// The user to whom a folder belongs, if that is not the user of this process.
pub(super) fn other_owner(folder: &Path) -> io::Result<Option<u32>> {
    let owner = fs::metadata(folder)?.uid();
    Ok((owner != user()).then_some(owner))
}
