//! `--metrics`: what a scrape shows, and what it cannot disturb.

use std::collections::{BTreeMap, HashMap};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::common::{GRACE, Serve, ferrywire, results, run, text};
use crate::hosted;

/// A serving end with metrics, and where these are.
fn serve_with_metrics() -> (Serve, String) {
    with_metrics(Serve::start("--memory host --metrics 127.0.0.1:0"))
}

/// Where the metrics of a serving end are.
fn with_metrics(mut serve: Serve) -> (Serve, String) {
    let lines = serve.collect_errors();
    let until = Instant::now() + GRACE;
    loop {
        let found = lines.lock().unwrap().iter().find_map(|line| {
            let (_, rest) = line.split_once("metrics: http://")?;
            Some(rest.strip_suffix("/metrics")?.to_owned())
        });
        match found {
            Some(address) => return (serve, address),
            None => assert!(Instant::now() < until, "serve does not say where its metrics are"),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Sends a request and reads the answer to its end.
fn ask(address: &str, request: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).expect("metrics are served");
    stream.set_read_timeout(Some(GRACE)).unwrap();
    stream.write_all(request).unwrap();
    let mut answer = Vec::new();
    // A connection that is refused for its request may be reset.
    let _ = stream.read_to_end(&mut answer);
    text(&answer)
}

fn scrape(address: &str) -> String {
    let answer = ask(address, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    assert!(head.contains("Content-Type: text/plain; version=0.0.4"), "{head}");
    body.to_owned()
}

/// The sum of a metric over all its labels.
fn sum(metrics: &str, name: &str) -> f64 {
    let of_name = |line: &&str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' ', ',']));
    let values = metrics.lines().filter(of_name).map(|line| line.rsplit(' ').next().unwrap());
    values.map(|value| value.parse::<f64>().unwrap()).sum()
}

#[test]
fn bytes_and_operations_are_those_of_the_run_also_when_the_peer_is_gone() {
    let (serve, address) = serve_with_metrics();
    let before = scrape(&address);
    assert_eq!(sum(&before, "ferrywire_rx_bytes_total"), 0.0);
    let output = serve.connect("--memory host --sizes 1M --iters 100 --warmup 0 --json -");
    let payload =
        results(&output).iter().map(|row| row["iterations"].as_f64().unwrap() * 1048576.0).sum::<f64>();
    assert_eq!(payload, 104857600.0);
    let until = Instant::now() + GRACE;
    let after = loop {
        let now = scrape(&address);
        // `peer="closed"` is there from the start, with zeros.
        if now.lines().all(|row| !row.contains("peer=\"") || row.contains("peer=\"closed\"")) {
            break now;
        }
        assert!(Instant::now() < until, "the peer is still there:\n{now}");
        std::thread::sleep(Duration::from_millis(20));
    };
    // The timed part, and as much again to verify each iteration.
    let received = sum(&after, "ferrywire_rx_bytes_total");
    assert!(received >= payload && received <= 2.02 * payload + 4e6, "{received} of {payload}\n{after}");
    assert!(sum(&after, "ferrywire_operations_failed_total") == 0.0, "{after}");
    let started = sum(&after, "ferrywire_operations_started_total");
    assert_eq!(started, sum(&after, "ferrywire_operations_completed_total"), "{after}");
    assert!(!after.contains("ferrywire_path_info"), "a peer that is gone has no path:\n{after}");
    assert!(sum(&after, "ferrywire_cpu_seconds_total") > 0.0, "{after}");
}

#[test]
fn each_metric_has_help_type_and_unit() {
    let (serve, address) = serve_with_metrics();
    let mut connect =
        ferrywire(&format!("bench connect {} --memory host --sizes 1M --seconds 20", serve.address));
    let mut child =
        connect.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null()).spawn().unwrap();
    let until = Instant::now() + GRACE;
    let metrics = loop {
        let now = scrape(&address);
        if now.contains("ferrywire_path_info{") {
            break now;
        }
        assert!(Instant::now() < until, "no path:\n{now}");
        std::thread::sleep(Duration::from_millis(20));
    };
    child.kill().unwrap();
    child.wait().unwrap();
    let mut types = HashMap::new();
    let mut helps = BTreeMap::new();
    for line in metrics.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            assert!(types.insert(name.to_owned(), kind.to_owned()).is_none(), "{name} twice");
        } else if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').unwrap();
            helps.insert(name.to_owned(), help.to_owned());
        } else {
            let name = line.split(['{', ' ']).next().unwrap();
            let family = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end));
            let known = types.get(family.unwrap_or(name)).or_else(|| types.get(name));
            let kind = known.unwrap_or_else(|| panic!("{name} has no type"));
            assert_eq!(kind == "counter", name.ends_with("_total"), "{name} is a {kind}");
        }
    }
    assert!(types.keys().all(|name| helps.get(name).is_some_and(|help| help.ends_with('.'))), "{helps:?}");
    for name in
        ["ferrywire_rx_bytes_total", "ferrywire_tcp_rtt_seconds", "ferrywire_path_info", "ferrywire_info"]
    {
        assert!(types.contains_key(name), "{name} is missing:\n{metrics}");
    }
    let page = include_str!("../../../../docs/metrics.md").replace("`..._", "`ferrywire_operations_");
    let documented = metrics_named(&page);
    let missing: Vec<_> = types.keys().filter(|name| !documented.contains(*name)).collect();
    assert!(missing.is_empty(), "{missing:?} are not in docs/metrics.md");
    assert!(metrics.contains("transport=\"tcp\""), "{metrics}");
    assert!(
        metrics.contains("peer=\"127.0.0.1 ("),
        "a port makes a new label for each connection:\n{metrics}"
    );
}

