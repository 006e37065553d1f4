/* The interface of net plugins v10, v11 and v12, written down here once more, by slots: a mistake in the Rust
 * declarations is not made again. And what every case needs: pairs of comms, messages with a pattern. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CHECK(condition)                                                                     \
    do {                                                                                     \
        if (!(condition)) {                                                                  \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                  \
            exit(1);                                                                         \
        }                                                                                    \
    } while (0)

enum { SUCCESS = 0, REMOTE_ERROR = 6, HOST = 1, CUDA = 2, STEPS = 8, REQUESTS = 32, DEADLINE_S = 170 };

typedef void (*logger_t)(int level, unsigned long flags, const char *file, int line, const char *format, ...);

struct net {
    void *library;
    void **table;
    int version;
    void *context;
    /* NCCL's identifier of the communicator. */
    uint64_t communicator;
    int config;
    /* Where it listens, and from where it connects. */
    int device;
};

/* Lines at level WARN so far, and the last of them; where the log says that metrics are served. */
static _Atomic int warnings;
static char last_warning[1024], metrics[64];

static void logger(int level, unsigned long flags, const char *file, int line, const char *format, ...)
{
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    (void)flags, (void)file, (void)line;
    sscanf(text, "NET/ferrywire : metrics are served at http://%63[^/]", metrics);
    if (level == 2) {
        warnings++;
        memcpy(last_warning, text, sizeof text);
        printf("WARN %s\n", text);
    }
}

static double now(void)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + (double)at.tv_nsec * 1e-9;
}

/* One more time round a loop that must end. */
static void again(double since, const char *what)
{
    if (now() - since > DEADLINE_S) {
        fprintf(stderr, "%s takes too long\n", what);
        exit(2);
    }
    sched_yield();
}

/* Between polls that have seen nothing for 10 ms: what takes so long waits for a time-out of the plugin, for a slow NIC, or for
 * the other process, which has the cores meanwhile. */
static void rest(double quiet_since)
{
    if (now() - quiet_since > 0.01)
        usleep(1000);
}

static int net_init(struct net *net, logger_t log)
{
    net->config = -1;
    if (net->version <= 10)
        return ((int (*)(logger_t, void *))net->table[1])(log, NULL);
    return ((int (*)(void **, uint64_t, int *, logger_t, void *))net->table[1])(&net->context, net->communicator,
                                                                                 &net->config, log, NULL);
}

static void net_finalize(struct net *net)
{
    if (net->version >= 11)
        CHECK(((int (*)(void *))net->table[20])(net->context) == SUCCESS);
}

static int net_devices(struct net *net)
{
    int count = -1;
    CHECK(((int (*)(int *))net->table[2])(&count) == SUCCESS);
    return count;
}

static int net_properties(struct net *net, int device, void *into)
{
    return ((int (*)(int, void *))net->table[3])(device, into);
}

static int net_listen(struct net *net, void *handle, void **comm)
{
    if (net->version <= 10)
        return ((int (*)(int, void *, void **))net->table[4])(net->device, handle, comm);
    return ((int (*)(void *, int, void *, void **))net->table[4])(net->context, net->device, handle, comm);
}

static int net_connect(struct net *net, void *handle, void **comm, void **device_handle)
{
    if (net->version == 6)
        return ((int (*)(int, void *, void **))net->table[5])(net->device, handle, comm);
    if (net->version == 10)
        return ((int (*)(int, int *, void *, void **, void **))net->table[5])(net->device, &net->config, handle,
                                                                               comm,
                                                                               device_handle);
    return ((int (*)(void *, int, void *, void **, void **))net->table[5])(net->context, net->device, handle, comm,
                                                                            device_handle);
}

static int net_accept(struct net *net, void *listener, void **comm, void **device_handle)
{
    return ((int (*)(void *, void **, void **))net->table[6])(listener, comm, device_handle);
}

static int net_reg_mr(struct net *net, void *comm, void *data, size_t size, int kind, void **handle)
{
    return ((int (*)(void *, void *, size_t, int, void **))net->table[7])(comm, data, size, kind, handle);
}

