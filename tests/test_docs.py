"""Links in the documentation lead to files that exist, and the names on the page about a training step are defined there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\[([^\]]+)\]\((?!https?://)([^)#]*)(#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    targets = [target for _, target, _ in LINK.findall(page.read_text())]
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_the_walks_name_functions_and_classes_that_exist() -> None:
    page = ROOT / "docs" / "life-of-a-step.md"
    named = [
        (text.strip("`"), page.parent / target) for text, target, _ in LINK.findall(page.read_text()) if "`" in text
    ]
    assert len(named) > 60
    for name, path in named:
        # Python: a definition or a constant; C++: a class, or a function with its body in this file.
        pattern = rf"^\s*(def|class|struct) {name}\b|^{name}\b.* = |[\s:]{name}\([^;]*\{{"
        assert re.search(pattern, path.read_text(), re.M), f"{path.relative_to(ROOT)} does not define {name}"
