//! The folder of a NIXL's backends: its contents, and the steps that install and remove ferrywire's backend.
//!
//! Each step is one rename, link or removal, so a command that is interrupted between two steps leaves a state that
//! [`State`] describes: `status` reports it, and `install` and `remove` continue from it.
//!
//! ```text
//!   libplugin_FERRYWIRE.so                    ours
//!   libplugin_UCX.so                          NIXL's own, or with the alias ours
//!   libplugin_UCX.so.before-ferrywire         with the alias NIXL's own: no name that NIXL takes for a backend
//!   libplugin_FERRYWIRE.so.new                a copy that is not complete yet
//! ```

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use super::library::{self, FILE, Library};
use super::python::Nixl;
use crate::exit::{Failure, Outcome};

/// The file that the alias replaces.
pub const UCX: &str = "libplugin_UCX.so";
/// The name of NIXL's own UCX backend while the alias is installed.
pub const BACKUP: &str = "libplugin_UCX.so.before-ferrywire";
/// File name of a copy that is not complete yet.
const NEW: &str = "libplugin_FERRYWIRE.so.new";
/// The mode of a package's libraries.
const MODE: u32 = 0o644;

/// The owner of a file name in the folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Held {
    /// There is no such file.
    Nothing,
    /// Ferrywire's backend: its version, and whether it is identical to the file to be installed, if that is known.
    Ours(String, Option<bool>),
    /// Another file.
    Other,
}

/// The contents of the folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    /// The file under the backend's own name.
    pub backend: Held,
    /// The file under UCX's name.
    pub ucx: Held,
    /// Whether there is a backup of NIXL's own UCX backend.
    pub backup: bool,
    /// Whether there is an incomplete copy.
    pub incomplete: bool,
}

impl State {
    /// Whether programs that ask for UCX get ferrywire.
    pub fn has_alias(&self) -> bool {
        matches!(self.ucx, Held::Ours(..))
    }

    /// Whether ferrywire can be used by its own name.
    pub fn is_installed(&self) -> bool {
        matches!(self.backend, Held::Ours(..))
    }

    /// Whether any file is ferrywire's.
    pub fn has_ours(&self) -> bool {
        self.is_installed() || self.has_alias() || self.backup || self.incomplete
    }

    /// The traces of an interrupted command, or of another program's changes since; `None` if the state is complete.
    pub fn half_done(&self) -> Option<String> {
        match (&self.ucx, self.backup) {
            (Held::Nothing, true) => Some(format!("NIXL's own {UCX} is still named {BACKUP}")),
            (Held::Other, true) => {
                Some(format!("both NIXL's own {UCX} and {BACKUP} exist, so the alias has no effect"))
            }
            _ if self.incomplete => Some(format!("{NEW} is an incomplete copy")),
            _ => None,
        }
    }
}

/// A folder of backends.
#[derive(Debug)]
pub struct Folder<'a> {
    nixl: &'a Nixl,
    path: &'a Path,
}

impl<'a> Folder<'a> {
    /// The folder of this NIXL.
    pub fn of(nixl: &'a Nixl) -> Folder<'a> {
        Folder { nixl, path: &nixl.plugins }
    }

    /// Reads the folder's state.
    pub fn read_state(&self, library: Option<&Library>) -> Outcome<State> {
        Ok(State {
            backend: self.held(FILE, library)?,
            ucx: self.held(UCX, library)?,
            backup: is_there(&self.at(BACKUP)),
            incomplete: is_there(&self.at(NEW)),
        })
    }

    fn held(&self, name: &str, library: Option<&Library>) -> Outcome<Held> {
        let path = self.at(name);
        if !is_there(&path) {
            return Ok(Held::Nothing);
        }
        match library::contents(&path) {
            Ok(bytes) => Ok(match library {
                Some(library) if library.bytes == bytes => Held::Ours(library.version.clone(), Some(true)),
                _ => library::version(&bytes)
                    .map_or(Held::Other, |version| Held::Ours(version, library.map(|_| false))),
            }),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                Err(failed("read", &path, &error))
            }
            // A folder or a dangling link was not made by this command.
            Err(_) => Ok(Held::Other),
        }
    }

    /// Installs the backend, and the alias if it is requested or installed already. Returns the steps, one
    /// line each.
    pub fn install(&self, library: &Library, alias: bool) -> Outcome<Vec<String>> {
        let _alone = self.lock()?;
        let state = self.read_state(Some(library))?;
        let mut done = Vec::new();
        if state.incomplete {
            self.delete(NEW)?;
        }
        if state.backend == Held::Other {
            return Err(self.not_ours());
        }
        let current = |held: &Held| matches!(held, Held::Ours(_, Some(true)));
        if current(&state.backend) {
            done.push(self.line(&format!("{} is up to date", self.at(FILE).display())));
        } else {
            self.copy(library, FILE)?;
            done.push(self.line(&format!("installed {}", self.at(FILE).display())));
        }
        if !alias && !state.has_alias() {
            done.extend(self.end_alias(&state)?);
        } else if !current(&state.ucx) {
            if state.ucx == Held::Other {
                self.keep_ucx()?;
            }
            self.copy(library, UCX)?;
            done.push(self.line(&format!("installed ferrywire as {UCX} too")));
        } else {
            done.push(self.line(&format!("{UCX} is ferrywire's and up to date")));
        }
        Ok(done)
    }