/// Names `ferrywire_...` that may be metrics, without the endings of a histogram's series.
fn metrics_named(text: &str) -> std::collections::BTreeSet<String> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let names = words.filter(|word| word.starts_with("ferrywire_") && word.len() > "ferrywire_".len());
    names
        .map(|name| {
            ["_bucket", "_sum", "_count"]
                .iter()
                .fold(name, |name, end| name.strip_suffix(end).unwrap_or(name))
                .into()
        })
        .collect()
}

#[test]
fn dashboard_and_alerts_name_metrics_of_the_page_alone() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let read = |path: &str| std::fs::read_to_string(root.join(path)).expect(path);
    // "`..._completed_total`" continues the name before it.
    let page = metrics_named(&read("docs/metrics.md").replace("`..._", "`ferrywire_operations_"));
    for file in ["deploy/grafana/ferrywire.json", "deploy/prometheus/alerts.yml"] {
        let named = metrics_named(&read(file));
        assert!(named.len() > 4, "{file}: {named:?}");
        let unknown: Vec<_> = named.difference(&page).collect();
        assert!(unknown.is_empty(), "{file}: {unknown:?} are not in docs/metrics.md");
    }
    serde_json::from_str::<serde_json::Value>(&read("deploy/grafana/ferrywire.json")).expect("JSON");
}

/// Metrics on the page whose row of the table names the label `peer`.
fn metrics_by_peer(page: &str) -> std::collections::BTreeSet<String> {
    let rows = page.lines().filter_map(|line| {
        let mut cells = line.strip_prefix('|')?.split('|');
        let (names, labels) = (cells.next()?, cells.next()?);
        labels.split(',').any(|label| label.trim() == "peer").then_some(names)
    });
    rows.flat_map(metrics_named).collect()
}

#[test]
fn rates_leave_out_the_counts_of_closed_peers() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let by_peer = metrics_by_peer(
        &include_str!("../../../../docs/metrics.md").replace("`..._", "`ferrywire_operations_"),
    );
    assert!(by_peer.contains("ferrywire_operations_failed_total"), "{by_peer:?}");
    let files = ["docs/metrics.md", "deploy/grafana/ferrywire.json", "deploy/prometheus/alerts.yml"];
    for (file, least) in files.into_iter().zip([1, 10, 3]) {
        let text = std::fs::read_to_string(root.join(file)).expect(file).replace("\\\"", "\"");
        let mut found = 0;
        for (at, _) in text.match_indices("ferrywire_") {
            let rest = &text[at..];
            let name_bytes = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').expect("an end");
            let (name, rest) = rest.split_at(name_bytes);
            let matchers = rest.strip_prefix('{').and_then(|rest| rest.split_once('}'));
            let (matchers, rest) = matchers.unwrap_or(("", rest));
            // A range of time follows where a rate is taken of each series.
            if by_peer.contains(name) && rest.starts_with('[') {
                found += 1;
                let leaves_out = matchers.split(',').any(|each| each == r#"peer!="closed""#);
                assert!(leaves_out, "{file}: {name}{{{matchers}}} has the closed peers too");
            }
        }
        assert!(found >= least, "{file} has {found} rates of peers");
    }
}

