"""Loads the build of the native library that fits this CPU, and calls its functions.

Its plain C interface is declared in csrc/stoker.h and bound from there (kernels/header.py). It knows nothing of Python or
torch, so one build serves every version of both. It must be loaded after torch: torch ships libgomp.so.1, and a library
that needs the same soname afterwards is bound to that copy, so that both run on one thread pool.
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

from stoker.kernels.header import Header, read

__all__ = [
    "LEVELS",
    "NativeLibraryError",
    "available",
    "call",
    "constants",
    "directories",
    "dtype_code",
    "dtypes",
    "header",
    "level",
    "library",
    "parameter",
    "pointer",
    "struct",
    "threads",
]

LEVELS: dict[str, frozenset[str]] = {
    "avx512": frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx2", "fma", "f16c", "bmi1", "bmi2"}),
    "avx2": frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2"}),
    "baseline": frozenset(),
}
"""The builds of the library, best first, with the CPU flags each needs."""


class NativeLibraryError(RuntimeError):
    """The native library is missing, does not fit this CPU, or is from another version of Stoker."""


@functools.cache  # every product asks, and the file has thousands of lines on a large machine
def _cpu_flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def directories() -> list[Path]:
    """The directories to search for the library: a developer's build, the package itself, the place pip installed it to."""
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
    requested = os.environ.get("STOKER_ISA")
    if not requested:
        return runnable[0]
    if requested not in LEVELS:
        raise NativeLibraryError(f"STOKER_ISA={requested!r} is not a level; choose one of {', '.join(LEVELS)}")
    if requested not in runnable:
        missing = ", ".join(sorted(LEVELS[requested] - _cpu_flags()))
        raise NativeLibraryError(f"STOKER_ISA={requested!r} needs features that this CPU does not have: {missing}")
    return requested


def _path() -> Path:
    """The library of the current level."""
    name = f"libstoker-{level()}.so"
    tried = [directory / name for directory in directories()]
    path = next((candidate for candidate in tried if candidate.is_file()), None)
    if path is None:
        places = ", ".join(str(candidate.parent) for candidate in tried)
        raise NativeLibraryError(
            f"{name} was not found in {places}; reinstall Stoker with `pip install --force-reinstall stoker` "
            f"(platform: {platform.system()} {platform.machine()})"
        )
    return path


@functools.cache
def header() -> Header:
    """The header next to the library."""
    path = _path().with_name("stoker.h")
    try:
        return read(path)
    except (OSError, ValueError) as error:
        raise NativeLibraryError(f"the native library's header cannot be read: {error}; reinstall Stoker") from error


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded native library of the current level, its functions bound as the header declares them."""
    declared, path = header(), _path()
    lib = ctypes.CDLL(str(path))
    if _header_hash(lib) != declared.digest:
        raise NativeLibraryError(
            f"{path} was built from another version of {declared.path.name} than the one beside it; reinstall Stoker"
        )
    declared.bind(lib)
    if count := os.environ.get("STOKER_VIRTUAL_THREADS"):
        _use_virtual_threads(lib, count)
    return lib


def _use_virtual_threads(lib: ctypes.CDLL, count: str) -> None:
    from stoker.kernels import virtual_threads  # it needs this module

    if not count.isdecimal() or not 0 < int(count) <= virtual_threads.MOST_THREADS:
        raise NativeLibraryError(
            f"STOKER_VIRTUAL_THREADS={count!r} is not a number from 1 to {virtual_threads.MOST_THREADS}"
        )
    virtual_threads.start_for_program(lib, int(count))


def _header_hash(lib: ctypes.CDLL) -> str:
    """The hash of the header that the library was built from; empty for a build from before the hash existed."""
    try:
        lib.stoker_header_hash.restype = ctypes.c_char_p
        return str(lib.stoker_header_hash().decode())
    except AttributeError:
        return ""


def call(name: str, *arguments: Any) -> None:
    """Calls a kernel of csrc/stoker.h, and raises MemoryError, IndexError or RuntimeError if its code is not 0."""
    if code := _functions[name](*arguments):
        raise _error(name, code)


class _Functions(dict[str, Callable[..., int]]):
    """The bound functions by name, each looked up in the library once: of all ways, a dict costs the least per call."""

    def __missing__(self, name: str) -> Callable[..., int]:
        _declared(name, header().functions)
        self[name] = getattr(library(), name)
        return self[name]


_functions = _Functions()


def _declared(name: str, among: dict[str, Any]) -> Any:
    if name not in among:
        raise NativeLibraryError(
            f"{header().path} does not declare {name}: it is from another version; reinstall Stoker"
        )
    return among[name]


def _error(name: str, code: int) -> Exception:
    codes = constants("stoker_code")
    operator = name.removeprefix("stoker_")
    if code == codes["OUT_OF_MEMORY"]:
        return MemoryError(f"{operator}: no memory for intermediate results; use a smaller batch, or shorter sequences")
    if code == codes["BAD_INDEX"]:
        return IndexError(f"{operator}: an index is out of range")
    return RuntimeError(f"{operator}: the native kernel failed with code {code}")


@functools.cache
def struct(name: str) -> Any:
    """The class of a struct of csrc/stoker.h. Fields that are not given are 0 or null."""
    return _declared(name, header().structs)


def fill(name: str, **fields: Any) -> Any:
    """A call struct with these fields, for `threads()` threads. A tensor becomes its address: the caller keeps it alive."""
    values = {field: v.data_ptr() if isinstance(v, torch.Tensor) else v for field, v in fields.items() if v is not None}
    return struct(name)(threads=threads(), **values)


@functools.cache
def constants(enum: str) -> dict[str, int]:
    """The numbers of an enum of csrc/stoker.h by their names, without the prefix STOKER_."""
    return {name.removeprefix("STOKER_"): number for name, number in _declared(enum, header().enums).items()}


@functools.cache
def dtypes() -> dict[torch.dtype, int]:
    """The numbers by which C++ knows torch's dtypes."""
    return {getattr(torch, name.lower()): number for name, number in constants("stoker_dtype").items()}


@functools.cache
def dtype_code(dtype: torch.dtype) -> int:
    """The number by which C++ knows `dtype`."""
    return dtypes()[dtype]


def pointer(tensor: torch.Tensor | None) -> int | None:
    """The address of a tensor that may be missing; C++ gets a null pointer then."""
    return None if tensor is None else tensor.data_ptr()


def parameter(tensor: torch.Tensor | None) -> int:
    """The storage type of a tensor that may be missing."""
    return 0 if tensor is None else dtype_code(tensor.dtype)


threads: Callable[[], int] = torch.get_num_threads
"""How many threads a kernel called now may use: torch's own setting, for the calling thread."""
