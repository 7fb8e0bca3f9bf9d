"""How one architecture runs with Stoker, and whether it computes what the stock model computes.

Reference: the stock model with its own attention, example by example without padding. Where stock itself gives something else
for a padded batch (positions that count padding, normalization over the batch), that is right too. A case ends as one of
`OUTCOMES`; `wrong` and `crash` are failures, and so is a text model that runs as stock without a line in the log that says why.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import stoker
from stoker.errors import one_line
from stoker.model.sequences import Positions, counting
from zoo.batches import ROWS, Batch, Kind, Side, candidates
from zoo.choices import Forced, Recorded
from zoo.page import FAILED
from zoo.shrink import SCALES, shrink
from zoo.species import classes_of

__all__ = ["FAILED", "OUTCOMES", "Case", "examine", "examine_class"]

OUTCOMES = ("fused", "padding-free", "attention", "leaf kernels", "stock", "wrong", "crash", "silent", "not built")

PARAMETERS = 4_000_000
"""A model with more is not small."""
EXACT = 2e-3
"""Relative error in fp32 that rounding may cause: sums are added up in another order, through two or three layers."""
ROUNDED = 0.15
"""The same under bf16 autocast. Of eight draws of MobileBERT's weights, stock's error was 0.02 to 0.10, Stoker's 0.01 to 0.14."""
REROUTED = 0.1
"""The share of tokens for which rounding may choose another expert. In 40 runs of stock it was 0.06 at most, mostly 0.02."""
NOISE = 3.0
"""Otherwise, how many times stock's own error under autocast."""


@dataclass
class Case:
    """One model class, and how it ran."""

    folder: str
    name: str
    outcome: str
    why: str = ""
    """The reason that was logged, or that the report gives, or the error."""
    attention: str = ""
    """How it ran with attn_implementation="stoker" alone: `kernel`, `stock`, or `refused` with the error of transformers."""
    calls: dict[str, str] = field(default_factory=dict)
    """Calls that failed, and how."""
    errors: dict[str, float] = field(default_factory=dict)
    """The relative error of every other call."""
    rerouted: dict[str, str] = field(default_factory=dict)
    """Calls that chose other experts than stock, and were compared with the experts of stock."""
    inputs: str = ""
    seconds: float = 0.0


def examine(folder: str, classes: int | None = None) -> list[Case]:
    """All model classes of a folder, or the first few of them."""
    return [examine_class(folder, *pair) for pair in list(classes_of(folder))[:classes]]


def examine_class(folder: str, config: Any, model: Any) -> Case:
    begin = time.monotonic()
    with _quiet():
        specimen = _build(config, model)
        if isinstance(specimen, str):
            return Case(folder, model.__name__, "not built", specimen, seconds=_since(begin))
        case = _run(folder, specimen)
    case.seconds = _since(begin)
    return case


def _since(begin: float) -> float:
    return round(time.monotonic() - begin, 2)


# --- The stock model


