"""How the ranks of a running mpirun agree on rank 0's address: through the launcher's own key-value store.

Hydra (Intel MPI, MPICH) offers PMI version 1, lines of text over an inherited socket; Open MPI offers PMIx through its
library. A later MPI_Init in the same process still works with both (tested), which is why PMI is left open until the end.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import glob
import os
import re
import secrets
import socket
import sys
import zlib
from collections.abc import Mapping
from typing import NamedTuple

from stoker.errors import UserError
from stoker.launch.rank.environment import Rank, first_slurm_host
from stoker.machine.network import free_port, own_address
from stoker.numbers import whole_number

__all__ = ["Meeting", "Pmi", "agree", "pmi"]

_KEY = "stoker-address"
PATIENCE = 120.0
"""Seconds; a rank that never arrives must not block the others forever."""


class Pmi:
    """A PMI-1 connection to Hydra's proxy: enough to share one value, and to end the job."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=os.dup(descriptor))
        self._socket.settimeout(PATIENCE)
        self._rest = b""
        self._ask("cmd=init pmi_version=1 pmi_subversion=1")
        self._name = self._ask("cmd=get_my_kvsname")["kvsname"]

    def share(self, rank: int, value: str) -> str:
        """Returns rank 0's value on all ranks."""
        if rank == 0:
            self._ask(f"cmd=put kvsname={self._name} key={_KEY} value={value}")
        self._ask("cmd=barrier_in")
        return self._ask(f"cmd=get kvsname={self._name} key={_KEY}")["value"]

    def finish(self) -> None:
        """Without this, Hydra takes a normal exit for a crash. After a later MPI_Finalize nobody answers any more."""
        with contextlib.suppress(OSError, UserError, KeyError):
            self._ask("cmd=finalize")

    def abort(self, code: int) -> None:
        """Ends all ranks at once with `code`."""
        with contextlib.suppress(OSError):
            self._socket.sendall(f"cmd=abort exitcode={code}\n".encode())

    def _ask(self, line: str) -> dict[str, str]:
        self._socket.sendall(line.encode() + b"\n")
        while b"\n" not in self._rest:
            try:
                received = self._socket.recv(4096)
            except TimeoutError:
                raise UserError(
                    f"mpirun has not answered for {PATIENCE:g} s while the ranks were exchanging addresses: one of them has "
                    "not reached this point; check its output, and whether it was started at all"
                ) from None
            if not received:
                raise UserError(
                    "mpirun closed its connection while the ranks were exchanging addresses; see its output"
                )
            self._rest += received
        answer, _, self._rest = self._rest.partition(b"\n")
        return dict(word.split("=", 1) for word in answer.decode("ascii", "replace").split() if "=" in word)


_PMI: list[Pmi] = []
"""Cache: the connection of this process, which is needed at its end."""


def pmi() -> Pmi | None:
    return _PMI[0] if _PMI else None


class Meeting(NamedTuple):
    """What the ranks have agreed on."""

    address: str
    port: int
    secret: str = ""
    """Known to the ranks of this job only; empty if the launcher cannot share one."""


def agree(rank: Rank, environment: Mapping[str, str]) -> Meeting:
    """MASTER_ADDR and MASTER_PORT for all ranks: those that the user has set, else rank 0's own."""
    address, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if port and not 0 <= (-1 if (number := whole_number(port)) is None else number) <= 65535:
        raise UserError(f"MASTER_PORT is {port!r}; it must be a port, 0 to 65535: correct it, or unset it")
    connection = None
    if rank.exchange == "pmi":
        connection = Pmi(int(environment["PMI_FD"]))
        _PMI[:] = [connection]
        atexit.register(connection.finish)
    secret = secrets.token_hex(16) if rank.rank == 0 else ""
    if address and port:
        return Meeting(address, int(port), connection.share(rank.rank, secret) if connection else "")
    if rank.size == rank.local_size and not address:
        address = "127.0.0.1"
    mine = f"{address or own_address(environment)}|{port or free_port()}|{secret}" if rank.rank == 0 else ""
    if connection:
        return _parse(connection.share(rank.rank, mine))
    if rank.exchange == "pmix":
        return _parse(_share_by_pmix(environment, mine))
    if rank.exchange == "names":
        first = address or first_slurm_host(environment) or "127.0.0.1"
        return Meeting(first, int(port or _port_of_job(environment)))
    if address:
        return Meeting(address, int(port or 29500))
    raise UserError(
        f"{rank.launcher} cannot share an address between its processes; set MASTER_ADDR to the address of the first machine, "
        "for all of them (mpirun -genv MASTER_ADDR ..., or export it)"
    )


