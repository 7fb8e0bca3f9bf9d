"""Attention over sequences of different lengths, laid end to end without padding.

    S = cap(scale * (Q K^T + R)) + bias      cap(s) = c tanh(s / c) with softcap c; -inf where a query may not see a key
    R_ij = q_i . position_k[r] + k_j . position_q[r]     r: the row for the distance i - j; 0 without relative positions
    P = exp(S) / (rowsum(exp(S)) + exp(sink))    per sequence and head; without sinks the last term is 0: softmax
    O = (P * m / (1 - p)) V                  m: dropout mask
    dV = (P * m / (1 - p))^T dO
    dS = P * (dO V^T * m / (1 - p) - rowsum(dO * O)),   dbias = sum of dS
    dsink = -sum of exp(sink - lse) * rowsum(dO * O)
    dQ = scale * dC K,   dK = scale * dC^T Q,   dC = dS * (1 - tanh^2), or dS without softcap
    dq_i += scale * sum_j dC_ij position_k[r],   dposition_k[r] = scale * sum of dC_ij q_i over i, j with that r; dk_j alike

Saved for backward: the inputs, O, and the log-sum-exp (lse) of each row; the scores are computed again, block by block
(csrc/kernels/attention.cpp). With `rotary` Q and K are rotated as they are read, and their gradients rotated back as they
are written.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from stoker.kernels import native
from stoker.kernels.dropout import check_probability
from stoker.kernels.registry import check_device, check_tensor, define, draw_key, key_value

__all__ = ["Relative", "attention", "attention_packed", "gradient_parts"]

_UNLIMITED = 2**62
_GROUPS = 4  # parts that the gradients of bias and positions are summed in: more parts, more parallel work, more memory

Relative = tuple[Tensor | None, Tensor | None, Tensor]
"""(position_q, position_k, rows): tables (n, heads, size) of relative positions, and their row for each distance."""


def gradient_parts(sequences: int) -> int:
    """In how many parts the gradients of bias and positions are summed over so many sequences."""
    return max(1, min(_GROUPS, sequences))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    bias: Tensor | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    relative: Relative | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Tensor:
    """Attention of `q` (tokens, heads, size) over `k`, `v` (tokens, kv_heads, size) within each sequence.

    Sequence i is rows cu_seqlens[i] to cu_seqlens[i + 1]. `window` is how many positions before and after its own a token
    sees (-1: all). `bias` (heads, n_q, n_k), at least as long as the longest sequence, is added to every sequence's scores.
    `rotary` is (cos, sin), each (tokens, r / 2), and rotates the first r of `size` dimensions. `scale` defaults to
    1 / sqrt(size). `softcap` limits scores to +-softcap before the bias. `sinks` (heads,) adds a score to each row that has
    no value. `relative` is (position_q, position_k, rows): scale * (q_i . position_k[r] + k_j . position_q[r]) is added to the
    score of query i and key j before the cap, with r = rows[n - 1 + i - j]; both tables are (any, heads, size), or one is None,
    and `rows` is (2 n - 1,), n at least the longest sequence; it takes neither grouped heads nor `rotary`. With `cu_seqlens_k`
    keys and values have lengths of their own: cross attention, which takes neither `causal` nor `window`, `rotary` or
    `relative`. Returns (tokens, heads, size).
    """
    check_device("attention", q=q, k=k, v=v)
    size = q.shape[-1] if q.dim() else 1
    options = _options(
        size, cu_seqlens, cu_seqlens_k, causal, window, bias, rotary, scale, dropout_p, softcap, sinks, relative
    )
    result: Tensor = _attention(q, k, v, *options)[0]
    return result


def attention_packed(
    qkv: Tensor,
    cu_seqlens: Tensor,
    heads: int,
    kv_heads: int | None = None,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    bias: Tensor | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    relative: Relative | None = None,
    layout: Literal["blocks", "heads"] = "blocks",
) -> Tensor:
    """As `attention`, with q, k and v side by side in one tensor (tokens, (heads + 2 * kv_heads) * size).

    That is what one product with stacked q/k/v weights gives; the gradient comes back as one tensor too, without the three
    zero-filled copies that slicing would cost. `layout` is the order within a row: "blocks" has all heads of q, then of k,
    then of v; "heads" has q, k and v of the first head, then of the next (GPT-NeoX). Returns (tokens, heads * size).
    """
    check_device("attention", qkv=qkv)
    kv_heads = heads if kv_heads is None else kv_heads
    if qkv.dim() != 2 or heads < 1 or kv_heads < 1 or qkv.shape[1] % (heads + 2 * kv_heads):
        raise ValueError(
            f"attention: qkv has shape {tuple(qkv.shape)}; it must be (tokens, (heads + 2 * kv_heads) * head size) "
            f"with heads={heads}, kv_heads={kv_heads}"
        )
    if layout not in ("blocks", "heads"):
        raise ValueError(f"attention: layout is {layout!r}; it must be 'blocks' or 'heads'")
    if layout == "heads" and kv_heads != heads:
        raise ValueError(f"attention: layout 'heads' needs as many key/value heads as heads, {heads}, not {kv_heads}")
    size = qkv.shape[1] // (heads + 2 * kv_heads)
    options = _options(size, cu_seqlens, None, causal, window, bias, rotary, scale, dropout_p, softcap, sinks, relative)
    result: Tensor = _attention_packed(qkv, heads, kv_heads, layout, *options)[0]
    return result


class _Options(NamedTuple):
    """What forward and backward share beside q, k and v: the operators' arguments in the order of `_OPTIONS`."""

    cu_seqlens: Tensor
    cu_seqlens_k: Tensor | None
    bias: Tensor | None
    sinks: Tensor | None
    position_q: Tensor | None
    position_k: Tensor | None
    distance_rows: Tensor | None
    cosine: Tensor | None
    sine: Tensor | None
    key: Tensor | None
    left: int
    right: int
    scale: float
    softcap: float  # 0: none
    p: float