    /// Gives NIXL's own UCX backend a second name. The first name exists all the time, if the file system supports
    /// links.
    fn keep_ucx(&self) -> Outcome {
        let (ucx, backup) = (self.at(UCX), self.at(BACKUP));
        if is_there(&backup) {
            // The backup is the same file, from an interrupted command, or belongs to an earlier NIXL.
            self.delete(BACKUP)?;
        }
        let linked = fs::hard_link(&ucx, &backup).or_else(|_| fs::rename(&ucx, &backup));
        linked.map_err(|error| failed("rename", &ucx, &error))
    }

    /// Removes the files that this command has installed.
    pub fn remove(&self) -> Outcome<Vec<String>> {
        let _alone = self.lock()?;
        let state = self.read_state(None)?;
        let mut done = self.end_alias(&state)?;
        if state.incomplete {
            self.delete(NEW)?;
            done.push(self.line(&format!("removed {}", self.at(NEW).display())));
        }
        match state.backend {
            Held::Nothing => {}
            Held::Other => return Err(self.not_ours()),
            Held::Ours(..) => {
                self.delete(FILE)?;
                done.push(self.line(&format!("removed {}", self.at(FILE).display())));
            }
        }
        if !self.nixl.present {
            // Uninstalling NIXL has left the folders of the deleted file.
            let _ =
                fs::remove_dir(self.path).and_then(|()| self.path.parent().map_or(Ok(()), fs::remove_dir));
        }
        Ok(done)
    }

    /// Gives NIXL's own UCX backend its name back.
    fn end_alias(&self, state: &State) -> Outcome<Vec<String>> {
        let mut done = Vec::new();
        let goes_back = self.nixl.present && state.ucx != Held::Other;
        if state.backup && goes_back {
            let (ucx, backup) = (self.at(UCX), self.at(BACKUP));
            fs::rename(&backup, &ucx).map_err(|error| failed("rename", &backup, &error))?;
            done.push(self.line(&format!("restored NIXL's own {UCX}")));
            return Ok(done);
        }
        if state.backup {
            self.delete(BACKUP)?;
            done.push(self.line(&format!("removed {}", self.at(BACKUP).display())));
        }
        if state.has_alias() {
            self.delete(UCX)?;
            let note = if self.nixl.present {
                format!(
                    "; no {BACKUP} was found: to get a UCX backend that NIXL came with, reinstall {}",
                    self.nixl.package
                )
            } else {
                String::new()
            };
            done.push(self.line(&format!("removed ferrywire's {UCX}{note}")));
        }
        Ok(done)
    }

    /// Copies the library so that it exists completely or not at all under its name; programs that have the old file
    /// open keep it.
    fn copy(&self, library: &Library, name: &str) -> Outcome {
        let (new, path) = (self.at(NEW), self.at(name));
        let write = || {
            let mut file = OpenOptions::new().write(true).create_new(true).open(&new)?;
            file.write_all(&library.bytes)?;
            file.set_permissions(fs::Permissions::from_mode(MODE))?;
            file.sync_all()
        };
        let written = write().and_then(|()| fs::rename(&new, &path));
        written.map_err(|error| {
            let _ = fs::remove_file(&new);
            failed("write", &path, &error)
        })
    }

    fn delete(&self, name: &str) -> Outcome {
        let path = self.at(name);
        fs::remove_file(&path).map_err(|error| failed("remove", &path, &error))
    }

    /// Keeps other runs of the command from changing the folder until the lock is dropped. A file system without locks
    /// is not protected.
    fn lock(&self) -> Outcome<Option<File>> {
        let folder = File::open(self.path).map_err(|error| failed("open", self.path, &error))?;
        match folder.try_lock() {
            Ok(()) => Ok(Some(folder)),
            Err(TryLockError::WouldBlock) => Err(Failure::failed(format!(
                "cannot change {}: another `ferrywire nixl` command has the folder locked\n\
                 try: again when that command has ended",
                self.path.display()
            ))),
            Err(TryLockError::Error(_)) => Ok(None),
        }
    }

    /// The refusal if another file has the backend's name.
    pub fn not_ours(&self) -> Failure {
        Failure::failed(format!(
            "cannot replace or remove {}: the file is not ferrywire's\ntry: move the file away, then again",
            self.at(FILE).display()
        ))
    }

    fn line(&self, what: &str) -> String {
        format!("{}: {what}", self.nixl)
    }

    fn at(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }
}

fn is_there(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok()
}

fn failed(what: &str, path: &Path, error: &io::Error) -> Failure {
    let advice = match error.kind() {
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "\ntry: run the command as the user who owns that environment"
        }
        _ => "",
    };
    Failure::failed(format!("cannot {what} {}: {error}{advice}", path.display()))
}
