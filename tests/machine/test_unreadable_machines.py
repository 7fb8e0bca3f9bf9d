"""Missing, unreadable and broken files degrade to "unknown"; nothing raises."""

from __future__ import annotations

import io
import os
import re
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from machine.recorded.layout import lay_out, write
from machine.recorded.machines import container, hybrid_laptop
from stoker.machine import Machine
from stoker.machine.doctor_page import doctor_page, print_page
from stoker.machine.tree import format_cpu_list, parse_cpu_list, parse_size
from stoker.machine.verdicts import Evidence, verdicts


def page_of(machine: Machine) -> str:
    text = io.StringIO()
    console = Console(file=text, width=100)
    print_page(console, doctor_page(machine, None, None, verdicts(Evidence(machine))))
    return text.getvalue()


def test_an_empty_tree_is_all_unknown(tree_path: Path) -> None:
    machine = Machine.read(tree_path)
    assert machine.cpus == ()
    assert (machine.model.name, machine.memory_total, machine.quota, machine.limits.affinity) == (None,) * 4
    assert machine.usable_threads == 1
    assert "unknown" in page_of(machine)


def test_a_root_that_does_not_exist_is_all_unknown(tree_path: Path) -> None:
    assert Machine.read(tree_path / "nowhere").memory_total is None


@pytest.mark.parametrize(
    "gone", ["proc", "sys", "sys/fs", "sys/devices/system/node", "sys/devices/system/cpu", "proc/self"]
)
def test_a_machine_without_proc_or_sys_still_has_a_page(gone: str, tree_path: Path) -> None:
    root = lay_out(hybrid_laptop(), tree_path)
    shutil.rmtree(root / gone)
    machine = Machine.read(root)
    assert "Verdicts" in page_of(machine)
    if gone != "proc":
        assert len(machine.cpus) == 20
    if gone == "sys":  # what /proc/cpuinfo alone tells
        assert len(machine.cores) == 14


def test_every_file_may_be_a_directory(tree_path: Path) -> None:
    root = lay_out(container(), tree_path)
    for file in [path for path in root.rglob("*") if path.is_file()]:
        file.unlink()
        file.mkdir()
    assert Machine.read(root).cpus == ()


LONG_NUMBER = b"9" * 5000


def test_every_number_may_have_5000_digits_and_every_file_may_be_a_pipe_or_a_device(tree_path: Path) -> None:
    """Of each kind of file one at a time, and all at once."""
    root = lay_out(container(), tree_path)
    files = [path for path in sorted(root.rglob("*")) if path.is_file()]
    texts = {path: path.read_bytes() for path in files}
    long = {path: re.sub(rb"[0-9]+", LONG_NUMBER, text) for path, text in texts.items()}
    for path in files:
        if "/cpu/cpu" not in str(path) or "/cpu/cpu0/" in str(path):
            path.write_bytes(long[path])
            assert page_of(Machine.read(root))
            path.write_bytes(texts[path])
    for path in files:
        path.write_bytes(long[path])
    assert page_of(Machine.read(root))
    for path in files:
        path.unlink()
        os.mkfifo(path)
    assert Machine.read(root).cpus == ()
    (root / "proc" / "cpuinfo").unlink()
    (root / "proc" / "cpuinfo").symlink_to("/dev/zero")
    assert Machine.read(root).cpus == ()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(garbage=st.binary(max_size=200), which=st.integers(0, 10_000))
def test_garbage_in_any_file_raises_nothing(garbage: bytes, which: int, tree_path: Path) -> None:
    root = tree_path / "tree"
    if not root.exists():
        lay_out(hybrid_laptop(), root)
        files = sorted(str(path) for path in root.rglob("*") if path.is_file())
        (tree_path / "files").write_text("\n".join(files))
    files = (tree_path / "files").read_text().splitlines()
    # CPUs have the same files: choose among the machine's own and those of two CPUs.
    files = [name for name in files if "/cpu/cpu" not in name or "/cpu/cpu0/" in name or "/cpu/cpu13/" in name]
    victim = Path(files[which % len(files)])
    before = victim.read_bytes()
    try:
        victim.write_bytes(garbage)
        machine = Machine.read(root)
        assert page_of(machine)
        assert machine.fingerprint
    finally:
        victim.write_bytes(before)


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0-3,8,10-11", (0, 1, 2, 3, 8, 10, 11)),
        ("5", (5,)),
        ("", ()),
        ("3-1", None),
        ("a-b", None),
        ("0-99999999999", None),
        ("-1", None),
    ],
)
def test_cpu_lists_are_parsed_and_formatted_as_the_kernel_writes_them(text: str, cpus: tuple[int, ...] | None) -> None:
    assert parse_cpu_list(text) == cpus
    assert cpus is None or parse_cpu_list(format_cpu_list(cpus)) == cpus


@pytest.mark.parametrize(("text", "size"), [("48K", 49152), ("2M", 2 << 20), ("17", 17), ("big", None), ("", None)])
def test_sizes_are_read_with_their_units(text: str, size: int | None) -> None:
    assert parse_size(text) == size


def test_offline_cpus_do_not_count(tree_path: Path) -> None:
    root = lay_out(hybrid_laptop(), tree_path)
    write(root, "/sys/devices/system/cpu/online", "0-5\n")
    machine = Machine.read(root)
    assert [cpu.number for cpu in machine.cpus] == [0, 1, 2, 3, 4, 5]
    assert machine.usable_cpus == (0, 1, 2, 3, 4, 5)


def test_hot_added_memory_counts_on_a_machine_of_one_node(tree_path: Path) -> None:
    root = lay_out(hybrid_laptop(), tree_path)
    write(root, "/sys/devices/system/node/node0/meminfo", "Node 0 MemTotal:        6382148 kB\n")
    machine = Machine.read(root)
    assert machine.nodes[0].memory == machine.memory_total


def test_memory_without_cpus_is_a_node_but_gets_no_process(tree_path: Path) -> None:
    from stoker.machine.processes import processes_and_threads

    root = lay_out(hybrid_laptop(), tree_path)
    write(root, "/sys/devices/system/node/node1/cpulist", "\n")
    write(root, "/sys/devices/system/node/node1/meminfo", "Node 1 MemTotal:        67108864 kB\n")
    machine = Machine.read(root)
    assert machine.nodes[1].cpus == ()
    assert machine.nodes[1].memory == 64 << 30
    assert processes_and_threads(machine) == (1, 6)
    assert "no CPUs" in page_of(machine)
