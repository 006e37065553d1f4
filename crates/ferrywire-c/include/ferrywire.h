/* ferrywire moves GPU and host memory between machines over ordinary TCP NICs.
 *
 * Generated from the source of ferrywire-c; do not edit.
 *
 * Every function that returns int returns FERRYWIRE_OK, FERRYWIRE_PENDING where its comment names it, or a negative
 * number: the kind of error (FERRYWIRE_ERROR_...). ferrywire_last_error() returns the message of the calling thread's
 * last error.
 *
 * A handle is not a pointer. A function that is given a handle that is NULL, freed or of another kind returns
 * FERRYWIRE_ERROR_USAGE. Handles may be freed in any order; an object lives as long as an operation uses it. Every
 * function may be called from every thread. In a forked child, calls on the parent's endpoints fail.
 *
 * The library cannot check three things and relies on them: strings are NUL-terminated, buffers and arrays have the
 * stated size, and registered memory stays valid as long as ferrywire_register requires. */


#ifndef FERRYWIRE_H
#define FERRYWIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/**
 * The call succeeded.
 */
#define FERRYWIRE_OK 0

/**
 * Nothing failed, and the result is not there yet: call or wait again.
 */
#define FERRYWIRE_PENDING 1

/**
 * The caller used the library wrongly.
 */
#define FERRYWIRE_ERROR_USAGE -1

/**
 * A resource of this host failed or is short: sockets, memory, limits.
 */
#define FERRYWIRE_ERROR_LOCAL -2

/**
 * A GPU of this host failed, or cannot be used in this way.
 */
#define FERRYWIRE_ERROR_GPU -3

/**
 * An NCCL net plugin failed, or its file cannot be loaded.
 */
#define FERRYWIRE_ERROR_PLUGIN -4

/**
 * The peer, or the network to it, failed.
 */
#define FERRYWIRE_ERROR_PEER -5

/**
 * One end refused the other, for example because of its version, secret, identity or configuration.
 */
#define FERRYWIRE_ERROR_REFUSED -6

/**
 * A defect of ferrywire: please report it.
 */
#define FERRYWIRE_ERROR_INTERNAL -7

/**
 * The timeout passed. A transfer that was waited for continues.
 */
#define FERRYWIRE_ERROR_TIMEOUT -8

/**
 * The transfer was cancelled.
 */
#define FERRYWIRE_ERROR_CANCELLED -9

/**
 * The endpoint or the peer was closed in an orderly way.
 */
#define FERRYWIRE_ERROR_CLOSED -10

/**
 * The value does not fit into the buffer; the call has set the number of bytes that it needs.
 */
#define FERRYWIRE_ERROR_TOO_SMALL -11

/**
 * Size in bytes of a buffer that holds every notification. This version sends at most 8192 bytes.
 */
#define FERRYWIRE_NOTIFICATION_BYTES_MAX 65535

/**
 * Size in bytes of a buffer that holds every descriptor.
 */
#define FERRYWIRE_DESCRIPTOR_BYTES_MAX 64

/**
 * A checked list of blocks between local and remote regions. The list keeps its local regions registered.
 */
typedef struct ferrywire_blocks ferrywire_blocks;

/**
 * One GPU or the host's memory, with its NICs, progress threads, regions and peers.
 */
typedef struct ferrywire_endpoint ferrywire_endpoint;

/**
 * Options of an endpoint that is still to be opened. Values are checked by `ferrywire_endpoint_open`.
 */
typedef struct ferrywire_options ferrywire_options;

/**
 * A connected remote endpoint.
 */
typedef struct ferrywire_peer ferrywire_peer;

/**
 * Registered memory of this process. Peers that have its descriptor can read and write it.
 */
typedef struct ferrywire_region ferrywire_region;

/**
 * A region of another endpoint, as its descriptor describes it.
 */
typedef struct ferrywire_remote ferrywire_remote;

/**
 * A posted operation, for polling, waiting and cancelling.
 */
typedef struct ferrywire_transfer ferrywire_transfer;

