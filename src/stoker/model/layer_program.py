"""A whole layer as one autograd node, with one native call per direction.

`ProgramWriter` takes the place of `LayerParts` while `run_layer` runs, and writes the kernels down instead of calling them: those
of the layer, and in reverse those of its gradients. The two programs hold for one number of tokens and for every layer that is
built alike, so a step of twelve layers needs one pair. The results are bit for bit those of the single operators with the same
engines.

The inputs of the node are the rows of the layer, its parameters, and what it is given beside its rows and passes gradients to: a
bias of scores (MPNet), embeddings of relative positions (DeBERTa). The last layer of a classifier has a program of its own, which
goes on with the first row of each sequence after attention.

Linear layers are written with their LoRA adapters, and with frozen weights that are stored in bf16 or in few bits, which are
widened in the workspace just before each product. A layer with a module that has to be called (hooks, DoRA, merged or disabled
adapters) runs by single operators, and so does every layer while somebody looks at the operators (torch.compile, tracing,
dispatch modes, transforms).
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook

from stoker.kernels import native
from stoker.kernels.attention import gradient_parts
from stoker.kernels.program import Buffer, Matrix, Program, Workspace, native_products
from stoker.kernels.quantized import QuantizedWeight
from stoker.kernels.registry import without_derivative
from stoker.kernels.widening import Weight
from stoker.model.adapters import LinearParts
from stoker.model.class_swap import child, plain, unhooked
from stoker.model.families import Family
from stoker.model.layer_parts import (
    LayerParts,
    Layout,
    NormParts,
    relative_positions,
    rotary_halves,
    run_layer,
    score_bias,
)
from stoker.model.leaf_modules import activation_kind
from stoker.model.module_watch import Watch
from stoker.model.sequences import Sequences

__all__ = ["is_called_directly", "run"]

SWITCH = "STOKER_LAYER_PROGRAM"
"""Set to 0 in the environment, layers run by single operators."""
_KEPT = 64  # pairs of programs; batches of a length that comes again find theirs
_UNLIMITED = 2**62
_bytes = attrgetter("nbytes")


class Unsupported(Exception):
    """The layer has a part that a program cannot contain."""


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
    programs: dict[Any, _Programs] = field(default_factory=dict)

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
            key=(native.threads(), os.environ.get("STOKER_LINEAR_ENGINE"), -(-sequences.longest // _key_chunk())),
            numbers=(starts.data_ptr(), starts.numel() - 1),
            hooked=bool(_has_any_global_hook()),  # type: ignore[no-untyped-call]
        )


@functools.cache
def _key_chunk() -> int:
    return int(native.library().stoker_attention_key_chunk())


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


@dataclass
class _Programs:
    """The two directions of a layer."""

    forward: Program
    backward: Program | None
    saved: int
    """Bytes that forward leaves for backward."""
    keys: int
    """How many dropout keys a call needs."""
    trained: list[bool]
    """Which tensors get a gradient: first the parameters, then what the layer gets beside its input."""
    transposed: frozenset[int]
    """Which tensors get the transpose of the gradient that the program computes."""
    plus_one: frozenset[int]
    """Which tensors are used with one added to them."""
    input_gradient: bool
    bytes: list[int]
    """The size of each tensor."""
    rows: int
    """Of the layer's output."""


class _Local(threading.local):
    """Programs are described in memory of their own and one thread at a time may run one: each thread has its own."""

    def __init__(self) -> None:
        self.programs: OrderedDict[Any, _Programs] = OrderedDict()
        self.workspace = Workspace()


_local = _Local()


def _programs_of(key: Any, layer: Any, hidden: Tensor, sequences: Sequences, extra: dict[str, Any]) -> _Programs:
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
    def forward(ctx: Any, programs: _Programs, numbers: list[int], alive: Any, x: Tensor, *tensors: Tensor) -> Tensor:
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
    programs: _Programs = ctx.programs
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


def _used(programs: _Programs, tensors: Any) -> Any:
    """The tensors as the kernels read them."""
    if not programs.plus_one:
        return tensors
    return [one.detach() + 1.0 if number in programs.plus_one else one for number, one in enumerate(tensors)]


@dataclass(frozen=True, eq=False)
class _Adapter:
    """One LoRA adapter of a linear layer, as in kernels/lora.py."""

    owner: int
    """Which of the weights side by side it belongs to."""
    a: Matrix
    b: Matrix
    a_tensor: Tensor
    b_tensor: Tensor
    scaling: float
    p: float
    key: str | None
    first: int
    """Its first column in h."""

    @property
    def rank(self) -> int:
        return self.a.rows

    def columns_of(self, h: Matrix) -> Matrix:
        return h.slice(self.first, self.rank)


@dataclass(frozen=True)
class _Codes:
    """A frozen weight in few bits: the arguments that have its codes and scales."""

    codes: str
    scales: str
    rows: int
    columns: int
    bits: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns


def _whole(weight: Any) -> Any:
    """The parameter that a weight is, or is the transpose of."""
    return weight if weight._base is None else weight._base


