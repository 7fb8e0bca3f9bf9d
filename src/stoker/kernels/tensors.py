"""Where the memory of many tensors, or of their gradients, lies: read by one native call (csrc/kernels/tensors.cpp).

For kernels that take all parameters of a model: asking each tensor from Python costs more than such a kernel's work. The native
code reads tensors by torch's stable C interface. Gradients are found by `c10::TensorImpl::grad`, and changes are counted for
autograd by `torch::autograd::impl::bump_version`, which are no public interface. So all functions are looked up by name, and used
only after a trial was right.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from array import array
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stoker.kernels import native
from stoker.requires import supported

__all__ = ["PLAIN", "TensorReader", "available", "identities"]

_LOG = logging.getLogger("stoker.kernels")

PLAIN = frozenset({Tensor, nn.Parameter})
"""The classes whose memory is what it seems to be; others may keep their numbers elsewhere."""

_FUNCTIONS = {
    "is_defined": "aoti_torch_is_defined",
    "layout": "aoti_torch_get_layout",
    "device_type": "aoti_torch_get_device_type",
    "dtype": "aoti_torch_get_dtype",
    "is_contiguous": "aoti_torch_is_contiguous",
    "numel": "aoti_torch_get_numel",
    "data_ptr": "aoti_torch_get_data_ptr",
}
_CODES = {
    "strided": "aoti_torch_layout_strided",
    "cpu": "aoti_torch_device_type_cpu",
    "float32": "aoti_torch_dtype_float32",
    "bfloat16": "aoti_torch_dtype_bfloat16",
}
_GRADIENT = "_ZNK3c1010TensorImpl4gradEv"
"""`c10::TensorImpl::grad() const`."""
_CHANGED = "_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE"
"""`torch::autograd::impl::bump_version(const at::Tensor&)`."""

_identity = attrgetter("_cdata")


def identities(tensors: Sequence[Tensor]) -> list[int]:
    """The address of each tensor's C++ object, valid as long as the tensor lives."""
    return list(map(_identity, tensors))


class TensorReader:
    """Reads the memory of a list of tensors, or of their gradients if `gradients`.

    `read` is False if any of them is not dense, on the CPU, of its type in `dtypes` (numbers of stoker_dtype; None: all are fp32)
    and, unless that is None, of its size in `expected`. An `identity` of 0 is a tensor that does not exist.
    """

    def __init__(
        self,
        identities: list[int],
        dtypes: Sequence[int] | None,
        expected: Sequence[int] | None = None,
        gradients: bool = False,
    ) -> None:
        count = len(identities)
        numbers = ctypes.c_int64 * count
        self.dtypes = (ctypes.c_int32 * count)(*dtypes or ())  # fp32 is 0
        self.addresses = numbers()
        """Where each begins; 0 for a tensor or a gradient that does not exist."""
        self.sizes = numbers()
        """How many elements each has; 0 if it does not exist."""
        # A fifth of the time of passing them as arguments, and clipping does it in every step.
        self._tensors = numbers.from_buffer(array("q", identities))
        self._expected = None if expected is None else numbers(*expected)
        self._functions = _functions()
        at = ctypes.addressof
        self._call = native.struct("stoker_read_call")(
            functions=ctypes.pointer(self._functions), tensors=at(self._tensors), dtypes=at(self.dtypes),
            expected=None if self._expected is None else at(self._expected), addresses=at(self.addresses),
            sizes=at(self.sizes), count=count, gradients=gradients,
        )  # fmt: skip

    def read(self) -> bool:
        native.call("stoker_read_tensors", self._call)
        return bool(self._call.unreadable < 0)

    def count_changes(self, gradients: bool) -> None:
        """Tells autograd that the tensors that `read` has found, or their gradients, were changed in place."""
        native.call("stoker_count_changes", self._call, gradients)

    @property
    def found(self) -> int:
        """How many of them exist, after `read`."""
        return int(self._call.found)


@functools.cache
def available() -> bool:
    """Whether the memory of tensors can be found this way with the installed torch."""
    if not supported("optimizers in one call"):
        return False
    try:
        right = _is_right()
    except (OSError, AttributeError) as error:
        _LOG.info("torch %s does not export what finds tensors by native code: %s", torch.__version__, error)
        return False
    if not right:
        _LOG.warning("a trial of finding tensors by native code failed: torch's own optimizers and clipping are used")
    return right


@functools.cache
def _functions() -> Any:
    folder = Path(torch.__file__).parent / "lib"
    torch_cpu, c10 = (ctypes.CDLL(str(folder / name)) for name in ("libtorch_cpu.so", "libc10.so"))
    found: dict[str, Any] = {field: torch_cpu[name] for field, name in _FUNCTIONS.items()}
    found |= {"grad": c10[_GRADIENT], "bump_version": torch_cpu[_CHANGED]}
    return native.struct("stoker_tensor_functions")(
        **{field: ctypes.cast(function, ctypes.c_void_p).value for field, function in found.items()},
        **{field: torch_cpu[name]() for field, name in _CODES.items()},
    )


def _is_right() -> bool:
    """A parameter with a gradient, and one without: are addresses and counts of changes those that torch tells?"""
    trained, idle = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 5))
    trained.grad = torch.ones(3)
    counts = [tensor._version for tensor in (trained, idle, trained.grad)]
    own = TensorReader(identities([trained, idle]), None)
    gradients = TensorReader(identities([trained, idle]), None, [3, 10], gradients=True)
    if not own.read() or not gradients.read():
        return False
    gradients.count_changes(gradients=False)
    gradients.count_changes(gradients=True)
    return (
        own.addresses[:] == [trained.data_ptr(), idle.data_ptr()]
        and own.sizes[:] == [3, 10]
        and gradients.addresses[:] == [trained.grad.data_ptr(), 0]
        and gradients.found == 1
        and [tensor._version for tensor in (trained, idle, trained.grad)] == [counts[0] + 1, counts[1], counts[2] + 1]
    )
