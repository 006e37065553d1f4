//! The bytes that all operations move: random bytes of one file that every process has read.
//!
//! What lies in a region after an operation is a span of the pool, so any process can verify every byte of it. Spans begin at
//! random offsets: bytes of an earlier operation differ from those of a later one.

use std::fmt;
use std::fs;
use std::path::Path;

use ferrywire::Region;

use crate::trouble::Trouble;

/// Bytes that one step of a comparison copies: they stay in the cache.
const STEP_BYTES: usize = 256 << 10;

/// Bytes `from` of the pool lie at `at` of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    pub from: u64,
    pub at: u64,
    pub bytes: u64,
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{},{},{}", self.from, self.at, self.bytes)
    }
}

impl Span {
    /// Parses what `Display` writes.
    pub fn parse(text: &str) -> Option<Span> {
        let mut numbers = text.split(',').map(|number| number.parse().ok());
        Some(Span { from: numbers.next()??, at: numbers.next()??, bytes: numbers.next()?? })
    }
}

/// The pool.
pub struct Pool(Vec<u8>);

impl Pool {
    pub fn load(file: &Path) -> Result<Pool, Trouble> {
        let bytes =
            fs::read(file).map_err(|error| Trouble::Failed(format!("{}: {error}", file.display())))?;
        Ok(Pool(bytes))
    }

    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Size in bytes.
    pub fn len(&self) -> u64 {
        self.0.len() as u64
    }

    fn of(&self, span: Span) -> &[u8] {
        &self.0[span.from as usize..][..span.bytes as usize]
    }

    /// Compares a region with a span that should lie in it.
    ///
    /// # Errors
    /// [`Trouble::Wrong`] with the first byte that differs.
    pub fn verify(&self, region: &Region, span: Span, what: &str) -> Result<(), Trouble> {
        let mut found = vec![0; STEP_BYTES.min(span.bytes as usize)];
        for (step, expected) in self.of(span).chunks(STEP_BYTES).enumerate() {
            let at = (step * STEP_BYTES) as u64;
            let found = &mut found[..expected.len()];
            region.read_at(span.at + at, found)?;
            if found == expected {
                continue;
            }
            let first = found.iter().zip(expected).position(|(a, b)| a != b).unwrap_or_default();
            let differ = found.iter().zip(expected).filter(|(a, b)| a != b).count();
            return Err(Trouble::Wrong(format!(
                "{what}: span {span}: byte {} is {:#04x}, expected {:#04x}; {differ} of {} bytes from {at} on differ",
                at + first as u64,
                found[first],
                expected[first],
                expected.len()
            )));
        }
        Ok(())
    }
}

/// Overwrites a part of a region with bytes that no operation has moved.
pub fn poison(region: &Region, at: u64, bytes: u64) -> Result<(), Trouble> {
    static POISON: [u8; STEP_BYTES] = [0xa5; STEP_BYTES];
    for step in (0..bytes).step_by(STEP_BYTES) {
        region.write_at(at + step, &POISON[..STEP_BYTES.min((bytes - step) as usize)])?;
    }
    Ok(())
}

/// Random numbers that a seed determines (splitmix64).
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Dice {
        Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x6a09_e667_f3bc_c908)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// A number from 0 to `end` - 1.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end.max(1)
    }

    /// A size from `least` to `most` bytes: each power of two is as likely as the others.
    pub fn size(&mut self, least: u64, most: u64) -> u64 {
        let fraction = (self.next() >> 11) as f64 / (1u64 << 53) as f64;
        let (low, high) = ((least as f64).ln(), (most as f64).ln());
        ((low + fraction * (high - low)).exp() as u64).clamp(least, most)
    }
}

/// A descriptor as text.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The bytes of [`hex`].
pub fn unhex(text: &str) -> Option<Vec<u8>> {
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(text.get(at..at + 2)?, 16).ok()).collect()
}
