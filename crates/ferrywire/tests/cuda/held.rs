//! Streams that wait for transfers hold up nothing that the transfers need.

use super::{gpu, is_alone, is_real, of_stand_in, other_gpu, passes};
use ferrywire::{Endpoint, Peer, Region};
use ferrywire_memory::cuda::{CudaEvent, CudaGpu, CudaStream, PinnedBuffer, deferred_free};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(60);
const BYTES: usize = 1 << 20;

/// Fails, rather than waiting for ever, when `body` does not come to its end.
fn in_time(body: impl FnOnce() + Send + 'static) {
    let (ended, end) = channel::<()>();
    let thread = std::thread::spawn(move || {
        let _ended = ended;
        body();
    });
    match end.recv_timeout(2 * LONG) {
        Err(RecvTimeoutError::Timeout) => panic!("something waits for a stream that waits for a transfer"),
        _ => thread.join().unwrap(),
    }
}

/// Work of a GPU, in a stream of its own, that ends when this value is dropped.
pub struct Unended {
    stream: CudaStream,
    flag: PinnedBuffer,
}

impl Unended {
    pub fn new(gpu: &Arc<CudaGpu>) -> Unended {
        let (stream, flag) = (gpu.stream().unwrap(), gpu.pinned(size_of::<u64>()).unwrap());
        // SAFETY: stream and flag live until the work has ended.
        unsafe { CudaStream::wait_flag_raw(gpu, stream.raw(), flag.address(), 1) }.unwrap();
        Unended { stream, flag }
    }
}

impl Drop for Unended {
    fn drop(&mut self) {
        // SAFETY: an aligned number, to which only this store writes.
        unsafe { AtomicU64::from_ptr(self.flag.as_ptr().cast()) }.store(1, Ordering::SeqCst);
        let _ = self.stream.finish();
    }
}

/// Runs `body` on a thread of its own; returns whether it comes to its end in far more time than it needs.
pub fn ends<T: Send + 'static>(body: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (ended, end) = channel();
    std::thread::spawn(move || ended.send(body()));
    end.recv_timeout(LONG / 4).ok()
}

struct Pair {
    near: Peer,
    far: Peer,
    source: Region,
    connecting: Endpoint,
}

/// A peer of `accepting` with memory of a GPU.
fn join(accepting: &Endpoint) -> Pair {
    let connecting = Endpoint::builder().build().unwrap();
    let near = connecting.connect(accepting.listen_addresses()[0], LONG).unwrap();
    let far = accepting.accept(LONG).unwrap();
    let source = connecting.alloc_cuda(0, BYTES).unwrap();
    Pair { near, far, source, connecting }
}

impl Pair {
    /// Moves bytes both ways, so that every channel has what it needs for that.
    fn move_through(&self, target: &Region) {
        let (remote, len) = (target.descriptor(), BYTES as u64);
        for _ in 0..8 {
            self.near.write(&self.source, 0, &remote, 0, len).unwrap().wait(LONG).unwrap();
            self.near.read(&self.source, 0, &remote, 0, len).unwrap().wait(LONG).unwrap();
        }
    }

    /// Moves little both ways, and verifies it.
    fn move_little(&self, target: &Region) {
        let remote = target.descriptor();
        for (bytes, salt) in LITTLE.into_iter().zip(1..) {
            let (at, len) = ((BYTES / 2 + bytes) as u64, bytes as u64);
            let written: Vec<u8> = (0..bytes).map(|at| (at % 251) as u8 ^ salt).collect();
            // A byte before and behind stay as they are.
            let looks = |region: &Region, at: u64, around: u8| {
                let mut found = vec![0; bytes + 2];
                region.read_at(at - 1, &mut found).unwrap();
                assert!(
                    found[1..=bytes] == written && (found[0], found[bytes + 1]) == (around, around),
                    "{bytes}"
                );
            };
            self.source.write_at(at, &written).unwrap();
            self.near.write(&self.source, at, &remote, at, len).unwrap().wait(LONG).unwrap();
            looks(target, at, 0);
            self.near.read(&self.source, len, &remote, at, len).unwrap().wait(LONG).unwrap();
            looks(&self.source, len, 0);
            for (region, at) in [(&self.source, at), (target, at), (&self.source, len)] {
                region.write_at(at, &vec![0; bytes]).unwrap();
            }
        }
    }

