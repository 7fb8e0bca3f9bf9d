"""The first machine's decisions: who takes part in a round, and when it ends. The clock is the test's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stoker.launch.launchers import coordinator, round
from stoker.launch.launchers.coordinator import Coordinator
from stoker.launch.launchers.elastic_job import Job
from stoker.launch.launchers.round import Report, Round
from stoker.launch.rank import failure


class Machines:
    """Reports of machines that a test starts, stops and changes; `step` lets seconds pass and returns the round."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **job: int) -> None:
        self.reports: dict[int, Report] = {}
        self.silent: set[int] = set()
        self._time = 1000.0
        monkeypatch.setattr(coordinator.time, "monotonic", lambda: self._time)
        self._round = Round(port=29500)
        self._coordinator = Coordinator(Job(local_size=1, **job), 29500, lambda: 40000)

    def start(self, *machines: int, token: str = "a") -> None:
        for machine in machines:
            self.reports[machine] = Report(f"{machine}{token}", f"host{machine}", "3.11", "2.13", "1.0", machine)

    def change(self, *machines: int, **to: object) -> None:
        for machine in machines:
            self.reports[machine] = replace(self.reports[machine], **to)  # type: ignore[arg-type]

    def step(self, seconds: int = 1) -> Round:
        for _ in range(seconds):
            self._time += 1
            for machine in set(self.reports) - self.silent:
                self.change(machine, count=self.reports[machine].count + 1)
            self._round = self._coordinator.decide(self._round, [self.reports[m] for m in sorted(self.reports)])
        return self._round

    def run(self) -> Round:
        """Until all machines that are in the round run it."""
        now = self.step()
        self.change(*(int(token[0]) for token in now.members), status="running", round=now.number)
        return self.step()


