"""The trace of an executed step: every planned copy is in it, under its chunk's name, with the prediction beside it."""

import json

import pytest
import tensorflow as tf
from helpers.graphs import consumed_in_place, cpus, tf1, traced

from hier_allreduce import AuditError, HierAllreduceError, Strategy, allreduce_grads, audit
from hier_allreduce.inspect import trace_step


@pytest.fixture(scope="module")
def step():
    """Three variables on four devices, planned for a machine: the graph and a traced step of it."""
    devices = cpus(4)
    strategy = Strategy(topology="p3.8xlarge")
    with tf.Graph().as_default() as graph:
        rows = []
        for device in devices:
            with tf.device(device):  # random numbers cannot be folded into the sums
                large = tf1.random_uniform([64, 64], dtype=tf.float64)  # a bucket for each dtype
                rows.append([large, tf1.random_uniform([3]), tf1.random_uniform([5])])
        reduced = allreduce_grads(rows, devices, True, strategy=strategy)
        return graph, traced(consumed_in_place(reduced), trace_level=tf1.RunOptions.FULL_TRACE)


def test_every_planned_copy_is_in_the_trace_with_the_prediction(step, tmp_path):
    graph, metadata = step
    audited = audit(metadata, graph)
    trace = audited.trace(str(tmp_path / "step.json"))
    executed, predicted = trace.runs
    assert (executed.kind, predicted.kind) == ("executed", "predicted")
    (call,) = audited.calls
    planned = [(src, dst) for (src, dst), times in call.plan.transfers().items() for _ in range(times)]
    for run in trace.runs:
        assert sorted((bar.src, bar.dst) for bar in run.copies) == sorted(planned)
        assert all(bar.ready <= bar.start <= bar.end for bar in run.bars)
    assert sorted(bar.name for bar in executed.copies) == sorted(bar.name for bar in predicted.copies)
    assert {bar.size for bar in executed.copies} == {64 * 64 * 8, 3 * 4 + 5 * 4}
    assert executed.begin < executed.last_gradient < executed.end
    assert executed.bound == predicted.bound
    names = " ".join(bar.name for bar in executed.bars)
    assert "+ 1 " in names and "→" in names and " sum on " in names  # the bucket of two variables
    assert all(bar.op in {op.name for op in graph.get_operations()} for bar in executed.copies)
    text = str(trace)
    for part in ("exposed after the last gradient", "busiest sender", "GB/s", "share one memory"):
        assert part in text
    events = json.loads((tmp_path / "step.json").read_text(encoding="utf-8"))["traceEvents"]
    threads = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"executed: copies out", "executed: sums", "predicted: copies out", "predicted: sums"} <= threads


def test_another_machine_can_be_predicted(step, tmp_path):
    graph, metadata = step
    slow = audit(metadata, graph).trace(str(tmp_path / "a.json"), topology="pcie-pairs").runs[1]
    fast = audit(metadata, graph).trace(str(tmp_path / "b.json")).runs[1]
    assert slow.seconds > fast.seconds
    with pytest.raises(HierAllreduceError, match="no-such-machine"):
        audit(metadata, graph).trace(str(tmp_path / "c.json"), topology="no-such-machine")


def test_this_machine_can_be_predicted(step, tmp_path):
    graph, metadata = step
    predicted = audit(metadata, graph).trace(str(tmp_path / "a.json"), topology="this machine").runs[1]
    assert (predicted.kind, len(predicted.devices)) == ("predicted", 4)


def test_missing_times_are_told_from_missing_partitions(step, tmp_path):
    graph, metadata = step
    bare = tf1.RunMetadata()
    bare.partition_graphs.extend(metadata.partition_graphs)
    with pytest.raises(AuditError, match="FULL_TRACE"):
        audit(bare, graph).trace(str(tmp_path / "step.json"))
    assert not list(tmp_path.iterdir())


def test_any_step_is_traced_by_the_names_of_its_ops(step):
    _, metadata = step
    (run,) = trace_step(metadata, cpus(4)).runs
    assert {bar.kind for bar in run.bars} == {"copy", "sum"}
    assert run.last_gradient == 0 and "exposed" not in run.summary()


# ---- the records of GPUs, as TensorFlow's sources write them: no GPU is here -----------------------------


def gpu_step(records):
    """The metadata of a step in which GPU 0 sends ``a`` and ``b``, of 1000 floats each, to GPU 1."""
    metadata, devices = tf1.RunMetadata(), [f"/job:localhost/replica:0/task:0/device:GPU:{k}" for k in (0, 1)]
    parts = [metadata.partition_graphs.add() for _ in devices]
    stats = [metadata.step_stats.dev_stats.add(device=device) for device in devices]
    for number, name in enumerate("ab"):
        parts[0].node.add(name=name, op="AddN", device=devices[0])
        ends = [
            parts[0].node.add(name=f"{name}/send", op="_Send", device=devices[0], input=[name]),
            parts[1].node.add(name=f"{name}/recv", op="_Recv", device=devices[1]),
        ]
        for end in ends:
            for key, value in zip(("send_device", "recv_device", "tensor_name"), (*devices, f"edge_{number}_{name}")):
                end.attr[key].s = value.encode()
        parts[1].node.add(name=f"{name}/sum", op="AddN", device=devices[1], input=[f"{name}/recv"])
        made = stats[0].node_stats.add(node_name=name, all_start_micros=100 + number, op_end_rel_micros=5)
        output = made.output.add(slot=0)
        output.tensor_description.dtype = tf.float32.as_datatype_enum
        output.tensor_description.shape.dim.add(size=1000)
        stats[1].node_stats.add(node_name=f"{name}/sum", all_start_micros=300, op_end_rel_micros=5)
    kernels = metadata.step_stats.dev_stats.add(device="/device:GPU:0/stream:all")
    for name, start in (("a", 110), ("b", 120)):
        kernels.node_stats.add(node_name=name, all_start_micros=start, op_end_rel_micros=9)
    memcpy = metadata.step_stats.dev_stats.add(device="/device:GPU:0/memcpy")
    for name, label, start, end in records:
        memcpy.node_stats.add(
            node_name=name, timeline_label=label, all_start_micros=start, op_end_rel_micros=end - start
        )
    return metadata


@pytest.mark.parametrize(
    "records",
    [
        [("edge_1_b", "edge_1_b bytes:4000 to device:1", 150, 160), ("edge_0_a", "edge_0_a bytes:4000", 130, 150)],
        [
            ("MemcpyP2P", "MemcpyP2P kind:unknown size:4000 dest:1 async:1", 150, 160),
            ("MemcpyP2P", "MemcpyP2P kind:unknown size:4000 dest:1 async:1", 130, 150),
            ("MemcpyH2D", "MemcpyH2D kind:pageable size:4000 dest:0 async:1", 125, 126),
        ],
    ],
    ids=["1.15", "2"],
)
def test_a_gpus_records_give_exact_copies_and_kernels(records):
    (run,) = trace_step(gpu_step(records), ["/gpu:0", "/gpu:1"]).runs
    first, second = sorted(run.copies, key=lambda bar: bar.start)
    microseconds = [round(t * 1e6) for bar in (first, second) for t in (bar.ready, bar.start, bar.end)]
    assert microseconds == [119, 130, 150, 129, 150, 160]  # ready when the kernel ends, not when the host launched it
    assert first.exact and second.exact and (first.op, second.op) == ("a", "b")
    assert run.links() == {(0, 1): (8000, pytest.approx(30e-6))}
