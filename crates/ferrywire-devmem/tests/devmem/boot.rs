//! Boots the VM of `tests/devmem-vm` with this test program and runs tests of it there.
//!
//! Only on request (FERRYWIRE_DEVMEM_VM=1), because the kit downloads its system the first time. FERRYWIRE_DEVMEM_OUT
//! names a directory for recordings.

use std::env;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const ASKED: &str = "FERRYWIRE_DEVMEM_VM";
/// The kit's exit status if something is missing.
const SKIPPED: i32 = 77;
/// The kit's exit status if the guest died or was never built.
const NO_GUEST: i32 = 125;
/// How often a guest may try to boot.
const BOOTS: usize = 3;

/// Runs the named tests once at each MTU, with `limit_s` seconds for each MTU.
pub fn pass_in_the_vm(mtus: &[u32], limit_s: u32, names: &[&str]) {
    pass_beside(&[], mtus, limit_s, names);
}

/// Like [`pass_in_the_vm`], with other programs in the root directory.
pub fn pass_beside(programs: &[&Path], mtus: &[u32], limit_s: u32, names: &[&str]) {
    if Path::new("/sys/module/dmnic").exists() {
        return;
    }
    if env::var_os(ASKED).is_none() {
        return println!("SKIPPED: needs {ASKED}=1, since it boots a VM");
    }
    let scratch = tempfile::tempdir().expect("a directory");
    let mut kit = Command::new(kit());
    let list: Vec<String> = mtus.iter().map(u32::to_string).collect();
    kit.args(["-n", "-t", &limit_s.to_string(), "-m", &list.join(",")]);
    if let Some(out) = env::var_os("FERRYWIRE_DEVMEM_OUT") {
        kit.arg("-o").arg(out);
    }
    for file in files(programs, scratch.path()) {
        kit.arg("-f").arg(file);
    }
    kit.arg(start_script(scratch.path())).args(names);
    let (mut code, mut text) = (None, String::new());
    // A guest that dies while it boots, under software emulation, says nothing about the tests.
    for _ in 0..BOOTS {
        let ran = kit.output().expect("the kit");
        (code, text) = (ran.status.code(), output_text(&ran));
        if code != Some(NO_GUEST) || text.contains("@devmem-vm-start") {
            break;
        }
        println!("the guest did not boot:\n{text}");
    }
    match code {
        Some(SKIPPED) => println!("{text}"),
        Some(0) => {
            let passed = text.lines().filter(|line| line.starts_with("test result: ok. ")).count();
            println!("{text}");
            assert!(passed == mtus.len(), "once for each MTU:\n{text}");
        }
        code => panic!("the kit ended with {code:?}:\n{text}"),
    }
}

fn output_text(ran: &Output) -> String {
    [&ran.stdout, &ran.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned()).concat()
}

fn kit() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/devmem-vm/devmem-vm.sh")
}

/// This program and others without debug information, and their libraries.
fn files(programs: &[&Path], scratch: &Path) -> Vec<PathBuf> {
    let me = env::current_exe().expect("this program");
    let others = programs.iter().map(|program| (*program, program.file_name().expect("a name").to_owned()));
    let mut files = Vec::new();
    for (program, name) in others.chain([(me.as_path(), "devmem-test".into())]) {
        let copy = scratch.join(name);
        fs::copy(program, &copy).expect("a copy");
        // Without strip the file is only larger.
        let _ = Command::new("strip").arg(&copy).status();
        files.push(copy);
        let ldd = Command::new("ldd").arg(program).output().expect("ldd");
        let text = String::from_utf8_lossy(&ldd.stdout).into_owned();
        files.extend(text.split_whitespace().filter(|word| word.starts_with('/')).map(PathBuf::from));
    }
    files.sort();
    files.dedup();
    files
}

/// A script that puts the libraries where the program looks for them, and then executes the program.
fn start_script(scratch: &Path) -> PathBuf {
    let path = scratch.join("start");
    let script = "#!/bin/sh\n\
                  mkdir -p /lib64\n\
                  ln -sf /ld-linux-x86-64.so.2 /lib64/\n\
                  LD_LIBRARY_PATH=/ RUST_BACKTRACE=1 exec /devmem-test --test-threads=1 \"$@\"\n";
    fs::write(&path, script).expect("a script");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("it can be run");
    path
}
