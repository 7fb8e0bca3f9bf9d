"""The table of families: where each architecture keeps the parts of a transformer layer, and what else differs.

One row per family; paths are attributes of the layer (or of the model, for heads). To add an architecture, add a row:
docs/optimize.md explains how. Nothing here imports transformers: classes are recognized by name.
"""

from __future__ import annotations

from importlib import metadata
from typing import Any, get_args

import torch
from torch import nn

from stoker.model.class_swap import cached, child, stock_class
from stoker.model.family import Family, MaskedLM, RelativePositions, Role

__all__ = [
    "FAMILIES",
    "Family",
    "MaskedLM",
    "RelativePositions",
    "Role",
    "find",
    "in_table",
    "transformers_major",
    "unresolved",
]


def _row(name: str, folder: str, prefix: str, **changes: object) -> Family:
    """A row whose classes begin with `prefix`; `changes` are the fields that differ from BERT's."""
    fields: dict[str, object] = {
        "base": f"{prefix}Model",
        "layer": f"{prefix}Layer",
        "embeddings": f"{prefix}Embeddings",
        "question_answering": f"{prefix}ForQuestionAnswering",
        "first_token_model": f"{prefix}ForSequenceClassification",
        "masked_lm_model": f"{prefix}ForMaskedLM",
    }
    return Family(name=name, folder=folder, **{**fields, **changes})  # type: ignore[arg-type]


def _decoder(name: str, folder: str, prefix: str, **changes: object) -> Family:
    """A row of a language model; `changes` are the fields that differ from Llama's."""
    fields: dict[str, object] = {
        "base": f"{prefix}Model",
        "layer": f"{prefix}DecoderLayer",
        "causal_lm": f"{prefix}ForCausalLM",
        "since": 5,  # earlier versions are not tested
        "causal": True,
        "query": "self_attn.q_proj",
        "key": "self_attn.k_proj",
        "value": "self_attn.v_proj",
        "grouped": "self_attn.config",
        "scale": "self_attn.scaling",
        "head_size": "self_attn.head_dim",
        "attention_dropout": "self_attn.attention_dropout",
        "rotary": "position_embeddings",
        "out": "self_attn.o_proj",
        "out_dropout": None,
        "attention_norm": "input_layernorm",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "activation": "mlp.act_fn",
        "down": "mlp.down_proj",
        "down_dropout": None,
        "down_norm": "post_attention_layernorm",
        "norm": "rms",
        "pre_norm": True,
        "empty_mask": _NO_MASK,
    }
    return Family(name=name, folder=folder, **{**fields, **changes})  # type: ignore[arg-type]


_NO_MASK = torch.empty(1, 1, 1, 1)
"""transformers passes a mask of four dimensions on as it is; the fused layers do not read it."""

_NO_MASK_BY_TYPE: dict[str, object] = {"full_attention": None, "sliding_attention": None}
"""The same where a model has a mask for each type of layer."""


def _sliding_window(layer: Any) -> int | None:
    """How many tokens before its own a token sees; the module's window includes the token itself."""
    window = layer.self_attn.sliding_window
    return None if window is None else window - 1


def _disentangled_scale(layer: Any) -> float:
    """Each term of the scores has the variance of the others, so their sum is divided by the root of how many there are."""
    attention = layer.attention.self
    terms = 1 + sum(term in attention.pos_att_type for term in ("c2p", "p2c"))
    return float((attention.attention_head_size * terms) ** -0.5)


_ROBERTA_HEAD = MaskedLM(dense="lm_head.dense", norm="lm_head.layer_norm", decoder="lm_head.decoder")

_LIKE_ROBERTA: dict[str, object] = {
    "tuple_until": 4,
    "pooler_slot_until": 4,
    "positions_after_padding": True,
    "masked_lm": _ROBERTA_HEAD,
}

_LIKE_NOMIC: dict[str, object] = {
    "since": 5,  # earlier versions do not have them
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "scale": "self_attn.scaling",
    "head_size": "self_attn.head_dim",
    "attention_dropout": "self_attn.attention_dropout",
    "rotary": "position_embeddings",
    "out": "self_attn.o_proj",
    "out_dropout": "post_attention_dropout",
    "attention_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "activation": "mlp.act_fn",
    "down": "mlp.down_proj",
    "down_dropout": "post_mlp_dropout",
    "down_norm": "post_mlp_layernorm",
    "position": None,
    "empty_mask": _NO_MASK,
}

