"""Bytes and tables in text, as the audit prints them."""

import pytest

from hier_allreduce.formatting import amount, count, table


@pytest.mark.parametrize(
    "size, text",
    [(0, "0 B"), (999, "999 B"), (64_000, "64 kB"), (1.5e9, "1.5 GB"), (1e15, "1000 TB")],
)
def test_bytes(size, text):
    assert amount(size) == text


def test_one_and_many():
    assert [count(number, "chunk") for number in (0, 1, 2)] == ["0 chunks", "1 chunk", "2 chunks"]


def test_all_columns_but_the_first_are_aligned_right():
    rows = [("", "ms", "error"), ["a", "1.0–2.5", "BAD"], ("it", 7)]
    assert table(rows).splitlines() == [
        "         ms  error",
        "a   1.0–2.5    BAD",
        "it        7",
    ]
