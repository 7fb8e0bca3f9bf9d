"""Executes Stoker's bf16 products, by oneDNN inside libtorch, on a CPU without AVX512-BF16: part of `make emulate`.

The emulator is the Bochs of Debian 13, whose CPU model "sapphire_rapids" has AVX512-BF16. It is unpacked below build/emulate
with the libraries that it needs, from the archive that apt is configured for; nothing is installed and no root is needed.
The emulated machine reads the files that tests/kernels/bf16_units.py has just opened here, torch included, from a disk,
and runs that script. Exits 0 if all results are right or the CPU has AVX512-BF16 itself, 2 if this machine cannot run the
emulator, else 1. With `--anyway` it also runs on a CPU that has AVX512-BF16.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import debian
import emulate
from debian import Obstacle
from emulate import BUILD, HERE, MARK

SUITE = "trixie"
"""Bochs 2.7 of Debian 12 has no AVX512-BF16; Linux 6.1 does not boot in the Bochs 3.1 of Debian's testing: it divides by zero in
`__clocksource_update_freq_scale`, whatever the CPU model."""
SYSTEM, LOG = BUILD / SUITE, BUILD / "apt.log"
PACKAGES = ("bochs", "bochs-term", "bochsbios", "vgabios", "busybox-static", "xorriso", "isolinux", "syslinux-common")
WORK = BUILD / "bf16"
SERIAL, FILES, BOOT, DISK = WORK / "serial.log", WORK / "files.txt", WORK / "boot.iso", WORK / "disk.iso"

# Linux does not get AMX running on this Bochs; and Bochs stops when it leaves system management mode while the kernel uses
# five levels of page tables (LA57).
CPU = 'model=sapphire_rapids, exclude_features="la57,amx,amx_int8,amx_bf16"'
# clearcpuid: XSAVEC and XSAVES, whose states Bochs 3.0 restores wrongly (repaired after it), and FSRM. The model says that fast
# string instructions are off; Linux 6.1 then ignores ERMS but not FSRM, and its memmove with only FSRM overwrites memory.
COMMAND_LINE = (
    "console=ttyS0,115200 quiet loglevel=3 clearcpuid=321,323,580 mitigations=off cryptomgr.notests "
    "initcall_blacklist=load_system_certificate_list"
)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--anyway", action="store_true", help="also on a CPU that needs no emulator")
    anyway, started = parser.parse_args(arguments).anyway, time.monotonic()
    try:
        return run(started, anyway)
    except Obstacle as obstacle:
        print(f"emulate_bf16: {obstacle}", file=sys.stderr)
        return 2


def run(started: float, anyway: bool) -> int:
    if platform.machine() != "x86_64":
        raise Obstacle(f"AVX512-BF16 is for x86-64; this is {platform.machine()}")
    from stoker.kernels import native
    from stoker.machine.facts import this_machine

    if "AVX512-BF16" in this_machine().isa.present and not anyway:
        print("emulate_bf16: not needed, this CPU has AVX512-BF16: the ordinary tests execute these products.")
        return 0
    WORK.mkdir(parents=True, exist_ok=True)
    unpack_system()
    kernel = emulate.fetch_kernel()
    libraries = Path(native.library()._name).parent
    python = Path(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))
    run_natively(python, libraries)
    build_images(kernel, python, libraries)
    seconds = run_bochs()
    serial = SERIAL.read_text(errors="replace") if SERIAL.exists() else ""
    if wrong := verdict(serial):
        print(f"emulate_bf16: {wrong}\n--- the end of {SERIAL}:\n{emulate.tail(serial)}", file=sys.stderr)
        return 1
    print(
        f"emulate_bf16: {result(serial)}, executed by Bochs "
        f"({seconds:.0f} s of CPU time, {time.monotonic() - started:.0f} s in all)"
    )
    return 0


# --- the emulator -------------------------------------------------------------------------------------------------------


def archive() -> tuple[str, str]:
    """The address of Debian's archive as apt is configured here, and the keys it is signed with, or nothing for apt's own."""
    run = subprocess.run(
        ["apt-get", "indextargets", "Created-By: Packages", "Label: Debian", "Component: main"],
        capture_output=True,
        text=True,
        check=False,
    )
    fields = dict(line.partition(": ")[::2] for line in run.stdout.partition("\n\n")[0].splitlines())
    return fields.get("Repo-URI", ""), fields.get("Signed-By", "")


def unpack_system() -> None:
    """build/emulate/trixie: the emulator and tools with their libraries, run by a loader of their own and not installed."""
    complete = SYSTEM / "complete"
    if complete.exists() and complete.read_text() == repr(PACKAGES):
        return
    debian.need_apt()
    uri, keys = archive()
    if not uri and os.geteuid() == 0:
        debian.apt(["apt-get", "update", "-qq"], LOG)
        uri, keys = archive()
    if not uri:
        raise Obstacle("apt knows no archive of Debian: run apt-get update as root on a Debian system")
    print(f"emulate_bf16: fetching Bochs 3 from Debian's {SUITE}", flush=True)
    scratch = BUILD / "apt"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    source = scratch / "next.sources"
    signed = f"Signed-By: {keys}\n" if keys else ""
    source.write_text(f"Types: deb\nURIs: {uri}\nSuites: {SUITE}\nComponents: main\n{signed}")
    options = {"Dir::Etc::sourcelist": str(source), "Dir::Etc::sourceparts": "/dev/null"}
    command = debian.private_apt(scratch, options)
    if debian.apt([*command, "update"], LOG):
        raise Obstacle(f"Debian's {SUITE} could not be read: {debian.last_line(LOG)}")
    # Of all that the packages depend on, down to the desktop, the emulator needs the libraries.
    simulation = [*command, "--simulate", "--no-install-recommends", "install", *PACKAGES]
    plan = subprocess.run(simulation, capture_output=True, text=True, check=False)
    words = [line.split() for line in plan.stdout.splitlines() if line.startswith("Inst ")]
    names = [name for _, name, *_ in words if name in PACKAGES or name.startswith("lib") or name == "zlib1g"]
    packages = scratch / "packages"
    packages.mkdir()
    if not names or debian.apt([*command, "download", *names], LOG, packages):
        raise Obstacle(
            f"the packages of Bochs could not be fetched: {(plan.stderr.strip() or debian.last_line(LOG))[-300:]}"
        )
    shutil.rmtree(SYSTEM, ignore_errors=True)
    SYSTEM.mkdir()
    for package in sorted(packages.glob("*.deb")):
        subprocess.run(["dpkg-deb", "--extract", str(package), str(SYSTEM)], check=True)
    shutil.rmtree(scratch)
    complete.write_text(repr(PACKAGES))


def command_of(program: str) -> list[str]:
    """How to start an unpacked program: by its own loader, because its C library may be newer than this system's."""
    loader = SYSTEM / "usr" / "lib64" / "ld-linux-x86-64.so.2"
    return [str(loader), "--library-path", str(libraries_of_system()), str(SYSTEM / "usr" / "bin" / program)]


