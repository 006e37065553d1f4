//! Runs the Python tests (pytest) against the module that this very cargo run has built.
//!
//! `FERRYWIRE_PYTHON` names another interpreter, one that has pytest and numpy: with PyTorch, for its tests.

#[path = "../../ferrywire/tests/cuda/driver.rs"]
mod driver;
mod environment;

use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::Command;

/// The package as an installation has it: the sources, and the module beside them.
fn site() -> PathBuf {
    let site = environment::folder("site");
    let package = site.join("ferrywire");
    let _ = std::fs::remove_dir_all(&package);
    std::fs::create_dir_all(&package).expect("a folder");
    let sources = environment::root().join("crates/ferrywire-py/python/ferrywire");
    for file in std::fs::read_dir(sources).expect("the sources").map(|file| file.expect("a file").path()) {
        if file.extension().is_some_and(|kind| kind == "py" || kind == "pyi" || kind == "typed") {
            symlink(&file, package.join(file.file_name().expect("a name"))).expect("a link");
        }
    }
    let built = std::env::current_exe().expect("a path").with_file_name("lib_ferrywire.so");
    assert!(built.exists(), "cargo has not built {}", built.display());
    symlink(built, package.join("_ferrywire.abi3.so")).expect("a link");
    site
}

#[test]
fn pytest() {
    let chosen = std::env::var_os("FERRYWIRE_PYTHON").map(PathBuf::from);
    let Some(python) = chosen.or_else(|| environment::python("python", &["numpy", "pytest"])) else {
        return;
    };
    let site = site();
    let mut command = Command::new("env");
    let stand_in = driver::stand_in(if driver::has_kernels() { &[driver::WITH_KERNELS] } else { &[] });
    command.arg(format!("PYTHONPATH={}", site.display()));
    command.arg(format!("FERRYWIRE_TEST_DRIVER={}", stand_in.display())).arg(python);
    command.args(["-X", "dev", "-m", "pytest", "-rs", "-p", "no:cacheprovider"]);
    let said = environment::run(command.current_dir(environment::root()));
    for line in said.lines() {
        match line.split_once(": needs ") {
            Some((place, what)) if line.starts_with("SKIPPED") => println!("SKIPPED: needs {what} ({place})"),
            _ => println!("{line}"),
        }
    }
}
