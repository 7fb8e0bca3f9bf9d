"""Executes the AVX-512 build of the native library on a CPU that lacks AVX-512, in the emulator Bochs: `make emulate`.

The emulated machine boots Debian's kernel with everything in its initial file system: busybox, the Python that runs this
script with numpy, the builds of the library and tests/kernels/builds_agree.py, which compares them with each other and
with what this CPU computes itself. Packages come from Debian; everything else lies in build/emulate, and is made again
only when what it is made from has changed. Exits 0 if all builds agree or the CPU has AVX-512 itself, 2 if this machine
cannot run the emulator, else 1. With `--anyway` it also runs on a CPU that has AVX-512.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import platform
import pty
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
import tty
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import build_cases
import debian
from debian import Obstacle

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent.parent / "build" / "emulate"
SERIAL, SUMS, FILES, ISO = BUILD / "serial.log", BUILD / "sums.json", BUILD / "files.txt", BUILD / "boot.iso"
SCRIPTS = ("builds_agree.py", "build_cases.py", "native_calls.py")

# A program or file of each package, to see whether it is installed.
PACKAGES = {
    "bochs": "/usr/bin/bochs",
    "bochs-term": "/usr/share/doc/bochs-term",
    "bochsbios": "/usr/share/bochs/BIOS-bochs-latest",
    "vgabios": "/usr/share/vgabios/vgabios.bin",
    "busybox-static": "/usr/share/doc/busybox-static",
    "xorriso": "/usr/bin/xorriso",
    "isolinux": "/usr/lib/ISOLINUX/isolinux.bin",
    "syslinux-common": "/usr/lib/syslinux/modules/bios/ldlinux.c32",
    "binutils": "/usr/bin/nm",
}
KERNEL = "linux-image-cloud-amd64"
DISK_MODULES = ("scsi_common", "scsi_mod", "libata", "ata_piix", "sd_mod", "cdrom", "isofs")
"""What emulate_bf16.py reads its disk with, each after those it needs; the kernel has no driver for disks built in."""

# clearcpuid: XSAVEC and XSAVES, without which the kernel turns AVX off on this CPU model. The rest saves time: no messages on the
# serial line (1 ms of CPU time a character), no self-tests of the kernel's ciphers (18 s), no certificates (4 s).
COMMAND_LINE = (
    "console=ttyS0 quiet loglevel=3 clearcpuid=321,323 mitigations=off cryptomgr.notests "
    "initcall_blacklist=load_system_certificate_list"
)
# Far above what a run takes; by the clock, a machine that other programs use needs several times its CPU time.
CPU_SECONDS, WALL_SECONDS = 400, 3600
MARK = "stoker: "


def main(arguments: Sequence[str] = ()) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--anyway", action="store_true", help="also on a CPU that needs no emulator")
    anyway, started = parser.parse_args(arguments).anyway, time.monotonic()
    try:
        return emulate(started, anyway)
    except Obstacle as obstacle:
        print(f"emulate: {obstacle}", file=sys.stderr)
        return 2


def emulate(started: float, anyway: bool) -> int:
    if platform.machine() != "x86_64":
        raise Obstacle(f"the AVX-512 build is for x86-64; this is {platform.machine()}")
    from stoker.kernels import native

    if "avx512" in native.available() and not anyway:
        print("emulate: not needed, this CPU has AVX-512: the ordinary tests execute that build.")
        return 0
    libraries = Path(native.library()._name).parent
    BUILD.mkdir(parents=True, exist_ok=True)
    debian.install(PACKAGES, BUILD / "apt.log", "emulate")
    kernel = fetch_kernel()
    python = Path(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))
    count = run_natively(python, libraries, native.available()[::-1])
    build_image(kernel, python, libraries, list(native.LEVELS)[::-1])
    seconds = run_bochs()
    serial = SERIAL.read_text(errors="replace") if SERIAL.exists() else ""
    wrong = verdict(serial, count, len(native.LEVELS))
    if wrong:
        print(f"emulate: {wrong}\n--- the end of {SERIAL}:\n{tail(serial)}", file=sys.stderr)
        return 1
    print(
        f"emulate: {count} cases x {len(native.LEVELS)} builds equal, AVX-512 executed by Bochs "
        f"({seconds:.0f} s of CPU time, {time.monotonic() - started:.0f} s in all)"
    )
    return 0


# --- packages -----------------------------------------------------------------------------------------------------------


def apt(command: list[str], cwd: Path | None = None) -> int:
    return debian.apt(command, BUILD / "apt.log", cwd)


def fetch_kernel() -> Path:
    """The kernel of Debian's cloud image and its DISK_MODULES, unpacked from the package; it is not installed."""
    target = BUILD / "vmlinuz"
    if target.exists() and all((BUILD / f"{name}.ko").exists() for name in DISK_MODULES):
        return target
    debian.need_apt()
    name = kernel_package()
    if name is None and os.geteuid() == 0:
        apt(["apt-get", "update", "-qq"])
        name = kernel_package()
    if name is None:
        raise Obstacle(f"the package {KERNEL} is not known to apt: run apt-get update as root on a Debian system")
    print(f"emulate: fetching {name}", flush=True)
    packages = BUILD / "packages"
    packages.mkdir(exist_ok=True)
    download = ["apt-get", "-o", "APT::Sandbox::User=root", "download", "-qq", name]
    if apt(download, packages) and (os.geteuid() or apt(["apt-get", "update", "-qq"]) or apt(download, packages)):
        raise Obstacle(f"the package {name} could not be fetched: {debian.last_line(BUILD / 'apt.log')}")
    unpack_kernel(next(packages.glob(f"{name}_*.deb")), target)
    shutil.rmtree(packages)
    return target


