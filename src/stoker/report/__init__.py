"""The page about a run, and the log it is made from. Nothing here needs torch; plots need matplotlib (`stoker[report]`).

`stoker.report` is also what a person calls on a model. Python binds a package's name in its parent when it is imported, so
this package answers the call too, and the two names never get in each other's way.
"""

from __future__ import annotations

import sys
import types
from typing import Any


class _Room(types.ModuleType):
    def __call__(self, model: Any) -> Any:
        """What `stoker.optimize` applied to `model`, what it left alone, and why."""
        from stoker.model import report

        return report(model)


sys.modules[__name__].__class__ = _Room
