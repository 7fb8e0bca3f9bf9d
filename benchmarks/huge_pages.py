"""A training step with its memory in pages of 4 KB, as it is, and in huge pages.

    python benchmarks/huge_pages.py                          BERT-base QA, about three minutes on two quiet cores
    python benchmarks/huge_pages.py --case bert-mrpc --threads 1 --steps 8
    python benchmarks/huge_pages.py --side default --side torch

Sides, each in a process of its own, steps in turn (benchmarks/sides.py):

    small     no huge pages at all (PR_SET_THP_DISABLE)
    default   `stoker.optimize`
    torch     torch asks for huge pages for tensors of 2 MB and more (THP_MEM_ALLOC_ENABLE=1)
    heap      all memory of the process that can be moved into huge pages is moved there after the warm-up

Prints the median ratio to `default` of the steps, by the clock and by CPU time, and how much of each process's memory lies in
huge pages. CPU time also holds beside other work if there is one thread (`--threads 1`). Where the CPU counts them (most virtual
machines hide the counters), `perf stat -e dtlb_load_misses.walk_active` shows the page walks beside it.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import os
import re
import statistics
import sys
import time
from pathlib import Path

from sides import Step, measure
from train_step import CASES, stoker

_PR_SET_THP_DISABLE = 41  # linux/prctl.h
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25  # asm-generic/mman-common.h
_HUGE = 2 << 20


def side(kind: str, case: str, dtype: str, threads: int) -> Step:
    if kind == "small":
        ctypes.CDLL(None).prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)
    if kind == "torch":
        os.environ["THP_MEM_ALLOC_ENABLE"] = "1"
    import torch

    torch.set_num_threads(threads or torch.get_num_threads())
    step = stoker(case, dtype)

    def timed(number: int) -> float:
        # Moved between two steps, and therefore inside the time of one: only of the first, which the medians ignore.
        if kind == "heap" and number == 2:
            collapse()
        begin = time.process_time()
        step(number)
        seconds = time.process_time() - begin
        print(f"    {kind}: step {number} took {seconds:.3f} s of CPU time", file=sys.stderr, flush=True)
        if number % 8 == 3:
            print(
                f"    {kind}: {in_huge_pages() / 2**20:,.0f} MB of {resident() / 2**20:,.0f} MB in huge pages",
                flush=True,
            )
        return seconds

    return timed


def collapse() -> None:
    """Moves this process's private memory into huge pages, by force where the kernel can (Linux 6.1)."""
    library = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ 0\s*(\[heap\])?$", line)
        if found is None:
            continue
        start, end = (int(found[1], 16) + _HUGE - 1) // _HUGE * _HUGE, int(found[2], 16) // _HUGE * _HUGE
        if start < end:
            for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
                library.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice)


def in_huge_pages() -> int:
    found = re.search(r"^AnonHugePages:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.M)
    return int(found[1]) << 10 if found else 0


def resident() -> int:
    found = re.search(r"^Rss:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.M)
    return int(found[1]) << 10 if found else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, default="bert-qa")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--side", action="append", choices=("small", "default", "torch", "heap"))
    parser.add_argument("--threads", type=int, default=0, help="default: torch's")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    kinds = options.side or ["small", "default", "torch", "heap"]
    sides = {kind: functools.partial(side, kind, options.case, options.dtype, options.threads) for kind in kinds}
    results = measure(sides, options.steps, say=lambda line: print(line, file=sys.stderr))
    print(f"{options.case}, {options.dtype}, {options.steps} steps")
    for kind, measured in results.items():
        base = results.get("default", measured)
        ratio, cpu = (
            measured.faster_than(base),
            statistics.median(theirs / mine for theirs, mine in zip(base.losses, measured.losses, strict=False)),
        )  # what a step returns here is its CPU time
        faults = sorted(measured.faults)[len(measured.faults) // 2] if measured.faults else 0
        print(
            f"  {kind:8} {1000 * measured.median:8.1f} ms   speed against default {ratio:.3f}, by CPU time {cpu:.3f}   "
            f"minor faults {faults:,}   peak {measured.peak_bytes / 2**30:.2f} GB {measured.note}"
        )
    if options.json:
        options.json.write_text(json.dumps({kind: measured.to_dict() for kind, measured in results.items()}, indent=1))


if __name__ == "__main__":
    main()
