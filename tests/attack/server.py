"""Runs each case in a fork of this process, which has imported everything and computed nothing.

`python server.py WORK` reads one request per line, `{"seed": 1, "kind": "hostfile", "number": 17}`, and answers each with a line
`RESULT {...}`. A fork costs a hundredth of a process that imports torch. It only works while this process has not started
OpenMP's threads, so its own computations run in forks, too.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from attack import sandbox  # noqa: E402

if __name__ == "__main__":
    WORK = Path(sys.argv[1]).resolve()
    try:
        ISOLATED = sandbox.isolate(WORK)
    except sandbox.Unsafe as reason:
        print("READY", json.dumps({"refused": str(reason)}))
        sys.exit(0)

import atexit  # noqa: E402
import contextlib  # noqa: E402
import select  # noqa: E402
import signal  # noqa: E402
import threading  # noqa: E402
import time  # noqa: E402
import traceback  # noqa: E402
from collections.abc import Callable  # noqa: E402
from typing import Any, NoReturn  # noqa: E402

from attack.case import SECONDS, Case, Outcome, chance_of, failures  # noqa: E402

MEMORY = 4 << 30
_PARTIAL = (".partial", ".tmp", ".replaced", ".deleting")


def main() -> None:
    begin = time.monotonic()
    for name in ("base", "case"):
        (WORK / name).mkdir()
    os.environ["TMPDIR"] = os.environ["MPLCONFIGDIR"] = str(WORK)
    _import_everything()
    if fork(_make_base, seconds=300) != 0:
        raise RuntimeError("the inputs that the cases start from could not be made")
    from attack import kills
    from attack.kinds import KINDS
    from attack.planted import planted

    facts = {"isolated": ISOLATED, "seconds": round(time.monotonic() - begin, 1)}
    print("READY", json.dumps(facts), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if request["kind"].endswith("kill"):
            answer = kills.attack(request, fork, WORK)
        elif request["kind"] == "planted":
            answer = _answer(planted(request["number"]), request)
        else:
            r = chance_of(request["seed"], request["kind"], request["number"])
            answer = _answer(KINDS[request["kind"]].make(r, WORK / "base"), request)
        print("RESULT", json.dumps({**request, **answer}), flush=True)


def _answer(case: Case, request: dict[str, Any]) -> dict[str, Any]:
    """The outcome of a case; with all details if it failed, or if they were requested."""
    outcome = run(case)
    if outcome.code is None:
        outcome = run(case, 3 * SECONDS)  # it may have been slow only because the machine was busy
    answer = {"failures": failures(case, outcome), "code": outcome.code, "seconds": round(outcome.seconds, 2)}
    if answer["failures"] or request.get("verbose"):
        answer |= {"argv": case.argv, "output": outcome.output[-6000:], "error": outcome.error[-6000:]}
        answer["files"] = {name: repr(data[:1500]) for name, data in case.files.items() if data}
        answer["variables"], answer["stdin"] = case.variables, repr(case.stdin[:500])
    return answer


def _import_everything() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["OMP_WAIT_POLICY"] = "passive"
    os.environ["PATH"] = os.pathsep.join([str(WORK / "base" / "bin"), os.environ.get("PATH", os.defpath)])
    import importlib

    import torch

    torch.set_num_threads(1)
    names = ["transformers.models.bert.modeling_bert", "transformers.models.bert.tokenization_bert", "matplotlib.pyplot",
             "stoker.tasks.qa.fine_tune", "stoker.tasks.qa.question_answerer", "stoker.tasks.classify.fine_tune",
             "stoker.tasks.ner.fine_tune", "stoker.tasks.mlm.masked_trainer", "stoker.tasks.mlm.fine_tune", "seqeval.metrics",
             "stoker.tasks.embed.fine_tune", "stoker.tasks.rerank.fine_tune", "stoker.tasks.sentences.st_trainers",
             "stoker.tasks.fewshot.fine_tune", "stoker.tasks.fewshot.fewshot_trainer", "setfit",
             "stoker.tasks.demo.demo_run", "stoker.tasks.demo.sft_demo", "stoker.run_report.page", "stoker.launch.start",
             "stoker.plan.link_rates", "peft", "stoker.tasks.sft.fine_tune", "stoker.tasks.sft.chat_session", "gguf",
             "stoker.tasks.export.export_run", "stoker.tasks.export.decoders", "stoker.tasks.export.encoders", "jinja2.sandbox",
             "transformers.models.llama.modeling_llama",
             "stoker.plan.draw", "pyarrow.parquet", "transformers.integrations", "stoker.tasks.card", "torch.utils.data",
             "torch._dynamo", "encodings.utf_8_sig", "encodings.utf_16", "encodings.utf_32", "encodings.latin_1",
             "encodings.idna"]  # fmt: skip
    from stoker.cli.commands import COMMANDS

    for name in [*names, *(command.module for command in COMMANDS)]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _make_base() -> int:
    from attack.base import make_base
    from attack.finished_folders import make_finished
    from attack.kinds import stand_in

    make_base(WORK / "base")
    stand_in()
    make_finished(WORK / "base")
    return 0


def run(case: Case, seconds: float = SECONDS) -> Outcome:
    """Runs one case in its own folder, and finds everything it leaves behind."""
    folder = WORK / "case"
    sandbox.clear(folder)
    for name in ("cwd", "home", "cache", "tmp"):
        (folder / name).mkdir()
    if case.before is not None:
        case.before(str(folder))
    for name, content in case.files.items():
        (folder / "cwd" / name).write_bytes(content)
    for name, target in case.links.items():
        (folder / "cwd" / name).symlink_to(target)
    (folder / "stdin").write_bytes(case.stdin)
    before, shared = sandbox.listing(folder), set(os.listdir("/dev/shm"))
    begin = time.monotonic()
    work = _process if case.process else _call
    code = fork(lambda: work(case, folder), seconds)
    outcome = Outcome(code, seconds=time.monotonic() - begin)
    outcome.left = _processes_left()
    with contextlib.suppress(OSError):
        outcome.output = (folder / "output").read_text(encoding="utf-8", errors="replace")
        outcome.error = (folder / "error").read_text(encoding="utf-8", errors="replace")
    outcome.left += _files_left(case, before, sandbox.listing(folder))
    if ISOLATED:
        new = set(os.listdir("/dev/shm")) - shared
        outcome.left += [f"/dev/shm/{name}" for name in sorted(new)]
        for name in new:
            with contextlib.suppress(OSError):
                os.unlink(f"/dev/shm/{name}")
    if case.after is not None:
        case.after(str(folder))
    return outcome


def fork(work: Callable[[], int], seconds: float) -> int | None:
    """The exit code of `work` in a fork. If it takes too long, None, and all its processes are killed."""
    child = os.fork()
    if child == 0:
        _leave(work)
    handle = os.pidfd_open(child)
    ready, _, _ = select.select([handle], [], [], seconds)
    os.close(handle)
    if not ready:
        with contextlib.suppress(OSError):
            os.killpg(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    return os.waitstatus_to_exitcode(status) if ready else None


def _leave(work: Callable[[], int]) -> NoReturn:
    """Exits as Python does, but without clearing the modules, which takes longer than most cases."""
    code = 1
    try:
        os.setsid()
        code = work()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except BaseException:
        with contextlib.suppress(BaseException):
            traceback.print_exc()
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            code = 120  # Python's own
    os._exit(code)


def _variables(case: Case, folder: Path) -> dict[str, str]:
    kept = (
        "PATH",
        "PYTHONPATH",
        "LD_LIBRARY_PATH",
        "STOKER_NATIVE_DIR",
        "OMP_WAIT_POLICY",
        "HF_HUB_OFFLINE",
        "VIRTUAL_ENV",
        "MPLCONFIGDIR",
    )
    found = {name: os.environ[name] for name in kept if name in os.environ}
    found |= {"HOME": str(folder / "home"), "XDG_CACHE_HOME": str(folder / "cache"), "TMPDIR": str(folder / "tmp"),
              "LANG": "C.UTF-8", "TERM": "dumb"}  # fmt: skip
    for name, value in case.variables.items():
        if value is None:
            found.pop(name, None)
        else:
            found[name] = value
    return found


def _enter(case: Case, folder: Path) -> None:
    """Sets the working directory, the file descriptors and the limits."""
    os.chdir(folder / "cwd")
    flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND
    for number, opened in enumerate((
        os.open(folder / "stdin", os.O_RDONLY), os.open(folder / "output", flags), os.open(folder / "error", flags),
    )):  # fmt: skip
        os.dup2(opened, number)
        os.close(opened)
    if case.prepare is not None:
        case.prepare()


def _call(case: Case, folder: Path) -> int:
    import tempfile

    variables = _variables(case, folder)
    os.environ.clear()
    os.environ.update(variables)
    tempfile.tempdir = None
    sandbox.limit_memory(MEMORY)
    _enter(case, folder)
    sys.stdin = _stream(0, "r", "strict")
    sys.stdout = _stream(1, "w", "strict")
    sys.stderr = _stream(2, "w", "backslashreplace")
    sys.argv = ["stoker", *case.argv]
    from attack.kinds import stand_in
    from stoker.cli import main as stoker

    stand_in()
    return stoker(case.argv)


def _stream(number: int, mode: str, errors: str) -> Any:
    try:
        os.fstat(number)
    except OSError:
        return None  # what Python sets for a closed stream
    return open(number, mode, encoding="utf-8", errors=errors, buffering=1, closefd=False)


def _process(case: Case, folder: Path) -> int:
    """Replaces this fork by a new Python process."""
    words = [sys.executable, "-m", "stoker", *case.argv]
    variables = _variables(case, folder)
    _enter(case, folder)
    try:
        os.execve(words[0], [os.fsencode(word) for word in words], variables)
    except OSError as error:
        print(f"not started: {error}", file=sys.stderr)
        return 2


def _processes_left() -> list[str]:
    """The processes that remain after a moment: Python's own helpers exit once their process has."""
    end = time.monotonic() + 3
    while sandbox.children() and time.monotonic() < end:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        time.sleep(0.01)
    found = []
    for number, name in sandbox.children():
        with contextlib.suppress(OSError):
            os.kill(number, signal.SIGKILL)
            os.waitpid(number, 0)
            found.append(f"process {name}")
    return found


def _files_left(case: Case, before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> list[str]:
    found = []
    for name, facts in after.items():
        top, _, rest = name.partition("/")
        inner = rest.split("/")[0]
        if before.get(name) == facts or name in ("output", "error", "stdin"):
            continue
        if name.endswith(_PARTIAL) or top == "tmp":
            found.append(name)
        elif top == "cwd" and rest in case.files:
            found.append(f"{name} was changed")
        elif top == "cwd" and not {inner, "*"} & set(case.writes):
            found.append(name)
        if name.endswith("/pwned"):
            found.append(f"{name}: something was executed")
    found += [f"{name} was deleted" for name in before if name not in after]
    return found


if __name__ == "__main__":
    main()
