"""The sell layout: bytes by its specification, round trips, one token and a few on every path, hostile shapes."""

import ctypes
import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import macko.ops as ops
from macko.weights import MackoWeight, PackedWeight, SellWeight, TileWeight
from tests import layouts, reference
from tests.common import (
    HALVES,
    MASKS,
    Plan,
    assert_close_library,
    assert_close_spmv,
    assert_same_bits,
    compiled,
    each_token,
    integer_problem,
    needs_capture,
    random_bits,
    random_vector,
    random_weight,
)
from tests.layouts import LAYOUTS

GAPS = (2, 3, 4, 5, 6)
#: How a block fetches, and whether launches may overlap: keys of MACKO_PLAN; few stages before x is there.
PATHS = ("", "pdl=0", "copy=cp_async", "pdl=0,first=1")
#: Lane groups that are not full, one row, one column, no row, cols that no bulk copy can end at, more blocks than rows.
SHAPES = (
    *((64, 256), (33, 203), (1, 1), (1, 4096), (500, 1), (7, 30), (600, 64), (0, 16), (5, 0), (201, 512)),
    (40, 1001),
)


def packed(w: torch.Tensor, gap_bits: int = 0, delta_bits: int = 4) -> SellWeight:
    return SellWeight.from_dense(w.cuda(), delta_bits, gap_bits)


def assert_packs(w: torch.Tensor, gap_bits: int = 0, delta_bits: int = 4) -> SellWeight:
    sell = packed(w, gap_bits, delta_bits)
    wanted = torch.where(w == 0, 0, w)
    assert_same_bits(sell.to_dense(), wanted)
    canonical, back = MackoWeight.from_dense(w, delta_bits), sell.to_macko()
    for name, tensor in canonical.tensors().items():
        assert_same_bits(getattr(back, name), tensor)
    if w.numel() < 50_000:
        assert_same_bits(reference.sell_unpack(sell), wanted)
    return sell


@pytest.mark.gpu
@pytest.mark.parametrize("gap_bits", GAPS)
@pytest.mark.parametrize("dtype", HALVES)
def test_bytes_and_round_trip_of_every_mask(dtype: torch.dtype, gap_bits: int) -> None:
    for kind in MASKS:
        for density in (0.02, 0.5):
            for delta_bits in (2, 4, 8):
                assert_packs(random_weight(70, 303, density, dtype, kind=kind), gap_bits, delta_bits)


@pytest.mark.gpu
@given(
    rows=st.integers(0, 90),
    cols=st.integers(0, 700),
    density=st.sampled_from((0.0, 0.01, 0.1, 0.5, 0.9, 1.0)),
    gap_bits=st.sampled_from((0, *GAPS)),
    seed=st.integers(0, 9),
)
def test_round_trip_of_any_shape(rows: int, cols: int, density: float, gap_bits: int, seed: int) -> None:
    """And of any bits: NaN, Inf and subnormal numbers among them."""
    assert_packs(random_bits(rows, cols, density, torch.float16, seed), gap_bits)


#: More rows than one round of blocks with a row a warp has, on an H200, and rows that span more columns than a ring;
#: few long rows, each unpacked by several thread blocks, which begin where one of its chunks does.
TWO_A_WARP = [(4500, 1001, 0.5), (4500, 65, 0.5), (4500, 700, 0.02)]
IN_SHARES = [(9, 65535, 0.6), (300, 20_000, 0.3), (1040, 9001, 0.05)]


