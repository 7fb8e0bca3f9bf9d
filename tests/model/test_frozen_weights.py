"""Models with frozen weights in bf16, 8 or 4 bits train as stock models with the widened weights do, in less memory."""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_decoders as tiny
import tiny_models
import torch
import torch.distributed as dist
import transformers
from torch import nn

import stoker
from rig import warm
from stoker.distributed.local_sgd import LocalSGD
from stoker.kernels.frozen_parameter import FORMS, FrozenWeight, Stored, stored_bytes
from stoker.kernels.lora import lora_linear_packed
from stoker.model import layer_parts, layer_program

peft = pytest.importorskip("peft")

each_form = pytest.mark.parametrize("form", FORMS)
DECODERS = ["Llama", "Qwen2", "Gemma3", "GPT2", "Phi3"]


def adapted(model: Any, **options: Any) -> Any:
    gpt2 = type(model).__name__.startswith("GPT2")
    targets = ["c_attn", "c_proj", "c_fc"] if gpt2 else "all-linear"
    options = {"r": 4, "lora_alpha": 6, "init_lora_weights": False, "fan_in_fan_out": gpt2, **options}
    torch.manual_seed(3)
    return peft.get_peft_model(model, peft.LoraConfig(**{"target_modules": targets, **options}))


def pair(form: str, family: str = "Llama", model: Any = None, dtype: Any = None, **options: Any) -> tuple[Any, Any]:
    """A stock model with the widened weights, and the optimized model whose weights are stored."""
    stock = adapted(model or tiny.model(family), **options)
    optimized = stoker.optimize(copy.deepcopy(stock), dtype=dtype, frozen_weights=form)
    for mine, theirs in zip(optimized.parameters(), stock.parameters(), strict=True):
        if isinstance(mine, FrozenWeight):
            theirs.data = mine.stored.values(torch.float32)
    return stock, optimized


def stored(model: nn.Module) -> list[FrozenWeight]:
    return [parameter for parameter in model.parameters() if isinstance(parameter, FrozenWeight)]


def assert_same_step(stock: Any, model: Any, batch: dict[str, torch.Tensor], tolerance: float = 1e-4) -> None:
    loss, logits, gradients = tiny.truth(stock, batch)
    output = model(**batch, use_cache=False)
    output.loss.backward()
    torch.testing.assert_close(output.loss.detach(), loss, rtol=tolerance, atol=1e-5)
    for row, want in zip(range(len(logits)), logits, strict=True):
        real = batch["attention_mask"][row].bool()
        torch.testing.assert_close(output.logits[row][real].detach(), want[0], rtol=1e-3, atol=tolerance)
    assert all("lora_" in name for name in gradients)
    tiny_models.assert_same_gradients(tiny_models.gradients(model), gradients, tolerance)


@each_form
@pytest.mark.parametrize("family", DECODERS)
def test_loss_logits_and_gradients_are_those_of_stock_with_the_widened_weights(family: str, form: str) -> None:
    stock, model = pair(form, family)
    fused = [one for _, _, one in stoker.report(model).applied]
    assert fused
    assert {one.stored.form for one in stored(model)} == {form, "bfloat16"}
    assert_same_step(stock, model, tiny.batch("left"))
    assert {one.stored.form for one in stored(model)} == {form, "bfloat16"}, "a step widens nothing for good"


@pytest.mark.parametrize(
    "options", [{"use_dora": True}, {"lora_dropout": 0.2}, {"target_modules": ["q_proj"]}], ids=str
)
def test_adapters_that_are_called_and_layers_without_adapters(options: dict[str, Any]) -> None:
    stock, model = pair("nf4", **options)
    assert_same_step(stock.eval(), model.eval(), tiny.batch())


def test_activation_checkpointing_gives_the_same_gradients() -> None:
    _, model = pair("nf4")
    batch = tiny.batch()
    model(**batch, use_cache=False).loss.backward()
    want = tiny_models.gradients(model)
    model.zero_grad()
    model.base_model.model.gradient_checkpointing_enable({"use_reentrant": False})
    model(**batch, use_cache=False).loss.backward()
    tiny_models.assert_same_gradients(tiny_models.gradients(model), want, 1e-6)


