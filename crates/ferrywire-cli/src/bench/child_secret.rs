//! The secret that this process passes to its child processes, because the file that it came from may not be readable
//! twice.

use std::process::Command;

use super::protocol::{from_hex, to_hex};
use super::secret_file::Secrets;

/// Environment variable with the secret in hex, since a secret may have any bytes. No option has this name,
/// so neither configuration nor flags interfere.
const VARIABLE: &str = "FERRYWIRE_SECRET_HANDED";
/// The same for a second secret, which is accepted while the first is being exchanged.
const ALSO_ACCEPTED: &str = "FERRYWIRE_SECRET_HANDED_TOO";

/// Passes the secret to a command; does nothing without one.
pub fn hand(command: &mut Command, secret: Option<&[u8]>) {
    set(command, VARIABLE, secret);
    set(command, ALSO_ACCEPTED, None);
}

/// Passes all secrets that are valid to a command.
pub fn hand_all(command: &mut Command, secrets: Option<&Secrets>) {
    set(command, VARIABLE, secrets.map(|secrets| secrets.current.as_slice()));
    let also_accepted = secrets.and_then(|secrets| secrets.also_accepted.as_deref());
    set(command, ALSO_ACCEPTED, also_accepted.map(Vec::as_slice));
}

fn set(command: &mut Command, variable: &str, secret: Option<&[u8]>) {
    match secret {
        Some(secret) => command.env(variable, to_hex(secret)),
        None => command.env_remove(variable),
    };
}

/// The secret that the parent process has passed.
pub fn secret() -> Option<Vec<u8>> {
    passed(VARIABLE)
}

/// The second secret that the parent process has passed.
pub fn also_accepted() -> Option<Vec<u8>> {
    passed(ALSO_ACCEPTED)
}

fn passed(variable: &str) -> Option<Vec<u8>> {
    std::env::var(variable).ok().and_then(|digits| from_hex(&digits))
}
