//! Programs in C, compiled against the committed header and run: the example, every verb, and every misuse.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// A program that has not ended after this long hangs.
const HANGS_AFTER: Duration = Duration::from_secs(180);

enum Linked {
    Dynamically,
    Statically,
}

fn here() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The folder of the libraries that were built with these tests.
fn libraries() -> PathBuf {
    std::env::current_exe().unwrap().parent().unwrap().to_owned()
}

fn compile(source: &str, linked: Linked, into: &Path) -> PathBuf {
    let program = into.join("program");
    let mut cc = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
    cc.args(["-std=gnu11", "-O1", "-Wall", "-Werror", "-pthread", "-o"]).arg(&program);
    cc.arg("-I").arg(here().join("include")).arg("-I").arg(into).arg(here().join(source));
    match linked {
        Linked::Dynamically => cc.arg(libraries().join("libferrywire_c.so")),
        // System libraries that Rust's standard library needs.
        Linked::Statically => cc
            .arg(libraries().join("libferrywire_c.a"))
            .args(["-lgcc_s", "-lutil", "-lrt", "-lm", "-ldl", "-lc"]),
    };
    let output = cc.output().expect("a C compiler, which Rust links with");
    assert!(output.status.success(), "{source}: {}", String::from_utf8_lossy(&output.stderr));
    program
}

fn start(program: &Path, arguments: &[&str]) -> Child {
    let mut command = Command::new(program);
    command.args(arguments).env("LD_LIBRARY_PATH", libraries());
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts")
}

/// The output of a program, which must succeed.
fn good(mut child: Child) -> String {
    let since = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if since.elapsed() > HANGS_AFTER {
            let _ = child.kill();
            let Output { stdout, stderr, .. } = child.wait_with_output().unwrap();
            panic!("it hangs: {}{}", String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let Output { status, stdout, stderr } = child.wait_with_output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    assert!(status.success(), "{status}: {stdout}{stderr}");
    stdout.into_owned()
}

#[test]
fn every_verb_moves_what_it_should() {
    let folder = tempfile::tempdir().unwrap();
    let program = compile("tests/c/verbs.c", Linked::Dynamically, folder.path());
    assert_eq!(good(start(&program, &[])), "verbs: good\n");
}

/// The block of C code in `docs/c.md` compiles, and does what the page says.
#[test]
fn the_function_of_the_page_fills_a_peers_memory() {
    let page = std::fs::read_to_string(here().join("../../docs/c.md")).unwrap();
    let blocks: Vec<&str> =
        page.split("\n```c\n").skip(1).filter_map(|rest| rest.split("\n```").next()).collect();
    assert_eq!(blocks.len(), 1, "tests/c/page.c calls the function of one block");
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("page.h"), format!("{}\n", blocks[0])).unwrap();
    let program = compile("tests/c/page.c", Linked::Dynamically, folder.path());
    assert_eq!(good(start(&program, &[])), "page: good\n");
}

/// Regression: one of two notifications that did not fit was lost, and a wakeup was not signalled for one that did not fit
/// into another thread's buffer.
#[test]
fn several_readers_lose_no_notification() {
    let folder = tempfile::tempdir().unwrap();
    let program = compile("tests/c/readers.c", Linked::Dynamically, folder.path());
    assert_eq!(good(start(&program, &[])), "readers: good\n");
}

/// Regression: calls that do not wait made no progress, and a connection never came up.
#[test]
fn calls_that_do_not_wait_drive_an_endpoint_without_threads() {
    let folder = tempfile::tempdir().unwrap();
    let program = compile("tests/c/driven.c", Linked::Dynamically, folder.path());
    // In parallel, because the programs mostly wait.
    let started = ["accept", "total", "stall"].map(|what| (what, start(&program, &[what])));
    for (what, child) in started {
        assert_eq!(good(child), "driven: good\n", "{what}");
    }
}

#[test]
fn misuse_gives_errors_and_no_crash() {
    let folder = tempfile::tempdir().unwrap();
    let program = compile("tests/c/misuse.c", Linked::Dynamically, folder.path());
    assert_eq!(good(start(&program, &[])), "misuse: good\n");
}

#[test]
fn the_example_moves_bytes_between_two_processes() {
    for linked in [Linked::Dynamically, Linked::Statically] {
        let folder = tempfile::tempdir().unwrap();
        let program = compile("examples/move.c", linked, folder.path());
        let where_ = folder.path().join("where");
        let mut receiver = start(&program, &["receive", where_.to_str().unwrap()]);
        let since = Instant::now();
        while !where_.exists() && receiver.try_wait().unwrap().is_none() {
            assert!(since.elapsed() < HANGS_AFTER, "it never tells where its memory is");
            std::thread::sleep(Duration::from_millis(5));
        }
        let sender = start(&program, &["send", where_.to_str().unwrap()]);
        assert_eq!(good(sender), "67108864 bytes moved\n");
        assert_eq!(good(receiver), "67108864 bytes arrived and are right; told: all there\n");
    }
}
