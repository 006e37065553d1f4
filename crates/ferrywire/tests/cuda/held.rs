//! Streams that wait for transfers hold up nothing that the transfers need.

use super::{gpu, is_alone, other_gpu, passes};
use ferrywire::memory::cuda::CudaStream;
use ferrywire::{Endpoint, Peer, Region};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

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
    let source = connecting.register_cuda(0, BYTES).unwrap();
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
}

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
        let [target, spare] = [(); 2].map(|()| accepting.register_cuda(other.index(), BYTES).unwrap());
        let (kept, goes) = (join(&accepting), join(&accepting));
        kept.move_through(&target);
        goes.move_through(&target);
        let streams = [gpu.stream().unwrap(), other.stream().unwrap()];
        let received = kept.far.recv(1, &target, 0, BYTES as u64).unwrap();
        streams.iter().for_each(|stream| received.hold(stream).unwrap());
        // A peer goes, with its rings at either end; memory goes; another peer comes.
        goes.near.close(LONG).unwrap();
        let Pair { source, connecting, .. } = goes;
        drop((source, connecting, spare));
        let comes = join(&accepting);
        comes.move_through(&accepting.register_cuda(other.index(), BYTES).unwrap());
        kept.source.write_at(0, &[5; BYTES]).unwrap();
        kept.near.send(1, &kept.source, 0, BYTES as u64).unwrap().wait(LONG).unwrap();
        assert_eq!(received.wait(LONG), Ok(BYTES as u64));
        streams.iter().for_each(|stream| stream.wait(LONG).unwrap());
        let mut found = vec![0; BYTES];
        target.read_at(0, &mut found).unwrap();
        assert!(found.iter().all(|byte| *byte == 5));
    });
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
        let target = accepting.register_cuda(gpus[1].index(), BYTES).unwrap();
        let pair = join(&accepting);
        let streams: Vec<CudaStream> = (0..64).map(|at| gpus[at % 2].stream().unwrap()).collect();
        let received = pair.far.recv(1, &target, 0, BYTES as u64).unwrap();
        streams.iter().for_each(|stream| received.hold(stream).unwrap());
        pair.move_through(&target);
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