def libraries_of_system() -> Path:
    return SYSTEM / "usr" / "lib" / "x86_64-linux-gnu"


# --- the images ---------------------------------------------------------------------------------------------------------


def environment(libraries: Path) -> dict[str, str]:
    import torch

    return {
        "PYTHONPATH": os.pathsep.join((str(HERE.parent.parent / "src"), str(Path(torch.__file__).parent.parent))),
        "PYTHONUTF8": "1",
        "OMP_WAIT_POLICY": "passive",
        "OPENBLAS_NUM_THREADS": "1",
        "STOKER_NATIVE_DIR": str(libraries),
    }


def run_natively(python: Path, libraries: Path) -> None:
    """Lists the files that the emulated machine needs, and checks what this CPU can."""
    command = [str(python), "-S", str(HERE / "bf16_units.py"), "--files", str(FILES)]
    path = {"PATH": os.environ.get("PATH", os.defpath)}
    done = subprocess.run(command, env=environment(libraries) | path, capture_output=True, text=True, check=False)
    if done.returncode:
        print(
            f"{done.stdout[-3000:]}{done.stderr[-3000:]}\nemulate_bf16: the products are wrong on this CPU",
            file=sys.stderr,
        )
        sys.exit(1)


def guest_files(python: Path, libraries: Path) -> dict[str, Path]:
    """Path in the emulated machine -> file here."""
    files = {name: Path(name) for name in [*FILES.read_text().splitlines(), str(python), "/lib64/ld-linux-x86-64.so.2"]}
    files |= {str(path): path for path in libraries.iterdir() if path.is_file()}
    for name in list(files):
        files |= {str(link): link.resolve() for link in emulate.links_to(Path(name)) if str(link) not in files}
    return {"/bin/busybox": SYSTEM / "usr" / "bin" / "busybox", **files}


