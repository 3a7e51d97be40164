"""Lines under benchmarks/results, as the tables (benchmarks/report.py) and plots (benchmarks/plots.py) take them.

Of lines that measured the same thing the last one counts. `against` compares lines, and `wide` makes one of those that
a row of a table is made of. Below that is a function for each kind of line, in the order of the docs.
"""

from __future__ import annotations

import csv
import json
import math
import re
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import EIGHT
from macko.measure.rivals import RIVALS as RIVAL_LAYERS

ROOT = Path(__file__).resolve().parent.parent
TIMES = ROOT / "macko" / "choose" / "times"
CPU, H100, H200 = (ROOT / "benchmarks" / "results" / name for name in ("cpu", "h100-80gb-hbm3", "h200"))
FORMATS = ROOT / "benchmarks" / "results" / "formats.jsonl"

Line = dict[str, Any]
Lines = list[Line]


def fits(line: Line, only: dict[str, Any]) -> bool:
    """Whether a line has these values: one, one of a set, or (`...`) any."""

    def fit(value: Any, wanted: Any) -> bool:
        return value is not None if wanted is ... else value in wanted if isinstance(wanted, set) else value == wanted

    return all(fit(line.get(name), wanted) for name, wanted in only.items())


def enrich(line: Line) -> Line:
    """With what tables show besides: GB of bytes, times in us, and the speed-up where dense was timed beside it."""
    for name, value in [*line.items()]:
        if isinstance(value, dict) and "median_us" in value:
            line[f"{name}_us"] = value["median_us"]
        if name.endswith("bytes") and isinstance(value, int):
            line[name.removesuffix("bytes") + "gb"] = value / 1e9
    if dense := line.get("best_dense_us", line.get("dense_us")):
        line["gain"] = dense / line["median_us"]
    return line


def newest(lines: Iterable[Line], *key: str) -> Lines:
    """Of lines alike in these fields the last one; 0 and a field that is not there are alike."""
    found: dict[Any, Line] = {}
    for line in lines:
        found[tuple(line.get(name) or None for name in key)] = line
    return [*found.values()]


def read(path: Path, /, *key: str, **only: Any) -> Lines:
    """Lines of a file that fit `only`, of those alike in `key` the last one; none where there is no file."""
    lines = [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
    found = [enrich(line) for line in lines if fits(line, only)]
    return newest(found, *key) if key else found


def ranked(lines: Lines, *fields: str, **orders: Iterable[Any]) -> Lines:
    """Sorted by fields, "-field" downwards; before that by `orders`, lists of a field's values: others are left out."""
    places = {name: {value: place for place, value in enumerate(order)} for name, order in orders.items()}

    def key(line: Line) -> list[Any]:
        by = [-line[name[1:]] if name.startswith("-") else line[name] for name in fields]
        return [*(place[line[name]] for name, place in places.items()), *by]

    return sorted((x for x in lines if all(x[name] in place for name, place in places.items())), key=key)


def against(lines: Lines, base: Line, *on: str, value: str = "ms", of_base: str = "") -> Lines:
    """Adds to a line the fields of the fastest one that fits `base` and is alike in `on`, as dense_*, and how many
    times as fast it is: as gain, and where it is no base as faster. of_base: the base's field, if it is not `value`."""
    found: dict[Any, Line] = {}
    of_base = of_base or value
    for line in lines:
        key = tuple(line.get(name) for name in on)
        if fits(line, base) and (key not in found or line[of_base] < found[key][of_base]):
            found[key] = line
    for line in lines:
        if dense := found.get(tuple(line.get(name) for name in on)):
            line |= {f"dense_{name}": dense[name] for name in dense if not name.startswith("dense_")}
            line["gain"] = dense[of_base] / line[value]
            line |= {} if fits(line, base) else {"faster": line["gain"]}
    return lines


def geomean(values: Iterable[float]) -> float:
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs))


def wide(lines: Lines, on: str, name: str, form: str = "{:.2f}x ({:.2f}x)") -> Lines:
    """One line of those for which the template `on` gives the same text, with the fields of the last of them.

    For each NAME that the template `name` gives (. and : are dropped) it has "NAME field", from the last line of that
    name; "NAME gain", the geometric mean of the speed-ups; "NAME mean", that and the least; and "NAME n", of how many.
    The names are its "@".
    """
    rows: dict[str, Lines] = {}
    for line in lines:
        rows.setdefault(show(on, line), []).append(line)
    made = []
    for group in rows.values():
        of: dict[str, Lines] = {}
        for line in group:
            of.setdefault(re.sub("[.:]", "", show(name, line)), []).append(line)
        row: Line = {**group[-1], "@": [*of]}
        for title, found in of.items():
            row |= {f"{title} {field}": value for field, value in found[-1].items()} | {f"{title} n": len(found)}
            if gains := [line["gain"] for line in found if "gain" in line]:
                row |= {f"{title} gain": geomean(gains), f"{title} mean": form.format(geomean(gains), min(gains))}
        made.append(row)
    return made


