"""Loads models and tokenizers from a folder or the hub; what goes wrong becomes one sentence that names the file at fault."""

from __future__ import annotations

import logging
import os
import pickle
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import stoker
from stoker.english import counted, with_article
from stoker.errors import UserError, first_line, one_line, outside_reason
from stoker.tasks.model_folder import (
    CONFIG_FILES,
    MODULES,
    TOKENIZER_FILES,
    VOCABULARY_FILES,
    WEIGHT_FILES,
    broken_file,
    broken_part,
    check_before_loading,
    check_folder_exists,
    exported_file,
    integer_tensors,
)
from stoker.tasks.tokens import fast_backend

__all__ = [
    "check_finite", "check_vocabulary", "config_of", "hub_options", "load_config", "load_config_and_tokenizer", "load_model",
    "load_pretrained", "load_tokenizer", "loaded", "model_of", "most_tokens", "quiet", "reason", "row_length", "tokenizer_of",
]  # fmt: skip

log = logging.getLogger("stoker")

_LONGEST = 512
"""Tokens of a row unless --max_seq_length says otherwise, for tasks without a default of their own."""


def quiet() -> None:
    """Silences messages of the libraries that a user cannot act on. Errors are still shown."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for name in ("accelerate", "huggingface_hub", "httpx", "filelock", "matplotlib", "trl", "peft", "datasets",
                 "sentence_transformers", "setfit", "bitsandbytes"):  # fmt: skip
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(transformers|accelerate|torch|peft|trl|sentence_transformers|setfit)\b")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"stoker\b")  # of TRL about its options


_FILES = {"config": CONFIG_FILES, "tokenizer": TOKENIZER_FILES, "weights": WEIGHT_FILES, "adapter": WEIGHT_FILES}
_STAGES = {"AutoConfig": "config", "AutoTokenizer": "tokenizer", "PeftModel": "adapter"}


def loaded(loader: Any, what: str, name: str, *, flag: str = "--model_name_or_path", **options: Any) -> Any:
    """`loader.from_pretrained` for a folder or a name on the hub; raises UserError with the reason if it fails.

    Broken files raise all kinds of errors in the libraries, so any error of theirs is blamed on the folder. An error that
    Stoker's own code raises is a bug, or a UserError, and is raised as it is.
    """
    if os.path.isdir(name):
        check_before_loading(Path(name))
    else:
        _check_name(name, flag)
    return _user_error_on_failure(loader, what, name, flag, options.get("config"))(
        lambda: loader.from_pretrained(name, **options)
    )


def _user_error_on_failure(
    loader: Any, what: str, name: str, flag: str, config: Any = None
) -> Callable[[Callable[[], Any]], Any]:
    """Returns a function that calls into the libraries and turns their errors into a UserError about the files of `name`."""

    def attempt(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except BaseException as error:
            if _is_a_bug(error) or os.environ.get("STOKER_TRACEBACK"):
                raise
            raise UserError(_failure_reason(error, loader, what, name, flag, config)) from None

    return attempt


def _check_name(name: str, flag: str) -> None:
    """Raises UserError for a folder that does not exist and for a name that no model on the hub can have."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    check_folder_exists(name, flag)
    if os.path.exists(name):
        return
    try:
        validate_repo_id(name)
    except HFValidationError:
        raise UserError(
            f"the folder {name!r} does not exist, and no model on the hub can have that name ({flag})"
        ) from None


def _is_a_bug(error: BaseException) -> bool:
    """Whether Stoker's own code raised an error, or it is not an error at all, like Ctrl-C.

    An error that a library raises is blamed on the files, even if Stoker's code called that library.
    """
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # raised by panics in Rust code
        return True
    ours = os.path.join(os.path.dirname(stoker.__file__), "")
    *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
    file = innermost.f_code.co_filename
    return file.startswith(ours) and file != __file__  # this file makes the calls


