"""On the machine at hand, facts agree with lscpu and with the kernel's own calls, and reading them imports no torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from stoker.machine import Machine, this_machine


@pytest.mark.skipif(shutil.which("lscpu") is None, reason="no lscpu to compare with")
def test_facts_agree_with_lscpu() -> None:
    command = ["lscpu", "--parse=CPU,CORE,SOCKET,NODE", "--online"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [line.split(",") for line in answer.splitlines() if line and not line.startswith("#")]
    machine = Machine.read()
    assert [cpu.number for cpu in machine.cpus] == sorted(int(row[0]) for row in rows)
    assert len(machine.cores) == len({(row[1], row[2]) for row in rows})
    assert machine.sockets == len({row[2] for row in rows})
    assert len({cpu.node for cpu in machine.cpus}) == len({row[3] for row in rows})


@pytest.mark.skipif(shutil.which("lscpu") is None, reason="no lscpu to compare with")
def test_flags_agree_with_lscpu() -> None:
    answer = subprocess.run(
        ["lscpu"], capture_output=True, text=True, check=True, env={**os.environ, "LC_ALL": "C"}
    ).stdout
    fields = dict(line.split(":", 1) for line in answer.splitlines() if ":" in line)
    assert Machine.read().isa.flags == frozenset(fields["Flags"].split())


def test_usable_cpus_are_those_of_the_scheduler() -> None:
    assert set(Machine.read().usable_cpus) <= os.sched_getaffinity(0)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU only")
def test_taskset_is_respected() -> None:
    cpu = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, {{{cpu}}}); import stoker; print(stoker.Machine.read().usable_cpus)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert answer.strip() == f"({cpu},)"


def test_reading_the_machine_imports_no_torch() -> None:
    code = "import sys, stoker; stoker.Machine.read(); sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_this_machine_is_read_once() -> None:
    assert this_machine() is this_machine()
    assert this_machine().fingerprint == Machine.read().fingerprint
