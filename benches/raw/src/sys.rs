//! The few system calls that the standard library lacks. All `unsafe` of this program is here.

use std::io;
use std::mem::{MaybeUninit, size_of};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;

/// Cores this process may run on, in order.
pub fn cores() -> Vec<usize> {
    let mut set = MaybeUninit::<libc::cpu_set_t>::zeroed();
    // SAFETY: the pointer is to a cpu_set_t of the given size, and all-zero is a valid (empty) set.
    let set = unsafe {
        libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), set.as_mut_ptr());
        set.assume_init()
    };
    // SAFETY: the index stays below CPU_SETSIZE, so the read is inside the set.
    (0..libc::CPU_SETSIZE as usize).filter(|&core| unsafe { libc::CPU_ISSET(core, &set) }).collect()
}

/// Pins the calling thread to one core.
pub fn pin(core: usize) -> io::Result<()> {
    // SAFETY: all-zero is a valid (empty) set.
    let mut set: libc::cpu_set_t = unsafe { MaybeUninit::zeroed().assume_init() };
    // SAFETY: `core` comes from `cores`, hence is below CPU_SETSIZE.
    unsafe { libc::CPU_SET(core, &mut set) };
    // SAFETY: the pointer is to an initialised set of the given size.
    check(unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set) })
}

/// CPU seconds, user and system, that this process has used so far.
pub fn cpu_seconds() -> f64 {
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the pointer is to an rusage; all-zero is a valid one if the call fails.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr());
        usage.assume_init()
    };
    let seconds = |t: libc::timeval| t.tv_sec as f64 + t.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}

/// Segments this connection has sent again.
pub fn retransmits(stream: &TcpStream) -> u64 {
    let mut info = MaybeUninit::<libc::tcp_info>::zeroed();
    let mut length = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: pointer and length describe one tcp_info; the kernel writes at most `length` bytes, the rest stays
    // zero, and every bit pattern of its integers is valid.
    let info = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &mut length,
        );
        info.assume_init()
    };
    u64::from(info.tcpi_total_retrans)
}

/// Waits until one of the listeners has a connection, and returns its index.
pub fn wait_readable(listeners: &[TcpListener]) -> io::Result<usize> {
    let poll = |l: &TcpListener| libc::pollfd { fd: l.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let mut fds: Vec<_> = listeners.iter().map(poll).collect();
    loop {
        // SAFETY: pointer and count describe the vector.
        let ready = unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, -1) };
        if ready < 0 && io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            return Err(io::Error::last_os_error());
        }
        if let Some(index) = fds.iter().position(|fd| fd.revents != 0) {
            return Ok(index);
        }
    }
}

/// Asks the kernel to end this process when its parent ends, so that no server outlives a killed client.
pub fn die_with_parent() -> io::Result<()> {
    // SAFETY: PR_SET_PDEATHSIG takes a signal number and touches no memory.
    check(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) })
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Asks for huge pages for memory that no thread has touched yet.
pub fn prefer_huge_pages(memory: &mut [std::mem::MaybeUninit<u8>]) {
    let start = (memory.as_ptr() as usize).next_multiple_of(4096);
    let end = (memory.as_ptr() as usize + memory.len()) / 4096 * 4096;
    if start < end {
        // SAFETY: whole pages within memory that we hold; the advice changes no byte.
        unsafe { libc::madvise(start as *mut libc::c_void, end - start, libc::MADV_HUGEPAGE) };
    }
}
