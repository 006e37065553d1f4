//! A driver in C that uses the plugin as NCCL does, each case in a process of its own.
//!
//! Each point of what an exported plugin has to survive is a case; those whose calls differ between versions run in
//! v10, v11 and v12.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::pair::file;

/// A driver that has not ended after this long hangs.
const HANGS_AFTER: Duration = Duration::from_secs(300);

/// The shared object under the name that NCCL looks for, and the driver.
fn built() -> &'static (PathBuf, PathBuf) {
    static BUILT: OnceLock<(PathBuf, PathBuf)> = OnceLock::new();
    BUILT.get_or_init(|| {
        let folder =
            tempfile::Builder::new().prefix("nccl-").tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        // Kept for the whole run; the folder is one of cargo's.
        let folder = folder.keep();
        let (library, driver) = (folder.join("libnccl-net-ferrywire.so"), folder.join("driver"));
        std::fs::copy(file(), &library).unwrap();
        let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/nccl/c/driver.c");
        let mut cc = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
        cc.args(["-std=gnu11", "-O1", "-Wall", "-Werror", "-pthread", "-o"])
            .arg(&driver)
            .arg(source)
            .arg("-ldl");
        let output = cc.output().expect("a C compiler, which Rust links with");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let finished = (folder.join("libnccl-net-ferrywire.so"), folder.join("nccl-driver"));
        std::fs::rename(&library, &finished.0).unwrap();
        std::fs::rename(&driver, &finished.1).unwrap();
        finished
    })
}

fn passes(version: u32, case: &str) {
    let (library, driver) = built();
    let mut child = Command::new(driver)
        .arg(library)
        .args([version.to_string().as_str(), case])
        .env("NCCL_SOCKET_IFNAME", "lo")
        .env_remove("NCCL_MIN_NCHANNELS")
        .env_remove("NCCL_MAX_NCHANNELS")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let since = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if since.elapsed() > HANGS_AFTER {
            let _ = child.kill();
            break;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    let output = child.wait_with_output().unwrap();
    let said =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
    assert!(
        output.status.success() && said.contains("passed\n"),
        "v{version} {case}: {}\n{said}",
        output.status
    );
}

macro_rules! cases {
    ($($case:ident)+) => {$(
        #[test]
        fn $case() {
            [10, 11, 12].into_iter().for_each(|version| passes(version, stringify!($case)));
        }
    )+};
}

cases! {
    as_nccl
    init_again
    unload_without_a_call
    properties
    setting_up
    handles
    registration
    tuning
    tuned_by_the_user
    deregistering
    testing
    receives
    outstanding
    nothing_is_cut
    closing
    killed_peer
    late_receives
    nothing_left
    no_logger
}

#[test]
fn silent_path() {
    let root = Command::new("id").arg("-u").output().is_ok_and(|said| said.stdout == b"0\n");
    if !std::env::var("FERRYWIRE_LONG").is_ok_and(|value| value == "1") {
        println!("SKIPPED: needs FERRYWIRE_LONG=1, and minutes");
    } else if !root || Command::new("ip").arg("-V").output().is_err() {
        println!("SKIPPED: needs root and iproute2, to make network namespaces");
    } else {
        passes(12, "silent_path");
    }
}
