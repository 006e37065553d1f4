//! Sizes, sets of GPUs and lists of names, as they are typed and printed.
//!
//! Sizes use powers of 1024 (`4K`, `64M`, `1G`); rates are decimal, see `bench::report`.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Largest size that can be requested, so that a typing error is refused before memory is allocated.
pub const SIZE_BYTES_MAX: u64 = 1 << 40;
/// Number of GPUs of a host that can be named.
const GPUS_MAX: u32 = ferrywire::limits::CUDA_GPUS_MAX as u32;
/// Most sizes of one run.
pub const SIZES_MAX: usize = 64;

/// A number of bytes: `4096`, `4K`, `64M`, `1G`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

impl FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Bytes, String> {
        let text = text.trim();
        let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let shift = match text[digits.len()..].to_ascii_uppercase().as_str() {
            "" | "B" => 0,
            "K" | "KB" | "KIB" => 10,
            "M" | "MB" | "MIB" => 20,
            "G" | "GB" | "GIB" => 30,
            other => return Err(format!("unit must be K, M or G, powers of 1024 (got '{other}')")),
        };
        let count: u64 =
            digits.parse().map_err(|_| format!("not a size (got '{text}'): write 4096, 4K or 64M"))?;
        let bytes = count.checked_mul(1 << shift).filter(|bytes| *bytes <= SIZE_BYTES_MAX);
        bytes.map(Bytes).ok_or_else(|| format!("must be at most {} (got '{text}')", Bytes(SIZE_BYTES_MAX)))
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0;
        for (shift, unit) in [(30, "G"), (20, "M"), (10, "K")] {
            if bytes >= 1 << shift && bytes.is_multiple_of(1 << shift) {
                return write!(out, "{}{unit}", bytes >> shift);
            }
        }
        write!(out, "{bytes}")
    }
}

/// Message sizes: a list `64K,1M` or a range by powers of two `4K..256M`, or a mixture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sizes(pub Vec<u64>);

impl FromStr for Sizes {
    type Err = String;

    fn from_str(text: &str) -> Result<Sizes, String> {
        let mut sizes = Vec::new();
        for part in text.split(',').filter(|part| !part.trim().is_empty()) {
            match part.split_once("..") {
                None => sizes.push(part.parse::<Bytes>()?.0),
                Some((first, last)) => push_range(&mut sizes, first.parse()?, last.parse()?)?,
            }
        }
        match sizes.len() {
            0 => Err("no size: write 64K,1M or 4K..256M".to_owned()),
            1..=SIZES_MAX => Ok(Sizes(sizes)),
            n => Err(format!("must be at most {SIZES_MAX} sizes (got {n})")),
        }
    }
}

fn push_range(sizes: &mut Vec<u64>, first: Bytes, last: Bytes) -> Result<(), String> {
    if first > last {
        return Err(format!("the range {first}..{last} is empty: write the smaller size first"));
    }
    if first.0 == 0 {
        return Err("a range by powers of two cannot start at 0: write 0,1..4K".to_owned());
    }
    let powers = std::iter::successors(Some(first.0), |size| size.checked_mul(2));
    sizes.extend(powers.take_while(|size| *size <= last.0));
    Ok(())
}

impl fmt::Display for Sizes {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let texts: Vec<String> = self.0.iter().map(|size| Bytes(*size).to_string()).collect();
        out.write_str(&texts.join(","))
    }
}

/// A TOML value for a size.
#[derive(Deserialize)]
#[serde(untagged)]
enum Written {
    Number(u64),
    Text(String),
    List(Vec<Written>),
}

impl Written {
    fn text(&self) -> String {
        match self {
            Written::Number(n) => n.to_string(),
            Written::Text(text) => text.clone(),
            Written::List(items) => items.iter().map(Written::text).collect::<Vec<_>>().join(","),
        }
    }
}

impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.0)
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Bytes, D::Error> {
        Written::deserialize(deserializer)?.text().parse().map_err(serde::de::Error::custom)
    }
}

impl Serialize for Sizes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Sizes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Sizes, D::Error> {
        Written::deserialize(deserializer)?.text().parse().map_err(serde::de::Error::custom)
    }
}

/// Indices of GPUs, as a list or ranges: `0-7`, `0,2,4-6`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpus(pub Vec<u32>);

