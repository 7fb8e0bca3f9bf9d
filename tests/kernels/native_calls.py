"""How the functions of the native library are called, without torch: their arguments as data, and memory that faults.

`CALLS` and `STRUCTS` describe the C interface in one place; tests/kernels/build_cases.py calls by argument name only.
Every buffer ends directly before a page that may not be touched, so that a read or write beyond the end is a segmentation
fault; the bytes before a buffer are compared afterwards.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["Native"]

_TYPES: dict[str, Any] = {
    "p": ctypes.c_void_p,
    "i": ctypes.c_int,
    "l": ctypes.c_int64,
    "u": ctypes.c_uint64,
    "f": ctypes.c_float,
    "d": ctypes.c_double,
    "s": ctypes.c_char_p,
}

STRUCTS = {
    "AttentionCall": "p:q,k,v,out,lse,dout,dq,dk,dv,bias,dbias,dq_parts,cosine,sine,starts "
    "l:sequences,heads,kv_heads,head_size,bias_length,bias_groups,q_token,q_head,k_token,k_head,v_token,v_head,left,right "
    "u:key f:scale,p i:dtype,threads",
    "Operand": "p:data l:row_stride,column_stride i:dtype",
    "Product": "p:a,b,depths l:terms,rows,columns p:c l:c_stride p:bias i:c_dtype,bias_dtype",
}
"""Structs by name: the type letter, then the fields that have it."""

_NORM_TYPES = "i:dtype,x_bias_dtype,weight_dtype,bias_dtype,threads"
_TABLES = "p:ids0,ids1,ids2,table0,table1,table2"
_TABLE_TYPES = "i:table_dtype,dtype,weight_dtype,bias_dtype,threads"
_ACTIVATION = "l:rows,columns i:kind,gated,dtype,bias_dtype,threads"

CALLS = {
    "abi": "-> i",
    "isa": "-> s",
    "count_threads": "i:threads -> i",
    "dropout": "p:x,y l:rows,columns f:p u:key i:dtype,threads",
    "norm_forward": f"p:x,residual,x_bias,weight,bias,y,z,stats l:rows,columns f:p u:key f:eps i:rms {_NORM_TYPES}",
    "norm_backward": "p:dy,dz,x,residual,z,x_bias,weight,stats,dx,dresidual,dweight,dbias,dx_bias l:rows,columns f:p u:key i:rms "
    + _NORM_TYPES,
    "activation_forward": f"p:x l:x_stride p:up l:up_stride p:x_bias,up_bias,y {_ACTIVATION}",
    "activation_backward": "p:dy,x l:x_stride p:up l:up_stride p:x_bias,up_bias,dx l:dx_stride p:dup l:dup_stride "
    f"p:dbias,dup_bias {_ACTIVATION}",
    "embedding_lookup": "p:ids,table,y,bad l:tokens,rows,columns,bytes i:threads",
    "embedding_scatter": "p:dz,ids,grad l:tokens,rows,columns,skip i:dtype,table_dtype,threads",
    "embedding_norm_forward": f"{_TABLES} p:sizes,weight,bias,y,stats,bad l:tokens,columns f:p u:key f:eps {_TABLE_TYPES}",
    "embedding_norm_backward": f"{_TABLES} p:dy,weight,stats,dz,dweight,dbias l:tokens,columns f:p u:key {_TABLE_TYPES}",
    "cross_entropy_forward": "p:logits,labels,loss,stats,totals,bad l:rows,columns,ignore i:dtype,threads",
    "cross_entropy_backward": "p:logits,labels,stats,scales,dlogits l:rows,columns,ignore i:dtype,threads",
    "cross_entropy_block": "p:logits,labels,scales,loss l:rows,columns i:threads",
    "attention_key_chunk": "-> l",
    "attention_forward": "AttentionCall",
    "attention_backward": "AttentionCall",
    "product": "Product p:sgemm i:threads",
    "column_sums": "p:x l:row_stride,rows,columns p:sums i:dtype,threads",
    "norm": "p:tensors,sizes l:count p:norm i:threads",
    "scale": "p:tensors,sizes l:count f:factor i:threads",
    "comm_abi": "-> i",
    "comm_create": "i:ranks,rank l:slot_bytes i:named -> p",
    "comm_attach": "s:address i:rank -> p",
    "comm_opening_error": "-> s",
    "comm_address": "p:group -> s",
    "comm_complete": "p:group -> i",
    "comm_seal": "p:group",
    "comm_destroy": "p:group",
    "comm_abort": "p:group s:why",
    "comm_error": "p:group -> s",
    "comm_timeout": "p:group d:seconds",
    "comm_names": "p:group,ranks",
    "comm_waited": "p:group,for_rank -> d",
    "comm_allreduce": "p:group,data l:count i:type,op,root -> i",
    "comm_reduce_scatter": "p:group,sources,to,counts i:type,op -> i",
    "comm_allgather": "p:group,source,to,bytes -> i",
    "comm_broadcast": "p:group,data l:bytes i:root -> i",
    "comm_gather": "p:group,source,to l:bytes i:root -> i",
    "comm_scatter": "p:group,sources,to l:bytes i:root -> i",
    "comm_alltoall": "p:group,sources,sent,to,received -> i",
    "comm_barrier": "p:group -> i",
}
"""Functions by name without `stoker_`: the arguments in order, a struct by its name, `->` and the letter of the result."""


def _fields(text: str) -> list[tuple[str, str]]:
    """(name, type letter) of "p:x,y l:rows"."""
    return [(name, group[0]) for group in text.split() for name in group[2:].split(",")]


_STRUCT_TYPES: dict[str, Any] = {
    name: type(name, (ctypes.Structure,), {"_fields_": [(field, _TYPES[code]) for field, code in _fields(text)]})
    for name, text in STRUCTS.items()
}


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
        self._library = ctypes.CDLL(path)
        self._memory = _Guarded()
        self._functions: dict[str, Any] = {}

    @property
    def reached(self) -> set[str]:
        """The exported names that were called so far."""
        return {f"stoker_{name}" for name in self._functions}

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
        """A struct of `STRUCTS`; arrays become addresses, what is left out is 0."""
        return _STRUCT_TYPES[name](**{field: _argument(value) for field, value in values.items()})

    def call(self, name: str, **values: Any) -> Any:
        """Calls `stoker_<name>`. Pointers that are left out are null; every number must be given."""
        if name not in self._functions:
            self._functions[name] = self._declare(name)
        function, fields = self._functions[name]
        if unknown := values.keys() - {field for field, _ in fields}:
            raise TypeError(f"{name} has no argument {', '.join(sorted(unknown))}")
        return function(*(self._take(name, field, code, values) for field, code in fields))

    def _declare(self, name: str) -> tuple[Any, list[tuple[str, str]]]:
        arguments, _, result = CALLS[name].partition("->")
        fields: list[tuple[str, str]] = []
        for group in arguments.split():
            fields += [("struct", "p")] if group in STRUCTS else _fields(group)
        function = self._library[f"stoker_{name}"]
        function.argtypes = [_TYPES[code] for _, code in fields]
        function.restype = _TYPES[result.strip()] if result else None
        return function, fields

    @staticmethod
    def _take(name: str, field: str, code: str, values: Mapping[str, Any]) -> Any:
        if field in values:
            return _argument(values[field])
        if code == "p":
            return None
        raise TypeError(f"{name} needs {field}")


def _argument(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.ctypes.data
    return ctypes.addressof(value) if isinstance(value, ctypes.Structure | ctypes.Array) else value
