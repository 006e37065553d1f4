//! Reads files of `bench --json`.
//!
//! A file may come from another host, or from an attacker: its size is bounded, and its texts are sanitized before
//! anything looks at them. Read next: `compare.rs`.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::bench::host::Host;
use crate::bench::report::SCHEMA;
use crate::bench::result::ResultRow;
use crate::exit::{Failure, Outcome};
use crate::sanitize;

/// Largest file that is read: a run with 1024 ranks and 64 sizes fits.
const FILE_BYTES_MAX: u64 = 256 << 20;
/// The advice for a file that does not come from `bench`.
const FIX: &str = "name a file that `ferrywire bench --json FILE` wrote";

/// A stored run.
#[derive(Debug)]
pub struct StoredRun {
    /// The name of the run in the report: the file's name, or its path where names are equal.
    pub name: String,
    pub document: Document,
}

/// The part of a `bench --json` document that a report shows.
#[derive(Debug, Deserialize)]
pub struct Document {
    /// Version of ferrywire that measured.
    pub version: String,
    /// Effective options.
    pub config: Map<String, Value>,
    pub host: Host,
    /// The host of the peer; `None` if the peer had not answered.
    pub peer: Option<Host>,
    pub results: Vec<ResultRow>,
    /// Why the run failed.
    pub error: Option<String>,
}

/// Reads all files. Returns a run for each.
pub fn runs(files: &[PathBuf]) -> Outcome<Vec<StoredRun>> {
    let documents: Vec<Document> = files.iter().map(|file| document(file)).collect::<Outcome<_>>()?;
    let names = names(files);
    Ok(names.into_iter().zip(documents).map(|(name, document)| StoredRun { name, document }).collect())
}

fn document(file: &Path) -> Outcome<Document> {
    let shown = file.display();
    let failed = |why: String| Failure::failed(format!("{shown}: {why}"));
    let mut bytes = Vec::new();
    let read = File::open(file).and_then(|opened| opened.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes));
    read.map_err(|error| failed(format!("cannot be read: {error}; {FIX}")))?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(failed(format!("the file is larger than {} MiB; {FIX}", FILE_BYTES_MAX >> 20)));
    }
    let mut value: Value =
        serde_json::from_slice(&bytes).map_err(|error| failed(format!("not JSON: {error}; {FIX}")))?;
    match value.get("schema") {
        Some(schema) if *schema == SCHEMA => {}
        Some(schema) => {
            let schema = sanitize::line(&schema.to_string());
            return Err(failed(format!(
                "the schema is {schema}, and this version reads schema {SCHEMA}; run the bench again with this version"
            )));
        }
        None => return Err(failed(format!("no result of a bench: the field schema is missing; {FIX}"))),
    }
    // Later lines advise the user of that run.
    if let Some(Value::String(error)) = value.get_mut("error") {
        error.truncate(error.find('\n').unwrap_or(error.len()));
    }
    clean(&mut value);
    if let Some(place) = negative(&value["results"], "results") {
        return Err(failed(format!("a result is damaged: {place} is negative; run the bench again")));
    }
    let document: Document = serde_json::from_value(value)
        .map_err(|error| failed(format!("the file does not follow schema {SCHEMA}: {error}; {FIX}")))?;
    if document.results.is_empty() {
        let why = document.error.as_deref();
        let why = why.map_or_else(String::new, |error| format!(": the run failed with `{error}`"));
        return Err(failed(format!("the file holds no results{why}; run the bench again")));
    }
    Ok(document)
}

/// Sanitizes every text.
fn clean(value: &mut Value) {
    match value {
        Value::String(text) => *text = sanitize::line(text),
        Value::Array(items) => items.iter_mut().for_each(clean),
        Value::Object(fields) => {
            *fields = std::mem::take(fields)
                .into_iter()
                .map(|(name, mut value)| {
                    clean(&mut value);
                    (sanitize::line(&name), value)
                })
                .collect();
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// The place of a negative number; no field of a result can be negative.
fn negative(value: &Value, place: &str) -> Option<String> {
    match value {
        Value::Number(number) => number.as_f64().is_some_and(|number| number < 0.0).then(|| place.to_owned()),
        Value::Array(items) => {
            items.iter().enumerate().find_map(|(at, item)| negative(item, &format!("{place}[{at}]")))
        }
        Value::Object(fields) => {
            fields.iter().find_map(|(name, field)| negative(field, &format!("{place}.{name}")))
        }
        Value::Null | Value::Bool(_) | Value::String(_) => None,
    }
}

/// A name for each file: its last part if no other file shares it, else its path; with a number if a file is named twice.
fn names(files: &[PathBuf]) -> Vec<String> {
    let last = |file: &Path| file.file_name().unwrap_or(file.as_os_str()).to_owned();
    let name = |(at, file): (usize, &PathBuf)| {
        let shared = files.iter().filter(|other| last(other) == last(file)).count() > 1;
        let shown =
            if shared { file.display().to_string() } else { last(file).to_string_lossy().into_owned() };
        let before = files[..at].iter().filter(|other| *other == file).count();
        let again = if before > 0 { format!(" ({})", before + 1) } else { String::new() };
        sanitize::line(&shown) + &again
    };
    files.iter().enumerate().map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_files_are_distinct() {
        let files: Vec<PathBuf> = ["a/x.json", "b/x.json", "y.json", "y.json"].map(PathBuf::from).into();
        assert_eq!(names(&files), ["a/x.json", "b/x.json", "y.json", "y.json (2)"]);
        assert_eq!(names(&[PathBuf::from("deep/er/z.json")]), ["z.json"]);
    }

    #[test]
    fn texts_are_sanitized_at_every_depth() {
        let mut value = serde_json::json!({"a\u{1b}": [{"b": "\u{202e}c\n"}]});
        clean(&mut value);
        assert_eq!(value, serde_json::json!({"a\u{fffd}": [{"b": "\u{fffd}c\u{fffd}"}]}));
    }
}
