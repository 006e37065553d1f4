//! The parts of `--help` beside the comments of the flags: examples, exit status, and lines that fit a terminal.
//!
//! Invariant: no line of help is longer than [`LINE_CHARS_MAX`], without what clap adds. Read next: [`super`], whose
//! comments are the rest of the help.

/// Longest line of a long help, and longest short help, in characters.
pub const LINE_CHARS_MAX: usize = 80;

macro_rules! options_elsewhere {
    () => {
        "\
Options elsewhere:
  Every option but -v is also read from the environment: --gpu-nics is
  FERRYWIRE_GPU_NICS. `bench` also reads the TOML file of --config. The command
  line overrides the environment, and the environment overrides the file.
  Sizes take K, M and G (powers of 1024). Rates are decimal (GB/s: 1e9 bytes/s)."
    };
}

macro_rules! bench_exit_status {
    () => {
        "\
Exit status:
  0 finished and verified, 1 failed, 2 bad usage, 130 stopped by Ctrl-C,
  143 stopped by SIGTERM"
    };
}

/// Text behind the long help of `ferrywire`.
pub const COMMAND: &str = concat!(
    "\
Examples:
  ferrywire bench                                both ends on this host
  ferrywire bench serve --listen 0.0.0.0:7420    on one host
  ferrywire bench connect 10.0.1.2:7420          on the other host
  ferrywire topo                                 which GPU uses which NICs
  ferrywire doctor 10.0.1.2:7420                 this host and a peer
  ferrywire report a.json b.json --html r.html   stored results side by side

",
    options_elsewhere!(),
    "\n\n",
    bench_exit_status!()
);

/// Text behind the long help of `bench`.
pub const BENCH: &str = concat!(
    "\
Examples:
  ferrywire bench
      loopback mode: two processes of this host move and verify data
  ferrywire bench --memory host --sizes 4K..64M --seconds 5
      host memory only, every power of two from 4 KiB to 64 MiB
  ferrywire bench --pattern latency --op write
      half of the round trip
  ferrywire bench --json result.json
      results for programs; the table goes to standard error
  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d \\
      --rdzv-endpoint 10.0.1.1:29500 --no-python ferrywire bench
      one rank per GPU of two hosts; FERRYWIRE_SECRET must be set on both

",
    options_elsewhere!(),
    "\n\n",
    bench_exit_status!()
);

/// Text behind the long help of `watch`.
pub const WATCH: &str = "\
Examples:
  ferrywire watch                  a table per second, until Ctrl-C
  ferrywire watch --once --json    one object, for programs
  ferrywire watch -v               a row per channel

Exit status:
  0 also where no process uses ferrywire, 1 failed, 2 bad usage; with --once
  130 stopped by Ctrl-C, 143 stopped by SIGTERM";

/// Text behind the long help of `bench serve`.
pub const SERVE: &str = concat!(
    "\
Examples:
  ferrywire bench serve
      listens on 127.0.0.1:7420, for peers of this host
  ferrywire bench serve --listen 0.0.0.0:7420
      listens on every NIC and prints the connect command with a one-time secret
  ferrywire bench serve --listen 0.0.0.0:7420 --gpus 0-7
      one endpoint per GPU; the peer needs --gpus 0-7 too
  ferrywire bench serve --listen 0.0.0.0:7420 --plugin libnccl-net.so --once
      payload over an NCCL net plugin, for one run

",
    options_elsewhere!(),
    "\n\n",
    bench_exit_status!()
);

/// Text behind the long help of `bench connect`.
pub const CONNECT: &str = concat!(
    "\
Examples:
  FERRYWIRE_SECRET=... ferrywire bench connect 10.0.1.2:7420
      default sizes, GPU memory where both ends have a GPU
  ferrywire bench connect 10.0.1.2 --op read --memory host --peer-memory cuda:0
      reads from GPU 0 of the peer into host memory; the port is 7420
  ferrywire bench connect 10.0.1.2:7420 --gpus 0-7 --pattern all-to-all
      every GPU of this host to every GPU of the peer
  ferrywire bench connect 10.0.1.2:7420 --nics eth1,eth2 --channels 16
      16 channels over two NICs

",
    options_elsewhere!(),
    "\n\n",
    bench_exit_status!()
);

/// Text behind the long help of `topo`.
pub const TOPO: &str = "\
The plan:
  A GPU uses the NICs behind its own PCIe bridge, else those below its PCIe
  root, else those of its NUMA node. A note says where the plan is slower than
  it could be.
  Without a GPU all NICs serve host memory.

Examples:
  ferrywire topo
      the tables and the plan of this host
  ferrywire topo --gpu-nics 0-7=eth1,eth2 --channels 16
      the plan with two NICs for every GPU and 16 channels per GPU
  ferrywire topo --json
      the same facts for programs

Exit status:
  0 there is a plan, 1 there is no plan, or --clean-up has left changes (the
  tables are printed nevertheless), 2 bad usage";

