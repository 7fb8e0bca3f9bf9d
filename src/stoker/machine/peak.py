"""The arithmetic a core can do per cycle, by microarchitecture, the theoretical peak that follows, and the share reached.

A table of documented values: vector width times multiply-add units times two. For a CPU that is not in it, the peak is unknown,
not guessed. The clock is the one measured during the products; if it was not measured, the nominal clock is used and named.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker.machine.facts import Machine
from stoker.machine.rates import Rates

__all__ = ["PerCycle", "Share", "peak_gflops", "per_cycle", "share_of_peak"]


@dataclass(frozen=True)
class PerCycle:
    """Floating-point operations per cycle and performance core."""

    fp32: int
    bf16: int | None
    """None without bf16 units."""


_DISPROVED = 1.005  # of a peak: from here on percentages round to more than 100
_AVX2_TWO_UNITS = 32  # 8 lanes x 2 units x (multiply + add)
_AVX512_TWO_UNITS = 64
_AMX_BF16 = 1024  # one 16 x 16 x 32 tile product every 16 cycles
_INTEL_SMALL_CORES = {0xAF, 0xBE, 0xB6}  # Sierra Forest, Alder Lake-N, Grand Ridge: two 128-bit units
# Ice Lake-SP/-D, Sapphire and Emerald Rapids, Granite Rapids
_INTEL_SERVER_AVX512 = {0x6A, 0x6C, 0x8F, 0xCF, 0xAD, 0xAE}
# Skylake-SP, Cascade Lake, Cooper Lake: the cheaper ones have one 512-bit unit beside two of 256
_SKYLAKE_SERVER = 0x55
_ARM = {
    0xD0C: PerCycle(16, None),  # Neoverse N1: 2 x 128 bit
    0xD40: PerCycle(32, 128),  # Neoverse V1: 2 x 256 bit SVE
    0xD49: PerCycle(16, 64),  # Neoverse N2: 2 x 128 bit
    0xD4F: PerCycle(32, 128),  # Neoverse V2: 4 x 128 bit
}


def per_cycle(machine: Machine) -> PerCycle | None:
    model, sets = machine.model, machine.isa.present
    if model.vendor == "ARM":
        return _ARM.get(model.model or -1)
    if model.vendor == "AuthenticAMD":
        fp32 = _amd_fp32(model.family or 0, model.model or 0)
    elif model.vendor == "GenuineIntel":
        fp32 = _intel_fp32(machine)
    else:
        fp32 = None
    if fp32 is None or "AVX2" not in sets or "FMA" not in sets:
        return None
    if machine.isa.bf16_units == "AMX-BF16":
        return PerCycle(fp32, _AMX_BF16)
    return PerCycle(fp32, 2 * fp32 if "AVX512-BF16" in sets else None)


def _amd_fp32(family: int, model: int) -> int | None:
    if family == 0x17:  # Zen 1 splits 256-bit operations in two, Zen 2 does not
        return 16 if model < 0x30 else _AVX2_TWO_UNITS
    if family == 0x19:  # Zen 3, and Zen 4 with its double-pumped AVX-512
        return _AVX2_TWO_UNITS
    if family == 0x1A and model < 0x20:  # Zen 5 servers; the mobile ones have half
        return _AVX512_TWO_UNITS
    return None


def _intel_fp32(machine: Machine) -> int | None:
    model, name = machine.model.model or 0, machine.model.name or ""
    if machine.model.family != 6 or model in _INTEL_SMALL_CORES:
        return 16 if model in _INTEL_SMALL_CORES else None
    if "AVX512-F" not in machine.isa.present:
        return _AVX2_TWO_UNITS
    if model in _INTEL_SERVER_AVX512:
        return _AVX512_TWO_UNITS
    if model == _SKYLAKE_SERVER:
        if "Platinum" in name or "Gold 6" in name or "Gold 5122" in name:
            return _AVX512_TWO_UNITS
        return _AVX2_TWO_UNITS if any(kind in name for kind in ("Gold 5", "Silver", "Bronze")) else None
    return _AVX2_TWO_UNITS  # client cores: one 512-bit unit


def peak_gflops(machine: Machine, dtype: str, threads: int, ghz: float | None) -> float | None:
    """The theoretical peak of `threads` cores at `ghz` for dtype fp32 or bf16; None if it cannot be derived."""
    cycle = per_cycle(machine)
    work = None if cycle is None else cycle.fp32 if dtype == "fp32" else cycle.bf16
    return work * threads * ghz if work and ghz else None


@dataclass(frozen=True)
class Share:
    """The measured product of all threads as a share of the theoretical peak."""

    peak: float
    """GFLOP/s at `ghz`."""
    reached: float
    ghz: float
    nominal: bool
    """The clock was not measured, so `ghz` is the nominal one, and boost may raise `reached` above 1."""

    @property
    def disproved(self) -> bool:
        """Whether the product exceeds the peak at the measured clock, so that this peak must be wrong."""
        return not self.nominal and self.reached >= _DISPROVED


def share_of_peak(machine: Machine, rates: Rates, dtype: str) -> Share | None:
    """The share for dtype fp32 or bf16; None if the peak cannot be derived."""
    reached, measured = (
        (rates.fp32_all, rates.clock_all) if dtype == "fp32" else (rates.bf16_all, rates.clock_bf16 or rates.clock_all)
    )
    ghz = measured or machine.model.nominal_ghz
    peak = peak_gflops(machine, dtype, rates.threads, ghz)
    return Share(peak, reached / peak, ghz, nominal=not measured) if peak and ghz else None
