//! The command line. Fields of a run are set through [`Plan::set`]; settings that only the client needs are
//! in [`Flags`].

use std::net::{IpAddr, SocketAddr};

use crate::plan::{Mode, Placement, Plan, Wait, bytes};

/// The text of `--help`.
pub const HELP: &str = "\
raw: what plain TCP sockets carry, measured as well as we know how

  raw [options]                       both ends here, two processes, loopback
  raw serve [--listen A:P[,A:P..]]    one end, the target; stays up (default 127.0.0.1:7421)
  raw connect ADDR:PORT [options]     the other end, the source; everything is configured here

  --mode bulk|pingpong     throughput (default) or round trips
  --json                   one JSON line per result on stdout; the human line goes to stderr

bulk: a thread per connection and side, no framing
  --connections N[,N..]    data connections (default 2); a list is measured interleaved
  --size BYTES             buffer of each side, cut over the connections (default 64M)
  --call BYTES             most bytes per send and receive call (default 1M)
  --seconds S | --iters N  length of the timed part (default 2 s)
  --warmup BYTES           sent before it (default 512M)
  --sockbuf BYTES          socket buffers (default 512K; 0 leaves autotuning)
  --cc NAME                congestion control (default cubic; system leaves the host's)
  --placement paired|apart|free   paired: thread i of both sides on core i (default)
  --reps N                 repetitions; the median is reported (default 1, with --best 3)
  --best                   search placement x call x sockbuf (x connections) and report the best
  --sync                   acknowledge each --size message, at most --depth outstanding
  --depth N                (default 64)
  --batch                  with --sync: one call may carry several messages
  --footprint BYTES        with --sync: buffer that the messages cycle through (default one message)
  --to ADDR[:PORT],..      connect data to these target addresses, connection i to address i mod n
  --bind ADDR,..           from these local addresses, likewise; prints bytes per pair

pingpong: one connection
  --sizes 8,4K             message sizes (default 8,4K)
  --wait spin|blocking     spin is a nonblocking receive with sched_yield; default both
  --placement apart|paired|free   default apart: the two sides on different cores
  --seconds S | --iters N  (default 1 s each)
";

/// The command of a command line.
pub enum Command {
    /// Print the help text.
    Help,
    /// Run the target.
    Serve {
        /// Addresses to listen on.
        listen: Vec<SocketAddr>,
        /// Whether another `raw` has started this one: then it ends with that process and prints the port.
        child: bool,
    },
    /// Run both ends on this host.
    Local(Flags),
    /// Run the source.
    Connect {
        /// Address of the target.
        peer: SocketAddr,
        /// The settings of the measurement.
        flags: Flags,
    },
}

/// Settings of the client that are not part of the plan.
pub struct Flags {
    /// The plan of the run, before lists are expanded.
    pub plan: Plan,
    /// Connection counts to measure.
    pub connections: Vec<usize>,
    /// Message sizes of ping-pongs, in bytes.
    pub sizes: Vec<u64>,
    /// The ways in which ping-pongs wait.
    pub waits: Vec<Wait>,
    /// Local addresses of data connections.
    pub bind: Vec<IpAddr>,
    /// Target addresses of data connections; without a port, the port of the control connection.
    pub to: Vec<(IpAddr, Option<u16>)>,
    /// Number of repetitions.
    pub repetitions: usize,
    /// Whether to search for the best setting.
    pub best: bool,
    /// Whether to print JSON.
    pub json: bool,
}

impl Flags {
    /// One plan for each connection count.
    pub fn connection_plans(&self) -> impl Iterator<Item = Plan> {
        self.connections.iter().map(|&connections| Plan { connections, ..self.plan.clone() })
    }

    /// One plan for each size and way of waiting.
    pub fn pingpong_plans(&self) -> Vec<Plan> {
        let plan = |size, wait| Plan { size, wait, connections: 1, ..self.plan.clone() };
        self.waits.iter().flat_map(|&wait| self.sizes.iter().map(move |&size| plan(size, wait))).collect()
    }
}

/// Parses the arguments after the program's name.
pub fn parse(args: impl Iterator<Item = String>) -> Result<Command, String> {
    let mut args = args.peekable();
    match args.peek().map(String::as_str) {
        Some("serve") => parse_serve(args.skip(1)),
        Some("connect") => {
            let mut args = args.skip(1);
            let peer = args.next().ok_or("connect needs ADDR:PORT")?;
            if peer == "--help" {
                return Ok(Command::Help);
            }
            let peer = peer.parse().map_err(|_| format!("'{peer}' is not ADDR:PORT"))?;
            Ok(parse_flags(args)?.map_or(Command::Help, |flags| Command::Connect { peer, flags }))
        }
        _ => Ok(parse_flags(args)?.map_or(Command::Help, Command::Local)),
    }
}

fn parse_serve(mut args: impl Iterator<Item = String>) -> Result<Command, String> {
    let (mut listen, mut child) = (vec![SocketAddr::from(([127, 0, 0, 1], 7421))], false);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--help" | "-h" => return Ok(Command::Help),
            "--listen" => listen = list(&value(&arg, &mut args)?, |a| a.parse().ok())?,
            "--child" => child = true,
            _ => return Err(format!("serve has no option '{arg}'")),
        }
    }
    Ok(Command::Serve { listen, child })
}

