"""How a module is optimised in place: its class becomes a subclass of its own class that overrides `forward`.

Nothing is added to the instance: parameters, names, hooks and storage stay as they are, `isinstance` holds, and giving the
old class back undoes it. What a swapped class needs to know (settings, table row) lives on the class.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, cast

import torch
import torch.fx
from torch import Tensor, nn
from torch.autograd import forward_ad

__all__ = [
    "Optimized",
    "Settings",
    "accepts_keywords",
    "cached",
    "child",
    "is_exporting",
    "named",
    "plain",
    "restore_class",
    "stock_class",
    "stock_wanted",
    "swap_class",
    "unhooked",
]

is_exporting: Callable[[], bool] = torch.compiler.is_exporting

Function = TypeVar("Function", bound=Callable[..., Any])


def cached(function: Function) -> Function:
    """functools.cache with the function's own type: type checkers take classes for unhashable."""
    return cast(Function, functools.cache(function))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What `optimize` was asked for; part of every swapped class."""

    unpad: bool = True
    """Take padding out at the base model's door; if not, batches with padding run as stock does."""
    fuse: bool = True
    """Use the native kernels in layers, leaves and embeddings."""
    fuse_loss: bool = True
    """Masked-LM loss from the labelled rows only, logits when they are asked for."""
    dtype: torch.dtype | None = None
    """Type of the activations inside the base model; None: that of the parameters, or of autocast if it is on."""


class Optimized(nn.Module):
    """Base of all overrides. A swapped class is (override, stock class), made by `swap_class`."""

    stoker_stock: ClassVar[type[nn.Module]]
    stoker_settings: ClassVar[Settings]
    stoker_row: ClassVar[Any] = None
    stoker_part: ClassVar[str] = ""
    """What the report calls this override."""
    stoker_model: ClassVar[bool] = False
    """True for overrides of whole models: keeps the signature, which trainers read, and is not traced by torch.compile."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as the stock class, so that a saved model loads where Stoker is not installed."""
        # protocol 1, because the constructor that later ones use insists on the object's own class
        reduced: Any = super().__reduce_ex__(1)
        constructor, args, *rest = reduced
        stock = stock_class(type(self))
        return (constructor, tuple(stock if arg is type(self) else arg for arg in args), *rest)

    def __copy__(self) -> nn.Module:
        return self._clone(lambda state: state)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return self._clone(lambda state: copy.deepcopy(state, memo), memo)

    def _clone(
        self, state: Callable[[dict[str, Any]], dict[str, Any]], memo: dict[int, Any] | None = None
    ) -> nn.Module:
        clone = type(self).__new__(type(self))
        if memo is not None:
            memo[id(self)] = clone
        clone.__dict__.update(state(self.__dict__))
        return clone


def swap_class(module: nn.Module, override: type[Optimized], settings: Settings, row: Any = None) -> None:
    """Gives `module` the class (override, its own class)."""
    module.__class__ = _swapped_class(override, type(module), settings, row)


def restore_class(module: nn.Module) -> bool:
    """Gives `module` its stock class back; True if it had been swapped. What others made of the class since is left alone."""
    swapped = False
    while "stoker_stock" in type(module).__dict__:
        object.__setattr__(module, "__class__", type(module).__dict__["stoker_stock"])
        swapped = True
    return swapped


@cached
def stock_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class that `cls` was before it was swapped, `cls` itself if it was not."""
    while issubclass(cls, Optimized):
        cls = cls.stoker_stock
    return cls


@cached
def _swapped_class(override: type[Optimized], stock: type[nn.Module], settings: Settings, row: Any) -> type[nn.Module]:
    # The names are those of the stock class: save_pretrained writes them, and transformers looks its registries up by them.
    body: dict[str, Any] = {
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__doc__": stock.__doc__,
        "stoker_stock": stock,
        "stoker_settings": settings,
        "stoker_row": row,
    }
    if override.stoker_model:
        body["forward"] = functools.wraps(stock.forward)(_forward(override, stock.forward))
    return type(stock.__name__, (override, stock), body)


def _forward(override: type[Optimized], stock: Callable[..., Any]) -> Callable[..., Any]:
    @torch.compiler.disable
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # accelerate keeps the forward that it finds in the instance, where `restore` does not reach it
        forward = override.forward if isinstance(self, override) else type(self).forward
        return forward(self, *args, **kwargs)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # torch.compile goes around the model, which is faster; torch.export has no way around, and sees the stock model
        return stock(self, *args, **kwargs) if is_exporting() else run(self, *args, **kwargs)

    return forward


def named(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call to `module`'s stock forward by name, those that are None left out."""
    call = dict(zip(_parameter_names(type(module)), args, strict=False), **kwargs)
    return {name: value for name, value in call.items() if value is not None}


@cached
def _parameter_names(cls: type[nn.Module]) -> tuple[str, ...]:
    return tuple(inspect.signature(stock_class(cls).forward).parameters)[1:]


@cached
def accepts_keywords(cls: type[nn.Module]) -> bool:
    """Whether the stock forward takes keyword arguments that it does not name."""
    parameters = inspect.signature(stock_class(cls).forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def child(module: nn.Module, path: str) -> Any:
    """The submodule or attribute at a dotted path."""
    for name in path.split("."):
        # _modules first: nn.Module.__getattr__ is slow, and layers look up fifteen paths per call
        found = module._modules.get(name)
        module = found if found is not None else getattr(module, name)
    return module


def plain(module: Any, kind: type[nn.Module]) -> bool:
    """Whether reading the weights of `module` is as good as calling it: exactly a `kind`, not wrapped, not hooked."""
    cls = type(module)
    return (cls is kind or cls.__dict__.get("stoker_stock") is kind) and unhooked(module) and _ordinary(module)


_ORDINARY = (Tensor, nn.Parameter)


def _ordinary(module: nn.Module) -> bool:
    """Whether the weights are torch's own tensors: one that is quantised or distributed multiplies in a way of its own."""
    for parameter in module._parameters.values():  # noqa: SIM110 - several times per layer, and all() is slow
        if parameter is not None and type(parameter) not in _ORDINARY:
            return False
    return True


def stock_wanted() -> bool:
    """Whether this call is compiled, exported, traced or transformed, so that stock operators must be seen, and not ours.

    torch.compile and torch.export; torch.jit.trace, torch.fx and make_fx; torch.func and forward-mode derivatives; and
    whatever else looks at operators one by one (FakeTensorMode, FlopCounterMode, any other TorchDispatchMode).
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or forward_ad._current_level >= 0
        or torch.jit.is_tracing()
        or torch.fx._symbolic_trace._is_fx_tracing_flag
    )


def unhooked(module: nn.Module) -> bool:
    """Whether nothing but `forward` of its class happens when `module` is called."""
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )
