"""How a module is optimized in place: its class becomes a subclass of its own class that overrides `forward`.

Nothing is added to the instance: parameters, names, hooks and storage stay as they are, `isinstance` holds, and setting the
old class again undoes it. The settings and the table row are attributes of the new class.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn

from stoker.kernels.frozen_parameter import FrozenWeight

__all__ = [
    "Optimized",
    "Settings",
    "accepts_keywords",
    "cached",
    "child",
    "is_exporting",
    "named",
    "ordinary",
    "parameter_names",
    "plain",
    "restore_class",
    "stock_class",
    "swap_class",
    "unhooked",
]

is_exporting: Callable[[], bool] = torch.compiler.is_exporting

Function = TypeVar("Function", bound=Callable[..., Any])


def cached(function: Function) -> Function:
    """functools.cache with the function's own type, because type checkers consider classes unhashable."""
    return cast(Function, functools.cache(function))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The switches that `optimize` was called with; an attribute of every swapped class."""

    unpad: bool = True
    """Run base models without padding; if not, batches with padding run as stock does."""
    fuse: bool = True
    """Use the native kernels in layers, embeddings and leaf modules."""
    fuse_loss: bool = True
    """Compute the masked-LM loss from the labelled rows only, and logits on demand."""
    dtype: torch.dtype | None = None
    """Type of the activations inside the base model; None: that of the parameters, or of autocast where it is enabled."""
    keep_activations: bool = False
    """Where layers are checkpointed, keep the activations all the same if they fit (model/recomputation.py)."""


class Optimized(nn.Module):
    """Base of all overrides. A swapped class is (override, stock class), made by `swap_class`."""

    stoker_stock: ClassVar[type[nn.Module]]
    stoker_settings: ClassVar[Settings]
    stoker_row: ClassVar[Any] = None
    stoker_part: ClassVar[str] = ""
    """The name of this override in the report."""
    stoker_model: ClassVar[bool] = False
    """True for overrides of whole models: they keep the signature, which trainers read, and torch.compile skips them."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as the stock class, so that a saved model loads where Stoker is not installed."""
        # protocol 1, because the constructor of later ones requires the object's own class
        reduced: Any = super().__reduce_ex__(1)
        constructor, args, *rest = reduced
        stock = stock_class(type(self))
        return (constructor, tuple(stock if arg is type(self) else arg for arg in args), *rest)

    def __copy__(self) -> nn.Module:
        clone = type(self).__new__(type(self))
        clone.__dict__.update(self.__dict__)
        return clone

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        clone = memo[id(self)] = type(self).__new__(type(self))
        clone.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return clone


def swap_class(module: nn.Module, override: type[Optimized], settings: Settings, row: Any = None) -> None:
    """Gives `module` the class (override, its own class)."""
    module.__class__ = _swapped_class(override, type(module), settings, row)


def restore_class(module: nn.Module) -> bool:
    """Gives `module` its stock class back; True if it had been swapped. Classes that others made since are left alone."""
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
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # accelerate stores this function in the instance, where `restore` does not reach it
        forward = override.forward if isinstance(self, override) else type(self).forward
        return forward(self, *args, **kwargs)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # torch.compile skips the model, which is faster as it is; torch.export cannot, so it gets the stock model
        return stock(self, *args, **kwargs) if is_exporting() else run(self, *args, **kwargs)

    return forward


def named(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call to `module`'s stock forward by name, without those that are None."""
    call = dict(zip(parameter_names(type(module)), args, strict=False), **kwargs)
    return {name: value for name, value in call.items() if value is not None}


@cached
def parameter_names(cls: type[nn.Module]) -> tuple[str, ...]:
    """The names of the parameters of the stock forward."""
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
    """Whether reading the weights of `module` is equivalent to calling it: exactly a `kind`, not wrapped, not hooked."""
    cls = type(module)
    return (cls is kind or cls.__dict__.get("stoker_stock") is kind) and unhooked(module) and ordinary(module)


_ORDINARY = (Tensor, nn.Parameter, FrozenWeight)


def ordinary(module: nn.Module) -> bool:
    """Whether the weights are plain tensors, or our own frozen ones: foreign ones have their own multiplication."""
    for parameter in module._parameters.values():  # noqa: SIM110 - several times per layer, and all() is slow
        if parameter is not None and type(parameter) not in _ORDINARY:
            return False
    return True


def unhooked(module: nn.Module) -> bool:
    """Whether calling `module` runs the `forward` of its class and nothing else."""
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )
