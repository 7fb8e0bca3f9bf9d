"""TRL's trainers with Stoker's head: the results of TRL's own, for the labelled tokens only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

pytest.importorskip("trl", reason="needs TRL: pip install 'stoker[sft]'")

import trl.trainer.utils as trl_utils

import stoker
from stoker.hf import trl_head


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_ChunkedLogProbFunction", "_use_triton"):
        monkeypatch.setattr(trl_utils, name, getattr(trl_utils, name))  # restored afterwards
    trl_head.install()


def _model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
    )
    return transformers.LlamaForCausalLM(config).train()


def _batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 99, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :3] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _results(optimize: bool) -> tuple[Any, dict[str, torch.Tensor]]:
    model = _model()
    trl_utils.add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    if optimize:
        stoker.optimize(model)
    output = model(**_batch(), fused_lm_head=True)
    (-output.log_probs.sum() / 11).backward()
    return output, {name: p.grad for name, p in model.named_parameters()}


def test_stokers_head_gives_what_trls_own_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    actual, gradients = _results(optimize=True)
    stock = trl_utils._ChunkedLogProbFunction.stock
    monkeypatch.setattr(trl_utils, "_ChunkedLogProbFunction", stock)
    monkeypatch.setattr(trl_utils, "_use_triton", lambda device: False)
    expected, wanted = _results(optimize=False)
    for name in ("log_probs", "entropy", "loss"):
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-4, atol=1e-5)
    assert torch.equal(actual.is_top1.bool(), expected.is_top1.bool())
    assert torch.equal(actual.label_mask, expected.label_mask)
    for name, gradient in wanted.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-3, atol=1e-6)


def test_only_labelled_positions_are_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    import stoker.kernels.loss as loss

    scored, original = [], loss.linear_log_probs
    monkeypatch.setattr(
        loss, "linear_log_probs", lambda x, *args, **named: scored.append(x.shape[0]) or original(x, *args, **named)
    )
    output, _ = _results(optimize=True)
    assert scored == [int(output.label_mask.sum())]


@pytest.mark.parametrize("outputs", [("log_probs", "entropy"), ("log_probs", "mean_logits")])
def test_outputs_that_need_more_come_from_trl(outputs: tuple[str, ...]) -> None:
    model = _model()
    trl_utils.add_fused_lm_head(model, outputs=outputs)
    output = model(**_batch(), fused_lm_head=True)
    assert output.log_probs.grad_fn is not None
    if "entropy" in outputs:
        assert output.entropy.requires_grad  # as in TRL, where it may be part of the loss


def test_installing_twice_changes_nothing() -> None:
    head = trl_utils._ChunkedLogProbFunction
    trl_head.install()
    assert trl_utils._ChunkedLogProbFunction is head
