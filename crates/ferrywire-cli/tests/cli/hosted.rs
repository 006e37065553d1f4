//! Both ends of a bench with the simulated plugin.

use std::path::PathBuf;
use std::process::Output;

use crate::common::{Serve, ferrywire, first_error};

/// GPU memory that never crosses a NIC: the simulated plugin has to allow it too.
pub const ONE_HOST: &str = "same_host=allow";

/// Whether what takes minutes is to be done too.
pub fn long() -> bool {
    std::env::var("FERRYWIRE_LONG").is_ok_and(|value| value == "1")
}

/// The simulated plugin, which was built with these tests.
pub fn library() -> PathBuf {
    std::env::current_exe().expect("a path").with_file_name("libferrywire_tcpx_sim.so")
}

/// Arguments with the plugin.
pub fn with_plugin(args: &str) -> String {
    format!("{args} --plugin {}", library().display())
}

/// A serve with the plugin and its switches.
pub fn serve(args: &str, switches: &str) -> Serve {
    let args = with_plugin(&format!("--listen 127.0.0.1:0 {args}"));
    Serve::start_with(&args, &[("FERRYWIRE_TCPX_SIM", switches)])
}

/// A connect with the plugin and its switches.
pub fn connect(serve: &Serve, args: &str, switches: &str) -> Output {
    let mut command = ferrywire(&with_plugin(&format!("bench connect {} {args}", serve.address)));
    command.env("FERRYWIRE_TCPX_SIM", switches).output().expect("it runs")
}

/// Connects until the serving end has noticed that its last peer is gone.
pub fn connect_when_free(serve: &Serve, args: &str) -> Output {
    loop {
        let output = connect(serve, args, "");
        if !first_error(&output).contains("busy") {
            return output;
        }
    }
}
