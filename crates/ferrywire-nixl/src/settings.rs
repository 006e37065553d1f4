//! The settings of the backend: NIXL's parameters, all optional.
//!
//! Invariant: every default is a valid value, because programs pass the defaults that they have read back to the
//! backend.

use std::ffi::OsString;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::ffi::OsStringExt;
use std::time::Duration;

use ferrywire::Encryption;

/// Name and default of each parameter.
pub const OPTIONS: [(&str, &str); 6] = [
    // Parameter `listen`: address to listen on; every NIC by default.
    ("listen", ""),
    // Parameter `port`: port to listen on; 0 lets the kernel choose.
    ("port", "0"),
    // Parameter `nics`: NICs to use, separated by commas; all by default.
    ("nics", ""),
    // Parameter `threads`: number of progress threads; chosen from the number of cores by default.
    ("threads", ""),
    // Parameter `connect_timeout`: seconds after which a remote agent that does not answer is given up.
    ("connect_timeout", "10"),
    // Parameter `encryption`: whether data connections are encrypted: off, preferred or required; FERRYWIRE_ENCRYPT
    // by default.
    ("encryption", ""),
];

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    pub listen: Option<IpAddr>,
    pub port: u16,
    pub nics: Vec<String>,
    pub threads: Option<usize>,
    pub connect_timeout: Duration,
    pub encryption: Encryption,
    /// The shared secret from the environment, if there is one.
    pub secret: Option<Vec<u8>>,
}

impl Settings {
    /// Parses the parameters; also returns the names of unknown parameters.
    ///
    /// # Errors
    /// One line that names a parameter, or a variable of the environment, with an invalid value.
    pub fn new(
        parameters: &[(String, String)],
        environment: impl Fn(&str) -> Option<OsString>,
    ) -> Result<(Settings, Vec<String>), String> {
        let of_environment = |name: &str| {
            let value = environment(name).map(OsString::into_vec);
            value.filter(|value| !value.trim_ascii().is_empty())
        };
        let text = |name: &str| {
            let value = of_environment(name).map(String::from_utf8).transpose();
            value.map_err(|_| format!("{name} must be UTF-8"))
        };
        let nics = |text: &str| {
            text.split(',')
                .map(str::trim)
                .filter(|name| !name.is_empty())
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        let encryption = |name: &str, value: &str| {
            Encryption::from_name(value)
                .ok_or_else(|| format!("{name} must be off, preferred or required (got {value:?})"))
        };
        let mut settings = Settings {
            listen: None,
            port: 0,
            nics: Vec::new(),
            threads: None,
            connect_timeout: Duration::from_secs(10),
            encryption: text("FERRYWIRE_ENCRYPT")?
                .map_or(Ok(Encryption::Off), |value| encryption("FERRYWIRE_ENCRYPT", value.trim()))?,
            secret: of_environment("FERRYWIRE_SECRET"),
        };
        let mut unknown = Vec::new();
        if !parameters.iter().any(|(name, value)| name == "nics" && !value.trim().is_empty()) {
            settings.nics = nics(&text("FERRYWIRE_NICS")?.unwrap_or_default());
        }
        for (name, value) in parameters {
            let value = value.trim();
            let wrong = |what: &str| format!("parameter {name} must be {what} (got {value:?})");
            match name.as_str() {
                "listen" if !value.is_empty() => {
                    settings.listen = Some(value.parse().map_err(|_| wrong("an IP address"))?);
                }
                "port" if !value.is_empty() => {
                    settings.port = value.parse().map_err(|_| wrong("a port number"))?
                }
                "nics" if !value.is_empty() => settings.nics = nics(value),
                "threads" if !value.is_empty() => {
                    let threads = value
                        .parse()
                        .ok()
                        .filter(|count| (1..=ferrywire::limits::WORKERS_MAX).contains(count));
                    settings.threads = Some(threads.ok_or_else(|| wrong("a number from 1 to 64"))?);
                }
                "connect_timeout" if !value.is_empty() => {
                    let seconds = value.parse().ok().filter(|seconds| (0.1..=3600.0).contains(seconds));
                    let seconds: f64 =
                        seconds.ok_or_else(|| wrong("a number of seconds from 0.1 to 3600"))?;
                    settings.connect_timeout = Duration::from_secs_f64(seconds);
                }
                "encryption" if !value.is_empty() => {
                    settings.encryption = encryption("parameter encryption", value)?;
                }
                known if OPTIONS.iter().any(|(name, _)| *name == known) => {}
                _ => unknown.push(name.clone()),
            }
        }
        unknown.sort_unstable();
        Ok((settings, unknown))
    }

    /// Addresses to listen on, first choice first.
    pub fn listen_addresses(&self) -> Vec<SocketAddr> {
        let any: [IpAddr; 2] =
            [std::net::Ipv6Addr::UNSPECIFIED.into(), std::net::Ipv4Addr::UNSPECIFIED.into()];
        let addresses = self.listen.map_or(any.to_vec(), |address| vec![address]);
        addresses.into_iter().map(|address| SocketAddr::new(address, self.port)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(parameters: &[(&str, &str)]) -> Result<(Settings, Vec<String>), String> {
        let owned: Vec<_> =
            parameters.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
        Settings::new(&owned, |_| None)
    }

    #[test]
    fn the_defaults_are_valid_and_change_nothing() {
        assert_eq!(given(&OPTIONS).unwrap(), given(&[]).unwrap());
    }

    #[test]
    fn parameters_of_other_backends_are_tolerated_and_named() {
        let (settings, unknown) =
            given(&[("num_threads", "8"), ("device_list", "all"), ("nics", "eth1, eth2")]).unwrap();
        assert_eq!(
            (settings.nics, unknown),
            (vec!["eth1".into(), "eth2".into()], vec!["device_list".into(), "num_threads".into()])
        );
    }

    #[test]
    fn a_value_that_cannot_be_used_is_named() {
        for (name, value) in [
            ("port", "70000"),
            ("listen", "eth0"),
            ("threads", "0"),
            ("connect_timeout", "-1"),
            ("encryption", "on"),
        ] {
            let error = given(&[(name, value)]).unwrap_err();
            assert!(error.contains(name) && error.contains(value), "{error}");
        }
    }

    #[test]
    fn the_environment_gives_nics_and_secret() {
        let environment = |name: &str| match name {
            "FERRYWIRE_NICS" => Some("eth5".into()),
            "FERRYWIRE_SECRET" => Some("shared by all".into()),
            _ => None,
        };
        let (settings, _) = Settings::new(&[], environment).unwrap();
        assert_eq!(
            (settings.nics, settings.secret),
            (vec!["eth5".to_owned()], Some(b"shared by all".to_vec()))
        );
    }

    #[test]
    fn a_secret_may_be_any_bytes_and_other_variables_must_be_text() {
        let given = |variable: &'static str| {
            Settings::new(&[], move |name| {
                (name == variable).then(|| OsString::from_vec(b"\xff of 16 bytes\xfe".to_vec()))
            })
        };
        assert_eq!(given("FERRYWIRE_SECRET").unwrap().0.secret, Some(b"\xff of 16 bytes\xfe".to_vec()));
        for variable in ["FERRYWIRE_NICS", "FERRYWIRE_ENCRYPT"] {
            assert_eq!(given(variable).unwrap_err(), format!("{variable} must be UTF-8"));
        }
    }
}
