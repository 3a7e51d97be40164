/*
 * Who multiplies what in the kernel for many tokens: Stream-K, for host and device. Clusters of two blocks are
 * persistent. Whole rounds of output tiles are dealt out one a cluster. Those beyond whole rounds, or beyond all but one,
 * are split over all clusters, in half slabs, so that all end at about the same time. Here each three clusters take two
 * tiles of 32 half slabs:
 *
 *     half slabs    0                      24      32           45                 64
 *     output tiles  |------------ tile 0 -----------|------------ tile 1 -----------|
 *     cluster c     [== 24, begins tile 0 ==]
 *     cluster c-1                           [== 8 ==[==== 13 ====]  ends tile 0, begins tile 1
 *     cluster c-2                                                [ 19, ends tile 1 =]
 *
 * The cluster with a tile's beginning stores it: it adds the partial sums of the others (fix-up), which come after it
 * in the tile and before it in the grid. Blocks start in the order of their index, so nobody waits for one that has not
 * started, even where they do not all fit at once.
 *
 * A cluster's share, in the order in which it works:
 *     [ whole tiles ][ the end of a tile: partial sums to the workspace ][ the beginning of a tile, with its fix-up ]
 * Whole tiles come first: all clusters walk the same columns of them at the same time, and find in L2 what the others
 * have read. After split ones each stood at columns of its own, and 4096 x 11008 by 4096 tokens took 2.0 GB from memory
 * for 0.47 GB (H100, ncu, 2026-11-26).
 * Groups of clusters do this alike, each so many tiles of its own: as many clusters walk the same columns as there are
 * groups. A group's tiles are neighbours in the raster, so some of these clusters have the same rows, and some the same
 * tokens.
 * Where split tiles are more than half as many as clusters, each may have a cluster for all but its end, and the others
 * take several ends each, so that all walk one of two columns:
 *
 *     half slabs         0                      24      32        kept = 24
 *     output tile 0      [== 24, cluster 3, fixes up ====][= 8 =]
 *     output tile 1      [== 24, cluster 2, fixes up ====][= 8 =]  cluster 0 has all three ends
 *     output tile 2      [== 24, cluster 1, fixes up ====][= 8 =]
 *
 * A segment is what a share has of one tile. Both blocks of a cluster work on it: two halves of its half slabs
 * (split-K), or all of them for neighbouring rows.
 */
#pragma once

#include <stdbool.h>

#include "slab.h"

enum {
    MACKO_SLAB_MOST_CLUSTERS = 72, /* of a launch: of two blocks, each with an SM */
    MACKO_SLAB_CLUSTER_BLOCKS = 2, /* of a cluster */
    MACKO_SLAB_HALF_TILES = MACKO_SLAB_TILES / 2,
    MACKO_SLAB_HALF_COLS = MACKO_SLAB_HALF_TILES * MACKO_SLAB_TILE_COLS,
};

/* Of a kernel. The output tile of a cluster of two is row_blocks * (2 / split_k) row blocks by `tokens`; one of four has
 * row_blocks by `tokens`, whole, and then it ends: nothing is shared among such clusters. */
typedef struct macko_slab_many_shape {
    int tokens, row_blocks; /* of a block; each row block is a consumer warpgroup's */
    int split_k; /* blocks of a cluster that have the same rows, and a share of the columns each: 1, 2 or 4 */
} macko_slab_many_shape;

/* For macko_slab_divide. */
typedef struct macko_slab_divisor {
    uint32_t factor;
    int shift;
} macko_slab_divisor;

typedef struct macko_slab_schedule {
    int row_blocks, slabs, half_slabs; /* of the matrix; of a row block, those with a column in the matrix */
    int row_tiles, token_tiles;        /* output tiles: their grid */
    int clusters, split;               /* the first `split` output tiles are split over all clusters */
    int kept; /* half slabs of a split tile before its end; half_slabs: tiles are not split into beginning and end */
    /* Where each begins: half slabs of the split tiles, tile after tile; first those before all ends, then the ends. */
    int shares[MACKO_SLAB_MOST_CLUSTERS + 1];
    int first_slabs[MACKO_SLAB_MOST_CLUSTERS *
                    MACKO_SLAB_CLUSTER_BLOCKS];               /* of each block's first row block; -1: none */
    macko_slab_divisor by_clusters, by_half_slabs, by_raster; /* raster: raster_rows x all token tiles */
    macko_slab_divisor by_kept, by_end;                       /* end: half_slabs - kept */
    int raster_rows;                                          /* row tiles that follow each other, at each token tile */
} macko_slab_schedule;

