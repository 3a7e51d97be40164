"""What the tile layout alone has: the plans of its kernels, each way to run them, models. The rest: test_slabs.py."""

import copy
import ctypes
import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import macko
from benchmarks.spmm import GEMM_SIZES
from macko.choose.auto import choose
from macko.weights import MackoWeight, SellWeight, TileWeight
from tests import layouts
from tests.common import (
    HALVES,
    Plan,
    assert_same_bits,
    compiled,
    devices,
    each_token,
    integer_problem,
    needs_capture,
    random_vector,
    random_weight,
)
from tests.kernels.codecs import Tile

pytestmark = pytest.mark.sm80

#: Values of the knob tile_gemm: a size, and 0: no output tile is split (Stream-K), 1: some are, 2: all, evenly,
#: 3: by beginnings and ends.
GEMM_WAYS = tuple(f"{size}x{split}" for size in GEMM_SIZES for split in range(4))
GEMM_KEYS = tuple(f"tile_gemm={way}" for way in GEMM_WAYS)


def sparse_integers(rows: int, cols: int, density: float, random: torch.Generator) -> Tensor:
    """float16 on the GPU, small enough for exact sums."""
    w = torch.randint(1, 3, (rows, cols), device="cuda", generator=random)
    w *= torch.randint(0, 2, w.shape, device="cuda", generator=random) * 2 - 1
    return (w * (torch.rand(w.shape, device="cuda", generator=random) < density)).half()


