"""/proc/cpuinfo: vendor, model and features of the CPU, on x86 and Arm."""

from __future__ import annotations

import re
from dataclasses import dataclass

from stoker.machine.tree import Tree

__all__ = ["CpuModel", "Processor", "read_cpu_model", "read_flags", "read_processors"]

# Arm cores identify themselves by number. Common server cores, from Arm's MIDR_EL1 tables.
_ARM_IMPLEMENTERS = {0x41: "ARM", 0x46: "Fujitsu", 0x48: "HiSilicon", 0x51: "Qualcomm", 0x61: "Apple", 0xC0: "Ampere"}
_ARM_PARTS = {
    (0x41, 0xD08): "Cortex-A72",
    (0x41, 0xD0C): "Neoverse-N1",
    (0x41, 0xD40): "Neoverse-V1",
    (0x41, 0xD49): "Neoverse-N2",
    (0x41, 0xD4F): "Neoverse-V2",
    (0x41, 0xD84): "Neoverse-V3",
    (0x41, 0xD8E): "Neoverse-N3",
    (0x46, 0x001): "A64FX",
    (0xC0, 0xAC3): "Ampere-1",
    (0xC0, 0xAC4): "Ampere-1a",
}

Processor = dict[str, str]
"""One paragraph of /proc/cpuinfo."""


@dataclass(frozen=True)
class CpuModel:
    """Identification of the CPU. None means unknown, as in all facts about a machine."""

    vendor: str | None
    """As the CPU reports it: GenuineIntel, AuthenticAMD, ARM."""
    name: str | None
    family: int | None
    """CPUID family on x86; None elsewhere."""
    model: int | None
    """CPUID model on x86, MIDR part number on Arm."""
    stepping: int | None
    architecture: str | None
    """x86_64, aarch64, or what the kernel calls it."""
    nominal_ghz: float | None
    """The nominal clock, without boost."""
    virtual: bool | None
    """Whether this is a virtual machine."""


def read_processors(tree: Tree) -> list[Processor]:
    """The paragraphs of /proc/cpuinfo, one per logical CPU."""
    processors: list[Processor] = []
    for paragraph in re.split(r"\n\s*\n", tree.text("/proc/cpuinfo") or ""):
        fields = {}
        for line in paragraph.splitlines():
            key, colon, value = line.partition(":")
            if colon:
                fields[key.strip()] = value.strip()
        if "processor" in fields:
            processors.append(fields)
    return processors


def read_flags(processors: list[Processor]) -> frozenset[str]:
    """The features that every CPU of the machine has (on some Arm systems they differ)."""
    # Hundreds of CPUs have the same line; split each distinct one once.
    lines = {fields.get("flags") or fields.get("Features") or "" for fields in processors}
    sets = [frozenset(line.split()) for line in lines]
    return frozenset.intersection(*sets) if sets else frozenset()


def read_cpu_model(tree: Tree, processors: list[Processor]) -> CpuModel:
    first = processors[0] if processors else {}
    if "CPU implementer" in first:
        return _arm_model(tree, first)
    flags = first.get("flags", "").split()
    x86 = "vendor_id" in first and bool(flags)
    return CpuModel(
        vendor=first.get("vendor_id"),
        name=_tidy(first.get("model name") or first.get("uarch") or first.get("cpu")),
        family=_integer(first.get("cpu family")),
        model=_integer(first.get("model")),
        stepping=_integer(first.get("stepping")),
        architecture=("x86_64" if "lm" in flags else "x86") if x86 else _live_architecture(tree),
        nominal_ghz=_nominal_ghz(tree, first),
        virtual="hypervisor" in flags if x86 else None,
    )


def _arm_model(tree: Tree, fields: Processor) -> CpuModel:
    implementer = _integer(fields.get("CPU implementer"))
    part = _integer(fields.get("CPU part"))
    name = None
    if implementer is not None and part is not None:
        name = _ARM_PARTS.get((implementer, part), f"part {part:#x}")
    return CpuModel(
        vendor=_ARM_IMPLEMENTERS.get(implementer or -1, fields.get("CPU implementer")),
        name=name,
        family=None,
        model=part,
        stepping=_integer(fields.get("CPU revision")),
        architecture="aarch64" if fields.get("CPU architecture") in {"8", "9", "AArch64"} else "arm",
        nominal_ghz=_nominal_ghz(tree, fields),
        virtual=None,
    )


def _nominal_ghz(tree: Tree, fields: Processor) -> float | None:
    kilohertz = tree.number("/sys/devices/system/cpu/cpu0/cpufreq/base_frequency")
    if kilohertz:
        return kilohertz / 1e6
    if match := re.search(r"@ *([0-9.]+) *GHz", fields.get("model name", "")):
        return float(match[1])
    # In a virtual machine `cpu MHz` is the constant the hypervisor gives; on bare metal it is the current clock.
    if "hypervisor" in fields.get("flags", "").split():
        try:
            return round(float(fields["cpu MHz"]) / 1e3, 3)
        except (KeyError, ValueError):
            return None
    kilohertz = tree.number("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")
    return kilohertz / 1e6 if kilohertz and "CPU implementer" in fields else None


def _live_architecture(tree: Tree) -> str | None:
    if not tree.live:
        return None
    import platform

    return platform.machine() or None


def _tidy(name: str | None) -> str | None:
    return " ".join(name.split()) if name else None


def _integer(text: str | None) -> int | None:
    try:
        return int(text or "", 0)
    except ValueError:
        return None
