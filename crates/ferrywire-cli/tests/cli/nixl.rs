//! `ferrywire nixl`, in virtual environments whose NIXLs are the files of a wheel without what is in them.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::common::{GRACE, TIMEOUT_DEFAULT, end_within, ferrywire, first_error, text};
use crate::common::{json as json_of, unwritten};

const OURS: &str = "libplugin_FERRYWIRE.so";
const UCX: &str = "libplugin_UCX.so";
const BACKUP: &str = "libplugin_UCX.so.before-ferrywire";
const INCOMPLETE: &str = "libplugin_FERRYWIRE.so.new";

/// A virtual environment.
pub struct Environment {
    home: tempfile::TempDir,
    packages: PathBuf,
}

/// The backend, which was built with these tests.
fn library() -> PathBuf {
    std::env::current_exe().expect("a path").with_file_name("libplugin_ferrywire.so")
}

/// The smallest file that the command takes for a backend of ours.
fn backend(version: &str) -> String {
    format!("\u{7f}ELF\0ferrywire NIXL backend {version}\0")
}

impl Environment {
    /// An empty one; `None`, and said so, where it cannot be had.
    fn new() -> Option<Environment> {
        let home = tempfile::tempdir().expect("a folder");
        let mut make = Command::new("python3");
        let made = make.args(["-m", "venv", "--without-pip"]).arg(home.path()).output();
        if !made.is_ok_and(|made| made.status.success()) {
            println!("SKIPPED: needs python3 with venv (Debian: python3-venv)");
            return None;
        }
        let of_python = fs::read_dir(home.path().join("lib")).expect("a folder").next().expect("one Python");
        let packages = of_python.expect("an entry").path().join("site-packages");
        Some(Environment { home, packages })
    }

    /// One with NIXL 1.5.1 for CUDA 12 and for CUDA 13, and their folders of backends.
    pub fn with_two() -> Option<(Environment, [PathBuf; 2])> {
        let environment = Environment::new()?;
        let plugins = ["cu12", "cu13"].map(|cuda| environment.nixl(cuda, "1.5.1"));
        Some((environment, plugins))
    }

    /// Installs a NIXL, and gives its folder of backends.
    fn nixl(&self, cuda: &str, version: &str) -> PathBuf {
        let libraries = self.packages.join(format!(".nixl_{cuda}.mesonpy.libs"));
        let plugins = libraries.join("plugins");
        fs::create_dir_all(&plugins).expect("a folder");
        let about = self.packages.join(format!("nixl_{cuda}-{version}.dist-info"));
        fs::create_dir(&about).expect("a folder");
        let files = [
            libraries.join("libnixl.so"),
            plugins.join(UCX),
            plugins.join("libplugin_POSIX.so"),
            about.join("RECORD"),
        ];
        for file in files {
            let content = format!("{} of {cuda} {version}", file.display());
            fs::write(&file, content).expect("written");
            let long_ago = std::time::SystemTime::now() - Duration::from_secs(86_400);
            File::options()
                .append(true)
                .open(&file)
                .and_then(|file| file.set_modified(long_ago))
                .expect("its time");
        }
        plugins
    }

    fn python(&self) -> PathBuf {
        self.home.path().join("bin/python")
    }

    /// The command for this environment, which is named by its interpreter, or by its folder.
    fn command(&self, args: &str) -> Command {
        let mut command = untouched(ferrywire(&format!("nixl {args}")));
        if args.starts_with("remove") {
            command.arg("--prefix").arg(self.home.path());
        } else {
            command.arg("--python").arg(self.python());
        }
        command.arg("--library").arg(library());
        command
    }

    /// Runs a subcommand of `nixl` in it.
    pub fn run(&self, args: &str) -> Output {
        self.command(args).output().expect("it starts")
    }

    /// Runs it to a good end and gives what it printed.
    pub fn good(&self, args: &str) -> String {
        good(&self.run(args))
    }

    /// The status as JSON, whose error and exit status agree.
    fn status(&self) -> Value {
        let output = self.run("status --json");
        let status = json_of(&output);
        assert_eq!(output.status.code(), Some(i32::from(!status["error"].is_null())), "{status}");
        assert_eq!((&status["schema"], &status["done"]), (&2.into(), &json!([])));
        status
    }

