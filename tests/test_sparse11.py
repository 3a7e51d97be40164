"""The sparse11 layout: bytes by its specification, every value's bits back, products of any tokens, faults."""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import macko
from macko import SparseLinear
from macko.choose import times
from macko.choose.auto import pack
from macko.choose.options import Options
from macko.weights.formats import MackoWeight, Sparse11Weight, TileWeight
from tests import reference
from tests.common import (
    Plan,
    assert_graph_of_layers,
    assert_other_tensors_are_refused,
    assert_same_bits,
    devices,
    each_token,
    integer_problem,
    mask,
    needs_capture,
    random_vector,
)
from tests.test_dense12 import DTYPES, SHAPES, TOKENS, bits_of
from tests.test_tile import GEMM_KEYS, assert_close

#: Where the parts of a slab begin, in bytes; docs of the bytes are in csrc/sparse11/sparse11.h.
STARTS_AT, PARTS_AT, END_AT, VALUES_AT = 6144, 6656, 6720, 6784
#: High bytes of a table; those of float16 are of its upper 13 bits.
HIGHS = {
    torch.bfloat16: (0x3A, 0x3B, 0x3C, 0x3D, 0xBB, 0xBC, 0xBD),
    torch.float16: (0x02, 0x03, 0x04, 0x05, 0x13, 0x14, 0x15),
}
BFLOAT16 = torch.bfloat16


def numbers(high: Tensor, low: Tensor, dtype: torch.dtype) -> Tensor:
    return ((high << 8 | low) << (3 if dtype == torch.float16 else 0)).to(torch.int16).view(dtype)


def weight(
    *shape: int,
    density: float = 0.5,
    listed: float = 0.005,
    kind: str = "uniform",
    seed: int = 0,
    dtype: torch.dtype = BFLOAT16,
) -> Tensor:
    """Values of seven high bytes, and so large a share of any others, small and large."""
    random = torch.Generator().manual_seed(seed)
    highs = torch.tensor(HIGHS[dtype])
    w = numbers(
        highs[torch.randint(len(highs), shape, generator=random)], torch.randint(1, 256, shape, generator=random), dtype
    )
    others = torch.randint(2**16, shape, generator=random).to(torch.int16).view(dtype)
    w = torch.where(torch.rand(shape, generator=random) < listed, others, w).nan_to_num(1, 1, -1)
    return torch.where(mask(kind, *shape, density, seed), w, 0)


def packed(w: Tensor, device: str = "cuda", delta_bits: int = 4) -> Sparse11Weight:
    return Sparse11Weight.from_dense(w.to(device), delta_bits)


def without_negative_zeros(w: Tensor) -> Tensor:
    return torch.where(w == 0, 0, w)


def assert_packs(w: Tensor, device: str, delta_bits: int = 4) -> Sparse11Weight:
    """Bit for bit, NaN's payloads too; of few elements also the bytes."""
    made = packed(w, device, delta_bits)
    assert_same_bits(made.to_dense(), without_negative_zeros(w))
    for name, tensor in MackoWeight.from_dense(w, delta_bits).tensors().items():
        assert_same_bits(getattr(made.to_macko(), name), tensor)
    made.validate()
    if w.numel() < 100_000:
        data, offsets, sizes = reference.sparse11_pack(w)
        assert [made.widest, made.table_low, made.table_high, made.entries, made.listed] == sizes
        assert_same_bits(made.offsets, offsets)
        assert_same_bits(made.data, data)
    elif device != "cpu":
        assert_same_bits(made.data, packed(w, "cpu").data)
    return made


# Bytes.


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_and_round_trip_of_every_shape(device: str, dtype: torch.dtype) -> None:
    for rows, cols in SHAPES:
        for density in (0.05, 0.5, 1.0):
            assert_packs(weight(rows, cols, density=density, listed=0.0, dtype=dtype), device)
    made = assert_packs(weight(200, 700, dtype=dtype), device)
    assert made.listed > 100
    assert made.density == made.entries / 140_000


