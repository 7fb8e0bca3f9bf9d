"""The parts of `make test-all`: what `make test` leaves out, each at most 15 minutes on two idle cores.

    python tests/parts.py            lists them
    python tests/parts.py kills      runs one; `all` runs every part
    python tests/parts.py --packages kills    the Debian packages it needs, --needs its needs
    python tests/parts.py --of COMMIT         the part whose turn it is with this commit

A part is the tests with the marker `part("kills")`, and scripts of its own. It draws the cases of tests/attack by the date.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CANNOT_RUN_HERE = 2  # exit code of a script that needs what this machine lacks; it prints the reason


@dataclass(frozen=True)
class Part:
    about: str
    needs: tuple[str, ...] = ()  # of rig/needs.py
    scripts: tuple[str, ...] = ()
    has_tests: bool = True
    make: tuple[str, ...] = ()  # targets that are run instead of scripts


PARTS = {
    "attack": Part("bad input and odd environments, drawn by the date", ("root",)),
    "builds": Part("every lower instruction set, and the C++ under the sanitizers"),
    "certify": Part(
        "PyTorch's own tests of a backend, with 2 and with 4 ranks",
        scripts=("comm/certify.py --ranks 2", "comm/certify.py --ranks 4"),
    ),
    "docs": Part("every command of the documentation, and the pages in a browser", ("browser", "smollm2")),
    "emulators": Part(
        "the AVX-512 build and bf16 units in Bochs, and the aarch64 build under QEMU",
        scripts=("kernels/emulate.py", "kernels/emulate_bf16.py", "kernels/arm.py"),
        has_tests=False,
    ),
    "engines": Part(
        "ranks that Ray, Spark, Lightning Fabric and Slurm start", ("root", "netns", "engines", "slurm", "mpi")
    ),
    "healing": Part("ranks and machines that are lost in training", ("root", "netns")),
    "hosts": Part("several hosts, and what happens to the network between them", ("root", "netns", "mpi")),
    "kills": Part("runs killed by the dozen, resumed and compared", ("root", "mpi")),
    "launch": Part("three MPIs, old commands and unmodified scripts", ("root", "netns", "mpi")),
    "oldest": Part("unmodified scripts with the oldest transformers and accelerate", has_tests=False, make=("oldest",)),
    "tasks": Part("every task with every way to train it, in one process and in two", ("smollm2",)),
    "zoo": Part("every architecture of transformers against the stock model", scripts=("zoo/run.py",), has_tests=False),
}


def rest_in(part: str, values: Iterable[Any], keep: int = 1) -> list[Any]:
    """Parameters of a test, of which `make test` runs the first `keep`, and this part the others."""
    import pytest

    def later(value: Any) -> Any:
        return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.part(part))

    return [value if place < keep else later(value) for place, value in enumerate(values)]


def part_of(commit: str) -> str:
    """All parts come round, in an order that looks like chance."""
    return sorted(PARTS)[int(commit[:12], 16) % len(PARTS)]


def pytest_command(name: str) -> list[str]:
    # "--part docs" would be read twice: as this option, and as the folder docs, so that conftest.py would not be found.
    pytest = [sys.executable, "-m", "pytest", "-n", "2", "--no-loadscope-reorder", "--shuffle", f"--part={name}"]
    return [*pytest, "--durations", "10", *os.environ.get("PYTEST_ARGS", "").split()]


def run(name: str) -> int:
    """Everything of one part, also what comes after a failure."""
    from rig.needs import NEEDS

    part, started = PARTS[name], time.monotonic()
    print(f"part {name}: {part.about}", flush=True)
    for target in filter(None, (NEEDS[need].target for need in part.needs)):
        subprocess.run(["make", "--no-print-directory", target], cwd=ROOT, check=True)
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    environment.setdefault("STOKER_ATTACK_SEED", time.strftime("%Y%m%d", time.gmtime()))
    commands = [[sys.executable, *script.split()] for script in (f"tests/{script}" for script in part.scripts)]
    commands += [["make", "--no-print-directory", target] for target in part.make]
    if part.has_tests:
        commands.insert(0, pytest_command(name))
    failed = []
    for command in commands:
        code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        if code and not (code == CANNOT_RUN_HERE and "pytest" not in command):
            failed.append(" ".join(command[1:]))
    minutes = (time.monotonic() - started) / 60
    print(f"part {name}: {f'FAILED: {failed}' if failed else 'passed'} in {minutes:.1f} minutes", flush=True)
    return bool(failed)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", nargs="?", choices=("all", *PARTS), metavar="PART", help="one of the parts, or all")
    parser.add_argument("--of", metavar="COMMIT", help="print the part whose turn it is with this commit")
    parser.add_argument("--needs", action="store_true", help="print what the part needs beyond Python")
    parser.add_argument("--packages", action="store_true", help="print the Debian packages that the part needs")
    given = parser.parse_args()
    if given.of:
        print(part_of(given.of))
    elif given.name is None:
        print("\n".join(f"  {name:<10} {part.about}" for name, part in PARTS.items()))
    elif given.needs:
        print("\n".join(PARTS[given.name].needs))
    elif given.packages:
        from rig.needs import NEEDS

        print("\n".join(dict.fromkeys(package for need in PARTS[given.name].needs for package in NEEDS[need].packages)))
    else:
        return max([run(name) for name in (PARTS if given.name == "all" else [given.name])])
    return 0


if __name__ == "__main__":
    sys.exit(main())
