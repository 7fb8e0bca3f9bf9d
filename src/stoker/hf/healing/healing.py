"""Keeps a Trainer in its training loop when another rank is killed, and brings the process that takes its place into the loop.

After a failed operation every rank leaves the loop, meets the others and the new process, and enters the loop again as if it
resumed from a checkpoint of the last complete step. That checkpoint is in memory: the ranks that have it give it to the others.

    before each optimizer step    all ranks exchange the states of their random number generators. A rank that has them all
                                  takes the step, others do not; so those that are furthest know what the others need.
    after each step               `Boundary.take`
    a rank is lost                `HealingGroup.leave`, `RosterStore.agree`, `HealingGroup.form`
    the loop is entered again     weights before DDP wraps the model, then the optimizer, then everything in the boundary;
                                  all ranks compare checksums before the first step.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from stoker.distributed import messages
from stoker.distributed.lost_rank import LostRank, healing_directory, is_joining, joined, replaceable
from stoker.distributed.preload import Preload
from stoker.distributed.regroup import HealingGroup, NotFormed, is_lost_connection
from stoker.distributed.roster import Entry, Roster, RosterFailed
from stoker.errors import first_line
from stoker.hf.checkpointing import run_facts
from stoker.hf.checkpointing.interrupts import Interrupted
from stoker.hf.healing import state_transfer
from stoker.hf.healing.step_boundary import (
    AFTER_EPOCH,
    AFTER_STEP,
    NEXT_STEP,
    Boundary,
    exchange_random_states,
    use_random_state,
)
from stoker.hf.secrets import is_secret
from stoker.requires import supported

if TYPE_CHECKING:
    from stoker.hf.trainer import Trainer

__all__ = ["Healing"]

log = logging.getLogger("stoker")

_ATTEMPTS = 5
"""How many times the ranks try to form a group after a failure, if more of them are lost meanwhile."""
_REPEATS = 3
"""How many times the same step is repeated. A rank that is lost again and again in one step would be lost for ever."""


class Healing:
    """Belongs to one Trainer. Without `stoker launch --heal` it does nothing."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._trainings = 0
        self._active = False
        """Whether the training loop runs and a lost rank can be replaced."""
        self._boundary: Boundary | None = None
        """The last one; None if this process has no state to give."""
        self._in_optimizer_step = False
        self._random: list[torch.Tensor] = []
        """What was exchanged before the optimizer step that is being done."""
        self._taken: Boundary | None = None
        """What the loop continues from, while it is being entered again."""
        self._roster: Roster | None = None
        self._replaced: LostRank | None = None
        """The process whose place this one takes, until the run has healed."""
        self._folder: Path | None = None
        """Where transformers finds the state of the Trainer when the loop is entered again."""
        self._reenters = False
        """Whether the loop is being entered again by a process that was in it before."""
        self._began = 0.0
        self._noticed = 0.0
        """When this process noticed the last loss, by time.monotonic()."""
        self._learning_rate: float | None = None
        self._context = contextlib.ExitStack()

    # The training loop

    def run(self, loop: Callable[..., Any], named: dict[str, Any]) -> Any:
        """Runs transformers' training loop to its end, whatever happens to other ranks."""
        self._trainings += 1
        group, directory = HealingGroup.current, healing_directory()
        if group is None or directory is None:
            return loop(**named)
        if reason := self._why_not(named):
            return self._run_without(reason, loop, named)
        self._active, self._replaced = True, LostRank.replaced_by_this_process()
        self._boundary, self._began = None, time.time()
        try:
            if is_joining():
                named = {**named, "resume_from_checkpoint": self._regroup(group, directory, "")}
            while True:
                try:
                    return self._enter(loop, named)
                except Exception as error:
                    failure = self._failure(error)
                    if failure is None:
                        raise
                    error.__traceback__ = error.__cause__ = error.__context__ = (
                        None  # they hold the batch and its graph
                    )
                self._leave_loop()
                named = {**named, "resume_from_checkpoint": self._regroup(group, directory, failure)}
        finally:
            self._active = False
            self._context.close()
            self._taken = self._folder = None

    def _why_not(self, named: dict[str, Any]) -> str:
        """Why ranks of this training cannot be replaced; empty if they can."""
        trainer, args = self._trainer, self._trainer.args
        reasons = {
            "transformers has changed": not supported("Trainer: healing"),
            "this is not the first call of train()": self._trainings > 1,
            "it is a trial of a hyperparameter search": named.get("trial") is not None,
            "local_sgd keeps other weights on each rank": bool(getattr(args, "local_sgd", None)),
            "auto_find_batch_size is set": args.auto_find_batch_size,
            "ignore_data_skip is set": args.ignore_data_skip,
            "torch_compile is set": args.torch_compile,
            "the data set is a stream": isinstance(trainer.train_dataset, torch.utils.data.IterableDataset),
        }
        return next((reason for reason, holds in reasons.items() if holds), "")

    def _run_without(self, reason: str, loop: Callable[..., Any], named: dict[str, Any]) -> Any:
        if is_joining():
            raise RosterFailed(f"this process cannot take the place of a lost rank: {reason}")
        if self._trainer.is_world_process_zero():
            log.warning("--heal is ignored because %s: if a rank is killed, all ranks are restarted from the last checkpoint",
                        reason)  # fmt: skip
        return loop(**named)

    def _enter(self, loop: Callable[..., Any], named: dict[str, Any]) -> Any:
        args = self._trainer.args
        evaluates_first = args.eval_on_start
        args.eval_on_start = evaluates_first and self._taken is None
        try:
            return loop(**named)
        finally:
            args.eval_on_start = evaluates_first

    def _failure(self, error: Exception) -> str | None:
        """The text of an error after which the ranks meet again; None if it has to end the run."""
        if not is_lost_connection(error):
            return None
        self._noticed = time.monotonic()
        text = f"{type(error).__name__}: {first_line(error)}"
        if self._boundary is None and self._taken is None:
            log.warning("a rank was lost before the first step of this training, which cannot be repeated: %s", text)
            return None
        return text

    def _leave_loop(self) -> None:
        """Takes the model and the optimizer out of what the loop has wrapped around them."""
        trainer = self._trainer
        trainer.ranks.leave_ddp()
        wrapped = trainer.model_wrapped
        if isinstance(wrapped, DistributedDataParallel):
            wrapped._remove_autograd_hooks()  # type: ignore[no-untyped-call]
        _restore_forward(trainer.model)
        trainer.model_wrapped = trainer.model
        trainer.model.zero_grad(set_to_none=True)
        trainer.optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # inside accelerate's
        trainer.accelerator.gradient_state.dataloader_references = [None]
        del wrapped
        gc.collect()  # the graph of the failed step

    # Meeting the other ranks

    def _regroup(self, group: HealingGroup, directory: Path, failure: str) -> str:
        """Forms a group with the process that replaces the lost one; returns the folder to resume from."""
        try:
            for _ in range(_ATTEMPTS):
                group.leave()
                roster = group.roster_store.agree(
                    None if self._boundary is None or self._in_optimizer_step else self._boundary.position,
                    self._facts(),
                    self._replaced.signal if self._replaced else None,
                    seconds=self._trainer.args.ddp_timeout,
                    check=self._end_on_signal,
                )
                self._require_healable(roster)
                try:
                    group.form(roster, self._end_on_signal)
                    joined()
                    return self._take_boundary(roster, directory)
                except Exception as error:
                    if not isinstance(error, NotFormed) and not is_lost_connection(error):
                        raise
            raise RosterFailed(f"{_ATTEMPTS} times another rank was lost while the ranks met again")
        except RosterFailed as error:
            text = f"the run cannot continue without a restart: {error}" + (f" ({failure})" if failure else "")
            raise RuntimeError(text) from None

    def _end_on_signal(self) -> None:
        received = self._trainer._interrupts.received
        if received is not None:
            log.warning("no checkpoint can be saved while a rank is missing; the last one is unchanged")
            raise Interrupted(received)

    def _facts(self) -> str:
        trainer = self._trainer
        facts = run_facts.facts_of(trainer.model, trainer._data_facts, trainer.args)
        facts["run"].pop("threads")  # machines may differ
        return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]

    @staticmethod
    def _require_healable(roster: Roster) -> None:
        if not roster.lost:
            raise RosterFailed("no rank was lost, but an operation between them failed")
        if len({entry.facts for entry in roster.entries}) > 1:
            raise RosterFailed(
                "the model, the data or the settings of the new process differ from those of the other ranks"
            )

    def _take_boundary(self, roster: Roster, directory: Path) -> str:
        trainer, donor = self._trainer, roster.donor
        boundary = Boundary.from_rank(self._boundary, donor.rank)
        if boundary.repeats >= _REPEATS:
            raise RosterFailed(
                f"step {boundary.position[0] + 1} was repeated {_REPEATS} times, and a rank was lost each time"
            )
        boundary.repeats += 1
        self._taken, self._roster = boundary.with_figures_of(self._boundary), roster
        self._reenters = self._replaced is None
        if self._boundary is not None and self._boundary.position != boundary.position:
            self._boundary = None  # its weights are about to be overwritten
        self._context.callback((temporary := TemporaryDirectory(dir=directory)).cleanup)
        self._folder = Path(temporary.name)
        state = boundary.state
        if (
            getattr(state, "best_global_step", None) is not None
        ):  # other ranks than the first keep the path of a temporary folder
            best = Path(trainer._get_output_dir(None)) / f"checkpoint-{state.best_global_step}"
            state.best_model_checkpoint = str(best) if best.is_dir() else state.best_model_checkpoint
        state.save_to_json(str(self._folder / "trainer_state.json"))
        if not self._reenters:
            trainer.recorder.begin(self._folder, {})
        return str(self._folder)

    # While the loop is entered again

    @property
    def keeps_optimizer(self) -> bool:
        """Whether the loop is entered again by a process that has an optimizer already."""
        return self._taken is not None and self._reenters

    def before_wrapping(self) -> None:
        """The model is about to be wrapped in DDP, which sends rank 0's weights to all."""
        if self._taken is not None and self._roster is not None:
            state_transfer.send_weights(self._trainer.model, self._roster.donor.rank)
        if self.keeps_optimizer:
            handler = self._trainer.callback_handler
            handler.on_train_begin = self._on_train_begin_again  # the callbacks were told when training began

    def _on_train_begin_again(self, args: Any, state: Any, control: Any) -> Any:
        handler = self._trainer.callback_handler
        del handler.on_train_begin
        control.should_training_stop = False
        return self._trainer._events.on_train_begin(args, state, control, train_dataloader=handler.train_dataloader)

    def loads_optimizer(self) -> bool:
        """Loads the optimizer and the scheduler from memory; False if the loop was not entered because a rank was lost."""
        taken, trainer = self._taken, self._trainer
        if taken is None or self._roster is None:
            return False
        sent = state_transfer.send_optimizer_state(trainer.optimizer, self._roster.donor.rank)
        if self._boundary is None:
            groups = trainer.optimizer.state_dict()["param_groups"]
            trainer.optimizer.load_state_dict({"state": sent, "param_groups": groups})
        trainer.lr_scheduler.load_state_dict(taken.scheduler)
        taken.restore_groups(trainer.optimizer)
        return True

    def loads_random_state(self, checkpoint: str | None) -> bool:
        """Sets the random number generators from memory; False if `checkpoint` is a real one."""
        if self._folder is None or checkpoint != str(self._folder) or self._boundary is None:
            return False
        use_random_state(self._boundary.random[self._trainer.args.process_index])
        return True

    def random_state_loaded(self) -> None:
        """The run was resumed from a real checkpoint; from now on it can heal. A collective."""
        if self._active and self._boundary is None:
            self._start(exchange_random_states())

    def train_begins(self, *, resumed: bool) -> bool:
        """Returns whether the loop was entered again after a loss; then everything is as it was. A collective."""
        if not self._active:
            return False
        if self._taken is None:
            if not isinstance(self._trainer.model_wrapped, DistributedDataParallel):
                self._give_up("the model is not wrapped in DDP")
            elif not resumed:  # else the generators are set later
                self._start(exchange_random_states())
            return False
        self._restore()
        return True

    def _start(self, random: list[torch.Tensor]) -> None:
        self._boundary = self._take(random, AFTER_EPOCH)
        self._mark()

    def _take(self, random: list[torch.Tensor], part: int, repeats: int = 0) -> Boundary:
        rate = self._learning_rate
        return Boundary.take(self._trainer, random, part, learning_rate=rate, began=self._began, repeats=repeats)

    def _mark(self) -> None:
        directory = healing_directory()
        if directory is not None:
            rank = self._trainer.args.process_index
            Preload.of_this_process(is_secret).write(directory, rank)
            self._context.enter_context(replaceable(directory, rank))

    def _give_up(self, reason: str) -> None:
        self._active = False
        self._context.close()
        if self._trainer.is_world_process_zero():
            log.warning("--heal is ignored from now on because %s", reason)

    def _restore(self) -> None:
        trainer, taken = self._trainer, self._taken
        assert taken is not None
        taken.restore_callbacks(trainer)
        taken.restore_figures(trainer)
        state_transfer.require_same_state(trainer.model, trainer.optimizer)
        self._report()
        self._boundary, self._began, self._learning_rate = taken, taken.began, taken.learning_rate
        self._taken, self._in_optimizer_step, self._reenters = None, False, False
        if self._replaced is not None:
            self._replaced = None
            self._mark()
        self._make_up(taken)

    def _report(self) -> None:
        """Rank 0 logs what happened."""
        trainer, roster, taken = self._trainer, self._roster, self._taken
        assert roster is not None
        assert taken is not None
        seconds = self._seconds_since_loss(roster)
        if not trainer.is_world_process_zero():
            return
        step = taken.position[0]
        log.warning("%s", _healed_sentence(roster.lost, step, trainer.state.max_steps, seconds))
        for entry in roster.lost:
            trainer.recorder.write("healed", step=step, rank=entry.rank, signal=entry.signal, seconds=round(seconds, 3))

    def _seconds_since_loss(self, roster: Roster) -> float:
        """As the keeper of the lost rank saw it, or, if that was lost with its machine, as another rank did. A collective."""
        own = self._replaced.seconds_ago if self._replaced else time.monotonic() - self._noticed
        lost = roster.lost[0]
        return float(messages.broadcast(own, lost.rank if lost.signal else roster.donor.rank))

    def _make_up(self, boundary: Boundary) -> None:
        """What the step before the loss was to be followed by: logging, an evaluation, a checkpoint, the end of an epoch."""
        trainer, pending = self._trainer, self._trainer._pending_evaluation
        pending.nothing_left = False
        pending.step_ended(trainer.args, trainer.state, trainer.control)
        pending.log_evaluate_and_save(boundary.learning_rate)
        step, part = boundary.position
        if part == AFTER_STEP and step > 0 and trainer.state.epoch == int(trainer.state.epoch):
            handler = trainer.callback_handler
            trainer.control = handler.on_epoch_end(trainer.args, trainer.state, trainer.control)
            pending.log_evaluate_and_save(boundary.learning_rate)
        # transformers would train one more step before it checks either of these.
        pending.nothing_left = trainer.control.should_training_stop or step >= trainer.state.max_steps

    # Steps

    def step_begins(self) -> None:
        self._follow_up(NEXT_STEP)

    def before_optimizer_step(self) -> None:
        if self._active:
            self._random = exchange_random_states()
            self._in_optimizer_step = True

    def after_optimizer_step(self) -> None:
        if self._active:
            trainer = self._trainer
            self._learning_rate = trainer._get_learning_rate()  # before the scheduler changes it

    def step_ended(self) -> None:
        if not self._active or not self._random:
            return
        self._boundary = self._take(self._random, AFTER_STEP)
        self._in_optimizer_step = False

    def epoch_ended(self) -> None:
        self._follow_up(AFTER_EPOCH)

    def _follow_up(self, part: int) -> None:
        """Another boundary after the same step."""
        before = self._boundary
        if self._active and before is not None:
            self._boundary = self._take(before.random, part, before.repeats)

    def first_began(self, began: float) -> float:
        """When training began, before any rank was lost."""
        return min(began, self._began) if self._active else began


def _restore_forward(model: torch.nn.Module) -> None:
    """Removes the mixed precision that accelerate has wrapped around `forward`, so that it can be wrapped again.

    accelerate's own `unwrap_model` would also remove the model's own decorators, which are wrappers, too.
    """
    original = model.__dict__.pop("_original_forward", None)
    if original is not None:
        del model.__dict__["forward"]
        if model.forward != original:
            model.forward = original


def _healed_sentence(lost: Sequence[Entry], step: int, last_step: int, seconds: float) -> str:
    names = " and ".join(
        f"rank {entry.rank} ({f'killed by signal {entry.signal}' if entry.signal else 'with its machine'})"
        for entry in lost
    )
    if len(lost) == 1:
        happened = f"{names} was lost after step {step}; a new process took its place after {seconds:.1f} s"
    else:
        happened = f"{names} were lost after step {step}; new processes took their places after {seconds:.1f} s"
    return f"{happened}, and step {step + 1} is repeated" if step < last_step else happened