def kernel_package() -> str | None:
    """The package with the kernel itself, on which the one with the general name depends."""
    run = subprocess.run(["apt-cache", "depends", KERNEL], capture_output=True, text=True, check=False)
    names = [line.split()[-1] for line in run.stdout.splitlines() if "Depends: linux-image-" in line]
    return names[0] if names else None


def unpack_kernel(package: Path, target: Path) -> None:
    with (
        subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE) as unpacking,
        tarfile.open(fileobj=unpacking.stdout, mode="r|") as archive,
    ):
        for member in archive:
            name = Path(member.name).name
            if "/boot/vmlinuz-" in member.name:
                name = target.name
            elif name.partition(".")[0] not in DISK_MODULES or not member.isfile():
                continue
            source = archive.extractfile(member)
            assert source is not None
            partial = target.with_suffix(".partial")
            partial.write_bytes(source.read())
            partial.rename(target.with_name(name))


# --- what this CPU computes ---------------------------------------------------------------------------------------------


def python_environment() -> dict[str, str]:
    """No site packages but numpy, and Stoker's sources for the parser of its header: the emulated machine has nothing else."""
    import numpy

    return {
        "PYTHONPATH": os.pathsep.join((str(HERE.parent.parent / "src"), str(Path(numpy.__file__).parent.parent))),
        "PYTHONUTF8": "1",
        "OMP_WAIT_POLICY": "passive",
        "OPENBLAS_NUM_THREADS": "1",
    }


