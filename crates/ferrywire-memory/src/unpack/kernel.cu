// Kernels: the gather of scattered receives, batched copies of many runs, the bench's data pattern, and a delay for tests.
//
// make_ptx.py compiles this file to kernel.ptx, which the library loads, so building ferrywire does not need CUDA. The
// structures mirror those of kernels.rs and lists.rs, where a test compares sizes and names.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

// Threads per block of every kernel.
#ifndef BLOCK
#define BLOCK 256
#endif
// Smallest group of threads that share a copy.
#define WARP 32
// Most runs per launch, and most fragments per block.
#define RUNS 32
#define BATCH 32
// 16-byte words that a thread has in flight.
#define DEPTH 8
// Runs of a list that a block reads at once.
#define LIST_BATCH 256
// Words of a list, and the bit of each word at which the list's number begins.
#define WORDS 8
#define NUMBER_AT 56
// Longest wait for the first list of a launch.
#define FIRST_NANOSECONDS 500000000ull

// ---- gather ----

// An entry of the plugin's table: offset in the receive pool, length, offset in the message.
struct Fragment {
    u32 source;
    u32 bytes;
    u64 target;
};

// Fragments in mapped memory, and the base addresses of their offsets.
struct Run {
    u64 fragments;
    u64 count;
    u64 source;
    u64 target;
};

// Block b copies parts of fragments [b / slices * batch, + batch), numbered over all runs: of each fragment every
// slices-th piece of piece_bytes, beginning with piece b % slices.
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

// A list of runs, and its partition among blocks as in Gather. The top 8 bits of every word hold the low bits of the list's
// number, so a reader detects words of different lists. A list without runs ends the kernel.
struct List {
    u64 count;
    // Written to Copies::completion once all runs are copied.
    u64 value;
    // Runs that a block takes at once; in the bits above 32, the number of slices.
    u64 batch;
    u64 piece_bytes;
    // The run of a list with one run, which saves a read of mapped memory.
    u64 source;
    u64 target;
    u64 bytes;
    u64 unused;
};

// Mapped memory through which CPU and GPU exchange lists; each side writes to cache lines of its own. Lists are numbered, and
// list n is in lists[n % 2].
struct Mailbox {
    List lists[2];
    // Written by the GPU: whether all blocks have started, whether they wait for no further list, and the first list not taken.
    u64 begun;
    u64 closed;
    u64 ended;
    u64 unused[5];
};

// Device memory through which block 0 passes lists to the other blocks. List n is in forwarded[n % 4], since block 0 may
// forward the next two lists before every block has read it. done[n % 2] counts blocks that finished list n, and returns to 0.
struct Blocks {
    List forwarded[4];
    u32 done[2];
};

// Parameters of ferrywire_copy. The kernel takes lists from number `first` on, until none has come for idle_ns or stay_ns have
// passed since its start. Runs of lists with even numbers are at `runs`, those of odd ones `stride` bytes behind. The GPU writes
// the value of each finished list to `completion`, in mapped memory.
struct Copies {
    u64 mailbox;
    u64 runs;
    u64 stride;
    u64 completion;
    u64 blocks;
    u64 first;
    u64 idle_ns;
    u64 stay_ns;
};

// Copies bytes with `lanes` threads, of which the calling thread is number `lane`.
__device__ __forceinline__ void copy_bytes(u8 *target, const u8 *source, u32 bytes, u32 lane, u32 lanes) {
    for (u32 at = lane; at < bytes; at += lanes) target[at] = source[at];
}

// Copies 16-byte words, aligned at both ends, as copy_bytes does.
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

