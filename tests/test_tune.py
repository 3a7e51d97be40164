"""Which format is expected to be the fastest: tables, the model behind them, what sparsify_ makes of it, autotune."""

import itertools
import json
import re
import statistics
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import macko
from macko import _library
from macko.choose import auto as choose
from macko.choose import counted, times
from macko.cli import main
from macko.measure import doctor, share, tune
from macko.nn import convert
from macko.weights import (
    FORMATS,
    SLIDE_PATTERNS,
    BitmapWeight,
    MackoWeight,
    PackedWeight,
    SellWeight,
    Sparse11Weight,
    TileWeight,
)
from tests.common import needs_capture, random_weight, torch_threads

GPU = "Imaginary 9000"
HALF = torch.float16


def line(rows: int, cols: int, density: float, **us: float) -> dict[str, Any]:
    return {"rows": rows, "cols": cols, "density": density, "dtype": "float16", "tokens": 1, "us": us}


def gain(size: int, pattern: str, at_1: float) -> dict[str, Any]:
    return {"rows": size, "cols": size, "dtype": "int8", "pattern": pattern, "gain": {"1": at_1}}


def table(*lines: dict[str, Any], bandwidth: float = 1000) -> str:
    return json.dumps({"version": 2, "gpu": GPU, "bandwidth_gbps": bandwidth, "linear": lines, "slide": []})


def slide_table(*lines: dict[str, Any]) -> str:
    return json.dumps({"version": 2, "gpu": GPU, "linear": [], "slide": lines})


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The GPU that this machine has not: its name, compute capability, and an SM's share of its memory's rate."""

    def is_there(name: str = GPU, capability: tuple[int, int] = (9, 0), bytes_a_clock: float = 12.8) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(times, "bandwidth_gbps", lambda device: 1000)
        monkeypatch.setattr(counted, "bytes_a_clock", lambda device: bytes_a_clock)
        monkeypatch.setattr(SellWeight, "runs", lambda *_: True)
        monkeypatch.setattr(_library, "cuda_arches", [])  # as if the library had code for every GPU

    return is_there


@pytest.fixture(autouse=True)
def own_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the user's tables, and an empty one of those that are shipped."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(times, "SHIPPED", tmp_path / "shipped")
    for folder in (tmp_path / "cache" / "macko", tmp_path / "shipped"):
        folder.mkdir(parents=True)
    times.times.cache_clear()
    with torch_threads(1):
        yield tmp_path
    times.times.cache_clear()


def test_what_was_measured_counts(own_tables: Path) -> None:
    times.cache_file(GPU).write_text(
        table(line(512, 512, 0.5, dense=10, sell=4), line(1024, 512, 0.5, dense=15, sell=6))
    )
    known = times.times(GPU)
    assert known.measured
    assert known.us(512, 512, 0.5, HALF) == {"dense": 10, "sell": 4}
    near = known.us(512, 512, 0.47, HALF)
    assert near["dense"] == 10
    assert 3.5 < near["sell"] < 4
    assert known.us(512, 512, 0.5, HALF, tokens=8) == {}


def test_the_model_is_a_fit_of_the_lines(own_tables: Path) -> None:
    lines = []
    for rows in (256, 1024, 4096, 8192):
        us = {name: 2 + times.held_bytes(name, rows, 4096, 0.5, 2) / 1e6 for name in ("dense", "sell", "macko")}
        lines.append(line(rows, 4096, 0.5, **us))
    times.cache_file(GPU).write_text(table(*lines))
    for density in (0.5, 0.2):
        found = times.times(GPU).us(2048, 2048, density, HALF)
        for name, took in found.items():
            assert took == pytest.approx(2 + times.held_bytes(name, 2048, 2048, density, 2) / 1e6)


def test_another_gpu_is_judged_by_its_bandwidth(own_tables: Path) -> None:
    first = [line(rows, 4096, 0.5, dense=3 + rows / 100, sell=1 + rows / 200) for rows in (512, 4096)]
    (own_tables / "shipped" / times.file_name("Known")).write_text(table(*first, bandwidth=4000))
    same, slower = times.times("Other", 4000), times.times("Other", 1000)
    assert not same.measured
    assert same.us(512, 4096, 0.5, HALF)["dense"] == pytest.approx(3 + 5.12)
    assert slower.us(512, 4096, 0.5, HALF)["dense"] == pytest.approx(3 + 4 * 5.12)
    assert times.times("Known").measured
    (own_tables / "shipped" / times.file_name("Slow")).write_text(table(line(512, 4096, 0.5, dense=40), bandwidth=500))
    times.times.cache_clear()
    near_slow, near_fast = times.times("Other", 900), times.times("Other", 2000)
    assert near_slow.us(512, 4096, 0.5, HALF)["dense"] == pytest.approx(40 * 500 / 900)
    assert near_fast.us(512, 4096, 0.5, HALF)["dense"] == pytest.approx(3 + 2 * 5.12)
    assert times.times("Other").us(512, 4096, 0.5, HALF)["dense"] == pytest.approx(40)


def test_a_gpu_of_unknown_bandwidth_has_times_as_they_are_and_a_warning(own_tables: Path) -> None:
    first = [line(rows, 4096, 0.5, dense=3 + rows / 100, sell=1 + rows / 200) for rows in (512, 4096)]
    (own_tables / "shipped" / times.file_name("Known")).write_text(table(*first, bandwidth=4000))
    with pytest.warns(UserWarning, match=f"how fast the memory of Other is: its times are taken to be those of {GPU}"):
        unknown = times.times("Other", 0)
    assert not unknown.measured
    assert unknown.us(512, 4096, 0.5, HALF)["dense"] == pytest.approx(3 + 5.12)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        times.times("Other", 0)  # said once
        times.times("Other")  # nobody asked
        times.write(times.cache_file("Own"), "Own", [line(512, 4096, 0.5, dense=9)], [], 0)
        times.times("Own", 0)  # measured
        times.times("cpu avx512", 0)


def test_times_of_eight_tokens_do_not_hide_the_model_of_one(own_tables: Path, gpu: Callable[..., None]) -> None:
    """That is another GPU's; and whose tile it has is told by the number of tokens."""
    (own_tables / "shipped" / times.file_name("Known")).write_text(table(line(512, 512, 0.5, dense=9, sell=5, tile=2)))
    eight = {**line(512, 512, 0.5, dense=4, sell=8, tile=3), "tokens": 8}
    times.write(times.cache_file("Other"), "Other", [eight], [], 500)
    known = times.times("Other", 500)
    assert known.us(512, 512, 0.5, HALF) == pytest.approx({"dense": 18, "sell": 10, "tile": 4})
    assert known.us(512, 512, 0.5, HALF, 8) == eight["us"]
    assert (known.measured, known.at(8).measured, known.at(1).measured) == (True, True, False)
    gpu("Other", (8, 0))
    for tokens, wanted in ((1, {"dense", "sell", "tile"}), (8, {"dense", "sell", "tile"})):
        assert {*choose.expected_us(512, 512, 0.5, HALF, torch.device("cuda"), tokens)} == wanted


