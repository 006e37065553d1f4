//! The places of one size's bytes in a region.
//!
//! A region has an area per flow. An area has slots: one per transfer in flight, as far as memory allows, and no more
//! than there are messages. A slot has cells, one per block, in an order that is shuffled differently on the two sides.
//! Behind the block, the rest of a cell is a gap that nothing may write to, so no two blocks are adjacent.
//! Invariant: pure, so both ends compute the same layouts from the same [`Run`].

use std::sync::Arc;

use super::pattern::{mix, shuffled};
use super::protocol::{Run, Side};
use crate::args::{Op, Pattern};

/// Memory for the slots of one area; beyond it, transfers in flight share slots.
const AREA_BYTES: u64 = 512 << 20;
/// Bytes in flight that the default depth aims at, and the bounds of that depth.
const IN_FLIGHT_BYTES: u64 = 256 << 20;
const DEPTH_DEFAULT_MIN: u64 = 4;
const DEPTH_DEFAULT_MAX: u64 = 64;
/// Alignment of slots and cells, in bytes.
const SLOT_ALIGN: u64 = 4096;
const CELL_ALIGN: u64 = 64;

/// One direction of data, driven by one end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    /// The end that posts the transfers.
    pub driver: Side,
    /// The end whose memory is read.
    pub source: Side,
}

impl Flow {
    /// The flow that `driver` drives in this run.
    pub fn new(run: &Run, driver: Side) -> Flow {
        Flow { driver, source: if run.op == Op::Read { driver.other() } else { driver } }
    }

    /// The index of the flow's area, equal on both sides.
    pub fn area(self) -> u64 {
        u64::from(self.driver == Side::Serve)
    }

    /// The end whose memory is written.
    pub fn target(self) -> Side {
        self.source.other()
    }
}

/// The flows of a run.
pub fn flows(run: &Run) -> Vec<Flow> {
    let both = run.pattern == Pattern::Bidir || (run.pattern == Pattern::Latency && run.op != Op::Read);
    let drivers: &[Side] = if both { &[Side::Connect, Side::Serve] } else { &[Side::Connect] };
    drivers.iter().map(|driver| Flow::new(run, *driver)).collect()
}

/// Transfers in flight for one size.
pub fn depth(run: &Run, size: u64) -> usize {
    match (run.pattern, run.depth) {
        (Pattern::Latency, _) => 1,
        (_, Some(depth)) => depth,
        (_, None) => (IN_FLIGHT_BYTES / size.max(1)).clamp(DEPTH_DEFAULT_MIN, DEPTH_DEFAULT_MAX) as usize,
    }
}

/// Size of each end's region in bytes, with room for every size.
pub fn region_bytes(run: &Run) -> u64 {
    let areas = flows(run).len() as u64;
    area_stride(run) * areas
}

fn area_stride(run: &Run) -> u64 {
    run.sizes
        .iter()
        .map(|size| slots(run, *size) * Shape::new(run, *size).slot_stride)
        .max()
        .unwrap_or(SLOT_ALIGN)
}

fn slots(run: &Run, size: u64) -> u64 {
    let affordable = AREA_BYTES / Shape::new(run, size).slot_stride;
    // A warm-up without a number of messages fills every slot.
    let messages = run.warmup.zip(run.iters).map_or(u64::MAX, |(warmup, iters)| warmup.max(iters));
    (depth(run, size) as u64).min(affordable.min(messages).max(1))
}

/// How a message is cut into blocks.
#[derive(Clone, Copy, Debug)]
struct Shape {
    size: u64,
    blocks: u64,
    cell_stride: u64,
    slot_stride: u64,
}

impl Shape {
    fn new(run: &Run, size: u64) -> Shape {
        let blocks = run.blocks.unwrap_or(1);
        let slot_align = SLOT_ALIGN;
        let cell_stride = match run.blocks {
            None => size.max(1).next_multiple_of(SLOT_ALIGN),
            Some(_) => (size.div_ceil(blocks) + 1).next_multiple_of(CELL_ALIGN),
        };
        Shape { size, blocks, cell_stride, slot_stride: (cell_stride * blocks).next_multiple_of(slot_align) }
    }
}

/// A piece of a message, with its place in the region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Offset in the region, in bytes.
    pub offset: u64,
    /// Offset in the message, in bytes.
    pub logical: u64,
    /// Length of the piece in bytes.
    pub bytes: u64,
    /// End of the piece's cell in the region; between the piece and this offset is the gap.
    pub cell_end: u64,
}

/// The memory of one flow and size on one side.
#[derive(Clone, Debug)]
pub struct Layout {
    shape: Shape,
    area: u64,
    /// Number of slots.
    pub slots: u64,
    /// Pairs of the run that share one serving end.
    pub peers: usize,
    cells: Arc<[u32]>,
}

