"""oneDNN's microkernels inside libtorch: products of small matrices by code generated for the CPU, AVX-512 and AMX included.

`at::native::cpublas::brgemm` is exported from libtorch_cpu.so but is no public interface. So its symbols are looked up by name,
and used only after a product of theirs was right; without them the other engines do the work. This module finds them;
csrc/kernels/product_tiles.h calls them.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from stoker.kernels import native
from stoker.machine.facts import this_machine

__all__ = ["SYMBOLS", "Microkernel", "find", "torch_has_bf16_units"]

_LOG = logging.getLogger("stoker.kernels")

SYMBOLS = {
    torch.float32: "_ZN2at6native7cpublas6brgemmEllllllbPKfS3_Pfb",
    torch.bfloat16: "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb",
}
"""`brgemm(long, long, long, long, long, long, bool, T const*, T const*, float*, bool)`."""
RELEASE = "_ZN2at6native7cpublas14brgemm_releaseEb"

_WITHOUT_AVX512 = frozenset({"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2"})
_WITHOUT_BF16 = _WITHOUT_AVX512 | {"AVX512_CORE", "AVX512_CORE_VNNI"}
"""The values of ONEDNN_MAX_CPU_ISA below AVX-512 and below AVX512-BF16."""


@dataclass(frozen=True)
class Microkernel:
    """Addresses of functions in libtorch."""

    multiply: int
    release: int


def _onednn_limit() -> str:
    """oneDNN may be forbidden to use what the CPU has."""
    return (os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "ALL").upper()


def torch_has_bf16_units() -> bool:
    """Whether torch, by oneDNN, multiplies bf16 by units of the CPU; without them it does so one number at a time."""
    return _onednn_limit() not in _WITHOUT_BF16 and this_machine().isa.bf16_units is not None


def find(dtype: torch.dtype) -> Microkernel | None:
    """The microkernel for operands of `dtype`, or None where this CPU or this torch has none that works."""
    if dtype not in SYMBOLS or "avx512" not in native.available():
        return None
    if dtype == torch.bfloat16 and not torch_has_bf16_units():
        return None
    return None if _onednn_limit() in _WITHOUT_AVX512 else _checked(dtype)


@functools.cache
def _checked(dtype: torch.dtype) -> Microkernel | None:
    kernel = look_up(dtype)
    if kernel is None:
        _LOG.info("torch %s exports no %s: torch.mm multiplies instead", torch.__version__, SYMBOLS[dtype])
        return None
    if not _is_right(dtype, kernel):
        _LOG.warning("a trial of oneDNN's microkernel for %s failed: torch.mm multiplies instead", dtype)
        return None
    return kernel


def look_up(dtype: torch.dtype) -> Microkernel | None:
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        library = ctypes.CDLL(str(path))
        functions = (library[SYMBOLS[dtype]], library[RELEASE])
    except (OSError, AttributeError):
        return None
    addresses = [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions]
    return Microkernel(*addresses)


def _is_right(dtype: torch.dtype, kernel: Microkernel) -> bool:
    """One product of small whole numbers, which is exact in any order of its sums."""
    from stoker.kernels import products

    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-8, 9, (70, 130), generator=generator).to(dtype)
    b = torch.randint(-8, 9, (130, 66), generator=generator).to(dtype)
    out = torch.empty(70, 66)
    try:
        products.multiply_native([(a, b)], out, None, kernel)
    except RuntimeError:
        return False
    with torch.autocast("cpu", enabled=False):  # the first product may be inside of a user's
        return torch.equal(out, a.float() @ b.float())
