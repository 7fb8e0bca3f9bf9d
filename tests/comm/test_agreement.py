"""Ranks that cannot work together all raise an error at the start that names both sides; a broken Stoker breaks no import."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from stoker.comm import compiled, connections, host_groups, shared_memory


def errors_of_all_ranks(names: tuple[int, ...], prepare: Callable[[int], None]) -> list[str]:
    """What `agree` raises on each rank; a rank is a thread, which calls `prepare` first."""
    store, errors = dist.HashStore(), {}

    def rank(number: int) -> None:
        prepare(number)
        try:
            connections.agree(store, number, names, "")
        except ValueError as error:
            errors[number] = str(error)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(names))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [errors[number] for number in range(len(names))]


def test_different_versions_are_named_by_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    own = threading.local()
    monkeypatch.setattr(connections, "own_version", lambda: own.version)
    versions = ["stoker 1, torch 2.13.0", "stoker 1, torch 2.13.0", "stoker 1, torch 2.6.0"]
    errors = errors_of_all_ranks((4, 5, 6), lambda rank: setattr(own, "version", versions[rank]))
    expected = (
        "the version differs between the ranks: rank 4 has stoker 1, torch 2.13.0, rank 6 has stoker 1, torch 2.6.0; "
        "install the same version on all hosts"
    )
    assert errors == [expected] * 3


def test_different_kinds_of_shared_memory_are_named_by_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    own = threading.local()
    monkeypatch.setattr(
        connections, "environment_choice", lambda variable: own.kind if variable == "STOKER_CCL_SHM" else "auto"
    )
    errors = errors_of_all_ranks((0, 1), lambda rank: setattr(own, "kind", ("memfd", "named")[rank]))
    expected = (
        "STOKER_CCL_SHM differs between the ranks: rank 0 has memfd, rank 1 has named; "
        "set it to the same value on all ranks"
    )
    assert errors == [expected] * 2


def test_a_rank_that_does_not_join_a_group_is_named() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(RuntimeError, match="rank 1 of a group of 2 did not join"):
        host_groups.exchange(store, "host", 0, 2, "alpha")
    with pytest.raises(RuntimeError, match=r"rank 7 did not set up shared memory .* within 0.2 s"):
        shared_memory.open_shared_memory(store, 0, [4, 7], timedelta(seconds=1))


@pytest.mark.parametrize("variable", ["STOKER_CCL_BACKEND", "STOKER_CCL_ENGINE", "STOKER_CCL_SHM"])
def test_environment_variables(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "")
    assert connections.environment_choice(variable) == "auto"
    monkeypatch.setenv(variable, "python")
    with pytest.raises(ValueError, match=f"{variable}='python' is not valid; choose one of auto, "):
        connections.environment_choice(variable)


def test_a_failed_compilation_is_not_repeated_by_every_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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


def test_cxx_may_have_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "env touch")
    assert compiled.compile_once("thing.so", lambda compiler, target: [compiler, str(target)], "a thing").is_file()


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with pytest.raises(compiled.CompiledUnavailable, match=r"/nowhere/g\+\+ cannot be run: No such file"):
        compiled.compile_once("thing.so", lambda compiler, target: [compiler, str(target)], "a thing")


def test_a_backend_that_cannot_be_registered_prints_one_line_and_does_not_break_the_import() -> None:
    code = textwrap.dedent("""
        import torch.distributed as dist
        dist.Backend.backend_list = [name for name in dist.Backend.backend_list if name != "ccl"]
        def broken(*args, **kwargs):
            raise OSError("out of order")
        dist.Backend.register_backend = broken
        from stoker.comm.registration import register
        register()
        print("imported")
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "imported\n"
    assert done.stderr.splitlines()[-1] == "stoker ccl: the backend is not registered: OSError: out of order"
