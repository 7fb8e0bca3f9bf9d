"""The config file: accelerate's key names, read at any age, with what Stoker adds to them kept apart.

`Config.read` understands Stoker's own files and accelerate's default_config.yaml (or .json) from its first version on;
`stoker.launch.config.migrate` explains what became of each retired key.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from stoker.documents import BadDocument, parse_json, parse_yaml
from stoker.errors import UserError
from stoker.numbers import whole_number
from stoker.user_files import check_replaceable, read_text

__all__ = ["LAUNCHERS", "PRECISIONS", "Config", "default_path", "find", "load", "own_path", "write_mapping"]

_SIZE = 256 << 10
"""Bytes of a config file; those of accelerate have less than 2,000."""
PRECISIONS = ("no", "bf16", "fp16", "fp8")
LAUNCHERS = ("auto", "torchrun", "impi", "mpich", "openmpi", "slurm")

# accelerate's distributed types that ask for several processes. A config made for another device is followed in its
# numbers; the device is the CPU.
_SEVERAL = ("MULTI_CPU", "MULTI_XPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_HPU", "FSDP")
_REFUSED = ("DEEPSPEED", "MEGATRON_LM", "TPU", "XLA")
_BOUNDS: dict[str, tuple[int, int | None]] = {
    "machine_rank": (0, None),
    "main_process_port": (0, 65535),
    "num_machines": (1, 65536),
    "num_processes": (-1, 65536),
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """What a launch is told by a file; the command line has the last word."""

    compute_environment: str = "LOCAL_MACHINE"
    distributed_type: str = "NO"
    """NO or MULTI_CPU."""
    machine_rank: int = 0
    main_process_ip: str | None = None
    main_process_port: int | None = None
    main_training_function: str = "main"
    mixed_precision: str = "no"
    num_machines: int = 1
    num_processes: int = 1
    """On all machines together. -1, as accelerate writes it: to be given on the command line."""
    rdzv_backend: str = "static"
    same_network: bool = True
    use_cpu: bool = True
    ipex: bool = True
    """Stoker's optimisations; the old name is the one people have in their files (ipex_config: {ipex: true})."""
    dynamo_backend: str = "no"
    hostfile: str | None = None
    """mpirun_config: {mpirun_hostfile: ...}."""
    ccl_workers: int | None = None
    """mpirun_config: {mpirun_ccl: '1'}."""
    threads: int | None = None
    """Per process; None for what the machine proposes."""
    launcher: str = "auto"
    other: dict[str, Any] = field(default_factory=dict)
    """Keys of accelerate that Stoker passes over (fsdp_config, dynamo_config, ...), kept for writing."""
    notes: tuple[str, ...] = ()
    """What had to be interpreted while reading, one sentence each."""

    @property
    def several(self) -> bool:
        return self.distributed_type != "NO"

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Config:
        """Reads a file of Stoker or of accelerate, of any age."""
        return cls.from_mapping(load(path), str(path))

    @classmethod
    def from_mapping(cls, mapping: dict[str, Any], where: str = "config") -> Config:
        keys = dict(mapping)
        notes: list[str] = []
        values: dict[str, Any] = {}
        environment = str(keys.pop("compute_environment", "LOCAL_MACHINE"))
        if environment not in ("LOCAL_MACHINE", "0"):
            raise UserError(
                f"{where}: compute_environment is {environment}; Stoker launches on machines you can reach, LOCAL_MACHINE"
            )
        kind = _distributed_type(keys.pop("distributed_type", "NO"), where, notes)
        values["distributed_type"] = kind
        values["mixed_precision"] = _precision(keys, where)
        values["ipex"] = _ipex(keys.pop("ipex_config", None), where)
        values["hostfile"], values["ccl_workers"] = _mpirun(keys.pop("mpirun_config", None), where)
        values["dynamo_backend"] = _dynamo(keys)
        own = _mapping(keys.pop("stoker_config", None), "stoker_config", where)
        values["threads"] = _whole(
            own.get("num_cpu_threads_per_process"), "num_cpu_threads_per_process", where, lowest=1, highest=65536
        )
        values["launcher"] = _one_of(str(own.get("launcher", "auto")), LAUNCHERS, "launcher", where)
        for name, (lowest, highest) in _BOUNDS.items():
            number = _whole(keys.pop(name, None), name, where, lowest=lowest, highest=highest)
            if number is not None:
                values[name] = number
        if values.get("num_processes") == 0:
            raise UserError(
                f"{where}: num_processes is 0; it must be at least 1, or -1 to leave it to the command line"
            )
        for name in ("same_network", "use_cpu"):
            if keys.get(name) is not None:
                values[name] = _truth(keys[name], name, where)
            keys.pop(name, None)
        for name in ("main_process_ip", "main_training_function", "rdzv_backend"):
            if keys.get(name) is not None:
                values[name] = str(keys[name])
            keys.pop(name, None)
        return cls(**values, other=keys, notes=tuple(notes))

    def to_mapping(self) -> dict[str, Any]:
        """Stoker's own file: accelerate's key names, `ipex_config` as it was, and `stoker_config`."""
        mapping = self.plain_keys() | self.other
        mapping["ipex_config"] = {"ipex": self.ipex}
        own = {"launcher": self.launcher, "num_cpu_threads_per_process": self.threads}
        mapping["stoker_config"] = {key: value for key, value in own.items() if value is not None}
        if self.ccl_workers is not None:
            mapping["mpirun_config"] = {**mapping.get("mpirun_config", {}), "mpirun_ccl": str(self.ccl_workers)}
        return dict(sorted(mapping.items()))

    def plain_keys(self) -> dict[str, Any]:
        """The keys that accelerate and Stoker have in common."""
        own = {"hostfile", "ccl_workers", "threads", "launcher", "other", "notes", "ipex", "dynamo_backend"}
        mapping = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in own}
        mapping = {key: value for key, value in mapping.items() if value is not None}
        if self.dynamo_backend != "no":
            nested = self.other.get("dynamo_config") or {}
            mapping["dynamo_config"] = {**nested, "dynamo_backend": self.dynamo_backend.upper()}
        if self.hostfile:
            mapping["mpirun_config"] = {"mpirun_hostfile": self.hostfile}
        return mapping

    def write(self, path: str | os.PathLike[str]) -> None:
        write_mapping(self.to_mapping(), path)


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
    """The keys of a yaml or json file; a sentence for what is not one."""
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
    """The file a launch reads without being told: Stoker's own, else accelerate's; None if there is neither."""
    for path in (own_path(), accelerate_path(), accelerate_path().with_suffix(".json")):
        with contextlib.suppress(OSError):
            if path.is_file():
                return path
    return None


