"""A frozen parameter whose values are stored in bf16 or in few bits, and widened when something computes with them.

`store` makes a parameter a `FrozenWeight` in place and `widen` makes it an ordinary parameter again, as torch does with its
UninitializedParameter: names, identity and shared parameters stay. Code that knows nothing of this reads the right values:
linear layers and embeddings widen what they need, every other function gets a widened copy. A write, or `requires_grad_()`,
makes the parameter ordinary first, so that nothing is lost: merging an adapter gives the widened weight plus the adapter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from stoker.english import with_article
from stoker.kernels.linear import linear
from stoker.kernels.quantized import dequantize, quantize
from stoker.kernels.tracing import stock_wanted
from stoker.kernels.widening import Weight

__all__ = [
    "FORMS",
    "Form",
    "FrozenWeight",
    "Stored",
    "store",
    "stored_bytes",
    "stored_values",
    "stored_weight",
    "why_not",
    "widen",
]

Form = Literal["bfloat16", "int8", "nf4"]
FORMS: tuple[Form, ...] = get_args(Form)
_BITS: dict[str, int] = {"int8": 8, "nf4": 4}
_TYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Stored:
    """The values of one parameter. They are never changed, so copies of a model share them."""

    form: Form
    weight: Weight
    """As linear layers multiply with it: (rows, columns) of x W^T"""
    transposed: bool
    """Whether the parameter is the transpose of `weight`, as that of transformers' Conv1D is."""

    @property
    def nbytes(self) -> int:
        return int(self.weight.nbytes)

    def values(self, dtype: torch.dtype) -> Tensor:
        """A copy with the shape of the parameter."""
        weight = self.weight
        with torch.inference_mode(False), torch.no_grad():  # so that a write to it can be seen
            if isinstance(weight, Tensor):
                values = weight.t() if self.transposed else weight
                return torch.empty(values.shape, dtype=dtype).copy_(values)
            wide = dequantize(weight, dtype)
            return wide.t().clone(memory_format=torch.contiguous_format) if self.transposed else wide


def why_not(parameter: nn.Parameter, form: Form, dtype: torch.dtype | None = None) -> str | None:
    """The reason for which `store` cannot store this parameter, or would save nothing; None if there is none."""
    if type(parameter) is not nn.Parameter:
        return f"it is {with_article(type(parameter).__name__)}"
    if parameter.requires_grad:
        return "it is trained"
    if parameter.dim() != 2 or not parameter.numel():
        return "it is not a matrix"
    if parameter.device.type != "cpu" or parameter.dtype not in _TYPES:
        return f"it is {str(parameter.dtype).removeprefix('torch.')} on {parameter.device}"
    if form == "bfloat16":
        return "it is bfloat16 already" if (dtype or parameter.dtype) == torch.bfloat16 else None
    if form == "nf4" and (parameter.shape[0] % 2 or parameter.shape[1] % 2):
        return "its size is odd"
    return None if bool(parameter.isfinite().all()) else "it has elements that are infinite or NaN"


def store(parameter: nn.Parameter, form: Form, *, transposed: bool = False, dtype: torch.dtype | None = None) -> None:
    """Makes a parameter for which `why_not` found no reason a FrozenWeight, in place. `dtype`: as what it is used from now on."""
    weight = parameter.detach().t() if transposed else parameter.detach()
    values: Weight = weight.to(torch.bfloat16) if form == "bfloat16" else quantize(weight, _BITS[form])
    _set(parameter, _placeholder(parameter.shape, dtype or parameter.dtype))
    parameter.__class__ = FrozenWeight
    cast(FrozenWeight, parameter).stored = Stored(form, values, transposed)


def widen(parameter: nn.Parameter) -> None:
    """Makes a FrozenWeight an ordinary parameter, in place."""
    if isinstance(parameter, FrozenWeight):
        _become(parameter, parameter.stored.values(parameter.dtype))


def stored_weight(parameter: Tensor) -> Weight:
    """What linear layers multiply with: the stored form of a FrozenWeight, else the parameter itself."""
    return parameter.stored.weight if isinstance(parameter, _Lazy) else parameter


