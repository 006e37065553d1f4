//! The bare loop runs, verifies the received bytes and prints its rate.

use std::path::PathBuf;
use std::process::Command;

/// The simulated plugin, built with these tests.
fn plugin() -> PathBuf {
    std::env::current_exe().unwrap().with_file_name("libferrywire_tcpx_sim.so")
}

fn posted(switches: &str) -> (bool, String) {
    run(switches, true, &["--comms", "2", "--footprint", "8388608", "--seconds", "0.05", "--pin"])
}

fn run(switches: &str, with_plugin: bool, flags: &[&str]) -> (bool, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_posted"));
    if with_plugin {
        command.arg("--plugin").arg(plugin());
    }
    command.args(flags);
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
    assert!(said.contains("the plugin's test returned result 2"), "{said}");
}

#[test]
fn messages_are_exchanged_over_a_plugin_and_over_sockets() {
    for more in [&[][..], &["--plain"][..]] {
        let flags =
            [&["--exchange", "--comms", "2", "--chunk", "65536", "--seconds", "0.05"][..], more].concat();
        let (well, said) = run("one_step=off,host_warning=off", more.is_empty(), &flags);
        assert!(well, "{said}");
        let us = said.strip_prefix("{\"p50_us\":").and_then(|rest| rest.split(',').next());
        assert!(us.is_some_and(|us| us.parse::<f64>().unwrap() > 0.0), "{said}");
        assert!(said.contains("\"comms\":2,\"bytes\":65536}"), "{said}");
    }
}

#[test]
fn sockets_and_a_plugin_are_not_both_asked_for() {
    for (with_plugin, flags) in
        [(true, &["--exchange", "--plain"][..]), (false, &["--exchange"]), (true, &["--plain"])]
    {
        let (well, said) = run("", with_plugin, flags);
        assert!(!well && said.contains("Try: posted --help"), "{said}");
    }
}
