/* A client of the soak that uses the C library. It speaks as `soak client` does: with its driver as in src/driver.rs, with
 * the server as in src/server.rs. The C library cannot change the secret of an open endpoint: when it changes, this program
 * closes its endpoint in an orderly way and opens another.
 *
 *   peer --pool FILE --metadata FILE --label NAME --seed N [--nics A,B] [--channels N]
 *        [--encryption WHEN] [--memory WHERE] */

#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "ferrywire.h"

enum {
    OPERATION_MS = 60000,
    CLOSE_MS = 20000,
    ATTEMPT_MS = 20000,
    CONNECT_S = 60,
    REGION_BYTES = 64 << 20,
    LIST_BYTES = 8 << 20,
    BLOCKS_MAX = 32,
    DEPTH_MAX = 6,
    PING_BYTES_MAX = 8000,
    SECRET_MAX = 128,
    STEPS_OF_A_SESSION = 400
};

/* Bytes `from` of the pool lie at `at` of a region. */
typedef struct {
    uint64_t from, at, bytes;
} span;

static const char *pool_file, *metadata_file, *label = "c", *nics, *encryption = "off", *memory = "host";
static size_t channels;
static unsigned char *pool;
static uint64_t pool_bytes;

static ferrywire_endpoint *endpoint;
static ferrywire_peer *peer;
static ferrywire_region *source, *landing;
static ferrywire_remote *target;
static unsigned char *landed;

static uint64_t dice_state;
static uint64_t operations, bytes_moved, cancelled;
static struct timespec reported;

/* ---- the driver ---- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t heard = PTHREAD_COND_INITIALIZER;
/* The secret that was ordered last, how many orders there were, and whether to end. */
static char ordered[SECRET_MAX], current[SECRET_MAX];
static unsigned orders, obeyed;
static bool ending;

static void say(const char *kind, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    printf("%s ", kind);
    vprintf(format, arguments);
    printf("\n");
    fflush(stdout);
    va_end(arguments);
}

/* Reads the driver's next line. Not through stdio: exit() waits for a stream that another thread reads (glibc from 2.37 on). */
static bool next_order(char *line, size_t room) {
    for (size_t length = 0; length + 1 < room; length++) {
        if (read(STDIN_FILENO, line + length, 1) != 1) return false;
        if (line[length] == '\n') {
            line[length] = 0;
            return true;
        }
    }
    return false;
}

static void *listen_to_driver(void *unused) {
    (void)unused;
    char line[2 * SECRET_MAX + 32], secret[SECRET_MAX];
    while (next_order(line, sizeof line)) {
        pthread_mutex_lock(&lock);
        if (sscanf(line, "secret %127s", secret) == 1) {
            strcpy(ordered, secret);
            orders++;
        } else if (strncmp(line, "end", 3) == 0) {
            ending = true;
        }
        pthread_cond_signal(&heard);
        pthread_mutex_unlock(&lock);
    }
    pthread_mutex_lock(&lock);
    ending = true;
    pthread_cond_signal(&heard);
    pthread_mutex_unlock(&lock);
    return NULL;
}

/* ---- what ends a session ---- */

enum { CONTINUES, LOST, NEW_SECRET, END };
static jmp_buf session;

static void fail(const char *kind, const char *what) {
    say(kind, "%s: %s", what, ferrywire_last_error());
    exit(1);
}

/* Goes on if the call succeeded; else the session ends, or the program does. */
static void must(int status, const char *what) {
    switch (status) {
    case FERRYWIRE_OK:
        return;
    case FERRYWIRE_ERROR_TIMEOUT:
        fail("unended", what);
        return;
    case FERRYWIRE_ERROR_PEER:
        say("lost", "%s: %s", what, ferrywire_last_error());
        longjmp(session, LOST);
    case FERRYWIRE_ERROR_CLOSED:
        say("closed", "%s: %s", what, ferrywire_last_error());
        longjmp(session, LOST);
    default:
        fail("failed", what);
    }
}

static void wrong(const char *what, span s, const char *why) {
    say("wrong", "%s by %s: span %" PRIu64 ",%" PRIu64 ",%" PRIu64 ": %s", what, label, s.from, s.at, s.bytes, why);
    longjmp(session, LOST);
}

