//! Runs in a control group with a limit of memory, as in a container: the kernel would end what takes more.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use crate::common::{TIMEOUT_DEFAULT, ferrywire, first_error, results, run_within, text};

/// A group of a test's own, with a limit; it goes when it is dropped.
pub struct Group(PathBuf);

impl Group {
    /// `None` if this process may not create a group, or the kernel has no memory groups.
    fn with_limit(mib: u64) -> Option<Group> {
        let bytes = (mib << 20).to_string();
        Group::with([
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", &bytes),
            ("/sys/fs/cgroup", "memory.max", &bytes),
            ("/sys/fs/cgroup/unified", "memory.max", &bytes),
        ])
    }

    /// A group with the CPU time of one core. `None` if this process may not create it.
    pub fn with_one_core() -> Option<Group> {
        Group::with([
            ("/sys/fs/cgroup/cpu", "cpu.cfs_quota_us", "100000"),
            ("/sys/fs/cgroup", "cpu.max", "100000 100000"),
            ("/sys/fs/cgroup/unified", "cpu.max", "100000 100000"),
        ])
    }

    /// The first group that can be made: where groups are mounted, and a file with its value.
    fn with(places: [(&str, &str, &str); 3]) -> Option<Group> {
        let name = format!("ferrywire-test-{}-{}", std::process::id(), places[0].1);
        places.into_iter().find_map(|(mounted, limit, value)| {
            let folder = PathBuf::from(mounted).join(&name);
            // Elsewhere it is a folder like any other.
            if !PathBuf::from(mounted).join("cgroup.procs").exists() {
                return None;
            }
            fs::create_dir(&folder).ok()?;
            let group = Group(folder);
            fs::write(group.0.join(limit), value).is_ok().then_some(group)
        })
    }

    /// A command that runs in it.
    pub fn ferrywire(&self, args: &str) -> Command {
        let direct = ferrywire(args);
        let mut command = Command::new("sh");
        command.args(["-c", r#"echo $$ > "$0"/cgroup.procs && exec "$@""#]).arg(&self.0);
        command.arg(direct.get_program()).args(direct.get_args());
        direct.get_envs().for_each(|(name, value)| match value {
            Some(value) => drop(command.env(name, value)),
            None => drop(command.env_remove(name)),
        });
        command
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn sizes_beyond_the_memory_of_a_container_are_refused() {
    let Some(group) = Group::with_limit(400) else {
        println!("SKIPPED: needs to make a control group with a limit of memory");
        return;
    };
    let bench = "bench --memory host --peer-memory host --iters 2 --depth 1 --json - --sizes";
    let refused = run_within(TIMEOUT_DEFAULT, &mut group.ferrywire(&format!("{bench} 512M")));
    let said = first_error(&refused);
    assert_eq!(refused.status.code(), Some(1), "{}", text(&refused.stderr));
    assert!(
        said.contains("whose container or control group has") && said.contains("MiB available"),
        "{said}"
    );
    assert!(said.contains("choose smaller --sizes or --depth"), "{said}");
    let fits = run_within(TIMEOUT_DEFAULT, &mut group.ferrywire(&format!("{bench} 1M")));
    assert_eq!(fits.status.code(), Some(0), "{}", text(&fits.stderr));
    assert_eq!(results(&fits)[0]["verified"], true);
}
