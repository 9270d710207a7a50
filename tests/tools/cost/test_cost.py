"""The cost of a step: pieces of traces of a real GPU, computed here a second time, and of runs."""

import json
import re
from collections import defaultdict
from typing import DefaultDict

import pytest
import tensorflow as tf
from helpers import traces
from helpers.graphs import config, session, tf1

from hier_allreduce import (
    AuditError,
    HierAllreduceError,
    Strategy,
    allreduce_grads,
    allreduce_grads_and_vars,
)
from hier_allreduce_tools.cost import CostHook, cost
from hier_allreduce_tools.cost.cost import cost_of

OURS_BUSY = "h100-ours-0.5"
# TensorFlow 1.15 notes the end of an op a few microseconds apart in two places
TO_THE_MICROSECOND = 0.0015 if tf.__version__.startswith("2") else 0.1


@pytest.fixture(scope="module", params=traces.NAMES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def found(name):
    return cost_of(traces.step_stats(name), traces.all_reduces(name))


class Hand:
    """A trace as a person reads it, who knows the names in this one program."""

    def __init__(self, name):
        self.nodes = {}
        self.kernels = defaultdict(list)  # by stream
        self.sends = {}  # (source, number): (stream, begin, end, bytes)
        for row in traces.rows(name):
            if row.device.startswith("/job:"):
                self.nodes[row.name] = row
                continue
            stream = int(re.findall(r"stream:(\d+)", row.device)[0])
            op = row.name.rpartition(":")[2]
            node = row.name[: -len(op) - 1]
            times = (row.begin / 1e3, (row.begin + row.end) / 1e3)
            if op == "_Send":
                source, number = node.rsplit("/_", 1)
                self.sends[source, int(number)] = (stream, *times, int(row.label[len("size:") :]))
            else:
                self.kernels[stream].append((*times, node, op))
        self.zero = min(begin for works in self.kernels.values() for begin, *_ in works)
        self.stream = {}
        for stream, works in self.kernels.items():
            towers = {int(n) for *_, node, _ in works for n in re.findall(r"^c\d/tower(\d)/", node)}
            (tower,) = towers
            self.stream[tower] = stream

    def works(self, tower):
        shifted = []
        for begin, end, node, op in sorted(self.kernels[self.stream[tower]]):
            shifted.append((begin - self.zero, end - self.zero, node, op))
        return shifted

    def pass_end(self, tower):
        """Gradients are those of tf.fill."""
        return max(end for _, end, _, op in self.works(tower) if op == "Fill")

    def busy(self, tower, until):
        """Milliseconds with a kernel."""
        busy = now = 0.0
        for begin, end, *_ in self.works(tower):
            begin, end = max(begin, now), min(end, until)
            busy += max(0.0, end - begin)
            now = max(now, end)
        return busy


@pytest.fixture(scope="module")
def hand(name):
    return Hand(name)


# ---- one H100, cut into 8 logical GPUs ---------------------------------------------------------


def test_passes_and_steps_end_when_the_streams_say_so(found, hand):
    assert len(found.towers) == 8
    for number, tower in enumerate(found.towers):
        works = hand.works(number)
        assert tower.pass_end == pytest.approx(hand.pass_end(number), abs=TO_THE_MICROSECOND)
        assert tower.end == pytest.approx(max(end for _, end, *_ in works), abs=TO_THE_MICROSECOND)
    assert found.step == max(tower.end for tower in found.towers)
    assert found.pass_end == max(tower.pass_end for tower in found.towers)


def test_the_pieces_of_each_tower_add_up_to_its_step(found, hand):
    for number, tower in enumerate(found.towers):
        before = min(tower.end, found.pass_end)
        assert sum(tower.before.values()) == pytest.approx(before, abs=TO_THE_MICROSECOND)
        assert sum(tower.after.values()) == pytest.approx(tower.end - before, abs=0.002)
        busy = hand.busy(number, found.pass_end)
        waits = [name for name in tower.before if name.startswith(("waiting", "between"))]
        idle = sum(tower.before[wait] for wait in waits)
        assert before - idle == pytest.approx(busy, abs=TO_THE_MICROSECOND)


def test_kernels_in_the_pass_have_the_kinds_of_their_ops(found, hand):
    kinds = {
        "pack": "packing",
        "sum": "sums",
        "mean": "sums",
        "unpack": "unpacking",
        "joined": "unpacking",
    }
    for number, tower in enumerate(found.towers):
        busy: DefaultDict[str, float] = defaultdict(float)
        for begin, end, node, op in hand.works(number):
            name = re.sub(r"_\d+$", "", node.rpartition("/")[2])
            is_update = op == "ResourceApplyGradientDescent"
            kind = "updates" if is_update else kinds.get(name, "pass and other kernels")
            busy[kind] += max(0.0, min(end, found.pass_end) - begin)
        for kind, ms in busy.items():  # some kernels overlap by a microsecond
            assert tower.before[kind] == pytest.approx(ms, abs=0.01)


def test_each_sender_sends_for_as_long_as_its_stream_says(found, hand):
    for number in range(8):
        # TensorFlow makes four streams for a GPU, and sends on the last of them
        sends = [send for send in hand.sends.values() if send[0] == hand.stream[number] + 3]
        links = [link for link in found.links if link.src == number]
        ms = sum(end - begin for _, begin, end, _ in sends)
        assert sum(link.ms for link in links) == pytest.approx(ms, abs=TO_THE_MICROSECOND)
        assert sum(link.bytes for link in links) == sum(size for *_, size in sends)
        assert sum(link.copies for link in links) == len(sends)


def test_the_numbers_that_were_read_by_hand():
    busy = cost_of(traces.step_stats(OURS_BUSY), traces.all_reduces(OURS_BUSY))
    tower = busy.towers[0]
    assert (round(tower.pass_end, 1), round(tower.end, 1)) == (100.6, 103.7)
    assert round(busy.pass_end, 1) == 102.5
    waits = "waiting for the processor 1.5, waiting for other towers 0.1, between kernels 0.1"
    assert busy.summary == f"step 104.4 ms; after the pass 1.9 ms: {waits}, updates 0.1"
    assert not busy.remedy


def test_json_has_the_numbers_of_the_step(found):
    read = json.loads(found.to_json())
    assert read["summary"] == found.summary and read["step"] == found.step
    assert [tower["pass_end"] for tower in read["towers"]] == [t.pass_end for t in found.towers]
    assert len(read["links"]) == len(found.links)
    assert "bars" not in read


@pytest.mark.parametrize("name", [OURS_BUSY], indirect=True)
def test_the_picture_is_written_in_formats_of_matplotlib(found, tmp_path):
    for ending in ("png", "svg"):
        found.draw(tmp_path / f"cost.{ending}")
    text = (tmp_path / "cost.svg").read_text()
    assert all(words in text for words in ("GPU 7", "updates", "sums", "copies that it sends"))


@pytest.mark.parametrize("name", [OURS_BUSY], indirect=True)
def test_it_prints_a_line_and_a_table_of_towers(found):
    lines = str(found).splitlines()
    assert lines[0] == found.summary
    assert sum(line.startswith("GPU ") for line in lines) == 8


# ---- runs --------------------------------------------------------------------------------------

STEP_ON_CPU = pytest.mark.cpu_only("emulated GPUs have no streams in a trace: see test_trace.py")
TRACED = tf1.RunOptions(trace_level=tf1.RunOptions.FULL_TRACE)


def training_step(towers=3, wire=None):
    """Add a step of matrix products to the graph, and return its updates."""
    devices = [f"/cpu:{tower}" for tower in range(towers)]
    rows = []
    for tower, device in enumerate(devices):
        with tf.device(device), tf1.variable_scope(f"tower{tower}"):
            values = tf.ones([100, 100])
            variables = []
            for layer in range(4):
                matrix = tf1.get_variable(f"w{layer}", [100, 100], use_resource=True)
                values = tf.nn.relu(tf.matmul(values, matrix))
                variables.append(matrix)
            rows.append(list(zip(tf.gradients(tf.reduce_sum(values), variables), variables)))
    updates = []
    one_by_one = Strategy(chunk_bytes=0, wire_dtype=wire)
    reduced = allreduce_grads_and_vars(rows, devices, average=True, strategy=one_by_one)
    for device, row in zip(devices, reduced):
        with tf.device(device):
            optimizer = tf1.train.GradientDescentOptimizer(0.1)
            updates += [optimizer.apply_gradients([pair]) for pair in row]
    return tf.group(*updates)


def metadata_of(fetched):
    seen = tf1.RunMetadata()
    with session() as sess:
        sess.run(tf1.global_variables_initializer())
        for _ in range(2):
            sess.run(fetched)
        sess.run(fetched, options=TRACED, run_metadata=seen)
    return seen


def ends_in(metadata):
    """Return the nodes on CPU devices, each with its end in ms after the first start."""
    stats = [node for device in metadata.step_stats.dev_stats for node in device.node_stats]
    zero = min(node.all_start_micros for node in stats)
    return [
        (node.node_name, (node.all_start_micros - zero + node.op_end_rel_micros) / 1e3)
        for node in stats
    ]


@STEP_ON_CPU
@pytest.mark.parametrize("wire", [None, "float16"])
def test_a_step_on_cpu_devices_is_told_from_its_ops(graph, wire):
    metadata = metadata_of(training_step(wire=wire))
    found = cost(metadata, graph)
    assert len(found.towers) == 3 and found.links == ()
    for number, tower in enumerate(found.towers):
        assert tower.device.endswith(f"CPU:{number}")
        pieces = [*tower.before.values(), *tower.after.values()]
        assert sum(pieces) == pytest.approx(tower.end)
        assert 0 < tower.before["pass and other kernels"] <= tower.pass_end
        assert tower.pass_end <= tower.end <= found.step
    # In 16 bits each tower's result is made wide again, which is no part of the sum.
    of_sum = re.compile(r"^hier_allreduce/.*[/_](column|sent|sum|mean)(_\d+)?$")
    ends = sorted(end for node, end in ends_in(metadata) if of_sum.match(node))
    seen = sorted(end for _, _, end in found.bars["sums"])
    assert len(seen) == len(ends) >= 8
    # TensorFlow 1.15 takes ends by another clock, and a busy machine lets the two differ.
    if tf.__version__ >= "2":
        assert seen == pytest.approx(ends, abs=TO_THE_MICROSECOND)
    assert re.match(r"step [\d.]+ ms; after the pass [\d.]+ ms(: |\. |$)", found.summary)
    assert "GPU" not in str(found) and "cop" not in str(found)


@STEP_ON_CPU
def test_an_all_reduce_in_the_forward_pass_does_not_end_it(graph):
    devices = ["/cpu:0", "/cpu:1"]
    values = []
    for device in devices:
        with tf.device(device):
            values.append(tf1.random_normal([100, 100]))
    means = allreduce_grads([[tf.reduce_mean(value, 0)] for value in values], devices)
    rows = []
    for tower, device in enumerate(devices):
        with tf.device(device):
            value = values[tower] - means[tower][0]
            for _ in range(10):
                value = tf.tanh(tf.matmul(value, value), name=f"in_pass_of_{tower}")
            rows.append([value])
    metadata = metadata_of(allreduce_grads(rows, devices))
    ends = ends_in(metadata)
    for number, times in enumerate(cost(metadata, graph).towers):
        last = max(end for node, end in ends if node.startswith(f"in_pass_of_{number}"))
        assert times.pass_end == pytest.approx(last, abs=TO_THE_MICROSECOND)


@STEP_ON_CPU
def test_the_current_graph_is_the_default(graph):
    assert len(cost(metadata_of(training_step())).towers) == 3


def test_one_tower_has_no_all_reduce(graph):
    metadata = metadata_of(training_step(towers=1))
    with pytest.raises(AuditError, match="no sum of an all-reduce of this graph"):
        cost(metadata, graph)


def test_a_step_without_a_trace_is_an_error_that_says_how_to_trace(graph):
    training_step()
    with pytest.raises(AuditError, match=r"run the step with options=.*FULL_TRACE"):
        cost(tf1.RunMetadata(), graph)


def test_a_run_without_the_all_reduce_is_an_error(graph):
    training_step()
    with pytest.raises(AuditError, match="no sum of an all-reduce of this graph"):
        cost(metadata_of(tf1.global_variables()), graph)


# ---- the hook ----------------------------------------------------------------------------------


class Seen(tf1.train.SessionRunHook):
    """Notes which runs were traced."""

    def __init__(self):
        self.traced = []

    def after_run(self, run_context, run_values):
        self.traced.append(bool(run_values.run_metadata.step_stats.dev_stats))


def train(steps, *hooks):
    with tf1.train.SingularMonitoredSession(hooks=list(hooks), config=config()) as sess:
        for _ in range(steps):
            sess.run(tf1.get_collection("step"))


@STEP_ON_CPU
def test_the_hook_traces_one_step_and_no_other(graph, tmp_path, capsys):
    tf1.add_to_collection("step", training_step())
    seen, hook = Seen(), CostHook(step=3, folder=tmp_path / "new" / "cost")
    assert hook.cost is None
    train(5, hook, seen)
    assert seen.traced == [False, False, True, False, False]
    assert hook.cost is not None and f"{hook.cost}\n" in capsys.readouterr().out
    written = tmp_path / "new" / "cost"
    assert json.loads((written / "cost.json").read_text())["step"] == hook.cost.step


@STEP_ON_CPU
def test_training_goes_on_if_the_hook_cannot_write(graph, tmp_path, capsys):
    (tmp_path / "file").touch()
    tf1.add_to_collection("step", training_step())
    train(3, CostHook(step=1, folder=tmp_path / "file"))
    assert (
        f"not told, or not written: [Errno 17] File exists: '{tmp_path}" in capsys.readouterr().out
    )


@STEP_ON_CPU
def test_the_hook_without_a_folder_writes_nothing(graph, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tf1.add_to_collection("step", training_step())
    train(2, CostHook(step=1))
    assert not list(tmp_path.iterdir())


def test_training_goes_on_if_the_step_has_no_cost(graph, capsys):
    training_step()
    tf1.add_to_collection("step", tf1.get_variable("w", [2], use_resource=True))
    hook = CostHook(step=1)
    train(2, hook)
    assert hook.cost is None
    assert "no sum of an all-reduce of this graph" in capsys.readouterr().out


@pytest.mark.parametrize("step", [0, -1])
def test_a_step_that_never_comes_is_an_error(step):
    with pytest.raises(HierAllreduceError, match=f"step={step}: steps are counted from 1"):
        CostHook(step)


@pytest.mark.parametrize("step", [1.5, "1"])
def test_a_step_is_a_whole_number(step):
    with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
        CostHook(step)
