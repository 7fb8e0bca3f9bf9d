"""Whether somebody inspects the operators of a call: then the stock model must run."""

from __future__ import annotations

import torch
import torch.fx
from torch.autograd import forward_ad

__all__ = ["stock_wanted"]


def stock_wanted() -> bool:
    """Whether this call is compiled, exported, traced or transformed, so that it must run stock operators.

    torch.compile and torch.export; torch.jit.trace, torch.fx and make_fx; torch.func and forward-mode derivatives; and
    everything that inspects single operators (FakeTensorMode, FlopCounterMode, any other TorchDispatchMode).
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or forward_ad._current_level >= 0
        or torch.jit.is_tracing()  # type: ignore[no-untyped-call]
        or torch.fx._symbolic_trace._is_fx_tracing_flag
    )
