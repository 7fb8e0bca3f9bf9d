"""A plain TRL script, as in TRL's documentation: SFTTrainer with a LoRA adapter and TRL's default settings.

    python benchmarks/trl_sft.py MODEL ROWS.jsonl OUTPUT_DIR [--max_steps 5] [--seed 0] [--bf16]

It knows nothing of Stoker; `benchmarks/trl_launch.py` starts it with and without. The defaults are those for which TRL is
known to be slow on CPUs: batches of 8 padded rows, activation checkpointing, TRL's own loss. Precision is fp32: TRL asks for
bf16 by default, which transformers refuses on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from datasets import load_dataset
from peft import LoraConfig
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer


class Clock(TrainerCallback):
    """The time at the end of each step."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *args: Any, **named: Any) -> None:
        self.ends.append(time.perf_counter())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("rows")
    parser.add_argument("output_dir")
    parser.add_argument("--max_steps", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()

    clock = Clock()
    trainer = SFTTrainer(
        model=options.model,
        args=SFTConfig(
            output_dir=options.output_dir,
            max_steps=options.max_steps,
            seed=options.seed,
            logging_steps=1,
            use_cpu=True,
            bf16=options.bf16,
        ),
        train_dataset=load_dataset("json", data_files=options.rows, split="train"),
        peft_config=LoraConfig(),
        callbacks=[clock],
    )
    trainer.train()
    steps = [end - begin for begin, end in zip(clock.ends, clock.ends[1:], strict=False)]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print("REPORT " + json.dumps({"seconds": steps, "losses": losses}))


if __name__ == "__main__":
    main()
