"""What holds for every slab codec: bytes by the specification, every value back, products of any tokens, faults.

Whatever FORMATS registers runs through it: codecs.py has a descriptor of each. What one codec alone has is in its file.
"""

import functools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from macko.weights import FORMATS, MackoWeight, SlabWeight
from tests.common import MASKS, Plan, assert_same_bits, devices, each_token
from tests.kernels.codecs import (
    CODECS,
    DESCRIPTORS,
    EVERY,
    ROWS,
    Codec,
    OfCodes,
    assert_packs,
    assert_same_bytes,
    bits_of,
    changed,
    exact_problem,
    replaced,
)
from tests.kernels.test_tile import GEMM_KEYS

pytestmark = pytest.mark.sm80

#: One element, one row, one column, no row, no column, less and more than a tile and a slab, whole ones, cols of no 16
#: bytes.
SHAPES = (
    *((1, 1), (1, 1024), (500, 1), (0, 16), (5, 0), (7, 30), (64, 64), (65, 130), (33, 203), (64, 256), (201, 512)),
    *((130, 320), (40, 1001)),
)
#: On both sides of each kernel's ends.
TOKENS = (1, 3, 8, 9, 16, 17, 33, 64, 65, 200, 1000)
LARGE = ((4096, 4096), (2048, 11008), (64, 65536), (20_000, 64), (256, 70_000))
#: Rows of parts: whole row blocks, none, those that end within one, as many as kernels store, and more.
PARTS = (
    *((64, 128, 75), (128, 0, 64), (0, 264), (192,), (100, 64, 100), (64, 64, 64, 64), (64, 320), (64, 0, 200)),
    (128, 172),
)

each_device = pytest.mark.parametrize("device", devices())
each_codec = pytest.mark.parametrize("codec", CODECS, ids=repr)
every_codec = pytest.mark.parametrize("codec", EVERY, ids=repr)
sparse_codecs = pytest.mark.parametrize("codec", [codec for codec in EVERY if codec.is_sparse], ids=repr)
codecs_of_16_bits = pytest.mark.parametrize("codec", [c for c in EVERY if not isinstance(c, OfCodes)], ids=repr)
codecs_with_tables = pytest.mark.parametrize("codec", [codec for codec in EVERY if codec.has_table], ids=repr)


def test_every_format_that_is_registered_has_a_descriptor() -> None:
    slabs = {name: kind for name, kind in FORMATS.items() if issubclass(kind, SlabWeight)}
    assert slabs.keys() == DESCRIPTORS.keys() == {codec.format for codec in CODECS}
    assert {codec.format for codec in (*CODECS, *ROWS)} == FORMATS.keys() - {"slide"}  # for test_products.py
    for name, kind in slabs.items():
        assert {codec.dtype for codec in EVERY if codec.format == name} == {*kind.dtypes} - {torch.float32}


# Bytes.


@every_codec
@each_device
def test_bytes_and_round_trip_of_every_shape(device: str, codec: Codec) -> None:
    for rows, cols in SHAPES:
        for density in (0.05, 0.5, 1.0) if codec.is_sparse else (1.0,):
            made = assert_packs(codec, codec.source(rows, cols, density), device)
    made = assert_packs(codec, codec.source(200, 700, rare=0.005), device)
    assert getattr(made, "listed", 200) > 100
    if codec.is_sparse:
        assert made.density == made.entries / 140_000


