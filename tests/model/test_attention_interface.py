"""attn_implementation="stoker" gives what transformers' own implementations give, and builds no (length, length) mask."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import tiny_decoders as tiny
import torch
import transformers
from tiny_models import assert_same_gradients, gradients
from torch import nn
from transformers import masking_utils

import stoker  # noqa: F401 - registers the implementation

pytestmark = pytest.mark.skipif(
    int(transformers.__version__.split(".")[0]) < 5, reason="the interface of transformers 5"
)

_GPT_OSS = transformers.GptOssConfig if hasattr(transformers, "GptOssConfig") else None


def _pair(stock: nn.Module) -> tuple[nn.Module, nn.Module]:
    """`stock` with its own attention, and a copy with Stoker's."""
    model = copy.deepcopy(stock)
    model.set_attn_implementation("stoker")
    return stock, model


def _same(stock: nn.Module, model: nn.Module, inputs: dict[str, Any]) -> None:
    losses = []
    for made in (stock, model):
        loss = made(**inputs).loss
        loss.backward()
        losses.append(loss.detach())
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
    assert_same_gradients(gradients(model), gradients(stock))


@pytest.mark.parametrize(
    "order",
    [
        "import stoker, transformers",
        "import transformers, stoker",
        # The first of these imports torch half-way through, and `import torch` imports an installed Stoker.
        "from transformers import Trainer; import stoker",
    ],
)
def test_the_name_is_known_after_import_stoker_in_either_order(order: str) -> None:
    code = f"{order}; from transformers import AttentionInterface; print('stoker' in AttentionInterface())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "True"
    assert "stoker" not in done.stderr


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("family", list(tiny.CONFIGS))
def test_padded_batches_without_optimize(family: str, side: str) -> None:
    stock, model = _pair(tiny.model(family, attn_implementation="eager"))
    _same(stock, model, {**tiny.batch(side), "use_cache": False})


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma2"])
def test_packed_rows_need_no_square_mask(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, model = _pair(tiny.model(family, attn_implementation="eager"))
    flat = {**tiny.flattened(tiny.batch()), "use_cache": False}
    stock(**flat).loss.backward()
    monkeypatch.setattr(masking_utils, "sdpa_mask", lambda *_, **__: pytest.fail("a square mask was built"))
    output = model(**flat)
    output.loss.backward()
    assert_same_gradients(gradients(model), gradients(stock))


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma2"])
def test_cumulative_lengths_without_positions_tell_sequences_apart(family: str) -> None:
    """As DataCollatorWithFlattening(return_position_ids=False, return_flash_attn_kwargs=True) gives them."""
    stock, model = _pair(tiny.model(family, attn_implementation="eager"))
    flat = {**tiny.flattened(tiny.batch()), "use_cache": False}
    expected = stock(**flat).loss
    del flat["position_ids"]
    ends = torch.tensor([0, *tiny.LENGTHS]).cumsum(0).int()
    found = model(**flat, cu_seq_lens_q=ends, cu_seq_lens_k=ends).loss
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(_GPT_OSS is None, reason="this transformers has no model with attention sinks")
def test_attention_sinks_and_windows() -> None:
    assert _GPT_OSS is not None
    torch.manual_seed(0)
    options = {**tiny._GROUPED, "intermediate_size": 32, "head_dim": 8, "sliding_window": 4, "attention_dropout": 0.0}
    made = transformers.AutoModelForCausalLM.from_config(
        _GPT_OSS(**options, num_local_experts=2, num_experts_per_tok=1), attn_implementation="eager"
    )
    stock, model = _pair(tiny.shaken(made))
    _same(stock, model, {**tiny.batch(), "use_cache": False})
    assert model.model.layers[0].self_attn.sinks.grad.abs().sum() > 0


def _encoder_decoder(name: str) -> nn.Module:
    common = {"vocab_size": 99, "d_model": 32, "decoder_start_token_id": 0, "pad_token_id": 0}
    if name == "T5":
        made: nn.Module = transformers.T5ForConditionalGeneration(
            transformers.T5Config(**common, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0)
        )
    else:
        sizes = {
            f"{side}_{part}": n
            for side in ("encoder", "decoder")
            for part, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))
        }
        made = transformers.BartForConditionalGeneration(
            transformers.BartConfig(
                **common, **sizes, max_position_embeddings=64, dropout=0.0, forced_eos_token_id=None
            )
        )
    return tiny.shaken(made)


