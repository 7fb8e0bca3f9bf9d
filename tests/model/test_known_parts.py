"""Attention and feed forward of models outside of the table whose code is Llama's: one native call per direction."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.granite import modeling_granite
from transformers.models.llama import modeling_llama

import stoker
from stoker.kernels import microkernels
from stoker.model import layer_program, leaf_modules, program_writer
from stoker.model.known_parts import KnownAttention, KnownFeedForward, known_part
from stoker.model.module_watch import Watch

_SIZES: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
    "num_hidden_layers": 2, "pad_token_id": 0,
}  # fmt: skip


def _granite(**options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.GraniteConfig(**_SIZES, residual_multiplier=0.7, attention_multiplier=0.4, **options)
    return transformers.GraniteForCausalLM(config).train()


def _inputs(padded: bool = True) -> dict[str, Tensor]:
    ids = torch.randint(5, 60, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, 5:] = 0
        mask[2, 7:] = 0
    ids = ids * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def _step(model: Any, inputs: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.item(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def _assert_same_step(stock: Any, model: Any, inputs: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    for _ in range(3):  # the first two find out whether the loss reads padding
        expected, actual = _step(stock, inputs), _step(model, inputs)
        assert actual[0] == pytest.approx(expected[0], rel=tolerance)
        for name, gradient in expected[1].items():
            torch.testing.assert_close(actual[1][name], gradient, rtol=tolerance, atol=tolerance)


def _counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The rows of the programs that run, one per call of a part."""
    rows: list[str] = []
    run = layer_program.run

    def counting(layer: Any, *args: Any) -> Any:
        found = run(layer, *args)
        rows.extend([] if found is None else [layer.stoker_row.piece])
        return found

    monkeypatch.setattr(layer_program, "run", counting)
    return rows


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_a_step_is_stocks(padded: bool, bias: bool) -> None:
    stock = _granite(attention_bias=bias, mlp_bias=bias)
    _assert_same_step(stock, stoker.optimize(copy.deepcopy(stock)), _inputs(padded))


@pytest.mark.parametrize("padded", [False, True])
def test_each_part_is_one_program_in_fp32_and_in_bf16(padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = _counted(monkeypatch)
    stock = _granite()
    for dtype in (torch.float32, torch.bfloat16, torch.float32):  # in turn: a program holds for one type
        model = stoker.optimize(copy.deepcopy(stock), dtype=dtype)
        for _ in range(3):
            _step(model, _inputs(padded))
        rows.clear()
        loss, _ = _step(model, _inputs(padded))
        assert rows == ["attention", "feed_forward"] * 2
        assert loss == pytest.approx(_step(stock, _inputs(padded))[0], rel=1e-5 if dtype == torch.float32 else 1e-2)


def test_a_program_gives_the_bits_of_the_single_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaf_modules, "SMALL_PRODUCT", 0)
    model = stoker.optimize(_granite())
    found = []
    for switch in ("1", "0"):
        monkeypatch.setenv(layer_program.SWITCH, switch)
        for _ in range(3):
            step = _step(model, _inputs())
        found.append(step)
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][name], found[1][1][name]) for name in found[0][1])


def test_activation_checkpointing_runs_the_same_parts_again() -> None:
    stock = _granite()
    model = copy.deepcopy(stock)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    _assert_same_step(stock, stoker.optimize(model), _inputs())


def test_adapters_are_trained_as_in_stock() -> None:
    peft = pytest.importorskip("peft")
    stock = peft.get_peft_model(_granite(), peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    model = stoker.optimize(copy.deepcopy(stock))
    for _ in range(3):
        losses = [one(**_inputs()).loss.item() for one in (stock, model)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_positions_that_start_again_within_a_row_separate_sequences() -> None:
    stock = _granite()
    inputs = {"input_ids": _inputs(False)["input_ids"], "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]] * 3)}
    expected, actual = (model(**inputs).logits for model in (stock, stoker.optimize(copy.deepcopy(stock))))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_a_hook_inside_a_part_is_called() -> None:
    model = stoker.optimize(_granite())
    seen: list[tuple[int, ...]] = []
    model.model.layers[0].mlp.up_proj.register_forward_hook(
        lambda module, args, output: seen.append(tuple(output.shape))
    )
    model.model.layers[1].self_attn.q_proj.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    _step(model, _inputs())
    assert len(seen) >= 2


def test_code_that_differs_from_llamas_is_left_alone() -> None:
    class GraniteMLP(modeling_granite.GraniteMLP):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))  # type: ignore[no-any-return]

    class OtherAttention(modeling_granite.GraniteAttention):  # type: ignore[misc]
        forward = modeling_llama.LlamaAttention.forward

    config = _granite().config
    part = known_part(modeling_granite.GraniteMLP(config))
    assert part is not None
    assert part[0] is KnownFeedForward
    assert known_part(GraniteMLP(config)) is None
    part = known_part(OtherAttention(config, 0))
    assert part is not None
    assert part[0] is KnownAttention
    assert known_part(nn.Linear(3, 3)) is None


def test_attention_whose_rotation_differs_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def rotate_half(x: Tensor) -> Tensor:
        return x.roll(1, -1)

    forward = modeling_granite.GraniteAttention.forward
    rotate = type(forward)(
        modeling_granite.apply_rotary_pos_emb.__code__,
        {**vars(modeling_granite), "rotate_half": rotate_half},
        argdefs=modeling_granite.apply_rotary_pos_emb.__defaults__,
    )

    class GraniteAttention(modeling_granite.GraniteAttention):  # type: ignore[misc]
        pass

    names = {**vars(modeling_granite), "apply_rotary_pos_emb": rotate}
    GraniteAttention.forward = type(forward)(forward.__code__, names, argdefs=forward.__defaults__)
    assert known_part(GraniteAttention(_granite().config, 0)) is None


def test_modules_are_not_read_again_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    model = stoker.optimize(_granite())
    for _ in range(4):
        _step(model, _inputs())
    made_before = Watch.__init__

    def counting(self: Watch, root: nn.Module) -> None:
        made.append(root)
        made_before(self, root)

    monkeypatch.setattr(Watch, "__init__", counting)
    writes: list[Any] = []
    write = program_writer.ProgramWriter.write
    monkeypatch.setattr(
        program_writer.ProgramWriter, "write", lambda self, *args: writes.append(self) or write(self, *args)
    )
    for _ in range(3):
        _step(model, _inputs())
    assert not made
    assert not writes


def test_a_small_linear_layer_inside_of_autocast_casts_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaf_modules, "SMALL_PRODUCT", 1 << 22)
    linear = stoker.optimize(nn.Sequential(nn.Linear(8, 6)))[0]
    x = torch.randn(4, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x)
        assert torch.is_autocast_enabled("cpu")
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, nn.functional.linear(x, linear.weight, linear.bias).bfloat16())
    y.float().square().sum().backward()
    assert linear.weight.grad.dtype == torch.float32


def test_the_microkernels_trial_holds_inside_of_autocast() -> None:
    microkernels._checked.cache_clear()
    outside = microkernels.find(torch.bfloat16)
    microkernels._checked.cache_clear()
    with torch.autocast("cpu", torch.bfloat16):
        assert (microkernels.find(torch.bfloat16) is None) == (outside is None)
