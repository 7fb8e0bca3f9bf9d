"""Finds out whether a loss reads hidden states at padding, before anything is trained with zeros in their place.

An optimized base model does not compute padding: zeros stand where stock transformers has values. Most losses never read
them. One that does (late interaction with query expansion, a distance to all hidden states of a teacher) must get stock's
values, and whether it does is known from its gradient only. So the first calls with padding return stock's values there, and
their backward passes are watched:

- No gradient reaches padding: nobody reads it, and from then on it is not computed.
- A gradient does: it is propagated through stock's computation, so that this step is exact, and from then on such calls run as
  in stock transformers.

Calls in which masked positions hold other tokens than padding (query expansion puts [MASK] there) are judged by themselves and
run as in stock until it is known that nobody reads them, also without gradients. Gradients are watched as long as training
lasts: if one reaches zeros later, `PaddingRead` ends the backward pass, because the loss was computed from those zeros.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from stoker.errors import UserError
from stoker.model.class_swap import ordinary, stock_class
from stoker.model.sequences import Sequences
from stoker.streams import above_progress_bars

__all__ = ["PaddingRead", "PaddingReaders", "StockStates", "warn_of_zeros"]

log = logging.getLogger("stoker")

_CHECKS = 2
"""Backward passes of a base model that have to ignore padding before it is no longer computed. One would do for most losses;
the second is for a batch in which all padding happens to have no influence, as with a maximum over positions."""

_EVALUATIONS = 8
"""Calls in evaluation mode, outside of no_grad, after which a model that was never differentiated counts as inference."""

_ROUNDING = 1e-7
"""A gradient at padding that is smaller than this part of the largest one is less than the rounding of fp32."""

READ = "the loss reads hidden states at padding"
TOKENS_READ = "the loss reads hidden states at masked positions that hold tokens"
MAYBE_READ = "masked positions hold tokens, whose hidden states may be read"

_warned: WeakSet[nn.Module] = WeakSet()


class PaddingRead(UserError):
    """The loss has begun to read hidden states at padding; those of the next call are stock's, so the step can be repeated."""


@dataclass
class _Record:
    """What is known of one base model and one kind of padding."""

    ignored: int = 0
    """Backward passes in which no gradient reached padding."""
    evaluations: int = 0
    read: bool = False
    known: bool = False


_RECORDS: WeakKeyDictionary[nn.Module, dict[bool, _Record]] = WeakKeyDictionary()
"""Per base model, one record for ordinary padding and one for masked positions that hold tokens."""


@dataclass(frozen=True, kw_only=True)
class PaddingReaders:
    """Who reads the padding of one call of a base model, and how the call is computed accordingly."""

    model: nn.Module
    padding: Tensor
    """(batch, length) bool. Never the first column: heads read the first token there, also in rows that begin with padding.
    Not of rows without a token, for which stock has no meaningful values either."""
    holds_tokens: bool
    record: _Record
    plan: Literal["zeros", "both", "stock"]
    """What is computed: real tokens only; those, and stock's values at padding beside them; the call as in stock."""

    @classmethod
    def of(cls, model: Any, call: dict[str, Any], sequences: Sequences) -> PaddingReaders | None:
        """None if the batch has no padding."""
        if sequences.mask is None:
            return None
        padding = ~sequences.mask & sequences.mask.any(1, keepdim=True)
        padding[:, 0] = False
        if not bool(padding.any()):
            return None
        holds_tokens = _holds_tokens(call.get("input_ids"), padding, getattr(model.config, "pad_token_id", None))
        record = _RECORDS.setdefault(model, {}).setdefault(holds_tokens, _Record())
        plan = _plan(model, call, record, holds_tokens)
        return cls(model=model, padding=padding, holds_tokens=holds_tokens, record=record, plan=plan)

    @property
    def reason(self) -> str | None:
        """Why the call runs as in stock, to be logged by the first rank; None while the first backward passes find it out."""
        if dist.is_available() and dist.is_initialized() and dist.get_rank() != 0:
            return None
        if self.record.known:
            return TOKENS_READ if self.holds_tokens else READ
        return None if torch.is_grad_enabled() or self.model.training else MAYBE_READ

    def fill(self, hidden: list[Tensor], stock: StockStates) -> list[Tensor]:
        """Hidden states (batch, length, width) with stock's values at padding."""
        values = _ValuesAtPadding.apply(self.padding, stock, *stock.trained())  # type: ignore[no-untyped-call]
        return [one.index_put((self.padding,), value) for one, value in zip(hidden, values, strict=True)]

    def watch(self, output: Any) -> None:
        """Notices in the backward pass whether the loss reads hidden states (batch, length, width) of `output` at padding."""
        if self.record.known and self.plan == "stock":
            return
        for hidden in _tensors(output):
            if hidden.requires_grad and hidden.dim() == 3 and hidden.shape[:2] == self.padding.shape:
                hidden.register_hook(self._check)  # type: ignore[no-untyped-call]

    def _check(self, gradient: Tensor) -> None:
        at_padding = float(gradient[self.padding].abs().amax())
        if self.plan == "zeros" and at_padding == 0.0:  # nearly always, so the rest of the gradient is not looked at
            return
        largest = float(gradient.abs().amax())
        if at_padding > _ROUNDING * largest:
            self.record.read = True
            if self.plan == "zeros":
                raise PaddingRead(_too_late(self.model))
        elif largest > 0.0:  # else it is a loss that does not depend on this call at all, as beyond a margin
            self.record.ignored += 1


