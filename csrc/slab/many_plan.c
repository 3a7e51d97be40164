/* The plan for many tokens: candidates, how long each takes and at what energy, and the choice. */
#include "many_plan.h"

#include <limits.h>
#include <string.h>

static const macko_slab_many_shape SHAPES[] = {
#define SHAPE(tokens, row_blocks, split_k) {tokens, row_blocks, split_k},
    MACKO_SLAB_MANY_SHAPES(SHAPE)
#undef SHAPE
};
_Static_assert(sizeof SHAPES / sizeof *SHAPES == MACKO_SLAB_MANY_NUM_SHAPES, "one for each");

static int64_t divide_up(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}
static int64_t min_of(int64_t a, int64_t b) {
    return a < b ? a : b;
}
static int64_t max_of(int64_t a, int64_t b) {
    return a > b ? a : b;
}

bool macko_slab_many_fit_stages(macko_slab_many_shape shape, int widest, int shared_bytes,
                                macko_slab_many_stages *stages) {
    const int available = shared_bytes - MACKO_SLAB_MANY_BARRIER_BYTES;
    stages->slab_bytes = (widest * MACKO_SLAB_UNIT + MACKO_SLAB_OVERREAD + 127) / 128 * 128;
    const int slabs_bytes = shape.row_blocks * stages->slab_bytes,
              least = MACKO_SLAB_MANY_MIN_SLAB_STAGES * slabs_bytes;
    stages->x = (int)min_of((available - least) / macko_slab_x_stage_bytes(shape), macko_slab_max_x_stages(shape));
    if (available < least || stages->x < macko_slab_min_x_stages(shape)) return false;
    stages->slabs = (int)min_of((available - stages->x * macko_slab_x_stage_bytes(shape)) / slabs_bytes,
                                MACKO_SLAB_MANY_MAX_SLAB_STAGES);
    return true;
}

enum {
    RASTER_ROWS = 8,  /* where the period of split tiles asks for nothing else */
    MOST_PERIOD = 16, /* tiles; with more, too few clusters walk the same columns */
};

/* Row blocks of the output tile of a cluster. */
static int64_t tile_row_blocks(macko_slab_many_shape shape) {
    return shape.row_blocks * (macko_slab_cluster_blocks(shape) / shape.split_k);
}

/* What takes how many clocks of an SM: fitted to the cycles of all ways at 14 shapes by 128 to 1024 tokens (H100, density
 * 0.5, 2026-11-27), with 192 tokens at 19 shapes by 192 to 768 (2026-11-28), then 320 tokens, ends and dense12's at 11
 * shapes by 128 to 768 of tile, dense12 and sparse11, where a choice by clocks alone is 0.3 % from the fewest on average
 * (H200, 2026-11-28); blocks of 160 tokens by the wavefronts of shared memory that they have less (docs/kernels.md). While
 * one warpgroup does these things the other multiplies, so most are less than a clock in the kernel says. */
typedef struct clocks {
    int64_t half_slab; /* its products */
    int64_t exchange;  /* of partial sums by the blocks of a cluster */
    int64_t give;      /* partial sums to the workspace: an SM writes 27 bytes a clock */
    int64_t reach;     /* until another SM has them */
    int64_t add;       /* fix-up of what has come while products ran; what comes later takes three times as long */
    int64_t epilogue;  /* and until the next products */
} clocks;

static clocks clocks_of(macko_slab_many_shape shape, bool reads_ahead) {
    const int fitted = shape.tokens > 256   ? 5350
                       : shape.tokens > 192 ? (shape.split_k > 1 ? 4160 : 4240)
                       : shape.tokens > 160 ? (shape.row_blocks > 2 ? (shape.split_k > 1 ? 5100 : 5240)
                                                                    : (shape.split_k > 1 ? 3420 : 3560))
                       : shape.tokens > 128 ? 3150
                                            : (shape.row_blocks > 2 ? 4450 : 3000);
    /* Of dense12, the one codec that does. One factor, so that these shapes stay as they were among themselves. */
    const int slab = reads_ahead && macko_slab_reads_ahead(shape) ? fitted * 90 / 100 : fitted;
    const int sums = shape.row_blocks * macko_slab_partial_bytes(shape);
    const int64_t exchange = shape.split_k > 2 ? 3 * sums / 12 - 2600 /* and what a launch of whole tiles is shorter */
                             : shape.split_k > 1 ? 960 + sums / 21
                                                 : 0;
    return (clocks){slab / 2 / shape.split_k, exchange, sums / 27, 6300, sums / 100, 2300 + sums / 150};
}

