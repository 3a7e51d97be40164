"""Plain torch.compile on the CPU with gradients on: one graph, not a warning, the gradients of eager mode."""

import logging
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from macko import SparseLinear
from tests.common import random_vector, random_weight, torch_threads


class WithAdapter(nn.Module):
    """A sparse layer, frozen, and a LoRA adapter beside it that is trained."""

    def __init__(self, format: str) -> None:
        super().__init__()
        dense = nn.Linear(48, 32)
        dense.weight = nn.Parameter(random_weight(32, 48, 0.4, torch.float32))
        self.base = SparseLinear.from_linear(dense, format=format)
        self.down, self.up = nn.Linear(48, 4, bias=False), nn.Linear(4, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.fixture(scope="module")
def compiler() -> None:
    """What torch imports to compile anything warns, once: not within a test, whatever ran before it."""
    torch.compile(nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("format", ["bitmap", "macko", "ec"])
def test_a_step_of_training_has_no_break_and_no_warning(format: str, caplog: pytest.LogCaptureFixture) -> None:
    """An op of the gradient whose output's size depended on data would break the graph, and torch would warn."""
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    model = WithAdapter(format)
    compiled = torch.compile(model)
    x = random_vector(5, 48, dtype=torch.float32).requires_grad_()
    wanted = model(x)
    trained = [x, *(p for p in model.parameters() if p.requires_grad)]
    gradients = torch.autograd.grad(wanted.sum(), trained)
    with torch_threads(1), warnings.catch_warnings():
        warnings.simplefilter("error")
        found = compiled(x)
        found_gradients = torch.autograd.grad(found.sum(), trained)
    assert not counters["graph_break"]
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(found_gradients, gradients)
    torch.compiler.reset()
