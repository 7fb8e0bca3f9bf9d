"""How the machines of a launch find each other: a store on the first machine, which decides who takes part in each round.

A round is one start of the ranks on all machines. It ends when the ranks of a machine fail, when a machine dies, or when one
joins while there is room for it; the next round has the machines that are alive then. Every machine writes a report to the
store twice a second. The first machine reads them (`stoker.launch.launchers.coordinator`) and publishes the round, which the
others read.

torch's own DynamicRendezvousHandler over c10d is not used, for four reasons, each of which was seen with the handler of
torch 2.13:

- It does not end the round when a machine dies, so the other ranks wait for the time-out of a collective.
- Its calls hang when the machine with the store loses power: time-outs and SIGTERM do not end them. Here only a thread uses
  the store while ranks run, and a second thread notices when it hangs.
- It compares times of day that different machines have written, so it needs synchronized clocks. Here reports are counted.
- It unpickles what it reads from the store, which has no password. Here everything is JSON, and between machines sealed with the
  job's secret (`stoker.distributed.sealed_store`): a report of somebody who does not know it counts as none.
"""

from __future__ import annotations

import math
import os
import secrets
import signal
import socket
import threading
import time
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed.elastic.rendezvous import RendezvousInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from stoker.distributed.lost_rank import LostRank, count_replaceable, joined, tell_lost_machines
from stoker.distributed.sealed_store import Forged
from stoker.errors import UserError
from stoker.launch.launchers import job_secret
from stoker.launch.launchers.coordinator import Coordinator, gone
from stoker.launch.launchers.elastic_job import Job
from stoker.launch.launchers.remote_hosts import own_versions
from stoker.launch.launchers.round import (
    FINISHED,
    JOINED,
    LEFT,
    RUNNING,
    WAITING,
    Report,
    Round,
    decode,
    encode,
    version_difference,
)
from stoker.launch.launchers.round_stores import LocalStores, NetworkStores, Stores
from stoker.launch.rank import failure, leftovers
from stoker.launch.rank.failure import Failure

__all__ = ["ROUND", "Rendezvous"]

ROUND = "round"
"""A file with the number of the round, in the folder of the ranks' reports."""
_POLL = 0.5
_LOST_PLACE = {
    True: "the ranks of this machine have ended before they had joined those of the others, which go on waiting",
    False: "this machine has not reported for too long, and the others have given its place away; start it again to take part",
}
"""Why a machine is not in the round that it takes part in, by whether it waits for another one."""
_MOST_NUMBERED = 1000
"""Machines that were started without a number; the counter has no seal, and anybody could raise it."""
_LATEST_KEY, _NUMBERED_KEY, _MACHINE_KEY = "stoker/round", "stoker/numbered", "stoker/here/{}"


