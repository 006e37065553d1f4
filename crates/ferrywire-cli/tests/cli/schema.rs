//! `docs/bench.schema.json` is what `bench --json` writes: every field, and no other.
//!
//! The checks below are those that the schema uses: `type`, `enum`, `const`, `required`, `properties`,
//! `additionalProperties`, `items`, `minItems`, `maxItems`, `minimum`, `anyOf` and `$ref` to `$defs`. Any other keyword fails.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::common::{Serve, results, run};

/// Keywords that say nothing about what is accepted.
const ANNOTATIONS: [&str; 5] = ["$schema", "$defs", "title", "description", "$ref"];

fn schema() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/bench.schema.json");
    serde_json::from_str(&fs::read_to_string(path).expect("the schema")).expect("JSON")
}

/// The violations of the schema in a document, each with its path and reason.
fn refusals(document: &Value) -> Vec<String> {
    let root = schema();
    let mut found = Vec::new();
    Check { root: &root, found: &mut found }.value(&root, document, "");
    found
}

struct Check<'a> {
    root: &'a Value,
    found: &'a mut Vec<String>,
}

impl Check<'_> {
    fn refuse(&mut self, at: &str, why: String) {
        self.found.push(format!("{at}: {why}"));
    }

    fn value(&mut self, schema: &Value, value: &Value, at: &str) {
        if let Some(pointer) = schema["$ref"].as_str() {
            let target = pointer.strip_prefix('#').and_then(|pointer| self.root.pointer(pointer));
            let target = target.unwrap_or_else(|| panic!("{pointer} leads nowhere"));
            self.value(target, value, at);
        }
        for (keyword, rule) in schema.as_object().expect("a schema is an object") {
            match keyword.as_str() {
                "type" => self.kind(rule, value, at),
                "enum" if !list(rule).contains(value) => self.refuse(at, format!("{value} is not in {rule}")),
                "const" if rule != value => self.refuse(at, format!("{value} is not {rule}")),
                "minimum" if value.as_f64().is_some_and(|number| Some(number) < rule.as_f64()) => {
                    self.refuse(at, format!("{value} is below {rule}"));
                }
                "minItems" if value.as_array().is_some_and(|items| (items.len() as u64) < bound(rule)) => {
                    self.refuse(at, format!("fewer than {rule} items"));
                }
                "maxItems" if value.as_array().is_some_and(|items| items.len() as u64 > bound(rule)) => {
                    self.refuse(at, format!("more than {rule} items"));
                }
                "anyOf" => self.any_of(list(rule), value, at),
                "required" => self.required(list(rule), value, at),
                "items" => {
                    for (index, item) in value.as_array().into_iter().flatten().enumerate() {
                        self.value(rule, item, &format!("{at}/{index}"));
                    }
                }
                "properties" | "additionalProperties" => {}
                "enum" | "const" | "minimum" | "minItems" | "maxItems" => {}
                other => assert!(ANNOTATIONS.contains(&other), "{at}: the test does not know {other}"),
            }
        }
        self.properties(schema, value, at);
    }

    fn kind(&mut self, rule: &Value, value: &Value, at: &str) {
        let is = |kind: &Value| match kind.as_str() {
            Some("object") => value.is_object(),
            Some("array") => value.is_array(),
            Some("string") => value.is_string(),
            Some("integer") => value.is_u64() || value.is_i64(),
            Some("number") => value.is_number(),
            Some("boolean") => value.is_boolean(),
            Some("null") => value.is_null(),
            _ => panic!("{kind} is no type"),
        };
        let fits = rule.as_array().map_or_else(|| is(rule), |kinds| kinds.iter().any(is));
        if !fits {
            self.refuse(at, format!("{value} is not of type {rule}"));
        }
    }

    fn any_of(&mut self, schemas: &[Value], value: &Value, at: &str) {
        let mut best: Option<Vec<String>> = None;
        for schema in schemas {
            let mut found = Vec::new();
            Check { root: self.root, found: &mut found }.value(schema, value, at);
            if best.as_ref().is_none_or(|best| found.len() < best.len()) {
                best = Some(found);
            }
        }
        self.found.extend(best.unwrap_or_default());
    }

    fn required(&mut self, names: &[Value], value: &Value, at: &str) {
        let Some(object) = value.as_object() else { return };
        for name in names.iter().filter_map(Value::as_str).filter(|name| !object.contains_key(*name)) {
            self.refuse(at, format!("{name} is missing"));
        }
    }

    /// Each property by its own schema, and others by what the schema says of others.
    fn properties(&mut self, schema: &Value, value: &Value, at: &str) {
        for (name, value) in value.as_object().into_iter().flatten() {
            let at = format!("{at}/{name}");
            match (&schema["properties"][name], &schema["additionalProperties"]) {
                (Value::Null, Value::Bool(false)) => self.refuse(&at, "no such field".to_owned()),
                (Value::Null, Value::Null) => {}
                (Value::Null, others) => self.value(others, value, &at),
                (own, _) => self.value(own, value, &at),
            }
        }
    }
}

fn list(rule: &Value) -> &[Value] {
    rule.as_array().expect("a list")
}

fn bound(rule: &Value) -> u64 {
    rule.as_u64().expect("a count")
}

fn accepted(args: &str) -> Value {
    let output =
        run(&format!("bench --memory host --peer-memory host --sizes 4K,64K --iters 20 --json - {args}"));
    results(&output);
    let document = crate::common::json(&output);
    assert_eq!(refusals(&document), Vec::<String>::new(), "bench {args}");
    document
}

