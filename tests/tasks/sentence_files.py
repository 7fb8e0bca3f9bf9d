"""Files of pairs, triplets, scored pairs and labelled texts for tests, made from invented sentences."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

KINDS = ("pairs", "triplets", "pairs with scores", "labelled texts", "pairs with classes", "lists")
COLOURS = ("red", "green", "blue", "grey")
THINGS = ("boat", "house", "river", "tower", "horse", "letter", "garden", "bridge", "lamp", "wheel")
TOWNS = ("Torwick", "Ane", "Lessing", "Marl", "Oden", "Pell", "Quay", "Rosta")


def sentence(n: int) -> str:
    thing, town, colour = THINGS[n % 10], TOWNS[n // 10 % 8], COLOURS[n % 4]
    return (
        f"The {thing} of {town} was painted {colour}"
        + " long ago by someone whose name is lost" * (n % 3)
        + f" in {n}."
    )


def question(n: int) -> str:
    return f"Which colour has the {THINGS[n % 10]} of {TOWNS[n // 10 % 8]} in {n}?"


def rows_of(kind: str, count: int = 48) -> list[dict[str, Any]]:
    draw = random.Random(count)
    if kind == "pairs":
        return [{"question": question(n), "context": sentence(n)} for n in range(count)]
    if kind == "triplets":
        return [
            {"anchor": question(n), "positive": sentence(n), "negative": sentence((n + 7) % count)}
            for n in range(count)
        ]
    if kind == "pairs with scores":
        others = [(n, (n + draw.randrange(count)) % count) for n in range(count)]
        return [
            {"sentence1": sentence(a), "sentence2": sentence(b), "score": 5.0 * (a % 4 == b % 4) / (1 + (a != b))}
            for a, b in others
        ]
    if kind == "pairs with classes":
        return [
            {"premise": question(n), "hypothesis": sentence(n + n % 3), "label": ("yes", "no", "perhaps")[n % 3]}
            for n in range(count)
        ]
    if kind == "lists":
        return [
            {"query": question(n), "documents": [sentence((n + d) % count) for d in range(4)], "labels": [0, 2, 1, 0]}
            for n in range(count // 4)
        ]
    return [{"text": sentence(n), "label": COLOURS[n % 4]} for n in range(count)]


def write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path
