"""Loads language models from the hub, a folder, a GGUF file or an adapter's folder, and gives them LoRA adapters."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.bounded import OutOfBounds, bounded
from stoker.english import with_article
from stoker.errors import UserError
from stoker.kernels.frozen_parameter import Form
from stoker.model.frozen_weights import store_frozen
from stoker.tasks.loading import (
    check_vocabulary,
    config_of,
    load_config,
    load_model,
    load_tokenizer,
    loaded,
    model_of,
    reason,
    tokenizer_of,
)
from stoker.tasks.model_folder import ADAPTER, broken_file, check_language_model, check_no_adapter, gguf_file

__all__ = [
    "LanguageModel", "base_of", "empty_with_adapters", "load_for_chat", "load_for_training", "lora_config", "save_merged",
]  # fmt: skip

log = logging.getLogger("stoker")


@dataclass(frozen=True)
class LanguageModel:
    tokenizer: Any
    model: Any


def load_for_training(options: Any, frozen_weights: Form | None = None) -> LanguageModel:
    """The model that --model_name_or_path names, in fp32; with `frozen_weights`, frozen and stored in that form.

    It is stored as soon as it is loaded, so that a model whose files are bf16 never takes four bytes per weight.
    """
    from transformers import AutoModelForCausalLM

    name = options.model_name_or_path
    if (file := gguf_file(name)) is not None:
        found = _load_gguf(file, "--model_name_or_path")
        _freeze(found.model, frozen_weights)
        return found
    check_language_model(name, "--model_name_or_path")
    check_no_adapter(name)
    config, tokenizer = load_config(options), load_tokenizer(options)
    check_vocabulary(tokenizer, config, name)
    model = load_model(AutoModelForCausalLM, options, config, lambda read: _freeze(read, frozen_weights))
    if os.path.isdir(name):
        model.config.name_or_path = os.path.abspath(name)  # PEFT writes it into the adapter, which may be moved
    return LanguageModel(tokenizer, model)


def _freeze(model: Any, form: Form | None) -> None:
    if form is not None:
        import torch

        for what, why in store_frozen(model.requires_grad_(False), form, torch.float32):
            log.warning("--frozen_weights %s does not apply to %s: %s", form, what, why)


def load_for_chat(name: str) -> LanguageModel:
    """The model that --model names; for the folder of an adapter, its base model with the adapter merged into it."""
    from transformers import AutoModelForCausalLM

    if (file := gguf_file(name)) is not None:
        return _load_gguf(file, "--model")
    check_language_model(name, "--model")
    if (Path(name) / ADAPTER).is_file():
        return _load_adapter(Path(name))
    settings: dict[str, Any] = {"flag": "--model", "trust_remote_code": False}
    config = config_of(name, **settings)
    _require_language_model(config, name)
    tokenizer = tokenizer_of(name, **settings)
    check_vocabulary(tokenizer, config, name)
    model, missing = model_of(AutoModelForCausalLM, name, config, what="language model", **settings)
    if (lacks := _missing_head(model, missing)) is not None:
        raise UserError(
            f"{name} is not a language model: it has no {lacks}; `stoker use --model {name}` tries other models"
        )
    return LanguageModel(tokenizer, model.eval())


def _require_language_model(config: Any, name: str) -> None:
    """UserError for a model that was trained for something else; transformers would give it a new head and talk nonsense."""
    from stoker.tasks.use.model_kind import KINDS, kind_of_class

    architecture = next(iter(config.architectures or ()), "")
    kind = kind_of_class(architecture)
    if kind not in ("", "chat", "embed"):  # "embed": without a head, or with one that shares the embeddings' weights
        raise UserError(
            f"{name} is not a language model: it is {with_article(architecture)}, which {KINDS[kind]}; "
            f"use it with `stoker use --model {name}`"
        )


def _missing_head(model: Any, missing: Sequence[str]) -> str | None:
    """A weight of the head that the files did not contain; None if they have all, or if the embeddings serve as the head."""
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    prefix = f"{model.base_model_prefix}."
    return next((one for one in sorted(missing) if one not in tied and not one.startswith(prefix)), None)


def _load_adapter(folder: Path) -> LanguageModel:
    try:
        from peft import PeftModel
    except ImportError:
        raise UserError(f"{folder} is an adapter, which needs peft: pip install 'stoker[sft]'") from None
    base = base_of(folder)
    if (Path(base) / ADAPTER).is_file():
        raise UserError(f"the base model of {folder} is {base}, which is an adapter itself; that is not supported")
    try:
        model = load_for_chat(base).model
    except UserError as error:
        raise UserError(f"the base model of the adapter {folder} cannot be loaded: {error}") from None
    _check_modules(folder, model)
    merged = loaded(_MergedInto(PeftModel, model), "adapter", str(folder), flag="--model")
    return LanguageModel(tokenizer_of(str(folder), flag="--model", trust_remote_code=False), merged.eval())


@dataclass(frozen=True)
class _MergedInto:
    """Loads an adapter and merges it into one base model; with the signature that `loaded` expects."""

    kind: Any
    model: Any
    __name__ = "PeftModel"

    def from_pretrained(self, name: str, **options: Any) -> Any:
        from peft import PeftConfig

        config = PeftConfig.from_pretrained(name, **options)
        if config.is_prompt_learning:
            raise UserError(
                f"the adapter {name} learns a prompt ({config.peft_type.value}), which cannot be merged into the weights of a "
                "model; use an adapter such as LoRA"
            )
        return self.kind.from_pretrained(self.model, name, config=config, **options).merge_and_unload()


def base_of(folder: Path) -> str:
    """The base model that an adapter names."""
    base = _read_config(folder).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise UserError(f"{ADAPTER} in {folder} does not name its base model (base_model_name_or_path)")
    return base


def _read_config(folder: Path) -> dict[str, Any]:
    if (broken := broken_file(folder, [ADAPTER])) is not None:
        raise UserError(f"no adapter can be loaded from the folder {folder}: {broken}")
    config: dict[str, Any] = json.loads((folder / ADAPTER).read_bytes())
    return config


_PATTERN_MEMORY = 1 << 30


def _check_modules(folder: Path, model: Any) -> None:
    """Raises UserError for repeated layers, which PEFT would merge wrongly, and for patterns that never end."""
    config = _read_config(folder)
    if config.get(
        "layer_replication"
    ):  # the copies share their weights, so each would add its own change to all of them
        raise UserError(
            f"the adapter {folder} repeats layers of its base model (layer_replication in {ADAPTER}), so it cannot be merged "
            "into it; use an adapter without"
        )
    patterns = [config[one] for one in ("target_modules", "exclude_modules") if isinstance(config.get(one), str)]
    for one in ("rank_pattern", "alpha_pattern"):
        patterns += config[one] if isinstance(config.get(one), dict) else []
    names = [name for name, _ in model.named_modules()]

    def match() -> None:
        for pattern, name in itertools.product(patterns, names):
            re.match(rf"(.*\.)?({pattern})$", name)

    try:
        bounded(match, memory=_PATTERN_MEMORY, timed=True)
    except OutOfBounds as limit:
        raise UserError(f"the adapter {folder} cannot be used: finding its modules by {ADAPTER} {limit}") from None
    except (re.error, RecursionError, OverflowError):
        pass  # PEFT reports it


def _load_gguf(file: Path, flag: str) -> LanguageModel:
    """The model of a GGUF file in fp32, as transformers widens it.

    `save_pretrained` refuses a model whose configuration says that it comes from a GGUF file, so the weights go into a new one.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    try:
        import gguf  # noqa: F401
    except ImportError:
        raise UserError(f"{file} is a GGUF file, which needs the gguf package: pip install 'stoker[sft]'") from None
    folder, name = str(file.parent), file.name
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that cannot be switched off
            tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
            read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
            config = AutoConfig.from_pretrained(folder, gguf_file=name)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model = model.to_empty(device="cpu")
        model.load_state_dict(read.state_dict())
        _copy_buffers(read, model)
        model.tie_weights()
    except Exception as error:  # damaged files raise all kinds of errors in the libraries
        if os.environ.get("STOKER_TRACEBACK"):
            raise
        raise UserError(f"no model can be loaded from the GGUF file {file} ({flag}): {reason(error)}") from None
    model.config.name_or_path = str(file.absolute())
    model.generation_config = read.generation_config
    return LanguageModel(tokenizer, model)


