//! The plan of one run. Its `key=value` pairs serve as flags and as the line that the client sends to the server, so
//! that a run is configured on one side only.
//!
//! Invariant: a plan that passed [`Plan::check`] divides evenly, so both sides cut the same region the same way.

use std::fmt;

/// Most connections one run may use; also bounds what a server accepts.
pub const CONNECTIONS_MAX: usize = 1024;
/// Most bytes of buffer one side allocates.
pub const FOOTPRINT_MAX: u64 = 1 << 38;
/// Fewest bytes per connection for which a message is cut over the connections in `sync` mode. Shorter
/// messages go whole, over the connections in turn.
pub const STRIPE_MIN: u64 = 64 << 10;

/// The kind of measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Throughput of many messages.
    Bulk,
    /// Round trips of single messages.
    PingPong,
}

/// The cores on which threads run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Thread i of both sides on core i modulo the cores.
    Paired,
    /// Source thread i on core i, target thread i on core i + 1.
    Apart,
    /// Each thread on the core that the scheduler chooses.
    Free,
}

/// How a ping-pong waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Nonblocking receive with `sched_yield` between tries.
    Spin,
    /// Blocking receive.
    Blocking,
}

/// The plan of one run, which both sides have.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// The kind of measurement.
    pub mode: Mode,
    /// Data connections, one thread each on both sides.
    pub connections: usize,
    /// Bytes of a message; when streaming, of the whole region.
    pub size: u64,
    /// Bytes of buffer per side; 0 for as many as `size`.
    pub footprint: u64,
    /// Bytes per send or receive call, at most.
    pub call: u64,
    /// Passes over the region (streaming) or messages (`sync`, ping-pong); 0 if `seconds` ends the run.
    pub iterations: u64,
    /// Length of the timed part when `iterations` is 0.
    pub seconds: f64,
    /// Bytes sent before the timed part, over all connections.
    pub warmup: u64,
    /// `SO_SNDBUF` and `SO_RCVBUF`; 0 leaves the kernel's autotuning on.
    pub sockbuf: usize,
    /// Congestion control of each socket; `system` leaves the default.
    pub congestion: String,
    /// The cores on which threads run.
    pub placement: Placement,
    /// Whether each message is acknowledged, with at most `depth` outstanding.
    pub sync: bool,
    /// Messages outstanding in `sync` mode.
    pub depth: u64,
    /// Whether one call may carry several messages, in `sync` mode.
    pub batch: bool,
    /// How a ping-pong waits.
    pub wait: Wait,
}

impl Default for Plan {
    fn default() -> Self {
        Plan {
            mode: Mode::Bulk,
            connections: 2,
            size: 64 << 20,
            footprint: 0,
            call: 1 << 20,
            iterations: 0,
            seconds: 2.0,
            warmup: 512 << 20,
            sockbuf: 512 << 10,
            congestion: "cubic".into(),
            placement: Placement::Paired,
            sync: false,
            depth: 64,
            batch: false,
            wait: Wait::Spin,
        }
    }
}

