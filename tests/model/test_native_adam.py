"""AdamW and Adam of an optimized model: torch's optimizers in every respect, with one native call per step."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

import stoker
from stoker.kernels.adamw import AdamTensors
from stoker.model import optimizers


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the number of groups with every native update."""
    calls: list[int] = []
    update = AdamTensors.update

    def counted(self: AdamTensors, groups: Any) -> None:
        calls.append(len(groups))
        update(self, groups)

    monkeypatch.setattr(AdamTensors, "update", counted)
    return calls


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((33, 65), (65,), (3, 5), (1,), (7,))]


def both(make: Callable[[list[nn.Parameter]], Optimizer], **options: Any) -> tuple[Any, Any]:
    """The same optimizer twice: with native updates, and torch's fused one."""
    ours, theirs = make(parameters(**options)), make(parameters(**options))
    assert optimizers.fuse(ours).startswith(("AdamW", "Adam"))
    for flags in (theirs.defaults, *theirs.param_groups):
        flags["fused"], flags["foreach"] = True, False
    return ours, theirs


def flat(optimizer: Optimizer) -> list[nn.Parameter]:
    return [one for group in optimizer.param_groups for one in group["params"]]


def train(*trained: Optimizer, steps: int = 1, seed: int = 0, skip: tuple[int, ...] = ()) -> None:
    """Steps with the same gradients for each optimizer; parameters whose number is in `skip` get none."""
    for step in range(steps):
        for optimizer in trained:
            generator = torch.Generator().manual_seed(100 * seed + step)
            for number, parameter in enumerate(flat(optimizer)):
                gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
                parameter.grad = None if number in skip else gradient
            optimizer.step()


def assert_same(ours: Optimizer, theirs: Optimizer) -> None:
    """Parameters and state_dict are equal, with the same keys in the same order."""
    for one, other in zip(flat(ours), flat(theirs), strict=True):
        torch.testing.assert_close(one, other)
    mine, expected = ours.state_dict(), theirs.state_dict()
    assert mine["param_groups"] == expected["param_groups"]
    assert list(mine["state"]) == list(expected["state"])
    for number, state in expected["state"].items():
        assert list(mine["state"][number]) == list(state)
        for name, tensor in state.items():
            torch.testing.assert_close(mine["state"][number][name], tensor)
            assert mine["state"][number][name].dtype == tensor.dtype


