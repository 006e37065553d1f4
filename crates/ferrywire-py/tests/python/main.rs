//! The Python package: its tests (pytest) against the module that this cargo run has built, and its wheel.
//!
//! `FERRYWIRE_PYTHON` names another interpreter, one that has pytest and numpy: with PyTorch, for its tests.

mod adversarial;
#[path = "../../../ferrywire/tests/cuda/driver.rs"]
mod driver;
mod environment;
mod inspection;
mod wheel;

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::thread;

/// A difference between stubs and module that is allowed: buffers written in C have this method from Python 3.12 on.
const NOT_TO_BE_SEEN: &str = "ferrywire._ferrywire.Region.__buffer__\n";

/// The package as it is installed: the Python sources with the native module beside them.
fn site() -> &'static Path {
    static SITE: OnceLock<PathBuf> = OnceLock::new();
    SITE.get_or_init(make_site)
}

fn make_site() -> PathBuf {
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
    run_pytest(&[]);
}

/// With an allocator that ends the process when its heap is corrupt, and fills memory when it is allocated and freed.
#[test]
fn pytest_with_a_debug_allocator() {
    const ALLOCATOR: &str = "libc_malloc_debug.so.0";
    if std::env::var_os("FERRYWIRE_LONG").is_none() {
        return println!("SKIPPED: needs FERRYWIRE_LONG=1 (minutes)");
    }
    let preload = format!("LD_PRELOAD={ALLOCATOR}");
    let loaded = Command::new("env").args([&preload, "cat", "/proc/self/maps"]).output().expect("cat");
    if !String::from_utf8_lossy(&loaded.stdout).contains(ALLOCATOR) {
        return println!("SKIPPED: needs {ALLOCATOR} (glibc 2.34 or newer)");
    }
    run_pytest(&[&preload, "MALLOC_CHECK_=3", "MALLOC_PERTURB_=165", "FERRYWIRE_LONG="]);
}

/// Number of parts of the tests that run in parallel, because the tests wait as long as they work.
const PARTS: usize = 3;

fn run_pytest(variables: &[&str]) {
    let chosen = std::env::var_os("FERRYWIRE_PYTHON").map(PathBuf::from);
    let Some(python) = chosen.or_else(|| environment::python("python", &["numpy", "pytest"])) else {
        return;
    };
    let site = site();
    let stand_in = driver::stand_in(if driver::has_kernels() { &[driver::WITH_KERNELS] } else { &[] });
    let hostile = adversarial::overreaching_peer();
    let files = test_files();
    let run = |part: usize| {
        let mut command = Command::new("env");
        command.args(variables);
        command.arg(format!("PYTHONPATH={}", site.display()));
        command.arg(format!("FERRYWIRE_TEST_DRIVER={}", stand_in.display()));
        command.arg(format!("FERRYWIRE_TEST_HOSTILE={hostile}")).arg(&python);
        command.args(["-X", "dev", "-m", "pytest", "-rs", "-p", "no:cacheprovider"]);
        // Each part leaves out the files of the others; a file of no part is run by all.
        let others = files.iter().enumerate().filter(|(index, _)| index % PARTS != part);
        command.args(others.map(|(_, file)| format!("--ignore={}", file.display())));
        environment::run(command.current_dir(environment::root()))
    };
    let said: String = thread::scope(|scope| {
        let parts: Vec<_> = (0..PARTS)
            .map(|part| {
                scope.spawn({
                    let run = &run;
                    move || run(part)
                })
            })
            .collect();
        parts.into_iter().map(|part| part.join().expect("see above")).collect()
    });
    for line in said.lines() {
        match line.split_once(": needs ") {
            Some((place, what)) if line.starts_with("SKIPPED") => println!("SKIPPED: needs {what} ({place})"),
            _ => println!("{line}"),
        }
    }
}

fn test_files() -> Vec<PathBuf> {
    let folder = environment::root().join("crates/ferrywire-py/tests");
    let entries = std::fs::read_dir(folder).expect("the tests").map(|entry| entry.expect("a file").path());
    let is_test = |path: &PathBuf| {
        let name = path.file_name().expect("a name").to_string_lossy();
        name.starts_with("test_") && name.ends_with(".py")
    };
    let mut files: Vec<_> = entries.filter(is_test).collect();
    files.sort();
    files
}

#[test]
fn the_stubs_are_those_of_the_module() {
    let Some(python) = environment::python("types", &["mypy"]) else {
        return;
    };
    let folder = environment::folder("stubtest");
    let [seen, options] = ["allowed", "mypy.ini"].map(|name| folder.join(name));
    std::fs::write(&seen, NOT_TO_BE_SEEN).expect("a file");
    // PyTorch and numpy are not here.
    std::fs::write(&options, "[mypy]\nignore_missing_imports = True\n").expect("a file");
    let mut command = Command::new("env");
    for name in ["PYTHONPATH", "MYPYPATH"] {
        command.arg(format!("{name}={}", site().display()));
    }
    command.arg(python).args(["-m", "mypy.stubtest", "ferrywire", "--concise", "--ignore-unused-allowlist"]);
    command.arg("--allowlist").arg(seen).arg("--mypy-config-file").arg(options);
    environment::run(command.current_dir(folder));
}
