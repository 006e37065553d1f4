/* Drives the plugin as NCCL does, and aborts as NCCL may: driver PLUGIN VERSION CASE */
#include "net.h"

static const char *path;

/* A connection as NCCL's proxy thread uses it: up to eight steps in flight, of which only the oldest is tested. */
struct lane {
    void *comm;
    int sends;
    unsigned char *ring[STEPS];
    void *requests[STEPS];
    size_t begun, done, total;
    unsigned seed;
};

static size_t step_bytes(size_t step)
{
    static const size_t sizes[] = { 4096, 0, 524288, 1, 70000, 131072, 65536, 300001 };
    return sizes[step % 8];
}

enum { ROOM = 524288 };

static void lane_open(struct lane *lane, void *comm, int sends, size_t total, unsigned seed)
{
    memset(lane, 0, sizeof *lane);
    lane->comm = comm, lane->sends = sends, lane->total = total, lane->seed = seed;
    for (int step = 0; step < STEPS; step++)
        lane->ring[step] = malloc(ROOM);
}

static void lane_turn(struct net *net, struct lane *lane)
{
    if (lane->begun < lane->total && lane->begun - lane->done < STEPS) {
        size_t step = lane->begun, size = step_bytes(step);
        unsigned char *buffer = lane->ring[step % STEPS];
        /* Permission to complete early, as NCCL's low-latency protocols give it. */
        void *request = lane->sends || step % 2 ? NULL : (void *)1;
        if (lane->sends) {
            fill(buffer, size, lane->seed + (unsigned)step);
            CHECK(net_isend(net, lane->comm, buffer, size, 3, &request) == SUCCESS);
        } else {
            CHECK(net_irecv(net, lane->comm, buffer, ROOM, 3, &request) == SUCCESS);
        }
        CHECK(request != (void *)1);
        lane->requests[step % STEPS] = request;
        lane->begun += request != NULL;
    }
    if (lane->done < lane->begun) {
        int done = 77, sizes[64] = { 0 };
        size_t step = lane->done;
        CHECK(net_test(net, lane->requests[step % STEPS], &done, lane->sends ? NULL : sizes) == SUCCESS);
        if (done && !lane->sends) {
            CHECK((size_t)sizes[0] == step_bytes(step));
            CHECK(is_filled(lane->ring[step % STEPS], step_bytes(step), lane->seed + (unsigned)step));
        }
        lane->done += done != 0;
    }
}

enum { COMMS = 3, ROUNDS = 16 };

/* One of two ranks: several comms each way, in the order in which NCCL calls. */
static void rank(struct net *net, int socket)
{
    struct pair pairs[COMMS];
    struct lane lanes[2 * COMMS];
    void *registered[2 * COMMS];
    char byte = 1;
    net_load(net, path);
    if (net->version >= 11) {
        int attributes[11] = { 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1 };
        CHECK(((int (*)(void *, void *))net->table[21])(net->context, attributes) == SUCCESS);
    }
    for (int comm = 0; comm < COMMS; comm++) {
        pairs[comm] = pair_there(net, socket);
        lane_open(&lanes[2 * comm], pairs[comm].send, 1, ROUNDS, (unsigned)comm * 1000);
        lane_open(&lanes[2 * comm + 1], pairs[comm].recv, 0, ROUNDS, (unsigned)comm * 1000);
    }
    for (int lane = 0; lane < 2 * COMMS; lane++)
        CHECK(net_reg_mr(net, lanes[lane].comm, lanes[lane].ring[0], ROOM, HOST, &registered[lane]) == SUCCESS);
    double since = now();
    for (int open = 1; open;) {
        open = 0;
        for (int lane = 0; lane < 2 * COMMS; lane++) {
            lane_turn(net, &lanes[lane]);
            open |= lanes[lane].done < lanes[lane].total;
        }
        again(since, "a rank");
    }
    /* NCCL's ranks agree before they take things down. */
    CHECK(write(socket, &byte, 1) == 1 && read(socket, &byte, 1) == 1);
    for (int lane = 0; lane < 2 * COMMS; lane++)
        CHECK(net_dereg_mr(net, lanes[lane].comm, registered[lane]) == SUCCESS);
    for (int comm = 0; comm < COMMS; comm++)
        pair_close(net, pairs[comm]);
    net_finalize(net);
    CHECK(dlclose(net->library) == 0);
    CHECK(warnings == 0);
}

static void as_nccl(struct net *net)
{
    two(net, rank, rank, 0);
}

static void init_again(struct net *net)
{
    net_load(net, path);
    CHECK(net_init(net, logger) == SUCCESS && net_init(net, logger) == SUCCESS);
    struct pair pair = pair_here(net);
    message(net, pair, 100000, 100000, 1);
    net_finalize(net);
    net_finalize(net);
    message(net, pair, 100000, 100000, 2);
    pair_close(net, pair);
}

static void unload_without_a_call(struct net *net)
{
    for (int round = 0; round < 3; round++) {
        net_load(net, path);
        void **table = net->table;
        const char *name = table[0];
        struct pair pair = pair_here(net);
        message(net, pair, 1 << 20, 1 << 20, 1);
        pair_close(net, pair);
        CHECK(dlclose(net->library) == 0);
        /* The plugin's threads may run at any time, so its code and table must still be loaded. */
        void *still = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
        CHECK(still && !strcmp(name, "ferrywire") && table[0] == name);
        dlclose(still);
    }
}

static void properties(struct net *net)
{
    unsigned char room[256];
    size_t size = net->version == 10 ? 104 : net->version == 11 ? 112 : 128;
    size_t bytes_at = net->version == 12 ? 104 : 88;
    net_load(net, path);
    memset(room, 0xA5, sizeof room);
    CHECK(net_properties(net, 0, room) == SUCCESS);
#define INT(at) (*(int *)(room + (at)))
#define SIZE(at) (*(size_t *)(room + (at)))
    CHECK(!strcmp(*(char **)room, "lo") && *(char **)(room + 8) == NULL && SIZE(16) == 0);
    CHECK(INT(24) == HOST && INT(28) == 0 && INT(32) == 0 && INT(36) > 0 && INT(40) == 0);
    CHECK(*(float *)(room + 44) == 0 && INT(48) == 65536 && INT(52) == 1 && INT(56) == 0 && INT(60) == 0);
    CHECK(INT(64) == 1 && INT(68) == 0);
    CHECK(SIZE(bytes_at) == (size_t)1 << 40 && SIZE(bytes_at + 8) == (size_t)1 << 40);
    if (net->version >= 11)
        CHECK(INT(bytes_at + 16) == 1);
    if (net->version == 12)
        CHECK(*(int16_t *)(room + 124) == -1 && *(int16_t *)(room + 126) == -1);
    for (size_t at = size; at < sizeof room; at++)
        CHECK(room[at] == 0xA5);
    CHECK(net_properties(net, 1, room) != SUCCESS && net_properties(net, -1, room) != SUCCESS);
}