/* Clocks until the last cluster ends. Each does whole tiles for so many clocks, and of the split ones the half slabs from
 * shares[index] on. Or some number from `least` on, where it is not less. */
static int64_t time_of(const int *shares, int clusters, int half_slabs, int64_t whole, const clocks *c, int64_t least) {
    int64_t given[MACKO_SLAB_MOST_CLUSTERS], last = 0; /* given: when a share's partial sums are there */
    for (int i = clusters - 1; i >= 0 && last < least; i--) {
        int at = shares[i];
        const int end = shares[i + 1], in_tile = at % half_slabs;
        int64_t time = whole;
        if (in_tile && at < end) {
            const int count = (int)min_of(end - at, half_slabs - in_tile);
            time += count * c->half_slab + c->exchange + c->give;
            given[i] = time + c->reach;
            at += count;
        }
        time += (end - at) / half_slabs * (half_slabs * c->half_slab + c->exchange + c->epilogue);
        const int head = (end - at) % half_slabs;
        if (head) {
            time += head * c->half_slab + c->exchange;
            for (int k = i + 1; shares[k] < end - head + half_slabs; k++)
                time = max_of(time, given[k]) + c->add * (k > i + 1 ? 3 : 1);
            time += c->epilogue;
        }
        last = max_of(last, time);
    }
    return last;
}

/* Tiles that are split, and who has a share of them. */
typedef struct split_work {
    int tiles, clusters, half_slabs, split_k;
    int64_t whole; /* clocks of a cluster's whole tiles, before */
    clocks clocks; /* of the split ones */
} split_work;

/* With how many half slabs a share may begin a tile in so many clocks, where each of the others gives up to `ends` of
 * the rest in time; 0: it may not. */
static int head_of(const split_work *s, int64_t time, int64_t ends, int others) {
    const clocks *c = &s->clocks;
    for (int i = 1; i <= others; i++) {
        const int64_t after = c->exchange + c->add * (3 * i - 2) + c->epilogue;
        const int head = (int)min_of(s->half_slabs - 1, (time - after) / c->half_slab);
        if (head < 1) break;
        if (s->half_slabs - head <= i * ends) return head;
    }
    return 0;
}

/* Deals the half slabs out, in shares [clusters + 1], to one after another as many as it can end by `latest`. False where
 * some are left over. */
static bool deal(const split_work *s, int64_t latest, int *shares) {
    const clocks *c = &s->clocks;
    const int half_slabs = s->half_slabs, total = s->tiles * half_slabs;
    const int64_t tile = half_slabs * c->half_slab + c->exchange + c->epilogue;
    /* So many of a tile's end, first in a share, are given in time for whoever has its beginning. */
    const int64_t ends =
        (latest - s->whole - 2 * c->exchange - c->give - c->reach - c->add - c->epilogue) / c->half_slab;
    for (int i = 0, at = 0; i <= s->clusters; i++) {
        shares[i] = at;
        const int left = (half_slabs - at % half_slabs) % half_slabs, end = (int)min_of(left, max_of(1, ends));
        at += end;
        if (end < left) continue;
        const int64_t time = latest - s->whole - (end ? end * c->half_slab + c->exchange + c->give : 0);
        const int whole = (int)min_of((total - at) / half_slabs, max_of(0, time / tile));
        at += whole * half_slabs;
        if (at == total) continue;
        const int head = head_of(s, time - whole * tile, ends, s->clusters - 1 - i);
        /* An exchange of sums needs that a block has some of this tile or of the next one (many_kernel.cuh). */
        if (s->split_k == 1 || end != 1 || whole || head != 1) at += head;
    }
    return shares[s->clusters] == total;
}

