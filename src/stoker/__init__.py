"""Stoker: transformer training on CPUs, as fast as the hardware allows, with the commands people already know."""

from __future__ import annotations

__version__ = "0.1.0.dev0"
__all__ = ["__version__"]
