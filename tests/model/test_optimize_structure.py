"""An optimized model can be saved, copied, wrapped, compiled and restored like the stock model."""

from __future__ import annotations

import copy
import inspect
import logging
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import tiny_models as tiny
import torch
import transformers
from torch import nn

import stoker


def _is_optimized(model: nn.Module) -> bool:
    return any(part == "fused layer" for part, _, _ in stoker.report(model).applied)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_parameters_keep_names_identity_and_storage(family: str) -> None:
    model = tiny.model(family, "MaskedLM")
    before = {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}
    keys, classes = list(model.state_dict()), [type(module) for module in model.modules()]
    assert stoker.optimize(model) is model
    assert {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()} == before
    assert list(model.state_dict()) == keys
    assert all(isinstance(module, cls) for module, cls in zip(model.modules(), classes, strict=True))


def test_save_pretrained_writes_what_stock_writes_and_from_pretrained_reads_it(tmp_path) -> None:
    stock = tiny.model("Bert", "QuestionAnswering")
    model = stoker.optimize(copy.deepcopy(stock), dtype=torch.float32)
    stock.save_pretrained(tmp_path / "stock")
    model.save_pretrained(tmp_path / "stoker")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "stock" / name).read_bytes() == (tmp_path / "stoker" / name).read_bytes()
    loaded = transformers.AutoModelForQuestionAnswering.from_pretrained(tmp_path / "stoker")
    assert type(loaded) is transformers.BertForQuestionAnswering
    torch.testing.assert_close(tiny.loss(stoker.optimize(loaded, dtype=torch.float32)), tiny.loss(model))


def test_deepcopy_is_optimized_and_independent() -> None:
    model = tiny.optimized()
    clone = copy.deepcopy(model)
    assert stoker.report(clone).applied == stoker.report(model).applied
    assert type(clone.bert) is type(model.bert)
    assert clone.qa_outputs.weight is not model.qa_outputs.weight
    expected = tiny.loss(model)
    with torch.no_grad():
        clone.qa_outputs.weight.zero_()
    torch.testing.assert_close(tiny.loss(model), expected)


def test_torch_save_writes_the_stock_model_which_loads_without_stoker(tmp_path) -> None:
    model = tiny.optimized()
    model.eval()
    torch.save(model, tmp_path / "model.pt")
    torch.save(tiny.batch("Bert", "QuestionAnswering").kwargs, tmp_path / "batch.pt")
    script = (
        "import sys, torch; sys.modules['stoker'] = None\n"
        f"model = torch.load(r'{tmp_path}/model.pt', weights_only=False)\n"
        f"print(type(model).__name__, model(**torch.load(r'{tmp_path}/batch.pt')).start_logits[0, 0].item())"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    name, value = result.stdout.split()
    assert name == "BertForQuestionAnswering"
    expected = model(**tiny.batch("Bert", "QuestionAnswering").kwargs).start_logits[0, 0].item()
    assert float(value) == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_restore_gives_every_class_back() -> None:
    model = tiny.model("Bert", "QuestionAnswering")
    classes, expected = [type(module) for module in model.modules()], tiny.loss(model)
    assert [type(module) for module in stoker.optimize(model).modules()] != classes
    assert stoker.restore(model) is model
    assert [type(module) for module in model.modules()] == classes
    torch.testing.assert_close(tiny.loss(model), expected)
    assert not stoker.report(model).applied


@pytest.mark.parametrize("head", ["QuestionAnswering", "MaskedLM"])
def test_torch_func_differentiates_an_optimized_model(head: str) -> None:
    from torch.func import functional_call, grad

    model = tiny.model("Bert", head)
    batch = tiny.batch("Bert", head).kwargs
    model(**batch).loss.backward()
    stoker.optimize(model)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    found = grad(lambda values: functional_call(model, values, (), batch).loss)(parameters)
    expected = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert len(expected) > 20
    torch.testing.assert_close({name: found[name] for name in expected}, expected, rtol=1e-4, atol=1e-5)


def test_torch_func_and_tracing_see_stock_modules() -> None:
    from torch.func import functional_call, grad, vmap

    model = stoker.optimize(nn.Sequential(nn.Linear(300, 300), nn.GELU(), nn.LayerNorm(300)), dtype=torch.float32)
    x = torch.randn(2, 300, 300)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    per_sample = vmap(grad(lambda values, x: functional_call(model, values, (x,)).square().sum()), (None, 0))
    found = per_sample(parameters, x)["0.bias"]
    (expected,) = torch.autograd.grad(model(x[1]).square().sum(), [model[0].bias])
    torch.testing.assert_close(found[1], expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(torch.jit.trace(model, x)(x), model(x))


class _OwnRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(8)), 1e-6

    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        z = hidden_states if residual is None else hidden_states + residual
        return self.weight * z * torch.rsqrt(z.square().mean(-1, keepdim=True) + self.eps)


def test_a_custom_rms_norm_keeps_its_arguments() -> None:
    norm = _OwnRMSNorm()
    x, residual = torch.randn(4096, 8), torch.randn(4096, 8)
    expected, with_residual = norm(x), norm(x, residual)
    stoker.optimize(norm)
    assert stoker.report(norm).applied
    torch.testing.assert_close(norm(x), expected)
    torch.testing.assert_close(norm(hidden_states=x), expected)
    torch.testing.assert_close(norm(x, residual), with_residual)
    torch.testing.assert_close(norm(x, residual=residual), with_residual)


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adagrad])
def test_tables_with_sparse_gradients_keep_their_optimizer(cls: type[torch.optim.Optimizer]) -> None:
    model = nn.Embedding(10, 4, sparse=True)
    _, optimizer = stoker.optimize(model, cls(model.parameters(), lr=0.1))
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    assert "sparse" in stoker.report(model).optimizer


