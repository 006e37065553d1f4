//! Installs as users do: `pip install .` in a clone, then the command, the module and the NCCL plugin, in an environment
//! without other packages; a source distribution that becomes an equal wheel; and the NIXL backend in another environment.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

use crate::environment;
use crate::inspection::{self, Wheel, needs_nothing_else};

/// Moves some bytes and prints which libraries are loaded.
const FIRST_TRANSFER: &str = r#"
import ferrywire as fw, sys
far, near = fw.Endpoint("127.0.0.1:0"), fw.Endpoint()
got = bytearray(1 << 20)
target = far.register(got)
peer = near.connect(far.metadata())
peer.write(near.register(b"\x07" * len(got)), target.remote()).wait(timeout=60)
assert got == b"\x07" * len(got)
print("moved", fw.__version__, fw._ferrywire.__file__, sorted({"numpy", "torch"} & set(sys.modules)))
"#;

/// The first steps of a NIXL user. NIXL only warns about a missing backend.
const FIRST_AGENT: &str = r#"
import sys
from nixl._api import nixl_agent, nixl_agent_config
agent = nixl_agent("agent", nixl_agent_config(backends=[sys.argv[1]]))
assert sys.argv[1] in agent.backends, agent.backends
print("metadata of", len(agent.get_agent_metadata()), "bytes; backends", *sorted(agent.get_plugin_list()))
"#;

/// NIXL for one version of CUDA and what its Python module imports: neither CUDA nor PyTorch.
const NIXL: [&str; 4] = ["--no-deps", "nixl==1.5.1", "nixl-cu12==1.5.1", "numpy"];

/// The calls by which build front ends make a source distribution.
const MAKE_SDIST: &str = r#"
import sys
sys.path.insert(0, "crates/ferrywire-py/build_backend")
import ferrywire_build
ferrywire_build.build_sdist(sys.argv[1])
"#;

#[test]
fn an_installation_from_a_clone_works() {
    let Some(python) = environment::python("wheel", &["maturin>=1.9.4,<2"]) else {
        return;
    };
    let copied = clone();
    let clone = &copied.folder;
    fetch_for_all_platforms(clone);
    environment::run(pip(&python, "install").arg("--force-reinstall").arg(clone));
    copied.are_unchanged();
    let installed = first_transfer(&python);
    let command = python.with_file_name("ferrywire");
    let table =
        environment::run(Command::new(&command).args(["bench", "--sizes", "64K", "--memory", "host"]));
    assert!(table.contains(" 64K ") && table.contains(" yes"), "{table}");
    let plugin = plugin_works(&python, &command);
    for file in [&installed, &command, &plugin] {
        needs_nothing_else(file);
    }

    let file = wheel_from_sdist(&python, clone);
    let wheel = Wheel::open(&file);
    wheel.has_what_users_need();
    // The installed package is the one from the clone.
    let site = installed.ancestors().nth(2).expect("the folder of the packages");
    for file in wheel.files("ferrywire/") {
        assert!(site.join(&file).is_file(), "{file} is in the wheel from the source distribution alone");
    }
    nixl_has_a_backend_until_it_is_removed(&file);
}

/// Three calls of cargo build the command, the module and the whole workspace. A crate with other features in one of them is
/// compiled again, and so is the engine above it: a minute for each wheel.
#[test]
fn crates_of_a_wheel_have_the_features_of_the_workspace() {
    let workspace = crates(&["--workspace"]);
    let beside = ["-p", "ferrywire-cli", "-p", "ferrywire-nccl", "-p", "ferrywire-nixl"];
    for packages in [&["-p", "ferrywire-py"][..], &beside] {
        let others: Vec<_> = crates(packages).difference(&workspace).cloned().collect();
        assert!(others.is_empty(), "{packages:?} alone has crates with other features: {others:#?}");
    }
}

/// The crates that a build of these packages compiles, each with its features.
fn crates(packages: &[&str]) -> BTreeSet<String> {
    let mut tree = Command::new(env!("CARGO"));
    tree.args(["tree", "--offline", "--quiet", "--edges", "normal,build", "--prefix", "none", "--no-dedupe"]);
    tree.args(["--format", "{p} {f}"]).args(packages).current_dir(environment::root());
    environment::run(&mut tree).lines().map(str::to_owned).collect()
}

