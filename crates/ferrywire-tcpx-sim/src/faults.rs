//! The injected faults of a comm, and faults of calls that do not depend on a comm.
//!
//! Counts are per comm, so a fault hits the same request in every run.
//! Read next: `comm.rs`, which injects the faults when posting and testing.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ferrywire_ncclnet::abi::ResultCode;

use crate::comm::Outcome;
use crate::log::{exit_1, segfault, warning};
use crate::plugin::switches;
use crate::switches::{CallFault, Lie, Side, Switches};

/// The direction of a comm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// A comm that sends.
    Send,
    /// A comm that receives.
    Recv,
}

impl Direction {
    /// A letter for the direction in names of threads.
    pub fn letter(self) -> char {
        match self {
            Direction::Send => 's',
            Direction::Recv => 'r',
        }
    }
}

/// The faults of one comm; none if the switches are for other comms.
#[derive(Clone, Debug)]
pub struct Faults {
    /// Number of requests after which posting ends the process.
    pub die_after: Option<u64>,
    /// Number of requests after which posting is a memory fault.
    pub crash_after: Option<u64>,
    /// Number of finished requests after which `test` does not return.
    pub test_hang_after: Option<u64>,
    /// Number of finished requests after which `test` fails once.
    pub test_error_after: Option<u64>,
    /// Number of finished requests after which none finishes any more.
    pub stall_head_after: Option<u64>,
    /// Number of requests after which data socket 0 is shut down.
    pub drop_data_socket_after: Option<u64>,
    /// Number of requests after which only half a control message is written.
    pub half_control_after: Option<u64>,
    /// Number of GPU receives after which control data are missing.
    pub no_cmsg_after: Option<u64>,
    /// How fragments are wrong, from request [`Faults::lie_after`] on.
    pub lie: Lie,
    /// Number of the first request whose fragments are wrong.
    pub lie_after: u64,
    /// Whether socket calls move a random part.
    pub partial_io: bool,
    /// Pause before each socket call, in microseconds.
    pub delay_us: Range<u64>,
    /// Rate of the NIC in bytes per second; 0 for no limit.
    pub rate: u64,
}

impl Faults {
    /// The faults for a comm of this direction on this NIC.
    pub fn of(switches: &Switches, direction: Direction, nic: &str) -> Faults {
        let side = match switches.fault_side {
            Side::Both => true,
            Side::Send => direction == Direction::Send,
            Side::Recv => direction == Direction::Recv,
        };
        let meant = side && switches.fault_nic.as_deref().is_none_or(|name| name == nic);
        let switches = if meant { switches } else { &Switches::default() };
        Faults {
            die_after: switches.die_after,
            crash_after: switches.crash_after,
            test_hang_after: switches.test_hang_after,
            test_error_after: switches.test_error_after,
            stall_head_after: switches.stall_head_after,
            drop_data_socket_after: switches.drop_data_socket_after,
            half_control_after: switches.half_control_after,
            no_cmsg_after: switches.no_cmsg_after,
            lie: switches.lie_fragment,
            lie_after: switches.lie_after,
            partial_io: switches.partial_io,
            delay_us: switches.delay_us.clone(),
            rate: switches.rate,
        }
    }
}

/// Injects the fault that the switches set for a call of the table.
pub fn faulty_call(call: &str) -> Outcome<()> {
    static CALLS: AtomicU64 = AtomicU64::new(0);
    let switches = switches()?;
    if switches.call_fault == CallFault::No || switches.fault_call.as_deref() != Some(call) {
        return Ok(());
    }
    if CALLS.fetch_add(1, Ordering::Relaxed) < switches.call_fault_after {
        return Ok(());
    }
    warning!("{call} is faulty, injected by call_fault");
    match switches.call_fault {
        CallFault::No => Ok(()),
        CallFault::Exit => exit_1(format_args!("{call}, injected by call_fault")),
        CallFault::Crash => segfault(format_args!("{call}, injected by call_fault")),
        CallFault::Sigpipe => {
            // SAFETY: no memory is passed.
            unsafe { libc::raise(libc::SIGPIPE) };
            Ok(())
        }
        CallFault::Hang => loop {
            std::thread::sleep(Duration::from_secs(3600));
        },
        CallFault::Error => Err(ResultCode::SYSTEM_ERROR),
        CallFault::Panic => panic!("injected by call_fault"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_for_the_side_and_nic_they_name() {
        let switches = Switches::parse("die_after=3,rate=9,fault_side=recv,fault_nic=eth1").unwrap();
        let of = |direction, nic| Faults::of(&switches, direction, nic).die_after;
        assert_eq!(of(Direction::Recv, "eth1"), Some(3));
        assert_eq!(of(Direction::Send, "eth1"), None);
        assert_eq!(of(Direction::Recv, "eth2"), None);
    }
}
