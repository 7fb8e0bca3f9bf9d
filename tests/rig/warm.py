"""Starts Python processes fast, by forking one that has already imported torch, which takes seconds of CPU time.

`run` and `Popen` behave like those of subprocess, except that `python script.py`, `python -c` and `python -m` are forked from a
server, which each test process starts when it is first needed. The new process is a child of the caller (it can be waited for,
killed, timed out), with the requested arguments, environment, directory, streams, session and CPUs; `ps` shows its command line,
and /proc its environment. Modules of Stoker are never imported in advance. torch appears not to be imported yet; when a program
imports it, the number of threads and the log level are read from the environment at that moment.

What a fork cannot do is started as usual: other programs, other options of Python, a `preexec_fn`, LD_PRELOAD. A test of the
start itself (what is imported, what a library reads when it is loaded) uses subprocess.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import gc
import importlib
import importlib.abc
import importlib.machinery
import io
import json
import os
import platform
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

__all__ = ["Popen", "run"]

TORCH = ("torch", "torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.run", "torch.distributed.fsdp",
         "torch.distributed.tensor", "torch.export", "torch.utils.checkpoint")  # fmt: skip
OTHERS = ("bitsandbytes", "pandas", "pyarrow.parquet", "scipy.optimize", "sklearn.metrics", "safetensors.torch")
"""What transformers imports. transformers itself is left out, because `stoker launch` hooks into its import."""
TRANSFORMERS = ("transformers.trainer", "transformers.models.bert.modeling_bert", "peft")

FOR_SERVERS = {
    "OMP_WAIT_POLICY": "passive",  # tests share their cores
    "OPENBLAS_NUM_THREADS": "1",  # its threads would not survive a fork
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # done when a program imports torch
    "TORCH_WARM_POOL": "0",  # the compiler's processes would not survive a fork
}

_READ_AT_LOAD = (
    "ATEN_",
    "DNNL_",
    "GOMP_",
    "KMP_",
    "LANG",
    "LC_",
    "MALLOC_",
    "MKL_",
    "OMP_",
    "ONEDNN_",
    "PYTHON",
    "TORCH_",
)
"""Each combination of these variables gets its own server: Python and libraries read them when they are loaded."""
_READ_BY_TRANSFORMERS = ("ACCELERATE_", "HF_", "TRANSFORMERS_")
_HARMLESS = (
    "OMP_NUM_THREADS",  # applied when a program imports torch, as is the next
    "TORCH_CPP_LOG_LEVEL",
    "OMP_WAIT_POLICY",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)
_OF_PYTHON = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED", "PYTHONWARNINGS")
"""Python's variables that a server can be started with; others change its streams or its behaviour."""
_ROOM = 1 << 16
"""Bytes reserved for the command line, and for the environment, that /proc shows."""


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """subprocess.Popen by a fork. `transformers`: from a server that has imported transformers as well."""

    def __init__(self, args: Any, *rest: Any, transformers: bool = False, **options: Any) -> None:
        self._modules = TRANSFORMERS if transformers else ()
        super().__init__(args, *rest, **options)

    def _execute_child(self, *settings: Any) -> None:
        if not _fork_instead(self, settings, lambda variables: _server(self._modules, variables)):
            super()._execute_child(*settings)  # type: ignore[misc]


def run(*args: Any, **options: Any) -> subprocess.CompletedProcess[Any]:
    """subprocess.run by a fork."""
    done: subprocess.CompletedProcess[Any] = _run(*args, **options)
    return done


_run = types.FunctionType(subprocess.run.__code__, {**vars(subprocess), "Popen": Popen})
_run.__kwdefaults__ = subprocess.run.__kwdefaults__


