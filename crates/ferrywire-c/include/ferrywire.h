/* ferrywire moves GPU and host memory between machines over ordinary TCP NICs.
 *
 * Generated from the source of ferrywire-c; do not edit.
 *
 * Every function that returns int gives FERRYWIRE_OK, FERRYWIRE_PENDING, or a number below zero, the kind of
 * error; ferrywire_last_error() has the message. Handles are not pointers: a handle that is NULL, freed or of another
 * kind is FERRYWIRE_ERROR_USAGE. All functions may be called from all threads. Handles are freed in any order; what
 * they stand for lives as long as it is used. In a forked child the parent's endpoints give errors.
 *
 * It is believed that strings end with a zero, that buffers have the size that is said, and that memory that is
 * registered stays as long as is said there. */


#ifndef FERRYWIRE_H
#define FERRYWIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/**
 * Done.
 */
#define FERRYWIRE_OK 0

/**
 * Not there yet: nothing failed, ask or wait again.
 */
#define FERRYWIRE_PENDING 1

/**
 * The caller used the library wrongly.
 */
#define FERRYWIRE_ERROR_USAGE -1

/**
 * This host: its sockets, memory or limits.
 */
#define FERRYWIRE_ERROR_LOCAL -2

/**
 * A GPU of this host, or its use.
 */
#define FERRYWIRE_ERROR_GPU -3

/**
 * An NCCL net plugin, or its file.
 */
#define FERRYWIRE_ERROR_PLUGIN -4

/**
 * The peer or the network to it.
 */
#define FERRYWIRE_ERROR_PEER -5

/**
 * The other end is not allowed in, or does not let us in.
 */
#define FERRYWIRE_ERROR_REFUSED -6

/**
 * ferrywire itself: please report it.
 */
#define FERRYWIRE_ERROR_INTERNAL -7

/**
 * The time was up. What was waited for goes on.
 */
#define FERRYWIRE_ERROR_TIMEOUT -8

/**
 * The transfer was cancelled.
 */
#define FERRYWIRE_ERROR_CANCELLED -9

/**
 * The endpoint, or the peer, closed in an orderly way.
 */
#define FERRYWIRE_ERROR_CLOSED -10

/**
 * The message or value does not fit into the buffer: how many bytes it has was told.
 */
#define FERRYWIRE_ERROR_TOO_SMALL -11

/**
 * Room that fits every notification, in bytes. What can be sent is shorter: at most 8192 bytes in this version.
 */
#define FERRYWIRE_NOTIFICATION_BYTES_MAX 65535

/**
 * Room that fits a descriptor, in bytes.
 */
#define FERRYWIRE_DESCRIPTOR_BYTES_MAX 64

/**
 * A checked list of blocks between local and remote regions. It keeps its local regions registered.
 */
typedef struct ferrywire_blocks ferrywire_blocks;

/**
 * One end of transfers: memory, NICs, threads and peers.
 */
typedef struct ferrywire_endpoint ferrywire_endpoint;

/**
 * Options of an endpoint, from `ferrywire_options_new`.
 */
typedef struct ferrywire_options ferrywire_options;

/**
 * A connected remote endpoint.
 */
typedef struct ferrywire_peer ferrywire_peer;

/**
 * Registered local memory.
 */
typedef struct ferrywire_region ferrywire_region;

/**
 * A region of another endpoint, as its descriptor tells it.
 */
typedef struct ferrywire_remote ferrywire_remote;

/**
 * An operation under way.
 */
typedef struct ferrywire_transfer ferrywire_transfer;

/**
 * A descriptor that is readable when one of the things attached to it has something to give.
 */
typedef struct ferrywire_wakeup ferrywire_wakeup;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * Why this thread's last call that failed did so: what failed, where, and what to try. Empty if none has. The text is
 * valid until the next call that fails on this thread.
 */
const char *ferrywire_last_error(void);

/**
 * The library's version.
 */
const char *ferrywire_version(void);

/**
 * Makes options that are all at their defaults.
 */
int ferrywire_options_new(ferrywire_options **options);

/**
 * Frees options; endpoints that were opened with them stay as they are.
 */
int ferrywire_options_free(ferrywire_options *options);

/**
 * Listens on this IP address, such as "0.0.0.0:7420"; port 0 chooses one.
 */
