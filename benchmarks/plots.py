"""The plots of docs, from the lines under benchmarks/results: benchmarks.report draws them.

A plot has one message, its title. A side has one colour everywhere, from those that print and colour blindness leave
apart (Okabe and Ito's). A line joins points of one run only. NAME.svg is for a light page; NAME-dark.svg is the same in
the colours of DARK.
"""

from __future__ import annotations

import io
import itertools
import re
from collections import Counter
from typing import Any

import matplotlib
import matplotlib.pyplot as plt

from benchmarks import EIGHT, records
from benchmarks.records import H200, ROOT, Line, Lines, geomean, wide

IMAGES = ROOT / "docs" / "images"
#: Colours of text and axes, of grids, and of what stands for black: SVG leaves black itself out.
INK, GRID, BLACK = "#1f2328", "#b0b0b0", "#111111"
matplotlib.use("svg")
matplotlib.rcParams |= {
    "svg.hashsalt": "macko", "svg.fonttype": "none", "font.size": 9, "axes.titlesize": 11,
    "axes.titlelocation": "left", "axes.titlepad": 10, "axes.labelsize": 9, "axes.grid": True, "axes.axisbelow": True,
    "axes.spines.top": False, "axes.spines.right": False, "grid.alpha": 0.3, "grid.color": GRID,
    "lines.marker": "o", "lines.markersize": 4,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
}  # fmt: skip
#: By how a label begins; the first that fits.
COLOURS = {
    "dense12": "#c07a00",
    "dense": "#767676",
    "sparse11": "#004f8a",
    "sparse8": "#b8558c",
    "tile": "#2a94d6",
    "macko, float16": "#2a94d6",
    "macko, fp8": "#b8558c",
    "macko": "#004f8a",
    "sell, chained": "#004d38",
    "sell without": "#9ad6c2",
    "sell": "#009e73",
    "canonical": "#6a51a3",
    "bitmap": "#c07a00",
    "EC": "#b8558c",
    "cuSPARSE": "#d55e00",
    "floor": "#767676",
    "fp8 of torch, tokens": "#8c3d00",
    "fp8": "#d55e00",
    "int4": BLACK,
    "2:4 over bfloat16": "#767676",
    "2:4 over torch": "#d55e00",
    "2:4": "#004f8a",
    "4:6": "#009e73",
    "6:8": "#b8558c",
    "wanda": "#2a94d6",
    "sparsegpt, auto": "#b8558c",
    "sparsegpt, fitted": "#004f8a",
    "sparsegpt": "#009e73",
    "rounded to": "#d55e00",
    "rounded by": BLACK,
}
#: What a dark page has in place of each colour.
DARK = {
    "#ffffff": "#0d1117", INK: "#e6edf3", GRID: "#6e7681", BLACK: "#ffffff", "#767676": "#9198a1",
    "#c07a00": "#e3a008", "#004f8a": "#4493f8", "#2a94d6": "#a5d8ff", "#b8558c": "#e889bd", "#004d38": "#9ff0d2",
    "#009e73": "#2bbf90", "#9ad6c2": "#0f7a5a", "#6a51a3": "#a98bf0", "#d55e00": "#ff8533", "#8c3d00": "#ffc59b",
}  # fmt: skip


def colour(label: str) -> str:
    return next(found for name, found in COLOURS.items() if label.startswith(name))


def save(figure: Any, name: str, title: str) -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    figure.suptitle(title, x=0, ha="left", fontsize=11, fontweight="bold")
    figure.tight_layout()
    file = io.StringIO()
    # No date and fixed ids: the same lines give the same file.
    figure.savefig(file, metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)
    (IMAGES / f"{name}.svg").write_text(file.getvalue())
    # The look-ahead leaves ids alone.
    dark = re.sub(r"#[0-9a-f]{6}(?=[;\"])", lambda found: DARK[found[0]], file.getvalue())
    (IMAGES / f"{name}-dark.svg").write_text(dark)


def curve(axis: Any, label: str, lines: Lines, x: str = "tokens", y: str = "gain") -> None:
    """The geometric means of y by x; neighbours of a run are joined, the longest run's first, where no line is yet.

    A point that no line joins is left out where one passes: it is of another run, and would seem to be off that line.
    """
    means = {at: geomean(line[y] for line in lines if line[x] == at) for at in sorted({line[x] for line in lines})}
    runs: dict[Any, set[float]] = {}
    for line in lines:
        runs.setdefault((line["commit"], line.get("mode")), set()).add(line[x])
    joined: list[tuple[float, float]] = []
    for run in sorted(runs.values(), key=len, reverse=True):
        pairs = itertools.pairwise(sorted(run))
        joined += [(a, b) for a, b in pairs if all(b <= begin or end <= a for begin, end in joined)]
    for pair in joined:
        axis.plot(pair, [means[at] for at in pair], marker="", color=colour(label))
    seen = [at for at in means if not any(a < at < b for a, b in joined)]
    axis.plot(seen, [means[at] for at in seen], "o", label=label, color=colour(label))


