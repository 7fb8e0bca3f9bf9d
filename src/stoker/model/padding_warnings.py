"""Says once when somebody uses hidden states at padding, which are zeros here and values in stock.

Known from the gradient: where a loss takes no notice of padding, the gradient there is zero. Heads of transformers, pooling
with the mask and labels of -100 pass; a mean over all positions, or a distance of all hidden states, does not.
"""

from __future__ import annotations

import logging
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, nn

from stoker.model.class_swap import stock_class
from stoker.model.sequences import Sequences

__all__ = ["warn_if_padding_counts", "warn_of_zeros"]

log = logging.getLogger("stoker")

_LOOKS = 8
"""Gradients that are looked at, per model: a loss that uses padding does so from the start."""

_looked: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
_warned: WeakSet[nn.Module] = WeakSet()


def warn_if_padding_counts(model: nn.Module, hidden: Tensor, sequences: Sequences) -> None:
    """Looks at the gradient of `hidden` (batch, length, width) when there is one."""
    mask = sequences.mask
    if mask is None or not hidden.requires_grad or model in _warned or _looked.get(model, 0) >= _LOOKS:
        return
    _looked[model] = _looked.get(model, 0) + 1
    padding = ~mask
    padding[:, 0] = (
        False  # heads look there for the first token, also of a row that begins with padding or has no token
    )

    def look(gradient: Tensor) -> None:
        if bool(gradient[padding].any()):
            warn_of_zeros(model, "the loss depends on hidden states at padding;")

    hidden.register_hook(look)


def warn_of_zeros(model: nn.Module, what: str) -> None:
    if model in _warned:
        return
    _warned.add(model)
    log.warning(
        "%s: %s at padding they are zeros, where stock has values; mask them out, or keep padding in with "
        "stoker.optimize(model, unpad=False) (said once)",
        stock_class(type(model)).__name__,
        what,
    )
