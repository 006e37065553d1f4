//! What the fuzzer feeds: one function for each part of the engine that reads what others wrote.
//!
//! Each takes arbitrary bytes, spends some of them on choices, and panics when an invariant is broken. Not a
//! part of the API; `fuzz/smoke` runs it. What the kernel writes is `ferrywire_sys::fuzzing`'s.
//! Read next: `ends.rs`, then whoever attacks: `strangers.rs`, `insider.rs`, `sessions.rs`, `frames.rs`.

mod ends;
mod frames;
mod insider;
mod sessions;
mod strangers;

use crate::fuzz_input::{Input, check_text};

const SECRET: &[u8] = b"correct horse";
/// The session that the responders know, and the one that they open.
const KNOWN: u64 = 77;
const OPENED: u64 = 78;
/// Preamble, then the first frame of a handshake.
const PREAMBLE_BYTES: usize = 16;

/// Handshakes: strangers at both ends, bytes altered on their way, and insiders who say what they like.
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

/// Control sessions: foreign bytes for the encryption, any plain content, and a peer who holds the key.
pub fn control(data: &[u8]) {
    let mut input = Input(data);
    match input.u8() % 3 {
        0 => sessions::foreign_bytes(&mut input),
        1 => sessions::plain_content(&mut input),
        _ => sessions::evil_peer(&mut input),
    }
}

/// Data frames and the pure parts that act on them, against models.
pub fn wire(data: &[u8]) {
    let mut input = Input(data);
    match input.u8() % 4 {
        0 => frames::headers(&mut input),
        1 => frames::lists(&mut input),
        2 => frames::windows(&mut input),
        _ => frames::geometry(&mut input),
    }
}
