"""oneDNN's microkernels: used where this CPU and this torch have them, refused where a trial fails, and never needed."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from kernels import stand_in
from stoker.kernels import engines, microkernels, native, products

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    microkernels._checked.cache_clear()
    yield
    microkernels._checked.cache_clear()


def pretend_avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.delenv("DNNL_MAX_CPU_ISA", raising=False)
    monkeypatch.setattr(native, "available", lambda: ["avx512", "avx2", "baseline"])
    monkeypatch.setattr(microkernels, "torch_has_bf16_units", lambda: True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_this_torch_exports_the_functions(dtype: torch.dtype) -> None:
    kernel = microkernels.look_up(dtype)
    assert kernel is not None
    assert kernel.multiply
    assert kernel.release


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_cpu_without_the_instructions_has_no_microkernel(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """It would throw an exception there, or stop the process."""
    monkeypatch.setattr(native, "available", lambda: ["avx2", "baseline"])
    assert microkernels.find(dtype) is None
    assert "onednn" not in products.available(dtype, dtype)
    with pytest.raises(ValueError, match="'onednn', which cannot multiply"):
        products.multiply([(torch.ones(4, 4, dtype=dtype),) * 2], torch.empty(4, 4), None, "onednn")


def test_a_limit_on_onednn_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_avx512(monkeypatch)
    monkeypatch.setattr(microkernels, "look_up", stand_in.plain_kernel)
    assert microkernels.find(torch.float32) is not None
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert microkernels.find(torch.float32) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_function_that_throws_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, dtype: torch.dtype
) -> None:
    pretend_avx512(monkeypatch)
    monkeypatch.setattr(microkernels, "look_up", lambda _: stand_in.failing_kernel())
    with caplog.at_level(logging.WARNING, "stoker.kernels"):
        assert microkernels.find(dtype) is None
        assert microkernels.find(dtype) is None
    assert len(caplog.records) == 1, "it is tried and reported once"
    assert products.available(dtype, dtype) == ("torch", "stoker")


def test_a_function_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function for fp32 in place of the one for bf16, as if torch had changed what its arguments mean."""
    pretend_avx512(monkeypatch)
    monkeypatch.setattr(microkernels, "look_up", lambda _: stand_in.plain_kernel(torch.float32))
    assert microkernels.find(torch.bfloat16) is None


def test_a_torch_without_the_functions_multiplies_by_the_other_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_avx512(monkeypatch)
    monkeypatch.setitem(microkernels.SYMBOLS, torch.float32, "_ZN2at6native7cpublas7renamedEv")
    assert microkernels.find(torch.float32) is None
    assert engines.choose("nt", 20, 8, 8, torch.float32) == "torch"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_microkernel_that_is_right_is_a_candidate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object, dtype: torch.dtype
) -> None:
    pretend_avx512(monkeypatch)
    monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("STOKER_LINEAR_ENGINE", raising=False)
    monkeypatch.setattr(microkernels, "look_up", stand_in.plain_kernel)
    timed: list[tuple[str, ...]] = []
    monkeypatch.setattr(engines, "measure_fastest", lambda *arguments: timed.append(arguments[-1]) or "onednn")
    engines.clear_cache()
    assert engines.choose("nt", 300, 256, 256, dtype) == "onednn"
    assert timed == [("torch", "stoker", "onednn")]
    engines.clear_cache()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 1, 1), (16, 64, 64), (97, 130, 771), (300, 900, 1601)])
@pytest.mark.parametrize("kind", ["nt", "nn", "tn"])
@pytest.mark.parametrize("threads", [1, 3])
def test_products_of_whole_numbers_are_exact(
    kind: str, rows: int, columns: int, depth: int, dtype: torch.dtype, threads: int
) -> None:
    """Whatever the sizes, the layout in memory and the number of threads: nothing is read or left out twice."""
    generator = torch.Generator().manual_seed(rows + depth)
    a = torch.randint(-4, 5, (rows, depth), generator=generator).to(dtype)
    b = torch.randint(-4, 5, (depth, columns), generator=generator).to(dtype)
    left = a.t().contiguous().t() if kind == "tn" else a
    right = b.t().contiguous().t() if kind == "nt" else b
    kernel = stand_in.find(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out = torch.full((rows, columns), float("nan"))
        products.multiply_native([(left, right)], out, None, kernel)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(out, a.float() @ b.float())
