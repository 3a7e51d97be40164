"""The slide format: bytes, every mask, quantising, products exact in integers, what is refused."""

import json
import random
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import macko
import macko.ops as ops
from benchmarks.slide_quality import BLOCK, dense_share, spread
from macko import SparseLinear
from macko.choose import slide as choose
from macko.choose import times
from macko.choose.auto import pack
from macko.choose.options import Options
from macko.measure.tune import measure_slide
from macko.nn.convert import check_shards
from macko.weights import SLIDE_ELEMENTS, SlideWeight, sparsest_pattern
from tests import reference
from tests.common import HALVES, Plan, assert_same_bits, device_dtypes, devices, needs_capture
from tests.layouts import LAYOUTS

pytestmark = pytest.mark.sm80

INT8, FP8 = torch.int8, torch.float8_e4m3fn
TYPES = (INT8, FP8, torch.float16, torch.bfloat16)
PATTERNS = (0, 2, 3, 4, 5, 6, 8)


def multiplied(device: str, *dtypes: torch.dtype) -> tuple[torch.dtype, ...]:
    """Those of which the device has products: float8's from compute capability 8.9 on. Skips where there is none."""
    found = tuple(dtype for dtype in dtypes if SlideWeight.runs(torch.device(device), dtype))
    return found or pytest.skip(f"this GPU's code has no products of {dtypes}")


def all_masks(n: int) -> Tensor:
    """Every mask of 2n columns with at most 2n-2 set, [masks, 2n]."""
    masks = torch.tensor(list(product((0, 1), repeat=2 * n)))
    return masks[masks.sum(1) <= 2 * n - 2].bool()


def random_mask(rows: int, cols: int, n: int, seed: int = 0) -> Tensor:
    """Groups of n that mostly are full, some of them with fewer non-zeros than allowed; cols as it comes."""
    g = torch.Generator().manual_seed(seed)
    if not n:
        return torch.rand(rows, cols, generator=g) < 0.9
    groups = -(-cols // (2 * n))
    order = torch.rand(rows, groups, 2 * n, generator=g).argsort(-1)
    fewer = torch.randint(0, 8, (rows, groups, 1), generator=g).clamp(max=2 * n - 2) * (
        torch.rand(rows, groups, 1, generator=g) < 0.3
    )
    return (order < 2 * n - 2 - fewer).view(rows, -1)[:, :cols]


def weight(rows: int, cols: int, n: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Signed normal values, none zero by chance, under a mask of the pattern."""
    w = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))
    return torch.where(random_mask(rows, cols, n, seed), torch.where(w.abs() < 1e-3, 1.0, w), 0.0).to(dtype)


def integers(*shape: int, most: int, seed: int = 0) -> Tensor:
    """Signed integers, none of them zero."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(1, most + 1, shape, generator=g) * (torch.randint(0, 2, shape, generator=g) * 2 - 1)


def source_of(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype.itemsize == 1 else dtype


def assert_codes(got: Tensor, wanted: Tensor) -> None:
    """Same bytes; any NaN of float8 equals any other."""
    assert got.dtype == wanted.dtype
    nan = wanted.float().isnan()
    assert torch.equal(got.cpu().float().isnan(), nan)
    zero = torch.zeros((), dtype=torch.uint8)
    bits = torch.uint8 if wanted.element_size() == 1 else torch.int16
    assert torch.equal(*(torch.where(nan, zero, t.cpu().contiguous().view(bits)) for t in (got, wanted)))


@pytest.mark.slow
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("n", PATTERNS)
def test_bytes_are_the_specified_ones(n: int, dtype: torch.dtype, device: str) -> None:
    for rows, cols in ((1, 1), (3, 17), (65, 77), (70, 203)):
        codes = integers(rows, cols, most=7) * random_mask(rows, cols, n)
        codes = codes.to(dtype)
        packed, scale, dropped = ops.slide_pack(codes.to(device), n, dtype)
        assert_same_bits(packed, reference.slide_pack(codes, n))
        assert_same_bits(scale, torch.ones(rows))
        assert dropped.item() == 0
        assert_codes(ops.slide_unpack(packed, scale, cols, n, dtype), codes)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [INT8, torch.float16])
@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_every_mask_loses_nothing(n: int, dtype: torch.dtype, device: str) -> None:
    masks = all_masks(n)
    w = (integers(*masks.shape, most=100) * masks).to(dtype)
    # Each mask alone, then behind and before others: windows of a tile begin inside groups.
    for codes in (w, torch.cat([w, w.flip(0), w.roll(7, 0)], 1)):
        packed, scale, _ = ops.slide_pack(codes.to(device), n, dtype)
        assert_same_bits(ops.slide_unpack(packed, scale, codes.shape[1], n, dtype), codes)
        identity = torch.eye(codes.shape[1], dtype=torch.float16, device=device)
        if device == "cpu" or dtype == torch.float16:
            halves = ops.slide_pack(codes.half().to(device), n, torch.float16)[:2]
            y = ops.slide_linear(identity, *halves, codes.shape[1], n, torch.float16)
            assert torch.equal(y.cpu(), codes.half().t())


@given(st.sampled_from([6, 7, 8]), st.integers(1, 90), st.integers(1, 300), st.integers(0, 2**31))
def test_random_masks_of_wide_patterns_lose_nothing(n: int, rows: int, cols: int, seed: int) -> None:
    codes = weight(rows, cols, n, torch.bfloat16, seed)
    packed, scale, _ = ops.slide_pack(codes, n, torch.bfloat16)
    assert_same_bits(ops.slide_unpack(packed, scale, cols, n, torch.bfloat16), codes)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [INT8, FP8])
def test_weight_is_quantised_by_row(dtype: torch.dtype, device: str) -> None:
    w = weight(130, 333, 4, torch.bfloat16)
    w[3] = 0
    w[7, w[7] != 0] = 1e-38
    packed, scale, _ = ops.slide_pack(w.to(device), 4, dtype)
    codes, wanted = reference.slide_quantise(w, dtype)
    assert_same_bits(scale, wanted)
    assert_codes(
        ops.slide_unpack(packed, scale, 333, 4, dtype), torch.where(codes.float() == 0, 0, codes.float()).to(dtype)
    )


@pytest.mark.parametrize("device", devices())
def test_too_full_group_is_named(device: str) -> None:
    w = weight(200, 100, 4, torch.float16)
    w[130, 40:48] = torch.tensor([1, 1, 1, 0, 1, 1, 1, 1])
    w[131, 0:8] = 1
    with pytest.raises(RuntimeError, match=r"6:8: row 130, group 5 \(columns 40 to 47\) has 7 non-zeros, expected at"):
        ops.slide_pack(w.to(device), 4, INT8)
    packed, scale, dropped = ops.slide_pack(w.to(device), 4, torch.float16, prune=True)
    assert dropped.item() == 3
    kept = ops.slide_unpack(packed, scale, 100, 4, torch.float16).cpu()
    assert torch.equal(kept[:130], w[:130])
    assert kept[131, :8].tolist() == [1, 1, 1, 1, 1, 1, 0, 0]


def test_pruning_drops_the_smallest() -> None:
    w = torch.tensor([[3.0, -1, 2, float("nan")], [5, 4, -float("inf"), 4]])
    packed, scale, dropped = ops.slide_pack(w.half(), 2, torch.float16, prune=True)
    kept = ops.slide_unpack(packed, scale, 4, 2, torch.float16)
    assert dropped.item() == 4
    assert kept.nan_to_num(99, neginf=-98).tolist() == [[3, 0, 0, 99], [5, 0, -98, 0]]


@pytest.mark.parametrize(("device", "source"), device_dtypes())
@pytest.mark.parametrize("n", PATTERNS)
def test_tokens_are_quantised_and_lifted(n: int, source: torch.dtype, device: str) -> None:
    for tokens, cols in ((1, 1), (3, 24), (5, 257), (2, 3584), (2, 20001)):
        x = torch.randn(tokens, cols, generator=torch.Generator().manual_seed(cols)).to(source)
        for dtype in (INT8, FP8, *([source] if source in HALVES else [])):
            lifted, scale = ops.slide_quant_fused(x.to(device), n, dtype)
            codes, wanted = (x, torch.ones(tokens)) if dtype == source else reference.slide_quantise(x, dtype)
            assert_same_bits(scale, wanted)
            assert_codes(lifted, reference.slide_lift(codes, n))


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "cols"), [(140, 3592), (140, 9001), (2, 70_008), (140, 70_003)])
def test_tokens_of_every_launch(tokens: int, cols: int) -> None:
    """Few and many tokens, short and long, and longer than a block's registers hold, against the CPU."""
    x = torch.randn(tokens, cols, generator=torch.Generator().manual_seed(cols)).half()
    for n, dtype in product((0, 3, 4, 8), (INT8, FP8, torch.float16)):
        lifted, scale = ops.slide_quant_fused(x.cuda(), n, dtype)
        wanted = ops.slide_quant_fused(x, n, dtype)
        assert_same_bits(scale.cpu(), wanted[1])
        assert_codes(lifted, wanted[0])


