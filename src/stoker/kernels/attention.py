"""Attention over sequences of different lengths, laid end to end without padding.

    P = softmax(scale * Q K^T + bias)        per sequence and head; -inf where a query may not see a key
    O = (P * m / (1 - p)) V                  m: dropout mask
    dV = (P * m / (1 - p))^T dO
    dS = P * (dO V^T * m / (1 - p) - rowsum(dO * O)),   dQ = scale * dS K,   dK = scale * dS^T Q,   dbias = sum of dS

Saved for backward: the inputs, O, and the log-sum-exp of each row; the scores are computed again, block by block
(csrc/kernels/attention.cpp). With `rotary` Q and K are rotated as they are read, and their gradients rotated back as they
are written.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stoker.kernels import native
from stoker.kernels.dropout import check_probability
from stoker.kernels.registry import check_device, check_tensor, define, draw_key, key_value

__all__ = ["attention", "attention_packed"]

_UNLIMITED = 2**62
_BIAS_GROUPS = 4  # parts that the bias gradient is summed in: more parts, more parallel work, more memory


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
) -> Tensor:
    """Attention of `q` (tokens, heads, size) over `k`, `v` (tokens, kv_heads, size) within each sequence.

    Sequence i is rows cu_seqlens[i] to cu_seqlens[i + 1]. `window` is how many positions before and after its own a token
    sees (-1: all). `bias` (heads, n, n), n at least the longest length, is added to every sequence's scores. `rotary` is
    (cos, sin), each (tokens, size / 2). `scale` defaults to 1 / sqrt(size). Returns (tokens, heads, size).
    """
    check_device("attention", q=q, k=k, v=v, cu_seqlens=cu_seqlens, bias=bias)
    left, right = _window(causal, window)
    cosine, sine = _rotary(rotary)
    size = q.shape[-1] if q.dim() else 1
    result: Tensor = _attention(
        q, k, v, cu_seqlens, bias, cosine, sine, _key(dropout_p), left, right, _scale(scale, size), dropout_p
    )[0]
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
) -> Tensor:
    """As `attention`, with q, k and v side by side in one tensor (tokens, (heads + 2 * kv_heads) * size).

    That is what one product with stacked q/k/v weights gives; the gradient comes back as one tensor too, without the three
    zero-filled copies that slicing would cost. Returns (tokens, heads * size).
    """
    check_device("attention", qkv=qkv, cu_seqlens=cu_seqlens, bias=bias)
    kv_heads = heads if kv_heads is None else kv_heads
    if qkv.dim() != 2 or heads < 1 or kv_heads < 1 or qkv.shape[1] % (heads + 2 * kv_heads):
        raise ValueError(
            f"attention: qkv has shape {tuple(qkv.shape)}; it must be (tokens, (heads + 2 * kv_heads) * head size) "
            f"with heads={heads}, kv_heads={kv_heads}"
        )
    left, right = _window(causal, window)
    cosine, sine = _rotary(rotary)
    size = qkv.shape[1] // (heads + 2 * kv_heads)
    result: Tensor = _attention_packed(
        qkv,
        heads,
        kv_heads,
        cu_seqlens,
        bias,
        cosine,
        sine,
        _key(dropout_p),
        left,
        right,
        _scale(scale, size),
        dropout_p,
    )[0]
    return result


def _rotary(rotary: tuple[Tensor, Tensor] | None) -> tuple[Tensor | None, Tensor | None]:
    cosine, sine = rotary if rotary is not None else (None, None)
    check_device("attention", cos=cosine, sin=sine)
    if torch.is_grad_enabled() and any(table is not None and table.requires_grad for table in (cosine, sine)):
        raise ValueError("attention: rotary asks for a gradient, which is not computed; detach cos and sin")
    return cosine, sine


def _key(p: float) -> Tensor | None:
    check_probability("attention", p)
    return draw_key() if p > 0.0 else None


def _scale(scale: float | None, size: int) -> float:
    return 1.0 / math.sqrt(max(size, 1)) if scale is None else float(scale)


def _window(causal: bool, window: tuple[int, int] | None) -> tuple[int, int]:
    left, right = (-1, -1) if window is None else window
    left = _UNLIMITED if left < 0 else left
    right = _UNLIMITED if right < 0 else right
    return left, 0 if causal else right


class _Options(NamedTuple):
    """What forward and backward share beside q, k and v."""

    cu_seqlens: Tensor
    bias: Tensor | None
    cosine: Tensor | None
    sine: Tensor | None
    key: Tensor | None
    left: int
    right: int
    scale: float
    p: float


def _lengths(cu_seqlens: Tensor, tokens: int) -> list[int]:
    check_tensor("attention", "cu_seqlens", cu_seqlens, shape=(None,), dtypes=(torch.int32, torch.int64))
    starts: list[int] = cu_seqlens.tolist()
    if not starts or starts[0] != 0 or starts[-1] != tokens:
        raise ValueError(
            f"attention: cu_seqlens runs from {starts[0] if starts else 'nothing'} to {starts[-1] if starts else 'nothing'}; "
            f"it must run from 0 to the number of tokens, {tokens}"
        )
    lengths = [end - begin for begin, end in itertools.pairwise(starts)]
    if any(length < 0 for length in lengths):
        raise ValueError(
            f"attention: cu_seqlens decreases at sequence {next(i for i, n in enumerate(lengths) if n < 0)}"
        )
    return lengths


def _check(q: Tensor, k: Tensor, v: Tensor, options: _Options) -> list[int]:
    check_tensor("attention", "q", q, shape=(None, None, None))
    tokens, heads, size = q.shape
    check_tensor("attention", "k", k, shape=(tokens, None, size), dtypes=(q.dtype,))
    check_tensor("attention", "v", v, shape=(tokens, k.shape[1], size), dtypes=(q.dtype,))
    if not k.shape[1] or heads % k.shape[1]:
        raise ValueError(f"attention: {heads} query heads cannot share {k.shape[1]} key/value heads evenly")
    if size == 0:
        raise ValueError("attention: the head size is 0")
    lengths = _lengths(options.cu_seqlens, tokens)
    longest = max(lengths, default=0)
    if options.bias is not None:
        check_tensor("attention", "bias", options.bias, shape=(heads, None, None), dtypes=(torch.float32,))
        rows, columns = options.bias.shape[1:]
        if rows != columns or rows < longest:
            raise ValueError(
                f"attention: bias has shape {tuple(options.bias.shape)}; it must be (heads, n, n) with n at least {longest}"
            )
    if (options.cosine is None) != (options.sine is None):
        raise ValueError("attention: rotary is (cos, sin); one of the two is None")
    for name, table in (("cos", options.cosine), ("sin", options.sine)):
        if table is not None:
            if size % 2:
                raise ValueError(f"attention: rotary needs an even head size, not {size}")
            check_tensor("attention", name, table, shape=(tokens, size // 2), dtypes=(torch.float32,))
    return lengths


def _dense_last(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _fill(q: Tensor, k: Tensor, v: Tensor, options: _Options) -> tuple[Any, list[Tensor]]:
    """The stoker_attention_call with all that forward and backward share, and the tensors that must outlive it."""
    starts = options.cu_seqlens.to(torch.int64).contiguous()
    alive = [q, k, v, starts]
    call = native.struct("stoker_attention_call")(
        q=q.data_ptr(),
        k=k.data_ptr(),
        v=v.data_ptr(),
        starts=starts.data_ptr(),
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
        p=options.p,
        key=0 if options.key is None else key_value(options.key),
        dtype=native.dtype_code(q.dtype),
        threads=native.threads(),
    )
    for name, tensor in (("bias", options.bias), ("cosine", options.cosine), ("sine", options.sine)):
        if tensor is not None:
            dense = tensor.contiguous()
            alive.append(dense)
            setattr(call, name, dense.data_ptr())
    if options.bias is not None:
        call.bias_length = options.bias.shape[1]
    return call, alive


def _run_forward(
    q: Tensor, k: Tensor, v: Tensor, options: _Options, *, side_by_side: bool = False
) -> tuple[Tensor, Tensor]:
    """The output, heads apart or side by side, and the log-sum-exp of each row."""
    _check(q, k, v, options)
    q, k, v = _dense_last(q), _dense_last(k), _dense_last(v)
    tokens, heads, size = q.shape
    # Made in its final shape: torch forbids in-place operations on a view that an operator returns.
    out = torch.empty((tokens, heads * size) if side_by_side else q.shape, dtype=q.dtype)
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
    bias_grad: bool,
) -> Tensor | None:
    """Writes the gradients of q, k and v into `grads`, whose strides must be those of `inputs`; returns that of the bias."""
    lengths = _check(*inputs, options)
    dbias = None
    if bias_grad:
        assert options.bias is not None
        groups = min(_BIAS_GROUPS, max(len(lengths), 1))
        dbias = torch.zeros(groups, *options.bias.shape, dtype=torch.float32)
    if not out.numel():
        return None if dbias is None else dbias.sum(0)
    call, alive = _fill(*inputs, options)
    dout = dout.contiguous()
    call.out, call.lse, call.dout = out.data_ptr(), lse.data_ptr(), dout.data_ptr()
    call.dq, call.dk, call.dv = (grad.data_ptr() for grad in grads)
    if dbias is not None:
        call.dbias, call.bias_groups = dbias.data_ptr(), dbias.shape[0]
    chunk: int = native.library().stoker_attention_key_chunk()
    longest = max(lengths, default=0)
    if longest > chunk:
        parts = torch.empty(-(-longest // chunk), *out.shape, dtype=torch.float32)
        call.dq_parts = parts.data_ptr()
        alive.append(parts)
    native.call("stoker_attention_backward", call)
    del alive
    if dbias is None:
        return None
    return dbias[0] if dbias.shape[0] == 1 else dbias.sum(0)


# --- q, k and v apart ---------------------------------------------------------------------------------------------------

_OPTIONS = "Tensor cu_seqlens, Tensor? bias, Tensor? cosine, Tensor? sine, Tensor? key, int left, int right, float scale, float p"


def _forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return _run_forward(q, k, v, _Options(*options))


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


def _backward_kernel(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias_grad: bool, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # Gradients are dense; bring the inputs to the same strides so that one set of strides describes both.
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    dbias = _run_backward(grads, (q, k, v), out, lse, dout, _Options(*options), bias_grad)
    return *grads, torch.empty(0, dtype=torch.float32) if dbias is None else dbias


def _backward_fake(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias_grad: bool, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    bias = _Options(*options).bias
    dbias = bias.new_empty(bias.shape) if bias_grad and bias is not None else q.new_empty(0, dtype=torch.float32)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dbias


_attention_backward = define(
    "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, bool bias_grad, "
    + _OPTIONS
    + ") -> (Tensor, Tensor, Tensor, Tensor)",
    _backward_kernel,
    _backward_fake,
)


def _save(ctx: Any, tensors: tuple[Tensor, ...], options: _Options, output: tuple[Tensor, Tensor]) -> None:
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(
        *tensors, out, lse, options.cu_seqlens, options.bias, options.cosine, options.sine, options.key
    )
    ctx.numbers = (options.left, options.right, options.scale, options.p)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _save(ctx, inputs[:3], _Options(*inputs[3:]), output)


def _backward(ctx: Any, dout: Tensor | None, _: Any) -> tuple[Any, ...]:
    if dout is None:
        return (None,) * 12
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    bias_grad = ctx.needs_input_grad[4]
    dq, dk, dv, dbias = _attention_backward(dout, q, k, v, out, lse, bias_grad, *tensors, *ctx.numbers)
    return dq, dk, dv, None, dbias if bias_grad else None, *(None,) * 7


_attention = define(
    "attention(Tensor q, Tensor k, Tensor v, " + _OPTIONS + ") -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
    backward=_backward,
    setup_context=_setup_context,
)


# --- q, k and v side by side --------------------------------------------------------------------------------------------


def _split(qkv: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of q, k and v, no copy."""
    parts = qkv.unflatten(1, (heads + 2 * kv_heads, -1))
    return parts[:, :heads], parts[:, heads : heads + kv_heads], parts[:, heads + kv_heads :]