/* All tables: their slots, the size of properties, and that a negative size is refused where sizes are signed. */
static void tables(struct net *net)
{
    static const struct {
        int version, slots, regmr_dmabuf, properties, speed, comms, recvs;
    } all[] = {
        { 5, 16, 0, 48, 28, 40, 44 },   { 6, 17, 8, 48, 28, 40, 44 },   { 7, 19, 8, 56, 28, 40, 44 },
        { 8, 19, 8, 64, 32, 44, 48 },   { 9, 20, 8, 104, 36, 48, 52 },  { 10, 20, 8, 104, 36, 48, 52 },
        { 11, 22, 8, 112, 36, 48, 52 }, { 12, 22, 8, 128, 36, 48, 52 },
    };
    net_load(net, path);
    struct pair pair = pair_here(net);
    for (int n = 0; n < 8; n++) {
        unsigned char room[256];
        char symbol[32], byte = 0;
        int version = all[n].version, before = warnings;
        void *handle = NULL, *request = NULL;
        snprintf(symbol, sizeof symbol, "ncclNetPlugin_v%d", version);
        void **table = dlsym(net->library, symbol);
        CHECK(table && !strcmp(table[0], "ferrywire"));
        for (int slot = 1; slot < all[n].slots; slot++) {
            /* regMrDmaBuf, getDeviceMr and irecvConsumed are missing; finalize is required. */
            int empty = (all[n].regmr_dmabuf && slot == 8) || slot == 17 || slot == 18;
            CHECK((table[slot] == NULL) == empty);
        }
        memset(room, 0xA5, sizeof room);
        CHECK(((int (*)(int, void *))table[3])(0, room) == SUCCESS);
        CHECK(!strcmp(*(char **)room, "lo") && *(int *)(room + 24) == HOST && *(int *)(room + all[n].speed) > 0);
        CHECK(*(int *)(room + all[n].comms) == 65536 && *(int *)(room + all[n].recvs) == 1);
        for (size_t at = (size_t)all[n].properties; at < sizeof room; at++)
            CHECK(room[at] == 0xA5);
        if (version < 8) {
            CHECK(((int (*)(void *, void *, int, int, void **))table[7])(pair.send, &byte, -1, HOST, &handle) != SUCCESS);
            CHECK(handle == NULL && warnings == ++before);
        }
        if (version < 9) {
            void *isend = table[version == 5 ? 9 : 10];
            CHECK(((int (*)(void *, void *, int, int, void *, void **))isend)(pair.send, &byte, -1, 0, NULL, &request)
                  != SUCCESS);
            CHECK(request == NULL && warnings == ++before);
        }
    }
    message(net, pair, 100, 100, 1);
    pair_close(net, pair);
}

static void setting_up(struct net *net)
{
    char handle[128 + 16], copy[128];
    void *listener = NULL;
    net_load(net, path);
    /* The device-handle argument is NULL; one thread makes the calls of both ends in turn. */
    CHECK(net_listen(net, handle, &listener) == SUCCESS && listener);
    struct pair pair = meet(net, listener, handle, NULL);
    message(net, pair, 1000, 2000, 1);
    pair_close(net, pair);
    /* A connect without an accept; an accept without a connect; an abandoned attempt. */
    void *comm = NULL, *none = NULL;
    CHECK(net_listen(net, handle, &listener) == SUCCESS);
    net_close_listen(net, listener);
    CHECK(net_listen(net, handle, &listener) == SUCCESS);
    CHECK(net_accept(net, listener, &comm, &none) == SUCCESS && comm == NULL && none == NULL);
    CHECK(net_connect(net, handle, &comm, &none) == SUCCESS && comm == NULL);
    net_close_listen(net, listener);
    /* The listener is gone: the attempt fails, or is abandoned. */
    double since = now();
    while (net_connect(net, handle, &comm, &none) == SUCCESS)
        again(since, "a connect to nobody");
    CHECK(comm == NULL && warnings > 0);
    /* A connection with another secret is refused, and the listener is unchanged. */
    CHECK(net_listen(net, handle, &listener) == SUCCESS);
    memcpy(copy, handle, 128);
    copy[30] ^= 1;
    void *accepted = NULL;
    since = now();
    while (net_connect(net, copy, &comm, &none) == SUCCESS) {
        CHECK(net_accept(net, listener, &accepted, &none) == SUCCESS && !accepted);
        again(since, "a wrong secret");
    }
    CHECK(comm == NULL);
    pair = meet(net, listener, handle, &none);
    message(net, pair, 1000, 2000, 2);
    pair_close(net, pair);
    /* Bytes that are not a handle are refused. */
    memset(handle, 0, sizeof handle);
    CHECK(net_connect(net, handle, &comm, &none) != SUCCESS && comm == NULL);
}

/* A rank of NCCL 2.12 to 2.16, which makes all its connects before its accepts. */
static void rank_that_connects_first(struct net *net, int socket)
{
    char ours[128], theirs[128];
    void *listener = NULL, *none = NULL;
    struct pair pair = { NULL, NULL };
    net_load(net, path);
    CHECK(net_listen(net, ours, &listener) == SUCCESS && listener);
    CHECK(write(socket, ours, 128) == 128 && recv(socket, theirs, 128, MSG_WAITALL) == 128);
    double since = now();
    while (!pair.send) {
        CHECK(net_connect(net, theirs, &pair.send, &none) == SUCCESS);
        again(since, "connecting without an accept");
        rest(since);
    }
    since = now();
    while (!pair.recv) {
        CHECK(net_accept(net, listener, &pair.recv, &none) == SUCCESS);
        again(since, "accepting");
        rest(since);
    }
    net_close_listen(net, listener);
    unsigned char mine[1000], their[1000];
    void *sent = NULL, *received = NULL;
    fill(mine, sizeof mine, 5);
    CHECK(net_irecv(net, pair.recv, their, sizeof their, 1, &received) == SUCCESS && received);
    CHECK(net_isend(net, pair.send, mine, sizeof mine, 1, &sent) == SUCCESS && sent);
    int result = 0;
    CHECK(finish(net, received, &result) == sizeof their && is_filled(their, sizeof their, 5));
    finish(net, sent, &result);
    CHECK(result == SUCCESS);
    /* The ranks agree before they take things down. */
    char byte = 1;
    CHECK(write(socket, &byte, 1) == 1 && read(socket, &byte, 1) == 1);
    pair_close(net, pair);
    CHECK(warnings == 0);
}

