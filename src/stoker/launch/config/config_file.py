"""The config file: accelerate's key names, as written by any of its releases, and a section of Stoker's own.

`Config.read` understands Stoker's files and accelerate's default_config.yaml (or .json). Which keys set an option, and what
values they take, is declared with the option (`stoker.launch.options`); `stoker.launch.config.migrate` explains retired keys.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from stoker.documents import BadDocument, parse_json, parse_yaml
from stoker.errors import UserError
from stoker.launch.options import LaunchOptions, Options, declared, truth
from stoker.user_files import check_replaceable, read_text

__all__ = ["IN_FILE", "Config", "default_path", "find", "load", "own_path", "with_config", "write_mapping"]

_SIZE = 256 << 10
"""Bytes of a config file; those of accelerate have less than 2,000."""

# accelerate's distributed types that ask for several processes. The numbers of a config made for another device are used;
# the device is the CPU.
_SEVERAL = ("MULTI_CPU", "MULTI_XPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_HPU", "FSDP")
_REFUSED = ("DEEPSPEED", "MEGATRON_LM", "TPU", "XLA")

IN_FILE = {name: option for name, option in declared(LaunchOptions).items() if option.config}
"""The options that a config file can set, by field."""


@dataclass(frozen=True, kw_only=True)
class Config(LaunchOptions):
    """A config file: the options it sets (None where it has none, or the usual value), and accelerate's other keys."""

    distributed_type: str = "NO"
    """NO or MULTI_CPU."""
    main_training_function: str = "main"
    rdzv_backend: str = "static"
    same_network: bool = True
    use_cpu: bool = True
    other: dict[str, Any] = field(default_factory=dict)
    """Keys of accelerate that Stoker does not use (fsdp_config, dynamo_config, ...), kept for writing."""
    notes: tuple[str, ...] = ()
    """What had to be interpreted while reading, one sentence each."""

    def __post_init__(self) -> None:
        for name, option in IN_FILE.items():
            if getattr(self, name) == option.unset:
                object.__setattr__(self, name, None)

    @property
    def is_distributed(self) -> bool:
        return self.distributed_type != "NO"

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Config:
        """Reads a file of Stoker or of any release of accelerate."""
        return cls.from_mapping(load(path), str(path))

    @classmethod
    def from_mapping(cls, mapping: dict[str, Any], where: str = "config") -> Config:
        try:
            return cls._from_mapping(dict(mapping))
        except UserError as error:
            raise UserError(f"{where}: {error}") from None

    @classmethod
    def _from_mapping(cls, keys: dict[str, Any]) -> Config:
        environment = str(keys.pop("compute_environment", "LOCAL_MACHINE"))
        if environment not in ("LOCAL_MACHINE", "0"):
            raise UserError(
                f"compute_environment is {environment}; Stoker launches on machines you can reach, LOCAL_MACHINE"
            )
        notes: list[str] = []
        values: dict[str, Any] = {"distributed_type": _distributed_type(keys.pop("distributed_type", "NO"), notes)}
        _rename_old_keys(keys)
        for name, option in IN_FILE.items():
            value = _take(keys, option.config)
            if value not in (None, ""):
                is_open = name == "num_processes" and str(value) == "-1"  # accelerate: on the command line
                values[name] = -1 if is_open else _named(option.config, option.read, value)
        for section in ("ipex_config", "mpirun_config", "stoker_config"):
            keys.pop(section, None)
        others: dict[str, Callable[[Any], Any]] = {
            "same_network": truth, "use_cpu": truth, "main_training_function": str, "rdzv_backend": str,
        }  # fmt: skip
        for name, convert in others.items():
            if (value := keys.pop(name, None)) is not None:
                values[name] = _named(name, convert, value)
        return cls(**values, other=keys, notes=tuple(notes))

    def to_mapping(self) -> dict[str, Any]:
        """Stoker's own file: accelerate's key names, `ipex_config` as it was, and `stoker_config`."""
        own = ("distributed_type", "main_training_function", "rdzv_backend", "same_network", "use_cpu")
        mapping: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE", "num_processes": 1, **self.other}
        mapping |= {name: getattr(self, name) for name in own}
        for name, option in IN_FILE.items():
            section, _, key = option.config.rpartition(".")
            value = getattr(self, name)
            if value is None and section in ("", "ipex_config"):  # always in accelerate's files
                value = option.unset
            if value is not None:
                entry = {key: option.write(value)}
                mapping |= {section: {**mapping.get(section, {}), **entry}} if section else entry
        return dict(sorted(mapping.items()))

    def write(self, path: str | os.PathLike[str]) -> None:
        write_mapping(self.to_mapping(), path)


