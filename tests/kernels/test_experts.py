"""linear_experts on a GPU: one launch for any routing, the bits of a token its own."""

import pytest
import torch

from macko import ops

from ..common import Plan
from ..test_experts import ends_of, expected, product, small, stacked
from .codecs import by_rows

pytestmark = [pytest.mark.gpu, pytest.mark.sm80]


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
    y = product(x, packed, rows, torch.bincount(of, minlength=experts).tolist())
    for token in (0, tokens // 3, tokens - 1):
        counts = [0] * experts
        counts[of[token]] = 1
        assert torch.equal(product(x[token : token + 1], packed, rows, counts)[0], y[token])


@pytest.mark.parametrize("format", ["dense12", "sparse11"])
@pytest.mark.parametrize("tokens", [20, 300, 2000])
def test_however_items_are_shared_products_have_the_same_bits(format: str, tokens: int, plan: Plan) -> None:
    experts, rows, cols = 24, 200, 1100
    torch.manual_seed(tokens)
    packed = stacked(torch.randn(experts, rows, cols).bfloat16().cuda(), format)
    x = torch.randn(tokens, cols).bfloat16().cuda()
    counts = torch.randint(0, experts, (tokens,)).bincount(minlength=experts).tolist()
    made = []
    for sms in (2, 3, 7, 1000):
        plan(f"tile_tokens=1000000,sms={sms}")
        made += [product(x, packed, rows, counts) for _ in range(5)]
    assert all(torch.equal(y, made[0]) for y in made)


@pytest.mark.parametrize("tokens", [64, 8000])
def test_a_graph_captured_once_takes_other_routings(tokens: int) -> None:
    experts, rows, cols = 64, 256, 512
    torch.manual_seed(0)
    packed = stacked(torch.randn(experts, rows, cols).bfloat16().cuda(), "dense12")
    x, ends = torch.randn(tokens, cols).bfloat16().cuda(), ends_of([1] * experts).cuda()
    ops.linear_experts(x, *packed.packed, rows, ends)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.linear_experts(x, *packed.packed, rows, ends)
    for _ in range(50):
        of = torch.randint(0, experts, (tokens - 5,))
        ends.copy_(ends_of(torch.bincount(of, minlength=experts).tolist()).cuda())
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


@pytest.mark.parametrize("cols", [328, 1024])
@pytest.mark.parametrize("tokens", [3, 600])
def test_gated_rows_are_those_of_the_gate_by_itself(tokens: int, cols: int) -> None:
    torch.manual_seed(tokens)
    packed = stacked(small(4, 128, cols).cuda(), "dense12")
    x, ends = torch.randn(tokens, 2 * cols).bfloat16().cuda(), ends_of([tokens // 3, 0, tokens // 3, 1]).cuda()
    gate, up = x.float().chunk(2, -1)
    y = ops.linear_experts(x, *packed.packed, 128, ends, gated=True).double()
    h = (torch.nn.functional.silu(gate).bfloat16() * up.bfloat16()).double()
    w = packed.to_dense().view(4, 128, cols).double()
    wanted, size = expected(h.cpu(), w.cpu(), ends.cpu()), expected(h.abs().cpu(), w.abs().cpu(), ends.cpu())
    # The kernel's exp is a fast one: silu may round the other way, as may its product; then y.
    assert ((y.cpu() - wanted).abs() <= size * 2.0**-6).all()


@pytest.mark.parametrize("keys", ["tile_tokens=1000000", "tile_tokens=0", "tile_tokens=1000000,sms=2"])
@pytest.mark.parametrize("tokens", [1, 9, 300])
def test_ops_that_begin_before_the_one_before_has_ended_read_no_older_routing(
    tokens: int, keys: str, plan: Plan
) -> None:
    """Layers that follow each other in a graph, whose ends and places lie where others' lay; weights may be copied."""
    if by_rows(10**6) and keys == "tile_tokens=0":
        pytest.skip("without wgmma by dense rows, whose bits are the library's")
    plan(keys)
    experts, cols, inner, top_k = 40, 512, 384, 11 if tokens == 9 else 4
    torch.manual_seed(tokens)
    first = stacked(0.05 * torch.randn(experts, 2 * inner, cols).bfloat16().cuda(), "dense12").packed
    second = stacked(0.05 * torch.randn(experts, cols, inner).bfloat16().cuda(), "dense12").packed
    layers = [torch.empty(tokens, top_k, dtype=torch.long, device="cuda") for _ in range(12)]
    x, turned = torch.randn(tokens, cols).bfloat16().cuda(), torch.rand(top_k, tokens).cuda()
    weights = turned.T if tokens > 1 else turned.view(1, top_k)

    def one_by_one(ids: torch.Tensor) -> torch.Tensor:
        order, places, ends = ops.expert_order(ids, experts)
        h = ops.linear_experts(x, *first, 2 * inner, ends, order, top_k)
        torch.cuda.synchronize()
        y = ops.linear_experts(h, *second, cols, ends, gated=True)
        torch.cuda.synchronize()
        return ops.expert_sum(y, places, weights)

    def layer(ids: torch.Tensor) -> torch.Tensor:
        return ops.gated_experts(x, ids, weights, experts, (*first, 2 * inner), (*second, cols))

    def route() -> None:
        turned.uniform_()
        for ids in layers:
            ids.copy_(torch.rand(tokens, experts).argsort(1)[:, :top_k])

    route()
    layer(layers[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = torch.stack([layer(ids) for ids in layers])
    for _ in range(20):
        route()
        graph.replay()
        assert torch.equal(made, torch.stack([one_by_one(ids) for ids in layers]))


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
