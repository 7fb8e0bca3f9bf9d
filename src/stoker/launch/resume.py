"""After a launch that failed: the command that goes on from the last checkpoint, if the script has left one."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from stoker.hf import checkpoints
from stoker.hf.secrets import without_secrets

__all__ = ["command", "going_on", "tell"]


def command(launch: Sequence[str], arguments: Sequence[str]) -> str | None:
    """`launch` is the command line that failed, `arguments` its script's; None if there is nothing to go on from."""
    folder = _value("--output_dir", arguments)
    found = checkpoints.last_good(Path(folder)) if folder else None
    if found is None:
        return None
    return shlex.join([*going_on(without_secrets(launch, None)), "--resume_from_checkpoint", str(found)])


def going_on(words: Sequence[str]) -> list[str]:
    """A command without what would start over or go on from elsewhere: --overwrite_output_dir, --resume_from_checkpoint."""
    kept: list[str] = []
    dropped = False
    for word in words:
        dropped = (dropped and not word.startswith("--")) or word.partition("=")[0].replace("-", "_") in (
            "__overwrite_output_dir",
            "__resume_from_checkpoint",
        )
        if not dropped:
            kept.append(word)
    return kept


def tell(arguments: Sequence[str]) -> None:
    told = command(["stoker", *sys.argv[1:]], arguments)
    if told is not None:
        print(f"stoker: to go on from the last checkpoint:\n  {told}", file=sys.stderr, flush=True)


def _value(name: str, words: Sequence[str]) -> str | None:
    for position, word in enumerate(words):
        if word == name and position + 1 < len(words):
            return words[position + 1]
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return None