@pytest.mark.slow
@pytest.mark.parametrize("name", DESCRIPTORS)
@each_device
@given(
    rows=st.integers(0, 140),
    cols=st.integers(0, 600),
    density=st.sampled_from((0.0, 0.01, 0.1, 0.5, 0.9, 1.0)),
    rare=st.sampled_from((0.0, 0.004)),
    kind=st.sampled_from(MASKS),
    delta_bits=st.sampled_from((2, 4, 8)),
    seed=st.integers(0, 9),
    which=st.integers(0, 3),
)
def test_round_trip_of_any_shape(
    device: str, name: str, rows: int, cols: int, density: float, rare: float, kind: str, delta_bits: int, seed: int,
    which: int,
) -> None:  # fmt: skip
    own = [codec for codec in EVERY if codec.format == name]  # each dtype and kind of codes
    codec = own[which % len(own)]
    options = {"delta_bits": delta_bits} if codec.weight_type.is_layout else {}
    if not codec.is_sparse and not 64 < rows * cols * rare < 2000:
        rare = 0.0  # of few elements a list has too large a share
    source = codec.source(rows, cols, density, rare=rare, kind=kind if rows * cols else "uniform", seed=seed)
    assert_packs(codec, source, device, **options)


@codecs_with_tables
@each_device
def test_all_bit_patterns(device: str, codec: Codec) -> None:
    """Those of neighbouring exponents alone, of which none is listed, and all of them scattered among others."""
    patterns = torch.arange(2**16).to(torch.int32).to(torch.int16)
    whole = patterns[patterns & 7 == 0] if codec.dtype == torch.float16 else patterns
    for first, own in enumerate(whole.view(-1, 1024)):
        made = assert_packs(codec, own.view(codec.dtype).view(16, 64), device)
        assert made.listed == (255 if codec.is_sparse and not first else 0)  # whose upper byte is that of no value
    w = codec.source(*((1024, 1024) if codec.is_sparse else (2048, 4096)), 0.9)
    places = torch.randperm(w.numel(), generator=torch.Generator().manual_seed(1))[: 2**16]
    w.view(torch.int16).view(-1)[places] = patterns
    assert 2**16 * 7 // 8 < assert_packs(codec, w, device).listed == codec.listed(w)


@codecs_of_16_bits
@each_device
def test_zeros_denormals_nan_and_inf_keep_their_bits(device: str, codec: Codec) -> None:
    zero = assert_packs(codec, torch.zeros(70, 300, dtype=codec.dtype), device)
    assert getattr(zero, "listed", 0) == 0
    assert (zero.widest if codec.is_sparse else zero.slab_units) == codec.head
    w = codec.source(100, 600)
    w[3], w[7], w[:, 5] = 0.0, -0.0, -0.0
    w[9, :9] = bits_of(*(0x0001, 0x8001, 0x007F, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x7C00), dtype=codec.dtype)
    assert getattr(assert_packs(codec, w, device), "listed", 0) == codec.listed(w)
    # Denormals below zero may have a code, and a value's low byte may be 0.
    few = bits_of(0x8001, 0x80FF, 0x8000, 0x3F00, 0x4000, 0x0000, dtype=codec.dtype).view(2, 3)
    assert codec.listed(few) or assert_packs(codec, few, device).stored == (4 if codec.is_sparse else 6)


@each_device
def test_empty_rows_and_a_single_value(device: str) -> None:
    for codec in EVERY:
        if codec.is_sparse and not isinstance(codec, OfCodes):
            w = codec.source(300, 200)
            w[:7], w[100:200], w[290:] = 0, 0, 0
            assert_packs(codec, w, device)
            w = torch.zeros(130, 130, dtype=codec.dtype)
            w[129, 129] = 3
            assert assert_packs(codec, w, device).stored == 1


@pytest.mark.parametrize("name", ["sparse11", "dense12"])
def test_the_table_has_the_commonest_and_of_equal_ones_the_lower(name: str) -> None:
    """Lower first whatever their number; what is there once is not taken for what is there twice."""
    codec = next(codec for codec in CODECS if codec.format == name)
    signed, highest = codec.is_sparse, 0xB0 if codec.is_sparse else 100
    counts = {highest: 40, 3: 30, 60: 29, 61: 28, 9: 27, 127: 26, 0xC0 if signed else 90: 2, 80: 2, 70: 1}
    values = [high << 8 | 0x40 for high, count in counts.items() for _ in range(count)]
    values += [0xB001] * 400 if signed else []
    w = bits_of(*values, *[0] * (900 - len(values))).view(9, 100)
    made = assert_packs(codec, w if signed else w[:4], "cpu")
    table = torch.tensor([made.table_low, made.table_high]).to(torch.uint32).view(torch.uint8)
    assert table.tolist() == [0, 3, 9, 60, 61, 80, *((127, 0xB0) if signed else (100, 127))]
    assert made.listed == 3


