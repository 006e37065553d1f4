//! A peer's counters as Python dictionaries. Sizes are in bytes, times in seconds.

use ferrywire::{ChannelStats, LaneStats, PeerStats, StagingStats};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// All counters of a peer.
pub fn dict<'py>(py: Python<'py>, stats: &PeerStats) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("transport", stats.transport)?;
    let channels: PyResult<Vec<_>> = stats.channels.iter().map(|each| channel(py, each)).collect();
    dict.set_item("channels", channels?)?;
    dict.set_item("resent_chunks", stats.resent_chunks)?;
    dict.set_item("lost_channels", &stats.lost_channels)?;
    dict.set_item("failed_dials", stats.failed_dials)?;
    dict.set_item("setup_s", stats.setup.as_secs_f64())?;
    dict.set_item("chunk_bytes", stats.chunk_bytes)?;
    dict.set_item("window", stats.window)?;
    dict.set_item("crc", stats.crc)?;
    dict.set_item("protection", stats.protection.map(|protection| protection.name()))?;
    Ok(dict)
}

fn channel<'py>(py: Python<'py>, stats: &ChannelStats) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("index", stats.index)?;
    dict.set_item("nic", &stats.nic)?;
    dict.set_item("local", stats.local.to_string())?;
    dict.set_item("remote", stats.remote.to_string())?;
    dict.set_item("alive", stats.alive)?;
    dict.set_item("sent_bytes", stats.sent_bytes)?;
    dict.set_item("received_bytes", stats.received_bytes)?;
    dict.set_item("rtt_s", stats.rtt.as_secs_f64())?;
    dict.set_item("send_buffer_bytes", stats.send_buffer_bytes)?;
    dict.set_item("receive_buffer_bytes", stats.receive_buffer_bytes)?;
    dict.set_item("congestion_control", &stats.congestion_control)?;
    dict.set_item("generation", stats.generation)?;
    dict.set_item("zero_copy", stats.zero_copy)?;
    dict.set_item("lane", stats.lane.as_ref().map(|each| lane(py, each)).transpose()?)?;
    dict.set_item("staging", stats.staging.as_ref().map(|each| staging(py, each)).transpose()?)?;
    Ok(dict)
}

fn lane<'py>(py: Python<'py>, stats: &LaneStats) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("plugin", &stats.plugin)?;
    dict.set_item("version", &stats.version)?;
    dict.set_item("device", stats.device)?;
    dict.set_item("device_name", &stats.device_name)?;
    dict.set_item("max_outstanding_sends", stats.max_outstanding_sends)?;
    dict.set_item("max_outstanding_receives", stats.max_outstanding_receives)?;
    dict.set_item("closing_results", stats.closing_results)?;
    dict.set_item("setup_s", stats.setup.as_secs_f64())?;
    Ok(dict)
}

fn staging<'py>(py: Python<'py>, stats: &StagingStats) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("pinned_bytes", stats.pinned_bytes)?;
    dict.set_item("slot_bytes", stats.slot_bytes)?;
    dict.set_item("sent_bytes", stats.sent_bytes)?;
    dict.set_item("received_bytes", stats.received_bytes)?;
    dict.set_item("ring_full_events", stats.ring_full_events)?;
    for (name, time) in [
        ("d2h_s", stats.d2h),
        ("h2d_s", stats.h2d),
        ("socket_s", stats.socket),
        ("send_ring_full_s", stats.send_ring_full_time),
        ("receive_ring_full_s", stats.receive_ring_full_time),
    ] {
        dict.set_item(name, time.as_secs_f64())?;
    }
    dict.set_item("driver_calls", stats.driver_calls)?;
    Ok(dict)
}
