"""What stores of torch.distributed that are written in Python have in common."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar

import torch.distributed as dist

__all__ = ["KeptStore"]


class KeptStore(dist.Store):
    """torch refers to the C++ part of a store only, for example in a PrefixStore, and fails once the Python part is gone. So each
    of these lives as long as its process; a rank has one or two.
    """

    _kept: ClassVar[list[KeptStore]] = []

    if TYPE_CHECKING:  # torch's stubs lack it

        @property
        def timeout(self) -> timedelta: ...

    def __init__(self, timeout: timedelta) -> None:
        super().__init__()
        self.set_timeout(timeout)
        self._kept.append(self)

    # torch calls these two by their names in C++, the others by their names in Python.

    def deleteKey(self, key: str) -> bool:
        return self.delete_key(key)

    def getNumKeys(self) -> int:
        return self.num_keys()
