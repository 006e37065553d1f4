//! Two endpoints of one process, connected over loopback, whose payload goes over the simulated plugin.

use ferrywire::{Builder, ConnectError, Endpoint, Peer, PluginConfig, Region};
pub use ferrywire_memory::pattern::without_zeroes as pattern;
use std::path::PathBuf;
use std::time::Duration;

/// Longest any wait may be without progress, however busy the machine is.
pub const LIMIT: Duration = Duration::from_secs(60);

/// Whether what takes minutes is to be done too.
pub fn long() -> bool {
    std::env::var("FERRYWIRE_LONG").is_ok_and(|value| value == "1")
}

/// The plugin that was built with these tests.
pub fn library() -> PathBuf {
    std::env::current_exe().unwrap().with_file_name("libferrywire_tcpx_sim.so")
}

/// The configuration of the simulated plugin.
pub fn plugin() -> PluginConfig {
    // SAFETY: the file was built with these tests, and the process has just begun: no other thread reads its
    // environment.
    unsafe { PluginConfig::at(library()) }
}

/// The end that accepts and the end that connects.
pub struct Ends {
    pub accepting: Endpoint,
    pub connecting: Endpoint,
    /// The peer as the end that connects sees it.
    pub near: Peer,
    /// And as the end that accepts does.
    pub far: Peer,
}

/// The builder of most tests.
pub fn builder() -> Builder {
    Endpoint::builder().channels(2).threads(2).plugin(plugin())
}

pub fn loopback(builder: Builder) -> Builder {
    builder.listen("127.0.0.1:0".parse().unwrap())
}

/// A connection in whose set-up a call hangs, and the set-up timeout with which `words` of its error came about: an error names
/// a call that has taken half of the timeout. On a busy machine the timeout may pass before the call is that old: then the
/// connection is attempted again with a longer timeout.
pub fn hanging_call(words: &str, attempt: impl Fn(Duration) -> ConnectError) -> (ConnectError, Duration) {
    for timeout in [2, 6, 18, 54].map(Duration::from_secs) {
        let error = attempt(timeout);
        if error.to_string().contains(words) {
            return (error, timeout);
        }
        println!("again, with a longer timeout: {error}");
    }
    panic!("no error contains {words:?}");
}

impl Ends {
    pub fn new() -> Ends {
        Ends::with(|builder| builder)
    }

    pub fn with(adapt: impl Fn(Builder) -> Builder) -> Ends {
        Ends::of(loopback(adapt(builder())), loopback(adapt(builder())))
    }

    pub fn of(accepting: Builder, connecting: Builder) -> Ends {
        if std::env::var_os("FERRYWIRE_LOG").is_some() {
            let _ = tracing_subscriber::fmt().with_max_level(tracing::Level::DEBUG).try_init();
        }
        let accepting = accepting.build().unwrap();
        let connecting = connecting.build().unwrap();
        let near = connecting.connect(accepting.listen_addresses()[0], LIMIT).unwrap();
        let far = accepting.accept(LIMIT).unwrap();
        Ends { accepting, connecting, near, far }
    }

    /// Writes from the end that connects; checks every byte.
    pub fn write(&self, bytes: usize, salt: u64) {
        let source = self.connecting.register(pattern(bytes, salt)).unwrap();
        let target = self.accepting.register(vec![0; bytes + 128]).unwrap();
        let write = self.near.write(&source, 0, &target.descriptor(), 64, bytes as u64).unwrap();
        assert_eq!(write.wait(LIMIT), Ok(bytes as u64), "a write of {bytes}");
        let mut expected = vec![0; bytes + 128];
        expected[64..64 + bytes].copy_from_slice(&pattern(bytes, salt));
        assert!(contents(&target) == expected, "a write of {bytes} bytes arrived wrong");
    }

    /// Closes both ends well.
    pub fn close(self) {
        self.near.close(LIMIT).unwrap();
        self.connecting.close(LIMIT).unwrap();
        self.accepting.close(LIMIT).unwrap();
    }
}

/// The contents of a region.
pub fn contents(region: &Region) -> Vec<u8> {
    let mut out = vec![0; region.len() as usize];
    region.read_at(0, &mut out).unwrap();
    out
}