/* Waits for a transfer; the bytes that it has moved. */
static uint64_t done(ferrywire_transfer *transfer, const char *what) {
    uint64_t moved = 0;
    int status = ferrywire_transfer_wait(transfer, OPERATION_MS, OPERATION_MS, &moved);
    if (status != FERRYWIRE_ERROR_TIMEOUT) ferrywire_transfer_free(transfer);
    must(status, what);
    return moved;
}

static void add(uint64_t moved) {
    operations++;
    bytes_moved += moved;
}

static void report(void) {
    say("moved", "%" PRIu64 " %" PRIu64 " %" PRIu64, operations, bytes_moved, cancelled);
    operations = bytes_moved = cancelled = 0;
    clock_gettime(CLOCK_MONOTONIC, &reported);
}

/* ---- random numbers and spans ---- */

static uint64_t dice(void) {
    uint64_t x = dice_state += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static uint64_t below(uint64_t end) { return dice() % (end ? end : 1); }

/* Spans that do not overlap in the region. */
static void throw_spans(span *spans, uint64_t count, uint64_t total) {
    uint64_t room = total / count;
    for (uint64_t i = 0; i < count; i++) {
        double fraction = (double)(dice() >> 11) / (double)(1ull << 53);
        uint64_t bytes = (uint64_t)exp(log(8.0) + fraction * (log((double)room) - log(8.0)));
        if (bytes < 8) bytes = 8;
        if (bytes > room) bytes = room;
        spans[i] = (span){below(pool_bytes - bytes + 1), i * room + below(room - bytes + 1), bytes};
    }
}

static void poison(span s) { memset(landed + s.at, 0xa5, s.bytes); }

static void verify(span s, const char *what) {
    if (memcmp(landed + s.at, pool + s.from, s.bytes) == 0) return;
    uint64_t first = 0;
    while (landed[s.at + first] == pool[s.from + first]) first++;
    char why[96];
    snprintf(why, sizeof why, "byte %" PRIu64 " is %#x, expected %#x", first, landed[s.at + first], pool[s.from + first]);
    wrong(what, s, why);
}

/* ---- the operations ---- */

static void notify(const void *message, size_t bytes, const char *what) {
    ferrywire_transfer *transfer;
    must(ferrywire_notify(peer, message, bytes, &transfer), what);
    done(transfer, what);
}

static size_t answer(char *into, size_t room) {
    size_t bytes;
    must(ferrywire_next_notification(peer, OPERATION_MS, into, room, &bytes), "an answer of the server");
    return bytes;
}

static void good(span s, const char *what) {
    static char got[FERRYWIRE_NOTIFICATION_BYTES_MAX];
    if (answer(got, sizeof got) != 4 || memcmp(got, "good", 4) != 0) wrong(what, s, "the server does not say good");
}

static void take_region(void) {
    static char got[FERRYWIRE_NOTIFICATION_BYTES_MAX];
    size_t bytes = answer(got, sizeof got - 1);
    unsigned char descriptor[FERRYWIRE_DESCRIPTOR_BYTES_MAX];
    got[bytes] = 0;
    if (strncmp(got, "region ", 7) != 0 || (bytes - 7) / 2 > sizeof descriptor) wrong("region", (span){0, 0, 0}, got);
    for (size_t i = 0; i < (bytes - 7) / 2; i++) sscanf(got + 7 + 2 * i, "%2hhx", &descriptor[i]);
    ferrywire_remote_free(target);
    target = NULL;
    must(ferrywire_remote_open(descriptor, (bytes - 7) / 2, &target), "descriptor");
}

static void describe(const ferrywire_region *region, char *hex) {
    unsigned char descriptor[FERRYWIRE_DESCRIPTOR_BYTES_MAX];
    size_t bytes;
    must(ferrywire_region_descriptor(region, descriptor, sizeof descriptor, &bytes), "descriptor");
    for (size_t i = 0; i < bytes; i++) sprintf(hex + 2 * i, "%02x", descriptor[i]);
}

static ferrywire_transfer *write_span(span s, const char *message) {
    ferrywire_transfer *transfer;
    must(ferrywire_write(peer, source, s.from, target, s.at, s.bytes, message, message ? strlen(message) : 0, &transfer), "write");
    return transfer;
}

static ferrywire_transfer *read_span(span s) {
    ferrywire_transfer *transfer;
    must(ferrywire_read(peer, landing, s.at, target, s.at, s.bytes, &transfer), "read");
    return transfer;
}

static void write_and_read_back(void) {
    span spans[DEPTH_MAX];
    ferrywire_transfer *transfers[DEPTH_MAX];
    uint64_t count = 1 + below(DEPTH_MAX);
    throw_spans(spans, count, REGION_BYTES);
    for (uint64_t i = 0; i < count; i++) transfers[i] = write_span(spans[i], NULL);
    for (uint64_t i = 0; i < count; i++) add(done(transfers[i], "write"));
    for (uint64_t i = 0; i < count; i++) poison(spans[i]);
    for (uint64_t i = 0; i < count; i++) transfers[i] = read_span(spans[i]);
    for (uint64_t i = 0; i < count; i++) {
        add(done(transfers[i], "read"));
        verify(spans[i], "written and read back");
    }
}

static void write_and_let_check(void) {
    span s;
    char message[128];
    throw_spans(&s, 1, REGION_BYTES);
    snprintf(message, sizeof message, "check %" PRIu64 ",%" PRIu64 ",%" PRIu64, s.from, s.at, s.bytes);
    uint64_t moved = done(write_span(s, message), "write with a notification");
    good(s, "written and checked");
    add(moved);
}

static ferrywire_blocks *list_of(const ferrywire_region *local, const span *spans, uint64_t count, bool by_pool) {
    int64_t locals[BLOCKS_MAX], remotes[BLOCKS_MAX], lengths[BLOCKS_MAX];
    for (uint64_t i = 0; i < count; i++) {
        locals[i] = (int64_t)(by_pool ? spans[i].from : spans[i].at);
        remotes[i] = (int64_t)spans[i].at;
        lengths[i] = (int64_t)spans[i].bytes;
    }
    ferrywire_blocks *blocks;
    must(ferrywire_blocks_new(local, target, locals, remotes, lengths, 0, count, &blocks), "blocks");
    return blocks;
}

static void move_blocks(void) {
    span spans[BLOCKS_MAX];
    char message[64 * BLOCKS_MAX] = "check";
    uint64_t count = 2 + below(BLOCKS_MAX - 1);
    throw_spans(spans, count, LIST_BYTES);
    size_t length = strlen(message);
    for (uint64_t i = 0; i < count; i++) {
        length += (size_t)snprintf(message + length, sizeof message - length, " %" PRIu64 ",%" PRIu64 ",%" PRIu64,
                                   spans[i].from, spans[i].at, spans[i].bytes);
    }
    ferrywire_transfer *transfer;
    ferrywire_blocks *blocks = list_of(source, spans, count, true);
    int status = ferrywire_write_blocks(peer, blocks, NULL, 0, message, length, &transfer);
    ferrywire_blocks_free(blocks);
    must(status, "write of blocks");
    add(done(transfer, "write of blocks"));
    good(spans[0], "blocks written and checked");
    for (uint64_t i = 0; i < count; i++) poison(spans[i]);
    blocks = list_of(landing, spans, count, false);
    status = ferrywire_read_blocks(peer, blocks, NULL, 0, &transfer);
    ferrywire_blocks_free(blocks);
    must(status, "read of blocks");
    add(done(transfer, "read of blocks"));
    for (uint64_t i = 0; i < count; i++) verify(spans[i], "blocks read back");
}

static void echo(void) {
    span s;
    char message[64];
    ferrywire_transfer *back, *sent;
    throw_spans(&s, 1, REGION_BYTES);
    poison(s);
    must(ferrywire_recv(peer, 5, landing, s.at, s.bytes, &back), "recv");
    notify(message, (size_t)snprintf(message, sizeof message, "echo 5 %" PRIu64, s.bytes), "echo");
    must(ferrywire_send(peer, 5, source, s.from, s.bytes, &sent), "send");
    done(sent, "send");
    if (done(back, "recv") != s.bytes) wrong("echo", s, "another length");
    verify(s, "sent and sent back");
    add(2 * s.bytes);
}

static void ping(void) {
    static char message[PING_BYTES_MAX + 5], got[FERRYWIRE_NOTIFICATION_BYTES_MAX];
    uint64_t bytes = 1 + below(PING_BYTES_MAX), from = below(pool_bytes - bytes);
    memcpy(message, "ping ", 5);
    memcpy(message + 5, pool + from, bytes);
    notify(message, 5 + bytes, "ping");
    if (answer(got, sizeof got) != 5 + bytes || memcmp(got, "pong ", 5) != 0 || memcmp(got + 5, pool + from, bytes) != 0) {
        wrong("notification", (span){from, 0, bytes}, "it came back changed");
    }
    add(2 * bytes);
}

static void pull_or_push(void) {
    span s;
    char message[512];
    throw_spans(&s, 1, REGION_BYTES);
    bool push = below(2);
    int length = snprintf(message, sizeof message, "%s %" PRIu64 ",%" PRIu64 ",%" PRIu64 "%s", push ? "push" : "pull", s.from,
                          s.at, s.bytes, push ? " " : "");
    if (push) {
        poison(s);
        describe(landing, message + length);
    }
    notify(message, strlen(message), "pull or push");
    good(s, "pull or push");
    if (push) verify(s, "written by the server and read");
    add(s.bytes);
}

static void cancel(void) {
    span s;
    throw_spans(&s, 1, REGION_BYTES);
    ferrywire_transfer *transfer = below(2) ? write_span(s, NULL) : read_span(s);
    usleep((useconds_t)below(3000));
    ferrywire_transfer_cancel(transfer);
    uint64_t moved;
    int status = ferrywire_transfer_wait(transfer, OPERATION_MS, OPERATION_MS, &moved);
    if (status != FERRYWIRE_ERROR_TIMEOUT) ferrywire_transfer_free(transfer);
    if (status == FERRYWIRE_ERROR_CANCELLED) {
        cancelled++;
    } else {
        must(status, "a cancelled operation");
        add(moved);
    }
    s.from = below(pool_bytes - s.bytes + 1);
    add(done(write_span(s, NULL), "write after a cancel"));
    poison(s);
    add(done(read_span(s), "read after a cancel"));
    verify(s, "written after a cancel and read back");
}

static void new_landing(void) {
    landed = malloc(REGION_BYTES);
    if (!landed) fail("failed", "no memory");
    memset(landed, 0xa5, REGION_BYTES);
    must(ferrywire_register(endpoint, landed, REGION_BYTES, free, landed, &landing), "register");
}

static void register_anew(void) {
    must(ferrywire_deregister(landing), "deregister");
    ferrywire_region_free(landing);
    landing = NULL;
    new_landing();
    notify("again", 5, "again");
    take_region();
    write_and_read_back();
}

static void step(void) {
    uint64_t which = below(100);
    if (which < 45) write_and_read_back();
    else if (which < 60) write_and_let_check();
    else if (which < 70) move_blocks();
    else if (which < 80) echo();
    else if (which < 85) ping();
    else if (which < 91) pull_or_push();
    else if (which < 98) cancel();
    else register_anew();
}

/* ---- sessions ---- */

static void obey(void) {
    pthread_mutex_lock(&lock);
    bool is_same = strcmp(ordered, current) == 0, is_new = obeyed != orders;
    if (is_same) obeyed = orders;
    int why = ending ? END : is_new && !is_same ? NEW_SECRET : CONTINUES;
    pthread_mutex_unlock(&lock);
    if (is_new && is_same) say("ok", "secret");
    if (why != CONTINUES) longjmp(session, why);
}

static void connect_to_server(void) {
    struct timespec now, began;
    clock_gettime(CLOCK_MONOTONIC, &began);
    for (;;) {
        unsigned char metadata[4096];
        obey();
        FILE *file = fopen(metadata_file, "rb");
        size_t bytes = file ? fread(metadata, 1, sizeof metadata, file) : 0;
        if (file) fclose(file);
        if (ferrywire_connect_metadata(endpoint, metadata, bytes, ATTEMPT_MS, &peer) == FERRYWIRE_OK) return;
        clock_gettime(CLOCK_MONOTONIC, &now);
        if (now.tv_sec - began.tv_sec > CONNECT_S) fail("unended", "connect");
        say("retried", "%s", ferrywire_last_error());
        usleep(100000);
    }
}

static void open_endpoint(void) {
    ferrywire_options *options;
    pthread_mutex_lock(&lock);
    while (orders == 0 && !ending) pthread_cond_wait(&heard, &lock);
    strcpy(current, ordered);
    bool is_change = obeyed > 0;
    obeyed = orders;
    pthread_mutex_unlock(&lock);
    must(ferrywire_options_new(&options), "options");
    must(ferrywire_options_secret(options, current, strlen(current)), "secret");
    must(ferrywire_options_label(options, label), "label");
    must(ferrywire_options_encryption(options, encryption), "encryption");
    if (channels) must(ferrywire_options_channels(options, channels), "channels");
    char names[256];
    snprintf(names, sizeof names, "%s", nics ? nics : "");
    for (char *name = strtok(names, ","); name; name = strtok(NULL, ",")) must(ferrywire_options_nic(options, name), "nic");
    must(ferrywire_endpoint_open(options, &endpoint), "open");
    ferrywire_options_free(options);
    must(ferrywire_register(endpoint, pool, pool_bytes, NULL, NULL, &source), "register");
    if (is_change) say("ok", "secret");
}

static void close_endpoint(void) {
    int status = ferrywire_endpoint_close(endpoint, CLOSE_MS);
    if (status != FERRYWIRE_OK) fail(status == FERRYWIRE_ERROR_TIMEOUT ? "unended" : "failed", "close");
    must(ferrywire_region_free(source), "free");
    ferrywire_endpoint_free(endpoint);
    source = NULL;
}

static void drop_peer(void) {
    ferrywire_remote_free(target);
    ferrywire_region_free(landing);
    ferrywire_peer_free(peer);
    target = NULL;
    landing = NULL;
    peer = NULL;
}

/* Between two operations: closes all in an orderly way. */
static void end_session(void) {
    if (peer) {
        int status = ferrywire_peer_close(peer, CLOSE_MS);
        if (status != FERRYWIRE_OK) fail(status == FERRYWIRE_ERROR_TIMEOUT ? "unended" : "failed", "close of the peer");
    }
    drop_peer();
    close_endpoint();
}

static void run_session(void) {
    char message[512];
    struct timespec now;
    connect_to_server();
    new_landing();
    int length = snprintf(message, sizeof message, "hello %s %d ", memory, REGION_BYTES);
    describe(source, message + length);
    notify(message, strlen(message), "hello");
    take_region();
    say("up", "");
    uint64_t steps = STEPS_OF_A_SESSION / 2 + below(STEPS_OF_A_SESSION);
    for (uint64_t i = 0; i < steps; i++) {
        obey();
        step();
        clock_gettime(CLOCK_MONOTONIC, &now);
        if ((now.tv_sec - reported.tv_sec) * 1000 + (now.tv_nsec - reported.tv_nsec) / 1000000 > 500) report();
    }
    must(ferrywire_peer_close(peer, CLOSE_MS), "close of the peer");
    say("closed", "for a new connection");
}

static void load_pool(void) {
    FILE *file = fopen(pool_file, "rb");
    if (!file || fseek(file, 0, SEEK_END) != 0) fail("failed", "the pool's file");
    pool_bytes = (uint64_t)ftell(file);
    rewind(file);
    pool = malloc(pool_bytes);
    if (!pool || fread(pool, 1, pool_bytes, file) != pool_bytes) fail("failed", "the pool's file");
    fclose(file);
}

int main(int count, char **words) {
    for (int i = 1; i + 1 < count; i += 2) {
        const char *value = words[i + 1];
        if (strcmp(words[i], "--pool") == 0) pool_file = value;
        else if (strcmp(words[i], "--metadata") == 0) metadata_file = value;
        else if (strcmp(words[i], "--label") == 0) label = value;
        else if (strcmp(words[i], "--nics") == 0) nics = value;
        else if (strcmp(words[i], "--encryption") == 0) encryption = value;
        else if (strcmp(words[i], "--channels") == 0) channels = strtoull(value, NULL, 10);
        else if (strcmp(words[i], "--memory") == 0) memory = value;
        else if (strcmp(words[i], "--seed") == 0) dice_state = strtoull(value, NULL, 10) * 0x9e3779b97f4a7c15u;
    }
    if (!pool_file || !metadata_file) {
        fprintf(stderr, "usage: peer --pool FILE --metadata FILE [options]\n");
        return 2;
    }
    pthread_t listener;
    pthread_create(&listener, NULL, listen_to_driver, NULL);
    load_pool();
    open_endpoint();
    for (;;) {
        switch (setjmp(session)) {
        case CONTINUES:
            run_session();
            drop_peer();
            break;
        case LOST:
            drop_peer();
            break;
        case NEW_SECRET:
            end_session();
            open_endpoint();
            break;
        default:
            report();
            end_session();
            return 0;
        }
    }
}
