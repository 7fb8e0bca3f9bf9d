"""The experts that a model chooses for its tokens, and the same model with the choices of another run.

Rounding may decide between two experts with nearly the same score, and then a token's result is another one altogether. Such a
run is compared after the choices of the reference were made for it: what is left is rounding alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["Forced", "Recorded"]

_TOP = (torch.topk, Tensor.topk)
_MAX = (torch.max, Tensor.max)


class _Choices(TorchFunctionMode):
    """Sees every choice of the largest of some scores that has a row for each token."""

    def __init__(self, masks: Iterable[Tensor]) -> None:
        super().__init__()
        self._masks = [mask.flatten() for mask in masks]
        """Which positions of the batch are real; a second one is the decoder's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        result = func(*args, **options)
        if func not in _TOP and not (func in _MAX and isinstance(result, torch.return_types.max)):
            return result
        scores, given = args[0], args[2:3] if func in _TOP else args[1:2]
        if options.get("dim", given[0] if given else -1) not in (-1, scores.dim() - 1):
            return result
        rows = scores.shape[:-1].numel()
        for place, real in enumerate(self._masks):
            if rows in (real.numel(), int(real.sum())):
                chosen = self._chosen(place, result.indices.reshape(rows, -1), rows == real.numel())
                keeps = result.indices.dim() == scores.dim()
                chosen = chosen.view(result.indices.shape if keeps else (*result.indices.shape, 1))
                values = scores.gather(-1, chosen)
                return type(result)((values, chosen) if keeps else (values.squeeze(-1), chosen.squeeze(-1)))
        return result

    def _chosen(self, place: int, indices: Tensor, padded: bool) -> Tensor:
        """What takes the place of a choice (tokens, number) for the tokens of a mask."""
        raise NotImplementedError


class Recorded(_Choices):
    """Records the choices for real tokens, in the order in which they are made."""

    def __init__(self, masks: Iterable[Tensor]) -> None:
        super().__init__(masks)
        self.choices: dict[int, list[Tensor]] = {}

    def _chosen(self, place: int, indices: Tensor, padded: bool) -> Tensor:
        self.choices.setdefault(place, []).append(indices[self._masks[place]] if padded else indices)
        return indices


class Forced(_Choices):
    """Replaces choices by those of another run, and counts how many are other ones."""

    def __init__(self, masks: Iterable[Tensor], choices: dict[int, list[Tensor]]) -> None:
        super().__init__(masks)
        self._choices = choices
        self._calls: dict[tuple[int, bool], int] = {}
        """How many there were, separately with padding and without: a call of a model may compute both."""
        self.total = 0
        self.different = 0

    def _chosen(self, place: int, indices: Tensor, padded: bool) -> Tensor:
        call = self._calls[place, padded] = self._calls.get((place, padded), -1) + 1
        made = self._choices.get(place, [])
        wanted = made[call % len(made)] if made else None
        real = self._masks[place]
        own = indices[real] if padded else indices
        if wanted is None or wanted.shape != own.shape:  # the other run chose something else here
            return indices
        self.total += wanted.numel()
        self.different += int((own.sort().values != wanted.sort().values).sum())
        if not padded:
            return wanted
        forced = indices.clone()
        forced[real] = wanted
        return forced
