"""Every private or fragile name of torch, transformers, accelerate and argparse that Stoker relies on, in one table.

A part of Stoker asks `supported` when it is imported or first used. If the installed library no longer has what the part
needs, one sentence is logged and the part is left out; `require` refuses instead, where going on would be wrong. Two tests
keep the table whole: one compares it with the installed libraries, one looks for private names in `src/` that it lacks.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import platform
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, TypeVar

from stoker.errors import UserError

__all__ = ["PARTS", "VERSIONS", "Part", "Versions", "drop_unsupported", "missing", "release", "require", "supported"]

log = logging.getLogger("stoker")


@dataclass(frozen=True)
class Versions:
    oldest: str
    newest: str
    """The tests run with both."""
    below: str
    """Newer versions are accepted up to this one: the table below says what no longer works with them."""

    @property
    def range(self) -> str:
        """As pip writes it."""
        return f">={self.oldest},<{self.below}"

    def include(self, found: tuple[int, ...]) -> bool:
        return release(self.oldest) <= found < release(self.below)


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version: 2.13.0+cpu -> (2, 13, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


VERSIONS = {
    "torch": Versions("2.13.0", "2.13.0", below="3"),
    "transformers": Versions("4.57.1", "5.23.0", below="6"),
    "accelerate": Versions("1.3.0", "1.15.0", below="2"),
    "trl": Versions("1.16.0", "1.16.0", below="2"),
    "sentence-transformers": Versions("6.2.0", "6.2.0", below="7"),
    "setfit": Versions("1.2.0", "1.2.0", below="2"),
}


@dataclass(frozen=True)
class Part:
    otherwise: str
    """What happens where a name is missing; completes "..., because torch 2.13 has no ..."."""
    needs: tuple[str, ...]
    """`module:name`                   it exists
    `module:Class.method(a, b)`     it takes exactly these parameters
    `module:Class.method(a, ...)`   more may follow if they have defaults
    `module:Class(*, a, b)`         it takes these by keyword, among others
    `module:function{a, b}`         its code refers to these attributes
    `one | other`                   either will do, as versions differ
    """


_TRAINER = "transformers.trainer:Trainer"
_ARGUMENTS = "transformers.training_args:TrainingArguments"
_ACCELERATOR = "accelerate.accelerator:Accelerator"
_DEBERTA = "transformers.models.deberta_v2.modeling_deberta_v2:DebertaV2"

PARTS: dict[str, Part] = {
    "optimize": Part(
        "models are not optimised",
        (
            "torch:Tensor._base",
            "torch._C:DisableTorchFunctionSubclass",
            "torch._C:_are_functorch_transforms_active",
            "torch._C:_current_graph_task_id",
            "torch._C:_functions.DelayedError",
            "torch._C:_len_torch_dispatch_stack",
            "torch.autograd.forward_ad:_current_level",
            "torch.nn.modules.module:_has_any_global_hook",
            "torch.fx._symbolic_trace:_is_fx_tracing_flag",
            "torch.utils.weak:TensorWeakRef",
            # Not __init__, which torch.compile wraps.
            "torch.nn:Module.named_modules{_modules}",
            "torch.nn:Module.register_parameter{_parameters}",
            "torch.nn:Module.register_forward_hook{_forward_hooks}",
            "torch.nn:Module.register_forward_pre_hook{_forward_pre_hooks}",
            "torch.nn:Module.register_full_backward_hook{_backward_hooks}",
            "torch.nn:Module.register_full_backward_pre_hook{_backward_pre_hooks}",
        ),
    ),
    "frozen weights under DDP": Part(
        "models with frozen weights in few bits cannot be wrapped by DDP",
        ("torch.nn.parallel:DistributedDataParallel.__init__{_ddp_params_and_buffers_to_ignore}",),
    ),
    "fused optimizers": Part(
        "optimizers keep their own implementation",
        (
            "torch.optim:Adam.__init__{_step_supports_amp_scaling}",
            "torch.optim:Adagrad.__init__{_step_supports_amp_scaling, _need_device_dtype_check_for_fused}",
            "torch.optim:SGD.__init__{_step_supports_amp_scaling, _need_device_dtype_check_for_fused}",
        ),
    ),
    "optimizers in one call": Part(
        "AdamW, Adam and clipping are torch's own",
        (
            "torch:Tensor._cdata",
            "torch.optim:Adam._init_group(group, params_with_grad, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps)",
            "torch.optim:Adam.step{_init_group}",
        ),
    ),
    "padding-free models": Part(
        "batches are computed with their padding",
        (
            "transformers:PretrainedConfig._attn_implementation",
            "transformers.integrations.neftune:neftune_post_forward_hook | transformers.trainer_utils:neftune_post_forward_hook",
        ),
    ),
    "DeBERTa": Part(
        "DeBERTa models are computed with their padding",
        (
            f"{_DEBERTA}Encoder.get_rel_pos(hidden_states, query_states, relative_pos)",
            f"{_DEBERTA}Layer.forward(hidden_states, attention_mask, query_states, relative_pos, rel_embeddings, ...)",
        ),
    ),
    "attention interface": Part(
        "the attention implementation 'stoker' is not available, and models outside the table keep their padding",
        (
            "torch:Tensor._make_wrapper_subclass",
            "torch._C:_disabled_torch_function_impl",
            "transformers.modeling_utils:AttentionInterface.register(key, value)",
            "transformers.modeling_utils:PreTrainedModel._can_set_attn_implementation",
            "transformers.modeling_utils:PreTrainedModel._supports_flash_attn",
            "transformers.modeling_utils:PreTrainedModel._supports_sdpa",
            "transformers:PretrainedConfig._attn_implementation",
            "transformers:PretrainedConfig.sub_configs",
            "transformers.masking_utils:AttentionMaskInterface.register(key, value)",
            "transformers.masking_utils:and_masks",
            "transformers.masking_utils:eager_mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, "
            "attention_mask, ...)",
            "transformers.masking_utils:packed_sequence_mask_function(packed_sequence_mask)",
            "transformers.masking_utils:sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, "
            "attention_mask, local_size, ...)",
            "transformers.integrations.sdpa_attention:sdpa_attention_forward(module, query, key, value, attention_mask, ...)",
        ),
    ),
    "masked-LM loss": Part(
        "the masked-LM loss is computed as transformers does",
        ("transformers.modeling_utils:PreTrainedModel.loss_function{_loss_function}",),
    ),
    "TRL head": Part(
        "TRL's trainers score every position, prompts and padding included",
        (
            "trl.trainer.utils:_ChunkedLogProbFunction.forward(ctx, hidden, weight, bias, targets, temperature, chunk_size, "
            "final_logit_softcapping, logit_scale, outputs)",
            "trl.trainer.utils:_use_triton(device)",
        ),
    ),
    "Trainer: optimisation": Part(
        "the Trainer does not optimise models",
        (f"{_TRAINER}.create_optimizer(...)", f"{_TRAINER}._wrap_model(model, training, ...)"),
    ),
    "Trainer: checkpoints": Part(
        "the Trainer saves and logs as transformers does, without complete checkpoints, exact resume, a checkpoint on SIGTERM, "
        "the run log and the check for NaN",
        (
            f"{_TRAINER}.train(resume_from_checkpoint, trial, ignore_keys_for_eval, ...)",
            f"{_TRAINER}.save_model(output_dir, _internal_call)",
            f"{_TRAINER}._evaluate(trial, ignore_keys_for_eval, ...)",
            f"{_TRAINER}._get_output_dir(trial)",
            f"{_TRAINER}._load_best_model()",
            f"{_TRAINER}._load_optimizer_and_scheduler(checkpoint)",
            f"{_TRAINER}._load_rng_state(checkpoint)",
            f"{_TRAINER}._maybe_log_save_evaluate(tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, "
            "start_time, learning_rate)",
            f"{_TRAINER}._push_from_checkpoint(checkpoint_folder)",
            f"{_TRAINER}._save_checkpoint(model, trial)",
            f"{_TRAINER}._save_rng_state(output_dir)",
            # What deletes checkpoints at the end of training in transformers 5, and in transformers 4.
            f"{_TRAINER}._finalize_training(trial, num_train_samples, start_time) | "
            f"{_TRAINER}._sorted_checkpoints(output_dir, checkpoint_prefix, use_mtime)",
            f"{_TRAINER}.__init__{{callback_handler, is_in_train}}",
        ),
    ),
    "Trainer: healing": Part(
        "--heal is ignored: a run in which a rank is killed restarts from its last checkpoint",
        (
            f"{_TRAINER}._inner_training_loop(batch_size, args, resume_from_checkpoint, trial, ignore_keys_for_eval)",
            f"{_TRAINER}._get_learning_rate()",
            f"{_TRAINER}._inner_training_loop{{_globalstep_last_logged, _total_loss_scalar}}",
            # Before transformers 5 the loop keeps the loss to itself.
            f"{_TRAINER}._inner_training_loop{{_tr_loss}} | {_TRAINER}._inner_training_loop{{_total_loss_scalar}}",
            f"{_TRAINER}.__init__{{callback_handler, control, model_wrapped}}",
            "transformers.trainer_callback:CallbackHandler.on_train_begin(args, state, control, ...)",
            "transformers.trainer_callback:CallbackHandler.on_epoch_end(args, state, control, ...)",
            "transformers.trainer_callback:ExportableState.state()",
            "accelerate.state:GradientState.dataloader_references",
            "torch.nn.parallel:DistributedDataParallel._remove_autograd_hooks()",
        ),
    ),
    "Trainer: batches": Part(
        "the Trainer forms batches as transformers does and ignores tokens_per_batch",
        (
            f"{_TRAINER}.get_train_dataloader()",
            f"{_TRAINER}._get_collator_with_removed_columns(data_collator, description)",
        ),
    ),
    "Trainer: random collators": Part(
        "a resumed run draws other random numbers in data sets and collators than the run it continues",
        (
            "torch.utils.data._utils.fetch:_MapDatasetFetcher.fetch{__getitems__}",
            "accelerate.data_loader:DataLoaderAdapter.__init__{base_dataloader}",
            "transformers.trainer_callback:CallbackHandler.call_event{train_dataloader}",
        ),
    ),
    "Trainer: step": Part(
        "the Trainer does not measure its steps",
        (
            f"{_TRAINER}.training_step(model, inputs, ...)",
            f"{_TRAINER}.compute_loss(model, inputs, ...)",
            f"{_TRAINER}.evaluate(eval_dataset, ignore_keys, metric_key_prefix)",
            f"{_TRAINER}.evaluation_loop(dataloader, description, ...)",
            f"{_TRAINER}.get_batch_samples(epoch_iterator, num_batches, device)",
            f"{_TRAINER}.log(logs, ...)",
            f"{_TRAINER}.__init__{{model_accepts_loss_kwargs, compute_loss_func}}",
        ),
    ),
    "Trainer: host time": Part(
        "the Trainer's steps cost as much host time as those of transformers",
        (
            f"{_TRAINER}.floating_point_ops(inputs)",
            f"{_TRAINER}.create_scheduler(num_training_steps, ...)",
            "accelerate.optimizer:AcceleratedOptimizer.step(closure)",
        ),
    ),
    "label smoothing": Part(
        "label smoothing computes the logits of all positions, as transformers does",
        (
            "transformers.trainer_pt_utils:LabelSmoother(epsilon, ignore_index)",
            "transformers.trainer_pt_utils:LabelSmoother.__call__(model_output, labels, shift_labels, ...)",
            f"{_TRAINER}.__init__{{label_smoother}}",
        ),
    ),
    "Trainer: hub": Part(
        "the Trainer publishes as transformers does",
        (
            f"{_TRAINER}.init_hf_repo(token, ...)",
            f"{_TRAINER}.create_model_card(...)",
            f"{_TRAINER}._finish_current_push()",
        ),
    ),
    "hyperparameter search": Part(
        "`stoker tune` cannot search",
        (
            f"{_TRAINER}.hyperparameter_search(hp_space, compute_objective, n_trials, direction, backend, hp_name, ...)",
            f"{_TRAINER}._report_to_hp_search(trial, step, metrics)",
            f"{_TRAINER}.__init__{{hp_name, hp_search_backend}}",
            "transformers.integrations.integration_utils:run_hp_search_optuna{objective, train}",
        ),
    ),
    "masked-LM task": Part(
        "`stoker train mlm` cannot train",
        (
            f"{_TRAINER}.get_eval_dataloader(eval_dataset)",
            f"{_TRAINER}.prediction_step(model, inputs, prediction_loss_only, ignore_keys)",
            f"{_TRAINER}._prepare_inputs(inputs)",
        ),
    ),
    "TRL trainers": Part(
        "`stoker train sft` cannot train",
        (
            "trl:SFTTrainer.compute_loss(model, inputs, return_outputs, num_items_in_batch)",
            "trl:SFTTrainer.__init__{aux_loss_enabled, _metrics}",
            "trl:SFTTrainer._send_telemetry()",
            "trl:DPOTrainer._send_telemetry()",
        ),
    ),
    "sentence-transformers trainers": Part(
        "`stoker train embed` and `stoker train rerank` cannot train",
        ("sentence_transformers:SentenceTransformerTrainer.add_model_card_callback(default_args_dict)",),
    ),
    "few-shot models": Part(
        "`stoker train fewshot` cannot train",
        (
            "sentence_transformers:SentenceTransformerTrainer._save(output_dir, ...)",
            "setfit:SetFitModel.fit(x_train, y_train, num_epochs, ...)",
            "setfit:sample_dataset(dataset, label_column, num_samples, seed)",
            "setfit.sampler:ContrastiveDataset(*, num_iterations, sampling_strategy, max_pairs)",
        ),
    ),
    "exported embedding models": Part(
        "embedding models and rerankers that were exported cannot be loaded",
        (
            "sentence_transformers:SentenceTransformer._load_with_module_classes",
            "sentence_transformers.base.modules.transformer:Transformer._load_model(model_name_or_path, transformer_task, "
            "config, backend, is_peft_model, ...)",
        ),
    ),
    "TrainingArguments": Part(
        "retired arguments are not accepted",
        (
            f"{_ARGUMENTS}.__post_init__()",
            f"{_ARGUMENTS}.ddp_timeout_delta",
            f"{_ARGUMENTS}.process_index",
        ),
    ),
    "process group": Part(
        "accelerate joins the processes, through gloo and without ddp_timeout",
        (
            "accelerate:PartialState.__init__(cpu, ...)",
            "accelerate.utils:get_cpu_distributed_information()",
            "accelerate.utils:InitProcessGroupKwargs(*, backend, timeout)",
        ),
    ),
    "Accelerator": Part(
        "Accelerator does not optimise models",
        (
            f"{_ACCELERATOR}.prepare(args, device_placement)",
            f"{_ACCELERATOR}.load_state(input_dir, ...)",
            f"{_ACCELERATOR}.wait_for_everyone()",
            f"{_ACCELERATOR}.device",
            f"{_ACCELERATOR}.mixed_precision",
        ),
    ),
    "gradient clipping": Part(
        "gradients are clipped as accelerate does",
        (f"{_ACCELERATOR}.clip_grad_norm_(parameters, max_norm, norm_type)", f"{_ACCELERATOR}.unscale_gradients(...)"),
    ),
    "local SGD": Part(
        "local SGD cannot be used",
        (
            f"{_ACCELERATOR}.prepare_model(*, evaluation_mode)",
            f"{_ACCELERATOR}.backward(loss, ...)",
            f"{_ACCELERATOR}.sync_gradients",
            f"{_ACCELERATOR}.register_save_state_pre_hook(hook)",
            f"{_ACCELERATOR}.register_load_state_pre_hook(hook)",
        ),
    ),
    "DDP settings": Part(
        "DDP keeps accelerate's settings",
        (
            f"{_ACCELERATOR}.__init__{{ddp_handler}}",
            "accelerate.utils:DistributedDataParallelKwargs(*, bucket_cap_mb, gradient_as_bucket_view)",
        ),
    ),
    "own address": Part(
        "scripts that choose the address of their ranks themselves wait for a store until their time-out",
        ("torch.distributed.rendezvous:_create_c10d_store(hostname, port, rank, world_size, timeout, ...)",),
    ),
    "job store": Part(
        "the ranks of a launch meet in torch's own store, to which everybody can write who reaches its port",
        ("torch.distributed.rendezvous:_create_c10d_store(hostname, port, rank, world_size, timeout, ...)",),
    ),
    "elastic launch": Part(
        "several processes cannot be started",
        (
            "torch.distributed.launcher.api:LaunchConfig(*, min_nodes, max_nodes, nproc_per_node, run_id, rdzv_backend, "
            "rdzv_endpoint, max_restarts, local_addr, shutdown_timeout, logs_specs)",
            "torch.distributed.launcher.api:elastic_launch(config, entrypoint, ...)",
            "torch.distributed.elastic.multiprocessing.api:DefaultLogsSpecs(log_dir, ...)",
            "torch.distributed.elastic.multiprocessing.api:SignalException",
            "torch.distributed.elastic.multiprocessing.errors:ChildFailedError",
            "torch.distributed.elastic.rendezvous:rendezvous_handler_registry.register(backend, creator)",
            "torch.distributed.elastic.rendezvous:RendezvousInfo(store, rank, world_size, bootstrap_store_info)",
            "torch.distributed.elastic.rendezvous.static_tcp_rendezvous:StaticTCPRendezvous(master_addr, master_port, rank, "
            "world_size, run_id, timeout)",
            "torch.distributed.elastic.rendezvous.static_tcp_rendezvous:StaticTCPRendezvous.next_rendezvous{_store, "
            "master_port, rank, world_size}",
        ),
    ),
    "ccl": Part(
        "the ccl backend cannot be used",
        (
            "torch.distributed:ProcessGroupGloo._Options",
            "torch.distributed:ProcessGroupGloo.create_default_device",
            "torch.distributed:ProcessGroupGloo.create_device",
            "torch.distributed:ProcessGroupGloo._set_sequence_number_for_group",
            "torch.distributed:ProcessGroupGloo._Options._devices",
            "torch.distributed:ProcessGroupGloo._Options._timeout",
        ),
    ),
    "healing": Part(
        "--heal is ignored: a run in which a rank is killed restarts from its last checkpoint",
        (
            "torch.distributed:ProcessGroup.abort",
            "torch.distributed.distributed_c10d:_world.group_count",
            "torch.testing._internal.distributed.fake_pg:FakeProcessGroup",
        ),
    ),
    "destroyed groups": Part(
        "a script that calls destroy_process_group may hang when it ends",
        (
            "torch.distributed.distributed_c10d:destroy_process_group(group)",
            "torch.distributed.distributed_c10d:GroupMember.WORLD",
        ),
    ),
    "torch_compile_mode": Part(
        "--torch_compile_mode is not checked before training", ("torch._inductor:list_mode_options(...)",)
    ),
    "modules that are being imported": Part(
        "the attention implementation 'stoker' is not available if transformers is imported before torch and Stoker",
        ("importlib._bootstrap:_load_unlocked{_initializing}",),
    ),
    "option names": Part(
        "the options of this command cannot be listed",
        ("argparse:_ActionsContainer.__init__{_option_string_actions}",),
    ),
    "option values": Part(
        "options are not checked for inf, NaN and text that is not UTF-8",
        ("argparse:ArgumentParser._get_value(action, arg_string)",),
    ),
}

_NEED = re.compile(r"(?P<module>[\w.]+):(?P<path>[\w.]+)(\((?P<parameters>[^)]*)\))?(\{(?P<inside>[^}]*)\})?")


@functools.cache
def supported(part: str) -> bool:
    """Whether the installed libraries have what `part` needs. Rank 0 logs it once if they do not."""
    if not missing(part):
        return True
    if os.environ.get("RANK", "0") == "0":
        log.warning("%s", _sentence(part))
    return False


def require(part: str) -> None:
    """Raises UserError if the installed libraries lack what `part` needs."""
    if missing(part):
        raise UserError(_sentence(part))


def _sentence(part: str) -> str:
    """What does not work, why, and what to install."""
    from importlib import metadata

    lacking = missing(part)[0]
    library = lacking.partition(":")[0].partition(".")[0].replace("_", "-")
    names = " or ".join(one.partition(":")[2] for one in lacking.split(" | "))
    if library not in VERSIONS:
        return f"{PARTS[part].otherwise}, because Python {platform.python_version()} has no {names} in {library}"
    return (
        f"{PARTS[part].otherwise}, because {library} {metadata.version(library)} has no {names}; "
        f"install {library}=={VERSIONS[library].newest}, the newest version that Stoker was tested with"
    )


@functools.cache
def missing(part: str) -> tuple[str, ...]:
    """The needs of a part that the installed libraries do not meet."""
    return tuple(need for need in PARTS[part].needs if not any(map(_met, need.split(" | "))))


def _met(need: str) -> bool:
    import inspect

    parsed = _NEED.fullmatch(need)
    assert parsed is not None, need
    try:
        found: Any = importlib.import_module(parsed["module"])
        for name in parsed["path"].split("."):
            found = _stock(getattr(found, name))
        if parsed["parameters"] is not None:
            return _takes(inspect.signature(found), _names(parsed["parameters"]))
    except (ImportError, AttributeError, TypeError, ValueError):
        return False
    return parsed["inside"] is None or set(_names(parsed["inside"])) <= _names_in_code(found)


def _stock(found: Any) -> Any:
    """The library's own class where Stoker's, or a subclass of it that carries the library's name, is in its place."""
    if not isinstance(found, type):
        return found
    bases = [base for base in found.__mro__ if not base.__module__.startswith("stoker.")]
    # Classes that `stoker launch` makes bear the name of the class that they replace, which comes last among them.
    named = (bases[0].__module__, bases[0].__qualname__)
    return [base for base in bases if (base.__module__, base.__qualname__) == named][-1]


