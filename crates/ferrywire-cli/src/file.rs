//! The TOML file of `--config`: options by their long names, with lower precedence than flags and environment.
//!
//! Read next: `args.rs`.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use serde::Serialize;
use serde::de::DeserializeOwned;
use toml::{Table, Value};

use crate::bench::isolated::Order;
use crate::exit::Failure;

/// Adds the options of the file to `flags`, where they were not given.
///
/// One file may serve both ends: options of the other end are ignored; unknown options are bad usage.
pub fn fill<T: Serialize + DeserializeOwned>(flags: T, path: &Path) -> Result<T, Failure> {
    let usage = |why: String| Failure::Usage(format!("--config {}: {why}", path.display()));
    let text = text_of(path).map_err(|error| usage(error.to_string()))?;
    let table: Table = toml::from_str(&text).map_err(|error| usage(one_line(&error.to_string())))?;
    let mut options = Table::new();
    for (key, value) in table {
        let Some(name) = option_of(&key) else { return Err(usage(format!("unknown option '{key}'"))) };
        if options.insert(name.clone(), value).is_some() {
            return Err(usage(format!("'{name}' is given twice, once by a former spelling: keep one")));
        }
    }
    options.extend(Table::try_from(flags).map_err(|error| usage(error.to_string()))?);
    let refused = |(name, value): (&String, &Value)| {
        let alone = Table::from_iter([(name.clone(), value.clone())]);
        alone.try_into::<T>().err().map(|error| format!("{name}: {}", error.message()))
    };
    options.clone().try_into().map_err(|error: toml::de::Error| {
        let named = options.iter().find_map(refused);
        usage(one_line(&named.unwrap_or_else(|| error.message().to_owned())))
    })
}

static TEXTS: Mutex<BTreeMap<PathBuf, String>> = Mutex::new(BTreeMap::new());

/// The text of the file that this process has read, for a child with the same arguments.
pub fn text_read() -> Option<String> {
    TEXTS.lock().unwrap_or_else(PoisonError::into_inner).values().next().cloned()
}

/// The text of the file, which is read once: options are filled in several times, and a pipe is empty the second time.
/// A child that works with a plugin takes the text that its parent has read.
fn text_of(path: &Path) -> io::Result<String> {
    if let Some(text) = Order::from_env().and_then(|order| order.config.clone()) {
        return Ok(text);
    }
    let mut texts = TEXTS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(text) = texts.get(path) {
        return Ok(text.clone());
    }
    let text = std::fs::read_to_string(path)?;
    texts.insert(path.to_owned(), text.clone());
    Ok(text)
}

/// Name of the option that a key means, by its present or a former spelling.
fn option_of(key: &str) -> Option<String> {
    let command = crate::args::command();
    let mut options =
        crate::args::of_bench(&command).filter(|arg| !arg.is_hide_set() && arg.get_id() != "config");
    let named = options
        .find(|arg| arg.get_long() == Some(key) || crate::args::former_names(arg).any(|name| name == key));
    named.and_then(|arg| arg.get_long()).map(str::to_owned)
}

fn one_line(text: &str) -> String {
    text.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{ConnectFlags, RankArgs, ServeFlags};
    use crate::auto::{Given, OrAuto};

    fn filled(text: &str, flags: ConnectFlags) -> Result<ConnectFlags, Failure> {
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        std::fs::write(file.path(), text).expect("written");
        fill(flags, file.path())
    }

    #[test]
    fn flags_go_before_the_file() {
        let flags = ConnectFlags { iters: Some(3), ..Default::default() };
        let flags = filled("iters = 9\nsizes = [\"4K\", 1]\nchunk = \"64K\"\nlisten = \"[::1]:1\"", flags)
            .expect("good");
        assert_eq!(flags.iters, Some(3));
        assert_eq!(flags.sizes.map(|sizes| sizes.0), Some(vec![4096, 1]));
        assert_eq!(flags.chunk.given().map(|chunk| chunk.0), Some(65536));
    }

    #[test]
    fn every_default_of_auto_may_be_written() {
        let command = crate::args::command();
        let bench = command.find_subcommand("bench").expect("a subcommand");
        let of = |end: Option<&str>| {
            let command = end.map_or(bench, |end| bench.find_subcommand(end).expect("an end"));
            let is_auto = |arg: &&clap::Arg| {
                arg.get_help().is_some_and(|help| help.to_string().contains("[default: auto]"))
            };
            let names = command.get_arguments().filter(is_auto).filter_map(|arg| arg.get_long());
            names.map(|name| format!("{name} = \"auto\"\n")).collect::<String>()
        };
        let flags = filled(&of(Some("connect")), ConnectFlags::default()).expect("good");
        assert_eq!(flags.depth, Some(OrAuto::Auto));
        assert_eq!(flags.depth.given(), None);
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        std::fs::write(file.path(), of(Some("serve"))).expect("written");
        fill(ServeFlags::default(), file.path()).expect("good");
        std::fs::write(file.path(), of(None)).expect("written");
        fill(RankArgs::default(), file.path()).expect("good");
    }

    #[test]
    fn a_typed_auto_goes_before_a_value_of_the_file() {
        let typed = ConnectFlags { depth: Some(OrAuto::Auto), ..Default::default() };
        let flags = filled("depth = 3\nwindow = 9", typed).expect("good");
        assert_eq!((flags.depth, flags.window), (Some(OrAuto::Auto), Some(OrAuto::Value(9))));
        for text in ["depth = \"Auto\"", "depth = -1", "chunk = \"4Q\""] {
            let refused = filled(text, ConnectFlags::default());
            assert!(matches!(refused, Err(Failure::Usage(_))), "{text}");
        }
    }

    #[test]
    fn former_spellings_mean_the_option_of_today() {
        let flags = filled("deadline = 7\npattern = \"mesh\"\nmap = \"0=eth1\"", ConnectFlags::default());
        let flags = flags.expect("good");
        assert_eq!(flags.timeout, Some(7.0));
        assert_eq!(flags.pattern, Some(crate::args::Pattern::AllToAll));
        assert_eq!(flags.gpu_nics.given().as_deref(), Some("0=eth1"));
        for twice in ["deadline = 7\ntimeout = 7", "gpu-nics = \"0=a\"\nmap = \"0=b\""] {
            assert!(matches!(filled(twice, ConnectFlags::default()), Err(Failure::Usage(_))), "{twice}");
        }
    }

    #[test]
    fn unknown_options_are_refused() {
        for text in ["sices = 4", "inject = \"wrong-byte\"", "= 3", "iters = \"many\""] {
            assert!(matches!(filled(text, ConnectFlags::default()), Err(Failure::Usage(_))), "{text}");
        }
    }

    #[test]
    fn a_refused_value_is_said_with_its_option() {
        for (name, value) in [("iters", "\"many\""), ("depth", "-1"), ("sizes", "\"4Q\""), ("op", "\"push\"")]
        {
            let text = format!("seconds = 1\n{name} = {value}\nverify = \"all\"");
            let refused = filled(&text, ConnectFlags::default()).expect_err("a wrong value").message();
            assert!(refused.contains(&format!(": {name}: ")), "{refused}");
        }
    }
}
