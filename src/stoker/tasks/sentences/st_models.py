"""Loads embedding models: the folder of a SentenceTransformer, or any encoder, which gets mean pooling."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stoker.english import with_article
from stoker.errors import UserError
from stoker.model import optimize, restore
from stoker.tasks.loading import check_finite, check_vocabulary, config_of, loaded, model_of, row_length, tokenizer_of

__all__ = ["Loader", "fast_inference", "load_sentence_transformer", "set_row_length"]

log = logging.getLogger("stoker")

_FLAG = "--model_name_or_path"
MODULES = "modules.json"


def load_sentence_transformer(options: Any) -> Any:
    """The embedding model that --model_name_or_path names, in fp32."""
    from sentence_transformers import SentenceTransformer

    name = options.model_name_or_path
    for flag in ("config_name", "tokenizer_name"):
        if getattr(options, flag):
            raise UserError(f"--{flag} is not possible here: an embedding model is one folder; put the files into it")
    local = os.path.isdir(name)
    if local:
        _check_folder(Path(name), trust_remote_code=options.trust_remote_code)
    elif os.path.exists(name):
        raise UserError(f"{_FLAG} {name} is a file; name a folder, or a model on the hub")
    model = loaded(
        Loader(SentenceTransformer), "embedding model", name, cache_folder=options.cache_dir,
        revision=options.model_revision if not local else None, token=options.token,
        trust_remote_code=options.trust_remote_code,
        local_files_only=local,  # else every saved checkpoint would ask the hub for the name of the base model
        device="cpu", model_kwargs={"dtype": torch.float32},
    )  # fmt: skip
    model.float()
    check_finite(model, name)
    return model


@dataclass(frozen=True)
class Loader:
    """A class of sentence-transformers as a loader with `from_pretrained`, which `loaded` expects."""

    kind: Any

    @property
    def __name__(self) -> str:
        return str(self.kind.__name__)

    def from_pretrained(self, name: str, **options: Any) -> Any:
        return self.kind(name, **options)


def _check_folder(folder: Path, **options: Any) -> None:
    """Checks the files of the transformer inside as other tasks do; without, random weights might be trained."""
    from transformers import AutoModel

    inner = str(_transformer_of(folder))
    config = config_of(inner, flag=_FLAG, **options)
    tokenizer = tokenizer_of(inner, flag=_FLAG, **options)
    check_vocabulary(tokenizer, config, str(folder))
    model_of(AutoModel, inner, config, what="embedding model", **options)


def _transformer_of(folder: Path) -> Path:
    """The folder of the transformer: modules.json names the parts of a SentenceTransformer, of which it is the first."""
    path = folder / MODULES
    if not path.exists():
        return folder
    try:
        first = json.loads(path.read_text(encoding="utf-8"))[0]
        part, kind = str(first["path"]), str(first["type"]).rpartition(".")[2]
    except (OSError, ValueError, TypeError, KeyError, IndexError, RecursionError):
        raise UserError(
            f"no embedding model can be loaded from the folder {folder}: {MODULES} does not list the parts of a model"
        ) from None
    if kind != "Transformer":
        raise UserError(f"{folder} begins with {with_article(kind)} ({MODULES}); only transformers are trained here")
    return folder / part


def set_row_length(model: Any, wanted: int | None) -> None:
    """Sets the maximum number of tokens of a text; without --max_seq_length the model keeps its own."""
    if wanted is not None:
        model.max_seq_length = row_length(wanted, model.tokenizer, model.config)


@contextlib.contextmanager
def fast_inference(model: Any, optimized: bool) -> Iterator[None]:
    """Optimises the model for what is computed before training; the Trainer does it again for itself."""
    if optimized:
        optimize(model)
    try:
        yield
    finally:
        if optimized:
            restore(model)