KINDS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "AdamW": lambda p: AdamW(p, lr=1e-2),
    "Adam with L2": lambda p: Adam(p, lr=1e-2, weight_decay=0.1),
    "amsgrad": lambda p: AdamW(p, lr=1e-2, amsgrad=True),
    "maximize": lambda p: Adam(p, lr=1e-2, maximize=True),
    "groups": lambda p: AdamW(
        [
            {"params": p[:2], "weight_decay": 0.0},
            {"params": p[2:4], "lr": 0.1, "betas": (0.5, 0.9)},
            {"params": p[4:], "amsgrad": True},
        ]
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_training_gives_what_torch_gives(kind: str, threads: int, dtype: torch.dtype, updates: list[int]) -> None:
    torch.set_num_threads(threads)
    ours, theirs = both(KINDS[kind], dtype=dtype)
    train(ours, theirs, steps=3)
    assert_same(ours, theirs)
    assert updates == [len(ours.param_groups)] * 3


def test_parameters_without_gradients_are_left_out_as_torch_does(updates: list[int]) -> None:
    ours, theirs = both(KINDS["AdamW"])
    for skip in ((0, 3), (3,), (0, 1, 2), (0, 1, 2, 3, 4), ()):  # some get their state later than others
        train(ours, theirs, seed=len(skip), skip=skip)
    assert_same(ours, theirs)
    assert len(updates) == 5
    assert [parameter._version for parameter in flat(ours)[3:]] == [2, 4]  # as many as there were gradients


def test_frozen_parameters_are_left_alone(updates: list[int]) -> None:
    ours, theirs = both(KINDS["groups"])
    for optimizer in (ours, theirs):
        flat(optimizer)[1].requires_grad_(False)
    train(ours, theirs, steps=2, skip=(1,))
    assert_same(ours, theirs)
    assert len(updates) == 2


def test_a_loaded_state_is_continued(updates: list[int]) -> None:
    ours, theirs = both(KINDS["groups"])
    train(ours, theirs, steps=2)
    saved = copy.deepcopy(theirs.state_dict())
    train(ours, theirs, steps=1, seed=1)
    resumed, _ = both(KINDS["groups"])
    for one, other in zip(flat(resumed), flat(ours), strict=True):
        one.data.copy_(other.data)
    resumed.load_state_dict(copy.deepcopy(ours.state_dict()))
    train(ours, theirs, resumed, seed=2)
    assert_same(ours, theirs)
    assert_same(resumed, theirs)
    for optimizer in (ours, theirs):  # in the middle of a run: its own state is replaced
        optimizer.load_state_dict(copy.deepcopy(saved))
    train(ours, theirs, steps=2, seed=3)
    assert_same(ours, theirs)
    assert len(updates) == 7


def _replace_a_state_tensor(optimizer: Any) -> None:
    for parameter in flat(optimizer):
        for name, tensor in optimizer.state[parameter].items():
            optimizer.state[parameter][name] = tensor * 2


def _replace_an_entry(optimizer: Any) -> None:
    optimizer.state[flat(optimizer)[0]] = {}


def _clear(optimizer: Any) -> None:
    optimizer.state.clear()


def _new_memory(optimizer: Any) -> None:
    for parameter in flat(optimizer):
        parameter.data = parameter.data * 0.5
        for tensor in optimizer.state[parameter].values():
            tensor.share_memory_()


def _add_a_group(optimizer: Any) -> None:
    torch.manual_seed(1)
    optimizer.add_param_group({"params": [nn.Parameter(torch.randn(11))], "lr": 0.3})


def _take_a_parameter_away(optimizer: Any) -> None:
    optimizer.state.pop(optimizer.param_groups[0]["params"].pop())


def _options(optimizer: Any) -> None:
    optimizer.param_groups[0].update(lr=1, betas=(0.1, 0.2), eps=0.1, weight_decay=0.5, maximize=True)


def _other_types(optimizer: Any) -> None:
    for parameter in flat(optimizer):
        parameter.data, parameter.grad = parameter.data.bfloat16(), None
        state = optimizer.state[parameter]
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = state[name].bfloat16()


@pytest.mark.parametrize(
    "change",
    [
        _replace_a_state_tensor, _replace_an_entry, _clear, _new_memory, _add_a_group, _take_a_parameter_away, _options,
        _other_types,
    ],
)  # fmt: skip
def test_changes_between_steps_are_noticed(change: Callable[[Any], None], updates: list[int]) -> None:
    ours, theirs = both(KINDS["AdamW"])
    train(ours, theirs, steps=2)
    for optimizer in (ours, theirs):
        change(optimizer)
    train(ours, theirs, steps=2, seed=1)
    assert_same(ours, theirs)
    assert len(updates) == 4


def _sparse(optimizer: Any) -> None:
    flat(optimizer)[0].grad = flat(optimizer)[0].grad.to_sparse()


def _strided(optimizer: Any) -> None:
    flat(optimizer)[0].grad = flat(optimizer)[0].grad.t().contiguous().t()


def _scaled(optimizer: Any) -> None:
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)


def _not_fused(optimizer: Any) -> None:
    optimizer.param_groups[0]["fused"] = False


