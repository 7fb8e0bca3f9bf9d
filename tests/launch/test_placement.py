"""Processes are placed on whole cores, inside NUMA nodes, within the quota, and never too many: on the recorded machines."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable

import pytest

from stoker.errors import UserError
from stoker.launch.options import parse_nodes
from stoker.launch.placement.binding import choose
from stoker.launch.placement.divide_cores import Placement, place
from stoker.launch.placement.slurm_cores import task_share
from stoker.launch.rank.environment import Rank
from stoker.launch.rank.rank_settings import Settings
from stoker.machine import Machine
from stoker.machine.tree import format_cpu_list

Recorded = Callable[[str], Machine]

# machine, processes, threads of each, NUMA nodes of each
DIVISIONS = [
    ("sapphire_rapids_4", 1, 112, [(0, 1, 2, 3)]),
    ("sapphire_rapids_4", 2, 56, [(0, 1), (2, 3)]),  # two nodes of one socket each
    ("sapphire_rapids_4", 4, 28, [(0,), (1,), (2,), (3,)]),
    ("sapphire_rapids_4", 8, 14, [(0,), (0,), (1,), (1,), (2,), (2,), (3,), (3,)]),
    ("sapphire_rapids_8", 8, 14, [(node,) for node in range(8)]),
    ("ice_lake", 2, 40, [(0,), (1,)]),
    ("genoa", 2, 96, [(0,), (1,)]),
    ("avx2_vm", 1, 4, [()]),
    ("avx2_vm", 4, 1, [(), (), (), ()]),
    ("hybrid_laptop", 1, 6, [()]),
    ("hybrid_laptop", 3, 2, [(), (), ()]),
    ("graviton", 4, 16, [(), (), (), ()]),
    ("container", 1, 3, [(0, 1)]),
    ("container", 3, 1, None),
    ("container_v1", 1, 3, [(0, 1)]),
]


@pytest.mark.parametrize(("name", "processes", "threads", "nodes"), DIVISIONS)
def test_cores_are_divided(
    name: str, processes: int, threads: int, nodes: list[tuple[int, ...]] | None, recorded: Recorded
) -> None:
    machine = recorded(name)
    shares = place(machine, processes)
    assert [share.threads for share in shares] == [threads] * processes
    if nodes is not None:
        assert [share.nodes for share in shares] == nodes
    no_core_twice(machine, shares)


def no_core_twice(machine: Machine, shares: tuple[Placement, ...]) -> None:
    core_of = {cpu.number: cpu.core for cpu in machine.cpus}
    used = [core_of[cpu] for share in shares for cpu in share.cpus + share.worker_cpus]
    owners: dict[int, int] = {}
    for share in shares:
        for cpu in share.cpus + share.worker_cpus:
            assert owners.setdefault(core_of[cpu], share.local_rank) == share.local_rank, (
                "a core belongs to two processes"
            )
    assert set(used) <= {core.number for core in machine.usable_cores}


@pytest.mark.parametrize(
    "name", ["sapphire_rapids_4", "sapphire_rapids_8", "ice_lake", "genoa", "graviton", "hybrid_laptop"]
)
@pytest.mark.parametrize("processes", [1, 2, 3, 4, 5, 6])
def test_shares_are_equal_and_disjoint(name: str, processes: int, recorded: Recorded) -> None:
    machine = recorded(name)
    shares = place(machine, processes)
    assert len({len(share.cpus) for share in shares}) == 1
    no_core_twice(machine, shares)
    # No share lies in two sockets unless there are fewer processes than sockets.
    socket_of = {cpu.number: cpu.socket for cpu in machine.cpus}
    if processes % machine.sockets == 0:
        assert all(len({socket_of[cpu] for cpu in share.cpus}) == 1 for share in shares)


@pytest.mark.parametrize(
    ("name", "processes", "rest"),
    [
        ("avx2_vm", 5, {}),
        ("hybrid_laptop", 7, {}),
        ("container", 4, {}),  # 64 cores, but a quota of 3.5
        ("avx2_vm", 2, {"threads": 3}),
        ("ice_lake", 80, {"workers": 1}),
        ("genoa", 2, {"cores_per_process": 97}),
    ],
)
def test_oversubscription_is_refused_unless_allowed(
    name: str, processes: int, rest: dict[str, int], recorded: Recorded
) -> None:
    with pytest.raises(UserError, match="--oversubscribe") as caught:
        place(recorded(name), processes, **rest)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert len(place(recorded(name), processes, oversubscribe=True, **rest)) == processes  # type: ignore[arg-type]


def test_cores_are_kept_for_communication_workers(recorded: Recorded) -> None:
    shares = place(recorded("ice_lake"), 2, workers=2)
    assert [share.threads for share in shares] == [38, 38]
    assert all(len(share.worker_cpus) == 4 for share in shares)  # two cores with both their threads
    no_core_twice(recorded("ice_lake"), shares)


def test_efficiency_cores_and_smt_siblings_are_opt_in(recorded: Recorded) -> None:
    laptop = recorded("hybrid_laptop")
    assert place(laptop, 1)[0].threads == 6
    assert place(laptop, 1, efficiency=True)[0].threads == 14
    assert place(laptop, 1, logical=True)[0].threads == 12


def test_nodes_and_cores_per_process_are_used(recorded: Recorded) -> None:
    machine = recorded("sapphire_rapids_4")
    shares = place(machine, 2, nodes=(2, 3))
    assert [share.nodes for share in shares] == [(2,), (3,)]
    shares = place(machine, 3, cores_per_process=10)
    assert [len(share.cpus) for share in shares] == [10, 10, 10]
    assert all(len(share.nodes) == 1 for share in shares)
    with pytest.raises(UserError, match="NUMA node 9"):
        place(machine, 1, nodes=(9,))


def test_fewer_threads_than_cores_may_use_the_whole_share(recorded: Recorded) -> None:
    """Launches know nothing of each other: pinned to the first cores, two with few threads would share those."""
    machine = recorded("ice_lake")
    share = place(machine, 2, threads=8)[1]
    assert (share.threads, share.cpus, share.nodes) == (8, place(machine, 2)[1].cpus, (1,))
    for inherited in (1, 3):
        settings = Settings()
        found, note = choose(settings, machine, 0, 1, {"OMP_NUM_THREADS": str(inherited)})
        assert found is not None
        assert (found.threads, len(found.cpus), note) == (inherited, len(machine.usable_cores), None)
        found, _ = choose(Settings(threads=inherited), machine, 0, 1, {})
        assert found is not None
        assert (found.threads, len(found.cpus)) == (inherited, len(machine.usable_cores))


def test_messages_count_cores_kept_for_communication_separately(recorded: Recorded) -> None:
    machine = recorded("avx2_vm")
    with pytest.raises(
        UserError, match="3 processes of 1 thread and 1 core for communication each need 6 physical cores"
    ):
        place(machine, 3, threads=1, workers=1)
    with pytest.raises(UserError, match="1 process of 1 thread and 4 cores for communication needs 5 physical cores"):
        place(machine, 1, threads=1, workers=4)
    with pytest.raises(UserError, match="5 processes of 1 thread need 5 physical cores"):
        place(machine, 5)
    assert choose(Settings(ccl_workers=1), machine, 0, 1, {"OMP_NUM_THREADS": "4"})[1] == (
        "OMP_NUM_THREADS=4 is more than each process's share of this machine with 1 core kept for communication; the share is "
        "used instead"
    )


def test_node_lists_are_parsed_and_formatted() -> None:
    assert parse_nodes("0,2-4") == (0, 2, 3, 4)
    assert format_cpu_list((0, 1, 2, 5)) == "0-2,5"
    with pytest.raises(ArgumentTypeError, match="neither a number nor a range"):
        parse_nodes("a-b")
    for nothing in ("", " ", ",", "\t"):
        with pytest.raises(ArgumentTypeError, match="names no NUMA node"):
            parse_nodes(nothing)


@pytest.mark.parametrize(
    ("variables", "part", "threads"),
    [
        ({}, (1, 2), None),  # a mask for all tasks of the node
        ({"SLURM_CPU_BIND_LIST": "0xff,0xff00"}, (0, 1), None),  # one for each
        ({"SLURM_CPU_BIND_LIST": "0xffff,0xffff"}, (1, 2), None),  # the same for each
        ({"SLURM_CPUS_ON_NODE": "160"}, (1, 2), None),  # 2 x 40 cores with two threads, all of them
        ({"SLURM_CPUS_ON_NODE": "320"}, (0, 1), None),  # a cgroup has given this task half of the node
        ({"SLURM_CPUS_ON_NODE": "16"}, (1, 2), 8),  # nothing confines the job
        ({"SLURM_CPUS_ON_NODE": "16", "OMP_NUM_THREADS": "2"}, (1, 2), None),
    ],
)
def test_a_task_of_slurm_takes_its_part_of_what_srun_left_it(
    variables: dict[str, str], part: tuple[int, int], threads: int | None, recorded: Recorded
) -> None:
    rank = Rank("Slurm", 1, 2, 1, 2, "names")
    settings, *found = task_share(Settings(), rank, recorded("ice_lake"), variables)
    assert (tuple(found), settings.threads) == (part, threads)
