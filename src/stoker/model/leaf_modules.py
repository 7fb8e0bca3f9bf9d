"""Overrides of leaf modules of any model: dropout, norms, activations, linear and embedding by the native kernels.

Each override runs its kernel where that is possible and faster. Other calls run the stock forward: another device or type,
compiled code (the compiler fuses by itself), tracing and transforms, and inputs so small that a kernel call costs more than
it saves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stoker.kernels.activation import bias_activation
from stoker.kernels.dropout import dropout
from stoker.kernels.embedding import embedding
from stoker.kernels.linear import linear
from stoker.kernels.norm import layer_norm, rms_norm
from stoker.kernels.tracing import stock_wanted
from stoker.model.class_swap import Optimized, plain, stock_class

__all__ = [
    "LeafDropout",
    "activation_kind",
    "dropout_probability",
    "is_conv1d",
    "kernel_for",
    "only_gathers",
    "rms_eps",
]

# Below these sizes the overhead of a kernel's autograd function (tens of microseconds) is more than it saves.
SMALL_ELEMENTS = 1 << 14
SMALL_PRODUCT = 1 << 22

_TYPES = (torch.float32, torch.bfloat16)


def kernel_for(module: nn.Module) -> type[Optimized] | None:
    """The override for a leaf module, None if there is none."""
    cls = type(module)
    if cls is nn.Linear:
        return LeafLinear
    if cls is nn.Dropout:
        return None if getattr(module, "inplace", False) else LeafDropout
    if cls is nn.LayerNorm:
        one_dimension = len(module.normalized_shape) == 1 and module.elementwise_affine  # type: ignore[arg-type]
        return LeafLayerNorm if one_dimension else None
    if cls is nn.Embedding:
        return LeafEmbedding if only_gathers(module) else None
    if activation_kind(module) not in (None, "relu"):  # torch's own ReLU is limited by memory bandwidth already
        return LeafActivation
    return {"rms": LeafRMSNorm, "rms_plus_one": LeafRMSNormPlusOne, None: None}[_rms_formula(module)]


def _native(x: Any, *parameters: Tensor | None) -> bool:
    """Whether the kernels support this call at all."""
    return (
        isinstance(x, Tensor)
        and type(x) in (Tensor, nn.Parameter)
        and not stock_wanted()
        and x.device.type == "cpu"
        and x.dtype in _TYPES
        and all(
            p is None or (type(p) in (Tensor, nn.Parameter) and p.device.type == "cpu" and p.dtype in _TYPES)
            for p in parameters
        )
    )


class LeafLinear(Optimized):
    stoker_part = "linear"

    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, input: Tensor) -> Any:
        if not _native(input, self.weight, self.bias) or input.dim() == 0 or input.shape[-1] != self.weight.shape[1]:
            return super().forward(input)
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            if dtype != torch.bfloat16:
                return super().forward(input)
            if self.weight.dtype == torch.float32 and input.numel() * self.weight.shape[0] < SMALL_PRODUCT:
                return _linear_in_fp32(input, self.weight, self.bias).to(dtype)
            input = input.to(dtype)
        elif input.dtype == torch.float32 != self.weight.dtype:
            return super().forward(input)  # raises stock's error: only the weights were cast
        elif input.dtype == self.weight.dtype and input.numel() * self.weight.shape[0] < SMALL_PRODUCT:
            return super().forward(input)
        return linear(input, self.weight, self.bias)


def _linear_in_fp32(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product of a small input inside of autocast, which would first cast the weights, at more than the product costs.

    Without bf16 units torch would also multiply one number at a time.
    """
    torch.set_autocast_enabled("cpu", False)
    try:
        return nn.functional.linear(input.float(), weight, None if bias is None else bias.float())
    finally:
        torch.set_autocast_enabled("cpu", True)


class LeafDropout(Optimized):
    stoker_part = "dropout"

    p: float

    def forward(self, input: Tensor) -> Any:
        if self.training and self.p > 0.0 and _native(input) and input.numel() >= SMALL_ELEMENTS:
            return dropout(input, self.p)
        return super().forward(input)


class LeafLayerNorm(Optimized):
    stoker_part = "layer norm in bf16"

    weight: nn.Parameter
    bias: nn.Parameter | None
    eps: float

    def forward(self, input: Tensor) -> Any:
        # In fp32 there is nothing to fuse, and torch's own is slightly faster (docs/kernels.md).
        if (
            _native(input, self.weight, self.bias)
            and input.dtype == torch.bfloat16
            and input.numel() >= SMALL_ELEMENTS
            and input.shape[-1] == self.weight.shape[0]
        ):
            return layer_norm(input, self.weight, self.bias, self.eps)
        return super().forward(input)