def in_parts(tile: TileWeight, x: Tensor) -> Tensor:
    """The product stored as three matrices, put together again."""
    blocks = -(-tile.rows // 64)
    first, second = blocks // 3 * 64, blocks // 2 * 64
    return torch.cat(list(tile._own_parts(x, (first, second - first, tile.rows - second))), -1)


def assert_close(y: Tensor, w: Tensor, x: Tensor, bias: Tensor | None = None) -> None:
    Tile(w.dtype, 0).assert_close(y, w, x, bias)


def packed(w: Tensor, device: str = "cuda", delta_bits: int = 4) -> TileWeight:
    return TileWeight.from_dense(w.to(device), delta_bits)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("copy", ["bulk", "cp_async"])
@pytest.mark.parametrize(("rows", "cols"), [(130, 500), (301, 203)])
def test_every_number_of_tokens_up_to_330(rows: int, cols: int, copy: str, dtype: torch.dtype, plan: Plan) -> None:
    plan(f"copy={copy},tile_tokens=1000")
    w, bias = random_weight(rows, cols, 0.5, dtype), random_vector(rows, dtype=dtype)
    x = random_vector(330, cols, dtype=dtype)
    exact_w, exact_x, exact_y = integer_problem(rows, cols, 0.4, dtype)
    xs, ys = each_token(exact_x, exact_y, 330)
    tile, exact = packed(w), packed(exact_w)
    on_gpu, bias_on_gpu, xs = x.cuda(), bias.cuda(), xs.cuda()
    for count in range(1, 331):
        assert_close(tile.linear(on_gpu[:count], bias_on_gpu), w, x[:count], bias)
        assert_same_bits(exact.linear(xs[:count]) + 0, ys[:count])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("way", GEMM_WAYS)
def test_every_way_to_run_many_tokens(way: str, dtype: torch.dtype, plan: Plan) -> None:
    """Rows and tokens that fill no tile, odd and small numbers of k tiles, tiles without zeros."""
    plan(f"tile_gemm={way}")
    plan("tile_tokens=1000000")
    for rows, cols, density in (
        *((130, 500, 0.5), (301, 203, 1.0), (136, 64, 0.3), (70, 257, 0.5), (64, 1, 1.0), (2056, 1100, 0.5)),
    ):
        w, bias = random_weight(rows, cols, density, dtype), random_vector(rows, dtype=dtype)
        exact_w, exact_x, exact_y = integer_problem(rows, cols, density, dtype)
        tile, exact = packed(w), packed(exact_w)
        for count in (65, 96, 128, 129, 160, 161, 193, 256, 257, 288, 320, 480, 600, 641):
            x = random_vector(count, cols, dtype=dtype)
            poison = torch.full((count, rows), float("nan"), dtype=dtype, device="cuda")
            del poison  # the output gets its memory
            y = tile.linear(x.cuda(), bias.cuda())
            assert_close(y, w, x, bias)
            assert_same_bits(tile.linear(x.cuda(), bias.cuda()), y)
            xs, ys = each_token(exact_x, exact_y, count)
            got = exact.linear(xs.cuda())
            assert_same_bits(got + 0, ys)
            assert_same_bits(in_parts(exact, xs.cuda()), got)


@pytest.mark.gpu
@pytest.mark.parametrize("way", GEMM_WAYS)
def test_more_tiles_of_the_output_than_blocks(way: str, plan: Plan) -> None:
    """Blocks take several one after the other."""
    plan("tile_tokens=1000000")
    plan(f"tile_gemm={way}")
    w, x, y = integer_problem(22_000, 450, 0.5, torch.float16)
    xs, ys = each_token(x, y, 600)
    assert_same_bits(packed(w).linear(xs.cuda()) + 0, ys)


@pytest.mark.gpu
@pytest.mark.parametrize("way", [way for way in GEMM_WAYS if way[-1] != "0"])
def test_tiles_that_are_split_anywhere(way: str, plan: Plan) -> None:
    """Partial sums are given first, whole tiles follow, fix-up comes last; also half a slab, none for one of a pair."""
    plan(f"tile_gemm={way}")
    random = torch.Generator("cuda").manual_seed(1)
    sizes = (
        *((11008, 4096, 512), (8200, 1100, 700), (4096, 1500, 300), (4882, 270, 507)),
        *((9984, 1100, 700), (12000, 1500, 700)),  # more tiles are left than half of the clusters
    )
    for (rows, cols, tokens), density in itertools.product(sizes, (0.65, 0.8)):
        w = sparse_integers(rows, cols, density, random)
        x = torch.randint(-1, 2, (tokens, cols), device="cuda", generator=random).half()
        tile, y = TileWeight.from_dense(w), (x.float() @ w.float().T).half()
        assert not any(bool((tile.linear(x) != y).any()) for _ in range(5))
        assert not any(bool((in_parts(tile, x) != y).any()) for _ in range(5))


@pytest.mark.gpu
@pytest.mark.parametrize("cols", [385, 1100, 3072, 14336])
@pytest.mark.parametrize("tokens", [128, 192])
def test_four_blocks_that_share_a_tile(tokens: int, cols: int, plan: Plan) -> None:
    """As many tiles as there may be, and fewer; blocks with less than the others, or nothing; with other launches."""
    plan(f"tile_tokens=1000000,tile_gemm=128x{tokens}x4x0")
    random = torch.Generator("cuda").manual_seed(1)
    wrong = []
    for rows, count in ((3072, tokens), (3001, tokens - 31), (130, tokens)):
        w = sparse_integers(rows, cols, 0.5, random)
        x = torch.randint(-1, 2, (count, cols), device="cuda", generator=random).half()
        tile, y = TileWeight.from_dense(w), (x.float() @ w.float().T).half()
        wrong += [(tile.linear(x) != y).any() for _ in range(100)]
        wrong += [(in_parts(tile, x) != y).any() for _ in range(5)]
    assert not torch.stack(wrong).any()


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["128x256x1x1", "128x256x2x2"])
def test_products_that_wait_for_other_blocks_on_two_streams(way: str, plan: Plan) -> None:
    """Neither has all SMs, so blocks wait for sums of blocks that have begun before them only."""
    plan(f"tile_gemm={way}")
    plan("tile_tokens=1000000")
    w, x, y = integer_problem(5504, 4096, 0.5, torch.float16)
    tile, (tokens, wanted) = packed(w), (t.cuda() for t in each_token(x, y, 256))
    streams = [torch.cuda.Stream() for _ in range(2)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    got = []
    for _ in range(40):
        for stream in streams:
            with torch.cuda.stream(stream):
                got.append(tile.linear(tokens))
    torch.cuda.synchronize()
    assert all(torch.equal(y + 0, wanted) for y in got)


@pytest.mark.gpu
@needs_capture
@pytest.mark.parametrize("density", [0.45, 0.65, 0.8])
@pytest.mark.parametrize("way", [way for way in GEMM_WAYS if way[-1] != "2"])
def test_a_large_product_many_times(way: str, density: float, plan: Plan) -> None:
    """All SMs busy for long: a place that is filled anew while it is read gives a wrong product in some hundred.

    With another density another number of stages has room.
    """
    plan(f"tile_gemm={way}")
    plan("tile_tokens=1000000")
    random = torch.Generator("cuda").manual_seed(1)
    w = sparse_integers(8192, 8192, density, random)
    x = torch.randint(-1, 2, (1536, 8192), device="cuda", generator=random).half()
    tile, y = TileWeight.from_dense(w), (x.float() @ w.float().T).half()
    wrong = [(tile.linear(x) != y).any() for _ in range(150)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = tile.linear(x)
    for _ in range(3):
        captured.fill_(float("nan"))
        graph.replay()
        wrong.append((captured != y).any())
    assert not torch.stack(wrong).any()


@pytest.mark.gpu
@pytest.mark.parametrize("sms", [2, 3, 5])
def test_rings_wrap_where_few_blocks_do_all(sms: int, plan: Plan) -> None:
    plan(f"sms={sms}")
    w, x, wanted = integer_problem(200, 3000, 0.5, torch.float16)
    assert len(SellWeight.from_dense(w.cuda()).blocks) <= 2 * sms  # of 200
    tile = packed(w)
    for count in (1, 9, 17, 40, 64, 200, 700):
        xs, ys = each_token(x, wanted, count)
        assert_same_bits(tile.linear(xs.cuda()) + 0, ys)


@pytest.mark.gpu
@pytest.mark.parametrize("row_blocks", [1, 3, 65, 67, 131, 133, 199, 265, 400, 530])
def test_row_blocks_whole_and_split(row_blocks: int) -> None:
    """Row blocks in every remainder of what the SMs can share; several rounds use the same memory for sums."""
    rows = row_blocks * 64 - 5
    for cols in (72, 1032):
        w, x, wanted = integer_problem(rows, cols, 0.5, torch.float16)
        tile = packed(w)
        for count in (1, 9, 17, 33, 64):
            xs, ys = each_token(x, wanted, count)
            assert_same_bits(tile.linear(xs.cuda()) + 0, ys)
            assert_same_bits(in_parts(tile, xs.cuda()) + 0, ys)


# The plan for many tokens, and its schedule: plain C, so of this machine.

#: Walks every block of a plan as the kernel does, csrc/slab/schedule.h. 0, or the number of the rule that is broken.
PLAN_CHECKS = r"""
#include <stdlib.h>
#include "many_plan.c"
#include "../codecs/tile/tile.h"

#define EXPECT(rule, condition) do { if (!(condition)) return rule; } while (0)

static int multicast_of(macko_slab_many_shape shape) { /* blocks of a cluster with rows of their own */
    return macko_slab_cluster_blocks(shape) / shape.split_k;
}

static int check_block(const macko_slab_many_plan *plan, int block, uint8_t *covered, int *given, int *taken) {
    const macko_slab_schedule *schedule = &plan->schedule;
    const macko_slab_share share = macko_slab_share_of(schedule, plan->shape, (uint32_t)block);
    const int half_slabs = schedule->half_slabs, tiles = schedule->row_tiles * schedule->token_tiles;
    const int index = macko_slab_share_index(&share), multicast = multicast_of(plan->shape);
    int first_slab = -1, own_given = -1;
    for (int next = 0; next < share.half_slabs;) {
        const macko_slab_segment s = macko_slab_segment_at(&share, next);
        const macko_slab_place place = macko_slab_place_of(schedule, s.tile);
        const bool first_split = next == share.whole, last = next + macko_slab_length(&s) == share.half_slabs;
        next += macko_slab_length(&s);
        EXPECT(1, s.tile >= 0 && s.tile < tiles && s.first >= 0 && s.first < s.end && s.end <= half_slabs);
        EXPECT(2, s.first <= s.own && s.own <= s.own_end && s.own_end <= s.end);
        EXPECT(11, macko_slab_own_count(&s) <= divide_up(macko_slab_length(&s), plan->shape.split_k));
        EXPECT(3, place.row_tile < schedule->row_tiles && place.token_tile < schedule->token_tiles);
        /* Whole tiles come first, then sums are given; what waits for others comes last. */
        const bool ends = schedule->kept < half_slabs; /* only these may follow each other */
        EXPECT(4, s.first == 0 || ((first_split || ends) && s.tile < schedule->split));
        EXPECT(13, !ends || s.tile >= schedule->split || (s.first ? macko_slab_length(&s) >= 4 : s.fixes_up));
        /* Each block has some of what is given or of what comes after it. */
        EXPECT(12, own_given < 0 || own_given + macko_slab_own_count(&s) > 0);
        own_given = s.first ? macko_slab_own_count(&s) : -1;
        EXPECT(5, s.fixes_up == (s.first == 0 && s.end < half_slabs));
        EXPECT(6, !s.fixes_up || (last && s.tile < schedule->split));
        if (s.first) {
            given[macko_slab_given(&share, s.tile)] = s.tile + 1;
            EXPECT(14, !ends || index > s.tile); /* it starts before the share that has the beginning */
        }
        if (s.fixes_up) {
            const int others = macko_slab_contributors(&share, s.tile);
            EXPECT(7, others > 0 && index + others < schedule->clusters);
            for (int other = index + 1; other <= index + others; other++) taken[other] = s.tile + 1;
        }
        for (int i = 0; i < macko_slab_own_count(&s); i++) {
            const int half = macko_slab_nth(&s, i);
            EXPECT(8, half >= s.own && half < s.own_end);
            /* What is no whole slab comes before those that are. */
            const bool single = i < macko_slab_singles(&s);
            EXPECT(9, single || (half % 2 == (i - macko_slab_singles(&s)) % 2));
            if (first_slab < 0)
                first_slab = macko_slab_first_row_block(&share, place.row_tile) * schedule->slabs + half / 2;
            covered[((int64_t)s.tile * multicast + (multicast > 1 ? share.rank : 0)) * half_slabs + half]++;
        }
    }
    EXPECT(10, first_slab == schedule->first_slabs[block]);
    return 0;
}

static int check_plan(const macko_slab_many_problem *p, const macko_slab_many_plan *plan) {
    const macko_slab_schedule *s = &plan->schedule;
    const int tiles = s->row_tiles * s->token_tiles, multicast = multicast_of(plan->shape);
    const int64_t count = (int64_t)tiles * multicast * s->half_slabs;
    int at_once = 0, given[MACKO_SLAB_MOST_CLUSTERS] = {0}, taken[MACKO_SLAB_MOST_CLUSTERS] = {0}, rule = 0;
    for (int i = 0; i < MACKO_SLAB_MANY_NUM_SHAPES; i++)
        if (!memcmp(&SHAPES[i], &plan->shape, sizeof *SHAPES)) at_once = p->clusters[i];
    EXPECT(20, s->clusters > 0 && s->clusters <= at_once && s->clusters <= MACKO_SLAB_MOST_CLUSTERS);
    EXPECT(21, s->row_tiles == divide_up(p->rows, multicast * plan->shape.row_blocks * MACKO_SLAB_ROWS));
    EXPECT(22, s->token_tiles == divide_up(p->tokens, plan->shape.tokens));
    EXPECT(23, s->half_slabs == divide_up(p->cols, MACKO_SLAB_HALF_COLS));
    const int64_t blocks = (int64_t)s->clusters * macko_slab_cluster_blocks(plan->shape),
                  partials = blocks * plan->shape.row_blocks * macko_slab_partial_bytes(plan->shape);
    const int64_t flags = macko_slab_many_flag_bytes(plan->shape, s->clusters);
    EXPECT(24, plan->workspace_bytes == (s->split ? flags + partials : 0));
    EXPECT(28, s->raster_rows == RASTER_ROWS || s->raster_rows <= s->row_tiles || s->raster_rows % s->row_tiles == 0);
    uint8_t *covered = calloc(1, (size_t)count), *placed = calloc(1, (size_t)tiles);
    EXPECT(29, blocks <= MACKO_SLAB_MOST_CLUSTERS * MACKO_SLAB_CLUSTER_BLOCKS);
    EXPECT(36, plan->shape.split_k < 4 || (!s->split && s->clusters == tiles)); /* one output tile each */
    for (int block = 0; !rule && block < blocks; block++)
        rule = check_block(plan, block, covered, given, taken);
    for (int64_t i = 0; !rule && i < count; i++)
        if (covered[i] != 1) rule = 25;
    for (int tile = 0; tile < tiles; tile++) {
        const macko_slab_place place = macko_slab_place_of(s, tile);
        placed[place.row_tile * s->token_tiles + place.token_tile]++;
    }
    for (int tile = 0; !rule && tile < tiles; tile++)
        if (placed[tile] != 1) rule = 26;
    /* All that is given is added up, by who has the beginning of that tile. */
    if (!rule && memcmp(given, taken, sizeof given)) rule = 27;
    free(covered);
    free(placed);
    return rule;
}

static uint64_t state;
static int64_t below(int64_t n) { /* splitmix64 */
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (int64_t)((z ^ z >> 31) % (uint64_t)n);
}

/* Plans of random problems, each also in a random way. 0, or a broken rule and its problem. */
int check_plans(uint64_t seed, int count, macko_slab_many_problem *p, macko_slab_many_way *way) {
    state = seed;
    for (int i = 0; i < count; i++) {
        const int at_once = below(4) ? 1 + (int)below(80) : 66;
        const macko_slab_many_shape shape = SHAPES[below(MACKO_SLAB_MANY_NUM_SHAPES)];
        macko_slab_many_plan plan, again;
        p->rows = 1 + below(64ll << below(9));
        p->cols = 1 + below(64ll << below(8));
        p->tokens = 33 + below(64ll << below(6));
        for (int k = 0; k < MACKO_SLAB_MANY_NUM_SHAPES; k++) p->clusters[k] = below(4) ? at_once : 0;
        p->reads_ahead = below(2);
        *way = (macko_slab_many_way){shape.row_blocks * MACKO_SLAB_ROWS, shape.tokens, shape.split_k, (int)below(4)};
        if (macko_slab_many_choose(p, way, &plan)) {
            const macko_slab_schedule *s = &plan.schedule;
            EXPECT(30, !memcmp(&plan.shape, &shape, sizeof shape));
            EXPECT(35, !s->split == (way->split == MACKO_SLAB_SPLIT_NONE));
            for (int tile = 0; way->split == MACKO_SLAB_SPLIT_EVENLY && tile < s->split; tile++) {
                int begin = 0; /* each tile begins with a share */
                while (begin < s->clusters && s->shares[begin] < tile * s->half_slabs) begin++;
                EXPECT(31, s->shares[begin] == tile * s->half_slabs);
            }
            const int rule = check_plan(p, &plan);
            if (rule) return rule;
        } else { /* refused: the shape does not fit, or there is nothing to split in this way */
            int fits = 0;
            for (int k = 0; k < MACKO_SLAB_MANY_NUM_SHAPES; k++)
                if (!memcmp(&SHAPES[k], &shape, sizeof shape)) fits = p->clusters[k];
            const bool no_share = p->cols <= MACKO_SLAB_HALF_COLS * (shape.split_k - 1); /* for the other block */
            EXPECT(32, !fits || way->split != MACKO_SLAB_SPLIT_NONE || no_share || shape.split_k > 2);
        }
        *way = (macko_slab_many_way){0, 0, 0, 0};
        if (below(4)) continue; /* all ways take longest */
        const bool found = macko_slab_many_choose(p, NULL, &plan);
        EXPECT(33, found == macko_slab_many_choose(p, NULL, &again));
        if (!found) continue;
        EXPECT(34, !memcmp(&plan.schedule, &again.schedule, sizeof plan.schedule));
        const int rule = check_plan(p, &plan);
        if (rule) return rule;
    }
    return 0;
}

/* Whatever there is to deal, and however soon it has to end: of a share with an end and a beginning both blocks have
 * something. */
int check_dealings(void) {
    for (int half_slabs = 2; half_slabs <= 6; half_slabs++)
        for (int clusters = 2; clusters <= 9; clusters++)
            for (int i = 0; i < 6 * 3 * 200; i++) {
                const clocks c = {100, i / 6 % 3 * 20, 10, i / 6 % 3 * 40, 5, 10};
                const split_work work = {1 + i % 6, clusters, half_slabs, 2, 0, c};
                int shares[MACKO_SLAB_MOST_CLUSTERS + 1];
                if (!deal(&work, i / 18 * 16, shares)) continue;
                for (int k = 0; k < clusters; k++)
                    EXPECT(40, shares[k] % half_slabs != half_slabs - 1 || shares[k + 1] - shares[k] != 2);
            }
    return 0;
}

/* 33 and 64 tokens have the same plan, also where L2 holds the ones and not the others. */
int check_up_to_64(void) {
    for (int64_t rows = 64; rows <= 30000; rows = rows * 2 + 17)
        for (int64_t cols = 2000; cols < 200000; cols = cols * 4 / 3 + 13) {
            macko_slab_many_problem p = {rows, cols, 33, {0}};
            for (int k = 0; k < MACKO_SLAB_MANY_NUM_SHAPES; k++) p.clusters[k] = 66;
            macko_slab_many_plan few, more;
            EXPECT(50, macko_slab_many_choose(&p, NULL, &few));
            p.tokens = 64;
            EXPECT(51, macko_slab_many_choose(&p, NULL, &more));
            EXPECT(52, !memcmp(&few.shape, &more.shape, sizeof few.shape));
            EXPECT(53, !memcmp(&few.schedule, &more.schedule, sizeof few.schedule));
        }
    return 0;
}

/* Of more tokens than L2 holds, so that clusters at different columns wait for memory, few enough tiles are split that
 * they take less than rounds of whole ones; and no two blocks have the same rows. */
int check_beyond_l2(void) {
    for (int64_t rows = 1024; rows <= 40000; rows = rows * 9 / 8 + 64)
        for (int64_t cols = 1024; cols <= 30000; cols = cols * 9 / 8 + 128)
            for (int64_t tokens = 1024; tokens <= 16384; tokens = tokens * 3 / 2 + 5) {
                macko_slab_many_problem p = {rows, cols, tokens, {0}};
                for (int k = 0; k < MACKO_SLAB_MANY_NUM_SHAPES; k++) p.clusters[k] = 66;
                macko_slab_many_plan plan;
                if (tokens * cols * 2 < 40 << 20) continue;
                EXPECT(60, macko_slab_many_choose(&p, NULL, &plan));
                const macko_slab_schedule *s = &plan.schedule;
                EXPECT(61, s->kept < s->half_slabs || s->split * 155 <= (s->split + 65) / 66 * 6600);
                EXPECT(62, plan.shape.split_k == 1 || rows * tokens < 66ll * 256 * 256 * 8);
            }
    return 0;
}

/* Groups of clusters with so many tiles each do the same, and the raster has them at one token tile. */
static int check_groups(const macko_slab_many_plan *plan, int tiles, int clusters) {
    const macko_slab_schedule *s = &plan->schedule;
    EXPECT(80, s->raster_rows == tiles && s->clusters % clusters == 0);
    for (int i = 0; i + clusters <= s->clusters; i++)
        EXPECT(81, s->shares[i + clusters] - s->shares[i] == tiles * s->half_slabs);
    return 0;
}
/* What a share of a split tile has, after whole ones. */
static int share(const macko_slab_many_plan *plan, int i) {
    return plan->schedule.shares[i + 1] - plan->schedule.shares[i];
}
int check_shares_of_split_tiles(void) {
    /* 96 tiles for 66 clusters: two have three, and nobody waits. */
    macko_slab_many_problem p = {6144, 4096, 1024, {0}};
    for (int k = 0; k < MACKO_SLAB_MANY_NUM_SHAPES; k++) p.clusters[k] = 66;
    macko_slab_many_plan plan;
    EXPECT(70, macko_slab_many_choose(&p, NULL, &plan) && plan.schedule.split == 96 && !check_groups(&plan, 3, 2));
    for (int i = 0; i < 64; i++) EXPECT(71, share(&plan, i) == 48);
    /* 80 tiles: four have five. */
    p.rows = p.cols = 5120;
    EXPECT(72, macko_slab_many_choose(&p, NULL, &plan) && plan.schedule.split == 80 && !check_groups(&plan, 5, 4));
    /* 224 tiles: after two whole ones each, split evenly; who gives sums has fewer than who waits for them. */
    p.rows = 14336, p.cols = 4096;
    const macko_slab_many_way evenly = {128, 256, 1, MACKO_SLAB_SPLIT_EVENLY};
    EXPECT(75, macko_slab_many_choose(&p, &evenly, &plan) && plan.schedule.split == 26);
    EXPECT(76, share(&plan, 0) > share(&plan, 1) && share(&plan, 0) + share(&plan, 1) == 32);
    /* 56 tiles: each has a cluster, and the other ten have six ends each, but for the last. */
    p.rows = 3584, p.cols = 18944;
    EXPECT(77, macko_slab_many_choose(&p, NULL, &plan) && plan.schedule.split == 56 && plan.schedule.clusters == 66);
    const int kept = plan.schedule.kept, ends = 148 - kept;
    for (int i = 0; i < 66; i++) EXPECT(73, share(&plan, i) == (i < 56 ? kept : i < 65 ? 6 * ends : 2 * ends));
    EXPECT(74, 6 * ends <= kept);
    return 0;
}
/* 64 whole tiles of 192 tokens take less than 48 of 256, split, where a codec reads ahead (H100, dense12: 146464 cycles
 * and 153027; tile: 165081 and 156216). */
int check_codec_that_reads_ahead(void) {
    macko_slab_many_problem p = {4096, 11008, 768, {0}, false};
    for (int k = 0; k < MACKO_SLAB_MANY_NUM_SHAPES; k++) p.clusters[k] = 66;
    macko_slab_many_plan plan;
    EXPECT(90, macko_slab_many_choose(&p, NULL, &plan) && plan.shape.tokens == 256 && plan.schedule.split == 48);
    p.reads_ahead = true;
    EXPECT(91, macko_slab_many_choose(&p, NULL, &plan) && plan.shape.tokens == 192 && plan.schedule.split == 0);
    return 0;
}

/* As many cycles, but less energy: under load 48 whole tiles were 5 to 8 % faster than in 64 shares, 32 tiles of 320
 * tokens in 64 shares 9 % faster than 64 of 160; up to 64 tokens clocks alone decide (tile, H200). */
int check_energy(void) {
    macko_slab_many_problem p = {6144, 4096, 256, {0}};
    for (int k = 0; k < MACKO_SLAB_MANY_NUM_SHAPES; k++) p.clusters[k] = 66;
    macko_slab_many_plan plan;
    EXPECT(100, macko_slab_many_choose(&p, NULL, &plan) && plan.shape.tokens == 256 && plan.schedule.split == 0);
    p.tokens = 64;
    EXPECT(101, macko_slab_many_choose(&p, NULL, &plan) && plan.shape.row_blocks == 2 && plan.schedule.split == 48);
    p.rows = 4096, p.cols = 11008, p.tokens = 320;
    EXPECT(102, macko_slab_many_choose(&p, NULL, &plan) && plan.shape.tokens == 320 && plan.schedule.split == 32);
    return 0;
}

/* Whatever the largest slab is, what is planned fits, and what does not fit is refused for that. */
int check_stages(int shared_bytes) {
    for (int i = 0; i < MACKO_SLAB_MANY_NUM_SHAPES; i++)
        for (int widest = 21; widest <= macko_tile_units(MACKO_TILE_MOST_ROWS); widest++) {
            const macko_slab_many_shape shape = SHAPES[i];
            macko_slab_many_stages s;
            const bool fits = macko_slab_many_fit_stages(shape, widest, shared_bytes, &s);
            const int x = macko_slab_min_x_stages(shape), slabs = MACKO_SLAB_MANY_MIN_SLAB_STAGES;
            const macko_slab_many_stages least = {x, slabs, s.slab_bytes};
            EXPECT(40, s.slab_bytes >= widest * MACKO_SLAB_UNIT + MACKO_SLAB_OVERREAD && s.slab_bytes % 128 == 0);
            EXPECT(41, fits == (macko_slab_many_shared_bytes(shape, least) <= shared_bytes));
            EXPECT(42, !fits || macko_slab_many_shared_bytes(shape, s) <= shared_bytes);
            EXPECT(43, !fits || (s.x >= least.x && s.x <= macko_slab_max_x_stages(shape)));
            EXPECT(44, !fits || (s.slabs >= least.slabs && s.slabs <= MACKO_SLAB_MANY_MAX_SLAB_STAGES));
        }
    return 0;
}
"""


#: few_plan.h: who multiplies what for up to 64 tokens. 0, or the number of a rule that is broken.
SHARE_CHECKS = r"""
#include <vector>
#include "few_plan.h"
using namespace macko;
#define EXPECT(rule, that) if (!(that)) return rule

struct Task {
    int slabs, each, advance[2], cluster;
    short more;
    char longer[2];
    few_partition partition[2];
};

static int check_split(const few_shares &shares, const few_partition &mine, int blocks, int nth, int slabs, int rank) {
    const few_split split(mine, blocks, nth, slabs);
    EXPECT(10, split.first <= rank && rank < split.first + split.ways && split.first + split.ways <= blocks);
    for (int r = 0; r < blocks; r++) { /* who has a slab of it, and only they */
        const int begin = few_work::share_at(mine, r), end = few_work::share_at(mine, r + 1);
        const bool has = begin < (nth + 1) * slabs && end > nth * slabs;
        EXPECT(11, has == (split.first <= r && r < split.first + split.ways));
    }
    const int sums = split.ways << split.chunk_bits;
    EXPECT(12, sums >= MACKO_FEW_WARPGROUP && sums <= MACKO_FEW_WARPGROUP * (shares.halves ? 1 : 2));
    std::vector<int> owned(blocks);
    for (int at = 0; at < MACKO_FEW_WARPGROUP; at++) owned[split.first + (at >> split.chunk_bits)]++;
    for (int way = 0; way < split.ways; way++) { /* what a block waits for is what the others send */
        const int chunk = 1 << split.chunk_bits, behind = MACKO_FEW_WARPGROUP - way * chunk;
        EXPECT(13, owned[split.first + way] == max(0, min(chunk, behind)));
    }
    for (int way = 0; way < split.ways; way++) { /* and where: of its first row block, or of its second */
        const int start = few_work::share_at(mine, split.first + way);
        EXPECT(14, (start < nth * slabs) == (start / slabs != nth));
    }
    return 0;
}

extern "C" int check_shares(int row_blocks, int most_clusters, int blocks, int slabs) {
    const int clusters = min(most_clusters, row_blocks);
    const few_shares shares(row_blocks, clusters, blocks, slabs, 132);
    Task task{slabs, shares.each, {shares.advance[0], shares.advance[1]}, blocks, (short)shares.more,
              {(char)shares.longer[0], (char)shares.longer[1]}, {shares.partition[0], shares.partition[1]}};
    std::vector<int> taken(row_blocks * slabs);
    for (int cluster = 0; cluster < clusters; cluster++)
        for (int rank = 0; rank < blocks; rank++) {
            const bool fewer = cluster >= shares.more;
            const few_work work(task, cluster, rank);
            const int count = work.whole * slabs + work.end - work.start;
            EXPECT(1, count <= shares.stages[fewer] && count >= 1);
            EXPECT(2, few_first_slab(task, cluster, rank) ==
                          (work.whole ? work.first_row_block * slabs : work.left * slabs + work.start));
            for (int i = 0; i < work.whole * slabs; i++) taken.at(work.first_row_block * slabs + i)++;
            for (int i = work.start; i < work.end; i++) taken.at(work.left * slabs + i)++;
            EXPECT(3, shares.split || work.start == work.end);
            if (work.start == work.end) continue;
            const int nth = work.start / slabs, last = (work.end - 1) / slabs;
            EXPECT(4, last <= nth + shares.crosses);
            for (int n = nth; n <= last; n++)
                if (const int rule = check_split(shares, task.partition[fewer], blocks, n, slabs, rank)) return rule;
        }
    for (int count : taken) EXPECT(5, count == 1);
    return 0;
}
"""


class Problem(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "cols", "tokens")),
        ("clusters", ctypes.c_int * len(GEMM_SIZES)),
        ("reads_ahead", ctypes.c_bool),
    )


