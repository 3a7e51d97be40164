"""linear_experts on a GPU: one launch for any routing, the bits of a token its own."""

import pytest
import torch
from torch import Tensor

from macko import ops

from ..common import Plan
from ..test_experts import CODECS, PAIRS, ROUTINGS, expected, expected_order, expected_sum, routed, small, stacked
from .codecs import by_rows

pytestmark = [pytest.mark.gpu, pytest.mark.sm80]

#: By hazard, besides those of the CPU's tests: more experts than a block has threads, more work than blocks, and
#: means from which the kernel for many tokens takes over, whose tiles are of 64 to 256.
LARGE = {
    "more_experts_than_threads": ([1, 0, 2] * 200, 3, 64, 64),
    "more_work_than_blocks": ([3] * 16, 0, 320, 4096),
    "experts_of_many_tokens": ([300, 0, 200, 400], 10, 128, 256),
    "a_tile_of_each_width": ([64, 65, 128, 129, 192, 193, 256, 257], 0, 192, 512),
    "thousands_for_one_expert": ([0, 4000, 0, 1], 0, 320, 768),
    "more_experts_than_a_warp_has_lanes": ([0] * 40 + [33] + [0] * 40 + [511], 3, 448, 1024),
}


def on_gpu(counts: list[int]) -> Tensor:
    return torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32).cuda()


@pytest.mark.parametrize("keys", ["tile_tokens=1000000", "tile_tokens=0"], ids=["few", "many"])
@pytest.mark.parametrize("hazard", [*ROUTINGS, *LARGE])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("format", CODECS)
def test_products_are_exact_for_any_routing(
    format: str, dtype: torch.dtype, hazard: str, keys: str, plan: Plan
) -> None:
    plan(keys)
    counts, behind, rows, cols = (ROUTINGS | LARGE)[hazard]
    torch.manual_seed(len(counts))
    w, x = (
        small(len(counts), rows, cols).to(dtype).cuda(),
        small(sum(counts) + behind, cols, zeros=0.9).to(dtype).cuda(),
    )
    packed = stacked(w, format)
    held = packed.to_dense().view(len(counts), -1, cols)[:, :rows]  # 8 bits: what the codes stand for
    ends = on_gpu(counts)
    y = ops.linear_experts(x, *packed.packed, rows, ends).double().cpu()
    wanted = expected(x.cpu(), held.cpu(), ends.cpu())
    if packed.lossless:
        assert torch.equal(y, wanted)
    else:
        bound = expected(x.abs().cpu(), held.abs().cpu(), ends.cpu())
        assert ((y - wanted).abs() <= bound * (cols * 2.0**-24 + 2.0**-8)).all()
    assert not y[sum(counts) :].any()


