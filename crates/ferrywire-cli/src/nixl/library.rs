//! The file of the NIXL backend: how it is recognized, and where the one to install is found.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use crate::exit::{Failure, Outcome};
use crate::places;

/// The file name that NIXL looks for.
pub const FILE: &str = "libplugin_FERRYWIRE.so";
/// The file name that cargo gives the backend.
const BUILT: &str = "libplugin_ferrywire.so";
/// The bytes before the version in a library of ferrywire; see `ferrywire-nixl`'s `boundary`.
const MARK: &[u8] = b"ferrywire NIXL backend ";
const VERSION_BYTES_MAX: usize = 64;
/// Size limit of a library.
const LIBRARY_BYTES_MAX: u64 = 1 << 30;

/// The backend that belongs to this command.
#[derive(Debug)]
pub struct Library {
    pub path: PathBuf,
    pub version: String,
    pub bytes: Vec<u8>,
}

impl Library {
    /// Reads a library.
    ///
    /// # Errors
    /// The file cannot be read, or is not a backend of ferrywire.
    pub fn open(path: &Path) -> Outcome<Library> {
        let failed = |why: &str| Failure::failed(format!("cannot install {}: {why}", path.display()));
        let bytes = contents(path).map_err(|error| failed(&error.to_string()))?;
        let version = version(&bytes).ok_or_else(|| {
            failed("the file is not ferrywire's NIXL backend\ntry: cargo build --release -p ferrywire-nixl")
        })?;
        Ok(Library { path: path.to_owned(), version, bytes })
    }

    /// Finds the library of this command's build or wheel; the wheel may be in one of these folders.
    pub fn find(packages: &[PathBuf]) -> Outcome<Library> {
        let command = std::env::current_exe()
            .map_err(|error| Failure::failed(format!("cannot find the path of this command: {error}")))?;
        let mut places = places::of_command(&command, FILE, BUILT);
        places.extend(packages.iter().map(|folder| places::in_packages(folder, FILE)));
        let found: Vec<Library> =
            places.iter().filter(|path| path.is_file()).filter_map(|path| Library::open(path).ok()).collect();
        let fits = found.iter().position(|library| library.version == env!("CARGO_PKG_VERSION"));
        found.into_iter().nth(fits.unwrap_or(0)).ok_or_else(|| {
            Failure::failed(format!(
                "cannot find {FILE} in the folder of {}, nor in the packages of its environment\n\
                 try: cargo build --release -p ferrywire-nixl; or name the file with --library PATH",
                command.display()
            ))
        })
    }
}

/// The bytes of a file, unless it is too large for a library.
pub fn contents(path: &Path) -> io::Result<Vec<u8>> {
    let file = File::open(path)?;
    let about = file.metadata()?;
    if !about.is_file() || about.len() > LIBRARY_BYTES_MAX {
        let why = "not a regular file of at most 1 GiB";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    }
    let mut bytes = Vec::new();
    file.take(LIBRARY_BYTES_MAX).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The version of a library of ferrywire; `None` for other bytes.
pub fn version(bytes: &[u8]) -> Option<String> {
    if !bytes.starts_with(b"\x7fELF") {
        return None;
    }
    // This command contains the mark too, but no version behind it.
    let marked = memchr::memmem::find_iter(bytes, MARK);
    marked.map(|at| &bytes[at + MARK.len()..]).find_map(version_at)
}

fn version_at(bytes: &[u8]) -> Option<String> {
    let end = bytes.iter().take(VERSION_BYTES_MAX).position(|byte| *byte == 0)?;
    let text = std::str::from_utf8(&bytes[..end]).ok()?;
    let is_version = text.starts_with(|first: char| first.is_ascii_digit())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || ".+-".contains(c));
    is_version.then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_of_ours_is_known_by_its_mark_and_version() {
        let file = |text: &str| [b"\x7fELF\0", text.as_bytes()].concat();
        let mark = "ferrywire NIXL backend ";
        assert_eq!(version(&file(&format!("x{mark}0.1.0\0"))), Some("0.1.0".to_owned()));
        assert_eq!(version(&file(&format!("{mark}\0{mark}1.2.3-rc.1\0"))), Some("1.2.3-rc.1".to_owned()));
        for other in ["", mark, "ferrywire 0.1.0\0", &format!("{mark}0.1.0"), &format!("{mark}0.1 of\0")] {
            assert_eq!(version(&file(other)), None, "{other:?}");
        }
        assert_eq!(version(format!("{mark}0.1.0\0").as_bytes()), None, "no library");
    }

    #[test]
    fn this_command_is_no_library_of_ours() {
        let command = std::env::current_exe().expect("a path");
        assert_eq!(version(&contents(&command).expect("it can be read")), None);
    }
}
