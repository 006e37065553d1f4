//! `report`: every number of its page and its table is the file's, whatever the file says, and a bad file is named.

use std::fs;
use std::io::Read;
use std::os::unix::fs::{OpenOptionsExt, symlink};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::LazyLock;
use std::thread;
use std::time::{Duration, Instant};

use roxmltree::{Document, Node, ParsingOptions};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::{GRACE, TIMEOUT_DEFAULT, end_within, ferrywire, first_error, run, text, unwritten};
use crate::snapshots::{is_stored, printed};

/// Short runs over loopback, as stored: one of each kind of table.
static MEASURED: LazyLock<Value> = LazyLock::new(|| bench("--sizes 4K,64K,1M"));
static LATENCY: LazyLock<Value> = LazyLock::new(|| bench("--sizes 8,4K --pattern latency"));

fn bench(args: &str) -> Value {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("result.json");
    let bench = format!("bench --memory host --peer-memory host --iters 20 {args} --json {}", file.display());
    printed(&run(&bench));
    serde_json::from_str(&fs::read_to_string(file).expect("written")).expect("JSON")
}

/// A folder with stored results.
struct Files {
    folder: TempDir,
}

impl Files {
    fn new() -> Files {
        Files { folder: tempfile::tempdir().expect("a folder") }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn store(&self, name: &str, document: &Value) {
        self.store_text(name, &document.to_string());
    }

    fn store_text(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).expect("written");
    }

    /// `report` in this folder.
    fn report(&self, args: &[&str]) -> Output {
        ferrywire("report").args(args).current_dir(self.folder.path()).output().expect("the command starts")
    }

    /// The page of these files.
    fn page(&self, files: &[&str]) -> String {
        let output = self.report(&[files, &["--html", "out.html"]].concat());
        assert_eq!(printed(&output), "");
        assert!(output.stderr.is_empty(), "{}", text(&output.stderr));
        fs::read_to_string(self.path("out.html")).expect("a page")
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.folder.path()).expect("a folder");
        let mut names: Vec<String> = entries
            .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
            .collect();
        names.sort_unstable();
        names
    }
}

fn parsed(page: &str) -> Document<'_> {
    let options = ParsingOptions { allow_dtd: true, ..ParsingOptions::default() };
    Document::parse_with_options(page, options).unwrap_or_else(|error| panic!("{error}: {page}"))
}

fn elements<'a, 'input>(
    under: Node<'a, 'input>,
    name: &'static str,
) -> impl Iterator<Item = Node<'a, 'input>> {
    under.descendants().filter(move |node| node.has_tag_name(name))
}

/// All text inside of an element.
fn shown(node: Node) -> String {
    node.descendants().filter(Node::is_text).filter_map(|node| node.text()).collect()
}

/// A line of a table: the text of each column, and the number of a cell that holds one.
type Row = Vec<(String, String, Option<f64>)>;

/// The lines of the table in a section of the page.
fn rows(page: &Document, section: &str) -> Vec<Row> {
    let section = elements(page.root(), "section").find(|node| node.attribute("id") == Some(section));
    let table = elements(section.expect("a section"), "table").next().expect("a table");
    let head = elements(table, "thead").next().expect("a header");
    let header: Vec<String> = head.descendants().filter(|node| node.has_tag_name("th")).map(shown).collect();
    let body = elements(table, "tbody").flat_map(|body| elements(body, "tr"));
    let cells = |row: Node| -> Row {
        let cells: Vec<Node> = row.children().filter(Node::is_element).collect();
        assert_eq!(cells.len(), header.len(), "{header:?}");
        let number = |cell: Node| elements(cell, "data").next()?.attribute("value")?.parse().ok();
        let cells = header.iter().zip(cells);
        cells.map(|(name, cell)| (name.clone(), shown(cell), number(cell))).collect()
    };
    body.map(cells).collect()
}

fn cell<'a>(row: &'a Row, name: &str) -> &'a (String, String, Option<f64>) {
    row.iter().find(|(column, ..)| column == name).unwrap_or_else(|| panic!("no {name}: {row:?}"))
}

/// A size as the page writes it.
fn size(result: &Value) -> String {
    match result["size_bytes"].as_u64().expect("a size") {
        bytes if bytes >= 1 << 20 => format!("{}M", bytes >> 20),
        bytes if bytes >= 1 << 10 => format!("{}K", bytes >> 10),
        bytes => bytes.to_string(),
    }
}

