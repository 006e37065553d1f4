//! Errors of failing plugins: the last warning of the plugin, the fix if the cause is known, and no guesses.

use crate::common::{ferrywire, first_error, text};
use crate::hosted::{connect, serve, with_plugin};

/// Why a run of both ends on this host fails, with these switches of the plugin.
fn demo(switches: &str, args: &str) -> String {
    let mut command = ferrywire(&with_plugin(&format!("bench --sizes 64K --iters 5 {args}")));
    let output = command.env("FERRYWIRE_TCPX_SIM", switches).output().expect("it runs");
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    first_error(&output)
}

#[track_caller]
fn says(error: &str, parts: &[&str]) {
    parts.iter().for_each(|part| assert!(error.contains(part), "{part:?} is not in: {error}"));
    for guess in ["firewall", "likely: the GPU", "the plugin's manager does not run"] {
        assert!(!error.contains(guess), "{error}");
    }
}

#[test]
fn a_manager_that_is_missing_or_refuses_is_reported_in_the_plugins_words() {
    let error = demo("dp_manager=off", "");
    says(
        &error,
        &["result 3", "the plugin warned: update flow steering rule", "unix client connect() error: 2"],
    );
    says(
        &error,
        &["fix: start the receive data path manager", "in /tmp (NCCL_GPUDIRECTTCPX_UNIX_CLIENT_PREFIX)"],
    );
    says(&demo("dp_manager=refuse", ""), &["FlowSteerRule Failed", "it answered and refused"]);
}

/// The end that has no manager knows why; the other one hears of it.
#[test]
fn a_failed_connect_has_the_peers_reason() {
    let serve = serve("", "dp_manager=off");
    let refused = connect(&serve, "--sizes 64K --iters 5", "");
    says(
        &first_error(&refused),
        &["the peer gave up: ", "accept on device", "unix client connect() error: 2"],
    );
}

#[test]
fn an_accept_that_does_not_return_is_named_within_the_timeout() {
    // A call is named that has taken half of the set-up timeout. On a busy machine the timeout may pass before the call is that old.
    for (timeout_s, setup_timeout_s) in [(4, 3), (16, 12), (64, 48)] {
        let error = demo("dp_manager=hang", &format!("--timeout {timeout_s}"));
        if error.contains("(lo) has not returned for") {
            return says(&error, &[&format!("accept has not ended after {setup_timeout_s} s")]);
        }
        println!("again, with a longer timeout: {error}");
    }
    panic!("no error names the accept");
}

#[test]
fn an_exit_in_accept_is_reported_at_both_ends() {
    let mut serve = serve("", "dp_manager=gone");
    let failed = connect(&serve, "--sizes 64K --iters 5", "");
    says(&first_error(&failed), &["plugin GPUDirectTCPX_v7 ends its process after an error"]);
    let error = serve.next_error();
    says(
        &error,
        &[
            "exit status 1",
            "the plugin warned: unix client /tmp/get_gpu_fd_",
            "fix: start the receive data path",
        ],
    );
}

#[test]
fn a_failed_start_is_reported_with_its_warning_and_not_with_the_last_line() {
    let mut command = ferrywire(&with_plugin("bench --sizes 64K --iters 5"));
    command.env("NCCL_GPUDIRECTTCPX_SOCKET_IFNAME", "ferrywire-none");
    let output = command.output().expect("it runs");
    let error = first_error(&output);
    says(
        &error,
        &["init: result 3", "last output: NET/GPUDirectTCPX : no interface found", "fix: name interfaces"],
    );
    assert!(!error.contains("TCPXCHECK") && !error.contains("once per process"), "{error}");
}

/// The simulated plugin ends its process as the real one does, unless a setting forbids it.
#[test]
fn gpu_memory_within_one_host_names_the_cause_and_two_alternatives() {
    let error = demo("", "--memory sim --peer-memory sim --allow-same-host-gpu");
    says(&error, &["the other end: ", "exit status 1", "data landed on host memory 1 times"]);
    says(&error, &["FERRYWIRE_TCPX_SIM=same_host=allow", "use two hosts, or memory of the host"]);
}
