"""The options of a command line as names and values, without knowing which options exist."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["options_of"]


def options_of(argv: Sequence[str]) -> dict[str, Any]:
    """The options of a command line, by name. What stands twice has its last value, and words before the first option
    are under an empty name."""
    found: dict[str, list[str]] = {}
    name = ""
    for word in argv:
        if word.startswith("--"):
            option, equals, value = word[2:].partition("=")
            name = option.replace("-", "_")
            found[name] = [value] if equals else []
        else:
            found.setdefault(name, []).append(word)
    return {name: _value(words) for name, words in found.items()}


def _value(words: list[str]) -> Any:
    if len(words) == 1:
        return _plain(words[0])
    return [_plain(word) for word in words] or True


def _plain(word: str) -> Any:
    """A word as YAML writes it without quotes where it is a number or a switch, such as 7 and true."""
    if word in {"True", "true", "False", "false"}:
        return word.lower() == "true"
    try:
        number = int(word)
    except ValueError:
        return word
    return number if str(number) == word else word
