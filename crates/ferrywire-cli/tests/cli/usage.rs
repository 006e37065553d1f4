//! Refused command lines: exit status and message.

use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use crate::common::{ferrywire, first_error, run, text};

fn refused(args: &str) -> String {
    let output = run(args);
    assert_eq!(output.status.code(), Some(2), "{args}: {}", text(&output.stderr));
    assert!(output.stdout.is_empty(), "{args} wrote to standard output");
    let said = first_error(&output);
    assert!(said.starts_with("error: "), "{args}: {said}");
    said
}

#[test]
fn bad_usage_is_status_2() {
    for args in [
        "bench --no-such-flag",
        "bench --sizes 4Q",
        "bench --sizes 64K..4K",
        "bench --op push",
        "bench --depth 0",
        "bench --iters 0",
        "bench --seconds -1",
        "bench --blocks 10 --sizes 9",
        "bench --peers 3",
        "bench --pattern latency --depth 4",
        "bench --config /nonexistent.toml",
        "bench connect",
        "bench --chunk 1",
        "bench connect nowhere:port",
        "bench connect :17000",
        "bench serve --listen=",
        "doctor :17000",
        "bench serve --listen 1.2.3.4:port",
        "bench serve --sizes 4K",
        "frobnicate",
        "plugin",
        "plugin x.so --version v3",
        "plugin x.so --timeout 0",
        "plugin x.so y.so",
        "nccl frobnicate",
        "nixl frobnicate",
        "nixl install --as-ucs",
        "nixl status --as-ucx",
        "nixl status --python=",
        "nixl remove --library=",
    ] {
        refused(args);
    }
}

/// Under whatever names, and before anything is cut short.
#[test]
fn json_and_csv_to_one_place_are_bad_usage() {
    let folder = tempfile::tempdir().expect("a folder");
    let [kept, link, new] = ["kept", "link", "new"].map(|name| folder.path().join(name));
    std::fs::write(&kept, "of an earlier run").expect("written");
    std::os::unix::fs::symlink(&kept, &link).expect("a link");
    let [kept, link, new] = [kept, link, new].map(|path| path.display().to_string());
    let dotted = format!("{}/./new", folder.path().display());
    for (json, csv) in [("-", "-"), ("-", "/dev/stdout"), (&*kept, &*kept), (&kept, &link), (&new, &dotted)] {
        for end in ["bench", "bench connect 127.0.0.1:9"] {
            let said = refused(&format!("{end} --memory host --json {json} --csv {csv}"));
            assert!(said.contains("--json") && said.contains("--csv"), "{json} {csv}: {said}");
        }
    }
    assert_eq!(std::fs::read_to_string(&kept).expect("it is there"), "of an earlier run");
    let two = format!("bench --memory host --sizes 4K --iters 2 --json - --csv {kept}");
    assert_eq!(crate::common::results(&run(&two)).len(), 1);
}

#[test]
fn unsupported_options_are_named() {
    assert!(refused("bench --memory floppy").contains("host, cuda[:N] and sim[:N]"));
    assert!(refused("bench --peer-memory cuda:x").contains("numbered 0 to"));
    assert!(refused("bench serve --memory sim:16").contains("numbered 0 to 15"));
    assert!(refused("bench --pattern all-to-all").contains("--gpus"));
    assert!(refused("bench --transport sim").contains("auto, tcp, plugin or devmem"));
    for end in ["bench connect 127.0.0.1:1", "bench serve"] {
        assert!(
            refused(&format!("{end} --transport devmem --plugin x.so")).contains("leave one of them out")
        );
    }
}

/// With what there is instead.
#[test]
fn a_nic_that_is_not_there_is_named_at_both_ends() {
    for (args, flag) in [
        ("connect 127.0.0.1:9 --nics nosuch --memory host", "--nics nosuch"),
        ("serve --nics lo,nosuch --memory host", "--nics nosuch"),
        ("--nics nosuch --memory host --peer-memory host", "--nics nosuch"),
        ("connect 127.0.0.1:9 --gpus 0 --gpu-nics 0=nope0 --memory host", "--gpu-nics 0=nope0"),
        ("serve --gpus 0-1 --gpu-nics 0=lo,1=nope0 --memory host", "--gpu-nics 1=nope0"),
    ] {
        let said = refused(&format!("bench {args}"));
        let there = said.strip_prefix(&format!("error: {flag}: no such NIC with an address; there are "));
        let there = there.unwrap_or_else(|| panic!("{args}: {said}"));
        assert!(there.split(", ").any(|name| name == "lo"), "{said}");
    }
}

