"""The plan of the kernel for GPUs without wgmma (csrc/slab/ring_plan.h), on the host: every device's shared memory."""

import ctypes
from typing import Any

import pytest

from tests.common import compiled
from verify import ring_code

#: 0, or the number of the rule that a plan breaks.
CHECKS = r"""
#include <stdlib.h>
#include <string.h>

#include "experts_plan.h"

#define EXPECT(rule, condition) do { if (!(condition)) return rule; } while (0)

/* Walks each block as the kernel does; what one takes another one before it must have given. */
static int check_shares(const macko_ring_problem *p, const macko_ring_shares *s, int together) {
    const int64_t all = (p->row_blocks + together - 1) / together * p->slabs;
    char *covered = calloc((size_t)all, 1);
    int64_t *given = calloc((size_t)s->blocks, sizeof *given);
    int rule = 0;
    for (int block = 0; block < s->blocks && !rule; block++) {
        const int64_t begin = macko_ring_share_at(s, block), end = macko_ring_share_at(s, block + 1);
        if (begin >= end || begin < 0 || end > all) rule = 1; /* empty: its flag is never set */
        for (int64_t i = begin; i < end && !rule; i++)
            if (covered[i]++) rule = 2;
        const int64_t last = (end - 1) / p->slabs;
        given[block] = end < (last + 1) * p->slabs ? last + 1 : 0;
        const int64_t first = begin / p->slabs, row_begin = first * p->slabs;
        if (begin > row_begin && end >= row_begin + p->slabs)
            for (int other = block; macko_ring_share_at(s, other) > row_begin && !rule;)
                if (--other < 0 || given[other] != first + 1) rule = 3; /* sums of another row block */
    }
    for (int64_t i = 0; i < all && !rule; i++)
        if (!covered[i]) rule = 4;
    free(covered);
    free(given);
    return rule;
}

int check(int64_t row_blocks, int64_t slabs, int64_t tokens, int widest, int sms, int shared_bytes, bool pairs,
          int *stages, int *kind) {
    const macko_ring_problem p = {row_blocks, slabs, tokens, widest, sms, shared_bytes, pairs};
    macko_ring_shape shape;
    *stages = 0;
    if (!macko_ring_shape_of(&p, &shape)) return 0;
    *stages = shape.stages;
    *kind = shape.kind;
    EXPECT(10, shape.shared_bytes <= shared_bytes && shape.stages >= 2);
    EXPECT(11, shape.tokens >= (tokens < 64 ? tokens : 64));
    /* Behind the last stage so much may be read. */
    const int rings = shape.kind == MACKO_RING_PAIRS ? 2 : 1, together = macko_ring_row_blocks(shape.kind);
    EXPECT(12, shape.shared_bytes - rings * shape.stages * shape.stage_bytes >= MACKO_SLAB_OVERREAD);
    EXPECT(13, shape.x_at >= together * widest * MACKO_SLAB_UNIT && shape.x_at % (together * 128) == 0);
    EXPECT(16, shape.stage_bytes % 128 == 0);
    const int64_t token_blocks = (tokens + 63) / 64;
    const macko_ring_shares s = macko_ring_shares_of(&p, &shape);
    EXPECT(14, s.blocks >= 1 && (s.blocks * token_blocks <= sms || s.blocks == 1));
    const int64_t sums = together * shape.tokens * 256;
    EXPECT(15, (int64_t)s.blocks * token_blocks * (sums + 8) <= macko_ring_workspace_bytes(tokens, sms));
    return check_shares(&p, &s, together);
}

/* Blocks of the kernel for experts, or the negative number of the rule that its plan breaks; 0: there is none. */
int experts(int64_t experts, int64_t row_blocks, int64_t tokens, int widest, int sms, int shared_bytes) {
    const macko_experts_problem p = {experts, row_blocks, tokens, widest, sms, shared_bytes};
    macko_experts_plan plan;
    if (!macko_experts_plan_of(&p, &plan)) return 0;
    const int of_sm = plan.blocks > sms ? 2 : 1, kept = of_sm * MACKO_EXPERTS_KEPT;
    EXPECT(-1, plan.stages >= (of_sm > 1 ? 3 : 2) && plan.blocks >= 1 && plan.blocks <= 2 * sms);
    EXPECT(-2, of_sm * plan.shared_bytes + kept <= shared_bytes + MACKO_EXPERTS_KEPT);
    EXPECT(-3, of_sm == 1 || (plan.tile == MACKO_EXPERTS_LEAST_TOKENS && shared_bytes >= MACKO_EXPERTS_FOR_TWO));
    return plan.blocks;
}
"""
#: What a block may have: by MACKO_PLAN; GPUs of 8.6, 8.9 and 12; of 8.0; of 9.0 and 10.0.
SHARED = {70: 71680, 99: 101376, 163: 166912, 227: 232448}


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> Any:
    checks = compiled(CHECKS, tmp_path_factory.mktemp("ring"), "slab")
    sizes = [ctypes.c_int64] * 3 + [ctypes.c_int] * 3
    checks.check.argtypes = [*sizes, ctypes.c_bool, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_int)]
    checks.experts.argtypes = sizes
    return checks


