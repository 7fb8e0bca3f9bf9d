"""c10d's collectives do what torch documents, on gloo and on ccl, with 2 and with 3 ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from comm import cases
from comm.ranks import Ranks

JOBS = {
    "gloo-2": ("gloo", 2, {}),
    "ccl-2": ("ccl", 2, {"STOKER_CCL_BACKEND": "compiled"}),
    "ccl-named-3": ("ccl", 3, {"STOKER_CCL_BACKEND": "compiled", "STOKER_CCL_SHM": "named"}),
}

PLAIN = [
    "allreduce_bool", "allreduce_bits", "allreduce_of_transposed_memory", "allreduce_is_the_same_on_all_ranks",
    "low_precision_sums_round_once", "nan_and_infinity_come_through", "allreduce_coalesced", "reduce",
    "allgather_uneven", "allgather_coalesced", "complex_numbers", "feedback_follows_reordered_parameters",
    "feedback_drops_values_that_are_not_finite", "callbacks_may_communicate", "messages_from_many_threads",
    "reduce_scatter", "alltoall", "alltoall_single", "gather", "scatter", "barrier", "send_and_receive",
    "exchange_in_a_ring", "tags_keep_messages_apart", "messages_wait_for_their_tag",
    "messages_of_one_tag_keep_their_order", "receive_from_any_source",
    "receive_from_any_source_after_a_rank_has_left", "messages_use_no_thread_and_no_memory_per_tag",
    "sequence_numbers", "detailed_debugging", "sparse_allreduce", "several_tensors", "aliased_tensors", "gather_has_a_future",
    "inference_tensors", "objects", "sub_groups", "async_work", "futures", "async_order_is_free_between_groups",
    "data_parallel", "sharded_parallel", "zero_optimizer", "functional_collectives",
]  # fmt: skip

NOT_GLOO = {
    "allreduce_bool": "gloo does not reduce bool",
    "low_precision_sums_round_once": "gloo rounds after every rank",
    "nan_and_infinity_come_through": "gloo loses NaN in min and max",
    "allgather_uneven": "gloo gathers equal sizes only",
    "alltoall": "gloo has alltoall_single only",
}


@pytest.fixture(scope="module", params=JOBS)
def job(request: pytest.FixtureRequest) -> Iterator[tuple[str, Ranks]]:
    backend, size, environment = JOBS[request.param]
    ranks = Ranks(backend, size, environment)
    yield request.param, ranks
    assert ranks.close() == [0] * size


@pytest.mark.parametrize("case", PLAIN)
def test_collective(job: tuple[str, Ranks], case: str) -> None:
    name, ranks = job
    if name.startswith("gloo") and case in NOT_GLOO:
        pytest.skip(NOT_GLOO[case])
    ranks.run(case)


@pytest.mark.parametrize(
    "case",
    [
        "tensors_that_do_not_fit", "shares_that_others_do_not_expect", "messages_of_another_length",
        "groups_that_are_gone", "waiting_has_a_limit_of_its_own", "messages_that_never_come", "messages_from_nobody",
        "monitored_barrier",
    ],
)  # fmt: skip
def test_misuse_raises_a_clear_error(job: tuple[str, Ranks], case: str) -> None:
    if job[0].startswith("gloo"):
        pytest.skip("gloo has other messages, or aborts the process")
    job[1].run(case, module="comm.misuse_cases")


@pytest.mark.parametrize("case", ["dtensors", "tensor_parallelism", "hooks_of_ddp", "sharded_checkpoints", "pipelines"])
def test_what_torch_builds_on_collectives(job: tuple[str, Ranks], case: str, tmp_path: Path) -> None:
    arguments = [str(tmp_path)] if case == "sharded_checkpoints" else []
    job[1].run(case, *arguments, module="comm.library_cases")


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("op", ["SUM", "AVG", "MIN", "MAX", "PRODUCT"])
def test_allreduce_reduces_every_type(job: tuple[str, Ranks], op: str, dtype: str) -> None:
    if op == "AVG" and (job[0].startswith("gloo") or "int" in dtype):
        pytest.skip("no mean of integers; gloo has no mean")
    job[1].run("allreduce", op, dtype)


@pytest.mark.parametrize("dtype", [*cases.DTYPES, "bool"])
def test_broadcast_and_allgather_support_every_type(job: tuple[str, Ranks], dtype: str) -> None:
    job[1].run("broadcast", dtype)
    job[1].run("allgather", dtype)


def test_error_feedback_makes_bf16_gradients_more_exact(job: tuple[str, Ranks]) -> None:
    plain, feedback = (job[1].run("error_of_compressed_gradients", name)[0] for name in ("bf16", "bf16-feedback"))
    # Eight bits round by 2^-9 at most, each gradient and their sum; feedback corrects the gradients, not the sum.
    assert 0 < feedback < plain < 0.004


@pytest.mark.parametrize(
    "case",
    [
        "local_sgd_averages_weights", "local_sgd_moves_on_with_momentum", "local_sgd_goes_on_with_another_momentum",
        "local_sgd_follows_the_first_rank", "local_sgd_averages_gradients_in_the_first_steps",
    ],
)  # fmt: skip
def test_local_sgd(job: tuple[str, Ranks], case: str) -> None:
    job[1].run(case)