static void connects_first(struct net *net)
{
    two(net, rank_that_connects_first, rank_that_connects_first, 0);
}

static void handles(struct net *net)
{
    /* Two different fill bytes show which bytes are written. */
    unsigned char one[144], other[144];
    void *first = NULL, *second = NULL;
    net_load(net, path);
    memset(one, 0x11, sizeof one);
    memset(other, 0x22, sizeof other);
    CHECK(net_listen(net, one, &first) == SUCCESS && net_listen(net, other, &second) == SUCCESS);
    for (int at = 64; at < 128; at++)
        CHECK(one[at] == 0 && other[at] == 0);
    CHECK(memcmp(one + 6, other + 6, 32));
    for (int at = 128; at < 144; at++)
        CHECK(one[at] == 0x11 && other[at] == 0x22);
    net_close_listen(net, first);
    net_close_listen(net, second);
    /* NCCL up to 2.11 would call connect and accept once and expect them to block. */
    CHECK(!dlsym(net->library, "ncclNetPlugin_v4"));
}

/* The plugin asks NCCL for more channels than it makes for one NIC, limits short collectives to few channels, and keeps
 * longer ones from LL. */
static void tuning(struct net *net)
{
    typedef int (*init_v4)(size_t, size_t, logger_t, void **);
    typedef int (*init_v5)(void **, uint64_t, size_t, size_t, logger_t, void *, void *);
    typedef int (*tune_v4)(void *, int, size_t, int, float **, int, int, int, int *);
    float costs[7][3], before[7][3];
    for (int at = 0; at < 21; at++)
        (&before[0][0])[at] = (float)at - 1;
    net_load(net, path);
    const char *asked = getenv("NCCL_MIN_NCHANNELS");
    CHECK(asked && !strcmp(asked, "8"));
    asked = getenv("NCCL_P2P_NET_CHUNKSIZE");
    CHECK(asked && !strcmp(asked, "524288"));
    for (int version = 4; version <= 5; version++) {
        void **tuner = dlsym(net->library, version == 4 ? "ncclTunerPlugin_v4" : "ncclTunerPlugin_v5"), *context;
        CHECK(tuner && !strcmp(tuner[0], "ferrywire"));
        if (version == 4)
            CHECK(((init_v4)tuner[1])(2, 2, logger, &context) == SUCCESS);
        else
            CHECK(((init_v5)tuner[1])(&context, 42, 2, 2, logger, NULL, NULL) == SUCCESS);
        int few = 0, all = 0;
        memcpy(costs, before, sizeof costs);
        CHECK(((tune_v4)tuner[2])(context, 4, 128 << 10, 1, (float **)costs, 7, 3, 0, &few) == SUCCESS && few == 2);
        CHECK(!memcmp(before, costs, sizeof costs));
        /* Only a long all-reduce is kept from LL. */
        CHECK(((tune_v4)tuner[2])(context, 2, 256 << 20, 1, (float **)costs, 7, 3, 0, &all) == SUCCESS && all == 0);
        CHECK(!memcmp(before, costs, sizeof costs));
        CHECK(((tune_v4)tuner[2])(context, 4, 256 << 20, 1, (float **)costs, 7, 3, 0, &all) == SUCCESS && all == 0);
        for (int row = 0; row < 7; row++)
            CHECK(costs[row][0] == -1 && costs[row][1] == before[row][1] && costs[row][2] == before[row][2]);
        CHECK(((int (*)(void *))tuner[3])(context) == SUCCESS);
    }
}

/* The user's number of channels is kept. */
static void tuned_by_the_user(struct net *net)
{
    int few = 0;
    void *context;
    setenv("NCCL_MAX_NCHANNELS", "2", 1);
    setenv("NCCL_P2P_NET_CHUNKSIZE", "65536", 1);
    net_load(net, path);
    CHECK(!getenv("NCCL_MIN_NCHANNELS") && !strcmp(getenv("NCCL_P2P_NET_CHUNKSIZE"), "65536"));
    void **tuner = dlsym(net->library, "ncclTunerPlugin_v4");
    CHECK(tuner && ((int (*)(size_t, size_t, logger_t, void **))tuner[1])(2, 2, logger, &context) == SUCCESS);
    CHECK(((int (*)(void *, int, size_t, int, float **, int, int, int, int *))tuner[2])(
              context, 4, 256 << 10, 1, NULL, 7, 3, 0, &few) == SUCCESS && few == 0);
    CHECK(((int (*)(void *))tuner[3])(context) == SUCCESS);
}

/* A child of a process that used ferrywire, with another network: ferrywire's settings are not taken for the user's. */
static void tuned_for_another_network(struct net *net)
{
    setenv("NCCL_NET", "Socket", 1);
    setenv("NCCL_MIN_NCHANNELS", "8", 1);
    setenv("FERRYWIRE_NCCL_CHANNELS_ASKED", "8", 1);
    setenv("NCCL_P2P_NET_CHUNKSIZE", "65536", 1);
    setenv("FERRYWIRE_NCCL_PIECE_ASKED", "524288", 1);
    net_load(net, path);
    CHECK(!getenv("NCCL_MIN_NCHANNELS") && !strcmp(getenv("NCCL_P2P_NET_CHUNKSIZE"), "65536"));
}

/* Accepts at a listener whose dialler has another secret, until the plugin has logged that. */
static void refuses(struct net *net, int socket)
{
    char handle[128];
    void *listener = NULL, *comm = NULL, *none = NULL;
    net_load(net, path);
    CHECK(net_listen(net, handle, &listener) == SUCCESS && listener);
    CHECK(write(socket, handle, 128) == 128);
    for (double since = now(); warnings == 0; again(since, "a refusal"))
        CHECK(net_accept(net, listener, &comm, &none) == SUCCESS && !comm);
    CHECK(strstr(last_warning, "127.0.0.1") && strstr(last_warning, "set the same FERRYWIRE_SECRET on all hosts"));
    both(socket);
    net_close_listen(net, listener);
}