_OPTIONS = (
    "Tensor cu_seqlens, Tensor? cu_seqlens_k, Tensor? bias, Tensor? sinks, Tensor? position_q, Tensor? position_k, "
    "Tensor? distance_rows, Tensor? cosine, Tensor? sine, Tensor? key, int left, int right, float scale, float softcap, float p"
)
_TENSORS = _OPTIONS.count("Tensor")
_TRAINED = ("bias", "sinks", "position_q", "position_k")
_INDEX = tuple(_Options._fields.index(name) for name in _TRAINED)
"""Where the options that can have a gradient are among all of them."""


def _options(
    size: int,
    cu_seqlens: Tensor,
    cu_seqlens_k: Tensor | None,
    causal: bool,
    window: tuple[int, int] | None,
    bias: Tensor | None,
    rotary: tuple[Tensor, Tensor] | None,
    scale: float | None,
    dropout_p: float,
    softcap: float | None,
    sinks: Tensor | None,
    relative: Relative | None,
) -> _Options:
    """The arguments of the public functions as the operators take them."""
    cosine, sine = rotary if rotary is not None else (None, None)
    position_q, position_k, distance_rows = relative if relative is not None else (None, None, None)
    check_device("attention", cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k, bias=bias, sinks=sinks)
    check_device("attention", cos=cosine, sin=sine)
    check_device("attention", position_q=position_q, position_k=position_k, rows=distance_rows)
    if torch.is_grad_enabled() and any(table is not None and table.requires_grad for table in (cosine, sine)):
        raise ValueError("attention: rotary asks for a gradient, which is not computed; detach cos and sin")
    if softcap is not None and not 0.0 < softcap < math.inf:
        raise ValueError(f"attention: softcap is {softcap}; it must be a positive number, or None for no cap")
    check_probability("attention", dropout_p)
    left, right = (_UNLIMITED if side < 0 else side for side in (window or (-1, -1)))
    return _Options(
        cu_seqlens,
        cu_seqlens_k,
        bias,
        sinks,
        position_q,
        position_k,
        distance_rows,
        cosine,
        sine,
        draw_key() if dropout_p > 0.0 else None,
        left,
        0 if causal else right,
        1.0 / math.sqrt(max(size, 1)) if scale is None else float(scale),
        0.0 if softcap is None else float(softcap),
        dropout_p,
    )


def _lengths(name: str, cu_seqlens: Tensor, tokens: int) -> list[int]:
    check_tensor("attention", name, cu_seqlens, shape=(None,), dtypes=(torch.int32, torch.int64))
    starts: list[int] = cu_seqlens.tolist()
    if not starts or starts[0] != 0 or starts[-1] != tokens:
        raise ValueError(
            f"attention: {name} runs from {starts[0] if starts else 'nothing'} to {starts[-1] if starts else 'nothing'}; "
            f"it must run from 0 to the number of tokens, {tokens}"
        )
    lengths = [end - begin for begin, end in itertools.pairwise(starts)]
    if any(length < 0 for length in lengths):
        raise ValueError(f"attention: {name} decreases at sequence {next(i for i, n in enumerate(lengths) if n < 0)}")
    return lengths


