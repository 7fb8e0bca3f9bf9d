"""Advice that follows from the facts: which precision, how many processes and threads, what slows training down.

Pure functions of facts that were read before. Each verdict names at most one action.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from stoker.english import counted
from stoker.machine import onednn
from stoker.machine.facts import Machine
from stoker.machine.load import Load
from stoker.machine.processes import best_division
from stoker.machine.rates import WORTHWHILE_GAIN, Rates, TrainingStep
from stoker.machine.software import Software
from stoker.machine.tree import format_cpu_list
from stoker.machine.version_pairs import find_bad_pairs
from stoker.requires import release

__all__ = ["Evidence", "Verdict", "verdicts"]

_SMALL_SHM = 512 << 20  # Docker gives 64 MB; one batch of activations between DataLoader workers is tens of MB
_FEW_FILES = 1024
_TIE = 1.03  # medians of the same step differ by this much between runs
_EXPECTED_CAPABILITY = (("AVX512-F", "AVX512"), ("AVX2", "AVX2"))


@dataclass(frozen=True)
class Verdict:
    subject: str
    """precision, processes, or what slows training down."""
    level: str
    """good, advice or warning."""
    text: str
    action: str | None = None
    """What to do about it; None if nothing needs to be done."""


def _warning(subject: str, text: str, action: str | None) -> Verdict:
    return Verdict(subject, "warning", text, action)


@dataclass(frozen=True)
class Evidence:
    """Everything that verdicts depend on. None means not read, or unknown."""

    machine: Machine
    software: Software | None = None
    rates: Rates | None = None
    load: Load | None = None
    environment: Mapping[str, str] | None = None


def verdicts(evidence: Evidence) -> tuple[Verdict, ...]:
    return (
        _precision(evidence),
        _processes(evidence),
        *_cpu_limits(evidence),
        *_busy(evidence.load),
        *_memory(evidence.machine),
        *_ulimits(evidence.machine),
        *_software(evidence),
        *_environment(evidence),
    )


def _precision(evidence: Evidence) -> Verdict:
    rates = evidence.rates
    if rates and rates.step:
        return _measured_precision(evidence, rates, rates.step)
    units = _bf16_units(evidence)
    if units and rates and rates.fastest_dtype == "fp32":
        return _units_not_reached(units, rates, "")
    products = _products(rates)
    if units:
        return Verdict(
            "precision", "good", f"bf16: the CPU multiplies bf16 numbers itself ({units}){products}.", "Use bf16."
        )
    if not evidence.machine.isa.flags:
        return Verdict("precision", "advice", "The CPU's features are unknown; fp32 runs on every CPU.", "Use fp32.")
    return Verdict("precision", "good", f"fp32: {_without_units(rates)}", "Use fp32.")


def _bf16_units(evidence: Evidence) -> str | None:
    """oneDNN's own answer where torch was asked; else what follows from the CPU's features."""
    torch = evidence.software.torch if evidence.software else None
    return onednn.units_of(torch.bf16_kernel if torch else None) or evidence.machine.isa.bf16_units


def _measured_precision(evidence: Evidence, rates: Rates, step: TrainingStep) -> Verdict:
    """Judged by the measured training step; the CPU's features only explain it."""
    faster = f"{_which_trains_faster(step)}. "
    machine, units = evidence.machine, _bf16_units(evidence)
    if units and rates.fastest_dtype == "fp32" and step.gain < WORTHWHILE_GAIN:
        return _units_not_reached(units, rates, faster)
    if step.gain >= WORTHWHILE_GAIN:
        why = f"The CPU multiplies bf16 numbers itself ({units})." if units else _no_units(machine)
        return Verdict("precision", "good", f"{faster}{why}", "Use bf16.")
    if units:
        little = (
            "gain too little to give up the precision of fp32" if step.gain > _TIE else "do not make training faster"
        )
        return Verdict("precision", "advice", f"{faster}The CPU's bf16 units ({units}) {little}.", "Use fp32.")
    why = _without_units(rates) if machine.isa.flags else _no_units(machine)
    memory = ", or bf16 where memory is short" * (step.gain > 1 / _TIE)
    return Verdict("precision", "good", f"{faster}{why[0].upper()}{why[1:]}", f"Use fp32{memory}.")


def _which_trains_faster(step: TrainingStep) -> str:
    when = " while other programs ran" * step.disturbed
    figures = f"(measured step{when}: fp32 {1000 * step.fp32:,.0f} ms, bf16 {1000 * step.bf16:,.0f} ms)"
    if 1 / _TIE < step.gain < _TIE:
        return f"fp32 and bf16 train equally fast on this machine {figures}"
    first, second, times = ("bf16", "fp32", step.gain) if step.gain > 1 else ("fp32", "bf16", 1 / step.gain)
    return f"{first} trains {times:.2f} times as fast as {second} on this machine {figures}"