def frame(axis: Any, x: str, y: str = "", log: str = "", named: bool = True) -> None:
    """What plots of speed-ups have besides curves: plain numbers, dense's line, and names at the ends of curves."""
    axis.axhline(1, color=COLOURS["dense"], linewidth=1.5, marker="", zorder=1)
    for scale in log:
        getattr(axis, f"set_{scale}scale")("log", base=2)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_major_formatter("{x:g}x")
    axis.set(xlabel=x, ylabel=y)
    if named:
        name_ends(axis)


def name_ends(axis: Any) -> None:
    """A curve's label right of its last point, moved up where it would cover the one below."""
    to_axes = axis.transData + axis.transAxes.inverted()
    named = [line for line in axis.get_lines() if not line.get_label().startswith("_")]
    ends = sorted((max(map(tuple, to_axes.transform(line.get_xydata())))[1], line.get_label()) for line in named)
    under = -1.0
    for height, label in ends:
        under = max(height, under + 14 / axis.get_window_extent().height)
        axis.annotate(label, (1.02, under), xycoords="axes fraction", va="center", color=colour(label))


def named_beside(axis: Any) -> None:
    """A legend right of the axes."""
    axis.legend(loc="center left", bbox_to_anchor=(1.04, 0.5), frameon=False)


def bars(axis: Any, groups: dict[str, dict[str, float]], form: str) -> None:
    """A group of bars a name, each with its value in `form` above it."""
    sides = [*dict.fromkeys(side for group in groups.values() for side in group)]
    width = 0.84 / len(sides)
    for index, side in enumerate(sides):
        of = {at + index * width: group[side] for at, group in enumerate(groups.values()) if side in group}
        drawn = axis.bar([*of], [*of.values()], width, label=side, color=colour(side), edgecolor="white")
        axis.bar_label(drawn, fmt=form, fontsize=7, padding=1)
    axis.set_xticks([at + width * (len(sides) - 1) / 2 for at in range(len(groups))], [*groups])
    axis.grid(False, axis="x")


def tokens_of(tokens: Any, what: str = "token") -> str:
    return f"{tokens} {what}{'s' * (int(tokens) != 1)}"


def plot_tokens() -> None:
    figure, axis = plt.subplots(figsize=(7, 3.4))
    lines = [line for line in records.eight_shapes() if line["density"] == 0.5]
    whole = {x["tokens"] for x in records.tokens_of(lines) if x.get("tile 50% n") in (4, 8)}
    for name in ("tile", "sell"):
        curve(axis, name, [line for line in lines if line["kernel"] == name and line["tokens"] in whole])
    frame(axis, "tokens", "speed-up over dense float16", "xy")
    save(figure, "spmm_tokens", "Half zeros: sell is for a token or two, tile for up to 64")


#: Kernels of records.RIVALS that are drawn.
DRAWN_RIVALS = {
    "sparse11": "sparse11, half zeros (exact)",
    "dense12": "dense12 (exact)",
    "sparse8_fp8": "sparse8, half zeros, fp8",
    "fp8": "fp8 of torch, tokens rounded before",
    "fp8_quant": "fp8 of torch",
    "int4": "int4 of torch",
}


def plot_rivals() -> None:
    figure, axis = plt.subplots(figsize=(8, 3.4))
    rows = {row["kernel"]: row for row in records.rivals()}
    groups = {
        tokens_of(n): {label: rows[name][f"{n} gain"] for name, label in DRAWN_RIVALS.items()}
        for n in sorted(rows["sparse11"]["@"], key=int)
    }
    bars(axis, groups, "{:.1f}")
    frame(axis, "", "speed-up over dense bfloat16", named=False)
    axis.set_xticks(axis.get_xticks(), [*groups])
    named_beside(axis)
    save(figure, "rivals", "Half zeros, not a bit lost: as fast as fp8 up to 16 tokens")


#: As what plot_bench draws records.STORED.
STORED_LABELS = ("macko, bfloat16", "macko, float16", "macko, fp8 (rounds)")
DRAWN_STORED = dict(zip(records.STORED.values(), STORED_LABELS, strict=True))


