"""Tells what a trained model is for, from the files in its folder and the class that its config.json names."""

from __future__ import annotations

import os
from pathlib import Path

from stoker.documents import BadDocument, parse_json
from stoker.errors import UserError
from stoker.tasks.fewshot.classifier_head import has_head, has_pickled_head
from stoker.tasks.loading import config_of
from stoker.user_files import read_text

__all__ = ["KINDS", "model_kind"]

KINDS = {
    "answer": "answers questions about a text",
    "classify": "classifies texts",
    "tag": "finds entities in texts",
    "embed": "searches texts by meaning",
    "rerank": "orders texts by how well they answer a query",
    "fill": "fills the masked words of a text",
    "chat": "answers prompts",
}

_BY_CLASS = {
    "ForQuestionAnswering": "answer",
    "ForSequenceClassification": "classify",
    "ForTokenClassification": "tag",
    "ForMaskedLM": "fill",
    "ForCausalLM": "chat",
    "LMHeadModel": "chat",
    "Model": "embed",
}
"""By the ending of the class's name, the longer ones first."""


def model_kind(name: str) -> str:
    """One of KINDS for a folder, a GGUF file or a model on the hub."""
    folder = Path(name)
    if name.endswith(".gguf") or (folder.is_dir() and any(folder.glob("*.gguf"))):
        return "chat"
    if (folder / "adapter_config.json").is_file():
        return "chat"
    if (folder / "modules.json").is_file():
        if has_head(folder):
            return "classify"
        if has_pickled_head(folder):
            raise UserError(
                f"{name} was saved by SetFit, with its classifier as a pickle, which can run any code when it is loaded and is "
                "not opened here; train it with `stoker train fewshot`, or search by its embeddings with --as embed"
            )
        return "rerank" if _is_cross_encoder(folder) else "embed"
    if os.path.isdir(name) and not (folder / "config.json").exists():
        raise UserError(f"{name} does not contain a model: it has no config.json")
    config = config_of(name, flag="--model", trust_remote_code=False)
    architecture = next(iter(config.architectures or ()), "")
    kind = next((one for ending, one in _BY_CLASS.items() if architecture.endswith(ending)), "")
    if not kind:
        what = architecture or "a model without `architectures` in its config.json"
        raise UserError(f"{name} is {what}, for which there is no use here; name one with --as: {', '.join(KINDS)}")
    if kind == "classify" and hasattr(config, "sentence_transformers"):  # written by a CrossEncoder of earlier releases
        return "rerank"
    return kind


def _is_cross_encoder(folder: Path) -> bool:
    path = folder / "config_sentence_transformers.json"
    if not path.is_file():  # written by an earlier release, which had no other kind
        return False
    try:
        content = parse_json(read_text(path, "model"))
    except BadDocument as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    return isinstance(content, dict) and content.get("model_type") == "CrossEncoder"
