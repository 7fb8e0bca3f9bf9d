"""What local SGD does to the score: MiniLM on real SQuAD by two ranks that synchronize every step, every 8, or every 32.

    python benchmarks/local_sgd.py --data ../shared/data/squad

Task, data, learning rate and questions are those of benchmarks/convergence.py, whose functions do the work: 300 steps of 12
windows, then the first 1,000 questions of the dev set. Two ranks with one thread each share every 12 windows, the same ones
on all sides, over the ccl backend; torchrun starts them. A run that is already in docs/figures/local_sgd.json is not
repeated. A side takes some ten minutes on two quiet cores; for a quick trial:

    python benchmarks/local_sgd.py --data ../shared/data/squad --steps 4 --questions 20 --out /tmp/trial
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

HERE = Path(__file__).resolve().parent
RANKS = 2


@dataclass(frozen=True)
class Way:
    """How the ranks synchronize; every=0 is DDP, which averages gradients at every step."""

    every: int = 0
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    warm_up: int = 0
    """Steps in which gradients are averaged before local SGD begins."""


SIDES = {
    "DDP": Way(),
    "local SGD 8": Way(8),
    "local SGD 32, momentum": Way(32, 0.7, 0.9),  # the outer step of DiLoCo's paper
    # Adam's steps have the same size whatever the batch: those of a half batch point less in the direction that both ranks
    # agree on, and their mean is shorter. An outer learning rate of about the square root of the number of ranks corrects that.
    "warm-up 60, local SGD 8, outer 1.4": Way(8, 1.4, 0.0, 60),
    "warm-up 150, local SGD 8, outer 1.4": Way(8, 1.4, 0.0, 150),
    "local SGD 32": Way(32),  # only when asked for: tells what of the last one is the momentum's doing
}
DEFAULT_SIDES = tuple(SIDES)[:5]


def wrap(model: Any, way: Way) -> tuple[Any, Any]:
    """The model as it is trained, and its LocalSGD if there is one."""
    from stoker.distributed.local_sgd import LocalSGD

    if way.every:
        outer = {"outer_lr": way.outer_lr, "outer_momentum": way.outer_momentum}
        return model, LocalSGD(model, way.every, warm_up=way.warm_up, **outer)
    wrapped = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    wrapped.broadcast_buffers = False
    return wrapped, None


@dataclass(frozen=True)
class AveragedLoss:
    """A loss whose backward pass averages the gradients of the ranks, as DDP's does."""

    loss: torch.Tensor
    local: Any

    def backward(self) -> None:
        self.loss.backward()
        self.local.average_gradients()

    def item(self) -> float:
        return self.loss.item()


