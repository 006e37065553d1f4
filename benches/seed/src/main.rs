//! `seed`: the loop of the system that ferrywire succeeds, over an NCCL net plugin, for comparison with `ferrywire bench`.
//!
//! Two processes, each with one thread that serves one GPU after another; GPU i sends to GPU i. The next message begins when
//! the target has all bytes of the current one. The target compares every byte of every message with the expected one,
//! which is not timed, and a wrong byte ends the run without a result.
//!
//! ```text
//!   source: run GPUS CHANNELS BYTES SPREAD      target: a handle, 128 bytes (for each channel of each GPU)
//!                                                       ready (it has accepted all channels)
//!           message NUMBER GPU                          done  (timed until here), then right, or wrong WHY
//!           end                                         cpu SECONDS
//! ```
//!
//! Reading order: this file has the protocol of the two processes and the timed part, [`pump`] the loop.

mod gpu;
mod pump;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use ferrywire_memory::pattern::WordPattern;
use ferrywire_ncclnet::abi::HANDLE_BYTES;
use ferrywire_ncclnet::{Handle, Library, Plugin};
use rustix::time::{ClockId, clock_gettime};

use gpu::Gpu;
use pump::{Channel, Receiver, STALL_LIMIT};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const HELP: &str = "\
usage: seed serve --plugin FILE [--listen ADDRESS] [--nics LIST] [--cuda]
       seed connect ADDRESS --plugin FILE [--nics LIST] [--cuda] [options]
  --listen ADDRESS   where the source connects to (default 127.0.0.1:0)
  --nics LIST        the plugin's devices to use, by name (default all)
  --cuda             memory of CUDA GPUs (default: of simulated ones)
  --gpus N           GPUs of each end (default 8)
  --channels N       channels of each GPU (default 8)
  --spread           every GPU has channels on all NICs (default: each GPU on one)
  --size BYTES       length of a message (default 67108864)
  --seconds S        length of the timed part, about (default 3)
The plugin reads its environment as ever, the same on both ends: without NCCL_DYNAMIC_CHUNK_SIZE=524288 GPUDirect-TCPX
moves nothing.
";

/// The parameters that both ends share.
struct Run {
    gpus: usize,
    channels: usize,
    bytes: usize,
    spread: bool,
}

struct Flags {
    /// Address to connect to; `None` if this end serves.
    address: Option<String>,
    listen: String,
    plugin: String,
    nics: Vec<String>,
    cuda: bool,
    seconds: f64,
    run: Run,
}

fn main() -> ExitCode {
    let flags = match parse(std::env::args().skip(1)) {
        Ok(flags) => flags,
        Err(error) => {
            eprintln!("seed: {error}\n{HELP}");
            return ExitCode::from(2);
        }
    };
    let result = match &flags.address {
        None => serve(&flags),
        Some(address) => connect(&flags, address),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("seed: {error}");
            ExitCode::FAILURE
        }
    }
}

fn parse(mut args: impl Iterator<Item = String>) -> Result<Flags> {
    let address = match args.next().as_deref() {
        Some("serve") => None,
        Some("connect") => Some(args.next().ok_or("connect: an address is missing")?),
        _ => return Err("the first argument must be serve or connect".into()),
    };
    let run = Run { gpus: 8, channels: 8, bytes: 64 << 20, spread: false };
    let (listen, plugin) = ("127.0.0.1:0".to_owned(), String::new());
    let mut flags = Flags { address, listen, plugin, nics: Vec::new(), cuda: false, seconds: 3.0, run };
    while let Some(flag) = args.next() {
        let mut value = || args.next().ok_or(format!("{flag}: a value is missing"));
        match flag.as_str() {
            "--listen" => flags.listen = value()?,
            "--plugin" => flags.plugin = value()?,
            "--nics" => flags.nics = value()?.split(',').map(str::to_owned).collect(),
            "--cuda" => flags.cuda = true,
            "--gpus" => flags.run.gpus = value()?.parse()?,
            "--channels" => flags.run.channels = value()?.parse()?,
            "--spread" => flags.run.spread = true,
            "--size" => flags.run.bytes = value()?.parse()?,
            "--seconds" => flags.seconds = value()?.parse()?,
            _ => return Err(format!("unknown option {flag}").into()),
        }
    }
    let Run { gpus, channels, bytes, .. } = flags.run;
    if flags.plugin.is_empty() || gpus == 0 || channels == 0 || bytes == 0 {
        return Err("--plugin FILE is missing, or --gpus, --channels or --size is 0".into());
    }
    Ok(flags)
}

