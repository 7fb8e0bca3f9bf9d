"""Writes a model in OpenVINO's own format, by OpenVINO's converter; int8 by NNCF, OpenVINO's library for quantization.

optimum-intel, the usual way, needs an older transformers; the files have the names that it uses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stoker.errors import UserError, first_line
from stoker.tasks.export.exported_model import Inputs, import_openvino
from stoker.tasks.export.graph_module import Graph, silence
from stoker.tasks.model_folder import EXPORT_FILES

__all__ = ["write_openvino"]


def write_openvino(model: Any, rows: Inputs, folder: Path, *, int8: bool) -> None:
    """Writes openvino_model.xml and .bin for the inputs in `rows`, of any number and length."""
    openvino = import_openvino()
    graph = Graph(model, tuple(rows))
    try:
        with silence():
            converted = openvino.convert_model(graph, example_input=tuple(rows.values()))
            for port, name in zip(converted.inputs, rows, strict=True):
                port.get_tensor().set_names({name})
                port.get_node().set_partial_shape(openvino.PartialShape([-1, -1]))
            for port, name in zip(converted.outputs, graph.outputs(rows), strict=True):
                port.get_tensor().set_names({name})
            converted.validate_nodes_and_infer_types()
            if int8:
                converted = _compress(converted)
            openvino.save_model(converted, str(folder / EXPORT_FILES["openvino"]), compress_to_fp16=False)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # operators that OpenVINO does not know raise its own kinds
        raise UserError(
            f"{type(model).__name__} cannot be exported to OpenVINO: {first_line(error)}; use --to onnx or safetensors"
        ) from None


def _compress(converted: Any) -> Any:
    """Weights in int8, each row of a matrix with its own scale; needs no data, unlike quantized activations."""
    import nncf

    return nncf.compress_weights(converted, mode=nncf.CompressWeightsMode.INT8_SYM)
