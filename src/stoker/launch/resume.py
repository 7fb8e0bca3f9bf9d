"""How to go on after a launch has ended early: what its ranks are told of it, and the command that it prints itself."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from stoker.hf import checkpoints
from stoker.hf.checkpointing.command import from_launch, names_output, output_of, program
from stoker.hf.secrets import without_secrets
from stoker.launch.options import Options
from stoker.launch.settings import Settings

__all__ = ["command", "tell", "with_launch"]


def with_launch(settings: Settings, options: Options, *, tells: bool = False, outer: str | None = None) -> Settings:
    """The settings with what a rank needs in order to print the command, or to leave that to this process (`tells`)."""
    return replace(
        settings, launched=_words(options), tells=tells and names_output(options.arguments), outer=outer
    )  # fmt: skip


def _words(options: Options) -> tuple[str, ...]:
    """This command line up to the script, as it was typed; its secrets are hidden."""
    typed = sys.argv[1 : len(sys.argv) - len(options.arguments)]
    if typed[:1] != ["launch"] or [*typed, *options.arguments] != sys.argv[1:]:  # called from Python
        typed = ["launch", *["-m"] * options.module, options.script]
    return (*program(), *without_secrets(typed))


def command(launched: Sequence[str], arguments: Sequence[str]) -> str | None:
    """The command that goes on from the last checkpoint of the run that `launched` started; None if there is none."""
    folder = output_of(arguments)
    found = _last_checkpoint(Path(folder)) if folder else None
    return from_launch(launched, arguments, found) if found is not None else None


def _last_checkpoint(folder: Path) -> Path | None:
    if not checkpoints.all_checkpoints(folder):
        return None
    from stoker.hf.restart import run_began  # it needs torch, which a launcher without a failure need not load

    return checkpoints.last_good(folder, since=run_began(folder))


def tell(launched: Sequence[str], arguments: Sequence[str]) -> None:
    told = command(launched, arguments)
    if told is not None:
        print(f"stoker: to go on from the last checkpoint:\n{told}", file=sys.stderr, flush=True)
