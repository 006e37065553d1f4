//! System calls that Rust's library lacks: the only unsafe code of the command.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::process::parent_id;
use std::process::Command;
use std::sync::atomic::{AtomicI32, Ordering};

/// Environment variable with the process id of the parent, for a child that ends with it. No option has this name.
const PARENT: &str = "FERRYWIRE_PARENT_PROCESS";

/// The signal that asked this process to end; 0 for none.
static INTERRUPTED: AtomicI32 = AtomicI32::new(0);

extern "C" fn note_interrupt(signal: libc::c_int) {
    INTERRUPTED.store(signal, Ordering::Relaxed);
}

/// Installs signal handlers: the first Ctrl-C or SIGTERM only sets [`interrupted`], and a second one kills
/// the process.
pub fn catch_interrupt() {
    // SAFETY: sigaction is plain data for which all zeroes is a valid value.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = note_interrupt as extern "C" fn(libc::c_int) as libc::sighandler_t;
    action.sa_flags = libc::SA_RESETHAND | libc::SA_RESTART;
    for signal in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: the handler only stores to an atomic, which is async-signal-safe; the pointers are valid.
        unsafe { libc::sigaction(signal, &action, std::ptr::null_mut()) };
    }
}

/// Whether Ctrl-C was pressed, or another process asked this one to end.
pub fn interrupted() -> bool {
    INTERRUPTED.load(Ordering::Relaxed) != 0
}

/// The exit status of an interrupted process, by the shells' convention.
pub fn interrupted_status() -> u8 {
    match INTERRUPTED.load(Ordering::Relaxed) {
        libc::SIGTERM => 128 + libc::SIGTERM as u8,
        _ => 128 + libc::SIGINT as u8,
    }
}

/// Interrupts a child process, which must not have been waited for yet.
pub fn interrupt(child: u32) {
    // SAFETY: `kill` takes two numbers.
    unsafe { libc::kill(child as libc::pid_t, libc::SIGINT) };
}

/// Whether the kernel lets this process use a congestion control, tried on a socket of its own.
pub fn may_use_congestion_control(name: &str) -> io::Result<bool> {
    let socket = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let (fd, bytes) = (socket.as_raw_fd(), name.len() as libc::socklen_t);
    // SAFETY: the descriptor is open, and the pointer is to as many bytes as are passed.
    let set =
        unsafe { libc::setsockopt(fd, libc::IPPROTO_TCP, libc::TCP_CONGESTION, name.as_ptr().cast(), bytes) };
    match set {
        0 => Ok(true),
        _ => match io::Error::last_os_error() {
            error if error.kind() == io::ErrorKind::PermissionDenied => Ok(false),
            error => Err(error),
        },
    }
}

/// CPU seconds (user and system) of this process.
pub fn cpu_seconds() -> f64 {
    // SAFETY: rusage is plain data for which all zeroes is a valid value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the pointer is to a whole rusage on this stack.
    unsafe { libc::getrusage(libc::RUSAGE_SELF, &mut usage) };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}

/// Names this process to a child of this command that calls [`die_with_parent`].
pub fn name_parent(command: &mut Command) -> &mut Command {
    command.env(PARENT, std::process::id().to_string())
}

/// Makes the kernel kill this process when its parent ends. If the parent has ended already, this process ends now.
pub fn die_with_parent() {
    // SAFETY: PR_SET_PDEATHSIG takes one integer and touches no memory.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    // Process 1 may be the parent, as in a container.
    let named = std::env::var(PARENT).ok().and_then(|id| id.parse::<u32>().ok());
    if named.is_some_and(|id| id != parent_id()) {
        exit_now(1);
    }
}

/// Takes standard output for this program alone; later prints of libraries go to standard error.
pub fn take_stdout() -> io::Result<File> {
    // SAFETY: `fcntl` takes only numbers. The new descriptor is exclusively this process's.
    let taken = unsafe { libc::fcntl(libc::STDOUT_FILENO, libc::F_DUPFD_CLOEXEC, 3) };
    // SAFETY: `dup2` takes only numbers.
    if taken < 0 || unsafe { libc::dup2(libc::STDERR_FILENO, libc::STDOUT_FILENO) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just made and has no other owner.
    Ok(unsafe { File::from_raw_fd(taken) })
}

/// Ends the process immediately, without destructors and exit handlers of libraries.
pub fn exit_now(status: i32) -> ! {
    // SAFETY: `_exit` takes a number and does not return.
    unsafe { libc::_exit(status) }
}

/// Name and address of every NIC that has an address.
pub fn nic_addresses() -> Vec<(String, IpAddr)> {
    let mut first: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: the pointer is to a pointer on this stack, which the call sets to a list of its own.
    if unsafe { libc::getifaddrs(&mut first) } != 0 {
        return Vec::new();
    }
    let mut found = Vec::new();
    let mut next = first;
    // SAFETY: each entry is valid until freeifaddrs below, and the last one's next is null.
    while let Some(entry) = unsafe { next.as_ref() } {
        // SAFETY: ifa_name of an entry is a string that ends with 0 and lives as long as the entry.
        let name = unsafe { CStr::from_ptr(entry.ifa_name) }.to_string_lossy().into_owned();
        // SAFETY: ifa_addr of an entry is null or valid, as address_of requires.
        found.extend(unsafe { address_of(entry.ifa_addr) }.map(|address| (name, address)));
        next = entry.ifa_next;
    }
    // SAFETY: the list came from getifaddrs, and nothing refers to it any more.
    unsafe { libc::freeifaddrs(first) };
    found
}

/// # Safety
/// `address` is null or points to a socket address of the size that its family requires.
unsafe fn address_of(address: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: the caller promises that the pointer is null or valid.
    match i32::from(unsafe { address.as_ref() }?.sa_family) {
        libc::AF_INET => {
            // SAFETY: an address of this family is a sockaddr_in.
            let v4 = unsafe { &*address.cast::<libc::sockaddr_in>() };
            Some(IpAddr::from(v4.sin_addr.s_addr.to_ne_bytes()))
        }
        libc::AF_INET6 => {
            // SAFETY: an address of this family is a sockaddr_in6.
            let v6 = unsafe { &*address.cast::<libc::sockaddr_in6>() };
            Some(IpAddr::from(v6.sin6_addr.s6_addr))
        }
        _ => None,
    }
}
