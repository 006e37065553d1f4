//! Runs a driver in C that uses the plugin as NCCL does, each case in a process of its own.
//!
//! Each thing that an exported plugin has to survive is a case; cases whose calls differ between versions run in v10,
//! v11 and v12. In v6, for NCCL before 2.17, only the order of calls differs.

use crate::driver::{can_make_namespaces, command, has_time, output, passes};

macro_rules! cases {
    ($($case:ident)+) => {$(
        #[test]
        fn $case() {
            [10, 11, 12].into_iter().for_each(|version| passes("driver", version, stringify!($case)));
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
    tuned_for_another_network
    deregistering
    testing
    receives
    outstanding
    nothing_is_cut
    closing
    killed_peer
    late_receives
    nothing_left
    somebody_elses_context
    no_logger
}

/// Regression: ranks of NCCL 2.12 to 2.16 hung. They wait for each connect before their first accept, and a connect ended
/// only once the peer called accept.
#[test]
fn a_connect_of_an_old_nccl_ends_before_the_peer_accepts() {
    passes("driver", 6, "connects_first");
}

/// Regression: connections that an abort left half made stayed open until NCCL called again, which could be never, and so
/// did listeners, which NCCL closes only after an accept. In
/// parallel, because the versions before 11 wait for long.
#[test]
fn abandoned() {
    std::thread::scope(|scope| {
        for version in [10, 11, 12] {
            scope.spawn(move || passes("driver", version, "abandoned"));
        }
    });
}

#[test]
fn encrypted() {
    for case in
        ["as_nccl", "setting_up", "receives", "nothing_is_cut", "closing", "killed_peer", "late_receives"]
    {
        passes_encrypted(case);
    }
}

/// Regression: the dialling rank reported an unexpected end of file, and the other one nothing.
#[test]
fn hosts_with_different_secrets_log_it() {
    passes_encrypted("different_secrets");
}

fn passes_encrypted(case: &str) {
    let mut command = command("driver", 12, case);
    command.env("FERRYWIRE_NCCL_ENCRYPT", "required").env("FERRYWIRE_SECRET", "a secret of all hosts");
    let (has_passed, text) = output(&mut command);
    assert!(has_passed, "{case}: {text}");
}

/// NCCL would go on in clear over its own sockets if the plugin did not start.
#[test]
fn encryption_without_a_secret_makes_no_connection() {
    let mut command = command("driver", 12, "as_nccl");
    command.env("FERRYWIRE_NCCL_ENCRYPT", "required").env_remove("FERRYWIRE_SECRET");
    let (has_passed, text) = output(&mut command);
    assert!(!has_passed && text.contains("FERRYWIRE_NCCL_ENCRYPT needs FERRYWIRE_SECRET"), "{text}");
}

#[test]
fn tables() {
    passes("driver", 12, "tables");
}

/// Regression: JAX drives all GPUs of a host from one process, which had the threads for one GPU.
#[test]
fn several_gpus() {
    // SAFETY: zeroes are an empty set, which the kernel fills.
    let allowed = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set);
        libc::CPU_COUNT(&set) as usize
    };
    if std::thread::available_parallelism().is_ok_and(|cores| cores.get() < allowed) {
        println!("SKIPPED: needs a process without a quota of CPU time");
        return;
    }
    [10, 11, 12].into_iter().for_each(|version| passes("driver", version, "several_gpus"));
}

#[test]
fn silent_path() {
    if has_time() && can_make_namespaces() {
        passes("driver", 12, "silent_path");
    }
}