_LIKE_GEMMA: dict[str, object] = {
    "norm": "rms_plus_one",
    "attention_output_norm": "post_attention_layernorm",
    "down_norm": "pre_feedforward_layernorm",
    "down_output_norm": "post_feedforward_layernorm",
    "window": _sliding_window,
    "empty_mask": _NO_MASK_BY_TYPE,
}


FAMILIES: tuple[Family, ...] = (
    _row(
        "BERT",
        "bert",
        "Bert",
        tuple_until=4,
        pooler_slot_until=4,
        masked_lm=MaskedLM(
            dense="cls.predictions.transform.dense",
            activation="cls.predictions.transform.transform_act_fn",
            norm="cls.predictions.transform.LayerNorm",
            decoder="cls.predictions.decoder",
        ),
    ),
    _row("RoBERTa", "roberta", "Roberta", **_LIKE_ROBERTA),
    _row("XLM-RoBERTa", "xlm_roberta", "XLMRoberta", **_LIKE_ROBERTA),
    _row("CamemBERT", "camembert", "Camembert", **_LIKE_ROBERTA),
    _row(
        "ELECTRA",
        "electra",
        "Electra",
        tuple_until=4,
        masked_lm=MaskedLM(
            dense="generator_predictions.dense",
            activation="generator_predictions.activation",
            norm="generator_predictions.LayerNorm",
            decoder="generator_lm_head",
        ),
    ),
    _row(
        "RemBERT",
        "rembert",
        "RemBert",
        since=5,  # not tested with earlier versions
        attention_dropout_called=True,
        tuple_until=5,
        pooler_slot_until=5,
        masked_lm=MaskedLM(
            dense="cls.predictions.dense",
            activation="cls.predictions.activation",
            norm="cls.predictions.LayerNorm",
            decoder="cls.predictions.decoder",
        ),
    ),
    _row(
        "DistilBERT",
        "distilbert",
        "DistilBert",
        layer="TransformerBlock",
        embeddings="Embeddings",
        since=5,  # earlier versions have no position_ids argument
        query="attention.q_lin",
        key="attention.k_lin",
        value="attention.v_lin",
        head_size="attention.attention_head_size",
        attention_dropout="attention.dropout",
        out="attention.out_lin",
        out_dropout=None,
        attention_norm="sa_layer_norm",
        up="ffn.lin1",
        activation="ffn.activation",
        down="ffn.lin2",
        down_dropout="ffn.dropout",
        down_norm="output_layer_norm",
        token_type=None,
        masked_lm=MaskedLM(
            dense="vocab_transform", activation="activation", norm="vocab_layer_norm", decoder="vocab_projector"
        ),
    ),
    _row(
        "MPNet",
        "mpnet",
        "MPNet",
        tuple_until=5,
        query="attention.attn.q",
        key="attention.attn.k",
        value="attention.attn.v",
        head_size="attention.attn.attention_head_size",
        attention_dropout="attention.attn.dropout",
        attention_dropout_called=True,
        out="attention.attn.o",
        out_dropout="attention.dropout",
        attention_norm="attention.LayerNorm",
        relative_bias="position_bias",
        relative_bias_class="MPNetEncoder",
        token_type=None,
        positions_after_padding=True,
        pooler_slot_until=5,
        masked_lm=_ROBERTA_HEAD,
    ),
    _row(
        "DeBERTa v2 and v3",
        "deberta_v2",
        "DebertaV2",
        part="DeBERTa",
        tuple_until=5,
        tuple_size=2,
        query="attention.self.query_proj",
        key="attention.self.key_proj",
        value="attention.self.value_proj",
        scale=_disentangled_scale,
        attention_dropout_called=True,
        relative=RelativePositions(
            active="attention.self.relative_attention",
            table="rel_embeddings",
            distances="relative_pos",
            span="attention.self.pos_ebd_size",
            terms="attention.self.pos_att_type",
            query="attention.self.pos_query_proj",
            key="attention.self.pos_key_proj",
            shared="attention.self.share_att_key",
            dropout="attention.self.pos_dropout",
        ),
        distances_class="DebertaV2Encoder",
        embedding_projection="embed_proj",
        needs_stock=lambda model: "it has a convolution over tokens" if model.encoder.conv is not None else None,
        # of four dimensions, so that no (tokens, tokens) mask is made of it; embeddings are multiplied with it
        empty_mask=torch.ones(1, 1, 1, 1),
        masked_lm=MaskedLM(
            dense="cls.predictions.transform.dense",
            activation="cls.predictions.transform.transform_act_fn",
            norm="cls.predictions.transform.LayerNorm",
            decoder="cls.predictions.decoder",
        ),
        other_masked_lm=MaskedLM(
            dense="lm_predictions.lm_head.dense",
            activation="lm_predictions.lm_head.transform_act_fn",
            norm="lm_predictions.lm_head.LayerNorm",
            decoder="deberta.embeddings.word_embeddings",
            table_bias="lm_predictions.lm_head.bias",
        ),
    ),
    _row(
        "ALBERT",
        "albert",
        "Albert",
        first_token_model=None,  # its last layer is its first one too
        tuple_until=4,
        pooler_slot_until=4,
        query="attention.query",
        key="attention.key",
        value="attention.value",
        head_size="attention.attention_head_size",
        attention_dropout="attention.attention_dropout",
        out="attention.dense",
        out_dropout="attention.output_dropout",
        attention_norm="attention.LayerNorm",
        up="ffn",
        activation="activation",
        down="ffn_output",
        down_dropout=None,
        down_norm="full_layer_layer_norm",
        pooled=lambda model, hidden: model.pooler_activation(model.pooler(hidden[:, 0])),
        masked_lm=MaskedLM(
            dense="predictions.dense",
            activation="predictions.activation",
            norm="predictions.LayerNorm",
            decoder="predictions.decoder",
        ),
    ),
    _row(
        "ModernBERT",
        "modernbert",
        "ModernBert",
        layer="ModernBertEncoderLayer",
        since=5,  # earlier versions compute rotary angles inside attention
        packed="attn.Wqkv",
        head_size="attn.head_dim",
        attention_dropout="attn.attention_dropout",
        out="attn.Wo",
        out_dropout="attn.out_drop",
        attention_norm="attn_norm",
        # the module's window includes the token itself
        window=lambda layer: None if layer.attn.sliding_window is None else layer.attn.sliding_window - 1,
        rotary="position_embeddings",
        up="mlp.Wi",
        activation="mlp.act",
        gated=True,
        inner_dropout="mlp.drop",
        down="mlp.Wo",
        down_dropout=None,
        down_norm="mlp_norm",
        pre_norm=True,
        word="tok_embeddings",
        position=None,
        token_type=None,
        embedding_norm="norm",
        embedding_dropout="drop",
        empty_mask=_NO_MASK_BY_TYPE,
        span_logits="classifier",
        masked_lm=MaskedLM(
            dense="head.dense", activation="head.act", norm="head.norm", decoder="decoder", counts_items=True
        ),
    ),
    _row(
        "NomicBERT",
        "nomic_bert",
        "NomicBert",
        **_LIKE_NOMIC,
        masked_lm=MaskedLM(
            dense="cls.predictions.transform.dense",
            activation="cls.predictions.transform.transform_act_fn",
            norm="cls.predictions.transform.layer_norm",
            decoder="cls.predictions.decoder",
        ),
    ),
    _row("GTE", "gte", "Gte", **_LIKE_NOMIC, inner_dropout="mlp.dropout", masked_lm=_ROBERTA_HEAD),
    _row(
        "Jina Embeddings v3",
        "jina_embeddings_v3",
        "JinaEmbeddingsV3",
        **{**_LIKE_NOMIC, "gate": None, "up": "mlp.fc1", "activation": "mlp.activation_fn", "down": "mlp.fc2"},
        masked_lm=_ROBERTA_HEAD,
    ),
    _decoder(
        "EuroBERT",
        "eurobert",
        "EuroBert",
        causal=False,
        causal_lm=None,
        masked_lm_model="EuroBertForMaskedLM",
        masked_lm=MaskedLM(decoder="lm_head", counts_items=True),
    ),
    _decoder("Llama", "llama", "Llama"),
    _decoder("Qwen2", "qwen2", "Qwen2", window=_sliding_window, empty_mask=_NO_MASK_BY_TYPE),
    _decoder(
        "Qwen3",
        "qwen3",
        "Qwen3",
        query_norm="self_attn.q_norm",
        key_norm="self_attn.k_norm",
        window=_sliding_window,
        empty_mask=_NO_MASK_BY_TYPE,
    ),
    _decoder(
        "Mistral",
        "mistral",
        "Mistral",
        window=lambda layer: None if (size := layer.self_attn.config.sliding_window) is None else size - 1,
    ),
    _decoder("Gemma 2", "gemma2", "Gemma2", softcap="self_attn.attn_logit_softcapping", **_LIKE_GEMMA),
    _decoder(
        "Gemma 3",
        "gemma3",
        "Gemma3",
        base="Gemma3TextModel",
        query_norm="self_attn.q_norm",
        key_norm="self_attn.k_norm",
        **_LIKE_GEMMA,
    ),
    _decoder(
        "Phi-3",
        "phi3",
        "Phi3",
        packed="self_attn.qkv_proj",
        window=lambda layer: None if (size := layer.self_attn.config.sliding_window) is None else size - 1,
        out_dropout="resid_attn_dropout",
        gate=None,
        up="mlp.gate_up_proj",
        gated=True,
        activation="mlp.activation_fn",
        down_dropout="resid_mlp_dropout",
    ),
    _decoder(
        "OLMo 2",
        "olmo2",
        "Olmo2",
        query_norm="self_attn.q_norm",
        key_norm="self_attn.k_norm",
        attention_norm=None,
        attention_output_norm="post_attention_layernorm",
        down_norm=None,
        down_output_norm="post_feedforward_layernorm",
    ),
    _decoder(
        "GPT-2",
        "gpt2",
        "GPT2",
        layer="GPT2Block",
        causal_lm="GPT2LMHeadModel",
        packed="attn.c_attn",
        grouped=None,
        scale="attn.scaling",
        head_size="attn.head_dim",
        attention_dropout="attn.attn_dropout",
        rotary=None,
        out="attn.c_proj",
        out_dropout="attn.resid_dropout",
        attention_norm="ln_1",
        gate=None,
        up="mlp.c_fc",
        activation="mlp.act",
        down="mlp.c_proj",
        down_dropout="mlp.dropout",
        down_norm="ln_2",
        norm="layer",
    ),
    _decoder(
        "GPT-NeoX",
        "gpt_neox",
        "GPTNeoX",
        layer="GPTNeoXLayer",
        packed="attention.query_key_value",
        packed_by_head=True,
        grouped=None,
        scale="attention.scaling",
        head_size="attention.head_size",
        attention_dropout="attention.attention_dropout",
        out="attention.dense",
        out_dropout="post_attention_dropout",
        gate=None,
        up="mlp.dense_h_to_4h",
        activation="mlp.act",
        down="mlp.dense_4h_to_h",
        down_dropout="post_mlp_dropout",
        norm="layer",
        parallel="use_parallel_residual",
    ),
)


