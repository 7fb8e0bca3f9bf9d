"""Ranks that cannot work together say so at the start, all of them, with both sides named; and a broken Stoker breaks nothing."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from stoker.comm import compiled, engine, host_groups, paths


def test_other_versions_on_one_host_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = threading.local()
    monkeypatch.setattr(paths, "_version", lambda: versions.value)
    store, errors = dist.HashStore(), {}

    def rank(number: int) -> None:
        versions.value = "stoker 1, torch 2.13.0" if number < 2 else "stoker 1, torch 2.6.0"
        try:
            paths.open_paths(store, number, 3, (4, 5, 6), timedelta(seconds=10))
        except ValueError as error:
            errors[number] = str(error)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    says = (
        "the version differs between the ranks: rank 4 has stoker 1, torch 2.13.0, rank 6 has stoker 1, torch 2.6.0; "
        "install the same on all hosts"
    )
    assert errors == dict.fromkeys(range(3), says)


def test_other_kinds_of_shared_memory_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = threading.local()
    monkeypatch.setattr(paths, "chosen_memory", lambda: kinds.value)
    store, errors = dist.HashStore(), {}

    def rank(number: int) -> None:
        kinds.value = ("memfd", "named")[number]
        with pytest.raises(ValueError, match="STOKER_CCL_SHM differs") as caught:
            paths.open_paths(store, number, 2, (0, 1), timedelta(seconds=10))
        errors[number] = str(caught.value)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    says = "STOKER_CCL_SHM differs between the ranks: rank 0 has memfd, rank 1 has named; set it alike on all"
    assert errors == dict.fromkeys(range(2), says)


def test_a_rank_that_does_not_come_to_set_up_a_group_is_named() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(RuntimeError, match="rank 1 of a group of 2 has not come"):
        host_groups.exchange(store, "host", 0, 2, "here")
    with pytest.raises(engine.CollectiveError, match=r"rank 7 has not come .* within 0.2 s"):
        engine.SharedMemory.open(store, 0, 2, [4, 7], timedelta(seconds=1))


@pytest.mark.parametrize("name", ["STOKER_CCL_ENGINE", "STOKER_CCL_SHM"])
def test_an_empty_word_is_none(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "")
    assert paths.chosen_engine() == engine.chosen_memory() == "auto"


def test_what_does_not_compile_is_not_tried_again_by_every_rank(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tries = []
    monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path))

    def command(compiler: str, target: Path) -> list[str]:
        tries.append(compiler)
        return ["sh", "-c", "echo 'error: no such header' >&2; exit 1" if len(tries) == 1 else f"touch '{target}'"]

    for _ in range(2):
        with pytest.raises(compiled.CompiledUnavailable, match="error: no such header"):
            compiled.compile_once("thing.so", command, "a thing")
    assert len(tries) == 1
    monkeypatch.setenv("CXX", "another-compiler")
    assert compiled.compile_once("thing.so", command, "a thing").is_file()
    assert not (tmp_path / "thing.failed").exists()


def test_a_compiler_may_be_two_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "env touch")
    assert compiled.compile_once("thing.so", lambda compiler, target: [compiler, str(target)], "a thing").is_file()


def test_a_compiler_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with pytest.raises(compiled.CompiledUnavailable, match=r"/nowhere/g\+\+ cannot be run: No such file"):
        compiled.compile_once("thing.so", lambda compiler, target: [compiler, str(target)], "a thing")


def test_a_backend_that_cannot_be_registered_costs_one_line_and_not_the_import() -> None:
    code = textwrap.dedent("""
        import torch.distributed as dist
        dist.Backend.backend_list = [name for name in dist.Backend.backend_list if name != "ccl"]
        def broken(*words, **named):
            raise OSError("out of order")
        dist.Backend.register_backend = broken
        from stoker.comm.registration import register
        register()
        print("still here")
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "still here\n"
    assert done.stderr.splitlines()[-1] == "stoker ccl: the backend is not registered: OSError: out of order"
