//! The folder of a NIXL's backends: what lies in it, and the steps that put ours there and take it away.
//!
//! Each step is one rename, link or removal, so that a command that is ended between two of them leaves a state that
//! [`State`] knows: `status` tells it, and `install` and `remove` go on from there.
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

/// The backend that the alias stands in for.
pub const UCX: &str = "libplugin_UCX.so";
/// Its name while the alias is in force.
pub const BACKUP: &str = "libplugin_UCX.so.before-ferrywire";
/// A copy that is not complete yet.
const NEW: &str = "libplugin_FERRYWIRE.so.new";
/// As other libraries of a package.
const MODE: u32 = 0o644;

/// What lies under a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Held {
    /// Nothing.
    Nothing,
    /// A backend of ours: its version, and whether it is the same file as the one that would be installed, if that is known.
    Ours(String, Option<bool>),
    /// Something that is not ours.
    Other,
}

/// What lies in the folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    /// Under our name.
    pub backend: Held,
    /// Under the name of UCX.
    pub ucx: Held,
    /// Whether there is something under the name of the backup.
    pub backup: bool,
    /// Whether there is an incomplete copy.
    pub incomplete: bool,
}

impl State {
    /// Whether programs that ask for UCX get ours.
    pub fn has_alias(&self) -> bool {
        matches!(self.ucx, Held::Ours(..))
    }

    /// Whether ours can be used by its own name.
    pub fn is_installed(&self) -> bool {
        matches!(self.backend, Held::Ours(..))
    }

    /// Whether anything is from here.
    pub fn has_ours(&self) -> bool {
        self.is_installed() || self.has_alias() || self.backup || self.incomplete
    }

    /// What an interrupted command has left, or another that has changed the folder since; `None`: all is whole.
    pub fn half_done(&self) -> Option<String> {
        match (&self.ucx, self.backup) {
            (Held::Nothing, true) => Some(format!("NIXL's own {UCX} is still named {BACKUP}")),
            (Held::Other, true) => {
                Some(format!("{BACKUP} lies beside NIXL's own {UCX}, so that the alias is not in force"))
            }
            _ if self.incomplete => Some(format!("{NEW} is an incomplete copy")),
            _ => None,
        }
    }
}

/// A folder, and what is said of it.
#[derive(Debug)]
pub struct Folder<'a> {
    nixl: &'a Nixl,
    path: &'a Path,
}

impl<'a> Folder<'a> {
    /// That of this NIXL.
    pub fn of(nixl: &'a Nixl) -> Folder<'a> {
        Folder { nixl, path: &nixl.plugins }
    }

    /// What lies in it.
    pub fn look(&self, library: Option<&Library>) -> Outcome<State> {
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
            // A folder, a link to nothing: nothing that was put there from here.
            Err(_) => Ok(Held::Other),
        }
    }

    /// Installs the backend, and the alias if it is asked for or in force. Gives what was done, one line each.
    pub fn install(&self, library: &Library, alias: bool) -> Outcome<Vec<String>> {
        let _alone = self.lock()?;
        let state = self.look(Some(library))?;
        let mut done = Vec::new();
        if state.incomplete {
            self.delete(NEW)?;
        }
        if state.backend == Held::Other {
            return Err(self.not_ours());
        }
        let current = |held: &Held| matches!(held, Held::Ours(_, Some(true)));
        if current(&state.backend) {
            done.push(self.line(&format!("{} was installed already", self.at(FILE).display())));
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
            done.push(self.line(&format!("installed it as {UCX} too")));
        } else {
            done.push(self.line(&format!("{UCX} was ferrywire's already")));
        }
        Ok(done)
    }

    /// NIXL's own UCX backend gets a second name; its first is there all the time, where the file system can do that.
    fn keep_ucx(&self) -> Outcome {
        let (ucx, backup) = (self.at(UCX), self.at(BACKUP));
        if is_there(&backup) {
            // Of an interrupted command the same file, else that of a NIXL that was there before this one.
            self.delete(BACKUP)?;
        }
        let linked = fs::hard_link(&ucx, &backup).or_else(|_| fs::rename(&ucx, &backup));
        linked.map_err(|error| failed("rename", &ucx, &error))
    }

    /// Takes away what was put there from here.
    pub fn remove(&self) -> Outcome<Vec<String>> {
        let _alone = self.lock()?;
        let state = self.look(None)?;
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
            // Uninstalling NIXL has left the folders for what is deleted now.
            let _ =
                fs::remove_dir(self.path).and_then(|()| self.path.parent().map_or(Ok(()), fs::remove_dir));
        }
        Ok(done)
    }

    /// NIXL's own UCX backend has its name again.
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
            let note = match self.nixl.present {
                true => format!(
                    "; there was no {BACKUP}: if NIXL came with a UCX backend, install {} again to have it",
                    self.nixl.package
                ),
                false => String::new(),
            };
            done.push(self.line(&format!("removed ferrywire's {UCX}{note}")));
        }
        Ok(done)
    }

    /// Complete under its name or not there: what has the file open keeps the old one.
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

    /// Keeps other runs of the command from changing the folder until the lock is dropped. A file system without locks guards nothing.
    fn lock(&self) -> Outcome<Option<File>> {
        let folder = File::open(self.path).map_err(|error| failed("open", self.path, &error))?;
        match folder.try_lock() {
            Ok(()) => Ok(Some(folder)),
            Err(TryLockError::WouldBlock) => Err(Failure::failed(format!(
                "cannot change {}: another ferrywire nixl is changing it\ntry: again, when that has ended",
                self.path.display()
            ))),
            Err(TryLockError::Error(_)) => Ok(None),
        }
    }

    /// Refuses what lies under our name.
    pub fn not_ours(&self) -> Failure {
        Failure::failed(format!(
            "cannot replace or remove {}: it is not ferrywire's\ntry: move it away, then again",
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
            "\ntry: as the user who owns that environment"
        }
        _ => "",
    };
    Failure::failed(format!("cannot {what} {}: {error}{advice}", path.display()))
}