@pytest.mark.slow
@pytest.mark.parametrize("device", devices())
@given(
    rows=st.integers(0, 140),
    cols=st.integers(0, 600),
    density=st.sampled_from((0.0, 0.01, 0.1, 0.5, 0.9, 1.0)),
    listed=st.sampled_from((0.0, 0.004)),
    kind=st.sampled_from(("uniform", "uneven_rows", "uneven_both")),
    delta_bits=st.sampled_from((2, 4, 8)),
    seed=st.integers(0, 9),
    dtype=st.sampled_from(DTYPES),
)
def test_round_trip_of_any_shape(
    device: str, rows: int, cols: int, kind: str, delta_bits: int, seed: int, dtype: torch.dtype, **shares: float
) -> None:
    w = weight(rows, cols, kind=kind if rows * cols else "uniform", seed=seed, dtype=dtype, **shares)
    assert_packs(w, device, delta_bits)


@pytest.mark.parametrize("device", devices())
def test_all_bit_patterns(device: str) -> None:
    """Those of one high byte and its neighbours alone, and all of them scattered among others."""
    patterns = torch.arange(2**16).to(torch.int32).to(torch.int16)
    for first in range(1, 256, 7):
        own = patterns.view(256, 256)[first : first + 7].reshape(-1, 32)
        assert not assert_packs(own.view(torch.bfloat16), device).listed
    w = weight(2048, 5120, density=0.9, listed=0.0)
    places = torch.randperm(w.numel(), generator=torch.Generator().manual_seed(1))[: 2**16]
    w.view(torch.int16).view(-1)[places] = patterns
    made = assert_packs(w, device)
    assert made.listed == 2**16 - 2 - 7 * 256


@pytest.mark.parametrize("device", devices())
def test_zeros_are_none_and_denormals_nan_and_inf_keep_their_bits(device: str) -> None:
    zero = assert_packs(torch.zeros(70, 300).bfloat16(), device)
    assert (zero.widest, zero.table_low, zero.table_high, zero.entries, zero.listed) == (53, 0, 0, 0, 0)
    w = weight(100, 600, listed=0.0)
    w[3], w[7], w[:, 5] = 0.0, -0.0, -0.0
    w[9, :8] = bits_of(0x0001, 0x8001, 0x007F, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF)
    assert assert_packs(w, device).listed == 8
    # Denormals below zero may have a code, and a value's low byte may be 0.
    made = assert_packs(bits_of(0x8001, 0x80FF, 0x8000, 0x3F00, 0x4000, 0x0000).view(2, 3), device)
    assert (made.entries, made.listed) == (4, 0)


def test_the_table_has_the_commonest_and_of_equal_ones_the_lower() -> None:
    counts = {0xB0: 40, 3: 30, 60: 29, 61: 28, 9: 27, 127: 26, 0xC0: 2, 80: 2, 70: 1}
    values = [high << 8 | 0x40 for high, count in counts.items() for _ in range(count)]
    values += [0xB001] * 400
    made = assert_packs(bits_of(*values, *[0] * (900 - len(values))).view(9, 100), "cpu")
    table = torch.tensor([made.table_low, made.table_high]).to(torch.uint32).view(torch.uint8)
    assert table.tolist() == [0, 3, 9, 60, 61, 80, 127, 0xB0]
    assert made.listed == 3


@pytest.mark.parametrize("device", devices())
def test_columns_of_streams_that_spill_as_much_as_can_be(device: str) -> None:
    row, col = torch.arange(64)[:, None], torch.arange(512)
    lane, tile = row % 8 * 4 + col % 8 // 2, col // 64 % 4
    values = weight(64, 512, density=1.0, listed=0.0)
    for kept, height in (
        *((tile == one, 8) for one in range(4)),
        *((lane == one, 16) for one in (0, 17, 31)),
        (tile < 2, 16),
        ((tile < 2) == (lane % 2 == 0), 16),
        ((tile < 2) == (lane < 5), 16),
        ((lane < 20) | (tile == 3), 32),  # twelve empty columns for twenty long tails
        (tile >= 0, 32),
    ):
        made = assert_packs(torch.where(kept, values, 0), device)
        assert made.widest == 53 + 4 * height


