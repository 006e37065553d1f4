//! A socket of each process, from which `ferrywire watch` reads samples.
//!
//! The socket lies in a folder of its user below `/tmp`, which only that user and root can enter, and answers only
//! these. A process that ends leaves its socket; the next process of that user removes it.
//!
//! Invariant: a client that does not read its answer keeps one thread for [`ANSWER_TIMEOUT`], and no thread that
//! moves payload. Processes that do not answer keep a reader for that time together, not each.

use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ferrywire_sys::fork::Withheld;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::fork::PerProcess;
use crate::registry;
use crate::sample::ProcessSample;

const PREFIX: &str = "ferrywire-";
/// How the names of sockets end: of those that listen, and of those that do not yet.
const LISTENING: &str = "sock";
const STARTING: &str = "starting";
/// Longest time that a process is about to listen.
const STARTS_WITHIN: Duration = Duration::from_secs(60);
/// Why a folder with sockets is not used.
const NOT_PRIVATE: &str = "not a folder that its user alone owns and can enter; remove it";
/// Longest time that a reader may take for an answer, and that `watch` waits for one.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// Most sockets that are read at a time, since each takes a descriptor.
const READ_TOGETHER: usize = 256;
/// Most bytes of answers that a reader keeps at a time, beside those that come while it reads once from each.
const ANSWER_BYTES_MAX: usize = 64 << 20;
/// Pause after an error of `accept`, before the next call.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

fn folder_of(user: u32) -> PathBuf {
    PathBuf::from(format!("/tmp/{PREFIX}{user}"))
}

fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Offers this process's samples on a socket, once per process. A failure is logged: transfers do not depend on it.
pub(crate) fn start() {
    // A forked child has no threads of its parent, so it starts its own.
    static IS_STARTED: PerProcess<AtomicBool> = PerProcess::new(AtomicBool::default);
    if IS_STARTED.get().swap(true, Ordering::SeqCst) {
        return;
    }
    if let Err(error) = open() {
        tracing::debug!(%error, "cannot make the socket of this process for `ferrywire watch`, which will not show this process");
    }
}

fn open() -> io::Result<()> {
    let folder = folder_of(user());
    match fs::DirBuilder::new().mode(0o700).create(&folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    if !is_private(&folder, user()) {
        let why = format!("{}: {NOT_PRIVATE}", folder.display());
        return Err(io::Error::other(why));
    }
    remove_stale(&folder);
    // Processes of two PID namespaces may have the same process id.
    let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    let listener = listen(&folder, &format!("{}-{time:x}", std::process::id()))?;
    // In a forked child that lives on, the socket would seem to be that of a process that does not answer.
    let ends = (Withheld::new(listener.as_fd()), listener);
    thread::Builder::new().name("ferrywire-watch".into()).spawn(move || {
        let (_withheld, listener) = &ends;
        loop {
            match listener.accept() {
                Ok((stream, _)) => {
                    let _withheld = Withheld::new(stream.as_fd());
                    drop(answer(&stream));
                }
                Err(_) => thread::sleep(ACCEPT_PAUSE),
            }
        }
    })?;
    Ok(())
}

/// Makes a socket in a folder. It has the name of a socket from the moment on that it listens: before, another process
/// that starts would take it for that of one that has ended.
fn listen(folder: &Path, name: &str) -> io::Result<UnixListener> {
    let starting = folder.join(format!("{name}.{STARTING}"));
    let listener = UnixListener::bind(&starting)?;
    fs::rename(&starting, folder.join(format!("{name}.{LISTENING}"))).inspect_err(|_| {
        let _ = fs::remove_file(&starting);
    })?;
    Ok(listener)
}

/// Whether only this user and root can enter a folder.
fn is_private(folder: &Path, user: u32) -> bool {
    fs::symlink_metadata(folder)
        .is_ok_and(|found| found.is_dir() && found.uid() == user && found.mode() & 0o077 == 0)
}

/// Removes sockets that no process listens on any more, or that one was about to listen on when it was killed.
fn remove_stale(folder: &Path) {
    for path in ending(folder, STARTING) {
        let made = fs::symlink_metadata(&path).and_then(|found| found.modified());
        if made.is_ok_and(|made| made.elapsed().is_ok_and(|age| age > STARTS_WITHIN)) {
            let _ = fs::remove_file(path);
        }
    }
    for path in sockets(folder) {
        if connect(&path).is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused) {
            let _ = fs::remove_file(path);
        }
    }
}

