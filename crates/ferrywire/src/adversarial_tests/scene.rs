//! An endpoint under attack, with a good peer that is served meanwhile.

use super::{LIMIT, SECRET};
use crate::{Endpoint, Peer, Region};
use std::net::SocketAddr;
use std::time::Duration;

/// Size of the region that adversarial peers know, and of the guard on each side of it, in bytes.
pub(super) const REGION_BYTES: usize = 64 << 10;
/// Value of all bytes before an attack.
pub(super) const BEFORE: u8 = 0xaa;

/// An endpoint under attack, and a good peer of it.
pub(super) struct Scene {
    pub region: Region,
    pub good: Peer,
    pub good_here: Peer,
    pub good_end: Endpoint,
    pub victim: Endpoint,
    /// The region is the middle third of this memory.
    memory: Vec<u8>,
}

impl Scene {
    pub fn new() -> Scene {
        Scene::with_limit(3 * LIMIT)
    }

    /// A scene whose endpoint gives silent peers up after `limit`.
    pub fn with_limit(limit: Duration) -> Scene {
        let victim = Endpoint::builder().listen("127.0.0.1:0".parse().unwrap());
        let victim = victim.secret(SECRET).threads(1).peer_timeout(limit).build().unwrap();
        let mut memory = vec![BEFORE; 3 * REGION_BYTES];
        // SAFETY: the vector is not resized, and outlives the region, which is declared before it.
        let region = unsafe { victim.register_raw(memory.as_mut_ptr().add(REGION_BYTES), REGION_BYTES) };
        let good_end = endpoint();
        let good = good_end.connect(victim.listen_addresses()[0], LIMIT).unwrap();
        let good_here = victim.accept(LIMIT).unwrap();
        Scene { region: region.unwrap(), good, good_here, good_end, victim, memory }
    }

    pub fn address(&self) -> SocketAddr {
        self.victim.listen_addresses()[0]
    }

    pub fn key(&self) -> u64 {
        self.region.descriptor().key
    }

    /// The bytes of the region and its guards, as they are now.
    pub fn bytes(&self) -> Vec<u8> {
        // SAFETY: the vector is alive; what peers write into its middle are plain bytes.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr(), self.memory.len()) }.to_vec()
    }

    /// Checks that the memory is unchanged and that the good peer is served.
    pub fn unharmed(&self) {
        assert!(self.bytes().iter().all(|byte| *byte == BEFORE), "memory was written to");
        self.good_peer_is_served();
    }

    pub fn good_peer_is_served(&self) {
        let bytes: Vec<u8> = (0..300_000u32).map(|i| (i * 7 % 251) as u8).collect();
        let source = self.good_end.register(bytes.clone()).unwrap();
        let target = self.victim.alloc_host(bytes.len()).unwrap();
        let written = self.good.write_notify(&source, 0, &target.descriptor(), 0, target.len(), b"done");
        written.unwrap().wait(LIMIT).unwrap();
        assert_eq!(self.good_here.wait_notification(LIMIT).unwrap(), b"done");
        let mut got = vec![0; bytes.len()];
        target.read_at(0, &mut got).unwrap();
        assert!(got == bytes, "a good peer's bytes differ");
        assert_eq!(self.good_here.error(), None);
    }
}

/// An endpoint that only connects.
pub(super) fn endpoint() -> Endpoint {
    Endpoint::builder().secret(SECRET).threads(1).channels(2).build().unwrap()
}
