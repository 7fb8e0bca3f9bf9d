"""The command that resumes from a checkpoint, ready to be pasted: the run as it was started, by `stoker launch` or without.

Secrets are left out and named. Options that would start over, or resume from another checkpoint, are left out too.
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

__all__ = ["Launch", "after_failed_launch", "from_launch", "how_to_resume", "launch", "launched_as", "output_of",
           "program", "resuming", "without_start_options"]  # fmt: skip

_REPLACED = ("__overwrite_output_dir", "__resume_from_checkpoint")


@dataclass(frozen=True)
class Launch:
    """The `stoker launch` that started this process."""

    command: tuple[str, ...]
    """Its command line up to and including the script, without the script's arguments."""
    prints_command: bool = False
    """It prints the resume command itself when all ranks have ended; ranks do not."""
    outer: str | None = None
    """The launcher that started `stoker launch` in each rank, such as Intel MPI; None if `stoker launch` started the ranks."""


launches: list[Launch] = []
"""The launch of this process, set before the script starts; empty without one."""


def launched_as(found: Launch) -> None:
    launches[:] = [found]


def launch() -> Launch | None:
    return launches[0] if launches else None


def resuming(checkpoint: Path, arguments: Sequence[str] | None = None) -> str:
    """How to resume from `checkpoint`: a shell command, or a line of Python for a script without Trainer options.

    `arguments` are those of the `stoker` command that runs (`train qa ...`); None for a script.
    """
    started = launch()
    if arguments is not None:
        return from_launch(started.command if started else program(), arguments, checkpoint)
    if output_of(sys.argv[1:]) is None:  # it takes no options of the Trainer
        return f"  trainer.train(resume_from_checkpoint={json.dumps(str(checkpoint), ensure_ascii=False)})"
    return from_launch(started.command if started else _interpreter(), sys.argv[1:], checkpoint)


def how_to_resume(checkpoint: Path, arguments: Sequence[str] | None, processes: int) -> str:
    """Text that follows "saved <checkpoint>."; empty if the launcher of the ranks prints it for all of them."""
    started = launch()
    if started is not None and started.prints_command:
        return ""
    by_hand = processes > 1 and (started is None or started.outer is not None)
    outer = f" by {started.outer}" if started is not None and started.outer else ""
    how = f" (start {processes} processes{outer} as before)" if by_hand else ""
    return f"\nTo resume{how}:\n{resuming(checkpoint, arguments)}"


def from_launch(command: Sequence[str], arguments: Sequence[str], checkpoint: Path) -> str:
    """The resume command; `command` is the command line up to the script, `arguments` are those of the script."""
    kept = [*without_secrets(command, None), *without_start_options(without_secrets(arguments, None))]
    line = shlex.join([*kept, "--resume_from_checkpoint", str(checkpoint)])
    left_out = [*_secret_names(command), *_secret_names(arguments)]
    again = f"\n(secrets are not shown; give again: {' '.join(left_out)})" if left_out else ""
    return f"  {line}{again}"


def without_start_options(arguments: Sequence[str]) -> list[str]:
    """Removes what would start over or resume from elsewhere: --overwrite_output_dir, --resume_from_checkpoint."""
    kept: list[str] = []
    value_follows = False
    for argument in arguments:
        option, equals, _ = argument.partition("=")
        if option.replace("-", "_") in _REPLACED:
            value_follows = not equals
        elif value_follows and not argument.startswith("-"):
            value_follows = False
        else:
            value_follows = False
            kept.append(argument)
    return kept


def after_failed_launch(command: Sequence[str], arguments: Sequence[str]) -> str | None:
    """The command that resumes from the last checkpoint of the run that a launch started; None without a checkpoint."""
    folder = output_of(arguments)
    found = _last_checkpoint(Path(folder)) if folder else None
    return from_launch(command, arguments, found) if found is not None else None


def _last_checkpoint(folder: Path) -> Path | None:
    if not folders.all_checkpoints(folder):
        return None
    from stoker.hf.checkpointing.restart import (
        run_began,  # needs torch, which a launcher without a failure need not load
    )

    return folders.last_good(folder, since=run_began(folder))


def output_of(arguments: Sequence[str]) -> str | None:
    """The value of --output_dir, the last one if there are several; None if the script has no options of a Trainer."""
    found = None
    for position, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        if option in ("--output_dir", "--output-dir"):
            found = value if equals else next(iter(arguments[position + 1 : position + 2]), None)
    return found


def program() -> list[str]:
    """The program as it was called, so that a printed command works when pasted."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py" and called.parent.name == "stoker":
        return [sys.executable, "-m", "stoker"]
    found = shutil.which("stoker")
    if called.name == "stoker" and called.exists() and not (found and os.path.samefile(found, called)):
        return [str(called)]
    return ["stoker"]


def _interpreter() -> list[str]:
    """Python, its own options, and the script or -m MODULE, as on the command line."""
    count = len(sys.argv) - 1
    before = sys.orig_argv[1 : len(sys.orig_argv) - count]
    if not before or sys.orig_argv[len(sys.orig_argv) - count :] != sys.argv[1:]:  # changed by the script
        before = [sys.argv[0]]
    return [sys.executable, *before]


def _secret_names(command: Sequence[str]) -> list[str]:
    mark = "\0"  # cannot occur on a command line
    shown = without_secrets(command, mark)
    values = [*shown[1:], ""]
    return [
        one.partition("=")[0]
        for one, value in zip(shown, values, strict=True)
        if one.endswith(f"={mark}") or value == mark
    ]
