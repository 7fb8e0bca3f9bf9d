"""Command lines: every command with valid and unknown options, and with values of the wrong kind."""

from __future__ import annotations

import functools
import importlib
import random
from pathlib import Path

from attack import odd
from attack.case import Case

__all__ = ["GOOD_FILES", "TASKS", "any_command", "flat", "good_training", "launch", "rank_variables", "train"]

_SIMPLE = {
    "doctor": ["--json", "--fresh", "--root"],
    "selftest": [],
    "demo": ["--output_dir", "--seconds", "--questions", "--seed", "--model", "--no-compare", "--sft"],
    "ask": ["--model", "--text", "--file", "--question", "--no-answer", "--max-seq-length", "--json"],
    "chat": ["--model", "--prompt", "--system", "--max_new_tokens", "--temperature"],
    "export": ["--to", "--int8", "--output_dir", "--validation_file"],
    "report": ["--output"],
    "watch": ["--port", "--host", "--process"],
    "runs": ["--by", "--json", "--html"],
    "config": ["show", "check", "migrate", "--yes", "--config_file", "--num_processes", "--mixed_precision", "default"],
    "plan": ["--nodes", "--network", "--latency", "--model", "--task", "--batch", "--length", "--rows", "--price", "--processes",
             "--step", "--parameters", "--out", "--json", "--fresh", "--lora_r", "--full", "--labelled", "--cores", "--gflops",
             "--bandwidth"],
    "env": [],
    "help": [],
    "train": ["qa", "classify", "fewshot", "ner", "mlm", "embed", "rerank", "sft", "--help", "--help-all"],
}  # fmt: skip
TASKS = ("qa", "classify", "fewshot", "ner", "mlm", "embed", "rerank", "sft")
GOOD_FILES = ("llm", "train.json", "dev.json", "train.tsv", "dev.tsv", "train.jsonl", "dev.jsonl", "train.conll", "dev.conll",
              "train.txt", "train.pairs.jsonl", "dev.pairs.jsonl")  # fmt: skip
_PLAUSIBLE = ["1", "2", "3", "0.5", "bf16", "auto", "no", "yes", "true", "10gbit", "1..4", "1,2", "model", "run", "s.py", "new",
              "qa", "none", "steps", "epoch", "train.json", "localhost", "127.0.0.1:29500",
              "0,1", "OMP_NUM_THREADS=1"]  # fmt: skip
_WRITES = ("new", "new.yaml", "out", "report.html", "run")

# These start as many threads or processes as requested, which would disturb a shared machine.
_COUNTS = ("--dataloader_num_workers", "--preprocessing_num_workers", "--torch_compile", "--torch_compile_backend",
           "--torch_compile_mode")  # fmt: skip
# These contact other services, or wait for a debugger.
_ELSEWHERE = (
    "--push_to_hub",
    "--hub_model_id",
    "--dataset_name",
    "--task_name",
    "--debug",
    "--deepspeed",
    "--use_mps_device",
)


def _files(base: Path) -> dict[str, bytes]:
    return {"s.py": b"", "hosts": b"localhost slots=2\n", "t.txt": b"Ada wrote the letter.\n", "empty": b""}


def _links(base: Path) -> dict[str, str]:
    return {"loop": "loop", "zero.json": "/dev/zero", **{name: str(base / name) for name in ("model", *GOOD_FILES)}}


def _value(r: random.Random) -> str:
    return r.choice(_PLAUSIBLE) if r.random() < 0.4 else odd.word(r)


