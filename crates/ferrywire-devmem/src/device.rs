//! One NIC whose payload moves without copies: the queues that the endpoint has taken, and the pool bound to them.
//!
//! Invariant: a device ends in order: first steering with its claim, then the pool that the queues fill.
//! Read next: `nic.rs`, how queues are taken and returned; `pool.rs`; `steering.rs`.

use super::NAME;
use super::config::DevmemConfig;
use super::nic::{Claim, Rule, Wish};
use super::pool::Pool;
use super::sources::Bindings;
use super::steering::Steering;
use ferrywire_memory::Gpu;
use ferrywire_memory::unpack::UnpackMode;
use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Time for which a pool counts as held after it was noted; longer than between two notes and between two checks of
/// a lane.
const HELD_FOR: Duration = Duration::from_secs(1);

/// The queues that an endpoint has claimed of a NIC, with the pool that they fill.
pub(crate) struct Device {
    name: String,
    index: u32,
    binding: u32,
    bindings: Bindings,
    /// Time until which a GPU counts as holding payload in the pool, which all lanes of the NIC share.
    held_until: Mutex<Option<Instant>>,
    // Dropped before the pool: the claim that `steering` ends has queues that are bound to the pool.
    steering: Steering,
    pool: Pool,
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Device({}, {} bytes in {})", self.name, self.pool.bytes(), self.pool.location())
    }
}

impl Device {
    /// Takes queues of a NIC and binds them to a pool in this GPU's memory, or in host memory.
    ///
    /// # Errors
    /// The NIC does not support devmem TCP, has no free queue, or needs settings that must not be changed.
    pub fn open(name: &str, config: &DevmemConfig, gpu: Option<&Gpu>) -> Result<Device, String> {
        let wish = Wish { queues: config.queues, allow_nic_setup: config.allow_nic_setup };
        let mut claim = Claim::new(name, &wish).map_err(|error| error.to_string())?;
        let gpu = gpu.filter(|_| config.unpack != UnpackMode::Host);
        let pool = Pool::new(gpu, config.pool_bytes).map_err(|error| error.to_string())?;
        let binding = claim.bind(pool.dmabuf()).map_err(|error| error.to_string())?;
        let (place, mib) = (pool.location(), pool.bytes() >> 20);
        tracing::info!(nic = name, "{NAME}: {} bound to a pool of {mib} MiB in {place}", claim.describe());
        Ok(Device {
            name: name.to_owned(),
            index: claim.index(),
            binding,
            bindings: Bindings::default(),
            held_until: Mutex::default(),
            steering: Steering::new(name, claim)
                .map_err(|error| format!("cannot start the thread that removes flow rules: {error}"))?,
            pool,
        })
    }

    /// A device of a simulated NIC, to whose pool nothing is bound.
    #[cfg(test)]
    pub fn simulated() -> Device {
        let claim = super::nic::simulated_claim();
        Device {
            name: "lo".to_owned(),
            index: claim.index(),
            binding: 1,
            bindings: Bindings::default(),
            held_until: Mutex::default(),
            steering: Steering::new("lo", claim).expect("a thread"),
            pool: Pool::simulated(),
        }
    }

    /// Name of the device's NIC.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The kernel's index of the NIC.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// The kernel's id of the pool's binding.
    pub fn binding(&self) -> u32 {
        self.binding
    }

    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    pub fn bindings(&self) -> &Bindings {
        &self.bindings
    }

    /// Notes that payload in the pool has waited long for a GPU.
    pub fn note_held(&self) {
        *self.held() = Some(Instant::now() + HELD_FOR);
    }

    /// Whether payload in the pool has waited long for a GPU, so that the pool may have no free buffers.
    pub fn is_held(&self) -> bool {
        self.held().is_some_and(|until| Instant::now() < until)
    }

    fn held(&self) -> MutexGuard<'_, Option<Instant>> {
        self.held_until.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Steers a connection's packets to the claimed queues. May wait for other processes that change the NIC's
    /// settings.
    pub fn steer(&self, local: SocketAddr, remote: SocketAddr) -> Result<Rule, String> {
        self.steering.steer(local, remote).map_err(|error| error.to_string())
    }

    /// Returns the claimed queues. Waits for other processes that change the NIC, until `by` at most.
    pub fn end(&self, by: Instant) {
        self.steering.end(by);
    }

    /// Removes a flow rule in the background.
    pub fn unsteer_later(&self, rule: Rule) {
        self.steering.unsteer_later(rule);
    }
}
