//! Protection: payload over a plugin goes past the connections that could be protected.

use crate::case::case;
use crate::ends::{Ends, builder, loopback};
use crate::lines::Lines;
use ferrywire::{Builder, Encryption};

/// Moves bytes between two ends. Returns how often the log says that lanes have no protection.
fn warnings(accepting: Builder, connecting: Builder) -> usize {
    let lines = Lines::collect();
    let ends = Ends::of(loopback(accepting), loopback(connecting));
    ends.write(100_000, 1);
    for peer in [&ends.near, &ends.far] {
        assert_eq!((peer.stats().transport, peer.stats().protection), ("plugin", None));
    }
    ends.close();
    let told = lines.with("which both ends prefer, because payload goes over lanes");
    assert!(told.iter().all(|line| line.contains("WARN")), "{told:?}");
    told.len()
}

fn preferring() -> Builder {
    builder().encryption(Encryption::Preferred)
}

/// They got none, and were not told.
#[test]
fn two_ends_that_only_prefer_encryption_are_told_that_lanes_have_none() {
    case!("").passes(|| assert_eq!(warnings(preferring(), preferring()), 2, "each end"));
}

#[test]
fn ends_that_do_not_both_prefer_encryption_are_told_nothing_about_it() {
    case!("").passes(|| assert_eq!(warnings(preferring(), builder()), 0));
}
