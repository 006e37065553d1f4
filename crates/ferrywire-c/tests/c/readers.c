/* Several threads read one peer's notifications, also into buffers that are too small: each is read once. */

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>

#include "check.h"

enum { MESSAGES = 4000, READERS = 3, LARGE = 1000, SMALL = sizeof(int) };

static atomic_int read_by_anybody, seen[MESSAGES];

static void *reads(void *peer) {
    unsigned char room[LARGE];
    size_t capacity = SMALL, bytes;
    while (atomic_load(&read_by_anybody) < MESSAGES) {
        int status = ferrywire_next_notification(peer, 20, room, capacity, &bytes);
        if (status == FERRYWIRE_ERROR_TOO_SMALL) {
            /* Another thread with a larger buffer may take this notification. */
            capacity = LARGE;
            continue;
        }
        if (status == FERRYWIRE_ERROR_TIMEOUT)
            continue;
        CHECK(status == FERRYWIRE_OK);
        int number;
        memcpy(&number, room, sizeof number);
        CHECK(number >= 0 && number < MESSAGES && bytes == (size_t)(number % 8 ? LARGE : SMALL));
        atomic_fetch_add(&seen[number], 1);
        atomic_fetch_add(&read_by_anybody, 1);
        capacity = SMALL;
    }
    return NULL;
}

/* The test ends at the first limit that is reached: on a busy machine each round takes long. */
enum { ROUNDS = 40000, SECONDS = 10 };

static atomic_int rounds_over, all_over;

/* Waits with a buffer of no bytes, and leaves notifications to other threads. */
static void *leaves(void *peer) {
    while (!atomic_load(&all_over)) {
        int over = atomic_load(&rounds_over);
        int status = ferrywire_next_notification(peer, 20, NULL, 0, NULL);
        CHECK(status == FERRYWIRE_ERROR_TOO_SMALL || status == FERRYWIRE_ERROR_TIMEOUT);
        while (status == FERRYWIRE_ERROR_TOO_SMALL && atomic_load(&rounds_over) == over && !atomic_load(&all_over))
            sched_yield();
    }
    return NULL;
}

/* A wakeup that is armed while another thread holds the message is signalled if the message did not fit there. */
static void reads_what_others_leave(struct pair pair) {
    ferrywire_wakeup *wakeup;
    pthread_t other;
    OK(ferrywire_wakeup_new(&wakeup));
    CHECK(pthread_create(&other, NULL, leaves, pair.far) == 0);
    time_t end = time(NULL) + SECONDS;
    for (int round = 0; round < ROUNDS && time(NULL) < end; round++) {
        int read = -1, status;
        size_t bytes;
        OK(ferrywire_notify(pair.near, &round, sizeof round, NULL));
        while ((status = ferrywire_next_notification(pair.far, 0, &read, sizeof read, &bytes)) == FERRYWIRE_PENDING) {
            OK(ferrywire_peer_arm(pair.far, wakeup));
            struct pollfd fd = {.fd = ferrywire_wakeup_fd(wakeup), .events = POLLIN};
            CHECK(poll(&fd, 1, LIMIT_MS) == 1);
            OK(ferrywire_wakeup_clear(wakeup));
        }
        CHECK(status == FERRYWIRE_OK && bytes == sizeof read && read == round);
        atomic_fetch_add(&rounds_over, 1);
    }
    atomic_store(&all_over, 1);
    CHECK(pthread_join(other, NULL) == 0);
    OK(ferrywire_wakeup_free(wakeup));
}

int main(void) {
    struct pair pair = connected();
    static ferrywire_transfer *transfers[MESSAGES];
    static unsigned char message[LARGE];
    pthread_t readers[READERS];
    for (int number = 0; number < MESSAGES; number++) {
        memcpy(message, &number, sizeof number);
        OK(ferrywire_notify(pair.near, message, number % 8 ? LARGE : SMALL, &transfers[number]));
    }
    for (int n = 0; n < READERS; n++) CHECK(pthread_create(&readers[n], NULL, reads, pair.far) == 0);
    for (int number = 0; number < MESSAGES; number++) {
        OK(ferrywire_transfer_wait(transfers[number], LIMIT_MS, -1, NULL));
        OK(ferrywire_transfer_free(transfers[number]));
    }
    for (int n = 0; n < READERS; n++) CHECK(pthread_join(readers[n], NULL) == 0);
    for (int number = 0; number < MESSAGES; number++) CHECK(seen[number] == 1);

    /* A notification that did not fit can still be read. */
    ferrywire_wakeup *wakeup;
    ferrywire_transfer *transfer;
    unsigned char room[8];
    size_t bytes;
    OK(ferrywire_wakeup_new(&wakeup));
    OK(ferrywire_notify(pair.near, "kept", 4, &transfer));
    OK(ferrywire_transfer_wait(transfer, LIMIT_MS, -1, NULL));
    OK(ferrywire_transfer_free(transfer));
    FAILS(ferrywire_next_notification(pair.far, LIMIT_MS, room, 3, &bytes), FERRYWIRE_ERROR_TOO_SMALL, "4 bytes");
    OK(ferrywire_peer_arm(pair.far, wakeup));
    struct pollfd fd = {.fd = ferrywire_wakeup_fd(wakeup), .events = POLLIN};
    CHECK(poll(&fd, 1, 0) == 1);
    OK(ferrywire_next_notification(pair.far, 0, room, sizeof room, &bytes));
    CHECK(bytes == 4 && memcmp(room, "kept", 4) == 0);
    OK(ferrywire_wakeup_free(wakeup));

    reads_what_others_leave(pair);

    OK(ferrywire_peer_close(pair.near, LIMIT_MS));
    for (int end = 0; end < 2; end++) OK(ferrywire_endpoint_close(pair.ends[end], LIMIT_MS));
    OK(ferrywire_peer_free(pair.near));
    OK(ferrywire_peer_free(pair.far));
    for (int end = 0; end < 2; end++) OK(ferrywire_endpoint_free(pair.ends[end]));
    puts("readers: good");
    return 0;
}
