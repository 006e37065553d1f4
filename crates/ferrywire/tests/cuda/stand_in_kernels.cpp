// The kernels for the stand-in of the driver: run on the CPU, at once.

#include <cstring>

#include "on_cpu.hpp"

static const char *const NAMES[] = {"ferrywire_gather", "ferrywire_fill", "ferrywire_check", "ferrywire_delay",
                                    "ferrywire_copy"};

// The kernel of this name, as the stand-in counts them: from 1; 0 where there is none.
extern "C" int stand_in_kernel(const char *name) {
    for (int k = 0; k < 5; k++)
        if (!strcmp(name, NAMES[k])) return k + 1;
    return 0;
}

extern "C" int stand_in_launch(int kernel, unsigned blocks, unsigned block, void **parameters) {
    if (block != BLOCK && kernel != 4) return 1;
    const Pattern *pattern = (const Pattern *)parameters[0];
    switch (kernel) {
    case 1: launch(blocks, 2, [&] { ferrywire_gather(*(const Gather *)parameters[0]); }); break;
    case 2: launch(blocks, 1, [&] { ferrywire_fill(*pattern); }); break;
    case 3: launch(blocks, 1, [&] { ferrywire_check(*pattern, *(u64 **)parameters[1]); }); break;
    case 5: launch(blocks, 2, [&] { ferrywire_copy(*(const Copies *)parameters[0]); }); break;
    default: break;
    }
    return 0;
}
