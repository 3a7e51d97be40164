"""The dense12 layout: bytes by its specification, every bit back, products for any number of tokens, faults, models."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import macko
from macko import SparseLinear
from macko.choose.exponents import outside_table
from macko.cli import main
from macko.weights.formats import Dense12Weight, Sparse11Weight, TileWeight
from tests import reference
from tests.common import (
    Plan,
    assert_close_library,
    assert_graph_of_layers,
    assert_other_tensors_are_refused,
    assert_same_bits,
    devices,
    each_token,
    integer_problem,
    needs_capture,
    random_vector,
)
from tests.test_tile import GEMM_KEYS, assert_close

#: One element, one row, one column, nothing, less and more than a tile and a slab, whole ones, cols of no 16 bytes.
SHAPES = (
    *((1, 1), (1, 1024), (500, 1), (0, 16), (5, 0), (7, 30), (64, 64), (65, 130), (33, 203), (64, 256), (201, 512)),
    *((130, 320), (40, 1001)),
)
#: What is float16 was bfloat16 before, but where a test says so.
DTYPES = (torch.bfloat16, torch.float16)
#: On both sides of each kernel's ends.
TOKENS = (1, 3, 8, 9, 16, 17, 33, 64, 65, 200, 1000)
#: Where each part of a slab begins, in bytes; docs of the bytes are in csrc/dense12/dense12.h.
PARTS_AT, LIST_AT = 24576, 24640


def weight(rows: int, cols: int, listed: float = 0.005, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal values, and so large a share of others, small and large, of which the table lacks most.

    In float16, where eight values are half of all exponents there are, also some with lower bits than bfloat16 has.
    """
    random = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, cols, generator=random) / 30
    others = w.sign() * 2.0 ** torch.randint(-60, 9, w.shape, generator=random)
    rare = torch.rand(w.shape, generator=random) < listed
    w = torch.where(rare, others, w).bfloat16().to(dtype)
    if dtype == torch.float16:
        w = torch.where(w.abs() < 2.0**-14, 0.25, w)  # no denormals: their lower bits are anything
        w.view(torch.int16)[rare] |= 5
    return torch.where(w == 0, 1, w)


