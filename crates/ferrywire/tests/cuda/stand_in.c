/* A stand-in for the CUDA driver, for machines without a GPU: two devices whose memory the CPU cannot touch at its
 * device address, contexts that have to be current, and streams that do their work late; kernels only where they are
 * linked in. What is left when the process ends is told on the error output. */

#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#ifndef VERSION
#define VERSION 12040
#endif
#ifndef PINNED_MAX
#define PINNED_MAX (1ull << 30)
#endif
#ifndef DEVICES
#define DEVICES 2
#endif

enum { DONE = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101 };
enum { INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, NOT_SUPPORTED = 801, RANGES = 8192, GONE = 64 };
/* Of what is being freed, work that was given before goes on; nothing more is given. */
enum { FREE, DEVICE, PINNED, GOING };
typedef unsigned long long address;

static struct range {
    int kind, device;
    address base;
    char *view;
    size_t bytes;
} ranges[RANGES];
/* Addresses of device memory that was freed: no copy follows them, for a while. */
static struct { address base; size_t bytes; } gone[GONE];
static address next_base = 0x600000000000;
static int ranges_used, next_gone;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int contexts[DEVICES + 1], retained[DEVICES + 1], streams, events, pushed, initialised;
static const size_t TOTAL = 1ull << 30;
static size_t taken, pinned;
static __thread void *stack[16];
static __thread int depth;

__attribute__((destructor)) static void told(void) {
    int memory = 0, open = 0;
    for (int k = 0; k < RANGES; k++) memory += ranges[k].kind != FREE;
    for (int k = 0; k < DEVICES; k++) open += retained[k];
    /* Pushed by whatever thread, most of which are gone. */
    fprintf(stderr, "stand-in: left %d contexts, %d streams, %d events, %d ranges, %d pushed\n", open, streams, events,
            memory, pushed);
}

static int current(void) { return depth ? (int)((int *)stack[depth - 1] - contexts) : -1; }
#define NEEDS_CONTEXT \
    if (current() < 0) return INVALID_CONTEXT

static int add(int kind, address base, char *view, size_t bytes) {
    for (int k = 0; k < RANGES; k++)
        if (ranges[k].kind == FREE) {
            ranges[k] = (struct range){kind, current(), base, view, bytes};
            if (k >= ranges_used) ranges_used = k + 1;
            return DONE;
        }
    return OUT_OF_MEMORY;
}

static struct range *find(address at) {
    for (int k = 0; k < ranges_used; k++)
        if ((ranges[k].kind == DEVICE || ranges[k].kind == PINNED) && at >= ranges[k].base && at < ranges[k].base + ranges[k].bytes) return &ranges[k];
    return NULL;
}

/* Where the bytes of an address are: unknown ones are the host's. */
static char *view(address at, size_t bytes) {
    struct range *found = find(at);
    for (int k = 0; !found && k < GONE; k++)
        if (at >= gone[k].base && at < gone[k].base + gone[k].bytes) return NULL;
    if (!found) return (char *)at;
    return at + bytes <= found->base + found->bytes ? found->view + (at - found->base) : NULL;
}

/* While `calls_held` is set, calls for which a driver may take long do not return. `calls_waiting` counts such calls. */
int calls_held, calls_waiting;

static void wait_while_held(void) {
    __atomic_add_fetch(&calls_waiting, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&calls_held, __ATOMIC_SEQ_CST)) usleep(100);
    __atomic_sub_fetch(&calls_waiting, 1, __ATOMIC_SEQ_CST);
}

#include "stand_in_capture.h"
#include "stand_in_streams.h"

int cuInit(unsigned flags) {
#ifdef HANGS
    for (;;) pause();
#endif
#ifdef CRASHES
    abort();
#endif
    if (flags) return INVALID_VALUE;
    if (!DEVICES) return NO_DEVICE;
    initialised = 1;
    return DONE;
}

int cuDriverGetVersion(int *version) {
    *version = VERSION;
    return DONE;
}

int cuGetErrorName(unsigned code, const char **text) {
    *text = code == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : code < 1000 ? "CUDA_ERROR_OF_STAND_IN" : NULL;
    return *text ? DONE : INVALID_VALUE;
}

int cuGetErrorString(unsigned code, const char **text) {
    *text = code == OUT_OF_MEMORY ? "out of memory" : "told by the stand-in";
    return DONE;
}

