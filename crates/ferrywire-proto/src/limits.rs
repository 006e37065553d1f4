//! Every limit of the engine by name; const asserts at the end relate them.
//!
//! Nothing in the engine grows without one of these. In particular, at most `HANDSHAKES_PENDING_MAX`
//! unauthenticated connections are accepted and wait for their proof, each for at most `HANDSHAKE_TIMEOUT` and with at most
//! `HANDSHAKE_BYTES_MAX` of input.
//! Read next: `wire.rs`, which enforces the sizes of frames.

use std::time::Duration;

/// Largest payload of one data frame, and so the largest chunk, in bytes.
pub const CHUNK_BYTES_MAX: usize = 4 << 20;
/// Default of the largest chunk, in bytes.
pub const CHUNK_BYTES_DEFAULT: usize = 2 << 20;
/// Smallest chunk in bytes to which a transfer is cut towards its end.
pub const CHUNK_BYTES_MIN: usize = 64 << 10;
/// Most blocks (segments) that one data frame places; bounded by the kernel's iovec limit.
pub const SEGMENTS_PER_CHUNK_MAX: usize = 512;
/// Most bytes gathered into one socket send.
pub const SEND_BYTES_PER_CALL_MAX: usize = 2 << 20;
/// Size in bytes of a worker's shared receive buffer, for small frames.
pub const SCRATCH_BYTES: usize = 256 << 10;
/// Shortest payload in bytes that is received directly into its destination.
pub const DIRECT_RECEIVE_BYTES_MIN: usize = 16 << 10;
/// Largest message of `notify`, in bytes.
pub const NOTIFY_BYTES_MAX: usize = 8 << 10;
/// Notifications held for the user. Early ones, which wait for one before them, are counted separately.
/// Beyond the limit the peer's notifications are refused, and its operations report it.
pub const NOTIFICATIONS_HELD_MAX: usize = 64 << 10;
/// Largest message in bytes that `send` sends eagerly, that is, at once if credit allows.
pub const EAGER_BYTES_MAX: usize = 64 << 10;
/// Most bytes of unmatched eager messages that a peer may have at this end.
pub const EAGER_CREDIT_BYTES: usize = 4 << 20;
/// Shortest message in bytes that is announced if it would be more than [`EAGER_AHEAD_BYTES`] ahead of the peer's receives.
/// On 16 cores messages of 64 KiB then go at 14.7 instead of 5.6 GB/s. To copy shorter ones costs less than to announce them.
pub const EAGER_LONG_BYTES: usize = 32 << 10;
/// Bytes of eager messages, under way or without a receive, up to which longer ones are eager too.
pub const EAGER_AHEAD_BYTES: usize = 256 << 10;
/// Bytes that each eager message costs beyond its content, so that empty messages are bounded too.
pub const EAGER_OVERHEAD_BYTES: usize = 128;
/// Most bytes of notifications held for the user, and again as many of early ones.
pub const NOTIFICATION_BYTES_MAX: usize = 32 << 20;
/// Most announced sends (too large to be eager) that a peer may have unmatched at this end.
pub const ANNOUNCED_SENDS_MAX: usize = 64 << 10;
/// Most transfers with a following notification that a peer may have in flight to this end.
pub const COUNTED_TRANSFERS_MAX: usize = 64 << 10;

