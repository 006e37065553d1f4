//! Closing: with the conversation that makes it safe, and without.

use crate::case::case;
use crate::ends::{Ends, LIMIT, builder, contents, loopback, pattern, plugin};

/// As many as the issue asks for, in one process.
const ROUNDS: u64 = 20;

#[test]
fn a_normal_close_causes_no_closing_result() {
    // With this switch every comm whose peer closes while anything is tested says so.
    let said = case!("close_error=always").passes(|| {
        for round in 0..ROUNDS {
            let ends = Ends::new();
            ends.write(3_000_000 + round as usize, round);
            let stats = [ends.near.stats(), ends.far.stats()];
            ends.close();
            for channel in stats.iter().flat_map(|stats| &stats.channels) {
                assert_eq!(channel.lane.as_ref().unwrap().closing_results, 0);
            }
        }
        println!("all rounds done");
    });
    assert!(std::env::var_os("TCPX_RULES_CASE").is_some() || said.contains("all rounds done"));
    assert!(!said.contains("closed by remote peer"), "{said}");
}

#[test]
fn a_sender_that_skips_the_drain_costs_at_most_one_result_and_no_byte() {
    case!("close_error=always").passes(|| {
        let mut absorbed = 0;
        for round in 0..ROUNDS {
            let plain = loopback(builder().channels(1));
            let hasty = builder().channels(1).plugin(plugin().skip_drain(true));
            let ends = Ends::of(plain, hasty);
            let bytes = 5 * (512 << 10) + round as usize;
            let source = ends.connecting.register(pattern(bytes, round)).unwrap();
            let target = ends.accepting.register(vec![0; bytes]).unwrap();
            let _write =
                ends.near.write_notify(&source, 0, &target.descriptor(), 0, bytes as u64, b"all").unwrap();
            let _ = ends.near.close(LIMIT);
            assert_eq!(ends.far.wait_notification(LIMIT).unwrap(), b"all", "round {round}");
            assert!(contents(&target) == pattern(bytes, round), "round {round}");
            let results = ends.far.stats().channels[0].lane.as_ref().unwrap().closing_results;
            assert!(results <= 1);
            absorbed += results;
        }
        println!("{absorbed} closing results absorbed");
        assert!(absorbed > 0, "the switch should have caused some");
    });
}