@pytest.mark.parametrize("shared", SHARED)
def test_every_slab_is_multiplied_once_and_every_sum_is_taken(check: Any, shared: int) -> None:
    stages, kind = ctypes.c_int(), ctypes.c_int()
    shapes = [(1, 1), (1, 64), (2, 3), (7, 6), (16, 16), (48, 12), (64, 16), (80, 20), (64, 43), (173, 16), (448, 32)]
    for row_blocks, slabs in shapes:
        for tokens in (1, 8, 9, 16, 17, 33, 64, 65, 128, 512, 5000):
            for widest in (0, 21, 91, 160, 193, 277):  # no slabs; from sparse8 at its least to tile at its most
                for sms in (2, 48, 82, 108, 128, 132, 170):
                    for pairs in (False, True):
                        sizes = (row_blocks, slabs, tokens, widest, sms, SHARED[shared], pairs)
                        assert check.check(*sizes, stages, kind) == 0, sizes


def test_two_blocks_of_experts_share_an_sm_where_they_fit_and_seldom_leave_one_alone(check: Any) -> None:
    for shared in SHARED.values():
        for experts in (1, 8, 128, 6000):
            for row_blocks in (1, 24, 448):
                for tokens in (1, 8, 64, 512, 4096):
                    for widest in (1, 91, 160, 193, 277):
                        sizes = (experts, row_blocks, tokens, widest, 132, shared)
                        assert check.experts(*sizes) >= 0, sizes
    dense12, h100, a100 = 193, SHARED[227], SHARED[163]
    assert check.experts(128, 24, 8, dense12, 132, h100) == 192  # Qwen3-30B, one token: one round
    assert check.experts(128, 44, 8, dense12, 132, h100) == 132  # GLM-4.5-Air: 352 items
    assert check.experts(128, 24, 64, dense12, 132, h100) == 264  # six rounds
    assert check.experts(128, 24, 8, dense12, 108, a100) == 108


def test_the_shape_for_each_size_of_shared_memory(check: Any) -> None:
    """Two stages at least wherever a GPU can: else its products go by dense rows."""
    stages, kind = ctypes.c_int(), ctypes.c_int()
    pairs, two_rows, wide, halves = range(4)

    def found(shared: int, tokens: int, widest: int, prefers_pairs: bool, row_blocks: int = 64) -> tuple[int, int]:
        assert check.check(row_blocks, 16, tokens, widest, 128, SHARED[shared], prefers_pairs, stages, kind) == 0
        return stages.value, kind.value if stages.value else -1

    tile, dense12, sparse11, dense8, sparse8 = 160, 193, 121, 128, 91  # units of a slab at density 0.5
    assert [found(99, n, tile, True) for n in (8, 16, 32, 64)] == [(3, wide), (3, wide), (2, wide), (2, halves)]
    assert [found(99, n, sparse11, True) for n in (8, 16)] == [(2, pairs), (3, wide)]
    assert [found(99, n, dense12, False) for n in (8, 16, 32, 64)] == [(3, wide), (2, wide), (2, wide), (2, halves)]
    assert [found(163, n, tile, True) for n in (8, 16, 32, 64)] == [(2, pairs)] * 3 + [(2, wide)]
    assert [found(163, n, dense12, False) for n in (8, 16, 32, 64)] == [(4, wide), (3, wide), (3, wide), (2, wide)]
    assert [found(227, n, tile, True) for n in (8, 16, 32, 64)] == [(2, pairs)] * 4
    assert [found(227, n, dense12, False) for n in (8, 16, 32, 64)] == [(4, wide), (3, wide), (4, wide), (3, wide)]
    # Eight slabs a block fill two stages of pairs sooner, sixteen or more keep three busy, where they fit.
    assert [found(227, n, tile, True, 128) for n in (1, 8, 16, 17, 64)] == [(3, pairs)] * 3 + [(2, pairs)] * 2
    assert [found(227, 16, tile, True, row_blocks) for row_blocks in (127, 128)] == [(2, pairs), (3, pairs)]
    assert [found(163, n, tile, True, 128) for n in (8, 16, 32)] == [(3, pairs), (2, pairs), (2, pairs)]
    assert [found(163, n, sparse11, True, 128) for n in (8, 16, 32)] == [(3, pairs), (3, pairs), (2, pairs)]
    assert [found(99, n, sparse11, True, 128) for n in (8, 16)] == [(2, pairs), (3, wide)]
    assert [found(99, n, sparse8, True, 128) for n in (8, 16)] == [(3, pairs), (2, pairs)]
    assert [found(227, n, dense8, False) for n in (8, 16, 32)] == [(4, wide)] * 3
    # Two row blocks together where pairs have no room, more than 32 tokens, and enough to do for each block.
    assert [found(163, n, tile, True, 448) for n in (32, 33, 64, 512)] == [(2, pairs)] + [(2, two_rows)] * 3
    assert [found(163, n, sparse11, True, 448) for n in (32, 64)] == [(2, pairs), (2, two_rows)]
    assert found(163, 64, dense12, False, 448) == (2, wide)
    assert found(99, 64, tile, True, 448) == (2, halves)
    assert [found(227, 64, widest, True, 448) for widest in (tile, 200)] == [(2, pairs), (2, two_rows)]
    assert found(70, 64, 0, False) == (2, halves)  # of a matrix without slabs
    assert found(99, 64, 277, True) == (0, -1)
    assert found(99, 8, 277, True) == (2, wide)


