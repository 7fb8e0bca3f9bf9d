"""`stoker env`: the exports that give a shell what Stoker finds in process anyway, for old scripts that expect them.

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
    Parser("env", "print exports for the shell", examples='  eval "$(stoker env)"').parse_args(argv)
    for name, value in exports(Path(sysconfig.get_paths()["data"]), dict(os.environ)).items():
        print(f"export {name}={shlex.quote(value)}")
    return 0


def exports(prefix: Path, environment: dict[str, str]) -> dict[str, str]:
    """What a shell should export to find the programs and libraries installed under `prefix`; nothing that is set already.

    Intel MPI from PyPI lies in the environment itself: mpirun in bin, libmpi and libfabric in lib.
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