@pytest.mark.gpu
@pytest.mark.parametrize("gap_bits", GAPS)
@pytest.mark.parametrize(("rows", "cols", "density"), TWO_A_WARP + IN_SHARES)
def test_dense_rows(rows: int, cols: int, density: float, gap_bits: int) -> None:
    w = random_weight(rows, cols, density, torch.float16)
    w[[3, 4]], w[5, : cols // 2], w[6, 100:] = 0, 0, 0
    assert_same_bits(packed(w, gap_bits).to_dense(), torch.where(w == 0, 0, w))


@pytest.mark.gpu
@pytest.mark.parametrize("uneven", [False, True])
def test_order_of_rows(uneven: bool) -> None:
    """In a block as in the matrix; in `order` workspace after workspace, each as in the layout."""
    rows, cols, part_rows = 5000, 20_000, 1024
    w = random_weight(rows, cols, 0.3, torch.float16)
    if uneven:  # few long rows, and few others like each
        lengths = cols * (torch.arange(rows) * 0.618 % 1) ** 12
        w = torch.where(torch.arange(cols) < lengths[:, None], w, 0)
    sell = packed(w)
    perm, order = sell.perm.cpu()
    # Each workspace's rows are sorted by themselves where that pads them hardly more, else all through and through.
    assert torch.equal(order, torch.arange(rows, dtype=torch.int32)) is not uneven
    for first, count in sell.blocks[:, 2:4].tolist():
        own = perm[first : first + count]
        assert torch.equal(own, own.sort().values)
    for first in range(0, rows, part_rows):
        part = order[first : first + part_rows]
        assert torch.equal(part, part.sort().values)
        wanted = torch.arange(first, min(rows, first + part_rows), dtype=torch.int32)
        assert torch.equal(perm[part.long()].sort().values, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", HALVES)
def test_spmv_of_every_shape_and_gap(dtype: torch.dtype, path: str, plan: Plan) -> None:
    plan(path)
    for rows, cols in SHAPES:
        w, x = random_weight(rows, cols, 0.4, dtype), random_vector(9, cols, dtype=dtype)
        bias = random_vector(rows, dtype=dtype, seed=2)
        exact_w, exact_x, exact_y = integer_problem(rows, cols, 0.4, dtype)
        for gap_bits in GAPS:
            sell = packed(w, gap_bits)
            for count in (0, 1, 2, 3, 4, 6, 9) if path == PATHS[0] else (1, 7):
                y = layouts.stream(sell, x[:count].cuda(), bias.cuda())
                assert_close_spmv(y, w, x[:count], bias)
                assert_same_bits(layouts.stream(sell, x[:count].cuda(), bias.cuda()), y)
            assert_same_bits(packed(exact_w, gap_bits).linear(exact_x.cuda()) + 0, exact_y + 0)


@pytest.mark.gpu
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("rows", "cols", "density"),
    [(4096, 4096, 0.5), (1024, 4096, 0.1), (100, 65535, 0.3), (300, 49152, 0.5), (70_000, 64, 0.3), (2048, 11008, 0.7)],
)
def test_spmv_of_large_shapes(rows: int, cols: int, density: float, path: str, plan: Plan) -> None:
    plan(path)
    w, x = random_weight(rows, cols, density, torch.float16), random_vector(cols, dtype=torch.float16)
    sell = assert_packs(w)
    assert_close_spmv(sell.linear(x.cuda()), w, x)


@pytest.mark.gpu
def test_a_row_50_times_as_long_as_the_mean() -> None:
    w = random_weight(3000, 4096, 0.01, torch.float16)
    w[1234] = random_weight(1, 4096, 1.0, torch.float16)
    w[2000:] = 0
    sell, x = assert_packs(w), random_vector(4096, dtype=torch.float16)
    assert_close_spmv(sell.linear(x.cuda()), w, x)
    uniform = packed(random_weight(3000, 4096, sell.stored / w.numel(), torch.float16), sell.gap_bits)
    # Padding of the short rows: at most their own bytes again.
    assert sell.nbytes < 2 * uniform.nbytes


@pytest.mark.gpu
def test_all_zero_and_empty_rows() -> None:
    bias = random_vector(300, dtype=torch.float16).cuda()
    zero = packed(torch.zeros(300, 200, dtype=torch.float16))
    assert zero.stored == 0
    assert_same_bits(zero.linear(random_vector(200, dtype=torch.float16).cuda(), bias), bias)
    w = random_weight(300, 200, 0.5, torch.float16)
    w[:7], w[100:200], w[290:] = 0, 0, 0
    x = random_vector(200, dtype=torch.float16)
    assert_close_spmv(assert_packs(w).linear(x.cuda()), w, x)


@pytest.mark.gpu
def test_padding_never_reads_an_x() -> None:
    """Padding after a row's last non-zero must not meet an Inf that the row has a real value for elsewhere."""
    w = torch.zeros(64, 600, dtype=torch.float16)
    w[:, ::3] = 1
    w[::2, 300:] = 0
    x = torch.ones(4, 600, dtype=torch.float16)
    x[:, 0] = float("inf")
    assert packed(w).linear(x[0].cuda()).isposinf().all()
    assert layouts.stream(packed(w), x.cuda()).isposinf().all()


@pytest.mark.gpu
def test_gap_width_is_the_smallest() -> None:
    for density, wanted in ((0.75, 2), (0.5, 3), (0.3, 4), (0.1, 5), (0.04, 6)):
        w = random_weight(512, 4096, density, torch.float16)
        assert packed(w).gap_bits == wanted


@pytest.mark.gpu
def test_memory_held() -> None:
    sell = packed(random_weight(4096, 4096, 0.5, torch.float16))
    assert sell.nbytes <= 2.6 * sell.stored


@pytest.mark.gpu
@needs_capture
@pytest.mark.parametrize(("rows", "cols"), [(4096, 4096), (2048, 8192), (1024, 16384)])
@pytest.mark.parametrize("tokens", [1, 2, 4, 8])
def test_products_many_times(rows: int, cols: int, tokens: int) -> None:
    """A place in the ring that is filled anew while it is read gives a wrong product in some ten thousand."""
    random = torch.Generator("cuda").manual_seed(1)
    w = torch.randint(-2, 3, (rows, cols), device="cuda", generator=random).half()
    w[torch.rand(rows, cols, device="cuda", generator=random) < 0.375] = 0
    x = torch.randint(-1, 2, (tokens, cols), device="cuda", generator=random).half()
    sell, wanted = packed(w), (x.double() @ w.double().T).half()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # weights that fit L2, so that copies are fast
        wrong = torch.stack([(sell.linear(x) != wanted).any() for _ in range(100)]).sum()
    total = torch.zeros_like(wrong)
    for _ in range(300):
        graph.replay()
        total += wrong
    assert int(total) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("cols", [8201, 11008, 20480, 40000])
def test_x_of_the_product_before_is_never_read(cols: int, path: str, plan: Plan) -> None:
    """Shared memory still holds it where the second half of a long x has not arrived; lanes begin anywhere in x."""
    plan(path)
    random = torch.Generator("cuda").manual_seed(cols)
    xs = torch.randint(-1, 2, (8, cols), device="cuda", generator=random).half()
    for left, right in ((0.5, 0.5), (0.02, 0.9), (0.9, 0.02), (0.004, 0.004)):
        w = torch.randint(-2, 3, (550, cols), device="cuda", generator=random).half()
        share = torch.where(torch.arange(cols, device="cuda") < cols // 2, left, right)
        w[torch.rand(w.shape, device="cuda", generator=random) >= share] = 0
        wanted = (xs.double() @ w.double().T).half()
        for gap_bits in (2, 3, 6):
            sell = packed(w, gap_bits)
            assert torch.equal(torch.stack([sell.linear(x) for x in xs] * 2), torch.cat([wanted, wanted]))


@pytest.mark.gpu
def test_validate() -> None:
    sell = packed(random_weight(300, 500, 0.5, torch.float16))
    sell.validate()
    for name, index in (
        *(("data", 515), ("bases", 3), ("perm", 5), ("perm", 2 * 300 + 4), ("blocks", 3), ("blocks", 8 * 20 + 4)),
    ):
        tensors = {key: value.clone() for key, value in sell.tensors().items()}
        tensors[name].view(-1).view(torch.int16)[index] += 1
        with pytest.raises(ValueError, match="not a sell weight"):
            SellWeight(**tensors, **sell.sizes()).validate()
    tensors = {key: value.clone() for key, value in sell.tensors().items()}
    tensors["perm"][1, [3, 40]] = tensors["perm"][1, [40, 3]]  # still a permutation, and the same matrix
    with pytest.raises(ValueError, match="perm is not what packing"):
        SellWeight(**tensors, **sell.sizes()).validate()


@pytest.mark.gpu
@pytest.mark.parametrize(("warps", "blocks"), [(8, 216), (12, 132), (4, 264), (2, 7), (8, 1000)])
def test_layouts_made_for_another_gpu(warps: int, blocks: int) -> None:
    """As many blocks and warps as another GPU has: the same matrix, the same result, and it validates."""
    w, x = random_weight(600, 900, 0.5, torch.float16), random_vector(900, dtype=torch.float16)
    sell = SellWeight.from_macko(MackoWeight.from_dense(w.cuda()), 3, warps, blocks)
    assert (sell.warps, sell.blocks.shape[0]) == (warps, blocks)
    sell.validate()
    assert_same_bits(reference.sell_unpack(sell), torch.where(w == 0, 0, w))
    assert_close_spmv(sell.linear(x.cuda()), w, x)
    assert_close_spmv(layouts.stream(sell, x.cuda()[None]), w, x[None])


@pytest.mark.gpu
def test_errors_name_the_argument() -> None:
    for options, message in (
        ((7,), "gap_bits is 7"),
        ((3, 7), "warps is 7, expected an even number up to 12"),
        ((3, 8, -1), "blocks is -1"),
    ):
        with pytest.raises(RuntimeError, match=message):
            layouts.sell_pack(*ops.pack(torch.ones(2, 2).half().cuda()), 2, 4, *options)
    with pytest.raises(RuntimeError, match="cols is 65536, expected at most 65535"):
        packed(torch.zeros(2, 65536, dtype=torch.float16))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("rows", "cols"), [(130, 500), (301, 203)])
def test_every_number_of_tokens_up_to_70(rows: int, cols: int, dtype: torch.dtype) -> None:
    w, bias = random_weight(rows, cols, 0.5, dtype), random_vector(rows, dtype=dtype)
    x = random_vector(70, cols, dtype=dtype)
    exact_w, exact_x, exact_y = integer_problem(rows, cols, 0.4, dtype)
    sell, exact = packed(w), packed(exact_w)
    many = layouts.stream(sell, x.cuda(), bias.cuda())
    assert_close_spmv(many, w, x, bias)
    for count in range(1, 71):
        assert_close_spmv(layouts.stream(sell, x[:count].cuda(), bias.cuda()), w, x[:count], bias)
        assert_close_library(sell.linear(x[:count].cuda(), bias.cuda()), w, x[:count], bias)
        xs, ys = each_token(exact_x, exact_y, count)
        for y in (layouts.stream(exact, xs.cuda()), exact.linear(xs.cuda())):
            assert_same_bits(y + 0, ys)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "cols"), [(300, 9000), (300, 15000), (300, 28672), (100, 65535), (2048, 4096)])
