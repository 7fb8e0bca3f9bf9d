"""How long a newcomer waits for a first model: an empty virtual environment, the wheel, `stoker doctor`, `stoker demo`.

    make wheel && python benchmarks/first_contact.py dist/stoker-*.whl

Prints the seconds of each command of docs/install.md, up to the model. Installing depends on the network and on pip's cache;
`--torch-index` and `--torch` say where torch comes from.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bars import cpu_name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--torch", default="torch")
    parser.add_argument("--torch-index", default="https://download.pytorch.org/whl/cpu", help="empty: pip's default")
    parser.add_argument("--extras", default="demo")
    chosen = parser.parse_args()
    index = ["--index-url", chosen.torch_index] if chosen.torch_index else []
    with tempfile.TemporaryDirectory() as folder:
        bin = Path(folder, "environment", "bin")
        spent = {
            name: run(command, Path(folder))
            for name, command in {
                "python3 -m venv": [getattr(sys, "_base_executable", sys.executable), "-m", "venv", str(bin.parent)],
                "pip install torch": [str(bin / "pip"), "install", "-q", chosen.torch, *index],
                "pip install the wheel": [
                    str(bin / "pip"),
                    "install",
                    "-q",
                    f"{chosen.wheel.resolve()}[{chosen.extras}]",
                ],
                "stoker doctor": [str(bin / "stoker"), "doctor"],
                "stoker demo": [str(bin / "stoker"), "demo", "--output_dir", "demo"],
            }.items()
        }
    print(f"\n{cpu_name()}: {sum(spent.values()) / 60:.1f} minutes from an empty environment to a first model")
    return 0


def run(command: list[str], folder: Path) -> float:
    """Seconds of a command, with nothing of this environment."""
    dropped = ("PYTHONPATH", "STOKER_NATIVE_DIR", "VIRTUAL_ENV")
    variables = {name: value for name, value in os.environ.items() if name not in dropped}
    begin = time.monotonic()
    done = subprocess.run(command, cwd=folder, env=variables | {"XDG_CACHE_HOME": str(folder / "cache")},
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ends with exit code {done.returncode}:\n{done.stdout[-3000:]}")
    spent = time.monotonic() - begin
    print(f"{' '.join([Path(command[0]).name, *command[1:3]])[:50]:50} {spent:6.0f} s", flush=True)
    return spent


if __name__ == "__main__":
    sys.exit(main())