/// Most numbered frames of a peer that are kept, or noted as refused, while an earlier one is missing. The
/// sender keeps to this limit: it sends no frame further ahead of one whose arrival is not confirmed.
pub const REORDER_FRAMES_MAX: usize = 256 << 10;
/// Most frames that wait to be sent to a peer while its operations are still answered with refusals.
pub const ANSWERS_WAITING_MAX: usize = 128 << 10;
/// Most reads of one peer that are served concurrently; a read counts until the peer acknowledges the answer.
pub const INBOUND_READS_MAX: usize = 16 << 10;
/// Most outstanding read requests to one peer. Half of the peer's limit, since the peer may not know yet that
/// some were answered.
pub const OUTSTANDING_READS_MAX: usize = INBOUND_READS_MAX / 2;
/// Most reads of one peer that wait while `INBOUND_READS_MAX` are served: all that the peer can have
/// outstanding.
pub const READS_WAITING_MAX: usize = OUTSTANDING_READS_MAX;
/// Largest operation in bytes that travels as one frame, ahead of bulk.
pub const SMALL_BYTES_MAX: u64 = 64 << 10;
/// Bytes up to which channels take bulk operations in order between two ends of a host: a default chunk. The next channel
/// helps once those before it are busy. Threads that are all woken for parts of such an operation cost more time than they
/// save.
pub const ORDERED_BYTES_MAX: u64 = CHUNK_BYTES_DEFAULT as u64;
/// Most frames in flight (sent and not acknowledged) per channel.
pub const WINDOW_FRAMES_MAX: usize = 1024;
/// Bytes in flight at which a channel takes no further chunk.
pub const WINDOW_BYTES_MAX: usize = 64 << 20;
/// Received bytes after which an acknowledgement is sent at once.
pub const ACK_BYTES: usize = 256 << 10;
/// Most channels per peer.
pub const CHANNELS_MAX: usize = 256;
/// Most lost channels that a peer's statistics list.
pub const LOST_LINES_MAX: usize = 256;
/// Events of a process's trace; later ones are only counted. Each takes about 250 bytes of the file.
pub const TRACE_EVENTS_MAX: u64 = 500_000;
/// Most events that wait to be written to the trace; more are only counted.
pub const TRACE_EVENTS_WAITING_MAX: usize = 64 << 10;
/// Most channels whose NIC and peer a trace names.
pub const TRACE_CHANNELS_MAX: usize = 4096;
/// Most NIC addresses that an endpoint announces.
pub const ADDRESSES_MAX: usize = 64;
/// Most progress threads per endpoint.
pub const WORKERS_MAX: usize = 64;
/// Most peers per endpoint, connects in progress included.
pub const PEERS_MAX: usize = 4096;
/// Most connected peers that wait for `accept`. Peers that are already lost make room, first those that left nothing to
/// receive; if all are alive, the newest is refused.
pub const PEERS_UNACCEPTED_MAX: usize = 256;
/// Most unauthenticated connections of an endpoint; the oldest is dropped for a new one.
pub const HANDSHAKES_PENDING_MAX: usize = 256;
/// Most bytes read from an unauthenticated connection.
pub const HANDSHAKE_BYTES_MAX: usize = 4096;
/// Largest message of a control session in bytes (Noise's limit is 65535 with its tag).
pub const CONTROL_MESSAGE_BYTES_MAX: usize = 60_000;
/// Most unacknowledged control messages that are kept for a resumption.
pub const CONTROL_UNACKED_MAX: usize = 16 << 10;
/// Most bytes of unacknowledged control messages that are kept for a resumption.
pub const CONTROL_UNACKED_BYTES_MAX: usize = 16 << 20;
/// Most payload bytes of a record of a protected data connection.
pub const RECORD_BYTES_MAX: usize = 64 << 10;
/// Slots of a protected data connection, four records each, whose pages are lent to its socket. The socket copies while
/// the peer has placed the records of none of them.
pub const SEALED_SLOTS: usize = 16;
/// Payload bytes of records under one key. With 64 GiB an attacker's chance to forge one record stays below 2^-60.
pub const REKEY_BYTES: u64 = 64 << 30;
/// Shortest time in which no byte of a begun record comes, after which its connection is lost; the peer timeout if that
/// is longer. The rest was removed on the way, or the record's length was changed, or the peer stands still.
pub const RECORD_REST_TIMEOUT: Duration = Duration::from_secs(5);
/// Bytes that a peer may leave unread on its control connection, beyond what it has not acknowledged. Above
/// that the peer's messages are not read until it has read half.
pub const CONTROL_UNREAD_BYTES_MAX: usize = 1 << 20;
/// Most simulated GPUs of one process.
pub const SIM_GPUS_MAX: usize = 16;
/// Address ranges of freed simulated GPU memory that stay reserved, so that a late access faults.
pub const SIM_FREED_RANGES_KEPT: usize = 128;
/// Most CUDA GPUs of one process.
pub const CUDA_GPUS_MAX: usize = 64;
/// Most NICs, and other entries of one kernel directory, that a topology reads.
pub const NICS_LISTED_MAX: usize = 4096;
/// Most processes of one run, and most hosts of a launcher's list.
pub const RANKS_MAX: u32 = 1 << 16;
/// Highest number of CPUs in a topology.
pub const CPUS_MAX: u32 = 1 << 16;
/// Oldest supported CUDA driver, in the driver's notation: 12000 is CUDA 12.0.
pub const CUDA_DRIVER_VERSION_MIN: u32 = 12_000;
/// Most gather launches that one connection has queued on its GPU; later fragments join the next launch.
pub const GATHER_LAUNCHES_MAX: usize = 2;
/// Most copies of one launch, where scattered receives are gathered without a kernel.
pub const GATHER_COPIES_PER_LAUNCH_MAX: usize = 256;
/// Size in bytes of a staging slot, and so the largest chunk of GPU memory.
pub const STAGING_SLOT_BYTES: usize = 1 << 20;
/// Most runs that a channel's copier combines into one batch while other batches wait for it.
pub const STAGING_LIST_RUNS: usize = 8192;
/// Most bytes of a GPU's payload that are received by one call and copied at once; also at most a quarter of
/// what the ring may use.
pub const STAGING_PART_BYTES: usize = STAGING_SLOT_BYTES;
/// Received bytes after which the receiver checks which copies are complete.
pub const STAGING_POLL_BYTES: usize = 256 << 10;
/// Bytes of copies from a GPU that are launched without waiting for more, so that what was copied first is
/// sent first.
pub const STAGING_BATCH_BYTES: usize = 512 << 10;
/// Smallest chunk of GPU memory in bytes, towards the end of a transfer: each chunk costs the GPU some
/// microseconds.
pub const STAGING_CHUNK_BYTES_MIN: usize = 256 << 10;
/// Pinned memory in bytes that one channel uses per GPU to receive.
pub const STAGING_IN_RING_BYTES: usize = 4 * STAGING_SLOT_BYTES;
/// Pinned memory in bytes that one channel uses per GPU to send. Memory lent to a socket stays in use until
/// the peer has placed the bytes. Rings of twice this size do not stay in the cache: 16 channels between two
/// GPUs then carry 12 to 22 % less, both directions together.
pub const STAGING_OUT_RING_BYTES: usize = 4 * STAGING_SLOT_BYTES;
/// Bytes that a ring may use where it is short; see [`has_short_rings`](crate::schedule::has_short_rings).
pub const STAGING_SHORT_RING_BYTES: usize = 2 * STAGING_SLOT_BYTES;
/// Size in bytes of each new ring once the process has [`STAGING_RINGS_BYTES`] of pinned memory.
pub const STAGING_SMALL_RING_BYTES: usize = 2 * STAGING_SLOT_BYTES;
/// Bytes of pinned memory through which short messages of one peer pass to a GPU.
pub const STAGING_MESSAGES_RING_BYTES: usize = 8 * EAGER_BYTES_MAX;
/// Bytes of pinned memory per process above which new rings are small.
pub const STAGING_RINGS_BYTES: usize = 2 << 30;
/// Pipes per process that lend pages of rings and slots to sockets. With `LENDING_PIPE_BYTES` each they use half of an
/// unprivileged user's quota. Channels without a pipe copy.
pub const LENDING_PIPES_MAX: usize = 64;
/// Capacity in bytes of a pipe that lends ring pages: enough for a few calls.
pub const LENDING_PIPE_BYTES: usize = 512 << 10;
/// Unused memory of GPUs and unused pinned memory per process, in bytes, whose release is deferred to a good
/// moment. Beyond this limit a thread releases it at once.
pub const DEFERRED_FREE_BYTES_MAX: usize = 128 << 20;
/// Shortest accepted shared secret, in bytes.
pub const SECRET_BYTES_MIN: usize = 8;

