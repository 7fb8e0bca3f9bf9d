"""A script with a Trainer: `elastic_script.py --output_dir DIR [--kill_at STEP] [--wait_at STEP] [--stop_at STEP] [--own]
[--dropout X]`.

Uses transformers' Trainer, or with --own Stoker's. In the first attempt, rank 1 kills itself with SIGKILL in step --kill_at; in
step --wait_at it creates DIR/waiting and sleeps. In step --stop_at the last rank sends itself SIGTERM, once per DIR. Rank 0
writes the sum of the weights to DIR/result.txt.
"""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "hf"))

import tiny
from transformers import HfArgumentParser

if "--own" in sys.argv:
    from stoker import Trainer, TrainingArguments
else:
    from transformers import Trainer, TrainingArguments

parser = HfArgumentParser(TrainingArguments)
parser.add_argument("--kill_at", type=int, default=-1)
parser.add_argument("--wait_at", type=int, default=-1)
parser.add_argument("--stop_at", type=int, default=-1)
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--own", action="store_true")
args, rest = parser.parse_args_into_dataclasses()
waiting, stopped = Path(args.output_dir) / "waiting", Path(args.output_dir) / "stopped"


class Killed(Trainer):
    def compute_loss(self, *positional: object, **named: object) -> object:
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if args.process_index == 1 and first and self.state.global_step == rest.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if args.process_index == 1 and self.state.global_step == rest.wait_at and not waiting.exists():
            waiting.touch()
            time.sleep(60)
        last = args.process_index == args.world_size - 1
        if last and self.state.global_step == rest.stop_at and not stopped.exists():
            stopped.touch()
            os.kill(os.getpid(), signal.SIGTERM)
        return super().compute_loss(*positional, **named)


trainer = Killed(tiny.tiny_model(dropout=rest.dropout), args, data_collator=tiny.pad, train_dataset=tiny.TinyData())
trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
if trainer.is_world_process_zero():
    total = sum(float(p.detach().double().sum()) for p in trainer.model.parameters())
    (Path(args.output_dir) / "result.txt").write_text(repr(total))
