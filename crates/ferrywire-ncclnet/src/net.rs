//! A started plugin, with one interface for all versions.
//!
//! Invariants: `init` runs once per table and process; `clock.rs` records every call while it runs; a failed
//! call returns one [`CallError`]; a value that the plugin did not write is never used.
//! Read next: `comm.rs`, the connections.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use libloading::os::unix::Library as Handle;

use super::abi::*;
use super::clock::{self, Call, InflightCall, PluginId};
use super::comm::CommId;
use super::error::{CallError, Cause, LoadError};
use super::functions::Functions;
use super::load::{FoundTable, functions_at, name_at};
use super::properties::{self, Properties};
use super::{comm, ending, log};
use ferrywire_proto::limits::{PLUGIN_DEVICES_MAX, PLUGINS_MAX};

/// Counts what must end before the plugin may be finalized.
#[derive(Debug, Default)]
struct Uses {
    /// Number of open connections, and of attempts that the plugin has not answered.
    open: usize,
    /// Number of calls under way that concern no connection.
    calls: usize,
    finalized: bool,
}

/// A started plugin. Clones refer to one plugin, which stays loaded until the process ends.
///
/// Any thread may call its functions, and several at once as far as the plugin allows: only one thread at a
/// time may call `accept` of GPUDirect-TCPX, whatever the listener (`docs/plugins.md`). Only one thread
/// at a time may use a connection.
#[derive(Clone, Debug)]
pub struct Plugin(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    id: PluginId,
    path: String,
    version: Version,
    functions: Functions,
    name: Arc<str>,
    name_before_init: String,
    /// The plugin's context, which `init` returns since v11; null before.
    context: *mut c_void,
    /// Configuration of the communicator, which the plugin may read for as long as it runs.
    config: *mut CommConfig,
    devices: c_int,
    nics: Mutex<Vec<Option<Arc<str>>>>,
    uses: Mutex<Uses>,
    table: *const c_void,
}

// SAFETY: the pointers are to the plugin's own context and to statics of its library, which it must accept
// from any thread, and to a configuration that is never changed after `init`.
unsafe impl Send for Inner {}
// SAFETY: the pointers may be used from any thread; every field that changes is atomic or behind a lock.
unsafe impl Sync for Inner {}

/// A call under way that concerns no connection. The plugin cannot be finalized before this value is dropped.
struct CountedCall<'a>(&'a Plugin);

impl Drop for CountedCall<'_> {
    fn drop(&mut self) {
        self.0.uses().calls -= 1;
    }
}

const FINALIZED: Cause = Cause::Misuse("the plugin was finalized");

/// A table whose `init` was called.
struct Started {
    /// Address of the table.
    table: usize,
    id: PluginId,
    /// Outcome of `init`; `None` after the plugin was finalized.
    outcome: Option<Result<Plugin, LoadError>>,
}

static STARTED: Mutex<Vec<Started>> = Mutex::new(Vec::new());

