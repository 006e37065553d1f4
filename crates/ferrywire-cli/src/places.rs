//! Where the libraries lie that come with this command: beside it in a build, among the packages of its environment in a
//! wheel.

use std::fs;
use std::path::{Path, PathBuf};

/// The wheel's folder for libraries, below a folder of packages.
const IN_PACKAGES: &str = "ferrywire/lib";

/// The paths at which a library of this command may lie, likelier ones first; `built` is the file name that cargo
/// gives it.
pub fn of_command(command: &Path, file: &str, built: &str) -> Vec<PathBuf> {
    let folder = command.parent().unwrap_or(Path::new("."));
    let mut places = vec![folder.join(file), folder.join(built)];
    if let Some(prefix) = folder.parent() {
        // Commands are in `bin`, packages in `lib/python3.11/site-packages`, or beside `bin` with `pip install
        // --target`.
        places.push(in_packages(prefix, file));
        for python in
            ["lib", "lib64", "local/lib"].iter().flat_map(|lib| folders(&prefix.join(lib), "python3"))
        {
            let of_python = ["site-packages", "dist-packages"].map(|name| python.join(name));
            places.extend(of_python.iter().map(|folder| in_packages(folder, file)));
        }
    }
    places
}

/// The place of a library below a folder of packages.
pub fn in_packages(folder: &Path, file: &str) -> PathBuf {
    folder.join(IN_PACKAGES).join(file)
}

fn folders(of: &Path, begin: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(of).into_iter().flatten().flatten();
    let named = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(begin));
    let mut folders: Vec<PathBuf> = named.map(|entry| entry.path()).collect();
    folders.sort();
    folders
}
