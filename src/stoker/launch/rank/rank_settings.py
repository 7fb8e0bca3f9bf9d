"""What the launcher tells each rank: one small value that travels as a single word, on the command line or by
`stoker.launch.rank.handover`.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from stoker.errors import UserError

__all__ = ["Settings"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything a rank needs to know beyond its rank; defaults are not sent."""

    module: bool = False
    """The script is a module name, as `python -m` takes it."""
    compat: bool = True
    ipex: bool | None = None
    """Stoker's optimisations: True and False are someone's wish, None is the default (yes)."""
    backend: str | None = None
    """What accelerate scripts shall use; None for the default."""
    mixed_precision: str | None = None
    dynamo_backend: str | None = None
    threads: int | None = None
    workers: int = 0
    logical: bool = False
    efficiency: bool = False
    cores_per_process: int | None = None
    nodes: tuple[int, ...] | None = None
    oversubscribe: bool = False
    bind: str = "auto"
    """auto: own placement; keep: what the launcher has pinned; none: nothing is pinned."""
    allocator: str = "default"
    log_dir: str | None = None
    prefix: bool = True
    master: tuple[str, int] | None = None
    report: str | None = None
    """Where a rank that fails leaves word: a directory, or `stderr` for a marked line on it."""
    job: str | None = None
    """A name nobody else has: by it a guard on each host finds the processes of this launch."""
    several: bool = False
    """A launcher of ours started this; without its rank variables something is wrong."""
    environment: tuple[tuple[str, str], ...] = ()
    """-genv: set before the script starts."""
    launched: tuple[str, ...] = ()
    """The command line of the launch up to the script, with its secrets hidden: part of the command that goes on."""
    tells: bool = False
    """The launcher prints that command itself, when all ranks have ended."""
    outer: str | None = None
    """The launcher that started `stoker launch` itself as one of several ranks."""

    def to_word(self) -> str:
        default = Settings()
        sent = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != getattr(default, field.name)
        }
        return json.dumps(sent, separators=(",", ":"))

    def accelerate_variables(self) -> dict[str, str]:
        """What `accelerate launch` sets for Accelerator() and TrainingArguments."""
        found = {"ACCELERATE_USE_CPU": "true"}
        if self.mixed_precision is not None:
            found["ACCELERATE_MIXED_PRECISION"] = self.mixed_precision
        if self.dynamo_backend is not None:
            found["ACCELERATE_DYNAMO_BACKEND"] = self.dynamo_backend.upper()
        return found

    @classmethod
    def from_word(cls, word: str) -> Settings:
        try:
            values: dict[str, Any] = json.loads(word)
            for name in ("nodes", "master", "launched"):
                if values.get(name) is not None:
                    values[name] = tuple(values[name])
            if "environment" in values:
                values["environment"] = tuple((str(key), str(value)) for key, value in values["environment"])
            return cls(**values)
        except (ValueError, TypeError) as error:
            raise UserError(f"these are not settings of this version of Stoker ({error}): {word!r}") from None
