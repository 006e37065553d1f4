//! How two processes agree on a run.
//!
//! Every connection begins with four bytes: `CTL0` or the index of a data connection. On the control connection the
//! source sends a plan as one line, the target answers `ready`, data connections follow, and after the run the
//! target reports what it saw. Between runs nothing is kept, so a server serves any number of plans and clients.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};

use crate::bulk::{self, Role, Side};
use crate::flags::Flags;
use crate::net;
use crate::pingpong::{self, RoundTrips};
use crate::plan::{Mode, Plan};
use crate::sys;

const CONTROL: [u8; 4] = *b"CTL0";

/// The result of a bulk run.
pub struct Outcome {
    /// Measurements of the sending process.
    pub source: Side,
    /// Measurements of the receiving process.
    pub target: Side,
    /// The congestion control of the source's first connection.
    pub congestion: String,
    /// Segments sent again, over all connections.
    pub retransmits: u64,
    /// Local and remote address of each data connection.
    pub pairs: Vec<String>,
}

impl Outcome {
    /// Rate in decimal gigabytes per second.
    pub fn gb_per_s(&self) -> f64 {
        self.source.total() as f64 / 1e9 / self.source.seconds
    }
}

/// The source's end of a control connection.
pub struct Client {
    control: BufReader<TcpStream>,
    peer: SocketAddr,
    bind: Vec<std::net::IpAddr>,
    to: Vec<(std::net::IpAddr, Option<u16>)>,
}

impl Client {
    /// Connects to a server.
    pub fn connect(peer: SocketAddr, flags: &Flags) -> io::Result<Client> {
        let failed = |e: io::Error| io::Error::new(e.kind(), format!("connecting to {peer}: {e}"));
        let mut control = TcpStream::connect(peer).map_err(failed)?;
        control.write_all(&CONTROL)?;
        Ok(Client { control: BufReader::new(control), peer, bind: flags.bind.clone(), to: flags.to.clone() })
    }

    /// Runs a bulk plan.
    pub fn bulk(&mut self, plan: &Plan) -> io::Result<Outcome> {
        let streams = self.open(plan)?;
        let pair = |s: &TcpStream| Ok(format!("{}>{}", s.local_addr()?.ip(), s.peer_addr()?.ip()));
        let pairs = streams.iter().map(pair).collect::<io::Result<_>>()?;
        let source = bulk::run(Role::Source, plan, &streams);
        if source.is_err() {
            // This ends the target's threads too, and the target's report then often explains the failure
            // better.
            streams.iter().for_each(|s| drop(s.shutdown(Shutdown::Both)));
        }
        let target = self.answer()?;
        let (source, target) = (source?, parse_side(&target)?);
        Ok(Outcome {
            source,
            target,
            congestion: net::congestion(&streams[0]),
            retransmits: streams.iter().map(sys::retransmits).sum(),
            pairs,
        })
    }

    /// Runs a ping-pong plan.
    pub fn pingpong(&mut self, plan: &Plan) -> io::Result<RoundTrips> {
        let streams = self.open(plan)?;
        let result = pingpong::source(plan, &streams[0]);
        drop(streams);
        self.answer()?;
        result
    }

    fn open(&mut self, plan: &Plan) -> io::Result<Vec<TcpStream>> {
        self.control.get_mut().write_all(format!("{plan}\n").as_bytes())?;
        self.answer()?;
        (0..plan.connections)
            .map(|index| {
                let from = self.bind.get(index % self.bind.len().max(1)).copied();
                let (ip, port) =
                    self.to.get(index % self.to.len().max(1)).copied().unwrap_or((self.peer.ip(), None));
                let mut stream =
                    net::connect(from, SocketAddr::new(ip, port.unwrap_or(self.peer.port())), plan)?;
                stream.write_all(&(index as u32).to_le_bytes())?;
                Ok(stream)
            })
            .collect()
    }

    /// Reads a line that has to begin with `ok`, and returns the rest of it; any other line is the peer's
    /// error.
    fn answer(&mut self) -> io::Result<String> {
        let mut line = String::new();
        self.control.read_line(&mut line)?;
        match line.trim_end().strip_prefix("ok") {
            Some(rest) => Ok(rest.trim().to_string()),
            None if line.is_empty() => Err(io::Error::other("the target closed the control connection")),
            None => Err(io::Error::other(format!("the target reports: {}", line.trim_end()))),
        }
    }
}

