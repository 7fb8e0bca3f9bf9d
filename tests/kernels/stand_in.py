"""Microkernels for tests where oneDNN generates no code for this CPU.

For fp32, libtorch's function does without generated code there: slow, but right. For bf16 it throws an exception, so plain loops
stand in for it, compiled once; packing, tiles and everything else is what runs with the real one.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import tempfile
from pathlib import Path

import torch

from stoker.kernels import microkernels
from stoker.kernels.microkernels import Microkernel

__all__ = ["failing_kernel", "find", "plain_kernel"]

_NAMES = {torch.float32: "multiply_fp32", torch.bfloat16: "multiply_bf16"}
_real_find = microkernels.find


@functools.cache
def find(dtype: torch.dtype) -> Microkernel | None:
    """In place of `microkernels.find`: libtorch's function if it works on this CPU, however slowly."""
    if dtype not in _NAMES:
        return None
    real = _real_find(dtype) or microkernels.look_up(dtype)
    return real if real and microkernels._is_right(dtype, real) else plain_kernel(dtype)


def plain_kernel(dtype: torch.dtype) -> Microkernel:
    return Microkernel(_address(_NAMES[dtype]), _address("release"))


def failing_kernel() -> Microkernel:
    """It throws a C++ exception, as libtorch does where the CPU lacks an instruction."""
    return Microkernel(_address("fail"), _address("release"))


def _address(name: str) -> int:
    return ctypes.cast(_library()[name], ctypes.c_void_p).value or 0


@functools.cache
def _library() -> ctypes.CDLL:
    source = Path(__file__).with_name("plain_microkernels.cpp")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "plain.so"
        compiler = os.environ.get("CXX", "c++")
        subprocess.run([compiler, "-O2", "-std=c++17", "-shared", "-fPIC", str(source), "-o", str(target)], check=True)
        return ctypes.CDLL(str(target))
