"""Packages of Debian that an emulator needs (emulate.py, arm.py): installed if root runs the script, else named."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

__all__ = ["Obstacle", "apt", "install", "last_line", "need_apt", "private_apt"]

APT_SECONDS = 600  # a mirror that stalls must not hold up the tests


class Obstacle(Exception):
    """Why this machine cannot run the emulator, as a sentence."""


def install(packages: Mapping[str, str], log: Path, program: str) -> None:
    """Installs what is missing of `packages`, each with a file by which it is seen to be installed."""
    missing = [name for name, path in packages.items() if not os.path.exists(path)]
    if not missing:
        return
    need_apt()
    if os.geteuid():
        raise Obstacle(f"packages are missing and only root can install them: sudo apt-get install {' '.join(missing)}")
    print(f"{program}: installing {' '.join(missing)}", flush=True)
    # Another script may be installing packages at the same time.
    command = ["apt-get", "-o", "DPkg::Lock::Timeout=300", "install", "-y", "-qq", "--no-install-recommends", *missing]
    if apt(command, log) and (apt(["apt-get", "update", "-qq"], log) or apt(command, log)):
        raise Obstacle(f"the packages {' '.join(missing)} could not be installed: {last_line(log)}")


def need_apt() -> None:
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        raise Obstacle("the emulator and what it runs come from Debian's packages, and there is no apt-get here")


def apt(command: list[str], log: Path, cwd: Path | None = None) -> int:
    """The exit code of an apt command; 1 if a mirror stalls."""
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    with log.open("a") as output:
        try:
            return subprocess.run(
                command, cwd=cwd, env=environment, stdout=output, stderr=output, check=False, timeout=APT_SECONDS
            ).returncode
        except subprocess.TimeoutExpired:
            return 1


def private_apt(directory: Path, options: Mapping[str, str]) -> list[str]:
    """`apt-get` with lists, cache and status below `directory`: it sees no installed packages, leaves the system's state alone
    and needs no root. Give it `update` first."""
    state, cache = directory / "state", directory / "cache"
    for path in (state / "lists" / "partial", cache / "archives" / "partial"):
        path.mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    everything = {
        "APT::Sandbox::User": "root",
        "Acquire::Languages": "none",
        "Dir::State": str(state),
        "Dir::State::status": str(state / "status"),
        "Dir::Cache": str(cache),
        **options,
    }
    return ["apt-get", "-qq", *(word for name, value in everything.items() for word in ("-o", f"{name}={value}"))]


def last_line(path: Path) -> str:
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "apt-get gave no reason"