int ferrywire_options_listen(ferrywire_options *options, const char *address);

/**
 * The shared secret, the same on both ends, at least 8 bytes. Needed beyond loopback.
 */
int ferrywire_options_secret(ferrywire_options *options, const void *secret, size_t secret_bytes);

/**
 * A name for people, at most 64 bytes.
 */
int ferrywire_options_label(ferrywire_options *options, const char *label);

/**
 * One more NIC to use, by name. Default: all that share a subnet with the peer, else the route's own.
 */
int ferrywire_options_nic(ferrywire_options *options,
                          const char *name);

/**
 * Channels for each peer. Default: by cores and NICs.
 */
int ferrywire_options_channels(ferrywire_options *options, size_t channels);

/**
 * Progress threads. With 0 there are none: `ferrywire_endpoint_progress` and calls that wait drive everything.
 */
int ferrywire_options_threads(ferrywire_options *options,
                              size_t threads);

/**
 * The largest chunk, in bytes.
 */
int ferrywire_options_chunk_bytes(ferrywire_options *options, size_t bytes);

/**
 * Frames in flight on each channel.
 */
int ferrywire_options_window(ferrywire_options *options, size_t frames);

/**
 * Whether chunks carry a CRC-32.
 */
int ferrywire_options_crc(ferrywire_options *options, bool on);

/**
 * Socket buffers of data connections, each way, in bytes. Default: by path.
 */
int ferrywire_options_socket_buffer_bytes(ferrywire_options *options, size_t bytes);

/**
 * Silence within which a peer's loss is told, in milliseconds; at least 3000.
 */
int ferrywire_options_peer_timeout_ms(ferrywire_options *options, uint64_t milliseconds);

/**
 * Opens an endpoint: checks the options, listens, starts its threads. `options` may be NULL: all defaults, and it does
 * not listen.
 */
int ferrywire_endpoint_open(const ferrywire_options *options,
                            ferrywire_endpoint **endpoint);

/**
 * Finishes with all peers and ends the threads, within about `timeout_ms` milliseconds (less than 0: without end). The
 * handle is still to be freed.
 */
int ferrywire_endpoint_close(ferrywire_endpoint *endpoint,
                             int64_t timeout_ms);

/**
 * Frees the handle. An endpoint that was not closed is closed now, which may take seconds. NULL is fine.
 */
int ferrywire_endpoint_free(ferrywire_endpoint *endpoint);

/**
 * The endpoint's identity, 16 bytes: another one at each start.
 */
int ferrywire_endpoint_identity(const ferrywire_endpoint *endpoint,
                                void *identity,
                                size_t capacity);

/**
 * The address that it listens on, with its real port, as a string with its closing zero. `bytes` (or NULL) is told how
 * long that is, also when the buffer is too small.
 */
int ferrywire_endpoint_address(const ferrywire_endpoint *endpoint,
                               char *address,
                               size_t capacity,
                               size_t *bytes);

/**
 * What another endpoint needs to connect, as opaque bytes: put them into a message, a file, a store. `bytes` (or NULL)
 * is told how many there are, also when the buffer is too small.
 */
int ferrywire_endpoint_metadata(const ferrywire_endpoint *endpoint,
                                void *metadata,
                                size_t capacity,
                                size_t *bytes);

/**
 * Turns everything once that no thread turns; `worked` (or NULL) is told whether anything happened. Only needed in an
 * endpoint without threads.
 */
int ferrywire_endpoint_progress(ferrywire_endpoint *endpoint,
                                bool *worked);

/**
 * Connects to an endpoint that listens on `address`, an IP address with a port ("10.0.0.1:7420"): names are not looked up. `timeout_ms` is milliseconds, less than 0
 * without end.
 */
int ferrywire_connect(ferrywire_endpoint *endpoint,
                      const char *address,
                      int64_t timeout_ms,
                      ferrywire_peer **peer);

/**
 * Connects to the endpoint that made this metadata, and to no other: one that was started again is refused.
 */
int ferrywire_connect_metadata(ferrywire_endpoint *endpoint,
                               const void *metadata,
                               size_t metadata_bytes,
                               int64_t timeout_ms,
                               ferrywire_peer **peer);

/**
 * Waits for the next peer that connects. With `timeout_ms` 0: FERRYWIRE_PENDING if there is none.
 */