def bits_of(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def packed(w: Tensor, device: str = "cuda") -> Dense12Weight:
    return Dense12Weight.from_dense(w.to(device))


def assert_packs(w: Tensor, device: str) -> Dense12Weight:
    """Bit for bit, zeros' signs and NaN's payloads too; of few elements also the bytes."""
    made = packed(w, device)
    assert_same_bits(made.to_dense(), w)
    made.validate()
    if w.numel() < 300_000:
        data, sizes = reference.dense12_pack(w)
        assert [made.slab_units, made.table_low, made.table_high, made.listed] == sizes
        assert_same_bits(made.data, data)
    elif device != "cpu":
        assert_same_bits(made.data, packed(w, "cpu").data)
    return made


# Bytes.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", devices())
def test_bytes_and_round_trip_of_every_shape(device: str, dtype: torch.dtype) -> None:
    for rows, cols in SHAPES:
        made = assert_packs(weight(rows, cols, 0.0, dtype=dtype), device)
        assert made.nbytes == -(-rows // 64) * -(-cols // 256) * made.slab_units * 128
    assert assert_packs(weight(200, 700, dtype=dtype), device).listed > 100


@pytest.mark.slow
@pytest.mark.parametrize("device", devices())
@given(
    rows=st.integers(0, 140),
    cols=st.integers(0, 600),
    exponents=st.tuples(st.integers(0, 255), st.integers(1, 16)),
    listed=st.sampled_from((0.0, 0.004)),
    seed=st.integers(0, 9),
)
def test_round_trip_of_any_shape_and_range_of_exponents(
    device: str, rows: int, cols: int, exponents: tuple[int, int], listed: float, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    first, count = exponents
    exponent = (first + torch.randint(count, (rows, cols), generator=random)).clamp(max=255)
    rest = torch.randint(256, (rows, cols), generator=random)
    others = torch.randint(2**16, (rows, cols), generator=random)
    bits = (rest & 128) << 8 | exponent << 7 | rest & 127
    bits = torch.where(torch.rand(rows, cols, generator=random) < listed, others, bits)
    for dtype in DTYPES:
        if dtype == torch.float16:
            bits = bits << 3 & 0x7FF8 | bits & 0x8000 | torch.where(others < 200, others & 7, 0)
        w = bits.to(torch.int32).to(torch.int16).view(dtype)
        table = reference.dense12_pack(w)[1]
        if table[3] > w.numel() // 100:
            with pytest.raises(ValueError, match=f"lacks {table[3]} of {w.numel()} elements"):
                packed(w, device)
        else:
            assert_packs(w, device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", devices())
def test_all_bit_patterns(device: str, dtype: torch.dtype) -> None:
    """Those of one exponent and its neighbours alone, and all of them scattered among others."""
    patterns = torch.arange(2**16).to(torch.int32).to(torch.int16)
    whole = patterns[patterns & 7 == 0] if dtype == torch.float16 else patterns
    for own in whole.view(-1, 512):
        made = assert_packs(own.view(dtype).view(8, 64), device)
        assert not made.listed
    w = weight(2048, 4096, 0.0, dtype=dtype)
    places = torch.randperm(w.numel(), generator=torch.Generator().manual_seed(1))[: 2**16]
    w.view(torch.int16).view(-1)[places] = patterns
    made = assert_packs(w, device)
    assert 2**16 * 7 // 8 < made.listed < w.numel() // 100


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", devices())
def test_zeros_denormals_nan_and_inf_keep_their_bits(device: str, dtype: torch.dtype) -> None:
    zero = assert_packs(torch.zeros(70, 300, dtype=dtype), device)
    assert (zero.slab_units, zero.table_low, zero.table_high, zero.listed) == (193, 0, 0, 0)
    assert not zero.data.view(torch.uint8)[:PARTS_AT].any()
    w = weight(100, 600, 0.0, dtype=dtype)
    w[3], w[7], w[:, 5] = 0.0, -0.0, -0.0
    w[9, :9] = bits_of(0x0001, 0x8001, 0x007F, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x7C00).view(dtype)
    made = assert_packs(w, device)
    assert made.listed >= 4  # most of Inf and NaN; denormals have zero's code


def test_the_table_has_the_commonest_and_of_equal_ones_the_lower() -> None:
    """Lower first whatever their number; what is there once is not taken for what is there twice."""
    counts = {100: 40, 3: 30, 60: 29, 61: 28, 9: 27, 127: 26, 90: 2, 80: 2, 70: 1}
    values = [high << 8 | 0x40 for high, count in counts.items() for _ in range(count)]
    w = bits_of(*values, *[0] * (400 - len(values))).view(4, 100)
    made = assert_packs(w, "cpu")
    table = torch.tensor([made.table_low, made.table_high], dtype=torch.int32).view(torch.uint8)
    assert table.tolist() == [0, 3, 9, 60, 61, 80, 100, 127]
    assert made.listed == 3


@pytest.mark.parametrize("device", devices())
def test_what_has_too_many_exponents_is_refused(device: str) -> None:
    spread = (2.0 ** torch.randint(-90, 90, (64, 300))).bfloat16()
    with pytest.raises(ValueError, match=r"the table of dense12, .*, lacks \d+ of 19200 elements.*at most 192"):
        packed(spread, device)
    w = weight(2048, 512, 0.0)
    assert not packed(w.clamp(0.01, 0.02), device).listed
    w = w.clamp(0.01, 0.02)
    w[:8, :256] = (2.0 ** torch.randint(-90, 90, (8, 256))).bfloat16()  # 2048 elements, seven of 90 exponents common
    with_most = packed(w, device)
    assert 1800 < with_most.listed == (w.numel() and with_most.listed) <= 2032
    assert_same_bits(with_most.to_dense(), w)
    w[8:12, :256] = (2.0 ** torch.randint(-90, 90, (4, 256))).bfloat16()
    with pytest.raises(ValueError, match=r"at most \d+ in a slab of 64 x 256; .*2032 in a slab"):
        packed(w, device)


def test_other_dtypes_are_refused() -> None:
    for dtype in (torch.float32, torch.int16):
        with pytest.raises(ValueError, match="the dense12 format holds bfloat16 and float16, the weight is "):
            Dense12Weight.from_dense(torch.ones(2, 2, dtype=dtype))
    with pytest.raises(RuntimeError, match="w has dtype float32, dense12 holds bfloat16 and float16"):
        torch.ops.macko.pack(torch.ones(2, 2), Dense12Weight.number, [])
    with pytest.raises(RuntimeError, match=r"w has shape \[4\], expected 2"):
        torch.ops.macko.pack(torch.ones(4).bfloat16(), Dense12Weight.number, [])
    with pytest.raises(RuntimeError, match=r"lay_out: .*dense12"):
        torch.ops.macko.lay_out(*macko.MackoWeight.from_dense(torch.ones(2, 2)).packed, Dense12Weight.number, [])


@pytest.mark.parametrize("device", devices())
def test_float16_that_was_never_bfloat16_is_refused(device: str) -> None:
    w = weight(64, 300, 0.0, dtype=torch.float16)
    assert not packed(w, device).listed
    w[:20] += w[:20] / 256  # one bit more than a bfloat16 has, of half of them
    with pytest.raises(ValueError, match=r"or bfloat16, whose mantissa has 7 bits, lacks \d+ of 19200 elements"):
        packed(w, device)


@pytest.mark.parametrize("device", devices())
def test_a_weight_of_any_stride_and_alignment(device: str) -> None:
    w = weight(140, 1204)
    there = w.to(device)
    for view in (
        lambda t: t.t(),
        lambda t: t[:, 1::2],
        lambda t: t[3:, 5:],
        lambda t: t.reshape(-1)[1:601].view(2, 300),
    ):
        assert_packs(view(w), "cpu")
        assert_same_bits(Dense12Weight.from_dense(view(there)).to_dense(), view(w))


def test_bytes_a_weight() -> None:
    """1.5, and a slab's list: its parts and the longest list, filled up to 128 bytes."""
    w = weight(1024, 1024, 0.0)
    made = packed(w, "cpu")
    assert 0 < made.listed < w.numel() // 1000
    assert 1.5 * w.numel() < made.nbytes <= 1.52 * w.numel()


# Products.


@pytest.mark.parametrize("device", devices())
def test_products_of_every_shape(device: str) -> None:
    for rows, cols in SHAPES:
        w, bias = weight(rows, cols, 0.0), random_vector(rows, dtype=torch.bfloat16)
        made = packed(w, device)
        for count in (0, 1, 2, 9, 70):
            x = random_vector(count, cols, dtype=torch.bfloat16)
            y = made.linear(x.to(device), bias.to(device))
            assert_close(y, w, x, bias)
            assert_same_bits(made.linear(x.to(device), bias.to(device)), y)
            assert_close(made.linear(x.to(device)), w, x)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "cols"), [(300, 1001), (1025, 2056), (64, 256), (130, 4096)])
def test_random_products_with_listed_elements(rows: int, cols: int, dtype: torch.dtype) -> None:
    w, bias = weight(rows, cols, 0.005, dtype=dtype), random_vector(rows, dtype=dtype)
    made = packed(w)
    for count in TOKENS:
        x = random_vector(count, cols, dtype=dtype)
        assert_close(made.linear(x.cuda(), bias.cuda()), w, x, bias)


def exact_problem(
    rows: int, cols: int, kind: str, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    """Small integers w in the columns where x is not zero. kind: which of them the table lacks.

    The other columns have seven exponents so often that those of integers are not among the commonest ("all"), or six
    and that of 1 ("some").
    """
    w, x, y = (t.to(dtype) for t in integer_problem(rows, cols, 1.0, torch.bfloat16))  # few columns, for both
    if kind != "none":
        half = dtype == torch.float16
        common = [*((1, 2, 3, 4, 5, 6, 9) if half else range(20, 62, 6))][: 7 if kind == "all" else 6]
        highs = torch.tensor([*common, *([7 if half else 63] if kind == "some" else [])])
        filling = highs[torch.randint(len(highs), w.shape, generator=torch.Generator().manual_seed(2))]
        filling = filling << 11 if half else filling << 8 | 0x80
        w = torch.where(x != 0, w, filling.to(torch.int16).view(dtype))
    return w, x, y


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("kind", ["none", "some", "all"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "cols"), [(130, 2200), (301, 2307), (64, 4096)])
def test_exact_products_with_listed_elements(device: str, kind: str, rows: int, cols: int, dtype: torch.dtype) -> None:
    w, x, y = exact_problem(rows, cols, kind, dtype)
    made = packed(w, device)
    assert made.listed == {
        "none": 0, "some": int((w[:, x != 0].abs() > 1).sum()), "all": int((x != 0).sum()) * rows
    }[kind]  # fmt: skip
    for count in TOKENS if device == "cuda" else (1, 65):
        xs, ys = each_token(x, y, count)
        assert_same_bits(made.linear(xs.to(device)) + 0, ys)


@pytest.mark.gpu
@pytest.mark.parametrize("keys", ["tile_tokens=0", "tile_tokens=1000000", "pdl=0", *GEMM_KEYS])
def test_every_path_gives_the_same(keys: str, plan: Plan) -> None:
    plan(keys)
    for kind, dtype in itertools.product(("none", "some", "all"), DTYPES):
        w, x, y = exact_problem(300, 2307, kind, dtype)
        made = packed(w)
        for count in (1, 8, 64, 65, 160, 300, 321, 480):
            xs, ys = each_token(x, y, count)
            assert_same_bits(made.linear(xs.cuda()) + 0, ys)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("tokens", [1, 9, 64, 65, 300])
def test_nan_and_inf_of_the_weight_stay_in_their_rows(device: str, tokens: int) -> None:
    w = weight(200, 600, 0.0)
    w[3, 7], w[70, 150], w[130, 599] = float("nan"), float("inf"), float("-inf")
    made = packed(w, device)
    assert made.listed >= 3
    y = made.linear(torch.ones(tokens, 600, dtype=torch.bfloat16, device=device)).cpu()
    assert y[:, 3].isnan().all()
    assert y[:, 70].isposinf().all()
    assert y[:, 130].isneginf().all()
    assert y[:, [row for row in range(200) if row not in (3, 70, 130)]].isfinite().all()


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("tokens", [1, 9, 64, 65, 300])
def test_inf_of_a_token_times_a_listed_weight_is_inf(device: str, tokens: int) -> None:
    """Not NaN, as it would be if the zero in the weight's place were multiplied too."""
    w = weight(200, 600, 0.0)
    before = packed(w, device).listed
    w[::20, 17] = 2.0**-40
    made = packed(w, device)
    assert made.listed == before + 10
    x = random_vector(tokens, 600, dtype=torch.bfloat16)
    x[tokens // 2, 17] = float("inf")
    y = made.linear(x.to(device)).cpu()
    assert torch.equal(y[tokens // 2], w[:, 17].sign() * float("inf"))
    assert y[[token for token in range(tokens) if token != tokens // 2]].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [8, 300])
def test_a_token_does_not_depend_on_the_others(tokens: int) -> None:
    made, x = packed(weight(300, 704)), random_vector(tokens, 704, dtype=torch.bfloat16).cuda()
    alone = made.linear(x)
    x[3], x[5, 17] = float("nan"), float("inf")
    kept = [token for token in range(tokens) if token not in (3, 5)]
    assert_same_bits(made.linear(x)[kept], alone[kept])


@pytest.mark.parametrize("device", devices())
def test_x_and_bias_of_any_stride_and_alignment(device: str) -> None:
    for cols in (512, 500):
        w = weight(130, cols)
        made, long = packed(w, device), random_vector(5, 2 * cols + 8, dtype=torch.bfloat16)
        on_device = long.to(device)
        for view in (
            lambda t, n=cols: t.reshape(-1)[1 : 1 + 4 * n].view(4, n),
            lambda t, n=cols: t[:, 1 : 1 + 2 * n : 2],
            lambda t, n=cols: t[0, 3 : 3 + n],
            lambda t, n=cols: t[:4, :n].view(2, 2, n).transpose(0, 1),
            lambda t, n=cols: t[:1, :n].expand(7, n),
        ):
            assert_close(made.linear(view(on_device)), w, view(long))
        bias = random_vector(260, dtype=torch.bfloat16)
        y = made.linear(on_device[:, :cols], bias.to(device)[::2])
        assert_close(y, w, long[:, :cols], bias[::2])


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("tokens", [1, 3, 32, 64, 70, 300])
@pytest.mark.parametrize("part_rows", [(64, 128, 72), (100, 64, 100), (0, 264), (64, 0, 200)])
def test_parts(device: str, part_rows: tuple[int, ...], tokens: int) -> None:
    w, x, y = exact_problem(264, 2200, "some")
    xs, ys = each_token(x, y, tokens)
    parts = packed(w, device)._own_parts(xs.to(device), part_rows)
    assert [part.shape for part in parts] == [(tokens, rows) for rows in part_rows]
    assert all(part.is_contiguous() for part in parts)
    assert_same_bits(torch.cat(list(parts), 1) + 0, ys)


@pytest.mark.gpu
def test_rows_anywhere_are_unpacked() -> None:
    """Panels of the workspace begin and end within a slab."""
    w = weight(9000, 8200, 0.001)
    assert_same_bits(packed(w).to_dense(), w)
    parts = packed(w[:500])._own_parts(torch.eye(8200, dtype=torch.bfloat16, device="cuda")[:1], (37, 200, 263))
    assert_same_bits(torch.cat(list(parts), 1), w[:500, :1].t())


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "cols"), [(4096, 4096), (2048, 11008), (64, 65536), (20_000, 64), (256, 70_000)])
def test_large_shapes(rows: int, cols: int) -> None:
    w, x = weight(rows, cols, 0.001), random_vector(700, cols, dtype=torch.bfloat16)
    made = packed(w)
    for count in (1, 4, 16, 64, 300, 700):
        assert_close(made.linear(x[:count].cuda()), w, x[:count])


@pytest.mark.gpu
@needs_capture
@pytest.mark.parametrize("tokens", [1, 5, 64, 300])
def test_graph_of_layers(tokens: int) -> None:
    layers = [packed(weight(512, 512, 0.0, seed=i)) for i in range(8)]
    x, bias = random_vector(tokens, 512, dtype=torch.bfloat16).cuda(), random_vector(512, dtype=torch.bfloat16).cuda()
    assert_graph_of_layers(layers, x, bias, bare=3)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("tokens", [(), (2,), (80,)])
def test_gradients_of_x_and_bias(device: str, tokens: tuple[int, ...]) -> None:
    w = weight(48, 64, 0.0).to(device)
    made = packed(w, device)
    x = random_vector(*tokens, 64, dtype=torch.bfloat16).to(device).requires_grad_()
    bias = torch.zeros(48, dtype=torch.bfloat16, device=device, requires_grad=True)
    grad = random_vector(*tokens, 48, dtype=torch.bfloat16, seed=2).to(device)
    (made.linear(x, bias) * grad).sum().backward()
    torch.testing.assert_close(x.grad, grad @ w)
    torch.testing.assert_close(bias.grad, grad.reshape(-1, 48).sum(0))


@pytest.mark.slow
@pytest.mark.parametrize("device", devices())
def test_opcheck(device: str) -> None:
    made = packed(weight(70, 130, 0.0), device)
    x, bias = random_vector(2, 3, 130, dtype=torch.bfloat16), random_vector(70, dtype=torch.bfloat16)
    torch.library.opcheck(torch.ops.macko.dense, made.packed)
    for given_x in (x.to(device), x.to(device).requires_grad_()):
        torch.library.opcheck(torch.ops.macko.linear, (given_x, *made.packed, bias.to(device)))


# Faults.


def changed(made: Dense12Weight, index: int | slice, value: int, kind: torch.dtype = torch.uint8) -> Dense12Weight:
    data = made.data.clone()
    view = data.view(torch.uint8).view(kind)
    view[index] = value if kind != torch.int32 else torch.tensor(value).to(torch.int32)
    return dataclasses.replace(made, data=data)


def test_validate_names_what_is_wrong() -> None:
    w = torch.full((65, 300), 1.5).bfloat16()  # four slabs: 64 x 256, 64 x 44, 1 x 256, 1 x 44
    w[:, ::2] = -0.01
    w[1, :50] = (2.0 ** torch.arange(-100.0, -50.0, 10)).repeat(10).bfloat16()  # with the others seven exponents
    w[2, :10] = (2.0 ** torch.tensor([-50.0, -40.0])).repeat(5).bfloat16()
    w[2, 10], w[2, 12] = float("inf"), float("nan")
    made = packed(w, "cpu")
    made.validate()
    assert made.listed == 12
    slab = made.slab_units * 128
    entries = made.data.view(torch.uint8).view(torch.int32)
    first = int(entries[LIST_AT // 4])

    def list_entry(index: int, value: int) -> Dense12Weight:
        return changed(made, LIST_AT // 4 + index, value, torch.int32)

    table = made.table_low
    at = "slab 0 of row block 0"
    broken = {
        "byte 0 of its table": dataclasses.replace(made, table_low=table + 1),
        "byte 2 of its table": dataclasses.replace(made, table_low=table & 0xFF00FFFF | (table & 0xFF00) << 8),
        "byte 7 of its table": dataclasses.replace(made, table_high=made.table_high & 0xFF00FFFF),
        f"{at}: part 0 of its list": changed(made, PARTS_AT // 4, 1, torch.int32),
        f"{at}: part 1 of its list": changed(made, PARTS_AT // 4 + 1, 0, torch.int32),
        f"{at}: part 15 of its list": changed(made, PARTS_AT // 4 + 15, 2000 << 16 | 12, torch.int32),
        f"{at}: entry 1 of its list is not behind": list_entry(1, first),
        f"{at}: entry 0 of its list is not behind": list_entry(0, first | 1 << 10),
        f"{at}: entry 0 of its list has a code": list_entry(0, first & 0xFFFF | 0x3FC0 << 16),
        r"slab 3 of row block 1, byte 2: an element outside": changed(made, 3 * slab + 2, 1),
        r"slab 3 of row block 1, byte 1088: an element outside": changed(made, 3 * slab + 1088, 0x80),  # -0.0
        f"{at}, byte {slab - 1}: not zero behind the list": changed(made, slab - 1, 1),
        "listed is 7, it has 12": dataclasses.replace(made, listed=7),
        "data has .* elements, expected .* in slabs of 194 units": dataclasses.replace(made, slab_units=194),
        "slab_units is 192, expected 193 to 256": dataclasses.replace(made, slab_units=192),
        "slab_units is 257, expected 193 to 256": dataclasses.replace(made, slab_units=257),
        "slab_units is 0, expected 193 to 256": dataclasses.replace(made, slab_units=0),
        "data has dtype float32, dense12 holds bfloat16": dataclasses.replace(made, data=made.data.float()),
        "byte 2 of its table: .* under 128 .float16: 16": dataclasses.replace(made, data=made.data.view(torch.float16)),
        "data begins 2 bytes past a multiple of 16": dataclasses.replace(
            made, data=torch.cat([made.data[:1], made.data])[1:]
        ),
    }
    zero = dataclasses.replace(packed(torch.zeros(64, 256).bfloat16(), "cpu"))
    broken["byte 1024: a code is not the lowest"] = changed(zero, 1024, 1)
    wide = torch.cat([made.data.view(4, -1), torch.zeros(4, 64).bfloat16()], 1).reshape(-1)
    broken["slab_units is 194, the fullest slab needs 193"] = dataclasses.replace(made, data=wide, slab_units=194)
    where_listed = next(i for i in range(LIST_AT) if changed_is_listed(made, i))
    broken[f"{at}: entry .* what stands there is not"] = changed(made, where_listed, 1)
    for message, other in broken.items():
        with pytest.raises(ValueError, match=f"not a dense12 weight: .*{message}"):
            other.validate()


def changed_is_listed(made: Dense12Weight, byte: int) -> bool:
    """Whether another low byte there is a fault of the list."""
    return int(torch.ops.macko.check(*changed(made, byte, 1).packed)[0]) == 4


WEIGHT = Dense12Weight.from_dense(weight(70, 300, 0.004))


@given(index=st.integers(0, WEIGHT.nbytes - 1), value=st.integers(0, 255))
def test_any_other_byte_is_found(index: int, value: int) -> None:
    """There is one way to pack a matrix by a table: what has no fault is what packing it gives."""
    other = changed(WEIGHT, index, value)
    if int(torch.ops.macko.check(*other.packed)[0]) == 0:
        again = packed(other.to_dense(), "cpu")
        assert_same_bits(again.data, other.data)


@given(seed=st.integers(0, 2**31), fill=st.sampled_from((0.0001, 0.001, 0.5)), units=st.integers(193, 200))
def test_bytes_of_any_kind_are_checked(seed: int, fill: float, units: int) -> None:
    """Nothing is read behind them, whatever they are. Layouts are not in files, so tests.fuzz checks fields alone."""
    random = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (4 * units * 128,), generator=random, dtype=torch.uint8)
    data *= torch.rand(data.shape, generator=random) < fill
    made = dataclasses.replace(WEIGHT, data=data.view(torch.bfloat16), slab_units=units, rows=65)
    assert int(torch.ops.macko.check(*made.packed)[0])


@pytest.mark.parametrize("device", devices())
def test_errors_name_the_argument(device: str) -> None:
    made = packed(weight(30, 50, 0.0), device)
    x = assert_other_tensors_are_refused(made)
    with pytest.raises(RuntimeError, match="table_low is -1, expected 0 to"):
        dataclasses.replace(made, table_low=-1).linear(x)
    with pytest.raises(RuntimeError, match=r"data has .* elements, expected"):
        dataclasses.replace(made, cols=300).linear(x)


# Layers and models.


class Mlp(nn.Module):
    """Siblings that multiply the same input, an output head, and one tied to nothing."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(2 * width, width)
        self.lm_head = nn.Linear(width, 300, bias=False)
        self.to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)))


def compressed(device: str = "cpu", **options: Any) -> tuple[Mlp, Mlp]:
    """A dense model and the same one with all layers in dense12."""
    torch.manual_seed(0)
    dense = Mlp().to(device)
    dense.up_proj.weight.data[0, :3] = bits_of(0x8000, 0x7FC1, 0x0001)  # -0.0, a NaN's payload, a denormal
    model = copy.deepcopy(dense)
    report = macko.sparsify_(model, format="dense12", ignore=(), progress=False, **{"merge": False, **options})
    assert [row.format for row in report] == ["dense12"] * 4
    return dense, model


def layers_of(model: nn.Module) -> dict[str, SparseLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, SparseLinear)}


def assert_same_weights(model: nn.Module, dense: nn.Module, format: str | None = "dense12") -> None:
    assert len(layers_of(model)) == 4
    for name, layer in layers_of(model).items():
        assert format in (None, layer.format)
        assert_same_bits(layer.weight.as_subclass(Tensor), dense.get_submodule(name).weight)


@pytest.mark.parametrize("device", devices())
def test_a_layer_is_the_dense_one_for_every_caller(device: str) -> None:
    dense, model = compressed(device)
    assert_same_weights(model, dense)
    assert "format=dense12" in repr(model.down_proj)
    x = random_vector(2, 3, 256, dtype=torch.bfloat16).to(device)
    y = model.down_proj(model.gate_proj(x))
    assert_close_library(y, dense.down_proj.weight, dense.gate_proj(x), dense.down_proj.bias)
    again = copy.deepcopy(model)
    assert_same_weights(again, dense)
    assert_same_bits(model.up_proj.to_linear().weight, dense.up_proj.weight)
    half = copy.deepcopy(model).half()
    assert_same_weights(half, copy.deepcopy(dense).half(), None)
    assert half.gate_proj.format == "dense12"
    assert half.down_proj(half.gate_proj(x.half())).dtype == torch.float16
    assert_same_weights(again.cpu(), dense.cpu())
    for name, tensor in again.to("meta").state_dict().items():
        assert tensor.is_meta
        assert tensor.shape == dense.state_dict()[name].shape


def test_to_macko_and_back() -> None:
    w = weight(96, 300)
    w[3, 5] = -0.0  # which the canonical format does not keep
    made = packed(w, "cpu")
    canonical = made.to_macko()
    assert_same_bits(canonical.to_dense(), w + 0)
    assert_same_bits(Dense12Weight.from_macko(canonical).to_dense(), w + 0)
    layer = SparseLinear.from_packed(made)
    assert layer.reformat_("auto") is layer
    assert layer.format == "dense12"
    assert layer.reformat_("macko").format == "macko"
    assert layer.reformat_("dense12").format == "dense12"
    assert_same_bits(layer.weight.as_subclass(Tensor), w + 0)


def test_saved_as_the_dense_model_and_loaded_into_either(tmp_path: Path) -> None:
    dense, model = compressed()
    state = model.state_dict()
    assert state.keys() == dense.state_dict().keys()
    for name, tensor in dense.state_dict().items():
        assert_same_bits(state[name], tensor)
    macko.save_model(model, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(dense.state_dict())
    with torch.device("meta"):
        on_meta = Mlp()
    for start in (Mlp(), on_meta):
        loaded = macko.load_model(start, tmp_path / "model.safetensors")
        assert not layers_of(loaded)
        assert_same_bits(loaded.up_proj.weight, dense.up_proj.weight)
    other = compressed()[1]
    other.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in state.items()})
    assert not other.up_proj.weight.any()
    assert_same_weights(macko.load_model(other, tmp_path / "model.safetensors"), dense)
    other.load_state_dict(state, assign=True)
    assert_same_weights(other, dense)
    with pytest.raises(RuntimeError, match=r"up_proj: size mismatch: the state has shape \[2, 256\], the layer \[512"):
        other.load_state_dict({**state, "up_proj.weight": torch.zeros(2, 256).bfloat16()})
    lacking = {name: tensor for name, tensor in state.items() if name != "up_proj.weight"}
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "up_proj.weight"\.'):
        other.load_state_dict(lacking)
    assert other.load_state_dict(lacking, strict=False).missing_keys == ["up_proj.weight"]
    spread = (2.0 ** torch.randint(-90, 90, (512, 256))).bfloat16()
    with pytest.raises(RuntimeError, match="up_proj: the table of dense12"):
        other.load_state_dict({**state, "up_proj.weight": spread})


def test_a_state_of_other_formats_is_loaded_as_it_is() -> None:
    """And a dense one into layers that files hold packed is refused, as before."""
    dense, model = compressed()
    layer = SparseLinear.from_linear(dense.down_proj, "macko")
    model.down_proj.load_state_dict(layer.state_dict())
    assert model.down_proj.format == "macko"
    assert_same_bits(model.down_proj.weight.as_subclass(Tensor), dense.down_proj.weight)
    with pytest.raises(RuntimeError, match="the state has a dense weight, and this layer is sparse"):
        layer.load_state_dict(dense.down_proj.state_dict())


def test_distributed_checkpoints_have_the_dense_weight() -> None:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    dense, model = compressed()
    state = get_model_state_dict(model)
    assert state.keys() == dense.state_dict().keys()
    other = compressed()[1]
    other.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in state.items()})
    set_model_state_dict(other, state)
    assert_same_weights(other, dense)


@pytest.mark.parametrize("device", devices())
def test_merged_layers(device: str) -> None:
    dense, model = compressed(device, merge=True)
    assert model.gate_proj._whole is model.up_proj._whole
    assert_same_weights(model, dense)
    for name, tensor in model.state_dict().items():
        assert_same_bits(tensor, dense.state_dict()[name])
    for tokens in (1, 3, 80):
        x = random_vector(tokens, 256, dtype=torch.bfloat16).to(device)
        for name in ("gate_proj", "down_proj"):
            given_x = x if name == "gate_proj" else torch.cat([x, x], -1)
            layer = dense.get_submodule(name)
            assert_close_library(model.get_submodule(name)(given_x), layer.weight, given_x, layer.bias)
    on_meta = copy.deepcopy(model).to("meta").state_dict()
    assert {name: t.shape for name, t in on_meta.items()} == {name: t.shape for name, t in dense.state_dict().items()}
    macko.split_(model)
    assert type(model.up_proj) is SparseLinear
    assert_same_weights(model, dense)


def test_siblings_whose_exponents_are_far_apart_are_not_merged() -> None:
    """Each has a table that holds it; one for both would lack too many."""
    model = Mlp()
    model.gate_proj.weight.data *= 2.0**-60
    macko.sparsify_(model, format="dense12", ignore=(), merge=True, progress=False)
    assert {type(layer) for layer in layers_of(model).values()} == {SparseLinear}
    model = Mlp()
    model.gate_proj.weight.data *= 2.0**-4
    macko.sparsify_(model, format="dense12", ignore=(), merge=True, progress=False)
    assert len({type(layer) for layer in layers_of(model).values()}) == 2


def test_compiled_with_a_gradient() -> None:
    dense, model = compressed()
    x = random_vector(3, 256, dtype=torch.bfloat16).requires_grad_()
    torch.manual_seed(0)
    for call in (model.down_proj, torch.compile(model.down_proj, fullgraph=True, backend="aot_eager")):
        wide = torch.cat([x, x], -1)
        y, wanted = call(wide), dense.down_proj(wide)
        torch.testing.assert_close(y, wanted)
        (grad,), (wanted_grad,) = (
            torch.autograd.grad((out * out).sum(), [x], retain_graph=True) for out in (y, wanted)
        )
        torch.testing.assert_close(grad, wanted_grad)


def test_a_sum_behind_one_token_is_its_bias() -> None:
    """What macko.fuse does with any layout's product."""
    from tests.test_fuse import compiled

    dense = nn.Linear(96, 96, bias=False).bfloat16()
    layer, x = SparseLinear.from_linear(dense, "dense12"), random_vector(1, 96, dtype=torch.bfloat16)
    y, names = compiled(lambda x: x + layer(x), x)
    assert names == ["linear"]
    assert_close_library(y, dense.weight.detach(), x, x[0])


def gains_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU that it is for, of layers of any size but lm_head's."""
    monkeypatch.setattr(
        "macko.nn.convert.not_dense12", lambda weight, device: "under so many" if len(weight) == 300 else ""
    )


def test_compress_takes_what_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sparse layers as sparsify_ does, where they are smaller; all others in 12 bits, but for small and tied ones."""
    gains_here(monkeypatch)
    dense = Mlp()
    dense.up_proj.weight.data *= torch.rand(512, 256) < 0.55  # bitmap with every vector path
    dense.gate_proj.weight.data *= torch.rand(512, 256) < 0.7
    dense.head, dense.embed = nn.Linear(256, 400, bias=False).bfloat16(), nn.Embedding(400, 256)
    dense.embed.weight = dense.head.weight
    model = copy.deepcopy(dense)
    report = macko.compress_(model, progress=False)
    rows = {row.name: row for row in report}
    assert {name: row.format for name, row in rows.items()} == {
        "gate_proj": "dense12", "up_proj": "bitmap", "down_proj": "dense12", "lm_head": "dense", "head": "dense"
    }  # fmt: skip
    assert rows["lm_head"].reason == "under so many"
    assert "shared with embed.weight" in rows["head"].reason
    assert (
        rows["down_proj"].note == "0.000% of its weights listed" or "% of its weights listed" in rows["down_proj"].note
    )
    assert rows["down_proj"].bytes_before * 0.75 < rows["down_proj"].bytes_after < rows["down_proj"].bytes_before * 0.77
    assert "of its weights listed" in str(report)
    for name in rows:
        kept = dense.get_submodule(name).weight
        assert_same_bits(model.get_submodule(name).weight.as_subclass(Tensor), kept if name != "up_proj" else kept + 0)
    again = macko.compress_(model, progress=False)
    assert {row.reason for row in again if row.name in ("up_proj", "down_proj")} == {"is sparse already"}


def test_compress_leaves_what_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    gains_here(monkeypatch)
    model = Mlp()
    report = macko.compress_(model, ignore=["down_proj"], filter_fn=lambda _, name: name != "up_proj", progress=False)
    assert {row.name: row.reason for row in report if row.format == "dense"} == {
        "down_proj": "ignored by 'down_proj'", "up_proj": "left out by filter_fn", "lm_head": "under so many"
    }  # fmt: skip
    model = Mlp()
    model.up_proj.weight.data = (2.0 ** torch.randint(-90, 90, (512, 256))).bfloat16()
    rows = {row.name: row for row in macko.compress_(model, progress=False)}
    assert rows["up_proj"].format == "dense"
    assert "the table of dense12" in rows["up_proj"].reason


def test_compress_where_nothing_gains() -> None:
    for model, reason in (
        (Mlp(), "dense12 gains on a GPU of compute capability 9.0 only, it is on cpu"),
        (Mlp().float(), "dense12 is for bfloat16 and float16, it is float32"),
    ):
        with pytest.warns(UserWarning, match=f"compress_ changed none of 4 layers, all of them because: {reason}"):
            report = macko.compress_(model, progress=False)
        assert not report.changed
    with pytest.raises(ValueError, match="compress_ replaces layers in a model, this model is one layer"):
        macko.compress_(nn.Linear(3, 3))
    with pytest.raises(ValueError, match="tokens is 0"):
        macko.compress_(Mlp(), tokens=0)


@pytest.mark.gpu
def test_compress_on_this_gpu() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("dense12 gains on a GPU of compute capability 9.0 only")
    dense = Mlp(1024).cuda()
    model = copy.deepcopy(dense)
    report = macko.compress_(model, progress=False)
    formats = {row.name: row.format for row in report}
    assert formats == {"gate_proj": "dense12", "up_proj": "dense12", "down_proj": "dense12", "lm_head": "dense"}
    x, w = random_vector(5, 1024, dtype=torch.bfloat16), dense.gate_proj.weight.detach().cpu()
    assert_close(model.gate_proj(x.cuda()).detach(), w, x)
    assert {layer.format for layer in layers_of(model.cpu()).values()} == {"dense12"}


# transformers and PEFT.

IDS = torch.arange(12).view(2, 6)


def llama(transformers: Any, tied: bool = False) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64, tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()


def assert_same_state(got: nn.Module, wanted: nn.Module) -> None:
    state, other = got.state_dict(), wanted.state_dict()
    assert state.keys() == other.keys()
    for name, tensor in state.items():
        assert_same_bits(tensor, other[name])


@pytest.mark.parametrize("merge", [False, True])
def test_save_pretrained_writes_a_dense_model(tmp_path: Path, merge: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers", minversion="5")
    monkeypatch.setattr("macko.nn.convert.not_dense12", lambda weight, device: "")
    dense = llama(transformers)
    model = copy.deepcopy(dense)
    macko.compress_(model, merge=merge, progress=False)
    assert len(layers_of(model)) == 8  # lm_head too
    torch.testing.assert_close(model(IDS).logits, dense(IDS).logits, rtol=0.05, atol=0.05)
    model.save_pretrained(tmp_path / "model")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "model")
    assert getattr(config, "quantization_config", None) is None
    assert not (tmp_path / "model/README.md").exists()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert not layers_of(loaded)
    assert_same_state(loaded, dense)
    assert_same_state(macko.load_model(llama(transformers), tmp_path / "model"), dense)
    assert_same_state(model, dense)  # it is as it was
    assert len(layers_of(model)) == 8
    model.dequantize()  # its config says its dtype as a text by now
    assert not layers_of(model)
    assert_same_state(model, dense)


def test_packed_beside_layers_that_files_hold_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers", minversion="5")
    monkeypatch.setattr("macko.nn.convert.not_dense12", lambda weight, device: "")
    dense = llama(transformers)
    dense.model.layers[0].mlp.up_proj.weight.data[:, ::3] = 0
    dense.model.layers[0].mlp.up_proj.weight.data[:, 1::3] = 0
    model = copy.deepcopy(dense)
    macko.compress_(model, progress=False)
    assert model.model.layers[0].mlp.up_proj.format != "dense12"
    model.save_pretrained(tmp_path / "model")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert set(layers_of(loaded)) == {"model.layers.0.mlp.up_proj"}
    for name, parameter in loaded.named_parameters():
        assert_same_bits(parameter, dense.get_parameter(name))
    macko.compress_(loaded, progress=False)
    assert_same_state(loaded, model)


def test_tied_embeddings_stay_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers", minversion="5")
    monkeypatch.setattr("macko.nn.convert.not_dense12", lambda weight, device: "")
    model = llama(transformers, tied=True)
    report = macko.compress_(model, progress=False)
    assert {row.name: row.reason for row in report if row.format == "dense"} == {
        "lm_head": "its weight is shared with model.embed_tokens.weight; copy_tied=True packs a copy"
    }
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_tied_embeddings_are_copied_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer reads its own copy, the embedding the dense one; files and what is loaded are as of the dense model."""
    transformers = pytest.importorskip("transformers", minversion="5")
    monkeypatch.setattr("macko.nn.convert.not_dense12", lambda weight, device: "")
    dense = llama(transformers, tied=True)
    table, model = dense.model.embed_tokens.weight, copy.deepcopy(dense)
    row = {row.name: row for row in macko.compress_(model, copy_tied=True, progress=False)}["lm_head"]
    assert isinstance(model.lm_head, SparseLinear)
    assert (row.format, row.reason) == ("dense12", "")
    assert row.bytes_after == model.lm_head.packed.nbytes + table.nbytes
    assert row.note.endswith("a copy: the embedding holds it dense")
    assert_same_bits(model.model.embed_tokens.weight, table)
    assert_same_bits(model.lm_head.weight.as_subclass(Tensor), table)
    torch.testing.assert_close(model(IDS).logits, dense(IDS).logits, rtol=0.05, atol=0.05)
    model.save_pretrained(tmp_path / "model")
    with safetensors.safe_open(tmp_path / "model/model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert_same_state(loaded, dense)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    macko.save_model(model, tmp_path / "own.safetensors")
    assert_same_state(macko.load_model(llama(transformers, tied=True), tmp_path / "own.safetensors"), dense)


def test_a_copy_of_a_tied_layer_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers", minversion="5")
    monkeypatch.setattr("macko.nn.convert.not_dense12", lambda weight, device: "")
    model = llama(transformers, tied=True)
    monkeypatch.setattr("macko.nn.convert._move", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        macko.compress_(model, copy_tied=True, progress=False, device="cpu")
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_made_as_a_model_is_read(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", minversion="5")
    dense = llama(transformers)
    dense.save_pretrained(tmp_path)
    config = macko.MackoConfig(format="dense12", ignore=[])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    assert {layer.format for layer in layers_of(model).values()} == {"dense12"}
    assert len(layers_of(model)) == 8
    assert_same_state(model, dense)
    model.dequantize()
    assert not layers_of(model)
    assert_same_bits(model.lm_head.weight, dense.lm_head.weight)


def test_layers_that_files_hold_packed_beside_it_are_not_read_as_dense12(tmp_path: Path) -> None:
    """The config says dense12, which one of them could not even be held in."""
    transformers = pytest.importorskip("transformers", minversion="5")
    dense = llama(transformers)
    up_proj = dense.model.layers[0].mlp.up_proj
    up_proj.weight.data = (2.0 ** torch.randint(-90, 90, (512, 256))).bfloat16() * (torch.rand(512, 256) < 0.3)
    dense.save_pretrained(tmp_path / "dense")
    config = macko.MackoConfig(format="dense12", ignore=[])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=config)
    macko.sparsify_(model, progress=False)
    model.save_pretrained(tmp_path / "packed")
    assert model.config.quantization_config.format == "dense12"  # as it was
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert {name: layer.format for name, layer in layers_of(loaded).items()} == {
        "model.layers.0.mlp.up_proj": model.model.layers[0].mlp.up_proj.format
    }
    loaded.dequantize()
    assert_same_state(loaded, dense)


def test_an_adapter_trains_on_it() -> None:
    transformers = pytest.importorskip("transformers", minversion="5")
    peft = pytest.importorskip("peft", reason="peft is not installed")
    dense = llama(transformers)
    base = copy.deepcopy(dense)
    macko.sparsify_(base, format="dense12", ignore=(), progress=False)
    models = []
    for whole in (base, dense):
        torch.manual_seed(1)
        models.append(peft.get_peft_model(whole, peft.LoraConfig(r=4, target_modules=["up_proj", "q_proj"])))
        models[-1](input_ids=IDS, labels=IDS).loss.backward()
    wanted = {name: p.grad for name, p in models[1].named_parameters() if p.requires_grad}
    for name, parameter in models[0].named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, wanted[name], rtol=0.1, atol=1e-3)
    with pytest.raises(RuntimeError, match="the weight of a SparseLinear is packed"):
        models[0].merge_and_unload()


# Commands.


def test_inspect_says_what_it_would_give(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    w, spread = weight(512, 512, 0.001), (2.0 ** torch.randint(-90, 90, (128, 256))).bfloat16()
    made = packed(w, "cpu")
    save_file({"a.weight": w, "b.weight": spread, "embed.weight": w + 0}, tmp_path / "model.safetensors")
    assert main(["inspect", str(tmp_path), "--gpu", "NVIDIA H200"]) == 0
    printed = capsys.readouterr().out
    lines = {line.split()[0]: line for line in printed.splitlines()}
    assert lines["a.weight"].endswith(f"{made.nbytes / 1e3:.2f} kB ({made.listed / w.numel():.4%})")
    assert lines["b.weight"].endswith(" -")
    assert not lines["embed.weight"].endswith("%)")
    assert "as tile" not in printed  # nothing has zeros
    dense = f"{(w.nbytes + spread.nbytes) / 1e3:.2f} kB"
    assert f'of {dense}: sparsify_(values="raw") {dense}, sparsify_ {dense}, compress_ {dense}.' in lines["in"]
    save_file({"a.weight": w.half()}, tmp_path / "model.safetensors")
    assert main(["inspect", str(tmp_path), "--gpu", "NVIDIA H200"]) == 0
    assert f"{made.nbytes / 1e3:.2f} kB" in capsys.readouterr().out
    save_file({"a.weight": w.half() * 1.01}, tmp_path / "model.safetensors")
    assert main(["inspect", str(tmp_path), "--gpu", "NVIDIA H200"]) == 0
    assert "dense12" not in capsys.readouterr().out


def test_inspect_says_what_each_way_to_hold_weights_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("macko.measure.inspect.DENSE12_WEIGHTS", 256 * 512)
    torch.manual_seed(0)
    full, half = (torch.randn(256, 512).bfloat16() for _ in range(2))
    half = torch.where(half.abs() > 0.6745, half, 0)
    spread = torch.where(half != 0, 4.0 ** torch.randint(-60, 60, half.shape), 0).bfloat16()
    tensors = {"a": full, "b": half, "c": spread, "lm_head": half + 0, "small": half[:64].clone(), "embed": full + 0}
    save_file({f"{name}.weight": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    assert main(["inspect", str(tmp_path), "--gpu", "NVIDIA H200"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    long = packed(full, "cpu").nbytes
    short, raw = (kind.from_dense(half).nbytes for kind in (Sparse11Weight, TileWeight))
    small = Sparse11Weight.from_dense(half[:64]).nbytes
    small_raw = TileWeight.from_dense(half[:64]).nbytes
    assert f" {raw / 1e3:.2f} kB {short / 1e3:.2f} kB (0.0000%)" in " ".join(lines["b.weight"].split())
    outside = lines["c.weight"].split("- (")[1].split("%")[0]
    assert 90 < float(outside) < 97  # 120 exponents, of which seven are held
    spread_raw = TileWeight.from_dense(spread).nbytes
    dense = sum(t.nbytes for name, t in tensors.items() if name != "embed")
    left = full.nbytes + half.nbytes
    by_way = (
        left + raw + spread_raw + small_raw,
        left + short + spread_raw + small,
        long + 2 * short + spread_raw + small,
    )
    texts = [f"{size / 1e3:.2f} kB" if size < 1e6 else f"{size / 1e6:.2f} MB" for size in (dense, *by_way)]
    assert 'of {}: sparsify_(values="raw") {}, sparsify_ {}, compress_ {}.'.format(*texts) in lines["in"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_inspect_counts_is_what_formats_list(dtype: torch.dtype) -> None:
    """outside_table against what packing says, of zeros of both signs, denormals, Inf, NaN and lower bits."""
    w = weight(200, 300, 0.004, dtype=dtype)
    w[:, ::3], w[0, :4] = 0, bits_of(0x8000, 0x7F80, 0xFFC1, 0x0001).to(dtype)
    assert outside_table(w, signed=False) == (packed(w, "cpu").listed, w.numel())
    made = Sparse11Weight.from_dense(w)
    assert outside_table(w, signed=True) == (made.listed, made.entries)
    assert outside_table(w[:0], signed=True) == (0, 0)


@pytest.mark.slow
def test_bench_of_a_dense_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", minversion="5")
    sizes = ["--batch", "1", "--prompt-tokens", "4", "--new-tokens", "2"]
    out = tmp_path / "lines.jsonl"
    assert main(["bench", "random:tiny", "--format", "dense12", *sizes, "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "29 of 29 layers changed" in printed  # lm_head too
    assert "dense12, outputs of each layer equal to dense but for rounding: yes" in printed
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert {line["model"] for line in lines} == {"dense", "dense12"}
    assert {(line["sparsity"], line["dtype"], line["format"]) for line in lines} == {(0.0, "bfloat16", "dense12")}
    assert main(["bench", "random:tiny", "--format", "dense12", "--dtype", "float16", *sizes]) == 1
    assert "or bfloat16, whose mantissa has 7 bits, lacks" in capsys.readouterr().err


def test_commands_that_write_or_serve_refuse_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", minversion="5")
    assert main(["convert", "in", str(tmp_path / "out"), "--format", "dense12"]) == 1
    assert "its file is the dense model" in capsys.readouterr().err


def test_a_state_without_content() -> None:
    """As of other layers: refused to be copied, taken where it is assigned."""
    layer = SparseLinear.from_linear(nn.Linear(64, 64, bias=False).bfloat16(), "dense12")
    state = {name: tensor.to("meta") for name, tensor in layer.state_dict().items()}
    before = layer.packed.to_dense()
    with pytest.raises(RuntimeError, match="no content to copy"):
        layer.load_state_dict(state)
    assert_same_bits(layer.packed.to_dense(), before)
    for held in (layer, copy.deepcopy(layer).to("meta")):
        held.load_state_dict(state, assign=True)
        assert (held.device.type, held.format) == ("meta", "dense12")
