"""Fake hosts on one machine: network namespaces joined by a bridge, an sshd in each, links shaped by tc; and the MPIs."""

from rig.mpis import GUIDES_MPIRUN, MPIS, mpi_environment, mpi_prefix, oneccl_environment
from rig.network import NAMES, Rig

__all__ = ["GUIDES_MPIRUN", "MPIS", "NAMES", "Rig", "mpi_environment", "mpi_prefix", "oneccl_environment"]
