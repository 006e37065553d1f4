//! The bare loop runs, verifies what arrives and says how fast it was.

use std::path::PathBuf;
use std::process::Command;

/// The simulated plugin, built with these tests.
fn plugin() -> PathBuf {
    std::env::current_exe().unwrap().with_file_name("libferrywire_tcpx_sim.so")
}

fn posted(switches: &str) -> (bool, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_posted"));
    command.arg("--plugin").arg(plugin());
    command.args(["--comms", "2", "--footprint", "8388608", "--seconds", "0.05", "--pin"]);
    command.env("FERRYWIRE_TCPX_SIM", switches).env("NCCL_DYNAMIC_CHUNK_SIZE", "524288");
    command.env("NCCL_GPUDIRECTTCPX_SOCKET_IFNAME", "=lo");
    command.env("NCCL_GPUDIRECTTCPX_PROGRAM_FLOW_STEERING_WAIT_MICROS", "1000");
    let out = command.output().unwrap();
    let text = [out.stdout, out.stderr].concat();
    (out.status.success(), String::from_utf8(text).unwrap())
}

#[test]
fn it_runs_and_says_how_fast() {
    for switches in ["", "one_step=off,full=null"] {
        let (well, said) = posted(switches);
        assert!(well, "{said}");
        let rate = said.strip_prefix("{\"gb_per_s\":").and_then(|rest| rest.split(',').next());
        assert!(rate.is_some_and(|rate| rate.parse::<f64>().unwrap() > 0.0), "{said}");
        assert!(said.contains("\"comms\":2,\"version\":7}"), "{said}");
    }
}

#[test]
fn a_plugin_that_fails_is_an_error() {
    let (well, said) = posted("test_error_after=5");
    assert!(!well);
    assert!(said.contains("test gave result 2"), "{said}");
}
