/*
 * The sell layout: how a GPU runs a matrix of the macko format. This header is its only specification.
 *
 * It is made on the device for that device's number of SMs, held instead of the canonical tensors, never saved; it
 * converts back bit for bit. It stores what the canonical format stores, a value and the columns skipped before it, but
 *   gaps have 2 to 6 bits, whatever makes this matrix smallest (an explicit zero stands at every 2^gap_bits-th column
 *   of a longer run, as in the canonical format);
 *   every lane of a warp walks its own run of entries, so that decoding needs no prefix sum over the warp;
 *   all lanes have the same amount of work, and a block's work is contiguous, so that one bulk copy brings it in.
 *
 * Order of the entries, from the matrix down:
 *   block    the work of one thread block: `rows` rows that are neighbours when all are sorted by stored entries, most
 *            first (equal ones in their order); or when those of each panel (see order) are sorted by themselves, most
 *            first in one panel and fewest first in the next, if that takes at most 0.3 % more slots. Blocks hold about the
 *            same number of steps. Within a block, rows are in the order of the matrix: those of any panel lie side
 *            by side.
 *   perm     the rows of all blocks, one block after the other. "row" below is an index into it.
 *   order    the rows once more: those that are among the first `panel_rows` of the matrix, then those of the next as many,
 *            and so on, each panel as in perm. A panel is what a product through the dense workspace unpacks at once:
 *            panel_rows is rows_of_panel(rows, cols, 2) of csrc/torch/dense_rows.h.
 *   step     MACKO_SELL_STEP consecutive entries of one row, read by one lane at once. A row is padded to whole steps with
 *            (value 0, gap 0), and to the steps of the longest row of its block.
 *   chunk    consecutive steps of one row, the work of one lane. Each row of a block is cut into `chunks` chunks at the
 *            same places: the first `long_chunks` of `steps` steps, the others of steps - 1.
 *   task     chunk c of row r of the block is task c * rows + r. 32 tasks are a group, one a lane; lanes without a task
 *            are padding. Group g belongs to warp g mod warps. A group lasts as long as its first task.
 *   slot     what a warp reads at once, one step of a group: MACKO_SELL_LANES x 16 B of values of entries 0..7, the same of
 *            entries 8..15, then the gaps, see below.
 *   stage    what a block reads at once: stage i holds, warp after warp, the slots of step i of each warp that has one
 *            (a warp's steps are those of its groups, one group after the other; no warp has fewer than a later one).
 *            Warps go in pairs: the second has a slot wherever the first has one, so that every stage begins at a
 *            multiple of 128 B (at 64 B, each line of a bulk copy takes two requests).
 *
 * Where things are. The first `head` stages of the blocks lie first in `data`: stage 0 of each block, then stage 1 of
 * each, and so on, with a slot for every warp. So a block can start to fetch before it has read its own header, and
 * blocks that start side by side read side by side. The bases of each warp's first group lie first in `bases`. The rest
 * follows block after block at the offsets in the header.
 *
 * The gaps of a step: entry e has gap g[e]. For pair j = 0..3 the four gaps g[2j], g[2j + 1], g[8 + 2j], g[9 + 2j] form
 * a number of 4 gap_bits bits, first gap lowest. Byte b of it is byte j of the lane's word in plane b (MACKO_SELL_LANES
 * x 4 B a plane); where gap_bits is odd, the highest 4 bits are nibble {0, 2, 1, 3}[j] of the lane's 16-bit word after
 * the planes. So a mask gives four gaps in the four bytes of a register, ready for the prefix sum by multiplication.
 *
 * Bytes a stored value: (2 + gap_bits / 8) / (1 - (1 - d)^(2^gap_bits)) for density d, and padding: 1-2 % of large
 * matrices, more of small sparse ones.
 */
#pragma once

#include "../core/types.h"

MACKO_C_BEGIN