int ferrywire_accept(ferrywire_endpoint *endpoint, int64_t timeout_ms, ferrywire_peer **peer);

/**
 * Finishes what was posted, on both sides, then closes. The handle is still to be freed.
 */
int ferrywire_peer_close(ferrywire_peer *peer, int64_t timeout_ms);

/**
 * Frees the handle; with the last one of a peer the connection is closed once what was posted is sent. NULL is fine.
 */
int ferrywire_peer_free(ferrywire_peer *peer);

/**
 * FERRYWIRE_OK while the peer is there; else why it is lost.
 */
int ferrywire_peer_error(const ferrywire_peer *peer);

/**
 * Its address, as a string with its closing zero; see `ferrywire_endpoint_address` for the buffer.
 */
int ferrywire_peer_address(const ferrywire_peer *peer,
                           char *address,
                           size_t capacity,
                           size_t *bytes);

/**
 * The label that it was given where it was opened, as a string with its closing zero; empty without one.
 */
int ferrywire_peer_label(const ferrywire_peer *peer,
                         char *label,
                         size_t capacity,
                         size_t *bytes);

/**
 * Its identity, 16 bytes: another one after a restart.
 */
int ferrywire_peer_identity(const ferrywire_peer *peer, void *identity, size_t capacity);

/**
 * Another handle of the peer: what is posted through it uses memory only once everything that `stream` (a CUstream or
 * cudaStream_t of GPU `gpu`'s primary context; NULL is the default one) has to do by now is done. The caller goes on
 * at once. To be freed as any other.
 */
int ferrywire_peer_on_stream(const ferrywire_peer *peer,
                             uint32_t gpu,
                             void *stream,
                             ferrywire_peer **after);

/**
 * The next notification of the peer. With `timeout_ms` 0: FERRYWIRE_PENDING if none is here. `bytes` (or NULL) is told
 * its length; one that does not fit (FERRYWIRE_ERROR_TOO_SMALL) is kept for the next call of any thread. Those that came
 * before a peer was lost are still given.
 */
int ferrywire_next_notification(ferrywire_peer *peer,
                                int64_t timeout_ms,
                                void *message,
                                size_t capacity,
                                size_t *bytes);

/**
 * Registers `bytes` bytes at `address`: of the host, or of a GPU (CUDA), whose addresses are recognised.
 *
 * With `release` the memory has to stay until `release(context)` is called, once: when no thread, NIC, GPU or peer can
 * touch it any more. That is after the region's handle is freed, and all lists of blocks and operations with it have
 * ended; a thread of the endpoint's own calls it, or the one in `ferrywire_deregister`, or, where the endpoint is gone
 * first, the one that frees the last handle of the region or of a list with it. It may block. When this call fails, it
 * is not called.
 *
 * Without (NULL) the memory has to stay until `ferrywire_deregister` or `ferrywire_region_free`, which wait for
 * operations, has returned FERRYWIRE_OK.
 */
int ferrywire_register(ferrywire_endpoint *endpoint,
                       void *address,
                       size_t bytes,
                       void (*release)(void*),
                       void *context,
                       ferrywire_region **region);

/**
 * Allocates and registers `bytes` zeroed bytes of host memory, which live as long as they are needed.
 */
int ferrywire_allocate(ferrywire_endpoint *endpoint,
                       size_t bytes,
                       ferrywire_region **region);

/**
 * Where its bytes begin: of host memory, which peers may change at any time, or an address of a GPU. NULL for a wrong
 * handle.
 */
void *ferrywire_region_address(const ferrywire_region *region);

/**
 * Its size in bytes; 0 for a wrong handle.
 */
uint64_t ferrywire_region_bytes(const ferrywire_region *region);

/**
 * Where its bytes live, in words ("host memory"), as a string with its closing zero; see `ferrywire_endpoint_address`
 * for the buffer.
 */
int ferrywire_region_location(const ferrywire_region *region,
                              char *location,
                              size_t capacity,
                              size_t *bytes);

/**
 * What a peer needs to reach the region, as opaque bytes. `bytes` (or NULL) is told how many there are, also when the
 * buffer is too small.
 */
int ferrywire_region_descriptor(const ferrywire_region *region,
                                void *descriptor,
                                size_t capacity,
                                size_t *bytes);