/// A gauge of each direction, while a run moves data; both are zero or missing until then.
fn gauge_during(
    serve: &Serve,
    address: &str,
    connect: &str,
    gauge: &str,
    size: &str,
    is_wanted: impl Fn(f64, f64) -> bool,
) {
    let mut connect =
        ferrywire(&format!("bench connect {} {connect} --sizes 1M --seconds 60", serve.address));
    connect.env("FERRYWIRE_TCPX_SIM", hosted::ONE_HOST);
    let mut child =
        connect.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null()).spawn().unwrap();
    let until = Instant::now() + GRACE;
    loop {
        let now = scrape(address);
        let of = |name: &str| sum(&now, &format!("{name}{{direction=\"receive\""));
        let (used, all) = (of(gauge), of(size));
        assert!(used <= all, "{now}");
        if is_wanted(used, all) {
            break;
        }
        assert!(Instant::now() < until && child.try_wait().unwrap().is_none(), "{now}");
        std::thread::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn rings_and_lanes_show_how_full_they_are() {
    let (serve, address) = with_metrics(Serve::start("--memory sim:0 --metrics 127.0.0.1:0"));
    let rings = ["ferrywire_staging_ring_used_bytes", "ferrywire_staging_ring_bytes"];
    let connect = "--memory host --peer-memory sim:0";
    gauge_during(&serve, &address, connect, rings[0], rings[1], |used, all| used > 0.0 && all >= 1048576.0);
    drop(serve);
    let (serve, address) =
        with_metrics(hosted::serve("--memory host --metrics 127.0.0.1:0", hosted::ONE_HOST));
    let lanes = ["ferrywire_lane_requests", "ferrywire_lane_window_requests"];
    let connect = hosted::with_plugin("--memory host");
    gauge_during(&serve, &address, &connect, lanes[0], lanes[1], |used, all| used > 0.0 && all >= 16.0);
    let page = metrics_named(include_str!("../../../../docs/metrics.md"));
    assert!(rings.iter().chain(&lanes).all(|name| page.contains(*name)), "{page:?}");
}

#[test]
fn bad_requests_slow_readers_and_floods_do_not_disturb_a_run() {
    let (serve, address) = serve_with_metrics();
    let many = |count: usize, request: &'static [u8]| {
        let open = |_| {
            let mut stream = TcpStream::connect(&address).expect("it listens");
            let _ = stream.write_all(request);
            stream
        };
        (0..count).map(open).collect::<Vec<_>>()
    };
    let idle = many(200, b"");
    let half = many(50, b"GET /metr");
    let unread = many(50, b"GET /metrics HTTP/1.1\r\n\r\n");
    let output = serve.connect("--memory host --sizes 64K,1M --iters 200 --json -");
    assert_eq!(results(&output).len(), 2);
    drop((idle, half, unread));
    // Connections that do nothing are closed after a while, at the latest.
    let until = Instant::now() + GRACE;
    while !ask(&address, b"GET / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 200") {
        assert!(Instant::now() < until, "it does not answer any more");
        std::thread::sleep(Duration::from_millis(50));
    }
    let endless = [b"GET / HTTP/1.1\r\nX: ".as_slice(), &[b'a'; 8192]].concat();
    let bad: [(&[u8], &str); 5] = [
        (b"nonsense\r\n\r\n", "400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", "400"),
        (b"GET /other HTTP/1.1\r\n\r\n", "404"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", "405"),
        (&endless[..8192], "431"),
    ];
    for (request, status) in bad {
        let answer = ask(&address, request);
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
    }
    scrape(&address);
}

#[test]
fn a_port_in_use_and_no_address_are_errors_and_plus_takes_the_next_port() {
    let (_serve, address) = serve_with_metrics();
    let output = run(&format!("bench --memory host --sizes 4K --iters 1 --metrics {address}"));
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains(&format!("cannot serve metrics at {address}: ")), "{said}");
    assert!(said.contains(&format!("{address}+ takes the next free port")), "{said}");
    // The other end of loopback mode would serve at the port behind it, and must not be the one to fail.
    let output = run("bench --memory host --sizes 4K --iters 1 --metrics 192.0.2.1:9400");
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("cannot serve metrics at 192.0.2.1:9400: ") && !said.contains("9401"), "{said}");
    assert!(said.contains("no NIC of this host has the address"), "{said}");
    let output = run("bench --memory host --sizes 4K --iters 1 --metrics nowhere");
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("\"nowhere\" is not an address for metrics"));
    // Both ends of loopback mode serve: this one at the port, or the next one that is free, the other one behind it.
    for address in [format!("{address}+"), "127.0.0.1:0".to_owned()] {
        let output = run(&format!("bench -v --memory host --sizes 4K --iters 1 --metrics {address}"));
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{said}");
        assert_eq!(said.matches("metrics: http://127.0.0.1:").count(), 2, "{said}");
    }
    let mut command = ferrywire("bench --memory host --sizes 4K --iters 1");
    let output = command.env("FERRYWIRE_METRICS", &address).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
}

/// Regression: a serving end announced its metrics, and then ended because of the variable.
#[test]
fn a_typed_address_goes_before_a_variable_that_is_no_address() {
    let variables = [("FERRYWIRE_METRICS", "bad")];
    let arguments = "--listen 127.0.0.1:0 --memory host --metrics 127.0.0.1:0";
    let (_serve, metrics) = with_metrics(Serve::start_with(arguments, &variables));
    assert!(metrics.starts_with("127.0.0.1:"), "{metrics}");
}
