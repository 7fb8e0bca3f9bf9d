"""The model to plan for, by name, folder or size, with rows of a typical length. Its weights are random."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

from stoker.english import with_article
from stoker.errors import UserError
from stoker.plan.sizes import SIZES
from stoker.tasks.loading import config_of, quiet, reason
from stoker.tasks.model_folder import check_folder_exists

__all__ = ["TASKS", "Subject", "ready_last", "usual_task"]

TASKS = ("qa", "classify", "sft")
_POSITIONS = 512
"""Of BERT."""
_FIRST_POSITION_IS_2 = ("roberta", "xlm-roberta", "camembert", "mpnet")
"""Models whose position table has two unused rows."""


@dataclass(frozen=True)
class Subject:
    model: str = "bert-base"
    task: str = "qa"
    length: int = 160
    lora_r: int = 0
    """The rank of LoRA adapters of every linear layer but the head; 0: all weights are trained."""
    labelled: float = 1.0
    """The share of tokens that a language model is trained on."""

    def build(self, device: str = "cpu", *, layers: int | None = None) -> Any:
        """The model in training mode; `layers` instead of its own number of them."""
        import torch
        import transformers

        quiet()
        torch.manual_seed(0)
        kinds = {
            "qa": transformers.AutoModelForQuestionAnswering,
            "classify": transformers.AutoModelForSequenceClassification,
            "sft": transformers.AutoModelForCausalLM,
        }
        config = self._config()
        if layers is not None:
            config.num_hidden_layers = layers
        try:
            with torch.device(device):
                model = kinds[self.task].from_config(config).train()
                return _adapted(model, self.lora_r) if self.lora_r else model
        except UserError:
            raise
        except Exception as error:  # a configuration can fail in many ways
            if isinstance(error, ValueError) and "Unrecognized configuration" in str(error):
                why = f"transformers has no {self.task} head for {with_article(config.model_type)}"
            else:
                why = f"its config.json does not describe a model that can be built ({reason(error)})"
            raise UserError(f"--model {self.model!r}: {why}") from None

    def check(self) -> None:
        """Raises UserError if the model cannot be used, before anything is measured."""
        longest = _longest_of_size(self.model) if self.model in SIZES else _longest(self._config())
        if self.length > longest:
            raise UserError(f"--length {self.length}: {self.model} takes rows of at most {longest} tokens")
        if self.model not in SIZES or self.lora_r:
            self.build("meta")  # needs neither time nor memory

    @property
    def identity(self) -> dict[str, Any]:
        """The cache key of a measurement. It contains config.json, since the model in a folder may change."""
        try:
            with open(os.path.join(self.model, "config.json"), encoding="utf-8") as file:
                return {**asdict(self), "config": file.read()}
        except OSError:
            return asdict(self)

    def _config(self) -> Any:
        return _config_of(self.model)

    def lengths(self, count: int, config: Any) -> Any:
        """Lengths of `count` rows, from 0.5 to 1.5 times the mean, as far as the model allows."""
        import torch

        spread = min(0.5, _longest(config) / self.length - 1)
        shares = torch.linspace(1 - spread, 1 + spread, count) if count > 1 else torch.ones(1)
        return (self.length * shares).round().long().clamp(min=min(4, self.length))

    def rows(self, count: int, seed: int, config: Any) -> dict[str, Any]:
        """A batch of random tokens."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        lengths = self.lengths(count, config)
        positions = torch.arange(int(lengths.max()))[None]
        mask = positions < lengths[:, None]
        tokens = min(2000, config.vocab_size)
        ids = torch.randint(tokens // 2, tokens, mask.shape, generator=generator) * mask
        inputs = {"input_ids": ids, "attention_mask": mask.long()}
        if self.task == "sft":
            # The end of a row is trained on, as the answer to a prompt is.
            trained = mask & (positions >= ((1 - self.labelled) * lengths)[:, None])
            return {**inputs, "labels": ids.where(trained, torch.tensor(-100))}
        if self.task == "qa":
            return {**inputs, "start_positions": lengths // 2, "end_positions": lengths // 2}
        return {**inputs, "labels": torch.arange(count) % 2}

    def memory(self, model: Any, lengths: Any) -> float:
        """Bytes that a process needs to train the model that `build` has returned, on a batch with rows of these lengths."""
        from stoker.tasks.memory_estimate import estimate

        return estimate(model, optimized=True).bytes(lengths.numpy())


def usual_task(model: str) -> str:
    """`sft` for language models, `qa` for others."""
    if model in SIZES:
        return SIZES[model][1]
    config = _config_of(model)
    from stoker.model.families import FAMILIES

    named = [str(one) for one in getattr(config, "architectures", None) or ()]
    if named:
        return "sft" if named[0].endswith(("ForCausalLM", "LMHeadModel")) else "qa"
    decoders = {row.folder for row in FAMILIES if row.causal}
    return "sft" if config.model_type.removesuffix("_text") in decoders else "qa"


def ready_last(model: Any) -> float:
    """The share of the gradients that is complete only at the end of the backward pass: those of the embeddings."""
    import torch

    embedded = {id(one.weight) for one in model.modules() if isinstance(one, torch.nn.Embedding)}
    trained = [one for one in model.parameters() if one.requires_grad]
    return float(sum(one.numel() for one in trained if id(one) in embedded) / sum(one.numel() for one in trained))


def _config_of(model: str) -> Any:
    if model in SIZES:
        import transformers

        kind, _, settings = SIZES[model]
        return transformers.AutoConfig.for_model(kind, **settings)
    try:
        check_folder_exists(model, "--model")  # before transformers is imported
        return config_of(model, flag="--model", trust_remote_code=False)
    except UserError as error:
        raise UserError(f"--model {model!r}: {error}; built-in models are {', '.join(SIZES)}") from None


def _adapted(model: Any, rank: int) -> Any:
    """The model with the adapters that `stoker train sft` gives it."""
    try:
        from peft import get_peft_model
    except ImportError:
        raise UserError("a plan with LoRA adapters needs peft: pip install 'stoker[sft]', or use --full") from None
    from stoker.tasks.sft.language_model import lora_config

    options = SimpleNamespace(lora_r=rank, lora_alpha=None, lora_dropout=0.0, lora_targets="auto")
    return get_peft_model(model, lora_config(options))


def _longest_of_size(name: str) -> int:
    """Without importing transformers: most mistakes are found before anything is loaded."""
    return int(SIZES[name][2].get("max_position_embeddings", _POSITIONS))


def _longest(config: Any) -> int:
    """The maximum number of tokens in a row."""
    positions = getattr(config, "max_position_embeddings", None) or sys.maxsize
    return int(positions) - 2 * (config.model_type in _FIRST_POSITION_IS_2)
