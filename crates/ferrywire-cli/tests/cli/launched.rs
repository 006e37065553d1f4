//! Several processes of one run, as a launcher starts them.

use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::process::{Child, ChildStderr, Command, Output, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::thread;
use std::time::Duration;

use crate::common::{TIMEOUT_DEFAULT, end_within, ferrywire, text};

/// Variables of launchers, which may have started these tests.
const LAUNCHERS: [&str; 8] =
    ["SLURM_", "OMPI_", "PMIX_", "PMI_", "MPI_LOCAL", "TORCHELASTIC_", "MASTER_", "LOCAL_"];
/// Ports of their own for meetings: below those that the kernel gives away.
const PORTS: std::ops::Range<u16> = 12_000..27_000;

/// A free port outside of the ephemeral range.
pub fn port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let span = PORTS.end - PORTS.start;
    let first = (std::process::id() % u32::from(span)) as u16;
    loop {
        let next = NEXT.fetch_add(7, Ordering::Relaxed);
        let port = PORTS.start + (first.wrapping_add(next)) % span;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// The command without what a launcher of these tests may have set.
pub fn untouched(args: &str) -> Command {
    let mut command = ferrywire(args);
    let of_launcher = |name: &str| {
        LAUNCHERS.iter().any(|prefix| name.starts_with(prefix)) || ["RANK", "WORLD_SIZE"].contains(&name)
    };
    for (name, _) in std::env::vars().filter(|(name, _)| of_launcher(name)) {
        command.env_remove(name);
    }
    command
}

/// The processes of a run; they end with the test.
pub struct Launched {
    ranks: Vec<Child>,
}

impl Launched {
    /// Starts `world` ranks, the highest first; `change` adds to the command of each.
    pub fn start(world: usize, args: &str, change: impl Fn(usize, &mut Command)) -> Launched {
        let mut ranks: Vec<Child> = (0..world)
            .rev()
            .map(|rank| {
                let mut command = untouched(&format!("bench {args}"));
                change(rank, &mut command);
                command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("a rank starts")
            })
            .collect();
        ranks.reverse();
        Launched { ranks }
    }

    /// Starts this many processes, each with the flags of its rank.
    pub fn by_flags(world: usize, args: &str) -> Launched {
        let port = port();
        Launched::start(world, args, |rank, command| {
            command.args(flags(rank, world, port));
        })
    }

    /// One of the processes.
    pub fn rank(&mut self, rank: usize) -> &mut Child {
        &mut self.ranks[rank]
    }

    /// Waits until rank 0, which was started with -v, has finished a size; gives the rest of what it says.
    pub fn first_size(&mut self) -> Rest {
        let mut errors = BufReader::new(self.ranks[0].stderr.take().expect("piped"));
        let (mut line, mut said) = (String::new(), String::new());
        while !line.starts_with("finished") {
            line.clear();
            let more = errors.read_line(&mut line).expect("text") > 0;
            assert!(more, "it ended before it had finished a size: {said}");
            said += &line;
        }
        Rest(thread::spawn(move || rest_of(errors)))
    }

    /// Waits for all of them. Whatever is wrong, they end little later than the timeout.
    pub fn end(self) -> Vec<Output> {
        self.end_within(TIMEOUT_DEFAULT)
    }

    /// As `end`, with another timeout.
    pub fn end_within(mut self, timeout: Duration) -> Vec<Output> {
        let wait = |rank| thread::spawn(move || end_within(timeout, rank));
        let waiting: Vec<_> = self.ranks.drain(..).map(wait).collect();
        waiting.into_iter().map(|rank| rank.join().expect("it ends in time")).collect()
    }
}

impl Drop for Launched {
    fn drop(&mut self) {
        for rank in &mut self.ranks {
            let _ = rank.kill();
            let _ = rank.wait();
        }
    }
}

/// The output of rank 0 after its first finished size.
pub struct Rest(thread::JoinHandle<String>);

impl Rest {
    /// All of it.
    pub fn read(self) -> String {
        self.0.join().expect("read")
    }
}

fn rest_of(mut errors: BufReader<ChildStderr>) -> String {
    let mut rest = String::new();
    errors.read_to_string(&mut rest).expect("text");
    rest
}

/// The flags that identify a rank of one host.
pub fn flags(rank: usize, world: usize, port: u16) -> [String; 4] {
    [
        format!("--rank={rank}"),
        format!("--world-size={world}"),
        format!("--local-rank={rank}"),
        format!("--rendezvous=127.0.0.1:{port}"),
    ]
}

/// The one line in which a rank says what failed.
pub fn error_line(said: &str) -> String {
    let lines: Vec<&str> = said.lines().filter(|line| line.starts_with("error: ")).collect();
    assert_eq!(lines.len(), 1, "{said}");
    lines[0].to_owned()
}

/// All but rank 0 printed nothing, and all ended well.
pub fn all_well(outputs: &[Output]) {
    for (rank, output) in outputs.iter().enumerate() {
        assert!(output.status.success(), "rank {rank}: {:?}: {}", output.status, text(&output.stderr));
        if rank > 0 {
            assert_eq!(
                (text(&output.stdout), text(&output.stderr)),
                (String::new(), String::new()),
                "{rank}"
            );
        }
    }
}
