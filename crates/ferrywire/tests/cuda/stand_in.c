/* A stand-in for the CUDA driver, for machines without a GPU: two devices whose memory the CPU cannot touch at its
 * device address, contexts that have to be current, and streams that do their work at once; kernels only where they are
 * linked in. What is left when the process ends is told on the error output. */

#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef VERSION
#define VERSION 12040
#endif
#ifndef DEVICES
#define DEVICES 2
#endif

enum { DONE = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101 };
enum { INVALID_CONTEXT = 201, NOT_FOUND = 500, NOT_SUPPORTED = 801, RANGES = 8192 };
enum { FREE, DEVICE, PINNED };
typedef unsigned long long address;

static struct range {
    int kind, device;
    address base;
    char *view;
    size_t bytes;
} ranges[RANGES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int contexts[DEVICES + 1], retained, streams, events, pushed, initialised;
static const size_t TOTAL = 1ull << 30;
static size_t taken;
static __thread void *stack[16];
static __thread int depth;

__attribute__((destructor)) static void told(void) {
    int memory = 0;
    for (int k = 0; k < RANGES; k++) memory += ranges[k].kind != FREE;
    /* Pushed by whatever thread, most of which are gone. */
    fprintf(stderr, "stand-in: left %d contexts, %d streams, %d events, %d ranges, %d pushed\n", retained, streams, events,
            memory, pushed);
}

static int current(void) { return depth ? (int)((int *)stack[depth - 1] - contexts) : -1; }
#define NEEDS_CONTEXT \
    if (current() < 0) return INVALID_CONTEXT

static int add(int kind, address base, char *view, size_t bytes) {
    for (int k = 0; k < RANGES; k++)
        if (ranges[k].kind == FREE) {
            ranges[k] = (struct range){kind, current(), base, view, bytes};
            return DONE;
        }
    return OUT_OF_MEMORY;
}

static struct range *find(address at) {
    for (int k = 0; k < RANGES; k++)
        if (ranges[k].kind != FREE && at >= ranges[k].base && at < ranges[k].base + ranges[k].bytes) return &ranges[k];
    return NULL;
}

/* Where the bytes of an address are: unknown ones are the host's. */
static char *view(address at, size_t bytes) {
    struct range *found = find(at);
    if (!found) return (char *)at;
    return at + bytes <= found->base + found->bytes ? found->view + (at - found->base) : NULL;
}

int cuInit(unsigned flags) {
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
    *value = attribute == 33 ? 0xAB + device : attribute == 16 ? 8 : attribute == 124 ? 1 : 0;
    return DONE;
}

int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    *bytes = TOTAL;
    return DONE;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = &contexts[device];
    retained++;
    return DONE;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
    retained--;
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

int cuMemGetInfo_v2(size_t *available, size_t *total) {
    NEEDS_CONTEXT;
    *total = TOTAL;
    *available = TOTAL - taken;
    return DONE;
}

int cuMemAlloc_v2(address *at, size_t bytes) {
    NEEDS_CONTEXT;
    if (!bytes) return INVALID_VALUE;
    if (bytes > TOTAL - taken) return OUT_OF_MEMORY;
    int fd = memfd_create("stand-in", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, bytes)) return OUT_OF_MEMORY;
    char *seen = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    void *base = mmap(NULL, bytes, PROT_NONE, MAP_SHARED, fd, 0);
    close(fd);
    memset(seen, 0xDD, bytes);
    *at = (address)base;
    pthread_mutex_lock(&lock);
    taken += bytes;
    int added = add(DEVICE, *at, seen, bytes);
    pthread_mutex_unlock(&lock);
    return added;
}

int cuMemFree_v2(address at) {
    NEEDS_CONTEXT;
    pthread_mutex_lock(&lock);
    struct range *found = find(at), old = {0};
    int right = found && found->kind == DEVICE && found->base == at;
    if (right) {
        old = *found;
        found->kind = FREE;
        taken -= old.bytes;
    }
    pthread_mutex_unlock(&lock);
    if (!right) return INVALID_VALUE;
    munmap(old.view, old.bytes);
    munmap((void *)old.base, old.bytes);
    return DONE;
}

int cuMemHostRegister_v2(void *base, size_t bytes, unsigned flags) {
    NEEDS_CONTEXT;
    if (bytes > TOTAL) return OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    int added = flags == 3 ? add(PINNED, (address)base, base, bytes) : INVALID_VALUE;
    pthread_mutex_unlock(&lock);
    return added;
}

int cuMemHostUnregister(void *base) {
    NEEDS_CONTEXT;
    pthread_mutex_lock(&lock);
    struct range *found = find((address)base);
    int right = found && found->kind == PINNED && found->base == (address)base;
    if (right) found->kind = FREE;
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
    struct range *found = find((address)base);
    size_t bytes = found ? found->bytes : 0;
    int done = cuMemHostUnregister(base);
    if (done == DONE) munmap(base, bytes);
    return done;
}

int cuMemcpyAsync(address target, address source, size_t bytes, void *stream) {
    NEEDS_CONTEXT;
    pthread_mutex_lock(&lock);
    char *to = view(target, bytes), *from = view(source, bytes);
    int right = to && from;
    if (right) memmove(to, from, bytes);
    pthread_mutex_unlock(&lock);
    return right ? DONE : INVALID_VALUE;
}

