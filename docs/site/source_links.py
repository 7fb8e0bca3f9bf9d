"""A hook of mkdocs: links from a page to a source file become the file's name, because the site has the pages only.

In the repository these links lead to the files; tests/test_docs.py checks that they exist.
"""

from __future__ import annotations

import re
from typing import Any

SOURCE_LINK = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    def named(match: re.Match[str]) -> str:
        text, path = match[1], match[2]
        return text if path.endswith(text.strip("`")) else f"{text} (`{path}`)"

    return SOURCE_LINK.sub(named, markdown)
