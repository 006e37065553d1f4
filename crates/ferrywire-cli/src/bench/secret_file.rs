//! The secret file of a running command: a new secret in it is taken without a restart.
//!
//! The file is read again by its path, so that it may be written, replaced, or exchanged behind a symbolic link, as
//! Kubernetes does. Ends that share a secret do not all see a change at once, so a secret is exchanged in the three
//! steps of [`Endpoint::set_secret`], with the time of one step for all ends to follow:
//!
//! ```text
//!   old ── the file changes ──▶ old, accepts new ── 5 min ──▶ new, accepts old ── 5 min ──▶ new
//! ```
//!
//! Invariants: a file that cannot be used leaves the secrets in force as they are; copies that this module makes are
//! overwritten once they are not used.
//! Read next: `child_secret.rs`, for processes that this one starts.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ferrywire::{Endpoint, limits};
use zeroize::Zeroizing;

use super::child_secret;
use crate::exit::{self, Failure, Outcome};
use crate::plan::EnginePlan;

/// How often the file is read.
const READ_INTERVAL: Duration = Duration::from_secs(1);
/// Time that the other ends have for each step of an exchange, in minutes. Kubernetes may take two to show a new Secret to all pods.
const STEP_MINUTES: u64 = 5;
const STEP: Duration = Duration::from_secs(60 * STEP_MINUTES);
/// Largest secret file.
const FILE_BYTES_MAX: u64 = 64 << 10;
/// Longest wait, at the end of a command, for the thread that reads the file.
const END_TIMEOUT: Duration = Duration::from_secs(1);

/// A secret, overwritten when it is dropped.
pub type Secret = Zeroizing<Vec<u8>>;

/// Reads the secret in a file, without the whitespace around it.
///
/// # Errors
/// Why the file cannot be used.
pub fn read(path: &Path) -> Outcome<Secret> {
    let failed = |why: String| Failure::Usage(format!("--secret-file {}: {why}", path.display()));
    // With room for all of it: a vector that grows leaves a copy behind.
    let mut text = Zeroizing::new(Vec::with_capacity(2 * FILE_BYTES_MAX as usize));
    let file = File::open(path).map(|file| file.take(FILE_BYTES_MAX + 1));
    let read = file.and_then(|mut file| file.read_to_end(&mut text));
    read.map_err(|error| failed(format!("cannot read it: {error}")))?;
    match text.trim_ascii() {
        [] => Err(failed("the file is empty; write the secret into it".to_owned())),
        _ if text.len() as u64 > FILE_BYTES_MAX => Err(failed(format!(
            "the file has more than {FILE_BYTES_MAX} bytes; write the secret alone into it"
        ))),
        secret => Ok(Zeroizing::new(secret.to_vec())),
    }
}

/// Follows the plan's secret file, and gives its secrets to the endpoints, until the result is dropped. Does nothing without
/// such a file; a pipe is not read twice.
pub fn follow(plan: &EnginePlan, endpoints: Vec<Endpoint>) -> Outcome<Option<Follower>> {
    each_turn(plan, move |turn, exchange| {
        for endpoint in endpoints.iter().filter(|_| turn.is_step) {
            let also_accepted = exchange.also_accepted().map(|other| other.to_vec());
            if let Err(error) = endpoint.set_secret(exchange.current.to_vec(), also_accepted) {
                exit::complain(&error.to_string());
            }
        }
        turn.said.iter().for_each(|line| exit::note(line));
    })
}

/// Follows the plan's secret file without a word, for children that follow it too: one that is started later has to begin
/// where the exchange of a secret has got to.
pub fn watch(plan: &EnginePlan) -> Outcome<Watch> {
    let exchange = Arc::new(Mutex::new(Exchange::of(plan)));
    let latest = exchange.clone();
    let follower = each_turn(plan, move |turn, exchange| {
        if turn.is_step {
            *latest.lock().unwrap_or_else(PoisonError::into_inner) = Some(exchange.clone());
        }
    })?;
    Ok(Watch { exchange, follower })
}

