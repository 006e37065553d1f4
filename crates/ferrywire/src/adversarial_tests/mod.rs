//! Peers that have the secret, complete the handshake, and then violate the protocol.
//!
//! Each test ends with a refusal, or with the loss of the channel or peer that misbehaved, for a reason that
//! names the violation. [`Scene::unharmed`] then checks that nothing else changed: the memory around and
//! outside the region, and the service to a good peer.
//! Read next: `scene.rs` and `evil.rs`, then the tests: `frames.rs`, `messages.rs`, `floods.rs`, `control.rs`, `answering.rs`,
//! `vanishing.rs`, `wrong_address.rs`.

mod answering;
mod control;
mod evil;
mod floods;
mod frames;
mod messages;
mod scene;
mod vanishing;
mod wrong_address;

use ferrywire_proto::stall_timer::StallTimer;
use std::thread;
use std::time::{Duration, Instant};

const SECRET: &str = "correct horse";
const LIMIT: Duration = Duration::from_secs(120);

/// Waits until the condition holds.
fn eventually(what: &str, mut so: impl FnMut() -> bool) {
    let (start, mut stall_timer) = (Instant::now(), StallTimer::new(LIMIT));
    while !so() {
        assert!(!stall_timer.is_over(start.elapsed()), "never came about: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}