def test_what_ptxas_says_of_each_kernel_is_read() -> None:
    """Those of products alone, each with its own registers and spills."""
    name = "_ZN5macko16slab_ring_kernelINS_8{}EENS_10ring_shapeILi{}EL15macko_ring_kind{}EEEEEv"
    text = """
ptxas info    : Compiling entry function '{}' for 'sm_89'
ptxas info    : Function properties for {}
    {} bytes stack frame, {} bytes spill stores, 4 bytes spill loads
ptxas info    : Used {} registers, used 3 barriers, 512 bytes cmem[0]
"""
    kernels = (
        (name.format("sparse16I13__nv_bfloat16", 64, 3), 16, 128),
        ("_ZN5macko18slab_unpack_kernelI", 0, 64),
        (name.format("sparse8IL15macko_byte_kind1E6__half", 8, 0), 0, 95),
    )
    said = "".join(text.format(name, name, spilled, spilled, used) for name, spilled, used in kernels)
    assert list(ring_code.kernels(said)) == [
        (
            kernels[0][0],
            {"dtype": "bfloat16", "tokens": 64, "kind": "x in halves", "registers": 128, "spilled_bytes": 16},
        ),
        (
            kernels[2][0],
            {"dtype": "float16", "values": "int8", "tokens": 8, "kind": "pairs", "registers": 95, "spilled_bytes": 0},
        ),
    ]


def test_a_slabs_instructions_are_those_of_the_loop_around_its_products() -> None:
    """Copying counts as often as it runs; lists, what is before a flag, and the way of a matrix's edge not at all."""
    listing = """
0010 MOV R1, R2
0020 LD.E.STRONG.GPU R1, [R2]
0030 @P0 BRA 0x20
0040 DEPBAR.LE SB0, 0x1
0050 LDGSTS [R1], [R2]
0060 @P1 BRA 0x50
0070 PRMT R1, R2, R3
0080 @P2 BRA 0x70
0090 @P3 BRA 0xc0
00a0 LDGSTS.128 [R1], [R2]
00b0 BRA 0xd0
00c0 LDGSTS.128.ZFILL [R1], [R2]
00d0 HMMA.16816 R1, R2, R3
00e0 @P4 BRA 0x20
00f0 EXIT"""
    code = [(int(line[:4], 16), line[5:]) for line in listing.strip().splitlines()]
    pairs, two_rows, wide, _ = ring_code.KINDS
    for kind, slab_bytes, turns, warps in (
        *((wide, 1, 1, 16), (wide, 4 * 16 * 512 + 1, 2, 16), (pairs, 4 * 16 * 512, 2, 8)),
        (two_rows, 4 * 16 * 256, 2, 4),  # of eight warps, for two slabs
    ):
        assert ring_code.clocks_of(code, kind, slab_bytes) == (1 + 2 * turns + 5) * warps / 4
