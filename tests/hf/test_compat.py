"""The layer for unmodified scripts: retired arguments and imports work, installed packages are used, other versions refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from rig import warm
from stoker.errors import UserError
from stoker.hf.compat import check_version

START = "from stoker.hf.compat import install\n"


def run(
    code: str, *arguments: str, env: dict[str, str] | None = None, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Runs code in a separate process, because hooks cannot be uninstalled."""
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    # Without the entry point through which torch loads Stoker's ccl backend, as if that were not installed.
    clean["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    done = warm.run(
        [sys.executable, "-c", code, *arguments],
        env={**clean, **(env or {})},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert not check or done.returncode == 0, done.stderr
    return done


def answer(done: subprocess.CompletedProcess[str]) -> Any:
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


RETIRED_FLAGS = ["--use_ipex", "--no_cuda", "--overwrite_output_dir", "--xpu_backend", "ccl", "--warmup_ratio", "0.1",
                 "--group_by_length", "--logging_dir", "runs", "--bf16", "--ddp_backend", "ccl"]  # fmt: skip
RETIRED_EVERYWHERE = ("use_ipex", "xpu_backend", "ccl")
RETIRED_SINCE_5 = (
    *RETIRED_EVERYWHERE,
    "no_cuda",
    "warmup_ratio",
    "group_by_length",
    "logging_dir",
)
PARSE = """
import json, pickle, sys
from transformers import HfArgumentParser, Seq2SeqTrainingArguments, Trainer, TrainingArguments
import transformers.trainer, transformers.training_args
args, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
same = TrainingArguments("out", use_ipex=True, no_cuda=True, warmup_ratio=0.1)
print(json.dumps({
    "cpu": args.use_cpu, "bf16": args.bf16, "warmup": args.get_warmup_steps(200), "same": same.get_warmup_steps(200),
    "grouped": getattr(args, "train_sampling_strategy", "") == "group_by_length" or args.group_by_length,
    "device": str(args.device), "use_ipex": args.use_ipex,
    "one": Trainer is transformers.trainer.Trainer and TrainingArguments is transformers.training_args.TrainingArguments,
    "derived": issubclass(Seq2SeqTrainingArguments, TrainingArguments),
    "bases": [base.__module__ for base in Trainer.__mro__], "module": TrainingArguments.__module__,
}))
pickle.dump(args, open(sys.argv[2] + "/args.bin", "wb"))
"""


def test_every_retired_argument_keeps_its_effect(tmp_path: Path) -> None:
    done = run(START + "install()\n" + PARSE, "--output_dir", str(tmp_path), *RETIRED_FLAGS)
    found = answer(done)
    assert (found["cpu"], found["bf16"], found["warmup"], found["same"]) == (True, True, 20, 20)
    assert (found["grouped"], found["device"], found["use_ipex"]) == (True, "cpu", True)
    assert found["one"]
    assert found["derived"]
    assert "stoker.hf.trainer" in found["bases"]
    for name in RETIRED_EVERYWHERE if metadata.version("transformers").startswith("4.") else RETIRED_SINCE_5:
        lines = [line for line in done.stderr.splitlines() if name in line]
        assert len(lines) == 1, (name, done.stderr)
    # What a script saves can be loaded without Stoker.
    opened = run(f"import pickle\nargs = pickle.load(open({str(tmp_path / 'args.bin')!r}, 'rb'))\n"
                 "import sys, json\nprint(json.dumps({'cpu': args.use_cpu, 'stoker': 'stoker' in sys.modules}))")  # fmt: skip
    assert answer(opened) == {"cpu": True, "stoker": False}


def test_without_the_layer_retired_arguments_are_errors(tmp_path: Path) -> None:
    done = run(PARSE, "--output_dir", str(tmp_path), "--use_ipex", "--no_cuda", check=False)
    assert done.returncode != 0
    assert "arguments are not used by the HfArgumentParser: ['--use_ipex'" in done.stderr


def test_no_ipex_accepts_retired_arguments_and_does_not_optimize(tmp_path: Path) -> None:
    done = run(START + "install(optimise=False)\n" + PARSE, "--output_dir", str(tmp_path), "--use_ipex", "--no_cuda")
    assert answer(done)["use_ipex"] is False
    assert "because of --no-ipex" in done.stderr


def test_a_script_that_imports_stoker_first_gets_the_same_classes() -> None:
    code = """
install()
import json
from stoker.hf.trainer import Trainer as ours
from transformers import Trainer, TrainingArguments
import accelerate, transformers.trainer
print(json.dumps({"ours": issubclass(Trainer, ours), "stock": hasattr(transformers.trainer.Accelerator, "stock"),
                  "outside": hasattr(accelerate.Accelerator, "stock")}))
"""
    assert answer(run(START + code)) == {"ours": True, "stock": False, "outside": True}


IMPORTS = """
import json, sys
import torch
import intel_extension_for_pytorch as ipex
import oneccl_bindings_for_pytorch, torch_ccl
model = torch.nn.Sequential(torch.nn.Linear(4, 4))
optimizer = torch.optim.AdamW(model.parameters())
both = ipex.optimize(model, optimizer=optimizer, dtype=torch.float32, level="O1", inplace=False, weights_prepack=True)
alone = ipex.optimize(model)
try:
    ipex.llm
except AttributeError as error:
    gone = str(error)
try:
    from intel_extension_for_pytorch.llm import optimize
except ImportError as error:
    gone += str(error)
try:
    import intel_extension_for_pytorch.cpu.launch
except Exception as error:
    launch = str(error)
torch.distributed.init_process_group("ccl", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
total = torch.ones(2); torch.distributed.all_reduce(total)
print(json.dumps({"both": both[0] is model and both[1] is optimizer, "copy": alone is not model, "gone": gone, "launch": launch,
                  "backend": torch.distributed.get_backend(), "sum": total.tolist()}))
"""


def test_imports_of_discontinued_packages_work() -> None:
    done = run(START + "install()\n" + IMPORTS)
    found = answer(done)
    assert found["both"]
    assert found["copy"]
    assert found["gone"].count("docs/coming-from-ipex.md") == 2
    assert "stoker launch" in found["launch"]
    assert (found["backend"], found["sum"]) == ("ccl", [1.0, 1.0])
    printed = [line for line in done.stderr.splitlines() if line.startswith("stoker: import")]
    assert len(printed) == 3
    assert "gloo is used" in done.stderr


def test_an_installed_package_is_imported_instead(tmp_path: Path) -> None:
    for name in ("intel_extension_for_pytorch", "oneccl_bindings_for_pytorch", "torch_ccl"):
        (tmp_path / f"{name}.py").write_text("REAL = True\n")
    code = (
        "install()\n"
        "import intel_extension_for_pytorch as a, oneccl_bindings_for_pytorch as b, torch_ccl as c\n"
        "assert a.REAL and b.REAL and c.REAL\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    assert run(START + code, env={"PYTHONPATH": path}).stderr == ""


def test_only_rank_0_prints() -> None:
    done = run(START + "install(first=False)\nimport intel_extension_for_pytorch")
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("package", "version"), [("transformers", "4.30.2"), ("transformers", "6.0.0"), ("accelerate", "1.2.1")]
)
def test_an_unsupported_version_is_refused(package: str, version: str) -> None:
    with pytest.raises(UserError, match="--no-compat") as caught:
        check_version(package, version)
    assert f"{package} {version}" in str(caught.value)


def test_the_installed_versions_are_supported() -> None:
    for package in ("transformers", "accelerate"):
        check_version(package)


def test_a_class_that_lacks_what_stoker_needs_is_not_replaced() -> None:
    code = """
import transformers.trainer as stock
del stock.TrainingArguments.ddp_timeout_delta
names = [one for one in (stock.Trainer, stock.TrainingArguments)]
install()
import json
print(json.dumps({"arguments": stock.TrainingArguments is names[1], "trainer": stock.Trainer is not names[0]}))
"""
    done = run(START + code)
    assert answer(done) == {"arguments": True, "trainer": True}
    assert done.stderr.count("retired arguments are not accepted, because transformers") == 1, done.stderr
    assert "has no TrainingArguments.ddp_timeout_delta; install transformers==" in done.stderr


def test_a_destroyed_process_group_is_kept_until_the_process_ends() -> None:
    """Otherwise gloo's threads are joined while the GIL is held, for which one of them may be waiting."""
    code = """
import torch.distributed as dist
from stoker.hf import compat
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
world = dist.group.WORLD
dist.destroy_process_group()
assert compat._KEPT == [world] and not dist.is_initialized()
print("{}")
"""
    for first in ("", "import torch.distributed\n"):  # the layer comes before torch, or after it
        assert answer(run(first + START + "install()\n" + code)) == {}


PLAIN_LOOP = """
import sys, torch
def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
def train_and_finish(model, **how):
    layer = install(**how)
    train(model)
    print("--", file=sys.stderr)
    layer.print_hint_if_nothing_was_optimised()
    layer.print_hint_if_nothing_was_optimised()
train_and_finish(torch.nn.Linear(4, 4))
train_and_finish(torch.nn.Linear(4, 4), first=False)
train_and_finish(torch.nn.Linear(4, 4), optimise=False)
install().print_hint_if_nothing_was_optimised()
import stoker
train_and_finish(stoker.optimize(torch.nn.Linear(4, 4)))
"""


def test_after_a_plain_training_loop_the_line_to_add_is_printed() -> None:
    done = run(START + PLAIN_LOOP)
    hint, *others = done.stderr.split("--\n")[1:]
    assert hint.startswith("stoker: nothing was optimised, because this script has a training loop of its own")
    assert "`import stoker; model, optimizer = stoker.optimize(model, optimizer)`" in hint
    assert hint.count("\n") == 1
    assert others == ["", "", ""]  # another rank, --no-ipex, an optimised model