/**
 * A file descriptor that becomes readable when a transfer, peer or endpoint armed with it has something to return.
 */
typedef struct ferrywire_wakeup ferrywire_wakeup;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * Returns the message of this thread's last call that failed: what failed, where, and what to try. Empty if no call
 * has failed. The text is valid until the next call on this thread fails.
 */
const char *ferrywire_last_error(void);

/**
 * Returns the library's version, such as "0.1.0".
 */
const char *ferrywire_version(void);

/**
 * Makes an options object in which every option has its default.
 */
int ferrywire_options_new(ferrywire_options **options);

/**
 * Frees the options; endpoints opened with them are not affected. NULL is allowed.
 */
int ferrywire_options_free(ferrywire_options *options);

/**
 * Listens on an IP address with a port, such as "0.0.0.0:7420". Port 0 chooses a free port; 0.0.0.0 listens on every
 * NIC. Default: the endpoint does not listen.
 */
int ferrywire_options_listen(ferrywire_options *options,
                             const char *address);

/**
 * Sets the shared secret, at least 8 bytes and equal on both ends. Required for connections beyond loopback.
 */
int ferrywire_options_secret(ferrywire_options *options,
                             const void *secret,
                             size_t secret_bytes);

/**
 * Sets a label that peers and messages show, at most 64 bytes. Default: none.
 */
int ferrywire_options_label(ferrywire_options *options, const char *label);

/**
 * Adds a NIC to use, by name; call again for more NICs. Default: all NICs that share a subnet with the peer, or else
 * the NIC of the route to the peer.
 */
int ferrywire_options_nic(ferrywire_options *options,
                          const char *name);

/**
 * Sets the number of channels (data connections) of each peer; if both ends set one, the smaller counts. Default:
 * chosen from cores, NICs and round trip.
 */
int ferrywire_options_channels(ferrywire_options *options,
                               size_t channels);

/**
 * Sets the number of progress threads. With 0 no thread makes progress: the application calls
 * `ferrywire_endpoint_progress`, or a call that waits. Default: chosen from the number of cores.
 */
int ferrywire_options_threads(ferrywire_options *options, size_t threads);

/**
 * Sets the largest chunk of a transfer, in bytes: 4096 to 4194304. Default: 2097152.
 * If both ends set one, the smaller counts.
 */
int ferrywire_options_chunk_bytes(ferrywire_options *options, size_t bytes);

/**
 * Sets the window: the frames in flight on each channel, 1 to 1024. Default: 1024.
 * The smaller of both ends counts.
 */
int ferrywire_options_window(ferrywire_options *options, size_t frames);

/**
 * Sets whether each chunk carries a CRC-32. One end's wish is enough. Default: false.
 */
int ferrywire_options_crc(ferrywire_options *options, bool on);

/**
 * Sets whether data connections are encrypted: `off`, `preferred` or `required`. A session is encrypted if one end
 * requires it or both prefer it, and refused if one end requires it and the other has it off. Default: `off`.
 */
int ferrywire_options_encryption(ferrywire_options *options,
                                 const char *when);

/**
 * Sets whether data connections that are not encrypted are authenticated: bytes that were changed on the way then
 * never reach memory. One end's wish is enough. Default: false.
 */
int ferrywire_options_keyed_checksum(ferrywire_options *options,
                                     bool on);

/**
 * Sets the size of the socket buffers of data connections, for each direction, in bytes. Default: chosen from the
 * path.
 */
int ferrywire_options_socket_buffer_bytes(ferrywire_options *options,
                                          size_t bytes);

/**
 * Sets the time within which the loss of a silent peer is reported, in milliseconds; at least 3000. Default: 10000.
 */
int ferrywire_options_peer_timeout_ms(ferrywire_options *options,
                                      uint64_t milliseconds);

/**
 * Opens an endpoint: checks the options, listens, starts the threads. `options` NULL means all defaults; the endpoint
 * then does not listen.
 *
 * Errors: FERRYWIRE_ERROR_USAGE for an impossible option, FERRYWIRE_ERROR_LOCAL if this host refuses, for example
 * because the port is in use.
 */
