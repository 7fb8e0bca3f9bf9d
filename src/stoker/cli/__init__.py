"""The `stoker` command: finds the subcommand, imports only that one, and prints user errors as one sentence.

Exit codes: 0 success, 1 the command failed or found a problem, 2 invalid request, 130 Ctrl-C, 141 broken pipe.
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
    """Runs `stoker` with `argv` (default: the process's arguments) and returns its exit code."""
    streams.keep_running(output=False)
    for stream in (sys.stdout, sys.stderr):
        # Print a question mark for characters that the terminal cannot show.
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
    except BrokenPipeError:  # the reader has exited, as in `stoker ... | head`
        if streams.drops_output():  # the error is about another pipe
            raise
        abandon_output()
        return 141
    except (OSError, MemoryError, RuntimeError) as error:
        sentence, code = _system_reason(error)
        if sentence is None or os.environ.get("STOKER_TRACEBACK"):
            raise
        print(f"stoker: {sentence}", file=sys.stderr)
        abandon_output()
        return code


_LIMITS = {
    errno.ENOSPC: ("no space left to write {}", 1),
    errno.EDQUOT: ("your disk quota leaves no space to write {}", 1),
    errno.EFBIG: ("{} would exceed the maximum file size; raise the limit (ulimit -f)", 2),
    errno.E2BIG: ("arguments and environment are too long for this system; put the arguments into a file", 2),
}
"""Limits of the system: the message and the exit code."""


def _system_reason(error: Exception) -> tuple[str | None, int]:
    """The message and exit code for an error that the system caused; no message for any other."""
    if isinstance(error, OSError) and error.errno in _LIMITS:
        sentence, code = _LIMITS[error.errno]
        return sentence.format(error.filename or "the output"), code
    return outside_reason(error), 1


def abandon_output() -> None:
    """Redirects standard output to /dev/null, so that Python's flush at exit does not fail."""
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
    except SystemExit as stop:  # raised by argparse for --help
        return stop.code if isinstance(stop.code, int) else 0


def _find(name: str) -> Command:
    from stoker.cli.parsing import did_you_mean

    for command in COMMANDS:
        if command.name == name:
            return command
    kind = "option" if name.startswith("-") else "command"
    known = ["--help", "--version"] if kind == "option" else [command.name for command in COMMANDS]
    raise UserError(f"unknown {kind} {name!r}{did_you_mean(name, known)}; `stoker --help` lists them")


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
        "New here? `stoker doctor` looks at this machine, `stoker demo` trains a first model in about four minutes, and",
        "docs/install.md in the source tree leads on from there.",
        "`stoker COMMAND --help` describes a command; `stoker --version` prints the version.",
    ]
    return "\n".join(lines)
