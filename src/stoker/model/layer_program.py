"""A whole layer as one autograd node, with one native call per direction.

A layer is written down once as two programs of kernels (program_writer.py), the layer and its gradients. They hold for one number
of tokens and for every layer that is built alike, so a step of twelve layers needs one pair. The results are bit for bit those of
the single operators with the same engines.

The inputs of the node are the rows of the layer, its parameters, and what it is given beside its rows and passes gradients to: a
bias of scores (MPNet), embeddings of relative positions (DeBERTa). The last layer of a classifier has a program of its own, which
goes on with the first row of each sequence after attention.

Linear layers are written with their LoRA adapters, and with frozen weights that are stored in bf16 or in few bits, which are
widened in the workspace just before each product. A layer with a module that has to be called (hooks, DoRA, merged or disabled
adapters) runs by single operators, and so does every layer while somebody looks at the operators (torch.compile, tracing,
dispatch modes, transforms).
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook

from stoker.kernels import native
from stoker.kernels.attention import gradient_parts
from stoker.kernels.program import Workspace
from stoker.kernels.registry import without_derivative
from stoker.model.class_swap import unhooked
from stoker.model.families import Family
from stoker.model.layer_parts import (
    relative_positions,
    rotary_halves,
    score_bias,
)
from stoker.model.module_watch import Watch
from stoker.model.program_writer import LayerPrograms, ProgramWriter, Unsupported, key_chunk
from stoker.model.sequences import Sequences

__all__ = ["is_called_directly", "run"]

SWITCH = "STOKER_LAYER_PROGRAM"
"""Set to 0 in the environment, layers run by single operators."""
_KEPT = 64  # pairs of programs; batches of a length that comes again find theirs
_bytes = attrgetter("nbytes")


def run(layer: Any, hidden: Tensor, sequences: Sequences, extra: dict[str, Any]) -> Tensor | None:
    """The output of a fused layer for packed rows `hidden` (1, tokens, width); None: it has to run by single operators."""
    call = sequences.shared.get(_Call)
    if call is None:
        call = sequences.shared[_Call] = _Call.of(layer, sequences)
    if (
        call.watch is None
        or type(hidden) is not Tensor
        or not hidden.shape[1]
        or not hidden.is_contiguous()
        or threading.get_ident() != call.thread  # a checkpoint that is computed again
    ):
        return None
    plan = call.watch.facts.get(id(layer))
    if plan is None or plan.dtype is not hidden.dtype or plan.extra != tuple(extra):
        plan = call.watch.facts[id(layer)] = _read(layer, hidden, sequences, extra)
    if plan.signature < 0:
        return None
    inputs, distances = _inputs(plan, layer.stoker_row, sequences, extra)
    wants, count = torch.is_grad_enabled(), call.numbers[1]
    first = count if sequences.first_from is layer else 0
    given = [(one.shape, one.dtype, wants and one.requires_grad, gradient_parts(count)) for one in inputs]
    key = plan.signature, hidden.shape[1], wants, wants and hidden.requires_grad, first, *given
    programs = call.programs.get(key)
    if programs is None:
        try:
            programs = call.programs[key] = _programs_of((*key, *call.key), layer, hidden, sequences, extra)
        except Unsupported:
            call.watch.facts[id(layer)] = _Plan(hidden.dtype, tuple(extra), plan.direct)
            return None
    rotary = rotary_halves(layer.stoker_row, sequences, extra) or ()
    numbers = [*call.numbers, *([table.data_ptr() for table in rotary] or (0, 0))]
    numbers += (0, 0) if distances is None else (distances.data_ptr(), (distances.numel() + 1) // 2)
    if programs.keys:
        numbers += torch.empty(programs.keys, dtype=torch.int64).random_().tolist()
    alive = sequences.starts, rotary, distances
    y: Tensor = _apply(programs, numbers, alive, hidden, *plan.tensors, *inputs)
    return y


def _inputs(
    plan: _Plan, row: Family, sequences: Sequences, extra: dict[str, Any]
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """What a layer computes with beside its input and its parameters, and passes gradients to; and the rows of distances."""
    bias = None if row.relative_bias is None else score_bias(row, sequences, extra)
    positions = relative_positions(row, plan.span, sequences, extra) if plan.span else None
    table, distances = positions or (None, None)
    return tuple(one for one in (bias, table) if one is not None), distances


def is_called_directly(layer: Any, sequences: Sequences) -> bool:
    """Whether calling a layer is calling its `forward`: no hooks, no activation checkpointing."""
    call = sequences.shared.get(_Call)
    if call is None or call.watch is None or call.hooked:
        return False
    plan = call.watch.facts.get(id(layer))
    # older versions of transformers checkpoint in __call__, and the attribute may have appeared since the layer was read
    return plan is not None and plan.direct and not layer.__dict__.get("gradient_checkpointing")


@dataclass
class _Call:
    """What the layers of one call of a base model have in common, found out by the first of them."""

    watch: Watch | None = None
    """The model's; None if layers have to run by single operators."""
    thread: int = 0
    key: tuple[Any, ...] = ()
    """What a program depends on beside the layer."""
    numbers: tuple[int, ...] = ()
    """The first arguments of every program."""
    hooked: bool = False
    """There are hooks of all modules."""
    programs: dict[Any, LayerPrograms] = field(default_factory=dict)

    @staticmethod
    def of(layer: Any, sequences: Sequences) -> _Call:
        watch = sequences.shared.get(Watch)
        if (
            watch is None
            or not layer.stoker_settings.fuse
            or os.environ.get(SWITCH) == "0"
            or torch.compiler.is_compiling()
            or torch._C._len_torch_dispatch_stack()
            or torch._C._are_functorch_transforms_active()
            or forward_ad._current_level >= 0
        ):
            return _Call()
        starts = sequences.starts
        return _Call(
            watch=watch,
            thread=threading.get_ident(),
            key=(native.threads(), os.environ.get("STOKER_LINEAR_ENGINE"), -(-sequences.longest // key_chunk())),
            numbers=(starts.data_ptr(), starts.numel() - 1),
            hooked=bool(_has_any_global_hook()),  # type: ignore[no-untyped-call]
        )


# --- What a layer consists of


@dataclass
class _Plan:
    """One layer as it was when it was read. It holds as long as the watch of its model does."""

    dtype: torch.dtype
    """Of the activations."""
    extra: tuple[str, ...]
    """The names of the arguments that the layer was called with."""
    direct: bool = False
    """The layer has no hooks, and its activations are kept."""
    signature: int = -1
    """The same number for all layers that are built alike; -1: the layer cannot be written down."""
    tensors: list[Tensor] = field(default_factory=list)
    """In the order in which the programs name them."""
    span: int = 0
    """Half the number of relative positions; 0: the layer has none."""


_signatures: dict[Any, int] = {}
"""Cache: a number for each way in which a layer was built."""
_MOST_SIGNATURES = 4096
_numbers = itertools.count()


def _read(layer: Any, hidden: Tensor, sequences: Sequences, extra: dict[str, Any]) -> _Plan:
    direct = unhooked(layer) and not getattr(layer, "gradient_checkpointing", False)
    plan = _Plan(hidden.dtype, tuple(extra), direct)
    if layer._forward_pre_hooks:  # sharding puts other parameters in place before each call
        return plan
    writer = ProgramWriter(layer, hidden)
    try:
        writer.write(sequences, extra)
    except Unsupported:
        return plan
    signature = (layer.stoker_row.name, hidden.dtype, *writer.signature)
    if len(_signatures) > _MOST_SIGNATURES:  # a rate or a scaling that changes with every step
        _signatures.clear()
    plan.signature = _signatures.setdefault(signature, next(_numbers))
    plan.tensors, plan.span = writer.tensors, writer.span
    return plan


# --- Programs


class _Local(threading.local):
    """Programs are described in memory of their own and one thread at a time may run one: each thread has its own."""

    def __init__(self) -> None:
        self.programs: OrderedDict[Any, LayerPrograms] = OrderedDict()
        self.workspace = Workspace()


_local = _Local()


def _programs_of(key: Any, layer: Any, hidden: Tensor, sequences: Sequences, extra: dict[str, Any]) -> LayerPrograms:
    kept = _local.programs
    found = kept.get(key)
    if found is None:
        found = kept[key] = ProgramWriter(layer, hidden).write(sequences, extra)
        if len(kept) > _KEPT:
            kept.popitem(last=False)
    else:
        kept.move_to_end(key)
    return found


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, programs: LayerPrograms, numbers: list[int], alive: Any, x: Tensor, *tensors: Tensor
    ) -> Tensor:
        y = torch.empty_like(x) if programs.rows == x.shape[1] else x.new_empty(1, programs.rows, x.shape[2])
        saved = torch.empty(programs.saved, dtype=torch.uint8)
        program, used = programs.forward, _used(programs, tensors)
        program.run(
            _local.workspace.address(program.workspace), x.data_ptr(), y.data_ptr(), saved.data_ptr(), *numbers,
            *_addresses(used),
        )  # fmt: skip
        if programs.backward is not None:
            ctx.programs, ctx.numbers, ctx.alive = programs, numbers, alive
            ctx.save_for_backward(x, saved, *tensors)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        if not torch.is_grad_enabled():
            return _gradients(ctx, dy)
        with torch.no_grad():  # recorded only if a second derivative may follow
            found = _gradients(ctx, dy)
        return without_derivative("layer", found, [dy, *ctx.saved_tensors])


# Without what Function.apply does for the tensors of torch.func, of which there are none here.
_apply: Callable[..., Any] = super(torch.autograd.Function, _Layer).apply


def _gradients(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, saved, *tensors = ctx.saved_tensors
    programs: LayerPrograms = ctx.programs
    program, used = programs.backward, _used(programs, tensors)
    assert program is not None
    if list(map(_bytes, tensors)) != programs.bytes:
        raise RuntimeError("a parameter was replaced by one of another size or type between forward and backward")
    dy = dy.contiguous()
    dx = torch.empty_like(x) if programs.input_gradient else None
    like = torch.empty_like  # in half the time of empty
    gradients = [like(tensor) if trained else None for tensor, trained in zip(tensors, programs.trained, strict=True)]
    for number in programs.transposed:
        if programs.trained[number]:
            gradients[number] = torch.empty(tensors[number].shape[::-1], dtype=tensors[number].dtype)
    program.run(
        _local.workspace.address(program.workspace), x.data_ptr(), dy.data_ptr(), saved.data_ptr(), *ctx.numbers,
        *_addresses(used), 0 if dx is None else dx.data_ptr(),
        *[0 if one is None else one.data_ptr() for one in gradients],
    )  # fmt: skip
    for number in programs.transposed:
        if (gradient := gradients[number]) is not None:
            gradients[number] = gradient.t()
    return None, None, None, dx, *gradients


def _addresses(tensors: Any) -> list[int]:
    found = [one.data_ptr() for one in tensors]
    if 0 in found:
        raise RuntimeError(
            "a parameter of a layer has no memory: it was moved to another device, or its storage was freed"
        )
    return found


def _used(programs: LayerPrograms, tensors: Any) -> Any:
    """The tensors as the kernels read them."""
    if not programs.plus_one:
        return tensors
    return [one.detach() + 1.0 if number in programs.plus_one else one for number, one in enumerate(tensors)]
