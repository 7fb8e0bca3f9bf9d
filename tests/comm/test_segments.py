"""The shared memory itself: its name, who may open it, and what happens without it."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.kernels import native


def create(named: int) -> int:
    handle: int = native.library().stoker_comm_create(2, 0, 64 << 10, named)
    assert handle, native.library().stoker_comm_opening_error()
    return handle


def test_names_cannot_be_guessed_and_only_the_user_can_open_them() -> None:
    lib = native.library()
    handles = [create(1), create(1)]
    try:
        addresses = [lib.stoker_comm_address(handle).decode() for handle in handles]
        names = [address.split(":")[1] for address in addresses]
        assert names[0] != names[1]
        for name in names:
            assert re.fullmatch(rf"/stoker-\d+-{os.getpid()}-\d+-[0-9a-f]{{32}}", name)
            assert stat.S_IMODE(os.stat(f"/dev/shm{name}").st_mode) == 0o600
        lib.stoker_comm_seal(handles[0])
        assert not Path(f"/dev/shm{names[0]}").exists()
    finally:
        for handle in handles:
            lib.stoker_comm_destroy(handle)
    assert not any(Path(f"/dev/shm{name}").exists() for name in names)


def test_each_rank_takes_the_memory_of_its_own_slots() -> None:
    """A page lies on the NUMA node of the process that takes it, and a slot is written by its own rank only."""
    lib = native.library()
    slots = 4 * (64 << 10)  # kSlots of the size that create() asks for
    first = create(1)
    try:
        address = lib.stoker_comm_address(first)
        path = "/dev/shm" + address.decode().split(":")[1]

        def taken() -> int:
            return os.stat(path).st_blocks * 512

        assert slots <= taken() < 2 * slots
        second = lib.stoker_comm_attach(address, 1)
        assert second, lib.stoker_comm_opening_error()
        assert 2 * slots <= taken() < 3 * slots
        lib.stoker_comm_destroy(second)
    finally:
        lib.stoker_comm_destroy(first)


def test_names_left_by_dead_processes_are_removed_by_the_next_one() -> None:
    """A job that is killed before all its ranks are attached leaves a file in /dev/shm."""
    lib = native.library()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, lib.stoker_comm_address(create(1)))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    stale = Path("/dev/shm" + os.read(reader, 200).decode().split(":")[1])
    own = create(1)
    try:
        running = Path("/dev/shm" + lib.stoker_comm_address(own).decode().split(":")[1])
        elsewhere = running.with_name(running.name.replace("stoker-", "stoker-1", 1))  # of another pid namespace
        elsewhere.touch(mode=0o600)
        assert not stale.exists()
        lib.stoker_comm_destroy(create(1))
        assert running.exists()
        assert elsewhere.exists()
        elsewhere.unlink()
    finally:
        lib.stoker_comm_destroy(own)


def test_a_segment_of_another_job_is_refused() -> None:
    lib = native.library()
    handle = create(0)
    try:
        kind, pid, descriptor, nonce = lib.stoker_comm_address(handle).decode().split(":")
        wrong = f"{kind}:{pid}:{descriptor}:{int(nonce, 16) ^ 1:016x}"
        assert not lib.stoker_comm_attach(wrong.encode(), 1)
        assert b"not the segment that was announced" in lib.stoker_comm_opening_error()
        assert not lib.stoker_comm_attach(f"{kind}:{pid}:0:{nonce}".encode(), 1)
        assert not lib.stoker_comm_attach(b"shm:/stoker-gone:00", 1)
        assert b"No such file" in lib.stoker_comm_opening_error()
    finally:
        lib.stoker_comm_destroy(handle)


@pytest.mark.root
@pytest.mark.parametrize("named", [0, 1])
def test_a_segment_of_another_user_is_refused(named: int) -> None:
    """Even by root, who could open it: whoever announces one may be no rank of the job."""
    lib = native.library()
    (announced, announcing), (waiting, end) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        handle = create(named)
        os.write(announcing, lib.stoker_comm_address(handle))
        os.read(waiting, 1)
        lib.stoker_comm_destroy(handle)
        os._exit(0)
    try:
        assert not lib.stoker_comm_attach(os.read(announced, 200), 1)
        assert b"belongs to another user" in lib.stoker_comm_opening_error()
    finally:
        os.write(end, b"x")
        os.waitpid(child, 0)
        for descriptor in (announced, announcing, waiting, end):
            os.close(descriptor)


def test_a_rank_cannot_attach_twice() -> None:
    lib = native.library()
    handle = create(0)
    try:
        assert not lib.stoker_comm_attach(lib.stoker_comm_address(handle), 0)
        assert b"attached already" in lib.stoker_comm_opening_error()
    finally:
        lib.stoker_comm_destroy(handle)


def test_a_rank_that_died_before_the_others_waited_is_named() -> None:
    lib = native.library()
    handle = create(0)
    numbers = (ctypes.c_int64 * 2)(1, 2)
    child = os.fork()
    if child == 0:
        theirs = lib.stoker_comm_attach(lib.stoker_comm_address(handle), 1)
        lib.stoker_comm_broadcast(theirs, numbers, 16, 1)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        os.waitpid(child, 0)  # a broadcast's root waits for nobody
        lib.stoker_comm_timeout(handle, 5.0)
        assert lib.stoker_comm_broadcast(handle, numbers, 16, 1) == 0
        assert lib.stoker_comm_barrier(handle)
        assert f"rank 1 (pid {child}) has died".encode() in lib.stoker_comm_error(handle)
    finally:
        lib.stoker_comm_destroy(handle)


def test_a_rank_whose_proc_entry_cannot_be_read_is_not_reported_as_dead() -> None:
    """/proc cannot be read by a process that has reached its limit of open files."""
    lib = native.library()
    handle = create(0)
    other = lib.stoker_comm_attach(lib.stoker_comm_address(handle), 1)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        lib.stoker_comm_timeout(handle, 0.2)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        assert lib.stoker_comm_barrier(handle)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        message = lib.stoker_comm_error(handle)
        lib.stoker_comm_destroy(other)
        lib.stoker_comm_destroy(handle)
    assert b"rank 0 waited 0.2 s" in message


def test_a_forked_child_that_destroys_its_handle_does_not_leave_the_group() -> None:
    lib = native.library()
    handle = create(0)
    other = lib.stoker_comm_attach(lib.stoker_comm_address(handle), 1)
    child = os.fork()
    if child == 0:
        lib.stoker_comm_destroy(other)
        os._exit(0)
    try:
        os.waitpid(child, 0)
        lib.stoker_comm_timeout(handle, 0.2)
        assert lib.stoker_comm_barrier(handle)
        assert b"rank 0 waited 0.2 s" in lib.stoker_comm_error(handle)  # and not: rank 1 has left the group
    finally:
        lib.stoker_comm_destroy(other)
        lib.stoker_comm_destroy(handle)


def test_counters_advance_on_ranks_that_only_receive() -> None:
    """They are compared modulo 2^32: one that stayed 2^31 pieces behind would seem to be ahead."""
    lib = native.library()
    handle = create(0)
    _, pid, descriptor, _ = lib.stoker_comm_address(handle).decode().split(":")
    other = lib.stoker_comm_attach(lib.stoker_comm_address(handle), 1)
    numbers = (ctypes.c_int64 * 2)(1, 2)
    try:
        for _ in range(10):
            assert lib.stoker_comm_broadcast(handle, numbers, 16, 0) == 0
            assert lib.stoker_comm_broadcast(other, numbers, 16, 0) == 0
        with open(f"/proc/{pid}/fd/{descriptor}", "rb") as segment:
            content = segment.read(16384)
    finally:
        lib.stoker_comm_destroy(other)
        lib.stoker_comm_destroy(handle)
    # A page for the header; then a block for each rank of 1088 bytes (csrc/comm/segment.h), its counters on lines of 64.
    for block in (4096, 4096 + 1088):
        copied, reduced, taken = (
            int.from_bytes(content[at : at + 4], "little") for at in range(block, block + 192, 64)
        )
        assert taken == 10
        assert copied >= 9  # as far as the last operation began
        assert reduced >= 9


@pytest.fixture
def alone() -> Iterator[int]:
    """A group of one rank."""
    lib = native.library()
    handle: int = lib.stoker_comm_create(1, 0, 64 << 10, 0)
    yield handle
    lib.stoker_comm_destroy(handle)


NUMBERS = (ctypes.c_int64 * 2)(1, 2)


@pytest.mark.parametrize("root", [1, -1])
def test_a_root_outside_the_group_is_refused(alone: int, root: int) -> None:
    assert native.library().stoker_comm_broadcast(alone, NUMBERS, 16, root)
    assert f"there is no rank {root} to be the root".encode() in native.library().stoker_comm_error(alone)


def test_undefined_reductions_are_refused(alone: int) -> None:
    int64, mean = native.constants("stoker_dtype")["INT64"], native.constants("stoker_reduction")["AVG"]
    assert native.library().stoker_comm_allreduce(alone, NUMBERS, 2, int64, mean, -1)
    assert b"avg of int64 is not defined" in native.library().stoker_comm_error(alone)


@pytest.mark.root
@pytest.mark.mounts
@pytest.mark.parametrize("kind", ["auto", "named"])
def test_a_full_dev_shm_does_not_stop_a_job(kind: str) -> None:
    """memfd does not need /dev/shm; with STOKER_CCL_SHM=named gloo is used, and a line says why."""
    program = textwrap.dedent("""
        import torch, torch.distributed as dist
        from stoker.comm.registration import register
        register()
        dist.init_process_group("ccl", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
        x = torch.ones(3)
        dist.all_reduce(x)
        print("sum", x.tolist())
    """)
    script = f"mount -t tmpfs -o size=64k tmpfs /dev/shm && exec {sys.executable} -"
    result = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script],
        input=program, env={**os.environ, "STOKER_CCL_SHM": kind, "STOKER_CCL_BACKEND": "compiled"},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert "sum [1.0, 1.0, 1.0]" in result.stdout, result.stderr
    assert ("No space left" in result.stderr) == (kind == "named"), result.stderr


@pytest.mark.root
@pytest.mark.mounts
def test_messages_end_on_all_ranks_if_dev_shm_is_full(tmp_path: Path) -> None:
    """/dev/shm has room for the collectives of the group, but not for the first message."""
    program = textwrap.dedent(f"""
        import os, torch, torch.distributed as dist
        from datetime import timedelta
        from stoker.comm.registration import register
        register()
        rank = int(os.fork() == 0)
        dist.init_process_group("ccl", init_method="file://{tmp_path}/store", rank=rank, world_size=2, timeout=timedelta(hours=1))
        try:
            dist.recv(torch.ones(3), 0) if rank else dist.send(torch.ones(3), 1)
        except RuntimeError as error:
            print(f"rank {{rank}}: {{error}}", flush=True)
        if rank == 0:
            os.wait()
    """)
    room = "4200k"  # 4,104 KB for two ranks' collectives
    script = f"mount -t tmpfs -o size={room} tmpfs /dev/shm && exec {sys.executable} -"
    result = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script],
        input=program, env={**os.environ, "STOKER_CCL_SHM": "named", "STOKER_CCL_BACKEND": "compiled"},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    why = "cannot reserve 256 KB of shared memory for messages: /dev/shm is full; enlarge it, or unset STOKER_CCL_SHM"
    assert sorted(result.stdout.splitlines()) == [
        f"rank 0: ccl: {why}",
        f"rank 1: ccl: rank 0 gave up: {why}; rank 1 was waiting for a message from rank 0 with tag 0",
    ], result.stderr
