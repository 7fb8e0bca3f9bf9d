"""Writes the run log (stoker.run_report.log) during training: what the run is, its figures, and how it ended."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers

from stoker import __version__
from stoker.hf.batches import lengths_of
from stoker.hf.secrets import without_secrets
from stoker.machine import this_machine
from stoker.machine.rates import known
from stoker.process_life import facts_of
from stoker.run_report.log import RunLog

if TYPE_CHECKING:
    from stoker.hf.trainer import Trainer

__all__ = ["Recorder", "loss_name"]

_LENGTHS_READ = 20_000  # rows of a dataset that does not know its lengths; reading more is not worth it for a histogram


class Recorder:
    """The run log of one Trainer; only rank 0 writes."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.log = RunLog(trainer.args.output_dir)
        self.task: dict[str, Any] = {}
        """Name, model and command of the task, for the start entry."""
        self.began_at = 0
        """The step after which this training began."""
        self._begun = False

    @property
    def _on(self) -> bool:
        # Evaluation alone is not logged: its scores would be taken for those of the run whose log is in the folder.
        return bool(self.trainer.args.should_save) and self._begun

    def begin(self, checkpoint: Path | None, start: dict[str, Any]) -> None:
        self._begun = True
        self.began_at = _step_of(checkpoint) if checkpoint else 0
        if not self._on:
            return
        if checkpoint is None:
            self.log.start_over()
        facts: dict[str, Any] = {
            "resumed_at": self.began_at if checkpoint else None,
            "command": shlex.join(without_secrets([Path(sys.argv[0]).name, *sys.argv[1:]])),
            "versions": {"stoker": __version__, "torch": str(torch.__version__),
                         "transformers": transformers.__version__, "python": platform.python_version()},
            "machine": _machine_facts(),
            "process": facts_of(os.getpid()),
            "arguments": _arguments(self.trainer.args),
        }  # fmt: skip
        self.log.write("start", **{**facts, **start, **self.task})

    def train_begins(self) -> None:
        """Called when the model is optimised and the number of steps known."""
        if not self._on:
            return
        trainer, model = self.trainer, self.trainer.model
        self.log.write(
            "model",
            name=getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__,
            type=type(model).__name__,
            parameters=sum(p.numel() for p in model.parameters()),
            steps=trainer.state.max_steps,
            peak=trainer._meter.peak if trainer._meter else None,
        )
        if trainer._optimized is not None:
            from stoker.model import report

            done = report(model)
            self.log.write(
                "applied",
                parts=[list(part) for part in done.applied],
                left_alone=[list(one) for one in done.left_alone],
                settings=done.settings,
            )
        self._lengths()

    def _lengths(self) -> None:
        dataset = self.trainer.train_dataset
        if not hasattr(dataset, "__len__") or (not hasattr(dataset, "lengths") and len(dataset) > _LENGTHS_READ):
            return
        with contextlib.suppress(KeyError, TypeError, ValueError):
            lengths = lengths_of(dataset)
            width = max(int(np.ceil(lengths.max() / 48)), 1)
            counts, edges = np.histogram(lengths, bins=np.arange(0, lengths.max() + width + 1, width))
            self.log.write(
                "lengths", counts=counts.tolist(), edges=edges.tolist(), mean=float(lengths.mean()),
                longest=int(lengths.max()), rows=len(lengths), padded_to=self.trainer.padded_length,
            )  # fmt: skip

    def logged(self, logs: dict[str, Any]) -> None:
        if not self._on:
            return
        figures = {**logs, "step": self.trainer.state.global_step}
        if (name := loss_name(logs)) is not None:
            figures["loss"] = logs[name]
            meter = self.trainer._meter
            self.log.write(
                "step", phases=getattr(meter, "last_phases", None), peak=getattr(meter, "peak", None), **figures
            )
        elif any(name.startswith("eval_") for name in logs):
            self.log.write("evaluation", **figures)
        elif "train_runtime" in logs and self.trainer.state.global_step > self.began_at:
            self.log.write("trained", **figures)

    def write(self, kind: str, **values: Any) -> None:
        """Adds an entry."""
        if self._on:
            self.log.write(kind, **values)

    def end(self, reason: str) -> None:
        if self._on:
            self.log.write("end", reason=reason, step=self.trainer.state.global_step)


def loss_name(logs: dict[str, Any]) -> str | None:
    """The name of the loss in the figures of training steps; None if these are other figures.

    Trainers may rename it before they pass the figures on, as SetFit's does (`embedding_loss`). The learning rate tells such
    figures from what a script logs itself.
    """
    if "loss" in logs or "learning_rate" not in logs:
        return "loss" if "loss" in logs else None
    return next((name for name in logs if name.endswith("_loss")), None)


def _step_of(checkpoint: Path) -> int:
    """From its state, because a checkpoint may have any name (the hub uses `last-checkpoint`)."""
    return int(json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))["global_step"])


def _machine_facts() -> dict[str, Any]:
    machine = this_machine()
    rates = known(machine)
    return {
        "cpu": machine.model.name,
        "cores": len(machine.usable_cores),
        "threads": torch.get_num_threads(),
        "memory": machine.usable_memory,
        "gflops": rates.fp32_all if rates else None,
        "system": f"{platform.system()} {platform.release()}",
    }


def _arguments(args: Any) -> dict[str, Any]:
    """The arguments that differ from their defaults; tokens are never written."""
    changed = {}
    for one in dataclasses.fields(args):
        value = getattr(args, one.name, None)
        if value != one.default and not one.name.endswith("_token") and one.default_factory is dataclasses.MISSING:
            changed[one.name] = getattr(value, "value", value)
    return changed