// The 16 bytes that begin at byte 4 * SKIP + bits / 8 of two adjacent words.
template <u32 SKIP> __device__ __forceinline__ uint4 between(uint4 low, uint4 high, u32 bits) {
    const u32 all[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    uint4 out;
    out.x = __funnelshift_r(all[SKIP], all[SKIP + 1], bits);
    out.y = __funnelshift_r(all[SKIP + 1], all[SKIP + 2], bits);
    out.z = __funnelshift_r(all[SKIP + 2], all[SKIP + 3], bits);
    out.w = __funnelshift_r(all[SKIP + 3], all[SKIP + 4], bits);
    return out;
}

// Copies target words that each lie across two words of the source; reads words + 1 source words.
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

// Copies between any addresses, with any length; reads and writes nothing outside of the two ranges.
__device__ void copy(u8 *target, const u8 *source, u32 bytes, u32 lane, u32 lanes) {
    // Bytes up to the first aligned target word; one word more if the source word there begins before the source range.
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
        // The last word read must end within the source range.
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

// Fragment `index`, counted over all runs.
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

// Copies this block's pieces of the given copies.
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
    // Threads read at once, since each access of mapped memory crosses PCIe.
    if (threadIdx.x < count) copies[threadIdx.x] = find(gather, first + threadIdx.x);
    __syncthreads();
    copy_all(copies, count, gather.slices, gather.piece_bytes);
}

__device__ __forceinline__ u64 nanoseconds_now() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// The value of a list's word, without the list's number.
__device__ __forceinline__ u64 part(u64 word) { return word & ((1ull << NUMBER_AT) - 1); }

// Reads list n; returns whether all its words had arrived.
__device__ __forceinline__ u32 reads(u64 *list, const volatile List *from, u64 n) {
    if (threadIdx.x < WORDS) list[threadIdx.x] = ((const volatile u64 *)from)[threadIdx.x];
    __syncthreads();
    u32 there = 1;
    for (u32 k = 0; k < WORDS; k++) there &= list[k] >> NUMBER_AT == (n & 0xff);
    return there;
}

// Waits for list n; returns whether it arrived. The CPU posts the first list of a launch after it has checked that the memory
// is still allocated, and it can check that only once the kernel runs: before, the owner could still free the memory. When the
// time is over, thread 0 sets `closed`, and each further list is read once: a list that the CPU posted before it could see
// `closed` is still taken.
__device__ __forceinline__ u32 awaits(const Copies &all, u64 n, u64 begin, u64 *list, u32 &over, u32 *closed) {
    volatile Mailbox *const mailbox = (volatile Mailbox *)all.mailbox;
    const u64 since = nanoseconds_now();
    for (;;) {
        if (threadIdx.x == 0) {
            if (!over) {
                const u64 now = nanoseconds_now();
                over = n == all.first ? now - since >= FIRST_NANOSECONDS
                                      : now - since >= all.idle_ns || now - begin >= all.stay_ns;
                if (over) {
                    mailbox->closed = 1;
                    __threadfence_system();
                }
            }
            *closed = over;
        }
        __syncthreads();
        const u32 last = *closed;
        if (reads(list, &mailbox->lists[n % 2], n)) return 1;
        if (last) return 0;
    }
}

// Copies this block's part of a list.
__device__ __forceinline__ void copy_list(const u64 *list, const volatile u64 *runs, Copy *copies) {
    const u64 count = part(list[0]), batch = list[2] & 0xffffffff;
    const u32 slices = (u32)(part(list[2]) >> 32), groups = gridDim.x / slices;
    for (u64 first = blockIdx.x / slices * batch; first < count; first += groups * batch) {
        const u32 some = count - first < batch ? (u32)(count - first) : (u32)batch;
        // Threads read at once, since each access of mapped memory crosses PCIe.
        if (count > 1)
            for (u32 k = threadIdx.x; k < some * 3; k += BLOCK) ((u64 *)copies)[k] = runs[first * 3 + k];
        else if (threadIdx.x < 3)
            ((u64 *)copies)[threadIdx.x] = part(list[4 + threadIdx.x]);
        __syncthreads();
        copy_all(copies, some, slices, part(list[3]));
        __syncthreads();
    }
}

// A launch costs CPU and GPU tens of microseconds, so the blocks stay for a while and take further lists. Block 0 polls the
// mailbox, and the other blocks poll block 0.
extern "C" __global__ void __launch_bounds__(BLOCK) ferrywire_copy(const Copies all) {
    __shared__ Copy copies[LIST_BATCH];
    __shared__ u64 list[WORDS];
    __shared__ u32 closed;
    volatile Mailbox *const mailbox = (volatile Mailbox *)all.mailbox;
    volatile Blocks *const blocks = (volatile Blocks *)all.blocks;
    const u64 begin = nanoseconds_now();
    u32 over = 0;
    // Blocks start in order, so all have started when the last one runs.
    if (threadIdx.x == 0 && blockIdx.x == gridDim.x - 1) mailbox->begun = 1;
    for (u64 n = all.first;; n++) {
        volatile List *const forwarded = &blocks->forwarded[n % 4];
        u32 there = 1;
        if (blockIdx.x == 0) {
            there = awaits(all, n, begin, list, over, &closed);
            there = there && part(list[0]) != 0;
            if (threadIdx.x == 0 && !there) mailbox->ended = n;
            __threadfence_system();
            if (threadIdx.x < WORDS) ((volatile u64 *)forwarded)[threadIdx.x] = there ? list[threadIdx.x] : n << NUMBER_AT;
        } else {
            do __syncthreads();
            while (!reads(list, forwarded, n) && nanoseconds_now());
        }
        if (!there || part(list[0]) == 0) return;
        // Makes visible to this block what the CPU wrote before it posted the list.
        __threadfence_system();
        __syncthreads();
        copy_list(list, (const volatile u64 *)(all.runs + n % 2 * all.stride), copies);
        // Each thread's bytes are visible to the CPU and to other GPUs before the block counts as done.
        __threadfence_system();
        __syncthreads();
        if (threadIdx.x == 0 && atomicAdd((u32 *)&blocks->done[n % 2], 1) + 1 == gridDim.x) {
            blocks->done[n % 2] = 0;
            __threadfence_system();
            *(volatile u64 *)all.completion = part(list[1]);
        }
    }
}

// ---- the bench's pattern ----

// Word w of the pattern is key + w * step, with its lower half mixed into the upper one, XOR flip. The byte at `address` is
// byte `offset` of the pattern.
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

// The 8 bytes of the pattern that begin at an offset.
__device__ __forceinline__ u64 bytes_at(const Pattern &pattern, u64 offset) {
    const u32 skew = (u32)(offset % 8) * 8;
    const u64 low = word(pattern, offset / 8);
    return skew == 0 ? low : low >> skew | word(pattern, offset / 8 + 1) << (64 - skew);
}

__device__ __forceinline__ u64 head_bytes(const Pattern &pattern) {
    const u64 head = (0 - pattern.address) & 15;
    return head < pattern.bytes ? head : pattern.bytes;
}

// Writes the share of thread `thread` of `threads`.
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

// The lowest index of a wrong byte among the words of this thread's share, or among its single bytes if that is lower;
// ~0 if none differs.
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

// Lowers *first to the index of the first byte that differs from the pattern.
extern "C" __global__ void __launch_bounds__(BLOCK) ferrywire_check(const Pattern pattern, u64 *first) {
    const u64 wrong = differs(pattern, (u64)blockIdx.x * BLOCK + threadIdx.x, (u64)gridDim.x * BLOCK);
    if (wrong != ~0ull) atomicMin(first, wrong);
}

// Fills many short stretches in one launch, each with one block.
extern "C" __global__ void __launch_bounds__(BLOCK) ferrywire_fill_list(const Pattern *list, u64 count) {
    for (u64 k = blockIdx.x; k < count; k += gridDim.x) {
        const Pattern pattern = list[k];
        fill(pattern, threadIdx.x, BLOCK);
    }
}

// Lowers *first to the index of the first stretch of the list that differs from its pattern.
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
