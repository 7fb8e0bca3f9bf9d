"""A lane runs the operations of one group one after the other, in the order they were given, off the caller's thread.

An operation whose caller is going to wait anyway runs in the caller's own thread when the lane is empty: waking another
thread costs more than a small collective.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

__all__ = ["Lane", "Named"]

_c10d: Any = torch._C._distributed_c10d  # missing in torch's stubs


class _Work(_c10d.Work):  # type: ignore[misc]
    """A Work made from a future keeps an error to itself when waited for; this one raises it."""

    def __init__(self, future: torch.futures.Future[Any]) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: timedelta | None = None) -> bool:
        """The engine keeps its own time and names who is missing; `timeout` is of this wait alone, the operation goes on."""
        if timeout is not None and timeout > timedelta(0):
            seconds = timeout.total_seconds()
            deadline = time.monotonic() + seconds
            while not self._future.done():
                if time.monotonic() > deadline:
                    raise RuntimeError(f"ccl: waited {seconds:g} s for an operation that is not over")
                time.sleep(0.001)
        self._future.wait()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future

    def is_completed(self) -> bool:
        return self._future.done()

    def is_success(self) -> bool:
        if not self._future.done():
            return False
        try:
            self._future.value()
        except Exception:
            return False
        return True

    def result(self) -> Any:
        return self._future.value()


class Named(_c10d.Work):  # type: ignore[misc]
    """An operation of gloo between hosts; when it fails, `explain` adds who is missing."""

    def __init__(self, inner: Any, explain: Callable[[str], str]) -> None:
        super().__init__()
        self._inner = inner
        self._explain = explain

    def wait(self, timeout: Any = None) -> bool:
        try:
            done: bool = self._inner.wait() if timeout is None else self._inner.wait(timeout)
        except RuntimeError as error:
            raise RuntimeError(self._explain(f"ccl: {error}")) from error
        return done

    def get_future(self) -> Any:
        return self._inner.get_future()

    def is_completed(self) -> bool:
        return bool(self._inner.is_completed())

    def is_success(self) -> bool:
        return bool(self._inner.is_success())

    def result(self) -> Any:
        return self._inner.result()

    def _source_rank(self) -> int:
        return int(self._inner._source_rank())


class _Job:
    def __init__(self, run: Callable[[], None], result: Any) -> None:
        self._run = run
        self._result = result
        self.failure: Exception | None = None
        self._over: torch.futures.Future[Any] = torch.futures.Future()
        # Future.set_exception is seen by Python only; an exception in a callback is an error for C++ (DDP) too.
        self.work = _Work(self._over.then(self._outcome))

    def perform(self) -> None:
        try:
            self._run()
        except Exception as error:
            self.failure = error
        self._over.set_result(None)

    def _outcome(self, over: torch.futures.Future[Any]) -> Any:
        if self.failure is not None:
            raise self.failure
        return self._result


class Lane:
    """An ordered queue with at most one thread of its own, started when first needed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: deque[_Job] = deque()
        self._change = threading.Condition()
        self._runner: int | None = None
        """The thread that is at an operation, or at the callbacks of one."""
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, run: Callable[[], None], result: Any, *, inline: bool = False) -> Any:
        """A c10d Work that completes with `result` when `run` has run."""
        job = _Job(run, result)
        with self._change:
            if self._closed:
                raise RuntimeError(f"the {self._name} group has been destroyed")
            within = self._runner == threading.get_ident()  # in a callback, which may wait for it: at once
            inline = inline and self._runner is None and not self._jobs
            if inline:
                self._runner = threading.get_ident()
            elif not within:
                self._jobs.append(job)
                self._wake()
        if within:
            job.perform()
        if inline:
            try:
                job.perform()
            finally:
                self._rest()
            if job.failure is not None:
                raise job.failure
        return job.work

    @property
    def unfinished(self) -> bool:
        with self._change:
            return self._runner is not None or bool(self._jobs)

    def close(self, patience: float = 10.0) -> bool:
        """Lets what was given finish, then ends the thread; False if it, or one that helps, is still at it after that long."""
        me = threading.get_ident()
        with self._change:
            self._closed = True
            self._change.notify_all()
            over = self._change.wait_for(lambda: self._runner == me or not (self._runner or self._jobs), patience)
        if over and self._thread is not None and self._thread.ident != me:
            self._thread.join(patience)  # it must not be about to end when the interpreter ends
        return over

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"stoker-{self._name}", daemon=True)
            self._thread.start()
        self._change.notify_all()

    def _work(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._runner is None and (self._jobs or self._closed))
                if not self._jobs:
                    return
                job = self._jobs.popleft()
                self._runner = threading.get_ident()
            job.perform()
            self._rest()

    def _rest(self) -> None:
        with self._change:
            self._runner = None
            self._change.notify_all()