def my_share(collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A collate for this rank's rows of a global batch, dealt by tokens as Trainer does."""
    from stoker.distributed.balance import deal

    def share(rows: Any) -> Any:
        mine = deal([len(row["input_ids"]) for row in rows], dist.get_world_size())[dist.get_rank()]
        return collate([rows[position] for position in mine])

    return share


def one_rank(request: dict[str, Any]) -> None:
    """One process under torchrun: trains its share; rank 0 answers the questions and writes the result to request["result"].

    Dropout is seeded alike on both ranks, as transformers' Trainer does it.
    """
    from convergence import evaluate, load_data, load_model, loss_of, train
    from torch.optim.optimizer import register_optimizer_step_post_hook

    import stoker

    torch.set_num_threads(1)
    dist.init_process_group("ccl")
    training, dev, collate = load_data(Path(request["data"]), request["steps"], request["batch"], request["questions"])
    model = load_model(request["seed"])
    stoker.optimize(model, dtype=torch.float32)
    wrapped, local = wrap(model, SIDES[request["side"]])
    averages = []
    hook = register_optimizer_step_post_hook(lambda *_: averages.append(local.step() if local else True))
    begin = time.perf_counter()

    def loss_of_rank(model: Any, batch: Any) -> Any:
        loss = loss_of(model, batch)
        return AveragedLoss(loss, local) if local and local.warms_up else loss

    losses = train(
        wrapped, training, my_share(collate), request["seed"], request["steps"], request["batch"], loss_of_rank
    )
    hook.remove()
    if local and not local.agreed:
        local.average()
        averages.append(True)
    seconds = time.perf_counter() - begin
    everyone = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(everyone, dist.ReduceOp.AVG)  # ranks have equal numbers of windows
    ranks, rank = dist.get_world_size(), dist.get_rank()
    dist.destroy_process_group()
    if rank:
        return
    # A rank of a ring sends 2 (n-1)/n of what is averaged; all parameters take part in every meeting.
    bytes_each = 2 * (ranks - 1) / ranks * sum(p.nbytes for p in model.parameters())
    found = {
        "losses": [round(loss, 4) for loss in everyone.tolist()],
        "seconds": round(seconds, 1),
        "averages": sum(averages),
        "bytes_per_step": round(bytes_each * sum(averages) / request["steps"]),
        **{name: round(score, 3) for name, score in evaluate(model, dev, collate).items()},
        "settings": {name: request[name] for name in ("steps", "batch", "questions")},
    }
    Path(request["result"]).write_text(json.dumps(found))


def run(request: dict[str, Any]) -> dict[str, Any]:
    """One side with one seed, by two processes."""
    result = Path(request["result"])
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
    ended = subprocess.run(
        [*command, __file__, "--rank", json.dumps(request)], env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    if ended.returncode or not result.exists():
        raise SystemExit(f"local_sgd: {request['side']}: the ranks ended with exit code {ended.returncode}")
    found: dict[str, Any] = json.loads(result.read_text())
    result.unlink()
    return found


def summary(runs: dict[str, Any]) -> str:
    lines = [f"{'side':38}{'seeds':>6}{'F1':>8}{'EM':>8}{'last 50 losses':>16}{'MB sent per rank and step':>27}"]
    for side in SIDES:
        mine = [found for name, found in sorted(runs.items()) if name.startswith(f"{side} seed ")]
        if not mine:
            continue
        f1, exact, sent = (
            statistics.fmean(one[key] for one in mine) for key in ("f1", "exact_match", "bytes_per_step")
        )
        tail = statistics.fmean(statistics.fmean(one["losses"][-50:]) for one in mine)
        lines.append(f"{side:38}{len(mine):6}{f1:8.2f}{exact:8.2f}{tail:16.3f}{sent / 1e6:27.2f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help="folder with train-v1.1.json.gz and dev-v1.1.json.gz")
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs" / "figures", help="folder for local_sgd.json")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=12, help="windows of all ranks together")
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--side", action="append", choices=SIDES, help="only this one (repeatable)")
    options = parser.parse_args()
    if options.rank:
        return one_rank(json.loads(options.rank))
    if options.data is None or not (options.data / "train-v1.1.json.gz").exists():
        parser.error("--data must be a folder with train-v1.1.json.gz and dev-v1.1.json.gz")
    if options.batch % RANKS:
        parser.error(f"--batch {options.batch}: {RANKS} ranks need equal shares")
    from curves import stored

    options.out.mkdir(parents=True, exist_ok=True)
    store = options.out / "local_sgd.json"
    settings = {name: getattr(options, name) for name in ("steps", "batch", "questions")}
    if any(found["settings"] != settings for found in stored(store).values()):
        parser.error(f"{store} holds runs with other --steps, --batch or --questions; choose another --out")
    for seed in range(options.seeds):
        for side in options.side or DEFAULT_SIDES:
            name = f"{side} seed {seed}"
            if name in stored(store):
                continue
            request = {"side": side, "seed": seed, "data": str(options.data), **settings}
            found = run({**request, "result": str(store.with_name(f".local_sgd-{os.getpid()}.json"))})
            store.write_text(json.dumps({**stored(store), name: found}))
            print(f"{name}: F1 {found['f1']:.2f}, {found['seconds']:.0f} s of training", flush=True)
    print(summary(stored(store)))
    return None


if __name__ == "__main__":
    main()