    /// One value of each NIXL's status.
    fn each(&self, field: &str) -> Vec<Value> {
        let status = self.status();
        status["nixl"].as_array().expect("a list").iter().map(|nixl| nixl[field].clone()).collect()
    }

    /// All files: mode, time of the last change, content or target.
    fn tree(&self) -> BTreeMap<PathBuf, (u32, i64, Vec<u8>)> {
        let mut tree = BTreeMap::new();
        let mut folders = vec![self.packages.clone()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(&folder).expect("a folder") {
                let path = entry.expect("an entry").path();
                let about = fs::symlink_metadata(&path).expect("it is there");
                if about.is_dir() {
                    tree.insert(path.clone(), (about.mode(), 0, Vec::new()));
                    folders.push(path);
                } else if about.is_symlink() {
                    let target = fs::read_link(&path).expect("a link").into_os_string().into_encoded_bytes();
                    tree.insert(path, (about.mode(), about.mtime(), target));
                } else {
                    let content = fs::read(&path).expect("a file");
                    tree.insert(path, (about.mode(), about.mtime(), content));
                }
            }
        }
        tree
    }

    /// Compares without printing megabytes.
    fn is_as_before(&self, before: &BTreeMap<PathBuf, (u32, i64, Vec<u8>)>, why: &str) {
        let now = self.tree();
        let (names, names_before): (Vec<_>, Vec<_>) = (now.keys().collect(), before.keys().collect());
        assert_eq!(names, names_before, "{why}");
        for (path, file) in &now {
            assert!(before[path] == *file, "{why}: {} has changed", path.display());
        }
    }
}

fn untouched(mut command: Command) -> Command {
    for name in ["VIRTUAL_ENV", "PYTHONPATH", "NIXL_PLUGIN_DIR"] {
        command.env_remove(name);
    }
    command
}

fn good(output: &Output) -> String {
    assert!(output.status.success(), "{:?}: {}", output.status, text(&output.stderr));
    text(&output.stdout)
}

fn failed(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(1), "{}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stderr)
}

fn is_ours(file: &Path) -> bool {
    fs::read(file).expect("a file") == fs::read(library()).expect("the library")
}

#[test]
fn remove_deletes_all_that_install_copied_into_every_nixl() {
    let Some((environment, plugins)) = Environment::with_two() else { return };
    let before = environment.tree();
    assert!(failed(&environment.run("status")).contains("\ntry: ferrywire nixl install --python "));
    for _ in 0..2 {
        let said = environment.good("install");
        assert_eq!(said.lines().count(), 2, "{said}");
        assert!(plugins.iter().all(|plugins| is_ours(&plugins.join(OURS))));
        let status = environment.status();
        assert_eq!(status["library"]["version"], env!("CARGO_PKG_VERSION"));
        for (nixl, (package, plugins)) in status["nixl"]
            .as_array()
            .expect("a list")
            .iter()
            .zip(["nixl-cu12", "nixl-cu13"].iter().zip(&plugins))
        {
            let expected = json!({
                "package": package, "version": "1.5.1", "present": true, "supported": true,
                "plugins": plugins.canonicalize().expect("a path").to_str(), "installed": true,
                "backend_version": env!("CARGO_PKG_VERSION"), "current": true, "other_file": false, "alias": false,
                "half_done": null,
            });
            assert_eq!(nixl, &expected);
        }
        let table = environment.good("status");
        assert_eq!(table.matches(" up to date ").count(), 2, "{table}");
    }
    assert_eq!(environment.tree().len(), before.len() + 2);
    for said in ["removed", "no files of ferrywire were installed"] {
        assert!(environment.good("remove").contains(said));
        environment.is_as_before(&before, said);
    }
    unwritten(&mut environment.command("remove"));
}

