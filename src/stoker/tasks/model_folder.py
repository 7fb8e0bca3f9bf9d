"""Finds problems in the files of a model folder without the libraries that load them.

`check_before_loading` rejects what would make a library hang or exhaust the memory. `broken_file` finds the file at fault
after a library has failed. Whether a model can be loaded is left to transformers.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stoker.errors import UserError

__all__ = [
    "ADAPTER", "CONFIG_FILES", "EXPORT_FILES", "HEAD_FILE", "MODULES", "TOKENIZER_FILES", "VOCABULARY_FILES", "WEIGHT_FILES",
    "broken_file", "broken_part", "check_before_loading", "check_folder_exists", "check_language_model", "check_no_adapter",
    "exported_file", "gguf_file", "integer_tensors",
]  # fmt: skip

CONFIG_FILES = ("config.json",)
TOKENIZER_FILES = (
    "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt",
    "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
)  # fmt: skip
VOCABULARY_FILES = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken")
WEIGHT_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json", "adapter_config.json", "*.safetensors")
ADAPTER = "adapter_config.json"
MODULES = "modules.json"
"""Names the parts of a model of sentence-transformers, most of which are in subfolders."""
EXPORT_FILES = {"onnx": "model.onnx", "openvino": "openvino_model.xml"}
"""The file of each format in which `stoker export`, and optimum, write a model for another library."""
HEAD_FILE = "model_head.safetensors"
"""The classifier of a few-shot model, beside its transformer in any format."""
_PYTORCH_FILES = ("*.safetensors", "pytorch_model*.bin")

_HEADER = 100 << 20  # bytes that safetensors itself allows for the header of a file
_MOST = {
    "num_labels": 1 << 20,
    **dict.fromkeys(("num_hidden_layers", "n_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers"), 4096),
}  # fmt: skip
"""Largest values in config.json: transformers creates that many entries or layers before it reads any weight. The largest known
models have a few hundred layers."""


def check_folder_exists(name: str, flag: str) -> None:
    """Raises UserError for a folder that does not exist. The names of models on the hub are NAME and OWNER/NAME."""
    if os.path.exists(name):
        return
    if name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1:
        raise UserError(f"the folder {name} does not exist ({flag})")


def gguf_file(name: str) -> Path | None:
    """The GGUF file that `name` is, or that its folder contains instead of a transformers model; None if there is none."""
    path = Path(name)
    if path.suffix == ".gguf" and path.is_file():
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        raise UserError(f"{name} contains {len(found)} GGUF files; name one of them: {', '.join(map(str, found[:5]))}")
    return found[0] if found else None


def check_language_model(name: str, flag: str) -> None:
    """Raises UserError for a file that is not GGUF, and for a folder without a model or an adapter."""
    path = Path(name)
    if path.suffix == ".gguf" and not path.is_file():
        raise UserError(f"{flag} {name} does not exist")
    if path.is_file():
        raise UserError(f"{flag} {name} is a file; name a folder, a GGUF file, or a model on the hub")
    if path.is_dir() and not any((path / one).exists() for one in ("config.json", ADAPTER)):
        raise UserError(f"{name} does not contain a model: it has neither config.json nor {ADAPTER} nor a GGUF file")


def check_no_adapter(name: str) -> None:
    """Raises UserError for the folder of an adapter, which is not trained further."""
    if (Path(name) / ADAPTER).is_file() and not (Path(name) / "config.json").exists():
        raise UserError(
            f"{name} is an adapter, not a model; train its base model, or write the merged model with --merge and train that"
        )


def check_before_loading(folder: Path) -> None:
    """Raises UserError for what would make a library hang: pipes, devices, absurd sizes in config.json."""
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise UserError(f"the folder {folder} cannot be read: {error.strerror}") from None
    for path in paths:
        try:
            mode = path.stat().st_mode
        except OSError:  # a dangling link; whoever needs the file reports it
            continue
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise UserError(f"no model can be loaded from the folder {folder}: {path.name} is not a regular file")
    config = folder / "config.json"
    if not config.is_file() or _problem(config) is not None:
        return
    values: dict[str, Any] = json.loads(config.read_bytes())
    for name, most in _MOST.items():
        if isinstance(values.get(name), int | float) and not values[name] <= most:
            raise UserError(
                f"no model can be loaded from the folder {folder}: {name} in config.json is {values[name]}, "
                f"but at most {most} is supported"
            )


def broken_file(folder: Path, patterns: Iterable[str]) -> str | None:
    """The first of these files that is not what its name says, with the reason; None if all are fine."""
    for pattern in patterns:
        # `glob` does not find dangling links.
        for path in sorted(folder.glob(pattern)) or filter(os.path.lexists, [folder / pattern]):
            if (why := _problem(path)) is not None:
                return f"{path.name} {why}"
    return None


def broken_part(folder: Path) -> str | None:
    """The first problem in the parts of a model of sentence-transformers, with the file; None if none is found."""
    for part, kind in _parts(folder):
        if not part.is_dir():
            return f"{MODULES} names {part.relative_to(folder)}, which does not exist"
        if (why := broken_file(part, (*CONFIG_FILES, *TOKENIZER_FILES, *WEIGHT_FILES))) is not None:
            return why if part == folder else f"{part.relative_to(folder)}/{why}"
        if kind == "Transformer" and not (part / "config.json").exists():
            return "it has no config.json" if part == folder else f"{part.relative_to(folder)} has no config.json"
    return None


def _parts(folder: Path) -> list[tuple[Path, str]]:
    """The folder and the class of each part; empty if the file that names them cannot be read, which its readers report."""
    try:
        listed = json.loads((folder / MODULES).read_text(encoding="utf-8"))
        found = [(str(one["path"]), str(one["type"]).rpartition(".")[2]) for one in listed]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return []
    return [
        (folder / path, kind) for path, kind in found if ".." not in Path(path).parts and not Path(path).is_absolute()
    ]


def _problem(path: Path) -> str | None:
    try:
        if path.suffix == ".json":
            why = _json_problem(path.read_bytes())
            return _index_problem(path) if why is None and path.name.endswith(".index.json") else why
        if path.suffix == ".safetensors":
            return _safetensors_problem(path)
        with open(path, "rb") as file:
            return None if file.read(1) else "is empty"
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def _json_problem(raw: bytes) -> str | None:
    if not raw.strip():
        return "is empty"
    try:
        content = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        return f"is not UTF-8 text (byte {error.start:,})"
    except json.JSONDecodeError as error:
        return f"is not JSON: {error.msg.removesuffix(' at')} at line {error.lineno}, column {error.colno}"
    except RecursionError:
        return "is nested too deeply"
    except ValueError:
        return "contains a number of more than 4,000 digits"
    return None if isinstance(content, dict) else "is not a JSON object"


def _index_problem(path: Path) -> str | None:
    """An index names the file of each tensor."""
    files = json.loads(path.read_bytes()).get("weight_map")
    if not isinstance(files, dict) or not files or not all(isinstance(file, str) for file in files.values()):
        return "does not name the file of each tensor (weight_map)"
    missing = sorted(file for file in {*files.values()} if not (path.parent / file).is_file())
    return f"names {missing[0]}, which does not exist" if missing else None


def exported_file(name: str | Path) -> Path | None:
    """The ONNX or OpenVINO file that a folder contains instead of PyTorch weights; None if there is none."""
    folder = Path(name)
    found = next((folder / file for file in EXPORT_FILES.values() if (folder / file).is_file()), None)
    weights = (path.name for pattern in _PYTORCH_FILES for path in folder.glob(pattern))
    return None if found is None or any(name != HEAD_FILE for name in weights) else found


def integer_tensors(folder: Path) -> set[str]:
    """The tensors in the folder's .safetensors files that are not floating-point."""
    found: set[str] = set()
    for path in folder.glob("*.safetensors"):
        if _problem(path) is None:
            header = _header(path)
            found |= {name for name, one in header.items() if str(one.get("dtype")).startswith(("I", "U", "BOOL"))}
    return found


def _header(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        content: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    content.pop("__metadata__", None)
    return content


def _safetensors_problem(path: Path) -> str | None:
    """The format: 8 bytes with the length of a JSON header, the header with the offsets of all tensors, then the data."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _HEADER):
            return f"is damaged or cut short: it has {size:,} bytes, fewer than its header needs"
        raw = file.read(length)
    if (why := _json_problem(raw)) is not None:
        return f"is damaged: its header {why}"
    try:
        ends = max((int(one["data_offsets"][1]) for one in _header(path).values()), default=0)
    except (KeyError, TypeError, IndexError, ValueError):
        return "is damaged: its header does not say where the tensors are"
    if 8 + length + ends != size:
        return f"is damaged or cut short: it has {size:,} bytes where {8 + length + ends:,} are needed"
    return None