enum {
    MACKO_SELL_STEP = 16,
    MACKO_SELL_LANES = 32,
    MACKO_SELL_MIN_GAP_BITS = 2,
    MACKO_SELL_MAX_GAP_BITS = 6,
    MACKO_SELL_GAP_WIDTHS = MACKO_SELL_MAX_GAP_BITS - MACKO_SELL_MIN_GAP_BITS + 1,
    MACKO_SELL_MAX_WARPS = 12, /* and an even number */
    MACKO_SELL_MIN_STAGES = 4, /* of the pipeline */
    MACKO_SELL_MAX_STAGES = 8,
    MACKO_SELL_MAX_HEAD = 4,     /* stages at a fixed distance: what is fetched before the header has come */
    MACKO_SELL_MAX_COLS = 65535, /* base columns have 16 bits; cols itself is the base of a lane without a task */
    MACKO_SELL_MAX_CHUNK = 128,  /* steps of a chunk, so that padding runs at most this many steps past the columns */
    MACKO_SELL_MAX_SUMS = 2176,  /* partial sums of a block: chunks * (rows | 1) */
    MACKO_SELL_BARRIER_BYTES = 512, /* of shared memory that a kernel has beside what it asks for */
    MACKO_SELL_PAD = MACKO_SELL_STEP * MACKO_SELL_MAX_CHUNK, /* zeros after x in shared memory: where padding points */
};

typedef struct macko_sell_block {
    int32_t slot;        /* of the block's first stage after the head (its tail), counted from the end of all heads */
    int32_t group;       /* of group `warps` of the block, counted from the end of all first groups */
    int32_t row;         /* its first row */
    int32_t rows;        /* may be 0 */
    int32_t chunks;      /* 0 if its rows are empty */
    int32_t long_chunks; /* 1..chunks */
    int32_t steps;       /* of a long chunk */
    int32_t stages;      /* steps of warp 0 */
} macko_sell_block;

/* What a kernel needs for its first fetch comes first: parameters come to it 64 bytes at a time. */
typedef struct macko_sell_matrix {
    const uint8_t *data; /* [slots * macko_sell_slot_bytes(gap_bits)] */
    int32_t num_blocks, gap_bits, warps, head;
    macko_dtype dtype;              /* MACKO_F16 or MACKO_BF16 */
    const uint16_t *bases;          /* [groups * MACKO_SELL_LANES] column before which each task starts */
    const macko_sell_block *blocks; /* [num_blocks] */
    const int32_t *perm;            /* [rows] row of the matrix of each row of the layout */
    const int32_t *order;           /* [rows] row of the layout, see above */
    int64_t rows, cols, slots;
} macko_sell_matrix;

MACKO_FN int macko_sell_min(int a, int b) {
    return a < b ? a : b;
}

MACKO_FN int macko_sell_slot_bytes(int gap_bits) {
    return MACKO_SELL_LANES * (MACKO_SELL_STEP * 2 + gap_bits * 2);
}

MACKO_FN int macko_sell_groups(const macko_sell_block *b) {
    return (b->rows * b->chunks + MACKO_SELL_LANES - 1) / MACKO_SELL_LANES;
}

/* Groups of `steps` steps; the others have one less. */
MACKO_FN int macko_sell_long_groups(const macko_sell_block *b) {
    return (b->rows * b->long_chunks + MACKO_SELL_LANES - 1) / MACKO_SELL_LANES;
}

/* How many of the first `groups` groups belong to a warp. */
MACKO_FN int macko_sell_groups_of_warp(int groups, int warps, int warp) {
    return (groups + warps - 1 - warp) / warps;
}

/* Steps of a warp; never more than of the warp before it. */
MACKO_FN int macko_sell_steps_of_warp(const macko_sell_block *b, int warps, int warp) {
    return macko_sell_groups_of_warp(macko_sell_groups(b), warps, warp) * (b->steps - 1) +
           macko_sell_groups_of_warp(macko_sell_long_groups(b), warps, warp);
}

/* Slots of the first `stages` stages of a block. */
MACKO_FN int macko_sell_slots_before(const macko_sell_block *b, int warps, int stages) {
    int slots = 0;
    for (int warp = 0; warp < warps; warp += 2)
        slots += 2 * macko_sell_min(macko_sell_steps_of_warp(b, warps, warp), stages);
    return slots;
}

/* Slot in data where a stage of the head begins, and where the tail of a block does, its stages after the head. */
MACKO_FN int64_t macko_sell_head_slot(int block, int num_blocks, int warps, int stage) {
    return ((int64_t)stage * num_blocks + block) * warps;
}
MACKO_FN int64_t macko_sell_tail_slot(const macko_sell_block *b, int num_blocks, int warps, int head) {
    return macko_sell_head_slot(0, num_blocks, warps, head) + b->slot;
}

/* Slot in data of a warp's step (= stage) of a block. */
MACKO_FN int64_t macko_sell_slot(const macko_sell_block *b, int block, int num_blocks, int warps, int head, int stage,
                                 int warp) {
    if (stage < head) return macko_sell_head_slot(block, num_blocks, warps, stage) + warp;
    return macko_sell_tail_slot(b, num_blocks, warps, head) + macko_sell_slots_before(b, warps, stage) -
           macko_sell_slots_before(b, warps, head) + warp;
}

