//! Every limit of the engine, by name, with the relations between them asserted at compile time.
//!
//! Nothing in the engine grows without one of these. Of connections that have not proven the secret
//! at most `HANDSHAKES_PENDING_MAX` are held, each for `HANDSHAKE_TIMEOUT` and with `HANDSHAKE_BYTES_MAX` of input at most.
//! Read next: `wire.rs`, which enforces the sizes of frames.

use std::time::Duration;

/// Largest payload of one data frame. Also the largest chunk.
pub const CHUNK_BYTES_MAX: usize = 4 << 20;
/// Default upper size of a chunk.
pub const CHUNK_BYTES_DEFAULT: usize = 2 << 20;
/// Chunks are not cut smaller than this towards the end of a transfer.
pub const CHUNK_BYTES_MIN: usize = 64 << 10;
/// Blocks (segments) one data frame may place; bounded by the kernel's iovec limit.
pub const SEGMENTS_PER_CHUNK_MAX: usize = 512;
/// Bytes gathered into one socket send.
pub const SEND_BYTES_PER_CALL_MAX: usize = 2 << 20;
/// Size of a worker's shared receive buffer, for small frames.
pub const SCRATCH_BYTES: usize = 256 << 10;
/// A payload at least this long is received straight into its destination.
pub const DIRECT_RECEIVE_BYTES_MIN: usize = 16 << 10;
/// Largest `notify` message.
pub const NOTIFY_BYTES_MAX: usize = 8 << 10;
/// Notifications held for the user, those apart that wait for one before them; past this the peer's are refused, and its
/// operations say so.
pub const NOTIFICATIONS_HELD_MAX: usize = 64 << 10;
/// A `send` up to this size goes out at once, if credit allows.
pub const EAGER_BYTES_MAX: usize = 64 << 10;
/// Bytes of eager messages a peer may have unconsumed on our side.
pub const EAGER_CREDIT_BYTES: usize = 4 << 20;
/// Bookkeeping charged to the credit for each eager message, so that empty ones are bounded too.
pub const EAGER_OVERHEAD_BYTES: usize = 128;
/// Bytes of the same, and once more of those that wait for one before them.
pub const NOTIFICATION_BYTES_MAX: usize = 32 << 20;
/// Announced sends (too large for eager) that a peer may have unmatched on our side.
pub const ANNOUNCED_SENDS_MAX: usize = 64 << 10;
/// Writes with a notification that a peer may have under way to us.
pub const COUNTED_TRANSFERS_MAX: usize = 64 << 10;