class Way(ctypes.Structure):
    names = ("rows", "tokens", "split_k", "split")
    _fields_ = tuple((name, ctypes.c_int) for name in names)


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    complete = f'_Static_assert(MACKO_SLAB_MANY_NUM_SHAPES == {len(GEMM_SIZES)}, "GEMM_SIZES has all");'
    return compiled(PLAN_CHECKS + complete, tmp_path_factory.mktemp("plans"), "slab")


def test_shares_cover_every_slab_once_and_each_sum_is_sent_to_who_waits_for_it(tmp_path: Path) -> None:
    """The rules: `count` of stages, the first slab, slabs, a share's row blocks, who has a split one, its sums."""
    check = compiled(SHARE_CHECKS, tmp_path, "slab", "c++").check_shares
    for blocks, most_clusters in enumerate((132, 66, 39, 30, 22, 17, 15, 15), 1):  # what fits on an H200
        for row_blocks in (*range(1, 70), 80, 96, 128, 172, 224, 448, 576, 2000):
            for slabs in (*range(blocks, 24), 32, 43, 56, 74, 112):
                problem = row_blocks, most_clusters, blocks, slabs
                assert not check(*problem), f"rule {check(*problem)} of {problem}"


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_plans_cover_every_half_slab_once_and_wait_for_nobody_later(plans: ctypes.CDLL, seed: int) -> None:
    """Also in every way that is asked for, where it can be; other ways are refused."""
    problem, way = Problem(), Way()
    rule = plans.check_plans(ctypes.c_uint64(seed), 6000, ctypes.byref(problem), ctypes.byref(way))
    shown = {name: getattr(problem, name) for name in ("rows", "cols", "tokens")}
    wanted = tuple(getattr(way, name) for name in Way.names)
    assert rule == 0, f"rule {rule}: {shown}, clusters {list(problem.clusters)}, way {wanted}"


