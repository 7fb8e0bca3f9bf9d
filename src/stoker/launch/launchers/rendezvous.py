"""How the machines of a launch find each other: a store on the first machine, which decides who takes part in each round.

A round is one start of the ranks on all machines. It ends when the ranks of a machine fail, when a machine dies, or when one
joins while there is room for it; the next round has the machines that are alive then. Every machine writes a report to the
store twice a second. The first machine reads them (`Coordinator`) and publishes the round, which the others read.

With `--heal` the round goes on when a machine is lost, if the ranks of the others can wait for those of a machine that takes its
place: the lost one, once it is started again, or a spare one. Its ranks get their state from the memory of the others.

torch's own DynamicRendezvousHandler over c10d is not used, for four reasons. tests/launch/test_torch_rendezvous.py shows each of
them with torch's handler:

- It does not end the round when a machine dies, so the other ranks wait for the time-out of a collective.
- Its calls hang when the machine with the store loses power: time-outs and SIGTERM do not end them. Here only a thread uses
  the store while ranks run, and a second thread notices when it hangs.
- It compares times of day that different machines have written, so it needs synchronized clocks. Here reports are counted.
- It unpickles what it reads from the store, which has no password. Here everything is JSON.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from stoker.distributed.lost_rank import LostRank, count_replaceable, joined, tell_lost_machines
from stoker.errors import UserError
from stoker.launch.launchers.elastic_job import Job, listen
from stoker.launch.launchers.remote_hosts import own_versions
from stoker.launch.rank import failure, leftovers
from stoker.launch.rank.failure import Failure

__all__ = ["ROUND", "Coordinator", "Rendezvous", "Report", "Round"]

ROUND = "round"
"""A file with the number of the round, in the folder of the ranks' reports."""
_POLL = 0.5
_LAST_CALL = 15.0
"""Seconds that the first round waits for machines beyond the minimum; one that joins later causes a restart."""
_WAITING, _RUNNING, _FINISHED, _LEFT = "waiting", "running", "finished", "left"
"""What a machine does: it waits for the next round, runs ranks, or has ended, with or without success."""
_JOINED, _BROKEN = "joined", "broken"
"""Why a round ends: a machine wants to join, or the ranks of one have failed or died with it."""
_LATEST_KEY, _NUMBERED_KEY, _MACHINE_KEY = "stoker/round", "stoker/numbered", "stoker/here/{}"


@dataclass(frozen=True)
class Report:
    """What a machine writes to the store. The first five fields are the same in every version of Stoker."""

    token: str
    """Random, so that a launch is not taken for an earlier one of the same machine."""
    host: str
    python: str
    torch: str | None
    stoker: str | None
    machine: int = -1
    status: str = _WAITING
    round: int = 0
    """The last round that it took part in."""
    count: int = 0
    """Grows with each report."""
    ranks: int = 0
    """How many ranks it runs."""
    can_wait: bool = False
    """Whether all its ranks can go on in memory with processes that take the place of others."""
    losses: int = 0
    """Of how many lost machines it has told its ranks."""
    failure: Failure | None = None
    """What ends the job on all machines."""

    def __str__(self) -> str:
        return f"machine {self.machine} ({self.host})"


@dataclass(frozen=True)
class Round:
    """What the first machine publishes."""

    number: int = 0
    members: Sequence[str] = ()
    """The tokens of the machines that take part, in the order of their ranks."""
    port: int = 0
    """Where the ranks find their store on the first machine."""
    ending: str = ""
    """Why all ranks have to end; empty while they run."""
    finished: bool = False
    losses: int = 0
    """How many machines were lost in this round, while the ranks of the others waited."""
    replacements: Sequence[str] = ()
    """The members that have taken the place of lost ones in this round."""
    failure: Failure | None = None


_Record = TypeVar("_Record", Report, Round)


def _encode(record: Report | Round) -> str:
    return json.dumps(astuple(record))


def _decode(kind: type[_Record], text: bytes) -> _Record:
    values = json.loads(text)
    if len(values) != len(fields(kind)):  # a report from another version of Stoker
        return kind(*values[:5])
    values[-1] = Failure(*values[-1]) if values[-1] else None
    return kind(*values)