/// Runs the end that receives.
fn serve(flags: &Flags) -> Result<()> {
    let listener = TcpListener::bind(&flags.listen)?;
    println!("listening on {}", listener.local_addr()?);
    let mut source = Control::new(listener.accept()?.0)?;
    let asked = source.line("run ")?;
    let [gpus, channels, bytes, spread] = numbers(&asked)?;
    let run = Run { gpus, channels, bytes, spread: spread == 1 };
    let (plugin, gpus) = (load(flags)?, gpus_of(&run, flags)?);
    let devices = devices_of(&plugin, &run, flags)?;
    let mut listening = Vec::new();
    for (gpu, devices) in gpus.iter().zip(&devices) {
        for device in devices {
            let (comm, handle) = gpu.current(|| Ok(plugin.listen(*device)?))?;
            source.lines.get_mut().write_all(handle.bytes())?;
            listening.push(comm);
        }
    }
    let (mut channels, mut listening) = (Vec::new(), listening.into_iter());
    for gpu in &gpus {
        let mut accepted = Vec::new();
        for mut listen in listening.by_ref().take(run.channels) {
            let comm = set_up("accept", || gpu.current(|| Ok(listen.accept()?)))?;
            listen.close()?;
            accepted.push(Channel::new(Receiver::new(comm, gpu)?, gpu)?);
        }
        channels.push(accepted);
    }
    source.say("ready")?;

    let (mut found, mut cpu_s) = (vec![0; run.bytes], 0.0);
    loop {
        let line = source.line("")?;
        let Some(message) = line.strip_prefix("message ") else { break };
        let [message, gpu] = numbers(message)?;
        let began_s = cpu_seconds();
        pump::transfer(&mut channels[gpu], gpus[gpu].memory().0, run.bytes)?;
        cpu_s += cpu_seconds() - began_s;
        source.say("done")?;
        gpus[gpu].read(&mut found)?;
        let wrong = contents(message).first_difference(0, &found);
        match wrong.map(|at| format!("GPU {gpu}, message {message}: byte {at} is wrong")) {
            None => source.say("right")?,
            Some(why) => {
                source.say(&format!("wrong {why}"))?;
                return Err(why.into());
            }
        }
    }
    source.say(&format!("cpu {cpu_s}"))?;
    channels.into_iter().flatten().try_for_each(Channel::close)
}

/// Runs the end that sends, and measures.
fn connect(flags: &Flags, address: &str) -> Result<()> {
    let run = &flags.run;
    let mut target = Control::new(TcpStream::connect(address)?)?;
    let began = Instant::now();
    target.say(&format!("run {} {} {} {}", run.gpus, run.channels, run.bytes, u8::from(run.spread)))?;
    let (plugin, gpus) = (load(flags)?, gpus_of(run, flags)?);
    let mut channels = Vec::new();
    for (gpu, devices) in gpus.iter().zip(devices_of(&plugin, run, flags)?) {
        let mut connected = Vec::new();
        for device in devices {
            let mut handle = [0; HANDLE_BYTES];
            target.lines.read_exact(&mut handle)?;
            let mut connecting = plugin.connect(device, &Handle::from_bytes(handle));
            let comm = set_up("connect", || gpu.current(|| Ok(connecting.poll()?)))?;
            connected.push(Channel::new(comm, gpu)?);
        }
        channels.push(connected);
    }
    target.line("ready")?;
    let setup_s = began.elapsed().as_secs_f64();

    let (mut bytes, mut moved, mut took, mut cpu_s) =
        (vec![0; run.bytes], vec![0; run.gpus], Duration::ZERO, 0.0);
    for message in 0.. {
        let (gpu, warms_up) = (message % run.gpus, message < run.gpus);
        if gpu == 0 && took.as_secs_f64() >= flags.seconds {
            break;
        }
        contents(message).fill(0, &mut bytes);
        gpus[gpu].write(&bytes)?;
        let (began, began_s) = (Instant::now(), cpu_seconds());
        target.say(&format!("message {message} {gpu}"))?;
        pump::transfer(&mut channels[gpu], gpus[gpu].memory().0, run.bytes)?;
        target.line("done")?;
        if !warms_up {
            (took, cpu_s) = (took + began.elapsed(), cpu_s + cpu_seconds() - began_s);
            moved[gpu] += run.bytes;
        }
        target.line("right")?;
    }
    target.say("end")?;
    let theirs_s: f64 = target.line("cpu ")?.parse()?;
    channels.into_iter().flatten().try_for_each(Channel::close)?;
    let gb = moved.iter().sum::<usize>() as f64 / 1e9;
    println!(
        "{{\"gb_per_s\":{:.4},\"cpu_s_per_gb\":{:.4},\"setup_s\":{setup_s:.3},\"gpu_bytes\":{moved:?},\"verified\":true}}",
        gb / took.as_secs_f64(),
        (cpu_s + theirs_s) / gb,
    );
    Ok(())
}

