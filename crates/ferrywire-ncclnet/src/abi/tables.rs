//! The function tables, one struct per version.
//!
//! Slot 0 is the name; every other slot is a function pointer, which may be null. Changes by version:
//!
//! | version | new |
//! |---|---|
//! | v5 | tags, several buffers per receive |
//! | v6 | `regMrDmaBuf`, in slot 8: every later slot moves |
//! | v7 | device handles, `getDeviceMr`, `irecvConsumed` |
//! | v8 | `regMr` takes `size_t`; other properties |
//! | v9 | `isend` and `irecv` take `size_t`; `makeVDevice` |
//! | v10 | profiler handles, the communicator's configuration in `connect` |
//! | v11 | contexts, `finalize`, `setNetAttr` |
//! | v12 | other properties, larger virtual devices |
//!
//! Slots that may be null: `regMrDmaBuf` (without DMABUF support), `getDeviceMr`, `irecvConsumed`,
//! `makeVDevice`, `setNetAttr`, and `iflush` in plugins without GPU memory.

use std::ffi::c_char;

use super::Version;
use super::signatures::*;

/// A function table: [`NetV4`] to [`NetV12`].
///
/// # Safety
/// The struct is laid out as `ncclNet_vN_t` of [`Table::VERSION`].
pub unsafe trait Table: Copy + 'static {
    /// The version of the interface whose tables have this layout.
    const VERSION: Version;

    /// The plugin's name. May be null, and `init` may change it.
    fn name(&self) -> *const c_char;
}

macro_rules! table {
    ($($name:ident $version:ident),+) => {$(
        // SAFETY: the offset of each slot is checked where the struct is defined.
        unsafe impl Table for $name {
            const VERSION: Version = Version::$version;

            fn name(&self) -> *const c_char {
                self.name
            }
        }
    )+};
}

table!(NetV4 V4, NetV5 V5, NetV6 V6, NetV7 V7, NetV8 V8, NetV9 V9, NetV10 V10, NetV11 V11, NetV12 V12);

