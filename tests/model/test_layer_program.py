"""A layer run as one node gives bit for bit what its single operators give, and notices every change of the model."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import tiny_decoders as decoders
import tiny_models as tiny
import torch
from torch import Tensor, nn

import stoker
from stoker.kernels import native
from stoker.kernels.program import Program
from stoker.model import layer_program

FAMILIES = [*tiny.FAMILIES, *decoders.CONFIGS]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    """The programs that were run."""
    found: list[Program] = []
    run = Program.run

    def counted(self: Program, *values: int) -> None:
        found.append(self)
        run(self, *values)

    monkeypatch.setattr(Program, "run", counted)
    return found


def base(
    family: str,
    dropout: float = 0.1,
    changes: dict[str, Any] | None = None,
    stored: torch.dtype | None = None,
    **options: Any,
) -> nn.Module:
    """`changes`: of its configuration. `stored`: the type of its parameters."""
    encoder = family in tiny.CONFIGS
    made = (
        tiny.model(family, "Model", dropout=dropout, **(changes or {})) if encoder else decoders.model(family, dropout)
    )
    made.to(stored)
    return stoker.optimize((made if family in tiny.CONFIGS else made.base_model).train(), **options)  # type: ignore[no-any-return]


def batch(model: Any, lengths: tuple[int, ...] = (9, 5, 7)) -> dict[str, Tensor]:
    ids = torch.randint(3, 90, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids.masked_fill(mask == 0, model.config.pad_token_id or 0), "attention_mask": mask}


def real(model: Any, lengths: tuple[int, ...] = (9, 5, 7)) -> Tensor:
    """The hidden states of all tokens, without padding."""
    inputs = batch(model, lengths)
    hidden: Tensor = model(**inputs).last_hidden_state
    return hidden[inputs["attention_mask"].bool()]


def step(model: nn.Module, lengths: tuple[int, ...] = (9, 5, 7)) -> tuple[Tensor, list[Tensor | None]]:
    """Hidden states and gradients of a step with a fixed seed."""
    torch.manual_seed(7)
    model.zero_grad()
    hidden = real(model, lengths)
    (hidden.float() * torch.linspace(-1, 1, hidden.shape[-1])).sum().backward()
    return hidden.detach(), [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def both_ways(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, run: Callable[[nn.Module], Any] = step
) -> tuple[Any, Any]:
    monkeypatch.setenv(layer_program.SWITCH, "0")
    operators = run(model)
    monkeypatch.delenv(layer_program.SWITCH)
    return operators, run(model)


def assert_same(one: Any, other: Any) -> None:
    assert torch.equal(one[0], other[0])
    for left, right in zip(one[1], other[1], strict=True):
        assert (left is None) == (right is None)
        assert left is None or torch.equal(left, right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_program_gives_what_the_operators_give(
    family: str, dtype: torch.dtype, runs: list[Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype == torch.bfloat16:  # torch's own product of bf16 numbers cannot be part of a program
        monkeypatch.setenv("STOKER_LINEAR_ENGINE", "stoker")
    assert_same(*both_ways(base(family, dtype=dtype), monkeypatch))
    assert runs


def test_layers_that_are_built_alike_share_a_program(runs: list[Program]) -> None:
    model = base("Bert")
    for lengths in ((9, 5, 7), (3, 3, 15), (9, 5, 7)):  # as many tokens
        step(model, lengths)
    assert len(set(map(id, runs))) == 2
    assert len(runs) == 3 * 2 * 2
    step(model, (4, 4))
    assert len(set(map(id, runs))) == 4


@pytest.mark.parametrize("family", [f for f in tiny.FAMILIES if "SequenceClassification" in tiny.heads(f)])
def test_all_layers_of_a_classifier_are_programs(
    family: str, runs: list[Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one computes the first token of each row only, after attention."""
    model = stoker.optimize(tiny.model(family, "SequenceClassification", dropout=0.1).train())

    def classify(model: Any, lengths: tuple[int, ...] = (9, 5, 7)) -> Any:
        torch.manual_seed(7)
        model.zero_grad()
        output = model(**batch(model, lengths), labels=torch.arange(len(lengths)) % 2)
        output.loss.backward()
        return output.logits.detach(), [parameter.grad for parameter in model.parameters()]

    assert_same(*both_ways(model, monkeypatch, lambda model: copy.deepcopy(classify(model))))
    assert len(runs) == 2 * 2
    assert_same(
        *both_ways(model, monkeypatch, lambda model: copy.deepcopy(classify(model, (10, 11))))
    )  # as many tokens


