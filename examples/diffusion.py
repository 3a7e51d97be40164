"""A diffusion pipeline in three quarters of its bytes, with the same images, bit for bit.

    python -m examples.diffusion                                a tiny FLUX with random weights, here
    python -m examples.diffusion FOLDER --prompt "a red fox"    a pipeline of your own, on a GPU
    python -m examples.diffusion FOLDER --offload               the same, its blocks fetched from the CPU one by one

diffusers, accelerate and transformers have to be installed.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from diffusers import (
    AutoencoderKL,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

import macko
from macko.nn.report import format_bytes


def tiny_pipeline(device: torch.device) -> Any:
    """FLUX with random weights, large enough for layers that gain."""
    torch.manual_seed(0)
    transformer = FluxTransformer2DModel(
        patch_size=1, in_channels=64, num_layers=1, num_single_layers=1, attention_head_dim=128, num_attention_heads=8,
        joint_attention_dim=1024, pooled_projection_dim=256, guidance_embeds=True, axes_dims_rope=(16, 56, 56),
    )  # fmt: skip
    vae = AutoencoderKL(
        in_channels=3, out_channels=3, block_out_channels=(32,), latent_channels=16, norm_num_groups=8, sample_size=32,
        shift_factor=0.1, scaling_factor=0.3,
    )  # fmt: skip
    clip = CLIPTextConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4)
    t5 = T5Config(d_model=1024, d_kv=64, num_heads=16, d_ff=2048, num_layers=1, feed_forward_proj="gated-gelu")
    pipe = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(), vae=vae, text_encoder=CLIPTextModel(clip), tokenizer=None,
        text_encoder_2=T5EncoderModel(t5), tokenizer_2=None, transformer=transformer,
    )  # fmt: skip
    return pipe.to(torch.bfloat16).to(device)


def tiny_image(pipe: Any, device: torch.device) -> Tensor:
    torch.manual_seed(1)
    embeds = torch.randn(1, 16, 1024).bfloat16().to(device)
    pooled = torch.randn(1, 256).bfloat16().to(device)
    return pipe(
        prompt_embeds=embeds, pooled_prompt_embeds=pooled, height=64, width=64, num_inference_steps=2,
        output_type="pt", generator=torch.Generator().manual_seed(0),
    ).images  # fmt: skip


def show(reports: dict[str, macko.Report]) -> None:
    for name, report in reports.items():
        before, after = format_bytes(report.bytes_before), format_bytes(report.bytes_after)
        print(f"{name}: {len(report.changed)} of {len(report)} linear layers packed, {before} to {after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", help="of a pipeline; default: a tiny one with random weights")
    parser.add_argument("--prompt", default="a red fox in the snow")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--offload", action="store_true", help="fetch blocks from the CPU by diffusers' group offloading"
    )
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.folder is None:
        pipe = tiny_pipeline(device)
        pipe.set_progress_bar_config(disable=True)
        wanted = tiny_image(pipe, device)
        show(macko.compress_(pipe, offload=True))  # which packs on a CPU, too
        image = tiny_image(pipe, device)
        difference = (image.float() - wanted.float()).abs().max().item()
        print("the same image, bit for bit" if torch.equal(image, wanted) else f"images differ by {difference:.3g}")
        return
    pipe = DiffusionPipeline.from_pretrained(args.folder, torch_dtype=torch.bfloat16)
    if args.offload:
        show(macko.compress_(pipe, offload=True))
        pipe.enable_group_offload(
            onload_device=device, offload_type="block_level", num_blocks_per_group=1, use_stream=device.type == "cuda"
        )
    else:
        show(macko.compress_(pipe.to(device)))
    start = time.perf_counter()
    image = pipe(args.prompt, num_inference_steps=args.steps).images[0]
    print(f"{time.perf_counter() - start:.1f} s")
    image.save("image.png")
    print("written to image.png")


if __name__ == "__main__":
    main()