def _failure_reason(error: BaseException, loader: Any, what: str, name: str, flag: str, config: Any) -> str:
    if not os.path.isdir(name):
        offline = " (offline)" if os.environ.get("HF_HUB_OFFLINE") else ""
        # Inside of a folder that exists, a folder was most likely meant.
        inside = os.path.isdir(os.path.dirname(name))
        begin = (
            f"the folder {name} does not exist, and it" if inside else f"the {what} {name!r} is not a local folder and"
        )
        return (
            f"{begin} cannot be loaded from the hub{offline}: {reason(error).rstrip('.')}; "
            f"check the name and the network, or name a folder with {flag}"
        )
    if outside := outside_reason(error):
        return f"no {what} can be loaded from the folder {name}: {outside}"
    folder = Path(name)
    stage = _STAGES.get(loader.__name__, "weights")
    # config.json is read first in every case.
    broken = broken_file(folder, CONFIG_FILES) or broken_file(folder, _FILES[stage])
    if broken is None and (folder / MODULES).exists():
        broken = broken_part(folder)
    elif broken is None and stage in ("config", "weights") and not (folder / "config.json").exists():
        broken = "it has no config.json"
    if broken is None and stage == "weights" and (at_fault := _config_fault(loader, config)):
        broken = f"config.json does not describe a model that can be built ({at_fault})"
    if broken is None and stage == "tokenizer" and not any(any(folder.glob(one)) for one in VOCABULARY_FILES):
        return _no_vocabulary(name, flag)
    if broken is None:
        files = {
            "config": "config.json",
            "tokenizer": "the tokenizer's files",
            "weights": "the files of its parts" if (folder / MODULES).exists() else "config.json and the weights",
            "adapter": "adapter_config.json and the weights",
        }
        broken = f"{reason(error)} (from {files[stage]})"
    return f"no {what} can be loaded from the folder {name}: {broken}"


def _config_fault(loader: Any, config: Any) -> str | None:
    """The error that transformers raises for the configuration alone, if any; built on the meta device, without memory."""
    import torch

    if config is None:
        return None
    try:
        with torch.device("meta"):
            loader.from_config(config)
    except Exception as error:
        return reason(error)
    return None


def reason(error: BaseException) -> str:
    """The reason on one line. Some messages are only a name or a number and need the error's type."""
    if isinstance(error, pickle.UnpicklingError | EOFError):
        return "a weight file is damaged, or contains pickled code, which is never loaded"
    text = first_line(error)
    if text.endswith(":"):  # the reason itself follows
        text = one_line(error)[:300]
    plain = isinstance(error, OSError | ValueError | ImportError | RuntimeError) and str(error).strip()
    return text if plain else f"{type(error).__name__}: {text}"


def load_config_and_tokenizer(options: Any, **changes: Any) -> tuple[Any, Any]:
    """Both of the model that the options name, after checking that they belong together."""
    config, tokenizer = load_config(options, **changes), load_tokenizer(options)
    check_vocabulary(tokenizer, config, options.model_name_or_path)
    return config, tokenizer


def load_config(options: Any, **changes: Any) -> Any:
    name = options.config_name or options.model_name_or_path
    flag = "--config_name" if options.config_name else "--model_name_or_path"
    return config_of(name, flag=flag, **hub_options(options), **changes)


def config_of(name: str, *, flag: str, **options: Any) -> Any:
    """The configuration, after checking the values that would fail late."""
    from transformers import AutoConfig

    config = loaded(AutoConfig, "model", name, flag=flag, **options)
    wrong = next(filter(None, (_wrong_number(config, one) for one in _NUMBERS)), None) or _wrong_type(config)
    if wrong is None and sorted(config.id2label or {}) != list(range(len(config.id2label or {}))):
        wrong = "id2label in its config.json does not number the labels from 0"
    if wrong is not None:
        raise UserError(f"no model can be loaded from {name}: {wrong}")
    return config


_NUMBERS = ("max_position_embeddings", "vocab_size", "num_hidden_layers")


def _wrong_number(config: Any, name: str) -> str | None:
    value = getattr(config, name, None)
    if value is None or (isinstance(value, int) and value > 0):
        return None
    return f"{name} in its config.json is {value!r}, not a number above 0"


_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "activation")


def _wrong_type(config: Any) -> str | None:
    """A value whose type is not that of its default. transformers 4 does not check, and fails in the first step."""
    try:
        defaults = type(config)().to_dict()
    except Exception:  # this configuration class needs arguments
        return None
    for name, default in defaults.items():
        value = getattr(config, name, default)
        if isinstance(default, float) and (not isinstance(value, int | float) or isinstance(value, bool)):
            if value is not None or name.endswith(("eps", "epsilon")):
                return f"{name} in its config.json is {value!r}, not a number"
        elif name in _ACTIVATIONS and isinstance(default, str) and not isinstance(value, str):
            return f"{name} in its config.json is {value!r}, not the name of a function"
        elif name == "pad_token_id" and (isinstance(value, bool) or not isinstance(value, int | None)):
            return f"{name} in its config.json is {value!r}, not the number of a token"
    return None


def load_tokenizer(options: Any) -> Any:
    name = options.tokenizer_name or options.model_name_or_path
    flag = "--tokenizer_name" if options.tokenizer_name else "--model_name_or_path"
    return tokenizer_of(name, flag=flag, use_fast=True, **hub_options(options))


