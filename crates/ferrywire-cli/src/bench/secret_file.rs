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
//! Invariant: a file that cannot be used leaves the secrets in force as they are.
//! Read next: `child_secret.rs`, for processes that this one starts.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use ferrywire::{Endpoint, limits};

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

/// Reads the secret in a file, without the whitespace around it.
///
/// # Errors
/// Why the file cannot be used.
pub fn read(path: &Path) -> Outcome<Vec<u8>> {
    let failed = |why: String| Failure::Usage(format!("--secret-file {}: {why}", path.display()));
    let mut text = Vec::new();
    let file = File::open(path).map(|file| file.take(FILE_BYTES_MAX + 1));
    let read = file.and_then(|mut file| file.read_to_end(&mut text));
    read.map_err(|error| failed(format!("cannot read it: {error}")))?;
    match text.trim_ascii() {
        [] => Err(failed("the file is empty; write the secret into it".to_owned())),
        _ if text.len() as u64 > FILE_BYTES_MAX => Err(failed(format!(
            "the file has more than {FILE_BYTES_MAX} bytes; write the secret alone into it"
        ))),
        secret => Ok(secret.to_vec()),
    }
}

/// The secret in the plan's file now; `None` without a file that can be used.
pub fn latest(plan: &EnginePlan) -> Option<Vec<u8>> {
    plan.secret_file.as_deref().filter(|path| path.is_file()).and_then(|path| usable(path).ok())
}

