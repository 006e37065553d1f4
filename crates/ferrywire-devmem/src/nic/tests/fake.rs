//! A simulated NIC with a kernel that refuses as the real one does, and a journal in a folder of its own.

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use super::super::cleanup::Cleaned;
use super::super::journal::Journal;
use super::super::kernel::Kernel;
use super::super::settings::Bench;
use super::super::{Claim, NicError, Wish};
use crate::sys::ethtool::{Feature, Rings, Split};
use crate::sys::flow::Flow;
use crate::sys::netdev::QueueState;
use crate::sys::netlink::NetlinkError;
use ferrywire_sys::mapping;

/// A NIC that every network namespace has.
pub const NAME: &str = "lo";
const INDEX: u32 = 1;
const RULES_MAX: u32 = 64;

type Result<T> = std::result::Result<T, NetlinkError>;

/// The visible state of the NIC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    pub queues: u32,
    /// The requested value; reported as on if nothing was requested.
    pub split: Split,
    pub threshold_bytes: u32,
    pub ntuple: Feature,
    pub spread: Vec<u32>,
    /// `None`: a rule that is not for one connection.
    pub rules: BTreeMap<u32, Option<Flow>>,
    /// Queues and their bindings.
    pub bound: BTreeMap<u32, u32>,
}

impl State {
    /// Everything set up, but no flows spread.
    pub fn new(queues: u32) -> State {
        State {
            queues,
            split: Split::On,
            threshold_bytes: 0,
            ntuple: Feature { on: true, changeable: true },
            spread: Vec::new(),
            rules: BTreeMap::new(),
            bound: BTreeMap::new(),
        }
    }
}

#[derive(Default)]
struct Inside {
    state: Option<State>,
    /// The kind of change that is refused, or accepted without effect.
    refused: &'static str,
    lies: bool,
    /// The error number for a location without a rule, if not `ENOENT`.
    absent: Option<i32>,
    changes: usize,
    refusals: usize,
    bindings: u32,
    /// Copies of state and journal around each change.
    recording: Option<Vec<Nic>>,
}

/// The simulated NIC with its journal.
#[derive(Clone)]
pub struct Nic {
    inside: Arc<Mutex<Inside>>,
    folder: Arc<tempfile::TempDir>,
    reported: Arc<Mutex<bool>>,
}

pub fn some_file() -> OwnedFd {
    mapping::anonymous_file(mapping::PAGE_BYTES).expect("memory")
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a folder");
    for file in fs::read_dir(from).expect("a folder").flatten() {
        if file.path().is_dir() {
            copy(&file.path(), &to.join(file.file_name()));
        } else {
            fs::copy(file.path(), to.join(file.file_name())).expect("copied");
        }
    }
}

impl Nic {
    pub fn new(state: State) -> Nic {
        let inside = Inside { state: Some(state), refused: "nothing", ..Inside::default() };
        Nic {
            inside: Arc::new(Mutex::new(inside)),
            folder: Arc::new(tempfile::tempdir().expect("a folder")),
            reported: Arc::default(),
        }
    }

    fn inside(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().expect("no test failed while it had it")
    }

    pub fn state(&self) -> State {
        self.inside().state.clone().expect("a state")
    }

    pub fn change(&self, change: impl FnOnce(&mut State)) {
        change(self.inside().state.as_mut().expect("a state"));
    }

    /// The number of changes made through the kernel.
    pub fn changes(&self) -> usize {
        self.inside().changes
    }

    /// The number of refused changes.
    pub fn refusals(&self) -> usize {
        self.inside().refusals
    }

    /// Refuses one kind of change, or (`lies`) accepts it without effect.
    pub fn refuse(&self, what: &'static str, lies: bool) {
        let mut inside = self.inside();
        (inside.refused, inside.lies) = (what, lies);
    }

    /// From now on reports a location without a rule by this number, as some drivers do.
    pub fn says_of_absent_rules(&self, errno: i32) {
        self.inside().absent = Some(errno);
    }

    fn absent(&self) -> NetlinkError {
        refusal(self.inside().absent.unwrap_or(libc::ENOENT), "")
    }

    pub fn kernel(&self) -> Box<FakeKernel> {
        Box::new(FakeKernel { nic: self.clone(), bindings: Vec::new() })
    }

    pub fn claim(&self, wish: &Wish) -> std::result::Result<Claim, NicError> {
        Claim::with(self.kernel(), self.folder.path(), NAME, INDEX, wish)
    }

    /// A claim of another NIC, to replace a claim of this one.
    pub fn claim_elsewhere(&self) -> Claim {
        Nic::new(State { spread: vec![0], ..State::new(4) })
            .claim(&super::wish(1, false))
            .expect("it is set up")
    }

    /// Ends a claim as a kill does: its files are closed and its bindings end, nothing else.
    pub fn kill(&self, mut claim: Claim) {
        claim.kernel.unbind();
        drop(claim.file.take());
        std::mem::forget(claim);
    }

