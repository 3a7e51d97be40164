/*
 * The knobs: what can be said from outside about how kernels run, the keys of MACKO_PLAN. Python reads the environment
 * once and calls macko_knobs_set (macko/_library.py). Each of the two libraries has its own copy.
 */
#pragma once

#include <stdbool.h>

#include "types.h"

MACKO_C_BEGIN

/*
 * Key, how many whole numbers its value has, with x between them, and what it may be. Where that has | it is one of these
 * words; with 0 numbers the value is which one, counted from 0. cpu and copy are MACKO_CPU (no better vector path than
 * this: enum macko_cpu_path) and MACKO_COPY (cp_async: the kernels of GPUs before 9.0). *_tokens: up to how many tokens
 * sell and tile multiply from packed bytes. tile_gemm: a macko_slab_many_way. stages, first, early: of sell's pipeline for
 * one token all, those before x, those before the previous kernel's end. head: at packing, sell's stages at a fixed place.
 * sms: what is shared among the SMs of a GPU is shared among so many, so that rings of stages wrap with small matrices.
 * shared_kb: shared memory of a block for the kernel of rings, as other GPUs have it (99, 163). docs/build.md says the
 * rest.
 */
#define MACKO_KNOBS(KNOB)                                                                                              \
    KNOB(CPU, "cpu", 0, "scalar|avx2|avx512")                                                                          \
    KNOB(COPY, "copy", 0, "bulk|cp_async")                                                                             \
    KNOB(PDL, "pdl", 0, "0|1")                                                                                         \
    KNOB(STREAM_TOKENS, "stream_tokens", 1, "a number to 1048576")                                                     \
    KNOB(TILE_TOKENS, "tile_tokens", 1, "a number to 1048576")                                                         \
    KNOB(TILE_GEMM, "tile_gemm", 4, "a number of rows x tokens x split_k x split")                                     \
    KNOB(SLIDE_TILE, "slide_tile", 2, "64x16|64x32|64x64|128x64|128x128|128x192|128x256|256x128")                      \
    KNOB(EC_CLUSTER, "ec_cluster", 0, "0|1")                                                                           \
    KNOB(STAGES, "stages", 1, "a number to 1048576")                                                                   \
    KNOB(FIRST, "first", 1, "a number to 1048576")                                                                     \
    KNOB(EARLY, "early", 1, "a number to 1048576")                                                                     \
    KNOB(HEAD, "head", 1, "a number to 1048576")                                                                       \
    KNOB(SMS, "sms", 1, "a number to 1048576")                                                                         \
    KNOB(SHARED_KB, "shared_kb", 1, "a number to 1048576")                                                             \
    KNOB(SLIDE_CLUSTER, "slide_cluster", 2, "a number of blocks that multicast x splits")

#define MACKO_KNOB_ID(id, key, numbers, value) MACKO_KNOB_##id,
typedef enum macko_knob_id { MACKO_KNOBS(MACKO_KNOB_ID) MACKO_NUM_KNOBS } macko_knob_id;
#undef MACKO_KNOB_ID

enum {
    MACKO_KNOB_MOST = 1 << 20, /* that a number may be: so many KB are an int of bytes */
};
enum { MACKO_COPY_BULK, MACKO_COPY_CP_ASYNC };

/* The numbers of a value, NULL where nothing was said. */
const int *macko_knob(macko_knob_id id);
static inline int macko_knob_number(macko_knob_id id, int otherwise) {
    const int *said = macko_knob(id);
    return said ? *said : otherwise;
}

/* By the major number of a compute capability: whether to run the kernels with bulk copies, those of GPUs from 9.0 on; and
 * those with wgmma, which is of 9.0 alone. MACKO_COPY=cp_async says no. */
static inline bool macko_has_bulk_copies(int major) {
    return major >= 9 && macko_knob_number(MACKO_KNOB_COPY, MACKO_COPY_BULK) == MACKO_COPY_BULK;
}
static inline bool macko_has_wgmma(int major) {
    return major == 9 && macko_has_bulk_copies(major);
}

/* Takes this instead of what was said before; of a key that comes twice the last one counts. NULL, or what is wrong with
 * the text: then nothing has changed. Not while a kernel of another thread is launched. */
const char *macko_knobs_set(const char *text);

MACKO_C_END
