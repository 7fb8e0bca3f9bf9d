"""`stoker export`: writes a trained model as ONNX, OpenVINO, GGUF or safetensors, and compares it with the original."""

from __future__ import annotations

import sys

from rich.console import Console

from stoker.cli import parsing
from stoker.tasks.export.export_request import check_request, target_of
from stoker.user_files import require_existing

__all__ = ["main"]

_EXAMPLES = """formats:
  onnx          encoders, run by ONNX Runtime           pip install 'stoker[onnx]'
  openvino      encoders, run by OpenVINO               pip install 'stoker[openvino]'
  gguf          language models, run by llama.cpp       pip install 'stoker[gguf]'
  safetensors   a plain model of transformers, with a LoRA adapter merged into it

examples:
  stoker export out/mrpc --to onnx --int8                    writes out/mrpc/onnx-int8
  stoker use --model out/mrpc/onnx-int8 --text "One.\\tTwo."   stoker use, ask and chat load what was exported
  stoker export out/chat --to gguf --output_dir served

Scores are those of the run's validation file. Exit code 1: the export was written, but a score fell by more than 0.5 points
(1 point with --int8).
"""


def main(argv: list[str]) -> int:
    parser = parsing.Parser(
        "export", "write a trained model in a format to serve it from, and compare score, size and latency",
        examples=_EXAMPLES,
    )  # fmt: skip
    parser.add_argument("model", type=parsing.path, metavar="RUN_OR_MODEL", help="a run's --output_dir, or a model")
    parser.add_argument("--to", required=True, choices=("onnx", "openvino", "gguf", "safetensors"), help="the format")
    parser.add_argument("--int8", action="store_true", help="weights in 8 bits: smaller, and with onnx faster")
    parser.add_argument(
        "--output_dir",
        "--output-dir",
        type=parsing.path,
        metavar="DIR",
        help="where to write (RUN/onnx, RUN/onnx-int8, ...)",
    )
    parser.add_argument(
        "--validation_file",
        "--validation-file",
        type=parsing.path,
        metavar="FILE",
        help="data to evaluate on (the run's own)",
    )
    options = parser.parse_args(argv)
    parsing.require_installed("stoker export", ["transformers"], parsing.TRANSFORMERS, extra="hf")
    target = target_of(options.model, options.to, options.int8, options.output_dir)
    check_request(options.model, options.to, options.int8, target)
    if options.validation_file is not None:
        require_existing(options.validation_file, "data file")
    parsing.announce(f"loading {options.model} ...")
    parsing.require_transformers("stoker export", extra="hf")
    from stoker.tasks.loading import quiet

    quiet()
    from stoker.tasks.export.export_run import export

    messages = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    found = export(options.model, options.to, options.int8, target, options.validation_file, messages.print)
    console = Console(highlight=False, markup=False, soft_wrap=not sys.stdout.isatty())
    console.print(found.table())
    if found.rows:
        console.print(found.rows, style="dim")
    console.print(f"written to {target}")
    if found.fallen > found.limit:
        messages.print(
            f"stoker: a score fell by {found.fallen:.2f} points, more than the {found.limit:g} that this format may cost; use "
            + (f"--to {options.to} without --int8" if found.int8 else "--to safetensors")
        )
        return 1
    return 0
