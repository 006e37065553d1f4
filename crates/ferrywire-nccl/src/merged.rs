//! Devices made of several NICs. NCCL asks for them for NICs that are close together, and uses each as one fast NIC.
//!
//! After it has loaded the plugin, NCCL counts the plain devices, asks for merged ones, and counts again. If it unloads
//! the plugin and loads it again, versions from 2.28 on repeat all of this, while earlier versions keep the numbers. So
//! the count starts anew, and the devices stay. Versions before 2.27 also ask for single NICs, and forget all NICs that
//! are not counted along with a merged device; so single NICs are counted once more.
//!
//! NCCL looks for a merged device near its members' PCI functions. If the members have no PCI function, or the same
//! one, NCCL would no longer find the device and would have no NIC. The plugin refuses such a merge, which NCCL asks
//! for by itself, and NCCL continues without it. Invariants: merged devices are numbered after the plain ones, in the
//! order of the requests; a repeated request returns the same device; no merged device contains a merged one.

use std::cell::Cell;
use std::ffi::CString;
use std::sync::Mutex;

use ferrywire_ncclnet::abi::HANDLE_BYTES;

use crate::comm::locked;
use crate::device::{self, Device};
use crate::failure::{Fault, Outcome};
use crate::handle;
use crate::log;

/// The merged devices of a process.
struct Merged {
    made: Vec<&'static Device>,
    /// Number of merged devices that NCCL asked for since it last started the plugin.
    counted: usize,
    /// Whether NCCL asked for a device of a single NIC.
    asked_alone: bool,
}

static MERGED: Mutex<Merged> = Mutex::new(Merged::new());

thread_local! {
    /// Whether NCCL has started the plugin on this thread and has asked for no device since.
    static BEGINS: Cell<bool> = const { Cell::new(false) };
}

/// Notes that NCCL has started the plugin.
pub fn begin() {
    BEGINS.set(true);
}

/// Number of devices, merged ones included; without them directly after a start.
pub fn count() -> Outcome<usize> {
    let plain = device::devices()?;
    let mut merged = locked(&MERGED);
    if BEGINS.take() {
        merged.begin()
    } else {
        merged.add_alone(plain)
    }
    Ok(plain.len() + merged.counted)
}

/// The device with this number; an error if there is none.
pub fn device(number: i32) -> Outcome<&'static Device> {
    let plain = device::devices()?;
    let found = usize::try_from(number).ok().and_then(|index| match plain.get(index) {
        None => locked(&MERGED).made.get(index - plain.len()).copied(),
        plain => plain,
    });
    found.ok_or_else(|| Fault::usage(format_args!("there is no device {number}")))
}

/// The number of the device that is merged of `members`; makes it at the first request.
pub fn merge(members: &[i32]) -> Outcome<i32> {
    BEGINS.set(false);
    let plain = device::devices()?;
    let checked = check(plain, members)?;
    if let Some(why) = misplaced(&checked).filter(|_| !may_merge_any()) {
        log::info(format_args!("devices {members:?} are not merged: {why}"));
        return Err(Fault { why: String::new(), ..Fault::usage(why) });
    }
    let mut merged = locked(&MERGED);
    if let [alone] = members {
        merged.asked_alone = true;
        return Ok(*alone);
    }
    let before = merged.counted;
    let index = merged.number(members, || Box::leak(Box::new(made_of(&checked))));
    let number = (plain.len() + index) as i32;
    if merged.counted > before {
        let device = merged.made[index];
        let (name, speed) = (device.name.to_string_lossy(), device.speed_mbps);
        log::info(format_args!("device {number}: {name}, {speed} Mbit/s"));
    }
    Ok(number)
}

impl Merged {
    const fn new() -> Merged {
        Merged { made: Vec::new(), counted: 0, asked_alone: false }
    }

    fn begin(&mut self) {
        self.counted = 0;
        self.asked_alone = false;
    }

    /// Counts single NICs beside merged devices, for a version of NCCL that asks for them.
    fn add_alone(&mut self, plain: &[Device]) {
        if !self.asked_alone || self.counted == 0 {
            return;
        }
        for device in plain {
            let has = |other: &&Device| other.members.contains(&device.members[0]);
            if !self.made[..self.counted].iter().copied().any(|other| has(&other)) {
                self.number(&device.members, || Box::leak(Box::new(made_of(&[device]))));
            }
        }
    }

