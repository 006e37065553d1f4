//! No control flow, retry, exit status or hint depends on the words of a message: what a program decides by is a variant, a
//! field or a code.
//!
//! This test reads the sources and finds texts that are searched. It knows a text by what it is called.

use std::fs;
use std::path::{Path, PathBuf};

/// Calls that search a text.
const SEARCHES: [&str; 11] = [
    ".contains(",
    ".starts_with(",
    ".ends_with(",
    ".strip_prefix(",
    ".strip_suffix(",
    ".find(",
    ".rfind(",
    ".split_once(",
    ".rsplit_once(",
    ".matches(",
    ".match_indices(",
];

/// The functions and macros that take a message for people, as they end an expression.
const MESSAGES: [&str; 23] = [
    "to_string()",
    "to_lowercase()",
    "message()",
    "first_line()",
    "why",
    "reason",
    "text",
    "words",
    "said",
    "reported",
    "message",
    "evidence",
    "error",
    "failure",
    "output",
    "printed",
    "stderr",
    "stdout",
    "line",
    "trim()",
    "trim_end()",
    "description",
    "hint",
];

/// Names of texts that are compared whole.
const COMPARED: [&str; 6] = ["what", "why", "reason", "message", "words", "said"];

/// Places that may search a text: file, what stands there, and why.
const ALLOWED: [(&str, &str, &str); 18] = [
    (
        "benches/posted/src/session.rs",
        "strip_prefix(begin)",
        "a line protocol: the word at its begin is a code",
    ),
    (
        "benches/raw/src/session.rs",
        "strip_prefix(\"ok\")",
        "a line protocol: the word at its begin is a code",
    ),
    (
        "benches/seed/src/main.rs",
        "strip_prefix(\"message \")",
        "a line protocol: the word at its begin is a code",
    ),
    ("benches/seed/src/main.rs", "strip_prefix(prefix)", "a line protocol: the word at its begin is a code"),
    ("benches/scale/src/host.rs", "strip_prefix(name)", "/proc"),
    ("crates/ferrywire-cli/src/bench/host.rs", "starts_with(name)", "/proc/cpuinfo"),
    ("crates/ferrywire-cli/src/doctor/limits.rs", "strip_prefix(name)", "/proc/self/limits"),
    ("crates/ferrywire-cli/src/doctor/limits.rs", "\"MemAvailable:\"", "/proc/meminfo"),
    ("crates/ferrywire-host/src/topology/gpus.rs", "\"Model:\"", "the NVIDIA driver's /proc"),
    ("crates/ferrywire-host/src/topology/gpus.rs", "\"Device Minor:\"", "the NVIDIA driver's /proc"),
    ("crates/ferrywire-devmem/src/nic/record.rs", "\"\\nend\\n\"", "a file format of ours"),
    ("crates/ferrywire-py/src/tensor.rs", "strip_prefix(b\"<\")", "a buffer's format code"),
    // Texts of others that have no typed source; each place says so. They choose a hint or an error to show.
    (
        "crates/ferrywire-devmem/src/errors.rs",
        "text.contains(words)",
        "the kernel's extended acknowledgements",
    ),
    ("crates/ferrywire-ncclnet/src/cause.rs", "line.text.contains(part)", "a plugin's log"),
    ("crates/ferrywire-ncclnet/src/cause.rs", "ends_with(\" no data\")", "a plugin's log"),
    ("crates/ferrywire-ncclnet/src/load.rs", "said.strip_prefix(&format!", "dlerror"),
    ("crates/ferrywire-ncclnet/src/load.rs", "words.contains(\"No such file\")", "dlerror"),
    ("crates/ferrywire-ncclnet/src/load.rs", "said.strip_prefix(&prefix)", "dlerror, to show it"),
];

/// The last link of the expression that ends here: a name, or a call with its brackets.
fn last_link(before: &str) -> &str {
    let start = |text: &str| {
        text.rfind(|sign: char| !sign.is_alphanumeric() && sign != '_').map_or(0, |place| place + 1)
    };
    match before.strip_suffix("()") {
        Some(call) => &before[start(call)..],
        None => &before[start(before)..],
    }
}

/// Whether a line of code decides by the words of a message.
fn reads_words(line: &str) -> bool {
    let searched = SEARCHES.iter().any(|search| {
        line.match_indices(search).any(|(place, _)| {
            // Characters separate parts of a text, and are no words.
            let is_of_characters = line[place + search.len()..].starts_with(['\'', '|', '[']);
            MESSAGES.contains(&last_link(&line[..place])) && !is_of_characters
        })
    });
    let compared =
        line.match_indices(" == \"").any(|(place, _)| COMPARED.contains(&last_link(&line[..place])));
    searched || compared
}

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    for path in entries.map(|entry| entry.expect("an entry").path()) {
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        if name.contains("test") || name.contains("fuzz") || name == "target" {
            continue;
        }
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

#[test]
fn nothing_is_decided_by_the_words_of_a_message() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the tree");
    let mut found = Vec::new();
    for crate_folder in fs::read_dir(root.join("crates")).expect("crates") {
        sources(&crate_folder.expect("a crate").path().join("src"), &mut found);
    }
    sources(&root.join("benches"), &mut found);
    assert!(found.len() > 200, "only {} sources were found", found.len());
    let (mut decided, mut used) = (Vec::new(), [false; ALLOWED.len()]);
    for path in found {
        let name = path.strip_prefix(&root).expect("below the root").to_string_lossy().into_owned();
        let source = fs::read_to_string(&path).expect("a text");
        let code = source.split("#[cfg(test)]\nmod tests").next().expect("one part at least");
        for (number, line) in code.lines().enumerate() {
            if line.trim_start().starts_with("//") || !reads_words(line) {
                continue;
            }
            match ALLOWED.iter().position(|(file, part, _)| *file == name && line.contains(part)) {
                Some(allowed) => used[allowed] = true,
                None => decided.push(format!("{name}:{}: {}", number + 1, line.trim())),
            }
        }
    }
    assert!(decided.is_empty(), "use a variant, a field or a code:\n{}", decided.join("\n"));
    let stale: Vec<&str> =
        ALLOWED.iter().zip(used).filter(|(_, used)| !used).map(|((file, ..), _)| *file).collect();
    assert!(stale.is_empty(), "allowed, and no longer there: {stale:?}");
}

#[test]
fn a_search_in_a_message_is_found_however_it_is_written() {
    for line in [
        r#"if error.to_string().contains("refused") {"#,
        r#"Failure::Failed(why) if why.contains("in use") => {"#,
        r#"failure.message().starts_with(BUSY)"#,
        r#"match line.trim().strip_prefix("listening on ") {"#,
        r#"Error::Invalid { what, .. } if what == "NIC" => 0,"#,
        r#"let without = reason.strip_prefix(WITHOUT_LANES);"#,
    ] {
        assert!(reads_words(line), "{line}");
    }
    for line in [
        r#"if names.contains(&nic.name) {"#,
        r#"text.split_once('\n')"#,
        r#"matches!(error, Error::Refused { reason: RefusalReason::Secret, .. })"#,
    ] {
        assert!(!reads_words(line), "{line}");
    }
}
