//! The tables and plots of `docs/performance.md` are those of the rows in `benches/results`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use crate::common::{run_within, text};

const RUNTIME_MAX: Duration = Duration::from_secs(30);

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// `draw.py --check` of the tree at `root`.
fn check(root: &Path) -> Output {
    let mut python = Command::new("python3");
    run_within(RUNTIME_MAX, python.arg(root.join("benches/results/draw.py")).arg("--check"))
}

/// A tree with nothing in it but the program, its data, the page and the plots.
fn copy_of_results() -> tempfile::TempDir {
    let copy = tempfile::tempdir().expect("a folder");
    for folder in ["benches/results", "docs/img"] {
        fs::create_dir_all(copy.path().join(folder)).expect("a folder");
        for entry in fs::read_dir(repository().join(folder)).expect("a folder of the repository") {
            let source = entry.expect("an entry").path();
            if source.is_file() {
                let name = source.file_name().expect("a file has a name");
                fs::copy(&source, copy.path().join(folder).join(name)).expect("a copy");
            }
        }
    }
    let page = "docs/performance.md";
    fs::copy(repository().join(page), copy.path().join(page)).expect("a copy");
    copy
}

/// Changes a file of a copy, and gives what the check says of it.
fn complaint_after(file: &str, change: impl FnOnce(String) -> String) -> String {
    let copy = copy_of_results();
    let path = copy.path().join(file);
    let before = fs::read_to_string(&path).expect("a text");
    let after = change(before.clone());
    assert_ne!(before, after, "{file} is as it was");
    fs::write(&path, after).expect("a changed text");
    let output = check(copy.path());
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stdout));
    text(&output.stderr)
}

#[test]
fn the_page_of_results_shows_the_rows() {
    let output = check(&repository());
    assert!(output.status.success(), "{}", text(&output.stderr));
}

#[test]
fn a_figure_that_differs_from_its_row_is_found() {
    let in_the_page = complaint_after("docs/performance.md", |page| page.replacen("| 51.3 |", "| 61.3 |", 1));
    assert!(in_the_page.contains("61.3") && in_the_page.contains("51.3"), "{in_the_page}");
    let in_the_data = complaint_after("benches/results/gpu.csv", |rows| rows.replacen(",51.3,", ",61.3,", 1));
    assert!(in_the_data.contains("docs/performance.md:"), "{in_the_data}");
    assert!(in_the_data.contains("docs/img/gpu.svg was not drawn"), "{in_the_data}");
    let without_a_row = complaint_after("docs/performance.md", |page| {
        let kept: Vec<&str> = page.lines().filter(|line| !line.starts_with("| 256 x 4 |")).collect();
        kept.join("\n") + "\n"
    });
    assert!(without_a_row.contains("more or fewer rows"), "{without_a_row}");
}

#[test]
fn a_malformed_row_is_found() {
    let rows = [
        ("2026-11-22,,h,,s,c,throughput,GB/s,1,,", "11 fields"),
        ("22.11.2026,,h,,s,c,throughput,GB/s,1,,,", "date"),
        ("2026-11-22,main,h,,s,c,throughput,GB/s,1,,,", "commit"),
        ("2026-11-22,,h,64 MiB,s,c,throughput,GB/s,1,,,", "key=value"),
        ("2026-11-22,,h,,s,c,throughput,Gbit/s,1,,,", "unknown unit"),
        ("2026-11-22,,h,,s,c,throughput,us,1,,,", "not in us"),
        ("2026-11-22,,h,,s,c,throughput,GB/s,fast,,,", "not a number"),
        ("2026-11-22,,h,,s,c,throughput,GB/s,,1,,", "value is empty"),
        ("2026-11-22,,h,,s,c,throughput,GB/s,1,2,3,", "out of order"),
        ("2026-11-22,,h,,s,c,throughput,GB/s,1,,,0", "runs"),
        ("2026-11-22,,,,s,c,throughput,GB/s,1,,,", "hardware is empty"),
    ];
    for (row, expected) in rows {
        let complaint = complaint_after("benches/results/host.csv", |text| format!("{text}{row}\n"));
        assert!(complaint.contains("host.csv:") && complaint.contains(expected), "{row}: {complaint}");
    }
    let header = complaint_after("benches/results/host.csv", |text| text.replacen("date,", "day,", 1));
    assert!(header.contains("the header is not"), "{header}");
    let twice = complaint_after("benches/results/host.csv", |text| {
        let last = text.lines().last().expect("a row").to_owned();
        format!("{text}{last}\n")
    });
    assert!(twice.contains("the same measurement"), "{twice}");
}
