//! The plugin for NCCL, and the program in C that acts as NCCL.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::text;

/// The plugin, which was built with these tests.
pub fn library() -> PathBuf {
    std::env::current_exe().expect("a path").with_file_name("libnccl_net_ferrywire.so")
}

/// A case of the program that uses the plugin as NCCL does; the plugin's own tests have it too.
pub fn driver(case: &str) -> Command {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder").keep();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../ferrywire-nccl/tests/nccl/c/driver.c");
    let mut cc = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
    cc.args(["-std=gnu11", "-O1", "-Wall", "-Werror", "-pthread", "-rdynamic", "-o"]);
    let output = cc.arg(folder.join("driver")).arg(source).arg("-ldl").output();
    let output = output.expect("a C compiler, which Rust links with");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let mut driver = Command::new(folder.join("driver"));
    driver.arg(library()).args(["12", case]).env("NCCL_SOCKET_IFNAME", "lo").env_remove("FERRYWIRE_METRICS");
    driver
}
