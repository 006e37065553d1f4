//! The plugin, and two connected comms in this process.

use std::path::PathBuf;
use std::sync::Once;
use std::thread;
use std::time::{Duration, Instant};

use ferrywire_ncclnet::abi::Version;
use ferrywire_ncclnet::{Library, MemoryHandle, Plugin, Posted, RecvBuffer, RecvComm, Request, SendComm};

/// Longer than any step of a test takes unless it hangs.
pub const DEADLINE: Duration = Duration::from_secs(170);
/// Host memory needs no registration.
pub const NO_MEMORY: MemoryHandle = MemoryHandle(std::ptr::null_mut());

/// The shared object, which cargo puts beside the test programs.
pub fn file() -> PathBuf {
    std::env::current_exe().unwrap().with_file_name("libnccl_net_ferrywire.so")
}

/// The plugin on loopback only, with the table of `version`.
pub fn plugin(version: Version) -> Plugin {
    static LOOPBACK: Once = Once::new();
    // SAFETY: before the plugin reads it, and no other code of these tests reads or writes the environment.
    LOOPBACK.call_once(|| unsafe {
        std::env::set_var("NCCL_SOCKET_IFNAME", "lo");
        // With few cores this thread would send nearly everything itself, because it receives too.
        std::env::set_var("FERRYWIRE_NCCL_THREADS", "2");
    });
    // SAFETY: the file is this project's own.
    unsafe { Library::open(file()).unwrap().load(Some(version)).unwrap() }
}

/// Calls `call` until it returns a value.
pub fn until<T>(what: &str, mut call: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(answer) = call() {
            return answer;
        }
        assert!(start.elapsed() < DEADLINE, "{what} takes too long");
        thread::yield_now();
    }
}

/// Two connected comms, closed on drop.
pub struct Pair {
    pub send: SendComm,
    pub recv: RecvComm,
}

impl Pair {
    pub fn new(plugin: &Plugin) -> Pair {
        Pair::over(plugin, 0)
    }

    pub fn over(plugin: &Plugin, device: i32) -> Pair {
        let (mut listener, handle) = plugin.listen(device).unwrap();
        let mut connecting = plugin.connect(device, &handle);
        let (mut send, mut recv) = (None, None);
        // In turn on one thread: neither call may wait for the other.
        until("connecting", || {
            if send.is_none() {
                send = connecting.poll().unwrap();
            }
            if recv.is_none() {
                recv = listener.accept().unwrap();
            }
            (send.is_some() && recv.is_some()).then_some(())
        });
        listener.close().unwrap();
        Pair { send: send.unwrap(), recv: recv.unwrap() }
    }

    pub fn isend(&self, bytes: &mut [u8]) -> Option<Request> {
        // SAFETY: the callers keep the bytes until the request is done.
        posted(unsafe { self.send.isend(bytes.as_mut_ptr().cast(), bytes.len(), 7, NO_MEMORY) })
    }

    pub fn irecv(&self, bytes: &mut [u8]) -> Option<Request> {
        let buffer =
            RecvBuffer { data: bytes.as_mut_ptr().cast(), bytes: bytes.len(), tag: 7, memory: NO_MEMORY };
        // SAFETY: as above.
        posted(unsafe { self.recv.irecv(&[buffer]) })
    }

    pub fn close(self) {
        self.send.close().unwrap();
        self.recv.close().unwrap();
    }
}

fn posted(posted: Posted) -> Option<Request> {
    match posted {
        Posted::Request(request) => Some(request),
        Posted::Null => None,
        Posted::Refused(error) => panic!("{error}"),
    }
}

/// The length of a message, once its request is done.
pub fn tested(comm: &ferrywire_ncclnet::Comm, request: Request) -> Option<i32> {
    // SAFETY: the request is of this comm, and not done.
    let tested = unsafe { comm.test(request) };
    assert!(tested.code.is_success(), "{}", tested.code);
    tested.done.then(|| tested.size(0).expect("sizes are written"))
}

/// Bytes that depend on their position and on the message.
pub fn pattern(seed: usize, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at.wrapping_mul(2654435761).wrapping_add(seed * 97) >> 7) as u8).collect()
}
