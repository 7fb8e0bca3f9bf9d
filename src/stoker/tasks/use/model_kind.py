"""Tells what a trained model is for, from the files in its folder and the class that its config.json names."""

from __future__ import annotations

import os
from pathlib import Path

from stoker.documents import BadDocument, parse_json
from stoker.errors import UserError, first_line
from stoker.tasks.fewshot.classifier_head import has_head, has_pickled_head
from stoker.tasks.loading import config_of
from stoker.tasks.model_folder import MODULES
from stoker.tasks.sentences.st_models import transformer_of
from stoker.user_files import read_text

__all__ = ["KINDS", "kind_of_class", "model_kind", "recognise"]

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
_OTHER_FORMATS = ["onnx/*", "openvino/*", "*.h5", "*.msgpack", "*.ot"]

_ADVICE = f"name its use with --as: {', '.join(KINDS)}"


def model_kind(name: str, advice: str = _ADVICE) -> str:
    """One of KINDS for a folder, a GGUF file or a model on the hub."""
    folder = Path(name)
    if name.endswith(".gguf") or (folder.is_dir() and any(folder.glob("*.gguf"))):
        return "chat"
    if (folder / "adapter_config.json").is_file():
        return "chat"
    if (folder / MODULES).is_file():
        if has_head(folder):
            return "classify"
        if has_pickled_head(folder):
            raise UserError(
                f"{name} was saved by SetFit, with its classifier as a pickle, which can run any code when it is loaded and is "
                "not opened here; train it with `stoker train fewshot`, or search by its embeddings with --as embed"
            )
        if not _is_cross_encoder(folder):
            return "embed"
        config = config_of(str(transformer_of(folder)), flag="--model", trust_remote_code=False)
        return "rerank" if config.num_labels == 1 else "classify"
    if os.path.isdir(name) and not (folder / "config.json").exists():
        raise UserError(f"{name} does not contain a model: it has no config.json")
    config = config_of(name, flag="--model", trust_remote_code=False)
    architecture = next(iter(config.architectures or ()), "")
    kind = kind_of_class(architecture)
    if not kind:
        what = architecture or "a model without `architectures` in its config.json"
        raise UserError(f"{name} is {what}, which is not supported; {advice}")
    if kind == "classify" and hasattr(config, "sentence_transformers"):  # written by a CrossEncoder of earlier releases
        return "rerank"
    return kind


def kind_of_class(architecture: str) -> str:
    """One of KINDS for the class that a config.json names; empty if it is not known."""
    return next((one for ending, one in _BY_CLASS.items() if architecture.endswith(ending)), "")


def recognise(name: str, asked: str | None) -> tuple[str, str]:
    """The model that is named and its kind, which --as may have set.

    A sentence-transformers model on the hub is downloaded, because its files tell the kind; then the name is that of its folder.
    """
    kind = asked or model_kind(name)
    if os.path.exists(name) or kind not in ("classify", "embed", "rerank"):
        return name, kind
    folder = _downloaded(name)
    return folder, asked or model_kind(folder)


def _downloaded(name: str) -> str:
    """The folder of a sentence-transformers model on the hub; any other name as it is."""
    from huggingface_hub import hf_hub_download, snapshot_download

    try:
        hf_hub_download(name, MODULES)
    except Exception:  # there is no such file; if it is for another reason, loading the model will report it
        return name
    try:
        return str(snapshot_download(name, ignore_patterns=_OTHER_FORMATS))
    except Exception as error:  # the library raises many types of errors
        raise UserError(f"{name} cannot be downloaded from the hub: {first_line(error)}") from None


def _is_cross_encoder(folder: Path) -> bool:
    path = folder / "config_sentence_transformers.json"
    if not path.is_file():  # written by an earlier release, which had no other kind
        return False
    try:
        content = parse_json(read_text(path, "model"))
    except BadDocument as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    return isinstance(content, dict) and content.get("model_type") == "CrossEncoder"
