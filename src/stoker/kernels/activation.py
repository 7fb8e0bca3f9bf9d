"""Activations with the bias of the preceding linear folded in, and the gated forms (GeGLU, SwiGLU).

    bias_activation:   y = act(x + bias)
    gated_activation:  y = act(gate + bias_gate) * (up + bias_up),   x = [gate, up] along the last dimension
    gated:             y = act(gate) * up

act is gelu (x Phi(x), by erf), gelu_tanh, relu or silu. Saved for backward: the inputs, nothing else; the activation is
computed again there, and the gradient of the bias comes out of the same pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stoker.kernels import native
from stoker.kernels.registry import check_device, check_tensor, define, split_rows

__all__ = ["KINDS", "bias_activation", "gated", "gated_activation"]

KINDS = ("gelu", "gelu_tanh", "relu", "silu")  # the names of stoker_activation in csrc/stoker.h
ORDERS = ("gate_first", "up_first")


def bias_activation(x: Tensor, bias: Tensor | None = None, kind: str = "gelu") -> Tensor:
    """act(x + bias), in the dtype of `x`."""
    check_device("bias_activation", x=x, bias=bias)
    result: Tensor = _bias_activation(x, bias, _kind("bias_activation", kind))
    return result


def gated_activation(x: Tensor, bias: Tensor | None = None, kind: str = "gelu", order: str = "gate_first") -> Tensor:
    """act(gate) * up for the two halves of `x` + `bias`; `order` says which half is activated."""
    check_device("gated_activation", x=x, bias=bias)
    if order not in ORDERS:
        raise ValueError(f"gated_activation: order is {order!r}; choose one of {', '.join(ORDERS)}")
    result: Tensor = _gated_activation(x, bias, _kind("gated_activation", kind), order == "up_first")
    return result


def gated(gate: Tensor, up: Tensor, kind: str = "silu") -> Tensor:
    """act(gate) * up for two tensors of one shape."""
    check_device("gated", gate=gate, up=up)
    if gate.dtype != up.dtype:
        wider = torch.promote_types(gate.dtype, up.dtype)
        gate, up = gate.to(wider), up.to(wider)
    result: Tensor = _gated(gate, up, _kind("gated", kind))
    return result


def _kind(operator: str, kind: str) -> int:
    if kind not in KINDS:
        raise ValueError(f"{operator}: kind is {kind!r}; choose one of {', '.join(KINDS)}")
    return KINDS.index(kind)


def _call(name: str, kind: int, dtype: torch.dtype, bias: Tensor | None = None, **fields: Any) -> None:
    call = native.fill(
        "stoker_activation_call",
        kind=native.constants("stoker_activation")[KINDS[kind].upper()],
        dtype=native.dtype_code(dtype),
        bias_dtype=native.parameter(bias),
        **fields,
    )
    native.call(name, call)


def _strided_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """The tensor and the distance of its rows; a copy only where the rows are not evenly spaced."""
    if tensor.dim() == 2 and tensor.stride(1) == 1 and tensor.stride(0) >= tensor.shape[1]:
        return tensor, tensor.stride(0)
    tensor = tensor.contiguous()
    return tensor, tensor.shape[-1] if tensor.dim() else 1


def _halves(columns: int, up_first: bool) -> tuple[int, int]:
    """Where the activated half and the other begin, in elements."""
    return (columns, 0) if up_first else (0, columns)


def _address(tensor: Tensor | None, offset: int) -> int | None:
    return None if tensor is None else tensor.data_ptr() + offset * tensor.element_size()


# --- act(x + bias)


def _plain_kernel(x: Tensor, bias: Tensor | None, kind: int) -> Tensor:
    check_tensor("bias_activation", "x", x)
    if bias is not None:
        check_tensor("bias_activation", "bias", bias, shape=[x.shape[-1] if x.dim() else 1])
        bias = bias.contiguous()
    y = _plain_fake(x, bias, kind)
    _plain_call("stoker_activation_forward", x, bias, kind, y=y)
    return y


def _plain_call(name: str, x: Tensor, bias: Tensor | None, kind: int, **fields: Any) -> None:
    rows, columns = split_rows(x)
    x, stride = _strided_rows(x)
    _call(
        name,
        x=x,
        x_stride=stride,
        x_bias=bias,
        rows=rows,
        columns=columns,
        kind=kind,
        dtype=x.dtype,
        bias=bias,
        **fields,
    )


def _plain_fake(x: Tensor, bias: Tensor | None, kind: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _plain_backward_kernel(dy: Tensor, x: Tensor, bias: Tensor | None, kind: int) -> tuple[Tensor, Tensor]:
    dy = dy.contiguous()
    bias = None if bias is None else bias.contiguous()
    dx, dbias = _plain_backward_fake(dy, x, bias, kind)
    _plain_call(
        "stoker_activation_backward", x, bias, kind, dy=dy, dx=dx, dx_stride=split_rows(x)[1],
        dx_bias=None if bias is None else dbias,
    )  # fmt: skip
    return dx, dbias


def _plain_backward_fake(dy: Tensor, x: Tensor, bias: Tensor | None, kind: int) -> tuple[Tensor, Tensor]:
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    return dx, x.new_empty(0) if bias is None else torch.empty_like(bias, memory_format=torch.contiguous_format)


def _plain_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, bias, ctx.kind = inputs
    ctx.save_for_backward(x, bias)


def _plain_backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
    x, bias = ctx.saved_tensors
    dx, dbias = _bias_activation_backward(dy, x, bias, ctx.kind)
    return dx, None if bias is None else dbias, None


_bias_activation_backward = define(
    "bias_activation_backward(Tensor dy, Tensor x, Tensor? bias, int kind) -> (Tensor, Tensor)",
    _plain_backward_kernel,
    _plain_backward_fake,
)
_bias_activation = define(
    "bias_activation(Tensor x, Tensor? bias, int kind) -> Tensor",
    _plain_kernel,
    _plain_fake,
    backward=_plain_backward,
    setup_context=_plain_setup,
)


# --- both halves in one tensor


def _halves_kernel(x: Tensor, bias: Tensor | None, kind: int, up_first: bool) -> Tensor:
    check_tensor("gated_activation", "x", x)
    if not x.dim() or x.shape[-1] % 2:
        raise ValueError(f"gated_activation: x has shape {tuple(x.shape)}; its last dimension must be two equal halves")
    if bias is not None:
        check_tensor("gated_activation", "bias", bias, shape=[x.shape[-1]])
        bias = bias.contiguous()
    y = _halves_fake(x, bias, kind, up_first)
    _halves_call("stoker_activation_forward", x, bias, kind, up_first, y=y)
    return y


def _halves_call(name: str, x: Tensor, bias: Tensor | None, kind: int, up_first: bool, **fields: Any) -> None:
    rows, width = split_rows(x)
    gate, up = _halves(width // 2, up_first)
    x, stride = _strided_rows(x)
    _call(
        name, x=_address(x, gate), x_stride=stride, x_bias=_address(bias, gate),
        up=_address(x, up), up_stride=stride, up_bias=_address(bias, up),
        rows=rows, columns=width // 2, kind=kind, gated=True, dtype=x.dtype, bias=bias, **fields,
    )  # fmt: skip


def _halves_fake(x: Tensor, bias: Tensor | None, kind: int, up_first: bool) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _halves_backward_kernel(
    dy: Tensor, x: Tensor, bias: Tensor | None, kind: int, up_first: bool
) -> tuple[Tensor, Tensor]:
    dy = dy.contiguous()
    bias = None if bias is None else bias.contiguous()
    dx, dbias = _halves_backward_fake(dy, x, bias, kind, up_first)
    columns = split_rows(dy)[1]
    gate, up = _halves(columns, up_first)
    _halves_call(
        "stoker_activation_backward", x, bias, kind, up_first, dy=dy,
        dx=_address(dx, gate), dx_stride=2 * columns, dx_bias=None if bias is None else _address(dbias, gate),
        dup=_address(dx, up), dup_stride=2 * columns, dup_bias=None if bias is None else _address(dbias, up),
    )  # fmt: skip
    return dx, dbias


def _halves_backward_fake(
    dy: Tensor, x: Tensor, bias: Tensor | None, kind: int, up_first: bool
) -> tuple[Tensor, Tensor]:
    return _plain_backward_fake(dy, x, bias, kind)


def _halves_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, bias, ctx.kind, ctx.up_first = inputs
    ctx.save_for_backward(x, bias)


def _halves_backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
    x, bias = ctx.saved_tensors
    dx, dbias = _gated_activation_backward(dy, x, bias, ctx.kind, ctx.up_first)
    return dx, None if bias is None else dbias, None, None


_gated_activation_backward = define(
    "gated_activation_backward(Tensor dy, Tensor x, Tensor? bias, int kind, bool up_first) -> (Tensor, Tensor)",
    _halves_backward_kernel,
    _halves_backward_fake,
)
_gated_activation = define(
    "gated_activation(Tensor x, Tensor? bias, int kind, bool up_first) -> Tensor",
    _halves_kernel,
    _halves_fake,
    backward=_halves_backward,
    setup_context=_halves_setup,
)


# --- gate and up as two tensors


def _pair_kernel(gate: Tensor, up: Tensor, kind: int) -> Tensor:
    check_tensor("gated", "gate", gate)
    check_tensor("gated", "up", up, shape=gate.shape, dtypes=[gate.dtype])
    y = _pair_fake(gate, up, kind)
    _pair_call("stoker_activation_forward", gate, up, kind, y=y)
    return y


def _pair_call(name: str, gate: Tensor, up: Tensor, kind: int, **fields: Any) -> None:
    rows, columns = split_rows(gate)
    (gate, stride), (up, up_stride) = _strided_rows(gate), _strided_rows(up)
    _call(
        name, x=gate, x_stride=stride, up=up, up_stride=up_stride, rows=rows, columns=columns, kind=kind, gated=True,
        dtype=gate.dtype, **fields,
    )  # fmt: skip


def _pair_fake(gate: Tensor, up: Tensor, kind: int) -> Tensor:
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


def _pair_backward_kernel(dy: Tensor, gate: Tensor, up: Tensor, kind: int) -> tuple[Tensor, Tensor]:
    dy = dy.contiguous()
    dgate, dup = _pair_backward_fake(dy, gate, up, kind)
    stride = split_rows(dy)[1]
    _pair_call(
        "stoker_activation_backward", gate, up, kind, dy=dy, dx=dgate, dx_stride=stride, dup=dup, dup_stride=stride
    )
    return dgate, dup


def _pair_backward_fake(dy: Tensor, gate: Tensor, up: Tensor, kind: int) -> tuple[Tensor, Tensor]:
    dgate = torch.empty_like(gate, memory_format=torch.contiguous_format)
    return dgate, torch.empty_like(dgate)


def _pair_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, ctx.kind = inputs
    ctx.save_for_backward(gate, up)


def _pair_backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
    gate, up = ctx.saved_tensors
    dgate, dup = _gated_backward(dy, gate, up, ctx.kind)
    return dgate, dup, None


_gated_backward = define(
    "gated_backward(Tensor dy, Tensor gate, Tensor up, int kind) -> (Tensor, Tensor)",
    _pair_backward_kernel,
    _pair_backward_fake,
)
_gated = define(
    "gated(Tensor gate, Tensor up, int kind) -> Tensor",
    _pair_kernel,
    _pair_fake,
    backward=_pair_backward,
    setup_context=_pair_setup,
)
