"""Figures of training: tokens per second, padding that was not computed, share of the machine's peak, time by phase.

Only the matrix products of real tokens are counted, so computing padding does not raise the share of the peak.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from stoker.kernels.clock import clock_ghz
from stoker.machine import this_machine
from stoker.machine.measure import remeasure
from stoker.machine.rates import Rates, known
from stoker.model.fused_layer import FusedLayer
from stoker.model.heads import FirstTokenModel
from stoker.model.sequences import Positions

__all__ = ["Meter", "Work", "causal_head", "linear_layers", "peak", "products", "training_flops"]

log = logging.getLogger("stoker")

_NOISE = 1.05  # measurements of the same product at different times differ by this factor
PHASES = ("data", "forward", "backward", "optimizer", "rest")
_KEPT = 256  # batches whose lengths wait to be counted, at most: reading a number from a tensor in each step costs more


@dataclass(frozen=True)
class Work:
    """How much arithmetic a model does in training, forward and backward."""

    per_token: float
    """Products with weights: two operations per weight forward, four backward, two of them for the weight's own gradient."""
    per_pair: float
    """Attention, per pair of tokens of one sequence."""
    per_label: float = 0.0
    """Products of a language model's head, which only tokens with a label need."""
    per_row: float = 0.0
    """Products that only the first token of a row needs."""

    @classmethod
    def of(cls, model: nn.Module) -> Work:
        head = causal_head(model)
        labelled = _masked_head(model) if head is None else [head]
        first = _first_token_layers(model)
        linear = [layer for _, layer in linear_layers(model) if layer not in labelled and layer not in first]
        config = _config_of(model)
        layers = getattr(config, "num_hidden_layers", None) or getattr(config, "n_layers", None) or 0
        width = getattr(config, "hidden_size", None) or getattr(config, "dim", None) or 0
        if head is not None and (size := getattr(config, "head_dim", None)):
            width = size * config.num_attention_heads
        # Scores and weighted sum take 2 x 2 x width per pair forward, twice that backward; a causal model needs half the pairs.
        pair = 12.0 * layers * width * (1.0 if head is None else 0.5)
        return cls(sum(map(products, linear)), pair, sum(map(products, labelled)), sum(map(products, first)))


def products(module: Any) -> float:
    """Operations of a linear layer per token. A frozen weight, as in LoRA, needs no gradient of its own."""
    return (6.0 if module.weight.requires_grad else 4.0) * float(module.weight.numel())


def linear_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """The layers whose products are counted, with their names; adapters are among them."""
    return [(name, one) for name, one in model.named_modules() if isinstance(one, (nn.Linear, Conv1D))]


def causal_head(model: nn.Module) -> Any:
    """The head of a causal language model; None for other models."""
    for module in model.modules():
        if type(module).__name__.endswith(("ForCausalLM", "LMHeadModel")):
            return module.get_output_embeddings()  # type: ignore[operator]
    return None


def _masked_head(model: nn.Module) -> list[Any]:
    """The linear layers of a masked language model's head; none for other models."""
    for module in model.modules():
        if type(module).__name__.endswith("ForMaskedLM") and hasattr(module, "base_model"):
            base: Any = module.base_model
            inside = {*base.modules()} if base is not module else {*module.modules()}
            return [one for one in module.modules() if isinstance(one, nn.Linear) and one not in inside]
    return []


def _first_token_layers(model: nn.Module) -> list[Any]:
    """The linear layers that compute the first token of each row only."""
    for module in model.modules():
        if isinstance(module, FirstTokenModel) and module.stoker_first_token():
            *_, last = (layer for layer in module.modules() if isinstance(layer, FusedLayer))
            inside = {one for part in last.stoker_after_attention() for one in part.modules()}
            return [layer for _, layer in linear_layers(last) if layer in inside]
    return []


def _config_of(model: nn.Module) -> Any:
    """The configuration with the sizes: the model's own, or that of the transformer inside it."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "num_hidden_layers", None) or getattr(config, "n_layers", None):
            return config
    return None


def _texts(inputs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Lengths of the rows of each text of a batch: one text, or several with names such as `sentence_0_input_ids`."""
    for name, ids in inputs.items():
        prefix = name.removesuffix("input_ids")
        if prefix == name or prefix.endswith("decoder_") or (prefix and not prefix.endswith("_")):
            continue
        if isinstance(ids, torch.Tensor) and ids.dim() == 2:
            yield _lengths(ids, inputs.get(f"{prefix}attention_mask"), inputs.get(f"{prefix}position_ids"))


def _lengths(ids: torch.Tensor, mask: Any, positions: Any) -> torch.Tensor:
    """Real tokens of each sequence: by the mask, or by positions that start again at 0 where rows are flattened or packed."""
    if isinstance(mask, torch.Tensor) and mask.shape == ids.shape:
        return mask.sum(1)
    if isinstance(positions, torch.Tensor) and positions.shape == ids.shape:
        starts = (positions == 0).flatten().nonzero().flatten()
        return torch.diff(starts, append=torch.tensor([ids.numel()]))
    return torch.full((ids.shape[0],), ids.shape[1])


def _labelled(inputs: Mapping[str, Any]) -> torch.Tensor | None:
    """Tokens with a label, in a batch with a label for each token; transformers' label for the others is -100."""
    labels, ids = inputs.get("labels"), inputs.get("input_ids")
    if not isinstance(labels, torch.Tensor) or not isinstance(ids, torch.Tensor) or labels.shape != ids.shape:
        mask = inputs.get("completion_mask")  # of TRL's preference pairs
        return mask.sum() if isinstance(mask, torch.Tensor) else None
    return (labels != -100).sum()


