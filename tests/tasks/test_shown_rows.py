"""The rows of a report: no row twice, from the beginning to the end of the data."""

from __future__ import annotations

from stoker.tasks.shown_rows import right_and_wrong, spread


def test_numbers_are_spread_over_all_and_never_repeated() -> None:
    assert spread(0, 6) == []
    assert spread(1, 6) == [0]
    assert spread(3, 6) == [0, 1, 2]
    assert spread(101, 6) == [0, 20, 40, 60, 80, 100]


def test_each_of_a_few_rows_is_shown_once() -> None:
    rows = [{"id": n, "right": n in (1, 4, 7)} for n in range(20)]
    shown = right_and_wrong(rows, 6)
    assert [row["id"] for row in shown if row["right"]] == [1, 4, 7]
    wrong = [row["id"] for row in shown if not row["right"]]
    assert len({*wrong}) == 6
    assert (wrong[0], wrong[-1]) == (0, 19)
