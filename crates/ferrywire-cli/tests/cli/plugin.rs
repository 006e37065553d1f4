//! `ferrywire plugin`: what works is shown, what does not is one line and status 1, whatever the plugin does.

use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

use serde_json::{Value, json};

use crate::common::{ferrywire, first_error, read_line, run, text};
use crate::compile::{broken, compile};

fn inspect(path: &Path, options: &str) -> Output {
    ferrywire(&format!("plugin {options}")).arg(path).output().expect("the command starts")
}

/// Inspects what does not work; gives the one line that is said about it, after the path.
fn refused(path: &Path, options: &str) -> String {
    let output = inspect(path, options);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert_eq!((said.lines().count(), text(&output.stdout)), (1, String::new()), "{said}");
    let start = format!("error: {}: ", path.display());
    said.trim_end().strip_prefix(&start).unwrap_or_else(|| panic!("{said}")).to_owned()
}

fn json_of(output: &Output) -> Value {
    crate::common::json(output)
}

#[test]
fn a_report_that_cannot_be_written_is_a_failure_and_a_closed_pipe_none() {
    let plugin = compile("plugin.c", &["VERSION=7"]);
    for options in ["", "--json"] {
        crate::common::unwritten(ferrywire(&format!("plugin {options}")).arg(&plugin));
    }
}

#[test]
fn a_plugin_is_shown_with_versions_and_devices() {
    let output = inspect(&compile("plugin.c", &["VERSION=7"]), "");
    assert!(output.status.success() && output.stderr.is_empty(), "{}", text(&output.stderr));
    let shown = text(&output.stdout);
    for expected in [
        "exports   v7 (NCCL 2.30 uses v7)",
        "version   v7",
        "name      Test plugin, started (before init: Test plugin)",
    ] {
        assert!(shown.lines().any(|line| line == expected), "{expected}\n{shown}");
    }
    let row = shown.lines().find(|line| line.contains("nic3")).expect("device 3");
    let columns: Vec<_> = row.split_whitespace().collect();
    let guid = "0x1122334455667703";
    assert_eq!(
        columns,
        [
            "3",
            "nic3",
            "0000:00:03.0",
            "200001",
            "17",
            guid,
            "2.5",
            "host",
            "cuda",
            "unpack",
            "7",
            "65537",
            "8"
        ]
    );
}

#[test]
fn programs_get_every_property() {
    let path = compile("plugin.c", &["VERSION=12"]);
    let shown = json_of(&inspect(&path, "--json"));
    assert_eq!((&shown["schema"], &shown["error"]), (&json!(2), &Value::Null));
    assert_eq!(shown["exported"], json!(["v12"]));
    assert_eq!((&shown["used"], &shown["nccl_choice"]), (&json!("v12"), &json!("v12")));
    assert_eq!(shown["name"], "Test plugin, started");
    assert_eq!(shown["devices"].as_array().map(Vec::len), Some(5));
    let expected = json!({
        "device": 3, "name": "nic3", "pci_path": "/sys/devices/pci0000:00/0000:00:03.0",
        "guid": 0x1122_3344_5566_7703u64, "memory": ["host", "cuda"], "reg_is_global": true,
        "force_flush": true, "speed_mbps": 200_001, "port": 17, "latency_us": 2.5, "max_comms": 65_537,
        "max_recvs": 8, "device_type": 1, "device_version": 7, "members": [3, 1],
        "max_p2p_bytes": 1u64 << 38, "max_coll_bytes": 1u64 << 39, "max_multi_request": 21, "rail": 301,
        "plane": null, "refused_by_nccl": null, "error": null
    });
    assert_eq!(shown["devices"][3], expected);
    assert_eq!(shown["devices"][4]["pci_path"], Value::Null);
}

#[test]
fn the_version_can_be_chosen() {
    let path = broken("TWO_VERSIONS");
    let newest = json_of(&inspect(&path, "--json"));
    assert_eq!((&newest["used"], &newest["exported"]), (&json!("v7"), &json!(["v7", "v5"])));
    let chosen = json_of(&inspect(&path, "--json --version v5"));
    assert_eq!((&chosen["used"], &chosen["name"]), (&json!("v5"), &json!("Broken plugin of v5")));
    assert_eq!(refused(&path, "--version 9"), "exports no ncclNetPlugin_v9; it has v7, v5");
}