@each_form
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_activations_keep_the_precision_that_was_asked_for(
    form: str, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set()

    def spy(x: torch.Tensor, *args: Any) -> torch.Tensor:
        seen.add(x.dtype)
        return lora_linear_packed(x, *args)

    monkeypatch.setattr(layer_parts, "lora_linear_packed", spy)
    monkeypatch.setenv(layer_program.SWITCH, "0")
    stock, model = pair(form, dtype=dtype)
    model(**tiny.batch(), use_cache=False).loss.backward()
    assert seen == {dtype or torch.float32}
    found, want = tiny_models.gradients(model), tiny.truth(stock, tiny.batch())[2]
    mine, theirs = (torch.cat([one[name].flatten() for name in sorted(want)]) for one in (found, want))
    assert torch.cosine_similarity(mine, theirs, dim=0) > 0.99


@each_form
def test_encoders_store_their_layers_and_keep_their_embeddings(form: str) -> None:
    head = "SequenceClassification"
    stock, model = pair(form, model=tiny_models.model("Bert", head), target_modules=["query", "value", "dense"])
    assert {one.stored.form for one in stored(model)} == {form}
    assert not any("embeddings" in name for name, one in model.named_parameters() if isinstance(one, FrozenWeight))
    full = tiny_models.batch("Bert", head)
    loss, _, gradients = tiny_models.truth(stock, head, full)
    actual = model(**full.kwargs).loss
    actual.backward()
    torch.testing.assert_close(actual.detach(), loss, rtol=1e-4, atol=1e-5)
    tiny_models.assert_same_gradients(tiny_models.gradients(model), gradients)


@each_form
@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_generation_with_a_cache_runs_as_stock_with_the_widened_weights(family: str, form: str) -> None:
    stock, model = pair(form, family)
    ids = torch.tensor([[5, 9, 12, 40, 7]])
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.eval().generate(input_ids=ids, **options), stock.eval().generate(input_ids=ids, **options))
    with torch.no_grad(), model.disable_adapter(), stock.disable_adapter():
        torch.testing.assert_close(model(ids).logits, stock(ids).logits, rtol=1e-4, atol=1e-4)


# --- code that reads or writes weights


@each_form
@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_a_merged_model_has_the_widened_weights_plus_the_adapters(family: str, safe: bool, form: str) -> None:
    stock, model = pair(form, family)
    merged, want = model.merge_and_unload(safe_merge=safe), stock.merge_and_unload()
    found = dict(merged.named_parameters())
    for name, parameter in want.named_parameters():
        torch.testing.assert_close(found[name].detach().clone(), parameter.detach(), rtol=1e-5, atol=1e-6)


def test_saving_an_adapter_widens_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, model = pair("nf4")
    monkeypatch.setattr(Stored, "values", lambda *_: pytest.fail("widened"))
    model.save_pretrained(tmp_path / "mine")
    stock.save_pretrained(tmp_path / "stock")
    mine, theirs = ((tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("mine", "stock"))
    assert mine == theirs


@each_form
def test_a_saved_model_has_the_widened_weights(form: str, tmp_path: Path) -> None:
    model = tiny.model("Gemma3").requires_grad_(False)
    stoker.optimize(model, frozen_weights=form)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.detach().clone(), dict(loaded.named_parameters())[name])


@each_form
def test_restore_gives_ordinary_parameters_back(form: str) -> None:
    stock, model = pair(form, "Gemma3")
    before = dict(model.named_parameters())
    stoker.restore(model)
    assert dict(model.named_parameters()).keys() == before.keys()
    for (name, parameter), want in zip(model.named_parameters(), stock.parameters(), strict=True):
        assert parameter is before[name]
        assert type(parameter) is nn.Parameter
        assert torch.equal(parameter, want)
    assert "frozen" not in str(stoker.report(model))
    assert not any("ddp" in name for name in vars(model))


# --- what is stored


def test_tied_embeddings_stay_one_parameter_in_bf16() -> None:
    _, model = pair("nf4", "Gemma3")
    causal = model.base_model.model
    assert causal.lm_head.weight is causal.model.embed_tokens.weight
    assert causal.lm_head.weight.stored.form == "bfloat16"


def test_trained_weights_adapters_norms_and_biases_are_not_stored() -> None:
    stock = adapted(tiny.model("Qwen2"))
    stock.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"]))  # inactive, so frozen
    for name, parameter in stock.named_parameters():
        if "layers.1." in name and "down_proj" in name:
            parameter.requires_grad_(True)
    model = stoker.optimize(stock, frozen_weights="int8")
    names = [name for name, parameter in model.named_parameters() if isinstance(parameter, FrozenWeight)]
    assert len(names) == 2 * 7 - 1 + 2
    assert not [name for name in names if "lora_" in name or "norm" in name or "bias" in name or "1.mlp.down" in name]


