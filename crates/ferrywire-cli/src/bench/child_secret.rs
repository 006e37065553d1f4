//! The secret that this process passes to its child processes, because the file that it came from may not be readable
//! twice.

use std::process::Command;
use std::time::{Duration, Instant};

use zeroize::Zeroizing;

use super::protocol::{from_hex, to_hex};
use super::secret_file::{Exchange, Phase};

/// Environment variable with the secret in hex, since a secret may have any bytes. No option has this name,
/// so neither configuration nor flags interfere.
const VARIABLE: &str = "FERRYWIRE_SECRET_HANDED";
/// The same for a second secret that is valid while one is exchanged for the other, behind its part in the exchange and
/// the milliseconds that the phase has lasted: `next 1500 6e65772073656372657421`.
const EXCHANGE: &str = "FERRYWIRE_SECRET_HANDED_TOO";
const NEXT: &str = "next";
const PREVIOUS: &str = "previous";

/// Passes the secret to a command; does nothing without one.
pub fn hand(command: &mut Command, secret: Option<&[u8]>) {
    set(command, VARIABLE, secret.map(|secret| to_hex(secret)));
    set(command, EXCHANGE, None);
}

/// Passes all secrets that are valid to a command, and how far one is exchanged for the other.
pub fn hand_all(command: &mut Command, exchange: Option<&Exchange>) {
    hand(command, exchange.map(|exchange| exchange.current.as_slice()));
    set(command, EXCHANGE, exchange.and_then(|exchange| phase_to_text(&exchange.phase, Instant::now())));
}

fn set(command: &mut Command, variable: &str, value: Option<String>) {
    match value {
        Some(value) => command.env(variable, value),
        None => command.env_remove(variable),
    };
}

fn phase_to_text(phase: &Phase, now: Instant) -> Option<String> {
    let (part, other, since) = match phase {
        Phase::Settled => return None,
        Phase::Announced { next, since } => (NEXT, next, since),
        Phase::Switched { previous, since } => (PREVIOUS, previous, since),
    };
    let lasted = now.saturating_duration_since(*since).as_millis();
    Some(format!("{part} {lasted} {}", to_hex(other)))
}

fn phase_from_text(text: &str, now: Instant) -> Option<Phase> {
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

/// How far the parent process has exchanged its secret.
pub fn phase() -> Phase {
    let text = std::env::var(EXCHANGE).ok();
    text.and_then(|text| phase_from_text(&text, Instant::now())).unwrap_or_default()
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
            Phase::Announced { next: other.clone(), since },
            Phase::Switched { previous: other.clone(), since },
        ] {
            let text = phase_to_text(&phase, now).expect("there is a second secret");
            assert_eq!(phase_from_text(&text, now), Some(phase));
        }
        assert_eq!(phase_to_text(&Phase::Settled, now), None);
        for bad in ["", "next", "next 1 6g", "next x 61", "other 1 61"] {
            assert_eq!(phase_from_text(bad, now), None, "{bad}");
        }
    }
}