def test_tiles_times_of_another_gpu_are_of_its_kernel(own_tables: Path, gpu: Callable[..., None]) -> None:
    (own_tables / "shipped" / times.file_name("Known")).write_text(
        table(line(512, 512, 0.5, dense=9, sell=2.2, tile=2))
    )
    weight = SimpleNamespace(rows=512, cols=512, density=0.5, dtype=HALF, device=torch.device("cuda"))
    for name, major, bytes_a_clock, one, any_number in (
        *(("Other", 8, 3, "sell", "tile"), ("Other", 10, 29, "sell", "sell"), ("Other", 9, 13, "tile", "tile")),
        *(("Known", 8, 3, "tile", "tile"), ("Known", 10, 29, "tile", "tile")),
    ):
        gpu(name, (major, 0), bytes_a_clock)
        assert choose.choose(weight, 1).format == one  # type: ignore[arg-type]
        assert choose.choose(weight).format == any_number  # type: ignore[arg-type]
        assert choose.choose(weight, 8).format == "tile"  # type: ignore[arg-type]


def test_the_users_times_count_for_several_tokens_too(own_tables: Path, gpu: Callable[..., None]) -> None:
    """And for any number where tile is slower than dense for one."""
    weight = SimpleNamespace(rows=512, cols=512, density=0.5, dtype=HALF, device=torch.device("cuda"))
    eight = {**line(512, 512, 0.5, dense=4, sell=2, tile=3), "tokens": 8}
    for capability in ((8, 9), (9, 0)):
        gpu(capability=capability, bytes_a_clock=3)
        times.write(times.cache_file(GPU), GPU, [line(512, 512, 0.5, dense=9, sell=5, tile=10), eight], [], 1000)
        assert [choose.choose(weight, n).format for n in (1, 8)] == ["sell", "sell"]  # type: ignore[arg-type]
        assert choose.choose(weight).format == "sell"  # type: ignore[arg-type]
        assert choose.choose(weight, 9).format == "tile"  # type: ignore[arg-type]
        times.write(times.cache_file(GPU), GPU, [line(512, 512, 0.5, dense=9, sell=5, tile=8)], [], 1000)
        assert choose.choose(weight).format == "tile"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("capability", "bytes_a_clock", "gains"),
    [
        ((8, 9), 3.1, {1: 1.60, 8: 1.60, 64: 1.60, 128: 0.9}),  # RTX 4090: memory decides, then tensor cores
        ((8, 6), 6.7, {8: 1.60, 32: 1.60, 64: 1.01}),  # RTX 3090
        ((8, 0), 13.4, {8: 1.60, 32: 1.40, 64: 0.94}),  # A100 80GB: decoding decides
        ((10, 0), 29.2, {1: 0.86, 8: 0.86, 16: 0.78, 64: 0.46}),  # B200: more bytes than clocks
    ],
)
def test_what_tile_gains_where_nobody_measured_is_counted(
    own_tables: Path, gpu: Callable[..., None], capability: tuple[int, int], bytes_a_clock: float, gains: Any
) -> None:
    (own_tables / "shipped" / times.file_name("Known")).write_text(table(line(512, 512, 0.5, dense=9, sell=5, tile=2)))
    gpu(capability=capability, bytes_a_clock=bytes_a_clock)
    for tokens, wanted in gains.items():
        us = choose.expected_us(512, 512, 0.5, HALF, torch.device("cuda"), tokens)
        assert us["dense"] / us["tile"] == pytest.approx(wanted, abs=0.01), tokens
        layer = convert._why_not_worth(torch.empty(0), 0.5, us, macko.choose.Options(tokens=tokens), 0.2)
        assert bool(layer) == (wanted < 1 and tokens > 1)  # for one there is sell
    w = torch.empty(1024, 1024, dtype=torch.bfloat16)
    gained = not choose.not_dense12(w, torch.device("cuda"), 8)
    assert gained == (capability[0] != 10)
    assert bool(choose.slower_by_count(torch.device("cuda"))) == (capability[0] == 10)  # what experts go by


