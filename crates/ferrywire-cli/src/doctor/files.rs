//! Reads small files of the kernel. A file that cannot be read gives `None`; findings say so or are left out.

use std::fs;
use std::path::Path;

/// The first line of a file.
pub fn line(path: impl AsRef<Path>) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// A file that is one number.
pub fn number<T: std::str::FromStr>(path: impl AsRef<Path>) -> Option<T> {
    line(path)?.parse().ok()
}

/// The last of several numbers in a line, such as the maximum of `tcp_rmem`.
pub fn last_number(path: impl AsRef<Path>) -> Option<u64> {
    line(path)?.split_whitespace().last()?.parse().ok()
}

/// Formats a number of bytes.
pub fn size(bytes: u64) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..1_048_576 => format!("{} KiB", bytes >> 10),
        1_048_576..1_073_741_824 => format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20)),
        _ => format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30)),
    }
}
