"""The results of `stoker bench` as Markdown tables of at most 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from stoker.bench.bench_cases import CASES
from stoker.bench.bench_results import Pair, Results, machine_lines
from stoker.english import counted

__all__ = ["markdown", "size_text", "time_text"]

WIDTH = 80


def markdown(results: Results) -> str:
    parts = ["# stoker bench" + (" --quick" if results.quick else "")]
    parts.append("\n".join(f"    {line}" for line in _wrapped_machine(results)))
    if results.measured_steps:
        parts += ["## Training steps: stock against Stoker", _steps(results), _legend(results)]
    if results.host:
        parts += ["## Host time of a step: what it costs besides its arithmetic", _host(results)]
    if results.measured_sweep:
        one = results.measured_sweep[0]
        title = f"## Threads: {one.title}{_layers(one)} in fp32"
        scales = f"Scales: how many times as fast as with {counted(one.threads, 'thread')}."
        parts += [title, _sweep(results), *([scales] if len(results.measured_sweep) > 1 else [])]
    if results.allreduce:
        first = results.allreduce[0]
        parts += [f"## Allreduce: {counted(first.ranks, 'rank')}, {first.placement}", _allreduce(results)]
    notes = [*_marks(results), *results.notes]
    if results.empty:
        notes.insert(0, "Nothing was measured.")
    if results.interrupted:
        notes.append("Interrupted: what was not measured is missing.")
    if notes:
        parts += ["## Notes", "\n".join(_bullet(note) for note in notes)]
    parts.append(
        _wrapped(
            f"Measured {results.measured} in {results.seconds:.0f} s by `stoker bench`. Medians; both sides take their "
            "steps in turn on the same batches and cores, with random weights."
        )
    )
    return "\n\n".join(parts) + "\n"


def _wrapped_machine(results: Results) -> list[str]:
    lines = machine_lines(results.machine, results.versions)
    return [part for line in lines for part in textwrap.wrap(line, WIDTH - 4, subsequent_indent="  ")]


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def _bullet(text: str) -> str:
    return textwrap.fill(f"- {text}", WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _steps(results: Results) -> str:
    rows = []
    for number, pair in enumerate(results.measured_steps):
        again = number and results.measured_steps[number - 1].case == pair.case
        rows.append(
            (
                "" if again else pair.title,
                pair.precision + ("*" if _other_precision(pair) else ""),
                time_text(pair.stock.median),
                time_text(pair.stoker.median),
                _times(pair.faster, pair),
                f"{pair.memory:.2f}x",
            )
        )
    return _table(("model", "in", "stock", "Stoker", "faster", "memory"), rows, 2)


def _other_precision(pair: Pair) -> bool:
    return pair.precision == "bf16" and pair.rival == "stock"


def _layers(pair: Pair) -> str:
    return f" ({pair.layers})" if pair.layers else ""


def _legend(results: Results) -> str:
    shown = {pair.case: pair for pair in results.measured_steps}
    lines = [f"{pair.title}{_layers(pair)}: {CASES[case].about}." for case, pair in shown.items()]
    threads = results.measured_steps[0].threads
    text = f"{counted(threads, 'thread')}. " + " ".join(lines)
    text += " A step is forward, backward, clipping and fused AdamW; memory is Stoker's peak as a share of stock's."
    if any(map(_other_precision, results.measured_steps)):
        text += (
            " *This CPU has no bf16 units, so stock's bf16 would take many times as long: Stoker's bf16 is compared with "
            "stock in fp32."
        )
    return _wrapped(text)


def _host(results: Results) -> str:
    rows = []
    for one in results.host:
        medians = one.medians
        for precision in ("", "bf16"):
            stock, stoker = (medians.get(f"{side} {precision}".strip()) for side in ("stock", "stoker"))
            if stock is None or stoker is None:
                continue
            share = f"{one.share(precision):.2f}x" + _mark(one.disturbance.disturbs)
            rows.append(
                ("" if precision else one.title, precision or "fp32", time_text(stock), time_text(stoker), share)
            )
    return _table(("model of width 32, one thread", "in", "stock", "Stoker", "Stoker's share"), rows, 2)


def _sweep(results: Results) -> str:
    pairs = results.measured_sweep
    least = pairs[0]
    rows = [
        (
            f"{pair.threads}",
            time_text(pair.stock.median),
            time_text(pair.stoker.median),
            _times(pair.faster, pair),
            f"{least.stock.median / pair.stock.median:.1f}x",
            f"{least.stoker.median / pair.stoker.median:.1f}x",
        )
        for pair in pairs
    ]
    heads = ("threads", "stock", "Stoker", "faster", "stock scales", "Stoker scales")
    return _table(heads, rows, 0)


def _allreduce(results: Results) -> str:
    rows = [
        (
            size_text(one.bytes),
            time_text(one.seconds["gloo"]),
            time_text(one.seconds["ccl"]),
            f"{one.faster:.1f}x" + _mark(one.disturbance.disturbs),
        )
        for one in results.allreduce
    ]
    return _table(("fp32", "gloo", "Stoker's ccl", "faster"), rows, 0)


def _marks(results: Results) -> list[str]:
    found = results.disturbed
    if not found:
        return []
    worst = max(max(one.others or 0.0, one.stolen or 0.0) for one in found)
    who = "other programs" if any((one.others or 0.0) >= (one.stolen or 0.0) for one in found) else "virtual machines"
    return [f"(!) Meanwhile {who} used up to {worst:.1f} CPUs. Repeat it on a quiet machine."]


def _times(value: float, pair: Pair) -> str:
    return f"{value:.2f}x" + _mark(pair.disturbance.disturbs)


def _mark(disturbed: bool) -> str:
    return " (!)" if disturbed else ""


def size_text(count: int) -> str:
    return f"{count / 1e6:.0f} MB" if count >= 1_000_000 else f"{count / 1000:.0f} KB"


def time_text(seconds: float) -> str:
    """Three digits: 12.3 s, 1.23 s, 123 ms, 12.3 ms, 123 us."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        value = seconds / scale
        if value >= 1.0 or unit == "us":
            digits = 2 if value < 10 else 1 if value < 100 else 0
            return f"{value:.{digits}f} {unit}"
    raise AssertionError


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """The first `left` columns are aligned left, the others right."""
    widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = [
        f":{'-' * (width - 1)}" if column < left else f"{'-' * (width - 1)}:" for column, width in enumerate(widths)
    ]
    return "\n".join([line(heads), f"| {' | '.join(rule)} |", *(line(row) for row in rows)])
