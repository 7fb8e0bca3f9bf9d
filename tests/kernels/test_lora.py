"""Linear layers with LoRA adapters equal the plain formula, with frozen and trained weights, with and without dropout."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_linear import BF16, FP32, distance

from stoker.kernels import lora, products
from stoker.kernels.linear import linear_packed
from stoker.kernels.lora import Adapter, lora_linear_packed
from stoker.kernels.registry import reference_factors

pytestmark = pytest.mark.usefixtures("every_engine")


class Case:
    """Inputs of one call. `ranks`: those of the adapters of each weight. `trained`: which of w, b, A, B, x need gradients."""

    def __init__(
        self,
        rows: int,
        width: int,
        outs: list[int],
        ranks: list[list[int]],
        dtype: torch.dtype = torch.float32,
        weight_dtype: torch.dtype = torch.float32,
        adapter_dtype: torch.dtype = torch.float32,
        p: float = 0.0,
        bias: bool = True,
        trained: str = "AxB",
    ) -> None:
        generator = torch.Generator().manual_seed(rows + width)

        def draw(kind: str, *shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype).requires_grad_(kind in trained)

        self.x = draw("x", rows, width, dtype=dtype)
        self.weights = [draw("w", out, width, dtype=weight_dtype) for out in outs]
        self.biases = [draw("b", out, dtype=weight_dtype) for out in outs] if bias else []
        self.adapters = [
            [
                Adapter(
                    draw("A", rank, width, dtype=adapter_dtype),
                    draw("B", out, rank, dtype=adapter_dtype),
                    scaling=0.5 + index,
                    p=p if index % 2 == 0 else 0.0,
                )
                for index, rank in enumerate(several)
            ]
            for out, several in zip(outs, ranks, strict=True)
        ]
        self.grad = torch.randn(rows, sum(outs), generator=generator).to(dtype)
        narrow = torch.bfloat16 in (dtype, weight_dtype, adapter_dtype)
        self.tolerance = BF16 if narrow else FP32

    def run(self, **options) -> torch.Tensor:
        return lora_linear_packed(self.x, self.weights, self.biases, self.adapters, **options)

    def leaves(self) -> dict[str, torch.Tensor]:
        named = {"x": self.x}
        named |= {f"w{i}": weight for i, weight in enumerate(self.weights)}
        named |= {f"b{i}": bias for i, bias in enumerate(self.biases)}
        for i, several in enumerate(self.adapters):
            for k, one in enumerate(several):
                named |= {f"A{i}{k}": one.a, f"B{i}{k}": one.b}
        return named

    def expected(self, keys: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Result and gradients of the formula in fp64, with the masks of `keys` in the order in which they were drawn."""
        wide = {name: leaf.detach().double().requires_grad_(leaf.requires_grad) for name, leaf in self.leaves().items()}
        remaining = iter(keys)
        parts = []
        for i, several in enumerate(self.adapters):
            part = wide["x"] @ wide[f"w{i}"].t()
            part = part + wide[f"b{i}"] if self.biases else part
            for k, one in enumerate(several):
                dropped = wide["x"]
                if one.p:
                    dropped = dropped * reference_factors(next(remaining), *self.x.shape, one.p).double()
                part = part + one.scaling * (dropped @ wide[f"A{i}{k}"].t()) @ wide[f"B{i}{k}"].t()
            parts.append(part)
        y = torch.cat(parts, 1)
        if y.requires_grad:
            y.backward(self.grad.double())
        return y, {name: leaf.grad for name, leaf in wide.items() if leaf.grad is not None}

    def check(self, monkeypatch: pytest.MonkeyPatch | None = None, **options) -> None:
        keys: list[torch.Tensor] = []
        if monkeypatch is not None:
            draw = lora.draw_key
            monkeypatch.setattr(lora, "draw_key", lambda: keys.append(draw()) or keys[-1])
        y = self.run(**options)
        if y.requires_grad:
            y.backward(self.grad)
        want, gradients = self.expected(keys)
        assert y.dtype == self.x.dtype
        assert distance(y, want) < self.tolerance
        for name, leaf in self.leaves().items():
            assert (leaf.grad is not None) == leaf.requires_grad, name
            if leaf.grad is not None:
                assert leaf.grad.dtype == leaf.dtype
                # sums of a single token's few terms may cancel
                assert distance(leaf.grad, gradients[name]) < self.tolerance * (10 if len(self.x) < 5 else 1), name


