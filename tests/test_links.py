"""Links of README and docs: a page that moves, or a heading that changes its name, leaves none behind. And imports."""

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


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


def test_no_module_imports_one_that_is_above_it() -> None:
    """Neither a circle nor an arrow up, by the list in CONTRIBUTING.md."""
    listed = re.search(
        r"those before them in this list.*?:\s(.*?)\.\n\n", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL
    )
    assert listed is not None
    order = re.findall(r"`(\w+)`", listed[1])
    for file in (ROOT / "macko").rglob("*.py"):
        *above, stem = file.relative_to(ROOT / "macko").with_suffix("").parts
        name = above[0] if above else stem
        if name == "__init__":
            continue
        assert name in order, f"macko.{name} is not in the list of CONTRIBUTING.md"
        tree = ast.parse(file.read_text())
        entry = {
            node for top in tree.body if isinstance(top, ast.If) for node in ast.walk(top)
        }  # __name__ == "__main__"
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level > len(above) and node not in entry:
                modules = [node.module.partition(".")[0]] if node.module else [alias.name for alias in node.names]
                up = [module for module in modules if module in order[order.index(name) + 1 :]]
                assert not up, f"macko.{name} imports {up[0]}, which stands above it"
