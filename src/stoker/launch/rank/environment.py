"""Which launcher started this process, and as which rank: read from the variables that each launcher sets for its children."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from stoker.errors import UserError
from stoker.numbers import whole_number

__all__ = ["Rank", "discover", "first_slurm_host"]


@dataclass(frozen=True)
class Rank:
    """This process's place among those that a launcher has started."""

    launcher: str
    """torchrun, Intel MPI, MPICH, Open MPI, MVAPICH, PMI, PMIx or Slurm."""
    rank: int
    size: int
    local_rank: int
    local_size: int
    exchange: str
    """How ranks can share an address: pmi, pmix, names (the first host is known), given (it is set), or nothing."""


def discover(environment: Mapping[str, str]) -> Rank | None:
    """The rank this process was given; None if it was not started as one of several."""
    rank = next(filter(None, (detect(environment) for detect in _DETECTORS)), None)
    if rank is None:
        return None
    if not 0 <= rank.rank < rank.size or not 0 <= rank.local_rank < max(rank.local_size, 1):
        raise UserError(
            f"{rank.launcher} says this is rank {rank.rank} of {rank.size}, {rank.local_rank} of {rank.local_size} on this "
            "machine; these variables are left over from something else, unset them"
        )
    return rank


def _torchrun(environment: Mapping[str, str]) -> Rank | None:
    if "TORCHELASTIC_RUN_ID" not in environment and not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= set(environment):
        return None
    return _read(environment, "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "given")


def _hydra(environment: Mapping[str, str]) -> Rank | None:
    """Intel MPI and MPICH; both name local ranks alike, and only Intel's sets I_MPI_ variables by itself."""
    if "PMI_RANK" not in environment or "MPI_LOCALRANKID" not in environment:
        return None
    intel = any(key.startswith(("I_MPI_HYDRA", "I_MPI_INFO")) for key in environment)
    name, exchange = "Intel MPI" if intel else "MPICH", "pmi" if "PMI_FD" in environment else "nothing"
    return _read(environment, name, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", exchange)


def _open_mpi(environment: Mapping[str, str]) -> Rank | None:
    return _world(environment, "Open MPI", "OMPI", "pmix" if "PMIX_RANK" in environment else "nothing")


def _mvapich(environment: Mapping[str, str]) -> Rank | None:
    return _world(environment, "MVAPICH", "MV2", "nothing")


def _world(environment: Mapping[str, str], name: str, prefix: str, exchange: str) -> Rank | None:
    variables = [f"{prefix}_COMM_WORLD_{part}" for part in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    return _read(environment, name, *variables, exchange) if variables[0] in environment else None


def _slurm(environment: Mapping[str, str]) -> Rank | None:
    # In a batch script or an interactive shell SLURM_PROCID is 0 as well, but no step has been started.
    if "SLURM_PROCID" not in environment or "SLURM_STEP_NUM_TASKS" not in environment:
        return None
    if environment.get("SLURM_STEP_ID", "") in {"4294967290", "4294967291", "4294967292"}:  # interactive, batch, extern
        return None
    per_node = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE", "1")
    counts, node = _expand_counts(per_node), environment.get("SLURM_NODEID", "0")
    number = whole_number(node)
    if number is None or not 0 <= number < len(counts):
        raise UserError(
            f"Slurm says this is node {node!r} of {len(counts)}; these variables are left over from something else, unset them"
        )
    found = dict(environment, _LOCAL_SIZE=str(counts[number]))
    return _read(found, "Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "_LOCAL_SIZE", "names")


def _pmi(environment: Mapping[str, str]) -> Rank | None:
    """Other process managers of the PMI family, which do not say which ranks share a machine."""
    for prefix, name, exchange in (
        ("PMI", "PMI", "pmi" if "PMI_FD" in environment else "nothing"),
        ("PMIX", "PMIx", "pmix"),
    ):
        rank, size = f"{prefix}_RANK", f"{prefix}_SIZE"
        if rank in environment and size in environment:
            local = environment.get("MPI_LOCALRANKID") or environment.get("PMIX_LOCAL_RANK")
            count = environment.get("MPI_LOCALNRANKS") or environment.get("PMIX_LOCAL_SIZE")
            if local is None or count is None:
                # Assumes one machine; with several, the launcher must set the local rank.
                local, count = environment[rank], environment[size]
            found = dict(environment, _LOCAL_RANK=local, _LOCAL_SIZE=count)
            return _read(found, name, rank, size, "_LOCAL_RANK", "_LOCAL_SIZE", exchange)
    return None


_DETECTORS: tuple[Callable[[Mapping[str, str]], Rank | None], ...] = (
    _torchrun, _hydra, _open_mpi, _mvapich, _slurm, _pmi,
)  # fmt: skip
"""In this order: a launcher that runs inside another, such as mpirun in a Slurm allocation, comes first."""


def _read(environment: Mapping[str, str], launcher: str, *variables: str) -> Rank:
    """The rank in four variables; the last of `variables` is the exchange."""
    *names, exchange = variables
    values = []
    for name in names:
        text = environment.get(name)
        if text is None and name == names[-1]:  # without a local size, all ranks are on this machine
            text = environment.get(names[1], "1")
        value = whole_number(text) if text is not None else None
        if value is None:
            raise UserError(
                f"{launcher} started this process, but {name} is {text!r}; it must be a number. Start it again with that "
                "launcher, or unset its variables"
            )
        values.append(value)
    return Rank(launcher, values[0], values[1], values[2], values[3], exchange)


def _expand_counts(text: str) -> list[int]:
    """`4(x2),3` -> [4, 4, 3]."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part.strip())
        if not match:
            raise UserError(
                f"Slurm's tasks per node are {text!r}, which is not understood; set SLURM_STEP_TASKS_PER_NODE"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_slurm_host(environment: Mapping[str, str]) -> str | None:
    """The first host of `rack[0-1]n[01-03,7],other`, as Slurm compresses its list.

    The list of a job with several components (`srun ... : ...`) is sorted by name; its ranks begin in component 0.
    """
    lists = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"]
    if "SLURM_HET_SIZE" in environment:
        lists[:0] = ["SLURM_JOB_NODELIST_HET_GROUP_0", "SLURM_JOB_NODELIST_PACK_GROUP_0"]
    names = next((environment[name] for name in lists if environment.get(name)), "")
    match = re.match(r"(?:[^\[,]|\[[^\]]*\])*", names)  # up to the first comma outside brackets
    assert match is not None
    return re.sub(r"\[([^\]\-,]*)[^\]]*\]", r"\1", match[0]) or None
