"""What is called on every build of the native library: each exported kernel, on random inputs of odd sizes.

A case is a function of a build that returns named results; tests/kernels/builds_agree.py compares them between builds.
`exact` marks the cases whose arithmetic is the same in every build: copies, decisions of dropout, sums in a fixed order
without a product in them, and products of small whole numbers, which are exact in any order. All others differ in
rounding: baseline has no fused multiply-add, and sums over a row run in as many lanes as a register has.
"""

from __future__ import annotations

import ctypes
import math
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from native_calls import Native

__all__ = ["CASES", "LEFT_OUT", "Case", "Results"]

Results = dict[str, np.ndarray]
THREADS = 2
FP32, BF16 = 0, 2  # stoker_dtype in csrc/stoker.h
DTYPES = {"fp32": FP32, "bf16": BF16}
STORAGE = {FP32: np.float32, BF16: np.uint16}
KEY = 0x9E3779B97F4A7C15

LEFT_OUT = {
    "stoker_clock": "measures the clock: its result is a time, and it reads no memory of the caller",
    "stoker_virtual_threads": "changes how the others run: tests/kernels/test_virtual_threads.py",
    "stoker_regions": "its result are times: tests/kernels/test_virtual_threads.py",
    "stoker_read_tensors": "reads tensors of torch: tests/kernels/test_tensors.py",
    "stoker_count_changes": "changes tensors of torch: tests/kernels/test_tensors.py",
    "stoker_blas_product": "multiplies by a BLAS of the caller's: tests/kernels/test_program.py compares it with torch.mm",
}
"""Exported functions without a case, each with the reason."""


@dataclass(frozen=True)
class Case:
    name: str
    body: Callable[[Native, Chance], Results]
    exact: bool = False
    emulated: bool = True
    """False for what Bochs 2.7 computes wrongly: only a real CPU can tell then."""

    def run(self, native: Native) -> Results:
        return self.body(native, Chance(native, zlib.crc32(self.name.encode())))


