//! The documents: links lead somewhere, pages stay short, and names that pages quote from the code exist.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};

/// Largest size of each page, in kB of 1,000 bytes: a page that outgrows its reader is cut or split.
const SIZES_KB: &[(&str, u64)] = &[
    ("README.md", 6),
    ("ARCHITECTURE.md", 9),
    ("CHANGELOG.md", 2),
    ("CONTRIBUTING.md", 4),
    ("SECURITY.md", 7),
    ("deploy/README.md", 3),
    ("docs/a3-high.md", 5),
    ("docs/c.md", 3),
    ("docs/cli.md", 4),
    ("docs/design.md", 5),
    ("docs/devmem.md", 5),
    ("docs/glossary.md", 3),
    ("docs/guarantees.md", 7),
    ("docs/install.md", 4),
    ("docs/metrics.md", 4),
    ("docs/nccl.md", 5),
    ("docs/nixl.md", 5),
    ("docs/performance.md", 9),
    ("docs/plugins.md", 6),
    ("docs/protocol.md", 11),
    ("docs/python.md", 8),
    ("docs/rust.md", 4),
    ("docs/troubleshooting.md", 6),
    ("docs/tuning.md", 4),
];

pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the repository")
}

pub fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The files below a folder whose names have this ending, without builds and hidden folders.
pub fn files(folder: &Path, ending: &str, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry")) {
        let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
        let kind = entry.file_type().expect("a kind");
        if kind.is_dir() && name != "target" && !name.starts_with('.') {
            files(&path, ending, found);
        } else if kind.is_file() && name.ends_with(ending) {
            found.push(path);
        }
    }
}

/// The text of a page without its blocks of code.
fn prose(page: &str) -> String {
    let mut fence: Option<&str> = None;
    let mut prose = String::new();
    for line in page.lines() {
        let start = line.trim_start();
        match fence {
            Some(mark) if start.starts_with(mark) => fence = None,
            Some(_) => {}
            None => match ["```", "~~~"].into_iter().find(|mark| start.starts_with(mark)) {
                Some(mark) => fence = Some(mark),
                None => prose.extend([line, "\n"]),
            },
        }
    }
    prose
}

/// The text without what stands between backticks on one line.
fn without_code(prose: &str) -> String {
    prose.lines().map(|line| line.split('`').step_by(2).collect::<String>() + "\n").collect()
}

/// The targets of `[text](target)`, `![text](target)` and `[name]: target`.
fn links(page: &str) -> Vec<String> {
    let text = without_code(&prose(page));
    let inline = text.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(target, _)| target);
    let defined = text.lines().filter(|line| line.starts_with('[')).filter_map(|line| line.split_once("]: "));
    let targets = inline.chain(defined.map(|(_, target)| target));
    targets.filter_map(|target| target.split_whitespace().next()).map(str::to_owned).collect()
}

/// The anchors that GitHub gives to the headings of a page.
fn anchors(page: &str) -> BTreeSet<String> {
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    let mut anchors = BTreeSet::new();
    for line in prose(page).lines() {
        let heading = line.trim_start_matches('#');
        let level = line.len() - heading.len();
        if !(1..=6).contains(&level) || !heading.starts_with(' ') {
            continue;
        }
        let kept = |sign: &char| sign.is_alphanumeric() || [' ', '-', '_'].contains(sign);
        let anchor: String = visible(heading.trim()).to_lowercase().chars().filter(kept).collect();
        let anchor = anchor.replace(' ', "-");
        let count = seen.entry(anchor.clone()).or_default();
        anchors.insert(if *count == 0 { anchor } else { format!("{anchor}-{count}") });
        *count += 1;
    }
    anchors
}

/// A heading as it is shown: of a link its text alone.
fn visible(heading: &str) -> String {
    let mut shown = String::new();
    let mut rest = heading;
    while let Some((before, after)) = rest.split_once("](") {
        shown += before;
        rest = after.split_once(')').map_or("", |(_, rest)| rest);
    }
    shown + rest
}

/// Why this link of a page leads nowhere.
fn broken(root: &Path, page: &Path, target: &str) -> Option<String> {
    if target.contains("://") || target.starts_with("mailto:") {
        return None;
    }
    let (path, anchor) = target.split_once('#').map_or((target, None), |(path, anchor)| (path, Some(anchor)));
    let mut file = page.parent().expect("a folder").to_owned();
    for part in Path::new(path).components() {
        match part {
            Component::ParentDir => drop(file.pop()),
            Component::CurDir => {}
            part => file.push(part),
        }
    }
    let file = if path.is_empty() { page.to_owned() } else { file };
    if !file.starts_with(root) {
        return Some(String::from("it leads out of the repository"));
    }
    if !file.exists() {
        return Some(String::from("there is no such file"));
    }
    let anchor = anchor?;
    if file.extension().is_none_or(|kind| kind != "md") {
        return Some(String::from("only pages have anchors"));
    }
    let known = anchors(&read(&file));
    (!known.contains(anchor)).then(|| format!("there is no such heading; there are {known:?}"))
}

