//! Arbitrary bytes, of which some are spent on choices.

/// Bytes that choices are made of; zeros when they are used up.
#[derive(Debug)]
pub struct Input<'a>(pub &'a [u8]);

impl<'a> Input<'a> {
    /// The next bytes, at most as many as there are.
    pub fn take(&mut self, len: usize) -> &'a [u8] {
        let (now, later) = self.0.split_at(len.min(self.0.len()));
        self.0 = later;
        now
    }

    /// As many bytes.
    pub fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut array = [0; N];
        let bytes = self.take(N);
        array[..bytes.len()].copy_from_slice(bytes);
        array
    }

    /// A number.
    pub fn u8(&mut self) -> u8 {
        u8::from_le_bytes(self.array())
    }

    /// A number.
    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    /// A number.
    pub fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    /// A number.
    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    /// Whether all are used up.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// A few changes to bytes that were fine: altered, cut, longer.
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

/// What is shown to people has no control characters.
pub fn check_text(text: &str) {
    assert!(!text.chars().any(char::is_control), "{text:?}");
}
