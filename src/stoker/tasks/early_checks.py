"""Checks a command line of `stoker train` before torch and transformers are imported, which takes many seconds.

The real classes of the options are not needed for that: `declared_options` reads their fields. Whatever cannot be told without
them is left to the real parser, which checks everything again; a mistake that is found here gets the sentence that it would get
there.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from stoker.command_options import options_of
from stoker.errors import UserError
from stoker.hf.retired import RETIRED
from stoker.tasks.declared_options import Undeclared, declared, undeclared_fields
from stoker.tasks.file_patterns import expand
from stoker.tasks.first_columns import check_columns
from stoker.tasks.model_folder import (
    check_folder_exists,
    check_language_model,
    check_no_adapter,
    exported_file,
    gguf_file,
)
from stoker.tasks.training_options import CheckedParser, check_range, given, joined
from stoker.user_files import require_existing

__all__ = ["check", "check_options", "check_request", "early_parser", "wants_pairs"]

_SENTENCES = "stoker.tasks.sentences.st_trainers"
_ARGUMENTS = {
    "sft": ("stoker.tasks.sft.trl_trainers", "SFTArguments"),
    "embed": (_SENTENCES, "EmbeddingArguments"),
    "rerank": (_SENTENCES, "RerankArguments"),
    "fewshot": ("stoker.tasks.fewshot.fewshot_trainer", "FewshotArguments"),
}
"""Where the training arguments of a task are declared; those of the others are Stoker's own."""
_WITH_RULES = ("sft", "mlm", "classify")
"""Tasks with options that contradict each other, which their `option_rules` tell."""
_EVALUATE_WITH_FILE = ("sft", "embed", "rerank", "fewshot")
"""Tasks that evaluate if there is a validation file."""
_NAME_THEIR_FOLDER = ("sft",)
"""Tasks that name the folder after the data, if there is no --output_dir."""
_NEEDED = (
    "do_train", "do_eval", "do_predict", "model_name_or_path", "train_file", "validation_file", "test_file", "dataset_name",
)  # fmt: skip
"""Options that are read here."""


def check(task: str, argv: Sequence[str]) -> None:
    """Raises UserError for an option, a value, a file, a folder or a column that cannot be right."""
    values = check_options(task, argv)
    if values is None or not all(hasattr(values, name) for name in _NEEDED):
        return
    values.do_eval = _evaluates(task, values)
    check_request(task, values, values, values, [*argv, "--output_dir"] if task in _NAME_THEIR_FOLDER else argv)
    if task in _WITH_RULES:
        # Nothing is done with a value whose type is not known: it is missing.
        with contextlib.suppress(AttributeError):
            importlib.import_module(f"stoker.tasks.{task}.option_rules").check_rules(values, values)
    paths = _existing_files(values)
    _check_model(task, values.model_name_or_path)
    for split, path in paths:
        if os.path.isfile(os.path.expanduser(path)):  # a pipe can be read once
            check_columns(task, path, values, split)


def check_options(task: str, argv: Sequence[str]) -> Any:
    """The values of the options whose types are known; UserError for an option or a value that cannot be right.

    None if the declarations cannot be read.
    """
    parser = early_parser(task, argv)
    if parser is None:
        return None
    values, rest = parser.parse_known_args(joined(argv))
    parser.refuse(rest)
    known = {name: value for name, value in vars(values).items() if name not in parser.unknown}
    check_range(SimpleNamespace(**_certain(known, options_of(argv))))
    return SimpleNamespace(**known)


def _certain(values: Mapping[str, Any], typed: Collection[str]) -> dict[str, Any]:
    """The numbers and names on the command line that the real arguments have, too."""
    # A retired option may give another value to the one that has taken its place.
    replaced = {one.renamed for one in RETIRED if one.name in typed}
    return {
        name: value for name, value in values.items()
        if name in typed and name not in replaced and (isinstance(value, int | float | list) or value == "")
    }  # fmt: skip


def check_request(task: str, model: Any, data: Any, args: Any, argv: Sequence[str]) -> None:
    """Checks that there is something to do, and something to do it with."""
    if not (args.do_train or args.do_eval or args.do_predict):
        raise UserError(f"stoker train {task} has nothing to do; add --do_train, --do_eval or --do_predict")
    if args.do_train and not given("output_dir", argv):
        raise UserError("--output_dir is missing; it names the folder for the model")
    _check_data_given(args, data)
    if args.do_train and (file := exported_file(model.model_name_or_path)) is not None:
        raise UserError(
            f"{model.model_name_or_path} contains an export ({file.name}), which cannot be trained; name the model it was made "
            "from"
        )


