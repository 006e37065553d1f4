//! The memory that the control groups of this process leave it, which in a container is less than the host's.
//!
//! Read next: `host.rs`, which checks it.

use std::fs;
use std::path::{Path, PathBuf};

/// Bytes that this process can use before a limit of its groups stops it; `None` without a limit.
pub fn available_bytes() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    available_in(Path::new("/sys/fs/cgroup"), &groups)
}

/// A version of the cgroup interface.
struct Interface {
    /// The mount points of its groups, below the usual folder.
    mounts: &'static [&'static str],
    limit: &'static str,
    used: &'static str,
    /// Entries of `memory.stat` that the kernel reclaims before it kills a process: above all cached files.
    reclaimable: &'static [&'static str],
}

const V1: Interface = Interface {
    mounts: &["memory"],
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    reclaimable: &["total_inactive_file", "total_active_file"],
};
const V2: Interface = Interface {
    mounts: &["", "unified"],
    limit: "memory.max",
    used: "memory.current",
    reclaimable: &["inactive_file", "active_file", "slab_reclaimable"],
};

/// Bytes that the control groups of a process leave it. `groups` has the format of `/proc/self/cgroup`:
/// number, controllers and path, one line per hierarchy.
fn available_in(mounted: &Path, groups: &str) -> Option<u64> {
    let of_line = |line: &str| {
        let mut parts = line.splitn(3, ':');
        let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        let interface = match controllers {
            "" => V2,
            _ if controllers.split(',').any(|controller| controller == "memory") => V1,
            _ => return None,
        };
        let folders = interface.mounts.iter().map(|mount| mounted.join(mount));
        folders.filter_map(|folder| interface.available_from(&folder, path)).min()
    };
    groups.lines().filter_map(of_line).min()
}

impl Interface {
    /// The bytes that this group and all groups above it leave. In a container without a cgroup namespace the path may
    /// not exist; then the container's own group is the root.
    fn available_from(&self, root: &Path, path: &str) -> Option<u64> {
        let own = Path::new(path.trim_start_matches('/'));
        own.ancestors().filter_map(|group| self.available_at(&root.join(group))).min()
    }

    fn available_at(&self, group: &Path) -> Option<u64> {
        // A group without a limit has `max`, or in version 1 a number near the largest.
        let limit = number(group.join(self.limit)).filter(|&limit| limit < i64::MAX as u64 / 2)?;
        let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
        let entries = stat.lines().filter_map(|line| line.split_once(' '));
        let reclaimable = entries.filter(|(name, _)| self.reclaimable.contains(name));
        let reclaimable = reclaimable.filter_map(|(_, bytes)| bytes.trim().parse::<u64>().ok()).sum();
        let used = number(group.join(self.used))?.saturating_sub(reclaimable);
        Some(limit.saturating_sub(used))
    }
}

fn number(path: PathBuf) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(root: &Path, path: &str, files: &[(&str, &str)]) {
        let folder = root.join(path);
        fs::create_dir_all(&folder).unwrap();
        files.iter().for_each(|(name, text)| fs::write(folder.join(name), text).unwrap());
    }

    fn v2<'a>(limit: &'a str, used: &'a str, stat: &'a str) -> [(&'static str, &'a str); 3] {
        [("memory.max", limit), ("memory.current", used), ("memory.stat", stat)]
    }

    #[test]
    fn the_tightest_group_on_the_way_up_counts() {
        let root = tempfile::tempdir().unwrap();
        let available = |groups: &str| available_in(root.path(), groups);
        assert_eq!(available("0::/a/b\n"), None, "nothing is mounted");
        group(root.path(), "a/b", &v2("max\n", "700\n", ""));
        assert_eq!(available("0::/a/b\n"), None);
        group(
            root.path(),
            "a",
            &v2(
                "1000\n",
                "900\n",
                "anon 500\ninactive_file 300\nactive_file 60\nslab_reclaimable 40\nslab 90\n",
            ),
        );
        assert_eq!(available("0::/a/b\n"), Some(500));
        group(root.path(), "a/b", &v2("800\n", "900\n", ""));
        assert_eq!(available("0::/a/b\n"), Some(0));
        assert_eq!(available("0::/other\n"), None);
        assert_eq!(available("no groups at all"), None);
    }

    #[test]
    fn a_container_sees_its_own_group_as_the_root() {
        let root = tempfile::tempdir().unwrap();
        group(root.path(), "", &v2("5000", "1000", ""));
        assert_eq!(available_in(root.path(), "0::/kubepods/pod7/c3\n"), Some(4000));
    }

    #[test]
    fn the_old_interface_has_other_names() {
        let root = tempfile::tempdir().unwrap();
        let v1 = |limit, used, stat| {
            [("memory.limit_in_bytes", limit), ("memory.usage_in_bytes", used), ("memory.stat", stat)]
        };
        group(root.path(), "memory", &v1("9223372036854771712\n", "1\n", ""));
        group(
            root.path(),
            "memory/docker/x",
            &v1("4096\n", "1000\n", "inactive_file 1\ntotal_inactive_file 450\ntotal_active_file 50\n"),
        );
        let groups = "5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n0::/\n";
        assert_eq!(available_in(root.path(), groups), Some(3596));
        assert_eq!(available_in(root.path(), "4:memory:/\n"), None);
    }
}
