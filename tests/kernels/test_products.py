"""What holds for products of every format: any x and bias, gradients, graphs, compiled code, what an error names.

Descriptors are in codecs.py: of the slab codecs, and of the formats of rows. What one format alone has is in its file.
"""

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from tests.common import (
    MASKS,
    Graphs,
    Plan,
    assert_graph_of_layers,
    assert_other_tensors_are_refused,
    assert_same_bits,
    each_token,
    needs_capture,
    torch_threads,
)
from tests.kernels.codecs import CODECS, EVERY_ROWS, ROWS, Codec, OfCodes, Rows, assert_same_bytes

pytestmark = pytest.mark.usefixtures("keys_of_the_codec")


@pytest.fixture
def keys_of_the_codec(codec: Codec, plan: Plan) -> None:
    plan(codec.keys)


def where_they_run(codecs: Iterable[Codec], *kinds: str) -> Any:
    """A test once for each of them and kind of device."""
    pairs = [(codec, device) for codec in codecs for device in codec.devices if not kinds or device in kinds]
    marks = {"cpu": (), "cuda": (pytest.mark.gpu,)}
    params = [pytest.param(*pair, marks=marks[pair[1]], id="{}-{}".format(*pair)) for pair in pairs]
    return pytest.mark.parametrize(("codec", "device"), params)


each_format = where_they_run((*CODECS, *ROWS))
#: The formats of rows in each of their dtypes, too: those of codecs are in test_slabs.py.
every_format = where_they_run((*CODECS, *EVERY_ROWS))
on_a_gpu = where_they_run((*CODECS, *ROWS), "cuda")
each_of_rows = where_they_run(EVERY_ROWS)


@each_of_rows
@pytest.mark.usefixtures("cpu_path")
def test_integers_are_exact(codec: Codec, device: str) -> None:
    """Rows and columns beyond a panel of rows, a block of columns, and a block of the dense product."""
    for rows, cols, density in (
        *((65, 1003, 0.4), (33, 4096, 0.1), (130, 130, 1.0), (7, 9000, 0.5), (70, 1601, 0.9), (1500, 3000, 0.3)),
    ):
        source, x, y = codec.exact(rows, cols, density=density)
        made = codec.packed(source, device)
        assert_same_bits(made.linear(x.to(device)) + 0, y)
        for tokens in (3, 6, 70):
            xs, ys = each_token(x, y, tokens)
            assert_same_bits(made.linear(xs.to(device)) + 0, ys)


@where_they_run(EVERY_ROWS, "cpu")
def test_same_bits_for_any_number_of_threads(codec: Codec, device: str, cpu_path: str) -> None:
    w, x, found = codec.source(500, 1000, 0.4), codec.x(45, 1000), []
    several: tuple[int, ...] = ()  # most leave them to torch, whose float32 sums differ by its threads
    if codec.format == "bitmap":
        several = (2, 4) if cpu_path == "scalar" else (2, 4, 5, 12, 45)
    for threads in (1, 2, 3):
        with torch_threads(threads):
            made = codec.packed(w, device)
            found.append([*made.tensors().values(), *(made.linear(x[:tokens]) for tokens in (1, *several))])
    for other in found[1:]:
        for got, wanted in zip(other, found[0], strict=True):
            assert_same_bits(got, wanted)


@each_of_rows
@pytest.mark.usefixtures("cpu_path")
def test_nan_and_inf_reach_only_their_row(codec: Codec, device: str) -> None:
    w, x = codec.source(40, 333), codec.x(333)
    w[3, 7], w[20, 332], w[39, 0] = float("nan"), float("inf"), float("-inf")
    x[[0, 332]] = 1
    made = codec.packed(w, device)
    y = made.linear(x.to(device))
    codec.assert_close(y, w, x)
    for tokens in (1, 4, 6, 12, 33):
        many = made.linear(x.expand(tokens, 333).contiguous().to(device))
        assert many.isfinite().sum() == 37 * tokens
        assert_same_bits(many.isnan(), y.isnan().expand_as(many))
        assert_same_bits(many[:, [20, 39]], y[[20, 39]].expand(tokens, 2))