class Server:
    """The caller's side of a server: the socket that requests are sent on."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def fork(self, request: dict[str, Any], streams: Sequence[int]) -> int:
        """The process id of a new child of the calling process."""
        data = json.dumps(request).encode()
        socket.send_fds(self._connection, [len(data).to_bytes(8, "little")], list(streams))
        self._connection.sendall(data)
        return int.from_bytes(_receive(self._connection, 8), "little")


_servers: dict[tuple[Any, ...], Server] = {}


def _server(modules: tuple[str, ...], variables: Mapping[str, str]) -> Server:
    at_load = _read_at_load(variables, modules)
    key = (os.getpid(), modules, *sorted(at_load.items()))
    if key not in _servers:
        ours, theirs = socket.socketpair()
        code = "import sys; sys.path.insert(0, sys.argv[1]); from rig import warm; warm.serve()"
        words = [sys.executable, "-c", code, os.path.dirname(os.path.dirname(os.path.abspath(__file__))), *modules]
        kept = {k: v for k, v in os.environ.items() if not k.startswith((*_READ_AT_LOAD, *_READ_BY_TRANSFORMERS))}
        fixed = {**FOR_SERVERS, "STOKER_TEST_ROOM": "x" * _ROOM}
        subprocess.Popen([*words, "x" * _ROOM], env=kept | at_load | fixed, stdin=theirs, start_new_session=True)
        theirs.close()
        _servers[key] = Server(ours)
    return _servers[key]


def _read_at_load(variables: Mapping[str, str], modules: tuple[str, ...]) -> dict[str, str]:
    names = (*_READ_AT_LOAD, *_READ_BY_TRANSFORMERS) if modules else _READ_AT_LOAD
    return {k: v for k, v in variables.items() if k.startswith(names) and k not in _HARMLESS}


def _fork_instead(process: Any, settings: Sequence[Any], server: Any) -> bool:
    """In place of subprocess.Popen's `_execute_child`: starts the command if a fork can; returns whether it did."""
    args, executable, before, _, passed, directory, variables, _, _, shell, *pipes = settings[:16]
    signals, *user, mask, session = settings[16:22]
    variables = os.environ if variables is None else variables
    words = [os.fsdecode(word) for word in ([args] if isinstance(args, str) else args)]
    host, words = _host_of(words)
    plain = {os.fsdecode(k): os.fsdecode(v) for k, v in variables.items()}
    group = settings[22:] not in ((), (-1,))
    special = (shell, before, passed, *(who is not None for who in user), mask >= 0, not signals, group)
    if any(special) or executable not in (None, args[0]) or not _possible(words, plain):
        return False
    if directory is not None and not os.path.isdir(directory):
        return False
    request = _request(words, plain, os.path.abspath(os.fsdecode(directory or ".")), session=bool(session))
    request["host"] = host
    given = [wanted if wanted != -1 else own for own, wanted in enumerate((pipes[0], pipes[3], pipes[5]))]
    with contextlib.suppress(OSError):
        for descriptor in given:
            os.fstat(descriptor)  # a closed stream cannot be passed on
        found = server(plain)
        if found is None:
            return False
        process.pid = found.fork(request, given)
        process._child_created = True
        process._close_pipe_fds(*pipes)
        return True
    return False


def _host_of(words: list[str]) -> tuple[int, list[str]]:
    """The process whose namespaces an nsenter command of rig.Rig enters, or 0; and the command that it runs there."""
    if os.path.basename(words[0]) != "nsenter" or [word.partition("=")[0] for word in words[3:9]] != _NAMESPACES:
        return 0, words
    return int(words[2]), words[9:]


_NAMESPACES = ["--net", "--mount", "--uts", "--ipc", "--wd", "--"]


def _enter_namespaces(process: int) -> None:
    found = [os.open(f"/proc/{process}/ns/{name}", os.O_RDONLY) for name in ("net", "uts", "ipc", "mnt")]
    for descriptor in found:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(descriptor)


def _request(words: list[str], variables: dict[str, str], directory: str, *, session: bool = False) -> dict[str, Any]:
    cpus = sorted(os.sched_getaffinity(0))
    ignored = [int(number) for number in signal.Signals if signal.getsignal(number) is signal.SIG_IGN]  # by nohup, say
    return {
        "words": words, "variables": variables, "directory": directory, "session": session, "cpus": cpus,
        "ignored": ignored,
    }  # fmt: skip


def _possible(words: Sequence[str], variables: Mapping[str, str]) -> bool:
    """Whether a fork can run this command with this environment."""
    ours = sys.platform == "linux" and platform.machine() == "x86_64" and words[0] == sys.executable
    other = any(k.startswith(("LD_", "PYTHON")) and k not in _OF_PYTHON for k in variables)
    return ours and not other and _entry(words) is not None


def _entry(words: Sequence[str]) -> tuple[str, int] | None:
    """How Python is started (script, -c or -m) and the number of arguments that takes; None for other forms."""
    if len(words) > 2 and words[1] in ("-c", "-m"):
        return words[1], 3
    if len(words) > 1 and not words[1].startswith("-") and os.path.splitext(words[1])[1] == ".py":
        return "script", 2
    return None


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise ConnectionError("the server of warm processes has ended")
        data += piece
    return data


# The server, and what it forks.