int cuDeviceGetCount(int *count) {
    *count = DEVICES;
    return initialised ? DONE : NOT_INITIALIZED;
}

int cuDeviceGet(int *device, int index) {
    *device = index;
    return index >= 0 && index < DEVICES ? DONE : INVALID_DEVICE;
}

int cuDeviceGetName(char *name, int room, int device) {
    snprintf(name, room, "stand-in %d", device);
    return DONE;
}

int cuDeviceGetUuid_v2(char *uuid, int device) {
    memset(uuid, 0x10 + device, 16);
    return DONE;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 33 ? 0xAB + device : attribute == 16 ? 8 : attribute == 75 ? 9 : attribute == 124 ? 1 : 0;
    return DONE;
}

int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    *bytes = TOTAL;
    return DONE;
}

#ifdef SLOW_CONTEXTS
/* Whether a context of the second device is being made, and may be. */
int context_begun, context_may;
#endif

int cuDevicePrimaryCtxRetain(void **context, int device) {
    if (device < 0 || device >= DEVICES) return INVALID_DEVICE;
#ifdef SLOW_CONTEXTS
    __atomic_store_n(&context_begun, device == 1, __ATOMIC_SEQ_CST);
    while (device == 1 && !__atomic_load_n(&context_may, __ATOMIC_SEQ_CST)) usleep(100);
#endif
    wait_while_held();
    *context = &contexts[device];
    __atomic_add_fetch(&retained[device], 1, __ATOMIC_SEQ_CST);
    return DONE;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
    if (device < 0 || device >= DEVICES || !retained[device]) return INVALID_DEVICE;
    __atomic_sub_fetch(&retained[device], 1, __ATOMIC_SEQ_CST);
    return DONE;
}

int cuCtxGetCurrent(void **context) {
    *context = depth ? stack[depth - 1] : NULL;
    return DONE;
}

int cuCtxPushCurrent_v2(void *context) {
    if (depth == 16) return INVALID_VALUE;
    stack[depth++] = context;
    __atomic_add_fetch(&pushed, 1, __ATOMIC_SEQ_CST);
    return DONE;
}

int cuCtxPopCurrent_v2(void **context) {
    NEEDS_CONTEXT;
    *context = stack[--depth];
    __atomic_sub_fetch(&pushed, 1, __ATOMIC_SEQ_CST);
    return DONE;
}

int cuCtxSetCurrent(void *context) {
    void *before;
    if (depth) cuCtxPopCurrent_v2(&before);
    return context ? cuCtxPushCurrent_v2(context) : DONE;
}

int cuCtxGetDevice(int *device) {
    NEEDS_CONTEXT;
    *device = current();
    return DONE;
}

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *flags = 0;
    *active = retained[device] > 0;
    return device >= 0 && device < DEVICES ? DONE : INVALID_DEVICE;
}

int cuMemGetInfo_v2(size_t *available, size_t *total) {
    NEEDS_CONTEXT;
    *total = TOTAL;
    *available = TOTAL - taken;
    return DONE;
}

int cuMemAlloc_v2(address *at, size_t bytes) {
    NEEDS_CONTEXT;
    NOT_IN_A_CAPTURE(NULL);
    if (!bytes) return INVALID_VALUE;
    if (bytes > TOTAL - taken) return OUT_OF_MEMORY;
    int fd = memfd_create("stand-in", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, bytes)) return OUT_OF_MEMORY;
    char *seen = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    /* Allocations lie side by side, as a GPU's do, each where none has been. */
    pthread_mutex_lock(&lock);
    void *place = (void *)next_base;
    next_base += (bytes + 4095) & ~4095ull;
    pthread_mutex_unlock(&lock);
    void *base = mmap(place, bytes, PROT_NONE, MAP_SHARED, fd, 0);
    close(fd);
    memset(seen, 0xDD, bytes);
    *at = (address)base;
    pthread_mutex_lock(&lock);
    taken += bytes;
    int added = add(DEVICE, *at, seen, bytes);
    if (kernels_run) show(PROT_READ | PROT_WRITE);
    pthread_mutex_unlock(&lock);
    return added;
}

