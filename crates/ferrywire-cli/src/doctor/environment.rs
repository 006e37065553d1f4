//! Environment variables of ferrywire and NCCL: unknown names, invalid values, and values that name missing NICs or
//! files.
//!
//! Invariant: [`judge`] reads no variable itself; `bench`'s own parser and plan find invalid values. Read next:
//! `finding.rs`.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use clap::FromArgMatches;
use ferrywire::limits;

use super::finding::{Finding, Level};
use crate::args::{self, Cli};
use crate::auto::AUTO;
use crate::exit::Failure;
use crate::plan::{self, Plan};

const SUBJECT: &str = "environment";
/// Variables that do not belong to an option of a command.
const OTHERS: [&str; 24] = [
    "FERRYWIRE_SECRET",
    "FERRYWIRE_SECRET_HANDED",
    "FERRYWIRE_SECRET_HANDED_TOO",
    "FERRYWIRE_TRACE",
    "FERRYWIRE_SUPERVISED",
    "FERRYWIRE_PLUGIN_WATCHED",
    "FERRYWIRE_NCCL_ENCRYPT",
    "FERRYWIRE_NCCL_THREADS",
    "FERRYWIRE_NCCL_SOCKETS",
    "FERRYWIRE_NCCL_INLINE_BYTES",
    "FERRYWIRE_NCCL_SPIN_US",
    "FERRYWIRE_NCCL_MERGE",
    "FERRYWIRE_NCCL_CHANNELS_ASKED",
    "FERRYWIRE_NCCL_PIECE_ASKED",
    "FERRYWIRE_TCPX_SIM",
    "FERRYWIRE_SIM_GPU",
    "FERRYWIRE_SIM_GPU_FAULTS",
    // Only tests use this variable.
    "FERRYWIRE_LOG",
    "FERRYWIRE_LONG",
    "FERRYWIRE_SEED",
    "FERRYWIRE_SEEDS",
    "FERRYWIRE_PYTHON",
    "FERRYWIRE_WRITE",
    "FERRYWIRE_DEVMEM_VM",
];

/// The variables that are set, and the command's errors about them.
#[derive(Clone, Debug, Default)]
pub struct Environment {
    /// Variables of ferrywire and NCCL.
    pub variables: Vec<(String, String)>,
    /// Errors about values that no other option makes valid, one line each.
    pub refused: Vec<String>,
    /// Errors of the commands' plans, one line each. Options that are typed may make such a value valid.
    pub refused_alone: Vec<String>,
    /// Missing files, with the variables that name them.
    pub missing_files: Vec<(String, String)>,
}

impl Environment {
    /// Reads the environment of this process.
    pub fn read() -> Environment {
        let named = |name: &str| name.starts_with("FERRYWIRE_") || name.starts_with("NCCL_");
        let variables = std::env::vars_os().filter_map(|(name, value)| {
            let name = name.into_string().ok().filter(|name| named(name))?;
            Some((name, value.to_string_lossy().into_owned()))
        });
        let variables: Vec<_> = variables.collect();
        let missing_files = variables.iter().filter(|(name, value)| {
            let names_file = ["NCCL_NET_PLUGIN", "FERRYWIRE_PLUGIN"].contains(&name.as_str());
            names_file && value.contains('/') && !Path::new(value).exists()
        });
        let (refused, refused_alone) = refusals();
        Environment { missing_files: missing_files.cloned().collect(), refused, refused_alone, variables }
    }
}

/// Parses and plans each command once, because its options read the environment. Returns the errors that stay whatever
/// options are typed, and the others.
fn refusals() -> (Vec<String>, Vec<String>) {
    // No name is looked up, and no driver is loaded to choose the memory.
    let memory = std::env::var_os(args::variable("memory")).filter(|memory| memory != AUTO);
    let memory: &[&str] = if memory.is_some() { &[] } else { &["--memory=host"] };
    let lines: [(&[&str], &[&str]); 3] = [
        (&["bench", "serve", "--listen=127.0.0.1:1"], memory),
        (&["bench", "connect", "127.0.0.1:1"], memory),
        (&["topo"], &[]),
    ];
    let said = lines.into_iter().filter_map(|(line, more)| refusal(&[&["ferrywire"], line, more].concat()));
    let said = said.chain(refused_address("listen"));
    let (stays, alone): (Vec<_>, Vec<_>) = said.partition(|refusal| matches!(refusal, Refusal::Stays(_)));
    let lines = |refusals: Vec<Refusal>| {
        let first = |(Refusal::Stays(why) | Refusal::Alone(why))| why.lines().next().map(str::to_owned);
        refusals.into_iter().filter_map(first).collect::<BTreeSet<_>>().into_iter().collect()
    };
    (lines(stays), lines(alone))
}

/// The error about the address in the variable of an option. No name is looked up.
fn refused_address(option: &str) -> Option<Refusal> {
    let address = std::env::var(args::variable(option)).ok()?;
    let refused = plan::with_port(&format!("--{option}"), &address).err()?;
    Some(Refusal::Alone(refused.message()))
}

