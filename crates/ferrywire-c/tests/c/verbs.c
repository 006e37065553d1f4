/* Every verb once, with its bytes checked; waiting by an event loop; memory with a release function. */

#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>

#include "check.h"

enum { BYTES = 1 << 20, BLOCKS = 1000, BLOCK = 512 };

static atomic_int released;

static void release(void *context) {
    CHECK(context == &released);
    atomic_fetch_add(&released, 1);
}

/* Waits as a program does that also waits for other descriptors. */
static void wait_by_poll(ferrywire_wakeup *wakeup, ferrywire_transfer *transfer) {
    for (;;) {
        OK(ferrywire_transfer_arm(transfer, wakeup));
        struct pollfd fd = {.fd = ferrywire_wakeup_fd(wakeup), .events = POLLIN};
        CHECK(poll(&fd, 1, LIMIT_MS) == 1);
        OK(ferrywire_wakeup_clear(wakeup));
        uint64_t moved;
        int status = ferrywire_transfer_poll(transfer, &moved);
        if (status != FERRYWIRE_PENDING) {
            CHECK(status == FERRYWIRE_OK);
            return;
        }
    }
}

static void closed(struct pair pair) {
    OK(ferrywire_peer_close(pair.near, LIMIT_MS));
    for (int end = 0; end < 2; end++) OK(ferrywire_endpoint_close(pair.ends[end], LIMIT_MS));
    OK(ferrywire_peer_free(pair.near));
    OK(ferrywire_peer_free(pair.far));
    for (int end = 0; end < 2; end++) OK(ferrywire_endpoint_free(pair.ends[end]));
}

/* Finds the receive that ends first, at any index: each receive waits for its own message. */
static void wait_for_any(struct pair pair, ferrywire_region *source, ferrywire_region *target) {
    enum { TAGS = 4 };
    const uint64_t order[TAGS] = {2, 0, 3, 1};
    uint64_t tags[TAGS], moved;
    ferrywire_transfer *waiting[TAGS];
    size_t first = 77;
    for (size_t at = 0; at < TAGS; at++) {
        tags[at] = 100 + at;
        OK(ferrywire_recv(pair.far, tags[at], target, at * 64, 64, &waiting[at]));
    }
    for (size_t left = TAGS; left > 0; left--) {
        uint64_t tag = 100 + order[TAGS - left];
        FAILS(ferrywire_transfer_wait_any(waiting, left, 10, -1, &first), FERRYWIRE_ERROR_TIMEOUT, "not done within 10ms: recv");
        FAILS(ferrywire_transfer_wait_any(waiting, left, 0, -1, &first), FERRYWIRE_ERROR_TIMEOUT, "not done yet");
        FAILS(ferrywire_transfer_wait_any(waiting, left, -1, 10, &first), FERRYWIRE_ERROR_TIMEOUT, "no progress for 10ms");
        CHECK(left < TAGS || first == 77);
        OK(ferrywire_send(pair.near, tag, source, 0, 64, NULL));
        OK(ferrywire_transfer_wait_any(waiting, left, LIMIT_MS, -1, &first));
        CHECK(first < left && tags[first] == tag);
        OK(ferrywire_transfer_poll(waiting[first], &moved));
        CHECK(moved == 64);
        OK(ferrywire_transfer_free(waiting[first]));
        for (size_t at = first + 1; at < left; at++) {
            tags[at - 1] = tags[at];
            waiting[at - 1] = waiting[at];
        }
    }
    /* A transfer that fails has ended. */
    for (size_t at = 0; at < 2; at++) OK(ferrywire_recv(pair.far, 100, target, 0, 64, &waiting[at]));
    OK(ferrywire_transfer_cancel(waiting[1]));
    OK(ferrywire_transfer_wait_any(waiting, 2, LIMIT_MS, -1, &first));
    CHECK(first == 1);
    FAILS(ferrywire_transfer_poll(waiting[1], NULL), FERRYWIRE_ERROR_CANCELLED, "cancelled");
    OK(ferrywire_transfer_cancel(waiting[0]));
    for (size_t at = 0; at < 2; at++) OK(ferrywire_transfer_free(waiting[at]));
}

static void *fails_elsewhere(void *unused) {
    CHECK(strcmp(ferrywire_last_error(), "") == 0);
    USAGE(ferrywire_peer_error(NULL), "the ferrywire_peer is NULL");
    return unused;
}

