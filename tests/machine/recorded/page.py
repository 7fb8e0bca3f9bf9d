"""The tables of docs/launch.md on recorded machines: what a launch chooses there, and what `stoker doctor` says.

    PYTHONPATH=src:tests python -m machine.recorded.page          writes them into docs/launch.md

tests/launch/test_recorded_placement.py fails while the page has other tables.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

from machine.recorded.layout import lay_out
from machine.recorded.machines import MACHINES
from stoker.english import counted
from stoker.errors import UserError
from stoker.launch.placement.binding import choose_all, choose_in_rank
from stoker.launch.placement.divide_cores import Placement
from stoker.launch.rank.rank_settings import Settings
from stoker.machine import Machine
from stoker.machine.processes import best_division, divisions
from stoker.machine.tree import format_cpu_list
from stoker.machine.verdicts import Evidence, verdicts

PAGE = Path(__file__).resolve().parents[3] / "docs" / "launch.md"
BEGIN, END = "<!-- recorded machines -->", "<!-- end of recorded machines -->"

TITLES = {
    "sapphire_rapids_2": "2 x Xeon Platinum 8480+",
    "sapphire_rapids_no_smt": "2 x 8480+, hyper-threading off",
    "sapphire_rapids_4": "2 x 8480+, SNC2",
    "sapphire_rapids_8": "2 x 8480+, SNC4",
    "xeon_max": "2 x Xeon Max 9480, flat mode",
    "xeon_max_8": "2 x Xeon Max 9480, flat mode, SNC4",
    "granite_rapids": "2 x Xeon 6980P, SNC3",
    "ice_lake": "2 x Xeon Platinum 8380",
    "genoa": "2 x EPYC 9654, NPS1",
    "genoa_8": "2 x EPYC 9654, NPS4",
    "turin": "2 x EPYC 9755, NPS1",
    "turin_8": "2 x EPYC 9755, NPS4",
    "avx2_vm": "virtual machine, 4 vCPUs, AVX2",
    "hybrid_laptop": "Core i7-12700H",
    "meteor_lake": "Core Ultra 7 155H",
    "graviton": "Graviton3, c7g.16xlarge",
    "graviton4": "Graviton4, r8g.48xlarge",
    "grace": "Grace CPU Superchip",
    "grace_hopper": "Grace Hopper, GH200",
    "container": "`docker run --cpus 3.5` on 2 x EPYC 7543",
    "container_across_nodes": "`docker run --cpuset-cpus 20-59` on 2 x Xeon 8380",
    "pod_across_nodes": "pod with CPUs 36-47,116-127 of 2 x Xeon 8380",
    "container_far_memory": "`--cpuset-cpus 40-59 --cpuset-mems 0` on 2 x Xeon 8380",
}
"""container_v1 is the same container with the older control groups."""

Read = Callable[[str], Machine]


def tables(read: Read) -> str:
    machines = {name: read(name) for name in TITLES}
    return "\n".join([*_launch(machines), "", *_mpirun(machines), "", *_doctor(machines)])


def _launch(machines: dict[str, Machine]) -> list[str]:
    lines = [
        "| machine | cores, NUMA nodes | `stoker launch` | `-ppn auto`: threads | cores of each | memory | ccl threads "
        "| time of a step by number of processes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, machine in machines.items():
        one = choose_all(Settings(), machine, 1, {})[0][0]
        best = best_division(machine)
        shares = choose_all(Settings(), machine, best.processes, {})[0]
        seconds = {division.processes: division.seconds / best.seconds for division in divisions(machine)}
        compared = (
            ", ".join(f"{processes}: {ratio:.2f}" for processes, ratio in seconds.items()) if len(seconds) > 1 else ""
        )
        cells = [TITLES[name], _hardware(machine), f"1 x {one.threads}{_memory([one], ', ')}", _threads(shares),
                 _each([format_cpu_list(share.cpus) for share in shares]), _memory(shares),
                 _each([format_cpu_list(share.siblings) for share in shares]), compared]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


_MPI = {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0"}
_COLUMNS: dict[str, tuple[int, dict[str, str], int]] = {
    "`mpirun -n 2`": (2, {}, 0),
    "`-n 4`": (4, {}, 0),
    "`-n 2`, OMP_NUM_THREADS=23": (2, {"OMP_NUM_THREADS": "23"}, 0),
    "`-n 2`, `--ccl_worker_count 1`": (2, {}, 1),
}
"""Column -> processes, variables, cores for communication."""


def _mpirun(machines: dict[str, Machine]) -> list[str]:
    lines = [f"| machine | {' | '.join(_COLUMNS)} |", f"|---{'|---' * len(_COLUMNS)}|"]
    for name, machine in machines.items():
        cells = [TITLES[name]]
        for processes, variables, workers in _COLUMNS.values():
            settings = Settings(is_one_of_several=True, outer_launcher="Intel MPI", ccl_workers=workers or None)
            environment = {**_MPI, **variables}
            try:
                found = [choose_in_rank(settings, machine, rank, processes, environment) for rank in range(processes)]
            except UserError as error:
                cells.append(str(error))
                continue
            shares = [share for share, _ in found if share is not None]
            kept = _each([format_cpu_list(share.worker_cpus) for share in shares])
            notes = ["; shared cores"] if any("share this machine's cores" in note for note in found[0][1]) else []
            notes += ["; 23 do not fit"] if any("OMP_NUM_THREADS=23 is more" in note for note in found[0][1]) else []
            cells.append(
                f"{_threads(shares)}{_memory(shares, '; ')}{f'; oneCCL on {kept}' if workers and kept else ''}{''.join(notes)}"
            )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _doctor(machines: dict[str, Machine]) -> list[str]:
    lines = [
        "| machine | precision, bf16 units | processes, and why | other subjects, and advice |",
        "|---|---|---|---|",
    ]
    for name, machine in machines.items():
        precision, processes, *others = verdicts(Evidence(machine))
        units = f"{(precision.action or '').strip('.')} ({machine.isa.bf16_units or 'none'})"
        advice = "; ".join(f"{one.subject}{f': {one.action}' if one.action else ''}" for one in others)
        lines.append(f"| {TITLES[name]} | {units} | {processes.text} | {advice} |")
    return lines


def _hardware(machine: Machine) -> str:
    with_cpus = [node for node in machine.nodes if node.cpus]
    per_socket = sorted(Counter(core.socket for core in machine.cores).values())
    cores = f"{len(per_socket)} x {per_socket[0]}" if len(set(per_socket)) == 1 else " + ".join(map(str, per_socket))
    text = f"{cores}{', SMT' * (machine.threads_per_core > 1)}; {counted(len(with_cpus), 'node')}"
    if others := len(machine.nodes) - len(with_cpus):
        text += f", {others} without CPUs"
    kinds = Counter(core.kind for core in machine.cores)
    return f"{kinds['performance']} + {kinds['efficiency']} small{text[len(cores) :]}" if machine.hybrid else text


def _threads(shares: Sequence[Placement]) -> str:
    groups = [(len(list(group)), threads) for threads, group in groupby(share.threads for share in shares)]
    return ", ".join(f"{count} x {threads}" for count, threads in groups)


def _each(texts: Sequence[str]) -> str:
    return "; ".join(texts) if any(texts) else ""


def _memory(shares: Sequence[Placement], before: str = "") -> str:
    texts = [f"{format_cpu_list(share.nodes)}{' spread' * share.spread}" for share in shares]
    if not any(share.nodes for share in shares):
        return ""
    return f"{before}node {_each(texts)}"


def written() -> str:
    """The tables as docs/launch.md has them."""
    found = re.search(rf"{BEGIN}\n(.*?)\n{END}", PAGE.read_text(encoding="utf-8"), re.S)
    assert found is not None
    return found[1]


def main() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        text = tables(lambda name: Machine.read(lay_out(MACHINES[name](), Path(directory) / name)))
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(page.replace(f"{BEGIN}\n{written()}\n{END}", f"{BEGIN}\n{text}\n{END}"), encoding="utf-8")


if __name__ == "__main__":
    main()