int ferrywire_endpoint_open(const ferrywire_options *options,
                            ferrywire_endpoint **endpoint);

/**
 * Accepts no new peer, finishes with all peers, stops listening and ends the threads: the port is free then. That takes
 * about `timeout_ms` milliseconds at most; a negative value is no limit. The endpoint is closed also when the call fails:
 * with FERRYWIRE_ERROR_TIMEOUT if a peer did not finish in time, with FERRYWIRE_ERROR_PEER if a peer was lost before it
 * had finished. The handle still has to be freed.
 */
int ferrywire_endpoint_close(ferrywire_endpoint *endpoint,
                             int64_t timeout_ms);

/**
 * Frees the handle. An endpoint that is still open is closed first, which may take seconds; calls of other threads that
 * wait for the endpoint return FERRYWIRE_ERROR_CLOSED. NULL is allowed.
 */
int ferrywire_endpoint_free(ferrywire_endpoint *endpoint);

/**
 * Copies the endpoint's identity, 16 bytes, into `identity`. Each start of an endpoint makes a new identity.
 */
int ferrywire_endpoint_identity(const ferrywire_endpoint *endpoint,
                                void *identity,
                                size_t capacity);

/**
 * Copies the address on which the endpoint listens, with its real port, into `address`, a buffer of `capacity` bytes,
 * as a NUL-terminated string. Sets `*bytes`, unless `bytes` is NULL, to the string's length with its NUL, also if the
 * buffer is too small (FERRYWIRE_ERROR_TOO_SMALL). FERRYWIRE_ERROR_USAGE if the endpoint does not listen.
 */
int ferrywire_endpoint_address(const ferrywire_endpoint *endpoint,
                               char *address,
                               size_t capacity,
                               size_t *bytes);

/**
 * Copies the endpoint's identity and addresses, as opaque bytes for `ferrywire_connect_metadata`, into the buffer of
 * `capacity` bytes; the application carries them to the other process. Sets `*bytes`, unless `bytes` is NULL, to the
 * number of bytes, also if the buffer is too small (FERRYWIRE_ERROR_TOO_SMALL).
 */
int ferrywire_endpoint_metadata(const ferrywire_endpoint *endpoint,
                                void *metadata,
                                size_t capacity,
                                size_t *bytes);

/**
 * Makes one pass over everything that no thread moves forward, and sets `*worked`, unless `worked` is NULL, to whether
 * anything happened; a GPU may copy although nothing did. Only needed for an endpoint without threads.
 */
int ferrywire_endpoint_progress(ferrywire_endpoint *endpoint,
                                bool *worked);

/**
 * Connects to the endpoint that listens on `address`, an IP address with a port ("10.0.0.1:7420"); host names are not
 * resolved. Waits at most `timeout_ms` milliseconds; a negative value is no limit.
 *
 * Errors: FERRYWIRE_ERROR_PEER if no endpoint answers, FERRYWIRE_ERROR_REFUSED for a wrong secret,
 * FERRYWIRE_ERROR_TIMEOUT.
 */
int ferrywire_connect(ferrywire_endpoint *endpoint,
                      const char *address,
                      int64_t timeout_ms,
                      ferrywire_peer **peer);

/**
 * Connects to the endpoint that made this metadata, and to no other: an endpoint that has restarted since has another
 * identity and is refused (FERRYWIRE_ERROR_REFUSED). Tries all addresses in the metadata, in `timeout_ms` milliseconds
 * altogether; a negative value is no limit.
 */
int ferrywire_connect_metadata(ferrywire_endpoint *endpoint,
                               const void *metadata,
                               size_t metadata_bytes,
                               int64_t timeout_ms,
                               ferrywire_peer **peer);

/**
 * Waits at most `timeout_ms` milliseconds for the next peer that connects; a negative value is no limit. With 0 the
 * call does not wait and returns FERRYWIRE_PENDING if no peer has connected.
 *
 * Errors: FERRYWIRE_ERROR_TIMEOUT; FERRYWIRE_ERROR_CLOSED once the endpoint is closed; FERRYWIRE_ERROR_USAGE if the
 * endpoint does not listen.
 */
