//! A Python environment: its interpreter, its folders of packages, and the NIXLs among them.
//!
//! NIXL is not imported, because it may be broken and is slow to start. The folders alone show where its backends
//! are.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::exit::{Failure, Outcome};
use crate::{sys, tool};

/// An interpreter on a slow network file system answers within this time.
const ANSWER_MAX: Duration = Duration::from_secs(60);
/// Program for the interpreter that prints the folders in which Python looks for packages, on a line after
/// anything that is printed at start.
const ASK: &str =
    "import json, sys; print(); print(json.dumps([sys.executable, [path for path in sys.path if path]]))";
/// The first major version whose backends have the virtual functions that this backend implements.
const MAJOR_MIN: u64 = 1;

/// A Python interpreter.
#[derive(Debug)]
pub struct Python {
    pub path: PathBuf,
    /// Whether the user named the interpreter.
    pub named: bool,
    /// The folders of packages, in the order of lookup.
    pub folders: Vec<PathBuf>,
}

/// A NIXL among the packages of an interpreter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nixl {
    /// The package's name in pip, such as nixl-cu12.
    pub package: String,
    /// The version in the package's metadata.
    pub version: Option<String>,
    /// The folder of the NIXL's backends.
    pub plugins: PathBuf,
    /// Whether NIXL is installed. If it was uninstalled, files of other programs still keep its folder.
    pub present: bool,
}

impl Nixl {
    /// Whether the backend works with this NIXL, as far as its version shows.
    pub fn is_supported(&self) -> Option<bool> {
        let major = self.version.as_ref()?.split('.').next()?.parse::<u64>().ok()?;
        Some(major >= MAJOR_MIN)
    }
}

impl std::fmt::Display for Nixl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.version {
            Some(version) => write!(f, "{} {version}", self.package),
            None => write!(f, "{}", self.package),
        }
    }
}

impl Python {
    /// Asks the named interpreter, or the one of this environment, for its folders.
    pub fn find(named: Option<&Path>) -> Outcome<Python> {
        let path = match named {
            Some(path) if path.is_dir() => path.join("bin/python"),
            Some(path) => path.to_owned(),
            None => {
                let command = std::env::current_exe().unwrap_or_default();
                let virtual_env = std::env::var_os("VIRTUAL_ENV").map(PathBuf::from);
                of_this_environment(command.parent(), virtual_env.as_deref())
            }
        };
        let mut command = Command::new(&path);
        let said = tool::run(command.args(["-B", "-c", ASK]), ANSWER_MAX);
        if sys::interrupted() {
            return Err(Failure::Interrupted);
        }
        let failed = |why: String| {
            Failure::failed(format!(
                "cannot ask {} where its packages are: {why}\ntry: --python PATH, the interpreter that has NIXL",
                path.display()
            ))
        };
        let said = said.map_err(|why| failed(why.to_string()))?;
        let list = said.lines().next_back().unwrap_or_default();
        let answer: Option<(PathBuf, Vec<PathBuf>)> = serde_json::from_str(list).ok();
        let (path, folders) = answer
            .ok_or_else(|| failed("the program does not answer like a Python interpreter".to_owned()))?;
        Ok(Python { path, named: named.is_some(), folders })
    }

    /// The `ferrywire nixl` command for this environment.
    pub fn command(&self, action: &str) -> String {
        if self.named {
            format!("ferrywire nixl {action} --python {}", self.path.display())
        } else {
            format!("ferrywire nixl {action}")
        }
    }

    /// The NIXLs that `import` would find, and the remains of uninstalled ones.
    pub fn nixls(&self) -> Vec<Nixl> {
        let (mut seen, mut nixls) = (BTreeSet::new(), Vec::<Nixl>::new());
        for folder in self.folders.iter().filter_map(|folder| folder.canonicalize().ok()) {
            if seen.insert(folder.clone()) {
                let here = nixls_in(&folder);
                let hidden: Vec<String> =
                    nixls.iter().filter(|nixl| nixl.present).map(|nixl| nixl.package.clone()).collect();
                nixls.extend(here.into_iter().filter(|nixl| !hidden.contains(&nixl.package)));
            }
        }
        nixls
    }
}

/// The interpreter of the virtual environment that contains this command, else of the active one, else the one beside
/// this command, else the first on the path.
fn of_this_environment(commands: Option<&Path>, virtual_env: Option<&Path>) -> PathBuf {
    let own = commands.and_then(|folder| {
        let python =
            ["python3", "python"].map(|name| folder.join(name)).into_iter().find(|path| path.exists())?;
        let is_virtual = folder.parent().is_some_and(|prefix| prefix.join("pyvenv.cfg").is_file());
        Some((python, is_virtual))
    });
    let active = virtual_env.map(|folder| folder.join("bin/python"));
    match own {
        Some((python, true)) => python,
        own => active.or(own.map(|(python, _)| python)).unwrap_or_else(|| PathBuf::from("python3")),
    }
}

fn nixls_in(folder: &Path) -> Vec<Nixl> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let names: BTreeSet<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    let libraries = names.iter().filter_map(|name| {
        let package = name.strip_prefix('.')?.strip_suffix(".mesonpy.libs")?;
        let is_nixl = package == "nixl" || package.starts_with("nixl_");
        is_nixl.then_some((name, package))
    });
    let nixl = |(name, package): (&String, &str)| {
        let begin = format!("{package}-");
        let mut about = names.iter().filter_map(|name| name.strip_prefix(&begin)?.strip_suffix(".dist-info"));
        let libraries = folder.join(name);
        Nixl {
            package: package.replace('_', "-"),
            version: about.next().map(str::to_owned),
            plugins: libraries.join("plugins"),
            present: libraries.join("libnixl.so").is_file(),
        }
    };
    libraries.map(nixl).filter(|nixl| nixl.plugins.is_dir()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_of_the_command_goes_before_the_active_one_and_that_before_the_system() {
        let folder = tempfile::tempdir().expect("a folder");
        let bin = folder.path().join("bin");
        fs::create_dir(&bin).expect("a folder");
        let active = Path::new("/active");
        assert_eq!(of_this_environment(Some(&bin), None), Path::new("python3"));
        assert_eq!(of_this_environment(Some(&bin), Some(active)), active.join("bin/python"));
        fs::write(bin.join("python3"), "").expect("written");
        assert_eq!(of_this_environment(Some(&bin), None), bin.join("python3"));
        assert_eq!(of_this_environment(Some(&bin), Some(active)), active.join("bin/python"));
        fs::write(folder.path().join("pyvenv.cfg"), "").expect("written");
        assert_eq!(of_this_environment(Some(&bin), Some(active)), bin.join("python3"));
    }

    #[test]
    fn releases_before_1_0_are_too_old() {
        let supported = |version: &str| {
            let version = Some(version.to_owned()).filter(|version| !version.is_empty());
            let (package, plugins) = ("nixl-cu12".to_owned(), PathBuf::new());
            Nixl { package, version, plugins, present: true }.is_supported()
        };
        assert_eq!(
            ["0.10.1", "1.0.1", "1.5.1", "2.0rc1"].map(supported),
            [false, true, true, true].map(Some)
        );
        assert_eq!(["", "unknown"].map(supported), [None, None]);
    }
}
