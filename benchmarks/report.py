"""Tables of README.md and docs, from the lines under benchmarks/results; and the plots: `make report`.

A place in a document is a pair of comments, `<!-- report: NAME -->` and `<!-- end -->`; what is between is replaced.
PARTS says what each NAME is: where its lines come from, and a Table of them, which is its head and a row. A new table
is an entry there:

    "spmm tokens": (
        lambda: wide(products("float16"), "{tokens}", "{kernel} {density:.0%}"),     # a row for each number of tokens
        Table("tokens | tile | tile, density 0.3 | us of tile",
              "{tokens} | {tile 50% mean} | {tile 30% mean} | {tile 50% median_us:.2f}"),
    ),

Speed-up is over the faster of F.linear and torch.mv. benchmarks/records.py has the lines and what `wide` makes of them.
"""

from __future__ import annotations

import re
import statistics
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import EIGHT, records
from benchmarks.records import CPU, H100, H200, ROOT, Line, Lines, geomean, ranked, read, show, wide

#: In the place of a table without lines.
NO_LINES = "Not measured yet: nobody has run the command on a GPU."


class Over(dict[str, Any]):
    """What a function makes of each field over lines."""

    def __init__(self, lines: Lines, function: Callable[[list[Any]], Any]) -> None:
        self.lines, self.function = lines, function

    def __missing__(self, field: str) -> Any:
        return self.function([line[field] for line in self.lines if field in line])


@dataclass(frozen=True)
class Table:
    """Titles of columns, and templates of a row's cells, with | between them; a line is a row.

    A column whose template has an @ is there for each of the lines' names (`wide`); "(s)" in its title is the plural's.
    A cell without its fields is `none`; a column of such cells is left out, as is a row without the field `needs`.
    foot: functions of a field over all rows, and the rows of what they make.
    """

    head: str
    row: str
    none: str = "-"
    needs: str = ""
    foot: Sequence[tuple[Callable[[list[Any]], Any], str]] = ()

    def __call__(self, lines: Lines) -> str:
        lines = [line for line in lines if not self.needs or self.needs in line]
        names = [*dict.fromkeys(name for line in lines for name in line.get("@", ()))]
        names = sorted(names, key=int) if all(map(str.isdigit, names)) else names

        def columns(text: str) -> list[str]:
            found = []
            for part, cell in zip(text.split("|"), self.row.split("|"), strict=True):
                of = [part.replace("@", x).replace("(s)", "s" * (x != "1")) for x in names] if "@" in cell else [part]
                found += [each.strip() for each in of]
            return found

        rows = [[show(cell, line, self.none) for cell in columns(self.row)] for line in lines]
        rows += [[show(cell, Over(lines, function)) for cell in columns(row)] for function, row in self.foot]
        keep = [any(cell not in ("", self.none) for cell in column) for column in zip(*rows, strict=True)]
        head = columns(self.head)
        table = [[x for x, kept in zip(row, keep, strict=True) if kept] for row in (head, ["---"] * len(head), *rows)]
        return "\n".join("| " + " | ".join(cells) + " |" for cells in table)


def commits_of(lines: Iterable[Line]) -> str:
    return " and ".join(dict.fromkeys(line["commit"] for line in lines))


def paragraph(text: str) -> Callable[[Lines], str]:
    """The template with the fields of the last line, and the commits of all."""
    return lambda lines: textwrap.fill(show(text, {**lines[-1], "commits": commits_of(lines)}), 110)


#: What the lines were measured on.
WHERE = paragraph("{gpu}, driver {driver}, torch {torch}, commit {commits}, memory clock {memory_mhz} MHz, "
                  "SM clock up to {max_sm_mhz} MHz.")  # fmt: skip


LOAD = ("tile", "sparse11", "dense12")
LOAD_CLOCKS = Table(
    " | ".join(("tokens", *LOAD, f"MHz: dense, pruned, {', '.join(LOAD)}")),
    "{tokens}" + "".join(f" | {{{name} mean}}, {{{name} cycles:.2f}}x" for name in LOAD)
    + " | " + ", ".join(f"{{{name} mhz:.0f}}" for name in ("dense", "zeros", *LOAD)),
)  # fmt: skip


#: Tokens of an H200's two tables under load.
HUNDREDS, THOUSANDS = {256, 384, 512}, {1024 << i for i in range(5)}


def last_h200(lines: Callable[..., Lines], **only: Any) -> Callable[[], Lines]:
    """What was measured last under load, so that no table is of two commits."""
    return lambda: lines(folder=H200, commit=records.load_commit(H200), **only)


