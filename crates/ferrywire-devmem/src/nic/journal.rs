//! The journal of changes at NICs of this host, in files that outlive their process.
//!
//! ```text
//!   /run/ferrywire/devmem/4026531840-eth1/       network namespace and NIC
//!       lock                  held while anything here changes
//!       settings              settings before the first change, and their changed values
//!       claim-812-0.lock      held as long as the claim lives; free: its process is gone
//!       claim-812-0           its queues and rules
//! ```
//!
//! Every change is recorded before it is made, so the next process knows what a killed one has left. A file is replaced
//! as a whole, by renaming, so there is never half of one.
//! Invariant: only the holder of `lock` writes `settings` or removes a claim's files; only its owner writes a claim's
//! own file.
//! Read next: `record.rs`, the contents of the files, and `cleanup.rs`, their reader.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::directories::{self, make};
use super::error::NicError;
use super::record::{self, Claimed, Header, Settings};
use ferrywire_proto::limits;
use ferrywire_sys::fork::{Origin, Withheld};

const LOCK_INTERVAL: Duration = Duration::from_millis(10);
const SETTINGS: &str = "settings";
const LOCK: &str = "lock";
const LOCK_SUFFIX: &str = ".lock";
const CLAIM_PREFIX: &str = "claim-";
/// Suffix of record files that are being written; another suffix marks unreadable ones.
const NEW_SUFFIX: &str = ".new";
const BROKEN_SUFFIX: &str = ".broken";
/// Largest record that is read, in bytes.
const RECORD_BYTES_MAX: u64 = 16 << 20;

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Number of claims that this process has made, which distinguishes them.
static CLAIMS: AtomicU64 = AtomicU64::new(0);

/// The network namespace of this thread, as the inode number of its file.
pub(super) fn namespace() -> io::Result<u64> {
    Ok(fs::metadata("/proc/thread-self/ns/net")?.ino())
}

/// The kernel's boot id. Records of an earlier boot are recognized by it.
fn boot() -> io::Result<String> {
    Ok(fs::read_to_string(BOOT_ID)?.trim().to_owned())
}

/// Names of the NICs of this network namespace that have journals.
///
/// # Errors
/// The directory cannot be read. A directory that does not exist has no journals.
pub(super) fn nics(directory: &Path) -> io::Result<Vec<String>> {
    let prefix = format!("{}-", namespace()?);
    let folders = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        folders => folders?,
    };
    let mut nics = Vec::new();
    for folder in folders {
        let name = folder?.file_name().into_string();
        nics.extend(name.iter().filter_map(|name| Some(name.strip_prefix(&prefix)?.to_owned())));
    }
    nics.sort_unstable();
    Ok(nics)
}

/// Removes the journal of a NIC that no longer exists; returns whether there was one.
pub(super) fn forget(directory: &Path, nic: &str) -> bool {
    let Ok(namespace) = namespace() else { return false };
    let folder = directory.join(format!("{namespace}-{nic}"));
    let noted = fs::read_dir(&folder).is_ok_and(|files| files.flatten().any(|file| file.file_name() != LOCK));
    noted && fs::remove_dir_all(&folder).is_ok()
}

/// Whether the journal of a NIC records changes that no live process needs. Only reads, so it also serves for journals
/// of other users.
pub(super) fn is_left(directory: &Path, nic: &str) -> io::Result<bool> {
    let folder = directory.join(format!("{}-{nic}", namespace()?));
    let (mut settings, mut live) = (false, false);
    for file in fs::read_dir(&folder)? {
        let Ok(name) = file?.file_name().into_string() else { continue };
        settings |= name == SETTINGS;
        if name.starts_with(CLAIM_PREFIX) && name.ends_with(LOCK_SUFFIX) {
            if !is_locked(&folder.join(name))? {
                return Ok(true);
            }
            live = true;
        }
    }
    Ok(settings && !live)
}

/// Whether a process holds the lock of a file. The file may be another user's: a link is not followed, and a pipe does
/// not block.
fn is_locked(path: &Path) -> io::Result<bool> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    match file.try_lock_shared() {
        Ok(()) => file.unlock().map(|()| false),
        Err(TryLockError::WouldBlock) => Ok(true),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// The journal of one NIC.
#[derive(Debug)]
pub(super) struct Journal {
    folder: PathBuf,
    /// The directory to use once the folder is gone and cannot be made again.
    pub replacement: PathBuf,
    header: Header,
}

/// A lock, held until this value is dropped or its process ends. A child that is being forked may share the lock for
/// a moment, so closing the file would not be enough; the child itself must not release it.
#[derive(Debug)]
pub(super) struct Lock {
    _withheld: Withheld,
    file: File,
    origin: Origin,
}

impl Lock {
    /// The lock of a file that this process has just locked.
    fn of(file: File) -> Lock {
        Lock { _withheld: Withheld::new(file.as_fd()), file, origin: Origin::here() }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        if !self.origin.is_elsewhere() {
            let _ = self.file.unlock();
        }
    }
}

/// A locked journal: no other process may change it.
#[derive(Debug)]
pub(super) struct Locked<'a> {
    journal: &'a Journal,
    _lock: Lock,
    /// Messages about broken files of the journal.
    pub reported: Vec<String>,
    /// Whether a record could not be parsed, so that what it says cannot be undone.
    pub is_broken: bool,
}

