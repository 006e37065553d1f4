//! The functions of any table behind one interface, which hides the differences between versions.
//!
//! Each function has an enum with one variant per signature. The *type* of a slot selects the variant, so a
//! table cannot be called with another version's arguments. A size that an older signature cannot express is
//! refused before the call.
//! Read next: `net.rs`, which makes and records the calls.

use std::ffi::{c_int, c_void};
use std::ptr;

use super::abi::*;

/// A size exceeds the range of the signature's argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DoesNotFit;

/// Defines enums of signatures, with a conversion from each function pointer type.
macro_rules! forms {
    ($( $(#[$meta:meta])* enum $name:ident { $($variant:ident($signature:ty)),+ } )+) => {$(
        $(#[$meta])*
        #[derive(Clone, Copy, Debug)]
        pub enum $name { $($variant($signature)),+ }

        $(
            impl From<$signature> for $name {
                fn from(function: $signature) -> $name {
                    $name::$variant(function)
                }
            }
        )+
    )+};
}

forms! {
    enum Init { V4(InitV4), V10(InitV10), V11(InitV11) }
    enum GetProperties {
        V4(GetPropertiesV4), V5(GetPropertiesV5), V7(GetPropertiesV7), V8(GetPropertiesV8),
        V9(GetPropertiesV9), V11(GetPropertiesV11), V12(GetPropertiesV12)
    }
    enum Listen { V4(ListenV4), V11(ListenV11) }
    enum Connect { V4(ConnectV4), V7(ConnectV7), V10(ConnectV10), V11(ConnectV11) }
    enum Accept { V4(AcceptV4), V7(AcceptV7) }
    enum RegMr { V4(RegMrV4), V8(RegMrV8) }
    enum Isend { V4(IsendV4), V5(IsendV5), V9(IsendV9), V10(IsendV10) }
    enum Irecv { V4(IrecvV4), V5(IrecvV5), V9(IrecvV9), V10(IrecvV10) }
    enum Iflush { V4(IflushV4), V5(IflushV5) }
    enum MakeVDevice { V9(MakeVDeviceV9), V12(MakeVDeviceV12) }
}

/// Every function of a table; `None` for an optional function that is missing.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Functions {
    pub init: Init,
    pub devices: Devices,
    pub get_properties: GetProperties,
    pub listen: Listen,
    pub connect: Connect,
    pub accept: Accept,
    pub reg_mr: RegMr,
    pub reg_mr_dma_buf: Option<RegMrDmaBuf>,
    pub dereg_mr: DeregMr,
    pub isend: Isend,
    pub irecv: Irecv,
    pub iflush: Option<Iflush>,
    pub test: Test,
    pub close_send: Close,
    pub close_recv: Close,
    pub close_listen: Close,
    pub get_device_mr: Option<GetDeviceMr>,
    pub irecv_consumed: Option<IrecvConsumed>,
    pub make_v_device: Option<MakeVDevice>,
    pub finalize: Option<Finalize>,
    pub set_net_attr: Option<SetNetAttr>,
}

/// A table whose functions can be extracted.
pub trait Callable: Table {
    /// The table's functions, or the name of a mandatory function that is missing.
    fn functions(&self) -> Result<Functions, &'static str>;
}

macro_rules! callable {
    ($( $table:ident { $($optional:ident),* } { $($mandatory:ident $word:literal),* } )+) => {$(
        impl Callable for $table {
            fn functions(&self) -> Result<Functions, &'static str> {
                #[allow(unused_mut, reason = "the oldest tables have nothing to add")]
                let mut functions = Functions {
                    init: self.init.ok_or("init")?.into(),
                    devices: self.devices.ok_or("devices")?,
                    get_properties: self.get_properties.ok_or("getProperties")?.into(),
                    listen: self.listen.ok_or("listen")?.into(),
                    connect: self.connect.ok_or("connect")?.into(),
                    accept: self.accept.ok_or("accept")?.into(),
                    reg_mr: self.reg_mr.ok_or("regMr")?.into(),
                    dereg_mr: self.dereg_mr.ok_or("deregMr")?,
                    isend: self.isend.ok_or("isend")?.into(),
                    irecv: self.irecv.ok_or("irecv")?.into(),
                    iflush: self.iflush.map(Iflush::from),
                    test: self.test.ok_or("test")?,
                    close_send: self.close_send.ok_or("closeSend")?,
                    close_recv: self.close_recv.ok_or("closeRecv")?,
                    close_listen: self.close_listen.ok_or("closeListen")?,
                    reg_mr_dma_buf: None,
                    get_device_mr: None,
                    irecv_consumed: None,
                    make_v_device: None,
                    finalize: None,
                    set_net_attr: None,
                };
                $( functions.$optional = self.$optional.map(Into::into); )*
                $( functions.$mandatory = Some(self.$mandatory.ok_or($word)?); )*
                Ok(functions)
            }
        }
    )+};
}

