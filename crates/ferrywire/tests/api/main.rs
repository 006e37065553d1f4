//! What programs in other languages need of the API: waiting for many things at once, memory that somebody else
//! owns, blocks in arrays, limits on time, processes that fork, and words at every end.

mod any;
mod blocks;
#[allow(dead_code, reason = "the plugin's own tests use all of it")]
#[path = "../../../ferrywire-tcpx-sim/tests/rules/case.rs"]
mod case;
mod dropped;
mod ends;
mod forks;
mod held_up;
mod limits;
mod many;
mod netns;
mod outcomes;
mod owners;
mod unmapped;
mod wakeups;
mod withdrawn;

use ferrywire::{Endpoint, Peer};
use std::time::Duration;

/// Longest any single wait may be, however busy the machine is.
const LIMIT: Duration = Duration::from_secs(120);

fn listening() -> Endpoint {
    Endpoint::builder().listen("127.0.0.1:0".parse().unwrap()).channels(2).build().unwrap()
}

/// Two endpoints, and each as the other sees it.
struct Pair {
    ends: [Endpoint; 2],
    near: Peer,
    far: Peer,
}

fn pair() -> Pair {
    let ends = [listening(), listening()];
    let near = ends[0].connect(ends[1].listen_addresses()[0], LIMIT).unwrap();
    let far = ends[1].accept(LIMIT).unwrap();
    Pair { ends, near, far }
}