/// The secrets that are valid now, from a secret file that is followed if there is one.
pub struct Watch {
    exchange: Arc<Mutex<Option<Exchange>>>,
    follower: Option<Follower>,
}

impl Watch {
    /// Passes the secrets that are valid now to a child that is to be started with this command.
    pub fn hand(&self, child: &mut Command) {
        let exchange = self.exchange.lock().unwrap_or_else(PoisonError::into_inner);
        child_secret::hand(child, exchange.as_ref().map(|exchange| exchange.current.as_slice()));
        if let Some(exchange) = exchange.as_ref().filter(|_| self.follower.is_some()) {
            child_secret::hand_phase(child, &exchange.phase);
        }
    }
}

/// Looks at the plan's secret file again and again, on a thread, until the result is dropped.
fn each_turn(
    plan: &EnginePlan,
    mut act: impl FnMut(Turn, &Exchange) + Send + 'static,
) -> Outcome<Option<Follower>> {
    let (Some(path), Some(exchange)) = (&plan.secret_file, Exchange::of(plan)) else { return Ok(None) };
    // A child follows the file that its parent follows, also while the file is missing.
    let is_followed = plan.secret_phase.is_some();
    if !is_followed && !path.is_file() {
        return Ok(None);
    }
    let mut file = SecretFile::new(path.clone(), exchange);
    let (stop, stopped) = mpsc::channel::<()>();
    let (end, ended) = mpsc::channel();
    exit::attend("secret-file", move || {
        while stopped.recv_timeout(READ_INTERVAL) == Err(RecvTimeoutError::Timeout) {
            act(file.turn(Instant::now()), &file.exchange);
        }
        drop(act);
        drop(end);
    })?;
    Ok(Some(Follower { stop: Some(stop), ended }))
}

/// A thread that follows a secret file; it ends when this is dropped.
pub struct Follower {
    stop: Option<Sender<()>>,
    ended: Receiver<()>,
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.stop = None;
        // The thread has handles of the endpoints, which are to end with their last user.
        let _ = self.ended.recv_timeout(END_TIMEOUT);
    }
}

/// What one look at the file has led to.
#[derive(Debug, Default, PartialEq, Eq)]
struct Turn {
    /// Whether the valid secrets have changed.
    is_step: bool,
    /// A line for people.
    said: Option<String>,
}

/// A secret file, and the exchange of its secret.
struct SecretFile {
    path: PathBuf,
    exchange: Exchange,
    /// What was read last, and whether it has had its effect.
    seen: Result<Secret, String>,
    is_taken: bool,
}

impl SecretFile {
    /// A file whose secret is in use, or is being exchanged for the one in use.
    fn new(path: PathBuf, exchange: Exchange) -> SecretFile {
        let seen = Ok(exchange.newest().clone());
        SecretFile { path, exchange, seen, is_taken: true }
    }

    /// Reads the file, and takes the next step of an exchange when its time has come. Only what two reads in a row have
    /// found counts: a file that is being written is empty for a moment, or lacks its end.
    fn turn(&mut self, now: Instant) -> Turn {
        let found = if self.path.is_file() { usable(&self.path) } else { Err(missing(&self.path)) };
        let is_new = found != self.seen;
        if is_new {
            (self.seen, self.is_taken) = (found, false);
        } else if !std::mem::replace(&mut self.is_taken, true) {
            match &self.seen {
                // Ends that saw the last change late still connect with the secret before it.
                Ok(_) if self.exchange.is_switched() => self.is_taken = false,
                Ok(secret) if self.exchange.begin(secret, now) => {
                    let left = 2 * STEP_MINUTES;
                    let what =
                        format!("a new secret is accepted; the old one stays valid for {left} minutes");
                    return self.changed(&what);
                }
                Ok(_) => {}
                Err(why) => {
                    let said = Some(format!("warning: {why}; the secrets in use stay"));
                    return Turn { is_step: false, said };
                }
            }
        }
        match self.exchange.step(now) {
            None => Turn::default(),
            Some(false) => self.changed("connects with the new secret; the old one is still accepted"),
            Some(true) => self.changed("the old secret is no longer accepted"),
        }
    }