/// Most plugins that one `NCCL_NET_PLUGIN` may name.
pub const PLUGIN_NAMES_MAX: usize = 14;
/// Longest name of a plugin, and of a NIC as a plugin reports it, in bytes.
pub const PLUGIN_NAME_BYTES_MAX: usize = 254;
/// Longest path that a plugin reports, in bytes.
pub const PLUGIN_PATH_BYTES_MAX: usize = 4095;
/// Most plugin tables that one process may load.
pub const PLUGINS_MAX: usize = 255;
/// Most devices of one plugin.
pub const PLUGIN_DEVICES_MAX: usize = 256;
/// Bytes provided for a device's properties; some plugins write more than their version's struct.
pub const PLUGIN_PROPERTIES_BYTES: usize = 1024;
/// Most buffers of one grouped receive.
pub const GROUPED_RECEIVES_MAX: usize = 8;
/// Sizes that a plugin may write when a request is tested, however many it was asked for.
pub const TESTED_SIZES_MAX: usize = 64;
/// Log lines of plugins that are kept, to report how a plugin died.
pub const PLUGIN_LOG_LINES_KEPT: usize = 32;
/// Log lines that an error message about a dead plugin quotes.
pub const PLUGIN_LOG_LINES_TOLD: usize = 3;
/// Longest log line of a plugin in bytes; `log.c` cuts longer ones.
pub const PLUGIN_LOG_LINE_BYTES_MAX: usize = 1024;
/// Longest line in bytes that is written to a pipe atomically (`PIPE_BUF`), so that lines never mix.
pub const PIPE_LINE_BYTES_MAX: usize = 4096;
/// Log lines from one place of a plugin's source that pass per `PLUGIN_LOG_INTERVAL`.
pub const PLUGIN_LOG_BURST_LINES: u64 = 16;
/// Log lines that are kept from one place of a plugin's source.
pub const PLUGIN_LOG_LINES_PER_PLACE: usize = 4;
/// Most places in plugins' sources whose log lines are counted separately.
pub const PLUGIN_LOG_PLACES_MAX: usize = 256;

