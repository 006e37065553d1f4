//! Listening, connecting and accepting: the calls of the table.
//!
//! One accept per listener. The accept thread waits in accept(2) without limit; a listener that is closed meanwhile
//! would be freed under it, which ends the process here.
//! Invariant: a listener's pointer stays known until `closeListen`.
//! Read next: `attempt.rs`.

use std::collections::HashMap;
use std::ffi::c_void;
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::{Arc, LazyLock, Mutex};
use std::thread;
use std::time::Duration;

use ferrywire_ncclnet::abi::{DeviceHandle, ResultCode};
use socket2::{Domain, Protocol, Socket, Type};

use crate::attempt::Attempt;
use crate::cell::Cell;
use crate::comm::{Comm, Outcome};
use crate::devices;
use crate::faults::Direction;
use crate::gpu::{self, GpuPool};
use crate::handle::{self, HANDLE_BYTES_USED, Handle};
use crate::handshake;
use crate::log::{exit_1, info, misuse, warning};
use crate::plugin::{Plugin, manager_folder, plugin};
use crate::switches::DpManager;
use crate::sync::locked;
use crate::unpack::Unpack;

static LISTENERS: LazyLock<Mutex<HashMap<usize, Arc<Listener>>>> = LazyLock::new(Mutex::default);
/// Number of listeners that were opened and closed so far.
static COUNTS: Mutex<Counts> = Mutex::new(Counts { opened: 0, closed: 0 });
/// The pointer that a wrong handle contains.
const FOREIGN_POINTER: usize = 0x1000;
/// Most connections that wait to be accepted.
const BACKLOG: i32 = 64;

struct Counts {
    opened: u64,
    closed: u64,
}

/// A listen comm, with its two sockets.
#[derive(Debug)]
struct Listener {
    device: usize,
    data: Socket,
    control: Socket,
    /// Number of the GPU to which packets are steered: the current one when `listen` was called.
    steered_to: Option<i32>,
    accepting: Mutex<Option<Accepting>>,
}

/// The single accept of a listener.
#[derive(Debug)]
struct Accepting {
    attempt: &'static Attempt,
    /// Number of the GPU whose pool the comm uses: the current one at the first call of `accept`.
    device: Option<i32>,
}

/// `listen`: opens two sockets and fills the handle.
pub fn listen(device: i32, bytes: &mut [u8; HANDLE_BYTES_USED]) -> Outcome<*mut c_void> {
    let plugin = plugin()?;
    let (index, nic) = plugin.device(device)?;
    let control_address = control_address(plugin, nic.address)?;
    let open = || Ok((listen_on(nic.address)?, listen_on(control_address)?));
    let ((data, data_at), (control, control_at)) = open().map_err(system_error)?;
    let handle = Handle {
        data: data_at,
        control: control_at,
        data_sockets: plugin.settings.data_sockets,
        threads: plugin.settings.threads,
        redirected: plugin.settings.control_interface.is_some(),
    };
    handle.write(bytes);
    if plugin.switches.lie_handle {
        handle::set_attempt(bytes, FOREIGN_POINTER);
    }
    let steered_to = gpu::current_device();
    let listener = Listener { device: index, data, control, steered_to, accepting: Mutex::default() };
    let listener = Arc::new(listener);
    // The listener's address is the host's pointer, used only as an identifier.
    let address = Arc::as_ptr(&listener) as usize;
    locked(&LISTENERS).insert(address, listener);
    count(plugin, |counts| counts.opened += 1);
    Ok(address as *mut c_void)
}

/// `connect`: starts an attempt, or polls it; returns the comm's pointer when it is ready. The first call starts the
/// attempt and checks no further, as in the real plugin: it gives null however soon the attempt ends.
pub fn connect(device: i32, bytes: &mut [u8; HANDLE_BYTES_USED]) -> Outcome<*mut c_void> {
    let plugin = plugin()?;
    let attempt = match handle::attempt(bytes) {
        0 => {
            let attempt = start_connect(plugin, device, bytes)?;
            handle::set_attempt(bytes, attempt.address());
            if plugin.switches.null_first {
                return Ok(std::ptr::null_mut());
            }
            attempt
        }
        address => Attempt::at(address, "connect"),
    };
    let comm = poll(plugin, attempt, "connect")?;
    Ok(comm.map_or(std::ptr::null_mut(), Cell::leak))
}