static void is_refused(struct net *net, int socket)
{
    char handle[128];
    void *comm = NULL, *none = NULL;
    int result = SUCCESS;
    setenv("FERRYWIRE_SECRET", "not the secret of the others", 1);
    net_load(net, path);
    CHECK(recv(socket, handle, 128, MSG_WAITALL) == 128);
    for (double since = now(); result == SUCCESS; again(since, "a refusal")) {
        result = net_connect(net, handle, &comm, &none);
        CHECK(!comm);
    }
    CHECK(result == REMOTE_ERROR && warnings == 1);
    CHECK(strstr(last_warning, "refused this host's proof, or ended: set the same FERRYWIRE_SECRET on all hosts"));
    both(socket);
}

static void different_secrets(struct net *net)
{
    two(net, is_refused, refuses, 0);
}

static _Atomic int registering;

struct registered {
    struct net *net;
    struct pair pair;
};

static void *register_beside(void *argument)
{
    struct registered *with = argument;
    static char memory[4096];
    while (registering) {
        void *one, *other;
        CHECK(net_reg_mr(with->net, with->pair.send, memory, sizeof memory, HOST, &one) == SUCCESS);
        CHECK(net_reg_mr(with->net, with->pair.recv, memory, (size_t)64 << 30, HOST, &other) == SUCCESS);
        CHECK(net_dereg_mr(with->net, with->pair.send, one) == SUCCESS);
        CHECK(net_dereg_mr(with->net, with->pair.recv, other) == SUCCESS);
        CHECK(net_dereg_mr(with->net, with->pair.recv, NULL) == SUCCESS);
        sched_yield();
    }
    return NULL;
}

static void registration(struct net *net)
{
    net_load(net, path);
    struct registered with = { net, pair_here(net) };
    struct pair second = pair_here(net);
    pthread_t thread;
    void *handle;
    registering = 1;
    CHECK(pthread_create(&thread, NULL, register_beside, &with) == 0);
    for (unsigned seed = 0; seed < 50; seed++)
        message(net, with.pair, seed * 4000, seed * 4000, seed);
    registering = 0;
    pthread_join(thread, NULL);
    /* Memory that is also registered on another comm; memory of GPUs is refused. */
    CHECK(net_reg_mr(net, second.send, &with, sizeof with, HOST, &handle) == SUCCESS);
    CHECK(net_reg_mr(net, second.send, &with, sizeof with, CUDA, &handle) != SUCCESS);
    pair_close(net, with.pair);
    pair_close(net, second);
}

/* An abort: memory is deregistered and used for other data while messages from it are in flight. */
static void deregistering(struct net *net)
{
    enum { BYTES = 64 << 20 };
    static unsigned char source[BYTES], target[BYTES];
    void *handles[3], *sends[2], *recv = NULL, *data = target;
    size_t size = BYTES;
    int tag = 0, result;
    net_load(net, path);
    struct pair pair = pair_here(net);
    CHECK(net_reg_mr(net, pair.send, source, BYTES, HOST, &handles[0]) == SUCCESS && handles[0]);
    CHECK(net_reg_mr(net, pair.send, source, BYTES, HOST, &handles[1]) == SUCCESS && handles[1] != handles[0]);
    CHECK(net_reg_mr(net, pair.recv, target, BYTES, HOST, &handles[2]) == SUCCESS && handles[2]);
    memset(source, 0x11, BYTES);
    /* One message is done before; the other is more than the sockets take, and its receive is posted later. */
    CHECK(net_isend_of(net, pair.send, source, 100, handles[0], &sends[0]) == SUCCESS && sends[0]);
    CHECK(net_isend_of(net, pair.send, source, BYTES, handles[1], &sends[1]) == SUCCESS && sends[1]);
    CHECK(finish(net, sends[0], &result) >= 0);
    CHECK(net_dereg_mr(net, pair.send, handles[0]) == SUCCESS);
    int done = 77;
    CHECK(net_test(net, sends[1], &done, NULL) == SUCCESS && done == 0);
    CHECK(net_dereg_mr(net, pair.send, handles[1]) == SUCCESS);
    memset(source, 0xEE, BYTES);
    CHECK(finish(net, sends[1], &result) == -1 && result != SUCCESS);
    net_close_send(net, pair.send);
    /* Bytes that were reported as sent have arrived, the message in flight is cut, and no other data were sent. */
    CHECK(net_irecv(net, pair.recv, target, 200, 0, &recv) == SUCCESS && recv);
    CHECK(finish(net, recv, &result) == 100 && target[99] == 0x11);
    CHECK(((int (*)(void *, int, void **, size_t *, int *, void **, void **, void **))net->table[11])(
              pair.recv, 1, &data, &size, &tag, &handles[2], NULL, &recv) == SUCCESS && recv);
    CHECK(finish(net, recv, &result) == -1 && result == REMOTE_ERROR);
    CHECK(net_dereg_mr(net, pair.recv, handles[2]) == SUCCESS);
    for (size_t at = 0; at < BYTES; at++)
        CHECK(target[at] == 0 || target[at] == 0x11);
    net_close_recv(net, pair.recv);
    CHECK(warnings == 2);
}

static void testing(struct net *net)
{
    unsigned char source[100] = { 1 }, target[100];
    void *send = NULL, *recv = NULL;
    int done = 77;
    net_load(net, path);
    struct pair pair = pair_here(net);
    CHECK(net_irecv(net, pair.recv, target, sizeof target, 0, &recv) == SUCCESS);
    CHECK(net_test(net, recv, &done, NULL) == SUCCESS && done == 0);
    CHECK(net_isend(net, pair.send, source, sizeof source, 0, &send) == SUCCESS);
    double since = now();
    for (done = 77; done != 1; again(since, "a receive"))
        CHECK(net_test(net, recv, &done, NULL) == SUCCESS && (done == 0 || done == 1));
    for (done = 77; done != 1; again(since, "a send"))
        CHECK(net_test(net, send, &done, NULL) == SUCCESS && (done == 0 || done == 1));
    /* No flush is needed, so iflush returns no request. */
    void *data = target, *handle = NULL, *request = (void *)77;
    int size = 100;
    CHECK(((int (*)(void *, int, void **, int *, void **, void **))net->table[12])(pair.recv, 1, &data, &size, &handle,
                                                                                   &request) == SUCCESS);
    CHECK(request == NULL);
    /* Written also when the call fails. */
    done = 77;
    CHECK(net_test(net, NULL, &done, NULL) != SUCCESS && done == 0);
    pair_close(net, pair);
}

