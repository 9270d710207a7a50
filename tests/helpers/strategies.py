"""Hypothesis strategies: algorithms and groupings. trust/cases.py draws whole all-reduces."""

from hypothesis import strategies as st

from hier_allreduce.planning.algorithms import BY_NAME

towers = st.integers(1, 16)
algorithms = st.sampled_from(list(BY_NAME))
turns = st.lists(st.integers(0, 40), max_size=6)
generators = st.randoms(use_true_random=False)  # what draws from them becomes smaller too


def groups(rng, devices):
    """Draw any partition of ``devices`` towers into groups: any sizes, any order."""
    order = rng.sample(range(devices), devices)
    cuts = sorted(rng.sample(range(1, devices), rng.randint(0, devices - 1))) if devices > 1 else []
    return tuple(tuple(order[start:stop]) for start, stop in zip([0, *cuts], [*cuts, devices]))


@st.composite
def choices(draw):
    """Draw ``(devices, algorithm, groups)`` that fit together."""
    devices, algorithm = draw(towers), draw(algorithms)
    grouped = algorithm == "hierarchical" and draw(st.booleans())
    return devices, algorithm, groups(draw(generators), devices) if grouped else None