/// Size in bytes of NCCL's connection handle (`NCCL_NET_HANDLE_MAXSIZE`), which a lane sends to the peer.
pub const LANE_HANDLE_BYTES: usize = 128;
/// Default of the outstanding requests per direction of a lane: the window of TCPX and FastSocket.
pub const LANE_WINDOW_DEFAULT: usize = 16;
/// Most outstanding requests per direction that can be configured; no known plugin has more.
pub const LANE_WINDOW_MAX: usize = 128;
/// Default of a lane's largest message in bytes; with TCPX a larger one may have too many fragments.
pub const LANE_MESSAGE_BYTES_DEFAULT: usize = 512 << 10;
/// Smallest value that can be configured for a lane's largest message, in bytes.
pub const LANE_MESSAGE_BYTES_MIN: usize = 4096;
/// Largest message in bytes over GPUDirect-TCPX, which ends the process at 2,048 fragments; this stays below
/// as long as fragments have more than 512 bytes.
pub const TCPX_MESSAGE_BYTES_MAX: usize = 1 << 20;

/// Time for an unauthenticated connection to complete its handshake.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest silence of a control session: it then sends a heartbeat.
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(500);
/// Silence after which the control session is tried over another path.
pub const CONTROL_SUSPECT_AFTER: Duration = Duration::from_millis(1500);
/// Default of `Config::peer_timeout`: the silence within which a peer's loss is reported.
pub const PEER_TIMEOUT_DEFAULT: Duration = Duration::from_secs(10);
/// A silent peer is declared lost this much before the timeout, or a tenth of the timeout if that is less.
/// The peer's last message may have been late, and the control thread checks only now and then; the loss must
/// still be reported in time.
pub const PEER_TIMEOUT_MARGIN: Duration = Duration::from_secs(1);
/// Longer gaps between two runs of the control thread do not count as a peer's silence: this process was
/// stopped.
pub const CONTROL_TURNS_APART_MAX: Duration = Duration::from_secs(1);
/// Time for a peer to come back after its kernel closed all its connections.
pub const RESUME_GRACE: Duration = Duration::from_secs(2);
/// Silence of the peer's kernel, while data waits, after which a path counts as dead.
pub const PATH_DEAD_AFTER: Duration = Duration::from_millis(1400);
/// Interval of the path checks while data is in flight.
pub const PATH_CHECK_INTERVAL: Duration = Duration::from_millis(200);
/// Interval of the retries when `accept` fails for lack of descriptors or memory.
pub const ACCEPT_RETRY_INTERVAL: Duration = Duration::from_millis(100);
/// Least time that each address of an endpoint with several gets to answer, however small its share of the
/// timeout: a handshake takes several round trips.
pub const ANSWER_SHARE_MIN: Duration = Duration::from_secs(1);
/// Least time that each address of a host name gets to answer, within the caller's timeout.
pub const NAME_SHARE_MIN: Duration = Duration::from_millis(400);
/// Interval at which a lost channel is dialled again, for the first `REDIALS_AT_ONCE` failures in a row.
pub const REDIAL_INTERVAL: Duration = Duration::from_millis(500);
/// Failures in a row after which the interval doubles with each further one, up to `REDIAL_INTERVAL_MAX`.
pub const REDIALS_AT_ONCE: u32 = 4;
/// Longest interval at which a channel is dialled whose path leads nowhere.
pub const REDIAL_INTERVAL_MAX: Duration = Duration::from_secs(16);
/// Longest duration of one connection attempt.
pub const DIAL_TIMEOUT: Duration = Duration::from_secs(2);
/// Timeout of a simulated GPU's blocking helpers; long, since a test may stall the GPU.
pub const SIM_GPU_BLOCKING_TIMEOUT: Duration = Duration::from_secs(120);
/// Time without any progress after which a thread that should release memory counts as stuck. Time in which
/// this process is stopped does not count.
pub const ABANDON_TIMEOUT: Duration = Duration::from_secs(5);
/// Time without progress after which a dropped peer is closed although posted transfers are unfinished.
pub const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest wait for the lock of a NIC whose settings another process or thread changes.
pub const NIC_LOCK_TIMEOUT: Duration = Duration::from_secs(30);
/// Least time that closing an endpoint waits for a NIC's lock, however little of its timeout is left.
/// Settings that are not undone by then are left to the next start.
pub const NIC_END_MIN: Duration = Duration::from_secs(2);
/// Interval of the retries to remove a steering rule, and longest wait of the removing thread for other
/// threads.
pub const UNSTEER_INTERVAL: Duration = Duration::from_secs(1);
/// Interval after which a throttled place of a plugin's source may log again.
pub const PLUGIN_LOG_INTERVAL: Duration = Duration::from_secs(1);
/// Time for both directions of a lane to be set up.
pub const LANE_SETUP_TIMEOUT: Duration = Duration::from_secs(60);
/// Default of the longest time without progress of a lane's oldest message, and of a plugin's call.
pub const LANE_STALL_TIMEOUT_DEFAULT: Duration = Duration::from_secs(30);
/// Time for posted messages to arrive after the first sign that the peer closes.
pub const LANE_CLOSING_TIMEOUT: Duration = Duration::from_secs(2);
/// Time for a posted receive into revoked memory to end; then its channel is closed.
pub const LANE_ABANDON_TIMEOUT: Duration = Duration::from_secs(1);
/// Time within which the kernel releases zero-copy sends after their connection is aborted: no working NIC
/// queues a packet for longer.
pub const KERNEL_RELEASE_TIMEOUT: Duration = Duration::from_millis(100);
/// Longest wait for the zero-copy sends of a closed lane or connection when their memory is taken back.
/// Longer than the 5 s after which the kernel resets a NIC that sends nothing. Progress threads do other work
/// in the meantime.
pub const CLOSED_RELEASE_TIMEOUT: Duration = Duration::from_secs(6);
/// Longest wait of a progress thread for the copies of a lost channel; then a thread of their own waits for them.
pub const GPU_END_TIMEOUT: Duration = Duration::from_millis(100);
/// Longest wait for a GPU's unfinished copies to memory that is taken back; then the caller gets an error.
pub const GPU_ABANDON_TIMEOUT: Duration = Duration::from_secs(5);
/// Time that a lane, after a failure that the plugin does not explain, waits for the other end to report the
/// cause or to be found dead.
pub const LANE_FAILURE_GRACE: Duration = Duration::from_secs(4);
const _: () = assert!(LANE_FAILURE_GRACE.as_millis() > RESUME_GRACE.as_millis());
/// Time that a set-up thread waits for another thread's plugin call, before it checks whether its own call is
/// still wanted.
pub const SETUP_LOCK_WAIT: Duration = Duration::from_millis(100);
/// Interval at which a plugin's connection or listener is polled during set-up.
pub const LANE_SETUP_INTERVAL: Duration = Duration::from_millis(1);
/// Interval at which an abandoned connection or listener of a plugin is polled; it is closed once it is
/// ready.
pub const LANE_LINGER_INTERVAL: Duration = Duration::from_millis(20);
/// Longest time that an abandoned connection or listener is polled.
pub const LANE_LINGER_TIMEOUT: Duration = Duration::from_secs(60);