/**
 * Ends the registration: from here on peers are refused, and when this returns FERRYWIRE_OK nothing touches the memory,
 * and it has been released. While operations of this endpoint use it that is an error, and the memory not free: try
 * again. The handle is still to be freed.
 */
int ferrywire_deregister(ferrywire_region *region);

/**
 * Frees the handle, and ends the registration with the last user of it. NULL is fine.
 *
 * Of memory that was registered without a release function the registration ends now, as with `ferrywire_deregister`,
 * whatever lists of blocks there are: when this returns FERRYWIRE_OK nothing touches the memory. Where operations use it
 * even after a wait, that is the error, and the handle stays: try again.
 */
int ferrywire_region_free(ferrywire_region *region);

/**
 * Reads what `ferrywire_region_descriptor` of another endpoint gave.
 */
int ferrywire_remote_open(const void *descriptor,
                          size_t descriptor_bytes,
                          ferrywire_remote **remote);

/**
 * Its size in bytes; 0 for a wrong handle.
 */
uint64_t ferrywire_remote_bytes(const ferrywire_remote *remote);

/**
 * Frees the handle; the region itself is not touched. NULL is fine.
 */
int ferrywire_remote_free(ferrywire_remote *remote);

/**
 * Makes a list of `count` blocks: number i is at `local_offsets[i]` of `local` and at `remote_offsets[i]` of `remote`,
 * and `lengths[i]` long, or, where `lengths` is NULL, `length` long; all in bytes. The first block that is not inside
 * both regions is an error that names it.
 */
int ferrywire_blocks_new(const ferrywire_region *local,
                         const ferrywire_remote *remote,
                         const int64_t *local_offsets,
                         const int64_t *remote_offsets,
                         const int64_t *lengths,
                         uint64_t length,
                         size_t count,
                         ferrywire_blocks **blocks);

/**
 * Makes one list of all blocks of `count` others, in their order, whatever regions they are of: one operation moves
 * them, and one notification can follow them. The others stay as they are.
 */
int ferrywire_blocks_join(const ferrywire_blocks *const *lists,
                          size_t count,
                          ferrywire_blocks **blocks);

/**
 * Blocks in the list; 0 for a wrong handle.
 */
size_t ferrywire_blocks_count(const ferrywire_blocks *blocks);

/**
 * Frees the handle; operations with it go on. NULL is fine.
 */
int ferrywire_blocks_free(ferrywire_blocks *blocks);

/**
 * Writes `bytes` bytes of `source` into the peer's region. Complete when they are in its memory. `message` (or NULL,
 * else at least a byte) is delivered to the peer then.
 */
int ferrywire_write(ferrywire_peer *peer,
                    const ferrywire_region *source,
                    uint64_t source_offset,
                    const ferrywire_remote *target,
                    uint64_t target_offset,
                    uint64_t bytes,
                    const void *message,
                    size_t message_bytes,
                    ferrywire_transfer **transfer);

/**
 * Reads `bytes` bytes of the peer's region into `target`.
 */
int ferrywire_read(ferrywire_peer *peer,
                   const ferrywire_region *target,
                   uint64_t target_offset,
                   const ferrywire_remote *source,
                   uint64_t source_offset,
                   uint64_t bytes,
                   ferrywire_transfer **transfer);

/**
 * Sends a message with a tag; it meets the peer's receives of that tag in the order of posting.
 */
int ferrywire_send(ferrywire_peer *peer,
                   uint64_t tag,
                   const ferrywire_region *source,
                   uint64_t offset,
                   uint64_t bytes,
                   ferrywire_transfer **transfer);

/**
 * Receives the next message with this tag, of at most `bytes` bytes. The transfer's bytes are the message's length.
 */
int ferrywire_recv(ferrywire_peer *peer,
                   uint64_t tag,
                   const ferrywire_region *target,
                   uint64_t offset,
                   uint64_t bytes,
                   ferrywire_transfer **transfer);

/**
 * Writes the blocks of a list, or those whose numbers are among `count` `indices` (or NULL: all), as one operation.
 * `message` as in `ferrywire_write`, once the bytes of all blocks are in the peer's memory.
 */
int ferrywire_write_blocks(ferrywire_peer *peer,
                           const ferrywire_blocks *blocks,
                           const uint32_t *indices,
                           size_t count,
                           const void *message,
                           size_t message_bytes,
                           ferrywire_transfer **transfer);