def _tensor_rate(optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = torch.tensor(0.01)


def _transposed_parameter(optimizer: Any) -> None:
    parameter = flat(optimizer)[0]
    parameter.grad, gradient = None, parameter.grad
    parameter.data = parameter.data.t().contiguous().t()
    parameter.grad = gradient.t().contiguous().t()
    optimizer.state.pop(parameter, None)


@pytest.mark.parametrize("change", [_strided, _scaled, _not_fused, _tensor_rate, _transposed_parameter])
def test_steps_that_the_kernel_does_not_support_are_those_of_torch(
    change: Callable[[Any], None], updates: list[int]
) -> None:
    ours, theirs = both(KINDS["AdamW"])
    train(ours, theirs)
    for optimizer in (ours, theirs):
        for parameter in flat(optimizer):
            parameter.grad = torch.linspace(-1, 1, parameter.numel()).view(parameter.shape)
        change(optimizer)
        optimizer.step()
    for one, other in zip(flat(ours), flat(theirs), strict=True):
        torch.testing.assert_close(one, other)
    assert len(updates) == 1


def test_sparse_gradients_are_refused_with_the_error_of_torch() -> None:
    ours, _ = both(KINDS["AdamW"])
    train(ours)
    _sparse(ours)
    with pytest.raises(RuntimeError, match="sparse gradients"):
        ours.step()


def test_other_parameters_and_subclasses_keep_the_implementation_of_torch(updates: list[int]) -> None:
    class Own(AdamW):
        pass

    for optimizer in (
        Own(parameters(), fused=True),
        AdamW(parameters(torch.float16)),
        AdamW(parameters(torch.float64)),
    ):
        optimizers.fuse(optimizer)
        train(optimizer, steps=2)
    assert updates == []


@pytest.mark.parametrize("before", [False, True])
def test_schedulers_hooks_and_closures_work(before: bool, updates: list[int]) -> None:
    ours = AdamW(parameters(), lr=1.0)
    if not before:
        optimizers.fuse(ours)
    schedule = torch.optim.lr_scheduler.LambdaLR(ours, lambda step: 0.5**step)
    if before:
        optimizers.fuse(ours)
    seen: list[str] = []
    ours.register_step_pre_hook(lambda *about: seen.append("before"))
    ours.register_step_post_hook(lambda *about: seen.append("after"))

    def closure() -> torch.Tensor:
        ours.zero_grad()
        loss = sum((parameter**2).sum() for parameter in flat(ours))
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses = []
        for _ in range(3):
            losses.append(ours.step(closure).item())
            schedule.step()
    assert losses[2] < losses[0]
    assert seen == ["before", "after"] * 3
    assert schedule.get_last_lr() == [0.125]
    assert len(updates) == 3


def test_autograd_notices_that_parameters_have_changed() -> None:
    ours, _ = both(KINDS["AdamW"])
    weight = flat(ours)[0]
    loss = (weight * weight).sum()
    train(ours)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_and_pickles_are_optimizers_of_torch(copied: Callable[[Any], Any]) -> None:
    ours, _ = both(KINDS["AdamW"])
    train(ours, steps=2)
    other = copied(ours)
    assert type(other) is AdamW
    train(ours, other)
    assert_same(ours, other)


def test_restore_gives_the_implementation_of_torch_back(updates: list[int]) -> None:
    model = nn.Linear(5, 3)
    for fused in (None, True):
        optimizer = AdamW(model.parameters(), fused=fused)
        stock = set(vars(optimizer))
        stoker.optimize(model, optimizer)
        train(optimizer)
        stoker.restore(model, optimizer)
        train(optimizer)
        assert set(vars(optimizer)) - {"_step_supports_amp_scaling", "_need_device_dtype_check_for_fused"} <= stock
        assert optimizer.param_groups[0]["fused"] is fused
    assert len(updates) == 2


def test_an_optimizer_is_freed_without_garbage_collection() -> None:
    ours, _ = both(KINDS["AdamW"])
    train(ours)
    weight = weakref.ref(flat(ours)[0])
    gc.disable()
    try:
        del ours, _
        assert weight() is None
    finally:
        gc.enable()


@pytest.fixture
def _fresh_state() -> Iterator[None]:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("_fresh_state")
def test_the_accelerator_updates_natively(updates: list[int]) -> None:
    from stoker.hf.accelerator import Accelerator

    accelerator = Accelerator(cpu=True)
    model = nn.Linear(8, 4)
    model, optimizer = accelerator.prepare(model, AdamW(model.parameters()))
    for _ in range(2):
        accelerator.backward(model(torch.ones(3, 8)).square().sum())
        optimizer.step()
        optimizer.zero_grad()
    assert updates == [1, 1]


def test_the_trainer_updates_natively(tmp_path: Any, updates: list[int]) -> None:
    from hf import tiny

    trainer = tiny.trainer(tmp_path, tiny.tiny_model(dropout=0.0), max_steps=2, save_strategy="no")
    trainer.train()
    assert updates == [2, 2]  # with and without weight decay
