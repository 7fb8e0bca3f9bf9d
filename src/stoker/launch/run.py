"""`python -m stoker.launch.run SETTINGS SCRIPT [ARGUMENTS]`: one rank, from the inside.

Under mpirun and srun all three are passed in the environment (`stoker.launch.rank.handover`).

It finds its rank, binds itself to its share of the machine, sets the variables that torch, transformers and accelerate read,
installs the compatibility layer, and then runs the script as Python would. The launchers start this; users run
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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from stoker import streams
from stoker.comm import gloo_exit
from stoker.distributed import job_store
from stoker.distributed.lost_rank import is_joining
from stoker.errors import UserError
from stoker.hf.checkpointing import command
from stoker.launch.launchers.job_secret import job_secret
from stoker.launch.placement import binding, slurm_cores
from stoker.launch.rank import allocators, exchange, handover, hints, keeper, output, own_address
from stoker.launch.rank.environment import Rank, discover
from stoker.launch.rank.rank_settings import Settings
from stoker.machine import Machine
from stoker.numbers import whole_number

if TYPE_CHECKING:
    from stoker.hf.compat import Layer

__all__ = ["FAILURE_MARK", "die_with_parent", "main"]

FAILURE_MARK = "\x1estoker-failure "
"""Starts a line on stderr that the launcher prints at the end instead of at once."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass
class _RankProcess:
    """What is needed to end this process in the right way."""

    settings: Settings
    rank: Rank | None = None
    screen: int = 2

    def refuse(self, message: str) -> NoReturn:
        """Prints a user error and ends with exit code 2."""
        print(f"stoker: {message}", file=sys.stderr)
        self.end(2, f"stoker: {message}\n")

    def end(self, code: int, text: str | None) -> NoReturn:
        """Reports a failure, has mpirun end the other ranks if it would not do so by itself, and exits as Python would."""
        code = code & 0xFF
        if code and text is not None and self.rank is not None:
            self._report(self.rank.rank, code, text[-20000:])
        pmi = exchange.pmi()
        if code and pmi is not None:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            time.sleep(0.3)  # the last output has to arrive before mpirun ends everything
            pmi.abort(code)
        sys.exit(code)

    def _report(self, rank: int, code: int, text: str) -> None:
        facts = {"rank": rank, "host": socket.gethostname(), "time": time.time(), "code": code, "text": text}
        record, target = json.dumps(facts), self.settings.report
        with contextlib.suppress(OSError):
            if target == "stderr":
                os.write(self.screen, f"{FAILURE_MARK}{record}\n".encode())
            elif target:
                Path(target, f"failed.{rank}.json").write_text(record, encoding="utf-8")


def main(arguments: list[str]) -> NoReturn:
    streams.keep_running()
    try:
        received = handover.read(os.environ) if arguments[0] == handover.FLAG else arguments
        settings, script, rest = Settings.from_json(received[0]), received[1], received[2:]
    except UserError as error:
        print(f"stoker: {error}", file=sys.stderr)
        sys.exit(2)
    if settings.launch_command:
        launch = (settings.launch_command, settings.launcher_prints_resume, settings.outer_launcher)
        command.launched_as(command.Launch(*launch))
    process = _RankProcess(settings)
    try:
        os.environ.update(settings.genv)
        allocators.preload(settings.allocator, [sys.executable, "-m", "stoker.launch.run", *arguments])
        if received is not arguments:
            handover.take()
        process.rank = discover(os.environ)
        if settings.is_one_of_several and process.rank is None:
            raise UserError(
                "this rank was started without the variables of its launcher; `stoker launch --dry-run` shows them"
            )
        launcher, warm = os.getppid(), None
        if (rank := process.rank) is not None and settings.heal and settings.report:
            die_with_parent()
            warm = keeper.keep(rank.rank, Path(settings.report), lambda: _prepare_in_advance(settings, rank))
        process.screen, layer = _prepare(settings, process.rank, launcher, warm)
    except UserError as error:
        process.refuse(str(error))
    _run(process, script, rest, layer)


@dataclass(frozen=True)
class _Prepared:
    """A process in which `_take_place` and `_set_up` were done before it was forked."""

    layer: Layer | None


def _prepare(settings: Settings, rank: Rank | None, launcher: int, warm: _Prepared | None) -> tuple[int, Layer | None]:
    """Everything before the script; returns the descriptor that leads to the screen, and the compatibility layer."""
    if warm is None:
        _take_place(settings, rank)
    elif rank is not None and rank.size > 1:
        die_with_parent()  # not inherited
    screen = _attach_output(settings, rank, launcher)
    return screen, _set_up(settings, rank) if warm is None else warm.layer


def _prepare_in_advance(settings: Settings, rank: Rank) -> _Prepared:
    """All of it but the output, for a process from which others are forked."""
    _take_place(settings, rank)
    return _Prepared(_set_up(settings, rank))


def _take_place(settings: Settings, rank: Rank | None) -> None:
    """Makes this process one of the ranks of its launcher."""
    if rank is not None and rank.size > 1:
        die_with_parent()
    _set_rank_variables(settings, rank)
    if rank is not None and rank.rank > 0:
        _leave_input_to_rank_0()


def _set_up(settings: Settings, rank: Rank | None) -> Layer | None:
    """Cores, variables and import hooks of this process."""
    _bind(settings, rank)
    os.environ.update(settings.variables())
    if rank is not None and rank.size == rank.local_size and rank.size > 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host: gloo listens nowhere else
    if not settings.compat:
        return None
    from stoker.hf.compat import install

    first = rank is None or rank.rank == 0
    return install(optimise=settings.ipex is not False, backend=settings.backend, first=first)


