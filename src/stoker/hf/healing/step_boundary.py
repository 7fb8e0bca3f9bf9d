"""What a Trainer has to remember between two steps so that the next one can be repeated: everything but weights and optimizer.

Those two change only in the optimizer's step, in which ranks do not communicate. So after a failed operation they are still what
they were at the last boundary, whereas counters, logs and random numbers may have moved on.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from transformers.trainer_callback import ExportableState, TrainerState

from stoker.distributed import messages
from stoker.hf.checkpointing import random_state

if TYPE_CHECKING:
    from stoker.hf.trainer import Trainer

__all__ = ["AFTER_EPOCH", "AFTER_STEP", "NEXT_STEP", "Boundary", "exchange_random_states", "use_random_state"]

AFTER_STEP, AFTER_EPOCH, NEXT_STEP = 0, 1, 2
"""Up to three boundaries follow a step: its end, the end of its epoch, and the beginning of the next step, when what the
callbacks asked for has been done."""
_REQUESTS = ("should_log", "should_evaluate", "should_save", "should_epoch_stop", "should_training_stop")
_FIGURES = ("_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step", "_initial_num_input_tokens_seen",
            "current_flos")  # fmt: skip
_RANDOM_BYTES = 16 * 1024
"""Room for the state of three generators in base64: torch's has 5,056 bytes, Python's and NumPy's 2,500 each."""


@dataclass
class Boundary:
    """The Trainer between two steps. It is sent to other ranks, so it holds no tensors of the model."""

    position: tuple[int, int]
    """The number of steps done, and AFTER_STEP, AFTER_EPOCH or NEXT_STEP."""
    random: list[torch.Tensor]
    """The state of the random number generators of each rank, as `exchange_random_states` returns them."""
    requests: dict[str, bool]
    """What the callbacks have asked for, and what is to be done before the next step."""
    state: Any
    """A copy of TrainerState."""
    callbacks: list[dict[str, Any]]
    """The states of the callbacks that have one, such as early stopping."""
    scheduler: dict[str, Any]
    groups: list[dict[str, Any]]
    """The settings of the optimizer's groups of parameters, the learning rate among them."""
    figures: dict[str, Any]
    """Sums that the Trainer logs. They differ between ranks."""
    loss: float | None
    """The sum of this rank's losses since the last log entry; None where transformers keeps it to itself (before version 5)."""
    learning_rate: float | None
    """Of the last step, for the log."""
    began: float
    """When training began, by the clock of the first process."""
    repeats: int = 0
    """How often training was continued from here."""

    @classmethod
    def take(
        cls,
        trainer: Trainer,
        random: list[torch.Tensor],
        part: int,
        *,
        learning_rate: float | None,
        began: float,
        repeats: int = 0,
    ) -> Boundary:
        state = copy.copy(trainer.state)
        state.log_history = state.log_history[:]
        loss = getattr(trainer, "_tr_loss", None)
        return cls(
            position=(state.global_step, part),
            random=random,
            requests={name: getattr(trainer.control, name) for name in _REQUESTS},
            state=state,
            callbacks=[copy.deepcopy(callback.state()) for callback in _stateful(trainer)],
            scheduler=copy.deepcopy(trainer.lr_scheduler.state_dict()),
            groups=[_settings(group) for group in trainer.optimizer.param_groups],
            figures={name: getattr(trainer, name) for name in _FIGURES if hasattr(trainer, name)},
            loss=None if loss is None else float(loss),
            learning_rate=learning_rate,
            began=began,
            repeats=repeats,
        )

    @classmethod
    def from_rank(cls, own: Boundary | None, sender: int) -> Boundary:
        """The boundary of one rank; `own` is this rank's. A collective."""
        values = None
        if own is not None:
            values = {field.name: getattr(own, field.name) for field in dataclasses.fields(own)}
            values["state"] = dataclasses.asdict(own.state)  # what trainer_state.json has
        sent = messages.broadcast(values, sender)
        if own is not None and dist.get_rank() == sender:
            return own
        return cls(**{**sent, "state": TrainerState(**sent["state"])})

    def with_figures_of(self, other: Boundary | None) -> Boundary:
        """This boundary with the sums of another one of the same position, which this rank had in memory."""
        if other is None or other.position != self.position:
            return self
        return dataclasses.replace(self, figures=other.figures, loss=other.loss)

    def restore_callbacks(self, trainer: Trainer) -> None:
        """Sets the callbacks' states and what they have asked for."""
        for callback, saved in zip(_stateful(trainer), self.callbacks, strict=False):
            for name, value in saved.get("attributes", {}).items():
                setattr(callback, name, copy.deepcopy(value))
        for name, value in self.requests.items():
            setattr(trainer.control, name, value)

    def restore_figures(self, trainer: Trainer) -> None:
        """Sets the sums that the Trainer logs, which it has just set to zero."""
        for name, value in self.figures.items():
            # The loss since the last log entry is lost in transformers 4: then the interval starts here, too.
            if self.loss is not None or name != "_globalstep_last_logged":
                setattr(trainer, name, value)
        if self.loss is not None:
            trainer._tr_loss = torch.tensor(self.loss, device=trainer.args.device)

    def restore_groups(self, optimizer: Any) -> None:
        for group, saved in zip(optimizer.param_groups, self.groups, strict=True):
            group.update(copy.deepcopy(saved))


def _stateful(trainer: Trainer) -> list[Any]:
    return [one for one in trainer.callback_handler.callbacks if isinstance(one, ExportableState)]


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}


def exchange_random_states() -> list[torch.Tensor]:
    """The state of the generators of each rank. A collective: a rank that returns knows that all ranks have called it."""
    (version, numbers, normal), numpys, torchs = random_state.current()
    state = ((version, np.asarray(numbers, dtype=np.uint32), normal), numpys, torchs)
    data = messages.encode(state).ljust(_RANDOM_BYTES)  # JSON may end with blanks
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, own)
    return rows


def use_random_state(row: torch.Tensor) -> None:
    """Sets the generators of this process to a state that `exchange_random_states` has returned."""
    (version, numbers, normal), numpys, torchs = messages.decode(row.numpy().tobytes())
    random_state.use(((version, tuple(numbers.tolist()), normal), numpys, torchs))
