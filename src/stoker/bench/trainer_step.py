"""One training step as transformers' Trainer takes it: forward, backward, clipping, fused AdamW; stock, or with Stoker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stoker.bench.sides import Step

__all__ = ["LossOf", "optimized_step", "stock_step"]

LossOf = Callable[[Any, int], Any]
"""The loss of a model on the batch with this number."""


def stock_step(
    model: Any,
    loss_of: LossOf,
    prepare: Callable[[Any, Any], Any] = lambda model, _: model,
    clip: Callable[..., Any] | None = None,
    autocast: bool = False,
    lr: float = 3e-5,
) -> Step:
    """The step of a model that `prepare` may change; it returns the loss."""
    import torch

    clip = clip or torch.nn.utils.clip_grad_norm_
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr, fused=True)
    model = prepare(model.train(), optimizer)

    def step(number: int) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = loss_of(model, number)
        loss.backward()
        clip(parameters, 1.0)
        optimizer.step()
        model.zero_grad()
        return float(loss.detach())

    return step


def optimized_step(model: Any, loss_of: LossOf, dtype: str = "float32", lr: float = 3e-5, **switches: Any) -> Step:
    """The same step after `stoker.optimize`, with Stoker's clipping, as Stoker's Trainer does it."""
    import torch

    from stoker.model import clip_grad_norm_, optimize

    def prepare(model: Any, optimizer: Any) -> Any:
        return optimize(model, optimizer, dtype=getattr(torch, dtype), **switches)[0]

    return stock_step(model, loss_of, prepare, clip_grad_norm_, lr=lr)