def _key_lengths(key_tokens: int, lengths: list[int], options: _Options) -> list[int]:
    """The lengths of the keys: `lengths`, or in cross attention their own."""
    if options.cu_seqlens_k is None:
        return lengths
    related = options.cosine, options.distance_rows
    if min(options.left, options.right) < _UNLIMITED or any(option is not None for option in related):
        raise ValueError(
            "attention: cu_seqlens_k does not go with causal, window, rotary or relative: positions of queries and of keys "
            "are unrelated in cross attention"
        )
    key_lengths = _lengths("cu_seqlens_k", options.cu_seqlens_k, key_tokens)
    if len(key_lengths) != len(lengths):
        raise ValueError(
            f"attention: cu_seqlens_k has {len(key_lengths)} sequences; it must have as many as cu_seqlens, {len(lengths)}"
        )
    return key_lengths


def _check(q: Tensor, k: Tensor, v: Tensor, options: _Options) -> list[int]:
    """Raises ValueError for arguments that do not fit each other; returns the lengths of the keys."""
    check_tensor("attention", "q", q, shape=(None, None, None))
    tokens, heads, size = q.shape
    cross = options.cu_seqlens_k is not None
    check_tensor("attention", "k", k, shape=(None if cross else tokens, None, size), dtypes=(q.dtype,))
    check_tensor("attention", "v", v, shape=k.shape, dtypes=(q.dtype,))
    if not k.shape[1] or heads % k.shape[1]:
        raise ValueError(f"attention: {heads} query heads cannot share {k.shape[1]} key/value heads evenly")
    if size == 0:
        raise ValueError("attention: the head size is 0")
    lengths = _lengths("cu_seqlens", options.cu_seqlens, tokens)
    key_lengths = _key_lengths(k.shape[0], lengths, options)
    if options.bias is not None:
        check_tensor("attention", "bias", options.bias, shape=(heads, None, None), dtypes=(torch.float32,))
        rows, columns = max(lengths, default=0), max(key_lengths, default=0)
        if options.bias.shape[1] < rows or options.bias.shape[2] < columns:
            raise ValueError(
                f"attention: bias has shape {tuple(options.bias.shape)}; it must be (heads, n_q, n_k) with n_q at least "
                f"{rows} and n_k at least {columns}"
            )
    if options.sinks is not None:
        check_tensor("attention", "sinks", options.sinks, shape=(heads,), dtypes=(torch.float32,))
    if options.distance_rows is not None:
        _check_positions(q, k.shape[1], max(lengths, default=0), options, options.distance_rows)
    if (options.cosine is None) != (options.sine is None):
        raise ValueError("attention: rotary is (cos, sin); one of the two is None")
    if options.cosine is not None and options.sine is not None:
        check_tensor("attention", "cos", options.cosine, shape=(tokens, None), dtypes=(torch.float32,))
        check_tensor("attention", "sin", options.sine, shape=options.cosine.shape, dtypes=(torch.float32,))
        if 2 * options.cosine.shape[1] > size:
            raise ValueError(
                f"attention: cos has shape {tuple(options.cosine.shape)}; it must be (tokens, r / 2) with r at most the "
                f"head size, {size}"
            )
    return key_lengths


def _check_positions(q: Tensor, kv_heads: int, longest: int, options: _Options, rows: Tensor) -> None:
    _, heads, size = q.shape
    if kv_heads != heads or options.cosine is not None:
        raise ValueError("attention: relative does not go with rotary, or with fewer key/value heads than heads")
    given = {name: table for name in ("position_q", "position_k") if (table := getattr(options, name)) is not None}
    for name, table in given.items():
        check_tensor("attention", name, table, shape=(None, heads, size), dtypes=(q.dtype,))
    counts = {table.shape[0] for table in given.values()}
    if len(counts) != 1:
        raise ValueError(
            f"attention: relative has tables of {sorted(counts)} rows; it must have one table or two of equal size"
        )
    check_tensor("attention", "rows", rows, shape=(None,), dtypes=(torch.int64,))
    if rows.numel() % 2 == 0 or rows.numel() < 2 * longest - 1:
        raise ValueError(
            f"attention: rows has {rows.numel()} elements; it must have 2 n - 1, with n at least the longest sequence, {longest}"
        )
    lowest, highest = (int(end) for end in rows.aminmax())
    if lowest < 0 or highest >= next(iter(counts)):
        raise IndexError(
            f"attention: rows runs from {lowest} to {highest}; it must be rows of the tables, 0 to {next(iter(counts)) - 1}"
        )