@where_they_run(codec for codec in (*CODECS, *ROWS) if codec.is_sparse)
@pytest.mark.parametrize("kind", MASKS)
def test_uneven_masks(codec: Codec, device: str, kind: str) -> None:
    x = codec.x(200, 1500)
    for density in (0.03, 0.3, 0.7):
        source = codec.source(900, 1500, density, kind=kind)
        made = codec.packed(source, device)
        for count in (1, 8, 40, 200):
            codec.assert_close(made.linear(x[:count].to(device)), source, x[:count])


@each_format
@pytest.mark.parametrize("tokens", [1, 8, 9, 64, 65, 300])
def test_a_token_does_not_depend_on_the_others(codec: Codec, device: str, tokens: int) -> None:
    made, x = codec.packed(codec.for_products(300, 704), device), codec.x(tokens, 704).to(device)
    alone, touched = made.linear(x), sorted({tokens // 2, tokens // 3})
    x[touched[0]], x[touched[-1], 17] = float("inf"), float("nan")
    y, kept = made.linear(x), [token for token in range(tokens) if token not in touched]
    assert isinstance(codec, Rows) or y[touched[-1]].isnan().all()  # which leave out columns
    assert_same_bits(y[kept], alone[kept])


@where_they_run(codec for codec in (*CODECS, *ROWS) if not isinstance(codec, OfCodes))
def test_a_weight_of_any_stride_and_alignment(codec: Codec, device: str) -> None:
    w = codec.source(140, 1204).to(device)
    for view in (w.t(), w[:, 1::2], w[3:, 5:], w.reshape(-1)[1:601].view(2, 300)):
        made = codec.packed(view, device)
        assert_same_bytes(made, codec.packed(view.clone(memory_format=torch.contiguous_format), device))
        assert_same_bits(made.to_dense(), codec.dense(view))


@each_format
def test_x_and_bias_of_any_stride_and_alignment(codec: Codec, device: str) -> None:
    for cols, tokens in ((512, 5), (500, 5), (500, 80)):
        source, long = codec.for_products(130, cols), codec.x(tokens, 2 * cols + 8)
        made, on_device = codec.packed(source, device), long.to(device)
        for view in (
            lambda t, n=cols: t.reshape(-1)[1 : 1 + (len(t) - 1) * n].view(-1, n),
            lambda t, n=cols: t[:, :n],
            lambda t, n=cols: t[:, 1 : 1 + 2 * n : 2],
            lambda t, n=cols: t[:1, 8 : 8 + n],
            lambda t, n=cols: t[:1, 1 : 1 + n],
            lambda t, n=cols: t[0, 3 : 3 + n],
            lambda t, n=cols: t[:, :n].t().contiguous().t(),
            lambda t, n=cols: t[:4, :n].view(2, 2, n).transpose(0, 1),
            lambda t, n=cols: t[:1, :n].expand(len(t) + 2, n),
        ):
            codec.assert_close(made.linear(view(on_device)), source, view(long))
        bias = codec.x(260)
        y = made.linear(on_device[:, :cols], bias.to(device)[::2])
        codec.assert_close(y, source, long[:, :cols], bias[::2])


@every_format
@pytest.mark.parametrize("tokens", [(), (1,), (1, 1), (3,), (2, 5), (0,), (2, 0, 3)])
def test_leading_shapes(codec: Codec, device: str, tokens: tuple[int, ...]) -> None:
    source, x, bias = codec.for_products(96, 200), codec.x(*tokens, 200), codec.x(96, seed=3)
    y = codec.packed(source, device).linear(x.to(device), bias.to(device))
    assert y.shape == (*tokens, 96)
    codec.assert_close(y, source, x, bias)


@each_format
@pytest.mark.parametrize("tokens", [(), (2,), (80,)])
def test_gradients_of_x_and_bias(codec: Codec, device: str, tokens: tuple[int, ...]) -> None:
    source = codec.for_products(48, 64, rare=0.0)
    made, w = codec.packed(source, device), codec.dense(source).to(device)
    x, grad = codec.x(*tokens, 64).to(device).requires_grad_(), codec.x(*tokens, 48, seed=2).to(device)
    bias = torch.zeros(48, dtype=codec.dtype, device=device, requires_grad=True)
    (made.linear(x, bias) * grad).sum().backward()
    torch.testing.assert_close(x.grad, grad @ w)
    torch.testing.assert_close(bias.grad, grad.reshape(-1, 48).sum(0))
    x.grad = None
    (made.linear(x) * grad).sum().backward()
    torch.testing.assert_close(x.grad, grad @ w)


@pytest.mark.slow
@each_format
def test_opcheck(codec: Codec, device: str) -> None:
    made, op = codec.packed(codec.for_products(70, 130, rare=0.0), device), torch.ops.macko
    x, bias = codec.x(2, 3, 130).to(device), codec.x(70).to(device)
    torch.library.opcheck(op.dense, made.packed)
    # sell's and bitmap's bytes are checked on the CPU.
    torch.library.opcheck(op.check, (made.to("cpu") if made.format in ("sell", "bitmap") else made).packed)
    for given_x in (x, x.clone().requires_grad_()):
        torch.library.opcheck(op.linear, (given_x, *made.packed, bias))
        torch.library.opcheck(op.linear, (given_x, *made.packed))
    for part_rows in ((64, 6), (6, 64), (70,)):
        torch.library.opcheck(op.linear_parts, (x, *made.packed, part_rows))


@needs_capture
@on_a_gpu
@pytest.mark.parametrize("tokens", [1, 5, 40, 64, 300, 600])
def test_graph_of_layers(codec: Codec, device: str, tokens: int) -> None:
    layers = [codec.packed(codec.for_products(512, 512, seed=seed), device) for seed in range(8)]
    assert_graph_of_layers(layers, codec.x(tokens, 512).cuda(), codec.x(512).cuda(), bare=3)


@each_format
def test_compiles_once_for_every_number_of_tokens(codec: Codec, device: str) -> None:
    made, bias = codec.packed(codec.for_products(96, 128, rare=0.0), device), codec.x(96).to(device)
    graphs = Graphs()
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: made.linear(x, bias), fullgraph=True, dynamic=True, backend=graphs)
    # Torch takes sizes that are equal at first for the same size: no tensor of a format has one of 5.
    for tokens in (5, 2, 3, 8, 17, 64, 300):
        x = codec.x(tokens, 128).to(device)
        assert_same_bits(compiled(x), made.linear(x, bias))
    assert len(graphs) == 1


@on_a_gpu
def test_runs_on_the_current_stream(codec: Codec, device: str) -> None:
    source, x, late = codec.for_products(256, 1024), codec.x(4, 1024), torch.zeros(4, 1024, dtype=codec.dtype).cuda()
    on_gpu, stream = x.cuda(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        made = codec.packed(source)
        torch.cuda._sleep(20_000_000)  # some 10 ms: work on another stream would see the zeros
        late.copy_(on_gpu)
        y = made.linear(late)
    stream.synchronize()
    codec.assert_close(y, source, x)


@on_a_gpu
@pytest.mark.parametrize("tokens", [1, 40])
def test_same_bits_at_every_run(codec: Codec, device: str, tokens: int) -> None:
    made, x = codec.packed(codec.for_products(3000, 2000)), codec.x(tokens, 2000).cuda()
    first = made.linear(x)
    for _ in range(20):
        assert_same_bits(made.linear(x), first)


@each_format
def test_errors_name_the_argument(codec: Codec, device: str) -> None:
    made = codec.packed(codec.for_products(30, 50, rare=0.0), device)
    x = assert_other_tensors_are_refused(made)
    for message, broken in codec.refused(made):
        with pytest.raises(RuntimeError, match=message):
            broken.linear(x)
