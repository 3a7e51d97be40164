"""A diffusion transformer at full size with random weights, dense and packed: bytes, seconds a step, and offloading.

    python -m benchmarks.diffusion OUT.jsonl sizes
    python -m benchmarks.diffusion OUT.jsonl step --model FLUX.1-dev
    python -m benchmarks.diffusion OUT.jsonl step --model Qwen-Image --layers 30
    python -m benchmarks.diffusion OUT.jsonl offload --ways none,group,group_stream --steps 20
    python -m benchmarks.diffusion OUT.jsonl offload --ways model,sequential --steps 2

`sizes` counts from the configs of released transformers, without a GPU. A step is one call of the transformer, for an
image of 1024 x 1024: 4096 tokens of it and 512 of text. `step` keeps both models on the GPU and calls them in turns.
`offload` takes the dense model and then the packed one through each way of offloading, block by block with a stream or
without, and looks whether it gives what it gives without offloading (`same`), which bytes of packed layers are on the
GPU afterwards, and how much memory the weights took there at most: the peak less what activations take, which is the
peak less the weights where nothing is offloaded.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import cpu_offload, cpu_offload_with_hook
from accelerate.hooks import remove_hook_from_module
from diffusers import (
    FluxTransformer2DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    WanTransformer3DModel,
)
from torch import Tensor, nn

import macko
from benchmarks.timing import append_jsonl, commit, provenance
from macko.choose.auto import DENSE12_WEIGHTS
from macko.weights import Dense12Weight

#: Latents of an image, by rows and columns; tokens of text.
SIDE, TEXT = 64, 512
IMAGE = SIDE * SIDE


#: Elements that a slab of 64 x 256 is taken to list: 16 fit into the bytes that it is filled up to.
LISTED = 16
#: diffusers' defaults are the sizes of the first three.
RELEASED: dict[str, tuple[Any, dict[str, Any]]] = {
    "FLUX.1-dev": (FluxTransformer2DModel, {"guidance_embeds": True}),
    "Qwen-Image": (QwenImageTransformer2DModel, {}),
    "Wan 14B": (WanTransformer3DModel, {}),
    "SD3.5 large": (
        SD3Transformer2DModel,
        {
            "sample_size": 128, "patch_size": 2, "in_channels": 16, "num_layers": 38, "attention_head_dim": 64,
            "num_attention_heads": 38, "joint_attention_dim": 4096, "caption_projection_dim": 2432,
            "pooled_projection_dim": 2048, "out_channels": 16, "pos_embed_max_size": 192, "qk_norm": "rms_norm",
        },
    ),
}  # fmt: skip


class Size(NamedTuple):
    """Bytes of a model in bfloat16 and packed, and these in pinned memory, tensor by tensor."""

    layers: int
    dense: int
    packed: int
    pinned_dense: int
    pinned_packed: int


def size_of(model: Any) -> Size:
    """What compress_ would make of a model in bfloat16; it may be on the meta device."""
    kept = model._keep_in_fp32_modules or ()
    layers, dense, packed = 0, [], []
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            dense.append(2 * parameter.numel())
            packed.append(dense[-1])
            is_kept = bool(set(kept) & set(name.split(".")))
            if type(module) is nn.Linear and key == "weight" and parameter.numel() >= DENSE12_WEIGHTS and not is_kept:
                layers += 1
                rows, cols = parameter.shape
                packed[-1] = Dense12Weight.bytes_of(rows, cols, 0, LISTED) or dense[-1]
    pinned = [sum(1 << (size - 1).bit_length() for size in sizes) for sizes in (dense, packed)]
    return Size(layers, sum(dense), sum(packed), *pinned)


def make(name: str, layers: int | None) -> Any:
    """The transformer with random weights on the GPU, of so many of its layers."""
    kind, config = RELEASED[name]
    if layers is not None:
        config = config | {"num_layers": layers}
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = kind(**config)
    torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.02)
    return model.eval().requires_grad_(False)


def inputs(name: str) -> tuple[Tensor, dict[str, Any]]:
    """Latents, and what else the transformer takes."""
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    if name == "FLUX.1-dev":
        places = torch.cartesian_prod(torch.zeros(1), torch.arange(float(SIDE)), torch.arange(float(SIDE))).cuda()
        others: dict[str, Any] = {
            "encoder_hidden_states": random(1, TEXT, 4096), "pooled_projections": random(1, 768),
            "img_ids": places, "txt_ids": torch.zeros(TEXT, 3, device="cuda"),
            "guidance": torch.full((1,), 3.5, device="cuda"),
        }  # fmt: skip
    else:
        others = {
            "encoder_hidden_states": random(1, TEXT, 3584), "img_shapes": [[(1, SIDE, SIDE)]],
            "encoder_hidden_states_mask": torch.ones(1, TEXT, dtype=torch.long, device="cuda"),
        }  # fmt: skip
    return random(1, IMAGE, 64), others


def denoise(model: Any, name: str, steps: int) -> tuple[Tensor, list[float]]:
    """The latents after so many steps, and the seconds of each."""
    latents, others = inputs(name)
    seconds = []
    for step in range(steps):
        timestep = torch.full((1,), 1 - step / steps, device="cuda", dtype=torch.bfloat16)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        with torch.no_grad():
            change = model(hidden_states=latents, timestep=timestep, return_dict=False, **others)[0]
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
        latents = latents - change / steps
    return latents, seconds


def nbytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def on_gpu(model: nn.Module) -> int:
    """Bytes of the model's packed layers there."""
    packed = (module for module in model.modules() if isinstance(module, macko.SparseLinear))
    held = [t for layer in packed for t in (*layer._parameters.values(), *layer._buffers.values())]
    return sum(tensor.nbytes for tensor in held if tensor is not None and tensor.is_cuda)