def _leave_input_to_rank_0() -> None:
    """Ranks of one machine share its standard input; otherwise any of them might read what rank 0 waits for."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Ends this process when its parent ends, even if a launcher is killed without a chance to clean up."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def _set_rank_variables(settings: Settings, rank: Rank | None) -> None:
    if rank is None:
        return
    if "PMI_FD" not in os.environ:  # scripts for the oneCCL bindings read these; Hydra has set them already
        os.environ.update(PMI_RANK=str(rank.rank), PMI_SIZE=str(rank.size))
        os.environ.update(MPI_LOCALRANKID=str(rank.local_rank), MPI_LOCALNRANKS=str(rank.local_size))
    if rank.exchange == "given":  # torchrun has set everything
        own_address.serve_own_addresses()
        _use_store_of_agent(settings)
        return
    chosen = {"MASTER_ADDR": settings.master[0], "MASTER_PORT": str(settings.master[1])} if settings.master else {}
    address, port, secret = exchange.agree(rank, {**os.environ, **chosen})
    job_store.use(job_store.JobStore(address, port, secret=settings.secret or secret or _own_secret(rank)))
    os.environ.update(
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
        RANK=str(rank.rank),
        WORLD_SIZE=str(rank.size),
        LOCAL_RANK=str(rank.local_rank),
        LOCAL_WORLD_SIZE=str(rank.local_size),
    )


def _own_secret(rank: Rank) -> str:
    """A secret that no launcher has shared; empty if other ranks may not have it."""
    found = os.environ.get(job_store.SECRET, "")
    if not found and rank.exchange == "names" and 1 < rank.size == rank.local_size:
        with contextlib.suppress(
            UserError
        ):  # ranks of one node have one home directory; without any, none has the file
            found = job_secret()
    return found


def _use_store_of_agent(settings: Settings) -> None:
    """The store that the agent of `stoker launch` serves. torchrun's own agent has told the ranks all there is to know."""
    port = whole_number(os.environ.get("MASTER_PORT", ""))
    if not settings.report or port is None:
        return
    path = job_store.store_path(Path(settings.report), port)
    local = path if path.exists() else None
    job_store.use(job_store.JobStore(os.environ.get("MASTER_ADDR", ""), port, local, settings.secret))


def _attach_output(settings: Settings, rank: Rank | None, launcher: int) -> int:
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
            busy=report / f"forwarding.{number}" if report else None,
            launcher=launcher,
        )
    except OSError as error:
        if log is None or error.filename is None:
            raise
        raise UserError(f"--log-dir {settings.log_dir}: {log} cannot be written: {error.strerror}") from None


def _is_first_round(report: Path | None) -> bool:
    """Whether these are the first ranks of the launch. The agent's own count omits rounds in which machines joined or left."""
    if is_joining() or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return False
    try:
        return report is None or (report / "round").read_text() == "1"
    except OSError:
        return True


def _bind(settings: Settings, rank: Rank | None) -> None:
    local_rank, local_size = (rank.local_rank, rank.local_size) if rank else (0, 1)
    if settings.bind == "auto" and rank is not None and rank.launcher not in ("torchrun", "Slurm"):
        _widen_to_parent()
    machine = Machine.read()
    if rank is not None and rank.launcher == "Slurm":
        settings, local_rank, local_size = slurm_cores.task_share(settings, rank, machine, os.environ)
    placement, notes = binding.choose_in_rank(settings, machine, local_rank, local_size, os.environ)
    if placement is None:
        return
    os.environ.update(binding.thread_variables(placement))
    notes += binding.bind(placement)
    if rank is None or rank.rank == 0:
        for line in notes:
            print(f"stoker: {line}", file=sys.stderr)


def _widen_to_parent() -> None:
    """Undoes mpirun's own pinning (Open MPI: one core for two ranks); its daemon's mask is what the job may use."""
    with contextlib.suppress(OSError, AttributeError):
        if not any(name in os.environ for name in binding.PINNED_BY_HAND):
            os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))


def _run(process: _RankProcess, script: str, rest: list[str], layer: Layer | None) -> NoReturn:
    sys.argv = [script, *rest]
    gloo_exit.wait_at_exit()
    is_module, code = process.settings.module, 0
    text: str | None = None
    try:
        if is_module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
            runpy.run_path(script, run_name="__main__")
    except SystemExit as stop:
        if isinstance(stop.code, int):
            code, text = stop.code, ""
        elif stop.code is not None:
            print(stop.code, file=sys.stderr)
            code, text = 1, str(stop.code)
    except KeyboardInterrupt:
        print("stoker: interrupted", file=sys.stderr)
        process.end(130, None)
    except UserError as error:  # of the compatibility layer, or of Stoker used by the script
        process.refuse(str(error))
    except BaseException as error:
        if is_module and isinstance(error, ImportError) and _raised_above(error):  # python -m has one line for it, too
            process.refuse(f"there is no module {script!r} to run: {error}")
        text = _traceback(error) + "".join(f"stoker: {line}\n" for line in hints.hints(error, rest, script))
        sys.stderr.write(text)
        process.end(1, text)
    if code == 0 and layer is not None and script != "stoker":  # whose own commands measure stock for comparison
        layer.print_hint_if_nothing_was_optimised()
    process.end(code, text)


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


if __name__ == "__main__":
    # The script's modules must not find this one's: run under the real name, so that nothing is imported twice.
    from stoker.launch.run import main as run

    # `python -m` puts the working directory first; `python script.py` does not have it there.
    if sys.path and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]
    run(sys.argv[1:])