#[test]
fn beyond_loopback_a_secret_is_needed() {
    assert!(refused("bench connect 192.0.2.1:7420").contains("FERRYWIRE_SECRET"));
}

#[test]
fn help_is_complete_and_hides_what_is_for_tests() {
    for args in [
        "--help",
        "bench --help",
        "bench serve --help",
        "bench connect --help",
        "topo --help",
        "doctor --help",
        "plugin --help",
        "watch --help",
        "nccl --help",
        "nccl env --help",
        "nixl --help",
        "nixl install --help",
        "nixl status --help",
        "nixl remove --help",
    ] {
        let output = run(args);
        assert!(output.status.success());
        let help = text(&output.stdout);
        assert!(help.contains("Exit status"), "{args}");
        assert!(!help.contains("inject") && !help.contains("--member") && !help.contains("--root"), "{help}");
    }
    let help = text(&run("--help").stdout);
    assert!(
        help.contains("  doctor ") && help.contains("  watch ") && !help.contains("plugin-child"),
        "{help}"
    );
}

#[test]
fn a_refused_connection_names_the_likely_cause() {
    let port =
        TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr()).expect("a free port").port();
    let output = run(&format!("bench connect 127.0.0.1:{port} --json -"));
    assert_eq!(output.status.code(), Some(1));
    let said = text(&output.stderr);
    assert!(first_error(&output).contains(&port.to_string()), "{said}");
    assert!(said.contains("likely: 'ferrywire bench serve' does not run there"), "{said}");
    let json = crate::common::json(&output);
    assert!(json["error"].is_string() && json["results"].as_array().is_some_and(Vec::is_empty));
}

#[test]
fn an_address_in_use_is_said() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("bound");
    let output = run(&format!("bench serve --listen {address}"));
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    let said = first_error(&output);
    assert!(said.starts_with("error: ") && said.contains(&address.to_string()), "{said}");
    assert!(said.contains("Address already in use"), "{said}");
}

#[test]
fn flags_go_before_the_environment_and_that_before_the_file() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), "sizes = \"1K\"\nverify = \"sample\"\niters = 5\nonce = true\n")
        .expect("written");
    let mut command = ferrywire("bench --iters 3 --json -");
    command.arg("--config").arg(file.path()).env("FERRYWIRE_ITERS", "4").env("FERRYWIRE_VERIFY", "off");
    let output = command.output().expect("it runs");
    let result = &crate::common::results(&output)[0];
    assert_eq!((&result["iterations"], &result["size_bytes"]), (&3.into(), &1024.into()));
    assert!(result["verified"].is_null());
    assert_eq!(crate::common::json(&output)["config"]["verify"], "off");
}

#[test]
fn the_word_auto_is_the_default_and_goes_before_the_environment_and_the_file() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), "depth = 3\nwindow = \"auto\"\nchunk = \"64K\"\nwarmup = \"auto\"\n")
        .expect("written");
    let mut command =
        ferrywire("bench --memory host --peer-memory auto --sizes 4K --iters 2 --depth auto --json -");
    command.arg("--config").arg(file.path());
    command.envs([("FERRYWIRE_DEPTH", "2"), ("FERRYWIRE_CHANNELS", "auto"), ("FERRYWIRE_CHUNK", "auto")]);
    let output = command.output().expect("it runs");
    let depth = crate::common::results(&output)[0]["depth"].as_u64();
    assert!(depth.is_some_and(|depth| depth > 3), "{depth:?}");
    let config = &crate::common::json(&output)["config"];
    for chosen in ["depth", "window", "chunk", "channels", "warmup"] {
        assert!(config[chosen].is_null(), "{chosen}: {config}");
    }
    assert!(refused("bench --depth automatic").contains("--depth"));
}

/// Regression: the word was taken for a kind of memory, for a NIC and for an algorithm. A TOML file hid this.
#[test]
fn the_word_auto_is_the_default_of_a_text_too() {
    let texts = "--memory auto --congestion-control auto --gpu-nics auto";
    let mut command = ferrywire(&format!("bench {texts} --sizes 4K --iters 2 --json -"));
    let output = command.env("FERRYWIRE_PEER_MEMORY", "auto").output().expect("it runs");
    assert_eq!(crate::common::results(&output).len(), 1);
    let output = run("topo --gpu-nics auto");
    assert!(output.status.success(), "{}", text(&output.stderr));
}

