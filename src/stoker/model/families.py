"""The table of encoder families: where each keeps the parts of a transformer layer, and what else differs.

One row per family; paths are attributes of the layer (or of the model, for heads). To add an architecture, add a row:
docs/optimize.md explains how. Nothing here imports transformers: classes are recognized by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Literal, get_args

from torch import nn

from stoker.model.class_swap import cached, stock_class

__all__ = ["FAMILIES", "Family", "MaskedLM", "Role", "find", "in_table", "transformers_major"]

Role = Literal["base", "layer", "embeddings", "relative_bias_class", "question_answering", "masked_lm_model"]
"""The fields of a row that name a class."""


@dataclass(frozen=True, kw_only=True)
class MaskedLM:
    """Where a masked-LM head, decoder(norm(activation(dense(hidden)))), keeps its parts."""

    dense: str
    norm: str
    decoder: str
    activation: str | None = None
    """None: the head calls gelu as a function."""
    counts_items: bool = False
    """The loss is a sum divided by num_items_in_batch, if a trainer passes that."""

    def containers(self) -> tuple[str, ...]:
        """The modules that contain these parts; the fused loss does not call them."""
        return _containers(self.dense, self.norm, self.decoder)


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """One encoder architecture. Paths are attributes of the layer unless stated otherwise."""

    name: str
    folder: str
    """The classes are defined in transformers.models.<folder>.modeling_<folder>."""
    base: str
    layer: str
    embeddings: str
    question_answering: str
    masked_lm_model: str

    # attention
    query: str = "attention.self.query"
    key: str = "attention.self.key"
    value: str = "attention.self.value"
    packed: str | None = None
    """Path of one linear layer that computes q, k and v side by side, instead of the three above."""
    head_size: str = "attention.self.attention_head_size"
    attention_dropout: str = "attention.self.dropout"
    """A dropout module or a number."""
    attention_dropout_called: bool = False
    """Stock calls that module, so its own training flag counts; else its probability applies while the layer is in training."""
    out: str = "attention.output.dense"
    out_dropout: str | None = "attention.output.dropout"
    attention_norm: str = "attention.output.LayerNorm"
    """After attention and residual; with `pre_norm`: before attention."""
    window: Callable[[Any], int | None] | None = None
    """How many tokens to each side a given layer attends to; None: all."""
    rotary: str | None = None
    """Name of the layer's argument that contains (cos, sin)."""
    relative_bias: str | None = None
    """Name of the layer's argument that contains a bias (1, heads, length, length)."""
    relative_bias_class: str | None = None
    """The class whose compute_position_bias(hidden) computes that bias."""

    # feed forward
    up: str = "intermediate.dense"
    activation: str = "intermediate.intermediate_act_fn"
    gated: bool = False
    inner_dropout: str | None = None
    down: str = "output.dense"
    down_dropout: str | None = "output.dropout"
    down_norm: str = "output.LayerNorm"
    """After feed forward and residual; with `pre_norm`: before feed forward."""
    pre_norm: bool = False
    tuple_until: int = 0
    """Layers return a tuple in transformers up to this major version."""
    since: int = 4
    """The row applies to transformers from this major version on."""

    # embeddings: paths in the embeddings module
    word: str = "word_embeddings"
    position: str | None = "position_embeddings"
    token_type: str | None = "token_type_embeddings"
    embedding_norm: str = "LayerNorm"
    embedding_dropout: str = "dropout"
    positions_after_padding: bool = False
    """Positions count from padding_idx + 1, and padding tokens do not count (RoBERTa)."""

    # the model around the layers
    pooled: Callable[[Any, Any], Any] = lambda model, hidden: model.pooler(hidden)
    """The pooler's output from hidden states (batch, length, width)."""
    empty_mask: object = None
    """The attention mask for which the stock base model builds none."""
    pooler_slot_until: int = 0
    """With return_dict=False the output has an element for the pooler, even if None, up to this major version of transformers."""
    span_logits: str = "qa_outputs"
    """Path in the question-answering model of the module that computes start and end logits."""
    masked_lm: MaskedLM | None = None

    def projections(self) -> tuple[str, ...]:
        """The linear layers that compute q, k and v."""
        return (self.packed,) if self.packed else (self.query, self.key, self.value)

    def containers(self) -> tuple[str, ...]:
        """The modules inside a layer that contain the parts; the fused layer does not call them."""
        return _containers(*self.projections(), self.out, self.attention_norm, self.up, self.down, self.down_norm)


def _containers(*paths: str) -> tuple[str, ...]:
    """Every proper prefix of these paths, once."""
    prefixes = (path[:end] for path in paths for end, letter in enumerate(path) if letter == ".")
    return tuple(dict.fromkeys(prefixes))


def _row(name: str, folder: str, prefix: str, **changes: object) -> Family:
    """A row whose classes begin with `prefix`; `changes` are the fields that differ from BERT's."""
    fields: dict[str, object] = {
        "base": f"{prefix}Model",
        "layer": f"{prefix}Layer",
        "embeddings": f"{prefix}Embeddings",
        "question_answering": f"{prefix}ForQuestionAnswering",
        "masked_lm_model": f"{prefix}ForMaskedLM",
    }
    return Family(name=name, folder=folder, **{**fields, **changes})  # type: ignore[arg-type]


_ROBERTA_HEAD = MaskedLM(dense="lm_head.dense", norm="lm_head.layer_norm", decoder="lm_head.decoder")

_LIKE_ROBERTA: dict[str, object] = {
    "tuple_until": 4,
    "pooler_slot_until": 4,
    "positions_after_padding": True,
    "masked_lm": _ROBERTA_HEAD,
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
        "ALBERT",
        "albert",
        "Albert",
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
        empty_mask={"full_attention": None, "sliding_attention": None},
        span_logits="classifier",
        masked_lm=MaskedLM(
            dense="head.dense", activation="head.act", norm="head.norm", decoder="decoder", counts_items=True
        ),
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


@cached
def transformers_major() -> int:
    return int(metadata.version("transformers").split(".")[0])


_BY_CLASS: dict[tuple[str, str], tuple[Family, Role]] = {
    (f"transformers.models.{family.folder}.modeling_{family.folder}", getattr(family, role)): (family, role)
    for family in FAMILIES
    for role in get_args(Role)
    if getattr(family, role) is not None
}
