"""Which architectures there are, and which model classes of each are examined."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import transformers
from transformers import PretrainedConfig
from transformers.models.auto import configuration_auto, modeling_auto

__all__ = ["HEADS", "classes_of", "folders"]

HEADS = (
    "MODEL",
    "MODEL_FOR_CAUSAL_LM",
    "MODEL_FOR_MASKED_LM",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT",
    "MODEL_FOR_IMAGE_CLASSIFICATION",
    "MODEL_FOR_AUDIO_CLASSIFICATION",
    "MODEL_FOR_CTC",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ",
    "MODEL_FOR_PRETRAINING",
)
"""The auto mappings whose classes are examined."""


def folders() -> dict[str, list[str]]:
    """The folders of transformers.models, each with the model types that its configurations have."""
    found: dict[str, list[str]] = {}
    for model_type in configuration_auto.CONFIG_MAPPING_NAMES:
        folder = configuration_auto.model_type_to_module_name(model_type)
        found.setdefault(folder, []).append(model_type)
    return dict(sorted(found.items()))


def classes_of(folder: str) -> Iterator[tuple[type[PretrainedConfig], Any]]:
    """The model classes of a folder, each with its configuration class, every class once."""
    seen = set()
    for model_type in folders()[folder]:
        config = getattr(transformers, configuration_auto.CONFIG_MAPPING_NAMES[model_type], None)
        for head in HEADS:
            names = getattr(modeling_auto, f"{head}_MAPPING_NAMES").get(model_type, ())
            for name in (names,) if isinstance(names, str) else names[:1]:
                model = getattr(transformers, name, None)
                if config is not None and inspect.isclass(model) and model not in seen:
                    seen.add(model)
                    yield _config_class(model) or config, model
    for model in _text_models(folder):
        if model not in seen:
            yield _config_class(model), model


def _config_class(model: Any) -> Any:
    """The configuration class of a model; None if it has none, or is a placeholder for a model that needs another library."""
    try:
        return getattr(model, "config_class", None)
    except ImportError:  # a placeholder raises it for every attribute; its constructor gives the reason
        return None


def _text_models(folder: str) -> list[Any]:
    """The text models of a folder, which are in no auto mapping where they are a part of another model."""
    code = importlib.import_module(f"transformers.models.{folder}")
    names = [name for name in dir(code) if re.fullmatch(r".*Text(Model|Encoder|ModelWithProjection)", name)]
    models = [getattr(code, name) for name in names]
    return [model for model in models if inspect.isclass(model) and _config_class(model)]
