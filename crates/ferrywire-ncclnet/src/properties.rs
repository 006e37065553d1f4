//! Device properties in one form for all versions.
//!
//! Invariant: the buffer given to the plugin is zeroed and larger than any version's struct; its contents are
//! read with the struct of exactly the plugin's version; strings are copied at once.
//! Read next: `functions.rs`.

use std::ffi::{c_char, c_int};

use super::abi::*;
use super::functions::GetProperties;
use super::sanitize;
use ferrywire_proto::limits::{PLUGIN_NAME_BYTES_MAX, PLUGIN_PATH_BYTES_MAX, PLUGIN_PROPERTIES_BYTES};

/// A device of a plugin. A property that the plugin's version lacks has the value that NCCL assumes.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Properties {
    /// Name of the NIC. Map devices by name: they may not come in the configured order.
    pub name: String,
    /// The device's directory in sysfs; `None` for a virtual device.
    pub pci_path: Option<String>,
    /// GUID of the device, equal for devices that share a port.
    pub guid: u64,
    /// Kinds of memory that the device accepts, as `PTR_*` bits.
    pub ptr_support: c_int,
    /// Whether a registration within another one is almost free.
    pub reg_is_global: bool,
    /// Whether every receive into GPU memory must be flushed.
    pub force_flush: bool,
    /// Link speed of the device in Mbit/s.
    pub speed_mbps: c_int,
    /// Number of the port of the device.
    pub port: c_int,
    /// Latency of the device in microseconds.
    pub latency_us: f32,
    /// Most connections of the device; advisory.
    pub max_comms: c_int,
    /// Most buffers of a grouped receive.
    pub max_recvs: c_int,
    /// Type of the device, one of `DEVICE_*`.
    pub device_type: c_int,
    /// Version of the device handles, one of `DEVICE_VERSION_*`.
    pub device_version: c_int,
    /// Devices behind a virtual device; a plain device lists itself.
    pub devices: Vec<c_int>,
    /// Largest message between two ranks, in bytes.
    pub max_p2p_bytes: usize,
    /// Largest message of a collective, in bytes.
    pub max_coll_bytes: usize,
    /// Most requests in one multi-request; 1 in every known plugin.
    pub max_multi_request: c_int,
    /// Rail of the device, where known.
    pub rail: Option<i16>,
    /// Plane of the device, where known.
    pub plane: Option<i16>,
}

impl Properties {
    /// Whether the device accepts memory of the kind `kind`.
    pub fn takes(&self, kind: PointerType) -> bool {
        self.ptr_support & kind as c_int != 0
    }

    /// Whether the device scatters received bytes, which must then be gathered.
    pub fn unpacks(&self) -> bool {
        self.device_type == DEVICE_UNPACK
    }

    /// Why NCCL would drop the plugin because of this device; `None` if it would not.
    pub fn refused_by_nccl(&self) -> Option<String> {
        match (self.device_type, self.device_version) {
            (DEVICE_HOST, _) | (DEVICE_UNPACK, DEVICE_VERSION_UNPACK) => None,
            (DEVICE_UNPACK, version) => Some(format!(
                "device {} unpacks with version {version} of the layout; only {DEVICE_VERSION_UNPACK} is known",
                self.name
            )),
            (other, _) => Some(format!("device {} is of type {other}; only 0 and 1 are known", self.name)),
        }
    }
}

/// A zeroed buffer for the properties of any version.
#[repr(C, align(8))]
struct Room([u8; PLUGIN_PROPERTIES_BYTES]);

const _: () = assert!(size_of::<PropertiesV12>() * 2 <= PLUGIN_PROPERTIES_BYTES);
const _: () = assert!(align_of::<PropertiesV12>() <= align_of::<Room>());

/// Asks a plugin for the properties of a device; `None` when the device has no name.
///
/// # Safety
/// The plugin is loaded and started, and writes the struct of its version.
pub unsafe fn read(call: GetProperties, device: c_int) -> Result<Option<Properties>, ResultCode> {
    let mut room = Box::new(Room([0; PLUGIN_PROPERTIES_BYTES]));
    let at = (&raw mut *room).cast();
    // SAFETY: the room is aligned and larger than any version's properties.
    let code = unsafe { call.call(device, at) };
    if !code.is_success() {
        return Err(code);
    }
    // SAFETY: the room holds what the plugin wrote, in the form of its version, and is initialised
    // throughout; every bit pattern is a value of these structs. Strings live as long as the plugin.
    Ok(unsafe {
        match call {
            GetProperties::V4(_) => of_v4(&room, device),
            GetProperties::V5(_) => (*at.cast::<PropertiesV6>()).normal(device),
            GetProperties::V7(_) => (*at.cast::<PropertiesV7>()).normal(device),
            GetProperties::V8(_) => (*at.cast::<PropertiesV8>()).normal(device),
            GetProperties::V9(_) => (*at.cast::<PropertiesV9>()).normal(device),
            GetProperties::V11(_) => (*at.cast::<PropertiesV11>()).normal(device),
            GetProperties::V12(_) => (*at.cast::<PropertiesV12>()).normal(device),
        }
    })
}

