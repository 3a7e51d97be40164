"""Tables and plots of README.md and docs, from the lines under benchmarks/results: `make report`.

A place in a document is a pair of comments, `<!-- report: NAME -->` and `<!-- end -->`; what is between is replaced.
Of lines that measured the same thing the last one counts. Speed-up is over the faster of F.linear and torch.mv.
"""

from __future__ import annotations

import csv
import json
import math
import re
import statistics
import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks import EIGHT
from macko.choose.times import held_bytes
from macko.measure.rivals import RIVALS as RIVAL_LAYERS

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
H100 = ROOT / "benchmarks" / "results" / "h100-80gb-hbm3"
TIMES = ROOT / "macko" / "times"
DENSE = ("dense_linear", "dense_mv")
#: What to call each kernel, in the order of plots.
LABELS = {
    "sell": "sell",
    "sell_chain": "sell, chained launches",
    "sell_cp_async": "sell without bulk copies",
    "macko": "canonical format",
    "cusparse": "cuSPARSE CSR",
}

Line = dict[str, Any]
Key = tuple[int, int, float, str, str]


def load(path: Path) -> dict[Key, dict[str, Line]]:
    """Lines by problem (rows, cols, density, mask, dtype), then by kernel."""
    problems: dict[Key, dict[str, Line]] = {}
    for text in path.read_text().splitlines():
        line = json.loads(text)
        key = (line["rows"], line["cols"], line["density"], line["mask"], line["dtype"])
        problems.setdefault(key, {})[line["kernel"]] = line
    return problems


def dense_us(kernels: dict[str, Line]) -> float:
    return min(kernels[name]["median_us"] for name in DENSE if name in kernels)


def speedup(kernels: dict[str, Line], name: str) -> float:
    return dense_us(kernels) / kernels[name]["median_us"]


def geomean(values: Iterable[float]) -> float:
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs))


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rows])


def cell(kernels: dict[str, Line], name: str) -> str:
    return f"{kernels[name]['median_us']:.2f} ({speedup(kernels, name):.2f}x)" if name in kernels else ""


def share(kernels: dict[str, Line], name: str) -> str:
    line = kernels[name]
    return f"{line['floor_us'] / line['median_us']:.2f}"


def uniform(problems: dict[Key, dict[str, Line]], density: float) -> dict[tuple[int, int], dict[str, Line]]:
    found = {k[:2]: v for k, v in problems.items() if k[2:] == (density, "uniform", "float16") and "sell" in v}
    return {shape: kernels for shape, kernels in found.items() if any(name in kernels for name in DENSE)}


def commits_of(lines: Iterable[Line]) -> str:
    return " and ".join(dict.fromkeys(line["commit"] for line in lines))


def where(lines: Iterable[Line]) -> str:
    """What the lines were measured on, and with which commits."""
    *_, line = lines = list(lines)
    commits = commits_of(lines)
    return textwrap.fill(
        f"{line['gpu']}, driver {line['driver']}, torch {line['torch']}, commit {commits}, "
        f"memory clock {line.get('memory_mhz', '?')} MHz, SM clock up to {line.get('max_sm_mhz', '?')} MHz.",
        110,
    )


def shapes_table(problems: dict[Key, dict[str, Line]], shapes: Iterable[tuple[int, int]]) -> str:
    found = uniform(problems, 0.5)
    rows = []
    for shape in shapes:
        if shape not in found:
            continue
        kernels = found[shape]
        sell = kernels["sell"]
        rows.append(
            [
                f"{shape[0]} x {shape[1]}",
                f"{dense_us(kernels):.2f}",
                cell(kernels, "sell"),
                share(kernels, "sell"),
                cell(kernels, "sell_chain"),
                share(kernels, "sell_chain"),
                f"{sell['floor_us']:.2f}",
                f"{sell['held_bytes'] / sell['stored']:.3f}",
                f"{sell['gap_bits']}",
            ]
        )
    mine = [found[s] for s in shapes if s in found]
    rows.append(
        [
            "geometric mean",
            "",
            f"**{geomean(speedup(k, 'sell') for k in mine):.2f}x**",
            f"{geomean(float(share(k, 'sell')) for k in mine):.2f}",
            f"**{geomean(speedup(k, 'sell_chain') for k in mine):.2f}x**",
            f"{geomean(float(share(k, 'sell_chain')) for k in mine):.2f}",
            "",
            "",
            "",
        ]
    )
    head = [
        "rows x cols",
        "dense us",
        "sell us",
        "of floor",
        "chained us",
        "of floor",
        "floor us",
        "B a value",
        "gap bits",
    ]
    return table(head, rows)


def variants_table(path: Path) -> str:
    """Lines of benchmarks.spmv --variants: a row a variant, plain and chained time by shape."""
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    times = {(line["variant"], line["kernel"], (line["rows"], line["cols"])): line["median_us"] for line in lines}
    shapes = list(dict.fromkeys((line["rows"], line["cols"]) for line in lines))
    rows = []
    for name in dict.fromkeys(line["variant"] for line in lines if line["kernel"] == "sell_plain"):
        cells = []
        for shape in shapes:
            plain, chained = (times[name, f"sell_{way}", shape] for way in ("plain", "chained"))
            cells.append(f"{plain:.2f} / {chained:.2f}")
        rows.append([name, *cells])
    return table(["us, plain / chained", *(f"{r} x {c}" for r, c in shapes)], rows)


def others_table(problems: dict[Key, dict[str, Line]], published: Path) -> str:
    """Other kernels on the same matrices; `published` has the times of the published package's, of another run."""
    found = uniform(problems, 0.5)
    titles = {
        "sell": "sell",
        "sell_gap4": "4-bit gaps",
        "sell_cp_async": "no bulk copies",
        "macko": "canonical",
        "cusparse": "cuSPARSE CSR",
        "dense_compiled": "compiled dense",
        "published": "published MACKO kernel",
    }
    for line in map(json.loads, published.read_text().splitlines()):
        found[line["rows"], line["cols"]]["published"] = line
    rows = [
        [f"{r} x {c}", f"{dense_us(found[r, c]):.2f}", *(cell(found[r, c], name) for name in titles)]
        for r, c in EIGHT
        if (r, c) in found
    ]
    return table(["rows x cols", "dense us", *titles.values()], rows)


def densities_table(problems: dict[Key, dict[str, Line]]) -> str:
    rows = []
    for key in sorted(problems):
        kernels = problems[key]
        if key[3:] != ("uniform", "float16") or "sell" not in kernels or len(sweep(problems, key[:2], "sell")) < 5:
            continue
        sell = kernels["sell"]
        rows.append(
            [
                f"{key[0]} x {key[1]}",
                f"{key[2]:.2f}",
                f"{sell['gap_bits']}",
                f"{dense_us(kernels):.2f}",
                *(cell(kernels, name) for name in ("sell", "sell_chain", "macko", "cusparse")),
                share(kernels, "sell"),
            ]
        )
    head = [
        "rows x cols",
        "density",
        "gap bits",
        "dense us",
        "sell",
        "chained",
        "canonical",
        "cuSPARSE CSR",
        "sell of floor",
    ]
    return table(head, rows)


def sweep(problems: dict[Key, dict[str, Line]], shape: tuple[int, ...], name: str) -> list[tuple[float, float]]:
    """(density, speed-up) of a shape, by density."""
    return sorted(
        (key[2], speedup(kernels, name))
        for key, kernels in problems.items()
        if key[:2] == shape and key[3:] == ("uniform", "float16") and name in kernels and DENSE[0] in kernels
    )


def break_even(points: list[tuple[float, float]]) -> str:
    """The density at which the speed-up falls through 1, between two measured ones."""
    for (d0, s0), (d1, s1) in pairwise(points):
        if s0 >= 1 > s1:
            return f"{d0 + (d1 - d0) * (s0 - 1) / (s0 - s1):.2f}"
    return f"above {points[-1][0]:.2f}" if points[-1][1] >= 1 else f"below {points[0][0]:.2f}"


def load_tokens(
    path: Path, dtype: str = "float16", mask: str | None = None
) -> dict[tuple[float, int, str], dict[tuple[int, int], float]]:
    """Speed-ups of benchmarks.spmm by shape, for each (density, tokens, kernel); of one mask if that is said."""
    found: dict[tuple[float, int, str], dict[tuple[int, int], float]] = {}
    for line in map(json.loads, path.read_text().splitlines()):
        if "dense_us" in line and line["dtype"] == dtype and mask in (None, line["mask"]):
            speedups = found.setdefault((line["density"], line["tokens"], line["kernel"]), {})
            speedups[line["rows"], line["cols"]] = line["dense_us"] / line["median_us"]
    # What a sell layer does where only its two ways were timed: the stream, and from 32 tokens on dense rows.
    for density, number in {key[:2] for key in found}:
        way = found.get((density, number, "stream" if number < 32 else "tiles"))
        if way and (density, number, "sell") not in found:
            found[density, number, "sell"] = way
    return found


def mean_and_least(speedups: Collection[float]) -> str:
    """The geometric mean over shapes, and in brackets the least; nothing of none."""
    return f"{geomean(speedups):.2f}x ({min(speedups):.2f}x)" if speedups else ""


def tokens_table(found: dict[tuple[float, int, str], dict[tuple[int, int], float]]) -> str:
    """Geometric mean over shapes, and in brackets the least."""
    columns = {
        (0.5, "tile"): "tile",
        (0.5, "tile_alone"): "tile, launched alone",
        (0.5, "sell"): "sell",
        (0.5, "zeros"): "dense, of the pruned matrix",
        (0.3, "tile"): "tile, density 0.3",
        (0.3, "sell"): "sell, density 0.3",
    }
    rows = []
    for tokens in sorted({key[1] for key in found if len(found.get((0.5, key[1], "tile"), ())) in (4, 8)}):
        cells = []
        for density, name in columns:
            speedups = found.get((density, tokens, name), {}).values()
            cells.append(mean_and_least(speedups))
        rows.append([f"{tokens}", *cells, f"{len(found[0.5, tokens, 'tile'])}"])
    return table(["tokens", *columns.values(), "shapes"], rows)


def lossless_table(found: dict[tuple[float, int, str], dict[tuple[int, int], float]]) -> str:
    """dense12 over dense bfloat16: geometric mean over shapes, and in brackets the least."""
    rows = []
    for tokens in sorted({key[1] for key in found if key[2] == "dense12" and key[1]}):
        cells = []
        for name in ("dense12", "dense12_alone"):
            speedups = found.get((1.0, tokens, name), {}).values()
            cells.append(mean_and_least(speedups))
        rows.append([f"{tokens}", *cells, f"{len(found[1.0, tokens, 'dense12'])}"])
    return table(["tokens", "dense12", "dense12, launched alone", "shapes"], rows)