SHAPES = [
    (1, 5, [7], [[3]]),
    (7, 33, [17], [[1]]),
    (97, 64, [40, 17, 64], [[16], [], [3]]),
    (300, 130, [96, 96, 96], [[16], [16], [16]]),
    (60, 48, [31, 50], [[3, 1, 5], [2]]),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width", "outs", "ranks"), SHAPES, ids=str)
@pytest.mark.parametrize("engine", products.ENGINES)
def test_every_engine_equals_the_formula(engine, rows, width, outs, ranks, dtype):
    Case(rows, width, outs, ranks, dtype).check(engine=engine)
    Case(rows, width, outs, ranks, dtype, bias=False).check(engine=engine)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width", "outs", "ranks"), SHAPES, ids=str)
def test_dropout_applies_the_mask_of_its_key_in_both_passes(rows, width, outs, ranks, dtype, monkeypatch):
    Case(rows, width, outs, ranks, dtype, p=0.3, trained="wbABx").check(monkeypatch)


@pytest.mark.parametrize("trained", ["", "x", "A", "B", "w", "b", "wbABx", "wx", "Ab"])
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_only_wanted_gradients_are_computed(trained, p, monkeypatch):
    Case(30, 24, [16, 8], [[4], [2, 3]], p=p, trained=trained).check(monkeypatch)


@pytest.mark.parametrize(
    ("dtype", "weight_dtype", "adapter_dtype"),
    [
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32, torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("p", [0.0, 0.2])
def test_base_adapters_and_activations_may_differ_in_type(dtype, weight_dtype, adapter_dtype, p, monkeypatch):
    Case(50, 70, [90, 20], [[8], [4]], dtype, weight_dtype, adapter_dtype, p, trained="wbABx").check(monkeypatch)


def test_adapters_of_two_types_share_a_product():
    case = Case(20, 16, [8, 8], [[4], [3]])
    second = case.adapters[1][0]
    case.adapters[1] = [
        replace(
            second, a=second.a.detach().bfloat16().requires_grad_(), b=second.b.detach().bfloat16().requires_grad_()
        )
    ]
    case.tolerance = BF16
    case.check()


@pytest.mark.parametrize("adapter_dtype", [torch.float32, torch.bfloat16])
def test_fp32_activations_are_not_rounded_to_the_type_of_frozen_weights(adapter_dtype):
    x, weight = torch.full((2, 8), 1.0 + 2.0**-12), torch.ones(3, 8, dtype=torch.bfloat16)
    adapter = Adapter(torch.ones(1, 8, dtype=adapter_dtype), torch.ones(3, 1, dtype=adapter_dtype))
    for engine in products.ENGINES:
        y = lora_linear_packed(x, [weight], None, [[adapter]], engine=engine)
        assert torch.equal(y, torch.full((2, 3), 16.0 + 2.0**-8))


def test_without_adapters_it_is_a_linear_layer():
    case = Case(9, 8, [5, 6], [[], []], trained="wbx")
    assert torch.equal(case.run(), linear_packed(case.x, case.weights, case.biases))
    case.check()


@pytest.mark.parametrize("p", [0.0, 0.4])
def test_no_rows_give_no_result_and_zero_gradients(p):
    case = Case(0, 8, [5, 6], [[2], [3]], p=p, trained="wbABx")
    for engine in products.ENGINES:
        y = case.run(engine=engine)
        y.sum().backward()
        assert y.shape == (0, 11)
        assert all(torch.equal(leaf.grad, torch.zeros_like(leaf)) for leaf in case.leaves().values())


def test_leading_dimensions_are_free():
    case = Case(12, 8, [5], [[2]])
    y = lora_linear_packed(case.x.view(3, 4, 8), case.weights, case.biases, case.adapters)
    assert torch.equal(y, case.run().view(3, 4, 5))


def test_a_probability_of_one_leaves_the_base_and_no_gradient():
    case = Case(6, 8, [5], [[2]], p=1.0)
    y = case.run(engine="stoker")
    assert torch.equal(y, linear_packed(case.x, case.weights, case.biases, engine="stoker"))
    y.sum().backward()
    assert not case.adapters[0][0].a.grad.any()
    assert not case.adapters[0][0].b.grad.any()


def test_masks_follow_the_seed_and_differ_between_adapters():
    case = Case(200, 64, [8, 8], [[4], [4]], p=0.5)
    first = case.adapters[0]
    case.adapters, case.weights = [first, first], [case.weights[0]] * 2
    case.biases = []

    def run() -> torch.Tensor:
        torch.manual_seed(3)
        return case.run()

    y = run()
    assert torch.equal(y, run())
    assert not torch.allclose(y[:, :8], y[:, 8:])


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_number_of_threads_changes_no_bit(dtype, p):
    def results(threads: int) -> list[torch.Tensor]:
        previous = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            torch.manual_seed(0)
            case = Case(500, 300, [400, 200], [[8], [16, 4]], dtype, p=p, trained="wbABx")
            y = case.run(engine="stoker")
            y.backward(case.grad)
            return [y, *(leaf.grad for leaf in case.leaves().values())]
        finally:
            torch.set_num_threads(previous)

    one = results(1)
    for threads in (2, 3):
        assert all(torch.equal(a, b) for a, b in zip(results(threads), one, strict=True))


def _saved_by(case: Case) -> list[torch.Tensor]:
    return [tensor for tensor in case.run().grad_fn.saved_tensors if tensor is not None]


def test_only_what_backward_needs_is_saved():
    """x is the large one: without it a layer whose A is frozen keeps only h."""
    case = Case(40, 32, [16], [[4]], trained="B")
    assert [tuple(tensor.shape) for tensor in _saved_by(case)] == [(40, 4)]
    case = Case(40, 32, [16], [[4]], trained="ABx")
    shapes = sorted(tuple(tensor.shape) for tensor in _saved_by(case))
    assert shapes == sorted([(40, 32), (40, 4), (16, 32), (4, 32), (16, 4)])
    frozen = linear_packed(case.x, case.weights).grad_fn.saved_tensors
    assert not any(tensor is not None and tensor.shape == case.x.shape for tensor in frozen)


def test_gradients_of_adapters_do_not_share_memory():
    case = Case(10, 8, [4, 4, 4], [[2], [2], [2]])
    case.run().sum().backward()
    pointers = {several[0].a.grad.untyped_storage().data_ptr() for several in case.adapters}
    assert len(pointers) == 3


def test_wrong_arguments_are_named():
    x, weight = torch.zeros(3, 4), torch.zeros(5, 4)
    good = Adapter(torch.zeros(2, 4), torch.zeros(5, 2))
    with pytest.raises(ValueError, match="lora_linear: 1 weights but 2 sequences"):
        lora_linear_packed(x, [weight], None, [[good], [good]])
    with pytest.raises(ValueError, match="lora_linear: a has shape"):
        lora_linear_packed(x, [weight], None, [[replace(good, a=torch.zeros(2, 5))]])
    with pytest.raises(ValueError, match="lora_linear: b has shape"):
        lora_linear_packed(x, [weight], None, [[replace(good, b=torch.zeros(5, 3))]])
    with pytest.raises(ValueError, match=r"lora_linear: p is 1\.5"):
        lora_linear_packed(x, [weight], None, [[replace(good, p=1.5)]])
    with pytest.raises(ValueError, match="lora_linear: a is on meta"):
        lora_linear_packed(x, [weight], None, [[replace(good, a=torch.zeros(2, 4, device="meta"))]])
    with pytest.raises(ValueError, match="lora_linear: weight has shape"):
        lora_linear_packed(x, [torch.zeros(5, 6)], None, [[good]])
    with pytest.raises(ValueError, match="lora_linear: b has dtype float64"):
        lora_linear_packed(x, [weight], None, [[replace(good, b=torch.zeros(5, 2).double())]])


@pytest.mark.parametrize("p", [[0.0, 0.0], [0.0, 0.25]], ids=str)
def test_the_dispatcher_accepts_the_operator(p):
    case = Case(5, 8, [4, 6], [[2], [3]], trained="wbABx")
    a, b = ([getattr(several[0], name) for several in case.adapters] for name in "ab")
    keys = [torch.tensor([7]) for one in p if one]
    arguments = (case.x, case.weights, [], case.biases, a, b, [0, 1], [0.5, 2.0], p, keys, "stoker")
    torch.library.opcheck(torch.ops.stoker.lora_linear.default, arguments)