def stored_values(parameter: Tensor) -> Tensor:
    """A matrix with the values of a parameter, in fp32 or bf16: without a copy, unless it is stored in few bits."""
    if not isinstance(parameter, _Lazy):
        return parameter
    weight = parameter.stored.weight
    ready = isinstance(weight, Tensor) and not parameter.stored.transposed
    return cast(Tensor, weight) if ready else parameter.stored.values(parameter.dtype)


def stored_bytes(parameter: Tensor) -> int:
    return parameter.stored.nbytes if isinstance(parameter, _Lazy) else parameter.numel() * parameter.element_size()


_METADATA = frozenset(
    {
        "__hash__", "__len__", "dim", "element_size", "get_device", "has_names", "is_complex", "is_conj", "is_floating_point",
        "is_inference", "is_neg", "is_pinned", "is_shared", "is_signed", "ndimension", "nelement", "numel",
        "register_hook", "register_post_accumulate_grad_hook", "size",
    }
)  # fmt: skip
"""Functions that do not look at values."""
_VALUE_PROPERTIES = frozenset({"T", "mT", "H", "mH", "real", "imag"})
_POINTERS = frozenset({"data_ptr", "storage", "untyped_storage", "_typed_storage", "storage_offset", "stride"})
_CONVERSIONS = frozenset({"to", "float", "bfloat16", "half", "double", "cpu", "type", "type_as", "contiguous"})


class _Lazy(Tensor):
    """What FrozenWeight and the tensors that share its values have in common.

    To C++ each is a tensor of the right shape, all of whose elements are one NaN; functions of torch arrive here first.
    """

    stored: Stored

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return _call(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)}, {self.dtype}, stored in {self.stored.form})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as an ordinary tensor, which loads where Stoker is not installed."""
        values = self.stored.values(self.dtype)
        if isinstance(self, nn.Parameter):
            values = nn.Parameter(values, requires_grad=False)
        return values.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = _lazy(type(self), self.stored, self.dtype, self.shape)
        return memo[id(self)]


class FrozenWeight(_Lazy, nn.Parameter):
    """A parameter whose values are in `stored`."""


class _Values(_Lazy):
    """What `parameter.data` and `parameter.detach()` return, and so what a state dict contains."""

    owner: FrozenWeight | None = None


def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a function of torch, one of whose arguments is lazy."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        return _access(func, name, cast(Any, func).__self__.__name__, args)
    first = args[0] if args else None
    if name in _METADATA:
        return func(*args, **kwargs)
    if name == "is_contiguous":
        return True
    if name in _POINTERS:
        # a pointer must stay valid, so the values stay too; a parameter is only asked for an address of its own
        if isinstance(first, _Values):
            _become(first, first.stored.values(first.dtype))
        return func(*args, **kwargs)
    if name == "detach" and isinstance(first, _Lazy):
        return _shared(first)
    if name == "requires_grad_" and isinstance(first, _Lazy):
        if kwargs.get("requires_grad", args[1] if len(args) > 1 else True):
            _become(first, first.stored.values(first.dtype))
        return func(*args, **kwargs)
    if name in _CONVERSIONS and isinstance(first, _Lazy) and not kwargs.get("copy"):
        converted = func(torch.empty(0, dtype=first.dtype), *args[1:], **kwargs)
        if isinstance(converted, Tensor) and converted.device.type == "cpu" and converted.dtype in _TYPES:
            return first if converted.dtype == first.dtype else _shared(first, converted.dtype)
    if (special := _SPECIAL.get(func)) is not None and (found := special(*args, **kwargs)) is not None:
        return found
    return _with_values(func, args, kwargs)


def _access(func: Callable[..., Any], how: str, attribute: str, args: tuple[Any, ...]) -> Any:
    """Gets or sets an attribute of a lazy tensor."""
    this = args[0]
    if how == "__get__":
        if attribute == "data":
            return _shared(this)
        return _with_values(func, args, {}) if attribute in _VALUE_PROPERTIES else func(*args)
    if attribute == "data":
        value = args[1]
        if isinstance(value, _Lazy) and value.stored is this.stored:
            return _set(this, _placeholder(value.shape, value.dtype))
        return _write(this, value.stored.values(value.dtype) if isinstance(value, _Lazy) else value)
    if attribute == "requires_grad" and args[1]:
        _become(this, this.stored.values(this.dtype))
    return func(*args)


def _with_values(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls `func` with widened copies. If it changes one, the parameter becomes an ordinary one with the new values."""
    copies: dict[int, tuple[_Lazy, Tensor, int]] = {}

    def replace(value: Any) -> Any:
        if isinstance(value, _Lazy):
            if id(value) not in copies:
                copy = value.stored.values(value.dtype)
                copies[id(value)] = value, copy, copy._version
            return copies[id(value)][1]
        if isinstance(value, (list, tuple)):
            return type(value)(map(replace, value))
        return {key: replace(one) for key, one in value.items()} if isinstance(value, dict) else value

    result = func(*replace(args), **replace(kwargs))
    for lazy, copy, version in copies.values():
        if copy._version != version:
            _write(lazy, copy)
            result = lazy if result is copy else result
    return result