/// The latest time until which a claim waits for the lock. It may be set while another thread waits.
#[derive(Clone, Debug, Default)]
pub(crate) struct EndBy(Arc<Mutex<Option<Instant>>>);

impl EndBy {
    /// Sets the latest time, unless an earlier one is set.
    pub fn set(&self, by: Instant) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *known = Some(known.map_or(by, |known| known.min(by)));
    }

    fn is_over(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_some_and(|by| Instant::now() >= by)
    }
}

/// A claim's file, which marks the claim as live as long as this value exists.
#[derive(Debug)]
pub(super) struct ClaimFile {
    path: PathBuf,
    _lock: Lock,
}

/// A claim found in the journal.
#[derive(Debug)]
pub(super) struct Found {
    pub name: String,
    pub claimed: Option<Claimed>,
    /// The lock of the claim, if its process is gone; `None` for a live claim.
    pub dead: Option<Lock>,
}

impl Journal {
    /// Opens the journal of a NIC of this network namespace.
    pub fn open(directory: &Path, nic: &str, index: u32) -> Result<Journal, NicError> {
        let failed = |path: &Path, error: &io::Error| NicError::Journal {
            nic: nic.to_owned(),
            path: path.to_owned(),
            why: format!("{error}; run as root, or set XDG_RUNTIME_DIR to a writable folder"),
        };
        let namespace = namespace().map_err(|error| failed(Path::new("/proc/thread-self/ns/net"), &error))?;
        let folder = directory.join(format!("{namespace}-{nic}"));
        // A folder below one of another user could be exchanged for a link.
        make(directory).and_then(|()| make(&folder)).map_err(|error| failed(&folder, &error))?;
        let boot = boot().map_err(|error| failed(Path::new(BOOT_ID), &error))?;
        let replacement = directories::replacement();
        Ok(Journal { folder, replacement, header: Header { boot, namespace, nic: nic.to_owned(), index } })
    }

    /// Makes the journal's folder again after another program has deleted it. At a user's logout the login manager
    /// deletes the runtime directory as a whole, and only root can make that again.
    pub fn make_again(&mut self) -> Result<(), NicError> {
        // All runs of a user use one directory, and another one may have moved before.
        let has_moved = directories::has_moved(&self.replacement);
        let made = if has_moved { Err(io::ErrorKind::NotFound.into()) } else { make(&self.folder) };
        let Err(error) = made else { return Ok(()) };
        let Some(name) = self.folder.file_name() else { return Err(self.failed("make again", &error)) };
        let folder = self.replacement.join(name);
        let made = directories::make_private(&self.replacement).and_then(|()| make(&folder));
        made.map_err(|_| self.failed("make again", &error))?;
        self.folder = folder;
        Ok(())
    }

    fn failed(&self, what: &str, error: &io::Error) -> NicError {
        let nic = self.header.nic.clone();
        NicError::Journal { nic, path: self.folder.clone(), why: format!("{what}: {error}") }
    }

