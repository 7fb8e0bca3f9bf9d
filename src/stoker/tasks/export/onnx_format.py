"""Writes a model as ONNX, by torch.onnx, and in int8, by ONNX Runtime's dynamic quantization.

optimum-onnx, the usual way, does not accept transformers 5; the files have the names that it uses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stoker.errors import UserError, first_line
from stoker.tasks.export.exported_model import Inputs
from stoker.tasks.export.graph_module import Graph, silence
from stoker.tasks.model_folder import EXPORT_FILES

__all__ = ["write_onnx"]

_OPSET = 23
"""The first with an operator for attention, which ONNX Runtime computes in one pass."""


def write_onnx(model: Any, rows: Inputs, folder: Path, *, int8: bool) -> None:
    """Writes model.onnx for the inputs in `rows`, of any number and length."""
    file = folder / EXPORT_FILES["onnx"]
    _write(model, rows, file)
    if int8:
        _quantize(file)


def _write(model: Any, rows: Inputs, file: Path) -> None:
    import torch

    graph = Graph(model, tuple(rows))
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")}
    try:
        with torch.no_grad(), silence():
            program = torch.onnx.export(
                graph, tuple(rows.values()), dynamo=True, verbose=False, opset_version=_OPSET, input_names=list(rows),
                output_names=graph.outputs(rows), dynamic_shapes=(tuple(sizes for _ in rows),),
            )  # fmt: skip
            assert program is not None  # it is None only for the old exporter
            program.save(str(file), external_data=False)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # torch raises its own kinds for models that it cannot trace
        raise UserError(
            f"{type(model).__name__} cannot be exported to ONNX: {first_line(error)}; use --to safetensors"
        ) from None


def _quantize(file: Path) -> None:
    """Weights of linear layers and embeddings in int8, in place; activations are quantized while the model runs.

    Weights of products have 7 bits, because CPUs without VNNI add pairs of products in 16 bits, which 8 bits would overflow. So
    results are the same on all CPUs. Embeddings are only looked up and have 8. The head stays in fp32.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with silence():
        graph = onnx.load(str(file))
        del graph.graph.value_info[:]  # shapes that torch.onnx wrote, which would contradict those of quantized weights
        onnx.save(graph, str(file))
        head = [node.name for node in graph.graph.node if {*node.output} & {one.name for one in graph.graph.output}]
        for kinds, narrow in ((["MatMul"], True), (["Gather"], False)):
            quantize_dynamic(
                str(file), str(file), op_types_to_quantize=kinds, per_channel=narrow, reduce_range=narrow,
                weight_type=QuantType.QInt8, nodes_to_exclude=head,
            )  # fmt: skip