@pytest.mark.parametrize(
    ("capability", "format", "values", "kernel"),
    [
        ((7, 5), "slide 6:8", "int8", "slide has no kernel for int8"),
        ((7, 5), "slide", "exact", "slide has no kernel for float16"),
        ((8, 0), "slide", "fp8", "slide has no kernel for float8_e4m3fn"),
        ((10, 0), "slide", "fp8", "slide has no kernel for float8_e4m3fn"),
        ((7, 5), "tile", "exact", "tile has no kernel for float16"),
        ((7, 5), "auto", "fp8", "dense8 has no kernel for float16"),
        ((8, 0), "slide", "int8", ""),
        ((8, 9), "slide", "fp8", ""),
        ((8, 0), "sparse8", "fp8", ""),
        ((7, 5), "macko", "exact", ""),
    ],
)
def test_what_a_gpu_has_no_kernel_for_stays_dense_and_says_so(
    own_tables: Path, gpu: Callable[..., None], capability: tuple[int, int], format: str, values: str, kernel: str
) -> None:
    gpu(capability=capability)
    options, reason = macko.choose.Options(format, values=values), f"{kernel} on {GPU}" if kernel else ""
    device = torch.device("cuda")
    assert options.not_on(device, HALF) == reason
    if reason:
        row, sparse = convert.convert_weight("up", random_weight(64, 256, 0.5, HALF), options, 0.0, device)
        assert (row.reason, sparse) == (reason, None)


def test_clocks_that_are_counted_with_are_those_that_were_measured() -> None:
    results = Path(macko.__file__).parent.parent / "benchmarks/results"
    if not results.exists():
        pytest.skip("macko is installed, its records are not here")
    for format, file, bytes_a_clock in (
        ("tile", "h200/rings.jsonl", 18.42),
        ("dense12", "h100-80gb-hbm3/rings.jsonl", 12.83),
    ):
        lines = [json.loads(text) for text in (results / file).read_text().splitlines()]
        for tokens, clocks in counted.CLOCKS[format].items():
            took = {  # the newest line of a shape
                (entry["rows"], entry["cols"]): entry["dense_us"] / entry["median_us"]
                for entry in lines
                if (entry["kernel"], entry["tokens"], entry["dtype"]) == (f"{format}_rings", tokens, "bfloat16")
            }
            assert len(took) == 5
            assert 2 * counted.ELEMENTS / bytes_a_clock / statistics.geometric_mean(took.values()) == pytest.approx(
                clocks, rel=0.01
            )