    /// Waits for the journal's lock.
    pub fn lock(&self) -> Result<Locked<'_>, NicError> {
        self.lock_by(&EndBy::default())
    }

    /// Waits for the journal's lock, until `end` at most. Tries at least once.
    pub fn lock_by(&self, end: &EndBy) -> Result<Locked<'_>, NicError> {
        self.lock_within(limits::NIC_LOCK_TIMEOUT, end)
    }

    /// Waits for the journal's lock, for `limit` and until `end` at most.
    pub fn lock_within(&self, limit: Duration, end: &EndBy) -> Result<Locked<'_>, NicError> {
        let lock = open_lock(&self.folder.join(LOCK)).map_err(|error| self.failed(LOCK, &error))?;
        let began = Instant::now();
        loop {
            match lock.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) if began.elapsed() < limit && !end.is_over() => {
                    thread::sleep(LOCK_INTERVAL)
                }
                Err(error) => return Err(self.failed(LOCK, &not_locked(error))),
            }
        }
        Ok(Locked { journal: self, _lock: Lock::of(lock), reported: Vec::new(), is_broken: false })
    }

    /// Writes a claim's file; only for the claim's owner.
    pub fn write_claim(&self, file: &ClaimFile, claimed: &Claimed) -> Result<(), NicError> {
        self.write(&file.path, &claimed.text(&self.header))
    }

    fn write(&self, path: &Path, text: &str) -> Result<(), NicError> {
        let new = with_suffix(path, NEW_SUFFIX);
        fs::write(&new, text)
            .and_then(|()| fs::rename(&new, path))
            .map_err(|error| self.failed("write", &error))
    }

    /// The text of a record. A record of an earlier boot, or of another NIC of this name, is reported and dropped,
    /// because its changes are gone.
    ///
    /// # Errors
    /// The record exists but cannot be understood. Treating it as missing would undo settings that others need.
    fn read<T>(
        &self,
        path: &Path,
        parse: fn(&str) -> Option<(Header, T)>,
        of_live_run: bool,
        reported: &mut Vec<String>,
        is_broken: &mut bool,
    ) -> Result<Option<T>, NicError> {
        let text = match read_text(path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(self.unread(path, &error)),
        };
        match parse(&text) {
            Some((header, record)) if header == self.header => Ok(Some(record)),
            // A process can outlive its NIC, but not the boot of its host.
            Some((header, _)) if of_live_run && header.index == self.header.index => Err(self.unread(
                path,
                &io::Error::other(
                    "the record is from an earlier boot of the host, and a running process needs it",
                ),
            )),
            Some(_) => {
                reported.push(format!("removed {}: it records a NIC that is gone", path.display()));
                let _ = fs::remove_file(path);
                Ok(None)
            }
            None if of_live_run => Err(self.unread(
                path,
                &io::Error::other("the record cannot be parsed, and a running process needs it"),
            )),
            None => {
                let aside = with_suffix(path, BROKEN_SUFFIX);
                reported.push(format!("cannot parse {}: renamed it to {}", path.display(), aside.display()));
                let _ = fs::rename(path, aside);
                *is_broken = true;
                Ok(None)
            }
        }
    }

    fn unread(&self, path: &Path, error: &io::Error) -> NicError {
        let what = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        self.failed(&format!("cannot read {what}, so no NIC setting is restored"), error)
    }
}

impl Locked<'_> {
    /// The settings that claims have changed, if any.
    ///
    /// # Errors
    /// The record cannot be read, so the original values are unknown.
    pub fn settings(&mut self, any_run_lives: bool) -> Result<Settings, NicError> {
        let path = self.journal.folder.join(SETTINGS);
        Ok(self
            .journal
            .read(&path, record::settings, any_run_lives, &mut self.reported, &mut self.is_broken)?
            .unwrap_or_default())
    }

    /// Records the original values of settings before they are changed; removes the record if there are none.
    pub fn write_settings(&self, settings: &Settings) -> Result<(), NicError> {
        let path = self.journal.folder.join(SETTINGS);
        if !settings.is_empty() {
            return self.journal.write(&path, &settings.text(&self.journal.header));
        }
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(self.journal.failed("remove", &error))
            }
            _ => Ok(()),
        }
    }

    /// Makes the file of a new claim, with its lock.
    pub fn add_claim(&self, claimed: &Claimed) -> Result<ClaimFile, NicError> {
        let (path, lock) = self.new_lock().map_err(|error| self.journal.failed("claim", &error))?;
        let file = ClaimFile { path, _lock: lock };
        self.journal.write_claim(&file, claimed)?;
        Ok(file)
    }

    /// A file name for a claim that is not in use, not even by a dead process with this process id.
    fn new_lock(&self) -> io::Result<(PathBuf, Lock)> {
        loop {
            let number = CLAIMS.fetch_add(1, Ordering::Relaxed);
            let path = self.journal.folder.join(format!("{CLAIM_PREFIX}{}-{number}", std::process::id()));
            let file = with_suffix(&path, LOCK_SUFFIX);
            match OpenOptions::new().create_new(true).write(true).mode(0o600).open(file) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
                Ok(lock) => {
                    lock.try_lock()?;
                    return Ok((path, Lock::of(lock)));
                }
            }
        }
    }

    /// All claims in the journal, live and dead.
    ///
    /// # Errors
    /// A claim's file cannot be read, so its queues are unknown.
    pub fn claims(&mut self) -> Result<Vec<Found>, NicError> {
        let folder = &self.journal.folder;
        let mut names = Vec::new();
        for file in fs::read_dir(folder).map_err(|error| self.journal.unread(folder, &error))? {
            let file = file.map_err(|error| self.journal.unread(folder, &error))?;
            let Ok(name) = file.file_name().into_string() else { continue };
            if name.starts_with(CLAIM_PREFIX) {
                names.extend(name.strip_suffix(LOCK_SUFFIX).map(str::to_owned));
            }
        }
        names.sort_unstable();
        names.into_iter().map(|name| self.found(name)).collect()
    }

    fn found(&mut self, name: String) -> Result<Found, NicError> {
        let path = self.journal.folder.join(&name);
        let lock = open_lock(&with_suffix(&path, LOCK_SUFFIX)).ok();
        let dead = lock.filter(|lock| lock.try_lock().is_ok()).map(Lock::of);
        let claimed = self.journal.read(
            &path,
            record::claimed,
            dead.is_none(),
            &mut self.reported,
            &mut self.is_broken,
        )?;
        Ok(Found { name, claimed, dead })
    }

    /// Removes the files of a claim: a dead one, or the caller's own.
    pub fn remove_claim(&self, name: &str) {
        let path = self.journal.folder.join(name);
        for file in [with_suffix(&path, NEW_SUFFIX), path.clone(), with_suffix(&path, LOCK_SUFFIX)] {
            let _ = fs::remove_file(file);
        }
    }
}