def sparse11_table(found: dict[tuple[float, int, str], dict[tuple[int, int], float]]) -> str:
    """sparse11 and tile over dense bfloat16, of the same pruned matrices: geometric mean over shapes, and the least."""
    columns = {
        (0.5, "sparse11"): "sparse11",
        (0.5, "tile"): "tile",
        (0.5, "sparse11_alone"): "sparse11, launched alone",
        (0.5, "tile_alone"): "tile, launched alone",
        (0.7, "sparse11"): "sparse11, density 0.7",
        (0.7, "tile"): "tile, density 0.7",
    }
    counts = sorted({key[1] for key in found if key[2] == "sparse11" and key[1]})
    columns = {
        (density, name): title
        for (density, name), title in columns.items()
        if any((density, tokens, name) in found for tokens in counts)
    }
    rows = []
    for tokens in counts:
        cells = [mean_and_least(found.get((density, tokens, name), {}).values()) for density, name in columns]
        rows.append([f"{tokens}", *cells, f"{len(found[0.5, tokens, 'sparse11'])}"])
    return table(["tokens", *columns.values(), "shapes"], rows) if rows else NO_LINES


def load_lines(path: Path) -> dict[tuple[str, int, str], dict[tuple[int, int], Line]]:
    """Lines of benchmarks.load by shape, for each (dtype, tokens, kernel); the newest of each."""
    found: dict[tuple[str, int, str], dict[tuple[int, int], Line]] = {}
    for line in map(json.loads, path.read_text().splitlines()):
        found.setdefault((line["dtype"], line["tokens"], line["kernel"]), {})[line["rows"], line["cols"]] = line
    return found


def load_spread(path: Path) -> str:
    """By how much the turns of one product differ."""
    turns = [line["all_us"] for line in map(json.loads, path.read_text().splitlines())]
    off = sorted(max(us) / min(us) - 1 for us in turns)
    return textwrap.fill(
        f"Two turns of the same product differ by {statistics.median(off):.1%} in the median, and by more than "
        f"{off[len(off) * 19 // 20]:.0%} in one of twenty, so smaller differences mean little.",
        110,
    )


def load_table(path: Path, kernels: Sequence[str] = ("tile", "sparse11", "dense12")) -> str:
    """Over the better dense under load: geometric mean over shapes, in brackets the least; and the clocks."""
    found = load_lines(path)
    names = [name for name in kernels if any(key[2] == name for key in found)]
    rows = []
    for dtype, tokens in sorted({key[:2] for key in found}):
        of = {name: found.get((dtype, tokens, name), {}) for name in (*names, "dense")}
        speedups = {name: [line["best_dense_us"] / line["median_us"] for line in of[name].values()] for name in names}
        clocks = [
            f"{statistics.mean(clock for line in lines.values() for clock in line['clock_mhz']):.0f}" if lines else ""
            for lines in of.values()
        ]
        cells = [mean_and_least(speedups[name]) for name in names]
        rows.append([dtype, f"{tokens}", *cells, " / ".join(clocks), f"{len(of['dense'])}"])
    clock_title = f"SM clock, MHz: {' / '.join((*names, 'dense'))}"
    return table(["", "tokens", *names, clock_title, "shapes"], rows)


def load_shapes_table(path: Path, tokens: Sequence[int], dtype: str = "bfloat16") -> str:
    """The same by shape, of some numbers of tokens, and the times of F.linear of the dense and of the pruned matrix."""
    found = load_lines(path)
    shapes = sorted({shape for of in found.values() for shape in of})
    rows = []
    for shape in shapes:
        row = ["{} x {}".format(*shape)]
        for number in tokens:
            lines = {name: found.get((dtype, number, name), {}).get(shape) for name in ("dense", "zeros")}
            row.append(" / ".join(f"{line['median_us']:.0f}" for line in lines.values() if line))
            for name in ("tile", "sparse11", "dense12"):
                line = found.get((dtype, number, name), {}).get(shape)
                row.append(f"{line['best_dense_us'] / line['median_us']:.2f}x" if line else "")
        rows.append(row)
    columns = [title for n in tokens for title in (f"{n}: dense / pruned, us", "tile", "sparse11", "dense12")]
    return table(["rows x cols", *columns], rows)


def l2_table(path: Path, names: Sequence[str]) -> str:
    """What ncu counted of the launches of `benchmarks.load --once`, in their order."""
    counts: list[dict[str, float]] = []
    for row in csv.DictReader(line for line in path.read_text().splitlines() if line.startswith('"')):
        value = float(row["Metric Value"].replace(",", ""))
        if not counts or row["Metric Name"] in counts[-1]:
            counts.append({})
        counts[-1][row["Metric Name"]] = value
    rows = [
        [
            name,
            f"{count['dram__bytes_read.sum'] / 1e9:.2f} GB",
            f"{count['lts__t_sector_hit_rate.pct']:.0f} %",
            f"{count['sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed']:.0f} %",
            f"{count['sm__cycles_elapsed.max']:,.0f}",
        ]
        for name, count in zip(names, counts, strict=True)
    ]
    return table(["", "read from memory", "hits in L2", "tensor cores busy", "clocks"], rows)


def pace_table(folder: Path) -> str:
    """One token by tile on an H100: weights asked for as an H200's memory brings them, and as its own does."""
    files = {"an H200's pace": "spmm.jsonl", "its own pace": "pace.jsonl"}
    ways = {"tile_alone": "launched alone", "tile": "back to back"}
    us: dict[tuple[str, str, int, int], float] = {}
    for pace, file in files.items():
        for line in map(json.loads, (folder / file).read_text().splitlines()):
            if line["kernel"] in ways and (line["dtype"], line["tokens"], line["density"]) == ("float16", 1, 0.5):
                us[pace, line["kernel"], line["rows"], line["cols"]] = line["median_us"]
    shapes = sorted({key[2:] for key in us})
    rows = [
        [f"{way}, {pace}", *(f"{us[pace, kernel, rows, cols]:.1f}" for rows, cols in shapes)]
        for kernel, way in ways.items()
        for pace in files
    ]
    return table(["us", *(f"{rows} x {cols}" for rows, cols in shapes)], rows)


def listed_table(path: Path) -> str:
    """sparse11 by the share of its values that are listed, and tile, over dense bfloat16 of the same run."""
    shares: dict[str, dict[tuple[int, str], float]] = {}
    for mask in dict.fromkeys(json.loads(line).get("mask") for line in path.read_text().splitlines()):
        if mask:
            of = load_tokens(path, "bfloat16", mask)
            shares[mask] = {key[1:]: geomean(speedups.values()) for key, speedups in of.items() if key[1]}
    columns = sorted({key for of in shares.values() for key in of}, key=lambda key: (key[0], key[1]))
    rows = [
        [mask.partition(", ")[2].removesuffix(" listed") or "0", *(f"{of[key]:.2f}x" for key in columns)]
        for mask, of in shares.items()
    ]
    head = [f"{name}, {tokens} token{'s' if tokens > 1 else ''}" for tokens, name in columns]
    return table(["listed", *head], rows)


def eight_table(path: Path) -> str:
    """dense8 and sparse8 at density 0.5 over dense of the same type: geometric mean over shapes, and the least."""
    found = {dtype: load_tokens(path, dtype) for dtype in ("float16", "bfloat16")}
    columns = [(kind, values, dtype) for kind in ("dense8", "sparse8") for values in ("fp8", "int8") for dtype in found]
    rows = []
    for tokens in sorted({key[1] for lines in found.values() for key in lines if key[2] == "dense8_fp8"}):
        every = [found[dtype].get((0.5, tokens, f"{kind}_{values}"), {}) for kind, values, dtype in columns]
        rows.append([f"{tokens}", *(mean_and_least(speedups.values()) for speedups in every)])
    return (
        table(["tokens", *(f"{kind} {values}, {dtype}" for kind, values, dtype in columns)], rows) if rows else NO_LINES
    )


def cpu_decode_table(path: Path) -> str:
    """What a weight takes of the bitmap's kernel, from the cache and from memory."""
    rows = []
    for line in map(json.loads, path.read_text().splitlines()):
        where = "the cache" if line.get("warm") else "memory"
        ns = 1e6 * line["ms"] / line["rows"] / line["cols"]
        shape, threads = f"{line['rows']}x{line['cols']}", f"{line['threads']}"
        rows.append([shape, threads, where, f"{ns:.4f}", f"{line['packed_gbps']:.1f}"])
    return table(["matrix", "threads", "from", "ns a weight", "GB/s"], rows)


#: Kernels of benchmarks.spmm side by side with torch's of fewer bits, by density; each where there are lines.
RIVALS = {
    (1.0, "dense12"): "dense12, exact",
    (1.0, "dense12_alone"): "dense12, launched alone",
    (0.5, "sparse11"): "sparse11, half zeros, exact",
    (0.5, "sparse11_alone"): "sparse11, launched alone",
    (0.5, "tile"): "tile, half zeros, exact",
    (0.5, "tile_alone"): "tile, launched alone",
    (1.0, "dense8_fp8"): "dense8, fp8 by row, tokens of 16 bits",
    (1.0, "dense8_fp8_alone"): "dense8, launched alone",
    (0.5, "sparse8_fp8"): "sparse8, half zeros, fp8 by row",
    (0.5, "sparse8_fp8_alone"): "sparse8, launched alone",
    (1.0, "fp8"): "fp8, one scale, x quantised before",
    (1.0, "fp8_quant"): "fp8, one scale, quantising x too",
    (1.0, "fp8_rows"): "fp8, a scale a row, x quantised before",
    (1.0, "fp8_rows_quant"): "fp8, a scale a row, quantising x too",
    (1.0, "int4"): "int4, groups of 128",
}


def rival_lines(path: Path) -> dict[tuple[float, str], dict[int, dict[tuple[int, int], Line]]]:
    """Lines in bfloat16 of the kernels of RIVALS, by density and kernel, tokens, and shape; none without torch's."""
    found: dict[tuple[float, str], dict[int, dict[tuple[int, int], Line]]] = {}
    for line in map(json.loads, path.read_text().splitlines()):
        key = (line["density"], line["kernel"])
        if key in RIVALS and line["dtype"] == "bfloat16" and line["tokens"] in (1, 8, 16, 64):
            found.setdefault(key, {}).setdefault(line["tokens"], {})[line["rows"], line["cols"]] = line
    theirs = any("fp8" in name or "int4" in name for _, name in found)
    return {key: found[key] for key in RIVALS if key in found} if theirs else {}


