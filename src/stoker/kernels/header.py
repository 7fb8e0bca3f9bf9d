"""Reads a C header such as csrc/stoker.h into ctypes: enums become numbers, structs classes, functions signatures.

It knows the C that the header's first lines describe, and refuses anything else with the line. Needs neither torch nor a
compiler: tests/kernels/builds_agree.py binds libraries through it too.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Function", "Header", "HeaderError", "read"]

_SCALARS: dict[str, Any] = {
    name: getattr(ctypes, f"c_{name.removesuffix('_t')}")
    for name in ("int32_t", "int64_t", "uint64_t", "float", "double")
}
_NOTHING = re.compile(r"//[^\n]*|/\*.*?\*/|^[ \t]*#[^\n]*", re.DOTALL | re.MULTILINE)
_ENUM = re.compile(r"enum\s+(\w+)\s*\{([^{}]*)\}\s*;")
_STRUCT = re.compile(r"typedef\s+struct\s+(\w+)\s*\{([^{}]*)\}\s*(\w+)\s*;")
_FUNCTION = re.compile(r"STOKER_API\s+([^(){};]+)\(([^(){};]*)\)\s*;")
_ENUMERATOR = re.compile(r"(\w+)\s*=\s*(\d+)")
_DECLARATION = re.compile(r"(?:const\s+)?(\w+)\b\s*(.+)", re.DOTALL)
_DECLARATOR = re.compile(r"((?:\*\s*(?:const\b)?\s*)*)(\w+)\s*(?:\[(\d+)\])?")


class HeaderError(ValueError):
    """The header has something that the parser does not know; the message names file and line."""


@dataclass(frozen=True)
class Function:
    result: Any
    arguments: dict[str, Any]
    """The ctypes type of each, by name and in order."""


@dataclass(frozen=True)
class Header:
    path: Path
    digest: str
    """The SHA-256 of the file."""
    enums: dict[str, dict[str, int]] = field(default_factory=dict)
    structs: dict[str, type[ctypes.Structure]] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)

    def bind(self, library: ctypes.CDLL) -> ctypes.CDLL:
        """`library` with the argument and result types of every function set."""
        for name, function in self.functions.items():
            handle = getattr(library, name)
            handle.argtypes, handle.restype = list(function.arguments.values()), function.result
        return library


def read(path: Path) -> Header:
    content = path.read_bytes()
    header = Header(path, hashlib.sha256(content).hexdigest())
    text = _NOTHING.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), content.decode())  # keeps the line numbers
    position = 0
    while rest := text[position:].lstrip():
        position = len(text) - len(rest)
        try:
            position = _statement(header, text, position)
        except ValueError as error:
            line = text.count("\n", 0, position) + 1
            raise HeaderError(f"{path}:{line}: {error}; see the top of csrc/stoker.h for those they know") from None
    return header


def _statement(header: Header, text: str, position: int) -> int:
    """Adds the declaration at `position` to `header`; returns where it ends."""
    if found := _ENUM.match(text, position):
        items = [_match(_ENUMERATOR, item) for item in found[2].split(",") if item.strip()]
        header.enums[found[1]] = {item[1]: int(item[2]) for item in items}
    elif (found := _STRUCT.match(text, position)) and found[1] == found[3]:
        fields = [item for text in found[2].split(";") if text.strip() for item in _declared(header, text)]
        # Without a __dict__ an unknown field is an error; ctypes would take it for an attribute.
        header.structs[found[1]] = type(found[1], (ctypes.Structure,), {"_fields_": fields, "__slots__": ()})
    elif found := _FUNCTION.match(text, position):
        ((name, result),) = _declared(header, found[1], void=True)
        arguments = [] if found[2].strip() == "void" else found[2].split(",")
        header.functions[name] = Function(result, dict(item for text in arguments for item in _declared(header, text)))
    else:
        raise _unknown(text[position:].split("\n", 1)[0])
    return found.end()


def _declared(header: Header, text: str, void: bool = False) -> list[tuple[str, Any]]:
    """The names and types of `const float* x` or `int64_t rows, columns, sizes[3]`; None for `void` where it is allowed."""
    base, declarators = _match(_DECLARATION, text).groups()
    if base not in {"void", "char", *_SCALARS, *header.structs}:
        raise _unknown(text)
    found = []
    for stars, name, count in (_match(_DECLARATOR, part).groups() for part in declarators.split(",")):
        kind = _type(header, base, stars.count("*"))
        if kind is None and not (void and base == "void"):
            raise _unknown(text)
        found.append((name, kind * int(count) if count else kind))
    return found


def _type(header: Header, base: str, stars: int) -> Any:
    if stars == 0:
        return _SCALARS.get(base) or header.structs.get(base)
    if stars == 1 and base == "char":
        return ctypes.c_char_p
    return ctypes.POINTER(header.structs[base]) if stars == 1 and base in header.structs else ctypes.c_void_p


def _match(pattern: re.Pattern[str], text: str) -> re.Match[str]:
    if found := pattern.fullmatch(text.strip()):
        return found
    raise _unknown(text)


def _unknown(text: str) -> ValueError:
    return ValueError(f"`{' '.join(text.split())}` is not a declaration that the bindings know")