def show(template: str, line: Line, none: str = "") -> str:
    """The template with the line's fields, or `none`; what is in [brackets] only where the line has its fields."""

    def filled(part: str, otherwise: str) -> str:
        try:
            return part.format_map(line)
        except (KeyError, TypeError):  # no such field, or None
            return otherwise

    return filled(re.sub(r"\[(.*?)\]", lambda found: filled(found[1], ""), template), none)


# One token, and a few: benchmarks.spmv and benchmarks.spmm.


def spmv(**only: Any) -> Lines:
    """Over the better dense product."""
    on = ("rows", "cols", "density", "mask", "dtype")
    lines = read(H200 / "spmv.jsonl", *on, "kernel", **only)
    for line in lines:
        line |= {"matrix": (line["rows"], line["cols"]), "problem": tuple(line[name] for name in on)}
        line["share"] = round(line["floor_us"] / line["median_us"], 2) if "floor_us" in line else None
        line["value_bytes"] = line["held_bytes"] / line["stored"] if "held_bytes" in line else None
    lines = ranked(lines, problem=dict.fromkeys(line["problem"] for line in lines))
    return against(lines, {"kernel": {"dense_linear", "dense_mv"}}, "problem", value="median_us")


def products(dtype: Any = "float16", path: Path = H200 / "spmm.jsonl", *key: str, **only: Any) -> Lines:
    """Speed-ups of benchmarks.spmm, by tokens."""
    lines = [x for x in read(path, dtype=dtype, dense_us=..., **only) if x["tokens"]]
    lines = ranked(newest(lines, "density", "tokens", "kernel", "rows", "cols", "dtype", *key), "tokens")
    # What a sell layer does where only its two ways were timed: the stream, and from 32 tokens on dense rows.
    timed = {(line["density"], line["tokens"]) for line in lines if line["kernel"] == "sell"}
    untimed = [line for line in lines if (line["density"], line["tokens"]) not in timed]
    ways = {True: "stream", False: "tiles"}
    return lines + [{**x, "kernel": "sell"} for x in untimed if x["kernel"] == ways[x["tokens"] < 32]]


def tokens_of(lines: Lines) -> Lines:
    """A row a number of tokens, by kernel and density."""
    return wide(lines, "{tokens}", "{kernel} {density:.0%}")


def eight_shapes() -> Lines:
    return [line for line in products() if (line["rows"], line["cols"]) in EIGHT]


def listed() -> Lines:
    """sparse11 by the share of its values that are listed, and tile, over dense bfloat16 of the same run."""
    lines = products("bfloat16", H200 / "listed.jsonl", "mask", mask=...)
    for line in lines:
        line["listed"] = line["mask"].partition(", ")[2].removesuffix(" listed") or "0"
    return wide(lines, "{listed}", "{kernel} {tokens}")


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


def rivals(path: Path = H200 / "spmm.jsonl") -> Lines:
    """A row a kernel of RIVALS, in bfloat16, by tokens; none without torch's."""
    lines = products("bfloat16", path, tokens={1, 8, 16, 64})
    for line in lines:
        line["label"] = RIVALS.get((line["density"], line["kernel"]))
    lines = ranked(lines, label=RIVALS.values())
    rows = wide(lines, "{label}", "{tokens}")
    for row in rows:
        of = [line for line in lines if line["label"] == row["label"]]
        row["size"] = sum(line["held_bytes"] for line in of) / sum(line["rows"] * line["cols"] for line in of)
        row["off"] = max(line.get("error", 0) for line in of) or None
    return rows if any("fp8" in line["kernel"] or "int4" in line["kernel"] for line in lines) else []


def pace() -> Lines:
    """One token by tile on an H100: weights asked for as an H200's memory brings them, and as its own does."""
    ways = {"tile_alone": "launched alone", "tile": "back to back"}
    lines = [
        {**line, "way": ways[line["kernel"]], "pace": pace}
        for pace, file in {"an H200's pace": "spmm.jsonl", "its own pace": "pace.jsonl"}.items()
        for line in read(H100 / file, kernel={*ways}, dtype="float16", tokens=1, density=0.5)
    ]
    return wide(ranked(lines, "rows", "cols", way=ways.values()), "{way}, {pace}", "{rows} x {cols}")


def rings() -> Lines:
    """A few tokens by the kernel of GPUs without wgmma; where only some of the five shapes ran, of how many."""
    lines = read(H100 / "rings.jsonl", "kernel", "tokens", "density", "rows", "cols", "dtype")
    rows = ranked(wide(lines, "{tokens}", "{kernel} {dtype}"), "tokens")
    for row in rows:
        for name in row["@"]:
            if row[f"{name} n"] < 5 and f"{name} mean" in row:
                row[f"{name} mean"] = f"{row[f'{name} gain']:.2f}x of {row[f'{name} n']}"
    return rows


