"""Inputs for a model of any kind: a padded batch, and the same examples one by one.

What a model takes is read from the signature of its forward. The candidates are tried in order with the stock model.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

__all__ = ["DECODER_LENGTHS", "LENGTHS", "Batch", "Side", "candidates"]

LENGTHS = (23, 12, 5)
DECODER_LENGTHS = (7, 4, 6)
ROWS = len(LENGTHS)
WIDTH = max(LENGTHS) + 1
"""Every row has padding, and no other dimension of a model has this size."""

Side = Literal["right", "left", "none"]


@dataclass(frozen=True)
class Batch:
    """What a model is called with."""

    inputs: dict[str, Tensor]
    rows: tuple[dict[str, Tensor], ...]
    """The same examples without padding."""
    weights: tuple[float, ...]
    """The share of each example in the mean loss."""
    masks: dict[int, Tensor]
    """Length of a sequence -> (rows, length): which positions are real."""


@dataclass(frozen=True)
class Kind:
    """A kind of input that a model may take."""

    text: bool = False
    decoder: bool = False
    arrays: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Arguments for images, recordings and so on, each with the shape of one example."""
    labels: Literal["", "shifted", "tokens", "row"] = ""
    by_token: tuple[str, ...] = ()
    """Other arguments with a small number for each token, and `bbox`, which has four."""

    def batch(self, config: Any, side: Side) -> Batch:
        return _batch(self, config, side)


def candidates(model: Any) -> Iterator[Kind]:
    """The kinds of input that this model may take, the most likely first; with a loss before those without."""
    names = set(inspect.signature(model.forward).parameters)
    config = model.config
    kinds = list(_without_labels(names, config, getattr(model, "main_input_name", "input_ids")))
    if "labels" in names:
        for kind in kinds:
            yield from _with_labels(type(model).__name__, kind)
    yield from kinds


def _with_labels(name: str, kind: Kind) -> Iterator[Kind]:
    if "Classification" in name and "Token" not in name:
        yield replace(kind, labels="row")
        yield replace(kind, labels="row", decoder=False)
    elif kind.text:
        shifted = "MaskedLM" not in name and "PreTraining" not in name and not kind.decoder
        yield replace(kind, labels="shifted" if shifted else "tokens")


_BY_TOKEN = re.compile(r"bbox|(?!input_ids|decoder_|labels_|attack_|.*position).*_ids")


def _without_labels(names: set[str], config: Any, main: str) -> Iterator[Kind]:
    decoder = "decoder_input_ids" in names
    images = [
        (name, shape)
        for name, shape in _shapes(config)
        if name in names and not (name == "pixel_values" and main in ("input_values", "input_features"))
    ]
    if "input_ids" in names:
        by_token = tuple(sorted(name for name in names if _BY_TOKEN.fullmatch(name)))
        if images or hasattr(config, "vision_config"):  # numbers say which tokens are images there
            by_token = ("bbox",) if "bbox" in names else ()
        if by_token:
            yield Kind(text=True, decoder=decoder, by_token=by_token)
        yield Kind(text=True, decoder=decoder)
        for image in images:
            yield Kind(text=True, decoder=decoder, arrays=(image,))
    for image in sorted(images, key=lambda one: one[0] != main):
        yield Kind(decoder=decoder, arrays=(image,))
    if "past_values" in names:
        yield Kind(arrays=tuple((name, shape) for name, shape in _series(config) if name in names))


