"""How settings, script and arguments reach a rank: under mpirun and srun in the environment, not on the command line.

Both take a `:` on the command line for the start of another program, whoever wrote it there. The environment also keeps the
arguments from other users of the machine, who may read every command line. What is carried is letters and digits only, in
pieces that a single variable can hold, so that no launcher has anything to interpret. Other ranks, too, get them so if
`-genv` sets variables, which may be secret.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import secrets
import sys
from collections.abc import Mapping, MutableMapping, Sequence

from stoker.errors import UserError
from stoker.launch.rank.rank_settings import Settings

__all__ = ["FLAG", "command", "rank_command", "take", "variables"]

FLAG = "--handed-over"
"""Stands where the settings would stand on the command line of a rank; the name of the job follows."""
_NAME = "STOKER_HANDOVER"
_PIECE = 96 * 1024
"""Linux takes at most 128 KiB for one variable."""
_LIMIT = 1 << 20
"""Characters in all. This much arrives with Intel MPI, MPICH and Open MPI, and leaves room under Linux' usual 2 MiB."""


def rank_command(settings: Settings, script: str, arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The command of a rank that this process becomes or starts itself, and the variables it needs."""
    words = [settings.to_word(), script, *arguments]
    if not settings.environment:
        return [sys.executable, "-m", "stoker.launch.run", *words], {}
    return command(secrets.token_hex(8), script), variables(words)


def command(job: str, script: str) -> list[str]:
    """The command line of a rank. The script's name is for people who look at running processes, if it is a plain one."""
    shown = [script] if re.fullmatch(r"[\w./][\w./+@ -]*", script) else []
    return [sys.executable, "-m", "stoker.launch.run", FLAG, job, *shown]


def variables(words: Sequence[str]) -> dict[str, str]:
    """What the environment has to hold for `take` to return `words`."""
    text = base64.urlsafe_b64encode(json.dumps(list(words)).encode()).decode()
    if len(text) > _LIMIT:
        raise UserError(
            f"the script's arguments are too long to be passed on ({len(text) * 3 // 4:,} bytes of at most "
            f"{_LIMIT * 3 // 4:,}); write them to a file that the script reads"
        )
    pieces = [text[start : start + _PIECE] for start in range(0, len(text), _PIECE)]
    return {_NAME: str(len(pieces)), **{f"{_NAME}_{number}": piece for number, piece in enumerate(pieces)}}


def read(environment: Mapping[str, str]) -> list[str]:
    """The words that were handed over."""
    try:
        count = int(environment[_NAME])
        text = "".join(environment[f"{_NAME}_{number}"] for number in range(count))
        return [str(word) for word in json.loads(base64.urlsafe_b64decode(text))]
    except (KeyError, ValueError, binascii.Error):
        raise UserError(
            "this rank was started without its settings, because its launcher did not pass on the environment; leave out "
            "options such as -genvnone"
        ) from None


def take(environment: MutableMapping[str, str] = os.environ) -> list[str]:
    """Like `read`, and leaves nothing of it to the script and what that starts."""
    words = read(environment)
    for name in [name for name in environment if re.fullmatch(rf"{_NAME}(_\d+)?", name)]:
        del environment[name]
    return words
