//! The state of an environment's NIXLs as JSON and as a table.

use std::fmt::Write;
use std::path::PathBuf;

use comfy_table::{Table, presets};
use serde_json::{Value, json};

use super::folder::{Held, State};
use super::library::Library;
use super::python::{Nixl, Python};
use crate::exit::Failure;
use crate::sanitize;

/// The state of the NIXL backend after the action.
#[derive(Debug)]
pub struct Report {
    /// The interpreter.
    pub python: Python,
    /// The library that `install` uses.
    pub library: Option<Library>,
    /// Each NIXL with the state of its folder.
    pub nixls: Vec<(Nixl, State)>,
    /// The folder that replaces the NIXLs' own.
    pub override_folder: Option<OverrideFolder>,
}

/// The folder that NIXL_PLUGIN_DIR names.
#[derive(Debug)]
pub struct OverrideFolder {
    pub path: PathBuf,
    /// Whether ferrywire's backend is in that folder.
    pub has_backend: bool,
    /// Whether that folder belongs to one of the NIXLs.
    pub is_of_nixl: bool,
}

impl Report {
    /// Why some NIXL lacks ferrywire's backend; `None` if every NIXL has it.
    pub fn error(&self) -> Option<Failure> {
        if self.nixls.iter().all(|(nixl, _)| !nixl.present) {
            let left = self.nixls.first().map(|(nixl, _)| left_behind(&self.python, nixl));
            return Some(left.unwrap_or_else(|| no_nixl(&self.python)));
        }
        self.nixls.iter().find_map(|(nixl, state)| problem(&self.python, nixl, state))
    }
}

fn problem(python: &Python, nixl: &Nixl, state: &State) -> Option<Failure> {
    let plugins = nixl.plugins.display();
    if !nixl.present {
        return Some(left_behind(python, nixl));
    }
    if let Some(what) = state.half_done() {
        return Some(Failure::failed(format!(
            "{nixl}: {what} (in {plugins}): a command was interrupted, or NIXL was reinstalled\n\
             try: {}; then {}, with --as-ucx for the alias",
            python.command("remove"),
            python.command("install")
        )));
    }
    if nixl.is_supported() == Some(false) {
        return Some(too_old(nixl));
    }
    match state.backend {
        Held::Ours(..) => None,
        Held::Other => Some(Failure::failed(format!(
            "{nixl}: libplugin_FERRYWIRE.so in {plugins} is not ferrywire's\n\
             try: move the file away, then {}",
            python.command("install")
        ))),
        Held::Nothing => Some(Failure::failed(format!(
            "{nixl}: the ferrywire backend is not installed in {plugins}\ntry: {}",
            python.command("install")
        ))),
    }
}

/// The error if there is no NIXL to install into.
pub fn no_nixl(python: &Python) -> Failure {
    let python = python.path.display();
    Failure::failed(format!(
        "no NIXL in the environment of {python}\n\
         try: {python} -m pip install nixl; or --python PATH, the interpreter that has NIXL"
    ))
}

/// The error for a NIXL whose backends have another interface.
pub fn too_old(nixl: &Nixl) -> Failure {
    Failure::failed(format!(
        "{nixl} is too old for the ferrywire backend, which needs NIXL 1.0 or later (in {}); try: pip install --upgrade nixl",
        nixl.plugins.display()
    ))
}

fn left_behind(python: &Python, nixl: &Nixl) -> Failure {
    Failure::failed(format!(
        "{}: NIXL was uninstalled, but files of ferrywire are left in {}\ntry: {}",
        nixl.package,
        nixl.plugins.display(),
        python.command("remove")
    ))
}

/// The report, the error, or both as JSON.
pub fn json(report: Option<&Report>, done: &[String], error: Option<&Failure>) -> Value {
    let library = report.and_then(|report| report.library.as_ref());
    let override_folder = report.and_then(|report| report.override_folder.as_ref());
    let nixls = report.into_iter().flat_map(|report| &report.nixls);
    json!({
        "schema": 2,
        "version": env!("CARGO_PKG_VERSION"),
        "python": report.map(|report| report.python.path.to_string_lossy()),
        "library": library.map(|library| json!({
            "path": library.path.to_string_lossy(),
            "version": library.version,
        })),
        "nixl": nixls.map(|(nixl, state)| of_nixl(nixl, state)).collect::<Vec<_>>(),
        "nixl_plugin_dir": override_folder.map(|folder| json!({
            "path": folder.path.to_string_lossy(),
            "has_backend": folder.has_backend,
        })),
        "done": done,
        "error": error.map(Failure::message),
    })
}

fn of_nixl(nixl: &Nixl, state: &State) -> Value {
    let (version, current) = match &state.backend {
        Held::Ours(version, current) => (Some(version), *current),
        Held::Nothing | Held::Other => (None, None),
    };
    json!({
        "package": nixl.package,
        "version": nixl.version,
        "present": nixl.present,
        "supported": nixl.is_supported(),
        "plugins": nixl.plugins.to_string_lossy(),
        "installed": state.is_installed(),
        "backend_version": version,
        "current": current,
        "other_file": state.backend == Held::Other,
        "alias": state.has_alias(),
        "half_done": state.half_done(),
    })
}

/// The report as text.
pub fn text(report: &Report) -> String {
    let mut text = format!("python   {}\n", report.python.path.display());
    let _ = match &report.library {
        Some(library) => writeln!(text, "library  {} ({})", library.path.display(), library.version),
        None => writeln!(text, "library  not found"),
    };
    if report.nixls.is_empty() {
        return text;
    }
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_header(["NIXL", "ferrywire backend", "UCX alias", "folder"]);
    for (nixl, state) in &report.nixls {
        let folder = nixl.plugins.display().to_string();
        table.add_row([name(nixl), backend(state), alias(state), folder].map(|cell| sanitize::line(&cell)));
    }
    for line in table.to_string().lines() {
        text += line.trim_end();
        text.push('\n');
    }
    text
}

fn name(nixl: &Nixl) -> String {
    match (nixl.present, nixl.is_supported()) {
        (false, _) => format!("{}, uninstalled", nixl.package),
        (true, Some(false)) => format!("{nixl}, too old"),
        (true, _) => nixl.to_string(),
    }
}

fn backend(state: &State) -> String {
    match &state.backend {
        Held::Nothing => "not installed".to_owned(),
        Held::Other => "not ferrywire's file".to_owned(),
        Held::Ours(version, Some(true)) => format!("{version}, up to date"),
        Held::Ours(version, Some(false)) => format!("{version}, differs from the library above"),
        Held::Ours(version, None) => version.clone(),
    }
}

fn alias(state: &State) -> String {
    match (state.half_done(), state.has_alias()) {
        (Some(_), _) => "incomplete",
        (None, true) => "yes",
        (None, false) => "no",
    }
    .to_owned()
}
