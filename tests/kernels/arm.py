"""Executes the aarch64 build of the native library on another CPU, in the emulator QEMU (user mode): `make arm`.

Debian's cross compiler builds the library, and an aarch64 Python with numpy, unpacked from Debian's packages into build/arm,
runs tests/kernels/builds_agree.py under qemu-aarch64. Its results are compared with what this CPU computes with the
baseline build, within the tolerances between builds. Exits 0 if all results agree or this is an Arm CPU, 2 if this
machine cannot run the emulator, else 1.
"""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import build_cases
import debian
from debian import Obstacle

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BUILD = ROOT / "build" / "arm"
LIBRARIES, SYSTEM, REFERENCE = BUILD / "native", BUILD / "root", BUILD / "reference.npz"
PRELOADED = BUILD / "hide_process_times.so"
COMPILER, QEMU = "aarch64-linux-gnu-g++", "qemu-aarch64"
PACKAGES = {"g++-aarch64-linux-gnu": f"/usr/bin/{COMPILER}", "qemu-user": f"/usr/bin/{QEMU}"}
# What runs in the emulator, with all it depends on: 22 MB of packages, which are unpacked and not installed.
GUEST_PACKAGES = ("python3", "python3-numpy", "libgomp1", "libstdc++6")
# Far above what a run takes; under QEMU a kernel takes some ten times as long.
SECONDS = 1800


def main() -> int:
    started = time.monotonic()
    try:
        return run(started)
    except Obstacle as obstacle:
        print(f"arm: {obstacle}", file=sys.stderr)
        return 2


def run(started: float) -> int:
    if platform.machine() == "aarch64":
        print("arm: not needed, this is an Arm CPU: the ordinary tests execute that build.")
        return 0
    BUILD.mkdir(parents=True, exist_ok=True)
    debian.install(PACKAGES, BUILD / "apt.log", "arm")
    unpack_system()
    compile_library()
    if code := run_natively():
        return code
    code = run_in_qemu()
    if code:
        print(f"arm: {sentence(code)}", file=sys.stderr)
        return 1
    seconds = time.monotonic() - started
    print(f"arm: {len(build_cases.CASES)} cases equal, aarch64 executed by QEMU ({seconds:.0f} s in all)")
    return 0


def sentence(code: int) -> str:
    """What an exit code of the emulated process means; above 128, the emulator passes the signal on."""
    number = -code if code < 0 else code - 128
    if number == signal.SIGSEGV:
        return "a kernel left its buffers (SIGSEGV) under QEMU; the last case named above is the one"
    if number == signal.SIGILL:
        return "a kernel used an instruction that the emulated CPU lacks (SIGILL); the last case named above is the one"
    return (
        f"the aarch64 build does not agree with the baseline build of this CPU, or the test failed (exit code {code})"
    )


def unpack_system() -> None:
    """build/arm/root: the packages of another architecture, from an apt of its own that leaves the system's alone."""
    complete = SYSTEM / "complete"
    if complete.exists() and complete.read_text() == repr(GUEST_PACKAGES):
        return
    print(f"arm: fetching {' '.join(GUEST_PACKAGES)} for aarch64", flush=True)
    debian.need_apt()
    shutil.rmtree(SYSTEM, ignore_errors=True)
    SYSTEM.mkdir(parents=True)
    command = debian.private_apt(BUILD / "apt", {"APT::Architecture": "arm64", "APT::Architectures::": "arm64"})
    download = ["install", "-y", "--no-install-recommends", "--download-only", *GUEST_PACKAGES]
    log = BUILD / "apt.log"
    if debian.apt([*command, "update"], log) or debian.apt([*command, *download], log):
        raise Obstacle(f"the aarch64 packages could not be fetched: {debian.last_line(log)}")
    for package in sorted((BUILD / "apt" / "cache" / "archives").glob("*.deb")):
        subprocess.run(["dpkg-deb", "--extract", str(package), str(SYSTEM)], check=True)
    shutil.rmtree(BUILD / "apt")
    complete.write_text(repr(GUEST_PACKAGES))


def compile_library() -> None:
    """build/arm/native. A failure is an error of the sources, and its output is shown."""
    environment = os.environ | {"PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))}
    target = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={COMPILER}"]
    for command in (
        ["cmake", "-S", str(ROOT), "-B", str(LIBRARIES), "-G", "Ninja", "-DCMAKE_COMPILE_WARNING_AS_ERROR=ON", *target],
        ["cmake", "--build", str(LIBRARIES)],
        [COMPILER, "-shared", "-fPIC", "-O1", str(HERE / "hide_process_times.cpp"), "-o", str(PRELOADED)],
    ):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{done.stdout[-5000:]}{done.stderr[-5000:]}\narm: the aarch64 build failed", file=sys.stderr)
            sys.exit(1)


def run_natively() -> int:
    """What this CPU computes with its own baseline build, kept in build/arm/reference.npz."""
    from stoker.kernels import native

    directory = Path(native.library()._name).parent
    command = [sys.executable, str(HERE / "builds_agree.py"), str(directory), "baseline", "--results", str(REFERENCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{done.stdout[-3000:]}{done.stderr[-3000:]}\narm: the baseline build of this CPU fails", file=sys.stderr)
    return done.returncode


def guest_command() -> list[str]:
    """builds_agree.py in the unpacked system. Its BLAS lies where Debian's alternatives would link to it."""
    libraries = SYSTEM / "usr" / "lib" / "aarch64-linux-gnu"
    environment = {
        "LD_PRELOAD": str(PRELOADED),
        "LD_LIBRARY_PATH": ":".join(str(libraries / name) for name in ("blas", "lapack")),
        "PYTHONPATH": f"{ROOT / 'src'}:{SYSTEM / 'usr' / 'lib' / 'python3' / 'dist-packages'}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_WAIT_POLICY": "passive",
    }
    python = next((SYSTEM / "usr" / "bin").glob("python3.*[0-9]"))
    variables = [word for name, value in environment.items() for word in ("-E", f"{name}={value}")]
    script = [str(HERE / "builds_agree.py"), str(LIBRARIES), "baseline", "--against", str(REFERENCE)]
    return [QEMU, "-L", str(SYSTEM), *variables, str(python), "-S", *script]


def run_in_qemu() -> int:
    try:
        done = subprocess.run(guest_command(), capture_output=True, text=True, check=False, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        print(f"arm: QEMU was stopped after {SECONDS} s", file=sys.stderr)
        return 1
    if done.returncode:
        print("\n".join(done.stdout.splitlines()[-60:]) + done.stderr[-3000:], file=sys.stderr)
    return done.returncode


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the emulator ends too
    sys.exit(main())