/// Regression: the serving process of loopback mode read the environment, and not what this process had decided.
#[test]
fn flags_go_before_the_environment_at_both_ends_of_loopback_mode() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), "warmup = 1\n").expect("written");
    let config = format!("--config {}", file.path().display());
    for (variable, value, flags) in [
        ("ENCRYPT", "required", "--encrypt=off"),
        ("TRANSPORT", "devmem", "--transport tcp"),
        ("CONFIG", "/nonexistent.toml", &*config),
        ("TIMEOUT", "0", "--timeout 60"),
        ("DEADLINE", "0", "--timeout 60"),
        ("SIZES", "", "--sizes 1K"),
        ("THREADS", "0", "--threads auto"),
    ] {
        let mut command =
            ferrywire(&format!("bench --memory host --peer-memory host --iters 2 --json - {flags}"));
        if !flags.contains("--sizes") {
            command.args(["--sizes", "1K"]);
        }
        let output = command.env(format!("FERRYWIRE_{variable}"), value).output().expect("it runs");
        assert!(output.status.success(), "{variable}: {}", text(&output.stderr));
    }
    let mut required =
        ferrywire("bench --memory host --peer-memory host --sizes 1K --iters 2 --json - --encrypt");
    let output = required.env("FERRYWIRE_ENCRYPT", "off").output().expect("it runs");
    assert_eq!(crate::common::results(&output).len(), 1);
}

#[test]
fn an_empty_name_of_an_output_is_bad_usage() {
    for flag in ["--json", "--csv"] {
        let said = refused(&format!("bench --memory host --sizes 4K {flag}="));
        assert!(said.contains(flag) && said.contains("empty"), "{said}");
        let mut command = ferrywire("bench --memory host --sizes 4K");
        let variable = format!("FERRYWIRE_{}", flag.trim_start_matches('-').to_uppercase());
        let output = command.env(variable, "").output().expect("it runs");
        assert_eq!(output.status.code(), Some(2), "{flag}: {}", text(&output.stderr));
    }
}

/// Regression: the hint named firewalls, although the connection was made.
#[test]
fn a_program_that_hangs_up_is_the_likely_cause_and_no_firewall() {
    let other = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = other.local_addr().expect("bound");
    std::thread::spawn(move || other.incoming().for_each(drop));
    for args in ["bench connect {} --memory host", "doctor {}"] {
        let output = run(&args.replace("{}", &address.to_string()));
        assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
        let said = text(&[output.stdout, output.stderr].concat());
        assert!(
            said.contains("likely: another program has that port") && !said.contains("firewall"),
            "{said}"
        );
    }
}

/// A closed standard error does not change the exit status either.
#[test]
fn an_unread_error_keeps_its_exit_status() {
    for (args, status) in
        [("bench connect 127.0.0.1:1 --memory host --sizes 4K", 1), ("bench --sizes 4K --depth 99999", 2)]
    {
        let (unread, stderr) = UnixStream::pair().expect("sockets");
        drop(unread);
        let ended = ferrywire(args).stderr(OwnedFd::from(stderr)).status().expect("it runs");
        assert_eq!(ended.code(), Some(status), "{args}");
    }
}

/// The kernel gives such ports to outgoing connections, and keeps them for a minute after those have ended.
#[test]
fn a_taken_port_of_the_ephemeral_range_is_reported_with_one_that_would_do() {
    // Where none is asked for, the kernel takes one of that range.
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("an address").port();
    let output = run(&format!("bench serve --listen 127.0.0.1:{port}"));
    let error = first_error(&output);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(
        error.contains("Address already in use") && error.contains(&format!("; port {port} lies in")),
        "{error}"
    );
    let (_, proposed) =
        error.rsplit_once("listen on a port below it, such as ").unwrap_or_else(|| panic!("{error}"));
    assert!(proposed.parse::<u16>().is_ok_and(|below| below < port), "{error}");
    // The ports of services are the user's own business.
    let below =
        (1024..).find_map(|port| std::net::TcpListener::bind(("127.0.0.1", port)).ok()).expect("a port");
    let port = below.local_addr().expect("an address").port();
    let error = first_error(&run(&format!("bench serve --listen 127.0.0.1:{port}")));
    assert!(error.contains("Address already in use") && !error.contains("lies in the range"), "{error}");
}
