"""`stoker selftest`: does the native library load, fit this CPU, share torch's threads, and compute what it should?"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from rich.console import Console
from rich.text import Text

from stoker.cli.parsing import Parser

__all__ = ["main"]


def main(argv: list[str]) -> int:
    Parser("selftest", "check that the native library works here").parse_args(argv)
    console = Console(highlight=False, soft_wrap=True)
    checks: tuple[tuple[str, Callable[[], str]], ...] = (
        ("native library", _library),
        ("one thread pool", _one_pool),
        ("dropout", _dropout),
    )
    for name, check in checks:
        try:
            console.print(Text.assemble(("ok    ", "bold green"), f"{name}: {check()}"))
        except Exception as error:  # whatever fails is the finding; later checks would only repeat it
            reason = str(error) or type(error).__name__
            console.print(Text.assemble(("fails ", "bold red"), f"{name}: {reason}"))
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
    _require(built_for == native.level(), f"the {native.level()} library says it was built for {built_for}")
    return f"{built_for} build, interface {native.header().digest[:8]} ({library._name})"


def _one_pool() -> str:
    import torch

    from stoker.kernels import native
    from stoker.machine.software import loaded_openmp

    torch.ones(1 << 20).sum()  # starts torch's pool
    threads = native.threads()
    got = native.library().stoker_count_threads(threads)
    _require(got == threads, f"asked OpenMP for {threads} threads and got {got}")
    pools = loaded_openmp()
    _require(len(pools) < 2, f"{len(pools)} OpenMP runtimes are loaded: {', '.join(pools)}")
    return f"{threads} threads of {', '.join(pools) or 'an OpenMP runtime that does not show itself'}"


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
            _require(torch.equal(gradient, y.detach()), "the gradient uses another mask")
            masks.append(y.detach())
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(state)
    _require(torch.equal(*masks), f"1 and {threads} threads give different masks")
    dropped = (masks[0] == 0).float().mean().item()
    # Half a million decisions at 0.1 have a standard deviation of 0.0004; five of them never happen by chance.
    _require(abs(dropped - rate) < 0.0021, f"dropped {dropped:.4f} where {rate} was asked")
    return f"dropped {dropped:.4f} of {rate} asked, same mask for 1 and {threads} threads and in backward"
