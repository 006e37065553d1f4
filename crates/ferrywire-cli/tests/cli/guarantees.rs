//! The documents name tests, files and limits that exist.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn document(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The quoted names of a Markdown text: every second part between backticks.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// Whether a source file of Rust or Python defines this function.
fn defines(source: &str, function: &str) -> bool {
    let starts = |line: &str| {
        let (_, rest) = line.split_once("fn ").or_else(|| line.split_once("def "))?;
        Some(rest.strip_prefix(function)?.starts_with(['(', '<']))
    };
    source.lines().any(|line| starts(line) == Some(true))
}

/// The fault of a guarantee's test, given as `CRATE PATH::FUNCTION`.
fn fault(name: &str) -> Option<String> {
    let Some(((package, path), function)) =
        name.rsplit_once("::").and_then(|(file, function)| Some((file.split_once(' ')?, function)))
    else {
        return Some(format!("{name}: not of the form CRATE PATH::FUNCTION"));
    };
    match fs::read_to_string(root().join("crates").join(package).join(path)) {
        Err(error) => Some(format!("{name}: crates/{package}/{path}: {error}")),
        Ok(source) if !defines(&source, function) => Some(format!("{name}: no such function in that file")),
        Ok(_) => None,
    }
}

#[test]
fn every_guarantee_names_a_test_that_exists() {
    let text = document("docs/guarantees.md");
    let (mut guarantees, mut faults) = (0, Vec::new());
    // One guarantee to a bullet; what stands before the first bullet of a section is no guarantee.
    for section in text.split("\n## ") {
        for bullet in section.split("\n- ").skip(1) {
            guarantees += 1;
            let tests: Vec<&str> = quoted(bullet).filter(|name| name.contains("::")).collect();
            if tests.is_empty() {
                faults.push(format!("no test holds this: {bullet}"));
            }
            faults.extend(tests.into_iter().filter_map(fault));
        }
    }
    assert!(guarantees > 30, "only {guarantees} guarantees were seen");
    assert!(faults.is_empty(), "docs/guarantees.md:\n{}", faults.join("\n"));
}

/// All files below a folder, as paths with `/`.
fn files(folder: &Path, found: &mut BTreeSet<String>) {
    for entry in fs::read_dir(folder).expect("a folder of sources") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            files(&path, found);
        } else {
            found.insert(path.to_string_lossy().into_owned());
        }
    }
}

#[test]
fn files_that_the_architecture_names_exist() {
    let mut found = BTreeSet::new();
    files(&root().join("crates"), &mut found);
    let text = document("ARCHITECTURE.md");
    let is_path = |sign: char| sign.is_alphanumeric() || "_-./".contains(sign);
    let named: BTreeSet<&str> =
        text.split(|sign| !is_path(sign)).filter(|word| word.ends_with(".rs") && *word != ".rs").collect();
    let missing: Vec<&&str> =
        named.iter().filter(|name| !found.iter().any(|path| path.ends_with(&format!("/{name}")))).collect();
    assert!(named.len() > 40, "only {} files are named", named.len());
    assert!(missing.is_empty(), "ARCHITECTURE.md names files that are not there: {missing:?}");
}

#[test]
fn limits_that_documents_name_exist() {
    let limits = document("crates/ferrywire-proto/src/limits.rs");
    let is_variable = |name: &str| name.starts_with("FERRYWIRE_") || name.starts_with("NCCL_");
    let is_constant =
        |name: &str| name.contains('_') && name.chars().all(|sign| sign.is_ascii_uppercase() || sign == '_');
    let mut checked = 0;
    for path in ["ARCHITECTURE.md", "SECURITY.md", "docs/guarantees.md"] {
        let text = document(path);
        for name in quoted(&text).filter(|name| is_constant(name) && !is_variable(name)) {
            checked += 1;
            assert!(limits.contains(&format!("pub const {name}:")), "{path}: limits.rs has no {name}");
        }
    }
    assert!(checked > 20, "only {checked} limits are named");
}
