//! The Python environments of the tests: virtual environments below the target folder, made once.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Checks for the oldest Python that the package supports, and for the modules that the tests need.
const VERSION_CHECK: &str = "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))";

/// The root of the repository.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the repository")
}

/// A folder for the tests, below the target folder.
pub fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&folder).expect("a folder");
    folder
}

/// The interpreter of a virtual environment with these packages; prints why and returns `None` if it cannot be made.
pub fn python(name: &str, packages: &[&str]) -> Option<PathBuf> {
    if !succeeds(Command::new("python3").args(["-c", VERSION_CHECK])) {
        println!("SKIPPED: needs python3, 3.11 or newer, with venv (Debian: python3-venv)");
        return None;
    }
    let home = folder(name);
    let (python, made) = (home.join("bin/python"), home.join("made"));
    if made.exists() {
        return Some(python);
    }
    run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&home));
    if !packages.is_empty() {
        let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"];
        let installed = output(Command::new(&python).args(pip).args(packages));
        if !installed.status.success() {
            println!("SKIPPED: needs {} from a package index: {}", packages.join(", "), text(&installed));
            return None;
        }
    }
    std::fs::write(made, "").expect("a mark");
    Some(python)
}

/// Runs a command, which must succeed, and returns its output.
pub fn run(command: &mut Command) -> String {
    let output = output(command);
    assert!(output.status.success(), "{command:?}: {}\n{}", output.status, text(&output));
    text(&output)
}

fn output(command: &mut Command) -> Output {
    // Byte code in the checkout would be taken for a change.
    command.env("PYTHONDONTWRITEBYTECODE", "1").env_remove("PYTHONPATH").env_remove("VIRTUAL_ENV");
    command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"))
}

fn succeeds(command: &mut Command) -> bool {
    command.output().is_ok_and(|output| output.status.success())
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}
