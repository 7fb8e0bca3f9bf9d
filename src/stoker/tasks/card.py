"""The model card (README.md) of a trained model: base model, data, scores, settings, and how to use it without Stoker."""

from __future__ import annotations

import json
import os
import platform
import shlex
from typing import Any

import torch
import transformers

from stoker import __version__
from stoker.run_report.log import Run

__all__ = ["model_card"]

_PIPELINES = {
    "qa": "question-answering", "classify": "text-classification", "sft": "text-generation", "ner": "token-classification",
    "mlm": "fill-mask", "embed": "sentence-similarity", "rerank": "text-ranking", "fewshot": "text-classification",
}  # fmt: skip
_LIBRARIES = dict.fromkeys(("embed", "rerank", "fewshot"), "sentence-transformers")
"""Libraries that load the models of a task; transformers does, unless it is listed."""
_TAGS = {
    "embed": ["sentence-transformers", "feature-extraction"],
    "rerank": ["sentence-transformers", "cross-encoder", "reranker"],
    "fewshot": ["setfit", "sentence-transformers"],
}
_USES = {
    "qa": """import torch
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{path}")
model = AutoModelForQuestionAnswering.from_pretrained("{path}").eval()
inputs = tokenizer("Who wrote it?", "The letter was written by Ada.", return_tensors="pt")
with torch.no_grad():
    output = model(**inputs)
first, last = output.start_logits.argmax(), output.end_logits.argmax()
print(tokenizer.decode(inputs["input_ids"][0, first : last + 1]))""",
    "classify": """import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{path}")
model = AutoModelForSequenceClassification.from_pretrained("{path}").eval()
inputs = tokenizer("One sentence.", return_tensors="pt")  # give two texts for a model of pairs
with torch.no_grad():
    print(model.config.id2label[int(model(**inputs).logits.argmax())])""",
    "embed": """from sentence_transformers import SentenceTransformer

model = SentenceTransformer("{path}")
queries = model.encode_query(["Who wrote the letter?"])
documents = model.encode_document(["Ada wrote it in 1843.", "The mill burned down."])
print(model.similarity(queries, documents))""",
    "fewshot": """import json
from pathlib import Path

from safetensors.numpy import load_file
from sentence_transformers import SentenceTransformer

folder = Path("{path}")
model, head = SentenceTransformer(str(folder)), load_file(folder / "model_head.safetensors")
labels = json.loads((folder / "config_setfit.json").read_text())["labels"]
scores = model.encode(["One sentence."]) @ head["weight"].T + head["bias"]
print(labels[scores[0].argmax()])""",
    "ner": """from transformers import pipeline

find = pipeline("ner", model="{path}", aggregation_strategy="first", device="cpu")
for entity in find("Ada Lovelace wrote to Charles Babbage from London."):
    print(entity["word"], entity["entity_group"], round(float(entity["score"]), 3))""",
    "mlm": """from transformers import pipeline

fill = pipeline("fill-mask", model="{path}", device="cpu")
for guess in fill(f"The letter was written in {fill.tokenizer.mask_token}."):
    print(guess["token_str"], round(float(guess["score"]), 3))""",
    "rerank": """from sentence_transformers import CrossEncoder

model = CrossEncoder("{path}")
print(model.predict([("Who wrote the letter?", "Ada wrote it in 1843."), ("Who wrote the letter?", "The mill burned down.")]))""",
}
_LANGUAGE_MODEL = """import torch
from transformers import AutoTokenizer
{imports}

tokenizer = AutoTokenizer.from_pretrained("{path}")
model = {load}.eval()
{inputs}
with torch.no_grad():
    output = model.generate(**inputs, max_new_tokens=100)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))"""
_CHAT = """messages = [{"role": "user", "content": "Who wrote the letter?"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")"""
_CONTINUED_TEXT = 'inputs = tokenizer("The letter was written by", return_tensors="pt")'
_NUMBER = "    print(float(model(**inputs).logits))"
_CLASS_OF_PAIR = """scores = model.predict([("Ada wrote it in 1843.", "Nobody has written it.")])
print(model.config.id2label[int(scores[0].argmax())])"""
_OTHER_SCHEME = """The tags are {scheme}, of which the pipeline joins only B- and I-: it returns the last word of an entity
by itself. `stoker use --model {path}` returns whole entities."""
_SETTINGS_SHOWN = (
    "learning_rate", "per_device_train_batch_size", "gradient_accumulation_steps", "tokens_per_batch", "num_train_epochs",
    "max_steps", "seed", "lr_scheduler_type", "warmup_steps", "weight_decay", "optim", "bf16",
)  # fmt: skip