    /// Index of the device among the merged ones. The device may exist from before NCCL started the plugin again.
    fn number(&mut self, members: &[i32], make: impl FnOnce() -> &'static Device) -> usize {
        let counted = self.counted;
        if let Some(index) = self.made[..counted].iter().position(|device| device.members == members) {
            return index;
        }
        match self.made.get(counted) {
            Some(device) if device.members == members => {}
            Some(_) => self.made[counted] = make(),
            None => self.made.push(make()),
        }
        self.counted += 1;
        counted
    }
}

/// The devices with these numbers; an error if they cannot be merged.
fn check<'a>(plain: &'a [Device], members: &[i32]) -> Outcome<Vec<&'a Device>> {
    let refused = |why: String| Fault::usage(format_args!("devices {members:?} cannot be merged: {why}"));
    let find = |(k, number): (usize, &i32)| {
        if members[..k].contains(number) {
            return Err(refused(format!("device {number} is named twice")));
        }
        let found = usize::try_from(*number).ok().and_then(|index| plain.get(index));
        found.ok_or_else(|| refused(format!("there is no device {number} that is a single NIC")))
    };
    let found = members.iter().enumerate().map(find).collect::<Outcome<Vec<_>>>()?;
    let fitting =
        handle::fitting(found.iter().flat_map(|device| &device.nics).map(|nic| nic.address), HANDLE_BYTES);
    match found.len() {
        0 => Err(refused("the list of devices is empty".into())),
        count if count > fitting => Err(refused(format!("at most {fitting} NICs fit into a handle"))),
        _ => Ok(found),
    }
}

/// Why NCCL would not find a device that is merged of these; `None` if it would.
fn misplaced(devices: &[&Device]) -> Option<&'static str> {
    let paths: Vec<_> = devices.iter().map(|device| &device.pci_path).collect();
    let twice = |(k, path): (usize, _)| paths[..k].contains(path);
    match paths.len() {
        1 => None,
        _ if paths.iter().any(|path| path.is_none()) => Some("NCCL merges PCI devices only"),
        _ if paths.iter().enumerate().any(twice) => Some("NCCL does not merge ports of one PCI function"),
        _ => None,
    }
}

/// Whether NICs may be merged wherever they are, for programs that are not NCCL.
fn may_merge_any() -> bool {
    std::env::var("FERRYWIRE_NCCL_MERGE").is_ok_and(|value| value == "any")
}

