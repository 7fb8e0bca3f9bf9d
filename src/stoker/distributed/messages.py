"""Values that ranks send each other: plain values, tensors and NumPy arrays, written as JSON.

torch's own `broadcast_object_list` and `all_gather_object` unpickle what arrives, and a pickle can run any code. Here a rank that
receives something that nobody of the job has sent gets a ValueError.
"""

from __future__ import annotations

import base64
import functools
import json
import math
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from stoker.english import with_article

__all__ = ["all_gather", "broadcast", "decode", "encode"]

_REFUSED = -1
"""In place of a length: the sender's value cannot be sent."""


def encode(value: Any) -> bytes:
    """Raises TypeError for anything but plain values (also in lists, tuples and dicts), tensors and arrays of numbers."""
    return json.dumps(_to_json(value), separators=(",", ":")).encode()


def decode(data: bytes) -> Any:
    """What `encode` was given; NumPy's numbers have become Python's. Raises ValueError for data of another form."""
    try:
        return _from_json(json.loads(data))
    except (TypeError, KeyError, AttributeError, IndexError, RuntimeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a message between ranks: {error}") from None


def broadcast(value: Any, sender: int) -> Any:
    """The `value` of one rank. A collective."""
    sends, data, problem = dist.get_rank() == sender, b"", None
    if sends:
        try:
            data = encode(value)
        except TypeError as error:  # the others wait for it
            problem = error
    length = torch.tensor([_REFUSED if problem else len(data)])
    dist.broadcast(length, sender)
    if problem is not None:
        raise problem
    if length.item() == _REFUSED:
        raise TypeError(f"rank {sender} has a value that cannot be sent to other ranks")
    buffer = _bytes(data) if sends else torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(buffer, sender)
    return decode(_received(buffer))


def all_gather(value: Any) -> list[Any]:
    """The `value` of each rank, by rank. A collective."""
    own = _bytes(encode(value))
    lengths = [torch.empty(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([own.numel()]))
    longest = max(int(length) for length in lengths)
    rows = [torch.empty(longest, dtype=torch.uint8) for _ in lengths]
    dist.all_gather(rows, torch.cat([own, torch.zeros(longest - own.numel(), dtype=torch.uint8)]))
    return [decode(_received(row[: int(length)])) for row, length in zip(rows, lengths, strict=True)]


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _received(buffer: torch.Tensor) -> bytes:
    return buffer.numpy().tobytes()


# A list stays a list; everything else that JSON has no form for is an object with one key, its kind.


def _to_json(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list):
        return [_to_json(one) for one in value]
    if isinstance(value, tuple):
        return {"tuple": [_to_json(one) for one in value]}
    if isinstance(value, dict):
        return {"dict": [[_to_json(key), _to_json(one)] for key, one in value.items()]}
    if isinstance(value, np.generic):
        return _to_json(value.item())
    if isinstance(value, torch.Tensor):
        dense = value.detach().cpu().contiguous()
        raw = dense.view(-1).view(torch.uint8).numpy() if dense.numel() else b""
        return {"tensor": [str(dense.dtype).removeprefix("torch."), list(dense.shape), _to_text(raw)]}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {"array": [value.dtype.str, list(value.shape), _to_text(np.ascontiguousarray(value))]}
    raise TypeError(f"{with_article(type(value).__name__)} cannot be sent to other ranks")


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(one) for one in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tuple":
        return tuple(_from_json(one) for one in content)
    if kind == "dict":
        return {_from_json(key): _from_json(one) for key, one in content}
    name, shape, text = content
    raw = bytearray(base64.b64decode(text, validate=True))
    if kind == "array":
        return np.frombuffer(raw, dtype=_array_type(name)).reshape(shape).copy()
    if kind != "tensor":
        raise ValueError(f"not a message between ranks: {kind[:40]!r}")
    dtype = _tensor_types()[name]
    if len(raw) != math.prod(shape) * dtype.itemsize:
        raise ValueError("not a message between ranks: a tensor of another size")
    return (torch.frombuffer(raw, dtype=torch.uint8).view(dtype) if raw else torch.empty(0, dtype=dtype)).view(shape)


@functools.cache
def _tensor_types() -> dict[str, torch.dtype]:
    return {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


def _array_type(name: str) -> np.dtype[Any]:
    dtype = np.dtype(name)
    if dtype.kind not in "biuf":
        raise ValueError("not a message between ranks: no type of numbers")
    return dtype


def _to_text(raw: Any) -> str:
    return base64.b64encode(raw).decode()