def rivals_table(path: Path) -> str:
    """Bytes, error and speed of what reads less than bfloat16: the mean over shapes, in brackets the least."""
    rows = []
    for key, by_tokens in rival_lines(path).items():
        lines = [line for by_shape in by_tokens.values() for line in by_shape.values()]
        size = sum(line["held_bytes"] for line in lines) / sum(line["rows"] * line["cols"] for line in lines)
        cells = []
        for tokens in (1, 8, 16, 64):
            cells.append(
                mean_and_least([line["dense_us"] / line["median_us"] for line in by_tokens[tokens].values()])
                if tokens in by_tokens
                else ""
            )
        error = max(line.get("error", 0) for line in lines)
        rows.append([RIVALS[key], f"{size:.2f}", f"{error:.1%}" if error else "", *cells])
    head = ["", "bytes a weight", "result is off by", *(f"{n} token{'s' * (n > 1)}" for n in (1, 8, 16, 64))]
    return table(head, rows) if rows else NO_LINES


def plot_rivals(path: Path, image: Path) -> str:
    """Speed-up by tokens, and the page's line for it; nothing where there are no lines."""
    import matplotlib.pyplot as plt

    found = {key: lines for key, lines in rival_lines(path).items() if not key[1].endswith("_alone")}
    if not found:
        return ""
    figure, axis = plt.subplots(figsize=(7, 4))
    for key, by_tokens in found.items():
        means = {
            n: geomean(line["dense_us"] / line["median_us"] for line in of.values())
            for n, of in sorted(by_tokens.items())
        }
        dashes = "-" if "exact" in RIVALS[key] else "--"
        axis.plot([*means], [*means.values()], dashes, marker="o", markersize=3, label=RIVALS[key])
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_xlabel("tokens")
    axis.set_ylabel("speed-up over dense bfloat16")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)
    save(figure, image)
    return f"![speed-up of exact and of rounded weights by tokens](images/{image.name})"


#: Of models in a table.
ORDER = ("dense", "dense12", *RIVAL_LAYERS)


def lossless_model_table(path: Path) -> str:
    """Decoding with dense12, and with what rounds the weights, over the dense model of the same run."""
    if not path.exists():
        return NO_LINES
    found = {(line["batch"], line["model"]): line for line in load_bench(path) if line["what"] == "decode"}
    rows = []
    for batch, model in sorted(found, key=lambda key: (key[0], (*ORDER, key[1]).index(key[1]))):
        ms, dense = found[batch, model]["ms"], found[batch, "dense"]["ms"]
        gigabytes = f"{found[batch, model]['peak_bytes'] / 1e9:.1f}"
        rows.append([f"{batch}", model, f"{ms:.2f}", f"{dense / ms:.2f}x", gigabytes])
    return table(["sequences", "model", "ms a token", "over dense", "peak GB"], rows)


def many_tokens_table(found: dict[tuple[float, int, str], dict[tuple[int, int], float]]) -> str:
    """Speed-up of tile by shape, where the tensor cores' time counts; in brackets that over the same zeros."""
    numbers = sorted({key[1] for key in found if key[2] == "tile" and key[0] == 0.5 and key[1] >= 64})
    cells = {tokens: found[0.5, tokens, "tile"] for tokens in numbers}
    shapes = sorted({shape for of in cells.values() for shape in of}, key=lambda shape: (shape[0] * shape[1], shape))
    rows = []
    for shape in shapes:
        row = []
        for n in numbers:
            over, zeros = cells[n].get(shape), found.get((0.5, n, "zeros"), {}).get(shape)
            row.append((f"{over:.2f}x" if over else "") + (f" ({over / zeros:.2f}x)" if over and zeros else ""))
        rows.append([f"{shape[0]} x {shape[1]}", *row])
    return table(["rows x cols", *(f"{tokens} tokens" for tokens in numbers)], rows)


def plot_tokens(found: dict[tuple[float, int, str], dict[tuple[int, int], float]], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4))
    for density, colour in ((0.5, "tab:blue"), (0.3, "tab:orange")):
        for name, label, dashes in (("tile", "tile", "-"), ("sell", "sell", "--")):
            keys = sorted(key for key in found if key[0] == density and key[2] == name)
            if not keys:
                continue
            means = [geomean(found[key].values()) for key in keys]
            axis.plot([key[1] for key in keys], means, dashes, color=colour, marker="o", markersize=3,
                      label=f"{label}, density {density}")  # fmt: skip
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xlim(0.9, 4600)
    axis.set_ylim(0.2, 4.4)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_yticks([0.25, 0.5, 1, 2, 4], ["0.25x", "0.5x", "1x", "2x", "4x"])
    axis.set_xlabel("tokens")
    axis.set_ylabel("speed-up over dense float16")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    save(figure, path)


def models_table(path: Path) -> str:
    """Steps of benchmarks.models; the last line of each counts."""
    steps = {line["step"]: line for line in map(json.loads, path.read_text().splitlines())}
    rows = [
        [name + (f", {line['tokens']} tokens" if "tokens" in line else ""),
         f"{line['seconds']:.2f}", f"{line['peak_bytes'] / 1e9:.2f}", f"{line['held_bytes'] / 1e9:.2f}",
         f"{line['bytes'] / 1e9:.2f}" if "bytes" in line else ""]
        for name, line in steps.items()
    ]  # fmt: skip
    head = ["step", "seconds", "peak GPU memory, GB", "held after it, GB", "written, GB"]
    return f"{where(steps.values())}\n\n{table(head, rows)}"


def sanitize_table(*paths: Path) -> str:
    """The last run of each tool of tools/sanitize.py, a path a GPU; not those of a few problems (--only)."""
    rows = []
    for path in paths:
        lines = map(json.loads, path.read_text().splitlines())
        last = {line["tool"]: line for line in lines if line["problems"] > 100}
        rows += [
            [tool, line["device"].removeprefix("NVIDIA "), line["commit"],
             f"{line['problems']} of {line['problems'] + line['problems_left']}", f"{line['products']:,}",
             str(line["wrong"]), str(sum(line["errors"].values())), f"{sum(line['known'].values()):,}",
             str(line["seconds"])]
            for tool, line in last.items()
        ]  # fmt: skip
    head = ["tool", "GPU", "commit", "problems", "products", "wrong elements", "errors", "known reports", "seconds"]
    return table(head, sorted(rows, key=lambda row: row[:2]))


def load_bench(path: Path) -> list[Line]:
    """Lines of `macko bench --json`; of those that measured the same thing the last one counts."""
    names = (
        "what",
        "dtype",
        "values",
        "compile",
        "batch",
        "prompt_tokens",
        "model",
        "sparsity",
        "tokens",
        "kernel",
        "format",
    )
    found: dict[tuple[Any, ...], Line] = {}
    for line in map(json.loads, path.read_text().splitlines()):
        if line.get("ms", 0) is None:
            continue  # too noisy to tell
        key = tuple(line.get(name) or None for name in names)
        found.pop(key, None)
        found[key] = line
    return list(found.values())


def bench_where(lines: list[Line]) -> str:
    commits = commits_of(lines)
    return f"{lines[-1]['device']}, torch {lines[-1]['torch']}, commit {commits}."


#: What a model of half zeros is held as by the default: (dtype, values), and how tables say it.
HELD = {
    ("bfloat16", None): "bfloat16",
    ("float16", None): "float16",
    ("bfloat16", "fp8"): '`values="fp8"` (rounds)',
}
#: A run's own dense model is what its others are compared with.
RUN = ("dtype", "values", "format", "compile", "commit")


def bench_pairs(lines: list[Line]) -> dict[tuple[str, int], dict[tuple[str, Any], tuple[Line, Line]]]:
    """Of ("decode", sequences) and ("prefill", tokens), by HELD: the dense line of its run, and the half sparse one."""
    found: dict[tuple[str, int], dict[tuple[str, Any], tuple[Line, Line]]] = {}
    dense: dict[tuple[Any, ...], Line] = {}
    for line in lines:
        if line["what"] in ("decode", "prefill"):
            size = line["batch"] if line["what"] == "decode" else line["prompt_tokens"]
            held, run = (line["dtype"], line.get("values")), (line["what"], size, *(line.get(key) for key in RUN))
            if line["model"] == "dense":
                dense[run] = line
            elif line["sparsity"] == 0.5 and held in HELD:
                found.setdefault((line["what"], size), {})[held] = (dense[run], line)
    return dict(sorted(found.items()))


def bench_row(what: str, size: int) -> str:
    if what == "prefill":
        return f"a prompt of {size} tokens"
    return "1 token at a time" if size == 1 else f"{size} sequences at once"


def headline_table(lines: list[Line]) -> str:
    """What half of the weights being zero is worth to a model whose weights stay exact, by tokens at once."""
    pairs, exact = bench_pairs(lines), [held for held in HELD if held[1] is None]
    rows = []
    for what, of in pairs.items():
        if what in (("decode", 8), ("prefill", 512)):
            continue  # docs/performance.md has all
        gains = [f"{of[held][0]['ms'] / of[held][1]['ms']:.2f}x" if held in of else "" for held in exact]
        rows.append([bench_row(*what), *(f"**{gain}**" if gain and what[0] == "decode" else gain for gain in gains)])
    one = pairs["decode", 1]
    peaks = [[line["peak_bytes"] / 1e9 for line in one[held]] for held in exact if held in one]
    rows.append([f"memory, of {peaks[0][0]:.1f} GB", *(f"**{sparse:.1f} GB**" for _, sparse in peaks)])
    return table(["speed over dense", *(HELD[held] for held in exact)], rows)


def bench_summary(lines: list[Line]) -> str:
    """Milliseconds of what headline_table compares, and what they are over the dense model of the same run."""
    pairs = bench_pairs(lines)
    rows = []
    for what, of in pairs.items():
        for held in (held for held in HELD if held in of):
            dense, sparse = of[held]
            gain = dense["ms"] / sparse["ms"]
            sizes = [f"{line['peak_bytes'] / 1e9:.1f}" for line in (dense, sparse)]
            rows.append(
                [bench_row(*what), HELD[held], f"{dense['ms']:.2f}", f"{sparse['ms']:.2f} ({gain:.2f}x)", *sizes]
            )
    return table(["what", "model", "dense, ms", "sparse, ms", "dense, peak GB", "sparse, peak GB"], rows)


def logits_table(lines: list[Line]) -> str:
    rows = []
    for line in lines:
        if line["what"] == "logits":
            name = f"{line['sparsity']:.0%} sparse, {HELD[line['dtype'], line.get('values')]}"
            layers = ", ".join(map(of_bound, line.get("layers", []))) or "-"
            rows.append([name, f"{line['error']:.2g}", f"{line['largest']:.2g}", layers])
    return table(["model", "largest difference of logits", "largest logit", "layers, of their bound"], rows)


