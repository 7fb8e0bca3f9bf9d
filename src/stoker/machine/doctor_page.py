"""The page of `stoker doctor`: facts in sections, rates in a table, and the verdicts last, where they are seen first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from stoker.english import counted
from stoker.machine.facts import Machine
from stoker.machine.onednn import units_of
from stoker.machine.peak import Share, share_of_peak
from stoker.machine.rates import Rates
from stoker.machine.software import Software
from stoker.machine.topology import Cache
from stoker.machine.tree import format_cpu_list
from stoker.machine.verdicts import Verdict
from stoker.machine.version_pairs import untested

__all__ = ["doctor_page", "print_page"]

_MARKS = {"good": ("ok", "bold green"), "advice": ("note", "bold cyan"), "warning": ("!!", "bold yellow")}
Row = tuple[str, str]


def print_page(console: Console, sections: Iterable[RenderableType]) -> None:
    for section in sections:
        console.print(section)
    console.print()


def doctor_page(
    machine: Machine,
    software: Software | None,
    rates: Rates | None,
    verdicts: tuple[Verdict, ...],
    notes: tuple[str, ...] = (),
) -> list[RenderableType]:
    sections = [_section("CPU", _cpu_rows(machine)), _section("What this process may use", _limit_rows(machine))]
    if software:
        sections.append(_section("Software", _software_rows(software)))
    if rates:
        sections.append(_titled("Measured rates", _rates_table(machine, rates)))
    if notes:
        sections.append(Padding(Group(*(Text(note, style="dim") for note in notes)), (0, 0, 0, 2)))
    sections.append(_titled("Verdicts", _verdict_table(verdicts)))
    return sections


def _titled(title: str, body: RenderableType) -> RenderableType:
    return Group(
        Text(), Rule(Text(title, style="bold"), align="left", style="dim"), Padding(body, (0, 0, 0, 2), expand=False)
    )


def _section(title: str, rows: list[Row]) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", min_width=9)
    grid.add_column(overflow="fold")
    for label, value in rows:
        grid.add_row(label, Text(value))
    return _titled(title, grid)


def _cpu_rows(machine: Machine) -> list[Row]:
    model = machine.model
    about = [word for word in (model.vendor, model.architecture) if word]
    if model.virtual:
        about.append("virtual machine")
    if model.nominal_ghz:
        about.append(f"{model.nominal_ghz:.2f} GHz nominal")
    rows = [("model", f"{model.name or 'unknown'} ({', '.join(about) or 'unknown'})"), ("cores", _cores(machine))]
    rows += [("NUMA", line) for line in _nodes(machine)]
    rows.append(("memory", gigabytes(machine.memory_total)))
    rows.append(("caches", _caches(machine.caches)))
    sets = machine.isa
    rows.append(("has", " ".join(sets.present) or ("none of those that matter" if sets.flags else "unknown")))
    if sets.absent and sets.flags:
        rows.append(("lacks", " ".join(sets.absent)))
    return rows


def _cores(machine: Machine) -> str:
    if not machine.cpus:
        return "unknown"
    parts = [
        counted(machine.sockets, "socket"),
        counted(len(machine.cores), "physical core"),
        counted(len(machine.cpus), "logical CPU"),
    ]
    if machine.threads_per_core > 1:
        parts.append(f"SMT with {machine.threads_per_core} threads per core")
    if machine.hybrid:
        kinds = Counter(core.kind for core in machine.cores)
        parts.append(f"{kinds['performance']} performance and {kinds['efficiency']} efficiency cores")
    return ", ".join(parts)


def _nodes(machine: Machine) -> list[str]:
    return [
        f"node {node.number}: "
        + (f"CPUs {format_cpu_list(node.cpus)}, " if node.cpus else "no CPUs, ")
        + gigabytes(node.memory)
        for node in machine.nodes
    ]


def _caches(caches: tuple[Cache, ...]) -> str:
    kinds = {"data": "d", "instruction": "i"}
    kinds_of_cache = Counter((cache.level, kinds.get(cache.kind, ""), cache.size) for cache in caches)
    lines = [
        f"L{level}{kind} {count} x {kilobytes(size)}"
        for (level, kind, size), count in sorted(kinds_of_cache.items(), key=str)
    ]
    return ", ".join(lines) or "unknown"


def _limit_rows(machine: Machine) -> list[Row]:
    limits, group = machine.limits, machine.limits.cgroup
    usable = f"{format_cpu_list(machine.usable_cpus)} ({counted(len(machine.usable_cores), 'physical core')})"
    quota = "none" if machine.quota is None else f"{machine.quota:g} CPUs' worth of time"
    rows = [
        ("CPUs", usable if machine.usable_cpus else "unknown"),
        ("quota", f"{quota} (cgroup {group.version})" if group.version else "unknown (no cgroup found)"),
        ("memory", _memory(machine)),
        ("/dev/shm", gigabytes(limits.shm_size)),
        ("huge pages", limits.huge_pages or "unknown"),
    ]
    ulimits = [f"{limit.name} {_ulimit(limit.name, limit.soft)}" for limit in limits.ulimits if limit.soft is not None]
    rows.append(("ulimits", ", ".join(ulimits) or ("none" if limits.ulimits else "unknown")))
    return rows


def _memory(machine: Machine) -> str:
    limit, total = machine.limits.cgroup.memory_limit, machine.memory_total
    text = gigabytes(machine.usable_memory)
    if limit is not None and (total is None or limit < total):
        text += " (container limit)"
    if machine.memory_available is not None:
        text += f", {gigabytes(machine.memory_available)} available on the machine"
    return text


def _ulimit(name: str, value: int) -> str:
    return (
        f"{value:,}"
        if name in {"open files", "processes"}
        else f"{value} s"
        if name == "cpu time"
        else kilobytes(value)
    )


def _software_rows(software: Software) -> list[Row]:
    rows = [("Python", software.python)]
    torch = software.torch
    if torch:
        build = [f"{torch.capability} kernels" if torch.capability else "", f"BLAS {torch.blas}" if torch.blas else ""]
        build += [f"oneDNN {torch.onednn}" if torch.onednn else "", torch.compiler or ""]
        build += [f"CUDA {torch.cuda}" if torch.cuda else "CPU build", untested("torch", torch.version)]
        rows.append(
            ("torch", f"{torch.version} ({', '.join(filter(None, build))}), {counted(torch.threads, 'thread')}")
        )
    else:
        rows.append(("torch", f"cannot be imported: {software.torch_error}"))
    others = [
        f"{name} {version}" + (f" ({note})" if (note := untested(name, version)) else "")
        for name, version in software.versions.items()
        if name != "torch"
    ]
    rows.append(("packages", ", ".join(others) or "none"))
    rows.append(("OpenMP", ", ".join(software.openmp) or "none loaded"))
    allocators = [f"{found.name} {'loaded' if found.loaded else found.path}" for found in software.allocators]
    rows.append(("allocators", ", ".join(allocators) or "glibc only"))
    if torch:
        if torch.bf16_kernel:
            units = units_of(torch.bf16_kernel)
            rows.append(("bf16", f"products by oneDNN's {torch.bf16_kernel}" + (f" ({units})" if units else "")))
        rows.append(("backends", ", ".join(torch.backends) or "none"))
    launchers = [
        " ".join(filter(None, (found.program, f"({found.kind})" * (found.kind != found.program), found.version)))
        for found in software.launchers
    ]
    rows.append(("launchers", ", ".join(launchers) or "none"))
    return rows


def _rates_table(machine: Machine, rates: Rates) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("")
    for heading in ("one thread", counted(rates.threads, "thread"), "peak", "reached"):
        table.add_column(heading, justify="right")
    shares = {dtype: share_of_peak(machine, rates, dtype) for dtype in ("fp32", "bf16")}
    for dtype, one, every in (("fp32", rates.fp32_one, rates.fp32_all), ("bf16", rates.bf16_one, rates.bf16_all)):
        shown = _peak_and_share(shares[dtype])
        if dtype == "bf16" and not machine.isa.bf16_units and machine.isa.flags:
            shown = ("no units", "")
        table.add_row(f"{dtype} product", f"{_rate(one)} GFLOP/s", f"{_rate(every)} GFLOP/s", *shown)
    table.add_row("memory", f"{_rate(rates.bandwidth_one)} GB/s", f"{_rate(rates.bandwidth_all)} GB/s", "unknown", "")
    lines = [_disproved(dtype, share) for dtype, share in shares.items() if share and share.disproved]
    when = f"{_clock(machine, rates)}measured {rates.measured} in {rates.seconds:.0f} s"
    lines.append(when + ", while other programs ran" * rates.disturbed)
    if step := rates.step:
        lines.append(
            f"training step: fp32 {_milliseconds(step.fp32)}, bf16 {_milliseconds(step.bf16)} "
            f"({step.layers} BERT layers of width {step.width}, {step.tokens:,} tokens, AdamW)"
        )
    return Group(table, *(Text(line, style="dim") for line in lines))


def _peak_and_share(share: Share | None) -> Row:
    if share is None or share.disproved:
        return "unknown", ""
    if share.nominal:
        return f"{share.peak:,.0f} GFLOP/s nominal", f"{share.reached:.0%} of nominal"
    return f"{share.peak:,.0f} GFLOP/s", f"{share.reached:.0%}"


def _disproved(dtype: str, share: Share) -> str:
    return (
        f"the {dtype} product exceeds the peak of {share.peak:,.0f} GFLOP/s that follows from {share.ghz:.2f} GHz: "
        "the clock rose after it was measured, or the CPU does more per cycle than documented"
    )


def _clock(machine: Machine, rates: Rates) -> str:
    if not rates.clock_all:
        return "clock not measured, peak at nominal clock, " if machine.model.nominal_ghz else ""
    lower = machine.isa.bf16_units and rates.clock_bf16 and f"{rates.clock_bf16:.2f}" != f"{rates.clock_all:.2f}"
    bf16 = f" ({rates.clock_bf16:.2f} GHz in bf16)" if lower else ""
    return f"clock during the products {rates.clock_all:.2f} GHz{bf16}, "


def _verdict_table(verdicts: tuple[Verdict, ...]) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(min_width=4)
    grid.add_column(overflow="fold")
    for verdict in verdicts:
        mark, style = _MARKS[verdict.level]
        text = Text(verdict.text)
        if verdict.action:
            text.append("\n-> ", style="dim")
            text.append(verdict.action, style="bold")
        grid.add_row(Text(mark, style=style), text)
    return grid


def gigabytes(size: int | None) -> str:
    if size is None:
        return "unknown"
    return f"{size / 2**30:.1f} GB" if size >= 2**30 else f"{size / 2**20:.0f} MB"


def kilobytes(size: int | None) -> str:
    if size is None:
        return "unknown"
    for unit, scale in (("GB", 30), ("MB", 20)):
        if size >= 1 << scale:
            return (
                f"{size / (1 << scale):g} {unit}"
                if size % (1 << (scale - 4)) == 0
                else f"{size / (1 << scale):.1f} {unit}"
            )
    return f"{size >> 10} KB"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.0f} ms" if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"
