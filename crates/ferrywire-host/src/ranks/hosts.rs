//! Parses lists of nodes as Slurm writes them: `gpu[001-003,7],rack[0-1]n[1-2],login`.
//!
//! Read next: `mod.rs`, which uses the first node.

use ferrywire_proto::limits::RANKS_MAX;

/// All hosts of a list, in its order. If a name has several brackets, the last one varies fastest.
///
/// # Errors
/// A message that says what is wrong with the list.
pub fn hosts(list: &str) -> Result<Vec<String>, String> {
    let mut hosts = Vec::new();
    for pattern in split(list)? {
        hosts.extend(expand(pattern)?);
        bounded(hosts.len())?;
    }
    if hosts.is_empty() { Err("the list has no host".to_owned()) } else { Ok(hosts) }
}

fn bounded(count: usize) -> Result<(), String> {
    if count > RANKS_MAX as usize { Err(format!("the list has more than {RANKS_MAX} hosts")) } else { Ok(()) }
}

/// Splits a list at the commas outside of brackets.
fn split(list: &str) -> Result<Vec<&str>, String> {
    let (mut patterns, mut inside, mut from) = (Vec::new(), false, 0);
    for (at, c) in list.char_indices() {
        match (c, inside) {
            ('[', false) | (']', true) => inside = c == '[',
            ('[', true) => return Err("'[' inside brackets".to_owned()),
            (']', false) => return Err("']' without '['".to_owned()),
            (',', false) => {
                patterns.push(&list[from..at]);
                from = at + 1;
            }
            _ => {}
        }
    }
    if inside {
        return Err("'[' without ']'".to_owned());
    }
    patterns.push(&list[from..]);
    Ok(patterns.into_iter().map(str::trim).filter(|pattern| !pattern.is_empty()).collect())
}

fn expand(pattern: &str) -> Result<Vec<String>, String> {
    let mut names = vec![String::new()];
    let mut rest = pattern;
    while let Some((before, after)) = rest.split_once('[') {
        let (ranges, after) = after.split_once(']').ok_or("'[' without ']'")?;
        let numbers = numbers(ranges)?;
        bounded(names.len().saturating_mul(numbers.len()))?;
        let with = |name: &String| -> Vec<String> {
            numbers.iter().map(|number| format!("{name}{before}{number}")).collect()
        };
        names = names.iter().flat_map(with).collect();
        rest = after;
    }
    names.iter_mut().for_each(|name| name.push_str(rest));
    Ok(names)
}

/// Expands the numbers in brackets, as in `001-003,7`; they keep their leading zeros. Returns an error text for
/// anything else.
fn numbers(ranges: &str) -> Result<Vec<String>, String> {
    let mut numbers = Vec::new();
    for range in ranges.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let bad = || format!("[{ranges}] is not a list of numbers: expected 1-4,7");
        let (from, to) = (digits(first).ok_or_else(bad)?, digits(last).ok_or_else(bad)?);
        if from > to {
            return Err(bad());
        }
        bounded(usize::try_from(to - from).unwrap_or(usize::MAX).saturating_add(numbers.len()))?;
        let width = first.len();
        numbers.extend((from..=to).map(|number| format!("{number:0width$}")));
    }
    Ok(numbers)
}

fn digits(text: &str) -> Option<u64> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_as_slurm_writes_them() {
        let read = [
            ("gpu1", "gpu1"),
            ("gpu1,gpu2", "gpu1 gpu2"),
            ("gpu[1-3]", "gpu1 gpu2 gpu3"),
            ("gpu[001-003,7,10-11]", "gpu001 gpu002 gpu003 gpu7 gpu10 gpu11"),
            ("gpu[8-11]", "gpu8 gpu9 gpu10 gpu11"),
            ("gpu[098-101]", "gpu098 gpu099 gpu100 gpu101"),
            ("a3-[0-1]-ib,login", "a3-0-ib a3-1-ib login"),
            ("rack[0-1]n[1-2]", "rack0n1 rack0n2 rack1n1 rack1n2"),
            (" gpu1 , gpu2 ", "gpu1 gpu2"),
            ("[1-2].cluster.example", "1.cluster.example 2.cluster.example"),
        ];
        for (list, all) in read {
            assert_eq!(hosts(list).map(|hosts| hosts.join(" ")), Ok(all.to_owned()), "{list}");
        }
    }

    #[test]
    fn broken_and_endless_lists_are_refused() {
        let said = [
            ("", "has no host"),
            (",", "has no host"),
            ("gpu[1-3", "'[' without ']'"),
            ("gpu1]", "']' without '['"),
            ("gpu[1[2]]", "inside brackets"),
            ("gpu[]", "is not a list of numbers"),
            ("gpu[3-1]", "is not a list of numbers"),
            ("gpu[a-b]", "is not a list of numbers"),
            ("gpu[1-2-3]", "is not a list of numbers"),
            ("gpu[0-18446744073709551615]", "more than"),
            ("a[0-999]b[0-999]", "more than"),
            ("gpu[0-99999999999999999999999]", "is not a list of numbers"),
        ];
        for (list, part) in said {
            let why = hosts(list).expect_err(list);
            assert!(why.contains(part), "{list}: {why}");
        }
    }
}
