"""While a group is formed again: notices that one of its processes was lost, and ends what waits for that process.

torch and its backends form a group without a way to stop them. They wait in two places: in the store, for what another process
writes there, and in gloo, for a connection. gloo waits for five times the time-out of the group, which may be hours.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist

__all__ = ["NotFormed", "Watch", "WatchedStore", "open_sockets", "opened_since", "shut_down"]

_LONGEST = 20.0
"""Seconds in which processes that have agreed on a roster must have formed its group. It takes a fraction of a second."""
_LOOK = 0.05
"""Seconds between looks whether a process was lost."""
_WAIT = 0.005
"""Seconds between looks whether another process has written to the store."""


class NotFormed(Exception):
    """A process of the roster was lost before the group was formed."""


class Watch:
    """Looks, while a group is formed, whether that is still possible; if not, it ends what waits for other processes."""

    def __init__(self, can_be_formed: Callable[[], bool], size: int) -> None:
        self._can_be_formed, self._size = can_be_formed, size
        self._before = open_sockets()
        self._deadline = time.monotonic() + _LONGEST
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.over = False
        """Whether the group cannot be formed any more."""

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    @property
    def done(self) -> bool:
        """Whether the group was formed, or given up."""
        return self._done.is_set()

    def check(self) -> None:
        if self.over:
            raise NotFormed

    def _look(self) -> None:
        while not self._done.wait(_LOOK):
            try:
                self.over = self.over or time.monotonic() > self._deadline or not self._can_be_formed()
            except RuntimeError:  # the store is gone, and with it the job
                self.over = True
            if self.over:
                opened = opened_since(self._before)
                shut_down(opened)
                _answer_for_others(opened, self._size)


class WatchedStore(dist.Store):
    """A store in which this process does not wait for a lost one while a group is formed; afterwards, the store inside."""

    def __init__(self, store: dist.Store, watch: Watch) -> None:
        super().__init__()
        self._store, self._watch = store, watch
        self.set_timeout(store.timeout)  # type: ignore[attr-defined]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # type: ignore[override]
        while not self._watch.done:
            self._watch.check()
            if self._store.check(keys):
                return
            time.sleep(_WAIT)
        self._store.wait(keys, *(() if timeout is None else (timeout,)))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.wait(keys)
        return self._store.multi_get(keys)

    def check(self, keys: list[str]) -> bool:
        if not self._watch.done:
            self._watch.check()
        return self._store.check(keys)

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    def compare_set(self, key: str, expected_value: Any, desired_value: Any) -> bytes:
        return self._store.compare_set(key, expected_value, desired_value)

    def clone(self) -> dist.Store:
        found: dist.Store = self._store.clone()  # type: ignore[attr-defined]
        return found


def open_sockets() -> dict[int, str]:
    """The sockets of this process: descriptors, and names that no other socket ever has."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{entry}")
            if name.startswith("socket:"):
                found[int(entry)] = name
    return found


def opened_since(before: dict[int, str]) -> dict[int, str]:
    return {descriptor: name for descriptor, name in open_sockets().items() if before.get(descriptor) != name}


def _copies(sockets: dict[int, str]) -> Iterator[socket.socket]:
    """Those of `sockets` that are still open, as copies that stay open whatever another thread closes."""
    for descriptor, name in sockets.items():
        with contextlib.suppress(OSError):
            copy = os.dup(descriptor)
            if os.readlink(f"/proc/self/fd/{copy}") != name:
                os.close(copy)
                continue
            with socket.socket(fileno=copy) as one:
                yield one


def shut_down(sockets: dict[int, str]) -> None:
    """Ends the connections among `sockets` without closing them: their owner finds out as if the other side had ended them."""
    for one in _copies(sockets):
        with contextlib.suppress(OSError):
            one.getpeername()  # raises for a socket that listens, whose owner would abort the process
            one.shutdown(socket.SHUT_RDWR)


def _answer_for_others(sockets: dict[int, str], size: int) -> None:
    """Ends gloo's waiting for a process that was lost before it had connected: it would wait for five time-outs.

    A process that connects to gloo first sends the number of the pair of ranks that the connection is for. They are counted
    from 0. This connects for each pair, and hangs up.
    """
    for one in _copies(sockets):
        with contextlib.suppress(OSError):
            if not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                continue
            for number in range(size):
                with socket.socket(one.family, one.type) as connection:
                    connection.settimeout(1.0)
                    connection.connect(one.getsockname())
                    connection.sendall(number.to_bytes(8, sys.byteorder))