/// Parses flags. Returns `None` if help is requested.
fn parse_flags(mut args: impl Iterator<Item = String>) -> Result<Option<Flags>, String> {
    let mut flags = Flags {
        plan: Plan::default(),
        connections: vec![Plan::default().connections],
        sizes: vec![8, 4096],
        waits: vec![Wait::Spin, Wait::Blocking],
        bind: vec![],
        to: vec![],
        repetitions: 0,
        best: false,
        json: false,
    };
    let (mut placed, mut timed) = (false, false);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--help" | "-h" => return Ok(None),
            "--json" => flags.json = true,
            "--best" => flags.best = true,
            "--sync" => flags.plan.sync = true,
            "--batch" => flags.plan.batch = true,
            "--connections" => flags.connections = list(&value(&arg, &mut args)?, |n| n.parse().ok())?,
            "--sizes" => flags.sizes = list(&value(&arg, &mut args)?, |s| bytes(s).ok())?,
            "--bind" => flags.bind = list(&value(&arg, &mut args)?, |a| a.parse().ok())?,
            "--to" => flags.to = list(&value(&arg, &mut args)?, target)?,
            "--reps" => flags.repetitions = list(&value(&arg, &mut args)?, |n| n.parse().ok())?[0],
            _ => {
                let key = arg.strip_prefix("--").ok_or_else(|| format!("unexpected argument '{arg}'"))?;
                let known = Plan::default().set(key, "").unwrap_or(true);
                if !known {
                    return Err(format!("unknown option '{arg}'"));
                }
                flags.plan.set(key, &value(&arg, &mut args)?)?;
                placed |= key == "placement";
                timed |= key == "seconds";
                if key == "wait" {
                    flags.waits = vec![flags.plan.wait];
                }
            }
        }
    }
    if flags.plan.mode == Mode::PingPong {
        flags.plan.placement = if placed { flags.plan.placement } else { Placement::Apart };
        flags.plan.seconds = if timed { flags.plan.seconds } else { 1.0 };
        flags.pingpong_plans().iter().try_for_each(Plan::check)?;
    } else {
        flags.connection_plans().try_for_each(|plan| plan.check())?;
    }
    if flags.repetitions == 0 {
        flags.repetitions = if flags.best { 3 } else { 1 };
    }
    Ok(Some(flags))
}

fn value(flag: &str, args: &mut impl Iterator<Item = String>) -> Result<String, String> {
    args.next().ok_or_else(|| format!("{flag} needs a value"))
}

fn list<T>(text: &str, parse: impl Fn(&str) -> Option<T>) -> Result<Vec<T>, String> {
    text.split(',')
        .map(|item| parse(item).ok_or_else(|| format!("'{item}' is not a valid entry of the list")))
        .collect()
}

fn target(text: &str) -> Option<(IpAddr, Option<u16>)> {
    let with_port = text.parse::<SocketAddr>().map(|a| (a.ip(), Some(a.port())));
    with_port.or_else(|_| text.parse().map(|ip| (ip, None))).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn local(line: &str) -> Result<Flags, String> {
        match parse(line.split_whitespace().map(String::from))? {
            Command::Local(flags) => Ok(flags),
            _ => Err("not local".into()),
        }
    }

    #[test]
    fn lists_expand_to_plans() {
        let flags = local("--connections 1,4 --size 8M --sync").unwrap();
        let plans: Vec<_> = flags.connection_plans().map(|p| (p.connections, p.size, p.sync)).collect();
        assert_eq!(plans, [(1, 8 << 20, true), (4, 8 << 20, true)]);
    }

    #[test]
    fn mistakes_are_named() {
        assert!(local("--sizee 8").err().unwrap().contains("--sizee"));
        assert!(local("--placement up").err().unwrap().contains("paired"));
        assert!(local("--connections 0").is_err());
        assert!(local("--size").err().unwrap().contains("needs a value"));
    }
}