/* Deals so that the last cluster ends soonest; says when, INT64_MAX where that is not before `least`. */
static int64_t deal_best(const split_work *s, int64_t least, int *shares) {
    const clocks *c = &s->clocks;
    const int64_t step = c->half_slab / 8, all = s->tiles * (int64_t)s->half_slabs * c->half_slab;
    int64_t early = s->whole + all / s->clusters, late = min_of(least, s->whole + all + 100 * c->half_slab);
    int tried[MACKO_SLAB_MOST_CLUSTERS + 1];
    bool found = false;
    while (early < late) {
        const int64_t latest = (early + late) / 2;
        if (!deal(s, latest, tried)) {
            early = latest + step;
            continue;
        }
        late = latest - step;
        const int64_t time = time_of(tried, s->clusters, s->half_slabs, s->whole, c, least);
        if (time >= least) continue;
        least = time;
        found = true;
        memcpy(shares, tried, (size_t)(s->clusters + 1) * sizeof *shares);
    }
    return found ? least : INT64_MAX;
}

/* The best plan so far, and what is looked for. */
typedef struct search {
    const macko_slab_many_problem *problem;
    const macko_slab_many_way *way;
    int64_t least;  /* its clocks and those of its energy; INT64_MAX: no plan yet */
    int64_t blocks; /* at once, of the shape of which most run: SMs */
    macko_slab_many_plan *plan;
} search;

/* Bytes of the tokens, by MACKO_SLAB_MANY_TOKENS_UNIT, as plans are kept. */
static int64_t bytes_of_tokens(const macko_slab_many_problem *p) {
    return divide_up(p->tokens, MACKO_SLAB_MANY_TOKENS_UNIT) * MACKO_SLAB_MANY_TOKENS_UNIT * p->cols * 2;
}
/* How far L2 is from holding them, in percent: 0 up to 12 MB, 100 from 32 MB on, as half of an H100's 50 MB is far from an
 * SM. */
static int64_t percent_over_l2(const macko_slab_many_problem *p) {
    const int64_t least = 12 << 20, most = 32 << 20;
    return 100 * (max_of(least, min_of(bytes_of_tokens(p), most)) - least) / (most - least);
}
/* How much longer a half slab of a split tile takes where so many clusters walk columns of their own: what they read they
 * do not share, and L2 or memory is waited for. Of groups alike, which the raster follows, as many walk the same columns as
 * there are groups (up to 37 MB of tokens: 1.00 to 1.09 times as long; 1.1 to 1.4 where the raster does not follow). With
 * more tokens groups were not measured, and single clusters took 1.47 to 1.58 times as long (all H100). */
static int64_t split_percent(const macko_slab_many_problem *p, int clusters) {
    return bytes_of_tokens(p) > 40 << 20 ? 155 : 101 + clusters / 2;
}

/* Deals to groups of clusters alike, of `first` to `last` tiles each, which the raster follows, by clocks alone: what the
 * groups give away differs little. INT64_MAX where that is not before `latest`. */
static int64_t deal_groups(const macko_slab_many_problem *p, const split_work *s, int first, int last, int64_t latest,
                           macko_slab_schedule *found) {
    int64_t least = latest;
    for (int tiles = first; tiles <= min_of(last, s->tiles); tiles++) {
        const int clusters = s->clusters / (int)divide_up(s->tiles, tiles);
        if (!clusters || (tiles > found->row_tiles && tiles % found->row_tiles)) continue;
        split_work group = {tiles, clusters, s->half_slabs, s->split_k, s->whole, s->clocks};
        if (tiles > 1) group.clocks.half_slab = s->clocks.half_slab * split_percent(p, clusters) / 100;
        int shares[MACKO_SLAB_MOST_CLUSTERS + 1];
        const int64_t time = deal_best(&group, least, shares);
        if (time == INT64_MAX) continue;
        least = time;
        for (int i = 0; i <= s->clusters; i++)
            found->shares[i] =
                (int)min_of(s->tiles * s->half_slabs, i / clusters * tiles * s->half_slabs + shares[i % clusters]);
        found->raster_rows = tiles < 3 ? RASTER_ROWS : tiles;
    }
    return least < latest ? least : INT64_MAX;
}