def time_steps(args: argparse.Namespace) -> None:
    dense = make(args.model, args.layers)
    packed = copy.deepcopy(dense)
    begun = time.perf_counter()
    report = macko.compress_(packed, progress=False)
    torch.cuda.synchronize()
    packing = time.perf_counter() - begun
    models = {"dense": dense, "packed": packed}
    seconds: dict[str, list[float]] = {key: [] for key in models}
    outputs = {}
    for _ in range(args.rounds):
        for key, model in models.items():
            outputs[key], took = denoise(model, args.model, 3)
            seconds[key] += took[1:]
    step = {key: statistics.median(took) for key, took in seconds.items()}
    scale = outputs["dense"].float().std().item()
    about = {
        "what": "step", "model": args.model, "layers": args.layers, "tokens": IMAGE + TEXT, "dtype": "bfloat16",
        "packed_layers": len(report.changed), "linear_layers": len(report), "pack_s": packing,
        "dense_bytes": nbytes(dense), "bytes": nbytes(packed), "dense_s": step["dense"], "s": step["packed"],
        "all_dense_s": seconds["dense"], "all_s": seconds["packed"],
        "difference": (outputs["dense"].float() - outputs["packed"].float()).abs().max().item() / scale,
    }  # fmt: skip
    append_jsonl(args.out, **provenance(), **about)
    print(json.dumps(about), flush=True)


def count_sizes(args: argparse.Namespace) -> None:
    for name, (kind, config) in RELEASED.items():
        with torch.device("meta"):
            size = size_of(kind(**config))
        append_jsonl(args.out, what="sizes", model=name, commit=commit(), **size._asdict())


# ---- Offloading ------------------------------------------------------------------------------------------------------


def group(model: Any, **options: Any) -> None:
    model.enable_group_offload(
        onload_device=torch.device("cuda"), offload_device=torch.device("cpu"), offload_type="block_level",
        num_blocks_per_group=1, **options,
    )  # fmt: skip