/// Installs and removes the backend in an environment of its own, which must be unchanged afterwards.
fn nixl_has_a_backend_until_it_is_removed(wheel: &Path) {
    let Some(python) = environment::python("wheel-nixl", &NIXL) else {
        return;
    };
    let home = python.ancestors().nth(2).expect("the environment");
    // An interrupted run may have left files.
    let _ = Command::new(python.with_file_name("ferrywire")).args(["nixl", "remove"]).output();
    uninstall(&python);
    let before = files(home);
    let agent = |backend: &str| {
        let mut agent = Command::new(&python);
        agent.args(["-I", "-c", FIRST_AGENT, backend]).env_remove("NIXL_PLUGIN_DIR");
        environment::run(&mut agent)
    };
    environment::run(pip(&python, "install").arg("--force-reinstall").arg(wheel));
    let nixl = |args: &[&str]| {
        let mut command = Command::new(python.with_file_name("ferrywire"));
        command.arg("nixl").args(args).env_remove("NIXL_PLUGIN_DIR");
        environment::run(&mut command)
    };
    assert!(nixl(&["install"]).contains("installed "));
    let said = agent("FERRYWIRE");
    assert!(said.contains("ferrywire: agent agent moves host memory over TCP"), "{said}");
    assert!(said.contains(" FERRYWIRE ") && !said.contains("before-ferrywire"), "{said}");
    let status = nixl(&["status"]);
    assert!(status.contains(&format!(" {}, up to date ", env!("CARGO_PKG_VERSION"))), "{status}");

    nixl(&["install", "--as-ucx"]);
    let said = agent("UCX");
    assert!(said.contains("ferrywire: ") && said.contains("ferrywire nixl remove"), "{said}");
    assert!(nixl(&["remove"]).contains("restored NIXL's own libplugin_UCX.so"));
    let said = agent("UCX");
    assert!(!said.contains("ferrywire: "), "{said}");
    uninstall(&python);
    assert_eq!(files(home), before, "what is left behind");
}

fn uninstall(python: &Path) {
    let uninstall =
        ["-m", "pip", "uninstall", "--quiet", "--disable-pip-version-check", "--yes", "ferrywire"];
    environment::run(Command::new(python).args(uninstall));
}

/// All files below a folder, with sizes and times.
fn files(below: &Path) -> BTreeMap<PathBuf, (u64, Option<SystemTime>)> {
    let (mut files, mut folders) = (BTreeMap::new(), vec![below.to_owned()]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            let about = fs::symlink_metadata(&path).expect("it is there");
            if about.is_dir() {
                folders.push(path);
            } else {
                files.insert(path, (about.len(), about.modified().ok()));
            }
        }
    }
    files
}

/// Runs the module and returns its path.
fn first_transfer(python: &Path) -> PathBuf {
    let said = environment::run(Command::new(python).args(["-I", "-W", "error", "-c", FIRST_TRANSFER]));
    let words: Vec<&str> = said.split_whitespace().collect();
    assert_eq!((words[0], words[1], words[3]), ("moved", env!("CARGO_PKG_VERSION"), "[]"), "{said}");
    PathBuf::from(words[2])
}

/// Checks that the plugin is where the package reports it, and that a host of plugins can use it.
fn plugin_works(python: &Path, command: &Path) -> PathBuf {
    let ask = "import ferrywire; print(ferrywire.nccl_plugin_path())";
    let path = environment::run(Command::new(python).args(["-I", "-c", ask]));
    let plugin = PathBuf::from(path.trim());
    assert!(plugin.ends_with("ferrywire/lib/libnccl-net-ferrywire.so"), "{}", plugin.display());
    let mut hosted = Command::new(command);
    let said = environment::run(hosted.arg("plugin").arg(&plugin).env("NCCL_SOCKET_IFNAME", "lo"));
    assert!(said.contains("v10") && said.contains("  lo "), "{said}");
    plugin
}

/// A clone, with the work tree's files that are in it and their times. The clone is removed on drop: cargo, which has built
/// from its files, would not see later changes of the work tree.
struct Copied {
    folder: PathBuf,
    files: Vec<(PathBuf, SystemTime)>,
}

impl Drop for Copied {
    fn drop(&mut self) {
        if self.folder != environment::root() {
            let _ = fs::remove_dir_all(&self.folder);
        }
    }
}

