"""Which options change what a run computes, and which only where it writes, what it shows, and how fast it is.

An option that is not listed counts as one that changes the result: a new one is never ignored by mistake.
"""

from __future__ import annotations

__all__ = ["changes_result"]

_PLACES = (
    "", "output_dir", "run_name", "project", "logging_dir", "cache_dir", "resume_from_checkpoint", "overwrite_output_dir",
    "overwrite_cache", "token", "use_auth_token", "trust_remote_code", "push_to_hub", "model_card",
)  # fmt: skip
_SHOWN = (
    "disable_tqdm", "report_to", "include_num_input_tokens_seen", "include_tokens_per_second", "live", "live_port", "live_host",
    "debug", "skip_memory_metrics", "samples", "merge", "strict", "stop_on_nan", "return_entity_level_metrics",
)  # fmt: skip
_EVALUATION = (
    "do_train", "do_eval", "do_predict", "validation_file", "test_file", "max_eval_samples", "max_predict_samples",
    "per_device_eval_batch_size", "per_gpu_eval_batch_size", "prediction_loss_only", "include_for_metrics",
    "batch_eval_metrics", "bf16_full_eval", "fp16_full_eval", "jit_mode_eval", "evaluation_strategy", "metric_name",
    "n_best_size", "max_answer_length", "null_score_diff_threshold", "precompute_ref_batch_size",
)  # fmt: skip
_SPEED = (
    "use_cpu", "no_cuda", "use_ipex", "use_mps_device", "xpu_backend", "local_rank", "use_cache", "torch_empty_cache_steps",
    "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor",
    "dataloader_multiprocessing_context", "dataloader_in_order", "preprocessing_num_workers", "dataset_num_proc",
    "skip_memory_check", "mini_batch_size", "pad_to_max_length", "pad_to_multiple_of", "remove_unused_columns",
    "length_column_name", "use_fast_tokenizer", "full_determinism", "deepspeed", "parallelism_config", "accelerator_config",
    "ignore_data_skip", "restore_callback_states_from_checkpoint", "ignore_mismatched_sizes", "enable_jit_checkpoint",
    "precompute_ref_log_probs", "balance_tokens", "tpu_num_cores",
)  # fmt: skip
_NAMES = frozenset((*_PLACES, *_SHOWN, *_EVALUATION, *_SPEED))
_BEGINNINGS = (
    "eval_", "save_", "log_", "logging_", "hub_", "trackio_", "ddp_", "fsdp", "torch_compile", "gradient_checkpointing",
    "activation_", "fp16_", "half_precision_",
)  # fmt: skip


def changes_result(name: str) -> bool:
    """Whether another value of this option trains other weights, up to rounding."""
    return name not in _NAMES and not name.startswith(_BEGINNINGS)
