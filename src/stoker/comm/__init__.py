"""Collectives between processes and machines: the `ccl` backend of torch.distributed and what trains over it."""

from __future__ import annotations

import os

cwd = os.path.dirname(os.path.abspath(__file__))
"""Where env/setvars.sh lies, under the name it had in oneccl_bindings_for_pytorch."""