def experts() -> Lines:
    """A stack in dense12 over torch's grouped product of the dense one, by model and matrix, and a module whole."""
    lines = [
        line | {"shape": f"{line['rows']} x {line['cols']}" if "rows" in line else "whole module"}
        for line in read(H100 / "experts.jsonl", "what", "model", "rows", "cols", "batch", "kernel")
        if line["kernel"] != "sparse11"  # of a mask that auto leaves
    ]
    gains = against(lines, {"kernel": "grouped_mm"}, "model", "shape", "batch", value="median_us")
    whole = read(H100 / "experts.jsonl", "model", "batch", "kernel", "commit", what="whole")
    whole = against(whole, {"kernel": "vllm"}, "model", "batch", "commit", value="median_us")
    whole = newest([line for line in whole if "gain" in line], "model", "batch", "kernel")
    gains += [line | {"shape": "whole module, over vLLM's"} for line in whole]
    return wide(gains, "{model} {shape}", "{kernel} {batch}")


def experts_generate() -> Lines:
    """`generate` of a mixture in dense12, by how it is compiled, over the dense one; peaks in GB."""
    lines = read(H100 / "bench.jsonl", "compile", "what", "batch", "model", source="random:qwen3-30b", ms=...)
    for line in lines:
        is_prompt = line["what"] == "prefill"
        line["title"] = f"a prompt of {line['prompt_tokens']}" if is_prompt else f"{line['batch']} at once"
        line["peak_gb"] = line["peak_bytes"] / 1e9
    return wide(against(lines, {"model": "dense"}, "compile", "title"), "{title}", "{model} {compile}")


def planes_load() -> Lines:
    """Seconds of reading models of so many blocks onto a GPU, from dense files and from packed ones."""
    lines = read(H100 / "planes.jsonl", "blocks", "step")
    return wide([line | {"gb": line["file_bytes"] / 1e9} for line in lines], "{blocks}", "{step}")


def diffusion(what: str) -> Lines:
    """Sizes, steps, or ways of offloading, of diffusion transformers; bytes in GB, seconds in ms."""
    path = ROOT / "benchmarks/results/code/diffusion.jsonl" if what == "sizes" else H100 / "diffusion.jsonl"
    lines = []
    for line in read(path, "model", *(("layers",) if what != "sizes" else ()), *_DIFFUSION.get(what, ()), what=what):
        scaled = {key: value / 1e9 for key, value in line.items() if key in _BYTES and value}
        scaled |= {f"{key}_ms": line[key] * 1e3 for key in ("s", "dense_s") if key in line}
        lines.append(line | scaled)
    return wide(lines, "{model} {way}", "{kind}") if what == "offload" else lines


_DIFFUSION = {"offload": ("way", "kind")}
_BYTES = ("bytes", "dense_bytes", "dense", "packed", "pinned_dense", "pinned_packed", "weights_peak_bytes")


def one_gpu() -> Lines:
    """A model that a GPU holds in 12 bits only; bytes in GB."""
    sizes = ("bytes", "peak_bytes", "dense_bytes")
    lines = read(H100 / "one_gpu.jsonl", "source", "batch")
    return [line | {name.replace("bytes", "gb"): line[name] / 1e9 for name in sizes} for line in lines]


# Under load: benchmarks.load.


def load(name: str = "load", folder: Path = H100, **only: Any) -> Lines:
    """The better dense is the faster one of the matrix before it was pruned and after."""
    return read(folder / f"{name}.jsonl", "dtype", "tokens", "kernel", "rows", "cols", **only)


def load_commit(folder: Path) -> str:
    """The commit that was measured last."""
    return next((line["commit"] for line in reversed(read(folder / "load.jsonl"))), "")


def load_tokens(name: str = "load", folder: Path = H100, **only: Any) -> Lines:
    return ranked(wide(load(name, folder, **only), "{dtype} {tokens}", "{kernel}"), "dtype", "tokens")


def load_clocks(folder: Path = H100, **only: Any) -> Lines:
    """In bfloat16, by tokens: speed-ups by time, and over F.linear of the dense matrix by cycles; mean clocks."""
    only["dtype"] = "bfloat16"
    lines = load(folder=folder, **only)
    rows = {row["tokens"]: row for row in load_tokens(folder=folder, **only)}
    for line in lines:
        line["cycles"] = statistics.fmean(us * mhz for us, mhz in zip(line["all_us"], line["clock_mhz"], strict=True))
    against(lines, {"kernel": "dense"}, "tokens", "rows", "cols", value="cycles")
    for of in wide(lines, "{tokens}", "{kernel}"):
        of_tokens = [line for line in lines if line["tokens"] == of["tokens"]]
        for name in of["@"]:
            clocks = [mhz for line in of_tokens if line["kernel"] == name for mhz in line["clock_mhz"]]
            rows[of["tokens"]] |= {f"{name} cycles": of[f"{name} gain"], f"{name} mhz": statistics.fmean(clocks)}
    return [*rows.values()]


def load_shapes() -> Lines:
    lines = wide([x for x in load() if x["dtype"] == "bfloat16"], "{rows} x {cols}", "{kernel} {tokens}")
    return ranked(lines, "rows", "cols")