#[test]
fn the_alias_is_loud_and_undone() {
    let Some((environment, plugins)) = Environment::with_two() else { return };
    let before = environment.tree();
    for _ in 0..2 {
        let output = environment.run("install --as-ucx");
        good(&output);
        let warned = text(&output.stderr);
        assert_eq!(warned.matches("programs that ask NIXL for UCX now get ferrywire").count(), 2, "{warned}");
        let last = warned.lines().last().unwrap_or_default();
        assert!(last.contains("both ends") && last.contains("ferrywire nixl remove"), "{warned}");
        for plugins in &plugins {
            assert!(is_ours(&plugins.join(OURS)) && is_ours(&plugins.join(UCX)));
            assert_eq!(fs::read(plugins.join(BACKUP)).expect("a backup"), before[&plugins.join(UCX)].2);
        }
        assert_eq!(environment.each("alias"), [true, true]);
        assert_eq!(environment.each("half_done"), [Value::Null, Value::Null]);
    }
    // One without it leaves it, and is silent.
    let output = environment.run("install");
    assert!(good(&output).contains(UCX) && output.stderr.is_empty());
    assert_eq!(environment.each("alias"), [true, true]);
    environment.good("remove");
    environment.is_as_before(&before, "after the alias");
}

/// What each command leaves when it is ended between two of its steps.
#[test]
fn every_half_done_state_is_reported_and_fixed() {
    let Some((environment, [plugins, _])) = Environment::with_two() else { return };
    let before = environment.tree();
    let at = |name: &str| plugins.join(name);
    let ours = |name: &str| assert!(fs::copy(library(), at(name)).is_ok());
    let states: [(&str, &dyn Fn()); 5] = [
        ("an incomplete copy", &|| fs::write(at(INCOMPLETE), "\u{7f}ELF").expect("written")),
        ("the backup made", &|| {
            ours(OURS);
            fs::hard_link(at(UCX), at(BACKUP)).expect("a link");
        }),
        ("the backup made, and an incomplete copy", &|| {
            fs::hard_link(at(UCX), at(BACKUP)).expect("a link");
            fs::write(at(INCOMPLETE), "\u{7f}ELF").expect("written");
        }),
        ("the backup made, where there are no links", &|| {
            ours(OURS);
            fs::rename(at(UCX), at(BACKUP)).expect("renamed");
        }),
        ("the alias alone", &|| {
            fs::rename(at(UCX), at(BACKUP)).expect("renamed");
            ours(UCX);
        }),
    ];
    for (what, make) in states {
        for mend in ["remove", "install", "install --as-ucx"] {
            make();
            let status = environment.status();
            let reported = status["nixl"][0]["half_done"].is_string();
            assert_eq!(reported, what != "the alias alone", "{what}: {status}");
            assert_eq!((reported, &status["nixl"][1]["half_done"]), (reported, &Value::Null), "{what}");
            let error = status["error"].as_str().expect("an error");
            assert!(error.contains("ferrywire nixl"), "{what}: {error}");
            environment.good(mend);
            let alias = mend == "install --as-ucx" || (mend == "install" && what == "the alias alone");
            if mend != "remove" {
                assert_eq!(environment.status()["nixl"][0]["alias"], alias, "{what}, {mend}");
                assert_eq!(environment.each("half_done"), [Value::Null, Value::Null], "{what}, {mend}");
                assert_eq!(fs::read(at(UCX)).expect("UCX") == before[&at(UCX)].2, !alias, "{what}, {mend}");
                environment.good("remove");
            }
            environment.is_as_before(&before, &format!("{what}, {mend}"));
        }
    }
}

#[test]
fn a_command_that_is_killed_at_any_moment_leaves_what_remove_mends() {
    const KILLS: u32 = 8;
    let Some((environment, plugins)) = Environment::with_two() else { return };
    let before = environment.tree();
    let began = Instant::now();
    environment.good("install --as-ucx");
    environment.good("remove");
    let long = began.elapsed();
    for first in ["remove", "install --as-ucx"] {
        for kill in 0..KILLS {
            if first == "remove" {
                environment.good("install --as-ucx");
            }
            let mut child = environment
                .command(first)
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .expect("it starts");
            thread::sleep(long * kill / KILLS);
            child.kill().expect("it can be killed");
            child.wait().expect("it can be waited for");
            // A file under a name of NIXL's is complete at all times, and UCX is never without one.
            for file in plugins.iter().flat_map(|plugins| [plugins.join(OURS), plugins.join(UCX)]) {
                let whole = !file.exists()
                    || is_ours(&file)
                    || fs::read(&file).ok() == before.get(&file).map(|file| file.2.clone());
                assert!(
                    whole && (file.exists() || file.ends_with(OURS)),
                    "{first}, kill {kill}: {}",
                    file.display()
                );
            }
            environment.good("remove");
            environment.is_as_before(&before, first);
        }
    }
}

