"""Small configurations of any architecture of transformers, made from the fields of its configuration class.

A field is recognized by its name (a number of layers, a width, a window, ...), nested configurations are shrunk in the same way.
Where a model cannot be built from the result, the next of `SCALES` is tried. `_FITTING` is for configurations whose fields have
to fit each other in a way that no name tells.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

__all__ = ["SCALES", "Scale", "shrink"]

VOCABULARY = 99
WINDOW = 10
"""Longer than the first eight tokens, which look the same with and without a window, and shorter than a batch."""


@dataclass(frozen=True)
class Scale:
    """The widths of a small model."""

    hidden: int = 32
    heads: int = 4
    head: int = 8
    inner: int = 48
    grouped: bool = True
    """Whether there are fewer heads of keys than of queries where the default configuration has fewer."""
    all_widths: bool = False
    """Whether numbers that no rule recognizes are made small too."""


SCALES = (
    Scale(),
    Scale(hidden=64, head=16, inner=96),
    Scale(hidden=64, head=16, inner=64, grouped=False, all_widths=True),
    Scale(hidden=128, head=32, inner=128),
    Scale(hidden=64, heads=2, head=32, inner=64),
    Scale(hidden=256, heads=2, head=128, inner=64, grouped=False),  # for constants in the code that fit real heads only
)

_DOTS = {
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 16,
}  # fmt: skip
_FITTING: dict[str, dict[str, Any]] = {
    "Blip2QFormerConfig": {"use_qformer_text_input": True},
    "ChameleonConfig": {"vocabulary_map": {"<image>": 70, "IMGIMGAAZ": 71, "IMGIMGABZ": 72, "IMGIMGACZ": 73}},
    "ChameleonVQVAEConfig": {
        "embed_dim": 8, "num_embeddings": 16, "latent_channels": 8, "resolution": 16, "base_channels": 32,
        "channel_multiplier": [1], "num_res_blocks": 1, "attn_resolutions": [],
    },
    "DiffusionGemmaTextConfig": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    "Dots3NoteTextConfig": {
        **_DOTS, "per_layer_config": {1: _DOTS}, "num_hidden_layers": 3, "sliding_window": WINDOW,
        "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"], "index_head_dim": 16, "index_n_heads": 2,
    },
    "LiltConfig": {"hidden_size": 96},  # a sixth and a quarter of it are widths, too
    "Qwen4ExpTextConfig": {
        "num_hidden_layers": 2, "layer_types": ["linear_attention", "indexed_attention"], "head_dim": 16,
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8, "indexer_compress_ratio": 4,
    },
    "ReformerConfig": {
        "axial_pos_shape": [4, 6], "axial_pos_embds_dim": [8, 24], "attn_layers": ["local", "lsh"], "num_buckets": 2,
        "lsh_attn_chunk_length": 4, "local_attn_chunk_length": 4, "hash_seed": 0,
    },
    "Step3p7TextConfig": {
        "num_hidden_layers": 2, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "ZambaConfig": {
        "num_hidden_layers": 5, "attention_hidden_size": 64, "attention_head_dim": 16, "num_key_value_heads": 4,
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
}  # fmt: skip
"""Fields of single configuration classes."""

_KEPT = re.compile(
    r"type_vocab_size|num_feat_extract_layers|.*(sampling_rate|sample_rate|temperature|distance|max_relative|theta|base|ignore_index|stride|kernel)s?"
)
_LAYERS = re.compile(
    r"(.*_)?(num_)?(hidden_|encoder_|decoder_|transformer_)*layers|n_layers?|(.*_)?depth|(.*_)?num_(.*_)?(layers|blocks)"
)
_EVERY = re.compile(r".*(_period|every_n.*|_interval|_frequency|window_pattern|_freq)")
_KEY_HEADS = re.compile(r".*(key_value_heads|kv_heads|key_heads|query_groups|multi_query_group_num)|n_head_kv")
_HEADS = re.compile(r"(.*_)?(num_|n_)?(.*_)?(heads|n_head|num_head|n_heads_.*)")
_HEAD_SIZE = re.compile(r"(.*_)?(head_dim|head_size|d_kv|d_head|kv_channels|key_size|value_size|headdim)")
_INNER = re.compile(
    r".*(intermediate|ffn|ffw|feed_forward|mlp_hidden).*|(.*_)?(d_ff|n_inner|mlp_dim|inner_dim|dim_feedforward)"
)
_HIDDEN = re.compile(
    r"(.*_)?(hidden_size|d_model|n_embd|embed_dim|hidden_dim|projection_dim|output_dim|model_dim|channels_latent|latent_dim"
    r"|projection_size|hidden_channels|n_state|proj_dim|embedding_dim|query_dim|lru_width|decoder_dim|encoder_dim|dim|width"
    r"|attention_dim|query_pre_attn_scalar|cross_attention_dim|embed_size|embedding_size|input_size|output_size)"
)
_POSITIONS = re.compile(
    r"(.*_)?(max_position_embeddings|n_positions|n_ctx|max_(source|target)_positions|max_seq_len|max_seq_length|block_len"
    r"|seq_length|max_sequence_length|max_length)"
)
_WINDOWS = re.compile(
    r"(.*_)?(sliding_window(_size)?|attention_chunk_size|attention_window_size|local_attention|attention_window"
    r"|window_length)|swa_window.*"
)
_EXPERTS = re.compile(r"(.*_)?(num_|n_)(.*_)?experts")
_CHOSEN = re.compile(r".*(experts_per_tok|top_k|topk|top_k_experts|num_selected_experts|k_experts|per_token).*")
_GROUPS = re.compile(r"n_group|num_expert_group.*")
_STATES = re.compile(r"(.*_)?(state_size|d_state|ssm_state_size|time_step_rank|dt_rank)")
_RANKS = re.compile(r".*(lora_rank|low_rank|_rank|rank_dim|lora_r).*")
_TOKENS = re.compile(r"(.*_)?(token_id|token_index|token|id|index)s?")
_DROPOUTS = re.compile(r".*(drop|noise|mask_time_prob|mask_feature_prob|jitter).*|(.*_)?pdrop")


def shrink(cls: type[PretrainedConfig], scale: Scale, given: dict[str, Any] | None = None) -> PretrainedConfig:
    """A small configuration. `given`: fields that a configuration around it sets."""
    given = given or {}
    default = cls(**{**_with_windows(cls), **given})
    changes = _layers(cls, default, scale)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    general = {field.name for field in dataclasses.fields(PretrainedConfig)}
    inner = dict(getattr(cls, "sub_configs_defaults", {}))
    for name, field in fields.items():
        value = _value(default, name)
        if isinstance(value, PretrainedConfig):
            spec = inner.get(name)
            changes[name] = shrink(type(value), scale, getattr(spec, "init_kwargs", None))
        elif isinstance(value, dict) and name == "rope_parameters":
            sections = "mrope_section" in (getattr(cls, "ignore_keys_at_rope_validation", None) or ())
            if (rope := _rope(value, scale, sections)) is not None:
                changes[name] = rope
        elif name not in general and name not in changes:
            declared = given.get(name, value if field.default is dataclasses.MISSING else field.default)
            small = _shrunk(name, declared, scale, fields, default)
            if small != declared or type(small) is not type(declared) or name in given:
                changes[name] = small
    if "pad_token_id" in fields:
        changes.update(_special_tokens(default))
    changes.update(_FITTING.get(cls.__name__, {}))
    return cls(**{name: value for name, value in given.items() if name not in fields}, **changes)


def _with_windows(cls: type[PretrainedConfig]) -> dict[str, Any]:
    """Fields with which the last layers have windows, where windows are off by default."""
    names = {field.name for field in dataclasses.fields(cls)}
    return (
        {"use_sliding_window": True, "max_window_layers": 1}
        if {"use_sliding_window", "max_window_layers"} <= names
        else {}
    )


def _value(config: PretrainedConfig, name: str) -> Any:
    try:
        return getattr(config, name)
    except Exception:  # some configurations refuse to give a value that differs between layers
        return None


def _layers(cls: type[PretrainedConfig], default: Any, scale: Scale) -> dict[str, Any]:
    """The number of layers and the lists with an entry for each of them: one layer of each kind, and at least two."""
    name = getattr(cls, "attribute_map", {}).get("num_hidden_layers", "num_hidden_layers")
    number = getattr(default, name, None)
    names = [field.name for field in dataclasses.fields(cls)]
    if not isinstance(number, int) or number < 2 or name not in names:
        return {}
    lists = {
        one: list(value)
        for one in names
        if isinstance(value := _value(default, one), (list, tuple)) and len(value) == number
    }
    kinds: dict[Any, int] = {}
    for place in range(number):
        kinds.setdefault(tuple(str(value[place]) for value in lists.values()), place)
    pattern = _value(default, "block_types")  # which is repeated
    chosen = (
        sorted(kinds.values())[:4] if lists else list(range(len(pattern) if isinstance(pattern, (list, tuple)) else 2))
    )
    if len(chosen) == 1:
        chosen = [chosen[0], min(chosen[0] + 1, number - 1)]
    shared: dict[str, Any] = {}
    if isinstance(
        _value(default, "num_kv_shared_layers"), int
    ):  # the last layers use keys of earlier ones of their kind
        chosen = [*chosen, *chosen]
        shared = {"num_kv_shared_layers": len(chosen) // 2}
    if different := _exceptions(default, chosen, scale):
        shared["per_layer_config"] = different
    if "layer_types" in names and _value(default, "layer_types") is None:
        shared["layer_types"] = ["full_attention"] * len(chosen)
    cut = {one: type(getattr(default, one))(value[place] for place in chosen) for one, value in lists.items()}
    if (kinds_left := list(cut.get("layer_types", ()))) and set(kinds_left) == {"linear_attention"}:
        cut["layer_types"] = [*kinds_left[:-1], "full_attention"]  # its cache asks an attention layer for lengths
    return {name: len(chosen), **shared, **{one: _shrunk(one, value, scale, {}, default) for one, value in cut.items()}}


def _exceptions(default: PretrainedConfig, chosen: list[int], scale: Scale) -> dict[int, dict[str, Any]]:
    """The fields of single layers; their heads are twice as wide as those of other layers."""
    by_layer = default.to_dict().get("per_layer_config") or {}
    found = {place: by_layer.get(f"{one:02}") or by_layer.get(str(one)) for place, one in enumerate(chosen)}
    return {
        place: {
            name: scale.head * 2 if name == "head_dim" else _shrunk(name, value, scale, {}, None)
            for name, value in fields.items()
        }
        for place, fields in found.items()
        if fields
    }


def _rope(parameters: dict[str, Any], scale: Scale, sections: bool) -> dict[str, Any] | None:
    """Sections of rotary positions (time, height, width) that fit the small head; None if the default may stay."""
    if any(isinstance(value, dict) for value in parameters.values()):
        inner = {
            key: _rope(value, scale, sections) if isinstance(value, dict) else None for key, value in parameters.items()
        }
        return {key: inner[key] or parameters[key] for key in parameters} if any(inner.values()) else None
    if scale.head == 128 or not parameters or (not sections and not parameters.get("mrope_section")):
        return None
    half = int(scale.head * (parameters.get("partial_rotary_factor") or 1.0)) // 2
    usual = parameters.get("mrope_section") or (16, 24, 24)
    rest = [max(half // 4, 1)] * (len(usual) - 1)
    first = [half - sum(rest)]
    return {**parameters, "mrope_section": first + rest if usual[1] == usual[-1] else rest + first}


def _special_tokens(default: Any) -> dict[str, Any]:
    """Padding and end of text are two different ids below ten, which no text contains elsewhere."""
    pad, end = getattr(default, "pad_token_id", None), getattr(default, "eos_token_id", None)
    end = end if isinstance(end, int) and 0 <= end < 10 else 2
    pad = pad if isinstance(pad, int) and 0 <= pad < 10 and pad != end else int(end == 0)
    return {"pad_token_id": pad, "eos_token_id": end} if hasattr(default, "eos_token_id") else {"pad_token_id": pad}


_REQUIRED = {
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "num_experts": 4,
    "top_k_experts": 2,
    "n_shared_experts": 1,
    "attn_layer_indices": [1],
    "prediction_length": 4,
    "vocabulary_map": {"<image>": 70},
    "vocab_size": VOCABULARY,
}
"""Fields that are None by default, but that no model can do without."""


def _shrunk(name: str, value: Any, scale: Scale, fields: Any, default: Any) -> Any:
    if value is None and name == "attention_types":
        value = _value(default, name)
    if value is None:
        derived = _value(default, name)
        windows = "sliding_attention" in (_value(default, "layer_types") or ())
        usual = {
            "sliding_window": WINDOW if windows else None,
            "head_dim": scale.head,
            "num_key_value_heads": scale.heads,
            "num_attention_heads": scale.heads,
        }
        return _REQUIRED.get(name) if derived is not None else {**_REQUIRED, **usual}.get(name)
    if isinstance(value, bool):
        return (
            False
            if name in ("apply_spec_augment", "use_cuda_kernels", "use_mamba_kernels")
            else value or name == "use_sliding_window"
        )
    if isinstance(value, (int, float)) and _DROPOUTS.fullmatch(name):
        return type(value)(0)
    if isinstance(value, int):
        return _integer(name, value, scale, fields, default)
    if name == "attention_types":  # [kinds of layers, how often they are repeated]
        return [[kinds, 1] for kinds, _ in value]
    if isinstance(value, (list, tuple)) and value and all(type(one) is int for one in value):
        return type(value)(_integers(name, list(value), scale))
    return value


def _integers(name: str, values: list[int], scale: Scale) -> list[int]:
    """A list with a number for each stage of a pyramid, each layer of convolutions, or each side of an image."""
    if _TOKENS.fullmatch(name) or _KEPT.fullmatch(name) or "indices" in name or "indexes" in name or min(values) < 1:
        return values
    if "depth" in name or "layers" in name:
        return [min(value, 2) for value in values]
    if len(set(values)) == 1 or "image_size" in name or "patch_size" in name:
        return [_integer(name, value, scale, {}, None) for value in values]
    if "heads" in name:
        return [max(value // min(values), 1) for value in values]
    if max(values) >= 32:
        return [max(value * 16 // min(values), 1) if min(values) > 16 else value for value in values]
    return values


def _integer(name: str, value: int, scale: Scale, fields: Any, default: Any) -> int:
    mamba_heads = "expand" in fields or name.startswith("mamba")
    inner_width = scale.hidden * 2 // scale.heads  # of a state-space layer, which is twice as wide
    rules: tuple[tuple[re.Pattern[str], int], ...] = (
        (_WINDOWS, WINDOW),
        (re.compile(r"max_window_layers|.*layer_offset|first_k_dense_replace"), 1),
        (re.compile(r"window_size"), 2 if "image_size" in fields else WINDOW),
        (re.compile(r"(.*_)?n_groups"), 2),
        (_EVERY, 2),
        (_KEY_HEADS, scale.heads // 2 if scale.grouped and value < _heads(default) else scale.heads),
        (re.compile(r"index_kpool"), 4),
        (_CHOSEN, 8 if "index" in name else 2),
        (_EXPERTS, 4),
        (_GROUPS, 2),
        (_HEAD_SIZE, inner_width if mamba_heads else scale.head),
        (_HEADS, scale.heads),
        (_LAYERS, 2),
        (_RANKS, 16),
        (_STATES, 8),
        (_INNER, scale.inner),
        (_POSITIONS, 64),
        (re.compile(r"(.*_)?image_size|img_size|input_image_size"), 64 if "depths" in fields else 32),
        (re.compile(r"(.*_)?patch_size"), 8),
        (re.compile(r"num_mel_bins|.*mel_channels|n_mels|.*feature_size"), 16),
        (re.compile(r"(.*_)?codebook_size|num_codevectors_per_group|num_queries|num_query_tokens"), 32),
        (re.compile(r"rotary_dim"), scale.head // 2),
        (_HIDDEN, scale.hidden),
    )
    if name in ("use_sliding_window",) or _KEPT.fullmatch(name) or value < 0:
        return value
    if "vocab" in name or name in ("num_embeddings", "n_vocab"):
        return min(value, VOCABULARY)
    for known in (name, *_other_names(default, name)):
        for pattern, small in rules:
            if pattern.fullmatch(known):
                return min(value, small)
    if _TOKENS.fullmatch(name):
        # Ids of images and sounds differ from each other and from the text's.
        return value if value < 10 else 70 + sorted(fields).index(name) % 29 if fields else value
    return min(value, scale.hidden) if scale.all_widths and value > 128 else value


def _other_names(config: Any, name: str) -> list[str]:
    """The usual names of a field that this configuration calls otherwise."""
    return [usual for usual, own in getattr(config, "attribute_map", {}).items() if own == name]


def _heads(default: Any) -> int:
    for name in ("num_attention_heads", "num_heads", "n_head"):
        if isinstance(number := _value(default, name), int):
            return number
    return 1 << 30