def wants_pairs(argv: Sequence[str]) -> bool:
    """Whether a command line of `stoker train sft` has --dpo."""
    off = any(word.lower() in {"--dpo=false", "--no_dpo"} for word in argv)
    return given("dpo", argv) and not off


def early_parser(task: str, argv: Sequence[str] = ()) -> Any:
    """The parser for `argv`, whose `unknown` options take any values; None if the declarations cannot be read."""
    module, name = _ARGUMENTS.get(task, ("stoker.hf.arguments", "TrainingArguments"))
    if task == "sft" and wants_pairs(argv):
        name = "DPOArguments"
    try:
        return _parser_of(task, module, name)
    except Undeclared:
        return None
    except (ValueError, TypeError, RuntimeError, AttributeError, ImportError, OSError, SyntaxError):
        return None  # another release, whose declarations are written in another way


@cache
def _parser_of(task: str, module: str, arguments: str) -> Any:
    kinds = (
        declared("stoker.tasks.training_options", "ModelOptions"),
        declared(f"stoker.tasks.{task}.fine_tune", f"{task.capitalize()}Options"),
        declared(module, arguments),
    )
    stock: Any = _stock_parser()

    class Parser(CheckedParser, stock):  # type: ignore[misc]
        def __init__(self) -> None:
            stock.__init__(self, kinds, prog=f"stoker train {task}", allow_abbrev=False)
            self.command = f"train {task}"
            self.unknown = [name for kind in kinds for name in undeclared_fields(kind)]
            for one in self.unknown:
                self.add_argument(*{f"--{one}", f"--{one.replace('_', '-')}"}, nargs="*")

    return Parser()


def _stock_parser() -> type:
    """HfArgumentParser, from its own file: `import transformers` takes a second, and more where it imports torch."""
    package = importlib.util.find_spec("transformers")
    places = package.submodule_search_locations if package is not None else None
    if not places:
        raise Undeclared("transformers")
    spec = importlib.util.spec_from_file_location("_stoker_hf_argparser", Path(places[0]) / "hf_argparser.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    stock: type = module.HfArgumentParser
    return stock


def _evaluates(task: str, values: Any) -> bool:
    """Whether the run evaluates; the real arguments find out when they are made."""
    strategies = (getattr(values, name, None) for name in ("eval_strategy", "evaluation_strategy"))
    if any(getattr(one, "value", one) not in (None, "no") for one in strategies):
        return True
    return bool(values.do_eval or (task in _EVALUATE_WITH_FILE and values.validation_file))


def _check_data_given(args: Any, data: Any) -> None:
    if data.dataset_name or (getattr(data, "task_name", None) and not (data.train_file or data.validation_file)):
        return
    split = bool(data.train_file and getattr(data, "validation_split_percentage", 0))
    for wanted, file, flag in (
        (args.do_train, data.train_file, "--train_file"),
        (args.do_eval, data.validation_file or split, "--validation_file"),
        (args.do_predict, data.test_file, "--test_file"),
    ):
        if wanted and not file:
            raise UserError(f"{flag} is missing; name a file, or a data set on the hub with --dataset_name")


def _existing_files(values: Any) -> list[tuple[str, Path]]:
    """The files that the run reads, with their splits; UserError if one does not exist."""
    wanted = {"train": values.do_train, "validation": values.do_eval, "test": values.do_predict}
    found = []
    for split in (name for name, needed in wanted.items() if needed):
        names = getattr(values, f"{split}_file")
        paths = expand(names, f"--{split}_file") if isinstance(names, list) else [Path(names)] if names else []
        found += [(split, path) for path in paths]
    for _, path in found:
        require_existing(path, "data file")
    return found


def _check_model(task: str, name: str) -> None:
    if task == "sft" and gguf_file(name) is not None:
        return
    if task == "sft":
        check_language_model(name, "--model_name_or_path")
        check_no_adapter(name)
    check_folder_exists(name, "--model_name_or_path")
