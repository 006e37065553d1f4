//! Compiles C plugins, and runs a test in a process of its own.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Compiles `source` into a library with these `-D` options; returns its path.
pub fn compile(source: &str, defines: &[&str]) -> PathBuf {
    // The tests of the command use this file too.
    compile_in("../ferrywire-ncclnet/tests/nccl", source, defines)
}

/// Compiles a source in a directory that is given relative to this package's.
pub fn compile_in(folder: &str, source: &str, defines: &[&str]) -> PathBuf {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let stem =
        format!("{}-{}", source.trim_end_matches(".c"), defines.join("-").replace(['=', '"', ' '], "-"));
    // Compiles to a name of this process first: other test processes may compile or load the same library.
    let own = directory.join(format!("{stem}.{}.{:?}.tmp", std::process::id(), std::thread::current().id()));
    let library = directory.join(format!("lib{stem}.so"));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder).join(source);
    let age = |path: &Path| path.metadata().and_then(|file| file.modified());
    if age(&library).is_ok_and(|made| age(&source).is_ok_and(|written| made > written)) {
        return library;
    }
    let mut cc = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
    cc.args(["-shared", "-fPIC", "-pthread", "-O1", "-Wall", "-Werror", "-o"]).arg(&own).arg(&source);
    cc.args(defines.iter().map(|define| format!("-D{define}")));
    let output = cc.output().expect("a C compiler, which Rust links with");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    std::fs::rename(&own, &library).expect("one file system");
    library
}

/// The library that `broken.c` becomes for this case.
pub fn broken(case: &str) -> PathBuf {
    compile("broken.c", &[&format!("CASE_{case}")])
}

/// Runs the body of the test `name` in a process where nothing else has been loaded or logged.
pub fn alone(name: &str, body: impl FnOnce()) {
    const CHILD: &str = "FERRYWIRE_TEST_CHILD";
    if std::env::var_os(CHILD).is_some() {
        return body();
    }
    let test = std::env::current_exe().expect("this program");
    let output =
        Command::new(test).args(["--exact", name, "--nocapture"]).env(CHILD, "1").output().expect("runs");
    let said =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("1 passed"), "{:?}\n{said}", output.status);
}
