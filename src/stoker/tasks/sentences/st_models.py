"""Loads embedding models and cross-encoders; any encoder will do, and gets mean pooling or a new head."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stoker.english import with_article
from stoker.errors import UserError
from stoker.model import optimize, restore
from stoker.tasks.loading import check_finite, check_vocabulary, config_of, loaded, model_of, row_length, tokenizer_of
from stoker.tasks.model_folder import MODULES, exported_file

__all__ = [
    "Loader",
    "fast_inference",
    "load_cross_encoder",
    "load_sentence_transformer",
    "set_row_length",
    "transformer_of",
]

log = logging.getLogger("stoker")


def load_sentence_transformer(options: Any, name: str | None = None, flag: str = "--model_name_or_path") -> Any:
    """The embedding model that --model_name_or_path names, or another one, in fp32."""
    from sentence_transformers import SentenceTransformer

    return _load(SentenceTransformer, "embedding model", name or options.model_name_or_path, options, flag)


def load_cross_encoder(options: Any, num_labels: int) -> Any:
    """The cross-encoder that --model_name_or_path names, in fp32; an encoder gets a new head with `num_labels` outputs."""
    from sentence_transformers import CrossEncoder

    name = options.model_name_or_path
    more = {"ignore_mismatched_sizes": True} if options.ignore_mismatched_sizes else {}
    return _load(CrossEncoder, "cross-encoder", name, options, "--model_name_or_path", more, num_labels=num_labels)


def _load(
    kind: Any,
    what: str,
    name: str,
    options: Any,
    flag: str,
    model_kwargs: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    for other in ("config_name", "tokenizer_name"):
        if getattr(options, other):
            raise UserError(f"--{other} is not possible here: the model is one folder; put the files into it")
    local = os.path.isdir(name)
    if local:
        _check_folder(Path(name), what, flag, options, settings.get("num_labels"))
    elif os.path.exists(name):
        raise UserError(f"{flag} {name} is a file; name a folder, or a model on the hub")
    model = loaded(
        Loader(kind, name), what, name, flag=flag, cache_folder=options.cache_dir,
        revision=options.model_revision if not local else None, token=options.token,
        trust_remote_code=options.trust_remote_code,
        local_files_only=local,  # else every saved checkpoint would ask the hub for the name of the base model
        device="cpu", model_kwargs={"dtype": torch.float32, **(model_kwargs or {})}, **settings,
    )  # fmt: skip
    model.float()
    check_finite(model, name)
    return model


@dataclass(frozen=True)
class Loader:
    """A class of sentence-transformers as a loader of the model `name` with `from_pretrained`, which `loaded` expects."""

    kind: Any
    name: str

    @property
    def __name__(self) -> str:
        return str(self.kind.__name__)

    def from_pretrained(self, name: str, **options: Any) -> Any:
        from sentence_transformers import CrossEncoder

        make = self._constructor()
        if not issubclass(self.kind, CrossEncoder) or options.get("trust_remote_code"):
            return make(name, **options)
        # Given an activation, the library does not look for the one that the model's files name, which it would import and call.
        model = make(name, activation_fn=torch.nn.Identity(), **options)
        model.activation_fn = _activation_of(model, name, options)
        return model

    def _constructor(self) -> Callable[..., Any]:
        folder = Path(self.name)
        if (folder / MODULES).exists() and exported_file(transformer_of(folder)):
            from stoker.tasks.export.exported_sentences import load_exported_sentences

            return partial(load_exported_sentences, self.kind)
        kind: Callable[..., Any] = self.kind
        return kind


def _activation_of(model: Any, name: str, options: Mapping[str, Any]) -> torch.nn.Module:
    """The function that a cross-encoder applies to its scores: the one that its files name, or the library's default."""
    named = _named_activation(model, name, options)
    if isinstance(named, str) and not named.startswith("torch."):  # as sentence-transformers does
        log.warning("the activation function %s of %s is not PyTorch's; the default is used", named, name)
    elif named is not None:
        return _torch_activation(named, name)
    return torch.nn.Sigmoid() if model.num_labels == 1 else torch.nn.Identity()


def _named_activation(model: Any, name: str, options: Mapping[str, Any]) -> Any:
    """Where sentence-transformers 6, 4 and earlier releases have written it, in the order in which release 6 looks."""
    from sentence_transformers.util import load_file_path

    where = {one: options[one] for one in ("token", "cache_folder", "revision", "local_files_only") if one in options}
    path = load_file_path(name, "config_sentence_transformers.json", **where)
    if path is not None:
        written = json.loads(Path(path).read_text(encoding="utf-8")).get("activation_fn")
        if written is not None:
            return written
    config = getattr(model.config, "__dict__", {})
    settings = config.get("sentence_transformers")
    if isinstance(settings, dict) and "activation_fn" in settings:
        return settings["activation_fn"]
    return config.pop("sbert_ce_default_activation_function", None)


def _torch_activation(named: Any, name: str) -> torch.nn.Module:
    """An activation by the name of its class. Nothing is imported, so that a file cannot choose what is executed."""
    last = str(named).rpartition(".")[2]
    kind: Any = getattr(torch.nn, last, None)
    known = isinstance(kind, type) and (kind.__module__ == "torch.nn.modules.activation" or kind is torch.nn.Identity)
    if not known or named not in (f"torch.nn.{last}", f"{kind.__module__}.{last}"):
        raise UserError(
            f"no cross-encoder can be loaded from {name}: activation_fn in its configuration is {str(named)!r}, which is not an "
            "activation of torch.nn such as torch.nn.Sigmoid"
        )
    try:
        activation: torch.nn.Module = kind()
    except TypeError:
        raise UserError(
            f"no cross-encoder can be loaded from {name}: activation_fn in its configuration is {named!r}, which needs arguments"
        ) from None
    return activation


def _check_folder(folder: Path, what: str, flag: str, options: Any, num_labels: int | None) -> None:
    """Checks the files of the transformer inside as other tasks do; without, random weights might be trained.

    `num_labels`: the outputs that the head of a cross-encoder must have.
    """
    from transformers import AutoModel, AutoModelForSequenceClassification

    inner = str(transformer_of(folder))
    settings = {"flag": flag, "trust_remote_code": options.trust_remote_code}
    config = config_of(inner, **settings)
    tokenizer = tokenizer_of(inner, **settings)
    check_vocabulary(tokenizer, config, str(folder))
    kind, head = AutoModel, next(iter(config.architectures or ()), "")
    if num_labels is not None and head.endswith("ForSequenceClassification"):
        kind, config.num_labels = AutoModelForSequenceClassification, num_labels
        settings["replace_mismatched"] = options.ignore_mismatched_sizes
    model_of(kind, inner, config, what=what, **settings)


def transformer_of(folder: Path) -> Path:
    """The folder of the transformer: modules.json names the parts of a SentenceTransformer, of which it is the first."""
    path = folder / MODULES
    if not path.exists():
        return folder
    try:
        first = json.loads(path.read_text(encoding="utf-8"))[0]
        part, kind = str(first["path"]), str(first["type"]).rpartition(".")[2]
    except (OSError, ValueError, TypeError, KeyError, IndexError, RecursionError):
        raise UserError(
            f"no model can be loaded from the folder {folder}: {MODULES} does not list the parts of a model"
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
