"""Programs that start many processes: which are installed, where, and which MPI an `mpirun` belongs to."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

__all__ = ["Launcher", "find_launchers", "recognise"]

_PROGRAMS = ("mpirun", "mpiexec", "torchrun", "srun")
_SECONDS = 3.0  # an mpirun that waits for a daemon must not delay the page


@dataclass(frozen=True)
class Launcher:
    program: str
    """mpirun, mpiexec, torchrun or srun."""
    kind: str
    """Intel MPI, MPICH, Open MPI, torchrun, Slurm, or unknown."""
    version: str | None
    path: str


def find_launchers(path: str | None = None) -> tuple[Launcher, ...]:
    """The launchers on PATH and beside the running Python, since those of a venv are used even if it is not activated."""
    places = [path if path is not None else os.environ.get("PATH", ""), os.path.dirname(sys.executable)]
    found: dict[str, str] = {}
    for place in places:
        for program in _PROGRAMS:
            where = shutil.which(program, path=place)
            if where and os.path.realpath(where) not in map(os.path.realpath, found):
                found[where] = program
    with ThreadPoolExecutor(max_workers=4) as pool:
        return tuple(pool.map(lambda item: _version_of(item[1], item[0]), found.items()))


def _version_of(program: str, path: str) -> Launcher:
    if program == "torchrun":  # `torchrun --version` would import torch
        return Launcher(program, "torchrun", None, path)
    # Intel's mpirun is a script that calls its neighbours by name, and a venv's programs need not be on PATH.
    beside = os.pathsep.join((os.path.dirname(path), os.environ.get("PATH", os.defpath)))
    try:
        output = subprocess.run(
            [path, "--version"],
            env={**os.environ, "PATH": beside},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_SECONDS,
            check=False,
        ).stdout.decode("utf-8", "replace")
    except (OSError, subprocess.SubprocessError):
        output = ""
    kind, version = recognise(output)
    return Launcher(program, kind, version, path)


def recognise(output: str) -> tuple[str, str | None]:
    """The kind and version that a launcher's --version names."""
    for kind, mark, number in (
        ("Intel MPI", r"Intel\(R\) MPI", r"Version\s+([\d.]+)"),
        ("Open MPI", r"Open MPI|OpenRTE", r"(?:Open MPI\)?|OpenRTE\)?)\s+v?(\d[\w.]*)"),
        ("MPICH", r"HYDRA build details|^MPICH", r"Version:\s+(\d[\w.]*)"),
        ("Slurm", r"^slurm", r"slurm(?:-wlm)?\s+(\d[\w.]*)"),
    ):
        if re.search(mark, output, re.I | re.M):
            match = re.search(number, output, re.I)
            return kind, match[1] if match else None
    return "unknown", None
