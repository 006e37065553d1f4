//! Modes of gathering scattered receives, with the names that users see.

use crate::error::Error;
use std::fmt;
use std::str::FromStr;

/// Mode of gathering scattered receives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum UnpackMode {
    /// One kernel for all fragments of the receives that have arrived.
    #[default]
    Kernel,
    /// One copy in the GPU's queue per fragment, many of them in one call, to compare with the kernel.
    Copy,
    /// Copy to the host, gather there, copy back: to verify the other modes.
    Host,
    /// No gathering, to measure the cost of gathering. The bytes never reach their destination.
    None,
}

impl UnpackMode {
    /// All modes of gathering.
    pub const ALL: [UnpackMode; 4] =
        [UnpackMode::Kernel, UnpackMode::Copy, UnpackMode::Host, UnpackMode::None];

    /// Whether the bytes of a receive arrive, and can be verified. A result of another mode must say so.
    pub fn verifiable(self) -> bool {
        self != UnpackMode::None
    }

    /// Name of the mode, as an argument of `--unpack`.
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
            Error::invalid("unpack mode", format!("must be kernel, copy, host or none (got {text:?})"))
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
            assert!(error.contains("must be kernel, copy, host or none"), "{error}");
        }
    }
}
