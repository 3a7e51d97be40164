"""What README and docs show runs: every snippet of Python, and every line of the command parses."""

import argparse
import copy
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import macko
from macko import cli
from tests.tiny_llama import TEXT, TinyLlama, needs_transformers, save_tokenizer

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def snippets(page: Path) -> list[tuple[int, str, str]]:
    """The Python of a page: its line, itself, and what the comment before its fence says that it needs."""
    text = page.read_text()
    found = re.finditer(r"^(?:<!-- needs: ([^\n]+) -->\n)?```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, match.start(2)), match[2], match[1] or "") for match in found]


def runs() -> list:
    """Pages with Python, and those again that have some for a GPU."""
    kinds = {page: {needs for _, _, needs in snippets(page)} for page in PAGES}
    slow = {"README.md": [pytest.mark.slow], "quality.md": [pytest.mark.slow]}  # layers of a real size; it trains
    found = [pytest.param(p, False, id=p.name, marks=slow.get(p.name, [])) for p in PAGES if kinds[p]]
    return found + [
        pytest.param(p, True, id=f"{p.name}-gpu", marks=[pytest.mark.gpu, pytest.mark.sm80])
        for p in PAGES
        if "gpu" in kinds[p]
    ]


def save_checkpoint(model: Any, folder: str) -> None:
    """A model of letters with its tokenizer."""
    model.save_pretrained(folder)
    save_tokenizer(folder)


def given(pruned: Any, batches: list[torch.Tensor]) -> dict[str, Any]:
    """What the pages of docs take for granted: a pruned model, its batches, a way to make it, and the packages."""
    model = copy.deepcopy(pruned)
    make: Callable[[], Any] = lambda: copy.deepcopy(pruned)  # noqa: E731
    return {"torch": torch, "macko": macko, "model": model, "make_model": make, "batches": batches}


@needs_transformers
@pytest.mark.parametrize(("page", "on_gpu"), runs())
def test_snippets_run(
    page: Path, on_gpu: bool, tiny_llama: TinyLlama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if not on_gpu:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    save_checkpoint(tiny_llama.model, "path/to/a/model")
    pruned = copy.deepcopy(tiny_llama.model)
    macko.prune_(pruned, 0.5)
    save_checkpoint(pruned, "pruned")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for line, code, needs in snippets(page):
        # The former: tests/test_transformers.py and test_diffusers.py.
        if needs in ("two processes", "diffusers") or (needs == "gpu" and not on_gpu):
            continue
        if page.name != "README.md":
            namespace |= given(pruned, tiny_llama.calibration)
        exec(compile("\n" * line + code, str(page), "exec"), namespace)
    if page.name == "README.md":  # its last snippet leaves a folder that the commands take
        Path("text").write_text(TEXT)
        options = ["--data", "text", "--lengths", "16", "--samples", "2"]
        assert cli.main(["eval", "sparse", *options]) == 0


def command_lines() -> list[str]:
    """Lines `    macko ...`, and cells of tables that begin with `macko ...`."""
    text = re.sub(r" \\\n +", " ", "\n".join(page.read_text() for page in PAGES))  # lines that go on
    return sorted(
        {*re.findall(r"^ {4}(macko .+)$", text, re.MULTILINE), *re.findall(r"^\| `(macko [^`]+)`", text, re.M)}
    )


class Parsed(Exception):
    """Raised where the command would begin."""


@pytest.mark.parametrize("line", command_lines())
def test_command_lines_parse(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def only_parse(self: argparse.ArgumentParser, *args: Any) -> None:
        parse(self, *args)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", only_parse)
    with pytest.raises(Parsed):
        cli.main(shlex.split(line, comments=True)[1:])


def test_the_readme_is_for_a_newcomer() -> None:
    """Few numbers before the first command, short lines, and tables that `make report` fills."""
    text = (ROOT / "README.md").read_text()
    assert len(re.findall(r"\d[\d.]*", re.sub(r"\]\(.*?\)", "", text.partition("pip install")[0]))) <= 25
    assert max(map(len, text.splitlines())) <= 120
    assert len(text.split()) <= 900
    assert "| 1 token at a time |" in text


def test_every_benchmark_says_what_it_answers() -> None:
    named = {*re.findall(r"\w+", (ROOT / "benchmarks" / "README.md").read_text())}
    assert {path.stem for path in (ROOT / "benchmarks").glob("[a-z]*.py")} <= named