@pytest.mark.parametrize("name", ["T5", "BART"])
def test_encoder_decoders_with_position_bias_and_cross_attention(name: str) -> None:
    torch.manual_seed(0)
    stock, model = _pair(_encoder_decoder(name))
    padded = tiny.batch()
    labels = torch.randint(5, 99, (4, 6))
    labels[2, 4:] = -100
    _same(
        stock, model, {"input_ids": padded["input_ids"], "attention_mask": padded["attention_mask"], "labels": labels}
    )


def _double(inputs: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    model.double()
    return inputs


def _holes(inputs: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    inputs["attention_mask"][1, 5] = 0
    return inputs


def _square(inputs: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    length = inputs["input_ids"].shape[1]
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    mask[:, 3] = False
    mask[3, 3] = True
    return {**inputs, "attention_mask": mask.expand(4, 1, length, length)}


@pytest.mark.parametrize("change", [_double, _holes, _square])
def test_what_the_kernel_cannot_do_is_computed_as_transformers_does(change: Any) -> None:
    stock, model = _pair(tiny.model("Mistral", attn_implementation="sdpa"))
    inputs = tiny.batch()
    change(dict(inputs), stock)
    _same(stock, model, {**change(inputs, model), "use_cache": False})


_SMALL = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_OWN_ATTENTION: dict[str, tuple[Any, Any]] = {
    "BLOOM": (
        transformers.BloomForCausalLM,
        lambda: transformers.BloomConfig(vocab_size=99, hidden_size=32, n_layer=2, n_head=4),
    ),
    "CodeGen": (
        transformers.CodeGenForCausalLM,
        lambda: transformers.CodeGenConfig(vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=8),
    ),
    "MPNet": (
        transformers.MPNetForTokenClassification,
        lambda: transformers.MPNetConfig(**_SMALL, intermediate_size=48, max_position_embeddings=64),
    ),
}


@pytest.mark.parametrize("rows", [(7, 12, 1, 9), (7,), (12, 12)], ids=["padded", "one padded row", "no padding"])
@pytest.mark.parametrize("name", list(_OWN_ATTENTION))
def test_a_model_that_computes_its_own_attention_gets_the_mask_of_eager(name: str, rows: tuple[int, ...]) -> None:
    kind, config = _OWN_ATTENTION[name]
    torch.manual_seed(0)
    stock = tiny.shaken(kind._from_config(config(), attn_implementation="eager")).eval()
    model = kind._from_config(config(), attn_implementation="stoker").eval()
    model.load_state_dict(stock.state_dict())
    inputs = tiny.batch(lengths=rows)
    del inputs["labels"]
    expected, found = (made(**inputs).logits.detach() for made in (stock, model))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma2"])
def test_generation_with_a_cache_is_that_of_eager(family: str) -> None:
    stock, model = _pair(tiny.model(family, attn_implementation="eager").eval())
    padded = tiny.batch("left", (5, 9))
    prompts = {name: padded[name] for name in ("input_ids", "attention_mask")}
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(**prompts, **options), stock.generate(**prompts, **options))


def test_compiled_models_run_stock_operators_without_breaks() -> None:
    """Stoker's kernels choose by the values of the mask, which one compiled graph cannot do."""
    stock, model = _pair(tiny.model("Mistral", attn_implementation="sdpa").eval())
    inputs = {**tiny.batch(), "use_cache": False}
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(**inputs).loss, stock(**inputs).loss, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_autocast_runs_the_kernel_in_bf16(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary positions make queries and keys fp32 there, and values stay bf16."""
    from transformers.integrations import sdpa_attention

    stock, model = _pair(tiny.model(family, attn_implementation="eager"))
    # with a window, rows at padding are left to transformers
    lengths = (12, 12) if family == "Gemma2" else tiny.LENGTHS
    inputs = {name: value[:, :12] for name, value in tiny.batch(lengths=lengths).items()}
    inputs["use_cache"] = False
    with torch.autocast("cpu", torch.bfloat16):
        expected = stock(**inputs).loss
        for module in (sdpa_attention, sys.modules[type(stock).__module__]):
            name = "sdpa_attention_forward" if module is sdpa_attention else "eager_attention_forward"
            monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("transformers' attention was used"))
        found = model(**inputs).loss
    found.backward()
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
