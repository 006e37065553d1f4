//! The user's assignment of NICs to GPUs (`--gpu-nics`).
//!
//! Read next: `pool.rs`, which checks and applies it.

use std::collections::BTreeMap;
use std::str::FromStr;

use super::Cpus;
use ferrywire_proto::limits::CUDA_GPUS_MAX;

const FORM: &str = "write it as GPU=NIC,..., for example 0=eth1,1=eth2, or 0-1=eth1,eth2 for several of each";

/// NICs by GPU, as typed: `0=eth1,eth2,1=eth1,2-7=eth3`. A name without a GPU belongs to the GPU before it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Map {
    /// The NICs of each named GPU, in the order of the text.
    pub nics: BTreeMap<u32, Vec<String>>,
}

impl Map {
    /// One entry in the syntax of the flag, for errors.
    pub(super) fn shown(gpu: u32, nic: &str) -> String {
        format!("--gpu-nics {gpu}={nic}")
    }
}

impl FromStr for Map {
    type Err = String;

    fn from_str(text: &str) -> Result<Map, String> {
        let mut map = Map::default();
        let mut gpus = Cpus::default();
        for item in text.split(',').map(str::trim) {
            let nic = match item.split_once('=') {
                Some((named, nic)) => {
                    gpus = numbers(named)?;
                    if let Some(twice) = gpus.iter().find(|gpu| map.nics.contains_key(gpu)) {
                        return Err(format!("GPU {twice} is named twice: name it once"));
                    }
                    nic.trim()
                }
                None if gpus.is_empty() => return Err(format!("no GPU before {item:?}; {FORM}")),
                None => item,
            };
            if nic.is_empty() {
                return Err(format!("a NIC name is empty; {FORM}"));
            }
            for gpu in gpus.iter() {
                let nics = map.nics.entry(gpu).or_default();
                if nics.iter().any(|known| known == nic) {
                    return Err(format!("{nic} is named twice for GPU {gpu}: name it once"));
                }
                nics.push(nic.to_owned());
            }
        }
        Ok(map)
    }
}

fn numbers(text: &str) -> Result<Cpus, String> {
    let most = CUDA_GPUS_MAX - 1;
    let gpus: Cpus = text.trim().parse().map_err(|()| format!("{text:?} is not a GPU number; {FORM}"))?;
    match gpus.iter().last() {
        None => Err(format!("no GPU before {:?}; {FORM}", "=")),
        Some(last) if last as usize > most => {
            Err(format!("GPU {last} is out of range: GPUs are numbered 0 to {most}"))
        }
        Some(_) => Ok(gpus),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Vec<(u32, String)> {
        let map: Map = text.parse().unwrap_or_else(|why| panic!("{text}: {why}"));
        map.nics.into_iter().map(|(gpu, nics)| (gpu, nics.join("+"))).collect()
    }

    #[test]
    fn several_nics_and_several_gpus() {
        let one = |gpu, nics: &str| (gpu, nics.to_owned());
        assert_eq!(read("0=eth1"), [one(0, "eth1")]);
        assert_eq!(read("1=eth2,0=eth1"), [one(0, "eth1"), one(1, "eth2")]);
        assert_eq!(read("0=eth1,eth2, 1=eth3"), [one(0, "eth1+eth2"), one(1, "eth3")]);
        assert_eq!(read("0-1=eth1,eth2"), [one(0, "eth1+eth2"), one(1, "eth1+eth2")]);
    }

    #[test]
    fn each_mistake_is_said() {
        let said = [
            ("", "no GPU before \"\""),
            ("eth1", "no GPU before \"eth1\""),
            ("=eth1", "no GPU before \"=\""),
            ("x=eth1", "\"x\" is not a GPU number"),
            ("0=", "a NIC name is empty"),
            ("0=eth1,", "a NIC name is empty"),
            ("0=eth1,0=eth2", "GPU 0 is named twice"),
            ("0=eth1,eth1", "eth1 is named twice for GPU 0"),
            ("64=eth1", "numbered 0 to 63"),
            ("3-1=eth1", "\"3-1\" is not a GPU number"),
        ];
        for (text, part) in said {
            let why = text.parse::<Map>().expect_err(text);
            assert!(why.contains(part), "{text}: {why}");
        }
    }
}