def of_bound(found: Line) -> str:
    return f"{found['of_bound']:.2g} ({found['tokens']} token{'s' if found['tokens'] > 1 else ''})"


def profile_table(lines: list[Line], sparsity: float = 0.5, batch: int = 1) -> str:
    """One token by kernel, both sides, the longest first."""
    found = [line for line in lines if line["what"] == "profile" and line["batch"] == batch]
    found = [line for line in found if line["compile"] == found[-1]["compile"]]
    sides = [[line for line in found if line["sparsity"] == wanted] for wanted in (0.0, sparsity)]
    rows = []
    for index in range(12):
        row = []
        for side in sides:
            kernels = [line for line in side if line["kernel"] != "busy"]
            line = kernels[index] if index < len(kernels) else None
            row += [f"`{line['kernel']}`", str(line["launches"]), f"{line['us']:.0f}"] if line else [""] * 3
        rows.append(row)
    rest: list[str] = []
    total: list[str] = []
    for side in sides:
        others = [line for line in side if line["kernel"] != "busy"][12:]
        rest += ["others", str(sum(line["launches"] for line in others)), f"{sum(line['us'] for line in others):.0f}"]
        busy = next((line for line in side if line["kernel"] == "busy"), {"launches": 0, "us": 0.0})
        total += ["**the GPU is busy for**", str(busy["launches"]), f"**{busy['us']:.0f}**"]
    head = ["dense", "launches", "us", f"{sparsity:.0%} sparse", "launches", "us"]
    return table(head, [*rows, rest, total])


def plot_bench(lines: list[Line], path: Path) -> None:
    """Tokens a second of each sequence, and memory: dense and half sparse, each as it is held by default."""
    import matplotlib.pyplot as plt

    pairs = {size: of for (what, size), of in bench_pairs(lines).items() if what == "decode"}
    sides = ["dense", *(name.replace("`", "") for name in HELD.values())]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5))
    for axis, label, value in (
        (axes[0], "tokens a second of a sequence", lambda line: 1000 / line["ms"]),
        (axes[1], "peak GPU memory, GB", lambda line: line["peak_bytes"] / 1e9),
    ):
        for index, side in enumerate(sides):
            held = list(HELD)[max(0, index - 1)]
            own = [(at, of[held][min(index, 1)]) for at, of in enumerate(pairs.values()) if held in of]
            places = [at + (index - 1.5) * 0.2 for at, _ in own]
            axis.bar(places, [value(line) for _, line in own], 0.2, label=side)
        axis.set_xticks(range(len(pairs)), [f"{size} sequence{'s' if size > 1 else ''}" for size in pairs])
        axis.set_ylabel(label)
        axis.grid(alpha=0.3, axis="y")
    axes[1].set_ylim(0, axes[1].get_ylim()[1] * 1.25)  # room for the legend
    axes[1].legend(fontsize=8, loc="upper left", ncols=2)
    save(figure, path)


def latest(path: Path, /, *key: str, **only: Any) -> dict[tuple[Any, ...], Line]:
    """The last line of each key, of the lines that hold what `only` says."""
    lines = map(json.loads, path.read_text().splitlines())
    return {tuple(line.get(k) for k in key): line for line in lines if only.items() <= line.items()}


EC_VARIANTS = ["paper, 4 bits", "paper, 8 bits", "no blocks, 4 bits", "16 lanes", "8 lanes", "4 lanes", "1 lane"]


def ec_lines(path: Path) -> dict[tuple[Any, ...], Line]:
    return latest(path, "rows", "cols", "density", "variant", what="spmv", dtype="float16")


def ec_table(path: Path) -> str:
    """Microseconds of each variant, and how many times as fast as the others the fastest one is."""
    problems: dict[tuple[Any, ...], dict[str, float]] = {}
    for (*problem, variant), line in ec_lines(path).items():
        problems.setdefault(tuple(problem), {})[variant] = line["time"]["median_us"]
    others = ["dense", "CSR", "sell"]
    rows, gains = [], []
    for (height, width, density), us in problems.items():
        best = min(us[name] for name in EC_VARIANTS)
        gains.append([us[name] / best for name in others])
        times = [f"**{us[name]:.1f}**" if us[name] == best else f"{us[name]:.1f}" for name in [*others, *EC_VARIANTS]]
        rows.append([f"{height}x{width}", f"{density:g}", *times, *(f"{gain:.2f}" for gain in gains[-1])])
    for name, pick in (("least", min), ("most", max)):
        rows.append([name] + [""] * (len(others) + len(EC_VARIANTS) + 1))
        rows[-1] += [f"{pick(column):.2f}" for column in zip(*gains, strict=True)]
    return table(["shape", "density", *others, *EC_VARIANTS, *(f"best x {name}" for name in others)], rows)


def ec_packing_table(path: Path) -> str:
    one, all = (latest(path, "variant", what=what) for what in ("pack", "pack 224 matrices"))
    seconds = {name: f"{line['s']:.2f}" for (name,), line in all.items()}
    rows = [[name, f"{one[name,]['ms']:.1f}", seconds.get(name, "")] for name in EC_VARIANTS]
    return table(["variant", "4096x4096, ms", "224 matrices of Llama-2-7B, s"], rows)


def pairs_table(path: Path) -> str:
    problems: dict[tuple[Any, ...], dict[str, Line]] = {}
    for (*problem, variant), line in latest(path, "mask", "rows", "cols", "density", "variant").items():
        problems.setdefault(tuple(problem), {})[variant] = line
    rows = []
    for (mask, height, width, density), of in problems.items():
        pairs, sell = of["pairs chained"], of["sell chained"]
        us = {variant: line["time"]["median_us"] for variant, line in of.items()}
        sizes = [f"{line['bytes_a_nonzero']:.3f}" for line in (pairs, sell)]
        times = [f"{us[variant]:.2f}" for variant in ("pairs chained", "sell chained")]
        ratios = [f"{us['pairs ' + how] / us['sell ' + how]:.2f}" for how in ("chained", "alone")]
        gathers = f"{pairs['gathers_a_nonzero']:.2f}"
        rows.append([mask, f"{height}x{width}", f"{density:g}", *sizes, gathers, *times, *ratios])
    head = ["mask", "shape", "density", "pairs, B a non-zero", "sell", "gathers a non-zero", "pairs, us", "sell, us"]
    return table([*head, "of sell's time", "of sell's, launched alone"], rows)


def ec_cpu_table(path: Path) -> str:
    run = {"op": "linear", "tokens": 1, "rows": 4096, "cols": 4096, "clock": "cpu"}
    *_, commit = [line["commit"] for line in latest(path, "dtype", "density", format="ec", **run).values()]
    ours = latest(path, "dtype", "density", "format", "path", commit=commit, **run)  # both formats in one run
    columns = [("macko", "avx512"), ("ec", "avx512"), ("ec", "avx2"), ("ec", "scalar"), ("ec_paper", "avx512")]
    rows = []
    for dtype, density in sorted({key[:2] for key in ours}, key=lambda k: (k[0], -k[1])):
        found = [ours[dtype, density, form, vectors] for form, vectors in columns]
        dense = min(found[0]["torch_linear_ms"], found[0]["torch_mv_ms"])
        times = [f"{line['ms']:.2f} ({dense / line['ms']:.2f}x)" for line in found]
        rows.append([dtype, f"{density:g}", f"{dense:.2f}", *times])
    names = {"macko": "canonical", "ec": "ec, 8 lanes", "ec_paper": "ec, paper, 4 bits"}
    return table(["dtype", "density", "dense", *(f"{names[name]}, {path}" for name, path in columns)], rows)


def canonical_lines(path: Path, **only: Any) -> dict[tuple[Any, ...], Line]:
    """Lines of benchmarks.canonical; "dense_us", "us": of the better dense product, and of spmv."""
    found = latest(path, "rows", "cols", "density", "delta_bits", "row_spread", "dtype", what="spmv", **only)
    for line in found.values():
        line["dense_us"] = min(line[name]["median_us"] for name in ("linear", "mv"))
        line["us"] = line["spmv"]["median_us"]
    return found


def canonical_table(path: Path) -> str:
    """Density 0.5, 4-bit deltas, both dtypes."""
    found = canonical_lines(path, density=0.5, delta_bits=4, row_spread=0.0)
    rows = []
    for r, c in dict.fromkeys(key[:2] for key in found):
        cells = [f"{r}x{c}"]
        sides = [found.get((r, c, 0.5, 4, 0.0, dtype)) for dtype in ("float16", "bfloat16")]
        for line in sides:
            cells += [f"{line['dense_us']:.1f}", f"{line['us']:.1f}", f"{line['speedup']:.2f}x"] if line else [""] * 3
        fp16 = sides[0]
        rows.append([*cells, f"{fp16['bytes'] / fp16['us'] / 1e6:.1f}" if fp16 else ""])
    return table(["shape", "dense fp16", "macko fp16", "", "dense bf16", "macko bf16", "", "TB/s fp16"], rows)


def canonical_others_table(path: Path) -> str:
    """What the other table leaves out."""
    rows = []
    for (r, c, density, bits, spread, _), line in canonical_lines(path, dtype="float16").items():
        if (density, bits, spread) != (0.5, 4, 0.0):
            rows.append([f"{r}x{c}", f"{density:g}", f"{bits}", "uneven" if spread else "even"])
            rows[-1] += [f"{line['dense_us']:.1f}", f"{line['us']:.1f}", f"{line['speedup']:.2f}x"]
    return table(["shape", "density", "delta bits", "rows", "dense", "macko", ""], rows)


def canonical_packing_table(path: Path) -> str:
    found = latest(path, "rows", "cols", what="pack").values()
    names = {
        "pack_gbps": "pack, one call with its wait",
        "unpack_gbps": "unpack without the look at its content (graph)",
        "unpack_checked_gbps": "unpack, one call with its wait",
        "check_gbps": "check, one call",
    }
    rows = [[title, *(f"{line[name]:.0f}" for line in found)] for name, title in names.items()]
    return table(["GB/s of dense fp16, density 0.5", *(f"{line['rows']}x{line['cols']}" for line in found)], rows)


def cpu_where(path: Path) -> str:
    """Of the lines that the tables of docs/cpu.md are made of."""
    run = {"op": "linear", "rows": 8192, "cols": 8192, "tokens": 1, "delta_bits": 4}
    lines = [line for clock in ("cpu", "wall") for line in latest(path, "dtype", clock=clock, **run).values()]
    commits = commits_of(lines)
    return f"{lines[-1]['cpu']}, torch {lines[-1]['torch']}, commit {commits}."


def torch_ms(line: Line) -> float:
    return min(line["torch_linear_ms"], line["torch_mv_ms"]) if line["tokens"] == 1 else line["torch_linear_ms"]


