/* Every misuse that is possible in C, except false sizes and pointers: each is an error, and none crashes. */

#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

static int releases;

static void release(void *context) {
    (void)context;
    releases++;
}

static void nulls(struct pair pair) {
    char room[64];
    USAGE(ferrywire_options_new(NULL), "the output pointer for a ferrywire_options is NULL");
    USAGE(ferrywire_options_listen(NULL, "127.0.0.1:0"), "the ferrywire_options is NULL");
    ferrywire_options *options;
    OK(ferrywire_options_new(&options));
    USAGE(ferrywire_options_listen(options, NULL), "the address is NULL");
    USAGE(ferrywire_options_listen(options, "nowhere"), "\"nowhere\" is not an address");
    USAGE(ferrywire_options_label(options, "\xff\xfe"), "the label is not UTF-8");
    USAGE(ferrywire_options_secret(options, NULL, 9), "the secret is NULL, and its count is 9");
    OK(ferrywire_options_secret(options, "short", 5));
    ferrywire_endpoint *endpoint = (ferrywire_endpoint *)&endpoint;
    USAGE(ferrywire_endpoint_open(options, &endpoint), "secret: must be at least");
    CHECK(endpoint == NULL);
    OK(ferrywire_options_nic(options, "nope"));
    USAGE(ferrywire_endpoint_open(options, &endpoint), "nope");
    USAGE(ferrywire_endpoint_open(options, NULL), "NULL");
    OK(ferrywire_options_free(options));
    USAGE(ferrywire_endpoint_open(options, &endpoint), "is not a ferrywire_options, or was freed");

    USAGE(ferrywire_endpoint_close(NULL, 0), "NULL");
    USAGE(ferrywire_endpoint_identity(NULL, room, 16), "NULL");
    FAILS(ferrywire_endpoint_identity(pair.ends[0], room, 15), FERRYWIRE_ERROR_TOO_SMALL, "the value has 16 bytes and the buffer 15");
    FAILS(ferrywire_endpoint_identity(pair.ends[0], NULL, 16), FERRYWIRE_ERROR_TOO_SMALL, "give a larger buffer");
    USAGE(ferrywire_endpoint_address(pair.ends[0], room, sizeof room, NULL), "does not listen");
    size_t bytes = 0;
    FAILS(ferrywire_endpoint_metadata(pair.ends[1], NULL, 0, &bytes), FERRYWIRE_ERROR_TOO_SMALL, "give a larger buffer");
    CHECK(bytes > 16);
    OK(ferrywire_endpoint_progress(pair.ends[0], NULL));

    ferrywire_peer *peer = pair.near;
    USAGE(ferrywire_connect(NULL, "127.0.0.1:1", 1000, &peer), "NULL");
    CHECK(peer == NULL);
    USAGE(ferrywire_connect(pair.ends[0], NULL, 1000, &peer), "the address is NULL");
    USAGE(ferrywire_connect(pair.ends[0], "127.0.0.1:1", 1000, NULL), "NULL");
    FAILS(ferrywire_connect(pair.ends[0], "127.0.0.1:1", LIMIT_MS, &peer), FERRYWIRE_ERROR_PEER, "127.0.0.1:1");
    USAGE(ferrywire_connect_metadata(pair.ends[0], "x", 1, 1000, &peer), "metadata");
    USAGE(ferrywire_connect_metadata(pair.ends[0], NULL, 10, 1000, &peer), "the metadata is NULL");
    USAGE(ferrywire_accept(pair.ends[0], 10, &peer), "does not listen");
    CHECK(ferrywire_accept(pair.ends[1], 0, &peer) == FERRYWIRE_PENDING);
    FAILS(ferrywire_accept(pair.ends[1], 10, &peer), FERRYWIRE_ERROR_TIMEOUT, "a peer to connect");

    CHECK(ferrywire_region_address(NULL) == NULL && ferrywire_region_bytes(NULL) == 0);
    CHECK(ferrywire_remote_bytes(NULL) == 0 && ferrywire_blocks_count(NULL) == 0);
    CHECK(ferrywire_transfer_bytes_moved(NULL) == 0 && ferrywire_wakeup_fd(NULL) < 0);
    USAGE(ferrywire_transfer_poll(NULL, NULL), "NULL");
    USAGE(ferrywire_transfer_wait(NULL, 0, 0, NULL), "NULL");
    size_t first = 77;
    ferrywire_transfer *none = NULL, *notes[2], *receives[2];
    ferrywire_region *targets[2];
    USAGE(ferrywire_transfer_wait_any(NULL, 0, 0, 0, &first), "transfers: the list is empty: give at least one");
    USAGE(ferrywire_transfer_wait_any(NULL, 2, 0, 0, &first), "transfers is NULL, and its count is 2");
    USAGE(ferrywire_transfer_wait_any(&none, 1, 0, 0, &first), "the ferrywire_transfer is NULL");
    OK(ferrywire_notify(pair.near, "a", 1, &notes[0]));
    OK(ferrywire_notify(pair.far, "b", 1, &notes[1]));
    USAGE(ferrywire_transfer_wait_any(notes, 1, 0, 0, NULL), "the output pointer for the index is NULL");
    OK(ferrywire_allocate(pair.ends[0], 64, &targets[0]));
    OK(ferrywire_allocate(pair.ends[1], 64, &targets[1]));
    OK(ferrywire_recv(pair.near, 78, targets[0], 0, 64, &receives[0]));
    OK(ferrywire_recv(pair.far, 78, targets[1], 0, 64, &receives[1]));
    USAGE(ferrywire_transfer_wait_any(receives, 2, 0, 0, &first), "of several peers");
    CHECK(first == 77);
    for (int at = 0; at < 2; at++) {
        OK(ferrywire_transfer_cancel(receives[at]));
        FAILS(ferrywire_transfer_wait(receives[at], LIMIT_MS, -1, NULL), FERRYWIRE_ERROR_CANCELLED, "cancelled");
        OK(ferrywire_transfer_free(receives[at]));
        OK(ferrywire_region_free(targets[at]));
    }
    OK(ferrywire_transfer_wait(notes[0], LIMIT_MS, -1, NULL));
    OK(ferrywire_transfer_wait(notes[1], LIMIT_MS, -1, NULL));
    OK(ferrywire_transfer_free(notes[0]));
    OK(ferrywire_transfer_free(notes[1]));
    USAGE(ferrywire_transfer_wait_any(notes, 1, 0, 0, &first), "was freed");
    USAGE(ferrywire_transfer_cancel(NULL), "NULL");
    USAGE(ferrywire_transfer_arm(NULL, NULL), "NULL");
    USAGE(ferrywire_transfer_block_stream(NULL, 0, NULL), "NULL");
    USAGE(ferrywire_peer_on_stream(NULL, 0, NULL, &peer), "NULL");
    USAGE(ferrywire_notify(pair.near, NULL, 3, NULL), "the message is NULL");
    USAGE(ferrywire_next_notification(NULL, 0, room, sizeof room, NULL), "NULL");
    USAGE(ferrywire_deregister(NULL), "NULL");

    OK(ferrywire_options_free(NULL));
    OK(ferrywire_endpoint_free(NULL));
    OK(ferrywire_peer_free(NULL));
    OK(ferrywire_region_free(NULL));
    OK(ferrywire_remote_free(NULL));
    OK(ferrywire_blocks_free(NULL));
    OK(ferrywire_transfer_free(NULL));
    OK(ferrywire_wakeup_free(NULL));
}

