// Runs kernel.cu on the CPU: each block of a launch is a thread, in which the block's threads take turns, from one
// barrier to the next. KERNELS is the file's name.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <sched.h>
#include <setjmp.h>
#include <thread>
#include <time.h>
#include <ucontext.h>
#include <vector>

#if defined(__has_feature) && !defined(__SANITIZE_ADDRESS__)
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#define TURN_BEGINS(keeps, stack, bytes) __sanitizer_start_switch_fiber(keeps, stack, bytes)
#define TURN_HAS_BEGUN(kept, stack, bytes) __sanitizer_finish_switch_fiber(kept, stack, bytes)
#else
#define TURN_BEGINS(keeps, stack, bytes)
#define TURN_HAS_BEGUN(kept, stack, bytes)
#endif

// Fewer than a GPU's, which is enough for every way through the kernels.
#define BLOCK 64

struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) ulonglong2 { unsigned long long x, y; };
static ulonglong2 make_ulonglong2(unsigned long long x, unsigned long long y) { return {x, y}; }
static thread_local struct { unsigned x; } threadIdx, blockIdx, gridDim;

// One of so many.
static bool chance(unsigned of) {
    static thread_local unsigned state = 1 + (unsigned)(size_t)pthread_self() / 4096;
    state = state * 1664525 + 1013904223;
    return (state >> 8) % of == 0;
}

// One thread of a block, with a stack of its own.
struct Fiber {
    static constexpr size_t BYTES = 128 << 10;
    std::unique_ptr<char[]> stack{new char[BYTES]};
    ucontext_t context;
    jmp_buf place;
    void *fake = nullptr;
    bool begun = false;
    bool ended = true;
};

// The block that runs on this thread of the CPU. (Not a member: that would keep the library loaded for ever.)
static thread_local struct Block *mine;

struct Block {
    std::vector<Fiber> fibers{BLOCK};
    ucontext_t turns;
    jmp_buf place;
    void *fake = nullptr;
    const void *stack = nullptr;
    size_t stack_bytes = 0;
    const std::function<void()> *kernel = nullptr;

    // The thread whose turn it is waits for all others of its block, or ends.
    void leave(bool ends) {
        Fiber &fiber = fibers[threadIdx.x];
        fiber.ended = ends;
        TURN_BEGINS(ends ? nullptr : &fiber.fake, stack, stack_bytes);
        switch_from(fiber, true);
        TURN_HAS_BEGUN(fiber.fake, &stack, &stack_bytes);
    }

    // Goes on with a thread, or from it with the loop over all of them. A context also has a signal mask, so to switch
    // contexts is a system call: each thread begins with one, and jumps from then on. Sanitizers follow contexts alone.
    void switch_from(Fiber &fiber, bool to_loop) {
#if defined(__SANITIZE_ADDRESS__)
        if (to_loop) swapcontext(&fiber.context, &turns);
        else swapcontext(&turns, &fiber.context);
#else
        if (_setjmp(to_loop ? fiber.place : place)) return;
        if (to_loop) _longjmp(place, 1);
        if (fiber.begun) _longjmp(fiber.place, 1);
        fiber.begun = true;
        setcontext(&fiber.context);
#endif
    }

    static void begin() {
        TURN_HAS_BEGUN(nullptr, &mine->stack, &mine->stack_bytes);
        (*mine->kernel)();
        mine->leave(true);
    }

    void run(const std::function<void()> &what) {
        mine = this;
        kernel = &what;
        for (Fiber &fiber : fibers) {
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.get();
            fiber.context.uc_stack.ss_size = Fiber::BYTES;
            fiber.context.uc_link = nullptr;
            makecontext(&fiber.context, begin, 0);
            fiber.begun = fiber.ended = false;
        }
        for (unsigned left = BLOCK, before = BLOCK; left > 0; before = left) {
            left = 0;
            // Code that relies on the order without a barrier is wrong.
            const bool backwards = chance(2);
            for (unsigned turn = 0; turn < BLOCK; turn++) {
                const unsigned at = backwards ? BLOCK - 1 - turn : turn;
                Fiber &fiber = fibers[at];
                if (fiber.ended) continue;
                threadIdx.x = at;
                TURN_BEGINS(&fake, fiber.stack.get(), Fiber::BYTES);
                switch_from(fiber, false);
                TURN_HAS_BEGUN(fake, nullptr, nullptr);
                left += !fiber.ended;
            }
            if (left != 0 && left != before) {
                fprintf(stderr, "%u of %u threads of a block are at a barrier\n", left, before);
                abort();
            }
        }
    }
};

// Blocks that have run, kept for further ones; never destroyed, since some may run when all else ends.
static std::mutex &idle_lock = *new std::mutex;
static std::vector<std::unique_ptr<Block>> &idle_blocks = *new std::vector<std::unique_ptr<Block>>;

// How much slower time passes for kernels.
static std::atomic<unsigned> slower{1};

static unsigned long long nanoseconds_on_cpu() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    sched_yield();
    return (now.tv_sec * 1000000000ull + now.tv_nsec) / slower;
}

#define __syncthreads() mine->leave(false)
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __shared__ static thread_local
#define asm
#define volatile(...) now = nanoseconds_on_cpu()
static unsigned __funnelshift_r(unsigned low, unsigned high, unsigned bits) {
    return (unsigned)(((unsigned long long)high << 32 | low) >> (bits & 31));
}
static void __threadfence_system() {
    if (chance(256)) sched_yield();
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (chance(256)) sched_yield();
}
static unsigned atomicAdd(unsigned *at, unsigned value) { return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST); }
static int __ffsll(unsigned long long value) { return __builtin_ffsll(value); }
static void atomicMin(unsigned long long *at, unsigned long long value) {
    unsigned long long found = __atomic_load_n(at, __ATOMIC_SEQ_CST);
    while (value < found && !__atomic_compare_exchange_n(at, &found, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
}

#include KERNELS

#undef asm
#undef volatile

// A running launch; dropping it waits for its end.
struct Launch {
    std::function<void()> kernel;
    std::atomic<unsigned> left;
    std::vector<std::thread> threads;

    // Blocks of one launch may wait for each other, as far as there is room for all of them; so many are under way at once.
    Launch(unsigned blocks, std::function<void()> what, unsigned at_once = 8) : kernel(std::move(what)), left(0) {
        const unsigned lines = std::min(blocks, at_once);
        left = lines;
        for (unsigned line = 0; line < lines; line++)
            threads.emplace_back([this, line, lines, blocks] {
                std::unique_ptr<Block> block;
                {
                    std::lock_guard<std::mutex> locked(idle_lock);
                    if (!idle_blocks.empty()) {
                        block = std::move(idle_blocks.back());
                        idle_blocks.pop_back();
                    }
                }
                if (!block) block.reset(new Block);
                gridDim.x = blocks;
                for (unsigned at = line; at < blocks; at += lines) {
                    blockIdx.x = at;
                    block->run(kernel);
                }
                std::lock_guard<std::mutex> locked(idle_lock);
                idle_blocks.push_back(std::move(block));
                left--;
            });
    }

    bool has_ended() const { return left == 0; }

    ~Launch() {
        for (std::thread &thread : threads) thread.join();
    }
};

template <typename Kernel> static void launch(unsigned blocks, Kernel kernel) { Launch(blocks, kernel); }
