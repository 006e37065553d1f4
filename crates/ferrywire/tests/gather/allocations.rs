//! The loop allocates nothing, maps nothing and reads no device memory: seen by a device that counts, and an
//! allocator that does.

use crate::device::{MESSAGE_BYTES, Plain};
use crate::plugin::GATHERING;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::Ordering;
use std::task::Poll;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

/// The system's, counting what each thread asks for.
struct Counting;

// SAFETY: the system's allocator, called as this one is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn the_loop_reads_the_handle_once() {
    for mode in GATHERING {
        let mut plain = Plain::new();
        let (mut gather, target) = (plain.gather(mode), plain.target());
        let (maps, before) = (plain.knobs.maps.load(Ordering::Relaxed), ALLOCATIONS.get());
        for number in 0..200 {
            gather.start(number, target, MESSAGE_BYTES, MESSAGE_BYTES).unwrap();
            while gather.poll(number) != Poll::Ready(Ok(MESSAGE_BYTES)) {}
        }
        assert_eq!(ALLOCATIONS.get() - before, 0, "{mode}");
        assert_eq!(plain.knobs.reads.load(Ordering::Relaxed), 1, "{mode}");
        assert_eq!(plain.knobs.maps.load(Ordering::Relaxed), maps, "{mode}");
        assert!(plain.received() == plain.sent(), "{mode}");
    }
    // The count counts.
    let before = ALLOCATIONS.get();
    drop(std::hint::black_box(Box::new(5)));
    assert_eq!(ALLOCATIONS.get() - before, 1);
}
