//! The secret that a process of ours hands to those that it starts: whatever file it came from may not be read twice.

use std::process::Command;

use super::protocol::{from_hex, to_hex};

/// Any bytes, in hex. As its name says no option, so no configuration and no flag is in its way.
const VARIABLE: &str = "FERRYWIRE_SECRET_HANDED";

/// Hands it on, and nothing where there is none.
pub fn hand(command: &mut Command, secret: Option<&[u8]>) {
    match secret {
        Some(secret) => command.env(VARIABLE, to_hex(secret)),
        None => command.env_remove(VARIABLE),
    };
}

/// What this process was handed.
pub fn secret() -> Option<Vec<u8>> {
    std::env::var(VARIABLE).ok().and_then(|digits| from_hex(&digits))
}
