//! One NIC that moves payload without copies: queues that are the endpoint's own, and the pool bound to them.
//!
//! Invariant: a device ends in order: first what steers, with the claim that it has, then the pool that the queues fill.
//! Read next: `nic.rs`, how queues are taken and given back; `pool.rs`; `steering.rs`.

use super::NAME;
use super::config::DevmemConfig;
use super::nic::{Claim, Rule, Wish};
use super::pool::Pool;
use super::sources::Bindings;
use super::steering::Steering;
use ferrywire_memory::Gpu;
use ferrywire_memory::unpack::UnpackMode;
use std::net::SocketAddr;
use std::time::Instant;

/// One NIC's queues with the pool that they fill.
pub(crate) struct Device {
    name: String,
    index: u32,
    binding: u32,
    bindings: Bindings,
    // Ends before the claim does, and the claim before the pool is gone, to which it is bound.
    steering: Steering,
    pool: Pool,
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Device({}, {} bytes in {})", self.name, self.pool.bytes(), self.pool.location())
    }
}

impl Device {
    /// Takes queues of a NIC, and binds them to a pool of this GPU's memory, else of the host's.
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
            steering: Steering::new(name, claim)
                .map_err(|error| format!("no thread that removes rules: {error}"))?,
            pool,
        })
    }

    /// The NIC's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The kernel's number of the NIC.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// The kernel's number of the pool.
    pub fn binding(&self) -> u32 {
        self.binding
    }

    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    pub fn bindings(&self) -> &Bindings {
        &self.bindings
    }

    /// Sends what arrives of a connection to our queues. May wait for others who change the NIC's settings.
    pub fn steer(&self, local: SocketAddr, remote: SocketAddr) -> Result<Rule, String> {
        self.steering.steer(local, remote).map_err(|error| error.to_string())
    }

    /// Gives the queues back. Waits until then, at most, for others who change the NIC.
    pub fn end(&self, by: Instant) {
        self.steering.end(by);
    }

    /// Removes a rule, without waiting for that.
    pub fn unsteer_later(&self, rule: Rule) {
        self.steering.unsteer_later(rule);
    }
}