@pytest.mark.parametrize(("device", "source"), device_dtypes())
def test_tokens_of_special_numbers(device: str, source: torch.dtype) -> None:
    kind = torch.finfo(source)
    x = torch.randn(8, 96, generator=torch.Generator().manual_seed(0)).to(source)
    x[0] = 0
    x[1, 5] = float("nan")
    x[2, 95] = float("-inf")
    x[3] = kind.smallest_normal
    x[4] = kind.max
    x[5] *= kind.smallest_normal * 8
    x[6, :] = -0.0
    for dtype, n in product((INT8, FP8), (0, 4)):
        lifted, scale = ops.slide_quant_fused(x.to(device), n, dtype)
        codes, wanted = reference.slide_quantise(x, dtype)
        assert torch.equal(scale.cpu().isnan(), wanted.isnan())
        assert_same_bits(scale.cpu().nan_to_num(), wanted.nan_to_num())
        assert_codes(lifted, reference.slide_lift(codes, n))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [INT8, FP8])
def test_nan_and_inf_stay_in_their_token(dtype: torch.dtype, device: str) -> None:
    multiplied(device, dtype)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).half()
    x[1, 3], x[3, 9] = float("nan"), float("inf")
    weights = ops.slide_pack(weight(40, 64, 4, torch.float16).to(device), 4, dtype)[:2]
    y = ops.slide_linear(x.to(device), *weights, 64, 4, dtype).cpu()
    assert torch.equal(y.isnan().all(1), torch.tensor([False, True, False, True, False]))
    assert y[::2].isfinite().all()


