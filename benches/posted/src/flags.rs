//! The flags of a run.

use std::str::FromStr;

/// The text of `--help`.
pub const HELP: &str = "\
usage: posted --plugin FILE [options]      both ends, two processes of this host; prints one JSON line
  --device N        device of the plugin, on both ends (default 0)
  --comms N         connections, with a thread each on both ends (default 1)
  --chunk BYTES     length of each message (default 524288)
  --window N        requests posted per connection (default 16)
  --footprint BYTES memory of each end that messages cycle through (default 268435456)
  --seconds S       length of the timed part, about (default 2)
  --pin             thread i of both ends keeps to core i, and what the plugin starts from there too
  --exchange        instead, messages both ways at once over every connection, one thread at each end, and the next
                    when all are here: prints how long that takes; --window, --footprint and --pin are for the other
  --every US        --exchange: both ends begin one so long after the one before, or late (default 0: at once)
  --plain           --exchange over sockets of that thread, without a plugin
The plugin reads its environment as ever; both ends have the same.
";

/// The parameters of a run.
#[derive(Clone, Debug)]
pub struct Flags {
    pub plugin: String,
    pub device: i32,
    pub comms: usize,
    pub chunk: usize,
    pub window: usize,
    pub footprint: usize,
    pub seconds: f64,
    pub pin: bool,
    pub exchange: bool,
    pub plain: bool,
    pub every_us: f64,
    /// Whether this process receives. The other process starts it.
    pub target: bool,
}

impl Flags {
    /// Bytes of memory of one connection: whole messages.
    pub fn part(&self) -> usize {
        (self.footprint / self.comms / self.chunk).max(1) * self.chunk
    }
}

/// Parses the command line. Returns `None` if help is requested.
pub fn parse(mut args: impl Iterator<Item = String>) -> Result<Option<Flags>, String> {
    let mut flags = Flags {
        plugin: String::new(),
        device: 0,
        comms: 1,
        chunk: 512 << 10,
        window: 16,
        footprint: 256 << 20,
        seconds: 2.0,
        pin: false,
        exchange: false,
        plain: false,
        every_us: 0.0,
        target: false,
    };
    while let Some(flag) = args.next() {
        let value = &mut args;
        match flag.as_str() {
            "--help" | "-h" => return Ok(None),
            "--plugin" => flags.plugin = number(&flag, value)?,
            "--device" => flags.device = number(&flag, value)?,
            "--comms" => flags.comms = number(&flag, value)?,
            "--chunk" => flags.chunk = number(&flag, value)?,
            "--window" => flags.window = number(&flag, value)?,
            "--footprint" => flags.footprint = number(&flag, value)?,
            "--seconds" => flags.seconds = number(&flag, value)?,
            "--pin" => flags.pin = true,
            "--exchange" => flags.exchange = true,
            "--plain" => flags.plain = true,
            "--every" => flags.every_us = number(&flag, value)?,
            "--target" => flags.target = true,
            _ => return Err(format!("unknown option {flag}")),
        }
    }
    let sound = (0.0..=1e6).contains(&flags.every_us)
        && flags.comms > 0
        && flags.window > 0
        && (1..=1 << 30).contains(&flags.chunk)
        && flags.seconds > 0.0;
    match () {
        () if (flags.plain || flags.every_us != 0.0) && !flags.exchange => {
            Err("--plain and --every need --exchange".to_owned())
        }
        () if flags.plugin.is_empty() != flags.plain => {
            Err("--plugin FILE is missing, or given together with --plain".to_owned())
        }
        () if !sound => {
            Err("--comms, --window, --chunk and --seconds are above 0, --chunk up to 1 GiB, --every up to a million"
                .to_owned())
        }
        () => Ok(Some(flags)),
    }
}

fn number<T: FromStr>(flag: &str, args: &mut impl Iterator<Item = String>) -> Result<T, String> {
    let text = args.next().ok_or_else(|| format!("{flag}: a value is missing"))?;
    text.parse().map_err(|_| format!("{flag} {text}: the value is not valid"))
}