    /// Sends messages that travel at once, to receives that are posted before them, and after.
    fn send_little(&self, target: &Region) {
        let (mut tag, mut posted) = (100, Vec::new());
        for bytes in LITTLE.into_iter().filter(|bytes| *bytes <= EAGER).map(|bytes| bytes as u64) {
            tag += 2;
            posted.push((tag, bytes, self.far.recv(tag, target, 0, bytes).unwrap()));
            for tag in [tag, tag + 1] {
                self.near.send(tag, &self.source, 0, bytes).unwrap().wait(LONG).unwrap();
            }
            posted.push((tag + 1, bytes, self.far.recv(tag + 1, target, 0, bytes).unwrap()));
        }
        for (tag, bytes, received) in posted {
            assert_eq!(received.wait(LONG), Ok(bytes), "{tag}");
        }
    }
}

/// Longer messages wait for their receive.
const EAGER: usize = 64 << 10;
/// Lengths that a driver has the multiprocessors copy to a GPU, whose queues are those in which streams wait; it copies longer
/// ones, and rectangles, by its copy engines. (Of a single byte no rectangle can be made.)
const LITTLE: [usize; 10] = [2, 3, 8, 1001, 4096, 12_345, 24 << 10, 65_535, 65_536, 65_537];

/// A driver frees memory only when all work of the GPU is done. So a peer that went took the transfers of others along,
/// if a stream waited for one of them.
#[test]
fn nothing_is_freed_while_a_stream_waits_for_a_transfer() {
    let Some(gpu) = gpu() else { return };
    if !is_alone("held::nothing_is_freed_while_a_stream_waits_for_a_transfer") {
        return;
    }
    in_time(move || {
        let accepting = Endpoint::builder()
            .listen("127.0.0.1:0".parse().unwrap())
            .channels(2)
            .threads(1)
            .build()
            .unwrap();
        let other = other_gpu(&gpu);
        let [target, spare] = [(); 2].map(|()| accepting.alloc_cuda(other.index(), BYTES).unwrap());
        let (kept, goes) = (join(&accepting), join(&accepting));
        kept.move_through(&target);
        goes.move_through(&target);
        let streams = [gpu.stream().unwrap(), other.stream().unwrap()];
        let received = kept.far.recv(1, &target, 0, BYTES as u64).unwrap();
        streams.iter().for_each(|stream| received.block_stream(stream).unwrap());
        // A peer goes, with its rings at either end; memory goes; another peer comes.
        goes.near.close(LONG).unwrap();
        let Pair { source, connecting, .. } = goes;
        drop((source, connecting, spare));
        let comes = join(&accepting);
        comes.move_through(&accepting.alloc_cuda(other.index(), BYTES).unwrap());
        kept.source.write_at(0, &[5; BYTES]).unwrap();
        kept.near.send(1, &kept.source, 0, BYTES as u64).unwrap().wait(LONG).unwrap();
        assert_eq!(received.wait(LONG), Ok(BYTES as u64));
        streams.iter().for_each(|stream| stream.wait(LONG).unwrap());
        let mut found = vec![0; BYTES];
        target.read_at(0, &mut found).unwrap();
        assert!(found.iter().all(|byte| *byte == 5));
    });
}

/// A driver may wait for all of a GPU's work before it loads a kernel. A thread that moved data to another GPU waited for that too, if
/// it needed that GPU's kernels for the first time.
#[test]
fn loading_kernels_behind_a_stream_that_waits_holds_up_no_transfer_to_another_gpu() {
    let Some(gpu) = gpu() else { return };
    let other = other_gpu(&gpu);
    if is_real(&gpu) || other.index() == gpu.index() {
        return println!("SKIPPED: needs two GPUs of the stand-in, whose driver surely waits");
    }
    if !is_alone("held::loading_kernels_behind_a_stream_that_waits_holds_up_no_transfer_to_another_gpu") {
        return;
    }
    in_time(move || {
        let accepting = Endpoint::builder().listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
        let connecting = Endpoint::builder().build().unwrap();
        let near = connecting.connect(accepting.listen_addresses()[0], LONG).unwrap();
        let far = accepting.accept(LONG).unwrap();
        let target = accepting.alloc_cuda(gpu.index(), BYTES).unwrap();
        let source = connecting.register(vec![5; BYTES]).unwrap();
        let stream = other.stream().unwrap();
        let received = far.recv(1, &target, 0, BYTES as u64).unwrap();
        received.block_stream(&stream).unwrap();
        let registering = std::thread::spawn(move || {
            accepting.alloc_cuda(other.index(), BYTES).unwrap();
            accepting
        });
        // Until it waits there, as far as this thread can see.
        std::thread::sleep(Duration::from_millis(300));
        near.send(1, &source, 0, BYTES as u64).unwrap().wait(LONG).unwrap();
        assert_eq!(received.wait(LONG), Ok(BYTES as u64));
        stream.wait(LONG).unwrap();
        registering.join().unwrap();
        let mut found = vec![0; BYTES];
        target.read_at(0, &mut found).unwrap();
        assert!(found.iter().all(|byte| *byte == 5));
    });
}