/* What a cluster works on. */
typedef struct macko_slab_share {
    const macko_slab_schedule *schedule;
    macko_slab_many_shape shape;
    int rank, cluster;     /* the block's in its cluster; the cluster's */
    int split_begin;       /* of its half slabs of split tiles */
    int whole, half_slabs; /* half slabs of whole tiles; all of its own */
} macko_slab_share;

/* What a share has of an output tile: half slabs [first, end), of these the block's own [own, own_end). */
typedef struct macko_slab_segment {
    int tile, first, end, own, own_end;
    bool fixes_up; /* adds up the partial sums that other clusters have of the tile */
} macko_slab_segment;

/* Functions of a shape, which constants of C++ call too. */
#ifdef __cplusplus
#define MACKO_SLAB_SHAPE_FN constexpr MACKO_FN
#else
#define MACKO_SLAB_SHAPE_FN MACKO_FN
#endif

MACKO_SLAB_SHAPE_FN int macko_slab_cluster_blocks(macko_slab_many_shape shape) {
    return shape.split_k > MACKO_SLAB_CLUSTER_BLOCKS ? shape.split_k : MACKO_SLAB_CLUSTER_BLOCKS;
}

MACKO_FN int macko_slab_min(int a, int b) {
    return a < b ? a : b;
}

MACKO_FN macko_slab_divisor macko_slab_divisor_of(int64_t by) {
    macko_slab_divisor d = {0, 0};
    while (1ll << d.shift < by) d.shift++;
    d.factor = (uint32_t)(((1ll << (31 + d.shift)) + by - 1) / by);
    return d;
}
/* Of numbers from 0 on. */
MACKO_FN int macko_slab_divide(int number, const macko_slab_divisor *by) {
    return (int)((uint64_t)((uint32_t)number << 1) * by->factor >> 32 >> by->shift);
}

/* Tells the compiler that all lanes have the same. Divisions hide it, and pipeline states in ordinary registers cost
 * the products 6 % (H200). */
MACKO_FN int macko_slab_uniform(int value) {
#ifdef __CUDA_ARCH__
    return __shfl_sync(0xffffffffu, value, 0);
#else
    return value;
#endif
}

/* Shares begin from the last cluster on: who has a tile's end is started before who has its beginning. */
MACKO_FN int macko_slab_share_index(const macko_slab_share *share) {
    return share->schedule->clusters - 1 - share->cluster;
}

MACKO_FN macko_slab_share macko_slab_share_of(const macko_slab_schedule *schedule, macko_slab_many_shape shape,
                                              uint32_t block) {
    macko_slab_share s;
    s.schedule = schedule;
    s.shape = shape;
    const uint32_t blocks = (uint32_t)macko_slab_cluster_blocks(shape);
    s.rank = (int)(block % blocks);
    s.cluster = (int)(block / blocks);
    s.split_begin = macko_slab_uniform(schedule->shares[macko_slab_share_index(&s)]);
    const int end = macko_slab_uniform(schedule->shares[macko_slab_share_index(&s) + 1]);
    const int whole = schedule->row_tiles * schedule->token_tiles - schedule->split;
    s.whole =
        macko_slab_uniform(macko_slab_divide(whole - s.cluster + schedule->clusters - 1, &schedule->by_clusters)) *
        schedule->half_slabs;
    s.half_slabs = end - s.split_begin + s.whole;
    return s;
}

/* The segment that begins at a half slab of the share. A share is walked so; the cursor is no pointer's, as ptxas makes
 * other code of that:
 *     for (int next = 0; next < share.half_slabs;) {
 *         const macko_slab_segment segment = macko_slab_segment_at(&share, next);
 *         next += macko_slab_length(&segment);
 */
