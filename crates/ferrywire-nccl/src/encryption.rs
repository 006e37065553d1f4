//! Encryption of the plugin's connections: `FERRYWIRE_NCCL_ENCRYPT=required`, with the secret in `FERRYWIRE_SECRET`.
//!
//! NCCL carries a listener's own secret to the other hosts in clear. So the keys of encrypted connections also need the
//! secret that all hosts share. Both ends mix it into their proofs: ends with different secrets do not meet.
//! Invariant: with encryption required no comm is made without it. An unusable setting fails every `listen` and
//! `connect`, not the plugin's start: NCCL would then use its own sockets, in clear.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::sync::OnceLock;

use ferrywire_net::{Conn, Sealed};
use ferrywire_proto::protection::{Encryption, Protection, ProtectionWish};
use ferrywire_proto::record::{RecordSecret, RecordSecrets};

use crate::failure::{Fault, Outcome};
use crate::handle::Secret;
use crate::log;

const VARIABLE: &str = "FERRYWIRE_NCCL_ENCRYPT";
const SECRET_VARIABLE: &str = "FERRYWIRE_SECRET";
const KEY_CONTEXT: &str = "ferrywire secret of encrypted nccl connections v1";
const RECORDS_CONTEXT: &str = "ferrywire records of an nccl connection v1";
/// Shortest secret in bytes, equal to that of the engine.
const SECRET_BYTES_MIN: usize = ferrywire_proto::limits::SECRET_BYTES_MIN;

/// The key that all hosts of a job share. `Debug` does not print it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct SharedKey([u8; 32]);

impl std::fmt::Debug for SharedKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SharedKey(..)")
    }
}

impl SharedKey {
    /// The secret for the proofs of a connection to a listener, mixed of the shared key and the listener's own
    /// secret.
    pub fn with_listener(&self, listener: &Secret) -> Secret {
        *blake3::keyed_hash(&self.0, listener).as_bytes()
    }
}

/// The shared key of this process's connections; `None` for connections in clear.
///
/// # Errors
/// The variable has an unknown value, or there is no usable secret.
pub fn shared_key() -> Outcome<Option<SharedKey>> {
    static KEY: OnceLock<Result<Option<SharedKey>, String>> = OnceLock::new();
    let key = KEY.get_or_init(|| {
        let key = key_from(|name| std::env::var_os(name).map(OsString::into_vec));
        if let Ok(Some(_)) = key {
            log::info(format_args!("connections are encrypted: {}", protection()));
        }
        key
    });
    key.clone().map_err(Fault::usage)
}

fn key_from(read: impl Fn(&str) -> Option<Vec<u8>>) -> Result<Option<SharedKey>, String> {
    match String::from_utf8_lossy(&read(VARIABLE).unwrap_or_default()).trim() {
        "" | "0" | "off" => return Ok(None),
        "1" | "required" => {}
        other => return Err(format!("{VARIABLE}={other}: must be required or off")),
    }
    let secret = read(SECRET_VARIABLE).unwrap_or_default();
    if secret.len() < SECRET_BYTES_MIN {
        return Err(format!(
            "{VARIABLE} needs {SECRET_VARIABLE}, at least {SECRET_BYTES_MIN} bytes, the same on all hosts"
        ));
    }
    Ok(Some(SharedKey(blake3::derive_key(KEY_CONTEXT, &secret))))
}

/// The protection of encrypted connections. All hosts of an NCCL job have one kind of CPU: NCCL's own rings need that.
fn protection() -> Protection {
    let wish = ProtectionWish::of_this_host(Encryption::Required, false);
    let settled = ProtectionWish::settle(wish, wish).ok().flatten();
    settled.expect("two ends that require encryption have it")
}

/// Wraps a connection so that its bytes travel in records. `proofs` is the secret of its proofs, `said` both ends'
/// messages.
pub fn encrypt(conn: Box<dyn Conn>, proofs: &Secret, said: [&[u8]; 2], dialled: bool) -> Box<dyn Conn> {
    let secret = |direction: u8| {
        let mut hasher = blake3::Hasher::new_derive_key(RECORDS_CONTEXT);
        hasher.update(proofs).update(said[0]).update(said[1]).update(&[direction]);
        RecordSecret::new(*hasher.finalize().as_bytes())
    };
    let secrets = RecordSecrets { from_initiator: secret(0), from_responder: secret(1) };
    Box::new(Sealed::new(conn, protection(), secrets, dialled))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(variables: &[(&str, &str)]) -> Result<Option<SharedKey>, String> {
        let variables: Vec<(String, String)> =
            variables.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
        key_from(|name| {
            variables.iter().find(|(is, _)| is == name).map(|(_, value)| value.clone().into_bytes())
        })
    }

    #[test]
    fn encryption_needs_the_secret_that_all_hosts_share() {
        let secret = (SECRET_VARIABLE, "sixteen bytes or more");
        for off in ["", "0", "off"] {
            assert_eq!(key(&[(VARIABLE, off), secret]), Ok(None));
        }
        let on = key(&[(VARIABLE, "required"), secret]).unwrap();
        assert!(on.is_some());
        assert_eq!(key(&[(VARIABLE, "1"), secret]).unwrap(), on);
        assert_ne!(key(&[(VARIABLE, "1"), (SECRET_VARIABLE, "another secret of hosts")]).unwrap(), on);
        for wrong in [&[(VARIABLE, "required")][..], &[(VARIABLE, "1"), (SECRET_VARIABLE, "short")]] {
            assert!(key(wrong).unwrap_err().contains("needs FERRYWIRE_SECRET"), "{wrong:?}");
        }
        assert!(key(&[(VARIABLE, "yes please"), secret]).unwrap_err().contains("must be required or off"));
    }
}
