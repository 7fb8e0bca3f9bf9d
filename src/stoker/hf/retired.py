"""Arguments that TrainingArguments no longer has: what each meant, and what it does now.

Data only: `stoker.hf.arguments` turns the rows into arguments, and the launcher reads the same table.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RETIRED", "Retired"]


@dataclass(frozen=True)
class Retired:
    name: str
    type: type
    """bool, int, float or str; a bool needs no value on the command line."""
    meant: str
    now: str
    """What happens now; the text is printed after "`name`: "."""
    renamed: str | None = None
    """The argument that takes the value today."""


RETIRED: tuple[Retired, ...] = (
    Retired("use_ipex", bool, "use Intel Extension for PyTorch", "Stoker's own optimisations are used (they are the default)"),
    Retired("no_cuda", bool, "do not use a GPU", "same as use_cpu", renamed="use_cpu"),
    Retired("xpu_backend", str, "backend between processes", "same as ddp_backend", renamed="ddp_backend"),
    Retired("overwrite_output_dir", bool, "start over in a used folder", "checkpoints in output_dir are not resumed from"),
    Retired("group_by_length", bool, "batches of similar length", "same as train_sampling_strategy=group_by_length"),
    Retired("warmup_ratio", float, "share of the steps to warm up in", "same as warmup_steps with a share below 1"),
    Retired("logging_dir", str, "folder of TensorBoard's files", "TensorBoard writes there"),
    Retired("jit_mode_eval", bool, "evaluate with torch.jit", "evaluation is already padding-free"),
    Retired("evaluation_strategy", str, "when to evaluate", "same as eval_strategy", renamed="eval_strategy"),
    Retired(
        "per_gpu_train_batch_size", int, "batch size", "same as per_device_train_batch_size",
        renamed="per_device_train_batch_size",
    ),
    Retired(
        "per_gpu_eval_batch_size", int, "batch size of evaluation", "same as per_device_eval_batch_size",
        renamed="per_device_eval_batch_size",
    ),
    Retired("save_safetensors", bool, "write weights as safetensors", "weights are always safetensors"),
    Retired("half_precision_backend", str, "library for mixed precision", "it is always torch's own"),
    Retired("fp16_backend", str, "library for mixed precision", "it is always torch's own"),
    Retired("fp16_opt_level", str, "level of Apex", "Apex is not used"),
    Retired("use_mps_device", bool, "use Apple's GPU", "Stoker trains on the CPU"),
    Retired("past_index", int, "position of the model's memory", "no supported model has one"),
    Retired("tpu_num_cores", int, "cores of a TPU", "Stoker trains on the CPU"),
    Retired("include_tokens_per_second", bool, "log tokens per second", "they are always logged"),
)  # fmt: skip
