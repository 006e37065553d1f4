// The kernels of kernel.cu, run on the CPU, in memory of exactly the size that they may touch: the
// sanitizers that this is compiled with find every access outside, and every one that is not aligned.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sanitizer/asan_interface.h>
#include <vector>

#include <unistd.h>

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
        launch(blocks, [&] { ferrywire_gather(gather); });
        for (u32 k = 0; k < gather.fragments; k++) {
            if (memcmp(sources[k], targets[k], fragments[k].bytes)) fail("a fragment differs", round);
            for (u8 *at = places[2 * k + 1]; at < targets[k]; at++)
                if (*at != 0xA5) fail("a byte before a target was written", round);
        }
        for (u8 *place : places) free(place);
    }
}

// A list of copies, and how it is cut.
struct Batch {
    std::vector<Copy> runs;
    std::vector<u8 *> places;
    u64 words[WORDS];

    Batch(u64 value, unsigned blocks) {
        const u32 count = 1 + (u32)random_below(random_below(8) ? 8 : 700);
        for (u32 k = 0; k < count; k++) runs.push_back(scattered(places));
        u64 slices = 1;
        while (slices < blocks && random_below(2)) slices *= 2;
        const u64 batch = 1 + random_below(random_below(4) ? 40 : LIST_BATCH);
        const Copy first = runs[0];
        const u64 all[WORDS] = {count, value, batch | slices << 32, random_below(2) ? 4096 : 1 + random_below(9000),
                                (u64)first.source, (u64)first.target, first.bytes, 0};
        memcpy(words, all, sizeof all);
    }

    void is_copied(bool copied, int round) const {
        for (size_t k = 0; k < runs.size(); k++) {
            if (copied && memcmp(runs[k].source, runs[k].target, runs[k].bytes)) fail("a copy differs", round);
            for (u64 at = 0; !copied && at < runs[k].bytes; at++)
                if (runs[k].target[at] != 0xA5) fail("what was not taken was copied", round);
            for (u8 *at = places[2 * k + 1]; at < runs[k].target; at++)
                if (*at != 0xA5) fail("a byte before a target was written", round);
        }
        for (u8 *place : places) free(place);
    }
};

static u64 read(const u64 &word) { return __atomic_load_n(&word, __ATOMIC_ACQUIRE); }

// Lists of copies: each byte is copied where it belongs and no byte beside it, and a list completes once all of it is copied. What is posted
// while the kernel is about to go is copied as a whole or not at all, as it says.
static void copies(int rounds) {
    Blocks blocks = {};
    u64 next = 1, taken = 0, left = 0;
    std::vector<Copy> room[2];
    room[0].resize(700), room[1].resize(700);
    // A machine that has other things to do is slow: each wait here is a turn of everybody else's.
    const time_t end = time(nullptr) + 40;
    int round = 0;
    for (; round < rounds && (round < 20 || time(nullptr) < end); round++) {
        const unsigned count = 1 << random_below(3);
        const u64 first = next;
        Mailbox mailbox = {};
        for (List &list : mailbox.lists)
            for (u64 *word = (u64 *)&list; word < (u64 *)(&list + 1); word++) *word = (first + 128) << NUMBER_AT;
        u64 completion = 0;
        const u64 stride = (u64)room[1].data() - (u64)room[0].data();
        const Copies all = {(u64)&mailbox, (u64)room[0].data(), stride, (u64)&completion, (u64)&blocks, first,
                            random_below(3) * 1000000, random_below(3) * 10000000};
        std::vector<Batch> batches;
        auto post = [&] {
            batches.emplace_back(1000 + next, count);
            std::copy(batches.back().runs.begin(), batches.back().runs.end(), room[next % 2].begin());
            // The GPU may see the words in any order.
            u64 *const list = (u64 *)&mailbox.lists[next % 2];
            const u32 turn = (u32)random_below(WORDS), spreads = random_below(8) == 0;
            for (u32 k = 0; k < WORDS; k++) {
                const u32 at = (k + turn) % WORDS;
                __atomic_store_n(list + at, next << NUMBER_AT | batches.back().words[at], __ATOMIC_SEQ_CST);
                if (spreads) usleep(random_below(40));
            }
            next++;
        };
        const Launch launch(count, [=] { ferrywire_copy(all); });
        if (random_below(2)) usleep(random_below(60));
        // Now and then nothing comes, or that there is nothing.
        if (round == 5 || round % 100 == 7) {
            const bool none = round % 100 == 7;
            if (none)
                for (u64 k = 0; k < WORDS; k++) __atomic_store_n((u64 *)&mailbox.lists[first % 2] + k, first << NUMBER_AT, __ATOMIC_SEQ_CST);
            while (!launch.has_ended()) sched_yield();
            if (read(mailbox.ended) != first || completion != 0) fail("a completion without a list", round);
            next++;
            continue;
        }
        post();
        // At most two are under way, and none is posted to a kernel that is seen to go.
        for (;;) {
            const u64 most = random_below(4) ? 2 : 1;
            auto full = [&] { return read(completion) < 1000 + std::max(first, next - most); };
            while (full() && !read(mailbox.closed)) sched_yield();
            if (read(mailbox.closed) || batches.size() == 12) break;
            if (random_below(4) == 0) usleep(random_below(60));
            post();
        }
        while (!launch.has_ended()) sched_yield();
        const u64 ended = read(mailbox.ended);
        if (ended + 1 < next || ended > next || !read(mailbox.begun)) fail("begun or ended is wrong", round);
        if (read(completion) != (ended == first ? 0 : 999 + ended)) fail("not every list completed", round);
        for (size_t k = 0; k < batches.size(); k++) batches[k].is_copied(first + k < ended, round);
        taken += ended - first, left += next - ended;
        // The blocks have forwarded the end under that number.
        next = ended + 1;
    }
    if (blocks.done[0] || blocks.done[1]) fail("a count of blocks is not back where it began", round);
    printf("%llu lists were taken by %d kernels, %llu were not\n", taken, round, left);
    if (taken <= round || left == 0) fail("no kernel stayed, or none went too early", round);
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
        launch(blocks, [&] { ferrywire_fill(pattern); });
        for (u64 k = 0; k < bytes; k++)
            if (at[k] != expected(pattern, pattern.offset + k)) fail("a wrong byte was filled in", round);
        u64 first = ~0ull, wrong = ~0ull;
        launch(blocks, [&] { ferrywire_check(pattern, &first); });
        if (first != ~0ull) fail("a right byte was found wrong", round);
        for (u64 k = 0; k < 3 && k < bytes; k++) {
            // Apart from each other, so that none is turned back.
            const u64 damaged = k * (bytes / 3) + (bytes / 3 ? random_below(bytes / 3) : 0);
            at[damaged] ^= 1 << random_below(8);
            if (damaged < wrong) wrong = damaged;
            if (bytes < 3 || random_below(2)) break;
        }
        launch(blocks, [&] { ferrywire_check(pattern, &first); });
        if (first != wrong) fail("the first wrong byte was not found", round);
        free(place);
    }
}

int main() {
    alarm(900);
    gathers(3000);
    copies(1000);
    patterns(500);
    puts("all is right");
}
