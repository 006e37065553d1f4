//! What `--transport auto` reports.

use crate::process::{Process, SERVE, wait_until};
use crate::world::{Host, World};
use crate::{RUN_TIMEOUT, shared_turn};

/// Where each end serves its metrics.
const METRICS_PORT: u16 = 9464;

/// The lines of an end's metrics that say what carries payload.
fn path_infos(world: &World, host: Host) -> Vec<String> {
    let ask = format!(
        "exec 3<>/dev/tcp/127.0.0.1/{METRICS_PORT} && printf 'GET /metrics HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n' >&3 && cat <&3"
    );
    let answer = world.inside(host, "bash", &["-c", &ask]);
    answer.lines().filter(|line| line.starts_with("ferrywire_path_info{")).map(str::to_owned).collect()
}

/// Regression: devmem was tried for host memory too, and TCP was reported as a fallback.
#[test]
fn host_memory_over_tcp_is_no_fallback() {
    let Some(_turn) = shared_turn() else { return };
    let world = World::new("2gbit");
    let metrics = format!("--metrics 127.0.0.1:{METRICS_PORT}");
    let _serve = Process::serve(&world, &format!("--memory host {metrics}"));
    let connect = |args: &str| {
        let args = format!("bench connect {SERVE} --memory host --peer-memory host --sizes 64K {args}");
        Process::start(&world, Host::A, &args)
    };
    let short = connect("--iters 3 --warmup 0").end(RUN_TIMEOUT);
    assert_eq!(short.status, Some(0), "{}", short.errors);
    assert!(short.output.contains("both ends use host memory"), "{}", short.output);
    let long = connect(&format!("--seconds 600 {metrics}"));
    let listens = wait_until(RUN_TIMEOUT, || long.errors().contains("metrics: http://"));
    assert!(listens, "{}", long.errors());
    for host in [Host::A, Host::B] {
        let mut infos = Vec::new();
        let seen = wait_until(RUN_TIMEOUT, || {
            infos = path_infos(&world, host);
            !infos.is_empty()
        });
        assert!(seen, "no path on {host:?}: {}", long.errors());
        assert!(infos.iter().all(|info| info.contains("reason=\"\",transport=\"tcp\"")), "{infos:#?}");
    }
}