fn sockets(folder: &Path) -> Vec<PathBuf> {
    ending(folder, LISTENING)
}

/// The files of a folder whose names end so.
fn ending(folder: &Path, wanted: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|end| end == wanted))
        .collect()
}

fn answer(mut stream: &UnixStream) -> io::Result<()> {
    let reader = credentials(stream)?.uid;
    if reader != user() && reader != 0 {
        return Ok(());
    }
    let end = Instant::now() + ANSWER_TIMEOUT;
    let answer = serde_json::to_vec(&registry::process())?;
    let mut rest = &answer[..];
    while !rest.is_empty() {
        stream.set_write_timeout(Some(left(end)?))?;
        let written = stream.write(rest)?;
        rest = &rest[written..];
    }
    Ok(())
}

/// The time left until `end`, as the timeout of one call; an error once it is over.
fn left(end: Instant) -> io::Result<Duration> {
    let left = end.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// A process that has a socket and gave no sample, or a folder in which no process can have a socket.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Path of the socket or of the folder.
    pub path: PathBuf,
    /// Why the process or folder gave no sample.
    pub why: String,
}

/// Samples of all processes of this host that use ferrywire: those of this user, for root those of every user. A process
/// with several libraries of ferrywire has a sample of each.
pub fn processes() -> (Vec<ProcessSample>, Vec<Failure>) {
    let (mut samples, mut failures, mut paths) = (Vec::new(), Vec::new(), Vec::new());
    for (user, folder) in folders() {
        // A folder that another user could write to may hold sockets of any program.
        if !is_private(&folder, user) {
            failures.push(Failure { path: folder, why: NOT_PRIVATE.into() });
            continue;
        }
        paths.extend(sockets(&folder));
    }
    for (path, answer) in paths.chunks(READ_TOGETHER).flat_map(read) {
        match answer {
            Ok(sample) => samples.push(sample),
            // The process of this socket has ended.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
            Err(error) => failures.push(Failure { path: path.clone(), why: error.to_string() }),
        }
    }
    samples.sort_by_cached_key(|sample| (sample.pid, sample.reader_pid, sample.face.clone()));
    (samples, failures)
}

/// The folders of sockets that exist, with their users.
fn folders() -> Vec<(u32, PathBuf)> {
    let own = user();
    if own != 0 {
        let there = |folder: &(u32, PathBuf)| fs::symlink_metadata(&folder.1).is_ok();
        return vec![(own, folder_of(own))].into_iter().filter(there).collect();
    }
    let entries = fs::read_dir("/tmp").into_iter().flatten().flatten();
    let users =
        entries.filter_map(|entry| entry.file_name().to_str()?.strip_prefix(PREFIX)?.parse::<u32>().ok());
    users.map(|user| (user, folder_of(user))).collect()
}

/// Connects without waiting for a process that is stopped and whose queue is full.
fn connect(path: &Path) -> io::Result<UnixStream> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(UnixStream::from(socket))
}

/// The answer of a process, as far as it has come.
struct Answer {
    stream: UnixStream,
    reader_pid: u32,
    bytes: Vec<u8>,
}

impl Answer {
    fn from(path: &Path) -> io::Result<Answer> {
        let stream = connect(path)?;
        let reader_pid = u32::try_from(credentials(&stream)?.pid).unwrap_or(0);
        Ok(Answer { stream, reader_pid, bytes: Vec::new() })
    }

    /// Reads what has come. Returns the sample if that is all of the answer.
    fn read(&mut self, path: &Path) -> io::Result<Option<ProcessSample>> {
        let mut part = [0; 64 << 10];
        match self.stream.read(&mut part) {
            Ok(0) => {
                let sample = serde_json::from_slice(&self.bytes)?;
                let socket = path.display().to_string();
                return Ok(Some(ProcessSample { socket, reader_pid: self.reader_pid, ..sample }));
            }
            Ok(got) => self.bytes.extend_from_slice(&part[..got]),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(error) => return Err(error),
        }
        Ok(None)
    }
}