callable! {
    NetV4 {} {}
    NetV5 {} {}
    NetV6 { reg_mr_dma_buf } {}
    NetV7 { reg_mr_dma_buf, get_device_mr, irecv_consumed } {}
    NetV8 { reg_mr_dma_buf, get_device_mr, irecv_consumed } {}
    NetV9 { reg_mr_dma_buf, get_device_mr, irecv_consumed, make_v_device } {}
    NetV10 { reg_mr_dma_buf, get_device_mr, irecv_consumed, make_v_device } {}
    NetV11 { reg_mr_dma_buf, get_device_mr, irecv_consumed, make_v_device, set_net_attr } { finalize "finalize" }
    NetV12 { reg_mr_dma_buf, get_device_mr, irecv_consumed, make_v_device, set_net_attr } { finalize "finalize" }
}

/// The buffers of a grouped receive as the C functions take them: one array per property.
#[derive(Debug)]
pub struct Buffers<'a> {
    /// Address of each buffer, for grouped receives.
    pub data: &'a mut [*mut c_void],
    /// Size of each buffer in bytes.
    pub sizes: &'a [usize],
    /// Tag of each buffer.
    pub tags: &'a mut [c_int],
    /// Registration of each buffer.
    pub mhandles: &'a mut [*mut c_void],
}

const GROUP: usize = ferrywire_proto::limits::GROUPED_RECEIVES_MAX;

fn int(size: usize) -> Result<c_int, DoesNotFit> {
    c_int::try_from(size).map_err(|_| DoesNotFit)
}

fn ints(sizes: &[usize]) -> Result<[c_int; GROUP], DoesNotFit> {
    let mut converted = [0; GROUP];
    for (to, &size) in converted.iter_mut().zip(sizes) {
        *to = int(size)?;
    }
    Ok(converted)
}

impl Init {
    /// # Safety
    /// The pointers are valid during the call, and `config` for as long as the context lives.
    pub unsafe fn call(
        self,
        context: PP,
        comm_id: u64,
        config: *mut CommConfig,
        log: Log,
        prof: Prof,
    ) -> ResultCode {
        // SAFETY: the caller promises valid pointers, for every arm below.
        unsafe {
            match self {
                Init::V4(init) => init(log),
                Init::V10(init) => init(log, prof),
                Init::V11(init) => init(context, comm_id, config, log, prof),
            }
        }
    }
}

impl GetProperties {
    /// # Safety
    /// `room` is aligned to 8 and larger than any properties.
    pub unsafe fn call(self, device: c_int, room: *mut c_void) -> ResultCode {
        // SAFETY: the caller promises a large enough room.
        unsafe {
            match self {
                GetProperties::V4(call) => call(device, room.cast()),
                GetProperties::V5(call) => call(device, room.cast()),
                GetProperties::V7(call) => call(device, room.cast()),
                GetProperties::V8(call) => call(device, room.cast()),
                GetProperties::V9(call) => call(device, room.cast()),
                GetProperties::V11(call) => call(device, room.cast()),
                GetProperties::V12(call) => call(device, room.cast()),
            }
        }
    }
}

impl Listen {
    /// # Safety
    /// `handle` has 128 bytes; the context is the one of `init`.
    pub unsafe fn call(self, context: P, device: c_int, handle: P, comm: PP) -> ResultCode {
        // SAFETY: the caller promises a valid handle and context.
        unsafe {
            match self {
                Listen::V4(listen) => listen(device, handle, comm),
                Listen::V11(listen) => listen(context, device, handle, comm),
            }
        }
    }
}

impl Connect {
    /// # Safety
    /// `handle` has 128 bytes. It and the target of `dh` stay at one address in all calls of an attempt.
    pub unsafe fn call(
        self,
        context: P,
        device: c_int,
        config: *mut CommConfig,
        handle: P,
        comm: PP,
        dh: Dh,
    ) -> ResultCode {
        // SAFETY: the caller promises that handle and device argument stay at one address.
        unsafe {
            match self {
                Connect::V4(connect) => connect(device, handle, comm),
                Connect::V7(connect) => connect(device, handle, comm, dh),
                Connect::V10(connect) => connect(device, config, handle, comm, dh),
                Connect::V11(connect) => connect(context, device, handle, comm, dh),
            }
        }
    }
}

impl Accept {
    /// # Safety
    /// `listen_comm` is open, and `dh` points at one address in all calls of an attempt.
    pub unsafe fn call(self, listen_comm: P, comm: PP, dh: Dh) -> ResultCode {
        // SAFETY: the caller promises an open listener, and that `dh` stays at one address.
        unsafe {
            match self {
                Accept::V4(accept) => accept(listen_comm, comm),
                Accept::V7(accept) => accept(listen_comm, comm, dh),
            }
        }
    }
}

impl RegMr {
    /// # Safety
    /// The memory is of the stated kind and stays valid until it is deregistered.
    pub unsafe fn call(
        self,
        comm: P,
        data: P,
        size: usize,
        kind: PointerType,
        mhandle: PP,
    ) -> Result<ResultCode, DoesNotFit> {
        // SAFETY: the caller promises that the memory is of the stated kind and stays valid.
        Ok(unsafe {
            match self {
                RegMr::V4(reg) => reg(comm, data, int(size)?, kind as c_int, mhandle),
                RegMr::V8(reg) => reg(comm, data, size, kind as c_int, mhandle),
            }
        })
    }
}