def serve() -> None:
    """Imports, waits for requests, forks. Returns only in forked processes, after their program has ended."""
    for name in (*TORCH, *OTHERS, *sys.argv[2:-1]):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # Imports tabulate, if it is installed. An import at exit makes Python forget that it was interrupted.
    atexit.unregister(sys.modules["torch._dynamo.utils"].dump_compile_times)
    connection = socket.socket(fileno=os.dup(0))
    variables = dict(os.environ)
    ctypes.CDLL(None).clearenv()  # copies, so that the original memory can be used for what /proc shows
    for name, value in variables.items():
        os.putenv(name, value)
    _imported.update(sys.modules)
    sys.meta_path.insert(0, _Hidden())
    _rest_of_path.extend(sys.path[2:])
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_imported))
    gc.collect()
    gc.freeze()  # so that their pages stay shared
    _begin_and_run(_wait_for_request(connection))


_imported: dict[str, types.ModuleType] = {}


def _keep_imported() -> None:
    """Keeps Python from freeing modules that were imported in advance at exit, which copies shared pages (0.3 s)."""
    for name in _imported:
        if name.partition(".")[0] not in sys.stdlib_module_names:
            sys.modules.pop(name, None)


def _wait_for_request(connection: socket.socket) -> dict[str, Any]:
    """Forks a process for each request; returns in those processes, and ends with the caller."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while True:
        head, streams, _, _ = socket.recv_fds(connection, 8, 3)
        if not head:
            os._exit(0)
        request: dict[str, Any] = json.loads(_receive(connection, int.from_bytes(head, "little")))
        pid = _fork_sibling()
        if pid == 0:
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
            os.closerange(3, max(int(name) for name in os.listdir("/proc/self/fd")) + 1)
            connection.detach()
            return request
        connection.sendall(pid.to_bytes(8, "little"))
        for stream in streams:
            os.close(stream)


def _fork_sibling() -> int:
    """Like os.fork, but the new process is a child of this one's parent."""
    python, libc = ctypes.pythonapi, ctypes.PyDLL(None)
    libc.syscall.restype = libc.pthread_self.restype = ctypes.c_long
    parent, child_sets, child_clears, number = 0x8000, 0x1000000, 0x200000, 56  # linux/sched.h; x86-64's clone
    thread_id = libc.pthread_self() + 720  # where glibc stores the thread id, as its own fork does
    known = ctypes.c_int.from_address(thread_id).value == os.getpid()
    flags = parent | signal.SIGCHLD | ((child_sets | child_clears) if known else 0)
    python.PyOS_BeforeFork()
    pid = libc.syscall(number, ctypes.c_long(flags), None, None, ctypes.c_void_p(thread_id if known else None), None)
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError("a process could not be forked")
    return int(pid)


