"""SIGKILL at random moments of a small training run, then the same command again until it ends.

The moment is before the N-th write, sync or rename of a checkpoint, a random fraction of a second after one has begun, or any
time between start and end of the run. After each kill the newest published checkpoint must exist and be complete, and the run
that finally ends must produce the same bytes as one that was not killed.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attack import sandbox
from attack.case import chance_of
from attack.command_lines import GOOD_FILES, flat, good_training
from attack.rank_kills import attack_healing, attack_ranks

__all__ = ["attack", "fresh", "weights_of"]

Fork = Callable[[Callable[[], int], float], "int | None"]
_LONGEST = 240.0
"""Seconds for a whole training run. This only ends runs that hang; no test depends on the time."""
_TASKS = {
    "qa": ["--gradient_accumulation_steps", "2", "--eval_strategy", "steps", "--eval_steps", "3"],
    "classify": ["--group_by_length", "True", "--metric_for_best_model", "accuracy", "--eval_strategy", "steps",
                 "--eval_steps", "2", "--load_best_model_at_end", "True"],
    "embed": ["--loss", "CachedMultipleNegativesRankingLoss", "--mini_batch_size", "2"],
    "fewshot": ["--sampling_strategy", "unique", "--examples_per_class", "4"],
    "mlm": ["--masking", "words", "--mlm_probability", "0.3", "--gradient_accumulation_steps", "2"],
}  # fmt: skip


@dataclass(frozen=True)
class Undisturbed:
    weights: str
    seconds: float
    calls: int


_undisturbed: dict[str, Undisturbed] = {}


def attack(request: dict[str, Any], fork: Fork, work: Path) -> dict[str, Any]:
    """One run and its kills: the failures found, and the number of kills."""
    r = chance_of(request["seed"], request["kind"], request["number"])
    folder = work / "kill"
    if request["kind"] == "rankkill":
        return attack_ranks(r, folder, work, _argv("qa"))
    if request["kind"] == "healkill":
        return attack_healing(r, folder, work, _argv("qa"))
    task = r.choice(list(_TASKS))
    if task not in _undisturbed:
        _undisturbed[task] = _leave_alone(task, fork, folder, work)
    plain = _undisturbed[task]
    fresh(folder, work)
    story: list[str] = []
    failures: list[str] = []
    kills = 0
    for moment in [_draw(r, plain) for _ in range(r.choice((1, 1, 2, 3)))]:
        code = fork(lambda moment=moment: _train(task, folder, moment), _LONGEST)  # type: ignore[misc]
        kills += code == -signal.SIGKILL
        story.append(f"{moment}: {code}")
        failures += _judge(code, folder, (0, -signal.SIGKILL)) + _checkpoints(fork, folder)
        if code == 0:  # it was over before the moment; a complete run is not repeated
            break
    if code != 0:
        code = fork(lambda: _train(task, folder, None), _LONGEST)
        story.append(f"to the end: {code}")
        failures += _judge(code, folder, (0,)) + _checkpoints(fork, folder)
    if code == 0 and weights_of(folder) != plain.weights:
        failures.append(f"different: the model of {task} is another than without kills")
    failures += [f"leftover: {name}" for name in _left(folder)]
    answer: dict[str, Any] = {"failures": failures, "kills": kills, "code": code, "story": story}
    if failures:
        answer["error"] = (folder / "error").read_text(errors="replace")[-3000:]
    return answer


def _draw(r: random.Random, plain: Undisturbed) -> tuple[str, float, float]:
    kind = r.choice(("before", "before", "inside", "inside", "time"))
    if kind == "time":
        return kind, r.uniform(0, plain.seconds), 0.0
    return kind, r.randrange(plain.calls), r.choice((0.0, r.uniform(0, 0.001), r.uniform(0, 0.02)))


def fresh(folder: Path, work: Path) -> None:
    """A folder to train in that contains only the inputs."""
    folder.mkdir(exist_ok=True)
    sandbox.clear(folder)
    for name in ("cwd", "home", "cache", "tmp"):
        (folder / name).mkdir()
    for name in ("model", *GOOD_FILES):
        (folder / "cwd" / name).symlink_to(work / "base" / name)


def _argv(task: str) -> list[str]:
    options = [option for option in good_training(task) if option[0] != "--max_steps"]
    return ["train", task, *flat(options), *_TASKS[task], "--max_steps", "8", "--save_steps", "2",
            "--save_total_limit", "2", "--learning_rate", "1e-3"]  # fmt: skip


def _leave_alone(task: str, fork: Fork, folder: Path, work: Path) -> Undisturbed:
    fresh(folder, work)
    begin = time.monotonic()
    code = fork(lambda: _train(task, folder, None), _LONGEST)
    seconds = time.monotonic() - begin
    if code != 0:
        raise RuntimeError(f"the training without kills ended with {code}: {(folder / 'error').read_text()[-2000:]}")
    return Undisturbed(weights_of(folder), seconds, int((folder / "calls").read_text()))


def weights_of(folder: Path) -> str:
    """A hash of the model; that of `fewshot` has a second file, its classifier."""
    files = sorted((folder / "cwd" / "out").glob("*.safetensors"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _train(task: str, folder: Path, moment: tuple[str, float, float] | None) -> int:
    """`stoker train` in this fork, which is killed at the given moment."""
    import tempfile

    for name in ("HOME", "XDG_CACHE_HOME", "TMPDIR"):
        os.environ[name] = str(folder / {"HOME": "home", "XDG_CACHE_HOME": "cache", "TMPDIR": "tmp"}[name])
    tempfile.tempdir = None
    os.chdir(folder / "cwd")
    for number, name in ((1, "output"), (2, "error")):
        os.dup2(os.open(folder / name, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    argv = _argv(task)
    sys.argv = ["stoker", *argv]
    import stoker.tasks.training_run
    from stoker.cli import main

    stoker.tasks.training_run.machine_rates = lambda log_line: None  # type: ignore[assignment,return-value]
    calls = _Calls(moment)
    _remember_published(folder)
    code = main(argv)
    (folder / "calls").write_text(str(calls.count))
    return code


class _Calls:
    """Counts the calls that write checkpoints to disk, and kills this process at the drawn one."""

    def __init__(self, moment: tuple[str, float, float] | None) -> None:
        import safetensors.torch
        import torch

        self.count, self.moment = 0, moment
        if moment is not None and moment[0] == "time":
            threading.Timer(moment[1], _die).start()
        for holder, names in ((os, ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir")), (torch, ("save",)),
                              (safetensors.torch, ("save_file",))):  # fmt: skip
            for name in names:
                setattr(holder, name, self._counted(getattr(holder, name)))

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            if self.moment is not None and self.moment[0] != "time" and self.count == self.moment[1]:
                if self.moment[0] == "inside":
                    threading.Timer(self.moment[2], _die).start()
                else:
                    _die()
            self.count += 1
            return function(*args, **named)

        return call


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _remember_published(folder: Path) -> None:
    """Records each checkpoint once `publish` has returned: from then on it must not be lost."""
    from stoker.hf.checkpointing import folders

    original = folders.publish

    def publish(written: Path, target: Path, *rest: Any, **named: Any) -> None:
        original(written, target, *rest, **named)
        with open(folder / "published", "a", encoding="utf-8") as file:
            file.write(f"{target.name}\n")

    folders.publish = publish


def _judge(code: int | None, folder: Path, allowed: tuple[int, ...]) -> list[str]:
    if code is None:
        return ["hang: a training did not end"]
    found = [] if code in allowed else [f"code: a training ended with {code}"]
    if "Traceback" in (folder / "error").read_text(errors="replace"):
        found.append("traceback: in a training")
    return found


def _checkpoints(fork: Fork, folder: Path) -> list[str]:
    """What is wrong with the checkpoints after a kill, read as the next start reads them."""
    target = folder / "seen.json"

    def look() -> int:
        from stoker.hf.checkpointing import folders

        copy = folder / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        out = folder / "cwd" / "out"
        if out.is_dir():
            shutil.copytree(out, copy)
        else:
            copy.mkdir()
        folders.tidy(copy)
        broken = {path.name: folders.why_unusable(path) for path in folders.all_checkpoints(copy)}
        last = folders.last_good(copy)
        facts = {
            "last": folders.step_of(last) if last else 0,
            "broken": {name: why for name, why in broken.items() if why},
        }
        target.write_text(json.dumps(facts))
        shutil.rmtree(copy)
        return 0

    target.unlink(missing_ok=True)
    if fork(look, _LONGEST) != 0 or not target.exists():
        return ["lost: the checkpoints cannot be looked at"]
    seen = json.loads(target.read_text())
    target.unlink()
    found = [f"lost: {name} {why}" for name, why in seen["broken"].items()]
    names = (folder / "published").read_text().split() if (folder / "published").exists() else []
    newest = max((int(name.rpartition("-")[2]) for name in names), default=0)
    if seen["last"] < newest:
        found.append(f"lost: checkpoint-{newest} had been published, the newest one now is {seen['last']}")
    return found


def _left(folder: Path) -> list[str]:
    names = sandbox.listing(folder)
    ends = (".partial", ".replaced", ".deleting", ".tmp")
    return [name for name in names if name.startswith("tmp/") or name.endswith(ends)]
