//! `deploy/`: what its files name exists. Every option is one of the command's, every variable is documented, every crate is
//! in the workspace, and what the image installs is where the other files look for it.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use crate::common::{run, text};

/// Options of other programs, and the program.
const OTHERS: [(&str, &str); 19] = [
    ("--from", "Dockerfile"),
    ("--from-literal", "kubectl"),
    ("--gpus", "docker"),
    ("--gpus-per-node", "sbatch"),
    ("--job-name", "sbatch"),
    ("--locked", "cargo"),
    ("--network", "docker"),
    ("--nnodes", "torchrun"),
    ("--no-install-recommends", "apt-get"),
    ("--nodes", "sbatch"),
    ("--nproc-per-node", "torchrun"),
    ("--ntasks-per-node", "sbatch"),
    ("--rdzv-backend", "torchrun"),
    ("--rdzv-endpoint", "torchrun"),
    ("--rdzv-id", "torchrun"),
    ("--release", "cargo"),
    ("--rm", "docker"),
    ("--tail", "kubectl"),
    ("--time", "sbatch"),
];

/// Variables that are not of ferrywire, NCCL or NIXL, and the program that has them.
const OTHER_VARIABLES: [(&str, &str); 5] = [
    ("JOB_COMPLETION_INDEX", "Kubernetes"),
    ("LD_LIBRARY_PATH", "the loader"),
    ("SLURM_JOB_ID", "Slurm"),
    ("SLURM_JOB_NODELIST", "Slurm"),
    ("SLURM_JOB_NUM_NODES", "Slurm"),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the repository")
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The files of `deploy/`, with their texts.
fn files() -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    let mut folders = vec![root().join("deploy")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let text = read(&path);
                found.push((path, text));
            }
        }
    }
    assert!(found.len() >= 7, "files are missing: {found:?}");
    found
}

/// The words of a text that consist of these characters.
fn words(text: &str, is_part: impl Fn(char) -> bool) -> BTreeSet<String> {
    text.split(|sign| !is_part(sign)).filter(|word| !word.is_empty()).map(str::to_owned).collect()
}

/// The words of a text that are written as long options.
fn options(text: &str) -> BTreeSet<String> {
    let words = words(text, |sign| sign.is_ascii_lowercase() || sign.is_ascii_digit() || sign == '-');
    let is_option = |word: &String| {
        word.strip_prefix("--").is_some_and(|name| name.starts_with(|sign: char| sign.is_ascii_lowercase()))
    };
    words.into_iter().filter(is_option).collect()
}

/// The words of a text that are written as environment variables of several words.
fn variables(text: &str) -> BTreeSet<String> {
    let words = words(text, |sign| sign.is_ascii_alphanumeric() || sign == '_');
    let is_variable = |word: &String| {
        word.contains('_') && word.chars().all(|sign| !sign.is_ascii_lowercase()) && !word.starts_with('_')
    };
    words.into_iter().filter(is_variable).collect()
}

/// Every long option that the command's help has.
fn options_of_the_command() -> BTreeSet<String> {
    let commands =
        ["bench", "bench serve", "bench connect", "topo", "doctor", "plugin", "report", "nixl install"];
    commands.iter().flat_map(|command| options(&text(&run(&format!("{command} --help")).stdout))).collect()
}

/// The texts of all pages in `docs/`.
fn pages() -> String {
    let entries =
        fs::read_dir(root().join("docs")).expect("the pages").map(|entry| entry.expect("a page").path());
    entries.filter(|path| path.extension().is_some_and(|kind| kind == "md")).map(|page| read(&page)).collect()
}

#[test]
fn every_option_is_one_of_the_command_or_of_a_known_program() {
    let known = options_of_the_command();
    assert!(known.len() > 30, "the help has only {known:?}");
    let files = files();
    let named: BTreeSet<String> = files.iter().flat_map(|(_, text)| options(text)).collect();
    for (path, text) in &files {
        for option in options(text) {
            let is_other = OTHERS.iter().any(|(other, _)| *other == option);
            assert!(known.contains(&option) || is_other, "{}: {option} is unknown", path.display());
        }
    }
    let unused: Vec<_> = OTHERS.iter().filter(|(option, _)| !named.contains(*option)).collect();
    assert!(unused.is_empty(), "no file has these: {unused:?}");
    assert!(named.contains("--rendezvous") && named.contains("--world-size"), "{named:?}");
}