/// Columns of each section, and where their numbers stand in a result.
const FIGURES: [(&str, &str, &str); 8] = [
    ("throughput", "GB/s p50", "/gb_per_s/p50"),
    ("throughput", "min", "/gb_per_s/min"),
    ("throughput", "max", "/gb_per_s/max"),
    ("latency", "us p50", "/latency_us/p50"),
    ("latency", "us p99", "/latency_us/p99"),
    ("latency", "us max", "/latency_us/max"),
    ("cpu", "source", "/cpu_s_per_gb/source"),
    ("cpu", "target", "/cpu_s_per_gb/target"),
];

/// Every result of every document has its line in every section, with the numbers of the document, and there is no other.
fn has_the_numbers(page: &str, documents: &[(&str, &Value)]) {
    let page = parsed(page);
    let several = documents.len() > 1;
    for (section, column, pointer) in FIGURES {
        let rows = rows(&page, section);
        let results = documents.iter().map(|(_, document)| list(&document["results"]).len()).sum::<usize>();
        assert_eq!(rows.len(), results, "{section}");
        for (name, document) in documents {
            for result in list(&document["results"]) {
                let is_its = |row: &&Row| {
                    cell(row, "size").1 == size(result) && (!several || cell(row, "run").1 == *name)
                };
                let found: Vec<&Row> = rows.iter().filter(is_its).collect();
                let [row] = found.as_slice() else { panic!("{name}, {}: {found:?}", size(result)) };
                let (_, shown, number) = cell(row, column);
                let expected = result.pointer(pointer).and_then(Value::as_f64);
                assert_eq!(*number, expected, "{name}, {}, {column}", size(result));
                let rounded: f64 = shown.parse().expect("a number");
                let expected = expected.expect("a figure");
                let tolerance = expected.abs() * 0.005 + 0.005;
                assert!((rounded - expected).abs() <= tolerance, "{column}: {shown} for {expected}");
            }
        }
    }
}

fn list(value: &Value) -> &[Value] {
    value.as_array().expect("a list")
}

/// Nothing of the page comes from elsewhere, and nothing of it runs.
fn stands_alone(page: &str) {
    for node in parsed(page).descendants().filter(Node::is_element) {
        let name = node.tag_name().name();
        let loads =
            ["script", "link", "img", "iframe", "object", "embed", "a", "base", "form"].contains(&name);
        assert!(!loads, "the page has <{name}>");
        for attribute in node.attributes().map(|attribute| attribute.name()) {
            let runs = attribute.starts_with("on") || ["src", "href", "style", "srcset"].contains(&attribute);
            assert!(!runs, "<{name}> has {attribute}");
        }
    }
    for text in ["http:", "https:", "@import", "url("] {
        assert!(!page.contains(text), "the page has {text}");
    }
}

#[test]
fn the_page_of_one_run_has_the_numbers_of_its_file() {
    let files = Files::new();
    files.store("a.json", &MEASURED);
    let page = files.page(&["a.json"]);
    has_the_numbers(&page, &[("a.json", &MEASURED)]);
    stands_alone(&page);
    let page = parsed(&page);
    let host = MEASURED["host"]["hostname"].as_str().expect("a name");
    let facts = elements(page.root(), "section").find(|node| node.attribute("id") == Some("runs"));
    assert!(shown(facts.expect("facts")).contains(host));
    let bottlenecks = rows(&page, "bottleneck");
    for result in list(&MEASURED["results"]) {
        assert!(bottlenecks.iter().any(|row| cell(row, "bottleneck").1 == result["bottleneck"]), "{result}");
    }
    let nics = rows(&page, "nics");
    for result in list(&MEASURED["results"]) {
        let here = list(&result["per_nic"]).iter().map(|nic| ("this end", nic));
        let peer = list(&result["extra"]["peer_per_nic"]).iter().map(|nic| ("peer", nic));
        for (end, nic) in here.chain(peer) {
            let found = nics.iter().find(|row| {
                cell(row, "size").1 == size(result)
                    && cell(row, "end").1 == end
                    && nic["nic"] == cell(row, "NIC").1
            });
            let row = found.unwrap_or_else(|| panic!("{end} {nic}"));
            assert_eq!(cell(row, "sent").2, nic["tx_bytes"].as_f64());
            assert_eq!(cell(row, "received").2, nic["rx_bytes"].as_f64());
        }
    }
    // One curve with a sign per size, in each of two plots.
    let plots: Vec<Node> =
        elements(page.root(), "svg").filter(|node| node.attribute("role") == Some("img")).collect();
    assert_eq!(plots.len(), 2);
    for plot in plots {
        let signs = elements(plot, "path").filter(|path| path.attribute("class") == Some("point")).count();
        assert_eq!(signs, list(&MEASURED["results"]).len());
    }
}

