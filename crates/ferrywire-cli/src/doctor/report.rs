//! Findings as JSON and as a table.

use std::fmt::Write;

use comfy_table::{Table, presets};
use serde_json::{Value, json};

use super::finding::{Finding, Level};
use super::peer::PeerFacts;
use crate::bench::host::Host;

/// The findings as JSON.
pub fn json(findings: &[Finding], peer: Option<&PeerFacts>) -> Value {
    json!({
        "schema": 2,
        "version": env!("CARGO_PKG_VERSION"),
        "host": Host::this(),
        "peer": peer.map(PeerFacts::json),
        "findings": findings,
        "error": error(findings),
    })
}

/// The failed checks in one line; `None` if none failed.
pub fn error(findings: &[Finding]) -> Option<String> {
    let first = findings.iter().find(|finding| finding.level == Level::Fail)?;
    let more = findings.iter().filter(|finding| finding.level == Level::Fail).count() - 1;
    let more = if more > 0 { format!(" (and {more} more)") } else { String::new() };
    Some(format!("{}: {}{more}", first.subject, first.evidence))
}

/// The findings as text: the most severe first; those in order are only counted.
pub fn text(findings: &[Finding], verbose: bool) -> String {
    let mut shown: Vec<&Finding> =
        findings.iter().filter(|finding| verbose || finding.level != Level::Ok).collect();
    shown.sort_by_key(|finding| finding.level);
    let mut text = String::new();
    if !shown.is_empty() {
        let mut table = Table::new();
        table.load_preset(presets::NOTHING);
        table.set_header(["level", "subject", "evidence", "fix"]);
        table.add_rows(shown.iter().map(|finding| row(finding)));
        for line in table.to_string().lines() {
            text += line.trim_end();
            text.push('\n');
        }
    }
    let _ = writeln!(text, "{}", counts(findings, verbose));
    text
}

fn row(finding: &Finding) -> [String; 4] {
    let level = match finding.level {
        Level::Fail => "FAIL",
        Level::Warn => "warn",
        Level::Note => "note",
        Level::Ok => "ok",
    };
    let fix = finding.fix.clone().unwrap_or_else(|| "-".to_owned());
    [level.to_owned(), finding.subject.clone(), finding.evidence.clone(), fix]
}

fn counts(findings: &[Finding], verbose: bool) -> String {
    let count = |level| findings.iter().filter(|finding| finding.level == level).count();
    let [fail, warn, notes, ok] = [Level::Fail, Level::Warn, Level::Note, Level::Ok].map(count);
    let hidden = if verbose || ok == 0 { "" } else { " (-v shows them)" };
    let plural = |count: usize, noun: &str| match count {
        1 => format!("1 {noun}"),
        _ => format!("{count} {noun}s"),
    };
    let (fail, warn, notes) = (plural(fail, "failure"), plural(warn, "warning"), plural(notes, "note"));
    format!("{fail}, {warn}, {notes}, {ok} ok{hidden}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_findings_come_first_and_ok_findings_are_counted() {
        let ok = Finding::ok("a", "eth1", "as it should be");
        let findings =
            [ok.clone(), ok.clone().warn("do this"), Finding::ok("b", "eth2", "broken").fail("do that")];
        let said = text(&findings, false);
        let at = |word: &str| said.find(word).unwrap_or_else(|| panic!("{word}: {said}"));
        assert!(at("FAIL") < at("warn") && at("warn") < at("1 failure, 1 warning, 0 notes, 1 ok"));
        assert_eq!(said.matches("as it should be").count(), 1);
        assert_eq!(text(&findings, true).matches("as it should be").count(), 2);
        assert_eq!(error(&findings), Some("eth2: broken".to_owned()));
        assert_eq!(error(&findings[..2]), None);
    }

    #[test]
    fn programs_get_every_finding() {
        let findings = [Finding::ok("a", "eth1", "as it should be")];
        let json = json(&findings, None);
        assert_eq!(json["findings"][0]["level"], "ok");
        assert_eq!((&json["error"], &json["peer"], &json["schema"]), (&Value::Null, &Value::Null, &2.into()));
    }
}
