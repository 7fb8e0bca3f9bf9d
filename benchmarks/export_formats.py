"""What `stoker export` brings: scores, size and latency of a model that was really trained, before and after.

    python benchmarks/export_formats.py --out build/exports                              trains once, exports in each format
    python benchmarks/export_formats.py --out build/exports --case embed --format onnx-int8

Case `embed` is all-MiniLM-L6-v2 as it is, scored by STS-B's dev set; case `classify` is the same model trained on MRPC.

The figures are those that the command itself prints and writes into export.json: scores on the dev set, the latency of the row of
median length and of 32 rows, against the same model in PyTorch, fp32, without Stoker, both in turn with the same threads.
Exits 1 if a bar is missed: scores within 0.5 points (int8: 1), int8 by ONNX Runtime at least twice as fast.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from bars import cpu_name
from minilm import pretrained

CASES = ("embed", "classify")
TRAINING = [
    "--do_train",
    "--do_eval",
    "--num_train_epochs",
    "3",
    "--learning_rate",
    "1e-4",
    "--per_device_train_batch_size",
    "16",
]
FORMATS = ("onnx", "onnx-int8", "openvino", "openvino-int8")
FASTER = 2.0
"""What int8 by ONNX Runtime must reach; int8 of OpenVINO is for smaller files."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parents[2] / "shared" / "data")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--format", action="append", choices=FORMATS)
    chosen = parser.parse_args()
    print(f"{cpu_name()}\n")
    reached = True
    for case in chosen.case or CASES:
        model, validation = (embedding_model if case == "embed" else classifier)(chosen.data, chosen.out)
        for kind in chosen.format or FORMATS:
            reached &= compare(case, model, validation, chosen.out / case / kind, kind)
    return 0 if reached else 1


def embedding_model(data: Path, out: Path) -> tuple[str, Path]:
    """The pretrained model, and STS-B's dev set with a header."""
    out.mkdir(parents=True, exist_ok=True)
    validation = out / "stsb-dev.csv"
    rows = (data / "similarity" / "stsb-en-dev.csv").read_text()
    validation.write_text(f"sentence1,sentence2,score\n{rows}")
    return pretrained(), validation


def classifier(data: Path, out: Path) -> tuple[str, Path]:
    """Trained when it is first asked for."""
    run, validation = out / "mrpc", data / "mrpc" / "dev.tsv"
    if not (run / "eval_results.json").exists():
        files = ["--train_file", str(data / "mrpc" / "train.tsv"), "--validation_file", str(validation)]
        stoker("train", "classify", "--model_name_or_path", pretrained(), *files, *TRAINING, "--output_dir", str(run),
               "--save_strategy", "no", "--report_to", "none")  # fmt: skip
    return str(run), validation


def compare(case: str, model: str, validation: Path, target: Path, kind: str) -> bool:
    """Exports a model, prints a line of the table in the documentation, and says whether all bars are reached."""
    to, _, int8 = kind.partition("-")
    stoker("export", model, "--to", to, *(["--int8"] if int8 else []), "--validation_file", str(validation),
           "--output_dir", str(target))  # fmt: skip
    found = json.loads((target / "export.json").read_text())["comparison"]
    before, after = found["before"], found["after"]
    fallen = max(value - after["scores"][name] for name, value in before["scores"].items())
    ratios = {name: before[name] / after[name] for name in ("one_row", "batch")}
    scores = ", ".join(f"{name} {value:.2f} -> {after['scores'][name]:.2f}" for name, value in before["scores"].items())
    times = ", ".join(
        f"{name} {1000 * before[name]:.1f} -> {1000 * after[name]:.1f} ms ({ratio:.2f}x)"
        for name, ratio in ratios.items()
    )
    sizes = f"{before['size'] / 1e6:.0f} -> {after['size'] / 1e6:.0f} MB"
    print(f"{case:9} {kind:14} {scores}; {sizes}; {times}", flush=True)
    reached = fallen <= (1.0 if int8 else 0.5) and (kind != "onnx-int8" or min(ratios.values()) >= FASTER)
    if not reached:
        print(f"{'':9} {'':14} a bar is MISSED", flush=True)
    return reached


def stoker(*words: str) -> None:
    command = [sys.executable, "-m", "stoker", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode not in ((0, 1) if words[0] == "export" else (0,)):  # 1: a score fell, which is reported here
        raise SystemExit(f"stoker {' '.join(words)} ends with exit code {done.returncode}:\n{done.stdout[-3000:]}")


if __name__ == "__main__":
    sys.exit(main())
