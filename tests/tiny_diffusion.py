"""Diffusion models of diffusers, random and tiny, but wide enough that dense12's slabs are fewer bytes."""

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor, nn

needs_diffusers = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("diffusers", "transformers", "accelerate", "peft")),
    reason="diffusers, transformers, accelerate or peft is not installed",
)
DTYPE = torch.bfloat16
_TRANSFORMER = {
    "patch_size": 1, "in_channels": 64, "num_layers": 1, "attention_head_dim": 128, "num_attention_heads": 2,
    "joint_attention_dim": 256, "axes_dims_rope": (16, 56, 56),
}  # fmt: skip
#: Class and config of each.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "flux": (
        "FluxTransformer2DModel",
        _TRANSFORMER | {"num_single_layers": 1, "pooled_projection_dim": 256, "guidance_embeds": True},
    ),
    "qwen_image": ("QwenImageTransformer2DModel", _TRANSFORMER | {"patch_size": 2, "out_channels": 16}),
    "wan": (
        "WanTransformer3DModel",
        {
            "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 128, "in_channels": 16,
            "out_channels": 16, "text_dim": 256, "freq_dim": 256, "ffn_dim": 512, "num_layers": 1,
            "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads", "rope_max_seq_len": 32,
        },
    ),
    "sd3": (
        "SD3Transformer2DModel",
        {
            "sample_size": 8, "patch_size": 2, "in_channels": 16, "num_layers": 2, "attention_head_dim": 64,
            "num_attention_heads": 4, "joint_attention_dim": 256, "caption_projection_dim": 256,
            "pooled_projection_dim": 256, "out_channels": 16, "pos_embed_max_size": 16, "dual_attention_layers": (0,),
            "qk_norm": "rms_norm",
        },
    ),
    "unet": (
        "UNet2DConditionModel",
        {
            "sample_size": 8, "in_channels": 4, "out_channels": 4, "block_out_channels": (64, 256),
            "layers_per_block": 1, "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "cross_attention_dim": 256, "attention_head_dim": 8,
            "norm_num_groups": 32,
        },
    ),
}  # fmt: skip


def make(kind: str) -> Any:
    """The model in bfloat16, but for layers that its class keeps in float32."""
    import diffusers

    name, config = MODELS[kind]
    torch.manual_seed(0)
    model = getattr(diffusers, name)(**config)
    with torch.no_grad():  # zeros that constructors leave, as in gates, would hide a wrong product
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.03)
    kept = model._keep_in_fp32_modules or ()
    for name, parameter in model.named_parameters():
        if not set(kept) & set(name.split(".")):
            parameter.data = parameter.data.to(DTYPE)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(DTYPE) if buffer.is_floating_point() and kind != "wan" else buffer.data
    return model.eval().requires_grad_(False)


def inputs(kind: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DTYPE)

    text = {"encoder_hidden_states": random(1, 8, 256), "return_dict": False}
    images: dict[str, dict[str, Any]] = {
        "flux": {
            "hidden_states": random(1, 16, 64), "pooled_projections": random(1, 256), "img_ids": torch.zeros(16, 3),
            "txt_ids": torch.zeros(8, 3), "timestep": torch.tensor([0.5]).to(DTYPE), "guidance": torch.tensor([3.5]),
        },
        "qwen_image": {
            "hidden_states": random(1, 16, 64), "encoder_hidden_states_mask": torch.ones(1, 8, dtype=torch.long),
            "timestep": torch.tensor([0.5]).to(DTYPE), "img_shapes": [[(1, 4, 4)]],
        },
        "wan": {"hidden_states": random(1, 16, 2, 8, 8), "timestep": torch.tensor([500])},
        "sd3": {
            "hidden_states": random(1, 16, 8, 8), "pooled_projections": random(1, 256), "timestep": torch.tensor([500]),
        },
        "unet": {"sample": random(1, 4, 8, 8), "timestep": torch.tensor([5])},
    }  # fmt: skip
    return images[kind] | text


@torch.no_grad()
def run(model: nn.Module, kind: str) -> Tensor:
    return model(**inputs(kind))[0]
