"""SIGTERM and Ctrl-C during training: the step is finished and a checkpoint written before the process ends.

A second signal of the same kind ends the process at once.
"""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

from stoker.distributed.agreement import largest

__all__ = ["Interrupted", "Interrupts"]

_SIGNALS = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}


class Interrupted(SystemExit):
    """Ends the process with the exit code that its signal would have given."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


class Interrupts:
    """Within this context, the first signal is stored in `received` instead of ending the process."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[signal.Signals, Any] = {}

    @property
    def name(self) -> str:
        return _SIGNALS[signal.Signals(self.received)] if self.received else ""

    def on_any_rank(self) -> bool:
        """Whether any rank has received a signal, after which all must stop at the same step. A collective."""
        self.received = largest(self.received or 0) or None
        return self.received is not None

    def __enter__(self) -> Interrupts:
        self.received = None  # a signal that ended an earlier training does not end this one
        # Python runs handlers in the main thread only, and lets no other thread set them.
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:  # set by nohup, for example
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self._restore()
        print(
            f"\n{self.name}: finishing the step, then saving a checkpoint (repeat the signal to stop at once)",
            file=sys.stderr,
            flush=True,
        )

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._restore()