#[test]
fn files_that_are_no_plugins_get_one_line_each() {
    let directory = tempfile::tempdir().expect("a directory");
    let write = |name: &str, bytes: &[u8]| -> PathBuf {
        let path = directory.path().join(name);
        std::fs::write(&path, bytes).expect("written");
        path
    };
    let whole = std::fs::read(broken("NOTHING")).expect("compiled");
    assert_eq!(refused(&directory.path().join("absent.so"), ""), "there is no such file");
    assert!(refused(&write("text.so", b"not a plugin\n"), "").starts_with("not a shared library"));
    assert!(refused(&write("empty.so", b""), "").starts_with("not a shared library"));
    assert!(refused(&write("cut.so", &whole[..whole.len() / 2]), "").starts_with("truncated: it has "));
    assert!(refused(&write("header.so", &whole[..40]), "").starts_with("truncated: it has 40 bytes"));
    assert_eq!(refused(directory.path(), ""), "not a file");
}

#[test]
fn a_damaged_library_costs_one_line_at_worst() {
    let whole = std::fs::read(compile("plugin.c", &["VERSION=9"])).expect("compiled");
    let directory = tempfile::tempdir().expect("a directory");
    let mut failed = 0;
    for seed in 0..64u64 {
        let path = directory.path().join(format!("damaged{seed}.so"));
        std::fs::write(&path, damaged(&whole, seed)).expect("written");
        let output = inspect(&path, "");
        let said = text(&output.stderr);
        match output.status.code() {
            Some(0) => assert_eq!(said, "", "seed {seed}"),
            Some(1) => assert_eq!(said.lines().count(), 1, "seed {seed}: {said}"),
            other => panic!("seed {seed}: {other:?}: {said}"),
        }
        failed += i32::from(!output.status.success());
    }
    assert!((8..64).contains(&failed), "{failed} of 64: the damage is not what it should be");
}

/// Some bytes overwritten, in the headers or anywhere.
fn damaged(whole: &[u8], seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut random = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below as u64) as usize
    };
    let mut bytes = whole.to_vec();
    let within = [64, 1024, whole.len()][random(3)];
    for _ in 0..[1, 4, 30, 300][random(4)] {
        bytes[random(within)] = random(256) as u8;
    }
    bytes
}

#[test]
fn plugins_that_do_not_work_get_one_line_each() {
    let said = |case| refused(&broken(case), "");
    assert_eq!(said("NO_TABLE"), "exports no ncclNetPlugin_v4 to v12: not an NCCL net plugin");
    assert!(said("TOO_OLD").ends_with("only ncclNetPlugin_v3, which is too old"));
    assert_eq!(said("NULL_NAME"), "the plugin's v7 table has no name (a null pointer)");
    assert_eq!(said("NO_IRECV"), "the plugin's v7 table has no irecv function (a null pointer)");
    assert_eq!(said("NO_DEVICES"), "plugin Broken plugin (v7) has no devices (it reports 0)");
    assert_eq!(said("UNRESOLVED"), "cannot be loaded: undefined symbol: this_symbol_is_nowhere");
    let failed = said("INIT_FAILS");
    assert!(failed.starts_with("plugin Broken plugin (v7): init: result 3 (internal error)"), "{failed}");
    assert!(failed.ends_with("last output: no NIC here: 0%"), "{failed}");
}

#[test]
fn a_plugin_that_ends_the_process_is_reported_not_followed() {
    assert_eq!(
        refused(&broken("INIT_EXITS"), ""),
        "the plugin ended its process with exit status 1 in init; last output: the manager is not running, giving up"
    );
    assert_eq!(
        refused(&broken("INIT_CRASHES"), ""),
        "the plugin died by signal 11 (SIGSEGV) in init; last output: about to crash"
    );
    assert_eq!(
        refused(&broken("PROPERTIES_EXIT"), ""),
        "the plugin ended its process with exit status 9 in getProperties of device 0; last output: device 0 is gone"
    );
    assert_eq!(
        refused(&broken("PRINTS_AND_EXITS"), ""),
        "the plugin died by signal 6 (SIGABRT) in init; last output: assertion failed: the sky is up"
    );
}