def cpu_table(path: Path) -> str:
    """One token of 8192x8192 on one core: ms, and times torch's better product."""
    columns = [(form, vectors) for form in ("macko", "bitmap") for vectors in ("avx512", "avx2")]
    run = {"op": "linear", "rows": 8192, "cols": 8192, "tokens": 1, "clock": "cpu"}
    found = latest(path, "dtype", "density", "format", "path", **run)
    rows = []
    for dtype, density in sorted({key[:2] for key in found}, key=lambda key: (key[0], -key[1])):
        lines = [found[dtype, density, form, vectors] for form, vectors in columns]
        times = [f"{line['ms']:.2f} ({torch_ms(line) / line['ms']:.2f}x)" for line in lines]
        rows.append([dtype, f"{density} ({1 - density:.0%})", f"{torch_ms(lines[0]):.2f}", *times])
    named = [f"{'canonical' if form == 'macko' else form} {vectors}" for form, vectors in columns]
    return table(["8192x8192", "density (sparse)", "torch", *named], rows)


def cpu_headline(path: Path) -> str:
    run = {"op": "linear", "rows": 8192, "tokens": 1, "clock": "cpu", "path": "avx512", "dtype": "bfloat16"}
    (line,) = latest(path, "rows", density=0.5, format="bitmap", **run).values()
    gain = f"**{line['speedup']:.2f}x** of torch's better product"
    return f"On one core of a Zen 5 CPU, bfloat16, 8192 x 8192, half of the weights zero: {gain}."


def cpu_times_tables() -> str:
    """Dense time over the bitmap's by tokens, of each vector path: the tables by which "auto" chooses on a CPU."""
    head = ["path", "dtype", "rows x cols", "density"]
    rows, counts = [], []
    for path in ("avx512", "avx2"):
        table_of = json.loads((TIMES / f"cpu_{path}.json").read_text())
        found: dict[tuple[Any, ...], dict[int, Line]] = {}
        for line in table_of["linear"]:
            key = (line["dtype"], line["rows"], line["cols"], line["density"])
            found.setdefault(key, {})[line["tokens"]] = line["us"]
        counts = sorted({count for by_tokens in found.values() for count in by_tokens})
        for (dtype, height, width, density), by_tokens in sorted(found.items(), key=str):
            if height * width < 1 << 22 or (density != 0.5 and height != 4096):
                continue
            cells = [f"{by_tokens[n]['dense'] / by_tokens[n]['bitmap']:.2f}x" if n in by_tokens else "" for n in counts]
            rows.append([path, dtype, f"{height} x {width}", str(density), *cells])
    return table([*head, *(f"{n} tokens" for n in counts)], rows)


def cpu_bandwidth_table() -> str:
    """One token at density 0.5: what each side reads, over what the CPU can read."""
    head = ["path", "dtype", "rows x cols", "reads", "dense", "bitmap", "over dense", "over dense at full bandwidth"]
    rows = []
    for path in ("avx512", "avx2"):
        table_of = json.loads((TIMES / f"cpu_{path}.json").read_text())
        gbps = table_of["bandwidth_gbps"]
        for line in table_of["linear"]:
            height, width, us = line["rows"], line["cols"], line["us"]
            if line["tokens"] != 1 or line["density"] != 0.5 or height * width < 1 << 22:
                continue
            size = getattr(torch, line["dtype"]).itemsize
            read = {name: held_bytes(name, height, width, 0.5, size) / us[name] / 1e3 for name in ("dense", "bitmap")}
            shares = [f"{read[name]:.0f} GB/s ({read[name] / gbps:.0%})" for name in ("dense", "bitmap")]
            full = height * width * size / gbps / 1e3 / us["bitmap"]
            gain = f"{us['dense'] / us['bitmap']:.2f}x"
            rows.append([path, line["dtype"], f"{height} x {width}", f"{gbps:.0f} GB/s", *shares, gain, f"{full:.2f}x"])
    return table(head, rows)


def cpu_host_table(path: Path) -> str:
    names = {
        "linear_us": "F.linear",
        "op_us": "torch.ops.macko.spmv",
        "ops_us": "macko.ops.spmv",
        "nn_linear_us": "nn.Linear",
        "sparse_linear_us": "SparseLinear",
    }
    found = latest(path, "mode", op="host").items()
    rows = [[mode, *(f"{line[name]:.1f}" for name in names)] for (mode,), line in found]
    return table(["us a call", *names.values()], rows)


def plot_densities(problems: dict[Key, dict[str, Line]], path: Path) -> None:
    import matplotlib.pyplot as plt

    shapes = [s for s in EIGHT if len(sweep(problems, s, "sell")) >= 5]
    figure, axes = plt.subplots(1, len(shapes), figsize=(5.5 * len(shapes), 4), sharey=True, squeeze=False)
    for axis, shape in zip(axes[0], shapes, strict=True):
        for name, label in LABELS.items():
            points = sweep(problems, shape, name)
            if len(points) >= 5:
                even = f"{label}, break-even {break_even(points)}"
                axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=even)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_title(f"{shape[0]} x {shape[1]}")
        axis.set_xlabel("density")
        axis.set_yscale("log", base=2)
        axis.set_yticks([0.25, 0.5, 1, 2, 4, 8], ["0.25x", "0.5x", "1x", "2x", "4x", "8x"])
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    axes[0][0].set_ylabel("speed-up over dense float16")
    save(figure, path)


def plot_floor(problems: dict[Key, dict[str, Line]], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4))
    for name in ("sell", "sell_chain", "sell_cp_async"):
        lines = [k[name] for key, k in problems.items() if key[3:] == ("uniform", "float16") and name in k]
        axis.scatter(
            [v["bytes"] / 1e6 for v in lines], [v["floor_us"] / v["median_us"] for v in lines], s=12, label=LABELS[name]
        )
    axis.set_xscale("log")
    axis.set_ylim(0, 1.05)
    axis.set_xlabel("MB read")
    axis.set_ylabel("share of the floor")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    save(figure, path)


SLIDE_SIDES = tuple(
    tuple(pair.split(" / "))
    for pair in ("dense / 2:4", "dense / 4:6", "dense / 6:8", "torch / dense", "torch / 2:4", "bf16 / 2:4")
)
SLIDE_SHOWN = {(1, "burst"), (16, "burst"), (128, "burst"), (512, "burst"), (8192, "sustained")}
SlideLines = dict[tuple[str, str, int, str], dict[str, Line]]


def load_slide(path: Path) -> tuple[SlideLines, list[Line]]:
    """Lines of benchmarks.slide by (type, shape, tokens, mode), then by side; and those of the quantiser alone."""
    linears: SlideLines = {}
    quantiser = []
    for line in map(json.loads, path.read_text().splitlines()):
        if line.get("mode") == "twin":
            continue
        if "shape" in line:  # the oldest lines have one mode at each number of tokens, and do not name it
            mode = line.get("mode", "sustained" if line["tokens"] > 512 else "burst")
            linears.setdefault((line["type"], line["shape"], line["tokens"], mode), {})[line["side"]] = line
        else:
            quantiser.append(line)
    return linears, quantiser


def slide_gains(linears: SlideLines, name: str, llama: bool) -> dict[Any, list[float]]:
    """Times of the first side over the second's, one a shape, by (tokens, mode, first, second)."""
    found: dict[Any, list[float]] = {}
    for (type_name, shape, tokens, mode), sides in linears.items():
        if type_name == name and shape.startswith("llama") == llama:
            for slow, fast in SLIDE_SIDES:
                if slow in sides and fast in sides:
                    found.setdefault((tokens, mode, slow, fast), []).append(sides[slow]["us"] / sides[fast]["us"])
    return found


def slide_table(linears: SlideLines, name: str, llama: bool = False) -> str:
    gains = slide_gains(linears, name, llama)
    rows = []
    # Numbers of tokens at which only ours were timed are the choice's.
    whole = {key[:2] for key in gains if "bf16" in key}
    for tokens, mode in sorted(whole, key=lambda key: (key[1], key[0])):
        cells = [gains.get((tokens, mode, *pair), []) for pair in SLIDE_SIDES]
        rows.append([f"{tokens}", mode, *(f"{geomean(c):.2f} ({min(c):.2f})" if c else "-" for c in cells)])
    return table(["tokens", "", *(f"{slow} / {fast}" for slow, fast in SLIDE_SIDES)], rows)


def slide_times_table(linears: SlideLines, name: str) -> str:
    """Microseconds of every side at a few numbers of tokens."""
    sides = ("dense", "2:4", "4:6", "6:8", "torch", "bf16")
    shapes = list(dict.fromkeys(shape for _, shape, _, _ in linears))  # in the order of the lines
    rows = [
        [shape, f"{tokens}", *(f"{found[side]['us']:.1f}" if side in found else "-" for side in sides)]
        for (type_name, shape, tokens, mode), found in sorted(
            linears.items(), key=lambda entry: (shapes.index(entry[0][1]), entry[0][2])
        )
        if type_name == name and (tokens, mode) in SLIDE_SHOWN
    ]
    return table(["linear", "tokens", *sides], rows)


def quantiser_table(lines: list[Line]) -> str:
    """The quantiser alone; "of floor": a kernel that only reads as many bytes, over it."""
    last = {(r["type"], r["cols"], r["tokens"], r["side"].split()[1]): r for r in lines}
    rows = []
    for (name, cols, tokens, lift), r in last.items():
        speed, share = f"{r['bytes'] / r['us'] / 1e3:.0f}", f"{r['floor_us'] / r['us']:.2f}"
        rows.append([name, f"{tokens} x {cols}", lift, f"{r['us']:.1f}", speed, share])
    return table(["to", "x", "lift", "us", "GB/s", "of floor"], rows)


def slide_twin_table(path: Path) -> str:
    """The dense GEMM alone beside CUTLASS's."""
    found: dict[tuple[str, int], dict[str, Line]] = {}
    for line in map(json.loads, path.read_text().splitlines()):
        if line.get("mode") == "twin":
            found.setdefault((line["shape"], line["tokens"]), {})[line["type"]] = line
    names = ("int8", "fp8")
    rows = []
    for (shape, tokens), of in found.items():
        ours = [(of[name]["us"], of[name]["cutlass_us"]) for name in names]
        rows.append([shape, f"{tokens}", *(f"{cell}" for us, d in ours for cell in (f"{us:.1f}", d, f"{d / us:.2f}"))])
    return table(["linear", "tokens", *(f"{name}{x}" for name in names for x in ("", ", CUTLASS", ", ratio"))], rows)