/// A server process on loopback, which ends when this value is dropped.
pub struct LocalServer {
    child: Child,
    /// Address on which the server listens.
    pub address: SocketAddr,
}

impl LocalServer {
    /// Starts this program again as a server on a free port.
    pub fn spawn() -> io::Result<LocalServer> {
        let args = ["serve", "--listen", "127.0.0.1:0", "--child"];
        let mut child = Command::new(std::env::current_exe()?).args(args).stdout(Stdio::piped()).spawn()?;
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("stdout is piped")).read_line(&mut line)?;
        let address = line.trim().parse().ok();
        let address = address.ok_or_else(|| io::Error::other("the server process did not start"))?;
        Ok(LocalServer { child, address })
    }
}

impl Drop for LocalServer {
    fn drop(&mut self) {
        // The child may have ended by itself, so a failure is ignored.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Serves clients, one after the other, until stopped. With `child` only the addresses are printed, for the
/// parent process to read.
pub fn serve(addresses: &[SocketAddr], child: bool) -> io::Result<()> {
    let listeners = net::listen(addresses)?;
    for listener in &listeners {
        let before = if child { "" } else { "listening on " };
        println!("{before}{}", listener.local_addr()?);
    }
    io::stdout().flush()?;
    loop {
        let (mut stream, first) = match accept(&listeners) {
            Ok(accepted) => accepted,
            Err(_) => continue,
        };
        if first != CONTROL {
            continue;
        }
        let mut control = BufReader::new(stream.try_clone()?);
        let mut line = String::new();
        while matches!(control.read_line(&mut line), Ok(n) if n > 0) {
            let answer = serve_plan(&line, &mut stream, &listeners);
            let text = answer.unwrap_or_else(|e| format!("failed: {e}").replace('\n', " "));
            if stream.write_all(format!("{text}\n").as_bytes()).is_err() {
                break;
            }
            line.clear();
        }
    }
}

fn serve_plan(line: &str, control: &mut TcpStream, listeners: &[TcpListener]) -> io::Result<String> {
    let plan = Plan::from_line(line).map_err(io::Error::other)?;
    control.write_all(b"ok\n")?;
    let streams = accept_data(&plan, listeners)?;
    match plan.mode {
        Mode::Bulk => bulk::run(Role::Target, &plan, &streams).map(|side| format_side(&side)),
        Mode::PingPong => {
            let result = std::thread::scope(|s| s.spawn(|| pingpong::target(&plan, &streams[0])).join());
            result.expect("the echo thread panicked").map(|()| "ok".into())
        }
    }
}

fn accept_data(plan: &Plan, listeners: &[TcpListener]) -> io::Result<Vec<TcpStream>> {
    let mut streams: Vec<Option<TcpStream>> = (0..plan.connections).map(|_| None).collect();
    while streams.iter().any(Option::is_none) {
        let (stream, first) = accept(listeners)?;
        if first == CONTROL {
            return Err(io::Error::other("another client connected, or this one started again"));
        }
        let index = u32::from_le_bytes(first) as usize;
        net::tune_accepted(&stream, plan)?;
        *streams
            .get_mut(index)
            .ok_or_else(|| io::Error::other("a data connection has an index beyond --connections"))? =
            Some(stream);
    }
    Ok(streams.into_iter().flatten().collect())
}

fn accept(listeners: &[TcpListener]) -> io::Result<(TcpStream, [u8; 4])> {
    let (mut stream, _) = listeners[sys::wait_readable(listeners)?].accept()?;
    let mut first = [0; 4];
    stream.read_exact(&mut first)?;
    stream.set_nodelay(true)?;
    Ok((stream, first))
}

fn format_side(side: &Side) -> String {
    let bytes: Vec<_> = side.bytes.iter().map(u64::to_string).collect();
    format!("ok {} {} {}", side.seconds, side.cpu_seconds, bytes.join(","))
}

fn parse_side(text: &str) -> io::Result<Side> {
    let parse = || {
        let mut words = text.split(' ');
        let (seconds, cpu_seconds) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        let bytes = words.next()?.split(',').map(|n| n.parse().ok()).collect::<Option<_>>()?;
        Some(Side { bytes, seconds, cpu_seconds })
    };
    parse().ok_or_else(|| io::Error::other(format!("the target's report cannot be parsed: {text}")))
}
