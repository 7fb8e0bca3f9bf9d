"""`stoker watch DIR`: serves the page of a run that is training, or has ended, and updates it as its log grows."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

from stoker.cli import parsing
from stoker.errors import UserError, first_line
from stoker.user_files import require_run_folder

__all__ = ["main"]

_EXAMPLES = """examples:
  stoker watch out/squad                     prints the address of the page; Ctrl-C ends
  ssh -L 8765:127.0.0.1:8765 node7           a run on another machine: there, stoker watch out/squad --port 8765
  stoker train qa ... --live                 the same page from the start of a run"""

_ADVICE = "is it the --output_dir of a run?"


def main(argv: list[str]) -> int:
    parser = parsing.Parser(
        "watch", "show a run in the browser while it trains: loss, scores, speed, time left", examples=_EXAMPLES
    )
    parser.add_argument(
        "folder", type=parsing.path, metavar="DIR", help="the run's --output_dir, also in a shared folder"
    )
    parser.add_argument(
        "--port", type=parsing.port, default=0, metavar="N", help="the port to listen on (default: a free one)"
    )
    parser.add_argument(
        "--host", type=parsing.path, default="127.0.0.1", metavar="NAME",
        help="the address to listen on (default 127.0.0.1: this machine only; 0.0.0.0: every interface)",
    )  # fmt: skip
    parser.add_argument(
        "--process",
        type=parsing.many,
        metavar="PID",
        help="end when this process ends, and show only the run that it logs",
    )
    options = parser.parse_args(argv)
    folder = Path(options.folder)
    is_empty = _check(folder, options.process)
    try:
        from stoker.run_report.live_server import LiveServer, Viewer
    except ImportError as error:
        raise UserError(f"stoker watch needs Jinja2: pip install 'stoker[report]' ({first_line(error)})") from None
    server = LiveServer(Viewer(folder, process=options.process), options.host, options.port)
    if is_empty:
        print(f"stoker: {folder / 'run.jsonl'} is still empty; the page shows the run when it begins", file=sys.stderr)
    if options.host != "127.0.0.1":
        print(f"stoker: the page is served to {options.host}, without encryption", file=sys.stderr)
    print(f"watch it at {server.address}", flush=True)
    if options.process is not None:
        os.nice(5)  # training comes first
    signal.signal(signal.SIGTERM, _interrupt)
    with contextlib.suppress(KeyboardInterrupt):
        server.serve()
    return 0


def _check(folder: Path, process: int | None) -> bool:
    """Raises UserError if there is nothing to watch; otherwise whether the log is still empty."""
    require_run_folder(folder)
    if process is not None:  # its log is still to come
        from stoker.process_life import parent_and_start

        if process >= 1 << 31 or not parent_and_start(process)[1]:
            raise UserError(f"--process {process}: there is no such process")
        return False
    from stoker.run_report.log import NAME, require_regular

    try:
        return not require_regular(folder / NAME).st_size
    except FileNotFoundError:
        trials = sorted(log.parent for log in folder.glob(f"trial-[0-9]*/{NAME}"))
        advice = f"it has the trials of a search; watch one of them, such as {trials[-1]}" if trials else _ADVICE
        raise UserError(f"{folder} has no run.jsonl, the log of a training run; {advice}") from None
    except OSError as error:
        raise UserError(f"{folder / NAME} cannot be read: {error.strerror}") from None


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt
