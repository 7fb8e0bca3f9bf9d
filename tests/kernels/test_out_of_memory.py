"""A kernel that gets no memory raises MemoryError: the process, and all that it has trained, lives on."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

CSRC = Path(__file__).parent.parent.parent / "csrc"

PROGRAM = """
import resource, torch
from stoker.kernels.attention import attention

torch.set_num_threads(2)
starts = torch.arange(5)  # four sequences of one token, each attending to itself: the result is v

def run(size):
    v = torch.randn(4, 1, size)
    return v, attention(v, v, v, starts)

run(64)  # starts the threads, and gives each its first scratch memory
pages = int(open("/proc/self/statm").read().split()[0])
limits = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (128 << 20), limits[1]))
try:
    run(1 << 16)  # half a gigabyte of scratch for each thread
except MemoryError as error:
    print(error)
torch.testing.assert_close(*run(64))  # what the failure has freed is not used
resource.setrlimit(resource.RLIMIT_AS, limits)
torch.testing.assert_close(*run(1 << 16))
print("alive")
"""


def test_a_failed_allocation_inside_a_parallel_region_is_a_memory_error() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    said, alive = run.stdout.splitlines()
    assert said.startswith("attention_forward: no memory for intermediate results")
    assert alive == "alive"


def test_parallel_regions_are_those_that_catch_exceptions() -> None:
    files = {file.relative_to(CSRC).as_posix(): file.read_text() for file in CSRC.glob("*/*") if file.is_file()}
    regions = {name for name, text in files.items() if re.search(r"#pragma omp (parallel|task|for\b)", text)}
    assert regions == {"core/parallel.h"}
