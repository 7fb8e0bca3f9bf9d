"""Recipes: the options of a run in one YAML or JSON file, read in place of a command line and written beside every model.

stoker train qa recipe.yaml --seed 7        options on the command line take precedence
stoker train recipe.yaml                    the recipe names its task
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import yaml

from stoker import __version__
from stoker.command_options import options_of
from stoker.documents import BadDocument, parse_json, parse_yaml
from stoker.errors import UserError
from stoker.hf.secrets import without_secrets
from stoker.user_files import read_text
from stoker.whole_files import write_text

__all__ = ["FILE", "arguments", "expand", "is_recipe", "read", "write"]

FILE = "recipe.yaml"
_ENDINGS = (".yaml", ".yml", ".json")


def is_recipe(word: str) -> bool:
    return word.endswith(_ENDINGS) and not word.startswith("-")


def expand(argv: Sequence[str], tasks: Collection[str], command: str = "train") -> list[str]:
    """`argv` of `stoker train` or another command, with a recipe replaced by its task and its options."""
    named = bool(argv) and not is_recipe(argv[0])
    words = list(argv[1:] if named else argv)
    if not words or not is_recipe(words[0]):
        return list(argv)
    options = read(words[0])
    task = options.pop("task", argv[0] if named else None)
    if task is None:
        raise UserError(
            f"recipe {words[0]} does not name its task; add `task: NAME`, or type stoker {command} NAME {words[0]}"
        )
    if task not in tasks:
        raise UserError(f"recipe {words[0]}: task {task!r} is unknown; choose {', '.join(tasks)}")
    if named and task != argv[0]:
        raise UserError(f"recipe {words[0]} is for stoker train {task}, not for {argv[0]}")
    return [task, *arguments(options), *words[1:]]


def read(path: str) -> dict[str, Any]:
    """The options in a recipe, by name."""
    text = read_text(path, "recipe")
    try:
        content = parse_json(text) if path.endswith(".json") else parse_yaml(text)
    except BadDocument as error:
        raise UserError(f"recipe {path} is not {'JSON' if path.endswith('.json') else 'YAML'}: {error}") from None
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise UserError(f"recipe {path} must contain the names of options with their values, such as `seed: 7`")
    return content


def arguments(options: dict[str, Any]) -> list[str]:
    """Options as a command line."""
    words: list[str] = []
    for name, value in options.items():
        if isinstance(value, list):
            words += [f"--{name}", *map(str, value)]
        elif value is not None:
            words.append(f"--{name}={json.dumps(value) if isinstance(value, dict) else value}")
    return words


def write(folder: Path, task: str, argv: Sequence[str], *, name: str = FILE, repeats: str = "the run") -> None:
    """Writes the recipe that repeats a run into its folder. Tokens and passwords are left out."""
    options = {"task": task, **options_of(without_secrets(argv, instead=None))}
    command = shlex.join(["stoker", "train", str(folder / name), "--output_dir", "NEW_FOLDER"])
    head = (
        f"# Written by Stoker {__version__}. To repeat {repeats}, in the folder where it was started:\n#   {command}\n"
    )
    write_text(folder / name, head + yaml.safe_dump(options, sort_keys=False, allow_unicode=True, width=120))
