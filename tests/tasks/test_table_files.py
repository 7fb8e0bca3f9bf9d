"""Tables: Parquet is read batch by batch and refused if it does not fit into the memory, and so are columns of one name."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow
import pyarrow.parquet as parquet
import pytest

from stoker.cli import main
from stoker.errors import UserError
from stoker.tasks.faults import Faults
from stoker.tasks.files import read_rows

MIB = 1 << 20


@contextmanager
def little_memory() -> Iterator[None]:
    """200 MB more than the process has, as `ulimit -v` sets it: without it, a test would have to fill the machine's memory."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 200 * MIB, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def repeated(path: Path, size: int, rows: int, *, as_written: bool = False) -> Path:
    """A file of a few kilobytes with one long text in every row: the dictionary encoding stores it once."""
    texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * rows, pyarrow.int32()), ["x" * size])
    parquet.write_table(pyarrow.table({"text": texts}), path, compression="zstd", store_schema=as_written)
    assert path.stat().st_size < MIB
    return path


def test_a_small_file_that_unpacks_to_more_than_the_memory_is_refused(tmp_path: Path) -> None:
    path = repeated(tmp_path / "d.parquet", 16 * MIB, 10_000)
    message = r"data file .*d\.parquet cannot be read: .* rows need more memory than is free$"
    with pytest.raises(UserError, match=message), little_memory():
        next(read_rows(path, Faults(str(path))))


@pytest.mark.parametrize("as_written", [False, True], ids=["as texts", "as Arrow's dictionary"])
def test_rows_that_together_exceed_the_memory_are_refused_if_kept(
    as_written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.tasks.files.available", lambda: 60_000_000)
    path = repeated(tmp_path / "d.parquet", 10_000, 20_000, as_written=as_written)
    rows = read_rows(path, Faults(str(path)))
    with pytest.raises(UserError, match=r"data file .*d\.parquet cannot be read: it holds more than 60 MB$"):
        for _ in rows:
            pass
    assert sum(1 for _ in read_rows(path, Faults(str(path)), kept=False)) == 20_000


def test_rows_are_handed_on_before_the_file_is_unpacked(tmp_path: Path) -> None:
    """40 GB in all, of which a batch is unpacked at a time."""
    path = repeated(tmp_path / "d.parquet", MIB // 4, 160_000)
    row = next(read_rows(path, Faults(str(path))))
    assert row.values == {"text": "x" * (MIB // 4)}
    assert row.where == f"{path}, row 1"


def test_all_rows_are_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    rows = [{"text": f"row {n}", "more": {"a": [n]}} for n in range(3000)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=700)
    assert [row.values for row in read_rows(path, Faults(str(path)))] == rows


@pytest.mark.parametrize("mark", [",", "\t"])
def test_two_columns_of_one_name_are_refused(mark: str, tmp_path: Path) -> None:
    path = tmp_path / ("d.csv" if mark == "," else "d.tsv")
    path.write_text("\n".join(mark.join(row) for row in (["text", "text", "label"], *[["one", "two", "yes"]] * 8)))
    with pytest.raises(
        UserError, match=r"has two columns with the name 'text' \(the first line\); rename or remove one"
    ):
        next(read_rows(path, Faults(str(path))))


def test_embed_refuses_two_columns_of_one_name(bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "d.csv").write_text("anchor,positive,positive\n" + "A cat?,An animal.,Another.\n" * 8)
    words = ["--train_file", str(tmp_path / "d.csv"), "--output_dir", str(tmp_path / "out"), "--max_steps", "1"]
    assert main(["train", "embed", "--model_name_or_path", str(bert), *words]) == 2
    assert "has two columns with the name 'positive'" in capsys.readouterr().err


def test_columns_without_a_name_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("text,label,,\none,yes,,\n")
    (row,) = read_rows(tmp_path / "d.csv", Faults("d.csv"))
    assert row.values == {"text": "one", "label": "yes", "": ""}


def test_two_columns_of_one_name_in_parquet_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    columns = [pyarrow.array(["a"]), pyarrow.array(["b"])]
    parquet.write_table(pyarrow.Table.from_arrays(columns, names=["text", "text"]), path)
    with pytest.raises(UserError, match="has two columns with the name 'text'"):
        next(read_rows(path, Faults(str(path))))
