"""The stores in which ranks meet: one that other users of a machine cannot reach, and one whose values nobody can forge."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from stoker.distributed.sealed_store import Forged, SealedStore
from stoker.distributed.unix_store import UnixStore, UnixStoreServer

LONG, SHORT = timedelta(seconds=60), timedelta(seconds=0.05)


def unix_store(folder: Path) -> Callable[[], Any]:
    private = folder / ("a" * 100)  # longer than the address of a socket may be
    private.mkdir(mode=0o700)
    UnixStoreServer(private / "store")
    return lambda: UnixStore(private / "store", LONG)


def sealed_store(folder: Path) -> Callable[[], Any]:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LONG)
    return lambda: SealedStore(client_of(server), "secret", "name")


def client_of(server: dist.TCPStore) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False, timeout=LONG)


@pytest.fixture(params=[unix_store, sealed_store])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Any]:
    made: Callable[[], Any] = request.param(tmp_path)
    return made


def test_values_are_those_of_torchs_own_store(connect: Callable[[], Any]) -> None:
    found = []
    for store in (connect(), dist.HashStore()):
        store = dist.PrefixStore("p", store)
        store.set("a", b"\x00\xff")
        store.set("ü", "text")
        answers = [store.get("a"), store.get("ü"), store.check(["a", "b"]), store.check(["a"]), store.check([])]
        answers += [store.add("n", 3), store.add("n", -1), store.multi_get(["a", "ü"])]
        answers += [
            store.compare_set("c", "", "first"),
            store.compare_set("c", "", "x"),
            store.compare_set("c", "y", "x"),
        ]
        answers += [
            store.compare_set("c", "first", "second"),
            store.get("c"),
            store.delete_key("a"),
            store.delete_key("a"),
        ]
        answers += [store.check(["a"]), store.num_keys()]
        found.append(answers)
    assert found[0] == found[1]


def test_clients_see_what_others_write_and_wait_for_it(connect: Callable[[], Any]) -> None:
    store = connect()
    other = connect()
    threading.Timer(0.1, other.set, ("late", "here")).start()
    assert store.get("late") == b"here"
    threading.Timer(0.1, other.set, ("later", "")).start()
    store.wait(["late", "later"])
    prefixed = dist.PrefixStore("p", store)
    prefixed.set_timeout(SHORT)
    with pytest.raises(dist.DistStoreError):
        prefixed.get("never")
    with pytest.raises(dist.DistStoreError):
        store.wait(["never"], SHORT)


def test_gloo_connects_ranks_through_it(connect: Callable[[], Any]) -> None:
    sums: dict[int, float] = {}

    def rank(number: int) -> None:
        # Nothing keeps the Python part of the store but the store itself.
        group = dist.ProcessGroupGloo(dist.PrefixStore("group", connect()), number, 2, LONG)
        tensor = torch.tensor([number + 1.0])
        group.allreduce([tensor]).wait()
        sums[number] = tensor.item()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sums == {0: 3.0, 1: 3.0}


def test_a_copy_of_a_store_has_a_connection_of_its_own(connect: Callable[[], Any]) -> None:
    store = connect()
    store.set("a", "1")
    assert dist.PrefixStore("p", store).clone().check(["a"]) is False
    assert store.clone().get("a") == b"1"


# What strangers cannot do


def test_a_directory_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o711)
    with pytest.raises(PermissionError, match="open to other users"):
        UnixStoreServer(tmp_path / "store")


@pytest.mark.root
def test_another_user_cannot_reach_the_store_of_one_machine(tmp_path: Path) -> None:
    store = unix_store(tmp_path)()
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        folder.chmod(folder.stat().st_mode | 0o011)
    assert as_nobody(lambda: store.set("a", "1"))
    assert not store.check(["a"])


def as_nobody(action: Callable[[], None]) -> bool:
    """Whether another user fails to do this."""
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            action()
        except dist.DistNetworkError as error:
            os._exit(0 if "Permission denied" in str(error) else 2)
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LONG)


def test_a_value_of_somebody_without_the_secret_is_refused(server: dist.TCPStore) -> None:
    store, stranger = SealedStore(client_of(server), "secret", "29500"), client_of(server)
    store.set("a", "good")
    for value in (b"", b"bad", b"x" * 100):
        stranger.set("a", value)
        with pytest.raises(Forged, match="does not know the job's secret"):
            store.get("a")
    with pytest.raises(Forged):
        store.compare_set("a", "good", "better")
    SealedStore(client_of(server), "guessed", "29500").set("a", "bad")
    with pytest.raises(Forged):
        store.multi_get(["a"])


def test_a_sealed_value_counts_under_its_own_key_and_store_only(server: dist.TCPStore) -> None:
    store, stranger = SealedStore(client_of(server), "secret", "29500"), client_of(server)
    store.set("a", "good")
    stranger.set("b", stranger.get("a"))
    with pytest.raises(Forged):
        store.get("b")
    with pytest.raises(Forged):
        SealedStore(client_of(server), "secret", "29501").get("a")
