//! Settings of a session that both ends have.

use crate::{LIMIT, builder};
use ferrywire::{Builder, Endpoint, Peer};

struct Ends {
    near: Peer,
    far: Peer,
    ends: [Endpoint; 2],
}

/// Connects `near` to `far`.
fn connect(near: Builder, far: Builder) -> Ends {
    let far = far.listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
    let near = near.build().unwrap();
    let peer = near.connect(far.listen_addresses()[0], LIMIT).unwrap();
    Ends { near: peer, far: far.accept(LIMIT).unwrap(), ends: [near, far] }
}

impl Ends {
    /// Channels, window, chunk and checksums, which must be equal at both ends.
    fn settings(&self) -> (usize, usize, usize, bool) {
        let [near, far] = [&self.near, &self.far].map(|peer| {
            let stats = peer.stats();
            (stats.channels.len(), stats.window, stats.chunk_bytes, stats.crc)
        });
        assert_eq!(near, far);
        near
    }

    /// Writes in both directions. An end that expects checksums drops a channel on which a frame has none.
    fn carry(&self) {
        let bytes: Vec<u8> = (0..3_000_000u32).map(|i| (i * 7 % 251) as u8).collect();
        let [source, target] = [&self.ends[0], &self.ends[1]].map(|end| end.register(bytes.clone()).unwrap());
        let len = bytes.len() as u64;
        let there = self.near.write(&source, 0, &target.descriptor(), 0, len).unwrap();
        let back = self.far.write(&target, 0, &source.descriptor(), 0, len).unwrap();
        assert_eq!([there, back].map(|write| write.wait(LIMIT)), [Ok(len), Ok(len)]);
        for peer in [&self.near, &self.far] {
            assert_eq!(peer.stats().lost_channels, Vec::<String>::new());
        }
    }
}

/// Regression: only the settings of the end that connects had an effect.
#[test]
fn settings_of_the_accepting_end_have_an_effect() {
    let far = || builder().crc(true).window(16).channels(2).chunk_bytes(64 << 10);
    let ends = connect(builder().channels(8), far());
    assert_eq!(ends.settings(), (2, 16, 64 << 10, true));
    ends.carry();
    let ends = connect(builder().channels(1).window(8).chunk_bytes(4096), far());
    assert_eq!(ends.settings(), (1, 8, 4096, true), "the smaller ones count");
    ends.carry();
}

#[test]
fn defaults_of_the_accepting_end_lower_nothing() {
    let near = builder().crc(true).window(16).channels(3).chunk_bytes(4 << 20);
    let ends = connect(near, builder());
    assert_eq!(ends.settings(), (3, 16, 4 << 20, true));
    ends.carry();
}
