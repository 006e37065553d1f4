//! The properties of devices for NCCL, and NCCL's requests for merged devices.
//!
//! Invariant: every field of a version's layout is written.

use std::ffi::{c_float, c_int};
use std::ptr;

use ferrywire_ncclnet::abi::*;

use crate::device::Device;
use crate::failure::{Fault, guarded};
use crate::merged::{self, device};

const MAX_COMMS: c_int = 65536;
/// Number of messages per receive: one, because each pair of ranks has a comm of its own, and with it sockets of
/// its own.
pub const MAX_RECVS: c_int = 1;
/// Latency in microseconds: unknown, as for NCCL's own sockets; NCCL then uses its default.
const LATENCY_US: c_float = 0.0;
/// Whether NCCL registers whole user buffers up front, on connections made for that alone: no, because host memory
/// needs no registration.
const REG_IS_GLOBAL: c_int = 0;

/// Defines `getProperties` of one layout: the common fields and those that this layout adds.
macro_rules! get_properties {
    ($($name:ident $properties:ident($device:ident) { $($field:ident: $value:expr),* $(,)? })+) => {$(
        /// # Safety
        /// NCCL gives room for properties of this version.
        pub unsafe extern "C" fn $name(dev: c_int, props: *mut $properties) -> ResultCode {
            guarded(|| {
                let $device = device(dev)?;
                let properties = $properties {
                    name: $device.name.as_ptr(),
                    pci_path: $device.pci_path.as_ref().map_or(ptr::null(), |path| path.as_ptr()),
                    guid: dev as u64,
                    ptr_support: PTR_HOST,
                    speed: $device.speed_mbps,
                    port: 0,
                    max_comms: MAX_COMMS,
                    $($field: $value,)*
                };
                // SAFETY: NCCL gives room for properties of this version.
                unsafe { props.write(properties) };
                Ok(())
            })
        }
    )+};
}

get_properties! {
    get_properties_v6 PropertiesV6(device) { latency: LATENCY_US, max_recvs: MAX_RECVS }
    get_properties_v7 PropertiesV7(device) {
        latency: LATENCY_US, max_recvs: MAX_RECVS,
        net_device_type: DEVICE_HOST, net_device_version: DEVICE_VERSION_NONE,
    }
    get_properties_v8 PropertiesV8(device) {
        latency: LATENCY_US, max_recvs: MAX_RECVS,
        net_device_type: DEVICE_HOST, net_device_version: DEVICE_VERSION_NONE,
        reg_is_global: REG_IS_GLOBAL,
    }
    get_properties_v9 PropertiesV9(device) {
        latency: LATENCY_US, max_recvs: MAX_RECVS,
        net_device_type: DEVICE_HOST, net_device_version: DEVICE_VERSION_NONE,
        reg_is_global: REG_IS_GLOBAL, force_flush: 0, v_props: members_v9(device),
        max_p2p_bytes: NET_SIZE_BYTES_MAX, max_coll_bytes: NET_SIZE_BYTES_MAX,
    }
    get_properties_v11 PropertiesV11(device) {
        latency: LATENCY_US, max_recvs: MAX_RECVS,
        net_device_type: DEVICE_HOST, net_device_version: DEVICE_VERSION_NONE,
        reg_is_global: REG_IS_GLOBAL, force_flush: 0, v_props: members_v9(device),
        max_p2p_bytes: NET_SIZE_BYTES_MAX, max_coll_bytes: NET_SIZE_BYTES_MAX, max_multi_request_size: 1,
    }
    get_properties_v12 PropertiesV12(device) {
        latency: LATENCY_US, max_recvs: MAX_RECVS,
        net_device_type: DEVICE_HOST, net_device_version: DEVICE_VERSION_NONE,
        reg_is_global: REG_IS_GLOBAL, force_flush: 0, v_props: members_v12(device),
        max_p2p_bytes: NET_SIZE_BYTES_MAX, max_coll_bytes: NET_SIZE_BYTES_MAX, max_multi_request_size: 1,
        rail_id: RAIL_UNKNOWN, plane_id: RAIL_UNKNOWN,
    }
}

/// The members of a device, at most as many as the layout holds.
fn members_v9(device: &Device) -> VDevicePropsV9 {
    let mut props = VDevicePropsV9::zeroed();
    props.ndevs = fill(&mut props.devs, device);
    props
}

fn members_v12(device: &Device) -> VDevicePropsV12 {
    let mut props = VDevicePropsV12::zeroed();
    props.ndevs = fill(&mut props.devs, device);
    props
}

fn fill(devs: &mut [c_int], device: &Device) -> c_int {
    devs.iter_mut().zip(&device.members).map(|(dev, member)| *dev = *member).count() as c_int
}

/// # Safety
/// `dev` is valid for writing.
unsafe fn merge(dev: *mut c_int, ndevs: c_int, devs: &[c_int]) -> ResultCode {
    guarded(|| {
        let members = usize::try_from(ndevs).ok().and_then(|count| devs.get(..count));
        let most = devs.len();
        let members = members.ok_or_else(|| {
            Fault::usage(format_args!("{ndevs} devices cannot be merged: at most {most} can"))
        })?;
        let number = merged::merge(members)?;
        // SAFETY: the caller promises that `dev` is valid for writing.
        unsafe { dev.write(number) };
        Ok(())
    })
}

/// `makeVDevice` of v9 to v11.
///
/// # Safety
/// NCCL gives room for the number, and numbers in the layout of this version.
pub unsafe extern "C" fn make_v_device_v9(dev: *mut c_int, props: *mut VDevicePropsV9) -> ResultCode {
    // SAFETY: NCCL gives room for the number, and numbers in this layout.
    unsafe { merge(dev, (*props).ndevs, &(*props).devs) }
}

/// `makeVDevice` of v12.
///
/// # Safety
/// NCCL gives room for the number, and numbers in the layout of this version.
pub unsafe extern "C" fn make_v_device_v12(dev: *mut c_int, props: *mut VDevicePropsV12) -> ResultCode {
    // SAFETY: NCCL gives room for the number, and numbers in this layout.
    unsafe { merge(dev, (*props).ndevs, &(*props).devs) }
}