/// Numbered frames of a peer kept, or noted as refused, while one before them is still on its way. An end sends no more ahead of
/// one that the other is not known to have.
pub const REORDER_FRAMES_MAX: usize = 256 << 10;
/// Refusals are answered only while fewer frames than this wait for the peer.
pub const ANSWERS_WAITING_MAX: usize = 128 << 10;
/// Reads of one peer that are answered at once, each until the peer has acknowledged its answer.
pub const INBOUND_READS_MAX: usize = 16 << 10;
/// Requests of our own reads that one peer has at once: it may not know yet that some of them have been answered.
pub const OUTSTANDING_READS_MAX: usize = INBOUND_READS_MAX / 2;
/// Reads of one peer that wait while `INBOUND_READS_MAX` are answered: as many as a peer may have that are not answered yet.
pub const READS_WAITING_MAX: usize = OUTSTANDING_READS_MAX;
/// An operation of at most this many bytes travels as one frame, ahead of bulk.
pub const SMALL_BYTES_MAX: u64 = 64 << 10;
/// Frames in flight (sent, not yet acknowledged) per channel.
pub const WINDOW_FRAMES_MAX: usize = 1024;
/// Bytes in flight per channel before it takes no further chunk.
pub const WINDOW_BYTES_MAX: usize = 64 << 20;
/// Unacknowledged received bytes after which an acknowledgement goes out at once.
pub const ACK_BYTES: usize = 256 << 10;
/// Channels per peer.
pub const CHANNELS_MAX: usize = 256;
/// Losses of channels that a peer's statistics remember.
pub const LOST_LINES_MAX: usize = 256;
/// NIC addresses one side may name.
pub const ADDRESSES_MAX: usize = 64;
/// Progress threads per endpoint.
pub const WORKERS_MAX: usize = 64;
/// Peers per endpoint.
pub const PEERS_MAX: usize = 4096;
/// Peers that have connected and wait for the user to accept them. Ended ones give way; when all are alive
/// the newest is refused.
pub const PEERS_UNACCEPTED_MAX: usize = 256;
/// Connections that have not yet proven anything; the oldest is dropped for a new one.
pub const HANDSHAKES_PENDING_MAX: usize = 256;
/// Bytes read from a connection before it has proven anything.
pub const HANDSHAKE_BYTES_MAX: usize = 4096;
/// Largest message on a control session (Noise's own limit is 65535 with its tag).
pub const CONTROL_MESSAGE_BYTES_MAX: usize = 60_000;
/// Control messages kept for a resumption.
pub const CONTROL_UNACKED_MAX: usize = 16 << 10;
/// Bytes of control messages kept for a resumption.
pub const CONTROL_UNACKED_BYTES_MAX: usize = 16 << 20;
/// A peer that leaves more than this unread on its control connection, beside what it has not acknowledged, is not
/// heard until it has read half.
pub const CONTROL_UNREAD_BYTES_MAX: usize = 1 << 20;
/// Simulated GPUs of one process.
pub const SIM_GPUS_MAX: usize = 16;
/// Address ranges of freed simulated GPU memory that stay reserved, so that a late touch faults.
pub const SIM_FREED_RANGES_KEPT: usize = 128;
/// CUDA GPUs of one process.
pub const CUDA_GPUS_MAX: usize = 64;
/// NICs, and other names of one folder of the kernel's, that a topology takes note of.
pub const NICS_LISTED_MAX: usize = 4096;
/// Processes of one run, and hosts of a launcher's list.
pub const RANKS_MAX: u32 = 1 << 16;
/// CPUs that a topology can number.
pub const CPUS_MAX: u32 = 1 << 16;
/// Oldest CUDA driver that will do, as drivers count: 12000 is CUDA 12.0.
pub const CUDA_DRIVER_VERSION_MIN: u32 = 12_000;
/// Launches of a connection's gathers that its GPU has at once; what arrives meanwhile goes into the next one.
pub const GATHER_LAUNCHES_MAX: usize = 2;
/// Copies of one launch, where scattered receives are gathered without a kernel.
pub const GATHER_COPIES_PER_LAUNCH_MAX: usize = 256;
/// Largest run of GPU memory that is staged at once, and so the largest chunk of it.
pub const STAGING_SLOT_BYTES: usize = 1 << 20;
/// Runs that a channel's copier has copied as one batch at most, where batches wait for it.
pub const STAGING_LIST_RUNS: usize = 8192;
/// Largest part of a payload for a GPU that is received in one call, and copied at once; and at most a quarter of its ring.
pub const STAGING_PART_BYTES: usize = STAGING_SLOT_BYTES;
/// Bytes received after which somebody looks which copies are done.
pub const STAGING_LOOK_BYTES: usize = 256 << 10;
/// Copies from a GPU that are as long as this together do not wait for more: what was copied first is sent first.
pub const STAGING_BATCH_BYTES: usize = 512 << 10;
/// Chunks of GPU memory are not cut smaller than this towards the end: each costs the GPU a few microseconds.
pub const STAGING_CHUNK_BYTES_MIN: usize = 256 << 10;
/// Pinned memory of one channel for one GPU, to receive into.
pub const STAGING_IN_RING_BYTES: usize = 4 * STAGING_SLOT_BYTES;
/// The same to send from: what is lent to a socket stays there until the peer has placed it. Rings of twice that length do
/// not stay in cache: 16 channels between two GPUs carry 12 to 22 % less, both directions together.
pub const STAGING_OUT_RING_BYTES: usize = 4 * STAGING_SLOT_BYTES;
/// Either of them, once a process has [`STAGING_RINGS_BYTES`].
pub const STAGING_SMALL_RING_BYTES: usize = 2 * STAGING_SLOT_BYTES;
/// Pinned memory of a process beyond which new rings are small.
pub const STAGING_RINGS_BYTES: usize = 2 << 30;
/// Pipes of a process through which pages of rings are lent to sockets: with `LENDING_PIPE_BYTES` for each half of what a
/// user may have without privileges. Channels that find none left copy.
pub const LENDING_PIPES_MAX: usize = 64;
/// Bytes that one such pipe holds: some calls' worth.
pub const LENDING_PIPE_BYTES: usize = 512 << 10;
/// Memory of GPUs and pinned memory of a process that is to be freed, and that nobody can use again, while there has been no
/// good time for that; with more of it a thread does so.
pub const DEFERRED_FREE_BYTES_MAX: usize = 128 << 20;
/// Shortest shared secret that is accepted.
pub const SECRET_BYTES_MIN: usize = 8;