    fn changed(&self, what: &str) -> Turn {
        let said = Some(format!("note: --secret-file {}: {what}", self.path.display()));
        Turn { is_step: true, said }
    }
}

/// The secret in a file, if an endpoint takes it.
fn usable(path: &Path) -> Result<Secret, String> {
    let secret = read(path).map_err(|failure| failure.message())?;
    let least = limits::SECRET_BYTES_MIN;
    match secret.len() >= least {
        true => Ok(secret),
        false => Err(format!(
            "--secret-file {}: the secret must be at least {least} bytes long; write a longer one into the file",
            path.display()
        )),
    }
}

fn missing(path: &Path) -> String {
    format!("--secret-file {}: there is no such file; write the secret into it", path.display())
}

/// The exchange of a secret: `settled -> announced -> switched -> settled`.
#[derive(Clone)]
pub struct Exchange {
    pub current: Secret,
    pub phase: Phase,
}

/// How far the exchange of a secret has got.
#[derive(Clone, Default, PartialEq, Eq)]
pub enum Phase {
    #[default]
    Settled,
    /// `next` is accepted since a time.
    Announced { next: Secret, since: Instant },
    /// `previous` is still accepted; the current secret was taken at a time.
    Switched { previous: Secret, since: Instant },
}

/// Without the secrets.
impl fmt::Debug for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Phase::Settled => "Settled",
            Phase::Announced { .. } => "Announced",
            Phase::Switched { .. } => "Switched",
        })
    }
}

impl Exchange {
    /// How far a plan's secret is exchanged; `None` without one.
    pub fn of(plan: &EnginePlan) -> Option<Exchange> {
        let current = Zeroizing::new(plan.secret.clone()?);
        Some(Exchange { current, phase: plan.secret_phase.clone().unwrap_or_default() })
    }

    /// The second secret that is valid, if any.
    pub fn also_accepted(&self) -> Option<&Secret> {
        self.phase.other()
    }

    /// Whether the secret before the current one is still accepted.
    fn is_switched(&self) -> bool {
        matches!(self.phase, Phase::Switched { .. })
    }

    /// The secret to which the exchange leads.
    fn newest(&self) -> &Secret {
        match &self.phase {
            Phase::Announced { next, .. } => next,
            _ => &self.current,
        }
    }

    /// Begins to exchange the current secret for this one. Returns false if it is the newest already.
    fn begin(&mut self, secret: &[u8], now: Instant) -> bool {
        if self.newest().as_slice() == secret {
            return false;
        }
        self.phase = match std::mem::replace(&mut self.phase, Phase::Settled) {
            // The old secret is back. Other ends may have gone on to the new one.
            Phase::Announced { next, .. } if self.current.as_slice() == secret => {
                Phase::Switched { previous: next, since: now }
            }
            _ => Phase::Announced { next: Zeroizing::new(secret.to_vec()), since: now },
        };
        true
    }

    /// Takes the next step, if its time has come: then returns whether it was the last one.
    fn step(&mut self, now: Instant) -> Option<bool> {
        let (Phase::Announced { since, .. } | Phase::Switched { since, .. }) = &self.phase else {
            return None;
        };
        if now.saturating_duration_since(*since) < STEP {
            return None;
        }
        match std::mem::replace(&mut self.phase, Phase::Settled) {
            Phase::Announced { next, .. } => {
                let previous = std::mem::replace(&mut self.current, next);
                self.phase = Phase::Switched { previous, since: now };
                Some(false)
            }
            _ => Some(true),
        }
    }
}