def load_spread(lines: Lines) -> str:
    """By how much the turns of one product differ."""
    off = sorted(max(us) / min(us) - 1 for us in (line["all_us"] for line in lines))
    say = paragraph(
        "Two turns of a product differ by {median:.1%} in the median, and by more than {most:.0%} in one of twenty."
    )
    return say([*lines, {**lines[-1], "median": statistics.median(off), "most": off[len(off) * 19 // 20]}])


def engines_where(lines: Lines) -> str:
    by: dict[str, Lines] = {}
    for line in lines:
        by.setdefault(line["engine_args"].get("attention_backend", "vLLM's default"), []).append(line)
    attention = ", ".join(f"{name} (commit {commits_of(of)})" for name, of in reversed(by.items()))
    return paragraph(f"{{device}}, vLLM {{vllm}}, torch {{torch}}. Attention: {attention}.")(lines)


def columns_of(first: str, names: Sequence[str], form: str) -> Table:
    """A column for each of `wide`'s names: what `form` makes of it, with % for the name."""
    cells = [form.replace("%", re.sub("[.:]", "", name)) for name in names]
    return Table(" | ".join((re.sub(r"[{}]", "", first), *names)), " | ".join((first, *cells)))


SLIDE = columns_of(
    "{tokens} {mode}", [f"{of} {pair}" for of in ("int8", "fp8") for pair in records.SLIDE_SIDES[:4]], "{% mean}"
)
SLIDE_VLLM, SLIDE_VLLM_H100, SLIDE_VLLM_LLAMA = (
    Table(
        " | ".join(("side", *served)),
        " | ".join(("{side}", *(f"{{{model} {of} gain:.2f}} ({{{model} {of} gpu_gain:.2f}})" for of in served))),
    )
    for model, served in (
        ("qwen25-7b", ("prefill 512", "prefill 2048", "prefill 8192", "prefill 32768", "decode 64", "decode 256")),
        ("qwen25-7b", ("prefill 2048", "prefill 8192", "prefill 32768", "decode 64", "decode 128", "decode 256")),
        ("llama-32-3b", ("prefill 1024", "prefill 8192", "decode 64", "decode 128", "decode 256")),
    )
)
SERVED_WHERE = paragraph("{gpu}, driver {driver}, vLLM {vllm}, torch {torch}, commit {commits}; {layers} of 28 blocks.")
SLIDE_MMA = columns_of(
    "{shape} {tokens}",
    ["mma dense", "mma 2:4", "mma 6:8", "cusparselt 2:4", "cusparselt 6:8", "_int_mm", "wgmma dense", "wgmma 2:4"],
    "{% us:.0f}",
)
SLIDE_QUALITY = columns_of(
    "{pattern}",
    [f"{unit} {values}" for unit in ("one shot", "fitted") for values in ("exact", "int8", "fp8")],
    "{% perplexity_ratio:.4f}",
)


EC_SIDES = (*records.EC_OTHERS, "paper, 4 bits", "no blocks, 4 bits", "8 lanes")
EC = Table(
    " | ".join(("shape", *EC_SIDES, *(f"best x {name}" for name in records.EC_OTHERS))),
    "{rows}x{cols}"
    + "".join(f" | {{{name} us}}" for name in EC_SIDES)
    + "".join(f" | {{{name} best:.2f}}" for name in records.EC_OTHERS),
    foot=[
        (pick, title + " |" * (len(EC_SIDES) + 1) + "{dense best:.2f} | {CSR best:.2f} | {sell best:.2f}")
        for pick, title in ((min, "least"), (max, "most"))
    ],
)


def quality_where(lines: Lines) -> str:
    line = lines[0]
    about = {"weights": line["weights"] / 1e6, "trained_tokens": line["trained_tokens"] / 1e6}
    return paragraph(
        "A Llama of {weights:.1f} million weights after {trained_tokens:.0f} million tokens; perplexity "
        "{perplexity:.2f} on {tokens} held-out tokens of {characters_a_token:.1f} characters, in windows of {length}; "
        "calibrated on {calibration_tokens} tokens; fitted at a rate of {lr}. "
        "{device}, torch {torch}, commit {commits}."
    )([*lines, {**line, **about}])


#: So much of the other's loss at most, as a test has it. (model, zeros, other model, its zeros, most)
BARS = [
    (records.BLOCK, "50%", "sparsegpt", "50%", 0.5),
    (records.BLOCK, "50%", "wanda", "50%", 0.4),
    (records.BLOCK, "70%", "sparsegpt", "70%", 0.5),
    (records.BLOCK, "2:4", "sparsegpt", "2:4", 0.5),
    ("sparsegpt, auto, fitted", "50%", "sparsegpt", "50%", 0.5),
    ("sparsegpt, auto, fitted", "50%", "wanda", "50%", 0.4),
    ("sparsegpt, fitted", "50%", "sparsegpt", "50%", 0.5),
    ("sparsegpt, fitted", "50%", "wanda", "50%", 0.4),
    ("sparsegpt, fitted", "70%", "sparsegpt", "70%", 0.5),
    ("sparsegpt, fitted", "2:4", "sparsegpt", "2:4", 0.5),
    (f"{records.BLOCK}, int8", "50%", records.BLOCK, "50%", 1.02),
    (f"{records.BLOCK}, int4", "50%", "int3", "", 1.0),
    (f"{records.BLOCK}, int4", "50%", "GPTQ int3", "", 1.0),
    ("sparsegpt, fitted, int8", "50%", "sparsegpt, fitted", "50%", 1.02),
    ("sparsegpt, auto, fitted, int4", "50%", "GPTQ int3", "", 1.0),
    ("sparsegpt, auto", "50%", "sparsegpt", "50%", 1.0),
    ("sparsegpt, auto", "70%", "sparsegpt", "70%", 1.0),
    ("sparsegpt, auto, fitted", "50%", "sparsegpt, fitted", "50%", 1.0),
    ("sparsegpt, auto, fitted by block", "50%", records.BLOCK, "50%", 1.0),
    ("sparsegpt, auto, fitted by block", "70%", records.BLOCK, "70%", 1.0),
]


def quality_bars(lines: Lines) -> Lines:
    """Each bar: the measured share by seed, and whether all of them meet it."""
    found = {(line["name"], records.zeros_of(line), line["seed"]): line for line in lines}
    seeds = sorted({line["seed"] for line in lines})
    rows = []
    for name, zeros, other, other_zeros, most in BARS:
        pairs = [(found.get((name, zeros, s)), found.get((other, other_zeros, s))) for s in seeds]
        shares = [records.lost(one) / records.lost(of) for one, of in pairs if one and of]
        bar = {"of": f"{name}, {zeros}", "over": f"{other}, {other_zeros}".rstrip(", "), "most": most}
        bar["holds"] = "yes" if shares and max(shares) <= most else "no" if shares else "not measured"
        rows.append({**bar, "measured": ", ".join(f"{share:.3f}" for share in shares)})
    return rows


def quality_methods(lines: Lines) -> str:
    """Perplexity over dense's: a row a mask, a column a way to fit what is left."""
    lines = [{**line} for line in lines if not line["seed"]]
    for line in lines:
        line["chosen"], fit = re.fullmatch(r"(.*?)(, fitted(?: by block)?)?", line["name"]).groups()  # type: ignore[union-attr]
        line |= {"fit": (fit or ", as pruned")[2:], "zeros": records.zeros_of(line)}
    methods = ("magnitude", "wanda", "sparsegpt", "sparsegpt, auto")
    rows = wide(ranked(lines, zeros=("30%", "50%", "70%", "2:4"), chosen=methods), "{zeros} {chosen}", "{fit}")
    row = "{zeros} | {chosen} | {as pruned perplexity_ratio:.4f} | {fitted perplexity_ratio:.4f} | " \
        "{fitted by block perplexity_ratio:.4f}"  # fmt: skip
    return Table("zeros | chosen by | as pruned | fitted | fitted by block", row)(rows)


QUALITY_ALL = Table(
    "model | bytes a weight | perplexity over dense's | KL, nats | same likeliest token",
    "{title} | {bytes:.2f} | {perplexity_ratio:.4f} | {kl:.4f} | {agreement:.1%}",
)
#: What of a mask is told beside the rounding one would take instead, and of an encoder.
TOLD = {"dense", "sparsegpt, auto, fitted", records.BLOCK, f"{records.BLOCK}, int4", "sparsegpt", "wanda"}


def told(lines: Lines, *by: str) -> Lines:
    """Of the first seed: what was rounded and not pruned, and of masks what is TOLD."""
    lines = [line for line in records.first_seed(lines) if line["name"] in TOLD or not records.zeros_of(line)]
    return ranked(lines, "-bytes", *by)


#: What README says besides its table.
CLAIMS = """\
- That Llama in bfloat16, one sequence: **{speed:.0f} tokens a second**, dense {dense_speed:.0f} (with
  `max-autotune` [{at_most:.2f}x](docs/performance.md#models-end-to-end)).
- One float16 matrix, half zero, packed with `tokens=1`, on an H200: **{paper:.2f}x** torch, geometric mean over the
  MACKO paper's {shapes} shapes (least {least:.2f}x); that paper's bound: 1.6x.
- A dense bfloat16 Llama, one sequence, on an H200: **{lossless:.2f}x**, [bit for bit](docs/lossless.md).
- In vLLM on an H200, bfloat16, half zero: faster than fp8 up to **{sequences} sequences** ([figures](docs/vllm.md)).
- One 8192 x 8192 product, half zero, on a Zen 5 core with AVX-512: **{cpu:.2f}x** torch ([figures](docs/cpu.md))."""


BENCH_SUMMARY = Table(
    "what | model | dense, ms | sparse, ms | dense, peak GB | sparse, peak GB",
    "{title} | {stored} | {dense_ms:.2f} | {ms:.2f} ({gain:.2f}x) | {dense_peak_gb:.1f} | {peak_gb:.1f}",
)
BRIEFLY = paragraph("{device}, torch {torch}, commit {commits}.")
SPARSITY = Table(
    "weights | peak GB | tokens a second | ms a token | GPU busy, ms",
    "{title} | {peak_gb:.1f} | {speed:.0f}[ (dense {then:.0f})] | {ms:.2f} ({gain:.2f}x) "
    "| {busy_ms:.2f} ({busy_gain:.2f}x)",
)
SPARSE11 = Table(
    "tokens | sparse11 | tile | sparse11, launched alone | tile, launched alone | sparse11, density 0.7 "
    "| tile, density 0.7 | shapes",
    "{tokens} | {sparse11 50% mean} | {tile 50% mean} | {sparse11_alone 50% mean} | {tile_alone 50% mean} "
    "| {sparse11 70% mean} | {tile 70% mean} | {sparse11 50% n}",
    needs="sparse11 50% n",
)
#: Runs of an engine that are told, on one GPU and on two.
ENGINES, ENGINES_TWO, ENGINES_EXPERTS, ENGINES_CP_ASYNC, ENGINES_PROMPTS = (
    Table(
        " | ".join((f"ms | {gb}", *runs)),
        " | ".join((f"{name} | {{peak_gb:.2f}}", *(f"{{{run} ms:.2f}}[ ({{{run} faster:.2f}}x)]" for run in runs))),
    )
    for name, gb, runs in (
        ("{side}", "GB", ("1 seq", "8 seq", "16 seq", "32 seq", "64 seq", "prompt of 2048")),
        ("{side}", "GB a GPU", ("1 seq", "8 seq", "32 seq", "prompt of 128")),
        ("{title}", "GB a GPU", ("1 seq", "8 seq", "16 seq", "32 seq", "64 seq", "prompt of 2048")),
        ("{side}", "GB", ("1 seq", "8 seq", "16 seq")),
        ("{side}", "GB", tuple(f"prompt of {tokens}" for tokens in (2048, 4096, 8192, 16384))),
    )
)
#: Of those in float16 these; in bfloat16 all.
ENGINE_ROWS = {"dense", "macko", "macko, float16 that was bfloat16", "int4, groups of 128"}
LOADING = Table(
    "model | GPUs | side | weights, s | over dense | weights, GB a GPU",
    "{of} | {ranks} | {model}, from a {from} folder | {weights_s:.2f} | {share:.2f}x | {peak_gb:.2f}",
)
TRANSFORMERS = Table(
    " | GB a GPU | loading, s" + "".join(f" | {n} seq., ms" for n in (1, 8, 32)),
    "{folder}, {gpus} | {0 held_gb:.2f} | {0 s:.2f}"
    + "".join(f" | {{{n} step_ms:.2f}}[ ({{{n} faster:.2f}}x)]" for n in (1, 8, 32)),
    needs="1 step_ms",
)
LOADED = {f"{what} {model}" for what in ("save", "load") for model in ("dense", "sparse", "dense and convert")}
LEFT_RIVALS = {"tile", "tile_alone", "sparse8_fp8_alone", "fp8_rows", "fp8_rows_quant"}
USUAL = {"mask": "uniform", "dtype": "float16"}
#: By NAME: where the lines come from, and what is made of them; NO_LINES where there are none.
PARTS: dict[str, tuple[Callable[..., Lines], Callable[[Lines], str]]] = {
    "spmv where": (records.spmv, WHERE),
    "spmv eight": (
        lambda: wide(ranked(records.spmv(density=0.5, **USUAL), matrix=EIGHT), "{rows} x {cols}", "{kernel}"),
        Table(
            "rows x cols | dense us | sell us | of floor | chained us | of floor",
            "{rows} x {cols} | {sell dense_median_us:.2f} | {sell median_us:.2f} ({sell gain:.2f}x) | {sell share:.2f} "
            "| {sell_chain median_us:.2f} ({sell_chain gain:.2f}x) | {sell_chain share:.2f}",
            foot=[(geomean, "geometric mean | | **{sell gain:.2f}x** | {sell share:.2f} | **{sell_chain gain:.2f}x** "
                            "| {sell_chain share:.2f}")],
        ),
    ),
    "spmm tokens": (
        lambda: [
            x for x in records.tokens_of(records.eight_shapes())
            if x.get("tile 50% n") in (4, 8) and x["tokens"] not in (2, 192, 320, 768, 2048)
        ],
        Table(
            "tokens | tile | tile, launched alone | sell | dense, of the pruned matrix | shapes",
            "{tokens} | {tile 50% mean} | {tile_alone 50% mean} | {sell 50% mean} | {zeros 50% mean} | {tile 50% n}",
        ),
    ),
    "sparse11 products": (lambda: records.tokens_of(records.products("bfloat16", mask="magnitude")), SPARSE11),
    "h100 where": (lambda: read(H100 / "spmm.jsonl"), WHERE),
    "h100 products": (
        lambda: records.tokens_of(records.products("bfloat16", H100 / "spmm.jsonl", mask="magnitude")),
        SPARSE11,
    ),
    "h100 pace": (records.pace, Table("us | @", "{way}, {pace} | {@ median_us:.1f}")),
    "planes core": (
        lambda: wide(read(CPU / "planes.jsonl", "cpu_path", "step"), "{step}", "{cpu_path}"),
        Table(
            "step | GB/s | 7B, s | GB/s without vectors | 7B, s",
            "{step} | {avx2 gbps:.1f} | {avx2 s_7b:.1f} | {scalar gbps:.1f} | {scalar s_7b:.1f}",
        ),
    ),
    "planes load": (
        records.planes_load,
        Table("blocks of a 7B | bfloat16, GB | packed, GB | bfloat16, s | packed, s",
              "{blocks} | {load dense gb:.1f} | {load packed gb:.1f} | {load dense s:.2f} | {load packed s:.2f}"),
    ),
    "planes convert": (
        lambda: [line for line in read(CPU / "convert.jsonl", "step", "blocks") if line.get("blocks", 32) == 32],
        Table("step | user, s | system, s", "{step} | {user_s:.1f} | {system_s:.1f}"),
    ),
    "sparse11 listed": (
        records.listed,
        Table(
            "listed | sparse11, 1 token | tile, 1 token | sparse11, 8 tokens | tile, 8 tokens",
            "{listed} | {sparse11 1 gain:.2f}x | {tile 1 gain:.2f}x | {sparse11 8 gain:.2f}x | {tile 8 gain:.2f}x",
        ),
    ),
    "eight products": (
        lambda: wide(records.products({"float16", "bfloat16"}, density=0.5), "{tokens}", "{kernel} {dtype}"),
        Table(
            "tokens | dense8 fp8, float16 | dense8 fp8, bfloat16 | dense8 int8, float16 | dense8 int8, bfloat16 "
            "| sparse8 fp8, float16 | sparse8 fp8, bfloat16 | sparse8 int8, float16 | sparse8 int8, bfloat16",
            "{tokens} | {dense8_fp8 float16 mean} | {dense8_fp8 bfloat16 mean} | {dense8_int8 float16 mean} "
            "| {dense8_int8 bfloat16 mean} | {sparse8_fp8 float16 mean} | {sparse8_fp8 bfloat16 mean} "
            "| {sparse8_int8 float16 mean} | {sparse8_int8 bfloat16 mean}",
            needs="dense8_fp8 float16 n",
        ),
    ),
    "lossless products": (
        lambda: records.tokens_of(records.products("bfloat16", density=1.0)),
        Table("tokens | dense12 | dense12, launched alone | shapes",
              "{tokens} | {dense12 100% mean} | {dense12_alone 100% mean} | {dense12 100% n}", needs="dense12 100% n"),
    ),
    "rivals": (
        lambda *path: [row for row in records.rivals(*path) if path or row["kernel"] not in LEFT_RIVALS],
        Table(" | bytes a weight | result is off by | @ token(s)", "{label} | {size:.2f} | {off:.1%} | {@ mean}"),
    ),
    "rings where": (lambda: read(H100 / "rings.jsonl"), WHERE),
    "rings": (
        records.rings,
        Table("tokens | dense12 | dense8, fp8 | tile | sparse11",
              "{tokens} | {dense12_rings bfloat16 mean} | {dense8_fp8_rings bfloat16 mean} | "
              "{tile_rings bfloat16 mean} | {sparse11_rings bfloat16 mean}"),
    ),
    "experts where": (lambda: read(H100 / "experts.jsonl"), WHERE),
    "experts": (
        records.experts,
        Table("model | rows x cols | 1 sequence | 8 | 32 | 64 | 128 | 2048 (a prompt)",
              "{model} | {shape} | {dense12 1 gain:.2f}x | {dense12 8 gain:.2f}x | {dense12 32 gain:.2f}x | "
              "{dense12 64 gain:.2f}x | {dense12 128 gain:.2f}x | {dense12 2048 gain:.2f}x"),
    ),
    "diffusion where": (lambda: read(H100 / "diffusion.jsonl"), WHERE),
    "diffusion sizes": (
        lambda: records.diffusion("sizes"),
        Table("transformer | layers packed | bfloat16, GB | packed, GB | pinned, bfloat16, GB | pinned, packed, GB",
              "{model} | {layers} | {dense:.1f} | {packed:.1f} | {pinned_dense:.1f} | {pinned_packed:.1f}"),
    ),
    "diffusion step": (
        lambda: records.diffusion("step"),
        Table("transformer | layers packed | bfloat16, GB | packed, GB | ms a step, bfloat16 | packed",
              "{model} | {packed_layers} | {dense_bytes:.1f} | {bytes:.1f} | {dense_s_ms:.0f} | {s_ms:.0f}"),
    ),
    "diffusion offload": (
        lambda: records.diffusion("offload"),
        Table("way | ms a step, bfloat16 | packed | weights on the GPU at most, bfloat16, GB | packed, GB",
              "{way} | {dense s_ms:.0f} | {packed s_ms:.0f} | {dense weights_peak_bytes:.2f} | "
              "{packed weights_peak_bytes:.2f}"),
    ),
    "experts generate": (
        records.experts_generate,
        Table(
            "ms | dense | dense12 | not compiled: dense | dense12 | peak, GB: dense | dense12",
            "{title} | {dense default ms:.2f} | {dense12 default ms:.2f} ({dense12 default gain:.2f}x) "
            "| {dense no ms:.2f} | {dense12 no ms:.2f} ({dense12 no gain:.2f}x) "
            "| {dense default peak_gb:.1f} | {dense12 default peak_gb:.1f}",
        ),
    ),
    "one gpu where": (lambda: read(H100 / "one_gpu.jsonl"), WHERE),
    "one gpu": (
        records.one_gpu,
        Table("sequences | ms a step | weights, GB | peak, GB | dense weights, GB",
              "{batch} | {ms:.1f} | {gb:.1f} | {peak_gb:.1f} | {dense_gb:.1f}"),
    ),
    "load where": (records.load, WHERE),
    "load": (records.load_clocks, LOAD_CLOCKS),
    "load h200 where": (last_h200(records.load), WHERE),
    "load h200": (last_h200(records.load_clocks, tokens=THOUSANDS), LOAD_CLOCKS),
    "load h200 hundreds": (last_h200(records.load_clocks, tokens=HUNDREDS), LOAD_CLOCKS),
    "load spread": (last_h200(records.load, tokens=THOUSANDS), load_spread),
    "load rows": (
        lambda: records.load_tokens("load_rows"),
        columns_of("{tokens}", [f"{name}{rows}" for name in LOAD for rows in ("", "_rows")], "{% mean}"),
    ),
    "load shapes": (
        records.load_shapes,
        Table(
            "rows x cols" + "".join(f" | {n}: dense / pruned, us | tile | sparse11 | dense12" for n in (4096, 8192)),
            "{rows} x {cols}" + "".join(f" | [{{dense {n} median_us:.0f}}][ / {{zeros {n} median_us:.0f}}] "
            f"| {{tile {n} gain:.2f}}x | {{sparse11 {n} gain:.2f}}x | {{dense12 {n} gain:.2f}}x" for n in (4096, 8192)),
        ),
    ),
    "load l2": (
        records.l2,
        Table(
            " | read from memory | hits in L2 | tensor cores busy | clocks",
            "{name} | {gb:.2f} GB | {lts__t_sector_hit_rate:.0f} % | {sm__pipe_tensor_cycles_active:.0f} % "
            "| {sm__cycles_elapsed:,.0f}",
        ),
    ),
    "lossless where": (lambda: records.bench("lossless"), BRIEFLY),
    "lossless model": (
        records.lossless,
        Table("sequences | model | ms a token | over dense | peak GB",
              "{batch} | {model} | {ms:.2f} | {gain:.2f}x | {peak_gb:.1f}"),
    ),
    "wheel": (
        records.wheels,
        lambda lines: "\n".join(paragraph("A wheel of {kernels}: {mb:.1f} MB, installed {installed_mb:.1f} MB "
                                          "(commit {commit}).")([line]) for line in lines),
    ),
    "models": (
        lambda: read(H200 / "models.jsonl", "step", step=LOADED),
        lambda lines: WHERE(lines) + "\n\n" + Table(
            "step | seconds | peak GPU memory, GB | written, GB",
            "{step} | {seconds:.2f} | {peak_gb:.2f} | {gb:.2f}")(lines),
    ),
    "sanitizers": (
        records.sanitized,
        Table(
            "tool | GPU | commit | problems | products | wrong | errors | known reports",
            "{tool} | {device} | {commit} | {problems} of {all} | {products:,} | {wrong} | {errors} | {known:,}",
        ),
    ),
    "headline": (
        records.headline,
        Table("speed over dense | bfloat16 | float16", "{title} | {bfloat16 bold} | {float16 bold}",
              foot=[(lambda values: values[0], "memory, dense {bfloat16 dense_peak_gb:.1f} GB "
                     "| **{bfloat16 peak_gb:.1f} GB** | **{float16 peak_gb:.1f} GB**")]),
    ),
    "claims": (records.claims, lambda lines: CLAIMS.format_map(lines[0])),
    "bench summary": (
        lambda: [
            x for x in records.bench_pairs() if x["what"] == "decode" or (x["size"] == 2048 and not x.get("values"))
        ],
        BENCH_SUMMARY,
    ),
    "sparsity where": (records.sparsity, BRIEFLY),
    "sparsity": (records.sparsity, SPARSITY),
    "sparsity h100 where": (lambda: records.sparsity(H100), BRIEFLY),
    "sparsity h100": (lambda: records.sparsity(H100), SPARSITY),
    "bench max": (
        lambda: records.bench_pairs("max", what="decode"),
        Table("1 token at a time | dense, ms | sparse, ms", "{stored} | {dense_ms:.2f} | {ms:.2f} ({gain:.2f}x)"),
    ),
    "bench where": (lambda: records.bench(compile="default"), BRIEFLY),
    "bench logits": (
        records.logits,
        Table("model | largest difference of logits | largest logit | layers, of their bound",
              "{sparsity:.0%} sparse, {stored} | {error:.2g} | {largest:.2g} | {bounds}"),
    ),
    "engines where": (lambda: records.vllm(H200), engines_where),
    "engines": (
        lambda: [
            row for row in records.engines_wide(H200, compiled=True)
            if row["side"] in ENGINE_ROWS or row["dtype"] != "float16"
        ],
        ENGINES,
    ),
    "engines not compiled": (lambda: records.engines_wide(H200), ENGINES),
    "engines two where": (lambda: records.vllm(H100, mixture=""), engines_where),
    "engines two": (lambda: records.engines_wide(H100, ranks=2), ENGINES_TWO),
    "engines two 70b": (lambda: records.engines_wide(H100, ranks=2, hidden=8192), ENGINES_TWO),
    "engines experts": (records.engines_experts, lambda lines: engines_where(lines) + "\n\n" + ENGINES_EXPERTS(lines)),
    "bench cp_async": (
        records.bench_cp_async,
        Table("ms a token | 1 sequence | 8 sequences",
              "{model} | {1 ms:.2f} ({1 gain:.2f}x) | {8 ms:.2f} ({8 gain:.2f}x)"),
    ),
    "engines cp_async": (lambda: records.engines_wide(H100, "vllm_cp_async"), ENGINES_CP_ASYNC),
    "engines prompts": (
        lambda: records.engines_wide(H200, "vllm_prompts", hidden=8192, dtype="bfloat16"),
        ENGINES_PROMPTS,
    ),
    "engines prompts 7b": (lambda: records.engines_wide(H200, "vllm_prompts"), ENGINES_PROMPTS),
    "engines loading": (lambda: records.loading(H200, ranks=1) + records.loading(H100, hidden=4096), LOADING),
    "engines transformers": (records.transformers, TRANSFORMERS),
    "engines continuous": (
        lambda: [line for line in records.continuous() if line["graphs"]],
        Table("tokens/s | @ request(s)", "{way} | {@ tokens_per_s:.0f}[ ({@ faster:.2f}x)]"),
    ),
    "engines shards": (
        lambda: [line for line in records.shards() if line["kernel"] == "tile"][::2],
        Table("rows x cols | of dense bytes" + "".join(f" | {n}" for n in ("1 token", 8, 32, 64)),
              "{rows} x {cols} | {1 share:.2f}" + "".join(f" | {{{n} gain:.2f}}x" for n in (1, 8, 32, 64))),
    ),
    "slide where": (records.slide, WHERE),
    "slide linears": (records.slide_gains, SLIDE),
    "slide vllm": (
        lambda: records.slide_vllm(H200, "qwen2.5-7b"),
        lambda lines: SERVED_WHERE(lines) + "\n\n" + SLIDE_VLLM(lines),
    ),
    "slide vllm h100": (
        lambda: records.slide_vllm(H100, "qwen2.5-7b"),
        lambda lines: SERVED_WHERE(lines) + "\n\n" + SLIDE_VLLM_H100(lines),
    ),
    "slide vllm llama": (
        lambda: records.slide_vllm(H100, "llama-3.2-3b"),
        lambda lines: SERVED_WHERE(lines) + "\n\n" + SLIDE_VLLM_LLAMA(lines),
    ),
    "slide mma": (records.slide_mma, SLIDE_MMA),
    "slide mma where": (
        records.slide_mma,
        paragraph("{gpu}, driver {driver}, torch {torch}, cuSPARSELt {cusparselt}, commit {commits}."),
    ),
    "slide quality": (records.slide_quality, SLIDE_QUALITY),
    "canonical where": (lambda: records.canonical(True) + records.canonical(False), WHERE),
    "canonical": (
        lambda: wide(records.canonical(True), "{rows}x{cols}", "{dtype}"),
        Table(
            "shape | dense fp16, us | macko fp16, us | bf16, us | TB/s fp16",
            "{rows}x{cols} | {float16 dense_us:.1f} | {float16 spmv_us:.1f} ({float16 speedup:.2f}x) "
            "| [{bfloat16 spmv_us:.1f} ({bfloat16 speedup:.2f}x)] | {float16 tbps:.1f}",
        ),
    ),
    "canonical others": (
        lambda: [
            x for x in records.canonical(False)
            if (x["dtype"], x["rows"]) == ("float16", 8192) and (x["delta_bits"] == 4 or x["density"] != 0.5)
        ],
        Table("8192x8192, density | delta bits | rows | dense, us | macko, us",
              "{density:g} | {delta_bits} | {even} | {dense_us:.1f} | {spmv_us:.1f} ({speedup:.2f}x)"),
    ),
    "ec where": (records.ec, WHERE),
    "ec": (lambda: wide([x for x in records.ec() if x["density"] == 0.3], "{rows}x{cols}", "{variant}"), EC),
    "ec model": (records.ec_model, lambda lines: WHERE(lines) + "\n\n" + EC(lines)),
    "ec padding": (
        records.ec_padding,
        Table("mask" + "".join(f" | {bits} bits, {zeros} %" for bits in (4, 8) for zeros in (70, 80, 90)),
              "{title}" + "".join(f" | {{EC paper, {bits} bits {share} padding:.1%}}".replace(" 0.", " 0")
                                  for bits in (4, 8) for share in (0.3, 0.2, 0.1))),
    ),
    "ec cpu": (
        lambda: [line for line in records.ec_cpu() if line["density"] in (0.5, 0.1)],
        Table(
            "dtype | density | dense | canonical, avx512 | ec, 8 lanes, avx512 | ec, 8 lanes, avx2",
            "{dtype} | {density:g} | {macko avx512 torch_ms:.2f}" + "".join(
                f" | {{{name} ms:.2f}} ({{{name} gain:.2f}}x)" for name in ("macko avx512", "ec avx512", "ec avx2")),
        ),
    ),
    "formats": (
        lambda: [line for line in records.formats_wide() if line["rows"] == 4096],
        Table(
            "mask, 4096x4096 | density | floor | bitmap | macko | sell | tile | EC paper, 4 bits | EC smallest "
            "| CSR-32",
            "{mask} | {density:g} | " + " | ".join(
                f"{{{name} bytes_a_nonzero:.2f}}{bits}" for name, bits in {
                    "floor": "", "bitmap": "", "macko": " ({macko delta_bits})", "sell": " ({sell gap_bits})",
                    **dict.fromkeys(("tile", "EC paper, 4 bits", "EC smallest", "CSR-32"), "")}.items()),
        ),
    ),
    "cpu where": (records.cpu_ran, paragraph("{cpu}, torch {torch}, commit {commits}.")),
    "cpu": (
        lambda: [x for x in records.cpu_wide(records.one_core(8192)) if "b" in x["dtype"] or x["density"] == 0.5],
        Table(
            "8192x8192 | density (sparse) | torch | canonical avx512 | canonical avx2 | bitmap avx512 | bitmap avx2",
            "{dtype} | {density} ({zeros:.0%}) | {macko avx512 torch_ms:.2f}" + "".join(
                f" | {{{name} ms:.2f}} ({{{name} gain:.2f}}x)"
                for name in ("macko avx512", "macko avx2", "bitmap avx512", "bitmap avx2")),
        ),
    ),
    "cpu times": (
        records.cpu_gains,
        Table("path | dtype | @ token(s) | shapes", "{path} | {dtype} | {@ mean} | {1 n}"),
    ),
    "quality where": (records.quality, quality_where),
    "quality 7b": (
        records.whole_models,
        Table("method | calibration tokens | seconds for two blocks | minutes for all 32 | peak GPU memory, GB",
              "{method} | {tokens} | {seconds:.1f} | {minutes:.1f} | {peak_gb:.1f}"),
    ),
    "quality encoder": (
        lambda: [
            line for line in told(records.quality(CPU / "quality.jsonl", "embeddings"), "-cosine")
            if line["name"] != "wanda" and line["sparsity"] != 0.3
        ],
        Table("model | bytes a weight | cosine to dense | rank correlation",
              "{title} | {bytes:.2f} | {cosine:.4f} | {rank_correlation:.4f}"),
    ),
    "quality shares": (
        lambda: [
            bar for bar in quality_bars(records.quality())
            if bar["measured"] and re.fullmatch(r"sparsegpt, \S+", bar["over"])
        ],
        Table("loss of | of sparsegpt's", "{of} | {measured}"),
    ),
    "quality methods": (records.quality, quality_methods),
    "quality all": (
        lambda: [x for x in told(records.quality(), "perplexity_ratio") if x["name"] not in ("sparsegpt", "wanda")],
        QUALITY_ALL,
    ),
}  # fmt: skip


def part(name: str, *given: Any) -> str:
    """What stands for a name in the documents; `given` is for the function that gives its lines."""
    source, make = PARTS[name]
    lines = source(*given)
    return make(lines) if lines else NO_LINES


def fill(document: Path) -> None:
    """Replaces what is between the comments of each part that the document has."""
    text = document.read_text()
    names = re.findall(r"^<!-- report: (.+?) -->$", text, re.MULTILINE)
    if unknown := {*names} - {*PARTS}:
        raise ValueError(f"{document} asks for {sorted(unknown)}, which no report makes")
    if torn := [
        line
        for line in text.splitlines()
        if re.search(r"report: .*-->|<!-- report:|<!--$", line) and not line.startswith("<!-- report: ")
    ]:
        raise ValueError(f"{document}: a comment that names a part must be alone on its line, not {torn[0]!r}")
    for name in names:
        begin, there, rest = text.partition(f"<!-- report: {name} -->\n")
        text = begin + there + part(name) + "\n<!-- end -->" + rest.partition("<!-- end -->")[2]
    document.write_text(text)


def main() -> None:
    from benchmarks.plots import draw

    draw()
    for document in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        fill(document)


if __name__ == "__main__":
    main()
