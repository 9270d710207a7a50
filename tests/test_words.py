"""Bytes, seconds and tables in words, as every command and the audit print them."""

import pytest

from hier_allreduce.words import amount, count, duration, table


@pytest.mark.parametrize("size, words", [(0, "0 B"), (999, "999 B"), (64_000, "64 kB"), (1.5e9, "1.5 GB")])
def test_bytes(size, words):
    assert amount(size) == words


@pytest.mark.parametrize("seconds, words", [(7.6e-5, "76 µs"), (0.00376, "3.76 ms"), (12, "12 s"), (0, "0 µs")])
def test_seconds(seconds, words):
    assert duration(seconds) == words


def test_one_and_many():
    assert [count(number, "chunk") for number in (0, 1, 2)] == ["0 chunks", "1 chunk", "2 chunks"]


def test_columns_of_numbers_are_set_to_the_right():
    rows = [("name", "bytes", "way"), ("a", "64 kB", "0→1"), ("longer", "7 B", "")]
    assert table(rows).splitlines() == ["name    bytes  way", "a       64 kB  0→1", "longer    7 B"]


def test_all_columns_but_the_first_are_set_to_the_right_on_request():
    rows = [["", "ms", "error"], ["a", "1.0–2.5", "BAD"], ["it", "7"]]
    assert table(rows, all_right=True).splitlines() == ["         ms  error", "a   1.0–2.5    BAD", "it        7"]
