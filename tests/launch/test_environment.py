"""A process recognises its rank under every launcher, from the variables that launcher sets."""

from __future__ import annotations

import socket
import threading

import pytest

from stoker.errors import UserError
from stoker.launch.rank import exchange
from stoker.launch.rank.environment import discover, first_slurm_host
from stoker.launch.rank.exchange import agree

HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_FD": "9"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_RANK": "3", "PMIX_NAMESPACE": "prterun-1@1",
}  # fmt: skip
SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "node[07-08]", "SLURM_STEP_ID": "0",
}  # fmt: skip


@pytest.mark.parametrize(
    ("variables", "launcher", "exchange"),
    [
        ({**HYDRA, "I_MPI_HYDRA_UUID": "x"}, "Intel MPI", "pmi"),
        (HYDRA, "MPICH", "pmi"),
        (OPEN_MPI, "Open MPI", "pmix"),
        (SLURM, "Slurm", "names"),
        ({**SLURM, **HYDRA}, "MPICH", "pmi"),  # mpirun inside an allocation
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, "torchrun", "given"),
        ({f"MV2_COMM_WORLD_{k}": v for k, v in (("RANK", "3"), ("SIZE", "4"), ("LOCAL_RANK", "1"), ("LOCAL_SIZE", "2"))},
         "MVAPICH", "nothing"),
    ],
)  # fmt: skip
def test_rank_3_of_4_is_the_second_on_its_host(variables: dict[str, str], launcher: str, exchange: str) -> None:
    found = discover(variables)
    assert found is not None
    assert (found.launcher, found.rank, found.size, found.local_rank, found.local_size) == (launcher, 3, 4, 1, 2)
    assert found.exchange == exchange


def test_a_plain_process_and_a_batch_shell_have_no_rank() -> None:
    assert discover({"PATH": "/bin"}) is None
    assert discover({"SLURM_PROCID": "0", "SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}) is None


def test_pmix_without_local_ranks_is_taken_for_one_host() -> None:
    found = discover({"PMIX_RANK": "1", "PMIX_SIZE": "2"})
    assert found is not None
    assert (found.launcher, found.local_rank, found.local_size) == ("PMIx", 1, 2)


@pytest.mark.parametrize(
    "variables", [{**HYDRA, "PMI_RANK": "9"}, {**HYDRA, "PMI_SIZE": "two"}, {**SLURM, "SLURM_NODEID": "2"}]
)
def test_impossible_rank_variables_are_reported(variables: dict[str, str]) -> None:
    with pytest.raises(UserError, match="unset"):
        discover(variables)


@pytest.mark.parametrize(
    ("names", "first"),
    [
        ("node[07-08,12]", "node07"), ("a,b", "a"), ("n[1]-ib", "n1-ib"), ("single", "single"), ("", None),
        ("rack[0-1]n[01-16]", "rack0n01"), ("r[2,4]n[7-8,9]-ib,other[1-2]", "r2n7-ib"),
    ],
)  # fmt: skip
def test_the_first_host_of_slurms_list(names: str, first: str | None) -> None:
    assert first_slurm_host({"SLURM_STEP_NODELIST": names}) == first


def test_the_first_host_of_a_job_with_several_components_is_the_first_ones() -> None:
    variables = {"SLURM_STEP_NODELIST": "beta,gamma", "SLURM_JOB_NODELIST_PACK_GROUP_0": "gamma"}
    assert first_slurm_host(variables) == "beta"
    assert first_slurm_host({**variables, "SLURM_HET_SIZE": "2"}) == "gamma"
    assert (
        first_slurm_host({**variables, "SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST_HET_GROUP_0": "delta[2-3]"})
        == "delta2"
    )


def test_slurm_ranks_agree_on_address_and_port_without_asking() -> None:
    found = {
        agree(rank, variables)
        for variables in (SLURM, {**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"})
        if (rank := discover(variables)) is not None
    }
    assert len(found) == 1
    address, port, _ = found.pop()
    assert address == "node07"
    assert 15000 <= port < 25000


def test_master_addr_and_port_set_by_the_user_are_used() -> None:
    rank = discover(SLURM)
    assert rank is not None
    assert agree(rank, {**SLURM, "MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "123"})[:2] == ("10.0.0.9", 123)


def test_a_launcher_without_a_store_asks_for_master_addr() -> None:
    variables = {k.replace("OMPI", "MV2"): v for k, v in OPEN_MPI.items() if "WORLD" in k}
    rank = discover(variables)
    assert rank is not None
    with pytest.raises(UserError, match="set MASTER_ADDR"):
        agree(rank, variables)
    assert agree(rank, {**variables, "MASTER_ADDR": "h"})[:2] == ("h", 29500)


def test_a_missing_rank_is_reported_by_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "PATIENCE", 0.05)
    ours, mpirun = socket.socketpair()
    with ours, mpirun:
        mpirun.sendall(b"cmd=response_to_init rc=0\ncmd=my_kvsname kvsname=job\n")
        conversation = exchange.Pmi(ours.fileno())
        with pytest.raises(UserError, match="one of them has not reached this point"):
            conversation.share(1, "")
        conversation.finish()


def test_ranks_of_hydra_share_a_secret_with_the_address() -> None:
    """The launcher's own store, which others cannot reach, is how they get it."""
    ours, mpirun = socket.socketpair()
    values: list[str] = []

    def answer() -> None:
        with mpirun.makefile("rw", buffering=1) as stream:
            for line in stream:
                command = dict(word.partition("=")[::2] for word in line.split())
                if command["cmd"] == "put":
                    values.append(command["value"])
                stream.write(f"cmd=answer kvsname=job value={values[0] if values else ''}\n")

    threading.Thread(target=answer, daemon=True).start()
    hydra = {
        "PMI_RANK": "0",
        "PMI_SIZE": "2",
        "MPI_LOCALRANKID": "0",
        "MPI_LOCALNRANKS": "2",
        "PMI_FD": str(ours.fileno()),
    }
    first, other = discover(hydra), discover({**hydra, "PMI_RANK": "1", "MPI_LOCALRANKID": "1"})
    assert first is not None
    assert other is not None
    found = [agree(rank, hydra) for rank in (first, other)]
    assert found[0] == found[1]
    assert found[0].address == "127.0.0.1"
    assert len(found[0].secret) == 32
    values.clear()
    given = {**hydra, "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    assert agree(first, given) == agree(other, given)
    ours.close()
