/* The table of a matrix whose elements have codes, for packing on the CPU and on CUDA. */
#include "slab.h"

void macko_slab_table(const int64_t *counts, int highs, uint32_t table[2]) {
    uint8_t taken[256] = {1}; /* 0 is in it anyway */
    table[0] = table[1] = 0;
    for (int code = 1; code < MACKO_SLAB_TABLE; code++) {
        int commonest = 0;
        for (int high = 1; high < highs; high++)
            if (!taken[high] && counts[high] > (commonest ? counts[commonest] : 0)) commonest = high;
        taken[commonest] = 1;
    }
    for (int high = 1, code = 1; high < highs; high++)
        if (taken[high]) {
            table[code / 4] |= (uint32_t)high << 8 * (code % 4);
            code++;
        }
}
