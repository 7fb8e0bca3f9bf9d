"""`python -m stoker.launch.run SETTINGS SCRIPT [ARGUMENTS]`: one rank, from the inside.

Under mpirun and srun the three of them come in the environment (`stoker.launch.rank.handover`).

It finds its rank, takes its place on the machine, sets the variables that torch, transformers and accelerate read,
installs the compatibility layer, and then runs the script as Python would. The launchers start this; people type
`stoker launch`.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from stoker import streams
from stoker.errors import UserError
from stoker.hf.checkpointing import command
from stoker.launch.placement import binding
from stoker.launch.rank import allocators, exchange, handover, hints, output
from stoker.launch.rank.environment import Rank, discover
from stoker.launch.rank.rank_settings import Settings
from stoker.machine import Machine

if TYPE_CHECKING:
    from stoker.hf.compat import Layer

__all__ = ["FAILURE_MARK", "die_with_parent", "main"]

FAILURE_MARK = "\x1estoker-failure "
"""Begins a line on stderr that the launcher keeps for the end instead of showing it."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(arguments: list[str]) -> NoReturn:
    streams.keep_running()
    try:
        told = handover.read(os.environ) if arguments[0] == handover.FLAG else arguments
        settings, script, rest = Settings.from_word(told[0]), told[1], told[2:]
    except UserError as error:
        print(f"stoker: {error}", file=sys.stderr)
        sys.exit(2)
    if settings.launched:
        command.launched_as(command.Launch(settings.launched, settings.tells, settings.outer))
    rank: Rank | None = None
    screen = 2
    try:
        os.environ.update(settings.environment)
        allocators.preload(settings.allocator, [sys.executable, "-m", "stoker.launch.run", *arguments])
        if told is not arguments:
            handover.take()
        rank = discover(os.environ)
        if settings.several and rank is None:
            raise UserError(
                "this rank was started without the variables of its launcher; `stoker launch --dry-run` shows them"
            )
        screen, layer = _prepare(settings, rank)
    except UserError as error:
        print(f"stoker: {error}", file=sys.stderr)
        _end(settings, rank, 2, f"stoker: {error}\n", screen)
    _run(settings, rank, script, rest, screen, layer)


def _prepare(settings: Settings, rank: Rank | None) -> tuple[int, Layer | None]:
    """Everything before the script; returns the descriptor that leads to the screen, and the compatibility layer."""
    if rank is not None and rank.size > 1:
        die_with_parent()
    _join(settings, rank)
    if rank is not None and rank.rank > 0:
        _leave_input_to_rank_0()
    screen = _attach_output(settings, rank)
    _take_place(settings, rank)
    os.environ.update(settings.accelerate_variables())
    if rank is not None and rank.size == rank.local_size and rank.size > 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host: gloo listens nowhere else
    if not settings.compat:
        return screen, None
    from stoker.hf.compat import install

    first = rank is None or rank.rank == 0
    return screen, install(optimise=settings.ipex is not False, backend=settings.backend, first=first)


def _leave_input_to_rank_0() -> None:
    """Ranks of one machine share its standard input; without this, any of them might take what rank 0 asks for."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """A launcher that is killed without a chance to clean up takes this process along."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def _join(settings: Settings, rank: Rank | None) -> None:
    if rank is None or rank.exchange == "given":  # torchrun has set everything
        return
    address, port = settings.master or exchange.agree(rank, os.environ)
    if settings.master and rank.exchange == "pmi":
        exchange.agree(rank, {**os.environ, "MASTER_ADDR": address, "MASTER_PORT": str(port)})
    os.environ.update(
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
        RANK=str(rank.rank),
        WORLD_SIZE=str(rank.size),
        LOCAL_RANK=str(rank.local_rank),
        LOCAL_WORLD_SIZE=str(rank.local_size),
    )


def _attach_output(settings: Settings, rank: Rank | None) -> int:
    number = rank.rank if rank else 0
    several = rank is not None and rank.size > 1
    log = Path(settings.log_dir) / f"rank_{number}.log" if settings.log_dir else None
    if log is None and not (several and settings.prefix):
        return 2
    report = Path(settings.report) if settings.report and settings.report != "stderr" else None
    try:
        return output.attach(
            f"[{number}] " if several and settings.prefix else "",
            log,
            progress=number == 0,
            fresh=_is_first_round(report),
            busy=report / f"speaking.{number}" if report else None,
        )
    except OSError as error:
        if log is None or error.filename is None:
            raise
        raise UserError(f"--log-dir {settings.log_dir}: {log} cannot be written: {error.strerror}") from None


