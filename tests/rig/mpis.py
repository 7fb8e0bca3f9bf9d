"""The real MPIs, each in a directory of its own: `make mpis` puts them under build/mpi, where tests look for them."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MPIS = ("impi", "mpich", "openmpi")
GUIDES_MPIRUN = ("mpirun", "-n", "4", "-ppn", "2", "-genv", "OMP_NUM_THREADS=1", "-f")
"""As the old guides have it; a hostfile and a program follow."""


def mpi_prefix(name: str) -> Path | None:
    """Where an MPI lies; None if it has not been fetched."""
    prefix = Path(os.environ.get("STOKER_MPI_DIR") or ROOT / "build" / "mpi") / name
    return prefix if (prefix / "bin" / "mpirun").exists() else None


def mpi_environment(name: str) -> dict[str, str]:
    """Variables with which this MPI, and no other, is the one on PATH."""
    prefix = mpi_prefix(name)
    assert prefix is not None
    found = {"PATH": f"{prefix}/bin:{os.environ['PATH']}"}
    if name == "openmpi":  # it asks twice before it runs as root, which fake hosts need
        found |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return found


def oneccl_environment() -> dict[str, str] | None:
    """Variables with which oneCCL is found where `make mpis` has put it; None if it has not been fetched."""
    root, fabric = (
        Path(os.environ.get("STOKER_MPI_DIR") or ROOT / "build" / "mpi") / name for name in ("oneccl", "impi")
    )
    if not (root / "include" / "oneapi" / "ccl.hpp").exists() or not (fabric / "lib" / "libfabric.so.1").exists():
        return None
    return {"CCL_ROOT": str(root), "I_MPI_ROOT": str(fabric)}