#[test]
fn a_file_that_is_not_ours_is_neither_replaced_nor_removed() {
    let Some((environment, [_, plugins])) = Environment::with_two() else { return };
    let makes: [&dyn Fn(&Path); 4] = [
        &|path| fs::write(path, "\u{7f}ELF of another project that speaks of ferrywire\0").expect("written"),
        &|path| fs::write(path, "ferrywire NIXL backend 0.1.0\0").expect("written"),
        &|path| symlink("/nonexistent", path).expect("a link"),
        &|path| fs::create_dir(path).expect("a folder"),
    ];
    for make in makes {
        let path = plugins.join(OURS);
        make(&path);
        let before = environment.tree();
        for args in ["install", "install --as-ucx", "remove"] {
            let said = failed(&environment.run(args));
            assert!(said.contains("the file is not ferrywire's\ntry: move the file away"), "{args}: {said}");
            environment.is_as_before(&before, args);
        }
        assert_eq!(environment.each("other_file"), [false, true]);
        let _ = fs::remove_file(&path).or_else(|_| fs::remove_dir(&path));
    }
}

#[test]
fn a_nixl_before_1_0_is_refused_in_one_line() {
    let Some(environment) = Environment::new() else { return };
    environment.nixl("cu12", "1.5.1");
    environment.nixl("cu13", "0.10.1");
    let before = environment.tree();
    for args in ["install", "install --as-ucx", "install --json"] {
        let said = failed(&environment.run(args));
        assert!(said.starts_with("error: nixl-cu13 0.10.1 is too old"), "{said}");
        assert!(said.contains("pip install --upgrade nixl") && said.lines().count() == 1, "{said}");
    }
    environment.is_as_before(&before, "refused");
    assert_eq!(environment.each("supported"), [true, false]);
    assert!(text(&environment.run("status").stdout).contains("nixl-cu13 0.10.1, too old"));
}

#[test]
fn without_nixl_status_and_install_say_what_to_do() {
    let Some(environment) = Environment::new() else { return };
    fs::create_dir_all(environment.packages.join(".numpy.mesonpy.libs/plugins")).expect("a folder");
    for args in ["install", "status"] {
        let said = failed(&environment.run(args));
        assert!(said.starts_with("error: no NIXL in the environment of "), "{said}");
        assert!(said.contains("/bin/python -m pip install nixl"), "{said}");
    }
    assert_eq!(environment.status()["nixl"], json!([]));
    environment.good("remove");
}

#[test]
fn an_older_backend_is_reported_and_replaced() {
    let Some(environment) = Environment::new() else { return };
    let plugins = environment.nixl("rocm", "1.2.0");
    let before = environment.tree();
    fs::write(plugins.join(OURS), backend("0.0.9")).expect("written");
    fs::rename(plugins.join(UCX), plugins.join(BACKUP)).expect("renamed");
    fs::write(plugins.join(UCX), backend("0.0.9")).expect("written");
    assert_eq!(environment.each("current"), [false]);
    assert!(environment.good("status").contains("0.0.9, differs from the library above"));
    environment.good("install");
    assert!(is_ours(&plugins.join(OURS)) && is_ours(&plugins.join(UCX)));
    assert_eq!(environment.each("current"), [true]);
    assert_eq!(environment.each("package"), ["nixl-rocm"]);
    environment.good("remove");
    environment.is_as_before(&before, "after an update");
}