static void memory(struct pair pair) {
    ferrywire_region *region, *other;
    static char bytes[1000];
    USAGE(ferrywire_register(pair.ends[0], NULL, 10, release, NULL, &region), "the pointer is null");
    /* Regression: ranges that go around the end of the address space, as with a length of -1, were registered. */
    USAGE(ferrywire_register(pair.ends[0], bytes, (size_t)-1, release, NULL, &region), "more than a process can have");
    USAGE(ferrywire_register(pair.ends[0], (void *)-1, 10, release, NULL, &region), "more than a process can have");
    USAGE(ferrywire_register(NULL, bytes, 10, release, NULL, &region), "NULL");
    USAGE(ferrywire_register(pair.ends[0], bytes, 10, release, NULL, NULL), "NULL");
    CHECK(releases == 0);
    OK(ferrywire_allocate(pair.ends[0], 1000, &region));
    OK(ferrywire_allocate(pair.ends[1], 1000, &other));
    ferrywire_remote *remote = remote_of(other), *mine = remote_of(region), *none;
    USAGE(ferrywire_remote_open("nonsense", 8, &none), "region descriptor");
    USAGE(ferrywire_remote_open(NULL, 8, &none), "NULL");

    /* Ranges outside of a region, regions of another endpoint, handles of another kind. */
    ferrywire_transfer *transfer = (ferrywire_transfer *)&transfer;
    USAGE(ferrywire_write(pair.near, region, 0, remote, 0, 1001, NULL, 0, &transfer), "outside the source region");
    CHECK(transfer == NULL);
    USAGE(ferrywire_write(pair.near, region, UINT64_MAX, remote, 0, 2, NULL, 0, &transfer), "outside");
    USAGE(ferrywire_read(pair.near, region, 0, remote, 990, 11, &transfer), "outside");
    USAGE(ferrywire_write(pair.near, other, 0, remote, 0, 1, NULL, 0, &transfer), "another endpoint");
    USAGE(ferrywire_write(pair.near, region, 0, mine, 0, 1, NULL, 0, &transfer), "belongs to endpoint");
    USAGE(ferrywire_write(pair.near, region, 0, remote, 0, 1, "", 0, &transfer), "empty");
    USAGE(ferrywire_write((ferrywire_peer *)region, region, 0, remote, 0, 1, NULL, 0, NULL), "is not a ferrywire_peer");
    USAGE(ferrywire_write(pair.near, (ferrywire_region *)bytes, 0, remote, 0, 1, NULL, 0, NULL), "is not a ferrywire_region");
    USAGE(ferrywire_write(pair.near, (ferrywire_region *)(intptr_t)-1, 0, remote, 0, 1, NULL, 0, NULL), "is no");
    static char large[FERRYWIRE_NOTIFICATION_BYTES_MAX];
    USAGE(ferrywire_notify(pair.near, large, sizeof large, &transfer), "at most");

    /* Blocks. */
    int64_t here[3] = {0, 10, 20}, there[3] = {0, 10, -20}, odd[3] = {1, 2, 3000};
    ferrywire_blocks *blocks;
    USAGE(ferrywire_blocks_new(region, remote, here, there, NULL, 10, 3, &blocks), "block 2: the remote offset is -20");
    USAGE(ferrywire_blocks_new(region, remote, here, here, odd, 0, 3, &blocks), "block 2: bytes 20..3020 are outside");
    USAGE(ferrywire_blocks_new(region, remote, NULL, here, NULL, 1, 3, &blocks), "local_offsets is NULL");
    USAGE(ferrywire_blocks_new(region, remote, (int64_t *)(bytes + 1), here, NULL, 1, 3, &blocks), "is misaligned");
    USAGE(ferrywire_blocks_new(region, remote, here, here, NULL, 1, SIZE_MAX, &blocks), "values exceed the address space");
    USAGE(ferrywire_blocks_join(NULL, 0, &blocks), "the list is empty");
    OK(ferrywire_blocks_new(region, remote, here, here, NULL, 10, 3, &blocks));
    const ferrywire_blocks *lists[2] = {blocks, NULL};
    ferrywire_blocks *joined;
    USAGE(ferrywire_blocks_join(lists, 2, &joined), "the ferrywire_blocks is NULL");
    uint32_t index = 3;
    USAGE(ferrywire_write_blocks(pair.near, blocks, &index, 1, NULL, 0, NULL), "block index: 3, but the list has 3");
    USAGE(ferrywire_read_blocks(pair.near, blocks, NULL, 1, NULL), "indices is NULL");

    /* Handles that are freed, then used and freed again. */
    OK(ferrywire_blocks_free(blocks));
    USAGE(ferrywire_blocks_free(blocks), "was freed");
    USAGE(ferrywire_write_blocks(pair.near, blocks, NULL, 0, NULL, 0, NULL), "was freed");
    OK(ferrywire_deregister(region));
    OK(ferrywire_deregister(region));
    USAGE(ferrywire_write(pair.near, region, 0, remote, 0, 1, NULL, 0, NULL), "deregistered");
    OK(ferrywire_region_free(region));
    USAGE(ferrywire_region_free(region), "was freed");
    CHECK(ferrywire_region_address(region) == NULL);
    for (int round = 0; round < 1000; round++) {
        ferrywire_wakeup *one, *two;
        OK(ferrywire_wakeup_new(&one));
        OK(ferrywire_wakeup_free(one));
        OK(ferrywire_wakeup_new(&two));
        CHECK(one != two);
        USAGE(ferrywire_wakeup_clear(one), "was freed");
        USAGE(ferrywire_peer_arm(pair.near, one), "was freed");
        OK(ferrywire_wakeup_free(two));
    }
    OK(ferrywire_remote_free(remote));
    OK(ferrywire_remote_free(mine));
    OK(ferrywire_region_free(other));
}