@pytest.mark.parametrize("device", devices())
def test_what_has_too_many_exponents_is_refused(device: str) -> None:
    spread = (2.0 ** torch.randint(-90, 90, (64, 300))).bfloat16()
    with pytest.raises(
        ValueError, match=r"^the table of sparse11, .*, lacks \d+ of 19200 values.*expected at most 2048"
    ):
        packed(spread, device)
    w = weight(2048, 512, listed=0.0)
    w[:8, :256] = (2.0 ** torch.randint(-90, 90, (8, 256))).bfloat16()
    made = assert_packs(w, device)
    assert 1800 < made.listed <= 2048
    w[8:12, :256] = (2.0 ** torch.randint(-90, 90, (4, 256))).bfloat16()
    with pytest.raises(ValueError, match=r"of one slab of 64 x 256 \d+, expected at most 2048"):
        packed(w, device)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="the sparse11 format holds bfloat16 and float16, the weight is float32"):
        Sparse11Weight.from_dense(torch.ones(2, 2))
    with pytest.raises(RuntimeError, match="values has dtype float32, sparse11 holds bfloat16 and float16"):
        torch.ops.macko.lay_out(*MackoWeight.from_dense(torch.ones(2, 2)).packed, Sparse11Weight.number, [])


@pytest.mark.parametrize("device", devices())
def test_float16_that_was_never_bfloat16_is_listed(device: str) -> None:
    w = weight(64, 300, listed=0.0, dtype=torch.float16)
    assert not packed(w, device).listed
    w[:6] *= 1 + 2**-8
    made = assert_packs(w, device)
    assert 700 < made.listed <= int(w[:6].count_nonzero())


@pytest.mark.parametrize("density", [0.3, 0.5, 0.7])
def test_bytes_a_weight(density: float) -> None:
    w = weight(1024, 1024, density=density, listed=0.001)
    made = packed(w, "cpu")
    assert 0 < made.listed < w.numel() // 1000
    assert made.nbytes < ((3 + 0.4) / 8 + density * 1.12) * w.numel()


# Products.


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_every_shape(device: str, dtype: torch.dtype) -> None:
    for rows, cols in SHAPES:
        w, bias = weight(rows, cols, listed=0.0, dtype=dtype), random_vector(rows, dtype=dtype)
        made = packed(w, device)
        for count in (0, 1, 2, 9, 70):
            x = random_vector(count, cols, dtype=dtype)
            y = made.linear(x.to(device), bias.to(device))
            assert_close(y, w, x, bias)
            assert_same_bits(made.linear(x.to(device), bias.to(device)), y)
            assert_close(made.linear(x.to(device)), w, x)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "cols"), [(300, 1001), (1025, 2056), (64, 256), (130, 4096)])
@pytest.mark.parametrize("density", [0.1, 0.5, 1.0])
def test_random_products_with_listed_values(rows: int, cols: int, density: float) -> None:
    w, bias = weight(rows, cols, density=density).clamp(-4, 4), random_vector(rows, dtype=torch.bfloat16)
    made = packed(w)
    for count in TOKENS:
        x = random_vector(count, cols, dtype=torch.bfloat16)
        assert_close(made.linear(x.cuda(), bias.cuda()), w, x, bias)


def exact_problem(
    rows: int, cols: int, kind: str, dtype: torch.dtype = BFLOAT16, density: float = 0.5
) -> tuple[Tensor, Tensor, Tensor]:
    """Small integers w in the columns where x is not zero. kind: which of them the table lacks.

    The other columns have seven high bytes so often that those of integers are not among the commonest ("all"), or six
    and that of 1 ("some").
    """
    w, x, y = integer_problem(rows, cols, density, dtype)
    if kind != "none":
        one = 0x3F if dtype == BFLOAT16 else 0x07
        highs = torch.tensor([*HIGHS[dtype][: 7 if kind == "all" else 6], *([one] if kind == "some" else [])])
        filling = highs[torch.randint(len(highs), w.shape, generator=torch.Generator().manual_seed(2))]
        w = torch.where(x != 0, w, numbers(filling, torch.tensor(0x80), dtype))
    return w, x, y


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["none", "some", "all"])
@pytest.mark.parametrize(("rows", "cols"), [(130, 2600), (301, 2307), (64, 4096)])
def test_exact_products_with_listed_values(device: str, dtype: torch.dtype, kind: str, rows: int, cols: int) -> None:
    w, x, y = exact_problem(rows, cols, kind, dtype)
    made = packed(w, device)
    there = w[:, x != 0]
    lacking = {"none": there != there, "some": (there != 0) & (there != 1), "all": there != 0}[kind]
    assert made.listed == int(lacking.sum())
    for count in TOKENS if device == "cuda" else (1, 65):
        xs, ys = each_token(x, y, count)
        assert_same_bits(made.linear(xs.to(device)) + 0, ys)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("density", [0.02, 0.3, 0.5, 0.8, 1.0])