@dataclass(frozen=True)
class Measured:
    """What a training step gives."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    kernels: frozenset[str] = frozenset()
    """The operators of Stoker that gradients go through."""


@dataclass(frozen=True)
class Specimen:
    """A small stock model that runs, and what it takes."""

    stock: Any
    kind: Kind

    def batch(self, side: Side) -> Batch:
        return self.kind.batch(self.stock.config, side)


def _build(config: Any, model: Any) -> Specimen | str:
    """The first small configuration and kind of input that the stock model works with, or the first error."""
    first = ""
    for scale in SCALES:
        try:
            small = shrink(config, scale)
            stock = _model(model, small)
        except Exception as error:  # what a library's configurations raise can be anything
            first = first or f"{type(error).__name__}: {one_line(error)}"
            if isinstance(error, ImportError):
                break
            continue
        for kind in candidates(stock):
            try:
                specimen = Specimen(stock, kind)
                if reason := _works(specimen):
                    raise RuntimeError(reason)
            except Exception as error:
                first = first or f"{type(error).__name__}: {one_line(error)}"
                continue
            return specimen
    return first[:300] or "no kind of input is known for it"


def _model(model: Any, config: Any) -> nn.Module:
    with torch.device("meta"), contextlib.suppress(NotImplementedError, RuntimeError):
        count = sum(parameter.numel() for parameter in model(copy.deepcopy(config)).parameters())
        if count > PARAMETERS:
            raise ValueError(f"it has {count:,} parameters")
    torch.manual_seed(0)
    made: nn.Module = model(config)
    with torch.no_grad():  # stock initialization is so uniform that errors would stay small
        for parameter in made.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return made.float().train()


def _works(specimen: Specimen) -> str | None:
    """Why the stock model cannot be compared with, if so. It is set to eval mode if it draws random numbers in training."""
    batch = specimen.batch("right")
    for _ in range(2):
        one, other = (measure(specimen.stock, batch) for _ in range(2))
        if not all(bool(value.isfinite().all()) for value in one.gradients.values()):
            return "the gradients of the stock model are not finite"
        if not any(bool(value.any()) for value in one.gradients.values()):
            return "no gradient reaches the parameters of the stock model"
        if _distance(one, other)[0] < 1e-5:
            return None
        if not specimen.stock.training:
            return "the stock model is not deterministic"
        specimen.stock.eval()
    return "the stock model is not deterministic"


def _copy(model: nn.Module) -> Any:
    """A copy of a model, without the graph of what it keeps from its last call, as RecurrentGemma does with its states."""
    kept = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    return copy.deepcopy(model, {id(value): value.detach().clone() for value in kept if value.grad_fn is not None})


# --- A training step, and the distance of two


def measure(model: Any, batch: Batch, *, bf16: bool = False, **more: Any) -> Measured:
    """A training step over the padded batch."""
    return _step(model, [(batch.inputs, 1.0)], batch.masks, bf16, more)


def truth(model: Any, batch: Batch, *, bf16: bool = False) -> Measured | None:
    """The same, example by example without padding; None if the stock model cannot be run so."""
    rows = [(row, weight) for row, weight in zip(batch.rows, batch.weights, strict=True)]
    try:
        return _step(model, rows, None, bf16, {})
    except Exception:
        return None


def _step(model: Any, calls: Any, masks: dict[int, Tensor] | None, bf16: bool, more: dict[str, Any]) -> Measured:
    model.zero_grad(set_to_none=True)
    outputs: dict[str, list[Tensor]] = {}
    kernels: frozenset[str] = frozenset()
    for inputs, weight in calls:
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            output = model(**{name: value.clone() for name, value in inputs.items()}, **more)
        found = dict(_tensors(output, inputs, masks))
        objective = found["loss"] * weight if "loss" in found else _probe(found)
        kernels |= _kernels(objective)
        objective.backward()
        for name, value in found.items():
            share = weight if value.dim() == 0 and name == "loss" else 1.0
            outputs.setdefault(name, []).append(value.detach().float() * share)
    gradients = {name: one.grad.float().clone() for name, one in model.named_parameters() if one.grad is not None}
    joined = {
        name: torch.stack(values).sum() if values[0].dim() == 0 else torch.cat(values)
        for name, values in outputs.items()
    }
    return Measured(joined, gradients, kernels)


def _tensors(output: Any, inputs: dict[str, Tensor], masks: dict[int, Tensor] | None) -> Iterator[tuple[str, Tensor]]:
    """The outputs of a model at real tokens, (tokens, ...), or (rows, ...) where they have no dimension of tokens."""
    sequences = {inputs[name].shape[1] for name in ("input_ids", "decoder_input_ids") if name in inputs}
    rows = next(iter(inputs.values())).shape[0]
    for name, value in output.items():
        if name == "router_logits" and masks is not None and isinstance(value, tuple):
            real = next(iter(masks.values()))
            for place, one in enumerate(value):
                if one.shape[:1] != (real.numel(),) and one.shape[:2] != real.shape:
                    raise ValueError(f"router_logits are of shape {tuple(one.shape)} for a batch {tuple(real.shape)}")
                yield f"{name} {place}", one.reshape(real.numel(), -1)[real.flatten()]
        if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
            continue
        if name.startswith("logits_per_"):  # of every text with every image: examples one by one do not have them
            continue
        if value.dim() == 0:
            yield name, value
        elif value.shape[0] == rows:
            if value.dim() > 1 and value.shape[1] in sequences:
                yield name, value[masks[value.shape[1]]] if masks is not None else value[0]
            else:
                yield name, value


def _probe(found: dict[str, Tensor]) -> Tensor:
    """A sum of everything, each element with a weight of its own."""
    terms = []
    for name, value in found.items():
        if value.requires_grad and value.dim():
            generator = torch.Generator().manual_seed(len(name))
            weights = torch.randn(value.shape[1:], generator=generator)
            terms.append((value.float() * weights).sum() / math.sqrt(weights.numel()))
    if not terms:
        raise RuntimeError("the model returns nothing that gradients go through")
    return torch.stack(terms).sum()


def _kernels(result: Tensor) -> frozenset[str]:
    names, seen, left = set(), set(), [result.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (name := node.name()).startswith("stoker_"):
            names.add(name.removeprefix("stoker_").removesuffix("Backward"))
        left.extend(following for following, _ in node.next_functions)
    return frozenset(names)


def _distance(one: Measured, other: Measured, whole: bool = False) -> tuple[float, str]:
    """The largest relative difference, and of what. `whole`: of all gradients together instead of each one's."""
    worst, where = 0.0, ""

    def compare(name: str, difference: float, size: float) -> None:
        nonlocal worst, where
        ratio = difference / max(size, 1e-30)
        ratio = math.inf if math.isnan(ratio) else ratio
        if ratio > worst:
            worst, where = ratio, name

    for name, value in other.outputs.items():
        mine = one.outputs.get(name)
        if mine is None or mine.shape != value.shape:
            return math.inf, f"{name} has another shape"
        compare(name, float((mine - value).norm()), max(float(value.norm()), 1e-3))
    sizes = {name: float(value.norm()) for name, value in other.gradients.items()}
    floor = 1e-2 * max(sizes.values(), default=1.0)
    differences = {}
    for name in {*one.gradients, *other.gradients}:
        a, b = one.gradients.get(name), other.gradients.get(name)
        differences[name] = float((torch.zeros(()) if a is None else a).sub(torch.zeros(()) if b is None else b).norm())
    if whole:
        compare("the gradients", math.hypot(*differences.values()), math.hypot(*sizes.values()))
    else:
        for name, difference in sorted(differences.items()):
            compare(f"the gradient of {name}", difference, max(sizes.get(name, 0.0), floor))
    return worst, where


