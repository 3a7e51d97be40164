"""Links of README and docs: a page that moves, or a heading that changes its name, leaves none behind."""

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
