/* Calls that do not wait drive an endpoint without threads: accepting, and waiting with a limit of zero. */

#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#include "check.h"

enum { BYTES = 1 << 20 };

static struct pair pair;
static char address[64];
static atomic_int is_connected;

static void *connecting(void *unused) {
    OK(ferrywire_connect(pair.ends[0], address, LIMIT_MS, &pair.near));
    atomic_store(&is_connected, 1);
    return unused;
}

/* The time in which this program's calls must have an effect. */
static int in_time(void) {
    static time_t begun;
    if (!begun) begun = time(NULL);
    return time(NULL) < begun + LIMIT_MS / 1000;
}

static void accept_by_asking(void) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, connecting, NULL) == 0);
    pair.far = NULL;
    while (!pair.far || !atomic_load(&is_connected)) {
        ferrywire_peer *peer;
        int status = ferrywire_accept(pair.ends[1], 0, &peer);
        CHECK(status == FERRYWIRE_OK || status == FERRYWIRE_PENDING);
        if (peer) pair.far = peer;
        CHECK(in_time());
    }
    CHECK(pthread_join(thread, NULL) == 0);
}

static void wait_by_asking(ferrywire_region *source, ferrywire_region *target, int64_t total_ms, int64_t stall_ms) {
    ferrywire_transfer *received, *sent;
    OK(ferrywire_recv(pair.far, 1, target, 0, BYTES, &received));
    FAILS(ferrywire_transfer_wait(received, total_ms, stall_ms, NULL), FERRYWIRE_ERROR_TIMEOUT, "recv");
    OK(ferrywire_send(pair.near, 1, source, 0, BYTES, &sent));
    int status;
    uint64_t moved = 0;
    while ((status = ferrywire_transfer_wait(received, total_ms, stall_ms, &moved)) == FERRYWIRE_ERROR_TIMEOUT)
        CHECK(in_time());
    CHECK(status == FERRYWIRE_OK && moved == BYTES);
    while ((status = ferrywire_transfer_wait(sent, 1, -1, NULL)) == FERRYWIRE_ERROR_TIMEOUT) {
        OK(ferrywire_endpoint_progress(pair.ends[1], NULL));
        CHECK(in_time());
    }
    CHECK(status == FERRYWIRE_OK);
    OK(ferrywire_transfer_free(received));
    OK(ferrywire_transfer_free(sent));
}

int main(int count, char **words) {
    const char *what = count > 1 ? words[1] : "";
    ferrywire_options *options;
    OK(ferrywire_options_new(&options));
    OK(ferrywire_options_listen(options, "127.0.0.1:0"));
    OK(ferrywire_options_threads(options, 0));
    OK(ferrywire_endpoint_open(options, &pair.ends[1]));
    OK(ferrywire_options_free(options));
    OK(ferrywire_endpoint_open(NULL, &pair.ends[0]));
    OK(ferrywire_endpoint_address(pair.ends[1], address, sizeof address, NULL));
    if (strcmp(what, "accept") == 0) {
        USAGE(ferrywire_accept(pair.ends[0], 0, &pair.far), "does not listen");
        accept_by_asking();
    } else {
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, connecting, NULL) == 0);
        OK(ferrywire_accept(pair.ends[1], LIMIT_MS, &pair.far));
        while (!atomic_load(&is_connected)) OK(ferrywire_endpoint_progress(pair.ends[1], NULL));
        CHECK(pthread_join(thread, NULL) == 0);
        ferrywire_region *source, *target;
        OK(ferrywire_allocate(pair.ends[0], BYTES, &source));
        OK(ferrywire_allocate(pair.ends[1], BYTES, &target));
        wait_by_asking(source, target, strcmp(what, "total") == 0 ? 0 : -1, strcmp(what, "stall") == 0 ? 0 : -1);
        OK(ferrywire_region_free(source));
        OK(ferrywire_region_free(target));
    }
    OK(ferrywire_peer_free(pair.near));
    OK(ferrywire_peer_free(pair.far));
    for (int end = 0; end < 2; end++) OK(ferrywire_endpoint_free(pair.ends[end]));
    puts("driven: good");
    return 0;
}