def _dense_last(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _fill(q: Tensor, k: Tensor, v: Tensor, options: _Options) -> tuple[Any, list[Tensor]]:
    """The stoker_attention_call with all that forward and backward share, and the tensors that must outlive it."""
    starts = options.cu_seqlens.to(torch.int64).contiguous()
    key_starts = starts if options.cu_seqlens_k is None else options.cu_seqlens_k.to(torch.int64).contiguous()
    alive = [q, k, v, starts, key_starts]
    call = native.struct("stoker_attention_call")(
        q=q.data_ptr(),
        k=k.data_ptr(),
        v=v.data_ptr(),
        starts=starts.data_ptr(),
        key_starts=key_starts.data_ptr(),
        sequences=starts.numel() - 1,
        heads=q.shape[1],
        kv_heads=k.shape[1],
        head_size=q.shape[2],
        q_token=q.stride(0),
        q_head=q.stride(1),
        k_token=k.stride(0),
        k_head=k.stride(1),
        v_token=v.stride(0),
        v_head=v.stride(1),
        left=options.left,
        right=options.right,
        scale=options.scale,
        softcap=options.softcap,
        p=options.p,
        key=0 if options.key is None else key_value(options.key),
        dtype=native.dtype_code(q.dtype),
        threads=native.threads(),
    )
    for name in ("bias", "sinks", "distance_rows", "cosine", "sine"):
        tensor = getattr(options, name)
        if tensor is not None:
            dense = tensor.contiguous()
            alive.append(dense)
            setattr(call, name, dense.data_ptr())
    if options.bias is not None:
        call.bias_rows, call.bias_columns = options.bias.shape[1:]
    if options.distance_rows is not None:
        for name in ("position_q", "position_k"):
            if (table := getattr(options, name)) is not None:
                table = table if table.stride()[1:] == (q.shape[2], 1) else table.contiguous()
                alive.append(table)
                setattr(call, name, table.data_ptr())
                setattr(call, f"{name}_row", table.stride(0))
                call.position_rows = table.shape[0]
        call.reach = (options.distance_rows.numel() + 1) // 2
    if options.cosine is not None:
        call.rotary_half = options.cosine.shape[1]
    return call, alive


def _run_forward(
    q: Tensor, k: Tensor, v: Tensor, options: _Options, out_shape: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp of each row."""
    _check(q, k, v, options)
    q, k, v = _dense_last(q), _dense_last(k), _dense_last(v)
    # Made in its final shape: torch forbids in-place operations on a view that an operator returns.
    out = torch.empty(out_shape, dtype=q.dtype)
    lse = torch.empty(q.shape[:2], dtype=torch.float32)
    if q.numel():
        call, alive = _fill(q, k, v, options)
        call.out, call.lse = out.data_ptr(), lse.data_ptr()
        native.call("stoker_attention_forward", call)
        del alive
    return out, lse


def _run_backward(
    grads: tuple[Tensor, Tensor, Tensor],
    inputs: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    options: _Options,
    wanted: list[bool],
) -> list[Tensor]:
    """Writes the gradients of q, k and v into `grads`, whose strides must be those of `inputs`; returns those of `_TRAINED`.

    A gradient that is not wanted is an empty tensor.
    """
    key_lengths = _check(*inputs, options)
    call, alive = _fill(*inputs, options)
    dout = dout.contiguous()
    call.out, call.lse, call.dout = out.data_ptr(), lse.data_ptr(), dout.data_ptr()
    call.dq, call.dk, call.dv = (grad.data_ptr() for grad in grads)
    call.groups = gradient_parts(len(key_lengths))
    found = []
    for name, needed in zip(_TRAINED, wanted, strict=True):
        option = getattr(options, name)
        parts = () if name == "sinks" else (call.groups,)
        found.append(torch.empty(*parts, *option.shape, dtype=torch.float32) if needed else lse.new_empty(0))
        if needed:
            setattr(call, f"d{name}", found[-1].data_ptr())
    chunk: int = native.library().stoker_attention_key_chunk()
    longest = max(key_lengths, default=0)
    if longest > chunk:
        parts_of_dq = torch.empty(-(-longest // chunk), *out.shape, dtype=torch.float32)
        call.dq_parts = parts_of_dq.data_ptr()
        alive.append(parts_of_dq)
    native.call("stoker_attention_backward", call)
    del alive
    return [
        _whole(name, grad, options) if needed else grad
        for name, grad, needed in zip(_TRAINED, found, wanted, strict=True)
    ]


def _whole(name: str, parts: Tensor, options: _Options) -> Tensor:
    """The gradient of an option in its own type: the kernel has added all parts to the first."""
    if name == "sinks":
        return parts
    # a copy, which does not keep the memory of the other parts
    return parts[0].to(getattr(options, name).dtype, copy=len(parts) > 1)


def _register(
    name: str, arguments: str, split: Callable[..., tuple[Tensor, Tensor, Tensor]], side_by_side: bool
) -> Callable[..., Any]:
    """Defines the operator `name` and its gradient. `arguments` are those before the options, tensors first.

    `split` makes views of q, k and v from them. The output has the heads apart, or `side_by_side`.
    """
    count, tensors = arguments.count(",") + 1, arguments.count("Tensor")

    def out_shape(q: Tensor) -> tuple[int, ...]:
        return (q.shape[0], q.shape[1] * q.shape[2]) if side_by_side else tuple(q.shape)

    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        q, k, v = split(*args[:count])
        return _run_forward(q, k, v, _Options(*args[count:]), out_shape(q))

    def forward_fake(*args: Any) -> tuple[Tensor, Tensor]:
        q, _, _ = split(*args[:count])
        return q.new_empty(out_shape(q)), q.new_empty(q.shape[:2], dtype=torch.float32)

    def backward_kernel(dout: Tensor, out: Tensor, lse: Tensor, wanted: list[bool], *args: Any) -> tuple[Tensor, ...]:
        # Gradients are dense; bring the inputs to the same strides so that one set of strides describes both.
        dense, rest = [tensor.contiguous() for tensor in args[:tensors]], args[tensors:count]
        grads = [torch.empty_like(tensor) for tensor in dense]
        views = split(*grads, *rest), split(*dense, *rest)
        return *grads, *_run_backward(*views, out, lse, dout, _Options(*args[count:]), wanted)

    def backward_fake(dout: Tensor, out: Tensor, lse: Tensor, wanted: list[bool], *args: Any) -> tuple[Tensor, ...]:
        options = [args[count + index] for index in _INDEX]
        others = [
            option.new_empty(option.shape) if needed else lse.new_empty(0)
            for option, needed in zip(options, wanted, strict=True)
        ]
        return *(tensor.new_empty(tensor.shape) for tensor in args[:tensors]), *others

    gradient = define(
        f"{name}_backward(Tensor dout, Tensor out, Tensor lse, bool[] wanted, {arguments}, {_OPTIONS}) -> "
        f"({', '.join(['Tensor'] * (tensors + len(_TRAINED)))})",
        backward_kernel,
        backward_fake,
    )

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output, *inputs[:tensors], *inputs[count : count + _TENSORS])
        ctx.numbers = inputs[tensors:count], inputs[count + _TENSORS :]

    def backward(ctx: Any, dout: Tensor | None, _: Any) -> tuple[Any, ...]:
        found: list[Any] = [None] * (count + len(_Options._fields))
        if dout is not None:
            out, lse, *saved = ctx.saved_tensors
            rest, numbers = ctx.numbers
            wanted = [ctx.needs_input_grad[count + index] for index in _INDEX]
            grads = gradient(dout, out, lse, wanted, *saved[:tensors], *rest, *saved[tensors:], *numbers)
            found[:tensors] = grads[:tensors]
            for index, grad, needed in zip(_INDEX, grads[tensors:], wanted, strict=True):
                found[count + index] = grad if needed else None
        return tuple(found)

    return define(
        f"{name}({arguments}, {_OPTIONS}) -> (Tensor, Tensor)",
        forward,
        forward_fake,
        backward=backward,
        setup_context=setup_context,
    )


def _apart(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q, k, v


def _split(qkv: Tensor, heads: int, kv_heads: int, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """Views of q, k and v, no copy."""
    if layout == "heads":
        q, k, v = qkv.unflatten(1, (heads, 3, -1)).unbind(2)
        return q, k, v
    parts = qkv.unflatten(1, (heads + 2 * kv_heads, -1))
    return parts[:, :heads], parts[:, heads : heads + kv_heads], parts[:, heads + kv_heads :]


_attention = _register("attention", "Tensor q, Tensor k, Tensor v", _apart, side_by_side=False)
_attention_packed = _register(
    "attention_packed", "Tensor qkv, int heads, int kv_heads, str layout", _split, side_by_side=True
)
