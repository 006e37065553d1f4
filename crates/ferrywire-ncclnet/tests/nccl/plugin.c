/* A net plugin of version VERSION (4 to 12) that moves nothing: it checks every argument it gets, and answers with
 * values that the test expects. Its declarations are written down from the interface's description, on purpose not
 * shared with the Rust side. What it finds wrong is in `failures`. */

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#if VERSION < 4 || VERSION > 12
#error "VERSION is 4 to 12"
#endif

typedef int result;
typedef void (*logger)(int level, unsigned long flags, const char *file, int line, const char *format, ...);
typedef result (*profiler)(void **e_handle, int kind, void *p_handle, int64_t plugin, void *data);

struct device_handle {
    int type;
    int version;
    void *handle;
    size_t size;
    int needs_proxy_progress;
};

struct config {
    int traffic_class;
};

struct attributes {
    int32_t send[4];
    int32_t recv[4];
    uint32_t op, algo, proto;
};

#if VERSION >= 9
struct virtual_device {
    int ndevs;
#if VERSION >= 12
    int devs[8];
#else
    int devs[4];
#endif
};
#endif

struct properties {
    char *name;
    char *pci_path;
    uint64_t guid;
    int ptr_support;
#if VERSION >= 8
    int reg_is_global;
#endif
#if VERSION >= 9
    int force_flush;
#endif
    int speed;
    int port;
#if VERSION >= 5
    float latency;
#endif
    int max_comms;
#if VERSION >= 5
    int max_recvs;
#endif
#if VERSION >= 7
    int device_type;
    int device_version;
#endif
#if VERSION >= 9
    struct virtual_device v;
    size_t max_p2p_bytes;
    size_t max_coll_bytes;
#endif
#if VERSION >= 11
    int max_multi_request_size;
#endif
#if VERSION >= 12
    int16_t rail_id;
    int16_t plane_id;
#endif
};

/* Sizes are int in older versions and size_t in newer ones. */
#if VERSION >= 8
typedef size_t region_size;
#define REGION_SIZE ((size_t)0x123456789)
#else
typedef int region_size;
#define REGION_SIZE 0x7ffff000
#endif
#if VERSION >= 9
typedef size_t message_size;
#define MESSAGE_SIZE ((size_t)0x198765432)
#else
typedef int message_size;
#define MESSAGE_SIZE 0x7ffffff0
#endif
#define FLUSH_SIZE 0x7ffffff1

#define AT(number) ((void *)(uintptr_t)(number))
#define CONTEXT AT(0xc0de0000)
#define LISTENER AT(0x11500000)
#define SENDER AT(0x5e4d0000)
#define RECEIVER AT(0x4ec50000)
#define DATA(n) AT(0x7000000000 + 0x1000 * (n))
#define MEMORY(n) AT(0x3e300000 + (n))
#define REQUEST(n) AT(0x4e900000 + (n))
#define DEVICE 3
#define TAG 0x12345670

char failures[4096];
int calls;

static void expect(int holds, const char *what, int line) {
    calls++;
    if (holds) return;
    size_t used = strlen(failures);
    snprintf(failures + used, sizeof failures - used, "line %d: %s\n", line, what);
}
#define EXPECT(condition) expect((condition), #condition, __LINE__)

static result initialise(logger log) {
    EXPECT(log != NULL);
    log(3, 0x11, "/somewhere/plugin.c", __LINE__, "%s of version %d", "test plugin", VERSION);
    return 0;
}

__attribute__((unused)) static void check_profiler(profiler prof) {
    void *event = AT(1);
    EXPECT(prof != NULL);
    EXPECT(prof(&event, 0, NULL, 7, NULL) == 0);
    EXPECT(event == NULL);
    EXPECT(prof(&event, 1, NULL, 7, NULL) == 0);
}

static char **table_name(void);

