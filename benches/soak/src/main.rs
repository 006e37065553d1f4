//! The peers of the soak. `serve` owns regions that other processes write and read; `client` moves bytes and verifies
//! each of them. `soak.py` starts both kinds, disturbs them and counts.
//!
//! ```text
//!   client ── write, read, send, notify, cancel ──▶ serve     every byte comes from one file, the pool
//! ```
//!
//! Read next: `driver.rs`, the lines between these programs and `soak.py`; `client.rs`, the operations.

mod client;
mod driver;
mod pool;
mod server;
mod trouble;

use std::env;
use std::path::PathBuf;
use std::process::exit;
use std::time::Duration;

use ferrywire::{Builder, Encryption, Endpoint};

/// An operation that has not ended after this long has no end.
const OPERATION_LIMIT: Duration = Duration::from_secs(60);
/// Longest orderly close.
const CLOSE_LIMIT: Duration = Duration::from_secs(20);

const USAGE: &str = "usage: soak serve|client --pool FILE --metadata FILE [options]
  --pool FILE        the bytes that all operations move
  --metadata FILE    where the server is: serve writes it, client reads it
  --listen ADDRESS   serve: where to listen (default 127.0.0.1:0)
  --label NAME       the endpoint's label
  --nics LIST        NICs to use, by name
  --encryption WHEN  off, preferred or required (default off)
  --channels N       channels of each peer
  --memory WHERE     client: the memory of the region that it asks the server for: host, sim:N or cuda:N
  --seed N           client: seed of its operations";

/// The arguments of either program.
#[derive(Clone, Debug)]
struct Options {
    pool: PathBuf,
    metadata: PathBuf,
    listen: String,
    label: String,
    nics: Vec<String>,
    encryption: Encryption,
    channels: Option<usize>,
    memory: String,
    seed: u64,
}

fn usage(why: &str) -> ! {
    eprintln!("soak: {why}\n{USAGE}");
    exit(2)
}

impl Options {
    fn parse(arguments: &[String]) -> Options {
        let mut options = Options {
            pool: PathBuf::new(),
            metadata: PathBuf::new(),
            listen: "127.0.0.1:0".into(),
            label: String::new(),
            nics: Vec::new(),
            encryption: Encryption::Off,
            channels: None,
            memory: "host".into(),
            seed: 1,
        };
        for pair in arguments.chunks(2) {
            let [name, value] = pair else { usage(&format!("{} needs a value", pair[0])) };
            let number =
                || value.parse::<u64>().unwrap_or_else(|_| usage(&format!("{name}: {value} is no number")));
            match name.as_str() {
                "--pool" => options.pool = value.into(),
                "--metadata" => options.metadata = value.into(),
                "--listen" => options.listen = value.clone(),
                "--label" => options.label = value.clone(),
                "--nics" => options.nics = value.split(',').map(str::to_owned).collect(),
                "--encryption" => options.encryption = encryption(value),
                "--channels" => options.channels = Some(number() as usize),
                "--memory" => options.memory = value.clone(),
                "--seed" => options.seed = number(),
                _ => usage(&format!("unknown option {name}")),
            }
        }
        if options.pool.as_os_str().is_empty() || options.metadata.as_os_str().is_empty() {
            usage("--pool and --metadata are required");
        }
        options
    }

    fn builder(&self, secret: &str) -> Builder {
        let builder = Endpoint::builder().secret(secret).label(&self.label).encryption(self.encryption);
        let builder = if self.nics.is_empty() { builder } else { builder.nics(self.nics.clone()) };
        match self.channels {
            Some(channels) => builder.channels(channels),
            None => builder,
        }
    }
}

fn encryption(text: &str) -> Encryption {
    match text {
        "off" => Encryption::Off,
        "preferred" => Encryption::Preferred,
        "required" => Encryption::Required,
        _ => usage(&format!("--encryption: {text} is not off, preferred or required")),
    }
}

fn main() {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let outcome = match arguments.split_first() {
        Some((which, rest)) if which == "serve" => server::run(&Options::parse(rest)),
        Some((which, rest)) if which == "client" => client::run(&Options::parse(rest)),
        _ => usage("serve or client?"),
    };
    if let Err(trouble) = outcome {
        trouble.report();
        exit(1);
    }
}