def plot_bench() -> None:
    """Tokens a second of each sequence, and memory: dense and half sparse, each as it is stored by default."""
    pairs = records.bench_pairs(what="decode")
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2))
    for axis, title, field, form, value in (
        (axes[0], "tokens a second, each sequence", "ms", "{:.0f}", lambda ms: 1000 / ms),
        (axes[1], "peak GPU memory, GB", "peak_bytes", "{:.1f}", lambda size: size / 1e9),
    ):
        groups: dict[str, dict[str, float]] = {}
        for line in pairs:
            group = groups.setdefault(tokens_of(line["size"], "sequence"), {"dense": value(line[f"dense_{field}"])})
            group[DRAWN_STORED[line["stored"]]] = value(line[field])
        bars(axis, groups, form)
        axis.set_title(title)
    named_beside(axes[1])
    save(figure, "llama", "A Llama of 7B on an H200, half of the weights zero: more tokens a second, less memory")


def plot_sparsity() -> None:
    """Speed over dense of the same run, as hosts differ, and memory, by sparsity."""
    lines = records.sparsity()
    figure, axes = plt.subplots(1, 2, figsize=(9, 2.8))
    for axis, title, field, form in (
        (axes[0], "times as fast as dense, one sequence", "gain", "{:.2f}"),
        (axes[1], "peak GPU memory, GB", "peak_gb", "{:.1f}"),
    ):
        for at, line in enumerate(lines):
            drawn = axis.bar(at, line[field], 0.8, color=colour("macko" if line["sparsity"] else line["model"]))
            axis.bar_label(drawn, fmt=form, fontsize=8, padding=1)
        names = [f"{x['sparsity']:.0%}" if x["sparsity"] else x["model"] for x in lines]
        axis.set_xticks(range(len(lines)), names, fontsize=7)
        axis.set(title=title, xlabel="weights that are zero")
        axis.grid(False, axis="x")
    least = min(line["sparsity"] for line in lines if line["sparsity"])
    title = f"A Llama of 7B on an H200, in bfloat16: faster and smaller from {least:.0%} zeros on"
    save(figure, "sparsity", title.replace("%", " %"))


#: What to call each kernel, in the order of plots.
LABELS = {
    "sell_chain": "sell, chained launches",
    "sell": "sell",
    "macko": "canonical format",
    "cusparse": "cuSPARSE CSR",
}


def plot_densities() -> None:
    """By density, of the shapes with five of them or more, in the run that has most."""
    about = {"mask": "uniform", "dtype": "float16"}
    run, _ = Counter(line["commit"] for line in records.spmv(**about)).most_common(1)[0]
    lines = [line for line in records.spmv(**about, commit=run) if "gain" in line]
    shapes = [shape for shape in EIGHT if len({x["density"] for x in lines if x["matrix"] == shape}) >= 5]
    figure, axes = plt.subplots(1, len(shapes), figsize=(4 * len(shapes), 3.6), sharey=True)
    for axis, shape in zip(axes, shapes, strict=True):
        for name, label in LABELS.items():
            curve(axis, label, [x for x in lines if (x["matrix"], x["kernel"]) == (shape, name)], "density")
        axis.set_title("{} x {}".format(*shape))
        frame(axis, "density", log="y", named=axis is axes[-1])
    axes[0].set_ylabel("one token: speed-up over dense float16")
    save(figure, "spmv_density", "sell beats dense at every density, cuSPARSE only where few weights are left")


def plot_formats() -> None:
    """Bytes by density, of a uniform mask."""
    labels = {"bitmap": "bitmap", "macko": "canonical", "EC smallest": "EC smallest", "sell": "sell", "tile": "tile",
              "floor": "floor (entropy)"}  # fmt: skip
    figure, axis = plt.subplots(figsize=(7, 3.6))
    for name, label in labels.items():
        lines = [x for x in records.formats(mask="uniform", rows=4096) if x["format"] == name]
        curve(axis, label, lines, "density", "bytes_a_nonzero")
    axis.invert_xaxis()
    axis.set(xlabel="density", ylabel="bytes a non-zero")
    name_ends(axis)
    save(figure, "formats", "The bitmap is smallest down to density 0.3, EC at 0.1")