#[test]
fn a_latency_run_has_no_throughput() {
    let files = Files::new();
    files.store("l.json", &LATENCY);
    let page = files.page(&["l.json"]);
    let page = parsed(&page);
    let sections: Vec<_> = elements(page.root(), "section").filter_map(|node| node.attribute("id")).collect();
    assert!(sections.contains(&"latency") && !sections.contains(&"throughput"), "{sections:?}");
    for (row, result) in rows(&page, "latency").iter().zip(list(&LATENCY["results"])) {
        assert_eq!(cell(row, "us p50").2, result["latency_us"]["p50"].as_f64());
    }
    let table = printed(&files.report(&["l.json"]));
    assert!(table.contains("us p99") && !table.contains("GB/s p50"), "{table}");
}

/// The measured document, with every rate and latency multiplied.
fn scaled(factor: f64) -> Value {
    let mut document = MEASURED.clone();
    for result in document["results"].as_array_mut().expect("results") {
        for figures in ["gb_per_s", "latency_us", "cpu_s_per_gb"] {
            for (_, figure) in result[figures].as_object_mut().expect("figures") {
                *figure = json!(figure.as_f64().expect("a number") * factor);
            }
        }
    }
    document
}

#[test]
fn runs_with_other_lists_of_sizes_stand_side_by_side() {
    let files = Files::new();
    let (mut twice, mut half) = (scaled(2.0), scaled(0.5));
    // Another order, a size less, and a size that no other run has.
    let results = twice["results"].as_array_mut().expect("results");
    results.reverse();
    results.pop();
    let mut larger = results[0].clone();
    larger["size_bytes"] = json!(4 << 20);
    results.insert(0, larger);
    twice["config"]["channels"] = json!(3);
    half["host"]["hostname"] = json!("elsewhere");
    let documents = [("a.json", &*MEASURED), ("twice.json", &twice), ("half.json", &half)];
    for (name, document) in documents {
        files.store(name, document);
    }
    let page = files.page(&["a.json", "twice.json", "half.json"]);
    has_the_numbers(&page, &documents);
    stands_alone(&page);
    let page = parsed(&page);
    for section in ["throughput", "latency", "cpu"] {
        let ratios: Vec<[String; 3]> = rows(&page, section)
            .iter()
            .map(|row| ["size", "run", "ratio"].map(|name| cell(row, name).1.clone()))
            .collect();
        let expected = [
            ["4K", "a.json", "1.00x"],
            ["4K", "half.json", "0.50x"],
            ["64K", "a.json", "1.00x"],
            ["64K", "twice.json", "2.00x"],
            ["64K", "half.json", "0.50x"],
            ["1M", "a.json", "1.00x"],
            ["1M", "twice.json", "2.00x"],
            ["1M", "half.json", "0.50x"],
            ["4M", "twice.json", "-"],
        ];
        assert_eq!(ratios, expected.map(|row| row.map(str::to_owned)), "{section}");
    }
    let runs = elements(page.root(), "section").find(|node| node.attribute("id") == Some("runs"));
    let runs = runs.expect("the runs");
    assert!(shown(runs).contains("elsewhere"));
    let differing = elements(runs, "table").nth(1).expect("the options that differ");
    let names: Vec<String> =
        elements(differing, "th").filter(|th| th.attribute("scope") == Some("row")).map(shown).collect();
    assert_eq!(names, ["channels"]);
}

/// Each part of what was measured keeps results apart.
#[test]
fn results_of_different_measurements_have_no_ratio() {
    let changes = [
        ("op", json!("read")),
        ("memory", json!("sim:0")),
        ("peer_memory", json!("sim:0")),
        ("direction", json!("from_peer")),
        ("depth", json!(3)),
        ("blocks", json!(7)),
        ("pattern", json!("bidir")),
    ];
    let files = Files::new();
    files.store("a.json", &MEASURED);
    for (field, value) in changes {
        let mut other = MEASURED.clone();
        for result in other["results"].as_array_mut().expect("results") {
            result[field] = value.clone();
        }
        files.store("b.json", &other);
        let page = files.page(&["a.json", "b.json"]);
        for row in rows(&parsed(&page), "throughput") {
            let expected = if cell(&row, "run").1 == "a.json" { "1.00x" } else { "-" };
            assert_eq!(cell(&row, "ratio").1, expected, "{field}: {row:?}");
        }
    }
}

