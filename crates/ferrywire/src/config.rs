//! The configuration of an endpoint, with defaults applied.

use crate::error::{Error, Result};
use ferrywire_net::{ConnOptions, Nic};
use ferrywire_proto::handshake::check_label;
use ferrywire_proto::limits;
use ferrywire_proto::protection::{Encryption, ProtectionWish};
use std::net::SocketAddr;
use std::time::Duration;
use zeroize::Zeroizing;

/// Configuration of an endpoint. `None` and empty values are chosen when the endpoint is built or when a peer
/// connects.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Config {
    /// Address to listen on; `None` for an endpoint that only connects.
    pub listen: Option<SocketAddr>,
    /// Label that peers, messages and logs show.
    pub label: String,
    /// Names of the NICs to use. If empty: all NICs that share a subnet with the peer, else the NIC of the route.
    pub nics: Vec<String>,
    /// Most channels per peer; `None` chooses by cores, NICs and the round trip.
    pub channels: Option<usize>,
    /// Number of progress threads. With 0, callers poll everything.
    pub threads: usize,
    /// Largest chunk in bytes.
    pub chunk_bytes: usize,
    /// Most frames in flight per channel.
    pub window: usize,
    /// Whether chunks carry a CRC-32; they also do if the peer asks for it.
    pub crc: bool,
    /// Whether data connections are encrypted.
    pub encryption: Encryption,
    /// Whether data connections that are not encrypted are authenticated.
    pub keyed_checksum: bool,
    /// Congestion control by name; `None` chooses by path.
    pub congestion_control: Option<String>,
    /// Socket buffers in bytes; `None` chooses by path.
    pub socket_buffer_bytes: Option<usize>,
    /// Time within which the loss of a silent peer is reported.
    pub peer_timeout: Duration,
    /// The largest chunk in bytes that the user has set; `None` for the default, which caps no proposal of a peer.
    pub(crate) chunk_bytes_set: Option<usize>,
    /// Size in bytes of a core's level 2 cache; `None` if it is not known.
    pub(crate) level_2_cache_bytes: Option<u64>,
    /// The shared secrets at the start. Never logged or printed.
    pub(crate) secrets: Secrets,
}

/// A secret. `Debug` does not print it, and it is overwritten when it is dropped.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Secret(pub Zeroizing<Vec<u8>>);

/// The secrets of an endpoint, which may change while it runs.
#[derive(Clone, Debug, Default)]
pub(crate) struct Secrets {
    /// The secret to connect with.
    pub current: Option<Secret>,
    /// A second secret with which peers are accepted, if any.
    pub also_accepted: Option<Secret>,
}

impl Secrets {
    /// Checks the length of each.
    ///
    /// # Errors
    /// [`Error::Invalid`] if one is shorter than `SECRET_BYTES_MIN`.
    pub fn check(&self) -> Result<()> {
        self.current.iter().chain(&self.also_accepted).try_for_each(Secret::check)
    }
}

impl Secret {
    pub fn new(secret: impl Into<Vec<u8>>) -> Secret {
        Secret(Zeroizing::new(secret.into()))
    }

    /// Checks the length of the secret.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the secret is shorter than `SECRET_BYTES_MIN`.
    pub fn check(&self) -> Result<()> {
        let least = limits::SECRET_BYTES_MIN;
        if self.0.len() >= least {
            Ok(())
        } else {
            Err(Error::invalid("secret", format!("must be at least {least} bytes long")))
        }
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("set")
    }
}

impl Default for Config {
    fn default() -> Config {
        Config {
            listen: None,
            label: String::new(),
            nics: Vec::new(),
            channels: None,
            threads: usize::MAX,
            chunk_bytes: limits::CHUNK_BYTES_DEFAULT,
            window: limits::WINDOW_FRAMES_MAX,
            crc: false,
            encryption: Encryption::Off,
            keyed_checksum: false,
            congestion_control: None,
            socket_buffer_bytes: None,
            peer_timeout: limits::PEER_TIMEOUT_DEFAULT,
            chunk_bytes_set: None,
            level_2_cache_bytes: None,
            secrets: Secrets::default(),
        }
    }
}

impl Config {
    /// Names of the NICs that channels may use: those configured, else the one listened on, else all.
    pub fn chosen_nics(&self, nics: &[Nic]) -> Vec<String> {
        let fits = |nic: &&Nic| match self.listen.map(|address| address.ip()) {
            _ if !self.nics.is_empty() => self.nics.contains(&nic.name),
            // The loopback interface has all addresses of 127.0.0.0/8, and lists 127.0.0.1 alone.
            Some(address) if address.is_loopback() => nic.loopback && nic.reaches(address),
            Some(address) if !address.is_unspecified() => nic.address == address,
            Some(_) => nic.up && !nic.loopback,
            // An endpoint that does not listen may connect anywhere, including this host.
            None => nic.up,
        };
        let mut names: Vec<String> = nics.iter().filter(fits).map(|nic| nic.name.clone()).collect();
        names.sort();
        names.dedup();
        names
    }

    /// The protection of data connections that this endpoint is configured for.
    pub(crate) fn wish(&self) -> ProtectionWish {
        ProtectionWish::of_this_host(self.encryption, self.keyed_checksum)
    }

    /// The setting that requires protected data connections, if one does.
    pub(crate) fn protection_required(&self) -> Option<&'static str> {
        match self.encryption {
            Encryption::Required => Some("encryption"),
            _ => self.keyed_checksum.then_some("keyed checksum"),
        }
    }

    /// Options of data connections.
    pub(crate) fn bulk_options(&self) -> ConnOptions {
        ConnOptions {
            bulk: true,
            congestion_control: self.congestion_control.clone(),
            socket_buffer_bytes: self.socket_buffer_bytes,
            ..ConnOptions::default()
        }
    }

    /// Checks all values.
    ///
    /// # Errors
    /// [`Error::Invalid`] for the first value that is out of range, or a missing secret.
    pub(crate) fn check(&self) -> Result<()> {
        let within = |what: &str, value: usize, min: usize, max: usize| {
            if (min..=max).contains(&value) {
                Ok(())
            } else {
                Err(Error::invalid(what, format!("{value} is not between {min} and {max}")))
            }
        };
        within("channels", self.channels.unwrap_or(1), 1, limits::CHANNELS_MAX)?;
        within("threads", self.threads, 0, limits::WORKERS_MAX)?;
        within("chunk bytes", self.chunk_bytes, 4096, limits::CHUNK_BYTES_MAX)?;
        within("window", self.window, 1, limits::WINDOW_FRAMES_MAX)?;
        // The kernel takes half of an i32, and doubles it.
        within("socket buffer bytes", self.socket_buffer_bytes.unwrap_or(1), 1, i32::MAX as usize / 2)?;
        // An endpoint that cannot send its label refuses every peer.
        check_label(&self.label).map_err(|why| Error::invalid("label", why))?;
        if self.peer_timeout < 2 * limits::CONTROL_SUSPECT_AFTER {
            let least = 2 * limits::CONTROL_SUSPECT_AFTER;
            return Err(Error::invalid("peer timeout", format!("must be at least {least:?}")));
        }
        let needs_secret = self.listen.is_some_and(|address| !address.ip().is_loopback());
        match &self.secrets {
            Secrets { current: None, also_accepted: Some(_) } => {
                Err(Error::invalid("secret", "needed if another one is also accepted"))
            }
            Secrets { current: None, .. } if needs_secret => Err(Error::invalid(
                "secret",
                "needed to listen beyond loopback: give both ends the same secret",
            )),
            secrets => secrets.check(),
        }
    }
}
