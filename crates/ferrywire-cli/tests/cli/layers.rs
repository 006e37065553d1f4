//! Crates, and the layers inside the engine, import downwards alone, as ARCHITECTURE.md has them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// From the lowest on. All others are faces, which nothing imports but tests.
const LAYERS: [&str; 9] = [
    "ferrywire-proto",
    "ferrywire-sys",
    "ferrywire-metrics",
    "ferrywire-ncclnet",
    "ferrywire-memory",
    "ferrywire-net",
    "ferrywire",
    "ferrywire-devmem",
    "ferrywire-host",
];

fn level(name: &str) -> usize {
    LAYERS.iter().position(|layer| *layer == name).unwrap_or(LAYERS.len())
}

#[test]
fn no_crate_imports_one_above_it() {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut metadata = Command::new(cargo);
    metadata.args(["metadata", "--format-version", "1", "--no-deps", "--offline"]);
    let output = metadata.current_dir(env!("CARGO_MANIFEST_DIR")).output().expect("cargo runs the tests");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let packages = metadata["packages"].as_array().expect("packages");
    let name = |value: &Value| value["name"].as_str().expect("a name").to_owned();
    let mut checked = 0;
    for package in packages {
        let importer = name(package);
        // Tests may use the simulated plugin, and helpers of any layer.
        let imports = package["dependencies"].as_array().expect("dependencies").iter();
        for import in imports.filter(|import| import["kind"].as_str() != Some("dev")).map(name) {
            if !import.starts_with("ferrywire") {
                continue;
            }
            checked += 1;
            let lower = level(&import) < level(&importer);
            // Benchmarks load the simulated plugin by the file that its package builds.
            let by_benchmark = import == "ferrywire-tcpx-sim" && level(&importer) == LAYERS.len();
            assert!(lower || by_benchmark, "{importer} imports {import}, which is not below it");
        }
    }
    assert!(LAYERS.iter().all(|layer| packages.iter().any(|package| name(package) == *layer)));
    assert!(checked > LAYERS.len(), "only {checked} imports were seen");
}

/// The engine's own layers, from the lowest on.
const ROOMS: [&str; 4] = ["payload", "core", "control", "api"];

/// Names that the engine's `lib.rs` gives out at its root, with the layer that each is of.
fn names_at_the_root(lib: &str) -> BTreeMap<String, usize> {
    let mut names = BTreeMap::new();
    for line in lib.lines().filter_map(|line| line.strip_prefix("pub use ")) {
        let Some(level) = ROOMS.iter().position(|room| line.starts_with(&format!("{room}::"))) else {
            continue;
        };
        let given = line.rsplit("::").next().expect("split gives one part at least");
        for name in given.split(|sign: char| !sign.is_alphanumeric() && sign != '_') {
            names.insert(name.to_owned(), level);
        }
    }
    names
}

/// The names that code outside of tests uses from its own crate: `crate::NAME`.
fn named_of_the_crate(source: &str) -> Vec<&str> {
    let code = source.split("#[cfg(test)]\nmod tests").next().expect("split gives one part at least");
    let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
    let after = lines.flat_map(|line| line.split("crate::").skip(1));
    after
        .map(|rest| rest.split(|sign: char| !sign.is_alphanumeric() && sign != '_').next().unwrap_or(rest))
        .collect()
}

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder of sources") {
        let path = entry.expect("an entry").path();
        let is_test = path.file_stem().is_some_and(|name| name == "tests" || name == "vanishing");
        if is_test {
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
fn no_layer_of_the_engine_imports_one_above_it() {
    let engine = Path::new(env!("CARGO_MANIFEST_DIR")).join("../ferrywire/src");
    let at_the_root =
        names_at_the_root(&fs::read_to_string(engine.join("lib.rs")).expect("the engine's root"));
    assert!(
        at_the_root.contains_key("Endpoint") && at_the_root.contains_key("StreamEvent"),
        "{at_the_root:?}"
    );
    let mut checked = 0;
    for (level, room) in ROOMS.iter().enumerate() {
        let mut files = Vec::new();
        sources(&engine.join(room), &mut files);
        for file in files {
            for name in named_of_the_crate(&fs::read_to_string(&file).expect("a source")) {
                let of = ROOMS.iter().position(|room| *room == name).or(at_the_root.get(name).copied());
                checked += usize::from(of.is_some());
                let is_above = of.is_some_and(|of| of > level);
                assert!(!is_above, "{} names crate::{name}, which is above it", file.display());
            }
        }
    }
    assert!(checked > 100, "only {checked} imports were seen");
}
