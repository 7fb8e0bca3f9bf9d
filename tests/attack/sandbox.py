"""Isolates an attack from the rest of the machine, and finds the files and processes that a case leaves behind.

A process with the privileges (usually root) gets its own mount and network namespaces: everything is read-only except the working
directory, /tmp and /dev/shm, which start empty and disappear with it, and no host name resolves. Otherwise root becomes nobody.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import shutil
import socket
import struct
import sys
from pathlib import Path

__all__ = ["BIND", "RDONLY", "REMOUNT", "Unsafe", "children", "clear", "isolate", "limit_memory", "listing", "mount",
           "own_mounts", "python_is_for_all", "unmount"]  # fmt: skip

_NEWNS, _NEWIPC, _NEWNET = 0x00020000, 0x08000000, 0x40000000  # linux/sched.h
RDONLY, REMOUNT, BIND, _REC, _PRIVATE = 1, 32, 4096, 16384, 1 << 18  # linux/mount.h
_SUBREAPER = 36  # linux/prctl.h
_NOBODY = 65534
_libc = ctypes.CDLL(None, use_errno=True)


class Unsafe(Exception):
    """This process is root and cannot be isolated from the machine."""


def isolate(work: Path) -> bool:
    """Call it first in a process. False if the process still shares mounts and network with the machine."""
    _libc.prctl(_SUBREAPER, 1, 0, 0, 0)  # processes that a case leaves running become children of this one
    if os.geteuid() != 0:
        return False
    try:
        _take_own_mounts(work)
    except OSError:
        _become_nobody(work)
        return False
    with contextlib.suppress(OSError):
        _raise_loopback()
    return True


def _take_own_mounts(work: Path) -> None:
    if _libc.unshare(_NEWNS | _NEWIPC | _NEWNET):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    mount("none", "/", "", _REC | _PRIVATE)
    for point in _mount_points():
        if point == "/":
            mount("none", point, "", REMOUNT | BIND | RDONLY)
        with contextlib.suppress(OSError):  # a mount below another that hides it
            mount("none", point, "", REMOUNT | BIND | RDONLY)
    mount("tmpfs", "/dev/shm", "tmpfs", 0, "size=1g,mode=1777")
    needed = [__file__, sys.prefix, sys.base_prefix, os.environ.get("STOKER_NATIVE_DIR", ""), *sys.path]
    if not any(os.path.realpath(path).startswith("/tmp/") for path in needed):
        mount("tmpfs", "/tmp", "tmpfs", 0, "size=1g,mode=1777")
        work.mkdir(parents=True, exist_ok=True)
    mount("tmpfs", str(work), "tmpfs", 0, "size=2g,mode=755")


def python_is_for_all() -> bool:
    """Whether another user can run this Python and these tests; only root can read what is in /root."""
    folders = [*Path(os.__file__).parents, *Path(__file__).resolve().parents]
    return all(folder.stat().st_mode & 0o005 == 0o005 for folder in folders)


def _become_nobody(work: Path) -> None:
    if not python_is_for_all():
        raise Unsafe("root without mounts of its own could damage the machine, and no other user can run this Python")
    os.chown(work, _NOBODY, _NOBODY)
    os.setgroups([])
    os.setgid(_NOBODY)
    os.setuid(_NOBODY)


def own_mounts() -> None:
    """Makes later mounts of this process visible to it alone."""
    if _libc.unshare(_NEWNS):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    mount("none", "/", "", _REC | _PRIVATE)


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    if _libc.mount(source.encode(), os.fsencode(target), kind.encode(), flags, options.encode()):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), target)


def unmount(target: str) -> None:
    _libc.umount2(os.fsencode(target), 2)  # MNT_DETACH


def _mount_points() -> list[str]:
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        return [line.split()[4].encode().decode("unicode_escape") for line in file]


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        fcntl.ioctl(handle, 0x8914, struct.pack("16sh14x", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP


def children() -> list[tuple[int, str]]:
    """The descendants of this process, with their names."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        with contextlib.suppress(OSError, ValueError):
            fields = Path("/proc", name, "stat").read_bytes().rpartition(b")")
            if int(fields[2].split()[1]) == os.getpid():
                found.append((int(name), fields[0].partition(b"(")[2].decode(errors="replace")))
    return found


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Every path below a folder, with size and modification time for files."""
    found = {}
    for where, folders, names in os.walk(os.fsencode(folder)):
        for name in folders + names:
            path = os.path.join(where, name)
            with contextlib.suppress(OSError):
                facts = os.lstat(path)
                entry = (facts.st_size, facts.st_mtime_ns) if name in names else (0, 0)
                found[os.fsdecode(os.path.relpath(path, os.fsencode(folder)))] = entry
    return found


def clear(folder: Path) -> None:
    """Empties a folder, whatever its permissions are."""
    for name in os.listdir(os.fsencode(folder)):
        path = os.path.join(os.fsencode(folder), name)
        if os.path.isdir(path) and not os.path.islink(path):
            with contextlib.suppress(OSError):
                os.chmod(path, 0o700)
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                os.unlink(path)


def limit_memory(beyond: int) -> None:
    """Limits the address space of this process to so many bytes more than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    total = pages * resource.getpagesize() + beyond
    resource.setrlimit(resource.RLIMIT_AS, (total, total))
