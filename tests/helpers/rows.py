"""K rows of N gradients, or of what belongs to them."""

import operator

import numpy as np


def for_each(function, rows):
    """Return the K×N results of a function for K×N values."""
    return [list(map(function, row)) for row in rows]


def without_none(row):
    """Return a row without the gradients that are None."""
    return [grad for grad in row if grad is not None]


def variables_of(rows):
    """Return the K×N variables of K rows of N (gradient, variable) pairs."""
    return for_each(operator.itemgetter(1), rows)


def powers_of_two(towers, variables, size=2):
    """Return K×N arrays: 2^k on tower k, so that a sum shows who is in it, and how often.

    Variable n has n added, so that no two variables have the same values.
    """
    rows = []
    for tower in range(towers):
        rows.append([np.full([size], 2.0**tower + n, "float32") for n in range(variables)])
    return rows
