"""bf16 products with fp32 sums: each of Stoker's engines, and MKL's own function inside libtorch, against torch.mm in fp32.

    python benchmarks/bf16_products.py
    STOKER_ISA=avx2 ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 \\
      python benchmarks/bf16_products.py                    as on a CPU without AVX-512 and bf16 units

One thread, engines in turn, the best of several rounds. `cblas_gemm_bf16bf16f32` is no engine of Stoker's: this shows whether it
should become one.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stoker.kernels import products

SHAPES = [
    ("nt", 1600, 768, 768),
    ("nt", 1600, 3072, 768),
    ("tn", 768, 768, 1600),
    ("tn", 3072, 768, 1600),
    ("nt", 1600, 384, 384),
]
ROW_MAJOR, PLAIN, TRANSPOSED = 101, 111, 112  # cblas.h


def by_mkl() -> Callable[[Tensor, Tensor, Tensor], None] | None:
    """out = a @ b in bf16 with an fp32 result, by MKL; None where this torch has no MKL."""
    library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))
    if not hasattr(library, "cblas_gemm_bf16bf16f32"):
        return None

    def multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
        sides = [(PLAIN, x.stride(0)) if x.stride(1) == 1 else (TRANSPOSED, x.stride(1)) for x in (a, b)]
        (a_kind, a_stride), (b_kind, b_stride) = sides
        library.cblas_gemm_bf16bf16f32(
            ROW_MAJOR, a_kind, b_kind, *out.shape, a.shape[1], ctypes.c_float(1.0), ctypes.c_void_p(a.data_ptr()), a_stride,
            ctypes.c_void_p(b.data_ptr()), b_stride, ctypes.c_float(0.0), ctypes.c_void_p(out.data_ptr()), out.stride(0),
        )  # fmt: skip

    return multiply


def sides_of(kind: str, rows: int, columns: int, depth: int) -> dict[str, Callable[[], Any]]:
    a = torch.randn(depth, rows).t() if kind == "tn" else torch.randn(rows, depth)
    b = torch.randn(depth, columns) if kind == "tn" else torch.randn(columns, depth).t()
    a_bf16, b_bf16 = a.bfloat16(), b.bfloat16()  # strides are kept
    out, exact = torch.empty(rows, columns), a_bf16.float() @ b_bf16.float()
    found: dict[str, Callable[[], Any]] = {"torch.mm fp32": lambda: torch.mm(a, b, out=out)}
    for engine in products.available(torch.bfloat16, torch.float32):
        found[engine] = lambda engine=engine: products.multiply([(a_bf16, b_bf16)], out, None, engine)  # type: ignore[misc]
    if (mkl := by_mkl()) is not None:
        found["mkl"] = lambda: mkl(a_bf16, b_bf16, out)
    for name, run in found.items():
        run()
        error = float((out - exact).norm() / exact.norm())
        assert name == "torch.mm fp32" or error < 1e-5, f"{name}: error {error}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    for shape in SHAPES:
        sides = sides_of(*shape)
        best = dict.fromkeys(sides, float("inf"))
        for _ in range(rounds):
            for name, run in sides.items():
                begin = time.perf_counter()
                run()
                best[name] = min(best[name], time.perf_counter() - begin)
        ratios = ", ".join(f"{name} {best['torch.mm fp32'] / seconds:.2f}x" for name, seconds in best.items())
        print(f"{shape[0]} {shape[1]} x {shape[2]} x {shape[3]}: {ratios}", flush=True)


if __name__ == "__main__":
    main()