def with_config(options: Options, config: Config) -> Options:
    """The options of a command line, with those that it leaves open taken from a file."""
    values = {name: getattr(config, name) for name in IN_FILE if getattr(options, name) is None}
    counts_given = options.num_processes is not None or options.per_machine is not None
    if counts_given or not config.is_distributed:
        values.pop("num_processes", None)
    launcher = options.launcher or config.launcher
    if launcher == "torchrun":
        values.pop("hostfile", None)
    by_hostfile = (options.hostfile or values.get("hostfile")) and launcher != "slurm" and not options.emit
    if by_hostfile and options.num_machines is None and config.num_machines is not None:
        # mpirun takes the machines from the hostfile; the config file only says how its own processes are divided.
        if counts_given or not config.is_distributed:
            del values["num_machines"]
        elif config.num_processes is not None and config.num_processes > 0:
            values["per_machine"] = -(-config.num_processes // config.num_machines)
    return dataclasses.replace(options, **values)


def write_mapping(mapping: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Writes yaml beside its place and renames it, so that a crash leaves the old file."""
    target = check_replaceable(path, "config file")
    temporary = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            yaml.safe_dump(mapping, file, sort_keys=True)
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise UserError(f"cannot write {target}: {error.strerror}; name another place") from None


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The keys of a yaml or JSON file; UserError if it is not one."""
    text = read_text(path, "config file", limit=_SIZE, advice="`stoker config` makes one")
    is_json = str(path).endswith(".json")
    try:
        found = parse_json(text) if is_json else parse_yaml(text)
    except BadDocument as error:
        raise UserError(f"config file {path} is not valid {'JSON' if is_json else 'yaml'}: {error}") from None
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise UserError(f"config file {path} must hold keys and values, as `stoker config` writes them")
    return found


def own_path() -> Path:
    """Where `stoker config` writes."""
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return Path(base) / "stoker" / "default_config.yaml"


def accelerate_path() -> Path:
    """Where `accelerate config` writes."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    home = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    return Path(home) / "accelerate" / "default_config.yaml"


def default_path() -> Path | None:
    """The file that a launch reads by default: Stoker's own, else accelerate's; None if there is neither."""
    for path in (own_path(), accelerate_path(), accelerate_path().with_suffix(".json")):
        with contextlib.suppress(OSError):
            if path.is_file():
                return path
    return None


def find(path: str | None) -> tuple[Config, Path | None]:
    """The config named, or the default one, or an empty one."""
    chosen = Path(path) if path else default_path()
    return (Config.read(chosen), chosen) if chosen else (Config(), None)


def _distributed_type(value: Any, notes: list[str]) -> str:
    kind = str(value).upper()
    if kind in ("NO", "FALSE", "0"):  # `distributed_type: no` without quotes is False in yaml
        return "NO"
    if kind in _REFUSED:
        raise UserError(
            f"distributed_type {kind} is not for CPUs; make a new file with `stoker config`, or set MULTI_CPU"
        )
    if kind not in _SEVERAL:
        raise UserError(f"distributed_type is {value!r}; it must be NO or MULTI_CPU")
    if kind != "MULTI_CPU":
        notes.append(f"distributed_type {kind}: launched as MULTI_CPU, with the same number of processes")
    return "MULTI_CPU"


def _rename_old_keys(keys: dict[str, Any]) -> None:
    """Brings keys of earlier releases to the form of later ones: fp16, dynamo_backend, and ipex_config without a section."""
    fp16 = keys.pop("fp16", None)
    if keys.get("mixed_precision") is None and fp16 is not None and _named("fp16", truth, fp16):
        keys["mixed_precision"] = "fp16"
    if "dynamo_backend" in keys:
        backend = {"dynamo_backend": keys.pop("dynamo_backend")}
        keys["dynamo_config"] = {**backend, **_section(keys, "dynamo_config")}
    if not isinstance(keys.get("ipex_config"), dict | None):
        keys["ipex_config"] = {"ipex": keys["ipex_config"]}


def _take(keys: dict[str, Any], name: str) -> Any:
    """Removes a key, which may be in a section, and returns its value. An empty section goes too."""
    section, _, key = name.rpartition(".")
    if not section:
        return keys.pop(key, None)
    rest = dict(_section(keys, section))
    value = rest.pop(key, None)
    keys[section] = rest
    if not rest:
        del keys[section]
    return value


def _section(keys: dict[str, Any], name: str) -> dict[str, Any]:
    value = keys.get(name)
    if value is not None and not isinstance(value, dict):
        raise UserError(f"{name} is {value!r}; it must hold keys and values")
    return value or {}


def _named(key: str, convert: Callable[[Any], Any], value: Any) -> Any:
    try:
        return convert(value)
    except argparse.ArgumentTypeError as error:
        raise UserError(f"{key}: {error}") from None
