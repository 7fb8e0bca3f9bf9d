"""Products by the engine "onednn" in bf16 and fp32, and `linear` with its gradients, against the formula in fp64.

Runs in the machine that tests/kernels/emulate_bf16.py emulates, with torch and Stoker's kernels; `--files FILE` lists the files
that such a machine needs, by another engine if the CPU lacks this one. Exits 0 if all is right, 1 if not, 3 if the engine
is not available in bf16.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

OPENED: set[str] = set()
TOLERANCE = 2e-6  # of sums in fp32, in norm
ROUNDED = 1e-2  # of results in bf16
SHAPES = [(1, 1, 1), (1, 96, 33), (16, 64, 64), (97, 130, 257), (200, 70, 131)]
"""Rows, columns and depth."""
LAYOUTS = ("nt", "nn", "tn")


def note_opened(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(arguments[0], str):
        OPENED.add(arguments[0])


def needed_files() -> list[str]:
    """What this process has opened or mapped, and the sources of compiled modules, whose times Python compares."""
    import torch

    for module in list(sys.modules.values()):  # those that Python opens before the script
        spec = getattr(module, "__spec__", None)
        OPENED.update(filter(None, (getattr(module, "__file__", None), getattr(spec, "cached", None))))
    files = OPENED | {importlib.util.source_from_cache(name) for name in OPENED if name.endswith(".pyc")}
    with open("/proc/self/maps") as maps:
        files |= {line.split()[-1] for line in maps}
    files.add(str(Path(torch.__file__).parent / "bin" / "torch_shm_manager"))  # must exist
    outside = ("/proc/", "/sys/", "/dev/")
    return sorted(
        name for name in files if name.startswith("/") and not name.startswith(outside) and os.path.isfile(name)
    )


def error(found: Any, wanted: Any, size: Any) -> float:
    """The error in norm, relative to the sums of absolute terms, which do not cancel."""
    return float((found.double() - wanted).norm() / size.norm().clamp_min(1e-30))


def check_products(dtype: Any, engine: str) -> list[tuple[str, float, float]]:
    """What was computed, its error, and what is allowed."""
    import torch

    from stoker.kernels import products

    generator = torch.Generator().manual_seed(0)
    results = []
    for rows, columns, depth in SHAPES:
        a = torch.randn(rows, depth, generator=generator).to(dtype)
        b = torch.randn(depth, columns, generator=generator).to(dtype)
        for layout in LAYOUTS:
            left = a.t().contiguous().t() if layout == "tn" else a
            right = b.t().contiguous().t() if layout == "nt" else b
            out = torch.full((rows, columns), float("nan"))
            products.multiply([(left, right)], out, None, engine)
            name = f"{layout} {rows} x {columns} x {depth} {dtype}"
            results.append((name, error(out, a.double() @ b.double(), a.double().abs() @ b.double().abs()), TOLERANCE))
    return results


def check_linear(dtype: Any, weight_dtype: Any, engine: str) -> list[tuple[str, float, float]]:
    import torch

    from stoker.kernels.linear import linear

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(90, 70, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(130, 70, generator=generator).to(torch.bfloat16).to(weight_dtype).requires_grad_()
    bias = torch.randn(130, generator=generator).to(weight_dtype).requires_grad_()
    y = linear(x, weight, bias, engine=engine)
    grad = torch.randn(y.shape, generator=generator).to(dtype)
    y.backward(grad)
    x2, w2, g2 = x.detach().double(), weight.detach().double(), grad.double()
    wanted = {
        "y": (y.detach(), x2 @ w2.t() + bias.detach().double(), x2.abs() @ w2.abs().t()),
        "dx": (x.grad, g2 @ w2, g2.abs() @ w2.abs()),
        "dw": (weight.grad, g2.t() @ x2, g2.abs().t() @ x2.abs()),
        "db": (bias.grad, g2.sum(0), g2.abs().sum(0)),
    }
    return [
        (
            f"linear {dtype}, weight {weight_dtype}: {name}",
            error(found, right, size),
            ROUNDED if found.dtype == torch.bfloat16 else TOLERANCE,
        )
        for name, (found, right, size) in wanted.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--files", type=Path)
    options = parser.parse_args()
    if options.files:
        sys.addaudithook(note_opened)
    import torch

    from stoker.kernels import microkernels
    from stoker.machine.facts import this_machine

    print(f"torch {torch.__version__} imported, {this_machine().isa.bf16_units}", flush=True)
    available = microkernels.find(torch.bfloat16) is not None
    if not available and not options.files:
        print('the engine "onednn" is not available in bf16')
        return 3
    engine = "onednn" if available else "stoker"  # which needs the same files
    results = [*check_products(torch.bfloat16, engine), *check_products(torch.float32, engine)]
    for weight_dtype in (torch.float32, torch.bfloat16):
        results += check_linear(torch.bfloat16, weight_dtype, engine)
    if options.files:
        options.files.write_text("\n".join(needed_files()))
    for name, found, _ in results:
        print(f"{name}: error {found:.2g}", flush=True)
    wrong = [name for name, found, allowed in results if not found <= allowed]
    print(f"wrong: {'; '.join(wrong)}" if wrong else f"{len(results)} results right by {this_machine().isa.bf16_units}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
