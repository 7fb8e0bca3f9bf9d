"""`keep_activations`: checkpointed layers keep their activations where these fit in the memory, with the same results."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import tiny_decoders as tiny
import torch
import transformers
from tiny_models import assert_same_gradients, gradients

import stoker
from stoker.model import recomputation

pytestmark = pytest.mark.skipif(int(transformers.__version__.split(".")[0]) < 5, reason="the rows need transformers 5")


def checkpointed(**switches: Any) -> tuple[Any, list[int]]:
    """An optimised model with checkpointing, and a list that gets an entry for each checkpointed call of a layer."""
    model = stoker.optimize(tiny.model("Llama"), **switches)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    calls: list[int] = []
    for number, layer in enumerate(model.model.layers):
        checkpoint = layer._gradient_checkpointing_func

        def counted(*args: Any, number: int = number, checkpoint: Any = checkpoint) -> Any:
            calls.append(number)
            return checkpoint(*args)

        layer._gradient_checkpointing_func = counted
    return model, calls


def assert_stocks_results(model: Any) -> None:
    padded = tiny.batch()
    loss, _, expected = tiny.truth(tiny.model("Llama"), padded)
    output = model(**padded)
    output.loss.backward()
    torch.testing.assert_close(output.loss.detach(), loss, rtol=1e-5, atol=1e-6)
    assert_same_gradients(gradients(model), expected)


def test_activations_that_fit_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    model, calls = checkpointed(keep_activations=True)
    with caplog.at_level(logging.WARNING, "stoker"):
        for _ in range(2):
            assert_stocks_results(model)
            model.zero_grad()
    assert calls == []
    assert sum("activations are kept" in record.message for record in caplog.records) == 1
    assert all(layer.gradient_checkpointing for layer in model.model.layers)  # as the user set it


def test_activations_that_do_not_fit_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recomputation, "free_memory", lambda: 1000.0)
    model, calls = checkpointed(keep_activations=True)
    assert_stocks_results(model)
    assert calls == list(range(len(model.model.layers)))


def test_the_first_step_decides_how_much_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = checkpointed(keep_activations=True)
    assert_stocks_results(model)
    monkeypatch.setattr(recomputation, "free_memory", lambda: 0.0)
    model(**tiny.batch()).loss.backward()
    assert calls == []


def test_without_the_switch_checkpointing_is_left_alone() -> None:
    model, calls = checkpointed()
    assert_stocks_results(model)
    assert calls == list(range(len(model.model.layers)))


def test_processes_share_the_memory_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = recomputation.free_memory()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert recomputation.free_memory() == pytest.approx(alone / 4, rel=0.5)  # other processes take memory meanwhile
    assert alone > 0


def test_the_trainer_takes_a_default_of_checkpointing_for_no_wish() -> None:
    from trl import SFTConfig

    from stoker import TrainingArguments
    from stoker.hf.trainer import _checkpoints_by_default

    assert _checkpoints_by_default(SFTConfig("out", bf16=False))
    assert not _checkpoints_by_default(TrainingArguments("out", gradient_checkpointing=True))