def test_the_masked_lm_output_can_be_copied_and_pickled() -> None:
    model = tiny.optimized("Bert", "MaskedLM")
    batch = tiny.batch("Bert", "MaskedLM").kwargs
    output = model(**batch)
    copied = pickle.loads(pickle.dumps(output))
    assert type(copied) is transformers.modeling_outputs.MaskedLMOutput
    torch.testing.assert_close(copied.logits, output.logits)
    torch.testing.assert_close(copied.loss, output.loss)
    torch.testing.assert_close(copy.copy(model(**batch)).logits, output.logits)


def test_a_second_call_replaces_the_first() -> None:
    model = tiny.optimized()
    once = stoker.report(model).applied
    assert stoker.report(stoker.optimize(model)).applied == once
    parts = {part for part, _, _ in stoker.report(stoker.optimize(model, fuse=False)).applied}
    assert "linear" not in parts
    assert "padding-free base model" in parts


def test_forward_keeps_its_signature_because_trainers_read_it() -> None:
    for head in tiny.HEADS:
        stock = tiny.model("Bert", head)
        model = stoker.optimize(copy.deepcopy(stock), dtype=torch.float32)
        assert inspect.signature(model.forward) == inspect.signature(stock.forward)
        assert inspect.signature(type(model).forward) == inspect.signature(type(stock).forward)


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("family", ["Bert", "DistilBert", "ModernBert"])
@pytest.mark.parametrize("head", ["QuestionAnswering", "SequenceClassification"])
def test_peft_wraps_before_or_after(family: str, head: str, order: str) -> None:
    peft = pytest.importorskip("peft")
    targets = {"Bert": ["query", "value", "dense"], "DistilBert": ["q_lin", "lin2"], "ModernBert": ["Wqkv", "Wo"]}
    kept = {"QuestionAnswering": ["classifier" if family == "ModernBert" else "qa_outputs"]}
    lora = peft.LoraConfig(
        r=4, target_modules=targets[family], init_lora_weights=False, modules_to_save=kept.get(head, ["classifier"])
    )
    stock = peft.get_peft_model(tiny.model(family, head), copy.deepcopy(lora))
    model = tiny.model(family, head)
    if order == "after":
        model = peft.get_peft_model(stoker.optimize(model, dtype=torch.float32), lora)
    else:
        model = stoker.optimize(peft.get_peft_model(model, lora), dtype=torch.float32)
    model.load_state_dict(stock.state_dict())
    assert _is_optimized(model)
    full = tiny.batch(family, head)
    loss, _, gradients = tiny.truth(stock, head, full)
    actual = model(**full.kwargs).loss
    actual.backward()
    torch.testing.assert_close(actual.detach(), loss, rtol=1e-4, atol=1e-5)
    assert any("lora_A" in name for name in gradients)
    tiny.assert_same_gradients(tiny.gradients(model), gradients)
    assert stoker.report(model).left_alone == () or all(
        "a call of" not in what for what, _ in stoker.report(model).left_alone
    )