#[test]
fn every_link_leads_to_a_file_and_a_heading() {
    let root = root();
    let mut pages = Vec::new();
    files(&root, ".md", &mut pages);
    let mut failures = Vec::new();
    let mut checked = 0;
    for page in &pages {
        for target in links(&read(page)) {
            checked += 1;
            if let Some(why) = broken(&root, page, &target) {
                failures
                    .push(format!("{}: {target}: {why}", page.strip_prefix(&root).expect("below").display()));
            }
        }
    }
    assert!(pages.len() > 10 && checked > 20, "{} pages with {checked} links", pages.len());
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn every_page_is_as_short_as_its_reader_needs() {
    let root = root();
    let too_long = SIZES_KB.iter().filter_map(|(page, most_kb)| match fs::metadata(root.join(page)) {
        Ok(file) if file.len() <= most_kb * 1000 => None,
        Ok(file) => Some(format!("{page} has {} bytes, at most {most_kb} kB", file.len())),
        Err(error) => Some(format!("{page}: {error}")),
    });
    let too_long: Vec<String> = too_long.collect();
    assert!(too_long.is_empty(), "{}", too_long.join("\n"));
    let mut unlisted = Vec::new();
    for page in fs::read_dir(root.join("docs")).expect("the pages").map(|entry| entry.expect("a page")) {
        let name = format!("docs/{}", page.file_name().to_string_lossy());
        if name.ends_with(".md") && !SIZES_KB.iter().any(|(page, _)| *page == name) {
            unlisted.push(name);
        }
    }
    assert!(unlisted.is_empty(), "pages without a size: {unlisted:?}");
}

/// The names between backticks on a page that `is_meant` accepts.
fn quoted(page: &str, is_meant: impl Fn(&str) -> bool) -> BTreeSet<String> {
    let text = prose(page);
    text.lines()
        .flat_map(|line| line.split('`').skip(1).step_by(2))
        .filter(|name| is_meant(name))
        .map(str::to_owned)
        .collect()
}

#[test]
fn rules_of_plugins_name_tests_that_exist() {
    let root = root();
    let mut sources = Vec::new();
    files(&root.join("crates"), ".rs", &mut sources);
    let is_part = |sign: char| sign.is_ascii_lowercase() || sign.is_ascii_digit() || sign == '_';
    let is_test = |name: &str| name.matches('_').count() >= 2 && name.chars().all(is_part);
    let mut words = BTreeSet::new();
    for source in sources {
        let text = read(&source);
        words.extend(text.split(|sign| !is_part(sign)).filter(|word| is_test(word)).map(str::to_owned));
    }
    let named = quoted(&read(&root.join("docs/plugins.md")), is_test);
    let missing: Vec<_> = named.difference(&words).collect();
    assert!(named.len() > 50 && missing.is_empty(), "of {} tests there are not: {missing:?}", named.len());
}

#[test]
fn the_wire_format_names_limits_that_exist() {
    let root = root();
    let limits = read(&root.join("crates/ferrywire-proto/src/limits.rs"));
    let is_limit = |name: &str| {
        name.chars().all(|sign| sign.is_ascii_uppercase() || sign == '_') && !name.starts_with("NCCL_")
    };
    let named = quoted(&read(&root.join("docs/protocol.md")), is_limit);
    let missing: Vec<_> =
        named.iter().filter(|name| !limits.contains(&format!("pub const {name}:"))).collect();
    assert!(named.len() > 15 && missing.is_empty(), "of {} limits there are not: {missing:?}", named.len());
}

#[test]
fn links_and_headings_are_seen() {
    let page = "# A `b` c: [d](e.md)\n[x](y.md#z) `[no](no.md)` ![i](i.svg \"t\")\n```\n[no](no.md)\n# no\n```\n# A b\n## A b\n[n]: m.md\n";
    assert_eq!(links(page), ["e.md", "y.md#z", "i.svg", "m.md"]);
    assert_eq!(anchors(page), BTreeSet::from(["a-b-c-d", "a-b", "a-b-1"].map(String::from)));
}