# --- The comparison


class References:
    """What the stock model gives, computed when it is first needed."""

    def __init__(self, specimen: Specimen) -> None:
        self._specimen = specimen
        self._made: dict[Any, Any] = {}

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def of(self, side: Side, **more: Any) -> list[Measured]:
        """In fp32: example by example, and on the padded batch."""
        stock, batch = self._specimen.stock, self._specimen.batch(side)

        def make() -> Measured:
            with Recorded(batch.masks.values()) as recorded:
                made = measure(stock, batch, **more)
            self._made["choices", side] = recorded.choices
            return made

        padded = self._once((side, *more), make)
        rows = None if more else self._once(("rows", side), lambda: truth(stock, batch))
        return [padded] if rows is None else [rows, padded]

    def same_experts(self, side: Side) -> Forced:
        """A context in which a model chooses the experts that stock chooses for the padded batch in fp32."""
        self.of(side)
        has_experts = _has_experts(self._specimen.stock)
        choices = self._made["choices", side] if has_experts else {}
        masks = self._specimen.batch(side).masks.values() if has_experts else ()
        return Forced(masks, choices)

    def after_bf16(self, side: Side) -> Measured:
        """In fp32, by a model that ran under autocast before: some keep tables of positions that were rounded then."""

        def make() -> Measured:
            model = _copy(self._specimen.stock)
            measure(model, self._specimen.batch("right"), bf16=True)
            return measure(model, self._specimen.batch(side))

        return self._once(("after bf16", side), make)  # type: ignore[no-any-return]

    def noise(self, side: Side) -> float | None:
        """The error of the stock model under autocast, with the same experts; None if it does not work there."""
        batch = self._specimen.batch(side)

        def make() -> float | None:
            model = _copy(self._specimen.stock)
            try:
                with self.same_experts(side):
                    padded = _distance(measure(model, batch, bf16=True), self.of(side)[-1], whole=True)[0]
            except Exception:
                return None
            rows = None if _has_experts(model) else truth(model, batch, bf16=True)
            return padded if rows is None else max(padded, _distance(rows, self.of(side)[0], whole=True)[0])

        return self._once(("noise", side), make)  # type: ignore[no-any-return]