    /// Cleans up as the next start does; returns the messages.
    pub fn clean(&self) -> Vec<String> {
        self.cleaned().reported
    }

    /// Cleans up as the next start does.
    pub fn cleaned(&self) -> Cleaned {
        let journal = Journal::open(self.folder.path(), NAME, INDEX).expect("a journal");
        let mut kernel = self.kernel();
        let mut locked = journal.lock().expect("nobody has it");
        let mut bench = Bench { nic: NAME, kernel: &mut *kernel, journal: &mut locked };
        let cleaned = bench.clean().expect("it can be read");
        *self.reported.lock().expect("no test failed") |= !cleaned.reported.is_empty();
        cleaned
    }

    /// The message about other processes whose journal is elsewhere.
    pub fn strangers(&self) -> Option<String> {
        let journal = Journal::open(self.folder.path(), NAME, INDEX).expect("a journal");
        let mut kernel = self.kernel();
        let mut locked = journal.lock().expect("nobody has it");
        let mut bench = Bench { nic: NAME, kernel: &mut *kernel, journal: &mut locked };
        if bench.clean().expect("it can be read").nobody { bench.strangers() } else { None }
    }

    /// Runs `body` while another process holds the journal's lock.
    pub fn while_locked<T>(&self, body: impl FnOnce() -> T) -> T {
        let journal = Journal::open(self.folder.path(), NAME, INDEX).expect("a journal");
        let _locked = journal.lock().expect("nobody has it for long");
        body()
    }

    /// Runs `body` while a file of the journal is unreadable, though replaceable.
    pub fn while_unreadable<T>(&self, file: &str, body: impl FnOnce() -> T) -> T {
        let [path, target, kept] =
            ["", ".target", ".kept"].map(|end| self.journal_folder().join(format!("{file}{end}")));
        fs::rename(&path, &kept).expect("renamed");
        fs::create_dir(&target).expect("a folder");
        std::os::unix::fs::symlink(&target, &path).expect("a link");
        let done = body();
        fs::remove_dir(&target).expect("removed");
        if path.is_symlink() {
            fs::rename(&kept, &path).expect("renamed")
        } else {
            // It was written again, or removed.
            fs::remove_file(&kept).expect("removed")
        }
        done
    }

    pub fn has_reported(&self) -> bool {
        *self.reported.lock().expect("no test failed")
    }

    /// The directory of the NIC's journal.
    pub fn directory(&self) -> &Path {
        self.folder.path()
    }

    fn journal_folder(&self) -> PathBuf {
        let mut folders = fs::read_dir(self.folder.path()).expect("a folder").flatten();
        folders.next().expect("a journal").path()
    }

    /// Names of the journal's files, without the numbers of claims.
    pub fn files(&self) -> Vec<String> {
        let files = fs::read_dir(self.journal_folder()).expect("a folder").flatten();
        let mut names: Vec<String> =
            files.map(|file| file.file_name().to_string_lossy().into_owned()).collect();
        let broken = |name: String| {
            if name.ends_with(".broken") && name.starts_with("claim") { "claim-broken".into() } else { name }
        };
        names = names.into_iter().map(broken).collect();
        names.sort();
        names
    }

    pub fn read(&self, file: &str) -> String {
        fs::read_to_string(self.journal_folder().join(file)).expect("a file")
    }

    /// Deletes the journal, as the login manager deletes a user's runtime directory at logout. If `for_good`, it cannot
    /// be made again in its directory.
    pub fn delete_journal(&self, for_good: bool) {
        fs::remove_dir_all(self.directory()).expect("removed");
        if for_good {
            fs::write(self.directory(), "").expect("a file");
        }
    }

    pub fn overwrite(&self, file: &str, text: &str) {
        fs::write(self.journal_folder().join(file), text).expect("written");
    }

    /// From now on keeps the states that a kill before and after each change would leave.
    pub fn record(&self) {
        self.inside().recording = Some(Vec::new());
    }

    pub fn recorded(&self) -> Vec<Nic> {
        self.inside().recording.take().expect("it was recording")
    }

    /// Holds the lock of a claim, as its process does.
    pub fn keeps_alive(&self, claim: &str) -> fs::File {
        let lock = fs::File::open(self.journal_folder().join(format!("{claim}.lock"))).expect("a lock");
        lock.try_lock().expect("nobody has it");
        lock
    }

    fn snapshot(&self) {
        let mut inside = self.inside();
        let Some(mut state) = inside.state.clone() else { return };
        let Some(recording) = &mut inside.recording else { return };
        // Bindings end with their process.
        state.bound.clear();
        let killed = Nic::new(state);
        copy(self.folder.path(), killed.folder.path());
        recording.push(killed);
    }
}

/// One process's view of the simulated kernel.
pub struct FakeKernel {
    nic: Nic,
    bindings: Vec<u32>,
}

