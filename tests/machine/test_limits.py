"""What a process may use: affinity masks, both versions of control groups in all their layouts, ulimits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from machine.recorded.layout import lay_out, write
from machine.recorded.machines import container, hybrid_laptop, ice_lake
from stoker.machine import Machine
from stoker.machine.processes import processes_and_threads
from stoker.machine.verdicts import Evidence, verdicts


def subjects(machine: Machine) -> dict[str, str]:
    return {verdict.subject: verdict.text for verdict in verdicts(Evidence(machine))}


def test_an_affinity_mask_narrows_cpus_and_cores(tree_path: Path) -> None:
    machine = Machine.read(lay_out(replace(hybrid_laptop(), allowed="0-2,12"), tree_path))
    assert machine.usable_cpus == (0, 1, 2, 12)
    assert [core.cpus for core in machine.usable_cores] == [(0, 1), (2,), (12,)]
    assert machine.usable_threads == 2
    assert "4 of the machine's 20" in subjects(machine)["affinity"]


def test_a_process_that_has_efficiency_cores_only_uses_them(tree_path: Path) -> None:
    machine = Machine.read(lay_out(replace(hybrid_laptop(), allowed="12-15"), tree_path))
    assert machine.usable_threads == 4


def test_an_affinity_mask_within_one_node_makes_one_process(tree_path: Path) -> None:
    machine = Machine.read(lay_out(replace(ice_lake(), allowed="0-19"), tree_path))
    assert processes_and_threads(machine) == (1, 20)


def test_a_quota_larger_than_a_node_is_divided_over_nodes(tree_path: Path) -> None:
    root = lay_out(ice_lake(), tree_path)
    write(root, "/sys/fs/cgroup/user.slice/cpu.max", "6000000 100000\n")
    machine = Machine.read(root)
    assert machine.quota == 60
    assert processes_and_threads(machine) == (2, 30)


def test_a_cpuset_of_the_container_narrows_cpus(tree_path: Path) -> None:
    root = lay_out(container(), tree_path)
    write(root, "/sys/fs/cgroup/cpuset.cpus.effective", "8-15\n")
    assert Machine.read(root).usable_cpus == tuple(range(8, 16))


def test_the_lowest_quota_of_all_ancestors_applies(tree_path: Path) -> None:
    root = lay_out(hybrid_laptop(), tree_path)
    write(root, "/sys/fs/cgroup/user.slice/cpu.max", "200000 100000\n")
    write(root, "/sys/fs/cgroup/user.slice/user-1000.slice/cpu.max", "800000 100000\n")
    write(root, "/sys/fs/cgroup/user.slice/memory.max", "4294967296\n")
    write(root, "/sys/fs/cgroup/user.slice/user-1000.slice/memory.high", "2147483648\n")
    group = Machine.read(root).limits.cgroup
    assert (group.quota, group.memory_limit, group.tasks_limit) == (2.0, 2 << 30, 680466)


@pytest.mark.parametrize("text", ["max 100000", "max", "", "0 100000", "100000 0", "-1 100000", "ten 100000"])
def test_a_missing_or_malformed_quota_is_no_limit(text: str, tree_path: Path) -> None:
    root = lay_out(container(), tree_path)
    write(root, "/sys/fs/cgroup/cpu.max", text + "\n")
    assert Machine.read(root).quota is None


def test_a_group_outside_the_namespace_reads_the_mount_itself(tree_path: Path) -> None:
    root = lay_out(container(), tree_path)
    write(root, "/proc/self/cgroup", "0::/../../etc\n")
    write(root, "/sys/etc/cpu.max", "100000 100000\n")
    assert Machine.read(root).quota == 3.5


def test_without_mountinfo_the_usual_places_are_read(tree_path: Path) -> None:
    root = lay_out(container(), tree_path)
    (root / "proc/self/mountinfo").unlink()
    machine = Machine.read(root)
    assert (machine.quota, machine.limits.shm_size) == (3.5, None)


def test_a_quota_below_one_cpu_gives_one_thread(tree_path: Path) -> None:
    root = lay_out(container(), tree_path)
    write(root, "/sys/fs/cgroup/cpu.max", "50000 100000\n")
    machine = Machine.read(root)
    assert (machine.quota, machine.usable_threads) == (0.5, 1)


def test_a_version_1_group_without_limits_is_unlimited(tree_path: Path) -> None:
    root = lay_out(hybrid_laptop(), tree_path)
    write(root, "/proc/self/cgroup", "4:memory:/job\n1:cpu:/\n")
    mounts = [
        f"{n} 31 0:{n} / /sys/fs/cgroup/{name} rw - cgroup cgroup rw,{name}"
        for n, name in ((32, "cpu"), (33, "memory"))
    ]
    write(root, "/proc/self/mountinfo", "\n".join(mounts))
    write(root, "/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    write(root, "/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    write(root, "/sys/fs/cgroup/memory/job/memory.limit_in_bytes", "9223372036854771712\n")
    group = Machine.read(root).limits.cgroup
    assert (group.version, group.quota, group.memory_limit) == ("v1", None, None)


def test_low_ulimits_are_reported_with_their_flag(tree_path: Path) -> None:
    root = lay_out(hybrid_laptop(), tree_path)
    limits = (root / "proc/self/limits").read_text()
    limits = limits.replace("Max open files            1048576 ", "Max open files            256     ")
    limits = limits.replace("Max address space         unlimited  ", "Max address space         8589934592 ")
    limits = limits.replace("Max processes             2062019", "Max processes             100    ")
    write(root, "/proc/self/limits", limits)
    found = subjects(Machine.read(root))
    assert "256 files" in found["ulimit -n"]
    assert "8.0 GB" in found["ulimit -v"]
    assert "100 processes" in found["ulimit -u"]


def test_common_ulimits_give_no_verdict(tree_path: Path) -> None:
    assert set(subjects(Machine.read(lay_out(hybrid_laptop(), tree_path)))) == {"precision", "processes"}