def l2() -> Lines:
    """What ncu counted of the launches of `benchmarks.load --once`, in their order."""
    names = iter(("the library's kernel", "tile, no output tile split", "tile, 58 of 256 split"))
    counts: Lines = []
    text = (H100 / "l2.csv").read_text()
    for row in csv.DictReader(line for line in text.splitlines() if line.startswith('"')):
        metric = row["Metric Name"].partition(".")[0]
        if not counts or metric in counts[-1]:
            counts.append({"name": next(names)})
        counts[-1][metric] = float(row["Metric Value"].replace(",", ""))
    return [{**line, "gb": line["dram__bytes_read"] / 1e9} for line in counts]


# Models: `macko bench`, benchmarks.models, benchmarks.engines; sanitizers.

#: What a model of half zeros is stored as by default: (dtype, values), and how tables say it.
STORED = {
    ("bfloat16", None): "bfloat16",
    ("float16", None): "float16",
    ("bfloat16", "fp8"): '`values="fp8"` (rounds)',
}
BENCH = ("what", "dtype", "values", "compile", "batch", "prompt_tokens", "model", "sparsity", "tokens", "kernel",
         "format")  # fmt: skip


def bench(name: str = "bench", /, **only: Any) -> Lines:
    """Lines of `macko bench --json` but those too noisy to tell."""
    lines = newest((line for line in read(H200 / f"{name}.jsonl", **only) if line.get("ms", 0) is not None), *BENCH)
    for line in lines:
        line["stored"] = STORED.get((line["dtype"], line.get("values")))
        line["size"] = line.get("prompt_tokens" if line["what"] == "prefill" else "batch")
    return lines


def bench_cp_async() -> Lines:
    """A 7B as GPUs without wgmma run it: decoding, over the dense one of the same run."""
    lines = bench("bench_cp_async", what="decode")
    lines = against(lines, {"model": "dense"}, "batch", "format", "commit")
    return wide([line for line in lines if line["model"] != "dense"], "{model}", "{batch}")


def bench_pairs(compile: str = "default", **only: Any) -> Lines:
    """Half sparse models, over the dense one of the same run."""
    lines = bench(compile=compile, **{"what": {"decode", "prefill"}, **only})
    lines = against(lines, {"model": "dense"}, "what", "size", "dtype", "values", "format", "commit")
    for line in lines:
        size, bold = line["size"], "**" if line["what"] == "decode" else ""
        sequences = "1 token at a time" if size == 1 else f"{size} sequences at once"
        line["title"] = f"a prompt of {size} tokens" if line["what"] == "prefill" else sequences
        line["bold"] = f"{bold}{line['gain']:.2f}x{bold}"
    lines = ranked([line for line in lines if line["sparsity"] == 0.5], stored=STORED.values())
    return ranked(lines, "what", "size")


def headline() -> Lines:
    """What half of the weights being zero is worth to a model whose weights stay exact, by tokens at once."""
    lines = [line for line in bench_pairs() if not line.get("values")]
    lines = [x for x in lines if (x["what"], x["size"]) not in (("decode", 8), ("prefill", 512))]
    return wide(lines, "{title}", "{dtype}")


def sparsity(folder: Path = H200) -> Lines:
    """By sparsity: a token of generate() as one waits for it, and as long as it keeps the GPU busy; over dense of the
    same run."""
    path, key = folder / "sparsity.jsonl", ("model", "sparsity", "tokens", "commit")
    busy = {tuple(line[name] for name in key): line["us"] / 1e3 for line in read(path, kernel="busy")}
    lines = read(path, *key, what="decode", ms=...)
    for line in lines:
        zeros = f"{line['sparsity']:.0%} zero" if line["sparsity"] else line["model"]
        zeros += ", `tokens=1`" if line["tokens"] == 1 else ""
        line |= {"title": zeros, "busy_ms": busy.get(tuple(line[name] for name in key)), "speed": 1e3 / line["ms"]}
    for line in against(lines, {"model": "dense"}, "batch", "commit"):
        line |= {"then": line["dense_speed"]} if "faster" in line else {}
        if line["busy_ms"] and line.get("dense_busy_ms"):
            line["busy_gain"] = line["dense_busy_ms"] / line["busy_ms"]
    return ranked(newest(lines, "model", "sparsity", "tokens"), "sparsity")


def logits() -> Lines:
    lines = bench(what="logits", compile="default")
    for line in lines:
        bounds = [f"{x['of_bound']:.2g} ({x['tokens']} token{'s' * (x['tokens'] > 1)})" for x in line.get("layers", [])]
        line["bounds"] = ", ".join(bounds) or "-"
    return ranked(lines, "error")


def lossless() -> Lines:
    """Decoding with dense12, and with what rounds the weights, over the dense model of the same run."""
    lines = against(bench("lossless", what="decode"), {"model": "dense"}, "batch")
    return ranked(ranked(lines, model=("dense", "dense12", *RIVAL_LAYERS)), "batch")