#: tokens, rows, cols: every token tile, edges of 16, 32, 64, 128, 256, rows that no bulk store can write.
SIZES = [(1, 8, 8), (1, 1, 1), (16, 64, 128), (17, 200, 384), (37, 520, 1000), (64, 65, 515), (100, 136, 2048),
         (129, 264, 300), (300, 513, 777), (515, 1032, 1056)]  # fmt: skip


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("n", PATTERNS)
@pytest.mark.parametrize("dtype", TYPES)
def test_integer_products_are_exact(dtype: torch.dtype, n: int, device: str) -> None:
    multiplied(device, dtype)
    for tokens, rows, cols in SIZES if device == "cuda" or (n, dtype) == (4, INT8) else SIZES[:6]:
        # Sums stay within what fp32, and what float8's tensor cores, count exactly; the output rounds once.
        few = {INT8: cols, FP8: 200}.get(dtype, 1000)
        codes = integers(rows, cols, most=100 if dtype == INT8 else 3, seed=rows) * random_mask(rows, cols, n)
        q = integers(tokens, cols, most=127 if dtype == INT8 else 3, seed=tokens)
        q *= torch.rand(cols, generator=torch.Generator().manual_seed(1)).argsort() < few
        bias = integers(rows, most=50, seed=3).to(torch.bfloat16)
        packed, scale, _ = ops.slide_pack(codes.to(dtype).to(device), n, dtype)
        scale = torch.where(torch.arange(rows) % 2 == 0, 0.5, 1.0).to(device)
        token_scale = torch.where(torch.arange(tokens) % 3 == 0, 2.0, 1.0)
        lifted = reference.slide_lift(q.to(dtype).float(), n).to(dtype)
        for out_dtype in (torch.bfloat16, torch.float16):
            given = lifted.to(device), token_scale.to(device), packed, scale
            y = ops.slide_gemm(*given, cols, n, out_dtype, bias.to(device, out_dtype))
            wanted = (q.double() @ codes.double().t()) * token_scale.double()[:, None] * scale.cpu().double()
            assert_same_bits(y, (wanted + bias.double()).float().to(out_dtype))


def assert_exact(tokens: int, rows: int, cols: int, n: int, dtype: torch.dtype) -> None:
    """A product of small integers, with at most 200 columns of x, on the GPU."""
    codes = integers(rows, cols, most=3, seed=rows) * random_mask(rows, cols, n)
    q = integers(tokens, cols, most=3, seed=tokens)
    q *= torch.rand(cols, generator=torch.Generator().manual_seed(1)).argsort() < 200
    packed, scale, _ = ops.slide_pack(codes.to(dtype).cuda(), n, dtype)
    lifted = reference.slide_lift(q.to(dtype).float(), n).to(dtype).cuda()
    y = ops.slide_gemm(lifted, torch.ones(tokens, device="cuda"), packed, scale, cols, n, torch.bfloat16)
    assert_same_bits(y, (q.cuda().double() @ codes.cuda().double().t()).to(torch.bfloat16))


def ways(tile: str) -> list[str]:
    """The clusters that a tile has: large ones that share k tiles come alone or in pairs."""
    shared = [f"{blocks}x{splits}" for blocks in (1, 2) for splits in (2, 3, 4)]
    of_tile = {"64x16": ["1x1", "1x2", "1x3", "1x4"], "64x32": ["1x1", "1x2", "1x3", "1x4"], "64x64": ["1x1", "1x2"]}
    more = {"128x64": shared, "128x128": ["2x1", *shared], "128x192": ["2x1"], "128x256": ["2x1", *shared]}
    return {**of_tile, **more}[tile]


