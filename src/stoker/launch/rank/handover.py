"""Passes settings, script and arguments to a rank: under mpirun and srun in the environment, not on the command line.

Both take a `:` on the command line for the start of another program. The environment also hides the arguments from other users
of the machine, who can read every command line. The value consists of letters and digits only, in pieces that fit in a single
variable, so that no launcher interprets anything. Other ranks receive them this way too if something among them is secret: the
job's own secret, variables that `-genv` sets, or a token in the script's arguments.
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
from stoker.hf.secrets import without_secrets
from stoker.launch.rank.rank_settings import Settings

__all__ = ["FLAG", "command", "rank_command", "take", "variables"]

FLAG = "--handed-over"
"""Replaces the settings on the command line of a rank; the name of the job follows."""
_NAME = "STOKER_HANDOVER"
_PIECE = 96 * 1024
"""Linux takes at most 128 KiB for one variable."""
_LIMIT = 1 << 20
"""Characters in all. This much arrives with Intel MPI, MPICH and Open MPI, and leaves room under Linux' usual 2 MiB."""


def rank_command(settings: Settings, script: str, arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The command of a rank that this process becomes or starts itself, and the environment variables it needs."""
    words = [settings.to_json(), script, *arguments]
    if not (settings.genv or settings.secret or without_secrets(arguments) != list(arguments)):
        return [sys.executable, "-m", "stoker.launch.run", *words], {}
    return command(secrets.token_hex(8), script), variables(words)


def command(job: str, script: str) -> list[str]:
    """The command line of a rank. A plain script name is added for people who look at running processes."""
    shown = [script] if re.fullmatch(r"[\w./][\w./+@ -]*", script) else []
    return [sys.executable, "-m", "stoker.launch.run", FLAG, job, *shown]


def variables(words: Sequence[str]) -> dict[str, str]:
    """The environment variables from which `take` returns `words`."""
    text = base64.urlsafe_b64encode(json.dumps(list(words)).encode()).decode()
    if len(text) > _LIMIT:
        raise UserError(
            f"the script's arguments are too long ({len(text) * 3 // 4:,} bytes of at most "
            f"{_LIMIT * 3 // 4:,}); write them to a file that the script reads"
        )
    pieces = [text[start : start + _PIECE] for start in range(0, len(text), _PIECE)]
    return {_NAME: str(len(pieces)), **{f"{_NAME}_{number}": piece for number, piece in enumerate(pieces)}}


def read(environment: Mapping[str, str]) -> list[str]:
    """The words that the launcher passed in the environment."""
    try:
        count = int(environment[_NAME])
        text = "".join(environment[f"{_NAME}_{number}"] for number in range(count))
        return [str(word) for word in json.loads(base64.urlsafe_b64decode(text))]
    except (KeyError, ValueError, binascii.Error):
        raise UserError(
            "this rank was started without its settings, because its launcher did not pass the environment on; remove "
            "options such as -genvnone"
        ) from None


def take(environment: MutableMapping[str, str] = os.environ) -> list[str]:
    """Like `read`, and removes the variables, so that the script and its children do not see them."""
    words = read(environment)
    for name in [name for name in environment if re.fullmatch(rf"{_NAME}(_\d+)?", name)]:
        del environment[name]
    return words