fn refusal(errno: i32, text: &str) -> NetlinkError {
    let text = (!text.is_empty()).then(|| text.to_owned());
    NetlinkError { errno, text, call: "fake", known: None }
}

impl FakeKernel {
    fn change(&mut self, what: &str, change: impl FnOnce(&mut State) -> Result<()>) -> Result<()> {
        self.nic.snapshot();
        let mut inside = self.nic.inside();
        if inside.refused == what {
            inside.refusals += 1;
            return if inside.lies { Ok(()) } else { Err(refusal(libc::ENOSPC, "not today")) };
        }
        inside.changes += 1;
        change(inside.state.as_mut().expect("a state"))?;
        drop(inside);
        self.nic.snapshot();
        Ok(())
    }
}

impl Kernel for FakeKernel {
    fn queues(&mut self) -> Result<Vec<(u32, QueueState)>> {
        let state = self.nic.state();
        let of = |queue| QueueState { dmabuf: state.bound.get(&queue).copied(), ..QueueState::default() };
        Ok((0..state.queues).map(|queue| (queue, of(queue))).collect())
    }

    fn rings(&mut self) -> Result<Rings> {
        let state = self.nic.state();
        let split = if state.split == Split::Off { Split::Off } else { Split::On };
        Ok(Rings { split: Some(split), threshold_bytes: Some(state.threshold_bytes) })
    }

    fn set_rings(&mut self, rings: Rings) -> Result<()> {
        self.change("rings", |state| {
            if rings.split.is_some_and(|split| split != Split::On) && !state.bound.is_empty() {
                let text = "these words count for nothing";
                return Err(refusal(libc::EINVAL, text));
            }
            state.split = rings.split.unwrap_or(state.split);
            state.threshold_bytes = rings.threshold_bytes.unwrap_or(state.threshold_bytes);
            Ok(())
        })
    }

    fn ntuple(&mut self) -> Result<Feature> {
        Ok(self.nic.state().ntuple)
    }

    fn set_ntuple(&mut self, on: bool) -> Result<()> {
        self.change("ntuple", |state| {
            state.ntuple.on = on;
            state.rules.retain(|_, _| on);
            Ok(())
        })
    }

    fn spread(&mut self) -> Result<Vec<u32>> {
        Ok(self.nic.state().spread)
    }

    fn set_spread(&mut self, table: &[u32]) -> Result<()> {
        self.change("spread", |state| {
            let default = (0..state.spread.len() as u32).map(|i| i % state.queues).collect();
            state.spread = if table.is_empty() { default } else { table.to_vec() };
            Ok(())
        })
    }

    fn insert(&mut self, flow: &Flow) -> Result<u32> {
        let mut place = None;
        self.change("insert", |state| {
            if !state.ntuple.on {
                return Err(refusal(libc::EOPNOTSUPP, ""));
            }
            place = (0..RULES_MAX).rev().find(|place| !state.rules.contains_key(place));
            let place = place.ok_or_else(|| refusal(libc::ENOSPC, ""))?;
            state.rules.insert(place, Some(*flow));
            Ok(())
        })?;
        place.ok_or_else(|| refusal(libc::ENOSPC, ""))
    }

    fn delete(&mut self, location: u32) -> Result<()> {
        let absent = self.nic.absent();
        self.change("delete", |state| state.rules.remove(&location).map(drop).ok_or(absent))
    }

    fn rule(&mut self, location: u32) -> Result<Option<Flow>> {
        let mut inside = self.nic.inside();
        if inside.refused == "rule" {
            // Refused only once.
            inside.refused = "nothing";
            return Err(refusal(libc::EIO, "not today"));
        }
        drop(inside);
        self.nic.state().rules.get(&location).copied().ok_or_else(|| self.nic.absent())
    }

    fn rules(&mut self) -> Result<Vec<u32>> {
        Ok(self.nic.state().rules.into_keys().collect())
    }

    fn bind(&mut self, queues: &[u32], _: BorrowedFd<'_>) -> Result<u32> {
        let mut inside = self.nic.inside();
        inside.bindings += 1;
        let binding = inside.bindings;
        drop(inside);
        self.change("bind", |state| {
            if state.split != Split::On {
                return Err(refusal(libc::EINVAL, "tcp-data-split is disabled"));
            }
            if state.threshold_bytes != 0 {
                return Err(refusal(libc::EINVAL, "hds-thresh is not zero"));
            }
            if queues.iter().any(|queue| state.bound.contains_key(queue)) {
                return Err(refusal(libc::EEXIST, "designated queue already memory provider bound"));
            }
            state.bound.extend(queues.iter().map(|queue| (*queue, binding)));
            Ok(())
        })?;
        self.bindings.push(binding);
        Ok(binding)
    }

    fn unbind(&mut self) {
        let ours = std::mem::take(&mut self.bindings);
        if !ours.is_empty() {
            self.nic.change(|state| state.bound.retain(|_, binding| !ours.contains(binding)));
            self.nic.snapshot();
        }
    }
}
