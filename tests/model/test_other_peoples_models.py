"""Models of transformers outside the table compute what stock computes, whatever they do with masks, windows and arguments."""

from __future__ import annotations

import copy
import io
import itertools
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import tiny_decoders as tiny
import torch
import transformers
from tiny_models import assert_same_gradients, gradients
from torch import Tensor, nn

import stoker
from stoker.model.sequences import Positions, counting

pytestmark = pytest.mark.skipif(
    int(transformers.__version__.split(".")[0]) < 5, reason="the interface of transformers 5"
)

_BERT_LIKE = {**tiny._COMMON, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_MOE = {**tiny._GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}


def _made(kind: str, config: Any, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return tiny.shaken(getattr(transformers, kind)._from_config(config, **options))


def _inputs(side: str = "right", lengths: tuple[int, ...] = tiny.LENGTHS) -> dict[str, Tensor]:
    padded = tiny.batch(side, lengths)
    return {name: padded[name] for name in ("input_ids", "attention_mask")}


def _run(
    model: nn.Module, inputs: dict[str, Any], output: str = "last_hidden_state"
) -> tuple[Tensor, dict[str, Tensor]]:
    """Values at real tokens, or all of them if there is no value per token; and the gradients of their squares."""
    result = getattr(model(**inputs), output)
    mask = inputs.get("attention_mask")
    if mask is not None and result.shape[:2] == mask.shape:
        result = result[mask.bool()]
    result.square().sum().backward()
    return result.detach(), gradients(model)


def _same(stock: nn.Module, model: nn.Module, inputs: dict[str, Any], output: str = "last_hidden_state") -> None:
    expected, expected_gradients = _run(stock, inputs, output)
    found, found_gradients = _run(model, inputs, output)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert_same_gradients(found_gradients, expected_gradients)


def _computed(model: nn.Module, inputs: dict[str, Any]) -> int:
    """The positions that a call of an optimized base model computes."""
    positions = Positions()
    with counting(positions):
        model(**inputs)
    return positions.computed


# --- Mixed precision

_AUTOCAST = {
    "Granite": ("GraniteModel", lambda: transformers.GraniteConfig(**tiny._GROUPED)),
    "Gemma": ("GemmaModel", lambda: transformers.GemmaConfig(**tiny._GROUPED, head_dim=8)),
    "Mixtral": ("MixtralModel", lambda: transformers.MixtralConfig(**_MOE)),
}


@pytest.mark.parametrize("first", ["fp32", "bf16"])
@pytest.mark.parametrize("name", _AUTOCAST)
def test_autocast_runs_without_padding(name: str, first: str) -> None:
    kind, config = _AUTOCAST[name]
    model = stoker.optimize(_made(kind, config()))
    inputs = _inputs()
    for precision in (first, "bf16", "fp32", "bf16"):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            hidden = model(**inputs).last_hidden_state[inputs["attention_mask"].bool()]
            assert _computed(model, inputs) == sum(tiny.LENGTHS)
        hidden.square().sum().backward()
        assert bool(hidden.isfinite().all())
    assert "a call of" not in str(stoker.report(model))


# --- What a query sees


def _pegasus_x() -> nn.Module:
    sizes = {
        f"{side}_{part}": n for side in ("encoder", "decoder") for part, n in (("layers", 1), ("attention_heads", 4))
    }
    config = transformers.PegasusXConfig(
        vocab_size=99, d_model=32, encoder_ffn_dim=48, decoder_ffn_dim=48, **sizes, dropout=0.0, num_global_tokens=4,
        block_size=8, max_position_embeddings=64, forced_eos_token_id=None,
    )  # fmt: skip
    return _made("PegasusXForConditionalGeneration", config)


def test_a_decoder_that_relies_on_its_mask_does_not_see_the_future() -> None:
    stock = _pegasus_x()
    model = stoker.optimize(copy.deepcopy(stock))
    inputs = {**_inputs(), "decoder_input_ids": torch.randint(5, 99, (4, 9))}
    _same(stock, model, inputs, "logits")


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("name", ["Splinter", "Align"])
def test_an_encoder_that_says_nothing_of_causality_sees_both_sides(name: str, padded: bool) -> None:
    kind, config = {
        "Splinter": ("SplinterModel", transformers.SplinterConfig(**_BERT_LIKE)),
        "Align": ("AlignTextModel", transformers.AlignTextConfig(**_BERT_LIKE)),
    }[name]
    stock = _made(kind, copy.deepcopy(config))
    model = _made(kind, config, attn_implementation="stoker")
    inputs = _inputs(lengths=tiny.LENGTHS if padded else (11, 11))
    _same(stock, model, inputs if padded else {"input_ids": inputs["input_ids"]})


@pytest.mark.parametrize("how", ["optimize", "attention alone"])
def test_layers_that_contradict_the_mask_see_what_they_see_in_stock(how: str) -> None:
    """Without padding, sdpa gets no mask and follows the layer; PaliGemma's layers may say that they are not causal."""
    stock = _made("GraniteModel", transformers.GraniteConfig(**tiny._GROUPED))
    for layer in stock.layers:
        layer.self_attn.is_causal = False
    model = stoker.optimize(copy.deepcopy(stock)) if how == "optimize" else _with_attention(stock)
    for inputs in (_inputs(), {"input_ids": _inputs()["input_ids"]}):
        stock.zero_grad()
        model.zero_grad()
        _same(stock, model, inputs)


def _moonshine() -> tuple[nn.Module, dict[str, Tensor]]:
    sizes = {
        f"{side}num_{part}": n
        for side in ("", "encoder_")
        for part, n in (("hidden_layers", 1), ("attention_heads", 4))
    }
    config = transformers.MoonshineConfig(
        vocab_size=99, hidden_size=32, intermediate_size=48, **sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2
    )
    inputs = {"input_values": torch.randn(2, 4000), "decoder_input_ids": torch.randint(5, 99, (2, 9))}
    return _made("MoonshineModel", config), inputs


def _informer() -> tuple[nn.Module, dict[str, Tensor]]:
    sizes = {
        f"{side}_{part}": n
        for side in ("encoder", "decoder")
        for part, n in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 32))
    }
    config = transformers.InformerConfig(
        prediction_length=4, context_length=8, lags_sequence=[1], num_time_features=1, d_model=16, dropout=0.0, **sizes
    )
    inputs = {
        name: torch.randn(2, length, *width)
        for part, length in (("past", 9), ("future", 4))
        for name, width in ((f"{part}_values", ()), (f"{part}_time_features", (1,)))
    }
    # its sparse attention draws keys, and its norms follow the batch in training
    return _made("InformerModel", config).eval(), {**inputs, "past_observed_mask": torch.ones(2, 9)}