/* Deals so that clusters have the beginning of a tile each, and the others several ends; false where it does not pay. */
static bool deal_ends(macko_slab_schedule *s, macko_slab_many_shape shape, const clocks *c, int64_t whole,
                      int64_t *time) {
    const int others = s->clusters - s->split, each = others > 0 ? (int)divide_up(s->split, others) : 0;
    enum { MORE = 3500 }; /* clocks, as ends stand at columns of their own: fitted, as those of clocks_of are */
    *time = INT64_MAX;
    if (!each || shape.split_k > 1) return false;
    /* Of fewer half slabs a warpgroup could be an end ahead of the other one: the x pipeline has five tiles. */
    for (int kept = 1; kept + 4 <= s->half_slabs; kept++) {
        const int64_t given = each * ((s->half_slabs - kept) * c->half_slab + c->give) + c->reach,
                      took = whole + max_of(kept * c->half_slab, given) + c->add + c->epilogue + MORE;
        if (took >= *time) continue;
        *time = took;
        s->kept = kept;
    }
    for (int i = 0; i <= s->clusters; i++)
        s->shares[i] = (int)min_of(i, s->split) * s->kept +
                       (int)min_of(s->split, max_of(0, i - s->split) * each) * (s->half_slabs - s->kept);
    return *time < INT64_MAX;
}

/* Under load power decides the clock: a way that leaves SMs idle runs at a higher one, and what costs energy takes longer.
 * So a plan is judged by its clocks and by clocks for its energy: of the products at the tensor cores' pace, by a factor of
 * the shape, and of giving sums away, for so many clocks of a block. 0.48 x clocks + 0.52 x energy predicts the times under
 * load of 536 ways at 105 products by 256 to 4096 tokens (tile, dense12, sparse11) to 1.3 %, root mean square; clocks alone,
 * to 2.8 % (H200, 700 W, 2026-11-28). Of 127 products by 96 to 16384 tokens that it plans otherwise most are faster. Up to
 * 64 tokens memory is the limit, and nobody has measured what power does. */
static int64_t energy_of(const search *s, macko_slab_many_shape shape, int64_t half_slabs, int64_t giving) {
    enum { FMA = 2048 };                   /* of an SM's tensor cores in a clock */
    enum { PRODUCTS = 108, GIVING = 154 }; /* percent of clocks: 0.52 / 0.48, and 1.43 times that */
    if (s->problem->tokens <= 64) return 0;
    const int64_t pace = tile_row_blocks(shape) * MACKO_SLAB_ROWS * shape.tokens * MACKO_SLAB_HALF_COLS / FMA;
    /* A weight is decoded once for a block's tokens, three row blocks fetch them once, and blocks with the same rows each
     * for itself; what four of these take is from five products only. */
    const int decoding = 80 + 5120 / shape.tokens,
              fetching = shape.split_k > 2   ? 122
                         : shape.split_k > 1 ? 110
                                             : 100,
              percent = decoding * fetching / 100 - (shape.row_blocks > 2 ? 6 : 0);
    const int64_t products = half_slabs * pace / 100 * percent * PRODUCTS / 100 / s->blocks;
    return products + giving * macko_slab_cluster_blocks(shape) * GIVING / 100 / s->blocks;
}

/* How often sums are given away: by each share that begins inside a tile, or with each end. */
static int count_given(const macko_slab_schedule *s) {
    if (s->kept < s->half_slabs) return s->split;
    int given = 0;
    for (int i = 0; i < s->clusters; i++) given += s->shares[i] % s->half_slabs && s->shares[i] < s->shares[i + 1];
    return given;
}

