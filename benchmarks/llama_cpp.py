"""llama.cpp's training against Stoker: the same architecture, the same row of tokens, every token labelled, in turn.

    npm pack @node-llama-cpp/linux-x64@3.10.0 && tar xzf node-llama-cpp-linux-x64-3.10.0.tgz
    python benchmarks/llama_cpp.py --library package/bins/linux-x64

The npm package contains llama.cpp b5640 as compiled libraries; the structures below are that release's. In newer ones (b9842 was
tried) training aborts on any model, because writing to the cache of keys and values has no gradient. It aborts on SmolLM2's 30
layers, so that both sides train 8; it does not train the token embeddings, which Stoker does. Random weights in fp32, AdamW on
both sides. Step times are of one row of 512 tokens: llama.cpp has neither padding nor batches of rows.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import functools
import os
import tempfile
from pathlib import Path
from typing import Any

import decoder_step
from sides import Step, measure

CASE = dataclasses.replace(decoder_step.CASES["one-row"], layers=8)
TOKENS = CASE.batches[0][0][0]
_F32, _I32, _F16 = 0, 26, 1
"""ggml's numbers for these types."""


class ModelParams(ctypes.Structure):
    _fields_ = [
        ("devices", ctypes.c_void_p), ("tensor_buft_overrides", ctypes.c_void_p), ("n_gpu_layers", ctypes.c_int32),
        ("split_mode", ctypes.c_int), ("main_gpu", ctypes.c_int32), ("tensor_split", ctypes.c_void_p),
        ("progress_callback", ctypes.c_void_p), ("progress_data", ctypes.c_void_p), ("kv_overrides", ctypes.c_void_p),
        *((name, ctypes.c_bool) for name in ("vocab_only", "use_mmap", "use_mlock", "check_tensors")),
    ]  # fmt: skip


class ContextParams(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max")),
        ("n_threads", ctypes.c_int32), ("n_threads_batch", ctypes.c_int32),
        *((name, ctypes.c_int) for name in ("rope_scaling", "pooling", "attention")),
        *((name, ctypes.c_float) for name in (
            "rope_base", "rope_scale", "yarn_ext", "yarn_attn", "yarn_fast", "yarn_slow",
        )),
        ("yarn_ctx", ctypes.c_uint32), ("defrag", ctypes.c_float), ("cb_eval", ctypes.c_void_p), ("cb_data", ctypes.c_void_p),
        ("type_k", ctypes.c_int), ("type_v", ctypes.c_int), ("abort", ctypes.c_void_p), ("abort_data", ctypes.c_void_p),
        *((name, ctypes.c_bool) for name in (
            "embeddings", "offload_kqv", "flash_attn", "no_perf", "op_offload", "swa_full",
        )),
    ]  # fmt: skip


class OptParams(ctypes.Structure):
    _fields_ = [
        ("n_ctx_train", ctypes.c_uint32), ("filter", ctypes.c_void_p), ("filter_data", ctypes.c_void_p),
        ("optimizer_params", ctypes.c_void_p), ("optimizer_data", ctypes.c_void_p),
    ]  # fmt: skip


def write_gguf(path: Path) -> None:
    """The benchmark's Llama with its random weights, and without a vocabulary."""
    import gguf

    model = decoder_step.build_model(CASE)
    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, value in model.state_dict().items():
        if name != "lm_head.weight":  # tied
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load_libraries(folder: Path) -> tuple[Any, Any]:
    """ggml's base library and llama's, with the CPU's own variant of ggml loaded."""
    (base,), (ggml,), (llama,) = (
        sorted(folder.glob(name)) for name in ("libggml-base.so", "libggml.so", "libllama.so")
    )
    loaded = [ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL) for path in (base, ggml, llama)]
    loaded[1].ggml_backend_load_all_from_path(str(folder).encode())
    return loaded[0], loaded[2]