@pytest.mark.parametrize("how", ["optimize", "attention alone"])
@pytest.mark.parametrize("make", [_moonshine, _informer])
def test_layers_that_ask_whether_there_is_a_mask_get_the_answer_of_stock(
    make: Callable[[], tuple[nn.Module, dict[str, Tensor]]], how: str
) -> None:
    """Moonshine's decoder is causal "if there is no mask"; Informer's encoder halves the length of all but its mask."""
    stock, inputs = make()
    model = stoker.optimize(copy.deepcopy(stock)) if how == "optimize" else _with_attention(stock)
    results = []
    for one in (stock, model):
        torch.manual_seed(0)
        results.append(_run(one, inputs))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-4, atol=1e-4)
    assert_same_gradients(results[1][1], results[0][1])


@pytest.mark.parametrize("stock", ["sdpa", "eager"])
def test_there_is_a_mask_exactly_where_stock_makes_one(stock: str) -> None:
    from transformers import masking_utils

    from stoker.model.attention_interface import stock_implementation

    model = transformers.GraniteModel if stock == "sdpa" else transformers.SplinterModel  # their code is imported here
    made = model.config_class
    options = {**tiny._COMMON, "sliding_window": 4}
    configs = {name: made(**options, attn_implementation=name) for name in (stock, "stoker")}
    assert stock_implementation(configs["stoker"]) == stock
    for kind, length, keys, given, skip in itertools.product(
        ("causal", "bidirectional", "sliding_window_causal", "bidirectional_sliding_window"),
        (1, 3, 7),
        (None, 5),
        (None, "ones", "padding", "short"),
        (True, False),
    ):
        if keys is not None and kind != "bidirectional":
            continue  # only cross attention has other keys
        width = (keys or length) - (given == "short")
        mask = None if given is None else torch.ones(2, width, dtype=torch.long)
        if given == "padding":
            mask[1, -1] = 0
        others: dict[str, Any] = {"encoder_hidden_states": torch.zeros(2, keys, 8)} if keys else {}
        if "sliding" not in kind:
            others["allow_is_bidirectional_skip" if kind == "bidirectional" else "allow_is_causal_skip"] = skip
        expected, found = (
            getattr(masking_utils, f"create_{kind}_mask")(
                config=config,
                inputs_embeds=torch.zeros(2, length, 8),
                attention_mask=mask,
                past_key_values=None,
                **others,
            )
            for config in configs.values()
        )
        case = (kind, length, keys, given, skip)
        assert (found is None) == (expected is None), case
        if expected is not None:
            assert torch.equal(found + 0, expected + 0), case


