"""Tiny random language models of every decoder family, batches for them, and the truth: stock, one example at a time."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from tiny_models import VOCABULARY, gradients
from torch import Tensor, nn

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2}
_GEMMA = {**_GROUPED, "head_dim": 16, "sliding_window": 4, "query_pre_attn_scalar": 12}
_TYPES = {"layer_types": ["sliding_attention", "full_attention"]}

CONFIGS = {
    "Llama": lambda: transformers.LlamaConfig(**_GROUPED, attention_bias=True, mlp_bias=True),
    "Qwen2": lambda: transformers.Qwen2Config(**_GROUPED, **_TYPES, use_sliding_window=True, sliding_window=4),
    "Qwen3": lambda: transformers.Qwen3Config(**_GROUPED, head_dim=16),
    "Mistral": lambda: transformers.MistralConfig(**_GROUPED, sliding_window=4),
    "Gemma2": lambda: transformers.Gemma2Config(**_GEMMA, attn_logit_softcapping=5.0, final_logit_softcapping=3.0),
    "Gemma3": lambda: transformers.Gemma3TextConfig(**_GEMMA, **_TYPES),
    "Phi3": lambda: transformers.Phi3Config(**_GROUPED, rope_parameters=_partial(0.5)),
    "Olmo2": lambda: transformers.Olmo2Config(**_GROUPED),
    "GPT2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
    ),
    "GPTNeoX": lambda: transformers.GPTNeoXConfig(**_COMMON, rope_parameters=_partial(0.5)),
    "GPTNeoX, sequential": lambda: transformers.GPTNeoXConfig(**_COMMON, use_parallel_residual=False),
}
DROPOUTS = ("attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout", "classifier_dropout")
LENGTHS = (7, 12, 1, 9)


def _partial(factor: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": factor}


def config(family: str, dropout: float = 0.0) -> Any:
    made = CONFIGS[family]()
    for name in DROPOUTS:
        if hasattr(made, name):
            setattr(made, name, dropout)
    return made


def model(
    family: str, dropout: float = 0.0, auto: Any = transformers.AutoModelForCausalLM, **options: Any
) -> nn.Module:
    torch.manual_seed(0)
    return shaken(auto.from_config(config(family, dropout), **options))


def shaken(made: nn.Module) -> nn.Module:
    """Stock initialization is so uniform that errors would stay small."""
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return made.train()


def batch(side: str = "right", lengths: tuple[int, ...] = LENGTHS) -> dict[str, Tensor]:
    """Padded rows; the last half of each is labelled."""
    generator = torch.Generator().manual_seed(1)
    width = max(lengths) + 2
    ids = torch.zeros(len(lengths), width, dtype=torch.int64)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, length in enumerate(lengths):
        offset = {"right": 0, "left": width - length, "both": 1}[side]
        ids[row, offset : offset + length] = torch.randint(5, VOCABULARY, (length,), generator=generator)
        mask[row, offset : offset + length] = 1
        first = offset + max(1, length // 2)  # nothing predicts the first token
        labels[row, first : offset + length] = ids[row, first : offset + length]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def examples(padded: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """The rows of a batch, without padding and mask."""
    rows = []
    for row, real in enumerate(padded["attention_mask"].bool()):
        rows.append({name: padded[name][row][real].unsqueeze(0) for name in ("input_ids", "labels")})
    return rows


def flattened(padded: dict[str, Tensor]) -> dict[str, Tensor]:
    """One row with restarting positions, as DataCollatorWithFlattening makes it."""
    rows = examples(padded)
    joined = {name: torch.cat([row[name] for row in rows], dim=1) for name in ("input_ids", "labels")}
    positions = torch.cat([torch.arange(row["input_ids"].shape[1]) for row in rows])
    return {**joined, "position_ids": positions.unsqueeze(0)}


def truth(stock: nn.Module, padded: dict[str, Tensor]) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """Loss, logits per example and gradients of the stock model, run example by example without padding."""
    stock = copy.deepcopy(stock)
    items = (padded["labels"] != -100).sum()
    loss, logits = torch.zeros(()), []
    for row in examples(padded):
        output = stock(**row, num_items_in_batch=items, use_cache=False)
        logits.append(output.logits.detach())
        loss = loss + output.loss
    loss.backward()
    return loss.detach(), logits, gradients(stock)