def _write(lazy: _Lazy, values: Tensor) -> None:
    owner = getattr(lazy, "owner", None)
    if isinstance(owner, FrozenWeight):
        _become(owner, values)
    _become(lazy, values)


def _become(lazy: _Lazy, values: Tensor) -> None:
    """Makes `lazy` an ordinary tensor or parameter that has these values."""
    lazy.__class__ = nn.Parameter if isinstance(lazy, nn.Parameter) else Tensor  # type: ignore[assignment]
    lazy.__dict__.pop("stored", None)
    lazy.__dict__.pop("owner", None)
    _set(lazy, values)


def _shared(lazy: _Lazy, dtype: torch.dtype | None = None) -> _Values:
    """A tensor with the same values, perhaps of another type. A write to one of the same type reaches the parameter."""
    values: _Values = _lazy(_Values, lazy.stored, dtype or lazy.dtype, lazy.shape)
    if dtype in (None, lazy.dtype):
        values.owner = lazy if isinstance(lazy, FrozenWeight) else getattr(lazy, "owner", None)
    return values


def _lazy(kind: type[Any], stored: Stored, dtype: torch.dtype, shape: torch.Size) -> Any:
    made: Any = _placeholder(shape, dtype).as_subclass(kind)
    made.stored = stored
    return made


def _placeholder(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor of this shape in the memory of one element."""
    return torch.full((), float("nan"), dtype=dtype).expand(shape)


def _set(tensor: Tensor, values: Tensor) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        tensor.data = values


# The functions of a forward pass. A widened copy that autograd keeps would take the memory that storing saves.


def _linear(x: Any, weight: Any, bias: Any = None) -> Tensor | None:
    """F.linear, or None if the kernel does not compute this call."""
    if not isinstance(weight, _Lazy) or weight.stored.transposed:
        return None
    return _multiplied(x, weight, bias)


def _addmm(bias: Any, x: Any, weight: Any, **factors: Any) -> Tensor | None:
    """torch.addmm as transformers' Conv1D calls it, or None."""
    if not isinstance(weight, _Lazy) or not weight.stored.transposed or factors or bias.dim() != 1:
        return None
    return _multiplied(x, weight, bias)


def _multiplied(x: Any, weight: _Lazy, bias: Any) -> Tensor | None:
    autocast, stored = torch.is_autocast_enabled("cpu"), weight.stored.weight
    dtype = torch.get_autocast_dtype("cpu") if autocast else weight.dtype
    plain = all(type(one) in (Tensor, nn.Parameter) and one.dtype in _TYPES for one in (x, x if bias is None else bias))
    if stock_wanted() or not plain or x.device.type != "cpu" or not x.dim() or x.shape[-1] != stored.shape[1]:
        return None
    if dtype not in _TYPES or not (autocast or x.dtype == dtype):
        return None
    return linear(x.to(dtype), stored, bias)


def _embedding(input: Any, weight: Any, *args: Any, **options: Any) -> Tensor | None:
    """F.embedding of a table in bf16: its rows are widened after they were looked up. None for other tables."""
    if not isinstance(weight, _Lazy) or not isinstance(weight.stored.weight, Tensor) or isinstance(input, _Lazy):
        return None
    return nn.functional.embedding(input, weight.stored.weight, *args, **options).to(weight.dtype)


_SPECIAL: dict[Any, Callable[..., Tensor | None]] = {
    nn.functional.linear: _linear,
    torch.addmm: _addmm,
    nn.functional.embedding: _embedding,
}
