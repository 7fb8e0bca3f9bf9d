"""A script with transformers' Trainer and nothing of Stoker: `elastic_script.py --output_dir DIR [--kill_at STEP]`.

Rank 1 ends itself with SIGKILL in that step of the first attempt. Rank 0 writes the sum of the weights to DIR/result.txt.
"""

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "hf"))

import tiny
from transformers import HfArgumentParser, Trainer, TrainingArguments

parser = HfArgumentParser(TrainingArguments)
parser.add_argument("--kill_at", type=int, default=-1)
args, rest = parser.parse_args_into_dataclasses()


class Killed(Trainer):
    def compute_loss(self, *positional: object, **named: object) -> object:
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if args.process_index == 1 and first and self.state.global_step == rest.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().compute_loss(*positional, **named)


trainer = Killed(tiny.tiny_model(), args, data_collator=tiny.pad, train_dataset=tiny.TinyData())
trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
if trainer.is_world_process_zero():
    total = sum(float(p.detach().double().sum()) for p in trainer.model.parameters())
    (Path(args.output_dir) / "result.txt").write_text(repr(total))