def test_a_codec_that_reads_ahead_has_the_plan_that_is_faster_for_it(plans: ctypes.CDLL) -> None:
    assert plans.check_codec_that_reads_ahead() == 0


def test_of_plans_that_take_about_as_long_the_one_of_less_energy_is_taken(plans: ctypes.CDLL) -> None:
    assert plans.check_energy() == 0


@pytest.mark.parametrize("kilobytes", [48, 99, 163, 227])
def test_planned_stages_fit_shared_memory(plans: ctypes.CDLL, kilobytes: int) -> None:
    assert plans.check_stages(kilobytes * 1024) == 0


def test_of_two_tiles_that_a_share_has_half_slabs_of_both_blocks_have_some(plans: ctypes.CDLL) -> None:
    assert plans.check_dealings() == 0


def test_a_plan_does_not_depend_on_how_many_of_64_tokens_there_are(plans: ctypes.CDLL) -> None:
    assert plans.check_up_to_64() == 0


def test_tiles_are_split_only_where_it_pays_beyond_l2(plans: ctypes.CDLL) -> None:
    """4096 x 11008 by 4096 tokens split 76 of 208 tiles, and took 1.6 times as long as the dense product."""
    assert plans.check_beyond_l2() == 0


def test_split_tiles_are_shared_so_that_nobody_waits_long(plans: ctypes.CDLL) -> None:
    assert plans.check_shares_of_split_tiles() == 0