/// Text behind the long help of `doctor`.
pub const DOCTOR: &str = "\
Levels:
  FAIL  something does not work
  warn  something is slower than it could be, or does not work for everything
  note  good to know
  ok    nothing to do; shown with -v
  Each finding has its evidence, and a fix where one is needed. doctor changes
  no setting and measures nothing.

Examples:
  ferrywire doctor
      this host
  ferrywire doctor 10.0.1.2:7420
      this host, and the way to a peer where `ferrywire bench serve` runs
  ferrywire doctor --plugin libnccl-net.so
      this host, and whether a plugin loads and has devices
  ferrywire doctor --json
      all findings for programs

Exit status:
  0 nothing failed, 1 a finding is FAIL, 2 bad usage, 130 stopped by Ctrl-C,
  143 stopped by SIGTERM";

/// Text behind the long help of `plugin`.
pub const PLUGIN: &str = "\
The plugin's code runs, in a process of its own: name only plugins that you
trust.

Examples:
  ferrywire plugin /usr/local/lib/libnccl-net.so
      versions, devices and properties of a file
  ferrywire plugin shorty
      the file that NCCL loads for NCCL_NET_PLUGIN=shorty
  ferrywire plugin libnccl-net.so --version v7 -v
      one interface version, with what the plugin logs

Exit status:
  0 the plugin works and has devices, 1 it does not, 2 bad usage,
  130 stopped by Ctrl-C, 143 stopped by SIGTERM";

/// Text behind the long help of `report`.
pub const REPORT: &str = "\
What is shown:
  The hosts and the options that differ between runs; throughput by size,
  latency, CPU seconds per GB, bytes by NIC, and the bottleneck.
  Results of several runs stand side by side where operation, pattern, memory,
  direction, endpoints, blocks, size and depth are equal. A ratio divides a
  figure by that of the first file.

Examples:
  ferrywire bench --json result.json
  ferrywire report result.json
      a table of one run
  ferrywire report before.json after.json --html report.html
      a web page with plots that compares two runs

Exit status:
  0 done, 1 a file cannot be read or holds no results, 2 bad usage";

/// Text behind the long help of `nccl` and its subcommand.
pub const NCCL: &str = "\
Examples:
  eval \"$(ferrywire nccl env)\"
      the plugin of this command, for this shell; on every host
  ferrywire nccl env /usr/local/lib/libnccl-net-ferrywire.so
      another file

NCCL before 2.21 takes no path: put the folder of libnccl-net-ferrywire.so into
LD_LIBRARY_PATH, and set NCCL_NET_PLUGIN=ferrywire. NCCL_NET=ferrywire makes
NCCL stop where it would fall back to its own sockets.

Exit status:
  0 the plugin loads here, 1 failed, 2 bad usage, 130 stopped by Ctrl-C,
  143 stopped by SIGTERM";

/// Text behind the long help of `nixl`.
pub const NIXL: &str = "\
Where the backend goes:
  NIXL loads backends from the folder beside its own library. `install` copies
  the ferrywire backend into that folder of each NIXL of the environment,
  nixl-cu12 and nixl-cu13 alike. NIXL_PLUGIN_DIR replaces the folder.
  Programs then ask NIXL for the backend FERRYWIRE.

Examples:
  ferrywire nixl install
      for the NIXL of this environment
  ferrywire nixl install --as-ucx
      also for programs that ask for the backend UCX
  ferrywire nixl status --python /opt/venv
      whether each NIXL of that environment has the backend
  ferrywire nixl remove
      deletes what install copied

Exit status:
  0 done; `status`: every NIXL has the backend. 1 failed; `status`: there is no
  NIXL, or a NIXL lacks the backend. 2 bad usage, 130 stopped by Ctrl-C,
  143 stopped by SIGTERM";

/// Long help in lines that fit a terminal; of yes-or-no options, no list of values.
pub fn wrapped(command: clap::Command) -> clap::Command {
    let about = command.get_long_about().map(|text| wrap(&text.to_string()));
    let command = command.mut_args(|arg| {
        let help = arg.get_long_help().map(|text| wrap(&text.to_string()));
        let yes_or_no = arg.is_require_equals_set();
        let arg = arg.hide_possible_values(yes_or_no);
        help.into_iter().fold(arg, clap::Arg::long_help)
    });
    let command = about.into_iter().fold(command, clap::Command::long_about);
    let subcommands: Vec<String> = command.get_subcommands().map(|sub| sub.get_name().to_owned()).collect();
    subcommands.into_iter().fold(command, |command, name| command.mut_subcommand(name, wrapped))
}

