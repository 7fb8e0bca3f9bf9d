"""LayerNorm and RMSNorm, alone or with the dropout and the residual sum in front of them.

    z = residual + dropout(x + x_bias)
    y = (z - mean(z)) / sqrt(var(z) + eps) * weight + bias            LayerNorm
    y = z / sqrt(mean(z^2) + eps) * weight                            RMSNorm

Saved for backward: x and residual (which the neighbouring operators hold anyway), or z alone where z is an output; mean
and 1/sqrt(...) of each row; the dropout key. Forward reads x and residual and writes y; backward reads dy, x and
residual and writes dx and dresidual, with the gradients of weight, bias and x_bias in the same pass unless they are frozen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stoker.kernels import native
from stoker.kernels.dropout import check_probability
from stoker.kernels.registry import check_device, check_tensor, define, draw_key, key_value, split_rows

__all__ = ["dropout_add_layer_norm", "dropout_add_rms_norm", "layer_norm", "rms_norm"]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """LayerNorm over the last dimension of `x`, in the dtype of `x`."""
    return _norm("layer_norm", x, None, weight, bias, None, 0.0, eps, rms=False)[0]


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """RMSNorm over the last dimension of `x`, in the dtype of `x`."""
    return _norm("rms_norm", x, None, weight, None, None, 0.0, eps, rms=True)[0]


def dropout_add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    x_bias: Tensor | None = None,
    p: float = 0.0,
    eps: float = 1e-12,
    training: bool = True,
    return_sum: bool = False,
) -> Any:
    """LayerNorm(residual + dropout(x + x_bias)); with `return_sum` also the sum that went into the norm."""
    result = _norm(
        "dropout_add_layer_norm",
        x,
        residual,
        weight,
        bias,
        x_bias,
        p if training else 0.0,
        eps,
        rms=False,
        keep=return_sum,
    )
    return result if return_sum else result[0]


def dropout_add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    *,
    x_bias: Tensor | None = None,
    p: float = 0.0,
    eps: float = 1e-6,
    training: bool = True,
    return_sum: bool = False,
) -> Any:
    """RMSNorm(residual + dropout(x + x_bias)); with `return_sum` also the sum that went into the norm."""
    result = _norm(
        "dropout_add_rms_norm",
        x,
        residual,
        weight,
        None,
        x_bias,
        p if training else 0.0,
        eps,
        rms=True,
        keep=return_sum,
    )
    return result if return_sum else result[0]


def _norm(
    operator: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    x_bias: Tensor | None,
    p: float,
    eps: float,
    *,
    rms: bool,
    keep: bool = False,
) -> tuple[Tensor, Tensor]:
    check_probability(operator, p)
    check_device(operator, x=x, residual=residual, weight=weight, bias=bias, x_bias=x_bias)
    if residual is not None and residual.dtype != x.dtype:
        wider = torch.promote_types(x.dtype, residual.dtype)
        x, residual = x.to(wider), residual.to(wider)
    if p * 65536.0 < 0.5:  # the kernel rounds it to nothing, and takes a key for a promise to drop something
        p = 0.0
    key = draw_key() if p > 0.0 else None
    y, z, _ = _dropout_add_norm(x, residual, weight, bias, x_bias, key, p, eps, rms, keep)
    return y, z


def _check(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, x_bias: Tensor | None, rms: bool
) -> None:
    operator = "rms_norm" if rms else "layer_norm"
    check_tensor(operator, "x", x)
    if not x.dim() or not x.shape[-1]:
        raise ValueError(f"{operator}: x has shape {tuple(x.shape)}; its last dimension must not be empty")
    if residual is not None:
        check_tensor(operator, "residual", residual, shape=x.shape, dtypes=[x.dtype])
    for name, parameter in (("weight", weight), ("bias", bias), ("x_bias", x_bias)):
        if parameter is not None:
            check_tensor(operator, name, parameter, shape=[x.shape[-1]])


def _kernel(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    x_bias: Tensor | None,
    key: Tensor | None,
    p: float,
    eps: float,
    rms: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    _check(x, residual, weight, bias, x_bias, rms)
    x, weight = x.contiguous(), weight.contiguous()
    residual, bias, x_bias = _contiguous(residual), _contiguous(bias), _contiguous(x_bias)
    y, z, stats = _fake(x, keep)
    _call(
        "stoker_layer_norm_forward", x, x_bias, weight, bias, key, x=x, residual=residual, bias=bias, y=y,
        z=z if keep else None, stats=stats, p=p, eps=eps, rms=rms,
    )  # fmt: skip
    return y, z, stats


def _call(
    function: str, rows_of: Tensor, x_bias: Tensor | None, weight: Tensor, bias_like: Tensor | None, key: Tensor | None,
    **fields: Any,
) -> None:  # fmt: skip
    """Calls `function` on rows like those of `rows_of`; backward needs only the type of the bias."""
    rows, columns = split_rows(rows_of)
    call = native.fill(
        "stoker_layer_norm_call", x_bias=x_bias, weight=weight, rows=rows, columns=columns, key=key_value(key),
        dtype=native.dtype_code(rows_of.dtype), x_bias_dtype=native.parameter(x_bias),
        weight_dtype=native.parameter(weight), bias_dtype=native.parameter(bias_like), **fields,
    )  # fmt: skip
    native.call(function, call)


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _fake(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    keep = rest[-1]
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    z = torch.empty_like(y) if keep else x.new_empty(0)
    return y, z, x.new_empty((2, split_rows(x)[0]), dtype=torch.float32)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, residual, weight, bias, x_bias, key, ctx.p, _, ctx.rms, keep = inputs
    _, z, stats = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(stats)
    ctx.has_residual = residual is not None
    ctx.wants = [one is not None and one.requires_grad for one in (weight, bias, x_bias)]
    # Where z is an output, somebody else keeps it alive too, and x and residual can go.
    saved = (None, None, z) if keep else (x, residual, None)
    ctx.save_for_backward(*saved, weight, bias, x_bias, stats, key)


def _backward(ctx: Any, dy: Tensor | None, dz: Tensor | None, _: Any) -> tuple[Any, ...]:
    x, residual, z, weight, bias, x_bias, stats, key = ctx.saved_tensors
    if dy is None:
        if dz is None:
            return (None,) * 10
        dy = torch.zeros_like(dz)
    dsum, dx, *parameters = _dropout_add_norm_backward(
        dy, dz, x, residual, z, weight, bias, x_bias, stats, key, ctx.p, ctx.rms, ctx.has_residual, ctx.wants
    )
    dx = dx if key is not None else dsum
    dresidual = dsum if ctx.has_residual else None
    wanted = (one if wants else None for one, wants in zip(parameters, ctx.wants, strict=True))
    return dx, dresidual, *wanted, *(None,) * 5


def _backward_kernel(
    dy: Tensor,
    dz: Tensor | None,
    x: Tensor | None,
    residual: Tensor | None,
    z: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    x_bias: Tensor | None,
    stats: Tensor,
    key: Tensor | None,
    p: float,
    rms: bool,
    has_residual: bool,
    wants: list[bool],
) -> tuple[Tensor, ...]:
    dy, weight = dy.contiguous(), weight.contiguous()
    dz, x, residual, z, x_bias = (_contiguous(t) for t in (dz, x, residual, z, x_bias))
    out = _backward_results(dy, (weight, bias, x_bias), key, has_residual, wants)
    dsum, dx, *parameters = out
    dweight, dbias, dx_bias = (one if wanted else None for one, wanted in zip(parameters, wants, strict=True))
    _call(
        "stoker_layer_norm_backward", dy, x_bias, weight, bias, key, x=x, residual=residual, z=z, stats=stats, dy=dy, dz=dz,
        dx=dx if key is not None else None, dresidual=dsum if key is None or has_residual else None, dweight=dweight,
        dbias=dbias, dx_bias=dx_bias, p=p, rms=rms,
    )  # fmt: skip
    return out


def _backward_fake(dy: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    _, _, _, _, weight, bias, x_bias, _, key, _, _, has_residual, wants = rest
    return _backward_results(dy, (weight, bias, x_bias), key, has_residual, wants)


def _backward_results(
    dy: Tensor, parameters: tuple[Tensor | None, ...], key: Tensor | None, has_residual: bool, wants: list[bool]
) -> tuple[Tensor, ...]:
    """The gradients of the sum, of x and of the parameters, each empty where nobody asks for it."""
    nothing = dy.new_empty
    full = torch.empty_like(dy, memory_format=torch.contiguous_format)
    return (
        full if key is None or has_residual else nothing(0),
        torch.empty_like(full) if key is not None else nothing(0),
        *(
            torch.empty_like(one, memory_format=torch.contiguous_format) if one is not None and wanted else nothing(0)
            for one, wanted in zip(parameters, wants, strict=True)
        ),
    )


_dropout_add_norm_backward = define(
    "dropout_add_norm_backward(Tensor dy, Tensor? dz, Tensor? x, Tensor? residual, Tensor? z, Tensor weight,"
    " Tensor? bias, Tensor? x_bias, Tensor stats, Tensor? key, float p, bool rms, bool has_residual,"
    " bool[] wants) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward_kernel,
    _backward_fake,
)

_dropout_add_norm = define(
    "dropout_add_norm(Tensor x, Tensor? residual, Tensor weight, Tensor? bias, Tensor? x_bias, Tensor? key, float p,"
    " float eps, bool rms, bool keep) -> (Tensor, Tensor, Tensor)",
    _kernel,
    _fake,
    backward=_backward,
    setup_context=_setup_context,
)
