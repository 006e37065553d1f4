//! Whether a file is a whole shared library for this machine, found out before the loader maps it.
//!
//! The loader believes the headers: a truncated library is mapped past its end and the process dies by
//! SIGBUS, before anything could be reported. Invariant: nothing is mapped and nothing executed here.
//! Read next: `load.rs`.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

const HEADER_BYTES: usize = 64;
const SEGMENT_BYTES: usize = 56;
const CLASS_64: u8 = 2;
const LITTLE_ENDIAN: u8 = 1;
const TYPE_SHARED: u16 = 3;
const SEGMENT_LOAD: u32 = 1;
const SEGMENT_DYNAMIC: u32 = 2;
const OFFSET_MAX: u64 = i64::MAX as u64 - (1 << 32);
#[cfg(target_arch = "x86_64")]
const MACHINE: u16 = 62;
#[cfg(target_arch = "aarch64")]
const MACHINE: u16 = 183;

/// What is wrong with a file that should be a shared library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Defect {
    /// It does not begin as an ELF file does.
    NotElf,
    /// An ELF file, but of another kind.
    Other(&'static str),
    /// It ends before what its headers promise.
    Truncated {
        /// What is there.
        file_bytes: u64,
        /// What there should be at least.
        needed_bytes: u64,
    },
}

/// Checks the headers of a file.
pub fn check(file: &File) -> io::Result<Result<(), Defect>> {
    let file_bytes = file.metadata()?.len();
    let mut header = [0; HEADER_BYTES];
    let have = read_up_to(file, &mut header, 0)?;
    let (offset, count) = match segments(&header[..have], file_bytes) {
        Ok(place) => place,
        Err(defect) => return Ok(Err(defect)),
    };
    let mut table = vec![0; usize::from(count) * SEGMENT_BYTES];
    let have = read_up_to(file, &mut table, offset)?;
    if have < table.len() {
        let needed_bytes = offset.saturating_add(table.len() as u64);
        return Ok(Err(Defect::Truncated { file_bytes, needed_bytes }));
    }
    Ok(check_segments(&table, file_bytes))
}

fn read_up_to(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut have = 0;
    // Offsets that the kernel has no numbers for are past the end, too.
    while have < buffer.len() && offset <= OFFSET_MAX {
        match file.read_at(&mut buffer[have..], offset + have as u64) {
            Ok(0) => break,
            Ok(n) => have += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(have)
}

/// Where the table of segments is, and how many there are.
fn segments(header: &[u8], file_bytes: u64) -> Result<(u64, u16), Defect> {
    if !header.starts_with(b"\x7fELF") {
        return Err(Defect::NotElf);
    }
    if header.len() < HEADER_BYTES {
        return Err(Defect::Truncated { file_bytes, needed_bytes: HEADER_BYTES as u64 });
    }
    if header[4] != CLASS_64 || header[5] != LITTLE_ENDIAN {
        return Err(Defect::Other("it is not a 64-bit little-endian ELF file"));
    }
    if u16_at(header, 18) != MACHINE {
        return Err(Defect::Other("it is built for another kind of processor"));
    }
    if u16_at(header, 16) != TYPE_SHARED {
        return Err(Defect::Other("it is an ELF file, but not a shared library"));
    }
    if usize::from(u16_at(header, 54)) != SEGMENT_BYTES {
        return Err(Defect::Other("its ELF header is damaged"));
    }
    Ok((u64_at(header, 32), u16_at(header, 56)))
}

fn check_segments(table: &[u8], file_bytes: u64) -> Result<(), Defect> {
    let mut needed_bytes = 0;
    let mut dynamic = false;
    for segment in table.chunks_exact(SEGMENT_BYTES) {
        let kind = u32::from_le_bytes([segment[0], segment[1], segment[2], segment[3]]);
        dynamic |= kind == SEGMENT_DYNAMIC;
        if kind == SEGMENT_LOAD || kind == SEGMENT_DYNAMIC {
            needed_bytes = needed_bytes.max(u64_at(segment, 8).saturating_add(u64_at(segment, 32)));
        }
    }
    if needed_bytes > file_bytes {
        return Err(Defect::Truncated { file_bytes, needed_bytes });
    }
    if dynamic { Ok(()) } else { Err(Defect::Other("it is an ELF file, but not a shared library")) }
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn checked(bytes: &[u8]) -> Result<(), Defect> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        check(&file).unwrap()
    }

    /// A header and two segments, the last of which ends at `end`.
    fn library(end: u64) -> Vec<u8> {
        let mut bytes = vec![0u8; HEADER_BYTES + 2 * SEGMENT_BYTES];
        bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
        bytes[16..18].copy_from_slice(&TYPE_SHARED.to_le_bytes());
        bytes[18..20].copy_from_slice(&MACHINE.to_le_bytes());
        bytes[32..40].copy_from_slice(&(HEADER_BYTES as u64).to_le_bytes());
        bytes[54..56].copy_from_slice(&(SEGMENT_BYTES as u16).to_le_bytes());
        bytes[56..58].copy_from_slice(&2u16.to_le_bytes());
        let load = HEADER_BYTES;
        bytes[load..load + 4].copy_from_slice(&SEGMENT_LOAD.to_le_bytes());
        bytes[load + 32..load + 40].copy_from_slice(&end.to_le_bytes());
        let dynamic = HEADER_BYTES + SEGMENT_BYTES;
        bytes[dynamic..dynamic + 4].copy_from_slice(&SEGMENT_DYNAMIC.to_le_bytes());
        bytes
    }

    #[test]
    fn a_library_is_whole_or_truncated_to_the_byte() {
        let whole = library(176);
        assert_eq!(whole.len(), 176);
        assert_eq!(checked(&whole), Ok(()));
        assert_eq!(checked(&library(177)), Err(Defect::Truncated { file_bytes: 176, needed_bytes: 177 }));
        assert!(matches!(checked(&library(u64::MAX)), Err(Defect::Truncated { .. })));
        for cut in 4..whole.len() {
            assert!(matches!(checked(&whole[..cut]), Err(Defect::Truncated { .. })), "cut at {cut}");
        }
    }

    #[test]
    fn other_files_are_told_apart() {
        assert_eq!(checked(b""), Err(Defect::NotElf));
        assert_eq!(checked(b"/* GNU ld script */ GROUP ( libc.so.6 )"), Err(Defect::NotElf));
        let change = |at: usize, value: u8| {
            let mut bytes = library(176);
            bytes[at] = value;
            checked(&bytes)
        };
        assert!(matches!(change(4, 1), Err(Defect::Other(why)) if why.contains("64-bit")));
        assert!(matches!(change(18, 0x28), Err(Defect::Other(why)) if why.contains("processor")));
        assert!(matches!(change(16, 1), Err(Defect::Other(why)) if why.contains("not a shared library")));
        assert!(matches!(change(54, 1), Err(Defect::Other(why)) if why.contains("damaged")));
        assert!(matches!(change(32, 0xff), Err(Defect::Truncated { .. })));
        assert!(matches!(change(39, 0xff), Err(Defect::Truncated { .. })), "an offset no kernel takes");
    }
}