/* So many clusters of a shape, and so many split tiles, in a way of MACKO_SLAB_SPLIT_. */
static void consider(search *s, macko_slab_many_shape shape, int64_t clusters, int64_t split_tiles, int kind) {
    const macko_slab_many_problem *p = s->problem;
    macko_slab_schedule found = {.row_blocks = (int)macko_slab_row_blocks(p->rows),
                                 .slabs = (int)macko_slabs_across(p->cols),
                                 .half_slabs = (int)divide_up(p->cols, MACKO_SLAB_HALF_COLS),
                                 .token_tiles = (int)divide_up(p->tokens, shape.tokens),
                                 .clusters = (int)clusters,
                                 .split = (int)split_tiles,
                                 .kept = (int)divide_up(p->cols, MACKO_SLAB_HALF_COLS),
                                 .raster_rows = RASTER_ROWS};
    found.row_tiles = (int)divide_up(found.row_blocks, tile_row_blocks(shape));
    const int64_t tiles = (int64_t)found.row_tiles * found.token_tiles, half_slabs = found.half_slabs;
    clocks c = clocks_of(shape, p->reads_ahead);
    /* A cluster whose blocks have the same rows reads as many tokens for half of them (8192 x 28672 by 8192: 1.09). */
    if (shape.split_k > 1) c.half_slab += c.half_slab * percent_over_l2(p) / 1000;
    const int64_t whole =
        divide_up(tiles - split_tiles, clusters) * (half_slabs * c.half_slab + c.exchange + c.epilogue);
    const int64_t latest = s->least - energy_of(s, shape, tiles * half_slabs, 0);
    if (s->way) {
        if (s->least < INT64_MAX || kind != s->way->split) return;
    } else if (whole + split_tiles * half_slabs / clusters * c.half_slab >= latest) {
        return;
    }
    int64_t time = whole, giving = 0, workspace_bytes = 0;
    if (split_tiles) {
        if (kind == MACKO_SLAB_SPLIT_ENDS) {
            c.half_slab += c.half_slab * percent_over_l2(p) / 2500;
            if (!deal_ends(&found, shape, &c, whole, &time)) return;
        } else {
            const split_work work = {(int)split_tiles, (int)clusters, (int)half_slabs, shape.split_k, whole, c};
            const int first = (int)min_of(kind == MACKO_SLAB_SPLIT_EVENLY ? 1 : 2, split_tiles);
            time = deal_groups(p, &work, first, kind == MACKO_SLAB_SPLIT_EVENLY ? 1 : MOST_PERIOD, latest, &found);
            if (time == INT64_MAX) return;
        }
        while (!whole && found.shares[found.clusters - 1] == split_tiles * half_slabs) found.clusters--;
        workspace_bytes = macko_slab_many_flag_bytes(shape, found.clusters) +
                          (int64_t)found.clusters * macko_slab_cluster_blocks(shape) * shape.row_blocks *
                              macko_slab_partial_bytes(shape);
        giving = count_given(&found) * c.give;
    }
    time += energy_of(s, shape, tiles * half_slabs, giving);
    if (time >= s->least) return;
    s->least = time;
    *s->plan = (macko_slab_many_plan){workspace_bytes, shape, found};
}

