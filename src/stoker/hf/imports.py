"""Replacements for discontinued packages: intel_extension_for_pytorch, oneccl_bindings_for_pytorch, torch_ccl.

If the real package is installed, Python imports it and nothing here is used, because this finder is the last on sys.meta_path.

Processes that multiprocessing starts afresh (spawn, forkserver, workers of a DataLoader) inherit sys.path and not sys.meta_path.
They find the packages in `retired/`, which `install` adds as the last directory, and which install the finder in turn.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from stoker import __version__
from stoker.errors import UserError

__all__ = ["RetiredImports", "install", "replace"]

PrintLine = Callable[[str], None]


class RetiredImports(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the discontinued modules, and fills them with what Stoker has instead."""

    def __init__(self, print_once: PrintLine) -> None:
        self._print_once = print_once

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _CONTENTS:
            root = sys.modules.get(name.partition(".")[0])
            if "." in name and getattr(getattr(root, "__spec__", None), "loader", None) is self:
                raise ModuleNotFoundError(_gone(name), name=name)
            return None
        return importlib.machinery.ModuleSpec(name, self, origin="stoker.hf.imports", is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        module.__version__ = f"0+stoker.{__version__}"  # type: ignore[attr-defined]
        _CONTENTS[module.__name__](module, self._print_once)


def install(print_once: PrintLine) -> RetiredImports:
    """Installs the finder last, so that it is only asked for modules that no other finder has."""
    finder = RetiredImports(print_once)
    sys.meta_path.append(finder)
    sys.path.append(str(Path(__file__).with_name("retired")))
    return finder


def replace(name: str) -> None:
    """Replaces the module `name` of retired/, which is being imported, by the one that the finder makes."""
    finder = next((one for one in sys.meta_path if isinstance(one, RetiredImports)), None)
    if finder is None:  # a process that the script has started: what there is to say was said by the script itself
        finder = install(lambda line: None)
    spec = finder.find_spec(name, None)
    assert spec is not None
    del sys.modules[name]
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    finder.exec_module(module)


def _ipex(module: ModuleType, print_once: PrintLine) -> None:
    import stoker

    def optimize(
        model: Any, dtype: Any = None, optimizer: Any = None, level: str = "O1", inplace: bool = False, **rest: Any
    ) -> Any:
        """ipex.optimize: stoker.optimize with the old order of arguments."""
        # Arguments for inference and quantisation that are None, their default, need no line.
        rest = {name: value for name, value in rest.items() if value is not None}
        if not inplace:
            import copy

            if optimizer is None:
                model = copy.deepcopy(model)
        return stoker.optimize(model, optimizer, dtype, level=level, **rest)

    def fast_bert(model: Any, dtype: Any = None, optimizer: Any = None, unpad: bool = False) -> Any:
        """ipex.fast_bert: the model was changed in place, and returned alone if there was no optimizer."""
        return stoker.optimize(model, optimizer, dtype)

    def get_fp32_math_mode(device: str = "cpu") -> str:
        return "FP32"

    def set_fp32_math_mode(*args: Any, **rest: Any) -> None:
        print_once("ipex.set_fp32_math_mode is ignored: arithmetic stays fp32; use dtype=torch.bfloat16 for bf16")

    def enable_onednn_fusion(enabled: bool = True) -> None:
        print_once("ipex.enable_onednn_fusion is ignored: stoker.optimize always fuses")

    for function in (optimize, fast_bert, get_fp32_math_mode, set_fp32_math_mode, enable_onednn_fusion):
        setattr(module, function.__name__, function)
    vars(module)["__getattr__"] = _missing("intel_extension_for_pytorch")
    print_once("import intel_extension_for_pytorch: it is discontinued; ipex.optimize is stoker.optimize now")


def _ipex_cpu(module: ModuleType, print_once: PrintLine) -> None:
    vars(module)["__getattr__"] = _missing("intel_extension_for_pytorch.cpu")


def _ipex_launch(module: ModuleType, print_once: PrintLine) -> None:
    raise UserError(
        "ipexrun and intel_extension_for_pytorch.cpu.launch are discontinued; use `stoker launch [options] script.py ...`, "
        "which takes the same options (--ninstances, --ncores-per-instance, --nodes-list, --log-dir, ...)"
    )


def _ccl(module: ModuleType, print_once: PrintLine) -> None:
    from stoker.comm import cwd
    from stoker.hf.ddp_backend import alias_ccl

    vars(module)["cwd"] = cwd  # scripts source "$cwd/env/setvars.sh"
    note = alias_ccl()
    print_once(f"import {module.__name__}: it is discontinued; {note or 'the backend ccl is Stoker’s own'}")


def _gone(name: str) -> str:
    package = "Intel Extension for PyTorch" if name.startswith("intel") else "the oneCCL bindings for PyTorch"
    return (
        f"{name} is not available: {package} is discontinued; Stoker replaces `optimize`, the backend ccl and the launcher, "
        "see docs/coming-from-ipex.md"
    )


def _missing(package: str) -> Callable[[str], Any]:
    def missing(name: str) -> Any:
        if name == "launch":
            _ipex_launch(ModuleType(name), lambda line: None)
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(_gone(f"{package}.{name}"))

    return missing


_CONTENTS: dict[str, Callable[[ModuleType, PrintLine], None]] = {
    "intel_extension_for_pytorch": _ipex,
    "intel_extension_for_pytorch.cpu": _ipex_cpu,
    "intel_extension_for_pytorch.cpu.launch": _ipex_launch,
    "oneccl_bindings_for_pytorch": _ccl,
    "torch_ccl": _ccl,
}