#[test]
fn a_size_that_is_listed_twice_keeps_both_results() {
    let files = Files::new();
    let mut twice = MEASURED.clone();
    let results = twice["results"].as_array_mut().expect("results");
    let again = results[0].clone();
    results.push(again);
    files.store("a.json", &twice);
    let page = files.page(&["a.json", "a.json"]);
    let rows = rows(&parsed(&page), "throughput");
    assert_eq!(rows.len(), 8);
    assert!(rows.iter().all(|row| cell(row, "ratio").1 == "1.00x"), "{rows:?}");
    assert!(rows.iter().any(|row| cell(row, "run").1 == "a.json (2)"), "{rows:?}");
}

#[test]
fn texts_of_a_file_are_shown_and_never_obeyed() {
    let script = "<script>alert(1)</script>";
    let breaks_out = "\"><img src=x onerror=alert(2)>]]>&amp;";
    let mut hostile = MEASURED.clone();
    hostile["host"]["hostname"] = json!(script);
    hostile["peer"]["hostname"] = json!("a\u{1b}[2J\u{0}\u{202e}b\nall results: forged");
    hostile["version"] = json!("</style></title>");
    hostile["error"] = json!(script);
    hostile["config"]["<b onload=x>"] = json!(breaks_out);
    hostile["config"]["nics"] = json!([breaks_out]);
    for result in hostile["results"].as_array_mut().expect("results") {
        result["bottleneck"] = json!(breaks_out);
        result["transport"] = json!(script);
        result["direction"] = json!(breaks_out);
        result["per_nic"][0]["nic"] = json!(script);
        result["extra"]["peer_per_nic"][0]["nic"] = json!(breaks_out);
        result["extra"]["pair"] = json!([script, breaks_out]);
    }
    let files = Files::new();
    files.store("a.json", &MEASURED);
    files.store("<i>.json", &hostile);
    for names in [&["<i>.json"][..], &["a.json", "<i>.json"]] {
        let page = files.page(names);
        stands_alone_but_for(&page, script, breaks_out);
        let table = printed(&files.report(names));
        assert!(table.contains(script) && table.contains(breaks_out), "{table}");
        assert!(table.chars().all(|sign| sign == '\n' || !sign.is_control()), "{table:?}");
        assert!(!table.lines().any(|line| line == "all results: forged"), "{table}");
    }
}

fn stands_alone_but_for(page: &str, script: &str, breaks_out: &str) {
    let document = parsed(page);
    let shown = shown(document.root());
    for said in [script, breaks_out, "<i>.json", "<b onload=x>", "</style></title>"] {
        assert!(shown.contains(said), "{said} is not shown");
    }
    for node in document.descendants().filter(Node::is_element) {
        let name = node.tag_name().name();
        assert!(!["script", "img", "i", "b onload"].contains(&name), "the page has <{name}>");
        let runs = node.attributes().find(|attribute| attribute.name().starts_with("on"));
        assert!(runs.is_none(), "<{name}> has {runs:?}");
    }
    assert!(page.chars().all(|sign| !sign.is_control() || sign == '\n'), "a control character is left");
}

/// The error of `report` for a bad file: one line that names the file.
fn refused(files: &Files, name: &str) -> String {
    let before = files.names();
    let output = files.report(&["good.json", name, "--html", "out.html"]);
    let said = text(&output.stderr);
    assert_eq!((output.status.code(), said.lines().count()), (Some(1), 1), "{name}: {said}");
    assert!(said.starts_with(&format!("error: {name}: ")), "{said}");
    assert_eq!(files.names(), before, "{name}");
    said
}