/// Follows the plan's secret file, and gives its secrets to the endpoints, until the result is dropped. Does nothing without
/// such a file; a pipe is not read twice.
pub fn follow(plan: &EnginePlan, endpoints: Vec<Endpoint>) -> Outcome<Option<Follower>> {
    let (Some(path), Some(secret)) = (&plan.secret_file, &plan.secret) else { return Ok(None) };
    if !path.is_file() {
        return Ok(None);
    }
    let mut file = SecretFile::new(path.clone(), secret.clone());
    let (stop, stopped) = mpsc::channel::<()>();
    let (end, ended) = mpsc::channel();
    exit::attend("secret-file", move || {
        while stopped.recv_timeout(READ_INTERVAL) == Err(RecvTimeoutError::Timeout) {
            let Turn { secrets, said } = file.turn(Instant::now());
            for endpoint in &endpoints {
                let Some(Secrets { current, also_accepted }) = secrets.clone() else { break };
                if let Err(error) = endpoint.set_secret(current, also_accepted) {
                    exit::complain(&error.to_string());
                }
            }
            said.iter().for_each(|line| exit::note(line));
        }
        drop(endpoints);
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

/// The secrets of an endpoint, as [`Endpoint::set_secret`] takes them.
#[derive(Clone, PartialEq, Eq)]
struct Secrets {
    current: Vec<u8>,
    also_accepted: Option<Vec<u8>>,
}

/// Without the secrets.
impl fmt::Debug for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Secrets").finish_non_exhaustive()
    }
}

/// What one look at the file has led to.
#[derive(Debug, Default, PartialEq, Eq)]
struct Turn {
    /// The secrets, if they have changed.
    secrets: Option<Secrets>,
    /// A line for people.
    said: Option<String>,
}

/// A secret file, and the exchange of its secret.
struct SecretFile {
    path: PathBuf,
    exchange: Exchange,
    /// What was read last, and whether it has had its effect.
    seen: Result<Vec<u8>, String>,
    is_taken: bool,
}

impl SecretFile {
    fn new(path: PathBuf, secret: Vec<u8>) -> SecretFile {
        SecretFile { path, exchange: Exchange::new(secret.clone()), seen: Ok(secret), is_taken: true }
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
                    return Turn { secrets: None, said };
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
        Turn { secrets: Some(self.exchange.secrets()), said }
    }
}

/// The secret in a file, if an endpoint takes it.
fn usable(path: &Path) -> Result<Vec<u8>, String> {
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
struct Exchange {
    current: Vec<u8>,
    phase: Phase,
}

enum Phase {
    Settled,
    /// `next` is accepted since a time.
    Announced {
        next: Vec<u8>,
        since: Instant,
    },
    /// `previous` is still accepted; the current secret was taken at a time.
    Switched {
        previous: Vec<u8>,
        since: Instant,
    },
}

impl Exchange {
    fn new(secret: Vec<u8>) -> Exchange {
        Exchange { current: secret, phase: Phase::Settled }
    }

    /// Whether the secret before the current one is still accepted.
    fn is_switched(&self) -> bool {
        matches!(self.phase, Phase::Switched { .. })
    }

    /// Begins to exchange the current secret for this one. Returns false if it is the newest already.
    fn begin(&mut self, secret: &[u8], now: Instant) -> bool {
        let newest = match &self.phase {
            Phase::Announced { next, .. } => next,
            _ => &self.current,
        };
        if newest == secret {
            return false;
        }
        self.phase = match std::mem::replace(&mut self.phase, Phase::Settled) {
            // The old secret is back. Other ends may have gone on to the new one.
            Phase::Announced { next, .. } if self.current == secret => {
                Phase::Switched { previous: next, since: now }
            }
            _ => Phase::Announced { next: secret.to_vec(), since: now },
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

    fn secrets(&self) -> Secrets {
        let also_accepted = match &self.phase {
            Phase::Settled => None,
            Phase::Announced { next: other, .. } | Phase::Switched { previous: other, .. } => {
                Some(other.clone())
            }
        };
        Secrets { current: self.current.clone(), also_accepted }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    const OLD: &[u8] = b"the old secret";
    const NEW: &[u8] = b"the new secret";
    const NEWEST: &[u8] = b"the newest secret";

    fn secrets(current: &[u8], also_accepted: Option<&[u8]>) -> Option<Secrets> {
        Some(Secrets { current: current.to_vec(), also_accepted: also_accepted.map(<[u8]>::to_vec) })
    }

    /// A file with the old secret, as this command has read it at its start.
    fn scene() -> (tempfile::TempDir, PathBuf, SecretFile, Instant) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("secret");
        fs::write(&path, OLD).expect("written");
        let file = SecretFile::new(path.clone(), OLD.to_vec());
        (folder, path, file, Instant::now())
    }

    #[test]
    fn a_changed_secret_is_exchanged_in_three_steps() {
        let (_folder, path, mut file, start) = scene();
        let mut at = |seconds: u64| file.turn(start + Duration::from_secs(seconds)).secrets;
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
        let mut at = |seconds: u64| file.turn(start + Duration::from_secs(seconds)).secrets;
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
        let mut file = SecretFile::new(key, OLD.to_vec());
        assert_eq!(file.turn(start), Turn::default());
        symlink("second", &next).expect("a link");
        fs::rename(&next, &data).expect("exchanged");
        assert_eq!(file.turn(start).secrets, None);
        assert_eq!(file.turn(start).secrets, secrets(OLD, Some(NEW)));
    }

    #[test]
    fn a_file_that_cannot_be_used_is_one_warning_and_leaves_the_secret() {
        let (_folder, path, mut file, start) = scene();
        let mut lines = |times: usize| -> Vec<String> {
            let turns: Vec<Turn> = (0..times).map(|_| file.turn(start)).collect();
            assert!(turns.iter().all(|turn| turn.secrets.is_none()), "{turns:?}");
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
        let mut exchange = Exchange::new(OLD.to_vec());
        assert!(exchange.begin(NEW, start) && !exchange.begin(NEW, start));
        assert!(exchange.begin(NEWEST, start + STEP / 2));
        assert_eq!(exchange.step(start + STEP), None, "the newest has its own time");
        assert_eq!(Some(exchange.secrets()), secrets(OLD, Some(NEWEST)));
        assert_eq!(exchange.step(start + 2 * STEP), Some(false));
        assert!(exchange.begin(NEW, start + 2 * STEP));
        assert_eq!(Some(exchange.secrets()), secrets(NEWEST, Some(NEW)));
        assert!(exchange.begin(NEWEST, start + 2 * STEP), "it is taken back");
        assert_eq!(Some(exchange.secrets()), secrets(NEWEST, Some(NEW)));
        assert_eq!(exchange.step(start + 3 * STEP), Some(true));
        assert_eq!(Some(exchange.secrets()), secrets(NEWEST, None));
    }
}
