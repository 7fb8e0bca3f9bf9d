"""Versions that do not work with Stoker or with each other, as a table: which packages, what goes wrong, what to install.

Each row was observed; docs/machine.md gives the sources. The supported ranges are those of `stoker.requires`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from stoker.requires import VERSIONS, release

__all__ = ["PAIRS", "BadPair", "Release", "find_bad_pairs", "untested"]

Release = tuple[int, ...]


@dataclass(frozen=True)
class BadPair:
    packages: tuple[str, ...]
    """Names on PyPI; the row applies if all of them are installed."""
    clash: Callable[..., bool]
    """Takes the release of each package, in that order; True if they do not work together."""
    why: str
    install: str
    """The command that solves it."""


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
    *(
        BadPair(
            (name,),
            lambda found, supported=supported: not supported.include(found),
            f"Stoker supports {name}{supported.range}",
            f"{_PIP} '{name}{supported.range}'",
        )
        for name, supported in VERSIONS.items()
    ),
)


def find_bad_pairs(versions: Mapping[str, str]) -> list[tuple[BadPair, str]]:
    """The rows that apply to the installed `versions`, each with the versions it names."""
    found = []
    for pair in PAIRS:
        releases = [release(versions.get(name, "")) for name in pair.packages]
        if all(releases) and pair.clash(*releases):
            found.append((pair, " with ".join(f"{name} {versions[name]}" for name in pair.packages)))
    return found


def untested(name: str, version: str) -> str:
    """A note for a version that is newer than any that Stoker's tests have run with; else empty."""
    newest = VERSIONS[name].newest if name in VERSIONS else version
    return f"newer than {newest}, the newest version tested" if release(version) > release(newest) else ""
