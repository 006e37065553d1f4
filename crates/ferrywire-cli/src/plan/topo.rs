//! The meaning of `ferrywire topo`'s flags.
//!
//! Read next: [`crate::topo`].

use std::path::PathBuf;

use ferrywire::limits::CHANNELS_MAX;
use ferrywire_host::topology::PlanOptions;

use super::{at_least_one, usage};
use crate::args::TopoFlags;
use crate::auto::Given;
use crate::exit::{Failure, Outcome};

/// Channels per GPU that `topo` assigns.
const TOPO_CHANNELS_DEFAULT: usize = 8;

/// The plan of `topo`.
#[derive(Clone, Debug)]
pub struct TopoPlan {
    /// Restrictions on the topology plan.
    pub options: PlanOptions,
    /// Channels per GPU.
    pub channels: usize,
    /// Whether to undo first what killed processes have left at NICs.
    pub clean_up: bool,
    /// A recorded host; `None` for this host.
    pub root: Option<PathBuf>,
    /// Whether to print JSON.
    pub json: bool,
}

pub(super) fn plan(flags: TopoFlags) -> Outcome<TopoPlan> {
    let TopoFlags { json, gpu_nics: map, nics, allow_cross_numa, channels, clean_up, root } = flags;
    let map = map.given().map_or(Ok(Default::default()), |text| {
        text.parse().map_err(|why| Failure::Usage(format!("--gpu-nics {text}: {why}")))
    })?;
    let channels = at_least_one("--channels", channels.given())?.unwrap_or(TOPO_CHANNELS_DEFAULT);
    if channels > CHANNELS_MAX {
        return usage(format!("--channels must be at most {CHANNELS_MAX} (got {channels})"));
    }
    let nics = nics.given().map(|names| names.0).unwrap_or_default();
    if clean_up && root.is_some() {
        return usage("--clean-up changes NICs of this host only: leave out --root");
    }
    Ok(TopoPlan { options: PlanOptions { map, nics, allow_cross_numa }, channels, clean_up, root, json })
}
