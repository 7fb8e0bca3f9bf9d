"""`stoker env`: prints environment variables for old scripts that expect them. Stoker itself does not need them.

eval "$(stoker env)"
"""

from __future__ import annotations

import os
import shlex
import sys
import sysconfig
from pathlib import Path

from stoker.cli.parsing import Parser

__all__ = ["exports", "main"]

_MEANING = {
    "PATH": "finds stoker, mpirun and the other programs of this Python environment",
    "I_MPI_ROOT": "where Intel MPI is installed",
    "LD_LIBRARY_PATH": "finds the libraries of Intel MPI",
    "FI_PROVIDER_PATH": "where libfabric finds its network providers",
    "CCL_ROOT": "where oneCCL is installed",
}


def main(argv: list[str]) -> int:
    Parser("env", "print environment variables for the shell", examples='  eval "$(stoker env)"').parse_args(argv)
    found = exports(Path(sysconfig.get_paths()["data"]), dict(os.environ))
    if sys.stdout.isatty():  # not for the shell, which reads only what follows
        print(_explanation(found), file=sys.stderr)
    for name, value in found.items():
        print(f"export {name}={shlex.quote(value)}")
    return 0


def _explanation(found: dict[str, str]) -> str:
    if not found:
        return "stoker: nothing to set: programs and libraries of this Python environment are found by this shell"
    lines = ["stoker: for scripts that expect these variables; Stoker itself does not need them. To set them in this shell:",
             '  eval "$(stoker env)"']  # fmt: skip
    return "\n".join([*lines, *(f"  {name:<16}  {_MEANING[name]}" for name in found)])


def exports(prefix: Path, environment: dict[str, str]) -> dict[str, str]:
    """The variables with which a shell finds programs and libraries under `prefix`, except those that are already set.

    Intel MPI from PyPI is installed in the Python environment: mpirun in bin, libmpi and libfabric in lib.
    """
    found: dict[str, str] = {}
    programs = environment.get("PATH", "").split(os.pathsep)
    if str(prefix / "bin") not in programs:
        found["PATH"] = os.pathsep.join([str(prefix / "bin"), *filter(None, programs)])
    if (prefix / "lib" / "libmpi.so.12").exists() and "I_MPI_ROOT" not in environment:
        found["I_MPI_ROOT"] = str(prefix)
        libraries = environment.get("LD_LIBRARY_PATH", "").split(os.pathsep)
        found["LD_LIBRARY_PATH"] = os.pathsep.join([str(prefix / "lib"), *filter(None, libraries)])
        homes = (prefix / "lib" / "libfabric" / "prov", prefix / "lib")
        providers = next((home for home in homes if any(home.glob("lib*-fi.so"))), None)
        if providers is not None and "FI_PROVIDER_PATH" not in environment:
            found["FI_PROVIDER_PATH"] = str(providers)
    if (prefix / "lib" / "ccl" / "cpu" / "lib" / "libccl.so.1").exists() and "CCL_ROOT" not in environment:
        found["CCL_ROOT"] = str(prefix)
    return found
