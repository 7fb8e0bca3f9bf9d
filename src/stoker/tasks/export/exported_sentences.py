"""Embedding models and rerankers of sentence-transformers whose transformer was exported.

sentence-transformers runs such files through optimum, which does not accept transformers 5; here its own Transformer part runs
them through `ExportedModel`, and the other parts (pooling, normalization) stay as they are.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sentence_transformers.base.modules.transformer import Transformer

from stoker.requires import require
from stoker.tasks.export.exported_model import load_exported

__all__ = ["load_exported_sentences"]


class _ExportedTransformer(Transformer):  # type: ignore[misc]
    def _load_model(
        self,
        model_name_or_path: str,
        transformer_task: Any,
        config: Any,
        backend: str,
        is_peft_model: bool,
        **rest: Any,
    ) -> Any:
        return load_exported(Path(model_name_or_path) / (rest.get("subfolder") or ""), config)


def load_exported_sentences(sentence_class: Any, folder: str, **options: Any) -> Any:
    """A SentenceTransformer or CrossEncoder, as `sentence_class` says, from a folder that `stoker export` has written."""
    require("exported embedding models")
    first = json.loads((Path(folder) / "modules.json").read_text(encoding="utf-8"))[0]["type"]
    return sentence_class._load_with_module_classes(folder, {first: _ExportedTransformer}, **options)
