"""Installs the wheel and the source distribution into empty virtual environments and runs them: the last step of `make wheel`.

    python tests/package/check_wheel.py dist

torch and the other dependencies are not downloaded again: a .pth file makes the packages of the Python that runs this script
visible, all but Stoker itself, and pip may use no index for the wheel, so that its requirements must be met by them. The
source distribution is built in isolation, with an index, because its build requirements come from there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from pathlib import Path

COMPILER = re.compile(r"(.*-)?(cc|c\+\+|gcc|g\+\+|clang|clang\+\+|c[89]9|tcc|icpx?|icx)(-[\d.]+)?")
IMPORT = (
    "import pathlib, sys, stoker; assert pathlib.Path(stoker.__file__).is_relative_to(sys.prefix), stoker.__file__; "
    "from importlib.metadata import version; assert version('stoker') == stoker.__version__"
)


class Failure(Exception):
    """What is wrong with the distributions, as a sentence."""


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python tests/package/check_wheel.py DIRECTORY", file=sys.stderr)
        return 2
    directory = Path(sys.argv[1]).resolve()
    try:
        wheel, source = only(directory, "*.whl"), only(directory, "*.tar.gz")
        check_contents(wheel)
        check_sources(source)
        with tempfile.TemporaryDirectory(prefix="stoker-wheel-") as name:
            check_installations(wheel, source, Path(name))
    except Failure as failure:
        print(f"wheel: {failure}", file=sys.stderr)
        return 1
    return 0


def only(directory: Path, pattern: str) -> Path:
    found = list(directory.glob(pattern))
    if len(found) != 1:
        raise Failure(f"{directory} has {len(found)} files {pattern} instead of one; run `make wheel` again")
    return found[0]


def check_contents(wheel: Path) -> None:
    """One wheel for every Python, and no OpenMP runtime in it: the library must share torch's."""
    if not re.search(r"-py3-none-(manylinux_?\d+\w*\.)*manylinux_\d+_\d+_\w+\.whl$", wheel.name):
        raise Failure(f"{wheel.name} is not a manylinux wheel for every Python 3")
    bundled = [
        name for name in zipfile.ZipFile(wheel).namelist() if ".so" in name and "/_native/libstoker-" not in name
    ]
    if bundled:
        raise Failure(f"{wheel.name} carries libraries that are not Stoker's: {', '.join(bundled)}")


def check_sources(source: Path) -> None:
    with tarfile.open(source) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    if built := [
        name for name in names if name.startswith(("build/", "dist/", ".venv/")) or name.endswith((".o", ".so"))
    ]:
        raise Failure(f"{source.name} carries compiled files, as {built[0]}")


def check_installations(wheel: Path, source: Path, work: Path) -> None:
    packages = borrow_packages(work / "borrowed")
    plain = os.environ.get("PATH", os.defpath)
    bare = hide_compilers(plain, work / "programs")
    for label, archive, path in (
        ("wheel, no compiler", wheel, bare),
        ("wheel, with a compiler", wheel, plain),
        ("source distribution, with a compiler", source, plain),
    ):
        environment = Environment(work / re.sub(r"\W+", "-", label), packages, path)
        environment.install(archive)
        environment.check()
        print(f"wheel: {label}: installed, imported, doctor and self test passed", flush=True)
    environment = Environment(work / "no-compiler", packages, bare)
    done = environment.pip(source)
    if not done.returncode:
        raise Failure("the source distribution was built although PATH has no compiler: the check itself is wrong")
    if "CMAKE_CXX_COMPILER" not in done.stdout:
        raise Failure(f"without a compiler, pip does not say what is missing:\n{done.stdout[-3000:]}")
    print("wheel: source distribution, no compiler: refused, and pip's output names the missing compiler", flush=True)


def borrow_packages(directory: Path) -> Path:
    """Links to all installed packages but Stoker, so that an empty environment can import torch."""
    directory.mkdir()
    for item in Path(sysconfig.get_path("purelib")).iterdir():
        if not item.name.startswith(("stoker", "__pycache__", "pip")) and item.suffix != ".pth":
            (directory / item.name).symlink_to(item)
    return directory


def hide_compilers(path: str, directory: Path) -> str:
    """A PATH with one directory: links to every program of `path` that is not a compiler."""
    directory.mkdir()
    own = Path(sys.executable).parent
    for folder in map(Path, path.split(os.pathsep)):
        if not folder.is_dir() or folder == own:
            continue
        for program in folder.iterdir():
            link = directory / program.name
            if not COMPILER.fullmatch(program.name) and not os.path.lexists(link):
                link.symlink_to(program)
    if found := shutil.which("c++", path=str(directory)):
        raise Failure(f"{found} is still on the PATH without compilers")
    return str(directory)


class Environment:
    """A virtual environment with the borrowed packages, and a cache of its own."""

    def __init__(self, directory: Path, packages: Path, path: str) -> None:
        self.bin = directory / "bin"
        base = getattr(sys, "_base_executable", sys.executable)
        subprocess.run([base, "-m", "venv", str(directory)], check=True)
        site = next(directory.glob("lib/python*/site-packages"))
        for item in site.glob("setuptools*"):  # torch asks for a newer one than Python's, and it is among the borrowed
            shutil.rmtree(item)
        (site / "borrowed.pth").write_text(f"{packages}\n")
        dropped = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CC", "CXX", "STOKER_NATIVE_DIR", "STOKER_ISA"}
        self.variables = {name: value for name, value in os.environ.items() if name not in dropped} | {
            "PATH": f"{self.bin}{os.pathsep}{path}",
            "XDG_CACHE_HOME": str(directory / "cache"),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }
        self.directory = directory

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=self.variables, cwd=self.directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, check=False,
        )  # fmt: skip

    def pip(self, archive: Path) -> subprocess.CompletedProcess[str]:
        options = ["--no-index"] if archive.suffix == ".whl" else []
        return self.run(str(self.bin / "python"), "-m", "pip", "install", "-v", *options, str(archive))

    def install(self, archive: Path) -> None:
        done = self.pip(archive)
        if done.returncode:
            raise Failure(f"{archive.name} cannot be installed:\n{done.stdout[-4000:]}")
        if fetched := re.findall(r"^ *(?:Collecting|Downloading) ((?:torch|nvidia)\S*)", done.stdout, re.M):
            raise Failure(f"installing {archive.name} fetches {', '.join(fetched)}, which is there already")

    def check(self) -> None:
        for command in (
            [str(self.bin / "python"), "-c", IMPORT],
            [str(self.bin / "stoker"), "--help"],
            [str(self.bin / "stoker"), "doctor", "--no-rates"],
            [str(self.bin / "stoker"), "selftest"],
        ):
            done = self.run(*command)
            if done.returncode:
                raise Failure(f"`{' '.join(command)}` ends with exit code {done.returncode}:\n{done.stdout[-4000:]}")


if __name__ == "__main__":
    sys.exit(main())