/* First task of a group in bases: of a warp's first group, of a later one (counted from there), of any. */
MACKO_FN int64_t macko_sell_first_base(int block, int warps, int group) {
    return ((int64_t)block * warps + group) * MACKO_SELL_LANES;
}
MACKO_FN int64_t macko_sell_later_base(const macko_sell_block *b, int num_blocks, int warps, int later) {
    return ((int64_t)num_blocks * warps + b->group + later) * MACKO_SELL_LANES;
}
MACKO_FN int64_t macko_sell_base(const macko_sell_block *b, int block, int num_blocks, int warps, int group) {
    return group < warps ? macko_sell_first_base(block, warps, group)
                         : macko_sell_later_base(b, num_blocks, warps, group - warps);
}

/* First step of a chunk within its row. */
MACKO_FN int macko_sell_chunk_start(const macko_sell_block *b, int chunk) {
    return chunk * (b->steps - 1) + macko_sell_min(chunk, b->long_chunks);
}

/* What the launch shape depends on, of one device. */
typedef struct macko_sell_device {
    int num_sms;
    int shared_per_sm;    /* bytes */
    int shared_per_block; /* bytes, the most that a block can ask for */
} macko_sell_device;

typedef struct macko_sell_shape {
    int warps;         /* that decode */
    int blocks_per_sm; /* resident at once: 1 or 2 */
    int num_blocks;
    int stages;       /* of the pipeline; 0: the matrix does not fit this device */
    int shared_bytes; /* of a block */
} macko_sell_shape;

MACKO_FN int macko_sell_x_bytes(int64_t cols) {
    return (int)((cols + MACKO_SELL_PAD) * 2 + 127) / 128 * 128;
}

/* Shared memory of a block but for the stages: x, zeros after it, one partial sum a task. */
MACKO_FN int macko_sell_fixed_bytes(int64_t cols) {
    return macko_sell_x_bytes(cols) + MACKO_SELL_MAX_SUMS * 4;
}

/*
 * Stages and shared memory for a matrix packed for `warps` warps: two blocks of 8 warps an SM where x fits twice, with 96 KB in
 * flight, else one of 12 with 80 KB. H200: 41 KB are 20 % slower at 8192 x 8192, 80 KB 1-4 % with PDL (but faster without, see
 * spmv_cuda.cu), 143 KB 2-5 %; 96 KB by one block are 0.6 % slower at 9216 x 36864, with PDL.
 * A block takes so much shared memory that no third one fits: the next launch's would be placed unevenly (+15 %).
 */
MACKO_FN macko_sell_shape macko_sell_launch_shape(int64_t cols, int gap_bits, int warps, macko_sell_device device) {
    const int stage = warps * macko_sell_slot_bytes(gap_bits), fixed = macko_sell_fixed_bytes(cols);
    macko_sell_shape shape = {warps, warps > 8 ? 1 : 2, 0, 0, 0};
    int available = macko_sell_min(device.shared_per_sm / 2 - 1024, device.shared_per_block) - MACKO_SELL_BARRIER_BYTES;
    if (shape.blocks_per_sm == 1 || available < fixed + MACKO_SELL_MIN_STAGES * stage) {
        shape.blocks_per_sm = 1;
        available = device.shared_per_block - MACKO_SELL_BARRIER_BYTES;
    }
    if (available < fixed + MACKO_SELL_MIN_STAGES * stage) return shape;
    const int wanted = ((shape.blocks_per_sm == 1 ? 80 : 48) * 1024 + stage / 2) / stage;
    const int alone = device.shared_per_sm / (shape.blocks_per_sm + 1); /* with this much, no further block fits */
    shape.stages = macko_sell_min((available - fixed) / stage, wanted < MACKO_SELL_MIN_STAGES
                                                                   ? MACKO_SELL_MIN_STAGES
                                                                   : macko_sell_min(wanted, MACKO_SELL_MAX_STAGES));
    shape.shared_bytes = fixed + shape.stages * stage;
    if (shape.shared_bytes < alone) shape.shared_bytes = macko_sell_min(alone, available);
    return shape;
}

/*
 * How to cut a matrix: one wave of blocks, so that each SM has the same work and none is waited for by another; more
 * only where a block would exceed its table of partial sums (macko_sell_totals.sums says so; then pack again with twice as many).
 */
