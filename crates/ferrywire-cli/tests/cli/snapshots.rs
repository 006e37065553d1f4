//! The words of the command: every help text and one run of each command, as stored in `snapshots/`.
//!
//! Figures, times, ports, paths and names of the machine are placeholders, so that the texts are those of any machine.
//! `INSTA_UPDATE=always cargo test -p ferrywire-cli --test cli snapshots` stores what the command prints now; the diff of
//! the commit then shows what users will see.

use std::net::SocketAddr;
use std::process::Output;

use crate::common::{ferrywire, run, text};
use crate::nixl::Environment;
use crate::tree::Tree;

const COMMANDS: [&str; 15] = [
    "",
    "bench",
    "bench serve",
    "bench connect",
    "topo",
    "doctor",
    "plugin",
    "watch",
    "report",
    "nccl",
    "nccl env",
    "nixl",
    "nixl install",
    "nixl status",
    "nixl remove",
];
/// The levels of `doctor`'s findings.
const LEVELS: [&str; 4] = ["FAIL", "warn", "note", "ok"];

/// Compares a text with the stored one of this name; blanks at the ends of lines do not count.
pub fn is_stored(name: &str, text: &str) {
    let text: String = text.lines().map(|line| line.trim_end().to_owned() + "\n").collect();
    let mut settings = insta::Settings::clone_current();
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    settings.bind(|| insta::assert_snapshot!(name, text));
}

/// Standard output of a command that went well.
pub fn printed(output: &Output) -> String {
    assert!(output.status.success(), "{:?}: {}", output.status, text(&output.stderr));
    text(&output.stdout)
}

/// A text without what differs between runs and machines; one blank between words, since widths differ too.
fn placeholders(text: &str) -> String {
    let lines = text.lines().map(|line| {
        let line = bottleneck(&congestion_control(line));
        line.split_whitespace().map(placeholder).collect::<Vec<_>>().join(" ")
    });
    lines.map(|line| line + "\n").collect()
}

fn placeholder(word: &str) -> String {
    let core = word.trim_matches(['(', ')', ',', ';', ':']);
    let stands_for = match core {
        _ if core.is_empty() => return word.to_owned(),
        _ if core.chars().all(|c| c == '─') => "─",
        _ if core.parse::<f64>().is_ok() => "N",
        _ if core.starts_with('/') => "PATH",
        _ if core.parse::<SocketAddr>().is_ok() => "ADDR:PORT",
        env!("CARGO_PKG_VERSION") => "VERSION",
        _ => core,
    };
    word.replacen(core, stands_for, 1)
}

/// Replaces the name of the congestion control: the kernel's default differs between hosts.
fn congestion_control(line: &str) -> String {
    match line.split_once("congestion control ") {
        Some((before, after)) => {
            let rest = after.find(',').map_or("", |end| &after[end..]);
            format!("{before}congestion control NAME{rest}")
        }
        None => line.to_owned(),
    }
}

/// Replaces the bottleneck, which differs between runs.
fn bottleneck(line: &str) -> String {
    match (line.strip_prefix("bottleneck: "), line.rfind(" (size ")) {
        (Some(_), Some(sizes)) => format!("bottleneck: BOTTLENECK{}", &line[sizes..]),
        _ => line.to_owned(),
    }
}

#[test]
fn help_of_every_command() {
    for command in COMMANDS {
        let name = format!("help {command}").trim().replace(' ', "_");
        is_stored(&name, &printed(&run(&format!("{command} --help"))));
        is_stored(&format!("{name}_short"), &printed(&run(&format!("{command} -h"))));
    }
}

#[test]
fn a_loopback_bench() {
    let output =
        run("bench --memory host --peer-memory host --sizes 4K --iters 20 --channels 2 --threads 1 \
                      --chunk 128K --window 8");
    is_stored("bench", &placeholders(&printed(&output)));
}

#[test]
fn latency_of_a_loopback_bench() {
    let output =
        run("bench --memory host --peer-memory host --pattern latency --sizes 64K --iters 20 --channels 1 \
                      --threads 1 --blocks 4 --verify off");
    is_stored("bench_latency", &placeholders(&printed(&output)));
}

#[test]
fn a_bench_of_several_endpoints() {
    let output = run("bench --memory host --peer-memory host --pattern all-to-all --gpus 0-1 \
                      --sizes 4K --iters 20 --channels 2 --threads 1");
    is_stored("bench_all_to_all", &placeholders(&printed(&output)));
}

#[test]
fn topo_of_recorded_hosts() {
    let topo = |tree: &str, args: &str| {
        let tree = Tree::named(tree);
        ferrywire(&format!("topo {args}")).arg("--root").arg(tree.root()).output().expect("it starts")
    };
    is_stored("topo_a3_high", &printed(&topo("a3-high", "")));
    is_stored("topo_small_vm", &printed(&topo("small-vm", "")));
    is_stored("topo_cross_numa", &printed(&topo("two-h200", "--allow-cross-numa")));
}

/// Findings are this machine's: only the form of their table is stored.
#[test]
fn the_table_of_doctor() {
    let shown = text(&run("doctor -v").stdout);
    let lines: Vec<&str> = shown.lines().collect();
    let [header, rows @ .., counts] = lines.as_slice() else { panic!("{shown}") };
    for row in rows {
        assert!(row.split_whitespace().next().is_some_and(|level| LEVELS.contains(&level)), "{row:?}");
    }
    assert!(!rows.is_empty(), "{shown}");
    let counts: Vec<String> = placeholders(counts)
        .split(", ")
        .map(|count| count.trim_end().trim_end_matches('s').to_owned())
        .collect();
    is_stored(
        "doctor",
        &format!("{}LEVEL SUBJECT EVIDENCE FIX\n{}\n", placeholders(header), counts.join(", ")),
    );
}

/// The plugin's devices are NICs of the machine; only loopback is present everywhere.
#[test]
fn the_simulated_plugin() {
    let mut command = ferrywire("plugin");
    command.arg(crate::hosted::library()).env("NCCL_GPUDIRECTTCPX_SOCKET_IFNAME", "lo");
    let output = command.output().expect("it starts");
    is_stored("plugin", &placeholders(&printed(&output)));
}

#[test]
fn status_of_nixl() {
    let Some((environment, _)) = Environment::with_two() else { return };
    let lacking = environment.run("status");
    assert_eq!(lacking.status.code(), Some(1));
    is_stored("nixl_status_lacking", &placeholders(&(text(&lacking.stdout) + &text(&lacking.stderr))));
    is_stored("nixl_install", &placeholders(&environment.good("install --as-ucx")));
    is_stored("nixl_status", &placeholders(&environment.good("status")));
}