fn started() -> MutexGuard<'static, Vec<Started>> {
    STARTED.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Plugin {
    /// Name of the plugin after `init`, which may change it.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Name of the plugin before `init`, with which `NCCL_NET` selects it.
    pub fn name_before_init(&self) -> &str {
        &self.0.name_before_init
    }

    /// Version of the interface through which the plugin is called.
    pub fn version(&self) -> Version {
        self.0.version
    }

    /// Path of the plugin's library.
    pub fn path(&self) -> &str {
        &self.0.path
    }

    /// Number of devices when the plugin started, at least 1; indices count from 0.
    pub fn devices(&self) -> i32 {
        self.0.devices
    }

    /// Asks the plugin for the current number of devices; virtual devices may have been added.
    pub fn count_devices(&self) -> Result<i32, CallError> {
        let mut count = 0;
        let devices = self.0.functions.devices;
        // SAFETY: the pointer is to an integer on this stack.
        self.call(Call::Devices, None, || unsafe { devices(&mut count) })?;
        Ok(count)
    }

    /// The plugin's description of a device.
    pub fn properties(&self, device: i32) -> Result<Properties, CallError> {
        let call = self.0.functions.get_properties;
        let mut properties = None;
        self.call(Call::GetProperties, Some(device), || {
            // SAFETY: the plugin is started, and writes the struct of its version.
            match unsafe { properties::read(call, device) } {
                Ok(read) => {
                    properties = read;
                    ResultCode::SUCCESS
                }
                Err(code) => code,
            }
        })?;
        let nameless = || {
            self.error(Call::GetProperties, Some(device), None, Cause::BadAnswer("the device has no name"))
        };
        let properties = properties.ok_or_else(nameless)?;
        self.remember_nic(device, &properties.name);
        Ok(properties)
    }

    /// Merges devices into a virtual device and returns its index. Needs v9 and a plugin that supports it,
    /// else returns [`Cause::Missing`].
    pub fn make_v_device(&self, devices: &[i32]) -> Result<i32, CallError> {
        let error = |cause| self.error(Call::MakeVDevice, devices.first().copied(), None, cause);
        let call = self.0.functions.make_v_device.ok_or_else(|| error(Cause::Missing))?;
        if devices.len() > call.limit() {
            return Err(error(Cause::Misuse(
                "more devices were given than this version of the interface can merge",
            )));
        }
        let mut made = -1;
        // SAFETY: the index can be written, and the devices fit.
        self.call(Call::MakeVDevice, devices.first().copied(), || unsafe { call.call(&mut made, devices) })?;
        if made < 0 { Err(error(Cause::BadAnswer("gave no device"))) } else { Ok(made) }
    }

    /// Gives the plugin a hint about future traffic. Needs v11 and a plugin that supports it, else returns
    /// [`Cause::Missing`].
    pub fn set_net_attr(&self, attributes: &NetAttr) -> Result<(), CallError> {
        let missing = || self.error(Call::SetNetAttr, None, None, Cause::Missing);
        let call = self.0.functions.set_net_attr.ok_or_else(missing)?;
        let mut attributes = *attributes;
        // SAFETY: the context is the one of `init`, and the attributes are a copy.
        self.call(Call::SetNetAttr, None, || unsafe { call(self.0.context, &mut attributes) })
    }

    /// Ends the plugin's context; v11 and later. The library stays loaded, and a later load starts it again.
    ///
    /// Returns [`Cause::Misuse`] while connections are open or being made, while another call has not returned, and
    /// when the plugin was finalized before.
    pub fn finalize(self) -> Result<(), CallError> {
        let error = |cause| self.error(Call::Finalize, None, None, cause);
        let finalize = self.0.functions.finalize.ok_or_else(|| error(Cause::Missing))?;
        let mut started = started();
        let mut uses = self.uses();
        if uses.finalized {
            return Err(error(FINALIZED));
        }
        if uses.open > 0 {
            return Err(error(Cause::Misuse("connections of the plugin are open, or being made")));
        }
        if uses.calls > 0 {
            return Err(error(Cause::Misuse("a call of the plugin has not returned")));
        }
        uses.finalized = true;
        drop(uses);
        started.iter_mut().filter(|one| one.id == self.0.id).for_each(|one| one.outcome = None);
        // SAFETY: the context is the one of `init`, given back once.
        self.note(Call::Finalize, None, None, || unsafe { finalize(self.0.context) })
    }

    /// Number of connections, listeners included, that were opened and not closed, and of attempts to connect
    /// that the plugin has not answered.
    pub fn open_comms(&self) -> usize {
        self.uses().open
    }

    /// Calls of this plugin that have not returned yet, on any thread, the longest first.
    pub fn inflight_calls(&self) -> Vec<InflightCall> {
        clock::under_way(Some(self.0.id))
    }

    /// Largest range in bytes that one registration can cover.
    pub fn registration_bytes_max(&self) -> usize {
        if self.0.version < Version::V8 { c_int::MAX as usize } else { usize::MAX }
    }

    /// Largest message in bytes that the interface's version allows; a plugin may allow less.
    pub fn message_bytes_max(&self) -> usize {
        if self.0.version < Version::V9 { c_int::MAX as usize } else { usize::MAX }
    }

    /// Whether the plugin wants `irecv_consumed` for each completed receive.
    pub fn has_irecv_consumed(&self) -> bool {
        self.0.functions.irecv_consumed.is_some()
    }

    /// Whether the plugin can register memory by its dma-buf.
    pub fn has_reg_mr_dma_buf(&self) -> bool {
        self.0.functions.reg_mr_dma_buf.is_some()
    }
}