impl FromStr for Gpus {
    type Err = String;

    fn from_str(text: &str) -> Result<Gpus, String> {
        let mut gpus = Vec::new();
        for part in text.split(',').map(str::trim) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let number = |text: &str| text.trim().parse::<u32>().ok().filter(|gpu| *gpu < GPUS_MAX);
            let (Some(first), Some(last)) = (number(first), number(last)) else {
                return Err(format!(
                    "not a GPU number from 0 to {} (got '{part}'): write 0-7 or 0,2",
                    GPUS_MAX - 1
                ));
            };
            if first > last {
                return Err(format!("the range {first}-{last} is empty: write the smaller number first"));
            }
            gpus.extend(first..=last);
        }
        match gpus.iter().enumerate().find(|(at, gpu)| gpus[..*at].contains(gpu)) {
            Some((_, gpu)) => Err(format!("GPU {gpu} is named twice: name it once")),
            None => Ok(Gpus(gpus)),
        }
    }
}

impl Serialize for Gpus {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let texts: Vec<String> = self.0.iter().map(u32::to_string).collect();
        serializer.serialize_str(&texts.join(","))
    }
}

impl<'de> Deserialize<'de> for Gpus {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Gpus, D::Error> {
        Written::deserialize(deserializer)?.text().parse().map_err(serde::de::Error::custom)
    }
}

/// Names separated by commas: `eth1,eth2`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Names(pub Vec<String>);

impl FromStr for Names {
    type Err = String;

    fn from_str(text: &str) -> Result<Names, String> {
        let names: Vec<String> = text.split(',').map(|name| name.trim().to_owned()).collect();
        if names.iter().any(String::is_empty) {
            return Err("an empty name in the list: write eth1,eth2".to_owned());
        }
        Ok(Names(names))
    }
}

impl Serialize for Names {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0.join(","))
    }
}

impl<'de> Deserialize<'de> for Names {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Names, D::Error> {
        Written::deserialize(deserializer)?.text().parse().map_err(serde::de::Error::custom)
    }
}

/// A duration rounded for messages: `30s`, not `29.99999996s`.
pub fn rounded(duration: Duration) -> Duration {
    let unit_ms = if duration < Duration::from_secs(10) { 1 } else { 100 };
    let units = (duration.as_secs_f64() * 1000.0 / unit_ms as f64).round();
    Duration::from_millis(units as u64 * unit_ms)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_rounded_for_messages() {
        let said = |duration| format!("{:?}", rounded(duration));
        assert_eq!(said(Duration::from_nanos(29_999_999_960)), "30s");
        assert_eq!(said(Duration::from_millis(2500)), "2.5s");
        assert_eq!(said(Duration::from_micros(12_345_678)), "12.3s");
    }

    fn sizes(text: &str) -> Result<Vec<u64>, String> {
        text.parse::<Sizes>().map(|sizes| sizes.0)
    }

    #[test]
    fn sizes_are_lists_and_ranges() {
        assert_eq!(sizes("0,1,4096,4K"), Ok(vec![0, 1, 4096, 4096]));
        assert_eq!(sizes("4K..16K,1M"), Ok(vec![4096, 8192, 16384, 1 << 20]));
        assert_eq!(sizes("3..13"), Ok(vec![3, 6, 12]));
    }

    #[test]
    fn nonsense_is_refused() {
        for text in ["", "4Q", "K", "-1", "16K..4K", "0..4K", "2000G", "1.5M"] {
            assert!(sizes(text).is_err(), "{text} was accepted");
        }
    }

    #[test]
    fn gpus_are_lists_and_ranges() {
        let read = |text: &str| text.parse::<Gpus>().map(|gpus| gpus.0);
        assert_eq!(read("0-3"), Ok(vec![0, 1, 2, 3]));
        assert_eq!(read("5, 0-1"), Ok(vec![5, 0, 1]));
        for text in ["", "a", "0,", "3-1", "0-1,1", "-1", "999"] {
            assert!(read(text).is_err(), "{text} was accepted");
        }
    }

    #[test]
    fn sizes_print_as_typed() {
        assert_eq!(sizes("4095,4096,1M,3G").map(|s| Sizes(s).to_string()), Ok("4095,4K,1M,3G".to_owned()));
    }
}
