"""The plots of docs, from the lines under benchmarks/results: benchmarks.report draws them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import matplotlib
import matplotlib.pyplot as plt

from benchmarks import EIGHT, records
from benchmarks.records import H200, ROOT, Line, Lines, geomean, show, wide

IMAGES = ROOT / "docs" / "images"
matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "macko"


def save(figure: Any, name: str) -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    # No date and fixed ids: the same lines give the same file.
    figure.savefig(IMAGES / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


def curves(axis: Any, lines: Lines, by: str, x: str = "tokens", **style: Any) -> None:
    """A curve a name that the template `by` gives: the geometric mean of the speed-ups, by the field x."""
    for label in dict.fromkeys(show(by, line) for line in lines):
        found: dict[Any, list[float]] = {}
        for line in lines:
            if show(by, line) == label:
                found.setdefault(line[x], []).append(line["gain"])
        means = [geomean(found[at]) for at in sorted(found)]
        axis.plot(sorted(found), means, **{"marker": "o", "markersize": 3, "label": label} | style)


def frame(axis: Any, x: str, y: str = "", log: str = "", ticks: Sequence[float] = (), legend: int = 8) -> None:
    """What plots of speed-ups have besides curves."""
    axis.axhline(1, color="black", linewidth=0.8)
    for scale in log:
        getattr(axis, f"set_{scale}scale")("log", base=2)
    if ticks:
        axis.set_yticks(ticks, [f"{tick}x" for tick in ticks])
    axis.set(xlabel=x, **{"ylabel": y} if y else {})
    axis.grid(alpha=0.3)
    if legend:
        axis.legend(fontsize=legend)


def plot_tokens() -> None:
    figure, axis = plt.subplots(figsize=(7, 4))
    for density, colour in ((0.5, "tab:blue"), (0.3, "tab:orange")):
        for name, dashes in (("tile", "-"), ("sell", "--")):
            lines = [line for line in records.eight_shapes() if (line["kernel"], line["density"]) == (name, density)]
            curves(axis, lines, "{kernel}, density {density}", linestyle=dashes, color=colour)
    axis.set(xlim=(0.9, 4600), ylim=(0.2, 4.4))
    frame(axis, "tokens", "speed-up over dense float16", "xy", [0.25, 0.5, 1, 2, 4])
    save(figure, "spmm_tokens")


def plot_rivals() -> None:
    figure, axis = plt.subplots(figsize=(7, 4))
    for row in (row for row in records.rivals() if not row["kernel"].endswith("_alone")):
        means = {int(n): row[f"{n} gain"] for n in sorted(row["@"], key=int)}
        dashes = "-" if "exact" in row["label"] else "--"
        axis.plot([*means], [*means.values()], dashes, marker="o", markersize=3, label=row["label"])
    frame(axis, "tokens", "speed-up over dense bfloat16", "xy", legend=7)
    save(figure, "rivals")


def plot_bench() -> None:
    """Tokens a second of each sequence, and memory: dense and half sparse, each as it is stored by default."""
    pairs = wide(records.bench_pairs(what="decode"), "{size}", "{stored}")
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5))
    for axis, label, field, value in (
        (axes[0], "tokens a second of a sequence", "ms", lambda ms: 1000 / ms),
        (axes[1], "peak GPU memory, GB", "peak_bytes", lambda size: size / 1e9),
    ):
        for index, side in enumerate(("dense", *records.STORED.values())):
            key = f"{records.STORED['bfloat16', None]} dense_{field}" if not index else f"{side} {field}"
            bars = {at + (index - 1.5) * 0.2: value(of[key]) for at, of in enumerate(pairs) if key in of}
            axis.bar([*bars], [*bars.values()], 0.2, label=side.replace("`", ""))
        sizes = [of["size"] for of in pairs]
        axis.set_xticks(range(len(pairs)), [f"{size} sequence{'s' if size > 1 else ''}" for size in sizes])
        axis.set_ylabel(label)
        axis.grid(alpha=0.3, axis="y")
    axes[1].set_ylim(0, axes[1].get_ylim()[1] * 1.25)  # space for the legend
    axes[1].legend(fontsize=8, loc="upper left", ncols=2)
    save(figure, "llama")


def break_even(points: list[tuple[float, float]]) -> str:
    """The density at which the speed-up falls through 1, between two measured ones."""
    for (d0, s0), (d1, s1) in pairwise(points):
        if s0 >= 1 > s1:
            return f"{d0 + (d1 - d0) * (s0 - 1) / (s0 - s1):.2f}"
    return f"above {points[-1][0]:.2f}" if points[-1][1] >= 1 else f"below {points[0][0]:.2f}"


#: What to call each kernel, in the order of plots.
LABELS = {
    "sell": "sell",
    "sell_chain": "sell, chained launches",
    "sell_cp_async": "sell without bulk copies",
    "macko": "canonical format",
    "cusparse": "cuSPARSE CSR",
}


def plot_densities() -> None:
    """By density, of the shapes with five of them or more; and how near the floor each problem is."""
    found: dict[Any, list[tuple[float, float]]] = {}
    lines = records.spmv(mask="uniform", dtype="float16")
    for line in (line for line in lines if "gain" in line):
        found.setdefault((line["matrix"], line["kernel"]), []).append((line["density"], line["gain"]))
    shapes = [shape for shape in EIGHT if len(found[shape, "sell"]) >= 5]
    figure, axes = plt.subplots(1, len(shapes), figsize=(5.5 * len(shapes), 4), sharey=True, squeeze=False)
    for axis, shape in zip(axes[0], shapes, strict=True):
        for name, label in LABELS.items():
            points = sorted(found.get((shape, name), []))
            if len(points) >= 5:
                even = f"{label}, break-even {break_even(points)}"
                axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=even)
        axis.set_title("{} x {}".format(*shape))
        frame(axis, "density", log="y", ticks=[0.25, 0.5, 1, 2, 4, 8])
    axes[0][0].set_ylabel("speed-up over dense float16")
    save(figure, "spmv_density")

    figure, axis = plt.subplots(figsize=(7, 4))
    for name in ("sell", "sell_chain", "sell_cp_async"):
        near = [(x["bytes"] / 1e6, x["floor_us"] / x["median_us"]) for x in lines if x["kernel"] == name]
        axis.scatter([x for x, _ in near], [y for _, y in near], s=12, label=LABELS[name])
    axis.set_xscale("log")
    axis.set(ylim=(0, 1.05), xlabel="MB read", ylabel="share of the floor")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    save(figure, "spmv_floor")


def plot_slide() -> None:
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    colours = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:grey")
    for axis, name in zip(axes, ("int8", "fp8"), strict=True):
        lines = records.slide_pairs(name)
        for pair, colour in zip(records.SLIDE_SIDES, colours, strict=True):
            for mode, dashes in (("burst", "--"), ("sustained", "-")):
                of = [line for line in lines if (line["pair"], line["mode"]) == (pair, mode)]
                curves(axis, of, "{pair}", linestyle=dashes, color=colour,
                       label=pair if mode == "burst" else None)  # fmt: skip
        axis.set_title(f"{name}: dashed burst, solid under load")
        frame(axis, "tokens", log="x", legend=0)
    axes[0].set_ylabel("time of the first over the second")
    axes[0].legend(fontsize=8)
    save(figure, "slide_tokens")


def plot_engines() -> None:
    """Times as fast as dense against the batch, on one GPU, without and with vLLM's compile."""
    figure, panels = plt.subplots(1, 2, figsize=(8.4, 3.4), sharey=True)
    for panel, compiled in zip(panels, (False, True), strict=True):
        lines = [line for line in records.engines(H200, what="decode", compiled=compiled) if "faster" in line]
        for side in dict.fromkeys(line["side"] for line in lines):
            points = sorted((line["batch"], line["faster"]) for line in lines if line["side"] == side)
            panel.plot(*zip(*points, strict=True), marker="o", label=side)
        panel.axhline(1, color="black", linewidth=1)
        panel.legend(fontsize=7)
        panel.set_xscale("log", base=2)
        panel.set_xlabel("sequences at once")
        panel.set_title("compiled" if compiled else "CUDA graphs, not compiled", fontsize=10)
    panels[0].set_ylabel("speed over dense")
    save(figure, "engines")