def plot_floor() -> None:
    """How near the roofline each problem is."""
    lines = records.spmv(mask="uniform", dtype="float16", floor_us=...)
    figure, axis = plt.subplots(figsize=(7, 3.4))
    for name, label in (*[*LABELS.items()][:2], ("sell_cp_async", "sell without bulk copies")):
        near = [(x["bytes"] / 1e6, x["floor_us"] / x["median_us"]) for x in lines if x["kernel"] == name]
        axis.plot(*zip(*near, strict=True), "o", label=label, color=colour(label))
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1))
    axis.set(ylim=(0, 1.1), xlabel="MB read", ylabel="share of the roofline")
    named_beside(axis)
    save(figure, "spmv_floor", "Large matrices are read at nearly the memory's full speed")


#: Sides of records.slide_pairs that are drawn.
DRAWN_PAIRS = {
    "torch / 2:4": "2:4 over torch's dense",
    "bf16 / 2:4": "2:4 over bfloat16",
    "dense / 2:4": "2:4 over dense",
    "dense / 4:6": "4:6 over dense",
    "dense / 6:8": "6:8 over dense",
}


def plot_slide() -> None:
    """At rest up to 512 tokens, under load above them."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.8), sharey=True)
    for axis, name in zip(axes, ("int8", "fp8"), strict=True):
        lines = [x for x in records.slide_pairs(name) if (x["mode"] == "burst") == (x["tokens"] <= 512)]
        for pair, label in DRAWN_PAIRS.items():
            curve(axis, label, [line for line in lines if line["pair"] == pair])
        axis.set_title(name)
        frame(axis, "tokens (to 512 at rest, from 2048 on under load)", log="x")
    axes[0].set_ylabel("speed-up")
    save(figure, "slide_tokens", "2:4 is faster than dense at any number of tokens; 4:6 and 6:8 hardly are")


#: Sides of records.engines that are drawn, in bfloat16.
DRAWN_SIDES = {
    "macko, bfloat16": "macko, half zeros (exact)",
    "macko dense12, bfloat16": "dense12 (exact)",
    "fp8 W8A8, bfloat16": "fp8 W8A8",
    "int4, by Marlin, bfloat16": "int4, by Marlin",
}


def plot_engines() -> None:
    """Times as fast as dense against the batch: the last run."""
    figure, axis = plt.subplots(figsize=(7, 3.4))
    lines = [x for x in records.engines(H200, what="decode", compiled=True) if x["side"] in DRAWN_SIDES]
    lines = [line for line in lines if line["commit"] == records.vllm(H200)[-1]["commit"]]
    for side, label in DRAWN_SIDES.items():
        curve(axis, label, [line for line in lines if line["side"] == side], "batch")
    frame(axis, "sequences at once", "speed-up over dense bfloat16", "x")
    by = wide(lines, "{batch}", "{side}")
    most = max(x["batch"] for x in by if x["macko, bfloat16 gain"] > x["fp8 W8A8, bfloat16 gain"])
    save(figure, "engines", f"In vLLM half zeros are faster than fp8 up to {most} sequences, and exact")


#: What the plane shows, and its markers: what was pruned and not rounded first.
MARKERS = {
    "wanda": "^",
    "sparsegpt": "o",
    records.BLOCK: "*",
    "sparsegpt, auto, fitted": "P",
    "rounded to nearest": "D",
    "rounded by GPTQ": "s",
}


def kind_of(line: Line) -> str:
    """What a line of quality is drawn as; no key of MARKERS where it is not."""
    if not line["rounding"] or line["sparsity"]:
        return str(line["name"])
    return {"nearest": "rounded to nearest", "at once": "rounded by GPTQ"}[line["rounding"]]


def plot_quality() -> None:
    """Quality lost against bytes a weight."""
    least = 1e-4  # what loses less is drawn there
    figure, axis = plt.subplots(figsize=(7.5, 4))
    lines = [line for line in records.first_seed(records.quality()) if not line["pattern"]]
    for kind, marker in MARKERS.items():
        of = [line for line in lines if kind_of(line) == kind]
        at = [(line["bytes"], max(least, records.lost(line))) for line in of]
        axis.plot(*zip(*at, strict=True), marker, label=kind, color=colour(kind), markersize=8)
        for line, point in zip(of, at, strict=True):
            text = line["name"].split()[-1] if line["rounding"] else f"{line['zeros']} zeros" * (kind == "wanda")
            axis.annotate(text, point, (7, 0), textcoords="offset points", va="center")
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(lambda y, _: f"{100 * y:g}%")
    axis.set(xlabel="bytes a weight (16 bits dense: 2)", ylabel="perplexity above dense's")
    named_beside(axis)
    save(figure, "quality", "A fit makes pruning lose less; GPTQ int4 and 8 bits lose less still")


def draw() -> None:
    for name, plot in [*globals().items()]:
        if name.startswith("plot_"):
            plot()
