"""An adapter on a sparse base: what pruning took is won back, and not one zero is lost.

    python -m examples.lora                                  a small Llama, trained here on this repository's README
    python -m examples.lora FOLDER --text FILE               a checkpoint and a text of your own

The base is pruned by magnitude, packed, and frozen; LoRA (peft) trains on top of it.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import macko

README = Path(__file__).resolve().parent.parent / "README.md"


def small_llama() -> Any:
    """Two blocks over bytes."""
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=344, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=512,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def train(model: Any, tokens: Tensor, steps: int, length: int, lr: float, name: str) -> None:
    """AdamW over what requires a gradient, on random pieces of tokens [count]."""
    rng = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    model.train()
    with tqdm(range(steps), desc=name, delay=1, mininterval=1, leave=False) as bar:
        for _ in bar:
            starts = torch.randint(len(tokens) - length, (8,), generator=rng).tolist()
            batch = torch.stack([tokens[start : start + length] for start in starts]).to(model.device)
            output = model(input_ids=batch, labels=batch)
            output.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            bar.set_postfix(loss=f"{output.loss.item():.3f}", refresh=False)
    model.eval()


def load(
    folder: str | None, text: Path, length: int, steps: int, device: torch.device, dtype: torch.dtype
) -> tuple[Any, Tensor]:
    """A checkpoint and its tokens of a text, or the small Llama after so many steps on it, and its bytes."""
    read = text.read_text(encoding="utf-8")
    if folder:
        tokens = AutoTokenizer.from_pretrained(folder)(read, return_tensors="pt").input_ids[0]
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        return model.to(device), tokens
    tokens, model = torch.tensor(list(read.encode())), small_llama().to(device)
    train(model, tokens, steps, length, 3e-3, "training a base")
    return model.to(dtype), tokens


def loss(model: Any, tokens: Tensor, length: int) -> float:
    """Mean cross entropy over the text."""
    pieces = tokens[: len(tokens) // length * length].view(-1, length)[:32].to(model.device)
    with torch.no_grad():
        return model(input_ids=pieces, labels=pieces).loss.item()


def zeros(model: torch.nn.Module) -> int:
    """Zeros in the packed weights."""
    layers = (module for module in model.modules() if isinstance(module, macko.SparseLinear))
    return sum(layer.in_features * layer.out_features - int(layer.weight.count_nonzero()) for layer in layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", help="a checkpoint")
    parser.add_argument("--text", type=Path, default=README)
    parser.add_argument("--sparsity", type=float, default=0.7)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--length", type=int, default=64, help="tokens in a piece")
    parser.add_argument("--rank", type=int, default=8)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)

    if not args.folder:
        torch.set_num_threads(1)  # so small a model only waits for the other threads
    model, tokens = load(args.folder, args.text, args.length, 400, device, torch.bfloat16)
    print(f"dense                  loss {loss(model, tokens, args.length):.3f}")
    macko.prune_(model, args.sparsity)
    print(f"{args.sparsity:.0%} of it pruned      loss {loss(model, tokens, args.length):.3f}")
    print(str(macko.sparsify_(model, device=device)).splitlines()[-1])
    before = zeros(model)

    adapted: Any = get_peft_model(model, LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear"))
    adapted.print_trainable_parameters()
    train(adapted, tokens, args.steps, args.length, 2e-3, "training the adapter")
    print(f"with the adapter       loss {loss(adapted, tokens, args.length):.3f}")
    print(f"zeros before and after: {before}, {zeros(adapted)}")
    try:
        adapted.merge_and_unload()
    except RuntimeError as error:
        print(f"Merging is refused: {error}.")


if __name__ == "__main__":
    main()
