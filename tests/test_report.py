"""benchmarks.report: what a table makes of lines, and what it puts into a page."""

import json
from pathlib import Path

import pytest

from benchmarks import records, report
from benchmarks.records import Line, wide
from benchmarks.report import Table


def lines(*ms: float, **more: object) -> list[Line]:
    return [{"side": "ours", "batch": 1 << at, "ms": value, "gain": 6 / value, **more} for at, value in enumerate(ms)]


def test_of_lines_alike_the_last_one_counts(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps({**line, "run": run}) + "\n" for run in (1, 2) for line in lines(1.0, 2.0)))
    assert [line["run"] for line in records.read(path, "side", "batch")] == [2, 2]
    assert [line["batch"] for line in records.read(path, "side", "batch", ms=2.0)] == [2]
    assert records.read(tmp_path / "none.jsonl") == []


def test_a_table_has_a_column_for_each_name() -> None:
    table = Table("side | @ request(s) | never", "{side} | {@ ms:.1f}[ ({@ faster:.2f}x)] | {nothing}")
    some = wide(lines(1, 2, faster=3.0) + lines(4, side="theirs"), "{side}", "{batch}")
    assert table(some).splitlines() == [
        "| side | 1 request | 2 requests |",
        "| --- | --- | --- |",
        "| ours | 1.0 (3.00x) | 2.0 (3.00x) |",
        "| theirs | 4.0 | - |",
    ]


def test_a_mean_has_the_least_beside_it() -> None:
    (row,) = wide(lines(1, 1.5), "{side}", "all")
    assert (row["all mean"], row["all n"]) == ("4.90x (4.00x)", 2)
    foot = Table("side | all", "{side} | {all mean}", needs="all n", foot=[(max, "most | {all gain:.1f}")])
    assert foot([row, {"side": "not shown"}]).splitlines()[2:] == ["| ours | 4.90x (4.00x) |", "| most | 4.9 |"]


def test_a_gain_is_over_the_fastest_alike() -> None:
    some = lines(1, 2) + lines(3, 3, side="dense") + lines(5, 5, side="dense")
    found = records.against(some, {"side": "dense"}, "batch")
    assert [line.get("faster") for line in found] == [3, 1.5, None, None, None, None]


def test_a_page_asks_for_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "PARTS", {"ours": (lambda: lines(1.0), Table("ms", "{ms}")), "none": (list, str)})
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- report: ours -->\nold\n<!-- end -->\nb\n<!-- report: none -->\n<!-- end -->\n")
    report.fill(page)
    filled = "a\n<!-- report: ours -->\n| ms |\n| --- |\n| 1.0 |\n<!-- end -->\nb\n<!-- report: none -->\n"
    assert page.read_text() == filled + report.NO_LINES + "\n<!-- end -->\n"
    for text, error in (("<!-- report: theirs -->\n<!-- end -->\n", "theirs"), ("a <!-- report: ours -->\n", "alone")):
        page.write_text(text)
        with pytest.raises(ValueError, match=error):
            report.fill(page)


def test_a_ratio_by_sparsity_is_over_dense_of_its_own_run(tmp_path: Path) -> None:
    runs = {"old": {0.0: 8, 0.5: 4, 0.7: 2}, "new": {0.0: 6, 0.5: 3}}
    about, some = {"what": "decode", "batch": 1, "tokens": None}, []
    for of, times in runs.items():
        for zeros, ms in times.items():
            some.append({**about, "model": "sparse" if zeros else "dense", "sparsity": zeros, "ms": ms, "commit": of})
    (tmp_path / "sparsity.jsonl").write_text("".join(json.dumps(line) + "\n" for line in some))
    found = [(line["sparsity"], line["ms"], line["gain"]) for line in records.sparsity(tmp_path)]
    assert found == [(0.0, 6, 1), (0.5, 3, 2), (0.7, 2, 4)]


def test_every_colour_has_one_for_a_dark_page() -> None:
    plots = pytest.importorskip("benchmarks.plots", exc_type=ImportError)
    assert {*plots.COLOURS.values()} <= {*plots.DARK}
    assert len({*plots.DARK.values()}) == len(plots.DARK)