def test_the_first_round_waits_for_machines_beyond_the_minimum(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = Machines(monkeypatch, machines=3, least=2)
    machines.start(0, 1)
    assert machines.step(10).number == 0
    assert machines.step(10) == Round(1, ["0a", "1a"], 29500)


def test_a_full_first_round_starts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = Machines(monkeypatch, machines=2, least=1)
    machines.start(0)
    assert machines.step(3).number == 0
    machines.start(1)
    assert machines.step().number == 1


def test_a_fixed_number_of_machines_waits_until_the_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = Machines(monkeypatch, machines=3, least=3, wait=60)
    machines.start(0, 2)
    assert machines.step(50).failure is None
    reason = machines.step(20).failure
    assert reason is not None
    assert (reason.code, reason.text) == (2, "machines 1 of 3 did not arrive within 60 s")


def test_a_silent_machine_ends_the_round_and_the_others_continue(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machines = Machines(monkeypatch, machines=3, least=1)
    machines.start(0, 1, 2)
    assert machines.run().number == 1
    machines.silent = {1}
    assert machines.step(10).ending == ""
    assert machines.step(10).ending == "broken"
    machines.change(2, status="waiting")
    assert machines.step().number == 1, "machine 0 still stops its ranks"
    machines.change(0, status="waiting")
    assert machines.step() == Round(2, ["0a", "2a"], 40000)
    assert "machine 1 (host1) is gone; continuing with 2 of 3 machines" in capsys.readouterr().err


def test_a_machine_that_leaves_ends_the_round_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = Machines(monkeypatch, machines=2, least=1)
    machines.start(0, 1)
    machines.run()
    machines.change(1, status="left")
    assert machines.step().ending == "broken"
    machines.change(0, status="waiting")
    assert machines.step().members == ["0a"]


def test_a_silent_machine_fails_a_job_of_a_fixed_size(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = Machines(monkeypatch, machines=2, least=2)
    machines.start(0, 1)
    machines.run()
    machines.silent = {1}
    reason = machines.step(20).failure
    assert reason is not None
    assert reason.text.startswith("machine 1 (host1) is gone")


def test_a_job_that_heals_waits_until_a_lost_machine_is_started_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machines = Machines(monkeypatch, machines=2, least=2, waits_for_lost=True, wait=60)
    machines.start(0, 1)
    machines.run()
    machines.silent = {1}
    now = machines.step(20)
    assert (now.failure, now.ending) == (None, "broken")
    machines.change(0, status="waiting")
    assert machines.step(30).number == 1, "there are too few machines"
    machines.silent = set()
    machines.start(1, token="b")
    assert machines.step() == Round(2, ["0a", "1b"], 40000)
    printed = capsys.readouterr().err
    assert "stoker: machine 1 (host1) is gone; waiting up to 60 s until it is started again" in printed
    assert "machine 1 (host1) is gone, machine 1 (host1) has joined; continuing with 2 of 2 machines" in printed


def test_ranks_that_can_wait_are_not_ended_when_a_machine_is_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machines = Machines(monkeypatch, machines=2, least=2, waits_for_lost=True, wait=60)
    machines.start(0, 1)
    before = machines.run()
    machines.change(0, 1, can_wait=True)
    machines.step()
    machines.start(1, token="b")
    lost = replace(before, members=["0a", ""], losses=1)
    assert machines.step(5) == lost, "machine 0 has not told its ranks yet"
    machines.change(0, losses=1)
    now = machines.step()
    assert now == replace(lost, members=["0a", "1b"], replacements=["1b"])
    machines.change(1, status="running", round=1, can_wait=True, losses=1)
    assert machines.step(30) == now
    machines.start(1, token="c")  # lost again
    machines.step()
    machines.change(0, losses=2)
    assert machines.step() == replace(now, losses=2, members=["0a", "1c"], replacements=["1b", "1c"])
    printed = capsys.readouterr().err
    assert printed.count("machine 1 (host1) is gone; waiting up to 60 s until it is started again") == 2
    assert printed.count("machine 1 (host1) has joined; its ranks continue from the memory of the others") == 2


def test_a_spare_machine_takes_the_place_of_a_lost_one(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = Machines(monkeypatch, machines=3, least=3, waits_for_lost=True)
    machines.start(0, 1, 2)
    machines.run()
    machines.change(0, 1, 2, can_wait=True)
    machines.start(3)
    assert machines.step(5).members == ["0a", "1a", "2a"], "there is no room for machine 3"
    machines.silent = {1}
    assert machines.step(20).losses == 1
    machines.change(0, 2, losses=1)
    now = machines.step()
    assert (now.number, now.ending, now.members) == (1, "", ["0a", "3a", "2a"])


def test_ranks_that_fail_while_they_wait_are_restarted_with_all_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = Machines(monkeypatch, machines=2, least=2, waits_for_lost=True)
    machines.start(0, 1)
    machines.run()
    machines.change(0, 1, can_wait=True)
    machines.silent = {1}
    assert machines.step(20).ending == ""
    machines.change(0, status="waiting", can_wait=False)
    assert machines.step().ending == "broken"
    machines.silent = set()
    machines.start(1, token="b")
    assert machines.step() == Round(2, ["0a", "1b"], 40000)


def test_a_machine_with_another_number_of_ranks_ends_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = Machines(monkeypatch, machines=2, least=2, waits_for_lost=True)
    machines.start(0, 1)
    machines.run()
    machines.change(0, 1, can_wait=True)
    machines.step()
    machines.start(1, token="b")
    machines.change(1, ranks=2)
    machines.step()
    assert machines.step().ending == "broken"


def test_two_lost_machines_are_replaced_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = Machines(monkeypatch, machines=3, least=3, waits_for_lost=True)
    machines.start(0, 1, 2)
    machines.run()
    machines.change(0, 1, 2, can_wait=True)
    machines.silent = {1, 2}
    assert machines.step(20).members == ["0a", "", ""]
    machines.change(0, losses=2)
    machines.silent = {2}
    machines.start(1, token="b")
    assert machines.step().members == ["0a", "1b", ""]
    machines.change(1, status="running", round=1, losses=2)
    assert machines.step(30).ending == "", "the ranks of machine 1 wait for those of machine 2, too"
    machines.silent = set()
    machines.start(2, token="b")
    now = machines.step()
    assert (now.members, now.replacements) == (["0a", "1b", "2b"], ["1b", "2b"])


def test_a_replacement_whose_ranks_fail_loses_its_place_again(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = Machines(monkeypatch, machines=2, least=2, waits_for_lost=True)
    machines.start(0, 1)
    machines.run()
    machines.change(0, 1, can_wait=True)
    machines.step()
    machines.start(1, token="b")
    machines.step()
    machines.change(0, losses=1)
    assert machines.step().members == ["0a", "1b"]
    machines.change(1, status="waiting", round=1)
    assert machines.step().members == ["0a", ""]
    machines.change(1, status="left", failure=failure.of_launch("no data here"))
    machines.change(0, losses=2)
    now = machines.step(5)
    assert (now.members, now.ending, now.failure) == (["0a", ""], "", None)
    machines.start(3)
    assert machines.step().members == ["0a", "3a"]


def test_a_machine_that_was_given_up_does_not_get_its_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = Machines(monkeypatch, machines=2, least=2, waits_for_lost=True)
    machines.start(0, 1)
    machines.run()
    machines.change(0, 1, can_wait=True)
    machines.silent = {1}
    machines.step(20)
    machines.change(0, losses=1)
    machines.silent = set()
    now = machines.step(5)
    assert (now.members, now.ending) == (["0a", ""], "")


def test_a_machine_that_is_lost_after_its_training_ends_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = Machines(monkeypatch, machines=2, least=2, waits_for_lost=True)
    machines.start(0, 1)
    machines.run()
    machines.change(0, can_wait=True)
    machines.silent = {1}
    assert machines.step(20).ending == "broken"


def test_a_spare_machine_that_fails_or_has_another_version_does_not_disturb_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machines = Machines(monkeypatch, machines=2, least=2, waits_for_lost=True)
    machines.start(0, 1)
    now = machines.run()
    machines.start(2, 3)
    machines.change(2, torch="2.12")
    machines.change(3, status="left", failure=failure.of_launch("Ctrl-C"))
    assert machines.step(5) == now


def test_a_job_whose_ranks_wait_fails_if_a_lost_machine_does_not_return(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = Machines(monkeypatch, machines=2, least=2, waits_for_lost=True, wait=60)
    machines.start(0, 1)
    machines.run()
    machines.change(0, 1, can_wait=True)
    machines.silent = {1}
    reason = machines.step(100).failure
    assert reason is not None
    assert reason.text == "machines 1 of 2 did not arrive within 60 s"


def test_a_job_that_heals_fails_if_a_lost_machine_does_not_return(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = Machines(monkeypatch, machines=2, least=2, waits_for_lost=True, wait=60)
    machines.start(0, 1)
    machines.run()
    machines.silent = {1}
    machines.step(20)
    machines.change(0, status="waiting")
    reason = machines.step(70).failure
    assert reason is not None
    assert reason.text == "machines 1 of 2 did not arrive within 60 s"


def test_a_machine_joins_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machines = Machines(monkeypatch, machines=2, least=1)
    machines.start(0)
    machines.step(20)
    assert machines.run().number == 1
    machines.start(2, 3)
    assert machines.step().ending == "joined"
    machines.change(0, status="waiting")
    now = machines.run()
    assert now.members == ["0a", "2a"]
    assert machines.step(5) == now, "there is no room for machine 3"
    assert "machine 2 (host2) has joined; continuing with 2 of 2 machines" in capsys.readouterr().err


def test_failed_ranks_start_again_with_all_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = Machines(monkeypatch, machines=2, least=2)
    machines.start(0, 1)
    machines.run()
    machines.change(1, status="waiting")
    assert machines.step().ending == "broken"
    machines.change(0, status="waiting")
    assert machines.run() == Round(2, ["0a", "1a"], 40000)


def test_a_member_that_has_not_seen_the_round_yet_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = Machines(monkeypatch, machines=2, least=2)
    machines.start(0, 1)
    machines.step()
    machines.change(0, status="running", round=1)
    assert machines.step(5) == Round(1, ["0a", "1a"], 29500)


def test_a_restarted_launch_of_the_same_machine_is_a_new_member(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = Machines(monkeypatch, machines=2, least=1)
    machines.start(0, 1)
    machines.run()
    machines.start(1, token="b")
    assert machines.step().ending == "broken"
    machines.change(0, status="waiting")
    assert machines.run().members == ["0a", "1b"]


def test_a_machine_that_has_finished_is_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = Machines(monkeypatch, machines=2, least=2)
    machines.start(0, 1)
    now = machines.run()
    machines.change(1, status="finished")
    machines.silent = {1}
    assert machines.step(100) == now
    machines.change(0, status="finished")
    assert machines.step() == replace(now, finished=True)


def test_other_versions_fail_a_job_of_a_fixed_size_and_are_left_out_of_a_range(monkeypatch: pytest.MonkeyPatch) -> None:
    for least in (1, 2):
        machines = Machines(monkeypatch, machines=2, least=least)
        machines.start(0, 1)
        machines.change(1, torch="2.12")
        now = machines.step(20)
        if least == 1:
            assert now.members == ["0a"]
        else:
            assert now.failure is not None
            assert now.failure.text == "host1 has torch 2.12, host0 has 2.13; install the same version on both"


def test_a_reported_failure_reaches_all_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = Machines(monkeypatch, machines=2, least=1)
    machines.start(0, 1)
    machines.run()
    first = failure.Failure(1, "host1", 5.0, 3, "ValueError")
    machines.change(1, status="left", failure=first)
    assert machines.step().failure == first


def test_records_are_decoded_as_they_were_encoded() -> None:
    reason = failure.of_launch("no", 2)
    report = Report("t", "host", "3.11", None, "1.0", 4, "running", 3, 7, 2, True, 1, reason)
    now = Round(2, ["a", "b"], 40000, "joined", True, 1, ["b"], reason)
    for record in (report, replace(report, failure=None), now, replace(now, failure=None)):
        assert round.decode(type(record), round.encode(record).encode()) == record  # type: ignore[type-var]
    other = round.decode(Report, b'["t", "host", "3.9", "2.6", "0.1", "what another version adds"]')
    assert (other.host, other.stoker) == ("host", "0.1")
