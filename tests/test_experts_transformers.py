"""SparseExperts in the place of every experts class of transformers 5, made tiny, and in models."""

from __future__ import annotations

import copy
import functools
import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from macko.choose.options import Options
from macko.nn.experts import SparseExperts, Stack, UnfoldedExperts, is_experts, oriented, projections, unfolded

transformers = pytest.importorskip("transformers", minversion="5.19")
EXPERTS, HIDDEN, INNER, TOP_K = 4, 64, 80, 3


class AnyConfig:
    """Whatever an experts class asks of its config, by the name it asks for."""

    _experts_implementation = "grouped_mm"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if "act" in name.split("_") or name.endswith(("_act", "activation")):
            return "silu"
        if name in ("hidden_size", "moe_hidden_size", "moe_latent_size", "expert_hidden_size"):
            return HIDDEN
        if "inter" in name or "ffn" in name:
            return INNER
        if "expert" in name or "routed" in name:
            return EXPERTS
        return {"limit": 0.5, "alpha": 1.702, "cap": 3.0, "softcap": 3.0, "beta": 1.0}.get(name.rpartition("_")[2], 1e-5)


@functools.cache
def classes() -> dict[str, str]:
    """Module of each class that transformers runs by its experts interface."""
    root = Path(transformers.__file__).parent / "models"
    pattern = re.compile(r"^@use_experts_implementation[^\n]*\nclass (\w+)\(", re.M)
    files = sorted(root.glob("*/modeling_*.py"))
    found = {name: file for file in files for name in pattern.findall(file.read_text(encoding="utf-8"))}
    return {name: f"transformers.models.{file.parent.name}.{file.stem}" for name, file in found.items()}


def tiny(name: str, zeros: float = 0.0) -> nn.Module:
    kind, torch_seed = getattr(importlib.import_module(classes()[name]), name), 0
    for arguments in ((AnyConfig(),), (AnyConfig(), EXPERTS), (AnyConfig(), EXPERTS, INNER), (AnyConfig(), INNER)):
        try:
            experts = kind(*arguments)
            break
        except TypeError:
            continue
    else:
        raise AssertionError(f"{name} wants other arguments")
    torch.manual_seed(torch_seed)
    experts = experts.bfloat16().eval()
    with torch.no_grad():
        for p in experts.parameters():
            p.normal_(0, 0.1)
            if p.dim() == 3:
                p.mul_(torch.rand(p.shape) >= zeros)
    return experts


def packed(dense: nn.Module, format: str) -> SparseExperts:
    names = projections(dense)
    return SparseExperts(dense, {name: Stack.from_dense(oriented(dense, name), Options(format)) for name in names})


def routed(dense: nn.Module, tokens: int = 21) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    width = dense._parameters["down_proj"].shape[2 if dense.is_transposed else 1]
    x = torch.randn(tokens, width).bfloat16()
    weights, index = torch.rand(tokens, dense.num_experts).topk(TOP_K)
    return x, index, weights


def bound(sparse: SparseExperts, x: Tensor, index: Tensor, weights: Tensor, products: float = 0.0) -> Tensor:
    """What roundings of a token's terms and of their sums come to; products: of a term, relative."""
    terms = [sparse(x, index[:, [i]], weights[:, [i]]).double().abs() for i in range(index.shape[1])]
    u = torch.finfo(x.dtype).eps / 2
    return ((2 * index.shape[1] + 4) * u + products) * torch.stack(terms).sum(0) + 1e-30


@torch.no_grad()
@pytest.mark.parametrize("name", classes())
def test_every_experts_class_gives_what_grouped_mm_gives(name: str) -> None:
    dense = tiny(name)
    assert is_experts(dense)
    args = routed(dense)
    wanted = dense(*args)
    sparse = packed(dense, "dense12")
    assert not any(p.dim() == 3 for p in sparse.parameters())
    off = (sparse(*args).double() - wanted.double()).abs()
    assert (off <= bound(sparse, *args)).all()
    again = sparse.to_dense()
    assert type(again) is type(dense)
    for key in projections(dense):
        assert torch.equal(getattr(again, key), getattr(dense, key)), key
    assert torch.equal(again(*args), wanted)


def test_there_are_as_many_classes_as_the_page_says() -> None:
    assert len(classes()) >= 60