class _Hidden(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An import finder that hides the imported torch until a program imports it."""

    def __init__(self) -> None:
        self.modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "torch"}
        self.specs = {name: getattr(module, "__spec__", None) for name, module in self.modules.items()}
        self.cpus = os.sched_getaffinity(0)
        for name in self.modules:
            del sys.modules[name]

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        real = self.specs.get(name)
        if real is None:
            return None
        spec = importlib.machinery.ModuleSpec(name, self, origin=real.origin)
        spec.submodule_search_locations = real.submodule_search_locations
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return self.modules[spec.name]

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module)["__spec__"] = self.specs[module.__name__]
        if module.__name__ != "torch":
            return
        before = sys.meta_path[: sys.meta_path.index(self)]  # import hooks of a program for some of these modules
        for name, other in self.modules.items():
            if name != "torch" and any(finder.find_spec(name, None) for finder in before):
                importlib.import_module(name)
            else:
                sys.modules[name] = other
        sys.meta_path.remove(self)
        threads, cpus = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0], os.sched_getaffinity(0)
        if threads.isdigit() or cpus != self.cpus:
            module.set_num_threads(min(int(threads or len(cpus)), len(cpus)))
        module.seed()
        _set_log_level(os.environ.get("TORCH_CPP_LOG_LEVEL", ""))
        if module._is_device_backend_autoload_enabled():
            module._import_device_backends()


def _set_log_level(name: str) -> None:
    """Applies TORCH_CPP_LOG_LEVEL, which torch reads when it is loaded."""
    level = {"INFO": 0, "WARNING": 1, "ERROR": 2, "FATAL": 3}.get(name)
    if level is not None:
        library = sys.modules["torch"].__path__[0] + "/lib/libc10.so"
        ctypes.c_int.in_dll(ctypes.CDLL(library), "FLAGS_caffe2_log_level").value = level


class _Instead(BaseException):
    """Raised by the replaced os.execve for a Python program, which this process then runs."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request


def _begin_and_run(request: dict[str, Any]) -> None:
    if request.get("host"):
        _enter_namespaces(request["host"])
    while True:
        if "launch" in request["words"][:6]:
            request = _with_server_for_ranks(request)
        _begin(request)
        try:
            return _run_program(request["words"])
        except _Instead as other:
            request = other.request
            for name in [name for name in sys.modules if name.partition(".")[0] in ("stoker", "stoker_ccl")]:
                del sys.modules[name]
            atexit._clear()


def _with_server_for_ranks(request: dict[str, Any]) -> dict[str, Any]:
    """Forks a server for a launcher while the launcher has no threads. Returns again in each rank, with its request."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        _show_in_proc(["server of warm processes"], {})
        return _wait_for_request(theirs)
    theirs.close()
    at_load = _read_at_load(request["variables"], ())
    server, stock = Server(ours), subprocess.Popen._execute_child  # type: ignore[attr-defined]

    def start(process: Any, *settings: Any) -> None:
        fitting = lambda variables: server if _read_at_load(variables, ()) == at_load else None  # noqa: E731
        if not _fork_instead(process, settings, fitting):
            stock(process, *settings)

    subprocess.Popen._execute_child = start  # type: ignore[attr-defined]
    return request


def _begin(request: dict[str, Any]) -> None:
    atexit.register(_keep_imported)  # the first one here is called last
    if request["session"]:
        os.setsid()
    os.sched_setaffinity(0, request["cpus"])
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        python_ignores = number in (signal.SIGPIPE, signal.SIGXFSZ)
        signal.signal(number, signal.SIG_IGN if python_ignores or number in request["ignored"] else signal.SIG_DFL)
    if signal.SIGINT not in request["ignored"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["variables"])
    _show_in_proc(request["words"], request["variables"])
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        unbuffered = bool(number and os.environ.get("PYTHONUNBUFFERED"))
        raw = open(number, "wb" if number else "rb", buffering=0 if unbuffered else -1, closefd=False)  # noqa: SIM115
        stream = io.TextIOWrapper(
            raw,
            errors="backslashreplace" if number == 2 else "strict",
            line_buffering=(number == 2 or raw.isatty()) and not unbuffered,
            write_through=unbuffered,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.execve = _execve
    sys.modules["numpy"].random.seed()
    tempfile.tempdir = None  # may have been computed already


def _execve(path: str, words: list[str], variables: dict[str, str]) -> NoReturn:
    """Runs another Python program in this process; calls the real execve for anything else."""
    hidden = "torch" not in sys.modules
    if (
        path == words[0]
        and hidden
        and _possible(words, variables)
        and _read_at_load(variables, ()) == _read_at_load(os.environ, ())
    ):
        raise _Instead(_request(words, variables, os.getcwd()))
    _stock_execve(path, words, variables)


_stock_execve = os.execve


def _show_in_proc(words: Sequence[str], variables: Mapping[str, str]) -> None:
    """Writes them where the kernel reads the command line and the environment of a process."""
    with open("/proc/self/stat") as file:
        places = [int(word) for word in file.read().rpartition(")")[2].split()[45:49]]
    texts = words, [f"{name}={value}" for name, value in variables.items()]
    for text, start, end in zip(texts, places[::2], places[1::2], strict=True):
        data = b"".join(os.fsencode(word) + b"\0" for word in text)
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, data, min(len(data), end - start - 1))


def _run_program(words: list[str]) -> None:
    """Runs a program as Python does, including its exit."""
    found = _entry(words)
    assert found is not None
    kind, count = found
    main = types.ModuleType("__main__")
    vars(main).update(__builtins__=builtins, __spec__=None)
    sys.modules["__main__"] = main
    sys.orig_argv = list(words)
    sys.argv = [words[1], *words[count:]]
    sys.path[:] = [_first_path(kind, words), *_rest_of_path]
    try:
        if kind == "-m":
            runpy._run_module_as_main(words[2])  # type: ignore[attr-defined]
        elif kind == "-c":
            exec(compile(words[2], "<string>", "exec"), vars(main))
        else:
            vars(main).update(__file__=words[1], __cached__=None)
            with open(words[1], "rb") as file:
                code = compile(file.read(), words[1], "exec")
            exec(code, vars(main))
    except Exception as error:
        place = error.__traceback__
        while place is not None and place.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
            place = place.tb_next
        sys.excepthook(type(error), error.with_traceback(place), place)
        raise SystemExit(1) from None


_rest_of_path: list[str] = []


def _first_path(kind: str, words: Sequence[str]) -> str:
    if kind == "script":
        return os.path.dirname(os.path.realpath(words[1]))
    return "" if kind == "-c" else os.getcwd()
