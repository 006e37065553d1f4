//! Writes the page: readers of its file see the old page or the new one, never a part.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::exit::{Failure, Outcome};

/// Mode of a new file, before the umask.
const MODE: u32 = 0o666;

/// Refuses a place for the page that must not be replaced.
pub fn check(out: &Path, inputs: &[PathBuf]) -> Outcome {
    let Ok(there) = fs::canonicalize(out) else { return Ok(()) };
    if out != Path::new("-")
        && inputs.iter().any(|input| fs::canonicalize(input).is_ok_and(|input| input == there))
    {
        return Err(Failure::Usage(format!(
            "--html {} would replace a result: name another file",
            out.display()
        )));
    }
    if out != Path::new("-") && !there.is_file() {
        return Err(Failure::Usage(format!(
            "--html {} is not a regular file: name a file, or - for standard output",
            out.display()
        )));
    }
    Ok(())
}

/// Replaces the page's file in one step.
pub fn replace(out: &Path, page: &str) -> Outcome {
    // A symbolic link stays, and the file that it names is replaced.
    let target = fs::canonicalize(out).unwrap_or_else(|_| out.to_owned());
    let folder = match target.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let written = || {
        let mut builder = tempfile::Builder::new();
        let open = |path: &Path| File::options().write(true).create_new(true).mode(MODE).open(path);
        // `tempfile_in` would put its own path into an error.
        let mut file = builder.prefix(".ferrywire-report-").make_in(folder, open)?;
        file.write_all(page.as_bytes())?;
        file.as_file().sync_all()?;
        file.persist(&target).map_err(|error| error.error)
    };
    match written() {
        Ok(_) => Ok(()),
        Err(error) => Err(Failure::failed(format!("cannot write {}: {error}", out.display()))),
    }
}