def _t5_gemma(sliding: bool = True) -> nn.Module:
    options = {**tiny._GROUPED, "head_dim": 8, "sliding_window": 3, "query_pre_attn_scalar": 8}
    types = ["sliding_attention" if sliding else "full_attention", "full_attention"]
    module = {**options, "layer_types": types}
    config = transformers.T5GemmaConfig(encoder=module, decoder=module, vocab_size=99, is_encoder_decoder=False)
    return _made("T5GemmaEncoderModel", config)


@pytest.mark.parametrize("unpad", [True, False])
def test_an_encoders_window_reaches_to_both_sides_as_in_stock(unpad: bool) -> None:
    stock = _t5_gemma()
    model = stoker.optimize(copy.deepcopy(stock), unpad=unpad)
    _same(stock, model, _inputs())


def test_a_batch_longer_than_the_window_is_tried_anew(caplog: pytest.LogCaptureFixture) -> None:
    """A fault that only the window shows must be found when the window first matters."""
    config = transformers.SmolLM3Config(
        **tiny._GROUPED, use_sliding_window=True, sliding_window=8, layer_types=["sliding_attention"] * 2
    )
    model = _made("SmolLM3Model", config)

    class Off(type(model.layers[0].self_attn)):  # type: ignore[misc]
        """Packed rows, which are one long row, are treated differently beyond the window."""

        def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            scale = 2.0 if hidden_states.shape[0] == 1 and hidden_states.shape[1] > 16 else 1.0
            return super().forward(hidden_states * scale, *args, **kwargs)

    model.layers[0].self_attn.__class__ = Off
    stock = copy.deepcopy(model)
    stoker.optimize(model)
    assert _computed(model, _inputs(lengths=(5, 7))) == 12
    _same(stock, model, _inputs(lengths=(16, 11)))
    assert "other results" in caplog.text


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("how", ["unpad=False", "attention alone"])
def test_rows_at_padding_have_the_values_of_stock(how: str, side: str) -> None:
    sizes = {
        "laurel_rank": 4,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 99,
        "num_kv_shared_layers": 0,
    }
    config = transformers.Gemma3nTextConfig(
        **{**tiny._GROUPED, "intermediate_size": [48, 48]}, **sizes, head_dim=8, sliding_window=4,
        layer_types=["sliding_attention", "full_attention"], activation_sparsity_pattern=[0.0, 0.0],
    )  # fmt: skip
    stock = _made("Gemma3nTextModel", config)
    model = copy.deepcopy(stock)
    if how == "unpad=False":
        stoker.optimize(model, unpad=False)
    else:
        model.set_attn_implementation("stoker")
    inputs = _inputs(side)
    _same(stock, model, inputs)
    with torch.no_grad():
        torch.testing.assert_close(
            model(**inputs).last_hidden_state, stock(**inputs).last_hidden_state, rtol=1e-3, atol=1e-3
        )


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_model_that_pools_the_last_position_gets_that_of_stock(side: str) -> None:
    stock = _made("SiglipTextModel", transformers.SiglipTextConfig(**tiny._COMMON))
    model = stoker.optimize(copy.deepcopy(stock))
    _same(stock, model, _inputs(side), "pooler_output")


