"""bench updates: where the slots are, as executed."""

import pytest
from helpers.graphs import cpus

from hier_allreduce.bench.case import Case
from hier_allreduce.bench.models import GradientShape
from hier_allreduce.bench.slot_memory import compare_updates
from hier_allreduce.errors import BenchError

SHAPES = tuple(GradientShape(f"layer{n}/w", (256, 100), "float32") for n in range(4))


def test_slots_exist_on_every_device_or_once():
    compared = compare_updates(Case(SHAPES, tuple(cpus(4)), True), "adam", 2)
    once = 2 * 4 * 256 * 100 * 4  # two slots, four variables, float32
    powers = 2 * 4  # beta1 and beta2, wherever they are
    assert [sorted(sizes)[0] for sizes in compared.slot_bytes.values()] == [once, once // 4]
    assert sum(compared.slot_bytes["replicated"]) == 4 * once + powers
    assert sum(compared.slot_bytes["main"]) == once + powers
    assert "update='main' takes" in compared.text() and "0.8 MB" in compared.text()


def test_an_unknown_optimizer_is_refused():
    with pytest.raises(BenchError, match="did you mean 'adam'"):
        compare_updates(Case(SHAPES, tuple(cpus(2))), "adm", 1)
