"""The door to the native library: picks the build for this CPU, loads it, and hands out its functions.

The library (csrc/) has a plain C interface and knows nothing of Python or torch, so one build serves every version of
both. It must be loaded after torch: torch ships libgomp.so.1, and a library that asks for the same soname afterwards is
bound to that copy, so that both run on one thread pool.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "LEVELS",
    "NativeLibraryError",
    "available",
    "dtype_code",
    "function",
    "level",
    "library",
    "parameter",
    "pointer",
    "threads",
]

ABI = 1  # stoker_abi() of the library these bindings were written for

LEVELS: dict[str, frozenset[str]] = {
    "avx512": frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx2", "fma", "f16c", "bmi1", "bmi2"}),
    "avx2": frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2"}),
    "baseline": frozenset(),
}
"""The builds of the library, best first, with the CPU flags each needs."""

_CODES: dict[str, Any] = {
    "p": ctypes.c_void_p,
    "i": ctypes.c_int,
    "l": ctypes.c_int64,
    "u": ctypes.c_uint64,
    "f": ctypes.c_float,
    "d": ctypes.c_double,
}


class NativeLibraryError(RuntimeError):
    """The native library is missing, does not fit this CPU, or is from another version of Stoker."""


def _cpu_flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def _directories() -> list[Path]:
    """Where the library may lie: a developer's build, the package itself, the place pip installed it to."""
    found = []
    if override := os.environ.get("STOKER_NATIVE_DIR"):
        found.append(Path(override))
    found.append(Path(__file__).parent.parent / "_native")
    with contextlib.suppress(metadata.PackageNotFoundError):
        found.append(Path(str(metadata.distribution("stoker").locate_file("stoker/_native"))))
    return found


def available() -> list[str]:
    """The levels that this CPU can run, best first."""
    flags = _cpu_flags()
    return [name for name, needs in LEVELS.items() if needs <= flags]


def level() -> str:
    """The level that is, or would be, loaded: STOKER_ISA if set, else the best this CPU can run."""
    runnable = available()
    asked = os.environ.get("STOKER_ISA")
    if not asked:
        return runnable[0]
    if asked not in LEVELS:
        raise NativeLibraryError(f"STOKER_ISA={asked!r} is not a level; choose one of {', '.join(LEVELS)}")
    if asked not in runnable:
        missing = ", ".join(sorted(LEVELS[asked] - _cpu_flags()))
        raise NativeLibraryError(f"STOKER_ISA={asked!r} needs CPU features that are not here: {missing}")
    return asked


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded native library of the current level."""
    name = f"libstoker-{level()}.so"
    tried = [directory / name for directory in _directories()]
    path = next((candidate for candidate in tried if candidate.is_file()), None)
    if path is None:
        places = ", ".join(str(candidate.parent) for candidate in tried)
        raise NativeLibraryError(
            f"{name} was not found in {places}; reinstall Stoker with `pip install --force-reinstall stoker` "
            f"(platform: {platform.system()} {platform.machine()})"
        )
    lib = ctypes.CDLL(str(path))
    found = lib.stoker_abi()
    if found != ABI:
        raise NativeLibraryError(f"{path} has interface {found}, this Stoker needs {ABI}; reinstall Stoker")
    return lib


@functools.cache
def function(name: str, signature: str) -> Callable[..., Any]:
    """The C function `name` taking `signature`, a letter per argument: p pointer, i int, l int64, u uint64, f float."""
    handle = library()[name]
    handle.argtypes = [_CODES[code] for code in signature.replace(" ", "")]
    handle.restype = None
    return handle


def dtype_code(dtype: torch.dtype) -> int:
    """The number by which C++ knows a storage type (csrc/core/types.h)."""
    return _DTYPES[dtype]


def pointer(tensor: torch.Tensor | None) -> int | None:
    """The address of a tensor that may be missing; C++ gets a null pointer then."""
    return None if tensor is None else tensor.data_ptr()


def parameter(tensor: torch.Tensor | None) -> int:
    """The storage type of a tensor that may be missing."""
    return 0 if tensor is None else _DTYPES[tensor.dtype]


_DTYPES = {torch.float32: 0, torch.bfloat16: 1}


def threads() -> int:
    """How many threads a kernel called now may use: torch's own setting, for the calling thread."""
    return torch.get_num_threads()