/// The pattern of message number `message`. Two messages differ in every word.
fn contents(message: usize) -> WordPattern {
    WordPattern {
        key: (message as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15),
        step: 0xd1b5_4a32_d192_ed03,
        flip: 0,
    }
}

fn load(flags: &Flags) -> Result<Plugin> {
    // SAFETY: the user named the file, whose code runs here; nothing changes the environment.
    Ok(unsafe { Library::open(&flags.plugin)?.load(None) }?)
}

fn gpus_of(run: &Run, flags: &Flags) -> Result<Vec<Gpu>> {
    (0..run.gpus).map(|gpu| Gpu::open(gpu as u32, flags.cuda, run.bytes)).collect()
}

/// The plugin's device of each channel of each GPU.
fn devices_of(plugin: &Plugin, run: &Run, flags: &Flags) -> Result<Vec<Vec<i32>>> {
    let mut devices = Vec::new();
    for device in 0..plugin.devices() {
        devices.push((plugin.properties(device)?.name, device));
    }
    let named = |nic: &String| devices.iter().find(|(name, _)| name == nic).map(|(_, device)| *device);
    let nics: Vec<i32> = match flags.nics.is_empty() {
        true => devices.iter().map(|(_, device)| *device).collect(),
        false => flags
            .nics
            .iter()
            .map(|nic| named(nic).ok_or(format!("the plugin has no {nic}")))
            .collect::<std::result::Result<_, _>>()?,
    };
    let nic = |gpu: usize, channel: usize| match run.spread {
        true => nics[channel % nics.len()],
        false => nics[gpu * nics.len() / run.gpus],
    };
    Ok((0..run.gpus).map(|gpu| (0..run.channels).map(|channel| nic(gpu, channel)).collect()).collect())
}

/// Calls `ask` until it returns a connection.
fn set_up<T>(what: &str, mut ask: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let since = Instant::now();
    loop {
        match ask()? {
            Some(made) => return Ok(made),
            None if since.elapsed() > STALL_LIMIT => {
                return Err(format!("{what} takes longer than {STALL_LIMIT:?}").into());
            }
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// The connection over which both ends exchange lines.
struct Control {
    lines: BufReader<TcpStream>,
}

impl Control {
    fn new(stream: TcpStream) -> Result<Control> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(STALL_LIMIT))?;
        Ok(Control { lines: BufReader::new(stream) })
    }

    fn say(&mut self, line: &str) -> Result<()> {
        Ok(self.lines.get_mut().write_all(format!("{line}\n").as_bytes())?)
    }

    /// Returns the rest of the next line, which has to begin with `prefix`.
    fn line(&mut self, prefix: &str) -> Result<String> {
        let mut line = String::new();
        self.lines.read_line(&mut line)?;
        match line.trim_end().strip_prefix(prefix) {
            Some(rest) if !line.is_empty() => Ok(rest.to_owned()),
            _ => {
                Err(format!("the other end sent {:?} where {prefix:?} was expected", line.trim_end()).into())
            }
        }
    }
}

fn numbers<const N: usize>(text: &str) -> Result<[usize; N]> {
    let numbers = text.split(' ').map(str::parse).collect::<std::result::Result<Vec<usize>, _>>()?;
    numbers.try_into().map_err(|_| format!("{text:?} is not {N} numbers").into())
}

/// CPU seconds of this process.
fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}