def _packed_forward(qkv: Tensor, heads: int, kv_heads: int, *options: Any) -> tuple[Tensor, Tensor]:
    return _run_forward(*_split(qkv.contiguous(), heads, kv_heads), _Options(*options), side_by_side=True)


def _packed_forward_fake(qkv: Tensor, heads: int, kv_heads: int, *options: Any) -> tuple[Tensor, Tensor]:
    size = qkv.shape[1] // (heads + 2 * kv_heads)
    return qkv.new_empty(qkv.shape[0], heads * size), qkv.new_empty(qkv.shape[0], heads, dtype=torch.float32)


def _packed_backward_kernel(
    dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, heads: int, kv_heads: int, bias_grad: bool, *options: Any
) -> tuple[Tensor, Tensor]:
    qkv = qkv.contiguous()
    grad = torch.empty_like(qkv)
    dbias = _run_backward(
        _split(grad, heads, kv_heads), _split(qkv, heads, kv_heads), out, lse, dout, _Options(*options), bias_grad
    )
    return grad, torch.empty(0, dtype=torch.float32) if dbias is None else dbias


def _packed_backward_fake(
    dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, heads: int, kv_heads: int, bias_grad: bool, *options: Any
) -> tuple[Tensor, Tensor]:
    bias = _Options(*options).bias
    dbias = bias.new_empty(bias.shape) if bias_grad and bias is not None else qkv.new_empty(0, dtype=torch.float32)
    return qkv.new_empty(qkv.shape), dbias


_attention_packed_backward = define(
    "attention_packed_backward(Tensor dout, Tensor qkv, Tensor out, Tensor lse, int heads, int kv_heads, bool bias_grad, "
    + _OPTIONS
    + ") -> (Tensor, Tensor)",
    _packed_backward_kernel,
    _packed_backward_fake,
)


def _packed_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.heads = inputs[1:3]
    _save(ctx, inputs[:1], _Options(*inputs[3:]), output)


def _packed_backward(ctx: Any, dout: Tensor | None, _: Any) -> tuple[Any, ...]:
    if dout is None:
        return (None,) * 12
    qkv, out, lse, *tensors = ctx.saved_tensors
    bias_grad = ctx.needs_input_grad[4]
    grad, dbias = _attention_packed_backward(dout, qkv, out, lse, *ctx.heads, bias_grad, *tensors, *ctx.numbers)
    return grad, None, None, None, dbias if bias_grad else None, *(None,) * 7


_attention_packed = define(
    "attention_packed(Tensor qkv, int heads, int kv_heads, " + _OPTIONS + ") -> (Tensor, Tensor)",
    _packed_forward,
    _packed_forward_fake,
    backward=_packed_backward,
    setup_context=_packed_setup_context,
)