/* The caller's memory is free once the handle of its region is freed, although a block list exists. */
static void freed_beside_a_list(struct pair pair) {
    static char bytes[1000];
    ferrywire_region *own, *source;
    ferrywire_transfer *transfer;
    OK(ferrywire_register(pair.ends[0], bytes, sizeof bytes, NULL, NULL, &own));
    OK(ferrywire_allocate(pair.ends[1], sizeof bytes, &source));
    ferrywire_remote *remote = remote_of(own), *other = remote_of(source);
    int64_t zero = 0;
    ferrywire_blocks *blocks;
    OK(ferrywire_blocks_new(own, other, &zero, &zero, NULL, 100, 1, &blocks));
    /* While an operation uses the memory, freeing is an error and the handle stays valid. */
    OK(ferrywire_recv(pair.near, 77, own, 0, 10, &transfer));
    USAGE(ferrywire_region_free(own), "");
    CHECK(ferrywire_region_address(own) == bytes);
    OK(ferrywire_transfer_cancel(transfer));
    FAILS(ferrywire_transfer_wait(transfer, LIMIT_MS, -1, NULL), FERRYWIRE_ERROR_CANCELLED, "cancelled");
    OK(ferrywire_transfer_free(transfer));
    OK(ferrywire_region_free(own));
    USAGE(ferrywire_region_free(own), "was freed");
    memset(bytes, 7, sizeof bytes);
    OK(ferrywire_write(pair.far, source, 0, remote, 0, 100, NULL, 0, &transfer));
    FAILS(ferrywire_transfer_wait(transfer, LIMIT_MS, -1, NULL), FERRYWIRE_ERROR_PEER, "refused");
    OK(ferrywire_transfer_free(transfer));
    for (size_t at = 0; at < sizeof bytes; at++) CHECK(bytes[at] == 7);
    USAGE(ferrywire_write_blocks(pair.near, blocks, NULL, 0, NULL, 0, NULL), "deregistered");
    OK(ferrywire_blocks_free(blocks));
    OK(ferrywire_region_free(source));
    OK(ferrywire_remote_free(remote));
    OK(ferrywire_remote_free(other));
}

