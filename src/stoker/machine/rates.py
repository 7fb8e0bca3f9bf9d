"""What this machine was measured to reach: products, memory, a training step; kept per machine. Imports no torch.

`known()` reads the cache and `save()` writes it. Measuring is left to others: `stoker.machine.measure` for products and
memory, `stoker.model.training_step` for the step. Everything that states a share of the machine's peak takes it from here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from stoker.machine import cache_directory
from stoker.machine.facts import Machine, this_machine
from stoker.machine.isa import lowered_by

__all__ = ["WORTHWHILE_GAIN", "Rates", "TrainingStep", "bf16_training_gain", "installed_version", "known", "save"]

WORTHWHILE_GAIN = 1.15
"""How many times as fast bf16 must train before it is recommended: below, fp32's three more digits are worth more."""

_FORMAT = 2  # raised when the meaning of a stored figure changes; files of another format are measured again


@dataclass(frozen=True)
class TrainingStep:
    """Seconds of one training step of a small encoder: forward, backward and AdamW through `stoker.optimize`."""

    fp32: float
    """Median, in turn with bf16."""
    bf16: float
    """With bf16 activations and fp32 master weights."""
    width: int
    """Of the hidden states."""
    layers: int
    tokens: int
    rounds: int
    """Steps of each precision."""
    stoker: str
    """The version whose kernels ran."""
    measured: str
    """When, in UTC."""
    disturbed: bool

    @property
    def gain(self) -> float:
        """How many times as fast bf16 trains as fp32."""
        return self.fp32 / self.bf16


@dataclass(frozen=True)
class Rates:
    """GFLOP/s of products, GB/s of memory (read two arrays, write one)."""

    threads: int
    """How many threads "all" were."""
    fp32_one: float
    fp32_all: float
    bf16_one: float
    bf16_all: float
    bandwidth_one: float
    bandwidth_all: float
    clock_one: float | None
    """GHz of a core during the fp32 product of one thread; None if it was not measured."""
    clock_all: float | None
    """GHz of a core during the fp32 product of all threads."""
    torch: str
    measured: str
    """When, in UTC."""
    seconds: float
    disturbed: bool
    """Whether other programs kept CPUs busy during the measurement, which makes the figures too low."""
    clock_bf16: float | None = None
    """GHz of a core during the bf16 product of all threads: matrix units may run at a lower clock."""
    step: TrainingStep | None = None
    """None if it was not measured."""

    @property
    def fastest_dtype(self) -> str:
        return "bf16" if self.bf16_all > self.fp32_all else "fp32"


def known(machine: Machine) -> Rates | None:
    """The rates measured before on this machine with this torch, if any; the step only if this Stoker measured it."""
    stored = cache_directory.load(_name(machine))
    if stored is None or stored.get("format") != _FORMAT or not isinstance(stored.get("rates"), dict):
        return None
    values: dict[str, Any] = {**stored["rates"]}
    step = values.pop("step", None)
    if not _plausible(Rates, {**values, "step": None}):
        return None
    rates = Rates(**values)
    if rates.torch != installed_version("torch") or rates.threads != machine.usable_threads:
        return None
    if isinstance(step, dict) and _plausible(TrainingStep, step) and step["stoker"] == installed_version("stoker"):
        return dataclasses.replace(rates, step=TrainingStep(**step))
    return rates


def save(machine: Machine, rates: Rates) -> str | None:
    """Stores `rates` for later runs; returns the reason if that is not possible."""
    try:
        cache_directory.save(_name(machine), {"format": _FORMAT, "rates": dataclasses.asdict(rates)})
    except OSError as error:
        where = cache_directory.cache_directory()
        reason = error.strerror or str(error)
        return (
            f"The measured rates could not be stored in {where or 'a cache'} ({reason}), so every run measures again."
        )
    return None


def bf16_training_gain(machine: Machine | None = None) -> float | None:
    """How many times as fast a step trains in bf16 as in fp32, as `stoker doctor` measured it here.

    None if it did not, or while other programs ran: the ratio is then off by a tenth, and this figure decides something.
    """
    rates = known(machine or this_machine())
    return rates.step.gain if rates and rates.step and not rates.step.disturbed else None


def _plausible(kind: type[Rates] | type[TrainingStep], values: dict[str, Any]) -> bool:
    """Whether a file holds exactly the fields of `kind`, each with a value that it can have."""
    fields = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    return set(values) == set(fields) and all(_fits(values[name], hint) for name, hint in fields.items())


def _fits(value: object, hint: str) -> bool:
    if value is None:
        return hint.endswith("None")
    if hint in {"str", "bool"}:
        return type(value).__name__ == hint
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def installed_version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def _name(machine: Machine) -> str:
    lowered = lowered_by()
    suffix = f"-{hashlib.sha256(lowered.encode(errors='replace')).hexdigest()[:8]}" if lowered else ""
    return f"rates-{machine.fingerprint}{suffix}.json"
