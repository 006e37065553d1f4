//! A case in a process of its own, because the plugin reads its environment once and may end the process.
//!
//! A test makes cases. Each runs the test's binary again, with the case's environment, for the same test, and there the
//! case's body runs instead. Nothing in a body depends on time: a case is killed as failed once it has made no progress
//! for a long time, or has used too much CPU time.

use std::collections::HashMap;
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{LazyLock, Mutex};
use std::time::{Duration, Instant};

/// The variable with the case that a process runs.
pub const CASE: &str = "TCPX_RULES_CASE";
/// Printed by a body's process when it begins; without it the body never ran.
const BEGUN: &str = "the case begins";
/// A case hangs if it makes no progress for this long.
const HANGS_AFTER: Duration = Duration::from_secs(120);
/// No progress: less CPU time than this. A waiting case uses a hundredth of a core at most.
const GETS_ON_WITH: Duration = Duration::from_secs(3);
/// A case that uses more CPU time than this loops.
const SPINS_AFTER: Duration = HANGS_AFTER;
/// Limit of checks, however little progress each time.
const LOOKS_MAX: usize = 10;

/// The variables of every case, unless it overrides them.
const BASE: [(&str, &str); 3] = [
    ("NCCL_GPUDIRECTTCPX_SOCKET_IFNAME", "lo"),
    ("NCCL_DYNAMIC_CHUNK_SIZE", "524288"),
    ("NCCL_GPUDIRECTTCPX_PROGRAM_FLOW_STEERING_WAIT_MICROS", "1000"),
];

/// Makes a case of the surrounding test: `case!("switches")`.
macro_rules! case {
    ($switches:expr) => {{
        fn here() {}
        $crate::case::Case::new(std::any::type_name_of_val(&here), $switches)
    }};
}
pub(crate) use case;

/// The number of cases that each test has made so far; parent and child count alike.
static COUNTS: LazyLock<Mutex<HashMap<String, usize>>> = LazyLock::new(Mutex::default);

/// A case that is being described.
pub struct Case {
    test: String,
    id: String,
    env: Vec<(String, Option<String>)>,
}

impl Case {
    /// A case of the test whose function encloses `here`, with these switches.
    pub fn new(here: &str, switches: &str) -> Case {
        let path = here.trim_end_matches("::here").replace("::{{closure}}", "");
        let test = path.split_once("::").map_or(path.as_str(), |(_, rest)| rest).to_owned();
        let mut counts = COUNTS.lock().unwrap();
        let count = counts.entry(test.clone()).or_default();
        *count += 1;
        let mut env: Vec<_> = BASE.iter().map(|(k, v)| (k.to_string(), Some(v.to_string()))).collect();
        env.push(("FERRYWIRE_TCPX_SIM".into(), Some(switches.into())));
        Case { test, id: count.to_string(), env }
    }

    /// Sets a variable.
    pub fn with(mut self, name: &str, value: &str) -> Case {
        self.env.push((name.into(), Some(value.into())));
        self
    }

    /// Unsets a variable.
    pub fn without(mut self, name: &str) -> Case {
        self.env.push((name.into(), None));
        self
    }

    /// The body must succeed; returns its output.
    pub fn passes(self, body: impl FnOnce()) -> String {
        self.run(body, |status| status.success(), "success")
    }

    /// The process must end by `exit(code)` and print `why`.
    pub fn exits(self, code: i32, why: &str, body: impl FnOnce()) {
        self.says(why, body, |status| status.code() == Some(code), &format!("exit({code})"));
    }

    /// The process must end by a signal and print `why`.
    pub fn dies_by(self, signal: i32, why: &str, body: impl FnOnce()) {
        self.says(why, body, |status| status.signal() == Some(signal), &format!("signal {signal}"));
    }

    /// The process must end by SIGABRT, because the host broke a rule.
    pub fn ends_as_misuse(self, why: &str, body: impl FnOnce()) {
        self.dies_by(libc::SIGABRT, &format!("misuse: {why}"), body);
    }

    fn says(self, why: &str, body: impl FnOnce(), right: impl Fn(ExitStatus) -> bool, expected: &str) {
        let (test, id) = (self.test.clone(), self.id.clone());
        let output = self.run(body, right, expected);
        let is_child = std::env::var(CASE).is_ok();
        assert!(is_child || output.contains(why), "case {id} of {test}: nobody says {why:?}:\n{output}");
    }

    fn run(self, body: impl FnOnce(), right: impl Fn(ExitStatus) -> bool, expected: &str) -> String {
        match std::env::var(CASE) {
            // This process was started for this case.
            Ok(id) if id == self.id => {
                eprintln!("{BEGUN}");
                body();
                std::process::exit(0);
            }
            Ok(_) => String::new(),
            Err(_) => {
                let (status, output) = self.run_child();
                let Case { test, id, env } = &self;
                let right = right(status) && output.contains(BEGUN);
                assert!(right, "case {id} of {test}: {status}, not {expected}: {env:?}\n{output}");
                output
            }
        }
    }

    fn run_child(&self) -> (ExitStatus, String) {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", &self.test, "--nocapture", "--include-ignored", "--test-threads=1"])
            .env(CASE, &self.id);
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("NCCL_")) {
            command.env_remove(name);
        }
        for (name, value) in &self.env {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        let (mut reader, writer) = std::io::pipe().unwrap();
        command.stdin(Stdio::null()).stdout(writer.try_clone().unwrap()).stderr(writer);
        let mut child = command.spawn().unwrap();
        drop(command);
        let output = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            let _ = reader.read_to_end(&mut bytes);
            String::from_utf8_lossy(&bytes).into_owned()
        });
        let status = wait(&mut child);
        (status, output.join().unwrap())
    }
}

fn wait(child: &mut Child) -> ExitStatus {
    let (mut since, mut had, mut looks) = (Instant::now(), Duration::ZERO, 0);
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if since.elapsed() > HANGS_AFTER {
            let now_had = cpu_time(child.id());
            looks += 1;
            if now_had < had + GETS_ON_WITH || now_had > SPINS_AFTER || looks == LOOKS_MAX {
                child.kill().unwrap();
            }
            (since, had) = (Instant::now(), now_had);
        }
        std::thread::sleep(Duration::from_millis(3));
    }
}

/// CPU time of a process; zero if it is gone.
fn cpu_time(pid: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name may contain spaces and brackets; user and system time are the 14th and 15th field.
    let after_name = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
    let ticks =
        after_name.split(' ').skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum::<u64>();
    // SAFETY: no memory is passed.
    let per_second = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
    Duration::from_secs_f64(ticks as f64 / per_second.max(1) as f64)
}