/// Why a command line is refused.
enum Refusal {
    /// Whatever options are typed besides.
    Stays(String),
    /// By its plan: another option may make it valid.
    Alone(String),
}

/// The error about a command line and its environment; `None` if they are valid.
fn refusal(line: &[&str]) -> Option<Refusal> {
    let parsed = args::command().try_get_matches_from(line).and_then(|found| Cli::from_arg_matches(&found));
    let typed = match parsed {
        Ok(typed) => typed,
        Err(error) => return Some(Refusal::Stays(error.to_string())),
    };
    if FILES.into_iter().any(is_read_once) {
        return None;
    }
    let is_missing = |option| named_by(option).is_some_and(|path| !path.exists());
    let engine = match plan::plan(typed) {
        Ok(Plan::Serve(plan)) => plan.engine,
        Ok(Plan::Connect(plan)) => plan.engine,
        Ok(_) | Err(Failure::Failed(_)) => return None,
        Err(failure) if FILES.into_iter().any(is_missing) => return Some(Refusal::Stays(failure.message())),
        Err(failure) => return Some(Refusal::Alone(failure.message())),
    };
    let least = limits::SECRET_BYTES_MIN;
    let is_short = engine.secret.is_some_and(|secret| secret.len() < least);
    is_short.then(|| Refusal::Stays(format!("secret must be at least {least} bytes long")))
}

/// Options that name files which a plan reads.
const FILES: [&str; 2] = ["secret-file", "config"];

/// The file that the variable of an option names.
fn named_by(option: &str) -> Option<PathBuf> {
    std::env::var_os(args::variable(option)).map(PathBuf::from)
}

/// Whether the variable of an option names a file that may not be read again, such as a pipe.
fn is_read_once(option: &str) -> bool {
    let found = named_by(option).and_then(|path| path.metadata().ok());
    found.is_some_and(|found| !found.is_file() && !found.is_dir())
}

/// The variables of all options.
fn known() -> BTreeSet<String> {
    fn collect(command: &clap::Command, into: &mut BTreeSet<String>) {
        for arg in command.get_arguments() {
            into.extend(arg.get_long().into_iter().chain(args::former_names(arg)).map(args::variable));
        }
        command.get_subcommands().for_each(|sub| collect(sub, into));
    }
    let mut known = OTHERS.map(str::to_owned).into();
    collect(&args::command(), &mut known);
    known
}

/// Today's and a former variable of each option that has both.
fn renamed() -> BTreeSet<(String, String)> {
    fn collect(command: &clap::Command, into: &mut BTreeSet<(String, String)>) {
        for arg in command.get_arguments() {
            let pair = |(today, former): (&str, &str)| (args::variable(today), args::variable(former));
            let today = arg.get_long().into_iter();
            into.extend(
                today.flat_map(|today| args::former_names(arg).map(move |former| (today, former))).map(pair),
            );
        }
        command.get_subcommands().for_each(|sub| collect(sub, into));
    }
    let mut renamed = BTreeSet::new();
    collect(&args::command(), &mut renamed);
    renamed
}

/// Former variables that have no effect, because today's variable of the option has another value.
fn overridden<'a>(value: impl Fn(&str) -> Option<&'a String>) -> Vec<Finding> {
    let both = |(today, former): (String, String)| {
        let (counts, ignored) = (value(&today)?, value(&former)?);
        let evidence = format!("{former} is {ignored} and {today} is {counts}: {today} counts");
        let fix = format!("unset {former}, the former name of {today}");
        (counts != ignored).then(|| Finding::ok("former-variable", former.clone(), evidence).warn(fix))
    };
    renamed().into_iter().filter_map(both).collect()
}

/// The findings about the environment; `nics` are the names of the host's NICs.
pub fn judge(environment: &Environment, nics: &[String]) -> Vec<Finding> {
    let known = known();
    let ours = environment.variables.iter().filter(|(name, _)| name.starts_with("FERRYWIRE_"));
    let unknown = ours.filter(|(name, _)| !known.contains(name));
    let mut found: Vec<Finding> = unknown
        .map(|(name, _)| {
            let found =
                Finding::ok("unknown-variable", name.clone(), "no option or setting has this variable");
            found.warn(format!("unset {name}, or correct its name: the variable has no effect"))
        })
        .collect();
    found.extend(environment.refused.iter().map(|why| {
        Finding::ok("bad-variable", SUBJECT, why.clone()).fail("fix or unset the variable: bench refuses it")
    }));
    found.extend(environment.refused_alone.iter().map(|why| {
        let fix = "fix or unset the variable: without further options bench refuses it";
        Finding::ok("bad-variable", SUBJECT, why.clone()).warn(fix)
    }));
    found.extend(environment.missing_files.iter().map(|(name, file)| {
        Finding::ok("plugin-variable", name.clone(), format!("{file} does not exist"))
            .warn("name the plugin's file, with the same path on every host")
    }));
    let value = |name: &str| environment.variables.iter().find(|(of, _)| of == name).map(|(_, value)| value);
    found.extend(overridden(value));
    found.extend(value("NCCL_SOCKET_IFNAME").and_then(|wish| socket_nics(wish, nics)));
    found.extend(value("NCCL_NET").and_then(|wish| net(wish)));
    if found.is_empty() {
        let evidence = format!("{} variables of ferrywire and NCCL", environment.variables.len());
        found.push(Finding::ok("environment", SUBJECT, evidence));
    }
    found
}