def _units_not_reached(units: str, rates: Rates, faster: str) -> Verdict:
    text = f"{faster}The CPU has bf16 units ({units}), but this version of torch does not use them{_products(rates)}."
    return Verdict("precision", "warning", text, "Use fp32, or a newer torch.")


def _without_units(rates: Rates | None) -> str:
    return (
        "this CPU has no bf16 units. bf16 then means stored as bf16 and computed in fp32, which saves memory. "
        f"PyTorch's own bf16 products are very slow on such a CPU{_products(rates)}."
    )


def _no_units(machine: Machine) -> str:
    return (
        "This CPU has no bf16 units, but bf16 moves half the bytes."
        if machine.isa.flags
        else "The CPU's features are unknown."
    )


def _products(rates: Rates | None) -> str:
    if rates is None:
        return ""
    bf16, fp32 = (f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}" for rate in (rates.bf16_all, rates.fp32_all))
    return f" (measured products: bf16 {bf16}, fp32 {fp32} GFLOP/s)"


def _processes(evidence: Evidence) -> Verdict:
    machine = evidence.machine
    division = best_division(machine)
    processes, threads = division.processes, division.threads
    count = f"{counted(processes, 'process')} with {counted(threads, 'thread')}"
    reasons = []
    if processes > 1 and division.nodes == 1:
        reasons.append("each process within one NUMA node, so that it uses local memory")
    elif processes > 1:
        reasons.append(
            f"each process on {division.nodes} neighbouring NUMA nodes, because more processes would copy more weights than "
            "local memory saves"
        )
    if machine.quota is not None and machine.quota < len(machine.fast_cores):
        reasons.append(f"no more than the quota of {machine.quota:g} CPUs")
    else:
        reasons.append("one thread per physical core")
    if machine.threads_per_core > 1:
        reasons.append("SMT siblings share one set of vector units")
    if machine.hybrid:
        reasons.append("efficiency cores would slow down the performance cores")
    torch = evidence.software.torch if evidence.software else None
    already_set = processes == 1 and torch is not None and torch.threads == threads
    return Verdict(
        "processes",
        "good",
        f"{count}{' each' * (processes > 1)}: {'; '.join(reasons)}{' (already set)' * already_set}.",
        None if already_set else f"stoker launch -ppn {processes}" if processes > 1 else f"OMP_NUM_THREADS={threads}",
    )


def _cpu_limits(evidence: Evidence) -> Iterator[Verdict]:
    machine = evidence.machine
    seen, usable = len(machine.cpus), len(machine.usable_cpus)
    if machine.quota is not None and machine.quota < usable:
        yield _warning(
            "quota",
            f"The container may use {machine.quota:g} CPUs' worth of time but sees {usable}: "
            "with more threads than that, all of them are throttled.",
            f"Run with OMP_NUM_THREADS={machine.usable_threads}, or raise the container's CPU limit.",
        )
    if 0 < usable < seen:
        yield Verdict(
            "affinity",
            "advice",
            f"This process may run on {usable} of the machine's {seen} CPUs (affinity mask or cpuset).",
            "If this is not intended, start it without taskset, or with a larger cpuset.",
        )
    software = evidence.software
    if software and software.torch and software.torch.threads > machine.usable_threads:
        yield _warning(
            "oversubscription",
            f"torch would start {software.torch.threads} threads, but only {machine.usable_threads} can run at once.",
            f"Run with OMP_NUM_THREADS={machine.usable_threads}.",
        )
    elif software and software.torch and software.torch.threads == 1 < machine.usable_threads:
        yield _warning(
            "threads",
            f"torch would use 1 of {machine.usable_threads} cores; OMP_NUM_THREADS=1 is the usual cause.",
            f"Run with OMP_NUM_THREADS={machine.usable_threads}.",
        )


def _busy(load: Load | None) -> Iterator[Verdict]:
    if load is None:
        return
    if load.disturbs:
        yield _warning(
            "load",
            f"Other programs keep {load.busy:.1f} of {load.cpus} CPUs busy right now.",
            "Wait until they finish (`top` lists them); rates measured now are too low.",
        )
    if load.stolen > 0.1 * load.cpus:
        yield _warning(
            "stolen time",
            f"The hypervisor gives {load.stolen:.1f} of {load.cpus} CPUs to other virtual machines.",
            "Use an instance with dedicated CPUs.",
        )