layout! {
    /// The function table of v4.
    pub struct NetV4: 128, 8 {
        /// Name of the plugin, a C string; may be null.
        0 name: *const c_char,
        8 init: Option<InitV4>,
        16 devices: Option<Devices>,
        24 get_properties: Option<GetPropertiesV4>,
        32 listen: Option<ListenV4>,
        40 connect: Option<ConnectV4>,
        48 accept: Option<AcceptV4>,
        56 reg_mr: Option<RegMrV4>,
        64 dereg_mr: Option<DeregMr>,
        72 isend: Option<IsendV4>,
        80 irecv: Option<IrecvV4>,
        88 iflush: Option<IflushV4>,
        96 test: Option<Test>,
        104 close_send: Option<Close>,
        112 close_recv: Option<Close>,
        120 close_listen: Option<Close>,
    }

    /// The function table of v5.
    pub struct NetV5: 128, 8 {
        /// Name of the plugin, a C string; may be null.
        0 name: *const c_char,
        8 init: Option<InitV4>,
        16 devices: Option<Devices>,
        24 get_properties: Option<GetPropertiesV5>,
        32 listen: Option<ListenV4>,
        40 connect: Option<ConnectV4>,
        48 accept: Option<AcceptV4>,
        56 reg_mr: Option<RegMrV4>,
        64 dereg_mr: Option<DeregMr>,
        72 isend: Option<IsendV5>,
        80 irecv: Option<IrecvV5>,
        88 iflush: Option<IflushV5>,
        96 test: Option<Test>,
        104 close_send: Option<Close>,
        112 close_recv: Option<Close>,
        120 close_listen: Option<Close>,
    }

    /// The function table of v6.
    pub struct NetV6: 136, 8 {
        /// Name of the plugin, a C string; may be null.
        0 name: *const c_char,
        8 init: Option<InitV4>,
        16 devices: Option<Devices>,
        24 get_properties: Option<GetPropertiesV5>,
        32 listen: Option<ListenV4>,
        40 connect: Option<ConnectV4>,
        48 accept: Option<AcceptV4>,
        56 reg_mr: Option<RegMrV4>,
        64 reg_mr_dma_buf: Option<RegMrDmaBuf>,
        72 dereg_mr: Option<DeregMr>,
        80 isend: Option<IsendV5>,
        88 irecv: Option<IrecvV5>,
        96 iflush: Option<IflushV5>,
        104 test: Option<Test>,
        112 close_send: Option<Close>,
        120 close_recv: Option<Close>,
        128 close_listen: Option<Close>,
    }

    /// The function table of v7.
    pub struct NetV7: 152, 8 {
        /// Name of the plugin, a C string; may be null.
        0 name: *const c_char,
        8 init: Option<InitV4>,
        16 devices: Option<Devices>,
        24 get_properties: Option<GetPropertiesV7>,
        32 listen: Option<ListenV4>,
        40 connect: Option<ConnectV7>,
        48 accept: Option<AcceptV7>,
        56 reg_mr: Option<RegMrV4>,
        64 reg_mr_dma_buf: Option<RegMrDmaBuf>,
        72 dereg_mr: Option<DeregMr>,
        80 isend: Option<IsendV5>,
        88 irecv: Option<IrecvV5>,
        96 iflush: Option<IflushV5>,
        104 test: Option<Test>,
        112 close_send: Option<Close>,
        120 close_recv: Option<Close>,
        128 close_listen: Option<Close>,
        136 get_device_mr: Option<GetDeviceMr>,
        144 irecv_consumed: Option<IrecvConsumed>,
    }

    /// The function table of v8.
    pub struct NetV8: 152, 8 {
        /// Name of the plugin, a C string; may be null.
        0 name: *const c_char,
        8 init: Option<InitV4>,
        16 devices: Option<Devices>,
        24 get_properties: Option<GetPropertiesV8>,
        32 listen: Option<ListenV4>,
        40 connect: Option<ConnectV7>,
        48 accept: Option<AcceptV7>,
        56 reg_mr: Option<RegMrV8>,
        64 reg_mr_dma_buf: Option<RegMrDmaBuf>,
        72 dereg_mr: Option<DeregMr>,
        80 isend: Option<IsendV5>,
        88 irecv: Option<IrecvV5>,
        96 iflush: Option<IflushV5>,
        104 test: Option<Test>,
        112 close_send: Option<Close>,
        120 close_recv: Option<Close>,
        128 close_listen: Option<Close>,
        136 get_device_mr: Option<GetDeviceMr>,
        144 irecv_consumed: Option<IrecvConsumed>,
    }

    /// The function table of v9.
    pub struct NetV9: 160, 8 {
        /// Name of the plugin, a C string; may be null.
        0 name: *const c_char,
        8 init: Option<InitV4>,
        16 devices: Option<Devices>,
        24 get_properties: Option<GetPropertiesV9>,
        32 listen: Option<ListenV4>,
        40 connect: Option<ConnectV7>,
        48 accept: Option<AcceptV7>,
        56 reg_mr: Option<RegMrV8>,
        64 reg_mr_dma_buf: Option<RegMrDmaBuf>,
        72 dereg_mr: Option<DeregMr>,
        80 isend: Option<IsendV9>,
        88 irecv: Option<IrecvV9>,
        96 iflush: Option<IflushV5>,
        104 test: Option<Test>,
        112 close_send: Option<Close>,
        120 close_recv: Option<Close>,
        128 close_listen: Option<Close>,
        136 get_device_mr: Option<GetDeviceMr>,
        144 irecv_consumed: Option<IrecvConsumed>,
        152 make_v_device: Option<MakeVDeviceV9>,
    }

    /// The function table of v10.
    pub struct NetV10: 160, 8 {
        /// Name of the plugin, a C string; may be null.
        0 name: *const c_char,
        8 init: Option<InitV10>,
        16 devices: Option<Devices>,
        24 get_properties: Option<GetPropertiesV9>,
        32 listen: Option<ListenV4>,
        40 connect: Option<ConnectV10>,
        48 accept: Option<AcceptV7>,
        56 reg_mr: Option<RegMrV8>,
        64 reg_mr_dma_buf: Option<RegMrDmaBuf>,
        72 dereg_mr: Option<DeregMr>,
        80 isend: Option<IsendV10>,
        88 irecv: Option<IrecvV10>,
        96 iflush: Option<IflushV5>,
        104 test: Option<Test>,
        112 close_send: Option<Close>,
        120 close_recv: Option<Close>,
        128 close_listen: Option<Close>,
        136 get_device_mr: Option<GetDeviceMr>,
        144 irecv_consumed: Option<IrecvConsumed>,
        152 make_v_device: Option<MakeVDeviceV9>,
    }

    /// The function table of v11.
    pub struct NetV11: 176, 8 {
        /// Name of the plugin, a C string; may be null.
        0 name: *const c_char,
        8 init: Option<InitV11>,
        16 devices: Option<Devices>,
        24 get_properties: Option<GetPropertiesV11>,
        32 listen: Option<ListenV11>,
        40 connect: Option<ConnectV11>,
        48 accept: Option<AcceptV7>,
        56 reg_mr: Option<RegMrV8>,
        64 reg_mr_dma_buf: Option<RegMrDmaBuf>,
        72 dereg_mr: Option<DeregMr>,
        80 isend: Option<IsendV10>,
        88 irecv: Option<IrecvV10>,
        96 iflush: Option<IflushV5>,
        104 test: Option<Test>,
        112 close_send: Option<Close>,
        120 close_recv: Option<Close>,
        128 close_listen: Option<Close>,
        136 get_device_mr: Option<GetDeviceMr>,
        144 irecv_consumed: Option<IrecvConsumed>,
        152 make_v_device: Option<MakeVDeviceV9>,
        160 finalize: Option<Finalize>,
        168 set_net_attr: Option<SetNetAttr>,
    }

    /// The function table of v12.
    pub struct NetV12: 176, 8 {
        /// Name of the plugin, a C string; may be null.
        0 name: *const c_char,
        8 init: Option<InitV11>,
        16 devices: Option<Devices>,
        24 get_properties: Option<GetPropertiesV12>,
        32 listen: Option<ListenV11>,
        40 connect: Option<ConnectV11>,
        48 accept: Option<AcceptV7>,
        56 reg_mr: Option<RegMrV8>,
        64 reg_mr_dma_buf: Option<RegMrDmaBuf>,
        72 dereg_mr: Option<DeregMr>,
        80 isend: Option<IsendV10>,
        88 irecv: Option<IrecvV10>,
        96 iflush: Option<IflushV5>,
        104 test: Option<Test>,
        112 close_send: Option<Close>,
        120 close_recv: Option<Close>,
        128 close_listen: Option<Close>,
        136 get_device_mr: Option<GetDeviceMr>,
        144 irecv_consumed: Option<IrecvConsumed>,
        152 make_v_device: Option<MakeVDeviceV12>,
        160 finalize: Option<Finalize>,
        168 set_net_attr: Option<SetNetAttr>,
    }
}

