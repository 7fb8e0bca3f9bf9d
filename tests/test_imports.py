"""Imports between the packages point one way, and no two source files have the same name."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import stoker

ROOT = Path(stoker.__file__).parent
LAYERS = (
    ("cli",),
    ("tasks", "launch", "plan", "bench"),
    ("hf",),
    ("model", "distributed", "comm"),
    ("kernels",),
    ("machine",),
)
"""A package may import from later layers only, and all packages from the rest: `run_report` and the modules beside it."""
LEVELS = {name: level for level, layer in enumerate(LAYERS) for name in layer}
EXCEPTIONS = {
    ("__init__.py", "hf"): "the public API, imported when a name is first used",
    ("__init__.py", "model"): "the public API, imported when a name is first used",
    ("__init__.py", "machine"): "the public API, imported when a name is first used",
    ("distributed/__init__.py", "launch"): "`setup` is public, and imported when it is first used",
    ("__main__.py", "cli"): "`python -m stoker` is the command",
    ("plan/subject.py", "tasks"): "loads a configuration with the same checks and messages as `stoker train`",
}


def imported_names(source: str) -> Iterator[str]:
    """Every imported name: at the top, in functions, under TYPE_CHECKING, and as a string (importlib, `python -m`)."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports are not used"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and re.fullmatch(r"stoker(\.\w+)+", str(node.value)):
            yield node.value


def test_imports_point_from_cli_down_to_machine() -> None:
    found = set()
    for path in ROOT.rglob("*.py"):
        file = str(path.relative_to(ROOT))
        package, level = file.partition("/")[0], LEVELS.get(file.partition("/")[0], len(LAYERS))
        for name in imported_names(path.read_text()):
            target = name.split(".")[1] if name.startswith("stoker.") else ""
            if target != package and LEVELS.get(target, len(LAYERS) + 1) <= level:
                found.add((file, target))
    assert found - EXCEPTIONS.keys() == set(), "these imports are not allowed"
    assert EXCEPTIONS.keys() - found == set(), "these exceptions are no longer needed"


def repeated_names(root: Path, pattern: str) -> dict[str, set[Path]]:
    """File names without suffix that occur in several folders, with the folders."""
    folders = defaultdict(set)
    for path in root.rglob(pattern):
        folders[path.stem].add(path.parent.relative_to(root))
    return {name: found for name, found in folders.items() if len(found) > 1}


def test_python_file_names_are_unique() -> None:
    """Except for `__init__`, and for the files that play the same part in each task."""
    repeated = repeated_names(ROOT, "*.py")
    del repeated["__init__"]
    names = ("qa", "classify", "sft", "ner", "mlm", "embed", "rerank", "fewshot")
    tasks = {Path(f"tasks/{name}") for name in names}
    assert {name: folders for name, folders in repeated.items() if not folders <= tasks} == {}


@pytest.mark.parametrize("pattern", ["*.cpp", "*.h"])
def test_cpp_file_names_are_unique(pattern: str) -> None:
    assert repeated_names(Path(__file__).parents[1] / "csrc", pattern) == {}
