"""Ray Train: `pip install ray 'stoker[hf]'`, then `python examples/ray_train.py`.

Ray starts the ranks and makes the process group; `backend="ccl"` makes it Stoker's, which uses shared memory inside a host.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def train_loop(config: dict[str, str]) -> None:
    sys.path.insert(0, config["examples"])
    from train_small_classifier import train

    print("result", train(config["output"]), flush=True)


def main(workers: int, output: str) -> None:
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"examples": str(Path(__file__).parent), "output": output},
        torch_config=TorchConfig(backend="ccl"),
        scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=output, name="run"),
    )
    trainer.fit()


if __name__ == "__main__":
    output = os.path.abspath(sys.argv[1] if len(sys.argv) > 1 else "out/ray")
    ray.init(num_cpus=2, include_dashboard=False)
    main(2, output)