@dataclass
class Trial:
    """The calls of one way to use Stoker, and what became of them."""

    specimen: Specimen
    references: References
    label: str
    case: Case

    def call(self, name: str, model: Any, side: Side, *, bf16: bool = False, **more: Any) -> Measured | None:
        """Runs a step, and writes down how it differs from stock if it does."""
        label = f"{self.label}, {name}"
        noise = self.references.noise(side) if bf16 else 0.0
        if noise is None:
            return None  # stock does not work here
        try:
            references = self.references.of(side, **more)
        except Exception:
            return None
        try:
            made = measure(model, self.specimen.batch(side), bf16=bf16, **more)
        except Exception as error:
            self.case.calls[label] = f"crash: {type(error).__name__}: {one_line(error)[:200]} ({_place(error)})"
            return None
        error, where = min(_distance(made, reference, whole=bf16) for reference in references)
        if error > EXACT and not bf16 and not more and "after bf16" in name:
            error, where = min((error, where), _distance(made, self.references.after_bf16(side)))
        limit = max(ROUNDED, NOISE * noise) if bf16 else EXACT
        if error > limit and bf16:
            with self.references.same_experts(side) as forced:
                again = measure(model, self.specimen.batch(side), bf16=True, **more)
            if 0 < forced.different <= REROUTED * forced.total:
                found = f"{error:.2g} with other experts in {forced.different} of {forced.total} choices"
                error, where = _distance(again, references[-1], whole=True)
                self.case.rerouted[label] = f"{found}, {error:.2g} with those of stock"
        if error <= limit:
            self.case.errors[label] = float(f"{error:.2g}")
        else:
            stock = f" (stock by {noise:.2g})" if bf16 else ""
            self.case.calls[label] = f"wrong: {where} differs by {error:.2g}{stock}"
        return made


