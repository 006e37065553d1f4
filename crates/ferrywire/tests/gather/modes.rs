use crate::plugin::*;
use ferrywire::limits::CHUNK_BYTES_MAX;
use ferrywire_memory::Error;
use ferrywire_memory::unpack::{Fragment, UnpackMode};
use proptest::prelude::*;
use rand::Rng;
use std::collections::VecDeque;
use std::task::Poll;

/// A receive under way.
struct Receive {
    number: u64,
    message: Vec<u8>,
    fragments: Vec<Fragment>,
    target: Destination,
}

/// Receives one after the other, up to 16 at once, each given back in order once it is gathered.
fn receive_all(mode: UnpackMode, seed: u64, receives: u64, bytes_max: usize) {
    let (plugin, rng) = (Plugin::new(0), &mut rng(seed));
    let (mut gather, mut open, mut number) = (plugin.gather(mode), VecDeque::<Receive>::new(), 0);
    while number < receives || !open.is_empty() {
        let begin = number < receives && open.len() < 16 && (open.is_empty() || rng.random_bool(0.6));
        if begin {
            let slot = (number % 16) as usize;
            let message_bytes = rng.random_range(0..=bytes_max);
            let message = message(rng, message_bytes);
            let pieces_max = rng.random_range(1..=500);
            let fragments = scattered(rng, slot, message.len(), pieces_max);
            plugin.deliver(slot, &message, &fragments);
            let room = message.len() + rng.random_range(0..100);
            let target = Destination::new(&plugin.gpu, room, rng.random_range(0..64));
            gather.start(number, target.address(), target.len(), message.len() as u64).unwrap();
            open.push_back(Receive { number, message, fragments, target });
            number += 1;
        } else if let Some(oldest) = open.pop_front() {
            assert_eq!(finish(&mut gather, oldest.number), Ok(oldest.message.len() as u64));
            // Given back: its pages are the NIC's again.
            plugin.recycle(&oldest.fragments);
            let (message, beyond) = (&oldest.message, oldest.target.contents());
            assert!(beyond.starts_with(message), "receive {}: {mode}, seed {seed}", oldest.number);
            assert!(beyond[message.len()..].iter().all(|byte| *byte == 0xA5), "behind the message");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn every_mode_gives_what_was_sent(seed: u64) {
        for mode in GATHERING {
            receive_all(mode, seed, 40, 6000);
        }
    }
}

#[test]
fn large_messages_and_many_rounds_of_slots() {
    for mode in GATHERING {
        receive_all(mode, 1, 70, 300_000);
    }
}

#[test]
fn a_full_slot_is_gathered() {
    // Each fragment as long as it may be for the largest message, and none of them mergeable.
    let (plugin, rng) = (Plugin::new(0), &mut rng(2));
    let each = (CHUNK_BYTES_MAX / 2048) as u32;
    let sent = message(rng, CHUNK_BYTES_MAX);
    let fragments: Vec<Fragment> = (0..2048)
        .map(|index| Fragment {
            source: index * (each + 1),
            bytes: each,
            target: u64::from((2047 - index) * each),
        })
        .collect();
    for mode in GATHERING {
        let target = Destination::new(&plugin.gpu, sent.len(), 3);
        let mut gather = plugin.gather(mode);
        plugin.deliver(7, &sent, &fragments);
        gather.start(7, target.address(), target.len(), sent.len() as u64).unwrap();
        assert_eq!(finish(&mut gather, 7), Ok(sent.len() as u64));
        assert!(target.contents() == sent, "{mode}");
    }
}

#[test]
fn empty_and_host_receives_are_done_at_once() {
    let plugin = Plugin::new(0);
    let host = [0u8; 100];
    for mode in UnpackMode::ALL {
        let mut gather = plugin.gather(mode);
        let target = Destination::new(&plugin.gpu, 100, 0);
        plugin.tell(0, &[], 0);
        gather.start(0, target.address(), 100, 0).unwrap();
        assert_eq!(gather.poll(0), Poll::Ready(Ok(0)));
        gather.start(16, 0, 0, 0).unwrap();
        assert_eq!(gather.poll(16), Poll::Ready(Ok(0)));
        plugin.tell(1, &[], 0);
        gather.start(1, host.as_ptr() as u64, 100, 90).unwrap();
        assert_eq!(gather.poll(1), Poll::Ready(Ok(90)));
        assert_eq!(gather.launches(), 0);
        target.assert_untouched();
    }
}

#[test]
fn mode_none_copies_nothing_and_trusts_no_fragment() {
    let plugin = Plugin::new(0);
    let target = Destination::new(&plugin.gpu, 100, 0);
    let mut gather = plugin.gather(UnpackMode::None);
    plugin.tell(0, &[Fragment { source: u32::MAX, bytes: 1, target: 5 }], 1);
    gather.start(0, target.address(), 100, 100).unwrap();
    assert_eq!(gather.poll(0), Poll::Ready(Ok(100)));
    assert_eq!(gather.launches(), 0);
    assert!(!gather.mode().verifiable());
    target.assert_untouched();
}

#[test]
fn destinations_that_do_not_hold_the_message_are_refused() {
    let (plugin, other) = (Plugin::new(0), Plugin::new(1));
    let mut gather = plugin.gather(UnpackMode::Kernel);
    let target = plugin.gpu.alloc(4096, 4096).unwrap();
    let refused = |result: ferrywire_memory::Result<()>, expected: &str| {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::Invalid { .. }) && error.to_string().contains(expected), "{error}");
    };
    plugin.tell(0, &[Fragment { source: 0, bytes: 100, target: 0 }], 1);
    refused(
        gather.start(0, target.address(), 99, 100),
        "the destination has 99 bytes, and the message has 100",
    );
    refused(gather.start(0, target.address() + 4000, 100, 100), "leave their allocation");
    let theirs = other.pool.address();
    refused(
        gather.start(0, theirs, 100, 100),
        "memory of simulated GPU 1, but the gather writes to memory of simulated GPU 0",
    );
    let above = CHUNK_BYTES_MAX as u64 + 1;
    let error = gather.start(0, other.pool.address(), above, above).unwrap_err();
    assert!(matches!(error, Error::Limit { name: "CHUNK_BYTES_MAX", .. }), "{error}");
    // The slot is as free as before.
    gather.start(0, target.address(), 100, 100).unwrap();
    assert_eq!(finish(&mut gather, 0), Ok(100));
}

#[test]
fn a_slot_has_one_gather_at_a_time() {
    let plugin = Plugin::new(0);
    let mut gather = plugin.gather(UnpackMode::Kernel);
    let target = Destination::new(&plugin.gpu, 100, 0);
    assert!(matches!(gather.poll(3), Poll::Ready(Err(Error::Internal(_)))));
    plugin.tell(3, &[Fragment { source: 0, bytes: 100, target: 0 }], 1);
    gather.start(3, target.address(), 100, 100).unwrap();
    assert!(matches!(gather.start(19, target.address(), 100, 100), Err(Error::Internal(_))));
    assert_eq!(finish(&mut gather, 19), Ok(100));
    assert!(matches!(gather.poll(3), Poll::Ready(Err(Error::Internal(_)))));
}
