"""What became of the keys of old config files, and `stoker config migrate`: a file for today, and a sentence per key."""

from __future__ import annotations

from typing import Any

from stoker.launch.config.config_file import Config

__all__ = ["explain", "for_accelerate", "unknown"]

# Keys of accelerate that have no bearing on CPUs. They stay in the file, since today's accelerate takes them.
_PASSED_OVER = {
    "downcast_bf16": "for TPUs; kept, without effect here",
    "tpu_env": "for TPUs; kept, without effect here",
    "tpu_name": "for TPUs; kept, without effect here",
    "tpu_zone": "for TPUs; kept, without effect here",
    "tpu_use_cluster": "for TPUs; kept, without effect here",
    "tpu_use_sudo": "for TPUs; kept, without effect here",
    "tpu_vm": "for TPUs; kept, without effect here",
    "commands": "for TPU pods; kept, without effect here",
    "command_file": "for TPU pods; kept, without effect here",
    "gpu_ids": "for GPUs; kept, without effect here",
    "debug": "kept: accelerate's own checks of collectives",
    "enable_cpu_affinity": "kept; Stoker places every process on its own cores anyway",
    "fsdp_config": "kept; Stoker launches the processes, the script decides on FSDP",
    "parallelism_config": "kept; Stoker launches the processes, the script decides on it",
    "dynamo_config": "kept: torch.compile as the script's accelerate reads it",
    "fp8_config": "kept; CPUs have no fp8 arithmetic",
    "deepspeed_config": "kept, without effect here: DeepSpeed is not launched by Stoker",
    "megatron_lm_config": "kept, without effect here: Megatron-LM is not launched by Stoker",
}


def for_accelerate(config: Config) -> dict[str, Any]:
    """A file that today's accelerate accepts as well: without the keys it refuses."""
    passed_over = {key: value for key, value in config.other.items() if key in _PASSED_OVER}
    return dict(sorted((passed_over | config.plain_keys()).items()))


def unknown(config: Config) -> list[str]:
    """Keys of a file that neither accelerate nor Stoker has ever known: typing errors, mostly."""
    return [key for key in config.other if key not in _PASSED_OVER and key != "use_xpu"]


def explain(old: dict[str, Any], config: Config) -> list[str]:
    """One sentence for each key of `old` that today's accelerate or Stoker treats differently from its day."""
    said = list(config.notes)
    if "ipex_config" in old:
        said.append(_ipex(old["ipex_config"], config))
    mpirun = old.get("mpirun_config")
    if isinstance(mpirun, dict) and "mpirun_ccl" in mpirun:
        said.append(
            f"mpirun_config.mpirun_ccl: oneCCL worker threads per process ({mpirun['mpirun_ccl']}); today's accelerate "
            "ignores it in silence. Left out of the new file; give `stoker launch --mpirun_ccl N` to keep cores free for them"
        )
    if "fp16" in old:
        said.append(f"fp16: {old['fp16']}: now mixed_precision: {config.mixed_precision}")
    if "dynamo_backend" in old:
        said.append(f"dynamo_backend: {old['dynamo_backend']}: now under dynamo_config")
    if "use_xpu" in old or (isinstance(old.get("ipex_config"), dict) and "use_xpu" in old["ipex_config"]):
        said.append("use_xpu: for Intel GPUs, which Stoker does not drive; left out")
    if "stoker_config" in old:
        said.append(
            "stoker_config: threads and launcher, unknown to accelerate; left out, give them to `stoker launch`"
        )
    for key in config.other:
        if key == "use_xpu":
            continue
        said.append(f"{key}: {_PASSED_OVER.get(key, 'unknown to accelerate and to Stoker; left out')}")
    return said


def _ipex(value: Any, config: Config) -> str:
    if config.ipex:
        return (
            f"ipex_config: {value}: asked for Intel Extension for PyTorch, which is discontinued; today's accelerate refuses "
            "the key. Left out: `stoker launch` applies Stoker's optimisations by default"
        )
    return (
        f"ipex_config: {value}: asked for no optimisation; today's accelerate refuses the key. Left out: "
        "start with `stoker launch --no-ipex`"
    )
