/* Hierarchical block extraction on the CPU: pairs of rows that share columns become blocks, pairs of blocks higher ones. */
#include <stdlib.h>
#include <string.h>

#include "../../csrc/core/cpu.h"
#include "plan.h"

/* shared[i * MACKO_EC_TILE + j], i < j < members: columns that both have. */
MACKO_INLINE void count_shared_any(uint64_t *const *members, int num_members, int64_t words, int32_t *shared) {
    for (int i = 0; i < num_members; i++)
        for (int j = i + 1; j < num_members; j++) {
            int64_t sum = 0;
            for (int64_t k = 0; k < words; k++) sum += __builtin_popcountll(members[i][k] & members[j][k]);
            shared[i * MACKO_EC_TILE + j] = (int32_t)sum;
        }
}

static void count_shared(uint64_t *const *members, int num_members, int64_t words, int32_t *shared) {
    count_shared_any(members, num_members, words, shared);
}

#if MACKO_X86
MACKO_TARGET_AVX2 static void count_shared_popcnt(uint64_t *const *members, int num_members, int64_t words,
                                                  int32_t *shared) {
    count_shared_any(members, num_members, words, shared);
}

/* Four partners at a time, so that a row is loaded once for them. */
__attribute__((target("avx512f,avx512bw,avx512vl,avx512vpopcntdq"))) static void
count_shared_avx512(uint64_t *const *members, int num_members, int64_t words, int32_t *shared) {
    for (int i = 0; i < num_members; i++)
        for (int j = i + 1; j < num_members; j += 4) {
            const uint64_t *a = members[i], *b[4];
            __m512i sum[4];
            for (int q = 0; q < 4; q++) {
                b[q] = members[j + q < num_members ? j + q : j];
                sum[q] = _mm512_setzero_si512();
            }
            for (int64_t k = 0; k < words; k += 8) {
                const __mmask8 live = words - k >= 8 ? 0xff : (__mmask8)((1 << (words - k)) - 1);
                const __m512i left = _mm512_maskz_loadu_epi64(live, a + k);
                for (int q = 0; q < 4; q++)
                    sum[q] = _mm512_add_epi64(
                        sum[q], _mm512_popcnt_epi64(_mm512_and_si512(left, _mm512_maskz_loadu_epi64(live, b[q] + k))));
            }
            for (int q = 0; q < 4 && j + q < num_members; q++)
                shared[i * MACKO_EC_TILE + j + q] = (int32_t)_mm512_reduce_add_epi64(sum[q]);
        }
}
#endif

static void count_shared_best(uint64_t *const *members, int num_members, int64_t words, int32_t *shared) {
#if MACKO_X86
    const macko_cpu_path path = macko_best_cpu_path();
    if (path == MACKO_AVX512 && __builtin_cpu_supports("avx512vpopcntdq"))
        return count_shared_avx512(members, num_members, words, shared);
    if (path != MACKO_SCALAR) return count_shared_popcnt(members, num_members, words, shared);
#endif
    count_shared(members, num_members, words, shared);
}

/* A tile at work. */
typedef struct tile_state {
    const macko_ec_options *options;
    int64_t words;
    int32_t delta_max;
    int64_t nonzeros;     /* of the tile */
    uint64_t *tile_bits;  /* [MACKO_EC_TILE, words] */
    uint64_t *level_bits; /* [MACKO_EC_TILE, words] of the blocks of a higher level */
    int32_t *shared, *fits;
    macko_ec_block *blocks;
    int32_t *columns;
    int32_t num_blocks;
    int64_t num_columns;
} tile_state;

static void append(tile_state *s, int32_t height, int32_t width, const macko_ec_block *a, const macko_ec_block *b,
                   macko_ec_walk walk) {
    macko_ec_block *block = &s->blocks[s->num_blocks++];
    block->height = height;
    block->width = width;
    block->first = s->num_columns;
    memcpy(block->rows, a->rows, MACKO_EC_MAX_HEIGHT);
    if (b) memcpy(block->rows + height / 2, b->rows, (size_t)height / 2);
    macko_ec_take(walk, s->delta_max, width, s->columns + s->num_columns);
    s->num_columns += width;
}

/* Pairs up to MACKO_EC_TILE members until a round brings under 0.5 % of the tile; appends blocks of twice their height. */
static void pair_rounds(tile_state *s, const macko_ec_block *const *ids, uint64_t *const *members, int num_members,
                        int32_t height, uint8_t *changed) {
    for (;;) {
        int32_t counts[MACKO_EC_TILE];
        int sorted[MACKO_EC_TILE], matched[MACKO_EC_TILE] = {0};
        for (int i = 0; i < num_members; i++) {
            counts[i] = 0;
            for (int64_t k = 0; k < s->words; k++) counts[i] += __builtin_popcountll(members[i][k]);
            int place = i;
            for (; place > 0 && counts[sorted[place - 1]] < counts[i]; place--) sorted[place] = sorted[place - 1];
            sorted[place] = i;
        }
        count_shared_best(members, num_members, s->words, s->shared);
        int64_t gained = 0;
        for (int i = 0; i < num_members; i++) {
            const int row = sorted[i];
            if (matched[row]) continue;
            int best = -1;
            int32_t most = s->options->min_width - 1;
            for (int j = i + 1; j < num_members; j++) {
                const int other = sorted[j];
                if (matched[other]) continue;
                const int32_t exact =
                    s->shared[row < other ? row * MACKO_EC_TILE + other : other * MACKO_EC_TILE + row];
                const int32_t common = exact < 0xffff ? exact : 0xffff; /* as CUDA, which keeps 16 bits */
                if (common > most) most = common, best = other;
            }
            if (best < 0) continue;
            matched[row] = matched[best] = 1;
            const macko_ec_walk walk = macko_ec_walk_from(members[row], members[best], 0, s->words);
            const int32_t width =
                macko_ec_shared_width(walk, s->delta_max, s->options->min_width, s->options->max_width, s->fits);
            if (!width) continue;
            append(s, 2 * height, width, ids[row], ids[best], walk);
            const int32_t *taken = s->columns + s->num_columns - width;
            macko_ec_clear(members[row], taken, width);
            macko_ec_clear(members[best], taken, width);
            changed[row] = changed[best] = 1;
            gained += (int64_t)width * 2 * height;
        }
        if (gained * 200 < s->nonzeros || !gained) return;
    }
}