#[test]
fn a_bad_file_is_named_with_what_to_do() {
    let files = Files::new();
    files.store("good.json", &MEASURED);
    let said = refused(&files, "missing.json");
    assert!(said.contains("No such file") && said.contains("bench --json"), "{said}");
    files.store_text("table.json", "size depth GB/s");
    assert!(refused(&files, "table.json").contains("not JSON"));
    files.store_text("empty.json", "");
    assert!(refused(&files, "empty.json").contains("not JSON"));
    files.store_text("deep.json", &"[".repeat(100_000));
    assert!(refused(&files, "deep.json").contains("not JSON"));
    files.store("other.json", &json!([{"findings": []}]));
    assert!(refused(&files, "other.json").contains("the field schema is missing"));
    let changed = |pointer: &str, value: Value| {
        let mut document = MEASURED.clone();
        *document.pointer_mut(pointer).expect("a field") = value;
        files.store("changed.json", &document);
        refused(&files, "changed.json")
    };
    let said = changed("/schema", json!(1));
    assert!(said.contains("schema is 1") && said.contains("run the bench again"), "{said}");
    assert!(changed("/schema", json!("\u{1b}2")).contains("run the bench again"));
    let said = changed("/results", json!([]));
    assert!(said.contains("no results") && said.contains("run the bench again"), "{said}");
    assert!(changed("/results/0/gb_per_s/p50", json!(-1)).contains("results[0].gb_per_s.p50 is negative"));
    assert!(changed("/results/0/op", json!("push")).contains("does not follow schema 2"));
    assert!(changed("/results/0/gb_per_s", json!({})).contains("does not follow schema 2"));
    let mut failed = MEASURED.clone();
    failed["results"] = json!([]);
    failed["error"] = json!("the peer is busy\ntry later");
    files.store("failed.json", &failed);
    let said = refused(&files, "failed.json");
    assert!(said.contains("the run failed with `the peer is busy`;"), "{said}");
}

#[test]
fn bad_usage_is_reported_before_a_file_is_read() {
    let files = Files::new();
    files.store("a.json", &MEASURED);
    symlink("a.json", files.path("link.html")).expect("a link");
    let many = vec!["a.json"; 17];
    let usages: [&[&str]; 8] = [
        &[],
        &[""],
        &["a.json", "--html", ""],
        &["a.json", "--html", "."],
        &["a.json", "--html", "/dev/full"],
        &["missing.json", "a.json", "--html", "a.json"],
        &["a.json", "--html", "link.html"],
        &many,
    ];
    let before = fs::read(files.path("a.json")).expect("a file");
    for usage in usages {
        let output = files.report(usage);
        assert_eq!(output.status.code(), Some(2), "{usage:?}: {}", text(&output.stderr));
        assert!(output.stdout.is_empty() && first_error(&output).starts_with("error: "), "{usage:?}");
    }
    assert_eq!(fs::read(files.path("a.json")).expect("a file"), before);
}

