"""Training that wins back what pruning took, on the mask: not one zero moves.

    python -m examples.finetune                              a small Llama, trained here on this repository's README
    python -m examples.finetune FOLDER --text FILE --out OUT a checkpoint and a text of your own
    python -m examples.finetune --lora                       LoRA on the packed base, merged on the same mask

Weights stay dense while they are trained (Hugging Face's Trainer), are masked behind every step, and packed in the end.
An adapter trains on the packed base; what it adds to zeros is dropped when it is merged, and printed as a loss.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import macko
from examples.lora import README, load, loss, train
from macko.nn.find import IGNORED, find_linears


class OnTheMask(TrainerCallback):
    """Keeps every zero that the linear layers had when it was made."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = [layer.module.weight for layer in find_linears(model, IGNORED, None)]
        self.zeros = [weight.detach() == 0 for weight in self.weights]

    @torch.no_grad()
    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        for weight, zeros in zip(self.weights, self.zeros, strict=True):
            weight.masked_fill_(zeros.to(weight.device), 0)


def finetune(model: Any, tokens: Tensor, steps: int, length: int, lr: float) -> None:
    """The Trainer on pieces of tokens [count], on the mask that the model has now."""
    pieces = tokens[: len(tokens) // length * length].view(-1, length)
    rows = [{"input_ids": piece, "labels": piece} for piece in pieces]
    with tempfile.TemporaryDirectory() as scratch:
        settings = TrainingArguments(
            output_dir=scratch, max_steps=steps, per_device_train_batch_size=8, learning_rate=lr, report_to="none",
            lr_scheduler_type="cosine", save_strategy="no", logging_strategy="no", disable_tqdm=True,
            use_cpu=model.device.type == "cpu",
        )  # fmt: skip
        Trainer(model=model, args=settings, train_dataset=rows, callbacks=[OnTheMask(model)]).train()
    model.eval()


@torch.no_grad()
def merge_on_mask(adapted: Any) -> Any:
    """The base with the adapter in its weights, where it has weights; its layers are dense, to be packed again."""
    merged = {}
    for name, module in adapted.base_model.model.named_modules():
        base = getattr(module, "base_layer", None)
        if isinstance(base, macko.SparseLinear):
            weight = base.packed.to_dense()
            delta = sum(module.get_delta_weight(each) for each in module.active_adapters)
            layer = nn.Linear(base.in_features, base.out_features, bias=base.bias is not None, dtype=weight.dtype)
            layer.weight = nn.Parameter((weight + delta.to(weight)).masked_fill(weight == 0, 0))
            layer.bias = base.bias
            merged[name] = layer.to(weight.device)
    model = adapted.unload()
    for name, layer in merged.items():
        model.set_submodule(name, layer)
    return model


def zeros(model: nn.Module) -> int:
    """Zeros in the linear layers that are pruned."""
    return sum(
        layer.module.weight.numel() - int(layer.module.weight.count_nonzero())
        for layer in find_linears(model, IGNORED, None)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", help="a checkpoint")
    parser.add_argument("--text", type=Path, default=README)
    parser.add_argument("--out", help="folder to save the packed model in")
    parser.add_argument("--sparsity", type=float, default=0.7)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--base-steps", type=int, default=400, help="to train the small Llama")
    parser.add_argument("--length", type=int, default=64, help="tokens in a piece")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--lora", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)

    model, tokens = load(args.folder, args.text, args.length, args.base_steps, device, torch.float32)

    def say(what: str) -> None:
        print(f"{what:28} loss {loss(model, tokens, args.length):.3f}, {zeros(model)} zeros")

    say("dense")
    batches = list(tokens[: len(tokens) // args.length * args.length].view(-1, args.length)[:64].split(8))
    macko.prune_(model, args.sparsity, "wanda", calibration=batches)
    say(f"{args.sparsity:.0%} of it pruned")
    if args.lora:
        macko.sparsify_(model, device=device)
        adapted = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
        train(adapted, tokens, args.steps, args.length, args.lr, "training the adapter")
        print(f"{'with the adapter beside it':28} loss {loss(adapted, tokens, args.length):.3f}")
        model = merge_on_mask(adapted)
        say("merged on the mask")
    else:
        finetune(model, tokens, args.steps, args.length, args.lr)
        say("trained on the mask")
    print(str(macko.sparsify_(model, device=device)).splitlines()[-1])
    say("packed")
    if args.out:
        model.save_pretrained(args.out)


if __name__ == "__main__":
    main()
