"""Warns once if a loss uses the hidden states at padding, which are zeros in an optimized model and values in stock.

The gradient tells: it is zero at padding if the loss ignores padding. transformers' heads, masked pooling and labels of -100
cause no warning; a mean over all positions, or a distance between all hidden states, does.
"""

from __future__ import annotations

import logging
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, nn

from stoker.model.class_swap import stock_class
from stoker.model.sequences import Sequences

__all__ = ["warn_if_loss_uses_padding", "warn_of_zeros"]

log = logging.getLogger("stoker")

_CHECKS = 8
"""Backward passes that are checked per model: a loss that uses padding does so from the start."""

_checked: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
_warned: WeakSet[nn.Module] = WeakSet()


def warn_if_loss_uses_padding(model: nn.Module, hidden: Tensor, sequences: Sequences) -> None:
    """Checks the gradient of `hidden` (batch, length, width) in the backward pass."""
    mask = sequences.mask
    if mask is None or not hidden.requires_grad or model in _warned or _checked.get(model, 0) >= _CHECKS:
        return
    _checked[model] = _checked.get(model, 0) + 1
    padding = ~mask
    padding[:, 0] = False  # heads read the first token there, also in rows that begin with padding or have no token

    def check(gradient: Tensor) -> None:
        if bool(gradient[padding].any()):
            warn_of_zeros(model, "the loss depends on hidden states at padding")

    hidden.register_hook(check)  # type: ignore[no-untyped-call]


def warn_of_zeros(model: nn.Module, what: str) -> None:
    if model in _warned:
        return
    _warned.add(model)
    log.warning(
        "%s: %s; at padding they are zeros, where stock transformers has values; apply the attention mask, or keep padding "
        "with stoker.optimize(model, unpad=False) (logged once)",
        stock_class(type(model)).__name__,
        what,
    )
