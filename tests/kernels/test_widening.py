"""Linear layers, with adapters or not, compute with frozen weights in bf16, 8 and 4 bits as with their widened values."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from stoker.kernels import products
from stoker.kernels.linear import linear, linear_packed
from stoker.kernels.lora import Adapter, lora_linear_packed
from stoker.kernels.quantized import dequantize, quantize
from stoker.kernels.widening import codes_and_scales, columns, widened

pytestmark = pytest.mark.usefixtures("every_engine")

FORMS = ["bfloat16", "int8", "nf4", "float32"]


def stored(weight, form):
    """The weight in a form, and the values that it stands for."""
    if form in ("int8", "nf4"):
        codes = quantize(weight, 8 if form == "int8" else 4)
        return codes, dequantize(codes)
    narrow = weight.to(getattr(torch, form))
    return narrow, narrow.float()


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


@pytest.mark.parametrize("engine", products.ENGINES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("outs", [["nf4"], ["int8"], ["bfloat16"], FORMS], ids=str)
def test_results_and_input_gradients_are_those_of_the_widened_weights(outs, dtype, engine):
    weights, wide = zip(*(stored(draw(10 + n, 38, seed=n), form) for n, form in enumerate(outs)), strict=True)
    biases = [draw(10 + n) for n in range(len(outs))]
    x = draw(21, 38).to(dtype).requires_grad_()
    y = linear_packed(x, weights, biases, engine=engine)
    grad = draw(*y.shape).to(dtype)
    y.backward(grad)
    exact = x.detach().double().requires_grad_()
    want = torch.cat(
        [torch.nn.functional.linear(exact, w.double(), b.double()) for w, b in zip(wide, biases, strict=True)], 1
    )
    want.backward(grad.double())
    tolerance = 3e-6 if dtype == torch.float32 else 1e-2
    assert y.dtype == dtype
    assert (y - want).norm() / want.norm() < tolerance
    assert (x.grad - exact.grad).norm() / exact.grad.norm() < tolerance


@pytest.mark.parametrize("engine", products.ENGINES)
@pytest.mark.parametrize("form", FORMS[:3])
def test_adapters_get_the_gradients_that_they_have_beside_widened_weights(form, engine):
    weights, wide = zip(*(stored(draw(out, 64, seed=out), form) for out in (24, 8, 8)), strict=True)
    results = []
    for used in (weights, wide):
        adapters = [[Adapter(draw(4, 64, seed=n).requires_grad_(), draw(w.shape[0], 4).requires_grad_(), 0.5)]
                    for n, w in enumerate(wide)]  # fmt: skip
        x = draw(33, 64).requires_grad_()
        y = lora_linear_packed(x, list(used), None, adapters, engine=engine)
        y.backward(draw(*y.shape))
        results.append([y.detach(), x.grad, *(t.grad for (one,) in adapters for t in (one.a, one.b))])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)


def test_autograd_keeps_the_codes_and_no_widened_weight():
    codes = quantize(draw(256, 512), 4)
    kept = []
    x = draw(3, 512).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):
        linear(x, codes)
    assert sum(kept) == codes.nbytes


def test_widened_weights_share_one_buffer_of_their_thread():
    (matrix,), scales = codes_and_scales([quantize(draw(64, 128), 8)])
    (first,) = widened([matrix], scales, torch.float32, "torch")
    (again,) = widened([matrix[:10]], [scales[0][:10].clone()], torch.bfloat16, "torch")
    assert first.data_ptr() == again.data_ptr()
    found = []
    other = threading.Thread(target=lambda: found.extend(widened([matrix], scales, torch.float32, "torch")))
    other.start()
    other.join()
    assert found[0].data_ptr() != first.data_ptr()
    assert torch.equal(found[0], dequantize(quantize(draw(64, 128), 8)))


def test_stokers_engine_gets_bf16_weights_as_they_are():
    """It widens as it packs."""
    weight = draw(8, 16).bfloat16()
    assert widened([weight], [], torch.float32, "stoker")[0] is weight
    assert widened([weight], [], torch.bfloat16, "torch")[0] is weight
    assert torch.equal(widened([weight], [], torch.float32, "torch")[0], weight.float())


def test_an_empty_input_and_an_empty_weight_give_empty_results():
    assert linear(torch.zeros(0, 64), quantize(draw(6, 64), 4)).shape == (0, 6)
    assert linear(torch.zeros(3, 64), quantize(torch.zeros(0, 64), 8)).shape == (3, 0)


def test_wrong_weights_are_named():
    x, good = torch.zeros(2, 64), quantize(torch.zeros(4, 64), 4)
    with pytest.raises(ValueError, match="a weight in 4 bits has 63 columns; their number must be even"):
        linear(torch.zeros(2, 63), quantize(torch.zeros(4, 63), 4))
    with pytest.raises(ValueError, match="linear: weight has shape"):
        linear(torch.zeros(2, 32), good)
    with pytest.raises(ValueError, match="linear: scales has shape"):
        linear(x, replace(good, scales=good.scales[:-1]))
    with pytest.raises(ValueError, match="contiguous"):
        torch.ops.stoker.linear(x, [torch.zeros(64, 4, dtype=torch.int8).t()], [torch.zeros(4)], [], "")
    with pytest.raises(ValueError, match="needs scales"):
        torch.ops.stoker.linear(x, [torch.zeros(4, 64, dtype=torch.int8)], [], [], "")


def test_the_dispatcher_accepts_codes():
    matrices, scales = codes_and_scales([quantize(draw(6, 64), 4), draw(4, 64)])
    assert [columns(one) for one in matrices] == [64, 64]
    x = draw(5, 64).requires_grad_()
    torch.library.opcheck(torch.ops.stoker.linear.default, (x, matrices, scales, [draw(6), draw(4)], "stoker"))
    adapter = (
        x,
        matrices,
        scales,
        [],
        [draw(2, 64).requires_grad_()],
        [draw(6, 2).requires_grad_()],
        [0],
        [1.0],
        [0.0],
        [],
    )
    torch.library.opcheck(torch.ops.stoker.lora_linear.default, (*adapter, "stoker"))