def find(path: str | None) -> tuple[Config, Path | None]:
    """The config named, or the default one, or an empty one."""
    chosen = Path(path) if path else default_path()
    return (Config.read(chosen), chosen) if chosen else (Config(), None)


def _distributed_type(value: Any, where: str, notes: list[str]) -> str:
    kind = str(value).upper()
    if kind in ("NO", "FALSE", "0"):  # `distributed_type: no` without quotes is False in yaml
        return "NO"
    if kind in _REFUSED:
        raise UserError(
            f"{where}: distributed_type {kind} is not for CPUs; make a new file with `stoker config`, or set MULTI_CPU"
        )
    if kind not in _SEVERAL:
        raise UserError(f"{where}: distributed_type is {value!r}; it must be NO or MULTI_CPU")
    if kind != "MULTI_CPU":
        notes.append(f"distributed_type {kind}: launched as MULTI_CPU, with the same number of processes")
    return "MULTI_CPU"


def _precision(keys: dict[str, Any], where: str) -> str:
    old = keys.pop("fp16", None)  # before mixed_precision existed
    value = keys.pop("mixed_precision", None)
    if value is None or value is False:  # `mixed_precision: no` without quotes is False in yaml
        return "fp16" if value is None and old and _truth(old, "fp16", where) else "no"
    return _one_of(str(value).lower(), PRECISIONS, "mixed_precision", where)


def _ipex(value: Any, where: str) -> bool:
    if value is None:
        return True
    if not isinstance(value, dict):
        return _truth(value, "ipex_config", where)
    return _truth(value.get("ipex", True), "ipex_config.ipex", where)


def _mpirun(value: Any, where: str) -> tuple[str | None, int | None]:
    value = _mapping(value, "mpirun_config", where)
    hostfile = value.get("mpirun_hostfile")
    workers = _whole(value.get("mpirun_ccl"), "mpirun_config.mpirun_ccl", where, lowest=0)
    return (str(hostfile) if hostfile else None), workers


def _dynamo(keys: dict[str, Any]) -> str:
    """The backend; what else stands under dynamo_config stays there."""
    value = keys.pop("dynamo_backend", None)  # before dynamo_config existed
    nested = keys.pop("dynamo_config", None)
    if isinstance(nested, dict):
        rest = dict(nested)
        value = rest.pop("dynamo_backend", value)
        if rest:
            keys["dynamo_config"] = rest
    return "no" if value in (None, False) else str(value).lower()


def _mapping(value: Any, name: str, where: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UserError(f"{where}: {name} is {value!r}; it must hold keys and values")
    return value


def _whole(value: Any, name: str, where: str, *, lowest: int, highest: int | None = None) -> int | None:
    if value is None or value == "":
        return None
    number = whole_number(str(value))
    if number is None:
        raise UserError(f"{where}: {name} is {value!r}; it must be a whole number")
    if number < lowest or (highest is not None and number > highest):
        limits = f"from {lowest} to {highest}" if highest is not None else f"{lowest} or more"
        raise UserError(f"{where}: {name} is {value!r}; it must be a whole number, {limits}")
    return number


def _truth(value: Any, name: str, where: str) -> bool:
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word in ("yes", "true", "1", "y", "on"):
        return True
    if word in ("no", "false", "0", "n", "off", "none", ""):
        return False
    raise UserError(f"{where}: {name} is {value!r}; it must be true or false")


def _one_of(value: str, choices: tuple[str, ...], name: str, where: str) -> str:
    if value not in choices:
        raise UserError(f"{where}: {name} is {value!r}; it must be one of {', '.join(choices)}")
    return value