class Chance:
    """Random inputs in guarded memory, the same for every build, machine and version of numpy.

    A generator of its own (SplitMix64), because importing numpy.random takes the emulated machine several seconds.
    """

    def __init__(self, native: Native, seed: int) -> None:
        self.place = native.place
        self._drawn = seed << 32

    def _bits(self, shape: tuple[int, ...]) -> np.ndarray:
        """64 random bits each."""
        count = math.prod(shape)
        z = np.arange(self._drawn, self._drawn + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        self._drawn += count
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (z ^ (z >> np.uint64(31))).reshape(shape)

    def floats(self, *shape: int, dtype: int = FP32, low: float = -2.0, high: float = 2.0) -> np.ndarray:
        unit = (self._bits(shape) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
        values = np.float32(low) + np.float32(high - low) * unit
        return self.place(values if dtype == FP32 else _truncate(values))

    def whole(self, *shape: int, dtype: int = FP32) -> np.ndarray:
        """Whole numbers from -4 to 4: their sums of products are exact."""
        values = (self._bits(shape) % np.uint64(9)).astype(np.float32) - np.float32(4)
        return self.place(values if dtype == FP32 else _truncate(values))

    def ids(self, count: int, below: int) -> np.ndarray:
        return self.integers(count, np.int64, below)

    def integers(self, count: int, dtype: Any, below: int = 100) -> np.ndarray:
        return self.place((self._bits((count,)) % np.uint64(below)).astype(dtype))


def _truncate(values: np.ndarray) -> np.ndarray:
    """fp32 to bf16 by its upper half: any rounding serves for inputs."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def _either(name: str, run: Callable[..., Results], exact: bool = False, **options: Any) -> Iterator[Case]:
    for dtype, code in DTYPES.items():
        yield Case(f"{name}, {dtype}", partial(run, dtype=code, **options), exact)


# --- the library itself -------------------------------------------------------------------------------------------------


def about(native: Native, chance: Chance) -> Results:
    assert native.call("count_threads", threads=THREADS) == THREADS
    assert native.call("isa").decode() in {"baseline", "avx2", "avx512"}
    assert native.call("header_hash").decode() == native.header.digest
    return {"key chunk": np.array([native.call("attention_key_chunk")])}


# --- dropout, norms, activations ----------------------------------------------------------------------------------------


def dropout(native: Native, chance: Chance, dtype: int, rows: int, columns: int) -> Results:
    x = chance.floats(rows, columns, dtype=dtype)
    y = native.empty(x.shape, x.dtype)
    native.call("dropout", x=x, y=y, rows=rows, columns=columns, p=0.3, key=KEY, dtype=dtype, threads=THREADS)
    return {"y": y}


def norm(
    native: Native,
    chance: Chance,
    dtype: int,
    rows: int,
    columns: int,
    rms: bool,
    fused: bool,
    returns_sum: bool = False,
    frozen: bool = False,
) -> Results:
    """`fused`: with x_bias, dropout and residual. `returns_sum`: z is an output, and has a gradient. `frozen`: weight, bias."""
    x, dy = chance.floats(rows, columns, dtype=dtype), chance.floats(rows, columns, dtype=dtype)
    weight, bias = chance.floats(columns), None if rms else chance.floats(columns, dtype=dtype)
    shared = {
        "x": x, "weight": weight, "residual": chance.floats(rows, columns, dtype=dtype) if fused else None,
        "x_bias": chance.floats(columns) if fused else None, "stats": native.empty(2 * rows, np.float32),
        "z": native.empty(x.shape, x.dtype) if returns_sum else None, "rows": rows, "columns": columns,
        "p": 0.1 if fused else 0.0, "key": KEY, "rms": int(rms), "dtype": dtype, "x_bias_dtype": FP32,
        "weight_dtype": FP32, "bias_dtype": dtype, "threads": THREADS,
    }  # fmt: skip
    y = native.empty(x.shape, x.dtype)
    native.call("layer_norm_forward", bias=bias, y=y, eps=1e-5, **shared)
    results = {"y": y, "stats": shared["stats"], "dresidual": native.empty(x.shape, x.dtype)}
    if not frozen:
        results["dweight"] = native.empty(columns, np.float32)
    if not rms and not frozen:
        results["dbias"] = native.empty(columns, STORAGE[dtype])
    if fused:
        results |= {"dx": native.empty(x.shape, x.dtype), "dx_bias": native.empty(columns, np.float32)}
    if returns_sum:
        results["z"] = shared["z"]
        shared["dz"] = chance.floats(rows, columns, dtype=dtype)
    gradients = {name: value for name, value in results.items() if name.startswith("d")}
    native.call("layer_norm_backward", dy=dy, **gradients, **shared)
    return results


def activation(
    native: Native, chance: Chance, dtype: int, rows: int, columns: int, kind: int, gated: bool, whole: bool = False
) -> Results:
    draw = chance.whole if whole else partial(chance.floats, low=-6.0, high=6.0)
    # Both halves in one matrix, as a product gives them: rows have a stride.
    stride = 2 * columns if gated else columns
    both, dboth = draw(rows, stride, dtype=dtype), native.empty((rows, stride), STORAGE[dtype])
    dy, y = draw(rows, columns, dtype=dtype), native.empty((rows, columns), STORAGE[dtype])
    shared: dict[str, Any] = {
        "x": both, "x_stride": stride, "up": both[:, columns:] if gated else None, "up_stride": stride, "x_bias": draw(columns),
        "up_bias": draw(columns) if gated else None, "rows": rows, "columns": columns, "kind": kind, "gated": int(gated),
        "dtype": dtype, "bias_dtype": FP32, "threads": THREADS,
    }  # fmt: skip
    native.call("activation_forward", y=y, **shared)
    results = {"y": y, "dx": dboth, "dx_bias": native.empty(columns, np.float32)}
    if gated:
        results["dup_bias"] = native.empty(columns, np.float32)
    native.call(
        "activation_backward", dy=dy, dx=dboth, dx_stride=stride, dup=dboth[:, columns:] if gated else None, dup_stride=stride,
        dx_bias=results["dx_bias"], dup_bias=results.get("dup_bias"), **shared,
    )  # fmt: skip
    return results


# --- embeddings, loss ---------------------------------------------------------------------------------------------------


def read_mask(native: Native, chance: Chance) -> Results:
    lengths = (5, 0, 13, 1, 8)
    mask = native.place((np.arange(13)[None] < np.array(lengths)[:, None]).astype(np.uint8))
    fields = {"mask": mask, "rows": len(lengths), "columns": 13}
    counted = {name: native.empty(len(lengths), np.int64) for name in ("firsts", "counts")}
    native.call("read_mask", **fields, **counted)
    sizes = {"index": sum(lengths), "positions": sum(lengths), "starts": 5}
    filled = {name: native.empty(size, np.int64) for name, size in sizes.items()}
    native.call("read_mask", **fields, **counted, **filled)
    return counted | filled


def embedding_lookup(native: Native, chance: Chance, dtype: int, tokens: int, rows: int, columns: int) -> Results:
    table, ids = chance.floats(rows, columns, dtype=dtype), chance.ids(tokens, rows)
    y = native.empty((tokens, columns), table.dtype)
    native.call(
        "embedding_lookup", ids=ids, table=table, y=y, tokens=tokens, rows=rows, columns=columns, table_dtype=dtype,
        threads=THREADS,
    )  # fmt: skip
    return {"y": y}


def embedding_scatter(native: Native, chance: Chance, dtype: int, tokens: int, rows: int, columns: int) -> Results:
    dz, ids = chance.floats(tokens, columns, dtype=dtype), chance.ids(tokens, rows)
    grad = native.empty((rows, columns), STORAGE[dtype])
    native.call(
        "embedding_scatter", dy=dz, ids=ids, dtable=grad, tokens=tokens, rows=rows, columns=columns, skip=1, dtype=dtype,
        table_dtype=dtype, threads=THREADS,
    )  # fmt: skip
    return {"grad": grad}


def embedding_norm(native: Native, chance: Chance, dtype: int, tokens: int, columns: int, p: float) -> Results:
    sizes = (11, 7, 2)
    shared: dict[str, Any] = {
        "ids": tuple(chance.ids(tokens, size) for size in sizes),
        "tables": tuple(chance.floats(size, columns, dtype=dtype) for size in sizes),
        "weight": chance.floats(columns), "stats": native.empty(2 * tokens, np.float32), "tokens": tokens, "columns": columns,
        "p": p, "key": KEY, "table_dtype": dtype, "dtype": dtype, "weight_dtype": FP32, "bias_dtype": FP32, "threads": THREADS,
    }  # fmt: skip
    y = native.empty((tokens, columns), STORAGE[dtype])
    native.call("embedding_norm_forward", table_rows=sizes, bias=chance.floats(columns), y=y, eps=1e-5, **shared)
    gradients = {"dz": native.empty((tokens, columns), np.float32), "dweight": native.empty(columns, np.float32)}
    gradients["dbias"] = native.empty(columns, np.float32)
    native.call("embedding_norm_backward", dy=chance.floats(tokens, columns, dtype=dtype), **gradients, **shared)
    return {"y": y, "stats": shared["stats"], **gradients}


def cross_entropy(native: Native, chance: Chance, dtype: int, rows: int, columns: int) -> Results:
    logits, labels = chance.floats(rows, columns, dtype=dtype, low=-9.0, high=9.0), chance.ids(rows, columns)
    labels[rows // 2] = -100
    size = {"labels": labels, "rows": rows, "columns": columns, "threads": THREADS}
    results = {"loss": native.empty(rows, np.float32), "stats": native.empty(2 * rows, np.float32)}
    results["totals"] = native.empty(2, np.float64)
    native.call("cross_entropy_forward", logits=logits, ignore=-100, dtype=dtype, **results, **size)
    results["dlogits"] = native.empty(logits.shape, logits.dtype)
    native.call(
        "cross_entropy_backward", logits=logits, stats=results["stats"], scales=chance.floats(rows), dlogits=results["dlogits"],
        ignore=-100, dtype=dtype, **size,
    )  # fmt: skip
    return results


def cross_entropy_block(native: Native, chance: Chance, rows: int, columns: int, **terms: float) -> Results:
    logits, labels = chance.floats(rows, columns, low=-9.0, high=9.0), chance.ids(rows, columns)
    loss, scales = native.empty(rows, np.float32), chance.floats(rows)
    entropy, top = native.empty(rows, np.float32), native.empty(rows, np.int32)
    native.call(
        "cross_entropy_block", logits=logits, labels=labels, scales=scales, loss=loss, entropy=entropy, top=top, rows=rows,
        columns=columns, threads=THREADS, **{"scale": 1.0, **terms},
    )  # fmt: skip
    return {"loss": loss, "dlogits": logits, "entropy": entropy, "top": top}


# --- attention ----------------------------------------------------------------------------------------------------------

UNLIMITED = 2**62


def attention(
    native: Native,
    chance: Chance,
    dtype: int,
    lengths: tuple[int, ...],
    heads: int,
    kv_heads: int,
    size: int,
    window: tuple[int, int] = (UNLIMITED, UNLIMITED),
    rotary: int = 0,
    with_bias: bool = False,
    with_sinks: bool = False,
    positions: int = 0,
    softcap: float = 0.0,
    p: float = 0.0,
) -> Results:
    """`rotary`: how many dimensions are rotated. `positions`: rows of each table of relative positions."""
    tokens, longest, width = sum(lengths), max(lengths), (heads + 2 * kv_heads) * size
    # q, k and v side by side, as one product gives them; the last element of v is the last before the fault.
    qkv, dqkv = chance.floats(tokens, width, dtype=dtype), native.empty((tokens, width), STORAGE[dtype])
    starts = native.place(np.cumsum((0, *lengths), dtype=np.int64))
    out, lse = native.empty((tokens, heads * size), STORAGE[dtype]), native.empty((tokens, heads), np.float32)
    k, v = heads * size, (heads + kv_heads) * size
    angles = chance.floats(tokens, rotary // 2) if rotary else None
    bias = chance.floats(heads, longest, longest) if with_bias else None
    alive = {
        "cosine": None if angles is None else native.place(np.clip(angles, -1, 1)),
        "sine": None if angles is None else native.place(np.clip(-angles, -1, 1)),
        "dbias": None if bias is None else native.empty((2, *bias.shape), np.float32),
        "sinks": chance.floats(heads) if with_sinks else None,
        "dsinks": native.empty(heads, np.float32) if with_sinks else None,
        **(_position_tables(native, chance, dtype, positions, heads, size, longest) if positions else {}),
        "dq_parts": native.empty((-(-longest // native.call("attention_key_chunk")), *out.shape), np.float32),
    }
    call: dict[str, Any] = dict(
        q=qkv, k=qkv[:, k:], v=qkv[:, v:], out=out, lse=lse, dout=chance.floats(*out.shape, dtype=dtype),
        dq=dqkv, dk=dqkv[:, k:], dv=dqkv[:, v:], bias=bias, starts=starts, key_starts=starts,
        sequences=len(lengths), heads=heads, kv_heads=kv_heads, head_size=size, rotary_half=rotary // 2, bias_rows=longest,
        bias_columns=longest, groups=2, q_token=width, q_head=size, k_token=width, k_head=size, v_token=width, v_head=size,
        left=window[0], right=window[1], key=KEY, scale=size**-0.5, softcap=softcap, p=p, dtype=dtype, threads=THREADS, **alive,
    )  # fmt: skip
    native.call("attention_forward", **call)
    native.call("attention_backward", **call)
    names = ("dbias", "dsinks", "dposition_q", "dposition_k")
    wanted = {name: alive[name] for name in names if alive.get(name) is not None}
    return {"out": out, "lse": lse, "dqkv": dqkv, **wanted}


def _position_tables(
    native: Native, chance: Chance, dtype: int, rows: int, heads: int, size: int, reach: int
) -> dict[str, Any]:
    shape = (rows, heads, size)
    return {
        **{f"position_{name}": chance.floats(*shape, dtype=dtype) for name in "qk"},
        **{f"dposition_{name}": native.empty((2, *shape), np.float32) for name in "qk"},
        **{f"position_{name}_row": heads * size for name in "qk"},
        "distance_rows": native.place(np.clip(np.arange(1 - reach, reach) + rows // 2, 0, rows - 1).astype(np.int64)),
        "position_rows": rows,
        "reach": reach,
    }


def cross_attention(
    native: Native,
    chance: Chance,
    dtype: int,
    lengths: tuple[int, ...],
    key_lengths: tuple[int, ...],
    heads: int,
    size: int,
) -> Results:
    """Keys have lengths of their own; q, k and v lie apart, one key/value head for all."""
    tokens, keys, rows, columns = sum(lengths), sum(key_lengths), max(lengths), max(key_lengths)
    shapes = {"q": (tokens, heads * size), "k": (keys, size), "v": (keys, size), "out": (tokens, heads * size)}
    results = {f"d{name}": native.empty(shapes[name], STORAGE[dtype]) for name in "qkv"}
    results |= {"out": native.empty(shapes["out"], STORAGE[dtype]), "lse": native.empty((tokens, heads), np.float32)}
    results["dbias"] = native.empty((1, heads, rows, columns), np.float32)
    chunks = -(-columns // native.call("attention_key_chunk"))
    drawn = {name: chance.floats(*shapes[name], dtype=dtype) for name in "qkv"}
    starts, key_starts = (native.place(np.cumsum((0, *n), dtype=np.int64)) for n in (lengths, key_lengths))
    call: dict[str, Any] = dict(
        dout=chance.floats(*shapes["out"], dtype=dtype), bias=chance.floats(heads, rows, columns),
        dq_parts=native.empty((chunks, *shapes["out"]), np.float32), starts=starts, key_starts=key_starts,
        sequences=len(lengths), heads=heads, kv_heads=1,
        head_size=size, bias_rows=rows, bias_columns=columns, groups=1, q_token=heads * size, q_head=size, k_token=size,
        v_token=size, left=UNLIMITED, right=UNLIMITED, key=KEY, scale=size**-0.5, p=0.1, dtype=dtype, threads=THREADS,
        **drawn, **results,
    )  # fmt: skip
    native.call("attention_forward", **call)
    native.call("attention_backward", **call)
    return results


# --- products, sums, clipping -------------------------------------------------------------------------------------------


def product(
    native: Native,
    chance: Chance,
    dtype: int,
    rows: int,
    columns: int,
    depths: tuple[int, ...],
    order: str,
    whole: bool = False,
    with_bias: bool = False,
    accumulate: bool = False,
) -> Results:
    """`order` as in linear.py: "nt" forward, "nn" gradient of the input, "tn" gradient of the weight."""
    draw = chance.whole if whole else chance.floats
    left, right, kept = [], [], []
    for depth in depths:
        a = draw(rows, depth, dtype=dtype) if order[0] == "n" else draw(depth, rows, dtype=dtype)
        b = draw(depth, columns, dtype=dtype) if order[1] == "n" else draw(columns, depth, dtype=dtype)
        kept += [a, b]
        left.append(_operand(native, a, order[0] == "n", dtype))
        right.append(_operand(native, b, order[1] == "n", dtype))
    operands = type(left[0]) * len(depths)
    a, b = operands(*left), operands(*right)
    c = draw(rows, columns, dtype=dtype) if accumulate else native.empty((rows, columns), STORAGE[dtype])
    native.call(
        "product", a=a, b=b, depths=native.place(np.array(depths, np.int64)), terms=len(depths), rows=rows, columns=columns,
        c=c, c_stride=columns, bias=draw(columns) if with_bias else None, c_dtype=dtype, bias_dtype=FP32,
        accumulate=int(accumulate), threads=THREADS,
    )  # fmt: skip
    del kept
    return {"c": c}


def _operand(native: Native, array: np.ndarray, by_rows: bool, dtype: int) -> Any:
    stride = array.shape[1]
    return native.struct(
        "operand", data=array, row_stride=stride if by_rows else 1, column_stride=1 if by_rows else stride, dtype=dtype
    )


def column_sums(native: Native, chance: Chance, dtype: int, rows: int, columns: int) -> Results:
    x, sums = chance.floats(rows, columns, dtype=dtype), native.empty(columns, np.float32)
    native.call(
        "column_sums", x=x, row_stride=columns, rows=rows, columns=columns, sums=sums, dtype=dtype, sums_dtype=FP32,
        threads=THREADS,
    )  # fmt: skip
    return {"sums": sums}


def rows_of_sums(native: Native, chance: Chance, dtype: int, rows: int, columns: int) -> Results:
    """A sum of rows that lie apart, a bias, a copy, a conversion from fp32, dropout, and a multiple in fp32."""
    wide, y, bias = (chance.floats(*shape, dtype=dtype) for shape in ((rows, columns + 3), (rows, columns), (columns,)))
    names = ("sum", "with bias", "copy", "converted", "dropped")
    results = {name: native.empty((rows, columns), STORAGE[dtype]) for name in names}
    size = {"z_stride": columns, "rows": rows, "columns": columns, "dtype": dtype, "threads": THREADS}
    shared = {"x": wide[:, 3:], "x_stride": columns + 3, "y_dtype": dtype, **size}
    native.call("add_rows", y=y, y_stride=columns, z=results["sum"], **shared)
    native.call("add_rows", y=bias, z=results["with bias"], **shared)
    native.call("add_rows", z=results["copy"], **shared)
    native.call(
        "add_rows", y=chance.floats(rows, columns), y_stride=columns, y_dtype=FP32, z=results["converted"], **size
    )
    native.call("add_rows", z=results["dropped"], p=0.3, key=KEY, **shared)
    results["scaled"] = native.empty((rows, columns), np.float32)
    native.call(
        "scale_rows", x=wide[:, 3:], x_stride=columns + 3, x_column=1, z=results["scaled"], z_stride=columns, rows=rows,
        columns=columns, factor=1.7, dtype=dtype, z_dtype=FP32, threads=THREADS,
    )  # fmt: skip
    return results


def program(native: Native, chance: Chance, rows: int, columns: int) -> Results:
    """Two sums by one call: the second adds its second argument to the result of the first."""
    first, second, last = (chance.floats(rows, columns) for _ in range(3))
    between, result = (native.empty((rows, columns), np.float32) for _ in range(2))
    shared = {
        "x_stride": columns, "y_stride": columns, "z_stride": columns, "rows": rows, "columns": columns, "threads": THREADS,
    }  # fmt: skip
    calls = [native.struct("rows_call", **shared) for _ in range(2)]
    arguments = [(0, {"x": 0, "y": 1, "z": 3}), (1, {"x": 3, "y": 2, "z": 4})]
    slots = [
        (ctypes.addressof(calls[number]) + getattr(type(calls[number]), name).offset, base, 0)
        for number, fields in arguments
        for name, base in fields.items()
    ]
    steps = [(native.address("add_rows"), ctypes.addressof(call)) for call in calls]
    described = native.struct(
        "program", steps=native.structs("step", steps), slots=native.structs("slot", slots), step_count=2,
        slot_count=len(slots),
    )  # fmt: skip
    bases = native.place(np.array([one.ctypes.data for one in (first, second, last, between, result)], np.int64))
    assert native.call("run", program=described, bases=bases) == 0
    return {"between": between, "result": result}


def _many(native: Native, chance: Chance) -> tuple[list[np.ndarray], dict[str, Any]]:
    tensors = [chance.floats(size) for size in (1, 7, 33, 32_769, 1_025)]
    addresses = native.place(np.array([tensor.ctypes.data for tensor in tensors], np.uint64))
    sizes = native.place(np.array([tensor.size for tensor in tensors], np.int64))
    return tensors, {"tensors": addresses, "sizes": sizes, "count": len(tensors), "threads": THREADS}


def quantized(native: Native, chance: Chance, dtype: int, rows: int, columns: int, bits: int) -> Results:
    elements = rows * columns
    codes = native.empty((elements + 1) // 2 if bits == 4 else elements, np.uint8)
    scales = native.empty((elements + 63) // 64 if bits == 4 else rows, np.float32)
    values = native.empty((rows, columns), STORAGE[dtype])
    shared = {"codes": codes, "scales": scales, "rows": rows, "columns": columns, "bits": bits, "dtype": dtype}
    native.call("quantize", values=chance.floats(rows, columns, dtype=dtype), threads=THREADS, **shared)
    native.call("dequantize", values=values, threads=THREADS, **shared)
    return {"codes": codes, "scales": scales, "values": values}


def gradient_norm(native: Native, chance: Chance) -> Results:
    _tensors, arguments = _many(native, chance)
    total = native.empty(1, np.float64)
    native.call("gradient_norm", norm=total, **arguments)
    return {"norm": total}


def gradient_scale(native: Native, chance: Chance) -> Results:
    tensors, arguments = _many(native, chance)
    native.call("scale_gradients", factor=0.37, **arguments)
    return {"scaled": np.concatenate(tensors)}


def adamw(native: Native, chance: Chance, dtype: int, amsgrad: int, decoupled: int, beta1: float) -> Results:
    sizes = (1, 7, 33, 32_769, 1_025)
    tensors = {
        name: [chance.floats(size, dtype=dtype) for size in sizes] for name in ("parameters", "gradients", "exp_avg")
    }
    for name in ("exp_avg_sq", "max_exp_avg_sq"):
        tensors[name] = [chance.floats(size, dtype=dtype, low=0.25) for size in sizes]
    tensors["steps"] = [chance.place(np.array([number], np.float32)) for number in range(len(sizes))]
    lists = {
        name: native.place(np.array([one.ctypes.data for one in many], np.uint64)) for name, many in tensors.items()
    }
    lists["gradients"][1] = 0  # a parameter without a gradient
    groups = native.structs(
        "adamw_group",
        [(0.01, beta1, 0.99, 0.1, 1e-8, begin, end, decoupled, amsgrad, begin) for begin, end in ((0, 2), (2, 5))],
    )
    native.call(
        "adamw", sizes=native.place(np.array(sizes, np.int64)), dtypes=native.place(np.full(len(sizes), dtype, np.int32)),
        groups=groups, group_count=2, threads=THREADS, **lists,
    )  # fmt: skip
    return {name: np.concatenate(many) for name, many in tensors.items() if name != "gradients"}


# --- collectives: the ranks are threads of this process -----------------------------------------------------------------

REDUCIBLE = ("float32", "float64", "bfloat16", "float16", "int8", "uint8", "int16", "int32", "int64", "bool")
"""In the order of stoker_dtype in csrc/stoker.h."""
OPS = 8
SUM, AVG, FIRST_BIT_OP, FIRST_INTEGER = 0, 1, 5, 4


def _series() -> Iterator[tuple[int, list[int], bool]]:
    """Every type with every operation that is defined for it; whether the operands are whole numbers."""
    for kind, name in enumerate(REDUCIBLE):
        ops = list(range(FIRST_BIT_OP)) if kind < FIRST_INTEGER else [op for op in range(OPS) if op != AVG]
        if name == "float16":
            # Bochs 2.7 rounds fp32 that lies halfway between two fp16 away from zero, not to even; sums of whole numbers never
            # lie there. `half_way` has those that do.
            yield kind, [SUM, AVG], True
            ops = [op for op in ops if op not in (SUM, AVG)]
        yield kind, ops, False


def _operand_of(chance: Chance, kind: int, whole: bool, count: int) -> np.ndarray:
    name = REDUCIBLE[kind]
    if name == "bfloat16":
        return chance.floats(count, dtype=BF16)
    if name.startswith("float"):
        values = chance.whole(count) if whole else chance.floats(count)
        return values if name == "float32" else chance.place(values.astype(name))
    return chance.integers(count, np.bool_ if name == "bool" else name)


def _group(native: Native, ranks: int) -> list[int]:
    """The handles of all ranks, rank 0 first."""
    assert not native.call("comm_attach", address=b"nowhere", rank=1)
    assert native.call("comm_opening_error")
    first = native.call("comm_create", ranks=ranks, rank=0, slot_bytes=4096, named=0)
    assert first, native.call("comm_opening_error")
    address = native.call("comm_address", group=first)
    others = [native.call("comm_attach", address=address, rank=rank) for rank in range(1, ranks)]
    assert all(others), native.call("comm_opening_error")
    native.call("comm_seal", group=first)
    handles = [first, *others]
    for handle in handles:
        native.call("comm_timeout", group=handle, seconds=120.0)
        native.call("comm_names", group=handle, ranks=native.place(np.arange(ranks, dtype=np.int64)))
    return handles


def _on_every_rank(native: Native, ranks: int, body: Callable[[int, int], None]) -> None:
    """body(rank, handle) in a thread per rank; afterwards one rank aborts, which the others see."""
    handles, failures = _group(native, ranks), []

    def run(rank: int) -> None:
        try:
            body(rank, handles[rank])
        except BaseException as error:
            failures.append(f"rank {rank}: {error or native.call('comm_error', group=handles[rank])!r}")
            native.call("comm_abort", group=handles[rank], why=b"a rank failed")

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    native.call("comm_abort", group=handles[0], why=b"the end")
    assert native.call("comm_barrier", group=handles[1])
    assert b"the end" in native.call("comm_error", group=handles[1])
    for handle in handles:
        native.call("comm_destroy", group=handle)


def reductions(native: Native, chance: Chance, ranks: int, count: int) -> Results:
    """Every type with every operation; `count` elements fit a slot of 4,096 bytes, or take several."""
    series = list(_series())
    operands = [[_operand_of(chance, kind, whole, count) for kind, _, whole in series] for _ in range(ranks)]
    reduced: list[Results] = [{} for _ in range(ranks)]

    def body(rank: int, handle: int) -> None:
        for (kind, ops, _), data in zip(series, operands[rank], strict=True):
            before = data.copy()
            for op in ops:
                data[...] = before
                code = native.call("comm_allreduce", group=handle, data=data, count=count, dtype=kind, op=op, root=-1)
                assert code == 0, native.call("comm_error", group=handle)
                reduced[rank][f"{REDUCIBLE[kind]} op {op}"] = data.copy()

    _on_every_rank(native, ranks, body)
    for others in reduced[1:]:
        for name, values in others.items():
            assert values.tobytes() == reduced[0][name].tobytes(), f"the ranks differ in {name}"
    return reduced[0]


def half_way(native: Native, chance: Chance, count: int) -> Results:
    """Sums of two ranks that lie halfway between two fp16, on both sides of zero and of an even number."""
    unit = 2.0**-10  # of fp16 from 1 to 2
    steps, sign = np.arange(count) % 512, np.where(np.arange(count) % 3, 1.0, -1.0)
    parts = (sign * (1 + steps * unit), sign * unit / 2)
    data = [native.place(part.astype(np.float16)) for part in parts]

    def body(rank: int, handle: int) -> None:
        kind = REDUCIBLE.index("float16")
        code = native.call("comm_allreduce", group=handle, data=data[rank], count=count, dtype=kind, op=SUM, root=-1)
        assert code == 0, native.call("comm_error", group=handle)

    _on_every_rank(native, 2, body)
    expected = sign * (1 + (steps + steps % 2) * unit)
    assert (data[0].astype(np.float64) == expected).all(), "halfway between two fp16 must go to the even one"
    return {"sum": data[0]}


def exchanges(native: Native, chance: Chance, ranks: int, count: int) -> Results:
    """The collectives that move data, and reduce_scatter, on `count` bytes or floats for each rank."""

    def pointers(arrays: list[np.ndarray]) -> np.ndarray:
        return native.place(np.array([array.ctypes.data for array in arrays], np.uint64))

    def bytes_of() -> list[np.ndarray]:
        return [chance.integers(count, np.uint8) for _ in range(ranks)]

    def room(dtype: Any) -> list[np.ndarray]:
        return [native.empty(count, dtype) for _ in range(ranks)]

    floats = [[chance.floats(count) for _ in range(ranks)] for _ in range(ranks)]
    sources, parts = [bytes_of() for _ in range(ranks)], [bytes_of() for _ in range(ranks)]
    gathered, exchanged, at_root = ([room(np.uint8) for _ in range(ranks)] for _ in range(3))
    sums, scattered, shared = room(np.float32), room(np.uint8), bytes_of()
    tables = {
        name: [pointers(arrays) for arrays in table]
        for name, table in {
            "floats": floats,
            "parts": parts,
            "gathered": gathered,
            "exchanged": exchanged,
            "root": at_root,
        }.items()
    }
    counts = native.place(np.full(ranks, count, np.int64))

    def body(rank: int, handle: int) -> None:
        calls: list[tuple[str, dict[str, Any]]] = [
            (
                "reduce_scatter",
                {"sources": tables["floats"][rank], "to": sums[rank], "counts": counts, "dtype": 0, "op": 0},
            ),
            ("allgather", {"source": sources[rank][0], "to": tables["gathered"][rank], "bytes": counts}),
            ("broadcast", {"data": shared[rank], "bytes": count, "root": 1}),
            ("gather", {"source": sources[rank][0], "to": tables["root"][rank], "bytes": count, "root": 0}),
            ("scatter", {"sources": tables["parts"][rank], "to": scattered[rank], "bytes": count, "root": 1}),
            (
                "alltoall",
                {"sources": tables["parts"][rank], "sent": counts, "to": tables["exchanged"][rank], "received": counts},
            ),
            ("barrier", {}),
        ]
        for name, arguments in calls:
            assert native.call(f"comm_{name}", group=handle, **arguments) == 0, native.call("comm_error", group=handle)

    _on_every_rank(native, ranks, body)
    return {
        "reduce_scatter": np.stack(sums), "allgather": np.stack([np.stack(rows) for rows in gathered]),
        "broadcast": np.stack(shared), "gather": np.stack(at_root[0]), "scatter": np.stack(scattered),
        "alltoall": np.stack([np.stack(rows) for rows in exchanged]),
    }  # fmt: skip


def pipes(native: Native, chance: Chance, ranks: int, count: int) -> Results:
    """Each rank writes `count` bytes to the next one, in as many parts as its pipe takes, and reads as many."""
    sent = [chance.integers(count, np.uint8) for _ in range(ranks)]
    received = [native.empty(count, np.uint8) for _ in range(ranks)]

    def body(rank: int, handle: int) -> None:
        assert native.call("comm_await_all", group=handle, seconds=120.0) == -1
        after, before, written, read = (rank + 1) % ranks, (rank - 1) % ranks, 0, 0
        while written < count or read < count:
            seen = native.call("comm_bell", group=handle)
            rest, room = sent[rank][written:], received[rank][read:]
            accepted = native.call("comm_write", group=handle, to=after, data=rest, bytes=len(rest)) if len(rest) else 0
            found = (
                native.call("comm_read", group=handle, source=before, data=room, bytes=len(room)) if len(room) else 0
            )
            assert accepted >= 0, native.call("comm_opening_error")
            written, read = written + accepted, read + found
            if not accepted and not found:
                native.call("comm_sleep", group=handle, seen=seen, seconds=1.0)
        assert not native.call("comm_gone", group=handle, rank=after)
        seen = native.call("comm_bell", group=handle)
        native.call("comm_ring", group=handle)
        assert native.call("comm_sleep", group=handle, seen=seen, seconds=120.0) == 1
        assert native.call("comm_barrier", group=handle) == 0, native.call("comm_error", group=handle)

    _on_every_rank(native, ranks, body)
    for rank in range(ranks):
        assert (received[rank] == sent[(rank - 1) % ranks]).all(), f"rank {rank} read other bytes than were written"
    return {"received": np.stack(received)}


# --- the list -----------------------------------------------------------------------------------------------------------


def _cases() -> Iterator[Case]:
    yield Case("about the library", about, exact=True)
    for rows, columns in ((1, 1), (3, 67), (2, 333)):
        yield from _either(f"dropout {rows} x {columns}", dropout, exact=True, rows=rows, columns=columns)
    for kind, rms in (("layer norm", False), ("rms norm", True)):
        yield from _either(f"{kind} 5 x 3", norm, rows=5, columns=3, rms=rms, fused=False)
        yield from _either(f"{kind} 9 x 67", norm, rows=9, columns=67, rms=rms, fused=False)
        yield from _either(f"{kind} 7 x 45, frozen", norm, rows=7, columns=45, rms=rms, fused=False, frozen=True)
        yield from _either(f"dropout + residual + {kind} 11 x 131", norm, rows=11, columns=131, rms=rms, fused=True)
        options = {"rms": rms, "fused": True, "returns_sum": True}
        yield from _either(f"dropout + residual + {kind} 5 x 47, sum returned", norm, rows=5, columns=47, **options)
    for code, kind in enumerate(("gelu", "gelu_tanh", "relu", "silu")):
        for gated in (False, True):
            options = {"kind": code, "gated": gated, "columns": 519 if code == 0 else 61, "whole": kind == "relu"}
            yield from _either(f"{'gated ' * gated}{kind}", activation, exact=kind == "relu", rows=9, **options)
    yield Case("mask", read_mask, exact=True)
    yield from _either("embedding lookup", embedding_lookup, exact=True, tokens=13, rows=7, columns=35)
    yield from _either("embedding scatter", embedding_scatter, exact=True, tokens=203, rows=3, columns=35)
    for p in (0.0, 0.2):
        yield from _either(f"embedding norm, p = {p}", embedding_norm, tokens=11, columns=77, p=p)
    for rows, columns in ((5, 37), (3, 1031)):
        yield from _either(f"cross entropy {rows} x {columns}", cross_entropy, rows=rows, columns=columns)
    terms = {"scale": 0.7, "label_smoothing": 0.1, "z_loss": 1e-3}
    for kind, options in (("", {}), (", all terms", {**terms, "softcap": 5.0}), (", without cap", terms)):
        yield Case(f"cross entropy block{kind}", partial(cross_entropy_block, rows=5, columns=601, **options))

    yield from _either("attention", attention, lengths=(1, 0, 71, 5), heads=2, kv_heads=2, size=33)
    options = {"window": (UNLIMITED, 0), "rotary": 22, "p": 0.1}
    yield from _either(
        "attention, causal, rotary, grouped", attention, lengths=(37, 3), heads=4, kv_heads=2, size=22, **options
    )
    options = {"window": (9, 17), "with_bias": True, "p": 0.3}
    yield from _either(
        "attention, window, bias", attention, lengths=(29, 66, 1), heads=3, kv_heads=1, size=7, **options
    )
    yield Case(
        "attention, two blocks of keys", partial(attention, dtype=FP32, lengths=(531,), heads=1, kv_heads=1, size=3)
    )
    options = {"lengths": (2051,), "heads": 1, "kv_heads": 1, "size": 5, "window": (5, 3)}
    yield Case("attention, two chunks of keys", partial(attention, dtype=FP32, **options))
    options = {"window": (23, 0), "rotary": 10, "with_bias": True, "with_sinks": True, "softcap": 1.3, "p": 0.1}
    yield from _either(
        "attention, softcap, sinks, partial rotary", attention, lengths=(67, 1), heads=2, kv_heads=1, size=19, **options
    )
    options = {"positions": 37, "with_bias": True, "softcap": 2.0, "p": 0.1}
    yield from _either(
        "attention, relative positions", attention, lengths=(71, 1, 0, 23), heads=2, kv_heads=2, size=19, **options
    )
    options = {"lengths": (531,), "heads": 1, "kv_heads": 1, "size": 3, "positions": 9, "window": (UNLIMITED, 40)}
    yield Case("attention, relative positions, two blocks of keys", partial(attention, dtype=FP32, **options))
    options = {"lengths": (1, 67, 0, 3), "key_lengths": (43, 5, 7, 2), "heads": 2, "size": 11}
    yield from _either("cross attention", cross_attention, **options)
    options = {"lengths": (3,), "key_lengths": (2051,), "heads": 1, "size": 5}
    yield Case("cross attention, two chunks of keys", partial(cross_attention, dtype=FP32, **options))

    for order in ("nt", "nn", "tn"):
        yield from _either(f"product {order}", product, rows=29, columns=45, depths=(67,), order=order)
        options = {"columns": 37, "depths": (19,), "order": order, "whole": True}
        yield from _either(f"product {order}, whole numbers", product, exact=True, rows=13, **options)
        yield from _either(f"product {order}, many rows, whole numbers", product, exact=True, rows=258, **options)
    options = {"order": "nt", "whole": True, "with_bias": True}
    sizes = {"rows": 7, "columns": 35, "depths": (19, 3)}
    yield from _either("product of two terms, bias, whole numbers", product, exact=True, **sizes, **options)
    yield from _either("product added, whole numbers", product, exact=True, **sizes, **options, accumulate=True)
    # One more than a tile has rows, columns and depth, by the ways for few and for many rows.
    for rows in (97, 257):
        sizes = {"rows": rows, "columns": 385, "depths": (257,)}
        case = partial(product, dtype=FP32, **sizes, **options)
        yield Case(f"product of many tiles, {rows} rows, whole numbers", case, exact=True)
    yield from _either("column sums", column_sums, exact=True, rows=259, columns=67)
    yield from _either("rows", rows_of_sums, exact=True, rows=7, columns=133)
    yield Case("program", partial(program, rows=3, columns=37), exact=True)
    for bits in (4, 8):
        yield from _either(f"weight in {bits} bits", quantized, exact=True, rows=7, columns=39, bits=bits)
    yield Case("norm of many gradients", gradient_norm)
    yield Case("scale of many gradients", gradient_scale, exact=True)
    yield from _either("AdamW", adamw, amsgrad=0, decoupled=1, beta1=0.9)
    yield from _either("Adam with amsgrad", adamw, amsgrad=1, decoupled=0, beta1=0.25)

    yield Case("reductions of 2 ranks, one slot", partial(reductions, ranks=2, count=37), exact=True)
    yield Case("reductions of 3 ranks, several slots", partial(reductions, ranks=3, count=1061), exact=True)
    yield Case("sums halfway between two fp16", partial(half_way, count=67), exact=True, emulated=False)
    yield Case("exchanges of 3 ranks", partial(exchanges, ranks=3, count=4133), exact=True)
    yield Case("pipes of 3 ranks", partial(pipes, ranks=3, count=70_001), exact=True)


CASES = tuple(_cases())
