"""Numbers, names and tables, as every command reads and prints them."""

from hier_allreduce_tools.text import names_in, rounded, table


def test_numbers_have_two_digits_and_no_exponent():
    assert [rounded(number) for number in (0.419, 24.27, 1234.0)] == ["0.42", "24", "1200"]


def test_all_columns_but_the_first_are_aligned_right():
    rows = [["", "ms", "error"], ["a", "1.0–2.5", "BAD"], ["it", "7", ""]]
    assert table(rows).splitlines() == [
        "         ms    error",
        "a   1.0–2.5      BAD",
        "it        7",
    ]


def test_names_are_taken_once():
    assert names_in("a,b,a") == ["a", "b"]