def build_images(kernel: Path, python: Path, libraries: Path) -> None:
    """boot.iso with kernel and drivers, disk.iso with all else, unless they were made from the same files before."""
    files = guest_files(python, libraries)
    mounts = {f"/{name}/keep": HERE / "bf16_units.py" for name in ("proc", "sys", "dev", "scratch")}
    drivers = {f"/modules/{name}.ko": BUILD / f"{name}.ko" for name in emulate.DISK_MODULES}
    inputs = {**files, **drivers, "kernel": kernel, "emulate_bf16.py": Path(__file__)}
    states = [(name, path.stat().st_size, path.stat().st_mtime_ns) for name, path in sorted(inputs.items())]
    fingerprint = hashlib.sha256(repr(states).encode()).hexdigest()
    made_from = WORK / "made_from.txt"
    if made_from.exists() and made_from.read_text() == fingerprint and BOOT.exists() and DISK.exists():
        return
    print("emulate_bf16: building the images", flush=True)
    made_from.unlink(missing_ok=True)
    paths = WORK / "paths.txt"
    paths.write_text("\n".join(f"{name}={path.resolve()}" for name, path in {**files, **mounts}.items()))
    make_iso(DISK, ["-R", "-D", "-iso-level", "3", "-graft-points", "-path-list", str(paths)])
    tree = WORK / "iso"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir()
    shutil.copy(kernel, tree / "vmlinuz")
    shutil.copy(SYSTEM / "usr" / "lib" / "ISOLINUX" / "isolinux.bin", tree)
    shutil.copy(SYSTEM / "usr" / "lib" / "syslinux" / "modules" / "bios" / "ldlinux.c32", tree)
    (tree / "isolinux.cfg").write_text(
        f"default linux\nlabel linux\nkernel vmlinuz\ninitrd initrd\nappend {COMMAND_LINE}\n"
    )
    small = {
        "/bin/busybox": files["/bin/busybox"],
        "/disk/keep": HERE / "bf16_units.py",
        "/sys/keep": HERE / "bf16_units.py",
    }
    emulate.write_initrd(tree / "initrd", {**small, **drivers}, init_script(python, files, libraries))
    boot = ["-b", "isolinux.bin", "-c", "boot.cat", "-no-emul-boot", "-boot-load-size", "4", "-boot-info-table"]
    make_iso(BOOT, [*boot, str(tree)])
    shutil.rmtree(tree)
    made_from.write_text(fingerprint)


def make_iso(target: Path, arguments: list[str]) -> None:
    command = [*command_of("xorriso"), "-as", "mkisofs", "-quiet", "-o", str(target), *arguments]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