MACKO_FN macko_slab_segment macko_slab_segment_at(const macko_slab_share *share, int half) {
    const macko_slab_schedule *schedule = share->schedule;
    const bool whole = half < share->whole;
    const int at = whole ? half : share->split_begin + half - share->whole;
    /* Shares of split tiles: the beginnings, tile after tile, then what is left of each. */
    const int begins = schedule->split * schedule->kept;
    const bool end = !whole && at >= begins;
    const int length = whole ? schedule->half_slabs : end ? schedule->half_slabs - schedule->kept : schedule->kept;
    const int nth = end ? macko_slab_divide(at - begins, &schedule->by_end)
                        : macko_slab_divide(at, whole ? &schedule->by_half_slabs : &schedule->by_kept);
    const int inside = at - (end ? begins : 0) - nth * length;
    macko_slab_segment s;
    s.tile = whole ? schedule->split + nth * schedule->clusters + share->cluster : nth;
    s.first = inside + (end ? schedule->kept : 0);
    s.end = s.first + macko_slab_min(length - inside, share->half_slabs - half);
    s.fixes_up = s.first == 0 && s.end < schedule->half_slabs;
    const int each = (s.end - s.first + share->shape.split_k - 1) / share->shape.split_k;
    s.own = macko_slab_min(s.end, s.first + (share->shape.split_k > 1 ? share->rank * each : 0));
    s.own_end = macko_slab_min(s.end, s.own + each);
    return s;
}
MACKO_FN int macko_slab_length(const macko_slab_segment *segment) {
    return segment->end - segment->first;
}

/* A block takes the second half of a slab if its half slabs begin there, then the first half of one if they end there,
 * then whole slabs: how many, how many of them are no whole slab, and the nth one. */
MACKO_FN int macko_slab_own_count(const macko_slab_segment *s) {
    return s->own_end - s->own;
}
MACKO_FN int macko_slab_begins_inside(const macko_slab_segment *s) {
    return s->own < s->own_end ? s->own % 2 : 0;
}
MACKO_FN int macko_slab_singles(const macko_slab_segment *s) {
    return s->own < s->own_end ? s->own % 2 + s->own_end % 2 : 0;
}
MACKO_FN int macko_slab_nth(const macko_slab_segment *s, int i) {
    return i < macko_slab_begins_inside(s) ? s->own
           : i < macko_slab_singles(s)     ? s->own_end - 1
                                           : s->own + i - macko_slab_singles(s) + macko_slab_begins_inside(s);
}

/* How many other shares have partial sums of the tile that this one fixes up: those that follow it. */
MACKO_FN int macko_slab_contributors(const macko_slab_share *share, int tile) {
    const macko_slab_schedule *schedule = share->schedule;
    int count = 0;
    if (schedule->kept < schedule->half_slabs) return 1;
    while (schedule->shares[macko_slab_share_index(share) + 1 + count] < (tile + 1) * schedule->half_slabs) count++;
    return macko_slab_uniform(count);
}

/* Which partial sums in the workspace a share has of a tile: who fixes up its own takes those that follow its index. */
MACKO_FN int macko_slab_given(const macko_slab_share *share, int tile) {
    return share->schedule->kept < share->schedule->half_slabs ? tile + 1 : macko_slab_share_index(share);
}

/* Where an output tile lies. schedule->raster_rows row tiles follow each other at all token tiles, so both operands are
 * found in L2. */
typedef struct macko_slab_place {
    int row_tile, token_tile;
} macko_slab_place;
MACKO_FN macko_slab_place macko_slab_place_of(const macko_slab_schedule *schedule, int tile) {
    const int raster = macko_slab_divide(tile, &schedule->by_raster), first = raster * schedule->raster_rows;
    const int inside = tile - first * schedule->token_tiles;
    const int rows = macko_slab_min(schedule->raster_rows, schedule->row_tiles - first);
    macko_slab_place place;
    place.token_tile = inside / rows;
    place.row_tile = first + inside - place.token_tile * rows;
    return place;
}
/* The first of a block's row blocks. */
MACKO_FN int macko_slab_first_row_block(const macko_slab_share *share, int row_tile) {
    return (share->shape.split_k > 1 ? row_tile : row_tile * MACKO_SLAB_CLUSTER_BLOCKS + share->rank) *
           share->shape.row_blocks;
}