impl Plan {
    /// Sets one field by its name. Returns `Ok(false)` if there is no such field, and an error that explains
    /// a value that is not valid.
    pub fn set(&mut self, key: &str, value: &str) -> Result<bool, String> {
        match key {
            "mode" => self.mode = choice(key, value, &[("bulk", Mode::Bulk), ("pingpong", Mode::PingPong)])?,
            "connections" => self.connections = number(key, value)?,
            "size" => self.size = bytes(value)?,
            "footprint" => self.footprint = bytes(value)?,
            "call" => self.call = bytes(value)?,
            "iters" => self.iterations = number(key, value)?,
            "seconds" => self.seconds = number(key, value)?,
            "warmup" => self.warmup = bytes(value)?,
            "sockbuf" => self.sockbuf = bytes(value)? as usize,
            "cc" => self.congestion = value.into(),
            "placement" => {
                let all =
                    [("paired", Placement::Paired), ("apart", Placement::Apart), ("free", Placement::Free)];
                self.placement = choice(key, value, &all)?;
            }
            "sync" => self.sync = choice(key, value, &[("on", true), ("off", false)])?,
            "depth" => self.depth = number(key, value)?,
            "batch" => self.batch = choice(key, value, &[("on", true), ("off", false)])?,
            "wait" => self.wait = choice(key, value, &[("spin", Wait::Spin), ("blocking", Wait::Blocking)])?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Parses the line that [`fmt::Display`] writes.
    pub fn from_line(line: &str) -> Result<Plan, String> {
        let mut plan = Plan::default();
        for word in line.split_whitespace() {
            let (key, value) = word.split_once('=').ok_or_else(|| format!("'{word}' is not key=value"))?;
            if !plan.set(key, value)? {
                return Err(format!(
                    "the peer sent an unknown field '{key}': are both ends the same version?"
                ));
            }
        }
        plan.check()?;
        Ok(plan)
    }

    /// Refuses plans that cannot be run. All later code relies on this check.
    pub fn check(&self) -> Result<(), String> {
        if self.connections == 0 || self.connections > CONNECTIONS_MAX {
            return Err(format!("--connections must be 1 to {CONNECTIONS_MAX}"));
        }
        if self.call == 0 || self.depth == 0 || self.size == 0 {
            return Err("--call, --depth and --size must not be 0".into());
        }
        if self.buffer_bytes() > FOOTPRINT_MAX {
            return Err(format!(
                "the buffer is larger than {FOOTPRINT_MAX} bytes: use a smaller --size or --footprint"
            ));
        }
        if !(self.seconds > 0.0 && self.seconds < 86400.0) {
            return Err("--seconds must be above 0 and below a day".into());
        }
        if !self.sync && self.size < self.connections as u64 {
            return Err("--size is smaller than one byte per connection".into());
        }
        if !self.congestion.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-') {
            return Err("--cc is not the name of a congestion control".into());
        }
        Ok(())
    }

    /// Whether the plan is a ping-pong.
    pub fn is_pingpong(&self) -> bool {
        self.mode == Mode::PingPong
    }

    /// Bytes of one message that travel on one connection; when streaming, the connection's part of the region.
    pub fn unit_bytes(&self) -> u64 {
        let cut = self.size / self.connections as u64;
        if self.sync && !self.is_striped() { self.size } else { cut }
    }

    /// Bytes of buffer that one connection cycles through: a whole number of units.
    pub fn part_bytes(&self) -> u64 {
        let unit = self.unit_bytes();
        (self.footprint / self.connections as u64 / unit).max(1) * unit
    }

    /// Bytes of buffer per side.
    pub fn buffer_bytes(&self) -> u64 {
        self.part_bytes().saturating_mul(self.connections as u64)
    }

    /// Messages that one connection may have outstanding in `sync` mode.
    pub fn depth_per_connection(&self) -> u64 {
        if self.is_striped() { self.depth } else { (self.depth / self.connections as u64).max(1) }
    }

    /// Number of units that connection `index` sends, if the run is limited by iterations.
    pub fn units_of(&self, index: usize) -> Option<u64> {
        if self.iterations == 0 {
            return None;
        }
        let (n, i) = (self.connections as u64, index as u64);
        Some(if self.is_striped() {
            self.iterations
        } else {
            self.iterations / n + u64::from(i < self.iterations % n)
        })
    }

    /// Warm-up bytes of one connection: whole passes over its part, at least one.
    pub fn warmup_bytes(&self) -> u64 {
        let part = self.part_bytes();
        (self.warmup / self.connections as u64).div_ceil(part).max(1) * part
    }

    fn is_striped(&self) -> bool {
        !self.sync || self.connections == 1 || self.size / self.connections as u64 >= STRIPE_MIN
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let on = |flag| if flag { "on" } else { "off" };
        write!(
            f,
            "mode={} connections={} size={} footprint={} call={} iters={} seconds={} warmup={} sockbuf={} cc={} \
             placement={} sync={} depth={} batch={} wait={}",
            if self.is_pingpong() { "pingpong" } else { "bulk" },
            self.connections,
            self.size,
            self.footprint,
            self.call,
            self.iterations,
            self.seconds,
            self.warmup,
            self.sockbuf,
            self.congestion,
            self.placement.name(),
            on(self.sync),
            self.depth,
            on(self.batch),
            self.wait.name(),
        )
    }
}

impl Placement {
    /// The placement as it is written on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Placement::Paired => "paired",
            Placement::Apart => "apart",
            Placement::Free => "free",
        }
    }
}

impl Wait {
    /// The way of waiting as it is written on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Wait::Spin => "spin",
            Wait::Blocking => "blocking",
        }
    }
}

/// Parses `4096`, `256K`, `64M`, `1G` (powers of 1024).
pub fn bytes(text: &str) -> Result<u64, String> {
    let (digits, shift) = match text.to_ascii_uppercase().chars().last() {
        Some('K') => (&text[..text.len() - 1], 10),
        Some('M') => (&text[..text.len() - 1], 20),
        Some('G') => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    let value: u64 =
        digits.parse().map_err(|_| format!("'{text}' is not a size such as 4096, 256K or 64M"))?;
    value.checked_mul(1 << shift).ok_or_else(|| format!("'{text}' is too large"))
}

fn number<T: std::str::FromStr>(key: &str, value: &str) -> Result<T, String> {
    value.parse().map_err(|_| format!("--{key}: '{value}' is not a number"))
}

fn choice<T: Copy>(key: &str, value: &str, all: &[(&str, T)]) -> Result<T, String> {
    let found = all.iter().find(|(name, _)| *name == value);
    found.map(|&(_, item)| item).ok_or_else(|| {
        let names: Vec<_> = all.iter().map(|(name, _)| *name).collect();
        format!("--{key} is one of {}, not '{value}'", names.join(", "))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_survives_the_wire() {
        let plan = Plan {
            sync: true,
            size: 4096,
            wait: Wait::Blocking,
            congestion: "reno".into(),
            ..Plan::default()
        };
        assert_eq!(Plan::from_line(&plan.to_string()), Ok(plan));
    }

    #[test]
    fn small_messages_alternate_and_large_ones_are_cut() {
        let small = Plan { sync: true, size: 4096, footprint: 1 << 20, connections: 4, ..Plan::default() };
        assert_eq!(
            (small.unit_bytes(), small.part_bytes(), small.depth_per_connection()),
            (4096, 1 << 18, 16)
        );
        let large = Plan { size: 1 << 20, ..small };
        assert_eq!(
            (large.unit_bytes(), large.part_bytes(), large.depth_per_connection()),
            (1 << 18, 1 << 18, 64)
        );
    }

    #[test]
    fn iterations_add_up_over_alternating_connections() {
        let plan = Plan { sync: true, size: 8, iterations: 10, connections: 4, ..Plan::default() };
        assert_eq!((0..4).map(|i| plan.units_of(i).unwrap()).sum::<u64>(), 10);
    }

    #[test]
    fn sizes_are_powers_of_1024_and_never_overflow() {
        assert_eq!(bytes("256k"), Ok(262_144));
        assert!(bytes("99999999999G").is_err());
        assert!(bytes("").is_err());
    }
}