def run_natively(python: Path, libraries: Path, builds: list[str]) -> int:
    """Runs the cases on the builds that this CPU has, keeping checksums and the list of files that took part.

    Returns the number of cases that the emulator can run.
    """
    command = [str(python), "-S", str(HERE / "builds_agree.py"), str(libraries), *builds]
    environment = python_environment() | {"PATH": os.environ.get("PATH", os.defpath)}
    run = subprocess.run(
        [*command, "--write", str(SUMS), "--files", str(FILES)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        print(
            f"{run.stdout[-3000:]}{run.stderr[-3000:]}\nemulate: the builds that this CPU runs do not agree",
            file=sys.stderr,
        )
        sys.exit(1)
    if "avx2" not in builds:  # the C library's logarithms have other last bits on a CPU without FMA
        SUMS.write_text("{}")
    return sum(case.emulated for case in build_cases.CASES)


# --- the image ----------------------------------------------------------------------------------------------------------


def build_image(kernel: Path, python: Path, libraries: Path, builds: list[str]) -> None:
    """boot.iso, unless it was made from the same files before."""
    contents = guest_files(python, libraries, builds)
    made_from = BUILD / "made_from.txt"
    fingerprint = fingerprint_of({**contents, "kernel": kernel, "emulate.py": Path(__file__)})
    if ISO.exists() and made_from.exists() and made_from.read_text() == fingerprint:
        return
    print("emulate: building the image", flush=True)
    made_from.unlink(missing_ok=True)
    tree = BUILD / "iso"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir()
    shutil.copy(kernel, tree / "vmlinuz")
    for package in ("isolinux", "syslinux-common"):
        shutil.copy(PACKAGES[package], tree)
    (tree / "isolinux.cfg").write_text(
        f"default linux\nlabel linux\nkernel vmlinuz\ninitrd initrd\nappend {COMMAND_LINE}\n"
    )
    write_initrd(tree / "initrd", contents, init_script(python, contents, builds))
    boot = ["-b", "isolinux.bin", "-c", "boot.cat", "-no-emul-boot", "-boot-load-size", "4", "-boot-info-table"]
    subprocess.run(
        ["xorriso", "-as", "mkisofs", "-quiet", "-o", str(ISO), *boot, str(tree)], check=True, stderr=subprocess.DEVNULL
    )
    shutil.rmtree(tree)
    made_from.write_text(fingerprint)


def guest_files(python: Path, libraries: Path, builds: Iterable[str]) -> dict[str, Path]:
    """Path in the emulated machine -> file here: all that the native run loaded, and the builds."""
    busybox = next(path for path in map(Path, ("/usr/bin/busybox", "/bin/busybox")) if path.exists())
    files = {
        "/bin/busybox": busybox,
        "/lib64/ld-linux-x86-64.so.2": Path("/lib64/ld-linux-x86-64.so.2"),
        str(python): python,
    }
    for line in FILES.read_text().splitlines():
        path = Path(line)
        if path.parent not in (HERE, HERE / "__pycache__", libraries):
            files[line] = path
    files |= {f"/kernels/{name}": HERE / name for name in SCRIPTS}
    files |= {f"/kernels/libstoker-{level}.so": libraries / f"libstoker-{level}.so" for level in builds}
    return {**files, "/kernels/stoker.h": libraries / "stoker.h", "/kernels/sums.json": SUMS}


def links_to(path: Path) -> list[Path]:
    """The names by which a library is asked for: libgomp.so.1 for libgomp.so.1.0.0."""
    if ".so" not in path.name:
        return []
    stem = path.name.partition(".so")[0]
    return [link for link in path.parent.glob(f"{stem}.so*") if link.is_symlink() and link.resolve() == path.resolve()]


def contents_of(path: Path) -> bytes:
    """The file, a large library without its debugging symbols: loading them takes the emulated machine 0.2 s a megabyte."""
    if path.stat().st_size < 8 << 20 or any(part.startswith("numpy") for part in path.parts):
        return path.read_bytes()
    stripped = BUILD / "stripped"
    run = subprocess.run(["strip", "-g", "-o", str(stripped), str(path)], capture_output=True, check=False)
    return (path if run.returncode else stripped).read_bytes()


def fingerprint_of(files: dict[str, Path]) -> str:
    """Of names, contents and times, except the time of the checksums, which every run writes."""
    lines = []
    for name, path in sorted(files.items()):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        lines.append(f"{name} {0 if path == SUMS else int(path.stat().st_mtime)} {digest}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def init_script(python: Path, contents: dict[str, Path], builds: list[str]) -> str:
    """The emulated machine's first process. The kernel buffers what it prints; a second lets the serial line catch up."""
    directories = sorted(
        {os.path.dirname(name) for name in contents if ".so" in name and not name.startswith("/kernels")}
    )
    environment = python_environment() | {"LD_LIBRARY_PATH": ":".join(directories), "PYTHONHOME": sys.base_prefix}
    exports = "\n".join(f"export {name}='{value}'" for name, value in environment.items())
    command = f"'{python}' -S builds_agree.py . {' '.join(builds)} --expect sums.json"
    return f"""#!/bin/busybox sh
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t devtmpfs dev /dev
echo "{MARK}booted"
{exports}
cd /kernels
{command} >/log 2>&1
code=$?
[ $code = 0 ] || /bin/busybox tail -n 50 /log
echo "{MARK}$(/bin/busybox tail -n 1 /log)"
echo "{MARK}exit $code"
/bin/busybox sleep 1
/bin/busybox poweroff -f
"""


def write_initrd(target: Path, files: dict[str, Path], init: str) -> None:
    """A file system for the kernel to unpack into memory, in cpio's "newc" format."""
    number = 0

    with target.open("wb") as out:

        def add(name: str, mode: int, data: bytes = b"", mtime: int = 0, device: tuple[int, int] = (0, 0)) -> None:
            nonlocal number
            number += 1
            path = name.encode() + b"\0"
            fields = (number, mode, 0, 0, 1, mtime, len(data), 0, 0, *device, len(path), 0)
            out.write(b"070701" + b"".join(b"%08X" % field for field in fields) + path)
            out.write(bytes(-out.tell() % 4) + data)
            out.write(bytes(-out.tell() % 4))

        parents = {str(parent) for name in files for parent in Path(name).parents if str(parent) != "/"}
        for directory in sorted({*parents, "/proc", "/dev", "/tmp"}):
            add(directory[1:], 0o040755)
        add("dev/console", 0o020600, device=(5, 1))
        add("init", 0o100755, init.encode())
        for name, path in files.items():
            add(
                name[1:], 0o100755, contents_of(path), int(path.stat().st_mtime)
            )  # Python compares the times of .py and .pyc
            for link in links_to(Path(name)):
                if str(link) not in files:
                    add(str(link)[1:], 0o120777, path.name.encode())
        add("TRAILER!!!", 0)


# --- the run ------------------------------------------------------------------------------------------------------------


def bochs_options() -> str:
    """The emulated machine. Only the serial line says how it went: Bochs itself exits 1 when the machine is switched off."""
    return f"""\
cpu: model=corei7_skylake_x, count=1, ips=50000000, reset_on_triple_fault=0
memory: guest=512, host=512
romimage: file={PACKAGES["bochsbios"]}
vgaromimage: file={PACKAGES["vgabios"]}
display_library: term
ata0: enabled=1, ioaddr1=0x1f0, ioaddr2=0x3f0, irq=14
ata0-master: type=cdrom, path={ISO}, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev={SERIAL}
clock: sync=none, time0=1700000000
log: {BUILD / "bochs.log"}
panic: action=fatal
error: action=ignore
info: action=ignore
"""


def run_bochs() -> float:
    """Boots the image and waits until it has switched itself off. Returns the CPU time it took."""
    (BUILD / "bochsrc").write_text(bochs_options())
    (BUILD / "continue").write_text("continue\n")
    command = ["bochs", "-q", "-f", str(BUILD / "bochsrc")]
    if "-rc filename" in subprocess.run(["bochs", "--help"], capture_output=True, text=True, check=False).stderr:
        command += ["-rc", str(BUILD / "continue")]  # built with the debugger, which would wait for a command
    return run_machine(command, {}, SERIAL)


def run_machine(command: list[str], environment: Mapping[str, str], serial: Path) -> float:
    """Runs an emulator until it ends, its kernel panics or its time is over. Returns the CPU time it took."""
    serial.unlink(missing_ok=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command, cwd=BUILD, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        env=os.environ | {"TERM": "xterm"} | dict(environment), preexec_fn=limit_cpu_time,
    )  # fmt: skip
    os.close(theirs)
    threading.Thread(target=drain, args=(ours,), daemon=True).start()
    deadline = time.monotonic() + WALL_SECONDS
    try:
        while process.poll() is None and time.monotonic() < deadline and not is_stuck(serial):
            time.sleep(0.5)
    finally:  # also when this process is asked to end
        process.kill()
        process.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def limit_cpu_time() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))


def drain(terminal: int) -> None:
    """Reads what Bochs prints, and the terminal of its own that it draws the machine's screen on: full, it would block."""
    printed, waiting = b"", [terminal]
    while waiting:
        for ready in select.select(waiting, [], [])[0]:
            data = read_some(ready)
            if not data:
                waiting.remove(ready)
                os.close(ready)
            elif ready == terminal and len(waiting) == 1:
                printed += data
                if found := re.search(rb'connected to screen "(/dev/[^"]+)"', printed):
                    with contextlib.suppress(OSError):  # it has ended already
                        screen = os.open(found[1], os.O_RDWR | os.O_NOCTTY)
                        tty.setraw(screen)  # else only whole lines can be read, and a screen has none
                        waiting.append(screen)


def read_some(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # the other side was closed
        return b""


def is_stuck(serial: Path) -> bool:
    return serial.exists() and b"Kernel panic" in serial.read_bytes()


def verdict(serial: str, cases: int, builds: int) -> str | None:
    """What the emulated machine reports as wrong, as a sentence; None if all is well."""
    lines = [line.strip() for line in serial.splitlines()]
    if f"{MARK}exit 0" in lines and f"{MARK}{cases} cases x {builds} builds equal" in lines:
        return None
    if any("Kernel panic" in line for line in lines):
        return "the kernel of the emulated machine panicked"
    codes = [line.removeprefix(f"{MARK}exit ") for line in lines if line.startswith(f"{MARK}exit ")]
    if not codes:
        return (
            f"the emulated machine ended without a result; it is stopped after {CPU_SECONDS} s of CPU time or {WALL_SECONDS} s "
            f"in all, and {BUILD / 'bochs.log'} says what else went wrong"
        )
    if codes[0] == "139":
        return "a kernel left its buffers (SIGSEGV) in the emulated machine; the last case named below is the one"
    if codes[0] == "132":
        return "a kernel used an instruction that the emulated CPU lacks (SIGILL); the last case named below is the one"
    return f"the test failed in the emulated machine (exit code {codes[0]})"


def tail(text: str, lines: int = 60) -> str:
    return "\n".join(text.splitlines()[-lines:]) or "(nothing)"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that Bochs ends too
    sys.exit(main(sys.argv[1:]))
