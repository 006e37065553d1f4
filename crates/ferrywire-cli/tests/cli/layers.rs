//! Crates import downwards alone, as ARCHITECTURE.md has them.

use std::process::Command;

use serde_json::Value;

/// From the lowest on. All others are faces, which nothing imports but tests.
const LAYERS: [&str; 7] = [
    "ferrywire-proto",
    "ferrywire-sys",
    "ferrywire-ncclnet",
    "ferrywire-memory",
    "ferrywire-net",
    "ferrywire",
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
