//! `ferrywire nixl`: installs the backend into the NIXL of a Python environment, shows its state, and removes it.
//!
//! NIXL loads backends from one folder, beside its own library, and `NIXL_PLUGIN_DIR` replaces that folder instead of
//! adding one. So the backend is copied into the folder.
//! Read next: [`python`] (finds NIXLs), [`folder`] (the steps), [`library`] (the file), [`report`].

mod folder;
mod library;
mod python;
mod report;

use std::path::{Path, PathBuf};

use crate::exit::{self, Failure, Outcome};
use crate::plan::{NixlAction, NixlPlan};
use folder::{BACKUP, Folder, Held, UCX};
use library::{FILE, Library};
use python::{Nixl, Python};
use report::{OverrideFolder, Report};

/// The variable that names another folder of backends.
const PLUGIN_DIR: &str = "NIXL_PLUGIN_DIR";

/// Carries out the action and prints the resulting state.
pub fn run(plan: &NixlPlan) -> Outcome {
    let mut done = Vec::new();
    let (report, outcome) = match act(plan, &mut done) {
        Ok((report, outcome)) => (Some(report), outcome),
        Err(failure) => (None, Err(failure)),
    };
    let text = match (plan.json, plan.action, &report) {
        (true, _, report) => format!("{}\n", report::json(report.as_ref(), &done, outcome.as_ref().err())),
        (false, NixlAction::Status, Some(report)) => report::text(report),
        (false, ..) => done.iter().map(|line| format!("{line}\n")).collect(),
    };
    let printed = exit::print(&text);
    if let Some(report) = &report {
        warn(plan.action, report);
    }
    outcome.and(printed)
}

/// Carries out the action; returns the resulting state and the outcome.
fn act(plan: &NixlPlan, done: &mut Vec<String>) -> Outcome<(Report, Outcome)> {
    let python = Python::find(plan.python.as_deref())?;
    let library = match &plan.library {
        // A named library that does not exist is an error for every action.
        Some(path) => Ok(Library::open(path)?),
        None => Library::find(&python.folders),
    };
    let mut nixls = Vec::new();
    for nixl in python.nixls() {
        // Files of other programs in the folder of an uninstalled NIXL are not reported.
        if nixl.present || Folder::of(&nixl).read_state(None)?.has_ours() {
            nixls.push(nixl);
        }
    }
    let outcome = match plan.action {
        NixlAction::Install { as_ucx } => install(&python, &nixls, library.as_ref(), as_ucx, done),
        NixlAction::Remove => remove(&nixls, done),
        NixlAction::Status => Ok(()),
    };
    let library = library.ok();
    let with_state = |nixl: Nixl| {
        let state = Folder::of(&nixl).read_state(library.as_ref())?;
        Ok((nixl, state))
    };
    // Removing may have deleted the folder of an uninstalled NIXL.
    let nixls = nixls
        .into_iter()
        .filter(|nixl| nixl.plugins.is_dir())
        .map(with_state)
        .collect::<Outcome<Vec<_>>>()?;
    let override_folder = override_folder(&nixls)?;
    let report = Report { python, library, nixls, override_folder };
    let outcome = match plan.action {
        NixlAction::Status => report.error().map_or(Ok(()), Err),
        _ => outcome,
    };
    Ok((report, outcome))
}

fn install(
    python: &Python,
    nixls: &[Nixl],
    library: Result<&Library, &Failure>,
    as_ucx: bool,
    done: &mut Vec<String>,
) -> Outcome {
    let present: Vec<&Nixl> = nixls.iter().filter(|nixl| nixl.present).collect();
    if present.is_empty() {
        return Err(report::no_nixl(python));
    }
    // Install into all or none, as far as the outcome can be known in advance.
    if let Some(old) = present.iter().find(|nixl| nixl.is_supported() == Some(false)) {
        return Err(report::too_old(old));
    }
    let library = library.map_err(Failure::clone)?;
    for nixl in &present {
        if Folder::of(nixl).read_state(Some(library))?.backend == Held::Other {
            return Err(Folder::of(nixl).not_ours());
        }
    }
    for nixl in present {
        done.extend(Folder::of(nixl).install(library, as_ucx)?);
    }
    Ok(())
}

fn remove(nixls: &[Nixl], done: &mut Vec<String>) -> Outcome {
    let mut outcome = Ok(());
    for nixl in nixls {
        // A failure with one NIXL does not keep the others from being removed.
        match Folder::of(nixl).remove() {
            Ok(lines) => done.extend(lines),
            Err(failure) => outcome = outcome.and(Err(failure)),
        }
    }
    if done.is_empty() && outcome.is_ok() {
        done.push("no files of ferrywire were installed".to_owned());
    }
    outcome
}

/// The folder that replaces all others, if it is set.
fn override_folder(nixls: &[(Nixl, folder::State)]) -> Outcome<Option<OverrideFolder>> {
    let Some(path) = std::env::var_os(PLUGIN_DIR).filter(|path| !path.is_empty()).map(PathBuf::from) else {
        return Ok(None);
    };
    let whole = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let is_of_nixl = nixls.iter().any(|(nixl, _)| whole(&nixl.plugins) == whole(&path));
    let held = library::contents(&path.join(FILE)).ok();
    let has_backend = held.is_some_and(|bytes| library::version(&bytes).is_some());
    Ok(Some(OverrideFolder { path, has_backend, is_of_nixl }))
}

/// Warnings besides the requested report.
fn warn(action: NixlAction, report: &Report) {
    let installs = matches!(action, NixlAction::Install { .. });
    if action == (NixlAction::Install { as_ucx: true }) {
        warn_of_alias(report);
    }
    if let Some(folder) = &report.override_folder
        && !folder.is_of_nixl
        && (installs || action == NixlAction::Status)
    {
        let path = folder.path.display();
        exit::note(&if folder.has_backend {
            format!(
                "warning: {PLUGIN_DIR}={path} replaces NIXL's own folder; the ferrywire backend is in it too"
            )
        } else {
            format!(
                "warning: {PLUGIN_DIR}={path} replaces NIXL's own folder, and the ferrywire backend is not in it: \
                 unset the variable, or copy {FILE} there"
            )
        });
    }
}

fn warn_of_alias(report: &Report) {
    let mut aliased = report.nixls.iter().filter(|(_, state)| state.has_alias()).peekable();
    if aliased.peek().is_none() {
        return;
    }
    for (nixl, state) in aliased {
        let kept =
            if state.backup { format!("; NIXL's own {UCX} is kept as {BACKUP}") } else { String::new() };
        exit::note(&format!("warning: {nixl}: programs that ask NIXL for UCX now get ferrywire{kept}"));
    }
    exit::note(&format!(
        "warning: both ends of every transfer need this alias, as a peer with the real UCX is refused; undo it with: {}",
        report.python.command("remove")
    ));
}