def _tensors(output: Any) -> Iterator[Tensor]:
    """The tensors in the output of a model."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (tuple, dict)):
        for one in output.values() if isinstance(output, dict) else output:
            yield from _tensors(one)


def _holds_tokens(ids: Any, padding: Tensor, padding_id: int | None) -> bool:
    if not isinstance(ids, Tensor):
        return False
    masked = ids[padding]
    return bool((masked != (masked[0] if padding_id is None else padding_id)).any())


def _plan(
    model: nn.Module, call: dict[str, Any], record: _Record, holds_tokens: bool
) -> Literal["zeros", "both", "stock"]:
    if torch._C._current_graph_task_id() == -1:  # a checkpoint that recomputes this call must decide as the call did
        record.known = record.read or record.ignored >= _CHECKS
    if record.known:
        return "stock" if record.read else "zeros"
    if holds_tokens:
        return "stock"
    if not model.training:
        differentiable = torch.is_grad_enabled() and next(_trained(model, call), None) is not None
        if not differentiable or record.evaluations >= _EVALUATIONS:
            return "zeros"
        record.evaluations += 1
    # a sharded model cannot compute a batch a second time during the backward pass
    return "both" if all(map(ordinary, model.modules())) and not _sharded(model) else "stock"


def _sharded(model: nn.Module) -> bool:
    hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
    return any(str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith("torch.dist") for hook in hooks)


def _trained(model: nn.Module, call: dict[str, Any]) -> Iterator[Tensor]:
    """What the gradient of the hidden states is passed on to. The pooler is not a part of them."""
    pooler = {id(parameter) for parameter in _parameters(getattr(model, "pooler", None))}
    for one in (*model.parameters(), *call.values()):
        if isinstance(one, Tensor) and one.requires_grad and id(one) not in pooler:
            yield one


def _parameters(module: Any) -> Iterator[nn.Parameter]:
    return module.parameters() if isinstance(module, nn.Module) else iter(())


@dataclass(frozen=True, kw_only=True)
class StockStates:
    """The hidden states of one call as stock computes them, with the same random numbers whenever they are computed."""

    model: nn.Module
    call: dict[str, Any]
    run: Callable[[], list[Tensor]]
    random_state: Tensor

    @classmethod
    def of(cls, model: nn.Module, call: dict[str, Any], run: Callable[[], list[Tensor]]) -> StockStates:
        return cls(model=model, call=call, run=run, random_state=torch.get_rng_state())

    def trained(self) -> list[Tensor]:
        """In a frozen model a number that stands for the rest, so that there is a gradient to watch."""
        return list(_trained(self.model, self.call)) or [torch.zeros((), requires_grad=True)]

    def at(self, padding: Tensor) -> list[Tensor]:
        """(positions, width) of each hidden state. Values that are not finite, which nobody can use, are zeros."""
        with torch.random.fork_rng(devices=[]):  # the random numbers of what follows stay as they are
            torch.set_rng_state(self.random_state)
            states = [state[padding] for state in self.run()]
        return [torch.where(state.isfinite(), state, 0.0) for state in states]


class _ValuesAtPadding(torch.autograd.Function):
    """Stock's hidden states at padding. Backward computes them again, but only if a gradient has arrived.

    The parameters are inputs, and their gradients outputs, so that autograd adds them to those of the real tokens before DDP
    or any hook sees them.
    """

    @staticmethod
    def forward(ctx: Any, padding: Tensor, stock: StockStates, *trained: Tensor) -> tuple[Tensor, ...]:
        ctx.padding, ctx.stock = padding, stock
        ctx.save_for_backward(*trained)
        ctx.set_materialize_grads(False)
        return tuple(stock.at(padding))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        trained = ctx.saved_tensors
        read = [place for place, gradient in enumerate(gradients) if gradient is not None and bool(gradient.any())]
        if not read:
            return (None,) * (2 + len(trained))
        with torch.enable_grad():
            values = ctx.stock.at(ctx.padding)
        read = [place for place in read if values[place].requires_grad]  # not in a frozen model
        if not read:
            return (None,) * (2 + len(trained))
        found = torch.autograd.grad(
            [values[place] for place in read], trained, [gradients[place] for place in read], allow_unused=True
        )
        return (None, None, *found)


def _too_late(model: nn.Module) -> str:
    return (
        f"{stock_class(type(model)).__name__}: the loss has begun to read hidden states at padding, where zeros stood because no "
        "loss had read them before; the step was not taken; repeat it (from now on they are computed as in stock "
        "transformers), or keep padding from the start with stoker.optimize(model, unpad=False)"
    )


def warn_of_zeros(model: nn.Module, what: str) -> None:
    if model in _warned:
        return
    _warned.add(model)
    with above_progress_bars():
        log.warning(
            "%s: %s; at padding they are zeros, where stock transformers has values; apply the attention mask, or keep padding "
            "with stoker.optimize(model, unpad=False) (logged once)",
            stock_class(type(model)).__name__,
            what,
        )
