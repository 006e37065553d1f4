//! Which cores the threads keep to that move payload: ours, and the plugin's, which ours start.

use crate::affinity::{cores_of, has_cores};
use crate::case::case;
use crate::ends::{Ends, LIMIT};
use std::time::Instant;

#[test]
fn while_a_core_has_no_channel_the_plugins_threads_run_on_all() {
    case!("").passes(|| {
        if !has_cores(2) {
            println!("SKIPPED: needs 2 cores");
            return;
        }
        let ends = Ends::with(|builder| builder.channels(1));
        ends.write(3_000_000, 1);
        let (ours, plugins) = (cores_of("ferrywire-"), cores_of("tcpx-"));
        assert!(plugins.len() >= 2, "{plugins:?}");
        assert!(ours.iter().chain(&plugins).all(|cores| cores.len() == 2), "{ours:?} {plugins:?}");
        ends.close();
    });
}

#[test]
fn with_a_channel_for_every_core_each_thread_keeps_to_one() {
    case!("").passes(|| {
        if !has_cores(2) {
            println!("SKIPPED: needs 2 cores");
            return;
        }
        let ends = Ends::with(|builder| builder.channels(2));
        let (began, workers) = (Instant::now(), 4);
        while cores_of("ferrywire-").iter().filter(|cores| cores.len() == 1).count() < workers {
            assert!(began.elapsed() < LIMIT, "{:?}", cores_of("ferrywire-"));
            std::thread::yield_now();
        }
        ends.write(3_000_000, 1);
        let plugins = cores_of("tcpx-");
        assert!(plugins.len() >= 2 && plugins.iter().all(|cores| cores.len() == 1), "{plugins:?}");
        ends.close();
    });
}
