"""Weights in 4 and 8 bits: codes and values are those of the formula, and the 4-bit layout is that of bitsandbytes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.plain import random_cases
from stoker.kernels.quantized import QuantizedWeight, dequantize, quantize, read_params4bit

LEVELS = torch.tensor(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
     -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
)  # fmt: skip
SHAPES = [(1, 1), (1, 3), (3, 5), (1, 64), (5, 64), (7, 129), (2, 4096), (300, 257)]
DTYPES = [torch.float32, torch.bfloat16]


def weight_of(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * columns)) * 0.02).to(dtype)


def formula(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, one in each element, scales, and the values in fp32."""
    wide = weight.float()
    if bits == 8:
        scales = wide.abs().amax(1)
        codes = (wide / scales.clamp_min(1e-30).unsqueeze(1) * 127).round()
        return codes, scales, codes * (scales / 127).unsqueeze(1)
    flat = wide.flatten()
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % 64)).view(-1, 64)
    scales = blocks.abs().amax(1)
    scaled = (blocks / scales.clamp_min(1e-30).unsqueeze(1)).flatten()[: flat.numel()]
    codes = (scaled.unsqueeze(1) - LEVELS).abs().argmin(1)
    values = LEVELS[codes] * scales.repeat_interleave(64)[: flat.numel()]
    return codes, scales, values.view(weight.shape)


def unpacked(packed: torch.Tensor, count: int) -> torch.Tensor:
    return torch.stack([packed >> 4, packed & 15], 1).flatten()[:count].long()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("rows", "columns"), SHAPES, ids=str)
def test_codes_scales_and_values_are_those_of_the_formula(rows, columns, bits, dtype):
    compare(rows, columns, bits, dtype)


@random_cases(60)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 300),
    bits=st.sampled_from([4, 8]),
    dtype=st.sampled_from(DTYPES),
)
def test_random_shapes(rows, columns, bits, dtype):
    compare(rows, columns, bits, dtype)


def compare(rows, columns, bits, dtype):
    weight = weight_of(rows, columns, dtype)
    stored = quantize(weight, bits)
    codes, scales, values = formula(weight, bits)
    assert torch.equal(stored.scales, scales)
    assert torch.equal(unpacked(stored.codes, weight.numel()) if bits == 4 else stored.codes.float(), codes)
    assert torch.equal(dequantize(stored), values)
    assert torch.equal(dequantize(stored, torch.bfloat16), values.bfloat16())


@pytest.mark.parametrize(("bits", "error"), [(4, 0.1), (8, 0.01)])
def test_the_error_is_that_of_the_format(bits, error):
    """Of a normally distributed weight, relative in norm: about 9% in NF4 and 0.7% in 8 bits."""
    weight = weight_of(512, 768)
    assert ((dequantize(quantize(weight, bits)) - weight).norm() / weight.norm()).item() < error


@pytest.mark.parametrize("bits", [4, 8])
def test_values_that_were_quantized_once_do_not_change_again(bits):
    once = dequantize(quantize(weight_of(40, 200), bits))
    assert torch.equal(dequantize(quantize(once, bits)), once)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("scale", [0.0, 1e-42, 1e-30, 1e38])
def test_extreme_blocks_keep_their_largest_value_and_their_zeros(bits, scale):
    weight = torch.zeros(2, 64)
    weight[0, 3], weight[0, 7] = scale, -scale
    got = dequantize(quantize(weight, bits))
    torch.testing.assert_close(got, weight, rtol=1e-6, atol=2e-43 if scale == 1e-42 else 0.0)


def test_the_first_of_two_elements_is_in_the_upper_half_of_a_byte():
    assert quantize(torch.tensor([[1.0, -1.0, 0.0]]), 4).codes.tolist() == [0xF0, 0x77]


@pytest.mark.parametrize(("bits", "bytes_per_element"), [(4, 0.5 + 4 / 64), (8, 1 + 4 / 1024)])
def test_storage_is_what_is_promised(bits, bytes_per_element):
    assert quantize(weight_of(256, 1024), bits).nbytes == 256 * 1024 * bytes_per_element


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (0, 0)], ids=str)
def test_an_empty_weight_stays_empty(shape, bits):
    assert dequantize(quantize(torch.zeros(shape), bits)).shape == shape


@pytest.mark.parametrize("bits", [4, 8])
def test_strides_are_free_and_parameters_are_detached(bits):
    weight = weight_of(30, 50)
    wanted = dequantize(quantize(weight, bits))
    got = dequantize(quantize(torch.nn.Parameter(weight.t().contiguous().t()), bits))
    assert torch.equal(got, wanted)
    assert not got.requires_grad


