/* A net plugin of version 7 that moves nothing and remembers how it was used: what it saw of the environment
 * when it was opened, how often and on which device it was asked to listen, how many accepts ran at once, and how many of
 * those that were not a listener's first. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifndef NAME
#define NAME "Attentive"
#endif
#ifndef PTR_SUPPORT
#define PTR_SUPPORT 1
#endif

typedef void (*slot)(void);
#define F(function) ((slot)(function))

/* NCCL_DYNAMIC_CHUNK_SIZE as a constructor sees it. */
char chunk_at_open[32];
int listens, listened_on = -1, accepts_most, later_accepts, later_accepts_most;
/* Number of accepts in progress before one returns. */
volatile int accepts_wanted;
/* An accept that is not its listener's first takes so long. */
volatile int later_accept_us;
static int accepts, later_accepts_now;

struct listener {
    int accepts;
};

static void most_of(int *most_ever, int now) {
    int most = __atomic_load_n(most_ever, __ATOMIC_SEQ_CST);
    while (now > most && !__atomic_compare_exchange_n(most_ever, &most, now, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
    }
}

__attribute__((constructor)) static void opened(void) {
    const char *chunk = getenv("NCCL_DYNAMIC_CHUNK_SIZE");
    if (chunk) strncpy(chunk_at_open, chunk, sizeof chunk_at_open - 1);
}

static int p_init(void *log) {
    (void)log;
    return 0;
}

static int p_devices(int *count) {
    *count = 3;
    return 0;
}

struct properties {
    const char *name;
    const char *pci_path;
    uint64_t guid;
    int ptr_support, speed, port;
    float latency;
    int max_comms, max_recvs, device_type, device_version;
};

/* Not sorted: the device of a NIC is found by its name alone. */
static int p_properties(int device, struct properties *p) {
    static const char *names[] = {"ferrywire-none0", "ferrywire-none1", "lo"};
    memset(p, 0, sizeof *p);
    p->name = names[device];
    p->guid = device;
    p->ptr_support = PTR_SUPPORT;
    p->port = p->max_recvs = 1;
    p->speed = 10000;
    p->max_comms = 65536;
    return 0;
}

static int p_listen(int device, void *handle, void **comm) {
    (void)handle;
    __atomic_add_fetch(&listens, 1, __ATOMIC_SEQ_CST);
    listened_on = device;
    *comm = calloc(1, sizeof(struct listener));
    return *comm ? 0 : 2;
}

static int p_connect(int device, void *handle, void **comm, void **device_handle) {
    (void)device;
    (void)handle;
    (void)comm;
    (void)device_handle;
    return 0;
}

static int p_accept(struct listener *listener, void **comm, void **device_handle) {
    (void)comm;
    (void)device_handle;
    if (listener->accepts++) {
        __atomic_add_fetch(&later_accepts, 1, __ATOMIC_SEQ_CST);
        most_of(&later_accepts_most, __atomic_add_fetch(&later_accepts_now, 1, __ATOMIC_SEQ_CST));
        usleep(later_accept_us);
        __atomic_sub_fetch(&later_accepts_now, 1, __ATOMIC_SEQ_CST);
    }
    most_of(&accepts_most, __atomic_add_fetch(&accepts, 1, __ATOMIC_SEQ_CST));
    while (__atomic_load_n(&accepts_most, __ATOMIC_SEQ_CST) < accepts_wanted) usleep(1000);
    __atomic_sub_fetch(&accepts, 1, __ATOMIC_SEQ_CST);
    return 0;
}

static int p_other(void) { return 0; }

struct {
    const char *name;
    slot slots[18];
} ncclNetPlugin_v7 = {NAME,
                      {F(p_init), F(p_devices), F(p_properties), F(p_listen), F(p_connect), F(p_accept), F(p_other),
                       F(p_other), F(p_other), F(p_other), F(p_other), F(p_other), F(p_other), F(p_other), F(p_other),
                       F(p_other), NULL, NULL}};
