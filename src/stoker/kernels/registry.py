"""How an operator becomes known to torch, and the checks every operator makes before a pointer leaves Python.

Operators are registered with torch.library (namespace `stoker`), so that autograd, torch.compile, checkpointing and
opcheck treat them like torch's own. Each operator's file holds its formula, its native call and its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = [
    "check_device",
    "check_tensor",
    "define",
    "draw_key",
    "key_value",
    "plain",
    "reference_factors",
    "split_rows",
    "without_derivative",
]

_LIBRARY = torch.library.Library("stoker", "DEF")


def define(
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Registers `stoker::<schema>`: `kernel` runs it, `fake` gives the shapes of its results, `backward` its gradient.

    Returns a function that takes the operator's arguments by position. It calls the kernel directly where nobody looks
    at the operator itself: torch's dispatcher with a Python kernel and gradient costs about 0.1 ms more per call.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, kernel, "CPU")
    torch.library.register_fake(f"stoker::{name}", fake, lib=_LIBRARY)
    if backward is not None:
        torch.library.register_autograd(f"stoker::{name}", backward, setup_context=setup_context, lib=_LIBRARY)
    dispatched = getattr(torch.ops.stoker, name).default
    direct = kernel if backward is None else _autograd_function(name, kernel, backward, setup_context)

    def operator(*args: Any) -> Any:
        if forward_ad._current_level >= 0 and any(map(_has_tangent, args)):
            # torch would return a tangent of zeros from an operator that it knows nothing else about.
            raise NotImplementedError(f"stoker::{name} has no forward-mode derivative; use reverse mode (backward)")
        if torch.compiler.is_compiling() or not plain(args):
            return dispatched(*args)
        return direct(*args) if torch.is_grad_enabled() else kernel(*args)

    return operator


def _autograd_function(
    name: str, kernel: Callable[..., Any], backward: Callable[..., Any], setup_context: Callable[..., Any] | None
) -> Callable[..., Any]:
    """`kernel` with its gradient as a torch.autograd.Function: what torch.library builds too, less the dispatcher.

    A Function sees tensors only among its own arguments, so lists travel item by item; their lengths come last, so that
    `needs_input_grad` counts as the operator's schema does. Without lists, None stands for the lengths.
    """

    # With `forward` and `setup_context` apart, torch inspects the signature of `forward` at every call.
    def forward(ctx: Any, *flat_and_lengths: Any) -> Any:
        *flat, lengths = flat_and_lengths
        args = tuple(flat) if lengths is None else _gather(lengths, flat)
        output = kernel(*args)
        ctx.lengths = lengths
        if setup_context is not None:
            setup_context(ctx, args, output)
        return output

    def flat_backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        found = backward(ctx, *grads)
        found = found if isinstance(found, tuple) else (found,)
        return *(found if ctx.lengths is None else _scatter(found, ctx.lengths)), None

    def either(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        if not torch.is_grad_enabled():
            return flat_backward(ctx, *grads)
        with torch.no_grad():  # recorded only if a second derivative may follow
            found = flat_backward(ctx, *grads)
        return without_derivative(name, found, [*grads, *ctx.saved_tensors])

    body = {"forward": staticmethod(forward), "backward": staticmethod(either)}
    function = type(f"stoker_{name}", (torch.autograd.Function,), body)
    # Without what Function.apply does for the tensors of torch.func: arguments are plain here.
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc, arg-type]

    def direct(*args: Any) -> Any:
        if list not in map(type, args):
            return apply(*args, None)
        lengths = tuple(len(arg) if isinstance(arg, list) else _NO_LIST for arg in args)
        return apply(*_scatter(args, lengths), lengths)

    return direct


def without_derivative(name: str, results: tuple[Any, ...], sources: list[Any]) -> tuple[Any, ...]:
    """`results`, such that whoever asks for their derivative by one of `sources`, or by anything, gets an error.

    torch's once_differentiable looks at the incoming gradients alone. Ours depend on what was saved as well, and would pass
    as constants where the incoming gradient is one, as that of a sum is.
    """
    depends = [source for source in sources if source is not None and source.requires_grad]
    depends = depends or [torch.zeros((), requires_grad=True)]
    message = f"trying to differentiate stoker::{name} twice; it has no second derivative"
    error: Any = torch._C._functions.DelayedError(message.encode(), len(results) + len(depends))
    found: tuple[Any, ...] = error(*results, *depends)
    return found[: len(results)]


_NO_LIST = -1


def _scatter(args: tuple[Any, ...], lengths: tuple[int, ...]) -> list[Any]:
    """`args` with the items of their lists one by one."""
    flat: list[Any] = []
    for arg, length in zip(args, lengths, strict=True):
        if length == _NO_LIST:
            flat.append(arg)
        else:
            flat.extend(arg if arg is not None else [None] * length)
    return flat


def _gather(lengths: tuple[int, ...], flat: list[Any]) -> tuple[Any, ...]:
    """The reverse of `_scatter`."""
    args, position = [], 0
    for length in lengths:
        if length == _NO_LIST:
            args.append(flat[position])
            position += 1
        else:
            args.append(list(flat[position : position + length]))
            position += length
    return tuple(args)


_PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter, type(None), bool, int, float, str, torch.dtype})


def plain(args: tuple[Any, ...]) -> bool:
    """Whether these are ordinary CPU arguments and no mode or transform of torch wants to see the call."""
    return (
        not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
        and all(all(map(_plain, arg)) if type(arg) is list else _plain(arg) for arg in args)
    )


def _plain(arg: Any) -> bool:
    return type(arg) in _PLAIN_TYPES and (not isinstance(arg, Tensor) or arg.is_cpu)


def _has_tangent(arg: Any) -> bool:
    if isinstance(arg, list):
        return any(map(_has_tangent, arg))
    return isinstance(arg, Tensor) and arg.is_floating_point() and forward_ad.unpack_dual(arg).tangent is not None


def check_tensor(
    operator: str,
    name: str,
    tensor: Tensor,
    *,
    shape: Sequence[int | None] | None = None,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
) -> None:
    """Raises ValueError naming operator and argument unless `tensor` is on the CPU with one of `dtypes` and `shape`.

    None in `shape` accepts any size.
    """
    if tensor.device.type != "cpu":
        raise ValueError(f"{operator}: {name} is on {tensor.device}; Stoker's kernels run on the CPU only")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{operator}: {name} has layout {tensor.layout}; a dense tensor is needed")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(
            f"{operator}: {name} has dtype {str(tensor.dtype).removeprefix('torch.')}; it must be {wanted}"
        )
    if shape is not None and (
        tensor.dim() != len(shape)
        or any(want is not None and size != want for size, want in zip(tensor.shape, shape, strict=True))
    ):
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"{operator}: {name} has shape {tuple(tensor.shape)}; it must be ({wanted})")


def check_device(operator: str, **tensors: Tensor | None) -> None:
    """Raises ValueError for a tensor that is not on the CPU: torch's dispatcher would not even reach our own checks."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device.type != "cpu":
            raise ValueError(f"{operator}: {name} is on {tensor.device}; Stoker's kernels run on the CPU only")


def split_rows(tensor: Tensor) -> tuple[int, int]:
    """A tensor as (rows, columns): a row is a position of all dimensions but the last."""
    columns = tensor.shape[-1] if tensor.dim() else 1
    return (tensor.numel() // columns if columns else 0), columns


def draw_key() -> Tensor:
    """A fresh 64-bit dropout key from torch's default generator, as a tensor of one element.

    Drawing it from there is what makes masks follow torch.manual_seed, torch.set_rng_state and checkpointing.
    """
    return torch.empty(1, dtype=torch.int64).random_()


def key_value(key: Tensor | None) -> int:
    """The key as C++ takes it; 0 where nothing is dropped."""
    return 0 if key is None else int(key.item()) & 0xFFFFFFFFFFFFFFFF


def reference_factors(key: Tensor, rows: int, columns: int, p: float) -> Tensor:
    """The dropout factors (rows, columns) that the kernels apply for `key`: 0 where dropped, 1 / (1 - rate) where kept.

    For tests and for reading a mask; it runs the native generator itself over a matrix of ones.
    """
    ones = torch.ones(rows, columns, dtype=torch.float32)
    return torch.ops.stoker.dropout(ones, p, key)  # type: ignore[no-any-return]