@pytest.mark.gpu
@pytest.mark.parametrize("tile", ["64x16", "64x32", "64x64", "128x64", "128x128", "128x192", "128x256"])
@pytest.mark.parametrize("n", [0, 4])
@pytest.mark.parametrize("dtype", TYPES)
def test_every_tile(dtype: torch.dtype, n: int, tile: str, plan: Plan) -> None:
    multiplied("cuda", dtype)
    of_tile = int(tile.split("x")[1])
    for cluster in (() if tile == "128x64" else ("",)) + tuple(ways(tile)):
        plan(f"slide_tile={tile}" + (f",slide_cluster={cluster}" if cluster else ""))
        # Long enough for four blocks to share a tile, and short: fewer share it then.
        for tokens, rows, cols in ((of_tile - 3, 72, 4400 // dtype.itemsize), (of_tile + 5, 136, 200)):
            assert_exact(tokens, rows, cols, n, dtype)


@pytest.mark.gpu
def test_every_plan_of_few_tokens_runs(plan: Plan) -> None:
    """Of many sizes, and on GPUs with fewer SMs."""
    choice, types = random.Random(0), multiplied("cuda", INT8, FP8)
    for _ in range(60):
        plan(f"sms={choice.choice((2, 6, 26, 78, 114, 132))}")
        tokens, rows, cols = choice.randint(33, 260), choice.randint(1, 3000), choice.randint(1, 6000)
        assert_exact(tokens, rows, cols, choice.choice((0, 2, 4)), choice.choice(types))


@pytest.mark.gpu
@pytest.mark.parametrize("n", [0, 2, 3, 4, 8])
@pytest.mark.parametrize("dtype", TYPES)
def test_kernel_of_other_gpus(dtype: torch.dtype, n: int, plan: Plan) -> None:
    """mma.sync in place of wgmma: exact in integers, at every size of tile; int8 gives the same bits."""
    plan("copy=cp_async")
    test_integer_products_are_exact(dtype, n, "cuda")
    assert_exact(2100, 1800, 333, n, dtype)
    w, source = weight(200, 1203, n, source_of(dtype)), source_of(dtype)
    packed = ops.slide_pack(w.cuda(), n, dtype)[:2]
    x, bias = torch.randn(70, 1203).to(source), torch.randn(200).to(source)
    y = ops.slide_linear(x.cuda(), *packed, 1203, n, dtype, bias.cuda())
    assert_close_slide(y, x, w, (*packed, dtype), n, bias)
    plan("copy=bulk")
    if dtype == INT8:
        assert_same_bits(y, ops.slide_linear(x.cuda(), *packed, 1203, n, dtype, bias.cuda()))


@pytest.mark.gpu
@pytest.mark.parametrize("tile", ["128x128", "256x128"])
@pytest.mark.parametrize("n", [0, 4])
@pytest.mark.parametrize("dtype", [INT8, torch.bfloat16])
def test_last_wave_of_other_gpus_is_nearly_empty(dtype: torch.dtype, n: int, tile: str, plan: Plan) -> None:
    """Just more tiles than there are blocks at a time."""
    plan(f"copy=cp_async,slide_tile={tile}")
    num_sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    assert_exact(200, 256 * (num_sms // 2 + 2) + 40, 4400 // dtype.itemsize, n, dtype)  # a block an SM, or two


@pytest.mark.gpu
@pytest.mark.parametrize("n", [0, 4])
@pytest.mark.parametrize("dtype", TYPES)
def test_tiles_fit_into_the_shared_memory_of_other_gpus(dtype: torch.dtype, n: int, plan: Plan) -> None:
    """Two stages of the largest dense tile do not fit into 99 KB."""
    multiplied("cuda", dtype)
    plan("copy=cp_async,shared_kb=99,slide_tile=256x128")
    assert_exact(600, 300, 700, n, dtype)


def test_gpus_without_float8_products_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    for capability, has in {(7, 5): (), (8, 0): (INT8,), (8, 9): (INT8, FP8), (9, 0): (INT8, FP8), (10, 0): (INT8,),
                            (12, 0): (INT8, FP8)}.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert [dtype for dtype in (INT8, FP8) if SlideWeight.runs(device, dtype)] == list(has)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", ["", "128x128", "128x192", "128x256"])
@pytest.mark.parametrize("tokens", [1700, 2100])
@pytest.mark.parametrize("n", [0, 4])
def test_blocks_go_on_to_other_tiles_and_halves(n: int, tokens: int, tile: str, plan: Plan) -> None:
    # On 132 SMs, 66 clusters: 280 to 340 tiles of 128 tokens, 180 and 220 of 192, 140 and 180 of 256. Some of the last
    # rounds have less than half of the clusters at work, and take halves of tiles.
    packed, scale, _ = ops.slide_pack(weight(5000, 256, 4, torch.bfloat16).cuda(), n, INT8)
    x = torch.randn(tokens, 256, device="cuda").bfloat16()
    parts = [ops.slide_linear(part, packed, scale, 256, n, INT8) for part in x.split(50)]
    if tile:
        plan(f"slide_tile={tile}")
    assert_same_bits(ops.slide_linear(x, packed, scale, 256, n, INT8), torch.cat(parts))


@pytest.mark.gpu
def test_output_of_more_than_2_31_numbers() -> None:
    tokens, rows, cols = 70_000, 32_768, 64
    if torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("needs 8 GiB")
    packed, scale, _ = ops.slide_pack(weight(rows, cols, 4, torch.bfloat16).cuda(), 4, INT8)
    x = torch.randn(tokens, cols, device="cuda").bfloat16()
    y = ops.slide_linear(x, packed, scale, cols, 4, INT8)
    for first in (0, 65_500, tokens - 50):
        part = ops.slide_linear(x[first : first + 50].clone(), packed, scale, cols, 4, INT8)
        assert_same_bits(y[first : first + 50], part)


def assert_close_slide(y: Tensor, x: Tensor, w: Tensor, packed: tuple, n: int, bias: Tensor | None = None) -> None:
    """y against the float64 product of the quantised numbers, within what the way of summing allows.

    int8 sums are exact: the sum's, the token scale's and the row scale's roundings to fp32 are left, then the output's.
    Others: each of the `depth` additions rounds to fp32; float8 tensor cores keep at least 13 bits behind the largest.
    """
    dtype = packed[2]
    codes = ops.slide_unpack(packed[0], packed[1], w.shape[1], n, dtype).cpu()
    wanted = reference.slide_linear(x, codes, packed[1], bias)
    size = reference.slide_linear(x.abs(), codes.double().abs(), packed[1]) if dtype.itemsize == 2 else None
    if size is None:
        q, token_scale = reference.slide_quantise(x, dtype)
        size = (
            (q.double().abs() @ codes.double().abs().t()) * token_scale.double()[..., None] * packed[1].cpu().double()
        )
    steps = 4 if dtype == INT8 else reference.slide_depth(w.shape[1], n) + 4
    error = size * steps * 2.0**-24
    if dtype == FP8 and y.is_cuda:
        error += size * (reference.slide_depth(w.shape[1], n) // 32 + 1) * 2.0**-13
    if bias is not None:
        error += (wanted.abs() + bias.cpu().double().abs()) * 2.0**-23
    kind = torch.finfo(y.dtype)
    error += (wanted.abs() + error) * kind.eps / 2 + kind.smallest_normal * kind.eps
    off = (y.cpu().double() - wanted).abs()
    assert (off <= error).all(), f"worst {(off / error).max():.3g} of the bound"


@pytest.mark.parametrize(("device", "source"), device_dtypes())
@pytest.mark.parametrize("n", [0, 2, 4])
def test_linear_within_its_bound(n: int, source: torch.dtype, device: str) -> None:
    for tokens, rows, cols in ((1, 72, 640), (33, 200, 1203), (70, 128, 500)):
        w = weight(rows, cols, n, source)
        x = torch.randn(2, tokens, cols, generator=torch.Generator().manual_seed(1)).to(source)
        bias = torch.randn(rows, generator=torch.Generator().manual_seed(2)).to(source)
        for dtype in multiplied(device, INT8, FP8, *([source] if source in HALVES else [])):
            packed = ops.slide_pack(w.to(device), n, dtype)[:2]
            y = ops.slide_linear(x.to(device), *packed, cols, n, dtype, bias.to(device))
            assert y.shape == (2, tokens, rows)
            assert_close_slide(y, x, w, (*packed, dtype), n, bias)
            plain = ops.slide_linear(x.to(device), *packed, cols, n, dtype)
            assert_close_slide(plain, x, w, (*packed, dtype), n)


def test_cpu_paths_agree(cpu_path: str) -> None:
    w, x = weight(70, 700, 4, torch.float32), torch.randn(9, 700)
    for dtype in (INT8, FP8):
        packed = ops.slide_pack(w, 4, dtype)[:2]
        assert_close_slide(ops.slide_linear(x, *packed, 700, 4, dtype), x, w, (*packed, dtype), 4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("n", [0, 2, 4])
def test_gpu_gives_the_bits_of_the_cpu(n: int, dtype: torch.dtype) -> None:
    source = source_of(dtype)
    w, x = weight(300, 900, n, source), torch.randn(130, 900).to(source)
    cpu, gpu = ops.slide_pack(w, n, dtype), ops.slide_pack(w.cuda(), n, dtype)
    for a, b in zip(cpu, gpu, strict=True):
        assert_same_bits(a, b.cpu())
    if dtype == INT8:
        assert_same_bits(
            ops.slide_linear(x.cuda(), *gpu[:2], 900, n, dtype), ops.slide_linear(x, *cpu[:2], 900, n, dtype)
        )


@pytest.mark.gpu
def test_nothing_behind_the_output_is_written() -> None:
    w = weight(200, 512, 4, torch.bfloat16).cuda()
    packed = ops.slide_pack(w, 4, INT8)[:2]
    for tokens in (1, 20, 70, 300):
        before = torch.full((1 << 22,), 7, dtype=torch.bfloat16, device="cuda")
        del before  # its memory is what the next output gets
        y = ops.slide_linear(torch.randn(tokens, 512, device="cuda").bfloat16(), *packed, 512, 4, INT8)
        assert y.isfinite().all()


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("shape", [(0, 16), (3, 0), (0, 0)])
def test_empty(shape: tuple[int, int], device: str) -> None:
    for n, dtype in product((0, 2, 4), (INT8, torch.float16)):
        packed, scale, _ = ops.slide_pack(torch.zeros(shape, dtype=torch.float16, device=device), n, dtype)
        x = torch.ones(2, shape[1], dtype=torch.float16, device=device)
        bias = torch.ones(shape[0], dtype=torch.float16, device=device)
        y = ops.slide_linear(x, packed, scale, shape[1], n, dtype, bias)
        assert torch.equal(y.cpu(), torch.ones(2, shape[0], dtype=torch.float16))
        assert ops.slide_linear(x[:0], packed, scale, shape[1], n, dtype).shape == (0, shape[0])


def test_errors_name_the_argument() -> None:
    w = weight(8, 16, 4, torch.float16)
    packed, scale, _ = ops.slide_pack(w, 4, INT8)
    x = torch.ones(2, 16, dtype=torch.float16)
    for message, op, *arguments in (
        ("n is 1, expected 2 to 8", ops.slide_pack, w, 1, INT8),
        ("dtype is float64, expected int8", ops.slide_pack, w, 4, torch.float64),
        ("w has dtype float16, expected bfloat16, which is to be kept", ops.slide_pack, w, 4, torch.bfloat16),
        (r"shape \[1, 2, 5120\], expected \[1, 2, 8192\]", ops.slide_linear, x, packed, scale, 16, 0, INT8),
        (r"x has shape \[2, 15\], expected \[..., 16\]", ops.slide_linear, x[:, :15], packed, scale, 16, 4, INT8),
        ("bias has 7 elements, the matrix has 8", ops.slide_linear, x, packed, scale, 16, 4, INT8, x.new_ones(7)),
    ):
        with pytest.raises(RuntimeError, match=message):
            op(*arguments)


@pytest.mark.slow
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", [INT8, torch.float16])
def test_opcheck(dtype: torch.dtype, device: str) -> None:
    w = weight(72, 96, 4, torch.float16).to(device)
    x = torch.randn(3, 5, 96).half().to(device)
    bias = torch.randn(72).half().to(device)
    packed, scale, _ = ops.slide_pack(w, 4, dtype)
    lifted, token_scale = ops.slide_quant_fused(x, 4, dtype)
    namespace = torch.ops.macko
    slide, element = LAYOUTS.index("slide"), SLIDE_ELEMENTS.index(dtype)
    whole = [packed, scale, packed.new_empty(0, 0, 0)], [slide, 72, 96, 4, element, 0, 0, 0]
    checks = (
        (namespace.pack, (w, slide, [4, element, 0, 0])),
        (namespace.dense, whole),
        (namespace.slide_quant_fused, (x, 4, dtype)),
        (namespace.slide_gemm, (lifted, token_scale, packed, scale, 96, 4, torch.float16, bias)),
        (namespace.linear, (x.clone().requires_grad_(), *whole, bias.clone().requires_grad_())),
    )
    for op, arguments in checks:
        torch.library.opcheck(op, arguments)


def test_gradient_is_that_of_the_dequantised_weight() -> None:
    w = weight(20, 33, 4, torch.float32)
    packed, scale, _ = ops.slide_pack(w, 4, INT8)
    dense = ops.slide_unpack(packed, scale, 33, 4, INT8).float() * scale[:, None]
    x, bias, grad = torch.randn(4, 33, requires_grad=True), torch.zeros(20, requires_grad=True), torch.randn(4, 20)
    ops.slide_linear(x, packed, scale, 33, 4, INT8, bias).backward(grad)
    torch.testing.assert_close(x.grad, grad @ dense)
    torch.testing.assert_close(bias.grad, grad.sum(0))


@pytest.mark.gpu
@needs_capture
@pytest.mark.parametrize("dtype", [INT8, FP8, torch.bfloat16])
def test_captured_and_compiled(dtype: torch.dtype) -> None:
    multiplied("cuda", dtype)
    w = weight(264, 512, 4, torch.bfloat16).cuda()
    packed, scale, _ = ops.slide_pack(w, 4, dtype)
    x = torch.randn(70, 512, device="cuda").bfloat16()

    def call(x: Tensor) -> Tensor:
        return ops.slide_linear(x, packed, scale, 512, 4, dtype)

    wanted = call(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call(x)
    y.fill_(float("nan"))
    graph.replay()
    assert_same_bits(y, wanted)
    assert_same_bits(torch.compile(call, fullgraph=True, dynamic=True)(x), wanted)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        other = call(x)
    side.synchronize()
    assert_same_bits(other, wanted)


def test_sparsest_pattern() -> None:
    for n in (2, 3, 4, 5, 6, 7, 8):
        full = torch.zeros(2, 2 * n * 9, dtype=torch.float16)
        full.view(2, -1, 2 * n)[:, :, 1:-1] = 1
        assert sparsest_pattern(full) == n
    assert sparsest_pattern(torch.ones(2, 64)) == 0
    assert sparsest_pattern(torch.zeros(0, 64)) == 2


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("element", range(4))
@pytest.mark.parametrize("n", [0, 2, 4])
def test_packed_weight(n: int, element: int, device: str) -> None:
    multiplied(device, SLIDE_ELEMENTS[element])
    dtype = source_of(SLIDE_ELEMENTS[element])
    w = weight(72, 130, n, dtype).to(device)
    packed = SlideWeight.from_dense(w, n, element)
    packed.validate()
    assert packed.dtype == dtype
    codes = ops.slide_unpack(packed.tiles, packed.scale, 130, n, SLIDE_ELEMENTS[element])
    assert packed.density == int((codes.float() != 0).sum()) / codes.numel()
    if element >= 2:
        assert_same_bits(packed.to_dense(), w)
    x = torch.randn(3, 130).to(dtype).to(device)
    assert_close_slide(packed.linear(x), x, w, (packed.tiles, packed.scale, SLIDE_ELEMENTS[element]), n)
    if element < 2:
        assert packed.to(dtype=torch.float16).linear(x.half()).dtype == torch.float16
        for number in ("nan", "inf"):
            w[7, 0] = float(number)
            with pytest.raises(ValueError, match="row 7 of the weight has NaN or Inf, which"):
                SlideWeight.from_dense(w, -1, element).of_finite()


@pytest.mark.parametrize("element", [-1, 0])
def test_packs_on_meta_and_in_a_compiled_graph(element: int) -> None:
    w = weight(72, 130, 4, torch.bfloat16)
    packed = SlideWeight.from_dense(w, 4, element)
    there = packed.to("meta")
    for got, wanted in (
        (SlideWeight.from_dense(w.to("meta"), 4, element), packed),
        (there.cut(0, 3, 40), packed.cut(0, 3, 40)),
        (there.as_pattern(0), packed.as_pattern(0)),
        (there.of_columns(w.to("meta"), w[:, 0].to("meta")), packed),
    ):
        assert [t.shape for t in got.tensors().values()] == [t.shape for t in wanted.tensors().values()]
    call = torch.compile(lambda w: SlideWeight.from_dense(w, 4, element).to_dense(), fullgraph=True, backend="eager")
    assert_same_bits(call(w), packed.to_dense())


def test_hostile_bytes_are_named_and_harmless() -> None:
    packed = SlideWeight.from_dense(weight(72, 130, 4, torch.float16), 4, 0)
    for place in (0, 4096, 4097, 5119):
        broken = packed.tiles.clone()
        broken[1, 0, place] ^= 0x5A
        hostile = SlideWeight(broken, packed.scale, packed.dense_tiles, 72, 130, 4, 0, 0)
        if place:
            with pytest.raises(ValueError, match="row block 1, tile 0"):
                hostile.validate()
        hostile.linear(torch.ones(2, 130, dtype=torch.float16))
    changed = (
        {"scale": packed.scale * float("nan")},
        {"n": 3},
        {"cols": 900},
        {"element": 7},
        {"rows": 5},
        {"scale": -packed.scale},
        {"sparse_to": 9},
    )
    for changes in (*changed, {"dense_tiles": packed.tiles}):
        with pytest.raises(ValueError, match="not a slide weight"):
            SlideWeight(**{**packed.tensors(), **packed.sizes(), **changes}).validate()


def test_a_file_with_two_weights_in_one_is_refused_by_name(tmp_path: Path) -> None:
    """As keep_dense=True once made them; those of one weight have the same names, and load."""

    def blank() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(130, 72, bias=False)).half()

    packed, file = SlideWeight.from_dense(weight(72, 130, 4, torch.float16), 4, 0), tmp_path / "model.safetensors"
    macko.save_model(torch.nn.Sequential(SparseLinear.from_packed(packed)), file)
    with safe_open(file, "pt") as opened:
        tensors, about = load_file(file), json.loads(opened.metadata()["macko"])
    assert tensors["0.dense_tiles"].shape == (0, 0, 0)
    assert about["layers"]["0"] == {**about["layers"]["0"], "sparse_from": 0, "sparse_to": 0}
    macko.load_model(blank(), file)
    about["layers"]["0"]["sparse_to"] = 64
    save_file(tensors, tmp_path / "both.safetensors", metadata={"macko": json.dumps(about)})
    with pytest.raises(ValueError, match=r"layers\['0'\]: sparse_to is 64, expected 0"):
        macko.load_model(blank(), tmp_path / "both.safetensors")


def test_sparsify_with_a_pattern() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(*size) for size in ((256, 192), (192, 128), (128, 128)))).half()
    with torch.no_grad():
        model[0].weight.copy_(weight(192, 256, 4, torch.float16))
        model[1].weight.copy_(weight(128, 192, 2, torch.float16))
    report = macko.sparsify_(model, format="slide 6:8", values="int8")
    assert isinstance(model[0], SparseLinear)
    assert [row.format for row in report.layers] == ["slide 6:8 int8", "slide 6:8 int8", "dense"]
    assert "row 0, group 0" in report.layers[2].reason
    x = torch.randn(5, 256).half()
    assert model(x).shape == (5, 128)
    again = torch.nn.Sequential(SparseLinear(256, 192, dtype=torch.float16))
    again.load_state_dict(torch.nn.Sequential(model[0]).state_dict())
    assert_same_bits(again(x), model[0](x))
    with pytest.raises(ValueError, match="pattern is '5:8'"):
        macko.sparsify_(model, format="slide 5:8")
    with pytest.raises(ValueError, match='a pattern is of formats "slide" and "mixed", the format is \'auto\''):
        macko.sparsify_(model, format="auto 6:8")
    with pytest.raises(ValueError, match="values is 'raw', format 'slide' takes exact, fp8, int8"):
        macko.sparsify_(model, format="slide", values="raw")
    with pytest.raises(ValueError, match="format has the pattern 6:8, and pattern is '2:4'"):
        Options("slide 6:8", pattern="2:4")


def test_a_layer_is_packed_for_another_pattern() -> None:
    dense = torch.nn.Linear(256, 192, dtype=torch.float16)
    with torch.no_grad():
        dense.weight.copy_(weight(192, 256, 2, torch.float16))
    layer = SparseLinear.from_linear(dense, "slide")
    held = layer.packed.tensors()["tiles"].data_ptr()
    for format, label, same in (
        ("slide", "slide 2:4 float16", True),
        ("slide 2:4", "slide 2:4 float16", True),
        ("slide 6:8", "slide 6:8 float16", False),
    ):
        layer.reformat_(format)
        assert (layer.packed.label, layer.packed.tensors()["tiles"].data_ptr() == held) == (label, same)
    assert_same_bits(layer.weight, dense.weight)


def test_dtype_and_pattern_are_values_and_a_part_of_format_now() -> None:
    full = torch.randn(192, 256).half()
    full[:, ::4] = 0  # all that 6:8 allows
    for format in ("slide", "mixed"):
        packed = []
        for _ in range(2):
            layer = torch.nn.Linear(256, 192, bias=False).half()
            layer.weight.data.copy_(full)
            packed.append(torch.nn.Sequential(layer))
        with pytest.warns(DeprecationWarning, match="now") as said:
            old = macko.sparsify_(packed[0], format=format, pattern="6:8", dtype="int8")
        texts = [str(warning.message) for warning in said]
        assert texts == [
            "sparsify_(dtype='int8') is values='int8' now",
            f"sparsify_(pattern='6:8') is format=\"{format} 6:8\" now",
        ]
        assert {warning.filename for warning in said} == {__file__}
        assert old == macko.sparsify_(packed[1], format=f"{format} 6:8", values="int8")
        assert old[0].format == "slide 6:8 int8"
        assert_same_bits(packed[0][0].packed.tiles, packed[1][0].packed.tiles)
        assert packed[0][0].reformat_("slide 6:8").packed.label == "slide 6:8 int8"  # is held so already
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    for dtype in ({"format": "auto"}, {"format": "slide", "values": "fp8"}):
        with pytest.raises(ValueError, match='dtype is of formats "slide" and "mixed", without values'):
            macko.sparsify_(model, dtype="int8", **dtype)  # type: ignore[arg-type]
    for gone in ("keep_dense", "no_such"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{gone}'"):
            macko.sparsify_(model, format="slide", **{gone: True})  # type: ignore[arg-type]


def gains(rows: int, cols: int, gain: dict[str, float], pattern: str = "6:8") -> times.Line:
    return {"rows": rows, "cols": cols, "dtype": "int8", "pattern": pattern, "gain": gain}


def known(monkeypatch: pytest.MonkeyPatch, *lines: times.Line) -> None:
    """These lines of 6:8 are all that is known of the GPU "GPU"."""
    tables = {"GPU": times.Times("GPU", 1.0, (), True, {("int8", "6:8"): lines})}
    for module in (choose, times):
        monkeypatch.setattr(module, "times", lambda gpu: tables.get(gpu, times.Times(gpu, 1.0, (), False)))


def test_choice_follows_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    known(monkeypatch, gains(100, 100, {"16": 1.1, "4096": 0.9}), gains(9000, 100, {"1": 1.5}))
    small = (90, 120)
    assert times.times("GPU").slide_gain(INT8, 4, small, 1) == 1.1
    assert times.times("GPU").slide_gain(INT8, 4, small, 9000) == 0.9
    assert times.times("GPU").slide_gain(INT8, 4, small, 256) == pytest.approx(1.0)
    assert times.times("GPU").slide_gain(INT8, 4, (5000, 120), 9000) == 1.5
    assert times.times("GPU").slide_gain(INT8, 3, small, 1) is None
    assert times.times("other").slide_gain(INT8, 4, small, 1) is None


def test_the_faster_kernel_at_these_tokens_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    known(monkeypatch, gains(128, 256, {"16": 1.1, "4096": 0.9}))
    on_gpu = FakeDevice(weight(128, 256, 4, torch.float16))
    for tokens, label in ((4096, "slide dense int8"), (8, "slide 6:8 int8")):
        assert pack(on_gpu, Options("slide 6:8", tokens, values="int8")).label == label


@pytest.mark.parametrize("capability", [(8, 6), (8, 9), (9, 0), (12, 0)])
def test_nobody_measured_this_gpu(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of the kernel for other GPUs than 9.0 what was measured on a 9.0 is taken, and a table of the user's counts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    times.times.cache_clear()

    def packed_as(n: int, pattern: str, tokens: int = 2048) -> tuple[str, str]:
        options, w = Options(f"slide {pattern}", tokens, values="int8"), weight(128, 480, n, torch.float16)
        packed = pack(FakeDevice(w), options)
        return packed.label, choose.slide_note(FakeDevice(w), packed, options)

    assert packed_as(2, "2:4") == packed_as(2, "auto") == ("slide 2:4 int8", "")
    for n, pattern in ((3, "4:6"), (4, "6:8"), (5, "8:10"), (8, "14:16")):
        for asked in (pattern, "auto"):
            for tokens in (512, 2048):
                label, note = packed_as(n, asked, tokens)
                if capability == (9, 0) or (n <= 4 and tokens == 2048):
                    assert (label, note) == (f"slide {pattern} int8", "")
                else:
                    assert label == "slide dense int8"
                    where = f"nobody measured {pattern} int8 at {tokens} tokens on Some GPU"
                    assert note == f"{where}; `macko tune` measures it"
    own = [gains(128, 480, {"1": 1.2}), gains(128, 480, {"1": 0.8}, "2:4")]
    times.write(times.cache_file("Some GPU"), "Some GPU", [], own, 0)
    times.times.cache_clear()
    assert packed_as(4, "6:8") == ("slide 6:8 int8", "")
    assert packed_as(2, "2:4") == ("slide dense int8", "2:4 would take 1.25 of dense's time at 2048 tokens")
    times.times.cache_clear()


def test_report_says_why_a_pattern_is_held_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "slide_layout", lambda w, n, dtype, tokens: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    for dtype, advice in (("int8", "; `macko tune` measures it"), (None, "")):
        model = torch.nn.Sequential(torch.nn.Linear(256, 192, bias=False)).half()
        with torch.no_grad():
            model[0].weight.copy_(weight(192, 256, 4, torch.float16))
        (row,) = macko.sparsify_(model, format="slide 6:8", values=dtype or "exact")
        note = f"nobody measured 6:8 {dtype or 'float16'} at 2048 tokens on Some GPU{advice}"
        if dtype:
            assert (row.format, row.note, row.reason) == ("slide dense int8", note, "")
        else:  # a dense weight of 16 bits is not packed
            assert (row.format, row.reason) == ("dense", note)
        assert note in str(macko.Report([row]))


@pytest.mark.parametrize(("format", "values"), [("slide", "int8"), ("slide", "fp8"), ("mixed", "int8")])
def test_what_is_interrupted_has_its_weights_again(format: str, values: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the rounded ones."""
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(2))).half()
    for layer in model:
        layer.weight.data = weight(256, 256, 4, torch.float16)  # type: ignore[operator]
    before = [parameter.detach().clone() for parameter in model.parameters()]

    def fails(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("macko.nn.convert.merge_", fails)
    with pytest.raises(KeyboardInterrupt):
        macko.sparsify_(model, format=format, values=values, merge=True, progress=False)
    for parameter, wanted in zip(model.parameters(), before, strict=True):
        assert_same_bits(parameter.detach(), wanted)


class FakeDevice(Tensor):
    """A tensor that says that it is on a GPU."""

    @staticmethod
    def __new__(cls, tensor: Tensor) -> "FakeDevice":
        return tensor.as_subclass(cls)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)


def test_groups_that_straddle_shards_are_named() -> None:
    check_shards(4096, 2, "6:8")
    check_shards(11008, 8, "2:4")
    with pytest.raises(ValueError, match=r"group 917 of 4:6 \(columns 5502 to 5507\) straddles shards 0 and 1 of 2"):
        check_shards(11008, 2, "4:6")
    with pytest.raises(ValueError, match="pattern is 'auto', expected one of 2:4"):
        check_shards(11008, 2, "auto")


def test_sharded_weight_is_left_dense_by_name() -> None:
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    init_process_group("fake", rank=0, world_size=3, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (3,))
        model = torch.nn.Sequential(torch.nn.Linear(60, 16, bias=False), torch.nn.Linear(48, 16, bias=False)).half()
        for layer in model:
            layer.weight = torch.nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(1)]))
        report = macko.sparsify_(model, format="slide 6:8", values="int8")
    finally:
        destroy_process_group()
    assert "group 2 of 6:8 (columns 16 to 23) straddles shards 0 and 1 of 3" in report.layers[0].reason
    assert "to_local()" in report.layers[1].reason


def test_own_table_counts_before_the_shipped_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    own = times.cache_file("NVIDIA H200")
    assert own == tmp_path / "macko" / "NVIDIA_H200.json"
    own.parent.mkdir()
    own.write_text(json.dumps({"version": 2, "linear": [], "slide": [gains(64, 64, {"1": 0.5}, "2:4")]}))
    times.times.cache_clear()
    assert times.times("NVIDIA H200").slide_gain(INT8, 2, (64, 64), 1) == 0.5
    assert times.times("NVIDIA H200").slide_gain(FP8, 2, (64, 64), 1) != 0.5
    times.times.cache_clear()


@pytest.mark.gpu
@needs_capture
def test_measured_table_is_what_the_choice_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    gpu = torch.cuda.get_device_name()
    (line,) = measure_slide(dtypes=["int8"], patterns=["2:4"], shapes=[(256, 512)], tokens=[1, 64])
    times.write(times.cache_file(gpu), gpu, [], [line], 0)
    gain = times.times(gpu).slide_gain(INT8, 2, (256, 512), 64)
    times.times.cache_clear()
    assert gain == line["gain"]["64"]
    assert gain is not None
    assert 0.2 < gain < 5


def test_rows_that_stay_dense_are_those_of_the_largest_errors() -> None:
    assert dense_share(torch.tensor([97.0, 1, 1, 1]), 3) == 0.25
    assert dense_share(torch.tensor([1.0, 1, 1, 1]), 3.5) == 0.25
    assert dense_share(torch.tensor([1.0, 1, 1, 1]), 0.5) == 1
    errors = torch.ones(4 * BLOCK)
    errors[::4] = 97  # a quarter of the rows, in every block
    found = spread([{"2:4": errors, "6:8": torch.full_like(errors, 1.0)}])
    assert (found["as_they_are"]["dense_rows"], found["sorted"]["dense_rows"]) == (1, 0.25)
    assert found["error_6_8_over_2_4"] == pytest.approx(0.04)
