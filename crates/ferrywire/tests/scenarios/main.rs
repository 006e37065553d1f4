//! Behaviour between two or more endpoints; each scenario is written once and runs on every world.
//!
//! A *world* makes endpoints, connects them and drives them: [`sim`] on one thread over a simulated
//! network, with a seed that repeats the run and virtual time that bounds it; [`tcp`] over loopback with
//! threads and blocking waits, with payload over TCP or over a simulated plugin, between two network namespaces by sockets that
//! do not copy, and between the two hosts of a VM over devmem TCP. Scenarios that break things need a world that can ([`world::Faulty`]).
//!
//! `FERRYWIRE_SEEDS=n` runs more seeds, `FERRYWIRE_SEED=n` repeats the one that a failure printed.

mod basics;
#[path = "../../../ferrywire-devmem/tests/devmem/boot.rs"]
mod boot;
mod callers;
#[allow(dead_code, reason = "the plugin's own tests use all of it")]
#[path = "../../../ferrywire-tcpx-sim/tests/rules/case.rs"]
mod case;
mod closing;
#[allow(dead_code, reason = "other tests use all of it")]
#[path = "../../../ferrywire-ncclnet/tests/nccl/compile.rs"]
mod compile;
mod devmem;
mod devmem_regions;
mod faults;
mod gpu;
mod load;
mod messages;
#[path = "../api/netns.rs"]
#[allow(dead_code, reason = "the tests of the API use all of it")]
mod netns;
mod nics;
mod orchestrator;
mod ordering;
mod regions;
mod sim;
mod tcp;
mod vm;
mod world;

/// One test per scenario and world; `all` runs on the simulator, over TCP, a plugin and devmem, `both` not
/// over lanes, `sim` only where faults can be made.
macro_rules! scenarios {
    (
        $(all($all_seeds:literal): $all_module:ident::{$($all_name:ident),* $(,)?};)*
        $(both($seeds:literal): $module:ident::{$($name:ident),* $(,)?};)*
        $(sim($sim_seeds:literal): $sim_module:ident::{$($sim_name:ident),* $(,)?};)*
    ) => {
        mod on_sim {
            $($(#[test]
            fn $all_name() {
                crate::sim::run(stringify!($all_name), $all_seeds, crate::$all_module::$all_name);
            })*)*
            $($(#[test]
            fn $name() {
                crate::sim::run(stringify!($name), $seeds, crate::$module::$name);
            })*)*
            $($(#[test]
            fn $sim_name() {
                crate::sim::run(stringify!($sim_name), $sim_seeds, crate::$sim_module::$sim_name);
            })*)*
        }
        mod on_sim_gpus {
            $($(#[test]
            fn $all_name() {
                crate::sim::run_on_gpus(stringify!($all_name), $all_seeds / 10, crate::$all_module::$all_name);
            })*)*
            $($(#[test]
            fn $sim_name() {
                crate::sim::run_on_gpus(stringify!($sim_name), $sim_seeds / 10, crate::$sim_module::$sim_name);
            })*)*
        }
        mod on_tcp_gpus {
            $($(#[test]
            fn $all_name() {
                crate::tcp::run_on_gpus(crate::$all_module::$all_name);
            })*)*
        }
        mod on_plugin {
            $($(#[test]
            fn $all_name() {
                crate::case::case!("").passes(|| crate::tcp::run_over_plugin(crate::$all_module::$all_name));
            })*)*
        }
        mod on_devmem {
            $($(#[test]
            fn $all_name() {
                crate::tcp::run_over_devmem(crate::$all_module::$all_name);
            })*)*
        }
        mod on_devmem_gpus {
            $($(#[test]
            fn $all_name() {
                crate::tcp::run_over_devmem_on_gpus(crate::$all_module::$all_name);
            })*)*
        }
        mod between_hosts {
            $($(#[test]
            fn $all_name() {
                crate::tcp::run_between_hosts(crate::$all_module::$all_name);
            })*)*
        }
        mod on_tcp {
            $($(#[test]
            fn $all_name() {
                crate::tcp::run(crate::$all_module::$all_name);
            })*)*
            $($(#[test]
            fn $name() {
                crate::tcp::run(crate::$module::$name);
            })*)*
        }
    };
}

