"""Unmodified scripts: the same file started by `python` and by `stoker launch`, in turn; ratios of their training times.

    python benchmarks/launch.py [--rounds 3] [--layers 3]

The scripts are those of tests/launch/scripts, in the style of run_qa.py and nlp_example.py, and know nothing of Stoker. Their
widths are BERT-base's; fewer layers keep the run short and change both sides alike.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent.parent / "tests" / "launch" / "scripts"
STOKER = [sys.executable, "-c", "import sys; from stoker.cli import main; sys.exit(main(sys.argv[1:]))", "launch"]
BARS = {"qa_style.py": 3.0, "nlp_style.py": 2.5}


def seconds(start: list[str], script: str, words: list[str]) -> float:
    """The training time that the script itself reports."""
    done = subprocess.run(
        [*start, str(SCRIPTS / script), *words], capture_output=True, text=True, check=True, env=os.environ
    )
    line = next(line for line in done.stdout.splitlines() if line.startswith("REPORT "))
    return float(json.loads(line.removeprefix("REPORT "))["seconds"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=3)
    options = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as directory:
        base = ["--output_dir", directory, "--report_to", "none", "--save_strategy", "no", "--num_train_epochs", "1"]
        qa = [*base, "--per_device_train_batch_size", "12", "--train_samples", "48", "--max_seq_length", "384"]
        commands = {
            "qa_style.py": [*qa, "--hidden_size", "768", "--num_layers", str(options.layers)],
            "nlp_style.py": [
                "--rows",
                "128",
                "--batch",
                "16",
                "--length",
                "80",
                "--hidden",
                "768",
                "--layers",
                str(options.layers),
            ],
        }
        for script, words in commands.items():
            sides: dict[str, list[float]] = {"python": [], "stoker": []}
            for _ in range(options.rounds):
                sides["python"].append(seconds([sys.executable], script, words))
                sides["stoker"].append(seconds(STOKER, script, words))
            ratios = [stock / ours for stock, ours in zip(sides["python"], sides["stoker"], strict=True)]
            ratio = statistics.median(ratios)
            failed |= ratio < BARS[script]
            figures = {side: statistics.median(found) for side, found in sides.items()}
            print(
                f"{script}: python {figures['python']:.1f} s, stoker launch {figures['stoker']:.1f} s, "
                f"median of {options.rounds} ratios {ratio:.2f} (bar {BARS[script]}; {', '.join(f'{one:.2f}' for one in ratios)})"
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
