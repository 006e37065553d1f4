//! The report: one line for people, or one JSON line with the same figures and the run's plan.

use std::collections::BTreeMap;

use crate::best::Series;
use crate::pingpong::RoundTrips;
use crate::plan::Plan;
use crate::session::Outcome;

/// Prints a throughput result.
pub fn bulk(series: &Series, json: bool) {
    let per_gb = |cpu: f64, o: &Outcome| cpu / (o.source.total() as f64 / 1e9);
    let source = series.median(|o| per_gb(o.source.cpu_seconds, o));
    let target = series.median(|o| per_gb(o.target.cpu_seconds, o));
    let rate = series.gb_per_s();
    let (mut least, mut most) = (f64::MAX, 0.0_f64);
    series.outcomes.iter().for_each(|o| {
        least = least.min(o.gb_per_s());
        most = most.max(o.gb_per_s());
    });
    let first = &series.outcomes[0];
    let retransmits: u64 = series.outcomes.iter().map(|o| o.retransmits).sum();
    let pairs = bytes_per_pair(series);
    emit(
        json,
        &format!(
            "{rate:.2} GB/s ({least:.2} to {most:.2} in {} runs)  CPU-s/GB {:.3} = source {source:.3} + target \
             {target:.3}  {}{}",
            series.outcomes.len(),
            source + target,
            describe(&series.plan, &first.congestion),
            pairs
                .iter()
                .filter(|_| pairs.len() > 1)
                .map(|(p, b)| format!("\n  {p}  {b} bytes"))
                .collect::<String>(),
        ),
        &format!(
            "{{\"tool\":\"raw\",\"mode\":\"bulk\",\"gb_per_s\":{rate:.4},\"gb_per_s_min\":{least:.4},\
             \"gb_per_s_max\":{most:.4},\"runs\":{},\"cpu_s_per_gb\":{{\"source\":{source:.4},\"target\":\
             {target:.4}}},\"congestion_control\":\"{}\",\"retransmits\":{retransmits},\"pairs\":[{}],{}}}",
            series.outcomes.len(),
            first.congestion,
            join(pairs.iter().map(|(p, b)| format!("{{\"pair\":\"{p}\",\"bytes\":{b}}}"))),
            plan_json(&series.plan),
        ),
    );
}

/// Prints a ping-pong result.
pub fn pingpong(plan: &Plan, times: &RoundTrips, json: bool) {
    let RoundTrips { count, p50_us, p99_us } = times;
    emit(
        json,
        &format!(
            "{} B  round trip p50 {p50_us:.2} us, p99 {p99_us:.2} us; half: {:.2} / {:.2} us  ({count} rounds, {}, {})",
            plan.size,
            p50_us / 2.0,
            p99_us / 2.0,
            plan.wait.name(),
            plan.placement.name(),
        ),
        &format!(
            "{{\"tool\":\"raw\",\"mode\":\"pingpong\",\"rtt_us\":{{\"p50\":{p50_us:.3},\"p99\":{p99_us:.3}}},\
             \"half_rtt_us\":{{\"p50\":{:.3},\"p99\":{:.3}}},\"rounds\":{count},{}}}",
            p50_us / 2.0,
            p99_us / 2.0,
            plan_json(plan),
        ),
    );
}

fn emit(json: bool, human: &str, machine: &str) {
    if json {
        eprintln!("{human}");
        println!("{machine}");
    } else {
        println!("{human}");
    }
}

fn bytes_per_pair(series: &Series) -> BTreeMap<&str, u64> {
    let mut pairs = BTreeMap::new();
    for outcome in &series.outcomes {
        for (pair, bytes) in outcome.pairs.iter().zip(&outcome.source.bytes) {
            *pairs.entry(pair.as_str()).or_default() += bytes;
        }
    }
    pairs
}

fn describe(plan: &Plan, congestion: &str) -> String {
    let buffers = if plan.sockbuf == 0 { "autotuned".into() } else { size(plan.sockbuf as u64) };
    let pace = match (plan.sync, plan.batch) {
        (false, _) => "streaming".to_string(),
        (true, false) => format!("depth {}", plan.depth),
        (true, true) => format!("depth {} batched", plan.depth),
    };
    format!(
        "[{} connections, {} of {}, calls {}, socket buffers {buffers}, {}, {pace}, {congestion}]",
        plan.connections,
        size(plan.size),
        size(plan.buffer_bytes()),
        size(plan.call),
        plan.placement.name(),
    )
}

/// The plan's own `key=value` line as JSON members; everything but numbers is quoted.
fn plan_json(plan: &Plan) -> String {
    let line = plan.to_string();
    let members = line.split(' ').filter_map(|word| word.split_once('=')).filter(|(key, _)| *key != "mode");
    join(members.map(|(key, value)| match value.parse::<f64>() {
        Ok(_) => format!("\"{key}\":{value}"),
        Err(_) => format!("\"{key}\":\"{value}\""),
    }))
}

fn join(items: impl Iterator<Item = String>) -> String {
    items.collect::<Vec<_>>().join(",")
}

fn size(bytes: u64) -> String {
    match bytes {
        b if b >= 1 << 30 && b % (1 << 30) == 0 => format!("{}G", b >> 30),
        b if b >= 1 << 20 && b % (1 << 20) == 0 => format!("{}M", b >> 20),
        b if b >= 1 << 10 && b % (1 << 10) == 0 => format!("{}K", b >> 10),
        b => b.to_string(),
    }
}
