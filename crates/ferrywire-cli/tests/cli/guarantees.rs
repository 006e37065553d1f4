//! The documents name tests, files and limits that exist.

use std::collections::{BTreeMap, BTreeSet};
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

/// The names of the functions that a source file of Rust or Python defines.
fn defined(source: &str) -> impl Iterator<Item = &str> {
    source.lines().filter_map(|line| {
        let (_, rest) = line.split_once("fn ").or_else(|| line.split_once("def "))?;
        rest.split_once(['(', '<']).map(|(name, _)| name)
    })
}

/// Whether a quoted text is the name of a test, or of its crate, file and function.
fn is_test(name: &str) -> bool {
    let is_part = |sign: char| sign.is_ascii_lowercase() || sign.is_ascii_digit() || sign == '_';
    name.contains("::") || (name.matches('_').count() >= 2 && name.chars().all(is_part))
}

/// For each function below `crates`, the files that define it.
fn functions() -> BTreeMap<String, BTreeSet<String>> {
    let mut sources = BTreeSet::new();
    files(&root().join("crates"), &mut sources);
    let mut functions: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for path in sources.iter().filter(|path| path.ends_with(".rs") || path.ends_with(".py")) {
        for name in defined(&fs::read_to_string(path).unwrap_or_default()) {
            functions.entry(name.to_owned()).or_default().insert(path.clone());
        }
    }
    functions
}

/// The fault of a guarantee's test. It is given as a function that one file alone defines, or as `CRATE PATH::FUNCTION`.
fn fault(name: &str, functions: &BTreeMap<String, BTreeSet<String>>) -> Option<String> {
    let Some((file, function)) = name.rsplit_once("::") else {
        return match functions.get(name) {
            None => Some(format!("{name}: no such function")),
            Some(files) if files.len() == 1 => None,
            Some(files) => Some(format!("{name}: give its crate and path, since {files:?} define it")),
        };
    };
    let path = format!("/crates/{}", file.replacen(' ', "/", 1));
    let is_there =
        functions.get(function).is_some_and(|files| files.iter().any(|file| file.ends_with(&path)));
    (!is_there).then(|| format!("{name}: no such function in {path}"))
}

#[test]
fn a_name_without_its_test_is_a_fault() {
    let functions = functions();
    for name in ["a_name_without_its_test_is_a_fault", "ferrywire-cli tests/cli/guarantees.rs::is_test"] {
        assert_eq!(fault(name, &functions), None);
    }
    // No file, another file, and several files define it.
    for name in ["no_such_function", "ferrywire-cli tests/cli/docs.rs::is_test", "root"] {
        assert!(fault(name, &functions).is_some(), "{name}");
    }
}

#[test]
fn every_guarantee_names_a_test_that_exists() {
    let text = document("docs/guarantees.md");
    let functions = functions();
    let (mut guarantees, mut faults) = (0, Vec::new());
    // One guarantee to a bullet; what stands before the first bullet of a section is no guarantee.
    for section in text.split("\n## ") {
        for bullet in section.split("\n- ").skip(1) {
            guarantees += 1;
            let tests: Vec<&str> = quoted(bullet).filter(|name| is_test(name)).collect();
            if tests.is_empty() {
                faults.push(format!("no test holds this: {bullet}"));
            }
            faults.extend(tests.into_iter().filter_map(|name| fault(name, &functions)));
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
