//! The command of the campaign: `campaign --seeds N --from S [--minutes M]`, or `campaign --seed X [--trace]`.

use std::process::ExitCode;
use std::time::Duration;

use ferrywire_campaign::{Plan, campaign, trace};

const USAGE: &str =
    "usage: campaign [--seeds N] [--from S] [--minutes M] [--threads T] [--quick] | --seed X [--trace]";

#[derive(Default)]
struct Arguments {
    seeds: Option<u64>,
    from: u64,
    minutes: Option<u64>,
    threads: Option<usize>,
    seed: Option<u64>,
    trace: bool,
    quick: bool,
}

fn parse() -> Option<Arguments> {
    let mut words = std::env::args().skip(1);
    if words.next()? != "campaign" {
        return None;
    }
    let mut arguments = Arguments::default();
    while let Some(word) = words.next() {
        let flag = match word.as_str() {
            "--trace" => Some(&mut arguments.trace),
            "--quick" => Some(&mut arguments.quick),
            _ => None,
        };
        if let Some(flag) = flag {
            *flag = true;
            continue;
        }
        let value: u64 = words.next()?.parse().ok()?;
        match word.as_str() {
            "--seeds" => arguments.seeds = Some(value),
            "--from" => arguments.from = value,
            "--minutes" => arguments.minutes = Some(value),
            "--threads" => arguments.threads = Some(value as usize),
            "--seed" => arguments.seed = Some(value),
            _ => return None,
        }
    }
    // A campaign without a seed says nothing.
    let is_empty = arguments.seeds == Some(0) || arguments.minutes == Some(0);
    (!is_empty).then_some(arguments)
}

fn main() -> ExitCode {
    let Some(arguments) = parse() else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    if let Some(seed) = arguments.seed
        && arguments.trace
    {
        let (lines, well) = trace(seed);
        lines.iter().for_each(|line| println!("{line}"));
        return if well { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    let threads = std::thread::available_parallelism().map_or(1, |threads| threads.get());
    let plan = Plan {
        from: arguments.seed.unwrap_or(arguments.from),
        seeds: match (arguments.seed, arguments.seeds, arguments.minutes) {
            (Some(_), _, _) => 1,
            (_, Some(seeds), _) => seeds,
            (_, None, Some(_)) => u64::MAX,
            _ => 200,
        },
        threads: arguments.threads.unwrap_or(threads),
        time: arguments.minutes.map(|minutes| Duration::from_secs(60 * minutes)),
        quick: arguments.quick,
    };
    let report = campaign(plan);
    report.failures.iter().for_each(|failure| println!("{}\n", failure.text()));
    println!("{}", report.text());
    if report.is_well() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