/// As pip does it: it removes and writes the names that it knows.
#[test]
fn nixl_installed_anew_ends_the_alias_and_keeps_its_own_ucx() {
    for mend in ["remove", "install", "install --as-ucx"] {
        let Some(environment) = Environment::new() else { return };
        let plugins = environment.nixl("cu12", "1.5.1");
        environment.good("install --as-ucx");
        fs::remove_file(plugins.join(UCX)).expect("removed");
        fs::remove_dir_all(environment.packages.join("nixl_cu12-1.5.1.dist-info")).expect("removed");
        environment.nixl("cu12", "1.6.0");
        let newer = fs::read(plugins.join(UCX)).expect("UCX");
        assert!(failed(&environment.run("status")).contains("the alias has no effect"));
        environment.good(mend);
        assert_eq!(is_ours(&plugins.join(UCX)), mend == "install --as-ucx", "{mend}");
        environment.good("remove");
        assert!(fs::read(plugins.join(UCX)).expect("UCX") == newer, "{mend}");
        assert!([OURS, BACKUP, INCOMPLETE].iter().all(|name| !plugins.join(name).exists()), "{mend}");
    }
}

#[test]
fn nothing_is_left_where_nixl_was_uninstalled_first() {
    let Some((environment, [plugins, other])) = Environment::with_two() else { return };
    environment.good("install --as-ucx");
    let libraries = plugins.parent().expect("a folder");
    for file in [libraries.join("libnixl.so"), plugins.join(UCX), plugins.join("libplugin_POSIX.so")] {
        fs::remove_file(file).expect("removed");
    }
    fs::remove_dir_all(environment.packages.join("nixl_cu12-1.5.1.dist-info")).expect("removed");
    assert!(failed(&environment.run("status")).contains("NIXL was uninstalled"));
    environment.good("install");
    assert_eq!(environment.each("present"), [false, true]);
    environment.good("remove");
    assert!(!libraries.exists() && other.join(UCX).exists() && !other.join(OURS).exists());
    assert_eq!(environment.each("present"), [true]);
}

#[test]
fn a_folder_that_replaces_nixls_own_is_reported() {
    let Some(environment) = Environment::new() else { return };
    let plugins = environment.nixl("cu12", "1.5.1");
    let other = tempfile::tempdir().expect("a folder");
    let with = |args: &str, folder: &Path| {
        let output = environment.command(args).env("NIXL_PLUGIN_DIR", folder).output().expect("it starts");
        good(&output);
        text(&output.stderr)
    };
    for args in ["install", "status"] {
        let said = with(args, other.path());
        assert!(said.starts_with("warning: NIXL_PLUGIN_DIR=") && said.contains("is not in it"), "{said}");
        assert_eq!(with(args, &plugins), "", "{args}");
    }
    fs::copy(library(), other.path().join(OURS)).expect("a copy");
    assert!(with("status", other.path()).contains("is in it too"));
    let mut command = environment.command("status --json");
    let status = json_of(&command.env("NIXL_PLUGIN_DIR", other.path()).output().expect("it starts"));
    assert_eq!(status["nixl_plugin_dir"], json!({ "path": other.path().to_str(), "has_backend": true }));
}

/// As the wheel lays them: the command in `bin`, the library among the packages.
#[test]
fn an_installed_command_finds_its_library_and_its_environment() {
    let Some(environment) = Environment::new() else { return };
    let plugins = environment.nixl("cu12", "1.5.1");
    let command = environment.home.path().join("bin/ferrywire");
    fs::hard_link(env!("CARGO_BIN_EXE_ferrywire"), &command)
        .or_else(|_| fs::copy(env!("CARGO_BIN_EXE_ferrywire"), &command).map(drop))
        .expect("a copy");
    let run = |args: [&str; 2]| {
        let mut run = untouched(Command::new(&command));
        run.args(args).env("VIRTUAL_ENV", "/nonexistent").output().expect("it starts")
    };
    let said = failed(&run(["nixl", "install"]));
    assert!(said.starts_with("error: cannot find libplugin_FERRYWIRE.so"), "{said}");
    assert!(failed(&run(["nixl", "status"])).ends_with("try: ferrywire nixl install\n"));

    let lib = environment.packages.join("ferrywire/lib");
    fs::create_dir_all(&lib).expect("a folder");
    fs::copy(library(), lib.join(OURS)).expect("a copy");
    good(&run(["nixl", "install"]));
    assert!(is_ours(&plugins.join(OURS)));
    good(&run(["nixl", "status"]));
    good(&run(["nixl", "remove"]));

    // Of a build the library lies beside the command; the environment is the active one.
    let mut built = untouched(ferrywire("nixl status"));
    built.env("VIRTUAL_ENV", environment.home.path());
    let said = failed(&built.output().expect("it starts"));
    assert!(said.contains(&*plugins.canonicalize().expect("a path").to_string_lossy()), "{said}");
}

