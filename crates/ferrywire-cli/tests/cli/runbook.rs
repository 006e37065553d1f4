//! Checks that the code prints the messages that `docs/a3-high.md` quotes.

use std::fs;
use std::path::Path;

/// A text that the page quotes, with its own examples in it, and where it is printed: a file of the crates, and the text
/// there with `{}` for whatever is put in.
const QUOTED: &[(&str, &[(&str, &str)])] = &[
    (
        "cannot reach ...: no answer in time while waiting for ...",
        &[
            ("ferrywire/src/error.rs", "cannot reach {}: {}"),
            ("ferrywire-proto/src/handshake/error.rs", "no answer in time while waiting for {}"),
        ],
    ),
    (
        "note: GPU 2: eth2 does not reach GPU 0 of the peer; uses eth1, on that GPU's rail",
        &[
            ("ferrywire-cli/src/bench/multi_gpu.rs", "note: {}"),
            (
                "ferrywire-cli/src/bench/multi_gpu.rs",
                "GPU {}: {} does not reach GPU {} of the peer; uses {}, on that GPU's rail",
            ),
        ],
    ),
    (
        "GPU 2 to GPU 2: lost peer ...: 0 of 8 channels up; last lost: channel 1 over eth2",
        &[
            ("ferrywire-cli/src/bench/multi_gpu.rs", "GPU {} to GPU {}"),
            ("ferrywire/src/error.rs", "lost peer {}: {}"),
            ("ferrywire/src/core/peer/state.rs", "{} of {} channels up"),
            ("ferrywire/src/core/peer/state.rs", "; last lost: {}"),
            ("ferrywire/src/control/link/fences.rs", "channel {} over {}"),
        ],
    ),
    (
        "--gpu-nics 2=eth2: eth2 is down",
        &[("ferrywire-cli/src/nics.rs", "--gpu-nics {}="), ("ferrywire-cli/src/nics.rs", "{}{}: {} is down")],
    ),
    ("exit status 1", &[]),
    (
        "... has not returned within 30s",
        &[("ferrywire-cli/src/bench/isolated/supervisor.rs", "has not returned within {}")],
    ),
    (
        "accept has not ended after 22 s; ... has not returned for",
        &[
            ("ferrywire/src/payload/plugin/setup.rs", "accept has not ended"),
            ("ferrywire/src/payload/plugin/host.rs", "has not returned for"),
        ],
    ),
    (
        "failed against receive-datapath-manager: unix client connect() error: 2",
        &[
            ("ferrywire-ncclnet/src/cause.rs", "failed against receive-datapath-manager:"),
            ("ferrywire-ncclnet/src/cause.rs", "unix client connect() error: "),
        ],
    ),
    ("data landed on host memory", &[("ferrywire-ncclnet/src/cause.rs", "data landed on host memory")]),
    ("both ends are on one host", &[("ferrywire/src/payload/plugin/host.rs", "both ends are on one host")]),
    (
        "registers GPU memory on NIC veth0, which has no PCI path",
        &[
            ("ferrywire/src/payload/plugin/host.rs", "registers GPU memory on NIC {}, {}"),
            ("ferrywire/src/payload/plugin/tcpx.rs", "which has no PCI path"),
        ],
    ),
    ("both need the same", &[("ferrywire/src/payload/terms.rs", "both need the same")]),
    (
        "rank 11: not connected within 30 s",
        &[
            ("ferrywire-cli/src/bench/ranks/messages.rs", "rank {}: {}"),
            ("ferrywire-cli/src/bench/ranks/coordinator.rs", "not connected within {} s"),
        ],
    ),
    (
        "rank 3 (host): --sizes is 8K, ...",
        &[
            ("ferrywire-cli/src/bench/ranks/messages.rs", "rank {} ({}): {}"),
            ("ferrywire-cli/src/bench/ranks/coordinator.rs", "--{} is {}, "),
        ],
    ),
];

fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The source as a text would be searched in it: broken literals whole, and every placeholder as `{}`.
fn flat(source: &str) -> String {
    let mut out = String::new();
    let mut rest = source;
    while let Some(at) = rest.find(['\\', '{']) {
        out += &rest[..at];
        rest = &rest[at..];
        if let Some(next_line) = rest.strip_prefix("\\\n") {
            rest = next_line.trim_start();
        } else if let Some(end) = rest.find('}').filter(|end| !rest[..*end].contains(['\n', ' '])) {
            out += "{}";
            rest = &rest[end + 1..];
        } else {
            out.push_str(&rest[..1]);
            rest = &rest[1..];
        }
    }
    out + rest
}

/// Whether the text is in the quote, with a word, or nothing that is quoted, in each place.
fn is_in(quote: &str, text: &str) -> bool {
    let mut pieces = text.split("{}");
    let first = pieces.next().unwrap_or_default();
    let pieces: Vec<&str> = pieces.collect();
    quote.match_indices(first).any(|(at, _)| goes_on(&quote[at + first.len()..], &pieces))
}

fn goes_on(rest: &str, pieces: &[&str]) -> bool {
    let Some((piece, others)) = pieces.split_first() else { return true };
    rest.match_indices(piece).any(|(at, _)| {
        let is_word = !rest[..at].contains(' ');
        is_word && goes_on(&rest[at + piece.len()..], others)
    })
}

/// The texts in the first column of the page's last table.
fn on_the_page(page: &str) -> Vec<String> {
    let table = page.split("## What each failure looks like").nth(1).expect("the chapter");
    let cells = table.lines().filter_map(|line| line.strip_prefix("| ")?.split(" | ").next());
    cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).map(str::to_owned).collect()
}

#[test]
fn the_runbook_quotes_what_is_printed() {
    let page = read("../docs/a3-high.md");
    assert!(page.lines().next().expect("a line").contains("not run on hardware"));
    let found = on_the_page(&page);
    let known: Vec<&str> = QUOTED.iter().map(|(quote, _)| *quote).collect();
    assert_eq!(found, known, "each text of the page has its place in the code here");
    for (quote, parts) in QUOTED {
        for (file, text) in *parts {
            assert!(
                flat(&read(file)).contains(text),
                "{file} does not print {text:?}, which the page quotes"
            );
            assert!(is_in(quote, text), "{quote:?} is not what {file} prints: {text:?}");
        }
    }
}

#[test]
fn a_quote_that_the_code_does_not_print_is_noticed() {
    assert!(is_in("rank 11: not connected within 30 s", "rank {}: {}"));
    assert!(!is_in("rank 11 (host): it has not come", "rank {}: {}"));
    assert!(!is_in("not connected for 30 s", "not connected within {} s"));
    assert_eq!(flat("\"a {name:.0} \\\n   b\""), "\"a {} b\"");
}