# What comes from outside.


@pytest.mark.parametrize("size", [{"rows": 40}, {"cols": 69}])
@pytest.mark.parametrize("device", devices())
def test_a_value_just_outside_is_refused(device: str, size: dict[str, int]) -> None:
    """In the row after the last one, or the column; the slabs are the same."""
    tile = packed(torch.ones(41, 70, dtype=torch.float16), device)
    tile.validate()
    with pytest.raises(ValueError, match="of its masks has a value outside of the matrix"):
        dataclasses.replace(tile, **size).validate()


def test_a_canonical_weight_that_lies_is_not_laid_out() -> None:
    canonical = MackoWeight.from_dense(random_vector(3, 50, dtype=torch.float16))
    with pytest.raises(RuntimeError, match="delta_bits is 3"):
        layouts.tile_pack(*canonical.tensors().values(), 50, 3)
    with pytest.raises(RuntimeError, match="macko::lay_out: deltas put entry"):
        TileWeight.from_macko(dataclasses.replace(canonical, deltas=torch.full_like(canonical.deltas, 255)))


# Layers and models.


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 512), nn.Linear(512, 256, bias=False)
        for layer in (self.up, self.down):
            layer.weight.data = random_weight(*layer.weight.shape, 0.5, torch.float32) / 16  # type: ignore[misc]

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


