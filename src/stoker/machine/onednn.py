"""Which kernel oneDNN uses for bf16 products on this CPU: its own answer, from the line that it logs for one product.

The CPU's flags are not enough: oneDNN 3.12 uses AMX only where AVX512-FP16 and AVX-VNNI are visible too, and virtual machines may
hide those (`stoker.machine.isa` knows that much).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
import tempfile
from collections.abc import Iterator

__all__ = ["bf16_kernel", "implementation", "units_of"]


def bf16_kernel() -> str | None:
    """The implementation's name, such as `brg_matmul:avx512_core_bf16`; None if oneDNN is not asked or does not say."""
    import torch

    try:
        with _captured() as lines:
            matrix = torch.ones(64, 64, dtype=torch.bfloat16)
            logged = torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON)  # type: ignore[no-untyped-call]
            with logged, torch.no_grad():
                matrix @ matrix
        return implementation("\n".join(lines))
    except (OSError, RuntimeError, AttributeError):
        return None


def units_of(kernel: str | None) -> str | None:
    """The units by which a kernel of that name multiplies, as `InstructionSets.bf16_units` calls them; None if not known."""
    instructions = (kernel or "").rpartition(":")[2]
    if "amx" in instructions:
        return "AMX-BF16"
    return "AVX512-BF16" if re.match(r"avx512_core_(bf16|fp16)|avx10", instructions) else None


def implementation(text: str) -> str | None:
    """`onednn_verbose,v1,primitive,exec,cpu,matmul,brg_matmul:avx512_core_bf16,...`"""
    found = re.findall(
        r"^onednn_verbose,(?:v\d+,)?(?:primitive,)?exec,cpu,(?:matmul|inner_product),([^,]+),", text, re.M
    )
    return found[-1] if found else None


@contextlib.contextmanager
def _captured() -> Iterator[list[str]]:
    """Collects what this process writes to its standard output meanwhile, libraries included."""
    lines: list[str] = []
    sys.stdout.flush()
    flush = ctypes.CDLL(None).fflush
    flush(None)
    before = os.dup(1)
    try:
        with tempfile.TemporaryFile() as file:
            os.dup2(file.fileno(), 1)
            try:
                yield lines
            finally:
                flush(None)
                os.dup2(before, 1)
            file.seek(0)
            lines += file.read().decode("utf-8", "replace").splitlines()
    finally:
        os.close(before)