def llama_cpp(folder: str) -> Step:
    ggml, llama = load_libraries(Path(folder).resolve())
    for function, result in (
        (llama.llama_model_default_params, ModelParams),
        (llama.llama_context_default_params, ContextParams),
        (llama.llama_model_load_from_file, ctypes.c_void_p),
        (llama.llama_init_from_model, ctypes.c_void_p),
        (ggml.ggml_opt_dataset_init, ctypes.c_void_p),
        (ggml.ggml_opt_dataset_data, ctypes.c_void_p),
        (ggml.ggml_opt_dataset_labels, ctypes.c_void_p),
        (ggml.ggml_get_data, ctypes.c_void_p),
        (ggml.ggml_opt_result_init, ctypes.c_void_p),
    ):
        function.restype = result
    silent = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
    llama.llama_log_set(silent, None)

    model_params = llama.llama_model_default_params()
    model_params.use_mmap = False  # the weights are written to
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "model.gguf"
        write_gguf(path)
        model = llama.llama_model_load_from_file(str(path).encode(), model_params)
    context_params = llama.llama_context_default_params()
    if (context_params.n_ubatch, context_params.type_k) != (512, _F16):
        raise SystemExit("llama_cpp: this is another release of llama.cpp, whose structures differ")
    context_params.n_ctx = context_params.n_batch = context_params.n_ubatch = TOKENS
    context_params.n_threads = context_params.n_threads_batch = len(os.sched_getaffinity(0))
    context_params.flash_attn, context_params.type_k, context_params.type_v = False, _F32, _F32  # its gradients need it
    context = llama.llama_init_from_model(ctypes.c_void_p(model), context_params)
    if not model or not context:
        raise SystemExit("llama_cpp: llama.cpp did not load the model")

    def address(function: Any) -> Any:
        return ctypes.cast(function, ctypes.c_void_p)

    llama.llama_opt_init(
        ctypes.c_void_p(context), ctypes.c_void_p(model),
        OptParams(
            0, address(llama.llama_opt_param_filter_all), None, address(ggml.ggml_opt_get_default_optimizer_params), None
        ),
    )  # fmt: skip
    size = ctypes.c_int64(TOKENS)
    one = ctypes.c_int64(1)
    dataset = ctypes.c_void_p(ggml.ggml_opt_dataset_init(_I32, _I32, size, size, one, one))
    result = ctypes.c_void_p(ggml.ggml_opt_result_init())

    def store(tensor: Any, values: list[int]) -> None:
        place = ggml.ggml_get_data(ctypes.c_void_p(tensor))
        (ctypes.c_int32 * TOKENS).from_address(place)[:] = values

    def step(number: int) -> None:
        tokens = decoder_step.batch(CASE, number, flat=False)["input_ids"][0].tolist()
        store(ggml.ggml_opt_dataset_data(dataset), tokens)
        store(ggml.ggml_opt_dataset_labels(dataset), [*tokens[1:], tokens[0]])
        llama.llama_opt_epoch(ctypes.c_void_p(context), dataset, result, result, one, None, None)
        loss = ctypes.c_double()
        ggml.ggml_opt_result_loss(result, ctypes.byref(loss), None)
        if not 9 < loss.value < 13:  # the logarithm of the vocabulary's size is 10.8, and the tokens are random
            raise RuntimeError(f"the loss is {loss.value}")
        ggml.ggml_opt_result_reset(result)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=Path, required=True, help="folder with libllama and libggml")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=2)
    arguments = parser.parse_args()
    sides = {
        "llama.cpp": functools.partial(llama_cpp, str(arguments.library)),
        "stock padded": functools.partial(decoder_step.stock, CASE),
        "stoker": functools.partial(decoder_step.stoker, CASE),
    }
    results = measure(sides, arguments.steps, arguments.warm_up)
    for side, measured in results.items():
        told = measured.note or f"{measured.median:.2f} s, {measured.faster_than(results['llama.cpp']):.2f}x"
        print(f"{side:16}{told}")


if __name__ == "__main__":
    main()
