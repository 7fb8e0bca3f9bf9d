"""Foreign modules inside a model, or around its parts: results stay those of stock, padding-free or not."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import tiny_models as tiny
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import stoker

HEAD = "SequenceClassification"


def _same_as_stock(stock: nn.Module, model: nn.Module, family: str = "Bert", tolerance: float = 1e-3) -> None:
    """Loss and gradients of a padded batch with a head that ignores padding."""
    full = tiny.batch(family, HEAD)
    losses = []
    for one in (stock, model):
        loss = one(**full.kwargs).loss
        loss.backward()
        losses.append(loss.detach())
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
    tiny.assert_same_gradients(tiny.gradients(model), tiny.gradients(stock), tolerance)


def _reasons(model: nn.Module) -> str:
    return "; ".join(why for what, why in stoker.report(model).left_alone if "call of" in what)


def _base(model: Any) -> Any:
    return getattr(model, model.base_model_prefix)


# --- activation checkpointing from outside a layer


class _Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool, **options: Any) -> None:
        super().__init__()
        self.inner, self.reentrant, self.options = inner, reentrant, options

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run = lambda *again: self.inner(*again, **kwargs)  # noqa: E731
        return checkpoint(run, *args, use_reentrant=self.reentrant, **self.options)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("family", ["Bert", "MPNet", "ModernBert"])
def test_a_checkpoint_around_each_layer_recomputes_the_same_sequences(family: str, reentrant: bool) -> None:
    stock = tiny.model(family, HEAD)
    model = stoker.optimize(copy.deepcopy(stock), dtype=torch.float32)
    base = _base(model)
    layers = base.layers if family == "ModernBert" else base.encoder.layer
    for index, layer in enumerate(layers):
        layers[index] = _Checkpointed(layer, reentrant)
        if family == "ModernBert":
            layers[index].attention_type = layer.attention_type
    full = tiny.batch(family, HEAD)
    # two batches in flight must not be mixed up
    other = model(**tiny.batch(family, HEAD, lengths=(9, 3, 12, 5), seed=2).kwargs).loss
    model(**full.kwargs).loss.backward()
    stock(**full.kwargs).loss.backward()
    found = {name.replace(".inner", ""): gradient for name, gradient in tiny.gradients(model).items()}
    tiny.assert_same_gradients(found, tiny.gradients(stock), 1e-3)
    assert _reasons(model) == ""
    other.backward()


class _CheckpointedEncoder(_Checkpointed):
    """Passes a tensor through the checkpoint: torch's reentrant one sees none within an output class."""

    def forward(self, hidden: torch.Tensor, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

        once = checkpoint(lambda x: self.inner(x, **kwargs)[0], hidden, use_reentrant=self.reentrant)
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=once)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("family", ["Bert", "MPNet"])
def test_a_checkpoint_around_the_encoder_recomputes_the_same_sequences(family: str, reentrant: bool) -> None:
    stock = tiny.model(family, HEAD)
    model = stoker.optimize(copy.deepcopy(stock), dtype=torch.float32)
    base = _base(model)
    base.encoder = _CheckpointedEncoder(base.encoder, reentrant)
    full = tiny.batch(family, HEAD)
    model(**full.kwargs).loss.backward()
    stock(**full.kwargs).loss.backward()
    found = {name.replace(".inner", ""): gradient for name, gradient in tiny.gradients(model).items()}
    tiny.assert_same_gradients(found, tiny.gradients(stock), 1e-3)


