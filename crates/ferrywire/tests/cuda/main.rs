//! Memory of CUDA GPUs.
//!
//! `captured`, `device`, `foreign`, `gather`, `held`, `joined`, `nic`, `outcomes`, `pattern` and `rounds` need a GPU and say `SKIPPED` without one.
//! `without` shows what is said where something is missing, and runs them again with a stand-in for the driver (`stand_in.c`),
//! and again with one that runs kernels on the CPU, which `launched` needs. `failed_calls` needs a stand-in. `freed`, `over_plugin` and `uncompiled` need `libferrywire_tcpx_sim.so` beside
//! this program, and takes a GPU where there is one, else such a stand-in. `kernel` runs the kernels' source on the CPU.

mod captured;
#[allow(dead_code, reason = "the plugin's own tests use all of it")]
#[path = "../../../ferrywire-tcpx-sim/tests/rules/case.rs"]
mod case;
mod device;
mod driver;
#[allow(dead_code, reason = "other tests use all of it")]
#[path = "../plugin/ends.rs"]
mod ends;
mod failed_calls;
mod foreign;
mod freed;
mod gather;
mod gpus;
mod held;
mod joined;
mod kernel;
mod launched;
mod nic;
mod occupied;
mod outcomes;
#[path = "../plugin/gpu.rs"]
mod over_plugin;
mod pattern;
#[path = "../../../ferrywire-devmem/tests/devmem/recorded.rs"]
mod recorded;
mod rounds;
mod uncompiled;
mod without;

use ferrywire::{Endpoint, Peer, Region};
use ferrywire_memory::cuda::{CudaError, CudaGpu};
use std::ffi::{CStr, c_void};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

/// GPU 0, or `None` and a word about it.
fn gpu() -> Option<Arc<CudaGpu>> {
    match CudaGpu::open(0) {
        Ok(gpu) => Some(gpu),
        Err(CudaError::NoDriver | CudaError::NoDevice) => {
            println!("SKIPPED: needs a CUDA device");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Whether it is a GPU's, and not what stands in for one.
fn is_real(gpu: &CudaGpu) -> bool {
    !gpu.name().starts_with("stand-in")
}

/// A function of the stand-in; `None` where the driver is another.
fn of_stand_in(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: names with their ends; the library is loaded already, or is not.
    let found = unsafe {
        let driver = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD);
        if driver.is_null() { driver } else { libc::dlsym(driver, name.as_ptr()) }
    };
    (!found.is_null()).then_some(found)
}

/// Set in a process in which only one test runs.
const ALONE: &str = "FERRYWIRE_CUDA_ALONE";

/// Whether this is a process in which only that test runs. If not, starts one, sees it pass, and answers no.
fn is_alone(test: &str) -> bool {
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    passes(test, &[]);
    false
}

/// Sees a test pass in a process of its own.
fn passes(test: &str, variables: &[(&str, &str)]) {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", test, "--nocapture"]).env(ALONE, "1").envs(variables.iter().copied());
    let output = child.output().unwrap();
    let said =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
    println!("{said}");
}

/// After something went wrong: the GPU and the connection are as good as before.
fn still_moves(connecting: &Endpoint, near: &Peer, target: &Region, bytes: usize) {
    moves(near, &connecting.alloc_cuda(0, bytes).unwrap(), target, 7);
}

/// All of one region is written to the beginning of another.
fn moves(near: &Peer, source: &Region, target: &Region, salt: u8) {
    const LONG: Duration = Duration::from_secs(60);
    let bytes = source.len() as usize;
    source.write_at(0, &vec![salt; bytes]).unwrap();
    let write = near.write(source, 0, &target.descriptor(), 0, bytes as u64).unwrap();
    assert_eq!(write.wait(LONG), Ok(bytes as u64));
    let mut seen = vec![0; bytes];
    target.read_at(0, &mut seen).unwrap();
    assert!(seen.iter().all(|byte| *byte == salt));
}

/// The GPU after it, if there is one; else the same again.
fn other_gpu(gpu: &Arc<CudaGpu>) -> Arc<CudaGpu> {
    CudaGpu::open(1).unwrap_or_else(|_| {
        println!("SKIPPED in part: needs two CUDA devices");
        gpu.clone()
    })
}
