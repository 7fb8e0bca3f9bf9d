"""The options that `stoker train embed` and `rerank` share, and the data that they name."""

from dataclasses import dataclass, field
from pathlib import Path

from stoker.errors import UserError
from stoker.tasks import hub
from stoker.tasks.faults import Faults
from stoker.tasks.files import read_rows
from stoker.tasks.sentences.text_rows import TextRows, collect, column_list, read_text_rows
from stoker.tasks.training_options import DataOptions
from stoker.tasks.training_run import Job

# No `from __future__ import annotations`: HfArgumentParser reads the types of these fields.

__all__ = ["TextOptions", "read_corpus", "read_split"]


@dataclass
class TextOptions(DataOptions):
    """Which columns are used."""

    text_column_names: str | None = field(
        default=None, metadata={"help": "Columns with texts, separated by commas: anchor, positive, negatives."}
    )
    label_column_name: str | None = field(
        default=None, metadata={"help": "The column with the score or the class; none for no column."}
    )
    column_names: str | None = field(
        default=None, metadata={"help": "Names of all columns of a CSV or TSV file whose first line is a row."}
    )
    max_seq_length: int | None = field(
        default=None, metadata={"help": "Maximum tokens of a text; longer ones are cut (default: the model's own)."}
    )
    loss: str | None = field(
        default=None, metadata={"help": "A loss of sentence-transformers (default: by the kind of data)."}
    )
    loss_kwargs: str | None = field(
        default=None, metadata={"help": "Arguments of the loss as JSON, such as '{\"scale\": 20}'."}
    )
    mini_batch_size: int = field(
        default=32, metadata={"help": "Rows that a Cached loss computes at once; a smaller number needs less memory."}
    )
    corpus_file: str | None = field(
        default=None,
        metadata={"help": "Further texts: a file with a column of texts, or .txt with a text per paragraph."},
    )
    mine_negatives: int | None = field(
        default=None,
        metadata={"help": "Add this many hard negatives to each pair, found in the data and --corpus_file."},
    )
    mining_margin: float = field(
        default=0.05,
        metadata={
            "help": "A negative must be less similar than the positive by this share, else it may be an answer too."
        },
    )
    mining_skip: int = field(default=0, metadata={"help": "Pass over this many of the nearest texts."})
    samples: int = field(default=3, metadata={"help": "Examples of each kind in the report; 0 for none."})


def read_split(job: Job, split: str, *, classes: bool | None = False) -> TextRows:
    """The usable rows of a split; `classes` as in `collect`."""
    options = job.data
    texts = column_list(options.text_column_names, "--text_column_names")
    file, most = job.source(split)
    if file:
        names = column_list(options.column_names, "--column_names")
        found = read_text_rows(
            file, texts=texts, label=options.label_column_name, names=names, classes=classes, strict=options.strict
        )
    else:
        data = hub.load_split(options.dataset_name, options.dataset_config_name, split, job.model)
        faults = Faults(data.name, options.strict)
        rows = data.rows(named=classes is True)
        found = collect(rows, faults, texts=texts, label=options.label_column_name, classes=classes)
    return found.first(most)


_TEXTS = ("text", "document", "passage", "context", "content", "sentence", "positive", "answer")


def read_corpus(job: Job) -> list[str]:
    """The texts of --corpus_file, without repetitions."""
    file = job.data.corpus_file
    if file is None:
        return []
    faults = Faults(file, job.data.strict)
    texts: list[str] = []
    name: str | None = None
    for row in read_rows(Path(file), faults, texts=True):
        if name is None:
            lower = {str(column).lower(): str(column) for column in row.values}
            name = next(
                (lower[one] for one in _TEXTS if one in lower), next(iter(lower.values())) if len(lower) == 1 else None
            )
            if name is None:
                raise UserError(
                    f"{file} has no column of texts: it has {', '.join(lower.values())}; name one of them text"
                )
        value = row.values.get(name)
        if isinstance(value, str) and value.strip():
            texts.append(value)
        else:
            faults.add(row.where, f"its {name} is empty or not text")
    faults.settle(len(texts))
    return list(dict.fromkeys(texts))
