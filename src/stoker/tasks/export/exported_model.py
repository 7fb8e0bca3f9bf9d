"""Models exported to ONNX or OpenVINO, behind the interface of a transformers model.

Pipelines, the Trainer's evaluation and sentence-transformers call them like the PyTorch model they come from. Rows of a batch
run in groups of similar length, so that little padding is computed: on a CPU, a large batch is no faster per token than several
small ones. The files are named as optimum names them.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, QuestionAnsweringModelOutput, SequenceClassifierOutput

from stoker.errors import UserError, first_line
from stoker.tasks.model_folder import EXPORT_FILES, exported_file

__all__ = ["ExportedModel", "Inputs", "import_openvino", "load_exported", "recorded_inputs"]

_BUCKET = 16
"""Rows whose lengths fall into the same multiple of this many tokens run together."""
_RECORDED = 64
_OUTPUTS = {"start_logits": QuestionAnsweringModelOutput, "logits": SequenceClassifierOutput}

Inputs = dict[str, Tensor]
Arrays = dict[str, NDArray[Any]]


class Runtime(Protocol):
    """A library that runs a file."""

    inputs: tuple[str, ...]
    per_token: dict[str, bool]
    """The names of the outputs, and whether each has a row for every token."""

    def run(self, arrays: Arrays) -> list[NDArray[Any]]: ...


class _OnnxRuntime:
    def __init__(self, file: Path) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        self.session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        self.inputs = tuple(one.name for one in self.session.get_inputs())
        outputs = self.session.get_outputs()
        # The second dimension of a row per token is the length of the row, which has a name instead of a number.
        self.per_token = {one.name: len(one.shape) > 1 and not isinstance(one.shape[1], int) for one in outputs}

    def run(self, arrays: Arrays) -> list[NDArray[Any]]:
        found: list[NDArray[Any]] = self.session.run(None, arrays)
        return found


def import_openvino() -> Any:
    """OpenVINO without the package by which it, and NNCF, would report their use to Intel; both work without it."""
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    return importlib.import_module("openvino")


class _OpenVino:
    def __init__(self, file: Path) -> None:
        openvino = import_openvino()
        settings = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "PERFORMANCE_HINT": "LATENCY",
                    "INFERENCE_PRECISION_HINT": "f32"}  # fmt: skip
        self.model = openvino.Core().compile_model(str(file), "CPU", settings)
        self.inputs = tuple(one.get_any_name() for one in self.model.inputs)
        self.per_token = {
            one.get_any_name(): len(one.partial_shape) > 1 and one.partial_shape[1].is_dynamic
            for one in self.model.outputs
        }

    def run(self, arrays: Arrays) -> list[NDArray[Any]]:
        found = self.model(arrays)
        return [np.array(found[number]) for number in range(len(self.per_token))]


_RUNTIMES: dict[str, tuple[type[Any], str, str]] = {
    "onnx": (_OnnxRuntime, "onnxruntime", "ONNX Runtime"),
    "openvino": (_OpenVino, "openvino", "OpenVINO"),
}


class ExportedModel(PreTrainedModel):  # type: ignore[misc]
    """Runs an exported file. It has no parameters, and cannot be trained."""

    main_input_name = "input_ids"
    _supports_sdpa = _supports_flash_attn = True  # whatever the configuration says: attention is part of the file

    def __init__(self, config: Any, runtime: Runtime) -> None:
        super().__init__(copy.deepcopy(config))
        self.runtime = runtime

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **unused: Any,
    ) -> Any:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        given = {"input_ids": input_ids, "attention_mask": mask, "token_type_ids": types}
        _record(given)
        arrays = {name: given[name].to(torch.int64).numpy() for name in self.runtime.inputs}
        found = {name: torch.from_numpy(one) for name, one in self._by_length(arrays, mask.numpy()).items()}
        kind = _OUTPUTS.get(next(iter(found)), BaseModelOutput)
        return kind(**found, **({} if labels is None else {"loss": _loss(found["logits"], labels)}))

    def _by_length(self, arrays: Arrays, mask: NDArray[Any]) -> Arrays:
        """The outputs of all rows. Positions of padding are zero in outputs per token."""
        rows, width = mask.shape
        groups = _groups(mask)
        whole: Arrays = {}
        for numbers, length in groups:
            found = self.runtime.run({name: one[numbers, :length] for name, one in arrays.items()})
            for (name, per_token), part in zip(self.runtime.per_token.items(), found, strict=True):
                if len(groups) == 1 and length == width:
                    whole[name] = part
                    continue
                shape = (rows, width, *part.shape[2:]) if per_token else (rows, *part.shape[1:])
                target = whole.setdefault(name, np.zeros(shape, part.dtype))
                if per_token:
                    target[numbers, :length] = part
                else:
                    target[numbers] = part
        return whole


def _groups(mask: NDArray[Any]) -> list[tuple[Any, int]]:
    """The numbers of the rows that run together, and the length to which they are cut; without padding at the end, all rows."""
    lengths = mask.sum(1)
    width = mask.shape[1]
    if not (mask == (np.arange(width) < lengths[:, None])).all():
        return [(slice(None), width)]
    by_length: dict[int, list[int]] = defaultdict(list)
    for number, length in enumerate(lengths.tolist()):
        by_length[-(-length // _BUCKET)].append(number)
    if len(by_length) == 1:
        return [(slice(None), max(int(lengths.max()), 1))]
    return [(numbers, max(int(lengths[numbers].max()), 1)) for numbers in by_length.values()]


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss that the Trainer logs beside the scores; numbers as labels are those of a regression."""
    if labels.is_floating_point():
        return torch.nn.functional.mse_loss(logits.squeeze(-1), labels)
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


_recorders: list[list[Inputs]] = []


@contextlib.contextmanager
def recorded_inputs() -> Iterator[list[Inputs]]:
    """A list that gets the inputs of the first batches of any exported model which runs meanwhile."""
    batches: list[Inputs] = []
    _recorders.append(batches)
    try:
        yield batches
    finally:
        _recorders.remove(batches)


def _record(given: Mapping[str, Tensor]) -> None:
    for batches in _recorders:
        if len(batches) < _RECORDED:
            batches.append({name: one.clone() for name, one in given.items()})


def load_exported(name: str | Path, config: Any) -> ExportedModel:
    """The exported model of a folder. Its class has the name of the PyTorch model's, which pipelines look at."""
    file = exported_file(name)
    assert file is not None
    kind = next(kind for kind, one in EXPORT_FILES.items() if one == file.name)
    runtime, package, what = _RUNTIMES[kind]
    try:
        made = runtime(file)
    except ImportError as error:
        if error.name != package:
            raise
        raise UserError(f"{file} needs {what}: pip install 'stoker[{kind}]'") from None
    except Exception as error:  # a damaged file raises all kinds of errors
        raise UserError(f"no model can be loaded from {file}: {first_line(error)}") from None
    if unknown := {*made.inputs} - {"input_ids", "attention_mask", "token_type_ids"}:
        raise UserError(f"{file} has inputs that are not supported: {', '.join(sorted(unknown))}")
    architecture = next(iter(config.architectures or ()), "ExportedModel")
    named: type[ExportedModel] = type(str(architecture), (ExportedModel,), {"__module__": __name__})
    model = named(config, made)
    model.eval()
    return model
