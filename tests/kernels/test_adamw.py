"""One native update of many parameters is torch's fused update, bit for bit, and the published formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from stoker.kernels import native
from stoker.kernels.adamw import AdamTensors

SIZES = (70_001, 15, 1, 0, 33_153, 64, 7, 33)
"""Shares of several threads, and ends of tensors that fill no register."""
OPTIONS: dict[str, Any] = {
    "lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False, "maximize": False,
    "decoupled_weight_decay": True,
}  # fmt: skip
NAMES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
SAME_INSTRUCTIONS = native.level() != "baseline"
"""torch has these loops for AVX2; without fused multiply-adds, and with shorter registers, rounding differs."""


class Tensors:
    """Parameters with gradients and a state in the middle of training."""

    def __init__(self, dtype: torch.dtype = torch.float32, sizes: tuple[int, ...] = SIZES) -> None:
        torch.manual_seed(0)
        self.parameters = [torch.randn(size).to(dtype).requires_grad_() for size in sizes]
        self.states = [{name: torch.rand(size).to(dtype) for name in NAMES} for size in sizes]
        for number, (parameter, state) in enumerate(zip(self.parameters, self.states, strict=True)):
            parameter.grad = torch.randn_like(parameter)
            state["exp_avg"] -= 0.5
            state["step"] = torch.tensor(float(number % 3))

    def update(self, *groups: tuple[int, dict[str, Any]]) -> None:
        tensors = AdamTensors(self.parameters, self.states)
        assert tensors.read()
        tensors.update(groups or [(len(self.parameters), OPTIONS)])

    def update_by_torch(self, options: dict[str, Any], first: int = 0, end: int | None = None) -> None:
        options = dict(options)
        beta1, beta2 = options.pop("betas")
        function = torch._fused_adamw_ if options.pop("decoupled_weight_decay") else torch._fused_adam_
        parameters, states = self.parameters[first:end], self.states[first:end]
        lists = [[state[name] for state in states] for name in (*NAMES, "step")]
        if not options["amsgrad"]:
            lists[2] = []
        for step in lists[3]:
            step += 1
        with torch.no_grad():
            gradients = [parameter.grad for parameter in parameters]
            function(parameters, gradients, *lists, beta1=beta1, beta2=beta2, **options)

    def all(self) -> list[Tensor]:
        return [*self.parameters, *(one for state in self.states for one in state.values())]


def assert_same(found: Tensors, expected: Tensors) -> None:
    for one, other in zip(found.all(), expected.all(), strict=True):
        if SAME_INSTRUCTIONS:
            torch.testing.assert_close(one, other, rtol=0.0, atol=0.0, equal_nan=True)
        else:
            tolerance = {"rtol": 0.05, "atol": 0.05} if one.dtype == torch.bfloat16 else {}
            torch.testing.assert_close(one, other, equal_nan=True, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"weight_decay": 0.0},
        {"decoupled_weight_decay": False},
        {"decoupled_weight_decay": False, "weight_decay": 0.0, "maximize": True},
        {"amsgrad": True},
        {"amsgrad": True, "maximize": True, "decoupled_weight_decay": False},
        {"betas": (0.3, 0.5), "lr": 3},
        {"betas": (0.0, 0.0), "eps": 0.0},
    ],
    ids=str,
)
def test_updates_are_those_of_torch(changes: dict[str, Any], threads: int, dtype: torch.dtype) -> None:
    torch.set_num_threads(threads)
    ours, theirs, options = Tensors(dtype), Tensors(dtype), {**OPTIONS, **changes}
    for _ in range(2):
        ours.update((len(SIZES), options))
        theirs.update_by_torch(options)
    assert_same(ours, theirs)


def test_groups_have_options_of_their_own() -> None:
    ours, theirs = Tensors(), Tensors()
    groups = [(3, OPTIONS), (0, OPTIONS), (5, {**OPTIONS, "lr": 0.5, "betas": (0.5, 0.9), "weight_decay": 0.0})]
    ours.update(*groups)
    theirs.update_by_torch(groups[0][1], 0, 3)
    theirs.update_by_torch(groups[2][1], 3)
    assert_same(ours, theirs)


def test_parameters_of_both_types_are_updated_together() -> None:
    wide, narrow = Tensors(sizes=(40_003, 9)), Tensors(torch.bfloat16, sizes=(9, 40_003))
    both = Tensors(sizes=())
    both.parameters, both.states = wide.parameters + narrow.parameters, wide.states + narrow.states
    both.update()
    wide, narrow = Tensors(sizes=(40_003, 9)), Tensors(torch.bfloat16, sizes=(9, 40_003))
    wide.update_by_torch(OPTIONS)
    narrow.update_by_torch(OPTIONS)
    expected = Tensors(sizes=())
    expected.parameters, expected.states = wide.parameters + narrow.parameters, wide.states + narrow.states
    assert_same(both, expected)


def test_the_formula_in_double_precision() -> None:
    tensors, (beta1, beta2) = Tensors(), OPTIONS["betas"]
    expected = []
    for parameter, state in zip(tensors.parameters, tensors.states, strict=True):
        p, g, m, v = (x.detach().double() for x in (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]))
        step = state["step"].item() + 1
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        p = p * (1 - OPTIONS["lr"] * OPTIONS["weight_decay"])
        expected.append(p - OPTIONS["lr"] / (1 - beta1**step) * m / ((v / (1 - beta2**step)).sqrt() + OPTIONS["eps"]))
    tensors.update()
    for found, wanted in zip(tensors.parameters, expected, strict=True):
        torch.testing.assert_close(found.detach(), wanted.float(), rtol=1e-5, atol=1e-6)


def test_a_parameter_without_a_gradient_keeps_its_value_and_its_state() -> None:
    tensors = Tensors()
    tensors.parameters[1].grad = None
    before = [one.clone() for one in (tensors.parameters[1], *tensors.states[1].values())]
    tensors.update()
    for one, other in zip((tensors.parameters[1], *tensors.states[1].values()), before, strict=True):
        assert torch.equal(one, other)
    assert tensors.states[0]["step"] == 1


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan"), 1e30, 1e-38, 0.0])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_extreme_gradients_give_what_torch_gives(bad: float, amsgrad: bool) -> None:
    if amsgrad and bad != bad and not SAME_INSTRUCTIONS:
        pytest.skip("torch ignores NaN where a tensor does not fill a register of its own length")
    ours, theirs, options = Tensors(), Tensors(), {**OPTIONS, "amsgrad": amsgrad}
    for tensors in (ours, theirs):
        for parameter in tensors.parameters:
            parameter.grad[:40:7] = bad
    ours.update((len(SIZES), options))
    theirs.update_by_torch(options)
    assert_same(ours, theirs)


def test_memory_that_moved_since_is_found() -> None:
    ours, theirs = Tensors(), Tensors()
    tensors = AdamTensors(ours.parameters, ours.states)
    for parameter, state in zip(ours.parameters, ours.states, strict=True):
        parameter.data = parameter.data.clone()
        state["exp_avg"].data = state["exp_avg"].clone()
        state["exp_avg_sq"].share_memory_()
    assert tensors.read()
    tensors.update([(len(SIZES), OPTIONS)])
    theirs.update_by_torch(OPTIONS)
    assert_same(ours, theirs)


def _sparse(tensors: Tensors) -> None:
    tensors.parameters[5].grad = tensors.parameters[5].grad.to_sparse()


def _strided(tensors: Tensors) -> None:
    tensors.parameters[5].grad = torch.randn(128)[::2]


def _another_type(tensors: Tensors) -> None:
    tensors.states[5]["exp_avg"].data = tensors.states[5]["exp_avg"].double()


def _another_size(tensors: Tensors) -> None:
    tensors.parameters[5].data = torch.zeros(63)


def _counted_in_double(tensors: Tensors) -> None:
    tensors.states[5]["step"] = torch.tensor(1.0, dtype=torch.float64)


@pytest.mark.parametrize("change", [_sparse, _strided, _another_type, _another_size, _counted_in_double])
def test_tensors_that_the_kernel_does_not_support_are_noticed(change: Any) -> None:
    tensors = Tensors()
    if change is _counted_in_double:
        change(tensors)
    prepared = AdamTensors(tensors.parameters, tensors.states)
    if change is not _counted_in_double:
        assert prepared.read()
        change(tensors)
    assert not prepared.read()