def test_peft_can_merge_and_save_afterwards(tmp_path) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        tiny.optimized(), peft.LoraConfig(target_modules=["query"], init_lora_weights=False)
    ).eval()
    before = tiny.loss(model)
    model.save_pretrained(tmp_path)
    merged = model.merge_and_unload()
    torch.testing.assert_close(tiny.loss(merged), before, rtol=1e-4, atol=1e-5)
    assert not any("lora" in name for name in merged.state_dict())


def test_ddp_wraps_afterwards(tmp_path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = tiny.optimized()
        expected = copy.deepcopy(model)
        tiny.loss(expected).backward()
        wrapped = nn.parallel.DistributedDataParallel(model)
        tiny.loss(wrapped).backward()
        tiny.assert_same_gradients(tiny.gradients(model), tiny.gradients(expected))
    finally:
        time.sleep(0.2)  # destroying the group while one of gloo's threads waits for the interpreter never returns
        torch.distributed.destroy_process_group()


@pytest.fixture
def accelerate() -> Iterator[Any]:
    """accelerate, with the state of the process that earlier tests may have left taken away, before and after."""
    module = pytest.importorskip("accelerate")
    module.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield module
    module.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_accelerator_prepares_afterwards(accelerate: Any) -> None:
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    model, optimizer = stoker.optimize(*tiny.with_optimizer(), dtype=torch.float32)
    reference = tiny.loss(copy.deepcopy(model))
    prepared, optimizer = accelerator.prepare(model, optimizer)
    loss = tiny.loss(prepared)
    accelerator.backward(loss)
    optimizer.step()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.detach(), reference.detach(), rtol=3e-2, atol=3e-2)
    assert accelerator.unwrap_model(prepared) is model


def test_accelerator_may_rebuild_the_masked_lm_output(accelerate: Any) -> None:
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(tiny.optimized(head="MaskedLM"))
    output = model(**tiny.batch("Bert", "MaskedLM").kwargs)
    accelerator.backward(output.loss)
    assert output.logits.dtype == torch.float32


def test_parametrized_weights_are_respected() -> None:
    stock = tiny.model("Bert", "SequenceClassification")
    full = tiny.batch("Bert", "SequenceClassification")
    before, after = copy.deepcopy(stock), stoker.optimize(copy.deepcopy(stock), dtype=torch.float32)
    for model in (stock, before, after):
        nn.utils.parametrizations.weight_norm(model.bert.encoder.layer[0].intermediate.dense)
        with torch.no_grad():
            model.bert.encoder.layer[0].intermediate.dense.parametrizations.weight.original0.mul_(2.0)
    stoker.optimize(before, dtype=torch.float32)
    loss, _, gradients = tiny.truth(stock, "SequenceClassification", full)
    for model in (before, after):
        model(**full.kwargs).loss.backward()
        torch.testing.assert_close(model(**full.kwargs).loss.detach(), loss, rtol=1e-5, atol=1e-6)
        tiny.assert_same_gradients(tiny.gradients(model), gradients)


@pytest.mark.parametrize("family", ["Bert", "unknown"])
def test_torch_compile_runs_afterwards(family: str) -> None:
    if family == "unknown":
        model = stoker.optimize(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 1)), dtype=torch.float32
        )
        x = torch.randn(4, 8)
        torch.testing.assert_close(torch.compile(model, backend="aot_eager")(x), model(x))
        return
    model = tiny.optimized()
    expected = tiny.loss(model)
    compiled = torch.compile(model, backend="aot_eager")
    loss = tiny.loss(compiled)
    loss.backward()
    torch.testing.assert_close(loss, expected)


_SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
_FUNNEL = {"block_sizes": [1, 1], "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

OUTSIDE_THE_TABLE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "T5": ("T5ForConditionalGeneration", "T5Config", {**_T5, "decoder_start_token_id": 0}),
    "Longformer": ("LongformerForMaskedLM", "LongformerConfig", {**_SMALL, **_NO_DROPOUT, "attention_window": 8}),
    "Funnel": ("FunnelForMaskedLM", "FunnelConfig", {**_FUNNEL, "hidden_dropout": 0.0, "attention_dropout": 0.0}),
}


NO_KERNEL = {"Funnel": "4 x FunnelRelMultiheadAttention"}


def _outside_the_table(name: str) -> nn.Module:
    model, config, settings = OUTSIDE_THE_TABLE[name]
    made = getattr(transformers, config)(vocab_size=99, **settings)
    for dropout in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "activation_dropout"):
        if hasattr(made, dropout):
            setattr(made, dropout, 0.0)
    torch.manual_seed(0)
    return getattr(transformers, model)(made).train()


