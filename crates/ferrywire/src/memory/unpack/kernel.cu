// Kernels: the gather of scattered receives, copies of many runs at once, the pattern that the bench sends, and a delay for tests.
//
// make_ptx.py makes kernel.ptx of this file, which is what is loaded; nobody needs CUDA to build. The structures
// are those of kernels.rs, where a test compares sizes and names.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

// Threads of a block, everywhere.
#define BLOCK 256
// Threads that work together at least.
#define WARP 32
// Runs of one launch, and fragments of one block, at most.
#define RUNS 32
#define BATCH 32
// 16-byte words that a thread has under way.
#define DEPTH 8
// States of a gate; one that nobody opens counts as shut after a time.
#define GATE_OPEN 1
#define GATE_SHUT 2
#define GATE_NANOSECONDS 500000000ull
// What a block that found the gate shut adds to the count of blocks.
#define SHUT_BLOCK 0x10000

// ---- gather ----

// As the table has them: where in the pool, how long, where in the message.
struct Fragment {
    u32 source;
    u32 bytes;
    u64 target;
};

// Fragments in mapped memory, and the addresses that they count from.
struct Run {
    u64 fragments;
    u64 count;
    u64 source;
    u64 target;
};

// Block b works on fragments [b / slices * batch, + batch) of all runs together, and of each of them on every
// slices-th piece of piece_bytes, from piece b % slices on.
struct Gather {
    Run runs[RUNS];
    u64 fragments;
    u32 batch;
    u32 slices;
    u64 piece_bytes;
};

struct Copy {
    const u8 *source;
    u8 *target;
    u64 bytes;
};

// What CPU and GPU tell each other about one list, in mapped memory: may the copies be made, and have all blocks begun?
struct Gate {
    u64 state;
    u64 begun;
};

// Where the GPU tells which lists are done, in mapped memory, and of the first that was not copied, since its gate was shut.
struct Told {
    u64 reached;
    u64 refused;
};

// Runs in mapped memory, cut as above. The last block that is done tells `value`; `done` counts blocks, from 0 and back to
// it, and those that found the gate shut.
struct Copies {
    u64 runs;
    u64 count;
    u64 gate;
    u64 told;
    u64 value;
    u64 done;
    u32 batch;
    u32 slices;
    u64 piece_bytes;
};

// `lanes` threads, of which this is number `lane`, copy bytes.
__device__ __forceinline__ void copy_bytes(u8 *target, const u8 *source, u32 bytes, u32 lane, u32 lanes) {
    for (u32 at = lane; at < bytes; at += lanes) target[at] = source[at];
}

// The same with 16-byte words, both sides aligned.
__device__ __forceinline__ void copy_words(uint4 *target, const uint4 *source, u32 words, u32 lane, u32 lanes) {
    for (u32 first = lane; first < words; first += lanes * DEPTH) {
        uint4 held[DEPTH];
#pragma unroll
        for (u32 k = 0; k < DEPTH; k++)
            if (first + k * lanes < words) held[k] = source[first + k * lanes];
#pragma unroll
        for (u32 k = 0; k < DEPTH; k++)
            if (first + k * lanes < words) target[first + k * lanes] = held[k];
    }
}

