"""What the table of families (families.py) says about one architecture: where a layer keeps its parts, and what else differs.

Paths are attributes of the layer, or of the model for heads. A field that has a default is needed only where a family differs
from BERT.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Family", "MaskedLM", "Norm", "RelativePositions", "Role"]

Role = Literal[
    "base",
    "layer",
    "embeddings",
    "relative_bias_class",
    "distances_class",
    "question_answering",
    "first_token_model",
    "masked_lm_model",
    "causal_lm",
]
"""The fields of a row that name a class."""

Norm = Literal["layer", "rms", "rms_plus_one"]
"""LayerNorm; RMSNorm; RMSNorm whose weight is added to one (Gemma)."""


@dataclass(frozen=True, kw_only=True)
class MaskedLM:
    """Where a masked-LM head, decoder(norm(activation(dense(hidden)))), keeps its parts."""

    decoder: str
    dense: str | None = None
    """None: the head is the decoder alone."""
    norm: str | None = None
    activation: str | None = None
    """None: the head calls gelu as a function."""
    counts_items: bool = False
    """The loss is a sum divided by num_items_in_batch, if a trainer passes that."""
    table_bias: str | None = None
    """Path of the bias, if the decoder is the table of word embeddings, whose weight stock reads."""

    def containers(self) -> tuple[str, ...]:
        """The modules that contain these parts; the fused loss does not call them."""
        parts = (self.dense, self.norm, None if self.table_bias else self.decoder)
        return _containers(*(path for path in parts if path is not None))


@dataclass(frozen=True, kw_only=True)
class RelativePositions:
    """Where a layer keeps what it needs for scores by the distance of query and key (DeBERTa's disentangled attention)."""

    active: str
    """Path of a flag: the model has relative positions at all."""
    table: str
    """Name of the layer's argument that contains the embeddings of positions (2 * span, width)."""
    distances: str
    """Name of the layer's argument that contains the position of each distance, from the most negative distance on."""
    span: str
    """Path of half the number of rows: the row of a distance is its position + span."""
    terms: str
    """Path of the list of terms: "c2p" (queries with the keys of positions), "p2c" (keys with the queries of positions)."""
    query: str
    key: str
    """The projections of positions."""
    shared: str
    """Path of a flag: the projections of tokens serve positions too, and those above do not exist."""
    dropout: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """One architecture, encoder or decoder. Paths are attributes of the layer unless stated otherwise."""

    name: str
    folder: str
    """The classes are defined in transformers.models.<folder>.modeling_<folder>."""
    base: str
    layer: str
    embeddings: str | None = None
    question_answering: str | None = None
    first_token_model: str | None = None
    """The model whose head reads the last hidden state of the first token only: sequence classification."""
    masked_lm_model: str | None = None
    causal_lm: str | None = None
    """The language model with its head `lm_head`; logits are capped at config.final_logit_softcapping where that is set."""

    piece: Literal["layer", "attention", "feed_forward"] = "layer"
    """What paths are relative to: a layer, or one module of it, of which the row describes that half only (known_parts.py)."""

    # attention
    causal: bool = False
    """A token sees only itself and those before it."""
    query: str = "attention.self.query"
    key: str = "attention.self.key"
    value: str = "attention.self.value"
    packed: str | None = None
    """Path of one linear layer that computes q, k and v side by side, instead of the three above."""
    packed_by_head: bool = False
    """That layer computes q, k and v of the first head, then of the second, and so on (GPT-NeoX)."""
    query_norm: str | None = None
    key_norm: str | None = None
    """Norms of q and k, of each head or of all heads together, as the size of their weights says."""
    grouped: str | None = None
    """Path of a configuration with num_attention_heads and num_key_value_heads, which may be fewer; None: as many as q has."""
    scale: str | Callable[[Any], float] | None = None
    """Path of the factor of the scores, or the factor of a given layer; None: 1 / sqrt(head size)."""
    softcap: str | None = None
    """Path of the bound of the scores, softcap * tanh(score / softcap), which may be None."""
    head_size: str = "attention.self.attention_head_size"
    attention_dropout: str = "attention.self.dropout"
    """A dropout module or a number."""
    attention_dropout_called: bool = False
    """Stock calls that module, so its own training flag counts; else its probability applies while the layer is in training."""
    out: str = "attention.output.dense"
    out_dropout: str | None = "attention.output.dropout"
    attention_norm: str | None = "attention.output.LayerNorm"
    """After attention and residual; with `pre_norm`: before attention."""
    attention_output_norm: str | None = None
    """Between attention and the residual sum."""
    window: Callable[[Any], int | None] | None = None
    """How many tokens to each side a given layer attends to; None: all."""
    rotary: str | None = None
    """Name of the layer's argument that contains (cos, sin); they may be shorter than a head, whose rest is not rotated."""
    relative_bias: str | None = None
    """Name of the layer's argument that contains a bias (1, heads, length, length)."""
    relative_bias_class: str | None = None
    """The class whose compute_position_bias(hidden) computes that bias."""
    relative: RelativePositions | None = None
    distances_class: str | None = None
    """The class whose get_rel_pos(hidden) computes the positions of all distances."""

    # feed forward
    up: str = "intermediate.dense"
    gate: str | None = None
    """Path of the linear layer whose activated output is multiplied with that of `up`."""
    gated: bool = False
    """`up` computes gate and up side by side."""
    activation: str = "intermediate.intermediate_act_fn"
    inner_dropout: str | None = None
    down: str = "output.dense"
    down_dropout: str | None = "output.dropout"
    down_norm: str | None = "output.LayerNorm"
    """After feed forward and residual; with `pre_norm`: before feed forward."""
    down_output_norm: str | None = None
    """Between feed forward and the residual sum."""
    norm: Norm = "layer"
    pre_norm: bool = False
    parallel: str | None = None
    """Path of a flag: feed forward reads the layer's input, not the sum after attention (GPT-NeoX)."""
    tuple_until: int = 0
    """Layers return a tuple in transformers up to this major version."""
    tuple_size: int = 1
    """The length of that tuple: what follows the hidden states is None."""
    since: int = 4
    """The row applies to transformers from this major version on."""
    part: str | None = None
    """What it needs of transformers beyond that: a part of stoker/requires.py."""

    # embeddings: paths in the embeddings module
    word: str = "word_embeddings"
    position: str | None = "position_embeddings"
    token_type: str | None = "token_type_embeddings"
    embedding_projection: str | None = None
    """Path of a linear layer between the tables and the norm, or of None; with such a layer embeddings run as in stock."""
    embedding_norm: str = "LayerNorm"
    embedding_dropout: str = "dropout"
    positions_after_padding: bool = False
    """Positions count from padding_idx + 1, and padding tokens do not count (RoBERTa)."""

    # the model around the layers
    needs_stock: Callable[[Any], str | None] | None = None
    """The reason why a given base model always runs as stock does, None if it need not."""
    pooled: Callable[[Any, Any], Any] = lambda model, hidden: model.pooler(hidden)
    """The pooler's output from hidden states (batch, length, width)."""
    empty_mask: object = None
    """The attention mask for which the stock base model builds none."""
    pooler_slot_until: int = 0
    """With return_dict=False the output has an element for the pooler, even if None, up to this major version of transformers."""
    span_logits: str = "qa_outputs"
    """Path in the question-answering model of the module that computes start and end logits."""
    masked_lm: MaskedLM | None = None
    other_masked_lm: MaskedLM | None = None
    """A head that models of this family may have instead."""

    def projections(self) -> tuple[str, ...]:
        """The linear layers that compute q, k and v."""
        return (self.packed,) if self.packed else (self.query, self.key, self.value)

    def ups(self) -> tuple[str, ...]:
        """The linear layers of the first half of feed forward."""
        return (self.gate, self.up) if self.gate else (self.up,)

    def norms(self) -> tuple[str, ...]:
        """All norms of a layer."""
        found = (
            self.query_norm,
            self.key_norm,
            self.attention_norm,
            self.attention_output_norm,
            self.down_norm,
            self.down_output_norm,
        )
        return tuple(path for path in found if path is not None)

    def containers(self) -> tuple[str, ...]:
        """The modules inside a layer that contain the parts; the fused layer does not call them."""
        return _containers(*self.projections(), self.out, *self.ups(), self.down, *self.norms())


def _containers(*paths: str) -> tuple[str, ...]:
    """Every proper prefix of these paths, once."""
    prefixes = (path[:end] for path in paths for end, letter in enumerate(path) if letter == ".")
    return tuple(dict.fromkeys(prefixes))
