"""Models so narrow that arithmetic vanishes: what a step costs besides it is Python, dispatch, autograd and the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["CASES", "COMMON", "GROUPED", "IN_A_TURN", "decoder", "encoder", "step_of", "with_adapters"]

IN_A_TURN = 4
"""Steps of one side between two readings of the clock, which takes up to 0.2 ms in virtual machines."""
COMMON = {"vocab_size": 100, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
GROUPED = {**COMMON, "num_key_value_heads": 1}


def encoder(name: str, layers: int, **more: Any) -> tuple[Any, dict[str, Any]]:
    import torch
    import transformers

    config = getattr(transformers, f"{name}Config")(**COMMON, num_hidden_layers=layers, **more)
    spots = torch.tensor([1, 2])
    return getattr(transformers, f"{name}ForQuestionAnswering")(config), {
        "start_positions": spots,
        "end_positions": spots,
    }


def decoder(name: str, layers: int, head: str = "ForCausalLM", **more: Any) -> tuple[Any, dict[str, Any]]:
    import transformers

    config = getattr(transformers, f"{name}Config")(**(GROUPED if name != "GPT2" else {}), **more)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"] * layers
    made = getattr(transformers, name.removesuffix("Text") + head)(config)
    return made, {"labels": True}


def with_adapters(layers: int) -> tuple[Any, dict[str, Any]]:
    from peft import LoraConfig, get_peft_model

    made, labels = decoder("Llama", layers)
    return get_peft_model(made, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")), labels


CASES: dict[str, tuple[str, Callable[[], tuple[Any, dict[str, Any]]]]] = {
    "bert": ("BERT, 12 layers, QA", lambda: encoder("Bert", 12)),
    "modernbert": ("ModernBERT, 12 layers, QA", lambda: encoder("ModernBert", 12, pad_token_id=0)),
    "deberta": (
        "DeBERTa v3, 6 layers, QA",
        lambda: encoder(
            "DebertaV2", 6, relative_attention=True, position_buckets=6, pos_att_type=["p2c", "c2p"], share_att_key=True
        ),
    ),
    "llama": ("Llama, 30 layers", lambda: decoder("Llama", 30)),
    "llama-lora": ("Llama, 30 layers, LoRA on all linear layers", lambda: with_adapters(30)),
    "gemma3": ("Gemma 3, 18 layers", lambda: decoder("Gemma3Text", 18, head="ForCausalLM", head_dim=16)),
    "gpt2": ("GPT-2, 12 layers", lambda: decoder("GPT2", 12, head="LMHeadModel", n_embd=32, n_head=2, vocab_size=100)),
    "granite": ("Granite, 12 layers (not in the table)", lambda: decoder("Granite", 12)),
}  # fmt: skip


def step_of(
    model: Any, labels: dict[str, Any], clip: Callable[..., Any], optimizer: Any, autocast: bool = False
) -> Callable[[], None]:
    import torch

    ids = torch.randint(4, 100, (2, 8), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1] * 8, [1] * 5 + [0] * 3])
    inputs = {"input_ids": ids, "attention_mask": mask, **labels}
    if labels.get("labels") is True:
        inputs["labels"] = ids.masked_fill(mask == 0, -100)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(**inputs).loss
        loss.backward()
        clip(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step
