// What kernel.cu needs to be run thread by thread on the CPU. KERNELS is the file's name.

#pragma once

struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) ulonglong2 { unsigned long long x, y; };
static ulonglong2 make_ulonglong2(unsigned long long x, unsigned long long y) { return {x, y}; }
static struct { unsigned x; } threadIdx, blockIdx, gridDim;
// Threads come to it one after another and end there, and go on from there in a second pass.
static int pass;
#define __syncthreads() \
    if (pass == 0) return
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __shared__ static
// Whoever waits for a time has it soon.
static unsigned long long clock_ns;
#define asm
#define volatile(...) now = clock_ns += 1000000
static unsigned __funnelshift_r(unsigned low, unsigned high, unsigned bits) {
    return (unsigned)(((unsigned long long)high << 32 | low) >> (bits & 31));
}
static void __threadfence_system() {}
static unsigned atomicAdd(unsigned *at, unsigned value) {
    unsigned before = *at;
    *at += value;
    return before;
}
static int __ffsll(unsigned long long value) { return __builtin_ffsll(value); }
static void atomicMin(unsigned long long *at, unsigned long long value) { *at = value < *at ? value : *at; }

#include KERNELS

template <typename Kernel> static void launch(unsigned blocks, int passes, Kernel kernel) {
    gridDim.x = blocks;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        for (pass = passes == 1; pass < 2; pass++)
            // Thread 0 tells that a block is done, and nobody here waits for the others: it comes last.
            for (threadIdx.x = BLOCK; threadIdx.x-- > 0;) kernel();
}
