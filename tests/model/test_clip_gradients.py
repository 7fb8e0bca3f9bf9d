"""Clipping in one pass over all gradients gives what torch's gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from stoker.model import clip_grad_norm_

SIZES = ((70_001,), (3, 5), (1,), (0,), (129, 257))  # pieces of 32,768 elements, and their ends


def _parameters(dtype: torch.dtype = torch.float32, scale: float = 1.0) -> list[nn.Parameter]:
    torch.manual_seed(0)
    made = [nn.Parameter(torch.randn(size).to(dtype)) for size in SIZES]
    for parameter in made:
        parameter.grad = scale * torch.randn_like(parameter)
    return made


@pytest.mark.parametrize("max_norm", [1.0, 1e6, float("inf")])
@pytest.mark.parametrize("threads", [1, 3])
def test_clipping_gives_what_torch_gives(max_norm: float, threads: int) -> None:
    torch.set_num_threads(threads)
    ours, theirs = _parameters(), _parameters()
    ours.append(nn.Parameter(torch.ones(3)))  # without a gradient
    expected = nn.utils.clip_grad_norm_(theirs, max_norm)
    norm = clip_grad_norm_(iter(ours), max_norm)
    torch.testing.assert_close(norm, expected, rtol=1e-4, atol=0.0)
    for one, other in zip(ours, theirs, strict=False):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=0.0)


def test_the_norm_does_not_depend_on_the_thread_count() -> None:
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found.append(clip_grad_norm_(_parameters(), 1.0).item())
    assert len(set(found)) == 1


def test_gradients_that_are_small_enough_are_not_touched() -> None:
    parameters = _parameters()
    before = [parameter.grad._version for parameter in parameters]
    clip_grad_norm_(parameters, 1e6)
    assert [parameter.grad._version for parameter in parameters] == before


def test_nan_and_infinite_gradients_give_what_torch_gives() -> None:
    for bad in (float("nan"), float("inf")):
        ours, theirs = _parameters(), _parameters()
        for made, clip in ((ours, clip_grad_norm_), (theirs, nn.utils.clip_grad_norm_)):
            made[1].grad[0, 0] = bad
            clip(made, 1.0)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one.grad, other.grad, equal_nan=True)
        ours[1].grad[0, 0] = bad
        with pytest.raises(RuntimeError, match="norm of the gradients"):
            clip_grad_norm_(ours, 1.0, error_if_nonfinite=True)


def test_without_gradients_the_norm_is_zero() -> None:
    assert clip_grad_norm_([], 1.0) == clip_grad_norm_([nn.Parameter(torch.ones(3))], 1.0) == 0.0


def _transposed(parameter: nn.Parameter) -> None:
    parameter.grad = torch.randn(257, 129).t()


@pytest.mark.parametrize("change", [None, _transposed])
@pytest.mark.parametrize("norm_type", [1.0, 2.0])
def test_gradients_that_the_kernel_does_not_support_are_clipped_by_torch(change: Any, norm_type: float) -> None:
    dtype = torch.bfloat16 if change is None else torch.float32
    ours, theirs = _parameters(dtype), _parameters(dtype)
    if change is not None:
        for made in (ours, theirs):
            torch.manual_seed(1)
            change(made[4])
    norms = [clip(made, 1.0, norm_type) for made, clip in ((ours, clip_grad_norm_), (theirs, nn.utils.clip_grad_norm_))]
    torch.testing.assert_close(*norms)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    from stoker.model import clip_gradients

    calls: list[int] = []
    norm = clip_gradients.gradient_norm
    monkeypatch.setattr(clip_gradients, "gradient_norm", lambda found: (calls.append(found.found), norm(found))[1])
    return calls


@pytest.fixture
def _fresh_state() -> Iterator[None]:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("_fresh_state")
def test_the_accelerator_clips_accumulated_gradients_in_one_pass(kernel_calls: list[int]) -> None:
    from stoker.hf.accelerator import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for _ in range(2):
        accelerator.backward(model(torch.full((3, 8), 5.0)).float().square().sum())
    expected = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
    found = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert kernel_calls == [2]
    torch.testing.assert_close(norm, expected.norm())
    torch.testing.assert_close(found, expected * 0.5 / expected.norm())


def test_the_trainer_clips_in_one_pass_unless_the_model_is_to_be_left_alone(
    tmp_path: Any, kernel_calls: list[int]
) -> None:
    from hf import tiny

    settings = {"max_steps": 2, "save_strategy": "no", "logging_steps": 1, "gradient_accumulation_steps": 2}
    norms = []
    for use in (None, False):
        trainer = tiny.trainer(
            tmp_path / str(use), tiny.tiny_model(dropout=0.0), max_grad_norm=0.1, use_ipex=use, **settings
        )
        trainer.train()
        norms.append([entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry])
    assert len(kernel_calls) == len(norms[0]) == 2
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
