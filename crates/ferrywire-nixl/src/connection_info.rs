//! The connection information of an agent: the bytes by which remote agents reach it. NIXL carries them.
//!
//! ```text
//!   magic 8 │ identity 16 │ secret: length 1, bytes │ addresses: count 1, each: length 1, text
//! ```
//!
//! Invariant: the bytes are not trusted: if they are not complete and of this version, parsing returns an error.
//! Read next: `remote.rs`, which connects.

use std::net::SocketAddr;

use ferrywire::{Identity, limits};

/// First bytes of connection information; the last of these bytes is the version.
const MAGIC: [u8; 8] = *b"FW-NIXL\x01";
/// The advice for metadata that were damaged on their way.
const LOAD_AGAIN: &str = "get the agent's metadata again, and load all of their bytes";

#[derive(Clone, PartialEq, Eq)]
pub struct ConnectionInfo {
    pub identity: Identity,
    /// The agent's own secret; empty if all agents share one from the environment.
    pub secret: Vec<u8>,
    /// Addresses of the agent: those of NICs first, loopback addresses last.
    pub addresses: Vec<SocketAddr>,
}

impl ConnectionInfo {
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend_from_slice(&self.identity.0);
        put(&mut out, &self.secret);
        out.push(self.addresses.len().min(limits::ADDRESSES_MAX) as u8);
        for address in self.addresses.iter().take(limits::ADDRESSES_MAX) {
            put(&mut out, address.to_string().as_bytes());
        }
        out
    }

    /// Parses connection information.
    ///
    /// # Errors
    /// A message that says what is wrong with the bytes and what to do.
    pub fn from_bytes(bytes: &[u8]) -> Result<ConnectionInfo, String> {
        let (magic, version) = (&MAGIC[..7], MAGIC[7]);
        if !bytes.starts_with(magic) {
            return Err(
                "another backend made the metadata: use ferrywire on both ends (`ferrywire nixl status` \
                        shows the backend of a host)"
                    .into(),
            );
        }
        match bytes.get(7) {
            Some(&theirs) if theirs != version => {
                return Err(format!(
                    "the metadata has version {theirs}, this agent's {version}: use the same ferrywire on both ends"
                ));
            }
            _ => {}
        }
        let cut = || format!("the metadata is truncated to {} bytes: {LOAD_AGAIN}", bytes.len());
        let mut rest = &bytes[8.min(bytes.len())..];
        let identity: [u8; 16] =
            take(&mut rest, 16).and_then(|bytes| bytes.try_into().ok()).ok_or_else(cut)?;
        let secret = take_counted(&mut rest).ok_or_else(cut)?.to_vec();
        if !secret.is_empty() && secret.len() < limits::SECRET_BYTES_MIN {
            return Err(format!(
                "the secret in the metadata has {} bytes, fewer than {}: {LOAD_AGAIN}",
                secret.len(),
                limits::SECRET_BYTES_MIN
            ));
        }
        let count = take(&mut rest, 1).ok_or_else(cut)?[0];
        let mut addresses = Vec::new();
        for _ in 0..count.min(limits::ADDRESSES_MAX as u8) {
            let text = take_counted(&mut rest).ok_or_else(cut)?;
            let address = std::str::from_utf8(text).ok().and_then(|text| text.parse().ok());
            addresses.push(address.ok_or_else(|| {
                let text = text.escape_ascii();
                format!("an address in the metadata cannot be parsed ({text}): {LOAD_AGAIN}")
            })?);
        }
        if addresses.is_empty() {
            return Err(format!("the metadata has no address: {LOAD_AGAIN}"));
        }
        Ok(ConnectionInfo { identity: Identity(identity), secret, addresses })
    }
}

fn put(out: &mut Vec<u8>, bytes: &[u8]) {
    out.push(u8::try_from(bytes.len()).unwrap_or(u8::MAX));
    out.extend_from_slice(&bytes[..bytes.len().min(usize::from(u8::MAX))]);
}

fn take<'a>(rest: &mut &'a [u8], count: usize) -> Option<&'a [u8]> {
    let (taken, left) = rest.split_at_checked(count)?;
    *rest = left;
    Some(taken)
}

fn take_counted<'a>(rest: &mut &'a [u8]) -> Option<&'a [u8]> {
    let count = take(rest, 1)?[0];
    take(rest, count.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info() -> ConnectionInfo {
        let addresses = ["10.1.2.3:4567", "[fd00::1]:4567", "127.0.0.1:4567"];
        ConnectionInfo {
            identity: Identity([7; 16]),
            secret: vec![9; 32],
            addresses: addresses.map(|text| text.parse().unwrap()).to_vec(),
        }
    }

    #[test]
    fn what_was_written_is_read() {
        let secretless = ConnectionInfo { secret: Vec::new(), ..info() };
        for info in [info(), secretless] {
            assert!(ConnectionInfo::from_bytes(&info.to_bytes()) == Ok(info));
        }
    }

    #[test]
    fn bytes_of_others_are_refused_with_a_reason() {
        let whole = info().to_bytes();
        for end in 0..whole.len() {
            assert!(ConnectionInfo::from_bytes(&whole[..end]).is_err(), "{end} bytes");
        }
        let said = |bytes: &[u8]| ConnectionInfo::from_bytes(bytes).err().unwrap();
        assert!(said(b"a worker address of UCX").contains("another backend"));
        let mut newer = whole.clone();
        newer[7] = 2;
        assert!(said(&newer).contains("version 2"));
        let mut lies = whole.clone();
        let at = whole.len() - 14;
        lies[at] = b'x';
        assert!(said(&lies).contains("cannot be parsed"));
    }
}
