"""How often a result is rounded, and with how many tokens its bits change."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import macko
from macko import FORMATS, _library
from macko.weights import Dense12Weight, PackedWeight, SellWeight, SlideWeight, Sparse11Weight, TileWeight
from tests import layouts
from tests.common import CPU_DTYPES, HALVES, assert_same_bits, device_dtypes, devices, random_vector, random_weight

#: Around the ends of what one launch takes: sell's passes, tile's shapes, blocks of rows on the CPU; prefill.
TOKENS = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 33, 64, 65, 128, 192, 300)
#: Full tiles, and sizes that no library's GEMM likes: it does not read odd rows 16 bytes at a time.
SHAPES = ((64, 256), (129, 1000), (1000, 129), (63, 255), (200, 1001))


def formats_on(device: str, dtype: torch.dtype) -> list[type[PackedWeight]]:
    kinds = [kind for kind in FORMATS.values() if kind.runs(torch.device(device), dtype)]
    kinds = [kind for kind in kinds if kind is not SlideWeight]
    if device == "cpu" and dtype in HALVES:
        kinds.append(FORMATS["tile"])  # for tests of files; no CPU is faster with it
    if device == "cpu" and dtype == torch.bfloat16:
        kinds.append(FORMATS["sparse11"])
    return kinds


def sums_itself(kind: type[PackedWeight], device: str, tokens: int) -> bool:
    """Whether no GEMM of a library makes the sums: cuBLAS may round the product of odd sizes before it adds a bias."""
    return device == "cpu" or kind in (TileWeight, Dense12Weight, Sparse11Weight) or tokens == 1


@pytest.fixture(autouse=True)
def float32_partial_sums() -> Iterator[None]:
    """With torch's defaults a GEMM of the library's may round what blocks have of a sum, bias or not."""
    flags = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
    matmul = torch.backends.cuda.matmul
    before = {name: getattr(matmul, name) for name in flags}
    for name in flags:
        setattr(matmul, name, False)
    yield
    for name, value in before.items():
        setattr(matmul, name, value)


def ties(rows: int, cols: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """w and bias: of x = 1 each row's product is half way between 1 and the next number, and the bias adds that half.

    The others are integers in pairs that cancel, so every tile and chunk counts, and sums are exact in any order.
    """
    half = torch.finfo(dtype).eps / 2
    w = torch.zeros(rows, cols, dtype=torch.float64)
    pairs = (cols - 2) // 2
    w[:, 2 : 2 + pairs] = torch.arange(rows * pairs).view(rows, pairs) % 5 - 2
    w[:, 2 + pairs : 2 + 2 * pairs] = -w[:, 2 : 2 + pairs].flip(1)
    w[:, 0], w[:, 1] = 1, half
    return w.to(dtype), torch.full((rows,), half, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("device", "dtype"), [case for case in device_dtypes() if torch.float32 not in case])
def test_a_bias_is_added_before_the_only_rounding(device: str, dtype: torch.dtype) -> None:
    """Product 1 + eps / 2, bias eps / 2: 1 + eps. Rounded before the bias, and again after, that is 1.

    With -x: -1 - eps / 2 + eps / 2 = -1, but -1 + eps / 2 where the product was rounded.
    """
    eps = torch.finfo(dtype).eps
    for rows, cols in SHAPES:
        w, bias = ties(rows, cols, dtype)
        for kind in formats_on(device, dtype):
            packed = kind.from_dense(w.to(device))
            for tokens in TOKENS:
                sign = torch.ones(tokens, 1, dtype=dtype, device=device)
                sign[1::2] = -1
                x = sign.expand(tokens, cols).contiguous()
                wanted = torch.where(sign > 0, 1 + eps, -1.0).to(dtype).expand(tokens, rows)
                where = f"{kind.__name__} {rows}x{cols}, {tokens} tokens: "
                if sums_itself(kind, device, tokens):
                    wrong = (packed.linear(x, bias.to(device)) != wanted).sum()
                    assert not wrong, f"{where}{wrong} of {wanted.numel()} rounded twice"
                wrong = (packed.linear(x) != sign).sum()
                assert not wrong, f"{where}{wrong} of {wanted.numel()} wrong without a bias"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
def test_bias_behind_a_norm_is_added_before_the_only_rounding(dtype: torch.dtype) -> None:
    """x of ones is its own norm."""
    rows, cols = 129, 1000
    w, bias = ties(rows, cols, dtype)
    ones = torch.ones(300, cols, dtype=dtype, device="cuda")
    wanted = torch.full((300, rows), 1 + torch.finfo(dtype).eps, dtype=dtype, device="cuda")
    for kind in formats_on("cuda", dtype):
        packed = kind.from_dense(w.cuda())
        for tokens in TOKENS:
            y = torch.ops.macko.norm_linear(ones[:tokens], ones[0], 0.0, *packed.packed, bias.cuda())
            if sums_itself(kind, "cuda", tokens):
                assert torch.equal(y, wanted[:tokens]), f"{kind.__name__}, {tokens} tokens"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
def test_bias_of_a_matrix_larger_than_the_workspace_is_added_before_the_only_rounding(dtype: torch.dtype) -> None:
    """Panels of rows, each written to its columns of the result."""
    w, bias = ties(4501, 8001, dtype)
    x = torch.ones(65, 8001, dtype=dtype, device="cuda")
    for kind in (macko.MackoWeight, SellWeight):
        y = kind.from_dense(w.cuda()).linear(x, bias.cuda())
        assert (y == 1 + torch.finfo(dtype).eps).all(), kind.__name__


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
def test_dense_rows_have_the_bits_of_torchs_own_product(dtype: torch.dtype) -> None:
    """So a bias is rounded as often as F.linear does it: where the result is one piece, the call is the same."""
    for rows, cols in SHAPES:
        w, bias = random_weight(rows, cols, 0.5, dtype).cuda(), random_vector(rows, dtype=dtype).cuda()
        x = random_vector(300, cols, dtype=dtype).cuda()
        for kind in (macko.MackoWeight, SellWeight, macko.EcWeight):
            packed = kind.from_dense(w)
            for tokens in (65, 128, 192, 300):  # sell's stream takes no more than 64
                for bias_or_none in (bias, None):
                    wanted = torch.nn.functional.linear(x[:tokens], w, bias_or_none)
                    assert_same_bits(packed.linear(x[:tokens], bias_or_none), wanted)


#: Numbers of tokens, first and last, among which a token's bits do not change: docs/kernels.md, "Bits". Beyond, and for
#: other layouts, the library's product or a schedule made for so many tokens may add in another order. "scalar" is a
#: CPU without AVX2, where bitmap leaves more than four tokens to the library.
SAME_BITS = {
    ("cpu", "macko"): ((1, 2),),
    ("cpu", "bitmap"): ((1, 2), (3, 4), (5, 8), (9, 16), (17, 32)),
    ("scalar", "macko"): ((1, 2),),
    ("scalar", "bitmap"): ((1, 2), (3, 4)),
    ("cuda", "sell"): ((1, 1), (2, 2), (3, 4), (5, 8)),
    ("cuda", "tile"): ((1, 8), (9, 16), (17, 32), (33, 64)),
    ("cuda", "dense12"): ((1, 8), (9, 16), (17, 32), (33, 64)),
    ("cuda", "sparse11"): ((1, 8), (9, 16), (17, 32), (33, 64)),
    ("cuda", "dense8"): ((1, 8), (9, 16), (17, 32), (33, 64)),
    ("cuda", "sparse8"): ((1, 8), (9, 16), (17, 32), (33, 64)),
}


def assert_same_bits_in_ranges(device: str, dtype: torch.dtype, kernels: str) -> None:
    for rows, cols, density in ((70, 904, 0.5), (300, 2050, 0.5), (4160, 600, 0.5), (300, 2050, 0.9)):
        w = random_weight(rows, cols, density, dtype)
        w = w.bfloat16().to(device, dtype)  # which dense12 holds in float16, too
        x = random_vector(64, cols, dtype=dtype).to(device)
        for (on, name), ranges in SAME_BITS.items():
            if on != kernels or not FORMATS[name].runs(torch.device(device), dtype, cols):
                continue
            if name == "sell" and _library.slab_kernels()[0] != "wgmma":
                continue  # without bulk copies dense rows begin after a few tokens
            packed = FORMATS[name].from_dense(w)
            for first, last in ranges:
                wanted = packed.linear(x[:last])
                for tokens in range(first, last):
                    assert_same_bits(packed.linear(x[:tokens]), wanted[:tokens])


@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_a_token_has_the_same_bits_with_few_others_and_with_many(cpu_path: str, dtype: torch.dtype) -> None:
    assert_same_bits_in_ranges("cpu", dtype, "scalar" if cpu_path == "scalar" else "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
def test_a_token_has_the_same_bits_with_few_others_and_with_many_on_a_gpu(dtype: torch.dtype) -> None:
    assert_same_bits_in_ranges("cuda", dtype, "cuda")


@pytest.mark.sm80
@pytest.mark.parametrize("device", devices())
def test_a_token_has_the_same_bits_with_any_number_of_others_in_int8(device: str) -> None:
    """Its sums are exact."""
    w = random_weight(200, 1032, 0.9, torch.bfloat16).to(device)
    w[:, 1::8] = w[:, 3::8] = 0
    x = random_vector(300, 1032, dtype=torch.bfloat16).to(device)
    bias = random_vector(200, dtype=torch.bfloat16).to(device)
    packed = SlideWeight.from_dense(w, 4, 0)
    wanted = packed.linear(x, bias)
    for tokens in TOKENS:
        assert_same_bits(packed.linear(x[:tokens], bias), wanted[:tokens])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
def test_the_stream_gives_a_token_the_bits_of_its_pass(dtype: torch.dtype) -> None:
    """Passes of 8 tokens, then one of those that are left."""
    packed = SellWeight.from_dense(random_weight(700, 904, 0.5, dtype).cuda())
    x = random_vector(31, 904, dtype=dtype).cuda()
    wanted = torch.cat([layouts.stream(packed, part) for part in x.split(8)])
    assert_same_bits(layouts.stream(packed, x), wanted)
