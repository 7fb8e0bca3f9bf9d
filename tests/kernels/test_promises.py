"""What every operator promises: nothing depends on the thread count, and torch may call it in any way it likes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from threadpoolctl import threadpool_info
from torch.utils.checkpoint import checkpoint

from kernels.plain import DTYPES, NAMES, WIDTH, leaf, operators
from stoker.kernels import dropout as dropout_module
from stoker.kernels import embedding as embedding_module
from stoker.kernels import lora as lora_module
from stoker.kernels import native
from stoker.kernels import norm as norm_module
from stoker.kernels.activation import bias_activation
from stoker.kernels.attention import attention_packed
from stoker.kernels.dropout import dropout
from stoker.kernels.linear import linear, linear_packed
from stoker.kernels.norm import layer_norm
from stoker.kernels.registry import draw_key

PRODUCTS = "linear_cross_entropy"  # its matrix products may be torch's own, which promise no bits
ROWS = 333  # more than 64 blocks of rows, and enough elements for every thread


@pytest.fixture
def threads():
    """Sets the number of torch's threads, and puts it back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def assert_same(got, want):
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [name for name in NAMES if name != PRODUCTS])
def test_results_do_not_depend_on_the_number_of_threads(threads, name, dtype):
    results = []
    for count in (1, 2, 3, 7):
        threads(count)
        results.append(operators(ROWS)[name].run(ROWS, dtype))
    for other in results[1:]:
        assert_same(other, results[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_no_rows_and_one_row_work(name, rows, dtype):
    for result in operators(rows)[name].run(rows, dtype):
        assert result.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_non_contiguous_inputs_work(name):
    operator = operators(20)[name]
    want = operator.run(20)
    leaves = operator.leaves(20, torch.float32)
    strided = []
    for x in leaves:
        spread = torch.zeros(*x.shape[:-1], 2 * x.shape[-1])
        spread[..., ::2] = x.detach()
        strided.append(spread[..., ::2].requires_grad_())
    torch.manual_seed(3)
    outputs = operator.call(*strided)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    # Gradients with strides of their own: a transposed copy, and an expanded one.
    grads = [torch.cos(torch.arange(y.numel())).view(y.shape) for y in outputs]
    torch.autograd.backward(outputs, [g.t().contiguous().t() if g.dim() == 2 else g for g in grads])
    got = [y.detach() for y in outputs] + [x.grad for x in strided]
    if name == PRODUCTS:
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)
    else:
        assert_same(got, want)
    torch.manual_seed(3)
    first = operator.call(*leaves)
    (first[0] if isinstance(first, tuple) else first).sum().backward()  # an expanded gradient
    assert all(x.grad.isfinite().all() for x in leaves)


@pytest.mark.parametrize("name", NAMES)
def test_checkpoint_recomputes_the_same(name):
    operator = operators(20)[name]
    want = operator.run(20)
    leaves = operator.leaves(20, torch.float32)
    torch.manual_seed(3)
    outputs = checkpoint(operator.call, *leaves, use_reentrant=False)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.backward(outputs, [torch.cos(torch.arange(y.numel())).view(y.shape) for y in outputs])
    assert_same([y.detach() for y in outputs] + [x.grad for x in leaves], want)


@pytest.mark.parametrize("name", NAMES)
def test_compiled_callers_get_the_same(name):
    operator = operators(20)[name]
    want = operator.run(20)
    torch._dynamo.reset()
    compiled = torch.compile(operator.call, backend="aot_eager")
    leaves = operator.leaves(20, torch.float32)
    torch.manual_seed(3)
    outputs = compiled(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.backward(outputs, [torch.cos(torch.arange(y.numel())).view(y.shape) for y in outputs])
    for a, b in zip([y.detach() for y in outputs] + [x.grad for x in leaves], want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.fixture
def same_key(monkeypatch):
    """Every call with dropout gets the same key: threads share torch's generator, which keys are otherwise drawn from."""
    key = draw_key()
    for module in (dropout_module, embedding_module, lora_module, norm_module):
        monkeypatch.setattr(module, "draw_key", lambda: key)


@pytest.mark.usefixtures("same_key")
@pytest.mark.parametrize("name", NAMES)
def test_several_python_threads_may_call_at_once(name):
    """Each thread runs forward and backward on its own tensors."""
    operator = operators(150)[name]
    want = operator.run(150)
    barrier = threading.Barrier(4)

    def work(_):
        barrier.wait()
        return [operator.run(150) for _ in range(5)]

    with ThreadPoolExecutor(4) as pool:
        for results in pool.map(work, range(4)):
            for got in results:
                if name == PRODUCTS:
                    torch.testing.assert_close(got, want)
                else:
                    assert_same(got, want)


def test_backward_works_from_another_thread():
    x, weight = leaf(200, WIDTH), leaf(WIDTH, seed=1)
    loss = dropout(layer_norm(x, weight), 0.1).sum()
    worker = threading.Thread(target=loss.backward)
    worker.start()
    worker.join()
    assert x.grad is not None
    assert weight.grad is not None


def _samples():
    """Arguments for torch's own check of each registered operator."""
    key = torch.tensor([1234])
    x, r, g = leaf(6, 10), leaf(6, 10, seed=1), leaf(6, 5, seed=2)
    w, b, c = leaf(10), leaf(10, seed=1), leaf(10, seed=2)
    labels = torch.tensor([1, 2, -100, 4, 5, 9])
    tables = leaf(12, 10), leaf(8, 10), leaf(2, 10)
    ids = torch.tensor([1, 1, 5, 11, 0, 1])
    return [
        ("dropout", (x, 0.3, key)),
        ("dropout_add_norm", (x, r, w, b, c, key, 0.3, 1e-5, False, True)),
        ("dropout_add_norm", (x, None, w, None, None, None, 0.0, 1e-5, True, False)),
        ("bias_activation", (x, b, 0)),
        ("bias_activation", (x, None, 3)),
        ("gated_activation", (x, b, 1, True)),
        ("gated", (g, leaf(6, 5, seed=3), 2)),
        *[("cross_entropy", (x, labels, -100, reduction)) for reduction in range(3)],
        *[
            ("linear_cross_entropy", (x, leaf(12, 10), leaf(12), labels, divisor, -100, how, terms, True, True, True))
            for how, divisor in ((0, None), (1, torch.tensor(3.0, dtype=torch.float64)), (2, None))
            for terms in ([1.0, 0.0, 0.0, 0.0], [0.5, 5.0, 0.1, 1e-3])
        ],
        ("embedding", (ids, tables[0], 0)),
        ("embedding_norm", (ids, ids % 8, ids % 2, *tables, w, b, key, 0.3, 1e-5, 0, False)),
        ("embedding_norm", (ids, None, None, tables[0], None, None, w, None, None, 0.0, 1e-5, -1, True)),
    ]


@pytest.mark.parametrize(("name", "arguments"), _samples(), ids=lambda value: value if isinstance(value, str) else "")
def test_torch_accepts_the_registration(name, arguments):
    torch.library.opcheck(getattr(torch.ops.stoker, name).default, arguments)


@pytest.mark.parametrize("name", NAMES)
def test_a_second_derivative_is_refused(name):
    leaves = operators(5)[name].leaves(5, torch.float32)
    # Dropout's gradient does not depend on its input; linear_cross_entropy no longer knows what its own depend on.
    _refuses_a_second_derivative(operators(5)[name].call, leaves, depends=name not in ("dropout", PRODUCTS))


def test_a_second_derivative_of_products_is_refused():
    _refuses_a_second_derivative(lambda x, w: linear_packed(x, [w, w]), [leaf(5, 8), leaf(6, 8)])
    ends = torch.tensor([0, 2, 5])
    _refuses_a_second_derivative(lambda qkv: attention_packed(qkv, ends, heads=2), [leaf(5, 24)])


def _refuses_a_second_derivative(call, leaves, *, depends=True):
    outputs = call(*leaves)
    total = sum(y.sum() for y in (outputs if isinstance(outputs, tuple) else (outputs,)))
    grads = torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True)
    # Beside a term that has a gradient, as in a gradient penalty: a part that is silently constant would go unnoticed.
    penalty = sum(g.square().sum() for g in grads if g is not None)
    total = sum(leaf.square().sum() for leaf in leaves) + penalty
    with pytest.raises(RuntimeError, match=r"no second derivative"):
        total.backward(retain_graph=True)
    if depends:
        with pytest.raises(RuntimeError, match=r"no second derivative"):
            torch.autograd.grad(total, leaves)


def test_forward_mode_is_refused_instead_of_answered_with_zeros():
    from torch.autograd import forward_ad

    x, direction = torch.randn(4, 8), torch.randn(4, 8)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(bias_activation, (x,), (direction,))
    with forward_ad.dual_level(), torch.no_grad():
        dual = forward_ad.make_dual(x, direction)
        with pytest.raises(NotImplementedError, match=r"stoker::linear has no forward-mode"):
            linear(torch.randn(3, 8), dual)
        bias_activation(x)  # has no tangent: nothing is lost


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_default_dtype_changes_nothing(name, default):
    """Buffers that native code writes fp32 into must be fp32 whatever torch.get_default_dtype() says."""
    operator = operators(5)[name]
    want = _values_and_gradients(operator.call, operator.leaves(5, torch.float32))
    leaves = operator.leaves(5, torch.float32)
    torch.set_default_dtype(default)
    try:
        got = _values_and_gradients(operator.call, leaves)
    finally:
        torch.set_default_dtype(torch.float32)
    assert [x.dtype for x in got] == [x.dtype for x in want]
    assert_same(got, want)


def _values_and_gradients(call, leaves):
    torch.manual_seed(3)
    outputs = call(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    sum(y.square().sum() for y in outputs).backward()
    return [y.detach() for y in outputs] + [x.grad for x in leaves]


def test_dispatch_modes_see_the_operators():
    """Under a dispatch mode the call goes through torch's dispatcher, which is bypassed otherwise."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Watch():
        layer_norm(torch.randn(2, 8), torch.ones(8))
    assert "stoker.dropout_add_norm.default" in seen


def test_there_is_one_openmp_pool_in_the_process():
    """torch's and the kernels' are the same library file, and a parallel region gets the threads that torch was given."""
    native.library()
    # scikit-learn, which other tests import, brings one of its own for its own loops
    pools = {
        entry["filepath"]
        for entry in threadpool_info()
        if entry["user_api"] == "openmp" and "scikit_learn" not in entry["filepath"]
    }
    assert len(pools) == 1, pools
    for count in (1, 2, 3):
        assert native.library().stoker_count_threads(count) == count


def test_kernels_take_as_many_threads_as_torch_has(threads):
    for count in (1, 3):
        threads(count)
        assert native.threads() == count
