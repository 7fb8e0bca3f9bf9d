"""Sizes of well-known models, for plans that need no files: the type of each in transformers, and what its config.json says."""

from __future__ import annotations

from typing import Any

__all__ = ["SIZES", "Size"]

Size = tuple[str, str, dict[str, Any]]
"""Model type, the task that it is planned for unless another is named, and settings of the configuration."""


def _bert(layers: int, width: int, heads: int) -> Size:
    settings = {
        "vocab_size": 30522, "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
        "intermediate_size": 4 * width,
    }  # fmt: skip
    return "bert", "qa", settings


def _decoder(
    kind: str, vocabulary: int, layers: int, width: int, inner: int, heads: int, kv_heads: int, positions: int
) -> Size:
    settings = {
        "vocab_size": vocabulary, "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": inner, "max_position_embeddings": positions,
        "tie_word_embeddings": True,
    }  # fmt: skip
    return kind, "sft", settings


SIZES: dict[str, Size] = {
    "bert-base": _bert(12, 768, 12),
    "bert-large": _bert(24, 1024, 16),
    "distilbert": ("distilbert", "qa", {"dim": 768, "n_layers": 6, "n_heads": 12, "hidden_dim": 3072}),
    "minilm": _bert(6, 384, 12),
    "bert-tiny": _bert(2, 128, 2),
    "smollm2-135m": _decoder("llama", 49152, 30, 576, 1536, 9, 3, 8192),
    "smollm2-360m": _decoder("llama", 49152, 32, 960, 2560, 15, 5, 8192),
    "qwen2.5-0.5b": _decoder("qwen2", 151936, 24, 896, 4864, 14, 2, 32768),
    "llama-3.2-1b": _decoder("llama", 128256, 16, 2048, 8192, 32, 8, 131072),
}
