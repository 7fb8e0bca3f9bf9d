"""Batches and losses of language models with random weights and real token counts, padded or flattened, full or with LoRA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stoker.bench.trainer_step import LossOf

__all__ = ["Case", "Rows", "batch", "build_model", "loss_of"]

Rows = tuple[tuple[int, int], ...]
"""Tokens of each row, and how many of them, the last ones, have a label."""


@dataclass(frozen=True)
class Case:
    title: str
    model: str
    lora: bool
    batches: tuple[Rows, ...]
    pad_to: int | None = None
    layers: int | None = None
    """None: all of the model's."""


MODELS: dict[str, dict[str, Any]] = {
    "smollm2": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
    },
    "qwen2.5": {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "tiny": {
        "vocab_size": 40000,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
    },
}
"""The sizes of SmolLM2-135M (the architecture of Llama) and of Qwen2.5-0.5B, and one for tests."""


def build_model(case: Case) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {**MODELS[case.model], "tie_word_embeddings": True}
    if case.layers:
        sizes["num_hidden_layers"] = case.layers
    qwen = case.model == "qwen2.5"
    model = Qwen2ForCausalLM(Qwen2Config(**sizes)) if qwen else LlamaForCausalLM(LlamaConfig(**sizes))
    if case.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    return model


def batch(case: Case, number: int, flat: bool) -> dict[str, Any]:
    """Random tokens; padded rows, or one row with restarting positions."""
    import torch

    rows = case.batches[number % len(case.batches)]
    generator = torch.Generator().manual_seed(number)
    texts = [torch.randint(10, 40000, (tokens,), generator=generator) for tokens, _ in rows]
    labels = [
        torch.cat([torch.full((len(text) - answer,), -100), text[len(text) - answer :]])
        for text, (_, answer) in zip(texts, rows, strict=True)
    ]
    if flat:
        for label in labels:
            label[0] = -100
        positions = torch.cat([torch.arange(len(text)) for text in texts])
        return {
            "input_ids": torch.cat(texts)[None],
            "labels": torch.cat(labels)[None],
            "position_ids": positions[None],
            "use_cache": False,
        }
    width = case.pad_to or max(len(text) for text in texts)

    def padded(values: list[Any], fill: int) -> Any:
        return torch.stack([torch.nn.functional.pad(one, (0, width - len(one)), value=fill) for one in values])

    mask = padded([torch.ones_like(text) for text in texts], 0)
    return {
        "input_ids": padded(texts, 0),
        "labels": padded(labels, -100),
        "attention_mask": mask,
        "use_cache": False,
    }


def loss_of(case: Case, flat: bool) -> LossOf:
    return lambda model, number: model(**batch(case, number, flat)).loss
