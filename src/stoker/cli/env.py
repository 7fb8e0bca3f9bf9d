"""`stoker env`: prints environment variables for old scripts that expect them. Stoker itself does not need them.

eval "$(stoker env)"
"""

from __future__ import annotations

import os
import shlex
import sysconfig
from pathlib import Path

from stoker.cli.parsing import Parser

__all__ = ["exports", "main"]


def main(argv: list[str]) -> int:
    Parser("env", "print environment variables for the shell", examples='  eval "$(stoker env)"').parse_args(argv)
    for name, value in exports(Path(sysconfig.get_paths()["data"]), dict(os.environ)).items():
        print(f"export {name}={shlex.quote(value)}")
    return 0


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
