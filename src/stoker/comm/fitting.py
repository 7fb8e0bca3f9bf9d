"""Whether the tensors of a collective fit together. The engine sees addresses only: what does not fit is refused before it
would write past a tensor's end. The compiled backend says the same in torch_backend/tensors.h.
"""

from __future__ import annotations

from collections.abc import Iterable, Sized

from torch import Tensor

__all__ = ["expect_fit", "expect_list", "expect_type"]


def expect_list(operation: str, tensors: Sized, ranks: int) -> None:
    if len(tensors) != ranks:
        raise ValueError(
            f"{operation}: a list of {len(tensors)} tensors for a group of {ranks} ranks; give one for each"
        )


def expect_type(operation: str, one: Tensor, others: Iterable[Tensor]) -> None:
    for other in others:
        if other.dtype != one.dtype:
            raise ValueError(f"{operation}: tensors of {one.dtype} and of {other.dtype}; all must have one type")


def expect_fit(operation: str, source: Tensor, target: Tensor, *, gathered: int = 1, scattered: int = 1) -> None:
    """`gathered`: how many inputs make an output; `scattered`: how many outputs an input is cut into."""
    expect_type(operation, source, [target])
    if source.numel() * gathered != target.numel() * scattered:
        among = f" in a group of {max(gathered, scattered)}" if max(gathered, scattered) > 1 else ""
        raise ValueError(
            f"{operation}: an input of {source.numel()} elements does not fit an output of {target.numel()}{among}"
        )
