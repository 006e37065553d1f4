// The kernels for the stand-in of the driver: run on the CPU, beside all that it does.

#include <cstring>

#include "on_cpu.hpp"

static const char *const NAMES[] = {"ferrywire_gather", "ferrywire_fill", "ferrywire_check", "ferrywire_delay",
                                    "ferrywire_copy", "ferrywire_fill_list", "ferrywire_check_list"};

// The kernel of this name, as the stand-in counts them: from 1; 0 where there is none.
extern "C" int stand_in_kernel(const char *name) {
    for (int k = 0; k < 7; k++)
        if (!strcmp(name, NAMES[k])) return k + 1;
    return 0;
}

// The parameters as the kernels are given them.
union Parameters {
    Gather gather;
    Copies copies;
    struct {
        Pattern pattern;
        u64 *first;
    } check;
    struct {
        const Pattern *patterns;
        u64 count;
        u64 *first;
    } list;
};

extern "C" int stand_in_take(int kernel, unsigned block, void **parameters, char *into, u64 *delay_ns) {
    static_assert(sizeof(Parameters) <= 2048, "the room in stand_in_streams.h");
    Parameters *taken = (Parameters *)into;
    if (kernel == 4) *delay_ns = *(u64 *)parameters[0];
    if (kernel == 4) return 1;
    if (kernel == 1) taken->gather = *(const Gather *)parameters[0];
    if (kernel == 2 || kernel == 3) taken->check.pattern = *(const Pattern *)parameters[0];
    if (kernel == 3) taken->check.first = *(u64 **)parameters[1];
    if (kernel == 5) taken->copies = *(const Copies *)parameters[0];
    if (kernel == 6 || kernel == 7) taken->list.patterns = *(const Pattern **)parameters[0];
    if (kernel == 6 || kernel == 7) taken->list.count = *(u64 *)parameters[1];
    if (kernel == 7) taken->list.first = *(u64 **)parameters[2];
    return block == 256;
}

// Begins a kernel, whose parameters stay where they are until it has ended.
extern "C" void *stand_in_launch(int kernel, unsigned blocks, char *parameters) {
    const Parameters *taken = (const Parameters *)parameters;
    switch (kernel) {
    case 1: return new Launch(blocks, [=] { ferrywire_gather(taken->gather); });
    case 2: return new Launch(blocks, [=] { ferrywire_fill(taken->check.pattern); });
    case 3: return new Launch(blocks, [=] { ferrywire_check(taken->check.pattern, taken->check.first); });
    case 5: return new Launch(blocks, [=] { ferrywire_copy(taken->copies); });
    case 6: return new Launch(blocks, [=] { ferrywire_fill_list(taken->list.patterns, taken->list.count); });
    case 7:
        return new Launch(blocks, [=] {
            ferrywire_check_list(taken->list.patterns, taken->list.count, taken->list.first);
        });
    default: return nullptr;
    }
}

extern "C" int stand_in_has_ended(void *launch) { return !launch || ((Launch *)launch)->has_ended(); }

extern "C" void stand_in_forget(void *launch) { delete (Launch *)launch; }

// Time passes so much slower for kernels that begin from here on, and for those that run.
extern "C" void stand_in_slow_down(int how_much) { slower = how_much; }
