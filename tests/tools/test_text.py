"""Bytes, seconds and tables in text, as every command prints them."""

import pytest

from hier_allreduce_tools.text import amount, count, duration, table


@pytest.mark.parametrize(
    "size, text",
    [(0, "0 B"), (999, "999 B"), (64_000, "64 kB"), (1.5e9, "1.5 GB"), (1e15, "1000 TB")],
)
def test_bytes(size, text):
    assert amount(size) == text


@pytest.mark.parametrize(
    "seconds, text",
    [
        (7.6e-5, "76 µs"),
        (0.00376, "3.8 ms"),
        (0.9996, "1000 ms"),
        (12, "12 s"),
        (1234, "1200 s"),
        (0, "0 µs"),
        (1.7e-11, "1.7e-05 µs"),
    ],
)
def test_seconds(seconds, text):
    assert duration(seconds) == text


def test_one_and_many():
    assert [count(number, "chunk") for number in (0, 1, 2)] == ["0 chunks", "1 chunk", "2 chunks"]


def test_all_columns_but_the_first_are_aligned_right():
    rows = [["", "ms", "error"], ["a", "1.0–2.5", "BAD"], ["it", "7", ""]]
    assert table(rows).splitlines() == [
        "         ms  error",
        "a   1.0–2.5    BAD",
        "it        7",
    ]