def any_command(r: random.Random, base: Path) -> Case:
    """A command with some of its options, in any order."""
    command = r.choice([*_SIMPLE, odd.word(r)])
    known = _SIMPLE.get(command, ["--help"])
    argv = [command]
    for _ in range(r.choice((0, 1, 2, 3, 5))):
        argv += [r.choice(known)] if known and r.random() < 0.8 else [odd.word(r)]
        if r.random() < 0.7:
            argv += [_value(r)]
    if command == "doctor":
        argv.append("--no-rates")
    elif command == "plan" and r.random() < 0.8:
        argv += ["--step", _value(r), "--parameters", _value(r)]
    elif command == "ask" and r.random() < 0.8:
        argv += ["--model", "model", r.choice(("--text", "--file")), r.choice((_value(r), "t.txt", "zero.json", "-"))]
    elif command == "chat":
        argv += ["--model", "llm", "--max_new_tokens", "3"] if r.random() < 0.8 else []
    elif command in ("report", "runs"):
        argv.insert(1, r.choice((_value(r), "run")))
    elif command == "watch":
        argv += ["run", "--process", "0"]  # refused last, so that nothing is served
    elif command == "export":
        argv.insert(1, r.choice((_value(r), "run", "llm")))
        argv += ["--to", r.choice(("gguf", "safetensors"))] if r.random() < 0.6 else []
        argv += ["--output_dir", "new"]  # the models are shared by all cases
    elif command == "config" and not {"show", "check", "migrate"} & set(argv):
        argv += ["--config_file", "new.yaml"]
    stdin = odd.value(r).encode("utf-8", "surrogatepass")
    codes = (0, 1, 2) if command in ("config", "selftest") else (0, 2)
    # The user chooses where to write, so any name that does not exist may be created.
    writes = ("*",) if command in ("plan", "report", "runs", "config", "demo", "export") else _WRITES
    return Case(argv, _files(base), _links(base), stdin, writes=writes, codes=codes)


@functools.cache
def _launch_options() -> tuple[tuple[str, bool], ...]:
    from stoker.cli.launch import build_parser

    actions = build_parser()._option_string_actions
    return tuple((name, action.nargs != 0) for name, action in actions.items() if name not in ("-h", "--help"))


def launch(r: random.Random, base: Path) -> Case:
    argv = ["launch"]
    for _ in range(r.choice((0, 1, 2, 3, 6))):
        name, takes = r.choice(_launch_options())
        if r.random() < 0.05:
            name, takes = odd.word(r), r.random() < 0.5
        argv += [f"{name}={_value(r)}"] if takes and r.random() < 0.2 else [name, _value(r)] if takes else [name]
    if r.random() < 0.2:
        argv += ["--emit", r.choice(("slurm", "kubernetes", "trainjob", "pytorchjob", "mpijob")), "--emit_image", "x"]
    if r.random() < 0.8:
        argv.append("--dry-run")
    argv += r.choice(
        (["s.py"], ["s.py", "a", ":", "-n", "1", "touch", "pwned"], [odd.word(r)], [], ["-m", odd.word(r)])
    )
    return Case(argv, _files(base), _links(base), writes=_WRITES)


_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "PMI_FD", "MPI_LOCALRANKID",
              "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
              "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID",
              "SLURM_STEP_TASKS_PER_NODE", "SLURM_JOB_ID", "SLURM_STEP_NODELIST", "TORCHELASTIC_RUN_ID", "MASTER_ADDR",
              "MASTER_PORT", "OMP_NUM_THREADS", "KMP_AFFINITY", "GOMP_CPU_AFFINITY", "COLUMNS", "TERM", "LD_PRELOAD_",
              "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "HF_HOME", "STOKER_CACHE_DIR", "STOKER_ISA", "STOKER_LAUNCH_SILENCE",
              "STOKER_LINEAR_ENGINE", "STOKER_LOCAL_SGD", "STOKER_GRADIENT_COMPRESSION", "ACCELERATE_MIXED_PRECISION", "PATH",
              "HOME", "TMPDIR", "NO_COLOR", "SLURM_CPUS_ON_NODE", "SLURM_CPU_BIND_LIST", "SLURM_RESTART_COUNT", "STOKER_RUN_ID",
              "PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE", "PET_MASTER_ADDR", "PET_MASTER_PORT", "PET_RDZV_ENDPOINT",
              "PET_MAX_RESTARTS", "STOKER_SECRET")  # fmt: skip


