//! Checks that a file is a complete shared library for this machine, before the loader maps it.
//!
//! The loader trusts the headers: it maps a truncated library past the end of the file, and the process dies
//! of SIGBUS before any error can be reported.
//! Invariant: nothing is mapped or executed here.
//! Read next: `load.rs`.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use object::elf::{EM_AARCH64, EM_X86_64, ET_DYN, FileHeader64, PT_DYNAMIC, PT_LOAD, ProgramHeader64};
use object::read::elf::{FileHeader, ProgramHeader};
use object::{LittleEndian, ReadCache, ReadRef};

type Header = FileHeader64<LittleEndian>;
type Segment = ProgramHeader64<LittleEndian>;

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("name this processor's ELF machine here");
const MAGIC: &[u8] = b"\x7fELF";
const MACHINE: u16 = if cfg!(target_arch = "aarch64") { EM_AARCH64 } else { EM_X86_64 };

/// Why a file cannot be loaded as a shared library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Defect {
    /// The file does not start with the ELF magic.
    NotElf,
    /// The file is an ELF file of another kind; the text says which.
    Other(&'static str),
    /// The file ends before the end that its headers state.
    Truncated {
        /// Size of the file in bytes.
        file_bytes: u64,
        /// Smallest size that the headers require, in bytes.
        needed_bytes: u64,
    },
}

/// Checks the ELF headers of a file; returns the defect, or an I/O error when the file cannot be read.
pub fn check(file: &File) -> io::Result<Result<(), Defect>> {
    let file_bytes = file.metadata()?.len();
    if file_bytes >= MAGIC.len() as u64 {
        file.read_exact_at(&mut [0; MAGIC.len()], 0)?;
    }
    match check_headers(&ReadCache::new(file), file_bytes) {
        // The parser gives no reason for a failure. When the file is long enough, the read itself has failed.
        Err(Defect::Truncated { needed_bytes, .. }) if needed_bytes <= file_bytes => {
            Err(io::Error::other("the ELF headers cannot be read"))
        }
        checked => Ok(checked),
    }
}

fn check_headers<'a>(data: impl ReadRef<'a>, file_bytes: u64) -> Result<(), Defect> {
    let truncated = |needed_bytes| Defect::Truncated { file_bytes, needed_bytes };
    if data.read_bytes_at(0, MAGIC.len() as u64) != Ok(MAGIC) {
        return Err(Defect::NotElf);
    }
    let header: &Header = data.read_at(0).map_err(|()| truncated(size_of::<Header>() as u64))?;
    if !header.is_class_64() || !header.is_little_endian() {
        return Err(Defect::Other("not a 64-bit little-endian ELF file"));
    }
    if header.e_machine(LittleEndian) != MACHINE {
        return Err(Defect::Other("built for another kind of processor"));
    }
    if header.e_type(LittleEndian) != ET_DYN {
        return Err(Defect::Other("an ELF file, but not a shared library"));
    }
    if usize::from(header.e_phentsize(LittleEndian)) != size_of::<Segment>() {
        return Err(Defect::Other("the ELF header is damaged"));
    }
    let (offset, count) = (header.e_phoff(LittleEndian), usize::from(header.e_phnum(LittleEndian)));
    let table_end = offset.saturating_add((count * size_of::<Segment>()) as u64);
    let segments: &[Segment] = data.read_slice_at(offset, count).map_err(|()| truncated(table_end))?;
    let end =
        |segment: &Segment| segment.p_offset(LittleEndian).saturating_add(segment.p_filesz(LittleEndian));
    let mapped =
        segments.iter().filter(|segment| [PT_LOAD, PT_DYNAMIC].contains(&segment.p_type(LittleEndian)));
    match mapped.map(end).max() {
        Some(needed_bytes) if needed_bytes > file_bytes => Err(truncated(needed_bytes)),
        _ if segments.iter().any(|segment| segment.p_type(LittleEndian) == PT_DYNAMIC) => Ok(()),
        _ => Err(Defect::Other("an ELF file, but not a shared library")),
    }
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

    /// An ELF header and two segments; the last segment ends at `end`.
    fn library(end: u64) -> Vec<u8> {
        let mut bytes = vec![0u8; size_of::<Header>() + 2 * size_of::<Segment>()];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(0, b"\x7fELF\x02\x01");
        put(16, &ET_DYN.to_le_bytes());
        put(18, &MACHINE.to_le_bytes());
        put(32, &(size_of::<Header>() as u64).to_le_bytes());
        put(54, &(size_of::<Segment>() as u16).to_le_bytes());
        put(56, &2u16.to_le_bytes());
        let load = size_of::<Header>();
        put(load, &PT_LOAD.to_le_bytes());
        put(load + 32, &end.to_le_bytes());
        put(load + size_of::<Segment>(), &PT_DYNAMIC.to_le_bytes());
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

    /// Regression: an unreadable file was reported as no ELF file.
    #[test]
    fn an_unreadable_file_is_a_system_error() {
        let folder = File::open("/").unwrap();
        assert_eq!(check(&folder).unwrap_err().raw_os_error(), Some(libc::EISDIR));
    }

    #[test]
    fn other_files_are_distinguished() {
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
