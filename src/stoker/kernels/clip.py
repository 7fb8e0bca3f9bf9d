"""The norm of many gradients, and their scaling, each in one parallel pass over all of them (csrc/kernels/clip.cpp).

    norm = sqrt(sum of g^2 over all elements of all tensors)
    g = g * factor, in place

The tensors are dense, fp32 and on the CPU. `kernels/tensors.py` has found their memory, and tells if one of them is different.
"""

from __future__ import annotations

import ctypes

from stoker.kernels import native
from stoker.kernels.tensors import TensorReader

__all__ = ["gradient_norm", "scale_gradients"]


def gradient_norm(gradients: TensorReader) -> float:
    norm = ctypes.c_double()
    native.call(
        "stoker_gradient_norm",
        gradients.addresses,
        gradients.sizes,
        len(gradients.sizes),
        ctypes.addressof(norm),
        native.threads(),
    )
    return norm.value


def scale_gradients(gradients: TensorReader, factor: float) -> None:
    native.call(
        "stoker_scale_gradients",
        gradients.addresses,
        gradients.sizes,
        len(gradients.sizes),
        factor,
        native.threads(),
    )