/// Regression: one lock was for all GPUs. A free waited for a kernel, which waited for a kernel of another GPU, and the thread that
/// was about to launch that one waited for the free.
#[test]
fn a_free_that_waits_for_a_kernel_holds_up_no_stream_of_another_gpu() {
    let Some(gpu) = gpu() else { return };
    let other = other_gpu(&gpu);
    let Some(frees_waiting) = of_stand_in(c"frees_waiting").filter(|_| other.index() != gpu.index()) else {
        return println!("SKIPPED: needs two GPUs of the stand-in, which says when a free waits");
    };
    if !is_alone("held::a_free_that_waits_for_a_kernel_holds_up_no_stream_of_another_gpu") {
        return;
    }
    // SAFETY: the stand-in has this `int`, which is only used as an atomic.
    let frees_waiting = unsafe { AtomicI32::from_ptr(frees_waiting.cast()) };
    let accepting = Endpoint::builder().listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
    let target = accepting.alloc_cuda(other.index(), BYTES).unwrap();
    let pair = join(&accepting);
    let (received, goes) =
        (pair.far.recv(1, &target, 0, BYTES as u64).unwrap(), gpu.alloc(BYTES, 4096).unwrap());
    let stream = Arc::new(other.stream().unwrap());
    let kernel = Unended::new(&gpu);
    let frees = std::thread::spawn(move || drop(goes));
    let start = Instant::now();
    while frees_waiting.load(Ordering::SeqCst) == 0 {
        assert!(start.elapsed() < LONG, "memory is freed without waiting for the kernel");
        std::thread::yield_now();
    }
    let (received, blocked) = (Arc::new(received), stream.clone());
    let blocks = received.clone();
    let outcome = ends(move || blocks.block_stream(&blocked).unwrap());
    drop(kernel);
    frees.join().unwrap();
    pair.near.send(1, &pair.source, 0, BYTES as u64).unwrap().wait(LONG).unwrap();
    assert_eq!(received.wait(LONG), Ok(BYTES as u64));
    stream.wait(LONG).unwrap();
    assert!(outcome.is_some(), "it waited until the memory was freed");
}

/// Regression: whether a stream waits was asked once for all that was kept, and each free waits for all work of its GPU.
#[test]
fn freeing_stops_once_a_stream_of_another_gpu_waits_for_a_transfer() {
    let Some(gpu) = gpu() else { return };
    let other = other_gpu(&gpu);
    let Some(frees_waiting) = of_stand_in(c"frees_waiting").filter(|_| other.index() != gpu.index()) else {
        return println!("SKIPPED: needs two GPUs of the stand-in, which says when a free waits");
    };
    if !is_alone("held::freeing_stops_once_a_stream_of_another_gpu_waits_for_a_transfer") {
        return;
    }
    // SAFETY: the stand-in has this `int`, which is only used as an atomic.
    let frees_waiting = unsafe { AtomicI32::from_ptr(frees_waiting.cast()) };
    in_time(move || {
        let accepting = Endpoint::builder().listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
        let target = accepting.alloc_cuda(other.index(), BYTES).unwrap();
        let pair = join(&accepting);
        let received = pair.far.recv(1, &target, 0, BYTES as u64).unwrap();
        let [first, second, last] = [(); 3].map(|()| gpu.alloc(BYTES, 4096).unwrap());
        let (waits, behind) = (other.stream().unwrap(), gpu.stream().unwrap());
        let (event, kernel) = (CudaEvent::new(&other).unwrap(), Unended::new(&gpu));
        // A thread that moves data keeps what it drops.
        let moving = deferred_free::moving();
        drop((first, second));
        drop(moving);
        let frees = std::thread::spawn(move || drop(last));
        let start = Instant::now();
        while frees_waiting.load(Ordering::SeqCst) == 0 {
            assert!(start.elapsed() < LONG, "memory is freed without waiting for the kernel");
            std::thread::yield_now();
        }
        received.block_stream(&waits).unwrap();
        waits.record(&event).unwrap();
        behind.wait_event(&event).unwrap();
        drop(kernel);
        let outcome = ends(move || frees.join().unwrap());
        pair.near.send(1, &pair.source, 0, BYTES as u64).unwrap().wait(LONG).unwrap();
        assert_eq!(received.wait(LONG), Ok(BYTES as u64));
        [waits, behind].iter().for_each(|stream| stream.wait(LONG).unwrap());
        assert!(outcome.is_some(), "it waited for the transfer");
    });
}