def test_x_that_fits_shared_memory_for_fewer_tokens_only(rows: int, cols: int) -> None:
    w, x = random_weight(rows, cols, 0.5, torch.float16), random_vector(8, cols, dtype=torch.float16)
    sell = packed(w)
    for count in (2, 4, 8):
        assert_close_spmv(layouts.stream(sell, x[:count].cuda()), w, x[:count])


@pytest.mark.gpu
@pytest.mark.parametrize(("layout", "results"), [(SellWeight, 1), (MackoWeight, 1), (TileWeight, 2)])
@pytest.mark.parametrize(("rows", "cols"), [(8448, 4096), (2100, 28_672), (130_000, 300)])
def test_dense_rows_keep_to_the_workspace(
    layout: type[PackedWeight], results: int, rows: int, cols: int, plan: Plan
) -> None:
    plan("tile_tokens=0")
    w, x = random_weight(rows, cols, 0.3, torch.float16), random_vector(80, cols, dtype=torch.float16)
    w[:: rows // 7] = random_weight(8, cols, 1.0, torch.float16)[: len(w[:: rows // 7])]  # long rows in each workspace
    w[1 :: rows // 7] = 0
    bias = random_vector(rows, dtype=torch.float16)
    weight = layout.from_dense(w.cuda())
    on_gpu, bias_on_gpu = x.cuda(), bias.cuda()
    weight.linear(on_gpu, bias_on_gpu)  # the library's own workspace
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = weight.linear(on_gpu, bias_on_gpu)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= (64 << 20) + results * y.numel() * y.element_size() + (1 << 20)  # these are not counted
    assert_close_library(y, w, x, bias)
    assert_same_bits(weight.linear(on_gpu, bias_on_gpu), y)


def test_cpu_tensors_are_refused_with_the_reason() -> None:
    weight = MackoWeight.from_dense(torch.ones(2, 2).half())
    with pytest.raises(RuntimeError, match="the sell layout is for a GPU, on the CPU use"):
        SellWeight.from_macko(weight)
    with pytest.raises(RuntimeError, match="the sell layout is for a GPU, on the CPU use"):
        torch.ops.macko.linear(torch.ones(2).half(), [torch.zeros(0)] * 4, [LAYOUTS.index("sell"), 2, 2, 4, 8, 0, 0, 4])


#: The functions of sell.h as symbols: it is plain C, so that its arithmetic is tested without a GPU.
GEOMETRY = """
#include "sell.h"
int64_t slot(macko_sell_block *b, int block, int blocks, int warps, int head, int stage, int warp) {
    return macko_sell_slot(b, block, blocks, warps, head, stage, warp);
}
int64_t base(macko_sell_block *b, int block, int blocks, int warps, int group) {
    return macko_sell_base(b, block, blocks, warps, group);
}
int groups(macko_sell_block *b) { return macko_sell_groups(b); }
int long_groups(macko_sell_block *b) { return macko_sell_long_groups(b); }
int slots_before(macko_sell_block *b, int warps, int stages) { return macko_sell_slots_before(b, warps, stages); }
int steps_of_warp(macko_sell_block *b, int warps, int warp) { return macko_sell_steps_of_warp(b, warps, warp); }
int chunk_start(macko_sell_block *b, int chunk) { return macko_sell_chunk_start(b, chunk); }
macko_sell_shape pack_shape(int64_t rows, int64_t cols, int gap_bits, macko_sell_device device) {
    return macko_sell_pack_shape(rows, cols, gap_bits, device);
}
macko_sell_shape launch_shape(int64_t cols, int gap_bits, int warps, macko_sell_device device) {
    return macko_sell_launch_shape(cols, gap_bits, warps, device);
}
"""


class Block(ctypes.Structure):
    names = ("slot", "group", "row", "rows", "chunks", "long_chunks", "steps", "stages")
    _fields_ = [(name, ctypes.c_int32) for name in names]


class Device(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("num_sms", "shared_per_sm", "shared_per_block")]


class Shape(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("warps", "blocks_per_sm", "num_blocks", "stages", "shared_bytes")]


@pytest.fixture(scope="module")
def geometry(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = compiled(GEOMETRY, tmp_path_factory.mktemp("geometry"), "sell")
    library.slot.restype = library.base.restype = ctypes.c_int64
    library.pack_shape.restype = library.launch_shape.restype = Shape
    library.pack_shape.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_int, Device]
    library.launch_shape.argtypes = [ctypes.c_int64, ctypes.c_int, ctypes.c_int, Device]
    return library


@pytest.mark.parametrize(
    ("shared_kb", "an_sm_kb", "most_cols"), [(64, 64, 14848), (99, 100, 32768), (163, 164, 65535), (227, 228, 65535)]
)
def test_it_runs_where_x_and_the_least_of_stages_fit(
    geometry: ctypes.CDLL, shared_kb: int, an_sm_kb: int, most_cols: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 64 KB, as a T4 has, too: whatever the width of gaps."""
    gpu, device = SimpleNamespace(shared_memory_per_block_optin=shared_kb << 10), torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    sizes = Device(40, an_sm_kb << 10, shared_kb << 10)
    for cols in (0, 1, 3584, 4096, 8192, most_cols, most_cols + 1, 70000):
        runs = SellWeight.runs(device, torch.float16, cols)
        assert runs == (cols <= most_cols)
        fits = all(geometry.pack_shape(4096, cols, gap_bits, sizes).stages for gap_bits in range(2, 7))
        assert runs == (fits and cols < 2**16)


@pytest.mark.parametrize("seed", range(40))
def test_slots_and_bases_are_used_once_without_holes(geometry: ctypes.CDLL, seed: int) -> None:
    choose = random.Random(seed)
    warps, head, num_blocks = choose.choice((4, 8, 12)), choose.randrange(5), choose.randrange(1, 6)
    blocks, slot, group = [], 0, 0
    for _ in range(num_blocks):
        rows, steps = choose.choice((0, 1, 7, 31, 40)), choose.choice((0, 1, 5, 60, 150))
        b = Block(slot=slot, group=group, rows=rows, steps=1)
        if rows and steps:
            b.chunks = choose.randrange(1, steps + 1)
            b.steps = -(-steps // b.chunks)
            b.long_chunks = b.chunks - (b.steps * b.chunks - steps)
            assert geometry.chunk_start(ctypes.byref(b), b.chunks) == steps
        blocks.append(b)
        at = ctypes.byref(b)
        slot += geometry.slots_before(at, warps, 2**30) - geometry.slots_before(at, warps, head)
        group += max(0, geometry.groups(at) - warps)
    slots, bases = [], []
    for i, b in enumerate(blocks):
        at = ctypes.byref(b)
        groups, long_groups = geometry.groups(at), geometry.long_groups(at)
        lengths = [geometry.steps_of_warp(at, warps, warp) for warp in range(warps)]
        mine = [range(warp, groups, warps) for warp in range(warps)]
        assert lengths == [sum(b.steps - (g >= long_groups) for g in own) for own in mine]
        assert lengths == sorted(lengths, reverse=True)
        for stage in range(max(head, lengths[0])):
            width = warps if stage < head else sum(lengths[warp & ~1] > stage for warp in range(warps))
            stage_slots = [geometry.slot(at, i, num_blocks, warps, head, stage, warp) for warp in range(width)]
            assert stage_slots == list(range(stage_slots[0], stage_slots[0] + width))  # one bulk copy
            assert stage_slots[0] % 2 == 0  # at a multiple of 128 bytes
            slots += stage_slots
        bases += [geometry.base(at, i, num_blocks, warps, g) for g in range(max(groups, warps))]
    assert sorted(slots) == list(range(num_blocks * warps * head + slot))
    assert sorted(bases) == list(range(0, 32 * (num_blocks * warps + group), 32))


@pytest.mark.parametrize("gap_bits", GAPS)
@pytest.mark.parametrize("cols", [1, 4096, 11008, 28672, 49152, 65535])
def test_launch_shape_fits_the_device(geometry: ctypes.CDLL, cols: int, gap_bits: int) -> None:
    for device in (
        Device(132, 228 * 1024, 227 * 1024),
        Device(108, 164 * 1024, 163 * 1024),
        Device(128, 102400, 101376),
    ):
        shape = geometry.pack_shape(5000, cols, gap_bits, device)
        again = geometry.launch_shape(cols, gap_bits, shape.warps, device)
        assert (again.stages, again.shared_bytes) == (shape.stages, shape.shared_bytes)
        if not shape.stages:
            assert 2 * cols > device.shared_per_block // 2  # x alone is most of it
            continue
        # One kilobyte a block is the system's, half of one the barriers'.
        assert shape.shared_bytes + 512 <= device.shared_per_block
        assert shape.blocks_per_sm * (shape.shared_bytes + 1024 + 512) <= device.shared_per_sm
        assert (shape.blocks_per_sm + 1) * (shape.shared_bytes + 1024) > device.shared_per_sm
        assert 4 <= shape.stages <= 8
        assert shape.num_blocks == device.num_sms * shape.blocks_per_sm