class Coordinator:
    """The first machine's decisions: when a round ends, and who takes part in the next."""

    def __init__(self, job: Job, port: int, open_store: Callable[[], int]) -> None:
        self._job, self._port, self._open_store = job, port, open_store
        self._since, self._remind_after = time.monotonic(), 10.0
        """When the machines began to gather for the next round, and after how long to print who is missing."""
        self._seen: dict[str, tuple[Report, float]] = {}
        """The last report of each machine, and when it came."""
        self._awaited: set[str] = set()
        """The lost machines that the ranks of the others wait for."""

    def decide(self, current: Round, reports: Sequence[Report]) -> Round:
        """What becomes of the round after these reports, the first of which is the first machine's own."""
        job = self._job
        for report in reports:
            if report.failure is not None:
                return replace(current, failure=report.failure)
            if (difference := _compare_versions(report, reports[0])) and not job.elastic:
                return replace(current, failure=failure.of_launch(difference, 2))
        if reports[0].status == _FINISHED:
            return replace(current, finished=True)
        alive = self._alive(current, [r for r in reports if not _compare_versions(r, reports[0])])
        lost = set(current.members) - set(alive)
        if lost and not job.elastic and not job.waits_for_lost:
            return replace(current, failure=_gone(str(self._seen[lost.pop()][0])))
        # A member that waits for the current round has only not seen it yet.
        ready = {
            token: report
            for token, report in alive.items()
            if report.status == _WAITING
            and (current.ending or token not in current.members or report.round == current.number)
        }
        if current.number == 0 or current.ending:
            return self._gather(current, ready, [alive[token] for token in set(current.members) - lost - set(ready)])
        others = [alive[token] for token in current.members if token not in lost]
        if lost and not job.elastic and not ready.keys() & set(current.members) and self._can_heal(lost, others, ready):
            return self._await_replacements(current, lost, others, list(ready.values()))
        self._since, self._remind_after = time.monotonic(), 10.0
        if lost or ready.keys() & set(current.members):
            if not job.elastic:
                self._print_lost(lost - self._awaited)
            return replace(current, ending=_BROKEN)
        return replace(current, ending=_JOINED if ready and len(current.members) < job.machines else "")

    def _can_heal(self, lost: set[str], others: Sequence[Report], ready: dict[str, Report]) -> bool:
        """Whether the others' ranks can wait, and the machines that have come have as many ranks as the lost ones had."""
        sizes = {self._seen[token][0].ranks for token in lost} | {report.ranks for report in ready.values()}
        return all(report.can_wait for report in others) and len(sizes) == 1

    def _await_replacements(
        self, current: Round, lost: set[str], others: Sequence[Report], ready: Sequence[Report]
    ) -> Round:
        """Keeps the round until machines take the places of the lost ones, whose ranks the others wait for in memory."""
        if new := lost - self._awaited:
            self._awaited |= new
            self._print_lost(new)
            return replace(current, losses=current.losses + len(new))
        if any(report.losses < current.losses for report in others) or not ready:
            return self._wait_longer(current, {self._seen[token][0].machine for token in lost})
        members, came = list(current.members), sorted(ready, key=lambda report: report.machine)
        taken = []
        for token in sorted(lost, key=members.index):
            own = [report for report in came if report.machine == self._seen[token][0].machine]
            if not came:
                break
            chosen = (own or came)[0]
            came.remove(chosen)
            members[members.index(token)] = chosen.token
            taken.append(chosen)
            self._awaited.discard(token)
        names = ", ".join(map(str, taken))
        self._print(f"{names} has joined; its ranks continue from the memory of the others")
        return replace(current, members=members, replacements=[*current.replacements, *(one.token for one in taken)])

    def _print_lost(self, lost: set[str]) -> None:
        if lost:
            gone = ", ".join(sorted(str(self._seen[token][0]) for token in lost))
            self._print(f"{gone} is gone; waiting up to {self._job.wait:.0f} s until it is started again")

    def _alive(self, current: Round, reports: Iterable[Report]) -> dict[str, Report]:
        """A machine that has finished reports no more; it is missing only if the others have to start again."""
        found = {}
        for report in reports:
            last, since = self._seen.get(report.token, (None, 0.0))
            if report != last:
                since = time.monotonic()
                self._seen[report.token] = report, since
            is_heard = report.status in (_WAITING, _RUNNING) and time.monotonic() - since <= self._job.silence
            if is_heard or (report.status == _FINISHED and not current.ending):
                found[report.token] = report
        return found

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
        changes = [f"{self._seen[token][0]} is gone" for token in before if token not in after]
        changes += [f"{self._seen[token][0]} has joined" for token in after if token not in before]
        reason = ", ".join(changes) or "ranks have failed"
        self._print(f"{reason}; continuing with {len(after)} of {self._job.machines} machines")

    @staticmethod
    def _print(text: str) -> None:
        print(f"stoker: {text}", file=sys.stderr, flush=True)


