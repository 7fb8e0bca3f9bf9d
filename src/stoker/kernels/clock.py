"""The clock that busy cores run at, by the native library: with boost and in virtual machines the nominal one is wrong."""

from __future__ import annotations

import ctypes

from stoker.kernels import native

__all__ = ["clock_ghz"]


def clock_ghz(threads: int) -> float | None:
    """The mean clock of `threads` busy cores, in about 40 ms; None without the library, or where it cannot tell."""
    ghz = ctypes.c_double()
    try:
        native.call("stoker_clock", ctypes.addressof(ghz), threads)
    except (native.NativeLibraryError, OSError):
        return None
    return ghz.value or None