static int net_dereg_mr(struct net *net, void *comm, void *handle)
{
    return ((int (*)(void *, void *))net->table[9])(comm, handle);
}

static int net_isend_of(struct net *net, void *comm, void *data, size_t size, void *handle, void **request)
{
    return ((int (*)(void *, void *, size_t, int, void *, void *, void **))net->table[10])(comm, data, size, 3, handle,
                                                                                            NULL, request);
}

static int net_isend(struct net *net, void *comm, void *data, size_t size, int tag, void **request)
{
    if (net->version == 6)
        return ((int (*)(void *, void *, int, int, void *, void **))net->table[10])(comm, data, (int)size, tag, NULL,
                                                                                     request);
    return ((int (*)(void *, void *, size_t, int, void *, void *, void **))net->table[10])(comm, data, size, tag, NULL,
                                                                                            NULL, request);
}

static int net_irecv_n(struct net *net, void *comm, int n, void **data, size_t *sizes, int *tags, void **request)
{
    void *handles[8] = { NULL };
    return ((int (*)(void *, int, void **, size_t *, int *, void **, void **, void **))net->table[11])(
        comm, n, data, sizes, tags, handles, NULL, request);
}

static int net_irecv(struct net *net, void *comm, void *data, size_t size, int tag, void **request)
{
    if (net->version == 6) {
        void *handles[1] = { NULL };
        int bytes = (int)size;
        return ((int (*)(void *, int, void **, int *, int *, void **, void **))net->table[11])(comm, 1, &data, &bytes,
                                                                                                &tag, handles, request);
    }
    return net_irecv_n(net, comm, 1, &data, &size, &tag, request);
}

static int net_test(struct net *net, void *request, int *done, int *sizes)
{
    return ((int (*)(void *, int *, int *))net->table[13])(request, done, sizes);
}

static void net_close_send(struct net *net, void *comm)
{
    CHECK(((int (*)(void *))net->table[14])(comm) == SUCCESS);
}

static void net_close_recv(struct net *net, void *comm)
{
    CHECK(((int (*)(void *))net->table[15])(comm) == SUCCESS);
}

static void net_close_listen(struct net *net, void *comm)
{
    CHECK(((int (*)(void *))net->table[16])(comm) == SUCCESS);
}

/* As NCCL loads a plugin. */
static void net_open(struct net *net, const char *path)
{
    char symbol[32];
    net->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!net->library)
        fprintf(stderr, "%s\n", dlerror());
    CHECK(net->library);
    snprintf(symbol, sizeof symbol, "ncclNetPlugin_v%d", net->version);
    net->table = dlsym(net->library, symbol);
    CHECK(net->table && !strcmp(net->table[0], "ferrywire"));
}

static void net_load(struct net *net, const char *path)
{
    net_open(net, path);
    CHECK(net_init(net, logger) == SUCCESS);
    CHECK(net_devices(net) == 1);
}

struct pair {
    void *send, *recv;
};

/* Connects to `theirs` and accepts at `listener`, in turns, since neither may wait for the other. */
static struct pair meet(struct net *net, void *listener, char *theirs, void **device_handle)
{
    struct pair pair = { NULL, NULL };
    double since = now();
    while (!pair.send || !pair.recv) {
        if (!pair.send)
            CHECK(net_connect(net, theirs, &pair.send, device_handle) == SUCCESS);
        if (!pair.recv)
            CHECK(net_accept(net, listener, &pair.recv, device_handle) == SUCCESS);
        again(since, "connecting");
        rest(since);
    }
    net_close_listen(net, listener);
    return pair;
}

/* Two comms that are connected with each other, in this process. */
static struct pair pair_here(struct net *net)
{
    char handle[128];
    void *listener = NULL, *none = NULL;
    CHECK(net_listen(net, handle, &listener) == SUCCESS && listener);
    return meet(net, listener, handle, &none);
}

