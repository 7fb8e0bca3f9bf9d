"""Finds, configures and loads oneCCL, which connects the leaders of hosts.

It is called through a small C library (torch_backend/oneccl.cpp) that is compiled on first use. Nothing needs to be sourced:
library paths, transport and interface are set in process before it is loaded.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import socket
import struct
import sys
import sysconfig
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from stoker.comm.compiled import SOURCES, CompiledUnavailable, compile_once
from stoker.kernels import native
from stoker.kernels.header import Header, read

__all__ = ["Installation", "OneCCLUnavailable", "find", "header", "join", "library", "settings"]

_JOINING = timedelta(seconds=60)
"""oneCCL may wait for ever for a host that it cannot reach; after this time gloo is used."""


class OneCCLUnavailable(RuntimeError):
    """oneCCL cannot be used; the message says why."""


@dataclass(frozen=True)
class Installation:
    """The files of a oneCCL for CPUs and of the libfabric that it communicates through."""

    library: Path
    headers: Path
    fabric: Path
    providers: Path


def find() -> Installation:
    """The installation of `pip install stoker[ccl]`, or an oneAPI installation that CCL_ROOT and I_MPI_ROOT point to."""
    prefixes = [Path(text) for text in (sysconfig.get_paths()["data"], sys.prefix, os.environ.get("CCL_ROOT")) if text]
    fabrics = [prefix / "lib" for prefix in prefixes]
    if mpi := os.environ.get("I_MPI_ROOT"):
        fabrics += [Path(mpi) / "lib", Path(mpi) / "opt" / "mpi" / "libfabric" / "lib", Path(mpi) / "libfabric" / "lib"]
    root = next((prefix for prefix in prefixes if (prefix / "lib/ccl/cpu/lib/libccl.so.1").is_file()), None)
    if root is None or not (root / "include/oneapi/ccl.hpp").is_file():
        raise OneCCLUnavailable("oneCCL is not installed; `pip install stoker[ccl]` installs it")
    fabric = next((path for path in fabrics if (path / "libfabric.so.1").is_file()), None)
    if fabric is None:
        raise OneCCLUnavailable(
            "oneCCL is installed without libfabric; `pip install stoker[ccl]` installs it with Intel MPI"
        )
    providers = fabric / "prov" if (fabric / "prov").is_dir() else fabric
    return Installation(root / "lib/ccl/cpu/lib/libccl.so.1", root / "include", fabric / "libfabric.so.1", providers)


def settings(installed: Installation, address: str | None) -> dict[str, str]:
    """Environment variables for oneCCL, without those that are set already."""
    found = {
        "CCL_ATL_TRANSPORT": "ofi",  # the mpi transport hangs in processes that mpirun did not start
        "CCL_OFI_LIBRARY_PATH": str(installed.fabric),
        "FI_PROVIDER_PATH": str(installed.providers),
        "CCL_ATL_SHM": "0",  # within a host Stoker uses shared memory
        "CCL_WORKER_OFFLOAD": "0",  # its own worker thread would spin on a core that trains
        "CCL_PROCESS_LAUNCHER": "none",  # leaders are one process per host, whichever launcher started them
        "CCL_LOCAL_RANK": "0",
        "CCL_LOCAL_SIZE": "1",
        "CCL_LOG_LEVEL": "error",
    }
    if interface := _interface_of(address):
        found |= {"CCL_KVS_IFACE": interface, "FI_TCP_IFACE": interface}
    return {name: value for name, value in found.items() if name not in os.environ}


def _interface_of(address: str | None) -> str | None:
    """The name of the interface with this IPv4 address; it may differ between hosts."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
            except OSError:
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


@functools.cache
def library(address: str | None) -> ctypes.CDLL:
    """torch_backend/oneccl.cpp, compiled if necessary. The first call decides on the network interface."""
    installed = find()
    os.environ.update(settings(installed, address))
    try:
        path = compile_once(
            f"stoker_oneccl-{_key(installed)}.so", functools.partial(_command, installed), "the interface to oneCCL"
        )
        ctypes.CDLL(str(installed.fabric), mode=ctypes.RTLD_GLOBAL)
        lib = ctypes.CDLL(str(path))
    except (CompiledUnavailable, OSError) as error:
        raise OneCCLUnavailable(f"oneCCL cannot be loaded: {error}") from error
    return header().bind(lib)


@functools.cache
def header() -> Header:
    """The declarations of torch_backend/oneccl.h."""
    return read(SOURCES / "oneccl.h")


def _key(installed: Installation) -> str:
    stat = installed.library.stat()
    own = [(SOURCES / name).read_text() for name in ("oneccl.cpp", "communication_cpus.h")]
    sources = (*own, header().digest, native.header().digest)
    parts = (*sources, str(installed.library), str(stat.st_size), str(stat.st_mtime_ns))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _command(installed: Installation, compiler: str, target: Path) -> list[str]:
    directory = installed.library.parent
    return [
        compiler, "-O2", "-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden", "-w", f"-I{installed.headers}",
        f"-I{native.header().path.parent}", str(SOURCES / "oneccl.cpp"), "-o", str(target), str(installed.library),
        f"-Wl,-rpath,{directory}", "-pthread",
    ]  # fmt: skip


def join(lib: ctypes.CDLL, store: Any, rank: int, size: int, timeout: timedelta) -> int:
    """The handle of a communicator of `size` leaders. Collective; raises OneCCLUnavailable."""
    seconds = min(timeout, _JOINING).total_seconds()
    buffer = ctypes.create_string_buffer(lib.stoker_oneccl_address_bytes())
    if rank == 0:
        failed = lib.stoker_oneccl_announce(buffer, seconds)
        store.set("address", b"" if failed else buffer.raw)
    else:
        address = dist.Store.get(store, "address")
        failed = not address
        ctypes.memmove(buffer, address, len(address))
    handle: int | None = None if failed else lib.stoker_oneccl_join(rank, size, buffer, seconds)
    if handle is None:
        raise OneCCLUnavailable(
            lib.stoker_oneccl_error().decode(errors="replace") or "the first host could not start it"
        )
    return handle