/// Gives up the longest answer if all together are too long.
fn take_longest<'a>(
    coming: &mut Vec<(&'a PathBuf, Answer)>,
) -> Option<(&'a PathBuf, io::Result<ProcessSample>)> {
    let total: usize = coming.iter().map(|(_, answer)| answer.bytes.len()).sum();
    let longest = (0..coming.len()).max_by_key(|at| coming[*at].1.bytes.len())?;
    (total > ANSWER_BYTES_MAX).then(|| {
        let (path, answer) = coming.swap_remove(longest);
        let bytes = answer.bytes.len();
        (path, Err(io::Error::other(format!("its answer is too long, with {bytes} bytes and more to come"))))
    })
}

/// Reads the answers of several processes at once.
fn read(paths: &[PathBuf]) -> Vec<(&PathBuf, io::Result<ProcessSample>)> {
    let end = Instant::now() + ANSWER_TIMEOUT;
    let (mut read, mut coming) = (Vec::new(), Vec::new());
    for path in paths {
        match Answer::from(path) {
            Ok(answer) => coming.push((path, answer)),
            Err(error) => read.push((path, Err(error))),
        }
    }
    while let (false, Ok(left)) = (coming.is_empty(), left(end)) {
        let mut ready: Vec<_> =
            coming.iter().map(|(_, answer)| PollFd::new(&answer.stream, PollFlags::IN)).collect();
        // The time to an end is always short enough.
        let left = Timespec::try_from(left).unwrap_or_default();
        if let Err(error) = poll(&mut ready, Some(&left)) {
            if error == rustix::io::Errno::INTR {
                continue;
            }
            let failed = |(path, _): (_, Answer)| (path, Err(io::Error::from(error)));
            read.extend(coming.drain(..).map(failed));
            break;
        }
        let mut is_ready =
            ready.iter().map(|each| !each.revents().is_empty()).collect::<Vec<_>>().into_iter();
        coming.retain_mut(|(path, answer)| {
            let is_ready = is_ready.next().unwrap_or(false);
            let result = if is_ready { answer.read(path) } else { Ok(None) };
            let is_over = !matches!(result, Ok(None));
            read.extend(result.transpose().map(|result| (*path, result)));
            !is_over
        });
        while let Some(given_up) = take_longest(&mut coming) {
            read.push(given_up);
        }
    }
    let silent = || {
        let limit = ANSWER_TIMEOUT.as_secs();
        io::Error::other(format!("it did not answer within {limit} s; it may be stopped or overloaded"))
    };
    read.extend(coming.into_iter().map(|(path, _)| (path, Err(silent()))));
    read
}

/// The kernel's record of the process at the other end. Its `pid` is 0 if this process does not see that process.
fn credentials(stream: &UnixStream) -> io::Result<libc::ucred> {
    let mut found = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut bytes = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `bytes` bytes to `found`, whose fields are numbers.
    let result = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut found).cast(),
            &raw mut bytes,
        )
    };
    if result == 0 { Ok(found) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, socket};

    use super::*;

    /// Regression: a process that started removed the socket of another one that was about to listen, which `watch` then never
    /// showed.
    #[test]
    fn sockets_of_processes_that_start_are_left_alone_and_those_of_ended_ones_removed() {
        let folder = std::env::temp_dir().join(format!("ferrywire-metrics-test-{}", std::process::id()));
        // A process with this number may have left it.
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir(&folder).unwrap();
        let listener = listen(&folder, "listens").unwrap();
        drop(listen(&folder, "has-ended").unwrap());
        let starting = folder.join(format!("starts.{STARTING}"));
        let is_bound = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        bind(&is_bound, &SocketAddrUnix::new(&starting).unwrap()).unwrap();
        remove_stale(&folder);
        let left = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name());
        let mut left: Vec<_> = left.map(|name| name.into_string().unwrap()).collect();
        left.sort();
        assert_eq!(left, ["listens.sock", "starts.starting"]);
        assert!(connect(&folder.join("listens.sock")).is_ok());
        drop(listener);
        fs::remove_dir_all(&folder).unwrap();
    }
}
