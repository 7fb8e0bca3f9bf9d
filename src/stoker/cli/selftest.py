"""`stoker selftest`: checks that the native library loads, fits this CPU, shares torch's threads, and computes correctly."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from rich.console import Console
from rich.text import Text

from stoker.cli.parsing import Parser
from stoker.errors import one_line

__all__ = ["main"]


def main(argv: list[str]) -> int:
    Parser("selftest", "check that the native library works on this machine").parse_args(argv)
    console = Console(highlight=False, soft_wrap=True)
    checks: tuple[tuple[str, Callable[[], str]], ...] = (
        ("native library", _library),
        ("OpenMP threads", _openmp),
        ("dropout", _dropout),
    )
    for name, check in checks:
        try:
            console.print(Text.assemble(("ok    ", "bold green"), f"{name}: {check()}"))
        except Exception as error:  # later checks would fail for the same reason
            console.print(Text.assemble(("fails ", "bold red"), f"{name}: {one_line(error)}"))
            return 1
    return 0


def _require(condition: bool, finding: str) -> None:
    if not condition:
        raise RuntimeError(finding)


def _library() -> str:
    from stoker.kernels import native

    library = native.library()
    library.stoker_isa.restype = ctypes.c_char_p
    built_for = library.stoker_isa().decode()
    _require(built_for == native.level(), f"the {native.level()} library was built for {built_for}; reinstall Stoker")
    return f"{built_for} build, interface {native.header().digest[:8]} ({library._name})"


def _openmp() -> str:
    import torch

    from stoker.kernels import native
    from stoker.machine.software import loaded_openmp

    torch.ones(1 << 20).sum()  # starts torch's pool
    threads = native.threads()
    got = native.library().stoker_count_threads(threads)
    _require(
        got == threads,
        f"OpenMP started {got} of {threads} threads; check OMP_THREAD_LIMIT and ulimit -u",
    )
    pools = loaded_openmp()
    _require(
        len(pools) < 2,
        f"{len(pools)} OpenMP runtimes are loaded ({', '.join(pools)}); remove the LD_PRELOAD or the package that loads one",
    )
    return f"{threads} threads of {', '.join(pools) or 'an unknown OpenMP runtime'}"


def _dropout() -> str:
    import torch

    from stoker.kernels.dropout import dropout

    rate, rows, columns = 0.1, 512, 1024
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    try:
        masks = []
        for count in (1, threads):
            torch.set_num_threads(count)
            torch.manual_seed(7)
            x = torch.ones(rows, columns, requires_grad=True)
            y = dropout(x, rate)
            (gradient,) = torch.autograd.grad(y.sum(), x)
            _require(
                torch.equal(gradient, y.detach()),
                "the backward pass uses another mask; please report this",
            )
            masks.append(y.detach())
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(state)
    _require(torch.equal(*masks), f"1 and {threads} threads give different masks; please report this")
    dropped = (masks[0] == 0).float().mean().item()
    # Half a million samples at 0.1 have a standard deviation of 0.0004; five of them do not happen by chance.
    _require(abs(dropped - rate) < 0.0021, f"dropped {dropped:.4f} instead of {rate} of the values; please report this")
    return f"dropped {dropped:.4f} at a rate of {rate}; the same mask with 1 and {threads} threads and in the backward pass"
