"""A step of two GPUs that is written here by hand, down to each gap and its reason.

::

    ms        0         10        20        30        40        50
    GPU 0     grad0─────          ░░   sum  update  ░░  metrics───     ░ for the processor
      sends                              └──────┐
    GPU 1     first ░grad1─                      update
      sends                └──────┘
"""

import pytest
from helpers.traces import built_as, sent, step_of

from hier_allreduce import AuditError, Copy, Reduce
from hier_allreduce_tools.cost.cost import cost_of

HOST = "/job:localhost/replica:0/task:0/device:"
SCHEDULE = (Reduce((1,), 0), Copy(0, 1))
BUILT = built_as("hier_allreduce/", ["/gpu:0", "/gpu:1"], [sent("v", SCHEDULE, 250)])
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


PASS, BETWEEN = "pass and other kernels", "between kernels"
TOWERS, PROCESSOR = "waiting for other towers", "waiting for the processor"


def seen(pieces):
    """Return the pieces that took time, to the microsecond."""
    return {piece: round(ms, 3) for piece, ms in pieces.items() if ms > 1e-6}


@pytest.fixture(scope="module")
def found():
    return cost_of(step_of(NODES, STREAMS), [BUILT])


def test_a_pass_ends_with_its_last_gradient_and_other_kernels_follow(found):
    first, second = found.towers
    assert (first.device, second.device) == (f"{HOST}GPU:0", f"{HOST}GPU:1")
    assert (first.pass_end, first.end) == (10, 50)
    assert (second.pass_end, second.end) == (12, 36)
    assert found.pass_end == 12 and found.step == 50 and found.last is first


def test_what_precedes_the_last_pass_end_is_told_by_kind_and_reason(found):
    first, second = found.towers
    assert seen(first.before) == {PASS: 10, TOWERS: 2}
    assert seen(second.before) == {PASS: 9, PROCESSOR: 3}


def test_what_follows_the_last_pass_is_told_so_too(found):
    first, second = found.towers
    on_first = {TOWERS: 8, PROCESSOR: 13, BETWEEN: 4, "sums": 2, "updates": 1, PASS: 10}
    assert seen(first.after) == on_first
    on_second = {TOWERS: 22, PROCESSOR: 0.3 + 0.5, BETWEEN: 0.2, "updates": 1}
    assert seen(second.after) == on_second


def test_links(found):
    assert found.links == ((0, 1, 1, 1000, 6), (1, 0, 1, 1000, 7))
    assert found.links[0].speed == pytest.approx(1000 / 6e-3)
    assert found.bars["copies that it sends"] == [(0, 27, 33), (1, 13, 20)]


def test_without_an_all_reduce_of_known_devices_there_is_an_error():
    def device(op):
        return "/gpu:0"

    with_functions = BUILT._replace(devices=(device, device))
    elsewhere = BUILT._replace(scope="tower0/hier_allreduce/")
    for built in ([], [with_functions], [elsewhere]):
        with pytest.raises(AuditError, match="no sum of an all-reduce of this graph"):
            cost_of(step_of(NODES, STREAMS), built)


def test_a_trace_without_streams_says_so():
    """As TensorFlow writes it if it cannot use CUPTI."""
    with pytest.raises(AuditError, match=r"no kernel on a tower's device.*could not use CUPTI"):
        cost_of(step_of(NODES, []), [BUILT])


def test_the_copies_of_variables_after_an_update_are_no_all_reduce(found):
    gathered = BUILT._replace(scope="gather/", tensors=(sent("v", (Copy(0, 1),), 10_000),))
    nodes = [
        *NODES,
        ("GPU:0", "value = ReadVariableOp(^update0)", 30, 30, 31),
        ("GPU:1", "gather/v/copy = Identity(value/_21)", 41, 41, 42),
    ]
    streams = [*STREAMS, ("0/stream:13", "value:ReadVariableOp", "", 31, 32)]
    told = cost_of(step_of(nodes, streams), [BUILT, gathered])
    assert [tower.pass_end for tower in told.towers] == [10, 12]
    assert [tower.after["sums"] for tower in told.towers] == [2, 0]


def test_a_step_in_the_order_of_another_machine_is_the_same(found):
    turned = step_of(reversed(NODES), reversed(STREAMS))
    assert cost_of(turned, [BUILT]) == found


# ---- statistics in a forward pass --------------------------------------------------------------

STATISTICS = BUILT._replace(scope="hier_allreduce_1/")
WITH_STATISTICS = [
    ("GPU:0", "hier_allreduce_1/v/sum = AddN(mean0, mean1/_23)", 1, 1, 1.5),
    ("GPU:1", "hier_allreduce_1/v/copy = Identity(hier_allreduce_1/v/sum/_25)", 2, 2, 2.2),
    ("GPU:0", "mean0 = Mean()", -1, -1, -0.5),
    ("GPU:1", "mean1 = Mean()", -1, -1, -0.5),
    ("GPU:0", "grad0 = Mul(hier_allreduce_1/v/sum, x/_11)", 2, 3, 4),
    ("GPU:1", "grad1 = Mul(hier_allreduce_1/v/copy, first, x/_13)", 6, 6.5, 7),
]


def test_an_all_reduce_in_the_forward_pass_does_not_end_it(found):
    replaced = [label.split(" = ")[0] for _, label, *_ in WITH_STATISTICS]
    nodes = [row for row in NODES if row[1].split(" = ")[0] not in replaced] + WITH_STATISTICS
    larger = STATISTICS._replace(tensors=(sent("v", SCHEDULE, 10_000),))
    unknown = BUILT._replace(tensors=(sent("v", SCHEDULE, None),))
    two = STATISTICS._replace(tensors=(sent("v", SCHEDULE, 4), sent("square", SCHEDULE, 4)))
    for all_reduces in (
        [two, BUILT],
        [STATISTICS, BUILT],
        [BUILT, STATISTICS._replace(tensors=(sent("v", SCHEDULE, None),))],
        [larger, BUILT],
        [STATISTICS, unknown],
    ):
        with_statistics = cost_of(step_of(nodes, STREAMS), all_reduces)
        assert [tower.pass_end for tower in with_statistics.towers] == [10, 12]
        after = [tower.after for tower in with_statistics.towers]
        assert after == [tower.after for tower in found.towers]
