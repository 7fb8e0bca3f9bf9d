"""Models that bitsandbytes has quantized to 4 bits stay as it stores them, and their layers are fused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import tiny_decoders as tiny
import tiny_models
import torch
import transformers

import stoker
from stoker.kernels.quantized import dequantize
from stoker.model.adapters import read_linear

peft = pytest.importorskip("peft")
pytest.importorskip("bitsandbytes", reason="needs the extra qlora")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny.config("Qwen2")
    config.hidden_size, config.intermediate_size, config.head_dim = 128, 192, 32
    made = tmp_path_factory.mktemp("bitsandbytes")
    tiny.shaken(transformers.AutoModelForCausalLM.from_config(config)).save_pretrained(made)
    return made


def loaded(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype, **options}
    quantization = transformers.BitsAndBytesConfig(load_in_4bit=True, **options)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=quantization, dtype=dtype, device_map="cpu"
    )
    torch.manual_seed(3)
    targets = peft.LoraConfig(r=4, lora_alpha=6, init_lora_weights=False, target_modules="all-linear")
    return peft.get_peft_model(model.train(), targets)


@pytest.mark.parametrize("nested", [False, True])
def test_loss_and_gradients_are_those_of_bitsandbytes(folder: Path, nested: bool) -> None:
    stock = loaded(folder, bnb_4bit_use_double_quant=nested)
    model = stoker.optimize(copy.deepcopy(stock))
    report = stoker.report(model)
    assert ("LoRA linear", "Linear4bit", 14) in report.applied
    assert report.frozen_weights.startswith("14 in nf4 by bitsandbytes (")
    batch = tiny.batch("left")
    loss, _, gradients = tiny.truth(stock, batch)
    actual = model(**batch, use_cache=False).loss
    actual.backward()
    torch.testing.assert_close(actual.detach(), loss, rtol=1e-4, atol=1e-5)
    assert all("lora_" in name for name in gradients)
    tiny_models.assert_same_gradients(tiny_models.gradients(model), gradients)


def test_bf16_models_train_their_adapters(folder: Path) -> None:
    stock = loaded(folder, torch.bfloat16)
    model = stoker.optimize(copy.deepcopy(stock))
    batch = tiny.batch()
    loss, _, gradients = tiny.truth(stock, batch)
    actual = model(**batch, use_cache=False).loss
    actual.backward()
    torch.testing.assert_close(actual.detach().float(), loss.float(), rtol=0.05, atol=0.05)
    found = tiny_models.gradients(model)
    mine, theirs = (
        torch.cat([one[name].float().flatten() for name in sorted(gradients)]) for one in (found, gradients)
    )
    assert torch.cosine_similarity(mine, theirs, dim=0) > 0.98


def test_codes_are_read_where_they_are(folder: Path) -> None:
    layer = loaded(folder).base_model.model.model.layers[0].mlp.up_proj
    parts = read_linear(layer)
    assert parts is not None
    assert parts.weight.codes.data_ptr() == layer.base_layer.weight.data_ptr()
    functional = pytest.importorskip("bitsandbytes.functional")
    want = functional.dequantize_4bit(layer.base_layer.weight.data, layer.base_layer.weight.quant_state)
    torch.testing.assert_close(dequantize(parts.weight), want, rtol=1e-6, atol=1e-8)


def test_other_formats_of_bitsandbytes_are_called(folder: Path) -> None:
    stock = loaded(folder, bnb_4bit_quant_type="fp4")
    model = stoker.optimize(copy.deepcopy(stock))
    assert "LoRA linear" not in {part for part, _, _ in stoker.report(model).applied}
    batch = tiny.batch()
    loss, _, gradients = tiny.truth(stock, batch)
    actual = model(**batch, use_cache=False).loss
    actual.backward()
    torch.testing.assert_close(actual.detach(), loss, rtol=1e-4, atol=1e-5)
    tiny_models.assert_same_gradients(tiny_models.gradients(model), gradients)


def test_embeddings_and_head_can_be_stored_beside_it(folder: Path) -> None:
    model = stoker.optimize(loaded(folder), frozen_weights="nf4")
    assert "2 in bfloat16" in stoker.report(model).frozen_weights
    assert "14 in nf4 by bitsandbytes" in stoker.report(model).frozen_weights
    model(**tiny.batch(), use_cache=False).loss.backward()
