"""Versions that are known not to work together, as a table: which pair, what goes wrong, what to install.

A row is a fact someone met, not a guess; docs/machine.md says where each comes from.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

__all__ = ["PAIRS", "BadPair", "Release", "find_bad_pairs", "release"]

Release = tuple[int, ...]


@dataclass(frozen=True)
class BadPair:
    packages: tuple[str, ...]
    """Names on PyPI; the row counts where all of them are installed."""
    clash: Callable[..., bool]
    """Gets the release of each package, in that order; True where they do not work together."""
    why: str
    install: str
    """The one command that ends it."""


def _other_minor(package: Release, torch: Release) -> bool:
    return package[:2] != torch[:2]


_PIP = "pip install"

PAIRS: tuple[BadPair, ...] = (
    BadPair(
        ("intel_extension_for_pytorch", "torch"),
        _other_minor,
        "Intel Extension for PyTorch loads only with the torch of its own number, and ended with 2.8",
        "pip uninstall intel_extension_for_pytorch",
    ),
    BadPair(
        ("oneccl_bind_pt", "torch"),
        _other_minor,
        "the oneCCL bindings load only with the torch of their own number, and ended with 2.8",
        "pip uninstall oneccl_bind_pt",
    ),
    BadPair(
        ("impi-rt",),
        lambda impi: impi >= (2021, 19),
        "Intel MPI from 2021.19 on needs a libfabric that is not on PyPI",
        f"{_PIP} impi-rt==2021.18.1",
    ),
    BadPair(
        ("oneccl",),
        lambda ccl: ccl >= (2022,),
        "oneCCL from 2022 on needs a libfabric that is not on PyPI, and a SYCL runtime of 1.9 GB",
        f"{_PIP} oneccl-devel==2021.13.1",
    ),
    BadPair(
        ("transformers", "accelerate"),
        lambda transformers, accelerate: transformers >= (5,) and accelerate < (1, 1),
        "transformers 5 needs accelerate 1.1 or newer for its Trainer",
        f"{_PIP} --upgrade accelerate",
    ),
    BadPair(
        ("transformers", "torch"),
        lambda transformers, torch: transformers >= (5,) and torch < (2, 4),
        "transformers 5 switches PyTorch off below 2.4",
        f"{_PIP} --upgrade torch",
    ),
    BadPair(
        ("torch", "numpy"),
        lambda torch, numpy: torch < (2, 3) and numpy >= (2,),
        "torch before 2.3 was built for NumPy 1 and cannot exchange arrays with NumPy 2",
        f"{_PIP} --upgrade torch",
    ),
)


def release(version: str) -> Release:
    """The numbers of a version: 2.13.0+cpu -> (2, 13, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def find_bad_pairs(versions: Mapping[str, str]) -> list[tuple[BadPair, str]]:
    """The rows that hold for the installed `versions`, each with the versions it names."""
    found = []
    for pair in PAIRS:
        releases = [release(versions.get(name, "")) for name in pair.packages]
        if all(releases) and pair.clash(*releases):
            found.append((pair, " with ".join(f"{name} {versions[name]}" for name in pair.packages)))
    return found