#[test]
fn a_plugin_that_hangs_is_ended_at_the_timeout() {
    let said = refused(&broken("INIT_HANGS"), "--timeout 3");
    let pid = said
        .strip_prefix(
            "the plugin did not return within 3s in init; last output: waiting for ever in process ",
        )
        .unwrap_or_else(|| panic!("{said}"));
    assert!(!Path::new("/proc").join(pid).exists(), "its process is still there");
}

#[test]
fn ctrl_c_ends_the_plugin_too() {
    let mut command = ferrywire("plugin -v");
    command.arg(broken("INIT_HANGS")).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the command starts");
    let mut stderr = BufReader::new(child.stderr.take().expect("piped"));
    let line = read_line(&mut stderr);
    let (_, process) = line.split_once("in process ").unwrap_or_else(|| panic!("{line:?}"));
    let (pid, _) = process.split_once(' ').expect("the place follows");
    // SAFETY: a signal to a child of this process that has not been waited for.
    unsafe { libc::kill(child.id() as i32, libc::SIGINT) };
    assert_eq!(child.wait().expect("it ends").code(), Some(130));
    let mut rest = String::new();
    stderr.read_to_string(&mut rest).expect("text");
    assert_eq!(rest, "");
    assert!(!Path::new("/proc").join(pid).exists(), "its process is still there");
}

#[test]
fn output_of_a_plugin_does_not_mix_with_the_report() {
    let output = inspect(&broken("PRINTS"), "--json");
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!((json_of(&output)["error"].clone(), text(&output.stderr)), (Value::Null, String::new()));
    let verbose = inspect(&broken("PRINTS"), "-v");
    assert!(text(&verbose.stderr).contains("to standard error"), "{}", text(&verbose.stderr));
}

#[test]
fn a_plugin_that_dies_when_it_is_unloaded_is_not_asked_to() {
    let output = inspect(&broken("ENDS_BADLY"), "");
    assert!(output.status.success() && output.stderr.is_empty(), "{}", text(&output.stderr));
}

#[test]
fn a_device_without_properties_fails_the_command_but_not_the_table() {
    let output = inspect(&broken("NULL_NIC"), "");
    assert_eq!(output.status.code(), Some(1));
    assert!(
        first_error(&output)
            .ends_with("getProperties on device 0: the plugin returned success, but the device has no name")
    );
    assert!(text(&output.stdout).contains("exports   v7"));
    let json = json_of(&inspect(&broken("NULL_NIC"), "--json"));
    assert!(
        json["devices"][0]["error"].is_string() && json["error"] == json["devices"][0]["error"],
        "{json}"
    );
}

#[test]
fn a_failure_is_json_too() {
    let output = inspect(Path::new("/nonexistent.so"), "--json");
    assert_eq!(output.status.code(), Some(1));
    let shown = json_of(&output);
    assert_eq!((&shown["path"], &shown["schema"]), (&json!("/nonexistent.so"), &json!(2)));
    assert_eq!(shown["error"], "/nonexistent.so: there is no such file");
}

#[test]
fn a_name_is_resolved_as_nccl_does() {
    let directory = tempfile::tempdir().expect("a directory");
    std::fs::copy(broken("NOTHING"), directory.path().join("libnccl-net-shorty.so")).expect("copied");
    let mut command = ferrywire("plugin shorty --json");
    let output = command.env("LD_LIBRARY_PATH", directory.path()).output().expect("the command starts");
    let found = directory.path().join("libnccl-net-shorty.so");
    assert_eq!(json_of(&output)["path"], found.to_str().expect("text"), "{}", text(&output.stderr));
    let absent = run("plugin nobody-has-this");
    assert_eq!(absent.status.code(), Some(1));
    assert!(first_error(&absent).contains("libnccl-net-nobody-has-this.so"), "{}", first_error(&absent));
}

#[test]
fn a_file_here_needs_no_slash() {
    let directory = tempfile::tempdir().expect("a directory");
    std::fs::copy(broken("NOTHING"), directory.path().join("here.so")).expect("copied");
    let output = ferrywire("plugin here.so").current_dir(directory.path()).output().expect("starts");
    assert!(output.status.success(), "{}", text(&output.stderr));
}

#[test]
fn a_plugin_that_nccl_would_drop_is_marked() {
    let shown = text(&inspect(&broken("STRANGE_DEVICE"), "").stdout);
    assert!(shown.contains("NCCL rejects this plugin: device nic 0 is of type 3"), "{shown}");
}
