"""Writes a language model and its tokenizer as a GGUF file, which llama.cpp and what is built on it run.

The `gguf` package has the names of the tensors, the format and the quantization. Here is what llama.cpp's converter knows
besides: the settings of each architecture, the order of rotary dimensions, and the names of pre-tokenizers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import UserError

__all__ = ["FILE", "check_gguf", "write_gguf"]

FILE = "model.gguf"


@dataclass(frozen=True)
class _Architecture:
    name: str
    """In GGUF."""
    interleaved: bool = False
    """Whether llama.cpp pairs neighbouring dimensions of a head in rotary embeddings; transformers pairs its two halves."""


_ARCHITECTURES = {
    "llama": _Architecture("llama", interleaved=True),
    "qwen2": _Architecture("qwen2"),
    "qwen3": _Architecture("qwen3"),
}
"""By `model_type` in config.json."""
_PRE_TOKENIZERS = {
    r"\p{N}{1,3}": "llama-bpe",
    r"\p{N}|": "qwen2",
}
"""llama.cpp's names for pre-tokenizers that split by a regular expression, by what the expression says about digits."""


def check_gguf(model: Any, tokenizer: Any, name: str) -> None:
    """Raises UserError for what cannot be written."""
    config = model.config
    if config.model_type not in _ARCHITECTURES:
        raise UserError(
            f"{name} is of the architecture {config.model_type}, which cannot be written as GGUF here; known are "
            f"{', '.join(_ARCHITECTURES)}. Use --to safetensors, and llama.cpp's convert_hf_to_gguf.py"
        )
    kind = _rope(config).get("rope_type", "default")
    if kind != "default":
        raise UserError(
            f"{name} scales its rotary embeddings ({kind}), which cannot be written as GGUF here; use --to safetensors"
        )
    if getattr(config, "use_sliding_window", False):
        raise UserError(f"{name} uses a sliding window, which cannot be written as GGUF here; use --to safetensors")
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    _pre_tokenizer(backend, name)
    if not backend["model"].get("merges"):
        raise UserError(
            f"the tokenizer of {name} has no merges, without which llama.cpp loads no byte-level BPE tokenizer; use --to "
            "safetensors"
        )


def write_gguf(model: Any, tokenizer: Any, folder: Path, *, int8: bool, name: str) -> None:
    """Writes model.gguf: matrices in fp16, or in Q8_0 for int8, and everything else in fp32."""
    import gguf

    config, architecture = model.config, _ARCHITECTURES[model.config.model_type]
    writer = gguf.GGUFWriter(str(folder / FILE), architecture.name)
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0 if int8 else gguf.LlamaFileType.MOSTLY_F16)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(float(_rope(config)["rope_theta"]))
    _add_tokenizer(writer, tokenizer, config.vocab_size, name)
    _add_tensors(writer, model, architecture, int8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _rope(config: Any) -> dict[str, Any]:
    """The settings of rotary embeddings, as transformers 5 names them."""
    found = getattr(config, "rope_parameters", None)
    if found:
        return dict(found)
    scaling = getattr(config, "rope_scaling", None) or {}
    return {"rope_theta": getattr(config, "rope_theta", 10_000.0), **scaling}


def _add_tensors(writer: Any, model: Any, architecture: _Architecture, int8: bool) -> None:
    import gguf
    from gguf import GGMLQuantizationType as Type

    config = model.config
    kind = next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        written = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if written is None:
            raise UserError(
                f"the tensor {name} has no place in a GGUF file of {architecture.name}; use --to safetensors"
            )
        values: NDArray[Any] = tensor.detach().float().numpy()
        part = name.split(".")[-2]
        if architecture.interleaved and part in heads:
            values = _interleave(values, heads[part])
        form = Type.F32 if values.ndim == 1 else Type.Q8_0 if int8 and values.shape[-1] % 32 == 0 else Type.F16
        writer.add_tensor(written, gguf.quantize(np.ascontiguousarray(values), form), raw_dtype=form)


def _interleave(values: NDArray[Any], heads: int) -> NDArray[Any]:
    """The rows of each head in llama.cpp's order: first of the first half, first of the second half, second of the first, ..."""
    halves = values.reshape(heads, 2, -1, *values.shape[1:])
    ordered: NDArray[Any] = halves.swapaxes(1, 2).reshape(values.shape)
    return ordered


def _add_tokenizer(writer: Any, tokenizer: Any, rows: int, name: str) -> None:
    from gguf import TokenType

    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = {number: token for token, number in tokenizer.get_vocab().items()}
    added = tokenizer.added_tokens_decoder
    tokens, types = [], []
    for number in range(rows):
        tokens.append(vocabulary.get(number, f"[PAD{number}]"))
        special = number in added and added[number].special
        unused = number not in vocabulary
        types.append(
            TokenType.UNUSED if unused else TokenType.CONTROL if special
            else TokenType.USER_DEFINED if number in added else TokenType.NORMAL
        )  # fmt: skip
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre_tokenizer(backend, name))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    merges = backend["model"]["merges"]
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in merges])
    for kind in ("bos", "eos", "unk", "pad"):
        if (number := getattr(tokenizer, f"{kind}_token_id")) is not None and number < rows:
            getattr(writer, f"add_{kind}_token_id")(number)
    begins = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id] and tokenizer.bos_token_id is not None
    writer.add_add_bos_token(begins)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _pre_tokenizer(backend: dict[str, Any], name: str) -> str:
    """llama.cpp's name for how the tokenizer splits texts into words."""
    model, first = backend["model"], backend.get("pre_tokenizer") or {}
    parts = first.get("pretokenizers", [first])
    kinds = {str(part.get("type")): part for part in parts}
    if model.get("type") == "BPE" and not model.get("byte_fallback") and "ByteLevel" in kinds:
        if "Digits" in kinds:
            return "smollm"
        pattern = (kinds.get("Split", {}).get("pattern") or {}).get("Regex")
        if pattern is None:
            return "gpt-2"
        if found := next((known for digits, known in _PRE_TOKENIZERS.items() if digits in pattern), None):
            return found
    raise UserError(
        f"the tokenizer of {name} cannot be written as GGUF here: it is not one of the byte-level BPE tokenizers of GPT-2, "
        "SmolLM, Llama 3 and Qwen2; use --to safetensors, and llama.cpp's convert_hf_to_gguf.py"
    )
