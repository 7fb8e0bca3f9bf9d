"""Every recorded machine is read as it is: the figures here are what lscpu shows there, written down by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from machine.recorded.machines import MACHINES
from stoker.machine import Machine
from stoker.machine.isa import read_instruction_sets
from stoker.machine.peak import PerCycle, peak_gflops, per_cycle
from stoker.machine.processes import processes_and_threads
from stoker.machine.tree import Tree
from stoker.machine.verdicts import Evidence, Verdict, verdicts

Recorded = Callable[[str], Machine]

# sockets, cores, CPUs, threads per core, nodes, bf16 units, threads a training should use
SHAPES = {
    "sapphire_rapids_2": (2, 112, 224, 2, 2, "AMX-BF16", 112),
    "sapphire_rapids_no_smt": (2, 112, 112, 1, 2, "AMX-BF16", 112),
    "sapphire_rapids_4": (2, 112, 224, 2, 4, "AMX-BF16", 112),
    "sapphire_rapids_8": (2, 112, 224, 2, 8, "AMX-BF16", 112),
    "xeon_max": (2, 112, 224, 2, 4, "AMX-BF16", 112),
    "xeon_max_8": (2, 112, 224, 2, 16, "AMX-BF16", 112),
    "granite_rapids": (2, 256, 512, 2, 6, "AMX-BF16", 256),
    "ice_lake": (2, 80, 160, 2, 2, None, 80),
    "genoa": (2, 192, 384, 2, 2, "AVX512-BF16", 192),
    "genoa_8": (2, 192, 384, 2, 8, "AVX512-BF16", 192),
    "turin": (2, 256, 512, 2, 2, "AVX512-BF16", 256),
    "turin_8": (2, 256, 512, 2, 8, "AVX512-BF16", 256),
    "avx2_vm": (4, 4, 4, 1, 1, None, 4),
    "hybrid_laptop": (1, 14, 20, 2, 1, None, 6),
    "meteor_lake": (1, 16, 22, 2, 1, None, 6),
    "graviton": (1, 64, 64, 1, 1, "SVE-BF16", 64),
    "graviton4": (2, 192, 192, 1, 2, "SVE-BF16", 192),
    "grace": (2, 144, 144, 1, 2, "SVE-BF16", 144),
    "grace_hopper": (1, 72, 72, 1, 9, "SVE-BF16", 72),
    "container": (2, 64, 64, 1, 2, None, 3),
    "container_v1": (2, 64, 64, 1, 2, None, 3),
    "container_across_nodes": (2, 80, 160, 2, 2, None, 40),
    "pod_across_nodes": (2, 80, 160, 2, 2, None, 12),
    "container_far_memory": (2, 80, 160, 2, 2, None, 20),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_topology_is_the_one_that_lscpu_shows(name: str, recorded: Recorded) -> None:
    machine = recorded(name)
    found = (
        machine.sockets,
        len(machine.cores),
        len(machine.cpus),
        machine.threads_per_core,
        len(machine.nodes),
        machine.isa.bf16_units,
        machine.usable_threads,
    )
    assert found == SHAPES[name]


def test_every_recorded_machine_has_an_expected_topology() -> None:
    assert set(SHAPES) == set(MACHINES)


@pytest.mark.parametrize(
    ("name", "processes", "threads"),
    [
        ("sapphire_rapids_2", 2, 56),
        ("sapphire_rapids_no_smt", 2, 56),
        ("sapphire_rapids_4", 2, 56),
        ("sapphire_rapids_8", 2, 56),
        ("xeon_max", 2, 56),
        ("xeon_max_8", 2, 56),
        ("granite_rapids", 2, 128),
        ("ice_lake", 2, 40),
        ("genoa", 2, 96),
        ("genoa_8", 2, 96),
        ("turin", 2, 128),
        ("turin_8", 2, 128),
        ("avx2_vm", 1, 4),
        ("hybrid_laptop", 1, 6),
        ("meteor_lake", 1, 6),
        ("graviton", 1, 64),
        ("graviton4", 2, 96),
        ("grace", 2, 72),
        ("grace_hopper", 1, 72),
        ("container", 1, 3),
        ("container_v1", 1, 3),
        ("container_across_nodes", 2, 20),
        ("pod_across_nodes", 3, 4),
        ("container_far_memory", 1, 20),
    ],
)
def test_processes_follow_sockets_and_threads_follow_cores(
    name: str, processes: int, threads: int, recorded: Recorded
) -> None:
    assert processes_and_threads(recorded(name)) == (processes, threads)


def test_sapphire_rapids_with_four_nodes_per_socket(recorded: Recorded) -> None:
    machine = recorded("sapphire_rapids_8")
    assert machine.model.name == "Intel(R) Xeon(R) Platinum 8480+"
    assert (machine.model.family, machine.model.model, machine.model.nominal_ghz) == (6, 143, 2.0)
    assert {"AMX-TILE", "AMX-BF16", "AMX-INT8", "AVX512-FP16", "AVX512-BF16"} <= set(machine.isa.present)
    assert {"AMX-FP16", "AVX-NE-CONVERT"} <= set(machine.isa.absent)
    node = machine.nodes[3]
    assert node.cpus == (*range(42, 56), *range(154, 168))
    assert node.memory == 1056493440 // 8 * 1024
    assert node.distances == (12, 12, 12, 10, 21, 21, 21, 21)
    cpu = next(cpu for cpu in machine.cpus if cpu.number == 168)
    assert (cpu.core, cpu.socket, cpu.node, cpu.siblings) == (56, 1, 4, (56, 168))
    last = [cache for cache in machine.caches if cache.level == 3]
    assert [cache.size for cache in last] == [105 << 20] * 2
    assert len(last[0].cpus) == 112


def test_xeon_max_in_flat_mode_has_nodes_with_memory_and_no_cpus(recorded: Recorded) -> None:
    machine = recorded("xeon_max")
    assert [(node.cpus == (), (node.memory or 0) >> 30) for node in machine.nodes] == [
        (False, 251), (False, 251), (True, 64), (True, 64)
    ]  # fmt: skip
    assert machine.nodes[0].distances == (10, 21, 13, 23)
    found = {verdict.subject: verdict for verdict in verdicts(Evidence(machine))}
    assert found["memory without CPUs"].text.startswith("NUMA nodes 2-3 have 128 GB of memory and no CPUs (HBM")
    assert found["memory without CPUs"].action == "For HBM, choose cache mode in the firmware."
    hopper = {verdict.subject: verdict for verdict in verdicts(Evidence(recorded("grace_hopper")))}[
        "memory without CPUs"
    ]
    assert (hopper.text.split(":")[0], hopper.action) == (
        "NUMA node 1 has 95 GB of memory and no CPUs (HBM, CXL or the memory of a GPU)", None
    )  # fmt: skip


def test_the_three_dies_of_granite_rapids_have_unequal_numbers_of_cores(recorded: Recorded) -> None:
    machine = recorded("granite_rapids")
    assert [len(node.cpus) // 2 for node in machine.nodes] == [43, 43, 42, 43, 43, 42]
    assert machine.nodes[1].cpus == (*range(43, 86), *range(299, 342))
    assert machine.nodes[5].distances == (21, 21, 21, 12, 12, 10)


def test_low_power_cores_are_efficiency_cores_too(recorded: Recorded) -> None:
    machine = recorded("meteor_lake")
    assert [cpu.number for cpu in machine.cpus if cpu.kind == "efficiency"] == list(range(12, 22))


def test_the_memory_nodes_of_a_cpuset_are_read(recorded: Recorded) -> None:
    assert recorded("container_far_memory").limits.memory_nodes == (0,)
    assert recorded("ice_lake").limits.memory_nodes == (0, 1)


@pytest.mark.parametrize(
    ("hidden", "units"),
    [
        ((), "AMX-BF16"),
        (("avx512_fp16",), "AVX512-BF16"),
        (("avx_vnni",), "AVX512-BF16"),
        (("amx_tile",), "AVX512-BF16"),
        (("avx512_fp16", "avx512_bf16"), None),
    ],
)
def test_amx_counts_only_where_onednn_uses_it(hidden: tuple[str, ...], units: str | None, recorded: Recorded) -> None:
    """oneDNN needs AVX512-FP16 and AVX-VNNI beside AMX; hypervisors may hide them."""
    machine = recorded("sapphire_rapids_2")
    sets = read_instruction_sets(machine.isa.flags - set(hidden), "x86_64")
    assert sets.bf16_units == units
    assert per_cycle(replace(machine, isa=sets)) == PerCycle(
        64, {"AMX-BF16": 1024, "AVX512-BF16": 128}.get(units or "")
    )


def test_eight_cores_of_genoa_share_a_last_level_cache(recorded: Recorded) -> None:
    last = [cache for cache in recorded("genoa").caches if cache.level == 3]
    assert len(last) == 24
    assert last[1].cpus == (*range(8, 16), *range(200, 208))
    assert sum(cache.level == 2 for cache in recorded("genoa").caches) == 192


def test_efficiency_cores_of_a_hybrid_laptop_are_recognised(recorded: Recorded) -> None:
    machine = recorded("hybrid_laptop")
    assert machine.hybrid
    assert [cpu.number for cpu in machine.cpus if cpu.kind == "efficiency"] == list(range(12, 20))
    assert [core.cpus for core in machine.fast_cores] == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11)]
    sizes = sorted((cache.cpus, cache.size) for cache in machine.caches if cache.level == 2)
    assert sizes[-1][0] == (16, 17, 18, 19)


def test_arm_efficiency_cores_are_recognised_by_capacity(tree_path: Path) -> None:
    from machine.recorded.layout import lay_out
    from machine.recorded.machines import graviton

    capacities = {f"/sys/devices/system/cpu/cpu{n}/cpu_capacity": "1024\n" if n < 2 else "380\n" for n in range(6)}
    shape = replace(graviton(), cpus=6, nodes={0: tuple(range(6))}, files=capacities)
    machine = Machine.read(lay_out(shape, tree_path))
    assert [core.number for core in machine.fast_cores] == [0, 1]


def test_graviton_is_named_by_its_part_number(recorded: Recorded) -> None:
    machine = recorded("graviton")
    assert (machine.model.vendor, machine.model.name, machine.model.architecture) == ("ARM", "Neoverse-V1", "aarch64")
    assert machine.isa.present == ("NEON", "FP16", "DOTPROD", "BF16", "I8MM", "SVE", "SVE-BF16")
    assert machine.isa.absent == ("SVE2", "SME")


@pytest.mark.parametrize(("name", "version"), [("container", "v2"), ("container_v1", "v1")])
def test_the_limits_of_a_container_apply(name: str, version: str, recorded: Recorded) -> None:
    machine = recorded(name)
    group = machine.limits.cgroup
    assert (group.version, group.quota, group.memory_limit) == (version, 3.5, 8 << 30)
    assert machine.usable_memory == 8 << 30
    assert len(machine.usable_cpus) == 64
    assert machine.limits.shm_size == 64 << 20
    found = {verdict.subject: verdict for verdict in verdicts(Evidence(machine))}
    assert "3.5" in found["quota"].text
    assert "OMP_NUM_THREADS=3" in (found["quota"].action or "")
    assert "--shm-size" in (found["/dev/shm"].action or "")
    assert found["memory limit"].level == "advice"


def test_a_shared_memory_mount_without_a_size_has_half_of_the_memory(recorded: Recorded) -> None:
    assert recorded("avx2_vm").limits.shm_size == 16374552 * 1024 // 2


def test_a_virtual_machine_without_numa_is_one_node(recorded: Recorded) -> None:
    machine = recorded("avx2_vm")
    assert machine.model.virtual is True
    assert machine.nodes[0].cpus == (0, 1, 2, 3)
    assert machine.nodes[0].memory == machine.memory_total == 16374552 * 1024
    assert machine.model.nominal_ghz == 2.394
    assert machine.caches == ()


@pytest.mark.parametrize(
    ("name", "fp32", "bf16"),
    [
        ("sapphire_rapids_4", 64, 1024),
        ("granite_rapids", 64, 1024),
        ("ice_lake", 64, None),
        ("genoa", 32, 64),
        ("turin", 64, 128),
        ("avx2_vm", 32, None),
        ("hybrid_laptop", 32, None),
        ("graviton", 32, 128),
        ("graviton4", 32, 128),
        ("grace", 32, 128),
        ("container", 32, None),
    ],
)
def test_the_peak_per_cycle_is_that_of_the_microarchitecture(
    name: str, fp32: int, bf16: int | None, recorded: Recorded
) -> None:
    cycle = per_cycle(recorded(name))
    assert cycle is not None
    assert (cycle.fp32, cycle.bf16) == (fp32, bf16)


def test_the_peak_is_unknown_rather_than_guessed(recorded: Recorded) -> None:
    machine = recorded("ice_lake")
    assert peak_gflops(machine, "fp32", 80, None) is None
    assert peak_gflops(machine, "bf16", 80, 2.0) is None
    assert peak_gflops(machine, "fp32", 80, 2.0) == 64 * 80 * 2.0


def _precision(machine: Machine) -> Verdict:
    return next(verdict for verdict in verdicts(Evidence(machine)) if verdict.subject == "precision")


@pytest.mark.parametrize("name", SHAPES)
def test_the_precision_verdict_follows_the_units(name: str, recorded: Recorded) -> None:
    expected = "Use bf16." if SHAPES[name][5] else "Use fp32."
    assert _precision(recorded(name)).action == expected


@pytest.mark.parametrize("name", SHAPES)
def test_facts_become_json_and_fingerprints_are_stable(name: str, recorded: Recorded) -> None:
    machine = recorded(name)
    facts = json.loads(json.dumps(machine.to_dict()))
    assert facts["summary"]["physical_cores"] == SHAPES[name][1]
    assert recorded(name).fingerprint == machine.fingerprint


def test_fingerprints_differ_between_machines(recorded: Recorded) -> None:
    # These differ in nothing that a measurement could see.
    names = [name for name in MACHINES if name != "container_v1"]
    assert len({recorded(name).fingerprint for name in names}) == len(names)
    assert recorded("container").fingerprint == recorded("container_v1").fingerprint


def test_the_largest_machine_is_read_from_few_files(
    recorded_root: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # 384 CPUs have some 8,000 files that could be read; at 10 us each that would be felt at every start.
    opened: list[str] = []
    read = Tree.text
    monkeypatch.setattr(Tree, "text", lambda tree, path: opened.append(path) or read(tree, path))
    assert len(Machine.read(recorded_root("genoa")).cpus) == 384
    assert len(opened) < 4 * 384
