"""Allocator settings: glibc keeps the memory that a step frees mapped, so that the next step causes no page faults for it.

The settings apply to the whole process and are made once. Freed memory is then not returned to the system, and the peak stays
the same; `return_freed` is for memory that is not needed again, such as that of weights that are now stored in fewer bits.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import resource

__all__ = ["keep_mapped", "minor_faults", "return_freed"]

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # malloc.h
_TOP_PAD = 256 << 20  # the heap grows in pieces of this size: few system calls, little waste
_PRIMITIVES = "256"  # training with dynamic lengths uses thousands of shapes; oneDNN would cache 1,024 of them


@functools.cache
def keep_mapped() -> str:
    """Sets glibc's thresholds and limits oneDNN's cache of shapes, once; returns what was done, for the report."""
    # oneDNN reads this variable when it is first used; torch has no function to change it afterwards.
    shapes = os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", _PRIMITIVES)
    return f"{_keep_mapped()}; oneDNN caches at most {shapes} shapes, unless it was already in use"


def _keep_mapped() -> str:
    if preloaded := _other_allocator():
        return f"left alone: {preloaded} is preloaded"
    if platform.libc_ver()[0] != "glibc":
        return "left alone: the C library is not glibc"
    # mallopt takes an int; -1 becomes the largest size, "never trim"
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_TOP_PAD, _TOP_PAD))
    mallopt = ctypes.CDLL(None).mallopt
    if not all(mallopt(option, value) for option, value in settings):
        return "left alone: mallopt failed"
    return "glibc keeps freed memory mapped"


def return_freed() -> None:
    """Returns freed memory to the system now, whatever the settings are, also where other blocks follow it in the heap."""
    if _other_allocator() is None and platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def _other_allocator() -> str | None:
    preload = os.environ.get("LD_PRELOAD", "")
    return next((name for name in ("jemalloc", "tcmalloc", "mimalloc") if name in preload), None)


def minor_faults() -> int:
    """Minor page faults of this process so far; a steady training step should add fewer than 1,000."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