class Rendezvous(StaticTCPRendezvous):  # type: ignore[misc]
    """One machine's side. To torch's agent each round is a static rendezvous of its members."""

    def __init__(self, job: Job, port: int, listener: socket.socket | None, directory: Path) -> None:
        super().__init__(job.address, port, job.machine_rank, job.machines, "stoker", math.ceil(job.wait))
        self._job, self._listener, self._directory = job, listener, directory
        self._port, self._machine = port, job.machine_rank
        self._report = Report(
            secrets.token_hex(4), socket.gethostname(), *astuple(own_versions()), ranks=job.local_size
        )
        self._round = self._latest = Round(port=port)
        """The last round that this machine took part in, and the last that the first machine has published."""
        self._first_store: Any = None
        """Of all machines, for the whole launch; `_store` is the current round's."""
        self._thread: threading.Thread | None = None
        self._leaving = threading.Event()
        self._heard = 0.0
        """When the first machine answered last."""
        self._refused = ""
        """Why this machine cannot take part."""
        self._losses = 0
        """Of how many machines that the current round has lost the ranks of this machine were told."""
        self.failure_elsewhere: Failure | None = None

    # What torch's agent calls

    def get_backend(self) -> str:
        return "stoker"

    def num_nodes_waiting(self) -> int:
        """More than 0 makes the agent end its ranks and ask for the next round."""
        latest = self._latest
        if latest.number == self._round.number and not latest.ending:
            return 0
        if latest.ending != _JOINED:  # ranks may wait for one that is gone, and not answer SIGTERM
            leftovers.end(os.environ[leftovers.JOB], grace=0.0)
        return 1

    def next_rendezvous(self) -> RendezvousInfo:
        if self._thread is None:
            self._join()
        else:
            self._clean_up()
        self._report = replace(self._report, status=_WAITING)
        now = self._await_round()
        if now.number > 1 and self._machine != 0:
            self._store = self._connect(now.port)
        self._round = now
        self._report = replace(self._report, status=_RUNNING, round=now.number)
        (self._directory / ROUND).write_text(str(now.number))
        self._tell_losses(now)
        if self._report.token in now.replacements:
            LostRank.with_machine().tell_replacement()  # through the variables that the ranks inherit
        else:
            joined()
        self.master_port, self.world_size = now.port, len(now.members)
        self.rank = now.members.index(self._report.token)
        return super().next_rendezvous()

    def _await_round(self) -> Round:
        while not self._refused:
            latest = self._latest
            if latest.number > self._round.number and self._report.token in latest.members:
                return latest
            time.sleep(0.05)
        self.leave()
        raise UserError(self._refused)

    # How the launch ends

    def finish(self) -> None:
        """All ranks of this machine have ended well."""
        self._end(_FINISHED)

    def leave(self, failure: Failure | None = None) -> None:
        """The ranks of this machine have ended for good; with a failure, those of the others have to."""
        self._end(_LEFT, failure)

    def _end(self, status: str, failure: Failure | None = None) -> None:
        self._report = replace(self._report, status=status, failure=failure)
        self._leaving.set()
        if self._thread is None:
            return
        self._thread.join(timeout=5.0)  # it sends the last report, unless the first machine is gone
        if self._machine == 0 and self._job.machines > 1:
            time.sleep(3 * _POLL)  # the store ends with this process: the others have to read the last round before

    def _tell_losses(self, now: Round) -> None:
        """Ranks may wait for those of a machine that has lost power, from which no connection is ever closed."""
        tell_lost_machines(self._directory, now.losses)
        self._losses = now.losses

    # Joining, and starting again

    def _join(self) -> None:
        store = self._store = self._first_store = self._connect(self._port, self._listener)
        if self._machine < 0:  # numbers after those that people give
            self._machine = self._job.machines - 1 + store.add(_NUMBERED_KEY, 1)
        self._report = replace(self._report, machine=self._machine)
        if self._machine == 0:
            store.set(_LATEST_KEY, _encode(self._latest))
        store.set(_MACHINE_KEY.format(self._machine), _encode(self._report))
        first = _decode(Report, store.get(_MACHINE_KEY.format(0)))
        if difference := _compare_versions(first, self._report):
            raise UserError(difference)
        self._heard = time.monotonic()
        self._thread = threading.Thread(target=self._exchange_reports, daemon=True)
        self._thread.start()
        if self._machine > 0:
            threading.Thread(target=self._detect_silent_first_machine, daemon=True).start()

    def _connect(self, port: int, listener: socket.socket | None = None) -> Any:
        """A client of the store at this port of the first machine; with a listener, also its server."""
        server: dict[str, Any] = {"master_listen_fd": os.dup(listener.fileno())} if listener is not None else {}
        try:
            return TCPStore(
                self._job.address, port, None, bool(server), self.timeout, False, multi_tenant=False, **server
            )
        except Exception as error:
            reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
            raise UserError(
                f"machine {self._job.machine_rank} cannot reach the first machine at {self._job.address}, port {port}: is "
                f"`stoker launch` running there with --machine_rank 0, and is the port open? ({reason})"
            ) from None

    def _clean_up(self) -> None:
        """Ends what the ranks of the last round have started, and removes their reports and marks."""
        leftovers.end(os.environ[leftovers.JOB])
        for pattern in ("failed.*", "ended.*", "replaceable.*"):
            for path in self._directory.glob(pattern):
                path.unlink(missing_ok=True)

    def _open_round_store(self) -> int:
        with listen(replace(self._job, port=None)) as listener:
            port: int = listener.getsockname()[1]
            self._store = self._connect(port, listener)
        return port

    # Threads

    def _exchange_reports(self) -> None:
        """Writes this machine's reports and reads the rounds, until the launch ends; on the first machine, decides them."""
        try:
            store = self._connect(self._port)
            coordinator = Coordinator(self._job, self._port, self._open_round_store) if self._machine == 0 else None
            key, count = _MACHINE_KEY.format(self._machine), 0
            while self.failure_elsewhere is None:
                leaving, count = self._leaving.is_set(), count + 1
                if _decode(Report, store.get(key)).token != self._report.token:
                    raise UserError(
                        f"another launch has joined as machine {self._machine}; give each its own --machine_rank"
                    )
                can_wait = self._job.waits_for_lost and count_replaceable(self._directory) == self._job.local_size
                own = replace(self._report, count=count, can_wait=can_wait, losses=self._losses)
                store.set(key, _encode(own))
                if coordinator is not None:
                    store.set(_LATEST_KEY, _encode(coordinator.decide(self._latest, self._read_reports(store))))
                self._latest = _decode(Round, store.get(_LATEST_KEY))
                self._heard = time.monotonic()
                if self._latest.number == self._round.number and self._latest.losses > self._losses:
                    self._tell_losses(self._latest)
                if self._latest.failure is not None:
                    self._stop(self._latest.failure)
                elif self._latest.finished and self._report.status == _WAITING:
                    self._refused = "the job has ended"
                if leaving:
                    return
                self._leaving.wait(_POLL if self._report.status == _RUNNING else 0.1)
        except UserError as error:
            self._stop(failure.of_launch(str(error), 2))
        except Exception:
            self._stop(_gone(f"machine 0 ({self._job.address})"))

    def _read_reports(self, store: Any) -> list[Report]:
        machines = range(self._job.machines + int(store.add(_NUMBERED_KEY, 0)))
        keys = [_MACHINE_KEY.format(machine) for machine in machines]
        return [_decode(Report, store.get(key)) for key in keys if store.check([key])]

    def _detect_silent_first_machine(self) -> None:
        """A machine that has lost power does not answer, and a call to its store does not return."""
        while not self._leaving.wait(1.0):
            if time.monotonic() - self._heard > self._job.silence:
                self._stop(_gone(f"machine 0 ({self._job.address})"))
                return

    def _stop(self, failure: Failure) -> None:
        """Ends this machine's ranks because the job has failed elsewhere."""
        if self.failure_elsewhere is not None or self._leaving.is_set():
            return
        self.failure_elsewhere = failure
        if self._round.number == 0:  # the agent handles signals only once it has ranks
            self._refused = failure.text
        else:
            os.kill(os.getpid(), signal.SIGTERM)


def _compare_versions(other: Report, own: Report) -> str:
    """What differs between another machine and this one; empty if nothing does."""
    for name in ("python", "torch", "stoker"):
        theirs, ours = getattr(other, name), getattr(own, name)
        if theirs != ours:
            return f"{other.host} has {name} {theirs}, {own.host} has {ours}; install the same version on both"
    return ""


def _gone(machine: str) -> Failure:
    return failure.of_launch(f"{machine} is gone: its launch was ended, it is down, or the network is")
