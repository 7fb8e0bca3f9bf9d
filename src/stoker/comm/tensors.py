"""Tensors as the engine sees them: addresses, sizes, and numbers for types and reductions. The compiled backend has the same
in torch_backend/tensors.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stoker.kernels import native

__all__ = ["Dense", "copy_to", "numbers", "op_code", "op_name", "parts", "pointers", "sizes", "type_code"]


class Dense:
    """A tensor as contiguous memory; `back` copies a stand-in's contents to the tensor it stands for."""

    def __init__(self, tensor: Tensor) -> None:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            raise ValueError(f"ccl works on dense CPU tensors, not on one of {tensor.layout} on {tensor.device}")
        self._tensor = tensor.detach()
        self._dense = self._tensor.contiguous().resolve_conj().resolve_neg()
        self.flat = self._dense.view(-1)
        self.count = self.flat.numel()
        self.bytes = self.count * self.flat.element_size()
        self.address = self.flat.data_ptr()

    def back(self) -> None:
        if self._dense is not self._tensor:
            self._tensor.copy_(self._dense)


def copy_to(outputs: Sequence[Tensor], flat: Sequence[Tensor]) -> None:
    for output, found in zip(outputs, flat, strict=True):
        output.detach().copy_(found[: output.numel()].view(output.shape))


def parts(tensor: Tensor, count: int) -> list[Tensor]:
    flat = tensor.view(-1)
    if flat.numel() % count:
        raise ValueError(f"a tensor of {flat.numel()} elements cannot be divided among {count} ranks")
    return list(flat.split(flat.numel() // count)) if flat.numel() else [flat] * count


def numbers(flat: Tensor, op: str) -> Tensor:
    """What is added up: complex numbers as pairs of real ones, which have the same sum and mean."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() and op in {"SUM", "AVG"} else flat


def type_code(tensor: Tensor) -> int:
    codes = native.dtypes()
    if tensor.dtype not in codes:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in codes)
        raise ValueError(f"ccl cannot reduce {tensor.dtype}; it can reduce {known}")
    return codes[tensor.dtype]


def op_name(op: Any) -> str:
    return str(getattr(op, "op", op)).rpartition(".")[2]


def op_code(name: str) -> int:
    codes = native.constants("stoker_reduction")
    if name not in codes:
        raise ValueError(f"ccl does not know the reduction {name}; it knows {', '.join(codes)}")
    return codes[name]


def pointers(addresses: Any) -> Any:
    values: Sequence[int] = list(addresses)
    return (ctypes.c_void_p * max(1, len(values)))(*values)


def sizes(values: Any) -> Any:
    found = list(values)
    return (ctypes.c_int64 * max(1, len(found)))(*found)