class LeafEmbedding(Optimized):
    stoker_part = "embedding"

    weight: nn.Parameter
    padding_idx: int | None

    def forward(self, input: Tensor) -> Any:
        if (
            _native(self.weight)
            and type(input) is Tensor
            and input.dtype in (torch.int32, torch.int64)
            and input.device.type == "cpu"
            and input.numel() * self.weight.shape[1] >= SMALL_ELEMENTS
        ):
            return embedding(input, self.weight, self.padding_idx)
        return super().forward(input)


def only_gathers(table: Any) -> bool:
    """Whether looking rows up is all that this embedding does."""
    return table.max_norm is None and not table.scale_grad_by_freq and not table.sparse


class LeafActivation(Optimized):
    stoker_part = "activation"

    def forward(self, input: Tensor) -> Any:
        if _native(input) and input.numel() >= SMALL_ELEMENTS and (kind := activation_kind(self)) is not None:
            return bias_activation(input, None, kind)
        return super().forward(input)


_ACTIVATIONS = {
    "GELUActivation": "gelu",
    "NewGELUActivation": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "AccurateGELUActivation": "gelu_tanh",
    "SiLUActivation": "silu",
}
"""transformers' activation classes whose formula a kernel implements; variants differ in rounding only."""


def activation_kind(module: Any) -> str | None:
    """The kernels' name for an activation module or function, None if there is none."""
    if module is nn.functional.gelu:
        return "gelu"
    if not isinstance(module, nn.Module):
        return None
    cls = stock_class(type(module))
    if module._forward_hooks or module._forward_pre_hooks:
        return None
    if cls is nn.GELU:
        return "gelu_tanh" if module.approximate == "tanh" else "gelu"
    if cls is nn.SiLU:
        return None if module.inplace else "silu"
    if cls is nn.ReLU:
        return "relu"
    return _ACTIVATIONS.get(cls.__name__) if cls.__module__ == "transformers.activations" else None


def dropout_probability(module: Any) -> float | None:
    """The probability of a dropout module in force, None if the module has to be called."""
    if module is None or plain(module, nn.Identity):
        return 0.0
    if not plain(module, nn.Dropout):
        return None
    return float(module.p) if module.training else 0.0


class LeafRMSNorm(Optimized):
    stoker_part = "rms norm in fp32"

    weight: nn.Parameter

    # These norms are defined by models: the argument may have any name, and there may be several.
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        eps, input = rms_eps(self), args[0] if args else None
        if (
            eps is not None
            and len(args) == 1
            and not kwargs
            and isinstance(input, Tensor)
            and _native(input, self.weight)
            and input.numel() >= SMALL_ELEMENTS
            and input.dtype == torch.float32
        ):
            return rms_norm(input, self._factor(), eps)
        return super().forward(*args, **kwargs)

    def _factor(self) -> Tensor:
        return self.weight


class LeafRMSNormPlusOne(LeafRMSNorm):
    """The norm of Gemma, whose weight is added to one."""

    def _factor(self) -> Tensor:
        return self.weight + 1.0


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is transformers' Conv1D: a linear layer whose weight is (in, out)."""
    cls = stock_class(type(module))
    return cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils"


def rms_eps(module: nn.Module) -> float | None:
    """The epsilon of an RMSNorm, None if it has none under a known name."""
    for name in ("variance_epsilon", "eps", "epsilon"):
        if isinstance(value := getattr(module, name, None), float):
            return value
    return None


def _rms_formula(module: nn.Module) -> str | None:
    """Many models define their own RMSNorm, some with another formula, so the module is tried on two rows."""
    name, eps = type(module).__name__, rms_eps(module)
    if not (name.endswith("RMSNorm") or name == "T5LayerNorm") or eps is None:
        return None
    weight = getattr(module, "weight", None)
    if [key for key, _ in module.named_parameters()] != ["weight"] or weight is None or weight.dim() != 1:
        return None
    if not _native(weight) or weight.dtype != torch.float32:
        return None
    probe = torch.linspace(-2.0, 3.0, 2 * weight.shape[0]).view(2, -1)
    with torch.no_grad():
        try:
            actual = type(module).forward(module, probe)  # its forward only: hooks must not see a probe
        except Exception:  # foreign code may raise anything; then it is neither formula
            return None
        normed = probe * torch.rsqrt(probe.square().mean(-1, keepdim=True) + eps)
        for formula, factor in (("rms", weight), ("rms_plus_one", weight + 1.0)):
            if torch.allclose(actual, normed * factor, rtol=1e-4, atol=1e-5):
                return formula
    return None
