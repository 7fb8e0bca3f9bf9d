"""What a launch chooses on the machines of the field: figures written by hand from their lscpu, and the page that shows them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from machine.recorded import page
from machine.recorded.layout import lay_out, write
from machine.recorded.machines import MACHINES, genoa, ice_lake
from stoker.cli.launch import parse
from stoker.errors import UserError
from stoker.launch.launch_plan import show
from stoker.launch.placement import binding
from stoker.launch.placement.divide_cores import Placement, place
from stoker.launch.rank.rank_settings import Settings
from stoker.launch.start import make_plan
from stoker.machine import Machine
from stoker.machine.processes import best_division, divisions, processes_and_threads
from stoker.machine.tree import format_cpu_list, parse_cpu_list

Recorded = Callable[[str], Machine]

# machine: (cores of each process, nodes of its memory, CPUs for communication) of the division that `-ppn auto` takes
AUTOMATIC = {
    "sapphire_rapids_2": [("0-55", "0", "112-167"), ("56-111", "1", "168-223")],
    "sapphire_rapids_no_smt": [("0-55", "0", ""), ("56-111", "1", "")],
    "sapphire_rapids_4": [("0-55", "0-1", "112-167"), ("56-111", "2-3", "168-223")],
    "sapphire_rapids_8": [("0-55", "0-3", "112-167"), ("56-111", "4-7", "168-223")],
    "xeon_max": [("0-55", "0", "112-167"), ("56-111", "1", "168-223")],
    "xeon_max_8": [("0-55", "0-3", "112-167"), ("56-111", "4-7", "168-223")],
    "granite_rapids": [("0-127", "0-2", "256-383"), ("128-255", "3-5", "384-511")],
    "ice_lake": [("0-39", "0", "80-119"), ("40-79", "1", "120-159")],
    "genoa": [("0-95", "0", "192-287"), ("96-191", "1", "288-383")],
    "genoa_8": [("0-95", "0-3", "192-287"), ("96-191", "4-7", "288-383")],
    "turin": [("0-127", "0", "256-383"), ("128-255", "1", "384-511")],
    "turin_8": [("0-127", "0-3", "256-383"), ("128-255", "4-7", "384-511")],
    "avx2_vm": [("0-3", "", "")],
    "hybrid_laptop": [("0,2,4,6,8,10", "", "1,3,5,7,9,11")],
    "meteor_lake": [("0,2,4,6,8,10", "", "1,3,5,7,9,11")],
    "graviton": [("0-63", "", "")],
    "graviton4": [("0-95", "0", ""), ("96-191", "1", "")],
    "grace": [("0-71", "0", ""), ("72-143", "1", "")],
    "grace_hopper": [("0-71", "0", "")],
    "container": [("0-63", "0-1", "")],
    "container_v1": [("0-63", "0-1", "")],
    "container_across_nodes": [("20-39", "0", ""), ("40-59", "1", "")],
    "pod_across_nodes": [("36-39", "0", "116-119"), ("40-43", "1", "120-123"), ("44-47", "1", "124-127")],
    "container_far_memory": [("40-59", "", "")],
}


def lists(share: Placement) -> tuple[str, str, str]:
    return format_cpu_list(share.cpus), format_cpu_list(share.nodes), format_cpu_list(share.siblings)


@pytest.mark.parametrize("name", MACHINES)
def test_automatic_processes_have_these_cores_nodes_and_communication_cpus(name: str, recorded: Recorded) -> None:
    _, plan = make_plan(parse(["-ppn", "auto", "script.py"]), recorded(name), {})
    assert [lists(rank.placement) for rank in plan.ranks if rank.placement] == AUTOMATIC[name]


def test_the_page_shows_what_the_code_chooses(recorded: Recorded) -> None:
    found = page.tables(recorded)
    assert page.written() == found, "write docs/launch.md again: PYTHONPATH=src:tests python -m machine.recorded.page"


def test_every_recorded_machine_is_on_the_page() -> None:
    assert {*page.TITLES, "container_v1"} == set(MACHINES)


@pytest.mark.parametrize(
    ("name", "processes", "nodes"),
    [
        ("sapphire_rapids_2", 4, [(0,), (0,), (1,), (1,)]),
        ("sapphire_rapids_8", 8, [(node,) for node in range(8)]),
        ("xeon_max", 4, [(0,), (0,), (1,), (1,)]),  # nodes 2 and 3 have no CPUs
        ("xeon_max_8", 8, [(node,) for node in range(8)]),
        ("granite_rapids", 6, [(node,) for node in range(6)]),
        ("genoa_8", 16, [(rank // 2,) for rank in range(16)]),
        ("grace_hopper", 2, [(0,), (0,)]),
        ("pod_across_nodes", 2, [(0, 1), (1,)]),
        ("container_far_memory", 2, [(), ()]),
    ],
)  # fmt: skip
def test_processes_of_an_mpirun_use_the_nodes_of_their_cores(
    name: str, processes: int, nodes: list[tuple[int, ...]], recorded: Recorded
) -> None:
    settings = Settings(is_one_of_several=True, outer_launcher="Intel MPI")
    found = [binding.choose_in_rank(settings, recorded(name), rank, processes, {}) for rank in range(processes)]
    assert [share.nodes for share, _ in found if share] == nodes
    assert not any(notes for _, notes in found)


def test_a_cpuset_that_cuts_nodes_unevenly_is_divided_evenly(recorded: Recorded) -> None:
    # Four cores of node 0 and eight of node 1: every step would wait for the process with four.
    assert [share.threads for share in place(recorded("pod_across_nodes"), 2)] == [6, 6]
    assert [share.threads for share in place(recorded("pod_across_nodes"), 3)] == [4, 4, 4]


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("processes", [1, 2, 3, 6])
@pytest.mark.parametrize("workers", [0, 1])
def test_hyper_threads_communicate_and_never_compute(
    name: str, processes: int, workers: int, recorded: Recorded
) -> None:
    machine = recorded(name)
    core_of = {cpu.number: cpu.core for cpu in machine.cpus}
    for share in place(machine, processes, workers=workers, oversubscribe=True):
        cores = [core_of[cpu] for cpu in share.cpus]
        assert len(set(cores)) == len(cores), "two threads on one core"
        assert not set(share.siblings) & set(share.cpus)
        assert {core_of[cpu] for cpu in share.siblings} <= set(cores), "the siblings of another process's cores"
        assert set(share.siblings) <= set(machine.usable_cpus)


def test_hyper_threads_are_for_the_threads_of_the_ccl_backend(recorded: Recorded) -> None:
    shares = place(recorded("ice_lake"), 2)
    assert binding.thread_variables(shares[1])["STOKER_CCL_CPUS"] == "120-159"
    kept = place(recorded("ice_lake"), 2, workers=2)
    assert binding.thread_variables(kept[1])["STOKER_CCL_CPUS"] == "78-79,158-159"
    assert "STOKER_CCL_CPUS" not in binding.thread_variables(place(recorded("graviton"), 1)[0])
    assert place(recorded("ice_lake"), 2, logical=True)[0].siblings == ()


def test_memory_is_spread_where_threads_need_the_cores_of_several_nodes(recorded: Recorded) -> None:
    assert [share.spread for share in place(recorded("sapphire_rapids_8"), 2)] == [True, True]
    assert [share.spread for share in place(recorded("sapphire_rapids_8"), 8)] == [False] * 8
    # Three threads that may move among 64 cores stay together: their memory follows them.
    assert place(recorded("container"), 1)[0].spread is False
    assert place(recorded("sapphire_rapids_8"), 2, threads=14)[0].spread is False


@pytest.mark.parametrize(("spread", "policy"), [(False, 2), (True, 3)])
def test_memory_policies_are_bind_and_interleave(spread: bool, policy: int, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []

    class Library:
        def syscall(self, number: int, policy: int, *rest: object) -> int:
            called.append(policy)
            return 0

    monkeypatch.setattr(binding.ctypes, "CDLL", lambda *_, **__: Library())
    monkeypatch.setattr(binding.os, "sched_setaffinity", lambda *_: None)
    monkeypatch.setattr(binding.platform, "machine", lambda: "x86_64")
    assert binding.bind(Placement(0, (0,), (), (0, 1), 1, spread=spread)) == []
    assert called == [policy]


def test_cores_of_a_node_without_memory_use_the_nearest(tree_path: Path) -> None:
    root = lay_out(genoa(4), tree_path)
    write(root, "/sys/devices/system/node/node5/meminfo", "Node 5 MemTotal:       0 kB\nNode 5 MemFree:        0 kB\n")
    shares = place(Machine.read(root), 8)
    assert [share.nodes for share in shares] == [(0,), (1,), (2,), (3,), (4,), (4,), (6,), (7,)]


def test_memory_that_the_cpuset_forbids_is_not_asked_for(tree_path: Path) -> None:
    machine = Machine.read(lay_out(replace(genoa(4), memory_nodes="0,4"), tree_path))
    assert [share.nodes for share in place(machine, 8)] == [(0,)] * 4 + [(4,)] * 4
    assert place(machine, 1)[0].nodes == (0, 4)


def test_automatic_processes_are_those_that_doctor_and_config_name(recorded: Recorded) -> None:
    for name in MACHINES:
        machine = recorded(name)
        processes, threads = processes_and_threads(machine)
        shares = place(machine, processes)
        assert (len(shares), min(share.threads for share in shares)) == (processes, threads), name


def test_the_model_weighs_local_memory_against_copies_of_the_weights(recorded: Recorded) -> None:
    found = {one.processes: one for one in divisions(recorded("sapphire_rapids_8"))}
    assert [(one.threads, one.nodes) for one in found.values()] == [(112, 8), (56, 4), (28, 2), (14, 1)]
    assert found[2].seconds == min(one.seconds for one in found.values())
    # The other socket's memory is farther on AMD: 32 instead of 21.
    gain = {
        name: divisions(recorded(name))[0].seconds / divisions(recorded(name))[1].seconds
        for name in ("turin", "ice_lake")
    }
    assert gain["turin"] > gain["ice_lake"] > 1


def test_automatic_processes_respect_the_chosen_nodes(recorded: Recorded) -> None:
    machine = recorded("sapphire_rapids_8")
    assert best_division(machine, (0,)) == best_division(machine, [0])
    _, plan = make_plan(parse(["-ppn", "auto", "--nodes_list", "4-7", "script.py"]), machine, {})
    assert [lists(rank.placement)[1] for rank in plan.ranks if rank.placement] == ["4-7"]


@pytest.mark.parametrize(
    "words", [["-f", "hosts", "-ppn", "auto"], ["--launcher", "slurm", "-ppn", "auto"], ["-ppn", "auto", "-n", "3"]]
)  # fmt: skip
def test_automatic_processes_that_cannot_be_are_one_sentence(
    words: list[str], recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("localhost\n")
    with pytest.raises(UserError) as caught:
        make_plan(parse([*words, "script.py"]), recorded("ice_lake"), {})
    assert "-ppn" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_one_process_on_several_nodes_says_what_would_be_faster(recorded: Recorded) -> None:
    def notes(*words: str, name: str = "ice_lake") -> str:
        options = parse([*words, "script.py"])
        launcher, plan = make_plan(options, recorded(name), {})
        return show(plan, options, launcher.command(plan, options, {}))

    assert "note: one process uses 2 NUMA nodes; `-ppn auto` starts 2 with 40 threads each" in notes()
    assert "-ppn auto" not in notes("-n", "1")
    assert "-ppn auto" not in notes("--num_cpu_threads_per_process", "8")
    assert "-ppn auto" not in notes("--bind", "none")
    assert "-ppn auto" not in notes(name="graviton")


def test_the_plan_shows_siblings_and_spread_memory(recorded: Recorded) -> None:
    options = parse(["-ppn", "auto", "script.py"])
    launcher, plan = make_plan(options, recorded("sapphire_rapids_8"), {})
    text = show(plan, options, launcher.command(plan, options, {}))
    assert "  ccl      112-167\n" in text
    assert "  memory   node 0-3, spread evenly\n" in text
    assert parse_cpu_list("112-167") == plan.ranks[0].placement.siblings  # type: ignore[union-attr]


def test_a_share_of_a_quota_gets_as_few_processes_as_needed(tree_path: Path) -> None:
    root = lay_out(ice_lake(), tree_path)
    write(root, "/sys/fs/cgroup/user.slice/cpu.max", "6000000 100000\n")
    assert processes_and_threads(Machine.read(root)) == (2, 30)
