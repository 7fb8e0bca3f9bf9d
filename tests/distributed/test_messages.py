"""Ranks send each other plain values and tensors; nothing that arrives from another process can run code."""

from __future__ import annotations

import os
import pickle
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import stoker
from stoker.distributed import messages
from stoker.hf.healing.step_boundary import exchange_random_states, use_random_state


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor | np.ndarray):
        return (
            type(one) is type(other)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and bool((one == other).all())
        )
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    return type(one) is type(other) and one == other


@pytest.mark.parametrize(
    "value",
    [
        None, True, 1 << 80, -0.1, float("inf"), "ü\n", [], (), {}, [1, (2, [3.0])], {"a": {1: None, (2, "b"): (True,)}},
        torch.arange(6, dtype=torch.bfloat16).view(2, 3), torch.tensor(1.5), torch.empty(0, 3), torch.tensor([True]),
        np.arange(3, dtype=np.uint32), np.zeros((0, 2)), {"tuple": "a dict with a name of ours"},
    ],
    ids=repr,
)  # fmt: skip
def test_values_arrive_as_they_were_sent(value: Any) -> None:
    assert same(messages.decode(messages.encode(value)), value)


def test_numbers_of_numpy_arrive_as_numbers() -> None:
    assert messages.decode(messages.encode({"f1": np.float64(0.5), "n": np.int64(3)})) == {"f1": 0.5, "n": 3}


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, os.system, b"bytes", [lambda: 0], np.array([None])],
    ids=lambda value: type(value).__name__,
)
def test_other_values_are_refused_by_the_sender(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot be sent to other ranks"):
        messages.encode(value)


class Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b'{"tensor":["float32",[2],""]}', b'{"tensor":["load",[1],"AAAA"]}', b'{"array":["O",[1],"AAAAAAAAAAA="]}',
     b'{"tensor":["float32",[-1],"AAAAAA=="]}', b'{"call":[1,2,""]}', b'{"dict":[[[1],2]]}', b'{"a":1,"b":2}', b"\xff"],
)  # fmt: skip
def test_data_of_another_form_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # JSON's own, or ours
        messages.decode(data)


def test_a_pickle_from_another_process_is_not_executed(tmp_path: Path) -> None:
    data = pickle.dumps(Touch(tmp_path / "executed"))
    with pytest.raises(ValueError):  # noqa: PT011
        messages.decode(data)
    row = torch.zeros(16 * 1024, dtype=torch.uint8)
    row[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    with pytest.raises(ValueError):  # noqa: PT011
        use_random_state(row)
    assert not (tmp_path / "executed").exists()


def test_no_source_file_unpickles_what_others_have_sent() -> None:
    """torch's collectives for objects pickle; torch.load may only be asked for weights."""
    pattern = re.compile(r"(object_list|gather_object)\(|pickle\.loads?\(|Unpickler|weights_only=False|import dill")
    found = [path for path in Path(stoker.__file__).parent.rglob("*.py") if pattern.search(path.read_text())]
    assert found == []


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_values_pass_through_the_collectives() -> None:
    value = {"a": [1, torch.ones(3)], "b": ("x", None)}
    assert same(messages.broadcast(value, 0), value)
    assert same(messages.all_gather(value), [value])
    with pytest.raises(TypeError, match="cannot be sent"):
        messages.broadcast(object(), 0)


@pytest.mark.usefixtures("group_of_one")
def test_random_states_are_restored_from_what_ranks_exchanged() -> None:
    random.gauss(0, 1)  # a second number is kept for the next call
    np.random.standard_normal(1)
    (row,) = exchange_random_states()
    drawn = [random.gauss(0, 1), random.random(), *np.random.standard_normal(2), *torch.rand(2).tolist()]
    use_random_state(row)
    assert drawn == [random.gauss(0, 1), random.random(), *np.random.standard_normal(2), *torch.rand(2).tolist()]