def test_a_second_call_keeps_or_changes_the_form(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = pair("int8")
    before = [one.stored for one in stored(model)]
    with monkeypatch.context() as patched:
        patched.setattr(Stored, "values", lambda *_: pytest.fail("widened"))
        for form in (None, "int8"):
            stoker.optimize(model, frozen_weights=form)
            assert all(one.stored is old for one, old in zip(stored(model), before, strict=True))
    stoker.optimize(model, frozen_weights="nf4")
    assert {one.stored.form for one in stored(model)} == {"nf4", "bfloat16"}


@pytest.mark.parametrize(("form", "bytes_per_weight"), [("bfloat16", 2.0), ("int8", 1.1), ("nf4", 0.57)])
def test_the_report_says_what_is_stored_how_and_what_it_saves(form: str, bytes_per_weight: float) -> None:
    stock = adapted(tiny.model("Llama"))
    total = sum(map(stored_bytes, stock.parameters()))
    model = stoker.optimize(stock, frozen_weights=form)
    saved = total - sum(map(stored_bytes, model.parameters()))
    layers = [one for one in stored(model) if one.stored.form == form]
    assert sum(map(stored_bytes, layers)) <= bytes_per_weight * sum(one.numel() for one in layers) * 1.05
    text = stoker.report(model).frozen_weights
    assert f"{len(layers)} in {form} (" in text
    assert text.endswith(f": {saved / 1e3:,.0f} kB saved")
    assert text in str(stoker.report(model))


def test_what_was_not_stored_is_reported() -> None:
    model = nn.Sequential(nn.Linear(8, 7), nn.Linear(7, 4)).requires_grad_(False)
    left = stoker.report(stoker.optimize(model, frozen_weights="nf4")).left_alone
    assert ("the weights of 2 x Linear", "its size is odd") in left
    trained = stoker.optimize(tiny.model("Llama"), frozen_weights="nf4")
    what, why = stoker.report(trained).left_alone[-1]
    assert (what, why.partition(";")[0]) == ("frozen_weights='nf4'", "no weight is frozen")
    with pytest.raises(ValueError, match="frozen_weights is 'fp4'; choose one of bfloat16, int8, nf4, or None"):
        stoker.optimize(model, frozen_weights="fp4")


_PEAK = """
import sys
import torch, transformers, peft, stoker

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024

torch.manual_seed(0)
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
    vocab_size=512, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8))
model = peft.get_peft_model(model.train(), peft.LoraConfig(r=4, target_modules="all-linear"))
weights = sum(p.numel() for p in model.parameters()) * 4
stoker.optimize(model, frozen_weights=None if sys.argv[1] == "none" else sys.argv[1])
open("/proc/self/clear_refs", "w").write("5")  # the peak starts here
ids = torch.randint(10, 500, (2, 16))
for _ in range(2):
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
print(weights, peak())
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs /proc/self/clear_refs")
def test_the_peak_of_a_training_step_falls_by_what_is_saved() -> None:
    found = {}
    for form in ("none", "nf4"):
        done = warm.run(
            [sys.executable, "-c", _PEAK, form], capture_output=True, text=True, check=True, transformers=True,
            env={**os.environ, "STOKER_LINEAR_ENGINE": "torch"},
        )  # fmt: skip
        weights, found[form] = map(int, done.stdout.split())
    # 4 to 0.56 bytes per weight, less the buffer for widened weights; the rest is for what the allocator keeps
    assert found["none"] - found["nf4"] > 0.6 * weights


# --- several processes


@pytest.fixture
def one_rank(tmp_path: Path) -> Any:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ddp_does_not_send_stored_weights(one_rank: None) -> None:
    stock, model = pair("nf4")
    nn.parallel.DistributedDataParallel(model)(**tiny.batch(), use_cache=False).loss.backward()
    tiny_models.assert_same_gradients(tiny_models.gradients(model), tiny.truth(stock, tiny.batch())[2])
    assert stored(model)


def test_local_sgd_does_not_send_stored_weights(one_rank: None) -> None:
    _, model = pair("nf4")
    LocalSGD(model, 2)
    assert stored(model)