def tokenizer_of(name: str, *, flag: str, **options: Any) -> Any:
    """The tokenizer. Raises UserError if its vocabulary is missing, for which transformers would return an empty one."""
    from transformers import AutoTokenizer

    tokenizer = loaded(AutoTokenizer, "tokenizer", name, flag=flag, **options)
    fast_backend(tokenizer)
    if not set(tokenizer.get_vocab()) - {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}:
        raise UserError(_no_vocabulary(name, flag))
    length = tokenizer.model_max_length
    if not isinstance(length, int | float) or not length > 0:
        raise UserError(f"model_max_length in tokenizer_config.json of {name} is {length!r}, not a number above 0")
    # Some errors in its files show only in use.
    _user_error_on_failure(AutoTokenizer, "tokenizer", name, flag)(
        lambda: tokenizer("Who wrote it?", "Ada wrote the letter.")
    )
    return tokenizer


def _no_vocabulary(name: str, flag: str) -> str:
    named = flag in ("--model_name_or_path", "--tokenizer_name")
    advice = ", or name a tokenizer with --tokenizer_name" if named else ""
    return (
        f"no tokenizer can be loaded from {name} ({flag}): it has no vocabulary (tokenizer.json, vocab.txt or similar); copy "
        f"the tokenizer's files there{advice}"
    )


def check_vocabulary(tokenizer: Any, config: Any, name: str) -> None:
    """Raises UserError if the tokenizer produces ids that the model has no embedding for."""
    rows = getattr(config, "vocab_size", None)
    if isinstance(rows, int) and rows <= (tokenizer.pad_token_id or 0):
        raise UserError(
            f"tokenizer and model of {name} do not match: padding is token {tokenizer.pad_token_id} "
            f"({tokenizer.pad_token}), the model has embeddings for {rows:,} tokens (vocab_size in config.json)"
        )
    if isinstance(rows, int) and tokenizer.vocab_size > rows:
        raise UserError(
            f"tokenizer and model of {name} do not match: the tokenizer has {tokenizer.vocab_size:,} tokens, the model "
            f"embeddings for {rows:,} (vocab_size in config.json)"
        )


def load_model(kind: Any, options: Any, config: Any, prepare: Callable[[Any], None] | None = None) -> Any:
    """The model of class `kind` to be trained; logs which of its weights are new. `prepare` is as in `model_of`."""
    settings = {"replace_mismatched": options.ignore_mismatched_sizes, "prepare": prepare, **hub_options(options)}
    model, new = model_of(kind, options.model_name_or_path, config, **settings)
    if new:
        log.info("new, to be trained: %s", ", ".join(new))
    return model


def model_of(
    kind: Any, name: str, config: Any, *, what: str = "model", flag: str = "--model_name_or_path",
    replace_mismatched: bool = False, prepare: Callable[[Any], None] | None = None, **options: Any,
) -> tuple[Any, list[str]]:  # fmt: skip
    """The model in fp32, and the names of the weights that its files did not contain (those of a new head).

    Raises UserError if the files have nothing of the base model, or if sizes differ; warns if part of the base model is random.
    `prepare` is called with the model as it was read, before its weights are widened to fp32. A folder that `stoker export` has
    written gives a model that runs the exported file.
    """
    if os.path.isdir(name) and exported_file(name) is not None:
        from stoker.tasks.export.exported_model import load_exported

        return load_exported(name, config), []
    model, facts = loaded(
        kind, what, name, flag=flag, config=config, ignore_mismatched_sizes=True, output_loading_info=True, **options
    )
    advice = "" if flag == "--model" else "; --ignore_mismatched_sizes replaces it with a new one"
    _check_weights(model, facts, name, None if replace_mismatched else advice)
    check_finite(model, name)
    if prepare is not None:
        prepare(model)
    model.float()  # weights are trained in fp32; --bf16 applies to activations
    return model, sorted(facts.get("missing_keys", ()))


def load_pretrained(kind: Any, name: str, *, what: str = "model") -> tuple[Any, Any, list[str]]:
    """Tokenizer and model that --model names, and the names of the weights that its files did not contain."""
    settings: dict[str, Any] = {"flag": "--model", "trust_remote_code": False}
    config = config_of(name, **settings)
    tokenizer = tokenizer_of(name, **settings)
    check_vocabulary(tokenizer, config, name)
    return tokenizer, *model_of(kind, name, config, what=what, **settings)


