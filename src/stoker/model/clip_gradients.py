"""Gradient clipping by the total norm: one parallel pass computes the norm, a second one scales only if it has to.

torch processes one tensor at a time and multiplies every gradient even if the factor is one. Gradients that the kernels
(kernels/clip.py) do not support (another type, layout or tensor class) are clipped by torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from stoker.kernels.clip import gradient_norm, scale_gradients
from stoker.kernels.tensors import PLAIN, TensorReader, available, identities

__all__ = ["clip_grad_norm_"]


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """A replacement for torch.nn.utils.clip_grad_norm_ with the same arguments and result."""
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    gradients = _find_gradients(parameters) if float(norm_type) == 2.0 and available() else None
    if gradients is None:
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    norm = gradient_norm(gradients)
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(
            f"clip_grad_norm_: the norm of the gradients is {norm}, so they cannot be clipped; "
            "look for the first loss that is not finite, or leave error_if_nonfinite=False"
        )
    factor = float(max_norm) / (norm + 1e-6)
    if not factor >= 1.0:  # also if the norm is NaN: then the gradients become NaN, as with torch
        scale_gradients(gradients, factor)
        gradients.count_changes(gradients=True)
    return torch.tensor(norm, dtype=torch.float32)


def _find_gradients(parameters: list[Tensor]) -> TensorReader | None:
    """None if there is no gradient, or one that the kernels do not support."""
    if not PLAIN.issuperset(map(type, parameters)):
        # frozen weights in few bits, among others
        parameters = [parameter for parameter in parameters if parameter.grad is not None]
        if not PLAIN.issuperset(map(type, parameters)):
            return None
    reader = TensorReader(identities(parameters), None, gradients=True)
    return reader if reader.read() and reader.found else None