#[test]
fn runs_of_every_kind_are_accepted() {
    for args in [
        "",
        "--op read --pattern bidir",
        "--pattern latency --blocks 4",
        "--pattern incast --peers 2 --verify off",
        "--pattern all-to-all --gpus 0-1 --gpu-nics 0-1=lo --channels 2",
    ] {
        accepted(args);
    }
    let simulated = run("bench --memory sim:0 --peer-memory sim:1 --sizes 64K --iters 20 --json -");
    results(&simulated);
    let document = crate::common::json(&simulated);
    assert!(document["results"][0]["extra"]["staging"].is_object(), "{document}");
    assert_eq!(refusals(&document), Vec::<String>::new());
}

#[test]
fn a_run_over_a_plugin_and_one_between_two_commands_are_accepted() {
    let args = "bench --memory host --peer-memory host --sizes 64K --iters 20 --json -";
    let output = run(&crate::hosted::with_plugin(args));
    results(&output);
    assert_eq!(refusals(&crate::common::json(&output)), Vec::<String>::new());
    let serve = Serve::start("--memory host");
    let output = serve.connect("--memory host --sizes 4K --iters 20 --json -");
    results(&output);
    assert_eq!(refusals(&crate::common::json(&output)), Vec::<String>::new());
    drop(serve);
    let failed = run("bench --nics nosuch0 --memory host --peer-memory host --sizes 4K --iters 5 --json -");
    assert_eq!(refusals(&crate::common::json(&failed)), Vec::<String>::new());
}

/// A NIC of this host beside loopback, as the command lists them.
fn nic_beside_loopback() -> Option<String> {
    let said = crate::common::first_error(&run("bench --nics nosuch0 --memory host --peer-memory host"));
    let (_, names) = said.rsplit_once("there are ")?;
    names.split(", ").find(|name| *name != "lo").map(str::to_owned)
}

#[test]
fn a_named_nic_without_a_channel_is_in_the_result_and_in_the_header() {
    let Some(nic) = nic_beside_loopback() else {
        eprintln!("SKIPPED: needs a NIC with an address beside loopback");
        return;
    };
    let document = accepted(&format!("--nics lo,{nic}"));
    let idle = &document["results"][0]["extra"]["idle_nics"];
    assert_eq!((list(idle).len(), &idle[0]["nic"]), (1, &json!(nic)), "{document}");
    assert!(accepted("--nics lo")["results"][0]["extra"]["idle_nics"].is_null());
    let args = format!("bench --memory host --peer-memory host --sizes 4K --iters 2 --nics lo,{nic}");
    let shown = crate::common::text(&run(&args).stdout);
    let header = shown.lines().take_while(|line| !line.contains('─'));
    let named: Vec<&str> =
        header.filter(|line| line.starts_with(&format!("NIC {nic} carries no channel: "))).collect();
    assert_eq!(named.len(), 1, "{shown}");
    assert!(
        named[0]
            .ends_with(&format!("leave {nic} out of --nics, or connect to an address that {nic} reaches"))
    );
}

#[test]
fn unknown_missing_and_wrong_fields_are_refused() {
    let document = accepted("");
    let changed = |change: &dyn Fn(&mut Value)| {
        let mut changed = document.clone();
        change(&mut changed);
        refusals(&changed)
    };
    let remove =
        |object: &mut Value, name: &str| drop(object.as_object_mut().expect("an object").remove(name));
    assert_eq!(changed(&|it| it["results"][1]["colour"] = json!(1)), ["/results/1/colour: no such field"]);
    assert_eq!(changed(&|it| it["config"]["colour"] = json!(1)), ["/config/colour: no such field"]);
    assert_eq!(
        changed(&|it| remove(&mut it["results"][0], "bottleneck")),
        ["/results/0: bottleneck is missing"]
    );
    assert_eq!(changed(&|it| remove(it, "peer")), [": peer is missing"]);
    assert_eq!(changed(&|it| it["schema"] = json!(1)), ["/schema: 1 is not 2"]);
    assert_eq!(changed(&|it| it["host"]["cores"] = json!(0)), ["/host/cores: 0 is below 1"]);
    assert_eq!(
        changed(&|it| it["results"][0]["gb_per_s"]["p50"] = json!("1")),
        ["/results/0/gb_per_s/p50: \"1\" is not of type \"number\""]
    );
    assert_eq!(changed(&|it| it["peer"]["kernel"] = Value::Null).len(), 1);
    assert_eq!(changed(&|it| it["results"][0]["direction"] = json!("up")).len(), 1);
}

/// A schema whose fields say nothing is of no use.
#[test]
fn every_field_is_described() {
    fn undescribed(schema: &Value, at: &str, found: &mut Vec<String>) {
        for (name, field) in schema["properties"].as_object().into_iter().flatten() {
            let at = format!("{at}/{name}");
            if field["description"].as_str().is_none_or(str::is_empty) {
                found.push(at.clone());
            }
            undescribed(field, &at, found);
        }
    }
    let root = schema();
    let mut found = Vec::new();
    undescribed(&root, "", &mut found);
    for (name, definition) in root["$defs"].as_object().expect("definitions") {
        undescribed(definition, name, &mut found);
    }
    assert_eq!(found, Vec::<String>::new());
}