static void receives(struct net *net)
{
    net_load(net, path);
    struct pair pair = pair_here(net);
    message(net, pair, 0, 0, 1);
    message(net, pair, 0, 1 << 20, 2);
    message(net, pair, 1, 32 << 20, 3);
    message(net, pair, 100000, 32 << 20, 4);
    /* More buffers than maxRecvs, or none, are refused and nothing is posted. */
    unsigned char one[8], other[8];
    void *data[2] = { one, other }, *request = NULL;
    size_t sizes[2] = { 8, 8 };
    int tags[2] = { 1, 2 };
    CHECK(net_irecv_n(net, pair.recv, 2, data, sizes, tags, &request) != SUCCESS);
    CHECK(net_irecv_n(net, pair.recv, 0, data, sizes, tags, &request) != SUCCESS);
    /* n = maxRecvs; and a send that is larger than its receive is an error at the receiver. */
    CHECK(net_irecv_n(net, pair.recv, 1, data, sizes, tags, &request) == SUCCESS && request);
    unsigned char source[9] = { 0 };
    void *send = NULL;
    int result;
    CHECK(net_isend(net, pair.send, source, 9, 0, &send) == SUCCESS);
    CHECK(finish(net, request, &result) == -1 && result != SUCCESS && warnings > 0);
    pair_close(net, pair);
}

static void outstanding(struct net *net)
{
    static unsigned char sources[REQUESTS][70000], targets[REQUESTS][70000];
    void *sends[REQUESTS], *recvs[REQUESTS];
    int result;
    net_load(net, path);
    struct pair pair = pair_here(net);
    /* As many messages as NCCL may post, all sent before a receive is posted; large and small messages alternate. */
    for (unsigned n = 0; n < REQUESTS; n++) {
        fill(sources[n], 70000, n);
        CHECK(net_isend(net, pair.send, sources[n], n % 2 ? 70000 : 100 + n, 0, &sends[n]) == SUCCESS && sends[n]);
    }
    for (unsigned n = 0; n < REQUESTS; n++)
        CHECK(net_irecv(net, pair.recv, targets[n], 70000, 0, &recvs[n]) == SUCCESS && recvs[n]);
    /* All are done, in whichever order they are tested. */
    for (unsigned n = REQUESTS; n-- > 0;) {
        int size = n % 2 ? 70000 : 100 + (int)n;
        double since = now();
        int sent = 0, received = 0, length = -1;
        while (!sent || !received) {
            if (!sent)
                CHECK(net_test(net, sends[n], &sent, NULL) == SUCCESS);
            if (!received)
                CHECK(net_test(net, recvs[n], &received, &length) == SUCCESS);
            again(since, "one of many");
        }
        CHECK(length == size && is_filled(targets[n], (size_t)size, n));
    }
    /* The comm returns "not now" without limit. */
    void *request = (void *)1;
    for (int posted = 0; request; posted++) {
        CHECK(posted < 100000);
        request = NULL;
        CHECK(net_irecv(net, pair.recv, targets[0], 1, 0, &request) == SUCCESS);
    }
    (void)result;
    pair_close(net, pair);
}

/* Sends, sees all messages reported as sent, closes and exits immediately. */
static void sends_and_goes(struct net *net, int socket)
{
    static unsigned char data[3 << 20];
    void *requests[3];
    int result;
    net_load(net, path);
    struct pair pair = pair_there(net, socket);
    fill(data, sizeof data, 5);
    CHECK(net_isend(net, pair.send, data, sizeof data, 0, &requests[0]) == SUCCESS);
    CHECK(net_isend(net, pair.send, data, 100, 0, &requests[1]) == SUCCESS);
    CHECK(net_isend(net, pair.send, data, 60000, 0, &requests[2]) == SUCCESS);
    for (int n = 0; n < 3; n++)
        CHECK(finish(net, requests[n], &result) >= 0);
    net_close_send(net, pair.send);
    _exit(0);
}

static void receives_late(struct net *net, int socket)
{
    static unsigned char data[3][3 << 20];
    const size_t sizes[3] = { 3 << 20, 100, 60000 };
    void *requests[3], *last = NULL;
    int result;
    net_load(net, path);
    struct pair pair = pair_there(net, socket);
    for (int n = 0; n < 3; n++)
        CHECK(net_irecv(net, pair.recv, data[n], 3 << 20, 0, &requests[n]) == SUCCESS);
    /* Nothing is tested until the sender is gone. */
    siginfo_t ended = { 0 };
    CHECK(waitid(P_PID, (id_t)peer, &ended, WEXITED | WNOWAIT) == 0 && ended.si_pid == peer);
    for (int n = 0; n < 3; n++) {
        CHECK(finish(net, requests[n], &result) == (int)sizes[n]);
        CHECK(is_filled(data[n], sizes[n], 5));
    }
    /* A message that never comes is an error, not an endless wait. */
    CHECK(net_irecv(net, pair.recv, data[0], 100, 0, &last) == SUCCESS && last);
    CHECK(finish(net, last, &result) == -1 && result == REMOTE_ERROR && warnings == 1);
    pair_close(net, pair);
}

static void nothing_is_cut(struct net *net)
{
    two(net, sends_and_goes, receives_late, 0);
}

