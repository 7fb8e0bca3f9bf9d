"""Compares an export with the model it was made from: scores on the validation data, agreement, size, latency."""

from __future__ import annotations

import importlib
import json
import math
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from stoker.run_report.score_names import SCORE_NAMES
from stoker.tasks.export.exported_model import Inputs
from stoker.tasks.model_folder import CONFIG_FILES, TOKENIZER_FILES

__all__ = [
    "BATCH",
    "Comparison",
    "Figures",
    "agreement",
    "differs",
    "latencies",
    "padded",
    "rows_of",
    "scores",
    "size_of",
]

BATCH = 32
"""Rows of the batch whose latency is measured."""
_SECONDS, _MOST = 3.0, 30
"""How long, and how often at most, each latency is measured."""
_LIMITS = {False: 0.5, True: 1.0}
"""Points that a score may fall, by whether the export is in int8."""


@dataclass(frozen=True)
class Figures:
    """One side of a comparison."""

    size: int
    """Bytes of all its files."""
    scores: dict[str, float] = field(default_factory=dict)
    """In points of 100."""
    one_row: float | None = None
    """Seconds, like the next."""
    batch: float | None = None


@dataclass(frozen=True)
class Comparison:
    to: str
    int8: bool
    before: Figures
    after: Figures
    agreement: float
    """The share of equal predictions, or the cosine of the outputs where there are none."""
    rows: str = ""
    """Which rows the latencies are of."""

    @property
    def name(self) -> str:
        return f"{self.to}, int8" if self.int8 else self.to

    @property
    def fallen(self) -> float:
        """Points by which the scores fell, at most; negative if all rose."""
        falls = [value - self.after.scores[name] for name, value in self.before.scores.items()]
        return max((math.inf if math.isnan(one) else one for one in falls), default=0.0)

    @property
    def limit(self) -> float:
        return _LIMITS[self.int8]

    def lines(self) -> list[tuple[str, ...]]:
        """What was measured, before, after, and the change."""
        found: list[tuple[str, ...]] = []
        for name, value in self.before.scores.items():
            after = self.after.scores[name]
            found.append((SCORE_NAMES.get(name, name), f"{value:.2f}", f"{after:.2f}", f"{after - value:+.2f} points"))
        if self.before.size:
            sizes = (f"{size / 1e6:,.1f} MB" for size in (self.before.size, self.after.size))
            found.append(("size", *sizes, f"{self.after.size / self.before.size:.2f} of it"))
        for name, what in (("one_row", "one row"), ("batch", "batch")):
            sides = getattr(self.before, name), getattr(self.after, name)
            if None not in sides:
                faster = f"{sides[0] / max(sides[1], 1e-9):.2f}x as fast"
                found.append((what, *(f"{1000 * side:,.1f} ms" for side in sides), faster))
        return [*found, ("agreement", "", f"{100 * self.agreement:.2f}%", "")]

    def table(self) -> Table:
        """For the terminal."""
        table = Table("", "before", self.name, "change", box=None, pad_edge=False)
        for line in self.lines():
            table.add_row(*line)
        return table

    def for_report(self) -> dict[str, Any]:
        """A table of the report page."""
        return {
            "title": f"Exported to {self.name}",
            "columns": ["", "before", self.name, "change"],
            "rows": [list(line) for line in self.lines()],
            "note": self.rows or None,
        }

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def size_of(folder: Path) -> int:
    """Bytes of the files that a model is loaded from, without checkpoints and logs; 0 if it is on the hub."""
    if not folder.exists():
        return 0
    if folder.is_file():
        return folder.stat().st_size
    weights = ("*.safetensors", "pytorch_model*.bin", "*.onnx", "openvino_model.*", "*.gguf")
    names = (*weights, *CONFIG_FILES, *TOKENIZER_FILES)
    parts = [folder, *(one for one in folder.iterdir() if one.is_dir() and one.name[:1].isdigit())]  # 1_Pooling
    return sum(path.stat().st_size for part in parts for name in names for path in part.glob(name) if path.is_file())