def training_flops(work: Work, lengths: torch.Tensor, labelled: int = 0) -> float:
    linear = work.per_token * float(lengths.sum()) + work.per_label * labelled + work.per_row * lengths.numel()
    return linear + work.per_pair * float((lengths.double() ** 2).sum())


@dataclass
class Meter:
    """Counts since the last `take`, and in total."""

    work: Work
    peak: float | None
    """Operations per second that the machine was measured to reach; None if it was not measured."""
    padded_length: int | None = None
    """The length to which stock would pad every row; None: the longest of the batch."""
    positions: Positions = field(default_factory=Positions)
    """Positions that the padding-free parts of the model received and computed; zero if it has none."""
    rows: int = 0
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    bf16: bool = False
    _remeasured: bool = False
    _since: float = field(default_factory=time.perf_counter)
    _paused: float = 0.0
    _tokens: int = 0
    _flops: float = 0.0
    _lengths: list[torch.Tensor] = field(default_factory=list)
    """Of texts that are not counted yet."""
    _labels: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, model: nn.Module, *, bf16: bool) -> Meter:
        rates = known(this_machine())
        return cls(Work.of(model), peak(rates, bf16) if rates else None, bf16=bf16)

    def batch(self, inputs: Mapping[str, Any]) -> None:
        """Counts a batch that is about to be computed."""
        rows = 0
        labelled = _labelled(inputs) if self.work.per_label else None
        for lengths in _texts(inputs):
            rows = max(rows, len(lengths))  # both texts of a pair belong to one row
            self._lengths.append(lengths)
            if labelled is not None:
                self._labels.append(labelled)
        self.rows += rows
        self.positions.pairs_wanted = not rows
        if len(self._lengths) > _KEPT:
            self._count()

    def _count(self) -> None:
        """Adds up the batches since the last call."""
        if not self._lengths:
            return
        lengths = torch.cat(self._lengths)
        labelled = int(torch.stack(self._labels).sum()) if self._labels else 0
        self._tokens += int(lengths.sum())
        self._flops += training_flops(self.work, lengths, labelled)
        self._lengths, self._labels = [], []

    @property
    def tokens(self) -> int:
        """Real tokens since the last `take`."""
        self._count()
        return self._tokens

    @property
    def flops(self) -> float:
        self._count()
        return self._flops

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.phases[name] += time.perf_counter() - begin

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Around what is not training: evaluation, writing of checkpoints."""
        begin = time.perf_counter()
        yield
        self._paused += time.perf_counter() - begin

    def _share(self, rate: float) -> dict[str, float]:
        if self.peak is None:
            return {}
        if rate > self.peak and not self._remeasured:
            self._remeasured = True
            self.peak = max(self.peak, peak_now(self.bf16) or 0.0)
        if rate > _NOISE * self.peak:
            # The peak was measured while the machine was busy.
            log.warning(
                "training is faster than the measured peak of this machine; run `stoker doctor --fresh` to measure it again"
            )
            self.peak = None
            return {}
        self.peak = max(self.peak, rate)  # the best rate seen, in a measured product or in training
        return {"share_of_peak": round(rate / self.peak, 4)}

    def take(self) -> dict[str, float]:
        """The figures since the last call, for the log."""
        now = time.perf_counter()
        seconds = max(now - self._since - self._paused, 1e-9)
        figures: dict[str, float] = {}
        tokens, flops = self.tokens, self.flops
        if not tokens:  # raw texts are tokenized inside the loss: only what the model computed is known
            tokens = self.positions.computed
            flops = self.work.per_token * tokens + self.work.per_pair * self.positions.pairs
        if tokens:
            figures["tokens_per_second"] = round(tokens / seconds, 1)
            if self.rows:
                figures["samples_per_second"] = round(self.rows / seconds, 2)
            if self.positions.given:
                padded = self.rows * (self.padded_length or 0) or self.positions.given
                figures["padding_avoided"] = round(1.0 - self.positions.computed / padded, 4)
            if flops:
                figures |= self._share(flops / seconds)
            known_phases = sum(value for name, value in self.phases.items() if name != "rest")
            self.phases["rest"] = max(seconds - known_phases, 0.0)
        self.last_phases = dict(self.phases)
        self.phases = dict.fromkeys(PHASES, 0.0)
        self._tokens = self.rows = self.positions.given = self.positions.computed = self.positions.pairs = 0
        self._flops = self._paused = 0.0
        self._since = time.perf_counter()
        return figures


def peak(rates: Rates, bf16: bool) -> float:
    """Operations per second that this process can reach."""
    # Without bf16 units bf16 is computed as fp32, so the faster of the two is what could be reached.
    best = 1e9 * (max(rates.bf16_all, rates.fp32_all) if bf16 else rates.fp32_all)
    # Measured with all cores; a process with fewer gets its share.
    return best * min(1.0, torch.get_num_threads() / rates.threads)


def peak_now(bf16: bool) -> float | None:
    """Measures the peak again; None where other processes compute at the same time."""
    machine = this_machine()
    rates = known(machine)
    if rates is None or torch.get_num_threads() < rates.threads:
        return None
    # Without bf16 units the peak is that of fp32 products.
    units = bf16 and rates.fastest_dtype == "bf16"
    return peak(remeasure(machine, rates, clock=clock_ghz, bf16=units), bf16)