/// Reads v4 properties. Some plugins write v6 properties through their v4 table; bytes behind v4's end reveal
/// this.
///
/// # Safety
/// The promise of [`Normal::normal`].
unsafe fn of_v4(room: &Room, device: c_int) -> Option<Properties> {
    let at = room.0.as_ptr();
    let longer = room.0[size_of::<PropertiesV4>()..size_of::<PropertiesV6>()].iter().any(|&byte| byte != 0);
    // SAFETY: the room is aligned, initialised and large enough for both.
    let normal = unsafe {
        if longer {
            (*at.cast::<PropertiesV6>()).normal(device)
        } else {
            (*at.cast::<PropertiesV4>()).normal(device)
        }
    };
    // A v4 receive takes one buffer, whatever the properties say.
    normal.map(|properties| Properties { max_recvs: 1, ..properties })
}

trait Normal {
    /// Converts the struct of a version; `None` if the device has no name.
    ///
    /// # Safety
    /// The strings are null or end with 0.
    unsafe fn normal(&self, device: c_int) -> Option<Properties>;
}

/// Values for properties that older versions lack.
///
/// # Safety
/// The promise of [`Normal::normal`].
unsafe fn base(name: *const c_char, pci_path: *const c_char, device: c_int) -> Option<Properties> {
    Some(Properties {
        // SAFETY: the caller promises that the string is null or ends with 0.
        name: unsafe { sanitize::read(name, PLUGIN_NAME_BYTES_MAX) }?,
        // SAFETY: the caller promises that the string is null or ends with 0.
        pci_path: unsafe { sanitize::read(pci_path, PLUGIN_PATH_BYTES_MAX) },
        guid: 0,
        ptr_support: 0,
        reg_is_global: false,
        force_flush: false,
        speed_mbps: 0,
        port: 0,
        latency_us: 0.0,
        max_comms: 0,
        max_recvs: 1,
        device_type: DEVICE_HOST,
        device_version: DEVICE_VERSION_NONE,
        devices: vec![device],
        max_p2p_bytes: MESSAGE_BYTES_MAX_V6,
        max_coll_bytes: MESSAGE_BYTES_MAX_V6,
        max_multi_request: 1,
        rail: None,
        plane: None,
    })
}

fn known(id: i16) -> Option<i16> {
    (id != RAIL_UNKNOWN).then_some(id)
}

/// The merged devices of a virtual device; a number beyond the array is cut.
fn members(ndevs: c_int, devs: &[c_int]) -> Vec<c_int> {
    devs[..usize::try_from(ndevs).unwrap_or(0).min(devs.len())].to_vec()
}

/// Implements `Normal` for a struct: plain fields by name, other fields by an expression.
macro_rules! normal {
    ($( $name:ident { $($field:ident),* } { $($other:ident = |$this:ident| $value:expr),* } )+) => {$(
        impl Normal for $name {
            unsafe fn normal(&self, device: c_int) -> Option<Properties> {
                // SAFETY: the caller promises that the strings are null or end with 0.
                let base = unsafe { base(self.name, self.pci_path, device) }?;
                Some(Properties {
                    guid: self.guid,
                    ptr_support: self.ptr_support,
                    speed_mbps: self.speed,
                    port: self.port,
                    max_comms: self.max_comms,
                    $( $field: self.$field, )*
                    $( $other: { let $this = self; $value }, )*
                    ..base
                })
            }
        }
    )+};
}

normal! {
    PropertiesV4 {} {}
    PropertiesV6 { max_recvs } { latency_us = |of| of.latency }
    PropertiesV7 { max_recvs } {
        latency_us = |of| of.latency, device_type = |of| of.net_device_type,
        device_version = |of| of.net_device_version
    }
    PropertiesV8 { max_recvs } {
        latency_us = |of| of.latency, device_type = |of| of.net_device_type,
        device_version = |of| of.net_device_version, reg_is_global = |of| of.reg_is_global != 0
    }
    PropertiesV9 { max_recvs, max_p2p_bytes, max_coll_bytes } {
        latency_us = |of| of.latency, device_type = |of| of.net_device_type,
        device_version = |of| of.net_device_version, reg_is_global = |of| of.reg_is_global != 0,
        force_flush = |of| of.force_flush != 0, devices = |of| members(of.v_props.ndevs, &of.v_props.devs)
    }
    PropertiesV11 { max_recvs, max_p2p_bytes, max_coll_bytes } {
        latency_us = |of| of.latency, device_type = |of| of.net_device_type,
        device_version = |of| of.net_device_version, reg_is_global = |of| of.reg_is_global != 0,
        force_flush = |of| of.force_flush != 0, devices = |of| members(of.v_props.ndevs, &of.v_props.devs),
        max_multi_request = |of| of.max_multi_request_size
    }
    PropertiesV12 { max_recvs, max_p2p_bytes, max_coll_bytes } {
        latency_us = |of| of.latency, device_type = |of| of.net_device_type,
        device_version = |of| of.net_device_version, reg_is_global = |of| of.reg_is_global != 0,
        force_flush = |of| of.force_flush != 0, devices = |of| members(of.v_props.ndevs, &of.v_props.devs),
        max_multi_request = |of| of.max_multi_request_size, rail = |of| known(of.rail_id),
        plane = |of| known(of.plane_id)
    }
}
