"""Runs the kernel tests on a library built with AddressSanitizer and UndefinedBehaviorSanitizer: `make sanitize`.

    python tests/kernels/sanitize.py            all kernel tests, on every level this CPU has
    python tests/kernels/sanitize.py --quick    the random and the empty shapes only, on the best level

The library is built in build/sanitize. Every exported kernel must be reached by the tests;
torch's allocator is malloc, so a read or write beyond a tensor is seen too. Exits 0 if all is well, 2 if the tools are
missing, else 1.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BUILD = ROOT / "build" / "sanitize"
# They start processes of their own, which the sanitizer would not see, or which could not live with it.
APART = {f"test_{name}.py" for name in ("builds_agree", "emulate", "header", "levels", "out_of_memory", "sanitizer")}
FILES = sorted(str(file) for file in HERE.glob("test_*.py") if file.name not in APART)
# What torch does around the kernels is slow under the sanitizer and the same without it; the distribution tests only
# repeat one call on large tensors.
LEFT_OUT = "not compiled and not registration and not independent and not whole_line and not engine_choice"
QUICK = "random or no_rows or no_tokens or test_program or test_mask or groups_have_options"
OTHER_ROOM = "stoker_comm_"  # tests/comm
# They take no tensors: what the library says of itself, the clock of doctor, and what the kernels would take on more threads.
ABOUT_ITSELF = {
    "stoker_header_hash",
    "stoker_isa",
    "stoker_count_threads",
    "stoker_attention_key_chunk",
    "stoker_clock",
    "stoker_virtual_threads",
    "stoker_regions",
}
# Called by C++ alone; the tests of stoker_run reach it.
INSIDE = {"stoker_blas_product"}


def find_runtime() -> list[Path]:
    """Libraries of the compiler that must be loaded before anything else; empty if there is no sanitizer.

    libstdc++ is among them because the sanitizer looks for its functions at the start, and Python itself has none.
    """
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        return []
    found = []
    for name in ("libasan.so", "libstdc++.so.6"):
        run = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=False)
        path = Path(run.stdout.strip())
        if not path.is_absolute() or not path.exists():
            return []
        found.append(path.resolve())
    return found


def missing() -> str | None:
    """What stands in the way, or None."""
    if not find_runtime():
        return "the C++ compiler has no libasan.so"
    for tool in ("cmake", "nm"):
        if _tool(tool) is None:
            return f"{tool} was not found"
    return None


def _tool(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", ""))))


def build(levels: list[str]) -> None:
    cmake, ninja = _tool("cmake"), _tool("ninja")
    assert cmake is not None
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
    configure = [cmake, "-S", str(ROOT), "-B", str(BUILD), "-DSTOKER_SANITIZE=ON", *generator]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    targets = [f"stoker_{level}" for level in levels]
    subprocess.run([cmake, "--build", str(BUILD), "--target", *targets, "--parallel", "2"], check=True)


def exported(level: str) -> set[str]:
    nm = _tool("nm")
    assert nm is not None
    library = BUILD / f"libstoker-{level}.so"
    run = subprocess.run([nm, "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True)
    names = {line.split()[-1] for line in run.stdout.splitlines()}
    return {name for name in names if name.startswith("stoker_") and not name.startswith(OTHER_ROOM)}


def run_under_sanitizer(level: str, quick: bool) -> int:
    environment = os.environ | {
        "LD_PRELOAD": " ".join(map(str, find_runtime())),
        # Python and torch keep memory until the end, and torch's code throws exceptions of its own.
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:abort_on_error=0",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "STOKER_NATIVE_DIR": str(BUILD),
        "STOKER_ISA": level,
        "STOKER_TEST_BRIEF": "1",
    }
    return subprocess.run(
        [sys.executable, __file__, "--inside", *["--quick"] * quick], env=environment, check=False
    ).returncode


def inside() -> int:
    """In the process that has the sanitizer: the tests, and a note of each function they reach."""
    import pytest

    from stoker.kernels import native

    reached: set[str] = set()
    plain = native.call

    def noting(name: str, *arguments: object) -> None:
        reached.add(name)
        plain(name, *arguments)

    native.call = noting  # type: ignore[assignment]
    # Capturing by file descriptor would swallow the report of the sanitizer.
    code = pytest.main(
        [
            "-q",
            "-x",
            "--capture=sys",
            "-p",
            "no:cacheprovider",
            "-k",
            QUICK if "--quick" in sys.argv else LEFT_OUT,
            *FILES,
        ]
    )
    if code:
        return int(code)
    unreached = exported(native.level()) - reached - ABOUT_ITSELF - INSIDE
    if unreached:
        print(f"not reached by any kernel test: {', '.join(sorted(unreached))}", file=sys.stderr)
        return 1
    return 0


def main() -> int:
    if "--inside" in sys.argv:
        return inside()
    if reason := missing():
        print(f"sanitize: {reason}", file=sys.stderr)
        return 2
    from stoker.kernels import native

    quick = "--quick" in sys.argv
    levels = native.available()[: 1 if quick else None]
    build(levels)
    for level in levels:
        print(f"--- {level}", flush=True)
        if run_under_sanitizer(level, quick):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
