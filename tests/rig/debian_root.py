"""Root file systems made by debootstrap, and commands run in them by chroot: an empty Debian without a container engine.

Needs root, debootstrap and a network. pip inside takes its packages from where pip on this machine takes them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

__all__ = ["BIN", "DebianRoot", "missing_needs"]

SUITE = "bookworm"
MIRROR = "http://deb.debian.org/debian"
BIN = "/usr/local/bin:/usr/bin:/bin"
SBIN = "/usr/local/sbin:/usr/sbin:/sbin"
# What the image debian:bookworm-slim leaves out.
UNUSED = ("usr/share/doc", "usr/share/info", "usr/share/locale", "usr/share/man", "var/cache/apt", "var/lib/apt/lists")
# Options of pip that say where packages come from. What else is set on this machine does not concern the root file system.
PIP_SOURCES = (
    "cert",
    "default-timeout",
    "extra-index-url",
    "find-links",
    "index-url",
    "no-index",
    "proxy",
    "trusted-host",
)


def missing_needs() -> str | None:
    """Why this machine cannot make a root file system; None if it can."""
    if os.geteuid() or not shutil.which("debootstrap"):
        return "needs root and debootstrap (apt-get install debootstrap)"
    return None


class DebianRoot:
    """A directory with a Debian in it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def empty(cls, path: Path, mirror: str = MIRROR) -> DebianRoot:
        """As the image debian:bookworm-slim has it: essential packages and apt, no documentation."""
        with open(f"{path}.log", "w") as log:
            done = subprocess.run(
                ["debootstrap", "--variant=minbase", SUITE, str(path), mirror], stdout=log, stderr=log, check=False
            )
        if done.returncode:
            raise RuntimeError(f"debootstrap failed:\n{Path(f'{path}.log').read_text()[-2000:]}")
        for name in UNUSED:
            shutil.rmtree(path / name)
            (path / name).mkdir()
        excluded = "".join(f"path-exclude /{name}/*\n" for name in UNUSED if name.startswith("usr"))
        (path / "etc" / "dpkg" / "dpkg.cfg.d" / "slim").write_text(excluded)
        shutil.copy("/etc/resolv.conf", path / "etc" / "resolv.conf")
        return cls(path)

    def copy(self, path: Path) -> DebianRoot:
        subprocess.run(["cp", "-a", str(self.path), str(path)], check=True)
        return DebianRoot(path)

    def size(self) -> int:
        """Bytes on disk."""
        done = subprocess.run(["du", "-s", "-B1", "-x", str(self.path)], capture_output=True, text=True, check=True)
        return int(done.stdout.split()[0])

    def start(
        self, command: Sequence[str], variables: Mapping[str, str] = {}, *, user: str = "root", pip: bool = False,
        mounts: Mapping[Path, str] = {}, **options: object,
    ) -> subprocess.Popen[str]:  # fmt: skip
        """Starts a command in a namespace with /proc, /dev, /sys and `mounts` (place here: place inside), which end with it."""
        root = user == "root"
        inside = {"PATH": f"{SBIN}:{BIN}" if root else BIN, "HOME": "/root" if root else f"/home/{user}"}
        inside["LANG"] = "C.UTF-8"
        inside |= {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
        mounted = {Path(f"/{name}"): f"/{name}" for name in ("proc", "dev", "sys")} | dict(mounts)
        if pip:
            settings, places = pip_sources()
            inside |= settings
            mounted |= places
        inside |= variables
        lines = []
        for source, place in mounted.items():
            target = self.path / place.lstrip("/")
            if source.is_dir():
                target.mkdir(parents=True, exist_ok=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.touch()
            lines.append(f"mount --rbind '{source}' '{target}'")
        script = "\n".join(["set -e", *lines, f"exec chroot --userspec={user} '{self.path}' \"$@\""])
        words = ["env", "-i", "-C", inside["HOME"], *(f"{name}={value}" for name, value in inside.items()), *command]
        return subprocess.Popen(["unshare", "--mount", "sh", "-c", script, "sh", *words], text=True, **options)  # type: ignore[call-overload, no-any-return]

    def run(self, command: Sequence[str], variables: Mapping[str, str] = {}, **options: object) -> str:
        """Runs a command as `start` does, and returns what it printed; raises with the end of it if it fails."""
        process = self.start(command, variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)  # type: ignore[arg-type]
        printed = process.communicate()[0]
        if process.returncode:
            raise RuntimeError(f"`{' '.join(command)}` ends with exit code {process.returncode}:\n{printed[-4000:]}")
        return printed


def pip_sources() -> tuple[dict[str, str], dict[Path, str]]:
    """pip's settings on this machine as environment variables, and the local folders they name, as mounts."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    found = re.findall(r"^(\S+)\.([\w-]+)='(.*)'$", listed.stdout, re.M)
    found.sort(key=lambda entry: entry[0] == ":env:")  # pip prefers environment variables to its files
    settings, mounts = {}, {}
    for _, option, value in found:
        if option not in PIP_SOURCES:
            continue
        words = []
        for number, word in enumerate(value.split()):
            place = Path(urlsplit(word).path)
            if urlsplit(word).scheme in ("", "file") and place.is_absolute() and place.exists():
                # An index has links to files beside it. The place differs from the one here, which may be a file of a package.
                folder = place.parent if word.startswith("file:") else place
                inside = f"/mnt/{option}-{number}"
                mounts[folder] = inside
                word = word.replace(str(place), inside + ("" if folder == place else f"/{place.name}"))
            words.append(word)
        settings[f"PIP_{option.upper().replace('-', '_')}"] = " ".join(words)
    return settings, mounts