/// Breaks lines between words.
fn wrap(text: &str) -> String {
    let broken = |line: &str| {
        let mut lines = vec![String::new()];
        for word in line.split_whitespace() {
            let last = lines.last_mut().expect("there is a first line");
            if last.is_empty() {
                last.push_str(word);
            } else if last.chars().count() + 1 + word.chars().count() <= LINE_CHARS_MAX {
                *last += " ";
                *last += word;
            } else {
                lines.push(word.to_owned());
            }
        }
        lines.join("\n")
    };
    text.lines().map(broken).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::FromArgMatches;

    use super::super::command;
    use super::*;

    #[test]
    fn the_command_is_well_formed() {
        command().debug_assert();
    }

    /// The names of the options with the default `auto`.
    fn names_with_auto(command: &clap::Command, into: &mut BTreeSet<String>) {
        let is_auto = |arg: &&clap::Arg| {
            arg.get_help().is_some_and(|help| help.to_string().contains("[default: auto]"))
        };
        let longs = command.get_arguments().filter(is_auto).filter_map(|arg| arg.get_long());
        into.extend(longs.map(str::to_owned));
        command.get_subcommands().for_each(|sub| names_with_auto(sub, into));
    }

    /// The command lines that give each option of these names the word `auto`.
    fn autos(
        command: &clap::Command,
        names: &BTreeSet<String>,
        path: &[String],
        into: &mut Vec<Vec<String>>,
    ) {
        let is_auto = |arg: &&clap::Arg| arg.get_long().is_some_and(|long| names.contains(long));
        let positionals =
            command.get_positionals().filter(|arg| arg.is_required_set()).map(|_| "x:1".to_owned());
        let positionals: Vec<String> = positionals.collect();
        for long in command.get_arguments().filter(is_auto).filter_map(|arg| arg.get_long()) {
            let option = [format!("--{long}"), "auto".to_owned()];
            into.push([path, &positionals, &option].concat());
        }
        // A hidden command is for this program alone, and takes what its parent has settled.
        for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
            autos(sub, names, &[path, &[sub.get_name().to_owned()]].concat(), into);
        }
    }

    /// One variable may serve several commands. Regression: doctor took the word in --nics for the name of a NIC.
    #[test]
    fn every_option_with_the_default_auto_in_some_command_takes_the_word() {
        let (mut names, mut lines) = (BTreeSet::new(), Vec::new());
        names_with_auto(&command(), &mut names);
        autos(&command(), &names, &["ferrywire".to_owned()], &mut lines);
        assert!(lines.len() > 30, "{lines:?}");
        for line in lines {
            let matches =
                command().try_get_matches_from(&line).unwrap_or_else(|error| panic!("{line:?}: {error}"));
            let typed = super::super::Cli::from_arg_matches(&matches);
            let typed = format!("{:?}", typed.unwrap_or_else(|error| panic!("{line:?}: {error}")));
            assert!(typed.contains("Some(Auto)"), "{line:?}: the word is taken for a value: {typed}");
        }
    }

    /// The one-line helps of `-h`, of commands, options and their values.
    fn short_helps(command: &clap::Command) -> Vec<(String, String)> {
        let name = command.get_name();
        let said = |what: String, help: Option<&clap::builder::StyledStr>| {
            (what, help.map(ToString::to_string).unwrap_or_default())
        };
        let mut helps = vec![said(name.to_owned(), command.get_about())];
        for arg in command.get_arguments().filter(|arg| !arg.is_hide_set()) {
            let arg_name = format!("{name} {}", arg.get_id());
            let has_list = arg.get_action().takes_values() && !arg.is_hide_possible_values_set();
            let values = arg.get_possible_values();
            for value in values.iter().filter(|value| has_list && !value.is_hide_set()) {
                helps.push(said(format!("{arg_name} {}", value.get_name()), value.get_help()));
            }
            helps.push(said(arg_name, arg.get_help()));
        }
        let subcommands = command.get_subcommands().filter(|sub| !sub.is_hide_set());
        helps.extend(subcommands.flat_map(short_helps));
        helps
    }

    #[test]
    fn each_command_option_and_value_has_one_short_line() {
        let helps = short_helps(&command());
        assert!(helps.len() > 100, "options are missing: {helps:?}");
        for (what, help) in helps {
            let chars = help.chars().count();
            assert!((1..=LINE_CHARS_MAX).contains(&chars), "{what}: {chars} characters: {help}");
            assert!(!help.contains('\n') && !help.ends_with('.'), "{what}: {help}");
        }
    }

    /// The lines of the long help, including examples, which clap does not wrap.
    fn long_lines(command: &clap::Command) -> Vec<String> {
        let after = command.get_after_long_help().into_iter().map(ToString::to_string);
        let args = command.get_arguments().filter_map(|arg| arg.get_long_help()).map(ToString::to_string);
        let texts: Vec<String> =
            after.chain(args).chain(command.get_long_about().map(ToString::to_string)).collect();
        let too_long = |line: &&str| line.chars().count() > LINE_CHARS_MAX;
        let mut found: Vec<String> =
            texts.iter().flat_map(|text| text.lines()).filter(too_long).map(str::to_owned).collect();
        found.extend(command.get_subcommands().flat_map(long_lines));
        found
    }

    #[test]
    fn long_help_fits_a_terminal() {
        assert_eq!(long_lines(&command()), Vec::<String>::new());
        assert_eq!(wrap("a b\n\nc").as_str(), "a b\n\nc");
        assert_eq!(wrap(&"word ".repeat(20)).lines().count(), 2);
    }
}