def model_card(job: Any, trainer: Any, metrics: dict[str, Any], run: Run) -> str:
    """Markdown with the front matter that the hub reads."""
    base = job.model.model_name_or_path
    data = job.data.dataset_name or getattr(job.data, "task_name", None) or job.data.train_file
    data = ", ".join(data) if isinstance(data, list) else data
    figures = {k.removeprefix("eval_"): v for k, v in metrics.items() if k.startswith("eval_") and _is_score(k, v)}
    front = {
        "library_name": "peft" if _is_adapter(trainer) else _LIBRARIES.get(job.task, "transformers"),
        "pipeline_tag": _pipeline(job, trainer),
        # The hub accepts only names of hub models here, and rejects a card with a local folder.
        **({} if os.path.exists(base) else {"base_model": str(base)}),
        **({"datasets": [job.data.dataset_name]} if job.task == "sft" and job.data.dataset_name else {}),
        "tags": [*_TAGS.get(job.task, ()), "stoker", "generated_from_trainer"],
    }
    header = "\n".join(f"{key}: {json.dumps(value)}" for key, value in front.items())
    table = "\n".join(f"| {name} | {float(value):.4g} |" for name, value in figures.items())
    shown = [name for name in _SETTINGS_SHOWN if _is_set(job.args, name)]
    settings = "\n".join(f"- {name}: {_plain(getattr(job.args, name))}" for name in shown)
    if stored := getattr(job.data, "frozen_weights", None):
        settings += f"\n- frozen_weights: {stored}, the form in which the weights of the base model were stored"
    if drawn := getattr(job.data, "examples_per_class", None):
        settings += f"\n- examples_per_class: {drawn}, drawn from the training data with the seed"
    trained = run.others.get("trained", {})
    seconds = trained.get("train_runtime")
    spent = (
        f"\nTraining took {float(seconds):,.0f} s on {run.start.get('machine', {}).get('cpu')}.\n" if seconds else ""
    )
    results = f"## Evaluation\n\n| metric | value |\n|---|---|\n{table}\n" if table else ""
    return f"""---
{header}
---

# {_model_name(trainer)} fine-tuned from {base}

Fine-tuned for {_pipeline(job, trainer)} on {data} by Stoker, on a CPU. {_needs(job, trainer)}

{results}
## Use

{_use(job, trainer)}

## Training

```
{run.start.get("command", "")}
```
{spent}
{settings}

Versions: stoker {__version__}, transformers {transformers.__version__}, torch {torch.__version__}, Python
{platform.python_version()}. `report.html` beside this file shows the run.
"""


def _pipeline(job: Any, trainer: Any) -> str:
    return "text-classification" if _classifies_pairs(job, trainer) else _PIPELINES[job.task]


def _classifies_pairs(job: Any, trainer: Any) -> bool:
    """Whether it is a cross-encoder that predicts a class instead of a score."""
    return bool(job.task == "rerank" and trainer.model.config.num_labels > 1)


def _is_adapter(trainer: Any) -> bool:
    return hasattr(trainer.model, "peft_config")


def _model_name(trainer: Any) -> str:
    model = trainer.model.get_base_model() if _is_adapter(trainer) else trainer.model
    return type(model).__name__


def _use(job: Any, trainer: Any) -> str:
    """A block of code."""
    path = trainer.hub_model_id if job.args.push_to_hub else job.args.output_dir
    if job.task == "sft":
        return _use_of_language_model(trainer, str(path), merged=job.data.merge)
    use = _USES[job.task]
    if job.task == "fewshot" and job.args.push_to_hub:
        use = use.replace('Path("{path}")', 'Path(snapshot_download("{path}"))')
        use = use.replace("from safetensors", "from huggingface_hub import snapshot_download\nfrom safetensors")
    lines = use.replace("{path}", str(path)).splitlines()
    if job.task == "classify" and trainer.model.config.problem_type == "regression":
        lines[-1] = _NUMBER
    if _classifies_pairs(job, trainer):
        lines[-1:] = _CLASS_OF_PAIR.splitlines()
    code = _python("\n".join(lines))
    if job.task == "ner" and trainer.labels.scheme.name != "IOB2":
        return f"{code}\n\n{_OTHER_SCHEME.format(scheme=trainer.labels.scheme.name, path=path)}"
    return code


def _python(code: str) -> str:
    return f"```python\n{code}\n```"


def _use_of_language_model(trainer: Any, path: str, *, merged: bool) -> str:
    adapter = _is_adapter(trainer)
    if adapter and _is_gguf(trainer):
        if not merged:
            return f"```\nstoker chat --model {shlex.quote(path)}\n```"
        path, adapter = f"{path}/merged", False
    imports = (
        "from peft import AutoPeftModelForCausalLM" if adapter else "from transformers import AutoModelForCausalLM"
    )
    load = f'{imports.rpartition(" ")[2]}.from_pretrained("{path}")'
    inputs = _CHAT if trainer.processing_class.chat_template else _CONTINUED_TEXT
    return _python(_LANGUAGE_MODEL.format(path=path, imports=imports, load=load, inputs=inputs))


def _is_gguf(trainer: Any) -> bool:
    return str(trainer.model.config.name_or_path).endswith(".gguf")


def _needs(job: Any, trainer: Any) -> str:
    """What it takes to use the result."""
    if not _is_adapter(trainer):
        return f"It is an ordinary\n{_LIBRARIES.get(job.task, 'transformers')} model: Stoker is not needed to use it."
    if _is_gguf(trainer):
        return (
            "It is a LoRA adapter\nof a GGUF file, which `stoker chat` loads; PEFT does not. `stoker train sft --merge` writes a "
            "whole model\nthat needs neither."
        )
    return "It is an ordinary\nLoRA adapter for PEFT: Stoker is not needed to use it."


def _is_score(name: str, value: Any) -> bool:
    skipped = ("runtime", "per_second", "samples", "total")
    return isinstance(value, int | float) and not any(word in name for word in skipped)


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)


def _is_set(args: Any, name: str) -> bool:
    if name == "num_train_epochs" and args.max_steps > 0:  # max_steps overrides it
        return False
    value = getattr(args, name, None)
    return value not in (None, -1, False, 0, 0.0) or name == "seed"
