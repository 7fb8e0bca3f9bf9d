"""docs/models.md: written from the results of all architectures, and read back by the test that compares the two."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["FAILED", "HOW", "PAGE", "differences", "draw", "recorded", "write"]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
DRAWN = 25
SEED = 28

FAILED = ("wrong", "crash", "silent")
"""The outcomes of a case that are failures."""

HOW = {
    "fused": "fused",
    "padding-free": "padding-free",
    "attention": "attention",
    "leaf kernels": "stock",
    "stock": "stock",
}
"""The outcome of a case, and what the page calls it. Kernels of single modules run wherever there are such modules."""

_HEAD = """# Models

How every architecture of transformers {version} that can be configured small runs after `stoker.optimize`. The table is
written by `python tests/zoo/run.py --page`, which builds each of them with random weights and compares outputs, loss and
gradients with those of the stock model, example by example without padding: padding on the right, on the left and none, in
fp32 and under bf16 autocast, with `stoker.optimize` and with `attn_implementation="stoker"` alone. Of {built} folders, {wrong}
give other results than stock, {crash} end in an error where stock does not, and {silent} run as stock without saying why.

| how it runs | folders | what it means |
|---|---|---|
| fused | {fused} | its layers are in [the table](optimize.md#families): fused kernels, padding is not computed |
| padding-free | {padding_free} | its own layers run over packed rows with Stoker's attention; padding is not computed |
| attention | {attention} | Stoker's attention instead of transformers'; padding is computed |
| stock | {stock} | as in transformers, with Stoker's kernels for single modules: linear layers, norms, activations |

A folder counts once, by the fastest of its classes. Images and recordings have no padding, so there is nothing to gain there
but attention. The reason is what the log or `stoker.report(model)` says.

| folder | class | how it runs | why |
|---|---|---|---|
"""

_TAIL = """
Not examined, because no small configuration and input were found by their configuration class alone: {missing}.
"""


def write(cases: list[dict[str, Any]], version: str, path: Path = PAGE) -> None:
    """Writes the page. Cases that failed are rows too, so that nobody reads more into the page than there is."""
    built = [case for case in cases if case["outcome"] != "not built"]
    names = {case["folder"] for case in built}
    best = {name: min(_rank(case) for case in built if case["folder"] == name) for name in names}
    counts = {how: sum(rank == place for rank in best.values()) for place, how in enumerate(_ORDER)}
    failed = {kind: len({case["folder"] for case in built if case["outcome"] == kind}) for kind in FAILED}
    head = _HEAD.format(
        version=version,
        built=len(names),
        **failed,
        fused=counts["fused"],
        padding_free=counts["padding-free"],
        attention=counts["attention"],
        stock=counts["stock"],
    )
    rows = [_row(case) for case in sorted(built, key=lambda case: (case["folder"], case["name"]))]
    missing = sorted({case["folder"] for case in cases} - names)
    path.write_text(head + "\n".join(rows) + "\n" + _TAIL.format(missing=", ".join(missing) or "none"))


_ORDER = ("fused", "padding-free", "attention", "stock")


def _rank(case: dict[str, Any]) -> int:
    return _ORDER.index(HOW[case["outcome"]]) if case["outcome"] in HOW else len(_ORDER)


def _row(case: dict[str, Any]) -> str:
    why = case["why"]
    if because := re.search(r"because (.*?)( \(logged once\))?$", why):
        why = because[1]
    why = re.sub(r"^padding, .* is of no family in the table .*, and cannot run without padding otherwise: ", "", why)
    cells = (case["folder"], case["name"], HOW.get(case["outcome"], case["outcome"]), why.replace("|", "\\|"))
    return "| " + " | ".join(cells) + " |"


_ROW = re.compile(r"^\| (\w+) \| (\w+) \| ([\w-]+) \| (.*) \|$", re.M)


def recorded(path: Path = PAGE) -> dict[tuple[str, str], str]:
    """(folder, class) -> how it runs, as the page says."""
    return {(folder, name): how for folder, name, how, _ in _ROW.findall(path.read_text()) if folder != "folder"}


def differences(cases: list[dict[str, Any]], path: Path = PAGE) -> list[str]:
    """What the page says otherwise than these results of all folders."""
    said = recorded(path)
    found = {
        (case["folder"], case["name"]): HOW.get(case["outcome"], case["outcome"])
        for case in cases
        if case["outcome"] != "not built"
    }
    return [
        f"{folder}: {name}: {said.get((folder, name), 'missing')}, but it is {found.get((folder, name), 'gone')}"
        for folder, name in sorted({*said, *found})
        if said.get((folder, name)) != found.get((folder, name))
    ]


def draw(folders: Iterable[str]) -> list[str]:
    """The folders that `make test` examines."""
    names = sorted(set(folders))
    return sorted(random.Random(SEED).sample(names, min(DRAWN, len(names))))