int ferrywire_accept(ferrywire_endpoint *endpoint,
                     int64_t timeout_ms,
                     ferrywire_peer **peer);

/**
 * Finishes on both sides what was posted, then closes the connection, within about `timeout_ms` milliseconds; a
 * negative value is no limit. The peer is closed also when the call fails: with FERRYWIRE_ERROR_TIMEOUT if the peer
 * did not finish in time, with FERRYWIRE_ERROR_PEER if it was lost before it had finished. The handle still has to be
 * freed.
 */
int ferrywire_peer_close(ferrywire_peer *peer,
                         int64_t timeout_ms);

/**
 * Frees the handle. When the peer's last handle is freed, the connection is closed after what was posted has been
 * sent. NULL is allowed.
 */
int ferrywire_peer_free(ferrywire_peer *peer);

/**
 * Returns FERRYWIRE_OK while the peer is connected, or else the status of the error by which it was lost.
 */
int ferrywire_peer_error(const ferrywire_peer *peer);

/**
 * Copies the address of the remote end of the control connection into `address` as a NUL-terminated string. Buffer and
 * errors as in `ferrywire_endpoint_address`.
 */
int ferrywire_peer_address(const ferrywire_peer *peer,
                           char *address,
                           size_t capacity,
                           size_t *bytes);

/**
 * Copies the label that the remote endpoint was opened with into `label` as a NUL-terminated string, empty if it has
 * none. Buffer and errors as in `ferrywire_endpoint_address`.
 */
int ferrywire_peer_label(const ferrywire_peer *peer,
                         char *label,
                         size_t capacity,
                         size_t *bytes);

/**
 * Copies the remote endpoint's identity, 16 bytes, into `identity`. A restarted endpoint has a new identity.
 */
int ferrywire_peer_identity(const ferrywire_peer *peer,
                            void *identity,
                            size_t capacity);

/**
 * Makes another handle of the peer, for operations in the order of a GPU's work. Operations posted through this handle
 * use memory only after the work that is in `stream` now has finished. `stream` is a CUstream or cudaStream_t of the
 * primary context of GPU `gpu`, and captures no CUDA graph; NULL is the default stream. The call does not wait for the
 * stream. The new handle is freed like any other.
 */
int ferrywire_peer_on_stream(const ferrywire_peer *peer,
                             uint32_t gpu,
                             void *stream,
                             ferrywire_peer **after);

/**
 * Takes the peer's next notification. Waits at most `timeout_ms` milliseconds; a negative value is no limit. With 0
 * the call does not wait and returns FERRYWIRE_PENDING if there is none. Sets `*bytes`, unless `bytes` is NULL, to the
 * notification's length. A notification that does not fit (FERRYWIRE_ERROR_TOO_SMALL) is kept for the next call of any
 * thread. Notifications that arrived before the peer was lost are still returned.
 */
int ferrywire_next_notification(ferrywire_peer *peer,
                                int64_t timeout_ms,
                                void *message,
                                size_t capacity,
                                size_t *bytes);

/**
 * Registers `bytes` bytes at `address`, in host memory or on a CUDA GPU; the address decides which. Peers that are
 * given the region's descriptor can then read and write the memory.
 *
 * With `release`, the memory has to stay valid until the library calls `release(context)`. The library calls it once,
 * when no thread, NIC, GPU or peer can touch the memory any more: after the region's handle is freed and every block
 * list and operation that uses the region has ended. A thread of the endpoint that does nothing else makes the call,
 * so the function may block. `ferrywire_deregister` makes the call on its own thread; and if the endpoint is gone
 * first, the thread that frees the last handle of the region or of its block lists makes it. If this call fails,
 * `release` is not called.
 *
 * Without `release` (NULL), the memory has to stay valid until `ferrywire_deregister` or `ferrywire_region_free`,
 * which wait for operations, has returned FERRYWIRE_OK.
 *
 * Errors: FERRYWIRE_ERROR_USAGE for a range that cannot be registered; FERRYWIRE_ERROR_GPU if the GPU's driver
 * refuses.
 */
