"""How the functions of the native library are called, without torch: by argument name, on memory that faults.

Names and types come from the header beside the library, as in stoker.kernels.native; a call struct is made from its fields.
Every buffer ends directly before a page that may not be touched, so that a read or write beyond the end is a segmentation
fault; the bytes before a buffer are compared afterwards.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from stoker.kernels.header import read

__all__ = ["Native"]


class _Guarded:
    """Arrays that end where the next byte is a fault. Kept alive until `release`."""

    _PAGE = mmap.PAGESIZE
    _FILL = 0xA5

    def __init__(self) -> None:
        self._mprotect = ctypes.CDLL(None, use_errno=True).mprotect
        self._mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._areas: list[tuple[np.ndarray, int]] = []

    def empty(self, shape: Any, dtype: Any) -> np.ndarray:
        """An array of `shape`, filled with a pattern that no kernel writes by chance."""
        shape = (shape,) if isinstance(shape, int) else shape
        bytes_needed = math.prod(shape) * np.dtype(dtype).itemsize
        room = max(-(-bytes_needed // self._PAGE), 1) * self._PAGE
        area = np.frombuffer(mmap.mmap(-1, room + self._PAGE), np.uint8)
        if self._mprotect(area.ctypes.data + room, self._PAGE, 0):
            raise OSError(ctypes.get_errno(), "mprotect")
        area[:room] = self._FILL
        self._areas.append((area, room - bytes_needed))
        return area[room - bytes_needed : room].view(dtype).reshape(shape)

    def check_and_release(self) -> None:
        for area, slack in self._areas:
            if not (area[:slack] == self._FILL).all():
                raise AssertionError("a kernel wrote before the start of a buffer")
        self._areas.clear()


class Native:
    """One build of the library: functions by name, on guarded memory."""

    def __init__(self, path: str) -> None:
        self.header = read(Path(path).with_name("stoker.h"))
        self._library = self.header.bind(ctypes.CDLL(path))
        self._memory = _Guarded()
        self.reached: set[str] = set()
        """The exported names that were called so far."""

    def place(self, values: Any) -> np.ndarray:
        """A guarded copy of `values`."""
        values = np.asarray(values)
        result = self.empty(values.shape, values.dtype)
        result[...] = values
        return result

    def empty(self, shape: Any, dtype: Any) -> np.ndarray:
        return self._memory.empty(shape, dtype)

    def check_and_release(self) -> None:
        """Raises if anything was written before a buffer; then forgets all buffers."""
        self._memory.check_and_release()

    def struct(self, name: str, **values: Any) -> Any:
        """`stoker_<name>`; arrays become addresses, what is left out is 0."""
        return self.header.structs[f"stoker_{name}"](**{field: _argument(value) for field, value in values.items()})

    def structs(self, name: str, rows: list[tuple[int, ...]]) -> Any:
        """An array of `stoker_<name>`."""
        return (self.header.structs[f"stoker_{name}"] * len(rows))(*rows)

    def address(self, name: str) -> int:
        """Where `stoker_<name>` is, for a program."""
        return ctypes.cast(getattr(self._library, f"stoker_{name}"), ctypes.c_void_p).value or 0

    def call(self, name: str, **values: Any) -> Any:
        """Calls `stoker_<name>`. Pointers that are left out are null; every number must be given.

        Where it takes a call struct, `values` are its fields; what is left out is 0, and the kernel must succeed.
        """
        function = self.header.functions[f"stoker_{name}"]
        self.reached.add(f"stoker_{name}")
        handle = getattr(self._library, f"stoker_{name}")
        if list(function.arguments) == ["call"]:
            call = function.arguments["call"]._type_(**{field: _argument(value) for field, value in values.items()})
            assert handle(call) == 0, f"{name} failed"
            return None
        if unknown := values.keys() - function.arguments.keys():
            raise TypeError(f"{name} has no argument {', '.join(sorted(unknown))}")
        return handle(*(self._take(name, field, kind, values) for field, kind in function.arguments.items()))

    @staticmethod
    def _take(name: str, field: str, kind: Any, values: Mapping[str, Any]) -> Any:
        if field in values:
            return _argument(values[field])
        if kind is ctypes.c_void_p:
            return None
        raise TypeError(f"{name} needs {field}")


def _argument(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_argument, value))
    return value.ctypes.data if isinstance(value, np.ndarray) else value
