//! The secret that this process passes to its child processes, because the file that it came from may not be readable
//! twice.
//!
//! The environment of a process is not overwritten: who may read it (`/proc/PID/environ`: the same user, root) reads the
//! secrets with which the process began.

use std::process::Command;
use std::time::{Duration, Instant};

use zeroize::Zeroizing;

use super::protocol::{from_hex, to_hex};
use super::secret_file::Phase;

/// Environment variable with the secret in hex, since a secret may have any bytes. No option has this name,
/// so neither configuration nor flags interfere.
const VARIABLE: &str = "FERRYWIRE_SECRET_HANDED";
/// How far the secret is exchanged for another: `settled`, or the second valid secret in hex behind its part in the exchange
/// and the milliseconds that the phase has lasted, as in `next 1500 6e65772073656372657421`.
const PHASE: &str = "FERRYWIRE_SECRET_HANDED_TOO";
const SETTLED: &str = "settled";
const NEXT: &str = "next";
const PREVIOUS: &str = "previous";

/// Passes the secret to a command; does nothing without one.
pub fn hand(command: &mut Command, secret: Option<&[u8]>) {
    set(command, VARIABLE, secret.map(to_hex));
    set(command, PHASE, None);
}

/// Passes on how far a secret is exchanged for another, from a secret file that the child has to follow too.
pub fn hand_phase(command: &mut Command, phase: &Phase) {
    set(command, PHASE, Some(phase_to_text(phase, Instant::now())));
}

fn set(command: &mut Command, variable: &str, value: Option<String>) {
    match value {
        Some(value) => command.env(variable, value),
        None => command.env_remove(variable),
    };
}

fn phase_to_text(phase: &Phase, now: Instant) -> String {
    let (part, other, since) = match phase {
        Phase::Settled => return SETTLED.to_owned(),
        Phase::Announced { next, since } => (NEXT, next, since),
        Phase::Switched { previous, since } => (PREVIOUS, previous, since),
    };
    let lasted = now.saturating_duration_since(*since).as_millis();
    format!("{part} {lasted} {}", to_hex(other))
}

fn phase_from_text(text: &str, now: Instant) -> Option<Phase> {
    if text == SETTLED {
        return Some(Phase::Settled);
    }
    let mut words = text.split(' ');
    let (part, lasted) = (words.next()?, words.next()?.parse().ok()?);
    let other = Zeroizing::new(from_hex(words.next()?)?);
    let since = now.checked_sub(Duration::from_millis(lasted)).unwrap_or(now);
    match part {
        NEXT => Some(Phase::Announced { next: other, since }),
        PREVIOUS => Some(Phase::Switched { previous: other, since }),
        _ => None,
    }
}

/// The secret that the parent process has passed.
pub fn secret() -> Option<Vec<u8>> {
    from_hex(&std::env::var(VARIABLE).ok()?)
}

/// How far the parent process has exchanged its secret; `None` if it follows no secret file.
pub fn phase() -> Option<Phase> {
    phase_from_text(&std::env::var(PHASE).ok()?, Instant::now())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_is_passed_on_with_its_time() {
        let now = Instant::now();
        let other = Zeroizing::new(b"any \x00 bytes".to_vec());
        let since = now - Duration::from_millis(1500);
        for phase in [
            Phase::Settled,
            Phase::Announced { next: other.clone(), since },
            Phase::Switched { previous: other.clone(), since },
        ] {
            let text = phase_to_text(&phase, now);
            assert_eq!(phase_from_text(&text, now), Some(phase));
        }
        for bad in ["", "next", "next 1 6g", "next x 61", "other 1 61"] {
            assert_eq!(phase_from_text(bad, now), None, "{bad}");
        }
    }
}
