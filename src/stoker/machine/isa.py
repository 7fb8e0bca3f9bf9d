"""Instruction sets that matter for training: their common names and the kernel's flags."""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["ARM_SETS", "X86_SETS", "InstructionSets", "lowered_by", "read_instruction_sets"]

X86_SETS: dict[str, str] = {
    "AVX2": "avx2",
    "FMA": "fma",
    "F16C": "f16c",
    "AVX-VNNI": "avx_vnni",
    "AVX-NE-CONVERT": "avx_ne_convert",
    "AVX512-F": "avx512f",
    "AVX512-BW": "avx512bw",
    "AVX512-VL": "avx512vl",
    "AVX512-DQ": "avx512dq",
    "AVX512-VNNI": "avx512_vnni",
    "AVX512-BF16": "avx512_bf16",
    "AVX512-FP16": "avx512_fp16",
    "AMX-TILE": "amx_tile",
    "AMX-BF16": "amx_bf16",
    "AMX-INT8": "amx_int8",
    "AMX-FP16": "amx_fp16",
}

ARM_SETS: dict[str, str] = {
    "NEON": "asimd",
    "FP16": "asimdhp",
    "DOTPROD": "asimddp",
    "BF16": "bf16",
    "I8MM": "i8mm",
    "SVE": "sve",
    "SVE-BF16": "svebf16",
    "SVE2": "sve2",
    "SME": "sme",
}


# oneDNN 3.12, which is in torch 2.13, uses AMX only together with all of these. Virtual machines may hide some, and then it uses
# AVX512-BF16. `stoker.machine.onednn` asks oneDNN itself.
_USED_WITH = {
    "AMX-BF16": frozenset({"AMX-TILE", "AVX512-FP16", "AVX-VNNI"}),
    "AVX512-BF16": frozenset[str](),
    "SVE-BF16": frozenset[str](),
    "BF16": frozenset[str](),
}

_LOWERED_BY = ("ATEN_CPU_CAPABILITY", "DNNL_MAX_CPU_ISA", "ONEDNN_MAX_CPU_ISA", "STOKER_ISA")


def lowered_by() -> str:
    """The environment variables in effect that limit kernels to older instruction sets; measurements are stored per setting."""
    return ",".join(f"{name}={os.environ[name]}" for name in _LOWERED_BY if os.environ.get(name))


@dataclass(frozen=True)
class InstructionSets:
    """The instruction sets of a CPU."""

    present: tuple[str, ...]
    """Names from X86_SETS or ARM_SETS, in their order."""
    absent: tuple[str, ...]
    flags: frozenset[str]
    """Every feature flag, as the kernel spells it."""

    @property
    def bf16_units(self) -> str | None:
        """The units by which oneDNN multiplies bf16 numbers; None if the CPU has none and products are computed in fp32."""
        for name, needed in _USED_WITH.items():
            if name in self.present and needed <= set(self.present):
                return name
        return None


def read_instruction_sets(flags: frozenset[str], architecture: str | None) -> InstructionSets:
    if architecture in {"x86_64", "x86"}:
        table = X86_SETS
    elif architecture in {"aarch64", "arm64", "arm"}:
        table = ARM_SETS
    else:
        table = {}
    return InstructionSets(
        present=tuple(name for name, flag in table.items() if flag in flags),
        absent=tuple(name for name, flag in table.items() if flag not in flags),
        flags=flags,
    )