static void *waits(void *peer) {
    char message[100];
    OK(ferrywire_next_notification(peer, LIMIT_MS, message, sizeof message, NULL));
    return NULL;
}

/* A child that is forked while a notification is kept, or while a thread waits for one, gets an error for it. */
static void forked_beside_notifications(struct pair pair) {
    char message[100];
    size_t bytes;
    pthread_t thread;
    /* The one that an earlier step has sent. */
    OK(ferrywire_next_notification(pair.far, LIMIT_MS, message, sizeof message, &bytes));
    CHECK(bytes == 1 && message[0] == 'a');
    OK(ferrywire_notify(pair.near, "kept", 4, NULL));
    FAILS(ferrywire_next_notification(pair.far, LIMIT_MS, message, 1, &bytes), FERRYWIRE_ERROR_TOO_SMALL, "4 bytes");
    for (int waiting = 0; waiting < 2; waiting++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            alarm(120);
            USAGE(ferrywire_next_notification(pair.far, 0, message, sizeof message, &bytes), "forked from it");
            USAGE(ferrywire_next_notification(pair.far, -1, message, sizeof message, &bytes), "forked from it");
            _exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
        if (waiting == 0) {
            OK(ferrywire_next_notification(pair.far, LIMIT_MS, message, sizeof message, &bytes));
            CHECK(bytes == 4 && memcmp(message, "kept", 4) == 0);
            CHECK(pthread_create(&thread, NULL, waits, pair.far) == 0);
            /* The thread probably waits by then; the child gets the error in any case. */
            usleep(100000);
        }
    }
    OK(ferrywire_notify(pair.near, "x", 1, NULL));
    CHECK(pthread_join(thread, NULL) == 0);
}