int cuMemFree_v2(address at) {
    NEEDS_CONTEXT;
    NOT_IN_A_CAPTURE(NULL);
    wait_while_held();
    pthread_mutex_lock(&lock);
    struct range *found = find(at), old = {0};
    int right = found && found->kind == DEVICE && found->base == at;
    if (right) {
        old = *found;
        found->kind = GOING;
        /* Remembered addresses are not reused. */
        if (gone[next_gone].bytes) munmap((void *)gone[next_gone].base, gone[next_gone].bytes);
        gone[next_gone].base = old.base, gone[next_gone].bytes = old.bytes;
        next_gone = (next_gone + 1) % GONE;
        finish_all(old.device);
        found->kind = FREE;
        taken -= old.bytes;
        mmap((void *)old.base, old.bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    }
    pthread_mutex_unlock(&lock);
    if (!right) return INVALID_VALUE;
    munmap(old.view, old.bytes);
    return DONE;
}

int cuMemHostRegister_v2(void *base, size_t bytes, unsigned flags) {
    NEEDS_CONTEXT;
    NOT_IN_A_CAPTURE(NULL);
    pthread_mutex_lock(&lock);
    int added = bytes > PINNED_MAX - pinned ? OUT_OF_MEMORY : INVALID_VALUE;
    if (added != OUT_OF_MEMORY && flags == 3) added = add(PINNED, (address)base, base, bytes);
    if (added == DONE) pinned += bytes;
    pthread_mutex_unlock(&lock);
    return added;
}

int cuMemHostUnregister(void *base) {
    NEEDS_CONTEXT;
    NOT_IN_A_CAPTURE(&unregister_code);
    pthread_mutex_lock(&lock);
    struct range *found = find((address)base);
    int right = found && found->kind == PINNED && found->base == (address)base;
    if (right) found->kind = GOING, finish_all(found->device), found->kind = FREE, pinned -= found->bytes;
    pthread_mutex_unlock(&lock);
    return right ? DONE : INVALID_VALUE;
}

int cuMemHostGetDevicePointer_v2(address *at, void *base, unsigned flags) {
    NEEDS_CONTEXT;
    *at = (address)base;
    return DONE;
}

int cuMemHostAlloc(void **base, size_t bytes, unsigned flags) {
    NEEDS_CONTEXT;
    *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return *base == MAP_FAILED ? OUT_OF_MEMORY : cuMemHostRegister_v2(*base, bytes, flags);
}

int cuMemFreeHost(void *base) {
    NEEDS_CONTEXT;
    pthread_mutex_lock(&lock);
    struct range *found = find((address)base);
    size_t bytes = found ? found->bytes : 0;
    pthread_mutex_unlock(&lock);
    int done = cuMemHostUnregister(base);
    if (done == DONE) munmap(base, bytes);
    return done;
}

int cuMemGetHandleForAddressRange(void *into, address at, size_t bytes, int kind, address flags) {
    NEEDS_CONTEXT;
    return NOT_SUPPORTED;
}

/* What each lookup of an address fails with, if not 0. */
int lookup_code;

#ifndef INCOMPLETE
int cuPointerGetAttributes(unsigned count, int *asked, void **into, address at) {
    if (!initialised) return NOT_INITIALIZED;
    if (lookup_code) return lookup_code;
    wait_while_held();
    pthread_mutex_lock(&lock);
    struct range *found = find(at), none = {0}, range = found ? *found : none;
    pthread_mutex_unlock(&lock);
    for (unsigned k = 0; k < count; k++) switch (asked[k]) {
        case 2: *(unsigned *)into[k] = range.kind == DEVICE ? 2 : range.kind == PINNED ? 1 : 0; break;
        case 3: *(address *)into[k] = found && current() >= 0 ? at : 0; break;
        case 8: *(char *)into[k] = 0; break;
        case 9: *(int *)into[k] = found ? range.device : -2; break;
        case 11: *(address *)into[k] = range.base; break;
        case 12: *(size_t *)into[k] = range.bytes; break;
        /* Mappings are of whole pages, and more than what was asked for. */
        case 18: *(size_t *)into[k] = found ? range.bytes + (range.base & 4095) + 8192 : 0; break;
        case 19: *(address *)into[k] = found ? (range.base & ~4095ull) - 4096 : 0; break;
        default: return INVALID_VALUE;
        }
    answered(range.base);
    return DONE;
}

int cuPointerGetAttribute(void *into, int asked, address at) {
    unsigned kind;
    int about_kind = 2;
    void *room = &kind;
    int done = cuPointerGetAttributes(1, &about_kind, &room, at);
    if (done == DONE && !kind) return INVALID_VALUE;
    return done == DONE ? cuPointerGetAttributes(1, &asked, &into, at) : done;
}
#endif
