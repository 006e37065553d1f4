// The least that any program must do to move memory of one GPU to another over TCP: a thread per connection and side,
// blocking sockets, a ring of pinned slots at each end, and copies between rings and GPUs, all under way at once. No
// framing, no checks, nothing else. It shows what copies that go over PCIe leave of the speed of plain sockets.
//
// plain CONNECTIONS SLOT_KIB SLOTS COPIES(0|1)
// plain link GPU       what copies alone carry between that GPU and pinned memory: out of it, into it, both at once

#include <arpa/inet.h>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

typedef unsigned long long u64;
static const double WARM_UP_S = 0.2, MEASURED_S = 0.8;
static const size_t HUGE_PAGE = 2 << 20, REGION = 1u << 30;
static const int SOCKET_BUFFER = 2 << 20;
static const size_t LINK_COPY = 64 << 20;
static const int LINK_COPIES = 8;

#define CHECK(call)                                       \
    do {                                                  \
        const long code = (long)(call);                   \
        if (code != 0) {                                  \
            fprintf(stderr, "%s: %ld\n", #call, code);    \
            exit(1);                                      \
        }                                                 \
    } while (0)

static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

static double cpu_seconds() {
    rusage use;
    getrusage(RUSAGE_SELF, &use);
    return use.ru_utime.tv_sec + use.ru_stime.tv_sec + (use.ru_utime.tv_usec + use.ru_stime.tv_usec) * 1e-6;
}

static char *pinned(size_t bytes) {
    char *base = (char *)mmap(0, bytes + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    base = (char *)(((size_t)base + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1));
    madvise(base, bytes, MADV_HUGEPAGE);
    memset(base, 1, bytes);
    CHECK(cuMemHostRegister(base, bytes, CU_MEMHOSTREGISTER_PORTABLE));
    return base;
}

// One end of one connection.
struct End {
    CUdeviceptr gpu;
    size_t slot, slots, at;
    bool copies;
    CUstream stream;
    char *ring;
    volatile u64 *flag;

    void set_up(CUcontext context) {
        CHECK(cuCtxSetCurrent(context));
        CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
        ring = pinned(slot * slots);
        flag = (volatile u64 *)pinned(4096);
        *flag = 0;
    }

    // Enqueues a copy of slot `number`, and behind it the flag.
    void copy(u64 number, bool out) {
        const CUdeviceptr device = gpu + at, host = (CUdeviceptr)(ring + number % slots * slot);
        at = (at + slot) % (REGION - slot) & ~(size_t)4095;
        CHECK(cuMemcpyAsync(out ? host : device, out ? device : host, slot, stream));
        CHECK(cuStreamWriteValue64(stream, (CUdeviceptr)flag, number + 1, 0));
    }

    void source(int fd) {
        const double begin = now();
        for (u64 enqueued = 0, sent = 0; now() - begin < WARM_UP_S + MEASURED_S; sent++) {
            for (; copies && enqueued - sent < slots; enqueued++) copy(enqueued, true);
            while (copies && *flag <= sent) sched_yield();
            const char *from = ring + sent % slots * slot;
            for (size_t left = slot; left > 0;) {
                const ssize_t taken = send(fd, from, left, 0);
                if (taken <= 0) exit(1);
                from += taken;
                left -= taken;
            }
        }
        shutdown(fd, SHUT_WR);
    }

    // Returns the bytes that came after the warm-up.
    u64 target(int fd) {
        const double begin = now();
        u64 counted = 0;
        for (u64 received = 0;; received++) {
            while (copies && received - *flag >= slots) sched_yield();
            char *to = ring + received % slots * slot;
            for (size_t left = slot; left > 0;) {
                const ssize_t got = recv(fd, to, left, 0);
                if (got <= 0) return counted;
                to += got;
                left -= got;
            }
            if (copies) copy(received, false);
            if (now() - begin > WARM_UP_S) counted += slot;
        }
    }
};

// Long copies of the GPU's engines, with nothing beside them: what its link carries, within some percent: kernels may carry
// a little more one way.
static int link_of(int number) {
    CUdevice device;
    CUcontext context;
    CUstream streams[2];
    CUdeviceptr gpu[2];
    char *host[2];
    CHECK(cuInit(0));
    CHECK(cuDeviceGet(&device, number));
    CHECK(cuDevicePrimaryCtxRetain(&context, device));
    CHECK(cuCtxSetCurrent(context));
    for (int way = 0; way < 2; way++) {
        CHECK(cuStreamCreate(&streams[way], CU_STREAM_NON_BLOCKING));
        CHECK(cuMemAlloc(&gpu[way], LINK_COPY));
        host[way] = pinned(LINK_COPY);
    }
    const char *names[] = {"out", "in", "both"};
    for (int ways = 1; ways <= 3; ways++) {
        double begin = now(), bytes = 0;
        for (bool warm = false; now() - begin < WARM_UP_S + MEASURED_S;) {
            if (!warm && now() - begin > WARM_UP_S) {
                warm = true;
                begin = now() - WARM_UP_S;
                bytes = 0;
            }
            for (int k = 0; k < LINK_COPIES; k++) {
                if (ways & 1) CHECK(cuMemcpyAsync((CUdeviceptr)host[0], gpu[0], LINK_COPY, streams[0]));
                if (ways & 2) CHECK(cuMemcpyAsync(gpu[1], (CUdeviceptr)host[1], LINK_COPY, streams[1]));
            }
            for (CUstream stream : streams) CHECK(cuStreamSynchronize(stream));
            bytes += (double)LINK_COPY * LINK_COPIES * (ways == 3 ? 2 : 1);
        }
        printf("%s %.1f GB/s\n", names[ways - 1], bytes / 1e9 / (now() - begin - WARM_UP_S));
    }
    fflush(stdout);
    _exit(0);
}

int main(int count, char **arguments) {
    if (count == 3 && !strcmp(arguments[1], "link")) return link_of(atoi(arguments[2]));
    if (count != 5) {
        fprintf(stderr, "usage: plain CONNECTIONS SLOT_KIB SLOTS COPIES(0|1)\n       plain link GPU\n");
        return 2;
    }
    const int connections = atoi(arguments[1]);
    const size_t slot = (size_t)atol(arguments[2]) << 10, slots = atol(arguments[3]);
    const bool copies = atoi(arguments[4]) != 0;
    int to_client[2], to_server[2];
    CHECK(pipe(to_client));
    CHECK(pipe(to_server));
    const bool server = fork() == 0;
    CHECK(cuInit(0));
    int devices;
    CHECK(cuDeviceGetCount(&devices));
    CUdevice device;
    CHECK(cuDeviceGet(&device, server && devices > 1 ? 1 : 0));
    CUcontext context;
    CHECK(cuDevicePrimaryCtxRetain(&context, device));
    CHECK(cuCtxSetCurrent(context));
    CUdeviceptr gpu;
    CHECK(cuMemAlloc(&gpu, REGION));

    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    if (server) {
        setsockopt(listener, SOL_SOCKET, SO_RCVBUF, &SOCKET_BUFFER, sizeof SOCKET_BUFFER);
        CHECK(bind(listener, (sockaddr *)&address, sizeof address));
        CHECK(listen(listener, connections));
        CHECK(getsockname(listener, (sockaddr *)&address, &length));
        CHECK(write(to_client[1], &address.sin_port, 2) != 2);
    } else {
        CHECK(read(to_client[0], &address.sin_port, 2) != 2);
    }
    std::vector<std::thread> threads;
    std::atomic<u64> bytes{0};
    std::atomic<int> ready{0};
    std::atomic<bool> go{false};
    for (int k = 0; k < connections; k++) {
        int fd;
        if (server) {
            fd = accept(listener, 0, 0);
        } else {
            fd = socket(AF_INET, SOCK_STREAM, 0);
            setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &SOCKET_BUFFER, sizeof SOCKET_BUFFER);
            CHECK(connect(fd, (sockaddr *)&address, sizeof address));
        }
        threads.emplace_back([&, k, fd] {
            End end = {gpu, slot, slots, (size_t)k * (REGION / 32), copies};
            end.set_up(context);
            ready++;
            while (!go) usleep(100);
            if (server) bytes += end.target(fd);
            else end.source(fd);
        });
    }
    while (ready < connections) usleep(1000);
    const double before = cpu_seconds();
    go = true;
    for (std::thread &thread : threads) thread.join();
    // Over the whole run, warm-up included, at both ends.
    double used = (cpu_seconds() - before) * MEASURED_S / (WARM_UP_S + MEASURED_S);
    if (server) {
        double others;
        CHECK(read(to_server[0], &others, sizeof others) != sizeof others);
        const double gb = bytes / 1e9;
        printf("%.2f GB/s, %.3f CPU s/GB\n", gb / MEASURED_S, (used + others) / gb);
        fflush(stdout);
    } else {
        CHECK(write(to_server[1], &used, sizeof used) != sizeof used);
        int status;
        wait(&status);
    }
    // The end of the process frees the driver's resources.
    _exit(0);
}
