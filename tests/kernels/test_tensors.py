"""The memory of tensors and of their gradients, as native code finds it, is what torch tells; anything unusual is noticed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from stoker.kernels.tensors import TensorReader, available, identities


def _parameters() -> list[Tensor]:
    made: list[Tensor] = [nn.Parameter(torch.randn(shape)) for shape in ((3, 5), (7,), (0,), (), (4, 2))]
    for parameter in made[:4]:
        parameter.grad = torch.randn_like(parameter)
    return made


def test_the_installed_torch_has_all_functions() -> None:
    assert available()


def test_addresses_and_sizes_are_those_of_torch() -> None:
    parameters = _parameters()
    own, gradients = (TensorReader(identities(parameters), None, gradients=flag) for flag in (False, True))
    assert own.read()
    assert gradients.read()
    assert own.sizes[:] == [15, 7, 0, 1, 8]
    assert gradients.sizes[:] == [15, 7, 0, 1, 0]
    assert (own.found, gradients.found) == (5, 4)
    for index in (0, 1, 3):
        assert own.addresses[index] == parameters[index].data_ptr()
        assert gradients.addresses[index] == parameters[index].grad.data_ptr()
    assert gradients.addresses[2] != 0  # it exists, though it has no elements
    assert gradients.addresses[4] == 0


def test_changes_are_counted_for_autograd() -> None:
    parameters = _parameters()
    gradients = TensorReader(identities(parameters), None, gradients=True)
    assert gradients.read()
    gradients.count_changes(gradients=True)
    assert [parameter.grad._version for parameter in parameters[:4]] == [1] * 4
    gradients.count_changes(gradients=False)
    assert [parameter._version for parameter in parameters] == [1] * 4 + [0]  # the last has no gradient


@pytest.mark.parametrize(
    "unusual",
    [
        lambda: torch.randn(3, 5).to_sparse(),
        lambda: torch.randn(5, 3).t(),
        lambda: torch.randn(3, 10)[:, ::2],
        lambda: torch.randn(3, 5, dtype=torch.float64),
        lambda: torch.randn(3, 5, dtype=torch.bfloat16),
        lambda: torch.randn(3, 5, device="meta"),
        lambda: torch.randn(3, 6),
        lambda: torch.randn(3, 5).to_mkldnn(),
    ],
)
def test_a_tensor_that_is_not_dense_fp32_of_its_size_is_noticed(unusual: Callable[[], Tensor]) -> None:
    tensors = [torch.randn(3, 5), unusual()]
    assert not TensorReader(identities(tensors), None, [15, 15]).read()


def test_a_tensor_that_does_not_exist_is_left_out() -> None:
    reader = TensorReader([0, *identities([tensor := torch.randn(4)])], None)
    assert reader.read()
    assert reader.addresses[:] == [0, tensor.data_ptr()]
    assert not TensorReader([0], None, gradients=True).addresses[0]