#[test]
fn an_older_page_is_replaced_at_once_or_stays() {
    let files = Files::new();
    files.store("a.json", &MEASURED);
    files.store_text("old.html", "an older page");
    symlink("old.html", files.path("out.html")).expect("a link");
    let output = files.report(&["missing.json", "--html", "out.html"]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(fs::read_to_string(files.path("old.html")).expect("a page"), "an older page");
    let mut reader = fs::File::open(files.path("old.html")).expect("a page");
    let page = files.page(&["a.json"]);
    let mut read = String::new();
    reader.read_to_string(&mut read).expect("a text");
    assert_eq!(read, "an older page", "a reader sees the page that it has opened");
    assert!(page.starts_with("<!DOCTYPE html>") && page.ends_with("</html>"));
    assert!(fs::symlink_metadata(files.path("out.html")).expect("a link").is_symlink());
    assert_eq!(files.names(), ["a.json", "old.html", "out.html"]);
    let output = files.report(&["a.json", "--html", "no-such-folder/out.html"]);
    assert_eq!(output.status.code(), Some(1));
    let said = first_error(&output);
    assert_eq!(said, "error: cannot write no-such-folder/out.html: No such file or directory (os error 2)");
}

#[test]
fn the_page_goes_to_standard_output_or_where_the_environment_says() {
    let files = Files::new();
    files.store("a.json", &MEASURED);
    let page = files.page(&["a.json"]);
    assert_eq!(printed(&files.report(&["a.json", "--html", "-"])), page);
    let mut command = ferrywire("report a.json");
    command.env("FERRYWIRE_HTML", "by-environment.html").current_dir(files.folder.path());
    assert_eq!(printed(&command.output().expect("it starts")), "");
    assert_eq!(fs::read_to_string(files.path("by-environment.html")).expect("a page"), page);
    let file = files.path("a.json").display().to_string();
    unwritten(&mut ferrywire(&format!("report {file}")));
    unwritten(&mut ferrywire(&format!("report {file} --html -")));
}

/// A run on fixed hosts with fixed figures, so that its table is one text everywhere.
fn fixed(host: &str, gb_per_s: f64) -> Value {
    let mut document = MEASURED.clone();
    for (end, hostname) in [("host", host), ("peer", "b")] {
        let given = document[end].as_object_mut().expect("a host");
        given.extend([
            ("hostname".to_owned(), json!(hostname)),
            ("kernel".to_owned(), json!("6.1.0")),
            ("cpu".to_owned(), json!("CPU")),
            ("cores".to_owned(), json!(16)),
            ("memory_bytes".to_owned(), json!(64_u64 << 30)),
            ("boot_id".to_owned(), json!(hostname)),
        ]);
    }
    document["version"] = json!("0.1.0");
    for (at, result) in document["results"].as_array_mut().expect("results").iter_mut().enumerate() {
        let rate = gb_per_s * (at + 1) as f64;
        let given = result.as_object_mut().expect("a result");
        given.extend([
            ("channels".to_owned(), json!(8)),
            ("chunk_bytes".to_owned(), json!(2 << 20)),
            ("window".to_owned(), json!(1024)),
            ("threads".to_owned(), json!(4)),
            ("depth".to_owned(), json!(16)),
            ("congestion_control".to_owned(), json!("cubic")),
            ("transport".to_owned(), json!("tcp")),
            ("gb_per_s".to_owned(), json!({"min": rate * 0.9, "p50": rate, "max": rate * 1.1})),
            ("latency_us".to_owned(), json!({"p50": 100.0, "p99": 150.0, "max": 900.0})),
            ("cpu_s_per_gb".to_owned(), json!({"source": 0.1, "target": 0.2})),
            ("bottleneck".to_owned(), json!("the network")),
        ]);
    }
    document
}

#[test]
fn tables_for_a_terminal() {
    let files = Files::new();
    let mut after = fixed("a", 2.5);
    after["config"]["channels"] = json!(8);
    after["results"].as_array_mut().expect("results").remove(0);
    after["error"] = json!("the peer is lost");
    files.store("before.json", &fixed("a", 2.0));
    files.store("after.json", &after);
    is_stored("report", &printed(&files.report(&["before.json"])));
    is_stored("report_of_two", &printed(&files.report(&["before.json", "after.json"])));
}

/// Regression: the table showed figures without a check like verified ones.
#[test]
fn the_table_marks_a_result_that_was_not_verified() {
    let files = Files::new();
    let mut document = fixed("a", 2.0);
    document["results"][0]["verified"] = Value::Null;
    files.store("a.json", &document);
    let table = printed(&files.report(&["a.json"]));
    let rows = |end: &str| table.lines().filter(|line| line.trim_end().ends_with(&format!(" {end}"))).count();
    assert_eq!((rows("verified"), rows("NO"), rows("yes")), (1, 1, 2), "{table}");
}

/// Regression: 1.2 MB/s was shown as 0.00 GB/s.
#[test]
fn small_figures_keep_their_digits() {
    let files = Files::new();
    files.store("a.json", &fixed("a", 0.00123));
    let table = printed(&files.report(&["a.json"]));
    assert!(table.contains(" 0.00123 ") && !table.contains(" 0.00 "), "{table}");
}

/// Regression: the signal was noted, and the process went on waiting for its file.
#[test]
fn a_signal_ends_a_report_that_waits_for_a_file() {
    let files = Files::new();
    let pipe = files.path("result.json");
    assert!(Command::new("mkfifo").arg(&pipe).status().expect("mkfifo runs").success());
    let mut command = ferrywire("report result.json");
    command.current_dir(files.folder.path()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let report = command.spawn().expect("the command starts");
    // A pipe without a reader cannot be opened for writing without waiting.
    let open = || fs::File::options().write(true).custom_flags(libc::O_NONBLOCK).open(&pipe).ok();
    let until = Instant::now() + GRACE;
    let _writer = loop {
        if let Some(writer) = open() {
            break writer;
        }
        assert!(Instant::now() < until, "it does not open its file");
        thread::sleep(Duration::from_millis(10));
    };
    let killed = Command::new("kill").args(["-TERM", &report.id().to_string()]).status();
    assert!(killed.expect("kill runs").success());
    let output = end_within(TIMEOUT_DEFAULT, report);
    assert_eq!(output.status.signal(), Some(libc::SIGTERM), "{output:?}");
}
