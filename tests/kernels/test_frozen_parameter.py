"""A stored parameter has the values of its form for whoever reads it, and becomes an ordinary one for whoever writes to it."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load, save
from torch import nn
from transformers.pytorch_utils import Conv1D

from stoker.kernels.frozen_parameter import (
    FORMS,
    FrozenWeight,
    Stored,
    store,
    stored_bytes,
    stored_values,
    why_not,
    widen,
)
from stoker.kernels.quantized import dequantize, quantize

each_form = pytest.mark.parametrize("form", FORMS)


def layer_of(form: str, kind: type[nn.Module] = nn.Linear) -> tuple[nn.Module, torch.Tensor]:
    """A linear layer (48 to 32) whose weight is stored, and the values of that weight in fp32."""
    torch.manual_seed(0)
    layer = nn.Linear(48, 32) if kind is nn.Linear else Conv1D(32, 48)
    layer.requires_grad_(False)
    weight = layer.weight.detach().clone()
    store(layer.weight, form, transposed=kind is Conv1D)
    matrix = weight.t() if kind is Conv1D else weight
    values = (
        matrix.bfloat16().float() if form == "bfloat16" else dequantize(quantize(matrix, 8 if form == "int8" else 4))
    )
    return layer, values.t().contiguous() if kind is Conv1D else values


def is_ordinary(layer: nn.Module) -> bool:
    return type(layer.weight) is nn.Parameter and not vars(layer.weight)


@each_form
def test_it_looks_like_the_parameter_that_it_was(form: str) -> None:
    layer, _ = layer_of(form)
    weight = layer.weight
    assert isinstance(weight, FrozenWeight)
    assert isinstance(weight, nn.Parameter)
    assert weight is dict(layer.named_parameters())["weight"]
    assert (weight.shape, weight.dtype, weight.device.type) == ((32, 48), torch.float32, "cpu")
    assert (weight.numel(), weight.dim(), len(weight), weight.requires_grad) == (1536, 2, 32, False)
    assert weight.is_contiguous()
    assert weight.is_leaf
    assert form in repr(weight)
    bytes_ = {"bfloat16": 2 * 1536, "int8": 1536 + 4 * 32, "nf4": 1536 // 2 + 4 * 1536 // 64}
    assert stored_bytes(weight) == bytes_[form]
    assert weight.untyped_storage().nbytes() == 4, "there is no full-precision copy"


@each_form
def test_every_function_reads_its_values(form: str) -> None:
    layer, values = layer_of(form)
    weight = layer.weight
    assert torch.equal(weight + 0, values)
    assert torch.equal(weight.data.clone(), values)
    assert torch.equal(weight.detach()[3:5], values[3:5])
    assert torch.equal(torch.cat([weight, weight.t().t()]), torch.cat([values, values]))
    assert torch.equal(weight.T, values.T)
    assert weight.tolist() == values.tolist()
    assert (weight.numpy() == values.numpy()).all()
    assert isinstance(layer.weight, FrozenWeight)


@each_form
@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
@pytest.mark.parametrize("autocast", [False, True])
def test_stock_layers_compute_with_it_and_keep_nothing_widened(
    form: str, kind: type[nn.Module], autocast: bool
) -> None:
    layer, values = layer_of(form, kind)
    x = torch.randn(2, 7, 48).requires_grad_()
    kept: list[int] = []
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):
            y = layer(x)
        y.sum().backward()
    matrix = values if kind is Conv1D else values.t()
    tolerance = {"rtol": 0.03, "atol": 0.03} if autocast else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(y.float(), x @ matrix + layer.bias, **tolerance)
    torch.testing.assert_close(x.grad, matrix.sum(1).expand(2, 7, 48), **tolerance)
    assert sum(kept) <= stored_bytes(layer.weight)
    with torch.inference_mode():
        torch.testing.assert_close(layer(x).float(), x @ matrix + layer.bias, rtol=1e-5, atol=1e-5)


def test_an_embedding_widens_the_rows_that_it_looks_up() -> None:
    table = nn.Embedding(50, 8).requires_grad_(False)
    store(table.weight, "bfloat16")
    ids = torch.tensor([[1, 2, 2], [49, 0, 7]])
    rows = table(ids)
    assert rows.dtype == torch.float32
    assert torch.equal(rows, table.weight.stored.weight[ids].float())


@each_form
def test_an_input_of_another_type_raises_the_error_of_stock(form: str) -> None:
    with pytest.raises(RuntimeError, match="dtype"):
        layer_of(form)[0](torch.zeros(2, 48, dtype=torch.bfloat16))


def _add_to_data(weight: torch.Tensor) -> None:
    weight.data += 1.0


def _set_data(weight: torch.Tensor) -> None:
    weight.data = weight.data.clone() + 1.0


def _add_to_parameter(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.add_(1.0)


def _copy_to_data(weight: torch.Tensor) -> None:
    weight.data.copy_(weight + 1.0)


def _add_in_detached(weight: torch.Tensor) -> None:
    weight.detach()[:] += 1.0


def _write_out(weight: torch.Tensor) -> None:
    torch.add(weight.detach().clone(), 1.0, out=weight)


@each_form
@pytest.mark.parametrize(
    "write", [_add_to_data, _set_data, _add_to_parameter, _copy_to_data, _add_in_detached, _write_out]
)
def test_a_write_makes_it_an_ordinary_parameter_with_the_new_values(
    form: str, write: Callable[[torch.Tensor], None]
) -> None:
    layer, values = layer_of(form)
    weight = layer.weight
    write(layer.weight)
    assert layer.weight is weight
    assert is_ordinary(layer)
    assert torch.equal(layer.weight, values + 1.0)


def test_a_write_in_inference_mode_is_not_lost() -> None:
    layer, values = layer_of("nf4")
    with torch.inference_mode():
        layer.weight.data += 1.0
        assert is_ordinary(layer)
        assert torch.equal(layer.weight, values + 1.0)


@each_form
def test_initialization_and_load_state_dict_write_to_it(form: str) -> None:
    layer, _ = layer_of(form)
    nn.init.ones_(layer.weight)
    assert torch.equal(layer.weight, torch.ones(32, 48))
    layer, _ = layer_of(form)
    other = nn.Linear(48, 32)
    layer.load_state_dict(other.state_dict())
    assert torch.equal(layer.weight, other.weight)
    assert is_ordinary(layer)


@each_form
@pytest.mark.parametrize("how", ["method", "attribute", "module"])
def test_what_is_to_be_trained_becomes_ordinary_first(form: str, how: str) -> None:
    layer, values = layer_of(form)
    if how == "method":
        layer.weight.requires_grad_()
    elif how == "attribute":
        layer.weight.requires_grad = True
    else:
        layer.requires_grad_(True)
    assert type(layer.weight) is nn.Parameter
    layer(torch.ones(1, 48)).sum().backward()
    assert torch.equal(layer.weight.grad, torch.ones(32, 48))
    assert torch.equal(layer.weight, values)
    layer, _ = layer_of(form)
    layer.requires_grad_(False)
    assert isinstance(layer.weight, FrozenWeight)


@each_form
def test_conversions_keep_it_stored(form: str) -> None:
    layer, values = layer_of(form)
    stored = layer.weight.stored
    layer.to("cpu").float()
    layer.bfloat16()
    assert layer.weight.dtype == torch.bfloat16
    assert torch.equal(layer.weight.clone(), values.bfloat16())
    layer.to(torch.float32)
    assert layer.weight.stored is stored
    assert torch.equal(layer.weight.clone(), values)
    layer.double()
    assert is_ordinary(layer)
    assert torch.equal(layer.weight, values.double())


@each_form
def test_copies_share_the_stored_values_until_they_are_written_to(form: str) -> None:
    layer, values = layer_of(form)
    other = copy.deepcopy(layer)
    assert other.weight.stored is layer.weight.stored
    other.weight.data += 1.0
    assert torch.equal(layer.weight.clone(), values)


@each_form
def test_files_contain_ordinary_tensors(form: str) -> None:
    layer, values = layer_of(form)
    for saved in (layer, layer.state_dict()):
        buffer = io.BytesIO()
        torch.save(saved, buffer)
        assert b"stoker" not in buffer.getvalue()
        buffer.seek(0)
        found = torch.load(buffer, weights_only=not isinstance(saved, nn.Module))
        weight = found.weight if isinstance(found, nn.Module) else found["weight"]
        assert type(weight) in (nn.Parameter, torch.Tensor)
        assert torch.equal(weight, values)
    assert torch.equal(load(save(layer.state_dict()))["weight"], values)
    assert isinstance(layer.weight, FrozenWeight)


def test_a_state_dict_that_nobody_reads_widens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, _ = layer_of("nf4")
    monkeypatch.setattr(Stored, "values", lambda *_: pytest.fail("widened"))
    state = layer.state_dict()
    assert {name: tuple(value.shape) for name, value in state.items()} == {"weight": (32, 48), "bias": (32,)}


@each_form
def test_widen_gives_the_ordinary_parameter_back(form: str) -> None:
    layer, values = layer_of(form)
    weight = layer.weight
    assert torch.equal(stored_values(weight).float(), values)
    widen(weight)
    assert layer.weight is weight
    assert is_ordinary(layer)
    assert torch.equal(weight, values)
    assert stored_values(weight) is weight


def test_what_cannot_be_stored_is_said() -> None:
    def reason(data: torch.Tensor, form: str = "nf4", trained: bool = False) -> str | None:
        return why_not(nn.Parameter(data, requires_grad=trained), form)

    assert reason(torch.zeros(4, 4)) is None
    assert reason(torch.zeros(4, 4), trained=True) == "it is trained"
    assert reason(torch.zeros(4)) == "it is not a matrix"
    assert reason(torch.zeros(4, 5)) == "its size is odd"
    assert reason(torch.zeros(4, 5), "bfloat16") is None
    assert reason(torch.zeros(4, 4).half()) == "it is float16 on cpu"
    assert reason(torch.zeros(4, 4).bfloat16(), "bfloat16") == "it is bfloat16 already"
    assert reason(torch.full((4, 4), float("nan"))) == "it has elements that are infinite or NaN"
    assert why_not(layer_of("nf4")[0].weight, "nf4") == "it is a FrozenWeight"
