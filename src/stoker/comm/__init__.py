"""Collectives between processes and machines: the `ccl` backend of torch.distributed."""

from __future__ import annotations

import os

cwd = os.path.dirname(os.path.abspath(__file__))
"""The directory of env/setvars.sh; oneccl_bindings_for_pytorch used the same name."""
