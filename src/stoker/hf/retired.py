"""Words of TrainingArguments that transformers no longer knows: what each meant, and what it does now.

Data only. `stoker.hf.arguments` turns the table into arguments of its own; whoever meets these words elsewhere (a launcher,
a script that is not to be edited) reads the same table.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RETIRED", "Retired", "retired"]


@dataclass(frozen=True)
class Retired:
    name: str
    type: type
    """bool, int, float or str; a bool may be given bare on the command line."""
    meant: str
    now: str
    """What happens, to follow "`name`: "."""
    renamed: str | None = None
    """The argument of today that takes the value as it is."""
    ignored: bool = False
    """Accepted, said, and without effect, because what it switched is gone or always so."""


RETIRED: tuple[Retired, ...] = (
    Retired("use_ipex", bool, "use Intel Extension for PyTorch", "Stoker's own optimisations are used (they are the default)"),
    Retired("no_cuda", bool, "do not use a GPU", "same as use_cpu", renamed="use_cpu"),
    Retired("xpu_backend", str, "backend between processes", "same as ddp_backend", renamed="ddp_backend"),
    Retired("overwrite_output_dir", bool, "start over in a used folder", "checkpoints in output_dir are not resumed from"),
    Retired("group_by_length", bool, "batches of similar length", "same as train_sampling_strategy=group_by_length"),
    Retired("warmup_ratio", float, "share of the steps to warm up in", "same as warmup_steps with a share below 1"),
    Retired("logging_dir", str, "folder of TensorBoard's files", "TensorBoard writes there"),
    Retired("jit_mode_eval", bool, "evaluate with torch.jit", "evaluation is already padding-free", ignored=True),
    Retired("evaluation_strategy", str, "when to evaluate", "same as eval_strategy", renamed="eval_strategy"),
    Retired(
        "per_gpu_train_batch_size", int, "batch size", "same as per_device_train_batch_size",
        renamed="per_device_train_batch_size",
    ),
    Retired(
        "per_gpu_eval_batch_size", int, "batch size of evaluation", "same as per_device_eval_batch_size",
        renamed="per_device_eval_batch_size",
    ),
    Retired("save_safetensors", bool, "write weights as safetensors", "weights are always safetensors", ignored=True),
    Retired("half_precision_backend", str, "library for mixed precision", "it is always torch's own", ignored=True),
    Retired("fp16_backend", str, "library for mixed precision", "it is always torch's own", ignored=True),
    Retired("fp16_opt_level", str, "level of Apex", "Apex is not used", ignored=True),
    Retired("use_mps_device", bool, "use Apple's GPU", "Stoker trains on the CPU", ignored=True),
    Retired("past_index", int, "position of the model's memory", "no supported model has one", ignored=True),
    Retired("tpu_num_cores", int, "cores of a TPU", "Stoker trains on the CPU", ignored=True),
    Retired("include_tokens_per_second", bool, "log tokens per second", "they are always logged", ignored=True),
)  # fmt: skip


def retired(name: str) -> Retired | None:
    """The row of a word, None if it is not retired."""
    return next((row for row in RETIRED if row.name == name), None)
