"""Which engine multiplies which matrices: measured once per class of shapes and machine.

A class is the kind of product, its sizes with the number of tokens rounded to a power of four, the storage type and the
number of threads. The first product of a class times the engines on random matrices of that size (about half a second), so
every product of a run, the first included, uses the same engine, and a resumed run computes the same bits. The choice is
stored in the cache directory; STOKER_LINEAR_ENGINE, or the `engine` argument of `linear`, forces one.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stoker.kernels import native, products
from stoker.machine import cache_directory
from stoker.machine.facts import this_machine
from stoker.machine.isa import lowered_by

__all__ = ["choose", "clear_cache"]

_LOG = logging.getLogger("stoker.kernels")
_FILE = "engines.json"
_SMALL = 8e6  # floating-point operations; below this (50 microseconds) the call itself decides, not the engine
_MARGIN = 0.96  # another engine must take less than this share of torch's time; torch's is used for ties, and within the noise
_BUDGET = 0.4  # seconds per class
_TRIAL = (
    2e10  # floating-point operations of a trial at most (0.2 s): from there on all engines scale alike with the tokens
)
_TRIAL_TOKENS = 64  # at least: with this many all engines still compute in blocks

_choices: dict[str, str] | None = None  # cache: class -> engine, of this machine
_lock = threading.Lock()


def choose(
    kind: str,
    rows: int,
    columns: int,
    depth: int,
    dtype: torch.dtype,
    engine: str | None = None,
    without: tuple[str, ...] = (),
) -> str:
    """The engine for one product: `kind` is "nt" (x W^T), "nn" (dy W) or "tn" (dy^T x); `dtype` that of the activations.

    `without`: engines that the caller cannot use.
    """
    requested = engine or os.environ.get("STOKER_LINEAR_ENGINE") or "auto"
    if requested != "auto" and requested not in without:
        return _check(requested)
    # Gradients of weights are fp32. The first candidate is used unless another one is clearly faster.
    candidates = products.available(dtype, torch.float32 if kind == "tn" else dtype)
    candidates = tuple(candidate for candidate in candidates if candidate not in without)
    if len(candidates) == 1:
        return candidates[0]
    if 2.0 * rows * columns * depth < _SMALL:
        return candidates[0]
    return _measured(kind, rows, columns, depth, dtype, candidates)


def clear_cache() -> None:
    """Clears the choices of this process, so that the next product reads the cache file, or measures, again."""
    global _choices
    with _lock:
        _choices = None


def _check(engine: str) -> str:
    if engine not in products.ENGINES:
        raise ValueError(f"linear: engine is {engine!r}; choose one of auto, {', '.join(products.ENGINES)}")
    return engine


def _measured(kind: str, rows: int, columns: int, depth: int, dtype: torch.dtype, candidates: tuple[str, ...]) -> str:
    # Tokens are the rows of x W^T and dy W, and the depth of dy^T x.
    if kind == "tn":
        depth = _round(depth)
    else:
        rows = _round(rows)
    name = f"{kind} {rows}x{columns}x{depth} {str(dtype).removeprefix('torch.')} threads={native.threads()}"
    if candidates != products.available(dtype, torch.float32 if kind == "tn" else dtype):
        name += f" by {' or '.join(candidates)}"
    with _lock:
        known = _load()
        if known.get(name) not in candidates:
            known[name] = measure_fastest(kind, rows, columns, depth, dtype, candidates)
            _LOG.debug("engine for %s: %s", name, known[name])
            _store(known)
        return known[name]


def _round(tokens: int) -> int:
    """To the nearest power of four, by ratio: 512 to 2047 are 1024."""
    power = 16
    while tokens >= 2 * power:
        power *= 4
    return power


def measure_fastest(
    kind: str, rows: int, columns: int, depth: int, dtype: torch.dtype, candidates: tuple[str, ...]
) -> str:
    run = make_trial(kind, *_shrunk(kind, rows, columns, depth), dtype)
    best = dict.fromkeys(candidates, float("inf"))
    started = time.perf_counter()
    for round_ in range(12):
        for engine in candidates:
            seconds = run(engine)
            if round_:  # the first round touches memory and wakes threads
                best[engine] = min(best[engine], seconds)
        if round_ >= 2 and time.perf_counter() - started > _BUDGET:
            break
    fastest = min(candidates, key=best.__getitem__)
    return fastest if best[fastest] < _MARGIN * best[candidates[0]] else candidates[0]


def _shrunk(kind: str, rows: int, columns: int, depth: int) -> tuple[int, int, int]:
    """The sizes with so few tokens that a trial takes neither long nor much memory, however large the vocabulary is."""
    other = columns * (rows if kind == "tn" else depth)
    tokens = depth if kind == "tn" else rows
    while 2.0 * tokens * other > _TRIAL and tokens > _TRIAL_TOKENS:
        tokens //= 4
    return (rows, columns, tokens) if kind == "tn" else (tokens, columns, depth)


def make_trial(kind: str, rows: int, columns: int, depth: int, dtype: torch.dtype) -> Callable[[str], float]:
    def matrix(height: int, width: int, kind_of: torch.dtype) -> Tensor:
        # A generator of its own: measuring must not change the random numbers of the training.
        return torch.randn(height, width, generator=torch.Generator().manual_seed(0)).to(kind_of)

    if kind == "tn":
        a, b = matrix(depth, rows, dtype).t(), matrix(depth, columns, dtype)
    elif kind == "nt":
        a, b = matrix(rows, depth, dtype), matrix(columns, depth, torch.float32).t()
    else:
        a, b = matrix(rows, depth, dtype), matrix(depth, columns, torch.float32)
    out = torch.empty(rows, columns, dtype=torch.float32 if kind == "tn" else dtype)

    def run(engine: str) -> float:
        begin = time.perf_counter()
        products.multiply([(a, b)], out, None, engine)
        return time.perf_counter() - begin

    return run


def _key() -> str:
    """What the measurements depend on."""
    return f"{this_machine().fingerprint} torch {torch.__version__} {native.level()} {lowered_by()}".rstrip()


def _load() -> dict[str, str]:
    global _choices
    if _choices is None:
        stored: Any = (cache_directory.load(_FILE) or {}).get(_key())
        _choices = {str(name): str(engine) for name, engine in stored.items()} if isinstance(stored, dict) else {}
    return _choices


def _store(known: dict[str, str]) -> None:
    try:
        everything = cache_directory.load(_FILE) or {}
        others = everything.get(_key())
        if isinstance(others, dict):
            # Another process may have measured meanwhile: keep what it stored, except for engines that no longer exist,
            # which would be measured again at each product.
            known.update({str(name): str(engine) for name, engine in others.items() if engine in products.ENGINES})
        everything[_key()] = known
        cache_directory.save(_FILE, everything)
    except OSError as error:
        _LOG.debug("engine choices not stored: %s", error)