def _place(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{'/'.join(frame.filename.split('/')[-2:])}:{frame.lineno}"


def _run(folder: str, specimen: Specimen) -> Case:
    references = References(specimen)
    case = Case(folder, type(specimen.stock).__name__, "", inputs=_describe(specimen))
    case.outcome, case.why = _optimized(Trial(specimen, references, "optimize", case))
    case.attention = _attention_alone(Trial(specimen, references, "attention", case))
    for outcome in ("crash", "wrong"):
        if any(call.startswith(outcome) for call in case.calls.values()):
            case.outcome = outcome
            case.why = next(f"{name}: {call}" for name, call in case.calls.items() if call.startswith(outcome))
            break
    return case


def _describe(specimen: Specimen) -> str:
    parts = [*specimen.batch("right").inputs, *([] if specimen.stock.training else ["eval mode"])]
    return ", ".join(part for part in parts if part != "attention_mask")


def _calls(trial: Trial, make: Callable[[], Any], has_text: bool) -> Any:
    """Right, left and no padding in fp32, then autocast; and a second model that begins with autocast. Returns the first."""
    model = make()
    trial.call("right", model, "right")
    if has_text:
        trial.call("left", model, "left")
        trial.call("no padding", model, "none")
    trial.call("bf16 after fp32", model, "right", bf16=True)
    if _routes(trial.specimen.stock):
        trial.call("router logits", model, "right", output_router_logits=True)
    second = make()
    trial.call("bf16 first", second, "left" if has_text else "right", bf16=True)
    trial.call("fp32 after bf16", second, "right")
    return model


def _routes(model: Any) -> bool:
    """Whether it returns router logits on request."""
    return any("output_router_logits" in names for names in _names(model))


def _has_experts(model: Any) -> bool:
    return any("expert" in name for names in _names(model) for name in names)


def _names(model: Any) -> list[dict[str, Any]]:
    """The fields of a model's configuration, and of the configuration of its text model."""
    config = model.config
    return [one.to_dict() for one in (config, getattr(config, "text_config", None)) if one is not None]


def _optimized(trial: Trial) -> tuple[str, str]:
    """The outcome, and the reason that was logged or that the report gives."""
    specimen = trial.specimen
    with _logged() as lines:
        try:
            first = stoker.optimize(_copy(specimen.stock))
        except Exception as error:
            trial.case.calls["optimize"] = f"crash: {type(error).__name__}: {one_line(error)[:200]} ({_place(error)})"
            return "crash", ""
        models = iter([first])
        model = _calls(
            trial,
            lambda: next(models, None) or stoker.optimize(_copy(specimen.stock)),
            specimen.kind.text,
        )
        positions, kernels = Positions(), frozenset[str]()
        with contextlib.suppress(Exception), counting(positions):
            kernels = measure(model, specimen.batch("right")).kernels
    if specimen.kind.text:
        kept = Trial(specimen, trial.references, "optimize(unpad=False)", trial.case)
        with _logged():
            kept.call("right", stoker.optimize(_copy(specimen.stock), unpad=False), "right")
    report = stoker.report(model)
    parts = {part for part, _, _ in report.applied}
    reasons = [f"{what}: {why}" for what, why in report.left_alone if "call of" in what or "padding" in what]
    why = lines[0] if lines else reasons[0] if reasons else ""
    skips_padding = positions.computed < positions.given
    if skips_padding:
        return "fused" if "fused layer" in parts else "padding-free", ""
    if "attention" in kernels:
        return "attention", why
    outcome = "leaf kernels" if parts - {"attention implementation"} else "stock"
    return (
        ("silent", f"runs as {outcome}, and nothing is logged") if specimen.kind.text and not lines else (outcome, why)
    )


def _attention_alone(trial: Trial) -> str:
    """attn_implementation="stoker" in the stock model."""
    stock = trial.specimen.stock

    def make() -> Any:
        config = copy.deepcopy(stock.config)
        model = type(stock)._from_config(config, attn_implementation="stoker")
        model.load_state_dict(stock.state_dict())
        return model.float().train(stock.training)

    with _logged() as lines:
        try:
            make()
        except Exception as error:
            return f"refused: {type(error).__name__}: {one_line(error)[:200]}"
        model = _calls(trial, make, trial.specimen.kind.text)
        with contextlib.suppress(Exception):
            if "attention" in measure(model, trial.specimen.batch("right")).kernels:
                return "kernel"
    return ": ".join(["stock", *lines[:1]])


# --- The log


@contextlib.contextmanager
def _logged() -> Iterator[list[str]]:
    """The reasons that Stoker logs within this block, a line each; the report is not a line."""
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "because" in (line := record.getMessage()) and "\n" not in line:
                lines.append(line)

    log, handler = logging.getLogger("stoker"), Handler()
    level, propagates = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield lines
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagates


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """transformers logs a line for every odd configuration."""
    import warnings

    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)


assert ROWS == 3