impl Isend {
    /// # Safety
    /// The memory is registered as `mhandle` and stays unchanged until the request is done.
    pub unsafe fn call(
        self,
        comm: P,
        data: P,
        size: usize,
        tag: c_int,
        mhandle: P,
        request: PP,
    ) -> Result<ResultCode, DoesNotFit> {
        // SAFETY: the caller promises registered memory. Profiler handles may be null.
        Ok(unsafe {
            match self {
                Isend::V4(isend) => isend(comm, data, int(size)?, mhandle, request),
                Isend::V5(isend) => isend(comm, data, int(size)?, tag, mhandle, request),
                Isend::V9(isend) => isend(comm, data, size, tag, mhandle, request),
                Isend::V10(isend) => isend(comm, data, size, tag, mhandle, ptr::null_mut(), request),
            }
        })
    }
}

impl Irecv {
    /// # Safety
    /// Between 1 and [`GROUP`] buffers, 1 for v4. They are registered, and no other code uses them until the
    /// request is done.
    pub unsafe fn call(
        self,
        comm: P,
        buffers: &mut Buffers<'_>,
        request: PP,
    ) -> Result<ResultCode, DoesNotFit> {
        let n = int(buffers.data.len())?;
        let Buffers { data, tags, mhandles, .. } = buffers;
        // SAFETY: the caller promises registered buffers. Plugins read the arrays only during the call, and
        // accept null profiler handles.
        Ok(unsafe {
            match self {
                Irecv::V4(irecv) => irecv(comm, data[0], int(buffers.sizes[0])?, mhandles[0], request),
                Irecv::V5(irecv) => {
                    let mut sizes = ints(buffers.sizes)?;
                    let (data, mhandles) = (data.as_mut_ptr(), mhandles.as_mut_ptr());
                    irecv(comm, n, data, sizes.as_mut_ptr(), tags.as_mut_ptr(), mhandles, request)
                }
                Irecv::V9(irecv) => {
                    let mut sizes = copied(buffers.sizes);
                    let (data, mhandles) = (data.as_mut_ptr(), mhandles.as_mut_ptr());
                    irecv(comm, n, data, sizes.as_mut_ptr(), tags.as_mut_ptr(), mhandles, request)
                }
                Irecv::V10(irecv) => {
                    let mut sizes = copied(buffers.sizes);
                    let (data, mhandles) = (data.as_mut_ptr(), mhandles.as_mut_ptr());
                    let (sizes, tags) = (sizes.as_mut_ptr(), tags.as_mut_ptr());
                    irecv(comm, n, data, sizes, tags, mhandles, ptr::null_mut(), request)
                }
            }
        })
    }
}

fn copied(sizes: &[usize]) -> [usize; GROUP] {
    let mut copy = [0; GROUP];
    copy[..sizes.len()].copy_from_slice(sizes);
    copy
}

impl Iflush {
    /// # Safety
    /// The buffers were received into, by a call that kept the promise of [`Irecv::call`].
    pub unsafe fn call(
        self,
        comm: P,
        buffers: &mut Buffers<'_>,
        request: PP,
    ) -> Result<ResultCode, DoesNotFit> {
        let mut sizes = ints(buffers.sizes)?;
        let n = int(buffers.data.len())?;
        let Buffers { data, mhandles, .. } = buffers;
        // SAFETY: the caller promises buffers that were received into.
        Ok(unsafe {
            match self {
                Iflush::V4(iflush) => iflush(comm, data[0], sizes[0], mhandles[0], request),
                Iflush::V5(iflush) => {
                    iflush(comm, n, data.as_mut_ptr(), sizes.as_mut_ptr(), mhandles.as_mut_ptr(), request)
                }
            }
        })
    }
}

impl MakeVDevice {
    /// Most devices that one virtual device may merge.
    pub fn limit(self) -> usize {
        match self {
            MakeVDevice::V9(_) => VIRTUAL_DEVICES_MAX_V9,
            MakeVDevice::V12(_) => VIRTUAL_DEVICES_MAX_V12,
        }
    }

    /// # Safety
    /// `device` is writable, and there are at most [`MakeVDevice::limit`] devices.
    pub unsafe fn call(self, device: *mut c_int, devices: &[c_int]) -> ResultCode {
        let ndevs = devices.len() as c_int;
        // SAFETY: the caller promises a writable index and no more devices than the limit.
        unsafe {
            match self {
                MakeVDevice::V9(call) => {
                    let mut props = VDevicePropsV9 { ndevs, ..VDevicePropsV9::zeroed() };
                    props.devs[..devices.len()].copy_from_slice(devices);
                    call(device, &mut props)
                }
                MakeVDevice::V12(call) => {
                    let mut props = VDevicePropsV12 { ndevs, ..VDevicePropsV12::zeroed() };
                    props.devs[..devices.len()].copy_from_slice(devices);
                    call(device, &mut props)
                }
            }
        }
    }
}