def _check_weights(model: Any, facts: Mapping[str, Any], name: str, advice: str | None) -> None:
    """Compares the files with the model. `advice` is for a head of another size; None if such a head is replaced."""
    mismatched = {one if isinstance(one, str) else one[0]: one for one in facts.get("mismatched_keys", ())}
    missing, unexpected = {*facts.get("missing_keys", ())} - {*mismatched}, {*facts.get("unexpected_keys", ())}
    base = _base_weights(model)
    if base and not base - missing - {*mismatched}:
        others = f", but {_some(unexpected)}" if unexpected else ""
        raise UserError(
            f"the weights in {name} are not those of {with_article(type(model).__name__)}: they contain none of the {len(base)} "
            f"tensors of its base model{others}"
        )
    if os.path.isdir(name) and (integers := integer_tensors(Path(name)) & {*base, *_without_prefix(model, base)}):
        raise UserError(f"the weights in {name} are not floating-point numbers, in {_tensors(integers)}")
    if mismatched and advice is not None:
        raise UserError(_mismatch(mismatched, base, name, advice))
    new = base & (missing | {*mismatched})
    if new:
        log.warning(
            "%d of %d tensors of the base model are missing in %s or have another shape, and are initialised at random: %s",
            len(new), len(base), name, _some(new),
        )  # fmt: skip
    parts = {key.partition(".")[0] for key in _without_prefix(model, base)}
    unused = {key for key in unexpected if next(iter(_without_prefix(model, [key]))).partition(".")[0] in parts}
    if unused:
        log.warning(
            "%d tensors in %s are not used because the model in config.json has no such parameters: %s",
            len(unused), name, _some(unused),
        )  # fmt: skip


_HEADS = ("qa_outputs", "classifier", "classification_head", "score")


def _base_weights(model: Any) -> set[str]:
    """The pretrained parameters. The pooler counts as part of the head: many checkpoints are saved without it."""
    prefix = f"{model.base_model_prefix}."
    names = {name for name, _ in model.named_parameters()}
    base = {name for name in names if name.startswith(prefix) and ".pooler." not in name}
    # Some models, such as T5, have encoder and decoder beside the head.
    return base or {name for name in names if name.partition(".")[0] not in _HEADS}


def _without_prefix(model: Any, names: Iterable[str]) -> list[str]:
    return [name.removeprefix(f"{model.base_model_prefix}.") for name in names]


def _mismatch(mismatched: Mapping[str, Any], base: set[str], name: str, advice: str) -> str:
    key = min(mismatched, key=lambda one: (one not in base, one))
    shapes = "has another shape in the file"
    if not isinstance(mismatched[key], str):  # transformers 4 reports names only
        found, needed = (" x ".join(map(str, shape)) for shape in mismatched[key][1:])
        shapes = f"is {found} in the file and would be {needed}"
    if key in base:
        more = f", and {len(mismatched) - 1} more differ" if len(mismatched) > 1 else ""
        return f"the weights in {name} do not fit its config.json: {key} {shapes}{more}"
    return f"the head of {name} does not have the size that this task needs: {key} {shapes}{advice}"


def check_finite(model: Any, name: str) -> None:
    """Raises UserError if weights are NaN or infinite."""
    bad = {one for one, weight in model.named_parameters() if not bool(weight.detach().isfinite().all())}
    if bad:
        raise UserError(f"the weights in {name} contain NaN or infinite values, in {_tensors(bad)}")


def _tensors(names: set[str]) -> str:
    return f"{counted(len(names), 'tensor')}: {_some(names)}"


def _some(names: Iterable[str], most: int = 3) -> str:
    shown = sorted(names)
    return ", ".join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "")


def most_tokens(wanted: int, tokenizer: Any, config: Any) -> int:
    """The most tokens per row that tokenizer and model allow; `wanted` if neither sets a limit."""
    from stoker.model.families import FAMILIES

    positions = getattr(config, "max_position_embeddings", None) or wanted
    offset = {family.folder for family in FAMILIES if family.positions_after_padding}
    if config.model_type.replace("-", "_") in offset:  # RoBERTa and similar models number positions from the padding id
        positions -= (config.pad_token_id or 0) + 1
    return int(min(tokenizer.model_max_length, positions))


def row_length(wanted: int | None, tokenizer: Any, config: Any) -> int:
    """--max_seq_length, reduced to what tokenizer and model allow; without one, what they allow, at most 512."""
    if wanted is None:
        wanted = min(most_tokens(_LONGEST, tokenizer, config), _LONGEST)
    most = most_tokens(wanted, tokenizer, config)
    if most < 8 <= wanted:
        raise UserError(
            f"the model takes at most {max(most, 0)} tokens, which leaves no room for a text; check "
            "max_position_embeddings in its config.json and model_max_length in its tokenizer_config.json"
        )
    if min(wanted, most) < 8:
        raise UserError(f"--max_seq_length {wanted} leaves no room for a text; use 128 to 512")
    if wanted > most:
        log.warning("--max_seq_length %s is more than the model takes; %s is used", wanted, most)
    return min(wanted, most)


def hub_options(options: Any) -> dict[str, Any]:
    return {
        "cache_dir": options.cache_dir,
        "revision": options.model_revision,
        "token": options.token,
        "trust_remote_code": options.trust_remote_code,  # passed even if False: without it, transformers asks in a terminal
    }
