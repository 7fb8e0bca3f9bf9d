"""Softmax cross entropy, and the linear layer with cross entropy that never holds the (tokens, vocabulary) matrix.

    loss_i = log(sum_j exp(l_ij)) - l_i,label(i)          l = logits, or x W^T + b
    dl_ij  = (softmax(l_i)_j - [j = label(i)]) * g_i

Rows whose label is `ignore_index` cost nothing: no loss, no gradient, no product. `cross_entropy` saves the logits and
two numbers per row. `linear_cross_entropy` works through blocks of labelled rows, and with "mean" or "sum" computes the
gradients of x, W and b on the way, since they are known but for one factor; those are what it saves. The loss is always
fp32, and so are the logits: of bf16, too, they are sums in fp32 that are never rounded to bf16.

`linear_cross_entropy` has the further terms of language models, in the same pass over a block:

    l_ij   = c tanh(scale (x W^T + b)_ij / c)             c = softcap; without it l = scale (x W^T + b)
    loss_i = (1 - s) (lse_i - l_i,label(i)) + s (lse_i - mean_j l_ij) + z lse_i^2
    dl_ij  = (softmax(l_i)_j (1 + 2 z lse_i) - (1 - s) [j = label(i)] - s / vocabulary) * g_i
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from stoker.kernels import engines, microkernels, native, products
from stoker.kernels.registry import check_device, check_tensor, define, plain, split_rows

__all__ = ["cross_entropy", "linear_cross_entropy", "linear_log_probs"]

REDUCTIONS = ("none", "sum", "mean")
_NONE, _SUM, _MEAN = range(3)

# The block of logits that is held at a time. Each block adds to the gradient of W, (vocabulary, hidden) numbers read
# and written, so the block must not be small; at 64 MiB it has about 550 rows of BERT's vocabulary.
BLOCK_BYTES = 64 * 1024 * 1024

# Engines are timed with at most so many classes: more change every engine's time alike, and a trial needs matrices as
# large as the weight.
_TRIAL_CLASSES = 32768


def cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int = -100, reduction: str = "mean") -> Tensor:
    """Cross entropy of `logits` (..., classes) with `labels` (...); the mean is over labels that are not ignored."""
    check_device("cross_entropy", logits=logits, labels=labels)
    result: Tensor = _cross_entropy(logits, labels, ignore_index, _reduction("cross_entropy", reduction))[0]
    return result


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
    *,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    scale: float = 1.0,
    divisor: Tensor | float | None = None,
) -> Tensor:
    """cross_entropy(scale * (x @ weight.T + bias), labels) for `x` (..., hidden) and `weight` (classes, hidden).

    `softcap` bounds the logits by tanh, `label_smoothing` is that of torch's cross_entropy, and `z_loss` times the square
    of log(sum(exp(logits))) is added to each loss. `divisor` divides the sum, as the number of items of all accumulated
    batches: given here instead of afterwards, it costs no pass over the gradients. It is taken as a constant.

    With "mean" and "sum" the gradients are handed over in backward, so a second backward through one graph is an error.
    """
    check_device("linear_cross_entropy", x=x, weight=weight, bias=bias, labels=labels)
    how = _reduction("linear_cross_entropy", reduction)
    if divisor is not None and how != _SUM:
        raise ValueError(f"linear_cross_entropy: divisor is for reduction='sum', not {reduction!r}")
    by = None if divisor is None else torch.as_tensor(divisor, dtype=torch.float64).detach()
    terms = _terms(softcap, label_smoothing, z_loss, scale)
    needs = [t is not None and t.requires_grad and torch.is_grad_enabled() for t in (x, weight, bias)]
    result: Tensor = _linear_cross_entropy(x, weight, bias, labels, by, ignore_index, how, terms, *needs)[0]
    return result


def linear_log_probs(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    softcap: float | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """log(softmax(l)) at each label, the entropy of each softmax, and whether the label is the likeliest class (bool).

    l = scale * (x @ weight.T + bias), capped as in `linear_cross_entropy`; every row of `x` (rows, hidden) has a label. Only
    the first result has a gradient. It is computed on the way, and in backward once more only if the gradients of the
    results differ between rows and the weight has one.
    """
    check_device("linear_log_probs", x=x, weight=weight, bias=bias, labels=labels)
    needs = [t is not None and t.requires_grad and torch.is_grad_enabled() for t in (x, weight, bias)]
    log_probs, entropy, top, *_ = _log_probs(x, weight, bias, labels, _terms(softcap, 0.0, 0.0, scale), *needs)
    return log_probs, entropy, top


_TERMS = ("scale", "softcap", "label_smoothing", "z_loss")  # fields of the native call


def _terms(softcap: float | None, label_smoothing: float, z_loss: float, scale: float) -> list[float]:
    """In the order of `_TERMS`, a cap that is not wanted as 0."""
    for name, value, allowed, wanted in (
        ("scale", scale, 0 < scale < math.inf, "positive and finite"),
        ("softcap", softcap, softcap is None or 0 < softcap < math.inf, "positive and finite, or None"),
        ("label_smoothing", label_smoothing, 0 <= label_smoothing <= 1, "from 0 to 1"),
        ("z_loss", z_loss, 0 <= z_loss < math.inf, "0 or more, and finite"),
    ):
        if not allowed:
            raise ValueError(f"linear_cross_entropy: {name} is {value}; it must be {wanted}")
    return [float(scale), float(softcap or 0.0), float(label_smoothing), float(z_loss)]


def _reduction(operator: str, reduction: str) -> int:
    if reduction not in REDUCTIONS:
        raise ValueError(f"{operator}: reduction is {reduction!r}; choose one of {', '.join(REDUCTIONS)}")
    return REDUCTIONS.index(reduction)


def _check_labels(operator: str, labels: Tensor, shape: torch.Size) -> Tensor:
    check_tensor(operator, "labels", labels, shape=shape, dtypes=[torch.int64, torch.int32])
    return labels.to(torch.int64).contiguous()


def _bad_label(operator: str, labels: Tensor, row: int, classes: int, ignore: int) -> IndexError:
    value = int(labels.reshape(-1)[row])
    return IndexError(
        f"{operator}: label {value} at position {row} is not one of the {classes} classes (0 to {classes - 1}), "
        f"nor the ignore_index {ignore}"
    )


# --- logits given


def _kernel(logits: Tensor, labels: Tensor, ignore: int, reduction: int) -> tuple[Tensor, Tensor, Tensor]:
    check_tensor("cross_entropy", "logits", logits)
    if not logits.dim() or not logits.shape[-1]:
        raise ValueError(f"cross_entropy: logits has shape {tuple(logits.shape)}; it must be (..., classes)")
    labels = _check_labels("cross_entropy", labels, logits.shape[:-1])
    logits = logits.contiguous()
    rows, classes = split_rows(logits)
    losses = torch.empty(labels.shape, dtype=torch.float32)
    stats = torch.empty((2, rows), dtype=torch.float32)
    totals = torch.empty(2, dtype=torch.float64)
    call = _call(logits, labels, stats, ignore, loss=losses, totals=totals)
    try:
        native.call("stoker_cross_entropy_forward", call)
    except IndexError:
        raise _bad_label("cross_entropy", labels, call.bad_row, classes, ignore) from None
    if reduction == _NONE:
        return losses, stats, totals
    total = totals[0] / totals[1] if reduction == _MEAN else totals[0]
    return total.to(torch.float32), stats, totals


def _call(logits: Tensor, labels: Tensor, stats: Tensor, ignore: int, **others: Tensor) -> Any:
    rows, columns = split_rows(logits)
    return native.fill(
        "stoker_cross_entropy_call", logits=logits, labels=labels, stats=stats, rows=rows, columns=columns,
        ignore=ignore, dtype=native.dtype_code(logits.dtype), **others,
    )  # fmt: skip


def _fake(logits: Tensor, labels: Tensor, ignore: int, reduction: int) -> tuple[Tensor, Tensor, Tensor]:
    loss = logits.new_empty(labels.shape if reduction == _NONE else (), dtype=torch.float32)
    rows = split_rows(logits)[0]
    return loss, logits.new_empty((2, rows), dtype=torch.float32), logits.new_empty(2, dtype=torch.float64)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, labels, ctx.ignore, ctx.reduction = inputs
    _, stats, totals = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(stats, totals)
    ctx.save_for_backward(logits, labels, stats, totals)


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, None, None, None]:
    if grad is None:
        return None, None, None, None
    logits, labels, stats, totals = ctx.saved_tensors
    scales = grad.to(torch.float64) / totals[1] if ctx.reduction == _MEAN else grad
    scales = scales.to(torch.float32).expand(labels.shape)
    return _cross_entropy_backward(logits, labels, stats, scales, ctx.ignore), None, None, None


def _backward_kernel(logits: Tensor, labels: Tensor, stats: Tensor, scales: Tensor, ignore: int) -> Tensor:
    logits, scales = logits.contiguous(), scales.contiguous()
    labels = labels.to(torch.int64).contiguous()
    dlogits = torch.empty_like(logits)
    native.call("stoker_cross_entropy_backward", _call(logits, labels, stats, ignore, scales=scales, dlogits=dlogits))
    return dlogits


def _backward_fake(logits: Tensor, labels: Tensor, stats: Tensor, scales: Tensor, ignore: int) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


_cross_entropy_backward = define(
    "cross_entropy_backward(Tensor logits, Tensor labels, Tensor stats, Tensor scales, int ignore_index) -> Tensor",
    _backward_kernel,
    _backward_fake,
)
_cross_entropy = define(
    "cross_entropy(Tensor logits, Tensor labels, int ignore_index, int reduction) -> (Tensor, Tensor, Tensor)",
    _kernel,
    _fake,
    backward=_backward,
    setup_context=_setup_context,
)


# --- logits = x W^T + b, a block at a time


class _Blocks:
    """Walks over the labelled rows of one call, block by block, and gathers what was asked for."""

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        ignore: int,
        terms: list[float],
        needs: tuple[bool, ...],
    ) -> None:
        check_tensor("linear_cross_entropy", "x", x)
        check_tensor("linear_cross_entropy", "weight", weight, shape=[None, x.shape[-1] if x.dim() else 1])
        classes = weight.shape[0]
        if bias is not None:
            check_tensor("linear_cross_entropy", "bias", bias, shape=[classes])
        labels = _check_labels("linear_cross_entropy", labels, x.shape[:-1]).reshape(-1)
        self.rows = (labels != ignore).nonzero().reshape(-1)  # those with a label
        self.labels = labels.index_select(0, self.rows)
        impossible = (self.labels < 0) | (self.labels >= classes)
        if impossible.any():
            row = int(self.rows[impossible.nonzero()[0, 0]])
            raise _bad_label("linear_cross_entropy", labels, row, classes, ignore)
        self.x, self.weight, self.bias = x, weight, bias
        self.flat = x.reshape(-1, x.shape[-1])
        self.tokens = labels.numel()
        self.low = (
            x.dtype == torch.bfloat16 and microkernels.torch_has_bf16_units()
        )  # bf16 has units: all but "stoker" use them
        self.terms = dict(zip(_TERMS, terms, strict=True))
        self.needs = needs

    def run(self, scales: Tensor | None, **statistics: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The loss of each labelled row; with `scales`, the gradients of those losses, also dx, dweight and dbias.

        `statistics` may be `entropy` and `top`, tensors (labelled rows) that receive what csrc/stoker.h says.
        """
        need_x, need_weight, need_bias = self.needs if scales is not None else (False, False, False)
        weight, bias = self.weight, self.bias
        classes, hidden = weight.shape
        count = self.rows.numel()
        size = max(1, min(count, BLOCK_BYTES // (4 * max(1, classes))))
        needed = {"nt": True, "nn": need_x, "tn": need_weight}
        engine = {kind: self._engine(kind, min(size, count)) for kind, need in needed.items() if need}
        losses = torch.empty(count, dtype=torch.float32)
        dx = torch.empty((count, hidden) if need_x else 0, dtype=self.x.dtype)
        # Blocks are added in fp32; a single one is rounded as it is written.
        sums = weight.dtype if count <= size else torch.float32
        dweight = torch.empty((classes, hidden) if need_weight else 0, dtype=sums)
        dbias = torch.zeros(classes if need_bias else 0, dtype=torch.float32)
        if not count:
            dweight.zero_()
        buffer = torch.empty((size, classes), dtype=torch.float32)
        for start in range(0, count, size):
            rows = slice(start, min(count, start + size))
            stored = self.flat.index_select(0, self.rows[rows])
            inputs = stored.to(torch.float32)
            logits = buffer[: inputs.shape[0]]
            scored = stored if self.low and engine["nt"] == "onednn" else inputs
            products.multiply([(scored, weight.t())], logits, bias, engine["nt"])
            self._losses(logits, rows, losses, scales, statistics)
            if need_bias:
                dbias += products.column_sums(logits)
            operands = dict.fromkeys(products.ENGINES, (logits, inputs))
            if self.low and {engine.get("nn"), engine.get("tn")} - {None, "stoker"}:
                operands["torch"] = operands["onednn"] = (logits.to(torch.bfloat16), stored)
            if need_x:
                products.multiply([(operands[engine["nn"]][0], weight)], dx[rows], None, engine["nn"])
            if need_weight:
                gradient, inputs = operands[engine["tn"]]
                products.multiply([(gradient.t(), inputs)], dweight, None, engine["tn"], accumulate=start > 0)
        bias_type = weight.dtype if bias is None else bias.dtype
        return losses, self._spread(dx) if need_x else dx, dweight.to(weight.dtype), dbias.to(bias_type)

    def _engine(self, kind: str, rows: int) -> str:
        """The engine of the product "nt" (logits), "nn" (dx) or "tn" (dweight) of a block of `rows` rows."""
        classes, hidden = min(self.weight.shape[0], _TRIAL_CLASSES), self.weight.shape[1]
        sizes = {"nt": (rows, classes, hidden), "nn": (rows, hidden, classes), "tn": (classes, hidden, rows)}[kind]
        if kind != "nt" and self.low:
            return engines.choose(kind, *sizes, torch.bfloat16)
        # torch's product would round the logits to bf16, or widen all of a bf16 weight. The others write sums as they are.
        if kind == "nt" and self.low and "onednn" in products.available(torch.bfloat16, torch.float32):
            return "onednn"
        if kind != "tn" and self.weight.dtype != torch.float32:
            return "stoker"
        return engines.choose(kind, *sizes, torch.float32)

    def _spread(self, dx: Tensor) -> Tensor:
        """Gradients of the labelled rows as gradients of all rows."""
        if dx.shape[0] == self.tokens:
            return dx.view(self.x.shape)
        full = torch.zeros((self.tokens, dx.shape[1]), dtype=self.x.dtype)
        return full.index_copy_(0, self.rows, dx).view(self.x.shape)

    def _losses(
        self, logits: Tensor, rows: slice, losses: Tensor, scales: Tensor | None, statistics: dict[str, Tensor]
    ) -> None:
        call = native.fill(
            "stoker_cross_entropy_block_call", logits=logits, labels=self.labels[rows], loss=losses[rows],
            scales=None if scales is None else scales[rows], rows=logits.shape[0], columns=logits.shape[1], **self.terms,
            **{name: values[rows] for name, values in statistics.items()},
        )  # fmt: skip
        native.call("stoker_cross_entropy_block", call)


def _linear_kernel(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, divisor: Tensor | None, ignore: int, reduction: int,
    terms: list[float], *needs: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    if divisor is not None:
        check_tensor("linear_cross_entropy", "divisor", divisor, shape=(), dtypes=[torch.float64])
    blocks = _Blocks(x, weight, bias, labels, ignore, terms, needs)
    count = blocks.rows.numel()
    if reduction == _MEAN:
        divisor = torch.tensor(count, dtype=torch.float64)
    elif divisor is None:
        divisor = torch.ones((), dtype=torch.float64)
    scales = None
    if reduction != _NONE and any(blocks.needs):
        scales = divisor.reciprocal().to(torch.float32).repeat(count)
    losses, dx, dweight, dbias = blocks.run(scales)
    if reduction == _NONE:
        loss = torch.zeros(blocks.tokens, dtype=torch.float32).index_copy_(0, blocks.rows, losses).view(labels.shape)
    else:
        loss = (losses.sum(dtype=torch.float64) / divisor).to(torch.float32)
    return loss, dx, dweight, dbias


def _linear_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, divisor: Tensor | None, ignore: int, reduction: int,
    terms: list[float], *needs: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    need_x, need_weight, need_bias = needs
    in_forward = reduction != _NONE
    empty = x.new_empty
    return (
        empty(() if in_forward else labels.shape, dtype=torch.float32),
        empty(x.shape if need_x and in_forward else (0,)),
        empty(weight.shape if need_weight and in_forward else (0,), dtype=weight.dtype),
        empty(
            bias.shape if bias is not None and need_bias and in_forward else (0,),
            dtype=weight.dtype if bias is None else bias.dtype,
        ),
    )


def _linear_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    x, weight, bias, labels, _, ctx.ignore, ctx.reduction, ctx.terms, *ctx.needs = inputs
    _, dx, dweight, dbias = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(dx, dweight, dbias)
    ctx.spent = False
    if ctx.reduction == _NONE:
        ctx.save_for_backward(x, weight, bias, labels)
    else:
        ctx.save_for_backward(dx, dweight, dbias)


def _linear_backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    no = (None,) * 8
    if grad is None:
        return None, None, None, *no
    if ctx.reduction == _NONE:
        x, weight, bias, labels = ctx.saved_tensors
        grads = _linear_cross_entropy_backward(grad, x, weight, bias, labels, ctx.ignore, ctx.terms, *ctx.needs)
    elif plain((grad,)):
        if ctx.spent:
            raise RuntimeError(
                "linear_cross_entropy: a second backward through the same graph; call it again, or use reduction='none'"
            )
        ctx.spent = True
        grads = ctx.saved_tensors
        factor = float(grad)
        if factor != 1.0:
            # In place, for the gradient of W is as large as W: nobody else holds these.
            grads = tuple(g.detach().mul_(factor) for g in grads)
    else:
        grads = tuple(g * grad.to(g.dtype) for g in ctx.saved_tensors)
    dx, dweight, dbias = (g if need else None for g, need in zip(grads, ctx.needs, strict=True))
    return dx, dweight, dbias, *no


def _linear_backward_kernel(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, ignore: int, terms: list[float],
    *needs: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    blocks = _Blocks(x, weight, bias, labels, ignore, terms, needs)
    _, dx, dweight, dbias = blocks.run(grad.reshape(-1).index_select(0, blocks.rows).contiguous())
    return dx, dweight, dbias


def _linear_backward_fake(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, ignore: int, terms: list[float],
    *needs: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _linear_fake(x, weight, bias, labels, None, ignore, _SUM, terms, *needs)[1:]


_linear_cross_entropy_backward = define(
    "linear_cross_entropy_backward(Tensor grad, Tensor x, Tensor weight, Tensor? bias, Tensor labels, int ignore_index,"
    " float[] terms, bool need_x, bool need_weight, bool need_bias) -> (Tensor, Tensor, Tensor)",
    _linear_backward_kernel,
    _linear_backward_fake,
)
_linear_cross_entropy = define(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor? bias, Tensor labels, Tensor? divisor, int ignore_index,"
    " int reduction, float[] terms, bool need_x, bool need_weight, bool need_bias) -> (Tensor, Tensor, Tensor, Tensor)",
    _linear_kernel,
    _linear_fake,
    backward=_linear_backward,
    setup_context=_linear_setup,
)


# --- the probabilities of labels, row by row

_NO_LABEL_IGNORED = -1


def _log_probs_kernel(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, terms: list[float], *needs: bool
) -> tuple[Tensor, ...]:
    blocks = _Blocks(x, weight, bias, labels, _NO_LABEL_IGNORED, terms, needs)
    count = blocks.rows.numel()
    entropy, top = torch.empty(count, dtype=torch.float32), torch.empty(count, dtype=torch.int32)
    # the gradients of log-probabilities, not of losses
    scales = torch.full((count,), -1.0) if any(needs) else None
    losses, *gradients = blocks.run(scales, entropy=entropy, top=top)
    return losses.neg_(), entropy, top.bool(), *gradients


def _log_probs_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, terms: list[float], *needs: bool
) -> tuple[Tensor, ...]:
    rows = x.new_empty(labels.shape, dtype=torch.float32)
    gradients = _linear_fake(x, weight, bias, labels, None, _NO_LABEL_IGNORED, _SUM, terms, *needs)[1:]
    return rows, torch.empty_like(rows), rows.new_empty(labels.shape, dtype=torch.bool), *gradients


def _log_probs_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, labels, ctx.terms, *ctx.needs = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(x, weight, bias, labels, *output[3:])


def _log_probs_backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    no = (None,) * 5
    if grad is None:
        return None, None, None, *no
    x, weight, bias, labels, dx, dweight, dbias = ctx.saved_tensors
    dx = dx * grad.unsqueeze(1).to(dx.dtype) if ctx.needs[0] else None
    parameters = [dweight, dbias]
    if any(ctx.needs[1:]):
        if bool((grad == grad[:1]).all()):
            factor = float(grad[0]) if grad.numel() else 0.0
            parameters = [gradient * factor for gradient in parameters]
        else:
            found = _linear_cross_entropy_backward(
                grad.neg(), x, weight, bias, labels, _NO_LABEL_IGNORED, ctx.terms, False, *ctx.needs[1:]
            )
            parameters = list(found[1:])
    wanted = (one if need else None for one, need in zip(parameters, ctx.needs[1:], strict=True))
    return dx, *wanted, *no


_log_probs = define(
    "linear_log_probs(Tensor x, Tensor weight, Tensor? bias, Tensor labels, float[] terms, bool need_x, bool need_weight,"
    " bool need_bias) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _log_probs_kernel,
    _log_probs_fake,
    backward=_log_probs_backward,
    setup_context=_log_probs_setup,
)