@pytest.mark.parametrize("format", ["dense12", "sparse11"])
@pytest.mark.parametrize("keys", ["tile_tokens=1000000", "tile_tokens=0"], ids=["few", "many"])
@pytest.mark.parametrize("tokens", [64, 1024, 10000])
def test_a_token_alone_has_the_bits_it_has_among_others(format: str, tokens: int, keys: str, plan: Plan) -> None:
    if by_rows(10**6) and keys == "tile_tokens=0":
        pytest.skip("without wgmma by dense rows, whose bits are the library's")
    plan(keys)
    experts, rows, cols = 64, 256, 512
    torch.manual_seed(tokens)
    w, x = torch.randn(experts, rows, cols).bfloat16().cuda(), torch.randn(tokens, cols).bfloat16().cuda()
    packed = stacked(w * (torch.rand_like(w) < 0.5), format)
    of = torch.randint(0, experts, (tokens,)).sort().values
    y = ops.linear_experts(x, *packed.packed, rows, on_gpu(torch.bincount(of, minlength=experts).tolist()))
    for token in (0, tokens // 3, tokens - 1):
        counts = [0] * experts
        counts[of[token]] = 1
        assert torch.equal(ops.linear_experts(x[token : token + 1], *packed.packed, rows, on_gpu(counts))[0], y[token])


@pytest.mark.parametrize("tokens", [64, 8000])
def test_a_graph_captured_once_takes_other_routings(tokens: int) -> None:
    experts, rows, cols = 64, 256, 512
    torch.manual_seed(0)
    packed = stacked(torch.randn(experts, rows, cols).bfloat16().cuda(), "dense12")
    x, ends = torch.randn(tokens, cols).bfloat16().cuda(), on_gpu([1] * experts)
    ops.linear_experts(x, *packed.packed, rows, ends)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.linear_experts(x, *packed.packed, rows, ends)
    for _ in range(50):
        of = torch.randint(0, experts, (tokens - 5,))
        ends.copy_(on_gpu(torch.bincount(of, minlength=experts).tolist()))
        x.copy_(torch.randn(tokens, cols))
        graph.replay()
        assert torch.equal(y, ops.linear_experts(x, *packed.packed, rows, ends))
        assert not y[tokens - 5 :].any()


def test_many_tokens_take_no_memory_for_dense_rows() -> None:
    if by_rows(10**6):
        pytest.skip("without wgmma by dense rows")
    experts, rows, cols, tokens = 8, 1024, 4096, 1600
    packed = stacked(torch.randn(experts, rows, cols, device="cuda").bfloat16(), "dense12")
    x, ids = (
        torch.randn(tokens // 2, cols, device="cuda").bfloat16(),
        torch.randint(0, experts, (tokens // 2, 2)).cuda(),
    )
    order, _, ends = ops.expert_order(ids, experts)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = ops.linear_experts(x, *packed.packed, rows, ends, order, 2)
    in_order = tokens * cols * 2
    assert torch.cuda.max_memory_allocated() - before <= y.nbytes + in_order + 2**21  # 64 MB were the rows


@pytest.mark.parametrize("hazard", PAIRS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_pairs_are_sorted_by_expert(dtype: torch.dtype, hazard: str) -> None:
    ids, experts = routed(hazard, dtype)
    for got, wanted in zip(ops.expert_order(ids.cuda(), experts), expected_order(ids, experts), strict=True):
        assert torch.equal(got.cpu(), wanted)


@pytest.mark.parametrize("cols", [24, 1537, 2048])
@pytest.mark.parametrize("kinds", [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16")], ids=str)
def test_a_tokens_experts_add_up_with_torchs_roundings(kinds: tuple[str, str], cols: int) -> None:
    ids, experts = routed("more_pairs_than_a_block_has_threads")
    _, places, _ = ops.expert_order(ids.cuda(), experts)
    x = torch.randn(ids.numel(), cols).to("cuda", getattr(torch, kinds[0]))
    weights = torch.rand(ids.shape).to("cuda", getattr(torch, kinds[1]))
    assert torch.equal(ops.expert_sum(x, places, weights), expected_sum(x, places, weights))


@pytest.mark.parametrize("tokens", [3, 40, 600])  # a tile of 16 tokens, of more, and the kernel for many
@pytest.mark.parametrize("format", ["dense12", "sparse11"])
def test_an_order_takes_rows_of_x_where_they_are(format: str, tokens: int) -> None:
    torch.manual_seed(tokens)
    packed = stacked(small(4, 128, 320).cuda(), format)
    x, ids = small(tokens, 320, zeros=0.9).cuda(), torch.randint(0, 5, (tokens, 2)).cuda()
    order, _, ends = ops.expert_order(ids, 4)
    y = ops.linear_experts(x, *packed.packed, 128, ends, order, 2)
    assert torch.equal(y, ops.linear_experts(x[order // 2], *packed.packed, 128, ends))
    assert torch.equal(
        y.double().cpu(), expected(x[order // 2].cpu(), packed.to_dense().view(4, 128, 320).cpu(), ends.cpu())
    )


@pytest.mark.parametrize("cols", [328, 1024])
@pytest.mark.parametrize("tokens", [3, 600])
def test_gated_rows_are_those_of_the_gate_by_itself(tokens: int, cols: int) -> None:
    torch.manual_seed(tokens)
    packed = stacked(small(4, 128, cols).cuda(), "dense12")
    x, ends = torch.randn(tokens, 2 * cols).bfloat16().cuda(), on_gpu([tokens // 3, 0, tokens // 3, 1])
    gate, up = x.float().chunk(2, -1)
    y = ops.linear_experts(x, *packed.packed, 128, ends, gated=True).double()
    h = (torch.nn.functional.silu(gate).bfloat16() * up.bfloat16()).double()
    w = packed.to_dense().view(4, 128, cols).double()
    wanted, size = expected(h.cpu(), w.cpu(), ends.cpu()), expected(h.abs().cpu(), w.abs().cpu(), ends.cpu())
    # The kernel's exp is a fast one: silu may round the other way, as may its product; then y.
    assert ((y.cpu() - wanted).abs() <= size * 2.0**-6).all()


@torch.no_grad()
def test_a_module_of_experts_in_a_graph_gives_eagers_bits_and_grouped_mms_values() -> None:
    pytest.importorskip("transformers", minversion="5.19")
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    from ..test_experts_transformers import bound, packed

    torch.manual_seed(0)
    config = MixtralConfig(hidden_size=512, intermediate_size=768, num_local_experts=8)
    config._experts_implementation = "grouped_mm"
    dense = MixtralExperts(config).bfloat16().cuda()
    for weight in dense.parameters():
        weight.normal_(0, 0.05)
    sparse = packed(dense, "dense12")
    x, weights = torch.randn(5, 512).bfloat16().cuda(), torch.rand(5, 2).cuda()
    ids = torch.stack([torch.randperm(8)[:2] for _ in range(5)]).cuda()
    off = (sparse(x, ids, weights).double() - dense(x, ids, weights).double()).abs()
    # The fast exp of silu and the order of sums may turn roundings of h, each of 2^-8 of it: few of 768.
    assert (off <= bound(sparse, x, ids, weights) + 2.0**-6 * dense(x, ids, weights).abs().max()).all()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        sparse(x, ids, weights)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = sparse(x, ids, weights)
    for _ in range(20):
        ids.copy_(torch.stack([torch.randperm(8)[:2] for _ in range(5)]))
        x.copy_(torch.randn(5, 512))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, sparse(x, ids, weights))
