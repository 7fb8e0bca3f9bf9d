"""mpirun of Intel MPI, MPICH and Open MPI: finding one, its command line, its output and its exit code."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from stoker import streams
from stoker.errors import UserError
from stoker.launch.launchers import remote_hosts
from stoker.launch.launchers.guard import Lifelines
from stoker.launch.placement.hostfile import Host
from stoker.launch.rank import failure, leftovers
from stoker.launch.run import FAILURE_MARK, die_with_parent
from stoker.machine.launchers import Launcher, find_launchers

__all__ = ["KINDS", "Mpirun", "command", "find", "hostfile_text", "launch"]

KINDS = {"impi": "Intel MPI", "mpich": "MPICH", "openmpi": "Open MPI"}
_INSTALL = {"impi": "impi-rt==2021.18.1", "mpich": "mpich", "openmpi": "openmpi"}

# Open MPI passes only variables that are named to other machines; training depends on these.
_CARRIED = ("HF_", "TRANSFORMERS_", "ACCELERATE_", "CCL_", "OMP_", "KMP_", "MKL_", "FI_", "I_MPI_", "STOKER_", "TORCH_",
            "TOKENIZERS_", "GLOO_", "PYTHON", "MASTER_")  # fmt: skip

# ssh must not hang on a dead machine, and must never prompt.
_SSH = "-o BatchMode=yes -o ServerAliveInterval=3 -o ServerAliveCountMax=3"


@dataclass(frozen=True)
class Mpirun:
    """An installed mpirun."""

    kind: str
    """impi, mpich or openmpi."""
    path: str

    @property
    def prefix(self) -> str:
        return os.path.dirname(os.path.dirname(os.path.realpath(self.path)))


def find(wanted: str = "auto", launchers: Sequence[Launcher] | None = None) -> Mpirun:
    """The mpirun to use: the requested one, else the first on PATH."""
    found = find_launchers() if launchers is None else launchers
    for launcher in found:
        for kind, name in KINDS.items():
            if launcher.kind == name and wanted in ("auto", kind):
                # Intel's mpirun is a shell script that would keep signals to itself; this is what it calls.
                hydra = os.path.join(os.path.dirname(launcher.path), "mpiexec.hydra")
                return Mpirun(kind, hydra if kind != "openmpi" and os.path.exists(hydra) else launcher.path)
    if wanted != "auto":
        raise UserError(
            f"--launcher {wanted}: no mpirun of {KINDS[wanted]} is on PATH; `pip install {_INSTALL[wanted]}`"
        )
    raise UserError(
        f"a hostfile needs an mpirun, and none is on PATH; `pip install {_INSTALL['impi']}` (Intel MPI), mpich or openmpi"
    )


def hostfile_text(mpirun: Mpirun, counts: Sequence[tuple[Host, int]]) -> str:
    """The hostfile in this MPI's own format."""
    if mpirun.kind == "openmpi":
        return "".join(f"{host.name} slots={count}\n" for host, count in counts)
    for host, _ in counts:
        if ":" in host.name:
            raise UserError(
                f"{KINDS[mpirun.kind]} takes no IPv6 address in a hostfile: give {host.name} a name in /etc/hosts"
            )
    return "".join(f"{host.name}:{count}\n" for host, count in counts)


def command(
    mpirun: Mpirun,
    counts: Sequence[tuple[Host, int]],
    hostfile: str | None,
    environment: Mapping[str, str],
    program: Sequence[str],
    extra: Sequence[str] = (),
) -> list[str]:
    """The command as a list of words; no shell on this machine interprets it."""
    total = sum(count for _, count in counts)
    most = max(count for _, count in counts)
    # Hydra fills host after host, Open MPI needs the same number on each; otherwise the hostfile says how many each takes.
    full = counts if mpirun.kind == "openmpi" else counts[:-1]
    even = all(count == most for _, count in full)
    arguments = [mpirun.path, "-n", str(total)]
    if mpirun.kind == "openmpi":
        arguments += ["--hostfile", hostfile] if hostfile else []
        arguments += ["--map-by", f"ppr:{most}:node" if even else "slot", "--bind-to", "none"]
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            arguments += ["--allow-run-as-root"]
        arguments += ["--prtemca", "plm_ssh_args", _SSH, "--prtemca", "plm_ssh_no_tree_spawn", "1"]
        for name in environment:
            if name.startswith(_CARRIED):
                arguments += ["-x", name]
    else:
        # With -f alone, Intel's starts as many ranks on a host as it has cores, whatever the file says.
        file = "-machinefile" if mpirun.kind == "impi" and not even else "-f"
        arguments += [file, hostfile] if hostfile else ["-hosts", "localhost"]
        arguments += ["-ppn", str(most)] if even else []
        arguments += ["-genv", "I_MPI_PIN", "0"] if mpirun.kind == "impi" else ["-bind-to", "none"]
    return [*arguments, *extra, *program]


