"""Control groups, versions 1 and 2: the limits that a container, a batch system or systemd sets for this process.

Limits of ancestors apply too, so every reader walks from the process's own group up to the mount point. In a container the
group's path in /proc/self/cgroup may be that of the host; the mount's root in mountinfo is the prefix to remove.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from stoker.machine.tree import Tree

__all__ = ["Cgroup", "read_cgroup"]

_UNLIMITED = 1 << 60  # version 1 writes "no memory limit" as the largest multiple of a page


@dataclass(frozen=True)
class Cgroup:
    version: str | None
    """v1, v2, or v1+v2 for the hybrid layout; None if none is visible."""
    quota: float | None
    """CPUs' worth of time per second."""
    cpuset: tuple[int, ...] | None
    memory_limit: int | None
    """Bytes."""
    memory_used: int | None
    """Bytes, page cache included."""
    tasks_limit: int | None
    """Processes and threads."""


@dataclass(frozen=True)
class _Mount:
    point: str
    root: str
    controllers: frozenset[str] | None
    """None for version 2."""


def read_cgroup(tree: Tree) -> Cgroup:
    mounts = _mounts(tree)
    groups = _groups(tree)
    v2 = [mount for mount in mounts if mount.controllers is None]
    v1 = [mount for mount in mounts if mount.controllers is not None]

    def v2_directories() -> Iterator[str]:
        for mount in v2:
            yield from _upwards(tree, mount, groups.get(""))

    def v1_directories(controller: str) -> Iterator[str]:
        for mount in v1:
            if controller in (mount.controllers or ()):
                yield from _upwards(tree, mount, groups.get(controller))

    quotas = [_quota_v2(tree, where) for where in v2_directories()]
    quotas += [_quota_v1(tree, where) for where in v1_directories("cpu")]
    memory = [tree.text(f"{where}/{name}") for where in v2_directories() for name in ("memory.max", "memory.high")]
    memory += [tree.text(f"{where}/memory.limit_in_bytes") for where in v1_directories("memory")]
    tasks = [tree.text(f"{where}/pids.max") for where in (*v2_directories(), *v1_directories("pids"))]
    sets = [tree.cpu_list(f"{where}/cpuset.cpus.effective") for where in v2_directories()]
    for where in v1_directories("cpuset"):
        sets += [tree.cpu_list(f"{where}/{name}") for name in ("cpuset.effective_cpus", "cpuset.cpus")]
    used = [tree.number(f"{where}/memory.current") for where in v2_directories()]
    used += [tree.number(f"{where}/memory.usage_in_bytes") for where in v1_directories("memory")]
    # A hybrid system mounts an empty version 2 tree without controllers, which is not reported.
    v2_counts = any((tree.text(f"{mount.point}/cgroup.controllers") or "") for mount in v2) or not v1
    return Cgroup(
        version="+".join(["v1"] * bool(v1) + ["v2"] * bool(v2 and v2_counts)) or None,
        quota=min((quota for quota in quotas if quota), default=None),
        cpuset=next((cpus for cpus in sets if cpus), None),
        memory_limit=_lowest(memory),
        memory_used=next((number for number in used if number is not None), None),
        tasks_limit=_lowest(tasks),
    )


def _mounts(tree: Tree) -> list[_Mount]:
    mounts = []
    for line in (tree.text("/proc/self/mountinfo") or "").splitlines():
        left, separator, right = line.partition(" - ")
        fields, about = left.split(), right.split()
        if not separator or len(fields) < 5 or len(about) < 1:
            continue
        if about[0] == "cgroup2":
            mounts.append(_Mount(_unescape(fields[4]), _unescape(fields[3]), None))
        elif about[0] == "cgroup" and len(about) > 2:
            mounts.append(_Mount(_unescape(fields[4]), _unescape(fields[3]), frozenset(about[2].split(","))))
    if mounts:
        return mounts
    # No mountinfo (some sandboxes hide it): use the standard locations.
    if tree.text("/sys/fs/cgroup/cgroup.controllers") is not None:
        return [_Mount("/sys/fs/cgroup", "/", None)]
    return [
        _Mount(f"/sys/fs/cgroup/{name}", "/", frozenset(name.split(",")))
        for name in tree.names("/sys/fs/cgroup")
        if set(name.split(",")) & {"cpu", "cpuset", "memory", "pids"}
    ]


def _groups(tree: Tree) -> dict[str, str]:
    """Controller -> path of this process's group; version 2 has the empty name."""
    groups = {}
    for line in (tree.text("/proc/self/cgroup") or "").splitlines():
        fields = line.split(":", 2)
        if len(fields) == 3:
            for controller in fields[1].split(","):
                groups[controller] = fields[2]
    return groups


def _upwards(tree: Tree, mount: _Mount, group: str | None) -> Iterator[str]:
    """The directories from the process's own group up to the mount point, as far as they are visible."""
    path = (group or "/").rstrip("/")
    if ".." in path.split("/"):  # the group is outside the namespace
        path = ""
    root = mount.root.rstrip("/")
    if root and (path == root or path.startswith(root + "/")):
        path = path[len(root) :]
    while path:
        if tree.has_directory(mount.point + path):
            yield mount.point + path
        path = path.rpartition("/")[0]
    yield mount.point


def _quota_v2(tree: Tree, where: str) -> float | None:
    fields = (tree.text(f"{where}/cpu.max") or "").split()
    return _ratio(fields[0], fields[1] if len(fields) > 1 else "100000") if fields else None


def _quota_v1(tree: Tree, where: str) -> float | None:
    quota, period = (tree.text(f"{where}/cpu.cfs_{name}_us") for name in ("quota", "period"))
    return _ratio(quota or "", period or "100000")


def _ratio(quota: str, period: str) -> float | None:
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:  # "max" and "-1": no limit
        return None
    return int(quota) / int(period) or None


def _lowest(texts: list[str | None]) -> int | None:
    numbers = [int(text) for text in texts if text and text.isdigit()]
    return min((number for number in numbers if number < _UNLIMITED), default=None)


def _unescape(text: str) -> str:
    """mountinfo writes white space and backslashes as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