def wheels() -> Lines:
    """Of verify.wheel: the CPU kernels alone, and with GPU kernels of all architectures."""
    lines = read(ROOT / "benchmarks/results/code/wheel.jsonl")
    for line in lines:
        line |= {"mb": line["bytes"] / 1e6, "installed_mb": line["installed_bytes"] / 1e6}
        line["kernels"] = "the CPU kernels alone" if len(line["libraries"]) == 1 else "all GPUs' kernels"
    return newest(lines, "kernels")


def whole_models(path: Path = H200 / "models.jsonl") -> Lines:
    """What the blocks that benchmarks.models pruned say of the whole model."""
    lines = read(path, "step", of_blocks=...)
    for line in lines:
        line["minutes"] = line["seconds"] * line["of_blocks"] / line["blocks"] / 60
        line["method"] = line["step"].rpartition(f", {line['blocks']} blocks")[0]
    return lines


def sanitized() -> Lines:
    """The last run of each tool of -m verify.sanitize on each GPU; not those of some problems (--only)."""
    lines = [line for folder in (H200, H100) for line in read(folder / "sanitize.jsonl") if line["problems"] > 100]
    lines = [line for line in lines if not line.get("only")]
    for line in lines:
        line |= {name: sum(line[name].values()) for name in ("errors", "known")}
        line |= {"device": line["device"].removeprefix("NVIDIA "), "all": line["problems"] + line["problems_left"]}
    return ranked(newest(lines, "tool", "device"), "tool", "device")


#: What the sides of --engine vllm are called, in the order of tables.
ENGINE_SIDES = {
    "dense": "dense",
    "macko": "macko",
    "fp8": "fp8 W8A8",
    "fp8-w8a16": "fp8 W8A16",
    "int4": "int4, groups of 128",
    "int4-marlin": "int4, by Marlin",
}
#: What is loaded, by the width of its layers.
ENGINE_MODELS = {4096: "7B", 8192: "8 layers of 70B"}


def engine_side(line: Line) -> str:
    kept = "" if line["format"] == "auto" or line["model"] != "macko" else f" {line['format']}"
    dtype = f", {line['dtype']}" if line["dtype"] != "float16" else ""
    before = f", {line['dtype']} that was {line['weights_dtype']}" if line["weights_dtype"] else ""
    return ENGINE_SIDES[line["model"]] + kept + (before or dtype)


def vllm(folder: Path, name: str = "vllm", /, **only: Any) -> Lines:
    """Lines of `macko bench --engine vllm`; of the dense model also those of earlier runs that others are of."""
    names = ("what", "batch", "prompt_tokens", "model", "compiled", "ranks", "source", "format", "dtype", "hidden",
             "weights_dtype")  # fmt: skip
    found: dict[Any, dict[str, Line]] = {}
    for line in read(folder / f"{name}.jsonl"):
        arguments = line["engine_args"]
        line["compiled"] = arguments.get("compilation_config", {}).get("mode") != 0
        line |= {"ranks": arguments.get("tensor_parallel_size", 1), "dtype": arguments["dtype"]}
        line.setdefault("weights_dtype", None)  # of lines from before there was one
        line |= {"random": line["source"].startswith("random:"), "folder": Path(line["source"]).name}
        model = line["folder"].removeprefix("random:")
        line["mixture"] = model if re.search("mixtral|moe|qwen3", model) else ""
        line["side"] = engine_side(line)
        found.setdefault(tuple(line[name] for name in names), {})[line["commit"]] = line
    last = [[*runs.values()][-1] for runs in found.values()]
    of_last = {line["commit"] for line in last}
    before = [line for runs in found.values() for line in [*runs.values()][:-1]]
    lines = [x for x in before if x["model"] == "dense" and x["commit"] in of_last] + last
    return [line for line in lines if fits(line, only)]


def engines(folder: Path, name: str = "vllm", /, **only: Any) -> Lines:
    """Over dense of the same dtype and run, as hosts differ."""
    lines = [x for x in vllm(folder, name, **{"ranks": 1, "compiled": False, "mixture": "", **only}) if x["ms"]]
    lines = [x for x in lines if x["random"] or x["ranks"] > 1]
    return against(lines, {"model": "dense"}, "what", "dtype", "batch", "prompt_tokens", "commit")


def engines_wide(folder: Path, name: str = "vllm", /, hidden: int = 4096, **only: Any) -> Lines:
    """A row a side, in the order of tables, float16 first: decoding by sequences, and a prompt by its tokens."""
    lines = ranked(engines(folder, name, what={"decode", "prefill"}, hidden=hidden, **only), model=ENGINE_SIDES)
    lines.sort(key=lambda line: line["dtype"] != "float16")
    for line in lines:
        line["run"] = f"{line['batch']} seq" if line["what"] == "decode" else f"prompt of {line['prompt_tokens']}"
    return wide(lines, "{side}", "{run}")


