//! Fuzz targets: one function per part of the protocol that parses a peer's bytes.
//!
//! Each target takes arbitrary bytes, spends some of them on choices, and panics when an invariant is broken.
//! The targets are not part of the API; `fuzz/smoke` runs them. Targets for the kernel's bytes are in
//! `ferrywire-devmem`, `sys/fuzzing.rs`.
//! Read next: `ends.rs`, then the attackers: `strangers.rs` (without the secret), `insider.rs` (with it),
//! `sessions.rs`, `frames.rs`, `records.rs`.

mod ends;
mod frames;
mod insider;
mod records;
mod sessions;
mod strangers;

use crate::descriptor::Descriptor;
use crate::fuzz_input::{Input, check_text};

const SECRET: &[u8] = b"correct horse";
/// Id of the session that responders know; `OPENED` is the id of the session that they open.
const KNOWN: u64 = 77;
const OPENED: u64 = 78;
/// The preamble precedes the first frame of a handshake.
const PREAMBLE_BYTES: usize = 16;

/// Handshakes: attackers without the secret at either end, altered bytes, and attackers that hold the secret.
pub fn hello(data: &[u8]) {
    let mut input = Input(data);
    match input.u8() % 5 {
        0 => strangers::dials(&mut input),
        1 => strangers::answers(&mut input),
        2 => strangers::alter(&mut input),
        3 => insider::dials(&mut input),
        _ => insider::answers(&mut input),
    }
}

/// Control sessions: random bytes for the decryption, any plain content, and a peer that holds the key.
pub fn control(data: &[u8]) {
    let mut input = Input(data);
    match input.u8() % 3 {
        0 => sessions::foreign_bytes(&mut input),
        1 => sessions::plain_content(&mut input),
        _ => sessions::evil_peer(&mut input),
    }
}

/// Records of a protected connection, changed on their way.
pub fn records(data: &[u8]) {
    records::changed(&mut Input(data));
}

/// Data frames, and the pure code that acts on them, compared with models; and descriptors of regions.
pub fn wire(data: &[u8]) {
    if let Ok(region) = Descriptor::decode(data) {
        assert_eq!(region.encode(), data, "an accepted descriptor is encoded to the same bytes");
    }
    let mut input = Input(data);
    match input.u8() % 4 {
        0 => frames::headers(&mut input),
        1 => frames::lists(&mut input),
        2 => frames::windows(&mut input),
        _ => frames::geometry(&mut input),
    }
}