def variables(mpirun: Mpirun, environment: Mapping[str, str]) -> dict[str, str]:
    """What mpirun itself needs in its environment."""
    found = dict(environment)
    found["PATH"] = os.pathsep.join([os.path.dirname(mpirun.path), environment.get("PATH", os.defpath)])
    if mpirun.kind == "impi":
        found.setdefault("I_MPI_ROOT", mpirun.prefix)
        found.setdefault("I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS", _SSH)
    elif mpirun.kind == "mpich":
        found.setdefault("HYDRA_LAUNCHER_EXTRA_ARGS", _SSH)
    return found


def launch(
    mpirun: Mpirun,
    counts: Sequence[tuple[Host, int]],
    program: Sequence[str],
    environment: Mapping[str, str],
    extra: Sequence[str] = (),
    *,
    job: str,
    has_hostfile: bool = True,
) -> int:
    """Runs mpirun; returns the exit code of `stoker launch`."""
    with leftovers.directory(job) as directory:
        hostfile = None
        if has_hostfile:
            hostfile = str(directory / "hostfile")
            Path(hostfile).write_text(hostfile_text(mpirun, counts), encoding="utf-8")
        environment = {**environment, leftovers.JOB: job}
        words = command(mpirun, counts, hostfile, environment, program, extra)
        code = _Process(variables(mpirun, environment), [host.name for host, _ in counts], job).run(words)
        if code:
            leftovers.end(job)
        return code


class _Process:
    """One running mpirun: forwards its output to the screen and signals to it, and collects the failures that ranks report."""

    def __init__(self, environment: Mapping[str, str], names: list[str], job: str) -> None:
        self._environment = environment
        self._names = names
        self._job = job
        self._gone: list[str] = []
        self._failures: list[failure.Failure] = []
        self._signal: int | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, words: list[str]) -> int:
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            for number in before:
                signal.signal(number, self._forward_signal)
            own = {name: value for name, value in self._environment.items() if name != leftovers.JOB}
            # A session of its own: Ctrl-C reaches mpirun through us only, once.
            self._process = subprocess.Popen(
                words,
                env=dict(self._environment),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(signal.SIGTERM),  # no thread runs yet
            )
            lifelines = Lifelines(self._names, self._job, self._gone.append, own)
            assert self._process.stdout is not None
            assert self._process.stderr is not None
            readers = [
                threading.Thread(target=self._read, args=(self._process.stdout, 1), daemon=True),
                threading.Thread(target=self._read, args=(self._process.stderr, 2), daemon=True),
            ]
            for reader in readers:
                reader.start()
            try:
                code = self._wait()
            finally:
                self._end()
                lifelines.close()
            for reader in readers:
                reader.join(timeout=5)
            return self._exit_code(code)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _forward_signal(self, number: int, frame: object) -> None:
        self._signal = self._signal or number
        if self._process is not None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, number)

    def _wait(self) -> int:
        assert self._process is not None
        deadline = None
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._process.wait(timeout=0.2)
            if deadline is None and (self._signal or self._failures or self._gone):
                deadline = time.monotonic() + (10 if not self._gone else 0)
            if deadline is not None and time.monotonic() > deadline:
                self._end()

    def _end(self) -> None:
        """Ends mpirun on this machine; its daemons on other hosts end when their connection breaks."""
        if self._process is None or self._process.poll() is not None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=3)
                return

    def _read(self, source: IO[bytes], target: int) -> None:
        mark = FAILURE_MARK.encode()
        rest = b""
        while data := os.read(source.fileno(), 65536):
            rest += data
            if mark[:1] not in rest:
                _write(target, rest)
                rest = b""
                continue
            *lines, rest = rest.split(b"\n")
            for line in lines:
                shown, found, record = line.partition(mark)
                reported = failure.parse(record.decode("utf-8", "replace")) if found else None
                if reported is None:
                    _write(target, line + b"\n")
                    continue
                self._failures.append(reported)
                if shown.strip():
                    _write(target, shown + b"\n")
        _write(target, rest)

    def _exit_code(self, code: int) -> int:
        if self._signal is not None:
            name = "Ctrl-C" if self._signal == signal.SIGINT else signal.Signals(self._signal).name
            print(f"stoker: ended by {name}; all ranks have been ended", file=sys.stderr)
            return 128 + self._signal
        if code == 0:
            return 0
        if self._failures and not self._gone:
            first = min(self._failures, key=lambda found: found.time)
            failure.print_last(first)
            return first.code
        code = 128 - code if code < 0 else code
        gone = self._gone or remote_hosts.silent(self._names)
        if gone:
            code = 1
            print(f"\nstoker: {', '.join(gone)} no longer answers; all ranks were ended. Is it up?", file=sys.stderr)
        else:
            print(
                f"\nstoker: mpirun ended with exit code {code}, and no rank reported a cause: one was killed (out of memory? "
                "see dmesg on its host), or mpirun itself failed (see its output above)",
                file=sys.stderr,
            )
        return code


def _write(target: int, data: bytes) -> None:
    if data:
        streams.write(target, streams.progress_line(target).before(data) + data)