def engines_experts() -> Lines:
    """Mixtures: a row a model and a side, by the clock and by the time that the GPU is busy."""
    clock = [line for line in vllm(H100) if line["mixture"] and line["what"] in ("decode", "prefill") and line["ms"]]
    # Not of ranks: a rank that waits for the others keeps its GPU busy.
    one = [line for line in clock if line["ranks"] == 1]
    busy = [line | {"ms": line["gpu_ms"], "by": ", GPU busy"} for line in one if line.get("gpu_ms")]
    key = ("mixture", "what", "dtype", "batch", "prompt_tokens", "ranks", "commit", "by")
    lines = against(clock + busy, {"model": "dense"}, *key)
    for line in lines:
        line["run"] = f"{line['batch']} seq" if line["what"] == "decode" else f"prompt of {line['prompt_tokens']}"
        line["peak_gb"] = (line["peak_bytes"] or 0) / 1e9
        line["title"] = f"{line['mixture']}, {line['side']}" + f", {line['ranks']} GPUs" * (line["ranks"] > 1)
        line["title"] += line.get("by", "")
    return wide(ranked(lines, "mixture", model=ENGINE_SIDES), "{title}", "{run}")


def loading(folder: Path, **only: Any) -> Lines:
    """Seconds of the weights from the files to the GPUs, over dense of the same model on as many."""
    key = ("hidden", "ranks", "model", "folder")
    lines = ranked(newest(vllm(folder, random=False, mixture="", what="decode", **only), *key), *key)
    for line in against(lines, {"model": "dense", "folder": "dense"}, "hidden", "ranks", value="weights_s"):
        line |= {"of": ENGINE_MODELS[line["hidden"]], "from": "packed" if line["folder"] == "sparse" else "dense"}
        line["share"] = line["weights_s"] / line["dense_weights_s"] if "gain" in line else None
    return lines


def transformers() -> Lines:
    """Of benchmarks.engines: dense and packed, on one GPU and two."""
    lines = read(H100 / "transformers.jsonl", "what", "folder", "ranks", "batch", hidden=4096, rank=0, ms=...)
    for line in against(lines, {"folder": "dense"}, "what", "ranks", "batch"):
        line |= {"s": line["ms"] / 1e3, "gpus": f"{line['ranks']} GPU{'s' * (line['ranks'] > 1)}"}
        line |= {"step_ms": line["ms"]} if "batch" in line else {"batch": 0, "peak_gb": (line["peak_bytes"] or 0) / 1e9}
    return ranked(wide(lines, "{folder}, {gpus}", "{batch}"), "ranks", "folder")


def continuous() -> Lines:
    """Tokens a second of transformers' continuous batching, and over dense."""
    lines = read(H200 / "transformers.jsonl", "folder", "graphs", "batch", what="continuous")
    for line in lines:
        line |= {"s": 1 / line["tokens_per_s"], "way": line["folder"] + ", CUDA graphs" * line["graphs"]}
    lines = against(lines, {"folder": "dense"}, "graphs", "batch", value="s")
    return ranked(wide(lines, "{way}", "{batch}"), "graphs", "folder")


def shards() -> Lines:
    """Of benchmarks.spmm at the shapes of shards: bytes over dense, and speed over dense by tokens."""
    lines = read(H200 / "shards.jsonl", dense_us=..., kernel={"sell", "tile"})
    for line in lines:
        line |= {
            "share": line["held_bytes"] / (2 * line["rows"] * line["cols"]),
            "matrix": (line["rows"], line["cols"]),
        }
    lines = wide(lines, "{rows} x {cols}, {kernel}", "{tokens}")
    return ranked(lines, matrix=dict.fromkeys(line["matrix"] for line in lines), kernel=("sell", "tile"))


# Quantised and structured-sparse linears: benchmarks.slide.

#: Of both types' table: mode and tokens.
SLIDE_ROWS = [*(("burst", n) for n in (1, 16, 64, 256, 1024)), *(("sustained", n) for n in (2048, 4096, 16384))]
SLIDE_SIDES = ("dense / 2:4", "dense / 4:6", "dense / 6:8", "torch / dense", "torch / 2:4", "bf16 / 2:4")


def slide(**only: Any) -> Lines:
    """Of whole linears in both modes."""
    lines = [line for line in read(H200 / "slide.jsonl", shape=..., **only) if line.get("mode") != "twin"]
    for line in lines:  # the oldest have one mode at each number of tokens, and do not name it
        line.setdefault("mode", "sustained" if line["tokens"] > 512 else "burst")
    return newest(lines, "type", "shape", "tokens", "mode", "side")


def slide_pairs(type: str) -> Lines:
    """Of Qwen2.5-7B a line for each two of SLIDE_SIDES: as gain the time of the first over the second's."""
    lines = wide(slide(type=type), "{mode} {tokens} {shape}", "{side}")
    pairs = [
        {**line, "pair": pair, "gain": line[f"{slow} us"] / line[f"{fast} us"]}
        for line in lines
        for pair, (slow, fast) in ((pair, pair.replace(":", "").split(" / ")) for pair in SLIDE_SIDES)
        if f"{slow} us" in line and f"{fast} us" in line and not line["shape"].startswith("llama")
    ]
    return ranked(pairs, "mode", "tokens")


