"""One line after a script's traceback, for failures that Stoker knows how to avoid."""

from __future__ import annotations

import contextlib
import gzip
import os
import zlib
from collections.abc import Iterator, Sequence

__all__ = ["hints"]

_OFFLINE = (
    "OfflineModeIsEnabled",
    "LocalEntryNotFoundError",
    "ConnectionError",
    "ConnectError",
    "MaxRetryError",
    "DatasetNotFoundError",
)
_HUB = ("huggingface_hub", "datasets", "evaluate", "requests", "httpx", "urllib3", "transformers")


# What scripts raise when a file lacks the columns they look for.
_NO_SUCH_COLUMN = (KeyError, IndexError, ValueError, TypeError, AttributeError)


def hints(error: BaseException, arguments: Sequence[str], script: str = "") -> list[str]:
    """What can be done instead, if anything."""
    found = []
    chain = list(_chain(error))
    if any(_is_offline(one) for one in chain):
        found.append(
            "the Hugging Face hub cannot be reached; use local folders and files, or use `stoker train qa` or "
            "`stoker train classify`, whose metrics need no download"
        )
    missing = next((one.name for one in chain if isinstance(one, ModuleNotFoundError)), None)
    if missing in ("evaluate", "datasets"):
        found.append(
            f"the script needs the package {missing} (`pip install {missing}`); `stoker train qa` and `stoker train classify` "
            "do not need it"
        )
    by_data = script != "stoker" and any(_is_about_data(one) for one in chain)  # `stoker train` reads nested files
    nested = next((word for word in arguments if by_data and _is_nested_squad(word)), None)
    if nested is not None:
        found.append(
            f"{nested} is SQuAD in its official nested form; run_qa.py needs flat rows, `stoker train qa --train_file` reads both"
        )
    return found


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    for _ in range(20):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def _is_offline(error: BaseException) -> bool:
    module = type(error).__module__.partition(".")[0]
    if type(error).__name__ in _OFFLINE and (module in _HUB or module == "builtins"):
        return True
    return isinstance(error, OSError) and "huggingface.co" in str(error)


def _is_about_data(error: BaseException) -> bool:
    return isinstance(error, _NO_SUCH_COLUMN) or type(error).__module__.partition(".")[0] in ("datasets", "pyarrow")


def _is_nested_squad(path: str) -> bool:
    if not path.endswith((".json", ".json.gz")):
        return False
    if not os.path.isfile(path):  # opening a pipe might block forever
        return False
    with contextlib.suppress(OSError, EOFError, zlib.error):
        with gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb") as file:
            start = file.read(4096)
        return b'"data"' in start and b'"paragraphs"' in start
    return False