def formats_of(model: nn.Module) -> set[str]:
    return {module.format for module in model.modules() if isinstance(module, macko.SparseLinear)}


@pytest.mark.gpu
def test_sparsify_for_batches() -> None:
    dense = Model().half().cuda()
    model = copy.deepcopy(dense)
    macko.sparsify_(model, tokens=8, progress=False)
    assert choose(MackoWeight.from_dense(dense.up.weight.detach()), tokens=8) is TileWeight
    assert formats_of(model) == {"tile"}
    assert set(dict(model.up.named_buffers())) == {"data", "offsets"}  # and no second copy
    for tokens in (1, 7, 300):
        x = random_vector(tokens, 256, dtype=torch.float16).cuda()
        torch.testing.assert_close(model(x), dense(x), rtol=1e-2, atol=1e-2)
    model.cpu()
    assert "tile" not in formats_of(model)
    model.cuda()
    assert formats_of(model) == {"tile"}
    model.up.reformat_("macko").reformat_("auto")  # type: ignore[operator]
    assert model.up.format == macko.SparseLinear.from_linear(dense.up).format  # small as it is, what one token takes


def test_tokens_is_of_auto_and_slide() -> None:
    for arguments in ({"format": "macko", "tokens": "batch"}, {"tokens": 0}, {"tokens": "many"}, {"tokens": 1.5}):
        with pytest.raises(ValueError, match=r"tokens is .*, (expected a number from 1|which is for formats)"):
            macko.sparsify_(Model(), **arguments)
    with pytest.raises(ValueError, match="expected a number"):
        macko.sparsify_(Model(), format="slide", tokens="batch")


def test_batches_on_the_cpu_are_as_single_tokens() -> None:
    one, batch = Model(), Model()
    macko.sparsify_(one, progress=False)
    macko.sparsify_(batch, tokens=4, progress=False)
    assert formats_of(one) == formats_of(batch)
