//! What two ends agree on about the protection of a session's data connections.
//!
//! Each end sends its [`ProtectionWish`] under the handshake's encryption, and both compute the
//! [`Protection`] from the two wishes with [`ProtectionWish::settle`]. So neither end gets less protection
//! than it requires: an attacker on the path can change neither wish.
//! Invariant: with [`Encryption::Required`] at either end a session is encrypted, or refused.
//! Read next: `record.rs`, the format of a protected connection.

use std::fmt;

/// Whether an endpoint encrypts what it sends over data connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Encryption {
    /// Never encrypt. A peer that requires encryption is refused.
    #[default]
    Off,
    /// Encrypt if the peer prefers or requires encryption too.
    Preferred,
    /// Always encrypt. A peer with encryption off is refused.
    Required,
}

impl Encryption {
    /// The name in options and reports: `off`, `preferred` or `required`.
    pub fn name(self) -> &'static str {
        match self {
            Encryption::Off => "off",
            Encryption::Preferred => "preferred",
            Encryption::Required => "required",
        }
    }

    /// The value with this [`name`](Encryption::name); `None` for any other text.
    pub fn from_name(name: &str) -> Option<Encryption> {
        [Encryption::Off, Encryption::Preferred, Encryption::Required]
            .into_iter()
            .find(|value| value.name() == name)
    }
}

impl fmt::Display for Encryption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What one end wants for the protection of a session's data connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProtectionWish {
    /// Whether this end encrypts its data connections.
    pub encryption: Encryption,
    /// Whether a session that is not encrypted is to be authenticated. One end's wish is enough.
    pub keyed_checksum: bool,
    /// Whether this end's CPU has instructions for AES.
    pub fast_aes: bool,
}

/// How the data connections of a session are protected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Protection {
    /// Whether the bytes are encrypted; else they are only authenticated.
    pub encrypted: bool,
    /// The algorithm that protects the records.
    pub algorithm: Algorithm,
}

/// An algorithm for authenticated encryption.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// AES-256-GCM, where both CPUs have instructions for it.
    Aes256Gcm,
    /// ChaCha20-Poly1305, where a CPU has no instructions for AES.
    ChaCha20Poly1305,
}

/// One end requires encryption, and the other has it off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the end that {} requires encryption, the other has it off: set the same at both ends", if *.initiator_requires { "connects" } else { "listens" })]
pub struct Conflict {
    /// Whether the connecting end is the one that requires encryption; else it is the listening end.
    pub initiator_requires: bool,
}

impl ProtectionWish {
    /// The wish of an end that wants no protection, on a CPU without AES.
    pub const NONE: ProtectionWish =
        ProtectionWish { encryption: Encryption::Off, keyed_checksum: false, fast_aes: false };

    /// This end's wish, with what its CPU can do.
    pub fn of_this_host(encryption: Encryption, keyed_checksum: bool) -> ProtectionWish {
        ProtectionWish { encryption, keyed_checksum, fast_aes: has_fast_aes() }
    }

    /// The protection of a session between two ends, or `None` for a session in clear.
    ///
    /// # Errors
    /// [`Conflict`] if one end requires encryption and the other has it off.
    pub fn settle(
        initiator: ProtectionWish,
        responder: ProtectionWish,
    ) -> Result<Option<Protection>, Conflict> {
        let wishes = (initiator.encryption, responder.encryption);
        let encrypted = match wishes {
            (Encryption::Required, Encryption::Off) => return Err(Conflict { initiator_requires: true }),
            (Encryption::Off, Encryption::Required) => return Err(Conflict { initiator_requires: false }),
            (Encryption::Off, _) | (_, Encryption::Off) => false,
            _ => true,
        };
        let algorithm = if initiator.fast_aes && responder.fast_aes {
            Algorithm::Aes256Gcm
        } else {
            Algorithm::ChaCha20Poly1305
        };
        let protected = encrypted || initiator.keyed_checksum || responder.keyed_checksum;
        Ok(protected.then_some(Protection { encrypted, algorithm }))
    }

