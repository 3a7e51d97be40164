"""What the tests share: devices, masks, data, and comparisons whose bounds are derived, never typed in."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from macko.measure import reference
from macko.weights import PackedWeight

ROOT = Path(__file__).parents[1]
#: 16-bit types, everywhere; float32 too on the CPU.
HALVES = (torch.float16, torch.bfloat16)
CPU_DTYPES = (*HALVES, torch.float32)


def devices() -> list:
    """Values for `@pytest.mark.parametrize("device", devices())`: the CPU, and the GPU marked `gpu`."""
    return ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def device_dtypes() -> list:
    """Values for `@pytest.mark.parametrize("device, dtype", device_dtypes())`."""
    gpu = [pytest.param("cuda", dtype, marks=pytest.mark.gpu) for dtype in HALVES]
    return [("cpu", dtype) for dtype in CPU_DTYPES] + gpu


#: The fixture `plan`, which says keys of MACKO_PLAN until the end of a test.
Plan = Callable[[str], None]


def cpu_paths() -> list[str]:
    """The vector paths that this CPU has, as values of MACKO_CPU."""
    known = {"DEFAULT": 1, "AVX2": 2, "AVX512": 3}
    return ["scalar", "avx2", "avx512"][: known.get(torch.backends.cpu.get_cpu_capability(), 1)]


@contextmanager
def edited(file: Path) -> Iterator[dict[str, Any]]:
    """What is in a file of JSON or of tensors, which is written again as the block leaves it."""
    if file.suffix == ".json":
        content = json.loads(file.read_text())
        yield content
        file.write_text(json.dumps(content))
    else:
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata()
        tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
        yield tensors
        save_file(tensors, file, metadata)


class Graphs(list[torch.fx.GraphModule]):
    """A backend of torch.compile, which keeps the graphs it is given and runs them as they are."""

    def __call__(self, graph: torch.fx.GraphModule, inputs: list) -> Any:
        self.append(graph)
        return graph.forward

    def targets(self, word: str) -> list[list[str]]:
        """Of each graph the names of what it calls that have this word in them."""
        names = [[str(node.target).removesuffix(".default") for node in graph.graph.nodes] for graph in self]
        return [[name for name in called if word in name] for called in names]


#: `make sanitize` makes each tensor an allocation of its own, so that every step over an end is seen. A capture cannot
#: allocate then.
CAN_CAPTURE = not os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING")
needs_capture = pytest.mark.skipif(not CAN_CAPTURE, reason="a capture needs torch's caching allocator")


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Within it, torch and macko use that many CPU threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


#: Kinds of mask, see `mask`.
MASKS = ("uniform", "equal_rows", "uneven_rows", "uneven_both")


def mask(kind: str, rows: int, cols: int, density: float, seed: int = 0) -> Tensor:
    """A bool [rows, cols] with about density * rows * cols entries set; the same on every machine.

    Sizes of formats are compared on these very masks, so the order of the draws is part of what they are.
    uniform: each entry by itself. equal_rows: lognormal columns of spread 0.5, the same count in each row (Wanda's
    way). uneven_rows: lognormal columns and rows of spread 0.2, one threshold per 128 columns (SparseGPT's way).
    uneven_both: heavy-tailed columns, lognormal rows of spread 0.3, one threshold for all (pruning by magnitude).
    """
    rng = np.random.default_rng(seed)
    if kind == "uniform":
        return torch.from_numpy(rng.random((rows, cols), dtype=np.float32) < density)
    score = np.abs(rng.standard_normal((rows, cols), dtype=np.float32))

    def lognormal(count: int, spread: float) -> np.ndarray:
        return np.exp(spread * rng.standard_normal(count)).astype(np.float32)

    def largest(part: np.ndarray, sample: np.ndarray) -> np.ndarray:
        place = min(int((1 - density) * sample.size), sample.size - 1)
        return part > np.partition(sample, place)[place]

    if kind == "equal_rows":
        score *= lognormal(cols, 0.5)
        left_out = cols - round(density * cols)
        kept = np.ones((rows, cols), dtype=bool)
        if left_out:
            np.put_along_axis(kept, score.argpartition(left_out - 1, axis=1)[:, :left_out], False, axis=1)
    elif kind == "uneven_rows":
        score *= lognormal(cols, 0.2)
        score *= lognormal(rows, 0.2)[:, None]
        kept = np.concatenate([largest(s, s.ravel()) for s in np.split(score, range(128, cols, 128), axis=1)], axis=1)
    elif kind == "uneven_both":
        score *= 0.5 + 0.5 * np.abs(rng.standard_t(4, cols)).astype(np.float32)
        score *= lognormal(rows, 0.3)[:, None]
        kept = largest(score, score.ravel()[::7])  # a sample of it
    else:
        raise ValueError(f"kind must be one of {MASKS}, got {kind!r}")
    return torch.from_numpy(kept)


def random_weight(
    rows: int, cols: int, density: float, dtype: torch.dtype, *, kind: str = "uniform", seed: int = 0
) -> Tensor:
    """Signed normal values under a mask, none of them zero by chance."""
    w = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).to(dtype)
    w = torch.where(w == 0, torch.ones((), dtype=dtype), w)
    return torch.where(mask(kind, rows, cols, density, seed), w, torch.zeros((), dtype=dtype))


def of_two_four(w: Tensor) -> Tensor:
    """The two largest of each four in a row."""
    fours = w.float().abs().unflatten(1, (-1, 4))
    return torch.zeros(fours.shape, dtype=torch.bool).scatter_(2, fours.topk(2)[1], True).flatten(1)


def as_bitmask(w: Tensor, two_four: bool = False, kept: Tensor | None = None) -> dict[str, Tensor]:
    """A tensor in the words of compressed-tensors, whose release 0.8 wrote all those of a model so, of any number of
    dimensions; kept: what is stored, zeros too, where it is not what the values say."""
    if kept is None:
        kept = of_two_four(w) if two_four else w != 0
    bits = torch.nn.functional.pad(kept, (0, -w.shape[-1] % 8)).view(*w.shape[:-1], -(-w.shape[-1] // 8), 8)
    bitmask, counts = (bits * (1 << torch.arange(8))).sum(-1).to(torch.uint8), kept.sum(-1)
    compressed = (w.view(torch.uint8) if w.element_size() == 1 else w)[kept].view(w.dtype)
    if two_four:
        return {"shape": torch.tensor(w.shape)[:, None], "compressed": compressed.view(len(w), -1), "bitmask": bitmask}
    offsets = counts.cumsum(0) - counts
    return {"shape": torch.tensor(w.shape), "compressed": compressed, "row_offsets": offsets, "bitmask": bitmask}


def as_8_bits(w: Tensor, kind: str) -> dict[str, Tensor]:
    """A weight in the 8 bits of compressed-tensors, of kind float or int, or packed: int in words of 32 bits."""
    scale = (w.float().abs().amax(1, keepdim=True) / 100).bfloat16()  # as no quantiser of macko's would have it
    values = w.float() / scale
    codes = values.to(torch.float8_e4m3fn) if kind == "float" else values.round().to(torch.int8)
    if kind != "packed":
        return {"weight": codes, "weight_scale": scale}
    words = (codes.view(torch.uint8) ^ 128).view(torch.int32)
    return {"weight_packed": words, "weight_shape": torch.tensor(codes.shape), "weight_scale": scale}


def compressed_config(kind: str, mask: str = "", **weights: Any) -> dict[str, Any]:
    """quantization_config of a folder whose weights are as_bitmask (then its format) or as_8_bits, these perhaps under
    a mask; weights: what else is said of them."""
    about: dict[str, Any] = {"quant_method": "compressed-tensors", "config_groups": {}}
    if kind.endswith("bitmask"):
        about["format"], mask = "dense", kind
    else:
        held = {"num_bits": 8, "type": "float" if kind == "float" else "int", "strategy": "channel", "symmetric": True}
        group = {"weights": held | weights, "input_activations": None, "targets": ["Linear"]}
        about["config_groups"] = {"group_0": group}
    if mask:
        about["sparsity_config"] = {"format": mask, "targets": ["Linear"], "ignore": ["lm_head"]}
    return about


def random_bits(rows: int, cols: int, density: float, dtype: torch.dtype, seed: int) -> Tensor:
    """Any bits in a uniform mask: NaN, Inf and subnormal numbers among them."""
    generator = torch.Generator().manual_seed(seed)
    limits = torch.iinfo({2: torch.int16, 4: torch.int32}[dtype.itemsize])
    bits = torch.randint(limits.min, limits.max, (rows, cols), dtype=getattr(torch, limits.dtype), generator=generator)
    return (bits * (torch.rand(rows, cols, generator=generator) < density)).view(dtype)


def random_vector(*shape: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    """Signed normal values."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def integer_problem(
    rows: int, cols: int, density: float, dtype: torch.dtype, *, kind: str = "uniform", seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """w, x and y = W x in small signed integers, all exact in dtype and in every order of summation.

    Weights are +-1 to +-4, and at most as many x are non-zero as keep |y| within what dtype counts exactly (256 in
    bfloat16, 2048 in float16). A kernel that takes one wrong column cannot give y.
    """
    rng = np.random.default_rng(seed)
    exact = {torch.float16: 2048, torch.bfloat16: 256, torch.float32: 2**24}[dtype]
    w = rng.integers(1, 5, (rows, cols)) * rng.choice((-1, 1), (rows, cols))
    w = torch.from_numpy(w) * mask(kind, rows, cols, density, seed)
    x = torch.from_numpy(rng.integers(1, 4, cols) * rng.choice((-1, 1), cols))
    x[torch.from_numpy(rng.permutation(cols)[exact // 12 :])] = 0
    return w.to(dtype), x.to(dtype), (w @ x).to(dtype)


def each_token(x: Tensor, y: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """x [cols] and y [rows] by a factor for each of so many tokens, a power of two or 0: who mixes tokens up is off."""
    factors = torch.tensor([1, -1, 0.5, -0.5, 2, -2, 0])
    chosen = torch.randint(len(factors), (count,), generator=torch.Generator().manual_seed(count))
    chosen[:1] = 0
    return tuple((t * factors[chosen, None]).to(t.dtype) + 0 for t in (x, y))  # type: ignore[return-value]


def assert_same_bits(got: Tensor, wanted: Tensor) -> None:
    """Same dtype, shape and bytes: NaN equals NaN of the same bits, 0.0 does not equal -0.0."""
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    as_bytes = [t.cpu().contiguous().view(-1).view(torch.uint8) for t in (got, wanted)]
    assert torch.equal(*as_bytes), f"{(as_bytes[0] != as_bytes[1]).sum()} bytes differ"


def assert_same_model(got: nn.Module, wanted: nn.Module) -> None:
    state, other = got.state_dict(), wanted.state_dict()
    assert state.keys() == other.keys()
    for name, tensor in state.items():
        assert_same_bits(tensor, other[name])


def assert_other_tensors_are_refused(packed: PackedWeight) -> Tensor:
    """By their name and what is expected; x that is not, of 3 tokens."""
    rows, cols = packed.shape
    x = random_vector(3, cols, dtype=packed.dtype).to(packed.device)
    other = torch.float16 if packed.dtype == torch.bfloat16 else torch.bfloat16
    names = [str(dtype).removeprefix("torch.") for dtype in (other, packed.dtype)]
    with pytest.raises(RuntimeError, match=rf"x has shape \[3, {cols - 1}\], expected \[..., {cols}\]"):
        packed.linear(x[:, :-1])
    with pytest.raises(RuntimeError, match="x has dtype {}, expected {}".format(*names)):
        packed.linear(x.to(other))
    with pytest.raises(RuntimeError, match=f"bias has {rows - 1} elements, the matrix has {rows} rows"):
        packed.linear(x, x.new_zeros(rows - 1))
    return x


def assert_graph_of_layers(layers: list, x: Tensor, bias: Tensor, bare: int) -> None:
    """A captured chain of the layers, then of the first `bare` with no kernel between, has the bits of eager mode, and
    reads x anew."""

    def chain(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer.linear(x, bias) * 0.05
        for layer in layers[:bare]:
            x = layer.linear(x)
        return x

    eager = chain(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(x)
    for _ in range(3):
        captured.fill_(float("nan"))
        graph.replay()
        assert_same_bits(captured, eager)
    x.copy_(x.flip(-1))
    graph.replay()
    assert_same_bits(captured, chain(x))


def assert_close_spmv(
    y: Tensor, w: Tensor, x: Tensor, bias: Tensor | None = None, *, chain: int | None = None, flush: float = 0.0
) -> None:
    """y [..., rows] against x W^T + bias in float64, within the bound of sums in float32: see reference.linear."""
    _assert_within(y, *reference.linear(x.cpu(), w.cpu(), bias, y.dtype, by_torch=False, chain=chain, flush=flush))


def assert_close_library(y: Tensor, w: Tensor, x: Tensor, bias: Tensor | None = None) -> None:
    """The same where torch's product, on the device of y, may have done the sums."""
    _assert_within(y, *reference.linear(x.to(y.device), w, bias, y.dtype))


def _assert_within(y: Tensor, wanted: Tensor, error: Tensor) -> None:
    assert y.shape == wanted.shape
    largest, y, wanted, error = torch.finfo(y.dtype).max, y.cpu().double(), wanted.cpu(), error.cpu()
    off = (y - wanted).abs()
    bad = ~(off <= error) & (wanted.abs() < largest)
    assert not bad.any(), f"{bad.sum()} of {bad.numel()} off, the worst by {(off / error)[bad].max():.3g} of the bound"
    same = (wanted.isnan() & y.isnan()) | (y == wanted) | ~(wanted.isnan() | wanted.isinf())
    assert same.all(), "NaN or Inf are in other places than in float64"


def cuda_chain(row_ptr: Tensor) -> int:
    """Roundings that a product goes through in the CUDA spmv of the macko format, for assert_close_spmv.

    A lane adds up to 8 entries of each step of 512 to each of its two sums, in order; then come the product itself,
    the two sums, 5 levels of the warp and the bias.
    """
    longest = int(row_ptr.diff().max()) if len(row_ptr) > 1 else 0
    return 8 * -(-(longest + 7) // 512) + 8


def compiled(code: str, folder: Path, include: str = "", language: str = "c") -> ctypes.CDLL:
    """C or C++ that includes headers of a folder of csrc, as a library: so a plan is tested without a GPU."""
    sources, (compiler, standard) = ROOT / "csrc", {"c": ("cc", "c17"), "c++": ("c++", "c++17")}[language]
    if not shutil.which(compiler) or not sources.exists():
        pytest.skip(f"needs {compiler} and the sources")
    command = [compiler, f"-std={standard}", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", f"-I{sources / include}"]
    subprocess.run([*command, "-x", language, "-", "-o", folder / "c.so"], input=code, text=True, check=True)
    return ctypes.CDLL(str(folder / "c.so"))


def two_processes(program: str, *arguments: str) -> None:
    """Runs a program twice at once, as ranks 0 and 1, its last argument."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, *arguments, str(rank)],
            env={**os.environ, "WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=300)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    assert codes == [0, 0], f"exit status {codes}\n" + "\n".join(errors)
