"""Compiles the c10d backend (torch_backend/backend.cpp) against the installed torch, and loads it.

c10d has no stable ABI, so the library is named after the torch, the Python and the sources it was built from: another torch
finds no match and compiles its own. `make install` puts it beside the native library (`python -m stoker.comm.compiled`);
otherwise the first process group compiles it into the user's cache. A library that somebody else could have written is not
loaded. Without a compiler or headers CompiledUnavailable is raised, and the caller uses gloo.
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
from typing import IO, Any

import torch

from stoker.kernels import native
from stoker.machine import cache_directory

__all__ = ["SOURCES", "CompiledUnavailable", "build", "compile_once", "install", "load"]

SOURCES = Path(__file__).parent / "torch_backend"
_MODULE = "stoker_ccl"
_PACKAGES = "python3-dev (Debian, Ubuntu) or python3-devel (Fedora, RHEL)"
_FAILURE_HOLDS = 3600.0  # seconds; what was full or missing may be repaired by then

Command = Callable[[str, Path], list[str]]
"""Compiler, target -> the command that makes the target."""


class CompiledUnavailable(RuntimeError):
    """A library can neither be found nor compiled; the message says why and what to do."""


@functools.cache
def load() -> Any:
    """The compiled module."""
    # The backend calls the functions of csrc/stoker.h directly: the native library must offer them to libraries loaded later.
    library = native.library()
    ctypes.CDLL(library._name, mode=ctypes.RTLD_GLOBAL)
    path = build()
    try:
        spec = importlib.util.spec_from_file_location(_MODULE, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        with contextlib.suppress(OSError):  # another user's file is for that user to remove
            path.unlink()  # built by another torch with the same version: compile again next time
        raise CompiledUnavailable(f"{path} does not load ({error}); remove it and start again") from error
    return module


def build() -> Path:
    """The library for this torch: the installed one, the one in the cache, or a new one in the cache."""
    return compile_once(_file_name(), _command, _description())


def install() -> Path:
    """The library for this torch beside the native library, where every user of this installation finds it."""
    target = native.header().path.with_name(_file_name())
    if not _is_usable(target, cache_directory.check_installed):
        print(f"stoker ccl: compiling {_description()}", file=sys.stderr, flush=True)
        try:
            _compile(_compiler(), _command, target, mode=0o755)
        except OSError as error:
            raise CompiledUnavailable(f"{target.parent} cannot be written: {error.strerror}") from error
    for old in set(target.parent.glob(f"{_MODULE}-*.so")) - {target}:
        old.unlink()
    return target


def _description() -> str:
    return f"the backend for torch {torch.__version__} (once, about a minute)"


def _file_name() -> str:
    parts = (
        torch.__version__,
        sys.implementation.cache_tag,
        *(path.read_text() for path in (SOURCES / "backend.cpp", *sorted(SOURCES.glob("*.h")))),
        native.header().digest,
        str(torch.compiled_with_cxx11_abi()),
    )
    return f"{_MODULE}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}.so"


def _command(compiler: str, target: Path) -> list[str]:
    torch_root = Path(torch.__file__).parent
    torch_headers, python_headers = torch_root / "include", Path(sysconfig.get_paths()["include"])
    if not (python_headers / "Python.h").is_file():
        raise CompiledUnavailable(f"Python's headers are not in {python_headers}; install {_PACKAGES}")
    if not (torch_headers / "torch" / "extension.h").is_file():
        raise CompiledUnavailable(f"torch's C++ headers are not in {torch_headers}; reinstall torch from its wheel")
    includes = [
        torch_headers, torch_headers / "torch" / "csrc" / "api" / "include", python_headers, native.header().path.parent,
    ]  # fmt: skip
    return [
        compiler, "-O2", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", "-w",
        f"-DTORCH_EXTENSION_NAME={_MODULE}", "-DUSE_C10D_GLOO",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{path}" for path in includes), str(SOURCES / "backend.cpp"), "-o", str(target),
        f"-L{torch_root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python",
    ]  # fmt: skip


def compile_once(name: str, command: Command, description: str) -> Path:
    """The library `name`, installed or in the cache; if it is in neither, one process per host compiles it into the cache."""
    for installed in native.directories():
        if _is_usable(installed / name, cache_directory.check_installed):
            return installed / name
    directory = cache_directory.cache_directory()
    if directory is None:
        raise CompiledUnavailable("there is no cache directory; set STOKER_CACHE_DIR")
    try:
        try:
            if _is_usable(target := cache_directory.trusted_directory() / name, cache_directory.check_file):
                return target
        except cache_directory.UntrustedCache:
            raise
        except OSError:
            pass  # it does not exist yet, or may not be read: then it has no such file
        compiler = _compiler()
        target = cache_directory.make_directory() / name
        with cache_directory.open_file(target.with_name(f"{name}.lock"), make=True) as lock:
            _wait_for_lock(lock, description)
            if not _is_usable(target, cache_directory.check_file):
                _raise_recent_failure(compiler, target)
                print(f"stoker ccl: compiling {description}", file=sys.stderr, flush=True)
                _compile_in_cache(compiler, command, target)
    except cache_directory.UntrustedCache as error:
        raise CompiledUnavailable(str(error)) from error
    except OSError as error:
        raise CompiledUnavailable(
            f"{directory} cannot be written: {error.strerror}; set STOKER_CACHE_DIR to a directory that can"
        ) from error
    return target


def _compiler() -> str:
    found = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if found is None:
        raise CompiledUnavailable(
            "no C++ compiler was found; install g++ and python3-dev (Debian, Ubuntu), or gcc-c++ and python3-devel (Fedora, RHEL)"
        )
    return found


def _wait_for_lock(lock: IO[bytes], description: str) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # one line is enough
            print(f"stoker ccl: waiting for another process to compile {description}", file=sys.stderr, flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)


def _is_usable(library: Path, check: Callable[[Path], None]) -> bool:
    """Whether the library exists and nobody else could have written it; if somebody could, it is compiled again."""
    try:
        check(library)
    except cache_directory.UntrustedCache as error:
        cache_directory.warn(error)
        return False
    except OSError:
        return False
    return True


def _failure_note(target: Path) -> Path:
    return target.with_suffix(".failed")


def _raise_recent_failure(compiler: str, target: Path) -> None:
    """What failed recently is not tried again with the same compiler by the next rank or the next start."""
    note = _failure_note(target)
    with contextlib.suppress(OSError, ValueError), cache_directory.open_file(note) as file:
        failed_compiler, reason = file.read().decode().split("\0", 1)
        if failed_compiler == compiler and time.time() - os.fstat(file.fileno()).st_mtime < _FAILURE_HOLDS:
            raise CompiledUnavailable(f"{reason} (found earlier; remove {note} to try again)")


def _compile_in_cache(compiler: str, command: Command, target: Path) -> None:
    try:
        _compile(compiler, command, target, mode=0o700)
    except _CompilationFailed as error:
        with cache_directory.writing(_failure_note(target)) as note:
            note.write(f"{compiler}\0{error}".encode())
        raise
    _failure_note(target).unlink(missing_ok=True)


class _CompilationFailed(CompiledUnavailable):
    """The compiler ran and reported an error."""


def _compile(compiler: str, command: Command, target: Path, mode: int) -> None:
    temporary = target.with_suffix(f".{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        arguments = command(compiler, temporary)
        if arguments[0] == compiler:
            arguments[:1] = shlex.split(compiler)  # $CXX may have arguments, as in "ccache g++"
        try:
            result = subprocess.run(arguments, capture_output=True, text=True, check=False)
        except OSError as error:
            raise CompiledUnavailable(
                f"the C++ compiler {compiler} cannot be run: {error.strerror}; install it, or unset CXX"
            ) from error
        if result.returncode:
            reason = next((line for line in result.stderr.splitlines() if "error" in line), result.stderr.strip()[:200])
            raise _CompilationFailed(f"{compiler} failed: {reason}; set CXX to another compiler (g++ 10 or newer)")
        os.chmod(temporary, mode)  # the compiler leaves it writable as the umask says
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


if __name__ == "__main__":
    try:
        build() if "--cache" in sys.argv else install()
    except CompiledUnavailable as problem:
        print(f"stoker ccl: ccl will run on gloo, which is slower, because {problem}", file=sys.stderr)
