"""One rank of a training run of two: `python two_ranks.py FOLDER [SIGTERM_AT_STEP]`; rank 1 sends the signal to itself."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import tiny
import torch

from stoker.hf.checkpointing import folders

torch.set_num_threads(1)


def main() -> None:
    folder = Path(sys.argv[1])
    trainer: Any = tiny.trainer(
        folder, max_steps=9, save_steps=4, save_total_limit=2, tokens_per_batch=48, ddp_timeout=120
    )
    if len(sys.argv) > 2:
        original = trainer.compute_loss

        def compute_loss(*args: Any, **named: Any) -> Any:
            if os.environ["RANK"] == "1" and trainer.state.global_step == int(sys.argv[2]):
                os.kill(os.getpid(), signal.SIGTERM)
            return original(*args, **named)

        trainer.compute_loss = compute_loss
    trainer.train(resume_from_checkpoint=bool(folders.all_checkpoints(folder)))
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        total = sum(float(p.double().sum()) for p in trainer.model.parameters())
        print(f"RESULT {total!r} {metrics['eval_loss']!r}", flush=True)
    torch.distributed.destroy_process_group()


main()