class ProgramWriter(LayerParts):
    """Writes what `run_layer` asks for as kernels of two programs. Matrices take the place of tensors."""

    def __init__(self, layer: Any, hidden: Tensor) -> None:
        super().__init__(layer, layer.stoker_row, True)
        _, rows, width = hidden.shape
        self.rows, self.dtype = rows, hidden.dtype
        self.input_gradient = hidden.requires_grad and torch.is_grad_enabled()
        threads = native.threads()
        self.forward, self.backward = Program(threads), Program(threads)
        self.x = Matrix.of_argument("x", rows, width, self.dtype)
        self.tensors: list[Tensor] = []
        self.inputs: list[tuple[Matrix, Tensor]] = []
        self.plus_one: set[int] = set()
        self.transposed: set[int] = set()
        self.signature: list[Any] = []
        self.keys = self.span = 0
        self._head_size = 0
        """Of the heads whose norm is being written; 0: the norm is of whole rows."""
        self._tape: list[Callable[[], None]] = []
        self._gradients: dict[int, list[Matrix]] = {}
        self._needing: dict[int, Matrix] = {}
        self._written: set[str] = set()
        self._repeated: list[tuple[Matrix, Matrix]] = []
        self._split_from: dict[int, tuple[Matrix, int]] = {}
        self._split_into: dict[int, Matrix] = {}
        if self.input_gradient:
            self._needing[id(self.x)] = self.x

    def write(self, sequences: Sequences, extra: dict[str, Any]) -> _Programs:
        y = run_layer(self, self.x, sequences, extra)
        if y.buffer.base is not None or y.row_stride != y.columns:
            raise Unsupported("a layer that returns its input")
        y.buffer.base = "y"
        wanted = torch.is_grad_enabled() and id(y) in self._needing
        if wanted:
            self._gradients[id(y)] = [Matrix.of_argument("dy", y.rows, y.columns, y.dtype)]
            for entry in reversed(self._tape):
                entry()
                self._add_repeated()
            if self.input_gradient:
                self._total(self.x, Matrix.of_argument("dx", self.rows, self.x.columns, self.dtype))
            for number, (value, tensor) in enumerate(self.inputs):
                if tensor.requires_grad:
                    self._total(value, Matrix.of_argument(f"ginput{number}", *value.shape, value.dtype))
        saved = self._saved()
        common = ["starts", "sequences", "cosine", "sine", "distances", "reach"]
        common += [f"key{number}" for number in range(self.keys)]
        names = [f"p{number}" for number in range(len(self.tensors))]
        names += [f"input{number}" for number in range(len(self.inputs))]
        common += names
        size = self.forward.finish(["workspace", "x", "y", "saved", *common], saved)
        self.backward.finish(["workspace", "x", "dy", "saved", *common, "dx", *(f"g{name}" for name in names)])
        trained = [wanted and one.requires_grad for one in (*self.tensors, *(tensor for _, tensor in self.inputs))]
        return _Programs(
            forward=self.forward,
            backward=self.backward if wanted else None,
            saved=size,
            keys=self.keys,
            trained=trained,
            transposed=frozenset(self.transposed),
            plus_one=frozenset(self.plus_one),
            input_gradient=self.input_gradient,
            bytes=[one.nbytes for one in (*self.tensors, *(tensor for _, tensor in self.inputs))],
            rows=y.rows,
        )

    def _saved(self) -> list[Buffer]:
        """Buffers of forward that backward reads."""
        return [buffer for buffer in self.forward.buffers() if buffer.base is None and id(self.backward) in buffer.uses]

    # --- Values and gradients

    def _new(self, rows: int, columns: int) -> Matrix:
        return Matrix.in_workspace(rows, columns, self.dtype)

    def _input(self, tensor: Tensor) -> Matrix:
        """A tensor that the layer is given beside its input, with its last dimension as columns."""
        rows, columns = tensor.numel() // tensor.shape[-1], tensor.shape[-1]
        value = Matrix.of_argument(f"input{len(self.inputs)}", rows, columns, tensor.dtype)
        self.inputs.append((value, tensor))
        if tensor.requires_grad and torch.is_grad_enabled():
            self._needing[id(value)] = value
        return value

    def _parameter(self, tensor: Tensor, plus_one: bool = False) -> str:
        for number, known in enumerate(self.tensors):
            if known is tensor:
                self.signature.append(number)
                return f"p{number}"
        of_kernels = not tensor.is_floating_point() or tensor.dtype in (torch.float32, torch.bfloat16)
        dense = tensor.dim() == 2 or tensor.is_contiguous()  # of matrices the strides are looked at
        if not (of_kernels and dense and tensor.is_cpu and tensor.numel()):
            raise Unsupported("a parameter that the kernels do not read")  # the operators say what is wrong with it
        if plus_one:
            self.plus_one.add(len(self.tensors))
        self.tensors.append(tensor)
        self.signature.append((tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad, plus_one))
        return f"p{len(self.tensors) - 1}"

    @staticmethod
    def _check_size(columns: int, *vectors: Tensor | None) -> None:
        if any(one is not None and one.shape != (columns,) for one in vectors):
            raise Unsupported("a bias or a weight of another size")

    def _weight(self, weight: Tensor) -> Matrix:
        """A weight (out, in), or the transpose of a parameter (in, out), as transformers' Conv1D has it."""
        parameter = _whole(weight)
        name = self._parameter(parameter)
        dense = parameter.is_contiguous() or (not parameter.requires_grad and parameter.t().is_contiguous())
        if not dense or weight.dim() != 2 or weight.shape not in (parameter.shape, parameter.shape[::-1]):
            raise Unsupported("a weight that is not dense")
        if parameter is not weight:
            self.transposed.add(int(name[1:]))
        rows, columns = weight.shape
        return Matrix.of_argument(name, rows, columns, weight.dtype, weight.stride())

    def _gradient_of(self, tensor: Tensor | None, shape: tuple[int, int] | None = None) -> Matrix | None:
        """Where to write the gradient of a parameter; None if it is frozen, or there is none.

        If a kernel has written one already, the next goes to the workspace, and `_add_repeated` adds it to the first.
        """
        if tensor is None or not tensor.requires_grad:
            return None
        name = f"g{self._parameter(tensor)}"
        rows, columns = shape or (1, tensor.numel())
        whole = Matrix.of_argument(name, rows, columns, tensor.dtype)
        if name not in self._written:
            self._written.add(name)
            return whole
        more = Matrix.in_workspace(rows, columns, tensor.dtype)
        self._repeated.append((whole, more))
        return more

    def _add_repeated(self) -> None:
        for whole, more in self._repeated:
            self._add_rows(self.backward, whole, more, whole)
        self._repeated.clear()

    def _key(self, p: float) -> str | None:
        if p <= 0.0:
            return None
        self.keys += 1
        return f"key{self.keys - 1}"

    def _note(self, result: Matrix, needs: bool, entry: Callable[[], None]) -> Matrix:
        """Puts the gradient of an operator on the tape, if one is needed."""
        if needs and torch.is_grad_enabled():
            self._needing[id(result)] = result
            self._tape.append(entry)
        return result

    def _needs(self, *values: Matrix | Tensor | None) -> bool:
        return any(
            value.requires_grad if isinstance(value, Tensor) else id(value) in self._needing
            for value in values
            if value is not None
        )

    def _give(self, value: Matrix | None, gradient: Matrix) -> None:
        if value is not None and id(value) in self._needing:
            self._gradients.setdefault(id(value), []).append(gradient)

    def _total(self, value: Matrix, to: Matrix | None = None) -> Matrix | None:
        """The gradient of a value: the sum of those that its users gave, in `to` if that is given."""
        found = self._gradients.pop(id(value), [])
        if not found:
            return None
        if to is None and len(found) == 1:
            return found[0]
        total = found[0]
        for place, more in enumerate(found[1:], 2):
            last = place == len(found) and to is not None
            result = to if last and to is not None else Matrix.in_workspace(value.rows, value.columns, value.dtype)
            self._add_rows(self.backward, total, more, result)
            total = result
        if to is not None and len(found) == 1:
            self._copy(self.backward, total, to)
            return to
        return total

    def _add_rows(self, program: Program, x: Matrix, y: Matrix, z: Matrix) -> None:
        program.call(
            "stoker_add_rows", x=x, y=y, z=z, x_stride=x.row_stride, y_stride=y.row_stride, z_stride=z.row_stride, rows=z.rows,
            columns=z.columns, dtype=native.dtype_code(x.dtype), y_dtype=native.dtype_code(y.dtype),
        )  # fmt: skip

    def _copy(self, program: Program, y: Matrix, z: Matrix) -> None:
        program.call(
            "stoker_add_rows", y=y, z=z, y_stride=y.row_stride, z_stride=z.row_stride, rows=z.rows, columns=z.columns,
            dtype=native.dtype_code(z.dtype), y_dtype=native.dtype_code(y.dtype),
        )  # fmt: skip

    # --- The operators of LayerParts

    def call(self, module: nn.Module, x: Any) -> Any:
        if plain(module, nn.Identity):
            return x
        raise Unsupported(f"{type(module).__name__} has to be called")

    def add_bias(self, x: Any, bias: Tensor) -> Any:
        raise Unsupported("a bias before a module that has to be called")

    def still_needed(self, sequences: Sequences, *rows: Any) -> tuple[Any, ...]:
        if sequences.first_from is not self.layer:
            return rows
        return tuple(self._firsts(x, sequences.starts.numel() - 1) for x in rows)

    def _firsts(self, x: Matrix, count: int) -> Matrix:
        """The first row of each sequence."""
        y = self._new(count, x.columns)
        common: dict[str, Any] = {
            "ids": "starts", "tokens": count, "rows": x.rows, "columns": x.columns, "dtype": native.dtype_code(x.dtype),
            "table_dtype": native.dtype_code(x.dtype),
        }  # fmt: skip
        self.forward.call("stoker_embedding_lookup", table=x, y=y, **common)

        def entry() -> None:
            if (dy := self._total(y)) is not None:
                dx = self._new(x.rows, x.columns)
                self.backward.call("stoker_embedding_scatter", dy=dy, dtable=dx, skip=-1, **common)
                self._give(x, dx)

        return self._note(y, self._needs(x), entry)

    def convert(self, x: Any, dtype: torch.dtype) -> Any:
        if x.dtype == dtype:
            return x
        y = Matrix.in_workspace(x.rows, x.columns, dtype)
        self._copy(self.forward, x, y)

        def entry() -> None:
            if (dy := self._total(y)) is not None:
                dx = Matrix.in_workspace(x.rows, x.columns, x.dtype)
                self._copy(self.backward, dy, dx)
                self._give(x, dx)

        return self._note(y, self._needs(x), entry)

    def linear(self, paths: tuple[str, ...], x: Any, read: list[LinearParts], biases: list[Tensor]) -> Any:
        """As `lora_linear_packed`, whose products it writes in the same order."""
        weights = [self._stored(parts.weight) for parts in read]
        groups = self._adapter_groups(read)
        adapters = [one for group in groups for one in group]
        self.signature.append(("linear", len(biases), tuple(weight.shape for weight in weights)))
        self.signature += [(one.owner, one.scaling, one.p) for one in adapters]
        y = Matrix.in_workspace(x.rows, sum(weight.rows for weight in weights), x.dtype)
        h = Matrix.in_workspace(x.rows, sum(one.rank for one in adapters), x.dtype)
        for group in groups:
            self._write_inner(x, group, h)
        column = 0
        for place, weight in enumerate(weights):
            engine = native_products("nt", x.rows, weight.rows, x.columns, x.dtype)
            bias = biases[place] if biases else None
            self._check_size(weight.rows, bias)
            terms = [(x, self._widened(self.forward, weight, engine).t())]
            terms += [
                (one.columns_of(h), self._widened(self.forward, one.b, engine).t())
                for one in adapters
                if one.owner == place
            ]
            self.forward.multiply(
                terms, y.slice(column, weight.rows), engine, None if bias is None else self._parameter(bias),
                torch.float32 if bias is None else bias.dtype,
            )  # fmt: skip
            column += weight.rows
        tensors = [None if isinstance(parts.weight, QuantizedWeight) else _whole(parts.weight) for parts in read]
        trained = [*tensors, *biases, *(tensor for one in adapters for tensor in (one.a_tensor, one.b_tensor))]

        def entry() -> None:
            if (dy := self._total(y)) is not None:
                widths = [weight.rows for weight in weights]
                parts = [dy.slice(sum(widths[:place]), width) for place, width in enumerate(widths)]
                self._adapter_gradients(x, h, parts, weights, groups)
                self._base_gradients(x, parts, tensors, biases)

        return self._note(y, self._needs(x, *trained), entry)

    def _base_gradients(self, x: Matrix, parts: list[Matrix], tensors: list[Any], biases: list[Tensor]) -> None:
        for part, tensor in zip(parts, tensors, strict=True):
            if (gradient := self._gradient_of(tensor, (part.columns, x.columns))) is not None:
                self._weight_gradient(part, x, gradient)
        for part, bias in zip(parts, biases, strict=False):
            if (sums := self._gradient_of(bias)) is not None:
                self.backward.call(
                    "stoker_column_sums", x=part, sums=sums, row_stride=part.row_stride, rows=part.rows, columns=part.columns,
                    dtype=native.dtype_code(part.dtype), sums_dtype=native.dtype_code(bias.dtype),
                )  # fmt: skip

    def _weight_gradient(self, dy: Matrix, x: Matrix, to: Matrix) -> None:
        engine = native_products("tn", dy.columns, x.columns, x.rows, x.dtype)
        # torch's engine has one type
        result = to if engine != "torch" or to.dtype == x.dtype else Matrix.in_workspace(to.rows, to.columns, x.dtype)
        self.backward.multiply([(dy.t(), x)], result, engine)
        if result is not to:
            self._scale(self.backward, result, to)

    # --- Adapters and stored weights

    def _adapter_groups(self, read: list[LinearParts]) -> list[list[_Adapter]]:
        """The adapters that read the same input: those without dropout together, and each of the others alone."""
        owned = [(place, one) for place, parts in enumerate(read) for one in parts.adapters]
        dropped = [one.p * 65536.0 >= 0.5 for _, one in owned]  # the kernel rounds a smaller probability to zero
        groups: list[list[_Adapter]] = [[]]
        first = 0
        for wanted in (False, True):
            for (owner, one), drops in zip(owned, dropped, strict=True):
                if drops == wanted:
                    a, b = (self._dense(tensor) for tensor in (one.a, one.b))
                    p = one.p if drops else 0.0
                    made = _Adapter(owner, a, b, one.a, one.b, one.scaling, p, self._key(p), first)
                    groups += [[made]] if drops else []
                    groups[0] += [] if drops else [made]
                    first += made.rank
        return [group for group in groups if group]

    def _write_inner(self, x: Matrix, group: list[_Adapter], h: Matrix) -> None:
        """h_a = s_a dropout(x) A_a^T"""
        program, ranks = self.forward, sum(one.rank for one in group)
        engine = native_products("nt", x.rows, ranks, x.columns, x.dtype)
        a = self._one_above_another(program, group, engine)
        self._multiply_inner(program, (self._dropped_out(program, x, group[0]), a.t()), h, group, engine)

    def _adapter_gradients(
        self, x: Matrix, h: Matrix, parts: list[Matrix], weights: list[Any], groups: list[list[_Adapter]]
    ) -> None:
        """The gradients of the adapters, and that of x with what the weights add to it."""
        program = self.backward
        adapters = [one for group in groups for one in group]
        for one in adapters:
            if (gradient := self._gradient_of(one.b_tensor, one.b.shape)) is not None:
                self._weight_gradient(parts[one.owner], one.columns_of(h), gradient)
        dh = Matrix.in_workspace(h.rows, h.columns, h.dtype)
        if self._needs(x, *(one.a_tensor for one in adapters)):
            for one in adapters:
                engine = native_products("nn", h.rows, one.rank, one.b.rows, h.dtype)
                term = parts[one.owner], self._widened(program, one.b, engine)
                self._multiply_inner(program, term, dh, [one], engine)
        for group in groups:
            self._a_gradients(x, dh, [one for one in group if self._needs(one.a_tensor)], group)
        if self._needs(x):
            self._input_gradient(x, dh, parts, weights, groups)

    def _a_gradients(self, x: Matrix, dh: Matrix, wanted: list[_Adapter], group: list[_Adapter]) -> None:
        """dA of some adapters of a group. x is read once for all of them."""
        if not wanted:
            return
        program, ranks = self.backward, sum(one.rank for one in wanted)
        joined = dh.slice(wanted[0].first, ranks)
        # Dense, as the operators have it, where BLAS multiplies by a vector: with AVX-512, MKL rounds a strided one differently.
        if ranks < sum(one.rank for one in group) or (ranks == 1 and dh.columns > 1):
            joined = Matrix.in_workspace(dh.rows, ranks, dh.dtype)
            column = 0
            for one in wanted:
                self._copy(program, one.columns_of(dh), joined.slice(column, one.rank))
                column += one.rank
        source = self._dropped_out(program, x, group[0])
        gradients = [to for one in wanted if (to := self._gradient_of(one.a_tensor, one.a.shape)) is not None]
        if len(wanted) == 1:
            self._weight_gradient(joined, source, gradients[0])
            return
        made = Matrix.in_workspace(ranks, x.columns, gradients[0].dtype)
        self._weight_gradient(joined, source, made)
        row = 0
        for gradient in gradients:
            self._scale(program, made.t().slice(row, gradient.rows).t(), gradient)
            row += gradient.rows

    def _input_gradient(
        self, x: Matrix, dh: Matrix, parts: list[Matrix], weights: list[Any], groups: list[list[_Adapter]]
    ) -> None:
        program = self.backward
        still = [group for group in groups if group[0].key is None]
        lefts = [*parts, *(dh.slice(group[0].first, sum(one.rank for one in group)) for group in still)]
        engine = native_products("nn", x.rows, x.columns, sum(left.columns for left in lefts), x.dtype)
        rights = [self._widened(program, weight, engine) for weight in weights]
        rights += [self._one_above_another(program, group, engine) for group in still]
        dx = Matrix.in_workspace(x.rows, x.columns, x.dtype)
        program.multiply(list(zip(lefts, rights, strict=True)), dx, engine)
        for (one,) in (group for group in groups if group[0].key is not None):
            engine = native_products("nn", x.rows, x.columns, one.rank, x.dtype)
            more = Matrix.in_workspace(x.rows, x.columns, x.dtype)
            program.multiply([(one.columns_of(dh), self._widened(program, one.a, engine))], more, engine)
            self._add_rows(program, dx, self._dropped_out(program, more, one, more), dx)
        self._give(x, dx)

    def _dropped_out(self, program: Program, x: Matrix, adapter: _Adapter, to: Matrix | None = None) -> Matrix:
        """What an adapter reads."""
        if adapter.key is None:
            return x
        z = to or Matrix.in_workspace(x.rows, x.columns, x.dtype)
        program.call(
            "stoker_add_rows", x=x, z=z, x_stride=x.row_stride, z_stride=z.row_stride, rows=x.rows, columns=x.columns,
            key=adapter.key, p=adapter.p, dtype=native.dtype_code(x.dtype),
        )  # fmt: skip
        return z

    def _multiply_inner(
        self, program: Program, term: tuple[Matrix, Matrix], h: Matrix, group: list[_Adapter], engine: str
    ) -> None:
        """Writes the columns of some adapters in h: a product, times their scalings."""
        columns = h.slice(group[0].first, sum(one.rank for one in group))
        # A single column is computed apart, as the operators do: BLAS may round a dense one in another way.
        apart = columns.columns == 1 and h.columns > 1
        product = Matrix.in_workspace(h.rows, 1, h.dtype) if apart else columns
        program.multiply([term], product, engine)
        for scaling, several in itertools.groupby(group, key=lambda one: one.scaling):
            same = list(several)
            to = h.slice(same[0].first, sum(one.rank for one in same))
            if apart or scaling != 1.0:
                self._scale(program, product if apart else to, to, scaling)

    def _scale(self, program: Program, x: Matrix, z: Matrix, factor: float = 1.0) -> None:
        """z = factor * x, in the type of z"""
        program.call(
            "stoker_scale_rows", x=x, z=z, x_stride=x.row_stride, x_column=x.column_stride, z_stride=z.row_stride, rows=x.rows,
            columns=x.columns, factor=factor, dtype=native.dtype_code(x.dtype), z_dtype=native.dtype_code(z.dtype),
        )  # fmt: skip

    def _one_above_another(self, program: Program, group: list[_Adapter], engine: str) -> Matrix:
        """The A of several adapters as one matrix."""
        if len(group) == 1:
            return self._widened(program, group[0].a, engine)
        types = {one.a.dtype for one in group}
        dtype = types.pop() if len(types) == 1 and engine != "torch" else torch.float32
        joined = Matrix.in_workspace(sum(one.rank for one in group), group[0].a.columns, dtype)
        row = 0
        for one in group:
            self._scale(program, one.a, joined.t().slice(row, one.rank).t())
            row += one.rank
        return joined

    def _stored(self, weight: Weight) -> Matrix | _Codes:
        if isinstance(weight, QuantizedWeight):
            if not (weight.codes.is_contiguous() and weight.scales.is_contiguous()):
                raise Unsupported("codes that are not dense")
            return _Codes(self._parameter(weight.codes), self._parameter(weight.scales), *weight.shape, weight.bits)
        return self._dense(weight)

    def _dense(self, weight: Tensor) -> Matrix:
        if type(weight) not in (Tensor, nn.Parameter) or weight.dtype not in (torch.float32, torch.bfloat16):
            raise Unsupported("a weight of another type")
        return self._weight(weight)

    def _widened(self, program: Program, weight: Matrix | _Codes, engine: str) -> Matrix:
        """A weight as an engine takes it, as `widened` has it: torch's needs fp32, Stoker's own widen bf16 as they pack."""
        if isinstance(weight, Matrix) and (engine != "torch" or weight.dtype == torch.float32):
            return weight
        wide = Matrix.in_workspace(weight.rows, weight.columns, torch.float32)
        if isinstance(weight, Matrix):
            self._scale(program, weight, wide)
        else:
            program.call(
                "stoker_dequantize", values=wide, codes=weight.codes, scales=weight.scales, rows=wide.rows, columns=wide.columns,
                bits=weight.bits, dtype=native.dtype_code(wide.dtype),
            )  # fmt: skip
        return wide

    def split(self, x: Any, widths: list[int]) -> Any:
        parts, column = [], 0
        for width in widths:
            part = x.slice(column, width)
            self._split_from[id(part)] = x, column
            parts.append(part)
            column += width
        if self._needs(x):
            self._needing.update((id(part), part) for part in parts)
            self._tape.append(lambda: self._split_gradient(x, parts))
        return tuple(parts)

    def _split_gradient(self, x: Matrix, parts: list[Matrix]) -> None:
        """The gradients of the parts side by side. One that was written there already stays where it is."""
        dx = self._side_by_side(x)
        for part in parts:
            found = self._total(part)
            if found is not None and found.buffer is not dx.buffer:
                self._copy(self.backward, found, dx.slice(self._split_from[id(part)][1], part.columns))
        self._give(x, dx)

    def _side_by_side(self, x: Matrix) -> Matrix:
        if id(x) not in self._split_into:
            self._split_into[id(x)] = self._new(x.rows, x.columns)
        return self._split_into[id(x)]

    def fused_norm(self, weights: NormParts, x: Any, residual: Any, bias: Tensor | None, p: float, sum: bool) -> Any:
        p = 0.0 if p * 65536.0 < 0.5 else p
        rms = self.row.norm != "layer"
        columns = weights.weight.shape[0] if weights.weight.shape == (self._head_size,) else x.columns
        self._check_size(columns, weights.weight, weights.bias)
        self._check_size(x.columns, bias)
        rows = x.rows * x.columns // columns
        self.signature.append(("norm", columns, p, weights.eps, rms, sum, bias is None, residual is None))
        if x.row_stride != x.columns:
            dense = Matrix.in_workspace(x.rows, x.columns, x.dtype)
            self._copy(self.forward, x, dense)
            source, x = x, self._note(dense, self._needs(x), lambda: self._pass_on(dense, source))
        y, z = self._new(x.rows, x.columns), self._new(x.rows, x.columns) if sum else None
        stats = Matrix.in_workspace(2, rows, torch.float32)
        key = self._key(p)
        weight = self._parameter(weights.weight, weights.plus_one)
        common: dict[str, Any] = {
            "x_bias": None if bias is None else self._parameter(bias), "weight": weight, "stats": stats, "rows": rows,
            "columns": columns, "key": key, "p": p, "rms": int(rms), "dtype": native.dtype_code(x.dtype),
            "x_bias_dtype": native.parameter(bias), "weight_dtype": native.parameter(weights.weight),
            "bias_dtype": native.parameter(weights.bias), "eps": weights.eps,
        }  # fmt: skip
        self.forward.call(
            "stoker_layer_norm_forward", x=x, residual=residual, y=y, z=z,
            bias=None if weights.bias is None else self._parameter(weights.bias), **common,
        )  # fmt: skip
        needs = self._needs(x, residual, weights.weight, weights.bias, bias)

        def entry() -> None:
            dy, dz = self._total(y), None if z is None else self._total(z)
            if dy is None:
                raise Unsupported("a norm whose result nobody reads")
            dsum = self._new(x.rows, x.columns) if key is None or residual is not None else None
            dx = self._new(x.rows, x.columns) if key is not None else None
            self.backward.call(
                "stoker_layer_norm_backward", x=None if sum else x, residual=None if sum else residual, z=z, dy=dy, dz=dz, dx=dx,
                dresidual=dsum, dweight=self._gradient_of(weights.weight), dbias=self._gradient_of(weights.bias),
                dx_bias=self._gradient_of(bias), **common,
            )  # fmt: skip
            for value, gradient in ((x, dx if key is not None else dsum), (residual, dsum)):
                if gradient is not None:
                    self._give(value, gradient)

        self._note(y, needs, entry)
        if z is not None and needs:
            self._needing[id(z)] = z
        return (y, z) if sum else y

    def norm_heads(self, path: str, x: Any, size: int) -> Any:
        self._head_size = size
        try:
            return self.norm(path, x)
        finally:
            self._head_size = 0

    def _pass_on(self, result: Matrix, source: Matrix) -> None:
        if (gradient := self._total(result)) is not None:
            self._give(source, gradient)

    def activate(self, module: Any, x: Any, bias: Tensor | None, gated: bool) -> Any:
        kind = activation_kind(module)
        if kind is None:
            raise Unsupported("an activation that has to be called")
        columns = x.columns // 2 if gated else x.columns
        y = self._new(x.rows, columns)
        self.signature.append(("activation", kind, gated, bias is None))
        gate, up = (x.slice(0, columns), x.slice(columns, columns)) if gated else (x, None)
        if bias is not None and gated:
            raise Unsupported("a gated activation with a bias")
        self._check_size(columns, bias)
        common: dict[str, Any] = {
            "x": gate, "up": up, "x_bias": None if bias is None else self._parameter(bias), "x_stride": x.row_stride,
            "up_stride": x.row_stride if gated else 0, "rows": x.rows, "columns": columns,
            "kind": native.constants("stoker_activation")[kind.upper()], "gated": int(gated),
            "dtype": native.dtype_code(x.dtype), "bias_dtype": native.parameter(bias),
        }  # fmt: skip
        self.forward.call("stoker_activation_forward", y=y, **common)

        def entry() -> None:
            dy = self._total(y)
            if dy is None:
                return
            dx = self._new(x.rows, x.columns)
            self.backward.call(
                "stoker_activation_backward", dy=dy, dx=dx.slice(0, columns), dup=dx.slice(columns, columns) if gated else None,
                dx_stride=x.columns, dup_stride=x.columns if gated else 0, dx_bias=self._gradient_of(bias), **common,
            )  # fmt: skip
            self._give(x, dx)

        return self._note(y, self._needs(x, bias), entry)

    def drop(self, x: Any, p: float) -> Any:
        self.signature.append(("dropout", p))
        y = self._new(x.rows, x.columns)
        key = self._key(p)
        common: dict[str, Any] = {
            "rows": x.rows, "columns": x.columns, "key": key, "p": p, "dtype": native.dtype_code(x.dtype),
            "z_stride": x.columns,
        }  # fmt: skip
        self.forward.call("stoker_add_rows", x=x, z=y, x_stride=x.row_stride, **common)

        def entry() -> None:
            if (dy := self._total(y)) is not None:
                dx = self._new(x.rows, x.columns)
                self.backward.call("stoker_add_rows", x=dy, z=dx, x_stride=dy.row_stride, **common)
                self._give(x, dx)

        return self._note(y, self._needs(x), entry)

    def plus(self, x: Any, y: Any) -> Any:
        self.signature.append("plus")
        z = self._new(x.rows, x.columns)
        self._add_rows(self.forward, x, y, z)

        def entry() -> None:
            if (dz := self._total(z)) is not None:
                self._give(x, dz)
                self._give(y, dz)

        return self._note(z, self._needs(x, y), entry)

    # --- Attention

    def attend_packed(
        self, qkv: Any, sequences: Sequences, heads: int, kv_heads: int, *, layout: Layout, **options: Any
    ) -> Any:
        size = qkv.columns // (heads + 2 * kv_heads)
        if layout == "heads":
            views = [(qkv.slice(place * size, 1), 3 * size) for place in range(3)]
        else:
            views = [(qkv.slice(first * size, 1), size) for first in (0, heads, heads + kv_heads)]

        def gradients() -> list[Matrix]:
            dqkv = self._new(qkv.rows, qkv.columns)
            self._give(qkv, dqkv)
            return [dqkv.slice(view.start - qkv.start, 1) for view, _ in views]

        return self._attention(
            [view for view, _ in views], [stride for _, stride in views], heads, kv_heads, size, options,
            self._needs(qkv), gradients, sequences,
        )  # fmt: skip

    def attend(self, q: Any, k: Any, v: Any, sequences: Sequences, size: int, **options: Any) -> Any:
        qkv, first = self._split_from[id(v)]

        def gradients() -> list[Matrix]:
            dq, dk = self._new(q.rows, q.columns), self._new(k.rows, k.columns)
            dv = self._side_by_side(qkv).slice(first, v.columns)  # its strides must be those of v
            self._give(q, dq)
            self._give(k, dk)
            self._give(v, dv)
            return [dq, dk, dv]

        return self._attention(
            [q, k, v], [size] * 3, q.columns // size, k.columns // size, size, options, self._needs(q, k, v), gradients,
            sequences,
        )  # fmt: skip

    def _attention(
        self, matrices: list[Matrix], head_strides: list[int], heads: int, kv_heads: int, size: int, options: dict[str, Any],
        needs: bool, gradients: Callable[[], list[Matrix]], sequences: Sequences,
    ) -> Matrix:  # fmt: skip
        p, window, rotary, scale, softcap = (options[n] for n in ("dropout_p", "window", "rotary", "scale", "softcap"))
        left, right = (_UNLIMITED if side < 0 else side for side in (window or (-1, -1)))
        tokens = matrices[0].rows
        out = self._new(tokens, heads * size)
        lse = Matrix.in_workspace(tokens, heads, torch.float32)
        key = self._key(p)
        numbers: dict[str, Any] = {
            "heads": heads, "kv_heads": kv_heads, "head_size": size, "left": left, "right": 0 if options["causal"] else right,
            "scale": 1.0 / math.sqrt(size) if scale is None else float(scale), "softcap": float(softcap or 0.0), "p": p,
            "rotary_half": 0 if rotary is None else rotary[0].shape[1], "dtype": native.dtype_code(self.dtype),
        }  # fmt: skip
        self.signature.append(("attention", tuple(sorted(numbers.items())), tuple(head_strides), len(matrices)))
        strides: dict[str, Any] = {}
        for name, matrix, head in zip("qkv", matrices, head_strides, strict=True):
            strides |= {name: matrix, f"{name}_token": matrix.row_stride, f"{name}_head": head}
        common: dict[str, Any] = {
            **numbers, **strides, "out": out, "lse": lse, "starts": "starts", "key_starts": "starts", "sequences": "sequences",
            "key": key, "cosine": None if rotary is None else "cosine", "sine": None if rotary is None else "sine",
        }  # fmt: skip
        trained = self._score_terms(options, heads, common)
        self.forward.call("stoker_attention_forward", **common)

        def entry() -> None:
            dout = self._total(out)
            if dout is None:
                return
            if dout.row_stride != dout.columns:
                raise Unsupported("a gradient that is not dense")
            dq, dk, dv = gradients()
            groups = gradient_parts(sequences.starts.numel() - 1)
            parts = {
                f"d{name}": Matrix.in_workspace(groups * value.rows, value.columns, torch.float32)
                for name, value in trained.items()
                if self._needs(value)
            }
            chunks = -(-sequences.longest // _key_chunk())
            dq_parts = Matrix.in_workspace(chunks * tokens, heads * size, torch.float32) if chunks > 1 else None
            self.backward.call(
                "stoker_attention_backward", dout=dout, dq=dq, dk=dk, dv=dv, dq_parts=dq_parts, groups=groups, **parts, **common
            )  # fmt: skip
            for name, value in trained.items():
                if self._needs(value):  # the first part is the sum of all
                    self._give(value, replace(parts[f"d{name}"], rows=value.rows))

        return self._note(out, needs or self._needs(*trained.values()), entry)

    def _score_terms(self, options: dict[str, Any], heads: int, call: dict[str, Any]) -> dict[str, Matrix]:
        """Adds the bias of scores and the tables of relative positions to an attention call; returns them by their fields."""
        bias, (position_q, position_k, _) = options["bias"], options["relative"] or (None, None, None)
        given = {"bias": bias, "position_q": position_q, "position_k": position_k}
        found: dict[str, Matrix] = {name: value for name, value in given.items() if value is not None}
        self.signature.append(tuple(found))
        call |= found
        if bias is not None:
            call |= {"bias_rows": bias.rows // heads, "bias_columns": bias.columns}
        for name in ("position_q", "position_k"):
            if name in found:
                call |= {f"{name}_row": found[name].row_stride, "position_rows": found[name].rows}
                call |= {"distance_rows": "distances", "reach": "reach"}
        return found

    def score_bias(self, sequences: Sequences, extra: dict[str, Any]) -> Any:
        bias = super().score_bias(sequences, extra)
        return None if bias is None else self._input(bias)

    def positions(self, sequences: Sequences, extra: dict[str, Any]) -> Any:
        found = super().positions(sequences, extra)
        if found is None or self.row.relative is None:
            return None
        self.span = child(self.layer, self.row.relative.span)
        return self._input(found[0]), found[1]