    /// The wish as one byte of a configuration.
    pub(crate) fn to_byte(self) -> u8 {
        let encryption = match self.encryption {
            Encryption::Off => 0,
            Encryption::Preferred => 1,
            Encryption::Required => 2,
        };
        encryption | (u8::from(self.keyed_checksum) << 2) | (u8::from(self.fast_aes) << 3)
    }

    /// The wish that `byte` encodes; `None` for a byte that encodes none.
    pub(crate) fn from_byte(byte: u8) -> Option<ProtectionWish> {
        let encryption = match byte & 3 {
            0 => Encryption::Off,
            1 => Encryption::Preferred,
            2 => Encryption::Required,
            _ => return None,
        };
        let (keyed_checksum, fast_aes) = (byte & 4 != 0, byte & 8 != 0);
        (byte < 16).then_some(ProtectionWish { encryption, keyed_checksum, fast_aes })
    }
}

impl Protection {
    /// The protection for reports, for example `aes-256-gcm` or `aes-256-gmac`.
    pub fn name(self) -> &'static str {
        match (self.encrypted, self.algorithm) {
            (true, Algorithm::Aes256Gcm) => "aes-256-gcm",
            (true, Algorithm::ChaCha20Poly1305) => "chacha20-poly1305",
            (false, Algorithm::Aes256Gcm) => "aes-256-gmac",
            (false, Algorithm::ChaCha20Poly1305) => "poly1305",
        }
    }
}

impl fmt::Display for Protection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Whether this host's CPU has instructions for AES and for its authentication.
fn has_fast_aes() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("aes") && std::arch::is_x86_feature_detected!("pclmulqdq");
    #[cfg(target_arch = "aarch64")]
    return std::arch::is_aarch64_feature_detected!("aes")
        && std::arch::is_aarch64_feature_detected!("pmull");
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Encryption; 3] = [Encryption::Off, Encryption::Preferred, Encryption::Required];

    fn wish(encryption: Encryption, keyed_checksum: bool, fast_aes: bool) -> ProtectionWish {
        ProtectionWish { encryption, keyed_checksum, fast_aes }
    }

    #[test]
    fn a_session_is_encrypted_or_refused_where_one_end_requires_it() {
        for (a, b) in ALL.into_iter().flat_map(|a| ALL.map(|b| (a, b))) {
            for (mac_a, mac_b) in [(false, false), (true, false), (false, true)] {
                let settled = ProtectionWish::settle(wish(a, mac_a, true), wish(b, mac_b, true));
                let required = a == Encryption::Required || b == Encryption::Required;
                let off = a == Encryption::Off || b == Encryption::Off;
                match settled {
                    Err(Conflict { initiator_requires }) => {
                        assert!(required && off, "{a} and {b}");
                        assert_eq!(initiator_requires, a == Encryption::Required);
                    }
                    Ok(Some(Protection { encrypted: true, .. })) => assert!(!off, "{a} and {b}"),
                    Ok(Some(_)) => assert!(off && !required && (mac_a || mac_b), "{a} and {b}"),
                    Ok(None) => assert!(off && !required && !mac_a && !mac_b, "{a} and {b}"),
                }
            }
        }
    }

    #[test]
    fn aes_is_used_only_where_both_ends_have_instructions_for_it() {
        for (a, b) in [(true, true), (true, false), (false, true), (false, false)] {
            let settled = ProtectionWish::settle(
                wish(Encryption::Preferred, false, a),
                wish(Encryption::Required, false, b),
            );
            let aes = settled.unwrap().unwrap().algorithm == Algorithm::Aes256Gcm;
            assert_eq!(aes, a && b);
        }
    }

    #[test]
    fn a_wish_is_read_back_from_its_byte() {
        let known: Vec<u8> =
            (0..=u8::MAX).filter(|byte| ProtectionWish::from_byte(*byte).is_some()).collect();
        assert_eq!(known, [0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14]);
        for byte in known {
            assert_eq!(ProtectionWish::from_byte(byte).unwrap().to_byte(), byte);
        }
        for each in ALL {
            assert_eq!(Encryption::from_name(each.name()), Some(each));
        }
        assert_eq!(Encryption::from_name("on"), None);
    }
}
