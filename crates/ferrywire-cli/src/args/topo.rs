//! The flags of `ferrywire topo`.
//!
//! Read next: `../plan/topo.rs`.

use std::path::PathBuf;

use clap::builder::FalseyValueParser;
use clap::{ArgAction, Args};

use crate::auto::OrAuto;
use crate::units::Names;

/// The flags of `topo`.
#[derive(Clone, Debug, Default, Args)]
pub struct TopoFlags {
    /// Write JSON instead of text
    #[arg(long, action = ArgAction::SetTrue, value_parser = FalseyValueParser::new())]
    pub json: bool,
    /// NICs of GPUs: 0=eth1,1=eth2 or 0-7=eth1,eth2 [default: auto]
    ///
    /// auto: the NICs behind the GPU's own PCIe bridge, else below its PCIe root, else of its NUMA node. GPUs that are not
    /// named keep the NICs that auto chooses.
    #[arg(long, alias = "map", value_name = "GPU=NIC,...")]
    pub gpu_nics: Option<OrAuto<String>>,
    /// NICs to plan with, by name [default: auto]
    ///
    /// auto: every NIC with a device, except NICs for control. A NIC is for control if it shares its PCIe root with no GPU
    /// while other NICs do.
    #[arg(long, value_name = "NAMES")]
    pub nics: Option<OrAuto<Names>>,
    /// Allow NICs of another NUMA node for GPUs without a nearer NIC
    #[arg(long, action = ArgAction::SetTrue, value_parser = FalseyValueParser::new())]
    pub allow_cross_numa: bool,
    /// Channels per GPU, spread over its NICs [default: 8]
    #[arg(long, value_name = "N")]
    pub channels: Option<OrAuto<usize>>,
    /// First undo NIC settings that killed runs left behind
    ///
    /// A run with --allow-nic-setup changes NIC settings and undoes the changes at its end. A killed run leaves its rules
    /// and settings at the NICs of this network namespace. The settings of live runs stay.
    #[arg(long, action = ArgAction::SetTrue, value_parser = FalseyValueParser::new())]
    pub clean_up: bool,
    /// A recorded host in place of this one
    #[arg(long, value_name = "DIR", hide = true)]
    pub root: Option<PathBuf>,
}
