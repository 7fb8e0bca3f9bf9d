"""TRL's SFTTrainer and DPOTrainer with what Stoker's Trainer adds: speed, figures, checkpoints that survive, exact resume.

Both are combined by inheritance: every method of Stoker's Trainer calls the next one, which is TRL's. In training, the loss is
that of the model itself, which scores the labelled tokens only; TRL's own scores every position on CPUs and recomputes them.
"""

from dataclasses import dataclass, field
from typing import Any

import trl

from stoker.hf.arguments import TrainingArguments
from stoker.hf.trainer import Trainer
from stoker.requires import require
from stoker.tasks.combine import bases

# No `from __future__ import annotations`: HfArgumentParser reads the types of these fields.

__all__ = ["DPOArguments", "DPOTrainer", "SFTArguments", "SFTTrainer"]

require("TRL trainers")


@dataclass
class _Defaults:
    """What differs from TRL's defaults: training is what is done, in fp32, activations are kept."""

    do_train: bool = field(default=True, metadata={"help": "Train."})
    bf16: bool = field(default=False, metadata={"help": "bf16 activations with fp32 weights, on any CPU."})
    gradient_checkpointing: bool = field(
        default=False,
        metadata={"help": "Compute activations again in the backward pass, which takes less memory and more time."},
    )
    max_length: int | None = field(default=1024, metadata={"help": "Maximum tokens of a row."})
    trust_remote_code: bool = field(default=False, init=False)  # an option of the model


@dataclass
class SFTArguments(_Defaults, *bases(TrainingArguments, trl.SFTConfig)):  # type: ignore[misc]
    """TRL's SFTConfig with Stoker's arguments."""

    # Set by --loss_on.
    completion_only_loss: bool | None = field(default=None, init=False)
    assistant_only_loss: bool = field(default=False, init=False)


@dataclass
class DPOArguments(_Defaults, *bases(TrainingArguments, trl.DPOConfig)):  # type: ignore[misc]
    """TRL's DPOConfig with Stoker's arguments."""


class _WithoutTelemetry:
    def _send_telemetry(self) -> None:
        """TRL would report to the hub that it is used, and for which kind of model."""


class _ModelLoss(trl.SFTTrainer):  # type: ignore[misc]
    """TRL's SFTTrainer with the loss of the model in training, and TRL's in evaluation, where it needs no logits either."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        base = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        plain = self.args.loss_type == "nll" and not self.aux_loss_enabled
        # TRL has replaced `forward` in the instance, where it would hide Stoker's.
        self._scored = base.__dict__.pop("forward", None) if plain else None

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if self._scored is not None and self.model.training:
            inputs["use_cache"] = False
            return super(trl.SFTTrainer, self).compute_loss(model, inputs, return_outputs, num_items_in_batch)
        found = super().compute_loss(self._scored or model, inputs, return_outputs, num_items_in_batch)
        if self._scored is not None:
            self._metrics["eval"].pop("num_tokens", None)  # TRL counts tokens in its own loss: it would log 0
        return found


class SFTTrainer(_WithoutTelemetry, *bases(Trainer, _ModelLoss)):  # type: ignore[misc]
    """Stoker's Trainer for supervised fine-tuning; takes what TRL's SFTTrainer takes."""


class _ArgumentsSecond(trl.DPOTrainer):  # type: ignore[misc]
    """TRL's DPOTrainer with the arguments in second place, as in every other Trainer."""

    def __init__(self, model: Any, args: Any, **named: Any) -> None:
        super().__init__(model=model, args=args, **named)


class DPOTrainer(_WithoutTelemetry, *bases(Trainer, _ArgumentsSecond)):  # type: ignore[misc]
    """Stoker's Trainer for preference pairs; takes what TRL's DPOTrainer takes, by keyword."""
