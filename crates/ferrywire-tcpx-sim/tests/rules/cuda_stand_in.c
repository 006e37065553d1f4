/* A stand-in for the CUDA driver, for machines without a GPU: two devices whose memory the CPU cannot touch at its
 * device address, contexts that have to be current, and streams that do their work at once. */

#define _GNU_SOURCE
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { DONE = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201, ALLOCATIONS = 4096, DEVICES = 2 };

static struct allocation {
    unsigned long long base;
    char *view;
    size_t bytes, mapped;
    int device;
} allocations[ALLOCATIONS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int contexts[DEVICES];
static __thread void *current;

static int device_of(void *context) { return (int)((int *)context - contexts); }

int cuInit(unsigned flags) { return flags ? INVALID_VALUE : DONE; }

int cuDeviceGetCount(int *count) {
    *count = DEVICES;
    return DONE;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    if (device < 0 || device >= DEVICES) return INVALID_VALUE;
    *context = &contexts[device];
    return DONE;
}

int cuCtxGetCurrent(void **context) {
    *context = current;
    return DONE;
}

int cuCtxSetCurrent(void *context) {
    current = context;
    return DONE;
}

int cuCtxGetDevice(int *device) {
    if (!current) return INVALID_CONTEXT;
    *device = device_of(current);
    return DONE;
}

/* The allocation that holds all of it; with the lock held. */
static struct allocation *find(unsigned long long address, size_t bytes) {
    for (int k = 0; k < ALLOCATIONS; k++) {
        struct allocation *each = &allocations[k];
        if (each->bytes && address >= each->base && address + bytes <= each->base + each->bytes) return each;
    }
    return NULL;
}

int cuMemAlloc_v2(unsigned long long *address, size_t bytes) {
    if (!current) return INVALID_CONTEXT;
    if (!bytes) return INVALID_VALUE;
    size_t mapped = (bytes + 65535) / 65536 * 65536;
    int fd = memfd_create("device", 0);
    if (fd < 0 || ftruncate(fd, mapped)) return OUT_OF_MEMORY;
    void *base = mmap(NULL, mapped, PROT_NONE, MAP_SHARED, fd, 0);
    char *view = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (base == MAP_FAILED || view == MAP_FAILED) return OUT_OF_MEMORY;
    int found = OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    for (int k = 0; k < ALLOCATIONS && found; k++) {
        if (allocations[k].bytes) continue;
        allocations[k] = (struct allocation){(unsigned long long)base, view, bytes, mapped, device_of(current)};
        found = DONE;
    }
    pthread_mutex_unlock(&lock);
    *address = (unsigned long long)base;
    return found;
}

int cuMemFree_v2(unsigned long long address) {
    int done = INVALID_VALUE;
    pthread_mutex_lock(&lock);
    struct allocation *each = find(address, 1);
    if (each && each->base == address && current) {
        munmap((void *)each->base, each->mapped);
        munmap(each->view, each->mapped);
        each->bytes = 0;
        done = DONE;
    }
    pthread_mutex_unlock(&lock);
    return done;
}

int cuMemHostAlloc(void **address, size_t bytes, unsigned flags) {
    if (!current) return INVALID_CONTEXT;
    if (flags != 3) return INVALID_VALUE;
    /* Length first, a page before what is given. */
    size_t *head = mmap(NULL, bytes + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (head == MAP_FAILED) return OUT_OF_MEMORY;
    *head = bytes + 4096;
    *address = (char *)head + 4096;
    memset(*address, 0xa5, bytes < 4096 ? bytes : 4096);
    return DONE;
}

int cuMemFreeHost(void *address) {
    size_t *head = (size_t *)((char *)address - 4096);
    return munmap(head, *head) ? INVALID_VALUE : DONE;
}

int cuPointerGetAttribute(void *data, int attribute, unsigned long long address) {
    int done = DONE;
    pthread_mutex_lock(&lock);
    struct allocation *each = find(address, 1);
    if (!each) {
        done = INVALID_VALUE;
    } else if (attribute == 2) {
        *(unsigned *)data = 2;
    } else if (attribute == 9) {
        *(int *)data = each->device;
    } else if (attribute == 11) {
        *(unsigned long long *)data = each->base;
    } else if (attribute == 12) {
        *(size_t *)data = each->bytes;
    } else {
        done = INVALID_VALUE;
    }
    pthread_mutex_unlock(&lock);
    return done;
}

/* What is to be done with the bytes of device memory: 0 in, 1 out, 2 fill with `byte`. */
static int work(unsigned long long address, void *host, size_t bytes, int what, unsigned char byte) {
    if (!current) return INVALID_CONTEXT;
    pthread_mutex_lock(&lock);
    struct allocation *each = find(address, bytes);
    if (each) {
        char *at = each->view + (address - each->base);
        if (what == 0) memcpy(at, host, bytes);
        if (what == 1) memcpy(host, at, bytes);
        if (what == 2) memset(at, byte, bytes);
    }
    pthread_mutex_unlock(&lock);
    return each ? DONE : INVALID_VALUE;
}

int cuMemcpyHtoD_v2(unsigned long long to, void *from, size_t bytes) { return work(to, from, bytes, 0, 0); }

int cuMemcpyDtoH_v2(void *to, unsigned long long from, size_t bytes) { return work(from, to, bytes, 1, 0); }

int cuMemcpyHtoDAsync_v2(unsigned long long to, void *from, size_t bytes, void *stream) {
    return stream ? work(to, from, bytes, 0, 0) : INVALID_VALUE;
}

int cuMemcpyDtoHAsync_v2(void *to, unsigned long long from, size_t bytes, void *stream) {
    return stream ? work(from, to, bytes, 1, 0) : INVALID_VALUE;
}

int cuMemsetD8Async(unsigned long long to, unsigned char byte, size_t bytes, void *stream) {
    return stream ? work(to, NULL, bytes, 2, byte) : INVALID_VALUE;
}

int cuStreamCreate(void **stream, unsigned flags) {
    static int streams;
    if (!current || flags != 1) return INVALID_CONTEXT;
    *stream = &streams;
    return DONE;
}

int cuStreamDestroy_v2(void *stream) { return stream ? DONE : INVALID_VALUE; }

int cuStreamSynchronize(void *stream) { return stream && current ? DONE : INVALID_VALUE; }