/// Plugins that one `NCCL_NET_PLUGIN` may name.
pub const PLUGIN_NAMES_MAX: usize = 14;
/// Bytes of one such name, and of every name that a plugin gives for itself or a NIC.
pub const PLUGIN_NAME_BYTES_MAX: usize = 254;
/// Bytes of a path that a plugin gives.
pub const PLUGIN_PATH_BYTES_MAX: usize = 4095;
/// Tables that one process may load.
pub const PLUGINS_MAX: usize = 255;
/// Devices of one plugin.
pub const PLUGIN_DEVICES_MAX: usize = 256;
/// Room given to a plugin for a device's properties; some write more than their version has.
pub const PLUGIN_PROPERTIES_BYTES: usize = 1024;
/// Buffers of one grouped receive.
pub const GROUPED_RECEIVES_MAX: usize = 8;
/// Sizes that a plugin may write when a request is tested, whatever it was asked for.
pub const TESTED_SIZES_MAX: usize = 64;
/// Lines of plugins' logs that are kept, for reports of how a plugin died.
pub const PLUGIN_LOG_LINES_KEPT: usize = 32;
/// Of those, how many are told when one has died.
pub const PLUGIN_LOG_LINES_TOLD: usize = 3;
/// Bytes of one such line; `log.c` cuts the rest off.
pub const PLUGIN_LOG_LINE_BYTES_MAX: usize = 1024;
/// Bytes of a line that is written to a pipe at once (`PIPE_BUF`), so that lines never mix.
pub const PIPE_LINE_BYTES_MAX: usize = 4096;
/// Lines from one place of a plugin's source that pass in each `PLUGIN_LOG_INTERVAL`.
pub const PLUGIN_LOG_BURST_LINES: u64 = 16;
/// Kept lines of one such place.
pub const PLUGIN_LOG_LINES_PER_PLACE: usize = 4;
/// Places of plugins' sources that are told apart.
pub const PLUGIN_LOG_PLACES_MAX: usize = 256;

/// What NCCL lets a plugin fill to say where it listens (`NCCL_NET_HANDLE_MAXSIZE`), and a lane sends to the peer.
pub const LANE_HANDLE_BYTES: usize = 128;
/// Requests that may be posted per direction of a lane, unless configured: what TCPX and FastSocket have.
pub const LANE_WINDOW_DEFAULT: usize = 16;
/// Requests that may be configured: more than any plugin has.
pub const LANE_WINDOW_MAX: usize = 128;
/// Largest message of a lane, unless configured; with TCPX a larger one may have too many fragments.
pub const LANE_MESSAGE_BYTES_DEFAULT: usize = 512 << 10;
/// Smallest that can be configured.
pub const LANE_MESSAGE_BYTES_MIN: usize = 4096;
/// Largest over GPUDirect-TCPX, which ends the process at 2,048 fragments: fewer, as long as they have more than 512 bytes.
pub const TCPX_MESSAGE_BYTES_MAX: usize = 1 << 20;