@sparse_codecs
@each_device
def test_columns_of_streams_that_spill_as_much_as_can_be(device: str, codec: Codec) -> None:
    """Values of one tile or of one lane only, heads of some lanes and tails of others."""
    row, col = torch.arange(64)[:, None], torch.arange(512)
    lane, tile, half = row % 8 * 4 + col % 8 // 2, col // 64 % 4, col % 64 // 32
    values = codec.source(64, 512, 1.0)
    if isinstance(codec, OfCodes):
        values = (torch.where(values[0].float() == 0, 1, values[0].float()).to(values[0].dtype), values[1])
    two_streams = codec.format == "tile"  # of 16 bits; the others have one, of bytes
    for kept, height in (
        *((tile == one, 8) for one in range(4)),
        *((lane == one, 16) for one in (0, 17, 31)),
        (half == 1, 32 if two_streams else 16),
        (tile < 2, 16),
        ((tile < 2) == (lane % 2 == 0), 16),
        ((tile < 2) == (lane < 5), 16),
        ((lane < 20) | (tile == 3), 32),  # twelve empty columns for twenty long tails
        (tile >= 0, 32),
    ):
        made = assert_packs(codec, codec.where(kept, values), device)
        assert made.widest == codec.head + 4 * height * (2 if two_streams else 1)
    lengths = (col // 64 * 8 + col % 8 + row) % (lane + 1) == 0  # lanes with all lengths, some of them equal
    assert_packs(codec, codec.where(lengths, values), device)


@pytest.mark.parametrize(("name", "most"), [("sparse11", 2048), ("dense12", 2032)])
@each_device
def test_what_has_too_many_exponents_is_refused(device: str, name: str, most: int) -> None:
    codec = next(codec for codec in CODECS if codec.format == name)
    things, first = ("values", 2048) if codec.is_sparse else ("elements", 192)
    spread = (2.0 ** torch.randint(-90, 90, (64, 300))).bfloat16()
    with pytest.raises(ValueError, match=rf"^the table of {name}, .*, lacks \d+ of 19200 {things}.*at most {first}"):
        codec.packed(spread, device)
    w = codec.source(2048, 512)
    w = w if codec.is_sparse else w.clamp(0.01, 0.02)
    assert not codec.packed(w, device).listed
    w[:8, :256] = (2.0 ** torch.randint(-90, 90, (8, 256))).bfloat16()  # 2048 elements, seven of 90 exponents common
    assert 1800 < assert_packs(codec, w, device).listed <= most
    w[8:12, :256] = (2.0 ** torch.randint(-90, 90, (4, 256))).bfloat16()
    with pytest.raises(ValueError, match=rf"slab of 64 x 256.*{most}"):
        codec.packed(w, device)


@each_device
def test_float16_that_was_never_bfloat16_is_listed_or_refused(device: str) -> None:
    for codec in (codec for codec in EVERY if codec.has_table and codec.dtype == torch.float16):
        w = codec.source(64, 300)
        assert not codec.packed(w, device).listed
        some = w[: 6 if codec.is_sparse else 20]
        some += some / 256  # one bit more than a bfloat16 has, of half of them
        if codec.is_sparse:
            assert 700 < assert_packs(codec, w, device).listed == codec.listed(w)
        else:
            with pytest.raises(ValueError, match=r"whose mantissa has 7 bits, lacks \d+ of 19200 elements"):
                codec.packed(w, device)


@each_codec
def test_other_dtypes_are_refused(codec: Codec) -> None:
    with pytest.raises((ValueError, RuntimeError), match="float32"):
        codec.weight_type.from_dense(torch.ones(2, 2))
    number, op = codec.weight_type.number, torch.ops.macko
    if codec.weight_type.is_layout:
        with pytest.raises(RuntimeError, match=r"values has dtype float32, .*bfloat16"):
            op.lay_out(*MackoWeight.from_dense(torch.ones(2, 2)).packed, number, [])
        return
    options = [0, 0] if isinstance(codec, OfCodes) else []
    with pytest.raises(RuntimeError, match="w has dtype float32, "):
        op.pack(torch.ones(2, 2), number, options)
    with pytest.raises(RuntimeError, match=r"w has shape \[4\], expected 2"):
        op.pack(torch.ones(4).to(torch.uint8 if options else codec.dtype), number, options)
    with pytest.raises(RuntimeError, match=rf"lay_out: .*{codec.format}"):
        op.lay_out(*MackoWeight.from_dense(torch.ones(2, 2)).packed, number, [])


@each_codec
def test_bytes_a_weight(codec: Codec) -> None:
    """Of a whole matrix; padding and lists take some per cent."""
    for density, least, most in codec.sizes:
        made = codec.packed(codec.source(1024, 1024, density, rare=0.001 if codec.is_sparse else 0.0), "cpu")
        assert least <= made.nbytes / 2**20 <= most
        assert not codec.has_table or 0 < made.listed < 2**20 // 1000


@pytest.mark.gpu
@every_codec
def test_a_gpu_packs_to_the_bytes_of_the_cpu(codec: Codec) -> None:
    source = codec.source(700, 1000, 0.4)
    assert_same_bytes(codec.packed(source), codec.packed(source, "cpu"))


@pytest.mark.gpu
@each_codec
def test_rows_anywhere_are_packed_and_unpacked(codec: Codec) -> None:
    """Panels of the workspace begin and end within a slab."""
    source = codec.source(9000, 8200, 0.1, rare=0.001)
    made = assert_packs(codec, source, "cuda")
    few, identity = codec.packed(codec.rows(source, 500)), torch.eye(8200, dtype=codec.dtype, device="cuda")
    parts = few._own_parts(identity[:1], (37, 200, 263))
    assert_same_bits(torch.cat(list(parts), 1) + 0, made.to_dense()[:500, :1].t() + 0)


# Products.


@every_codec
@each_device
def test_products_of_every_shape(device: str, codec: Codec) -> None:
    for rows, cols in SHAPES:
        source, bias = codec.for_products(rows, cols, 0.4, rare=0.0), codec.x(rows)
        made = codec.packed(source, device)
        for count in (0, 1, 2, 9, 70):
            x = codec.x(count, cols)
            y = made.linear(x.to(device), bias.to(device))
            codec.assert_close(y, source, x, bias)
            assert_same_bits(made.linear(x.to(device), bias.to(device)), y)
            codec.assert_close(made.linear(x.to(device)), source, x)


@pytest.mark.gpu
@every_codec
@pytest.mark.parametrize(("rows", "cols"), [(300, 1001), (1025, 2056), (64, 256), (130, 4096)])
@pytest.mark.parametrize("density", [0.1, 0.5, 1.0])
def test_random_products(density: float, rows: int, cols: int, codec: Codec) -> None:
    if density < 1 and not codec.is_sparse:
        pytest.skip("it is dense")
    source, bias = codec.for_products(rows, cols, density), codec.x(rows)
    made = codec.packed(source)
    for count in TOKENS:
        x = codec.x(count, cols)
        codec.assert_close(made.linear(x.cuda(), bias.cuda()), source, x, bias)


def assert_exact(made: Any, x: Tensor, y: Tensor, tokens: Any) -> None:
    for count in tokens:
        xs, ys = each_token(x, y, count)
        assert_same_bits(made.linear(xs.to(made.device)) + 0, ys)


#: Each codec, and where it has a table, of which integers that lacks.
LACKING = [(codec, lacks) for codec in EVERY for lacks in (("none", "some", "all") if codec.has_table else ("none",))]


@pytest.mark.parametrize(("codec", "lacks"), LACKING, ids=repr)
@each_device
@pytest.mark.parametrize(("rows", "cols"), [(130, 2600), (301, 2307), (64, 4096)])
def test_exact_products_with_listed_values(device: str, codec: Codec, lacks: str, rows: int, cols: int) -> None:
    source, x, y = exact_problem(codec, rows, cols, lacks)
    made = codec.packed(source, device)
    if codec.has_table:
        integers = source[:, x != 0].abs()
        lacking = {"none": integers < 0, "some": integers > 1, "all": integers > 0}[lacks]
        assert made.listed == int(lacking.sum()) or (
            codec.is_sparse and lacks == "some" and made.listed > lacking.sum()
        )
        assert made.listed == codec.listed(source)
    assert_exact(made, x, y, TOKENS if device == "cuda" else (1, 65))


@pytest.mark.gpu
@sparse_codecs
@pytest.mark.parametrize("density", [0.02, 0.3, 0.5, 0.8, 1.0])
def test_exact_products_of_every_density(density: float, codec: Codec) -> None:
    for seed, (rows, cols) in enumerate(((130, 2600), (4160, 600), (65, 9000))):
        source, x, y = codec.exact(rows, cols, "none", density, seed)
        assert_exact(codec.packed(source), x, y, TOKENS)


@pytest.mark.gpu
@every_codec
@pytest.mark.parametrize(("rows", "cols"), [(20_000, 700), (64, 33_000), (9000, 300), (30_000, 20)])
def test_odd_numbers_of_slabs_which_warpgroups_take_in_turns(rows: int, cols: int, codec: Codec) -> None:
    """Row blocks of 3, 129, 2 and 1 slabs, several of which a thread block has: some begin with the other's turn."""
    source, x, y = codec.exact(rows, cols)
    assert_exact(codec.packed(source), x, y, (1, 8, 16))


@every_codec
@each_device
def test_products_with_the_identity_are_the_weight(device: str, codec: Codec) -> None:
    """Every value in every place, by the kernel for few tokens and by that for many."""
    identity = torch.eye(512, dtype=codec.dtype, device=device)
    for density in (0.03, 0.5, 1.0) if codec.is_sparse else (1.0,):
        source = codec.for_products(128, 512, density)
        made = codec.packed(source, device)
        for tokens in (8, 16, 32, 64, 512) if device == "cuda" else (512,):
            y = torch.cat([made.linear(x) for x in identity.split(tokens)])
            assert_same_bits(y + 0, codec.dense(source).t() + 0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", DESCRIPTORS)
@pytest.mark.parametrize("keys", ["tile_tokens=0", "tile_tokens=1000000", "pdl=0", *GEMM_KEYS])
def test_every_path_gives_the_same(keys: str, name: str, plan: Plan) -> None:
    plan(keys)
    for codec, lacks in LACKING:
        if codec.format == name:
            for rows, tokens in ((300, (1, 8, 64, 65, 160, 300, 321, 480)), (1100, (65, 300))):
                source, x, y = exact_problem(codec, rows, 2307, lacks)
                assert_exact(codec.packed(source), x, y, tokens)


@codecs_of_16_bits
@each_device
@pytest.mark.parametrize("tokens", [1, 9, 64, 65, 300])
def test_nan_and_inf_of_the_weight_stay_in_their_rows_and_an_empty_row_gives_zero(
    device: str, tokens: int, codec: Codec
) -> None:
    w = codec.for_products(200, 600, rare=0.0)
    w[3, 7], w[70, 150], w[130, 599] = float("nan"), float("inf"), float("-inf")
    if codec.is_sparse:
        w[20] = 0
    made = codec.packed(w, device)
    assert not codec.has_table or made.listed == codec.listed(w)  # of bfloat16 all three, at least
    y = made.linear(torch.ones(tokens, 600, dtype=codec.dtype, device=device)).cpu()
    assert y[:, 3].isnan().all()
    assert y[:, 70].isposinf().all()
    assert y[:, 130].isneginf().all()
    assert y[:, [row for row in range(200) if row not in (3, 70, 130)]].isfinite().all()
    if codec.is_sparse:
        largest = torch.full((tokens, 600), torch.finfo(codec.dtype).max / 4, dtype=codec.dtype, device=device)
        y = made.linear(largest).cpu()
        assert not y[:, 20].view(torch.int16).any()
        assert y[:, 3].isnan().all()


@codecs_of_16_bits
@each_device
@pytest.mark.parametrize("tokens", [1, 9, 64, 65, 300])
def test_inf_of_a_token_is_inf_or_times_a_zero_nan(device: str, tokens: int, codec: Codec) -> None:
    """As dense has it: of a listed value Inf, not NaN, as it would be if the zero in its place were multiplied too."""
    w = codec.for_products(200, 600, rare=0.0)
    before = codec.listed(w)
    w[:, 17] = 0.0078125
    w[::20, 17] = 2.0**-40 if codec.dtype == torch.bfloat16 else 1.5 + 2**-9
    if codec.is_sparse:
        w[5::20, 17] = 0
    made = codec.packed(w, device)
    assert not codec.has_table or made.listed == codec.listed(w) >= before + 10
    x = codec.x(tokens, 600)
    x[tokens // 2, 17] = float("inf")
    y = made.linear(x.to(device)).cpu()
    assert_same_bits(y[tokens // 2].isnan(), w[:, 17] == 0)
    assert y[tokens // 2][w[:, 17] != 0].isposinf().all()
    assert y[torch.arange(tokens) != tokens // 2].isfinite().all()


@each_codec
@each_device
@pytest.mark.parametrize("tokens", [0, 1, 3, 16, 32, 33, 64, 65, 300])
@pytest.mark.parametrize("part_rows", PARTS)
def test_parts(device: str, tokens: int, part_rows: tuple[int, ...], codec: Codec) -> None:
    """Each a matrix of its own: by kernels where row blocks are of one, else through dense rows, on a CPU by copies."""
    _, x, y = exact_problem(codec, sum(part_rows), 2700, "some")
    xs, ys = each_token(x, y, tokens)
    parts = packed_once(codec, sum(part_rows), device)._own_parts(xs.to(device), part_rows)
    assert [part.shape for part in parts] == [(tokens, rows) for rows in part_rows]
    assert all(part.is_contiguous() and part.storage_offset() == 0 for part in parts)
    assert len({part.data_ptr() for part in parts if part.numel()}) == sum(part.numel() > 0 for part in parts)
    assert_same_bits(torch.cat(list(parts), -1) + 0, ys)


@pytest.mark.gpu
@sparse_codecs
@pytest.mark.parametrize(
    ("part_rows", "cols", "sms"),
    [
        ((192, 128, 100), 1290, 2),  # 7 row blocks of 6 slabs: a block has two whole twos of them
        ((192, 128, 100), 1290, 3),  # shares that begin and end within one
        ((448, 0, 320), 2700, 4),
        ((100,), 10_000, 4),  # four blocks for the only two
    ],
)
def test_two_row_blocks_share_their_tokens(
    codec: Codec, part_rows: tuple[int, ...], cols: int, sms: int, plan: Plan
) -> None:
    """In 163 KB, where 64 tokens leave no room for two rings."""
    plan(f"copy=cp_async,shared_kb=163,tile_tokens=1000,sms={sms}")
    rows = sum(part_rows)
    source, x, y = exact_problem(codec, rows, cols, "some")
    made, random = codec.packed(source), codec.for_products(rows, cols)
    for tokens in (33, 40, 50, 64, 65, 130):
        xs, ys = each_token(x, y, tokens)
        assert_same_bits(torch.cat(list(made._own_parts(xs.cuda(), part_rows)), -1) + 0, ys)
        x_random, bias = codec.x(tokens, cols), codec.x(rows)
        y_random = codec.packed(random).linear(x_random.cuda(), bias.cuda())
        codec.assert_close(y_random, random, x_random, bias)


@functools.lru_cache(maxsize=32)
def packed_once(codec: Codec, rows: int, device: str) -> Any:
    return codec.packed(exact_problem(codec, rows, 2700, "some")[0], device)


@pytest.mark.gpu
@each_codec
@pytest.mark.parametrize(("rows", "cols"), LARGE)
def test_large_shapes(rows: int, cols: int, codec: Codec) -> None:
    source, x = codec.for_products(rows, cols, rare=0.001), codec.x(700, cols)
    made = codec.packed(source)
    for count in (1, 4, 16, 64, 300, 700):
        codec.assert_close(made.linear(x[:count].cuda()), source, x[:count])


# What comes from outside.


@pytest.mark.parametrize("codec", [c for c in EVERY if c in CODECS or isinstance(c, OfCodes)], ids=repr)
@each_device
def test_validate_names_what_is_wrong(device: str, codec: Codec) -> None:
    """Four slabs: 64 x 256, 64 x 44, 1 x 256, 1 x 44."""
    codec.packed(codec.source(65, 300), device).validate()
    for message, broken in codec.faults(device):
        with pytest.raises(ValueError, match=f"not an? {codec.format} weight: .*{message}"):
            broken.validate()


@functools.cache
def sample(codec: Codec, rows: int) -> Any:
    return codec.packed(codec.source(rows, 300, 0.4, rare=0.004), "cpu")


@given(which=st.sampled_from(EVERY), place=st.floats(0, 1, exclude_max=True), value=st.integers(0, 255))
def test_any_other_byte_is_found(which: Codec, place: float, value: int) -> None:
    """There is one way to pack a matrix by a table: what has no fault is what packing it gives."""
    made = sample(which, 70)
    other: Any = changed(made, int(place * made.data.nbytes), value)
    if int(torch.ops.macko.check(*other.packed)[0]) == 0:
        for name, tensor in which.again(other).tensors().items():
            assert_same_bits(getattr(other, name), tensor)
    else:
        assert not torch.equal(other.data.view(torch.uint8), made.data.view(torch.uint8))


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec.format != "dense8"], ids=repr)  # of one size
@given(
    more=st.lists(st.integers(-1, 10), min_size=4, max_size=4),
    seed=st.integers(0, 2**31),
    fill=st.sampled_from((0.0001, 0.001, 0.5)),
)
def test_bytes_of_any_kind_are_checked(codec: Codec, more: list[int], seed: int, fill: float) -> None:
    """Nothing is read after them, whatever they are. Layouts are not in files, so verify.fuzz checks fields alone."""
    units = [max(0, codec.head + rows) for rows in (more if codec.is_sparse else [more[0]] * 4)]
    random = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (128 * max(sum(units), 4 * codec.head),), generator=random, dtype=torch.uint8)
    data *= torch.rand(data.shape, generator=random) < fill
    sizes: dict[str, Any] = {"slab_units": units[0]}
    if codec.is_sparse:
        sizes = {"offsets": torch.tensor([0, *units]).cumsum(0).int(), "widest": max(codec.head, *units)}
    made = replaced(sample(codec, 65), data=data.view(codec.dtype), **sizes)
    try:
        assert int(torch.ops.macko.check(*made.packed)[0])
    except RuntimeError as error:  # of another size than the header says
        assert "macko::" in str(error)  # noqa: PT017