@pytest.mark.parametrize("name", OUTSIDE_THE_TABLE)
def test_a_family_that_is_not_in_the_table_trains_as_stock_and_the_report_says_so(name: str) -> None:
    stock = _outside_the_table(name)
    model = stoker.optimize(copy.deepcopy(stock), dtype=torch.float32)
    ids = torch.randint(5, 99, (2, 12))
    mask = torch.ones_like(ids)
    mask[0, 9:] = 0
    stock(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
    model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
    tiny.assert_same_gradients(tiny.gradients(model), tiny.gradients(stock))
    report = stoker.report(model)
    left = dict(report.left_alone)
    stays = "padding, fused layers" if name == "T5" else "padding, attention, fused layers"
    assert "no family in the table (BERT, " in left.pop(stays)
    assert set(left.values()) <= {"there is no kernel for this class"}
    assert NO_KERNEL[name] in left if name in NO_KERNEL else not left
    counts = {part: count for part, _, count in report.applied}
    assert counts["linear"] > 2
    assert ("rms norm in fp32" in counts) == (name == "T5")


def test_attention_that_was_replaced_is_not_reported_as_left_alone() -> None:
    small = {**_SMALL, "image_size": 8, "patch_size": 4}
    report = stoker.report(stoker.optimize(transformers.ViTModel(transformers.ViTConfig(**small))))
    assert ("attention implementation", "ViTModel", 1) in report.applied
    assert [what for what, why in report.left_alone if "it takes no tokens" in why] == ["padding, fused layers"]


def test_plain_torch_models_get_what_applies() -> None:
    torch.manual_seed(0)
    stock = nn.Sequential(
        nn.Embedding(50, 16), nn.LayerNorm(16), nn.Linear(16, 32), nn.SiLU(), nn.Dropout(0.0), nn.Conv1d(6, 3, 1)
    )
    model = stoker.optimize(copy.deepcopy(stock), dtype=torch.float32)
    ids = torch.randint(0, 50, (4, 6))
    stock(ids).square().sum().backward()
    model(ids).square().sum().backward()
    tiny.assert_same_gradients(tiny.gradients(model), tiny.gradients(stock))
    assert {part for part, _, _ in stoker.report(model).applied} == {
        "embedding",
        "layer norm in bf16",
        "linear",
        "activation",
    }  # and no dropout: its probability is zero
    assert [what for what, _ in stoker.report(model).left_alone] == ["padding, attention, fused layers", "1 x Conv1d"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_dtypes_without_kernels_run_as_stock(dtype: torch.dtype) -> None:
    stock = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.5)).to(dtype).eval()
    x = torch.randn(4, 8, dtype=dtype)
    torch.testing.assert_close(stoker.optimize(copy.deepcopy(stock), dtype=torch.float32)(x), stock(x))
    model = tiny.optimized().double()
    assert tiny.loss(model).dtype == torch.float64


IPEX = {
    "inplace": True,
    "conv_bn_folding": False,
    "linear_bn_folding": False,
    "weights_prepack": True,
    "replace_dropout_with_identity": False,
    "optimize_lstm": True,
    "split_master_weight_for_bf16": True,
    "auto_kernel_selection": True,
    "sample_input": None,
    "graph_mode": False,
    "concat_linear": True,
}


def test_ipex_calls_work_and_each_keyword_is_explained_in_one_line(caplog) -> None:
    model, optimizer = tiny.with_optimizer()
    with caplog.at_level(logging.INFO, "stoker"):
        result = stoker.optimize(model, dtype=torch.bfloat16, optimizer=optimizer, level="O1", **IPEX)
    assert result == (model, optimizer)
    for name in IPEX:
        assert sum(f"optimize: {name}=" in record.getMessage() for record in caplog.records) == 1
    assert stoker.optimize(model, torch.bfloat16, optimizer) == (model, optimizer)
    assert stoker.optimize(model, torch.bfloat16) is model
    assert not stoker.report(stoker.optimize(model, level="O0")).applied


def test_wrong_arguments_are_named() -> None:
    model = tiny.model("Bert")
    with pytest.raises(TypeError, match="'unpadd'"):
        stoker.optimize(model, unpadd=False)
    with pytest.raises(TypeError, match="model is a dict"):
        stoker.optimize({})
    with pytest.raises(ValueError, match="fp16"):
        stoker.optimize(model, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"torch\.int8"):
        stoker.optimize(model, dtype=torch.int8)
    with pytest.raises(ValueError, match="level is 'O2'"):
        stoker.optimize(model, level="O2")
