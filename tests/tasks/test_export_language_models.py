"""Language models as GGUF and safetensors: read back, they compute what the original computes, with adapters merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from stoker.cli import main
from stoker.tasks.sft.language_model import load_for_chat
from tasks.language_models import save_tiny_llama, tokenizer


def save_tiny_qwen(folder: Path) -> Path:
    """With biases and an output layer of its own, which the tiny Llama does not have."""
    torch.manual_seed(0)
    words = tokenizer()
    config = transformers.Qwen2Config(
        vocab_size=len(words) + 8, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=96, max_position_embeddings=128, tie_word_embeddings=False, eos_token_id=words.eos_token_id,
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config)
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(1, 61).reshape(3, 20)
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids).logits
    return found


@pytest.mark.parametrize("save", [save_tiny_llama, save_tiny_qwen])
@pytest.mark.parametrize(("words", "near"), [((), 2e-3), (("--int8",), 0.1)])
def test_a_gguf_file_gives_the_logits_and_tokens_of_the_model(
    save: Any, words: tuple[str, ...], near: float, tmp_path: Path
) -> None:
    source = save(tmp_path / "model")
    assert main(["export", str(source), "--to", "gguf", *words]) == 0
    stock, found = load_for_chat(str(source)), load_for_chat(str(source / ("gguf-int8" if words else "gguf")))
    expected = logits(stock.model)
    assert float((logits(found.model) - expected).abs().max()) < near * float(expected.abs().max())
    text = "<|im_start|>user\nWhich colour has thing 12?<|im_end|>\n"
    assert found.tokenizer(text)["input_ids"] == stock.tokenizer(text)["input_ids"]
    assert found.tokenizer.chat_template == stock.tokenizer.chat_template
    assert found.tokenizer.eos_token_id == stock.tokenizer.eos_token_id


@pytest.mark.parametrize("to", ["gguf", "safetensors"])
def test_an_adapter_is_merged_first(to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from peft import LoraConfig, get_peft_model

    base = save_tiny_llama(tmp_path / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    tokenizer().save_pretrained(tmp_path / "adapter")
    assert main(["export", str(tmp_path / "adapter"), "--to", to, "--output_dir", str(tmp_path / "served")]) == 0
    sizes = json.loads((tmp_path / "served" / "export.json").read_text())["comparison"]
    assert sizes["before"]["size"] > (tmp_path / "base" / "model.safetensors").stat().st_size, (
        "an adapter is no model without its base"
    )
    assert sizes["after"]["size"] < 1.2 * sizes["before"]["size"]
    found = logits(load_for_chat(str(tmp_path / "served")).model)
    torch.testing.assert_close(found, logits(adapted), rtol=1e-2, atol=1e-2)
    assert (found - logits(transformers.AutoModelForCausalLM.from_pretrained(base))).abs().max() > 0.1
    if to == "safetensors":
        assert not (tmp_path / "served" / "adapter_config.json").exists()
    capsys.readouterr()
    assert main(["chat", "--model", str(tmp_path / "served"), "--prompt", "Hello", "--max_new_tokens", "3"]) == 0


@pytest.mark.parametrize(
    ("to", "message"),
    [
        ("gguf", "is of the architecture gpt2, which cannot be written as GGUF here; known are llama, qwen2, qwen3"),
        ("onnx", "is a language model; --to onnx is for encoders, use --to gguf or safetensors"),
    ],
)
def test_an_architecture_that_the_target_does_not_know_is_named(
    to: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = tokenizer()
    config = transformers.GPT2Config(vocab_size=len(words), n_embd=32, n_layer=1, n_head=2, n_positions=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    words.save_pretrained(tmp_path / "gpt2")
    assert main(["export", str(tmp_path / "gpt2"), "--to", to]) == 2
    assert message in capsys.readouterr().err
    assert not any(path.is_dir() for path in (tmp_path / "gpt2").iterdir())


def test_a_tokenizer_without_merges_is_refused_as_gguf(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save_tiny_llama(tmp_path / "model")
    words = json.loads((source / "tokenizer.json").read_text())
    words["model"] |= {"merges": [], "vocab": {one: n for one, n in words["model"]["vocab"].items() if len(one) == 1}}
    (source / "tokenizer.json").write_text(json.dumps(words))
    assert main(["export", str(source), "--to", "gguf"]) == 2
    assert "has no merges, without which llama.cpp loads no byte-level BPE tokenizer" in capsys.readouterr().err
    assert not (source / "gguf").exists()
