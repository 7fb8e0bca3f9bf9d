"""The `stoker` command: finds the subcommand, imports that one only, and turns a person's mistakes into one sentence.

Exit codes: 0 done, 1 the command itself found something wrong, 2 it was asked for something that cannot be, 130 Ctrl-C.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import sys
from collections.abc import Callable, Sequence

from stoker import __version__, streams
from stoker.cli.commands import COMMANDS, Command
from stoker.errors import UserError, outside_reason

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `stoker` with `argv` (the process's own without it) and returns its exit code."""
    streams.keep_running(output=False)
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character gets a question mark, not a traceback.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        code = _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"stoker: {error}" if not str(error).startswith("stoker") else error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # `stoker ... | head`: the reader has seen enough
        if streams.drops_output():  # then it was another pipe
            raise
        _abandon_output()
        return 141
    except (OSError, MemoryError, RuntimeError) as error:
        sentence, code = _what_was_refused(error)
        if sentence is None or os.environ.get("STOKER_TRACEBACK"):
            raise
        print(f"stoker: {sentence}", file=sys.stderr)
        _abandon_output()
        return code


_LIMITS = {
    errno.ENOSPC: ("no space left to write {}", 1),
    errno.EDQUOT: ("your share of the disk (quota) leaves no space to write {}", 1),
    errno.EFBIG: ("{} would be larger than files may be here; raise the limit (ulimit -f)", 2),
    errno.E2BIG: ("arguments and environment are longer than this system takes; write the arguments to a file", 2),
}
"""Limits of the system: what happened, and the exit code."""


def _what_was_refused(error: Exception) -> tuple[str | None, int]:
    """The sentence and the exit code for an error whose cause is the machine; no sentence for any other."""
    if isinstance(error, OSError) and error.errno in _LIMITS:
        sentence, code = _LIMITS[error.errno]
        return sentence.format(error.filename or "the output"), code
    return outside_reason(error), 1


def _abandon_output() -> None:
    """Keeps Python's own flush at exit from failing on an output that takes nothing any more."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in {"-h", "--help"} or argv in (["help"], ["help", "help"]):
        print(_overview())
        return 0
    if argv[0] in {"-V", "--version"}:
        print(f"stoker {__version__}")
        return 0
    if argv[0] == "help":
        argv = [argv[1], "--help"]
    command = _find(argv[0])
    run: Callable[[list[str]], int] = importlib.import_module(command.module).main
    try:
        return run(argv[1:])
    except SystemExit as stop:  # argparse's --help ends the program
        return stop.code if isinstance(stop.code, int) else 0


def _find(word: str) -> Command:
    from stoker.cli.parsing import did_you_mean

    for command in COMMANDS:
        if command.name == word:
            return command
    kind = "option" if word.startswith("-") else "command"
    known = ["--help", "--version"] if kind == "option" else [command.name for command in COMMANDS]
    raise UserError(f"unknown {kind} {word!r}{did_you_mean(word, known)}; `stoker --help` lists them")


def _overview() -> str:
    width = max(len(command.name) for command in COMMANDS) + 2
    lines = [
        "stoker: transformer training on CPUs, as fast as the hardware allows",
        "",
        "usage: stoker COMMAND [options]",
    ]
    for group in dict.fromkeys(command.group for command in COMMANDS):
        lines += ["", f"{group}:"]
        lines += [f"  {command.name:<{width}}{command.summary}" for command in COMMANDS if command.group == group]
    lines += [
        "",
        "Start with `stoker doctor`. `stoker COMMAND --help` says more; `stoker --version` prints the version.",
    ]
    return "\n".join(lines)
