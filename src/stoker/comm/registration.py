"""`register` makes "ccl" a backend of torch.distributed. torch calls it at `import torch`; see `stoker_ccl`."""

from __future__ import annotations

from stoker_ccl import register

__all__ = ["register"]
