//! `ferrywire watch`: live rates of the processes of this host that use ferrywire.
//!
//! Samples come from the processes' own sockets (`ferrywire_metrics::processes`); this module takes two of them, computes
//! rates and shows these. Text of processes is sanitized, because root watches those of other users.
//! Read next: [`rates`].

mod rates;

use std::io::{self, IsTerminal};
use std::thread;
use std::time::{Duration, Instant};

use comfy_table::{CellAlignment, Table, presets};
use ferrywire_metrics::{Failure as Unread, processes};
use serde_json::json;

use crate::exit::{self, Failure, Outcome};
use crate::plan::WatchPlan;
use crate::{sanitize, sys};
use rates::{PathRates, ProcessRates};

/// How often a pause checks for Ctrl-C.
const SLICE: Duration = Duration::from_millis(50);
/// Switches a terminal to its second screen and clears that; what was shown before comes back at the end.
const ENTER_SCREEN: &str = "\x1b[?1049h";
const LEAVE_SCREEN: &str = "\x1b[?1049l";
const CLEAR_SCREEN: &str = "\x1b[H\x1b[2J";

/// Prints rates until Ctrl-C or the end of the reader, or once.
pub fn run(plan: &WatchPlan) -> Outcome {
    let screen = !plan.once && !plan.json && io::stdout().is_terminal();
    if screen {
        exit::print(ENTER_SCREEN)?;
    }
    let outcome = watch(plan, screen);
    if screen {
        exit::print(LEAVE_SCREEN)?;
    }
    outcome
}

fn watch(plan: &WatchPlan, screen: bool) -> Outcome {
    let (mut before, _) = processes();
    loop {
        pause(plan.interval);
        if sys::interrupted() {
            // Without --once the signal is the usual end.
            return if plan.once { Err(Failure::Interrupted) } else { Ok(()) };
        }
        let (now, unread) = processes();
        let rates = ProcessRates::of_all(&before, &now);
        let text = if plan.json { json(&rates, &unread) } else { text(&rates, &unread, plan) };
        let is_read = exit::print_if_read(&if screen { format!("{CLEAR_SCREEN}{text}") } else { text })?;
        if plan.once || !is_read {
            return Ok(());
        }
        before = now;
    }
}

fn pause(time: Duration) {
    let end = Instant::now() + time;
    while !sys::interrupted() {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        thread::sleep(left.min(SLICE));
    }
}

fn json(rates: &[ProcessRates], unread: &[Unread]) -> String {
    let unread = unread.iter().map(|failure| json!({ "socket": failure.path, "error": failure.why }));
    let object = json!({ "schema": 1, "processes": rates, "unread": unread.collect::<Vec<_>>() });
    format!("{object}\n")
}

fn text(rates: &[ProcessRates], unread: &[Unread], plan: &WatchPlan) -> String {
    let mut text = String::new();
    if rates.is_empty() && unread.is_empty() {
        text += "no process of this user uses ferrywire now (root sees those of all users)\n";
    } else if !rates.is_empty() {
        text += &format!("{}\n", table(rates, plan.verbose));
    }
    for failure in unread {
        text += &format!(
            "no answer from {}: {}\n",
            sanitize::line(&failure.path.display().to_string()),
            failure.why
        );
    }
    text
}

const COLUMNS: [&str; 11] =
    ["pid", "program", "peer", "NIC", "channels", "tx GB/s", "rx GB/s", "ops/s", "RTT us", "retr/s", "lost"];

fn table(rates: &[ProcessRates], verbose: bool) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header(COLUMNS);
    for (process, face) in
        rates.iter().flat_map(|process| process.faces.iter().map(move |face| (process, face)))
    {
        let program = format!("{} ({})", sanitize::line(&process.program), sanitize::line(face));
        let pid = process.pid.to_string();
        let paths: Vec<&PathRates> = process.paths.iter().filter(|path| path.face == *face).collect();
        if paths.is_empty() {
            table.add_row([pid.as_str(), &program, "no peer", "", "", "", "", "", "", "", ""]);
        }
        for path in paths {
            table.add_row(row(&pid, &program, path));
            for channel in path.channels.iter().filter(|_| verbose) {
                let state = if channel.alive {
                    format!("#{}", channel.channel)
                } else {
                    format!("#{} down", channel.channel)
                };
                let mut row = vec![String::new(), String::new(), String::new(), String::new(), state];
                row.extend([rate(channel.tx_gb_per_s), rate(channel.rx_gb_per_s), String::new()]);
                row.extend([
                    whole(channel.rtt_us),
                    whole(channel.retransmits_per_s),
                    channel.reconnects.to_string(),
                ]);
                table.add_row(row);
            }
        }
    }
    table.column_iter_mut().skip(4).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    table
}

fn row(pid: &str, program: &str, path: &PathRates) -> Vec<String> {
    let alive = path.channels.iter().filter(|channel| channel.alive).count();
    vec![
        pid.to_owned(),
        program.to_owned(),
        sanitize::line(&path.peer),
        sanitize::line(&path.nic),
        format!("{alive}/{}", path.channels.len()),
        rate(path.tx_gb_per_s),
        rate(path.rx_gb_per_s),
        path.operations_per_s.map_or_else(String::new, whole),
        whole(path.rtt_us),
        whole(path.retransmits_per_s),
        path.lost_channels.map_or_else(String::new, |lost| lost.to_string()),
    ]
}

fn rate(gb_per_s: f64) -> String {
    format!("{gb_per_s:.3}")
}

fn whole(value: f64) -> String {
    format!("{value:.0}")
}