def init_script(python: Path, files: dict[str, Path], libraries: Path) -> str:
    """The emulated machine's first process: it finds the disk and runs the test there."""
    directories = sorted({os.path.dirname(name) for name in files if ".so" in name})
    variables = environment(libraries) | {
        "LD_LIBRARY_PATH": ":".join(directories),
        "PYTHONHOME": sys.base_prefix,
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": "/scratch",
        "TMPDIR": "/scratch",
    }
    exports = "\n".join(f"export {name}='{value}'" for name, value in variables.items())
    mounts = "\n".join(
        f"mount -t {kind} {kind} /disk/{name}"
        for kind, name in (("proc", "proc"), ("sysfs", "sys"), ("devtmpfs", "dev"), ("tmpfs", "scratch"))
    )
    return f"""#!/bin/busybox sh
alias mount='/bin/busybox mount'
mount -t devtmpfs dev /dev
for module in {" ".join(emulate.DISK_MODULES)}; do /bin/busybox insmod /modules/$module.ko; done
for try in 1 2 3 4 5 6 7 8 9; do [ -e /dev/sda ] && break; /bin/busybox sleep 0.2; done
mount -t iso9660 -o ro /dev/sda /disk
{mounts}
echo "{MARK}booted"
{exports}
/bin/busybox chroot /disk '{python}' -S '{HERE / "bf16_units.py"}' >/log 2>&1
code=$?
[ $code = 0 ] || /bin/busybox tail -n 50 /log
echo "{MARK}$(/bin/busybox tail -n 1 /log)"
echo "{MARK}exit $code"
/bin/busybox sleep 1
/bin/busybox poweroff -f
"""


# --- the run ------------------------------------------------------------------------------------------------------------


def bochs_options() -> str:
    """The emulated machine. Its memory holds the part of libtorch that is used; nothing else is large."""
    return f"""\
cpu: {CPU}, count=1, ips=50000000, reset_on_triple_fault=0
memory: guest=2048, host=2048
romimage: file={SYSTEM}/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file={SYSTEM}/usr/share/vgabios/vgabios.bin
display_library: term
ata0: enabled=1, ioaddr1=0x1f0, ioaddr2=0x3f0, irq=14
ata0-master: type=cdrom, path={BOOT}, status=inserted
ata1: enabled=1, ioaddr1=0x170, ioaddr2=0x370, irq=15
ata1-master: type=disk, mode=flat, path={DISK}
boot: cdrom
com1: enabled=1, mode=file, dev={SERIAL}
clock: sync=none, time0=1700000000
log: {WORK / "bochs.log"}
panic: action=fatal
error: action=ignore
info: action=ignore
"""


def run_bochs() -> float:
    (WORK / "bochsrc").write_text(bochs_options())
    (WORK / "continue").write_text("continue\n")
    DISK.with_name(f"{DISK.name}.lock").unlink(missing_ok=True)  # of a run that was stopped
    command = [*command_of("bochs-bin"), "-q", "-f", str(WORK / "bochsrc"), "-rc", str(WORK / "continue")]
    variables = {
        "LTDL_LIBRARY_PATH": str(libraries_of_system() / "bochs" / "plugins"),
        "BXSHARE": str(SYSTEM / "usr" / "share" / "bochs"),
    }
    return emulate.run_machine(command, variables, SERIAL)


def lines_of(serial: str) -> list[str]:
    return [line.strip().removeprefix(MARK) for line in serial.splitlines() if line.strip().startswith(MARK)]


def result(serial: str) -> str:
    """The last line of the test, which comes before its exit code."""
    lines = lines_of(serial)
    return lines[-2] if len(lines) > 1 else ""


def verdict(serial: str) -> str | None:
    """What the emulated machine reports as wrong, as a sentence; None if all is well."""
    if "Kernel panic" in serial:
        return "the kernel of the emulated machine panicked"
    codes = [line.removeprefix("exit ") for line in lines_of(serial) if line.startswith("exit ")]
    if not codes:
        return (
            f"the emulated machine ended without a result; it is stopped after {emulate.CPU_SECONDS} s of CPU time or "
            f"{emulate.WALL_SECONDS} s in all, and {WORK / 'bochs.log'} says what else went wrong"
        )
    if codes[0] == "0" and result(serial).endswith("right by AVX512-BF16"):
        return None
    if codes[0] == "132":
        return "a product used an instruction that the emulated CPU lacks (SIGILL)"
    if codes[0] == "3":
        return 'torch or Stoker does not use AVX512-BF16 in the emulated machine: the engine "onednn" is not available in bf16'
    return f"the test failed in the emulated machine (exit code {codes[0]})"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that Bochs ends too
    sys.exit(main(sys.argv[1:]))
