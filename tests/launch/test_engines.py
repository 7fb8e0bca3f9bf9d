"""`stoker.distributed.setup()` inside the processes of other engines: the examples, with the real packages, on this machine."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import stoker

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def _run(command: list[str], folder: Path, **variables: str) -> tuple[list[dict[str, Any]], str]:
    """The results that the ranks printed, each rank's once and in their order, and everything else.

    Ranks share the pipe, so that a result may stand anywhere in a line.
    """
    source = os.pathsep.join([str(Path(stoker.__file__).parents[1]), str(ROOT / "build" / "engines")])
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment = {**inherited, "PYTHONPATH": source, "RAY_DEDUP_LOGS": "0", "NO_COLOR": "1", **variables}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    text = done.stdout + done.stderr
    assert done.returncode == 0, text[-4000:]
    found = [ast.literal_eval(line) for line in re.findall(r"\{'rank'[^{}]*\}", text)]
    return sorted({one["rank"]: one for one in found}.values(), key=lambda one: one["rank"]), text


def _check(results: list[dict[str, Any]], ranks: int = 2) -> None:
    for result in results:
        assert (result["ranks"], result["backend"]) == (ranks, "ccl")
        assert "fused layer" in result["optimised"]
        assert result["threads"] >= 1
    assert len({result["weights"] for result in results}) == 1, "the ranks must have trained together"
    pinned = [set(result["cpus"]) for result in results if "cpus" in result]
    if len(pinned) == 2 and (os.cpu_count() or 1) > 1:
        assert pinned[0].isdisjoint(pinned[1])


@pytest.mark.part("engines")
@pytest.mark.engines
def test_ray_train(tmp_path: Path) -> None:
    results, text = _run([str(EXAMPLES / "ray_train.py"), str(tmp_path / "out")], tmp_path)
    assert [result["rank"] for result in results] == [0, 1]
    _check(results)
    assert "stoker: rank 0 of 2, 0 of 2 on this machine" in text
    assert "stoker: rank 1" not in text, "rank 0 speaks for all"


@pytest.mark.part("engines")
@pytest.mark.engines
def test_spark_torch_distributor(tmp_path: Path) -> None:
    results, text = _run([str(EXAMPLES / "spark_torch_distributor.py"), str(tmp_path / "out")], tmp_path)
    _check(results)
    assert "stoker: rank 0 of 2, 0 of 2 on this machine" in text


@pytest.mark.part("engines")
@pytest.mark.engines
def test_lightning_fabric(tmp_path: Path) -> None:
    results, _ = _run([str(EXAMPLES / "lightning_fabric_loop.py")], tmp_path)
    assert [result["rank"] for result in results] == [0, 1]
    _check(results)


TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
SCRIPT = """
import sys
sys.path.insert(0, {examples!r})
from train_small_classifier import train
print("result", train("out"), flush=True)
"""


@pytest.mark.part("engines")
def test_plain_torchrun(tmp_path: Path) -> None:
    """What TorchDistributor does on every node; torchrun's own OMP_NUM_THREADS=1 is no choice of the user's."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(examples=str(EXAMPLES)))
    results, text = _run([*TORCHRUN, str(script)], tmp_path)
    assert [result["rank"] for result in results] == [0, 1]
    _check(results)
    assert "setup(optimise=False) leaves them as they are" in text
    assert "keeps accelerate's settings" not in text


def test_a_process_of_its_own(tmp_path: Path) -> None:
    """Without an engine: all cores, no process group, and a second call that changes nothing."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, transformers.trainer, stoker.distributed as d\n"
        "first = d.setup()\n"
        "assert d.setup(threads=1) is first\n"
        "assert (first.rank, first.size, first.local_size, first.backend) == (0, 1, 1, None), first\n"
        "assert torch.get_num_threads() == first.threads\n"
        "print(first)\n"
    )
    _, text = _run([str(script)], tmp_path)
    assert "rank 0 of 1, 0 of 1 on this machine" in text
    assert "transformers' Trainer was imported before setup()" in text


def test_the_number_of_threads_is_checked_and_kept(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, torch, stoker.distributed as d\nfrom stoker.errors import UserError\n"
        "try:\n    d.setup(threads=0)\nexcept UserError as error:\n    print(error)\n"
        "before = os.sched_getaffinity(0)\n"
        "joined = d.setup(threads=1, pin=False)\n"
        "assert torch.get_num_threads() == joined.threads == 1 and joined.cpus == ()\n"
        "assert os.sched_getaffinity(0) == before\n"
    )
    _, text = _run([str(script)], tmp_path)
    assert "setup: threads is 0; it must be at least 1" in text
