//! Which files a plugin's name may mean: the search rule of NCCL 2.27 to 2.30.
//!
//! A value of `NCCL_NET_PLUGIN` selects the file here that it selects in NCCL.
//! Invariant: pure; no file is accessed.
//! Read next: `load.rs`, which tries the candidates.

use ferrywire_proto::limits::{PLUGIN_NAME_BYTES_MAX, PLUGIN_NAMES_MAX};

/// A file or program in which a plugin is searched for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Candidate {
    /// A file: a path, or a name without `/`, which the loader searches for.
    File(String),
    /// The running program, which may export the tables itself.
    Program,
}

/// The file that is opened when no plugin is named.
const UNNAMED: &str = "libnccl-net.so";

/// The candidates for a value of `NCCL_NET_PLUGIN`, in order of preference; empty for `none`, in either
/// case, and for an empty list. Returns an error text for an invalid value.
///
/// Each item of a comma-separated list is tried as given, then as `libnccl-net-ITEM.so`. An item with a `/`,
/// or of the form `lib....so`, is tried only as given.
pub fn candidates(named: Option<&str>) -> Result<Vec<Candidate>, String> {
    let Some(list) = named else {
        return Ok(vec![Candidate::File(UNNAMED.to_owned())]);
    };
    if list.eq_ignore_ascii_case("none") {
        return Ok(Vec::new());
    }
    let items: Vec<&str> = list.split(',').filter(|item| !item.is_empty()).collect();
    if items.len() > PLUGIN_NAMES_MAX {
        return Err(format!("{} plugins are named; NCCL takes at most {PLUGIN_NAMES_MAX}", items.len()));
    }
    if let Some(long) = items.iter().find(|item| item.len() > PLUGIN_NAME_BYTES_MAX) {
        let bytes = long.len();
        return Err(format!(
            "a plugin's name has {bytes} bytes; at most {PLUGIN_NAME_BYTES_MAX} are allowed"
        ));
    }
    Ok(items.into_iter().flat_map(of_item).collect())
}

fn of_item(item: &str) -> Vec<Candidate> {
    if item == "STATIC_PLUGIN" {
        return vec![Candidate::Program];
    }
    let given = Candidate::File(item.to_owned());
    let whole = item.contains('/') || (item.starts_with("lib") && item.ends_with(".so"));
    if whole { vec![given] } else { vec![given, Candidate::File(format!("libnccl-net-{item}.so"))] }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(named: Option<&str>) -> Vec<String> {
        let name = |candidate| match candidate {
            Candidate::File(name) => name,
            Candidate::Program => "(program)".to_owned(),
        };
        candidates(named).unwrap().into_iter().map(name).collect()
    }

    #[test]
    fn without_a_name_the_default_library_is_meant() {
        assert_eq!(names(None), ["libnccl-net.so"]);
    }

    #[test]
    fn an_empty_list_means_no_plugin() {
        assert!(names(Some("")).is_empty() && names(Some(",")).is_empty());
    }

    #[test]
    fn a_short_name_is_tried_as_given_and_then_spelled_out() {
        assert_eq!(names(Some("gpudirecttcpx")), ["gpudirecttcpx", "libnccl-net-gpudirecttcpx.so"]);
        // A name is complete only with both `lib` and `.so`.
        assert_eq!(names(Some("libx")), ["libx", "libnccl-net-libx.so"]);
        assert_eq!(names(Some("x.so")), ["x.so", "libnccl-net-x.so.so"]);
        assert_eq!(names(Some("libx.so.1")), ["libx.so.1", "libnccl-net-libx.so.1.so"]);
    }

    #[test]
    fn paths_and_whole_names_are_tried_only_as_given() {
        assert_eq!(names(Some("/opt/x/libnccl-net.so")), ["/opt/x/libnccl-net.so"]);
        assert_eq!(names(Some("./x")), ["./x"]);
        assert_eq!(names(Some("libnccl-net-x.so")), ["libnccl-net-x.so"]);
    }

    #[test]
    fn lists_keep_their_order_and_have_a_limit() {
        assert_eq!(names(Some("a,,./b,libc.so")), ["a", "libnccl-net-a.so", "./b", "libc.so"]);
        assert_eq!(names(Some("STATIC_PLUGIN,a")), ["(program)", "a", "libnccl-net-a.so"]);
        assert_eq!(names(Some(&["a"; 14].join(","))).len(), 28);
        assert!(candidates(Some(&["a"; 15].join(","))).is_err());
        assert!(candidates(Some(&"a".repeat(254))).is_ok());
        assert!(candidates(Some(&"a".repeat(255))).is_err());
    }

    #[test]
    fn the_name_none_means_no_plugin_only_alone() {
        assert!(names(Some("none")).is_empty() && names(Some("None")).is_empty());
        assert_eq!(names(Some("none,./a")), ["none", "libnccl-net-none.so", "./a"]);
    }
}