#[test]
fn paths_that_lead_to_no_nixl_are_errors() {
    let Some(environment) = Environment::new() else { return };
    environment.nixl("cu12", "1.5.1");
    let script = |content: &str| {
        let path = environment.home.path().join("bin/script");
        fs::write(&path, format!("#!/bin/sh\n{content}\n")).expect("written");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("its mode");
        path
    };
    let python = |path: &Path| {
        let mut command = untouched(ferrywire("nixl status --python"));
        failed(&command.arg(path).output().expect("it starts"))
    };
    let said = python(Path::new("/nonexistent/python"));
    assert!(
        said.starts_with("error: cannot ask /nonexistent/python where its packages are: No such file"),
        "{said}"
    );
    assert!(
        python(&script("echo 'it is broken' >&2; exit 7"))
            .contains("exit status: 7: it is broken\ntry: --python")
    );
    assert!(python(&script("echo hello")).contains("does not answer like a Python interpreter"));
    assert!(python(environment.home.path()).contains("not installed"), "a virtual environment's folder");

    for (path, why) in [
        ("/nonexistent.so", "No such file"),
        (env!("CARGO_BIN_EXE_ferrywire"), "not ferrywire's NIXL backend"),
    ] {
        for action in ["install", "status", "remove"] {
            let mut command = untouched(ferrywire(&format!("nixl {action} --json --library {path}")));
            let output = command.arg("--python").arg(environment.python()).output().expect("it starts");
            let said = failed(&output);
            assert!(
                said.starts_with(&format!("error: cannot install {path}: ")) && said.contains(why),
                "{said}"
            );
            assert!(json_of(&output)["error"].as_str().is_some_and(|error| error.contains(why)));
        }
    }
}

#[test]
fn two_commands_do_not_change_a_folder_at_once() {
    let Some(environment) = Environment::new() else { return };
    let plugins = environment.nixl("cu12", "1.5.1");
    let folder = File::open(&plugins).expect("a folder");
    folder.lock().expect("nobody else has it");
    let before = environment.tree();
    for args in ["install", "remove"] {
        let output = environment.run(args);
        assert!(first_error(&output).contains("another `ferrywire nixl`"), "{}", failed(&output));
    }
    environment.is_as_before(&before, "while another works");
    folder.unlock().expect("unlocked");
    environment.good("install");
}

/// Regression: a signal while Python was asked was reported as "no answer within 60 s", with exit status 1.
#[test]
fn a_signal_while_python_is_asked_ends_the_command_as_interrupted() {
    let folder = tempfile::tempdir().expect("a folder");
    let (python, asked) = (folder.path().join("python"), folder.path().join("asked"));
    fs::write(&python, "#!/bin/sh\n: > \"${0%/*}/asked\"\nexec sleep 600\n").expect("written");
    fs::set_permissions(&python, fs::Permissions::from_mode(0o755)).expect("its mode");
    let mut command = untouched(ferrywire("nixl status --python"));
    command.arg(&python).stdout(Stdio::piped()).stderr(Stdio::piped());
    let status = command.spawn().expect("it starts");
    let until = Instant::now() + GRACE;
    while !asked.exists() {
        assert!(Instant::now() < until, "it does not ask the interpreter");
        thread::sleep(Duration::from_millis(10));
    }
    let killed = Command::new("kill").args(["-TERM", &status.id().to_string()]).status();
    assert!(killed.expect("kill runs").success());
    let output = end_within(TIMEOUT_DEFAULT, status);
    assert_eq!((output.status.code(), text(&output.stderr).as_str()), (Some(143), ""));
}
