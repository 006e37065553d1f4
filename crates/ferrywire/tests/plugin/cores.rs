//! Which cores the threads keep to that move payload: ours, and the plugin's, which ours start.

use crate::case::case;
use crate::ends::{Ends, LIMIT};
use std::time::Instant;

/// Leaves this thread, and those it starts from now on, two cores; false where there is only one.
fn two_cores() -> bool {
    // SAFETY: all-zero is a valid (empty) set.
    let mut all: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    let mut two = all;
    // SAFETY: the pointer is to a whole set, and every index is below its size.
    unsafe {
        libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut all);
        let allowed = (0..libc::CPU_SETSIZE as usize).filter(|&core| libc::CPU_ISSET(core, &all));
        allowed.take(2).for_each(|core| libc::CPU_SET(core, &mut two));
        libc::CPU_COUNT(&two) == 2 && libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &two) == 0
    }
}

/// How many cores each thread may use whose name begins like this.
fn cores_of(name: &str) -> Vec<usize> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let read = |path: std::path::PathBuf| std::fs::read_to_string(path).unwrap_or_default();
    let of_them = tasks.filter(|task| read(task.path().join("comm")).starts_with(name));
    of_them
        .filter_map(|task| {
            let status = read(task.path().join("status"));
            let mask = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed:"))?;
            let digits = mask.chars().filter_map(|digit| digit.to_digit(16));
            Some(digits.map(|digit| digit.count_ones() as usize).sum())
        })
        .collect()
}

#[test]
fn while_a_core_has_no_channel_the_plugins_threads_run_on_all() {
    case!("").passes(|| {
        if !two_cores() {
            println!("SKIPPED: needs 2 cores");
            return;
        }
        let ends = Ends::with(|builder| builder.channels(1));
        ends.write(3_000_000, 1);
        let (ours, plugins) = (cores_of("ferrywire-"), cores_of("tcpx-"));
        assert!(plugins.len() >= 2, "{plugins:?}");
        assert!(ours.iter().chain(&plugins).all(|&cores| cores == 2), "{ours:?} {plugins:?}");
        ends.close();
    });
}

#[test]
fn with_a_channel_for_every_core_each_thread_keeps_to_one() {
    case!("").passes(|| {
        if !two_cores() {
            println!("SKIPPED: needs 2 cores");
            return;
        }
        let ends = Ends::with(|builder| builder.channels(2));
        let (began, workers) = (Instant::now(), 4);
        while cores_of("ferrywire-").iter().filter(|&&cores| cores == 1).count() < workers {
            assert!(began.elapsed() < LIMIT, "{:?}", cores_of("ferrywire-"));
            std::thread::yield_now();
        }
        ends.write(3_000_000, 1);
        let plugins = cores_of("tcpx-");
        assert!(plugins.len() >= 2 && plugins.iter().all(|&cores| cores == 1), "{plugins:?}");
        ends.close();
    });
}