class Rendezvous(StaticTCPRendezvous):  # type: ignore[misc]
    """One machine's side. To torch's agent each round is a static rendezvous of its members."""

    def __init__(self, job: Job, port: int, listener: socket.socket | None, directory: Path, secret: str) -> None:
        super().__init__(job.address, port, job.machine_rank, job.machines, "stoker", math.ceil(job.wait))
        self._job, self._directory = job, directory
        several = job.machines > 1
        self._stores: Stores = (
            NetworkStores(job, listener, self.timeout, secret) if several else LocalStores(directory, self.timeout)
        )
        self._port, self._machine = port, job.machine_rank
        report = Report(secrets.token_hex(4), socket.gethostname(), *astuple(own_versions()))
        self._report = replace(report, ranks=job.local_size)
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
        self._reports: dict[str, Report] = {}
        """On the first machine: the last report of each other one, by its key in the store."""
        self._losses = 0
        """Of how many machines that the current round has lost the ranks of this machine were told."""
        self.failure_elsewhere: Failure | None = None

    # What torch's agent calls

    def get_backend(self) -> str:
        return "stoker"

    @property
    def use_agent_store(self) -> bool:
        return self._stores.served_by_agent

    def num_nodes_waiting(self) -> int:
        """More than 0 makes the agent end its ranks and ask for the next round."""
        latest = self._latest
        if latest.number == self._round.number and not latest.ending:
            return 0
        if latest.ending != JOINED:  # ranks may wait for one that is gone, and not answer SIGTERM
            leftovers.end(os.environ[leftovers.JOB], grace=0.0)
        return 1

    def next_rendezvous(self) -> RendezvousInfo:
        if self._thread is None:
            self._join()
        else:
            self._clean_up()
        self._report = replace(self._report, status=WAITING)
        now = self._await_round()
        if now.number > 1 and self._machine != 0:
            self._store = self._stores.connect(now.port)
        self._tell_losses(now)  # before the round is this machine's own: from then on the other thread does it
        self._round = now
        self._report = replace(self._report, status=RUNNING, round=now.number)
        (self._directory / ROUND).write_text(str(now.number))
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
        self._end(FINISHED)

    def leave(self, failure: Failure | None = None) -> None:
        """The ranks of this machine have ended for good; with a failure, those of the others have to."""
        self._end(LEFT, failure)

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
        is_first = self._machine == 0
        store = self._stores.serve(self._port) if is_first else self._stores.connect(self._port)
        self._store = self._first_store = store
        if self._machine < 0:  # numbers after those that people give
            self._machine = self._job.machines - 1 + store.add(_NUMBERED_KEY, 1)
        self._report = replace(self._report, machine=self._machine)
        if is_first:
            store.set(_LATEST_KEY, encode(self._latest))
        elif self._first_round(store).number > 0:  # a machine that does not fit must not disturb the others
            self._require_same_versions(store)
        store.set(_MACHINE_KEY.format(self._machine), encode(self._report))
        self._require_same_versions(store)
        self._heard = time.monotonic()
        self._thread = threading.Thread(target=self._exchange_reports, daemon=True)
        self._thread.start()
        if self._machine > 0:
            threading.Thread(target=self._detect_silent_first_machine, daemon=True).start()

    def _require_same_versions(self, store: Any) -> None:
        first = _read(Report, store, _MACHINE_KEY.format(0))
        if first is not None and (difference := version_difference(first, self._report)):
            raise UserError(difference)

    def _first_round(self, store: Any) -> Round:
        try:
            return decode(Round, store.get(_LATEST_KEY))
        except (Forged, ValueError):
            raise UserError(
                f"the first machine at {self._job.address}, port {self._port}, does not know the secret of this machine's jobs: "
                f"{job_secret.advice()}"
            ) from None

    def _clean_up(self) -> None:
        """Ends what the ranks of the last round have started, and removes their reports and marks."""
        leftovers.end(os.environ[leftovers.JOB])
        for pattern in ("failed.*", "ended.*", "replaceable.*"):
            for path in self._directory.glob(pattern):
                path.unlink(missing_ok=True)

    def _open_round_store(self) -> int:
        port, self._store = self._stores.open_round()
        return port

    # Threads

    def _exchange_reports(self) -> None:
        """Writes this machine's reports and reads the rounds, until the launch ends; on the first machine, decides them."""
        try:
            store = self._stores.connect(self._port)
            coordinator = Coordinator(self._job, self._port, self._open_round_store) if self._machine == 0 else None
            key, count = _MACHINE_KEY.format(self._machine), 0
            while self.failure_elsewhere is None:
                leaving, count = self._leaving.is_set(), count + 1
                found = _read(Report, store, key)
                if found is not None and found.token != self._report.token:
                    raise UserError(
                        f"another launch has joined as machine {self._machine}; give each its own --machine_rank"
                    )
                can_wait = self._job.waits_for_lost and count_replaceable(self._directory) == self._job.local_size
                own = replace(self._report, count=count, can_wait=can_wait, losses=self._losses)
                store.set(key, encode(own))
                if coordinator is not None:
                    self._latest = coordinator.decide(self._latest, [own, *self._read_reports(store)])
                    store.set(_LATEST_KEY, encode(self._latest))
                else:
                    self._latest = _read(Round, store, _LATEST_KEY) or self._latest
                self._heard = time.monotonic()
                if self._latest.number == self._round.number > 0 and not self._latest.ending:
                    if self._report.token not in self._latest.members:
                        raise UserError(_LOST_PLACE[self._report.status == WAITING])
                    if self._latest.losses > self._losses:
                        self._tell_losses(self._latest)
                if self._latest.failure is not None:
                    self._stop(self._latest.failure)
                elif self._latest.finished and self._report.status == WAITING:
                    self._refused = "the job has ended"
                if leaving:
                    return
                self._leaving.wait(_POLL if self._report.status == RUNNING else 0.1)
        except UserError as error:
            self._stop(failure.of_launch(str(error), 2))
        except Exception:
            self._stop(gone(f"machine 0 ({self._job.address})"))

    def _read_reports(self, store: Any) -> list[Report]:
        """The last of each other machine. One that a stranger has overwritten comes again, or its machine falls silent."""
        numbered = min(int(store.add(_NUMBERED_KEY, 0)), _MOST_NUMBERED)
        keys = [_MACHINE_KEY.format(machine) for machine in range(1, self._job.machines + numbered)]
        for key in keys:
            if store.check([key]) and (report := _read(Report, store, key)) is not None:
                self._reports[key] = report
        return [self._reports[key] for key in keys if key in self._reports]

    def _detect_silent_first_machine(self) -> None:
        """A machine that has lost power does not answer, and a call to its store does not return."""
        while not self._leaving.wait(1.0):
            if time.monotonic() - self._heard > self._job.silence:
                self._stop(gone(f"machine 0 ({self._job.address})"))
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


_Record = TypeVar("_Record", Report, Round)


def _read(kind: type[_Record], store: Any, key: str) -> _Record | None:
    """None if somebody who does not know the job's secret has written it; the machine whose it is writes it again soon."""
    try:
        return decode(kind, store.get(key))
    except (Forged, ValueError):
        return None
