"""Links of README and docs: a page that moves, or a heading that changes its name, leaves none behind. And imports."""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
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
        text = page.read_text()
        pictures = [(path, "") for path in re.findall(r' (?:src|srcset)="([^"]+)"', text)]
        for path, anchor in [*re.findall(r"\]\((?!\w+:)([^)#]*)#?([^)]*)\)", text), *pictures]:
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


#: Properties and functions that say of a format which one it is, beside the flags of its class.
ASKED = {"keeps_format", "takes_any_weight"}
#: Places outside of macko/weights that may ask for a format. Callers ask a weight for what they want of it instead.
MOST_QUESTIONS = 25


def flags_and_names() -> tuple[set[str], set[str], set[str]]:
    """What the classes of weights declare: flags (ClassVar[bool] and numbers), names of formats, names of classes."""
    flags, formats, classes = set(ASKED), set(), set()
    for file in (MACKO / "weights").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef) and node.name.endswith("Weight"):
                classes.add(node.name)
                for field in (field for field in node.body if isinstance(field, ast.AnnAssign)):
                    assert isinstance(field.target, ast.Name)
                    if ast.unparse(field.annotation) in ("ClassVar[bool]", "ClassVar[float]", "ClassVar[int | None]"):
                        flags.add(field.target.id)
                    elif field.target.id == "format" and isinstance(field.value, ast.Constant):
                        formats.add(str(field.value.value))
    return flags, formats, classes - {"PackedWeight"}  # whether it is packed at all is no question of the format


def questions(source: str) -> list[int]:
    """Lines of code that ask a weight, or a class of weights, which format it is.

    By isinstance, issubclass, `is`, `==` or `in` with a class; by a flag of the class; by comparing `.format` with the
    name of a format, or with that of another weight; by looking something up under a class' name, TileWeight.format; by
    about() that is None. Not by whether somebody chose "auto", or whether what there is is a Tensor.
    """
    flags, formats, classes = flags_and_names()

    def named(node: ast.AST) -> str:
        return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""

    def some(node: ast.AST, known: set[str]) -> bool:
        """Whether it is one of the names, or a literal with one."""
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            return any(some(part, known) for part in node.elts)
        return named(node) in known or (isinstance(node, ast.Constant) and node.value in known)

    def asks(node: ast.AST) -> bool:
        if isinstance(node, ast.Call) and named(node.func) in ("isinstance", "issubclass"):
            return some(node.args[1], classes)
        if isinstance(node, ast.Call):
            looks_up = isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "pop")
            return (looks_up and any(map(is_key, node.args))) or (
                isinstance(node.func, ast.Name) and node.func.id in ASKED
            )
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            literals = [
                part for side in sides if isinstance(side, (ast.Tuple, ast.List, ast.Set)) for part in side.elts
            ]
            if any(some(side, classes) or ast.unparse(side).endswith(".about()") for side in sides):
                return True
            if any(map(is_key, [*sides, *literals])):
                return True
            of_format = [side for side in sides if named(side) == "format"]
            others = [side for side in sides if side not in of_format]
            same = len(of_format) > 1 or any(some(side, formats) for side in others)
            return bool(of_format) and same
        if isinstance(node, ast.Subscript):
            return some(node.slice, classes) or is_key(node.slice)
        return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr in flags

    def is_key(node: ast.AST) -> bool:
        return isinstance(node, ast.Attribute) and node.attr == "format" and named(node.value) in classes

    return sorted(node.lineno for node in ast.walk(ast.parse(source)) if asks(node))  # type: ignore[attr-defined]


def test_every_kind_of_question_is_counted() -> None:
    asked = (
        "isinstance(w, ByteWeight)", "issubclass(kind, (MackoWeight, ByteWeight))", "kind is weights.SellWeight",
        "kind in (TileWeight, EcWeight)", "w.is_layout", "kind.saved_dense", "w.keeps_format", "kind.handicap < 2",
        "takes_any_weight(o.format)", "w.format == 'slide'", "o.format in ('ec', 'auto')", "w.format == format",
        "us.get(TileWeight.format)", "us[TileWeight.format]", "name in ('dense', EcWeight.format)", "w.about() is None",
    )  # fmt: skip
    for line in asked:
        assert questions(line), line
    for line in (
        "isinstance(w, Tensor)",
        "isinstance(w, PackedWeight)",
        "o.format == 'auto'",
        "TileWeight.from_dense(w)",
    ):
        assert not questions(line), line


def test_callers_do_not_ask_for_a_format() -> None:
    files = [file for file in MACKO.rglob("*.py") if "weights" not in file.relative_to(MACKO).parts]
    found = {str(file.relative_to(MACKO)): lines for file in files if (lines := questions(file.read_text()))}
    assert sum(map(len, found.values())) <= MOST_QUESTIONS, found


def c_functions(source: str) -> Iterator[tuple[int, str, str]]:
    """Of each function of a C or CUDA file as clang-format writes it: lines, its head, the comment above."""
    lines = source.splitlines()
    head = begin = None
    for i, line in enumerate(lines):
        if begin is None:
            if re.match(r"\w", line):
                head = None if re.match(r"(namespace|extern|struct|enum|union|typedef|template)\b", line) else i
            code = re.sub(r"\s*(//.*|/\*.*\*/)$", "", line)
            if code.endswith((";", "}")):
                head = None
            elif code.endswith("{") and head is not None:
                begin = i
        elif line.startswith("}"):
            assert head is not None
            above = re.search(r"(^(//|/\*| \*|template|#).*\n)*\Z", "\n".join([*lines[:head], ""]), re.MULTILINE)
            yield i - head + 1, " ".join(lines[head : begin + 1]), above[0] if above else ""
            head = begin = None


def test_functions_of_c_are_short_but_where_a_comment_says_what_ptxas_does() -> None:
    assert [lines for lines, *_ in c_functions("void f(int a,\n       int b) {\n    if (a) {\n    }\n}\n")] == [5]
    files = [file for folder in ("csrc", "contrib") for file in (ROOT / folder).rglob("*.[ch]*")]  # .cu and .cuh too
    found = [(file, *function) for file in files for function in c_functions(file.read_text())]
    assert len(found) > 500
    for file, lines, head, above in found:
        assert lines <= 100 or "ptxas" in above, f"{file.relative_to(ROOT)}: {lines} lines of {head}"