/// Limits that an outbox shares with the inbox at the other end, as values; both ends use equal ones.
#[derive(Clone, Copy, Debug)]
pub struct PeerLimits {
    /// Most numbered frames that are kept behind a missing one, as [`REORDER_FRAMES_MAX`].
    pub early_frames_max: usize,
    /// Most bytes of notifications held for the user, as [`NOTIFICATION_BYTES_MAX`].
    pub notification_bytes_max: usize,
    /// Largest eager message in bytes, as [`EAGER_BYTES_MAX`].
    pub eager_bytes_max: usize,
    /// Most bytes of unmatched eager messages, as [`EAGER_CREDIT_BYTES`].
    pub eager_credit_bytes: usize,
    /// Shortest message in bytes that is eager only up to `eager_ahead_bytes`, as [`EAGER_LONG_BYTES`].
    pub eager_long_bytes: usize,
    /// Most bytes of eager messages ahead of their receives for such a message, as [`EAGER_AHEAD_BYTES`].
    pub eager_ahead_bytes: usize,
    /// Most outstanding read requests, as [`OUTSTANDING_READS_MAX`].
    pub reads_asked_max: usize,
    /// Largest operation in bytes that travels as one frame, ahead of bulk.
    pub small_bytes_max: u64,
}

impl Default for PeerLimits {
    fn default() -> PeerLimits {
        PeerLimits {
            early_frames_max: REORDER_FRAMES_MAX,
            notification_bytes_max: NOTIFICATION_BYTES_MAX,
            eager_bytes_max: EAGER_BYTES_MAX,
            eager_credit_bytes: EAGER_CREDIT_BYTES,
            eager_long_bytes: EAGER_LONG_BYTES,
            eager_ahead_bytes: EAGER_AHEAD_BYTES,
            reads_asked_max: OUTSTANDING_READS_MAX,
            small_bytes_max: SMALL_BYTES_MAX,
        }
    }
}