/* Closes with requests in flight, the peer alive. */
static void closing(struct net *net)
{
    static unsigned char data[8 << 20];
    void *request = NULL;
    int result;
    net_load(net, path);
    for (int round = 0; round < 10; round++) {
        struct pair pair = pair_here(net);
        /* More than any socket takes, without a receive. */
        for (int n = 0; n < 8; n++)
            CHECK(net_isend(net, pair.send, data, sizeof data, 0, &request) == SUCCESS && request);
        CHECK(net_isend(net, pair.send, data, 100, 0, &request) == SUCCESS && request);
        net_close_send(net, pair.send);
        net_close_recv(net, pair.recv);
        /* Receives without messages; then the other end sees the close. */
        pair = pair_here(net);
        for (int n = 0; n < 8; n++)
            CHECK(net_irecv(net, pair.recv, data, sizeof data, 0, &request) == SUCCESS && request);
        if (round % 2) {
            net_close_recv(net, pair.recv);
            double since = now();
            /* Some bytes were in the kernel before the end was seen. */
            do {
                again(since, "the end of the receiver");
                result = net_isend(net, pair.send, data, sizeof data, 0, &request);
                if (result == SUCCESS && request)
                    finish(net, request, &result);
            } while (result == SUCCESS);
            CHECK(result == REMOTE_ERROR);
            net_close_send(net, pair.send);
        } else {
            net_close_send(net, pair.send);
            CHECK(finish(net, request, &result) == -1 && result == REMOTE_ERROR);
            net_close_recv(net, pair.recv);
        }
    }
    /* One log line for each broken peer, not one for each call. */
    CHECK(warnings == 10);
}

static void is_killed(struct net *net, int socket)
{
    net_load(net, path);
    struct pair pairs[2] = { pair_there(net, socket), pair_there(net, socket) };
    (void)pairs;
    CHECK(write(socket, "x", 1) == 1);
    for (;;)
        pause();
}

static void survives(struct net *net, int socket)
{
    /* Much more than the sockets of a comm take. */
    static unsigned char data[64 << 20];
    void *request = NULL, *sends[4], *recvs[2];
    char byte;
    int result;
    net_load(net, path);
    struct pair pairs[2] = { pair_there(net, socket), pair_there(net, socket) };
    CHECK(read(socket, &byte, 1) == 1);
    /* Bulk in flight and a waiting receive, on two comms; neither can end while the peer lives. */
    for (int n = 0; n < 4; n++)
        CHECK(net_isend(net, pairs[n % 2].send, data, sizeof data, 0, &sends[n]) == SUCCESS && sends[n]);
    for (int n = 0; n < 2; n++)
        CHECK(net_irecv(net, pairs[n].recv, data, sizeof data, 0, &recvs[n]) == SUCCESS && recvs[n]);
    for (int n = 0; n < 1000; n++) {
        int done = 77;
        CHECK(net_test(net, recvs[n % 2], &done, NULL) == SUCCESS && done == 0);
        CHECK(net_test(net, sends[2 + n % 2], &done, NULL) == SUCCESS && done == 0);
    }
    CHECK(kill(peer, SIGKILL) == 0);
    for (int n = 0; n < 2; n++) {
        CHECK(finish(net, recvs[n], &result) == -1 && result == REMOTE_ERROR);
        CHECK(finish(net, sends[2 + n], &result) == -1 && result == REMOTE_ERROR);
    }
    /* A write to a dead peer raises no signal, and later calls fail alike without a log line. */
    CHECK(net_isend(net, pairs[0].send, data, 100, 0, &request) != SUCCESS);
    CHECK(warnings == 4);
    struct sigaction action;
    CHECK(sigaction(SIGPIPE, NULL, &action) == 0 && action.sa_handler == SIG_DFL);
    pair_close(net, pairs[0]);
    pair_close(net, pairs[1]);
}

static void killed_peer(struct net *net)
{
    two(net, is_killed, survives, SIGKILL);
}

/* Bulk from a sender that is ahead, into receives that are posted late and one by one: sockets wait for receives, which
 * are posted at that very moment. */
static void late_receives(struct net *net)
{
    enum { AHEAD = 24, MESSAGES = 200, BYTES = 131072 };
    static unsigned char source[AHEAD][BYTES], target[BYTES];
    void *sends[AHEAD];
    unsigned chance = 1;
    CHECK(setenv("FERRYWIRE_NCCL_THREADS", "6", 1) == 0 && setenv("FERRYWIRE_NCCL_SOCKETS", "4", 1) == 0);
    net_load(net, path);
    struct pair pair = pair_here(net);
    for (unsigned sent = 0, received = 0, done = 0; received < MESSAGES;) {
        for (; sent < MESSAGES && sent < received + AHEAD && sent < done + AHEAD; sent++) {
            fill(source[sent % AHEAD], 1000, sent);
            source[sent % AHEAD][BYTES - 1] = (unsigned char)sent;
            CHECK(net_isend(net, pair.send, source[sent % AHEAD], BYTES, 0, &sends[sent % AHEAD]) == SUCCESS);
        }
        chance = chance * 1103515245u + 12345u;
        for (unsigned wait = 0; wait < (chance >> 16) % 64; wait++)
            sched_yield();
        void *receive = NULL;
        int result, gone = 0;
        CHECK(net_irecv(net, pair.recv, target, BYTES, 0, &receive) == SUCCESS && receive);
        CHECK(finish(net, receive, &result) == BYTES);
        CHECK(is_filled(target, 1000, received) && target[BYTES - 1] == (unsigned char)received);
        received++;
        while (done < sent && net_test(net, sends[done % AHEAD], &gone, NULL) == SUCCESS && gone)
            done++;
    }
    pair_close(net, pair);
}

enum { QUIET, SMALL, BULK, PATHS };

/* Three pairs between two hosts, whose connection is then cut. */
static void goes_silent(struct net *net, int socket, const char *nic, int here, int there)
{
    static unsigned char data[64 << 20];
    struct pair pairs[PATHS];
    void *requests[4];
    size_t count = 0;
    char name[8];
    int done;
    shell("ip addr add 10.78.0.%d/24 dev %s && ip link set %s up", here, nic, nic);
    snprintf(name, sizeof name, "=%s", nic);
    CHECK(setenv("NCCL_SOCKET_IFNAME", name, 1) == 0);
    for (double begin = now(); !is_up(nic, AF_INET);)
        again(begin, "a link");
    net_load(net, path);
    both(socket);
    for (int n = 0; n < PATHS; n++)
        pairs[n] = pair_there(net, socket);
    /* A receive without a message; more bytes than the sockets take, in one message and in many inline messages. */
    CHECK(net_irecv(net, pairs[QUIET].recv, data, 100, 0, &requests[count++]) == SUCCESS);
    CHECK(net_isend(net, pairs[BULK].send, data, sizeof data, 0, &requests[count++]) == SUCCESS);
    for (double since = 0; since == 0 || now() - since < 1;) {
        if (since == 0) {
            CHECK(net_isend(net, pairs[SMALL].send, data, 60000, 0, &requests[count]) == SUCCESS && requests[count]);
            since = now();
        }
        CHECK(net_test(net, requests[count], &done, NULL) == SUCCESS);
        if (done)
            since = 0;
        sched_yield();
    }
    count++;
    both(socket);
    /* To a link-layer address without a host. */
    shell("ip neigh replace 10.78.0.%d lladdr 02:00:00:00:00:77 dev %s nud permanent", there, nic);
    double since = now();
    for (size_t left = count; left; again(since, "the end of a silent path")) {
        for (size_t n = 0; n < count; n++) {
            int result = requests[n] ? net_test(net, requests[n], &done, NULL) : SUCCESS;
            if (result != SUCCESS) {
                printf("request %zu ended after %.0f s\n", n, now() - since);
                CHECK(result == REMOTE_ERROR && now() - since > 30);
                requests[n] = NULL;
                left--;
            }
        }
    }
    CHECK(warnings == PATHS);
    for (int n = 0; n < PATHS; n++)
        pair_close(net, pairs[n]);
    both(socket);
}