impl Layout {
    /// The memory of `flow` on `side` for the size with this index.
    pub fn new(run: &Run, flow: Flow, side: Side, step: usize) -> Layout {
        let size = run.sizes[step];
        let shape = Shape::new(run, size);
        let order = mix(run.seed ^ mix(step as u64 * 4 + flow.area() * 2 + u64::from(side == flow.source)));
        let cells = if shape.blocks == 1 { vec![0] } else { shuffled(shape.blocks, order) };
        let (area, slots) = (area_stride(run) * flow.area(), slots(run, size));
        Layout { shape, area, slots, peers: run.peers, cells: cells.into() }
    }

    /// Size of a message in bytes.
    pub fn size(&self) -> u64 {
        self.shape.size
    }

    /// The pieces of the message in a slot, in the message's order.
    pub fn pieces(&self, slot: u64) -> impl Iterator<Item = Piece> {
        let Shape { size, blocks, cell_stride, slot_stride } = self.shape;
        let start = self.area + slot * slot_stride;
        let (whole, longer) = (size / blocks, size % blocks);
        self.cells.iter().enumerate().map(move |(i, cell)| {
            let i = i as u64;
            let offset = start + u64::from(*cell) * cell_stride;
            let logical = i * whole + i.min(longer);
            Piece { offset, logical, bytes: whole + u64::from(i < longer), cell_end: offset + cell_stride }
        })
    }

    /// The single piece of a message that is not cut.
    pub fn whole(&self, slot: u64) -> Piece {
        let offset = self.area + slot * self.shape.slot_stride;
        Piece { offset, logical: 0, bytes: self.shape.size, cell_end: offset + self.shape.cell_stride }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Verify;
    use crate::memory::Memory;

    fn run(sizes: &[u64], blocks: Option<u64>, pattern: Pattern) -> Run {
        Run {
            op: Op::Write,
            pattern,
            memory: Memory::Host,
            peer_memory: Some(Memory::Host),
            unpack: None,
            sizes: sizes.to_vec(),
            depth: None,
            blocks,
            peers: 1,
            multi_gpu: false,
            iters: Some(1),
            seconds: None,
            warmup: None,
            verify: Verify::All,
            timeout_s: 1.0,
            seed: 42,
        }
    }

    /// Pieces of every slot and flow, sorted by offset, with their layout's message size.
    fn all_pieces(run: &Run, side: Side, step: usize) -> Vec<Piece> {
        let layouts = flows(run).into_iter().map(|flow| Layout::new(run, flow, side, step));
        let mut pieces: Vec<Piece> = layouts
            .flat_map(|l| {
                (0..l.slots).flat_map(|slot| l.pieces(slot).collect::<Vec<_>>()).collect::<Vec<_>>()
            })
            .collect();
        pieces.sort_by_key(|piece| piece.offset);
        pieces
    }

    #[test]
    fn pieces_lie_in_the_region_and_never_overlap() {
        for blocks in [None, Some(1), Some(7)] {
            let run = run(&[7, 4095, 100_001], blocks, Pattern::Bidir);
            for step in 0..3 {
                let pieces = all_pieces(&run, Side::Serve, step);
                assert!(pieces.windows(2).all(|pair| pair[0].cell_end <= pair[1].offset));
                assert!(pieces.iter().all(|piece| piece.offset + piece.bytes <= piece.cell_end));
                assert!(pieces.last().is_some_and(|piece| piece.cell_end <= region_bytes(&run)));
            }
        }
    }

    #[test]
    fn blocks_cover_the_message_and_never_touch() {
        let run = run(&[1003], Some(10), Pattern::Unidir);
        let layout = Layout::new(&run, flows(&run)[0], Side::Connect, 0);
        let mut next = 0;
        for piece in layout.pieces(1) {
            assert_eq!(piece.logical, next);
            assert!(piece.offset + piece.bytes < piece.cell_end);
            next += piece.bytes;
        }
        assert_eq!(next, 1003);
    }

    #[test]
    fn the_two_sides_shuffle_differently() {
        let run = run(&[1000], Some(100), Pattern::Unidir);
        let order =
            |side| Layout::new(&run, flows(&run)[0], side, 0).pieces(0).map(|p| p.offset).collect::<Vec<_>>();
        assert_ne!(order(Side::Connect), order(Side::Serve));
    }

    #[test]
    fn empty_messages_have_a_place() {
        let run = run(&[0], None, Pattern::Latency);
        assert_eq!(region_bytes(&run), 2 * SLOT_ALIGN);
        assert_eq!(depth(&run, 0), 1);
    }
}
