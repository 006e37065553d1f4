//! Payload of a GPU goes from the staging ring to the kernel without a copy, in clear and encrypted.

use crate::{LIMIT, Watched, Watcher};
use ferrywire::{Encryption, Endpoint};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

const BYTES: usize = 1 << 20;
const WRITES: usize = 16;

/// Bytes that the kernel was lent, and those that it has copied.
#[derive(Debug, Default)]
struct Sends {
    lent: AtomicUsize,
    copied: AtomicUsize,
}

impl Watcher for Sends {
    fn sent(&self, bytes: usize, lent: bool) {
        let count = if lent { &self.lent } else { &self.copied };
        count.fetch_add(bytes, Ordering::SeqCst);
    }
}

#[test]
fn payload_of_a_gpu_is_not_copied_to_be_sent() {
    for encryption in [Encryption::Off, Encryption::Required] {
        let sends = Arc::<Sends>::default();
        let builder = || Endpoint::builder().channels(1).threads(1).encryption(encryption);
        let there = builder().listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
        let here = builder().transport(Watched::new(&sends)).build().unwrap();
        let peer = here.connect(there.listen_addresses()[0], LIMIT).unwrap();
        let (source, target) = (here.alloc_sim(0, BYTES).unwrap(), there.alloc_sim(0, BYTES).unwrap());
        let mut placed = vec![0; BYTES];
        for round in 0..WRITES as u8 {
            source.write_at(0, &vec![round + 1; BYTES]).unwrap();
            let write = peer.write(&source, 0, &target.descriptor(), 0, BYTES as u64).unwrap();
            write.wait(LIMIT).unwrap();
            target.read_at(0, &mut placed).unwrap();
            assert!(placed.iter().all(|byte| *byte == round + 1));
        }
        let [lent, copied] = [&sends.lent, &sends.copied].map(|count| count.load(Ordering::SeqCst));
        let all = BYTES * WRITES;
        assert!(
            lent > all * 9 / 10 && copied < all / 10,
            "{encryption:?}: {lent} bytes lent, {copied} copied"
        );
    }
}
