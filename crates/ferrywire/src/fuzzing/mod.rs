//! What the fuzzer feeds: one function for each part of the engine that reads what others wrote.
//!
//! Each takes arbitrary bytes, spends some of them on choices, and panics when an invariant is broken. Not a
//! part of the API; `fuzz/smoke` runs it.
//! Read next: `ends.rs`, then whoever attacks: `strangers.rs`, `insider.rs`, `sessions.rs`, `frames.rs`, `kernel.rs`.

mod ends;
mod frames;
mod insider;
mod kernel;
mod sessions;
mod strangers;

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
    match input.u8() % 5 {
        0 => frames::headers(&mut input),
        1 => frames::lists(&mut input),
        2 => frames::windows(&mut input),
        3 => frames::geometry(&mut input),
        _ => frames::descriptors(&mut input),
    }
}

/// What the kernel writes about devmem TCP: control messages and netlink answers; and tokens, against a model.
pub fn kernel(data: &[u8]) {
    let mut input = Input(data);
    match input.u8() % 3 {
        0 => kernel::control_messages(&mut input),
        1 => kernel::netlink_answers(&mut input),
        _ => kernel::tokens(&mut input),
    }
}

/// Bytes that choices are made of; zeros when they are used up.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn take(&mut self, len: usize) -> &'a [u8] {
        let (now, later) = self.0.split_at(len.min(self.0.len()));
        self.0 = later;
        now
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut array = [0; N];
        let bytes = self.take(N);
        array[..bytes.len()].copy_from_slice(bytes);
        array
    }

    fn u8(&mut self) -> u8 {
        u8::from_le_bytes(self.array())
    }

    fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// A few changes to bytes that were fine: altered, cut, longer.
    fn spoil(&mut self, bytes: &mut Vec<u8>) {
        for _ in 0..self.u8() % 4 {
            let at = usize::from(self.u16());
            match (self.u8() % 4, bytes.len()) {
                (0, _) => bytes.truncate(at),
                (1, _) => bytes.extend_from_slice(self.take(at % 64)),
                (_, 0) => {}
                (_, len) => bytes[at % len] = self.u8(),
            }
        }
    }
}

fn check_text(text: &str) {
    assert!(!text.chars().any(char::is_control), "{text:?}");
}
