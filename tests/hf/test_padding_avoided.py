"""`padding_avoided` in the logs is what the model did not compute, and nothing is logged where it computes as stock does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hf import tiny
from stoker.hf.trainer import Trainer
from stoker.model.sequences import Positions, counting

SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}


def _logged(folder: Path, model: Any, **changed: Any) -> tuple[dict[str, Any], float]:
    """The first log entry of one step, and the share of padding in its batch."""
    trainer = tiny.trainer(folder, model=model, max_steps=1, save_strategy="no", **changed)
    seen: list[torch.Tensor] = []

    def pad(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = tiny.pad(items)
        seen.append(batch["attention_mask"].float())
        if not hasattr(model, "classifier"):
            batch["labels"] = batch["input_ids"]  # a language model
        return batch

    trainer.data_collator = pad
    trainer.train()
    return trainer.state.log_history[0], 1.0 - float(seen[0].mean())


def test_padding_that_the_model_skips_is_counted(tree_path: Path) -> None:
    entry, padding = _logged(tree_path, tiny.tiny_model())
    assert padding > 0.05
    assert entry["padding_avoided"] == pytest.approx(padding, abs=1e-3)


def test_padding_that_the_collator_avoids_is_counted_against_the_padded_length(
    tree_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "padded_length", 100)
    entry, padding = _logged(tree_path, tiny.tiny_model())
    assert entry["padding_avoided"] > max(padding, 0.75)  # rows have less than 24 tokens


def test_a_language_model_avoids_its_padding_too(tree_path: Path) -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=100, **SIZES))
    entry, padding = _logged(tree_path, model)
    if int(transformers.__version__.split(".")[0]) < 5:  # the table has language models from transformers 5 on
        assert "padding_avoided" not in entry
        return
    assert padding > 0.05
    assert entry["padding_avoided"] == pytest.approx(padding, abs=1e-3)


def test_a_model_that_computes_its_padding_logs_no_padding_avoided(tree_path: Path) -> None:
    config = transformers.T5Config(
        vocab_size=100, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    entry, padding = _logged(tree_path, transformers.T5ForConditionalGeneration(config))
    assert padding > 0.05
    assert entry["tokens_per_second"] > 0
    assert "padding_avoided" not in entry


def test_stock_calls_avoid_no_padding(tree_path: Path) -> None:
    entry, padding = _logged(tree_path, tiny.tiny_model(), neftune_noise_alpha=5.0)
    assert padding > 0.05
    assert entry["padding_avoided"] == 0.0


def test_evaluations_are_not_counted_as_training(tree_path: Path) -> None:
    trainer = tiny.trainer(
        tree_path, max_steps=2, save_strategy="no", logging_steps=2, eval_strategy="steps", eval_steps=1
    )
    positions: list[int] = []

    class Look(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            positions.append(trainer._meter.positions.given)

        def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
            positions.append(trainer._meter.positions.given)

    trainer.add_callback(Look())
    trainer.train()
    assert positions[0] > 0
    assert positions[1] == positions[0]


def test_a_model_that_computes_padding_avoids_none() -> None:
    import stoker

    batch = tiny.pad([tiny.TinyData()[i] for i in range(4)])
    counts = {}
    for unpad in (True, False):
        model = stoker.optimize(tiny.tiny_model(), unpad=unpad, dtype=torch.float32)
        counts[unpad] = Positions()
        with counting(counts[unpad]):
            model(**batch)
    given, lengths = batch["input_ids"].numel(), batch["attention_mask"].sum(1)
    assert counts[True] == Positions(given, int(lengths.sum()), int(lengths.square().sum()))
    assert counts[False] == Positions(given, given, given * batch["input_ids"].shape[1])
    with counting(counts[True]), torch.no_grad():
        model(**batch)
    assert counts[True].given == given