def _port_of_job(environment: Mapping[str, str]) -> int:
    """The same on all hosts without asking anyone; outside the range that systems give to outgoing connections."""
    job = environment.get("SLURM_JOB_ID", "0") + "." + environment.get("SLURM_STEP_ID", "0")
    return 15000 + zlib.crc32(job.encode()) % 10000


def _parse(value: str) -> Meeting:
    address, port, secret = (*value.split("|"), "", "")[:3]
    if not address or whole_number(port) is None:
        raise UserError(
            f"rank 0's address arrived as {value.rpartition('|')[0]!r}; set MASTER_ADDR and MASTER_PORT for all ranks"
        )
    return Meeting(address, int(port), secret)


class _Process(ctypes.Structure):
    _fields_ = (("namespace", ctypes.c_char * 256), ("rank", ctypes.c_uint32))


class _Value(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint16), ("string", ctypes.c_char_p), ("rest", ctypes.c_uint64 * 4))


_STRING, _GLOBAL = 3, 3  # PMIX_STRING, PMIX_GLOBAL


def _share_by_pmix(environment: Mapping[str, str], mine: str) -> str:
    """Uses a child process, so that the library and its threads are gone before the script starts."""
    library = _find_pmix(environment)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.close(reader)
            os.write(writer, _pmix(library, mine.encode()))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read().decode("utf-8", "replace")
    os.waitpid(child, 0)
    if not answer:
        raise UserError("Open MPI's PMIx did not answer; set MASTER_ADDR and MASTER_PORT for all ranks")
    return answer


def _pmix(library: str, mine: bytes) -> bytes:
    pmix = ctypes.CDLL(library)
    zero = ctypes.c_size_t(0)
    me = _Process()
    if pmix.PMIx_Init(ctypes.byref(me), None, zero) != 0:
        return b""
    if me.rank == 0:
        value = _Value(_STRING, mine)
        pmix.PMIx_Put(ctypes.c_uint8(_GLOBAL), _KEY.encode(), ctypes.byref(value))
        pmix.PMIx_Commit()
    pmix.PMIx_Fence(None, zero, None, zero)
    found = ctypes.POINTER(_Value)()
    first = _Process(me.namespace, 0)
    code = pmix.PMIx_Get(ctypes.byref(first), _KEY.encode(), None, zero, ctypes.byref(found))
    answer = bytes(found.contents.string) if code == 0 and found else b""
    pmix.PMIx_Finalize(None, zero)
    return answer


def _find_pmix(environment: Mapping[str, str]) -> str:
    prefixes = [environment[key] for key in ("PMIX_PREFIX", "OPAL_PREFIX", "PRTE_PREFIX") if environment.get(key)]
    for prefix in prefixes:
        for pattern in ("lib/openmpi/libpmix.so*", "lib/libpmix.so*", "lib64/libpmix.so*"):
            for path in sorted(glob.glob(os.path.join(glob.escape(prefix), pattern))):
                if re.search(r"libpmix\.so(\.\d+)?$", path):
                    return path
    return "libpmix.so.2"


if sys.platform == "win32":  # pragma: no cover
    raise ImportError("stoker launch needs Linux or another POSIX system")