def test_sparse11_is_taken_in_place_of_tile_and_not_by_its_own_times(
    own_tables: Path, gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not every weight can be held so, and values="raw" is without it."""
    times.cache_file(GPU).write_text(table(line(512, 512, 0.5, dense=9, sell=5, tile=2, sparse11=1, sparse8=1)))
    assert times.times(GPU).us(512, 512, 0.5, HALF) == {"dense": 9, "sell": 5, "tile": 2}
    gpu()
    weight = SimpleNamespace(rows=512, cols=512, density=0.5, dtype=HALF, device=torch.device("cuda"))
    assert choose.choose(weight, 1).format == "tile"  # type: ignore[arg-type]
    monkeypatch.setattr(tune, "layouts", lambda weight: [BitmapWeight, Sparse11Weight])
    w = torch.randn(64, 256).relu().bfloat16()
    assert {name for name, _ in tune._products(w, torch.ones(2, 256).bfloat16())} == {"dense", "macko", "bitmap"}


def test_own_lines_come_before_shipped_ones(own_tables: Path) -> None:
    shipped = table(line(512, 512, 0.5, dense=10, sell=4, ec=5), line(1024, 512, 0.5, dense=15, sell=6))
    (own_tables / "shipped" / times.file_name(GPU)).write_text(shipped)
    times.write(times.cache_file(GPU), GPU, [line(512, 512, 0.5, dense=9, sell=5)], [], 1000)
    times.write(times.cache_file(GPU), GPU, [line(640, 512, 0.5, dense=9, sell=5)], [], 1000)
    known = times.times(GPU)
    assert known.us(512, 512, 0.5, HALF) == {"dense": 9, "sell": 5, "ec": 5}
    assert known.us(640, 512, 0.5, HALF)["sell"] == 5
    assert known.us(1024, 512, 0.5, HALF)["sell"] == 6


def test_slide_keeps_the_shapes_of_before(own_tables: Path) -> None:
    path, some = times.cache_file(GPU), [line(512, 512, 0.5, dense=9, sell=5)]
    times.write(path, GPU, some, [gain(8, "2:4", 1.5), gain(9, "2:4", 1.0)], 1000)
    times.write(path, GPU, some, [gain(8, "2:4", 2.0), gain(8, "6:8", 1.1)], 1000)
    assert times.read(path)["slide"] == [gain(8, "2:4", 2.0), gain(9, "2:4", 1.0), gain(8, "6:8", 1.1)]
    assert times.times(GPU).slide_gain(torch.int8, 2, (9, 9), 1) == 1.0


def test_gains_alone_do_not_stand_for_times(own_tables: Path) -> None:
    """A GPU whose table has lines of slide only is judged by another one's, as without a table."""
    first = [line(rows, 4096, 0.5, dense=3 + rows / 100, sell=1 + rows / 200) for rows in (512, 4096)]
    (own_tables / "shipped" / times.file_name("Known")).write_text(table(*first))
    times.write(times.cache_file(GPU), GPU, [], [gain(8, "2:4", 1.5)], 1000)
    known = times.times(GPU, 1000)
    assert not known.measured
    assert known.us(512, 4096, 0.5, HALF)["dense"] == pytest.approx(3 + 5.12)
    assert known.slide_gain(torch.int8, 2, (8, 8), 1) == 1.5


@pytest.mark.parametrize("text", ["", "{}", table(line(0, 5, 0.5, dense=1)), table().replace("2,", "1,", 1),
                                  table(line(8, 8, 0.5, dense=-1)), table().replace("[]", "[[]]"),
                                  table(line(8, 8, 0.5, sell=1)),
                                  slide_table(gain(8, "2:4", -1)), slide_table(gain(0, "2:4", 1)),
                                  slide_table({**gain(8, "2:4", 1), "gain": {"few": 1}}),
                                  table().replace('"slide": []', '"slide": {"int8": 3}')])  # fmt: skip
def test_a_damaged_table_is_left_out_by_name(own_tables: Path, text: str) -> None:
    times.cache_file(GPU).write_text(text)
    with pytest.warns(UserWarning, match=r"Imaginary_9000\.json is not a table of macko tune"):
        assert not times.times(GPU).measured


def test_codecs_of_an_older_file_are_found_among_the_patterns(own_tables: Path) -> None:
    """And a file that is written anew has them in their own place, beside what it had."""
    path, about = times.cache_file(GPU), {"rows": 4096, "cols": 4096, "gain": {"1": 1.25}}
    path.write_text(slide_table(gain(4096, "2:4", 1.5), {"dtype": "bf16", "pattern": "sparse11", **about}))
    for _ in range(2):  # as it was, and as it is written anew
        known = times.times(GPU)
        assert known.codec_gain("sparse11", (4096, 4096), 1) == 1.25
        assert known.codec_gain("sparse8", (4096, 4096), 1) is None
        assert known.slide.keys() == {("int8", "2:4")}
        times.write(path, GPU, [], [], 0)
    assert json.loads(path.read_text())["codecs"] == [{"codec": "sparse11", **about}]
    for was, bad in (('"1": 1.25', '"1": 0'), ('"1": 1.25', '"1": 1' + "0" * 30), ("4096", "1" + "0" * 30)):
        (own_tables / "bad").write_text(path.read_text().replace(was, bad))
        with pytest.raises(ValueError, match="not a measurement"):
            times.read(own_tables / "bad")


def test_shipped_tables_are_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for path in times.SHIPPED.glob("*.json"):
        content = times.read(path)
        assert path.name == times.file_name(content["gpu"])
        assert all({"dense"} < {*entry["us"]} <= {"dense", *FORMATS} for entry in content["linear"])
        assert {entry["pattern"] for entry in content["slide"]} <= {*SLIDE_PATTERNS}
        assert {entry["codec"] for entry in content["codecs"]} <= {"sparse11"}
        assert {entry["dtype"] for entry in content["slide"]} <= {"bf16", *times.SLIDE_DTYPES}
        assert json.loads(path.read_text())["version"] == times.VERSION


def model(rows: int = 512, cols: int = 256) -> nn.Module:
    layer = nn.Linear(cols, rows, bias=False, dtype=HALF)
    layer.weight = nn.Parameter(random_weight(rows, cols, 0.5, HALF))
    return nn.Sequential(layer)


def test_ec_is_never_chosen_however_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "expected_us", lambda *_: {"dense": 9.0, "macko": 5.0, "ec": 1.0})
    assert choose.choose(MackoWeight.from_dense(random_weight(8, 8, 0.5, HALF))) is MackoWeight


