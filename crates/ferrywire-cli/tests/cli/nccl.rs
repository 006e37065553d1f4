//! The plugin for NCCL, the program in C that acts as NCCL, and `ferrywire nccl env`.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::common::{ferrywire, first_error, text, unwritten};
use crate::hosted;

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

/// `nccl env` on loopback alone, with a file or without.
fn env(path: Option<&Path>) -> Command {
    let mut command = ferrywire("nccl env");
    command.args(path).env("NCCL_SOCKET_IFNAME", "lo");
    command
}

/// A run that printed a line that fails in a shell; what it said.
fn refused(output: &Output, status: i32) -> String {
    let failing = "export NCCL_NET=ferrywire; false\n";
    assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(status), failing));
    first_error(output)
}

#[test]
fn a_shell_reads_the_path_that_was_checked_whatever_it_contains() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
    for name in ["plain", "it's \"$HOME\" `id`\\ \n*; é", "'", "~"] {
        let path = folder.path().join(name);
        symlink(library(), &path).expect("a link");
        let output = env(Some(&path)).output().expect("it starts");
        assert!(output.status.success(), "{name:?}: {}", text(&output.stderr));
        let read = "eval \"$1\" && env -0 | grep -z '^NCCL_NET' | sort -z";
        let mut shell = Command::new("sh");
        shell.args(["-euc", read, "sh", &text(&output.stdout)]).env_remove("NCCL_NET");
        let variables = text(&shell.output().expect("a shell").stdout);
        let expected = format!("NCCL_NET=ferrywire\0NCCL_NET_PLUGIN={}\0", path.display());
        assert_eq!(variables, expected, "{}", text(&output.stdout));
    }
    unwritten(&mut env(Some(&library())));
}

#[test]
fn a_relative_path_is_made_absolute() {
    let folder = library().parent().expect("a folder").to_owned();
    let mut command = env(Some(Path::new("libnccl_net_ferrywire.so")));
    let output = command.arg("-v").current_dir(folder).output().expect("it starts");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let first = format!("export NCCL_NET_PLUGIN={}", library().display());
    assert_eq!(text(&output.stdout).lines().next(), Some(first.as_str()));
    assert!(text(&output.stderr).contains("has 1 NIC"), "{}", text(&output.stderr));
}

/// As the wheel lays them, and as cargo does.
#[test]
fn the_plugin_of_the_command_is_found() {
    let home = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
    let bin = home.path().join("bin");
    fs::create_dir(&bin).expect("a folder");
    let command = bin.join("ferrywire");
    fs::hard_link(env!("CARGO_BIN_EXE_ferrywire"), &command).expect("one file system");
    let run = || {
        let mut run = Command::new(&command);
        run.args(["nccl", "env"]).env("NCCL_SOCKET_IFNAME", "lo").output().expect("it starts")
    };
    let said = refused(&run(), 1);
    assert!(said.starts_with("error: cannot find libnccl-net-ferrywire.so beside "), "{said}");
    let packages = home.path().join("lib/python3.12/site-packages/ferrywire/lib");
    fs::create_dir_all(&packages).expect("folders");
    for place in [packages.join("libnccl-net-ferrywire.so"), bin.join("libnccl_net_ferrywire.so")] {
        symlink(library(), &place).expect("a link");
        let output = run();
        let found = text(&output.stdout).contains(&format!("NCCL_NET_PLUGIN={}\n", place.display()));
        assert!(found, "{}{}", text(&output.stdout), text(&output.stderr));
    }
}

#[test]
fn an_unusable_plugin_is_not_exported() {
    let run = |command: &mut Command| command.output().expect("it starts");
    let missing = run(&mut env(Some(Path::new("/nonexistent.so"))));
    assert_eq!(refused(&missing, 1), "error: the plugin /nonexistent.so is not a file");
    assert!(text(&missing.stderr).contains("cargo build --release -p ferrywire-nccl"), "{missing:?}");
    assert!(
        refused(&run(&mut env(Some(Path::new(env!("CARGO_BIN_EXE_ferrywire"))))), 1).starts_with("error: ")
    );
    let other = refused(&run(&mut env(Some(&hosted::library()))), 1);
    assert!(other.contains("is the plugin of another network"), "{other}");
    let without_nic = run(env(Some(&library())).env("NCCL_SOCKET_IFNAME", "=nothing0"));
    let said = refused(&without_nic, 1);
    assert!(said.contains("nothing0"), "{said}");
    refused(&run(&mut env(Some(Path::new("")))), 2);
    refused(&run(env(None).arg("--timeout=0")), 2);
    refused(&run(env(Some(&library())).arg("another")), 2);
}

/// Regression: the output was empty, which `eval` takes for success, and NCCL used its own sockets.
#[test]
fn a_script_stops_at_an_unusable_plugin_and_one_that_goes_on_keeps_nccl_from_its_sockets() {
    let shell = |options: &str, path: &str| {
        let script = r#"eval "$("$0" nccl env "$1")"; echo "status $?, NCCL_NET=$NCCL_NET""#;
        let mut shell = Command::new("sh");
        shell.args([options, script, env!("CARGO_BIN_EXE_ferrywire"), path]).env_remove("NCCL_NET");
        let output = shell.output().expect("a shell");
        (output.status.code(), text(&output.stdout))
    };
    for path in ["/nonexistent.so", "", "--timeout=0", "--timout=3"] {
        assert_eq!(shell("-ec", path), (Some(1), String::new()), "{path}");
        assert_eq!(shell("-c", path), (Some(0), "status 1, NCCL_NET=ferrywire\n".to_owned()), "{path}");
    }
}