/// Regression: whoever freed memory of one GPU freed what was kept of all others too, and waited for their work.
#[test]
fn memory_is_freed_though_work_of_another_gpu_does_not_end() {
    let Some(gpu) = gpu() else { return };
    let other = other_gpu(&gpu);
    if other.index() == gpu.index() {
        return;
    }
    if !is_alone("held::memory_is_freed_though_work_of_another_gpu_does_not_end") {
        return;
    }
    let [freed, kept] = [&gpu, &other].map(|gpu| gpu.alloc(BYTES, 4096).unwrap());
    let kernel = Unended::new(&other);
    // A thread that moves data keeps what it drops.
    let moving = deferred_free::moving();
    drop(kept);
    drop(moving);
    let outcome = ends(move || drop(freed));
    drop(kernel);
    assert!(outcome.is_some(), "it waited for the other GPU");
}

/// Work of a GPU may be ordered behind a stream of another GPU that waits for a transfer.
#[test]
fn memory_is_kept_while_a_stream_of_another_gpu_waits_for_a_transfer() {
    let Some(gpu) = gpu() else { return };
    let other = other_gpu(&gpu);
    if !is_alone("held::memory_is_kept_while_a_stream_of_another_gpu_waits_for_a_transfer") {
        return;
    }
    let accepting = Endpoint::builder().listen("127.0.0.1:0".parse().unwrap()).build().unwrap();
    let target = accepting.alloc_cuda(gpu.index(), BYTES).unwrap();
    let pair = join(&accepting);
    let dropped = other.alloc(BYTES, 4096).unwrap();
    let (waits, behind) = (gpu.stream().unwrap(), other.stream().unwrap());
    let received = pair.far.recv(1, &target, 0, BYTES as u64).unwrap();
    received.block_stream(&waits).unwrap();
    let event = CudaEvent::new(&gpu).unwrap();
    waits.record(&event).unwrap();
    behind.wait_event(&event).unwrap();
    let outcome = ends(move || drop(dropped));
    pair.near.send(1, &pair.source, 0, BYTES as u64).unwrap().wait(LONG).unwrap();
    assert_eq!(received.wait(LONG), Ok(BYTES as u64));
    [waits, behind].iter().for_each(|stream| stream.wait(LONG).unwrap());
    assert!(outcome.is_some(), "it waited for the transfer");
}

/// Streams share the queues of the hardware: with many that wait, copies must not stand behind one of them.
#[test]
fn copies_pass_many_streams_that_wait() {
    let Some(gpu) = gpu() else { return };
    if !is_alone("held::copies_pass_many_streams_that_wait") {
        return;
    }
    in_time(move || {
        let accepting =
            Endpoint::builder().listen("127.0.0.1:0".parse().unwrap()).channels(16).build().unwrap();
        let gpus = [gpu.clone(), other_gpu(&gpu)];
        let target = accepting.alloc_cuda(gpus[1].index(), BYTES).unwrap();
        let pair = join(&accepting);
        let streams: Vec<CudaStream> = (0..64).map(|at| gpus[at % 2].stream().unwrap()).collect();
        let received = pair.far.recv(1, &target, 0, BYTES as u64).unwrap();
        streams.iter().for_each(|stream| received.block_stream(stream).unwrap());
        pair.move_through(&target);
        pair.move_little(&target);
        pair.send_little(&target);
        pair.near.send(1, &pair.source, 0, BYTES as u64).unwrap().wait(LONG).unwrap();
        assert_eq!(received.wait(LONG), Ok(BYTES as u64));
        streams.iter().for_each(|stream| stream.wait(LONG).unwrap());
    });
}

/// Programs that overlap computing and collectives ask a driver for one queue, in which a single stream that waits holds up
/// whatever is the multiprocessors'.
#[test]
fn nothing_is_held_up_where_all_streams_share_one_queue() {
    if gpu().is_none() {
        return;
    }
    let one_queue = [("CUDA_DEVICE_MAX_CONNECTIONS", "1")];
    passes("held::nothing_is_freed_while_a_stream_waits_for_a_transfer", &one_queue);
    passes("held::copies_pass_many_streams_that_wait", &one_queue);
}
