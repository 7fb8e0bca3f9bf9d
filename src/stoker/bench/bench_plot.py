"""The plot of `stoker bench`: how many times as fast steps are, host time, threads and allreduce, in the format of the suffix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stoker.bench.bench_results import Results, machine_lines
from stoker.bench.bench_table import size_text, time_text
from stoker.english import counted

__all__ = ["draw"]

_STOCK, _FP32, _BF16 = "#868e96", "#d9480f", "#f08c00"


def draw(results: Results, path: Path) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    panels = [
        panel
        for panel, found in (
            (_steps, results.measured_steps),
            (_host, results.host),
            (_threads, results.measured_sweep[1:]),  # one number of threads is no curve
            (_allreduce, results.allreduce),
        )
        if found
    ]
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "stoker", "font.size": 10}):
        rows = (len(panels) + 1) // 2
        figure = Figure(figsize=(10.5, 1.1 + 3.1 * rows), layout="constrained")
        axes = list(figure.subplots(rows, 1 if len(panels) == 1 else 2, squeeze=False).flat)
        for panel, axis in zip(panels, axes, strict=False):
            panel(results, axis)
            axis.spines[["top", "right"]].set_visible(False)
        for axis in axes[len(panels) :]:
            axis.set_visible(False)
        cpu, cores, _ = machine_lines(results.machine, results.versions)
        figure.suptitle(f"Stoker against stock transformers\n{cpu}\n{cores}", fontsize=10.5)
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def _steps(results: Results, axis: Any) -> None:
    pairs = results.measured_steps
    names = [f"{pair.title}, {pair.precision}" for pair in pairs]
    values = [pair.faster for pair in pairs]
    colours = [_BF16 if pair.precision == "bf16" else _FP32 for pair in pairs]
    bars = axis.barh(names, values, color=colours, height=0.62)
    labels = [f"{pair.faster:.1f}x  {time_text(pair.stoker.median)}" for pair in pairs]
    axis.bar_label(bars, labels, padding=4, fontsize=8)
    axis.axvline(1.0, color=_STOCK, linewidth=1, linestyle="--")
    axis.invert_yaxis()
    axis.set_xlim(0, max([1.0, *values]) * 1.32)
    axis.tick_params(axis="y", labelsize=8)
    threads = counted(pairs[0].threads, "thread")
    axis.set_title(f"Training step: times as fast as stock (dashed), {threads}", loc="left", fontsize=10)


def _host(results: Results, axis: Any) -> None:
    bars: list[tuple[str, float, str]] = []
    for one in results.host:
        for kind, seconds in sorted(one.medians.items(), key=lambda found: found[0].partition(" ")[2]):
            colour = _STOCK if kind.startswith("stock") else _BF16 if kind.endswith("bf16") else _FP32
            name = one.title.replace(", QA", "").replace(", LoRA", " LoRA")
            bars.append((f"{name}, {kind.replace('stoker', 'Stoker')}", 1e3 * seconds, colour))
    drawn = axis.barh(
        [name for name, _, _ in bars], [ms for _, ms, _ in bars], color=[c for _, _, c in bars], height=0.62
    )
    axis.bar_label(drawn, [f"{ms:.1f} ms" for _, ms, _ in bars], padding=4, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, max(ms for _, ms, _ in bars) * 1.2)
    axis.tick_params(axis="y", labelsize=8)
    axis.set_title("Host time of a step, one thread: shorter is better", loc="left", fontsize=10)


def _threads(results: Results, axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

    pairs = results.measured_sweep
    threads = [pair.threads for pair in pairs]
    for name, colour, seconds in (
        ("stock", _STOCK, [pair.stock.median for pair in pairs]),
        ("Stoker", _FP32, [pair.stoker.median for pair in pairs]),
    ):
        axis.plot(threads, seconds, marker="o", color=colour, label=name)
        for count, value in zip(threads, seconds, strict=True):
            axis.annotate(
                time_text(value),
                (count, value),
                (0, 6),
                textcoords="offset points",
                ha="center",
                fontsize=7,
                color=colour,
            )
        ideal = [seconds[0] * threads[0] / count for count in threads]
        axis.plot(threads, ideal, color=colour, linewidth=1, linestyle=":")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(threads)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(NullFormatter())  # between 1 and 10 seconds there may be no power of ten
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.tick_params(axis="y", which="both", length=0)
    axis.margins(x=0.12, y=0.15)
    axis.set_xlabel("threads (dotted: divided evenly)", fontsize=9)
    axis.legend(frameon=False, fontsize=9)
    axis.set_title(f"{pairs[0].title}, fp32: seconds per step", loc="left", fontsize=10)


def _allreduce(results: Results, axis: Any) -> None:
    found = results.allreduce
    bars = axis.barh([size_text(one.bytes) for one in found], [one.faster for one in found], color=_FP32, height=0.4)
    axis.bar_label(
        bars, [f"{one.faster:.1f}x  {time_text(one.seconds['ccl'])}" for one in found], padding=4, fontsize=8
    )
    axis.axvline(1.0, color=_STOCK, linewidth=1, linestyle="--")
    axis.invert_yaxis()
    axis.set_xlim(0, max([1.0, *(one.faster for one in found)]) * 1.35)
    axis.set_title(f"Allreduce, {found[0].ranks} ranks: times as fast as gloo (dashed)", loc="left", fontsize=10)
