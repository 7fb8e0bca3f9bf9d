"""Unusual environments: unwritable outputs, no home directory, full or read-only disks, limits, locales, directories."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from attack import sandbox
from attack.case import Case
from attack.command_lines import GOOD_FILES, flat, good_training

__all__ = ["COMMANDS", "ENVIRONMENTS", "odd_environment"]

_FOLDERS = ("cwd", "home", "cache", "tmp")


@dataclass(frozen=True)
class Environment:
    prepare: Callable[[], None] | None = None
    before: Callable[[str], None] | None = None
    after: Callable[[str], None] | None = None
    variables: dict[str, str | None] = field(default_factory=dict)
    process: bool = False
    open_output: bool = True
    trains: bool = False
    """Whether training must succeed in this environment; otherwise an error message is expected."""
    codes: tuple[int, ...] = (0, 1, 2)


def _replaced(*numbers: int) -> Callable[[], None]:
    """Replaces file descriptors by /dev/full."""

    def prepare() -> None:
        full = os.open("/dev/full", os.O_WRONLY)
        for number in numbers:
            os.dup2(full, number)
        os.close(full)

    return prepare


def _closed(*numbers: int) -> Callable[[], None]:
    def prepare() -> None:
        for number in numbers:
            os.close(number)

    return prepare


def _reader_gone(*numbers: int) -> Callable[[], None]:
    def prepare() -> None:
        reader, writer = os.pipe()
        for number in numbers:
            os.dup2(writer, number)
        os.close(reader)
        os.close(writer)

    return prepare


def _limit(kind: int, value: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(kind, (value, value))


def _as_nobody(processes: int | None = None) -> Callable[[], None]:
    """Becomes another user, because file modes and limits do not apply to root."""

    def prepare() -> None:
        if processes is not None:
            resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
        if os.geteuid() == 0 and sandbox.python_is_for_all():
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)

    return prepare


def _read_only() -> None:
    """Remounts directories read-only, in this child process only."""
    with contextlib.suppress(OSError):
        sandbox.own_mounts()
        for name in _FOLDERS:
            folder = os.path.abspath(f"../{name}")
            sandbox.mount(folder, folder, "", sandbox.BIND)
            sandbox.mount("none", folder, "", sandbox.REMOUNT | sandbox.BIND | sandbox.RDONLY)
        os.chdir("../cwd")  # the current directory is still the one below the mount, which is not read-only
        return
    for name in _FOLDERS:
        os.chmod(f"../{name}", 0o555)


def _hidden(folder: str) -> Callable[[], None]:
    def prepare() -> None:
        with contextlib.suppress(OSError):
            sandbox.own_mounts()
            sandbox.mount("tmpfs", folder, "tmpfs", sandbox.RDONLY, "size=4k")

    return prepare


def _nearly_full(room: int) -> Callable[[str], None]:
    def before(folder: str) -> None:
        with contextlib.suppress(OSError):
            sandbox.mount("tmpfs", f"{folder}/cwd", "tmpfs", 0, f"size={room}k")

    return before


def _not_utf8() -> None:
    folder = b"d\xff\xfe"
    os.mkdir(folder)
    for name in os.listdir(b"."):
        if name != folder:
            os.symlink(b"../" + name, folder + b"/" + name)
    os.chdir(folder)


def _deleted() -> None:
    folder = tempfile.mkdtemp(dir=".")
    os.chdir(folder)
    os.rmdir(f"../{folder}")


_NO_HOME: dict[str, str | None] = {"HOME": None, "XDG_CACHE_HOME": None}
_NOTHING: dict[str, str | None] = dict.fromkeys(
    ("HOME", "XDG_CACHE_HOME", "TMPDIR", "PATH", "LANG", "TERM", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
)

ENVIRONMENTS: dict[str, Environment] = {
    "stdout closed": Environment(_closed(1), trains=True),
    "stderr closed": Environment(_closed(2), open_output=False, trains=True),
    "stdin closed": Environment(_closed(0), trains=True),
    "all closed": Environment(_closed(0, 1, 2), open_output=False, trains=True),
    "stdout full": Environment(_replaced(1), trains=True),
    "stderr full": Environment(_replaced(2), open_output=False, trains=True),
    "both outputs full": Environment(_replaced(1, 2), open_output=False, trains=True),
    "stdout not read": Environment(_reader_gone(1), trains=True, codes=(0, 1, 2, 141)),
    "stderr not read": Environment(_reader_gone(2), open_output=False, trains=True, codes=(0, 1, 2, 141)),
    "no output read": Environment(_reader_gone(1, 2), open_output=False, trains=True, codes=(0, 1, 2, 141)),
    "no HOME": Environment(variables=_NO_HOME, trains=True),
    "HOME nowhere": Environment(variables={"HOME": "/nonexistent", "XDG_CACHE_HOME": None}, trains=True),
    "HOME a file": Environment(variables={"HOME": "/etc/passwd", "XDG_CACHE_HOME": None}, trains=True),
    "HOME empty": Environment(variables={"HOME": "", "XDG_CACHE_HOME": ""}, trains=True),
    "TMPDIR nowhere": Environment(variables={"TMPDIR": "/nonexistent"}, trains=True),
    "no variables": Environment(variables=_NOTHING, trains=True),
    "read-only disk": Environment(_read_only),
    "disk full": Environment(before=_nearly_full(48), after=lambda folder: sandbox.unmount(f"{folder}/cwd")),
    "disk full soon": Environment(before=_nearly_full(200), after=lambda folder: sandbox.unmount(f"{folder}/cwd")),
    "file size 0": Environment(_limit(resource.RLIMIT_FSIZE, 0), open_output=False),
    "file size 4 KB": Environment(_limit(resource.RLIMIT_FSIZE, 4096)),
    "file size 40 KB": Environment(_limit(resource.RLIMIT_FSIZE, 40_960)),
    "12 open files": Environment(_limit(resource.RLIMIT_NOFILE, 12)),
    "24 open files": Environment(_limit(resource.RLIMIT_NOFILE, 24)),
    "another user": Environment(_as_nobody()),
    "no process more": Environment(_as_nobody(0)),
    "20 MB more": Environment(lambda: sandbox.limit_memory(20 << 20)),
    "200 MB more": Environment(lambda: sandbox.limit_memory(200 << 20)),
    "umask 777": Environment(lambda: os.umask(0o777) and None),
    "no /dev/shm": Environment(_hidden("/dev/shm"), trains=True),
    "no /sys": Environment(_hidden("/sys"), trains=True),
    "directory not UTF-8": Environment(_not_utf8, trains=True),
    "directory deleted": Environment(_deleted),
    "locale C": Environment(variables={"LC_ALL": "C", "LANG": "C"}, process=True),
    "locale C, UTF-8 off": Environment(
        variables={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, process=True
    ),
    "locale unknown": Environment(variables={"LC_ALL": "xx_XX.nonsense"}, process=True),
    "output in ASCII": Environment(variables={"PYTHONIOENCODING": "ascii"}, process=True),
    "output in Latin 1": Environment(variables={"PYTHONIOENCODING": "latin-1:strict"}, process=True),
    "new process, stdout closed": Environment(_closed(1), process=True),
    "new process, stderr closed": Environment(_closed(2), process=True, open_output=False),
    "new process, all closed": Environment(_closed(0, 1, 2), process=True, open_output=False),
    "new process, stdout full": Environment(_replaced(1), process=True),
    "new process, both full": Environment(_replaced(1, 2), process=True, open_output=False),
    "new process, not read": Environment(_reader_gone(1, 2), process=True, open_output=False, codes=(0, 1, 2, 141)),
    "new process, no variables": Environment(variables=_NOTHING, process=True),
    "new process, directory deleted": Environment(_deleted, process=True),
    "new process, 8 open files": Environment(_limit(resource.RLIMIT_NOFILE, 8), process=True),
}

# The folder of a run from another machine; its log has everything that the page shows.
_LOG = (
    b'{"kind": "start", "time": 1, "command": "stoker train qa", "machine": {"cpu": "x", "cores": 2, "threads": 2}}\n'
    b'{"kind": "step", "step": 1, "loss": 2.5, "tokens_per_second": 10.0}\n{"kind": "step", "step": 2, "loss": 2.0}\n'
    b'{"kind": "evaluation", "step": 2, "eval_f1": 10.0}\n{"kind": "end", "reason": "finished"}\n'
)

COMMANDS: dict[str, list[str]] = {
    "help": ["--help"],
    "mistake": ["lunch", "\u2603"],
    "doctor": ["doctor", "--no-rates"],
    "doctor as JSON": ["doctor", "--no-rates", "--json"],
    "config": ["config", "--yes", "--config_file", "new.yaml"],
    "config by default": ["config", "--yes"],
    "config show": ["config", "show", "c.yaml"],
    "config migrate": ["config", "migrate", "c.yaml"],
    "launch": ["launch", "--dry-run", "-n", "2", "s.py"],
    "launch one": ["launch", "s.py"],
    "emit": ["launch", "--emit", "slurm", "-n", "4", "s.py"],
    "hostfile": ["launch", "-f", "hosts", "--dry-run", "s.py"],
    "env": ["env"],
    "report": ["report", "."],
    "plan": ["plan", "--step", "1", "--parameters", "1e6", "--nodes", "1..4"],
    "ask": ["ask", "--model", "model", "--text", "Ada wrote it.", "--question", "Who?"],
    "train qa": ["train", "qa", *flat(good_training("qa"))],
    "train classify": ["train", "classify", *flat(good_training("classify"))],
    "train mlm": ["train", "mlm", *flat(good_training("mlm"))],
    "train embed": ["train", "embed", *flat(good_training("embed"))],
}
_LIGHT = tuple(name for name, argv in COMMANDS.items() if argv[0] not in ("train", "ask", "plan", "report"))
"""Command lines that run without importing torch."""


def odd_environment(r: random.Random, base: Path) -> Case:
    name = r.choice(list(ENVIRONMENTS))
    where = ENVIRONMENTS[name]
    command = r.choice(_LIGHT if where.process else list(COMMANDS))
    return case_of(name, command, base)


def case_of(name: str, command: str, base: Path) -> Case:
    where, argv = ENVIRONMENTS[name], COMMANDS[command]
    links = {file: str(base / file) for file in ("model", *GOOD_FILES)}
    files = {"c.yaml": b"num_processes: 2\ndistributed_type: MULTI_CPU\nipex_config: {ipex: true}\n", "s.py": b"",
             "hosts": b"localhost slots=2\n", "run.jsonl": _LOG}  # fmt: skip
    return Case(
        argv, files, links, variables=where.variables, prepare=where.prepare, before=where.before, after=where.after,
        process=where.process, open_output=where.open_output, writes=("*",),
        codes=(0,) if where.trains and argv[0] == "train" else where.codes,
    )  # fmt: skip
