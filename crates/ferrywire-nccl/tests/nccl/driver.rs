//! Programs in C that use the plugin, with one process for each case.

use std::io::{Read, Seek};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::pair::file;

/// A driver that runs longer than this hangs.
const HANGS_AFTER: Duration = Duration::from_secs(300);
/// The programs, in `c/`.
const PROGRAMS: [&str; 2] = ["driver", "nics"];

/// The folder with the compiled programs and the shared object under NCCL's name for it.
fn built() -> &'static PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let folder =
            tempfile::Builder::new().prefix("nccl-").tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        // Kept for the whole run; the folder is below cargo's.
        let folder = folder.keep();
        std::fs::copy(file(), folder.join("libnccl-net-ferrywire.so")).unwrap();
        for program in PROGRAMS {
            let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("tests/nccl/c/{program}.c"));
            let mut cc = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
            cc.args(["-std=gnu11", "-O1", "-Wall", "-Werror", "-pthread", "-o"])
                .arg(folder.join(program))
                .arg(source)
                // The plugin must find the program's own replacements of the C library's functions.
                .args(["-rdynamic", "-ldl"]);
            let output = cc.output().expect("a C compiler, which Rust links with");
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        }
        folder
    })
}

/// A case of a program with a version of the interface.
pub fn command(program: &str, version: u32, case: &str) -> Command {
    let folder = built();
    let mut command = Command::new(folder.join(program));
    command
        .arg(folder.join("libnccl-net-ferrywire.so"))
        .args([version.to_string().as_str(), case])
        .env("NCCL_SOCKET_IFNAME", "lo")
        .env("FERRYWIRE_NCCL_MERGE", "any")
        .env_remove("NCCL_MIN_NCHANNELS")
        .env_remove("NCCL_MAX_NCHANNELS")
        .env_remove("NCCL_P2P_NET_CHUNKSIZE")
        .env_remove("FERRYWIRE_METRICS");
    command
}

/// Runs a case of a program with a version of the interface.
pub fn passes(program: &str, version: u32, case: &str) {
    let (has_passed, text) = output(&mut command(program, version, case));
    assert!(has_passed, "v{version} {case}: {text}");
}

/// Runs a case. Returns whether it has passed, and its output.
pub fn output(command: &mut Command) -> (bool, String) {
    // A file, because a pipe that nothing reads meanwhile would block a verbose program.
    let mut said = tempfile::tempfile().unwrap();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(said.try_clone().unwrap())
        .stderr(said.try_clone().unwrap())
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
    let status = child.wait().unwrap();
    let mut text = String::new();
    said.rewind().unwrap();
    said.read_to_string(&mut text).unwrap();
    (status.success() && text.contains("passed\n"), format!("{status}\n{text}"))
}

/// Whether tests may take minutes.
pub fn has_time() -> bool {
    let has = std::env::var("FERRYWIRE_LONG").is_ok_and(|value| value == "1");
    if !has {
        println!("SKIPPED: needs FERRYWIRE_LONG=1, and minutes");
    }
    has
}

/// Whether network namespaces can be made, to play hosts.
pub fn can_make_namespaces() -> bool {
    let root = Command::new("id").arg("-u").output().is_ok_and(|said| said.stdout == b"0\n");
    let tools = ["ip", "tc"].into_iter().all(|tool| Command::new(tool).arg("-V").output().is_ok());
    if !root || !tools {
        println!("SKIPPED: needs root and iproute2, to make network namespaces");
    }
    root && tools
}
