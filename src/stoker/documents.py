"""Parses yaml and JSON from users, within limits. This is the only place where Stoker parses yaml.

In yaml an alias (`*name`) repeats what an anchor (`&name`) marks, so forty lines can stand for 2^40 values. Values are counted as
if every alias were expanded, while the document is read and before any object is built.
"""

from __future__ import annotations

import datetime
import json
import math
from typing import Any

import yaml

from stoker.english import with_article

__all__ = ["BadDocument", "parse_json", "parse_yaml"]

_DEPTH = 32
_VALUES = 10_000
"""accelerate's own files have about twenty values in three levels."""
_CHARACTERS_OF_A_VALUE = 100
"""A longer text counts as several values."""


class BadDocument(Exception):
    """A document that cannot be used; the message is one line."""


def parse_yaml(text: str) -> Any:
    """The content of a yaml document: texts, numbers, dates, lists and mappings."""
    try:
        loader = _Loader(text)
        try:
            found = loader.get_single_data()
        finally:
            loader.dispose()
        _check(found)
    # PyYAML raises all of these for a tag that does not fit its value, such as `!!timestamp soon`.
    except (yaml.YAMLError, ValueError, ArithmeticError, LookupError, AttributeError, TypeError) as error:
        raise BadDocument(_reason(error)) from None
    return found


def parse_json(text: str) -> Any:
    """The content of a JSON document."""
    try:
        found = json.loads(text)
        _check(found)
    except RecursionError:
        raise BadDocument(f"it is nested deeper than {_DEPTH} levels") from None
    except ValueError as error:
        raise BadDocument(_reason(error)) from None
    return found


class _Loader(yaml.SafeLoader):
    """Counts values and levels, with aliases expanded, and stops at the limits."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._count = 0
        self._open: list[int] = []
        """For each node that is being read, the height of its tallest child so far."""
        self._known: dict[int, tuple[int, int]] = {}
        """Values and height of every finished node, by its id; the nodes live as long as the loader."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        mark, is_alias, before = self.peek_event().start_mark, self.check_event(yaml.AliasEvent), self._count
        self._open.append(0)
        self._limit_depth(0, mark)
        node = super().compose_node(parent, index)
        height = self._open.pop() + 1
        if is_alias:
            if id(node) not in self._known:
                raise yaml.composer.ComposerError(None, None, "an alias is inside what it repeats", mark)
            size, height = self._known[id(node)]
            self._count += size
        else:
            value = node.value if isinstance(node.value, str) else ""
            self._count += 1 + len(value) // _CHARACTERS_OF_A_VALUE
            self._known[id(node)] = (self._count - before, height)
        if self._count > _VALUES:
            raise yaml.composer.ComposerError(None, None, f"it contains more than {_VALUES:,} values", mark)
        self._limit_depth(height, mark)
        if self._open:
            self._open[-1] = max(self._open[-1], height)
        return node

    def _limit_depth(self, height: int, mark: Any) -> None:
        if len(self._open) + height > _DEPTH:
            raise yaml.composer.ComposerError(None, None, f"it is nested deeper than {_DEPTH} levels", mark)


def _check(value: Any, depth: int = 1) -> None:
    """Raises ValueError for values that cannot be written again or make no sense."""
    if depth > _DEPTH:
        raise ValueError(f"it is nested deeper than {_DEPTH} levels")
    if isinstance(value, dict):
        for key, one in value.items():
            _check(key, depth + 1)
            _check(one, depth + 1)
    elif isinstance(value, list):
        for one in value:
            _check(one, depth + 1)
    elif isinstance(value, bool) or value is None or isinstance(value, datetime.date):
        pass
    elif isinstance(value, int):
        if value.bit_length() > 63:
            raise ValueError("it contains a whole number of more than 18 digits")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"it contains {value}, which is not a number")
    elif not isinstance(value, str):
        raise ValueError(
            f"it contains {with_article(type(value).__name__)}, which is neither text, number, list nor mapping"
        )


def _reason(error: Exception) -> str:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    text = f"line {mark.line + 1}: {problem}" if mark is not None and problem else str(error)
    if isinstance(error, LookupError | AttributeError | TypeError):
        text = "a tag (!!...) does not fit its value"
    return " ".join(text.split())