const _: () = assert!(PLUGIN_LOG_LINES_TOLD <= PLUGIN_LOG_LINES_KEPT);
/// Lifetime below which a failed devmem lane counts as short-lived.
pub const LANE_SHORT_LIVED: Duration = Duration::from_secs(1);
/// Consecutive short-lived or failed lanes of one channel that end the session where no other channel is
/// left.
pub const LANES_SHORT_LIVED_MAX: usize = 32;
/// Consecutive longer-lived lanes of one channel, while no payload of the peer moved, that end the session.
pub const LANES_STALLED_MAX: usize = 3;
/// Most receive queues of one NIC that an endpoint uses for devmem TCP.
pub const DEVMEM_QUEUES_MAX: usize = 64;
/// Default size in bytes of a pool of devmem TCP: the memory that a NIC fills.
pub const DEVMEM_POOL_BYTES_DEFAULT: usize = 64 << 20;
/// Smallest size in bytes of a pool of devmem TCP.
pub const DEVMEM_POOL_BYTES_MIN: usize = 1 << 20;
/// Fewest messages of the largest size for which a pool has room.
pub const DEVMEM_POOL_MESSAGES_MIN: usize = 4;
/// Largest size in bytes of a pool of devmem TCP: fragments have 32-bit offsets.
pub const DEVMEM_POOL_BYTES_MAX: usize = 2 << 30;