@pytest.mark.parametrize("bits", [4, 8])
def test_the_number_of_threads_changes_no_bit(bits):
    weight, before = weight_of(400, 333), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            stored = quantize(weight, bits)
            results.append((stored.codes, stored.scales, dequantize(stored), dequantize(stored, torch.bfloat16)))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="quantize: bits is 3; choose 4 or 8"):
        quantize(torch.zeros(2, 2), 3)
    with pytest.raises(ValueError, match="quantize: weight has shape"):
        quantize(torch.zeros(2, 2, 2))
    with pytest.raises(ValueError, match="quantize: weight has dtype float16"):
        quantize(torch.zeros(2, 2).half())
    with pytest.raises(ValueError, match="infinite or NaN"):
        quantize(torch.tensor([[1.0, float("nan")]]))
    good = quantize(torch.zeros(4, 64))
    with pytest.raises(ValueError, match="dequantize: codes has shape"):
        dequantize(replace(good, codes=good.codes[:-1]))
    with pytest.raises(ValueError, match="dequantize: scales has shape"):
        dequantize(replace(good, scales=good.scales[:-1]))
    with pytest.raises(ValueError, match="dequantize: codes has dtype int8"):
        dequantize(replace(good, codes=good.codes.view(torch.int8)))
    with pytest.raises(ValueError, match=r"dequantize: dtype is torch\.float16"):
        dequantize(good, torch.float16)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_dispatcher_accepts_the_operators(bits):
    weight = weight_of(3, 70)
    torch.library.opcheck(torch.ops.stoker.quantize.default, (weight, bits))
    stored = quantize(weight, bits)
    arguments = (stored.codes, stored.scales, 3, 70, bits, torch.bfloat16)
    torch.library.opcheck(torch.ops.stoker.dequantize.default, arguments)


# --- weights of bitsandbytes


class Params4bit(torch.nn.Parameter):
    """As the class of bitsandbytes: the codes are the data, everything else is in `quant_state`."""

    quant_state: SimpleNamespace


def params4bit(weight: torch.Tensor, nested: bool = False, storage: torch.dtype = torch.uint8) -> Params4bit:
    """`weight` as bitsandbytes stores it: (n, 1) codes; with `nested` scales in 8 bits by a table, in blocks of 256."""
    stored = quantize(weight, 4)
    scales, offset, inner = stored.scales, None, None
    if nested:
        offset = scales.mean()
        code = torch.linspace(-1.0, 1.0, 256)
        blocks = (scales - offset).split(256)
        steps = torch.stack([block.abs().max() for block in blocks])
        scaled = torch.cat([block / step for block, step in zip(blocks, steps, strict=True)])
        scales = (scaled.unsqueeze(1) - code).abs().argmin(1).to(torch.uint8)
        inner = SimpleNamespace(absmax=steps, code=code, blocksize=256)
    made = Params4bit(stored.codes.view(storage).view(-1, 1), requires_grad=False)
    made.quant_state = SimpleNamespace(
        absmax=scales, shape=weight.shape, blocksize=64, quant_type="nf4", nested=nested, offset=offset, state2=inner
    )
    return made


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16], ids=str)
@pytest.mark.parametrize("nested", [False, True])
def test_weights_of_bitsandbytes_are_read_without_a_copy(nested, storage):
    weight = weight_of(96, 256)
    foreign = params4bit(weight, nested, storage)
    stored = read_params4bit(foreign)
    assert isinstance(stored, QuantizedWeight)
    assert stored.codes.data_ptr() == foreign.data_ptr()
    torch.testing.assert_close(dequantize(stored), dequantize(quantize(weight, 4)), rtol=0.02, atol=1e-4)
    if not nested:
        assert torch.equal(dequantize(stored), dequantize(quantize(weight, 4)))


@pytest.mark.parametrize(
    "change",
    [{"quant_type": "fp4"}, {"blocksize": 128}, {"packing_format_for_cpu": True}, {"shape": (2, 3, 4)}],
    ids=str,
)
def test_other_layouts_of_bitsandbytes_are_not_read(change):
    foreign = params4bit(weight_of(8, 64))
    assert read_params4bit(foreign) is not None
    vars(foreign.quant_state).update(change)
    assert read_params4bit(foreign) is None


def test_what_is_no_quantized_weight_is_not_read():
    assert read_params4bit(torch.zeros(2, 2)) is None
    unquantized = params4bit(weight_of(8, 64))
    unquantized.quant_state = None
    assert read_params4bit(unquantized) is None
    transposed = params4bit(weight_of(8, 64))
    transposed.data = transposed.data.t()
    assert read_params4bit(transposed) is None


@pytest.mark.parametrize("nested", [False, True])
def test_weights_that_bitsandbytes_made_give_its_values(nested):
    functional = pytest.importorskip("bitsandbytes.functional")
    modules = pytest.importorskip("bitsandbytes.nn.modules")
    weight = weight_of(128, 256)
    packed, state = functional.quantize_4bit(weight, blocksize=64, compress_statistics=nested, quant_type="nf4")
    foreign = modules.Params4bit(packed, requires_grad=False, quant_state=state, quant_type="nf4", bnb_quantized=True)
    stored = read_params4bit(foreign)
    assert stored is not None
    torch.testing.assert_close(dequantize(stored), functional.dequantize_4bit(packed, state), rtol=1e-6, atol=1e-8)
    own = quantize(weight, 4)
    assert (own.codes != stored.codes).float().mean() < 1e-3, "a value at the middle of two levels may go either way"
