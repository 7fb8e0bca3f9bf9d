"""The head of TRL's trainers on CPUs: the probabilities of labelled tokens by the native kernel.

TRL computes per-token log-probabilities through a function of its own. Where no Triton is available that function scores
every position, prompts and padding included, and computes the logits once more in backward. `install` puts Stoker's operator
in its place, which scores labelled positions only. A call with other outputs or a temperature goes to TRL's own.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from stoker.kernels.frozen_parameter import stored_values
from stoker.requires import supported

__all__ = ["MODULE", "install"]

MODULE = "trl.trainer.utils"
_OUTPUTS = {"log_probs", "entropy", "is_top1"}


def install() -> None:
    """Replaces the head of TRL's trainers; to be called after `MODULE` has been imported."""
    trl_utils: Any = sys.modules[MODULE]
    if hasattr(trl_utils._ChunkedLogProbFunction, "stock") or not supported("TRL head"):
        return
    on_triton = trl_utils._use_triton
    trl_utils._ChunkedLogProbFunction = _head(trl_utils._ChunkedLogProbFunction)
    # what TRL asks before it leaves out the positions without a label
    trl_utils._use_triton = lambda device: device.type == "cpu" or on_triton(device)


def _head(trl: Any) -> Any:
    class Head:
        stock = trl

        @staticmethod
        def apply(
            hidden: Tensor,
            weight: Tensor,
            bias: Tensor | None,
            targets: Tensor,
            temperature: float,
            chunk_size: int,
            softcap: float | None = None,
            logit_scale: float = 1.0,
            outputs: tuple[str, ...] = (),
        ) -> tuple[Tensor | None, ...]:
            weight = stored_values(weight)
            native = all(t is None or _native(t) for t in (hidden, weight, bias))
            # Our entropy has no gradient. SFTTrainer, the one that asks for is_top1 too, detaches it.
            known = set(outputs) <= _OUTPUTS and ("entropy" not in outputs or "is_top1" in outputs)
            if not native or not known or temperature != 1.0 or logit_scale <= 0.0:
                return trl.apply(hidden, weight, bias, targets, temperature, chunk_size, softcap, logit_scale, outputs)  # type: ignore[no-any-return]
            return _log_probs(hidden, weight, bias, targets, softcap, logit_scale, outputs)

    return Head


def _log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    softcap: float | None,
    scale: float,
    outputs: tuple[str, ...],
) -> tuple[Tensor | None, ...]:
    from stoker.kernels.embedding import shares_gradient
    from stoker.kernels.loss import linear_log_probs

    if torch.is_autocast_enabled("cpu"):
        hidden = hidden.to(torch.get_autocast_dtype("cpu"))
    log_probs, entropy, top = linear_log_probs(hidden, weight, bias, targets, softcap=softcap, scale=scale)
    shares_gradient(log_probs, weight)
    return log_probs, entropy if "entropy" in outputs else None, None, None, top if "is_top1" in outputs else None


def _native(tensor: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.dtype in (torch.float32, torch.bfloat16)
    )
