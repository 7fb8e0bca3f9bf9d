"""The norm of many gradients, and their scaling, each in one parallel pass over all of them (csrc/kernels/clip.cpp).

    norm = sqrt(sum of g^2 over all elements of all tensors)
    g = g * factor, in place

The tensors are dense, fp32 and on the CPU; model/clip_gradients.py checks that, and gives all others to torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import Tensor
from torch.autograd.graph import increment_version

from stoker.kernels import native

__all__ = ["gradient_norm", "scale_gradients"]


def gradient_norm(gradients: Sequence[Tensor]) -> float:
    norm = ctypes.c_double()
    addresses, sizes = _where(gradients)
    native.call("stoker_gradient_norm", addresses, sizes, len(gradients), ctypes.addressof(norm), native.threads())
    return norm.value


def scale_gradients(gradients: Sequence[Tensor], factor: float) -> None:
    addresses, sizes = _where(gradients)
    native.call("stoker_scale_gradients", addresses, sizes, len(gradients), factor, native.threads())
    increment_version(gradients)


def _where(tensors: Sequence[Tensor]) -> tuple[ctypes.Array[ctypes.c_void_p], ctypes.Array[ctypes.c_int64]]:
    addresses = (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
    sizes = (ctypes.c_int64 * len(tensors))(*(tensor.numel() for tensor in tensors))
    return addresses, sizes
