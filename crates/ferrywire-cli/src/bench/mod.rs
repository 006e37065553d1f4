//! `ferrywire bench`: moves patterns between two ends, measures, and verifies the received data.
//!
//! Reading order: [`protocol`] (messages between the ends), [`layout`] and [`pattern`] (places and contents of the
//! bytes), [`flow`] and [`pingpong`] (the timed loops), [`session`] (one size, the same code on both ends), [`check`]
//! (the verdict), [`serve`] and [`connect`], [`isolated`] (plugins run in a process of their own), [`multi_gpu`]
//! (several endpoints in one process), [`result`] and [`report`].
//!
//! Invariant: no number is printed for a size that did not finish and verify.

pub mod barrier;
pub mod bottleneck;
pub mod cgroup;
pub mod check;
pub mod child_secret;
pub mod connect;
pub mod cpu_accounting;
pub mod flow;
pub mod host;
pub mod idle_nics;
pub mod incast;
pub mod isolated;
pub mod layout;
pub mod link;
pub mod loopback;
pub mod measure;
pub mod multi_gpu;
pub mod parent;
pub mod pattern;
pub mod pingpong;
pub mod places;
pub mod protocol;
pub mod ranks;
pub mod report;
pub mod result;
mod run_slot;
pub mod secret_file;
pub mod serve;
pub mod session;
pub mod staged;
pub mod table;
pub mod verify;

use std::net::SocketAddr;

use ferrywire::{Builder, Endpoint};

use crate::exit::{self, Failure, Outcome};
use crate::nics;
use crate::plan::EnginePlan;

/// The builder of this end's endpoint.
pub fn builder(plan: &EnginePlan, listen: Option<SocketAddr>) -> Outcome<Builder> {
    nics::check(&plan.nics)?;
    serve_metrics(plan.metrics.as_deref())?;
    let mut builder = Endpoint::builder().label(host::hostname());
    if let Some(address) = listen {
        builder = builder.listen(address);
    }
    if let Some(secret) = &plan.secret {
        builder = builder.secret(secret.clone());
    }
    if let Some(other) = plan.secret_phase.as_ref().and_then(secret_file::Phase::other) {
        builder = builder.also_accepted_secret(other.to_vec());
    }
    if !plan.nics.is_empty() {
        builder = builder.nics(plan.nics.iter().cloned());
    }
    if let Some(n) = plan.channels {
        builder = builder.channels(n);
    }
    if let Some(n) = plan.chunk_bytes {
        builder = builder.chunk_bytes(n as usize);
    }
    if let Some(n) = plan.window {
        builder = builder.window(n);
    }
    if let Some(n) = plan.threads {
        builder = builder.threads(n);
    }
    if let Some(on) = plan.crc {
        builder = builder.crc(on);
    }
    builder = builder.encryption(plan.encryption).keyed_checksum(plan.keyed_checksum);
    if let Some(name) = &plan.congestion_control {
        builder = builder.congestion_control(name.clone());
    }
    if let Some(plugin) = &plan.plugin {
        builder = builder.plugin(plugin.config());
    }
    if let Some(devmem) = &plan.devmem {
        builder = builder.payload_backend(devmem.config());
    }
    Ok(builder)
}

/// Serves metrics once per process, and prints their address.
fn serve_metrics(address: Option<&str>) -> Outcome {
    let Some(address) = address else { return Ok(()) };
    if let Some(address) = ferrywire_metrics::serve(address).map_err(no_metrics)? {
        exit::note(&format!("metrics: http://{address}/metrics"));
    }
    Ok(())
}

/// Checks the address for metrics before the other end of loopback mode starts, which serves at a later port: its error
/// would name a port that the user has not given.
fn check_metrics(address: Option<&str>) -> Outcome {
    address.map_or(Ok(()), |address| ferrywire_metrics::check(address).map_err(no_metrics))
}

fn no_metrics(error: ferrywire_metrics::MetricsError) -> Failure {
    let why = format!("--metrics: {error}");
    match error {
        ferrywire_metrics::MetricsError::NotAnAddress { .. } => Failure::Usage(why),
        _ => Failure::Failed(why),
    }
}

/// Builds this end's endpoint. Its GPU must already be open: a simulated GPU publishes itself to plugins through the
/// environment, which is only safe before there are threads.
pub fn endpoint(plan: &EnginePlan, listen: Option<SocketAddr>) -> Outcome<Endpoint> {
    builder(plan, listen)?.build().map_err(|error| match error {
        ferrywire::Error::Invalid { .. } => Failure::Usage(error.to_string()),
        other => other.into(),
    })
}

/// The number of an endpoint's progress threads.
pub fn threads(endpoint: &Endpoint) -> usize {
    endpoint.config().threads
}
