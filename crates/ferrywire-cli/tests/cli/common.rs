//! Runs the real command in the tests.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStderr, ChildStdout, Command, Output, Stdio};
use std::sync::{Arc, Mutex};

use serde_json::Value;

/// The command, untouched by the environment of whoever runs the tests.
pub fn ferrywire(args: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrywire"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("FERRYWIRE_")) {
        command.env_remove(name);
    }
    command.args(args.split_whitespace()).stdin(Stdio::null());
    command
}

/// Runs the command to its end.
pub fn run(args: &str) -> Output {
    ferrywire(args).output().expect("the command starts")
}

/// First line of what a command said on standard error.
pub fn first_error(output: &Output) -> String {
    text(&output.stderr).lines().next().unwrap_or_default().to_owned()
}

/// Bytes as text.
pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The JSON on standard output.
pub fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}{}", text(&output.stdout), text(&output.stderr)))
}

/// The results of a run that must have gone well.
pub fn results(output: &Output) -> Vec<Value> {
    assert!(output.status.success(), "{:?}: {}", output.status, text(&output.stderr));
    let json = json(output);
    assert_eq!(json["error"], Value::Null);
    json["results"].as_array().expect("results").clone()
}

/// A `bench serve` on a free port of loopback; ends with the test.
pub struct Serve {
    pub address: String,
    pub child: Child,
    pub stdout: BufReader<ChildStdout>,
    stderr: Option<BufReader<ChildStderr>>,
}

impl Serve {
    /// Starts it with further options.
    pub fn start(args: &str) -> Serve {
        Serve::start_with(&format!("--listen 127.0.0.1:0 {args}"), &[])
    }

    /// Starts it with options, the address among them, and variables.
    pub fn start_with(args: &str, variables: &[(&str, &str)]) -> Serve {
        let mut command = ferrywire(&format!("bench serve {args}"));
        command.envs(variables.iter().copied()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("serve starts");
        let mut stdout = BufReader::new(child.stdout.take().expect("piped"));
        let line = read_line(&mut stdout);
        let stderr = Some(BufReader::new(child.stderr.take().expect("piped")));
        let address =
            line.trim().strip_prefix("listening on ").unwrap_or_else(|| panic!("serve said {line:?}"));
        Serve { address: address.split(", ").next().unwrap_or_default().to_owned(), child, stdout, stderr }
    }

    /// Runs `bench connect` to it.
    pub fn connect(&self, args: &str) -> Output {
        run(&format!("bench connect {} {args}", self.address))
    }

    /// The exit status and standard error of a serve that ends by itself.
    pub fn end(mut self) -> (Option<i32>, String) {
        let status = self.child.wait().expect("serve ends");
        (status.code(), self.errors())
    }

    /// Stops it; gives what it said on standard error.
    pub fn stop(mut self) -> String {
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.errors()
    }

    /// Waits for the next error on standard error, past warnings.
    pub fn next_error(&mut self) -> String {
        loop {
            let line = read_line(self.stderr.as_mut().expect("nobody else reads it"));
            if line.is_empty() || line.starts_with("error: ") {
                return line;
            }
        }
    }

    /// From now on the lines of standard error are collected here.
    pub fn collect_errors(&mut self) -> Arc<Mutex<Vec<String>>> {
        let lines = Arc::<Mutex<Vec<String>>>::default();
        let (stderr, into) = (self.stderr.take().expect("nobody else reads it"), lines.clone());
        std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                into.lock().expect("a whole line").push(line);
            }
        });
        lines
    }

    fn errors(&mut self) -> String {
        let mut said = String::new();
        self.stderr.as_mut().expect("nobody else reads it").read_to_string(&mut said).expect("text");
        said
    }
}

impl Drop for Serve {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The next line of a pipe.
pub fn read_line(pipe: &mut impl BufRead) -> String {
    let mut line = String::new();
    pipe.read_line(&mut line).expect("text");
    line
}