/// NCCL accepts prefixes of names, whole names after `=`, and all but the given ones after `^`.
fn socket_nics(wish: &str, nics: &[String]) -> Option<Finding> {
    let (others, rest) = wish.strip_prefix('^').map_or((false, wish), |rest| (true, rest));
    let (exact, rest) = rest.strip_prefix('=').map_or((false, rest), |rest| (true, rest));
    let fits = |nic: &str| {
        let mut names = rest
            .split(',')
            .map(|name| name.split(':').next().unwrap_or(name))
            .filter(|name| !name.is_empty());
        names.any(|name| if exact { nic == name } else { nic.starts_with(name) })
    };
    let found = Finding::ok(
        "nccl-nics",
        "NCCL_SOCKET_IFNAME",
        format!("{wish} names no NIC; there are {}", nics.join(", ")),
    );
    let named = nics.iter().any(|nic| fits(nic) != others);
    (!named && !wish.is_empty())
        .then(|| found.warn("name NICs of this host, or unset the variable: NCCL finds no NIC"))
}

fn net(wish: &str) -> Option<Finding> {
    let is_ours = wish.eq_ignore_ascii_case("ferrywire");
    let found = Finding::ok("nccl-net", "NCCL_NET", format!("NCCL_NET={wish}")).at(Level::Note);
    (!is_ours).then(|| found.fix("for NCCL over ferrywire: NCCL_NET=ferrywire, or unset it"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::levels;

    fn found(variables: &[(&str, &str)], id: &str) -> Vec<Level> {
        let variables =
            variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let environment = Environment { variables, ..Environment::default() };
        levels(&judge(&environment, &["eth0".to_owned(), "enp7s0".to_owned()]), id)
    }

    #[test]
    fn variables_of_options_are_known_and_others_reported() {
        let good = [("FERRYWIRE_NICS", "eth0"), ("FERRYWIRE_NCCL_THREADS", "2"), ("FERRYWIRE_SECRET", "x")];
        assert_eq!(found(&good, "unknown-variable"), []);
        assert_eq!(found(&good, "environment"), [Level::Ok]);
        assert_eq!(found(&[("FERRYWIRE_NIC", "eth0")], "unknown-variable"), [Level::Warn]);
        // The names of NCCL's variables are not known here.
        assert_eq!(found(&[("NCCL_WHATEVER", "1")], "unknown-variable"), []);
    }

    #[test]
    fn a_former_variable_with_another_value_is_a_warning() {
        let both =
            |former| found(&[("FERRYWIRE_TIMEOUT", "5"), ("FERRYWIRE_DEADLINE", former)], "former-variable");
        assert_eq!(both("7"), [Level::Warn]);
        assert_eq!(both("5"), []);
        assert_eq!(found(&[("FERRYWIRE_DEADLINE", "7")], "former-variable"), []);
        let map = [("FERRYWIRE_GPU_NICS", "0=eth0"), ("FERRYWIRE_MAP", "0=eth1")];
        assert_eq!(found(&map, "former-variable"), [Level::Warn]);
    }

    #[test]
    fn a_value_that_a_command_refuses_is_a_failure() {
        let environment =
            Environment { refused: vec!["error: invalid value".to_owned()], ..Environment::default() };
        assert_eq!(levels(&judge(&environment, &[]), "bad-variable"), [Level::Fail]);
        let missing = vec![("NCCL_NET_PLUGIN".to_owned(), "/a/b.so".to_owned())];
        let environment = Environment { missing_files: missing, ..Environment::default() };
        assert_eq!(levels(&judge(&environment, &[]), "plugin-variable"), [Level::Warn]);
    }

    #[test]
    fn nics_for_nccl_are_matched_as_nccl_does() {
        let named = |wish| found(&[("NCCL_SOCKET_IFNAME", wish)], "nccl-nics");
        for good in ["eth", "=eth0", "ib,enp", "^docker,lo", "^=eth0", "eth0:1"] {
            assert_eq!(named(good), [], "{good}");
        }
        for bad in ["ib", "=eth", "^e", "^eth,enp"] {
            assert_eq!(named(bad), [Level::Warn], "{bad}");
        }
        assert_eq!(found(&[("NCCL_NET", "Socket")], "nccl-net"), [Level::Note]);
        assert_eq!(found(&[("NCCL_NET", "ferrywire")], "nccl-net"), []);
    }
}