const _: () = assert!(STAGING_OUT_RING_BYTES <= DEFERRED_FREE_BYTES_MAX);
const _: () = assert!(LANE_WINDOW_DEFAULT <= LANE_WINDOW_MAX && LANE_WINDOW_MAX <= WINDOW_FRAMES_MAX);
const _: () = assert!(NIC_END_MIN.as_millis() <= NIC_LOCK_TIMEOUT.as_millis());
const _: () = assert!(LANE_ABANDON_TIMEOUT.as_millis() < ABANDON_TIMEOUT.as_millis());
const _: () = assert!(KERNEL_RELEASE_TIMEOUT.as_millis() < CLOSED_RELEASE_TIMEOUT.as_millis());
const _: () = assert!(LANE_MESSAGE_BYTES_MIN <= LANE_MESSAGE_BYTES_DEFAULT);
const _: () = assert!(LANE_MESSAGE_BYTES_DEFAULT <= TCPX_MESSAGE_BYTES_MAX);
const _: () = assert!(TCPX_MESSAGE_BYTES_MAX <= CHUNK_BYTES_MAX);
const _: () = assert!(
    STAGING_SLOT_BYTES.is_multiple_of(STAGING_CHUNK_BYTES_MIN)
        && STAGING_CHUNK_BYTES_MIN <= STAGING_SLOT_BYTES
        && STAGING_CHUNK_BYTES_MIN <= STAGING_BATCH_BYTES
        && STAGING_BATCH_BYTES <= STAGING_SLOT_BYTES
        && 2 * STAGING_SLOT_BYTES <= STAGING_SMALL_RING_BYTES
        && 2 * STAGING_SLOT_BYTES <= STAGING_SHORT_RING_BYTES
);
const _: () = assert!(SMALL_BYTES_MAX <= STAGING_SLOT_BYTES as u64);
const _: () = assert!(CHUNK_BYTES_MIN <= CHUNK_BYTES_DEFAULT);
const _: () = assert!(CHUNK_BYTES_DEFAULT <= CHUNK_BYTES_MAX);
const _: () = assert!(CHUNK_BYTES_MAX <= WINDOW_BYTES_MAX);
const _: () = assert!(NOTIFY_BYTES_MAX <= u16::MAX as usize);
const _: () = assert!(EAGER_BYTES_MAX + EAGER_OVERHEAD_BYTES <= EAGER_CREDIT_BYTES);
const _: () = assert!(EAGER_BYTES_MAX <= CHUNK_BYTES_MAX);
// The kernel's default of `fs.pipe-user-pages-soft`: 16,384 pages.
const _: () = assert!(2 * LENDING_PIPES_MAX * LENDING_PIPE_BYTES <= 16_384 * 4096);
const _: () = assert!(ANNOUNCED_SENDS_MAX < ANSWERS_WAITING_MAX);
const _: () = assert!(OUTSTANDING_READS_MAX <= READS_WAITING_MAX && READS_WAITING_MAX <= ANSWERS_WAITING_MAX);
const _: () = assert!(NOTIFICATIONS_HELD_MAX <= REORDER_FRAMES_MAX);
const _: () = assert!(ANNOUNCED_SENDS_MAX <= REORDER_FRAMES_MAX);
const _: () = assert!(PEERS_UNACCEPTED_MAX <= PEERS_MAX);
const _: () = assert!(CONTROL_MESSAGE_BYTES_MAX + 16 <= 65535);
const _: () = assert!(HANDSHAKE_BYTES_MAX < CONTROL_MESSAGE_BYTES_MAX);
const _: () = assert!(REDIAL_INTERVAL.as_millis() < REDIAL_INTERVAL_MAX.as_millis());
const _: () = assert!(HEARTBEAT_INTERVAL.as_millis() * 2 < CONTROL_SUSPECT_AFTER.as_millis());
const _: () = assert!(CONTROL_SUSPECT_AFTER.as_millis() < PEER_TIMEOUT_DEFAULT.as_millis());
const _: () = assert!(HEARTBEAT_INTERVAL.as_millis() < PEER_TIMEOUT_MARGIN.as_millis());
const _: () = assert!(PEER_TIMEOUT_MARGIN.as_millis() * 10 <= PEER_TIMEOUT_DEFAULT.as_millis());
const _: () = assert!(CONTROL_MESSAGE_BYTES_MAX < CONTROL_UNREAD_BYTES_MAX / 2);
const _: () = assert!(CHANNELS_MAX * CONTROL_MESSAGE_BYTES_MAX <= CONTROL_UNACKED_BYTES_MAX);
const _: () = assert!(CONTROL_TURNS_APART_MAX.as_millis() < CONTROL_SUSPECT_AFTER.as_millis());
const _: () = assert!(PATH_DEAD_AFTER.as_millis() + 2 * PATH_CHECK_INTERVAL.as_millis() <= 2000);
const _: () = assert!(GROUPED_RECEIVES_MAX <= TESTED_SIZES_MAX);
const _: () = assert!(PLUGIN_LOG_LINE_BYTES_MAX + 3 * PLUGIN_NAME_BYTES_MAX < PIPE_LINE_BYTES_MAX);