def test_a_layout_that_fills_up_a_small_weight_is_not_taken() -> None:
    """Of 16 x 17 elements, 544 bytes: as bitmap 534, canonical 377, as 2:4 for slide 8192."""
    w = torch.zeros(16 * 17, dtype=HALF)
    w[: 16 * 17 // 2 + 1] = 1
    w = w.view(17, 16).t().contiguous()
    assert choose.choose(MackoWeight.smallest(w)) is BitmapWeight
    assert BitmapWeight.from_dense(w).nbytes < w.nbytes
    assert isinstance(choose.pack(w, choose.AUTO), MackoWeight)
    pattern = torch.ones(16, 16, dtype=HALF)
    pattern.view(-1, 4)[:, 2:] = 0
    assert choose.slides(pattern, choose.Options("mixed"))
    assert isinstance(choose.pack(pattern, choose.Options("mixed")), (MackoWeight, BitmapWeight))


@pytest.mark.parametrize("tokens", [None, 1, 8])
@pytest.mark.parametrize("kind", [BitmapWeight, TileWeight])
def test_of_few_rows_no_layout_holds_more_than_the_canonical_format_and_a_twentieth(
    monkeypatch: pytest.MonkeyPatch, kind: type[PackedWeight], tokens: int | None
) -> None:
    """Of as many columns 2.7 times as much in bitmap, and 24 times in tile, which has masks of 64 rows."""
    monkeypatch.setattr(choose, "choose", lambda weight, tokens: kind)
    for rows, cols, density in itertools.product((1, 8, 63), (300, 4096, 65_536), (0.02, 0.5)):
        weight = MackoWeight.smallest(random_weight(rows, cols, density, torch.float16))
        packed = choose.pack(weight, choose.Options(tokens=tokens, values="raw"))
        assert packed.nbytes <= 1.05 * weight.nbytes, (rows, cols, density)
        assert type(packed) is (kind if kind.from_macko(weight).nbytes <= 1.05 * weight.nbytes else MackoWeight)


def test_mixed_says_where_it_is_slowest_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "worst_of", lambda *_: (8, 0.5))
    for format, worst in (("auto", (8, 0.5)), ("mixed", (8, 0.5)), ("macko", None)):
        assert macko.sparsify_(model(), format=format).layers[0].worst == worst


def test_what_would_not_gain_stays_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"dense": 5.0, "macko": 6.0}
    monkeypatch.setattr(convert, "expected_us", lambda *_: dict(found))
    report = macko.sparsify_(model())
    assert report.layers[0].reason == "dense is as fast here: 5.0 us a token, as macko 6.0 us"
    assert report.gain == 1
    found["ec"] = 1.0  # which auto never takes
    assert macko.sparsify_(model()).layers[0].reason == report.layers[0].reason
    assert macko.sparsify_(model(), format="mixed").layers[0].reason == report.layers[0].reason
    found["macko"] = found["bitmap"] = 2.5
    report = macko.sparsify_(model())
    assert report.layers[0].reason == ""
    assert report.gain == 2
    assert "2.00x" in str(report)
    assert json.loads(report.to_json())["gain"] == 2
    assert macko.sparsify_(model(), format="macko").changed  # asked for by name it is done whatever it costs


CPU = torch.device("cpu")


def cpu_table(path: Path, dtype: str = "float16", **by_tokens: dict[str, float]) -> None:
    """The user's table of this CPU's path: us of 512x512 at density 0.5, as t1={"dense": 5.0, ...}."""
    lines = [{**line(512, 512, 0.5, **us), "tokens": int(t[1:]), "dtype": dtype} for t, us in by_tokens.items()]
    times.write(path, times.gpu_name(CPU), lines, [], 0)


