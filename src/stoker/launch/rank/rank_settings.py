"""What the launcher sends to each rank: the rank options and a few facts about the launch, as one line of JSON on the command
line or in the environment (`stoker.launch.rank.handover`).
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from stoker.errors import UserError
from stoker.launch.options import RankOptions, to_variables

__all__ = ["Settings"]


@dataclass(frozen=True, kw_only=True)
class Settings(RankOptions):
    """Everything that a rank needs beyond its rank number."""

    master: tuple[str, int] | None = None
    """MASTER_ADDR and MASTER_PORT, if the launcher has chosen them."""
    report: str | None = None
    """Where a rank that fails reports it: a directory, or `stderr` for a marked line there."""
    job: str | None = None
    """A unique name, by which a guard on each host finds the processes of this launch."""
    secret: str = ""
    """Known to the ranks of this job only; it is never on a command line (`handover.rank_command`)."""
    is_one_of_several: bool = False
    """Started by a launcher that sets rank variables; it is an error if they are missing."""
    launch_command: tuple[str, ...] = ()
    """The command line of the launch up to the script, without secrets: the start of the command that resumes the run."""
    launcher_prints_resume: bool = False
    """The launcher prints that command itself when all ranks have ended."""
    outer_launcher: str | None = None
    """The launcher that started `stoker launch` itself as one of several ranks."""

    @classmethod
    def from_options(cls, options: RankOptions) -> Settings:
        return cls(**{field.name: getattr(options, field.name) for field in dataclasses.fields(RankOptions)})

    def to_json(self) -> str:
        values = {field.name: (getattr(self, field.name), field.default) for field in dataclasses.fields(self)}
        sent = {name: value for name, (value, default) in values.items() if value != default}
        return json.dumps(sent, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        try:
            return cls(**{name: _tuples(value) for name, value in json.loads(text).items()})
        except (ValueError, TypeError, AttributeError) as error:
            raise UserError(f"these are not settings of this version of Stoker ({error}): {text!r}") from None

    def variables(self) -> dict[str, str]:
        """The variables that the options set in a rank, as `accelerate launch` sets its own."""
        return {"ACCELERATE_USE_CPU": "true", **to_variables(self)}


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