def _names(listed: str) -> list[str]:
    return [name.strip() for name in listed.split(",") if name.strip()]


def _takes(signature: Any, wanted: list[str]) -> bool:
    """Whether a callable of this `signature` takes the `wanted` parameters, written as in `Part.needs`."""
    names = [name for name in signature.parameters if name != "self"]
    if wanted[:1] == ["*"]:
        return set(wanted[1:]) <= set(names)
    if wanted[-1:] != ["..."]:
        return names == wanted
    wanted = wanted[:-1]
    others = [signature.parameters[name] for name in names[len(wanted) :]]
    optional = all(one.default is not one.empty or one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in others)
    return names[: len(wanted)] == wanted and optional


def _names_in_code(function: Any) -> set[Any]:
    import inspect

    code = inspect.unwrap(getattr(function, "fget", function)).__code__
    return {*code.co_names, *code.co_consts}


Class = TypeVar("Class", bound=type)


def drop_unsupported(cls: Class, keep: Collection[str] = ()) -> Class:
    """Class decorator: for parts that are not supported, puts the other library's methods back, except those to `keep`."""
    stock = next(base for base in cls.__mro__ if not base.__module__.startswith("stoker."))
    prefix = f"{stock.__module__}:{stock.__qualname__}."
    for part, about in PARTS.items():
        found = [_NEED.fullmatch(one) for need in about.needs for one in need.split(" | ") if one.startswith(prefix)]
        methods = [one["path"].rpartition(".")[2] for one in found if one is not None and one["inside"] is None]
        if methods and not supported(part):
            for name in methods:
                if hasattr(stock, name) and name not in keep:
                    setattr(cls, name, getattr(stock, name))
    return cls