#[test]
fn every_variable_is_an_option_or_documented() {
    let (options, pages) = (options_of_the_command(), pages());
    let is_option = |variable: &str| {
        let option =
            variable.strip_prefix("FERRYWIRE_").map(|name| name.to_ascii_lowercase().replace('_', "-"));
        option.is_some_and(|option| options.contains(&format!("--{option}")))
    };
    let documented = variables(&pages);
    let files = files();
    let named: BTreeSet<String> = files.iter().flat_map(|(_, text)| variables(text)).collect();
    for (path, text) in &files {
        for variable in variables(text) {
            let is_other = OTHER_VARIABLES.iter().any(|(other, _)| *other == variable);
            let is_known = is_option(&variable) || documented.contains(&variable) || is_other;
            assert!(is_known, "{}: {variable} is unknown", path.display());
        }
    }
    let unused: Vec<_> = OTHER_VARIABLES.iter().filter(|(variable, _)| !named.contains(*variable)).collect();
    assert!(unused.is_empty(), "no file has these: {unused:?}");
    assert!(named.contains("FERRYWIRE_RANK") && named.contains("FERRYWIRE_SECRET"), "{named:?}");
}

#[test]
fn the_image_has_what_the_other_files_need() {
    let deploy = root().join("deploy");
    let image = read(&deploy.join("Dockerfile"));
    let crates: Vec<&str> =
        image.split(" -p ").skip(1).filter_map(|rest| rest.split_whitespace().next()).collect();
    assert_eq!(crates, ["ferrywire-cli", "ferrywire-nccl", "ferrywire-nixl"]);
    for name in crates {
        let manifest = read(&root().join("crates").join(name).join("Cargo.toml"));
        assert!(manifest.contains(&format!("name = \"{name}\"")), "{name}");
    }
    let rust = read(&root().join("Cargo.toml"));
    let rust = rust.lines().find_map(|line| line.strip_prefix("rust-version = ")).expect("a version");
    assert!(
        image.contains(&format!("FROM rust:{}-", rust.trim_matches('"'))),
        "the image has another Rust than {rust}"
    );
    let installed: BTreeSet<&str> =
        image.split_whitespace().filter_map(|word| word.strip_prefix("/out/")).collect();
    let expected = ["bin/ferrywire", "nccl/libnccl-net-ferrywire.so", "nixl/libplugin_FERRYWIRE.so"];
    assert_eq!(installed, BTreeSet::from(expected));
    let page = read(&deploy.join("README.md"));
    for file in expected {
        assert!(page.contains(&format!("/opt/ferrywire/{file}")), "the page lacks {file}");
    }
    let plugins = read(&deploy.join("kubernetes/plugins.yaml"));
    for place in [
        "/opt/ferrywire/bin",
        "/opt/ferrywire/nccl",
        "/opt/ferrywire/nixl",
        "/plugins/bin/ferrywire",
        "/plugins/nccl/libnccl-net-ferrywire.so",
        "/plugins/nixl/libplugin_FERRYWIRE.so",
    ] {
        assert!(plugins.contains(place), "plugins.yaml lacks {place}");
    }
    let user = image.lines().find_map(|line| line.strip_prefix("USER ")).expect("a user");
    assert!(!user.starts_with('0') && !user.starts_with("root"), "the image runs as {user}");
}

#[test]
fn the_page_names_every_file() {
    let deploy = root().join("deploy");
    let page = read(&deploy.join("README.md"));
    for (path, _) in files() {
        let name = path.strip_prefix(&deploy).expect("below").display().to_string();
        let is_named = page.contains(&format!("({name})"));
        assert!(is_named || ["README.md", "Dockerfile.dockerignore"].contains(&name.as_str()), "{name}");
    }
}
