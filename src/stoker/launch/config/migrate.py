"""`stoker config migrate`: a file for today's accelerate and Stoker, and one sentence for each retired key of the old one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stoker.launch.config.config_file import Config

__all__ = ["explain", "for_accelerate", "unknown"]

_TPU = "for TPUs; kept, ignored by Stoker"
# Keys of accelerate that make no difference on CPUs. They stay in the file, because today's accelerate accepts them.
_UNUSED = {
    **dict.fromkeys(
        ("downcast_bf16", "tpu_env", "tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm"), _TPU
    ),
    **dict.fromkeys(("commands", "command_file"), "for TPU pods; kept, ignored by Stoker"),
    "gpu_ids": "for GPUs; kept, ignored by Stoker",
    "debug": "kept: accelerate's own checks of collectives",
    "enable_cpu_affinity": "kept; Stoker gives every process its own cores anyway",
    "fsdp_config": "kept; Stoker launches the processes, the script decides on FSDP",
    "parallelism_config": "kept; Stoker launches the processes, the script decides on it",
    "dynamo_config": "kept: torch.compile as the script's accelerate reads it",
    "fp8_config": "kept; CPUs have no fp8 arithmetic",
    "deepspeed_config": "kept, ignored: Stoker does not launch DeepSpeed",
    "megatron_lm_config": "kept, ignored: Stoker does not launch Megatron-LM",
}


def for_accelerate(config: Config) -> dict[str, Any]:
    """A file that today's accelerate accepts as well: without the keys it refuses or ignores."""
    left_out = {"ipex_config", "stoker_config", *(config.other.keys() - _UNUSED.keys())}
    mapping = replace(config, ccl_workers=None).to_mapping()
    return {key: value for key, value in mapping.items() if key not in left_out}


def unknown(config: Config) -> list[str]:
    """Keys that no release of accelerate or Stoker has had: mostly typing errors."""
    return [key for key in config.other if key not in _UNUSED and key != "use_xpu"]


def explain(old: dict[str, Any], config: Config) -> list[str]:
    """One sentence for each key of `old` that today's accelerate or Stoker treats differently."""
    lines = list(config.notes)
    if "ipex_config" in old:
        lines.append(_ipex(old["ipex_config"], config))
    mpirun = old.get("mpirun_config")
    if isinstance(mpirun, dict) and "mpirun_ccl" in mpirun:
        lines.append(
            f"mpirun_config.mpirun_ccl: oneCCL worker threads per process ({mpirun['mpirun_ccl']}); today's accelerate "
            "ignores it silently. Left out of the new file; use `stoker launch --mpirun_ccl N` to keep cores free for them"
        )
    if "fp16" in old:
        lines.append(f"fp16: {old['fp16']}: now mixed_precision: {config.mixed_precision or 'no'}")
    if "dynamo_backend" in old:
        lines.append(f"dynamo_backend: {old['dynamo_backend']}: now under dynamo_config")
    if "use_xpu" in old or (isinstance(old.get("ipex_config"), dict) and "use_xpu" in old["ipex_config"]):
        lines.append("use_xpu: for Intel GPUs, which Stoker does not use; left out")
    if "stoker_config" in old:
        lines.append(
            "stoker_config: threads and launcher, unknown to accelerate; left out, use the options of `stoker launch`"
        )
    unknown_key = "unknown to accelerate and to Stoker; left out"
    return lines + [f"{key}: {_UNUSED.get(key, unknown_key)}" for key in config.other if key != "use_xpu"]


def _ipex(value: Any, config: Config) -> str:
    if config.ipex is not False:
        return (
            f"ipex_config: {value}: asked for Intel Extension for PyTorch, which is discontinued; today's accelerate refuses "
            "the key. Left out: `stoker launch` applies Stoker's optimisations by default"
        )
    return (
        f"ipex_config: {value}: asked for no optimisation; today's accelerate refuses the key. Left out: "
        "start with `stoker launch --no-ipex`"
    )
