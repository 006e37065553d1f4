//! Peers that hold the secret, shake hands, and then do what no ferrywire does.
//!
//! Each test ends in a refusal, or in the loss of the channel or peer that misbehaved, with a cause that
//! names what it did. [`Scene::unharmed`] then checks that nothing else changed: memory around and outside
//! the region, and the work of a good peer.
//! Read next: `scene.rs` and `evil.rs`, then the tests: `frames.rs`, `floods.rs`, `control.rs`, `answering.rs`,
//! `vanishing.rs`.

mod answering;
mod control;
mod evil;
mod floods;
mod frames;
mod scene;
mod vanishing;

use ferrywire_proto::stall_timer::StallTimer;
use std::thread;
use std::time::{Duration, Instant};

const SECRET: &str = "correct horse";
const LIMIT: Duration = Duration::from_secs(120);

/// Waits until something is so.
fn eventually(what: &str, mut so: impl FnMut() -> bool) {
    let (start, mut patience) = (Instant::now(), StallTimer::new(LIMIT));
    while !so() {
        assert!(!patience.is_over(start.elapsed()), "never came about: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}
