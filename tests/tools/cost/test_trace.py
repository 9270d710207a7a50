"""A step of two GPUs that is written here by hand, down to each gap and its reason.

::

    ms        0         10        20        30        40        50
    GPU 0     grad0─────          ░░   sum  update  ░░  metrics───     ░ for the processor
      sends                              └──────┐
    GPU 1     first ░grad1─                      update
      sends                └──────┘
"""

import pytest
from tensorflow.core.framework import step_stats_pb2

from hier_allreduce import Copy, Reduce
from hier_allreduce_tools.cost.cost import cost_of
from hier_allreduce.graph.record import AllReduce, SentTensor

HOST = "/job:localhost/replica:0/task:0/device:"
SCHEDULE = (Reduce((1,), 0), Copy(0, 1))
BUILT = AllReduce(
    "hier_allreduce/",
    "flat",
    ("/gpu:0", "/gpu:1"),
    1,
    (SentTensor("v", ("w",), SCHEDULE, 250, False, ""),),
)
NODES = [
    # device, label, when it was scheduled, begun and done by the processor
    ("CPU:0", "x = _Arg()", -5, -5, -4),
    ("GPU:0", "grad0 = Fill(x/_11)", -2, -1, -0.5),
    ("GPU:0", "[GPU_0_bfc 1kB] hier_allreduce/v/sum = AddN(grad0, grad1/_3)", 20, 21, 22),
    ("GPU:0", "update0 = ResourceApplyGradientDescent(w0, hier_allreduce/v/sum:0)", 22, 29, 29.5),
    ("GPU:0", "metrics = Mean(grad0, ^hier_allreduce/v/sum)", 23, 39, 39.5),
    ("GPU:1", "first = Fill()", -2, -1, -0.5),
    ("GPU:1", "grad1 = Mul(first, x/_13)", 6, 6.5, 7),
    ("GPU:1", "hier_allreduce/v/copy = Identity(hier_allreduce/v/sum/_5)", 33.5, 33.6, 33.7),
    ("GPU:1", "update1 = ResourceApplyGradientDescent(w1, hier_allreduce/v/copy)", 34, 34.5, 34.8),
]
STREAMS = [
    # stream, what ran, its label, begin, end
    ("0/stream:13", "grad0:Fill", "", 0, 10),
    ("0/stream:13", "hier_allreduce/v/sum:AddN", "", 25, 27),
    ("0/stream:13", "update0:ResourceApplyGradientDescent", "", 30, 31),
    ("0/stream:13", "metrics:Mean", "", 40, 50),
    ("0/stream:14<MemcpyH2D>", "x/_10:_HostSend", "MemcpyH2D size:8", -3, -2),
    ("0/stream:16<MemcpyP2P>", "hier_allreduce/v/sum/_4:_Send", "MemcpyP2P size:1000", 27, 33),
    ("0/stream:all", "grad0:Fill", "", 0, 10),
    ("0/memcpy", "hier_allreduce/v/sum/_4:_Send", "MemcpyP2P size:1000", 27, 33),
    ("1/stream:13", "first:Fill", "", 0, 4),
    ("1/stream:13", "grad1:Mul", "", 7, 12),
    ("1/stream:13", "update1:ResourceApplyGradientDescent", "", 35, 36),
    ("1/stream:16<MemcpyP2P>", "grad1/_2:_Send", "MemcpyP2P size:1000", 13, 20),
]
START = 1_700_000_000_000_000  # µs


def stats():
    written = step_stats_pb2.StepStats()
    for device, label, scheduled, begun, done in NODES:
        part = written.dev_stats.add(device=HOST + device)
        part.node_stats.add(
            node_name=label.split(" = ")[0].split("] ")[-1],
            timeline_label=label,
            scheduled_micros=START + round(1000 * scheduled),
            all_start_micros=START + round(1000 * begun),
            op_end_rel_micros=round(1000 * (done - begun)),
            all_end_rel_micros=round(1000 * (done - begun)),
        )
    for stream, name, label, begin, end in STREAMS:
        part = written.dev_stats.add(device=f"/device:GPU:{stream}")
        part.node_stats.add(
            node_name=name,
            timeline_label=label,
            all_start_micros=START + 1000 * begin,
            op_end_rel_micros=1000 * (end - begin),
            all_end_rel_micros=1000 * (end - begin),
        )
    return written


@pytest.fixture(scope="module")
def found():
    return cost_of(stats(), [BUILT])


def test_a_pass_ends_with_its_last_gradient_and_other_kernels_follow(found):
    first, second = found.towers
    assert (first.device, second.device) == (f"{HOST}GPU:0", f"{HOST}GPU:1")
    assert (first.pass_end, first.end) == (10, 50)
    assert (second.pass_end, second.end) == (12, 36)
    assert found.step == 50 and found.last is first


def test_gaps_have_reasons(found):
    first, second = found.towers
    assert first.busy == {"pass": 10} and first.gaps == {}
    assert second.busy == {"pass": 9}
    assert second.gaps == pytest.approx({"input": 2, "processor": 1})


def test_what_follows_the_pass_is_told_by_kind(found):
    first, second = found.towers
    assert first.after == pytest.approx({"copies": 10, "sum": 7, "update": 4, "pass": 19})
    assert first.processor_after == pytest.approx({"sum": 2, "update": 2.5, "pass": 8.5})
    assert first.updates_after == second.updates_after == 1
    assert second.after == pytest.approx({"copies": 22, "update": 2})


def test_a_chunk_has_its_times(found):
    (chunk,) = found.chunks
    assert chunk == ("v", 0, 2, 12, 20, 27, 33, 36) and chunk.complete == 33


def test_links_and_processor(found):
    assert found.links == ((0, 1, 1, 1000, 6), (1, 0, 1, 1000, 7))
    assert found.links[0].speed == pytest.approx(1000 / 6e-3)
    assert found.processor_ahead == 1  # median of 1, 1, 1, 0.5


def test_without_a_record_an_all_reduce_begins_where_a_tower_reads_another(found):
    unknown = cost_of(stats())
    assert [tower.pass_end for tower in unknown.towers] == [10, 12]
    assert unknown.chunks == () and unknown.links == found.links
    assert unknown.towers[0].after == found.towers[0].after


def test_a_step_in_the_order_of_another_machine_is_the_same(found):
    written = stats()
    parts = sorted(written.dev_stats, key=lambda part: str(part), reverse=True)
    turned = step_stats_pb2.StepStats(dev_stats=parts)
    assert cost_of(turned, [BUILT]) == found