def slide_model_table(path: Path) -> str:
    """Prefill of benchmarks.slide_model: milliseconds, and the bfloat16 model's over them."""
    found: dict[tuple[str, int, int], dict[str, float]] = {}
    for line in map(json.loads, path.read_text().splitlines()):
        found.setdefault((line["model"], line["layers"], line["tokens"]), {})[line["side"]] = line["ms"]
    sides = list(dict.fromkeys(side for ms in found.values() for side in ms))
    rows = [
        [side, *(f"{ms[side]:.1f} ({ms['bf16'] / ms[side]:.2f}x)" if side in ms else "-" for ms in found.values())]
        for side in sides
    ]
    return table(["linears", *(f"{m}, {layers} blocks, {tokens} tokens" for m, layers, tokens in found)], rows)


def plot_slide(linears: SlideLines, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    colours = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:grey")
    for axis, name in zip(axes, ("int8", "fp8"), strict=True):
        gains = slide_gains(linears, name, False)
        for (slow, fast), colour in zip(SLIDE_SIDES, colours, strict=True):
            for mode, dashes in (("burst", "--"), ("sustained", "-")):
                at = sorted(key[0] for key in gains if key[1:] == (mode, slow, fast))
                axis.plot([*at], [geomean(gains[m, mode, slow, fast]) for m in at], dashes, color=colour, marker="o",
                          markersize=3, label=f"{slow} / {fast}" if mode == "burst" else None)  # fmt: skip
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_title(f"{name}: dashed burst, solid under load")
        axis.set_xlabel("tokens")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("time of the first over the second")
    axes[0].legend(fontsize=8)
    save(figure, path)


def load_engines(path: Path) -> list[Line]:
    """Lines of `macko bench --engine vllm`; of those that measured the same thing the last one counts. So does dense of
    the runs that the others are of, before the last one of dense."""
    found: dict[tuple[Any, ...], dict[str, Line]] = {}
    for line in map(json.loads, path.read_text().splitlines()):
        line["compiled"] = line["engine_args"].get("compilation_config", {}).get("mode") != 0
        line["ranks"] = line["engine_args"].get("tensor_parallel_size", 1)
        line["dtype"] = line["engine_args"]["dtype"]
        line.setdefault("weights_dtype", None)  # of lines from before there was one
        names = ("what", "batch", "prompt_tokens", "model", "compiled", "ranks", "source", "format", "dtype", "hidden",
                 "weights_dtype")  # fmt: skip
        found.setdefault(tuple(line[name] for name in names), {})[line["commit"]] = line
    last = [list(runs.values())[-1] for runs in found.values()]
    of_last = {line["commit"] for line in last}
    before = [list(runs.values())[:-1] for runs in found.values()]
    return [x for runs in before for x in runs if x["model"] == "dense" and x["commit"] in of_last] + last


def engines_where(lines: list[Line]) -> str:
    line = lines[-1]
    by: dict[str, list[Line]] = {}
    for each in lines:
        by.setdefault(each["engine_args"].get("attention_backend", "vLLM's default"), []).append(each)
    attention = ", ".join(f"{name} (commit {commits_of(of)})" for name, of in reversed(by.items()))
    return textwrap.fill(f"{line['device']}, vLLM {line['vllm']}, torch {line['torch']}. Attention: {attention}.", 110)


#: What the sides of --engine vllm are called, in the order of tables.
ENGINE_SIDES = {
    "dense": "dense",
    "macko": "macko",
    "fp8": "fp8 W8A8",
    "fp8-w8a16": "fp8 W8A16",
    "int4": "int4, groups of 128",
    "int4-marlin": "int4, by Marlin",
}


def engine_side(line: Line) -> str:
    kept = "" if line["format"] == "auto" or line["model"] != "macko" else f" {line['format']}"
    dtype = f", {line['dtype']}" if line["dtype"] != "float16" else ""
    before = f", {line['dtype']} that was {line['weights_dtype']}" if line["weights_dtype"] else ""
    return ENGINE_SIDES[line["model"]] + kept + (before or dtype)


def engines_table(lines: list[Line], what: str, ranks: int, compiled: bool, hidden: int = 4096) -> str:
    """A row a side: milliseconds, and times as fast as dense of the same dtype and run, by batch or by prompt."""
    by = "batch" if what == "decode" else "prompt_tokens"
    mine = [x for x in lines if (x["what"], x["ranks"], x["compiled"], x["hidden"]) == (what, ranks, compiled, hidden)]
    mine = [x for x in mine if (x["source"].startswith("random:") or ranks > 1) and x["ms"]]
    if not mine:
        return NO_LINES
    order = list(ENGINE_SIDES)
    sides = dict.fromkeys(
        (engine_side(x), x["dtype"])
        for x in sorted(mine, key=lambda x: (x["dtype"] != "float16", order.index(x["model"])))
    )
    columns = sorted({x[by] for x in mine})
    found = {(engine_side(x), x[by]): x for x in mine}
    base = {(x["dtype"], x[by], x["commit"]): x for x in mine if x["model"] == "dense"}  # hosts differ
    rows = []
    for side, dtype in sides:
        of_side = [x for x in mine if engine_side(x) == side]
        cells = [side, f"{of_side[-1]['peak_bytes'] / 1e9:.2f}"]
        for column in columns:
            line = found.get((side, column))
            dense = line and base.get((dtype, column, line["commit"]))
            ratio = f" ({dense['ms'] / line['ms']:.2f}x)" if line and dense and line["model"] != "dense" else ""
            cells.append(f"{line['ms']:.2f}{ratio}" if line else "-")
        rows.append(cells)
    name = "{} seq." if what == "decode" else "prompt of {}"
    return table(["ms", "GB" + (" a GPU" if ranks > 1 else ""), *(name.format(n) for n in columns)], rows)


#: What is loaded, by the width of its layers.
ENGINE_MODELS = {4096: "7B", 8192: "8 layers of 70B"}


def engines_loading_table(lines: list[Line]) -> str:
    """Seconds of the weights from the files to the GPUs, and over dense of the same model on as many."""
    mine = [x for x in lines if not x["source"].startswith("random:") and x["what"] == "decode"]
    if not mine:
        return NO_LINES
    found = {(x["hidden"], x["ranks"], x["model"], Path(x["source"]).name): x for x in mine}
    rows = []
    for (hidden, ranks, model, folder), line in sorted(found.items()):
        dense = found.get((hidden, ranks, "dense", "dense"))
        over = f"{line['weights_s'] / dense['weights_s']:.2f}x" if dense else "-"
        name = f"{model}, from a {'packed' if folder == 'sparse' else 'dense'} folder"
        size = f"{line['peak_bytes'] / 1e9:.2f}"
        rows.append([ENGINE_MODELS[hidden], str(ranks), name, f"{line['weights_s']:.2f}", over, size])
    return table(["model", "GPUs", "side", "weights, s", "over dense", "weights, GB a GPU"], rows)


def plot_engines(lines: list[Line], path: Path) -> None:
    """Times as fast as dense against the batch, on one GPU, without and with vLLM's compile."""
    import matplotlib.pyplot as plt

    modes = [mode for mode in (False, True) if any(x["compiled"] == mode for x in lines)]
    figure, panels = plt.subplots(1, len(modes), figsize=(4.2 * len(modes), 3.4), sharey=True, squeeze=False)
    for panel, mode in zip(panels[0], modes, strict=True):
        mine = [x for x in lines if (x["what"], x["ranks"], x["compiled"]) == ("decode", 1, mode) and x["ms"]]
        mine = [x for x in mine if x["source"].startswith("random:")]
        dense = {(x["dtype"], x["batch"], x["commit"]): x["ms"] for x in mine if x["model"] == "dense"}
        for label in dict.fromkeys(engine_side(x) for x in mine if x["model"] != "dense"):
            side = [(x, dense.get((x["dtype"], x["batch"], x["commit"]))) for x in mine if engine_side(x) == label]
            own = sorted((x["batch"], base / x["ms"]) for x, base in side if base)
            if own:
                panel.plot(*zip(*own, strict=True), marker="o", label=label)
        panel.axhline(1, color="black", linewidth=1)
        panel.legend(fontsize=7)
        panel.set_xscale("log", base=2)
        panel.set_xlabel("sequences at once")
        panel.set_title("compiled" if mode else "CUDA graphs, not compiled", fontsize=10)
    panels[0][0].set_ylabel("speed over dense")
    save(figure, path)


def transformers_table(path: Path, hidden: int = 4096) -> str:
    """Of benchmarks.engines: dense and packed, on one GPU and two."""
    found = latest(path, "what", "folder", "ranks", "rank", "batch", hidden=hidden)
    if not found:
        return NO_LINES
    rows = []
    batches = sorted({key[4] for key in found if key[0] == "decode"})
    for folder, ranks in sorted({(key[1], key[2]) for key in found}, key=lambda each: (each[1], each[0])):
        load = found["load", folder, ranks, 0, None]
        cells = [f"{folder}, {ranks} GPU{'s' if ranks > 1 else ''}", f"{load['held_bytes'] / 1e9:.2f}",
                 f"{(load['peak_bytes'] or 0) / 1e9:.2f}", f"{load['ms'] / 1e3:.2f}"]  # fmt: skip
        for batch in batches:
            own, dense = (found.get(("decode", name, ranks, 0, batch)) for name in (folder, "dense"))
            ratio = f" ({dense['ms'] / own['ms']:.2f}x)" if own and dense and folder != "dense" else ""
            cells.append(f"{own['ms']:.2f}{ratio}" if own else "-")
        rows.append(cells)
    head = ["", "GB a GPU", "peak of loading, GB", "loading, s", *(f"{batch} seq., ms" for batch in batches)]
    return table(head, rows)


#: Of continuous batching: what `graphs` of its lines means.
CONTINUOUS = {False: "", True: ", CUDA graphs"}


def continuous_table(path: Path) -> str:
    """Tokens a second of transformers' continuous batching, and over dense."""
    found = latest(path, "folder", "graphs", "batch", what="continuous")
    batches = sorted({key[2] for key in found})
    rows = []
    for graphs, folder in ((graphs, folder) for graphs in CONTINUOUS for folder in ("dense", "sparse")):
        of = {
            batch: found[folder, graphs, batch]["tokens_per_s"] for batch in batches if (folder, graphs, batch) in found
        }
        cells = [folder + CONTINUOUS[graphs]]
        for batch in batches:
            base = found.get(("dense", graphs, batch)) if folder != "dense" else None
            ratio = f" ({of[batch] / base['tokens_per_s']:.2f}x)" if base and batch in of else ""
            cells.append(f"{of[batch]:.0f}{ratio}" if batch in of else "-")
        rows += [cells] if of else []
    return table(["tokens/s", *(f"{n} request{'s' * (n > 1)}" for n in batches)], rows) if rows else NO_LINES


def shards_table(path: Path) -> str:
    """Of benchmarks.spmm at the shapes of shards: bytes over dense, and speed over dense by tokens."""
    lines = [x for x in map(json.loads, path.read_text().splitlines()) if "dense_us" in x]
    found = {(x["rows"], x["cols"], x["kernel"], x["tokens"]): x for x in lines}
    counts = sorted({x["tokens"] for x in lines})
    rows = []
    for shape in dict.fromkeys((x["rows"], x["cols"]) for x in lines):
        for kernel in ("sell", "tile"):
            if (first := found.get((*shape, kernel, counts[0]))) is None:
                continue
            of = [found.get((*shape, kernel, n)) for n in counts]
            share = first["held_bytes"] / (2 * shape[0] * shape[1])
            speeds = [f"{x['dense_us'] / x['median_us']:.2f}x" if x else "-" for x in of]
            rows.append([f"{shape[0]} x {shape[1]}", kernel, f"{share:.2f}", *speeds])
    return table(["rows x cols", "layout", "of dense bytes", *(f"{n} token{'s' * (n > 1)}" for n in counts)], rows)


def engines_parts(folder: Path) -> dict[str, Callable[[], str]]:
    """The tables of docs/engines.md, and its plot; those whose lines are not there say so."""
    vllm_path, transformers, shards = (folder / f"{name}.jsonl" for name in ("vllm", "transformers", "shards"))
    two_path, two_transformers = H100 / "vllm.jsonl", H100 / "transformers.jsonl"
    vllm, two = (load_engines(path) if path.exists() else [] for path in (vllm_path, two_path))
    parts = {
        "engines where": (vllm_path, lambda: engines_where(vllm)),
        "engines plot": (vllm_path, lambda: "![speed over dense by sequences at once](images/engines.svg)"),
        "engines loading": (vllm_path, lambda: engines_loading_table([x for x in vllm if x["ranks"] == 1])),
        "engines two where": (two_path, lambda: engines_where(two)),
        "engines two": (two_path, lambda: engines_table(two, "decode", 2, False)),
        "engines two prefill": (two_path, lambda: engines_table(two, "prefill", 2, False)),
        "engines two 70b": (two_path, lambda: engines_table(two, "decode", 2, False, 8192)),
        "engines two 70b prefill": (two_path, lambda: engines_table(two, "prefill", 2, False, 8192)),
        "engines two loading": (two_path, lambda: engines_loading_table(two)),
        "engines transformers": (two_transformers, lambda: transformers_table(two_transformers)),
        "engines transformers 70b": (two_transformers, lambda: transformers_table(two_transformers, 8192)),
        "engines continuous": (transformers, lambda: continuous_table(transformers)),
        "engines shards": (shards, lambda: shards_table(shards)),
    }
    for what, mode in ((what, mode) for what in ("decode", "prefill") for mode in (False, True)):
        name = f"engines {what}{' compiled' if mode else ''}"
        parts[name] = (vllm_path, partial(engines_table, vllm, what, 1, mode))
    if vllm:
        plot_engines(vllm, IMAGES / "engines.svg")
    return {name: make if path.exists() else lambda: NO_LINES for name, (path, make) in parts.items()}


def load_quality(path: Path, what: str = "quality") -> list[Line]:
    """Lines of benchmarks.quality of such a model, dense first; of those of the same variant the last one counts."""
    keys = ("name", "method", "sparsity", "pattern", "reconstruct", "auto", "seed")
    lines = [line for line in map(json.loads, path.read_text().splitlines()) if line["what"] == what]
    found = {tuple(line[key] for key in keys): line for line in lines}
    return sorted(found.values(), key=lambda line: (line["seed"], line["name"] != "dense"))


def quality_where(lines: list[Line]) -> str:
    line = lines[0]
    commits = commits_of(lines)
    return textwrap.fill(
        f"A Llama of {line['weights'] / 1e6:.1f} million weights after {line['trained_tokens'] / 1e6:.0f} million "
        f"tokens; perplexity {line['perplexity']:.2f} on {line['tokens']} held-out tokens of "
        f"{line['characters_a_token']:.1f} characters, in windows of {line['length']}; calibrated on "
        f"{line['calibration_tokens']} tokens; fitted at a rate of {line['lr']}. {line['device']}, "
        f"torch {line['torch']}, commit {commits}.",
        110,
    )


def zeros_of(line: Line) -> str:
    return str(line["pattern"] or (f"{line['sparsity']:.0%}" if line["sparsity"] else ""))


def lost(line: Line) -> float:
    """Of perplexity, over the dense model's."""
    return float(line["perplexity_ratio"]) - 1


BLOCK = "sparsegpt, fitted by block"
#: What the library is to reach: so much of the other's loss at most. (model, zeros, other model, its zeros, most)
BARS = [
    (BLOCK, "50%", "sparsegpt", "50%", 0.5),
    (BLOCK, "50%", "wanda", "50%", 0.4),
    (BLOCK, "70%", "sparsegpt", "70%", 0.5),
    (BLOCK, "2:4", "sparsegpt", "2:4", 0.5),
    ("sparsegpt, auto, fitted", "50%", "sparsegpt", "50%", 0.5),
    ("sparsegpt, auto, fitted", "50%", "wanda", "50%", 0.4),
    ("sparsegpt, fitted", "50%", "sparsegpt", "50%", 0.5),
    ("sparsegpt, fitted", "50%", "wanda", "50%", 0.4),
    ("sparsegpt, fitted", "70%", "sparsegpt", "70%", 0.5),
    ("sparsegpt, fitted", "2:4", "sparsegpt", "2:4", 0.5),
    (f"{BLOCK}, int8", "50%", BLOCK, "50%", 1.02),
    (f"{BLOCK}, int4", "50%", "int3", "", 1.0),
    (f"{BLOCK}, int4", "50%", "GPTQ int3", "", 1.0),
    ("sparsegpt, fitted, int8", "50%", "sparsegpt, fitted", "50%", 1.02),
    ("sparsegpt, auto, fitted, int4", "50%", "GPTQ int3", "", 1.0),
    ("sparsegpt, auto", "50%", "sparsegpt", "50%", 1.0),
    ("sparsegpt, auto", "70%", "sparsegpt", "70%", 1.0),
    ("sparsegpt, auto, fitted", "50%", "sparsegpt, fitted", "50%", 1.0),
    ("sparsegpt, auto, fitted by block", "50%", BLOCK, "50%", 1.0),
    ("sparsegpt, auto, fitted by block", "70%", BLOCK, "70%", 1.0),
]


def quality_bars_table(lines: list[Line]) -> str:
    """Each bar: with each seed what it is, and whether it holds with all of them."""
    found = {(line["name"], zeros_of(line), line["seed"]): line for line in lines}
    seeds = sorted({line["seed"] for line in lines})
    rows = []
    for name, zeros, other, other_zeros, most in BARS:
        pairs = [(found.get((name, zeros, s)), found.get((other, other_zeros, s))) for s in seeds]
        shares = [lost(own) / lost(of) for own, of in pairs if own and of]
        holds = "not measured" if not shares else "yes" if max(shares) <= most else "**no**"
        measured = ", ".join(f"{share:.3f}" for share in shares)
        kl = ", ".join(f"{own['kl'] / of['kl']:.3f}" for own, of in pairs if own and of)
        rows.append([f"{name}, {zeros}", f"{other}, {other_zeros}".rstrip(", "), f"{most:g}", measured, holds, kl])
    return table(["loss of", "over that of", "at most", "measured, by seed", "holds", "in KL"], rows)


def quality_methods_table(lines: list[Line]) -> str:
    """Perplexity over dense's: a row a mask, a column a way to fit what is left."""
    found = {(zeros_of(line), line["name"]): line["perplexity_ratio"] for line in lines if not line["seed"]}
    fits = {"": "as pruned", ", fitted": "fitted", ", fitted by block": "fitted by block"}
    rows = []
    for zeros in ("30%", "50%", "70%", "2:4"):
        for method in ("magnitude", "wanda", "sparsegpt", "sparsegpt, auto"):
            cells = [found.get((zeros, method + fit)) for fit in fits]
            if any(cells):
                rows.append([zeros, method, *(f"{ratio:.4f}" if ratio else "" for ratio in cells)])
    return table(["zeros", "chosen by", *fits.values()], rows)


def quality_all_table(lines: list[Line]) -> str:
    rows = []
    for line in sorted(lines, key=lambda line: (-line["bytes"], line["perplexity_ratio"])):
        if not line["seed"]:
            rows.append(
                [f"{line['name']}, {zeros_of(line)}".rstrip(", "), f"{line['bytes']:.2f}",
                 f"{line['perplexity_ratio']:.4f}", f"{line['kl']:.4f}", f"{line['agreement']:.1%}",
                 f"{line['seconds']:.0f}"]
            )  # fmt: skip
    head = ["model", "bytes a weight", "perplexity over dense's", "KL, nats", "same likeliest token", "seconds to make"]
    return table(head, rows)


def whole_model_table(path: Path) -> str:
    """What the blocks that benchmarks.models pruned say of the whole model."""
    rows = []
    for line in {line["step"]: line for line in map(json.loads, path.read_text().splitlines())}.values():
        if "of_blocks" in line:
            minutes = line["seconds"] * line["of_blocks"] / line["blocks"] / 60
            rows.append(
                [line["step"].rpartition(f", {line['blocks']} blocks")[0], str(line["tokens"]),
                 f"{line['seconds']:.1f}", f"{minutes:.1f}", f"{line['peak_bytes'] / 1e9:.1f}"]
            )  # fmt: skip
    head = ["method", "calibration tokens", "seconds for two blocks", "minutes for all 32", "peak GPU memory, GB"]
    return table(head, rows) if rows else NOT_MEASURED.format("models")


#: In the place of a table without lines; and where its page has the command already.
NOT_MEASURED = "Not measured yet: `python -m benchmarks.{}` writes the lines."
NO_LINES = "Not measured yet."
#: What the plane shows of what was pruned and not rounded, with a marker each.
DRAWN = {"magnitude": "v", "wanda": "^", "sparsegpt": "o", BLOCK: "*", "sparsegpt, auto, fitted by block": "P"}


def encoder_table(lines: list[Line]) -> str:
    rows = [
        [f"{line['name']}, {zeros_of(line)}".rstrip(", "), f"{line['bytes']:.2f}", f"{line['cosine']:.4f}",
         f"{line['rank_correlation']:.4f}"]
        for line in sorted(lines, key=lambda line: (-line["bytes"], -line["cosine"])) if not line["seed"]
    ]  # fmt: skip
    return table(["model", "bytes a weight", "cosine to dense", "rank correlation"], rows)


def kind_of(line: Line) -> tuple[str, str]:
    """What a line of quality is drawn as, and its marker; "" where it is not."""
    if not line["rounding"]:
        return (line["name"], DRAWN.get(line["name"], "o")) if line["name"] in ("dense", *DRAWN) else ("", "")
    if line["sparsity"] or line["pattern"]:
        return ("pruned, fitted and rounded", "X") if line["reconstruct"] else ("pruned and rounded at once", "x")
    kinds = {"nearest": ("rounded to nearest", "D"), "at once": ("GPTQ", "s")}
    return kinds.get(line["rounding"], ("rounded, fitted by block", "p"))


def speeds_of(bench: list[Line]) -> dict[float, float]:
    """Tokens a second of one sequence by the share of zeros, in bfloat16, held as by default."""
    wanted = ("decode", 1, "bfloat16", None)
    names = ("what", "batch", "dtype", "values")
    return {line["sparsity"]: 1000 / line["ms"] for line in bench if tuple(map(line.get, names)) == wanted}


def plot_quality(lines: list[Line], bench: list[Line], path: Path) -> None:
    """Quality lost against bytes a weight; as large as it is fast, where that was measured."""
    import matplotlib.pyplot as plt

    speeds, least = speeds_of(bench), 1e-4  # what loses less is drawn there
    figure, axis = plt.subplots(figsize=(9, 5.5))
    drawn: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        if not line["seed"] and kind_of(line)[0]:
            drawn.setdefault(kind_of(line), []).append(line)
    for (kind, marker), own in drawn.items():
        points = [(line["bytes"], max(least, lost(line))) for line in own]
        known = [not line["rounding"] and not line["pattern"] and speeds.get(line["sparsity"] or 0.0) for line in own]
        sizes = [0.4 * speed if speed else 25 for speed in known]
        x, y = zip(*points, strict=True)
        axis.scatter(x, y, s=sizes, marker=marker, alpha=0.8, label=kind)
        for line, at in zip(own, points, strict=True):
            bits = line["name"].split()[-1] if line["rounding"] else ""
            text = f"{bits} {zeros_of(line)}".strip()
            axis.annotate(text, at, xytext=(5, 3), textcoords="offset points", fontsize=6)
    axis.set_yscale("log")
    axis.set_xlabel("bytes a weight (left is smaller)")
    axis.set_ylabel("perplexity over dense's, less 1 (down is better)")
    axis.grid(alpha=0.3)
    legend = axis.legend(fontsize=7)
    handles: Any = legend.legend_handles
    for handle in handles:
        handle.set_sizes([25])
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    # No date and fixed ids: the same lines give the same file.
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def fill(document: Path, parts: dict[str, Callable[[], str]]) -> None:
    """Replaces what is between the comments of each part that the document has."""
    text = document.read_text()
    if unknown := {*re.findall(r"<!-- report: (.+?) -->", text)} - {*parts}:
        raise ValueError(f"{document} asks for {sorted(unknown)}, which no report makes")
    if torn := [
        line
        for line in text.splitlines()
        if re.search(r"report: .*-->|<!-- report:|<!--$", line) and not line.startswith("<!-- report: ")
    ]:
        raise ValueError(f"{document}: a comment that names a part has a line of its own, not {torn[0]!r}")
    for name, make in parts.items():
        pattern = re.compile(rf"(<!-- report: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if pattern.search(text):
            content = make()
            text = pattern.sub(lambda found, content=content: f"{found[1]}{content}\n{found[2]}", text)  # type: ignore[misc]
    document.write_text(text)


def slide_parts(folder: Path) -> dict[str, Callable[[], str]]:
    """The tables of docs/slide.md, and its plot; nothing without lines."""
    path = folder / "slide.jsonl"
    if not path.exists():
        return {}
    slide, quantiser = load_slide(path)
    plot_slide(slide, IMAGES / "slide_tokens.svg")
    parts: dict[str, Callable[[], str]] = {
        "slide where": lambda: where([*(line for sides in slide.values() for line in sides.values()), *quantiser]),
        "slide twin": lambda: slide_twin_table(path),
        "slide quantiser": lambda: quantiser_table(quantiser),
        "slide model": lambda: slide_model_table(folder / "slide_model.jsonl"),
    }
    for name in ("int8", "fp8", "bf16"):
        parts[f"slide llama {name}"] = partial(slide_table, slide, name, llama=True)
        parts[f"slide {name}"] = partial(slide_table, slide, name)
        parts[f"slide {name} us"] = partial(slide_times_table, slide, name)
    return parts


def quality_parts(folder: Path, bench: list[Line]) -> dict[str, Callable[[], str]]:
    """The tables of docs/quality.md, and its plot; those whose lines are not there say so."""
    # Of another model: a loss is over the dense one of its own lines, so the two are never read as one.
    quality, own = folder / "quality.jsonl", folder.parent / "cpu/quality.jsonl"
    measured = load_quality(quality) if quality.exists() else []
    encoder = load_quality(own, "embeddings") if own.exists() else []
    if measured:
        plot_quality(measured, bench, IMAGES / "quality.svg")
    none = NOT_MEASURED.format("quality OUT")
    return {
        "quality where": lambda: quality_where(measured) if measured else none,
        "quality 7b": lambda: whole_model_table(folder / "models.jsonl"),
        "quality encoder": lambda: encoder_table(encoder) if encoder else none,
        "quality bars": lambda: quality_bars_table(measured) if measured else none,
        "quality methods": lambda: quality_methods_table(measured) if measured else none,
        "quality all": lambda: quality_all_table(measured) if measured else none,
        "quality plot": lambda: "![quality lost by bytes a weight](images/quality.svg)" if measured else none,
    }


def main() -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "macko"
    path = ROOT / "benchmarks" / "results" / "h200" / "spmv.jsonl"
    h100 = H100 / "spmm.jsonl"
    problems = load(path)
    plot_densities(problems, IMAGES / "spmv_density.svg")
    plot_floor(problems, IMAGES / "spmv_floor.svg")
    by_shape = load_tokens(path.parent / "spmm.jsonl")
    tokens = {key: {shape: x for shape, x in of.items() if shape in EIGHT} for key, of in by_shape.items()}
    lossless = path.parent / "lossless.jsonl"
    plot_tokens(tokens, IMAGES / "spmm_tokens.svg")
    compiled = load_bench(path.parent / "bench.jsonl")
    bench = [line for line in compiled if line["compile"] == "default"]
    at_most = [line for line in compiled if line["compile"] == "max" and line["what"] == "decode"]
    plot_bench(bench, IMAGES / "llama.svg")
    cpu, canonical = path.parent.parent / "cpu" / "kernels.jsonl", path.parent / "canonical.jsonl"
    parts: dict[str, Callable[[], str]] = {
        "spmv where": lambda: where(line for kernels in problems.values() for line in kernels.values()),
        "spmv eight": lambda: shapes_table(problems, EIGHT),
        "spmv paper": lambda: shapes_table(problems, sorted(uniform(problems, 0.5), key=lambda s: s[0] * s[1])),
        "spmv others": lambda: others_table(problems, path.parent / "published.jsonl"),
        "spmv densities": lambda: densities_table(problems),
        "spmm tokens": lambda: tokens_table(tokens),
        "spmm many tokens": lambda: many_tokens_table(by_shape),
        "sparse11 products": lambda: sparse11_table(load_tokens(path.parent / "spmm.jsonl", "bfloat16", "magnitude")),
        "h100 where": lambda: where(map(json.loads, h100.read_text().splitlines())),
        "h100 products": lambda: sparse11_table(load_tokens(h100, "bfloat16", "magnitude")),
        "h100 pace": lambda: pace_table(H100),
        "load where": lambda: where(map(json.loads, (H100 / "load.jsonl").read_text().splitlines())),
        "load": lambda: load_table(H100 / "load.jsonl"),
        "load spread": lambda: load_spread(H100 / "load.jsonl"),
        "load rows": lambda: load_table(
            H100 / "load_rows.jsonl", ("tile", "tile_rows", "sparse11", "sparse11_rows", "dense12", "dense12_rows")
        ),
        "load shapes": lambda: load_shapes_table(H100 / "load.jsonl", (4096, 8192)),
        "load l2": lambda: l2_table(
            H100 / "l2.csv", ["the library's kernel", "tile, no output tile split", "tile, 58 of 256 split"]
        ),
        "sparse11 listed": lambda: listed_table(path.parent / "listed.jsonl"),
        "eight products": lambda: eight_table(path.parent / "spmm.jsonl"),
        "lossless products": lambda: lossless_table(load_tokens(path.parent / "spmm.jsonl", "bfloat16")),
        "rivals": lambda: rivals_table(path.parent / "spmm.jsonl"),
        "rivals plot": lambda: plot_rivals(path.parent / "spmm.jsonl", IMAGES / "rivals.svg"),
        "lossless where": lambda: bench_where(load_bench(lossless)) if lossless.exists() else "",
        "lossless model": lambda: lossless_model_table(lossless),
        "models": lambda: models_table(path.parent / "models.jsonl"),
        "sanitizers": lambda: sanitize_table(*(folder / "sanitize.jsonl" for folder in (path.parent, H100))),
        "headline": lambda: headline_table(bench),
        "bench summary": lambda: bench_summary(bench),
        "bench max": lambda: bench_summary(at_most),
        "bench where": lambda: bench_where(bench),
        "bench logits": lambda: logits_table(bench),
        "bench profile": lambda: profile_table(load_bench(path.parent / "profile.jsonl")),
        "ec where": lambda: where(ec_lines(path.parent / "ec.jsonl").values()),
        "ec": lambda: ec_table(path.parent / "ec.jsonl"),
        "ec packing": lambda: ec_packing_table(path.parent / "ec.jsonl"),
        "ec pairs": lambda: pairs_table(path.parent / "pairs.jsonl"),
        "ec cpu": lambda: ec_cpu_table(cpu),
        "canonical where": lambda: where(canonical_lines(canonical).values()),
        "canonical": lambda: canonical_table(canonical),
        "canonical others": lambda: canonical_others_table(canonical),
        "canonical packing": lambda: canonical_packing_table(canonical),
        "cpu where": lambda: cpu_where(cpu),
        "cpu headline": lambda: cpu_headline(cpu),
        "cpu": lambda: cpu_table(cpu),
        "cpu times": cpu_times_tables,
        "cpu bandwidth": cpu_bandwidth_table,
        "cpu decode": lambda: cpu_decode_table(cpu.parent / "decode.jsonl"),
        "cpu host": lambda: cpu_host_table(cpu),
    }
    parts |= slide_parts(path.parent) | quality_parts(path.parent, bench)
    parts |= engines_parts(path.parent)
    if (variants := path.parent / "variants.jsonl").exists():
        parts["spmv variants"] = lambda: variants_table(variants)
    for document in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        fill(document, parts)


if __name__ == "__main__":
    main()