/* Two comms that are connected with those of the process at the other end of a socket. */
static struct pair pair_there(struct net *net, int socket)
{
    char ours[128], theirs[128];
    void *listener = NULL, *none = NULL;
    CHECK(net_listen(net, ours, &listener) == SUCCESS && listener);
    CHECK(write(socket, ours, 128) == 128);
    CHECK(recv(socket, theirs, 128, MSG_WAITALL) == 128);
    return meet(net, listener, theirs, &none);
}

static void pair_close(struct net *net, struct pair pair)
{
    net_close_send(net, pair.send);
    net_close_recv(net, pair.recv);
}

static void fill(unsigned char *data, size_t size, unsigned seed)
{
    for (size_t at = 0; at < size; at++)
        data[at] = (unsigned char)(((at + 1) * 2654435761u + seed * 40503u) >> 11);
}

static int is_filled(const unsigned char *data, size_t size, unsigned seed)
{
    for (size_t at = 0; at < size; at++)
        if (data[at] != (unsigned char)(((at + 1) * 2654435761u + seed * 40503u) >> 11))
            return 0;
    return 1;
}

/* Waits for a request; the size it was told, or -1 when it failed. */
static int finish(struct net *net, void *request, int *result)
{
    double since = now();
    for (;;) {
        int done = 77, size = -2;
        *result = net_test(net, request, &done, &size);
        CHECK(done == 0 || done == 1);
        if (*result != SUCCESS) {
            CHECK(done == 0);
            return -1;
        }
        if (done)
            return size;
        again(since, "a request");
    }
}

/* A message through a pair, and what arrived. */
static void message(struct net *net, struct pair pair, size_t size, size_t room, unsigned seed)
{
    unsigned char *source = malloc(size + 1), *target = malloc(room + 1);
    void *send = NULL, *recv = NULL;
    int result;
    fill(source, size, seed);
    memset(target, 0xEE, room + 1);
    CHECK(net_irecv(net, pair.recv, target, room, 0, &recv) == SUCCESS && recv);
    CHECK(net_isend(net, pair.send, source, size, 0, &send) == SUCCESS && send);
    /* Both at once: a send of much may need its receive to be looked at. */
    double since = now();
    int sent = 0, received = 0, length = -1;
    while (!sent || !received) {
        if (!sent)
            CHECK(net_test(net, send, &sent, NULL) == SUCCESS);
        if (!received)
            CHECK((result = net_test(net, recv, &received, &length)) == SUCCESS);
        again(since, "a message");
    }
    CHECK(length == (int)size && is_filled(target, size, seed) && target[size] == 0xEE);
    free(source);
    free(target);
}

/* Runs both bodies, the first in a child; the child's pid is in `peer` of the second. */
static pid_t peer;

static void two(struct net *net, void (*child)(struct net *, int), void (*parent)(struct net *, int), int signal)
{
    int sockets[2], status;
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
    peer = fork();
    CHECK(peer >= 0);
    if (peer == 0) {
        /* If the other ends early, this hears of it. */
        close(sockets[1]);
        child(net, sockets[0]);
        exit(0);
    }
    close(sockets[0]);
    parent(net, sockets[1]);
    CHECK(waitpid(peer, &status, 0) == peer);
    CHECK(signal ? WIFSIGNALED(status) && WTERMSIG(status) == signal : status == 0);
}

static void shell(const char *format, ...)
{
    char command[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(command, sizeof command, format, arguments);
    va_end(arguments);
    CHECK(system(command) == 0);
}

/* The other end of a socket has come as far. */
static void both(int socket)
{
    char byte = 1;
    CHECK(write(socket, &byte, 1) == 1 && read(socket, &byte, 1) == 1);
}

/* Whether a NIC is up, which it is some time after both ends of its link, and has an address of this family. */
static int is_up(const char *name, int family)
{
    struct ifaddrs *all;
    int up = 0;
    CHECK(getifaddrs(&all) == 0);
    for (struct ifaddrs *one = all; one; one = one->ifa_next)
        up |= !strcmp(one->ifa_name, name) && one->ifa_addr && one->ifa_addr->sa_family == family
              && (one->ifa_flags & IFF_UP) && (one->ifa_flags & IFF_RUNNING);
    freeifaddrs(all);
    return up;
}