int ferrywire_register(ferrywire_endpoint *endpoint,
                       void *address,
                       size_t bytes,
                       void (*release)(void*),
                       void *context,
                       ferrywire_region **region);

/**
 * Allocates and registers `bytes` zeroed bytes of host memory. The library frees them after the region's handle and
 * every operation that uses the region are gone.
 */
int ferrywire_allocate(ferrywire_endpoint *endpoint,
                       size_t bytes,
                       ferrywire_region **region);

/**
 * Returns the address of the region's first byte: host memory, which peers may change at any time, or an address on a
 * GPU. Returns NULL for a wrong handle.
 */
void *ferrywire_region_address(const ferrywire_region *region);

/**
 * Returns the region's size in bytes; 0 for a wrong handle.
 */
uint64_t ferrywire_region_bytes(const ferrywire_region *region);

/**
 * Copies the name of the region's memory location ("host memory") into `location` as a NUL-terminated string. Buffer
 * and errors as in `ferrywire_endpoint_address`.
 */
int ferrywire_region_location(const ferrywire_region *region,
                              char *location,
                              size_t capacity,
                              size_t *bytes);

/**
 * Copies the region's descriptor, which lets a peer read and write the region, into the buffer of `capacity` bytes as
 * opaque bytes. Sets `*bytes`, unless `bytes` is NULL, to the descriptor's length, also if the buffer is too small
 * (FERRYWIRE_ERROR_TOO_SMALL).
 */
int ferrywire_region_descriptor(const ferrywire_region *region,
                                void *descriptor,
                                size_t capacity,
                                size_t *bytes);

/**
 * Ends the registration. Peers are refused from now on. Waits at most 5 seconds for operations of this process that
 * use the memory. After FERRYWIRE_OK nothing touches the memory, and `release` has been called. FERRYWIRE_ERROR_USAGE
 * means that operations still use the memory and that it is not free: end them and call again. The handle still has to
 * be freed.
 */
int ferrywire_deregister(ferrywire_region *region);

/**
 * Frees the handle; the registration ends when its last user is gone. NULL is allowed.
 *
 * For memory registered without a release function the registration ends now, as with `ferrywire_deregister`, even if
 * block lists still name the region: after FERRYWIRE_OK nothing touches the memory. If operations use the memory even
 * after a wait, the call fails with FERRYWIRE_ERROR_USAGE and the handle stays valid: end them and call again.
 */
int ferrywire_region_free(ferrywire_region *region);

/**
 * Makes a handle of another endpoint's region from the bytes that `ferrywire_region_descriptor` returned there.
 * FERRYWIRE_ERROR_USAGE if the bytes are not a descriptor.
 */
int ferrywire_remote_open(const void *descriptor,
                          size_t descriptor_bytes,
                          ferrywire_remote **remote);

/**
 * Returns the remote region's size in bytes; 0 for a wrong handle.
 */
uint64_t ferrywire_remote_bytes(const ferrywire_remote *remote);

/**
 * Frees the handle; the peer's region is not touched. NULL is allowed.
 */
int ferrywire_remote_free(ferrywire_remote *remote);

/**
 * Makes a list of `count` blocks between `local` and `remote`. Block i begins at byte `local_offsets[i]` of `local`
 * and at byte `remote_offsets[i]` of `remote`. Its length in bytes is `lengths[i]`, or `length` if `lengths` is NULL.
 * If a block is not inside both regions, the call fails with FERRYWIRE_ERROR_USAGE and names the first such block.
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
 * Makes one list of the blocks of `count` lists, in their order; the lists may be of different regions of one peer.
 * One operation can then move all blocks, and one notification can follow them. The given lists are not changed.
 */
int ferrywire_blocks_join(const ferrywire_blocks *const *lists,
                          size_t count,
                          ferrywire_blocks **blocks);

