//! Versions of the ncclNet interface.

use std::ffi::CStr;
use std::fmt;
use std::str::FromStr;

/// A version of the ncclNet interface that this crate knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs)]
pub enum Version {
    V4 = 4,
    V5 = 5,
    V6 = 6,
    V7 = 7,
    V8 = 8,
    V9 = 9,
    V10 = 10,
    V11 = 11,
    V12 = 12,
}

impl Version {
    /// Every version of the interface, newest first: the order in which a library is searched for them.
    pub const NEWEST_FIRST: [Version; 9] = [
        Version::V12,
        Version::V11,
        Version::V10,
        Version::V9,
        Version::V8,
        Version::V7,
        Version::V6,
        Version::V5,
        Version::V4,
    ];

    /// The version's number, 4 to 12.
    pub const fn number(self) -> u32 {
        self as u32
    }

    /// The symbol under which a library exports the table of this version.
    pub const fn symbol(self) -> &'static CStr {
        match self {
            Version::V4 => c"ncclNetPlugin_v4",
            Version::V5 => c"ncclNetPlugin_v5",
            Version::V6 => c"ncclNetPlugin_v6",
            Version::V7 => c"ncclNetPlugin_v7",
            Version::V8 => c"ncclNetPlugin_v8",
            Version::V9 => c"ncclNetPlugin_v9",
            Version::V10 => c"ncclNetPlugin_v10",
            Version::V11 => c"ncclNetPlugin_v11",
            Version::V12 => c"ncclNetPlugin_v12",
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "v{}", self.number())
    }
}

impl FromStr for Version {
    type Err = String;

    /// Parses a version of the interface, `v7` or `7`; returns an error text for any other.
    fn from_str(text: &str) -> Result<Version, String> {
        let number = text.strip_prefix('v').unwrap_or(text);
        let known = Version::NEWEST_FIRST.into_iter().find(|version| version.number().to_string() == number);
        known.ok_or_else(|| format!("{text:?} is not a version of the ncclNet interface; expected v4 to v12"))
    }
}

#[cfg(test)]
mod tests {
    use super::Version;

    #[test]
    fn a_version_reads_as_it_prints() {
        for version in Version::NEWEST_FIRST {
            assert_eq!(version.to_string().parse(), Ok(version));
            assert_eq!(version.number().to_string().parse(), Ok(version));
            let symbol = format!("ncclNetPlugin_{version}");
            assert_eq!(version.symbol().to_str(), Ok(symbol.as_str()));
        }
        assert!(Version::NEWEST_FIRST.is_sorted_by(|newer, older| newer > older));
        for wrong in ["", "v", "v3", "v13", "07", "vv7", "v7 ", "seven"] {
            assert!(wrong.parse::<Version>().is_err(), "{wrong:?}");
        }
    }
}