fn made_of(devices: &[&Device]) -> Device {
    let names: Vec<&[u8]> = devices.iter().map(|device| device.name.as_bytes()).collect();
    Device {
        nics: devices.iter().flat_map(|device| device.nics.clone()).collect(),
        members: devices.iter().flat_map(|device| device.members.clone()).collect(),
        name: CString::new(names.join(&b'+')).unwrap_or_default(),
        pci_path: devices[0].pci_path.clone(),
        speed_mbps: devices.iter().fold(0, |sum, device| sum.saturating_add(device.speed_mbps)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrywire_net::Nic;

    fn plain(count: i32, family: &str) -> Vec<Device> {
        let nic = |k: i32| Nic {
            name: format!("no-such-nic{k}"),
            address: family.replace('K', &k.to_string()).parse().unwrap(),
            prefix_len: 24,
            speed_mbps: Some(25_000 + k as u32),
            loopback: false,
            up: true,
        };
        (0..count).map(|k| Device::of(k, nic(k))).collect()
    }

    fn made(plain: &[Device], members: &[i32]) -> &'static Device {
        Box::leak(Box::new(made_of(&check(plain, members).unwrap())))
    }

    #[test]
    fn a_merged_device_has_what_its_members_have_together() {
        let mut plain = plain(3, "10.0.K.1");
        plain[2].pci_path = Some(c"/sys/devices/pci0000:00/0000:00:04.0".into());
        let device = made(&plain, &[2, 0]);
        assert_eq!((device.name.as_c_str(), device.speed_mbps), (c"no-such-nic2+no-such-nic0", 50_002));
        assert_eq!((&device.members[..], &device.pci_path), (&[2, 0][..], &plain[2].pci_path));
        assert_eq!(device.nics[0].address, plain[2].nics[0].address);
        plain[0].speed_mbps = i32::MAX;
        assert_eq!(made(&plain, &[0, 1]).speed_mbps, i32::MAX);
    }

    #[test]
    fn devices_that_cannot_be_merged_are_refused_with_the_reason() {
        let why = |plain: &[Device], members: &[i32]| check(plain, members).unwrap_err().why;
        let four = plain(4, "10.0.K.1");
        for members in [&[0, 4][..], &[-1, 0], &[i32::MIN], &[i32::MAX, 1]] {
            assert!(why(&four, members).contains("there is no device"), "{members:?}");
        }
        assert!(why(&four, &[0, 1, 0]).contains("0 is named twice"));
        assert!(why(&four, &[]).contains("list of devices is empty"));
        assert_eq!(check(&plain(8, "10.0.K.1"), &[7, 6, 5, 4, 3, 2, 1, 0]).unwrap().len(), 8);
        assert!(why(&plain(9, "10.0.K.1"), &[0, 1, 2, 3, 4, 5, 6, 7, 8]).contains("at most 8 NICs"));
        assert!(why(&plain(5, "2001:db8::K"), &[0, 1, 2, 3, 4]).contains("at most 4 NICs"));
    }

    #[test]
    fn devices_that_nccl_would_not_find_are_not_merged() {
        let mut plain = plain(3, "10.0.K.1");
        let why = |plain: &[Device], members: &[i32]| misplaced(&check(plain, members).unwrap());
        assert!(why(&plain, &[0, 1]).is_some_and(|why| why.contains("PCI devices only")));
        assert_eq!(why(&plain, &[2]), None);
        plain[0].pci_path = Some(c"/sys/devices/pci0000:00/0000:00:04.0".into());
        plain[1].pci_path = Some(c"/sys/devices/pci0000:00/0000:00:04.1".into());
        assert_eq!(why(&plain, &[1, 0]), None);
        assert!(why(&plain, &[1, 0, 2]).is_some());
        plain[2].pci_path = plain[0].pci_path.clone();
        assert!(why(&plain, &[0, 1, 2]).is_some_and(|why| why.contains("one PCI function")));
    }

    #[test]
    fn the_same_ones_are_the_same_device_also_after_a_new_beginning() {
        let plain = plain(4, "10.0.K.1");
        let mut merged = Merged::new();
        let number = |merged: &mut Merged, members: &[i32]| merged.number(members, || made(&plain, members));
        for _ in 0..2 {
            assert_eq!([number(&mut merged, &[0, 1]), number(&mut merged, &[2, 3])], [0, 1]);
            assert_eq!(number(&mut merged, &[1, 0]), 2);
            assert_eq!((number(&mut merged, &[2, 3]), merged.counted, merged.made.len()), (1, 3, 3));
            merged.begin();
        }
        // Other members than before the restart.
        assert_eq!((number(&mut merged, &[2, 3]), &merged.made[0].members[..]), (0, &[2, 3][..]));
        assert_eq!((merged.counted, merged.made.len()), (1, 3));
    }

    #[test]
    fn nics_beside_merged_ones_are_counted_where_nccl_asks_for_any() {
        let plain = plain(5, "10.0.K.1");
        let mut merged = Merged::new();
        // A version that asks for single NICs and has merged none.
        merged.asked_alone = true;
        merged.add_alone(&plain);
        assert_eq!(merged.counted, 0);
        merged.begin();
        merged.number(&[1, 3], || made(&plain, &[1, 3]));
        merged.add_alone(&plain);
        assert_eq!(merged.counted, 1, "a version that does not ask for them");
        merged.asked_alone = true;
        for _ in 0..2 {
            merged.add_alone(&plain);
            let members: Vec<_> = merged.made.iter().map(|device| &device.members[..]).collect();
            assert_eq!((merged.counted, members), (4, vec![&[1, 3][..], &[0], &[2], &[4]]));
        }
        assert_eq!(merged.made[2].name, plain[2].name);
    }
}