def _copy_buffers(source: Any, target: Any) -> None:
    """Buffers that are not in the state, such as the frequencies of rotary embeddings."""
    found = dict(source.named_buffers())
    for name, buffer in target.named_buffers():
        buffer.copy_(found[name])


def lora_config(options: Any) -> Any:
    """PEFT's configuration for the --lora options."""
    from peft import LoraConfig

    targets: Any = options.lora_targets.strip()
    if targets in {"auto", "all-linear"}:
        targets = "all-linear"  # PEFT's word for every linear layer except the head
    else:
        targets = [name.strip() for name in targets.split(",")]
        if not all(targets):
            raise UserError(
                f"--lora_targets {options.lora_targets}: write auto, all-linear, or names separated by commas"
            )
        if "lm_head" in targets:
            raise UserError(
                f"--lora_targets {options.lora_targets}: TRL trains no adapter of the head; leave lm_head out, or train all "
                "weights with --full"
            )
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=options.lora_r,
        lora_alpha=2 * options.lora_r if options.lora_alpha is None else options.lora_alpha,
        lora_dropout=options.lora_dropout,
        target_modules=targets,
    )


def empty_with_adapters(config: Any, options: Any) -> Any:
    """A model with adapters on the meta device, from which the cost of its training can be computed without memory."""
    import torch
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return get_peft_model(AutoModelForCausalLM.from_config(config), lora_config(options))


def save_merged(model: Any, tokenizer: Any, folder: Path) -> None:
    """Writes the base model with the adapter added to its weights, which stock transformers loads without PEFT."""
    from stoker.hf.checkpointing import folders
    from stoker.model import restore

    merged = restore(model).merge_and_unload()
    merged.config.name_or_path = ""

    def save(beside: Path) -> None:
        merged.save_pretrained(beside)
        tokenizer.save_pretrained(beside)

    folder.mkdir(parents=True, exist_ok=True)
    folders.put_in_place(folder, save)