def _shapes(config: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    vision = getattr(config, "vision_config", None) or config
    size: Any = getattr(vision, "image_size", None) or 32
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = next((n for k in ("num_channels", "in_channels", "in_chans") if (n := getattr(vision, k, None))), 3)
    frames = getattr(vision, "num_frames", None) or 4
    yield "pixel_values", (channels, height, width)
    yield "pixel_values", (1, channels, height, width)
    yield "pixel_values", (frames, channels, height, width)
    yield "input_values", (4000,)
    audio = getattr(config, "audio_config", None) or config
    bins = next(
        (n for k in ("num_mel_bins", "feature_size", "input_feat_per_channel") if (n := getattr(audio, k, None))), 80
    )
    yield "input_features", (bins, 2 * (getattr(audio, "max_source_positions", None) or 50))
    yield "input_features", (64, bins)
    yield "input_values", (getattr(audio, "max_length", 64), bins)
    yield "input_values", (1, 4000)
    yield "flattened_patches", (16, 2 + (getattr(vision, "patch_embed_hidden_size", None) or 1))


def _series(config: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """What forecasts of a time series are made from."""
    future = getattr(config, "prediction_length", None) or 4
    past = (getattr(config, "context_length", None) or future) + max(getattr(config, "lags_sequence", None) or [0])
    features = getattr(config, "num_time_features", 0)
    channels = (config.num_input_channels,) if hasattr(config, "num_input_channels") else ()
    yield "past_values", (past, *channels)
    yield "past_time_features", (past, features)
    yield "past_observed_mask", (past, *channels)
    yield "future_values", (future, *channels)
    yield "future_time_features", (future, features)


def _batch(kind: Kind, config: Any, side: Side) -> Batch:
    generator = torch.Generator().manual_seed(7)
    text = getattr(config, "text_config", None) or config
    end = getattr(text, "eos_token_id", None)
    end = end if isinstance(end, int) else 2
    pad = getattr(text, "pad_token_id", None) or 0
    texts = [torch.randint(10, 60, (length,), generator=generator) for length in LENGTHS]
    for tokens in texts:
        tokens[-1] = end
    targets = [torch.randint(10, 60, (length,), generator=generator) for length in DECODER_LENGTHS]
    if side == "none":
        texts = [one[-5:] for one in texts]
        targets = [one[:4] for one in targets]
    # `none` has no mask at all; the examples are of equal length.
    places: Side = "right" if side == "none" else side
    inputs: dict[str, Tensor] = {}
    rows: list[dict[str, Tensor]] = [{} for _ in texts]
    masks: dict[int, Tensor] = {}
    if kind.text:
        width = texts[0].numel() if side == "none" else WIDTH
        inputs["input_ids"], mask = _padded(texts, width, pad, places)
        masks[width] = mask
        if side != "none":
            inputs["attention_mask"] = mask.long()
        for row, tokens in zip(rows, texts, strict=True):
            row["input_ids"] = tokens[None]
    for name in kind.by_token if kind.text else ():
        shape = (4,) if name == "bbox" else ()
        values = [torch.randint(0, 2, (tokens.numel(), *shape), generator=generator) for tokens in texts]
        values = [
            one.cumsum(1) if shape else one for one in values
        ]  # the right end of a box is not before its left one
        inputs[name], _ = _padded(values, inputs["input_ids"].shape[1], 0, places)
        for row, one in zip(rows, values, strict=True):
            row[name] = one[None]
    if kind.decoder:
        width = max(one.numel() for one in targets)
        inputs["decoder_input_ids"], masks[width] = _padded(targets, width, pad, "right")
        for row, tokens in zip(rows, targets, strict=True):
            row["decoder_input_ids"] = tokens[None]
    for name, shape in kind.arrays:
        made = torch.rand if name == "flattened_patches" else torch.randn  # the first two of which are places
        inputs[name] = (
            torch.ones(len(rows), *shape) if name.endswith("mask") else made(len(rows), *shape, generator=generator)
        )
        for place, row in enumerate(rows):
            row[name] = inputs[name][place : place + 1]
    weights = [1.0 / len(rows)] * len(rows)
    if kind.labels == "row":
        labels = torch.arange(len(rows)) % 2
        inputs["labels"] = labels
        for place, row in enumerate(rows):
            row["labels"] = labels[place : place + 1]
    elif kind.labels:
        scored = targets if kind.decoder else texts
        width = next(reversed(masks)) if kind.decoder else next(iter(masks))
        if kind.labels == "shifted":  # after left padding, the first token would be predicted from padding
            scored = [torch.cat([torch.tensor([-100]), tokens[1:]]) for tokens in scored]
        inputs["labels"], _ = _padded(scored, width, -100, "right" if kind.decoder else places)
        for row, tokens in zip(rows, scored, strict=True):
            row["labels"] = tokens[None]
        counts = [one.numel() - (kind.labels == "shifted") for one in scored]
        weights = [count / sum(counts) for count in counts]
    return Batch(inputs, tuple(rows), tuple(weights), masks)


def _padded(rows: list[Tensor], width: int, filler: int, side: Side) -> tuple[Tensor, Tensor]:
    full = torch.full((len(rows), width, *rows[0].shape[1:]), filler)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for place, row in enumerate(rows):
        real = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        full[place, real] = row
        mask[place, real] = True
    return full, mask