def _memory(machine: Machine) -> Iterator[Verdict]:
    shm = machine.limits.shm_size
    if shm is not None and shm < _SMALL_SHM:
        yield _warning(
            "/dev/shm",
            f"/dev/shm has only {shm >> 20} MB; DataLoader workers and the processes of one machine exchange data through it.",
            "Start the container with --shm-size=8g (Kubernetes: an emptyDir of medium Memory at /dev/shm).",
        )
    far = [node for node in machine.nodes if not node.cpus and node.memory]
    if far and machine.cpus:
        yield Verdict(
            "memory without CPUs",
            "advice",
            f"NUMA node{'s' * (len(far) > 1)} {format_cpu_list(node.number for node in far)} {'have' if len(far) > 1 else 'has'} "
            f"{sum(node.memory or 0 for node in far) / 2**30:.0f} GB of memory and no CPUs (HBM, CXL or the memory of a GPU): "
            "no process runs there, and bound processes do not use that memory.",
            "For HBM, choose cache mode in the firmware." if machine.model.vendor == "GenuineIntel" else None,
        )
    limit, total = machine.limits.cgroup.memory_limit, machine.memory_total
    if limit is not None and total is not None and limit < total:
        yield Verdict(
            "memory limit",
            "advice",
            f"The container may use {limit / 2**30:.1f} of the machine's {total / 2**30:.1f} GB; "
            "a process that uses more is killed.",
            "Choose batches that fit, or raise the limit.",
        )
    available = machine.memory_available
    if available is not None and total and available < 0.1 * total:
        yield _warning(
            "memory",
            f"Only {available / 2**30:.1f} of {total / 2**30:.1f} GB of memory are free.",
            "End the programs that use it (`ps aux --sort=-rss | head` lists them).",
        )


def _ulimits(machine: Machine) -> Iterator[Verdict]:
    soft = {limit.name: limit.soft for limit in machine.limits.ulimits}
    for name, flag in (("address space", "-v"), ("data size", "-d"), ("file size", "-f")):
        value = soft.get(name)
        if value is not None:
            yield _warning(
                f"ulimit {flag}",
                f"The shell limits the {name} to {value / 2**30:.1f} GB; large models or checkpoints need more.",
                f"ulimit {flag} unlimited",
            )
    if (seconds := soft.get("cpu time")) is not None:
        yield _warning(
            "ulimit -t",
            f"The shell ends every program after {seconds} s of CPU time.",
            "ulimit -t unlimited",
        )
    files = soft.get("open files")
    if files is not None and files < _FEW_FILES:
        yield _warning(
            "ulimit -n",
            f"Only {files} files may be open; DataLoader workers use one per tensor in transit.",
            "ulimit -n 65536",
        )
    tasks = [limit for limit in (soft.get("processes"), machine.limits.cgroup.tasks_limit) if limit is not None]
    wanted = 64 + 8 * len(machine.usable_cpus)
    if tasks and min(tasks) < wanted:
        yield _warning(
            "ulimit -u",
            f"Only {min(tasks)} processes and threads are allowed (ulimit or the container's pids limit).",
            f"Allow at least {wanted}: ulimit -u {wanted}, or a larger pids limit.",
        )


def _software(evidence: Evidence) -> Iterator[Verdict]:
    software = evidence.software
    if software is None:
        return
    if software.torch is None:
        yield _warning(
            "torch",
            f"torch cannot be imported: {software.torch_error}.",
            "pip install --force-reinstall torch",
        )
    if len(software.openmp) > 1:
        yield _warning(
            "OpenMP",
            f"{len(software.openmp)} OpenMP runtimes are loaded ({', '.join(software.openmp)}): "
            "their threads compete for the cores.",
            "Remove the LD_PRELOAD entry or the package that loads the one that torch does not use.",
        )
    for pair, named in find_bad_pairs(software.versions):
        yield _warning("versions", f"{named}: {pair.why}.", pair.install)
    yield from _capability(evidence.machine, software)


def _capability(machine: Machine, software: Software) -> Iterator[Verdict]:
    if software.torch is None or software.torch.capability is None:
        return
    expected = next((name for flag, name in _EXPECTED_CAPABILITY if flag in machine.isa.present), None)
    found = software.torch.capability.upper()
    if expected and not found.startswith(expected) and not (expected == "AVX2" and found.startswith("AVX512")):
        yield _warning(
            "torch",
            f"torch runs its {found} kernels although the CPU has {expected}; ATEN_CPU_CAPABILITY is the usual cause.",
            "unset ATEN_CPU_CAPABILITY, or install another build of torch",
        )


def _environment(evidence: Evidence) -> Iterator[Verdict]:
    environment, software = evidence.environment or {}, evidence.software
    version = release(software.versions.get("torch", "")) if software else ()
    if environment.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL" and version[:2] == (2, 13):
        yield _warning(
            "environment",
            "TORCH_DISTRIBUTED_DEBUG=DETAIL crashes DDP on gloo in torch 2.13 (a bug in torch).",
            "export TORCH_DISTRIBUTED_DEBUG=INFO",
        )