def test_of_small_layers_and_unknown_paths_nothing_is_expected_on_a_cpu() -> None:
    assert choose.expected_us(512, 512, 0.5, HALF, CPU) == {}
    cpu_table(times.cache_file(times.gpu_name(CPU)), t1={"dense": 5.0, "bitmap": 9.0})
    assert choose.expected_us(512, 512, 0.5, HALF, CPU)["dense"] == 5
    assert choose.expected_us(512, 512, 0.5, torch.bfloat16, CPU) == {}  # other instructions, other times
    assert choose.expected_us(64, 64, 0.5, HALF, CPU) == {}
    large = {**line(4096, 4096, 0.5, dense=500, bitmap=400), "tokens": 512}
    times.write(times.cache_file(times.gpu_name(CPU)), times.gpu_name(CPU), [large], [], 0)
    assert choose.expected_us(512, 512, 0.5, HALF, CPU, 512) == {}  # nobody measured one as small with so many
    assert choose.expected_us(512, 512, 0.5, HALF, CPU)["dense"] == 5
    small = macko.sparsify_(model(96, 128))
    assert small.gain is None
    assert small.changed


def test_a_gpu_is_not_judged_by_a_cpu(own_tables: Path) -> None:
    cpu_table(own_tables / "shipped" / times.file_name("cpu avx512"), t1={"dense": 5.0, "bitmap": 9.0})
    assert times.times("Some GPU", 1000).us(512, 512, 0.5, HALF) == {}
    assert times.times("cpu scalar").us(512, 512, 0.5, HALF) == {}


def test_a_cpu_packs_what_gains_for_the_tokens_that_are_said() -> None:
    many = {"dense": 40.0, "macko": 44.0, "bitmap": 50.0}
    cpu_table(times.cache_file(times.gpu_name(CPU)), t1={"dense": 9.0, "macko": 6.0, "bitmap": 3.0}, t64=many)
    report = macko.sparsify_(model(512, 512))
    assert report.layers[0].format == "bitmap"
    assert report.gain == pytest.approx(3.0, rel=0.05)
    assert "1 layer is slower than dense: 0.80x at 64 tokens" in str(report)
    assert macko.sparsify_(model(512, 512), tokens=4).changed  # 1 is nearer than 64
    report = macko.sparsify_(model(512, 512), tokens=48)
    assert not report.changed
    assert report.layers[0].reason == "dense is as fast here: 40.0 us 48 tokens, as macko 44.0 us"


def test_tokens_of_a_format_by_name_are_those_of_the_reports_times() -> None:
    cpu_table(
        times.cache_file(times.gpu_name(CPU)), t1={"dense": 9.0, "bitmap": 3.0}, t64={"dense": 40.0, "bitmap": 50.0}
    )
    for tokens, before, after in ((None, 9, 3), (1, 9, 3), (64, 40, 50)):
        (row,) = macko.sparsify_(model(512, 512), format="bitmap", tokens=tokens)
        assert (row.us_before, row.us_after) == (pytest.approx(before), pytest.approx(after, rel=0.05))
    cpu_table(
        times.cache_file(times.gpu_name(CPU)), t1={"dense": 9.0, "bitmap": 3.0}, t64={"dense": 9.0, "bitmap": 9.1}
    )
    assert "slower" not in str(macko.sparsify_(model(512, 512)))  # of many tokens, where nothing is lost


@pytest.mark.parametrize(
    ("us", "wanted"),
    [
        ({"dense": 9.0, "sell": 10.0, "tile": 9.6}, "sell"),
        ({"dense": 9.0, "sell": 10.0, "tile": 9.4}, "tile"),
        ({"sell": 10.0, "tile": 11.0}, "sell"),
        ({"tile": 8.0, "macko": 7.0}, "macko"),
        ({}, "macko"),
    ],
)
def test_sell_is_chosen_up_to_a_little_more_time(
    us: dict[str, float], wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "expected_us", lambda *_: dict(us))
    weight = SimpleNamespace(rows=8, cols=8, density=0.7, dtype=HALF, device=torch.device("cuda"))
    assert choose.choose(weight, 1).format == wanted  # type: ignore[arg-type]
    faster_than_dense = "tile" in us and us["tile"] < us.get("dense", 99)
    for major in (7, 9):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, major=major: (major, 0))
        unknown = "tile" if faster_than_dense or (not us and major > 7) else wanted
        assert choose.choose(weight).format == unknown  # type: ignore[arg-type]
        assert choose.choose(weight, 2).format == ("tile" if not us and major > 7 else wanted)  # type: ignore[arg-type]


