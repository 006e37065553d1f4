//! Metrics of a process that uses ferrywire: what it moved, how fast, over which NICs, and what failed.
//!
//! The engine counts anyway; a scrape reads those counters. Histograms of times cost time in a transfer, so they
//! are recorded only while [`are_timed`] is true, that is, once a server for scrapes runs. Every face has the
//! metrics, because the engine and the NCCL plugin register each peer as a [`Source`].
//!
//! | module | holds |
//! |---|---|
//! | `sample` | what is known of a process: peers, channels, operations; plain data, as JSON too |
//! | `registry` | the sources of this process, and what ended ones had counted |
//! | `text` | the samples as Prometheus metrics |
//! | `server` | `GET /metrics` over HTTP, for `--metrics` and `FERRYWIRE_METRICS` |
//! | `fork` | a value of which each process has its own |
//! | `local` | a socket per process, for `ferrywire watch` |
//!
//! Invariant: nothing here is called by a thread that moves payload, except the recording of times, which takes no lock.

use std::net::SocketAddr;

mod fork;
mod local;
mod registry;
mod sample;
mod server;
mod text;

pub use local::{Failure, processes};
pub use registry::{
    Kind, Source, are_timed, count_auth_failure, process, record_post, record_transfer, register, retire,
    set_face, thread_ends,
};
pub use sample::{
    ChannelSample, KindSample, LaneSample, OccupancySample, PeerSample, ProcessSample, StagingSample,
};
pub use server::{MetricsError, VARIABLE, check, next_to, serve};
pub use text::render;

/// Makes this process visible to `ferrywire watch`, and serves metrics where `FERRYWIRE_METRICS` says so. Later calls in one
/// process do nothing. A port that is in use is logged, because a parent and its children have one environment; the process
/// goes on without metrics.
///
/// # Errors
/// [`MetricsError::NotAnAddress`] if the variable holds no address.
pub fn start() -> Result<(), MetricsError> {
    match begin() {
        Ok(None) => {}
        Ok(Some(address)) => tracing::info!("metrics are served at http://{address}/metrics"),
        Err(error @ MetricsError::NotAnAddress { .. }) => return Err(error),
        Err(error) => tracing::warn!("{error} ({VARIABLE})"),
    }
    Ok(())
}

/// Does the same as [`start`], for a face with a log of its own: returns the address if this call began to serve.
///
/// # Errors
/// [`MetricsError`] if the variable holds no address, or the address cannot be listened on.
pub fn begin() -> Result<Option<SocketAddr>, MetricsError> {
    local::start();
    server::serve_by_environment()
}
