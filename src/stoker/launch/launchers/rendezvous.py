"""Where the machines of a launch find each other, round after round: a store on machine 0, which decides who takes part.

A round is one start of the ranks on all machines that are there. It ends for all when the ranks of one fail, when a machine
falls silent, or when one comes while there is room for it; the next round is of those who are there then. Every machine
but the first talks to the store in one thread only: a machine without power answers nothing, and whoever asks it waits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from stoker.errors import UserError
from stoker.launch.launchers.elastic_job import Job, listen
from stoker.launch.launchers.remote_hosts import own_versions
from stoker.launch.rank import failure, leftovers

__all__ = ["ROUND", "Meeting"]

ROUND = "round"
"""A file with the number of the round, in the folder where the ranks leave word."""
_POLL = 0.5
_LAST_CALL = 15.0
"""Seconds that the first round waits for machines beyond the least number; whoever comes later costs a restart."""
_FAILED, _OVER = "stoker/failed", "stoker/over"
_JOINED, _LOST, _BROKEN = "joined", "lost", "broken"
"""Why a round ends before its time."""


@dataclass(frozen=True)
class Round:
    """Who takes part in it, each with the token of its launch, and where its ranks meet."""

    number: int
    members: dict[int, str]
    port: int

    def to_word(self) -> str:
        return json.dumps([self.number, list(self.members.items()), self.port])

    @classmethod
    def from_word(cls, word: str) -> Round:
        number, members, port = json.loads(word)
        return cls(number, dict(members), port)


class Meeting(RendezvousHandler):  # type: ignore[misc]
    """One machine's door to it, as torch's agent wants it."""

    def __init__(self, job: Job, port: int, listener: socket.socket | None, directory: Path) -> None:
        self._job, self._port, self._listener, self._directory = job, port, listener, directory
        self._me = job.machine_rank
        self._token = secrets.token_hex(4)
        self._store: Any = None
        self._own_store: Any = None
        """Of the round under way, from the second on."""
        self._round = Round(0, {}, port)
        self._ending: str | None = None
        """Why the round that is under way has to end; None while it has not."""
        self._asked: int | None = None
        """The round after which this machine wants the next, once its ranks have ended."""
        self._next: Round | None = None
        self._refused = ""
        self._left = threading.Event()
        self._pulse = time.monotonic() + 30.0
        self._beats: dict[int, tuple[int, float]] = {}
        self._lock = threading.Lock()
        self.failure_elsewhere: failure.Failure | None = None

    # What torch's agent asks

    def get_backend(self) -> str:
        return "stoker"

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_run_id(self) -> str:
        return "stoker"

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def shutdown(self) -> bool:
        return True

    def num_nodes_waiting(self) -> int:
        """More than 0 lets the agent end its ranks and come to the next round."""
        if self._ending is None:
            return 0
        if self._ending != _JOINED:
            _kill_ranks()  # they may wait for a rank that is gone, deaf to a polite signal
        return 1

    def next_rendezvous(self) -> RendezvousInfo:
        if self._store is None:
            self._arrive()
        self._clear_up_the_last_round()
        now = self._call_round() if self._me == 0 else self._await_round()
        store = self._store if now.number == 1 else self._own_store
        with self._lock:
            self._round, self._ending, self._asked, self._next = now, None, None, None
        (self._directory / ROUND).write_text(str(now.number))
        place = RendezvousStoreInfo(self._job.address, now.port)
        rank = sorted(now.members).index(self._me)
        return RendezvousInfo(PrefixStore("stoker", store), rank, len(now.members), place)

    def leave(self, first: failure.Failure | None = None, *, alone: bool = False) -> None:
        """The ranks of this machine have ended, for good; `alone`: those of the others need not."""
        self._left.set()
        if self._job.machines == 1 or self._store is None:
            return
        with contextlib.suppress(Exception):
            if alone:
                self._store.set(f"stoker/left/{self._token}", "1")
            elif first is not None and not self._store.check([_FAILED]):
                self._store.set(_FAILED, json.dumps(dataclasses.asdict(first)))
            elif self._me == 0:
                self._store.set(_OVER, "1")
        if self._me == 0:
            time.sleep(3 * _POLL)  # the store lives here: the others have to see the end before it goes

    # Coming

    def _arrive(self) -> None:
        self._store = self._connect(self._port, server=self._me == 0)
        if self._job.machines == 1:
            return
        if self._me < 0:  # beyond the numbers that people give
            self._me = self._job.machines - 1 + self._store.add("stoker/numbered", 1)
        versions = dataclasses.astuple(own_versions())
        self._store.set(f"stoker/here/{self._me}", json.dumps([self._token, socket.gethostname(), *versions]))
        if self._me > 0:
            self._compare(0)
        for task in (self._watch, self._listen_to_pulse):
            threading.Thread(target=task, daemon=True).start()

    def _connect(self, port: int, *, server: bool, listening: int | None = None) -> Any:
        seconds = datetime.timedelta(seconds=self._job.wait)
        if server and listening is None and self._listener is not None:
            listening = os.dup(self._listener.fileno())
        more: dict[str, Any] = {"master_listen_fd": listening} if listening is not None else {}
        try:
            return TCPStore(self._job.address, port, None, server, seconds, False, multi_tenant=False, **more)
        except Exception as error:
            raise UserError(
                f"machine {self._job.machine_rank} cannot reach the first machine at {self._job.address}, port {port}: is "
                f"`stoker launch` running there with --machine_rank 0, and is the port open? ({_short(error)})"
            ) from None

    def _here(self, machine: int) -> list[Any] | None:
        """Token, host name and versions of a machine; None before it has come."""
        key = f"stoker/here/{machine}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _compare(self, machine: int) -> None:
        mine, theirs = [socket.gethostname(), *dataclasses.astuple(own_versions())], (self._here(machine) or [])[1:]
        for name, own, other in zip(("Python", "torch", "stoker"), mine[1:], theirs[1:], strict=False):
            if own != other:
                raise UserError(
                    f"{theirs[0]} (machine {machine}) has {name} {other}, {mine[0]} has {own}; make them the same"
                )

    def _clear_up_the_last_round(self) -> None:
        """What its ranks have left must not be taken for the next one's, nor what they have started take its cores."""
        if self._round.number > 0 and leftovers.JOB in os.environ:
            leftovers.end(os.environ[leftovers.JOB])
        for pattern in ("failed.*", "ended.*"):
            for path in self._directory.glob(pattern):
                path.unlink(missing_ok=True)

    # The first machine calls rounds

    def _call_round(self) -> Round:
        before = self._round
        try:
            members = self._gather(before) if self._job.machines > 1 else {0: self._token}
        except UserError as error:
            self.leave(failure.Failure(None, "", time.time(), 2, str(error)))
            raise
        port = self._port
        if before.number > 0:
            # Ranks that are started again get a store of their own: the keys of the last one lead to ranks that are gone.
            fresh = listen(dataclasses.replace(self._job, port=None))
            port = fresh.getsockname()[1]
            self._own_store = self._connect(port, server=True, listening=fresh.detach())
        now = Round(before.number + 1, members, port)
        self._store.set(f"stoker/round/{now.number}", now.to_word())
        if before.number > 0 and self._job.elastic:
            self._say_who(before, now)
        return now

    def _gather(self, before: Round) -> dict[int, str]:
        """Waits for those who were there and still are, and for enough others; takes as many as there is room for."""
        job, start = self._job, time.monotonic()
        with self._lock:
            self._end_round(_BROKEN)
        said = start + 10
        while True:
            if self._refused:
                raise UserError(self._refused)
            ready = {0: self._token, **self._ready(before)}
            awaited = [m for m, token in before.members.items() if m not in ready and self._is_alive(m, token)]
            waited = time.monotonic() - start
            last_call = before.number > 0 or waited > _LAST_CALL
            if not awaited and (len(ready) >= job.machines or (len(ready) >= job.least and last_call)):
                first = sorted(ready, key=lambda m: (m not in before.members, m))[: job.machines]
                return {m: ready[m] for m in sorted(first)}
            missing = set(range(job.machines)) - set(ready)
            if waited > job.wait:
                raise UserError(f"machines {_listed(missing)} of {job.machines} did not arrive within {job.wait:.0f} s")
            if time.monotonic() > said:
                said = time.monotonic() + 60
                print(
                    f"stoker: waiting for machine {_listed(missing)}; start `stoker launch --machine_rank N "
                    f"--main_process_ip {job.address} --main_process_port {self._port} ...` there",
                    file=sys.stderr,
                )
            time.sleep(0.1)

    def _ready(self, before: Round) -> dict[int, str]:
        """The other machines that want the round after `before`, by their tokens."""
        found = {}
        for machine in self._others():
            here, key = self._here(machine), f"stoker/ready/{machine}"
            if here is None:
                continue
            try:
                self._compare(machine)
            except UserError:
                if not self._job.elastic:
                    raise
                continue  # it has said so itself, and ended
            if not self._store.check([key]):
                continue
            token, after = json.loads(self._store.get(key))
            was_member = before.members.get(machine) == token
            if token == here[0] and not (was_member and after < before.number) and self._is_alive(machine, token):
                found[machine] = token
        return found

    def _others(self) -> range:
        return range(1, self._job.machines + int(self._store.add("stoker/numbered", 0)))

    def _is_alive(self, machine: int, token: str) -> bool:
        if machine == 0:
            return True
        here = self._here(machine)
        if here is None or here[0] != token or self._store.check([f"stoker/left/{token}"]):
            return False
        count, now = self._store.add(f"stoker/beat/{machine}", 0), time.monotonic()
        if self._beats.get(machine, (-1, 0.0))[0] != count:
            self._beats[machine] = (count, now)
        return now - self._beats[machine][1] <= self._job.silence

    def _say_who(self, before: Round, now: Round) -> None:
        went = set(before.members.items()) - set(now.members.items())
        came = set(now.members.items()) - set(before.members.items())
        told = [f"machine {self._named(m)} is gone" for m, _ in sorted(went) if m not in now.members]
        told += [f"machine {self._named(m)} has come" for m, _ in sorted(came)]
        count = f"{len(now.members)} of {self._job.machines} machines"
        print(f"stoker: {', '.join(told) or 'ranks have failed'}; going on with {count}", file=sys.stderr, flush=True)

    def _named(self, machine: int) -> str:
        return f"{machine} ({(self._here(machine) or ['', '?'])[1]})"

    def _look_at_the_others(self) -> None:
        """On the first machine, while a round is under way: whether it can stay as it is."""
        now = self._round
        if now.number == 0 or self._ending is not None:
            return
        for machine, token in now.members.items():
            if self._is_alive(machine, token):
                continue
            if not self._job.elastic:
                self._gone(machine)
                self._store.set(_FAILED, json.dumps(dataclasses.asdict(self.failure_elsewhere)))  # type: ignore[arg-type]
                raise ConnectionError
            self._end_round(_LOST)
            return
        ready = self._ready(now)
        if any(now.members.get(machine) == token for machine, token in ready.items()):
            self._end_round(_BROKEN)
        elif ready and len(now.members) < self._job.machines:
            self._end_round(_JOINED)

    def _end_round(self, why: str) -> None:
        if self._round.number and self._ending is None:
            self._ending = why
            self._store.set(f"stoker/ending/{self._round.number}", why)

    # The others follow

    def _await_round(self) -> Round:
        self._asked = self._round.number
        while self._next is None:
            if self._refused:
                raise UserError(self._refused)
            time.sleep(0.05)
        if self._next.number > 1:
            self._own_store = self._connect(self._next.port, server=False)
        return self._next

    def _follow(self, store: Any, told: list[int]) -> None:
        """Says what this machine wants and reads what the first one has called. `told`: what was said last."""
        asked = self._asked
        if asked is not None and told != [asked]:
            told[:] = [asked]
            store.set(f"stoker/ready/{self._me}", json.dumps([self._token, asked]))
        if json.loads(store.get(f"stoker/here/{self._me}"))[0] != self._token:
            self._refused = f"another launch has come as machine {self._me}; give each its own --machine_rank"
            self.failure_elsewhere = failure.Failure(None, "", 0.0, 2, self._refused)
            raise ConnectionError
        if asked is None:
            key = f"stoker/ending/{self._round.number}"
            if self._ending is None and store.check([key]):
                self._ending = store.get(key).decode()
            return
        if store.check([_OVER]):
            self._refused = "the job is over"
            return
        number = asked + 1
        while self._next is None and store.check([f"stoker/round/{number}"]):
            found = Round.from_word(store.get(f"stoker/round/{number}").decode())
            if found.members.get(self._me) == self._token:
                self._next = found
            number += 1

    # Signs of life

    def _watch(self) -> None:
        """Says that this machine is there, learns what has become of the others, and ends its ranks if the job has failed."""
        told: list[int] = []
        try:
            store = self._connect(self._port, server=False)
            while not self._left.wait(_POLL if self._asked is None else 0.1):
                if store.check([_FAILED]):
                    self.failure_elsewhere = failure.parse(store.get(_FAILED).decode())
                    break
                store.add(f"stoker/beat/{self._me}", 1)
                self._pulse = time.monotonic()
                if self._me == 0:
                    with self._lock:
                        self._look_at_the_others()
                else:
                    self._follow(store, told)
        except Exception:
            self._gone(0)
        self._end_here()

    def _listen_to_pulse(self) -> None:
        """A machine that has lost power answers nothing, and a question to it waits for ever."""
        while not self._left.wait(1.0):
            if time.monotonic() - self._pulse > self._job.silence:
                self._gone(0)
                self._end_here()
                return

    def _gone(self, machine: int) -> None:
        where = f" ({self._job.address})" if machine == 0 else ""
        text = f"machine {machine}{where} is gone: its launch was ended, it is down, or the network is"
        self.failure_elsewhere = self.failure_elsewhere or failure.Failure(None, "", 0.0, 1, text)

    def _end_here(self) -> None:
        if self.failure_elsewhere is None or self._left.is_set():
            return
        if self._round.number == 0:  # the agent listens to signals only once it has ranks
            self._refused = self.failure_elsewhere.text
        else:
            os.kill(os.getpid(), signal.SIGTERM)


def _kill_ranks() -> None:
    """The ranks are this process's children; their forwarders are not, and still have last words to pass on."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"stoker.launch.run" in (path.parent / "cmdline").read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)


def _listed(numbers: set[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def _short(error: Exception) -> str:
    return str(error).splitlines()[0][:120] if str(error) else type(error).__name__
