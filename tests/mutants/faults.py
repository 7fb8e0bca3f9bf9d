"""Single-line faults: one operator, word or number of the source replaced by another that compiles as well."""

from __future__ import annotations

import ast
import io
import random
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SWAPS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+": "-", "-": "+", "*": "/", "//": "*", "/": "*",
    "+=": "-=", "-=": "+=", "and": "or", "or": "and", "True": "False", "False": "True", "min": "max", "max": "min", "any": "all",
    "all": "any", "break": "pass", "continue": "pass", "&&": "||", "||": "&&", "true": "false", "false": "true",
}  # fmt: skip
# In C++ only what stands between spaces: a `<` of a template, a `*` of a pointer and a `-` of a sign are left alone.
_CPP = re.compile(
    r"(?<= )(<=|>=|==|!=|\+=|-=|&&|\|\||[<>+*/-])(?= )|\b(true|false|min|max)\b|(?<![\w.\"'])([1-9]\d?)(?![\w.\"'])"
)


@dataclass(frozen=True)
class Fault:
    file: str  # from the root of the project
    line: int
    column: int
    old: str
    new: str
    function: int  # the line with which Python's function begins, 0 in C++

    def plant(self, root: Path) -> None:
        path = root / self.file
        lines = path.read_text().split("\n")
        line = lines[self.line - 1]
        assert line[self.column :].startswith(self.old), self
        lines[self.line - 1] = line[: self.column] + self.new + line[self.column + len(self.old) :]
        path.write_text("\n".join(lines))

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column + 1} {self.old} -> {self.new}"


def draw(root: Path, count: int, seed: int) -> list[Fault]:
    """Files by their number of places for faults, so that every place is as likely."""
    places = [fault for path in sorted((root / "src").rglob("*.py")) for fault in _in_python(path, root)]
    places += [
        fault
        for kind in ("*.cpp", "*.h")
        for path in sorted((root / "csrc").rglob(kind))
        for fault in _in_cpp(path, root)
    ]
    return random.Random(seed).sample(places, count)


def _in_python(path: Path, root: Path) -> Iterator[Fault]:
    """Inside of functions only: what a module executes when it is imported, all tests execute."""
    text = path.read_text()
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    bodies = [
        (f.body[0].lineno, f.end_lineno or 0, min([f.lineno, *(d.lineno for d in f.decorator_list)])) for f in functions
    ]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        within = [body for body in bodies if body[0] <= token.start[0] <= body[1]]
        new = _other(token)
        if new is not None and within:
            innermost = max(within)[2]
            yield Fault(str(path.relative_to(root)), token.start[0], token.start[1], token.string, new, innermost)


def _other(token: tokenize.TokenInfo) -> str | None:
    if token.type == tokenize.NUMBER and token.string.isdigit():
        return str(int(token.string) + 1)
    if token.type in (tokenize.OP, tokenize.NAME) and token.string in SWAPS:
        # A starred argument, and the marks of positional and keyword arguments, are no products.
        before = token.line[: token.start[1]].rstrip()[-1:]
        sign = token.string in ("*", "/", "-", "+") and before in ("", "(", ",", "=", "[", "{", ":")
        return None if sign else SWAPS[token.string]
    return None


def _in_cpp(path: Path, root: Path) -> Iterator[Fault]:
    for number, line in enumerate(path.read_text().split("\n"), 1):
        code = line.partition("//")[0]
        if code.lstrip().startswith(("#", "*", "template", "using")):
            continue
        for match in _CPP.finditer(code):
            old = match.group()
            yield Fault(str(path.relative_to(root)), number, match.start(), old, SWAPS.get(old) or str(int(old) + 1), 0)