def slide_gains() -> Lines:
    """Both types beside each other: bursts of few tokens, and many under load."""
    lines = [
        {**line, "type": name}
        for name in ("int8", "fp8")
        for line in slide_pairs(name)
        if (line["mode"], line["tokens"]) in SLIDE_ROWS
    ]
    return ranked(wide(lines, "{tokens} {mode}", "{type} {pair}", "{:.2f} ({:.2f})"), "mode", "tokens")


def slide_vllm(folder: Path, model: str) -> Lines:
    """benchmarks.slide_vllm over vLLM's own int8; sides in the order in which they ran."""
    key = ("model", "layers", "side", "chosen", "what", "tokens")
    lines = read(folder / "slide_vllm.jsonl", *key, ms=..., chosen=False, tp={None, 1}, model=model)
    for line in against(lines, {"side": "vllm int8"}, "model", "layers", "what", "tokens", value="gpu_ms"):
        line["gpu_gain"] = line["gain"]
    lines = against(lines, {"side": "vllm int8"}, "model", "layers", "what", "tokens")
    return wide(lines, "{side}", "{model} {what} {tokens}")


def slide_mma() -> Lines:
    """Linears of Qwen2.5-7B by benchmarks.slide_mma."""
    shapes, tokens = {"qkv", "gate_up", "down"}, {64, 1024, 4096}
    lines = read(H100 / "slide_mma.jsonl", "shape", "tokens", "side", shape=shapes, tokens=tokens)
    return wide(lines, "{shape} {tokens}", "{side}")


def slide_quality() -> Lines:
    """Perplexity of the language model, by pattern, whether it was fitted, and values."""
    lines = read(H100 / "slide_quality.jsonl", "pattern", "reconstruct", "values", what="quality", size="40m")
    for line in lines:
        line["unit"] = "fitted" if line["reconstruct"] else "one shot"
    return wide(lines, "{pattern}", "{unit} {values}")


# The canonical format and EC: benchmarks.canonical and benchmarks.ec.


def canonical(usual: bool) -> Lines:
    """usual: of density 0.5, deltas of 4 bits and even rows."""
    key = ("rows", "cols", "density", "delta_bits", "row_spread", "dtype")
    lines = read(H200 / "canonical.jsonl", *key, what="spmv")
    for line in lines:
        line |= {"dense_us": min(line["linear_us"], line["mv_us"]), "tbps": line["bytes"] / line["spmv_us"] / 1e6}
        line["even"] = "uneven" if line["row_spread"] else "even"
    return [x for x in lines if ((x["density"], x["delta_bits"], x["even"]) == (0.5, 4, "even")) == usual]


EC_VARIANTS = ["paper, 4 bits", "paper, 8 bits", "no blocks, 4 bits", "16 lanes", "8 lanes", "4 lanes", "1 lane"]
EC_OTHERS = ["dense", "CSR", "sell"]


def ec(lines: Lines | None = None) -> Lines:
    """Of each variant; of the others how many times as fast the fastest variant is. `lines`: else an H200's."""
    if lines is None:
        lines = read(H200 / "ec.jsonl", "rows", "cols", "density", "variant", what="spmv", dtype="float16")
    for line in against(lines, {"variant": {*EC_VARIANTS}}, "rows", "cols", "density", value="time_us"):
        best = line["time_us"] == line["dense_time_us"]
        line |= {"us": f"**{line['time_us']:.1f}**" if best else f"{line['time_us']:.1f}", "best": 1 / line["gain"]}
    return lines


def ec_model() -> Lines:
    """The same of masks of a trained model, on an H100."""
    return wide(ec(read(H100 / "ec.jsonl", "rows", "cols", "variant", mask=...)), "{rows}x{cols}", "{variant}")


def ec_padding() -> Lines:
    """Zeros that the paper's layout stores, over the non-zeros, by mask and sparsity."""
    titles: dict[tuple[str, int | None], str] = {
        ("uniform", 4096): "uniform, 4096 x 4096",
        ("uneven_rows", 2048): "as SparseGPT makes it, 2048 x 8192",
        ("MiniLM output.dense", 384): "MiniLM's, by magnitude, 384 x 1536",
        **{(f"mpnet-sparsegpt-{zeros}", None): "all-mpnet-base-v2's, by SparseGPT" for zeros in (0.7, 0.8, 0.9)},
    }
    lines = [x for x in formats() if "paper" in x["format"] and (x["mask"], x["rows"]) in titles and x["density"] < 0.4]
    for line in lines:
        line |= {"title": titles[line["mask"], line["rows"]], "padding": line["stored"] / line["nonzeros"] - 1}
    return ranked(wide(lines, "{title}", "{format} {density}"), title=dict.fromkeys(titles.values()))


