"""AdamW and Adam over all parameters in one native call (csrc/kernels/adamw.cpp), in place.

    step = step + 1
    AdamW:  p = p (1 - lr weight_decay)          Adam:  g = g + weight_decay p
    m = m + (1 - beta1) (g - m)
    v = beta2 v + (1 - beta2) g^2
    p = p - lr / (1 - beta1^step) m / (sqrt(v) / sqrt(1 - beta2^step) + eps)

g is -g first with `maximize`; the largest v so far is under the root with `amsgrad`. It is the arithmetic of torch's fused
implementation, so results are the same, bit for bit where both use the same instruction set. Parameters, gradients and state are
dense, fp32 or bf16, and on the CPU; model/native_adam.py takes care of that, and leaves all others to torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stoker.kernels import native
from stoker.kernels.tensors import TensorReader, identities

__all__ = ["AdamTensors"]

_STATE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step")


class AdamTensors:
    """The parameters of an optimizer and their state, whose addresses are read again for every update.

    `states`: for each parameter its tensors by torch's names, empty if it has none yet: it must not have a gradient then. Whoever
    makes it keeps all tensors alive.
    """

    def __init__(self, parameters: Sequence[Tensor], states: Sequence[dict[str, Tensor]]) -> None:
        self.identities = identities(parameters)
        self.count = count = len(parameters)
        dtypes = [native.dtype_code(parameter.dtype) for parameter in parameters]
        sizes = [parameter.numel() for parameter in parameters]
        state = [[identities([one[name]])[0] if name in one else 0 for one in states] for name in _STATE]
        self.gradients = TensorReader(self.identities, dtypes, sizes, gradients=True)
        self._without_state = [index for index, one in enumerate(states) if not one]
        self._memory = TensorReader(
            [*self.identities, *state[0], *state[1], *state[2], *state[3]],
            [*dtypes * 4, *[native.dtype_code(torch.float32)] * count],
            [*sizes * 4, *[1] * count],
        )
        fields = ("parameters", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "steps")
        first = ctypes.addressof(self._memory.addresses)
        self._call = native.struct("stoker_adamw_call")(
            **{field: first + 8 * count * number for number, field in enumerate(fields)},
            gradients=ctypes.addressof(self.gradients.addresses),
            sizes=ctypes.addressof(self._memory.sizes),
            dtypes=ctypes.addressof(self._memory.dtypes),
        )

    def read(self) -> bool:
        """Finds the memory of all tensors; False if one of them cannot be updated natively."""
        return self.gradients.read() and self._memory.read()

    def lacks_state(self) -> bool:
        """Whether a parameter without state has a gradient now; after `read`."""
        addresses = self.gradients.addresses
        return any(addresses[index] for index in self._without_state)

    def update(self, groups: Sequence[tuple[int, dict[str, Any]]]) -> None:
        """One update of everything that `read` has found. `groups`: how many parameters belong to each, and torch's options."""
        array = (native.struct("stoker_adamw_group") * len(groups))()
        begin = 0
        for own, (count, options) in zip(array, groups, strict=True):
            own.lr, own.eps, own.weight_decay = options["lr"], options["eps"], options["weight_decay"]
            own.beta1, own.beta2 = options["betas"]
            own.decoupled, own.amsgrad = options["decoupled_weight_decay"], options["amsgrad"]
            own.maximize = options["maximize"]
            own.begin, own.end = begin, begin + count
            begin += count
        self._call.groups, self._call.group_count = array, len(groups)
        self._call.threads = native.threads()
        native.call("stoker_adamw", self._call)