/// Functions for the connections in `comm.rs`.
impl Plugin {
    pub(super) fn functions(&self) -> &Functions {
        &self.0.functions
    }

    pub(super) fn context(&self) -> *mut c_void {
        self.0.context
    }

    pub(super) fn config(&self) -> *mut CommConfig {
        self.0.config
    }

    pub(super) fn id(&self) -> PluginId {
        self.0.id
    }

    fn uses(&self) -> MutexGuard<'_, Uses> {
        self.0.uses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a connection that `call` is about to make. The plugin cannot be finalized before
    /// [`Plugin::count_closed`].
    pub(super) fn count_opening(&self, call: Call, device: i32) -> Result<(), CallError> {
        let mut uses = self.uses();
        if uses.finalized {
            return Err(self.error(call, Some(device), None, FINALIZED));
        }
        uses.open += 1;
        Ok(())
    }

    /// Uncounts a connection that was closed, or was not made.
    pub(super) fn count_closed(&self) {
        self.uses().open -= 1;
    }

    /// Calls a function of the plugin that concerns no connection.
    pub(super) fn call(
        &self,
        call: Call,
        device: Option<i32>,
        run: impl FnOnce() -> ResultCode,
    ) -> Result<(), CallError> {
        let _counted = self.count_call().ok_or_else(|| self.error(call, device, None, FINALIZED))?;
        self.note(call, device, None, run)
    }

    /// Counts a call that concerns no connection; `None` when the plugin was finalized.
    fn count_call(&self) -> Option<CountedCall<'_>> {
        let mut uses = self.uses();
        if uses.finalized {
            return None;
        }
        uses.calls += 1;
        Some(CountedCall(self))
    }

    /// Makes a call, records it while it runs, and converts its result.
    pub(super) fn note(
        &self,
        call: Call,
        device: Option<i32>,
        comm: Option<CommId>,
        run: impl FnOnce() -> ResultCode,
    ) -> Result<(), CallError> {
        let noted = clock::enter(self.0.id, call, device);
        let code = run();
        drop(noted);
        if !code.is_success() {
            return Err(self.error(call, device, comm, Cause::Result(code)));
        }
        Ok(())
    }

    pub(super) fn error(
        &self,
        call: Call,
        device: Option<i32>,
        comm: Option<CommId>,
        cause: Cause,
    ) -> CallError {
        let (plugin, version) = (self.0.name.clone(), self.0.version);
        CallError {
            plugin,
            version,
            call,
            device,
            nic: device.and_then(|device| self.nic(device)),
            comm,
            cause,
        }
    }

    fn nics(&self) -> MutexGuard<'_, Vec<Option<Arc<str>>>> {
        self.0.nics.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn nic(&self, device: i32) -> Option<Arc<str>> {
        self.nics().get(usize::try_from(device).ok()?).cloned().flatten()
    }

    fn remember_nic(&self, device: i32, name: &str) {
        let Some(at) = usize::try_from(device).ok().filter(|&at| at < PLUGIN_DEVICES_MAX) else { return };
        let mut nics = self.nics();
        let room = nics.len().max(at + 1);
        nics.resize(room, None);
        nics[at] = Some(name.into());
    }
}

/// Functions that start a plugin.
impl Plugin {
    /// # Safety
    /// The table is one of the library's, and the library is trusted to run here.
    pub(super) unsafe fn start(library: Handle, found: FoundTable) -> Result<Plugin, LoadError> {
        // Only one plugin starts at a time, as in NCCL, so a second start of a table finds the first one's
        // outcome.
        let mut started = started();
        let key = found.address as usize;
        let known = started.iter().position(|one| one.table == key);
        if let Some(outcome) = known.and_then(|at| started[at].outcome.clone()) {
            return outcome;
        }
        // A table that starts again keeps its id.
        let at = match known {
            Some(at) => at,
            None => {
                let id = Plugin::register(&found)?;
                // From now on the plugin's threads may run the library's code, so the library is never closed.
                std::mem::forget(library);
                started.push(Started { table: key, id, outcome: None });
                started.len() - 1
            }
        };
        // SAFETY: the caller promises a table of the library, which is trusted.
        let outcome = unsafe { Plugin::init(started[at].id, found) };
        started[at].outcome = Some(outcome.clone());
        outcome
    }

