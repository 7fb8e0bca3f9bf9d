"""Embedding lookups: plain, and as the sum of word, position and type embeddings with LayerNorm and dropout.

    z = word[ids] + position[positions] + type[types]
    y = dropout(LayerNorm(z))

Saved for backward: the ids, the tables themselves, mean and 1/sqrt(...) of each row, the dropout key; z is looked up again.
The gradient of a table is dense, as torch's is. Each of its rows is the sum over the tokens that used it, in their order
and in chunks of fixed size, so it does not depend on the number of threads. Where a head has the same weights, the rows are
added to the head's gradient (`shares_gradient`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from stoker.kernels import native
from stoker.kernels.dropout import check_probability
from stoker.kernels.registry import check_device, check_tensor, define, draw_key, key_value, plain

__all__ = ["embedding", "embedding_layer_norm_dropout", "shares_gradient"]

_shared: _Shared | None = None
"""The dense gradient that `shares_gradient` has seen last."""


def embedding(ids: Tensor, table: Tensor, padding_idx: int | None = None) -> Tensor:
    """Rows `ids` of `table`; row `padding_idx` gets no gradient."""
    check_device("embedding", ids=ids, table=table)
    result: Tensor = _embedding(ids, table, _skip("embedding", padding_idx, table))
    return result


class _Shared(NamedTuple):
    """A gradient on its way to a table, which waits for that of a lookup."""

    backward_pass: int
    table: weakref.ref[Tensor]
    gradient: TensorWeakRef
    """None once autograd has replaced it, because another gradient was added to it."""


def shares_gradient(result: Tensor, table: Tensor) -> None:
    """Lets a lookup of `table` add its gradient to the dense one that the backward pass of `result` gives the same table.

    `result` is that of a head whose weight is the table. Autograd would allocate a second gradient as large as the table and
    add the two. This applies to `embedding` with a table in fp32.
    """
    node = result.grad_fn
    if node is not None and table.requires_grad:
        places = [at for at, (to, _) in enumerate(node.next_functions) if getattr(to, "variable", None) is table]
        if len(places) == 1:
            node.register_hook(functools.partial(_gradient_arrived, weakref.ref(table), places[0]))


def _gradient_arrived(table: weakref.ref[Tensor], place: int, gradients: Any, _: Any) -> None:
    global _shared
    gradient = gradients[place]
    _shared = None if gradient is None else _Shared(torch._C._current_graph_task_id(), table, TensorWeakRef(gradient))


def _gradient_on_its_way(table: Tensor) -> Tensor | None:
    """The gradient that waits for that of a lookup of this table in the backward pass that is running."""
    shared = _shared  # another thread may replace it
    if shared is None or shared.backward_pass != torch._C._current_graph_task_id():
        return None
    gradient: Tensor | None = shared.gradient()
    owner = shared.table()
    if gradient is None or owner is None or owner.data_ptr() != table.data_ptr():
        return None
    same = gradient.shape == table.shape and gradient.dtype == table.dtype == torch.float32
    return gradient if same and not torch.is_grad_enabled() else None


def embedding_layer_norm_dropout(
    ids: Tensor,
    positions: Tensor | None,
    types: Tensor | None,
    word: Tensor,
    position: Tensor | None,
    type: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float,
    p: float = 0.0,
    training: bool = True,
    padding_idx: int | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """dropout(LayerNorm(word[ids] + position[positions] + type[types])), in `dtype` (that of the tables unless given).

    `positions` and `types` are broadcast to the shape of `ids`. Row `padding_idx` of `word` gets no gradient.
    """
    operator = "embedding_layer_norm_dropout"
    check_probability(operator, p)
    check_device(operator, ids=ids, positions=positions, types=types, word=word, position=position, type=type)
    check_device(operator, weight=weight, bias=bias)
    for name, chosen, table in (("position", positions, position), ("type", types, type)):
        if (chosen is None) != (table is None):
            raise ValueError(f"{operator}: {name}s and {name} go together; only one of the two was given")
    if dtype not in (None, torch.float32, torch.bfloat16):
        raise ValueError(f"{operator}: dtype is {dtype}; it must be float32 or bfloat16")
    positions, types = (None if t is None else t.expand(ids.shape) for t in (positions, types))
    p = p if training else 0.0
    narrow = (dtype or word.dtype) == torch.bfloat16
    skip = _skip(operator, padding_idx, word)
    key = draw_key() if p > 0.0 else None
    arguments = (ids, positions, types, word, position, type, weight, bias, key, p, eps, skip, narrow)
    result: Tensor = _embedding_norm(*arguments)[0]
    return result


def _skip(operator: str, padding_idx: int | None, table: Tensor) -> int:
    """padding_idx as a row number, counted from the end if negative, as torch does; -1 for none."""
    if padding_idx is None:
        return -1
    rows = table.shape[0]
    if not -rows <= padding_idx < rows:
        raise ValueError(f"{operator}: padding_idx is {padding_idx}; the table has {rows} rows")
    return padding_idx % rows


def _check_ids(operator: str, name: str, ids: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    check_tensor(operator, name, ids, shape=shape, dtypes=[torch.int64, torch.int32])
    return ids.to(torch.int64).contiguous()


def _outside(operator: str, name: str, ids: Tensor, token: int, rows: int) -> IndexError:
    value = int(ids.reshape(-1)[token])
    return IndexError(f"{operator}: {name} has {value} at position {token}; the table has {rows} rows")


def _call(ids: Tensor, like: Tensor, **fields: Any) -> Any:
    """The call struct for a table of the shape and type of `like`."""
    rows, columns = like.shape
    return native.fill(
        "stoker_embedding_call", ids=ids, tokens=ids.numel(), rows=rows, columns=columns,
        table_dtype=native.dtype_code(like.dtype), **fields,
    )  # fmt: skip


def _scatter(dz: Tensor, ids: Tensor, table: Tensor, skip: int) -> Tensor:
    """The gradient of `table`, given that of the rows looked up."""
    grad = torch.empty_like(table, memory_format=torch.contiguous_format)
    call = _call(ids, table, dy=dz, dtable=grad, skip=skip, dtype=native.dtype_code(dz.dtype))
    native.call("stoker_embedding_scatter", call)
    return grad


# --- plain lookup


def _kernel(ids: Tensor, table: Tensor, skip: int) -> Tensor:
    check_tensor("embedding", "table", table, shape=[None, None])
    ids, table = _check_ids("embedding", "ids", ids), table.contiguous()
    y = _fake(ids, table, skip)
    call = _call(ids, table, table=table, y=y)
    try:
        native.call("stoker_embedding_lookup", call)
    except IndexError:
        raise _outside("embedding", "ids", ids, call.bad_token, table.shape[0]) from None
    return y


def _fake(ids: Tensor, table: Tensor, skip: int) -> Tensor:
    return table.new_empty((*ids.shape, table.shape[1]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ids, table, ctx.skip = inputs
    ctx.save_for_backward(ids, table)


def _backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor | None, None]:
    ids, table = ctx.saved_tensors
    if plain((dy, ids, table)) and (gradient := _gradient_on_its_way(table)) is not None:
        _add_rows(gradient, dy, ids, ctx.skip)
        return None, None, None
    return None, _embedding_backward(dy, ids, table, ctx.skip), None


def _add_rows(gradient: Tensor, dy: Tensor, ids: Tensor, skip: int) -> None:
    ids, rows = ids.reshape(-1).to(torch.int64), dy.reshape(-1, gradient.shape[1]).to(gradient.dtype)
    if skip >= 0:
        kept = (ids != skip).nonzero().squeeze(1)
        ids, rows = ids.index_select(0, kept), rows.index_select(0, kept)
    gradient.index_add_(0, ids, rows)


def _backward_kernel(dy: Tensor, ids: Tensor, table: Tensor, skip: int) -> Tensor:
    return _scatter(dy.contiguous(), ids.to(torch.int64).contiguous(), table, skip)


def _backward_fake(dy: Tensor, ids: Tensor, table: Tensor, skip: int) -> Tensor:
    return torch.empty_like(table, memory_format=torch.contiguous_format)


_embedding_backward = define(
    "embedding_backward(Tensor dy, Tensor ids, Tensor table, int skip) -> Tensor", _backward_kernel, _backward_fake
)
_embedding = define(
    "embedding(Tensor ids, Tensor table, int skip) -> Tensor",
    _kernel,
    _fake,
    backward=_backward,
    setup_context=_setup_context,
)


# --- sum of lookups, LayerNorm, dropout

_NAMES = ("ids", "positions", "types")


class _Inputs(NamedTuple):
    """The tensors that forward and backward share, as they follow each other in both schemas."""

    lookups: tuple[Tensor, Tensor | None, Tensor | None]
    """ids, positions, types."""
    tables: tuple[Tensor, Tensor | None, Tensor | None]
    """word, position, type."""
    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, tensors: Sequence[Any]) -> _Inputs:
        ids, positions, types, word, position, type, weight, bias = tensors
        return cls((ids, positions, types), (word, position, type), weight, bias)


def _norm_kernel(*arguments: Any) -> tuple[Tensor, Tensor]:
    operator = "embedding_layer_norm_dropout"
    *tensors, key, p, eps, _, narrow = arguments
    (ids, positions, types), (word, position, type), weight, bias = _Inputs.of(tensors)
    check_tensor(operator, "word", word, shape=[None, None])
    columns = word.shape[1]
    if not columns:
        raise ValueError(f"{operator}: word has shape {tuple(word.shape)}; its rows must not be empty")
    for name, table in (("position", position), ("type", type)):
        if table is not None:
            check_tensor(operator, name, table, shape=[None, columns], dtypes=[word.dtype])
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            check_tensor(operator, name, parameter, shape=[columns])
    lookups = [
        None if chosen is None else _check_ids(operator, name, chosen, ids.shape)
        for name, chosen in zip(_NAMES, (ids, positions, types), strict=True)
    ]
    tables = [None if table is None else table.contiguous() for table in (word, position, type)]
    weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
    y, stats = _norm_fake(ids, positions, types, word, narrow)
    sizes = tuple(0 if table is None else table.shape[0] for table in tables)
    call = _norm_call(
        lookups, tables, weight, bias, key, y.dtype, table_rows=sizes, bias=bias, y=y, stats=stats, p=p, eps=eps
    )
    try:
        native.call("stoker_embedding_norm_forward", call)
    except IndexError:
        wrong = lookups[call.bad_table]
        assert wrong is not None
        raise _outside(operator, _NAMES[call.bad_table], wrong, call.bad_token, sizes[call.bad_table]) from None
    return y, stats


def _norm_call(
    lookups: list[Tensor | None], tables: list[Tensor | None], weight: Tensor, bias_like: Tensor | None,
    key: Tensor | None, dtype: torch.dtype, **fields: Any,
) -> Any:  # fmt: skip
    """The call struct; the backward pass needs only the type of the bias."""
    ids, word = lookups[0], tables[0]
    assert ids is not None
    assert word is not None
    return native.fill(
        "stoker_embedding_norm_call", ids=tuple(map(native.pointer, lookups)), tables=tuple(map(native.pointer, tables)),
        weight=weight, tokens=ids.numel(), columns=word.shape[1], key=key_value(key), dtype=native.dtype_code(dtype),
        table_dtype=native.dtype_code(word.dtype), weight_dtype=native.parameter(weight),
        bias_dtype=native.parameter(bias_like), **fields,
    )  # fmt: skip


def _norm_fake(ids: Tensor, positions: Any, types: Any, word: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    narrow = rest[-1]
    y = word.new_empty((*ids.shape, word.shape[1]), dtype=torch.bfloat16 if narrow else torch.float32)
    return y, word.new_empty((2, ids.numel()), dtype=torch.float32)


def _norm_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ids, positions, types, word, position, type, weight, bias, key, ctx.p, _, ctx.skip, _ = inputs
    _, stats = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(stats)
    ctx.wants = [one is not None and one.requires_grad for one in (word, position, type, weight, bias)]
    ctx.save_for_backward(ids, positions, types, word, position, type, weight, bias, stats, key)


def _norm_backward(ctx: Any, dy: Tensor | None, _: Any) -> tuple[Any, ...]:
    if dy is None:
        return (None,) * 13
    ids, positions, types, word, position, type, weight, bias, stats, key = ctx.saved_tensors
    parameters = _embedding_norm_backward(
        dy, ids, positions, types, word, position, type, weight, bias, stats, key, ctx.p, ctx.skip, ctx.wants
    )
    wanted = (one if wants else None for one, wants in zip(parameters, ctx.wants, strict=True))
    return *(None, None, None), *wanted, *(None,) * 5


def _norm_backward_kernel(dy: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    *tensors, stats, key, p, skip, wants = arguments
    inputs = _Inputs.of(tensors)
    dy, weight, bias = dy.contiguous(), inputs.weight.contiguous(), inputs.bias
    lookups = [None if chosen is None else chosen.to(torch.int64).contiguous() for chosen in inputs.lookups]
    tables = [None if table is None else table.contiguous() for table in inputs.tables]
    dz = torch.empty(dy.shape, dtype=torch.float32)
    dweight, dbias = (
        torch.empty_like(one, memory_format=torch.contiguous_format) if one is not None and wanted else None
        for one, wanted in zip((weight, bias), wants[3:], strict=True)
    )
    call = _norm_call(
        lookups, tables, weight, bias, key, dy.dtype, stats=stats, dy=dy, dz=dz, dweight=dweight, dbias=dbias, p=p
    )  # fmt: skip
    native.call("stoker_embedding_norm_backward", call)
    grads = [
        _scatter(dz, chosen, table, none) if table is not None and chosen is not None and wanted else None
        for chosen, table, none, wanted in zip(lookups, tables, (skip, -1, -1), wants[:3], strict=True)
    ]
    return tuple(dy.new_empty(0) if one is None else one for one in (*grads, dweight, dbias))


def _norm_backward_fake(dy: Tensor, ids: Any, positions: Any, types: Any, *rest: Any) -> tuple[Tensor, ...]:
    # word, position, type, weight, bias
    return tuple(
        torch.empty_like(one, memory_format=torch.contiguous_format) if one is not None and wanted else dy.new_empty(0)
        for one, wanted in zip(rest[:5], rest[-1], strict=True)
    )


_embedding_norm_backward = define(
    "embedding_norm_backward(Tensor dy, Tensor ids, Tensor? positions, Tensor? types, Tensor word, Tensor? position,"
    " Tensor? type, Tensor weight, Tensor? bias, Tensor stats, Tensor? key, float p, int skip,"
    " bool[] wants) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _norm_backward_kernel,
    _norm_backward_fake,
)
_embedding_norm = define(
    "embedding_norm(Tensor ids, Tensor? positions, Tensor? types, Tensor word, Tensor? position, Tensor? type,"
    " Tensor weight, Tensor? bias, Tensor? key, float p, float eps, int skip, bool narrow) -> (Tensor, Tensor)",
    _norm_kernel,
    _norm_fake,
    backward=_norm_backward,
    setup_context=_norm_setup,
)