def rank_variables(r: random.Random, base: Path) -> Case:
    """Environment variables that launchers, batch systems and users leave set."""
    chosen = r.sample(_VARIABLES, r.choice((1, 1, 2, 4, 8)))
    variables: dict[str, str | None] = {name: _value(r).replace("\0", "") for name in chosen}
    argv = r.choice((["launch", "--dry-run", "s.py"], ["launch", "-n", "2", "--dry-run", "s.py"],
                     ["launch", "--rdzv_timeout", "1", "s.py"], ["doctor", "--no-rates"], ["doctor", "--no-rates", "--json"],
                     ["env"], ["config", "show"], ["config", "--yes", "--config_file", "new.yaml"], ["--version"]))  # fmt: skip
    return Case(argv, _files(base), variables=variables, writes=("*",), codes=(0, 2))


@functools.cache
def _train_options(task: str) -> tuple[tuple[str, bool], ...]:
    from stoker.tasks.option_parser import OptionParser

    module = importlib.import_module(f"stoker.tasks.{task}.fine_tune")
    options = getattr(module, f"{task.capitalize()}Options")
    arguments = {"arguments": module.arguments_of([])} if hasattr(module, "arguments_of") else {}
    actions = OptionParser(f"train {task}", options, **arguments)._option_string_actions
    return tuple(
        (name, action.nargs != 0)
        for name, action in actions.items()
        if name.startswith("--") and name.replace("-", "_").replace("__", "--", 1) not in _COUNTS + _ELSEWHERE
    )


def good_training(task: str) -> list[list[str]]:
    """The options of a small training run that works, each with its value."""
    if task == "sft":
        return [
            ["--model_name_or_path", "llm"], ["--train_file", "train.jsonl"], ["--validation_file", "dev.jsonl"],
            ["--output_dir", "out"], ["--max_steps", "2"], ["--max_length", "96"], ["--per_device_train_batch_size", "4"],
            ["--report_to", "none"], ["--samples", "0"],
        ]  # fmt: skip
    if task in ("embed", "rerank", "fewshot"):
        data = "tsv" if task == "fewshot" else "pairs.jsonl"
        return [
            ["--model_name_or_path", "model"], ["--train_file", f"train.{data}"], ["--validation_file", f"dev.{data}"],
            ["--output_dir", "out"], ["--max_steps", "2"], ["--max_seq_length", "48"],
            ["--per_device_train_batch_size", "4"], ["--report_to", "none"], ["--samples", "0"],
        ]  # fmt: skip
    suffix = {"qa": "json", "classify": "tsv", "ner": "conll", "mlm": "txt"}[task]
    dev = [["--validation_file", f"dev.{suffix}"]] if task != "mlm" else [["--validation_split_percentage", "20"]]
    return [
        ["--model_name_or_path", "model"], ["--train_file", f"train.{suffix}"], *dev,
        ["--do_train"], ["--do_eval"], ["--output_dir", "out"], ["--max_steps", "2"], ["--max_seq_length", "48"],
        ["--per_device_train_batch_size", "4"], ["--report_to", "none"],
    ] + [["--doc_stride", "8"]] * (task in ("qa", "ner"))  # fmt: skip


def flat(options: list[list[str]]) -> list[str]:
    return [word for option in options for word in option]


def train(r: random.Random, base: Path) -> Case:
    """A valid training command with an option removed, one added, or a wrong value."""
    task = r.choice(TASKS)
    options = good_training(task)
    for _ in range(r.choice((1, 1, 2, 3))):
        kind = r.random()
        if kind < 0.15:
            options.pop(r.randrange(len(options)))
        elif kind < 0.35:
            options.append([r.choice(options)[0], _value(r)])
        else:
            name, takes = r.choice(_train_options(task))
            options.append([name, _value(r)] if takes or r.random() < 0.2 else [name])
    if r.random() < 0.1:
        options.insert(0, [odd.word(r)])
    r.shuffle(options)
    return Case(["train", task, *flat(options)], _files(base), _links(base), writes=("*",), codes=(0, 1, 2))