def formats(**only: Any) -> Lines:
    """Bytes of benchmarks.formats."""
    key = ("mask", "rows", "cols", "density", "format")
    return read(FORMATS, *key, bytes=..., **only)


def formats_wide() -> Lines:
    """A row a mask: the uniform one at each density, the others at 0.3, and patterns."""
    lines = [x for x in formats() if x["mask"] == "uniform" or x["density"] == 0.3 or ":" in x["mask"]]
    return wide(lines, "{mask} {rows}x{cols} {density}", "{format}")


# CPUs: benchmarks.cpu, and the tables by which "auto" chooses.


def cpu(name: str, /, *key: str, **only: Any) -> Lines:
    """Over torch's better product of the same line."""
    lines = read(CPU / f"{name}.jsonl", *key, op="linear", **only)
    for line in lines:
        line["torch_ms"] = min(line["torch_linear_ms"], line["torch_mv_ms"])
        line |= {"gain": line["torch_ms"] / line["ms"], "zeros": 1 - line["density"]}
    return lines


def one_core(size: int, **only: Any) -> Lines:
    """One token times a square matrix."""
    key = ("dtype", "density", "format", "path")
    return cpu("kernels", *key, rows=size, cols=size, tokens=1, clock="cpu", **only)


def cpu_wide(lines: Lines) -> Lines:
    return ranked(wide(lines, "{dtype} {density}", "{format} {path}"), "dtype", "-density")


def ec_cpu() -> Lines:
    """Over torch's product as it was timed beside the canonical format: both formats in one run."""
    lines = one_core(4096, commit=one_core(4096, format="ec")[-1]["commit"])
    base = {"format": "macko", "path": "avx512"}
    return cpu_wide(against(lines, base, "dtype", "density", of_base="torch_ms"))


def cpu_ran() -> Lines:
    """What the tables of docs/cpu.md are made of."""
    run = {"op": "linear", "rows": 8192, "cols": 8192, "tokens": 1, "delta_bits": 4}
    return [line for clock in ("cpu", "wall") for line in read(CPU / "kernels.jsonl", "dtype", clock=clock, **run)]


def cpu_gains() -> Lines:
    """Dense time over the bitmap's at half zeros, of each vector path, by tokens."""
    lines = []
    for path in ("avx512", "avx2"):
        table = json.loads((TIMES / f"cpu_{path}.json").read_text())
        for line in (x for x in table["linear"] if x["rows"] * x["cols"] >= 1 << 22 and x["density"] == 0.5):
            lines.append({**line, "path": path, "gain": line["us"]["dense"] / line["us"]["bitmap"]})
    return wide(ranked(lines, "dtype", path=("avx512", "avx2")), "{path} {dtype}", "{tokens}")


def claims() -> Lines:
    """One line of what README says besides its table."""
    kernels = {"sell", "dense_linear", "dense_mv"}
    token = [x for x in spmv(density=0.5, mask="uniform", dtype="float16", kernel=kernels) if x["kernel"] == "sell"]
    gains = [line["gain"] for line in token]
    by = wide(engines(H200, what="decode", compiled=True), "{batch}", "{side}")
    faster = [x["batch"] for x in by if x.get("macko, bfloat16 gain", 0) > x.get("fp8 W8A8, bfloat16 gain", 9)]
    llama, at_most = (
        next(x for x in bench_pairs(*how, what="decode", dtype="bfloat16") if x["size"] == 1 and not x["values"])
        for how in ((), ("max",))
    )
    one = one_core(8192, path="avx512", dtype="bfloat16", density=0.5, format="bitmap")
    return [
        {
            "paper": geomean(gains), "shapes": len(gains), "least": min(gains), "sequences": max(faster),
            "lossless": next(x["gain"] for x in lossless() if x["model"] == "dense12"), "cpu": one[-1]["gain"],
            "speed": 1e3 / llama["ms"], "dense_speed": 1e3 / llama["dense_ms"], "at_most": at_most["gain"],
        }
    ]  # fmt: skip


# What pruning and rounding cost: benchmarks.quality.

BLOCK = "sparsegpt, fitted by block"


def zeros_of(line: Line) -> str:
    return str(line["pattern"] or (f"{line['sparsity']:.0%}" if line["sparsity"] else ""))


def quality(path: Path = H200 / "quality.jsonl", what: str = "quality") -> Lines:
    """The dense model first."""
    lines = read(path, "name", "method", "sparsity", "pattern", "reconstruct", "auto", "seed", what=what)
    for line in lines:
        line |= {"zeros": zeros_of(line), "title": f"{line['name']}, {zeros_of(line)}".rstrip(", ")}
    return sorted(lines, key=lambda line: (line["seed"], line["name"] != "dense"))


def lost(line: Line) -> float:
    """Of perplexity, over the dense model's."""
    return float(line["perplexity_ratio"]) - 1


def first_seed(lines: Lines) -> Lines:
    return [line for line in lines if not line["seed"]]
