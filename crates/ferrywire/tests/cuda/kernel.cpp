// The kernels of kernel.cu, run thread by thread on the CPU, in memory of exactly the size that they may touch: the
// sanitizers that this is compiled with find every access outside, and every one that is not aligned.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sanitizer/asan_interface.h>
#include <vector>

#include "on_cpu.hpp"

static u64 state = 88172645463325252ull;
static u64 random_below(u64 most) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (state >> 11) % most;
}

static void fail(const char *what, int round) {
    printf("%s, round %d\n", what, round);
    exit(1);
}

// A length: of one byte, of some, of a packet, of a page, of many.
static u32 length() {
    switch (random_below(6)) {
    case 0: return (u32)random_below(3);
    case 1: return (u32)random_below(70);
    case 2: return 1448;
    case 3: return 4096;
    case 4: return (u32)random_below(5000);
    default: return (u32)random_below(40000);
    }
}

// A source and a target of one random length, each in a block of its own: the allocation ends where the range does; it
// begins aligned to 16 bytes, and what is before the source may not be read either, as far as the sanitizer can tell bytes
// apart.
static Copy scattered(std::vector<u8 *> &places) {
    const u32 bytes = length(), skew[2] = {(u32)random_below(16), (u32)random_below(16)};
    u8 *source = (u8 *)malloc(skew[0] + bytes), *target = (u8 *)malloc(skew[1] + bytes);
    for (u32 i = 0; i < skew[0] + bytes; i++) source[i] = (u8)random_below(256);
    memset(target, 0xA5, skew[1] + bytes);
    ASAN_POISON_MEMORY_REGION(source, skew[0]);
    places.push_back(source);
    places.push_back(target);
    return {source + skew[0], target + skew[1], bytes};
}

static void gathers(int rounds) {
    for (int round = 0; round < rounds; round++) {
        // Each fragment's source and target is a block of its own, so that every edge is watched.
        const u32 count = (u32)random_below(round % 8 == 0 ? 70 : 8), runs = 1 + (u32)random_below(3);
        std::vector<Fragment> fragments;
        std::vector<u8 *> sources, targets, places;
        for (u32 k = 0; k < count; k++) {
            const Copy each = scattered(places);
            sources.push_back((u8 *)each.source);
            targets.push_back(each.target);
            fragments.push_back({0, (u32)each.bytes, 0});
        }
        // One run per fragment gives each bases of its own; then as many as fit, of none or one fragment.
        Gather gather = {};
        u32 used = 0;
        for (u32 k = 0; k < count && used < RUNS; k++) {
            used += (u32)random_below(runs);
            if (used >= RUNS) break;
            gather.runs[used++] = {(u64)&fragments[k], 1, (u64)sources[k], (u64)targets[k]};
            gather.fragments++;
        }
        gather.batch = 1 + (u32)random_below(BATCH);
        gather.slices = 1 + (u32)random_below(4);
        gather.piece_bytes = random_below(2) ? 4096 : 1 + random_below(9000);
        const u32 blocks = (u32)((gather.fragments + gather.batch - 1) / gather.batch) * gather.slices;
        launch(blocks, 2, [&] { ferrywire_gather(gather); });
        for (u32 k = 0; k < gather.fragments; k++) {
            if (memcmp(sources[k], targets[k], fragments[k].bytes)) fail("a fragment differs", round);
            for (u8 *at = places[2 * k + 1]; at < targets[k]; at++)
                if (*at != 0xA5) fail("a byte before a target was written", round);
        }
        for (u8 *place : places) free(place);
    }
}

