//! Strangers on the network, against an endpoint that goes on serving its peers.
//!
//! Real sockets on loopback and the public API only. The attack lasts ten seconds; with
//! `FERRYWIRE_HOSTILE_SECONDS=60` it is the acceptance test. Peers that hold the secret and misbehave are
//! in `src/adversarial_tests`.

mod attack;
mod on_path;
mod peers;
mod process;
mod refusals;
mod strangers;

use std::time::Duration;

const SECRET: &str = "correct horse";
const LIMIT: Duration = Duration::from_secs(120);
/// Lines about refused strangers in a minute; the last says that there are more.
const LINES_MAX: usize = 100;