// 16 bytes from byte 4 * SKIP + bits / 8 of two words on.
template <u32 SKIP> __device__ __forceinline__ uint4 between(uint4 low, uint4 high, u32 bits) {
    const u32 all[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    uint4 out;
    out.x = __funnelshift_r(all[SKIP], all[SKIP + 1], bits);
    out.y = __funnelshift_r(all[SKIP + 1], all[SKIP + 2], bits);
    out.z = __funnelshift_r(all[SKIP + 2], all[SKIP + 3], bits);
    out.w = __funnelshift_r(all[SKIP + 3], all[SKIP + 4], bits);
    return out;
}

// Target words of which each lies across two words of the source: words + 1 of them are read.
template <u32 SKIP>
__device__ __forceinline__ void copy_skewed(uint4 *target, const uint4 *source, u32 words, u32 bits, u32 lane, u32 lanes) {
    for (u32 first = lane; first < words; first += lanes * (DEPTH / 2)) {
        uint4 low[DEPTH / 2], high[DEPTH / 2];
#pragma unroll
        for (u32 k = 0; k < DEPTH / 2; k++)
            if (first + k * lanes < words) {
                low[k] = source[first + k * lanes];
                high[k] = source[first + k * lanes + 1];
            }
#pragma unroll
        for (u32 k = 0; k < DEPTH / 2; k++)
            if (first + k * lanes < words) target[first + k * lanes] = between<SKIP>(low[k], high[k], bits);
    }
}

// Any addresses, any length; nothing outside of the two ranges is read or written.
__device__ void copy(u8 *target, const u8 *source, u32 bytes, u32 lane, u32 lanes) {
    // Up to the first target word; and one word more, where the source's word there begins before its range.
    u32 head = (0 - (u32)(u64)target) & 15;
    const u32 skew = ((u32)(u64)source + head) & 15;
    if (head < skew) head += 16;
    if (head > bytes) head = bytes;
    copy_bytes(target, source, head, lane, lanes);
    target += head;
    source += head;
    bytes -= head;
    u32 words = bytes / 16;
    uint4 *const to = (uint4 *)target;
    const uint4 *const from = (const uint4 *)(source - skew);
    if (skew == 0) {
        copy_words(to, from, words, lane, lanes);
    } else if (words > 0) {
        // The last word that is read ends inside.
        words = (bytes + skew) / 16 - 1;
        const u32 bits = skew % 4 * 8;
        switch (skew / 4) {
        case 0: copy_skewed<0>(to, from, words, bits, lane, lanes); break;
        case 1: copy_skewed<1>(to, from, words, bits, lane, lanes); break;
        case 2: copy_skewed<2>(to, from, words, bits, lane, lanes); break;
        default: copy_skewed<3>(to, from, words, bits, lane, lanes); break;
        }
    }
    copy_bytes(target + words * 16, source + words * 16, bytes - words * 16, lane, lanes);
}

// Fragment `index` of all runs together.
__device__ __forceinline__ Copy find(const Gather &gather, u64 index) {
    u32 run = 0;
    while (index >= gather.runs[run].count) index -= gather.runs[run++].count;
    const Fragment fragment = ((const Fragment *)gather.runs[run].fragments)[index];
    Copy found;
    found.source = (const u8 *)(gather.runs[run].source + fragment.source);
    found.target = (u8 *)(gather.runs[run].target + fragment.target);
    found.bytes = fragment.bytes;
    return found;
}

// This block's pieces of some copies.
__device__ __forceinline__ void copy_all(const Copy *copies, u32 count, u32 slices, u64 piece_bytes) {
    u32 lanes = BLOCK;
    while (lanes > WARP && BLOCK / lanes < count) lanes /= 2;
    const u32 lane = threadIdx.x % lanes;
    for (u32 k = threadIdx.x / lanes; k < count; k += BLOCK / lanes) {
        const Copy each = copies[k];
        const u64 stride = slices * piece_bytes;
        for (u64 at = blockIdx.x % slices * piece_bytes; at < each.bytes; at += stride) {
            const u64 left = each.bytes - at;
            copy(each.target + at, each.source + at, (u32)(left < piece_bytes ? left : piece_bytes), lane, lanes);
        }
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK) ferrywire_gather(const Gather gather) {
    __shared__ Copy copies[BATCH];
    const u64 first = (u64)(blockIdx.x / gather.slices) * gather.batch;
    const u32 count = gather.fragments - first < gather.batch ? (u32)(gather.fragments - first) : gather.batch;
    // Read together, since each access of mapped memory goes over PCIe.
    if (threadIdx.x < count) copies[threadIdx.x] = find(gather, first + threadIdx.x);
    __syncthreads();
    copy_all(copies, count, gather.slices, gather.piece_bytes);
}

__device__ __forceinline__ u64 nanoseconds_now() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// Waits until the CPU has seen that the memory is still there, which it can only do when this is under way: before that its
// owner could still free it.
__device__ __forceinline__ u32 passes(const volatile Gate *gate) {
    const u64 begin = nanoseconds_now();
    u64 state;
    do state = gate->state;
    while (state == 0 && nanoseconds_now() - begin < GATE_NANOSECONDS);
    return state == GATE_OPEN;
}

extern "C" __global__ void __launch_bounds__(BLOCK) ferrywire_copy(const Copies list) {
    __shared__ Copy copies[BATCH];
    __shared__ u32 open;
    volatile Gate *const gate = (volatile Gate *)list.gate;
    volatile Told *const told = (volatile Told *)list.told;
    const u64 first = (u64)(blockIdx.x / list.slices) * list.batch;
    const u32 count = list.count - first < list.batch ? (u32)(list.count - first) : list.batch;
    if (threadIdx.x < count) copies[threadIdx.x] = ((const Copy *)list.runs)[first + threadIdx.x];
    if (threadIdx.x == 0) {
        // Blocks begin in their order.
        if (blockIdx.x == gridDim.x - 1) gate->begun = 1;
        open = passes(gate);
    }
    __syncthreads();
    const u32 was_open = open;
    if (was_open) copy_all(copies, count, list.slices, list.piece_bytes);
    // Each thread's bytes are visible to the CPU and to other GPUs before the block counts as done.
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x != 0) return;
    const u32 more = was_open ? 1 : 1 + SHUT_BLOCK, sum = atomicAdd((u32 *)list.done, more) + more;
    if (sum % SHUT_BLOCK != gridDim.x) return;
    *(u32 *)list.done = 0;
    __threadfence_system();
    if (sum == gridDim.x) told->reached = list.value;
    else if (told->refused == 0) told->refused = list.value;
}

// ---- the bench's pattern ----

// Word w has key + w * step, its upper half mixed with the lower, its bits turned by flip. Byte `offset` of the words
// belongs to `address`.
struct Pattern {
    u64 key;
    u64 step;
    u64 flip;
    u64 offset;
    u64 address;
    u64 bytes;
};

__device__ __forceinline__ u64 word(const Pattern &pattern, u64 index) {
    const u64 sum = pattern.key + index * pattern.step;
    return sum ^ (sum << 32) ^ pattern.flip;
}

// The 8 bytes from an offset on.
__device__ __forceinline__ u64 bytes_at(const Pattern &pattern, u64 offset) {
    const u32 skew = (u32)(offset % 8) * 8;
    const u64 low = word(pattern, offset / 8);
    return skew == 0 ? low : low >> skew | word(pattern, offset / 8 + 1) << (64 - skew);
}

__device__ __forceinline__ u64 head_bytes(const Pattern &pattern) {
    const u64 head = (0 - pattern.address) & 15;
    return head < pattern.bytes ? head : pattern.bytes;
}

// Thread `thread` of `threads` writes its share.
__device__ __forceinline__ void fill(const Pattern &pattern, u64 thread, u64 threads) {
    const u64 head = head_bytes(pattern), words = (pattern.bytes - head) / 16;
    u8 *const bytes = (u8 *)pattern.address;
    ulonglong2 *const target = (ulonglong2 *)(bytes + head);
    for (u64 k = thread; k < words; k += threads) {
        const u64 offset = pattern.offset + head + k * 16;
        target[k] = make_ulonglong2(bytes_at(pattern, offset), bytes_at(pattern, offset + 8));
    }
    for (u64 k = thread; k < head; k += threads) bytes[k] = (u8)bytes_at(pattern, pattern.offset + k);
    for (u64 k = head + words * 16 + thread; k < pattern.bytes; k += threads)
        bytes[k] = (u8)bytes_at(pattern, pattern.offset + k);
}

// The index of a byte in this thread's share that is not the pattern's, the first of its words and of its single bytes.
__device__ __forceinline__ u64 differs(const Pattern &pattern, u64 thread, u64 threads) {
    const u64 head = head_bytes(pattern), words = (pattern.bytes - head) / 16;
    const u8 *const bytes = (const u8 *)pattern.address;
    const ulonglong2 *const found = (const ulonglong2 *)(bytes + head);
    u64 wrong = ~0ull;
    for (u64 k = thread; k < words && wrong == ~0ull; k += threads) {
        const u64 at = head + k * 16;
        const ulonglong2 pair = found[k];
        const u64 low = pair.x ^ bytes_at(pattern, pattern.offset + at);
        const u64 high = pair.y ^ bytes_at(pattern, pattern.offset + at + 8);
        if (low) wrong = at + (__ffsll(low) - 1) / 8;
        else if (high) wrong = at + 8 + (__ffsll(high) - 1) / 8;
    }
    for (u64 k = thread; k < head; k += threads)
        if (bytes[k] != (u8)bytes_at(pattern, pattern.offset + k) && k < wrong) wrong = k;
    for (u64 k = head + words * 16 + thread; k < pattern.bytes; k += threads)
        if (bytes[k] != (u8)bytes_at(pattern, pattern.offset + k) && k < wrong) wrong = k;
    return wrong;
}

extern "C" __global__ void __launch_bounds__(BLOCK) ferrywire_fill(const Pattern pattern) {
    fill(pattern, (u64)blockIdx.x * BLOCK + threadIdx.x, (u64)gridDim.x * BLOCK);
}

// Lowers *first to the index of the first byte that is not the pattern's.
extern "C" __global__ void __launch_bounds__(BLOCK) ferrywire_check(const Pattern pattern, u64 *first) {
    const u64 wrong = differs(pattern, (u64)blockIdx.x * BLOCK + threadIdx.x, (u64)gridDim.x * BLOCK);
    if (wrong != ~0ull) atomicMin(first, wrong);
}

// Many short stretches in one launch: each is the work of one block.
extern "C" __global__ void __launch_bounds__(BLOCK) ferrywire_fill_list(const Pattern *list, u64 count) {
    for (u64 k = blockIdx.x; k < count; k += gridDim.x) {
        const Pattern pattern = list[k];
        fill(pattern, threadIdx.x, BLOCK);
    }
}

// Lowers *first to the number of the first one of the list that differs.
extern "C" __global__ void __launch_bounds__(BLOCK) ferrywire_check_list(const Pattern *list, u64 count, u64 *first) {
    for (u64 k = blockIdx.x; k < count; k += gridDim.x) {
        const Pattern pattern = list[k];
        if (differs(pattern, threadIdx.x, BLOCK) != ~0ull) atomicMin(first, k);
    }
}

// ---- for tests ----

// Keeps a stream busy for a time.
extern "C" __global__ void ferrywire_delay(u64 nanoseconds) {
    const u64 begin = nanoseconds_now();
    while (nanoseconds_now() - begin < nanoseconds);
}