@cached
def find(cls: type[nn.Module]) -> tuple[Family, Role] | None:
    """The table row and role of a class, if it is in the table or inherits the forward of one that is."""
    found = in_table(cls)
    return found if found is not None and found[0].since <= transformers_major() else None


@cached
def in_table(cls: type[nn.Module]) -> tuple[Family, Role] | None:
    """As `find`, but also if the row applies to later versions of transformers only."""
    cls = stock_class(cls)
    owner = next(ancestor for ancestor in cls.__mro__ if "forward" in ancestor.__dict__)
    return _BY_CLASS.get((owner.__module__, owner.__qualname__))


def unresolved(module: nn.Module, row: Family, role: Role) -> str | None:
    """The first path of a row that `module`, which has this role in it, lacks; a new version may have renamed it."""
    paths: dict[str, tuple[str | None, ...]] = {
        "layer": _paths_in_layer(row),
        "embeddings": (row.word, row.position, row.token_type, row.embedding_norm, row.embedding_dropout),
        "question_answering": (row.span_logits,),
        "causal_lm": ("lm_head",),
    }
    for path in paths.get(role, ()):
        try:
            if path is not None:
                child(module, path)
        except AttributeError:
            return path
    return None


def _paths_in_layer(row: Family) -> tuple[str | None, ...]:
    relative = row.relative
    return (
        *row.projections(),
        row.out,
        *row.ups(),
        row.down,
        *row.norms(),
        row.head_size,
        row.activation,
        row.grouped,
        row.scale if isinstance(row.scale, str) else None,
        row.softcap,
        row.parallel,
        row.attention_dropout,
        row.out_dropout,
        row.inner_dropout,
        row.down_dropout,
        *((relative.active, relative.shared) if relative is not None else ()),
    )


@cached
def transformers_major() -> int:
    return int(metadata.version("transformers").split(".")[0])


_BY_CLASS: dict[tuple[str, str], tuple[Family, Role]] = {
    (f"transformers.models.{family.folder}.modeling_{family.folder}", getattr(family, role)): (family, role)
    for family in FAMILIES
    for role in get_args(Role)
    if getattr(family, role) is not None
}
