"""Memory stays mapped: glibc keeps what a step frees, so that the next step does not fault it in again.

Process-wide settings, made once. Freed memory stays with the process (its peak does not grow, it only is not given back).
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import resource

__all__ = ["keep_mapped", "minor_faults"]

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # malloc.h
_TOP_PAD = 256 << 20  # the heap grows in pieces of this size: few system calls, little waste
_PRIMITIVES = "256"  # a training run with dynamic lengths meets thousands of shapes; oneDNN would keep 1,024 of them


@functools.cache
def keep_mapped() -> str:
    """Sets glibc's thresholds and bounds oneDNN's cache of shapes; says what was done. Does nothing the second time."""
    # oneDNN reads this once, when it is first used; torch exports no function to change it afterwards.
    shapes = os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", _PRIMITIVES)
    return f"{_keep_mapped()}; oneDNN keeps {shapes} shapes at most, unless it was in use before"


def _keep_mapped() -> str:
    if preloaded := _other_allocator():
        return f"left to {preloaded}, which is preloaded"
    if platform.libc_ver()[0] != "glibc":
        return "left alone: the C library is not glibc"
    # mallopt takes an int; -1 becomes the largest size, "never trim"
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_TOP_PAD, _TOP_PAD))
    mallopt = ctypes.CDLL(None).mallopt
    if not all(mallopt(option, value) for option, value in settings):
        return "left alone: mallopt refused"
    return "glibc keeps freed memory mapped"


def _other_allocator() -> str | None:
    preload = os.environ.get("LD_PRELOAD", "")
    return next((name for name in ("jemalloc", "tcmalloc", "mimalloc") if name in preload), None)


def minor_faults() -> int:
    """Page faults of this process so far that needed no disk; the difference over a step should be below 1,000."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