static void silent_there(struct net *net, int socket)
{
    CHECK(unshare(CLONE_NEWNET) == 0);
    both(socket);
    both(socket);
    goes_silent(net, socket, "vb", 2, 1);
}

static void silent_here(struct net *net, int socket)
{
    CHECK(unshare(CLONE_NEWNET) == 0);
    both(socket);
    shell("ip link add va type veth peer name vb netns %d", (int)peer);
    both(socket);
    goes_silent(net, socket, "va", 1, 2);
}

/* Both ends give up a path on which nothing arrives any more, but not too soon. */
static void silent_path(struct net *net)
{
    two(net, silent_there, silent_here, 0);
}

static int entries(const char *directory)
{
    int count = 0;
    DIR *open = opendir(directory);
    CHECK(open);
    while (readdir(open))
        count++;
    closedir(open);
    return count;
}

/* Communicators are made and destroyed: descriptors and threads do not accumulate. */
static void nothing_left(struct net *net)
{
    int descriptors = 0, threads = 0;
    net_load(net, path);
    for (int round = 0; round < 25; round++) {
        struct pair pairs[3];
        for (int n = 0; n < 3; n++) {
            pairs[n] = pair_here(net);
            message(net, pairs[n], 200000, 200000, (unsigned)n);
        }
        for (int n = 0; n < 3; n++)
            pair_close(net, pairs[n]);
        if (round == 2)
            descriptors = entries("/proc/self/fd"), threads = entries("/proc/self/task");
    }
    /* Another process may ask for this one's counts at any time, also when these were taken, over a descriptor. */
    double since = now();
    while (entries("/proc/self/fd") > descriptors) {
        usleep(10000);
        again(since, "closing the descriptors of closed comms");
    }
    CHECK(entries("/proc/self/task") == threads);
}

/* The cores of this host that the plugin sees, if a case sets their number. */
static int cores;

long sysconf(int name)
{
    if (cores && name == _SC_NPROCESSORS_ONLN)
        return cores;
    return ((long (*)(int))dlsym(RTLD_NEXT, "sysconf"))(name);
}

int sched_getaffinity(pid_t thread, size_t size, cpu_set_t *set)
{
    if (!cores)
        return ((int (*)(pid_t, size_t, cpu_set_t *))dlsym(RTLD_NEXT, "sched_getaffinity"))(thread, size, set);
    CPU_ZERO_S(size, set);
    for (int core = 0; core < cores; core++)
        CPU_SET_S(core, size, set);
    return 0;
}

/* Threads of the plugin; all others but this one are counted in `unnamed`. */
static int movers(int *unnamed)
{
    int count = 0;
    *unnamed = -1;
    DIR *tasks = opendir("/proc/self/task");
    CHECK(tasks);
    for (struct dirent *task; (task = readdir(tasks));) {
        char name[300], text[32] = "";
        snprintf(name, sizeof name, "/proc/self/task/%s/comm", task->d_name);
        FILE *file = task->d_name[0] == '.' ? NULL : fopen(name, "r");
        if (!file)
            continue;
        if (fgets(text, sizeof text, file))
            *(strncmp(text, "ferrywire-", 10) ? unnamed : &count) += 1;
        fclose(file);
    }
    closedir(tasks);
    return count;
}

static int movers_for_one_more(struct net *net)
{
    struct pair pair = pair_here(net);
    message(net, pair, 1000000, 1000000, 1);
    pair_close(net, pair);
    /* A new thread has its starter's name until it first runs. Counted too early, a thread was missed on a busy host. */
    int unnamed, count = movers(&unnamed);
    for (time_t start = time(NULL); unnamed > 0; count = movers(&unnamed)) {
        CHECK(time(NULL) - start < 60);
        usleep(1000);
    }
    return count;
}

/* One process with several ranks of a communicator, each with a GPU, starts threads for each rank. */
static void several_gpus(struct net *net)
{
    cores = 64;
    CHECK(setenv("NCCL_SOCKET_IFNAME", "lo", 1) == 0 && unsetenv("FERRYWIRE_NCCL_THREADS") == 0);
    net->communicator = 1;
    net_load(net, path);
    int one = movers_for_one_more(net);
    CHECK(one > 1);
    /* Communicators of one rank each, or one that has ended, do not start more threads. */
    for (net->communicator = 2; net->communicator < 10; net->communicator++)
        CHECK(net_init(net, logger) == SUCCESS);
    net->communicator = 10;
    for (int n = 0; n < 8; n++) {
        CHECK(net_init(net, logger) == SUCCESS);
        net_finalize(net);
    }
    CHECK(movers_for_one_more(net) == one);
    for (int n = 0; n < 4; n++)
        CHECK(net_init(net, logger) == SUCCESS);
    int four = movers_for_one_more(net);
    CHECK(net->version < 11 ? four == one : four > one);
    for (int n = 0; n < 4; n++)
        net_finalize(net);
    CHECK(movers_for_one_more(net) == four);
}

/* TCP sockets of this process. A process that starts connects to the socket of each other one for a moment, which is
 * a descriptor here. */
static int tcp_sockets(void)
{
    int count = 0;
    for (int fd = 0; fd < 1024; fd++) {
        int protocol = 0;
        socklen_t size = sizeof protocol;
        count += getsockopt(fd, SOL_SOCKET, SO_PROTOCOL, &protocol, &size) == 0 && protocol == IPPROTO_TCP;
    }
    return count;
}

