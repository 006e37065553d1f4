//! Which cores the threads of this process may use.

/// Leaves this thread, and those it starts from now on, `count` cores; false where there are fewer.
pub fn has_cores(count: usize) -> bool {
    // SAFETY: all-zero is a valid (empty) set.
    let mut all: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    let mut some = all;
    // SAFETY: the pointer is to a whole set, and every index is below its size.
    unsafe {
        libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut all);
        let allowed = (0..libc::CPU_SETSIZE as usize).filter(|&core| libc::CPU_ISSET(core, &all));
        allowed.take(count).for_each(|core| libc::CPU_SET(core, &mut some));
        let has_all = libc::CPU_COUNT(&some) as usize == count;
        has_all && libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &some) == 0
    }
}

/// The cores that each thread may use whose name begins like this.
pub fn cores_of(name: &str) -> Vec<Vec<usize>> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let read = |path: std::path::PathBuf| std::fs::read_to_string(path).unwrap_or_default();
    let of_them = tasks.filter(|task| read(task.path().join("comm")).starts_with(name));
    of_them
        .filter_map(|task| {
            let status = read(task.path().join("status"));
            let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
            let ranges = list.trim().split(',').map(|range| {
                let (first, last) = range.split_once('-').unwrap_or((range, range));
                first.parse::<usize>().unwrap()..=last.parse().unwrap()
            });
            Some(ranges.flatten().collect())
        })
        .collect()
}
