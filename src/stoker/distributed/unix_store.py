"""A store of torch.distributed for the processes of one machine: a Unix socket in a directory that only its owner can enter.

torch's TCPStore listens on a port, which every user of the machine can connect to, and it asks nobody who they are. torch's
FileStore appends to a file; a process that is killed while it writes leaves half an entry, and nobody can read the file again.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import socketserver
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from stoker.distributed.kept_store import KeptStore

__all__ = ["UnixStore", "UnixStoreServer"]

_BACKLOG = 1024
"""Ranks that may connect at once: all of a large machine when they start."""


class UnixStoreServer:
    """Serves a store from a thread of this process, for as long as the process runs."""

    def __init__(self, path: Path) -> None:
        if os.stat(path.parent).st_mode & 0o077:
            raise PermissionError(f"{path.parent} is open to other users")
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        answer = self._answer

        class Request(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError, ValueError):  # the other process has been killed
                    operation, *arguments = json.loads(self.rfile.readline())
                    self.wfile.write(json.dumps(answer(operation, arguments)).encode() + b"\n")

        with _short(path) as name:
            server = _Server(name, Request)
        threading.Thread(target=server.serve_forever, daemon=True, name="store").start()

    def _answer(self, operation: str, arguments: list[Any]) -> Any:
        with self._changed:
            result = getattr(self, f"_{operation}")(*arguments)
            if operation in ("set", "add", "append", "compare_set"):
                self._changed.notify_all()
            return result

    def _set(self, key: str, value: str) -> None:
        self._values[key] = _unpacked(value)

    def _append(self, key: str, value: str) -> None:
        self._values[key] = self._values.get(key, b"") + _unpacked(value)

    def _get(self, key: str, seconds: float) -> str | None:
        return _packed(self._values[key]) if self._wait([key], seconds) else None

    def _wait(self, keys: list[str], seconds: float) -> bool:
        return self._changed.wait_for(lambda: self._check(keys), min(seconds, threading.TIMEOUT_MAX))

    def _check(self, keys: list[str]) -> bool:
        return self._values.keys() >= set(keys)

    def _add(self, key: str, number: int) -> int:
        total = int(self._values.get(key, b"0")) + number
        self._values[key] = str(total).encode()
        return total

    def _compare_set(self, key: str, expected: str, desired: str) -> str:
        """As TCPStore does: a key that is not there equals the empty value."""
        found = _packed(self._values[key]) if key in self._values else ""
        if found != expected:
            return found if key in self._values else expected
        self._values[key] = _unpacked(desired)
        return desired

    def _delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def _list_keys(self) -> list[str]:
        return list(self._values)


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads, request_queue_size = True, _BACKLOG

    def handle_error(self, request: Any, client_address: Any) -> None:
        """An odd request of the owner's own is answered by the end of the connection."""


class UnixStore(KeptStore):
    """The store that a `UnixStoreServer` serves at `path`. Each call is a connection of its own, so threads can share it."""

    def __init__(self, path: Path, timeout: timedelta) -> None:
        super().__init__(timeout)
        self._path = path
        self._ask("check", [])  # whether somebody serves it

    def clone(self) -> UnixStore:
        return UnixStore(self._path, self.timeout)

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key, _packed(value))

    def append(self, key: str, value: str | bytes) -> None:
        self._ask("append", key, _packed(value))

    def get(self, key: str) -> bytes:
        seconds = self.timeout.total_seconds()
        found = self._ask("get", key, seconds)
        if found is None:
            raise dist.DistStoreError(f"no process of the job has set {key} within {seconds:g} s")
        return _unpacked(found)

    def add(self, key: str, value: int) -> int:
        return int(self._ask("add", key, value))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        return _unpacked(self._ask("compare_set", key, _packed(expected_value), _packed(desired_value)))

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = (self.timeout if timeout is None else timeout).total_seconds()
        if not self._ask("wait", keys, seconds):
            raise dist.DistStoreError(f"no process of the job has set {', '.join(keys)} within {seconds:g} s")

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete_key", key))

    def list_keys(self) -> list[str]:
        return [str(key) for key in self._ask("list_keys")]

    def num_keys(self) -> int:
        return len(self.list_keys())

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def _ask(self, *request: Any) -> Any:
        try:
            with socket.socket(socket.AF_UNIX) as connection, _short(self._path) as name:
                connection.connect(name)
                connection.sendall(json.dumps(request).encode() + b"\n")
                with connection.makefile("rb") as stream:
                    answer = stream.readline()
        except OSError as error:
            raise dist.DistNetworkError(f"the store of this job's launch does not answer: {error.strerror}") from None
        if not answer.endswith(b"\n"):
            raise dist.DistNetworkError("the store of this job's launch has ended")
        return json.loads(answer)


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """A name of `path` that fits into the address of a socket, which has 108 bytes; a TMPDIR may be longer."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def _packed(value: str | bytes) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else value).decode()


def _unpacked(text: str) -> bytes:
    return base64.b64decode(text)
