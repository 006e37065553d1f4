//! The secret that this process passes to its child processes, because the file that it came from may not be readable
//! twice.

use std::process::Command;

use super::protocol::{from_hex, to_hex};

/// Environment variable with the secret in hex, since a secret may have any bytes. No option has this name,
/// so neither configuration nor flags interfere.
const VARIABLE: &str = "FERRYWIRE_SECRET_HANDED";

/// Passes the secret to a command; does nothing without one.
pub fn hand(command: &mut Command, secret: Option<&[u8]>) {
    match secret {
        Some(secret) => command.env(VARIABLE, to_hex(secret)),
        None => command.env_remove(VARIABLE),
    };
}

/// The secret that the parent process has passed.
pub fn secret() -> Option<Vec<u8>> {
    std::env::var(VARIABLE).ok().and_then(|digits| from_hex(&digits))
}