def _is_first_round(report: Path | None) -> bool:
    """Whether these ranks are the first of the launch. The agent's own count leaves out rounds in which machines came or went."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return False
    try:
        return report is None or (report / "round").read_text() == "1"
    except OSError:
        return True


def _take_place(settings: Settings, rank: Rank | None) -> None:
    local_rank, local_size = (rank.local_rank, rank.local_size) if rank else (0, 1)
    if rank is not None and rank.launcher == "Slurm":
        local_rank, local_size = 0, 1  # Slurm gives each task its own mask
    elif settings.bind == "auto" and rank is not None and rank.launcher not in ("torchrun",):
        _widen_to_parent()
    placement, note = binding.choose(settings, Machine.read(), local_rank, local_size, os.environ)
    if placement is None:
        return
    os.environ.update(binding.thread_variables(placement))
    notes = [note] * bool(note) + binding.bind(placement)
    if rank is None or rank.rank == 0:
        for line in notes:
            print(f"stoker: {line}", file=sys.stderr)


def _widen_to_parent() -> None:
    """mpirun pins by rules of its own (Open MPI: one core for two ranks); its daemon's mask is what the job may use."""
    with contextlib.suppress(OSError, AttributeError):
        if not any(name in os.environ for name in binding.PINNED_BY_HAND):
            os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))


def _run(
    settings: Settings, rank: Rank | None, script: str, rest: list[str], screen: int, layer: Layer | None
) -> NoReturn:
    sys.argv = [script, *rest]
    try:
        if settings.module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
            runpy.run_path(script, run_name="__main__")
        _say_if_nothing_was_optimised(script, layer)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
        if stop.code is not None and not isinstance(stop.code, int):
            print(stop.code, file=sys.stderr)
        if code == 0:
            _say_if_nothing_was_optimised(script, layer)
        _end(settings, rank, code, "" if isinstance(stop.code, int) else str(stop.code), screen)
    except KeyboardInterrupt:
        print("stoker: interrupted", file=sys.stderr)
        _end(settings, rank, 130, None, screen)
    except UserError as error:  # of the compatibility layer, or of Stoker used by the script
        print(f"stoker: {error}", file=sys.stderr)
        _end(settings, rank, 2, f"stoker: {error}\n", screen)
    except ImportError as error:
        if settings.module and _raised_above(error):  # python -m has one line for it, too
            text = f"there is no module {script!r} to run: {error}"
            print(f"stoker: {text}", file=sys.stderr)
            _end(settings, rank, 2, f"stoker: {text}\n", screen)
        _fail(settings, rank, error, [script, *rest], screen)
    except BaseException as error:
        _fail(settings, rank, error, [script, *rest], screen)
    _end(settings, rank, 0, None, screen)


def _say_if_nothing_was_optimised(script: str, layer: Layer | None) -> None:
    if layer is not None and script != "stoker":  # whose own commands measure stock for comparison
        layer.say_if_nothing_was_optimised()


def _fail(settings: Settings, rank: Rank | None, error: BaseException, words: list[str], screen: int) -> NoReturn:
    text = _traceback(error) + "".join(f"stoker: {line}\n" for line in hints.hints(error, words[1:], words[0]))
    sys.stderr.write(text)
    _end(settings, rank, 1, text, screen)


def _traceback(error: BaseException) -> str:
    """Python's own, without the frames above the script. A script that cannot be compiled has no frame at all."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename in _ABOVE:
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(error), error, frame))


def _raised_above(error: BaseException | None) -> bool:
    """Whether an error, and what led to it, comes from looking for the script rather than from a line of it."""
    while error is not None:
        frame = error.__traceback__
        while frame is not None:
            if frame.tb_frame.f_code.co_filename not in _ABOVE | _IMPORTING:
                return False
            frame = frame.tb_next
        error = error.__cause__ or error.__context__
    return True


_ABOVE = {__file__, "<frozen runpy>", runpy.__file__}
_IMPORTING = {"<frozen importlib.util>", "<frozen importlib._bootstrap>", importlib.util.__file__}


def _end(settings: Settings, rank: Rank | None, code: int, text: str | None, screen: int) -> NoReturn:
    """Leaves word of a failure, ends the others where the launcher needs to be told, and exits as Python would."""
    number = rank.rank if rank else 0
    code = code & 0xFF
    if code and text is not None and rank is not None:
        _report(settings, number, code, text[-20000:], screen)
    conversation = exchange.pmi()
    if code and conversation is not None:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        time.sleep(0.3)  # the last words have to travel before mpirun ends everything
        conversation.abort(code)
    sys.exit(code)


def _report(settings: Settings, rank: int, code: int, text: str, screen: int) -> None:
    record = json.dumps({"rank": rank, "host": socket.gethostname(), "time": time.time(), "code": code, "text": text})
    if settings.report == "stderr":
        with contextlib.suppress(OSError):
            os.write(screen, f"{FAILURE_MARK}{record}\n".encode())
    elif settings.report:
        with contextlib.suppress(OSError):
            Path(settings.report, f"failed.{rank}.json").write_text(record, encoding="utf-8")


if __name__ == "__main__":
    # The script's modules must not find this one's: run under the real name, so that nothing is imported twice.
    from stoker.launch.run import main as run

    # `python -m` puts the working directory first; `python script.py` does not have it there.
    if sys.path and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]
    run(sys.argv[1:])
