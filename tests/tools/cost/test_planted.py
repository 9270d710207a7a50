"""The cost of a step on emulated GPUs in timed mode: its pieces, and the faults planted in it."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import timed_step
from helpers.graphs import gpus_or_cpus, gradients_on, session, tf1
from helpers.real_gpus import ARE_EMULATED
from helpers.timed_step import SCALE, TOWERS, VARIABLES

from hier_allreduce import AuditError, allreduce_grads
from hier_allreduce_tools.cost import cost

if not ARE_EMULATED:
    pytest.skip("needs emulated GPUs: pytest --devices gpu", allow_module_level=True)

PASS_MS = 2 * VARIABLES * timed_step.KERNEL_US / 1e3
COPY_MS = 4 * timed_step.ELEMENTS / timed_step.GBS / 1e6


def traced(tmp_path_factory, algorithm, links, host_us=0.0, late=-1):
    """Return the cost of a step, in stretched ms, and the spans of its process."""
    folder = tmp_path_factory.mktemp("step")
    metadata, spans = timed_step.run(folder, algorithm, links, host_us, late)
    with tf.Graph().as_default() as graph:
        timed_step.build(algorithm, late)
    return cost(metadata, graph), spans


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    return traced(tmp_path_factory, "rotating", timed_step.links())


@pytest.fixture(scope="module")
def slow_link(tmp_path_factory):
    return traced(tmp_path_factory, "rotating", timed_step.links((2, 3), timed_step.GBS / 50))[0]


@pytest.fixture(scope="module")
def slow_processor(tmp_path_factory):
    return traced(tmp_path_factory, "rotating", timed_step.links(), 3.0 * timed_step.KERNEL_US)[0]


@pytest.fixture(scope="module", params=["rotating", "to_tower_0"])
def late_tower(tmp_path_factory, request):
    return traced(tmp_path_factory, request.param, timed_step.links(), late=3)[0]


def test_the_pieces_add_up_to_the_step(usual):
    """The step is taken from the emulator's own trace."""
    found, spans = usual
    begins = []
    for tower in range(TOWERS):
        runs = [span.begin for span in spans if f"tower{tower}/forward0_burn" in span.what]
        begins.append(max(runs))
    own = [span for span in spans if span.begin >= min(begins)]
    step = 1e3 * (max(span.end for span in own) - min(begins))
    assert found.step == pytest.approx(step, rel=0.02)
    last = found.last
    pieces = [*last.before.values(), *last.after.values()]
    assert sum(pieces) == pytest.approx(step, rel=0.02)
    assert last.before["pass"] == pytest.approx(SCALE * PASS_MS, rel=0.02)


def test_all_copies_are_found_with_their_links(usual):
    found = usual[0]
    assert [(link.src, link.dst) for link in found.links] == [
        (src, dst) for src in range(TOWERS) for dst in range(TOWERS) if src != dst
    ]
    for link in found.links:
        assert link.copies == 2 * VARIABLES / TOWERS
        assert link.bytes == link.copies * 4 * timed_step.ELEMENTS
        assert link.speed == pytest.approx(1e9 * timed_step.GBS / SCALE, rel=0.05)


def test_each_chunk_is_everywhere_before_the_step_ends(usual, slow_link, slow_processor):
    for found in (usual[0], slow_link, slow_processor):
        assert len(found.chunks) == VARIABLES
        assert min(found.chunks.values()) > 0 and max(found.chunks.values()) < found.step


def test_without_a_fault_there_is_no_word_of_one(usual):
    found = usual[0]
    assert found.remedy == ""
    assert "waiting for copies" in found.summary and "GPU" in found.summary


def test_a_slow_link_is_named(slow_link):
    assert slow_link.remedy.startswith("The copies from GPU 2 to GPU 3 reach 0.04 GB/s, others 2 G")
    assert slow_link.summary.endswith(slow_link.remedy)


def test_a_late_tower_is_named_whichever_ends_last(late_tower):
    lag = float(late_tower.remedy[len("GPU 3 ends its pass ") :].split()[0])
    assert late_tower.remedy.startswith("GPU 3 ends its pass ")
    assert lag == pytest.approx(SCALE * PASS_MS, rel=0.05)
    assert late_tower.step - late_tower.pass_end < lag / 2
    assert "after the others" in late_tower.summary


def test_a_processor_that_holds_the_launches_is_named(slow_processor):
    assert "for the processor, which launches its kernels too late" in slow_processor.remedy
    assert slow_processor.last.before["processor"] > slow_processor.last.before["pass"]


def test_a_trace_without_streams_says_so(graph):
    """TensorFlow gets none from emulated GPUs, as from real ones without CUPTI."""
    devices = gpus_or_cpus(2)
    reduced = allreduce_grads(gradients_on(devices, [[np.ones([2], "float32")]] * 2), devices)
    seen = tf1.RunMetadata()
    with session() as sess:
        sess.run(
            reduced,
            options=tf1.RunOptions(trace_level=tf1.RunOptions.FULL_TRACE),
            run_metadata=seen,
        )
    with pytest.raises(AuditError, match=r"no kernel on a tower's device.*could not use CUPTI"):
        cost(seen, graph)