int main(void) {
    CHECK(strlen(ferrywire_version()) > 0);
    struct pair pair = connected();
    char text[64];
    size_t bytes;
    OK(ferrywire_peer_label(pair.near, text, sizeof text, &bytes));
    CHECK(strcmp(text, "receiver") == 0 && bytes == 9);
    char address[64];
    OK(ferrywire_endpoint_address(pair.ends[1], address, sizeof address, NULL));
    OK(ferrywire_peer_address(pair.near, text, sizeof text, NULL));
    CHECK(strcmp(text, address) == 0);
    unsigned char identities[2][16];
    OK(ferrywire_endpoint_identity(pair.ends[1], identities[0], 16));
    OK(ferrywire_peer_identity(pair.near, identities[1], 16));
    CHECK(memcmp(identities[0], identities[1], 16) == 0);
    OK(ferrywire_peer_error(pair.near));

    unsigned char *memory = malloc(BYTES);
    for (size_t at = 0; at < BYTES; at++) memory[at] = (unsigned char)(at * 7 + 1);
    ferrywire_region *source, *target;
    OK(ferrywire_register(pair.ends[0], memory, BYTES, release, &released, &source));
    OK(ferrywire_allocate(pair.ends[1], BYTES, &target));
    CHECK(ferrywire_region_bytes(target) == BYTES && ferrywire_region_address(source) == memory);
    OK(ferrywire_region_location(source, text, sizeof text, NULL));
    CHECK(strcmp(text, "host memory") == 0);
    unsigned char *there = ferrywire_region_address(target);
    ferrywire_remote *remote = remote_of(target);
    CHECK(ferrywire_remote_bytes(remote) == BYTES);

    ferrywire_wakeup *wakeup;
    OK(ferrywire_wakeup_new(&wakeup));
    ferrywire_transfer *transfer;
    uint64_t moved = 0;
    OK(ferrywire_write(pair.near, source, 0, remote, 0, BYTES, NULL, 0, &transfer));
    wait_by_poll(wakeup, transfer);
    CHECK(memcmp(memory, there, BYTES) == 0);
    OK(ferrywire_transfer_wait(transfer, 0, 0, &moved));
    CHECK(moved == BYTES && ferrywire_transfer_bytes_moved(transfer) == BYTES);
    OK(ferrywire_transfer_free(transfer));

    /* A notification behind a write; one that does not fit is kept. */
    CHECK(ferrywire_next_notification(pair.far, 0, text, sizeof text, &bytes) == FERRYWIRE_PENDING);
    OK(ferrywire_write(pair.near, source, 1, remote, 0, 100, "hello", 5, NULL));
    FAILS(ferrywire_next_notification(pair.far, LIMIT_MS, text, 4, &bytes), FERRYWIRE_ERROR_TOO_SMALL,
          "the value has 5 bytes and the buffer 4: give a larger buffer");
    CHECK(bytes == 5);
    OK(ferrywire_next_notification(pair.far, 0, text, sizeof text, &bytes));
    CHECK(bytes == 5 && memcmp(text, "hello", 5) == 0 && memcmp(memory + 1, there, 100) == 0);
    OK(ferrywire_notify(pair.near, NULL, 0, NULL));
    OK(ferrywire_next_notification(pair.far, -1, text, sizeof text, &bytes));
    CHECK(bytes == 0);

    /* Reading back, and messages. */
    memset(there, 0xAB, BYTES);
    OK(ferrywire_read(pair.near, source, 0, remote, 0, BYTES, &transfer));
    OK(ferrywire_transfer_wait(transfer, LIMIT_MS, -1, NULL));
    CHECK(memory[0] == 0xAB && memcmp(memory, there, BYTES) == 0);
    OK(ferrywire_transfer_free(transfer));
    memset(memory, 0x5C, BYTES);
    OK(ferrywire_recv(pair.far, 9, target, 0, BYTES, &transfer));
    FAILS(ferrywire_transfer_wait(transfer, 10, -1, NULL), FERRYWIRE_ERROR_TIMEOUT, "not done within 10ms: recv");
    FAILS(ferrywire_transfer_wait(transfer, -1, 10, NULL), FERRYWIRE_ERROR_TIMEOUT, "no progress for 10ms");
    CHECK(ferrywire_transfer_poll(transfer, &moved) == FERRYWIRE_PENDING);
    OK(ferrywire_send(pair.near, 9, source, 0, 300000, NULL));
    wait_by_poll(wakeup, transfer);
    OK(ferrywire_transfer_wait(transfer, -1, -1, &moved));
    CHECK(moved == 300000 && memcmp(memory, there, 300000) == 0 && there[300000] == 0xAB);
    OK(ferrywire_transfer_free(transfer));
    OK(ferrywire_recv(pair.far, 10, target, 0, 64, &transfer));
    OK(ferrywire_transfer_cancel(transfer));
    FAILS(ferrywire_transfer_wait(transfer, LIMIT_MS, -1, NULL), FERRYWIRE_ERROR_CANCELLED, "cancelled");
    OK(ferrywire_transfer_free(transfer));

    wait_for_any(pair, source, target);

    /* Blocks in reverse order, in two regions, with one notification; then reads one of them back. */
    ferrywire_region *second;
    OK(ferrywire_allocate(pair.ends[1], BYTES, &second));
    ferrywire_remote *remotes[2] = {remote, remote_of(second)};
    int64_t here[BLOCKS], far[BLOCKS];
    for (int at = 0; at < BLOCKS; at++) {
        here[at] = (int64_t)at * BLOCK;
        far[at] = (int64_t)(BLOCKS - 1 - at) * BLOCK;
    }
    for (size_t at = 0; at < BYTES; at++) memory[at] = (unsigned char)(at / BLOCK + at * 3);
    const ferrywire_blocks *lists[2];
    for (int at = 0; at < 2; at++) {
        ferrywire_blocks *list;
        OK(ferrywire_blocks_new(source, remotes[at], here, far, NULL, BLOCK, BLOCKS, &list));
        lists[at] = list;
    }
    ferrywire_blocks *joined;
    OK(ferrywire_blocks_join(lists, 2, &joined));
    for (int at = 0; at < 2; at++) OK(ferrywire_blocks_free((ferrywire_blocks *)lists[at]));
    CHECK(ferrywire_blocks_count(joined) == 2 * BLOCKS);
    OK(ferrywire_write_blocks(pair.near, joined, NULL, 0, "all", 3, NULL));
    OK(ferrywire_peer_arm(pair.far, wakeup));
    OK(ferrywire_next_notification(pair.far, LIMIT_MS, text, sizeof text, &bytes));
    const unsigned char *both[2] = {there, ferrywire_region_address(second)};
    for (int list = 0; list < 2; list++)
        for (int at = 0; at < BLOCKS; at++) CHECK(memcmp(memory + here[at], both[list] + far[at], BLOCK) == 0);
    uint32_t one = BLOCKS + 2;
    memset(memory, 0, BYTES);
    OK(ferrywire_read_blocks(pair.near, joined, &one, 1, &transfer));
    OK(ferrywire_transfer_wait(transfer, LIMIT_MS, -1, &moved));
    CHECK(moved == BLOCK && memcmp(memory + here[2], both[1] + far[2], BLOCK) == 0);
    OK(ferrywire_transfer_free(transfer));
    OK(ferrywire_blocks_free(joined));

    /* The last error belongs to the thread. */
    USAGE(ferrywire_write(pair.near, source, BYTES, remote, 0, 1, NULL, 0, NULL), "outside the source region");
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, fails_elsewhere, NULL) == 0 && pthread_join(thread, NULL) == 0);
    CHECK(strstr(ferrywire_last_error(), "outside the source region") != NULL);

    /* The memory is released once, when its last user has ended. */
    CHECK(atomic_load(&released) == 0);
    OK(ferrywire_deregister(source));
    CHECK(atomic_load(&released) == 1);
    free(memory);
    OK(ferrywire_region_free(source));
    OK(ferrywire_register(pair.ends[0], text, sizeof text, release, &released, &source));
    OK(ferrywire_region_free(source));
    while (atomic_load(&released) < 2) poll(NULL, 0, 1);
    OK(ferrywire_register(pair.ends[0], text, sizeof text, NULL, NULL, &source));
    OK(ferrywire_region_free(source));

    OK(ferrywire_endpoint_arm(pair.ends[1], wakeup));
    OK(ferrywire_wakeup_free(wakeup));
    for (int at = 0; at < 2; at++) OK(ferrywire_remote_free(remotes[at]));
    OK(ferrywire_region_free(target));
    OK(ferrywire_region_free(second));
    closed(pair);
    CHECK(atomic_load(&released) == 2);
    puts("verbs: good");
    return 0;
}