/// A connection has this long to prove who it is.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Control sessions say something at least this often.
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(500);
/// After this much silence the control session is tried over another path.
pub const CONTROL_SUSPECT_AFTER: Duration = Duration::from_millis(1500);
/// Within so much silence a peer's loss is told (default; `Config::peer_timeout`).
pub const PEER_TIMEOUT_DEFAULT: Duration = Duration::from_secs(10);
/// A silent peer is given up so much before the limit, or a tenth of it if that is less: its last words may have
/// come late, and the control side looks only now and then, but at the limit the loss is to have been told.
pub const PEER_TIMEOUT_MARGIN: Duration = Duration::from_secs(1);
/// Longer times between two turns of the control side do not count as silence: we were stopped ourselves.
pub const CONTROL_TURNS_APART_MAX: Duration = Duration::from_secs(1);
/// When every connection of a peer was closed by its kernel, it has this long to come back.
pub const RESUME_GRACE: Duration = Duration::from_secs(2);
/// No acknowledgement from the peer's kernel for this long, with data waiting, means a dead path.
pub const PATH_DEAD_AFTER: Duration = Duration::from_millis(1400);
/// How often paths are looked at while something is in flight.
pub const PATH_CHECK_INTERVAL: Duration = Duration::from_millis(200);
/// When accepting fails for want of descriptors or memory, it is tried again this often.
pub const ACCEPT_RETRY_INTERVAL: Duration = Duration::from_millis(100);
/// Of an endpoint with several addresses each may take this long to answer, however little its share of the time is: a
/// handshake takes some round trips.
pub const ANSWER_SHARE_MIN: Duration = Duration::from_secs(1);
/// The same of the addresses that a name has, which are tried within whatever time there is.
pub const NAME_SHARE_MIN: Duration = Duration::from_millis(400);
/// How often a lost channel is dialled again.
pub const REDIAL_INTERVAL: Duration = Duration::from_millis(500);
/// Longest wait for one connection attempt.
pub const DIAL_TIMEOUT: Duration = Duration::from_secs(2);
/// Blocking helpers of a simulated GPU give up after this; long, since a stall may be part of a test.
pub const SIM_GPU_BLOCKING_TIMEOUT: Duration = Duration::from_secs(120);
/// A thread that is to let go of memory may do nothing at all for this long, while we run ourselves.
pub const ABANDON_TIMEOUT: Duration = Duration::from_secs(5);
/// A peer that was dropped is closed when nothing of what was posted to it has got on for so long.
pub const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);
/// Whoever changes settings of a NIC is done within this, or is stopped: others wait for it no longer.
pub const NIC_LOCK_TIMEOUT: Duration = Duration::from_secs(30);
/// An endpoint that is closed waits this long, if need be, for whoever changes settings of a NIC, however little of its
/// deadline is left: what is not undone then is left to the next start.
pub const NIC_END_MIN: Duration = Duration::from_secs(2);
/// A rule that could not be removed is tried again after this time; whoever removes rules waits no longer for others.
pub const UNSTEER_INTERVAL: Duration = Duration::from_secs(1);
/// A place of a plugin's source that logs too much is heard again after this time.
pub const PLUGIN_LOG_INTERVAL: Duration = Duration::from_secs(1);
/// Both directions of a lane have this long to come about.
pub const LANE_SETUP_TIMEOUT: Duration = Duration::from_secs(60);
/// Longest the oldest message of a lane may stand still, and a plugin's call not return (default).
pub const LANE_STALL_LIMIT_DEFAULT: Duration = Duration::from_secs(30);
/// After the first sign that a peer closes, what is posted has this long to arrive.
pub const LANE_CLOSING_TIMEOUT: Duration = Duration::from_secs(2);
/// A posted receive into memory that is taken back has this long to end before its channel does.
pub const LANE_ABANDON_TIMEOUT: Duration = Duration::from_secs(1);
/// What the kernel sends without a copy leaves it within this time once its connection is aborted: no queue of a NIC that
/// works holds a packet for longer.
pub const KERNEL_RELEASE_TIMEOUT: Duration = Duration::from_millis(100);
/// What a lane or connection that is closed was sending without a copy is waited for so long when its memory is taken back. Longer than the 5 s after
/// which the kernel has a NIC reset that sends nothing: progress threads do other things meanwhile.
pub const CLOSED_RELEASE_TIMEOUT: Duration = Duration::from_secs(6);
/// A GPU that has still to copy to memory that is taken back has this long, before whoever takes it back is told.
pub const GPU_ABANDON_TIMEOUT: Duration = Duration::from_secs(5);
/// A lane that fails without the plugin's saying why waits so long for the other end to say it, or to be seen to have
/// ended.
pub const LANE_FAILURE_GRACE: Duration = Duration::from_secs(4);
const _: () = assert!(LANE_FAILURE_GRACE.as_millis() > RESUME_GRACE.as_millis());
/// A thread that is to make a set-up call of a plugin waits so long for the one that is in such a call, and then looks
/// whether the call is still wanted.
pub const SETUP_LOCK_WAIT: Duration = Duration::from_millis(100);
/// How often a connection or a listener of a plugin is asked whether it is ready.
pub const LANE_SETUP_INTERVAL: Duration = Duration::from_millis(1);
/// The same of one that nobody waits for any more, and for how long at most: until then it is closed once it is ready.
pub const LANE_LINGER_INTERVAL: Duration = Duration::from_millis(20);
/// See [`LANE_LINGER_INTERVAL`].
pub const LANE_LINGER_TIMEOUT: Duration = Duration::from_secs(60);

