//! How scattered receives are gathered, as users name it.

use crate::error::Error;
use std::fmt;
use std::str::FromStr;

/// How scattered receives are gathered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum UnpackMode {
    /// One kernel for all fragments of the receives that have arrived.
    #[default]
    Kernel,
    /// A copy in the GPU's queue for each fragment, many of them in one call: for comparison.
    Copy,
    /// Down to the host, gathered there, up again: for checking the others.
    Host,
    /// Not at all: for measuring what gathering costs. The bytes never reach their place.
    None,
}

impl UnpackMode {
    /// All of them.
    pub const ALL: [UnpackMode; 4] =
        [UnpackMode::Kernel, UnpackMode::Copy, UnpackMode::Host, UnpackMode::None];

    /// Whether the bytes arrive, so that they can be verified. A result without that has to say so.
    pub fn verifiable(self) -> bool {
        self != UnpackMode::None
    }

    /// Its name, as `--unpack` takes it.
    pub fn name(self) -> &'static str {
        match self {
            UnpackMode::Kernel => "kernel",
            UnpackMode::Copy => "copy",
            UnpackMode::Host => "host",
            UnpackMode::None => "none",
        }
    }
}

impl fmt::Display for UnpackMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for UnpackMode {
    type Err = Error;

    fn from_str(text: &str) -> Result<UnpackMode, Error> {
        let named = UnpackMode::ALL.into_iter().find(|mode| mode.name() == text);
        named.ok_or_else(|| {
            Error::invalid("unpack mode", format!("{text:?} is none of kernel, copy, host, none"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_read_as_they_are_written() {
        let names = UnpackMode::ALL.map(|mode| mode.to_string());
        assert_eq!(names, ["kernel", "copy", "host", "none"]);
        assert_eq!(names.each_ref().map(|name| name.parse::<UnpackMode>().unwrap()), UnpackMode::ALL);
        assert_eq!(UnpackMode::ALL.map(UnpackMode::verifiable), [true, true, true, false]);
        for wrong in ["", "Kernel", "kernel ", "d2d"] {
            let error = wrong.parse::<UnpackMode>().unwrap_err().to_string();
            assert!(error.ends_with("is none of kernel, copy, host, none"), "{error}");
        }
    }
}