/**
 * Returns the number of blocks in the list; 0 for a wrong handle.
 */
size_t ferrywire_blocks_count(const ferrywire_blocks *blocks);

/**
 * Frees the handle; operations that use the list continue. NULL is allowed.
 */
int ferrywire_blocks_free(ferrywire_blocks *blocks);

/**
 * Writes `bytes` bytes of `source` at `source_offset` into the peer's region `target` at `target_offset`. The transfer
 * completes when the bytes are in the peer's memory; `message`, of `message_bytes` bytes, is then delivered to the
 * peer as a notification (NULL for none, otherwise 1 to 8192 bytes).
 *
 * Errors: FERRYWIRE_ERROR_USAGE for a range outside of a region or a region that is not registered;
 * FERRYWIRE_ERROR_PEER and FERRYWIRE_ERROR_CLOSED for a peer that is lost or closed, now or as the transfer's outcome.
 * `transfer` receives a handle of the operation; with NULL the operation runs without one.
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
 * Reads `bytes` bytes of the peer's region `source` at `source_offset` into `target` at `target_offset`. The transfer
 * completes when the bytes are in `target`. Errors and `transfer` as in `ferrywire_write`.
 */
int ferrywire_read(ferrywire_peer *peer,
                   const ferrywire_region *target,
                   uint64_t target_offset,
                   const ferrywire_remote *source,
                   uint64_t source_offset,
                   uint64_t bytes,
                   ferrywire_transfer **transfer);

/**
 * Sends `bytes` bytes of `source` at `offset` as a message with `tag`. Messages with one tag match the peer's receives
 * with that tag in the order in which both were posted. Errors and `transfer` as in `ferrywire_write`.
 */
int ferrywire_send(ferrywire_peer *peer,
                   uint64_t tag,
                   const ferrywire_region *source,
                   uint64_t offset,
                   uint64_t bytes,
                   ferrywire_transfer **transfer);

/**
 * Receives the next message with `tag`, of at most `bytes` bytes, into `target` at `offset`. The transfer's number of
 * bytes is the message's length; a longer message ends the transfer with FERRYWIRE_ERROR_USAGE. Errors and `transfer`
 * as in `ferrywire_write`.
 */
int ferrywire_recv(ferrywire_peer *peer,
                   uint64_t tag,
                   const ferrywire_region *target,
                   uint64_t offset,
                   uint64_t bytes,
                   ferrywire_transfer **transfer);

/**
 * Writes blocks of a list as one operation: those whose numbers are in `indices` (`count` of them), or all if
 * `indices` is NULL. `message` is delivered once the bytes of all blocks are in the peer's memory. `message`, errors
 * and `transfer` as in `ferrywire_write`.
 */
int ferrywire_write_blocks(ferrywire_peer *peer,
                           const ferrywire_blocks *blocks,
                           const uint32_t *indices,
                           size_t count,
                           const void *message,
                           size_t message_bytes,
                           ferrywire_transfer **transfer);

/**
 * Reads blocks of a list as one operation: those whose numbers are in `indices` (`count` of them), or all if `indices`
 * is NULL. Errors and `transfer` as in `ferrywire_write`.
 */
int ferrywire_read_blocks(ferrywire_peer *peer,
                          const ferrywire_blocks *blocks,
                          const uint32_t *indices,
                          size_t count,
                          ferrywire_transfer **transfer);

/**
 * Delivers a small message of 0 to 8192 bytes to the peer as a notification, after everything posted to this peer
 * before it. Errors and `transfer` as in `ferrywire_write`.
 */
int ferrywire_notify(ferrywire_peer *peer,
                     const void *message,
                     size_t message_bytes,
                     ferrywire_transfer **transfer);

/**
 * Returns FERRYWIRE_PENDING while the operation is in flight, FERRYWIRE_OK once it has succeeded, or else its error.
 * Sets `*moved`, unless `moved` is NULL, to the number of bytes moved once it has succeeded.
 */
int ferrywire_transfer_poll(const ferrywire_transfer *transfer,
                            uint64_t *moved);