scenarios! {
    all(100): basics::{
        writes_of_every_size,
        reads_of_every_size,
        blocks_are_written_and_read,
        joined_lists_are_written_and_read,
        notifications_come_after_their_bytes,
        both_sides_at_once,
        many_peers,
    };
    all(100): messages::{
        messages_of_every_size,
        messages_scatter_and_gather,
        messages_of_a_tag_keep_their_order,
        messages_too_long_for_their_receive,
        withdrawn_sends_reach_no_receive,
        send_cancelled_in_mid_transfer_ends_the_receive,
        cancelled_receives_leave_their_memory_alone,
        cancelled_reads_leave_their_memory_alone,
        cancelled_writes_change_nothing_later,
        cancelled_joined_lists_end_in_every_part,
        notifications_keep_their_place,
        notification_after_serving_a_read,
        many_notifications_keep_their_order,
    };
    all(10): messages::{more_than_the_eager_credit, answers_of_an_idle_end};
    all(100): regions::{
        deregistered_regions_are_refused,
        refused_writes_do_not_notify,
        a_refused_part_fails_the_whole,
        deregistered_during_a_write,
        deregistered_during_a_read_into_it,
        deregistered_while_ended_transfers_are_held,
        wrong_regions_and_offsets_are_refused_at_once,
    };
    all(50): closing::{
        close_finishes_what_was_posted,
        both_sides_close_at_once,
        close_ends_what_cannot_finish,
        messages_outlive_their_sender,
        dropped_peers_finish_first,
        endpoint_closed_with_work_under_way,
        a_peer_that_leaves_before_the_end_is_reported_by_close,
        an_endpoint_reports_a_peer_that_left_before_the_end,
        the_earliest_timeout_of_a_close_counts,
    };
    both(10): gpu::{
        many_places_at_once,
        descriptors_that_name_another_place,
    };
    both(4): gpu::{
        full_rings_wait_for_the_gpu,
        a_notification_behind_all_that_is_staged_goes_too,
        copies_that_fail_to_be_sent,
        copies_that_fail_to_land,
        memory_taken_back_while_it_is_copied,
        memory_freed_in_mid_transfer,
        memory_freed_in_mid_transfer_costs_no_other_operation,
    };
    both(5): ordering::{
        output_of_a_slow_kernel_is_sent_complete,
        joined_lists_wait_for_a_kernel,
        what_a_slow_kernel_reads_is_not_overwritten,
        a_stream_waits_for_what_is_received,
        what_waits_for_a_kernel_may_end_before,
        closing_with_operations_that_wait,
    };
    sim(100): faults::{
        channels_reset_one_by_one,
        a_killed_peer_is_lost,
        a_restarted_peer_is_another_one,
        cancelled_in_the_middle_of_a_scattered_frame,
        corrupt_bytes_are_found_and_sent_again,
        corrupt_bytes_of_a_protected_connection_are_found_and_sent_again,
        stalls_and_slow_nics,
    };
    sim(20): faults::{
        the_only_channel_leaves_the_path_of_a_deleted_nic,
        the_only_channel_leaves_a_path_that_it_comes_up_on_and_loses,
        the_only_channel_is_set_up_over_another_path_than_its_silent_one,
        nics_deleted_at_both_ends_leave_the_path_of_the_control_session,
        unanswered_dials_of_the_only_channel_cost_seconds,
    };
    sim(10): closing::{
        dropped_peers_may_be_slow,
        what_is_slower_than_a_chunk_is_not_given_up,
        parts_that_are_lost_again_and_again_are_no_progress,
        dropped_peers_do_not_wait_for_what_stands_still,
        dropped_endpoints_finish_first,
        an_endpoint_reports_a_peer_that_is_killed_while_it_closes,
        what_is_lost_while_an_endpoint_closes_is_dialled_again,
    };
    sim(40): faults::{
        all_channels_reset_at_once,
        one_of_two_nics_cut_and_healed,
        one_of_four_nics_cut_and_healed,
        a_path_that_leads_nowhere_is_dialled_less_and_less,
        a_farewell_takes_another_nic,
        the_first_channel_goes_back_to_its_own_path,
        a_deleted_nic_is_named,
        one_way_cut,
        late_bytes_do_not_land,
        cancelled_writes_are_not_sent_again,
        a_peer_that_stops_for_three_seconds_is_not_lost,
        peers_that_stop_together_are_not_lost,
        a_peer_that_stops_for_good_is_lost,
        a_cancelled_write_whose_peer_is_lost_ends_as_lost,
        a_write_that_is_refused_in_part_whose_peer_is_lost_ends_as_lost,
    };
    sim(4): faults::{answers_that_are_not_acknowledged};
    sim(300): faults::{random_faults};
}
