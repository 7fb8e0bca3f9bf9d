"""Makes the root file system of the Containerfile without a container engine, and runs Stoker in it: `make container-check`.

debootstrap lays out the base, and the scripts of container/, which the Containerfile runs, are run by chroot in copies of it.
Needs root, debootstrap and a network. `--wheels DIR` offers pip a folder with wheels, as for a torch that is not on the index.
Exits 0 if all works and the size is below the limit, 2 if this machine cannot do it, else 1.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "container"
LIMIT = 1.5e9
SOURCES = ("CMakeLists.txt", "LICENSE", "README.md", "container", "csrc", "pyproject.toml", "src")
SUITE = "bookworm"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--torch-index", default="https://download.pytorch.org/whl/cpu", help="empty: pip's default")
    parser.add_argument("--wheels", type=Path)
    parser.add_argument("--mirror", default="http://deb.debian.org/debian")
    options = parser.parse_args()
    if os.geteuid() or not shutil.which("debootstrap"):
        print("container: needs root and debootstrap (apt-get install debootstrap)", file=sys.stderr)
        return 2
    shutil.rmtree(BUILD, ignore_errors=True)
    BUILD.mkdir(parents=True)
    base, build, final = BUILD / "base", BUILD / "build", BUILD / "final"
    subprocess.run(["debootstrap", "--variant=minbase", SUITE, str(base), options.mirror], check=True)
    for tree in (build, final):
        subprocess.run(["cp", "-a", str(base), str(tree)], check=True)
        shutil.copy("/etc/resolv.conf", tree / "etc" / "resolv.conf")
    copy_sources(build / "src")
    variables = {"TORCH_INDEX": options.torch_index}
    if options.wheels:
        shutil.copytree(options.wheels, build / "wheels")
        variables["PIP_FIND_LINKS"] = "/wheels"
    enter(build, ["sh", "/src/container/build.sh"], variables)
    shutil.move(build / "opt" / "stoker", final / "opt" / "stoker")
    shutil.copytree(ROOT / "container", final / "usr" / "local" / "share" / "stoker")
    enter(final, ["sh", "/usr/local/share/stoker/runtime.sh"], {})
    size = size_of(final)
    for command in (["stoker", "doctor", "--no-rates"], ["stoker", "selftest"], ["mpirun", "--version"]):
        enter(final, command, {"PATH": "/opt/stoker/bin:/usr/bin:/bin", "HOME": "/home/stoker"}, user="stoker")
    print(f"container: {size / 1e9:.2f} GB, limit {LIMIT / 1e9:.1f} GB")
    return 0 if size < LIMIT else 1


def copy_sources(target: Path) -> None:
    target.mkdir()
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target / name)


def enter(tree: Path, command: list[str], variables: dict[str, str], user: str = "root") -> None:
    """Runs a command in a tree, with /proc, /dev and /sys mounted in a namespace that ends with it."""
    kept = {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
    mounts = "".join(f"mount --rbind /{name} '{tree}/{name}' && " for name in ("proc", "dev", "sys"))
    script = f"{mounts}exec chroot --userspec={user} '{tree}' \"$@\""
    environment = {"PATH": os.environ["PATH"], **kept}
    inside = ["env", *(f"{name}={value}" for name, value in variables.items()), *command]
    subprocess.run(["unshare", "--mount", "sh", "-c", script, "sh", *inside], env=environment, check=True)


def size_of(tree: Path) -> int:
    done = subprocess.run(["du", "-s", "-B1", "-x", str(tree)], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[0])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as error:
        print(
            f"container: `{' '.join(map(str, error.cmd[:8]))}` ends with exit code {error.returncode}", file=sys.stderr
        )
        sys.exit(1)