/* What is left of a block that a higher one was cut from: blocks of its height as long as they fit, then single rows. */
static void split_rest(tile_state *s, macko_ec_block id, uint64_t *rest) {
    const macko_ec_walk walk = macko_ec_walk_from(rest, NULL, 0, s->words);
    for (;;) {
        const int32_t width =
            macko_ec_shared_width(walk, s->delta_max, s->options->min_width, s->options->max_width, s->fits);
        if (!width) break;
        append(s, id.height, width, &id, NULL, walk);
        macko_ec_clear(rest, s->columns + s->num_columns - width, width);
    }
    for (int32_t k = 0; k < id.height; k++)
        for (int64_t i = 0; i < s->words; i++) s->tile_bits[id.rows[k] * s->words + i] |= rest[i];
}

static void extract_tile(tile_state *s, int num_rows, int32_t max_height) {
    uint64_t *members[MACKO_EC_TILE];
    const macko_ec_block *ids[MACKO_EC_TILE];
    macko_ec_block copies[MACKO_EC_TILE];
    uint8_t changed[MACKO_EC_TILE];
    for (int i = 0; i < num_rows; i++) {
        members[i] = s->tile_bits + i * s->words;
        copies[i] = (macko_ec_block){.height = 1, .rows = {(uint8_t)i}};
        ids[i] = &copies[i];
    }
    pair_rounds(s, ids, members, num_rows, 1, changed);
    int32_t begin = 0;
    for (int32_t height = 2; height < max_height && begin < s->num_blocks; height *= 2) {
        const int32_t end = s->num_blocks;
        for (int32_t next = begin; next < end;) {
            int32_t source[MACKO_EC_TILE];
            int num_members = 0;
            for (; next < end && num_members < MACKO_EC_TILE; next++)
                if (s->blocks[next].height == height) source[num_members++] = next;
            memset(s->level_bits, 0, (size_t)(num_members * s->words) * 8);
            memset(changed, 0, sizeof changed);
            for (int i = 0; i < num_members; i++) {
                const macko_ec_block *block = &s->blocks[source[i]];
                members[i] = s->level_bits + i * s->words;
                copies[i] = *block;
                ids[i] = &copies[i];
                for (int32_t c = 0; c < block->width; c++) {
                    const int32_t col = s->columns[block->first + c];
                    members[i][col >> 6] |= (uint64_t)1 << (col & 63);
                }
            }
            pair_rounds(s, ids, members, num_members, height, changed);
            for (int i = 0; i < num_members; i++) {
                if (!changed[i]) continue;
                s->blocks[source[i]].width = 0;
                split_rest(s, copies[i], members[i]);
            }
        }
        begin = end;
    }
}

int macko_ec_extract_cpu(const macko_ec_plan *p, int64_t begin, int64_t end) {
    /* Extraction's tiles are MACKO_EC_TILE rows; so are the plan's, unless nothing is to be extracted. */
    if (p->options.max_height < 2) {
        for (int64_t tile = begin; tile < end; tile++) p->num_blocks[tile] = 0;
        return 0;
    }
    tile_state s = {.options = &p->options, .words = p->words, .delta_max = (1 << p->options.delta_bits) - 1};
    s.level_bits = malloc((size_t)(MACKO_EC_TILE * p->words) * 8);
    s.shared = malloc(MACKO_EC_TILE * MACKO_EC_TILE * sizeof *s.shared);
    s.fits = malloc((size_t)macko_ec_histogram_slots(p->words) * sizeof *s.fits);
    const int there = s.level_bits && s.shared && s.fits;
    for (int64_t tile = begin; there && tile < end; tile++) {
        const int64_t row = tile * MACKO_EC_TILE;
        const int num_rows = (int)(p->rows - row < MACKO_EC_TILE ? p->rows - row : MACKO_EC_TILE);
        s.nonzeros = 0;
        for (int i = 0; i < num_rows; i++) s.nonzeros += p->row_counts[row + i];
        s.tile_bits = p->bits + row * p->words;
        s.blocks = p->blocks + p->columns_at[tile] / MACKO_EC_CHUNK;
        s.columns = p->columns + p->columns_at[tile];
        s.num_blocks = 0;
        s.num_columns = 0;
        extract_tile(&s, num_rows, p->options.max_height);
        p->num_blocks[tile] = s.num_blocks;
    }
    free(s.level_bits);
    free(s.shared);
    free(s.fits);
    return there ? 0 : -1;
}
