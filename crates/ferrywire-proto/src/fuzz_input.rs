//! Fuzz input: arbitrary bytes, some of which decide a fuzz target's choices.

/// Remaining input bytes. Numbers read as zero when the bytes are used up.
#[derive(Debug)]
pub struct Input<'a>(pub &'a [u8]);

impl<'a> Input<'a> {
    /// Takes the next `len` bytes, or fewer at the end of the input.
    pub fn take(&mut self, len: usize) -> &'a [u8] {
        let (now, later) = self.0.split_at(len.min(self.0.len()));
        self.0 = later;
        now
    }

    /// Takes `N` bytes, padded with zeros at the end of the input.
    pub fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut array = [0; N];
        let bytes = self.take(N);
        array[..bytes.len()].copy_from_slice(bytes);
        array
    }

    /// Takes a number of 1 byte from the input.
    pub fn u8(&mut self) -> u8 {
        u8::from_le_bytes(self.array())
    }

    /// Takes a number of 2 bytes from the input.
    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    /// Takes a number of 4 bytes from the input.
    pub fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    /// Takes a number of 8 bytes from the input.
    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    /// Whether the input is used up.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Corrupts valid bytes a little: changes, cuts or extends them.
    pub fn spoil(&mut self, bytes: &mut Vec<u8>) {
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

/// Asserts that a text has no control characters, as every text shown to users.
pub fn check_text(text: &str) {
    assert!(!text.chars().any(char::is_control), "{text:?}");
}