fn start_connect(
    plugin: &'static Plugin,
    device: i32,
    bytes: &[u8; HANDLE_BYTES_USED],
) -> Outcome<&'static Attempt> {
    let (index, nic) = plugin.device(device)?;
    let Some(handle) = Handle::read(bytes) else {
        warning!("connect was called with bytes that are no handle");
        return Err(ResultCode::INTERNAL_ERROR);
    };
    let control_address = control_address(plugin, nic.address)?;
    let (own, gpu) = (nic.address, gpu::current_device());
    let work = move || {
        let sockets = handshake::connect(&handle, own, control_address, &plugin.plan())?;
        let mut comm = plugin.comm(Direction::Send, index, sockets, handle.threads);
        comm.gpu = gpu;
        Ok(comm)
    };
    Attempt::start(format!("tcpx-connect-{index}"), work).map_err(system_error)
}

/// `accept`: starts the attempt, or polls it; returns the comm's pointer when it is ready. `device_handle` is null if
/// the host gave none. As in `connect`, the first call gives null, so it never imports a receive pool.
///
/// # Safety
/// `device_handle` must be null or writable.
pub unsafe fn accept(listener: *mut c_void, device_handle: *mut DeviceHandle) -> Outcome<*mut c_void> {
    let plugin = plugin()?;
    let listener = find(listener, "accept");
    let mut accepting = locked(&listener.accepting);
    if accepting.is_none() {
        *accepting = Some(start_accept(plugin, &listener)?);
        if plugin.switches.null_first {
            return Ok(std::ptr::null_mut());
        }
    }
    let Some(Accepting { attempt, device }) = &*accepting else { return Err(ResultCode::INTERNAL_ERROR) };
    let Some(mut comm) = poll(plugin, attempt, "accept")? else { return Ok(std::ptr::null_mut()) };
    // SAFETY: the caller promises null or a writable pointer.
    if let Some(device_handle) = unsafe { device_handle.as_mut() } {
        equip(plugin, &mut comm, listener.steered_to, *device, device_handle)?;
    }
    Ok(Cell::leak(comm))
}

fn start_accept(plugin: &'static Plugin, listener: &Arc<Listener>) -> Outcome<Accepting> {
    let (of_thread, device) = (listener.clone(), listener.device);
    let (sockets, threads) = (plugin.settings.data_sockets, plugin.settings.threads);
    let work = move || {
        let sockets = handshake::accept(&of_thread.control, &of_thread.data, sockets, &plugin.plan())?;
        Ok(plugin.comm(Direction::Recv, device, sockets, threads))
    };
    let attempt = Attempt::start(format!("tcpx-accept-{device}"), work).map_err(system_error)?;
    Ok(Accepting { attempt, device: gpu::current_device() })
}