def test_several_tokens_on_a_gpu_without_kernels_for_slabs_are_counted(
    own_tables: Path, gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By dense rows, or of sell's stream a pass each: packed only where that takes less than dense."""
    (own_tables / "shipped" / times.file_name("Known")).write_text(
        table(line(4096, 4096, 0.5, dense=40, sell=25, macko=30)).replace(GPU, "Known")
    )
    gpu(capability=(7, 5), bytes_a_clock=5)
    cuda = torch.device("cuda")
    us = choose.expected_us(4096, 4096, 0.5, HALF, cuda, 8)
    assert us["dense"] < 2.5 * us["dense"] < us["macko"] == us["sell"] < 3 * us["dense"]
    us = choose.expected_us(4096, 4096, 0.1, HALF, cuda, 3)
    assert us["sell"] < us["dense"] < us["macko"]
    assert {*choose.expected_us(4096, 4096, 0.5, HALF, cuda, 1)} == {"dense", "macko", "sell"}
    monkeypatch.setattr(SellWeight, "runs", lambda *_: False)
    assert {*choose.expected_us(4096, 4096, 0.5, HALF, cuda, 8)} == {"dense", "macko"}


def test_inspect_tells_the_gain(own_tables: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times.cache_file(GPU).write_text(table(line(512, 256, 0.5, dense=6, sell=4)))
    macko.save_model(model(), own_tables / "model.safetensors")
    assert main(["inspect", str(own_tables / "model.safetensors"), "--gpu", GPU]) == 0
    printed = capsys.readouterr().out
    assert "1.50x sell" in printed
    assert f"on {GPU}: time of one token" in printed


@pytest.mark.slow
def test_tuning_a_cpu_is_read_again(own_tables: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--shapes", "512x256", "--device", "cpu", "--tokens", "1", "3"]) == 0
    path = times.cache_file(times.gpu_name(CPU))
    assert str(path) in capsys.readouterr().out
    known = times.times_of(CPU)
    assert known.measured
    assert known.counts == [1, 3]
    for tokens in (1, 3):
        us = known.us(512, 256, 0.5, HALF, tokens)
        assert {*us} == {"dense", "macko", "bitmap"}
        assert all(0.5 < each < 1e5 for each in us.values())
    assert main(["tune", "somewhere", "--shapes", "512x256"]) == 1


def test_the_support_page_has_what_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the GB/s, SMs and GHz that are published for each GPU; least and most gains of its row."""
    page = (Path(__file__).parent.parent / "docs/support.md").read_text()
    for row, most_tokens, gpus in (
        ("8.0", 32, [(8, 0, 1555 / 108 / 1.41), (8, 0, 2039 / 108 / 1.41)]),
        ("8.6", 32, [(8, 6, 936 / 82 / 1.695), (8, 9, 1008 / 128 / 2.52), (8, 9, 864 / 142 / 2.52)]),
        ("12.0", 32, [(12, 0, 1792 / 170 / 2.41), (12, 1, 273 / 48 / 2.5)]),
    ):
        found: dict[tuple[str, bool], set[float]] = {}
        for format, tokens, (major, minor, rate) in itertools.product(
            ("tile", "dense12"), (1, 8, 16, 32, 128, 256, 512), gpus
        ):
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, at=(major, minor): at)
            monkeypatch.setattr(counted, "bytes_a_clock", lambda device, rate=rate: rate)
            key = ("" if tokens > most_tokens else format, tokens > most_tokens)
            found.setdefault(key, set()).add(round(counted.gain(format, 0.5, tokens, torch.device("cuda")), 1))
        texts = {key: f"{min(of)}x" + (f" to {max(of)}x" if len(of) > 1 else "") for key, of in found.items()}
        line = next(line for line in page.splitlines() if line.startswith(f"| {row}"))
        assert f"counted: tile {texts['tile', False]}, dense12 {texts['dense12', False]}" in line
        assert f"| counted: {texts['', True]} |" in line


@pytest.mark.gpu
@needs_capture
def test_autotune_measures_and_is_read_again(own_tables: Path) -> None:
    dense = model().cuda()
    path = macko.autotune(dense, tokens=(1, 2))
    assert path == times.cache_file(torch.cuda.get_device_name())
    known = times.times_of()
    assert known.measured
    measured = known.us(512, 256, 0.5, HALF)
    assert {"dense", "macko", "sell", "ec"} <= {*measured}
    assert all(0.5 < us < 1000 for us in measured.values())
    assert {*known.us(512, 256, 0.5, HALF, tokens=2)} >= {"dense", "macko", "sell"}
    report = macko.sparsify_(dense)
    assert report.layers[0].us_before == pytest.approx(measured["dense"])
    assert macko.autotune(dense) == path  # a sparse model too


@pytest.mark.gpu
def test_the_fastest_format_is_taken(own_tables: Path) -> None:
    name = torch.cuda.get_device_name()
    for best in ("macko", "sell"):  # never ec, which stays where it is put
        us = {"dense": 9.0, "macko": 5.0, "sell": 5.0, "ec": 1.0, best: 2.0}
        times.write(times.cache_file(name), name, [line(2048, 2048, 0.5, **us)], [], 1000)
        sparse = model(2048, 2048).cuda()
        report = macko.sparsify_(sparse, tokens=1)
        assert (report.layers[0].format, report.gain) == (best, pytest.approx(4.5, rel=0.1))


def test_a_broken_table_of_the_user_is_replaced_and_another_file_is_not(tmp_path: Path) -> None:
    for path in (times.cache_file("Some GPU"), tmp_path / "notes.txt"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("no table")
    times.times.cache_clear()
    with pytest.warns(UserWarning, match="is left out"):
        assert times.times("Some GPU").slide == {}
    with pytest.warns(UserWarning, match="is left out"):
        times.write(times.cache_file("Some GPU"), "Some GPU", [], [], 0)
    assert times.read(times.cache_file("Some GPU"))["linear"] == []
    with pytest.raises(ValueError, match="not a table"):
        times.write(tmp_path / "notes.txt", "Some GPU", [], [], 0)
    assert (tmp_path / "notes.txt").read_text() == "no table"
    times.times.cache_clear()


@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), "float16"), ((8, 9), "bfloat16"), ((12, 0), "bfloat16")])
def test_what_is_shared_says_nothing_of_the_user(
    own_tables: Path,
    gpu: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    capability: tuple[int, int],
    dtype: str,
) -> None:
    """A file of a GPU's facts and times, that a table's checks take; on a CPU an error."""
    gpu(capability=capability)
    about = {"gpu": GPU, "capability": "{}.{}".format(*capability), "sms": 128, "driver_version": "580"}
    monkeypatch.setattr(share, "about_gpu", lambda device: about)
    timed: set[torch.dtype] = set()

    def measure(rows: int, cols: int, *others: Any) -> list[dict[str, Any]]:
        timed.add(others[-1])
        return [line(rows, cols, 0.5, dense=2, tile=1)]

    monkeypatch.setattr(share, "measure", measure)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    path = share.share(own_tables / "times.json", progress=False)
    content = json.loads(path.read_text())
    assert content.pop("linear") == [line(*shape, 0.5, dense=2, tile=1) for shape in share.SHAPES]
    assert content == about
    assert timed == {getattr(torch, dtype)}
    monkeypatch.undo()
    assert main(["tune", "--share", "--device", "cpu"]) == 1
    assert main(["tune", "--share", "--shapes", "512x512", "--device", "cpu"]) == 1
    said = capsys.readouterr().err
    assert "--share is of a GPU" in said
    assert "--share has shapes of its own" in said


def test_the_driver_is_asked_about_this_gpu_by_its_uuid(
    gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torch says it without "GPU-", by which nvidia-smi finds none; and where the file goes is seen first."""
    gpu(capability=(8, 9))
    known = {"name": GPU, "major": 8, "minor": 9, "multi_processor_count": 128, "total_memory": 24e9, "uuid": "ffc7-94"}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**known))
    monkeypatch.setattr(share.shutil, "which", lambda name: name)

    def run(command: list[str], **_: Any) -> Any:
        found = "--id=GPU-ffc7-94" in command
        return SimpleNamespace(returncode=0 if found else 6, stdout="580.1, 3105, 10501, 450.00\n" if found else "")

    monkeypatch.setattr(share.subprocess, "run", run)
    about = share.about_gpu(torch.device("cuda"))
    assert (about["driver_version"], about["clocks.max.sm"], about["power.limit"]) == ("580.1", "3105", "450.00")
    (tmp_path / "file").touch()
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(share, "measure", lambda *_: pytest.fail("it measures"))
    with pytest.raises(FileExistsError):
        share.share(tmp_path / "file" / "times.json", progress=False)


def test_doctor_and_reports_say_who_measured(own_tables: Path, gpu: Callable[..., None]) -> None:
    known, other = own_tables / "shipped" / times.file_name("Known"), torch.device("cuda")
    known.write_text(table(line(512, 512, 0.5, dense=9, sell=5, tile=2)).replace(GPU, "Known"))
    for name, capability, said in (
        ("Known", (9, 0), r"wgmma kernels for .*sparse8; times of this GPU come with macko"),
        ("Other", (8, 9), r"mma.sync kernels for .* up to 512 tokens; nobody has measured this GPU.*--share`"),
        ("Old", (7, 5), r"no kernels for tile.*; macko and sell for one token; nobody has measured this GPU.*--share`"),
    ):
        gpu(name, capability, 3)
        assert re.match(said, doctor.kernels_of(other)), name
        notes = choose.counted_note(other, [2.0, None])
        assert bool(notes) == (name != "Known")
        assert choose.counted_note(other, [None]) == []
    gpu("Other", (8, 9), 3)
    times.write(times.cache_file("Other"), "Other", [line(512, 512, 0.5, dense=9, tile=5)], [], 0)
    assert doctor.kernels_of(other).endswith("times by your own `macko tune`")


@pytest.mark.gpu
def test_a_gpus_times_are_shared(tmp_path: Path) -> None:
    path = share.share(tmp_path / "times.json", progress=False, shapes=((512, 512),))
    content = json.loads(path.read_text())
    assert content["gpu"] == torch.cuda.get_device_name()
    assert [entry["tokens"] for entry in content["linear"]] == list(share.TOKENS)
    assert all({"dense", "macko", "sell"} <= {*entry["us"]} for entry in content["linear"])
    assert all(us > 0 for entry in content["linear"] for us in entry["us"].values())
