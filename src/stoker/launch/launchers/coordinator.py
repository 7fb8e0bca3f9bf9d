"""The first machine's decisions in a launch on several machines: when a round ends, and who takes part in the next.

With `--heal` a round goes on when a machine is lost, if the ranks of the others can wait for those of a machine that takes its
place: the lost one, once it is started again, or a spare one. Its ranks get their state from the memory of the others. A machine
that has lost its place does not get it back under its old token: its ranks have missed what the others did meanwhile.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from stoker.launch.launchers.elastic_job import Job
from stoker.launch.launchers.round import (
    BROKEN,
    FINISHED,
    JOINED,
    RUNNING,
    VACANT,
    WAITING,
    Report,
    Round,
    version_difference,
)
from stoker.launch.rank import failure

__all__ = ["Coordinator", "gone"]

_LAST_CALL = 15.0
"""Seconds that the first round waits for machines beyond the minimum; one that joins later causes a restart."""


class Coordinator:
    """Reads the reports and decides what becomes of the round; has no threads, sockets or files."""

    def __init__(self, job: Job, port: int, open_store: Callable[[], int]) -> None:
        self._job, self._port, self._open_store = job, port, open_store
        self._since, self._remind_after = time.monotonic(), 10.0
        """When the machines began to gather for the next round, and after how long to print who is missing."""
        self._seen: dict[str, tuple[Report, float]] = {}
        """The last report of each machine, and when it came."""
        self._vacant: dict[int, Report] = {}
        """For each vacant place: the last report of the machine that had it."""
        self._joining: set[str] = set()
        """Machines that have taken the place of a lost one, and whose ranks do not train yet."""

    def decide(self, current: Round, reports: Sequence[Report]) -> Round:
        """What becomes of the round after these reports, the first of which is the first machine's own."""
        job = self._job
        if (reason := self._failure(current, reports)) is not None:
            return replace(current, failure=reason)
        if reports[0].status == FINISHED:
            return replace(current, finished=True)
        alive = self._alive(current, [r for r in reports if not version_difference(r, reports[0])])
        self._joining = {token for token in self._joining if token not in alive or not alive[token].can_wait}
        members = set(current.members) - {VACANT}
        lost = members - set(alive)
        if lost and not job.elastic and not job.waits_for_lost:
            return replace(current, failure=gone(str(self._seen[lost.pop()][0])))
        # A member that waits for the current round has only not seen it yet.
        ready = {
            token: report
            for token, report in alive.items()
            if report.status == WAITING and (current.ending or token not in members or report.round == current.number)
        }
        if current.number == 0 or current.ending:
            return self._gather(current, ready, [alive[token] for token in members - lost - set(ready)])
        failed = ready.keys() & members
        if lost or failed or self._vacant:
            if self._can_heal(current, alive, lost, failed):
                if lost or failed:
                    return self._vacate(current, lost | failed)
                return self._fill_vacancies(current, alive, list(ready.values()))
            if not job.elastic:
                self._print_lost([self._seen[token][0] for token in lost])
            return self._end_round(current)
        self._since, self._remind_after = time.monotonic(), 10.0
        return replace(current, ending=JOINED if ready and len(members) < job.machines else "")

    def _end_round(self, current: Round) -> Round:
        """All ranks end, and start again from a checkpoint."""
        self._vacant, self._joining = {}, set()
        self._since, self._remind_after = time.monotonic(), 10.0
        return replace(current, ending=BROKEN)

    def _failure(self, current: Round, reports: Sequence[Report]) -> failure.Failure | None:
        """What ends the job. Of a machine that has no place, or none yet, it ends only that machine's launch."""
        for report in reports:
            is_spare = current.number > 0 and not current.ending and report.token not in current.members
            if report.failure is not None and not is_spare and report.token not in self._joining:
                return report.failure
            difference = version_difference(report, reports[0])
            if difference and not self._job.elastic and not is_spare:
                return failure.of_launch(difference, 2)
        return None

    def _alive(self, current: Round, reports: Iterable[Report]) -> dict[str, Report]:
        """A machine that has finished reports no more; it is missing only if the others have to start again."""
        found = {}
        for report in reports:
            last, since = self._seen.get(report.token, (None, 0.0))
            if report != last:
                since = time.monotonic()
                self._seen[report.token] = report, since
            is_heard = report.status in (WAITING, RUNNING) and time.monotonic() - since <= self._job.silence
            if is_heard or (report.status == FINISHED and not current.ending):
                found[report.token] = report
        return found

    # Going on in the same round

    def _can_heal(self, current: Round, alive: dict[str, Report], lost: set[str], failed: set[str]) -> bool:
        """Whether the round can go on without the lost machines, and without those whose ranks have failed."""
        if self._job.elastic or failed - self._joining:
            return False
        trained = all(self._seen[token][0].can_wait or token in self._joining for token in lost)
        others = set(current.members) & alive.keys() - lost - self._joining
        return trained and all(alive[token].can_wait for token in others)

    def _vacate(self, current: Round, lost: set[str]) -> Round:
        """Takes their places from machines that were lost."""
        members = list(current.members)
        for token in lost:
            place = members.index(token)
            self._vacant[place] = self._seen[token][0]
            members[place] = VACANT
        self._joining -= lost
        self._since, self._remind_after = time.monotonic(), 10.0
        self._print_lost([self._seen[token][0] for token in lost])
        return replace(current, members=members, losses=current.losses + len(lost))

    def _fill_vacancies(self, current: Round, alive: dict[str, Report], ready: Sequence[Report]) -> Round:
        """Gives vacant places to machines that have come, once the ranks of all others were told of the loss."""
        sizes = {before.machine: before.ranks for before in self._vacant.values()}
        if any(report.ranks != sizes.get(report.machine, report.ranks) for report in ready):
            return self._end_round(current)  # a lost machine was started again with another number of ranks
        running = [alive[token] for token in current.members if token in alive and alive[token].round == current.number]
        told = all(report.losses == current.losses for report in running)
        # A machine that was in this round before has lost its place for good.
        spares = [report for report in ready if report.round < current.number] if told else []
        members, joining = list(current.members), []
        for place, before in sorted(self._vacant.items()):
            fitting = [report for report in spares if report.ranks == before.ranks]
            if fitting:
                chosen = min(fitting, key=lambda report: (report.machine != before.machine, report.machine))
                spares.remove(chosen)
                members[place] = chosen.token
                joining.append(chosen.token)
                del self._vacant[place]
                self._print(f"{chosen} has joined; its ranks continue from the memory of the others")
        if not joining:
            return self._wait_longer(current, {report.machine for report in self._vacant.values()})
        self._joining.update(joining)
        return replace(current, members=members, replacements=[*current.replacements, *joining])

    def _print_lost(self, lost: Sequence[Report]) -> None:
        if lost:
            names = ", ".join(sorted(map(str, lost)))
            self._print(f"{names} is gone; waiting up to {self._job.wait:.0f} s until it is started again")

    # Starting the next round

    def _gather(self, before: Round, ready: dict[str, Report], awaited: list[Report]) -> Round:
        """Waits for the living members of the last round and for enough others; takes as many as there is room for."""
        job, waited = self._job, time.monotonic() - self._since
        if len(ready) >= (job.least if before.number > 0 or waited > _LAST_CALL else job.machines) and not awaited:
            chosen = sorted(ready.values(), key=lambda r: (r.token not in before.members, r.machine))[: job.machines]
            members = [report.token for report in sorted(chosen, key=lambda report: report.machine)]
            # Ranks that are started again get a new store: the keys in the old one belong to ranks that are gone.
            port = self._open_store() if before.number > 0 else self._port
            if before.number > 0 and (job.elastic or job.waits_for_lost):
                self._print_changes(before.members, members)
            return Round(before.number + 1, members, port)
        numbers = {r.machine for r in awaited} or set(range(job.machines)) - {r.machine for r in ready.values()}
        return self._wait_longer(before, numbers)

    def _wait_longer(self, before: Round, numbers: set[int]) -> Round:
        """Goes on waiting for these machines, or fails."""
        job, waited = self._job, time.monotonic() - self._since
        missing = ", ".join(map(str, sorted(numbers)))
        if waited > job.wait:
            text = f"machines {missing} of {job.machines} did not arrive within {job.wait:.0f} s"
            return replace(before, failure=failure.of_launch(text, 2))
        if waited > self._remind_after:
            self._remind_after = waited + 60
            print(
                f"stoker: waiting for machine {missing}; start `stoker launch --machine_rank N "
                f"--main_process_ip {job.address} --main_process_port {self._port} ...` there",
                file=sys.stderr,
            )
        return before

    def _print_changes(self, before: Sequence[str], after: Sequence[str]) -> None:
        changes = [f"{self._seen[token][0]} is gone" for token in before if token not in (*after, VACANT)]
        changes += [f"{self._seen[token][0]} has joined" for token in after if token not in before]
        reason = ", ".join(changes) or "ranks have failed"
        self._print(f"{reason}; continuing with {len(after)} of {self._job.machines} machines")

    @staticmethod
    def _print(text: str) -> None:
        print(f"stoker: {text}", file=sys.stderr, flush=True)


def gone(machine: str) -> failure.Failure:
    return failure.of_launch(f"{machine} is gone: its launch was ended, it is down, or the network is")