/// The limits that an outbox and the inbox at its other end keep to, as values: both have the same.
#[derive(Clone, Copy, Debug)]
pub struct PeerLimits {
    /// See [`REORDER_FRAMES_MAX`].
    pub early_frames_max: usize,
    /// See [`NOTIFICATION_BYTES_MAX`].
    pub notification_bytes_max: usize,
    /// See [`EAGER_BYTES_MAX`].
    pub eager_bytes_max: usize,
    /// See [`EAGER_CREDIT_BYTES`].
    pub eager_credit_bytes: usize,
    /// See [`OUTSTANDING_READS_MAX`].
    pub reads_asked_max: usize,
    /// An operation of at most this many bytes travels as one frame, ahead of bulk.
    pub small_bytes_max: u64,
    /// A read of at most this many bytes goes before longer ones.
    pub short_read_bytes_max: u64,
}

impl Default for PeerLimits {
    fn default() -> PeerLimits {
        PeerLimits {
            early_frames_max: REORDER_FRAMES_MAX,
            notification_bytes_max: NOTIFICATION_BYTES_MAX,
            eager_bytes_max: EAGER_BYTES_MAX,
            eager_credit_bytes: EAGER_CREDIT_BYTES,
            reads_asked_max: OUTSTANDING_READS_MAX,
            small_bytes_max: SMALL_BYTES_MAX,
            short_read_bytes_max: SMALL_BYTES_MAX,
        }
    }
}

const _: () = assert!(PLUGIN_LOG_LINES_TOLD <= PLUGIN_LOG_LINES_KEPT);
/// A lane over devmem TCP that fails within this time did not last.
pub const LANE_SHORT_LIVED: Duration = Duration::from_secs(1);
/// So many of one channel in a row that did not last, or did not come about, end the session where no channel is left.
pub const LANES_SHORT_LIVED_MAX: usize = 32;
/// So many of one channel in a row that lasted longer, while no payload of the peer's moved, end the session.
pub const LANES_STALLED_MAX: usize = 3;
/// Receive queues of one NIC that an endpoint takes for devmem TCP at most.
pub const DEVMEM_QUEUES_MAX: usize = 64;
/// Memory that a NIC fills over devmem TCP, in bytes: the default, and its bounds.
pub const DEVMEM_POOL_BYTES_DEFAULT: usize = 64 << 20;
/// The least.
pub const DEVMEM_POOL_BYTES_MIN: usize = 1 << 20;
/// Messages of the largest size that a pool holds at least.
pub const DEVMEM_POOL_MESSAGES_MIN: usize = 4;
/// The most: fragments count their place in 32 bits.
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
