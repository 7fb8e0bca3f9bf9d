"""A store of torch.distributed whose values carry a proof that their writer knows the job's secret.

torch's TCPStore believes everybody that reaches its port. A value in it that was written without the secret, or under another
key, is refused when it is read. Others can still read all values, and delete or overwrite them, which ends the job at worst.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from stoker.distributed.kept_store import KeptStore

__all__ = ["Forged", "SealedStore"]

_SIZE = hashlib.sha256().digest_size


class Forged(dist.DistStoreError):
    """A value in the store was not written by a process that knows the job's secret."""


class SealedStore(KeptStore):
    """`inner` with a seal on each value. `name` keeps values of one of the job's stores from being used in another.

    Counters (`add`) have no seal: the server adds.
    """

    def __init__(self, inner: Any, secret: str, name: str) -> None:
        super().__init__(inner.timeout)
        self._inner_store, self._secret, self._name = inner, secret, name
        self._key = hmac.digest(os.fsencode(secret), name.encode(), "sha256")

    def clone(self) -> SealedStore:
        return SealedStore(self._inner.clone(), self._secret, self._name)

    @property
    def _inner(self) -> Any:
        """With the time-out of this store, which torch changes without a call of Python."""
        if self._inner_store.timeout != self.timeout:
            self._inner_store.set_timeout(self.timeout)
        return self._inner_store

    def set(self, key: str, value: str | bytes) -> None:
        self._inner.set(key, self._sealed(key, value))

    def get(self, key: str) -> bytes:
        return self._opened(key, self._inner.get(key))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        expected = self._sealed(key, expected_value) if expected_value else b""
        found = self._inner.compare_set(key, expected, self._sealed(key, desired_value))
        return self._opened(key, found) if found else b""

    def add(self, key: str, value: int) -> int:
        return int(self._inner.add(key, value))

    def check(self, keys: list[str]) -> bool:
        return bool(self._inner.check(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._inner.wait(keys, self.timeout if timeout is None else timeout)

    def delete_key(self, key: str) -> bool:
        return bool(self._inner.delete_key(key))

    def num_keys(self) -> int:
        return int(self._inner.num_keys())

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self._opened(key, value) for key, value in zip(keys, self._inner.multi_get(keys), strict=True)]

    def multi_set(self, keys: list[str], values: Sequence[str | bytes]) -> None:
        self._inner.multi_set(keys, [self._sealed(key, value) for key, value in zip(keys, values, strict=True)])

    def has_extended_api(self) -> bool:
        return False  # a part that is appended to a value has no seal

    def _sealed(self, key: str, value: str | bytes) -> bytes:
        data = value.encode() if isinstance(value, str) else bytes(value)
        return self._seal(key, data) + data

    def _opened(self, key: str, found: bytes) -> bytes:
        seal, data = found[:_SIZE], found[_SIZE:]
        if not hmac.compare_digest(seal, self._seal(key, data)):
            raise Forged(f"the value of {key} was written by a process that does not know the job's secret")
        return data

    def _seal(self, key: str, data: bytes) -> bytes:
        name = key.encode()
        return hmac.digest(self._key, len(name).to_bytes(8, "big") + name + data, "sha256")
