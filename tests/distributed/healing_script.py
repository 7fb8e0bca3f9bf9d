"""A script with a Trainer whose ranks kill themselves: `healing_script.py --output_dir DIR [--kills RANK:MOMENT:STEP,...]`.

Each kill happens once per DIR: the rank sends itself SIGKILL when the moment comes for the first time at that step, or
after it. Moments: forward, backward, optimizer, step_end, evaluate, save, start (of a process that replaces a lost one) and
milliseconds, STEP of them after such a start; warm is step_end, once there is a process that has imported everything in advance.
Every process writes its id to DIR/processes.RANK, and whether it found transformers imported. At the end every rank writes its
weights to DIR/weights.RANK.pt, and rank 0 what it has logged to DIR/logged.json. In step --hang_at rank 1 creates DIR/hangs and
sleeps, once per DIR.
"""

# ruff: noqa: E402
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

STARTED_WARM = "transformers.trainer" in sys.modules
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "hf"))

import tiny
import torch
from transformers import EarlyStoppingCallback, HfArgumentParser, Trainer, TrainerCallback, TrainingArguments

parser = HfArgumentParser(TrainingArguments)
parser.add_argument("--kills", default="")
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--rows", type=int, default=64)
parser.add_argument("--patience", type=int, default=0)
parser.add_argument("--fail_at", type=int, default=-1)
parser.add_argument("--hang_at", type=int, default=-1)
args, rest = parser.parse_args_into_dataclasses()
folder, rank = Path(args.output_dir), args.process_index
folder.mkdir(parents=True, exist_ok=True)
with open(folder / f"processes.{rank}", "a") as file:
    file.write(f"{os.getpid()}\n")
with open(folder / f"warm.{rank}", "a") as file:
    file.write(f"{STARTED_WARM}\n")


def moment(name: str, step: int) -> None:
    for number, kill in enumerate(filter(None, rest.kills.split(","))):
        who, when, at = kill.split(":")
        done = folder / f"killed.{number}"
        if int(who) == rank and when == name and step >= int(at) and not done.exists():
            done.touch()
            while when == "warm" and not Path(os.environ["STOKER_HEAL"], f"warm.{rank}").exists():
                time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)


class Kills(TrainerCallback):
    def on_optimizer_step(self, args, state, control, **named):
        moment("optimizer", state.global_step)

    def on_step_end(self, args, state, control, **named):
        moment("step_end", state.global_step)
        moment("warm", state.global_step)

    def on_prediction_step(self, args, state, control, **named):
        moment("evaluate", state.global_step)


class Killed(Trainer):
    def compute_loss(self, *positional, **named):
        loss = super().compute_loss(*positional, **named)
        if self.model.training:
            moment("forward", self.state.global_step)
            if rank == 1 and self.state.global_step == rest.hang_at and not (folder / "hangs").exists():
                (folder / "hangs").touch()
                time.sleep(300)
            if rank == 1 and self.state.global_step == rest.fail_at:
                raise ValueError("a bug in the script")
            one = loss[0] if isinstance(loss, tuple) else loss
            one.register_hook(lambda _: moment("backward", self.state.global_step))
        return loss

    def _save_optimizer_and_scheduler(self, folder):
        moment("save", self.state.global_step)
        super()._save_optimizer_and_scheduler(folder)


if "STOKER_REPLACES" in os.environ:
    moment("start", 0)
    for kill in filter(None, rest.kills.split(",")):
        if kill.split(":")[1] == "milliseconds":
            after = int(kill.split(":")[2])
            threading.Timer(after / 1000, moment, ("milliseconds", after)).start()
callbacks = [Kills()]
if rest.patience:
    callbacks.append(EarlyStoppingCallback(rest.patience))
trainer = Killed(
    tiny.tiny_model(dropout=rest.dropout),
    args,
    data_collator=tiny.pad,
    train_dataset=tiny.TinyData(rest.rows),
    eval_dataset=tiny.TinyData(16, seed=5),
    callbacks=callbacks,
)
trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
torch.save(weights, folder / f"weights.{rank}.pt")
if rank == 0:
    (folder / "logged.json").write_text(json.dumps(trainer.state.log_history))