def scores(task: str, name: str, evaluation: list[str]) -> dict[str, float]:
    """What `stoker train TASK --do_eval` measures for the model `name`, in points."""
    main = importlib.import_module(f"stoker.tasks.{task}.fine_tune").main
    with tempfile.TemporaryDirectory(prefix="stoker-export-") as folder:
        words = [
            f"--model_name_or_path={name}",
            *evaluation,
            f"--output_dir={folder}",
            "--do_train=False",
            "--do_eval=True",
        ]
        main([*words, "--report_to=none", f"--per_device_eval_batch_size={BATCH}"])
        metrics = json.loads((Path(folder) / "eval_results.json").read_text(encoding="utf-8"))
    found = {name.removeprefix("eval_"): value for name, value in metrics.items()}
    return {name: _points(found[name]) for name in SCORE_NAMES if name in found and name != "perplexity"}


def _points(value: float) -> float:
    return float(value if abs(value) > 1.5 else 100 * value)


def rows_of(batches: list[Inputs], most: int = BATCH) -> list[Inputs]:
    """The first rows of these batches, one by one, without their padding."""
    rows = []
    for batch in batches:
        for number in range(len(batch["input_ids"])):
            real = batch["attention_mask"][number].bool()
            rows.append({name: one[number : number + 1][:, real] for name, one in batch.items()})
    return rows[:most]


def padded(rows: list[Inputs], padding: int) -> Inputs:
    """The rows as one batch."""
    width = max(row["input_ids"].shape[1] for row in rows)

    def fill(row: Inputs, name: str) -> torch.Tensor:
        value = padding if name == "input_ids" else 0
        return torch.nn.functional.pad(row[name], (0, width - row[name].shape[1]), value=value)

    return {name: torch.cat([fill(row, name) for row in rows]) for name in rows[0]}


@torch.no_grad()
def agreement(before: Any, after: Any, batch: Inputs) -> float:
    """The share of equal predictions over rows or tokens; for outputs without classes, their cosine."""
    alike, weights = [], []
    for first, second in _pairs(before, after, batch):
        if first.shape[-1] > 1 and first.ndim > 1:
            alike.append(float((first.argmax(-1) == second.argmax(-1)).float().mean()))
        else:
            alike.append(float(torch.nn.functional.cosine_similarity(first.flatten(), second.flatten(), dim=0)))
        weights.append(first.numel())
    return sum(one * weight for one, weight in zip(alike, weights, strict=True)) / sum(weights)


@torch.no_grad()
def differs(before: Any, after: Any, batch: Inputs) -> float:
    """The largest difference between the outputs, as a share of their largest value."""
    pairs = _pairs(before, after, batch)
    return max(float((first - second).abs().max() / first.abs().max().clamp_min(1e-6)) for first, second in pairs)


def _pairs(before: Any, after: Any, batch: Inputs) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The outputs that both models have; of outputs per token, those of real tokens."""
    first, second = before(**batch), after(**batch)
    real = batch["attention_mask"].bool()
    names = [name for name, one in second.items() if isinstance(one, torch.Tensor)]
    per_token = {name: first[name].shape[1:2] == real.shape[1:] for name in names}
    return [
        (first[name][real], second[name][real]) if per_token[name] else (first[name], second[name]) for name in names
    ]


@torch.no_grad()
def latencies(before: Any, after: Any, inputs: Inputs) -> tuple[float, float]:
    """Seconds that each model takes, measured in turn: the medians, after two calls to warm up."""
    times: tuple[list[float], list[float]] = ([], [])
    began = time.perf_counter()
    while len(times[0]) < 5 or (time.perf_counter() - began < _SECONDS and len(times[0]) < _MOST):
        for model, found in zip((before, after), times, strict=True):
            start = time.perf_counter()
            model(**inputs)
            found.append(time.perf_counter() - start)
    first, second = (statistics.median(found[2:]) for found in times)
    return first, second