_READ_THEIR_MASK = {
    "Doge": ("DogeModel", lambda: transformers.DogeConfig(**tiny._GROUPED, keep_window_size=4)),
    "Gemma4": (
        "Gemma4TextModel",
        lambda: transformers.Gemma4TextConfig(
            **tiny._GROUPED, head_dim=8, global_head_dim=8, sliding_window=4, hidden_size_per_layer_input=0,
            layer_types=["sliding_attention", "full_attention"], num_kv_shared_layers=0,
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("lengths", [tiny.LENGTHS, (11, 11)], ids=["padded", "no padding"])
@pytest.mark.parametrize("name", _READ_THEIR_MASK)
def test_a_model_that_reads_its_mask_gets_one_of_four_dimensions(name: str, lengths: tuple[int, ...]) -> None:
    kind, config = _READ_THEIR_MASK[name]
    stock = _made(kind, config())
    inputs = _inputs(lengths=lengths)
    if len(set(lengths)) == 1:
        inputs = {name: value[:, :11] for name, value in inputs.items()}
    for model in (stoker.optimize(copy.deepcopy(stock)), _with_attention(stock)):
        stock.zero_grad()
        _same(stock, model, inputs)


@pytest.mark.parametrize("how", ["optimize", "attention alone"])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("kept", [1, 3])
def test_the_last_queries_alone_see_what_they_see_in_stock(kept: int, padded: bool, how: str) -> None:
    """Gemma 4 drops all other queries in its last layers, but not if the implementation is sdpa and there is no mask."""
    config = transformers.Gemma4TextConfig(
        **{**tiny._GROUPED, "num_hidden_layers": 4}, head_dim=8, global_head_dim=8, sliding_window=32,
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=99, num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    stock = _made("Gemma4ForCausalLM", config)
    model = stoker.optimize(copy.deepcopy(stock)) if how == "optimize" else _with_attention(stock)
    inputs = _inputs("left") if padded else {"input_ids": _inputs()["input_ids"]}
    _same(stock, model, {**inputs, "logits_to_keep": kept}, "logits")


def test_a_mask_of_an_outer_model_is_named_as_what_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """PaliGemma makes the mask of the text model inside of it."""
    from transformers.masking_utils import create_causal_mask

    stock = _made("GraniteModel", transformers.GraniteConfig(**tiny._GROUPED))
    model = stoker.optimize(copy.deepcopy(stock))
    inputs = _inputs()
    ids = inputs["input_ids"]
    found, expected = (
        one(
            input_ids=ids,
            attention_mask=create_causal_mask(one.config, torch.zeros(*ids.shape, 1), inputs["attention_mask"], None),
        ).last_hidden_state[inputs["attention_mask"].bool()]
        for one in (model, stock)
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert "because the attention mask has 4 dimensions and is not (batch, length)" in caplog.text


def _with_attention(stock: nn.Module) -> nn.Module:
    model = copy.deepcopy(stock)
    model.set_attn_implementation("stoker")
    return model


def test_learned_queries_for_all_rows_run_as_stock() -> None:
    """As in granite_speech: the queries have one row, the keys one for each example."""
    from stoker.model.attention_interface import stoker_attention

    query, key = torch.randn(1, 2, 3, 8), torch.randn(5, 2, 7, 8)
    found, _ = stoker_attention(nn.Identity(), query, key, key, None, is_causal=False)
    expected = nn.functional.scaled_dot_product_attention(query.expand(5, -1, -1, -1), key, key)
    torch.testing.assert_close(found, expected.transpose(1, 2))


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_model_whose_cache_another_one_reads_keeps_its_padding(side: str, caplog: pytest.LogCaptureFixture) -> None:
    """DiffusionGemma's encoder fills a cache in every call, and the decoder adds its own keys to it."""
    sizes = {"head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    experts = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
    config = transformers.DiffusionGemmaConfig(
        text_config={**tiny._GROUPED, **sizes, **experts, "global_head_dim": 16},
        vision_config={"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2},
        image_token_id=98,
    )
    stock = _made("DiffusionGemmaModel", config)
    model = stoker.optimize(copy.deepcopy(stock))
    _same(stock, model, {**_inputs(side), "decoder_input_ids": torch.randint(5, 90, (4, 6))})
    assert "because it fills a cache" in caplog.text


def test_an_indexer_still_chooses_the_keys(caplog: pytest.LogCaptureFixture) -> None:
    """DeepSeek V3.2 adds its choice to the mask only for implementations that it names."""
    heads = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    index = {"index_topk": 3, "index_head_dim": 16, "index_n_heads": 2}
    experts = {
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    }
    config = transformers.DeepseekV32Config(
        **{**tiny._COMMON, **heads, **index, **experts}, num_key_value_heads=4, head_dim=8, first_k_dense_replace=1
    )
    stock = _made("DeepseekV32Model", config)
    for model in (stoker.optimize(copy.deepcopy(stock)), _with_attention(stock)):
        stock.zero_grad()
        _same(stock, model, _inputs())
        assert "implementations that it names" in caplog.text
        caplog.clear()


def test_an_audio_model_gets_the_mask_of_its_eager_attention() -> None:
    """Gemma 4's audio model reads the smallest number of its mask's type."""
    config = transformers.Gemma4AudioConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    stock = _made("Gemma4AudioModel", config)
    mask = torch.ones(2, 48, dtype=torch.bool)
    mask[1, 30:] = False
    features = torch.randn(2, 48, 128)
    found, expected = (
        made(features, attention_mask=mask).last_hidden_state.detach() for made in (_with_attention(stock), stock)
    )
    torch.testing.assert_close(found, expected)


def test_a_text_model_with_a_projection_can_be_tried() -> None:
    former = {**_BERT_LIKE, "encoder_hidden_size": 32, "use_qformer_text_input": True}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    text = {"model_type": "opt", "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 1, "ffn_dim": 48}
    config = transformers.Blip2Config(
        qformer_config=former, vision_config={**vision, "image_size": 8, "patch_size": 4}, text_config=text
    )
    stock = _made("Blip2TextModelWithProjection", config)
    _same(stock, stoker.optimize(copy.deepcopy(stock)), _inputs())


# --- Outputs and arguments


@pytest.mark.parametrize("side", ["right", "left"])
def test_router_logits_are_laid_out_as_the_batch(side: str) -> None:
    stock = _made("MixtralForCausalLM", transformers.MixtralConfig(**_MOE, output_router_logits=True))
    model = stoker.optimize(copy.deepcopy(stock))
    inputs = {**tiny.batch(side), "use_cache": False}
    losses = []
    for made in (stock, model):
        output = made(**inputs)
        output.loss.backward()
        losses.append((output.loss.detach(), output.aux_loss.detach(), output.router_logits[0].shape))
    torch.testing.assert_close(losses[1][:2], losses[0][:2], rtol=1e-4, atol=1e-5)
    assert losses[1][2] == losses[0][2]
    assert "padding-free base model" in str(stoker.report(model))
    assert "a call of" not in str(stoker.report(model))


def test_arguments_per_token_are_packed() -> None:
    config = transformers.ErnieConfig(**_BERT_LIKE, use_task_id=True)
    stock = _made("ErnieModel", config)
    model = stoker.optimize(copy.deepcopy(stock))
    inputs = _inputs()
    inputs["task_type_ids"] = torch.randint(0, 3, inputs["input_ids"].shape)
    _same(stock, model, inputs)
    assert _computed(model, inputs) == sum(tiny.LENGTHS)


def test_all_arguments_per_token_of_rocbert_are_packed() -> None:
    sizes = {"pronunciation_vocab_size": 50, "shape_vocab_size": 50, "pronunciation_embed_dim": 8, "shape_embed_dim": 8}
    stock = _made("RoCBertModel", transformers.RoCBertConfig(**_BERT_LIKE, **sizes))
    model = stoker.optimize(copy.deepcopy(stock))
    inputs = _inputs()
    for name in ("input_shape_ids", "input_pronunciation_ids"):
        inputs[name] = torch.randint(0, 50, inputs["input_ids"].shape)
    _same(stock, model, inputs)
    assert _computed(model, inputs) == sum(tiny.LENGTHS)


def test_an_argument_that_is_not_per_token_lets_the_call_run_as_stock(caplog: pytest.LogCaptureFixture) -> None:
    stock = _made("ErnieModel", transformers.ErnieConfig(**_BERT_LIKE))
    model = stoker.optimize(copy.deepcopy(stock))
    _same(stock, model, {**_inputs(), "somewhere": torch.ones(3)})
    assert "its argument somewhere has shape (3,), which is not one value per token" in caplog.text


def test_an_error_over_packed_rows_does_not_reach_the_user(caplog: pytest.LogCaptureFixture) -> None:
    model = _made("GraniteModel", transformers.GraniteConfig(**tiny._GROUPED))

    class Fails(type(model.norm)):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor) -> Tensor:
            if hidden_states.shape[0] == 1 and hidden_states.shape[1] > 15:
                raise IndexError("no such row")
            return super().forward(hidden_states)  # type: ignore[no-any-return]

    model.norm.__class__ = Fails
    stock = copy.deepcopy(model)
    _same(stock, stoker.optimize(model), _inputs())
    assert "IndexError: no such row" in caplog.text


# --- Configurations


def test_another_model_with_the_same_configuration_keeps_its_attention() -> None:
    config = transformers.GraniteConfig(**tiny._GROUPED)
    model, other = transformers.GraniteModel(config), transformers.GraniteModel(config)
    stoker.optimize(model)
    assert model.config._attn_implementation == "stoker"
    assert config._attn_implementation == other.config._attn_implementation == "sdpa"
    config.use_cache = False
    assert model.config.use_cache is False
    stoker.restore(model)
    assert model.config is config


def test_a_copy_of_an_optimized_model_can_be_restored() -> None:
    model = stoker.optimize(_made("GraniteModel", transformers.GraniteConfig(**tiny._GROUPED)))
    twin = copy.deepcopy(model)
    assert twin.config is not model.config
    assert twin.layers[0].self_attn.config is twin.config
    assert _computed(twin, _inputs()) == sum(tiny.LENGTHS)
    stoker.restore(twin)
    assert twin.config._attn_implementation == "sdpa"
    assert twin.layers[0].self_attn.config is twin.config
    assert model.config._attn_implementation == "stoker"


def test_a_pickle_of_an_optimized_model_has_the_stock_attention() -> None:
    model = stoker.optimize(_made("GraniteModel", transformers.GraniteConfig(**tiny._GROUPED)))
    loaded = pickle.loads(pickle.dumps(model))
    assert loaded.config._attn_implementation == "sdpa"
    assert type(loaded.config) is transformers.GraniteConfig
    stream = io.BytesIO()
    torch.save(model, stream)
    assert b"stoker" not in stream.getvalue()


def test_a_copy_of_an_optimized_models_configuration_is_stock() -> None:
    model = stoker.optimize(_made("GraniteModel", transformers.GraniteConfig(**tiny._GROUPED)))
    for config in (copy.deepcopy(model.config), copy.copy(model.config)):
        assert type(config) is transformers.GraniteConfig
        assert config._attn_implementation == "sdpa"


def test_the_configuration_of_a_part_is_switched_in_the_whole_too() -> None:
    config = transformers.SiglipConfig(
        text_config={**tiny._COMMON},
        vision_config={**tiny._COMMON, "image_size": 8, "patch_size": 4},
    )
    model = stoker.optimize(transformers.SiglipModel(config))
    assert model.config.text_config is model.text_model.config
    assert model.config.text_config._attn_implementation == "stoker"
    assert config.text_config._attn_implementation == "sdpa"
    assert "stoker" not in model.config.to_json_string()
    stoker.restore(model)
    assert model.config is config
    assert model.text_model.config is config.text_config


def test_an_implementation_chosen_after_optimize_counts() -> None:
    model = stoker.optimize(_made("GraniteModel", transformers.GraniteConfig(**tiny._GROUPED)))
    model.set_attn_implementation("eager")
    assert model.layers[0].self_attn.config._attn_implementation == "eager"


# --- Reasons

_REASONS = {
    "Splinter": ("SplinterModel", lambda: transformers.SplinterConfig(**_BERT_LIKE), "'eager', the only one"),
    "T5": (
        "T5ForConditionalGeneration",
        lambda: transformers.T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4),
        "it is an encoder-decoder",
    ),
    "XLNet": (
        "XLNetModel",
        lambda: transformers.XLNetConfig(vocab_size=99, d_model=32, n_layer=1, n_head=4, d_inner=48),
        "its forward does not take position_ids",
    ),
    "BLOOM": (
        "BloomModel",
        lambda: transformers.BloomConfig(vocab_size=99, hidden_size=32, n_layer=1, n_head=4),
        "its forward does not take position_ids",
    ),
    "FNet": (
        "FNetModel",
        lambda: transformers.FNetConfig(vocab_size=99, hidden_size=32, num_hidden_layers=1, intermediate_size=48),
        "its forward does not take attention_mask",
    ),
    "Mamba": (
        "MambaModel",
        lambda: transformers.MambaConfig(vocab_size=99, hidden_size=32, num_hidden_layers=1),
        "its forward does not take position_ids",
    ),
}


@pytest.mark.parametrize("name", _REASONS)
def test_a_model_that_runs_as_stock_says_why(name: str, caplog: pytest.LogCaptureFixture) -> None:
    kind, config, reason = _REASONS[name]
    model = stoker.optimize(_made(kind, config()))
    inputs = _inputs()
    if name == "FNet":
        del inputs["attention_mask"]
    if name == "T5":
        inputs["decoder_input_ids"] = inputs["input_ids"]
    model(**inputs)
    logged = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert any(reason in one for one in logged), logged
    assert not any("chosen by the user" in one for one in logged)
    assert reason in str(stoker.report(model))


# --- Parts that a new version of transformers has renamed


def test_a_renamed_part_of_a_layer_leaves_the_model_stock(caplog: pytest.LogCaptureFixture) -> None:
    stock = tiny.model("Llama")

    class Renamed(type(stock.model.layers[0].mlp)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    for layer in stock.model.layers:
        layer.mlp.__class__ = Renamed
        layer.mlp.down = layer.mlp._modules.pop("down_proj")
    model = stoker.optimize(copy.deepcopy(stock))
    padded = tiny.batch()
    for made in (stock, model):
        made(**padded).loss.backward()
    assert_same_gradients(gradients(model), gradients(stock))
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len([one for one in warned if "has no mlp.down_proj" in one]) == 1
    assert "has no mlp.down_proj" in str(stoker.report(model))
