"""Small Llamas: random ones, and one trained for seconds on a text, of weights and activations of a real kind."""

import dataclasses
import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.common import torch_threads

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)

TEXT = """
A sparse matrix holds many zeros. A dense matrix holds none, or does not say where they are. To store a sparse matrix
you write down what is left, and where it stands: a value, and the number of columns that were skipped before it. A
short gap takes four bits. A long gap takes more than one entry, and such an entry stores a zero to stand on. Row
after row, the values lie next to each other, and the gaps lie next to each other, and one number a row says where the
row begins. To multiply by a vector you walk along the row. You add the gap to the column, you take the value, you
take the entry of the vector that stands at the column, you multiply, and you add. Half of the values are gone, so
half of the reading is gone, and reading is what takes the time. That is the whole of it. The rest is care: that no
lane waits for another, that no byte is read twice, that what is read is read in order, and that the sum does not
depend on who was first. A network that was pruned is a network that forgot what it did not need. Some weights are
small and go first. Some are small but stand before a large input, and they stay. Some can go because their neighbours
can do their work, when their neighbours are told how. The first way looks at the weight. The second looks at the
weight and the input. The third looks at all the inputs together, and it loses the least. Whoever prunes has to say
how much was lost, and on which text. A test that cannot fail says nothing. A bound that was typed in says little
more. A bound that follows from the way a number was made says what the number can be, and a number outside of it is
wrong, whoever made it.
"""


@dataclasses.dataclass
class TinyLlama:
    """The trained model, in evaluation mode, with text to calibrate it on and other text to judge it by."""

    model: Any
    calibration: list[Tensor]
    held: Tensor

    def loss(self, model: nn.Module) -> float:
        """Mean cross entropy of the next character."""
        was = model.training
        with torch.no_grad():
            loss = model.eval()(input_ids=self.held, labels=self.held).loss.item()
        model.train(was)
        return loss


def small_llama(dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    """Random weights: two blocks of 48 features, where the options of its config say no other."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 90, "hidden_size": 48, "intermediate_size": 104, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 128,
    }  # fmt: skip
    return LlamaForCausalLM._from_config(LlamaConfig(**{**sizes, **options}), dtype=dtype).eval()


def save_tokenizer(folder: Any) -> None:
    """Of the letters of TEXT, into a model's folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(sorted(set(TEXT)))}, unk_token=" "))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=letters, unk_token=" ", pad_token=" ").save_pretrained(folder)


def train(steps: int = 200) -> TinyLlama:
    """Two blocks of 64 features, trained on TEXT letter by letter."""
    from transformers import LlamaConfig, LlamaForCausalLM

    letters = sorted(set(TEXT))
    ids = torch.tensor([letters.index(letter) for letter in TEXT])
    length = 48
    rng = torch.Generator().manual_seed(0)

    def batch(count: int) -> Tensor:
        starts = torch.randint(len(ids) - length, (count,), generator=rng)
        return torch.stack([ids[start : start + length] for start in starts])

    with torch_threads(1), torch.random.fork_rng():  # so small that threads only wait for each other
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(letters), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(steps):
            tokens = batch(16)
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return TinyLlama(model.eval(), [batch(8) for _ in range(8)], batch(64))