    /// The id of a table that starts for the first time.
    fn register(found: &FoundTable) -> Result<PluginId, LoadError> {
        let Some(id) = clock::register(&found.name) else {
            let why =
                format!("limit PLUGINS_MAX = {PLUGINS_MAX} reached: end this process and start another");
            return Err(LoadError::Limit { path: found.path.clone(), why });
        };
        ending::watch(id, found.address);
        Ok(id)
    }

    /// # Safety
    /// The promise of [`Plugin::start`] holds, and the call is the only one for its table.
    unsafe fn init(id: PluginId, found: FoundTable) -> Result<Plugin, LoadError> {
        let mut inner = Inner {
            id,
            version: found.version,
            functions: found.functions,
            name: found.name.as_str().into(),
            name_before_init: found.name,
            context: ptr::null_mut(),
            config: Box::into_raw(Box::new(CommConfig { traffic_class: TRAFFIC_CLASS_UNDEFINED })),
            devices: 0,
            nics: Mutex::new(Vec::new()),
            uses: Mutex::new(Uses::default()),
            table: found.address,
            path: found.path,
        };
        let began = log::next_sequence();
        // SAFETY: the context can be written; configuration and logger live until the process ends.
        let code = unsafe { inner.call_init() };
        // SAFETY: the table still exists, and its name is in slot 0.
        if let Some(name) = unsafe { name_at(inner.table) } {
            clock::rename(id, &name);
            inner.name = name.into();
        }
        // SAFETY: the table still exists. Like NCCL, which reads a slot at each call, this respects a change
        // by `init`.
        let functions = unsafe { functions_at(inner.version, inner.table) };
        let mut plugin = Plugin(Arc::new(inner));
        if !code.is_success() {
            return Err(plugin.failed(plugin.error(Call::Init, None, None, Cause::Result(code)), began));
        }
        let inner = Arc::get_mut(&mut plugin.0).expect("no other code has the plugin yet");
        let (path, version) = (inner.path.clone(), inner.version);
        inner.functions = functions.map_err(|slot| LoadError::MissingSlot { path, version, slot })?;
        plugin.with_devices(began)
    }

    fn with_devices(mut self, began: u64) -> Result<Plugin, LoadError> {
        let count = self.count_devices().map_err(|error| self.failed(error, began))?;
        let (path, plugin, version) = (self.0.path.clone(), self.name().to_owned(), self.version());
        if count <= 0 {
            let said = Box::new(log::lines_since(began));
            return Err(LoadError::NoDevices { path, plugin, version, count, said });
        }
        if count as usize > PLUGIN_DEVICES_MAX {
            let why = format!(
                "limit PLUGIN_DEVICES_MAX = {PLUGIN_DEVICES_MAX}: plugin {plugin} reports {count} devices"
            );
            return Err(LoadError::Limit { path, why });
        }
        Arc::get_mut(&mut self.0).expect("no other code has the plugin yet").devices = count;
        Ok(self)
    }

    fn failed(&self, error: CallError, began: u64) -> LoadError {
        let said = Box::new(log::lines_since(began));
        LoadError::Failed { path: self.0.path.clone(), error: Box::new(error), said }
    }
}

impl Inner {
    /// # Safety
    /// The promise of [`Plugin::start`] holds.
    unsafe fn call_init(&mut self) -> ResultCode {
        let _noted = clock::enter(self.id, Call::Init, None);
        // The id may be any number; v11 plugins only use it to distinguish communicators.
        let comm_id = u64::from(std::process::id()) << 8 | 1;
        // SAFETY: the caller promises a trusted plugin; the configuration is never freed.
        unsafe {
            self.functions.init.call(
                &mut self.context,
                comm_id,
                self.config,
                log::logger(),
                Some(comm::no_profiler),
            )
        }
    }
}