MACKO_FN macko_sell_shape macko_sell_pack_shape(int64_t rows, int64_t cols, int gap_bits, macko_sell_device device) {
    macko_sell_shape shape = macko_sell_launch_shape(cols, gap_bits, 8, device);
    if (shape.stages == 0 || shape.blocks_per_sm == 1) {
        shape = macko_sell_launch_shape(cols, gap_bits, MACKO_SELL_MAX_WARPS, device);
        if (shape.stages == 0) shape = macko_sell_launch_shape(cols, gap_bits, 4, device); /* an SM with 100 KB */
    }
    int64_t blocks = (int64_t)device.num_sms * shape.blocks_per_sm;
    if (blocks > rows) blocks = rows;
    if (blocks < rows / 1024) blocks = rows / 1024;
    shape.num_blocks = blocks > 0 ? (int)blocks : 1;
    return shape;
}

/* Totals of a packing, found on the device and read by the host where it has to allocate. */
typedef struct macko_sell_totals {
    int64_t stored[MACKO_SELL_GAP_WIDTHS]; /* entries at each gap width, from MACKO_SELL_MIN_GAP_BITS */
    int64_t faults;                        /* rows of the canonical matrix that point outside of it */
    int64_t slots, groups;                 /* of data and bases, heads included */
    int64_t head;
    int64_t sums; /* the most partial sums of a block; over MACKO_SELL_MAX_SUMS the cut is not usable */
} macko_sell_totals;

#ifdef MACKO_HAVE_CUDA
#include "../macko/macko.h"

/*
 * Packing, in three calls between which the host reads *totals (device memory) and allocates. Everything is enqueued on
 * `stream` of the current device; nothing synchronises or allocates. Pointers are device pointers.
 */

/* Entries of each row at every gap width, counts [MACKO_SELL_GAP_WIDTHS][rows], and their totals. */
cudaError_t macko_sell_count_cuda(const macko_matrix *m, int32_t *counts, macko_sell_totals *totals,
                                  cudaStream_t stream);

/* The cut into blocks, of rows sorted in ranges of range_rows: of all rows, or of a panel's. counts [rows] of the chosen width; writes perm, order,
 * blocks, totals and starts [rows + 1], the first entry of each row of the layout in the scratch of the next call. line
 * [rows] is scratch. */
cudaError_t macko_sell_plan_cuda(const int32_t *counts, int64_t rows, int64_t range_rows, int64_t panel_rows, int warps,
                                 int num_blocks, int32_t *perm, int32_t *order, int64_t *starts, int64_t *line,
                                 macko_sell_block *blocks, macko_sell_totals *totals, cudaStream_t stream);

/* All of data and bases. scratch: values and columns, [stored] uint16 each. */
cudaError_t macko_sell_write_cuda(const macko_matrix *m, const macko_sell_matrix *s, const int64_t *starts,
                                  uint16_t *values, uint16_t *columns, uint8_t *data, uint16_t *bases,
                                  cudaStream_t stream);

/* Rows [first, first + count) of the dense matrix, w [count, cols]: all of them, or one whole panel. Other ranges would
 * write outside of w. */
cudaError_t macko_sell_unpack_cuda(const macko_sell_matrix *s, int64_t first, int64_t count, void *w,
                                   cudaStream_t stream);

/* RMSNorm of x before the product: x / sqrt(mean(x^2) + eps), times weight [cols]. */
typedef struct macko_sell_norm {
    const void *weight;
    float eps;
} macko_sell_norm;

/* y = W x + bias; bias may be NULL. Same bits every run. Where norm is not NULL, W is multiplied by the normalised x: then
 * x and weight begin at a multiple of 16 bytes, and cols is a multiple of 8. */
cudaError_t macko_sell_spmv_cuda(const macko_sell_matrix *s, const void *x, const macko_sell_norm *norm,
                                 const void *bias, void *y, cudaStream_t stream);

/* y [tokens, rows] = x [tokens, cols] W^T + bias, up to 8 tokens a launch, as many as fit shared memory. Same bits every
 * run, and of the same number of tokens whatever the others are. */
cudaError_t macko_sell_spmm_cuda(const macko_sell_matrix *s, int64_t tokens, const void *x, const void *bias, void *y,
                                 cudaStream_t stream);

/* The current device's sizes. */
cudaError_t macko_sell_device_cuda(macko_sell_device *device);
#endif

MACKO_C_END