/* A forked child that uses its parent's endpoint gets an error. */
static void forked(struct pair pair) {
    static char bytes[100];
    ferrywire_region *own;
    OK(ferrywire_register(pair.ends[0], bytes, sizeof bytes, NULL, NULL, &own));
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        alarm(120);
        USAGE(ferrywire_notify(pair.near, "x", 1, NULL), "forked from it");
        USAGE(ferrywire_accept(pair.ends[1], LIMIT_MS, &pair.far), "forked from it");
        USAGE(ferrywire_endpoint_progress(pair.ends[1], NULL), "forked from it");
        USAGE(ferrywire_endpoint_close(pair.ends[1], LIMIT_MS), "forked from it");
        OK(ferrywire_region_free(own));
        OK(ferrywire_peer_free(pair.near));
        OK(ferrywire_endpoint_free(pair.ends[0]));
        OK(ferrywire_endpoint_free(pair.ends[1]));
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    OK(ferrywire_region_free(own));
}

static _Atomic int calls;

static void *asks(void *end) {
    char identity[16];
    while (calls >= 0) {
        OK(ferrywire_endpoint_identity(end, identity, sizeof identity));
        calls++;
    }
    return NULL;
}

/* The library works in a child that is forked while other threads are in calls. */
static void forked_in_mid_call(struct pair pair) {
    pthread_t threads[3];
    for (int n = 0; n < 3; n++) CHECK(pthread_create(&threads[n], NULL, asks, pair.ends[0]) == 0);
    while (calls == 0) sched_yield();
    for (int n = 0; n < 200; n++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            ferrywire_endpoint *own;
            alarm(60);
            OK(ferrywire_endpoint_open(NULL, &own));
            _exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    calls = -1000000000;
    for (int n = 0; n < 3; n++) CHECK(pthread_join(threads[n], NULL) == 0);
}

static _Atomic int accepting;

static void *accepts(void *end) {
    ferrywire_peer *peer;
    accepting = 1;
    int status = ferrywire_accept(end, -1, &peer);
    CHECK(status == FERRYWIRE_ERROR_CLOSED || status == FERRYWIRE_ERROR_USAGE);
    accepting = 2;
    return NULL;
}

/* Regression: an endpoint that was freed while a thread waited in its accept stayed open. */
static void freed_in_mid_accept(void) {
    ferrywire_options *options;
    ferrywire_endpoint *end;
    pthread_t thread;
    OK(ferrywire_options_new(&options));
    OK(ferrywire_options_listen(options, "127.0.0.1:0"));
    OK(ferrywire_endpoint_open(options, &end));
    CHECK(pthread_create(&thread, NULL, accepts, end) == 0);
    while (accepting == 0) sched_yield();
    /* The thread probably waits by then; else it finds a freed handle. */
    usleep(100000);
    OK(ferrywire_endpoint_free(end));
    for (int ms = 0; accepting != 2 && ms < LIMIT_MS; ms++) usleep(1000);
    CHECK(accepting == 2);
    CHECK(pthread_join(thread, NULL) == 0);
    OK(ferrywire_options_free(options));
}

int main(void) {
    struct pair pair = connected();
    nulls(pair);
    memory(pair);
    freed_beside_a_list(pair);
    forked(pair);
    forked_beside_notifications(pair);
    forked_in_mid_call(pair);
    freed_in_mid_accept();

    /* After closing: errors say so, and handles can be freed in any order. */
    ferrywire_region *region;
    OK(ferrywire_allocate(pair.ends[1], 100, &region));
    ferrywire_transfer *receive;
    OK(ferrywire_recv(pair.far, 1, region, 0, 100, &receive));
    OK(ferrywire_peer_close(pair.near, LIMIT_MS));
    FAILS(ferrywire_transfer_wait(receive, LIMIT_MS, -1, NULL), FERRYWIRE_ERROR_CLOSED, "closed");
    FAILS(ferrywire_peer_error(pair.far), FERRYWIRE_ERROR_CLOSED, "closed");
    OK(ferrywire_endpoint_close(pair.ends[1], LIMIT_MS));
    FAILS(ferrywire_accept(pair.ends[1], LIMIT_MS, &pair.far), FERRYWIRE_ERROR_CLOSED, "closed by this process");
    OK(ferrywire_endpoint_free(pair.ends[1]));
    USAGE(ferrywire_endpoint_free(pair.ends[1]), "was freed");
    USAGE(ferrywire_endpoint_close(pair.ends[1], 0), "was freed");
    OK(ferrywire_region_free(region));
    OK(ferrywire_transfer_free(receive));
    OK(ferrywire_peer_free(pair.near));
    OK(ferrywire_endpoint_free(pair.ends[0]));
    CHECK(releases == 0);
    puts("misuse: good");
    return 0;
}
