"""Bytes, seconds and tables in text, as every command prints them."""

import pytest

from hier_allreduce_tools.text import amount, count, duration, rate, table


@pytest.mark.parametrize(
    "size, text",
    [(0, "0 B"), (999, "999 B"), (64_000, "64 kB"), (1.5e9, "1.5 GB"), (1e15, "1000 TB")],
)
def test_bytes(size, text):
    assert amount(size) == text


@pytest.mark.parametrize(
    "size, text",
    [(0, "0 B"), (1000, "1000 B"), (65_536, "64 KiB"), (10 << 20, "10 MiB"), (3 << 29, "1.5 GiB")],
)
def test_bytes_in_powers_of_1024(size, text):
    assert amount(size, binary=True) == text


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


@pytest.mark.parametrize(
    "speed, text", [(24.27e9, "24 GB/s"), (0.419e9, "0.42 GB/s"), (20.8e3, "20.8 kB/s")]
)
def test_bytes_a_second(speed, text):
    assert rate(speed) == text


def test_one_and_many():
    assert [count(number, "chunk") for number in (0, 1, 2)] == ["0 chunks", "1 chunk", "2 chunks"]


def test_columns_of_numbers_are_aligned_right():
    rows = [("name", "bytes", "link"), ("a", "64 kB", "0→1"), ("longer", "7 B", "")]
    assert table(rows).splitlines() == [
        "name    bytes  link",
        "a       64 kB  0→1",
        "longer    7 B",
    ]


def test_all_columns_but_the_first_are_aligned_right_on_request():
    rows = [["", "ms", "error"], ["a", "1.0–2.5", "BAD"], ["it", "7"]]
    assert table(rows, all_right=True).splitlines() == [
        "         ms  error",
        "a   1.0–2.5    BAD",
        "it        7",
    ]