/**
 * Reads the blocks of a list, or those whose numbers are among `count` `indices` (or NULL: all), as one operation.
 */
int ferrywire_read_blocks(ferrywire_peer *peer,
                          const ferrywire_blocks *blocks,
                          const uint32_t *indices,
                          size_t count,
                          ferrywire_transfer **transfer);

/**
 * Delivers a small message, of at most 8192 bytes, which may be empty, after everything posted to this peer before it.
 */
int ferrywire_notify(ferrywire_peer *peer,
                     const void *message,
                     size_t message_bytes,
                     ferrywire_transfer **transfer);

/**
 * The outcome, or FERRYWIRE_PENDING while it is under way. `moved` (or NULL) is told how many bytes were moved.
 */
int ferrywire_transfer_poll(const ferrywire_transfer *transfer,
                            uint64_t *moved);

/**
 * Waits for the end, at most `total_ms` milliseconds altogether and `stall_ms` without progress; less than 0 is without
 * end. `moved` (or NULL) is told how many bytes were moved. After FERRYWIRE_ERROR_TIMEOUT it is still under way.
 */
int ferrywire_transfer_wait(const ferrywire_transfer *transfer,
                            int64_t total_ms,
                            int64_t stall_ms,
                            uint64_t *moved);

/**
 * Waits until one of `count` transfers with one peer has ended, well or not, and puts its place among them at `first`;
 * the transfer itself tells how it ended. Limits as in `ferrywire_transfer_wait`, `stall_ms` for a time in which none of
 * them moves. After FERRYWIRE_ERROR_TIMEOUT all are still under way.
 */
int ferrywire_transfer_wait_any(ferrywire_transfer *const *transfers,
                                size_t count,
                                int64_t total_ms,
                                int64_t stall_ms,
                                size_t *first);

/**
 * Bytes that have arrived so far; 0 for a wrong handle.
 */
uint64_t ferrywire_transfer_bytes_moved(const ferrywire_transfer *transfer);

/**
 * Ends the operation early, if it is not too late. It still has to be waited for before its memory is free: the
 * outcome is FERRYWIRE_ERROR_CANCELLED, or FERRYWIRE_OK if everything had arrived.
 */
int ferrywire_transfer_cancel(ferrywire_transfer *transfer);

/**
 * Lets a CUDA stream wait, on the device, until the transfer has ended, however it ends; `stream` as in
 * `ferrywire_peer_on_stream`. While it waits no memory of a GPU may be freed in the process.
 */
int ferrywire_transfer_block_stream(const ferrywire_transfer *transfer,
                                    uint32_t gpu,
                                    void *stream);

/**
 * Frees the handle; the operation runs on. NULL is fine.
 */
int ferrywire_transfer_free(ferrywire_transfer *transfer);

/**
 * Makes a wakeup, not readable. Attachments wake once: poll what was attached, and attach again what has nothing yet.
 */
int ferrywire_wakeup_new(ferrywire_wakeup **wakeup);

/**
 * The descriptor, for poll and epoll; it stays the wakeup's. Less than 0 for a wrong handle.
 */
int ferrywire_wakeup_fd(const ferrywire_wakeup *wakeup);

/**
 * Makes it not readable. Clear first, and look at what was attached afterwards; do not read the descriptor.
 */
int ferrywire_wakeup_clear(ferrywire_wakeup *wakeup);

/**
 * Frees it, and closes its descriptor; what was attached wakes nobody. NULL is fine.
 */
int ferrywire_wakeup_free(ferrywire_wakeup *wakeup);

/**
 * Makes `wakeup` readable once the transfer has ended, also when it already has.
 */
int ferrywire_transfer_arm(const ferrywire_transfer *transfer, const ferrywire_wakeup *wakeup);

/**
 * Makes `wakeup` readable once `ferrywire_next_notification` has something to give, or the peer is lost.
 */
int ferrywire_peer_arm(const ferrywire_peer *peer,
                       const ferrywire_wakeup *wakeup);

/**
 * Makes `wakeup` readable once there is a peer to accept, or the endpoint is closed.
 */
int ferrywire_endpoint_arm(const ferrywire_endpoint *endpoint, const ferrywire_wakeup *wakeup);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* FERRYWIRE_H */
