"""The command that goes on from a checkpoint, ready to be pasted: the run as it was started, by `stoker launch` or without.

Secrets are left out and named. Options that would start over, or go on from elsewhere, are left out too.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker.hf.checkpointing import folders
from stoker.hf.secrets import without_secrets

__all__ = ["Launch", "after_failed_launch", "from_launch", "going_on", "launch", "launched_as", "names_output", "output_of",
           "program", "resuming"]  # fmt: skip

_REPLACED = ("__overwrite_output_dir", "__resume_from_checkpoint")


@dataclass(frozen=True)
class Launch:
    """The `stoker launch` that has started this process."""

    words: tuple[str, ...]
    """Its command line up to and including the script: everything but the script's arguments."""
    tells: bool = False
    """It prints the command itself, once all ranks have ended; ranks leave that to it."""
    outer: str | None = None
    """The launcher that has started it as one of several ranks, such as Intel MPI; None if it started them itself."""


_launches: list[Launch] = []
"""The one launch of this process, set before the script begins; empty without one."""


def launched_as(found: Launch) -> None:
    _launches[:] = [found]


def launch() -> Launch | None:
    return _launches[0] if _launches else None


def resuming(checkpoint: Path, arguments: Sequence[str] | None = None) -> str:
    """What to type in order to go on from `checkpoint`: a command for the shell, or a line of Python where that is all.

    `arguments` are those of the `stoker` command that runs (`train qa ...`); without them it is somebody's script.
    """
    started = launch()
    if arguments is not None:
        return from_launch(started.words if started else program(), arguments, checkpoint)
    if not names_output(sys.argv[1:]):  # it takes no options of the Trainer
        return f"  trainer.train(resume_from_checkpoint={json.dumps(str(checkpoint), ensure_ascii=False)})"
    return from_launch(started.words if started else _interpreter(), sys.argv[1:], checkpoint)


def from_launch(words: Sequence[str], arguments: Sequence[str], checkpoint: Path) -> str:
    """`words` up to the script, `arguments` of the script."""
    kept = [*without_secrets(words, None), *going_on(without_secrets(arguments, None))]
    command = shlex.join([*kept, "--resume_from_checkpoint", str(checkpoint)])
    left_out = [*_secret_names(words), *_secret_names(arguments)]
    again = f"\n(secrets are not shown; give again: {' '.join(left_out)})" if left_out else ""
    return f"  {command}{again}"


def going_on(words: Sequence[str]) -> list[str]:
    """A command without what would start over or go on from elsewhere: --overwrite_output_dir, --resume_from_checkpoint."""
    kept: list[str] = []
    value_follows = False
    for word in words:
        option, equals, _ = word.partition("=")
        if option.replace("-", "_") in _REPLACED:
            value_follows = not equals
        elif value_follows and not word.startswith("-"):
            value_follows = False
        else:
            value_follows = False
            kept.append(word)
    return kept


def after_failed_launch(words: Sequence[str], arguments: Sequence[str]) -> str | None:
    """The command that goes on from the last checkpoint of the run that a launch started; None if there is none."""
    folder = output_of(arguments)
    found = _last_checkpoint(Path(folder)) if folder else None
    return from_launch(words, arguments, found) if found is not None else None


def _last_checkpoint(folder: Path) -> Path | None:
    if not folders.all_checkpoints(folder):
        return None
    from stoker.hf.checkpointing.restart import (
        run_began,  # needs torch, which a launcher without a failure need not load
    )

    return folders.last_good(folder, since=run_began(folder))


def names_output(arguments: Sequence[str]) -> bool:
    """Whether a script's arguments are those of a Trainer, so that they take --resume_from_checkpoint too."""
    return output_of(arguments) is not None


def output_of(arguments: Sequence[str]) -> str | None:
    """The value of --output_dir; the last one counts."""
    found = None
    for position, word in enumerate(arguments):
        option, equals, value = word.partition("=")
        if option in ("--output_dir", "--output-dir"):
            found = value if equals else next(iter(arguments[position + 1 : position + 2]), None)
    return found


def program() -> list[str]:
    """The words that call this program as it was called, so that a printed command works when pasted."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py" and called.parent.name == "stoker":
        return [sys.executable, "-m", "stoker"]
    found = shutil.which("stoker")
    if called.name == "stoker" and called.exists() and not (found and os.path.samefile(found, called)):
        return [str(called)]
    return ["stoker"]


def _interpreter() -> list[str]:
    """Python and its own options, and the script or -m MODULE, as they stood on the command line."""
    count = len(sys.argv) - 1
    words = sys.orig_argv[1 : len(sys.orig_argv) - count]
    if not words or sys.orig_argv[len(sys.orig_argv) - count :] != sys.argv[1:]:  # changed on the way
        words = [sys.argv[0]]
    return [sys.executable, *words]


def _secret_names(words: Sequence[str]) -> list[str]:
    mark = "\0"  # no word of a command line holds it
    shown = without_secrets(words, mark)
    values = [*shown[1:], ""]
    return [
        word.partition("=")[0]
        for word, value in zip(shown, values, strict=True)
        if word.endswith(f"={mark}") or value == mark
    ]
