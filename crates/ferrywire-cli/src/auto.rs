//! Options whose default is `auto`: one type parses the word `auto` and a value, in flags, environment and TOML file.
//!
//! Invariant: a typed `auto` goes before a value of the environment or the file, as any typed value does.
//! Invariant: there is no `From<String>`, which clap would use in place of `FromStr`, and take `auto` for a value.
//! Read next: `args.rs`, whose options have this type; `plan.rs`, which takes the values out.

use std::ffi::OsString;
use std::fmt::Display;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// The word for the default.
pub const AUTO: &str = "auto";

/// A value, or the word `auto`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OrAuto<T> {
    /// The default, chosen by the program.
    Auto,
    /// The user's value.
    Value(T),
}

/// The value of an option that may be missing or `auto`.
pub trait Given<T> {
    /// The value; `None` for a missing option and for `auto`.
    fn given(self) -> Option<T>;
    /// As [`Given::given`], by reference.
    fn given_ref(&self) -> Option<&T>;
}

impl<T> Given<T> for Option<OrAuto<T>> {
    fn given(self) -> Option<T> {
        match self {
            Some(OrAuto::Value(value)) => Some(value),
            Some(OrAuto::Auto) | None => None,
        }
    }

    fn given_ref(&self) -> Option<&T> {
        match self {
            Some(OrAuto::Value(value)) => Some(value),
            Some(OrAuto::Auto) | None => None,
        }
    }
}

impl<T: FromStr<Err: Display>> FromStr for OrAuto<T> {
    type Err = String;

    fn from_str(text: &str) -> Result<OrAuto<T>, String> {
        match text {
            AUTO => Ok(OrAuto::Auto),
            text => text.parse().map(OrAuto::Value).map_err(|error: T::Err| error.to_string()),
        }
    }
}

impl OrAuto<PathBuf> {
    /// Parses the value of a path option. A path may have any bytes.
    pub fn path(text: OsString) -> OrAuto<PathBuf> {
        if text == AUTO { OrAuto::Auto } else { OrAuto::Value(text.into()) }
    }
}

impl<T: Serialize> Serialize for OrAuto<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            OrAuto::Auto => serializer.serialize_str(AUTO),
            OrAuto::Value(value) => value.serialize(serializer),
        }
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for OrAuto<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<OrAuto<T>, D::Error> {
        match toml::Value::deserialize(deserializer)? {
            toml::Value::String(text) if text == AUTO => Ok(OrAuto::Auto),
            value => {
                T::deserialize(value).map(OrAuto::Value).map_err(|error| de::Error::custom(error.message()))
            }
        }
    }
}
