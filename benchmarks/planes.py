"""dense12 as files hold it, on one CPU core, or read onto a GPU.

    python -m benchmarks.planes OUT.jsonl
    python -m benchmarks.planes OUT.jsonl --load /tmp --blocks 4,32
    python -m benchmarks.planes OUT.jsonl --convert /tmp        # 24 GB of files meanwhile
    python -m benchmarks.planes OUT.jsonl --convert /tmp --blocks 4 --sparse

A bfloat16 matrix of a 7B's shape, scales by row and column, to planes and to dense again, in memory that is there: so
glibc is told to keep it, or every call would pay a page fault for 4 KB. CPU time of this process, the best of several
rounds, in GB of bfloat16 a second; and the seconds that a 7B's linear layers take by that.

With --load: seconds of macko.load_model, of a model of so many of a 7B's blocks with random weights on the meta device,
onto the GPU: of its dense file and of its packed one, in turns, both in the page cache and mapped anew.

With --convert: CPU seconds of this process, in user mode, to pack a folder of a Llama of 7B, 13.5 GB in shards of a
block each, and to unpack it, on one thread; and those of reading each file's bytes once, which packing does too. All
blocks hold the same random numbers. With --sparse half of these are zeros, and `macko convert` packs them by "auto".
Beside each time stand the GB by which memory that no file backs grew.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import macko
from benchmarks.cpu import machine
from benchmarks.timing import append_jsonl, provenance
from macko import _library
from macko.weights import Planes12Weight

ROWS, COLS = 11008, 4096
BYTES_7B = 13.48e9
#: Rows and columns of the linear layers of a 7B's block.
BLOCK_7B = dict.fromkeys((f"self_attn.{name}_proj" for name in "qkvo"), (4096, 4096))
BLOCK_7B |= {"mlp.gate_proj": (11008, 4096), "mlp.up_proj": (11008, 4096), "mlp.down_proj": (4096, 11008)}
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4


def gbps(work: Callable[[], Any], size: int, rounds: int) -> float:
    best = float("inf")
    for _ in range(rounds):
        begun = time.process_time()
        work()
        best = min(best, time.process_time() - begun)
    return size / best / 1e9


def trained(rows: int, cols: int) -> Tensor:
    """Random bfloat16 numbers with scales by row and column."""
    w = torch.randn(rows, cols) * torch.exp(0.5 * torch.randn(rows, 1)) * torch.exp(0.3 * torch.randn(1, cols))
    return (w * 0.02).bfloat16()


def blocks_7b(count: int) -> nn.Sequential:
    """The linear layers of so many of a 7B's blocks, 0.4 GB each."""
    shapes = [(4096, 4096)] * 4 + [(4096, 11008)] * 2 + [(11008, 4096)]
    return nn.Sequential(
        *(nn.Linear(*shape, bias=False, dtype=torch.bfloat16) for _ in range(count) for shape in shapes)
    )


def time_loading(out: Path, folder: Path, blocks: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as place:
        with torch.device("cuda"):
            model = blocks_7b(blocks)
        files = {name: Path(place) / f"{name}.safetensors" for name in ("dense", "packed")}
        macko.save_model(model, files["dense"])
        macko.compress_(model, progress=False)
        macko.save_model(model, files["packed"])
        del model
        seconds: dict[str, list[float]] = {name: [] for name in files}
        peak: dict[str, float] = {}
        for _ in range(rounds + 1):  # the first reads kernels, too
            for name, file in files.items():
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                with torch.device("meta"):
                    model = blocks_7b(blocks)
                begun = time.perf_counter()
                loaded = macko.load_model(model, file, device="cuda")
                torch.cuda.synchronize()
                seconds[name].append(time.perf_counter() - begun)
                peak[name] = torch.cuda.max_memory_allocated() / 1e9
                del model, loaded
        for name, file in files.items():
            best = statistics.median(seconds[name][1:])
            about = {"step": f"load {name}", "dtype": "bfloat16", "blocks": blocks, "peak_gb": peak[name]}
            append_jsonl(out, **provenance(), **about, file_bytes=file.stat().st_size, s=best, all_s=seconds[name])
            print(f"{blocks} blocks, {name}: {best:.3f} s of {file.stat().st_size / 1e9:.2f} GB, {seconds[name]}")


def write_7b(folder: Path, blocks: int, sparse: bool) -> None:
    """Llama-2-7B's config and shapes, a block a file."""
    from transformers import LlamaConfig

    about = LlamaConfig(architectures=["LlamaForCausalLM"], dtype="bfloat16", num_hidden_layers=blocks)
    about.save_pretrained(folder)
    weights = {name: trained(rows, cols) for name, (rows, cols) in BLOCK_7B.items()}
    if sparse:
        weights = {name: weight * (torch.rand(weight.shape) < 0.5) for name, weight in weights.items()}
    norm = torch.ones(4096, dtype=torch.bfloat16)
    places: dict[str, str] = {}
    for block in range(blocks):
        layer = f"model.layers.{block}."
        tensors = {f"{layer}{name}.weight": weight for name, weight in weights.items()}
        tensors |= {f"{layer}{name}.weight": norm.clone() for name in ("input_layernorm", "post_attention_layernorm")}
        if block == 0:
            ends = {"model.embed_tokens.weight": trained(32000, 4096), "lm_head.weight": trained(32000, 4096)}
            tensors |= ends | {"model.norm.weight": norm.clone()}
        name = f"model-{block + 1:05}-of-{blocks:05}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, name)
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def anonymous_gb() -> float:
    """Memory of this process that no file backs."""
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) * 1024 / 1e9


