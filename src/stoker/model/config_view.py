"""A configuration object as one model sees it: all attributes are those of the original, but it names Stoker's attention.

transformers' layers read the name of their attention implementation from a configuration, which other models may share. So the
modules of one model get a view of it: an object of a subclass with the same `__dict__`. Other models, pickles and saved
configurations keep the original's name. A deep copy of a model has views of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

from stoker.model.class_swap import cached

__all__ = ["give_views", "is_view", "original", "originals", "take_views"]

_OWN = "_attn_implementation_internal"
"""Where a configuration of transformers stores the name."""
_SLOTS = ("stoker_original", "stoker_attention", "stoker_children")


def give_views(model: nn.Module, switched: Collection[int], attention: str) -> None:
    """Lets the modules of `model` see `attention` in the configurations with these ids, as their parts and on their own."""
    views: dict[int, Any] = {}
    for module, name, config in list(_configurations(model)):
        view = _view_tree(config, switched, attention, views)
        if view is not None:
            module.__dict__[name] = view


def take_views(model: nn.Module) -> None:
    """Gives the modules of `model` the original configurations back."""
    for module, name, config in list(_configurations(model)):
        if is_view(config):
            module.__dict__[name] = config.stoker_original


def is_view(config: Any) -> bool:
    """Whether `give_views` has made this object."""
    return "stoker_stock" in type(config).__dict__


def original(config: Any) -> Any:
    """The configuration that this is a view of, or itself."""
    return config.stoker_original if is_view(config) else config


def originals(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a module that are views, each as its original."""
    return {name: value.stoker_original for name, value in attributes.items() if is_view(value)}


def _configurations(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """(module, attribute, value) of every configuration of transformers that a module inside `model` refers to."""
    from transformers import PretrainedConfig

    for module in model.modules():
        for name, value in module.__dict__.items():
            if isinstance(value, PretrainedConfig):
                yield module, name, value


def _view_tree(config: Any, switched: Collection[int], attention: str, views: dict[int, Any]) -> Any:
    """A view of `config`, or None if neither it nor a configuration inside it is switched."""
    if id(config) not in views:
        views[id(config)] = None  # a configuration cannot contain itself, but one that does must not loop
        inside = (config.__dict__.get(name) for name in type(config).sub_configs)
        children = [_view_tree(one, switched, attention, views) for one in inside if hasattr(type(one), "sub_configs")]
        children = [one for one in children if one is not None]
        own = attention if id(config) in switched else None
        views[id(config)] = _make(config, own, children) if own or children else None
    return views[id(config)]


def _make(config: Any, attention: str | None, children: list[Any]) -> Any:
    cls = _view_class(type(config))
    view = object.__new__(cls)
    object.__setattr__(view, "__dict__", config.__dict__)
    for name, value in zip(_SLOTS, (config, attention, children), strict=True):
        object.__setattr__(view, name, value)
    return view


@cached
def _view_class(config_class: Any) -> Any:
    def read_attention(self: Any) -> Any:
        name = getattr(self, "stoker_attention", None)
        return config_class._attn_implementation.fget(self) if name is None else name

    def write_attention(self: Any, value: Any) -> None:
        object.__setattr__(self, "stoker_attention", None)  # what a user sets afterwards counts
        config_class._attn_implementation.fset(self, value)

    def read_own(self: Any) -> Any:
        return self.__dict__.get(_OWN)

    def write_own(self: Any, value: Any) -> None:
        """transformers sets it here too, also to what it has just read: in a model that is made with this configuration."""
        if value != getattr(self, "stoker_attention", None):
            object.__setattr__(self, "stoker_attention", None)
            self.__dict__[_OWN] = value

    def deep_copy(self: Any, memo: dict[int, Any]) -> Any:
        alone = not memo
        copied = copy.deepcopy(self.stoker_original, memo)
        if alone:  # not a part of a model that is copied: the copy is for another model
            return copied
        return _make(copied, self.stoker_attention, [copy.deepcopy(one, memo) for one in self.stoker_children])

    body: dict[str, Any] = {
        # The names are those of the stock class: transformers looks its registries up by them.
        "__module__": config_class.__module__,
        "__qualname__": config_class.__qualname__,
        "__doc__": config_class.__doc__,
        "__slots__": _SLOTS,
        "stoker_stock": config_class,
        "_attn_implementation": property(read_attention, write_attention),
        _OWN: property(read_own, write_own),
        "__deepcopy__": deep_copy,
        "__copy__": lambda self: copy.copy(self.stoker_original),
        # protocol 1, because the constructor of later ones requires the object's own class
        "__reduce_ex__": lambda self, _: self.stoker_original.__reduce_ex__(1),
        "__eq__": lambda self, other: original(other).__eq__(self.stoker_original),
        "__hash__": config_class.__hash__,
        **{name: _child(name) for name in config_class.sub_configs},
    }
    return type(config_class.__name__, (config_class,), body)


def _child(name: str) -> property:
    """The configuration `name` inside another one: the view of it, where there is one."""

    def read(self: Any) -> Any:
        if name not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        value = self.__dict__[name]
        children = getattr(self, "stoker_children", ())
        return next((one for one in children if one.stoker_original is value), value)

    def write(self: Any, value: Any) -> None:
        self.__dict__[name] = original(value)

    return property(read, write)