/* A shape, with whole tiles only or with some that are split. */
static void consider_shape(search *s, macko_slab_many_shape shape, int at_once, bool splits) {
    const macko_slab_many_problem *p = s->problem;
    const macko_slab_many_way *way = s->way;
    const int64_t half_slabs = divide_up(p->cols, MACKO_SLAB_HALF_COLS),
                  clusters = min_of(at_once, MACKO_SLAB_MOST_CLUSTERS);
    if (!clusters) return;
    if (half_slabs < shape.split_k) return;                   /* one of the two blocks would never have any */
    if (!way && shape.tokens == 64 && p->tokens > 64) return; /* memory is the limit: as long as 128 take */
    if (way && (way->rows != shape.row_blocks * MACKO_SLAB_ROWS || way->tokens != shape.tokens ||
                way->split_k != shape.split_k))
        return;
    const int64_t tiles =
        divide_up(macko_slab_row_blocks(p->rows), tile_row_blocks(shape)) * divide_up(p->tokens, shape.tokens);
    const int64_t most_blocks = MACKO_SLAB_MOST_CLUSTERS * MACKO_SLAB_CLUSTER_BLOCKS;
    if (shape.split_k > 2 && (splits || tiles > min_of(clusters, most_blocks / shape.split_k))) return;
    if (!splits) {
        consider(s, shape, min_of(tiles, clusters), 0, MACKO_SLAB_SPLIT_NONE);
        return;
    }
    /* What a last round of whole tiles leaves over, or that and a round more, so that no tile is split often. */
    const int64_t left = tiles % clusters;
    for (int64_t split = left; left && split <= tiles && split <= left + clusters; split += clusters) {
        const int64_t used = min_of(clusters, split * half_slabs);
        if (split * half_slabs > INT32_MAX / 2 || (used < clusters && split < tiles)) break;
        if (2 * split <= used)
            consider(s, shape, used, split, MACKO_SLAB_SPLIT_EVENLY);
        else
            consider(s, shape, used, split, MACKO_SLAB_SPLIT_ENDS);
        consider(s, shape, used, split, MACKO_SLAB_SPLIT_SOME);
    }
}

/* Which slab each block begins with, so that it asks for this before it has worked out anything. */
static void find_first_slabs(macko_slab_schedule *schedule, macko_slab_many_shape shape) {
    for (int block = 0; block < schedule->clusters * macko_slab_cluster_blocks(shape); block++) {
        const macko_slab_share share = macko_slab_share_of(schedule, shape, (uint32_t)block);
        int *first = &schedule->first_slabs[block];
        *first = -1;
        for (int next = 0; *first < 0 && next < share.half_slabs;) {
            const macko_slab_segment segment = macko_slab_segment_at(&share, next);
            next += macko_slab_length(&segment);
            if (!macko_slab_own_count(&segment)) continue;
            const int row_tile = macko_slab_place_of(schedule, segment.tile).row_tile;
            *first = macko_slab_first_row_block(&share, row_tile) * schedule->slabs + macko_slab_nth(&segment, 0) / 2;
        }
    }
}

bool macko_slab_many_choose(const macko_slab_many_problem *problem, const macko_slab_many_way *way,
                            macko_slab_many_plan *plan) {
    search s = {problem, way, INT64_MAX, 0, plan};
    for (int i = 0; i < MACKO_SLAB_MANY_NUM_SHAPES; i++)
        s.blocks = max_of(s.blocks, min_of(problem->clusters[i], MACKO_SLAB_MOST_CLUSTERS) *
                                        macko_slab_cluster_blocks(SHAPES[i]));
    /* What takes long to consider comes last, and most of it is seen to be slower at once. */
    for (int splits = 0; splits < 2; splits++)
        for (int i = 0; i < MACKO_SLAB_MANY_NUM_SHAPES; i++)
            consider_shape(&s, SHAPES[i], problem->clusters[i], splits);
    if (s.least == INT64_MAX) return false;
    macko_slab_schedule *schedule = &plan->schedule;
    schedule->by_clusters = macko_slab_divisor_of(schedule->clusters);
    schedule->by_half_slabs = macko_slab_divisor_of(schedule->half_slabs);
    schedule->by_kept = macko_slab_divisor_of(schedule->kept);
    schedule->by_end = macko_slab_divisor_of(max_of(1, schedule->half_slabs - schedule->kept));
    schedule->by_raster = macko_slab_divisor_of(schedule->raster_rows * (int64_t)schedule->token_tiles);
    find_first_slabs(schedule, plan->shape);
    return true;
}