def whole(model: Any) -> Callable[[], None]:
    """As enable_model_cpu_offload does it."""
    return cpu_offload_with_hook(model, "cuda")[1].offload


def sequential(model: Any) -> None:
    """As enable_sequential_cpu_offload does it."""
    cpu_offload(model, "cuda", offload_buffers=bool(model._parameters))


#: Each gives what is to be called after the last step, if anything is.
WAYS: dict[str, Callable[[Any], Callable[[], None] | None]] = {
    "none": lambda model: None,
    "group": group,
    "group_stream": lambda model: group(model, use_stream=True),
    "group_stream_recorded": lambda model: group(model, use_stream=True, record_stream=True),
    "model": whole,
    "sequential": sequential,
}


def place(model: Any, way: str) -> None:
    """The model to where its weights begin: for a stream in pinned memory, where the offloader would copy them to."""
    if "stream" in way:
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_pinned():
                tensor.data = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)
    else:
        model.to("cuda" if way == "none" else "cpu")
    torch.cuda.empty_cache()


def take_away(model: Any) -> None:
    """Whatever offloader there is, so that the next one may have the model."""
    for module in model.modules():
        if (registry := getattr(module, "_diffusers_hook", None)) is not None:
            for name in list(registry.hooks):
                registry.remove_hook(name, recurse=False)
    remove_hook_from_module(model, recurse=True)
    gc.collect()


def time_offloads(args: argparse.Namespace) -> None:
    model, told = make(args.model, args.layers), None
    for kind in args.kinds.split(","):
        if kind == "packed":
            macko.compress_(model.to("cuda"), progress=False)
            told = macko.offloadable_(model)
        size, activations, wanted = nbytes(model), 0, dict[int, Tensor]()
        blocks = [nbytes(block) for part in model.children() if isinstance(part, nn.ModuleList) for block in part]
        few, ways = min(args.steps, args.slow_steps), args.ways.split(",")
        slow = [way for way in ways if way != "none" and "stream" not in way]
        for way in ways:
            steps = few if way in slow else args.steps
            begun = time.perf_counter()
            place(model, way)
            after = WAYS[way](model)
            torch.cuda.synchronize()
            placing = time.perf_counter() - begun
            torch.cuda.reset_peak_memory_stats()
            latents, seconds = denoise(model, args.model, steps)
            peak = torch.cuda.max_memory_allocated()
            if after is not None:
                after()
            if way == "none":
                wanted, activations = {steps: latents}, peak - size
                if slow and few != steps:
                    wanted[few] = denoise(model, args.model, few)[0]
            about = {
                "what": "offload", "model": args.model, "layers": args.layers, "tokens": IMAGE + TEXT, "kind": kind,
                "way": way, "steps": steps, "bytes": size, "rest_bytes": size - sum(blocks),
                "two_blocks_bytes": 2 * max(blocks), "pinned_bytes": told and told.pinned, "peak_bytes": peak,
                "weights_peak_bytes": peak - activations, "left_on_gpu": 0 if way == "none" else on_gpu(model),
                "same": torch.equal(latents, wanted[steps]) if wanted else None,
                "place_s": placing, "s": statistics.median(seconds[1:] or seconds), "all_s": seconds,
            }  # fmt: skip
            append_jsonl(args.out, **provenance(), **about)
            print(json.dumps(about), flush=True)
            del latents
            take_away(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("what", choices=("sizes", "step", "offload"))
    parser.add_argument("--model", default="FLUX.1-dev", choices=("FLUX.1-dev", "Qwen-Image"))
    parser.add_argument("--layers", type=int, help="of the transformer; default: all")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--ways", default="none,group_stream", help=f"comma separated: {', '.join(WAYS)}")
    parser.add_argument("--kinds", default="dense,packed", help="comma separated")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--slow-steps", type=int, default=2, help="at most, without a stream")
    args = parser.parse_args()
    {"sizes": count_sizes, "step": time_steps, "offload": time_offloads}[args.what](args)


if __name__ == "__main__":
    main()