#if VERSION <= 9
static result p_init(logger log) {
#elif VERSION == 10
static result p_init(logger log, profiler prof) {
    check_profiler(prof);
#else
static result p_init(void **context, uint64_t comm_id, struct config *config, logger log, profiler prof) {
    check_profiler(prof);
    EXPECT(context != NULL && comm_id != 0 && config->traffic_class == -1);
    *context = CONTEXT;
#endif
    *table_name() = "Test plugin, started";
    return initialise(log);
}

static result p_devices(int *count) {
    *count = 5;
    return 0;
}

#ifdef BLOCKS
/* Until it is set, no call for properties returns. */
volatile int may_return;
#endif

static result p_properties(int device, struct properties *p) {
#ifdef BLOCKS
    while (!may_return) usleep(1000);
#endif
    static char names[5][16], paths[5][64];
    EXPECT(device >= 0 && device < 5);
    snprintf(names[device], sizeof names[device], "nic%d", device);
    snprintf(paths[device], sizeof paths[device], "/sys/devices/pci0000:00/0000:00:%02x.0", device);
    p->name = names[device];
    p->pci_path = device == 4 ? NULL : paths[device];
    p->guid = 0x1122334455667700 + (uint64_t)device;
    p->ptr_support = 3;
    p->speed = 200001;
    p->port = 17;
    p->max_comms = 65537;
#if VERSION >= 5
    p->latency = 2.5f;
    p->max_recvs = 8;
#endif
#if VERSION >= 7
    p->device_type = 1;
    p->device_version = 7;
#endif
#if VERSION >= 8
    p->reg_is_global = 1;
#endif
#if VERSION >= 9
    p->force_flush = 1;
    p->v.ndevs = 2;
    p->v.devs[0] = device;
    p->v.devs[1] = 1;
    p->max_p2p_bytes = (size_t)1 << 38;
    p->max_coll_bytes = (size_t)1 << 39;
#endif
#if VERSION >= 11
    p->max_multi_request_size = 21;
#endif
#if VERSION >= 12
    p->rail_id = 301;
    p->plane_id = -1;
#endif
    return 0;
}

#if VERSION >= 11
static result p_listen(void *context, int device, void *handle, void **comm) {
    EXPECT(context == CONTEXT);
#else
static result p_listen(int device, void *handle, void **comm) {
#endif
    EXPECT(device == DEVICE && *comm == NULL);
    for (int i = 0; i < 128; i++) ((unsigned char *)handle)[i] = (unsigned char)(i * 7 + 1);
    *comm = LISTENER;
    return 0;
}

static result connect_to(int device, void *handle, void **comm) {
    static void *same_handle;
    static int asked;
    unsigned char *bytes = handle;
    EXPECT(device == DEVICE && *comm == NULL);
    for (int i = 0; i < 128; i++)
        EXPECT(bytes[i] == (unsigned char)(i * 7 + 1) || (asked && i >= 80 && i < 88));
    if (!asked++) {
        same_handle = handle;
        memcpy(bytes + 80, &same_handle, 8);
        return 0;
    }
    EXPECT(handle == same_handle && memcmp(bytes + 80, &same_handle, 8) == 0);
    *comm = asked == 3 ? SENDER : NULL;
    return 0;
}

#if VERSION <= 6
static result p_connect(int device, void *handle, void **comm) {
#elif VERSION <= 9
static result p_connect(int device, void *handle, void **comm, struct device_handle **device_handle) {
#elif VERSION == 10
static result p_connect(int device, struct config *config, void *handle, void **comm,
                        struct device_handle **device_handle) {
    EXPECT(config->traffic_class == -1);
#else
static result p_connect(void *context, int device, void *handle, void **comm,
                        struct device_handle **device_handle) {
    EXPECT(context == CONTEXT);
#endif
#if VERSION >= 7
    EXPECT(device_handle != NULL && *device_handle == NULL);
#endif
    return connect_to(device, handle, comm);
}

#if VERSION <= 6
static result p_accept(void *listener, void **comm) {
#else
static result p_accept(void *listener, void **comm, struct device_handle **device_handle) {
    static struct device_handle **same, *same_pointee;
    EXPECT(device_handle != NULL && *device_handle != NULL);
    struct device_handle *d = *device_handle;
    EXPECT(!same || (same == device_handle && same_pointee == d));
    same = device_handle;
    same_pointee = d;
    EXPECT(d->type == 1 && d->version == 7);
    EXPECT(d->handle == NULL && d->size == 0 && d->needs_proxy_progress == 0);
#endif
    static int asked;
    EXPECT(listener == LISTENER && *comm == NULL);
    if (asked++ < 2) return 0;
#if VERSION >= 7
    d->handle = AT(0xdec1ce);
    d->size = 24;
    d->needs_proxy_progress = 1;
#endif
    *comm = RECEIVER;
    return 0;
}

static result p_reg_mr(void *comm, void *data, region_size size, int type, void **memory) {
    EXPECT(comm == SENDER || comm == RECEIVER);
    EXPECT(data == DATA(0) && size == REGION_SIZE && type == (comm == SENDER ? 1 : 2));
    *memory = comm == SENDER ? MEMORY(0) : NULL;
    return 0;
}

__attribute__((unused)) static result p_reg_mr_dma_buf(void *comm, void *data, size_t size, int type, uint64_t offset, int fd, void **memory) {
    EXPECT(comm == RECEIVER && data == DATA(0) && size == (size_t)0x223456789 && type == 2);
    EXPECT(offset == 0x3344556677 && fd == 77);
    *memory = MEMORY(1);
    return 0;
}

static result p_dereg_mr(void *comm, void *memory) {
    EXPECT((comm == SENDER && memory == MEMORY(0)) || (comm == RECEIVER && memory == MEMORY(1)));
    return 0;
}

/* The size says what the test wants to see: 0 is posted, 1 is "not now", 2 is refused. */
#if VERSION == 4
static result p_isend(void *comm, void *data, message_size size, void *memory, void **request) {
    EXPECT(memory == MEMORY(0));
#elif VERSION <= 9
static result p_isend(void *comm, void *data, message_size size, int tag, void *memory, void **request) {
    EXPECT(tag == TAG && memory == MEMORY(0));
#else
static result p_isend(void *comm, void *data, message_size size, int tag, void *memory, void *profile,
                      void **request) {
    EXPECT(tag == TAG && memory == MEMORY(0) && profile == NULL);
#endif
    EXPECT(comm == SENDER && data == DATA(1) && *request == NULL);
    EXPECT(size == MESSAGE_SIZE || size == 0 || size == 1 || size == 2);
    if (size == 1) return 0;
    if (size == 2) return 3;
    *request = REQUEST(0);
    return 0;
}

#if VERSION == 4
static result p_irecv(void *comm, void *data, message_size size, void *memory, void **request) {
    int n = 1;
    EXPECT(data == DATA(0) && size == MESSAGE_SIZE && memory == MEMORY(0));
#elif VERSION <= 9
static result p_irecv(void *comm, int n, void **data, message_size *sizes, int *tags, void **memory,
                      void **request) {
#else
static result p_irecv(void *comm, int n, void **data, message_size *sizes, int *tags, void **memory, void **profiles,
                      void **request) {
    EXPECT(profiles == NULL);
#endif
#if VERSION >= 5
    for (int i = 0; i < n; i++) {
        EXPECT(data[i] == DATA(i) && sizes[i] == MESSAGE_SIZE - i);
        EXPECT(tags[i] == TAG + i && memory[i] == MEMORY(i));
    }
#endif
    EXPECT(comm == RECEIVER && *request == NULL);
    EXPECT(n == 1 || n == 8);
    *request = REQUEST(n);
    return 0;
}

#if VERSION == 4
static result p_iflush(void *comm, void *data, int size, void *memory, void **request) {
    int n = 1;
    EXPECT(data == DATA(0) && size == FLUSH_SIZE && memory == MEMORY(0));
#else
static result p_iflush(void *comm, int n, void **data, int *sizes, void **memory, void **request) {
    for (int i = 0; i < n; i++) EXPECT(data[i] == DATA(i) && sizes[i] == FLUSH_SIZE + i && memory[i] == MEMORY(i));
#endif
    EXPECT(comm == RECEIVER && *request == NULL);
    *request = n == 1 ? REQUEST(100) : NULL;
    return 0;
}

static result p_test(void *request, int *done, int *sizes) {
    static int flushes;
    EXPECT(*done == 0);
    if (request == REQUEST(0)) { /* a send: done beside an error, no size */
        *done = 1;
        return 2;
    }
    if (request == REQUEST(1)) { /* an error that leaves everything unwritten */
        return 6;
    }
    if (request == REQUEST(8)) { /* a grouped receive: all sizes but one */
        for (int i = 0; i < 8; i++)
            if (i != 6) sizes[i] = i * 1000;
        *done = 1;
        return 0;
    }
    EXPECT(request == REQUEST(100) && (sizes == NULL) == (flushes == 0));
    *done = ++flushes == 2;
    return 0;
}

static result p_close_send(void *comm) {
    EXPECT(comm == SENDER);
    return 0;
}

static result p_close_recv(void *comm) {
    EXPECT(comm == RECEIVER);
    return 2;
}

static result p_close_listen(void *comm) {
    EXPECT(comm == LISTENER);
    return 0;
}

#if VERSION >= 7
static result p_get_device_mr(void *comm, void *memory, void **device_memory) {
    EXPECT(comm == RECEIVER && (memory == MEMORY(1) || memory == MEMORY(2)) && *device_memory == NULL);
    if (memory == MEMORY(1)) *device_memory = AT(0xdead00);
    return 0;
}

static result p_irecv_consumed(void *comm, int n, void *request) {
    EXPECT(comm == RECEIVER && n == 8 && request == REQUEST(8));
    return 0;
}
#endif

#if VERSION >= 9
static result p_make_v_device(int *device, struct virtual_device *v) {
    EXPECT(v->ndevs == (VERSION >= 12 ? 8 : 4));
    for (int i = 0; i < v->ndevs; i++) EXPECT(v->devs[i] == i * 11);
    *device = 42;
    return 0;
}
#endif

#if VERSION >= 11
static result p_finalize(void *context) {
    EXPECT(context == CONTEXT);
    return 0;
}

static result p_set_net_attr(void *context, struct attributes *a) {
    EXPECT(context == CONTEXT);
    for (int i = 0; i < 4; i++) EXPECT(a->send[i] == i + 1 && a->recv[i] == i + 5);
    EXPECT(a->op == 9 && a->algo == 10 && a->proto == 11);
    return 0;
}
#endif

typedef void (*slot)(void);

#define PASTE(a, b) a##b
#define SYMBOL(version) PASTE(ncclNetPlugin_v, version)
#define TABLE SYMBOL(VERSION)
#define F(function) ((slot)(function))

/* One row per slot, in order: what a version does not have is not there. */
struct {
    char *name;
    slot slots[
#if VERSION <= 5
        15
#elif VERSION == 6
        16
#elif VERSION <= 8
        18
#elif VERSION <= 10
        19
#else
        21
#endif
    ];
} TABLE = {
    "Test plugin",
    {F(p_init), F(p_devices), F(p_properties), F(p_listen), F(p_connect), F(p_accept), F(p_reg_mr),
#if VERSION >= 6
     F(p_reg_mr_dma_buf),
#endif
     F(p_dereg_mr), F(p_isend), F(p_irecv), F(p_iflush), F(p_test), F(p_close_send), F(p_close_recv),
     F(p_close_listen),
#if VERSION >= 7
     F(p_get_device_mr), F(p_irecv_consumed),
#endif
#if VERSION >= 9
     F(p_make_v_device),
#endif
#if VERSION >= 11
     F(p_finalize), F(p_set_net_attr),
#endif
    }};

static char **table_name(void) { return &TABLE.name; }
