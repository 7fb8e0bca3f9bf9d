"""Compiles the c10d backend (torch_backend/backend.cpp) against the torch that is installed, once, and loads it.

c10d is outside torch's stable interface, so the result is kept per torch, Python and source, in the user's cache: another
torch finds no match and compiles anew. A library that somebody else could have written is not loaded. Nothing here raises
for want of a compiler; the caller then serves in Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stoker.kernels import native
from stoker.kernels.header import Header
from stoker.machine import cache_directory

__all__ = ["SOURCES", "CompiledUnavailable", "addresses", "build", "compile_once", "load"]

SOURCES = Path(__file__).parent / "torch_backend"
_OWN = ("backend.cpp", "between_hosts.h", "engine.h", "lane.h", "named.h", "oneccl.h", "tensors.h")
_NAME = "stoker_ccl"
_FAILURE_HOLDS = 3600.0  # seconds; what was full or missing may be mended by then


class CompiledUnavailable(RuntimeError):
    """There is no compiled backend and none can be made; the message says why."""


def _key() -> str:
    parts = (
        torch.__version__,
        sys.implementation.cache_tag,
        *((SOURCES / name).read_text() for name in _OWN),
        native.header().digest,
        str(torch.compiled_with_cxx11_abi()),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _command(compiler: str, target: Path) -> list[str]:
    root = Path(torch.__file__).parent
    includes = [
        root / "include",
        root / "include" / "torch" / "csrc" / "api" / "include",
        sysconfig.get_paths()["include"],
        native.header().path.parent,
    ]
    return [
        compiler, "-O2", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", "-w",
        f"-DTORCH_EXTENSION_NAME={_NAME}", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", "-DUSE_C10D_GLOO",
        *(f"-I{path}" for path in includes), str(SOURCES / "backend.cpp"), "-o", str(target),
        f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python",
    ]  # fmt: skip


def build() -> Path:
    """The library for this torch, compiled if it is not there yet. One process per host compiles, the others wait."""
    return compile_once(
        f"{_NAME}-{_key()}.so", _command, f"the backend for torch {torch.__version__} (once, about a minute)"
    )


def compile_once(name: str, command: Callable[[str, Path], list[str]], what: str) -> Path:
    """The library `name` in the cache; if it is not there, what `command(compiler, target)` makes."""
    directory = cache_directory.cache_directory()
    if directory is None:
        raise CompiledUnavailable("there is no cache directory; set STOKER_CACHE_DIR")
    try:
        if _usable(target := cache_directory.trusted_directory() / name):
            return target
    except cache_directory.UntrustedCache as error:
        raise CompiledUnavailable(str(error)) from error
    except OSError:
        pass  # a folder of another user, which may not be looked into, has no such file
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if compiler is None:
        raise CompiledUnavailable("there is no C++ compiler (g++, c++, clang++ or $CXX)")
    try:
        target = cache_directory.make_directory() / name
        with cache_directory.open_file(target.with_name(f"{name}.lock"), make=True) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _usable(target):
                _refuse_in_vain(compiler, target)
                print(f"stoker ccl: compiling {what}", file=sys.stderr, flush=True)
                _compile(compiler, command, target)
    except cache_directory.UntrustedCache as error:
        raise CompiledUnavailable(str(error)) from error
    except OSError as error:
        raise CompiledUnavailable(f"{directory} cannot be written: {error.strerror}") from error
    return target


def _usable(target: Path) -> bool:
    """Whether the library is there and nobody else could have written it; if somebody could, it is made anew."""
    try:
        cache_directory.check_file(target)
    except cache_directory.UntrustedCache as error:
        cache_directory.warn(error)
        return False
    except OSError:
        return False
    return True


def _note_of_failure(target: Path) -> Path:
    return target.with_suffix(".failed")


def _refuse_in_vain(compiler: str, target: Path) -> None:
    """What has failed a moment ago is not tried again, by the next rank or the next start, with the same compiler."""
    note = _note_of_failure(target)
    with contextlib.suppress(OSError, ValueError), cache_directory.open_file(note) as file:
        by, reason = file.read().decode().split("\0", 1)
        if by == compiler and time.time() - os.fstat(file.fileno()).st_mtime < _FAILURE_HOLDS:
            raise CompiledUnavailable(f"{reason} (found a while ago; remove {note} to try again)")


def _compile(compiler: str, command: Callable[[str, Path], list[str]], target: Path) -> None:
    temporary = target.with_suffix(f".{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        words = command(compiler, temporary)
        if words[0] == compiler:
            words[:1] = shlex.split(compiler)  # $CXX may be two words, as in "ccache g++"
        try:
            result = subprocess.run(words, capture_output=True, text=True, check=False)
        except OSError as error:
            raise CompiledUnavailable(f"the C++ compiler {compiler} cannot be run: {error.strerror}") from error
        if result.returncode:
            reason = next((line for line in result.stderr.splitlines() if "error" in line), result.stderr.strip()[:200])
            with cache_directory.writing(_note_of_failure(target)) as note:
                note.write(f"{compiler}\0{compiler} failed: {reason}".encode())
            raise CompiledUnavailable(f"{compiler} failed: {reason}")
        _note_of_failure(target).unlink(missing_ok=True)
        os.chmod(temporary, 0o700)  # the compiler leaves it writable by whom the umask says
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


@functools.cache
def load() -> Any:
    """The compiled module, bound to the engine."""
    path = build()
    try:
        spec = importlib.util.spec_from_file_location(_NAME, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        with contextlib.suppress(OSError):  # another user's cache is for that user to clear
            path.unlink()  # it was made by a torch that called itself the same: make it anew next time
        raise CompiledUnavailable(f"{path.name} does not load: {error}") from error
    module.bind_engine(addresses(native.library(), native.header()))
    return module


def addresses(library: ctypes.CDLL, header: Header) -> dict[str, int | None]:
    """Where the functions that `header` declares lie in memory, for a backend that calls them without being linked to them."""
    return {name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in header.functions}