impl Copied {
    /// Checks the files' times: cargo takes builds from the clone for builds from the work tree, and goes by times.
    fn are_unchanged(&self) {
        for (path, changed) in &self.files {
            let now = fs::metadata(path).and_then(|about| about.modified()).ok();
            let path = path.display();
            assert_eq!(
                now,
                Some(*changed),
                "{path} was changed while its clone was built: touch it, and build again"
            );
        }
    }
}

/// A clone with the contents that a commit of this work tree would have; without git the work tree itself, which is printed.
fn clone() -> Copied {
    let (root, clone) = (environment::root(), environment::folder("clone"));
    let _ = fs::remove_dir_all(&clone);
    let mut git = Command::new("git");
    let made = git.args(["clone", "--quiet", "--no-hardlinks"]).arg(&root).arg(&clone).output();
    let listed = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"];
    let listed = Command::new("git").arg("-C").arg(&root).args(listed).output();
    let (Ok(true), Ok(listed)) = (made.map(|made| made.status.success()), listed) else {
        println!(
            "SKIPPED: needs git and its repository, for an installation from a clone: takes the work tree"
        );
        return Copied { folder: root, files: Vec::new() };
    };
    let mut copied = Copied { folder: clone, files: Vec::new() };
    // The files keep their times, so that cargo does not build again.
    for path in String::from_utf8(listed.stdout).expect("names").split_terminator('\0') {
        let (from, to) = (root.join(path), copied.folder.join(path));
        let Ok(about) = fs::metadata(&from) else {
            let _ = fs::remove_file(&to);
            continue;
        };
        fs::create_dir_all(to.parent().expect("a folder")).expect("a folder");
        fs::copy(&from, &to).expect("a copy");
        let changed = about.modified().expect("a time");
        File::options().append(true).open(&to).and_then(|file| file.set_modified(changed)).expect("its time");
        if path.contains("/src/") {
            copied.files.push((from, changed));
        }
    }
    copied
}

/// The wheel made from a source distribution, without a network.
fn wheel_from_sdist(python: &Path, sources: &Path) -> PathBuf {
    let folder = environment::folder("sdist");
    fs::remove_dir_all(&folder).and_then(|()| fs::create_dir(&folder)).expect("an empty folder");
    let mut make = Command::new(python);
    make.args(["-c", MAKE_SDIST]).arg(&folder).current_dir(sources);
    environment::run(&mut with_tools(make, python));
    let sdist = folder.join(format!("ferrywire-{}.tar.gz", env!("CARGO_PKG_VERSION")));
    let listed = environment::run(Command::new(python).args(["-m", "tarfile", "-l"]).arg(&sdist));
    inspection::sdist_has_no_more_than_it_needs(&listed);

    environment::run(pip(python, "wheel").arg("--wheel-dir").arg(&folder).arg(&sdist));
    let files = fs::read_dir(&folder).expect("a folder").map(|file| file.expect("a file").path());
    files.into_iter().find(|file| file.extension().is_some_and(|kind| kind == "whl")).expect("a wheel")
}

/// Fetches the dependencies for all platforms: maturin asks cargo for them, while a build has fetched only those of this
/// platform.
fn fetch_for_all_platforms(clone: &Path) {
    environment::run(Command::new(env!("CARGO")).args(["fetch", "--quiet", "--locked"]).current_dir(clone));
}

/// A pip command without a package index or network: everything that the build needs is installed.
fn pip(python: &Path, what: &str) -> Command {
    let mut pip = Command::new(python);
    pip.args(["-m", "pip", what, "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]);
    pip.arg("--no-build-isolation");
    with_tools(pip, python)
}

fn with_tools(mut command: Command, python: &Path) -> Command {
    // cargo's variables for a test are not for another cargo, which would rebuild everything because of them.
    let reported = |name: &str| {
        ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_"].iter().any(|begin| name.starts_with(begin))
    };
    for (name, _) in std::env::vars().filter(|(name, _)| reported(name)) {
        command.env_remove(name);
    }
    let bin = python.parent().expect("a folder").display();
    let target = environment::folder("..").canonicalize().expect("the target folder");
    command.env("PATH", format!("{bin}:{}", std::env::var("PATH").unwrap_or_default()));
    command.env("CARGO_TARGET_DIR", target).env("CARGO_NET_OFFLINE", "true");
    command
}