def test_torchs_checkpoint_wrapper_gives_the_gradients_of_stock() -> None:
    wrapping = pytest.importorskip("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    stock = tiny.model("Bert", HEAD)
    model = stoker.optimize(copy.deepcopy(stock), dtype=torch.float32)
    kind = type(model.bert.encoder.layer[0])
    for impl in (wrapping.CheckpointImpl.REENTRANT, wrapping.CheckpointImpl.NO_REENTRANT):
        wrapped, expected = copy.deepcopy(model), copy.deepcopy(stock)
        wrapping.apply_activation_checkpointing(
            wrapped,
            checkpoint_wrapper_fn=lambda module, impl=impl: wrapping.checkpoint_wrapper(module, checkpoint_impl=impl),
            check_fn=lambda module: isinstance(module, kind),
        )
        full = tiny.batch("Bert", HEAD)
        wrapped(**full.kwargs).loss.backward()
        expected(**full.kwargs).loss.backward()
        found = {name.replace("._checkpoint_wrapped_module", ""): p for name, p in tiny.gradients(wrapped).items()}
        tiny.assert_same_gradients(found, tiny.gradients(expected), 1e-3)


def test_selective_checkpoints_around_layers_recompute_the_same_sequences() -> None:
    selective = pytest.importorskip("torch.utils.checkpoint").create_selective_checkpoint_contexts
    stock = tiny.model("MPNet", HEAD)
    model = stoker.optimize(copy.deepcopy(stock), dtype=torch.float32)
    # its contexts are dispatch modes: whole models run as stock inside one, but layers must not
    contexts = functools.partial(selective, [torch.ops.aten.mm.default])
    encoder, full = _base(model).encoder, tiny.batch("MPNet", HEAD)
    for index, layer in enumerate(encoder.layer):
        encoder.layer[index] = _Checkpointed(layer, False, context_fn=contexts)
    model(**full.kwargs).loss.backward()
    stock(**full.kwargs).loss.backward()
    found = {name.replace(".inner", ""): gradient for name, gradient in tiny.gradients(model).items()}
    tiny.assert_same_gradients(found, tiny.gradients(stock), 1e-3)
    assert _reasons(model) == ""


# --- hooks outside of layers


@pytest.mark.parametrize("path", ["embeddings", "embeddings.word_embeddings", "encoder", "pooler"])
def test_hooks_outside_of_layers_see_the_same_shapes_as_in_stock(path: str) -> None:
    stock = tiny.model("Bert", HEAD)
    model = stoker.optimize(copy.deepcopy(stock), dtype=torch.float32)
    shapes: dict[int, list[Any]] = {}
    for which, one in enumerate((stock, model)):
        seen = shapes.setdefault(which, [])
        one.bert.get_submodule(path).register_forward_hook(
            lambda module, args, output, seen=seen: seen.append(
                (output if torch.is_tensor(output) else output[0]).shape
            )
        )
    _same_as_stock(stock, model)
    assert shapes[0] == shapes[1]
    assert len(shapes[1]) == 1
    assert "hook" in _reasons(model)


def test_a_replaced_forward_of_the_embeddings_sees_padded_batches() -> None:
    model = tiny.optimized(head=HEAD)
    own, seen = model.bert.embeddings.forward, []
    model.bert.embeddings.forward = lambda *args, **kwargs: (
        seen.append(kwargs["input_ids"].shape) or own(*args, **kwargs)
    )
    tiny.loss(model, head=HEAD)
    assert seen == [tiny.batch("Bert", HEAD).inputs["input_ids"].shape]


def test_neftune_draws_its_noise_for_padded_batches() -> None:
    neftune = pytest.importorskip("transformers.integrations.neftune")
    model = tiny.optimized(head=HEAD)
    handle = neftune.activate_neftune(model, 5.0)
    tiny.loss(model, head=HEAD)
    assert "hook" in _reasons(model)
    neftune.deactivate_neftune(model, handle)
    assert not stoker.report(model).left_alone or "every call" not in str(stoker.report(model))


def test_hooks_that_make_inputs_require_gradients_change_nothing() -> None:
    stock = tiny.model("Bert", HEAD)
    model = stoker.optimize(copy.deepcopy(stock), dtype=torch.float32)
    model.enable_input_require_grads()
    _same_as_stock(stock, model)
    assert _reasons(model) == ""


# --- custom attention, loss and dropout


def test_a_custom_attention_implementation_is_used() -> None:
    transformers = pytest.importorskip("transformers", minversion="5")
    calls: list[str] = []

    def own(module: nn.Module, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        calls.append("own")
        return torch.zeros_like(query).transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register("tests_own", own)
    stock = tiny.model("Bert", HEAD)
    model = stoker.optimize(copy.deepcopy(stock), dtype=torch.float32)
    for one in (stock, model):
        one.set_attn_implementation("tests_own")
    _same_as_stock(stock, model)
    assert len(calls) == 4, "two layers, two models"
    assert "'tests_own'" in _reasons(model)


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_attention_implementations_of_transformers_stay_padding_free(name: str) -> None:
    model = tiny.optimized(head=HEAD)
    model.set_attn_implementation(name)
    tiny.loss(model, head=HEAD)
    assert _reasons(model) == ""


def _zero_loss(logits: Any, labels: Any, vocab_size: int, **kwargs: Any) -> Any:
    return logits.sum() * 0.0


def test_a_custom_masked_lm_loss_is_used() -> None:
    stock = tiny.model("ModernBert", "MaskedLM")
    model = stoker.optimize(copy.deepcopy(stock), dtype=torch.float32)
    full = tiny.batch("ModernBert", "MaskedLM", lengths=(8, 8))
    full.inputs["attention_mask"].fill_(1)
    for one in (stock, model):
        one.loss_function = _zero_loss
    torch.testing.assert_close(model(**full.kwargs).loss, stock(**full.kwargs).loss, rtol=1e-4, atol=1e-5)
    assert "masked-LM loss" not in str(stoker.report(model))


def test_the_callers_ignore_index_is_used() -> None:
    stock = tiny.model("ModernBert", "MaskedLM")
    model = stoker.optimize(copy.deepcopy(stock), dtype=torch.float32)
    ids = torch.randint(5, 20, (2, 8))
    call = {"input_ids": ids, "labels": ids, "ignore_index": int(ids[0, 0])}
    torch.testing.assert_close(model(**call).loss, stock(**call).loss, rtol=1e-4, atol=1e-5)


def test_a_replaced_loss_module_of_distilbert_is_used() -> None:
    stock = tiny.model("DistilBert", "MaskedLM")
    model = stoker.optimize(copy.deepcopy(stock), dtype=torch.float32)
    for one in (stock, model):
        one.mlm_loss_fct = nn.CrossEntropyLoss(label_smoothing=0.5)
    full = tiny.batch("DistilBert", "MaskedLM")
    torch.testing.assert_close(model(**full.kwargs).loss, stock(**full.kwargs).loss, rtol=1e-4, atol=1e-5)


class _Halves(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0.5


@pytest.mark.parametrize("family", ["MPNet", "RemBert", "DebertaV2"])
@pytest.mark.parametrize("kind", ["eval", "identity", "own"])
def test_attention_dropout_modules_that_stock_calls_may_be_replaced(family: str, kind: str) -> None:
    stock = tiny.model(family, HEAD)
    for layer in _base(stock).encoder.layer:
        holder = layer.attention.attn if family == "MPNet" else layer.attention.self
        if kind == "eval":
            holder.dropout.p = 0.9
            holder.dropout.eval()
        else:
            holder.dropout = nn.Identity() if kind == "identity" else _Halves()
    model = stoker.optimize(copy.deepcopy(stock), dtype=torch.float32)
    _same_as_stock(stock, model, family)
    assert bool(_reasons(model)) == (kind == "own")


# --- weights that cannot be read


def test_norms_without_weights_are_called() -> None:
    stock = tiny.model("Bert", HEAD)
    for layer in stock.bert.encoder.layer:
        layer.output.LayerNorm = nn.LayerNorm(tiny.HIDDEN, elementwise_affine=False)
        layer.attention.output.LayerNorm = nn.LayerNorm(tiny.HIDDEN, elementwise_affine=False)
    stock.bert.embeddings.LayerNorm = nn.LayerNorm(tiny.HIDDEN, elementwise_affine=False)
    model = stoker.optimize(copy.deepcopy(stock), dtype=torch.float32)
    _same_as_stock(stock, model)
    assert _reasons(model) == ""


def test_embedding_tables_of_two_dtypes_train_as_in_stock() -> None:
    model = tiny.model("Bert", HEAD)
    model.bert.embeddings.position_embeddings.bfloat16()
    stock = copy.deepcopy(model)
    stoker.optimize(model)
    _same_as_stock(stock, model, tolerance=1e-2)  # the gradient of a bf16 table is rounded to bf16


class _Doubled(torch.Tensor):
    """A weight with its own multiplication."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            with torch._C.DisableTorchFunctionSubclass():
                return 2.0 * func(args[0], args[1].as_subclass(torch.Tensor), *args[2:], **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})


def test_weights_of_a_tensor_subclass_use_its_own_multiplication() -> None:
    stock = tiny.model("Bert", HEAD)
    model = stoker.optimize(copy.deepcopy(stock), dtype=torch.float32)
    for one in (stock, model):
        for linear in (one.bert.encoder.layer[0].intermediate.dense, one.classifier):
            linear.weight = nn.Parameter(linear.weight.detach().as_subclass(_Doubled), requires_grad=False)
        assert type(one.classifier.weight) is _Doubled
    full = tiny.batch("Bert", HEAD)
    torch.testing.assert_close(model(**full.kwargs).loss, stock(**full.kwargs).loss, rtol=1e-4, atol=1e-5)


class _HookedRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(8)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class _RaisingRMSNorm(_HookedRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyError("mask")


def test_a_norm_is_probed_without_its_hooks_and_may_raise_anything() -> None:
    norm, seen = _HookedRMSNorm(), []
    norm.register_forward_hook(lambda *_: seen.append(1))
    stoker.optimize(nn.Sequential(norm))
    assert seen == []
    stoker.optimize(nn.Sequential(_RaisingRMSNorm()))


# --- transforms, and restoring


def test_forward_mode_derivatives_are_those_of_stock() -> None:
    from torch.autograd import forward_ad

    stock = tiny.model("Bert").eval()
    stock.set_attn_implementation("eager")
    model = stoker.optimize(copy.deepcopy(stock), dtype=torch.float32)
    embeds = torch.randn(2, 6, tiny.HIDDEN)
    tangents = []
    for one in (stock, model):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(embeds, torch.ones_like(embeds))
            tangents.append(forward_ad.unpack_dual(one(inputs_embeds=dual).last_hidden_state).tangent)
    torch.testing.assert_close(tangents[1], tangents[0], rtol=1e-4, atol=1e-4)


def test_an_exported_model_consists_of_stock_operators() -> None:
    model, ids = (
        stoker.optimize(tiny.model("Bert"), dtype=torch.float32).eval(),
        torch.randint(5, tiny.VOCABULARY, (2, 6)),
    )
    exported = torch.export.export(model, (ids,), strict=False)
    assert "stoker" not in str(exported.graph)
    torch.testing.assert_close(exported.module()(ids)[0], model(ids)[0], rtol=1e-4, atol=1e-4)


def test_a_model_can_be_restored_after_accelerate_prepared_it() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    try:
        for head in ("QuestionAnswering", "MaskedLM"):
            model = tiny.optimized(head=head)
            accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
            tiny.loss(model, head=head)
            stoker.restore(model)
            restored = tiny.loss(model, head=head).detach()
            torch.testing.assert_close(restored, tiny.loss(tiny.model("Bert", head), head=head), rtol=0.1, atol=0.1)
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