#ifdef BATCHES
int cuMemcpyBatchAsync(address *targets, address *sources, size_t *sizes, size_t count, unsigned *attributes, size_t *first,
                       size_t sets, size_t *failed, void *stream) {
    NEEDS_CONTEXT;
    if (sets != 1 || *first != 0 || attributes[0] != 1 || attributes[5] != 0 || !stream) return INVALID_VALUE;
    for (size_t k = 0; k < count; k++) {
        int done = sizes[k] ? cuMemcpyAsync(targets[k], sources[k], sizes[k], stream) : INVALID_VALUE;
        *failed = k;
        if (done != DONE) return done;
    }
    return DONE;
}
#endif

int cuMemsetD8Async(address target, unsigned char byte, size_t bytes, void *stream) {
    NEEDS_CONTEXT;
    pthread_mutex_lock(&lock);
    char *to = find(target) ? view(target, bytes) : NULL;
    if (to) memset(to, byte, bytes);
    pthread_mutex_unlock(&lock);
    return to ? DONE : INVALID_VALUE;
}

int cuMemGetHandleForAddressRange(void *into, address at, size_t bytes, int kind, address flags) {
    NEEDS_CONTEXT;
    return NOT_SUPPORTED;
}

#ifndef INCOMPLETE
int cuPointerGetAttributes(unsigned count, int *asked, void **into, address at) {
    if (!initialised) return NOT_INITIALIZED;
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
    return DONE;
}
#endif

int cuStreamCreate(void **stream, unsigned flags) {
    NEEDS_CONTEXT;
    *stream = &contexts[current()];
    __atomic_add_fetch(&streams, 1, __ATOMIC_SEQ_CST);
    return flags == 1 ? DONE : INVALID_VALUE;
}

int cuStreamDestroy_v2(void *stream) {
    NEEDS_CONTEXT;
    __atomic_sub_fetch(&streams, 1, __ATOMIC_SEQ_CST);
    return DONE;
}

int cuEventCreate(void **event, unsigned flags) {
    NEEDS_CONTEXT;
    *event = &contexts[current()];
    __atomic_add_fetch(&events, 1, __ATOMIC_SEQ_CST);
    return flags == 2 ? DONE : INVALID_VALUE;
}

int cuEventDestroy_v2(void *event) {
    NEEDS_CONTEXT;
    __atomic_sub_fetch(&events, 1, __ATOMIC_SEQ_CST);
    return DONE;
}

/* Everything is done at once. */
#define AT_ONCE(name, ...) \
    int name(__VA_ARGS__) { \
        NEEDS_CONTEXT; \
        return DONE; \
    }
AT_ONCE(cuStreamQuery, void *stream)
AT_ONCE(cuStreamSynchronize, void *stream)
AT_ONCE(cuStreamWaitEvent, void *stream, void *event, unsigned flags)
AT_ONCE(cuEventRecord, void *event, void *stream)
AT_ONCE(cuEventQuery, void *event)

int cuStreamWriteValue32_v2(void *stream, address at, unsigned value, unsigned flags) {
    return cuMemcpyAsync(at, (address)&value, 4, stream);
}

int cuStreamWriteValue64_v2(void *stream, address at, address value, unsigned flags) {
    return cuMemcpyAsync(at, (address)&value, 8, stream);
}

#ifdef KERNELS
int stand_in_kernel(const char *name);
int stand_in_launch(int kernel, unsigned blocks, unsigned block, void **parameters);

int cuModuleLoadData(void **module, const void *image) {
    NEEDS_CONTEXT;
    *module = &contexts[current()];
    return strstr(image, ".visible .entry") ? DONE : INVALID_VALUE;
}

int cuModuleUnload(void *module) {
    NEEDS_CONTEXT;
    return DONE;
}

int cuModuleGetFunction(void **function, void *module, const char *name) {
    NEEDS_CONTEXT;
    *function = (void *)(long)stand_in_kernel(name);
    return *function ? DONE : NOT_FOUND;
}

/* Device memory is there for the kernel only. */
static void show(int how) {
    for (int k = 0; k < RANGES; k++)
        if (ranges[k].kind == DEVICE) mprotect((void *)ranges[k].base, ranges[k].bytes, how);
}

int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned block, unsigned block_y, unsigned block_z,
                   unsigned shared, void *stream, void **parameters, void **extra) {
    NEEDS_CONTEXT;
    if (!x || y != 1 || z != 1 || block_y != 1 || block_z != 1 || shared || extra) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    show(PROT_READ | PROT_WRITE);
    int launched = stand_in_launch((int)(long)function, x, block, parameters);
    show(PROT_NONE);
    pthread_mutex_unlock(&lock);
    return launched;
}
#else
int cuModuleLoadData(void **module, const void *image) { return NOT_SUPPORTED; }
int cuModuleUnload(void *module) { return NOT_SUPPORTED; }
int cuModuleGetFunction(void **function, void *module, const char *name) { return NOT_FOUND; }
int cuLaunchKernel(void *function, ...) { return NOT_SUPPORTED; }
#endif