impl Phase {
    /// The secret that is valid beside the current one.
    pub fn other(&self) -> Option<&Secret> {
        match self {
            Phase::Settled => None,
            Phase::Announced { next: other, .. } | Phase::Switched { previous: other, .. } => Some(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{FileExt, symlink};

    const OLD: &[u8] = b"the old secret";
    const NEW: &[u8] = b"the new secret";
    const NEWEST: &[u8] = b"the newest secret";

    /// The secret to connect with, and the other one that is accepted.
    type Secrets = (Vec<u8>, Option<Vec<u8>>);

    fn secrets(current: &[u8], also_accepted: Option<&[u8]>) -> Option<Secrets> {
        Some((current.to_vec(), also_accepted.map(<[u8]>::to_vec)))
    }

    fn secrets_of(exchange: &Exchange) -> Option<Secrets> {
        secrets(&exchange.current, exchange.also_accepted().map(|other| other.as_slice()))
    }

    fn settled(secret: &[u8]) -> Exchange {
        Exchange { current: Zeroizing::new(secret.to_vec()), phase: Phase::Settled }
    }

    /// Looks at the file; the secrets, if they have changed.
    fn turn(file: &mut SecretFile, now: Instant) -> Option<Secrets> {
        file.turn(now).is_step.then(|| secrets_of(&file.exchange))?
    }

    /// How often a secret occurs in the memory of this process that can be written, besides the caller's copy.
    fn copies(secret: &[u8]) -> usize {
        const STEP: usize = 64 << 10;
        let maps = fs::read_to_string("/proc/self/maps").expect("of this process");
        let memory = File::open("/proc/self/mem").expect("of this process");
        let mut part = Zeroizing::new(vec![0; STEP + secret.len() - 1]);
        // What is read is in memory, too.
        let own = part.as_ptr() as usize..part.as_ptr() as usize + part.len();
        let mut found = 0;
        for line in maps.lines().filter(|line| line.contains(" rw")) {
            let (start, rest) = line.split_once('-').expect("a range");
            let [start, end] = [start, rest.split(' ').next().unwrap_or_default()]
                .map(|digits| usize::from_str_radix(digits, 16).expect("an address"));
            for at in (start..end).step_by(STEP) {
                let bytes = part.len().min(end - at);
                if memory.read_exact_at(&mut part[..bytes], at as u64).is_err() {
                    continue;
                }
                let places = memchr::memmem::find_iter(&part[..bytes], secret).map(|place| at + place);
                found += places
                    .filter(|&place| place != secret.as_ptr() as usize && !own.contains(&place))
                    .count();
            }
        }
        found
    }

    /// A file with the old secret, as this command has read it at its start.
    fn scene() -> (tempfile::TempDir, PathBuf, SecretFile, Instant) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("secret");
        fs::write(&path, OLD).expect("written");
        let file = SecretFile::new(path.clone(), settled(OLD));
        (folder, path, file, Instant::now())
    }

    /// A file whose new secret was announced two seconds after the start.
    fn announced_scene() -> (tempfile::TempDir, PathBuf, SecretFile, Instant) {
        let (folder, path, mut file, start) = scene();
        fs::write(&path, NEW).expect("written");
        let turns = [1, 2].map(|seconds| turn(&mut file, start + Duration::from_secs(seconds)));
        assert_eq!(turns, [None, secrets(OLD, Some(NEW))]);
        (folder, path, file, start)
    }

    #[test]
    fn a_changed_secret_is_exchanged_in_three_steps() {
        let (_folder, path, mut file, start) = scene();
        let mut at = |seconds: u64| turn(&mut file, start + Duration::from_secs(seconds));
        assert_eq!(at(0), None);
        fs::write(&path, [NEW, b"\n"].concat()).expect("written");
        assert_eq!(at(1), None, "it may not be whole yet");
        assert_eq!(at(2), secrets(OLD, Some(NEW)));
        assert_eq!([at(3), at(301)], [None, None]);
        assert_eq!(at(302), secrets(NEW, Some(OLD)));
        assert_eq!(at(601), None);
        assert_eq!(at(602), secrets(NEW, None));
        assert_eq!(at(2000), None);
    }

    /// A second change within the exchange refused ends that connect with the secret before.
    #[test]
    fn a_second_change_waits_until_the_exchange_of_the_first_is_over() {
        let (_folder, path, mut file, start) = scene();
        let mut at = |seconds: u64| turn(&mut file, start + Duration::from_secs(seconds));
        fs::write(&path, NEW).expect("written");
        assert_eq!([at(1), at(2), at(302)], [None, secrets(OLD, Some(NEW)), secrets(NEW, Some(OLD))]);
        fs::write(&path, NEWEST).expect("written");
        assert_eq!([at(303), at(304), at(305)], [None, None, None]);
        assert_eq!(at(602), secrets(NEW, None));
        assert_eq!(at(603), secrets(NEW, Some(NEWEST)));
    }

    /// Kubernetes writes a new folder, and renames a link to it over `..data`; the file itself is never touched.
    #[test]
    fn a_secret_is_found_behind_an_exchanged_link() {
        let (folder, _, _, start) = scene();
        for (name, secret) in [("first", OLD), ("second", NEW)] {
            fs::create_dir(folder.path().join(name)).expect("a folder");
            fs::write(folder.path().join(name).join("key"), secret).expect("written");
        }
        let [data, next, key] = ["..data", "..data_tmp", "key"].map(|name| folder.path().join(name));
        symlink("first", &data).expect("a link");
        symlink("..data/key", &key).expect("a link");
        let mut file = SecretFile::new(key, settled(OLD));
        assert_eq!(file.turn(start), Turn::default());
        symlink("second", &next).expect("a link");
        fs::rename(&next, &data).expect("exchanged");
        assert_eq!(turn(&mut file, start), None);
        assert_eq!(turn(&mut file, start), secrets(OLD, Some(NEW)));
    }

    #[test]
    fn a_file_that_cannot_be_used_is_one_warning_and_leaves_the_secret() {
        let (_folder, path, mut file, start) = scene();
        let mut lines = |times: usize| -> Vec<String> {
            let turns: Vec<Turn> = (0..times).map(|_| file.turn(start)).collect();
            assert!(turns.iter().all(|turn| !turn.is_step), "{turns:?}");
            turns.into_iter().filter_map(|turn| turn.said).collect()
        };
        let long = vec![b'x'; FILE_BYTES_MAX as usize + 1];
        for (bytes, why) in
            [(&b" \n"[..], "is empty"), (b"short", "at least 8 bytes"), (&long, "more than 65536")]
        {
            fs::write(&path, bytes).expect("written");
            let said = lines(5);
            assert!(said.len() == 1 && said[0].starts_with("warning: --secret-file "), "{said:?}");
            assert!(said[0].contains(why) && said[0].ends_with("; the secrets in use stay"), "{said:?}");
        }
        fs::remove_file(&path).expect("removed");
        let said = lines(5);
        assert!(said.len() == 1 && said[0].contains("there is no such file"), "{said:?}");
        fs::write(&path, OLD).expect("written");
        assert_eq!(lines(5), Vec::<String>::new());
    }

    #[test]
    fn a_secret_that_changes_again_is_exchanged_from_the_one_in_use() {
        let start = Instant::now();
        let mut exchange = settled(OLD);
        assert!(exchange.begin(NEW, start) && !exchange.begin(NEW, start));
        assert!(exchange.begin(NEWEST, start + STEP / 2));
        assert_eq!(exchange.step(start + STEP), None, "the newest has its own time");
        assert_eq!(secrets_of(&exchange), secrets(OLD, Some(NEWEST)));
        assert_eq!(exchange.step(start + 2 * STEP), Some(false));
        assert!(exchange.begin(NEW, start + 2 * STEP));
        assert_eq!(secrets_of(&exchange), secrets(NEWEST, Some(NEW)));
        assert!(exchange.begin(NEWEST, start + 2 * STEP), "it is taken back");
        assert_eq!(secrets_of(&exchange), secrets(NEWEST, Some(NEW)));
        assert_eq!(exchange.step(start + 3 * STEP), Some(true));
        assert_eq!(secrets_of(&exchange), secrets(NEWEST, None));
    }

    /// Regression: a process that took the place of another began its step again, so that the old secret was valid for longer
    /// than 10 minutes in all.
    #[test]
    fn an_exchange_goes_on_where_another_process_left_it() {
        let (_folder, path, file, start) = announced_scene();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let mut next = SecretFile::new(path.clone(), file.exchange.clone());
        assert_eq!([100, 301].map(|seconds| turn(&mut next, at(seconds))), [None, None]);
        assert_eq!(turn(&mut next, at(302)), secrets(NEW, Some(OLD)));
        let mut last = SecretFile::new(path, next.exchange.clone());
        assert_eq!([400, 601].map(|seconds| turn(&mut last, at(seconds))), [None, None]);
        assert_eq!(turn(&mut last, at(602)), secrets(NEW, None));
    }

    /// Regression: such a process took the new secret for the previous one, and refused it when its time was over.
    #[test]
    fn an_exchange_goes_on_where_the_file_cannot_be_read_any_more() {
        let (_folder, path, file, start) = announced_scene();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        fs::remove_file(&path).expect("removed");
        let mut next = SecretFile::new(path, file.exchange.clone());
        assert_eq!([3, 4, 301].map(|seconds| turn(&mut next, at(seconds))), [None, None, None]);
        assert_eq!(turn(&mut next, at(302)), secrets(NEW, Some(OLD)));
    }

    /// Regression: a child that started while the file was missing did not follow it, and the old secret stayed valid.
    #[test]
    fn a_child_follows_the_file_that_its_parent_follows_though_it_is_missing() {
        let folder = tempfile::tempdir().expect("a folder");
        let plan = |secret_phase| EnginePlan {
            secret: Some(OLD.to_vec()),
            secret_file: Some(folder.path().join("none")),
            secret_phase,
            ..EnginePlan::default()
        };
        let follows = |phase| follow(&plan(phase), Vec::new()).expect("a thread").is_some();
        assert!(follows(Some(Phase::Settled)));
        assert!(!follows(None), "a path that is no file is not followed, unless the parent process does");
    }

    /// Regression: the file is read each second, and what was read stayed in memory that had been freed.
    #[test]
    fn secrets_that_are_no_longer_used_are_overwritten() {
        const ROUNDS: u8 = 10;
        let (_folder, path, mut file, start) = scene();
        // Neither in the program nor in memory that this test has freed; of different lengths, so that the next ones do not
        // take the places of those that were freed.
        let secret = |number: u8| {
            let bytes = 0..128 + 32 * u32::from(number);
            let byte = |at: u32| (at.wrapping_mul(37) >> 1) as u8 ^ number.wrapping_mul(29) ^ 0x5a;
            Zeroizing::new(bytes.map(byte).collect::<Vec<u8>>())
        };
        // The allocator writes into the first bytes of what is freed.
        let occurs = |number: u8, times: usize| copies(&secret(number)[64..]) >= times;
        for number in 0..ROUNDS {
            fs::write(&path, secret(number)).expect("written");
            for step in 0..3u32 {
                file.turn(start + (u32::from(number) * 3 + step) * STEP);
            }
        }
        let found = (0..ROUNDS - 2).filter(|number| occurs(*number, 1)).count();
        assert_eq!(found, 0, "of {} secrets that were exchanged", ROUNDS - 2);
        assert!(occurs(ROUNDS - 1, 2), "the secret in use is found");
    }
}
