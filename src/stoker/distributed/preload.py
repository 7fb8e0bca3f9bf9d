"""Which modules a rank has imported when training begins, so that a process that waits to replace it can import them in advance.

Only installed modules are listed, those of the standard library, of packages and of Stoker: the script's own files may do more
than define names when they are imported. Imports no torch by itself.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import sysconfig
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import stoker

__all__ = ["Preload"]

_FOR_JOINING = ("torch.testing._internal.distributed.fake_pg",)
"""What only a process that replaces a lost rank imports (`stoker.distributed.regroup`)."""
_INITIAL_ENVIRONMENT = Path("/proc/self/environ")


@dataclass(frozen=True)
class Preload:
    modules: list[str]
    """In the order in which their imports were complete."""
    environment: dict[str, str]
    """The variables that the rank has set itself: some libraries read theirs when they are imported."""

    @classmethod
    def of_this_process(cls, is_secret: Callable[[str], bool]) -> Preload:
        """Variables for which `is_secret` holds are left out."""
        initial = dict(one.split(b"=", 1) for one in _INITIAL_ENVIRONMENT.read_bytes().split(b"\0") if b"=" in one)
        changed = {
            name: value
            for name, value in os.environ.items()
            if initial.get(os.fsencode(name)) != os.fsencode(value) and not is_secret(name)
        }
        modules = [*filter(_is_installed, list(sys.modules)), *_FOR_JOINING]
        return cls(list(dict.fromkeys(modules)), changed)

    def write(self, directory: Path, rank: int) -> None:
        """For the keeper of `rank`; `directory` is the launch's own, which other users cannot read."""
        path = _path(directory, rank)
        if not path.exists():
            part = path.with_suffix(".part")
            part.write_text(json.dumps(asdict(self)), encoding="utf-8")
            part.replace(path)

    @classmethod
    def read(cls, directory: Path, rank: int) -> Preload | None:
        """None if the rank has not begun to train."""
        try:
            return cls(**json.loads(_path(directory, rank).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def load(self, is_wanted: Callable[[], bool]) -> None:
        """Imports the modules, until `is_wanted` returns False. A module that cannot be imported is left to the script."""
        before = dict(os.environ)
        os.environ.update(self.environment)
        os.environ["OPENBLAS_NUM_THREADS"] = "1"  # NumPy's starts its threads when it is imported
        try:
            for name in self.modules:
                if not is_wanted():
                    return
                if name not in sys.modules:
                    with suppress(Exception):
                        importlib.import_module(name)
        finally:
            os.environ.clear()
            os.environ.update(before)  # the script sets its own again


def _path(directory: Path, rank: int) -> Path:
    return directory / f"modules.{rank}.json"


def _is_installed(name: str) -> bool:
    file = getattr(sys.modules[name], "__file__", None)
    return isinstance(file, str) and name != "__main__" and file.startswith(_installed_folders())


def _installed_folders() -> tuple[str, ...]:
    found = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return tuple(f"{folder}{os.sep}" for folder in {*found, str(Path(stoker.__file__).parent)})
