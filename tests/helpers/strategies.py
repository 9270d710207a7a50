"""Hypothesis strategies: machines, groupings, and gradients whose sums are exact."""

import numpy as np
from hypothesis import strategies as st

towers = st.integers(1, 16)
algorithms = st.sampled_from(["hierarchical", "tree", "flat"])
turns = st.lists(st.integers(0, 40), max_size=6)
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@st.composite
def groupings(draw, devices):
    """Draw any partition of ``devices`` towers into groups: any sizes, any order."""
    order = draw(st.permutations(range(devices)))
    cuts = sorted(draw(st.sets(st.integers(1, devices - 1)))) if devices > 1 else []
    return tuple(tuple(order[start:stop]) for start, stop in zip([0, *cuts], [*cuts, devices]))


@st.composite
def choices(draw):
    """Draw ``(devices, algorithm, groups)`` that fit together."""
    devices, algorithm = draw(towers), draw(algorithms)
    groups = draw(st.none() | groupings(devices)) if algorithm == "hierarchical" else None
    return devices, algorithm, groups


@st.composite
def problems(draw):
    """Draw ``(values[tower][variable], algorithm, groups)``; sums of the whole numbers are exact in any order."""
    devices, algorithm, groups = draw(choices())
    columns = draw(st.lists(shapes, max_size=4))
    numbers = np.random.RandomState(draw(st.integers(0, 2**32 - 1)))
    values = [[numbers.randint(-99, 99, shape).astype(np.float32) for shape in columns] for _ in range(devices)]
    return values, algorithm, groups