// Lists of copies: each byte where it belongs, none beside it, and the end told once, by the last block; nothing through a gate
// that is not open.
static void copies(int rounds) {
    u32 done = 0;
    for (int round = 0; round < rounds; round++) {
        const u32 count = 1 + (u32)random_below(round % 8 == 0 ? 70 : 8);
        std::vector<Copy> list;
        std::vector<u8 *> places;
        for (u32 k = 0; k < count; k++) list.push_back(scattered(places));
        // Now and then the gate is shut, or nobody ever opens it.
        Gate gate = {random_below(8) ? GATE_OPEN : random_below(2) ? GATE_SHUT : 0, 0};
        Told told = {0, 0};
        Copies all = {(u64)list.data(), count, (u64)&gate, (u64)&told, 1 + random_below(1000), (u64)&done, 0, 0, 0};
        all.batch = 1 + (u32)random_below(BATCH);
        all.slices = 1 + (u32)random_below(4);
        all.piece_bytes = random_below(2) ? 4096 : 1 + random_below(9000);
        const u32 blocks = (count + all.batch - 1) / all.batch * all.slices;
        // Some blocks may have passed before the gate was found closed.
        const u32 closes_at = gate.state == GATE_OPEN && random_below(8) == 0 ? (u32)random_below(blocks) : blocks;
        launch(blocks, 2, [&] {
            if (blockIdx.x == closes_at) gate.state = GATE_SHUT;
            if (told.reached != 0 || told.refused != 0) fail("the end was told before the last thread", round);
            ferrywire_copy(all);
        });
        const bool open = gate.state == GATE_OPEN;
        if ((open ? told.reached : told.refused) != all.value || done != 0) fail("the end was not told", round);
        if ((open ? told.refused : told.reached) != 0 || gate.begun == 0) fail("what was told is not so", round);
        for (u32 k = 0; k < count; k++) {
            if (open && memcmp(list[k].source, list[k].target, list[k].bytes)) fail("a copy differs", round);
            for (u64 at = 0; !open && closes_at == blocks && at < list[k].bytes; at++)
                if (list[k].target[at] != 0xA5) fail("something was copied through a gate that is shut", round);
            for (u8 *at = places[2 * k + 1]; at < list[k].target; at++)
                if (*at != 0xA5) fail("a byte before a target was written", round);
        }
        for (u8 *place : places) free(place);
    }
}

static u8 expected(const Pattern &pattern, u64 offset) {
    const u64 sum = pattern.key + offset / 8 * pattern.step;
    return (u8)((sum ^ sum << 32 ^ pattern.flip) >> offset % 8 * 8);
}

static void patterns(int rounds) {
    for (int round = 0; round < rounds; round++) {
        const u64 bytes = length(), skew = random_below(16);
        u8 *place = (u8 *)malloc(skew + bytes), *at = place + skew;
        const Pattern pattern = {random_below(~0ull), random_below(~0ull), random_below(2) ? ~0ull : 0,
                                 random_below(1ull << 40), (u64)at, bytes};
        const unsigned blocks = 1 + (unsigned)random_below(4);
        launch(blocks, 1, [&] { ferrywire_fill(pattern); });
        for (u64 k = 0; k < bytes; k++)
            if (at[k] != expected(pattern, pattern.offset + k)) fail("a wrong byte was filled in", round);
        u64 first = ~0ull, wrong = ~0ull;
        launch(blocks, 1, [&] { ferrywire_check(pattern, &first); });
        if (first != ~0ull) fail("a right byte was found wrong", round);
        for (u64 k = 0; k < 3 && k < bytes; k++) {
            // Apart from each other, so that none is turned back.
            const u64 damaged = k * (bytes / 3) + (bytes / 3 ? random_below(bytes / 3) : 0);
            at[damaged] ^= 1 << random_below(8);
            if (damaged < wrong) wrong = damaged;
            if (bytes < 3 || random_below(2)) break;
        }
        launch(blocks, 1, [&] { ferrywire_check(pattern, &first); });
        if (first != wrong) fail("the first wrong byte was not found", round);
        free(place);
    }
}

int main() {
    gathers(3000);
    copies(3000);
    patterns(500);
    puts("all is right");
}