/// Gives a receive comm its pool and metadata, and describes them to the host. If packets are steered to another GPU,
/// they go into that GPU's pool, and the host reads elsewhere.
fn equip(
    plugin: &Plugin,
    comm: &mut Comm,
    steered_to: Option<i32>,
    device: Option<i32>,
    device_handle: &mut DeviceHandle,
) -> Outcome<()> {
    ask_manager(plugin);
    let no_memory = || {
        warning!("no memory for the pool or the metadata of GPU {device:?}");
        ResultCode::UNHANDLED_CUDA_ERROR
    };
    let pool_of = |device: Option<i32>| match device {
        Some(device) => GpuPool::of(device, &plugin.switches).map(Some).ok_or_else(no_memory),
        None => Ok(None),
    };
    let import = |pool: &GpuPool| pool.import(&plugin.switches).ok_or_else(no_memory);
    let (base, bytes) = match pool_of(device)? {
        Some(pool) => (import(&pool)?, pool.bytes()),
        None => (0, 0),
    };
    // The thread of `listen` had the default GPU if it was called before there was a GPU.
    let steered_to = steered_to.or(device.map(|_| gpu::DEVICE_DEFAULT));
    if let Some(landing) = pool_of(steered_to)? {
        if steered_to != device {
            // Packets need a pool even if the host cannot read it.
            import(&landing)?;
        }
        comm.set_landing(landing);
    }
    let unpack = Unpack::new(device, base, bytes, &comm.shared.faults).ok_or_else(no_memory)?;
    unpack.describe(device_handle);
    comm.set_unpack(unpack);
    Ok(())
}

/// Injects the dp-manager's fault at the moment when it is asked for the pool.
fn ask_manager(plugin: &Plugin) {
    match plugin.switches.dp_manager {
        DpManager::On | DpManager::Off | DpManager::Refuse => {}
        DpManager::Gone => {
            let socket = format!("{}/get_gpu_fd_0000:04:00.0", manager_folder());
            warning!("unix client {socket}, gpumem fd client connect failed unix client connect() error: 2");
            exit_1(format_args!("TCPXASSERT src/gpu/cuda_wrapper.cu:203 -> 2"));
        }
        DpManager::Hang => loop {
            thread::sleep(Duration::from_secs(3600));
        },
    }
}

/// `closeListen`: frees a listener; misuse while its accept thread runs.
pub fn close_listen(pointer: *mut c_void) {
    let listener = find(pointer, "closeListen");
    if locked(&listener.accepting).as_ref().is_some_and(|accepting| accepting.attempt.is_running()) {
        misuse(format_args!("closeListen while its accept thread runs"));
    }
    locked(&LISTENERS).remove(&(pointer as usize));
    if let Ok(plugin) = plugin() {
        count(plugin, |counts| counts.closed += 1);
    }
}

/// Counts a listener, and logs the counts with `stats=on`: under the lock, so that the lines are in order.
fn count(plugin: &Plugin, add: impl FnOnce(&mut Counts)) {
    let mut counts = locked(&COUNTS);
    add(&mut counts);
    if plugin.switches.stats {
        info!("stats: listeners opened={} closed={}", counts.opened, counts.closed);
    }
}

fn find(pointer: *mut c_void, call: &str) -> Arc<Listener> {
    let known = locked(&LISTENERS).get(&(pointer as usize)).cloned();
    known.unwrap_or_else(|| misuse(format_args!("{call} of something that is no listen comm: {pointer:?}")))
}

fn poll(plugin: &Plugin, attempt: &Attempt, call: &str) -> Outcome<Option<Box<Comm>>> {
    if !plugin.switches.null_first {
        attempt.wait();
    }
    attempt.poll(call, plugin.switches.attempt_once)
}

/// The address of control sockets: the NIC's, unless another interface was named.
fn control_address(plugin: &Plugin, own: Ipv4Addr) -> Outcome<Ipv4Addr> {
    let Some(name) = &plugin.settings.control_interface else { return Ok(own) };
    devices::address_of(name).ok_or_else(|| {
        warning!("NCCL_GPUDIRECTTCPX_CTRL_DEV={name} has no address");
        ResultCode::INTERNAL_ERROR
    })
}

fn listen_on(address: Ipv4Addr) -> io::Result<(Socket, SocketAddrV4)> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP))?;
    socket.bind(&SocketAddrV4::new(address, 0).into())?;
    socket.listen(BACKLOG)?;
    let bound = socket.local_addr()?.as_socket_ipv4();
    Ok((socket, bound.ok_or_else(|| io::Error::other("not an IPv4 address"))?))
}

fn system_error(e: io::Error) -> ResultCode {
    warning!("{e}");
    ResultCode::SYSTEM_ERROR
}
