"""What `stoker export` is asked for, checked before torch is imported: packages, folders, and the kind of what is in them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from stoker.errors import UserError
from stoker.tasks.export.export_folder import check_target
from stoker.tasks.model_folder import check_folder_exists, exported_file

__all__ = ["check_request", "target_of"]

_PACKAGES = {
    "onnx": (("onnx", "onnxscript", "onnxruntime"), "onnx"),
    "openvino": (("openvino", "nncf"), "openvino"),
    "gguf": (("gguf",), "gguf"),
}
"""What a format needs, and the extra that installs it."""


def check_request(name: str, to: str, int8: bool, target: Path) -> None:
    """Raises UserError if the model `name` cannot be exported to the folder `target`, as far as the folders tell."""
    _check_packages(to, int8)
    check_target(Path(name), target)
    _check_source(name)


def target_of(name: str, to: str, int8: bool, output_dir: str | None) -> Path:
    if output_dir is not None:
        return Path(output_dir)
    folder = Path(name)
    if not folder.exists():
        raise UserError(
            f"there is no folder {name}; name the folder of a run, or, for a model on the hub, add --output_dir for the export"
        )
    return (folder if folder.is_dir() else folder.parent) / (f"{to}-int8" if int8 else to)


def _check_packages(to: str, int8: bool) -> None:
    packages, extra = _PACKAGES.get(to, ((), ""))
    for package in packages:
        if package == "nncf" and not int8:
            continue
        if importlib.util.find_spec(package) is None:
            raise UserError(f"--to {to} needs {package}: pip install 'stoker[{extra}]'")


def _check_source(name: str) -> None:
    folder = Path(name)
    if folder.is_file() and folder.suffix != ".gguf":
        raise UserError(f"{name} is a file; name the folder of a run or of a model")
    if folder.is_dir() and exported_file(folder) is not None:
        raise UserError(
            f"{name} is an export already; name the folder of the run or of the model that it was made from"
        )
    if folder.is_dir() and not any((folder / one).exists() for one in ("config.json", "adapter_config.json", "modules.json")) \
            and not any(folder.glob("*.gguf")):  # fmt: skip
        what = "a run without a saved model" if (folder / "run.jsonl").exists() else "neither a run nor a model"
        raise UserError(f"{name} is {what}: it has no config.json; name the --output_dir of a finished run")
    check_folder_exists(name, "--model")
