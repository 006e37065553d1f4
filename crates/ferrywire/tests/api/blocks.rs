//! Lists of blocks from arrays and over several regions: what is refused, and how. What they move:
//! `tests/scenarios/basics.rs`.

use crate::{LIMIT, pair};
use ferrywire::{Block, BlockList, Endpoint, Lengths, TransferError};

fn invalid(result: Result<BlockList, TransferError>) -> (String, String) {
    match result {
        Err(TransferError::Invalid { what, why }) => (what, why),
        other => panic!("{other:?}"),
    }
}

#[test]
fn arrays_are_checked_and_the_first_wrong_block_is_named() {
    let pair = pair();
    let local = pair.ends[0].alloc_host(1000).unwrap();
    let remote = pair.ends[1].alloc_host(500).unwrap().descriptor();
    let list =
        |here: &[i64], there: &[i64], lengths| BlockList::from_offsets(&local, &remote, here, there, lengths);
    let ten = Lengths::Same(10);
    let good = list(&[0, 990, 5], &[490, 0, 7], ten).unwrap();
    assert_eq!((good.len(), good.bytes()), (3, 30));
    assert_eq!(list(&[], &[], ten).unwrap().len(), 0);
    assert_eq!(list(&[1000], &[500], Lengths::Each(&[0])).unwrap().bytes(), 0);
    let refused = |result, block: &str, why: &str| {
        let (what, text) = invalid(result);
        assert_eq!(what, block);
        assert!(text.contains(why), "{text}");
    };
    refused(list(&[0, -1], &[0, 0], ten), "block 1", "the local offset is -1");
    refused(list(&[0, 0, 0], &[0, 0, i64::MIN], ten), "block 2", "the remote offset is -9223372036854775808");
    refused(list(&[0, 0], &[0, 0], Lengths::Each(&[1, -7])), "block 1", "the length is -7");
    refused(list(&[0, 991], &[0, 0], ten), "block 1", "991..1001 are outside the local region of 1000");
    refused(list(&[0, 9], &[0, 491], ten), "block 1", "491..501 are outside the remote region of 500");
    refused(list(&[i64::MAX], &[0], Lengths::Same(u64::MAX)), "block 0", "outside the local region");
    refused(list(&[0, 1], &[0], ten), "remote offsets", "1 given for 2");
    refused(list(&[0], &[0], Lengths::Each(&[1, 2])), "lengths", "2 given for 1");
}

#[test]
fn arrays_and_structs_give_the_same_list() {
    let pair = pair();
    let source = pair.ends[0].register((0..=255).collect::<Vec<u8>>()).unwrap();
    let targets = [0, 1].map(|_| pair.ends[1].alloc_host(256).unwrap());
    let (here, there, bytes) = ([3i64, 200, 40], [100i64, 0, 60], [20i64, 56, 1]);
    let blocks: Vec<Block> = (0..3)
        .map(|at| Block {
            local_offset: here[at] as u64,
            remote_offset: there[at] as u64,
            bytes: bytes[at] as u64,
        })
        .collect();
    let lists = [
        BlockList::new(&source, &targets[0].descriptor(), &blocks).unwrap(),
        BlockList::from_offsets(&source, &targets[1].descriptor(), &here, &there, Lengths::Each(&bytes))
            .unwrap(),
    ];
    let mut found = [[0; 256]; 2];
    for (list, (target, found)) in lists.iter().zip(targets.iter().zip(&mut found)) {
        assert_eq!(pair.near.write_blocks(list, None, None).unwrap().wait(LIMIT), Ok(77));
        target.read_at(0, found).unwrap();
    }
    assert_eq!(found[0], found[1]);
    assert_eq!(found[0][..56], (200..=255).collect::<Vec<u8>>()[..]);
}

#[test]
fn lists_of_several_peers_do_not_join() {
    let pair = pair();
    let other = Endpoint::builder().build().unwrap();
    let local = pair.ends[0].alloc_host(100).unwrap();
    let list = |end: &Endpoint| {
        let remote = end.alloc_host(100).unwrap().descriptor();
        BlockList::from_offsets(&local, &remote, &[0], &[0], Lengths::Same(100)).unwrap()
    };
    let (theirs, others) = (list(&pair.ends[1]), list(&other));
    assert_eq!(BlockList::join(&[&theirs, &theirs]).unwrap().len(), 2);
    let (what, why) = invalid(BlockList::join(&[&theirs, &theirs, &others]));
    assert_eq!(what, "block lists");
    assert!(why.contains(&format!("pair 2 has a remote region of endpoint {}", other.identity())), "{why}");
    assert_eq!(invalid(BlockList::join(&[])).1, "the list is empty: give at least one");
}

/// Prints what it costs; what is asserted is that a list of that size works in one operation.
#[test]
fn a_hundred_thousand_blocks_of_many_regions_are_one_operation() {
    const BLOCKS: usize = 100_000;
    const PAIRS: usize = 100;
    const BYTES: usize = 64;
    let pair = pair();
    let each = BLOCKS / PAIRS;
    let order: Vec<i64> = (0..each as i64).map(|block| block * 7919 % each as i64 * BYTES as i64).collect();
    let straight: Vec<i64> = (0..each as i64).map(|block| block * BYTES as i64).collect();
    let regions: Vec<_> = (0..PAIRS)
        .map(|index| {
            let bytes = (0..each * BYTES).map(|at| (at / BYTES + at * 31 + index) as u8).collect::<Vec<u8>>();
            (pair.ends[0].register(bytes).unwrap(), pair.ends[1].alloc_host(each * BYTES).unwrap())
        })
        .collect();
    let start = std::time::Instant::now();
    let lists: Vec<BlockList> = regions
        .iter()
        .map(|(source, target)| {
            let same = Lengths::Same(BYTES as u64);
            BlockList::from_offsets(source, &target.descriptor(), &order, &straight, same).unwrap()
        })
        .collect();
    let joined = BlockList::join(&lists.iter().collect::<Vec<_>>()).unwrap();
    println!("{BLOCKS} blocks of {PAIRS} pairs of regions: built in {:?}", start.elapsed());
    let start = std::time::Instant::now();
    let write = pair.near.write_blocks(&joined, None, Some(b"all")).unwrap();
    println!("posted in {:?}", start.elapsed());
    assert_eq!(pair.far.wait_notification(LIMIT).unwrap(), b"all");
    println!("there after {:?}", start.elapsed());
    assert_eq!(write.wait(LIMIT), Ok((BLOCKS * BYTES) as u64));
    for (source, target) in &regions {
        let mut found = [vec![0; each * BYTES], vec![0; each * BYTES]];
        source.read_at(0, &mut found[0]).unwrap();
        target.read_at(0, &mut found[1]).unwrap();
        for (from, to) in order.iter().zip(&straight) {
            assert!(found[0][*from as usize..][..BYTES] == found[1][*to as usize..][..BYTES]);
        }
    }
}