def grown_gb(work: Callable[[], Any]) -> float:
    """By how much anonymous memory grew at most while it worked."""
    done, sizes = threading.Event(), [anonymous_gb()]

    def watch() -> None:
        while not done.wait(0.005):
            sizes.append(anonymous_gb())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        done.set()
        watcher.join()
    return max(sizes) - sizes[0]


def time_converting(out: Path, folder: Path, blocks: int, sparse: bool) -> None:
    from macko.cli import main as command
    from macko.integrations.folders import pack_folder, unpack_folder

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        source, packed, again = (Path(place) / name for name in ("dense", "packed", "again"))
        source.mkdir()
        write_7b(source, blocks, sparse)

        def read() -> None:
            for file in sorted(source.glob("*.safetensors")):
                with file.open("rb", buffering=0) as opened:
                    while opened.read(1 << 24):
                        pass

        steps: tuple[tuple[str, Callable[[], Any]], ...] = (
            ("convert --format dense12", lambda: pack_folder(source, packed, ())),
            ("convert --to dense", lambda: unpack_folder(packed, again)),
        )
        if sparse:
            steps = (("convert", lambda: command(["convert", str(source), str(packed), "--device", "cpu"])),)
        for step, work in (("read", read), *steps):
            if step.endswith("dense"):
                shutil.rmtree(source)
            before, begun = os.times(), time.monotonic()
            peak = grown_gb(work)
            after = os.times()
            user, system, wall = after.user - before.user, after.system - before.system, time.monotonic() - begun
            print(
                f"{blocks} blocks, {step}: {user:.1f} s of a core, {system:.1f} of the system beside, {wall:.1f} in "
                f"all, {peak:.3f} GB"
            )
            times = {"user_s": user, "system_s": system, "wall_s": wall, "peak_gb": peak}
            append_jsonl(out, **machine("cpu"), step=step, dtype="bfloat16", blocks=blocks, sparse=sparse, **times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--load", type=Path, help="a folder for files that are read onto the GPU")
    parser.add_argument("--convert", type=Path, help="a folder for that of a model")
    parser.add_argument("--blocks", help="comma separated; default 4,32 to load, 32 to convert")
    parser.add_argument("--sparse", action="store_true", help="of --convert: half of the weights are zeros")
    options = parser.parse_args()
    if options.load is not None:
        for blocks in map(int, (options.blocks or "4,32").split(",")):
            time_loading(options.out, options.load, blocks, options.rounds)
        return
    if options.convert is not None:
        for blocks in map(int, (options.blocks or "32").split(",")):
            time_converting(options.out, options.convert, blocks, options.sparse)
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    w = trained(ROWS, COLS)
    packed = Planes12Weight.from_dense(w)
    assert torch.equal(packed.to_dense().view(torch.int16), w.view(torch.int16))
    place = torch.empty_like(w)
    numbers = w.view(torch.uint8).numpy()
    for path in ("scalar", "avx2"):
        with _library.plan(f"cpu={path}"):
            for step, work in (
                ("pack", lambda: Planes12Weight.from_dense(w)),
                ("dense", packed.to_dense),
                ("check", packed.validate),
                ("checksum", lambda: zlib.crc32(numbers.data)),
                ("copy", lambda: place.copy_(w)),
            ):
                rate = gbps(work, w.nbytes, options.rounds)
                share = {"bytes_share": packed.nbytes / w.nbytes, "listed_share": packed.listed / w.numel()}
                print(f"{path} {step}: {rate:.2f} GB/s, a 7B {BYTES_7B / rate / 1e9:.1f} s")
                about = {"rows": ROWS, "cols": COLS, "dtype": "bfloat16", "cpu_path": path, "step": step}
                append_jsonl(options.out, **machine("cpu"), **about, **share, gbps=rate, s_7b=BYTES_7B / rate / 1e9)


if __name__ == "__main__":
    main()
