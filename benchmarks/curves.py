"""The same training on several sides and seeds: how a run trains, which runs are made, where they are kept, and their plot."""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Runs = dict[str, dict[str, Any]]
"""By name ("stoker seed 0"): the losses, and figures of the finished run."""


def main(
    name: str,
    parser: argparse.ArgumentParser,
    colours: dict[str, str],
    runner: Callable[[argparse.Namespace], Callable[[str, int], dict[str, Any]]],
    show: Sequence[str],
    summary: Callable[[Runs], str],
) -> None:
    """Makes the runs that are missing in the folder --out, prints their summary and plots their losses.

    `runner` makes of the arguments the function that makes one run, of a side and a seed.
    """
    parser.add_argument("--out", type=Path, required=True, help=f"folder for {name}.json and {name}.svg")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--side", action="append", choices=colours, help="only this one (repeatable)")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    store = arguments.out / f"{name}.json"
    runs = make_runs(store, arguments.side or list(colours), arguments.seeds, runner(arguments), show)
    print(summary(runs))
    plot(runs, colours, arguments.out / f"{name}.svg")


def train(
    model: Any, loss_of: Callable[[int], Any], steps: int, *, lr: float, warm_up: int, autocast: bool = False
) -> list[float]:
    """Trains with AdamW and a linear schedule; returns the loss of each step."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm_up, 1 - step / (steps + 1))
    )
    model.train()
    losses = []
    for step in range(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = loss_of(step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        model.zero_grad()
        losses.append(loss.item())
    return losses


def stored(store: Path) -> Runs:
    return json.loads(store.read_text()) if store.exists() else {}


def make_runs(
    store: Path, sides: Sequence[str], seeds: int, one_run: Callable[[str, int], dict[str, Any]], show: Sequence[str]
) -> Runs:
    """Makes the runs that `store` does not have yet, and writes each as soon as it ends. `show` names the figures printed."""
    for seed in range(seeds):
        for side in sides:
            name = f"{side} seed {seed}"
            if name in stored(store):
                continue
            run = one_run(side, seed)
            if not math.isfinite(run["losses"][-1]):
                raise SystemExit(f"{store.stem}: {name}: the loss became {run['losses'][-1]}")
            runs = stored(store)  # another side's process may have written meanwhile
            runs[name] = {
                key: [round(x, 4) for x in value] if key == "losses" else round(value, 3) for key, value in run.items()
            }
            store.write_text(json.dumps(runs))
            print(f"{name}: " + ", ".join(f"{key} {run[key]:.2f}" for key in show), flush=True)
    return stored(store)


def of_side(runs: Runs, side: str) -> list[dict[str, Any]]:
    return [run for name, run in sorted(runs.items()) if name.startswith(f"{side} seed ")]


def tail(runs: list[dict[str, Any]]) -> float:
    """The mean of the last 50 losses."""
    return statistics.fmean(statistics.fmean(run["losses"][-50:]) for run in runs)


def smooth(losses: list[float], width: int = 15) -> list[float]:
    return [statistics.fmean(losses[max(0, i - width) : i + 1]) for i in range(len(losses))]


def plot(runs: Runs, colours: dict[str, str], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "stoker", "svg.fonttype": "none"})
    figure, axis = plt.subplots(figsize=(8, 3.6))
    for name, run in runs.items():
        side, _, seed = name.partition(" seed ")
        axis.plot(smooth(run["losses"]), color=colours[side], alpha=0.8, lw=1, label=side if seed == "0" else None)
    axis.set_xlabel("step")
    axis.set_ylabel("loss (mean of 15 steps)")
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