def test_exact_products_of_every_density(density: float, dtype: torch.dtype) -> None:
    for seed, (rows, cols) in enumerate(((130, 2600), (4160, 600), (65, 9000))):
        w, x, y = integer_problem(rows, cols, density, dtype, seed=seed)
        made = packed(w)
        for count in TOKENS:
            xs, ys = each_token(x, y, count)
            assert_same_bits(made.linear(xs.cuda()) + 0, ys)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "cols"), [(20_000, 700), (64, 33_000), (9000, 300), (30_000, 20)])
def test_odd_numbers_of_slabs_which_warpgroups_take_in_turns(rows: int, cols: int) -> None:
    """Row blocks of 3, 129, 2 and 1 slabs, several of which a thread block has: some begin with the other's turn."""
    w, x, y = integer_problem(rows, cols, 0.5, torch.float16)
    made = packed(w)
    for count in (1, 8, 16):
        xs, ys = each_token(x, y, count)
        assert_same_bits(made.linear(xs.cuda()) + 0, ys)


@pytest.mark.gpu
@pytest.mark.parametrize("keys", ["tile_tokens=0", "tile_tokens=1000000", "pdl=0", *GEMM_KEYS])
def test_every_path_gives_the_same(keys: str, plan: Plan) -> None:
    plan(keys)
    for kind in ("none", "some", "all"):
        w, x, y = exact_problem(300, 2700, kind)
        made = packed(w)
        for count in (1, 8, 64, 65, 160, 300, 321, 480):
            xs, ys = each_token(x, y, count)
            assert_same_bits(made.linear(xs.cuda()) + 0, ys)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("tokens", [1, 9, 64, 65, 300])