// The offsets at which versions differ are checked once more, side by side: a table whose literal offsets
// were shifted together with its fields would pass its own checks.
const _: () = {
    use std::mem::offset_of;
    assert!(offset_of!(NetV4, dereg_mr) == 64 && offset_of!(NetV5, dereg_mr) == 64);
    assert!(offset_of!(NetV4, isend) == 72 && offset_of!(NetV5, isend) == 72);
    assert!(offset_of!(NetV4, close_listen) == 120 && offset_of!(NetV5, close_listen) == 120);
    assert!(offset_of!(NetV6, reg_mr_dma_buf) == 64 && offset_of!(NetV6, isend) == 80);
    assert!(offset_of!(NetV6, test) == 104 && offset_of!(NetV6, close_listen) == 128);
    assert!(offset_of!(NetV7, get_device_mr) == 136 && offset_of!(NetV7, irecv_consumed) == 144);
    assert!(offset_of!(NetV8, get_device_mr) == 136 && offset_of!(NetV8, irecv_consumed) == 144);
    assert!(offset_of!(NetV9, make_v_device) == 152 && offset_of!(NetV10, make_v_device) == 152);
    assert!(offset_of!(NetV11, finalize) == 160 && offset_of!(NetV11, set_net_attr) == 168);
    assert!(offset_of!(NetV12, finalize) == 160 && offset_of!(NetV12, set_net_attr) == 168);
    // An optional function must have the size of a pointer, so that null means "missing".
    assert!(size_of::<Option<Test>>() == 8);
};