/**
 * Waits until the operation has ended: at most `total_ms` milliseconds in all, and at most `stall_ms` milliseconds
 * without progress; a negative value is no limit. Returns FERRYWIRE_OK or the operation's error, and sets `*moved`,
 * unless `moved` is NULL, to the number of bytes moved. After FERRYWIRE_ERROR_TIMEOUT the operation is still in
 * flight.
 */
int ferrywire_transfer_wait(const ferrywire_transfer *transfer,
                            int64_t total_ms,
                            int64_t stall_ms,
                            uint64_t *moved);

/**
 * Waits until one of `count` transfers with one peer has ended, with success or an error, and sets `*first` to its
 * index in `transfers`; `ferrywire_transfer_poll` then returns its outcome. Waits at most `total_ms` milliseconds in
 * all, and at most `stall_ms` milliseconds in which none of the transfers makes progress; a negative value is no
 * limit. After FERRYWIRE_ERROR_TIMEOUT all transfers are still in flight.
 */
int ferrywire_transfer_wait_any(ferrywire_transfer *const *transfers,
                                size_t count,
                                int64_t total_ms,
                                int64_t stall_ms,
                                size_t *first);

/**
 * Returns the number of bytes that have arrived so far; 0 for a wrong handle.
 */
uint64_t ferrywire_transfer_bytes_moved(const ferrywire_transfer *transfer);

/**
 * Asks the operation to end early. Its memory is in use until the operation has ended, so wait for it: the outcome is
 * FERRYWIRE_ERROR_CANCELLED, or FERRYWIRE_OK if all bytes had arrived before. If the peer is lost or closed before it has
 * reported what it placed, a write ends with FERRYWIRE_ERROR_PEER or FERRYWIRE_ERROR_CLOSED: bytes of it may land until the
 * peer's end notices.
 */
int ferrywire_transfer_cancel(ferrywire_transfer *transfer);

/**
 * Makes a CUDA stream wait, on the device, until the transfer has ended, with success or an error. `gpu` and `stream`
 * as in `ferrywire_peer_on_stream`. While the stream waits, no memory of a GPU may be freed in this process: the
 * driver would wait for the stream.
 */
int ferrywire_transfer_block_stream(const ferrywire_transfer *transfer,
                                    uint32_t gpu,
                                    void *stream);

/**
 * Frees the handle; the operation continues. NULL is allowed.
 */
int ferrywire_transfer_free(ferrywire_transfer *transfer);

/**
 * Makes a wakeup, not readable. An armed object makes it readable once: poll the object, and arm it again if it has
 * nothing to return yet.
 */
int ferrywire_wakeup_new(ferrywire_wakeup **wakeup);

/**
 * Returns the file descriptor, for poll and epoll. The wakeup owns it: do not close or read it. A negative number for
 * a wrong handle.
 */
int ferrywire_wakeup_fd(const ferrywire_wakeup *wakeup);

/**
 * Makes the descriptor not readable. Clear first and poll the armed objects afterwards, so that no event is missed; do
 * not read the descriptor.
 */
int ferrywire_wakeup_clear(ferrywire_wakeup *wakeup);

/**
 * Frees the wakeup and closes its descriptor. Objects armed with it signal nothing any more. NULL is allowed.
 */
int ferrywire_wakeup_free(ferrywire_wakeup *wakeup);

/**
 * Makes `wakeup` readable once the transfer has ended, immediately if it already has.
 */
int ferrywire_transfer_arm(const ferrywire_transfer *transfer, const ferrywire_wakeup *wakeup);

/**
 * Makes `wakeup` readable once `ferrywire_next_notification` has something to return, or the peer is lost.
 */
int ferrywire_peer_arm(const ferrywire_peer *peer,
                       const ferrywire_wakeup *wakeup);

/**
 * Makes `wakeup` readable once a peer can be accepted, or the endpoint is closed.
 */
int ferrywire_endpoint_arm(const ferrywire_endpoint *endpoint, const ferrywire_wakeup *wakeup);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* FERRYWIRE_H */