#: What the plane shows of what was pruned and not rounded, with a marker each.
DRAWN = {"magnitude": "v", "wanda": "^", "sparsegpt": "o", records.BLOCK: "*", "sparsegpt, auto, fitted by block": "P"}


def kind_of(line: Line) -> tuple[str, str]:
    """What a line of quality is drawn as, and its marker; "" where it is not."""
    if not line["rounding"]:
        return (line["name"], DRAWN.get(line["name"], "o")) if line["name"] in ("dense", *DRAWN) else ("", "")
    if line["sparsity"] or line["pattern"]:
        return ("pruned, fitted and rounded", "X") if line["reconstruct"] else ("pruned and rounded at once", "x")
    kinds = {"nearest": ("rounded to nearest", "D"), "at once": ("GPTQ", "s")}
    return kinds.get(line["rounding"], ("rounded, fitted by block", "p"))


def plot_quality() -> None:
    """Quality lost against bytes a weight; as large as it is fast, where that was measured in bfloat16."""
    decoding = records.bench(what="decode", batch=1, dtype="bfloat16", values=None, compile="default")
    speeds, least = {line["sparsity"]: 1000 / line["ms"] for line in decoding}, 1e-4  # what loses less is drawn there
    figure, axis = plt.subplots(figsize=(9, 5.5))
    drawn: dict[tuple[str, str], Lines] = {}
    for line in records.quality():
        if not line["seed"] and kind_of(line)[0]:
            drawn.setdefault(kind_of(line), []).append(line)
    for (kind, marker), lines in drawn.items():
        points = [(line["bytes"], max(least, records.lost(line))) for line in lines]
        known = [not line["rounding"] and not line["pattern"] and speeds.get(line["sparsity"] or 0.0) for line in lines]
        sizes = [0.4 * speed if speed else 25 for speed in known]
        axis.scatter([x for x, _ in points], [y for _, y in points], s=sizes, marker=marker, alpha=0.8, label=kind)
        for line, at in zip(lines, points, strict=True):
            text = f"{line['name'].split()[-1] if line['rounding'] else ''} {line['zeros']}".strip()
            axis.annotate(text, at, xytext=(5, 3), textcoords="offset points", fontsize=6)
    axis.set_yscale("log")
    axis.set(xlabel="bytes a weight (left is smaller)", ylabel="perplexity over dense's, less 1 (down is better)")
    axis.grid(alpha=0.3)
    legend = axis.legend(fontsize=7)
    handles: Any = legend.legend_handles
    for handle in handles:
        handle.set_sizes([25])
    save(figure, "quality")


def draw() -> None:
    for plot in (plot_densities, plot_tokens, plot_rivals, plot_bench, plot_slide, plot_engines, plot_quality):
        plot()