impl ClaimFile {
    /// Whether another program has deleted the file, or its folder: claims delete only files of dead claims.
    pub fn is_gone(&self) -> bool {
        fs::symlink_metadata(with_suffix(&self.path, LOCK_SUFFIX)).is_err()
    }

    pub fn name(&self) -> String {
        self.path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }
}

/// The error of a lock that could not be taken; its text says what to do.
fn not_locked(error: TryLockError) -> io::Error {
    match error {
        TryLockError::WouldBlock => io::Error::other(
            "another process holds the lock: wait for it; if it is stopped, continue or end it",
        ),
        TryLockError::Error(error) => error,
    }
}

fn open_lock(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(path)
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

fn read_text(path: &Path) -> io::Result<String> {
    if fs::metadata(path)?.len() > RECORD_BYTES_MAX {
        return Ok(String::new());
    }
    // Text that is not UTF-8 is reported as unreadable by the parser.
    Ok(String::from_utf8_lossy(&fs::read(path)?).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const INDEX: u32 = 1;
    const CHILD_LIFE_SECONDS: u32 = 60;

    /// A forked child that does nothing, until this value is dropped.
    struct Child(libc::pid_t);

    impl Child {
        fn fork() -> Child {
            // SAFETY: the child only calls functions that are allowed after a fork.
            let child = unsafe { libc::fork() };
            assert!(child >= 0, "no fork: {}", io::Error::last_os_error());
            if child == 0 {
                // SAFETY: as above.
                unsafe {
                    libc::sleep(CHILD_LIFE_SECONDS);
                    libc::_exit(0);
                }
            }
            Child(child)
        }
    }

    impl Drop for Child {
        fn drop(&mut self) {
            // SAFETY: the child is this process's own and was not waited for yet.
            unsafe {
                libc::kill(self.0, libc::SIGKILL);
                libc::waitpid(self.0, std::ptr::null_mut(), 0);
            }
        }
    }

    /// Regression: the locks lasted until the child ended.
    #[test]
    fn a_forked_child_does_not_keep_the_locks() {
        let folder = tempfile::tempdir().expect("a folder");
        let journal = Journal::open(folder.path(), "lo", INDEX).expect("a journal");
        let locked = journal.lock().expect("it is free");
        let claim = locked.add_claim(&Claimed::default()).expect("written");
        let _child = Child::fork();
        drop(locked);
        let again = journal.lock_within(Duration::from_millis(100), &EndBy::default());
        let mut locked = again.expect("the parent has released it");
        let mut is_dead =
            || locked.claims().expect("it can be read").iter().any(|found| found.dead.is_some());
        assert!(!is_dead(), "the parent still has it");
        drop(claim);
        assert!(is_dead());
    }

    /// The child shares the lock with its parent.
    #[test]
    fn a_drop_in_a_forked_child_keeps_the_parents_lock() {
        let folder = tempfile::tempdir().expect("a folder");
        let journal = Journal::open(folder.path(), "lo", INDEX).expect("a journal");
        let locked = journal.lock().expect("it is free");
        // SAFETY: the child only closes a file and exits, which is allowed after a fork.
        let child = unsafe { libc::fork() };
        assert!(child >= 0, "no fork: {}", io::Error::last_os_error());
        if child == 0 {
            drop(locked);
            // SAFETY: as above.
            unsafe { libc::_exit(0) };
        }
        // SAFETY: the child is this process's own and was not waited for yet.
        unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
        let again = journal.lock_within(Duration::ZERO, &EndBy::default());
        assert!(again.expect_err("the parent has it").to_string().contains("another process"));
    }

    #[test]
    fn only_a_held_lock_is_reported_as_held() {
        let held = not_locked(TryLockError::WouldBlock).to_string();
        assert!(held.contains("another process holds the lock"), "{held}");
        let broken = io::Error::from_raw_os_error(libc::ENOLCK);
        let said = broken.to_string();
        assert_eq!(not_locked(TryLockError::Error(broken)).to_string(), said);
    }
}
