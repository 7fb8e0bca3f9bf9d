"""What `stoker.report` says is what runs: applied, left alone, and why."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import tiny_models as tiny
import torch
import transformers
from torch import nn

import stoker
from stoker.model.leaf_modules import LeafActivation, LeafDropout, LeafEmbedding, LeafLayerNorm, LeafLinear
from stoker.model.optimization_report import Report


def test_the_report_of_a_restored_model_lists_nothing() -> None:
    model = tiny.model("Bert", "QuestionAnswering")
    optimizer = torch.optim.AdamW(model.parameters())
    stoker.optimize(model, optimizer, dtype=torch.bfloat16)
    stoker.restore(model)
    assert "bf16" not in str(stoker.report(model))
    assert stoker.report(model).optimizer == "AdamW fused"  # it still is
    stoker.restore(model, optimizer)
    assert not stoker.report(model).optimizer


def test_the_report_names_the_dtype_that_is_used() -> None:
    half = stoker.optimize(tiny.model("Bert", "QuestionAnswering").bfloat16(), dtype=torch.float32)
    assert stoker.report(half).precision == "bfloat16, as the parameters are stored"
    mixed = tiny.model("Bert", "QuestionAnswering")
    mixed.qa_outputs.bfloat16()
    assert stoker.report(stoker.optimize(mixed)).precision == "bfloat16 and float32, as the parameters are stored"
    assert stoker.report(stoker.optimize(mixed, dtype=torch.float32)).precision == "fp32, as requested"
    mixed.bert.bfloat16()
    mixed.qa_outputs.float()
    for asked in (torch.float32, torch.bfloat16):  # the base model computes in bf16 whatever is asked for
        report = stoker.report(stoker.optimize(mixed, dtype=asked))
        assert report.precision == "bfloat16 and float32, as the parameters are stored"
    off = stoker.optimize(tiny.model("Bert", "QuestionAnswering"), dtype=torch.bfloat16, level="O0")
    assert "switched off" in stoker.report(off).precision


def test_the_report_reads_well_and_is_logged(caplog) -> None:
    with caplog.at_level(logging.INFO, "stoker"):
        model, _ = stoker.optimize(*tiny.with_optimizer())
    text = str(stoker.report(model))
    assert text in caplog.text
    for word in ("BertForQuestionAnswering", "fused layer", "2 x BertLayer", "AdamW fused", "precision", "memory"):
        assert word in text


def test_the_columns_of_a_report_are_aligned_and_a_notebook_gets_a_table() -> None:
    found = Report(
        "Model",
        (("layer", "A", 2), ("a part with a very long name", "B<C>", 120)),
        (("a call", "it is odd"),),
        "fp32",
        "",
        "",
    )
    assert str(found).splitlines() == [
        "Stoker on Model",
        "  layer                           2 x A",
        "  a part with a very long name  120 x B<C>",
        "  precision                     fp32",
        "  left alone                    a call: it is odd",
    ]
    table = found._repr_html_()
    assert table.count("<tr>") == 4
    assert "120 x B&lt;C&gt;" in table


LEAVES = (
    LeafLinear,
    LeafDropout,
    LeafLayerNorm,
    LeafEmbedding,
    LeafActivation,
)


@pytest.mark.parametrize("head", ["for tokens", "SequenceClassification", "MaskedLM"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_report_counts_the_single_modules_that_a_training_step_calls(
    family: str, head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = tiny.token_head(family) if head == "for tokens" else head
    called: dict[str, set[nn.Module]] = {}
    for leaf in LEAVES:

        def forward(self: Any, *args: Any, stock: Any = leaf.forward, part: str = leaf.stoker_part) -> Any:
            called.setdefault(part if type(self).stoker_part == part else "a head's own", set()).add(self)
            return stock(self, *args)

        monkeypatch.setattr(leaf, "forward", forward)
    model = tiny.optimized(family, head, dropout=0.1)
    tiny.loss(model, family, head).backward()
    called.pop("a head's own", None)
    reported = {
        part: count for part, _, count in stoker.report(model).applied if part in {x.stoker_part for x in LEAVES}
    }
    assert reported == {part: len(modules) for part, modules in called.items()}


def test_the_report_lists_fused_called_and_skipped_modules_separately() -> None:
    model = tiny.optimized(head="SequenceClassification", dropout=0.1)
    assert stoker.report(model).applied == (
        ("first token only", "BertForSequenceClassification", 1),
        ("padding-free base model", "BertModel", 1),
        ("fused embeddings", "BertEmbeddings", 1),
        ("fused layer", "BertLayer", 2),
        ("linear", "Linear", 2),  # pooler and classifier
        ("dropout", "Dropout", 1),
    )
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["query"], lora_dropout=0.0))
    assert ("linear", "Linear", 2) in stoker.report(wrapped).applied
    assert ("LoRA linear", "Linear", 2) in stoker.report(wrapped).applied
    assert stoker.report(wrapped).left_alone == ()
    wrapped.merge_adapter()
    assert ("linear", "Linear", 2 + 2 * 3) in stoker.report(wrapped).applied, "q, k and v are called for the sake of q"
    assert stoker.report(wrapped).left_alone == (("4 x Linear", "added after the last call of stoker.optimize"),)
    assert stoker.report(stoker.optimize(wrapped)).left_alone == ()


def test_the_report_says_what_was_switched_off_and_what_never_runs_fused() -> None:
    model = tiny.model("Bert", "MaskedLM")
    assert [why for _, why in stoker.report(model).left_alone] == [
        "stoker.optimize was not called on this model, or it was undone"
    ]
    for switches, left in (
        (
            {"unpad": False},
            ("batches with padding", "unpad=False: their attention and layers run as in stock transformers"),
        ),
        ({"fuse": False}, ("kernels", "fuse=False")),
        ({"fuse_loss": False}, ("masked-LM loss", "fuse_loss=False")),
        ({"level": "O0"}, ("everything but memory and optimizer", "unpad=False and fuse=False")),
    ):
        assert stoker.report(stoker.optimize(model, **switches)).left_alone == (left,)
    config = tiny.config("Bert")
    config.is_decoder = True
    report = stoker.report(stoker.optimize(transformers.BertLMHeadModel(config)))
    assert report.left_alone == (("every call of BertModel", "the model is a decoder"),)
    assert "fused layer" not in {part for part, _, _ in report.applied}
    assert ("linear", "Linear", 14) in report.applied