/* An abort while a comm is being set up: NCCL polls neither end again, and closes only the listener. */
static void abandoned(struct net *net)
{
    char handle[128];
    void *listener = NULL, *send = NULL, *recv = NULL, *none = NULL;
    /* From 11 on the plugin learns that the communicator has ended. */
    int learns = net->version >= 11;
    net_load(net, path);
    pair_close(net, pair_here(net));
    int before = tcp_sockets(), descriptors = entries("/proc/self/fd");
    CHECK(net_listen(net, handle, &listener) == SUCCESS);
    int listening = tcp_sockets() - before;
    for (int n = 0; n < 3; n++)
        CHECK(net_connect(net, handle, &send, &none) == SUCCESS && !send);
    int dialled = tcp_sockets() - before - listening;
    CHECK(listening > 0 && dialled > 0);
    CHECK(net_accept(net, listener, &recv, &none) == SUCCESS && !recv);
    CHECK(tcp_sockets() == before + listening + 2 * dialled);
    /* NCCL itself closes no listener of a set-up that it aborts. */
    if (!learns)
        net_close_listen(net, listener);
    CHECK(learns || tcp_sockets() == before + dialled);
    net_finalize(net);
    double since = now();
    while (tcp_sockets() > before || entries("/proc/self/fd") > descriptors) {
        usleep(10000);
        again(since, "closing what was abandoned");
    }
    if (learns) {
        CHECK(net_accept(net, listener, &recv, &none) != SUCCESS && !recv);
        net_close_listen(net, listener);
    }
    CHECK(net_init(net, logger) == SUCCESS);
    struct pair pair = pair_here(net);
    message(net, pair, 1000, 1000, 1);
    pair_close(net, pair);
}

/* A context of another plugin: if this plugin fails to start a rank, NCCL ends the rank with the previous plugin's
 * context. */
static void somebody_elses_context(struct net *net)
{
    net_load(net, path);
    if (net->version >= 11) {
        int (*finalize)(void *) = (int (*)(void *))net->table[20];
        CHECK(finalize(NULL) == SUCCESS && finalize(&cores) == SUCCESS && finalize((void *)8) == SUCCESS);
    }
    struct pair pair = pair_here(net);
    message(net, pair, 1000, 1000, 1);
    pair_close(net, pair);
    net_finalize(net);
    net_finalize(net);
}

static void no_logger(struct net *net)
{
    cpu_set_t before, after;
    CHECK(sched_getaffinity(0, sizeof before, &before) == 0);
    net_open(net, path);
    CHECK(net_init(net, NULL) == SUCCESS);
    struct pair pair = pair_here(net);
    message(net, pair, 200000, 200000, 1);
    unsigned char room[256];
    CHECK(net_properties(net, 9, room) != SUCCESS);
    pair_close(net, pair);
    CHECK(sched_getaffinity(0, sizeof after, &after) == 0 && CPU_EQUAL(&before, &after));
}

/* Does what the letters on its standard input say, for a test that looks at its metrics meanwhile. */
static void told(struct net *net)
{
    unsigned char source[9] = { 0 }, target[8];
    void *send = NULL, *recv = NULL;
    struct pollfd input = { .fd = 0, .events = POLLIN };
    char letter;
    int result;
    net_load(net, path);
    struct pair pair = pair_here(net), before;
    printf("metrics %s\n", metrics);
    fflush(stdout);
    while (read(0, &letter, 1) == 1) {
        switch (letter) {
        case 'm': /* Messages of two sizes. */
            for (unsigned n = 0; n < 10; n++) {
                message(net, pair, 1 << 20, 1 << 20, n);
                message(net, pair, 1000, 1000, n);
            }
            break;
        case 's': /* A stream, until the next letter. */
            while (poll(&input, 1, 0) == 0)
                message(net, pair, 1 << 20, 1 << 20, 1);
            break;
        case 'f': /* A send that is larger than its receive, and is looked at twice. */
            CHECK(net_irecv(net, pair.recv, target, sizeof target, 0, &recv) == SUCCESS && recv);
            CHECK(net_isend(net, pair.send, source, sizeof source, 0, &send) == SUCCESS && send);
            CHECK(finish(net, send, &result) == 9);
            CHECK(finish(net, recv, &result) == -1 && finish(net, recv, &result) == -1);
            break;
        case 'r': /* A receive without a message. */
            CHECK(net_irecv(net, pair.recv, target, sizeof target, 0, &recv) == SUCCESS && recv);
            break;
        case 'n': /* A new pair, and then the one before it is closed. */
            before = pair;
            pair = pair_here(net);
            pair_close(net, before);
            break;
        case 'c': /* No pair any more. */
            pair_close(net, pair);
            break;
        default: CHECK(letter == 0);
        }
        printf("done\n");
        fflush(stdout);
    }
}

int main(int count, char **arguments)
{
    static const struct {
        const char *name;
        void (*run)(struct net *);
    } cases[] = {
        { "as_nccl", as_nccl },
        { "init_again", init_again },
        { "unload_without_a_call", unload_without_a_call },
        { "properties", properties },
        { "tables", tables },
        { "setting_up", setting_up },
        { "connects_first", connects_first },
        { "handles", handles },
        { "registration", registration },
        { "tuning", tuning },
        { "tuned_by_the_user", tuned_by_the_user },
        { "tuned_for_another_network", tuned_for_another_network },
        { "different_secrets", different_secrets },
        { "deregistering", deregistering },
        { "testing", testing },
        { "receives", receives },
        { "outstanding", outstanding },
        { "nothing_is_cut", nothing_is_cut },
        { "closing", closing },
        { "killed_peer", killed_peer },
        { "late_receives", late_receives },
        { "silent_path", silent_path },
        { "nothing_left", nothing_left },
        { "abandoned", abandoned },
        { "several_gpus", several_gpus },
        { "somebody_elses_context", somebody_elses_context },
        { "no_logger", no_logger },
        { "told", told },
    };
    CHECK(count == 4);
    struct net net = { .version = atoi(arguments[2]), .communicator = 42 };
    path = arguments[1];
    for (size_t n = 0; n < sizeof cases / sizeof *cases; n++) {
        if (!strcmp(cases[n].name, arguments[3])) {
            cases[n].run(&net);
            puts("passed");
            return 0;
        }
    }
    fprintf(stderr, "no case %s\n", arguments[3]);
    return 1;
}
