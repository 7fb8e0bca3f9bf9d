"""Models and tokenizers by name or folder, without noise, and with one sentence where they cannot be had."""

from __future__ import annotations

import logging
import os
import pickle
import warnings
from typing import Any

from stoker.errors import UserError

__all__ = ["load_config", "load_model", "load_tokenizer", "loaded", "most_tokens", "quiet", "row_length"]

log = logging.getLogger("stoker")


def quiet() -> None:
    """Keeps libraries below from printing what a person cannot act on. Errors still show."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for name in ("accelerate", "huggingface_hub", "httpx", "filelock", "matplotlib"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(transformers|accelerate|torch)\b")


def loaded(loader: Any, what: str, name: str, *, flag: str = "--model_name_or_path", **options: Any) -> Any:
    """What `loader` makes of a folder or a name on the hub; the reason in one sentence where it cannot."""
    from safetensors import SafetensorError

    try:
        return loader.from_pretrained(name, **options)
    # A file of weights that was cut short is a SafetensorError, or one of pickle's
    except (OSError, ValueError, ImportError, SafetensorError, EOFError, pickle.UnpicklingError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if os.path.isdir(name):
            raise UserError(f"no {what} can be loaded from the folder {name}: {reason}") from None
        raise UserError(
            f"the {what} {name!r} is neither a folder here nor to be had from the hub"
            f"{' (offline)' if os.environ.get('HF_HUB_OFFLINE') else ''}; "
            f"check the name and the network, or give a folder by {flag} ({reason})"
        ) from None


def load_config(options: Any, **changes: Any) -> Any:
    from transformers import AutoConfig

    name = options.config_name or options.model_name_or_path
    return loaded(AutoConfig, "model", name, **_hub(options), **changes)


def load_tokenizer(options: Any) -> Any:
    from transformers import AutoTokenizer

    name = options.tokenizer_name or options.model_name_or_path
    return loaded(AutoTokenizer, "tokenizer", name, use_fast=True, **_hub(options))


def load_model(kind: Any, options: Any, config: Any) -> Any:
    """The model with a head of `kind`; says if the head is new, and so untrained."""
    try:
        found = loaded(
            kind,
            "model",
            options.model_name_or_path,
            config=config,
            ignore_mismatched_sizes=options.ignore_mismatched_sizes,
            output_loading_info=True,
            **_hub(options),
        )
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise UserError(
            f"the head of {options.model_name_or_path} has another size than this data needs; "
            "--ignore_mismatched_sizes replaces it by a new one"
        ) from None
    model, facts = found
    missing = sorted(facts.get("missing_keys", ()))
    if missing:
        log.info("new, to be trained: %s", ", ".join(missing))
    model.float()  # a checkpoint in half precision is trained in fp32, bf16 applies to activations
    return model


def most_tokens(asked: int, tokenizer: Any, config: Any) -> int:
    """How many tokens tokenizer and model allow in a row; `asked` if neither says."""
    from stoker.model.families import FAMILIES

    positions = getattr(config, "max_position_embeddings", None) or asked
    kin = {family.source.partition(".")[0] for family in FAMILIES if family.positions_after_padding}
    if config.model_type.replace("-", "_") in kin:  # RoBERTa and its kin count positions from the padding's id on
        positions -= (config.pad_token_id or 0) + 1
    return int(min(tokenizer.model_max_length, positions))


def row_length(asked: int, tokenizer: Any, config: Any) -> int:
    """--max_seq_length, or the most tokens that tokenizer and model allow if that is less."""
    most = most_tokens(asked, tokenizer, config)
    if min(asked, most) < 8:
        raise UserError(f"--max_seq_length {asked} leaves no room for a text; 128 to 512 are usual")
    if asked > most:
        log.warning("--max_seq_length %s is more than the model takes; %s is used", asked, most)
    return min(asked, most)


def _hub(options: Any) -> dict[str, Any]:
    return {
        "cache_dir": options.cache_dir,
        "revision": options.model_revision,
        "token": options.token,
        "trust_remote_code": options.trust_remote_code,  # False is told too: left unsaid, transformers asks at a terminal
    }