POSITIONS: dict[str, dict[str, Any]] = {
    "projections of their own": {"share_att_key": False},
    "p2c": {"pos_att_type": ["p2c"]},
    "c2p": {"pos_att_type": ["c2p"]},
    "no term": {"pos_att_type": []},
    "no relative positions": {"relative_attention": False},
    "no buckets": {"position_buckets": -1, "max_relative_positions": 3},
}


@pytest.mark.parametrize("changes", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_relative_positions_of_every_kind(
    changes: dict[str, Any], dtype: torch.dtype, runs: list[Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype == torch.bfloat16:
        monkeypatch.setenv("STOKER_LINEAR_ENGINE", "stoker")
    assert_same(*both_ways(base("DebertaV2", changes=changes, dtype=dtype), monkeypatch))
    assert runs


@pytest.mark.parametrize("family", ["MPNet", "DebertaV2"])
def test_parameters_may_be_stored_in_bf16(family: str, runs: list[Program], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_LINEAR_ENGINE", "stoker")
    model = base(family, stored=torch.bfloat16)
    operators, program = both_ways(model, monkeypatch)
    assert_same(operators, program)
    assert runs
    assert operators[0].dtype == torch.bfloat16


@pytest.mark.parametrize("family", ["MPNet", "DebertaV2"])
@pytest.mark.parametrize("trained", [False, True])
def test_tables_of_positions_may_be_all_that_is_frozen_or_trained(
    family: str, trained: bool, runs: list[Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = base(family)
    tables = ("relative_attention_bias", "rel_embeddings")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(table in name for table in tables) == trained)
    operators, program = both_ways(model, monkeypatch)
    assert_same(operators, program)
    assert runs
    assert (sum(gradient is not None for gradient in program[1]) == 1) == trained


@pytest.mark.parametrize("family", ["MPNet", "DebertaV2"])
def test_batches_of_every_shape_have_their_own_bias_and_positions(
    family: str, runs: list[Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many tokens in each: the longest row, and how many rows there are, differ."""
    model = base(family)
    for lengths in ((9, 5, 7), (21,), (3, 3, 15), (11, 10), (4, 4, 4, 4, 5)):
        assert_same(*both_ways(model, monkeypatch, lambda model, lengths=lengths: step(model, lengths)))  # type: ignore[misc]
    assert runs


def test_positions_of_an_evaluation_serve_a_training_step() -> None:
    model = base("DebertaV2", dropout=0.0)
    expected = step(copy.deepcopy(model))
    with torch.inference_mode():
        real(model)
    assert_same(expected, step(model))


def test_a_weight_that_serves_twice_gets_both_gradients(runs: list[Program], monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = base("Bert")
    for layer in model.encoder.layer:
        layer.attention.self.key = layer.attention.self.query
    assert_same(*both_ways(model, monkeypatch))
    assert runs


def test_sequences_longer_than_a_key_chunk(runs: list[Program], monkeypatch: pytest.MonkeyPatch) -> None:
    longest = native.library().stoker_attention_key_chunk() + 5
    model = base("Llama")
    step(model, (longest - 7, 14))  # as many tokens in shorter sequences
    assert_same(*both_ways(model, monkeypatch, lambda model: step(model, (longest, 7))))
    assert runs


def test_frozen_parts_get_no_gradient(runs: list[Program], monkeypatch: pytest.MonkeyPatch) -> None:
    model = base("Bert")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layer.1" in name and "query" not in name)
    operators, program = both_ways(model, monkeypatch)
    assert_same(operators, program)
    assert runs
    assert 0 < sum(gradient is not None for gradient in program[1]) < len(program[1])


def test_evaluation_without_gradients_saves_nothing_for_them(
    runs: list[Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = base("Llama").eval()

    def evaluate(model: nn.Module) -> Any:
        with torch.no_grad():
            return real(model), []

    operators, program = both_ways(model, monkeypatch, evaluate)
    assert_same(operators, program)
    assert not program[0].requires_grad
    assert len(runs) == 2


def frozen(model: Any) -> None:
    model.encoder.layer[0].output.dense.weight.requires_grad_(False)


def quiet(model: Any) -> None:
    model.eval()


def other_rate(model: Any) -> None:
    model.encoder.layer[1].output.dropout.p = 0.5


def other_epsilon(model: Any) -> None:
    model.encoder.layer[1].output.LayerNorm.eps = 0.1


def replaced_weight(model: Any) -> None:
    dense = model.encoder.layer[0].intermediate.dense
    dense.weight = nn.Parameter(dense.weight.detach() * 2)


def replaced_module(model: Any) -> None:
    model.encoder.layer[0].intermediate.dense = nn.Linear(tiny.HIDDEN, 48)


def weight_in_place(model: Any) -> None:
    with torch.no_grad():
        model.encoder.layer[0].intermediate.dense.weight.mul_(2)


def moved_storage(model: Any) -> None:
    weight = model.encoder.layer[0].intermediate.dense.weight
    weight.data = weight.data * 2


def other_layout(model: Any) -> None:
    weight = model.encoder.layer[0].intermediate.dense.weight
    weight.data = (weight.data * 2).t().contiguous().t()


def wrapped(model: Any) -> None:
    dense = model.encoder.layer[0].intermediate.dense
    forward = dense.forward
    dense.forward = lambda x: forward(x) * 2


def hooked(model: Any) -> None:
    model.encoder.layer[0].intermediate.dense.register_forward_hook(lambda module, args, output: output * 2)


def other_heads(model: Any) -> None:
    model.encoder.layer[0].attention.self.attention_head_size = tiny.HIDDEN // 2


def other_activation(model: Any) -> None:
    model.encoder.layer[0].intermediate.intermediate_act_fn = nn.ReLU()


def other_terms(model: Any) -> None:
    for layer in model.encoder.layer:
        layer.attention.self.pos_att_type = ["c2p"]


def other_rate_of_positions(model: Any) -> None:
    model.encoder.layer[1].attention.self.pos_dropout.p = 0.5


def frozen_positions(model: Any) -> None:
    model.encoder.rel_embeddings.requires_grad_(False)


def other_positions(model: Any) -> None:
    model.encoder.max_relative_positions = 40
    model.encoder.position_buckets = 0


CHANGES = [
    other_heads, other_activation,
    frozen, quiet, other_rate, other_epsilon, replaced_weight, replaced_module, weight_in_place, moved_storage,
    other_layout, wrapped, hooked,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_between_two_steps_is_noticed(change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    model = base("Bert")
    before = step(model)
    torch.manual_seed(0)
    change(model)
    operators, program = both_ways(model, monkeypatch)
    assert_same(operators, program)
    with pytest.raises(AssertionError):
        assert_same(before, program)


def test_hooks_of_layers_and_of_all_modules_are_called() -> None:
    model: Any = base("Bert")
    step(model)
    called: list[str] = []
    handles = [
        model.encoder.layer[1].register_forward_hook(lambda module, *_: called.append(type(module).__name__)),
        nn.modules.module.register_module_forward_hook(
            lambda module, *_: called.append(f"any {type(module).__name__}")
        ),
    ]
    try:
        step(model)
    finally:
        for handle in handles:
            handle.remove()
    assert called.count("BertLayer") == 1
    assert called.count("any BertLayer") == 2


@pytest.mark.parametrize("change", [other_terms, other_rate_of_positions, frozen_positions, other_positions])
def test_a_change_of_relative_positions_is_noticed(
    change: Callable[[Any], None], runs: list[Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = base("DebertaV2")
    before = step(model)
    change(model)
    operators, program = both_ways(model, monkeypatch)
    assert_same(operators, program)
    assert runs
    with pytest.raises(AssertionError):
        assert_same(before, program)


def test_a_copy_of_the_model_has_its_own_weights() -> None:
    model = base("Bert", dropout=0.0)
    before = step(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    assert not torch.equal(step(other)[0], before[0])
    assert torch.equal(step(model)[0], before[0])


def test_weights_that_change_before_backward_are_an_error() -> None:
    model = base("Bert")
    hidden = real(model)
    with torch.no_grad():
        model.encoder.layer[0].output.dense.weight.mul_(2)  # type: ignore[union-attr, operator]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        hidden.sum().backward()


def test_a_second_derivative_is_an_error() -> None:
    model = base("Bert", dropout=0.0)
    weight = model.encoder.layer[0].output.dense.weight  # type: ignore[union-attr]
    (gradient,) = torch.autograd.grad(real(model).sum(), weight, create_graph=True)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="no second derivative"):
        gradient.sum().backward()


def test_gradients_accumulate_over_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(model: nn.Module) -> Any:
        torch.manual_seed(7)
        model.zero_grad()
        for lengths in ((9, 5), (3, 8)):
            real(model, lengths).sum().backward()
        return torch.zeros(0), [parameter.grad for parameter in model.parameters()]

    assert_same(*both_ways(base("Llama"), monkeypatch, lambda model: copy.deepcopy(twice(model))))


@pytest.mark.parametrize(("family", "reentrant"), [("Bert", False), ("Bert", True), ("DebertaV2", False)])
def test_activation_checkpointing_runs_programs_again(
    family: str, reentrant: bool, runs: list[Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = base(family)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert_same(*both_ways(model, monkeypatch))
    assert len(runs) == 3 * 2  # forward, again, backward; two layers


def test_threads_run_programs_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    model = base("Bert", dropout=0.0)
    expected, _ = step(model)
    found: list[Tensor] = []

    def work() -> None:
        with torch.no_grad():
            found.extend(real(model) for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 60
    assert all(torch.equal(one, expected) for one in found)


@pytest.mark.parametrize("family", ["Bert", "MPNet", "DebertaV2"])
def test_the_number_of_threads_changes_no_bit(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Stoker's own kernels only: torch's norm, which DeBERTa has for its table, and MKL's products depend on it
    monkeypatch.setenv("STOKER_LINEAR_ENGINE", "stoker")
    changes = {"norm_rel_ebd": "none"} if family == "DebertaV2" else {}
    model, before = base(family, changes=changes), torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(step(model, (60, 31, 62)))
        for other in results[1:]:
            assert_same(results[0], other)
    finally:
        torch.set_num_threads(before)


# --- Adapters


def adapted(family: str = "Llama", second: dict[str, Any] | None = None, **options: Any) -> Any:
    """A base model with LoRA adapters that peft made, all of which change the result."""
    optimized = {name: options.pop(name) for name in ("dtype", "frozen_weights") if name in options}
    plain = (
        tiny.model(family, "Model", dropout=0.1) if family in tiny.CONFIGS else decoders.model(family, 0.1).base_model
    )
    torch.manual_seed(1)
    peft = pytest.importorskip("peft")
    configs = [
        peft.LoraConfig(**{"target_modules": "all-linear", "r": 4, **one})
        for one in (options, second)
        if one is not None
    ]
    model: Any = peft.get_peft_model(plain, configs[0])
    if second is not None:
        model.add_adapter("second", configs[1])
        model.base_model.set_adapter(["default", "second"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.2)
    return stoker.optimize(model.train(), **optimized)


ADAPTERS: dict[str, dict[str, Any]] = {
    "all linear layers": {},
    "some": {"target_modules": ["q_proj", "v_proj", "down_proj"]},
    "with dropout": {"lora_dropout": 0.2},
    "of rank 1": {"r": 1},
    "of rank 1 with dropout": {"r": 1, "lora_dropout": 0.2},
    "of several ranks": {"rank_pattern": {"k_proj": 3, "up_proj": 1}, "alpha_pattern": {"v_proj": 3}},
    "two, one with dropout": {"second": {"r": 2, "lora_dropout": 0.3, "lora_alpha": 5}},
    "beside weights in bf16": {"frozen_weights": "bfloat16"},
    "beside weights in 8 bits": {"frozen_weights": "int8"},
    "beside weights in 4 bits": {"frozen_weights": "nf4", "lora_dropout": 0.2},
}


@pytest.mark.parametrize("engine", ["torch", "stoker"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", ADAPTERS.values(), ids=list(ADAPTERS))
def test_a_program_with_adapters_gives_what_the_operators_give(
    options: dict[str, Any], dtype: torch.dtype, engine: str, runs: list[Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype == torch.bfloat16 and engine == "torch":
        pytest.skip("torch's own product of bf16 numbers cannot be part of a program")
    monkeypatch.setenv("STOKER_LINEAR_ENGINE", engine)
    model = adapted(dtype=dtype, **options)
    for lengths in ((9, 5, 7), (1,)):
        assert_same(*both_ways(model, monkeypatch, lambda one, lengths=lengths: step(one, lengths)))  # type: ignore[misc]
    assert len(runs) == 2 * 2 * 2  # two layers, both directions


@pytest.mark.parametrize("family", ["Bert", "DebertaV2", "MPNet", "ModernBert", "Gemma3"])
def test_adapters_of_other_families(family: str, runs: list[Program], monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same(*both_ways(adapted(family, second={"r": 2, "lora_dropout": 0.3}), monkeypatch))
    assert runs


@pytest.mark.parametrize("frozen_weights", [None, "bfloat16"])
def test_adapters_of_transposed_weights(
    frozen_weights: str | None, runs: list[Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_LINEAR_ENGINE", "torch")
    model = adapted("GPT2", fan_in_fan_out=True, frozen_weights=frozen_weights)
    for lengths in ((9, 5, 7), (1,)):
        assert_same(*both_ways(model, monkeypatch, lambda one, lengths=lengths: step(one, lengths)))  # type: ignore[misc]
    assert runs


@pytest.mark.parametrize("trained", ["lora_A", "lora_B", "q_proj.lora_A", "base_layer.weight", "k_proj"])
def test_only_trained_parts_of_adapted_layers_get_gradients(
    trained: str, runs: list[Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = adapted()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    operators, program = both_ways(model, monkeypatch)
    assert_same(operators, program)
    for (name, _), gradient in zip(model.named_parameters(), program[1], strict=True):
        assert (gradient is not None) == (trained in name)
    assert runs


def test_programs_with_adapters_save_no_more_than_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted("Llama", lora_dropout=0.1)
    model.enable_input_require_grads()

    def saved(model: nn.Module) -> int:
        storages: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, nn.Parameter):
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            real(model, (60, 31, 64))
        return sum(storages.values())

    operators, program = both_ways(model, monkeypatch, saved)
    assert program <= operators


def other_scaling(model: Any) -> None:
    model.base_model.model.layers[0].mlp.up_proj.scaling["default"] *= 2


def other_adapter(model: Any) -> None:
    model.set_adapter("second")


def disabled_adapters(model: Any) -> None:
    model.base_model.disable_adapter_layers()


def disabled_adapter(model: Any) -> None:
    """As peft does it, but without changing what is trained."""
    model.base_model.model.layers[1].self_attn.v_proj._disable_adapters = True


def merged_adapters(model: Any) -> None:
    model.merge_adapter(["second"])


def deleted_adapter(model: Any) -> None:
    model.delete_adapter("second")


def other_rate_of_adapters(model: Any) -> None:
    model.base_model.model.layers[1].mlp.down_proj.lora_dropout["default"].p = 0.5


def adapter_with_a_hook(model: Any) -> None:
    inner = model.base_model.model.layers[0].self_attn.q_proj.lora_A["default"]
    inner.register_forward_hook(lambda module, args, output: output * 2)


def stored_otherwise(model: Any) -> None:
    stoker.optimize(model, frozen_weights="nf4")


ADAPTER_CHANGES = [
    other_scaling, other_adapter, disabled_adapters, disabled_adapter, merged_adapters, deleted_adapter,
    other_rate_of_adapters, adapter_with_a_hook, stored_otherwise,
]  # fmt: skip


@pytest.mark.parametrize("change", ADAPTER_CHANGES, ids=lambda change: change.__name__)
def test_a_change_of_adapters_between_two_steps_is_noticed(
    change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = adapted(second={"r": 2}, lora_dropout=0.2, frozen_weights="int8")
    before = step(model)
    change(model)
    # merged and disabled adapters leave nothing to train
    trained = change not in (merged_adapters, disabled_adapters)
    operators, program = both_ways(model, monkeypatch, step if trained else lambda one: (real(one.eval()).detach(), []))
    assert_same(operators, program)
    assert not torch.equal(before[0], program[0])


def half_norm(model: Any) -> None:
    model.encoder.layer[0].output.LayerNorm.half()


def short_bias(model: Any) -> None:
    model.encoder.layer[0].output.dense.bias = nn.Parameter(torch.zeros(3))


def short_norm(model: Any) -> None:
    model.encoder.layer[0].output.LayerNorm.weight = nn.Parameter(torch.ones(tiny.HIDDEN // 2))


def on_another_device(model: Any) -> None:
    model.encoder.layer[1].output.dense.to("meta")


def freed(model: Any) -> None:
    model.encoder.layer[1].output.dense.weight.untyped_storage().resize_(0)


@pytest.mark.parametrize("change", [half_norm, short_bias, short_norm, on_another_device, freed])
def test_a_parameter_that_cannot_be_read_is_an_error(change: Callable[[Any], None]) -> None:
    model = base("Bert")
    step(model)
    with torch.no_grad():
        change(model)
    with pytest.raises((ValueError, RuntimeError)):
        step(model)


def test_parameters_that_are_not_dense_are_read_as_by_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = base("Bert")
    norm = model.encoder.layer[0].output.LayerNorm
    norm.weight = nn.Parameter(torch.rand(tiny.HIDDEN, 2, generator=torch.Generator().manual_seed(0))[:, 0])
    assert_same(*both_ways(model, monkeypatch))


def test_a_smaller_parameter_before_backward_is_an_error() -> None:
    model = base("Bert")
    hidden = real(model)
    bias = model.encoder.layer[0].output.dense.bias  # type: ignore[union-attr]
    bias.data = bias.data[:3]  # type: ignore[union-attr, index]
    with pytest.raises(RuntimeError, match="replaced"):
        hidden.sum().backward()


def test_a_model_that_nobody_holds_is_freed() -> None:
    model = base("Bert")
    step(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_another_form_of_gelu_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = base("Bert")
    for layer in model.encoder.layer:
        layer.intermediate.intermediate_act_fn = nn.GELU()
    before = step(model)
    for layer in model.encoder.layer:
        layer.intermediate.intermediate_act_fn.approximate = "tanh"
    operators, program = both_ways(model, monkeypatch)
    assert_same(operators, program)
    assert not torch.equal(before[0], program[0])


def test_a_hook_in_a_new_dictionary_is_called() -> None:
    model: Any = base("Bert")
    step(model)
    called: list[nn.Module] = []
    query = model.encoder.layer[0].attention.self.query
    query._forward_hooks = OrderedDict()
    query.register_forward_hook(lambda module, *_: called.append(module))
    step(model)
    assert called == [query]
