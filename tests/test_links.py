"""Links of README and docs: a page that moves, or a heading that changes its name, leaves none behind. And imports."""

import ast
import re
import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

from macko._moved import MOVED

ROOT = Path(__file__).resolve().parent.parent
MACKO = ROOT / "macko"


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as a Markdown host makes them: the second of a name ends in -1."""
    seen: Counter[str] = Counter()
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        seen[re.sub(r"[^\w -]", "", heading.strip().lower()).replace(" ", "-")] += 1
    return {name + (f"-{i}" if i else "") for name, count in seen.items() for i in range(count)}


def test_every_relative_link_and_anchor_exists() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for path, anchor in re.findall(r"\]\((?!\w+:)([^)#]*)#?([^)]*)\)", page.read_text()):
            target = page.parent / path if path else page
            assert target.exists(), f"{page.relative_to(ROOT)}: there is no {path}"
            assert not anchor or anchor in anchors(target), f"{page.relative_to(ROOT)}: {path} has no #{anchor}"


def imports_of(file: Path, name: tuple[str, ...]) -> set[tuple[str, ...]]:
    """Modules of macko that a file imports, within functions too, each with the names of its packages."""
    tree = ast.parse(file.read_text())
    entry = {node for top in tree.body if isinstance(top, ast.If) for node in ast.walk(top)}  # __name__ == "__main__"
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level and node not in entry:
            package = name[: len(name) - node.level]
            module = tuple(node.module.split(".")) if node.module else ()
            for alias in node.names:
                whole = (*package, *module, alias.name)
                is_module = MACKO.joinpath(*whole).with_suffix(".py").exists()
                found.add(whole if is_module else whole[:-1])
    return found


def test_no_module_imports_one_that_is_above_it() -> None:
    """Neither an arrow up, by the list in CONTRIBUTING.md, nor a circle within a subpackage."""
    listed = re.search(
        r"those before them in this list.*?:\s(.*?)\.\n\n", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL
    )
    assert listed is not None
    order = re.findall(r"`(\w+)`", listed[1])
    within: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for file in MACKO.rglob("*.py"):
        name = file.relative_to(MACKO).with_suffix("").parts
        if name in (("__init__",), ("_moved",)):
            continue
        assert name[0] in order, f"macko.{name[0]} is not in the list of CONTRIBUTING.md"
        for module in filter(None, imports_of(file, name)):
            if module[0] == name[0]:
                within.setdefault(name, set()).add(module if len(module) > 1 else (module[0], "__init__"))
            else:
                assert module[0] not in order[order.index(name[0]) :], f"macko.{'.'.join(name)} imports {module}"
    list(TopologicalSorter(within).static_order())  # CycleError names the circle


def test_old_import_paths_still_work() -> None:
    code = r"""
import pickle, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import macko.formats
    from macko.linear import SparseLinear
    from macko import grids
    from macko.layers import Report, density_of
    assert Report is macko.Report and density_of.__module__ == "macko.choose.patterns"
    assert macko.formats.TileWeight is macko.FORMATS["tile"] and SparseLinear is macko.SparseLinear and grids.float8
    assert pickle.loads(b"cmacko.linear\nSparseLinear\n.") is SparseLinear
assert any("macko.linear is macko.nn.linear now" in str(warning.message) for warning in caught)
assert not hasattr(macko.formats, "no_such_name")
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_every_old_path_names_a_module() -> None:
    for new in " ".join(MOVED.values()).split():
        path = MACKO.joinpath(*new.split("."))
        assert path.with_suffix(".py").exists() or (path / "__init__.py").exists(), new
