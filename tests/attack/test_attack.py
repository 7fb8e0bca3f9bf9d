"""Bad input is refused in a sentence, kills lose nothing, unusual environments work.

`make test` draws the same cases every time; `make test-all` takes the date as the seed, and $STOKER_ATTACK_SEED chooses any.
A failure prints the command that runs its case again. `make attack` draws thousands.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from attack.case import seed_of_tests
from attack.kinds import KINDS
from attack.planted import PLANTED
from attack.run import Server, describe

CASES = {"config": 24, "answers": 8, "hostfile": 16, "command": 16, "launch": 16, "variables": 10, "train": 12, "data": 14,
         "environment": 30, "runlog": 10, "model": 8, "adapter": 8, "template": 4, "parquet": 6, "finished": 5}  # fmt: skip
SHARE = 0.5
"""Of these cases, those that `make test` runs."""
KILLED_RUNS = 4
HEALED_RUNS = 2


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    started = Server()
    if reason := started.ready.get("refused"):
        pytest.skip(reason)
    yield started
    started.close()


def run(server: Server, kind: str, count: int) -> None:
    seed = seed_of_tests()
    print(f"seed {seed}")
    answers = [server.ask({"seed": seed, "kind": kind, "number": number}) for number in range(count)]
    bad = [describe(answer) for answer in answers if answer["failures"]]
    assert not bad, f"{len(bad)} of {count} cases failed with seed {seed}:\n" + "\n".join(bad)


@pytest.mark.part("attack")
def test_planted_failures_of_every_kind_are_detected(server: Server) -> None:
    for number, expected in enumerate(PLANTED):
        if expected.startswith("leftover: /dev/shm") and not server.ready["isolated"]:
            continue  # it shares /dev/shm with the rest of the machine
        answer = server.ask({"seed": 0, "kind": "planted", "number": number})
        assert any(failure.startswith(expected) for failure in answer["failures"]), (expected, answer)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "environment"])
def test_bad_input_gets_a_short_message_and_leaves_nothing_behind(server: Server, kind: str) -> None:
    run(server, kind, math.ceil(SHARE * CASES[kind]))


@pytest.mark.part("attack")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "environment"])
def test_bad_input_drawn_by_the_date_gets_a_short_message(server: Server, kind: str) -> None:
    run(server, kind, 3 * CASES[kind])


@pytest.mark.part("attack")
def test_odd_environments_cause_no_traceback(server: Server) -> None:
    run(server, "environment", CASES["environment"])


@pytest.mark.part("kills")
def test_runs_killed_at_random_times_lose_no_checkpoint_and_end_with_the_same_model(server: Server) -> None:
    run(server, "kill", KILLED_RUNS)


@pytest.mark.part("healing")
def test_ranks_and_their_replacements_killed_at_random_times_end_with_the_same_model(server: Server) -> None:
    run(server, "healkill", HEALED_RUNS)
