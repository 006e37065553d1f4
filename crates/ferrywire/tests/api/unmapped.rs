//! Memory that is registered and goes away all the same: of a file that is truncated. What reads it fails, at
//! both ends and with the reason, and everything else goes on over the same connections. (Who writes there is ended by the
//! system, as by any access.)

use crate::{LIMIT, Pair, pair};
use ferrywire::{Endpoint, Region, TransferError};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

const BYTES: usize = 8 << 20;

/// Memory of a file, with what is left of it when it has been made shorter.
struct Mapped {
    file: OwnedFd,
    base: *mut u8,
}

impl Mapped {
    fn new() -> Mapped {
        // SAFETY: a name; then a descriptor of our own, and a mapping of it where there is room.
        unsafe {
            let file = OwnedFd::from_raw_fd(libc::memfd_create(c"unmapped".as_ptr(), 0));
            assert_eq!(libc::ftruncate(file.as_raw_fd(), BYTES as libc::off_t), 0);
            let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
            let base = libc::mmap(std::ptr::null_mut(), BYTES, protection, flags, file.as_raw_fd(), 0);
            assert_ne!(base, libc::MAP_FAILED);
            Mapped { file, base: base.cast() }
        }
    }

    fn register(&self, endpoint: &Endpoint) -> Region {
        // SAFETY: mapped until the process ends; that some of it cannot be touched is the test.
        unsafe { endpoint.register_raw(self.base, BYTES) }.unwrap()
    }

    fn shorten(&self, bytes: usize) {
        // SAFETY: a descriptor of ours.
        assert_eq!(unsafe { libc::ftruncate(self.file.as_raw_fd(), bytes as libc::off_t) }, 0);
    }
}

/// Connections that were lost so far, at both ends.
fn lost(pair: &Pair) -> u64 {
    let of = |peer: &ferrywire::Peer| {
        peer.stats().channels.iter().map(|channel| u64::from(channel.generation)).sum::<u64>()
    };
    of(&pair.near) + of(&pair.far)
}

/// Everything works as before, both ways.
fn goes_on(pair: &Pair) {
    for (peer, [near, far]) in [(&pair.near, [0, 1]), (&pair.far, [1, 0])] {
        let source = pair.ends[near].register(vec![7u8; 3 << 20]).unwrap();
        let target = pair.ends[far].alloc_host(3 << 20).unwrap();
        let written = peer.write(&source, 0, &target.descriptor(), 0, 3 << 20).unwrap().wait(LIMIT);
        assert_eq!(written, Ok(3 << 20));
        let mut seen = vec![0; 3 << 20];
        target.read_at(0, &mut seen).unwrap();
        assert!(seen.iter().all(|byte| *byte == 7));
    }
}

#[track_caller]
fn local(outcome: Result<u64, TransferError>) {
    let error = outcome.unwrap_err();
    assert!(matches!(&error, TransferError::Invalid { what, .. } if what == "region"), "{error}");
    assert!(error.to_string().contains("or its file is shorter now"), "{error}");
}

#[track_caller]
fn refused(outcome: Result<u64, TransferError>) {
    let error = outcome.unwrap_err();
    assert!(matches!(error, TransferError::AccessRefused { .. }), "{error}");
}

/// The connections were lost and made again without end, and nothing else got on.
#[test]
fn memory_that_cannot_be_read_fails_what_reads_it_and_nothing_else() {
    for left in [0, 4096] {
        let pair = pair();
        let mapped = Mapped::new();
        let source = mapped.register(&pair.ends[0]);
        let target = pair.ends[1].alloc_host(BYTES).unwrap();
        mapped.shorten(left);
        let before = lost(&pair);
        for bytes in [8192, 100_000, BYTES as u64] {
            local(pair.near.write(&source, 0, &target.descriptor(), 0, bytes).unwrap().wait(LIMIT));
            let receive = pair.far.recv(1, &target, 0, bytes).unwrap();
            local(pair.near.send(1, &source, 0, bytes).unwrap().wait(LIMIT));
            // The receive met the announcement, or a withdrawn message, which the next message replaces.
            receive.cancel();
            assert!(receive.wait(LIMIT).is_err());
            refused(pair.far.read(&target, 0, &source.descriptor(), 0, bytes).unwrap().wait(LIMIT));
            goes_on(&pair);
        }
        assert_eq!(lost(&pair), before, "with {left} bytes left");
    }
}

/// Some of a frame is sent when the rest turns out to be gone: that connection ends, once.
#[test]
fn memory_of_which_some_cannot_be_read_costs_a_connection_and_no_more() {
    let pair = pair();
    let mapped = Mapped::new();
    let source = mapped.register(&pair.ends[0]);
    let target = pair.ends[1].alloc_host(BYTES).unwrap();
    mapped.shorten(300 << 10);
    local(pair.near.write(&source, 0, &target.descriptor(), 0, BYTES as u64).unwrap().wait(LIMIT));
    goes_on(&pair);
    refused(pair.far.read(&target, 0, &source.descriptor(), 0, BYTES as u64).unwrap().wait(LIMIT));
    goes_on(&pair);
    assert!(lost(&pair) <= 16, "{} connections", lost(&pair));
}