def test_an_empty_row_gives_zero_and_nan_and_inf_of_the_weight_stay_in_their_rows(device: str, tokens: int) -> None:
    w = weight(200, 600, listed=0.0)
    w[3, 7], w[70, 150], w[130, 599], w[20] = float("nan"), float("inf"), float("-inf"), 0
    made = packed(w, device)
    assert made.listed == 3
    x = torch.full((tokens, 600), 1e38, dtype=torch.bfloat16, device=device)
    x[1:] = 1
    y = made.linear(x).cpu()
    assert not y[:, 20].view(torch.int16).any()
    assert y[:, 3].isnan().all()
    assert y[1:, 70].isposinf().all()
    assert y[1:, 130].isneginf().all()
    assert y[1:, [row for row in range(200) if row not in (3, 70, 130)]].isfinite().all()


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("tokens", [1, 9, 64, 65, 300])
def test_inf_of_a_token_is_inf_or_times_a_zero_nan(device: str, tokens: int) -> None:
    """As dense has it: of a listed value Inf, not NaN, as it would be if the zero in its place were multiplied too."""
    w = weight(200, 600, listed=0.0)
    w[:, 17] = 2.0**-9
    w[::20, 17], w[5::20, 17] = 2.0**-40, 0
    made = packed(w, device)
    assert made.listed == 10
    x = random_vector(tokens, 600, dtype=torch.bfloat16)
    x[tokens // 2, 17] = float("inf")
    y = made.linear(x.to(device)).cpu()
    assert_same_bits(y[tokens // 2].isnan(), w[:, 17] == 0)
    assert y[tokens // 2][w[:, 17] != 0].isposinf().all()
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
@pytest.mark.parametrize("tokens", [1, 3, 32, 64, 70, 300])
@pytest.mark.parametrize("part_rows", [(64, 128, 72), (100, 64, 100), (0, 264), (64, 0, 200)])
def test_parts(device: str, part_rows: tuple[int, ...], tokens: int) -> None:
    w, x, y = exact_problem(264, 2700, "some")
    xs, ys = each_token(x, y, tokens)
    parts = packed(w, device)._own_parts(xs.to(device), part_rows)
    assert [part.shape for part in parts] == [(tokens, rows) for rows in part_rows]
    assert all(part.is_contiguous() for part in parts)
    assert_same_bits(torch.cat(list(parts), 1) + 0, ys)


@pytest.mark.gpu
def test_rows_anywhere_are_packed_and_unpacked() -> None:
    """Panels of the workspace begin and end within a slab."""
    w = without_negative_zeros(weight(9000, 8200, listed=0.001))
    assert_same_bits(packed(w).to_dense(), w)
    assert_same_bits(packed(w).data, packed(w, "cpu").data)
    parts = packed(w[:500])._own_parts(torch.eye(8200, dtype=torch.bfloat16, device="cuda")[:1], (37, 200, 263))
    assert_same_bits(torch.cat(list(parts), 1), w[:500, :1].t())


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "cols"), [(4096, 4096), (2048, 11008), (64, 65536), (20_000, 64), (256, 70_000)])
def test_large_shapes(rows: int, cols: int) -> None:
    w, x = weight(rows, cols, listed=0.001).clamp(-4, 4), random_vector(700, cols, dtype=torch.bfloat16)
    made = packed(w)
    for count in (1, 4, 16, 64, 300, 700):
        assert_close(made.linear(x[:count].cuda()), w, x[:count])


@pytest.mark.gpu
@needs_capture
@pytest.mark.parametrize("tokens", [1, 5, 64, 300])
def test_graph_of_layers(tokens: int) -> None:
    layers = [packed(weight(512, 512, listed=0.0, seed=i)) for i in range(8)]
    x, bias = random_vector(tokens, 512, dtype=torch.bfloat16).cuda(), random_vector(512, dtype=torch.bfloat16).cuda()
    assert_graph_of_layers(layers, x, bias, bare=3)


@pytest.mark.slow
@pytest.mark.parametrize("device", devices())
def test_opcheck(device: str) -> None:
    made = packed(weight(70, 130, listed=0.0), device)
    x, bias = random_vector(2, 3, 130, dtype=torch.bfloat16), random_vector(70, dtype=torch.bfloat16)
    torch.library.opcheck(torch.ops.macko.dense, made.packed)
    for given_x in (x.to(device), x.to(device).requires_grad_()):
        torch.library.opcheck(torch.ops.macko.linear, (given_x, *made.packed, bias.to(device)))


# Faults.


def changed(made: Sparse11Weight, index: int, value: int, kind: torch.dtype = torch.uint8) -> Sparse11Weight:
    data = made.data.clone()
    data.view(torch.uint8).view(kind)[index] = torch.tensor(value).to(kind)
    return dataclasses.replace(made, data=data)


def test_validate_names_what_is_wrong() -> None:
    w = weight(65, 300, listed=0.0)  # four slabs: 64 x 256, 64 x 44, 1 x 256, 1 x 44
    w[1, :6] = (2.0 ** torch.arange(-60.0, -54.0)).bfloat16()
    w[2, 10], w[2, 12], w[0, 0] = float("inf"), float("nan"), 0
    made = packed(w, "cpu")
    made.validate()
    assert made.listed == 8
    words = made.data.view(torch.uint8).view(torch.int32)
    list_at = int(words[PARTS_AT // 4]) >> 16
    last, end = int(made.offsets[3]) * 128, int(made.offsets[1]) * 128
    at, entry = "slab 0 of row block 0", int(words[list_at // 4])
    offsets, one_less = made.offsets, torch.tensor([1, 1, 0, 1, 1], dtype=torch.int32)
    start = int(made.data.view(torch.uint8)[STARTS_AT])

    def word(index: int, value: int) -> Sparse11Weight:
        return changed(made, index // 4, value, torch.int32)

    broken = {
        "byte 0 of its table": dataclasses.replace(made, table_low=made.table_low + 1),
        "byte 7 of its table": dataclasses.replace(made, table_high=made.table_high & 0xFFFFFF | 1 << 24),
        r"offsets\[0\] is 1, expected 0 at the start": dataclasses.replace(made, offsets=offsets + 1),
        r"offsets\[2\] is 0, expected .* 53 to": dataclasses.replace(made, offsets=offsets * one_less),
        "widest is 90, the largest slab has": dataclasses.replace(made, widest=90),
        "offsets ends with .*, data has": dataclasses.replace(made, data=torch.cat([made.data, made.data[:64]])),
        f"{at}, byte 0: a code of no high byte": changed(packed(torch.ones(64, 256).bfloat16(), "cpu"), 0, 7),
        "slab 3 of row block 1, byte 16: a code": changed(made, last + 16, 1),
        f"{at}, byte {STARTS_AT}: not the start": changed(made, STARTS_AT, start + 1),
        f"{at}, byte {PARTS_AT}: not where a part": word(PARTS_AT, int(words[PARTS_AT // 4]) + 128),
        f"{at}, byte {END_AT}: not where a part": word(END_AT, 0),
        f"{at}, byte {END_AT + 4}: not where a part": word(END_AT + 4, 1),
        f"{at}, byte {list_at + 4}: not behind the place before": word(list_at + 4, entry),
        f"{at}, byte {list_at}: not behind the place before": word(list_at, -1),
        f"{at}, byte {list_at}: a listed value is zero": word(list_at, entry & ~0x7FFF),
        f"{at}, byte {end - 1}: a zero is stored, or what": changed(made, end - 1, 1),
        f"{at} has another size than the": dataclasses.replace(
            made,
            data=torch.cat([made.data[: end // 2], torch.zeros(64).bfloat16(), made.data[end // 2 :]]),
            offsets=offsets + (torch.arange(5, dtype=torch.int32) > 0),
            widest=made.widest + 1,
        ),
        "entries is 7, it has": dataclasses.replace(made, entries=7),
        "table_low is -1, expected 0 to": dataclasses.replace(made, table_low=-1),
        "widest is 52, expected 53 to": dataclasses.replace(made, widest=52),
        "data has dtype float32, sparse11 holds bfloat16 and float16": dataclasses.replace(
            made, data=made.data.float()
        ),
        "data begins 2 bytes past a multiple of 16": dataclasses.replace(
            made, data=torch.cat([made.data[:1], made.data])[1:]
        ),
    }
    for message, other in broken.items():
        with pytest.raises(ValueError, match=f"not a sparse11 weight: .*{message}"):
            other.validate()


WEIGHT = Sparse11Weight.from_dense(weight(70, 300, listed=0.004))


@given(index=st.integers(0, WEIGHT.nbytes - 21), value=st.integers(0, 255))
def test_any_other_byte_is_found(index: int, value: int) -> None:
    """There is one way to pack a matrix by a table: what has no fault is what packing it gives."""
    other = changed(WEIGHT, index, value)
    if int(torch.ops.macko.check(*other.packed)[0]) == 0:
        assert_same_bits(packed(other.to_dense(), "cpu").data, other.data)


@given(seed=st.integers(0, 2**31), fill=st.sampled_from((0.0001, 0.001, 0.5)), units=st.integers(53, 60))
def test_bytes_of_any_kind_are_checked(seed: int, fill: float, units: int) -> None:
    """Nothing is read behind them, whatever they are. Layouts are not in files, so tests.fuzz checks fields alone."""
    random = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (4 * units * 128,), generator=random, dtype=torch.uint8)
    data *= torch.rand(data.shape, generator=random) < fill
    offsets = torch.arange(5, dtype=torch.int32) * units
    made = dataclasses.replace(WEIGHT, data=data.view(torch.bfloat16), offsets=offsets, widest=units, rows=65)
    assert int(torch.ops.macko.check(*made.packed)[0])


@pytest.mark.parametrize("device", devices())
def test_errors_name_the_argument(device: str) -> None:
    made = packed(weight(30, 50, listed=0.0), device)
    x = assert_other_tensors_are_refused(made)
    with pytest.raises(RuntimeError, match=r"offsets has 2 elements, expected 3"):
        dataclasses.replace(made, cols=300).linear(x)


# Layers.


@pytest.mark.parametrize("device", devices())
def test_a_layer_converts_back_and_moves(device: str) -> None:
    linear = nn.Linear(300, 96, bias=True, dtype=torch.bfloat16)
    linear.weight.data = weight(96, 300)
    canonical = SparseLinear.from_linear(copy.deepcopy(linear), "macko")
    layer = SparseLinear.from_packed(Sparse11Weight.from_macko(canonical.packed.to(device)), linear.bias.to(device))
    assert "format=sparse11" in repr(layer)
    x = random_vector(3, 300, dtype=torch.bfloat16)
    assert_close(layer(x.to(device)).detach(), linear.weight.detach(), x, linear.bias.detach())
    state: dict[str, Any] = layer.state_dict()
    for name, tensor in canonical.state_dict().items():
        if isinstance(tensor, Tensor):
            assert_same_bits(state[name], tensor)
    back = copy.deepcopy(layer).cpu()
    assert device == "cpu" or back.format == "macko"
    assert_same_bits(back.weight.as_subclass(Tensor), linear.weight)
    assert_same_bits(layer.weight.as_subclass(Tensor), linear.weight)
    assert_same_bits(layer.to_linear().weight, linear.weight)
    assert layer.half().format == ("macko" if device == "cpu" else "sparse11")  # where it runs
    assert macko.FORMATS["sparse11"] is Sparse11Weight


def test_a_state_that_it_does_not_hold_is_loaded_as_canonical(monkeypatch: pytest.MonkeyPatch) -> None:
    """float16 that was never bfloat16, into a layer that is held so. (On a CPU, as if it ran there.)"""
    monkeypatch.setattr(Sparse11Weight, "device_types", ("cuda", "cpu"))
    linear = nn.Linear(512, 256, bias=False, dtype=torch.float16)
    linear.weight.data = weight(256, 512, dtype=torch.float16, listed=0.0)
    layer = SparseLinear.from_linear(linear, "sparse11")
    other = torch.where(linear.weight.data != 0, torch.randn(256, 512).half(), 0)
    linear.weight.data = other
    assert not layer.load_state_dict(SparseLinear.from_linear(linear, "macko").state_dict()).missing_keys
    assert layer.format == "macko"
    assert_same_bits(layer.weight.as_subclass(Tensor), other)


# What auto takes.

MERGED = ("q_proj", "k_proj", "v_proj")


@pytest.fixture
def tile_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU of compute capability 9.0."""
    monkeypatch.setattr("macko.choose.auto.runs_wgmma", lambda device: True)
    monkeypatch.setattr("macko.choose.auto.choose", lambda weight, tokens=None: TileWeight)


@pytest.mark.usefixtures("tile_is_chosen")
@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_values_take_it_in_place_of_tile_where_few_are_listed(dtype: torch.dtype) -> None:
    w = weight(128, 512, density=0.5, listed=0.0003, dtype=dtype)
    exact, raw = Options(), Options(values="raw")
    assert pack(w, exact).format == pack(w, Options("mixed")).format == "sparse11"
    assert pack(w, raw).format == pack(w, Options("mixed", values="raw")).format == pack(w, Options("tile")).format
    assert pack(w, raw).format == "tile"
    assert pack(weight(128, 512, density=0.3, dtype=dtype), exact).format == "tile"
    assert pack(weight(128, 512, density=0.5, listed=0.005, dtype=dtype), exact).format == "tile"
    assert pack(w.float().to(torch.float16) * 1.001, exact).format == "tile"


@pytest.mark.usefixtures("tile_is_chosen")
def test_the_report_says_what_is_listed_and_why_values_stay() -> None:
    model = nn.ModuleDict({name: nn.Linear(512, 128, bias=False, dtype=BFLOAT16) for name in ("few", "many")})
    for name, layer in model.items():
        layer.weight.data = weight(128, 512, listed=0.0003 if name == "few" else 0.05)
    report = macko.sparsify_(model, progress=False)
    rows = {row.name: row for row in report}
    assert (rows["few"].format, rows["many"].format) == ("sparse11", "tile")
    assert re.fullmatch(r"0\.\d{3}% of its values listed", rows["few"].note)
    assert re.fullmatch(r"values stay at 16 bits: sparse11 would list [45]\.\d% of them", rows["many"].note)
    raw = copy.deepcopy(model)
    for name, layer in raw.items():
        raw[name] = layer.to_linear()
    assert {row.format for row in macko.sparsify_(raw, values="raw", progress=False)} == {"tile"}


@pytest.mark.usefixtures("tile_is_chosen")
def test_exact_values_stay_where_tile_was_measured_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        {"rows": 128, "cols": 512, "codec": "sparse11", "gain": {"1": 0.98, "64": 1.2, "128": 0.9}},
        {"rows": 4096, "cols": 512, "codec": "sparse11", "gain": {"1": 0.9}},
    ]
    known = times.Times("GPU", 1.0, (), True, codecs={"sparse11": lines})
    monkeypatch.setattr("macko.choose.auto.times_of", lambda device: known)
    w = weight(128, 512, listed=0.0)
    for tokens, wanted in ((None, "sparse11"), (8, "sparse11"), (64, "sparse11"), (128, "tile"), (4096, "tile")):
        assert pack(w, Options(tokens=tokens, values="exact")).format == wanted
    assert pack(weight(3000, 512, listed=0.0), Options(values="exact")).format == "tile"
    model = nn.Sequential(nn.Linear(512, 128, bias=False, dtype=BFLOAT16))
    model[0].weight.data = w
    report = macko.sparsify_(model, tokens=128, values="exact", progress=False)
    assert report.layers[0].note == "values stay at 16 bits: sparse11 takes 1.11 of tile's time at 128 tokens"


@pytest.mark.parametrize("gpu", ["NVIDIA H100 80GB HBM3", "NVIDIA H200"])
def test_the_shipped_tables_know_it(gpu: str) -> None:
    known = times.times(gpu)
    assert known.measured
    for shape in ((4096, 4096), (28672, 8192)):
        assert 0.8 < known.codec_gain("sparse11", shape, 1) < 1.5


@pytest.mark.usefixtures("tile_is_chosen")
@pytest.mark.parametrize(("listed", "format"), [(0.05, "tile"), (0.0001, "sparse11")])
def test_siblings_that_differ_become_one_matrix(listed: float, format: str) -> None:
    model: Any = nn.ModuleDict({name: nn.Linear(512, 128, bias=False, dtype=BFLOAT16) for name in MERGED})
    for name, layer in model.items():
        layer.weight.data = weight(128, 512, listed=listed if name == "k_proj" else 0.0003)
    dense = {name: layer.weight.clone() for name, layer in model.items()}
    macko.sparsify_(model, values="exact", progress=False)
    assert [layer.format for layer in model.values()] == ["sparse11", format, "sparse11"]
    assert macko.merge_(model) == [[*MERGED]]
    for name, layer in model.items():
        assert layer.format == format
        assert_same_bits(layer.weight.as_subclass(Tensor), dense[name])
    macko.split_(model)
    assert [layer.format for layer in model.values()] == ["sparse11", format, "sparse11"]


@pytest.mark.usefixtures("tile_is_chosen")
@pytest.mark.parametrize(("scale", "format"), [(1.0, "sparse11"), (2.0**-22, "tile")])
def test_another_dtype_is_another_choice(scale: float, format: str) -> None:
    """Numbers that float16 rounds have no table; tile holds any. It is not canonical, which would be slow."""
    options = Options(values="exact")
    w = weight(128, 512, listed=0.0003).clamp(-2, 2) * scale
    layer = SparseLinear.from_packed(pack(w, options), options=options)
    assert layer.format == "sparse11"
    assert layer.half().format == format
    assert_same_bits(layer.weight.as_subclass(Tensor), torch.where(w.half() == 0, 0, w.half()))


def test_values_are_of_formats_that_choose() -> None:
    with pytest.raises(ValueError, match="values is 'fp4', expected one of exact, raw, fp8, int8"):
        Options(values="fp4")
    with pytest.raises(ValueError, match="values is 'raw', format 'tile' takes exact"):
        Options("tile", values="raw")
